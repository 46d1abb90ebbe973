"""Measure an agent over whole episodes."""

import numpy as np
import torch

from ppo_lab.control.envs import make_envs
from ppo_lab.control.networks import PPONetwork
from ppo_lab.control.rollout import sample_actions


@torch.no_grad()
def evaluate(
    network: PPONetwork, env_id: str, episodes: int = 100, *, seed: int = 0, sampled: bool = False, num_envs: int = 25
) -> np.ndarray:
    """Returns of whole episodes [episodes], greedy (the most probable action) or sampled from the policy.

    Episode i is the (i // num_envs)-th one of environment i % num_envs, so that short episodes are not preferred to
    long ones. Own random numbers: a training run is the same with and without evaluations in between.
    Raises ValueError for episodes < 1 and like `make_envs`.
    """
    if episodes < 1:
        raise ValueError(f"episodes must be at least 1, got {episodes}")
    envs = make_envs(env_id, min(num_envs, episodes))
    generator = torch.Generator().manual_seed(seed)
    per_env = -(-episodes // envs.num_envs)
    returns = np.zeros((per_env, envs.num_envs))
    done = np.zeros(envs.num_envs, dtype=int)
    states = envs.reset(seed)
    while (done < per_env).any():
        logits = network.logits(torch.from_numpy(states))
        if sampled:
            actions = sample_actions(logits, torch.empty(logits.shape).exponential_(generator=generator))
        else:
            actions = logits.argmax(-1)
        step = envs.step(actions.numpy())
        states, running = step.states, done < per_env
        returns[done[running], np.flatnonzero(running)] += step.rewards[running]
        done += (step.terminated | step.truncated) & running
    envs.close()
    return returns.reshape(-1)[:episodes]
