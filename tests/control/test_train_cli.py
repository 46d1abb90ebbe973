"""The train command: a run on disk that survives being killed, and one line for everything that is wrong."""

import contextlib
import csv
import importlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ppo_lab.command import run_command
from ppo_lab.control import train as training
from ppo_lab.control.checkpoint import load_network
from ppo_lab.control.command import GROUPS, add_settings_flags
from ppo_lab.control.config import ALGORITHMS, Settings, tuned
from ppo_lab.control.envs import Envs, make_envs
from ppo_lab.control.networks import PPONetwork
from ppo_lab.control.rollout import action_logp, collect, score
from ppo_lab.run_folder import Metrics, cut_metrics, locked

# 10 iterations with checkpoints after 3, 6, 9 and, because it is the last, 10.
TINY_FLAGS = (
    "--total-steps 1200 --num-envs 2 --n-steps 64 --k-epochs 2 --hidden-dim 16 --checkpoint-every 3 --seed 3 "
    "--lr 0.0003 --stop-kl none --no-shared-trunk"
)
TINY = TINY_FLAGS.split()
LINE = r"\d+ steps, \d+\.\d s, \d+ steps/s, mean return of the last \d+ episodes \d+\.\d, parameters sha256 \w{64}\n"


def run(folder, *flags):
    return training.main(["--out", str(folder), *flags])


def rows_of(folder):
    """metrics.csv as text, without the one column that depends on the clock."""
    with open(folder / "metrics.csv", newline="") as file:
        return [{name: x for name, x in row.items() if name != "steps_per_second"} for row in csv.DictReader(file)]


def sha_in(text):
    return re.search("sha256 ([0-9a-f]{64})", text)[1]


