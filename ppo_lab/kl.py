"""Estimates of a KL divergence from the log-probabilities of sampled actions."""

import torch
from torch import Tensor

from ppo_lab.masking import as_float, as_mask, check_same_shape, hide, masked_mean


def kl_estimate(logp: Tensor, ref_logp: Tensor, kind: str = "k1") -> Tensor:
    """KL(π ‖ ref) of each token, estimated from the one token that π sampled.

    With d = log π − log ref:  k1 = d,  k2 = d²/2,  k3 = exp(−d) − 1 + d.
    k1 and k3 have the right mean, k3 is never negative, k2 is biased but has a small variance. Nothing is clamped.

    logp, ref_logp [...] in nats, of tokens sampled from π. Returns [...], in nats.
    Raises ValueError for unequal shapes or another kind.

    Book: §13.5.3
    Source: Schulman 2020, "Approximating KL divergence" (k1, k2, k3)
    """
    check_same_shape(logp=logp, ref_logp=ref_logp)
    difference = as_float(logp) - as_float(ref_logp)
    if kind == "k1":
        return difference
    if kind == "k2":
        return 0.5 * difference.square()
    if kind == "k3":
        # expm1 keeps the digits that exp(-d) - 1 loses when the two policies are close.
        return torch.expm1(-difference) + difference
    raise ValueError(f'kind must be "k1", "k2" or "k3", got {kind!r}')


def approx_kl(logp: Tensor, old_logp: Tensor, mask: Tensor | None = None) -> Tensor:
    """How far an update has moved the policy: KL(π_old ‖ π_θ), estimated from actions that π_old took.

    mean(ρ − 1 − log ρ) with ρ = exp(logp − old_logp); never negative, so a stop rule on it always fires.

    logp, old_logp [...] in nats; mask [...] True = counts. Returns a scalar in nats; 0 if nothing counts.
    Raises ValueError for unequal shapes.

    Book: §13.8; §13.3.2
    Source: Schulman 2020, "Approximating KL divergence" (k3)
    """
    check_same_shape(logp=logp, old_logp=old_logp)
    mask = as_mask(mask, logp)
    # Samples come from the old policy, so it takes the place of π and the new one that of the reference.
    return masked_mean(kl_estimate(hide(old_logp, mask), hide(logp, mask), "k3").clamp(min=0), mask)
