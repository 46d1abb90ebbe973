"""Collecting and scoring: one transition, one index, and the state it led to."""

import gymnasium as gym
import numpy as np
import pytest
import torch

from ppo_lab.control.envs import make_envs
from ppo_lab.control.networks import PPONetwork
from ppo_lab.control.rollout import action_logp, collect, sample_actions, score


class Counter(gym.Env):
    """Observes the steps of the episode; earns 1 for action 1 and nothing for action 0; ends after `length` steps."""

    action_space = gym.spaces.Discrete(2)
    observation_space = gym.spaces.Box(0, np.inf, (1,), np.float32)

    def __init__(self, length=1000):
        self.length = length

    def reset(self, *, seed=None, options=None):
        self.count = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.count += 1
        return np.full(1, self.count, np.float32), float(action), self.count >= self.length, False, {}


@pytest.fixture(autouse=True)
def registered():
    gym.register("Counter", entry_point=Counter)
    yield
    del gym.registry["Counter"]


def rollout_of(n_steps, num_envs=2, seed=0, **options):
    """A rollout of Counter by a fresh network, with the network and the states to go on from."""
    envs = make_envs("Counter", num_envs, **options)
    torch.manual_seed(0)
    network = PPONetwork(1, 2, orthogonal=False)
    rollout, states = collect(envs, network, envs.reset(seed), n_steps, torch.Generator().manual_seed(seed))
    return rollout, states, network


def test_time_is_the_last_axis_and_there_is_one_state_more():
    rollout, _, _ = rollout_of(5, num_envs=3)
    assert rollout.states.shape == (3, 6, 1)
    for name in ("actions", "rewards", "terminated", "truncated", "mask"):
        assert getattr(rollout, name).shape == (3, 5)
    assert rollout.mask.dtype == rollout.terminated.dtype == rollout.truncated.dtype == torch.bool


def test_a_transition_and_its_reward_share_an_index():
    rollout, _, _ = rollout_of(6, length=3)
    assert rollout.states[0, :, 0].tolist() == [0, 1, 2, 3, 0, 1, 2]
    assert rollout.mask[0].tolist() == [True, True, True, False, True, True]
    assert rollout.terminated[0].tolist() == [False, False, True, False, False, False]
    assert torch.equal(rollout.rewards[rollout.mask], rollout.actions[rollout.mask].float())
    assert rollout.actions.unique().tolist() == [0, 1]


def test_no_transition_that_counts_crosses_a_reset():
    rollout, _, _ = rollout_of(50, length=4)
    moved = rollout.states[:, 1:, 0] - rollout.states[:, :-1, 0]
    assert (moved[rollout.mask] == 1).all()
    assert (moved[~rollout.mask] == -4).all()
    assert (~rollout.mask).sum() == 20


def test_the_next_rollout_goes_on_where_this_one_stopped():
    envs = make_envs("Counter", 1)
    network, generator = PPONetwork(1, 2), torch.Generator().manual_seed(0)
    _, states = collect(envs, network, envs.reset(0), 4, generator)
    rollout, _ = collect(envs, network, states, 3, generator)
    assert rollout.states[0, :, 0].tolist() == [4, 5, 6, 7]


def test_the_log_probability_of_a_stored_action_can_be_had_again_from_the_stored_state():
    rollout, _, network = rollout_of(20, length=7)
    scores = score(network, rollout)
    for i in range(2):
        for t in range(20):
            logits = network.logits(rollout.states[i, t])
            expected = logits[rollout.actions[i, t]] - logits.exp().sum().log()
            torch.testing.assert_close(scores.logp[i, t], expected)


def test_next_values_are_those_of_the_state_the_transition_led_to():
    rollout, _, network = rollout_of(6, num_envs=1, max_episode_steps=3)
    scores = score(network, rollout)
    value_of = [network(torch.tensor([float(count)]))[1].item() for count in range(4)]
    assert rollout.truncated[0].tolist() == [False, False, True, False, False, False]
    kept = rollout.mask[0]
    assert scores.values[0, kept].tolist() == pytest.approx([value_of[c] for c in (0, 1, 2, 0, 1)], abs=1e-6)
    # At the time limit: V(3), the state in which the episode was cut, not V(0) of the next one.
    assert scores.next_values[0, kept].tolist() == pytest.approx([value_of[c] for c in (1, 2, 3, 1, 2)], abs=1e-6)


def test_scores_carry_no_gradient():
    rollout, _, network = rollout_of(4)
    assert not any(column.requires_grad for column in score(network, rollout))


def test_equal_generators_give_equal_rollouts_and_others_do_not():
    first, second, other = (rollout_of(50, seed=seed)[0] for seed in (3, 3, 4))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not torch.equal(first.actions, other.actions)


def test_collecting_leaves_the_global_random_numbers_alone():
    envs = make_envs("Counter", 2)
    network = PPONetwork(1, 2)
    before = torch.random.get_rng_state()
    collect(envs, network, envs.reset(0), 5, torch.Generator().manual_seed(0))
    assert torch.equal(torch.random.get_rng_state(), before)


def test_actions_are_drawn_as_often_as_the_policy_says():
    probabilities = torch.tensor([0.6, 0.3, 0.1])
    noise = torch.empty(100_000, 3).exponential_(generator=torch.Generator().manual_seed(0))
    actions = sample_actions(probabilities.log().expand(100_000, 3), noise)
    # Three standard deviations of a share of 0.6 out of 100,000 are 0.0046.
    torch.testing.assert_close(actions.bincount() / 100_000, probabilities, atol=0.005, rtol=0)


def test_an_action_of_probability_zero_is_never_drawn():
    noise = torch.empty(10_000, 2).exponential_(generator=torch.Generator().manual_seed(0))
    assert not sample_actions(torch.tensor([0.0, -torch.inf]).expand(10_000, 2), noise).any()


def test_log_probabilities_by_hand():
    logits = torch.tensor([[0.6, 0.3, 0.1], [0.2, 0.2, 0.6]]).log() + 5
    torch.testing.assert_close(action_logp(logits, torch.tensor([0, 2])), torch.tensor([0.6, 0.6]).log())
