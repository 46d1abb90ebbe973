"""The whole thing learns: a dozen iterations of the reviews task raise the reward without leaving the reference."""

import math

import pytest
import torch

from ppo_lab.llm.config import load_preset, make_settings
from ppo_lab.llm.ppo import train
from ppo_lab.llm.reviews import judge
from ppo_lab.llm.roles import make_roles

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def curve(**changes):
    settings = make_settings({**load_preset("tiny"), "iterations": 12, **changes})
    roles, prompts = make_roles(settings)
    return [row for row, _ in train(prompts, roles, settings.ppo, judge=judge)]


def gain(rows, name):
    """Mean of the last three iterations minus that of the first two."""
    return sum(row[name] for row in rows[-3:]) / 3 - sum(row[name] for row in rows[:2]) / 2


@pytest.fixture(scope="module")
def rows():
    return curve(seed=0)


def test_the_score_rises_by_half_a_standard_deviation_and_the_judge_agrees(rows):
    assert gain(rows, "scaled_score") > 0.5
    assert gain(rows, "gold") > 0.15
    assert gain(rows, "positive") > 0.15


def test_the_answers_stay_near_the_reference(rows):
    assert all(row["kl_per_response"] < 4 for row in rows)
    assert rows[-1]["kl_per_response"] > 0.05
    assert all(row["approx_kl"] < 0.05 and row["clip_fraction"] < 0.3 for row in rows)


def test_the_critic_learns_and_every_number_is_finite(rows):
    assert gain(rows, "value_loss") < 0 < gain(rows, "explained_variance")
    assert all(math.isfinite(x) for row in rows for x in row.values())
    assert all(row["updates"] == 4 for row in rows)


def test_a_value_head_on_the_actor_s_trunk_learns_too():
    rows = curve(seed=0, critic="shared", iterations=9)
    assert gain(rows, "scaled_score") > 0.3
    assert all(row["kl_per_response"] < 4 for row in rows)


@pytest.mark.parametrize("kind", ["grpo", "rloo", "remax", "reinforce++"])
def test_without_a_critic_the_score_rises_as_well(kind):
    rows = curve(seed=0, advantage=kind, group_size=4)
    assert gain(rows, "scaled_score") > 0.4
    assert all(row["kl_per_response"] < 4 for row in rows)
