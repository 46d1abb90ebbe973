"""Exercises of chapter 7, stability (§13.6). Wrong answers are written as a reader would, without types."""

import math

import torch
from torch import Tensor, tensor

from ppo_lab.exercises.kit import Case, Exercise, Mistake

NO, YES = False, True
NAN = math.nan


# --- whiten_keep_mean


def _scaled(rewards: Tensor, counted: Tensor, correction: int = 1) -> Tensor:
    """Rewards scaled around the mean of the numbers that are counted, by their standard deviation."""
    if len(counted) < 2:
        return rewards
    mean, variance = counted.mean(), counted.var(correction=correction)
    return mean + (rewards - mean) / (variance + 1e-8).sqrt()


def _mean_taken_away(rewards, mask):
    counted = rewards[mask]
    variance = counted.var() if len(counted) > 1 else 0.0
    return torch.where(mask, (rewards - counted.mean()) / (variance + 1e-8) ** 0.5, 0.0)


def _population_spread(rewards, mask):
    return torch.where(mask, _scaled(rewards, rewards[mask], correction=0), 0.0)


def _padding_in_the_moments(rewards, mask):
    return torch.where(mask, _scaled(rewards, rewards.flatten()), 0.0)


def _zeros_in_the_moments(rewards, mask):
    return torch.where(mask, _scaled(rewards, torch.where(mask, rewards, 0.0).flatten()), 0.0)


def _mean_scaled_too(rewards, mask):
    counted = rewards[mask]
    return torch.where(mask, rewards / (counted.var() + 1e-8).sqrt(), 0.0) if len(counted) > 1 else rewards * mask


def _each_answer_alone(rewards, mask):
    rows = [_scaled(row, row[counts]) for row, counts in zip(rewards, mask, strict=True)]
    return torch.where(mask, torch.stack(rows), 0.0)


def _single_number_is_nan(rewards, mask):
    counted = rewards[mask]
    variance = (counted - counted.mean()).square().sum() / (len(counted) - 1)
    return torch.where(mask, counted.mean() + (rewards - counted.mean()) / (variance + 1e-8).sqrt(), 0.0)


def _mask_as_a_factor(rewards, mask):
    return _scaled(rewards, rewards[mask]) * mask


WHITEN_KEEP_MEAN = Exercise(
    "whiten_keep_mean",
    ("whitened",),
    (
        Case(
            "two scores among zeros",
            dict(
                rewards=tensor([[0.0, 0.0, 0.0, 5.0], [0.0, 0.0, 0.0, 3.0]]),
                mask=tensor([[YES, YES, YES, YES], [YES, YES, YES, YES]]),
            ),
            tensor([[0.481125, 0.481125, 0.481125, 3.075498], [0.481125, 0.481125, 0.481125, 2.037749]]),
        ),
        Case(
            "padding that is not 0",
            dict(
                rewards=tensor([[1.0, 3.0, 5.0], [3.0, 8.0, 9.0]]),
                mask=tensor([[YES, YES, YES], [YES, NO, NO]]),
            ),
            tensor([[1.775255, 3.0, 4.224745], [3.0, 0.0, 0.0]]),
        ),
        Case(
            "NaN in the padding",
            dict(
                rewards=tensor([[1.0, 3.0, 5.0], [3.0, NAN, NAN]]),
                mask=tensor([[YES, YES, YES], [YES, NO, NO]]),
            ),
            tensor([[1.775255, 3.0, 4.224745], [3.0, 0.0, 0.0]]),
        ),
        Case(
            "two small rewards",
            dict(rewards=tensor([[0.1, 0.3]]), mask=tensor([[YES, YES]])),
            tensor([[-0.507107, 0.907107]]),
        ),
        Case(
            "no spread",
            dict(rewards=tensor([[2.0, 2.0, 2.0]]), mask=tensor([[YES, YES, YES]])),
            tensor([[2.0, 2.0, 2.0]]),
        ),
        Case(
            "one token that counts",
            dict(rewards=tensor([[4.0, 7.0]]), mask=tensor([[YES, NO]])),
            tensor([[4.0, 0.0]]),
        ),
    ),
    (
        Mistake(
            "the mean is taken away",
            "Then half of all tokens look bad, however good the batch was. Add the mean again after scaling.",
            _mean_taken_away,
        ),
        Mistake(
            "the variance is divided by n",
            "The sample variance divides by n − 1, as Tensor.var() does.",
            _population_spread,
        ),
        Mistake(
            "padding enters the mean and the variance",
            "rewards[mask] holds what counts, and nothing else.",
            _padding_in_the_moments,
        ),
        Mistake(
            "padding enters the mean and the variance as zeros",
            "A hidden place is no reward of 0: it is not there. Use rewards[mask].",
            _zeros_in_the_moments,
        ),
        Mistake(
            "the mean is scaled as well",
            "Only the distance from the mean is divided by the standard deviation.",
            _mean_scaled_too,
        ),
        Mistake(
            "each answer is whitened alone",
            "One mean and one spread for the whole batch: else good and bad answers look the same.",
            _each_answer_alone,
        ),
        Mistake(
            "a single number is not treated",
            "Its sample variance is 0/0. Return it as it is, before the NaN spreads.",
            _single_number_is_nan,
        ),
        Mistake(
            "a number is multiplied with the mask to hide it",
            "0·NaN is NaN. torch.where(mask, whitened, 0.0) does not look at what it hides.",
            _mask_as_a_factor,
        ),
    ),
)


