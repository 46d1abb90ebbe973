"""Exercises of chapter 9, beyond PPO (§13.9). Wrong answers are written as a reader would, without types."""

import math

import torch
from torch import Tensor, tensor
from torch.nn import functional

from ppo_lab.exercises.kit import Case, Exercise, Mistake

NO, YES = False, True
NAN = math.nan


# --- group_advantages


def _by_group(scores: Tensor, group_index: Tensor, function) -> Tensor:
    """The function of each group's scores, put back where the scores stood."""
    result = torch.zeros_like(scores)
    for label in group_index.unique():
        result[group_index == label] = function(scores[group_index == label])
    return result


def _standardised(group: Tensor, eps: float, correction: int = 1) -> Tensor:
    if len(group) == 1:
        return torch.zeros_like(group)
    return (group - group.mean()) / (group.std(correction=correction) + eps)


def _whole_batch(scores, group_index, eps):
    return _standardised(scores, eps)


def _mean_of_the_group_spread_of_the_batch(scores, group_index, eps):
    return _by_group(scores, group_index, lambda group: group - group.mean()) / (scores.std() + eps)


def _population_spread(scores, group_index, eps):
    return _by_group(scores, group_index, lambda group: _standardised(group, eps, correction=0))


def _group_of_one_is_nan(scores, group_index, eps):
    def standardised(group):
        variance = (group - group.mean()).square().sum() / (len(group) - 1)
        return (group - group.mean()) / (variance.sqrt() + eps)

    return _by_group(scores, group_index, standardised)


def _group_of_one_keeps_its_score(scores, group_index, eps):
    return _by_group(scores, group_index, lambda group: group if len(group) == 1 else _standardised(group, eps))


def _without_guard(scores, group_index, eps):
    return _by_group(scores, group_index, lambda group: _standardised(group, 0.0))


def _guard_inside_the_root(scores, group_index, eps):
    def standardised(group):
        above_mean = group - group.mean()
        return above_mean / (group.var() + eps).sqrt() if len(group) > 1 else above_mean

    return _by_group(scores, group_index, standardised)


def _only_centred(scores, group_index, eps):
    return _by_group(scores, group_index, lambda group: group - group.mean())


def _others_only(group: Tensor) -> Tensor:
    """Each score minus the mean of the other scores in its group."""
    return group - (group.sum() - group) / (len(group) - 1) if len(group) > 1 else torch.zeros_like(group)


def _own_score_left_out(scores, group_index, eps):
    spread = _by_group(scores, group_index, lambda group: group.std() + eps if len(group) > 1 else 1.0)
    return _by_group(scores, group_index, _others_only) / spread


def _neighbours(scores, group_index, eps):
    counts = group_index.unique(return_counts=True)[1].tolist()
    return torch.cat([_standardised(part, eps) for part in scores.split(counts)])


def _groups(scores: list[float], group_index: list[int], eps: float = 1e-6) -> dict:
    return dict(scores=tensor(scores), group_index=tensor(group_index), eps=eps)


