"""Right answers to all exercises, as literal and slow as the formulas: one number at a time, none of ppo_lab's code.

Rows are handled by recursion on the first axis, so that the formulas themselves are written for one row of numbers.
"""

import math
import random
from functools import wraps

import torch
from torch import Tensor, stack, tensor


def by_row(function):
    """Apply a function of one-dimensional tensors to any leading shape. Numbers are passed on as they are."""

    @wraps(function)
    def applied(**inputs):
        tensors = {name: x for name, x in inputs.items() if isinstance(x, Tensor)}
        if next(iter(tensors.values())).ndim == 1:
            return function(**inputs)
        n_rows = len(next(iter(tensors.values())))
        rows = [applied(**{k: x[i] if k in tensors else x for k, x in inputs.items()}) for i in range(n_rows)]
        return tuple(map(stack, zip(*rows, strict=True))) if isinstance(rows[0], tuple) else stack(rows)

    return applied


def softmax(logits):
    highest = max(logits.tolist())
    powers = [math.exp(x - highest) for x in logits.tolist()]
    return [p / sum(powers) for p in powers]


# Chapter 1


@by_row
def reward_to_go(rewards, gamma, terminated):
    result = []
    for t in range(len(rewards)):
        total, discount = 0.0, 1.0
        for k in range(t, len(rewards)):
            total += discount * rewards[k].item()
            discount *= gamma
            if terminated[k]:
                break
        result.append(total)
    return tensor(result)


def softmax_score(logits, action):
    probs = softmax(logits)
    return tensor([(1.0 if k == action else 0.0) - probs[k] for k in range(len(probs))])


def gradient_moments(logits, action_values, baseline):
    probs, n = softmax(logits), len(logits)
    samples = [
        [((1.0 if k == a else 0.0) - probs[k]) * (action_values[a].item() - baseline) for k in range(n)]
        for a in range(n)
    ]
    mean = [sum(probs[a] * samples[a][k] for a in range(n)) for k in range(n)]
    variance = sum(probs[a] * (samples[a][k] - mean[k]) ** 2 for a in range(n) for k in range(n))
    return tensor(mean), tensor(variance)


def best_baseline(logits, action_values):
    # The variance is a parabola in b: its lowest point follows from three of its values.
    low, middle, high = (gradient_moments(logits, action_values, b)[1].double() for b in (0.0, 5.0, 10.0))
    return 5 + 5 * (low - high) / (2 * (low - 2 * middle + high))


def repair_collect(world, policy, n_steps):
    states, actions, rewards = [], [], []
    state = world.reset()
    for _ in range(n_steps):
        action = policy(state)
        states.append(state)
        actions.append(action)
        state, reward, terminated = world.step(action)
        rewards.append(reward)
        if terminated:
            state = world.reset()
    return tensor(states), tensor(actions), tensor(rewards)


# Chapter 2


@by_row
def importance_ratio(logp, old_logp):
    return tensor([math.exp(logp[i].item() - old_logp[i].item()) for i in range(len(logp))])


def self_normalised_estimate(f, ratio):
    total, weight = 0.0, 0.0
    for value, w in zip(f.tolist(), ratio.tolist(), strict=True):
        total += w * value
        weight += w
    return total / weight


def effective_sample_size(ratio):
    total = sum(ratio.tolist())
    shares = [w / total for w in ratio.tolist()]
    return 1 / sum(share * share for share in shares)


def episode_ratio(logp, old_logp, mask):
    result = []
    for i in range(len(logp)):
        product = 1.0
        for t in range(logp.shape[1]):
            if mask[i, t]:
                product *= math.exp(logp[i, t].item() - old_logp[i, t].item())
        result.append(product)
    return tensor(result)


def surrogate_gradient(logits, old_logits, action, advantage):
    # Central differences of ρ·Â, in double precision.
    def objective(moved):
        return softmax(moved)[action] / softmax(old_logits)[action] * advantage

    gradient = []
    for k in range(len(logits)):
        step = 1e-4 * torch.eye(len(logits), dtype=torch.float64)[k]
        gradient.append((objective(logits.double() + step) - objective(logits.double() - step)) / 2e-4)
    return tensor(gradient)


def repair_surrogate(logits, actions, old_logp, advantages):
    loss = 0.0
    for i in range(len(actions)):
        prob = logits[i, actions[i]].exp() / logits[i].exp().sum()
        loss = loss - prob / math.exp(old_logp[i].item()) * advantages[i] / len(actions)
    return loss


# Chapter 3


@by_row
def clipped_surrogate(ratio, advantages, eps_clip):
    result = []
    for rho, a in zip(ratio.tolist(), advantages.tolist(), strict=True):
        clipped = min(max(rho, 1 - eps_clip), 1 + eps_clip)
        result.append(min(rho * a, clipped * a))
    return tensor(result)


