"""Advantages without a critic: an answer is measured against other answers, not against a learned value.

Several answers to one prompt form a group; `group_index` says which answers belong together. RLOO, ReMax and
REINFORCE++ are REINFORCE with another baseline: they need neither the critic nor the clip. GRPO keeps the clip of PPO
and drops the critic.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from ppo_lab.masking import as_float, as_mask, check_positive, check_same_shape, hide, masked_mean, masked_var
from ppo_lab.policy_gradient import reward_to_go
from ppo_lab.stability import whiten


def grpo_advantages(scores: Tensor, group_index: Tensor, *, divide_by_std: bool = True, eps: float = 1e-6) -> Tensor:
    """Each score against the mean of its group, in units of the group's spread.

        Â_i = (r_i − mean_g) / (std_g + eps)     std² = Σ_{j∈g} (r_j − mean_g)² / (n_g − 1)
        Â_i = r_i − mean_g                       divide_by_std=False: Dr. GRPO

    scores [B] in units of the reward, one per answer; group_index [B] integers: answers to one prompt share a label.
    Labels may be any numbers in any order, groups of any size. eps > 0, in units of the reward.

    A group of one has nothing to be compared with, a group of equal scores, up to rounding, nothing to prefer: both get
    exactly 0. (verl leaves the score of a group of one as it is, OpenRLHF gives nan.) The division gives every prompt
    the same weight, whatever its spread: the result is no gradient of the expected score any more. Without it the
    expected gradient is (n_g − 1)/n_g times the true one, because the mean contains the score itself; see
    `rloo_advantages`. The other change of Dr. GRPO, no division by the answer's length, belongs to the loss.

    Returns [B], one number for all tokens of an answer (`per_token` spreads it), without gradient; float32 for
    half-precision inputs. Raises ValueError for other shapes, a group_index that is not integer, a score that is not
    finite, or an eps that is not positive.

    Book: §13.9
    Source: Shao et al. 2024, arXiv 2402.03300 (GRPO); Liu et al. 2025, arXiv 2503.20783 (Dr. GRPO)
    """
    check_positive(eps=eps)
    scores = _checked_scores(scores, group_index)
    advantages = torch.zeros_like(scores)
    for rows in _groups_with_spread(scores, group_index):
        group = scores[rows]
        above_mean = group - masked_mean(group)
        advantages[rows] = above_mean / (masked_var(group).sqrt() + eps) if divide_by_std else above_mean
    return advantages


def rloo_advantages(scores: Tensor, group_index: Tensor) -> Tensor:
    """Each score against the mean of the others in its group: leave one out.

        Â_i = r_i − Σ_{j∈g, j≠i} r_j / (n_g − 1)  =  n_g/(n_g − 1) · (r_i − mean_g)

    scores [B] in units of the reward, one per answer; group_index [B] integers: answers to one prompt share a label.
    The baseline does not contain the answer's own score, so E[∇log π · Â] is the policy gradient itself. A group of one
    and a group of equal scores, up to rounding, get exactly 0. (For a group of one, one of verl's two versions leaves
    the score as it is, the other gives 0; OpenRLHF gives nan.)

    Returns [B], one number for all tokens of an answer (`per_token` spreads it), without gradient; float32 for
    half-precision inputs. Raises ValueError for other shapes, a group_index that is not integer, or a score that is not
    finite.

    Book: §13.9; §13.1.4
    Source: Kool et al. 2019; Ahmadian et al. 2024, arXiv 2402.14740 (RLOO)
    """
    scores = _checked_scores(scores, group_index)
    advantages = torch.zeros_like(scores)
    for rows in _groups_with_spread(scores, group_index):
        group = scores[rows]
        mean_of_others = (group.sum() - group) / (len(group) - 1)
        advantages[rows] = group - mean_of_others
    return advantages


def remax_advantages(rewards: Tensor, baseline_scores: Tensor, mask: Tensor, *, gamma: float = 1.0) -> Tensor:
    """The reward-to-go of a sampled answer against the score of the greedy answer to the same prompt.

        Â_t = Σ_{k≥t} γ^{k−t} r_k − r(greedy)

    rewards, mask [B, T], t = 0 … T−1, rewards in the units of the score (a KL penalty in them is counted). mask:
    tokens that count; a masked token is skipped. baseline_scores [B]: score of the answer that takes the most probable
    token at every step. It does not depend on the sampled answer, so it leaves the expected gradient as it is. Nothing
    is whitened.

    Returns [B, T], without gradient, 0 where masked; float32 for half-precision inputs. Raises ValueError for other
    shapes, gamma outside [0, 1], a baseline score or a reward that counts which is not finite.

    Book: §13.9; §13.1.4
    Source: Li et al. 2023, arXiv 2310.10505
    """
    mask = _checked_mask(rewards, mask)
    _check_one_per_row("baseline_scores", baseline_scores, mask)
    _check_finite("baseline_scores", baseline_scores)
    to_go = reward_to_go(rewards.detach(), gamma, mask=mask)
    return to_go - per_token(baseline_scores, mask)


def reinforce_pp_advantages(rewards: Tensor, mask: Tensor, *, gamma: float = 1.0) -> Tensor:
    """REINFORCE++: the reward-to-go, whitened over all tokens of the batch. No group, no critic.

        G_t = Σ_{k≥t} γ^{k−t} r_k,     Â = whiten(G)

    rewards, mask [B, T], t = 0 … T−1: token rewards, the KL penalty among them, as `token_rewards` gives them. mask:
    tokens that count; a masked token is skipped. The baseline is the mean over all tokens of all prompts: a long answer
    weighs more than a short one, and an easy prompt looks good beside a hard one.

    Returns [B, T], without gradient, 0 where masked and 0 everywhere without spread; float32 for half-precision inputs.
    Raises ValueError for other shapes, gamma outside [0, 1], or a reward that counts and is not finite.

    Book: §13.9; §13.6.2
    Source: Hu 2025, arXiv 2501.03262
    """
    mask = _checked_mask(rewards, mask)
    return whiten(reward_to_go(rewards.detach(), gamma, mask=mask), mask)


def reinforce_pp_baseline_advantages(scores: Tensor, group_index: Tensor, mask: Tensor) -> Tensor:
    """REINFORCE++ with a baseline: each score minus the mean of its group, whitened over all tokens of the batch.

        Â_{i,t} = whiten( r_i − mean_g )

    scores [B] in units of the reward; group_index [B] integers: answers to one prompt share a label; mask [B, T]:
    tokens that count. Mean and spread of the whitening run over tokens, so a long answer weighs more; the spread is
    that of the whole batch, not of the group as in `grpo_advantages`. A group of one enters the whitening as 0 (verl
    enters its score). An answer without tokens still counts in the mean of its group.

    Returns [B, T], without gradient, 0 where masked and 0 everywhere without spread; float32 for half-precision inputs.
    Raises ValueError for other shapes, a group_index that is not integer, or a score that is not finite.

    Book: §13.9; §13.6.2
    Source: Hu 2025, arXiv 2501.03262
    """
    above_mean = grpo_advantages(scores, group_index, divide_by_std=False)
    return whiten(per_token(above_mean, mask), mask)


def per_token(advantages: Tensor, mask: Tensor) -> Tensor:
    """One number per answer, given to every token of the answer that counts.

        Â_{i,t} = Â_i · mask_{i,t}

    advantages [B], any unit; mask [B, T], t = 0 … T−1. Returns [B, T], without gradient, 0 where masked; float32
    for half-precision inputs. Raises ValueError for other shapes.

    Book: §13.9
    Source: Shao et al. 2024, arXiv 2402.03300
    """
    _check_one_per_row("advantages", advantages, mask)
    spread = as_float(advantages.detach())[:, None].expand(mask.shape)
    return hide(spread, as_mask(mask, spread))


def _groups_with_spread(scores: Tensor, group_index: Tensor) -> Iterator[Tensor]:
    """The rows [B] bool of each group in which there is something to compare; the others keep advantage 0."""
    for label in group_index.unique():
        rows = group_index == label
        variance = masked_var(scores[rows])
        if not bool(variance.isfinite()):
            raise ValueError(f"scores must be of ordinary size, their variance overflows: {scores[rows][0].item():g}")
        if variance > 0:
            yield rows


def _checked_scores(scores: Tensor, group_index: Tensor) -> Tensor:
    check_same_shape(scores=scores, group_index=group_index)
    if scores.ndim != 1:
        raise ValueError(f"scores must be [B], one per answer, got shape {tuple(scores.shape)}")
    if group_index.is_floating_point() or group_index.is_complex() or group_index.dtype == torch.bool:
        raise ValueError(f"group_index must hold integers, got {group_index.dtype}")
    _check_finite("scores", scores)
    return as_float(scores.detach())


def _checked_mask(rewards: Tensor, mask: Tensor) -> Tensor:
    if mask is None:
        raise ValueError("mask must be given: which tokens of an answer count")
    if rewards.ndim != 2:
        raise ValueError(f"rewards must be [B, T], one per token, got shape {tuple(rewards.shape)}")
    mask = as_mask(mask, rewards)
    _check_finite("rewards", hide(rewards, mask))
    return mask


def _check_one_per_row(name: str, x: Tensor, mask: Tensor) -> None:
    if mask is None:
        raise ValueError("mask must be given: which tokens of an answer count")
    if mask.ndim != 2 or x.shape != mask.shape[:1]:
        raise ValueError(f"{name} must be [B] and mask [B, T], got {tuple(x.shape)} and {tuple(mask.shape)}")


def _check_finite(name: str, x: Tensor) -> None:
    if not bool(x.isfinite().all()):
        raise ValueError(f"{name} must be finite, got {x[~x.isfinite()][0].item()}")
