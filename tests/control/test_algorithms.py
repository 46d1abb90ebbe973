"""What each algorithm learns from, and what its update must and must not do."""

import math

import pytest
import torch

from ppo_lab.control import algorithms
from ppo_lab.control.algorithms import UPDATES, Batch, estimate, gradient_step, make_learner, minibatches
from ppo_lab.control.config import ALGORITHMS, Settings
from ppo_lab.control.envs import make_envs
from ppo_lab.control.rollout import Rollout, Scores, action_logp, collect, score


def cartpole(settings):
    """A fresh learner and the batch of its first rollout in CartPole."""
    envs = make_envs("CartPole-v1", settings.num_envs)
    learner = make_learner(envs.state_dim, envs.action_dim, settings)
    rollout, _ = collect(envs, learner.network, envs.reset(settings.seed), settings.n_steps, learner.generator)
    return learner, estimate(rollout, score(learner.network, rollout), settings)


def small(algorithm="ppo", **changes):
    return Settings(**{"algorithm": algorithm, "num_envs": 4, "n_steps": 32, "minibatch_size": 32, **changes})


def parameters_of(learner):
    return torch.cat([p.detach().flatten() for p in learner.network.parameters()])


# One environment, made by hand: an episode of three steps that terminates, the step that resets, an episode of two cut
# by a time limit, the step that resets, and two steps of an episode that is still under way.
HAND = Rollout(
    states=torch.arange(10.0).reshape(1, 10, 1),
    actions=torch.zeros(1, 9, dtype=torch.int64),
    rewards=torch.tensor([[1.0, 2, 4, 0, 8, 16, 0, 32, 64]]),
    terminated=torch.tensor([[0, 0, 1, 0, 0, 0, 0, 0, 0]]).bool(),
    truncated=torch.tensor([[0, 0, 0, 0, 0, 1, 0, 0, 0]]).bool(),
    mask=torch.tensor([[1, 1, 1, 0, 1, 1, 0, 1, 1]]).bool(),
)
HAND_SCORES = Scores(
    logits=torch.zeros(1, 9, 2),
    logp=torch.full((1, 9), -math.log(2)),
    values=torch.tensor([[10.0, 20, 30, 999, 40, 50, 999, 60, 70]]),
    next_values=torch.tensor([[20.0, 30, 999, 999, 50, 80, 999, 70, 90]]),
)


def test_reinforce_leaves_out_the_episode_that_has_not_ended():
    batch = estimate(HAND, HAND_SCORES, Settings(algorithm="reinforce", gamma=0.5))
    assert batch.states[:, 0].tolist() == [0, 1, 2, 4, 5]
    # 1 + 2/2 + 4/4, 2 + 4/2, 4, then 8 + 16/2, 16.
    assert batch.returns.tolist() == [3, 4, 4, 16, 16]
    assert batch.advantages.tolist() == [3, 4, 4, 16, 16]


def test_the_baseline_is_the_value():
    batch = estimate(HAND, HAND_SCORES, Settings(algorithm="reinforce-baseline", gamma=0.5))
    assert batch.advantages.tolist() == [3 - 10, 4 - 20, 4 - 30, 16 - 40, 16 - 50]
    assert batch.returns.tolist() == [3, 4, 4, 16, 16]


@pytest.mark.parametrize("algorithm", ["ppo", "ppo-penalty", "trpo", "a2c"])
def test_with_a_critic_every_step_counts_and_cuts_are_bootstrapped(algorithm):
    batch = estimate(HAND, HAND_SCORES, Settings(algorithm=algorithm, gamma=0.5, gae_lambda=0.0))
    assert batch.states[:, 0].tolist() == [0, 1, 2, 4, 5, 7, 8]
    # λ = 0: r + γ·V(next) − V. Nothing after the termination; V = 80 at the time limit, 90 at the end of the rollout.
    expected = [1 + 10 - 10, 2 + 15 - 20, 4 - 30, 8 + 25 - 40, 16 + 40 - 50, 32 + 35 - 60, 64 + 45 - 70]
    assert batch.advantages.tolist() == expected
    assert batch.returns.tolist() == [a + v for a, v in zip(expected, [10, 20, 30, 40, 50, 60, 70], strict=True)]


