"""Policy gradient: hand values, literal transcriptions, and expectations over every trajectory of a small world."""

import math
from itertools import product

import pytest
import torch
from torch import tensor

from ppo_lab.policy_gradient import discounted_return, optimal_baseline, policy_gradient_loss, reward_to_go
from ppo_lab.tabular import TabularMDP, two_state_chain

NAN = math.nan


# --- discounted_return


def test_discounted_return_by_hand():
    # 1 + 0.5·2 + 0.25·3
    assert discounted_return(tensor([1.0, 2.0, 3.0]), 0.5).item() == 2.75


def test_discounted_return_at_the_ends_of_gamma():
    rewards = tensor([[1.0, 2.0, 4.0], [3.0, 0.0, 0.0]])
    assert discounted_return(rewards, 0.0).tolist() == [1.0, 3.0]
    assert discounted_return(rewards, 1.0).tolist() == [7.0, 3.0]


def test_discounted_return_takes_any_leading_shape_and_integers():
    assert discounted_return(torch.ones(2, 3, 4, dtype=torch.int64), 0.5).tolist() == [[1.875] * 3] * 2
    assert discounted_return(torch.ones(2, 0), 0.5).tolist() == [0.0, 0.0]


@pytest.mark.formula("objective")
def test_A1_the_last_reward_belongs_to_the_last_action():
    # Two steps, action = reward: the four trajectories have returns 0, γ, 1, 1 + γ, each with probability 1/4.
    returns = [discounted_return(tensor([float(a0), float(a1)]), 0.5).item() for a0, a1 in product((0, 1), (0, 1))]
    assert returns == [0.0, 0.5, 1.0, 1.5]
    world = TabularMDP(torch.ones(1, 2, 1), tensor([[0.0, 1.0]]), torch.ones(1), gamma=0.5, horizon=2)
    assert world.objective(torch.zeros(1, 2)).item() == pytest.approx(sum(returns) / 4)


@pytest.mark.parametrize("gamma", [-0.1, 1.1, NAN])
def test_gamma_outside_the_unit_interval_is_refused(gamma):
    with pytest.raises(ValueError, match="gamma"):
        discounted_return(torch.ones(2), gamma)
    with pytest.raises(ValueError, match="gamma"):
        reward_to_go(torch.ones(2), gamma)


# --- reward_to_go


def _walk(rewards, gamma, terminated, truncated, next_values, mask):
    """One row, straight from the sum: from each step walk forward until the episode ends, one reward at a time."""
    steps = [t for t in range(len(rewards)) if mask[t]]
    out = [0.0] * len(rewards)
    for i, start in enumerate(steps):
        total, discount = 0.0, 1.0
        for t in steps[i:]:
            total += discount * rewards[t]
            discount *= gamma
            if terminated[t]:
                break
            if truncated[t] or t == steps[-1]:
                total += discount * next_values[t]
                break
        out[start] = total
    return out


def test_B07a_returns_do_not_leak_over_a_time_limit():
    to_go = reward_to_go(
        torch.ones(4),
        0.9,
        terminated=tensor([0, 0, 0, 1]),
        truncated=tensor([0, 1, 0, 0]),
        next_values=tensor([7.0, 0.5, 7.0, 7.0]),
    )
    assert to_go.tolist() == pytest.approx([2.305, 1.45, 1.9, 1.0])
    assert to_go.tolist() != pytest.approx([3.439, 2.71, 1.9, 1.0])  # leak
    assert to_go.tolist() != pytest.approx([1.9, 1.0, 1.9, 1.0])  # cut as if terminal


def test_B07b_an_unfinished_row_continues_with_the_value_of_the_next_state():
    to_go = reward_to_go(torch.ones(2), 0.9, next_values=tensor([7.0, 2.0]))
    assert to_go.tolist() == pytest.approx([3.52, 2.8])
    assert to_go.tolist() != pytest.approx([1.9, 1.0])  # tail starts at 0


def test_without_next_values_nothing_is_added_at_a_cut():
    assert reward_to_go(torch.ones(4), 0.5, truncated=tensor([0, 1, 0, 0])).tolist() == [1.5, 1.0, 1.5, 1.0]


def test_termination_wins_over_truncation():
    both = tensor([False, True])
    to_go = reward_to_go(torch.ones(2), 0.5, terminated=both, truncated=both, next_values=tensor([9.0, 9.0]))
    assert to_go.tolist() == [1.5, 1.0]


def test_first_entry_of_an_episode_is_its_discounted_return():
    rewards = tensor([2.0, -1.0, 0.5, 4.0], dtype=torch.float64)
    # 2 − 0.9 + 0.405 + 2.916
    assert reward_to_go(rewards, 0.9)[0].item() == pytest.approx(4.421)


