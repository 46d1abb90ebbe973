"""Evaluation: whole episodes, the same for the same seed, and without a trace in training."""

import copy
import math
import re

import gymnasium as gym
import numpy as np
import pytest
import torch

from ppo_lab.control import evaluate as evaluation
from ppo_lab.control.algorithms import make_learner
from ppo_lab.control.checkpoint import save_network
from ppo_lab.control.config import Settings
from ppo_lab.control.envs import make_envs
from ppo_lab.control.evaluate import check_fits, evaluate
from ppo_lab.control.networks import PPONetwork
from ppo_lab.control.train import Progress, train
from ppo_lab.files import digest


class Dice(gym.Env):
    """An episode lasts 1 to 6 steps, as its die says; each step pays 1 for action 0 and 0 for action 1."""

    observation_space = gym.spaces.Box(-1, 1, (2,))
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = int(self.np_random.integers(1, 7))
        return np.zeros(2, dtype=np.float32), {}

    def step(self, action):
        self.left -= 1
        return np.zeros(2, dtype=np.float32), float(action == 0), self.left == 0, False, {}


class Uneven(Dice):
    """All episodes of a copy with an even seed last 1 step, with an odd seed 6."""

    def reset(self, *, seed=None, options=None):
        state, info = super().reset(seed=seed)
        if seed is not None:
            self.length = 6 if seed % 2 else 1
        self.left = self.length
        return state, info


@pytest.fixture(scope="module", autouse=True)
def registered():
    for env_id, env in (("Dice-v0", Dice), ("Uneven-v0", Uneven)):
        gym.register(env_id, env)
    yield
    for env_id in ("Dice-v0", "Uneven-v0"):
        del gym.registry[env_id]


def biased(state_dim, probabilities):
    """A network whose policy is the same in every state."""
    network = PPONetwork(state_dim, len(probabilities), 8)
    with torch.no_grad():
        network.actor_head.weight.zero_()
        network.actor_head.bias.copy_(torch.tensor(probabilities).log())
    return network


@pytest.mark.parametrize("episodes", [8, 9, 10, 11, 12])
def test_every_environment_contributes_the_same_number_of_episodes(episodes):
    # By hand: environment i is seeded with seed + i and plays its episodes one after the other.
    lengths = np.zeros((3, 4))
    for i in range(4):
        env = Dice()
        for episode in range(3):
            env.reset(seed=5 + i if episode == 0 else None)
            lengths[episode, i] = env.left
    returns = evaluate(biased(2, [1.0, 1e-9]), "Dice-v0", episodes, seed=5, num_envs=4)
    assert returns.tolist() == lengths.reshape(-1)[:episodes].tolist()


def test_short_episodes_are_not_preferred():
    # Half of the copies play episodes of 1 step, half of 6: the mean is 3.5. The first 40 to finish have a mean of 1.9.
    returns = evaluate(biased(2, [1.0, 1e-9]), "Uneven-v0", 40, num_envs=10)
    assert sorted(returns) == [1] * 20 + [6] * 20


def test_one_episode_and_more_environments_than_episodes():
    assert evaluate(biased(2, [1.0, 1e-9]), "Dice-v0", 1).shape == (1,)
    with pytest.raises(ValueError, match="episodes must be at least 1, got 0"):
        evaluate(biased(2, [1.0, 1e-9]), "Dice-v0", 0)


def test_B47_greedy_and_sampled_scores_differ():
    # Probabilities 0.51 and 0.49: greedy always takes action 0 and earns 1 per step, sampling 0.51.
    network = biased(2, [0.51, 0.49])
    greedy = evaluate(network, "Dice-v0", 400)
    sampled = evaluate(network, "Dice-v0", 400, sampled=True)
    assert abs(greedy.mean() - 3.5) < 0.3
    assert abs(sampled.mean() - 0.51 * 3.5) < 0.3


@pytest.mark.parametrize("sampled", [False, True])
def test_B47_the_same_seed_gives_the_same_score(sampled):
    network = biased(4, [0.51, 0.49])
    scores = [evaluate(network, "CartPole-v1", 20, seed=seed, sampled=sampled).tolist() for seed in (1, 1, 2)]
    assert scores[0] == scores[1] != scores[2]


