"""Train a language model with PPO, on a laptop or on many GPUs: the command.

python -m ppo_lab.llm.run --preset tiny --out runs/tiny
deepspeed --num_gpus 8 --module ppo_lab.llm.run --preset qwen2.5-7b-zero3 --out runs/qwen
"""

import argparse
import csv
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import yaml
from tqdm import tqdm

from ppo_lab.command import Parser, reader, run_command, shown
from ppo_lab.diagnostics.watch import Watch
from ppo_lab.files import TEMPORARY, replace_file, write_table
from ppo_lab.llm.checkpoint import checkpoints, load_checkpoint, read_state, read_values, save_checkpoint
from ppo_lab.llm.config import (
    RunSettings,
    all_fields,
    check_ranks,
    flat,
    load_config,
    load_preset,
    make_settings,
    preset_names,
)
from ppo_lab.llm.engine import quiet_deepspeed, start_deepspeed
from ppo_lab.llm.experience import Experience, collect
from ppo_lab.llm.lora import AdaptersOff, merged
from ppo_lab.llm.plan import available_bytes, main_memory, plan, verdict
from ppo_lab.llm.ppo import (
    Judge,
    NonFiniteError,
    Prompts,
    Row,
    judged_columns,
    kl_per_response,
    make_controller,
    sample_table,
    train,
)
from ppo_lab.llm.prompts import encode_prompts, read_prompts
from ppo_lab.llm.ranks import Ranks, read_ranks
from ppo_lab.llm.report import write_report
from ppo_lab.llm.rewards import add_rows, check_context, import_function
from ppo_lab.llm.roles import Roles, check_device, make_roles, needs_deepspeed
from ppo_lab.run_folder import CONFIG, METRICS, Metrics, check_free, cut_metrics, locked

SAMPLES, EVALUATION, DUMP = "samples.csv", "evaluation.csv", "dump.safetensors"
FAILED = ".failed"
TITLES = {"model": "the four roles", "data": "data", "ppo": "PPO", "engine": "machine and record"}
# An iteration that no run reaches: evaluations have sampling noise of their own, the same each time.
EVALUATION_NOISE = 2**41
ENDED = 143


class Stopped(Exception):
    """The run was asked to end by SIGTERM and has saved a checkpoint."""


def train_in_folder(settings: RunSettings, folder: Path, *, resume: bool = False) -> str:
    """Train in a run folder; returns the closing line. Every rank calls it, the first one writes.

    config.json: the settings; metrics.csv and TensorBoard events: a row per iteration; samples.csv: answers as text;
    checkpoints/; at the end report.md with a picture, and actor/, the trained model and its tokenizer as a plain
    Hugging Face folder. resume: go on from the newest checkpoint, if there is one. Raises ValueError for a folder that
    is in use, for models and prompts that do not fit, and for an update that is not finite; the answers that led to it
    are then in dump.safetensors. Raises Stopped after SIGTERM.
    """
    ranks = read_ranks()
    check_ranks(settings, ranks.world_size)
    checkpoint = newest_checkpoint(folder, ranks) if resume else None
    if checkpoint is None and ranks.rank == 0 and not (resume and begun(folder)):
        check_free(folder, advice="choose another --out" if resume else "go on with --resume, or choose another --out")
    judge = None if settings.data.judge is None else import_function(settings.data.judge, "judge")
    device = check_device(settings.engine.device, ranks)
    budget = plan(settings, ranks.world_size)
    if ranks.rank == 0:
        print(verdict(budget, available_bytes(device, ranks), main_memory(ranks)), flush=True)
    quiet_deepspeed(device)
    if needs_deepspeed(settings, ranks):
        start_deepspeed(device)
    roles, prompts = make_roles(settings, ranks)
    evaluate = Evaluation(settings, folder, roles, judge)
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder) if ranks.rank == 0 else nullcontext():
        started = time.perf_counter()
        (folder / FAILED).unlink(missing_ok=True)
        try:
            row = run(settings, folder, roles, prompts, checkpoint, evaluate)
        except Exception as error:
            if ranks.world_size > 1 and not isinstance(error, Stopped):
                (folder / FAILED).touch()
            raise
        if ranks.rank == 0:
            write_report(folder, flat(settings), budget.table())
        seconds = time.perf_counter() - started
    if not row:
        return f"{folder} is finished: {settings.ppo.iterations} iterations"
    return f"{settings.ppo.iterations} iterations, {seconds:.1f} s, {summary(row)}, actor in {folder / 'actor'}"


