"""Estimators of the KL divergence, held against the exact sum over a small vocabulary."""

import math
from itertools import product

import pytest
import torch

from ppo_lab.kl import approx_kl, best_of_n_kl, kl_estimate

KINDS = ("k1", "k2", "k3")


def two_policies(seed=0, n=50):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, generator=generator, dtype=torch.float64)
    ref_logits = logits + 0.5 * torch.randn(n, generator=generator, dtype=torch.float64)
    return logits, ref_logits


def exact_kl(p_logits, q_logits):
    p, q = p_logits.softmax(0), q_logits.softmax(0)
    return sum(p[i] * (p[i].log() - q[i].log()) for i in range(len(p)))


def test_each_kind_is_its_formula():
    logp, ref_logp = [-1.0, -0.5, -3.0], [-1.2, -0.1, -3.0]
    literal = {
        "k1": [a - b for a, b in zip(logp, ref_logp, strict=True)],
        "k2": [0.5 * (a - b) ** 2 for a, b in zip(logp, ref_logp, strict=True)],
        "k3": [math.exp(b - a) - 1 - (b - a) for a, b in zip(logp, ref_logp, strict=True)],
    }
    for kind in KINDS:
        ours = kl_estimate(torch.tensor(logp, dtype=torch.float64), torch.tensor(ref_logp, dtype=torch.float64), kind)
        assert ours.tolist() == pytest.approx(literal[kind], abs=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_k1_and_k3_are_unbiased_and_k2_is_not(seed):
    logits, ref_logits = two_policies(seed)
    p, logp, ref_logp = logits.softmax(0), logits.log_softmax(0), ref_logits.log_softmax(0)
    mean = {kind: (p * kl_estimate(logp, ref_logp, kind)).sum().item() for kind in KINDS}
    kl = exact_kl(logits, ref_logits).item()
    assert mean["k1"] == pytest.approx(kl, abs=1e-12)
    assert mean["k3"] == pytest.approx(kl, abs=1e-12)
    assert abs(mean["k2"] - kl) > 1e-4


def test_k2_and_k3_vary_less_than_k1():
    logits, ref_logits = two_policies()
    p, logp, ref_logp = logits.softmax(0), logits.log_softmax(0), ref_logits.log_softmax(0)
    variance = {}
    for kind in KINDS:
        k = kl_estimate(logp, ref_logp, kind)
        variance[kind] = (p * (k - (p * k).sum()).square()).sum()
    assert variance["k2"] < variance["k1"] / 4
    assert variance["k3"] < variance["k1"] / 4


def test_as_a_loss_only_k2_has_the_gradient_of_the_kl():
    # Fixed samples: the probabilities that weigh the tokens carry no gradient.
    logits, ref_logits = two_policies()
    ref_logp, weights = ref_logits.log_softmax(0), logits.softmax(0)
    gradients = {}
    for kind in KINDS:
        leaf = logits.clone().requires_grad_()
        (weights * kl_estimate(leaf.log_softmax(0), ref_logp, kind)).sum().backward()
        gradients[kind] = leaf.grad
    leaf = logits.clone().requires_grad_()
    exact_kl(leaf, ref_logits).backward()
    torch.testing.assert_close(gradients["k1"], torch.zeros_like(logits))
    torch.testing.assert_close(gradients["k2"], leaf.grad)
    torch.testing.assert_close(gradients["k3"], weights - ref_logits.softmax(0))


def test_nothing_is_clamped():
    logp, ref_logp = torch.tensor([0.0, -40.0]), torch.tensor([-40.0, 0.0])
    assert kl_estimate(logp, ref_logp, "k1").tolist() == [40.0, -40.0]
    assert kl_estimate(logp, ref_logp, "k2").tolist() == [800.0, 800.0]
    assert kl_estimate(logp, ref_logp, "k3")[1].item() == pytest.approx(math.exp(40), rel=1e-5)


def test_approx_kl_is_never_negative_and_the_naive_form_is():
    old_logp = torch.linspace(-3, -0.1, 500)
    logp = old_logp + 1e-4 * torch.sin(torch.arange(500.0))
    log_ratio = logp - old_logp
    naive = log_ratio.exp() - 1 - log_ratio
    assert naive.min() < 0
    per_element = torch.stack([approx_kl(logp[i], old_logp[i]) for i in range(500)])
    assert (per_element >= 0).all()
    exact = torch.expm1(log_ratio.double()) - log_ratio.double()
    assert approx_kl(logp, old_logp).item() == pytest.approx(exact.mean().item(), rel=1e-2)


@pytest.mark.formula("approx-kl")
def test_approx_kl_estimates_old_to_new():
    logits, new_logits = two_policies()
    p = logits.softmax(0)
    logp, old_logp = new_logits.log_softmax(0), logits.log_softmax(0)
    expectation = sum(p[i] * approx_kl(logp[i : i + 1], old_logp[i : i + 1]) for i in range(50))
    assert expectation.item() == pytest.approx(exact_kl(logits, new_logits).item(), abs=1e-12)


def test_a_mask_hides_nan_from_value_and_gradient():
    logp = torch.tensor([-1.0, math.nan, -2.0], requires_grad=True)
    old_logp = torch.tensor([-1.1, math.inf, -2.3])
    mask = torch.tensor([True, False, True])
    kl = approx_kl(logp, old_logp, mask)
    kl.backward()
    # (e^0.1 − 1.1 + e^0.3 − 1.3) / 2, and its derivative (e^d − 1) / 2
    assert kl.item() == pytest.approx((math.exp(0.1) - 1.1 + math.exp(0.3) - 1.3) / 2, abs=1e-6)
    assert logp.grad.tolist() == pytest.approx([math.expm1(0.1) / 2, 0.0, math.expm1(0.3) / 2], abs=1e-6)
    assert approx_kl(logp, old_logp).isnan()


def test_half_precision_is_computed_in_float32():
    logp, ref_logp = torch.tensor([-1.0]).bfloat16(), torch.tensor([-1.5]).bfloat16()
    for kind in KINDS:
        assert kl_estimate(logp, ref_logp, kind).dtype == torch.float32
    assert approx_kl(logp, ref_logp).dtype == torch.float32


def test_other_kinds_and_shapes_are_refused():
    with pytest.raises(ValueError, match="kind must be"):
        kl_estimate(torch.zeros(2), torch.zeros(2), "k4")
    with pytest.raises(ValueError, match=r"logp \(2,\), ref_logp \(2, 1\)"):
        kl_estimate(torch.zeros(2), torch.zeros(2, 1))
    with pytest.raises(ValueError, match=r"logp \(2,\), old_logp \(1,\)"):
        approx_kl(torch.zeros(2), torch.zeros(1))


def test_B15_the_stop_rule_reads_an_estimate_that_cannot_be_negative():
    # Log-ratios new − old; kl_estimate takes the sampling policy first.
    cases = [
        ([0.1, 0.2], {"k1": -0.15, "k3": 0.013287}),
        ([math.log(1.2), math.log(0.7), math.log(1.1)], {"k1": 0.026348, "k2": 0.028257, "k3": 0.026348}),
    ]
    for log_ratio, expected in cases:
        new, old = torch.tensor(log_ratio), torch.zeros(len(log_ratio))
        for kind, value in expected.items():
            assert kl_estimate(old, new, kind).mean().item() == pytest.approx(value, abs=1e-5)
        assert approx_kl(new, old).item() == pytest.approx(expected["k3"], abs=1e-5)
    # The ratio upside down would give mean(e^−d − 1 + d) instead.
    upside_down = sum(math.exp(-d) - 1 + d for d in (0.1, 0.2)) / 2
    assert approx_kl(torch.tensor([0.1, 0.2]), torch.zeros(2)).item() != pytest.approx(upside_down, abs=1e-4)


def best_of_n_by_enumeration(probs, scores, n):
    """KL of the best of n draws to one draw, from all n-tuples of draws; of equal scores the first drawn wins."""
    best = [0.0] * len(probs)
    for draws in product(range(len(probs)), repeat=n):
        best[max(draws, key=lambda i: scores[i])] += math.prod(probs[i] for i in draws)
    return sum(b * math.log(b / p) for b, p in zip(best, probs, strict=True) if b > 0)


@pytest.mark.formula("best-of-n-kl")
def test_best_of_n_by_hand():
    # log 2 − ½ and log 4 − ¾; one answer is no choice.
    assert best_of_n_kl(1) == 0
    assert best_of_n_kl(2) == pytest.approx(0.193147, abs=1e-6)
    assert best_of_n_kl(4) == pytest.approx(0.636294, abs=1e-6)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_best_of_n_on_a_short_list_stays_below_the_bound(n):
    probs, scores = [0.1, 0.4, 0.2, 0.3], [1.0, 0.0, 3.0, 2.0]
    exact = best_of_n_by_enumeration(probs, scores, n)
    assert 0.3 * best_of_n_kl(n) < exact < 0.95 * best_of_n_kl(n)
    # Two scores only: most draws tie, and a tie chooses nothing.
    assert best_of_n_by_enumeration(probs, [1.0, 0.0, 1.0, 0.0], n) < exact
    assert best_of_n_by_enumeration(probs, [5.0] * 4, n) == pytest.approx(0, abs=1e-12)


def test_best_of_n_on_a_fine_list_comes_near_the_bound():
    # 200 equal answers, all scores different: two draws tie in 1 of 200 cases.
    exact = best_of_n_by_enumeration([1 / 200] * 200, range(200), 2)
    assert 0.97 * best_of_n_kl(2) < exact < best_of_n_kl(2)


def test_best_of_less_than_one_is_refused():
    with pytest.raises(ValueError, match="n must be a whole number, at least 1, got 0"):
        best_of_n_kl(0)
