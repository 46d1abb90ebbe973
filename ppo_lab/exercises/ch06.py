"""Exercises of chapter 6, four models (§13.5). Wrong answers are written as a reader would, without types."""

import math

import torch
from torch import Tensor, tensor

from ppo_lab.exercises.kit import Case, Exercise, Mistake

NO, YES = False, True
NAN, INF = math.nan, math.inf


# --- response_values


def _one_late(values, prompt_length):
    return values[:, prompt_length:]


def _from_the_start(values, prompt_length):
    return values[:, : values.shape[1] - prompt_length]


def _one_early(values, prompt_length):
    return values.roll(2, -1)[:, prompt_length:]


def _next_values(values, prompt_length):
    return torch.cat([values[:, prompt_length:-1], torch.zeros_like(values[:, :1])], -1)


RESPONSE_VALUES = Exercise(
    "response_values",
    ("values",),
    (
        Case(
            "a prompt of three tokens, an answer of two",
            dict(values=tensor([[0.1, 0.2, 0.3, 0.4, 0.5]]), prompt_length=3),
            tensor([[0.3, 0.4]]),
        ),
        Case(
            "a prompt of one token",
            dict(values=tensor([[0.1, 0.2, 0.3, 0.4]]), prompt_length=1),
            tensor([[0.1, 0.2, 0.3]]),
        ),
        Case(
            "an answer of one token",
            dict(values=tensor([[0.1, 0.2, 0.3, 0.4, 0.9]]), prompt_length=4),
            tensor([[0.4]]),
        ),
        Case(
            "two answers",
            dict(values=tensor([[1.0, 2.0, 3.0, 4.0, 5.0], [6.0, 7.0, 8.0, 9.0, 0.0]]), prompt_length=2),
            tensor([[2.0, 3.0, 4.0], [7.0, 8.0, 9.0]]),
        ),
    ),
    (
        Mistake(
            "each value is one late: it has already seen the token that it should judge from before",
            "The state before the first token of the answer ends with the last token of the prompt.",
            _one_late,
        ),
        Mistake(
            "the values of the prompt are taken",
            "The first position of the table belongs to the prompt. The answer begins prompt_length places later.",
            _from_the_start,
        ),
        Mistake(
            "each value is one early",
            "The value before the first token of the answer knows the whole prompt, its last token too.",
            _one_early,
        ),
        Mistake(
            "the next values are returned, V(s_{t+1}) with 0 behind the end",
            "GAE needs them too, but this is about V(s_t), the state before token t.",
            _next_values,
        ),
    ),
)


# --- token_rewards


def _with_penalty(penalty: Tensor, scores: Tensor, mask: Tensor, column: Tensor) -> Tensor:
    """Penalties of the tokens that count, and each score in the column of its row."""
    rewards = torch.where(mask, penalty, 0.0)
    return rewards.scatter_add(-1, column[:, None], scores[:, None])


def _last(mask: Tensor) -> Tensor:
    return mask.sum(-1) - 1


def _leaving_is_rewarded(scores, logp, ref_logp, mask, kl_coef):
    return _with_penalty(kl_coef * (logp - ref_logp), scores, mask, _last(mask))


def _score_on_every_token(scores, logp, ref_logp, mask, kl_coef):
    return torch.where(mask, scores[:, None] - kl_coef * (logp - ref_logp), 0.0)


def _score_in_the_last_column(scores, logp, ref_logp, mask, kl_coef):
    column = torch.full_like(_last(mask), mask.shape[1] - 1)
    return _with_penalty(-kl_coef * (logp - ref_logp), scores, mask, column)


def _score_on_the_first_token(scores, logp, ref_logp, mask, kl_coef):
    return _with_penalty(-kl_coef * (logp - ref_logp), scores, mask, torch.zeros_like(_last(mask)))


def _penalty_by_k3(scores, logp, ref_logp, mask, kl_coef):
    d = logp - ref_logp
    return _with_penalty(-kl_coef * ((-d).exp() - 1 + d), scores, mask, _last(mask))


def _penalty_at_the_end(scores, logp, ref_logp, mask, kl_coef):
    penalty = torch.where(mask, kl_coef * (logp - ref_logp), 0.0).sum(-1)
    return _with_penalty(torch.zeros_like(logp), scores - penalty, mask, _last(mask))


def _coefficient_forgotten(scores, logp, ref_logp, mask, kl_coef):
    return _with_penalty(ref_logp - logp, scores, mask, _last(mask))


