"""Checkpoints: what goes in comes out, and a file that is not whole is refused in one line."""

import json
import pickle
import struct

import pytest
import safetensors.torch
import torch

from ppo_lab.control.algorithms import make_learner
from ppo_lab.control.checkpoint import (
    load_checkpoint,
    load_config,
    load_network,
    save_checkpoint,
    save_config,
    save_network,
)
from ppo_lab.control.config import Settings
from ppo_lab.control.envs import make_envs
from ppo_lab.control.networks import PPONetwork
from ppo_lab.control.train import Progress, train
from ppo_lab.files import digest

SETTINGS = Settings(total_steps=200, num_envs=2, n_steps=32, k_epochs=2, hidden_dim=8, seed=3)


def trained(settings=SETTINGS, iterations=2):
    envs = make_envs(settings.env_id, settings.num_envs)
    learner, progress = make_learner(envs.state_dim, envs.action_dim, settings), Progress()
    rows = train(settings, learner, envs, progress)
    for _ in range(iterations):
        next(rows)
    return learner, progress


@pytest.fixture
def saved(tmp_path):
    learner, progress = trained()
    save_config(tmp_path, SETTINGS)
    save_checkpoint(tmp_path, SETTINGS, learner, progress)
    return tmp_path, learner, progress


def test_a_checkpoint_restores_everything_a_run_depends_on(saved):
    folder, learner, progress = saved
    learner.penalty.kl_coef = 1 / 3
    progress.recent.append((0.1 + 0.2, 17))
    save_checkpoint(folder, SETTINGS, learner, progress)
    restored, restored_progress = make_learner(4, 2, SETTINGS), Progress()
    load_checkpoint(folder, SETTINGS, restored, restored_progress)

    for name, tensor in learner.network.state_dict().items():
        assert torch.equal(restored.network.state_dict()[name], tensor), name
    states = [x.optimizer.state_dict()["state"] for x in (learner, restored)]
    assert (
        states[0].keys() == states[1].keys() and len(states[0]) == 12
    )  # two trunks and two heads: 6 weights, 6 biases
    for index, state in states[0].items():
        assert state.keys() == {"step", "exp_avg", "exp_avg_sq"}
        for name, tensor in state.items():
            assert torch.equal(states[1][index][name], tensor), (index, name)
    assert torch.equal(torch.rand(5, generator=restored.generator), torch.rand(5, generator=learner.generator))
    assert restored.penalty.kl_coef == 1 / 3
    assert (restored_progress.iteration, restored_progress.steps) == (2, progress.steps)
    assert list(restored_progress.recent) == list(progress.recent)
    assert restored_progress.recent.maxlen == 100


def test_settings_survive_the_way_through_json(tmp_path):
    settings = Settings(stop_kl=0.1, lr=1 / 3, shared_trunk=True, whiten="rollout")
    save_config(tmp_path, settings)
    assert load_config(tmp_path) == settings
    assert json.loads((tmp_path / "config.json").read_text())["eps_clip_value"] is None


def test_an_agent_is_two_files_and_acts_as_before(tmp_path):
    network = PPONetwork(8, 4, 16, shared_trunk=True)
    save_network(tmp_path / "agent", network, Settings(env_id="LunarLander-v3", hidden_dim=16, shared_trunk=True))
    assert sorted(path.name for path in (tmp_path / "agent").iterdir()) == ["checkpoint.safetensors", "config.json"]
    loaded, settings = load_network(tmp_path / "agent")
    assert settings.env_id == "LunarLander-v3"
    states = torch.randn(5, 8)
    assert torch.equal(loaded(states)[0], network(states)[0]) and torch.equal(loaded(states)[1], network(states)[1])


def test_the_checkpoint_of_a_run_is_an_agent_too(saved):
    folder, learner, _ = saved
    network, settings = load_network(folder)
    assert digest(network.state_dict()) == digest(learner.network.state_dict())
    assert settings == SETTINGS


def test_a_bare_agent_cannot_be_trained_further(tmp_path):
    save_network(tmp_path, PPONetwork(4, 2, 8), SETTINGS)
    with pytest.raises(ValueError, match="holds a network only"):
        load_checkpoint(tmp_path, SETTINGS, make_learner(4, 2, SETTINGS), Progress())


def test_a_checkpoint_holds_tensors_and_text_only(saved):
    data = (saved[0] / "checkpoint.safetensors").read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])
    assert {entry["dtype"] for name, entry in header.items() if name != "__metadata__"} == {"F32", "U8"}
    assert b"pickle" not in data and not data.startswith(b"PK")


