"""Begin and resume an agent's run in a folder: config.json, checkpoint.safetensors (see `checkpoint`), metrics."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ppo_lab.control.algorithms import Learner
from ppo_lab.control.checkpoint import CHECKPOINT, load_checkpoint, save_checkpoint, save_config
from ppo_lab.control.config import Settings
from ppo_lab.run_folder import METRICS, check_free, cut_metrics, locked

if TYPE_CHECKING:
    from ppo_lab.control.train import Progress


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