GROUP_ADVANTAGES = Exercise(
    "group_advantages",
    ("advantages",),
    (
        Case(
            "two groups, an easy prompt and a hard one",
            _groups([5.0, 7.0, 1.0, 2.0, 3.0], [0, 0, 1, 1, 1]),
            tensor([-0.707106, 0.707106, -0.999999, 0.0, 0.999999]),
        ),
        Case(
            "the groups are shuffled",
            _groups([5.0, 1.0, 7.0, 3.0, 2.0], [4, 9, 4, 9, 9]),
            tensor([-0.707106, -0.999999, 0.707106, 0.999999, 0.0]),
        ),
        Case(
            "a group of one",
            _groups([3.0, 1.0, 2.0], [7, 0, 0]),
            tensor([0.0, -0.707106, 0.707106]),
        ),
        Case(
            "a group of equal scores",
            _groups([2.0, 2.0, 2.0, 0.0, 1.0], [1, 1, 1, 0, 0]),
            tensor([0.0, 0.0, 0.0, -0.707106, 0.707106]),
        ),
        Case(
            "right or wrong, one right answer of four",
            _groups([0.0, 0.0, 1.0, 0.0], [0, 0, 0, 0]),
            tensor([-0.499999, -0.499999, 1.499997, -0.499999]),
        ),
        Case(
            "an eps that is to be seen",
            _groups([1.0, 3.0], [5, 5], 0.5),
            tensor([-0.522408, 0.522408]),
        ),
    ),
    (
        Mistake(
            "the mean and the spread of the whole batch are taken",
            "Then all answers to an easy prompt look good. Compare an answer with the other answers to its prompt.",
            _whole_batch,
        ),
        Mistake(
            "the mean is that of the group, the spread that of the whole batch",
            "In GRPO both belong to the group: scores[group_index == label].",
            _mean_of_the_group_spread_of_the_batch,
        ),
        Mistake(
            "the variance is divided by n",
            "The sample standard deviation divides by n − 1, as Tensor.std() does.",
            _population_spread,
        ),
        Mistake(
            "a group of one is not treated",
            "Its sample deviation is 0/0. With nothing to compare it with, its advantage is 0.",
            _group_of_one_is_nan,
        ),
        Mistake(
            "a group of one keeps its score",
            "A score of 3 alone says nothing about good or bad. Nothing to compare with: 0.",
            _group_of_one_keeps_its_score,
        ),
        Mistake(
            "nothing is added to the standard deviation",
            "Equal scores are 0/0 then. Divide by std + eps.",
            _without_guard,
        ),
        Mistake(
            "eps stands inside the root",
            "Here it is added to the standard deviation, not to the variance.",
            _guard_inside_the_root,
        ),
        Mistake(
            "the scores are not divided by the spread of their group",
            "That is Dr. GRPO. Here GRPO is asked for, as it was first published.",
            _only_centred,
        ),
        Mistake(
            "the own score is left out of the mean",
            "That is the mean of RLOO. GRPO's mean is over the whole group.",
            _own_score_left_out,
        ),
        Mistake(
            "neighbours are taken for a group",
            "After shuffling, a group is scattered over the batch. group_index == label finds it.",
            _neighbours,
        ),
    ),
)


# --- leave_one_out


def _own_score_included(scores, group_index):
    return _by_group(scores, group_index, lambda group: group - group.mean())


def _others_of_the_batch(scores, group_index):
    return _others_only(scores)


def _others_divided_by_n(scores, group_index):
    return _by_group(scores, group_index, lambda group: group - (group.sum() - group) / len(group))


def _alone_is_nan(scores, group_index):
    return _by_group(scores, group_index, lambda group: group - (group.sum() - group) / (len(group) - 1))


def _alone_keeps_its_score(scores, group_index):
    return _by_group(scores, group_index, lambda group: _others_only(group) if len(group) > 1 else group)


def _shrunk_instead_of_stretched(scores, group_index):
    return _by_group(scores, group_index, lambda group: (group - group.mean()) * (len(group) - 1) / len(group))


def _scaled_as_in_grpo(scores, group_index):
    return _by_group(scores, group_index, lambda group: _standardised(group, 1e-6))


def _best_of_the_others(scores, group_index):
    def against_the_best(group):
        others = [torch.cat([group[:i], group[i + 1 :]]) for i in range(len(group))]
        return group - torch.stack([x.max() for x in others]) if len(group) > 1 else torch.zeros_like(group)

    return _by_group(scores, group_index, against_the_best)


LEAVE_ONE_OUT = Exercise(
    "leave_one_out",
    ("advantages",),
    (
        Case(
            "one group of three",
            dict(scores=tensor([1.0, 2.0, 6.0]), group_index=tensor([0, 0, 0])),
            tensor([-3.0, -1.5, 4.5]),
        ),
        Case(
            "two groups, shuffled",
            dict(scores=tensor([10.0, 0.0, 14.0, 1.0, 2.0]), group_index=tensor([3, 8, 3, 8, 8])),
            tensor([-4.0, -1.5, 4.0, 0.0, 1.5]),
        ),
        Case(
            "a group of one",
            dict(scores=tensor([5.0, 1.0, 3.0]), group_index=tensor([2, 1, 1])),
            tensor([0.0, -2.0, 2.0]),
        ),
        Case(
            "equal scores",
            dict(scores=tensor([4.0, 4.0, 0.0, 1.0]), group_index=tensor([0, 0, 1, 1])),
            tensor([0.0, 0.0, -1.0, 1.0]),
        ),
        Case(
            "one right answer of four",
            dict(scores=tensor([0.0, 1.0, 0.0, 0.0]), group_index=tensor([0, 0, 0, 0])),
            tensor([-0.333333, 1.0, -0.333333, -0.333333]),
        ),
    ),
    (
        Mistake(
            "the own score is part of the baseline",
            "Leave it out: with it the gradient is only (n − 1)/n of the true one.",
            _own_score_included,
        ),
        Mistake(
            "the others are all others in the batch",
            "Answers to other prompts have other scores for reasons of their own. Stay inside the group.",
            _others_of_the_batch,
        ),
        Mistake("the sum of the others is divided by n", "There are n − 1 others.", _others_divided_by_n),
        Mistake(
            "a group of one is not treated",
            "The mean of no others is 0/0. With nothing to compare it with, its advantage is 0.",
            _alone_is_nan,
        ),
        Mistake(
            "a group of one keeps its score",
            "It would then be compared with 0, all others with each other. Its advantage is 0.",
            _alone_keeps_its_score,
        ),
        Mistake(
            "the factor is (n − 1)/n instead of n/(n − 1)",
            "Without its own score the baseline is further away, so the advantage is larger, not smaller.",
            _shrunk_instead_of_stretched,
        ),
        Mistake(
            "the advantages are divided by the spread",
            "That is GRPO. RLOO leaves the units of the score.",
            _scaled_as_in_grpo,
        ),
        Mistake(
            "the best of the others is the baseline",
            "Then nearly every answer is bad. Take the mean of the others.",
            _best_of_the_others,
        ),
    ),
)


