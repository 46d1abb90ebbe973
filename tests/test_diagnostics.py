"""Statistics of an update and of the critic."""

import math

import pytest
import torch

from ppo_lab.diagnostics import explained_variance, ratio_statistics

NAN, INF = math.nan, math.inf


def literal_statistics(ratio, advantages, low, high, mask):
    """The definitions, one element at a time."""
    kl = binds = outside = total = count = 0
    largest = -INF
    for rho, a, counts in zip(ratio, advantages, mask, strict=True):
        if not counts:
            continue
        clipped = min(max(rho, 1 - low), 1 + high)
        count += 1
        kl += rho - 1 - math.log(rho)
        binds += clipped * a < rho * a
        outside += not 1 - low <= rho <= 1 + high
        largest = max(largest, rho)
        total += rho
    return [kl / count, binds / count, outside / count, largest, total / count]


@pytest.mark.formula("approx-kl", "clip-fraction")
@pytest.mark.parametrize("low, high", [(0.2, None), (0.1, 0.3)])
@pytest.mark.parametrize("seed", range(4))
def test_statistics_are_their_definitions(seed, low, high):
    generator = torch.Generator().manual_seed(seed)
    ratio = (0.3 * torch.randn(3, 6, generator=generator, dtype=torch.float64)).exp()
    advantages = torch.randn(3, 6, generator=generator, dtype=torch.float64)
    mask = torch.rand(3, 6, generator=generator) < 0.7
    ours = ratio_statistics(ratio, advantages, low, mask, eps_clip_high=high)
    columns = [x.flatten().tolist() for x in (ratio, advantages)]
    expected = literal_statistics(*columns, low, high or low, mask.flatten().tolist())
    assert [x.item() for x in ours] == pytest.approx(expected, abs=1e-12)


@pytest.mark.formula("clip-fraction")
def test_a_clip_binds_on_one_side_only():
    ratio = torch.tensor([1.5, 1.5, 0.5, 0.5, 1.0])
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0])
    statistics = ratio_statistics(ratio, advantages, 0.2)
    # It binds for (1.5, +) and (0.5, −); four of the five ratios are outside.
    assert statistics.clip_fraction.item() == pytest.approx(0.4)
    assert statistics.clip_fraction_outside.item() == pytest.approx(0.8)
    assert statistics.ratio_max.item() == 1.5
    assert statistics.ratio_mean.item() == pytest.approx(1.0)


def test_a_ratio_on_the_edge_is_inside():
    ratio = torch.tensor([0.8, 1.2])
    statistics = ratio_statistics(ratio, torch.tensor([-1.0, 1.0]), 0.2)
    assert statistics.clip_fraction.item() == statistics.clip_fraction_outside.item() == 0


def test_before_the_first_step_all_is_quiet():
    statistics = ratio_statistics(torch.ones(7), torch.randn(7), 0.2)
    assert [x.item() for x in statistics] == [0, 0, 0, 1, 1]


def test_approx_kl_is_never_negative_near_1():
    ratio = 1 + torch.arange(-200, 200) * torch.finfo(torch.float32).eps / 2
    for rho in ratio.split(1):
        assert ratio_statistics(rho, torch.ones(1), 0.2).approx_kl.item() >= 0


@pytest.mark.parametrize("hidden", [NAN, INF])
def test_what_the_mask_hides_does_not_count(hidden):
    mask = torch.tensor([True, False, True])
    ratio, advantages = torch.tensor([0.5, hidden, 0.9]), torch.tensor([-1.0, hidden, 1.0])
    ours = ratio_statistics(ratio, advantages, 0.2, mask)
    assert [x.item() for x in ours] == pytest.approx(
        literal_statistics([0.5, 0.9], [-1, 1], 0.2, 0.2, [1, 1]), abs=1e-6
    )
    # The largest ratio that counts is below 1, although masked ratios are set to 1.
    assert ours.ratio_max.item() == pytest.approx(0.9)
    returns = torch.tensor([1.0, hidden, 3.0])
    assert explained_variance(returns, returns, mask).item() == 1


def test_a_nan_that_counts_shows():
    statistics = ratio_statistics(torch.tensor([1.0, NAN]), torch.ones(2), 0.2)
    assert statistics.approx_kl.isnan() and statistics.ratio_max.isnan() and statistics.ratio_mean.isnan()


def test_nothing_valid_gives_0():
    statistics = ratio_statistics(torch.ones(3), torch.ones(3), 0.2, torch.zeros(3))
    assert [x.item() for x in statistics] == [0, 0, 0, 0, 0]


def test_statistics_carry_no_gradient():
    ratio = torch.ones(3, requires_grad=True)
    assert not any(x.requires_grad for x in ratio_statistics(ratio, ratio, 0.2))
    assert not explained_variance(ratio, torch.randn(3)).requires_grad


def test_half_precision_is_computed_in_float32():
    ratio = torch.tensor([1.01, 0.99]).bfloat16()
    assert all(x.dtype == torch.float32 for x in ratio_statistics(ratio, ratio, 0.2))
    assert explained_variance(ratio, ratio).dtype == torch.float32


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match=r"ratio \(2,\), advantages \(2, 1\)"):
        ratio_statistics(torch.ones(2), torch.ones(2, 1), 0.2)
    with pytest.raises(ValueError, match="eps_clip must be positive"):
        ratio_statistics(torch.ones(2), torch.ones(2), 0)
    with pytest.raises(ValueError, match="eps_clip_high must be positive"):
        ratio_statistics(torch.ones(2), torch.ones(2), 0.2, eps_clip_high=-1)
    with pytest.raises(ValueError, match=r"values \(2,\), returns \(2, 1\)"):
        explained_variance(torch.ones(2), torch.ones(2, 1))


@pytest.mark.formula("explained-variance")
def test_explained_variance_by_hand():
    returns = torch.tensor([0.0, 2.0, 4.0])  # variance 4
    assert explained_variance(returns, returns).item() == 1
    assert explained_variance(torch.full((3,), 7.0), returns).item() == 0
    # R − V = 0, 0, 3: variance 3, so a quarter is explained.
    assert explained_variance(torch.tensor([0.0, 2.0, 1.0]), returns).item() == pytest.approx(0.25)
    # The opposite of the truth leaves four times the variance.
    assert explained_variance(-returns, returns).item() == pytest.approx(-3)


def test_a_constant_offset_does_not_count_against_the_critic():
    returns = torch.tensor([0.0, 2.0, 4.0])
    assert explained_variance(returns + 5, returns).item() == 1


@pytest.mark.parametrize("constant", [0.1, 2.0, -1e5 - 0.1])
def test_constant_returns_have_nothing_to_explain(constant):
    returns = torch.full((1000,), constant)
    assert explained_variance(torch.randn(1000), returns).isnan()
    assert explained_variance(torch.zeros(1), torch.ones(1)).isnan()


def test_statistics_of_nothing_are_zero():
    assert [float(x) for x in ratio_statistics(torch.empty(0), torch.empty(0), 0.2)] == [0.0] * 5
