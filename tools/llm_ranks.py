"""The reference runs of chapter 10: one training on one process, on two ranks at each stage, and killed and resumed.

`tools/make_data.py --only llm_ranks` runs them and writes data/llm_ranks/. All on the CPU, with the preset `tiny`.
"""

import csv
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ppo_lab.llm.checkpoint import checkpoints
from ppo_lab.run_folder import METRICS

ITERATIONS, CHECKPOINT_EVERY, KILLED_AFTER = 12, 4, 9
TIMEOUT = 300  # seconds of one run
STAGES = (0, 1, 2, 3)
# What repeats on one machine: no times, no memory.
COLUMNS = ("iteration", "score", "gold", "kl_per_response", "kl_per_token", "policy_loss", "value_loss", "entropy")
COLUMNS += ("approx_kl", "clip_fraction", "ratio_deviation", "grad_norm", "critic_grad_norm", "explained_variance")
COLUMNS += ("response_length", "updates")
Rows = list[dict[str, str]]


def runs() -> dict[str, list[str]]:
    """The straight runs by the name of their table, with their flags; `stage…` are those on two ranks."""
    return {"one_process": [], **{f"stage{stage}": ["--zero-stage", str(stage)] for stage in STAGES}}


def start(name: str, flags: list[str], folder: Path) -> subprocess.Popen:
    """Start the command of chapter 10, under torchrun unless it is the run of one process."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *([] if name == "one_process" else launcher), "-m", "ppo_lab.llm.run"]
    command += ["--preset", "tiny", "--device", "cpu", "--iterations", str(ITERATIONS), *flags, "--out", str(folder)]
    log = open(folder.with_suffix(".log"), "ab")  # noqa: SIM115
    return subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=log, stderr=log)


def finish(process: subprocess.Popen, folder: Path) -> Rows:
    """Wait for a run and read its metrics. Raises RuntimeError with the end of its output if it failed."""
    if process.wait(timeout=TIMEOUT):
        raise RuntimeError(folder.with_suffix(".log").read_text(encoding="utf-8")[-2000:])
    return read_metrics(folder)


def read_metrics(folder: Path) -> Rows:
    """The rows that a run has written so far, every digit of them."""
    path = folder / METRICS
    if not path.exists():
        return []
    with open(path, newline="", encoding="utf-8") as file:
        return [{name: row[name] for name in COLUMNS} for row in csv.DictReader(file)]


def kill_and_resume(folder: Path) -> Rows:
    """The run at stage 3, ended by kill -9 after the ninth iteration and resumed from the checkpoint after the eighth.

    Raises RuntimeError if it was killed too late or too early to show anything.
    """
    flags = ["--zero-stage", "3", "--checkpoint-every", str(CHECKPOINT_EVERY)]
    process = start("killed", flags, folder)
    deadline = time.monotonic() + TIMEOUT
    while len(read_metrics(folder)) < KILLED_AFTER and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    kill(process)
    left = [int(path.name) for path in checkpoints(folder)]
    if process.returncode == 0 or left != [4, 8]:
        raise RuntimeError(f"killed at the wrong moment: checkpoints {left}, exit code {process.returncode}")
    return finish(start("killed", [*flags, "--resume"], folder), folder)


def kill(process: subprocess.Popen) -> None:
    """kill -9 of a launcher and then of its ranks, which it has no time to tell."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.kill()
    process.wait()
    for child in children:
        os.kill(int(child), signal.SIGKILL)


def execute() -> dict[str, Rows]:
    """All runs, one after the other; the rows of each table by its name."""
    with tempfile.TemporaryDirectory() as temporary:
        tables = {}
        for name, flags in runs().items():
            folder = Path(temporary) / name
            tables[name] = finish(start(name, flags, folder), folder)
            print(f"  {name}: KL {float(tables[name][-1]['kl_per_response']):.4f}", flush=True)
        tables["resumed"] = kill_and_resume(Path(temporary) / "resumed")
        print(f"  resumed: {'equal to' if tables['resumed'] == tables['stage3'] else 'differs from'} the straight run")
    return tables