def run(
    settings: RunSettings,
    folder: Path,
    roles: Roles,
    prompts: Prompts,
    checkpoint: Path | None,
    evaluate: "Evaluation",
) -> Row:
    """Train from the start or from a checkpoint to the end, with all that is recorded; returns the last row."""
    judge = evaluate.judge
    controller, first = make_controller(settings.ppo), 0
    agree_on(checkpoint, roles)
    if checkpoint is not None:
        first = load_checkpoint(checkpoint, roles, controller)
    recorder = Recorder(settings, folder, roles, judge, first) if roles.ranks.rank == 0 else None
    every = settings.engine.checkpoint_every
    row: Row = {}
    with stop_signal(folder / FAILED) as stopping, recorder or nullcontext():
        try:
            for row, experience in train(
                prompts,
                roles,
                settings.ppo,
                judge=judge if recorder is not None else None,
                controller=controller,
                first_iteration=first,
            ):
                done = int(row["iteration"]) + 1
                if recorder is not None:
                    recorder.write(row, experience)
                evaluate.after(done)
                stop = roles.ranks.largest(int(stopping.is_set), roles.actor.device)
                if stop or (every and done % every == 0):
                    if recorder is not None:
                        recorder.log.sync()
                    save_checkpoint(folder, roles, controller, done, settings.engine.keep)
                if stop:
                    raise Stopped(f"ended by SIGTERM after {done} iterations; --resume goes on from there")
        except NonFiniteError as error:
            path = folder / (DUMP if roles.ranks.rank == 0 else f"rank{roles.ranks.rank}_{DUMP}")
            save_dump(path, error)
            raise ValueError(f"iteration stopped before the step: {error}; its answers are in {path}") from error
    export(roles, folder / "actor")
    return row


def newest_checkpoint(folder: Path, ranks: Ranks) -> Path | None:
    """The newest checkpoint of a run folder, or None. Raises ValueError if it does not go with the ranks."""
    found = checkpoints(folder)
    if not found:
        return None
    read_state(found[-1], ranks.world_size)
    return found[-1]


def agree_on(checkpoint: Path | None, roles: Roles) -> None:
    """Raise ValueError if the ranks have not found the same checkpoint: the run folder is not shared by all nodes."""
    own = -1 if checkpoint is None else int(checkpoint.name)
    device = roles.actor.device
    highest, lowest = roles.ranks.largest(own, device), -roles.ranks.largest(-own, device)
    if highest != lowest:
        raise ValueError(f"--out must lie on a disk that all nodes share: only some see checkpoint {highest:06d}")


def begun(folder: Path) -> bool:
    """Whether a folder holds a run that has not come to its end."""
    return (folder / CONFIG).exists() and not (folder / "actor").exists()


class Flag:
    """Something that has happened or not."""

    is_set = False


@contextmanager
def stop_signal(failed: Path) -> Iterator[Flag]:
    """Note SIGTERM instead of dying of it, so that the iteration under way ends and a checkpoint is written.

    failed: a file that a rank which fails leaves. Launchers send SIGTERM to the others then; they may be waiting for
    the dead one and would never come to the end of their iteration, so they end at once.
    """
    flag = Flag()

    def end_with_the_others() -> None:
        while not failed.exists():
            time.sleep(1)
        os._exit(1)

    def note(*_: object) -> None:
        if not flag.is_set:
            threading.Thread(target=end_with_the_others, daemon=True).start()
        flag.is_set = True

    try:
        before = signal.signal(signal.SIGTERM, note)
    except ValueError:
        # Signals are the main thread's; a notebook may call from another.
        yield flag
        return
    try:
        yield flag
    finally:
        signal.signal(signal.SIGTERM, before)


class Recorder:
    """Writes what the first rank has to show: metrics, samples, the progress bar. A context manager."""

    def __init__(self, settings: RunSettings, folder: Path, roles: Roles, judge: Judge | None, first: int):
        self.settings, self.folder, self.roles, self.judge = settings, folder, roles, judge
        replace_file(folder / CONFIG, (json.dumps(flat(settings), indent=2) + "\n").encode())
        cut_metrics(folder / METRICS, first, first_number=0)
        self.samples = [row for row in read_rows(folder / SAMPLES, "iteration") if int(row["iteration"]) < first]
        self.watch = Watch(folder)
        self.log = Metrics(folder, first - 1, axis="iteration")
        self.bar = tqdm(total=settings.ppo.iterations, initial=first, unit=" iterations", disable=None)

    def write(self, row: Row, experience: Experience) -> None:
        """Record one iteration."""
        self.log.write(row)
        self.watch.see(row)
        every, last = self.settings.engine.sample_every, self.settings.ppo.iterations - 1
        if every and (row["iteration"] % every == 0 or row["iteration"] == last):
            table = sample_table(experience, self.roles, self.judge, self.settings.engine.n_samples)
            self.samples += [{"iteration": row["iteration"], **line} for line in table]
            write_table(self.folder / SAMPLES, self.samples[0], self.samples)
        self.bar.set_postfix_str(summary(row), refresh=False)
        self.bar.update()

    def __enter__(self) -> "Recorder":
        self.log.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self.bar.close()
        self.log.__exit__(*exception)


