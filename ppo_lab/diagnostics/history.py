"""The record of a run as columns of numbers, from rows in memory or from a CSV file."""

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from ppo_lab.run_folder import METRICS

NAN = math.nan
# The columns that a rule reads; all others may hold anything.
COLUMNS = (
    "advantage_std",
    "approx_kl",
    "clip_fraction",
    "critic_grad_norm",
    "empty",
    "entropy",
    "episode_return",
    "explained_variance",
    "first_approx_kl",
    "gold",
    "grad_norm",
    "kl_coef",
    "kl_per_response",
    "memory_gb",
    "memory_limit_gb",
    "policy",
    "policy_loss",
    "ratio_deviation",
    "repetitive",
    "response_length",
    "sampler_kl",
    "score",
    "seconds_generate",
    "seconds_score",
    "seconds_update",
    "unfinished",
    "updates",
    "value_loss",
)


class History:
    """The numbers of one run: history["approx_kl"] is a list with one float per row, nan where the row has none.

    iterations: what the rows call themselves; their places, from 0, if they do not say. stretch: a number per row, the
    same for rows between which none is left out. In the record of a control run the value loss is called `value`; here
    it is `value_loss` in both.

    Book: §13.8
    """

    def __init__(self, columns: dict[str, list[float]], iterations: list[int]):
        self.columns = columns
        self.iterations = iterations
        self.stretch = _stretches(iterations)
        self.missing = [NAN] * len(iterations)

    def __getitem__(self, name: str) -> list[float]:
        if name not in COLUMNS:
            raise KeyError(name)
        return self.columns.get(name, self.missing)

    def __len__(self) -> int:
        return len(self.iterations)


def read_history(history: "Iterable[Mapping[str, Any]] | str | Path | History") -> History:
    """Rows of metrics, numbers or texts, or the path of a CSV file or of a run folder, as a History; one stays itself.

    A missing, empty or nan cell is nan. Raises ValueError, naming file, line and column, for a text that is no number
    in a column that a rule reads, for a line with more cells than the header, and for iterations that are not whole or
    do not rise: a table of several runs must be taken apart first; for a file without rows, or with no column that a
    rule reads; and for anything else than rows or a path. Raises OSError for a file that cannot be read.

    Book: §13.8
    """
    if isinstance(history, History):
        return history
    if isinstance(history, str | Path):
        rows, where = _record(Path(history))
    else:
        rows, where = _rows(history), []
    names = {name for row in rows for name in row}
    wanted = [name for name in COLUMNS if name in names]
    columns = {name: [_number(row.get(name), name, i, where) for i, row in enumerate(rows)] for name in wanted}
    # A study's table has a column `value` too, the setting that it varies.
    if "value_loss" not in names and {"value", "policy"} <= names:
        columns["value_loss"] = [_number(row.get("value"), "value", i, where) for i, row in enumerate(rows)]
    return History(columns, _iterations(rows, where))


def _rows(history: Any) -> list[Mapping[str, Any]]:
    rows = list(history) if isinstance(history, Iterable) and not isinstance(history, Mapping | bytes) else None
    if rows is None or not all(isinstance(row, Mapping) for row in rows):
        raise ValueError(f"history must be rows of metrics or a path, got {history!r:.100}")
    return rows


def _record(path: Path) -> tuple[list[dict[str, str]], list[str]]:
    """The rows of a file or a run folder, and where each one stands."""
    if "\0" in str(path):
        raise ValueError(f"history must be rows of metrics or a path, got {str(path)!r}")
    path = path / METRICS if path.is_dir() else path
    rows, lines = read_csv(path)
    if not rows:
        raise ValueError(f"{path} holds no iterations")
    if not set(COLUMNS) & set(rows[0]):
        raise ValueError(f"{path} has none of the columns that a rule reads (score, kl_per_response, approx_kl, …)")
    return rows, [f"{path}, line {line}" for line in lines]


def read_csv(path: Path) -> tuple[list[dict[str, str]], list[int]]:
    """The rows of a CSV file as texts, and the lines where they end. Raises like `read_history`."""
    # A byte order mark, as spreadsheets write it, is no part of the first column's name.
    with open(path, newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        try:
            rows, lines = [], []
            for row in reader:
                if None in row:
                    raise ValueError(f"{path}, line {reader.line_num}: more cells than the header has columns")
                if list(row.values()) == list(row):
                    raise ValueError(f"{path}, line {reader.line_num}: a second header: two runs in one file")
                rows.append(row)
                lines.append(reader.line_num)
        except (csv.Error, UnicodeDecodeError) as error:
            raise ValueError(f"{path}, line {reader.line_num + 1}: not a CSV file: {error}") from error
    return rows, lines


def _number(value: Any, name: str, i: int, where: list[str]) -> float:
    if type(value) is float:
        return value
    if value is None or value == "":
        return NAN
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError) as error:
        place = where[i] if where else f"row {i}"
        raise ValueError(f"{place}, column {name}: {value!r:.80} is not a number") from error


def _iterations(rows: Sequence[Mapping[str, Any]], where: list[str]) -> list[int]:
    """What the rows call themselves, checked; their places if one of them does not say."""
    numbers = [_number(row.get("iteration"), "iteration", i, where) for i, row in enumerate(rows)]
    before = -math.inf
    for i, number in enumerate(numbers):
        place = where[i] if where else f"row {i}"
        # Beyond 2⁵³ not every whole number is a float.
        if not (math.isnan(number) or (number.is_integer() and abs(number) < 2**53)):
            raise ValueError(f"{place}: iteration must be a whole number, got {number}")
        if number <= before:
            raise ValueError(f"{place}: iteration {number:.0f} follows {before:.0f}: a history is one run, in order")
        before = before if math.isnan(number) else number
    if any(map(math.isnan, numbers)):
        return list(range(len(rows)))
    return [int(number) for number in numbers]


def _stretches(iterations: list[int]) -> list[int]:
    """A new number wherever the iterations leap by more than they usually do: a record may hold every fourth."""
    gaps = [after - before for before, after in pairwise(iterations)]
    usual = median(gaps) if gaps else 1
    numbers = [0] * len(iterations)
    for i, gap in enumerate(gaps, start=1):
        numbers[i] = numbers[i - 1] + (gap > usual)
    return numbers