# --- dpo_loss


def _margins(chosen_logp: Tensor, rejected_logp: Tensor, ref_chosen_logp: Tensor, ref_rejected_logp: Tensor) -> Tensor:
    """How much further the policy has moved towards the chosen answer than towards the rejected one, [B]."""
    return (chosen_logp - ref_chosen_logp).sum(-1) - (rejected_logp - ref_rejected_logp).sum(-1)


def _reference_left_out(chosen_logp, rejected_logp, ref_chosen_logp, ref_rejected_logp, kl_coef):
    return -functional.logsigmoid(kl_coef * (chosen_logp.sum(-1) - rejected_logp.sum(-1))).mean()


def _chosen_and_rejected_swapped(chosen_logp, rejected_logp, ref_chosen_logp, ref_rejected_logp, kl_coef):
    margins = _margins(chosen_logp, rejected_logp, ref_chosen_logp, ref_rejected_logp)
    return -functional.logsigmoid(-kl_coef * margins).mean()


def _price_outside(chosen_logp, rejected_logp, ref_chosen_logp, ref_rejected_logp, kl_coef):
    margins = _margins(chosen_logp, rejected_logp, ref_chosen_logp, ref_rejected_logp)
    return -kl_coef * functional.logsigmoid(margins).mean()


def _divided_by_the_price(chosen_logp, rejected_logp, ref_chosen_logp, ref_rejected_logp, kl_coef):
    margins = _margins(chosen_logp, rejected_logp, ref_chosen_logp, ref_rejected_logp)
    return -functional.logsigmoid(margins / kl_coef).mean()


def _mean_over_places(chosen_logp, rejected_logp, ref_chosen_logp, ref_rejected_logp, kl_coef):
    margins = (chosen_logp - ref_chosen_logp).mean(-1) - (rejected_logp - ref_rejected_logp).mean(-1)
    return -functional.logsigmoid(kl_coef * margins).mean()


def _mean_over_tokens(chosen_logp, rejected_logp, ref_chosen_logp, ref_rejected_logp, kl_coef):
    chosen = (chosen_logp - ref_chosen_logp).sum(-1) / (chosen_logp != 0).sum(-1)
    rejected = (rejected_logp - ref_rejected_logp).sum(-1) / (rejected_logp != 0).sum(-1)
    return -functional.logsigmoid(kl_coef * (chosen - rejected)).mean()


def _one_sigmoid_for_the_batch(chosen_logp, rejected_logp, ref_chosen_logp, ref_rejected_logp, kl_coef):
    margins = _margins(chosen_logp, rejected_logp, ref_chosen_logp, ref_rejected_logp)
    return -functional.logsigmoid(kl_coef * margins.mean())


def _to_be_maximised(chosen_logp, rejected_logp, ref_chosen_logp, ref_rejected_logp, kl_coef):
    margins = _margins(chosen_logp, rejected_logp, ref_chosen_logp, ref_rejected_logp)
    return functional.logsigmoid(kl_coef * margins).mean()


def _logarithm_forgotten(chosen_logp, rejected_logp, ref_chosen_logp, ref_rejected_logp, kl_coef):
    margins = _margins(chosen_logp, rejected_logp, ref_chosen_logp, ref_rejected_logp)
    return -torch.sigmoid(kl_coef * margins).mean()


