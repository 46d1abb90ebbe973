"""Importance sampling: hand values, exact expectations by enumeration, and where the surrogate stops being J."""

import math
from itertools import product

import pytest
import torch
from torch import tensor

from ppo_lab.importance_sampling import effective_sample_size, importance_estimate, importance_ratio, surrogate
from ppo_lab.policy_gradient import policy_gradient_loss
from ppo_lab.tabular import paid_door

NAN, INF = math.nan, math.inf


# --- importance_ratio


def test_B13_ratio_is_new_over_old():
    ratio = importance_ratio(tensor([math.log(0.6)]), tensor([math.log(0.3)]))
    assert ratio.item() == pytest.approx(2.0)
    assert ratio.item() != pytest.approx(0.5)


@pytest.mark.formula("ratio")
def test_ratio_is_exactly_one_at_the_old_policy():
    logp = tensor([[-0.1, -7.3, -40.0]])
    assert torch.equal(importance_ratio(logp, logp.clone()), torch.ones(1, 3))


@pytest.mark.formula("ratio", "a07-ratio")
def test_ratio_is_the_quotient_of_the_probabilities():
    new, old = tensor([0.5, 0.2, 0.9]), tensor([0.25, 0.8, 0.9])
    torch.testing.assert_close(importance_ratio(new.log(), old.log()), tensor([2.0, 0.25, 1.0]))


@pytest.mark.formula("gradient-of-the-ratio")
def test_gradient_of_the_ratio_is_ratio_times_score():
    logp = tensor([-0.5, -2.0], dtype=torch.float64, requires_grad=True)
    old_logp = tensor([-1.0, -1.0], dtype=torch.float64)
    importance_ratio(logp, old_logp).sum().backward()
    expected = [math.exp(0.5), math.exp(-1.0)]
    assert logp.grad.tolist() == pytest.approx(expected)


def test_log_ratio_is_clamped_on_both_sides_and_carries_no_gradient_there():
    logp = tensor([0.0, -90.0, -1.0], dtype=torch.float64, requires_grad=True)
    old_logp = tensor([-90.0, 0.0, -1.0], dtype=torch.float64)
    ratio = importance_ratio(logp, old_logp)
    ratio.sum().backward()
    assert ratio.tolist() == pytest.approx([math.exp(20), math.exp(-20), 1.0])
    assert logp.grad.tolist() == [0.0, 0.0, 1.0]


def test_max_log_ratio_moves_the_clamp():
    ratio = importance_ratio(tensor([3.0]), tensor([0.0]), max_log_ratio=0.5)
    assert ratio.item() == pytest.approx(math.exp(0.5))


@pytest.mark.parametrize("hidden", [NAN, INF, -INF])
def test_masked_ratio_is_one_whatever_lies_under_the_mask(hidden):
    logp = tensor([-1.0, hidden, -2.0], requires_grad=True)
    ratio = importance_ratio(logp, tensor([-1.5, hidden, -2.0]), tensor([True, False, True]))
    (ratio * tensor([1.0, NAN, 1.0]))[[0, 2]].sum().backward()
    assert ratio.tolist() == pytest.approx([math.exp(0.5), 1.0, 1.0])
    assert logp.grad.tolist() == pytest.approx([math.exp(0.5), 0.0, 1.0])


def test_gradient_at_a_masked_step_is_zero_even_against_a_nan_advantage():
    logp = tensor([-1.0, -1.0], requires_grad=True)
    ratio = importance_ratio(logp, tensor([-1.0, -1.0]), tensor([1, 0]))
    surrogate(ratio, tensor([2.0, NAN])).sum().backward()
    assert logp.grad.tolist() == [2.0, 0.0]


def test_nan_that_counts_stays_visible():
    assert importance_ratio(tensor([NAN, -1.0]), tensor([-1.0, -1.0])).isnan().tolist() == [True, False]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_subtracted_in_float32(dtype):
    ratio = importance_ratio(tensor([-1.0, -3.0], dtype=dtype), tensor([-2.0, -3.0], dtype=dtype))
    assert ratio.dtype == torch.float32
    # bfloat16 itself would round e to 2.71875.
    assert ratio.tolist() == pytest.approx([math.e, 1.0], rel=1e-6)


def test_ratio_refuses_to_broadcast():
    with pytest.raises(ValueError, match=r"logp \(4,\), old_logp \(4, 1\)"):
        importance_ratio(torch.zeros(4), torch.zeros(4, 1))


@pytest.mark.parametrize("limit", [0.0, -1.0, NAN])
def test_ratio_refuses_a_limit_that_is_not_positive(limit):
    with pytest.raises(ValueError, match="max_log_ratio"):
        importance_ratio(torch.zeros(1), torch.zeros(1), max_log_ratio=limit)


# --- importance_estimate


