"""The studies behind chapter 07: which runs each one consists of, and how a run becomes rows of a table.

`tools/make_data.py` runs them and writes data/llm/.
"""

import copy
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from studies import label
from transformers import PreTrainedTokenizerBase

from ppo_lab.files import data_path
from ppo_lab.llm.config import CRITICS, PPOSettings, load_preset, make_settings
from ppo_lab.llm.experience import Experience, collect, score
from ppo_lab.llm.ppo import judged_columns, kl_per_response, train
from ppo_lab.llm.reviews import judge
from ppo_lab.llm.roles import Roles, make_roles

SEEDS = range(3)
LONG = 50
EVERY = 4
# Answers for the final rows: prompts that no run trains on, with noise that no iteration of training has.
FINAL_ANSWERS, FINAL_NOISE = 512, 2**41
JUDGED = ("score", "gold", "positive", "grammatical", "repetitive")
MEASURED = ("kl_per_response", "entropy", "response_length", "value_loss", "explained_variance", "clip_fraction")
MEASURED += ("approx_kl", "ratio_max", "grad_norm", "critic_grad_norm", "advantage_std", "updates", "kl_coef")
KEY = ("study", "trick", "value", "seed", "iteration")
CURVE_COLUMNS = (*KEY, *JUDGED, *MEASURED, "kl_to_start")
FINAL_COLUMNS = (*KEY, *JUDGED, "response_length", "kl_to_start", "kl_coef")


@dataclass(frozen=True)
class Run:
    """One training run: `trick` is what the study varies, `value` what this run has of it.

    unit: the scores, and the critic's first values with them, are in units so many times smaller; critic: where the
    critic starts.
    """

    study: str
    trick: str
    value: str
    settings: PPOSettings
    unit: float = 1.0
    critic: str = "reward"


def tiny(**changes: Any) -> PPOSettings:
    """The settings of the preset `tiny`, some of them changed."""
    return replace(make_settings(load_preset("tiny")).ppo, **changes)


def over_seeds(
    study: str, trick: str, value: str, *, unit: float = 1.0, critic: str = "reward", **changes: Any
) -> list[Run]:
    """A run per seed."""
    return [Run(study, trick, value, tiny(seed=seed, **changes), unit, critic) for seed in SEEDS]


def vary(study: str, trick: str, values: Iterable[Any], **changes: Any) -> list[Run]:
    """A run per value of the setting that is called like the trick, and per seed."""
    return [run for value in values for run in over_seeds(study, trick, label(value), **{trick: value}, **changes)]


def llm_kl_coef() -> list[Run]:
    """The price of a nat: without one the proxy is climbed past the point where the gold score turns."""
    return vary("kl_coef", "kl_coef", (0.0, 0.05, 0.1, 0.2), iterations=LONG)


def llm_adaptive_kl() -> list[Run]:
    """Three first β, one target. The horizon is one batch, so β can move by a fifth in each iteration."""
    adaptive = {"adaptive_kl": True, "target_kl": 3.0, "kl_horizon": 128.0, "iterations": LONG}
    return vary("adaptive_kl", "kl_coef", (0.005, 0.1, 2.0), **adaptive)


TRICKS: dict[str, tuple[Any, ...]] = {
    "whiten_advantages": (False,),
    "whiten_scores": (True,),
    "whiten_rewards": (True,),
    "reward_clip": (None,),
    "eps_clip_value": (None,),
    "max_grad_norm": (1e9,),
    "eps_clip_high": (0.3,),
    "dual_clip": (3.0,),
    "entropy_coef": (0.01,),
    "critic_warmup": (5,),
    "warmup_iterations": (0,),
    "stop_kl": (0.002,),
}
KL_LOSS = 0.1


def llm_tricks() -> list[Run]:
    """Every trick, one changed at a time; the trick "tuned" is the run with none changed."""
    runs = over_seeds("tricks", "tuned", "tuned")
    for trick, values in TRICKS.items():
        runs += vary("tricks", trick, values)
    for kind in ("k1", "k2", "k3"):
        in_loss = {"kl_coef": 0.0, "kl_loss_coef": KL_LOSS, "kl_loss_kind": kind}
        runs += over_seeds("tricks", "kl_loss", kind, **in_loss)
    return runs


UNIT = 50.0