def test_the_lambda_sum_stops_at_terminations_and_time_limits():
    batch = estimate(HAND, HAND_SCORES, Settings(gamma=0.5, gae_lambda=1.0))
    # λ = 1: all rewards of the episode, and the value where it was cut.
    g = [1 + 1 + 1, 2 + 2, 4, 8 + 8 + 20, 16 + 40, 32 + 32 + 22.5, 64 + 45]
    assert batch.returns.tolist() == g


@pytest.mark.parametrize("algorithm", ["reinforce", "ppo"])
def test_reward_scale_multiplies_the_rewards_alone(algorithm):
    batch = estimate(HAND, HAND_SCORES, Settings(algorithm=algorithm, gamma=0.5, gae_lambda=0.0, reward_scale=0.25))
    by_hand = {"reinforce": [0.75, 1, 1, 4, 4], "ppo": [0.25 + 10, 0.5 + 15, 1, 2 + 25, 4 + 40, 8 + 35, 16 + 45]}
    assert batch.returns.tolist() == by_hand[algorithm]


def test_advantages_can_be_whitened_over_the_whole_rollout():
    raw = estimate(HAND, HAND_SCORES, Settings(gamma=0.5)).advantages
    white = estimate(HAND, HAND_SCORES, Settings(gamma=0.5, whiten="rollout")).advantages
    torch.testing.assert_close(white, (raw - raw.mean()) / raw.std())


def test_minibatches_are_a_shuffled_partition_with_their_columns_together():
    n = torch.arange(10.0)
    batch = Batch(n[:, None], n.long(), n[:, None].repeat(1, 2), n, n, n, n)
    parts = list(minibatches(batch, 4, torch.Generator().manual_seed(0)))
    assert [len(part.actions) for part in parts] == [4, 4, 2]
    order = torch.cat([part.actions for part in parts])
    assert sorted(order.tolist()) == list(range(10)) != order.tolist()
    for part in parts:
        for column in (part.states[:, 0], part.logits[:, 1], part.logp, part.values, part.advantages, part.returns):
            assert torch.equal(column, part.actions.float())


def test_the_first_weights_follow_from_the_seed_and_leave_the_global_random_numbers_alone():
    before = torch.random.get_rng_state()
    first, second, other = (parameters_of(make_learner(4, 2, Settings(seed=seed))) for seed in (1, 1, 2))
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("algorithm", ["ppo", "ppo-penalty", "a2c", "reinforce", "reinforce-baseline"])
def test_B20_the_first_minibatch_has_ratio_one(algorithm):
    learner, batch = cartpole(small(algorithm))
    first = UPDATES[algorithm](learner, batch, small(algorithm))[0]
    assert abs(first.ratio_max - 1) < 1e-5 and abs(first.ratio_mean - 1) < 1e-5
    assert first.clip_fraction == first.clip_fraction_outside == 0
    assert first.approx_kl < 1e-6


def test_B20_with_whitened_advantages_the_first_policy_loss_is_zero():
    learner, batch = cartpole(small())
    assert abs(UPDATES["ppo"](learner, batch, small())[0].policy) < 1e-6


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_B10_a_last_minibatch_of_one_step_stays_finite(algorithm):
    settings = small(algorithm, num_envs=1, n_steps=60, minibatch_size=4)
    learner, batch = cartpole(settings)
    five = Batch(*(column[:5] for column in batch))
    before = parameters_of(learner)
    losses = UPDATES[algorithm](learner, five, settings)
    assert all(torch.isfinite(torch.stack(loss)).all() for loss in losses)
    assert torch.isfinite(parameters_of(learner)).all()
    assert not torch.equal(parameters_of(learner), before)


@pytest.mark.parametrize("algorithm", ["ppo", "ppo-penalty", "trpo", "a2c"])
def test_B10_a_rollout_of_one_step_stays_finite(algorithm):
    settings = small(algorithm, num_envs=1, n_steps=1)
    learner, batch = cartpole(settings)
    UPDATES[algorithm](learner, batch, settings)
    assert torch.isfinite(parameters_of(learner)).all()


