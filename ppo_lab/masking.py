"""Means and variances over the elements that count.

The only place where a mask touches a number. What a mask hides never reaches a result or a gradient, even if it is NaN
or infinite; what it does not hide is never repaired.
"""

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


def as_mask(mask: Tensor | None, like: Tensor) -> Tensor | None:
    """The mask as bool, checked against the shape of `like`. Accepts bool or numbers that are all 0 or 1.

    Raises ValueError for another shape or another number.
    """
    if mask is None:
        return None
    if mask.shape != like.shape:
        raise ValueError(f"mask must have the shape of its tensor {tuple(like.shape)}, got {tuple(mask.shape)}")
    if mask.dtype == torch.bool:
        return mask
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise ValueError("mask must hold only True/False or 0/1")
    return mask.bool()


def hide(x: Tensor, mask: Tensor | None, fill: float = 0.0) -> Tensor:
    """x where the mask is True, `fill` elsewhere; the gradient at hidden places is exactly 0."""
    if mask is None:
        return x
    return torch.where(mask, x, torch.full_like(x, fill))


def masked_mean(x: Tensor, mask: Tensor | None = None, dim: int | None = None, *, count: float | Tensor | None = None):
    """Mean over the elements that count: Σ mask·x ÷ Σ mask.

    x [...] float, mask [...] bool or 0/1 of the same shape (None: everything counts). With `dim` the mean runs over that
    axis only. `count` replaces the denominator: the number of valid tokens in the whole optimizer step, so that the sum
    over micro-batches and ranks is the global token mean. Half precision is summed in float32.

    No valid element gives 0, with gradient 0. Raises ValueError for a mask of another shape or a count that is not
    positive.
    """
    mask = as_mask(mask, x)
    x = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    total = hide(x, mask).sum() if dim is None else hide(x, mask).sum(dim)
    if count is not None:
        if not bool(torch.as_tensor(count) > 0):
            raise ValueError(f"count must be positive, got {count}")
        return total / count
    if mask is None:
        n = x.numel() if dim is None else x.shape[dim]
        return total / max(n, 1)
    n = mask.sum() if dim is None else mask.sum(dim)
    return total / n.clamp(min=1)


def masked_var(x: Tensor, mask: Tensor | None = None, *, unbiased: bool = True) -> Tensor:
    """Variance over the elements that count: Σ mask·(x − mean)² ÷ (n − 1), or ÷ n with unbiased=False.

    Two passes (mean first), so that a large offset does not cancel. Fewer than two valid elements give 0.
    Raises ValueError for a mask of another shape.
    """
    mask = as_mask(mask, x)
    x = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    n = x.numel() if mask is None else int(mask.sum())
    if n < 2:
        return x.new_zeros(())
    centred = hide(x - masked_mean(x, mask), mask)
    return centred.square().sum() / (n - 1 if unbiased else n)
