"""Exercises of chapter 4, advantage estimation (§13.4). Wrong answers are written as a reader would, without types."""

import math

import torch
from torch import Tensor, tensor

from ppo_lab.exercises.kit import Case, Exercise, Mistake

NO, YES = False, True


# --- td_residual


def _residual(rewards: Tensor, values: Tensor, next_values: Tensor, gamma: float, dead: Tensor) -> Tensor:
    return rewards + gamma * next_values.masked_fill(dead, 0.0) - values


def _value_behind_the_end(rewards, values, next_values, gamma, terminated):
    return rewards + gamma * next_values - values


def _flag_of_the_next_step(rewards, values, next_values, gamma, terminated):
    return _residual(rewards, values, next_values, gamma, terminated.roll(-1, -1))


def _without_discount(rewards, values, next_values, gamma, terminated):
    return _residual(rewards, values, next_values, 1.0, terminated)


def _target_only(rewards, values, next_values, gamma, terminated):
    return _residual(rewards, torch.zeros_like(values), next_values, gamma, terminated)


def _negative_residual(rewards, values, next_values, gamma, terminated):
    return -_residual(rewards, values, next_values, gamma, terminated)


def _values_shifted(rewards, values, next_values, gamma, terminated):
    return _residual(rewards, values, _shifted(values, next_values), gamma, terminated)


def _multiplied_flag(rewards, values, next_values, gamma, terminated):
    return rewards + gamma * next_values * (1 - terminated.float()) - values


def _shifted(values: Tensor, next_values: Tensor) -> Tensor:
    """values[t + 1] in place of next_values[t]."""
    return torch.cat([values[..., 1:], next_values[..., -1:]], -1)


TD_RESIDUAL = Exercise(
    "td_residual",
    ("δ",),
    (
        Case(
            "no end",
            dict(
                rewards=tensor([1.0, 1.0, 2.0]),
                values=tensor([3.0, 2.0, 1.0]),
                next_values=tensor([2.0, 1.0, 5.0]),
                gamma=0.5,
                terminated=tensor([NO, NO, NO]),
            ),
            tensor([-1.0, -0.5, 3.5]),
        ),
        Case(
            "the last step ends the episode",
            dict(
                rewards=tensor([1.0, 1.0, 2.0]),
                values=tensor([3.0, 2.0, 1.0]),
                next_values=tensor([2.0, 1.0, 5.0]),
                gamma=0.5,
                terminated=tensor([NO, NO, YES]),
            ),
            tensor([-1.0, -0.5, 1.0]),
        ),
        Case(
            "an end in the middle, another world begins",
            dict(
                rewards=tensor([1.0, 0.0, 1.0]),
                values=tensor([2.0, 1.0, 4.0]),
                next_values=tensor([1.0, 7.0, 3.0]),
                gamma=0.5,
                terminated=tensor([NO, YES, NO]),
            ),
            tensor([-0.5, -1.0, -1.5]),
        ),
        Case(
            "a value that is not that of the next stored state",
            dict(
                rewards=tensor([1.0, 1.0]),
                values=tensor([0.5, 7.0]),
                next_values=tensor([2.0, 6.0]),
                gamma=0.9,
                terminated=tensor([NO, NO]),
            ),
            tensor([2.3, -0.6]),
        ),
        Case(
            "NaN behind the end",
            dict(
                rewards=tensor([1.0, 2.0]),
                values=tensor([3.0, 1.0]),
                next_values=tensor([1.0, math.nan]),
                gamma=1.0,
                terminated=tensor([NO, YES]),
            ),
            tensor([-1.0, 1.0]),
        ),
        Case(
            "two environments",
            dict(
                rewards=tensor([[1.0, 0.0], [0.0, 2.0]]),
                values=tensor([[1.0, 1.0], [2.0, 2.0]]),
                next_values=tensor([[1.0, 1.0], [2.0, 2.0]]),
                gamma=0.5,
                terminated=tensor([[NO, YES], [NO, NO]]),
            ),
            tensor([[0.5, -1.0], [-1.0, 1.0]]),
        ),
    ),
    (
        Mistake(
            "the value behind the end of the episode is still added",
            "Where terminated is True, nothing follows: the next value counts as 0.",
            _value_behind_the_end,
        ),
        Mistake(
            "the flag of the next step is used",
            "terminated[..., t] says that step t ended the episode: it belongs to the residual of step t.",
            _flag_of_the_next_step,
        ),
        Mistake("the discount is missing", "The next value is multiplied by γ.", _without_discount),
        Mistake(
            "the value of the state itself is not subtracted",
            "r + γ·V(s') is the target. The residual is the target minus V(s).",
            _target_only,
        ),
        Mistake(
            "the sign is turned round",
            "A step that went better than the critic expected has a positive residual.",
            _negative_residual,
        ),
        Mistake(
            "values[t + 1] is taken for the next value",
            "After a reset the next stored state belongs to another episode. That is what next_values is for.",
            _values_shifted,
        ),
        Mistake(
            "the next value is multiplied by 1 − terminated",
            "0 times NaN is NaN. next_values.masked_fill(terminated, 0.0) does not look at what it replaces.",
            _multiplied_flag,
        ),
    ),
)