def clip_slope(ratio, advantages, eps_clip):
    result = []
    for rho, a in zip(ratio.tolist(), advantages.tolist(), strict=True):
        result.append(0.0 if (a > 0 and rho > 1 + eps_clip) or (a < 0 and rho < 1 - eps_clip) else a)
    return tensor(result)


def clipped_value_loss(values, old_values, returns, eps_clip_value):
    total = 0.0
    for v, old, target in zip(values.tolist(), old_values.tolist(), returns.tolist(), strict=True):
        clipped = old + min(max(v - old, -eps_clip_value), eps_clip_value)
        total += max((v - target) ** 2, (clipped - target) ** 2) / 2
    return total / len(values)


@by_row
def categorical_kl(old_logits, logits):
    total = 0.0
    for p, q in zip(softmax(old_logits), softmax(logits), strict=True):
        total += p * math.log(p / q)
    return tensor(total)


def adaptive_kl_coef(kl_coef, measured_kl, target_kl):
    if measured_kl > target_kl * 1.5:
        return kl_coef * 2
    if measured_kl < target_kl / 1.5:
        return kl_coef / 2
    return kl_coef


def repair_policy_loss(logp, old_logp, advantages, eps_clip):
    total = 0.0
    for i in range(len(logp)):
        rho = (logp[i] - old_logp[i]).exp()
        a = advantages[i].item()
        if a > 0:
            objective = rho * a if rho < 1 + eps_clip else tensor((1 + eps_clip) * a)
        else:
            objective = rho * a if rho > 1 - eps_clip else tensor((1 - eps_clip) * a)
        total = total - objective
    return total / len(logp)


# Chapter 4


@by_row
def td_residual(rewards, values, next_values, gamma, terminated):
    result = []
    for t in range(len(rewards)):
        following = 0.0 if terminated[t] else next_values[t].item()
        result.append(rewards[t].item() + gamma * following - values[t].item())
    return tensor(result)


def n_step_advantage(rewards, values, next_values, n, gamma):
    result = []
    for t in range(len(rewards)):
        total, discount, k = -values[t].item(), 1.0, t
        while True:
            total += discount * rewards[k].item()
            discount *= gamma
            if k == t + n - 1 or k == len(rewards) - 1:
                break
            k += 1
        result.append(total + discount * next_values[k].item())
    return tensor(result)


@by_row
def gae(rewards, values, next_values, gamma, gae_lambda, terminated, truncated):
    """The double sum: from each step on, until the first step that ends an episode."""
    deltas = td_residual.__wrapped__(rewards, values, next_values, gamma, terminated).tolist()
    advantages = []
    for t in range(len(deltas)):
        total, weight = 0.0, 1.0
        for k in range(t, len(deltas)):
            total += weight * deltas[k]
            weight *= gamma * gae_lambda
            if terminated[k] or truncated[k]:
                break
        advantages.append(total)
    return tensor(advantages), tensor([a + v for a, v in zip(advantages, values.tolist(), strict=True)])


def lambda_weights(gae_lambda, n_left):
    weights, left = [], 1.0
    for _ in range(n_left - 1):
        weights.append((1 - gae_lambda) * left)
        left *= gae_lambda
    return tensor([*weights, left])


def repair_gae(rewards, values, next_values, gamma, gae_lambda, terminated):
    never = torch.zeros_like(terminated)
    return gae.__wrapped__(rewards, values, next_values, gamma, gae_lambda, terminated, never)[0]


# Chapter 5


def minibatches(n_samples, batch_size, seed):
    order = list(range(n_samples))
    random.Random(seed).shuffle(order)
    return [tensor(order[i : i + batch_size]) for i in range(0, n_samples, batch_size)]


def whiten(x):
    numbers = x.tolist()
    mean = sum(numbers) / len(numbers)
    spread = math.sqrt(sum((v - mean) ** 2 for v in numbers) / max(len(numbers) - 1, 1))
    return tensor([(v - mean) / spread if spread > 0 else 0.0 for v in numbers])


def explained_variance(values, returns):
    def variance(numbers):
        mean = sum(numbers) / len(numbers)
        return sum((v - mean) ** 2 for v in numbers)

    errors = [r - v for v, r in zip(values.tolist(), returns.tolist(), strict=True)]
    spread = variance(returns.tolist())
    return 1 - variance(errors) / spread if spread > 0 else math.nan


def repair_entropy(logits, actions):
    total = 0.0
    for row in logits:
        for k in range(len(row)):
            prob = row[k].exp() / row.exp().sum()
            total = total - prob * prob.log()
    return total / len(logits)


