"""Exercises of chapter 1, the policy gradient (§13.1). Wrong answers are written as a reader would, without types."""

from dataclasses import dataclass, field

import torch
from torch import Tensor, tensor

from ppo_lab.exercises.kit import Case, Exercise, Mistake

NO, YES = False, True


# --- reward_to_go


def _to_go(rewards: Tensor, gamma: float, cut: Tensor) -> Tensor:
    """Backward sum in which nothing follows where `cut` is True."""
    following, total = torch.zeros_like(rewards[..., 0]), torch.zeros_like(rewards)
    for t in reversed(range(rewards.shape[-1])):
        following = rewards[..., t] + gamma * following.masked_fill(cut[..., t], 0.0)
        total[..., t] = following
    return total


def _leaking(rewards, gamma, terminated):
    return _to_go(rewards, gamma, torch.zeros_like(terminated))


def _cut_one_step_early(rewards, gamma, terminated):
    return _to_go(rewards, gamma, terminated.roll(-1, -1))


def _discounted_from_the_start(rewards, gamma, terminated):
    return _to_go(rewards, gamma, terminated) * gamma ** torch.arange(rewards.shape[-1])


def _without_own_reward(rewards, gamma, terminated):
    return _to_go(rewards, gamma, terminated) - rewards


def _rewards_so_far(rewards, gamma, terminated):
    return _to_go(rewards.flip(-1), gamma, terminated.flip(-1)).flip(-1)


def _time_first(rewards, gamma, terminated):
    return _to_go(rewards.mT, gamma, terminated.mT).mT if rewards.ndim > 1 else _to_go(rewards, gamma, terminated)


REWARD_TO_GO = Exercise(
    "reward_to_go",
    ("reward-to-go",),
    (
        Case(
            "one episode",
            dict(rewards=tensor([1.0, 2.0, 3.0]), gamma=0.5, terminated=tensor([NO, NO, YES])),
            tensor([2.75, 3.5, 3.0]),
        ),
        Case(
            "one reward at the end, no discount",
            dict(rewards=tensor([0.0, 0.0, 1.0]), gamma=1.0, terminated=tensor([NO, NO, YES])),
            tensor([1.0, 1.0, 1.0]),
        ),
        Case(
            "two episodes in a row",
            dict(rewards=tensor([1.0, 1.0, 1.0, 1.0]), gamma=0.9, terminated=tensor([NO, YES, NO, YES])),
            tensor([1.9, 1.0, 1.9, 1.0]),
        ),
        Case(
            "the row ends inside an episode",
            dict(rewards=tensor([1.0, 1.0, 2.0]), gamma=0.9, terminated=tensor([NO, NO, NO])),
            tensor([3.52, 2.8, 2.0]),
        ),
        Case(
            "every step is an episode",
            dict(rewards=tensor([1.0, 2.0, 3.0]), gamma=0.9, terminated=tensor([YES, YES, YES])),
            tensor([1.0, 2.0, 3.0]),
        ),
        Case(
            "two environments",
            dict(
                rewards=tensor([[1.0, 1.0, 1.0], [1.0, 2.0, 4.0]]),
                gamma=0.5,
                terminated=tensor([[NO, YES, NO], [NO, NO, NO]]),
            ),
            tensor([[1.5, 1.0, 1.0], [3.0, 4.0, 4.0]]),
        ),
    ),
    (
        Mistake(
            "the sum runs on over the end of an episode",
            "Where terminated[..., t] is True, step t keeps its own reward only.",
            _leaking,
        ),
        Mistake(
            "the sum is cut one step too early",
            "terminated[..., t] belongs to step t: what follows after step t is dropped, its own reward stays.",
            _cut_one_step_early,
        ),
        Mistake(
            "each reward is discounted from the start of the row",
            "The exponent counts from step t on: the reward of step t itself is not discounted.",
            _discounted_from_the_start,
        ),
        Mistake(
            "the step's own reward is left out",
            "G_t begins with r_t, the reward received for action t.",
            _without_own_reward,
        ),
        Mistake(
            "past rewards are summed instead of future ones",
            "An action cannot change what was earned before it. Run the loop backwards.",
            _rewards_so_far,
        ),
        Mistake(
            "the first axis is taken for time",
            "Time is the last axis: rewards[..., t] is step t of every row.",
            _time_first,
        ),
    ),
)


# --- softmax_score


