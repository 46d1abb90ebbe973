"""The clipped objective, the value loss, the entropy, and the loss that adds them up."""

import math

import pytest
import torch

from ppo_lab.clip import categorical_entropy, clipped_surrogate, clipped_value_loss, ppo_loss
from ppo_lab.importance_sampling import importance_ratio

NAN, INF = math.nan, math.inf
RHO = torch.tensor([0.5, 0.8, 1.0, 1.2, 1.5])


def clip(x, low, high):
    return min(max(x, low), high)


def slope(ratio, advantage, **settings):
    rho = torch.tensor([ratio], requires_grad=True)
    clipped_surrogate(rho, torch.tensor([advantage]), **settings).sum().backward()
    return rho.grad.item()


# clipped_surrogate


@pytest.mark.formula("clip")
def test_A8_the_objective_for_a_good_and_a_bad_action():
    good = clipped_surrogate(RHO, torch.ones(5), 0.2)
    bad = clipped_surrogate(RHO, -torch.ones(5), 0.2)
    assert good.tolist() == pytest.approx([0.5, 0.8, 1.0, 1.2, 1.2])
    assert bad.tolist() == pytest.approx([-0.8, -0.8, -1.0, -1.2, -1.5])
    # The book draws the first one flat to the left of 1 − ε as well.
    assert good.tolist() != pytest.approx([0.8, 0.8, 1.0, 1.2, 1.2])


@pytest.mark.parametrize(
    "ratio, advantage, expected",
    [(0.5, 2.0, 2.0), (1.0, 2.0, 2.0), (1.5, 2.0, 0.0), (0.5, -2.0, 0.0), (1.0, -2.0, -2.0), (1.5, -2.0, -2.0)],
)
def test_the_gradient_stops_only_where_the_ratio_has_gone_far_enough(ratio, advantage, expected):
    assert slope(ratio, advantage) == expected


@pytest.mark.parametrize("low, high, dual", [(0.2, None, None), (0.2, 0.28, None), (0.1, 0.3, 3.0), (0.2, None, 1.5)])
@pytest.mark.formula("clip", "a07-clip")
def test_each_element_is_the_smaller_of_two_terms(low, high, dual):
    generator = torch.Generator().manual_seed(0)
    ratio = torch.randn(200, generator=generator, dtype=torch.float64).exp()
    advantages = torch.randn(200, generator=generator, dtype=torch.float64)
    expected = []
    for rho, a in zip(ratio.tolist(), advantages.tolist(), strict=True):
        term = min(rho * a, clip(rho, 1 - low, 1 + (high or low)) * a)
        expected.append(max(term, dual * a) if dual and a < 0 else term)
    ours = clipped_surrogate(ratio, advantages, low, eps_clip_high=high, dual_clip=dual)
    assert ours.tolist() == pytest.approx(expected, abs=1e-12)


def test_A10_it_is_a_lower_bound_of_the_unclipped_surrogate():
    generator = torch.Generator().manual_seed(1)
    ratio, advantages = torch.randn(500, generator=generator).exp(), torch.randn(500, generator=generator)
    assert (clipped_surrogate(ratio, advantages) <= ratio * advantages).all()


def test_A11_only_the_dual_clip_bounds_a_bad_action_with_a_runaway_ratio():
    assert slope(50.0, -1.0) == -1.0
    assert slope(50.0, -1.0, dual_clip=3.0) == 0.0
    assert clipped_surrogate(torch.tensor([50.0]), torch.tensor([-1.0]), dual_clip=3.0).item() == -3.0
    # It leaves good actions and moderate ratios alone.
    assert slope(2.0, -1.0, dual_clip=3.0) == -1.0
    assert clipped_surrogate(torch.tensor([50.0]), torch.tensor([1.0]), dual_clip=3.0).item() == pytest.approx(1.2)