class Evaluation:
    """Answers to the held-out prompts every eval_every iterations; evaluation.csv gets a row each time."""

    def __init__(self, settings: RunSettings, folder: Path, roles: Roles, judge: Judge | None):
        self.settings, self.folder, self.roles, self.judge = settings, folder, roles, judge
        self.prompts: Prompts = []
        if settings.engine.eval_every:
            rows = read_prompts(replace(settings.data, prompts=settings.data.eval_prompts))
            self.prompts = encode_prompts(rows, roles.tokenizer, roles.actor.module.lm, settings)
            add_rows(roles.reward, rows, self.prompts)
            check_context(roles.reward, self.prompts, settings.ppo.max_new_tokens)

    def after(self, iterations: int) -> None:
        """Evaluate if it is time. Every rank calls it."""
        if not self.prompts or iterations % self.settings.engine.eval_every:
            return
        size = self.settings.ppo.batch_size
        total: Row = {}
        for number, first in enumerate(range(0, len(self.prompts), size)):
            part = self.prompts[first : first + size]
            experience = collect(part, self.roles, self.settings.ppo, EVALUATION_NOISE + number)
            row = {"kl_per_response": kl_per_response(experience)}
            if self.roles.ranks.rank == 0:
                row |= judged_columns(experience, self.roles, self.judge)
            for name, value in row.items():
                total[name] = total.get(name, 0.0) + value * len(part) / len(self.prompts)
        if self.roles.ranks.rank == 0:
            rows = [r for r in read_rows(self.folder / EVALUATION, "iterations") if int(r["iterations"]) < iterations]
            row = {"iterations": iterations, **total}
            write_table(self.folder / EVALUATION, row, [*rows, row])


def summary(row: Row) -> str:
    """The numbers to watch, in the order to watch them: KL, value loss, reward, then the length."""
    return (
        f"KL {row['kl_per_response']:.2f}, value loss {row['value_loss']:.3f}, score {row['score']:.2f}, "
        f"length {row['response_length']:.1f}"
    )


