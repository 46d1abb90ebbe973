"""Tabular MDPs: every exact number against an enumeration, a fixed-point iteration, finite differences or sampling."""

import math
from itertools import product

import pytest
import torch
from torch import tensor

from ppo_lab.policy_gradient import discounted_return, policy_gradient_loss, reward_to_go
from ppo_lab.tabular import TabularMDP, bandit, corridor, paid_door, two_state_chain

F64 = torch.float64


def _random_world(horizon=None, gamma=0.9, n_states=4, n_actions=3, seed=0, last_ends=True):
    """Every move is possible; the last state is terminal when asked. Logits come with it."""
    generator = torch.Generator().manual_seed(seed)
    transition = torch.rand(n_states, n_actions, n_states, generator=generator, dtype=F64)
    reward = torch.randn(n_states, n_actions, generator=generator, dtype=F64)
    start = torch.rand(n_states, generator=generator, dtype=F64)
    terminal = torch.arange(n_states) == (n_states - 1 if last_ends else n_states)
    start[terminal] = 0.0
    world = TabularMDP(
        transition / transition.sum(-1, keepdim=True), reward, start / start.sum(), gamma, terminal, horizon
    )
    return world, torch.randn(n_states, n_actions, generator=generator, dtype=F64)


# --- enumeration of every trajectory of a two-step world


def _trajectories(world, logits, steps):
    """(probability, [(s, a, r), …]) of all trajectories of at most `steps` steps, by plain recursion."""
    policy = torch.softmax(logits, -1).tolist()
    transition, reward = world.transition.tolist(), world.reward.tolist()
    n_states, n_actions = world.reward.shape

    def grow(probability, state, past):
        if len(past) == steps or world.terminal[state]:
            yield probability, past
            return
        for a, s in product(range(n_actions), range(n_states)):
            p = probability * policy[state][a] * transition[state][a][s]
            if p > 0:
                yield from grow(p, s, [*past, (state, a, reward[state][a])])

    for state, p in enumerate(world.start.tolist()):
        if p > 0:
            yield from grow(p, state, [])


@pytest.mark.parametrize("last_ends", [True, False])
@pytest.mark.formula("objective", "best-parameters")
def test_J_is_the_sum_over_all_trajectories(last_ends):
    world, logits = _random_world(horizon=2, gamma=0.8, last_ends=last_ends)
    trajectories = list(_trajectories(world, logits, steps=2))
    assert sum(p for p, _ in trajectories) == pytest.approx(1.0)
    expected = sum(p * sum(0.8**t * r for t, (_, _, r) in enumerate(path)) for p, path in trajectories)
    assert world.objective(logits).item() == pytest.approx(expected)


@pytest.mark.formula(
    "trajectory-probability", "score-of-a-trajectory", "log-derivative-1", "log-derivative-2", "log-derivative-3"
)
def test_gradient_of_J_is_score_times_return_summed_over_all_trajectories():
    world, logits = _random_world(horizon=2, gamma=0.8)
    policy = torch.softmax(logits, -1)
    expected = torch.zeros_like(logits)
    for p, path in _trajectories(world, logits, steps=2):
        total = sum(0.8**t * r for t, (_, _, r) in enumerate(path))
        for s, a, _ in path:
            score = -policy[s].clone()
            score[a] += 1
            expected[s] += p * total * score
    torch.testing.assert_close(world.objective_gradient(logits), expected)


@pytest.mark.formula("gradient-with-q")
def test_values_are_conditional_means_over_the_trajectories():
    world, logits = _random_world(horizon=2, gamma=0.8)
    reached, total, total_first_action = 0.0, 0.0, torch.zeros(2, dtype=F64)
    for p, path in _trajectories(world, logits, steps=2):
        if path[0][0] == 1:
            value = sum(0.8**t * r for t, (_, _, r) in enumerate(path))
            reached, total = reached + p, total + p * value
            if path[0][1] == 2:
                total_first_action += tensor([p, p * value], dtype=F64)
    v, q = world.state_values(logits), world.action_values(logits)
    assert v[1, 0].item() == pytest.approx(total / reached)
    assert q[1, 2, 0].item() == pytest.approx((total_first_action[1] / total_first_action[0]).item())
    assert world.advantages(logits)[1, 2, 0].item() == pytest.approx((q[1, 2, 0] - v[1, 0]).item())