# --- n_step_advantage


def _n_steps(
    rewards: Tensor, values: Tensor, next_values: Tensor, n: int, gamma: float, *, edge_value: bool = True
) -> Tensor:
    """The literal sum; without edge_value nothing follows where fewer than n steps are left."""
    length, result = len(rewards), torch.zeros_like(rewards)
    for t in range(length):
        m = min(n, length - t)
        bootstrap = next_values[t + m - 1] if edge_value or m == n else 0.0
        result[t] = sum(gamma**k * rewards[t + k] for k in range(m)) + gamma**m * bootstrap - values[t]
    return result


def _nothing_behind_the_edge(rewards, values, next_values, n, gamma):
    return _n_steps(rewards, values, next_values, n, gamma, edge_value=False)


def _one_step_more(rewards, values, next_values, n, gamma):
    return _n_steps(rewards, values, next_values, n + 1, gamma)


def _undiscounted_bootstrap(rewards, values, next_values, n, gamma):
    result = _n_steps(rewards, values, next_values, n, gamma)
    for t in range(len(rewards)):
        m = min(n, len(rewards) - t)
        result[t] += (1 - gamma**m) * next_values[t + m - 1]
    return result


def _discounted_by_n_at_the_edge(rewards, values, next_values, n, gamma):
    result = _n_steps(rewards, values, next_values, n, gamma)
    for t in range(len(rewards)):
        m = min(n, len(rewards) - t)
        result[t] += (gamma**n - gamma**m) * next_values[t + m - 1]
    return result


def _return_not_advantage(rewards, values, next_values, n, gamma):
    return _n_steps(rewards, values, next_values, n, gamma) + values


def _n_rewards_and_no_value(rewards, values, next_values, n, gamma):
    return _n_steps(rewards, values, torch.zeros_like(next_values), n, gamma)


_ROW = dict(
    rewards=tensor([1.0, 2.0, 3.0, 4.0]),
    values=tensor([10.0, 20.0, 30.0, 40.0]),
    next_values=tensor([20.0, 30.0, 40.0, 50.0]),
)

N_STEP_ADVANTAGE = Exercise(
    "n_step_advantage",
    ("advantages",),
    (
        Case("one step", _ROW | dict(n=1, gamma=0.5), tensor([1.0, -3.0, -7.0, -11.0])),
        Case("two steps", _ROW | dict(n=2, gamma=0.5), tensor([-0.5, -6.5, -12.5, -11.0])),
        Case("all four steps", _ROW | dict(n=4, gamma=0.5), tensor([-3.625, -9.25, -12.5, -11.0])),
        Case("more steps than there are", _ROW | dict(n=10, gamma=0.5), tensor([-3.625, -9.25, -12.5, -11.0])),
        Case("three steps without discount", _ROW | dict(n=3, gamma=1.0), tensor([36.0, 39.0, 27.0, 14.0])),
    ),
    (
        Mistake(
            "nothing follows where fewer than n steps are left",
            "The piece ends there, the episode does not: take the value after the last step there is.",
            _nothing_behind_the_edge,
        ),
        Mistake("one step too many is taken", "n rewards: l runs from 0 to n − 1.", _one_step_more),
        Mistake(
            "the value at the end is not discounted",
            "It lies m steps ahead and is multiplied by γ to the power m.",
            _undiscounted_bootstrap,
        ),
        Mistake(
            "the value is discounted by n steps even where fewer were taken",
            "Count the rewards that were really summed: the exponent is that number.",
            _discounted_by_n_at_the_edge,
        ),
        Mistake("the value of the state itself is not subtracted", "That is the n-step return.", _return_not_advantage),
        Mistake(
            "the value after the n rewards is missing",
            "The sum of n rewards alone forgets everything that comes later.",
            _n_rewards_and_no_value,
        ),
    ),
)