# --- global_token_mean


def _sums(losses: Tensor, mask: Tensor, micro_batch_size: int) -> Tensor:
    """Per micro-batch, the sum over the tokens that count."""
    return _per_micro_batch(torch.where(mask, losses, 0.0).sum(-1), micro_batch_size)


def _per_micro_batch(per_answer: Tensor, micro_batch_size: int) -> Tensor:
    return torch.stack([part.sum() for part in per_answer.split(micro_batch_size)])


def _counts(mask: Tensor, micro_batch_size: int) -> Tensor:
    return _per_micro_batch(mask.sum(-1), micro_batch_size)


def _own_means(losses, mask, micro_batch_size):
    return _sums(losses, mask, micro_batch_size) / _counts(mask, micro_batch_size)


def _mean_of_means(losses, mask, micro_batch_size):
    means = _own_means(losses, mask, micro_batch_size)
    return means / len(means)


def _divided_by_all_places(losses, mask, micro_batch_size):
    return _sums(losses, mask, micro_batch_size) / mask.numel()


def _only_summed(losses, mask, micro_batch_size):
    return _sums(losses, mask, micro_batch_size)


def _mean_of_answers(losses, mask, micro_batch_size):
    per_answer = torch.where(mask, losses, 0.0).sum(-1) / mask.sum(-1)
    return _per_micro_batch(per_answer, micro_batch_size) / len(losses)


def _padding_counted(losses, mask, micro_batch_size):
    return _per_micro_batch(losses.sum(-1), micro_batch_size) / mask.sum()


def _loss_times_mask(losses, mask, micro_batch_size):
    return _per_micro_batch((losses * mask).sum(-1), micro_batch_size) / mask.sum()


GLOBAL_TOKEN_MEAN = Exercise(
    "global_token_mean",
    ("parts",),
    (
        Case(
            "answers of three tokens and of one",
            dict(
                losses=tensor([[1.0, 2.0, 3.0], [4.0, 0.0, 0.0]]),
                mask=tensor([[YES, YES, YES], [YES, NO, NO]]),
                micro_batch_size=1,
            ),
            tensor([1.5, 1.0]),
        ),
        Case(
            "the same answers at once",
            dict(
                losses=tensor([[1.0, 2.0, 3.0], [4.0, 0.0, 0.0]]),
                mask=tensor([[YES, YES, YES], [YES, NO, NO]]),
                micro_batch_size=2,
            ),
            tensor([2.5]),
        ),
        Case(
            "a smaller one at the end",
            dict(
                losses=tensor([[1.0, 3.0], [2.0, 9.0], [5.0, 4.0]]),
                mask=tensor([[YES, YES], [YES, NO], [YES, YES]]),
                micro_batch_size=2,
            ),
            tensor([1.2, 1.8]),
        ),
        Case(
            "answers of one length",
            dict(
                losses=tensor([[1.0, 3.0], [-2.0, 4.0]]),
                mask=tensor([[YES, YES], [YES, YES]]),
                micro_batch_size=1,
            ),
            tensor([1.0, 0.5]),
        ),
        Case(
            "NaN in the padding",
            dict(
                losses=tensor([[1.0, NAN, NAN], [2.0, 6.0, NAN]]),
                mask=tensor([[YES, NO, NO], [YES, YES, NO]]),
                micro_batch_size=1,
            ),
            tensor([0.333333, 2.666667]),
        ),
        Case(
            "a part in which nothing counts",
            dict(
                losses=tensor([[7.0, 7.0], [2.0, 6.0]]),
                mask=tensor([[NO, NO], [YES, YES]]),
                micro_batch_size=1,
            ),
            tensor([0.0, 4.0]),
        ),
    ),
    (
        Mistake(
            "each micro-batch takes its own mean, and the means are added",
            "The sum grows with the number of micro-batches, and with it the step. Divide by the count of all.",
            _own_means,
        ),
        Mistake(
            "the mean of the means is taken",
            "A token in a micro-batch of short answers then weighs more. All parts have one denominator.",
            _mean_of_means,
        ),
        Mistake(
            "the sums are divided by all places, padding included",
            "Divide by mask.sum(): padding would make the step smaller.",
            _divided_by_all_places,
        ),
        Mistake("nothing is divided", "The parts must add up to a mean over the tokens.", _only_summed),
        Mistake(
            "each answer is averaged first",
            "That is another objective: a token of a short answer weighs more than one of a long answer.",
            _mean_of_answers,
        ),
        Mistake("padding is added to the sum", "Hide it first: torch.where(mask, losses, 0.0).", _padding_counted),
        Mistake(
            "a number is multiplied with the mask to hide it",
            "0·NaN is NaN. torch.where(mask, losses, 0.0) does not look at what it hides.",
            _loss_times_mask,
        ),
    ),
)