def test_discounted_visits_are_counted_on_the_trajectories():
    world, logits = _random_world(horizon=3, gamma=0.8)
    expected = torch.zeros(4, 3, dtype=F64)
    for p, path in _trajectories(world, logits, steps=3):
        for t, (s, _, _) in enumerate(path):
            expected[s, t] += p * 0.8**t
    torch.testing.assert_close(world.discounted_visitation(logits), expected)
    undiscounted = (expected / tensor([1.0, 0.8, 0.64], dtype=F64)).sum(-1)
    torch.testing.assert_close(world.stationary_visitation(logits), undiscounted / undiscounted.sum())


# --- without a horizon


@pytest.mark.parametrize("last_ends", [True, False])
def test_values_are_the_fixed_point_of_the_bellman_equation(last_ends):
    world, logits = _random_world(last_ends=last_ends)
    policy = torch.softmax(logits, -1)
    v = [0.0] * 4
    for _ in range(400):
        v = [
            0.0
            if world.terminal[s]
            else sum(
                policy[s, a].item()
                * (world.reward[s, a].item() + 0.9 * sum(world.transition[s, a, z].item() * v[z] for z in range(4)))
                for a in range(3)
            )
            for s in range(4)
        ]
    assert world.state_values(logits).tolist() == pytest.approx(v)


def test_policy_average_of_Q_is_V_and_of_A_is_zero():
    world, logits = _random_world()
    policy = world.policy(logits)
    torch.testing.assert_close((policy * world.action_values(logits)).sum(-1), world.state_values(logits))
    torch.testing.assert_close((policy * world.advantages(logits)).sum(-1), torch.zeros(4, dtype=F64))


def test_terminal_state_has_no_value_no_visits_and_no_gradient():
    world, logits = _random_world()
    assert world.state_values(logits)[3] == 0
    assert world.action_values(logits)[3].tolist() == [0.0, 0.0, 0.0]
    assert world.discounted_visitation(logits)[3] == 0
    assert world.stationary_visitation(logits)[3] == pytest.approx(0.0, abs=1e-15)
    assert world.objective_gradient(logits)[3].tolist() == [0.0, 0.0, 0.0]


def test_J_is_the_visitation_weighted_reward():
    world, logits = _random_world()
    reward = (world.policy(logits) * world.reward).sum(-1)
    assert world.objective(logits).item() == pytest.approx((world.discounted_visitation(logits) @ reward).item())


def test_normalised_occupancy_of_an_endless_world_is_one_minus_gamma_times_the_visits():
    world, logits = _random_world(last_ends=False)
    assert world.discounted_visitation(logits).sum().item() == pytest.approx(1 / (1 - 0.9))


def test_a_long_horizon_is_no_horizon():
    endless, logits = _random_world(last_ends=False)
    long = TabularMDP(endless.transition, endless.reward, endless.start, endless.gamma, endless.terminal, horizon=300)
    torch.testing.assert_close(long.state_values(logits)[:, 0], endless.state_values(logits))
    torch.testing.assert_close(long.discounted_visitation(logits).sum(-1), endless.discounted_visitation(logits))
    torch.testing.assert_close(long.objective_gradient(logits), endless.objective_gradient(logits))


# --- gradients


