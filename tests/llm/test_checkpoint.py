"""Checkpoints: whole or not there at all, and a run that goes on as if it had never stopped."""

import csv
import json
import os
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import safetensors.torch

from ppo_lab.files import digest
from ppo_lab.llm import run as command
from ppo_lab.llm.checkpoint import checkpoints, load_checkpoint, read_state, save_checkpoint
from ppo_lab.llm.exact import tiny_language_model
from ppo_lab.llm.ppo import make_controller, train
from ppo_lab.stability import AdaptiveKLController

MACHINE = ("tokens_per_second", "memory_gb", "seconds_generate", "seconds_score", "seconds_update")


def numbers_of(row):
    return {name: float(x) for name, x in row.items() if name not in MACHINE}


def hashes(roles):
    engines = [engine for engine in (roles.actor, roles.critic) if engine is not None]
    weights = [digest(module.state_dict()) for module in (*(engine.module for engine in engines), roles.reference)]
    states = [engine.optimizer.state_dict()["state"] for engine in engines]
    flat = [{f"{i} {name}": x for i, state in one.items() for name, x in state.items()} for one in states]
    return weights + [digest(state) for state in flat]


# --- what is put back


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"critic": "shared"},
        {"adaptive_kl": True, "kl_coef": 0.2, "target_kl": 0.01, "kl_horizon": 20.0},
        {"refresh_reference_every": 1},
        {"scale_rewards": True, "lr": 1e-2},
    ],
    ids=["plain", "shared", "adaptive", "refreshed", "scaled"],
)
def test_a_run_goes_on_bit_for_bit(small, shake, tmp_path, changes):
    changes = {"iterations": 4, "lr": 1e-2, "warmup_iterations": 3, **changes}
    roles, prompts, settings = small(**changes)
    controller = make_controller(settings)
    straight = []
    for row, _ in train(prompts, roles, settings, controller=controller):
        straight.append(numbers_of(row))
        if row["iteration"] == 1:
            save_checkpoint(tmp_path, roles, controller, 2, keep=1)
    again, _, _ = small(**changes)
    # Whatever they start from, they end where the checkpoint says. The reference is made from the model itself, unless
    # it has moved.
    shake(again.actor.module)
    other = make_controller(settings)
    first = load_checkpoint(tmp_path / "checkpoints" / "000002", again, other)
    assert first == 2
    resumed = train(prompts, again, settings, controller=other, first_iteration=first)
    assert [numbers_of(row) for row, _ in resumed] == straight[2:]
    assert hashes(again) == hashes(roles)
    assert other.kl_coef == controller.kl_coef


def test_B35_the_coefficient_goes_on_from_where_it_was(small, tmp_path):
    roles, _, _ = small()
    controller = AdaptiveKLController(kl_coef=0.2, target_kl=6.0, horizon=10_000)
    for _ in range(4):
        controller.update(12.0, n_steps=256)
    assert controller.kl_coef == pytest.approx(0.204128, abs=1e-6)
    save_checkpoint(tmp_path, roles, controller, 4, keep=1)
    other = AdaptiveKLController(kl_coef=0.2, target_kl=6.0, horizon=10_000)
    load_checkpoint(tmp_path / "checkpoints" / "000004", roles, other)
    other.update(3.0, n_steps=256)
    assert other.kl_coef == pytest.approx(0.203083, abs=1e-6)


def test_the_units_of_the_scores_go_on(small, tmp_path):
    roles, _, settings = small()
    roles.reward_mean, roles.reward_std = 1 / 3, 2.5
    save_checkpoint(tmp_path, roles, make_controller(settings), 1, keep=1)
    other, _, _ = small()
    load_checkpoint(tmp_path / "checkpoints" / "000001", other, make_controller(settings))
    assert (other.reward_mean, other.reward_std) == (1 / 3, 2.5)


