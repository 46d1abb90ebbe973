"""DPO, IPO and SimPO: by hand, against literal transcriptions, and by the direction and size of their gradients."""

import math

import pytest
import torch
from torch import tensor

from ppo_lab.preference import dpo_loss, ipo_loss, simpo_loss

NAN, INF = math.nan, math.inf


def pairs(n=50, seed=0):
    """Log-probabilities of whole answers, [n] each: chosen, rejected, and those of a reference."""
    generator = torch.Generator().manual_seed(seed)
    return [-20 + 5 * torch.randn(n, generator=generator, dtype=torch.float64) for _ in range(4)]


def lengths(n=50, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, 25, (n,), generator=generator) for _ in range(2)]


def gradients(loss, chosen, rejected, *others, **settings):
    chosen, rejected = chosen.clone().requires_grad_(), rejected.clone().requires_grad_()
    loss(chosen, rejected, *others, **settings).total.backward()
    return chosen.grad, rejected.grad


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


# By hand


@pytest.mark.formula("dpo", "implicit-reward")
def test_dpo_by_hand():
    """h = (−2 + 3) − (−5 + 4) = 2 nats, β = ½: −log σ(1) = log(1 + 1/e) = 0.313262."""
    loss = dpo_loss(tensor([-2.0]), tensor([-5.0]), tensor([-3.0]), tensor([-4.0]), kl_coef=0.5)
    assert loss.total.item() == pytest.approx(0.313262, abs=1e-6)
    assert (loss.chosen_reward.tolist(), loss.rejected_reward.tolist()) == ([0.5], [-0.5])
    assert loss.accuracy.item() == 1
    # The other way round it costs exactly one more: log(1 + e).
    swapped = dpo_loss(tensor([-5.0]), tensor([-2.0]), tensor([-4.0]), tensor([-3.0]), kl_coef=0.5)
    assert swapped.total.item() == pytest.approx(1.313262, abs=1e-6)
    assert swapped.accuracy.item() == 0


@pytest.mark.formula("ipo")
def test_ipo_by_hand():
    """The same h = 2 nats; β = ¼ asks for 1/(2β) = 2 and is content, β = ½ asks for 1: (2 − 1)² = 1."""
    logp = tensor([-2.0]), tensor([-5.0]), tensor([-3.0]), tensor([-4.0])
    assert ipo_loss(*logp, kl_coef=0.25).total.item() == 0
    loss = ipo_loss(*logp, kl_coef=0.5)
    assert loss.total.item() == 1
    assert (loss.chosen_reward.tolist(), loss.rejected_reward.tolist()) == ([0.5], [-0.5])


@pytest.mark.formula("simpo")
def test_simpo_by_hand():
    """−2/4 = −½ and −6/3 = −2 per token, twice their difference is 3, minus the margin 1: log(1 + e^−2) = 0.126928."""
    loss = simpo_loss(tensor([-2.0]), tensor([-6.0]), tensor([4]), tensor([3]), scale=2.0, margin=1.0)
    assert loss.total.item() == pytest.approx(0.126928, abs=1e-6)
    assert (loss.chosen_reward.tolist(), loss.rejected_reward.tolist()) == ([-1.0], [-4.0])


def test_a_policy_that_is_still_the_reference_pays_log_two():
    chosen, rejected, *_ = pairs()
    loss = dpo_loss(chosen, rejected, chosen, rejected, kl_coef=0.1)
    assert loss.total.item() == pytest.approx(math.log(2))
    assert loss.chosen_reward.abs().max() == 0
    # Equal rewards are not the right order.
    assert loss.accuracy.item() == 0
    assert ipo_loss(chosen, rejected, chosen, rejected, kl_coef=0.1).total.item() == pytest.approx(25)
    same = tensor([-6.0])
    assert simpo_loss(same, same, tensor([3]), tensor([3]), scale=2.0, margin=0.0).total.item() == pytest.approx(
        math.log(2)
    )


# Literal transcriptions