@pytest.mark.parametrize("horizon", [None, 1, 5])
@pytest.mark.formula("gradient-with-advantage")
def test_policy_gradient_theorem_autograd_and_finite_differences_agree(horizon):
    world, logits = _random_world(horizon=horizon)
    theorem = world.objective_gradient(logits)
    leaf = logits.clone().requires_grad_()
    torch.testing.assert_close(torch.autograd.grad(world.objective(leaf), leaf)[0], theorem)
    for s, a in product(range(4), range(3)):
        bump = torch.zeros_like(logits)
        bump[s, a] = 1e-5
        difference = (world.objective(logits + bump) - world.objective(logits - bump)) / 2e-5
        assert difference.item() == pytest.approx(theorem[s, a].item(), abs=1e-9)


def test_gradient_is_finite_when_an_action_is_forbidden():
    world, logits = _random_world()
    logits[0, 1] = -math.inf
    leaf = logits.clone().requires_grad_()
    by_autograd = torch.autograd.grad(world.objective(leaf), leaf)[0]
    assert by_autograd[0, 1] == 0
    torch.testing.assert_close(by_autograd, world.objective_gradient(logits))


@pytest.mark.parametrize("horizon", [None, 3])
def test_surrogate_is_zero_at_the_old_policy_and_has_the_gradient_of_J_there(horizon):
    world, logits = _random_world(horizon=horizon)
    leaf = logits.clone().requires_grad_()
    value = world.surrogate(leaf, logits)
    assert value.item() == pytest.approx(0.0, abs=1e-14)
    torch.testing.assert_close(torch.autograd.grad(value, leaf)[0], world.objective_gradient(logits))


def test_difference_of_J_is_the_surrogate_with_the_new_visits():
    # The performance difference lemma: J(θ) − J(θ_old) = Σ_s d_θ(s) Σ_a π_θ(a|s) A_old(s, a).
    world, old = _random_world()
    new = old.roll(1, 0)
    exact = world.discounted_visitation(new)[:, None] * world.policy(new) * world.advantages(old)
    difference = (world.objective(new) - world.objective(old)).item()
    assert exact.sum().item() == pytest.approx(difference)
    assert world.surrogate(new, old).item() != pytest.approx(difference, rel=0.01)


# --- stationary_visitation


def test_uniform_walk_in_a_corridor_by_hand():
    # Expected visits per episode, last cell first: 2, 4, 6, 8; an episode takes 20 steps.
    world, logits = corridor(5, gamma=1.0), torch.zeros(5, 2)
    assert world.discounted_visitation(logits).tolist() == pytest.approx([8.0, 6.0, 4.0, 2.0, 0.0])
    assert world.stationary_visitation(logits).tolist() == pytest.approx([0.4, 0.3, 0.2, 0.1, 0.0])


def test_discount_moves_the_visits_towards_the_start():
    world, logits = corridor(5, gamma=0.9), torch.zeros(5, 2)
    occupancy = world.discounted_visitation(logits)
    assert world.stationary_visitation(logits).tolist() == pytest.approx([0.4, 0.3, 0.2, 0.1, 0.0])
    assert (occupancy / occupancy.sum())[0] > 0.47


def test_without_discount_the_long_run_share_is_the_share_of_expected_visits():
    # Starts are spread over three states here, so it matters that a new episode begins where the start says.
    world, logits = _random_world(gamma=1.0)
    visits = world.discounted_visitation(logits)
    torch.testing.assert_close(world.stationary_visitation(logits), visits / visits.sum())


def test_two_states_that_swap_at_different_rates():
    # Leaves state 0 with probability 0.1, state 1 with 0.3: three quarters of the time in state 0.
    transition = tensor([[[0.9, 0.1]], [[0.3, 0.7]]], dtype=F64)
    world = TabularMDP(transition, torch.zeros(2, 1), tensor([0.0, 1.0]), gamma=0.5)
    assert world.stationary_visitation(torch.zeros(2, 1)).tolist() == pytest.approx([0.75, 0.25])


def test_states_that_only_alternate_have_a_long_run_share_too():
    transition = tensor([[[0.0, 1.0]], [[1.0, 0.0]]])
    world = TabularMDP(transition, torch.zeros(2, 1), tensor([1.0, 0.0]), gamma=0.5)
    assert world.stationary_visitation(torch.zeros(2, 1)).tolist() == pytest.approx([0.5, 0.5])


