"""Train an agent: the loop that every algorithm shares."""

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from ppo_lab.clip import PPOLoss
from ppo_lab.control.algorithms import UPDATES, Batch, Learner, estimate, make_learner
from ppo_lab.control.config import Settings
from ppo_lab.control.envs import Envs, make_envs
from ppo_lab.control.rollout import collect, score
from ppo_lab.diagnostics import explained_variance

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
