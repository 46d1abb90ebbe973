"""The policy gradient: returns, reward-to-go, the score-function loss, the best constant baseline."""

import torch
from torch import Tensor

from ppo_lab.masking import as_float, as_mask, check_same_shape, check_unit_interval, hide, masked_mean


def discounted_return(rewards: Tensor, gamma: float) -> Tensor:
    """The return of whole trajectories.

        R(τ) = Σ_{t=0}^{T−1} γ^t r_t

    rewards [..., T], t = 0 … T−1: the last action is a_{T−1}, so the last reward is r_{T−1}. gamma in [0, 1].

    Returns [...]. Raises ValueError for gamma outside [0, 1].

    Book: §13.1.1
    Source: Sutton & Barto 2018
    """
    check_unit_interval(gamma=gamma)
    rewards = as_float(rewards)
    steps = torch.arange(rewards.shape[-1], dtype=rewards.dtype, device=rewards.device)
    return (gamma**steps * rewards).sum(-1)


def reward_to_go(
    rewards: Tensor,
    gamma: float,
    *,
    terminated: Tensor | None = None,
    truncated: Tensor | None = None,
    next_values: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """The return from each step on, up to the end of its episode.

        G_t = r_t + γ G_{t+1}                inside an episode
        G_t = r_t                            terminated: nothing follows
        G_t = r_t + γ V(s_{t+1})             truncated, or the last valid step of the row

    rewards, terminated, truncated, next_values, mask [..., T], t = 0 … T−1, all indexed by transition; flags are bool
    or 0/1. next_values[t] is the value of the state transition t led to, before any reset; only the places named above
    read it, and without it V counts as 0. When both flags are set, termination wins. A masked step is skipped as if it
    were not there, its flags included, and its G is 0.

    Returns [..., T]. Raises ValueError for unequal shapes, no step at all, gamma outside [0, 1], or flags that are not
    0/1.

    Book: §13.1.3
    Source: Williams 1992; Sutton & Barto 2018
    """
    check_unit_interval(gamma=gamma)
    check_same_shape(rewards=rewards, terminated=terminated, truncated=truncated, next_values=next_values, mask=mask)
    if rewards.ndim == 0 or rewards.shape[-1] == 0:
        raise ValueError(f"rewards must have at least one step on the last axis, got shape {tuple(rewards.shape)}")
    rewards = as_float(rewards)
    never = torch.zeros_like(rewards, dtype=torch.bool)
    terminated = never if terminated is None else as_mask(terminated, rewards, "terminated")
    truncated = never if truncated is None else as_mask(truncated, rewards, "truncated")
    counts = ~never if mask is None else as_mask(mask, rewards)
    next_values = torch.zeros_like(rewards) if next_values is None else next_values.to(rewards.dtype)

    nothing = torch.zeros_like(rewards[..., 0])
    following = nothing
    no_step_after = torch.ones_like(counts[..., 0])
    to_go = []
    for t in reversed(range(rewards.shape[-1])):
        ahead = torch.where(truncated[..., t] | no_step_after, next_values[..., t], following)
        ahead = torch.where(terminated[..., t], nothing, ahead)
        here = rewards[..., t] + gamma * ahead
        to_go.append(hide(here, counts[..., t]))
        following = torch.where(counts[..., t], here, following)
        no_step_after = no_step_after & ~counts[..., t]
    return torch.stack(to_go[::-1], -1)


def policy_gradient_loss(logp: Tensor, weights: Tensor, mask: Tensor | None = None) -> Tensor:
    """The loss whose negative gradient is the policy-gradient estimate; to minimise.

        L(θ) = −mean_t( log π_θ(a_t|s_t) · w_t )

    logp [..., T] in nats, of the actions that were taken, t = 0 … T−1. weights [..., T]: the return, the reward-to-go,
    Q − b or an advantage; they are detached. mask [..., T]: steps that count. The mean runs over all steps that count:
    the sum over the steps of one trajectory, as the book writes it, is T times as large.

    The value itself means nothing, only the gradient does: at the policy that sampled, its negative is an estimate
    proportional to ∇J, for γ = 1 or weights that carry γ^t. Returns a scalar. Raises ValueError for unequal shapes.

    Book: §13.1.2; §13.1.3; §13.1.4
    Source: Williams 1992; Sutton et al. 2000
    """
    check_same_shape(logp=logp, weights=weights)
    mask = as_mask(mask, logp)
    logp, weights = as_float(logp), as_float(weights.detach())
    # Both factors are hidden: a NaN weight under the mask would turn the zero gradient of its log-probability into NaN.
    return -masked_mean(hide(logp, mask) * hide(weights, mask), mask)


def optimal_baseline(score_sq_norm: Tensor, returns: Tensor) -> Tensor:
    """The constant baseline with the least variance: the mean return, weighted by the squared score.

        b* = E[‖∇log π‖² · G] / E[‖∇log π‖²]

    score_sq_norm [...] ≥ 0: ‖∇_θ log π_θ(a|s)‖², the squared norm over all parameters, one per sample. returns [...]:
    G, or Q(s, a), of the same samples. Only the ratio of the two sums matters, so an exact expectation over actions is
    had by passing π(a|s)·‖∇log π(a|s)‖² as the first argument. It minimises the summed variance of all coordinates of
    one step's ∇log π·(G − b); it equals V when the squared score and G are uncorrelated.

    Returns a scalar. Raises ValueError for unequal shapes, a negative squared norm, or squared norms that are all 0.

    Book: §13.1.4
    Source: Weaver & Tao 2001; Greensmith et al. 2004
    """
    check_same_shape(score_sq_norm=score_sq_norm, returns=returns)
    score_sq_norm, returns = as_float(score_sq_norm), as_float(returns)
    if bool((score_sq_norm < 0).any()):
        raise ValueError(f"score_sq_norm must not be negative, got a minimum of {score_sq_norm.min().item()}")
    total = score_sq_norm.sum()
    if bool(total == 0):
        raise ValueError("score_sq_norm must not be 0 everywhere: then every baseline is equally good")
    return (score_sq_norm * returns).sum() / total
