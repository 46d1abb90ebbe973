"""The stored studies of chapter 05, arranged for a figure: one array per name, one row per seed."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from ppo_lab.files import read_table

Row = dict[str, str | float]


def study_results(
    table: str, column: str = "greedy_return", *, by: str = "value", **where: Any
) -> dict[str, np.ndarray]:
    """What the finished agents of a study reached: name -> values [S], one per seed.

    table names data/control/TABLE_final.csv; column is the one to read, by the one whose entries become the names, in
    the order of the file. where keeps the rows with these entries only, say study="eps_clip", algorithm="ppo".
    Raises FileNotFoundError for a table that is not stored and ValueError if no row is left.
    """
    groups = _grouped(f"{table}_final", by, where)
    return {name: np.array([row[column] for row in rows]) for name, rows in groups}


def study_curves(
    table: str, column: str, *, by: str = "value", points: int = 50, **where: Any
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Learning curves of a study: name -> (steps [points], values [S, points]), one row per seed.

    table names data/control/TABLE.csv; the rest as in `study_results`. No two runs were measured at the same steps:
    each is interpolated in straight lines onto equally spaced ones that all runs of its name have passed.
    """
    return {name: _on_common_steps(rows, column, points) for name, rows in _grouped(table, by, where)}


def _grouped(file: str, by: str, where: dict[str, Any]) -> Iterator[tuple[str, list[Row]]]:
    groups: dict[str, list[Row]] = {}
    for row in read_table(f"control/{file}.csv"):
        if all(row[name] == value for name, value in where.items()):
            entry = row[by]
            groups.setdefault(f"{entry:g}" if isinstance(entry, float) else entry, []).append(row)
    if not groups:
        raise ValueError(f"where leaves no row of {file}.csv, got {where}")
    return iter(groups.items())


def _on_common_steps(rows: list[Row], column: str, points: int) -> tuple[np.ndarray, np.ndarray]:
    runs: dict[Any, list[Row]] = {}
    for row in rows:
        runs.setdefault(row["seed"], []).append(row)
    curves = [np.array([[row["steps"], row[column]] for row in run]).T for run in runs.values()]
    first, last = max(steps[0] for steps, _ in curves), min(steps[-1] for steps, _ in curves)
    common = np.linspace(first, last, points)
    return common, np.stack([np.interp(common, steps, values) for steps, values in curves])
