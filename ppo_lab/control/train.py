"""Train an agent: the loop that every algorithm shares, and the command that runs it.

python -m ppo_lab.control.train --env-id LunarLander-v3 --out runs/lander
"""

import argparse
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from ppo_lab.clip import PPOLoss
from ppo_lab.command import Parser, run_command
from ppo_lab.control.algorithms import UPDATES, Batch, Learner, estimate, make_learner
from ppo_lab.control.checkpoint import load_config, save_checkpoint
from ppo_lab.control.command import add_settings_flags, given_settings
from ppo_lab.control.config import Settings, tuned
from ppo_lab.control.envs import Envs, make_envs
from ppo_lab.control.rollout import collect, score
from ppo_lab.control.run import new_run, resumed_run
from ppo_lab.diagnostics import explained_variance
from ppo_lab.diagnostics.watch import Watch
from ppo_lab.files import digest
from ppo_lab.run_folder import Metrics

RECENT = 100


@dataclass
class Progress:
    """How far a run has come: iterations and environment steps done, recent (return, length) of finished episodes."""

    iteration: int = 0
    steps: int = 0
    recent: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=RECENT))


def derived_seed(seed: int, iteration: int) -> int:
    """The seed of the fresh episodes started at an iteration: a hash of both, so that runs never share episodes."""
    return int(np.random.SeedSequence([seed, iteration]).generate_state(1)[0])


def train(settings: Settings, learner: Learner, envs: Envs, progress: Progress) -> Iterator[dict[str, float]]:
    """Learn until settings.total_steps; yields one row of metrics per iteration.

    collect → score → advantages → update. A checkpoint may be taken where `at_checkpoint` is true of the progress: from
    there on the run depends on the learner and the progress only, because every run, straight or resumed, then starts
    fresh episodes from a derived seed.
    """
    states = None
    while progress.steps < settings.total_steps:
        started = time.perf_counter()
        if states is None or at_checkpoint(settings, progress):
            states = envs.reset(derived_seed(settings.seed, progress.iteration))
        if settings.anneal_lr:
            learner.optimizer.param_groups[0]["lr"] = settings.lr * (1 - progress.steps / settings.total_steps)
        rollout, states = collect(envs, learner.network, states, settings.n_steps, learner.generator)
        scores = score(learner.network, rollout)
        batch = estimate(rollout, scores, settings)
        losses = UPDATES[settings.algorithm](learner, batch, settings)
        progress.iteration += 1
        new_steps = int(rollout.mask.sum())
        progress.steps += new_steps
        progress.recent.extend(envs.drain_episodes())
        speed = new_steps / (time.perf_counter() - started)
        yield {**metrics(progress, learner, batch, losses), "steps_per_second": speed}


def at_checkpoint(settings: Settings, progress: Progress) -> bool:
    """Whether a checkpoint is due: every settings.checkpoint_every iterations."""
    return progress.iteration % settings.checkpoint_every == 0


def metrics(progress: Progress, learner: Learner, batch: Batch, losses: list[PPOLoss]) -> dict[str, float]:
    """One row of metrics.csv: means over the update's gradient steps, the largest ratio, and the run's progress.

    episode_return and episode_length are means over the last 100 finished episodes; nan before the first one ends.
    explained_variance is that of the critic before the update.
    """
    mean = {name: _mean([getattr(loss, name) for loss in losses]) for name in PPOLoss._fields if name != "total"}
    episodes = np.array(progress.recent, dtype=float).reshape(-1, 2)
    return {
        "iteration": progress.iteration,
        "steps": progress.steps,
        "episode_return": float(episodes[:, 0].mean()) if len(episodes) else float("nan"),
        "episode_length": float(episodes[:, 1].mean()) if len(episodes) else float("nan"),
        **mean,
        "ratio_max": max((float(loss.ratio_max) for loss in losses), default=float("nan")),
        "explained_variance": float(explained_variance(batch.values, batch.returns)),
        "updates": len(losses),
        "kl_coef": learner.penalty.kl_coef,
        "lr": learner.optimizer.param_groups[0]["lr"],
    }


def _mean(values: list[torch.Tensor]) -> float:
    return float(torch.stack(values).mean()) if values else float("nan")


def train_agent(settings: Settings) -> tuple[Learner, list[dict[str, float]]]:
    """Train from scratch in memory; returns the learner and the rows of metrics. What the notebooks use."""
    envs = make_envs(settings.env_id, settings.num_envs)
    learner = make_learner(envs.state_dim, envs.action_dim, settings)
    rows = list(train(settings, learner, envs, Progress()))
    envs.close()
    return learner, rows


