"""Advantage estimates, from one step to the whole episode, and the exponential mix of them all.

Every argument is indexed by transition: rewards[..., t], terminated[..., t], truncated[..., t] and next_values[..., t]
belong to the step from s_t to s_{t+1}. Time is the last axis.
"""

import torch
from torch import Tensor

from ppo_lab.masking import as_float, as_mask, check_same_shape, check_unit_interval, hide
from ppo_lab.policy_gradient import reward_to_go


def td_residual(
    rewards: Tensor, values: Tensor, next_values: Tensor, gamma: float, *, terminated: Tensor | None = None
) -> Tensor:
    """One-step temporal-difference error, which is the one-step advantage.

    δ_t = r_t + γ·V(s_{t+1}) − V(s_t), with V(s_{t+1}) = 0 where the transition terminated, whatever next_values holds.

    rewards, values, next_values [..., T], t = 0 … T−1; terminated [..., T] bool or 0/1; gamma in [0, 1].
    Returns [..., T]. Raises ValueError for unequal shapes or a gamma out of range.

    Book: §13.4.1; A07 §4.1
    Source: Sutton 1988
    """
    check_same_shape(rewards=rewards, values=values, next_values=next_values)
    check_unit_interval(gamma=gamma)
    next_values = _nothing_after(terminated, as_float(next_values))
    return as_float(rewards) + gamma * next_values - as_float(values)


def n_step_advantage(
    rewards: Tensor,
    values: Tensor,
    next_values: Tensor,
    n: int,
    gamma: float,
    *,
    terminated: Tensor | None = None,
    truncated: Tensor | None = None,
) -> Tensor:
    """Advantage from n observed rewards and the critic after them.

    Â_t^(n) = Σ_{l=0}^{n−1} γ^l·r_{t+l} + γ^n·V(s_{t+n}) − V(s_t)

    The sum stops early at the first transition that terminated (no value follows), was truncated, or is the last of the
    row (the value is the next_values of that transition). There is no λ in it: see ERRATA about A07 §4.1.

    rewards, values, next_values [..., T], t = 0 … T−1; n ≥ 1; gamma in [0, 1]; terminated, truncated [..., T] bool or
    0/1. Returns [..., T]. Raises ValueError for unequal shapes, n < 1 or a gamma out of range.

    Book: §13.4.1; A07 §4.1
    Source: Watkins 1989; Sutton and Barto 2018, chapter 7
    """
    check_same_shape(rewards=rewards, values=values, next_values=next_values)
    check_unit_interval(gamma=gamma)
    if n < 1:
        raise ValueError(f"n must be at least 1, got {n}")
    rewards, n_steps = as_float(rewards), rewards.shape[-1]
    bootstrap = _nothing_after(terminated, as_float(next_values))
    stops = _episode_ends(rewards, terminated, truncated)
    stops[..., -1:] = True
    target = rewards + gamma * bootstrap
    for _ in range(min(n, n_steps) - 1):
        # The n-step target is one reward plus the discounted (n−1)-step target of the next step. The value that roll
        # carries round from the front lands on the last step, which always stops.
        target = rewards + gamma * torch.where(stops, bootstrap, target.roll(-1, -1))
    return target - as_float(values)


def monte_carlo_advantage(
    rewards: Tensor,
    values: Tensor,
    gamma: float,
    *,
    terminated: Tensor | None = None,
    truncated: Tensor | None = None,
    next_values: Tensor | None = None,
) -> Tensor:
    """Advantage from all rewards up to the end of the episode.

    Â_t = G_t − V(s_t), with G_t the discounted sum of the rewards from t on, from `reward_to_go`.

    rewards, values [..., T], t = 0 … T−1; gamma in [0, 1]; terminated, truncated [..., T] bool or 0/1; next_values
    [..., T]: continues the sum where it was truncated and after the last step; without it those count as 0.
    Returns [..., T]. Raises ValueError for unequal shapes or a gamma out of range.

    Book: §13.4.1
    Source: Williams 1992
    """
    check_same_shape(rewards=rewards, values=values)
    returns = reward_to_go(rewards, gamma, terminated=terminated, truncated=truncated, next_values=next_values)
    return returns - as_float(values)


