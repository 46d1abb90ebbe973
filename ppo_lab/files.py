"""Files: where the book's stored data lie, how its tables are read, and how a file is written whole."""

import csv
import hashlib
import io
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

DATA = Path(__file__).resolve().parent.parent / "data"
TEMPORARY = ".tmp"


def data_path(name: str) -> Path:
    """The path of a file or folder under data/, whatever folder a notebook runs in.

    name: relative to data/, with forward slashes, say "control/eps_clip.csv".
    Raises FileNotFoundError naming the path and the command that makes the data.
    """
    path = DATA / name
    if not path.exists():
        raise FileNotFoundError(f"data file {path} is missing: make it with `make data` in the repository")
    return path


def locate(name: str) -> Path | str:
    """A folder or file by its path, or under data/; any other name is one of the hub's."""
    for path in (Path(name), DATA / name):
        if path.exists():
            return path
    return name


def read_table(name: str) -> list[dict[str, str | float]]:
    """The rows of a CSV file under data/, one dict per row by column name.

    A cell that reads as a number becomes a float, any other stays text. Raises FileNotFoundError like `data_path`.
    """
    with open(data_path(name), newline="", encoding="utf-8") as file:
        return [{column: _number(cell) for column, cell in row.items()} for row in csv.DictReader(file)]


def write_table(path: Path, columns: Iterable[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a CSV file, replaced in one step; floats get four significant digits.

    columns: their order; every row has exactly these. The folder is made if it is missing.
    """
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: f"{x:.4g}" if isinstance(x, float) else x for name, x in row.items()} for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, text.getvalue().encode())


def _number(cell: str) -> str | float:
    try:
        return float(cell)
    except ValueError:
        return cell


def replace_file(path: Path, data: bytes) -> None:
    """Write a file so that path holds either the old bytes or the new ones, whenever the process or machine stops."""
    temporary = path.with_name(path.name + TEMPORARY)
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def digest(tensors: dict[str, Tensor]) -> str:
    """SHA-256 of named tensors: equal if and only if every name and every bit is."""
    sha = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().contiguous().cpu()
        sha.update(f"{name} {tensor.dtype} {list(tensor.shape)} ".encode())
        # NumPy has no bfloat16, so the bits are read as bytes.
        sha.update(tensor.reshape(-1).view(torch.uint8).numpy())
    return sha.hexdigest()