# --- kl_gradient


def _estimator_itself(logp, ref_logp, kind):
    d = logp - ref_logp
    return {"k1": d, "k2": d.square() / 2, "k3": (-d).exp() - 1 + d}[kind]


def _coefficients(d: Tensor) -> dict[str, Tensor]:
    return {"k1": torch.ones_like(d), "k2": d, "k3": 1 - (-d).exp()}


def _with_respect_to_the_reference(logp, ref_logp, kind):
    return -_coefficients(logp - ref_logp)[kind]


def _wanted_gradient(logp, ref_logp, kind):
    return logp - ref_logp


def _half_forgotten(logp, ref_logp, kind):
    d = logp - ref_logp
    return _coefficients(d)[kind] * (2 if kind == "k2" else 1)


def _inner_derivative_forgotten(logp, ref_logp, kind):
    d = logp - ref_logp
    return (-d).exp() + 1 if kind == "k3" else _coefficients(d)[kind]


def _other_direction(logp, ref_logp, kind):
    d = logp - ref_logp
    return d.exp() - 1 if kind == "k3" else _coefficients(d)[kind]


def _first_order(logp, ref_logp, kind):
    d = logp - ref_logp
    return d if kind == "k3" else _coefficients(d)[kind]


KL_GRADIENT = Exercise(
    "kl_gradient",
    ("c",),
    (
        Case(
            "k1",
            dict(logp=tensor([-1.0, -2.0, -0.5]), ref_logp=tensor([-2.0, -1.5, -0.5]), kind="k1"),
            tensor([1.0, 1.0, 1.0]),
        ),
        Case(
            "k2",
            dict(logp=tensor([-1.0, -2.0, -0.5]), ref_logp=tensor([-2.0, -1.5, -0.5]), kind="k2"),
            tensor([1.0, -0.5, 0.0]),
        ),
        Case(
            "k3",
            dict(logp=tensor([-1.0, -2.0, -0.5]), ref_logp=tensor([-2.0, -1.5, -0.5]), kind="k3"),
            tensor([0.632121, -0.648721, 0.0]),
        ),
        Case(
            "k3, a token that the policy has nearly lost",
            dict(logp=tensor([-5.0]), ref_logp=tensor([-2.0]), kind="k3"),
            tensor([-19.085537]),
        ),
        Case(
            "k2, two answers",
            dict(logp=tensor([[-1.0, -4.0], [0.0, -2.0]]), ref_logp=tensor([[-3.0, -1.0], [-1.0, -2.5]]), kind="k2"),
            tensor([[2.0, -3.0], [1.0, 0.5]]),
        ),
    ),
    (
        Mistake(
            "the estimator itself is returned",
            "Its value is not its gradient. Differentiate with respect to d.",
            _estimator_itself,
        ),
        Mistake(
            "the sign is turned round",
            "d = log π − log π_ref grows with log π, so its derivative is +1.",
            _with_respect_to_the_reference,
        ),
        Mistake(
            "d is returned for every kind",
            "That is the gradient one would like to have. Only one of the three has it.",
            _wanted_gradient,
        ),
        Mistake("the ½ of k2 is forgotten", "The derivative of d²/2 is d.", _half_forgotten),
        Mistake(
            "the inner derivative of exp(−d) is forgotten",
            "d/dd exp(−d) = −exp(−d).",
            _inner_derivative_forgotten,
        ),
        Mistake(
            "k3 is taken the other way round, exp(d) − 1 − d",
            "The samples come from π, so the ratio in k3 is π_ref/π = exp(−d).",
            _other_direction,
        ),
        Mistake(
            "k3 is replaced by its neighbour k2",
            "They agree near d = 0 only. 1 − exp(−d) stays below 1 and has no lower bound.",
            _first_order,
        ),
    ),
)