@pytest.mark.parametrize("algorithm", ["reinforce", "reinforce-baseline"])
def test_reinforce_waits_when_no_episode_has_ended(algorithm):
    settings = small(algorithm, num_envs=1, n_steps=3)
    learner, batch = cartpole(settings)
    before = parameters_of(learner)
    assert UPDATES[algorithm](learner, batch, settings) == []
    assert torch.equal(parameters_of(learner), before)


def test_B16_the_step_over_the_limit_is_refused_and_so_are_all_later_ones(monkeypatch):
    settings = small(stop_kl=0.0225, k_epochs=3)
    learner, batch = cartpole(settings)
    measured = iter([0.010, 0.020, 0.030] + [0.001] * 20)
    loss_of, asked, stepped = algorithms.ppo_loss, [], []

    def scripted(*args, **kwargs):
        asked.append(1)
        return loss_of(*args, **kwargs)._replace(approx_kl=torch.tensor(next(measured)))

    monkeypatch.setattr(algorithms, "ppo_loss", scripted)
    learner.optimizer.register_step_post_hook(lambda *_: stepped.append(1))
    losses = UPDATES["ppo"](learner, batch, settings)
    assert (len(asked), len(stepped), len(losses)) == (3, 2, 2)
    assert [round(loss.approx_kl.item(), 3) for loss in losses] == [0.010, 0.020]


def test_without_a_limit_every_minibatch_of_every_epoch_is_used():
    settings = small(k_epochs=3, minibatch_size=50)
    learner, batch = cartpole(settings)
    assert len(UPDATES["ppo"](learner, batch, settings)) == 3 * math.ceil(len(batch.actions) / 50)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_reward_that_is_not_finite_stops_before_any_parameter_has_moved(algorithm, bad):
    settings = small(algorithm, n_steps=64, minibatch_size=8)
    envs = make_envs("CartPole-v1", settings.num_envs)
    learner = make_learner(4, 2, settings)
    rollout, _ = collect(envs, learner.network, envs.reset(0), settings.n_steps, learner.generator)
    # The first step: no other step's advantage depends on it, so that most minibatches are sound.
    rollout.rewards[0, 0] = bad
    before = parameters_of(learner)
    with pytest.raises(ValueError, match="the update was stopped: advantages must be finite"):
        UPDATES[algorithm](learner, estimate(rollout, score(learner.network, rollout), settings), settings)
    assert torch.equal(parameters_of(learner), before)


def test_a_reward_that_is_not_finite_where_the_environment_only_reset_is_no_matter():
    rollout = HAND._replace(rewards=HAND.rewards.clone())
    rollout.rewards[~rollout.mask] = math.nan
    for algorithm in ALGORITHMS:
        settings = Settings(algorithm=algorithm)
        clean, spoilt = (estimate(r, HAND_SCORES, settings) for r in (HAND, rollout))
        assert all(torch.equal(a, b) for a, b in zip(clean, spoilt, strict=True))


def test_a_loss_that_is_not_finite_moves_nothing():
    learner = make_learner(4, 2, Settings())
    before = parameters_of(learner)
    loss = learner.network(torch.ones(1, 4))[1].sum() * math.inf
    with pytest.raises(ValueError, match="the update was stopped: loss"):
        gradient_step(learner, loss, 0.5)
    assert torch.equal(parameters_of(learner), before)


def test_the_gradient_is_scaled_down_to_the_limit_and_its_norm_before_that_is_returned():
    learner = make_learner(4, 2, Settings())
    norm = gradient_step(learner, 1000 * learner.network(torch.ones(8, 4))[1].sum(), 0.5)
    assert norm > 0.5
    kept = torch.cat([p.grad.flatten() for p in learner.network.parameters() if p.grad is not None])
    assert kept.norm().item() == pytest.approx(0.5, rel=1e-4)


def test_ppo_raises_the_probability_of_the_better_actions():
    settings = small(n_steps=128, entropy_coef=0.0)
    learner, batch = cartpole(settings)
    UPDATES["ppo"](learner, batch, settings)
    moved = action_logp(learner.network.logits(batch.states), batch.actions).detach() - batch.logp
    better = batch.advantages > batch.advantages.mean()
    assert moved[better].mean() > 0 > moved[~better].mean()