# --- gae


def _gae(
    rewards: Tensor, values: Tensor, next_values: Tensor, gamma: float, decay: float, dead: Tensor, cut: Tensor
) -> tuple[Tensor, Tensor]:
    """Nothing follows where `dead`, the sum is cut where `cut`."""
    deltas = _residual(rewards, values, next_values, gamma, dead)
    advantages, following = torch.zeros_like(deltas), torch.zeros_like(deltas[..., 0])
    for t in reversed(range(rewards.shape[-1])):
        following = deltas[..., t] + decay * following.masked_fill(cut[..., t], 0.0)
        advantages[..., t] = following
    return advantages, advantages + values


def _flags_ignored(rewards, values, next_values, gamma, gae_lambda, terminated, truncated):
    never = torch.zeros_like(terminated)
    return _gae(rewards, values, next_values, gamma, gamma * gae_lambda, never, never)


def _flags_of_the_next_step(rewards, values, next_values, gamma, gae_lambda, terminated, truncated):
    dead, cut = terminated.roll(-1, -1), (terminated | truncated).roll(-1, -1)
    return _gae(rewards, values, next_values, gamma, gamma * gae_lambda, dead, cut)


def _bootstrapped_at_the_end(rewards, values, next_values, gamma, gae_lambda, terminated, truncated):
    cut = terminated | truncated
    return _gae(rewards, values, next_values, gamma, gamma * gae_lambda, torch.zeros_like(cut), cut)


def _time_limit_is_death(rewards, values, next_values, gamma, gae_lambda, terminated, truncated):
    done = terminated | truncated
    return _gae(rewards, values, next_values, gamma, gamma * gae_lambda, done, done)


def _not_cut_at_the_time_limit(rewards, values, next_values, gamma, gae_lambda, terminated, truncated):
    return _gae(rewards, values, next_values, gamma, gamma * gae_lambda, terminated, terminated)


def _value_after_the_reset(rewards, values, next_values, gamma, gae_lambda, terminated, truncated):
    cut = terminated | truncated
    return _gae(rewards, values, _shifted(values, next_values), gamma, gamma * gae_lambda, terminated, cut)


def _carry_masked_twice(rewards, values, next_values, gamma, gae_lambda, terminated, truncated):
    cut = terminated | truncated
    cut_twice = cut | cut.roll(-1, -1)
    return _gae(rewards, values, next_values, gamma, gamma * gae_lambda, terminated, cut_twice)


def _returns_without_values(rewards, values, next_values, gamma, gae_lambda, terminated, truncated):
    cut = terminated | truncated
    advantages, _ = _gae(rewards, values, next_values, gamma, gamma * gae_lambda, terminated, cut)
    return advantages, advantages.clone()


def _gamma_missing_in_the_sum(rewards, values, next_values, gamma, gae_lambda, terminated, truncated):
    return _gae(rewards, values, next_values, gamma, gae_lambda, terminated, terminated | truncated)


def _lambda_missing(rewards, values, next_values, gamma, gae_lambda, terminated, truncated):
    return _gae(rewards, values, next_values, gamma, gamma, terminated, terminated | truncated)


def _reward_minus_value(rewards, values, next_values, gamma, gae_lambda, terminated, truncated):
    nothing, cut = torch.zeros_like(next_values), terminated | truncated
    return _gae(rewards, values, nothing, gamma, gamma * gae_lambda, terminated, cut)


def _first_axis(rewards, values, next_values, gamma, gae_lambda, terminated, truncated):
    tensors = (rewards, values, next_values, terminated, terminated | truncated)
    if rewards.ndim > 1:
        tensors = tuple(x.mT for x in tensors)
    *numbers, dead, cut = tensors
    advantages, returns = _gae(*numbers, gamma, gamma * gae_lambda, dead, cut)
    return (advantages.mT, returns.mT) if rewards.ndim > 1 else (advantages, returns)


