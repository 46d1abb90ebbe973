"""The studies behind chapter 05: which runs each one consists of, and how a run becomes rows of a table.

`tools/make_data.py` runs them and writes data/control/.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from ppo_lab.control.algorithms import Learner, make_learner
from ppo_lab.control.config import ALGORITHMS, Settings, tuned
from ppo_lab.control.envs import make_envs
from ppo_lab.control.evaluate import evaluate
from ppo_lab.control.train import Progress, train

CARTPOLE, LANDER = "CartPole-v1", "LunarLander-v3"
SEEDS = range(5)
LANDER_SEEDS = range(3)
LANDER_STEPS = 200_000
# Training uses seeds derived from small numbers; no evaluation ever shows the agent an episode it was trained on.
EVALUATION_SEED = 1000
FINAL_EPISODES = 100
CURVE_EPISODES = {CARTPOLE: 25, LANDER: 10}
MEASURED = ("episode_return", "entropy", "approx_kl", "clip_fraction", "explained_variance")
CURVE_COLUMNS = ("study", "env_id", "algorithm", "setting", "value", "seed", "steps", *MEASURED, "sampled_return")
FINAL_COLUMNS = (*CURVE_COLUMNS[:7], "greedy_return", "greedy_return_min", "sampled_return")


@dataclass(frozen=True)
class Run:
    """One training run of a study: `setting` is what the study varies, `value` what this run has of it."""

    study: str
    setting: str
    value: str
    settings: Settings
    points: int = 25


def label(value: Any) -> str:
    """A setting's value as it stands in the tables."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    return value if isinstance(value, str) else f"{value:g}"


def vary(
    study: str, base: Settings, setting: str, values: Iterable[Any], seeds: Iterable[int] = SEEDS, points: int = 25
) -> list[Run]:
    """A run per value of one setting and per seed, all else as in base."""
    return [
        Run(study, setting, label(value), replace(base, **{setting: value, "seed": seed}), points)
        for value in values
        for seed in seeds
    ]


def algorithms() -> list[Run]:
    """Every algorithm with its tuned settings, equal steps: the learning curves of chapter 05."""
    return [
        Run("algorithms", "algorithm", algorithm, tuned(CARTPOLE, algorithm, seed=seed), 40)
        for algorithm in ALGORITHMS
        for seed in SEEDS
    ]


def learning_rate() -> list[Run]:
    """How wide is each algorithm's working range of step sizes? (A07 §1)

    TRPO's policy step is sized by target_kl, and lr only moves its critic: both are varied.
    """
    rates = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
    runs = []
    for algorithm in ("reinforce-baseline", "a2c", "trpo", "ppo-penalty", "ppo"):
        runs += vary("learning_rate", tuned(CARTPOLE, algorithm), "lr", rates, points=10)
    limits = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)
    return runs + vary("learning_rate", tuned(CARTPOLE, "trpo"), "target_kl", limits, points=10)


EPS_CLIP = (0.05, 0.1, 0.2, 0.3, 0.5, 10.0)


def eps_clip() -> list[Run]:
    """The table of A07 §2.4, and beyond it: 10 is no clip at all.

    At the tuned learning rate and at one five times as large.
    """
    base = tuned(CARTPOLE)
    harsh = replace(base, lr=5 * base.lr)
    return vary("eps_clip", base, "eps_clip", EPS_CLIP) + vary("eps_clip_harsh", harsh, "eps_clip", EPS_CLIP)


def k_epochs() -> list[Run]:
    """How often the same data are used."""
    return vary("k_epochs", tuned(CARTPOLE), "k_epochs", (1, 4, 10, 20, 40))


def minibatch_size() -> list[Run]:
    """Transitions per gradient step; the largest is the whole rollout."""
    base = tuned(CARTPOLE)
    return vary("minibatch_size", base, "minibatch_size", (16, 64, 256, base.num_envs * base.n_steps))


def entropy_coef() -> list[Run]:
    """A07 §3: does the policy stop exploring and get stuck? At the tuned learning rate and at a harsh one."""
    base, values = tuned(CARTPOLE), (0.0, 0.01, 0.1)
    harsh = replace(base, lr=0.1)
    return vary("entropy_coef", base, "entropy_coef", values) + vary(
        "entropy_coef_harsh", harsh, "entropy_coef", values
    )


DETAILS: dict[str, tuple[Any, ...]] = {
    "orthogonal": (False,),
    "whiten": ("rollout", "none"),
    "anneal_lr": (False,),
    "eps_clip_value": (0.2,),
    "shared_trunk": (True,),
    "max_grad_norm": (1e6,),
    "reward_scale": (0.05,),
}