def test_C21_scaling_the_advantages_changes_no_clipping_decision():
    generator = torch.Generator().manual_seed(2)
    ratio = torch.randn(100, generator=generator).exp().requires_grad_()
    advantages = torch.randn(100, generator=generator)
    (small,) = torch.autograd.grad(clipped_surrogate(ratio, advantages).sum(), ratio)
    (large,) = torch.autograd.grad(clipped_surrogate(ratio, 100 * advantages).sum(), ratio)
    assert ((small == 0) == (large == 0)).all()
    torch.testing.assert_close(large, 100 * small)


def test_no_gradient_flows_into_the_advantages():
    advantages = torch.randn(5, requires_grad=True)
    assert not clipped_surrogate(RHO, advantages).requires_grad


def test_surrogate_settings_out_of_range_are_named():
    for settings, message in [
        ({"eps_clip": 0}, "eps_clip must be positive"),
        ({"eps_clip_high": -0.1}, "eps_clip_high must be positive"),
        ({"dual_clip": 1}, "dual_clip must be greater than 1, got 1"),
    ]:
        with pytest.raises(ValueError, match=message):
            clipped_surrogate(RHO, RHO, **settings)
    with pytest.raises(ValueError, match=r"ratio \(5,\), advantages \(5, 1\)"):
        clipped_surrogate(RHO, torch.ones(5, 1))


# clipped_value_loss


def literal_value_loss(values, old_values, returns, eps, mask):
    errors = []
    for v, old, target, counts in zip(values, old_values, returns, mask, strict=True):
        if counts:
            v_clip = old + clip(v - old, -eps, eps)
            errors.append(max((v - target) ** 2, (v_clip - target) ** 2))
    return 0.5 * sum(errors) / len(errors)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.formula("clipped-value", "value-loss")
def test_value_loss_is_half_the_mean_of_the_larger_error(seed):
    generator = torch.Generator().manual_seed(seed)
    values, old_values, returns = torch.randn((3, 20), generator=generator, dtype=torch.float64)
    mask = torch.rand(20, generator=generator) < 0.7
    ours = clipped_value_loss(values, old_values, returns, 0.3, mask)
    columns = [x.tolist() for x in (values, old_values, returns)]
    assert ours.item() == pytest.approx(literal_value_loss(*columns, 0.3, mask.tolist()))


@pytest.mark.formula("value-loss")
def test_without_a_range_it_is_half_the_mean_squared_error():
    values, returns = torch.tensor([1.0, 2.0]), torch.tensor([4.0, 2.0])
    assert clipped_value_loss(values, None, returns, None).item() == 2.25  # ½ · (9 + 0)/2
    assert clipped_value_loss(values, torch.zeros(2), returns, None).item() == 2.25


@pytest.mark.formula("ppo-loss")
def test_A18_half_the_mse_of_A07_is_a_value_coef_of_1():
    values = torch.tensor([1.0, 2.0], requires_grad=True)
    returns = torch.tensor([4.0, 0.0])
    (theirs,) = torch.autograd.grad(0.5 * torch.nn.functional.mse_loss(values, returns), values)
    (ours,) = torch.autograd.grad(1.0 * clipped_value_loss(values, None, returns, None), values)
    assert ours.tolist() == theirs.tolist()


def test_gradients_flow_into_the_values_only():
    leaves = [torch.randn(4, requires_grad=True) for _ in range(3)]
    clipped_value_loss(*leaves, 0.2).backward()
    assert leaves[0].grad is not None
    assert leaves[1].grad is None and leaves[2].grad is None


def test_the_clip_holds_the_critic_only_while_it_improves_too_fast():
    def gradient(value, old_value, target):
        v = torch.tensor([value], requires_grad=True)
        clipped_value_loss(v, torch.tensor([old_value]), torch.tensor([target]), 0.2).backward()
        return v.grad.item()

    assert gradient(5.1, 5.0, 10.0) == pytest.approx(-4.9)  # a small step: the plain error
    assert gradient(8.0, 5.0, 10.0) == 0  # already far ahead: wait
    assert gradient(1.0, 5.0, 10.0) == pytest.approx(-9.0)  # went the wrong way: pull back