def _one_hot(action: int, logits: Tensor) -> Tensor:
    return torch.eye(len(logits), dtype=logits.dtype)[action]


def _loss_gradient(logits, action):
    return logits.softmax(-1) - _one_hot(action, logits)


def _only_own_logit(logits, action):
    return _one_hot(action, logits) * (1 - logits.softmax(-1))


def _gradient_of_the_probability(logits, action):
    probs = logits.softmax(-1)
    return probs[action] * (_one_hot(action, logits) - probs)


def _overflowing(logits, action):
    return _one_hot(action, logits) - logits.exp() / logits.exp().sum()


def _without_the_sum(logits, action):
    return _one_hot(action, logits)


SOFTMAX_SCORE = Exercise(
    "softmax_score",
    ("score",),
    (
        Case("two equal actions", dict(logits=tensor([0.0, 0.0]), action=0), tensor([0.5, -0.5])),
        Case(
            "probabilities 0.7, 0.2, 0.1, the first action",
            dict(logits=tensor([0.7, 0.2, 0.1]).log(), action=0),
            tensor([0.3, -0.2, -0.1]),
        ),
        Case(
            "the same policy, the last action",
            dict(logits=tensor([0.7, 0.2, 0.1]).log(), action=2),
            tensor([-0.7, -0.2, 0.9]),
        ),
        Case(
            "logits 2, 0, -1",
            dict(logits=tensor([2.0, 0.0, -1.0]), action=1),
            tensor([-0.843795, 0.885805, -0.042010]),
        ),
        Case("logits of a thousand", dict(logits=tensor([1000.0, 1000.0]), action=1), tensor([-0.5, 0.5])),
    ),
    (
        Mistake(
            "the sign is turned round: this is the gradient of −log π",
            "Raising the logit of the action that was taken must raise its log-probability.",
            _loss_gradient,
        ),
        Mistake(
            "only the logit of the taken action gets a gradient",
            "The normalising sum holds all logits, so every one of them moves log π(a). The parts sum to 0.",
            _only_own_logit,
        ),
        Mistake(
            "π(a) is differentiated, not log π(a)",
            "∇ log π = ∇π / π: one factor π(a) too many is left.",
            _gradient_of_the_probability,
        ),
        Mistake(
            "e to the power of a large logit overflows",
            "logits.softmax(-1) subtracts the largest logit first, which changes nothing but the overflow.",
            _overflowing,
        ),
        Mistake(
            "the normalising sum is forgotten",
            "log π(a) is the logit minus the logarithm of a sum over all actions. Differentiate that one too.",
            _without_the_sum,
        ),
    ),
)


# --- gradient_moments


def _samples(logits: Tensor, action_values: Tensor, baseline: float) -> Tensor:
    """Row a: ∇log π(a) · (Q(a) − b)."""
    scores = torch.eye(len(logits), dtype=logits.dtype) - logits.softmax(-1)
    return scores * (action_values - baseline)[:, None]