def snapshot(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """One run from start to end: its folder and the hash of its parameters."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert run(folder, *TINY) == 0
    return folder, sha_in(out.getvalue())


def command(folder, *flags):
    return [sys.executable, "-m", "ppo_lab.control.train", "--out", str(folder), *flags]


def start(folder, *flags):
    """A training process, returned once it has written a few rows after its first checkpoint."""
    process = subprocess.Popen(
        command(folder, *flags), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline and process.poll() is None:
        metrics = folder / "metrics.csv"
        if metrics.exists() and metrics.read_bytes().count(b"\n") >= 6:
            return process
        time.sleep(0.002)
    process.kill()
    raise AssertionError(f"the process wrote no metrics: {process.communicate()}")


def interrupt_after(monkeypatch, rows):
    """Let Ctrl-C arrive while a row of metrics is being written."""
    write, count = Metrics.write, iter(range(10**6))

    def interrupted(self, row):
        if next(count) == rows:
            raise KeyboardInterrupt
        write(self, row)

    monkeypatch.setattr(Metrics, "write", interrupted)


# A run on disk


def test_a_run_leaves_its_settings_metrics_events_and_checkpoint(straight):
    folder, _ = straight
    names = sorted(re.sub(r"events\.out\..*", "events", path.name) for path in folder.iterdir())
    assert set(names) == {".lock", "checkpoint.safetensors", "config.json", "events", "metrics.csv"}
    settings = json.loads((folder / "config.json").read_text())
    assert settings["total_steps"] == 1200 and settings["gamma"] == tuned("CartPole-v1").gamma
    rows = rows_of(folder)
    assert [int(row["iteration"]) for row in rows] == list(range(1, 11))
    assert int(rows[-2]["steps"]) < 1200 <= int(rows[-1]["steps"])


def test_the_last_line_says_what_came_out(tmp_path, capsys):
    assert run(tmp_path / "run", *TINY) == 0
    out, err = capsys.readouterr()
    line = (
        r"\d+ steps, \d+\.\d s, \d+ steps/s, mean return of the last \d+ episodes \d+\.\d, parameters sha256 \w{64}\n"
    )
    assert re.fullmatch(line, out.splitlines(keepends=True)[-1])
    assert err == ""  # no progress bar where nobody watches


def test_a_terminal_gets_a_progress_bar_with_the_return_and_the_kl(tmp_path, monkeypatch, capsys):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    assert run(tmp_path / "run", *TINY) == 0
    assert re.search(r"return \d+\.\d, KL \d\.\d{4}\]", terminal.getvalue())
    assert re.fullmatch(LINE, capsys.readouterr().out)


def test_the_checkpoint_holds_the_network_that_training_in_memory_gives(straight):
    folder, _ = straight
    network, settings = load_network(folder)
    learner, rows = training.train_agent(settings)
    for name, tensor in learner.network.state_dict().items():
        assert torch.equal(network.state_dict()[name], tensor), name
    written = rows_of(folder)
    assert len(written) == len(rows)
    for text, row in zip(written, rows, strict=True):
        assert {name: float(x) for name, x in text.items()} == pytest.approx(
            {name: x for name, x in row.items() if name != "steps_per_second"}, rel=0, abs=0, nan_ok=True
        )


def test_tensorboard_shows_the_same_numbers_once_after_a_resume(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        interrupt_after(patch, 5)
        assert run(tmp_path, *TINY) == 130
    assert run(tmp_path, "--resume") == 0
    events = EventAccumulator(str(tmp_path)).Reload()
    rows = rows_of(tmp_path)
    for name in ("value", "entropy", "lr", "updates"):
        scalars = events.Scalars(name)
        assert [event.step for event in scalars] == [int(row["steps"]) for row in rows]
        assert [event.value for event in scalars] == [np.float32(float(row[name])) for row in rows]


def test_a_run_of_lunar_lander(tmp_path, capsys):
    flags = "--env-id LunarLander-v3 --total-steps 300 --num-envs 2 --n-steps 64 --k-epochs 1 --checkpoint-every 1"
    assert run(tmp_path / "run", *flags.split()) == 0
    sha = sha_in(capsys.readouterr().out)
    network, settings = load_network(tmp_path / "run")
    assert (settings.env_id, network.feature[0].in_features, network.actor_head.out_features) == (
        "LunarLander-v3",
        8,
        4,
    )
    assert run(tmp_path / "again", *flags.split()) == 0
    assert sha_in(capsys.readouterr().out) == sha


def test_a_run_too_short_for_an_episode_says_so(tmp_path, capsys):
    flags = "--env-id LunarLander-v3 --total-steps 16 --num-envs 2 --n-steps 8 --k-epochs 1"
    assert run(tmp_path / "run", *flags.split()) == 0
    assert ", no episode ended, " in capsys.readouterr().out
    assert rows_of(tmp_path / "run")[0]["episode_return"] == "nan"


def test_a_row_is_on_disk_before_the_next_one_begins(tmp_path):
    with Metrics(tmp_path, 0) as log:
        for iteration in (1, 2):
            log.write({"iteration": iteration, "steps": 64 * iteration})
            assert rows_of(tmp_path)[-1] == {"iteration": str(iteration), "steps": str(64 * iteration)}


# Resuming


def test_a_killed_run_resumes_bit_for_bit(tmp_path, capsys):
    # Long enough to be killed in the middle, 30 iterations.
    flags = [*TINY, "--total-steps", "3800"]
    assert run(tmp_path / "straight", *flags) == 0
    sha = sha_in(capsys.readouterr().out)
    process = start(tmp_path / "killed", *flags)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    rows = rows_of(tmp_path / "straight")
    assert 5 <= len(rows_of(tmp_path / "killed")) < len(rows), "killed too early or too late to tell anything"
    assert run(tmp_path / "killed", "--resume") == 0
    assert sha_in(capsys.readouterr().out) == sha
    assert rows_of(tmp_path / "killed") == rows


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_resumes_bit_for_bit(algorithm, tmp_path, monkeypatch, capsys):
    flags = [*TINY, "--algorithm", algorithm]
    assert run(tmp_path / "straight", *flags) == 0
    sha = sha_in(capsys.readouterr().out)
    with monkeypatch.context() as patch:
        interrupt_after(patch, 5)
        assert run(tmp_path / "stopped", *flags) == 130
    assert len(rows_of(tmp_path / "stopped")) == 5
    assert run(tmp_path / "stopped", "--resume") == 0
    assert sha_in(capsys.readouterr().out) == sha
    assert rows_of(tmp_path / "stopped") == rows_of(tmp_path / "straight")


@pytest.mark.parametrize("rows", [0, 1, 3, 4])
def test_it_does_not_matter_where_a_run_stops(straight, rows, tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        interrupt_after(patch, rows)
        assert run(tmp_path, *TINY) == 130
    assert run(tmp_path, "--resume") == 0
    assert sha_in(capsys.readouterr().out) == straight[1]
    assert rows_of(tmp_path) == rows_of(straight[0])


def test_a_run_killed_before_its_first_checkpoint_starts_anew(straight, tmp_path, monkeypatch, capsys):
    def killed(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("ppo_lab.control.run.save_checkpoint", killed)
        assert run(tmp_path, *TINY) == 130
    assert [path.name for path in tmp_path.iterdir() if path.name != ".lock"] == ["config.json"]
    assert run(tmp_path, "--resume") == 0
    assert sha_in(capsys.readouterr().out) == straight[1]


def test_a_run_killed_before_its_configuration_leaves_the_folder_free(tmp_path):
    (tmp_path / ".lock").touch()
    (tmp_path / "config.json.tmp").write_text("{")
    assert run(tmp_path, *TINY) == 0


def test_resuming_a_finished_run_changes_nothing_and_says_so(straight, capsys):
    folder, sha = straight
    before = snapshot(folder)
    assert run(folder, "--resume", "--seed", "3") == 0
    out = capsys.readouterr().out
    assert f"{folder} is finished" in out and sha_in(out) == sha
    assert snapshot(folder) == before


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--lr", "0.1"], "lr is 0.0003 in"),
        (["--total-steps", "2000"], "total_steps is 1200 in"),
        (["--seed", "4"], "seed is 3 in"),
        (["--shared-trunk"], "shared_trunk is False in"),
        (["--stop-kl", "0.1"], "stop_kl is None in"),
        (["--env-id", "Acrobot-v1"], "env_id is CartPole-v1 in"),
    ],
)
def test_a_resumed_run_keeps_its_settings(straight, flags, words, capsys):
    before = snapshot(straight[0])
    assert run(straight[0], "--resume", *flags) == 2
    assert_one_line(capsys, words)
    assert snapshot(straight[0]) == before


def test_metrics_after_the_checkpoint_are_cut_even_when_torn(tmp_path):
    path = tmp_path / "metrics.csv"
    path.write_bytes(b"iteration,steps\n1,10\n2,20\n3,3")
    cut_metrics(path, 2)
    assert path.read_bytes() == b"iteration,steps\n1,10\n2,20\n"
    cut_metrics(path, 0)
    assert path.read_bytes() == b""


@pytest.mark.parametrize(
    "data", [b"", b"iteration,steps\n1,10\n", b"iteration,steps\n1,10\n2,2", b"iteration\n2,1\n1,1\n"]
)
def test_metrics_that_do_not_reach_the_checkpoint_are_refused(tmp_path, data):
    path = tmp_path / "metrics.csv"
    path.write_bytes(data)
    with pytest.raises(ValueError, match="does not hold the 2 rows"):
        cut_metrics(path, 2)
    assert path.read_bytes() == data


def test_a_run_without_its_metrics_or_its_checkpoint_is_refused(straight, tmp_path, capsys):
    for name in ("metrics.csv", "checkpoint.safetensors"):
        folder = tmp_path / name
        folder.mkdir()
        for kept, data in snapshot(straight[0]).items():
            if kept != name:
                (folder / kept).write_bytes(data)
        assert run(folder, "--resume") == 2
        assert_one_line(capsys, name)


# Two processes, Ctrl-C


def test_two_processes_cannot_train_in_one_folder(tmp_path, capsys):
    folder = tmp_path / "run"
    process = start(folder, *TINY, "--total-steps", "1000000")
    try:
        with pytest.raises(ValueError, match="in use"), locked(folder):
            pass
        assert run(folder, "--resume") == 2
        assert_one_line(capsys, "another process is training in it")
        # Ctrl-C ends the first one with one line, and frees the folder.
        os.kill(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out) == (130, "")
        assert err == "train: interrupted; --resume goes on from the last checkpoint\n"
        load_network(folder)
        with locked(folder):
            pass
    finally:
        process.kill()


def test_two_processes_cannot_begin_in_one_folder(tmp_path, capsys):
    with locked(tmp_path):
        assert run(tmp_path, *TINY) == 2
    assert_one_line(capsys, "another process is training in it")


# One line for everything that is wrong


def assert_one_line(capsys, words):
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("train: ") and words in err, err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--env-id NoSuch-v0", "env_id 'NoSuch-v0'"),
        ("--env-id Pendulum-v1", "Pendulum-v1 has the action space Box"),
        ("--env-id FrozenLake-v1", "FrozenLake-v1 has the observation space Discrete"),
        ("--algorithm sac", "algorithm must be one of ppo"),
        ("--algorithm trpo --shared-trunk", "shared_trunk must be false"),
        ("--lr 0", "lr must be positive"),
        ("--gamma nan", "gamma must be a finite number"),
        ("--threads 0", "threads must be at least 1"),
        ("--hidden-dim 100000000000", "not enough memory"),
        ("--lr 1e30", "the update was stopped"),
    ],
)
def test_a_wrong_value_is_named_in_one_line(flags, words, tmp_path, capsys):
    assert run(tmp_path / "run", *TINY, *flags.split()) == 2
    assert_one_line(capsys, words)
    # Values that can be judged before training leave nothing behind.
    assert (tmp_path / "run").exists() == ("1e30" in flags)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--lr fast", "argument --lr"),
        ("--stop-kl never", "argument --stop-kl: neither a number nor none: 'never'"),
        ("--total-steps 1.5", "argument --total-steps"),
        ("--learning-rate 1", "unrecognized arguments: --learning-rate 1"),
        ("--env 1", "unrecognized arguments: --env 1"),
        ("--env-id", "argument --env-id: expected one argument"),
    ],
)
def test_a_wrong_flag_is_named_in_one_line(flags, words, tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        run(tmp_path / "run", *flags.split())
    assert stopped.value.code == 2
    assert_one_line(capsys, words)


def test_the_folder_is_required(capsys):
    with pytest.raises(SystemExit) as stopped:
        training.main([])
    assert stopped.value.code == 2
    assert_one_line(capsys, "--out")


def test_a_folder_that_holds_a_run_is_not_overwritten(straight, capsys):
    before = snapshot(straight[0])
    assert run(straight[0], *TINY) == 2
    assert_one_line(capsys, f"{straight[0]} already holds a run: go on with --resume")
    assert snapshot(straight[0]) == before


def test_a_folder_that_cannot_be_used_is_named_in_one_line(tmp_path, capsys):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("mine")
    (tmp_path / "empty").mkdir()
    cases = [
        (tmp_path / "file", [], "file is a file"),
        (tmp_path / "file" / "below", [], "below: Not a directory"),
        (tmp_path / "full", [], "full is not empty and holds no run (there is thesis.tex)"),
        (tmp_path / "missing", ["--resume"], "missing holds no run"),
        (tmp_path / "empty", ["--resume"], "empty holds no run"),
        (tmp_path / "full", ["--resume"], "full holds no run"),
        (tmp_path / "file", ["--resume"], "file holds no run"),
    ]
    for folder, flags, words in cases:
        assert run(folder, *flags) == 2
        assert_one_line(capsys, words)
    files = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))
    assert files == ["empty", "file", "full", "full/thesis.tex"]
    assert (tmp_path / "file").read_text() == (tmp_path / "full" / "thesis.tex").read_text() == "mine"


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="the superuser may write everywhere")
def test_a_folder_without_permission_is_named_in_one_line(tmp_path, capsys):
    tmp_path.chmod(0o500)
    assert run(tmp_path / "run", *TINY) == 2
    assert_one_line(capsys, "run: Permission denied")


@pytest.mark.parametrize("name", ["checkpoint.safetensors", "config.json"])
def test_damaged_files_are_named_and_left_alone(straight, name, tmp_path, capsys):
    for kept, data in snapshot(straight[0]).items():
        (tmp_path / kept).write_bytes(data[: len(data) // 2] if kept == name else data)
    before = snapshot(tmp_path)
    assert run(tmp_path, "--resume") == 2
    assert_one_line(capsys, name)
    assert snapshot(tmp_path) == before


def test_a_bug_keeps_its_traceback():
    def broken():
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError):
        run_command("train", broken)


# Flags


def test_every_setting_is_a_flag():
    names = " ".join(GROUPS.values()).split()
    assert sorted(names) == sorted(vars(Settings())) and len(set(names)) == len(names)


def test_flags_reach_the_settings(tmp_path):
    flags = "--no-anneal-lr --shared-trunk --stop-kl 0.05 --eps-clip-value none --whiten rollout"
    assert run(tmp_path / "run", *TINY, *flags.split()) == 0
    settings = json.loads((tmp_path / "run" / "config.json").read_text())
    wanted = {"anneal_lr": False, "shared_trunk": True, "stop_kl": 0.05, "eps_clip_value": None, "whiten": "rollout"}
    assert {name: settings[name] for name in wanted} == wanted


def test_the_help_shows_the_defaults_of_the_environment_asked_about(monkeypatch):
    monkeypatch.setitem(sys.modules["ppo_lab.control.config"].TUNED, ("Acrobot-v1", "ppo"), {"n_steps": 777})
    parser = training.make_parser(["--env-id", "Acrobot-v1", "--help"])
    assert re.search(
        r"--n-steps N\s+steps of each environment per rollout \(T\) \(default:\s+777\)", parser.format_help()
    )
    assert "777" not in training.make_parser(["--help"]).format_help()


def test_the_help_names_every_flag_and_an_example():
    text = training.make_parser([]).format_help()
    for name in vars(Settings()):
        assert "--" + name.replace("_", "-") in text
    assert "python -m ppo_lab.control.train --env-id LunarLander-v3" in text and add_settings_flags.__doc__ not in text


# Cases


class StepCount(gym.Env):
    """Ends after 8 steps, shows how many steps were made, and writes every observation into one and the same array."""

    observation_space = gym.spaces.Box(-100, 100, (2,))
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.array = np.zeros(2, dtype=np.float32)
        return self.array, {}

    def step(self, action):
        self.array[0] += 1
        return self.array, 1.0, bool(self.array[0] == 8), False, {}


@pytest.mark.parametrize("copy", [True, False])
def test_B42_stored_states_are_not_overwritten_by_the_next_step(copy):
    envs = Envs(gym.vector.SyncVectorEnv([StepCount, StepCount], copy=copy))
    network = PPONetwork(2, 2, orthogonal=False)
    generator = torch.Generator().manual_seed(0)
    rollout, _ = collect(envs, network, envs.reset(0), 3, generator)
    assert rollout.states[:, :3, 0].tolist() == [[0, 1, 2], [0, 1, 2]]
    logp = torch.stack([action_logp(network.logits(rollout.states[:, t]), rollout.actions[:, t]) for t in range(3)], -1)
    torch.testing.assert_close(score(network, rollout).logp, logp)


def test_B43_one_seed_one_run(tmp_path):
    assert run(tmp_path / "a", *TINY) == run(tmp_path / "b", *TINY) == 0
    assert run(tmp_path / "c", *TINY, "--seed", "4") == 0
    losses = [[(row["policy"], row["value"]) for row in rows_of(tmp_path / name)] for name in "abc"]
    assert losses[0] == losses[1] != losses[2]


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Acrobot-v1"])
def test_B43_each_environment_and_each_episode_starts_elsewhere(env_id):
    envs = make_envs(env_id, 3)
    first = envs.reset(42)
    assert len({tuple(state) for state in first.tolist()}) == 3
    assert (envs.reset(42) == first).all()
    # The seed goes to the first reset only: the state after an episode's end is a new one.
    for _ in range(1200):
        step = envs.step(np.zeros(3, dtype=int))
        if not step.valid[0]:
            break
    assert not step.valid[0]
    assert not (step.states[0] == first[0]).any()
    envs.close()


def test_B43_checkpoints_start_fresh_episodes():
    seeds = {training.derived_seed(seed, iteration) for seed in range(20) for iteration in range(20)}
    assert len(seeds) == 400


def test_B44_without_box2d_lunar_lander_says_what_to_install(tmp_path, monkeypatch, capsys):
    for name in list(sys.modules):
        if name.startswith("gymnasium.envs.box2d"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "Box2D", None)
    assert run(tmp_path / "lander", "--env-id", "LunarLander-v3") == 2
    assert_one_line(capsys, 'LunarLander-v3 needs a package that is not installed: pip install "gymnasium[box2d')
    assert not (tmp_path / "lander").exists()
    assert run(tmp_path / "cartpole", *TINY) == 0


def test_B44_the_retired_lunar_lander_is_refused_and_used_nowhere(tmp_path, capsys):
    retired = "LunarLander-v" + "2"
    assert run(tmp_path / "run", "--env-id", retired) == 2
    assert_one_line(capsys, "LunarLander-v3")
    package = Path(importlib.import_module("ppo_lab").__file__).parent
    assert not [path for path in package.rglob("*.py") if retired in path.read_text()]


def test_B46_numbers_of_any_library_are_written_as_numbers(tmp_path):
    row = {"iteration": np.int64(1), "steps": np.int64(64), "half": np.float32(0.5), "done": np.bool_(True)}
    with Metrics(tmp_path, 0) as log:
        log.write({**row, "third": np.float64(1 / 3), "tensor": torch.tensor(2.5), "flag": False})
    [row] = csv.DictReader((tmp_path / "metrics.csv").open())
    values = {name: json.loads(text) for name, text in row.items()}
    assert values == {"iteration": 1, "steps": 64, "half": 0.5, "done": 1, "third": 1 / 3, "tensor": 2.5, "flag": 0}


def test_B46_flags_are_read_by_their_truth_value():
    envs = make_envs("CartPole-v1", 2)
    envs.reset(0)
    step = envs.step(np.array([0, 1]))
    assert step.terminated.dtype == step.truncated.dtype == step.valid.dtype == np.bool_
    assert step.valid.all() and not step.terminated.any()
    envs.close()


def test_a_row_with_other_columns_is_refused_and_the_file_stays(tmp_path):
    with Metrics(tmp_path, 0) as log:
        log.write({"steps": 1, "loss": 0.5})
    before = (tmp_path / "metrics.csv").read_bytes()
    with Metrics(tmp_path, 1) as log, pytest.raises(ValueError, match="other columns than the next row, gold, loss: "):
        log.write({"steps": 2, "gold": 0.5})
    assert (tmp_path / "metrics.csv").read_bytes() == before
    # The order of the columns is that of the file.
    with Metrics(tmp_path, 1) as log:
        log.write({"loss": 0.25, "steps": 2})
    assert (tmp_path / "metrics.csv").read_text() == "steps,loss\n1,0.5\n2,0.25\n"