def _padding_pays(scores, logp, ref_logp, mask, kl_coef):
    return _with_penalty(-kl_coef * (logp - ref_logp), scores, torch.ones_like(mask), _last(mask))


def _mask_as_a_factor(scores, logp, ref_logp, mask, kl_coef):
    rewards = -kl_coef * (logp - ref_logp) * mask
    return rewards.scatter_add(-1, _last(mask)[:, None], scores[:, None])


TOKEN_REWARDS = Exercise(
    "token_rewards",
    ("rewards",),
    (
        Case(
            "three tokens that count",
            dict(
                scores=tensor([2.0]),
                logp=tensor([[-1.0, -2.0, -0.5]]),
                ref_logp=tensor([[-1.5, -1.0, -0.5]]),
                mask=tensor([[YES, YES, YES]]),
                kl_coef=0.1,
            ),
            tensor([[-0.05, 0.1, 2.0]]),
        ),
        Case(
            "padding behind two tokens",
            dict(
                scores=tensor([2.0]),
                logp=tensor([[-1.0, -2.0, -0.5]]),
                ref_logp=tensor([[-1.5, -1.0, -3.5]]),
                mask=tensor([[YES, YES, NO]]),
                kl_coef=0.1,
            ),
            tensor([[-0.05, 2.1, 0.0]]),
        ),
        Case(
            "two answers, one of them an EOS alone",
            dict(
                scores=tensor([1.0, -3.0]),
                logp=tensor([[-0.5, -0.5, -1.0], [-2.0, 0.0, 0.0]]),
                ref_logp=tensor([[-1.0, -2.0, -0.5], [-1.0, 0.0, 0.0]]),
                mask=tensor([[YES, YES, YES], [YES, NO, NO]]),
                kl_coef=0.2,
            ),
            tensor([[-0.1, -0.3, 1.1], [-2.8, 0.0, 0.0]]),
        ),
        Case(
            "no price for leaving the reference",
            dict(
                scores=tensor([0.5]),
                logp=tensor([[-1.0, -2.0]]),
                ref_logp=tensor([[-4.0, -9.0]]),
                mask=tensor([[YES, YES]]),
                kl_coef=0.0,
            ),
            tensor([[0.0, 0.5]]),
        ),
        Case(
            "NaN in the padding",
            dict(
                scores=tensor([2.0]),
                logp=tensor([[-1.0, -2.0, NAN]]),
                ref_logp=tensor([[-1.5, -1.0, NAN]]),
                mask=tensor([[YES, YES, NO]]),
                kl_coef=0.1,
            ),
            tensor([[-0.05, 2.1, 0.0]]),
        ),
    ),
    (
        Mistake(
            "leaving the reference is rewarded",
            "The penalty is −β·(log π − log π_ref): a token likelier than under the reference costs something.",
            _leaving_is_rewarded,
        ),
        Mistake(
            "the score is given to every token",
            "A long answer would earn its score many times. Only the last token that counts gets it.",
            _score_on_every_token,
        ),
        Mistake(
            "the score stands in the last column",
            "In a short answer that column is padding. Find the last True of each row.",
            _score_in_the_last_column,
        ),
        Mistake(
            "the score is given to the first token",
            "The reward model has seen the whole answer: its score comes with the last token.",
            _score_on_the_first_token,
        ),
        Mistake(
            "the penalty is k3, which is never negative",
            "§13.5.3 takes the plain log-ratio, k1. It may be negative: then the token earns something.",
            _penalty_by_k3,
        ),
        Mistake(
            "the whole penalty is paid at the end",
            "The sum is the same, but each token has its own price, at its own place.",
            _penalty_at_the_end,
        ),
        Mistake("β is forgotten", "The log-ratio is multiplied with kl_coef.", _coefficient_forgotten),
        Mistake("padding pays too", "What the mask hides is 0 in the result.", _padding_pays),
        Mistake(
            "a number is multiplied with the mask to hide it",
            "0·NaN is NaN. torch.where(mask, penalty, 0.0) does not look at what it hides.",
            _mask_as_a_factor,
        ),
    ),
)


# --- token_entropy


def _entropies(logits: Tensor) -> Tensor:
    probs = logits.softmax(-1)
    return -torch.where(probs > 0, probs * logits.log_softmax(-1), 0.0).sum(-1)


