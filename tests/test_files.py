"""Stored data are found from any folder, and a missing file says what to do."""

import os
import subprocess
import sys

import pytest

from ppo_lab import files
from ppo_lab.files import data_path, read_table


@pytest.fixture
def data(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "DATA", tmp_path)
    (tmp_path / "control").mkdir()
    return tmp_path


def test_the_data_lie_beside_the_package():
    assert files.DATA.name == "data"
    assert (files.DATA.parent / "ppo_lab" / "files.py").samefile(files.__file__)


def test_a_file_is_found_from_another_folder(data, tmp_path_factory, monkeypatch):
    (data / "control" / "curve.csv").write_text("steps\n1\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    assert data_path("control/curve.csv").read_text(encoding="utf-8") == "steps\n1\n"


def test_a_folder_is_found_too(data):
    assert data_path("control") == data / "control"


def test_a_missing_file_is_named_with_the_command_that_makes_it(data):
    with pytest.raises(FileNotFoundError, match=r"control.nothing\.csv is missing.*make data"):
        data_path("control/nothing.csv")


def test_a_table_is_read_as_rows_with_numbers_and_text(data):
    text = "algorithm,seed,value\nppo,0,1e-3\ntrpo,1,full\na2c,2,nan\n"
    (data / "control" / "study.csv").write_text(text, encoding="utf-8")
    rows = read_table("control/study.csv")
    assert rows[:2] == [
        {"algorithm": "ppo", "seed": 0.0, "value": 0.001},
        {"algorithm": "trpo", "seed": 1.0, "value": "full"},
    ]
    assert rows[2]["value"] != rows[2]["value"]


def test_a_missing_table_is_named(data):
    with pytest.raises(FileNotFoundError, match=r"study\.csv"):
        read_table("study.csv")


def test_files_imports_neither_torch_nor_pandas_itself():
    # The module is loaded by its path: the package around it imports torch.
    code = (
        "import importlib.util, sys; spec = importlib.util.spec_from_file_location('files', sys.argv[1]);"
        "module = importlib.util.module_from_spec(spec); spec.loader.exec_module(module);"
        "print(sorted({'torch', 'numpy', 'pandas'} & set(sys.modules)))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, files.__file__], capture_output=True, text=True, env=os.environ, check=True
    )
    assert run.stdout.strip() == "[]"
