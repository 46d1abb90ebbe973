"""The clipped objective of PPO, its value loss and entropy, and their sum."""

from typing import NamedTuple

import torch
from torch import Tensor

from ppo_lab.diagnostics import ratio_statistics
from ppo_lab.importance_sampling import importance_ratio
from ppo_lab.masking import as_float, as_mask, check_positive, check_same_shape, hide, masked_mean


class PPOLoss(NamedTuple):
    """What `ppo_loss` returns: scalars.

    total is the number to call backward() on. policy, value and entropy are its three parts before their coefficients,
    still attached to the graph: total = policy + value_coef·value − entropy_coef·entropy. The statistics carry no
    gradient; `ppo_lab.diagnostics.RatioStatistics` says what they mean.
    """

    total: Tensor
    policy: Tensor
    value: Tensor
    entropy: Tensor
    approx_kl: Tensor
    clip_fraction: Tensor
    clip_fraction_outside: Tensor
    ratio_max: Tensor
    ratio_mean: Tensor


def clipped_surrogate(
    ratio: Tensor,
    advantages: Tensor,
    eps_clip: float = 0.2,
    *,
    eps_clip_high: float | None = None,
    dual_clip: float | None = None,
) -> Tensor:
    """The clipped surrogate objective of each element, to maximise.

    min(ρ·Â, clip(ρ, 1 − ε, 1 + ε)·Â).  With dual_clip c, elements with Â < 0 are kept from falling below c·Â, which
    bounds the gradient of a bad action whose ratio has run away.

    ratio ρ, advantages Â [...]; eps_clip ε > 0; eps_clip_high the upper ε if it differs; dual_clip c > 1. Returns
    [...]. No gradient flows into the advantages. Raises ValueError for unequal shapes, an ε that is not positive, or
    c ≤ 1.

    Book: §13.3.3; A07 §2.2
    Source: Schulman et al. 2017, arXiv 1707.06347; dual clip: Ye et al. 2020, arXiv 1912.09729
    """
    check_same_shape(ratio=ratio, advantages=advantages)
    check_positive(eps_clip=eps_clip, eps_clip_high=eps_clip_high)
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(f"dual_clip must be greater than 1, got {dual_clip}")
    ratio, advantages = as_float(ratio), as_float(advantages.detach())
    high = eps_clip if eps_clip_high is None else eps_clip_high
    clipped = torch.minimum(ratio * advantages, ratio.clamp(1 - eps_clip, 1 + high) * advantages)
    if dual_clip is None:
        return clipped
    return torch.where(advantages < 0, torch.maximum(clipped, dual_clip * advantages), clipped)


def clipped_value_loss(
    values: Tensor,
    old_values: Tensor | None,
    returns: Tensor,
    eps_clip_value: float | None = 0.2,
    mask: Tensor | None = None,
    *,
    count: float | Tensor | None = None,
) -> Tensor:
    """Squared error of the critic, kept from gaining by a jump of more than ε_v.

    ½·mean(max((V − R̂)², (V_clip − R̂)²)) with V_clip = V_old + clip(V − V_old, −ε_v, +ε_v).
    The ½ is inside. A07's 0.5·MSE is therefore value_coef=1.0 on top of this.

    values V, old_values V_old, returns R̂ [...]; eps_clip_value ε_v > 0 in units of the reward, or None for the plain
    ½·mean((V − R̂)²), which reads no old_values; mask [...] True = counts; count: see `masked_mean`. Returns a scalar.
    Gradients flow into values only. Raises ValueError for unequal shapes, an ε_v that is not positive, or an ε_v
    without old_values.

    Book: §13.6.3; §13.3.4
    Source: the PPO code of OpenAI Baselines (the 2017 paper does not clip values)
    """
    check_same_shape(values=values, old_values=old_values, returns=returns)
    check_positive(eps_clip_value=eps_clip_value)
    if eps_clip_value is not None and old_values is None:
        raise ValueError(f"old_values must be given when eps_clip_value is set ({eps_clip_value}), got None")
    mask = as_mask(mask, values)
    # Hidden here and not only in the mean, so that nothing under the mask reaches the gradient either.
    values, returns = hide(as_float(values), mask), as_float(returns.detach())
    errors = (values - returns).square()
    if eps_clip_value is not None:
        old_values = as_float(old_values.detach())
        clipped = old_values + (values - old_values).clamp(-eps_clip_value, eps_clip_value)
        errors = torch.maximum(errors, (clipped - returns).square())
    return 0.5 * masked_mean(errors, mask, count=count)


