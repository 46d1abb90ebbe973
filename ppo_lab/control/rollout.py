"""One collection loop for every algorithm: collect → score."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ppo_lab.control.envs import Envs
from ppo_lab.control.networks import PPONetwork


class Rollout(NamedTuple):
    """N environments × T steps, as they happened. `mask` is False at the steps that only reset an environment.

    states [N, T+1, state_dim]: states[:, t+1] is the state that transition t led to, before any reset.
    actions [N, T] int, rewards [N, T], terminated, truncated, mask [N, T] bool.
    """

    states: Tensor
    actions: Tensor
    rewards: Tensor
    terminated: Tensor
    truncated: Tensor
    mask: Tensor


class Scores(NamedTuple):
    """What the policy and the critic say of a rollout, without gradient. logits [N, T, A], the others [N, T]."""

    logits: Tensor
    logp: Tensor
    values: Tensor
    next_values: Tensor


def sample_actions(logits: Tensor, noise: Tensor) -> Tensor:
    """Actions drawn from softmax(logits): argmax(logits − log E) with E ~ Exp(1), the Gumbel-max trick.

    logits, noise [..., A]; returns [...] int. Far faster for small batches than torch.multinomial.
    """
    return (logits - noise.log()).argmax(-1)


def action_logp(logits: Tensor, actions: Tensor) -> Tensor:
    """log π(a|s) in nats of actions [...] under logits [..., A]."""
    return logits.log_softmax(-1).gather(-1, actions.unsqueeze(-1)).squeeze(-1)


@torch.no_grad()
def collect(
    envs: Envs, network: PPONetwork, states: np.ndarray, n_steps: int, generator: torch.Generator
) -> tuple[Rollout, np.ndarray]:
    """Step N environments n_steps times with the network's policy; returns the rollout and the states to go on from.

    states [N, state_dim] is where the environments stand now. Values are not needed to act, so none are computed here:
    `score` does it afterwards in one large batch.
    """
    n, noise_shape = envs.num_envs, (n_steps, envs.num_envs, envs.action_dim)
    noise = torch.empty(noise_shape).exponential_(generator=generator)
    all_states = np.empty((n_steps + 1, n, envs.state_dim), dtype=np.float32)
    actions = np.empty((n_steps, n), dtype=np.int64)
    rewards = np.empty((n_steps, n), dtype=np.float32)
    flags = np.empty((3, n_steps, n), dtype=bool)
    all_states[0] = states
    for t in range(n_steps):
        logits = network.logits(torch.from_numpy(all_states[t]))
        actions[t] = sample_actions(logits, noise[t]).numpy()
        step = envs.step(actions[t])
        all_states[t + 1] = step.states
        rewards[t] = step.rewards
        flags[:, t] = step.terminated, step.truncated, step.valid
    time_last = [torch.from_numpy(x.T.copy()) for x in (actions, rewards, *flags)]
    return Rollout(torch.from_numpy(all_states).transpose(0, 1).contiguous(), *time_last), all_states[-1]


@torch.no_grad()
def score(network: PPONetwork, rollout: Rollout) -> Scores:
    """Log-probabilities of the taken actions and values of all states, by one forward pass.

    next_values[:, t] = V(s_{t+1}) of the state that transition t led to, before any reset.
    """
    logits, values = network(rollout.states)
    logits = logits[:, :-1]
    return Scores(logits, action_logp(logits, rollout.actions), values[:, :-1], values[:, 1:])