# --- early_stop


def _steps_below(kls: list[float], stop_kl: float) -> int:
    """How many steps come before the first KL above the limit."""
    return next((i for i, kl in enumerate(kls) if kl > stop_kl), len(kls))


def _offending_step_taken(minibatch_kl, stop_kl):
    kls = minibatch_kl.flatten().tolist()
    return min(_steps_below(kls, stop_kl) + 1, len(kls))


def _only_the_epoch_ends(minibatch_kl, stop_kl):
    return sum(_steps_below(row, stop_kl) for row in minibatch_kl.tolist())


def _only_the_minibatch_skipped(minibatch_kl, stop_kl):
    return int((minibatch_kl <= stop_kl).sum())


def _hidden_factor(minibatch_kl, stop_kl):
    return _steps_below(minibatch_kl.flatten().tolist(), 1.5 * stop_kl)


def _mean_of_the_epoch(minibatch_kl, stop_kl):
    epochs = min(_steps_below(minibatch_kl.mean(-1).tolist(), stop_kl) + 1, len(minibatch_kl))
    return epochs * minibatch_kl.shape[1]


def _stops_at_equality(minibatch_kl, stop_kl):
    return next((i for i, kl in enumerate(minibatch_kl.flatten().tolist()) if kl >= stop_kl), minibatch_kl.numel())


def _nothing_stops_at_zero(minibatch_kl, stop_kl):
    return int((minibatch_kl.flatten() > stop_kl).int().argmax())


EARLY_STOP = Exercise(
    "early_stop",
    ("steps",),
    (
        Case(
            "the second minibatch is too far",
            dict(minibatch_kl=tensor([[0.010, 0.029, 0.010], [0.010, 0.010, 0.012]]), stop_kl=0.02),
            tensor(1),
        ),
        Case(
            "the third is too far, in the first of two epochs",
            dict(minibatch_kl=tensor([[0.010, 0.020, 0.030, 0.001], [0.001, 0.002, 0.001, 0.002]]), stop_kl=0.0225),
            tensor(2),
        ),
        Case(
            "in the second epoch",
            dict(minibatch_kl=tensor([[0.0, 0.01], [0.012, 0.04], [0.01, 0.01]]), stop_kl=0.02),
            tensor(3),
        ),
        Case("nothing is too far", dict(minibatch_kl=tensor([[0.0, 0.01], [0.01, 0.015]]), stop_kl=0.02), tensor(4)),
        Case("the very first", dict(minibatch_kl=tensor([[0.5, 0.01], [0.01, 0.015]]), stop_kl=0.02), tensor(0)),
        Case(
            "exactly at the limit",
            dict(minibatch_kl=tensor([[0.25, 0.5, 0.5], [0.25, 1.0, 0.5]]), stop_kl=0.5),
            tensor(4),
        ),
    ),
    (
        Mistake(
            "the step of the minibatch that is too far is still taken",
            "Its KL is known before its step. Refuse the step, then stop.",
            _offending_step_taken,
        ),
        Mistake(
            "only the epoch is ended",
            "The policy does not come back by itself: the remaining epochs are skipped too.",
            _only_the_epoch_ends,
        ),
        Mistake(
            "only the minibatch is skipped",
            "What comes after the first one that is too far is not trained on at all.",
            _only_the_minibatch_skipped,
        ),
        Mistake(
            "the limit is 1.5 times stop_kl",
            "Some libraries do so without saying it. Here stop_kl is the limit itself.",
            _hidden_factor,
        ),
        Mistake(
            "the mean of each epoch is compared, after the epoch",
            "Then a whole epoch is trained with a policy that is already too far.",
            _mean_of_the_epoch,
        ),
        Mistake("a KL equal to the limit stops", "The update ends when the KL is larger.", _stops_at_equality),
        Mistake(
            "nothing is found, and argmax says 0",
            "When no minibatch is too far, all steps are taken.",
            _nothing_stops_at_zero,
        ),
    ),
)


# --- repair_kl_controller


