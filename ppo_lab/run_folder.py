"""A run folder: who may write to it, and its metrics.csv with the same numbers for TensorBoard."""

import csv
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ppo_lab.files import TEMPORARY, replace_file

CONFIG = "config.json"
METRICS = "metrics.csv"
LOCK = ".lock"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a run folder for this process alone. Raises ValueError when another process holds it.

    The operating system frees the lock when its process ends, however it ends. Windows has no such lock; there the
    folder is not guarded.
    """
    with open(folder / LOCK, "w") as file:
        if os.name == "posix":
            import fcntl

            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ValueError(f"{folder} is in use: another process is training in it") from error
        yield


def check_free(folder: Path, advice: str = "go on with --resume, or choose another --out") -> None:
    """Raise ValueError unless a new run may begin in a folder: it does not exist, or it is empty.

    advice: what the message recommends for a folder that holds a run.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file: a run needs a folder")
    names = {path.name for path in folder.iterdir()} if folder.exists() else set()
    if CONFIG in names:
        raise ValueError(f"{folder} already holds a run: {advice}")
    # What a run killed in its first instant leaves behind.
    names -= {LOCK, CONFIG + TEMPORARY}
    if names:
        raise ValueError(f"{folder} is not empty and holds no run (there is {min(names)}): choose another --out")


def cut_metrics(path: Path, iterations: int, first_number: int = 1) -> None:
    """Keep the header and the rows of the first iterations. Raises ValueError when they are not all there.

    first_number: what the first iteration is called.
    """
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    kept = lines[: iterations + 1] if iterations else []
    numbers = [line.split(b",")[0] for line in kept[1:] if line.endswith(b"\n")]
    if numbers != [str(i + first_number).encode() for i in range(iterations)]:
        raise ValueError(f"{path} does not hold the {iterations} rows that the checkpoint counts")
    if len({line.count(b",") for line in kept}) > 1:
        raise ValueError(f"{path} is damaged: its rows are not all as long as its header")
    replace_file(path, b"".join(kept))


class Metrics:
    """Writes rows of metrics to metrics.csv and to TensorBoard.

    axis: the column that TensorBoard counts along; start: what of it is done already, later events are dropped. A
    context manager: leaving it closes both. The columns are those of the first row in the file.
    """

    def __init__(self, folder: Path, start: int, axis: str = "steps"):
        # Loading TensorBoard takes a second, and the notebooks, which import this package, do not need it.
        from torch.utils.tensorboard import SummaryWriter

        self.axis = axis
        self.path = folder / METRICS
        self.columns = read_header(self.path)
        self.file = open(self.path, "a", newline="", encoding="utf-8")  # noqa: SIM115
        # Ctrl-C may make the writing thread miss the call to end; it looks again after flush_secs, by default 120.
        self.events = SummaryWriter(str(folder), purge_step=start + 1, flush_secs=1)

    def write(self, row: dict[str, Any]) -> None:
        """Append one row, at once: a killed process loses none. Raises ValueError for a row with other columns."""
        row = {name: _plain(value) for name, value in row.items()}
        if differing := set(row) ^ set(self.columns or row):
            raise ValueError(
                f"{self.path} has other columns than the next row, {', '.join(sorted(differing)[:5])}: it was begun by "
                "another version, or with another judge"
            )
        writer = csv.DictWriter(self.file, self.columns or list(row), lineterminator="\n")
        if not self.columns:
            self.columns = list(row)
            writer.writeheader()
        writer.writerow(row)
        self.file.flush()
        for name, value in row.items():
            if name != self.axis and math.isfinite(value):
                self.events.add_scalar(name, value, row[self.axis])

    def sync(self) -> None:
        """Wait until all rows are on the disk: a checkpoint must never count rows that could still be lost."""
        os.fsync(self.file.fileno())
        self.events.flush()

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(self, *exception: object) -> None:
        self.file.close()
        self.events.close()


def read_header(path: Path) -> list[str]:
    """The columns of a CSV file, none if it is not there or empty."""
    if not path.exists():
        return []
    with open(path, newline="", encoding="utf-8") as file:
        return next(csv.reader(file), [])


def _plain(value: Any) -> int | float:
    """A number as Python writes it, whatever NumPy or torch type it came as; a bool as 0 or 1."""
    value = value.item() if hasattr(value, "item") else value
    return int(value) if isinstance(value, bool) else value
