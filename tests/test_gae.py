"""Advantage estimates, against sums written out term by term."""

import inspect
import math

import pytest
import torch

from ppo_lab.gae import compute_gae, gae, monte_carlo_advantage, n_step_advantage, td_residual

NAN, INF = math.nan, math.inf


def row(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


def literal_gae(rewards, values, next_values, gamma, gae_lambda, terminated, truncated, mask):
    """Â_t = Σ_l (γλ)^l δ_{t+l} of one row, in Python numbers; l counts the valid steps up to the end of the episode."""
    valid = [t for t in range(len(rewards)) if mask[t]]
    advantages = [0.0] * len(rewards)
    for i, t in enumerate(valid):
        for power, s in enumerate(valid[i:]):
            following = 0.0 if terminated[s] else next_values[s]
            delta = rewards[s] + gamma * following - values[s]
            advantages[t] += (gamma * gae_lambda) ** power * delta
            if terminated[s] or truncated[s]:
                break
    return advantages


def literal_n_step(rewards, values, next_values, n, gamma, terminated, truncated):
    """Â_t^(n) = Σ_{l<n} γ^l r_{t+l} + γ^n V − V(s_t) of one row, stopping where the episode does."""
    advantages = []
    for t in range(len(rewards)):
        total = -values[t]
        for power in range(n):
            s = t + power
            total += gamma**power * rewards[s]
            if power == n - 1 or terminated[s] or truncated[s] or s == len(rewards) - 1:
                total += 0.0 if terminated[s] else gamma ** (power + 1) * next_values[s]
                break
        advantages.append(total)
    return advantages


def random_world(seed, shape=(4, 9), consistent=False):
    """Rewards, values, next_values, terminated, truncated [N, T]; consistent: next_values[t] is values[t+1]."""
    generator = torch.Generator().manual_seed(seed)
    rewards, values, next_values = torch.randn((3, *shape), generator=generator, dtype=torch.float64)
    terminated, truncated = torch.rand((2, *shape), generator=generator) < 0.2
    if consistent:
        next_values[..., :-1] = values[..., 1:]
    return rewards, values, next_values, terminated, truncated


SETTINGS = [(0.9, 0.8), (0.99, 0.95), (1.0, 1.0), (0.9, 0.0), (0.0, 0.9), (1.0, 0.95)]


@pytest.mark.parametrize("gamma, gae_lambda", SETTINGS)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.formula("gae", "resummation-3", "a07-gae")
def test_gae_is_the_discounted_sum_of_deltas(seed, gamma, gae_lambda):
    rewards, values, next_values, terminated, truncated = random_world(seed)
    mask = torch.rand(rewards.shape, generator=torch.Generator().manual_seed(seed)) < 0.7
    advantages, returns = gae(
        rewards,
        values,
        next_values,
        gamma=gamma,
        gae_lambda=gae_lambda,
        terminated=terminated,
        truncated=truncated,
        mask=mask,
    )
    for n in range(len(rewards)):
        columns = [x[n].tolist() for x in (rewards, values, next_values)]
        flags = [x[n].tolist() for x in (terminated, truncated, mask)]
        expected = literal_gae(*columns, gamma, gae_lambda, *flags)
        assert advantages[n].tolist() == pytest.approx(expected, abs=1e-12)
    torch.testing.assert_close(returns, advantages + values * mask)


@pytest.mark.formula("td-residual")
def test_lambda_0_is_the_one_step_error():
    rewards, values, next_values, terminated, truncated = random_world(0)
    advantages, _ = gae(
        rewards, values, next_values, gamma=0.9, gae_lambda=0, terminated=terminated, truncated=truncated
    )
    torch.testing.assert_close(advantages, td_residual(rewards, values, next_values, 0.9, terminated=terminated))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.formula("monte-carlo-advantage")
def test_lambda_1_is_the_monte_carlo_advantage(seed):
    rewards, values, next_values, terminated, truncated = random_world(seed, consistent=True)
    flags = {"terminated": terminated, "truncated": truncated}
    advantages, returns = gae(rewards, values, next_values, gamma=0.9, gae_lambda=1, **flags)
    monte_carlo = monte_carlo_advantage(rewards, values, 0.9, next_values=next_values, **flags)
    torch.testing.assert_close(advantages, monte_carlo)
    # The values of the steps themselves have cancelled: only rewards and the values at the ends are left.
    elsewhere = gae(rewards, values + 7, next_values, gamma=0.9, gae_lambda=0, **flags)[1]
    torch.testing.assert_close(returns, monte_carlo + values)
    assert not torch.allclose(returns, elsewhere)


@pytest.mark.formula("telescoping")
def test_Q2_the_telescoping_sum_keeps_the_value_behind_the_last_step():
    generator = torch.Generator().manual_seed(0)
    rewards = torch.randn(6, generator=generator, dtype=torch.float64)
    values = torch.randn(7, generator=generator, dtype=torch.float64)
    total = compute_gae(rewards, values, 0.97, 1.0)[0][0]
    discounted = sum(0.97**t * rewards[t] for t in range(6))
    assert total.item() == pytest.approx((discounted + 0.97**6 * values[6] - values[0]).item())
    assert total.item() != pytest.approx((discounted - values[0]).item(), abs=1e-3)


def test_one_step():
    advantages, returns = gae(row(2.0), row(0.5), row(3.0), gamma=0.9, gae_lambda=0.8)
    assert advantages.item() == pytest.approx(2 + 2.7 - 0.5)
    assert returns.item() == pytest.approx(4.7)


def test_no_step_at_all():
    empty = torch.zeros(3, 0)
    advantages, returns = gae(empty, empty, empty, gamma=0.9, gae_lambda=0.8)
    assert advantages.shape == returns.shape == (3, 0)


def test_a_critic_that_is_right_leaves_no_advantage():
    # Reward 1 at every step and γ = 0.9 for ever: V = 10 everywhere, cut after five steps.
    values = torch.full((5,), 10.0)
    truncated = torch.tensor([0, 0, 0, 0, 1])
    advantages, _ = gae(torch.ones(5), values, values, gamma=0.9, gae_lambda=0.95, truncated=truncated)
    assert advantages.abs().max() < 1e-5
    # A time limit taken for a death: the last step looks nine too bad, and the fault spreads backwards.
    as_death, _ = gae(torch.ones(5), values, values, gamma=0.9, gae_lambda=0.95, terminated=truncated)
    assert as_death[-1].item() == pytest.approx(-9)
    assert as_death[0].item() == pytest.approx(-9 * (0.9 * 0.95) ** 4)


def test_termination_wins_when_both_flags_are_set():
    both = torch.tensor([0, 1, 0])
    world = row(1.0, 1.0, 1.0), row(0.5, 0.4, 0.3), row(0.4, 50.0, 0.2)
    settings = {"gamma": 0.9, "gae_lambda": 0.8}
    advantages, _ = gae(*world, terminated=both, truncated=both, **settings)
    # δ = 0.86, 0.6, 0.88; the second episode does not reach the first.
    assert advantages.tolist() == pytest.approx([0.86 + 0.72 * 0.6, 0.6, 0.88])
    assert advantages.tolist() == gae(*world, terminated=both, **settings)[0].tolist()


def test_a_truncated_step_bootstraps_and_ends_the_sum():
    truncated = torch.tensor([0, 1, 0])
    world = row(1.0, 1.0, 1.0), row(0.5, 0.4, 0.3), row(0.4, 2.0, 0.2)
    advantages, _ = gae(*world, gamma=0.9, gae_lambda=0.8, truncated=truncated)
    # δ = 0.86, 1 + 1.8 − 0.4 = 2.4, 0.88
    assert advantages.tolist() == pytest.approx([0.86 + 0.72 * 2.4, 2.4, 0.88])


@pytest.mark.parametrize("nothing", [NAN, INF])
def test_the_value_behind_a_terminal_state_may_be_anything(nothing):
    terminated = torch.tensor([False, True])
    advantages, _ = gae(row(1.0, 2.0), row(0.5, 0.5), row(0.5, nothing), gamma=1, gae_lambda=1, terminated=terminated)
    assert advantages.tolist() == [2.5, 1.5]
    n_step = n_step_advantage(row(1.0, 2.0), row(0.5, 0.5), row(0.5, nothing), 2, 1.0, terminated=terminated)
    assert n_step.tolist() == [2.5, 1.5]


@pytest.mark.parametrize("hidden", [NAN, INF, -INF])
def test_what_the_mask_hides_reaches_nothing(hidden):
    mask = torch.tensor([[1, 1, 1, 0], [0, 1, 0, 1]])
    rewards, values = torch.randn((2, 2, 4), generator=torch.Generator().manual_seed(1))
    next_values = torch.zeros(2, 4)
    clean = gae(rewards, values, next_values, gamma=0.9, gae_lambda=0.8, mask=mask)
    dirty = [x.masked_fill(mask == 0, hidden) for x in (rewards, values, next_values)]
    flags = {name: torch.zeros(2, 4).masked_fill(mask == 0, hidden) for name in ("terminated", "truncated")}
    result = gae(*dirty, gamma=0.9, gae_lambda=0.8, mask=mask, **flags)
    for ours, expected in zip(result, clean, strict=True):
        assert ours.tolist() == expected.tolist()
        assert (ours[mask == 0] == 0).all()


def test_a_nan_that_counts_stays_visible():
    advantages, returns = gae(row(1.0, NAN, 1.0), row(0, 0, 0), row(0, 0, 0), gamma=0.9, gae_lambda=0.8)
    assert advantages.isnan().tolist() == returns.isnan().tolist() == [True, True, False]


def test_a_gap_inside_a_row_is_skipped_as_if_it_were_not_there():
    short = row(0.1, 0.2, 1.0), row(0.3, 0.4, 0.5), row(0.4, 0.5, 0.0)
    advantages, returns = gae(*short, gamma=0.9, gae_lambda=0.8)
    mask = torch.tensor([1, 0, 0, 1, 1])
    long = [torch.full((5,), 99.0, dtype=torch.float64).masked_scatter(mask.bool(), x) for x in short]
    with_gap = gae(*long, gamma=0.9, gae_lambda=0.8, mask=mask)
    assert with_gap[0][mask.bool()].tolist() == advantages.tolist()
    assert with_gap[1][mask.bool()].tolist() == returns.tolist()


def test_rows_do_not_depend_on_their_padding_or_their_neighbours():
    rewards, values, next_values, terminated, _ = random_world(3)
    settings = {"gamma": 0.99, "gae_lambda": 0.95}
    alone = gae(rewards[1, :5], values[1, :5], next_values[1, :5], terminated=terminated[1, :5], **settings)[0]
    mask = torch.arange(9) < torch.tensor([[9], [5], [1], [0]])
    together = gae(rewards, values, next_values, terminated=terminated, mask=mask, **settings)[0]
    assert together[1].tolist() == [*alone.tolist(), 0.0, 0.0, 0.0, 0.0]


def test_any_leading_shape():
    rewards, values, next_values, terminated, truncated = random_world(5, shape=(2, 3, 7))
    flags = {"terminated": terminated, "truncated": truncated}
    whole = gae(rewards, values, next_values, gamma=0.9, gae_lambda=0.8, **flags)[0]
    for i in range(2):
        for j in range(3):
            piece = [x[i, j] for x in (rewards, values, next_values)]
            its_flags = {name: flag[i, j] for name, flag in flags.items()}
            assert gae(*piece, gamma=0.9, gae_lambda=0.8, **its_flags)[0].tolist() == whole[i, j].tolist()


@pytest.mark.parametrize("as_flag", [torch.Tensor.bool, torch.Tensor.int, torch.Tensor.float])
def test_flags_may_be_bool_or_numbers(as_flag):
    flags = {"terminated": as_flag(torch.tensor([0, 1, 0])), "truncated": as_flag(torch.tensor([1, 0, 0]))}
    advantages, _ = gae(row(1, 1, 1), row(0, 0, 0), row(5, 5, 5), gamma=1, gae_lambda=1, **flags)
    assert advantages.tolist() == [6.0, 1.0, 6.0]
    n_step = n_step_advantage(row(1, 1, 1), row(0, 0, 0), row(5, 5, 5), 3, 1, **flags)
    assert n_step.tolist() == [6.0, 1.0, 6.0]


def test_half_precision_is_computed_in_float32():
    rewards = torch.full((1, 1000), 0.01, dtype=torch.bfloat16)
    zeros = torch.zeros_like(rewards)
    advantages, returns = gae(rewards, zeros, zeros, gamma=1, gae_lambda=1)
    assert advantages.dtype == returns.dtype == torch.float32
    assert advantages[0, 0].item() == pytest.approx(1000 * rewards[0, 0].item(), rel=1e-5)
    in_bf16 = 0 * rewards[0, 0]
    for t in range(1000):
        in_bf16 = in_bf16 + rewards[0, t]
    assert in_bf16.item() == 4  # from there on a reward is less than half of the last digit


def test_no_gradient_flows_and_no_input_changes():
    rewards, values, next_values, *_ = random_world(0)
    values.requires_grad_()
    before = rewards.clone()
    advantages, returns = gae(rewards, values, next_values, gamma=0.9, gae_lambda=0.8)
    assert not advantages.requires_grad and not returns.requires_grad
    assert rewards.equal(before)


@pytest.mark.parametrize("n", [1, 2, 3, 9, 50])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.formula("n-step-advantage")
def test_n_step_advantage_is_n_rewards_and_a_value(seed, n):
    rewards, values, next_values, terminated, truncated = random_world(seed)
    ours = n_step_advantage(rewards, values, next_values, n, 0.9, terminated=terminated, truncated=truncated)
    for i in range(len(rewards)):
        columns = [x[i].tolist() for x in (rewards, values, next_values)]
        expected = literal_n_step(*columns, n, 0.9, terminated[i].tolist(), truncated[i].tolist())
        assert ours[i].tolist() == pytest.approx(expected, abs=1e-12)


@pytest.mark.formula("gae-mix", "resummation-1", "resummation-2")
def test_A14_a_finite_mix_of_n_step_estimates_needs_the_whole_tail_weight():
    rewards, values, next_values, *_ = random_world(2, shape=(6,), consistent=True)
    gae_lambda, horizon = 0.8, 6
    n_step = [n_step_advantage(rewards, values, next_values, n, 0.9)[0] for n in range(1, horizon + 1)]
    head = sum((1 - gae_lambda) * gae_lambda ** (n - 1) * n_step[n - 1] for n in range(1, horizon))
    ours = gae(rewards, values, next_values, gamma=0.9, gae_lambda=gae_lambda)[0][0]
    assert (head + gae_lambda ** (horizon - 1) * n_step[-1]).item() == pytest.approx(ours.item())
    without = head + (1 - gae_lambda) * gae_lambda ** (horizon - 1) * n_step[-1]
    assert without.item() != pytest.approx(ours.item(), abs=1e-3)


@pytest.mark.formula("a07-n-step")
def test_A12_a_lambda_inside_the_n_step_estimate_gives_gae_with_lambda_squared():
    deltas = torch.randn(300, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    zeros, gae_lambda = torch.zeros_like(deltas), 0.95
    # With values 0 the deltas are the rewards. A07 writes Σ (γλ)^k δ for the n-step estimate.
    wrong = torch.cumsum(gae_lambda ** torch.arange(300) * deltas, 0)
    mix = sum((1 - gae_lambda) * gae_lambda ** (n - 1) * wrong[n - 1] for n in range(1, 301))
    squared = gae(deltas, zeros, zeros, gamma=1, gae_lambda=gae_lambda**2)[0][0]
    right = gae(deltas, zeros, zeros, gamma=1, gae_lambda=gae_lambda)[0][0]
    assert mix.item() == pytest.approx(squared.item(), abs=1e-4)
    assert abs(mix - right) > 0.1


@pytest.mark.formula("td-residual", "a07-td-residual")
def test_td_residual_by_hand():
    ours = td_residual(row(1, 1, 1), row(0.5, 0.4, 0.3), row(0.4, NAN, 2), 0.9, terminated=torch.tensor([0, 1, 0]))
    assert ours.tolist() == pytest.approx([1 + 0.36 - 0.5, 1 - 0.4, 1 + 1.8 - 0.3])


@pytest.mark.formula("monte-carlo-advantage")
def test_monte_carlo_counts_what_was_cut_off_as_0_unless_told():
    rewards, values = row(1, 1), row(0.5, 0.5)
    assert monte_carlo_advantage(rewards, values, 0.9).tolist() == pytest.approx([1.4, 0.5])
    continued = monte_carlo_advantage(rewards, values, 0.9, next_values=row(NAN, 2))
    assert continued.tolist() == pytest.approx([3.02, 2.3])


def listing(rewards, values, gamma=1.0, lam=0.95):
    """C13 §13.4.3, symbol by symbol, in Python numbers."""
    advantages, last_gae = [0.0] * len(rewards), 0.0
    for t in reversed(range(len(rewards))):
        delta = rewards[t] + gamma * values[t + 1] - values[t]
        last_gae = delta + gamma * lam * last_gae
        advantages[t] = last_gae
    return advantages


@pytest.mark.formula("gae-recursion")
def test_compute_gae_does_what_the_listing_of_the_book_does():
    rewards, values = [0.1, -0.2, 0.3, 1.0], [0.5, 0.4, 0.1, 0.7, 0.25]
    for settings in ({}, {"gamma": 0.9, "lam": 0.8}):
        advantages, returns = compute_gae(torch.tensor(rewards), torch.tensor(values), **settings)
        expected = listing(rewards, values, **settings)
        assert advantages.tolist() == pytest.approx(expected, abs=1e-6)
        assert returns.tolist() == pytest.approx([a + v for a, v in zip(expected, values, strict=False)], abs=1e-6)
    assert list(inspect.signature(compute_gae).parameters) == ["rewards", "values", "gamma", "lam"]


def test_compute_gae_takes_a_batch_of_rows():
    rewards, values = torch.randn(2, 3, 4), torch.randn(2, 3, 5)
    whole, _ = compute_gae(rewards, values)
    assert whole[1, 2].tolist() == pytest.approx(listing(rewards[1, 2].tolist(), values[1, 2].tolist()), abs=1e-5)


def test_erratum_B9_without_a_cut_the_next_episode_leaks_into_this_one():
    # Three steps with reward 1 and V = 10, cut by the loop; the next stored state belongs to an episode with V = 50.
    rewards, values = torch.ones(3), torch.full((3,), 10.0)
    settings = {"gamma": 0.99, "gae_lambda": 0.95}
    leaking, _ = gae(rewards, values, torch.tensor([10.0, 10.0, 50.0]), **settings)
    right, _ = gae(rewards, values, torch.full((3,), 10.0), truncated=torch.tensor([0, 0, 1]), **settings)
    assert leaking.tolist() == pytest.approx([37.57, 38.99, 40.50], abs=0.01)
    assert right.tolist() == pytest.approx([2.54, 1.75, 0.90], abs=0.01)


def test_wrong_arguments_are_named():
    x = torch.zeros(3)
    with pytest.raises(ValueError, match="gamma must lie between 0 and 1"):
        gae(x, x, x, gamma=1.5, gae_lambda=0.9)
    with pytest.raises(ValueError, match="gae_lambda must lie between 0 and 1"):
        gae(x, x, x, gamma=1, gae_lambda=-0.1)
    with pytest.raises(ValueError, match=r"rewards \(3,\), values \(3, 1\)"):
        gae(x, x[:, None], x, gamma=1, gae_lambda=1)
    with pytest.raises(ValueError, match=r"truncated must have the shape"):
        gae(x, x, x, gamma=1, gae_lambda=1, truncated=torch.zeros(2))
    with pytest.raises(ValueError, match="terminated must hold only"):
        gae(x, x, x, gamma=1, gae_lambda=1, terminated=torch.full((3,), 2))
    with pytest.raises(ValueError, match=r"mask must have the shape"):
        gae(x, x, x, gamma=1, gae_lambda=1, mask=torch.ones(1, 3))
    with pytest.raises(ValueError, match="n must be at least 1, got 0"):
        n_step_advantage(x, x, x, 0, 0.9)
    with pytest.raises(ValueError, match=r"rewards \(3,\), values \(2,\)"):
        monte_carlo_advantage(x, x[:2], 0.9)
    with pytest.raises(ValueError, match=r"values must hold one step more than rewards, \(4,\), got \(3,\)"):
        compute_gae(x, x)
    with pytest.raises(ValueError, match="lam must lie between"):
        compute_gae(x, torch.zeros(4), lam=2)


def advantages_of(rewards, values, next_values, gamma, gae_lambda, **flags):
    flags = {name: torch.tensor(flag) for name, flag in flags.items()}
    tensors = [torch.tensor(x, dtype=torch.float64) for x in (rewards, values, next_values)]
    advantages, returns = gae(*tensors, gamma=gamma, gae_lambda=gae_lambda, **flags)
    return pytest.approx(advantages.tolist(), abs=1e-5), pytest.approx(returns.tolist(), abs=1e-5)


def test_B01_a_done_flag_belongs_to_its_own_transition():
    advantages, returns = advantages_of([1, 1, 1], [0.5, 0.4, 0.3], [0.4, 0.3, 0.2], 0.9, 0.8, terminated=[0, 1, 0])
    assert advantages == [1.292, 0.6, 0.88] and returns == [1.792, 1.0, 1.18]
    assert advantages != [0.5, 1.5036, 0.88]  # read one step late
    assert advantages != [1.942592, 1.5036, 0.88]  # ignored


def test_B02_the_rollout_bootstraps_from_the_state_behind_its_last_step():
    advantages, _ = advantages_of([1, 1, 1], [0.5, 0.4, 0.3], [0.4, 0.3, 0.2], 0.9, 0.8)
    assert advantages == [1.942592, 1.5036, 0.88]
    assert advantages != [1.989248, 1.5684, 0.97]  # from the last stored state
    assert advantages != [1.84928, 1.374, 0.7]  # from nothing


def test_B03_a_terminal_step_does_not_bootstrap():
    advantages, _ = advantages_of([1, 1, 2], [3, 2, 1], [2, 1, 5], 0.5, 0.5, terminated=[0, 0, 1])
    assert advantages == [-1.0625, -0.25, 1.0]
    assert advantages != [-0.90625, 0.375, 3.5]


def test_B04_a_time_limit_bootstraps_from_the_final_observation():
    advantages, returns = advantages_of([1, 1], [0.5, 0.5], [0.5, 2.0], 0.9, 0.8, truncated=[0, 1])
    assert advantages == [2.606, 2.3] and returns == [3.106, 2.8]
    assert advantages != [1.31, 0.5]  # as a death
    assert advantages != [1.634, 0.95]  # V of the last stored state
    assert advantages != [5.846, 6.8]  # V of the state after the reset


def test_B05_one_environment_at_its_limit_leaves_the_others_alone():
    ones, halves = torch.ones(2, 2), torch.full((2, 2), 0.5)
    next_values = torch.tensor([[0.5, 2.0], [0.5, 0.7]])
    truncated = torch.tensor([[0, 1], [0, 0]])
    advantages, _ = gae(ones, halves, next_values, gamma=0.9, gae_lambda=0.8, truncated=truncated)
    assert advantages[0].tolist() == pytest.approx([2.606, 2.3], abs=1e-5)
    assert advantages[1].tolist() == pytest.approx([1.7636, 1.13], abs=1e-5)
    assert advantages[1].tolist() != pytest.approx([3.0596, 2.93], abs=1e-5)


def test_B06_credit_crosses_back_from_the_terminal_step():
    for last in (0.0, 42.0):
        advantages, _ = advantages_of([0, 0, 1], [0.1, 0.2, 0.3], [0.2, 0.3, last], 0.9, 0.8, terminated=[0, 0, 1])
        assert advantages == [0.49328, 0.574, 0.7]
        assert advantages != [0.1304, 0.07, 0.7]


def test_B07_a_return_neither_leaks_over_a_cut_nor_starts_at_0():
    flags = {"truncated": torch.tensor([0, 1, 0, 0]), "terminated": torch.tensor([0, 0, 0, 1])}
    zeros = torch.zeros(4)
    cut = monte_carlo_advantage(torch.ones(4), zeros, 0.9, next_values=torch.tensor([0, 0.5, 0, 9]), **flags)
    assert cut.tolist() == pytest.approx([2.305, 1.45, 1.9, 1.0])
    assert cut.tolist() != pytest.approx([3.439, 2.71, 1.9, 1.0])  # leak
    assert cut.tolist() != pytest.approx([1.9, 1.0, 1.9, 1.0])  # as a death
    tail = monte_carlo_advantage(torch.ones(2), torch.zeros(2), 0.9, next_values=torch.tensor([0.0, 2.0]))
    assert tail.tolist() == pytest.approx([3.52, 2.8])
    assert tail.tolist() != pytest.approx([1.9, 1.0])


def test_B08_the_reward_of_an_action_is_counted_at_that_action():
    advantages, _ = advantages_of([1, 2, 3], [0, 0, 0], [0, 0, 0], 1, 1, terminated=[0, 0, 1])
    assert advantages == [6, 5, 3]
    assert advantages != [3, 3, 2]  # each reward one slot late


def test_B09_the_advantage_is_made_from_the_return_not_from_the_reward():
    advantages, _ = advantages_of([0, 0, 1], [0.2, 0.3, 0.4], [0.3, 0.4, 0], 1, 1, terminated=[0, 0, 1])
    assert advantages == [0.8, 0.7, 0.6]
    assert advantages != [-0.2, -0.3, 0.6]
