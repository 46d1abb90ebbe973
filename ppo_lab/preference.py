"""Losses that learn from pairs of answers without a reward model: DPO, IPO and SimPO.

The log-probabilities are those of whole answers: sums over the tokens that count, [B], one number per pair.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ppo_lab.masking import as_float, check_positive, check_same_shape


class PreferenceLoss(NamedTuple):
    """What the preference losses return.

    total: the scalar to call backward() on. chosen_reward, rejected_reward [B]: the implicit rewards of the two answers
    of each pair, the scores that the policy behaves as if it had been given. accuracy: the share of pairs whose chosen
    answer has the higher one. All but total carry no gradient.
    """

    total: Tensor
    chosen_reward: Tensor
    rejected_reward: Tensor
    accuracy: Tensor


def dpo_loss(
    chosen_logp: Tensor,
    rejected_logp: Tensor,
    ref_chosen_logp: Tensor,
    ref_rejected_logp: Tensor,
    *,
    kl_coef: float,
    weights: Tensor | None = None,
) -> PreferenceLoss:
    """Direct preference optimisation: the Bradley–Terry loss of the reward that the policy itself implies, to minimise.

    L = −mean log σ(β·(log π(y_c)/π_ref(y_c) − log π(y_r)/π_ref(y_r)))        y_c chosen, y_r rejected

    The implicit reward is r = β·log π/π_ref, up to a constant per prompt that the difference removes: the reward of
    which this policy is the optimum π* ∝ π_ref·exp(r/β). So β is the price of a nat, as in the reward of LLM-PPO. A
    pair that the policy has not moved apart costs log 2.

    All logp [B] in nats, summed over the tokens of the answer; kl_coef β > 0; weights [B] ≥ 0: how much each pair
    counts, none for all alike. Returns a PreferenceLoss. No gradient flows into the reference. Raises ValueError for
    unequal shapes, another shape than [B], numbers that are not finite, a β that is not positive, and weights that are
    negative or all 0.

    Book: §13.9
    Source: Rafailov et al. 2023, arXiv 2305.18290, eq. 7
    """
    policy = {"chosen_logp": chosen_logp, "rejected_logp": rejected_logp}
    _check(**policy, ref_chosen_logp=ref_chosen_logp, ref_rejected_logp=ref_rejected_logp, weights=weights)
    check_positive(kl_coef=kl_coef)
    chosen = kl_coef * _log_ratio(chosen_logp, ref_chosen_logp)
    rejected = kl_coef * _log_ratio(rejected_logp, ref_rejected_logp)
    losses = -functional.logsigmoid(chosen - rejected)
    return _result(losses.mean() if weights is None else _weighted_mean(losses, weights), chosen, rejected)


def ipo_loss(
    chosen_logp: Tensor,
    rejected_logp: Tensor,
    ref_chosen_logp: Tensor,
    ref_rejected_logp: Tensor,
    *,
    kl_coef: float,
) -> PreferenceLoss:
    """Identity preference optimisation: a margin that is to be reached and not exceeded, to minimise.

    L = mean((h − 1/(2β))²)   with   h = log π(y_c)/π_ref(y_c) − log π(y_r)/π_ref(y_r)

    DPO pulls a pair that is always judged alike apart without end; here the pull turns round at a margin of 1/(2β).
    What is maximised is E[P(y preferred)] − β·KL: the price of a nat in units of a probability, not of a reward, so the
    same β is another leash than in DPO. On sums over the whole answer, as in the paper; some libraries divide each sum
    by its length, which needs a β of another size.

    All logp [B] in nats, summed over the tokens of the answer; kl_coef β > 0, the paper's τ. Returns a PreferenceLoss
    with the rewards β·log π/π_ref. No gradient flows into the reference. Raises ValueError for unequal shapes, another
    shape than [B], numbers that are not finite and a β that is not positive.

    Book: §13.9
    Source: Azar et al. 2023, arXiv 2310.12036, eq. 17
    """
    policy = {"chosen_logp": chosen_logp, "rejected_logp": rejected_logp}
    _check(**policy, ref_chosen_logp=ref_chosen_logp, ref_rejected_logp=ref_rejected_logp)
    check_positive(kl_coef=kl_coef)
    chosen = _log_ratio(chosen_logp, ref_chosen_logp)
    rejected = _log_ratio(rejected_logp, ref_rejected_logp)
    losses = (chosen - rejected - 1 / (2 * kl_coef)).square()
    return _result(losses.mean(), kl_coef * chosen, kl_coef * rejected)


def simpo_loss(
    chosen_logp: Tensor,
    rejected_logp: Tensor,
    chosen_lengths: Tensor,
    rejected_lengths: Tensor,
    *,
    scale: float,
    margin: float,
) -> PreferenceLoss:
    """Simple preference optimisation: the reward is the mean log π per token, and there is no reference, to minimise.

    L = −mean log σ(s·log π(y_c)/|y_c| − s·log π(y_r)/|y_r| − m)

    Nothing prices the distance to where the training began: only the learning rate and the number of steps limit it.
    The paper calls s β and m γ; s prices no nat and γ is the discount, so they have other names here. SimPO saves the
    reference and has one setting more than DPO.

    chosen_logp, rejected_logp [B] in nats, summed over the tokens of the answer; chosen_lengths, rejected_lengths [B]:
    the numbers of these tokens, at least 1, EOS included; scale s > 0; margin m ≥ 0. Returns a PreferenceLoss with the
    rewards s·log π/|y|. Raises ValueError for unequal shapes, another shape than [B], numbers that are not finite,
    lengths below 1, and settings out of range.

    Book: §13.9
    Source: Meng et al. 2024, arXiv 2405.14734, eq. 6
    """
    lengths = {"chosen_lengths": chosen_lengths, "rejected_lengths": rejected_lengths}
    _check(chosen_logp=chosen_logp, rejected_logp=rejected_logp, **lengths)
    for name, length in lengths.items():
        if not bool((length >= 1).all()):
            raise ValueError(f"{name} must be at least 1, got {length.min().item()}")
    check_positive(scale=scale)
    if not 0 <= margin < float("inf"):
        raise ValueError(f"margin must be at least 0 and finite, got {margin}")
    chosen = scale * as_float(chosen_logp) / chosen_lengths
    rejected = scale * as_float(rejected_logp) / rejected_lengths
    return _result(-functional.logsigmoid(chosen - rejected - margin).mean(), chosen, rejected)


def _log_ratio(logp: Tensor, ref_logp: Tensor) -> Tensor:
    return as_float(logp) - as_float(ref_logp.detach())


def _weighted_mean(losses: Tensor, weights: Tensor) -> Tensor:
    weights = as_float(weights.detach())
    if not (bool((weights >= 0).all()) and bool(weights.sum() > 0)):
        raise ValueError(
            f"weights must be at least 0 and not all 0, got {weights.min().item()} to {weights.max().item()}"
        )
    return (weights * losses).sum() / weights.sum()


def _result(total: Tensor, chosen: Tensor, rejected: Tensor) -> PreferenceLoss:
    chosen, rejected = chosen.detach(), rejected.detach()
    return PreferenceLoss(total, chosen, rejected, (chosen > rejected).float().mean())


def _check(*, weights: Tensor | None = None, **tensors: Tensor) -> None:
    for name, x in tensors.items():
        if x is None:
            raise ValueError(f"{name} must be given, got None")
    tensors |= {} if weights is None else {"weights": weights}
    check_same_shape(**tensors)
    for name, x in tensors.items():
        if x.dim() != 1 or not len(x):
            raise ValueError(f"{name} must have the shape [B], one number per pair, got {tuple(x.shape)}")
        if not bool(torch.isfinite(x).all()):
            raise ValueError(f"{name} must be finite, got {x[~torch.isfinite(x)][0].item()}")
