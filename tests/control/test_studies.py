"""Stored studies come back as one array per name and one row per seed."""

import numpy as np
import pytest

from ppo_lab import files
from ppo_lab.control.studies import study_curves, study_results

FINAL = """study,algorithm,setting,value,seed,greedy_return,sampled_return
lr,ppo,lr,0.001,0,500,490
lr,ppo,lr,0.001,1,400,380
lr,ppo,lr,1,0,9,9
lr,a2c,lr,0.001,0,120,100
harsh,ppo,whiten,none,0,33,30
"""
CURVES = """study,algorithm,setting,value,seed,steps,entropy
lr,ppo,lr,0.1,0,0,0.6
lr,ppo,lr,0.1,0,100,0.4
lr,ppo,lr,0.1,1,20,0.5
lr,ppo,lr,0.1,1,120,0.3
"""


@pytest.fixture(autouse=True)
def stored(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "DATA", tmp_path)
    (tmp_path / "control").mkdir()
    (tmp_path / "control" / "rates_final.csv").write_text(FINAL, encoding="utf-8")
    (tmp_path / "control" / "rates.csv").write_text(CURVES, encoding="utf-8")


def test_results_by_value_keep_the_order_of_the_file_and_the_seeds():
    results = study_results("rates", algorithm="ppo", study="lr")
    assert list(results) == ["0.001", "1"]
    np.testing.assert_array_equal(results["0.001"], [500, 400])


def test_results_by_another_column():
    results = study_results("rates", "sampled_return", by="algorithm", study="lr", value=0.001)
    assert {name: values.tolist() for name, values in results.items()} == {"ppo": [490, 380], "a2c": [100]}


def test_a_value_that_is_text_is_its_own_name():
    assert list(study_results("rates", study="harsh")) == ["none"]


def test_nothing_left_is_an_error_that_names_the_choice():
    with pytest.raises(ValueError, match=r"no row of rates_final\.csv.*trpo"):
        study_results("rates", algorithm="trpo")


def test_a_study_that_is_not_stored_is_named():
    with pytest.raises(FileNotFoundError, match=r"nothing_final\.csv"):
        study_results("nothing")


def test_curves_are_interpolated_onto_steps_that_every_seed_has_passed():
    """Seed 0 falls 0.002 a step from 0.6 at 0, seed 1 as fast from 0.5 at 20; common steps are 20, 60, 100."""
    steps, values = study_curves("rates", "entropy", points=3)["0.1"]
    np.testing.assert_allclose(steps, [20, 60, 100])
    np.testing.assert_allclose(values, [[0.56, 0.48, 0.4], [0.5, 0.42, 0.34]])