def test_the_newest_are_kept_and_are_listed_in_their_order(small, tmp_path):
    roles, _, settings = small()
    for iteration in (9, 10, 100):
        save_checkpoint(tmp_path, roles, make_controller(settings), iteration, keep=2)
    assert [path.name for path in checkpoints(tmp_path)] == ["000010", "000100"]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["000010", "000100"]
    assert sorted(path.name for path in checkpoints(tmp_path)[0].iterdir()) == ["actor", "critic", "state.json"]
    assert checkpoints(tmp_path / "nothing") == []


# --- a kill, a full disk


def kill_at(monkeypatch, number, error):
    """Let the number-th of the calls that change the disk fail; returns the list of those that were made."""
    made = []

    def guard(owner, name):
        original = getattr(owner, name)

        def guarded(*args, **kwargs):
            if len(made) == number:
                raise error
            made.append(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, guarded)

    for owner, name in ((os, "fsync"), (os, "replace"), (Path, "rename"), (Path, "mkdir"), (shutil, "rmtree")):
        guard(owner, name)
    return made


# rmtree of leftovers, mkdir; mkdir, fsync, replace of actor and critic; fsync, replace of the state; rmtree of the
# target, rename; rmtree of the oldest.
N_CALLS = 13


@pytest.mark.parametrize("number", range(N_CALLS))
def test_a_kill_at_any_moment_of_saving_leaves_a_checkpoint_that_loads(small, tmp_path, monkeypatch, number):
    roles, prompts, settings = small()
    controller = make_controller(settings)
    save_checkpoint(tmp_path, roles, controller, 1, keep=1)
    before = hashes(roles)
    list(train(prompts, roles, replace(settings, iterations=1)))
    after = hashes(roles)
    with monkeypatch.context() as patch:
        made = kill_at(patch, number, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            save_checkpoint(tmp_path, roles, controller, 2, keep=1)
    renamed = "rename" in made
    newest = checkpoints(tmp_path)[-1]
    again, _, _ = small()
    assert load_checkpoint(newest, again, controller) == (2 if renamed else 1)
    assert hashes(again)[:2] == (after if renamed else before)[:2]
    # What the kill has left is in nobody's way.
    save_checkpoint(tmp_path, roles, controller, 2, keep=1)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["000002"]


def test_those_are_all_the_moments(small, tmp_path, monkeypatch):
    roles, _, settings = small()
    save_checkpoint(tmp_path, roles, make_controller(settings), 1, keep=1)
    made = kill_at(monkeypatch, -1, KeyboardInterrupt())
    save_checkpoint(tmp_path, roles, make_controller(settings), 2, keep=1)
    assert len(made) == N_CALLS, made


@pytest.mark.parametrize(("number", "errno", "words"), [(3, 28, "No space left on device"), (1, 30, "Read-only file")])
def test_a_disk_that_is_full_or_read_only_leaves_the_last_one(small, tmp_path, monkeypatch, number, errno, words):
    roles, _, settings = small()
    save_checkpoint(tmp_path, roles, make_controller(settings), 1, keep=1)
    with monkeypatch.context() as patch:
        kill_at(patch, number, OSError(errno, os.strerror(errno)))
        with pytest.raises(OSError, match=words):
            save_checkpoint(tmp_path, roles, make_controller(settings), 2, keep=1)
    assert load_checkpoint(checkpoints(tmp_path)[-1], roles, make_controller(settings)) == 1


# --- what is refused


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"iteration": 1, "world_size": 1}', "\x00\x00"])
def test_a_damaged_state_is_named(small, tmp_path, text):
    roles, _, settings = small()
    save_checkpoint(tmp_path, roles, make_controller(settings), 1, keep=1)
    [checkpoint] = checkpoints(tmp_path)
    (checkpoint / "state.json").write_text(text)
    with pytest.raises(ValueError, match=r"000001/state\.json is damaged") as error:
        read_state(checkpoint, 1)
    assert "\n" not in str(error.value)


