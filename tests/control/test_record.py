"""Recordings: what is drawn, what is kept, what is refused."""

import sys
from typing import ClassVar

import gymnasium as gym
import numpy as np
import pytest
from PIL import Image

from ppo_lab.control import record as recording
from ppo_lab.control.checkpoint import save_network
from ppo_lab.control.config import Settings
from ppo_lab.control.networks import PPONetwork
from ppo_lab.control.record import record_episode, save_gif


class Lamp(gym.Env):
    """Seven steps of reward 0.5; the picture, 20 × 40, has the brightness 30 · (steps made)."""

    metadata: ClassVar = {"render_modes": ["rgb_array"], "render_fps": 50}
    observation_space = gym.spaces.Box(0, 10, (1,))
    action_space = gym.spaces.Discrete(2)
    open_copies = 0

    def __init__(self, render_mode=None):
        self.render_mode = render_mode
        Lamp.open_copies += 1

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(1, dtype=np.float32), {}

    def step(self, action):
        self.steps += 1
        return np.full(1, self.steps, dtype=np.float32), 0.5, self.steps == 7, False, {}

    def render(self):
        return np.full((20, 40, 3), 30 * self.steps, dtype=np.uint8)

    def close(self):
        Lamp.open_copies -= 1


class Dark(Lamp):
    metadata: ClassVar = {"render_modes": []}


class Unpainted(Lamp):
    def render(self):
        try:
            import no_such_drawing_package  # noqa: F401
        except ImportError as error:
            raise gym.error.DependencyNotInstalled("no_such_drawing_package is not installed") from error


@pytest.fixture(scope="module", autouse=True)
def registered():
    classes = {"Lamp-v0": Lamp, "Dark-v0": Dark, "Unpainted-v0": Unpainted}
    for env_id, env in classes.items():
        gym.register(env_id, env)
    yield
    for env_id in classes:
        del gym.registry[env_id]


@pytest.fixture
def agent(tmp_path):
    save_network(tmp_path / "agent", PPONetwork(1, 2, 8), Settings(env_id="Lamp-v0", hidden_dim=8))
    return tmp_path / "agent"


def record(agent, out, *flags):
    return recording.main([str(agent), "--out", str(out), *flags])


@pytest.mark.parametrize(
    ("every", "steps"), [(1, [0, 1, 2, 3, 4, 5, 6, 7]), (2, [0, 2, 4, 6, 7]), (7, [0, 7]), (50, [0, 7])]
)
def test_frames_show_the_first_state_every_nth_one_and_the_last(every, steps):
    frames, total = record_episode(PPONetwork(1, 2), "Lamp-v0", every=every, width=10)
    assert frames.dtype == np.uint8 and frames.shape == (len(steps), 5, 10, 3)
    assert frames[:, 0, 0, 0].tolist() == [30 * step for step in steps]
    assert total == 3.5


def test_an_episode_depends_on_its_seed_only():
    network = PPONetwork(4, 2)
    runs = [record_episode(network, "CartPole-v1", seed, sampled=True, every=50, width=30) for seed in (1, 1, 2)]
    assert np.array_equal(runs[0][0], runs[1][0]) and runs[0][1] == runs[1][1]
    assert not np.array_equal(runs[0][0][0], runs[2][0][0])


def test_greedy_and_sampled_are_two_recordings():
    # This policy always pushes the same way when greedy: CartPole then falls within about ten steps.
    network = PPONetwork(4, 2)
    network.actor_head.weight.data.zero_()
    network.actor_head.bias.data = network.actor_head.bias.new_tensor([0.02, 0.0])
    greedy = [record_episode(network, "CartPole-v1", seed, every=50, width=30)[1] for seed in range(5)]
    sampled = [record_episode(network, "CartPole-v1", seed, sampled=True, every=50, width=30)[1] for seed in range(5)]
    assert max(greedy) <= 11 < np.mean(sampled)


def test_the_environment_is_closed():
    before = Lamp.open_copies
    record_episode(PPONetwork(1, 2), "Lamp-v0")
    with pytest.raises(ValueError, match="Unpainted-v0 cannot be drawn: no_such_drawing_package is not installed"):
        record_episode(PPONetwork(1, 2), "Unpainted-v0")
    assert Lamp.open_copies == before