GAE = Exercise(
    "gae",
    ("advantages", "returns"),
    (
        Case(
            "no end",
            dict(
                rewards=tensor([1.0, 1.0, 1.0]),
                values=tensor([0.5, 0.4, 0.3]),
                next_values=tensor([0.4, 0.3, 0.2]),
                gamma=0.9,
                gae_lambda=0.8,
                terminated=tensor([NO, NO, NO]),
                truncated=tensor([NO, NO, NO]),
            ),
            (tensor([1.942592, 1.5036, 0.88]), tensor([2.442592, 1.9036, 1.18])),
        ),
        Case(
            "terminated in the middle",
            dict(
                rewards=tensor([1.0, 1.0, 1.0]),
                values=tensor([0.5, 0.4, 0.3]),
                next_values=tensor([0.4, 0.3, 0.2]),
                gamma=0.9,
                gae_lambda=0.8,
                terminated=tensor([NO, YES, NO]),
                truncated=tensor([NO, NO, NO]),
            ),
            (tensor([1.292, 0.6, 0.88]), tensor([1.792, 1.0, 1.18])),
        ),
        Case(
            "terminated at the last step",
            dict(
                rewards=tensor([0.0, 0.0, 1.0]),
                values=tensor([0.1, 0.2, 0.3]),
                next_values=tensor([0.2, 0.3, 9.0]),
                gamma=0.9,
                gae_lambda=0.8,
                terminated=tensor([NO, NO, YES]),
                truncated=tensor([NO, NO, NO]),
            ),
            (tensor([0.49328, 0.574, 0.7]), tensor([0.59328, 0.774, 1.0])),
        ),
        Case(
            "truncated, then another episode",
            dict(
                rewards=tensor([1.0, 1.0, 1.0]),
                values=tensor([0.5, 0.5, 7.0]),
                next_values=tensor([0.5, 2.0, 6.0]),
                gamma=0.9,
                gae_lambda=0.8,
                terminated=tensor([NO, NO, NO]),
                truncated=tensor([NO, YES, NO]),
            ),
            (tensor([2.606, 2.3, -0.6]), tensor([3.106, 2.8, 6.4])),
        ),
        Case(
            "terminated and truncated at once",
            dict(
                rewards=tensor([1.0, 1.0]),
                values=tensor([0.5, 0.5]),
                next_values=tensor([0.5, 2.0]),
                gamma=0.9,
                gae_lambda=0.8,
                terminated=tensor([NO, YES]),
                truncated=tensor([NO, YES]),
            ),
            (tensor([1.31, 0.5]), tensor([1.81, 1.0])),
        ),
        Case(
            "one reward at the end, γ = λ = 1",
            dict(
                rewards=tensor([0.0, 0.0, 1.0]),
                values=tensor([0.2, 0.3, 0.4]),
                next_values=tensor([0.3, 0.4, 0.0]),
                gamma=1.0,
                gae_lambda=1.0,
                terminated=tensor([NO, NO, YES]),
                truncated=tensor([NO, NO, NO]),
            ),
            (tensor([0.8, 0.7, 0.6]), tensor([1.0, 1.0, 1.0])),
        ),
        Case(
            "two environments, one of them truncated",
            dict(
                rewards=tensor([[1.0, 1.0], [1.0, 1.0]]),
                values=tensor([[0.5, 0.5], [0.5, 0.5]]),
                next_values=tensor([[0.5, 2.0], [0.5, 0.7]]),
                gamma=0.9,
                gae_lambda=0.8,
                terminated=tensor([[NO, NO], [NO, NO]]),
                truncated=tensor([[NO, YES], [NO, NO]]),
            ),
            (tensor([[2.606, 2.3], [1.7636, 1.13]]), tensor([[3.106, 2.8], [2.2636, 1.63]])),
        ),
    ),
    (
        Mistake(
            "the ends of episodes are ignored",
            "The flags act in two places: terminated removes the next value, both flags cut the sum.",
            _flags_ignored,
        ),
        Mistake(
            "the flags of the next step are used",
            "terminated[..., t] says that step t ended the episode. It belongs to step t.",
            _flags_of_the_next_step,
        ),
        Mistake(
            "the value behind a terminated step is still added",
            "The sum is cut there, which is right. But nothing follows: in δ the next value counts as 0.",
            _bootstrapped_at_the_end,
        ),
        Mistake(
            "a time limit counts as death",
            "At a truncated step the world goes on: δ keeps γ·next_values[..., t]; only the sum is cut.",
            _time_limit_is_death,
        ),
        Mistake(
            "the λ-sum is not cut at a truncation",
            "The step after a truncated one belongs to another episode.",
            _not_cut_at_the_time_limit,
        ),
        Mistake(
            "values[t + 1] is taken for the next value",
            "After a reset the next stored state belongs to another episode. Use next_values.",
            _value_after_the_reset,
        ),
        Mistake(
            "an advantage is masked on its way to the step before it",
            "The flag of step t cuts what comes from t + 1. The advantage of step t itself has to reach step t − 1.",
            _carry_masked_twice,
        ),
        Mistake(
            "the values are not added to the returns", "Returns are advantages plus values.", _returns_without_values
        ),
        Mistake(
            "γ is missing in the sum", "One step back costs the factor γλ, not λ alone.", _gamma_missing_in_the_sum
        ),
        Mistake("λ is missing in the sum", "One step back costs the factor γλ, not γ alone.", _lambda_missing),
        Mistake(
            "the reward minus the value is used for δ",
            "δ also holds γ times the value of the next state.",
            _reward_minus_value,
        ),
        Mistake(
            "the first axis is taken for time",
            "Time is the last axis: rewards[..., t] is step t of every row.",
            _first_axis,
        ),
    ),
)


