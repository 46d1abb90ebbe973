"""Train a language model with PPO: the command.

python -m ppo_lab.llm.run --preset tiny --out runs/tiny
"""

import argparse
import csv
import io
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from tqdm import tqdm

from ppo_lab.command import Parser, reader, run_command, shown
from ppo_lab.files import replace_file
from ppo_lab.llm.config import RunSettings, all_fields, flat, load_preset, make_settings, preset_names
from ppo_lab.llm.engine import start_deepspeed
from ppo_lab.llm.experience import Experience
from ppo_lab.llm.ppo import Judge, NonFiniteError, Row, sample_table, train
from ppo_lab.llm.ranks import read_ranks
from ppo_lab.llm.rewards import import_function
from ppo_lab.llm.roles import Roles, check_device, make_roles, needs_deepspeed
from ppo_lab.run_folder import CONFIG, Metrics, check_free, locked

SAMPLES = "samples.csv"
DUMP = "dump.safetensors"
TITLES = {"model": "the four roles", "data": "data", "ppo": "PPO", "engine": "machine and record"}


def train_in_folder(settings: RunSettings, folder: Path) -> str:
    """Train in a new run folder; returns the closing line.

    config.json: the settings; metrics.csv and TensorBoard events: a row per iteration; samples.csv: answers as text;
    actor/: the trained model and its tokenizer as a plain Hugging Face folder, written at the end. Raises ValueError
    for a folder that is in use, for models and prompts that do not fit, and for an update that is not finite; the
    answers that led to it are then in dump.safetensors.
    """
    check_free(folder, advice="choose another --out")
    ranks = read_ranks()
    if needs_deepspeed(settings, ranks):
        start_deepspeed(check_device(settings.engine.device, ranks))
    roles, prompts = make_roles(settings, ranks)
    judge = None if settings.data.judge is None else import_function(settings.data.judge, "judge")
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder):
        check_free(folder, advice="choose another --out")
        replace_file(folder / CONFIG, (json.dumps(flat(settings), indent=2) + "\n").encode())
        started = time.perf_counter()
        try:
            row = _train_and_record(settings, folder, roles, prompts, judge)
        except NonFiniteError as error:
            save_dump(folder / DUMP, error)
            raise ValueError(
                f"iteration stopped before the step: {error}; its answers are in {folder / DUMP}"
            ) from error
        seconds = time.perf_counter() - started
        export(roles, folder / "actor")
    return f"{settings.ppo.iterations} iterations, {seconds:.1f} s, {summary(row)}, actor in {folder / 'actor'}"


def _train_and_record(
    settings: RunSettings, folder: Path, roles: Roles, prompts: list[list[int]], judge: Judge | None
) -> Row:
    every, samples = settings.engine.sample_every, []
    bar = tqdm(total=settings.ppo.iterations, unit=" iterations", disable=None)
    with bar, Metrics(folder, 0, axis="iteration") as log:
        for row, experience in train(prompts, roles, settings.ppo, judge=judge):
            log.write(row)
            last = row["iteration"] == settings.ppo.iterations - 1
            if every and (row["iteration"] % every == 0 or last):
                table = sample_table(experience, roles, judge, settings.engine.n_samples)
                samples += [{"iteration": row["iteration"], **line} for line in table]
                write_table(folder / SAMPLES, samples)
            bar.set_postfix_str(summary(row), refresh=False)
            bar.update()
    return row


def summary(row: Row) -> str:
    """The numbers to watch, in the order to watch them: KL, value loss, reward, then the length."""
    return (
        f"KL {row['kl_per_response']:.2f}, value loss {row['value_loss']:.3f}, score {row['score']:.2f}, "
        f"length {row['response_length']:.1f}"
    )


def write_table(path: Path, rows: list[dict[str, Any]]) -> None:
    """A CSV file, replaced in one step."""
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: f"{x:.4g}" if isinstance(x, float) else x for name, x in row.items()} for row in rows)
    replace_file(path, text.getvalue().encode())


def save_dump(path: Path, error: NonFiniteError) -> None:
    """The whole experience behind an update that was not finite, and the places of the minibatch in it."""
    experience: Experience = error.experience
    tensors = {name: x.contiguous() for name, x in vars(experience).items() if x is not None}
    replace_file(path, safetensors.torch.save({**tensors, "rows": error.rows}, {"error": str(error)}))


def export(roles: Roles, folder: Path) -> None:
    """Write the actor and its tokenizer as a folder that `from_pretrained` reads."""
    roles.actor.module.lm.save_pretrained(folder)
    roles.tokenizer.save_pretrained(folder)


def make_parser(arguments: Sequence[str] | None = None) -> Parser:
    """The flags of the command: one for every setting. The help shows the defaults of the --preset in arguments."""
    parser = Parser(
        prog="python -m ppo_lab.llm.run",
        usage="%(prog)s --out FOLDER [--preset NAME] [setting ...]",
        description="Train a language model with PPO: actor, reference, reward and critic. The run folder gets\n"
        "config.json, metrics.csv, samples.csv, TensorBoard events and the trained actor.",
        epilog="examples:\n"
        "  python -m ppo_lab.llm.run --preset tiny --out runs/tiny\n"
        "  python -m ppo_lab.llm.run --preset tiny --kl-coef 0 --seed 1 --out runs/no_kl\n"
        "  tensorboard --logdir runs\n\n"
        "The defaults shown are those of the --preset given beside --help.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    run = parser.add_argument_group("the run")
    run.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="run folder; a run needs a new one")
    run.add_argument("--preset", default="tiny", help=f"one of {', '.join(preset_names())} (default: tiny)")
    first = Parser(prog=parser.prog, add_help=False, allow_abbrev=False)
    first.add_argument("--preset", default="tiny")
    chosen = first.parse_known_args(arguments)[0].preset
    preset = load_preset(chosen) if chosen in preset_names() else {}
    groups = {group: parser.add_argument_group(title) for group, title in TITLES.items()}
    for name, (group, kind, default, text) in all_fields().items():
        text = f"{text} (default: {shown(preset.get(name, default))})".replace("%", "%%")
        flag = "--" + name.replace("_", "-")
        groups[group].add_argument(flag, help=text, default=argparse.SUPPRESS, **reader(kind))
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""

    def command() -> None:
        flags = vars(make_parser(arguments).parse_args(arguments))
        out, preset = flags.pop("out"), flags.pop("preset")
        settings = make_settings({**load_preset(preset), **flags})
        torch.set_num_threads(settings.engine.threads)
        print(train_in_folder(settings, out))

    return run_command("run", command)


if __name__ == "__main__":
    sys.exit(main())