def _in_two_steps(chosen_logp, rejected_logp, ref_chosen_logp, ref_rejected_logp, kl_coef):
    margins = _margins(chosen_logp, rejected_logp, ref_chosen_logp, ref_rejected_logp)
    return -torch.sigmoid(kl_coef * margins).log().mean()


def _pairs(chosen: list, rejected: list, ref_chosen: list, ref_rejected: list, kl_coef: float) -> dict:
    names = ("chosen_logp", "rejected_logp", "ref_chosen_logp", "ref_rejected_logp")
    rows = (chosen, rejected, ref_chosen, ref_rejected)
    return dict(zip(names, map(tensor, rows), strict=True)) | dict(kl_coef=kl_coef)


DPO_LOSS = Exercise(
    "dpo_loss",
    ("loss",),
    (
        Case(
            "one pair, two tokens each",
            _pairs([[-1.0, -2.0]], [[-3.0, -1.5]], [[-2.0, -2.0]], [[-2.0, -2.0]], 0.5),
            tensor(0.386871),
        ),
        Case(
            "a policy that is still the reference",
            _pairs([[-1.0, -2.0]], [[-3.0, -1.5]], [[-1.0, -2.0]], [[-3.0, -1.5]], 0.1),
            tensor(0.693147),
        ),
        Case(
            "the chosen answer is longer",
            _pairs([[-1.0, -1.0, -1.0]], [[-2.0, 0.0, 0.0]], [[-2.0, -2.0, -2.0]], [[-1.5, 0.0, 0.0]], 0.2),
            tensor(0.403186),
        ),
        Case(
            "two pairs, one the right way and one the wrong way",
            _pairs([[-1.0], [-4.0]], [[-3.0], [-2.0]], [[-2.0], [-2.0]], [[-2.0], [-2.0]], 1.0),
            tensor(1.126928),
        ),
        Case(
            "a pair that is far on the wrong side",
            _pairs([[-300.0]], [[-1.0]], [[-1.0]], [[-1.0]], 0.5),
            tensor(149.5),
        ),
    ),
    (
        Mistake(
            "the reference is left out",
            "What counts is how far the policy has moved from the reference: log π − log π_ref, for both answers.",
            _reference_left_out,
        ),
        Mistake(
            "chosen and rejected change places",
            "The loss is small when the chosen answer has gained more.",
            _chosen_and_rejected_swapped,
        ),
        Mistake(
            "β stands outside the sigmoid",
            "There it would only scale the step. It prices the distance: σ(β · margin).",
            _price_outside,
        ),
        Mistake(
            "the margin is divided by β",
            "The implicit reward is β·log(π/π_ref): a small β makes the same reward cost more distance.",
            _divided_by_the_price,
        ),
        Mistake(
            "the mean over all places is taken",
            "The log-probability of an answer is the sum over its tokens, not their mean.",
            _mean_over_places,
        ),
        Mistake(
            "the mean over the tokens of each answer is taken",
            "That is how SimPO does it. The log-probability of an answer is the sum over its tokens.",
            _mean_over_tokens,
        ),
        Mistake(
            "the margins are averaged before the sigmoid",
            "Each pair has its own loss; the mean comes last.",
            _one_sigmoid_for_the_batch,
        ),
        Mistake("the sign is that of something to maximise", "A loss is to be minimised: −log σ.", _to_be_maximised),
        Mistake("the logarithm is forgotten", "It is −log σ(β · margin).", _logarithm_forgotten),
        Mistake(
            "the sigmoid is computed first and its logarithm after",
            "Far on the wrong side σ is 0 in float32, and log 0 is −∞. functional.logsigmoid does both at once.",
            _in_two_steps,
        ),
    ),
)


# --- best_of_n_kl


def _best_of_n(probs: Tensor, scores: Tensor, n: int) -> Tensor:
    """The probability that an answer is the best of n, for scores without ties."""
    order = scores.argsort()
    reached = probs[order].cumsum(-1).clamp(max=1.0)
    powers = torch.cat([torch.zeros(1), reached**n])
    return torch.zeros_like(probs).scatter(0, order, powers.diff())


def _nats(new: Tensor, probs: Tensor) -> Tensor:
    return torch.where(new > 0, new * (new / probs).log(), 0.0).sum()


def _bound(n: int) -> float:
    return math.log(n) - (n - 1) / n


def _only_the_logarithm(probs, scores, n):
    return _nats(_best_of_n(probs, scores, n), probs), math.log(n)


def _only_the_fraction(probs, scores, n):
    return _nats(_best_of_n(probs, scores, n), probs), (n - 1) / n