def llm_reward_units() -> list[Run]:
    """Scores as the reward model gives them, and in units 50 times smaller.

    reward_scale: β stays, so its price in scores changes. eps_clip_value: β and the clip of the rewards are converted
    with the scores, so only the critic can tell the difference.
    """
    runs = over_seeds("reward_units", "reward_scale", "scaled")
    runs += over_seeds("reward_units", "reward_scale", "raw", scale_rewards=False, reward_clip=None)
    runs += over_seeds("reward_units", "reward_scale", "raw x50", unit=UNIT, scale_rewards=False, reward_clip=None)
    base = tiny()
    converted = {"kl_coef": UNIT * base.kl_coef, "reward_clip": UNIT * base.reward_clip}
    for value in (0.2, None):
        runs += over_seeds("reward_units", "eps_clip_value", label(value), unit=UNIT, eps_clip_value=value, **converted)
    return runs


def llm_updates() -> list[Run]:
    """How many gradient steps an iteration makes of its 128 answers: passes and minibatches."""
    return vary("updates", "k_epochs", (1, 2, 4, 8)) + vary("updates", "minibatch_size", (16, 64, 128))


def llm_reference_refresh() -> list[Run]:
    """A reference that follows the actor every 8 iterations, against one that stays."""
    return vary("reference_refresh", "refresh_reference_every", (0, 8), iterations=LONG)


def llm_critic() -> list[Run]:
    """A critic of its own, from the reward model or from the actor, and a value head on the actor (chapter 06)."""
    return [run for critic in CRITICS for run in over_seeds("critic", "critic", critic, critic=critic)]


STUDIES: dict[str, Callable[[], list[Run]]] = {
    study.__name__: study
    for study in (
        llm_kl_coef,
        llm_adaptive_kl,
        llm_tricks,
        llm_reward_units,
        llm_updates,
        llm_reference_refresh,
        llm_critic,
    )
}


def execute(run: Run) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Train and measure: a row every few iterations, and the row of the finished policy."""
    torch.set_num_threads(1)
    roles, prompts = make_roles(make_settings({**load_preset("tiny"), "critic": run.critic, **asdict(run.settings)}))
    if run.unit != 1:
        use_unit(roles, run.unit)
    # A refresh overwrites the reference, so that the way from the start is measured from a copy.
    first = replace(roles, reference=copy.deepcopy(roles.reference))
    last = run.settings.iterations - 1
    curve = []
    for row, experience in train(prompts, roles, run.settings, judge=judge):
        if row["iteration"] % EVERY == 0 or row["iteration"] == last:
            measured = {name: row[name] for name in (*JUDGED, *MEASURED)}
            # With a shared trunk `score` reads log π_old again, off the actor that has been updated in between.
            again = replace(score(experience, first, run.settings), old_logp=experience.old_logp)
            curve.append({**_key(run, row["iteration"]), **measured, "kl_to_start": kl_per_response(again)})
    return curve, final_row(run, first, row["kl_coef"])


def use_unit(roles: Roles, unit: float) -> None:
    """Let the reward model, and the critic that began as its copy, speak in units `unit` times smaller."""
    roles.reward_mean *= unit
    with torch.no_grad():
        for weight in (roles.reward.model.score.weight, *roles.critic.module.head.parameters()):
            weight *= unit


def final_row(run: Run, first: Roles, kl_coef: float) -> dict[str, Any]:
    """What the finished policy answers to held-out prompts, and how far it is from where it began."""
    answers: Experience = collect(held_out(first.tokenizer, FINAL_ANSWERS), first, run.settings, FINAL_NOISE)
    return {
        **_key(run, run.settings.iterations),
        **judged_columns(answers, first, judge),
        "response_length": float(answers.mask.sum(-1).float().mean()),
        "kl_to_start": kl_per_response(answers),
        "kl_coef": kl_coef,
    }


def held_out(tokenizer: PreTrainedTokenizerBase, n_prompts: int) -> list[list[int]]:
    """So many held-out prompts, from the first one on and then again."""
    prompts = [tokenizer(line).input_ids for line in read_lines("reviews/prompts_held_out.txt")]
    return [prompts[i % len(prompts)] for i in range(n_prompts)]


def read_lines(name: str) -> list[str]:
    """The lines of a text file under data/."""
    return data_path(name).read_text(encoding="utf-8").splitlines()


def describe(final: dict[str, Any]) -> str:
    """A finished run in one line."""
    return "{study} {trick}={value} seed {seed}: gold {gold:.2f}, kl {kl_to_start:.1f}".format(**final)


def _key(run: Run, iteration: int) -> dict[str, Any]:
    return {
        "study": run.study,
        "trick": run.trick,
        "value": run.value,
        "seed": run.settings.seed,
        "iteration": iteration,
    }
