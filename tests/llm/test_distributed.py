"""The command on two ranks: the same run as one process, that survives being killed. gloo on the CPU.

Starting two ranks takes ten seconds, so most of these tests look at runs that a few launches have made.
"""

import csv
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from ppo_lab.files import digest
from ppo_lab.llm import run as command
from ppo_lab.llm.checkpoint import checkpoints

pytestmark = pytest.mark.distributed

HERE = Path(__file__).parent
LIMIT = 180
MACHINE = ("tokens_per_second", "memory_gb")
# 31 answers do not divide by two ranks; minibatches of 9, 9, 9 and 4 rows are 5, 5, 5 and 2 a rank, 2 at a time.
BASE = "--iterations 3 --batch_size 31 --minibatch_size 9 --micro_batch_size 2 --max_new_tokens 12 --seed 3"
BASE = [*BASE.split(), "--sample_every", "1", "--n_samples", "31", "--no-scale_rewards", "--judge", "none"]
# Each is a run on two ranks; the first word says which run of one process it must equal.
EQUAL = {
    "stage0": "plain --zero_stage 0",
    "stage1": "plain --zero_stage 1",
    "stage2": "plain --zero_stage 2",
    "stage3": "plain --zero_stage 3",
    "layerwise": "plain --zero_stage 3 --no-gather_for_generation",
    "offload2": "plain --zero_stage 2 --offload_optimizer",
    "offload3": "plain --zero_stage 3 --offload_optimizer --offload_reference --gradient_checkpointing",
    "options0": "options --zero_stage 0",
    "options3": "options --zero_stage 3",
    "stopped2": "stopped --zero_stage 2",
    "stopped3": "stopped --zero_stage 3",
    "short3": "short --zero_stage 3 --no-gather_for_generation",
    "lora3": "lora --zero_stage 3",
}
ALONE = {
    "plain": "",
    "options": "--critic shared --adaptive_kl --refresh_reference_every 2 --scale_rewards --eval_every 2 "
    "--eval_prompts reviews/prompts_held_out.txt --whiten_rewards --entropy_coef 0.01",
    "stopped": "--stop_kl 0.002 --critic_warmup 1 --k_epochs 3 --warmup_iterations 0",
    "short": "--batch_size 3 --minibatch_size 2 --stop_token the",
    "lora": "--lora_rank 4",
}
GROUPS = (
    ("stage0", "stage1", "stage2", "stage3", "offload2", "offload3"),
    ("layerwise", "options0", "options3", "stopped2", "stopped3", "short3", "lora3"),
)


def environment(**more):
    """One thread per rank, this source, nothing of a launcher that started the tests."""
    kept = {name: x for name, x in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    path = os.pathsep.join([str(HERE.parent.parent), str(HERE), kept.get("PYTHONPATH", "")])
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "DS_ACCELERATOR": "cpu", **more}


def launch(*words, seconds=LIMIT, **more):
    """Run a command to its end; returns its exit code, what it printed, and how long it took.

    It has a process group of its own, which is killed whole if the time is over.
    """
    started = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *map(str, words)],
        env=environment(**more),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        pytest.fail(f"still running after {seconds} s:\n{output}")
    return process.returncode, output, time.perf_counter() - started


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
RUN = ("-m", "ppo_lab.llm.run")


def rows_of(path):
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def numbers_of(folder):
    """metrics.csv without what tells of the machine."""
    return [
        {name: float(x) for name, x in row.items() if name not in MACHINE and not name.startswith("seconds_")}
        for row in rows_of(folder / "metrics.csv")
    ]


def weights_of(folder):
    return load_file(folder / "actor" / "model.safetensors")


def flags_of(name, folder):
    base = name if name in ALONE else EQUAL[name].split()[0]
    own = [] if name in ALONE else EQUAL[name].split()[1:]
    return [*BASE, *ALONE[base].split(), *own, "--out", str(folder / name)]


def has_peft():
    try:
        import peft  # noqa: F401
    except ImportError:
        return False
    return True


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def alone(folder):
    """The runs of one process, in this one."""
    for name in ALONE:
        if name != "lora" or has_peft():
            assert command.main(flags_of(name, folder)) == 0
    return folder


def launched(folder, names):
    runs = [flags_of(name, folder) for name in names if name != "lora3" or has_peft()]
    code, output, _ = launch(*TORCHRUN, HERE / "launched.py", RUNS=json.dumps(runs))
    assert code == 0, output
    return output


@pytest.fixture(scope="module")
def together(folder):
    """The runs of two ranks, in two launches; what they printed."""
    return [launched(folder, names) for names in GROUPS]


# --- the same run on any number of ranks


@pytest.mark.parametrize("name", EQUAL)
def test_two_ranks_make_the_run_of_one_process(alone, together, name):
    if name == "lora3" and not has_peft():
        pytest.skip("needs the package peft")
    base = EQUAL[name].split()[0]
    expected, found = numbers_of(alone / base), numbers_of(alone / name)
    assert len(found) == 3
    for row, own in zip(expected, found, strict=True):
        assert own == pytest.approx(row, abs=1e-4, rel=1e-4, nan_ok=True)
    samples = [[(r["prompt"], r["response"]) for r in rows_of(alone / x / "samples.csv")] for x in (base, name)]
    assert samples[0] == samples[1]
    weights, own_weights = weights_of(alone / base), weights_of(alone / name)
    assert weights.keys() == own_weights.keys()
    for key, tensor in weights.items():
        torch.testing.assert_close(own_weights[key], tensor, atol=1e-5, rtol=0)