def test_two_separate_parts_have_no_common_long_run_share():
    world = TabularMDP(torch.eye(2)[:, None], torch.zeros(2, 1), tensor([0.5, 0.5]), gamma=0.5)
    with pytest.raises(ValueError, match="one closed part"):
        world.stationary_visitation(torch.zeros(2, 1))


# --- the ready-made worlds


def test_bandit_returns_its_mean_reward_and_its_gradient():
    world = bandit([11.0, 12.0, 7.0])
    logits = tensor([[2.0, 0.0, -1.0]], dtype=F64)
    weights = [math.exp(2), 1.0, math.exp(-1)]
    policy = [w / sum(weights) for w in weights]
    j = sum(p * r for p, r in zip(policy, [11, 12, 7], strict=True))
    assert world.objective(logits).item() == pytest.approx(j)
    expected = [p * (r - j) for p, r in zip(policy, [11, 12, 7], strict=True)]
    assert world.objective_gradient(logits)[0].tolist() == pytest.approx(expected)


def test_bandit_keeps_the_digits_of_its_rewards():
    assert bandit([0.1]).objective(torch.zeros(1, 1)).item() == 0.1


def test_two_state_chain_by_hand():
    # p = ½ everywhere: V(1) = 0.75, V(0) = 0.5 + 0.5·0.75.
    world = two_state_chain(gamma=0.5)
    assert world.state_values(torch.zeros(3, 2)).tolist() == pytest.approx([0.875, 0.75, 0.0])
    assert world.action_values(torch.zeros(3, 2)).tolist() == [[0.375, 1.375], [1.5, 0.0], [0.0, 0.0]]


def test_paid_door_by_hand():
    # Opening pays when P(good) > 0.2.
    world = paid_door()
    logits = tensor([[0.0, 0.0], [0.0, math.log(4)], [0.0, 0.0]], dtype=F64)  # P(good) = 0.8
    assert world.state_values(logits).tolist() == pytest.approx([0.3, 0.8, 0.0])
    assert world.action_values(logits)[0].tolist() == pytest.approx([0.0, 0.6])


def test_corridor_walked_straight_is_worth_the_discounted_last_step():
    always_right = tensor([[-math.inf, 0.0]]).expand(6, 2)
    values = corridor(6, gamma=0.5).state_values(always_right)
    assert values.tolist() == pytest.approx([0.0625, 0.125, 0.25, 0.5, 1.0, 0.0])


def test_corridor_without_discount_is_always_worth_one():
    assert corridor(4, gamma=1.0).objective(torch.randn(4, 2)).item() == pytest.approx(1.0)
    with pytest.raises(ValueError, match="n must be at least 2, got 1"):
        corridor(1)


# --- sample


def test_samples_have_the_documented_shapes_and_types():
    sample = corridor(4).sample(torch.zeros(4, 2), n_episodes=7, max_steps=5, seed=0)
    assert all(x.shape == (7, 5) for x in sample)
    assert [x.dtype for x in sample] == [
        *(torch.int64, torch.int64, torch.float64),
        *(torch.bool, torch.bool, torch.bool, torch.int64),
    ]


def test_an_episode_is_one_unbroken_path_that_ends_once():
    world = corridor(4)
    sample = world.sample(torch.zeros(4, 2), n_episodes=500, max_steps=12, seed=0)
    counted = sample.mask
    assert counted[:, 0].all()
    assert not (counted[:, 1:] & ~counted[:, :-1]).any()
    goes_on = counted[:, 1:]
    assert torch.equal(sample.next_states[:, :-1][goes_on], sample.states[:, 1:][goes_on])
    ends = sample.terminated | sample.truncated
    assert (ends.sum(-1) == 1).all()
    assert torch.equal(ends.float().argmax(-1), counted.sum(-1) - 1)
    assert torch.equal(sample.terminated, (sample.next_states == 3) & counted)
    assert torch.equal(sample.truncated.any(-1), ~sample.terminated.any(-1))
    assert not sample.truncated[:, :-1].any()
    assert sample.truncated.any()
    assert torch.equal(sample.rewards, (sample.terminated).double())