def test_B40_a_checkpoint_of_another_number_of_ranks_is_refused(small, tmp_path):
    roles, _, settings = small()
    save_checkpoint(tmp_path, roles, make_controller(settings), 1, keep=1)
    [checkpoint] = checkpoints(tmp_path)
    assert read_state(checkpoint, 1)["iteration"] == 1
    with pytest.raises(ValueError, match="000001 was saved by 1 ranks and cannot go on with 8: start as many"):
        read_state(checkpoint, 8)


@pytest.mark.parametrize("damage", ["cut", "gone", "empty", "text"])
def test_damaged_weights_are_named(small, tmp_path, damage):
    roles, _, settings = small()
    save_checkpoint(tmp_path, roles, make_controller(settings), 1, keep=1)
    [checkpoint] = checkpoints(tmp_path)
    path = checkpoint / "critic" / "engine.safetensors"
    whole = path.read_bytes()
    path.unlink()
    if damage != "gone":
        path.write_bytes({"cut": whole[:-100], "empty": b"", "text": b"no weights at all"}[damage])
    with pytest.raises(ValueError, match=r"critic/engine\.safetensors is missing, damaged or no safetensors file"):
        load_checkpoint(checkpoint, roles, make_controller(settings))


def test_weights_of_another_model_are_refused(small, tmp_path):
    roles, _, settings = small()
    save_checkpoint(tmp_path, roles, make_controller(settings), 1, keep=1)
    [checkpoint] = checkpoints(tmp_path)
    wider, _, _ = small(tiny_language_model(6, hidden_size=32))
    with pytest.raises(ValueError, match=r"actor/engine\.safetensors does not fit") as error:
        load_checkpoint(checkpoint, wider, make_controller(settings))
    assert "size mismatch" in str(error.value)


# --- the command

FLAGS = "--iterations 4 --batch_size 8 --minibatch_size 4 --max_new_tokens 8 --seed 5 --sample_every 2 --n_samples 2"
FLAGS = [*FLAGS.split(), "--no-scale_rewards", "--checkpoint_every", "1"]


def run(folder, *flags):
    return command.main(["--out", str(folder), *map(str, flags)])


