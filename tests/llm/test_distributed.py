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
MACHINE = ("tokens_per_second", "memory_gb", "memory_limit_gb")
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
    "groups0": "groups --zero_stage 0",
    "groups3": "groups --zero_stage 3",
    "greedy3": "greedy --zero_stage 3 --no-gather_for_generation",
}
ALONE = {
    "plain": "",
    "options": "--critic shared --adaptive_kl --refresh_reference_every 2 --scale_rewards --eval_every 2 "
    "--eval_prompts reviews/prompts_held_out.txt --whiten_rewards --entropy_coef 0.01",
    "stopped": "--stop_kl 0.00008 --critic_warmup 1 --k_epochs 3 --warmup_iterations 0 --lr 1e-4",
    "short": "--batch_size 3 --minibatch_size 2 --stop_token the",
    "lora": "--lora_rank 4",
    # Groups of three over two ranks, minibatches and micro-batches: not one of them divides by three.
    "groups": "--advantage grpo --group_size 3 --batch_size 33 --kl_coef 0 --kl_loss_coef 0.1 --kl_loss_kind k3",
    "greedy": "--advantage remax --group_size 3 --batch_size 9 --scale_rewards",
}
GROUPS = (
    ("stage0", "stage1", "stage2", "stage3", "offload2", "offload3"),
    ("layerwise", "options0", "options3", "stopped2", "stopped3", "short3", "lora3"),
    ("groups0", "groups3", "greedy3"),
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


def longest_by_rank(folder, iteration):
    """The most words of an answer on each rank: it answers every other prompt."""
    rows = [row for row in rows_of(folder / "samples.csv") if int(row["iteration"]) == iteration]
    words = [len(row["response"].split()) for row in rows]
    return max(words[0::2]), max(words[1::2])


def test_B27_B36_one_rank_has_an_empty_answer_and_the_others_wait_for_no_one(alone, together):
    # The first iteration of the short runs: rank 1 has one prompt, and its answer ends at once.
    assert longest_by_rank(alone / "short3", 0) == (4, 1)
    assert numbers_of(alone / "short3")[0]["empty"] == pytest.approx(1 / 3)


def test_the_update_that_stopped_early_is_one_of_these(alone):
    # All three epochs of four minibatches while the critic warms up, fewer after.
    updates = [row["updates"] for row in numbers_of(alone / "stopped")]
    assert updates[0] == 12 and all(0 < n < 12 for n in updates[1:])


def test_the_evaluation_and_the_report_are_written_once(alone, together):
    own, expected = (rows_of(alone / name / "evaluation.csv") for name in ("options3", "options"))
    assert own == expected and len(own) == 1
    for name in ("stage0", "stage3"):
        names = sorted(path.name for path in (alone / name).iterdir() if not path.name.startswith("events"))
        expected = [".lock", "actor", "config.json", "metrics.csv", "report.md", "report.png", "samples.csv"]
        assert names == expected
        assert (alone / name / "report.md").read_text().startswith("# 3 iterations of models/sft\n")


def test_only_the_first_rank_speaks(together):
    for output, names in zip(together, GROUPS, strict=True):
        lines = [line for line in output.splitlines() if line.strip()]
        n_runs = len(names) - ("lora3" in names and not has_peft())
        # Two ranks on one machine generate slowly, layer by layer above all, and the first one says so.
        slow = [line for line in lines if line.startswith("iteration ") and ": slow rollout: " in line]
        lines = [line for line in lines if line not in slow]
        assert len(slow) <= n_runs and len(lines) == 2 * n_runs, output
        assert all(line.startswith(("memory per process: ", "3 iterations, ")) for line in lines), output


@pytest.mark.parametrize("name", ["stage3", "lora3"])
def test_B40_the_export_of_stage_3_loads_anywhere_and_answers(alone, together, name):
    if name == "lora3" and not has_peft():
        pytest.skip("needs the package peft")
    assert all(tensor.numel() for tensor in weights_of(alone / name).values())
    lm, report = AutoModelForCausalLM.from_pretrained(alone / name / "actor", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    tokenizer = AutoTokenizer.from_pretrained(alone / name / "actor")
    ids = tokenizer("the style of this novel", return_tensors="pt").input_ids
    answer = lm.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False)
    assert tokenizer.decode(answer[0], skip_special_tokens=True).startswith("the style of this novel ")
    assert answer.shape[1] > ids.shape[1]


# --- killed and resumed


def assert_the_same_run(folder, straight):
    """Bit for bit, with the column of the judge more."""
    for row, expected in zip(numbers_of(folder), numbers_of(straight), strict=True):
        assert {name: row[name] for name in expected} == expected
    assert digest(weights_of(folder)) == digest(weights_of(straight))


def saved(folder):
    return [int(path.name) for path in checkpoints(folder)]


# The first rank asks the judge twice an iteration, for the metrics and for the samples.
RESUMABLE = ["--judge", "launched:ending_judge", "--checkpoint_every", "1"]


def test_two_ranks_are_ended_killed_and_go_on_as_if_nothing_had_happened(alone, together, capsys, monkeypatch):
    folder = alone / "resumed3"
    flags = [*flags_of("stage3", alone)[:-1], folder, *RESUMABLE]
    code, output, _ = launch(*TORCHRUN, *RUN, *flags, ENDS_AT="0", ENDS_BY="SIGTERM")
    assert code != 0 and "exitcode  : 143" in output
    assert output.count("run: ended by SIGTERM after 1 iterations; --resume goes on from there\n") == 1, output
    assert saved(folder) == [1] and not (folder / "actor").exists()

    code, output, seconds = launch(*TORCHRUN, *RUN, *flags, "--resume", "auto", ENDS_AT="2", ENDS_BY="SIGKILL")
    assert code != 0 and "Signal 9 (SIGKILL)" in output and seconds < 100
    assert saved(folder) == [1, 2] and not (folder / "actor").exists()

    # B40: one process cannot go on with what two ranks have saved, and says so before it loads anything.
    monkeypatch.syspath_prepend(str(HERE))
    assert command.main([*map(str, flags), "--resume"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert err.startswith("run: ") and "was saved by 2 ranks and cannot go on with 1: start as many" in err

    code, output, _ = launch(*TORCHRUN, *RUN, *flags, "--resume")
    assert code == 0, output
    assert saved(folder) == [2, 3]
    assert_the_same_run(folder, alone / "stage3")


@pytest.mark.parametrize("name", ["stage1", "options3"])
def test_every_stage_and_a_reference_that_has_moved_go_on_from_a_checkpoint(alone, together, continued, name):
    assert_the_same_run(alone / f"{name}_again", alone / name)


@pytest.fixture(scope="module")
def continued(alone):
    """Runs of two ranks that end after two iterations and are then made longer."""
    runs = []
    for name in ("stage1", "options3"):
        flags = [*flags_of(name, alone)[:-1], str(alone / f"{name}_again"), "--checkpoint_every", "2"]
        runs += [[*flags, "--iterations", "2"], [*flags, "--iterations", "3", "--resume"]]
    code, output, _ = launch(*TORCHRUN, HERE / "launched.py", RUNS=json.dumps(runs))
    assert code == 0, output


def test_one_process_that_is_killed_goes_on_as_if_nothing_had_happened(alone, monkeypatch):
    folder = alone / "resumed"
    flags = [*flags_of("plain", alone)[:-1], str(folder), *RESUMABLE]
    code, output, _ = launch(*RUN, *flags, ENDS_AT="2", ENDS_BY="SIGKILL")
    assert code == -signal.SIGKILL, output
    assert saved(folder) == [1] and len(rows_of(folder / "metrics.csv")) == 1
    monkeypatch.syspath_prepend(str(HERE))
    assert command.main([*flags, "--resume"]) == 0
    assert_the_same_run(folder, alone / "plain")


# --- launchers, and what ends a run


def test_what_fails_on_one_rank_ends_all_and_is_told(folder):
    flags = [*BASE, "--reward", "launched:failing_reward", "--critic", "actor", "--zero_stage", "3"]
    code, output, seconds = launch(*TORCHRUN, *RUN, *flags, "--out", folder / "failed")
    assert code != 0 and seconds < 60 + 30
    assert "RuntimeError: the judge of rank 1 has left the court" in output
    assert not (folder / "failed" / "actor").exists()


def test_B39_stage_2_needs_no_launcher_and_no_port_of_its_own(alone):
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            taken.bind(("127.0.0.1", 29500))
            taken.listen()
        except OSError:
            pass  # Somebody else has it, which serves as well.
        folder = alone / "python2"
        flags = [*flags_of("plain", alone)[:-1], folder, "--zero_stage", "2", "--checkpoint_every", "3"]
        code, output, _ = launch(*RUN, *flags)
    assert code == 0, output
    for row, expected in zip(numbers_of(folder), numbers_of(alone / "plain"), strict=True):
        assert row == pytest.approx(expected, abs=1e-4, rel=1e-4, nan_ok=True)
    # A damaged checkpoint of DeepSpeed is named, and nothing is changed by it.
    [damaged] = (folder / "checkpoints" / "000003" / "critic").glob("*model_states.pt")
    damaged.write_bytes(damaged.read_bytes()[:1000])
    code, output, _ = launch(*RUN, *flags, "--resume", "--iterations", "4")
    assert code == 2 and output.count("\n") == 2, output
    assert "000003/critic is missing, damaged or does not fit" in output
    assert len(rows_of(folder / "metrics.csv")) == 3


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def test_deepspeed_launches_it_as_well_and_bfloat16_is_near(alone):
    words = ["--num_accelerators", "2", "--master_port", free_port(), "--module", "ppo_lab.llm.run"]
    flags = [*flags_of("plain", alone)[:-1], alone / "bf16", "--zero_stage", "2", "--bf16"]
    code, output, _ = launch("-m", "deepspeed.launcher.runner", *words, *flags, "--iterations", "2")
    assert code == 0, output
    first, expected = numbers_of(alone / "bf16")[0], numbers_of(alone / "plain")[0]
    # 31 answers, of which rounding has turned some into others.
    for name, margin in {"score": 0.5, "value_loss": 0.5, "entropy": 0.1, "response_length": 1.0}.items():
        assert first[name] == pytest.approx(expected[name], abs=margin), name
    # The sampler, with its cache, rounds otherwise than the training pass.
    assert 0 < first["sampler_kl"] < 1e-3 and first["ratio_deviation"] < 0.1