def repair_time_limit(rewards, values, next_values, gamma, gae_lambda, terminated, truncated):
    return gae.__wrapped__(rewards, values, next_values, gamma, gae_lambda, terminated, truncated)[0]


# Chapter 6


@by_row
def response_values(values, prompt_length):
    result = []
    for t in range(len(values) - prompt_length):
        result.append(values[prompt_length + t - 1].item())
    return tensor(result)


def token_rewards(scores, logp, ref_logp, mask, kl_coef):
    result = torch.zeros(logp.shape)
    for i in range(len(scores)):
        last = None
        for t in range(logp.shape[1]):
            if mask[i, t]:
                result[i, t] = -kl_coef * (logp[i, t].item() - ref_logp[i, t].item())
                last = t
        result[i, last] += scores[i].item()
    return result


def token_entropy(logits, response_ids, mask):
    entropies = []
    for i in range(logits.shape[0]):
        for t in range(logits.shape[1]):
            if mask[i, t]:
                entropies.append(sum(-p * math.log(p) for p in softmax(logits[i, t]) if p > 0))
    return sum(entropies) / len(entropies)


def optimal_policy(ref_logp, scores, kl_coef):
    highest = max(r / kl_coef for r in scores.tolist())
    weights = []
    for logp, r in zip(ref_logp.tolist(), scores.tolist(), strict=True):
        weights.append(math.exp(logp) * math.exp(r / kl_coef - highest))
    return tensor([w / sum(weights) for w in weights]).log()


@by_row
def repair_response_mask(response_ids, eos_token_id, pad_token_id):
    result, ended = [], False
    for token in response_ids.tolist():
        result.append(not ended)
        ended = ended or token == eos_token_id
    return tensor(result)


# Chapter 7


def whiten_keep_mean(rewards, mask):
    numbers = [r for r, counts in zip(rewards.flatten().tolist(), mask.flatten().tolist(), strict=True) if counts]
    mean = sum(numbers) / len(numbers)
    squares = sum((v - mean) ** 2 for v in numbers)
    spread = math.sqrt(squares / (len(numbers) - 1)) if squares > 0 else math.inf
    result = torch.zeros(rewards.shape)
    for i in range(rewards.shape[0]):
        for t in range(rewards.shape[1]):
            if mask[i, t]:
                result[i, t] = mean + (rewards[i, t].item() - mean) / spread
    return result


