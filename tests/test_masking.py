"""Means and variances over the elements that count."""

import math

import pytest
import torch

from ppo_lab.masking import (
    as_float,
    as_mask,
    check_positive,
    check_same_shape,
    check_unit_interval,
    hide,
    is_flat,
    masked_mean,
    masked_var,
)

NAN, INF = math.nan, math.inf


def literal_mean(x, mask):
    total, n = 0.0, 0
    for value, counts in zip(x.flatten().tolist(), mask.flatten().tolist(), strict=True):
        if counts:
            total += value
            n += 1
    return total / n


def literal_var(x, mask):
    mean = literal_mean(x, mask)
    pairs = zip(x.flatten().tolist(), mask.flatten().tolist(), strict=True)
    squares = [(value - mean) ** 2 for value, counts in pairs if counts]
    return sum(squares) / (len(squares) - 1)


def random_case(seed, shape=(3, 5)):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    mask = torch.rand(shape, generator=generator) < 0.7
    return x, mask


@pytest.mark.parametrize("seed", range(5))
def test_mean_and_variance_are_the_sums_of_the_definition(seed):
    x, mask = random_case(seed)
    assert masked_mean(x, mask).item() == pytest.approx(literal_mean(x, mask), abs=1e-12)
    assert masked_var(x, mask).item() == pytest.approx(literal_var(x, mask), abs=1e-12)


def test_without_a_mask_everything_counts():
    x = torch.tensor([1.0, 2.0, 6.0])
    assert masked_mean(x).item() == 3
    assert masked_var(x).item() == 7  # (4 + 1 + 9) / 2
    assert masked_var(x, unbiased=False).item() == pytest.approx(14 / 3)