def test_what_the_mask_hides_is_zero():
    sample = corridor(3).sample(torch.zeros(3, 2), n_episodes=100, max_steps=20, seed=0)
    assert not sample.mask.all()
    for x in sample:
        assert not x[~sample.mask].any()


def test_reaching_the_horizon_is_an_end_and_stopping_earlier_is_a_cut():
    world, logits = _random_world(horizon=3, last_ends=False)
    whole = world.sample(logits, n_episodes=10, max_steps=6, seed=0)
    assert whole.mask.sum(-1).tolist() == [3] * 10
    assert whole.terminated[:, 2].all()
    assert not whole.truncated.any()
    short = world.sample(logits, n_episodes=10, max_steps=2, seed=0)
    assert short.truncated[:, 1].all()
    assert not short.terminated.any()


def test_the_seed_decides_the_sample():
    world, logits = _random_world()
    first, again, other = (world.sample(logits, 50, 10, seed) for seed in (3, 3, 4))
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
    assert not torch.equal(first.actions, other.actions)


def test_sampling_leaves_the_global_random_state_alone():
    world, logits = _random_world()
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    world.sample(logits, 5, 5, seed=1)
    assert torch.equal(torch.rand(3), expected)


def test_starts_actions_and_moves_have_the_frequencies_of_the_tables():
    world, logits = _random_world()
    sample = world.sample(logits, n_episodes=20_000, max_steps=3, seed=0)

    def z(hits, probability, n):
        return abs(hits - n * probability) / math.sqrt(n * probability * (1 - probability))

    for s in range(3):
        here = sample.mask & (sample.states == s)
        assert z((sample.states[:, 0] == s).sum().item(), world.start[s].item(), 20_000) < 4.5
        for a in range(3):
            acted = here & (sample.actions == a)
            assert z(acted.sum().item(), world.policy(logits)[s, a].item(), here.sum().item()) < 4.5
            assert (sample.rewards[acted] == world.reward[s, a]).all()
            for following in range(4):
                moved = (acted & (sample.next_states == following)).sum().item()
                assert z(moved, world.transition[s, a, following].item(), acted.sum().item()) < 4.5


@pytest.mark.formula("reinforce")
def test_sampled_returns_and_gradients_agree_with_the_exact_ones():
    world, logits = _random_world(horizon=4, gamma=0.9)
    n = 20_000
    sample = world.sample(logits, n_episodes=n, max_steps=4, seed=0)

    returns = discounted_return(sample.rewards, 0.9)
    assert abs(returns.mean() - world.objective(logits)) < 4 * returns.std() / math.sqrt(n)

    to_go = reward_to_go(sample.rewards, 0.9, terminated=sample.terminated, mask=sample.mask)
    weights = 0.9 ** torch.arange(4) * to_go
    leaf = logits.clone().requires_grad_()
    logp = torch.log_softmax(leaf, -1)[sample.states, sample.actions]
    loss = policy_gradient_loss(logp, weights, sample.mask)
    # The loss is a mean over steps, J a mean over episodes.
    estimate = -torch.autograd.grad(loss, leaf)[0] * sample.mask.sum() / n

    score = torch.nn.functional.one_hot(sample.actions, 3) - torch.softmax(logits, -1)[sample.states]
    terms = (weights * sample.mask)[..., None] * score
    for s in range(3):
        per_episode = (terms * (sample.states == s)[..., None]).sum(1)
        standard_error = per_episode.std(0) / math.sqrt(n)
        assert ((estimate[s] - world.objective_gradient(logits)[s]).abs() < 4.5 * standard_error).all()