def test_value_loss_arguments_are_named():
    x = torch.zeros(3)
    with pytest.raises(ValueError, match="old_values must be given when eps_clip_value is set"):
        clipped_value_loss(x, None, x, 0.2)
    with pytest.raises(ValueError, match="eps_clip_value must be positive"):
        clipped_value_loss(x, x, x, 0)
    with pytest.raises(ValueError, match=r"values \(3, 1\), old_values \(3,\), returns \(3,\)"):
        clipped_value_loss(x[:, None], x, x)


# categorical_entropy


def test_entropy_by_hand():
    # ½·log 2 + 2·¼·log 4 = 1.5·log 2
    logits = torch.tensor([0.5, 0.25, 0.25]).log()
    assert categorical_entropy(logits).item() == pytest.approx(1.5 * math.log(2))
    assert categorical_entropy(torch.zeros(2, 3, 7)).flatten().tolist() == pytest.approx([math.log(7)] * 6)
    assert categorical_entropy(torch.tensor([0.0, 1000.0])).item() == 0


def test_entropy_does_not_see_a_shift_of_the_logits():
    logits = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(categorical_entropy(logits + 1000), categorical_entropy(logits), atol=1e-4, rtol=0)


def test_a_forbidden_action_has_no_entropy_and_no_gradient():
    logits = torch.tensor([1.0, -INF, 0.0, -INF], requires_grad=True)
    entropy = categorical_entropy(logits)
    entropy.backward()
    free = torch.tensor([1.0, 0.0], requires_grad=True)
    categorical_entropy(free).backward()
    assert entropy.item() == pytest.approx(categorical_entropy(free).item())
    assert logits.grad.tolist() == pytest.approx([free.grad[0].item(), 0.0, free.grad[1].item(), 0.0])