def _in_bits(probs, scores, n):
    return _nats(_best_of_n(probs, scores, n), probs) / math.log(2), math.log2(n) - (n - 1) / n


def _fraction_added(probs, scores, n):
    return _nats(_best_of_n(probs, scores, n), probs), math.log(n) + (n - 1) / n


def _other_direction(probs, scores, n):
    new = _best_of_n(probs, scores, n)
    return torch.where(probs > 0, probs * (probs / new).log(), 0.0).sum(), _bound(n)


def _worst_of_n(probs, scores, n):
    return _nats(_best_of_n(probs, -scores, n), probs), _bound(n)


def _listed_order(probs, scores, n):
    return _nats(_best_of_n(probs, torch.arange(len(probs)), n), probs), _bound(n)


def _best_answer_always(probs, scores, n):
    return -probs[scores.argmax()].log(), _bound(n)


def _powers_of_the_probabilities(probs, scores, n):
    new = probs**n / (probs**n).sum()
    return _nats(new, probs), _bound(n)


def _drawn_once_more(probs, scores, n):
    return _nats(_best_of_n(probs, scores, n + 1), probs), _bound(n + 1)


BEST_OF_N_KL = Exercise(
    "best_of_n_kl",
    ("KL", "bound"),
    (
        Case(
            "the best of two, a fair coin",
            dict(probs=tensor([0.5, 0.5]), scores=tensor([0.0, 1.0]), n=2),
            (tensor(0.130812), tensor(0.193147)),
        ),
        Case(
            "the best of four, four answers, not in order",
            dict(probs=tensor([0.4, 0.1, 0.2, 0.3]), scores=tensor([0.5, 3.0, -1.0, 2.0]), n=4),
            (tensor(0.567346), tensor(0.636294)),
        ),
        Case(
            "one answer alone",
            dict(probs=tensor([0.2, 0.3, 0.5]), scores=tensor([1.0, 5.0, 2.0]), n=1),
            (tensor(0.0), tensor(0.0)),
        ),
        Case(
            "the best answer is rare",
            dict(probs=tensor([0.01, 0.99]), scores=tensor([9.0, 0.0]), n=8),
            (tensor(0.093033), tensor(1.204442)),
        ),
        Case(
            "so many that the best is always there",
            dict(probs=tensor([0.25, 0.25, 0.5]), scores=tensor([1.0, 2.0, 0.0]), n=64),
            (tensor(1.386294), tensor(3.174508)),
        ),
    ),
    (
        Mistake(
            "the bound is log n alone",
            "That would be the distance if the best of n were a draw from a part of 1/n. Take off (n − 1)/n.",
            _only_the_logarithm,
        ),
        Mistake(
            "the bound is (n − 1)/n alone", "That never exceeds 1. The logarithm of n is missing.", _only_the_fraction
        ),
        Mistake("logarithms are taken to base 2", "A KL here is in nats: the natural logarithm.", _in_bits),
        Mistake("(n − 1)/n is added", "It is taken off: for n = 1 the policy has not moved at all.", _fraction_added),
        Mistake(
            "the KL is taken the other way round",
            "The answers are those of the best of n: Σ π_n log(π_n/π), weighted with π_n.",
            _other_direction,
        ),
        Mistake("the worst of n is kept", "F(y) collects the answers with a score up to that of y.", _worst_of_n),
        Mistake(
            "the answers are taken in the order of the list",
            "F(y) goes by the score: sort by it first, and put the result back in the old order.",
            _listed_order,
        ),
        Mistake(
            "the best answer is always found",
            "n draws may all miss it. It is the limit for n → ∞.",
            _best_answer_always,
        ),
        Mistake(
            "each probability is raised to the power n",
            "That all n draws lie at or below y has the probability F(y)^n, with the sum of the probabilities.",
            _powers_of_the_probabilities,
        ),
        Mistake("n is one too large", "The best of one is the policy itself, with a KL of 0.", _drawn_once_more),
    ),
)


# --- repair_reinforce_pp


def _whitened(x: Tensor, mask: Tensor) -> Tensor:
    """What `ppo_lab.whiten` returns."""
    counted = x[mask]
    if len(counted) < 2 or counted.std() == 0:
        return torch.zeros_like(x)
    return torch.where(mask, (x - counted.mean()) / counted.std(), 0.0)


def _past_instead_of_future(rewards, mask):
    returns = torch.where(mask, rewards, 0.0).cumsum(-1)
    return _whitened(returns, mask)