@pytest.mark.formula("dpo")
def test_dpo_is_the_formula_pair_by_pair():
    values = pairs()
    losses = []
    for chosen, rejected, ref_chosen, ref_rejected in zip(*(x.tolist() for x in values), strict=True):
        ratio_c = math.exp(chosen) / math.exp(ref_chosen)
        ratio_r = math.exp(rejected) / math.exp(ref_rejected)
        losses.append(-math.log(sigmoid(0.3 * math.log(ratio_c) - 0.3 * math.log(ratio_r))))
    assert dpo_loss(*values, kl_coef=0.3).total.item() == pytest.approx(sum(losses) / len(losses), rel=1e-12)


@pytest.mark.formula("ipo")
def test_ipo_is_the_formula_pair_by_pair():
    values = pairs()
    losses = []
    for chosen, rejected, ref_chosen, ref_rejected in zip(*(x.tolist() for x in values), strict=True):
        h = math.log(math.exp(chosen) * math.exp(ref_rejected) / (math.exp(rejected) * math.exp(ref_chosen)))
        losses.append((h - 1 / 0.6) ** 2)
    assert ipo_loss(*values, kl_coef=0.3).total.item() == pytest.approx(sum(losses) / len(losses), rel=1e-12)


@pytest.mark.formula("simpo")
def test_simpo_is_the_formula_pair_by_pair():
    chosen, rejected, *_ = pairs()
    values = (chosen, rejected, *lengths())
    losses = [
        -math.log(sigmoid(2.5 / n_c * c - 2.5 / n_r * r - 0.7))
        for c, r, n_c, n_r in zip(*(x.tolist() for x in values), strict=True)
    ]
    loss = simpo_loss(*values, scale=2.5, margin=0.7)
    assert loss.total.item() == pytest.approx(sum(losses) / len(losses), rel=1e-12)


def test_accuracy_is_the_share_of_pairs_in_the_right_order():
    zero = torch.zeros(4)
    logp = tensor([1.0, 2.0, -1.0, 3.0])
    assert dpo_loss(logp, zero, zero, zero, kl_coef=0.1).accuracy.item() == 0.75
    # A long answer is the less probable one in sum and the more probable one per token.
    loss = simpo_loss(tensor([-8.0]), tensor([-4.0]), tensor([8]), tensor([2]), scale=1.0, margin=0.0)
    assert loss.accuracy.item() == 1


# Gradients


def test_dpo_pushes_hardest_where_the_implicit_reward_is_most_wrong():
    values = pairs(n=4)
    chosen, rejected = gradients(dpo_loss, *values, kl_coef=0.3)
    h = (values[0] - values[2] - values[1] + values[3]).tolist()
    # −β·σ(−β·h)/B up on the chosen answer, the same down on the rejected one.
    assert chosen.tolist() == pytest.approx([-0.3 * sigmoid(-0.3 * x) / 4 for x in h])
    assert torch.equal(rejected, -chosen)


def test_ipo_turns_round_at_its_margin():
    zero = torch.zeros(3)
    # β = ½ asks for 1 nat. Derivative 2(h − 1)/B at h = 0, 1, 3.
    chosen, rejected = gradients(ipo_loss, tensor([0.0, 1.0, 3.0]), zero, zero, zero, kl_coef=0.5)
    assert chosen.tolist() == pytest.approx([-2 / 3, 0, 4 / 3])
    assert torch.equal(rejected, -chosen)


def test_dpo_never_stops_pulling_a_pair_apart_and_ipo_does():
    h = tensor([40.0])
    zero = torch.zeros(1)
    assert gradients(dpo_loss, h, zero, zero, zero, kl_coef=0.1)[0] < 0
    assert gradients(ipo_loss, h, zero, zero, zero, kl_coef=0.1)[0] > 0


def test_a_token_of_a_long_answer_weighs_less_in_simpo():
    logp = tensor([-6.0, -6.0])
    chosen, rejected = gradients(simpo_loss, logp, logp, tensor([2, 6]), tensor([2, 6]), scale=2.0, margin=0.0)
    # −s/|y|·σ(0)/B
    assert chosen.tolist() == pytest.approx([-0.25, -1 / 12])
    assert torch.equal(rejected, -chosen)