def categorical_entropy(logits: Tensor) -> Tensor:
    """Entropy of the whole distribution over actions, not of the action taken.

    H[π] = −Σ_a π(a)·log π(a), with 0·log 0 = 0.

    logits [..., A]; −inf forbids an action: value and gradient stay finite. Returns [...] in nats, between 0 and log A.
    Computed in float32 for half-precision logits.

    Book: §13.3.4; A07 §3
    Source: Williams and Peng 1991 (entropy bonus); Mnih et al. 2016, arXiv 1602.01783
    """
    log_probs = as_float(logits).log_softmax(-1)
    # A forbidden action has probability 0 and log-probability −inf, and 0·inf would be nan.
    finite = log_probs.masked_fill(log_probs == -torch.inf, 0.0)
    return -(log_probs.exp() * finite).sum(-1)


def ppo_loss(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    *,
    values: Tensor | None,
    old_values: Tensor | None,
    returns: Tensor | None,
    entropy: Tensor,
    mask: Tensor | None = None,
    count: float | Tensor | None = None,
    eps_clip: float = 0.2,
    eps_clip_high: float | None = None,
    dual_clip: float | None = None,
    eps_clip_value: float | None = 0.2,
    value_coef: float = 0.5,
    entropy_coef: float = 0.01,
) -> PPOLoss:
    """The complete PPO loss of a minibatch, to minimise.

    L = −mean(min(ρ·Â, clip(ρ, 1 − ε, 1 + ε)·Â)) + c_v·½·mean(max((V − R̂)², (V_clip − R̂)²)) − c_e·mean(H[π])

    with ρ = exp(logp − old_logp), the second term from `clipped_value_loss` and H from `categorical_entropy`.

    All tensors [...] of one shape, one element per action or token: logp, old_logp in nats, advantages Â, values,
    old_values (may be None if eps_clip_value is), returns, entropy in nats; mask True = counts. Without a critic values
    is None, old_values and returns are not read, and the second term is 0. count replaces the
    number of valid elements in the three means, so that the losses of micro-batches add up to that of the whole step;
    the statistics always describe the elements given here. Returns a PPOLoss of scalars.

    No gradient flows into advantages, returns, old_logp or old_values. A number that is not finite and not masked makes
    total non-finite. Raises ValueError for unequal shapes and for settings out of range.

    Book: §13.3.4; A07 §3
    Source: Schulman et al. 2017, arXiv 1707.06347
    """
    check_same_shape(logp=logp, old_logp=old_logp, advantages=advantages, values=values, entropy=entropy)
    mask = as_mask(mask, logp)
    old_logp = old_logp.detach()
    ratio = importance_ratio(logp, old_logp, mask)
    surrogate = clipped_surrogate(ratio, advantages, eps_clip, eps_clip_high=eps_clip_high, dual_clip=dual_clip)
    policy = -masked_mean(surrogate, mask, count=count)
    value = policy.new_zeros(())
    if values is not None:
        value = clipped_value_loss(values, old_values, returns, eps_clip_value, mask, count=count)
    entropy = masked_mean(entropy, mask, count=count)
    total = policy + value_coef * value - entropy_coef * entropy
    statistics = ratio_statistics(ratio, advantages, eps_clip, mask, eps_clip_high=eps_clip_high)
    return PPOLoss(total, policy, value, entropy, *statistics)