def test_one_step_and_gamma_zero():
    assert reward_to_go(tensor([[3.0]]), 0.9).tolist() == [[3.0]]
    assert reward_to_go(tensor([1.0, 2.0]), 0.0, next_values=tensor([5.0, 5.0])).tolist() == [1.0, 2.0]


def test_masked_gap_is_skipped_as_if_it_were_not_there():
    # Steps 1 and 2 are hidden, with flags that would cut: the row is 1, 2, 4.
    hidden = tensor([0, 1, 1, 0, 0])
    to_go = reward_to_go(
        tensor([1.0, NAN, NAN, 2.0, 4.0]),
        0.5,
        terminated=hidden,
        truncated=hidden,
        next_values=tensor([NAN, NAN, NAN, NAN, 8.0]),
        mask=1 - hidden,
    )
    assert to_go.tolist() == [4.0, 0.0, 0.0, 6.0, 8.0]


def test_the_last_step_that_counts_bootstraps_not_the_padding():
    to_go = reward_to_go(
        tensor([1.0, 1.0, 0.0]), 0.5, next_values=tensor([9.0, 4.0, 9.0]), mask=tensor([True, True, False])
    )
    assert to_go.tolist() == [2.5, 3.0, 0.0]


@pytest.mark.formula("reward-to-go")
def test_against_the_literal_sum_on_random_rows():
    generator = torch.Generator().manual_seed(0)
    rewards = torch.randn(50, 9, generator=generator, dtype=torch.float64)
    next_values = torch.randn(50, 9, generator=generator, dtype=torch.float64)
    terminated, truncated = (torch.rand(2, 50, 9, generator=generator) < 0.25).unbind()
    mask = torch.rand(50, 9, generator=generator) < 0.7
    to_go = reward_to_go(rewards, 0.9, terminated=terminated, truncated=truncated, next_values=next_values, mask=mask)
    columns = zip(
        rewards.tolist(), terminated.tolist(), truncated.tolist(), next_values.tolist(), mask.tolist(), strict=True
    )
    expected = [_walk(r, 0.9, te, tr, nv, m) for r, te, tr, nv, m in columns]
    torch.testing.assert_close(to_go, tensor(expected, dtype=torch.float64))
    shaped = reward_to_go(
        rewards.reshape(5, 10, 9),
        0.9,
        terminated=terminated.reshape(5, 10, 9),
        truncated=truncated.reshape(5, 10, 9),
        next_values=next_values.reshape(5, 10, 9),
        mask=mask.reshape(5, 10, 9),
    )
    assert torch.equal(shaped.reshape(50, 9), to_go)


def test_next_values_that_are_not_needed_may_be_nan():
    next_values = tensor([NAN, NAN, 2.0], requires_grad=True)
    to_go = reward_to_go(torch.ones(3), 0.5, terminated=tensor([0, 1, 0]), next_values=next_values)
    to_go.sum().backward()
    assert to_go.tolist() == [1.5, 1.0, 2.0]
    assert next_values.grad.tolist() == [0.0, 0.0, 0.5]


@pytest.mark.parametrize("truncated", [None, tensor([0, 1])])
def test_the_value_after_a_terminal_step_is_never_read(truncated):
    to_go = reward_to_go(
        torch.ones(2), 0.5, terminated=tensor([0, 1]), truncated=truncated, next_values=tensor([0.0, NAN])
    )
    assert to_go.tolist() == [1.5, 1.0]


def test_nan_that_counts_stays_visible():
    assert reward_to_go(tensor([1.0, NAN, 1.0]), 0.9).isnan().tolist() == [True, True, False]


def test_half_precision_is_summed_in_float32():
    to_go = reward_to_go(torch.ones(512, dtype=torch.bfloat16), 1.0)
    assert to_go.dtype == torch.float32
    assert to_go[0].item() == 512.0  # bfloat16 stops counting at 256


def test_reward_to_go_errors_name_the_argument():
    with pytest.raises(ValueError, match=r"rewards \(4,\), next_values \(4, 1\)"):
        reward_to_go(torch.ones(4), 0.9, next_values=torch.ones(4, 1))
    with pytest.raises(ValueError, match="terminated must hold only"):
        reward_to_go(torch.ones(2), 0.9, terminated=tensor([0, 2]))
    with pytest.raises(ValueError, match="truncated must hold only"):
        reward_to_go(torch.ones(2), 0.9, truncated=tensor([0.5, 0.0]))
    with pytest.raises(ValueError, match="rewards must have at least one step"):
        reward_to_go(torch.ones(2, 0), 0.9)