def test_B47_training_is_the_same_with_and_without_evaluation():
    settings = Settings(total_steps=400, num_envs=2, n_steps=32, k_epochs=2, hidden_dim=8)
    curves = []
    for evaluating in (False, True):
        torch.manual_seed(0)
        envs, learner, rows = make_envs("CartPole-v1", 2), make_learner(4, 2, settings), []
        for row in train(settings, learner, envs, Progress()):
            rows.append({name: x for name, x in row.items() if name != "steps_per_second"})
            if evaluating:
                before = copy.deepcopy(learner.network.state_dict()), torch.get_rng_state(), learner.network.training
                evaluate(learner.network, "CartPole-v1", 5, sampled=True)
                assert digest(before[0]) == digest(learner.network.state_dict())
                assert torch.equal(before[1], torch.get_rng_state())
                assert learner.network.training == before[2]
        curves.append((str(rows), digest(learner.network.state_dict())))
    assert curves[0] == curves[1]


def test_a_network_of_another_shape_is_refused():
    with pytest.raises(ValueError, match="network takes 8 numbers and has 4 actions, CartPole-v1 has 4 and 2"):
        evaluate(PPONetwork(8, 4), "CartPole-v1", 1)
    check_fits(PPONetwork(4, 2), "CartPole-v1", 4, 2)


# The command


@pytest.fixture
def agent(tmp_path):
    save_network(tmp_path, biased(2, [0.51, 0.49]), Settings(env_id="Dice-v0", algorithm="a2c", hidden_dim=8))
    return tmp_path


def test_B47_the_command_says_which_score_it_reports(agent, capsys):
    for flags, label in (([], "greedy"), (["--sampled"], "sampled")):
        assert evaluation.main([str(agent), "--episodes", "200", *flags]) == 0
        first, second, last = capsys.readouterr().out.splitlines()
        assert first == f"Dice-v0, a2c, {label} actions, seed 0"
        assert re.fullmatch(r"mean \d\.\d, standard deviation \d\.\d, minimum [01]\.0", second)
        assert re.fullmatch(r"return \d\.\d ± \d\.\d over 200 episodes", last)


def test_the_command_computes_mean_deviation_and_minimum(agent, monkeypatch, capsys):
    # 2, 4, 4, 4, 5, 5, 7, 9: mean 5, standard deviation 2.
    monkeypatch.setattr(evaluation, "evaluate", lambda *_, **__: np.array([2.0, 4, 4, 4, 5, 5, 7, 9]))
    assert evaluation.main([str(agent)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:] == ["mean 5.0, standard deviation 2.0, minimum 2.0", "return 5.0 ± 2.0 over 8 episodes"]


def test_a_hundred_greedy_episodes_are_the_default(agent, capsys):
    assert evaluation.main([str(agent)]) == 0
    assert capsys.readouterr().out.endswith(" over 100 episodes\n")


@pytest.mark.parametrize(
    ("prepare", "flags", "words"),
    [
        (lambda folder: None, ["--episodes", "0"], "episodes must be at least 1"),
        (lambda folder: None, ["--seed", "-1"], "seed"),
        (lambda folder: (folder / "config.json").unlink(), [], "holds no run: there is no config.json"),
        (lambda folder: (folder / "checkpoint.safetensors").unlink(), [], "holds no checkpoint.safetensors"),
        (lambda folder: (folder / "checkpoint.safetensors").write_bytes(b""), [], "checkpoint.safetensors is damaged"),
        (lambda folder: (folder / "config.json").write_text("{"), [], "config.json is damaged"),
        (lambda folder: save_network(folder, PPONetwork(8, 4), Settings()), [], "network takes 8 numbers"),
        (
            lambda folder: save_network(folder, PPONetwork(3, 1), Settings(env_id="Pendulum-v1")),
            [],
            "Pendulum-v1 has the action space",
        ),
    ],
)
def test_everything_wrong_is_named_in_one_line(agent, prepare, flags, words, capsys):
    prepare(agent)
    assert evaluation.main([str(agent), *flags]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("evaluate: ") and words in err, err


def test_a_missing_folder_is_named(tmp_path, capsys):
    assert evaluation.main([str(tmp_path / "nowhere")]) == 2
    assert capsys.readouterr().err == f"evaluate: {tmp_path / 'nowhere'} holds no run: there is no config.json in it\n"


def test_the_probabilities_of_the_biased_policy_are_as_stated():
    logits = biased(2, [0.51, 0.49]).logits(torch.randn(7, 2))
    assert logits.softmax(-1)[3].tolist() == pytest.approx([0.51, 0.49])
    assert logits[0].tolist() == pytest.approx([math.log(0.51), math.log(0.49)])