def read_rows(path: Path, counter: str) -> list[dict[str, Any]]:
    """The rows of a CSV file as text; none if it does not exist. Raises ValueError unless counter is a whole number."""
    if not path.exists():
        return []
    try:
        with open(path, newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        return [row for row in rows if int(row[counter]) >= 0]
    except (ValueError, KeyError, TypeError, csv.Error) as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def save_dump(path: Path, error: NonFiniteError) -> None:
    """The whole experience behind an update that was not finite, and the places of the minibatch in it."""
    tensors = {name: x.contiguous() for name, x in vars(error.experience).items() if x is not None}
    replace_file(path, safetensors.torch.save({**tensors, "rows": error.rows}, {"error": str(error)}))


def export(roles: Roles, folder: Path) -> None:
    """Write the actor and its tokenizer as a folder that `from_pretrained` reads. Every rank calls it."""
    with roles.actor.whole_weights() as actor:
        if roles.ranks.rank == 0:
            lm = merged(actor.lm) if isinstance(roles.reference, AdaptersOff) else actor.lm
            temporary = folder.with_name(folder.name + TEMPORARY)
            shutil.rmtree(temporary, ignore_errors=True)
            lm.save_pretrained(temporary)
            for file in temporary.glob("*.safetensors"):
                # The library makes them readable for their owner alone.
                file.chmod(0o644)
            roles.tokenizer.save_pretrained(temporary)
            shutil.rmtree(folder, ignore_errors=True)
            temporary.rename(folder)
    roles.ranks.wait()


def make_parser(arguments: Sequence[str] | None = None) -> Parser:
    """The flags of the command: one for every setting. The help shows the defaults of the --preset in arguments."""
    parser = Parser(
        prog="python -m ppo_lab.llm.run",
        usage="%(prog)s --out FOLDER [--preset NAME] [--config FILE] [--resume] [setting ...]",
        description="Train a language model with PPO: actor, reference, reward and critic. The run folder gets\n"
        "config.json, metrics.csv, samples.csv, TensorBoard events, checkpoints, a report and the\n"
        "trained actor. On several GPUs start it with deepspeed or torchrun; nothing else changes.",
        epilog="examples:\n"
        "  python -m ppo_lab.llm.run --preset tiny --out runs/tiny\n"
        "  python -m ppo_lab.llm.run --preset tiny --kl-coef 0 --seed 1 --out runs/no_kl\n"
        "  deepspeed --num_gpus 8 --module ppo_lab.llm.run --preset qwen2.5-7b-zero3 --out runs/qwen\n"
        "  torchrun --nproc-per-node 8 -m ppo_lab.llm.run --preset qwen2.5-7b-zero3 --out runs/qwen\n\n"
        "A flag beats the --config file, and that the preset. Names may be written with - or _. The\n"
        "defaults shown are those of the --preset given beside --help.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    start = parser.add_argument_group("the run")
    start.add_argument("--out", type=Path, metavar="FOLDER", help="run folder; a new run needs a new one")
    start.add_argument("--preset", help=f"one of {', '.join(preset_names())} (default: tiny)")
    start.add_argument("--config", type=Path, metavar="FILE", help="YAML file of settings, as --print-config prints it")
    resume = {"nargs": "?", "const": "auto", "choices": ["auto"]}
    start.add_argument("--resume", **resume, help="go on from the newest checkpoint, or begin if there is none")
    start.add_argument("--print-config", action="store_true", help="print all settings as YAML and end")
    # Launchers pass it; the environment says the same.
    start.add_argument("--local_rank", "--local-rank", help=argparse.SUPPRESS)
    first = Parser(prog=parser.prog, add_help=False, allow_abbrev=False)
    first.add_argument("--preset", default="tiny")
    chosen = first.parse_known_args(arguments)[0].preset
    preset = load_preset(chosen) if chosen in preset_names() else {}
    groups = {group: parser.add_argument_group(title) for group, title in TITLES.items()}
    for name, (group, kind, default, text) in all_fields().items():
        text = f"{text} (default: {shown(preset.get(name, default))})".replace("%", "%%")
        flags = dict.fromkeys(("--" + name.replace("_", "-"), "--" + name))
        groups[group].add_argument(*flags, help=text, default=argparse.SUPPRESS, **reader(kind))
    return parser


def chosen_settings(flags: dict[str, Any], *, resume: bool) -> RunSettings:
    """The settings of a run: preset, then file, then flags. A resumed run keeps the settings it has.

    Raises ValueError for an unknown or impossible setting, and for a flag that a resumed run contradicts; only
    iterations may grow.
    """
    flags = dict(flags)
    out, preset, config = (flags.pop(name) for name in ("out", "preset", "config"))
    given = {**({} if config is None else load_config(config)), **flags}
    chosen = make_settings({**load_preset("tiny" if preset is None else preset), **given}, source=str(config or preset))
    if not (resume and out is not None and (out / CONFIG).exists()):
        if resume and out is not None and checkpoints(out):
            raise ValueError(f"{out / CONFIG} is missing: the checkpoints do not say how the run was set")
        return chosen
    kept, wanted = read_values(out / CONFIG), flat(chosen)
    missing = [name for name in wanted if name not in kept]
    if missing:
        raise ValueError(
            f"{out / CONFIG} has no {', '.join(missing[:3])}: it is damaged, or of a version that had no such setting"
        )
    # Another preset is another run, which its model tells.
    for name in [*given, *(["actor"] if preset is not None else [])]:
        if name != "iterations" and kept[name] != wanted[name]:
            raise ValueError(f"{name} is {kept[name]} in {out}, not {wanted[name]}: a run keeps its settings")
    done = int(checkpoints(out)[-1].name) if checkpoints(out) else 0
    if "iterations" in given:
        kept["iterations"] = wanted["iterations"]
    if kept["iterations"] < done:
        raise ValueError(f"iterations must be at least the {done} that {out} has done, got {kept['iterations']}")
    return make_settings(kept, source=str(out / CONFIG))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code: 143 when SIGTERM ended it, after a checkpoint."""

    def command() -> None:
        flags = vars(make_parser(arguments).parse_args(arguments))
        flags.pop("local_rank")
        resume, print_config = flags.pop("resume") is not None, flags.pop("print_config")
        settings = chosen_settings(flags, resume=resume)
        if print_config:
            print(yaml.safe_dump(flat(settings), sort_keys=False), end="")
            return
        if flags["out"] is None:
            raise ValueError("--out FOLDER must be given (--help lists the flags)")
        torch.set_num_threads(settings.engine.threads)
        line = train_in_folder(settings, flags["out"], resume=resume)
        if read_ranks().rank == 0:
            print(line)

    interrupted = "interrupted; --resume goes on from the last checkpoint, or begins again without one"
    try:
        return run_command("run", command, interrupted=interrupted)
    except Stopped as stopped:
        if read_ranks().rank == 0:
            print(f"run: {stopped}", file=sys.stderr)
        return ENDED


if __name__ == "__main__":
    sys.exit(main())