# --- policy_gradient_loss


@pytest.mark.formula("reinforce")
def test_loss_is_minus_the_mean_of_logp_times_weight():
    loss = policy_gradient_loss(tensor([-1.0, -2.0]), tensor([3.0, -1.0]))
    assert loss.item() == pytest.approx(-(-3.0 + 2.0) / 2)


@pytest.mark.formula("gradient-ascent")
def test_descending_the_loss_makes_a_well_weighted_action_more_likely():
    logp = tensor([-1.0, -2.0, -3.0], requires_grad=True)
    policy_gradient_loss(logp, tensor([3.0, -1.0, 0.0])).backward()
    assert logp.grad.tolist() == pytest.approx([-1.0, 1 / 3, 0.0])


def test_no_gradient_flows_into_the_weights():
    logp, weights = tensor([-1.0], requires_grad=True), tensor([2.0], requires_grad=True)
    policy_gradient_loss(logp, weights).backward()
    assert weights.grad is None


@pytest.mark.parametrize("hidden", [NAN, math.inf, -math.inf])
def test_what_the_mask_hides_changes_neither_loss_nor_gradient(hidden):
    logp = tensor([[-1.0, hidden, -2.0]], requires_grad=True)
    loss = policy_gradient_loss(logp, tensor([[3.0, hidden, 1.0]]), tensor([[True, False, True]]))
    loss.backward()
    assert loss.item() == pytest.approx(2.5)
    assert logp.grad.tolist() == [[-1.5, 0.0, -0.5]]


def test_loss_refuses_to_broadcast():
    with pytest.raises(ValueError, match=r"logp \(4,\), weights \(4, 1\)"):
        policy_gradient_loss(torch.ones(4), torch.ones(4, 1))


# --- every trajectory of a small world


def _chain_episodes(p: float):
    """All four episodes of two_state_chain under P(action 1) = p: probability, scores d log π/dθ, rewards."""
    for a0, a1 in product((0, 1), (0, 1)):
        probability = (p if a0 else 1 - p) * (p if a1 else 1 - p)
        yield probability, (a0 - p, a1 - p), tensor([1.0 * a0, 1.5 * (1 - a1)], dtype=torch.float64)


def test_A2_without_gamma_to_the_t_the_gradient_of_J_changes_sign():
    gamma, correct, usual = 0.5, 0.0, 0.0
    for probability, scores, rewards in _chain_episodes(0.5):
        to_go = reward_to_go(rewards, gamma).tolist()
        correct += probability * sum(gamma**t * scores[t] * to_go[t] for t in (0, 1))
        usual += probability * sum(scores[t] * to_go[t] for t in (0, 1))
    assert correct == pytest.approx(0.0625)
    assert usual == pytest.approx(-0.125)

    shared = torch.zeros((), dtype=torch.float64, requires_grad=True)
    logits = torch.stack([torch.zeros(3, dtype=torch.float64), shared.expand(3)], -1)
    two_state_chain().objective(logits).backward()
    assert shared.grad.item() == pytest.approx(0.0625)


def test_A2_with_gamma_one_both_agree():
    usual = sum(
        probability * sum(s * g for s, g in zip(scores, reward_to_go(rewards, 1.0).tolist(), strict=True))
        for probability, scores, rewards in _chain_episodes(0.5)
    )
    shared = torch.zeros((), dtype=torch.float64, requires_grad=True)
    two_state_chain(gamma=1.0).objective(torch.stack([torch.zeros(3).double(), shared.expand(3)], -1)).backward()
    assert usual == pytest.approx(shared.grad.item())


def _mean_and_variance(weighted):
    """Of a list of (probability, value)."""
    mean = sum(q * x for q, x in weighted)
    return mean, sum(q * (x - mean) ** 2 for q, x in weighted)


def _full_and_causal(episodes):
    """The score times the whole return, and each score times what came after it, for γ = 1."""
    full, causal = [], []
    for probability, scores, rewards in episodes:
        full.append((probability, sum(scores) * discounted_return(rewards, 1.0).item()))
        to_go = reward_to_go(rewards, 1.0).tolist()
        causal.append((probability, sum(s * g for s, g in zip(scores, to_go, strict=True))))
    return full, causal


@pytest.mark.formula("reward-to-go")
def test_A3_past_rewards_add_nothing_to_the_mean_but_variance():
    # Six independent fair choices between a reward of 0 and of 1: all 64 trajectories.
    episodes = [(1 / 64, [a - 0.5 for a in row], tensor(row, dtype=torch.float64)) for row in product((0, 1), repeat=6)]
    past = sum(q * scores[3] * rewards[:3].sum().item() for q, scores, rewards in episodes)
    assert past == pytest.approx(0.0, abs=1e-15)
    full, causal = map(_mean_and_variance, _full_and_causal(episodes))
    assert full[0] == pytest.approx(6 * 0.25)  # the derivative of Σ_t p, six times p(1 − p)
    assert causal[0] == pytest.approx(full[0])
    assert causal[1] < full[1] / 1.5


