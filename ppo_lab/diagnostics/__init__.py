"""Is the run well? Numbers that tell it of an update, and `diagnose`, which reads the record of a whole run.

`python -m ppo_lab.diagnostics RUN` prints what `diagnose` finds. The rules are in `symptoms`, one function each.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ppo_lab.diagnostics.history import read_history
from ppo_lab.diagnostics.symptoms import Finding, diagnose
from ppo_lab.masking import as_float, as_mask, check_positive, check_same_shape, hide, masked_mean, masked_var

__all__ = [
    "Finding",
    "RatioStatistics",
    "diagnose",
    "explained_variance",
    "ratio_statistics",
    "read_history",
]


class RatioStatistics(NamedTuple):
    """What the ratios of one minibatch say about the update so far; scalars without gradient.

    approx_kl: mean(ρ − 1 − log ρ), in nats. clip_fraction: share of elements where the clip binds.
    clip_fraction_outside: share with ρ outside [1 − ε, 1 + ε]. ratio_max, ratio_mean: of ρ.
    """

    approx_kl: Tensor
    clip_fraction: Tensor
    clip_fraction_outside: Tensor
    ratio_max: Tensor
    ratio_mean: Tensor


def ratio_statistics(
    ratio: Tensor,
    advantages: Tensor,
    eps_clip: float,
    mask: Tensor | None = None,
    *,
    eps_clip_high: float | None = None,
) -> RatioStatistics:
    """Size of an update, read off the ratios ρ = π_θ/π_old and the advantages A.

    approx_kl = mean(ρ − 1 − log ρ) ≥ 0, of ratios as they come: `importance_ratio` clamps them.
    clip_fraction = share with clip(ρ, 1 − ε, 1 + ε)·A < ρ·A: the clipped term is the smaller one, its gradient is 0.
    clip_fraction_outside = share with |ρ − 1| > ε, whatever the sign of A; at least as large.

    ratio, advantages [...]; eps_clip ε > 0, eps_clip_high the upper ε if it differs; mask [...] True = counts.
    Returns scalars over the elements that count, all 0 if there are none.
    Raises ValueError for unequal shapes or an ε that is not positive.

    Book: §13.8; §13.3.3
    Source: Schulman et al. 2017, arXiv 1707.06347 (the clip)
    """
    check_same_shape(ratio=ratio, advantages=advantages)
    check_positive(eps_clip=eps_clip, eps_clip_high=eps_clip_high)
    mask = as_mask(mask, ratio)
    high = eps_clip if eps_clip_high is None else eps_clip_high
    rho, advantages = as_float(ratio.detach()), as_float(advantages.detach())
    clipped = rho.clamp(1 - eps_clip, 1 + high)
    binds = clipped * advantages < rho * advantages
    outside = clipped != rho
    # The exact value is never negative; a log that is off by one digit could make it so.
    kl = (rho - 1 - rho.log()).clamp(min=0)
    # One reduction instead of four, for this runs on every minibatch.
    measured = torch.stack([kl, binds, outside, rho]).reshape(4, -1)
    same_mask = None if mask is None else mask.reshape(1, -1).expand(4, -1)
    mean_kl, clip_fraction, clip_fraction_outside, ratio_mean = masked_mean(measured, same_mask, dim=1).unbind()
    # Ratios are never negative, so 0 cannot hide the largest one that counts.
    ratio_max = hide(rho, mask).max() if rho.numel() else rho.new_zeros(())
    return RatioStatistics(mean_kl, clip_fraction, clip_fraction_outside, ratio_max, ratio_mean)


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor | None = None) -> Tensor:
    """Share of the spread of the returns that the critic predicts.

    1 − Var(R̂ − V)/Var(R̂).  1: perfect; 0: no better than a constant; negative: worse than a constant. A critic that is
    off by the same amount everywhere still scores 1.

    values, returns [...]; mask [...] True = counts. Returns a scalar without gradient. Constant returns, or fewer than
    two elements that count, have no spread to explain: nan. Raises ValueError for unequal shapes.

    Book: §13.8
    Source: none in particular; the coefficient of determination with the bias removed
    """
    check_same_shape(values=values, returns=returns)
    mask = as_mask(mask, returns)
    values, returns = as_float(values.detach()), as_float(returns.detach())
    spread = masked_var(returns, mask)
    return torch.where(spread > 0, 1 - masked_var(returns - values, mask) / spread, torch.nan)