def test_estimates_by_hand():
    f, ratio = tensor([1.0, 2.0, 3.0]), tensor([2.0, 1.0, 1.0])
    assert importance_estimate(f, ratio).item() == pytest.approx(7 / 3)
    assert importance_estimate(f, ratio, self_normalised=True).item() == pytest.approx(7 / 4)


@pytest.mark.formula("importance-identity")
def test_samples_in_exact_proportion_give_the_exact_expectation():
    # p = (0.5, 0.3, 0.2), q = (0.2, 0.3, 0.5), f = (1, 2, 4): E_p[f] = 1.9. Ten samples fall 2 : 3 : 5 under q.
    x = tensor([0, 0, 1, 1, 1, 2, 2, 2, 2, 2])
    f = tensor([1.0, 2.0, 4.0])[x]
    ratio = tensor([2.5, 1.0, 0.4])[x]
    assert importance_estimate(f, ratio).item() == pytest.approx(1.9)
    assert importance_estimate(f, ratio, self_normalised=True).item() == pytest.approx(1.9)


@pytest.mark.formula("importance-identity")
def test_plain_estimate_is_unbiased_over_many_repetitions():
    p = tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    q = tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    f = tensor([1.0, 2.0, 4.0], dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    x = torch.multinomial(q, 20_000 * 5, replacement=True, generator=generator).reshape(20_000, 5)
    estimates = importance_estimate(f[x], (p / q)[x], dim=-1)
    z = (estimates.mean() - 1.9) / (estimates.std() / math.sqrt(20_000))
    assert estimates.shape == (20_000,)
    assert abs(z.item()) < 4


def test_only_the_plain_estimate_can_leave_the_range_of_f():
    f, ratio = tensor([1.0, 1.0]), tensor([3.0, 4.0])
    assert importance_estimate(f, ratio).item() == 3.5
    assert importance_estimate(f, ratio, self_normalised=True).item() == 1.0


def test_estimate_along_an_axis_treats_rows_apart():
    f, ratio = tensor([[1.0, 3.0], [2.0, 2.0]]), tensor([[1.0, 1.0], [0.0, 4.0]])
    assert importance_estimate(f, ratio, dim=-1).tolist() == [2.0, 4.0]
    assert importance_estimate(f, ratio, self_normalised=True, dim=-1).tolist() == [2.0, 2.0]


def test_estimate_errors_name_the_argument():
    with pytest.raises(ValueError, match=r"f \(3,\), ratio \(3, 1\)"):
        importance_estimate(torch.ones(3), torch.ones(3, 1))
    with pytest.raises(ValueError, match="f must hold at least one sample"):
        importance_estimate(torch.ones(0), torch.ones(0))
    with pytest.raises(ValueError, match="ratio must not sum to 0"):
        importance_estimate(torch.ones(2), torch.zeros(2), self_normalised=True)


# --- effective_sample_size


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [
        ([1.0, 1.0, 1.0, 1.0], 4.0),
        ([0.3, 0.3], 2.0),
        ([5.0, 0.0, 0.0], 1.0),
        ([1.0, 2.0, 3.0], 36 / 14),
        ([0.0, 0.0], 0.0),
        ([], 0.0),
    ],
)
def test_effective_sample_size_by_hand(ratio, expected):
    assert effective_sample_size(tensor(ratio)).item() == pytest.approx(expected)


def test_one_large_weight_takes_all_the_samples():
    # 999 weights of 1 and one of 1000: the book's "few samples dominate the gradient".
    ratio = torch.ones(1000)
    ratio[7] = 1000.0
    assert effective_sample_size(ratio).item() == pytest.approx(1999**2 / (999 + 1e6), rel=1e-5)
    assert effective_sample_size(ratio) < 4


def test_effective_sample_size_counts_under_the_mask_nothing():
    ratio = tensor([[1.0, 2.0, NAN], [3.0, INF, 1e9]])
    mask = tensor([[True, True, False], [True, False, False]])
    assert effective_sample_size(ratio, mask).item() == pytest.approx(36 / 14)
    assert effective_sample_size(ratio, mask, dim=-1).tolist() == pytest.approx([9 / 5, 1.0])
    assert effective_sample_size(ratio, torch.zeros_like(mask)).item() == 0.0


def test_effective_sample_size_refuses_a_mask_of_another_shape():
    with pytest.raises(ValueError, match="mask"):
        effective_sample_size(torch.ones(3), torch.ones(3, 1, dtype=torch.bool))


# --- surrogate


@pytest.mark.formula("surrogate")
def test_surrogate_by_hand():
    ratio, advantages = tensor([[1.5, 1.5], [0.5, 0.5]]), tensor([[1.0, -1.0], [1.0, -1.0]])
    assert surrogate(ratio, advantages).tolist() == [[1.5, -1.5], [0.5, -0.5]]


