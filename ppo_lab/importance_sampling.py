"""Importance sampling: what samples of the old policy say about a new one.

The weight of a sample is the ratio ρ = π_θ(a|s) / π_old(a|s). The book writes r_t(θ) for it; here r is the reward.
"""

import torch
from torch import Tensor

from ppo_lab.masking import as_float, as_mask, check_positive, check_same_shape, hide


def importance_ratio(
    logp: Tensor, old_logp: Tensor, mask: Tensor | None = None, *, max_log_ratio: float = 20.0
) -> Tensor:
    """The importance ratio of each action.

        ρ_t = π_θ(a_t|s_t) / π_old(a_t|s_t) = exp(logp − old_logp)

    logp, old_logp [..., T] in nats, of the actions that were taken, t = 0 … T−1. mask [..., T]: where it is False the
    ratio is 1, with gradient 0. The log-ratio is clamped to ±max_log_ratio so that the exponential stays finite; where
    the clamp is active the gradient is 0. A log-ratio that is NaN or infinite and not masked gives NaN. Half precision
    gives float32.

    Returns [..., T]. Raises ValueError for unequal shapes or a max_log_ratio that is not positive.

    Book: §13.2.2
    Source: Schulman et al. 2017, arXiv 1707.06347
    """
    check_same_shape(logp=logp, old_logp=old_logp)
    mask = as_mask(mask, logp)
    check_positive(max_log_ratio=max_log_ratio)
    log_ratio = hide(as_float(logp) - as_float(old_logp), mask)
    clamped = log_ratio.clamp(-max_log_ratio, max_log_ratio)
    # The clamp would turn an infinite log-ratio into an ordinary number; 0·inf is nan.
    return (clamped + 0 * log_ratio.detach()).exp()


def importance_estimate(f: Tensor, ratio: Tensor, *, self_normalised: bool = False, dim: int | None = None) -> Tensor:
    """Estimate of E_{x∼p}[f(x)] from samples x_i ∼ q with weights w_i = p(x_i)/q(x_i).

        (1/n) Σ_i w_i f(x_i)              unbiased, the variance can be unbounded
        Σ_i w_i f(x_i) / Σ_i w_i          self-normalised: biased by O(1/n), never outside the range of f

    f and ratio [...]: one value and one weight per sample. The sum runs over all elements, or over the axis `dim`.
    Returns a scalar, or [...] without that axis. Raises ValueError for unequal shapes, for no sample at all, and for
    self-normalised weights that sum to 0.

    Book: §13.2.2; §13.2.3
    Source: Kahn & Marshall 1953
    """
    check_same_shape(f=f, ratio=ratio)
    if f.numel() == 0:
        raise ValueError(f"f must hold at least one sample, got shape {tuple(f.shape)}")
    f, ratio = as_float(f), as_float(ratio)
    if not self_normalised:
        return (ratio * f).mean(dim)
    total_weight = ratio.sum(dim)
    if bool((total_weight == 0).any()):
        raise ValueError("ratio must not sum to 0 when self_normalised=True")
    return (ratio * f).sum(dim) / total_weight


def effective_sample_size(ratio: Tensor, mask: Tensor | None = None, *, dim: int | None = None) -> Tensor:
    """How many equally weighted samples the weighted ones are worth.

        ESS = (Σ_i w_i)² / Σ_i w_i²          from 1 (one sample has all the weight) to n (all weights equal)

    ratio [...] ≥ 0, one weight per sample. mask [...]: samples that count. The sums run over all elements, or over the
    axis `dim`. Returns a scalar, or [...] without that axis; 0 where nothing counts or every weight is 0. Raises
    ValueError for a mask of another shape.

    Book: §13.2.3
    Source: Kong 1992
    """
    weights = hide(as_float(ratio), as_mask(mask, ratio))
    sum_of_squares = weights.square().sum(dim)
    # The numerator is 0 too where this is 0, so any positive denominator gives the 0 that is meant.
    denominator = torch.where(sum_of_squares == 0, torch.ones_like(sum_of_squares), sum_of_squares)
    return weights.sum(dim).square() / denominator


def surrogate(ratio: Tensor, advantages: Tensor) -> Tensor:
    """The importance-sampling surrogate, per element; to maximise.

        J^IS = ρ_t · Â_t

    ratio, advantages [..., T], t = 0 … T−1. The advantages belong to the old policy. The states were visited by the old
    policy as well, so the gradient of the mean is the policy gradient at θ = θ_old only, not away from it.

    Returns [..., T], float32 for half precision. No gradient flows into the advantages. Raises ValueError for unequal
    shapes.

    Book: §13.2.2; §13.3.1
    Source: Kakade & Langford 2002; Schulman et al. 2015, arXiv 1502.05477
    """
    check_same_shape(ratio=ratio, advantages=advantages)
    return as_float(ratio) * as_float(advantages.detach())
