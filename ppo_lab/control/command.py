"""What the commands of this package share: a flag for every setting, and one line, never a traceback, for a failure."""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, NoReturn, get_type_hints

from ppo_lab.control.config import Settings, tuned

GROUPS = {
    "what to learn": "env_id algorithm seed total_steps",
    "experience": "num_envs n_steps reward_scale gamma gae_lambda whiten",
    "update": "lr anneal_lr k_epochs minibatch_size eps_clip eps_clip_value value_coef entropy_coef max_grad_norm "
    "stop_kl kl_coef target_kl",
    "network": "hidden_dim shared_trunk orthogonal",
    "checkpoints": "checkpoint_every",
}


class Parser(argparse.ArgumentParser):
    """An argument parser that reports a wrong flag in one line, without repeating the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog.rpartition('.')[2]}: {message} (--help lists the flags)\n")


def run_command(name: str, command: Callable[[], None], *, interrupted: str = "interrupted") -> int:
    """Run a command and return its exit code: 0, 2 for anything wrong with what it was given, 130 after Ctrl-C.

    interrupted is what it says after Ctrl-C.
    """
    try:
        command()
    except KeyboardInterrupt:
        print(f"{name}: {interrupted}", file=sys.stderr)
        return 130
    except (ValueError, OSError, ImportError, MemoryError) as error:
        print(f"{name}: {_one_line(error)}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        # torch has no exception of its own for this, and any other RuntimeError is a bug that needs its traceback.
        if "can't allocate memory" not in str(error):
            raise
        print(f"{name}: not enough memory for a network or rollout of this size", file=sys.stderr)
        return 2
    return 0


def add_settings_flags(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> None:
    """Add one flag per setting. The help shows the tuned defaults of the --env-id and --algorithm in arguments.

    A flag that is not given is absent from the parsed result: `given_settings` has to tell given from default.
    """
    first = Parser(prog=parser.prog, add_help=False, allow_abbrev=False)
    first.add_argument("--env-id", default=Settings.env_id)
    first.add_argument("--algorithm", default=Settings.algorithm)
    chosen, _ = first.parse_known_args(arguments)
    defaults = tuned(chosen.env_id, chosen.algorithm)
    kinds = get_type_hints(Settings)
    helps = {setting.name: setting.metadata["help"] for setting in fields(Settings)}
    for title, names in GROUPS.items():
        group = parser.add_argument_group(title)
        for name in names.split():
            flag = "--" + name.replace("_", "-")
            text = f"{helps[name]} (default: {_shown(getattr(defaults, name))})".replace("%", "%%")
            group.add_argument(flag, help=text, default=argparse.SUPPRESS, **_reader(kinds[name]))


def given_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings whose flags were given, by name."""
    return {name: value for name, value in vars(arguments).items() if name in get_type_hints(Settings)}


def _reader(kind: Any) -> dict[str, Any]:
    """How argparse reads a value of a field's type."""
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    if kind == float | None:
        return {"type": _number_or_none, "metavar": "X"}
    return {"type": kind, "metavar": {str: "NAME", int: "N", float: "X"}[kind]}


def _number_or_none(text: str) -> float | None:
    try:
        return None if text.lower() == "none" else float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"neither a number nor none: {text!r}") from error


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split()) or type(error).__name__