def test_long_rollouts_take_their_states_from_the_stationary_visitation():
    world, logits = corridor(5), torch.zeros(5, 2)
    sample = world.sample(logits, n_episodes=4_000, max_steps=400, seed=0)
    assert sample.terminated.any(-1).all()
    share = torch.bincount(sample.states[sample.mask], minlength=5) / sample.mask.sum()
    assert share.tolist() == pytest.approx([0.4, 0.3, 0.2, 0.1, 0.0], abs=0.01)


# --- arguments


def test_tables_may_be_single_precision_and_logits_too():
    world = TabularMDP(torch.ones(1, 2, 1), tensor([[0.0, 1.0]]), torch.ones(1), gamma=0.5)
    assert world.objective(torch.zeros(1, 2)).dtype == torch.float64
    assert world.objective(torch.zeros(1, 2)).item() == pytest.approx(1.0)


def test_rows_of_a_terminal_state_are_never_read():
    nan = math.nan
    transition = tensor([[[0.0, 1.0]], [[nan, nan]]])
    world = TabularMDP(transition, tensor([[2.0], [nan]]), tensor([1.0, 0.0]), gamma=1.0, terminal=tensor([0, 1]))
    assert world.objective(torch.zeros(2, 1)).item() == 2.0
    assert world.action_values(torch.zeros(2, 1)).tolist() == [[2.0], [0.0]]
    assert world.stationary_visitation(torch.zeros(2, 1)).tolist() == pytest.approx([1.0, 0.0])
    assert world.sample(torch.zeros(2, 1), 3, 2, seed=0).rewards.tolist() == [[2.0, 0.0]] * 3


GOOD = {
    "transition": torch.full((2, 3, 2), 0.5),
    "reward": torch.zeros(2, 3),
    "start": tensor([1.0, 0.0]),
    "gamma": 0.9,
}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"reward": torch.zeros(2)}, r"reward must have shape \[S, A\], got \(2,\)"),
        ({"transition": torch.full((2, 2, 3), 0.5)}, r"transition must have shape \(2, 3, 2\).*got \(2, 2, 3\)"),
        ({"start": torch.ones(3) / 3}, r"start must have shape \(2,\)"),
        ({"terminal": torch.zeros(3)}, r"terminal must have shape \(2,\)"),
        ({"transition": torch.full((2, 3, 2), 0.4)}, "transition must hold probabilities"),
        ({"transition": tensor([1.5, -0.5]).expand(2, 3, 2)}, "transition must hold probabilities"),
        ({"transition": torch.full((2, 3, 2), math.nan)}, "transition must hold probabilities"),
        ({"start": tensor([0.5, 0.4])}, "start must hold probabilities"),
        ({"start": tensor([0.5, 0.5]), "terminal": tensor([False, True])}, "start must give terminal states"),
        ({"gamma": 1.5}, "gamma"),
        ({"horizon": 0}, "horizon"),
        ({"gamma": 1.0}, "gamma must be below 1, or a horizon given"),
    ],
)
def test_tables_that_make_no_sense_are_refused(changed, message):
    TabularMDP(**GOOD)
    with pytest.raises(ValueError, match=message):
        TabularMDP(**{**GOOD, **changed})


def test_gamma_one_is_allowed_when_every_state_can_reach_an_end():
    TabularMDP(**{**GOOD, "gamma": 1.0, "terminal": tensor([False, True])})
    TabularMDP(**{**GOOD, "gamma": 1.0, "horizon": 3})


def test_logits_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"logits \(2, 2\), reward \(3, 2\)"):
        paid_door().objective(torch.zeros(2, 2))


@pytest.mark.parametrize("name", ["n_episodes", "max_steps"])
def test_counts_below_one_are_refused(name):
    with pytest.raises(ValueError, match=name):
        paid_door().sample(torch.zeros(3, 2), **{"n_episodes": 1, "max_steps": 1, "seed": 0, name: 0})