def test_surrogate_refuses_to_broadcast():
    with pytest.raises(ValueError, match=r"ratio \(4,\), advantages \(4, 1\)"):
        surrogate(torch.ones(4), torch.ones(4, 1))


@pytest.mark.formula("surrogate")
def test_surrogate_and_policy_gradient_agree_at_the_old_policy_only():
    logits = tensor([0.3, -0.2, 0.1], dtype=torch.float64, requires_grad=True)
    actions, advantages = tensor([0, 1, 2, 0]), tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)

    def gradients(old_logp):
        logp = torch.log_softmax(logits, -1)[actions]
        of_surrogate = torch.autograd.grad(surrogate(importance_ratio(logp, old_logp), advantages).mean(), logits)[0]
        logp = torch.log_softmax(logits, -1)[actions]
        return of_surrogate, -torch.autograd.grad(policy_gradient_loss(logp, advantages), logits)[0]

    old_logp = torch.log_softmax(logits, -1)[actions].detach()
    torch.testing.assert_close(*gradients(old_logp))
    moved, plain = gradients(old_logp - tensor([0.5, 0.0, 0.0, 0.5]).double())
    assert not torch.allclose(moved, plain)


# --- A6: what the surrogate is the gradient of


def _paid_door_logits(first: float, second: float) -> torch.Tensor:
    """One logit per state: the second action's, against 0."""
    return tensor([[0.0, first], [0.0, second], [0.0, 0.0]], dtype=torch.float64, requires_grad=True)


def _slope(function, logits):
    return torch.autograd.grad(function(logits), logits)[0][:2, 1].tolist()


@pytest.mark.formula("importance-gradient")
def test_A6_surrogate_gradient_is_the_gradient_of_J_at_the_old_policy():
    world, old = paid_door(), _paid_door_logits(-1.0, -0.5)
    of_j = _slope(world.objective, old)
    of_surrogate = _slope(lambda logits: world.surrogate(logits, old.detach()), old)
    assert of_j == pytest.approx([0.03490661, 0.06320223], abs=5e-9)
    assert of_surrogate == pytest.approx(of_j, abs=1e-14)


@pytest.mark.formula("importance-gradient")
def test_A6_away_from_the_old_policy_it_is_not():
    world, old, new = paid_door(), _paid_door_logits(-1.0, -0.5).detach(), _paid_door_logits(0.5, 1.0)
    of_j = _slope(world.objective, new)
    of_surrogate = _slope(lambda logits: world.surrogate(logits, old), new)
    assert of_j == pytest.approx([0.125, 0.122], abs=5e-4)
    assert of_surrogate == pytest.approx([0.042, 0.053], abs=5e-4)
    assert (world.objective(new) - world.objective(old)).item() == pytest.approx(0.283, abs=5e-4)
    assert world.surrogate(new, old).item() == pytest.approx(0.158, abs=5e-4)


def test_A6_the_product_of_all_ratios_is_exact_and_one_ratio_per_step_is_not():
    # Every episode of the paid door: (open?, second action, probability under old and new, return).
    def episodes(first, second):
        opens, good = 1 / (1 + math.exp(-first)), 1 / (1 + math.exp(-second))
        return {"stay": 1 - opens, "open, good": opens * good, "open, bad": opens * (1 - good)}

    old, new = episodes(-1.0, -0.5), episodes(0.5, 1.0)
    returns = {"stay": 0.0, "open, good": 0.8, "open, bad": -0.2}
    exact = paid_door().objective(_paid_door_logits(0.5, 1.0)).item()
    reweighted = sum(old[e] * (new[e] / old[e]) * returns[e] for e in old)
    assert reweighted == pytest.approx(exact)

    # Step by step: each reward times the ratio of its own action only, the states left as the old policy visits them.
    opens, good = 0.2689414, 0.3775407
    new_opens, new_good = 0.6224593, 0.7310586
    per_step = 0.0
    for a0, a1 in product((0, 1), (0, 1)):
        p = (opens if a0 else 1 - opens) * (good if a1 else 1 - good)
        ratio_0 = new_opens / opens if a0 else (1 - new_opens) / (1 - opens)
        ratio_1 = new_good / good if a1 else (1 - new_good) / (1 - good)
        per_step += p * a0 * (ratio_0 * -0.2 + ratio_1 * a1)
    assert abs(per_step - exact) > 0.2


@pytest.mark.parametrize(("logp", "old_logp"), [(-INF, -1.0), (-1.0, -INF), (-INF, -INF)])
def test_an_infinite_log_ratio_is_not_clamped_into_an_ordinary_number(logp, old_logp):
    ratio = importance_ratio(torch.tensor([logp, -1.0]), torch.tensor([old_logp, -1.0]))
    assert math.isnan(ratio[0]) and ratio[1] == 1
