"""A run folder: who may write to it, and its metrics.

config.json, checkpoint.safetensors (see `checkpoint`), metrics.csv with one row per iteration, and TensorBoard's event
files with the same numbers.
"""

import csv
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppo_lab.control.algorithms import Learner
from ppo_lab.control.checkpoint import (
    CHECKPOINT,
    CONFIG,
    TEMPORARY,
    load_checkpoint,
    replace_file,
    save_checkpoint,
    save_config,
)
from ppo_lab.control.config import Settings

if TYPE_CHECKING:
    from ppo_lab.control.train import Progress

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


def check_free(folder: Path) -> None:
    """Raise ValueError unless a new run may begin in a folder: it does not exist, or it is empty."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file: a run needs a folder")
    names = {path.name for path in folder.iterdir()} if folder.exists() else set()
    if CONFIG in names:
        raise ValueError(f"{folder} already holds a run: go on with --resume, or choose another --out")
    # What a run killed in its first instant leaves behind.
    names -= {LOCK, CONFIG + TEMPORARY}
    if names:
        raise ValueError(f"{folder} is not empty and holds no run (there is {min(names)}): choose another --out")


@contextmanager
def new_run(folder: Path, settings: Settings, learner: Learner, progress: "Progress") -> Iterator[None]:
    """Begin a run in a folder and hold it: write config.json and the first checkpoint. Raises like `check_free`."""
    check_free(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder):
        # Another process may have come and gone since the first look, which was needed to lock nothing foreign.
        check_free(folder)
        save_config(folder, settings)
        save_checkpoint(folder, settings, learner, progress)
        yield


@contextmanager
def resumed_run(folder: Path, settings: Settings, learner: Learner, progress: "Progress") -> Iterator[None]:
    """Hold a run's folder and put learner and progress where its last checkpoint left them.

    Rows of metrics.csv written after that checkpoint are cut off: they will be written again. Raises ValueError like
    `load_checkpoint`, and for metrics that do not reach as far as the checkpoint.
    """
    with locked(folder):
        if (folder / CHECKPOINT).exists() or (folder / METRICS).exists():
            load_checkpoint(folder, settings, learner, progress)
        else:
            # Killed between the configuration and the first checkpoint: nothing has happened yet.
            save_checkpoint(folder, settings, learner, progress)
        cut_metrics(folder / METRICS, progress.iteration)
        yield


def cut_metrics(path: Path, iterations: int) -> None:
    """Keep the header and the rows of the first iterations. Raises ValueError when they are not all there."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    kept = lines[: iterations + 1] if iterations else []
    numbers = [line.split(b",")[0] for line in kept[1:] if line.endswith(b"\n")]
    if numbers != [str(i + 1).encode() for i in range(iterations)]:
        raise ValueError(f"{path} does not hold the {iterations} rows that the checkpoint counts")
    replace_file(path, b"".join(kept))


class Metrics:
    """Writes rows of metrics to metrics.csv and to TensorBoard, from a number of environment steps on.

    A context manager: leaving it closes both. The columns are those of the first row.
    """

    def __init__(self, folder: Path, steps: int):
        # Loading TensorBoard takes a second, and the notebooks, which import this package, do not need it.
        from torch.utils.tensorboard import SummaryWriter

        self.file = open(folder / METRICS, "a", newline="", encoding="utf-8")  # noqa: SIM115
        # Ctrl-C may make the writing thread miss the call to end; it looks again after flush_secs, by default 120.
        self.events = SummaryWriter(str(folder), purge_step=steps + 1, flush_secs=1)

    def write(self, row: dict[str, Any]) -> None:
        """Append one row, at once: a killed process loses none."""
        row = {name: _plain(value) for name, value in row.items()}
        writer = csv.DictWriter(self.file, row.keys(), lineterminator="\n")
        if self.file.tell() == 0:
            writer.writeheader()
        writer.writerow(row)
        self.file.flush()
        for name, value in row.items():
            if name != "steps" and math.isfinite(value):
                self.events.add_scalar(name, value, row["steps"])

    def sync(self) -> None:
        """Wait until all rows are on the disk: a checkpoint must never count rows that could still be lost."""
        os.fsync(self.file.fileno())
        self.events.flush()

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(self, *exception: object) -> None:
        self.file.close()
        self.events.close()


def _plain(value: Any) -> int | float:
    """A number as Python writes it, whatever NumPy or torch type it came as; a bool as 0 or 1."""
    value = value.item() if hasattr(value, "item") else value
    return int(value) if isinstance(value, bool) else value
