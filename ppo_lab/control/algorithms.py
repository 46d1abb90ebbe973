"""One update rule per algorithm: REINFORCE, A2C, TRPO, PPO-Penalty, PPO-Clip.

Each takes a learner, a batch and the settings, and changes the learner's network. The formulas are those of the
mathematics modules; what stands here is which of them each algorithm uses, and how often.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ppo_lab.clip import PPOLoss, categorical_entropy, clipped_value_loss, ppo_loss
from ppo_lab.control.config import Settings
from ppo_lab.control.networks import PPONetwork
from ppo_lab.control.rollout import Rollout, Scores, action_logp
from ppo_lab.diagnostics import ratio_statistics
from ppo_lab.gae import gae
from ppo_lab.importance_sampling import importance_ratio, surrogate
from ppo_lab.policy_gradient import policy_gradient_loss, reward_to_go
from ppo_lab.stability import whiten
from ppo_lab.trust_region import AdaptivePenalty, categorical_kl, kl_penalty_objective, trpo_step


@dataclass
class Learner:
    """What learning changes: the network, its optimizer, PPO-Penalty's β, and the random numbers of the updates."""

    network: PPONetwork
    optimizer: torch.optim.Optimizer
    penalty: AdaptivePenalty
    generator: torch.Generator


class Batch(NamedTuple):
    """The transitions of a rollout that count, one per row: states [M, D], logits [M, A], the others [M]."""

    states: Tensor
    actions: Tensor
    logits: Tensor
    logp: Tensor
    values: Tensor
    advantages: Tensor
    returns: Tensor


