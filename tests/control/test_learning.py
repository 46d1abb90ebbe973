"""Learning runs: from fixed seeds the agents reach the goal of CartPole."""

import numpy as np
import pytest
import torch

from ppo_lab.control.agent import PPOAgent
from ppo_lab.control.config import tuned
from ppo_lab.control.envs import make_env
from ppo_lab.control.evaluate import evaluate
from ppo_lab.control.train import train_agent

pytestmark = pytest.mark.slow

SOLVED = 475


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("seed", [0, 1])
def test_ppo_with_the_tuned_settings_solves_cartpole(seed):
    learner, rows = train_agent(tuned("CartPole-v1", seed=seed))
    assert evaluate(learner.network, "CartPole-v1", 100, seed=1000 + seed).mean() >= SOLVED
    assert rows[0]["episode_return"] < 60


@pytest.mark.parametrize("seed", [0, 1])
def test_the_agent_of_the_book_solves_cartpole_in_a_loop_written_by_hand(seed):
    agent = PPOAgent(4, 2, seed=seed)
    env = make_env("CartPole-v1")
    state, _ = env.reset(seed=seed)
    for step in range(1, 50_001):
        action, log_prob, value = agent.select_action(state)
        next_state, reward, terminated, truncated, _ = env.step(action)
        agent.states.append(state)
        agent.actions.append(action)
        agent.rewards.append(reward)
        agent.dones.append(float(terminated))
        agent.log_probs.append(log_prob)
        agent.values.append(value)
        if truncated and not terminated:
            agent.mark_truncated(next_state)
        state = env.reset()[0] if terminated or truncated else next_state
        if step % 2000 == 0:
            agent.update(agent.select_action(state)[2])
    assert np.mean(evaluate(agent.network, "CartPole-v1", 100, seed=1000 + seed)) >= SOLVED