def test_a_larger_margin_pushes_harder():
    logp = tensor([-6.0])
    pushes = [
        gradients(simpo_loss, logp, logp, tensor([3]), tensor([3]), scale=2.0, margin=margin)[0].item()
        for margin in (0.0, 1.0, 3.0)
    ]
    assert pushes == pytest.approx([-2 / 3 * sigmoid(margin) for margin in (0.0, 1.0, 3.0)])


@pytest.mark.parametrize("loss", [dpo_loss, ipo_loss])
def test_no_gradient_flows_into_the_reference_or_from_the_rewards(loss):
    values = [x.requires_grad_() for x in pairs()]
    result = loss(*values, kl_coef=0.1)
    result.total.backward()
    assert values[0].grad is not None and values[1].grad is not None
    assert values[2].grad is None and values[3].grad is None
    assert not any(x.requires_grad for x in result[1:])


def test_a_hopeless_pair_stays_finite():
    chosen, rejected = tensor([-4000.0]), tensor([0.0])
    loss = dpo_loss(chosen, rejected, rejected, rejected, kl_coef=0.1)
    assert loss.total.item() == pytest.approx(400)
    assert gradients(dpo_loss, chosen, rejected, rejected, rejected, kl_coef=0.1)[0].item() == pytest.approx(-0.1)


# What does not matter


@pytest.mark.parametrize("loss", [dpo_loss, ipo_loss])
def test_only_the_margin_of_the_log_ratios_matters(loss):
    chosen, rejected, ref_chosen, ref_rejected = pairs()
    expected = loss(chosen, rejected, ref_chosen, ref_rejected, kl_coef=0.2).total.item()
    # Both answers of a pair rarer by the same factor; policy and reference changed alike.
    assert loss(chosen - 3, rejected - 3, ref_chosen, ref_rejected, kl_coef=0.2).total.item() == pytest.approx(expected)
    alike = loss(chosen + 5, rejected, ref_chosen + 5, ref_rejected, kl_coef=0.2)
    assert alike.total.item() == pytest.approx(expected)


def test_for_simpo_the_same_change_per_token_of_both_answers_does_not_matter():
    chosen, rejected, *_ = pairs()
    n_chosen, n_rejected = lengths()
    expected = simpo_loss(chosen, rejected, n_chosen, n_rejected, scale=2.0, margin=0.5).total.item()
    shifted = simpo_loss(chosen - 2 * n_chosen, rejected - 2 * n_rejected, n_chosen, n_rejected, scale=2.0, margin=0.5)
    assert shifted.total.item() == pytest.approx(expected)


# Weights, and what the losses lead to


def test_weights_count_pairs_as_if_they_stood_there_several_times():
    values = [x[:3] for x in pairs()]
    repeated = [x[[0, 1, 1, 1]] for x in values]
    weighted = dpo_loss(*values, kl_coef=0.2, weights=tensor([1.0, 3.0, 0.0])).total.item()
    assert weighted == pytest.approx(dpo_loss(*repeated, kl_coef=0.2).total.item())
    assert dpo_loss(*values, kl_coef=0.2, weights=torch.full((3,), 0.1)).total.item() == pytest.approx(
        dpo_loss(*values, kl_coef=0.2).total.item()
    )


def minimum(loss, kl_coef, wins, losses):
    """The margin h that a pair ends at which was judged one way `wins` times and the other way `losses` times."""
    h, zero = torch.zeros(1, dtype=torch.float64, requires_grad=True), torch.zeros(1, dtype=torch.float64)
    for _ in range(2000):
        one_way = loss(h, zero, zero, zero, kl_coef=kl_coef).total
        other_way = loss(zero, h, zero, zero, kl_coef=kl_coef).total
        total = (wins * one_way + losses * other_way) / (wins + losses)
        (slope,) = torch.autograd.grad(total, h)
        h = (h - 0.4 * slope).detach().requires_grad_()
    return h.item()


