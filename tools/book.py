"""Execute the notebooks of the book in place and store them in one normal form. `make book` calls this.

    python tools/book.py                              every notebook under chapters/
    python tools/book.py chapters/05_ppo_agent.ipynb  only this one

A notebook that fails is left as it was; its failing cell is shown and the exit code is 1.
"""

import argparse
import os
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode

CHAPTERS = Path(__file__).resolve().parent.parent / "chapters"
CELL_TIMEOUT = 180  # seconds, the same limit as in the tests
KERNELSPEC = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"


def execute(notebook: NotebookNode, folder: Path, started: list[int]) -> None:
    """Run all cells in a fresh kernel that starts in `folder`; `started` gets the index of each cell as it is sent.

    Raises what nbclient raises.
    """
    NotebookClient(
        notebook,
        kernel_name=KERNELSPEC["name"],
        timeout=CELL_TIMEOUT,
        resources={"metadata": {"path": str(folder)}},
        record_timing=False,
        # A warning about its own transport, the same for every notebook, would hide the lines that matter.
        extra_arguments=["--log-level=ERROR"],
        coalesce_streams=True,
        # Not read off the execution count, which a kernel that dies at once may never report.
        on_cell_execute=lambda cell, cell_index: started.append(cell_index),
    ).execute()


def normalise(notebook: NotebookNode) -> None:
    """Keep what a reader sees; drop what differs from one machine or one run to the next. Cells keep their ids."""
    notebook.metadata = NotebookNode(kernelspec=NotebookNode(KERNELSPEC), language_info=NotebookNode(name="python"))
    for cell in notebook.cells:
        tags = cell.metadata.get("tags", [])
        cell.metadata = NotebookNode(tags=sorted(tags)) if tags else NotebookNode()
        for output in cell.get("outputs", []):
            # The view names a widget model by a random number, and the model itself is not stored.
            output.get("data", {}).pop(WIDGET_VIEW, None)


def write(notebook: NotebookNode, path: Path) -> None:
    """Replace the file in one step, so that an interrupted run leaves the old one whole."""
    nbformat.validate(notebook)
    # Not *.ipynb, so that no test collects it.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        nbformat.write(notebook, temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def failing_cell(notebook: NotebookNode, started: list[int]) -> str:
    """Place and text of the last cell that was started, counted from 1 over all cells."""
    if not started:
        return "before the first cell"
    return f"cell {started[-1] + 1} of {len(notebook.cells)}:\n{notebook.cells[started[-1]].source}"


def make(path: Path) -> bool:
    """Execute, normalise and store one notebook. Returns whether it ran through."""
    # Gives cells an id where an older format has none.
    notebook = nbformat.v4.upgrade(nbformat.read(path, as_version=4))
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.execution_count, cell.outputs = None, []
    started: list[int] = []
    start = time.monotonic()
    try:
        execute(notebook, path.parent, started)
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        place = failing_cell(notebook, started)
        print(f"FAIL {path.name}: {type(error).__name__} in {place}\n\n{error}", file=sys.stderr)
        return False
    normalise(notebook)
    write(notebook, path)
    print(f"{path.name:32} {time.monotonic() - start:6.1f} s", flush=True)
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description="Execute notebooks in place and normalise what is stored.")
    parser.add_argument("notebooks", nargs="*", type=Path, help="default: every notebook under chapters/")
    paths = parser.parse_args().notebooks or sorted(CHAPTERS.rglob("[!.]*.ipynb"))
    missing = [str(path) for path in paths if not path.is_file()]
    if missing:
        parser.error("no such notebook: " + ", ".join(missing))
    # One thread, as in `make`: tiny networks run faster so, and the last digits repeat.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # A list, so that one failing notebook does not keep the others from being made.
    return 0 if all([make(path.resolve()) for path in paths]) else 1


if __name__ == "__main__":
    sys.exit(main())