def train_in_folder(settings: Settings, folder: Path, *, resume: bool = False) -> str:
    """Train in a run folder: config.json, metrics.csv, TensorBoard events, checkpoint.safetensors.

    resume goes on from the last checkpoint, bit for bit as if the run had never stopped. Returns the closing line.
    Raises ValueError for a folder that cannot be used so, and like `make_envs`.
    """
    with closing(make_envs(settings.env_id, settings.num_envs)) as envs:
        learner = make_learner(envs.state_dim, envs.action_dim, settings)
        progress = Progress()
        with (resumed_run if resume else new_run)(folder, settings, learner, progress):
            if progress.steps >= settings.total_steps:
                return f"{folder} is finished: {progress.steps} steps, {_result(learner, progress)}"
            started, first_step = time.perf_counter(), progress.steps
            _train_and_record(settings, folder, learner, envs, progress)
            seconds = time.perf_counter() - started
    speed = (progress.steps - first_step) / seconds
    return f"{progress.steps} steps, {seconds:.1f} s, {speed:.0f} steps/s, {_result(learner, progress)}"


def _train_and_record(settings: Settings, folder: Path, learner: Learner, envs: Envs, progress: Progress) -> None:
    bar = tqdm(total=settings.total_steps, initial=progress.steps, unit=" steps", disable=None)
    watch = Watch(folder)
    with bar, Metrics(folder, progress.steps) as log:
        for row in train(settings, learner, envs, progress):
            log.write(row)
            watch.see(row)
            if at_checkpoint(settings, progress) or progress.steps >= settings.total_steps:
                log.sync()
                save_checkpoint(folder, settings, learner, progress)
            bar.set_postfix_str(f"return {row['episode_return']:.1f}, KL {row['approx_kl']:.4f}", refresh=False)
            bar.update(progress.steps - bar.n)


def _result(learner: Learner, progress: Progress) -> str:
    returns = [episode_return for episode_return, _ in progress.recent]
    mean = f"mean return of the last {len(returns)} episodes {np.mean(returns):.1f}" if returns else "no episode ended"
    return f"{mean}, parameters sha256 {digest(learner.network.state_dict())}"


def make_parser(arguments: Sequence[str] | None = None) -> Parser:
    """The flags of the command; arguments decide which defaults the help shows."""
    parser = Parser(
        prog="python -m ppo_lab.control.train",
        usage="%(prog)s --out FOLDER [--env-id NAME] [--algorithm NAME] [--seed N] [--resume] [setting ...]",
        description="Train an agent. The run folder gets config.json, metrics.csv, TensorBoard events and\n"
        "checkpoint.safetensors. A run that was stopped, even killed, goes on with --resume as if\n"
        "nothing had happened: the same numbers to the last bit.",
        epilog="examples:\n"
        "  python -m ppo_lab.control.train --out runs/cartpole\n"
        "  python -m ppo_lab.control.train --env-id LunarLander-v3 --seed 1 --out runs/lander\n"
        "  python -m ppo_lab.control.train --resume --out runs/lander\n"
        "  tensorboard --logdir runs\n\n"
        "The defaults shown are those of the --env-id and --algorithm given beside --help.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    run = parser.add_argument_group("the run")
    run.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="run folder; a new run needs a new one")
    run.add_argument("--resume", action="store_true", help="go on with the run in the folder, with its settings")
    run.add_argument("--threads", type=int, default=1, metavar="N", help="threads of torch (default: 1, fastest here)")
    add_settings_flags(parser, arguments)
    return parser


def resumed_settings(folder: Path, given: dict[str, Any]) -> Settings:
    """The settings of the run in a folder. Raises ValueError for a given one that differs: a run keeps its settings."""
    settings = load_config(folder)
    for name, value in given.items():
        kept = getattr(settings, name)
        if value != kept:
            raise ValueError(f"{name} is {kept} in {folder}, not {value}: a run keeps its settings, leave the flag out")
    return settings


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""

    def command() -> None:
        flags = make_parser(arguments).parse_args(arguments)
        if flags.threads < 1:
            raise ValueError(f"threads must be at least 1, got {flags.threads}")
        torch.set_num_threads(flags.threads)
        given = given_settings(flags)
        settings = resumed_settings(flags.out, given) if flags.resume else tuned(**{"env_id": Settings.env_id, **given})
        print(train_in_folder(settings, flags.out, resume=flags.resume))

    return run_command("train", command, interrupted="interrupted; --resume goes on from the last checkpoint")


if __name__ == "__main__":
    sys.exit(main())