def test_A3_dropping_past_rewards_need_not_lower_the_variance():
    # Two steps only: past rewards can happen to cancel the noise of later ones. The mean is the same all the same.
    full, causal = map(_mean_and_variance, _full_and_causal(_chain_episodes(0.3)))
    assert causal[0] == pytest.approx(full[0])
    assert full[1] == pytest.approx(0.7723, abs=5e-5)
    assert causal[1] == pytest.approx(0.7849, abs=5e-5)


# --- baselines: the bandit of errata A4 and A5

BANDIT_LOGITS = tensor([2.0, 0.0, -1.0], dtype=torch.float64, requires_grad=True)
BANDIT_POLICY = torch.softmax(BANDIT_LOGITS.detach(), -1)
BANDIT_Q = tensor([11.0, 12.0, 7.0], dtype=torch.float64)
BANDIT_SCORES = torch.eye(3, dtype=torch.float64) - BANDIT_POLICY  # row a: ∇log π(a)


def _one_sample(action: int, b: float) -> torch.Tensor:
    loss = policy_gradient_loss(torch.log_softmax(BANDIT_LOGITS, -1)[action], BANDIT_Q[action] - b)
    return -torch.autograd.grad(loss, BANDIT_LOGITS)[0]


def _mean_and_total_variance(b: float):
    samples = torch.stack([_one_sample(action, b) for action in range(3)])
    mean = BANDIT_POLICY @ samples
    return mean, (BANDIT_POLICY @ (samples - mean).square()).sum().item()


def _best_baseline() -> float:
    return optimal_baseline(BANDIT_POLICY * BANDIT_SCORES.square().sum(-1), BANDIT_Q).item()


@pytest.mark.formula("gradient-with-baseline", "baseline-keeps-the-mean", "mean-score-is-zero")
def test_A4_every_baseline_keeps_the_mean_but_a_bad_one_raises_the_variance():
    v = (BANDIT_POLICY @ BANDIT_Q).item()
    mean, without = _mean_and_total_variance(0.0)
    for b, expected in [(0.0, 31.98), (v, 1.221), (50.0, 425), (-50.0, 1005)]:
        mean_b, variance = _mean_and_total_variance(b)
        torch.testing.assert_close(mean_b, mean)
        assert variance == pytest.approx(expected, rel=1e-3)
    assert _mean_and_total_variance(50.0)[1] > 10 * without


@pytest.mark.formula("optimal-baseline")
def test_A5_the_optimal_baseline_is_not_V():
    b = _best_baseline()
    assert b == pytest.approx(10.616, abs=5e-4)
    assert (BANDIT_POLICY @ BANDIT_Q).item() == pytest.approx(10.946, abs=5e-4)
    assert _mean_and_total_variance(b)[1] == pytest.approx(1.191, abs=5e-4)


@pytest.mark.formula("optimal-baseline")
def test_A5_the_variance_is_a_parabola_with_its_minimum_at_the_optimal_baseline():
    b = _best_baseline()
    lowest = _mean_and_total_variance(b)[1]
    curvature = (BANDIT_POLICY @ BANDIT_SCORES.square().sum(-1)).item()
    for shift in (-3.0, -0.1, 0.1, 3.0):
        assert _mean_and_total_variance(b + shift)[1] - lowest == pytest.approx(curvature * shift**2, rel=1e-6)


def test_optimal_baseline_from_samples_is_a_weighted_mean():
    # (1·4 + 3·8) / 4, and the plain mean when all scores have one size
    assert optimal_baseline(tensor([1.0, 3.0]), tensor([4.0, 8.0])).item() == 7.0
    assert optimal_baseline(tensor([2.0, 2.0]), tensor([4.0, 8.0])).item() == 6.0


def test_optimal_baseline_errors_name_the_argument():
    with pytest.raises(ValueError, match=r"score_sq_norm \(3,\), returns \(3, 1\)"):
        optimal_baseline(torch.ones(3), torch.ones(3, 1))
    with pytest.raises(ValueError, match="score_sq_norm must not be negative, got a minimum of -1"):
        optimal_baseline(tensor([1.0, -1.0]), torch.ones(2))
    with pytest.raises(ValueError, match="score_sq_norm must not be 0 everywhere"):
        optimal_baseline(torch.zeros(2), torch.ones(2))