def _share_without_bound(kl_coef, current_kl, target_kl, n_steps, horizon):
    proportional = (current_kl - target_kl) / target_kl
    proportional = max(-0.2, min(0.2, proportional))
    return kl_coef * (1 + proportional * n_steps / horizon)


def _error(current_kl: float, target_kl: float) -> float:
    return max(-0.2, min(0.2, current_kl / target_kl - 1))


def _cut_off_at_zero(kl_coef, current_kl, target_kl, n_steps, horizon):
    return max(0.0, _share_without_bound(kl_coef, current_kl, target_kl, n_steps, horizon))


def _clip_forgotten(kl_coef, current_kl, target_kl, n_steps, horizon):
    return kl_coef * (1 + (current_kl / target_kl - 1) * min(n_steps / horizon, 1))


def _size_ignored(kl_coef, current_kl, target_kl, n_steps, horizon):
    return kl_coef * (1 + _error(current_kl, target_kl) / horizon)


def _always_a_fifth(kl_coef, current_kl, target_kl, n_steps, horizon):
    return kl_coef * (1 + _error(current_kl, target_kl))


def _once_for_each_answer(kl_coef, current_kl, target_kl, n_steps, horizon):
    return kl_coef * (1 + _error(current_kl, target_kl) / horizon) ** n_steps


def _exponential(kl_coef, current_kl, target_kl, n_steps, horizon):
    return kl_coef * math.exp(_error(current_kl, target_kl) * n_steps / horizon)


def _wrong_direction(kl_coef, current_kl, target_kl, n_steps, horizon):
    return kl_coef * (1 - _error(current_kl, target_kl) * min(n_steps / horizon, 1))


def _difference_in_nats(kl_coef, current_kl, target_kl, n_steps, horizon):
    return kl_coef * (1 + max(-0.2, min(0.2, current_kl - target_kl)) * min(n_steps / horizon, 1))


def _controlled(current_kl: float, n_steps: int, expected: float, name: str, horizon: int = 10) -> Case:
    """A case that starts from β = 0.2 with a target of 6 nats."""
    inputs = dict(kl_coef=0.2, current_kl=current_kl, target_kl=6.0, n_steps=n_steps, horizon=horizon)
    return Case(name, inputs, tensor(expected))


REPAIR_KL_CONTROLLER = Exercise(
    "repair_kl_controller",
    ("β",),
    (
        _controlled(12.0, 1, 0.204, "twice the target, one answer"),
        _controlled(6.3, 5, 0.205, "5 % above the target, half a horizon"),
        _controlled(0.0, 256, 0.16, "a KL of 0 and 256 answers"),
        _controlled(0.0, 50, 0.16, "a KL of 0 and 50 answers"),
        _controlled(60.0, 256, 0.24, "ten times the target and 256 answers"),
        _controlled(6.0, 256, 0.2, "at the target"),
        _controlled(5.4, 60, 0.18, "10 % below the target"),
        _controlled(3.0, 256, 0.198976, "a horizon of 10,000", horizon=10_000),
    ),
    (
        Mistake(
            "β is cut off at 0",
            "A β of 0 stays 0, because every update multiplies it. Bound n_steps/horizon instead.",
            _cut_off_at_zero,
        ),
        Mistake(
            "the error is not clipped",
            "A KL of ten times the target would move β by a factor of 10. Keep the error within ±0.2.",
            _clip_forgotten,
        ),
        Mistake(
            "the size of the rollout is ignored",
            "A rollout of n_steps answers counts for n_steps/horizon, 1 at most.",
            _size_ignored,
        ),
        Mistake(
            "every rollout counts for a whole horizon",
            "min(n_steps/horizon, 1): a rollout shorter than the horizon moves β less.",
            _always_a_fifth,
        ),
        Mistake(
            "the rule is applied once for each answer",
            "β is moved once for each rollout. The factors of 256 answers multiply to almost 0.",
            _once_for_each_answer,
        ),
        Mistake(
            "the exponential is taken",
            "It is never negative, but one long rollout still divides β by 170. Bound n_steps/horizon by 1.",
            _exponential,
        ),
        Mistake(
            "β falls when the KL is too large",
            "A larger β keeps the policy nearer to the reference.",
            _wrong_direction,
        ),
        Mistake(
            "the error is measured in nats",
            "It is relative to the target: (KL − target)/target.",
            _difference_in_nats,
        ),
    ),
    given=_share_without_bound,
)

EXERCISES = (WHITEN_KEEP_MEAN, GLOBAL_TOKEN_MEAN, KL_GRADIENT, EARLY_STOP, REPAIR_KL_CONTROLLER)
