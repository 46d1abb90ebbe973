"""The runs behind chapter 08: every scenario of ppo_lab/llm/failures.py, failing, cured, and with its book_cures.

`tools/make_data.py` runs them and writes data/llm/failures.csv.
"""

from dataclasses import asdict, dataclass
from typing import Any

import torch

from ppo_lab.llm.failures import SCENARIOS, Scenario, run_scenario

SEEDS = range(3)
KEY = ("scenario", "variant", "seed")
HEALTHY, FAILURE, CURE = "healthy", "failure", "cure"
ALL = {HEALTHY: Scenario(HEALTHY, row="", shows="nothing", symptom=lambda rows: False, iterations=33), **SCENARIOS}


@dataclass(frozen=True)
class Run:
    """One training run. variant: healthy, failure, cure, or the name of one of the scenario's book_cures."""

    scenario: str
    variant: str
    seed: int


def variants(scenario: str) -> list[str]:
    """What a scenario is run with."""
    return [HEALTHY] if scenario == HEALTHY else [FAILURE, CURE, *SCENARIOS[scenario].book_cures]


def runs() -> list[Run]:
    """The preset as it is, then every scenario with all its variants."""
    return [Run(name, variant, seed) for name in ALL for variant in variants(name) for seed in SEEDS]


def execute(run: Run) -> list[dict[str, Any]]:
    """Train; every row with the name of the run in front."""
    torch.set_num_threads(1)
    scenario = ALL[run.scenario]
    book_cure = run.variant if run.variant in scenario.book_cures else None
    rows = run_scenario(scenario, seed=run.seed, cured=run.variant == CURE, book_cure=book_cure)
    return [{**asdict(run), **row} for row in rows]


def same_columns(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows, each with the columns of all of them, empty where a run has no such number: an estimate has few."""
    names = dict.fromkeys(name for row in rows for name in row)
    return [{name: row.get(name) for name in names} for row in rows]


def describe(rows: list[dict[str, Any]]) -> str:
    """A finished run in one line."""
    shown = "symptom" if ALL[rows[-1]["scenario"]].symptom(rows) else "no symptom"
    return "{scenario}, {variant}, seed {seed}: ".format(**rows[-1]) + shown