def _chosen(logits: Tensor, response_ids: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(-1, response_ids[..., None]).squeeze(-1)


def _of_the_chosen_token(logits, response_ids, mask):
    logp = _chosen(logits, response_ids)[mask]
    return -(logp.exp() * logp).mean()


def _surprise(logits, response_ids, mask):
    return -_chosen(logits, response_ids)[mask].mean()


def _padding_counted(logits, response_ids, mask):
    return _entropies(logits).mean()


def _divided_by_all_places(logits, response_ids, mask):
    return torch.where(mask, _entropies(logits), 0.0).mean()


def _summed(logits, response_ids, mask):
    return _entropies(logits)[mask].sum()


def _mean_of_answers(logits, response_ids, mask):
    return (torch.where(mask, _entropies(logits), 0.0).sum(-1) / mask.sum(-1)).mean()


def _entropy_times_mask(logits, response_ids, mask):
    entropies = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)
    return (entropies * mask).sum() / mask.sum()


def _forbidden_is_nan(logits, response_ids, mask):
    return -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)[mask].mean()


def _mean_over_the_vocabulary(logits, response_ids, mask):
    return _entropies(logits)[mask].mean() / logits.shape[-1]


PROBS = tensor([0.7, 0.2, 0.1])  # entropy 0.801819
OTHER_PROBS = tensor([0.5, 0.25, 0.25])  # entropy 1.5 ln 2 = 1.039721

TOKEN_ENTROPY = Exercise(
    "token_entropy",
    ("entropy",),
    (
        Case(
            "one token with probabilities 0.7, 0.2, 0.1",
            dict(logits=PROBS.log()[None, None] + 2, response_ids=tensor([[0]]), mask=tensor([[YES]])),
            tensor(0.801819),
        ),
        Case(
            "the same policy, another token was chosen",
            dict(logits=PROBS.log()[None, None], response_ids=tensor([[2]]), mask=tensor([[YES]])),
            tensor(0.801819),
        ),
        Case(
            "two tokens",
            dict(
                logits=torch.stack([PROBS, OTHER_PROBS]).log()[None],
                response_ids=tensor([[1, 0]]),
                mask=tensor([[YES, YES]]),
            ),
            tensor(0.920770),
        ),
        Case(
            "one token and padding",
            dict(
                logits=torch.stack([PROBS, OTHER_PROBS]).log()[None],
                response_ids=tensor([[1, 0]]),
                mask=tensor([[YES, NO]]),
            ),
            tensor(0.801819),
        ),
        Case(
            "answers of one and of two tokens",
            dict(
                logits=torch.stack([PROBS, PROBS, OTHER_PROBS, OTHER_PROBS]).view(2, 2, 3).log(),
                response_ids=tensor([[0, 0], [1, 2]]),
                mask=tensor([[YES, NO], [YES, YES]]),
            ),
            tensor(0.960420),
        ),
        Case(
            "NaN in the padding",
            dict(
                logits=torch.stack([OTHER_PROBS.log(), torch.full((3,), NAN)])[None],
                response_ids=tensor([[1, 0]]),
                mask=tensor([[YES, NO]]),
            ),
            tensor(1.039721),
        ),
        Case(
            "a forbidden token",
            dict(logits=tensor([[[1.0, 1.0, -INF]]]), response_ids=tensor([[1]]), mask=tensor([[YES]])),
            tensor(0.693147),
        ),
    ),
    (
        Mistake(
            "the book's listing is used: −log p·p of the chosen token",
            "That is one of the terms of the entropy. Sum over all tokens of the vocabulary.",
            _of_the_chosen_token,
        ),
        Mistake(
            "the surprise −log p of the chosen token is averaged",
            "Its expectation is the entropy, but one sample depends on luck. All logits are known: sum over them.",
            _surprise,
        ),
        Mistake("padding is counted", "Only tokens with a True in the mask belong to the mean.", _padding_counted),
        Mistake(
            "the sum is divided by all places, padding included",
            "Divide by mask.sum(), the number of tokens that count.",
            _divided_by_all_places,
        ),
        Mistake("the tokens are summed", "The result is the mean over the tokens that count.", _summed),
        Mistake(
            "each answer is averaged first",
            "Then a token of a short answer weighs more. One mean over all tokens of the batch.",
            _mean_of_answers,
        ),
        Mistake(
            "a number is multiplied with the mask to hide it",
            "0·NaN is NaN. Select with entropy[mask], or use torch.where.",
            _entropy_times_mask,
        ),
        Mistake(
            "a forbidden token gives 0·(−∞)",
            "p·log p goes to 0 with p. Put 0 there with torch.where(probs > 0, …, 0.0).",
            _forbidden_is_nan,
        ),
        Mistake(
            "the mean over the vocabulary is taken",
            "The probabilities are the weights already: sum over the vocabulary.",
            _mean_over_the_vocabulary,
        ),
    ),
)


