"""Record an agent as an animated GIF, without a screen.

python -m ppo_lab.control.record runs/lander --out lander.gif
"""

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from ppo_lab.command import Parser, run_command
from ppo_lab.control.checkpoint import load_network
from ppo_lab.control.envs import make_env, make_envs
from ppo_lab.control.evaluate import check_fits, check_seed
from ppo_lab.control.networks import PPONetwork
from ppo_lab.control.rollout import sample_actions
from ppo_lab.files import TEMPORARY

# CartPole and LunarLander run at 50 steps a second.
MILLISECONDS_PER_STEP = 20
COLOURS = 32


@torch.no_grad()
def record_episode(
    network: PPONetwork, env_id: str, seed: int = 0, *, sampled: bool = False, every: int = 1, width: int = 300
) -> tuple[np.ndarray, float]:
    """Play one episode and draw it: frames [F, height, width, 3] uint8, and the return of the episode.

    Frames are the first state, every `every`-th one after it, and the last. Greedy actions, or sampled from the policy.
    Raises ValueError for every < 1, width < 1, a seed out of range, an environment that cannot be drawn or does not fit
    the network, and like `make_envs`.
    """
    for name, value in (("every", every), ("width", width)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    check_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    check_drawable(network, env_id)
    with closing(make_env(env_id, render_mode="rgb_array")) as env:
        state, _ = env.reset(seed=seed)
        frames, total, step, done = [_frame(env, env_id, width)], 0.0, 0, False
        while not done:
            logits = network.logits(torch.from_numpy(state.reshape(-1).astype(np.float32)))
            noise = torch.empty(logits.shape).exponential_(generator=generator)
            action = int(sample_actions(logits, noise) if sampled else logits.argmax())
            state, reward, terminated, truncated, _ = env.step(action + env.action_space.start)
            total, step, done = total + float(reward), step + 1, terminated or truncated
            if done or step % every == 0:
                frames.append(_frame(env, env_id, width))
    return np.stack(frames), total


def check_drawable(network: PPONetwork, env_id: str) -> None:
    """Raise ValueError unless a network can act in an environment and the environment can be drawn without a screen."""
    with closing(make_envs(env_id, 1)) as envs:
        check_fits(network, env_id, envs.state_dim, envs.action_dim)
        modes = envs.envs.metadata.get("render_modes", [])
    if "rgb_array" not in modes:
        raise ValueError(f"{env_id} cannot be drawn: it has no rgb_array render mode")


def save_gif(frames: np.ndarray, path: Path, *, every: int = 1) -> None:
    """Write frames [F, height, width, 3] as an endless GIF, at 50 environment steps a second.

    The last frame stays for a second. The file appears when it is whole.
    """
    images = [Image.fromarray(frame).quantize(COLOURS, dither=Image.Dither.NONE) for frame in frames]
    durations = [MILLISECONDS_PER_STEP * every] * (len(images) - 1) + [1000]
    temporary = path.with_name(path.name + TEMPORARY)
    images[0].save(
        temporary, format="GIF", save_all=True, append_images=images[1:], duration=durations, loop=0, optimize=True
    )
    os.replace(temporary, path)


def _frame(env: Any, env_id: str, width: int) -> np.ndarray:
    try:
        frame = env.render()
    except Exception as error:
        # Gymnasium loads its drawing package only here, and wraps the ImportError in an error of its own.
        if not isinstance(error.__cause__, ImportError):
            raise
        raise ValueError(f"{env_id} cannot be drawn: {error}") from error
    if not isinstance(frame, np.ndarray) or frame.ndim != 3:
        raise ValueError(f"{env_id} cannot be drawn: its render() returns {type(frame).__name__}, not an image")
    height = max(1, round(frame.shape[0] * width / frame.shape[1]))
    return np.asarray(Image.fromarray(frame).resize((width, height), Image.Resampling.BOX))


def make_parser() -> Parser:
    """The flags of the command."""
    parser = Parser(
        prog="python -m ppo_lab.control.record",
        description="Record the agent of a run, or any folder that holds config.json and checkpoint.safetensors.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of the agent")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.gif", help="the recording")
    parser.add_argument("--force", action="store_true", help="replace the file if it exists")
    parser.add_argument("--episodes", type=int, default=1, metavar="N", help="episodes, one after the other")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the first episode; the next add 1")
    parser.add_argument("--sampled", action="store_true", help="draw actions from the policy instead of the best one")
    parser.add_argument("--every", type=int, default=2, metavar="N", help="steps per frame")
    parser.add_argument("--width", type=int, default=300, metavar="N", help="pixels")
    return parser


def check_out(path: Path, *, force: bool) -> None:
    """Raise ValueError unless a recording may be written to path."""
    if path.suffix.lower() != ".gif":
        raise ValueError(f"{path} must end in .gif")
    if not path.parent.is_dir():
        raise ValueError(f"{path.parent} is not a folder")
    if path.is_dir() or (path.exists() and not force):
        raise ValueError(f"{path} exists: choose another --out, or --force to replace a file")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""

    def command() -> None:
        flags = make_parser().parse_args(arguments)
        os.environ["SDL_VIDEODRIVER"] = "dummy"
        torch.set_num_threads(1)
        check_out(flags.out, force=flags.force)
        if flags.episodes < 1:
            raise ValueError(f"episodes must be at least 1, got {flags.episodes}")
        network, settings = load_network(flags.run)
        episodes = [
            record_episode(network, settings.env_id, seed, sampled=flags.sampled, every=flags.every, width=flags.width)
            for seed in range(flags.seed, flags.seed + flags.episodes)
        ]
        frames = np.concatenate([frames for frames, _ in episodes])
        save_gif(frames, flags.out, every=flags.every)
        returns = ", ".join(f"{episode_return:.1f}" for _, episode_return in episodes)
        actions = "sampled" if flags.sampled else "greedy"
        print(
            f"{flags.out}: {len(frames)} frames, {flags.out.stat().st_size / 1000:.0f} kB, {actions} return {returns}"
        )

    return run_command("record", command)


if __name__ == "__main__":
    sys.exit(main())