@pytest.mark.parametrize(
    ("env_id", "options", "words"),
    [
        ("Dark-v0", {}, "Dark-v0 cannot be drawn: it has no rgb_array render mode"),
        ("CartPole-v1", {}, "network takes 1 numbers and has 2 actions, CartPole-v1 has 4 and 2"),
        ("Pendulum-v1", {}, "Pendulum-v1 has the action space"),
        ("Lamp-v0", {"every": 0}, "every must be at least 1, got 0"),
        ("Lamp-v0", {"width": -3}, "width must be at least 1, got -3"),
    ],
)
def test_what_cannot_be_recorded_is_named(env_id, options, words):
    with pytest.raises(ValueError) as refused:
        record_episode(PPONetwork(1, 2), env_id, **options)
    assert words in str(refused.value)


def test_a_gif_plays_at_the_speed_of_the_environment(tmp_path):
    frames, _ = record_episode(PPONetwork(1, 2), "Lamp-v0", every=2, width=20)
    save_gif(frames, tmp_path / "lamp.gif", every=2)
    with Image.open(tmp_path / "lamp.gif") as gif:
        assert (gif.n_frames, gif.size, gif.info["loop"]) == (5, (20, 10), 0)
        for step, duration in [(0, 40), (2, 40), (4, 40), (6, 40), (7, 1000)]:
            gif.seek([0, 2, 4, 6, 7].index(step))
            assert gif.info["duration"] == duration
            assert gif.convert("RGB").getpixel((3, 3)) == (30 * step,) * 3


def test_B45_recording_needs_no_screen_and_no_video_package(agent, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.setenv("SDL_VIDEODRIVER", "")
    monkeypatch.setitem(sys.modules, "moviepy", None)
    save_network(agent, PPONetwork(4, 2, 8), Settings(hidden_dim=8))
    assert record(agent, tmp_path / "out.gif") == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"{tmp_path / 'out.gif'}: ") and " kB, greedy return " in out and err == ""
    assert (tmp_path / "out.gif").stat().st_size < 100_000


def test_B45_exactly_the_files_asked_for_and_older_ones_kept(agent, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    assert record(agent, tmp_path / "0.gif") == 0
    assert record(agent, tmp_path / "2.gif", "--seed", "2") == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.gif", "2.gif", "agent"]
    capsys.readouterr()
    (tmp_path / "0.gif").write_bytes(b"mine")
    assert record(agent, tmp_path / "0.gif") == 2
    assert capsys.readouterr().err == (
        f"record: {tmp_path / '0.gif'} exists: choose another --out, or --force to replace a file\n"
    )
    assert (tmp_path / "0.gif").read_bytes() == b"mine"
    assert record(agent, tmp_path / "0.gif", "--force") == 0
    assert (tmp_path / "0.gif").read_bytes().startswith(b"GIF89a")


def test_B45_a_recording_that_fails_leaves_the_old_file(agent, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    (tmp_path / "old.gif").write_bytes(b"old")

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    assert record(agent, tmp_path / "old.gif", "--force") == 2
    assert capsys.readouterr().err == "record: [Errno 28] No space left on device\n"
    assert (tmp_path / "old.gif").read_bytes() == b"old"


def test_episodes_follow_one_another(agent, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    assert record(agent, tmp_path / "out.gif", "--episodes", "3", "--every", "7") == 0
    assert "6 frames" in capsys.readouterr().out
    with Image.open(tmp_path / "out.gif") as gif:
        assert gif.n_frames == 6


@pytest.mark.parametrize(
    ("out", "flags", "words"),
    [
        ("out.mp4", [], "out.mp4 must end in .gif"),
        ("nowhere/out.gif", [], "nowhere is not a folder"),
        ("folder.gif", ["--force"], "folder.gif exists"),
        ("out.gif", ["--episodes", "0"], "episodes must be at least 1"),
        ("out.gif", ["--every", "0"], "every must be at least 1"),
        ("out.gif", ["--width", "0"], "width must be at least 1"),
        ("out.gif", ["--seed", "-1"], "seed"),
    ],
)
def test_everything_wrong_is_named_in_one_line(agent, out, flags, words, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    (tmp_path / "folder.gif").mkdir()
    assert record(agent, tmp_path / out, *flags) == 2
    stdout, stderr = capsys.readouterr()
    assert stdout == "" and stderr.count("\n") == 1 and stderr.startswith("record: ") and words in stderr, stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["agent", "folder.gif"]


def test_a_missing_or_damaged_agent_is_named(agent, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    assert record(tmp_path / "nowhere", tmp_path / "out.gif") == 2
    assert "nowhere holds no run" in capsys.readouterr().err
    (agent / "checkpoint.safetensors").write_bytes(b"\0" * 100)
    assert record(agent, tmp_path / "out.gif") == 2
    assert "checkpoint.safetensors is damaged" in capsys.readouterr().err
