"""Means and variances over the elements that count, and the checks every formula makes on its arguments.

The only place where a mask touches a number. What a mask hides never reaches a result or a gradient, even if it is NaN
or infinite; what it does not hide is never repaired.
"""

import math

import torch
from torch import Tensor


def check_same_shape(**tensors: Tensor | None) -> None:
    """Raise ValueError unless all given tensors have one shape; None is skipped.

    Broadcasting (4,) against (4, 1) would silently build a (4, 4) table, so shapes are compared by name.
    """
    given = {name: tuple(x.shape) for name, x in tensors.items() if x is not None}
    if len(set(given.values())) > 1:
        listed = ", ".join(f"{name} {shape}" for name, shape in given.items())
        raise ValueError(f"shapes must be equal, got {listed}")


def check_positive(**numbers: float | None) -> None:
    """Raise ValueError unless all given numbers are finite and above 0; None is skipped."""
    for name, number in numbers.items():
        if number is not None and not 0 < number < math.inf:
            raise ValueError(f"{name} must be positive and finite, got {number}")


def check_unit_interval(**numbers: float) -> None:
    """Raise ValueError unless all given numbers lie in [0, 1]."""
    for name, number in numbers.items():
        if not 0 <= number <= 1:
            raise ValueError(f"{name} must lie between 0 and 1, got {number}")


def as_float(x: Tensor) -> Tensor:
    """x in the precision its formula is computed in: float32 for half precision and integers; float32, float64 stay."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def as_mask(mask: Tensor | None, like: Tensor, name: str = "mask") -> Tensor | None:
    """The mask as bool, checked against the shape of `like`. Accepts bool or numbers that are all 0 or 1.

    Serves for terminated and truncated flags too; `name` is what the message calls them.
    Raises ValueError for another shape or another number.
    """
    if mask is None:
        return None
    if mask.shape != like.shape:
        raise ValueError(f"{name} must have the shape of its tensor {tuple(like.shape)}, got {tuple(mask.shape)}")
    if mask.dtype == torch.bool:
        return mask
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise ValueError(f"{name} must hold only True/False or 0/1")
    return mask.bool()


def hide(x: Tensor, mask: Tensor | None, fill: float = 0.0) -> Tensor:
    """x where the mask is True, `fill` elsewhere; the gradient at hidden places is exactly 0."""
    if mask is None:
        return x
    return torch.where(mask, x, fill)


def is_flat(variance: Tensor, mean: Tensor) -> Tensor:
    """Whether a variance is no more than the rounding of numbers as large as `mean`: std ≤ 8·ε_machine·|mean|.

    The float32 mean of 0.1 repeated a thousand times is not exactly 0.1, so the variance of a constant need not be 0.
    """
    return variance <= (8 * torch.finfo(variance.dtype).eps * mean).square()


def masked_mean(
    x: Tensor, mask: Tensor | None = None, dim: int | None = None, *, count: float | Tensor | None = None
) -> Tensor:
    """Mean over the elements that count: Σ mask·x ÷ Σ mask.

    x [...], mask [...] bool or 0/1 of the same shape (None: everything counts). With `dim` the mean runs over that
    axis only. `count` replaces the denominator: the number of valid tokens in the whole optimizer step, so that the sum
    over micro-batches and ranks is the global token mean. Half precision is summed in float32.

    No valid element gives 0, with gradient 0. Raises ValueError for a mask of another shape or a count that is not
    positive.
    """
    mask = as_mask(mask, x)
    x = hide(as_float(x), mask)
    if count is not None:
        if not count > 0:
            raise ValueError(f"count must be positive, got {count}")
        return x.sum(dim) / count
    if mask is None:
        return x.mean(dim) if x.numel() else x.sum(dim)
    return x.sum(dim) / mask.sum(dim).clamp(min=1)


def masked_var(x: Tensor, mask: Tensor | None = None, *, unbiased: bool = True) -> Tensor:
    """Variance over the elements that count: Σ mask·(x − mean)² ÷ (n − 1), or ÷ n with unbiased=False.

    Two passes (mean first), so that a large offset does not cancel. Fewer than two valid elements give 0, and so does a
    spread no larger than the rounding of the mean. Raises ValueError for a mask of another shape.
    """
    mask = as_mask(mask, x)
    x = hide(as_float(x), mask)
    n = x.numel() if mask is None else int(mask.sum())
    if n < 2:
        return x.sum() * 0
    mean = masked_mean(x, mask)
    variance = hide(x - mean, mask).square().sum() / (n - 1 if unbiased else n)
    return variance.masked_fill(is_flat(variance, mean), 0.0)
