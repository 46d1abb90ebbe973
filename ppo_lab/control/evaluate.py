"""Measure an agent over whole episodes.

python -m ppo_lab.control.evaluate runs/lander --episodes 100
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from ppo_lab.command import Parser, run_command
from ppo_lab.control.checkpoint import load_network
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
    Raises ValueError for episodes < 1, a seed out of range, a network of another environment's shape, and like
    `make_envs`.
    """
    if episodes < 1:
        raise ValueError(f"episodes must be at least 1, got {episodes}")
    check_seed(seed)
    envs = make_envs(env_id, min(num_envs, episodes))
    check_fits(network, env_id, envs.state_dim, envs.action_dim)
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


def check_seed(seed: int) -> None:
    """Raise ValueError for a seed that torch or an environment could not take."""
    if not 0 <= seed < 2**63:
        raise ValueError(f"seed must be 0 or more and less than 2^63, got {seed}")


def check_fits(network: PPONetwork, env_id: str, state_dim: int, action_dim: int) -> None:
    """Raise ValueError unless a network takes an environment's states and gives its actions."""
    own = network.feature[0].in_features, network.actor_head.out_features
    if own != (state_dim, action_dim):
        raise ValueError(
            f"network takes {own[0]} numbers and has {own[1]} actions, {env_id} has {state_dim} and {action_dim}"
        )


def make_parser() -> Parser:
    """The flags of the command."""
    parser = Parser(
        prog="python -m ppo_lab.control.evaluate",
        description="Measure the agent of a run, or any folder that holds config.json and checkpoint.safetensors.",
        epilog="The greedy return (most probable action) and the sampled one (as in training) are two scores.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of the agent")
    parser.add_argument("--episodes", type=int, default=100, metavar="N", help="whole episodes to play")
    parser.add_argument("--sampled", action="store_true", help="draw actions from the policy instead of the best one")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="fixes the episodes and the sampled actions")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""

    def command() -> None:
        flags = make_parser().parse_args(arguments)
        torch.set_num_threads(1)
        network, settings = load_network(flags.run)
        returns = evaluate(network, settings.env_id, flags.episodes, seed=flags.seed, sampled=flags.sampled)
        mean, deviation = returns.mean(), returns.std()
        actions = "sampled" if flags.sampled else "greedy"
        print(f"{settings.env_id}, {settings.algorithm}, {actions} actions, seed {flags.seed}")
        print(f"mean {mean:.1f}, standard deviation {deviation:.1f}, minimum {returns.min():.1f}")
        print(f"return {mean:.1f} ± {deviation:.1f} over {len(returns)} episodes")

    return run_command("evaluate", command)


if __name__ == "__main__":
    sys.exit(main())