def kl_after(learner, batch):
    """KL(old ‖ new), mean over states, written out."""
    old = batch.logits.double().softmax(-1)
    new = learner.network.logits(batch.states).detach().double().softmax(-1)
    return (old * (old / new).log()).sum(-1).mean().item()


@pytest.mark.parametrize("target_kl", [0.001, 0.01, 0.1])
def test_trpo_moves_the_policy_and_stays_inside_the_trust_region(target_kl):
    settings = small("trpo", n_steps=128, target_kl=target_kl)
    learner, batch = cartpole(settings)
    UPDATES["trpo"](learner, batch, settings)
    assert 0.1 * target_kl < kl_after(learner, batch) <= target_kl


def test_trpo_fits_the_value_without_moving_the_policy_again():
    settings = small("trpo", n_steps=128, k_epochs=20, lr=1e-3)
    learner, batch = cartpole(settings)
    optimised = learner.optimizer.param_groups[0]["params"]
    assert set(optimised) == set(learner.network.critic_parameters())
    before = (learner.network(batch.states)[1] - batch.returns).square().mean()
    UPDATES["trpo"](learner, batch, settings)
    after = (learner.network(batch.states)[1] - batch.returns).square().mean()
    assert after < 0.9 * before


def test_the_penalty_doubles_after_a_large_kl_and_halves_after_a_small_one():
    for lr, beta in ((0.05, 2.0), (1e-6, 0.5)):
        settings = small("ppo-penalty", lr=lr, kl_coef=1.0, target_kl=0.01)
        learner, batch = cartpole(settings)
        UPDATES["ppo-penalty"](learner, batch, settings)
        assert (kl_after(learner, batch) > 0.015) == (beta == 2.0)
        assert learner.penalty.kl_coef == beta


def test_a_larger_penalty_keeps_the_policy_nearer():
    moved = []
    for beta in (0.01, 100.0):
        settings = small("ppo-penalty", n_steps=128, lr=3e-3, kl_coef=beta)
        learner, batch = cartpole(settings)
        UPDATES["ppo-penalty"](learner, batch, settings)
        moved.append(kl_after(learner, batch))
    assert moved[1] < 0.1 * moved[0]


@pytest.mark.parametrize("algorithm", ["a2c", "reinforce", "reinforce-baseline"])
def test_one_rollout_is_one_gradient_step_along_the_policy_gradient(algorithm):
    settings = small(algorithm, n_steps=64, whiten="none", value_coef=0.0, entropy_coef=0.0, max_grad_norm=1e9)
    learner, batch = cartpole(settings)
    expected = 0
    for state, action, weight in zip(batch.states, batch.actions, batch.advantages, strict=True):
        logp = learner.network.logits(state).log_softmax(-1)[action]
        gradients = torch.autograd.grad(logp, learner.network.policy_parameters())
        expected = expected - weight * torch.cat([g.flatten() for g in gradients]) / len(batch.actions)
    assert len(UPDATES[algorithm](learner, batch, settings)) == 1
    got = torch.cat([p.grad.flatten() for p in learner.network.policy_parameters()])
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_update_reports_the_loss_it_took(algorithm):
    settings = small(algorithm, value_coef=0.7, entropy_coef=0.03)
    learner, batch = cartpole(settings)
    for loss in UPDATES[algorithm](learner, batch, settings):
        total = loss.policy + 0.7 * loss.value - 0.03 * loss.entropy
        torch.testing.assert_close(loss.total, total)
        assert 0 < loss.entropy <= math.log(2) + 1e-6
        assert not any(number.requires_grad for number in loss)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_same_seed_gives_the_same_parameters(algorithm):
    ends = []
    for _ in range(2):
        settings = small(algorithm, seed=5)
        learner, batch = cartpole(settings)
        UPDATES[algorithm](learner, batch, settings)
        ends.append(parameters_of(learner))
    assert torch.equal(*ends)


def test_there_is_an_update_for_every_algorithm():
    assert set(UPDATES) == set(ALGORITHMS)