# --- lambda_weights


def _powers(gae_lambda: float, n_left: int) -> Tensor:
    return gae_lambda ** torch.arange(n_left, dtype=torch.float32)


def _infinite_horizon(gae_lambda, n_left):
    return (1 - gae_lambda) * _powers(gae_lambda, n_left)


def _rescaled(gae_lambda, n_left):
    weights = _powers(gae_lambda, n_left)
    return weights / weights.sum()


def _tail_one_power_too_high(gae_lambda, n_left):
    return torch.cat([_infinite_horizon(gae_lambda, n_left)[:-1], tensor([gae_lambda**n_left])])


def _powers_only(gae_lambda, n_left):
    return _powers(gae_lambda, n_left)


def _powers_from_one(gae_lambda, n_left):
    return torch.cat([(1 - gae_lambda) * gae_lambda * _powers(gae_lambda, n_left - 1), tensor([gae_lambda**n_left])])


LAMBDA_WEIGHTS = Exercise(
    "lambda_weights",
    ("weights",),
    (
        Case("λ = 0.5, three steps left", dict(gae_lambda=0.5, n_left=3), tensor([0.5, 0.25, 0.25])),
        Case("one step left", dict(gae_lambda=0.95, n_left=1), tensor([1.0])),
        Case("λ = 0.9, three steps left", dict(gae_lambda=0.9, n_left=3), tensor([0.1, 0.09, 0.81])),
        Case("λ = 1", dict(gae_lambda=1.0, n_left=4), tensor([0.0, 0.0, 0.0, 1.0])),
        Case("λ = 0", dict(gae_lambda=0.0, n_left=3), tensor([1.0, 0.0, 0.0])),
    ),
    (
        Mistake(
            "the weights of an endless episode are used",
            "They do not add up to 1 here: all that is missing belongs to the last estimate.",
            _infinite_horizon,
        ),
        Mistake(
            "the weights are rescaled to the sum 1",
            "The missing weight is not spread out. It belongs to the estimates with n ≥ N, which are all the last one.",
            _rescaled,
        ),
        Mistake(
            "the last weight has one power too many",
            "Σ over n ≥ N of (1 − λ)·λ^(n−1) is λ^(N−1).",
            _tail_one_power_too_high,
        ),
        Mistake("the factor 1 − λ is missing", "The weights are to add up to 1.", _powers_only),
        Mistake("the powers begin at 1", "The one-step estimate has the weight 1 − λ.", _powers_from_one),
    ),
)


# --- repair_gae