def details() -> list[Run]:
    """Implementation details, one changed at a time; the value "tuned" is the run with none changed."""
    base = tuned(CARTPOLE)
    runs = [Run("details", "tuned", "tuned", replace(base, seed=seed)) for seed in SEEDS]
    for setting, values in DETAILS.items():
        # "off" alone would not tell one detail from another.
        runs += [replace(run, value=f"{setting} {run.value}") for run in vary("details", base, setting, values)]
    return runs


def book_script() -> list[Run]:
    """The book's script (A07 §6.1) in its own settings, full batch of 2000 against minibatches of 64.

    Its 300 episodes make three updates, and so does book_script; book_script_50k goes on to 50,000 steps.
    value_coef 1.0 is the book's 0.5·MSE. A rollout of 2000 steps holds fewer transitions, for resets take one each.
    """
    base = Settings(
        num_envs=1,
        n_steps=2000,
        lr=3e-4,
        anneal_lr=False,
        k_epochs=10,
        value_coef=1.0,
        whiten="rollout",
        shared_trunk=True,
        orthogonal=False,
    )
    three_updates = replace(base, total_steps=5_000)
    return vary("book_script", three_updates, "minibatch_size", (2000, 64)) + vary(
        "book_script_50k", base, "minibatch_size", (2000, 64)
    )


def lander_eps_clip() -> list[Run]:
    """The table of A07 §2.4 on a harder task, with fewer steps than it needs to be solved."""
    base = tuned(LANDER, total_steps=LANDER_STEPS)
    return vary("eps_clip", base, "eps_clip", EPS_CLIP, LANDER_SEEDS)


def lander() -> list[Run]:
    """Reference runs: PPO with its tuned settings until LunarLander is solved."""
    return [Run("lander", "algorithm", "ppo", tuned(LANDER, seed=seed), 50) for seed in LANDER_SEEDS]


STUDIES: dict[str, Callable[[], list[Run]]] = {
    study.__name__: study
    for study in (
        algorithms,
        learning_rate,
        eps_clip,
        k_epochs,
        minibatch_size,
        entropy_coef,
        details,
        book_script,
        lander_eps_clip,
        lander,
    )
}


def execute(run: Run) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Train and measure: the rows of the learning curve and the row of the finished agent."""
    torch.set_num_threads(1)
    settings = run.settings
    envs = make_envs(settings.env_id, settings.num_envs)
    learner = make_learner(envs.state_dim, envs.action_dim, settings)
    curve = [_curve_row(run, learner, row) for row in _thinned(train(settings, learner, envs, Progress()), run)]
    envs.close()
    measure = partial(evaluate, learner.network, settings.env_id, FINAL_EPISODES, seed=EVALUATION_SEED)
    # One environment per episode: far fewer, larger steps.
    greedy, sampled = (measure(sampled=sampled, num_envs=FINAL_EPISODES) for sampled in (False, True))
    final = {
        **_key(run, curve[-1]["steps"]),
        "greedy_return": greedy.mean(),
        "greedy_return_min": greedy.min(),
        "sampled_return": sampled.mean(),
    }
    return curve, final


def describe(final: dict[str, Any]) -> str:
    """A finished run in one line."""
    return "{study} {algorithm} {setting}={value} seed {seed}: greedy {greedy_return:.1f}".format(**final)


def _thinned(rows: Iterable[dict[str, float]], run: Run) -> Iterator[dict[str, float]]:
    """The first row at or after each of run.points equally spaced step counts."""
    spacing = run.settings.total_steps / run.points
    passed = 0
    for row in rows:
        if row["steps"] // spacing > passed:
            passed = row["steps"] // spacing
            yield row


def _curve_row(run: Run, learner: Learner, row: dict[str, float]) -> dict[str, Any]:
    env_id = run.settings.env_id
    sampled = evaluate(learner.network, env_id, CURVE_EPISODES[env_id], seed=EVALUATION_SEED, sampled=True)
    return {
        **_key(run, row["steps"]),
        **{name: row[name] for name in MEASURED},
        "sampled_return": sampled.mean(),
    }


def _key(run: Run, steps: float) -> dict[str, Any]:
    return {
        "study": run.study,
        "env_id": run.settings.env_id,
        "algorithm": run.settings.algorithm,
        "setting": run.setting,
        "value": run.value,
        "seed": run.settings.seed,
        "steps": int(steps),
    }