def test_the_gradient_of_the_entropy_is_that_of_finite_differences():
    logits = torch.randn(5, generator=torch.Generator().manual_seed(3), dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(categorical_entropy, logits)


def test_entropy_of_half_precision_logits_is_computed_in_float32():
    logits = torch.zeros(32_000, dtype=torch.bfloat16)
    entropy = categorical_entropy(logits)
    assert entropy.dtype == torch.float32
    assert entropy.item() == pytest.approx(math.log(32_000), abs=1e-3)


@pytest.mark.parametrize("bad", [[NAN, 0.0], [INF, 0.0], [-INF, -INF]])
def test_logits_that_are_no_distribution_give_nan(bad):
    assert categorical_entropy(torch.tensor(bad)).isnan()


# ppo_loss

NAMES = ("logp", "old_logp", "advantages", "values", "old_values", "returns", "entropy")


def batch(seed=0, shape=(4, 6), dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    inputs = {name: 0.3 * torch.randn(shape, generator=generator, dtype=dtype) for name in NAMES}
    mask = torch.arange(shape[-1]) < torch.tensor([[6], [4], [1], [0]])
    return inputs, mask


def loss_of(inputs, **settings):
    inputs = dict(inputs)
    positional = [inputs.pop(name) for name in ("logp", "old_logp", "advantages")]
    return ppo_loss(*positional, **inputs, **settings)


def literal_ppo_loss(inputs, mask, eps_clip, eps_clip_value, value_coef, entropy_coef):
    """L = −mean(min(ρA, clip(ρ)A)) + c_v·½·mean(max(…)²) − c_e·mean(H), one element at a time."""
    policy = value = entropy = n = 0
    rows = zip(*(inputs[name].flatten().tolist() for name in NAMES), mask.flatten().tolist(), strict=True)
    for logp, old_logp, advantage, v, old_v, target, h, counts in rows:
        if not counts:
            continue
        n += 1
        rho = math.exp(logp - old_logp)
        policy -= min(rho * advantage, clip(rho, 1 - eps_clip, 1 + eps_clip) * advantage)
        v_clip = old_v + clip(v - old_v, -eps_clip_value, eps_clip_value)
        value += 0.5 * max((v - target) ** 2, (v_clip - target) ** 2)
        entropy += h
    policy, value, entropy = policy / n, value / n, entropy / n
    return [policy + value_coef * value - entropy_coef * entropy, policy, value, entropy]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.formula("ppo-loss", "a07-ppo-loss")
def test_the_loss_is_the_formula_of_the_book(seed):
    inputs, mask = batch(seed)
    ours = loss_of(inputs, mask=mask, eps_clip=0.15, eps_clip_value=0.25, value_coef=0.3, entropy_coef=0.05)
    expected = literal_ppo_loss(inputs, mask, 0.15, 0.25, 0.3, 0.05)
    assert [x.item() for x in ours[:4]] == pytest.approx(expected, abs=1e-12)


def test_the_gradient_is_that_of_finite_differences():
    inputs, mask = batch(5)
    leaves = [inputs.pop(name).requires_grad_() for name in ("logp", "values", "entropy")]

    def total(logp, values, entropy):
        return loss_of({**inputs, "logp": logp, "values": values, "entropy": entropy}, mask=mask).total

    assert torch.autograd.gradcheck(total, leaves)


def test_gradients_flow_into_logp_values_and_entropy_only():
    inputs, mask = batch()
    for x in inputs.values():
        x.requires_grad_()
    loss = loss_of(inputs, mask=mask)
    loss.total.backward()
    learns = {name for name in NAMES if inputs[name].grad is not None}
    assert learns == {"logp", "values", "entropy"}
    assert not any(x.requires_grad for x in loss[4:])


def test_with_ratio_1_it_is_the_plain_policy_gradient():
    inputs, mask = batch(1)
    inputs["old_logp"] = inputs["logp"].clone()
    inputs["logp"].requires_grad_()
    loss = loss_of(inputs, mask=mask, value_coef=0, entropy_coef=0)
    (ours,) = torch.autograd.grad(loss.total, inputs["logp"])
    torch.testing.assert_close(ours, -inputs["advantages"] * mask / mask.sum())
    assert [x.item() for x in loss[4:]] == [0, 0, 0, 1, 1]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("hidden", [NAN, INF, -INF])
def test_what_the_mask_hides_changes_neither_loss_nor_gradient(name, hidden):
    clean, mask = batch(2)
    dirty = {key: x.clone() for key, x in clean.items()}
    dirty[name][~mask] = hidden
    results = []
    for inputs in (clean, dirty):
        for key in ("logp", "values", "entropy"):
            inputs[key].requires_grad_()
        loss = loss_of(inputs, mask=mask)
        loss.total.backward()
        gradients = [inputs[key].grad for key in ("logp", "values", "entropy")]
        results.append(([x.item() for x in loss], [x.tolist() for x in gradients]))
    assert results[0] == results[1]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_number_that_is_not_finite_and_counts_shows_in_the_total(name, bad):
    inputs, mask = batch(3)
    inputs[name][0, 0] = bad
    assert not loss_of(inputs, mask=mask).total.isfinite()


def test_micro_batches_add_up_to_the_whole_step():
    inputs, mask = batch(4)
    inputs["logp"].requires_grad_()
    whole = loss_of(inputs, mask=mask)
    parts = [
        loss_of({name: x[rows] for name, x in inputs.items()}, mask=mask[rows], count=mask.sum())
        for rows in ([0], [1, 2], [3])
    ]
    for field in ("total", "policy", "value", "entropy"):
        together = sum(getattr(part, field) for part in parts)
        torch.testing.assert_close(together, getattr(whole, field))
    (expected,) = torch.autograd.grad(whole.total, inputs["logp"])
    (ours,) = torch.autograd.grad(sum(part.total for part in parts), inputs["logp"])
    torch.testing.assert_close(ours, expected)


def test_padding_more_changes_nothing():
    inputs, mask = batch(6)
    wide = {name: torch.nn.functional.pad(x, (0, 5), value=9.0) for name, x in inputs.items()}
    narrow_loss = loss_of(inputs, mask=mask)
    wide_loss = loss_of(wide, mask=torch.nn.functional.pad(mask, (0, 5)))
    assert [x.item() for x in wide_loss] == pytest.approx([x.item() for x in narrow_loss], abs=1e-12)


def test_nothing_valid_gives_a_loss_of_0_with_gradient_0():
    inputs, mask = batch()
    inputs["logp"].requires_grad_()
    loss = loss_of(inputs, mask=torch.zeros_like(mask))
    loss.total.backward()
    assert loss.total.item() == 0
    assert (inputs["logp"].grad == 0).all()


def test_the_range_of_the_value_clip_is_its_own():
    inputs, _ = batch(7)
    wide = loss_of(inputs, eps_clip_value=1e6).value
    narrow = loss_of(inputs, eps_clip_value=1e-3).value
    off = loss_of({**inputs, "old_values": None}, eps_clip_value=None).value
    assert wide.item() == pytest.approx(off.item())
    assert narrow > off


def test_half_precision_is_computed_in_float32():
    inputs, mask = batch(dtype=torch.float32)
    exact = {name: x.bfloat16().float() for name, x in inputs.items()}
    half = loss_of({name: x.bfloat16() for name, x in inputs.items()}, mask=mask)
    assert all(x.dtype == torch.float32 for x in half)
    assert [x.item() for x in half] == pytest.approx([x.item() for x in loss_of(exact, mask=mask)], abs=1e-6)


def test_statistics_use_both_sides_of_an_uneven_clip():
    ratio = torch.tensor([1.25, 1.35, 0.75])
    zeros, ones = torch.zeros(3), torch.ones(3)
    loss = ppo_loss(
        ratio.log(),
        zeros,
        ones,
        values=zeros,
        old_values=zeros,
        returns=zeros,
        entropy=zeros,
        eps_clip=0.2,
        eps_clip_high=0.3,
    )
    assert loss.clip_fraction.item() == pytest.approx(1 / 3)  # 1.35
    assert loss.clip_fraction_outside.item() == pytest.approx(2 / 3)  # 1.35 and 0.75
    assert loss.policy.item() == pytest.approx(-(1.25 + 1.3 + 0.75) / 3)
    assert loss.ratio_max.item() == pytest.approx(1.35)
    assert loss.ratio_mean.item() == pytest.approx((1.25 + 1.35 + 0.75) / 3)
    assert loss.approx_kl.item() == pytest.approx(sum(x - 1 - math.log(x) for x in (1.25, 1.35, 0.75)) / 3, abs=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_a_column_instead_of_a_row_is_refused(name):
    inputs, _ = batch()
    inputs[name] = inputs[name].unsqueeze(-1)
    with pytest.raises(ValueError, match=rf"{name} \(4, 6, 1\)"):
        loss_of(inputs)


def test_a_critic_that_answers_in_columns_is_refused():
    inputs, _ = batch()
    for name in ("values", "old_values", "returns"):
        inputs[name] = inputs[name].unsqueeze(-1)
    with pytest.raises(ValueError, match=r"logp \(4, 6\), .* values \(4, 6, 1\)"):
        loss_of(inputs)


def test_wrong_settings_and_masks_are_named():
    inputs, mask = batch()
    with pytest.raises(ValueError, match="eps_clip must be positive"):
        loss_of(inputs, eps_clip=-0.2)
    with pytest.raises(ValueError, match="mask must have the shape"):
        loss_of(inputs, mask=mask[:, :1])
    with pytest.raises(ValueError, match="old_values must be given"):
        loss_of({**inputs, "old_values": None})
    with pytest.raises(ValueError, match="count must be positive"):
        loss_of(inputs, count=0)


# Cases met in public


def test_B13_the_minimum_comes_after_the_product_with_the_advantage():
    ratio, advantages = torch.tensor([1.5, 1.5, 0.5, 0.5]), torch.tensor([1.0, -1.0, 1.0, -1.0])
    losses = -clipped_surrogate(ratio, advantages, 0.2)
    assert losses.tolist() == pytest.approx([-1.2, 1.5, -0.5, 0.8])
    assert losses.mean().item() == pytest.approx(0.15)
    wrong = -torch.minimum(ratio, ratio.clamp(0.8, 1.2)) * advantages
    assert wrong[[1, 3]].tolist() == pytest.approx([1.2, 0.5])  # bad actions bounded the wrong way
    # New over old: an action that has become twice as likely has ratio 2, not ½.
    assert importance_ratio(torch.tensor([0.6]).log(), torch.tensor([0.3]).log()).item() == pytest.approx(2.0)


@pytest.mark.parametrize(
    "value, eps, expected, gradient, wrong",
    [(1.0, 0.2, 40.5, -9.0, 13.52), (8.0, 0.2, 11.52, 0.0, 2.0), (1.0, None, 40.5, -9.0, 13.52)],
)
def test_B14_the_value_loss_takes_the_larger_error(value, eps, expected, gradient, wrong):
    v = torch.tensor([value], requires_grad=True)
    loss = clipped_value_loss(v, torch.tensor([5.0]), torch.tensor([10.0]), eps)
    loss.backward()
    assert loss.item() == pytest.approx(expected)
    assert v.grad.item() == pytest.approx(gradient)
    assert loss.item() != pytest.approx(wrong)  # the smaller error


@pytest.mark.parametrize("action", [0, 2])
def test_B17_the_entropy_is_that_of_the_distribution_not_of_the_action(action):
    probs = torch.tensor([[0.7, 0.2, 0.1]])
    entropy = categorical_entropy(probs.log())
    assert entropy.item() == pytest.approx(0.801819, abs=1e-5)
    p = probs[0, action].item()
    assert entropy.item() != pytest.approx(-math.log(p), abs=1e-3)
    assert entropy.item() != pytest.approx(-p * math.log(p), abs=1e-3)
    one = torch.zeros(1)
    logp = probs[:, action].log()
    loss = ppo_loss(logp, logp, one, values=one, old_values=one, returns=one, entropy=entropy, entropy_coef=0.01)
    assert loss.total.item() == pytest.approx(-0.01 * 0.801819, abs=1e-7)


def test_B18_a_false_report_log_softmax_first_changes_nothing():
    logits = torch.tensor([1.0, 2.0, 4.0])
    twice = logits.log_softmax(0)
    assert twice.softmax(0).tolist() == pytest.approx([0.0420, 0.1142, 0.8438], abs=1e-4)
    assert categorical_entropy(logits).item() == pytest.approx(0.5243, abs=1e-4)
    assert categorical_entropy(twice).item() == pytest.approx(0.5243, abs=1e-4)


def test_without_values_the_loss_is_policy_and_entropy_alone():
    logp, old_logp, advantages, entropy = (
        torch.tensor(x) for x in ([-1.0, -2.0], [-1.1, -1.8], [1.0, -2.0], [0.5, 0.7])
    )
    found = ppo_loss(
        logp, old_logp, advantages, values=None, old_values=None, returns=None, entropy=entropy, entropy_coef=0.1
    )
    # Ratios e^0.1 and e^-0.2: the second one is outside 1 ± 0.2 no more than the first, so nothing is clipped.
    policy = -(math.exp(0.1) - 2 * math.exp(-0.2)) / 2
    assert float(found.policy) == pytest.approx(policy, abs=1e-6)
    assert float(found.value) == 0.0
    assert float(found.total) == pytest.approx(policy - 0.1 * 0.6, abs=1e-6)