def _masked_twice(rewards, values, next_values, gamma, gae_lambda, terminated):
    advantages = torch.zeros_like(rewards)
    carry = 0.0
    for t in reversed(range(len(rewards))):
        goes_on = 1.0 - terminated[t].float()
        delta = rewards[t] + gamma * next_values[t] * goes_on - values[t]
        advantages[t] = delta + gamma * gae_lambda * goes_on * carry
        carry = advantages[t] * goes_on
    return advantages


def _never_masked(rewards, values, next_values, gamma, gae_lambda, terminated):
    return _gae(rewards, values, next_values, gamma, gamma * gae_lambda, terminated, torch.zeros_like(terminated))[0]


def _wrong_mask_kept(rewards, values, next_values, gamma, gae_lambda, terminated):
    cut = terminated.roll(-1, -1)
    return _gae(rewards, values, next_values, gamma, gamma * gae_lambda, terminated, cut)[0]


def _end_still_bootstraps(rewards, values, next_values, gamma, gae_lambda, terminated):
    return _gae(rewards, values, next_values, gamma, gamma * gae_lambda, torch.zeros_like(terminated), terminated)[0]


def _later_flag_everywhere(rewards, values, next_values, gamma, gae_lambda, terminated):
    later = torch.cat([terminated[1:], torch.zeros_like(terminated[:1])])
    return _gae(rewards, values, next_values, gamma, gamma * gae_lambda, later, later)[0]


def _no_flag_at_all(rewards, values, next_values, gamma, gae_lambda, terminated):
    never = torch.zeros_like(terminated)
    return _gae(rewards, values, next_values, gamma, gamma * gae_lambda, never, never)[0]


REPAIR_GAE = Exercise(
    "repair_gae",
    ("advantages",),
    (
        Case(
            "no end",
            dict(
                rewards=tensor([1.0, 1.0, 1.0]),
                values=tensor([0.5, 0.4, 0.3]),
                next_values=tensor([0.4, 0.3, 0.2]),
                gamma=0.9,
                gae_lambda=0.8,
                terminated=tensor([NO, NO, NO]),
            ),
            tensor([1.942592, 1.5036, 0.88]),
        ),
        Case(
            "the end at the last step",
            dict(
                rewards=tensor([0.0, 0.0, 1.0]),
                values=tensor([0.1, 0.2, 0.3]),
                next_values=tensor([0.2, 0.3, 9.0]),
                gamma=0.9,
                gae_lambda=0.8,
                terminated=tensor([NO, NO, YES]),
            ),
            tensor([0.49328, 0.574, 0.7]),
        ),
        Case(
            "an end in the middle",
            dict(
                rewards=tensor([1.0, 1.0, 1.0]),
                values=tensor([0.5, 0.4, 0.3]),
                next_values=tensor([0.4, 0.3, 0.2]),
                gamma=0.9,
                gae_lambda=0.8,
                terminated=tensor([NO, YES, NO]),
            ),
            tensor([1.292, 0.6, 0.88]),
        ),
        Case(
            "two ends",
            dict(
                rewards=tensor([0.0, 1.0, 0.0, 2.0]),
                values=tensor([0.5, 0.5, 1.0, 1.0]),
                next_values=tensor([0.5, 1.0, 1.0, 8.0]),
                gamma=1.0,
                gae_lambda=0.5,
                terminated=tensor([NO, YES, NO, YES]),
            ),
            tensor([0.25, 0.5, 0.5, 1.0]),
        ),
    ),
    (
        Mistake(
            "the sum is never cut",
            "One of the two masks is right: the one that keeps the later step out of the sum.",
            _never_masked,
        ),
        Mistake(
            "the mask that is left is the wrong one",
            "The flag of step t says that nothing follows step t. It must act on what comes from t + 1.",
            _wrong_mask_kept,
        ),
        Mistake(
            "the value behind the end of the episode is added",
            "The mask in the line of delta was right.",
            _end_still_bootstraps,
        ),
        Mistake(
            "the flag of the later step is used everywhere",
            "terminated[t] says that step t ended the episode.",
            _later_flag_everywhere,
        ),
        Mistake("all masks are gone", "Only one of the three masks is wrong.", _no_flag_at_all),
    ),
    given=_masked_twice,
)

EXERCISES = (TD_RESIDUAL, N_STEP_ADVANTAGE, GAE, LAMBDA_WEIGHTS, REPAIR_GAE)
