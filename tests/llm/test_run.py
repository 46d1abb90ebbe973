"""The command: a run on disk, a trained actor that loads anywhere, and one line for everything that is wrong."""

import csv
import io
import json
import os
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import safetensors
import safetensors.torch
import torch
import yaml
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, AutoTokenizer

from ppo_lab.files import data_path, digest
from ppo_lab.llm import run as command
from ppo_lab.llm.config import load_preset, make_settings, preset_names
from ppo_lab.llm.ppo import train
from ppo_lab.llm.roles import make_roles
from ppo_lab.run_folder import locked

# Three short iterations of the preset.
CHANGES = {"iterations": 3, "batch_size": 8, "minibatch_size": 4, "max_new_tokens": 8, "seed": 5, "sample_every": 2}
CHANGES |= {"scale_rewards": False, "n_samples": 2}
FLAGS = "--iterations 3 --batch-size 8 --minibatch-size 4 --max-new-tokens 8 --seed 5 --sample-every 2"
TINY = f"{FLAGS} --no-scale-rewards --n-samples 2".split()
COLUMNS = """
    iteration score gold positive grammatical kl_per_response kl_per_token kl_coef entropy response_length policy_loss
    value_loss clip_fraction approx_kl ratio_max explained_variance advantage_std grad_norm tokens_per_second
"""

MACHINE = ("tokens_per_second", "memory_gb", "seconds_generate", "seconds_score", "seconds_update")
VERDICT = r"memory per process: \d+\.\d\d GB estimated, \d+\.\d GB free: fits\n"


def run(folder, *flags):
    return command.main(["--out", str(folder), *flags])


def table_of(path):
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run: its folder and what it printed."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", io.StringIO())
        patch.setattr(sys, "stderr", io.StringIO())
        assert run(folder, *TINY) == 0
        return folder, sys.stdout.getvalue(), sys.stderr.getvalue()


def rewarded_by(monkeypatch, function):
    """The flags that let a Python function of the user's own module play the reward."""
    monkeypatch.setitem(sys.modules, "own_module", SimpleNamespace(score=function))
    return ["--reward", "own_module:score", "--critic", "actor"]


# --- what a run leaves


def test_a_run_leaves_settings_metrics_samples_events_and_the_actor(finished):
    folder, _, _ = finished
    names = {re.sub(r"events\.out\..*", "events", path.name) for path in folder.iterdir()}
    assert names == {
        ".lock", "config.json", "metrics.csv", "samples.csv", "events", "actor", "report.md", "report.png"
    }  # fmt: skip
    settings = json.loads((folder / "config.json").read_text())
    assert make_settings(settings) == make_settings({**load_preset("tiny"), **CHANGES})


def test_the_metrics_have_their_columns_and_a_row_per_iteration(finished):
    rows = table_of(finished[0] / "metrics.csv")
    assert set(COLUMNS.split()) <= set(rows[0])
    assert [row["iteration"] for row in rows] == ["0", "1", "2"]
    assert all(float(row["tokens_per_second"]) > 0 and row["updates"] == "4" for row in rows)


def test_the_metrics_are_those_of_training_in_memory(finished):
    settings = make_settings({**load_preset("tiny"), **CHANGES})
    roles, prompts = make_roles(settings)
    rows = table_of(finished[0] / "metrics.csv")
    for written, (row, _) in zip(rows, train(prompts, roles, settings.ppo), strict=True):
        numbers = {name: x for name, x in row.items() if name not in MACHINE}
        assert {name: float(written[name]) for name in numbers} == pytest.approx(numbers, rel=0, abs=0, nan_ok=True)
    lm = AutoModelForCausalLM.from_pretrained(finished[0] / "actor", dtype=torch.float32)
    assert digest(lm.state_dict()) == digest(roles.actor.module.lm.state_dict())


def test_tensorboard_shows_the_same_numbers(finished):
    events = EventAccumulator(str(finished[0])).Reload()
    rows = table_of(finished[0] / "metrics.csv")
    for name in ("kl_per_response", "value_loss", "score"):
        assert [event.step for event in events.Scalars(name)] == [0, 1, 2]
        assert [event.value for event in events.Scalars(name)] == pytest.approx([float(row[name]) for row in rows])