def test_judged_three_to_one_dpo_ends_at_the_log_odds_and_ipo_at_the_difference():
    # DPO: β·h = log(3/1). IPO: h = (¾ − ¼)/(2β).
    assert minimum(dpo_loss, 1.0, 3, 1) == pytest.approx(math.log(3), abs=1e-6)
    assert minimum(ipo_loss, 0.5, 3, 1) == pytest.approx(0.5, abs=1e-6)
    # Never judged the other way: IPO stops at 1/(2β), DPO is on its way to infinity.
    assert minimum(ipo_loss, 0.5, 1, 0) == pytest.approx(1.0, abs=1e-6)
    assert minimum(dpo_loss, 1.0, 1, 0) > 6


# Precision and refusals


def test_half_precision_is_computed_in_float32():
    values = [x.bfloat16() for x in pairs()]
    for loss in (dpo_loss, ipo_loss):
        result = loss(*values, kl_coef=0.1)
        assert {x.dtype for x in result} == {torch.float32}
        exact = loss(*(x.double() for x in values), kl_coef=0.1)
        assert result.total.item() == pytest.approx(exact.total.item(), rel=1e-5)
    result = simpo_loss(*values[:2], *lengths(), scale=2.0, margin=0.5)
    assert {x.dtype for x in result} == {torch.float32}


def test_double_precision_stays():
    assert dpo_loss(*pairs(), kl_coef=0.1).total.dtype == torch.float64


@pytest.mark.parametrize("loss", [dpo_loss, ipo_loss])
def test_other_shapes_are_refused(loss):
    one = torch.zeros(2)
    with pytest.raises(ValueError, match=r"rejected_logp \(2, 1\)"):
        loss(one, torch.zeros(2, 1), one, one, kl_coef=0.1)
    with pytest.raises(ValueError, match=r"chosen_logp must have the shape \[B\].* got \(2, 3\)"):
        loss(*[torch.zeros(2, 3)] * 4, kl_coef=0.1)
    with pytest.raises(ValueError, match=r"chosen_logp must have the shape \[B\]"):
        loss(*[torch.zeros(0)] * 4, kl_coef=0.1)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("place, name", list(enumerate(("chosen", "rejected", "ref_chosen", "ref_rejected"))))
def test_what_is_not_finite_is_refused_by_name(bad, place, name):
    values = [torch.zeros(3) for _ in range(4)]
    values[place][1] = bad
    for loss in (dpo_loss, ipo_loss):
        with pytest.raises(ValueError, match=f"^{name}_logp must be finite, got {bad}"):
            loss(*values, kl_coef=0.1)
    if place < 2:
        with pytest.raises(ValueError, match=f"^{name}_logp must be finite"):
            simpo_loss(*values[:2], torch.ones(3), torch.ones(3), scale=2.0, margin=0.5)


@pytest.mark.parametrize("value", [0.0, -0.1, NAN, INF])
def test_a_price_that_is_none_is_refused(value):
    for loss in (dpo_loss, ipo_loss):
        with pytest.raises(ValueError, match="kl_coef must be positive"):
            loss(*pairs(), kl_coef=value)
    with pytest.raises(ValueError, match="scale must be positive"):
        simpo_loss(*pairs()[:2], *lengths(), scale=value, margin=0.5)


def test_lengths_margins_and_weights_out_of_range_are_refused():
    logp, length = torch.zeros(2), torch.ones(2)
    with pytest.raises(ValueError, match="rejected_lengths must be at least 1, got 0"):
        simpo_loss(logp, logp, length, tensor([3, 0]), scale=2.0, margin=0.5)
    for margin in (-0.1, NAN, INF):
        with pytest.raises(ValueError, match="margin must be at least 0"):
            simpo_loss(logp, logp, length, length, scale=2.0, margin=margin)
    for weights in ([-1.0, 2.0], [0.0, 0.0]):
        with pytest.raises(ValueError, match="weights must be at least 0 and not all 0"):
            dpo_loss(logp, logp, logp, logp, kl_coef=0.1, weights=tensor(weights))
    with pytest.raises(ValueError, match=r"weights \(1,\)"):
        dpo_loss(logp, logp, logp, logp, kl_coef=0.1, weights=torch.ones(1))