def make_learner(state_dim: int, action_dim: int, settings: Settings) -> Learner:
    """A fresh learner. The network's first weights and the minibatch order follow from settings.seed alone."""
    generator = torch.Generator().manual_seed(settings.seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        network = PPONetwork(
            state_dim,
            action_dim,
            settings.hidden_dim,
            shared_trunk=settings.shared_trunk,
            orthogonal=settings.orthogonal,
        )
    parameters = network.critic_parameters() if settings.algorithm == "trpo" else network.parameters()
    optimizer = torch.optim.Adam(parameters, lr=settings.lr, eps=1e-5, fused=True)
    return Learner(network, optimizer, AdaptivePenalty(settings.kl_coef, settings.target_kl), generator)


def flatten(rollout: Rollout, scores: Scores, advantages: Tensor, returns: Tensor) -> Batch:
    """The rows of a rollout that count; the steps that only reset an environment are left out."""
    keep = rollout.mask
    return check_finite(
        Batch(
            states=rollout.states[:, :-1][keep],
            actions=rollout.actions[keep],
            logits=scores.logits[keep],
            logp=scores.logp[keep],
            values=scores.values[keep],
            advantages=advantages[keep],
            returns=returns[keep],
        )
    )


def check_finite(batch: Batch) -> Batch:
    """The batch as it is; raises ValueError naming a column that holds a NaN or an infinity.

    `gradient_step` would stop at the minibatch with the bad row, but the minibatches before it had moved the network.
    """
    for name, column in batch._asdict().items():
        if not torch.isfinite(column).all():
            raise ValueError(f"the update was stopped: {name} must be finite; look at the rewards and states collected")
    return batch


def estimate_advantages(rollout: Rollout, scores: Scores, settings: Settings) -> Batch:
    """GAE on a rollout, flattened: what every actor-critic algorithm here learns from."""
    advantages, returns = gae(
        rollout.rewards,
        scores.values,
        scores.next_values,
        gamma=settings.gamma,
        gae_lambda=settings.gae_lambda,
        terminated=rollout.terminated,
        truncated=rollout.truncated,
        mask=rollout.mask,
    )
    if settings.whiten == "rollout":
        advantages = whiten(advantages, rollout.mask)
    return flatten(rollout, scores, advantages, returns)


def estimate_rewards_to_go(rollout: Rollout, scores: Scores, settings: Settings) -> Batch:
    """G_t, or G_t − V(s_t) for the algorithm with a baseline, flattened: what REINFORCE learns from.

    Without a critic nothing is known of the future beyond a cut, so the steps of an episode that had not ended when
    the rollout did are left out, and a time limit counts as an end. Both favour short episodes: what is kept of a long
    one tends to be its last part.
    """
    ends = rollout.terminated | rollout.truncated
    finished = ends.flip(-1).cummax(-1).values.flip(-1)
    rollout = rollout._replace(mask=rollout.mask & finished)
    returns = reward_to_go(
        rollout.rewards, settings.gamma, terminated=rollout.terminated, truncated=rollout.truncated, mask=rollout.mask
    )
    return flatten(rollout, scores, returns - scores.values if settings.baseline else returns, returns)


def estimate(rollout: Rollout, scores: Scores, settings: Settings) -> Batch:
    """The batch an algorithm learns from, with rewards scaled by settings.reward_scale."""
    rollout = rollout._replace(rewards=settings.reward_scale * rollout.rewards)
    without_critic = settings.algorithm in ("reinforce", "reinforce-baseline")
    return (estimate_rewards_to_go if without_critic else estimate_advantages)(rollout, scores, settings)


def minibatches(batch: Batch, size: int, generator: torch.Generator) -> Iterator[Batch]:
    """One epoch: the rows in random order, cut into minibatches; the last one may be smaller."""
    order = torch.randperm(len(batch.actions), generator=generator)
    for rows in order.split(size):
        yield Batch(*(column[rows] for column in batch))


def gradient_step(learner: Learner, loss: Tensor, max_grad_norm: float) -> Tensor:
    """One step of the optimizer on a finite loss; returns the gradient norm before clipping.

    Raises ValueError when the loss or its gradient is not finite, before any parameter has changed.
    """
    learner.optimizer.zero_grad()
    loss.backward()
    parameters = learner.optimizer.param_groups[0]["params"]
    grad_norm = nn.utils.clip_grad_norm_(parameters, max_grad_norm, foreach=False)
    if not torch.isfinite(loss + grad_norm):
        raise ValueError(f"the update was stopped: loss {loss.item()}, gradient norm {grad_norm.item()}")
    learner.optimizer.step()
    return grad_norm


def ppo_update(learner: Learner, batch: Batch, settings: Settings) -> list[PPOLoss]:
    """PPO-Clip: k_epochs passes over the rollout in shuffled minibatches, with the clipped surrogate.

    stop_kl ends the whole update before the first step whose approx_kl exceeds it. Returns the losses and statistics of
    every step taken, in order: the first one shows a ratio of 1.

    Book: A07 §5; A07 §6.1; §13.3.4
    Source: Schulman et al. 2017 (arXiv:1707.06347)
    """
    steps = []
    for _ in range(settings.k_epochs):
        for rows in minibatches(batch, settings.minibatch_size, learner.generator):
            logits, values = learner.network(rows.states)
            loss = ppo_loss(
                action_logp(logits, rows.actions),
                rows.logp,
                whiten(rows.advantages) if settings.whiten == "minibatch" else rows.advantages,
                values=values,
                old_values=rows.values,
                returns=rows.returns,
                entropy=categorical_entropy(logits),
                eps_clip=settings.eps_clip,
                eps_clip_value=settings.eps_clip_value,
                value_coef=settings.value_coef,
                entropy_coef=settings.entropy_coef,
            )
            if settings.stop_kl is not None and loss.approx_kl > settings.stop_kl:
                return steps
            gradient_step(learner, loss.total, settings.max_grad_norm)
            steps.append(_detached(loss))
    return steps


def ppo_penalty_update(learner: Learner, batch: Batch, settings: Settings) -> list[PPOLoss]:
    """PPO-Penalty: the same passes, with −β·KL(old ‖ new) in place of the clip; β adapts once per rollout.

    Book: §13.3.2
    Source: Schulman et al. 2017 (arXiv:1707.06347), section 4
    """
    steps = []
    for _ in range(settings.k_epochs):
        for rows in minibatches(batch, settings.minibatch_size, learner.generator):
            logits, values = learner.network(rows.states)
            ratio = importance_ratio(action_logp(logits, rows.actions), rows.logp)
            if settings.whiten == "minibatch":
                rows = rows._replace(advantages=whiten(rows.advantages))
            kl = categorical_kl(rows.logits, logits)
            objective = kl_penalty_objective(ratio, rows.advantages, kl, learner.penalty.kl_coef)
            loss = _loss(-objective.mean(), logits, values, rows, settings)
            gradient_step(learner, loss.total, settings.max_grad_norm)
            steps.append(_detached(loss))
    with torch.no_grad():
        learner.penalty.update(categorical_kl(batch.logits, learner.network.logits(batch.states)).mean().item())
    return steps


def trpo_update(learner: Learner, batch: Batch, settings: Settings) -> list[PPOLoss]:
    """TRPO: one natural-gradient step of the policy inside KL ≤ target_kl, then k_epochs of value regression.

    The critic needs a trunk of its own: fitting a shared one would move the policy out of the trust region again.

    Book: §13.3.1
    Source: Schulman et al. 2015 (arXiv:1502.05477)
    """
    if settings.whiten == "minibatch":
        batch = batch._replace(advantages=whiten(batch.advantages))
    network = learner.network

    def surrogate_mean() -> Tensor:
        ratio = importance_ratio(action_logp(network.logits(batch.states), batch.actions), batch.logp)
        return surrogate(ratio, batch.advantages).mean()

    def kl_mean() -> Tensor:
        return categorical_kl(batch.logits, network.logits(batch.states)).mean()

    trpo_step(network.policy_parameters(), surrogate_mean, kl_mean, max_kl=settings.target_kl)
    with torch.no_grad():
        policy_loss = -surrogate_mean()
    steps = []
    for _ in range(settings.k_epochs):
        for rows in minibatches(batch, settings.minibatch_size, learner.generator):
            logits, values = network(rows.states)
            loss = _loss(policy_loss, logits.detach(), values, rows, settings)
            gradient_step(learner, loss.total, settings.max_grad_norm)
            steps.append(_detached(loss))
    return steps


def a2c_update(learner: Learner, batch: Batch, settings: Settings) -> list[PPOLoss]:
    """A2C: one gradient step on E[log π·Â] over the whole rollout, then the data are thrown away.

    Book: §13.1.4
    Source: Mnih et al. 2016 (arXiv:1602.01783)
    """
    advantages = whiten(batch.advantages) if settings.whiten == "minibatch" else batch.advantages
    return _policy_gradient_step(learner, batch, advantages, settings)


def reinforce_update(learner: Learner, batch: Batch, settings: Settings) -> list[PPOLoss]:
    """REINFORCE: one gradient step on E[log π·G_t], or with a baseline on E[log π·(G_t − V)].

    Unless settings.whiten is none the weights are whitened over the rollout, which subtracts their mean: then even
    plain REINFORCE has a baseline, a constant one.

    Book: §13.1.3; §13.1.4
    Source: Williams 1992
    """
    if len(batch.actions) == 0:
        return []
    weights = batch.advantages if settings.whiten == "none" else whiten(batch.advantages)
    return _policy_gradient_step(learner, batch, weights, settings)


def _policy_gradient_step(learner: Learner, batch: Batch, weights: Tensor, settings: Settings) -> list[PPOLoss]:
    logits, values = learner.network(batch.states)
    policy_loss = policy_gradient_loss(action_logp(logits, batch.actions), weights)
    loss = _loss(policy_loss, logits, values, batch, settings)
    gradient_step(learner, loss.total, settings.max_grad_norm)
    return [_detached(loss)]


def _loss(policy_loss: Tensor, logits: Tensor, values: Tensor, rows: Batch, settings: Settings) -> PPOLoss:
    """policy + c_v·½E[(V − R̂)²] − c_e·E[H], with the same statistics as `ppo_loss`."""
    value_loss = clipped_value_loss(values, rows.values, rows.returns, settings.eps_clip_value)
    entropy = categorical_entropy(logits).mean()
    total = policy_loss + settings.value_coef * value_loss - settings.entropy_coef * entropy
    with torch.no_grad():
        ratio = importance_ratio(action_logp(logits, rows.actions), rows.logp)
        statistics = ratio_statistics(ratio, rows.advantages, settings.eps_clip)
    return PPOLoss(total, policy_loss, value_loss, entropy, *statistics)


def _detached(loss: PPOLoss) -> PPOLoss:
    return PPOLoss(*(x.detach() for x in loss))


UPDATES = {
    "reinforce": reinforce_update,
    "reinforce-baseline": reinforce_update,
    "a2c": a2c_update,
    "trpo": trpo_update,
    "ppo-penalty": ppo_penalty_update,
    "ppo": ppo_update,
}