def test_the_samples_are_texts_with_their_scores_of_every_nth_and_the_last_iteration(finished):
    rows = table_of(finished[0] / "samples.csv")
    assert [row["iteration"] for row in rows] == ["0", "0", "2", "2"]
    assert list(rows[0])[:5] == ["iteration", "prompt", "response", "score", "kl"]
    assert {"gold", "positive", "grammatical"} <= set(rows[0])
    prompts = data_path("reviews/prompts.txt").read_text().splitlines()
    assert all(row["prompt"] in prompts and row["response"] for row in rows)
    assert all(float(row["kl"]) == pytest.approx(0, abs=1e-4) for row in rows[:2])


def test_the_actor_loads_as_any_model_does_and_answers(finished):
    lm = AutoModelForCausalLM.from_pretrained(finished[0] / "actor", use_safetensors=True)
    tokenizer = AutoTokenizer.from_pretrained(finished[0] / "actor")
    ids = tokenizer("the style of this novel", return_tensors="pt").input_ids
    answer = lm.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False)
    assert ids.shape[1] < answer.shape[1] <= ids.shape[1] + 5
    assert tokenizer.decode(answer[0], skip_special_tokens=True).startswith("the style of this novel ")


def test_the_trained_actor_can_be_the_start_of_another_run(finished, tmp_path, capsys):
    assert run(tmp_path / "next", *TINY, "--iterations", "1", "--actor", str(finished[0] / "actor")) == 0
    assert re.match(VERDICT + "1 iterations, ", capsys.readouterr().out)


def test_a_run_without_samples_and_without_a_judge(tmp_path, capsys):
    assert run(tmp_path / "run", *TINY, "--iterations", "1", "--sample-every", "0", "--judge", "none") == 0
    assert not (tmp_path / "run" / "samples.csv").exists()
    assert "gold" not in table_of(tmp_path / "run" / "metrics.csv")[0]


# --- what a run says


def test_the_closing_line_says_kl_then_value_loss_then_score(finished):
    folder, out, err = finished
    numbers = r"KL -?\d+\.\d\d, value loss \d+\.\d{3}, score -?\d+\.\d\d, length \d+\.\d"
    assert re.fullmatch(
        rf"{VERDICT}3 iterations, \d+\.\d s, {numbers}, actor in {re.escape(str(folder / 'actor'))}\n", out
    )
    assert err == ""  # no progress bar where nobody watches


def test_a_terminal_gets_a_progress_bar_with_the_same_numbers(tmp_path, monkeypatch, capsys):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    assert run(tmp_path / "run", *TINY) == 0
    assert re.search(r"3/3 .*KL -?\d+\.\d\d, value loss \d+\.\d{3}, score -?\d+\.\d\d, length \d", terminal.getvalue())


def test_the_help_shows_the_values_of_the_preset(capsys):
    with pytest.raises(SystemExit) as stopped:
        command.main(["--preset", "tiny", "--help"])
    assert stopped.value.code == 0
    flags = re.split(r"\s(?=--)", " ".join(capsys.readouterr().out.split()))
    for name, value in load_preset("tiny").items():
        start, end = f"--{name} ", f"(default: {value})"
        assert [flag for flag in flags if flag.startswith(start) and end in flag], name


def test_every_setting_is_a_flag():
    parser = command.make_parser([])
    flags = {flag for action in parser._actions for flag in action.option_strings}
    assert {"--" + name.replace("_", "-") for name in command.all_fields()} <= flags
    assert {"--" + name for name in command.all_fields()} <= flags


# --- where the settings come from