def global_token_mean(losses, mask, micro_batch_size):
    parts = [0.0] * math.ceil(len(losses) / micro_batch_size)
    count = 0
    for i in range(len(losses)):
        for t in range(losses.shape[1]):
            if mask[i, t]:
                parts[i // micro_batch_size] += losses[i, t].item()
                count += 1
    return tensor([part / count for part in parts])


@by_row
def kl_gradient(logp, ref_logp, kind):
    # Central differences of the estimator; the −1 of k3 has no slope.
    def estimate(d):
        if kind == "k1":
            return d
        return d * d / 2 if kind == "k2" else math.exp(-d) + d

    result = []
    for new, ref in zip(logp.tolist(), ref_logp.tolist(), strict=True):
        result.append((estimate(new + 1e-4 - ref) - estimate(new - 1e-4 - ref)) / 2e-4)
    return tensor(result)


def early_stop(minibatch_kl, stop_kl):
    steps = 0
    for row in minibatch_kl.tolist():
        for kl in row:
            if kl > stop_kl:
                return steps
            steps += 1
    return steps


def repair_kl_controller(kl_coef, current_kl, target_kl, n_steps, horizon):
    error = max(-0.2, min(0.2, (current_kl - target_kl) / target_kl))
    share = n_steps / horizon if n_steps < horizon else 1.0
    return kl_coef * (1 + error * share)


# Chapter 8


def find_kl_spike(kl, window, factor, floor):
    numbers = kl.tolist()
    for i in range(1, len(numbers)):
        before = numbers[i - window : i] if i > window else numbers[:i]
        if numbers[i] > floor and numbers[i] > factor * sum(before) / len(before):
            return i
    return -1


def ratio_report(logp, old_logp, mask, eps_clip):
    kls, shares, largest = [], [], []
    for i in range(len(mask)):
        rhos = [
            math.exp(logp[i, t].item()) / math.exp(old_logp[i, t].item()) for t in range(mask.shape[1]) if mask[i, t]
        ]
        kls.append(sum(rho - math.log(rho) for rho in rhos) / len(rhos) - 1)
        shares.append(sum(1.0 for rho in rhos if rho < 1 - eps_clip or rho > 1 + eps_clip) / len(rhos))
        largest.append(max(rhos))
    return tensor(kls), tensor(shares), tensor(largest)


def which_failure(score, gold, kl_per_response, approx_kl, explained_variance):
    if max(approx_kl.tolist()) > 0.2:
        return 1
    if max(explained_variance.tolist()) < 0.05:
        return 2
    return 3 if max(gold.tolist()) - gold[-1].item() > 0.2 else 0


def overoptimisation_point(kl, proxy, gold):
    points = sorted(zip(kl.tolist(), proxy.tolist(), gold.tolist(), strict=True))
    turn = points[0]
    for point in points[1:]:
        if point[2] > turn[2]:
            turn = point
    return tensor(turn[0]), tensor(points[-1][1] - turn[1]), tensor(turn[2] - points[-1][2])


def repair_first_ratio(logits, response_ids, old_logp, temperature):
    result = torch.zeros(old_logp.shape)
    for i in range(logits.shape[0]):
        for t in range(logits.shape[1]):
            prob = softmax(logits[i, t] / temperature)[response_ids[i, t]]
            result[i, t] = prob / math.exp(old_logp[i, t].item())
    return result


# Chapter 9


def group_advantages(scores, group_index, eps):
    result = []
    for score, label in zip(scores.tolist(), group_index.tolist(), strict=True):
        group = [s for s, g in zip(scores.tolist(), group_index.tolist(), strict=True) if g == label]
        mean = sum(group) / len(group)
        squares = sum((s - mean) ** 2 for s in group)
        result.append((score - mean) / (math.sqrt(squares / (len(group) - 1)) + eps) if squares > 0 else 0.0)
    return tensor(result)


def leave_one_out(scores, group_index):
    result = []
    for i in range(len(scores)):
        others = [scores[j].item() for j in range(len(scores)) if group_index[j] == group_index[i] and j != i]
        result.append(scores[i].item() - sum(others) / len(others) if others else 0.0)
    return tensor(result)


def dpo_loss(chosen_logp, rejected_logp, ref_chosen_logp, ref_rejected_logp, kl_coef):
    total = 0.0
    for i in range(len(chosen_logp)):
        margin = 0.0
        for t in range(chosen_logp.shape[1]):
            margin += chosen_logp[i, t].item() - ref_chosen_logp[i, t].item()
        for t in range(rejected_logp.shape[1]):
            margin -= rejected_logp[i, t].item() - ref_rejected_logp[i, t].item()
        # −log σ(x) = log(1 + exp(−x))
        total += math.log(1 + math.exp(-kl_coef * margin))
    return total / len(chosen_logp)


def best_of_n_kl(probs, scores, n):
    # All n draws lie at or below an answer, but not all of them below it.
    kl = 0.0
    for p, score in zip(probs.tolist(), scores.tolist(), strict=True):
        below = sum(q for q, s in zip(probs.tolist(), scores.tolist(), strict=True) if s < score)
        best = (below + p) ** n - below**n
        if best > 0:
            kl += best * math.log(best / p)
    bound = math.log(n)
    for _ in range(n):
        bound -= 1 / n
    return tensor(kl), tensor(bound + 1 / n)


def repair_reinforce_pp(rewards, mask):
    returns = torch.zeros(rewards.shape)
    for i in range(len(rewards)):
        for t in range(rewards.shape[1]):
            for k in range(t, rewards.shape[1]):
                if mask[i, t] and mask[i, k]:
                    returns[i, t] += rewards[i, k].item()
    whitened = whiten(returns[mask])
    result = torch.zeros(rewards.shape)
    result[mask] = whitened
    return result


# Chapter 10


def rank_share(rows, rank, world_size):
    result, place = [], rank
    while len(result) * world_size < len(rows):
        result.append(rows[place].item() if place < len(rows) else -1)
        place += world_size
    return tensor(result)


def zero_bytes(n_params, stage, n_gpus):
    share = math.ceil(n_params / n_gpus)
    weights = share if stage == 3 else n_params
    gradients = share if stage in (2, 3) else n_params
    optimizer = n_params if stage == 0 else share
    return 2 * weights, 2 * gradients, (4 + 4 + 4) * optimizer


@by_row
def sampler_weights(old_logp, sampler_logp, mask, cap):
    result = []
    for t in range(len(mask)):
        weight = math.exp(old_logp[t].item()) / math.exp(sampler_logp[t].item()) if mask[t] else 1.0
        result.append(weight if weight < cap else cap)
    return tensor(result)


def repair_rank_loss(losses, mask, count, world_size):
    total = 0.0
    for loss, counts in zip(losses.flatten().tolist(), mask.flatten().tolist(), strict=True):
        if counts:
            total += loss
    return total / count * world_size