def damage(kind, data):
    if kind == "empty":
        return b""
    if kind == "truncated":
        return data[: len(data) // 2]
    if kind == "one bit":
        return data[:-100] + bytes([data[-100] ^ 1]) + data[-99:]
    if kind == "text":
        return b"not a checkpoint\n" * 100
    if kind == "pickle":
        return pickle.dumps({"network": [1.0]})
    if kind == "foreign":
        return safetensors.torch.save({"weight": torch.zeros(2, 2)})
    raise ValueError(kind)


@pytest.mark.parametrize("kind", ["empty", "truncated", "one bit", "text", "pickle", "foreign"])
def test_a_damaged_or_foreign_checkpoint_is_refused(saved, kind):
    folder, _, _ = saved
    path = folder / "checkpoint.safetensors"
    path.write_bytes(damage(kind, path.read_bytes()))
    with pytest.raises(ValueError, match="safetensors"):
        load_network(folder)
    with pytest.raises(ValueError, match="safetensors"):
        load_checkpoint(folder, SETTINGS, make_learner(4, 2, SETTINGS), Progress())


def test_no_flipped_byte_goes_unnoticed(saved):
    folder, _, _ = saved
    path = folder / "checkpoint.safetensors"
    data = path.read_bytes()
    for position in [*range(0, 4000, 37), *range(4000, len(data), 997)]:
        path.write_bytes(data[:position] + bytes([data[position] ^ 0x41]) + data[position + 1 :])
        with pytest.raises(ValueError):
            load_network(folder)


def test_the_checkpoint_of_another_run_is_refused_by_the_first_setting_that_differs(saved, tmp_path):
    folder, _, _ = saved
    save_config(folder, Settings(**{**vars(SETTINGS), "lr": 0.5}))
    with pytest.raises(ValueError, match=r"was trained with lr 0.0003, config.json says 0.5"):
        load_network(folder)


def test_a_network_of_another_shape_is_refused(saved):
    folder, _, _ = saved
    with pytest.raises(ValueError, match=r"actor_head.bias has the shape \[2\], this network's \[4\]"):
        load_checkpoint(folder, SETTINGS, make_learner(8, 4, SETTINGS), Progress())
    wrong = Settings(**{**vars(SETTINGS), "hidden_dim": 16})
    save_network(folder, PPONetwork(4, 2, 8), wrong)
    with pytest.raises(ValueError, match="does not fit"):
        load_network(folder)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "damaged"),
        ("{", "damaged"),
        ("[1, 2]", "no JSON object"),
        (lambda values: {**values, "learning_rate": 1}, "unknown setting learning_rate"),
        (lambda values: {**values, "lr": "fast"}, "lr cannot be 'fast'"),
        (lambda values: {**values, "n_steps": 1.5}, "n_steps cannot be 1.5"),
        (lambda values: {**values, "n_steps": True}, "n_steps cannot be True"),
        (lambda values: {**values, "shared_trunk": 0}, "shared_trunk cannot be 0"),
        (lambda values: {**values, "lr": None}, "lr cannot be None"),
        (lambda values: {**values, "gamma": 2}, "gamma must be between 0 and 1, got 2"),
    ],
)
def test_a_damaged_config_is_refused_by_name(tmp_path, text, words):
    path = tmp_path / "config.json"
    if callable(text):
        save_config(tmp_path, SETTINGS)
        text = json.dumps(text(json.loads(path.read_text())))
    path.write_text(text)
    with pytest.raises(ValueError) as refused:
        load_config(tmp_path)
    assert words in str(refused.value) and str(path) in str(refused.value)


def test_whole_numbers_may_stand_for_floats_and_null_for_none(tmp_path):
    save_config(tmp_path, SETTINGS)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**values, "lr": 1, "stop_kl": None}))
    assert load_config(tmp_path).lr == 1


def test_a_setting_newer_than_the_file_has_its_default(saved):
    folder, _, _ = saved
    values = json.loads((folder / "config.json").read_text())
    del values["stop_kl"]
    (folder / "config.json").write_text(json.dumps(values))
    assert load_network(folder)[1].stop_kl is None


@pytest.mark.parametrize("names", [[], ["config.json"]])
def test_a_folder_without_an_agent_is_named(tmp_path, names):
    if names:
        save_config(tmp_path, SETTINGS)
    with pytest.raises(ValueError, match=str(tmp_path)):
        load_network(tmp_path)
    with pytest.raises(ValueError, match="nowhere holds no run"):
        load_network("nowhere")