@torch.no_grad()
def gae(
    rewards: Tensor,
    values: Tensor,
    next_values: Tensor,
    *,
    gamma: float,
    gae_lambda: float,
    terminated: Tensor | None = None,
    truncated: Tensor | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation, and the returns that go with it.

    Â_t = Σ_{l≥0} (γλ)^l·δ_{t+l}, computed backwards as Â_t = δ_t + γλ·Â_{t+1};  R̂_t = Â_t + V(s_t).

    Terminated: nothing follows, next_values[t] is not read. Truncated: δ_t uses next_values[t], the value of the state
    before any reset, and the sum ends there. Both at once: terminated. The last step of a row is treated as truncated.
    A masked step is skipped as if it were not there, so its neighbours must have been given next_values that point
    across it.

    rewards, values, next_values [..., T], t = 0 … T−1; gamma, gae_lambda in [0, 1]; terminated, truncated [..., T] bool
    or 0/1; mask [..., T] True = counts. Returns (advantages, returns), both [..., T], without gradient, 0 where masked;
    float32 for half-precision inputs. Raises ValueError for unequal shapes or a gamma or gae_lambda out of range.

    Book: §13.4.2; A07 §4.1
    Source: Schulman et al. 2016, arXiv 1506.02438
    """
    check_same_shape(rewards=rewards, values=values, next_values=next_values)
    check_unit_interval(gamma=gamma, gae_lambda=gae_lambda)
    mask = as_mask(mask, rewards)
    terminated, truncated = (None if flag is None else hide(flag, mask, False) for flag in (terminated, truncated))
    deltas = hide(td_residual(rewards, values, next_values, gamma, terminated=terminated), mask)
    decay = torch.full_like(deltas, gamma * gae_lambda)
    decay.masked_fill_(_episode_ends(rewards, terminated, truncated), 0.0)
    if mask is not None:
        # A masked step has δ = 0 and hands on unchanged what it is given.
        decay.masked_fill_(~mask, 1.0)
    advantages = hide(_backward_sum(deltas, decay), mask)
    return advantages, hide(advantages + as_float(values), mask)


def compute_gae(rewards: Tensor, values: Tensor, gamma: float = 1.0, lam: float = 0.95) -> tuple[Tensor, Tensor]:
    """GAE of one finished answer, called as the book prints it; `gae` does the work.

    Â_t = δ_t + γλ·Â_{t+1},  δ_t = r_t + γ·V(s_{t+1}) − V(s_t);  R̂_t = Â_t + V(s_t).

    rewards [..., T]; values [..., T+1], t = 0 … T, the last one 0 after the end of an answer or the value to continue
    with. The book's listing takes one row, this one any leading shape; rows of unequal length need `gae` and its mask.
    Returns (advantages, returns), both [..., T], without gradient. Raises ValueError for other shapes or a gamma or lam
    out of range.

    Book: §13.4.3
    Source: Schulman et al. 2016, arXiv 1506.02438
    """
    check_unit_interval(gamma=gamma, lam=lam)
    expected = (*rewards.shape[:-1], rewards.shape[-1] + 1)
    if tuple(values.shape) != expected:
        raise ValueError(f"values must hold one step more than rewards, {expected}, got {tuple(values.shape)}")
    return gae(rewards, values[..., :-1], values[..., 1:], gamma=gamma, gae_lambda=lam)


def _nothing_after(terminated: Tensor | None, next_values: Tensor) -> Tensor:
    terminated = as_mask(terminated, next_values, "terminated")
    # Not a product with 1 − terminated: 0·nan is nan, and what lies behind the end of an episode may be anything.
    return next_values if terminated is None else next_values.masked_fill(terminated, 0.0)


def _episode_ends(like: Tensor, terminated: Tensor | None, truncated: Tensor | None) -> Tensor:
    ends = torch.zeros_like(like, dtype=torch.bool)
    for name, flag in (("terminated", terminated), ("truncated", truncated)):
        if flag is not None:
            ends = ends | as_mask(flag, like, name)
    return ends


def _backward_sum(deltas: Tensor, decay: Tensor) -> Tensor:
    """x_t = deltas_t + decay_t·x_{t+1} along the last axis, with 0 after the end."""
    # One step touches one time for all rows at once, so time goes first: each step then reads neighbouring memory.
    total = deltas.movedim(-1, 0).clone(memory_format=torch.contiguous_format)
    decays = decay.movedim(-1, 0).contiguous().unbind(0)
    steps = total.unbind(0)
    for t in range(len(steps) - 2, -1, -1):
        steps[t].addcmul_(decays[t], steps[t + 1])
    return total.movedim(0, -1).contiguous()
