"""Where the book's stored data lie, and how its tables are read."""

import csv
from pathlib import Path

DATA = Path(__file__).resolve().parent.parent / "data"


def data_path(name: str) -> Path:
    """The path of a file or folder under data/, whatever folder a notebook runs in.

    name: relative to data/, with forward slashes, say "control/eps_clip.csv".
    Raises FileNotFoundError naming the path and the command that makes the data.
    """
    path = DATA / name
    if not path.exists():
        raise FileNotFoundError(f"data file {path} is missing: make it with `make data` in the repository")
    return path


def read_table(name: str) -> list[dict[str, str | float]]:
    """The rows of a CSV file under data/, one dict per row by column name.

    A cell that reads as a number becomes a float, any other stays text. Raises FileNotFoundError like `data_path`.
    """
    with open(data_path(name), newline="", encoding="utf-8") as file:
        return [{column: _number(cell) for column, cell in row.items()} for row in csv.DictReader(file)]


def _number(cell: str) -> str | float:
    try:
        return float(cell)
    except ValueError:
        return cell