def _moments(samples: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    mean = weights @ samples
    return mean, weights @ samples.square().sum(-1) - mean.square().sum()


def _unweighted_moments(logits, action_values, baseline):
    return _moments(_samples(logits, action_values, baseline), torch.full_like(logits, 1 / len(logits)))


def _second_moment(logits, action_values, baseline):
    mean, variance = _moments(_samples(logits, action_values, baseline), logits.softmax(-1))
    return mean, variance + mean.square().sum()


def _baseline_added(logits, action_values, baseline):
    return _moments(_samples(logits, action_values, -baseline), logits.softmax(-1))


def _variance_per_logit(logits, action_values, baseline):
    mean, variance = _moments(_samples(logits, action_values, baseline), logits.softmax(-1))
    return mean, variance / len(logits)


def _standard_deviation(logits, action_values, baseline):
    mean, variance = _moments(_samples(logits, action_values, baseline), logits.softmax(-1))
    return mean, variance.clamp(min=0).sqrt()


GRADIENT_MOMENTS = Exercise(
    "gradient_moments",
    ("mean", "variance"),
    (
        Case(
            "two actions, no baseline",
            dict(logits=tensor([0.0, 0.0]), action_values=tensor([1.0, 0.0]), baseline=0.0),
            (tensor([0.25, -0.25]), tensor(0.125)),
        ),
        Case(
            "two actions, the value as baseline",
            dict(logits=tensor([0.0, 0.0]), action_values=tensor([1.0, 0.0]), baseline=0.5),
            (tensor([0.25, -0.25]), tensor(0.0)),
        ),
        Case(
            "three actions, no baseline",
            dict(logits=tensor([2.0, 0.0, -1.0]), action_values=tensor([11.0, 12.0, 7.0]), baseline=0.0),
            (tensor([0.045434, 0.120344, -0.165778]), tensor(31.980385)),
        ),
        Case(
            "three actions, a good baseline",
            dict(logits=tensor([2.0, 0.0, -1.0]), action_values=tensor([11.0, 12.0, 7.0]), baseline=10.0),
            (tensor([0.045434, 0.120344, -0.165778]), tensor(1.294612)),
        ),
        Case(
            "three actions, a bad baseline",
            dict(logits=tensor([2.0, 0.0, -1.0]), action_values=tensor([11.0, 12.0, 7.0]), baseline=50.0),
            (tensor([0.045434, 0.120344, -0.165778]), tensor(424.961635)),
        ),
    ),
    (
        Mistake(
            "all actions count the same",
            "Action a is sampled with probability π(a), so its row has the weight π(a), in both expectations.",
            _unweighted_moments,
        ),
        Mistake(
            "the squared mean is not subtracted",
            "E‖g‖² is the second moment. The variance is E‖g‖² − ‖E g‖².",
            _second_moment,
        ),
        Mistake("the baseline is added", "The sample is ∇log π(a)·(Q(a) − b).", _baseline_added),
        Mistake(
            "the variance is averaged over the logits",
            "The total variance is the sum over the logits: ‖g‖² is a sum of squares.",
            _variance_per_logit,
        ),
        Mistake(
            "the root of the variance is taken",
            "The variance was asked for, not the standard deviation.",
            _standard_deviation,
        ),
    ),
)


# --- best_baseline


def _weighted_mean(weights: Tensor, x: Tensor) -> Tensor:
    return (weights * x).sum() / weights.sum()


def _squared_scores(logits: Tensor) -> Tensor:
    return (torch.eye(len(logits), dtype=logits.dtype) - logits.softmax(-1)).square().sum(-1)


def _the_value(logits, action_values):
    return _weighted_mean(logits.softmax(-1), action_values)


def _plain_mean(logits, action_values):
    return action_values.mean()


def _squared_scores_only(logits, action_values):
    return _weighted_mean(_squared_scores(logits), action_values)


def _norm_not_squared(logits, action_values):
    return _weighted_mean(logits.softmax(-1) * _squared_scores(logits).sqrt(), action_values)


def _own_logit_only(logits, action_values):
    probs = logits.softmax(-1)
    return _weighted_mean(probs * (1 - probs).square(), action_values)


BEST_BASELINE = Exercise(
    "best_baseline",
    ("baseline",),
    (
        Case("two equal actions", dict(logits=tensor([0.0, 0.0]), action_values=tensor([1.0, 0.0])), tensor(0.5)),
        Case(
            "probabilities 0.7, 0.2, 0.1",
            dict(logits=tensor([0.7, 0.2, 0.1]).log(), action_values=tensor([1.0, 2.0, 4.0])),
            tensor(2.369565),
        ),
        Case(
            "logits 2, 0, -1",
            dict(logits=tensor([2.0, 0.0, -1.0]), action_values=tensor([11.0, 12.0, 7.0])),
            tensor(10.615887),
        ),
        Case(
            "all actions are worth 3",
            dict(logits=tensor([1.0, 0.0, -2.0]), action_values=tensor([3.0, 3.0, 3.0])),
            tensor(3.0),
        ),
    ),
    (
        Mistake(
            "the value V is returned",
            "V is close to b*, and the usual choice. b* weights the actions by π(a)·‖∇log π(a)‖², not by π(a) alone.",
            _the_value,
        ),
        Mistake("the actions are averaged without weights", "Rare actions are sampled rarely.", _plain_mean),
        Mistake(
            "the probability is missing from the weights",
            "Both sums of b* are expectations over a ~ π.",
            _squared_scores_only,
        ),
        Mistake(
            "the norm of the score is not squared",
            "The variance is a mean of squares, and (Q − b) and the score are squared together.",
            _norm_not_squared,
        ),
        Mistake(
            "only the taken action's own logit enters the norm",
            "‖∇log π(a)‖² sums over all logits: (1 − π(a))² and π(k)² for every other action k.",
            _own_logit_only,
        ),
    ),
)


# --- repair_collect


@dataclass
class Ladder:
    """A world to try a loop on. In state t the action a earns a · pays[t] and leads to t + 1; the last step ends it."""

    pays: list[float]
    state: int = field(default=0, repr=False)

    def reset(self) -> int:
        self.state = 0
        return self.state

    def step(self, action: int) -> tuple[int, float, bool]:
        reward = action * self.pays[self.state]
        self.state += 1
        return self.state, reward, self.state == len(self.pays)


@dataclass
class Script:
    """A policy that takes actions[t] in state t."""

    actions: list[int]

    def __call__(self, state: int) -> int:
        return self.actions[state]


def _reward_one_slot_late(world, policy, n_steps):
    states, actions, rewards = [], [], []
    state, reward = world.reset(), 0.0
    for _ in range(n_steps):
        action = policy(state)
        states.append(state)
        actions.append(action)
        rewards.append(reward)
        state, reward, terminated = world.step(action)
        if terminated:
            state = world.reset()
    return tensor(states), tensor(actions), tensor(rewards)


def _collect(world: Ladder, policy: Script, n_steps: int) -> tuple[list[int], list[int], list[float], list[int]]:
    """States, actions, rewards and the states they led to, in the right slots."""
    steps, state = [], world.reset()
    for _ in range(n_steps):
        action = policy(state)
        following, reward, terminated = world.step(action)
        steps.append((state, action, reward, following))
        state = world.reset() if terminated else following
    return tuple(map(list, zip(*steps, strict=True)))


def _reward_forgotten_at_the_end(world, policy, n_steps):
    states, actions, rewards, following = _collect(world, policy, n_steps)
    late = [0.0 if end == len(world.pays) else r for end, r in zip(following, rewards, strict=True)]
    return tensor(states), tensor(actions), tensor([0.0, *late[:-1]])


def _state_after_the_step(world, policy, n_steps):
    _, actions, rewards, following = _collect(world, policy, n_steps)
    return tensor(following), tensor(actions), tensor(rewards)


def _shifted_back(world, policy, n_steps):
    states, actions, rewards, _ = _collect(world, policy, n_steps)
    return tensor(states), tensor(actions), tensor([*rewards[:-1], 0.0])


REPAIR_COLLECT = Exercise(
    "repair_collect",
    ("states", "actions", "rewards"),
    (
        Case(
            "three steps that pay 1, 2, 3",
            dict(world=Ladder([1.0, 2.0, 3.0]), policy=Script([1, 1, 1]), n_steps=3),
            (tensor([0, 1, 2]), tensor([1, 1, 1]), tensor([1.0, 2.0, 3.0])),
        ),
        Case(
            "the action decides the reward",
            dict(world=Ladder([1.0, 2.0, 3.0]), policy=Script([1, 0, 2]), n_steps=3),
            (tensor([0, 1, 2]), tensor([1, 0, 2]), tensor([1.0, 0.0, 6.0])),
        ),
        Case(
            "stops inside an episode",
            dict(world=Ladder([1.0, 2.0, 3.0]), policy=Script([1, 2, 1]), n_steps=2),
            (tensor([0, 1]), tensor([1, 2]), tensor([1.0, 4.0])),
        ),
        Case(
            "several episodes in a row",
            dict(world=Ladder([1.0, 5.0]), policy=Script([1, 2]), n_steps=5),
            (tensor([0, 1, 0, 1, 0]), tensor([1, 2, 1, 2, 1]), tensor([1.0, 10.0, 1.0, 10.0, 1.0])),
        ),
    ),
    (
        Mistake(
            "each reward stands one slot late, and the last one of an episode is lost",
            "Setting the reward back at a reset hides where it went. Append it after world.step has returned it.",
            _reward_forgotten_at_the_end,
        ),
        Mistake(
            "the state after the step is stored",
            "states[t] is the state in which action t was chosen. Only the reward has to wait for world.step.",
            _state_after_the_step,
        ),
        Mistake(
            "the last reward is missing",
            "Shifting the list afterwards cannot bring back a reward that was never stored. Move the line instead.",
            _shifted_back,
        ),
    ),
    given=_reward_one_slot_late,
)

EXERCISES = (REWARD_TO_GO, SOFTMAX_SCORE, GRADIENT_MOMENTS, BEST_BASELINE, REPAIR_COLLECT)