def _to_go(rewards: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, rewards, 0.0).flip(-1).cumsum(-1).flip(-1)


def _not_turned_back(rewards, mask):
    return _whitened(torch.where(mask, rewards, 0.0).flip(-1).cumsum(-1), mask)


def _own_reward_missing(rewards, mask):
    return _whitened(_to_go(rewards, mask) - torch.where(mask, rewards, 0.0), mask)


def _whole_answer(rewards, mask):
    return _whitened(torch.where(mask, rewards, 0.0).sum(-1, keepdim=True).expand(rewards.shape), mask)


def _whitened_first(rewards, mask):
    return torch.where(mask, _to_go(_whitened(rewards, mask), mask), 0.0)


def _not_whitened(rewards, mask):
    return torch.where(mask, _to_go(rewards, mask), 0.0)


def _each_answer_whitened_alone(rewards, mask):
    returns = _to_go(rewards, mask)
    return torch.stack([_whitened(row, counts) for row, counts in zip(returns, mask, strict=True)])


def _padding_whitened_too(rewards, mask):
    return torch.where(mask, _whitened(_to_go(rewards, mask), torch.ones_like(mask)), 0.0)


def _total_minus_past(rewards, mask):
    returns = rewards.sum(-1, keepdim=True) - rewards.cumsum(-1) + rewards
    return _whitened(returns, mask)


REPAIR_REINFORCE_PP = Exercise(
    "repair_reinforce_pp",
    ("advantages",),
    (
        Case(
            "a score at the end of each answer",
            dict(rewards=tensor([[0.0, 0.0, 2.0], [0.0, 1.0, 5.0]]), mask=tensor([[YES, YES, NO], [YES, YES, NO]])),
            tensor([[-0.866025, -0.866025, 0.0], [0.866025, 0.866025, 0.0]]),
        ),
        Case(
            "each token pays for its KL",
            dict(rewards=tensor([[-1.0, -2.0, 4.0], [3.0, 0.0, 0.0]]), mask=tensor([[YES, YES, YES], [YES, NO, NO]])),
            tensor([[-1.161895, -0.387298, 1.161895], [0.387298, 0.0, 0.0]]),
        ),
        Case(
            "answers of one token",
            dict(rewards=tensor([[1.0], [3.0]]), mask=tensor([[YES], [YES]])),
            tensor([[-0.707107], [0.707107]]),
        ),
        Case(
            "NaN in the padding",
            dict(rewards=tensor([[0.0, 1.0, NAN], [0.0, 0.0, 4.0]]), mask=tensor([[YES, YES, NO], [YES, YES, YES]])),
            tensor([[-1.095445, -1.095445, 0.0], [0.730297, 0.730297, 0.730297]]),
        ),
        Case(
            "no spread",
            dict(rewards=tensor([[0.0, 2.0], [0.0, 2.0]]), mask=tensor([[YES, YES], [YES, YES]])),
            tensor([[0.0, 0.0], [0.0, 0.0]]),
        ),
    ),
    (
        Mistake(
            "the sums are not turned back",
            "The sum to go of the last token came out first. A second flip(-1) puts it at the end.",
            _not_turned_back,
        ),
        Mistake(
            "the own reward of the token is missing",
            "The sum begins at t itself: a token pays for its own KL as well.",
            _own_reward_missing,
        ),
        Mistake(
            "each token gets the sum of the whole answer",
            "What was paid before the token was chosen says nothing about it. Sum from t on.",
            _whole_answer,
        ),
        Mistake(
            "the rewards are whitened, and then summed",
            "The sum first. Whitening takes a mean from each token, and the sum adds it up by length.",
            _whitened_first,
        ),
        Mistake("nothing is whitened", "The whitening over all tokens of the batch is the baseline.", _not_whitened),
        Mistake(
            "each answer is whitened alone",
            "Then good and bad answers look the same. One mean and one spread for the batch.",
            _each_answer_whitened_alone,
        ),
        Mistake(
            "padding enters the mean and the spread",
            "whiten(returns, mask) takes only what counts.",
            _padding_whitened_too,
        ),
        Mistake(
            "what the mask hides is added to the sum",
            "Hide it before you sum: torch.where(mask, rewards, 0.0).",
            _total_minus_past,
        ),
    ),
    given=_past_instead_of_future,
)

EXERCISES = (GROUP_ADVANTAGES, LEAVE_ONE_OUT, DPO_LOSS, BEST_OF_N_KL, REPAIR_REINFORCE_PP)