# --- optimal_policy


def _without_the_reference(ref_logp, scores, kl_coef):
    return (scores / kl_coef).log_softmax(-1)


def _beta_as_a_factor(ref_logp, scores, kl_coef):
    return (ref_logp + kl_coef * scores).log_softmax(-1)


def _not_normalised(ref_logp, scores, kl_coef):
    return ref_logp + scores / kl_coef


def _probabilities(ref_logp, scores, kl_coef):
    return (ref_logp + scores / kl_coef).softmax(-1)


def _through_exp(ref_logp, scores, kl_coef):
    weights = ref_logp.exp() * (scores / kl_coef).exp()
    return (weights / weights.sum()).log()


def _best_answer_only(ref_logp, scores, kl_coef):
    best = torch.arange(len(scores)) == torch.where(ref_logp > -INF, scores, -INF).argmax()
    return torch.where(best, 0.0, -INF)


def _probability_in_place_of_its_logarithm(ref_logp, scores, kl_coef):
    return (ref_logp.exp() + scores / kl_coef).log_softmax(-1)


OPTIMAL_POLICY = Exercise(
    "optimal_policy",
    ("log π*",),
    (
        Case(
            "scores 0, β·ln 2 and β·ln 4",
            dict(ref_logp=tensor([0.5, 0.25, 0.25]).log(), scores=tensor([0.0, 0.346574, 0.693147]), kl_coef=0.5),
            tensor([-1.386294, -1.386294, -0.693147]),
        ),
        Case(
            "equal scores",
            dict(ref_logp=tensor([0.7, 0.2, 0.1]).log(), scores=tensor([3.0, 3.0, 3.0]), kl_coef=0.2),
            tensor([-0.356675, -1.609438, -2.302585]),
        ),
        Case(
            "a price above the scores",
            dict(ref_logp=tensor([0.25, 0.75]).log(), scores=tensor([4.394449, 0.0]), kl_coef=4.0),
            tensor([-0.693147, -0.693147]),
        ),
        Case(
            "scores of 300 at β = 0.1",
            dict(ref_logp=tensor([0.5, 0.5]).log(), scores=tensor([300.0, 299.0]), kl_coef=0.1),
            tensor([-0.0000454, -10.0000454]),
        ),
        Case(
            "an answer that the reference cannot give",
            dict(ref_logp=tensor([0.5, 0.5, 0.0]).log(), scores=tensor([0.0, 0.0, 9.0]), kl_coef=1.0),
            tensor([-0.693147, -0.693147, -INF]),
        ),
    ),
    (
        Mistake(
            "the reference is left out",
            "That maximises score and entropy. The KL is measured from π_ref: its logarithm is added.",
            _without_the_reference,
        ),
        Mistake(
            "the scores are multiplied with β",
            "A high price keeps the policy near the reference, so the scores are divided by it.",
            _beta_as_a_factor,
        ),
        Mistake("the result is not normalised", "The probabilities must sum to 1: subtract log Z.", _not_normalised),
        Mistake("probabilities are returned", "The logarithm is asked for: log_softmax, not softmax.", _probabilities),
        Mistake(
            "exp(r/β) is formed",
            "It overflows. Add logarithms and let log_softmax subtract the logarithm of the sum.",
            _through_exp,
        ),
        Mistake(
            "everything is put on the best answer",
            "That is the limit for β → 0. At a finite price the others keep a share.",
            _best_answer_only,
        ),
        Mistake(
            "probabilities of the reference are added in place of their logarithms",
            "log(π_ref·exp(r/β)) = log π_ref + r/β, and ref_logp is log π_ref already.",
            _probability_in_place_of_its_logarithm,
        ),
    ),
)


# --- repair_response_mask


def _by_the_pad_id(response_ids, eos_token_id, pad_token_id):
    return response_ids != pad_token_id


def _n_eos(response_ids: Tensor, eos_token_id: int) -> Tensor:
    """How many EOS lie up to and including each place."""
    return (response_ids == eos_token_id).cumsum(-1)


def _eos_left_out(response_ids, eos_token_id, pad_token_id):
    return _n_eos(response_ids, eos_token_id) == 0


