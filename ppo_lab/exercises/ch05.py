"""Exercises of chapter 5, the agent (A07 §5 to §7). Wrong answers are written as a reader would, without types."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, tensor

from ppo_lab.exercises.kit import Case, Exercise, Inputs, Mistake, Unfit, loss_and_gradient

NO, YES = False, True


# --- minibatches


def _one_epoch(function: Callable, inputs: Inputs) -> tuple[Any, ...]:
    """What the minibatches of one epoch must agree in, whatever the order is."""
    n = inputs["n_samples"]
    batches = _index_tensors(function(**inputs))
    order, again = torch.cat(batches), torch.cat(_index_tensors(function(**inputs)))
    if int(order.min()) < 0 or int(order.max()) >= n:
        raise Unfit(f"the indices must lie between 0 and {n - 1}, got {int(order.min())} to {int(order.max())}")
    times_used = order.bincount(minlength=n)
    facts = (
        bool((times_used > 0).all()),
        bool((times_used < 2).all()),
        len(batches),
        max(map(len, batches)),
        not bool((order.diff() > 0).all()),
        torch.equal(order, again),
    )
    return tuple(tensor(float(fact)) for fact in facts)


def _index_tensors(batches: Any) -> list[Tensor]:
    batches = list(batches) if isinstance(batches, tuple | list) else []
    if not batches or not all(isinstance(b, Tensor) and b.ndim == 1 and b.dtype == torch.int64 for b in batches):
        raise Unfit("must return a list of one-dimensional index tensors (int64)")
    return batches


def _order(n_samples: int, seed: int) -> Tensor:
    return torch.randperm(n_samples, generator=torch.Generator().manual_seed(seed))


def _with_replacement(n_samples, batch_size, seed):
    generator = torch.Generator().manual_seed(seed)
    return list(torch.randint(n_samples, (n_samples,), generator=generator).split(batch_size))


def _rest_dropped(n_samples, batch_size, seed):
    batches = list(_order(n_samples, seed).split(batch_size))
    return batches[: max(n_samples // batch_size, 1)]


def _not_shuffled(n_samples, batch_size, seed):
    return list(torch.arange(n_samples).split(batch_size))


def _seed_ignored(n_samples, batch_size, seed):
    return list(torch.randperm(n_samples).split(batch_size))


def _new_order_for_each_batch(n_samples, batch_size, seed):
    generator = torch.Generator().manual_seed(seed)
    starts = range(0, n_samples, batch_size)
    return [torch.randperm(n_samples, generator=generator)[: min(batch_size, n_samples - i)] for i in starts]


def _epoch(n_batches: int, largest: int) -> tuple[Tensor, ...]:
    return tuple(tensor(float(fact)) for fact in (YES, YES, n_batches, largest, YES, YES))


MINIBATCHES = Exercise(
    "minibatches",
    (
        "every index is there (1 = yes)",
        "no index stands twice (1 = yes)",
        "number of batches",
        "size of the largest batch",
        "order is new (1 = yes)",
        "same seed, same order (1 = yes)",
    ),
    (
        Case("the batch size divides the samples", dict(n_samples=12, batch_size=4, seed=0), _epoch(3, 4)),
        Case("a short batch at the end", dict(n_samples=10, batch_size=4, seed=1), _epoch(3, 4)),
        Case("batches of one", dict(n_samples=9, batch_size=1, seed=2), _epoch(9, 1)),
        Case("one batch larger than the rollout", dict(n_samples=10, batch_size=64, seed=3), _epoch(1, 10)),
        Case("a thousand samples", dict(n_samples=1000, batch_size=64, seed=4), _epoch(16, 64)),
    ),
    (
        Mistake(
            "indices are drawn with replacement, or from one short list",
            "Some samples are used twice and others never. Shuffle once: torch.randperm.",
            _with_replacement,
        ),
        Mistake(
            "the short batch at the end is dropped",
            "Every sample was paid for with a step in the world: keep the rest as a smaller batch.",
            _rest_dropped,
        ),
        Mistake(
            "the samples are not shuffled",
            "Neighbouring steps resemble each other. Cut up a random order, torch.randperm(n_samples, …).",
            _not_shuffled,
        ),
        Mistake(
            "the seed has no effect",
            "Give torch.randperm a torch.Generator() with manual_seed(seed).",
            _seed_ignored,
        ),
        Mistake(
            "each batch is drawn from a new order",
            "Within one epoch there is one order; the batches are its pieces.",
            _new_order_for_each_batch,
        ),
    ),
    measure=_one_epoch,
)


# --- whiten


def _population_spread(x):
    return (x - x.mean()) / (x.var(correction=0) + 1e-8).sqrt()


def _unguarded(x):
    centred = x - x.mean()
    return centred / ((centred.square().sum() / (len(x) - 1)).sqrt() + 1e-8)


def _no_shift(x):
    return x / (x.var(correction=min(1, len(x) - 1)) + 1e-8).sqrt()


def _divided_by_the_variance(x):
    return (x - x.mean()) / (x.var(correction=min(1, len(x) - 1)) + 1e-8)


def _one_number_kept(x):
    return x.clone() if len(x) < 2 else (x - x.mean()) / (x.var() + 1e-8).sqrt()


def _no_eps(x):
    return (x - x.mean()) / x.std(correction=min(1, len(x) - 1))


WHITEN = Exercise(
    "whiten",
    ("whitened",),
    (
        Case("1, 2, 3, 4", dict(x=tensor([1.0, 2.0, 3.0, 4.0])), tensor([-1.161895, -0.387298, 0.387298, 1.161895])),
        Case("two numbers", dict(x=tensor([5.0, -5.0])), tensor([0.707107, -0.707107])),
        Case("a small spread", dict(x=tensor([0.1, 0.2, 0.3])), tensor([-1.0, 0.0, 1.0])),
        Case("no spread", dict(x=tensor([2.0, 2.0, 2.0])), tensor([0.0, 0.0, 0.0])),
        Case("one number", dict(x=tensor([3.0])), tensor([0.0])),
        Case(
            "small numbers far from 0",
            dict(x=tensor([1001.0, 1002.0, 1003.0, 1004.0])),
            tensor([-1.161895, -0.387298, 0.387298, 1.161895]),
        ),
    ),
    (
        Mistake(
            "the variance is divided by n",
            "The sample variance divides by n − 1. With a minibatch of two that is a factor of 1.41.",
            _population_spread,
        ),
        Mistake(
            "the minibatch of one is not treated",
            "The spread of one number is 0/0. Return 0 for it, before the NaN reaches the weights.",
            _unguarded,
        ),
        Mistake("the mean is not subtracted", "First shift to mean 0, then scale.", _no_shift),
        Mistake(
            "the numbers are divided by the variance",
            "Divide by its root, the standard deviation.",
            _divided_by_the_variance,
        ),
        Mistake(
            "one number is returned as it is",
            "Whitened numbers have mean 0, and this one is alone: 0.",
            _one_number_kept,
        ),
        Mistake(
            "0 is divided by 0",
            "Numbers without spread give 0/0 unless a small number is added to the variance.",
            _no_eps,
        ),
    ),
)


# --- explained_variance


def _share(values: Tensor, returns: Tensor) -> Tensor:
    return 1 - (returns - values).var() / returns.var()


def _squared_error(values, returns):
    share = 1 - (returns - values).square().mean() / returns.var(correction=0)
    return torch.where(returns.var() > 0, share, torch.nan)


def _variance_of_the_values(values, returns):
    return values.var() / returns.var()


def _squared_correlation(values, returns):
    centred = (values - values.mean()) * (returns - returns.mean())
    return centred.mean() ** 2 / (values.var(correction=0) * returns.var(correction=0))


def _relative_to_the_values(values, returns):
    share = 1 - (returns - values).var() / values.var()
    return torch.where(returns.var() > 0, share, torch.nan)


def _no_guard(values, returns):
    return _share(values, returns)


def _unexplained(values, returns):
    return torch.where(returns.var() > 0, 1 - _share(values, returns), torch.nan)


def _never_negative(values, returns):
    return torch.where(returns.var() > 0, _share(values, returns).clamp(min=0), torch.nan)


EXPLAINED_VARIANCE = Exercise(
    "explained_variance",
    ("share",),
    (
        Case("a perfect critic", dict(values=tensor([0.1, 0.2, 0.4]), returns=tensor([0.1, 0.2, 0.4])), tensor(1.0)),
        Case("a constant critic", dict(values=tensor([7.0, 7.0, 7.0]), returns=tensor([1.0, 2.0, 4.0])), tensor(0.0)),
        Case(
            "off by 10 everywhere",
            dict(values=tensor([11.0, 12.0, 14.0]), returns=tensor([1.0, 2.0, 4.0])),
            tensor(1.0),
        ),
        Case(
            "half of each return",
            dict(values=tensor([1.0, 2.0, 3.0, 4.0]), returns=tensor([2.0, 4.0, 6.0, 8.0])),
            tensor(0.75),
        ),
        Case(
            "worse than a constant",
            dict(values=tensor([-1.0, -2.0, -4.0]), returns=tensor([1.0, 2.0, 4.0])),
            tensor(-3.0),
        ),
        Case(
            "returns without spread",
            dict(values=tensor([1.0, 2.0, 3.0]), returns=tensor([5.0, 5.0, 5.0])),
            tensor(math.nan),
        ),
    ),
    (
        Mistake(
            "the mean squared error is used",
            "A constant error would count. Take the variance of the errors.",
            _squared_error,
        ),
        Mistake(
            "the variance of the values is compared with that of the returns",
            "A critic that spreads as widely as the returns may still be wrong. Look at the errors R̂ − V.",
            _variance_of_the_values,
        ),
        Mistake(
            "the squared correlation is returned",
            "A critic with the wrong scale or even the wrong sign would score 1.",
            _squared_correlation,
        ),
        Mistake(
            "the errors are measured against the spread of the values",
            "The spread that is to be explained is that of the returns.",
            _relative_to_the_values,
        ),
        Mistake(
            "a division by 0 is not treated",
            "Returns without spread leave nothing to explain: return NaN, not −∞.",
            _no_guard,
        ),
        Mistake("the unexplained share is returned", "The explained share is 1 minus this one.", _unexplained),
        Mistake(
            "negative values are cut off",
            "A critic can be worse than a constant, and one wants to see that.",
            _never_negative,
        ),
    ),
)


# --- repair_entropy


def _of_the_chosen_action(logits, actions):
    logp = logits.log_softmax(-1)
    logp = logp.gather(-1, actions[:, None]).squeeze(-1)
    return -(logp.exp() * logp).mean()


def _entropies(logits: Tensor) -> Tensor:
    return -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)


def _surprise(logits, actions):
    return -logits.log_softmax(-1).gather(-1, actions[:, None]).mean()


def _mean_over_actions(logits, actions):
    return -(logits.softmax(-1) * logits.log_softmax(-1)).mean()


def _summed_over_states(logits, actions):
    return _entropies(logits).sum()


def _negative_entropy(logits, actions):
    return -_entropies(logits).mean()


def _unweighted(logits, actions):
    return -logits.log_softmax(-1).sum(-1).mean()


def _raw_logits(logits, actions):
    return -(logits.softmax(-1) * logits).sum(-1).mean()


REPAIR_ENTROPY = Exercise(
    "repair_entropy",
    ("entropy", "gradient"),
    (
        Case(
            "probabilities 0.7, 0.2, 0.1, the first action was taken",
            dict(logits=tensor([[0.7, 0.2, 0.1]]).log(), actions=tensor([0])),
            (tensor(0.801819), tensor([[-0.311601, 0.161524, 0.150077]])),
        ),
        Case(
            "the same policy, the last action was taken",
            dict(logits=tensor([[0.7, 0.2, 0.1]]).log(), actions=tensor([2])),
            (tensor(0.801819), tensor([[-0.311601, 0.161524, 0.150077]])),
        ),
        Case(
            "four equal actions",
            dict(logits=tensor([[1.0, 1.0, 1.0, 1.0]]), actions=tensor([3])),
            (tensor(1.386294), tensor([[0.0, 0.0, 0.0, 0.0]])),
        ),
        Case(
            "two states",
            dict(logits=tensor([[0.7, 0.2, 0.1], [0.5, 0.25, 0.25]]).log() + 2, actions=tensor([1, 0])),
            (tensor(0.920770), tensor([[-0.155800, 0.080762, 0.075038], [-0.086643, 0.043322, 0.043322]])),
        ),
    ),
    (
        Mistake(
            "the surprise −log π of the taken action is averaged",
            "Its expectation is the entropy, but one sample depends on luck. All actions are known: sum over them.",
            _surprise,
        ),
        Mistake(
            "the mean over the actions is taken",
            "The entropy is a sum over the actions, with their probabilities as weights.",
            _mean_over_actions,
        ),
        Mistake("the states are summed", "The bonus is the mean over the states.", _summed_over_states),
        Mistake(
            "the sign is turned round",
            "log π is never positive, so Σ π·log π is minus the entropy.",
            _negative_entropy,
        ),
        Mistake(
            "the log-probabilities are added without weights",
            "Each log π(a) is weighted with π(a).",
            _unweighted,
        ),
        Mistake(
            "the logits are used as log-probabilities",
            "Shifting all logits changes no policy: log_softmax comes first.",
            _raw_logits,
        ),
    ),
    given=_of_the_chosen_action,
    measure=loss_and_gradient("logits"),
)


# --- repair_time_limit


def _done_in_both_places(rewards, values, next_values, gamma, gae_lambda, terminated, truncated):
    done = (terminated | truncated).float()
    advantages = torch.zeros_like(rewards)
    carry = 0.0
    for t in reversed(range(len(rewards))):
        delta = rewards[t] + gamma * next_values[t] * (1 - done[t]) - values[t]
        carry = delta + gamma * gae_lambda * (1 - done[t]) * carry
        advantages[t] = carry
    return advantages


def _advantages(deltas: Tensor, decay: float, cut: Tensor) -> Tensor:
    result, carry = torch.zeros_like(deltas), 0.0
    for t in reversed(range(len(deltas))):
        carry = deltas[t] + (0.0 if cut[t] else decay * carry)
        result[t] = carry
    return result


def _sum_runs_on(rewards, values, next_values, gamma, gae_lambda, terminated, truncated):
    deltas = rewards + gamma * next_values.masked_fill(terminated, 0.0) - values
    return _advantages(deltas, gamma * gae_lambda, terminated)


def _value_of_the_same_state(rewards, values, next_values, gamma, gae_lambda, terminated, truncated):
    reached = torch.where(truncated, values, next_values).masked_fill(terminated, 0.0)
    return _advantages(rewards + gamma * reached - values, gamma * gae_lambda, terminated | truncated)


def _value_after_the_reset(rewards, values, next_values, gamma, gae_lambda, terminated, truncated):
    reached = torch.cat([values[1:], next_values[-1:]]).masked_fill(terminated, 0.0)
    return _advantages(rewards + gamma * reached - values, gamma * gae_lambda, terminated | truncated)


def _end_bootstraps_too(rewards, values, next_values, gamma, gae_lambda, terminated, truncated):
    return _advantages(rewards + gamma * next_values - values, gamma * gae_lambda, terminated | truncated)


def _truncation_wins(rewards, values, next_values, gamma, gae_lambda, terminated, truncated):
    reached = next_values.masked_fill(terminated & ~truncated, 0.0)
    return _advantages(rewards + gamma * reached - values, gamma * gae_lambda, terminated | truncated)


def _no_flags(rewards, values, next_values, gamma, gae_lambda, terminated, truncated):
    return _advantages(rewards + gamma * next_values - values, gamma * gae_lambda, torch.zeros_like(terminated))


REPAIR_TIME_LIMIT = Exercise(
    "repair_time_limit",
    ("advantages",),
    (
        Case(
            "the pole falls at the last step",
            dict(
                rewards=tensor([0.0, 0.0, 1.0]),
                values=tensor([0.1, 0.2, 0.3]),
                next_values=tensor([0.2, 0.3, 9.0]),
                gamma=0.9,
                gae_lambda=0.8,
                terminated=tensor([NO, NO, YES]),
                truncated=tensor([NO, NO, NO]),
            ),
            tensor([0.49328, 0.574, 0.7]),
        ),
        Case(
            "a perfect policy at the time limit",
            dict(
                rewards=tensor([1.0, 1.0]),
                values=tensor([100.0, 100.0]),
                next_values=tensor([100.0, 100.0]),
                gamma=0.99,
                gae_lambda=0.95,
                terminated=tensor([NO, NO]),
                truncated=tensor([NO, YES]),
            ),
            tensor([0.0, 0.0]),
        ),
        Case(
            "time limit, then another episode",
            dict(
                rewards=tensor([1.0, 1.0, 1.0, 1.0]),
                values=tensor([10.0, 10.0, 10.0, 50.0]),
                next_values=tensor([10.0, 10.0, 10.0, 50.0]),
                gamma=0.99,
                gae_lambda=0.95,
                terminated=tensor([NO, NO, NO, NO]),
                truncated=tensor([NO, NO, YES, NO]),
            ),
            tensor([2.542536, 1.746450, 0.9, 0.5]),
        ),
        Case(
            "the value rises at the time limit",
            dict(
                rewards=tensor([1.0, 1.0]),
                values=tensor([0.5, 0.5]),
                next_values=tensor([0.5, 2.0]),
                gamma=0.9,
                gae_lambda=0.8,
                terminated=tensor([NO, NO]),
                truncated=tensor([NO, YES]),
            ),
            tensor([2.606, 2.3]),
        ),
        Case(
            "the pole falls in the very last step allowed",
            dict(
                rewards=tensor([1.0, 1.0]),
                values=tensor([0.5, 0.5]),
                next_values=tensor([0.5, 2.0]),
                gamma=0.9,
                gae_lambda=0.8,
                terminated=tensor([NO, YES]),
                truncated=tensor([NO, YES]),
            ),
            tensor([1.31, 0.5]),
        ),
    ),
    (
        Mistake(
            "the sum runs on over a time limit",
            "After a reset the next step belongs to another episode: both flags cut the sum.",
            _sum_runs_on,
        ),
        Mistake(
            "the value of the state before the step is used at the time limit",
            "next_values[t] holds the value of the state that step t reached.",
            _value_of_the_same_state,
        ),
        Mistake(
            "values[t + 1] is taken for the next value",
            "After the reset that is the first state of the next episode. Use next_values[t].",
            _value_after_the_reset,
        ),
        Mistake(
            "a value is added behind a terminated step too",
            "When the pole has fallen nothing follows: there the next value counts as 0.",
            _end_bootstraps_too,
        ),
        Mistake(
            "the time limit wins when both flags are set",
            "A pole that has fallen has fallen, on whatever step: terminated wins.",
            _truncation_wins,
        ),
        Mistake(
            "both flags are ignored", "Only one use of done was wrong, and it needs terminated instead.", _no_flags
        ),
    ),
    given=_done_in_both_places,
)

EXERCISES = (MINIBATCHES, WHITEN, EXPLAINED_VARIANCE, REPAIR_ENTROPY, REPAIR_TIME_LIMIT)