def test_mean_along_one_axis():
    x = torch.tensor([[1.0, 2.0, 9.0], [4.0, 9.0, 9.0]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    assert masked_mean(x, mask, dim=-1).tolist() == [1.5, 4.0]
    assert masked_mean(x, dim=0).tolist() == [2.5, 5.5, 9.0]


@pytest.mark.parametrize("hidden", [NAN, INF, -INF, 1e30])
def test_what_the_mask_hides_changes_neither_result_nor_gradient(hidden):
    mask = torch.tensor([True, False, True])
    x = torch.tensor([1.0, hidden, 4.0], requires_grad=True)
    (masked_mean(x, mask) + masked_var(x, mask)).backward()
    assert masked_mean(x, mask).item() == 2.5
    assert masked_var(x, mask).item() == 4.5
    assert x.grad.tolist() == [0.5 - 3.0, 0.0, 0.5 + 3.0]


def test_a_nan_that_counts_stays_visible():
    x = torch.tensor([1.0, NAN, 3.0])
    assert masked_mean(x, torch.tensor([True, True, False])).isnan()
    assert masked_var(x).isnan()


def test_nothing_valid_gives_0_with_gradient_0():
    x = torch.tensor([[1.0, NAN]], requires_grad=True)
    mask = torch.zeros(1, 2, dtype=torch.bool)
    mean = masked_mean(x, mask)
    mean.backward()
    assert mean.item() == 0 and x.grad.tolist() == [[0.0, 0.0]]
    assert masked_var(x, mask).item() == 0
    assert masked_mean(torch.zeros(0)).item() == 0


def test_one_valid_element_has_no_variance():
    assert masked_var(torch.tensor([5.0, 7.0]), torch.tensor([1, 0])).item() == 0


def test_count_from_outside_makes_unequal_micro_batches_add_up_to_the_token_mean():
    x = torch.tensor([[1.0, 2.0, 3.0], [10.0, NAN, NAN]])
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    parts = [masked_mean(x[row], mask[row], count=mask.sum()) for row in (0, 1)]
    assert sum(parts).item() == 4.0  # 16 over four tokens
    mean_of_means = (masked_mean(x[0], mask[0]) + masked_mean(x[1], mask[1])) / 2
    assert mean_of_means.item() == 6.0  # the usual mistake: a lone token weighs as much as three


@pytest.mark.parametrize("count", [0, -3, NAN])
def test_a_count_that_is_not_positive_is_refused(count):
    with pytest.raises(ValueError, match="count must be positive"):
        masked_mean(torch.ones(2), count=count)


def test_half_precision_is_summed_in_float32():
    ones = torch.ones(1000, dtype=torch.bfloat16)
    ones[0] = 257.0  # 256 + 1 does not exist in bf16
    assert ones[0].item() == 256
    assert masked_mean(ones).dtype == torch.float32
    assert masked_mean(ones).item() == pytest.approx(1.255)
    assert masked_var(ones.double()).dtype == torch.float64


def test_variance_survives_a_large_offset():
    x = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    shifted = masked_var(x + 1e9)
    assert shifted.item() == pytest.approx(5 / 3, rel=1e-9)
    # Mean of squares minus square of the mean: the textbook shortcut loses every digit.
    naive = ((x + 1e9).square().mean() - (x + 1e9).mean().square()).item()
    assert abs(naive - 1.25) > 1


@pytest.mark.parametrize("constant", [0.1, -0.3, 1e6 + 0.1, 1e-6, 0.0])
@pytest.mark.parametrize("n", [3, 1000, 4097])
def test_a_constant_has_variance_exactly_0_in_spite_of_rounding(constant, n):
    assert masked_var(torch.full((n,), constant)).item() == 0


def test_a_small_true_spread_is_not_taken_for_rounding():
    x = torch.tensor([1.0, 1.0001, 0.9999])
    assert masked_var(x).item() == pytest.approx(1e-8, rel=1e-2)
    assert not is_flat(torch.tensor(1e-8), torch.tensor(1.0))
    assert is_flat(torch.tensor(0.0), torch.tensor(0.0))


def test_hide_fills_and_keeps_the_type():
    x = torch.tensor([1.0, NAN], dtype=torch.bfloat16)
    hidden = hide(x, torch.tensor([True, False]), 7.0)
    assert hidden.tolist() == [1.0, 7.0] and hidden.dtype == torch.bfloat16
    assert hide(x, None) is x


def test_masks_may_be_bool_or_0_and_1():
    x = torch.tensor([1.0, 2.0])
    for mask in (torch.tensor([True, False]), torch.tensor([1, 0]), torch.tensor([1.0, 0.0])):
        assert as_mask(mask, x).tolist() == [True, False]
    assert as_mask(None, x) is None


def test_other_masks_are_refused():
    x = torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"mask must have the shape of its tensor \(2, 3\), got \(2, 1\)"):
        as_mask(torch.ones(2, 1), x)
    with pytest.raises(ValueError, match="terminated must hold only True/False or 0/1"):
        as_mask(torch.full((2, 3), 0.5), x, "terminated")


def test_shapes_are_never_broadcast():
    with pytest.raises(ValueError, match=r"values \(4,\), returns \(4, 1\)"):
        check_same_shape(values=torch.zeros(4), returns=torch.zeros(4, 1), old_values=None)
    check_same_shape(values=torch.zeros(4), returns=torch.ones(4), old_values=None)


def test_number_checks_name_the_argument():
    check_positive(a=1e-9, b=None)
    check_unit_interval(a=0, b=1, c=0.5)
    for bad in (0, -1, NAN, INF):
        with pytest.raises(ValueError, match="horizon must be positive"):
            check_positive(horizon=bad)
    for bad in (-0.1, 1.1, NAN):
        with pytest.raises(ValueError, match="gamma must lie between 0 and 1"):
            check_unit_interval(gamma=bad)


def test_formulas_are_computed_in_float32_at_least():
    types = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.int64: torch.float32}
    types |= {torch.float32: torch.float32, torch.float64: torch.float64, torch.bool: torch.float32}
    for given, computed in types.items():
        assert as_float(torch.ones(1).to(given)).dtype == computed


def test_B19_padding_does_not_count_in_a_reported_mean():
    for n_pads in (1, 11):
        entropy = torch.tensor([0.8, 0.6] + [-1.0] * n_pads)
        mask = torch.tensor([True, True] + [False] * n_pads)
        assert masked_mean(entropy, mask).item() == pytest.approx(0.7)
    assert masked_mean(torch.tensor([0.8, 0.6, -1.0])).item() == pytest.approx(0.1333, abs=1e-4)  # the wrong answer
