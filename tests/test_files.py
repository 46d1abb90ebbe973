"""Stored data are found from any folder, a missing file says what to do, and a file is written whole or not at all."""

import numpy as np
import pytest
import torch

from ppo_lab import files
from ppo_lab.files import data_path, digest, locate, read_table, replace_file, write_table


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


@pytest.mark.parametrize("moment", ["os.fsync", "os.replace"])
def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch, moment):
    path = tmp_path / "file"
    replace_file(path, b"old")

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(moment, full)
    with pytest.raises(OSError, match="No space left"):
        replace_file(path, b"new")
    assert path.read_bytes() == b"old"


def test_a_digest_depends_on_every_name_and_bit():
    tensors = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([3])}
    first = digest(tensors)
    assert first == digest(dict(reversed(tensors.items())))
    assert first != digest({"a": torch.tensor([1.0, 2.0000002]), "b": torch.tensor([3])})
    assert first != digest({"a": torch.tensor([1.0, 2.0]), "c": torch.tensor([3])})
    assert first != digest({"a": torch.tensor([[1.0, 2.0]]), "b": torch.tensor([3])})


def test_a_digest_reads_bfloat16_and_scalars():
    first = digest({"a": torch.tensor([1.0, 2.0], dtype=torch.bfloat16), "b": torch.tensor(3.0)})
    assert first != digest({"a": torch.tensor([1.0, 2.015625], dtype=torch.bfloat16), "b": torch.tensor(3.0)})


def test_a_name_is_a_path_first_then_one_of_ours_then_of_the_hub(data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (data / "control" / "runs.csv").write_text("theirs")
    assert locate("control/runs.csv").read_text() == "theirs"
    mine = tmp_path / "mine"
    (mine / "control").mkdir(parents=True)
    (mine / "control" / "runs.csv").write_text("mine")
    monkeypatch.chdir(mine)
    assert locate("control/runs.csv").read_text() == "mine"
    assert locate("someone/some-model") == "someone/some-model"


def test_a_table_is_written_with_four_digits_and_leaves_no_temporary_file(tmp_path):
    path = tmp_path / "new" / "table.csv"
    row = {"value": 'a "b",\nc', "seed": 12345, "x": np.float64(1 / 3)}
    write_table(path, row, [row])
    assert path.read_bytes() == b'value,seed,x\n"a ""b"",\nc",12345,0.3333\n'
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("moment", ["os.fsync", "os.replace"])
def test_a_table_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch, moment):
    path = tmp_path / "samples.csv"
    write_table(path, ["x"], [{"x": 1}])

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(moment, full)
    with pytest.raises(OSError, match="No space left"):
        write_table(path, ["x"], [{"x": 2}])
    assert path.read_bytes() == b"x\n1\n"