def printed_config(capsys, *flags):
    assert command.main([*flags, "--print-config"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


@pytest.mark.parametrize("preset", preset_names())
def test_the_printed_settings_are_a_file_of_settings(preset, tmp_path, capsys):
    flags = ["--preset", preset, "--lr", "1e-5", "--stop_kl", "0.25", "--no-whiten_advantages", "--stop_token", "."]
    text = printed_config(capsys, *flags)
    values = yaml.safe_load(text)
    changes = {"lr": 1e-5, "stop_kl": 0.25, "whiten_advantages": False, "stop_token": "."}
    assert make_settings(values) == make_settings({**load_preset(preset), **changes})
    assert list(values) == list(command.all_fields())
    path = tmp_path / "settings.yaml"
    path.write_text(text)
    # Whatever the preset, the file says it all.
    assert printed_config(capsys, "--config", str(path)) == text
    assert printed_config(capsys, "--config", str(path), "--preset", "tiny") == text
    assert sorted(tmp_path.iterdir()) == [path]


def test_a_flag_beats_the_file_and_the_file_the_preset(tmp_path, capsys):
    preset = load_preset("tiny")
    assert (preset["batch_size"], preset["max_new_tokens"], preset["kl_coef"]) == (128, 24, 0.1)
    path = tmp_path / "settings.yaml"
    path.write_text("batch_size: 10\nmax_new_tokens: 11\nstop_kl: 1e-3\n")
    values = yaml.safe_load(printed_config(capsys, "--config", str(path), "--batch-size", "12"))
    chosen = [values[name] for name in ("batch_size", "max_new_tokens", "kl_coef", "stop_kl", "gamma")]
    assert chosen == [12, 11, 0.1, 1e-3, 1.0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("learning_rate: 1.0\n", "settings.yaml: unknown setting 'learning_rate'"),
        ("lr: fast\n", "settings.yaml: lr must be float, got 'fast'"),
        ("keep: 8.5\n", "settings.yaml: keep must be int, got 8.5"),
        ("adaptive_kl: 1\n", "settings.yaml: adaptive_kl must be bool, got 1"),
        ("ppo:\n  lr: 1.0\n", "settings.yaml: unknown setting 'ppo'"),
        ("lr\n", "settings.yaml must hold settings as name: value, got str"),
        ("lr: [\n", "settings.yaml is no YAML file"),
    ],
)
def test_a_wrong_file_of_settings_is_named(text, words, tmp_path, capsys):
    (tmp_path / "settings.yaml").write_text(text)
    assert run(tmp_path / "run", *TINY, "--config", str(tmp_path / "settings.yaml")) == 2
    assert_one_line(capsys, words)
    assert [path.name for path in tmp_path.iterdir()] == ["settings.yaml"]


def test_a_file_of_settings_that_is_not_there_is_named(tmp_path, capsys):
    assert run(tmp_path / "run", "--config", str(tmp_path / "no.yaml")) == 2
    assert_one_line(capsys, "no.yaml: No such file or directory")


@pytest.mark.parametrize(
    ("flags", "variables", "words"),
    [
        ("--batch_size 8", {"WORLD_SIZE": "16"}, "batch_size must be at least the number of ranks, got 8 for 16 ranks"),
        ("--minibatch_size 3", {"WORLD_SIZE": "4"}, "minibatch_size must be at least the number of ranks, got 3 for 4"),
        ("--bf16", {"WORLD_SIZE": "2"}, "bf16 on several ranks needs zero_stage 1, 2 or 3, got 0"),
        ("--seed 1", {"WORLD_SIZE": "two"}, "WORLD_SIZE must be a number, got 'two'"),
        ("--seed 1", {"RANK": "2", "WORLD_SIZE": "2"}, "RANK must be below WORLD_SIZE, got 2 and 2"),
    ],
)
def test_B38_what_does_not_go_with_the_ranks_is_refused_before_they_are_joined(
    flags, variables, words, tmp_path, monkeypatch, capsys
):
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", **variables}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(command, "start_deepspeed", lambda device: pytest.fail("the ranks were joined"))
    monkeypatch.setattr(command, "make_roles", lambda *_: pytest.fail("models were loaded"))
    assert run(tmp_path / "run", *TINY, *flags.split()) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and words in err
    assert not (tmp_path / "run").exists()


def test_the_flag_of_a_launcher_is_accepted(capsys):
    for flag in ("--local_rank=3", "--local-rank=3"):
        assert "local_rank" not in printed_config(capsys, flag)


# --- one line for everything that is wrong


def assert_one_line(capsys, words):
    """One line on stderr, and on stdout at most the memory estimate, which comes before all that is loaded."""
    out, err = capsys.readouterr()
    assert re.fullmatch(f"({VERDICT})?", out), out
    assert err.count("\n") == 1 and err.startswith("run: ") and words in err, err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--preset huge", "preset must be one of "),
        ("--lr 0", "lr must be positive, got 0.0"),
        ("--gamma nan", "gamma must be a finite number"),
        ("--top-k 50", "top_k must be 0 in training"),
        ("--critic value", "critic must be one of reward, actor, shared"),
        ("--threads 0", "threads must be at least 1"),
        ("--adaptive-kl --kl-coef 0", "kl_coef must be positive with adaptive_kl"),
        ("--prompts no/such/file.txt", "'no/such/file.txt' is not there"),
        ("--judge ppo_lab.llm.reviews:no_such", "judge must be module:function"),
        ("--reward no_such_module:score --critic actor", "reward must be module:function"),
        ("--reward ppo_lab.llm.reviews:gold_score", "critic must be actor or shared with this reward"),
        ("--eval-every 2 --eval-prompts no/such/file.txt", "'no/such/file.txt' is not there"),
        ("--stop-token <none>", "stop_token must be a token of the tokenizer, got '<none>'"),
        ("--max-new-tokens 64", "max_new_tokens must leave room for a prompt: 64 of a context of 64"),
        ("--device abacus", "device 'abacus' cannot be used"),
    ],
)
def test_a_wrong_value_is_named_in_one_line_and_leaves_nothing(flags, words, tmp_path, capsys):
    assert run(tmp_path / "run", *TINY, *flags.split()) == 2
    assert_one_line(capsys, words)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--lr fast", "argument --lr"),
        ("--iterations 1.5", "argument --iterations"),
        ("--stop-kl never", "argument --stop-kl/--stop_kl: neither a number nor none: 'never'"),
        ("--learning-rate 1", "unrecognized arguments: --learning-rate 1"),
        ("--iter 1", "unrecognized arguments: --iter 1"),
        ("--preset", "argument --preset: expected one argument"),
    ],
)
def test_a_wrong_flag_is_named_in_one_line(flags, words, tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        run(tmp_path / "run", *flags.split())
    assert stopped.value.code == 2
    assert_one_line(capsys, words)


def test_the_folder_is_required(capsys):
    assert command.main([]) == 2
    assert_one_line(capsys, "--out FOLDER must be given")


def test_a_folder_that_holds_something_is_refused_and_left_as_it_is(finished, tmp_path, capsys):
    before = {path.name: path.stat().st_mtime_ns for path in finished[0].iterdir()}
    assert run(finished[0], *TINY) == 2
    assert_one_line(capsys, "already holds a run: go on with --resume, or choose another --out")
    assert {path.name: path.stat().st_mtime_ns for path in finished[0].iterdir()} == before
    (tmp_path / "notes.txt").write_text("mine")
    assert run(tmp_path, *TINY) == 2
    assert_one_line(capsys, "is not empty and holds no run")
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_two_processes_cannot_train_in_one_folder(tmp_path, capsys):
    with locked(tmp_path):
        assert run(tmp_path, *TINY) == 2
    assert_one_line(capsys, "another process is training in it")
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_named(tmp_path, capsys):
    tmp_path.chmod(0o500)
    try:
        assert run(tmp_path / "run", *TINY) == 2
    finally:
        tmp_path.chmod(0o700)
    assert_one_line(capsys, "Permission denied")


def test_a_prompts_file_without_prompts_or_with_other_bytes_is_named(tmp_path, capsys):
    for data, words in ((b"\n  \n", "holds no prompt"), (b"\xff\xfe\x00", "line 1: not text in UTF-8")):
        (tmp_path / "prompts.txt").write_bytes(data)
        assert run(tmp_path / "run", *TINY, "--prompts", str(tmp_path / "prompts.txt")) == 2
        assert_one_line(capsys, words)


# --- runs that stop


def test_an_update_that_is_not_finite_leaves_its_answers_and_says_so_in_one_line(tmp_path, monkeypatch, capsys):
    def spoilt(settings, ranks):
        roles, prompts = make_roles(settings, ranks)
        with torch.no_grad():
            roles.critic.module.head.weight.fill_(float("nan"))
        return roles, prompts

    monkeypatch.setattr(command, "make_roles", spoilt)
    folder = tmp_path / "run"
    assert run(folder, *TINY) == 2
    dump = folder / "dump.safetensors"
    assert_one_line(capsys, f"values is not finite in the answers [0, 1, 2, 3, 4, 5, 6, 7]; its answers are in {dump}")
    tensors = load_file(dump)
    assert set(tensors) >= {"response_ids", "mask", "scores", "old_logp", "values", "rows"}
    assert bool(tensors["values"][tensors["mask"]].isnan().all()) and bool(tensors["scores"].isfinite().all())
    assert tensors["response_ids"].shape == tensors["mask"].shape == tensors["old_logp"].shape
    with safetensors.safe_open(dump, "pt") as file:
        assert file.metadata()["error"].startswith("values is not finite")
    assert not (folder / "actor").exists()


def test_a_reward_function_that_fails_is_refused_in_one_line(tmp_path, monkeypatch, capsys):
    flags = rewarded_by(monkeypatch, lambda prompts, responses: [float("nan")] * len(prompts))
    assert run(tmp_path / "run", *TINY, *flags) == 2
    assert_one_line(capsys, "must return one finite number per answer")


def test_ctrl_c_ends_a_run_with_one_line_and_keeps_its_rows(tmp_path, monkeypatch, capsys):
    calls = iter(range(100))

    def interrupted(prompts, responses):
        if next(calls) == 2:
            raise KeyboardInterrupt
        return [1.0] * len(prompts)

    assert run(tmp_path / "run", *TINY, *rewarded_by(monkeypatch, interrupted)) == 130
    assert_one_line(capsys, "interrupted")
    assert [row["iteration"] for row in table_of(tmp_path / "run" / "metrics.csv")] == ["0", "1"]
    with locked(tmp_path / "run"):
        pass


@pytest.mark.parametrize("kept", [0, 1, 2])
def test_a_run_killed_while_it_writes_leaves_no_half_written_file(tmp_path, monkeypatch, kept):
    replaced, replace = [], os.replace

    def killed(source, target):
        if len(replaced) == kept:
            raise KeyboardInterrupt
        replaced.append(os.path.basename(target))
        replace(source, target)

    monkeypatch.setattr(os, "replace", killed)
    folder = tmp_path / "run"
    assert run(folder, *TINY) == 130
    assert replaced == ["config.json", "metrics.csv", "samples.csv"][:kept]
    complete = {path.name for path in folder.iterdir() if path.suffix in (".json", ".csv", ".safetensors")}
    assert complete <= {*replaced, "metrics.csv"}
    if kept:
        assert json.loads((folder / "config.json").read_text())["iterations"] == 3
        assert kept == 1 or len(table_of(folder / "metrics.csv")) == 1
    monkeypatch.undo()
    # Without its settings nothing counts as a run, and the folder is free.
    assert run(folder, *TINY, "--iterations", "1") == (2 if kept else 0)
    # There is no checkpoint yet: the run begins again. A run that has come to its end is never begun again.
    assert run(folder, *TINY, "--iterations", "1", "--resume") == (0 if kept else 2)
    assert len(table_of(folder / "metrics.csv")) == 1


def broken_copy(tmp_path, name, drop):
    """A copy of a stored model whose weight file lacks the tensors with that in their names."""
    folder = tmp_path / Path(name).name
    shutil.copytree(data_path(name), folder)
    path = folder / "model.safetensors"
    tensors = {key: x for key, x in safetensors.torch.load_file(path).items() if drop not in key}
    safetensors.torch.save_file(tensors, path, {"format": "pt"})
    return folder


PARTS = [("actor", "models/sft", "gate_proj"), ("reward", "models/reward", "score")]


@pytest.mark.parametrize(("role", "name", "drop"), PARTS)
def test_weights_that_a_checkpoint_lacks_are_not_made_up(tmp_path, capsys, role, name, drop):
    folder = broken_copy(tmp_path, name, drop)
    assert run(tmp_path / "run", *TINY, f"--{role}", str(folder)) == 2
    assert f"run: {folder} lacks the weights " in capsys.readouterr().err


def test_a_cut_off_weight_file_is_named(tmp_path, capsys):
    folder = tmp_path / "sft"
    shutil.copytree(data_path("models/sft"), folder)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    assert run(tmp_path / "run", *TINY, "--actor", str(folder)) == 2
    assert f"the weights of {folder} are damaged" in capsys.readouterr().err


@pytest.mark.parametrize("error", [KeyError("boom"), ValueError("could not convert"), SystemExit(0)])
def test_an_error_of_a_reward_function_is_told_with_its_place(tmp_path, monkeypatch, capsys, error):
    def score(prompts, responses):
        raise error

    assert run(tmp_path / "run", *TINY, *rewarded_by(monkeypatch, score)) == 2
    message = capsys.readouterr().err
    assert (
        f"run: the reward function score raised {type(error).__name__}: " in message and "test_run.py, line" in message
    )


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda n: None, "must return a dict of columns"),
        (lambda n: {"a": [1.0] * (n + 1)}, "in column a for"),
        (lambda n: {"a": ["x"] * n}, "in column a for"),
        (lambda n: {"iteration": [7] * n}, "must not name a column iteration"),
        (lambda n: 1 / 0, "the judge function judge raised ZeroDivisionError"),
    ],
)
def test_a_judge_that_cannot_be_recorded_is_named(tmp_path, monkeypatch, capsys, answer, words):
    def judge(prompts, responses, finished):
        return answer(len(prompts))

    monkeypatch.setitem(sys.modules, "own_module", SimpleNamespace(judge=judge))
    assert run(tmp_path / "run", *TINY, "--judge", "own_module:judge") == 2
    assert words in capsys.readouterr().err


def test_everyone_may_read_the_trained_actor(finished):
    folder, _, _ = finished
    assert (folder / "actor" / "model.safetensors").stat().st_mode & 0o444 == 0o444
