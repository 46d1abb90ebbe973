"""Estimates of a KL divergence from the log-probabilities of sampled actions."""

import math

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


def best_of_n_kl(n: int) -> float:
    """How far the best of n answers is from the policy that gave them: at most this many nats per response.

    KL(π_n ‖ π) ≤ log n − (n − 1)/n,  π_n: draw n answers from π, keep the one with the highest score.

    Equal for a score without ties, whatever the score and the policy. A policy over a list of answers may give the same
    answer twice: it ties with itself, so its KL lies below, and far below once n times the probability of its best
    answers is large. It grows with log n, while the cost grows with n.

    n ≥ 1. Returns nats per response; 0 for n = 1. Raises ValueError for an n below 1.

    Book: §13.9
    Source: Stiennon et al. 2020, arXiv 2009.01325 (formula); Beirami et al. 2024, arXiv 2401.01879 (it is a bound)
    """
    if not isinstance(n, int) or n < 1:
        raise ValueError(f"n must be a whole number, at least 1, got {n}")
    return math.log(n) - (n - 1) / n