def _up_to_the_last_eos(response_ids, eos_token_id, pad_token_id):
    is_eos = response_ids == eos_token_id
    ahead = is_eos.flip(-1).cumsum(-1).flip(-1)
    return (ahead > 0) | ~is_eos.any(-1, keepdim=True)


def _every_eos_counts(response_ids, eos_token_id, pad_token_id):
    return (response_ids != pad_token_id) | (response_ids == eos_token_id)


def _everything_counts(response_ids, eos_token_id, pad_token_id):
    return torch.ones_like(response_ids, dtype=torch.bool)


def _argmax_without_eos(response_ids, eos_token_id, pad_token_id):
    first = (response_ids == eos_token_id).int().argmax(-1, keepdim=True)
    return torch.arange(response_ids.shape[1]) <= first


def _unfinished_dropped(response_ids, eos_token_id, pad_token_id):
    n_eos = _n_eos(response_ids, eos_token_id)
    before = n_eos - (response_ids == eos_token_id).long()
    return (before == 0) & (n_eos[:, -1:] > 0)


def _one_behind_the_eos(response_ids, eos_token_id, pad_token_id):
    n_before = _n_eos(response_ids, eos_token_id).roll(2, -1)
    n_before[:, :2] = 0
    return n_before == 0


REPAIR_RESPONSE_MASK = Exercise(
    "repair_response_mask",
    ("mask (1 = counts)",),
    (
        Case(
            "padding has an id of its own",
            dict(response_ids=tensor([[5, 6, 2, 0, 0]]), eos_token_id=2, pad_token_id=0),
            tensor([[1, 1, 1, 0, 0]]),
        ),
        Case(
            "padding is done with EOS",
            dict(response_ids=tensor([[5, 6, 2, 2, 2]]), eos_token_id=2, pad_token_id=2),
            tensor([[1, 1, 1, 0, 0]]),
        ),
        Case(
            "cut at the length limit, without EOS",
            dict(response_ids=tensor([[5, 6, 7, 8]]), eos_token_id=2, pad_token_id=2),
            tensor([[1, 1, 1, 1]]),
        ),
        Case(
            "an empty answer: EOS alone",
            dict(response_ids=tensor([[2, 2, 2]]), eos_token_id=2, pad_token_id=2),
            tensor([[1, 0, 0]]),
        ),
        Case(
            "a sampler that went on behind the EOS",
            dict(response_ids=tensor([[5, 2, 7, 2, 8]]), eos_token_id=2, pad_token_id=0),
            tensor([[1, 1, 0, 0, 0]]),
        ),
        Case(
            "a real token with the id of the padding",
            dict(response_ids=tensor([[0, 5, 2, 0]]), eos_token_id=2, pad_token_id=0),
            tensor([[1, 1, 1, 0]]),
        ),
        Case(
            "two answers",
            dict(response_ids=tensor([[5, 1, 1], [6, 7, 8]]), eos_token_id=1, pad_token_id=1),
            tensor([[1, 1, 0], [1, 1, 1]]),
        ),
    ),
    (
        Mistake(
            "the EOS itself is left out",
            "The policy chose to stop there. If that choice is not trained, the model forgets how to stop.",
            _eos_left_out,
        ),
        Mistake(
            "everything up to the last EOS counts",
            "The answer ends with its first EOS. What stands behind it nobody asked for.",
            _up_to_the_last_eos,
        ),
        Mistake(
            "every EOS counts, padding or not",
            "With padding by EOS they look alike. Only the first one was chosen by the policy.",
            _every_eos_counts,
        ),
        Mistake("everything counts", "Behind the first EOS there is nothing to train.", _everything_counts),
        Mistake(
            "an answer without EOS counts for one token only",
            "argmax gives 0 when there is nothing to find. Such an answer was cut by the limit and counts whole.",
            _argmax_without_eos,
        ),
        Mistake(
            "an answer without EOS is dropped",
            "Its tokens were chosen by the policy as well. It counts whole.",
            _unfinished_dropped,
        ),
        Mistake(
            "one token behind the EOS counts too",
            "Ask at each place whether an EOS lies before it.",
            _one_behind_the_eos,
        ),
    ),
    given=_by_the_pad_id,
)

EXERCISES = (RESPONSE_VALUES, TOKEN_REWARDS, TOKEN_ENTROPY, OPTIMAL_POLICY, REPAIR_RESPONSE_MASK)
