"""`make book` stores one normal form, repeats itself to the byte, and never stores a notebook that failed."""

import json
import os
import subprocess
import sys

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook
from notebook_rules import ROOT, has_normal_metadata, was_executed_in_order

pytestmark = pytest.mark.slow


def run_book(*paths, cwd=ROOT):
    command = [sys.executable, str(ROOT / "tools" / "book.py"), *map(str, paths)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300)


def draft(path, *cells):
    nb = new_notebook(cells=list(cells))
    nb.metadata["kernelspec"] = {"name": "conda-env-foo-py", "display_name": "foo"}
    nbformat.write(nb, path)
    return path


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A draft with foreign metadata, a cell without an id and a widget, made twice: its bytes after each run."""
    folder = tmp_path_factory.mktemp("a folder")
    widget = "import ipywidgets\nipywidgets.interact(lambda x: None, x=(0, 1));"
    code = new_code_cell(
        "import os\nprint(os.path.basename(os.getcwd()))", metadata={"tags": ["b", "a"], "scrolled": True}
    )
    path = draft(folder / "x.ipynb", new_markdown_cell("# X"), code, new_code_cell(widget))
    nameless = json.loads(path.read_text())
    del nameless["cells"][0]["id"]
    nameless["nbformat_minor"] = 4
    path.write_text(json.dumps(nameless))
    runs = []
    for _ in range(2):
        run = run_book(path)
        assert run.returncode == 0, run.stderr
        runs.append((run, path.read_bytes()))
    return folder, runs


def test_one_line_with_seconds(made):
    (run, _), _ = made[1]
    name, seconds, unit = run.stdout.split()
    assert (name, unit) == ("x.ipynb", "s")
    assert 0 < float(seconds) < 120
    assert run.stderr == ""


def test_stored_in_normal_form(made):
    folder, ((_, body), _) = made
    nb = json.loads(body)
    assert has_normal_metadata(nb, folder / "x.ipynb") == []
    assert was_executed_in_order(nb, folder / "x.ipynb") == []
    assert nb["cells"][1]["metadata"] == {"tags": ["a", "b"]}
    assert b"widget-view" not in body
    assert b"interactive(children=(" in body


def test_runs_in_the_notebooks_own_folder(made):
    nb = json.loads(made[1][0][1])
    assert "".join(nb["cells"][1]["outputs"][0]["text"]) == "a folder0\n"


def test_repeats_to_the_byte(made):
    _, ((_, first), (_, second)) = made
    assert first == second


def test_leaves_only_the_notebook(made):
    assert os.listdir(made[0]) == ["x.ipynb"]


def test_failing_notebooks_are_shown_and_not_stored_and_the_next_one_is_made(tmp_path):
    bad = draft(tmp_path / "bad.ipynb", new_code_cell("x = 1"), new_markdown_cell("text"), new_code_cell("x / 0"))
    dies = draft(tmp_path / "dies.ipynb", new_code_cell("import os\nos._exit(3)"))
    good = draft(tmp_path / "good.ipynb", new_code_cell("1"))
    before = bad.read_bytes(), dies.read_bytes()
    run = run_book(bad, dies, good)
    assert run.returncode == 1
    assert (bad.read_bytes(), dies.read_bytes()) == before
    assert "FAIL bad.ipynb: CellExecutionError in cell 3 of 3:\nx / 0\n" in run.stderr
    assert "ZeroDivisionError" in run.stderr
    assert "FAIL dies.ipynb: DeadKernelError in cell 1 of 1:\nimport os" in run.stderr
    assert run.stdout.startswith("good.ipynb")
    assert sorted(os.listdir(tmp_path)) == ["bad.ipynb", "dies.ipynb", "good.ipynb"]


def test_an_unknown_name_is_refused(tmp_path):
    run = run_book(tmp_path / "gone.ipynb")
    assert run.returncode == 2
    assert "no such notebook" in run.stderr
