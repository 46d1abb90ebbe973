"""What every command shares: flags made from settings, and one line, never a traceback, for a failure."""

import argparse
import sys
from collections.abc import Callable
from io import TextIOWrapper
from typing import Any, NoReturn

import torch


class Parser(argparse.ArgumentParser):
    """An argument parser that reports a wrong flag in one line, without repeating the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog.rpartition('.')[2]}: {message} (--help lists the flags)\n")


def run_command(name: str, command: Callable[[], None], *, interrupted: str = "interrupted") -> int:
    """Run a command and return its exit code: 0, 2 for anything wrong with what it was given, 130 after Ctrl-C.

    interrupted is what it says after Ctrl-C.
    """
    for stream in (sys.stdout, sys.stderr):
        # A Windows console, or its redirection, may have no β.
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        command()
    except KeyboardInterrupt:
        print(f"{name}: {interrupted}", file=sys.stderr)
        return 130
    except (ValueError, OSError, ImportError, MemoryError, FloatingPointError) as error:
        print(f"{name}: {_one_line(error)}", file=sys.stderr)
        return 2
    except torch.OutOfMemoryError as error:
        print(f"{name}: out of GPU memory, smaller batches need less: {_one_line(error)}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        # torch has no exception of its own for this, and any other RuntimeError is a bug that needs its traceback.
        if "can't allocate memory" not in str(error):
            raise
        print(f"{name}: not enough memory for a network or rollout of this size", file=sys.stderr)
        return 2
    return 0


def reader(kind: Any) -> dict[str, Any]:
    """How argparse reads a value of a setting's type: keyword arguments of add_argument."""
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    if kind == float | None:
        return {"type": _number_or_none, "metavar": "X"}
    if kind == str | None:
        return {"type": lambda text: None if text.lower() == "none" else text, "metavar": "NAME"}
    return {"type": kind, "metavar": {str: "NAME", int: "N", float: "X"}[kind]}


def _number_or_none(text: str) -> float | None:
    try:
        return None if text.lower() == "none" else float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"neither a number nor none: {text!r}") from error


def shown(value: Any) -> str:
    if value is None:
        return "none"
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split()) or type(error).__name__