def table_of(path):
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def content_of(folder):
    """All that two runs must have in common."""
    rows = [numbers_of(row) for row in table_of(folder / "metrics.csv")]
    weights = (folder / "actor" / "model.safetensors").read_bytes()
    return rows, table_of(folder / "samples.csv"), weights


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """A run that nothing has stopped."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    assert run(folder, *FLAGS, "--judge", "none", "--checkpoint_every", "0") == 0
    return folder


@pytest.fixture
def ended(monkeypatch):
    """A function (call, what then): flags of a run whose judge does that in its call-th call, in either run of it."""

    def flags(number, action):
        calls = []

        def judge(prompts, responses, finished):
            calls.append(1)
            if len(calls) == number:
                action()
            return {}

        monkeypatch.setitem(sys.modules, "own_module", SimpleNamespace(judge=judge))
        return ["--judge", "own_module:judge"]

    return flags


def assert_one_line(capsys, words, out_lines=1):
    out, err = capsys.readouterr()
    assert out.count("\n") == out_lines, out
    assert err.count("\n") == 1 and err.startswith("run: ") and words in err, err


def test_sigterm_ends_a_run_after_its_iteration_with_a_checkpoint(straight, tmp_path, capsys, ended):
    # The second call is for the samples of the first iteration, the third is in the second iteration.
    flags = [*FLAGS, *ended(3, lambda: os.kill(os.getpid(), signal.SIGTERM)), "--checkpoint_every", "0"]
    folder = tmp_path / "run"
    handler = signal.getsignal(signal.SIGTERM)
    assert run(folder, *flags) == 143
    assert_one_line(capsys, "ended by SIGTERM after 2 iterations; --resume goes on from there")
    assert signal.getsignal(signal.SIGTERM) == handler
    assert [path.name for path in checkpoints(folder)] == ["000002"]
    assert len(table_of(folder / "metrics.csv")) == 2 and not (folder / "actor").exists()
    assert run(folder, *flags, "--resume") == 0
    assert content_of(folder) == content_of(straight)


def test_a_run_that_lost_rows_and_files_after_its_checkpoint_makes_them_again(straight, tmp_path, ended):
    folder = tmp_path / "run"

    def fall():
        raise KeyboardInterrupt

    flags = [*FLAGS, *ended(5, fall), "--checkpoint_every", "2"]
    assert run(folder, *flags) == 130
    # Killed in the fourth iteration: the third has its row, the checkpoint is of the second.
    assert len(table_of(folder / "metrics.csv")) == 3
    assert [path.name for path in checkpoints(folder)] == ["000002"]
    assert run(folder, *flags, "--resume", "auto") == 0
    assert content_of(folder) == content_of(straight)


def test_a_finished_run_is_left_as_it_is_or_made_longer(straight, tmp_path, capsys):
    folder = tmp_path / "run"
    flags = [*FLAGS, "--judge", "none", "--keep", "1"]
    assert run(folder, *flags, "--iterations", "3") == 0
    assert [path.name for path in checkpoints(folder)] == ["000003"]
    before = content_of(folder)
    capsys.readouterr()
    assert run(folder, "--resume") == 0
    out, err = capsys.readouterr()
    assert out.endswith(f"{folder} is finished: 3 iterations\n") and err == ""
    assert content_of(folder) == before
    assert run(folder, "--resume", "--iterations", "4") == 0
    capsys.readouterr()
    assert run(folder, "--resume", "--iterations", "3") == 2
    assert_one_line(capsys, f"iterations must be at least the 4 that {folder} has done, got 3", out_lines=0)
    # The third iteration was the last one once, and left its samples.
    assert content_of(folder)[0] == content_of(straight)[0] and content_of(folder)[2] == content_of(straight)[2]


def test_a_resumed_run_keeps_its_settings(straight, tmp_path, capsys):
    folder = tmp_path / "run"
    assert run(folder, *FLAGS, "--iterations", "1", "--judge", "none") == 0
    before = sorted(path.stat().st_mtime_ns for path in folder.rglob("*"))
    capsys.readouterr()
    assert run(folder, "--resume", "--lr", "1e-5") == 2
    assert_one_line(capsys, f"lr is 0.0005 in {folder}, not 1e-05: a run keeps its settings", out_lines=0)
    assert run(folder, "--resume", "--batch_size", "16") == 2
    assert_one_line(capsys, f"batch_size is 8 in {folder}, not 16", out_lines=0)
    assert run(folder, "--resume", "--iterations", "0") == 2
    assert_one_line(capsys, "iterations must be at least 1, got 0", out_lines=0)
    for text in ("", "[]", "{"):
        (folder / "config.json").write_text(text)
        assert run(folder, "--resume") == 2
        assert_one_line(capsys, f"{folder / 'config.json'} is damaged", out_lines=0)
    assert len(before) == len(list(folder.rglob("*")))


def test_resume_begins_where_there_is_nothing(straight, tmp_path):
    folder = tmp_path / "run"
    assert run(folder, *FLAGS, "--judge", "none", "--checkpoint_every", "0", "--resume") == 0
    assert content_of(folder) == content_of(straight)


def test_a_full_disk_ends_a_run_in_one_line_and_the_last_checkpoint_goes_on(
    straight, tmp_path, capsys, ended, monkeypatch
):
    folder = tmp_path / "run"

    def fill():
        def full(path, **_):
            raise OSError(28, "No space left on device", str(path))

        monkeypatch.setattr(Path, "mkdir", full)

    flags = [*FLAGS, *ended(3, fill)]
    assert run(folder, *flags) == 2
    assert_one_line(capsys, "No space left on device")
    assert [path.name for path in checkpoints(folder)] == ["000001"]
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "own_module", SimpleNamespace(judge=lambda *_: {}))
    assert run(folder, *flags, "--resume") == 0
    assert content_of(folder) == content_of(straight)


def test_a_damaged_checkpoint_is_named_in_one_line(straight, tmp_path, capsys):
    folder = tmp_path / "run"
    assert run(folder, *FLAGS, "--iterations", "1", "--judge", "none") == 0
    capsys.readouterr()
    state = checkpoints(folder)[-1] / "state.json"
    text = state.read_text()
    state.write_text(text[: len(text) // 2])
    assert run(folder, "--resume", "--iterations", "2") == 2
    assert_one_line(capsys, f"{state} is damaged", out_lines=0)
    state.write_text(json.dumps(json.loads(text)))
    weights = checkpoints(folder)[-1] / "actor" / "engine.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    assert run(folder, "--resume", "--iterations", "2") == 2
    assert_one_line(capsys, f"{weights} is missing, damaged or no safetensors file")


@pytest.fixture
def begun(tmp_path, capsys):
    """A finished run of one iteration with its checkpoint."""
    folder = tmp_path / "run"
    assert run(folder, *FLAGS, "--iterations", "1", "--judge", "none") == 0
    capsys.readouterr()
    return folder


def test_settings_that_are_missing_are_not_replaced_by_others(begun, capsys):
    path = begun / "config.json"
    values = json.loads(path.read_text())
    del values["lr"]
    path.write_text(json.dumps(values))
    assert run(begun, "--resume", "--iterations", "2") == 2
    assert_one_line(capsys, f"{path} has no lr: it is damaged, or of a version that had no such setting", out_lines=0)
    path.unlink()
    assert run(begun, "--resume", "--iterations", "2") == 2
    assert_one_line(capsys, f"{path} is missing", out_lines=0)
    assert len(table_of(begun / "metrics.csv")) == 1


@pytest.mark.parametrize("damage", ["short", "gone"])
def test_an_optimizer_state_that_does_not_fit_is_refused_before_torch_reads_past_its_end(begun, capsys, damage):
    path = begun / "checkpoints" / "000001" / "actor" / "engine.safetensors"
    tensors = safetensors.torch.load_file(path)
    if damage == "short":
        tensors["optimizer.3.exp_avg"] = tensors["optimizer.3.exp_avg"][:1].clone()
    else:
        tensors = {name: x for name, x in tensors.items() if not name.startswith("optimizer.0.")}
    safetensors.torch.save_file(tensors, path)
    assert run(begun, "--resume", "--iterations", "2") == 2
    assert_one_line(capsys, f"{path} does not fit: optimizer")


IMPOSSIBLE = [("iteration", "x"), ("iteration", 7), ("controller", None), ("reward_std", 0), ("reward_std", "x")]


@pytest.mark.parametrize(("name", "value"), IMPOSSIBLE)
def test_a_state_that_cannot_be_is_named(begun, capsys, name, value):
    path = begun / "checkpoints" / "000001" / "state.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), name: value}))
    assert run(begun, "--resume", "--iterations", "2") == 2
    assert_one_line(capsys, f"{path} is damaged: ", out_lines=0)


def test_damaged_tables_are_named_before_they_are_written_to(begun, capsys):
    metrics, samples = begun / "metrics.csv", begun / "samples.csv"
    text = metrics.read_text()
    metrics.write_text(text[: text.rindex(",")] + "\n")
    assert run(begun, "--resume", "--iterations", "2") == 2
    assert_one_line(capsys, f"{metrics} is damaged: its rows are not all as long as its header")
    metrics.write_text(text)
    samples.write_bytes(b"iteration\n\xdf\n")
    assert run(begun, "--resume", "--iterations", "2") == 2
    assert_one_line(capsys, f"{samples} is damaged: ")
