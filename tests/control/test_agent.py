"""The agent with the book's names: its loop runs, its numbers are right where the printed ones are not."""

import copy
import math

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import nn

import ppo_lab
from ppo_lab.control.agent import PPOAgent


def store(agent, states, rewards, dones):
    """Append steps as a loop would."""
    for state, reward, done in zip(states, rewards, dones, strict=True):
        action, log_prob, value = agent.select_action(state)
        agent.states.append(state)
        agent.actions.append(action)
        agent.rewards.append(reward)
        agent.dones.append(done)
        agent.log_probs.append(log_prob)
        agent.values.append(value)


def filled(n=40, seed=0, **options):
    """An agent with n random steps in its lists, the last one not done."""
    agent = PPOAgent(3, 2, seed=seed, **options)
    rng = np.random.default_rng(seed)
    store(agent, rng.normal(size=(n, 3)).astype(np.float32), rng.normal(size=n).tolist(), [0.0] * n)
    return agent


def parameters_of(agent):
    return torch.cat([p.detach().flatten() for p in agent.network.parameters()])


def value_everywhere(agent, value):
    """Make the critic say `value` of every state."""
    nn.init.zeros_(agent.network.critic_head.weight)
    nn.init.constant_(agent.network.critic_head.bias, value)


def test_the_main_loop_of_the_book_runs_with_only_its_import_changed():
    env = gym.make("CartPole-v1")
    agent = ppo_lab.PPOAgent(
        state_dim=env.observation_space.shape[0],
        action_dim=env.action_space.n,
        lr=3e-4,
        gamma=0.99,
        gae_lambda=0.95,
        eps_clip=0.2,
        k_epochs=10,
    )
    steps, infos = 0, []
    for episode in range(30):
        state, _ = env.reset(seed=episode)
        for _ in range(500):
            action, log_prob, value = agent.select_action(state)
            next_state, reward, terminated, truncated, _ = env.step(action)
            done = terminated or truncated
            agent.states.append(state)
            agent.actions.append(action)
            agent.rewards.append(reward)
            agent.dones.append(float(done))
            agent.log_probs.append(log_prob)
            agent.values.append(value)
            state = next_state
            steps += 1
            if steps % 200 == 0:
                _, _, last_value = agent.select_action(state)
                infos.append(agent.update(last_value))
            if done:
                break
    assert len(infos) == steps // 200 >= 2
    assert len(agent.states) == len(agent.values) == steps % 200
    for info in infos:
        assert {"policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction"} <= info.keys()
        assert all(math.isfinite(number) for number in info.values())


def test_the_positional_arguments_come_in_the_order_of_the_book():
    settings = PPOAgent(4, 2, 1e-3, 0.9, 0.8, 0.1, 5, 0.02, 0.7).settings
    assert (settings.lr, settings.gamma, settings.gae_lambda, settings.eps_clip) == (1e-3, 0.9, 0.8, 0.1)
    assert (settings.k_epochs, settings.entropy_coef, settings.value_coef) == (5, 0.02, 0.7)


# Advantages and returns.


def test_B01_done_ends_the_step_that_carries_it():
    agent = PPOAgent(1, 2, gamma=0.9, gae_lambda=0.8)
    advantages, returns = agent.compute_gae([1, 1, 1], [0.5, 0.4, 0.3], [0, 1, 0], 0.2)
    assert advantages.tolist() == pytest.approx([1.292, 0.6, 0.88])
    assert returns.tolist() == pytest.approx([1.792, 1.0, 1.18])


def test_B02_the_rollout_goes_on_with_the_value_after_its_last_step():
    agent = PPOAgent(1, 2, gamma=0.9, gae_lambda=0.8)
    advantages, _ = agent.compute_gae([1, 1, 1], [0.5, 0.4, 0.3], [0, 0, 0], 0.2)
    assert advantages.tolist() == pytest.approx([1.942592, 1.5036, 0.88])


@pytest.mark.parametrize("done", [0.0, 1.0, False, True])
def test_B04_a_time_limit_goes_on_with_the_value_of_its_own_last_state(done):
    agent = PPOAgent(1, 2, gamma=0.9, gae_lambda=0.8)
    advantages, returns = agent.compute_gae([1, 1], [0.5, 0.5], [0, done], 7.0, {1: 2.0})
    assert advantages.tolist() == pytest.approx([2.606, 2.3])
    assert returns.tolist() == pytest.approx([3.106, 2.8])


@pytest.mark.parametrize("done", [0.0, 1.0])
def test_B04_the_lambda_sum_ends_at_a_time_limit(done):
    agent = PPOAgent(1, 2, gamma=0.9, gae_lambda=0.8)
    advantages, _ = agent.compute_gae([1, 1, 100], [0.5, 0.5, 0.5], [0, done, 1], 7.0, {1: 2.0})
    assert advantages.tolist() == pytest.approx([2.606, 2.3, 99.5])


def test_erratum_B8_a_time_limit_is_not_death():
    agent = PPOAgent(1, 2, gamma=0.99)
    value_everywhere(agent, 100.0)
    store(agent, [np.zeros(1, np.float32)], [1.0], [1.0])
    as_printed, _ = agent.compute_gae(agent.rewards, agent.values, agent.dones, 100.0)
    assert as_printed.tolist() == pytest.approx([-99.0])
    agent.mark_truncated(np.ones(1))
    ours, _ = agent.compute_gae(agent.rewards, agent.values, agent.dones, 100.0, agent.final_values)
    assert ours.tolist() == pytest.approx([0.0], abs=1e-5)


def test_erratum_B9_an_episode_cut_by_the_loop_takes_nothing_from_the_next():
    for marked, right in ((False, [37.57, 38.99, 40.50, 0.0]), (True, [2.54, 1.75, 0.90, 0.0])):
        agent = PPOAgent(1, 2, gamma=0.99, gae_lambda=0.95)
        value_everywhere(agent, 10.0)
        store(agent, np.zeros((3, 1), np.float32), [1.0] * 3, [0.0] * 3)
        if marked:
            agent.mark_truncated(np.zeros(1))
        # The next episode begins in a state worth 50 and gets just that, so it adds no surprise of its own.
        value_everywhere(agent, 50.0)
        store(agent, np.zeros((1, 1), np.float32), [50.0], [1.0])
        advantages, _ = agent.compute_gae(agent.rewards, agent.values, agent.dones, 0.0, agent.final_values)
        assert advantages.tolist() == pytest.approx(right, abs=0.005)


@pytest.mark.parametrize("bad", [[1, 1], [1, 1, 1, 1]])
def test_gae_of_unequal_lengths_is_refused(bad):
    with pytest.raises(ValueError, match="shape"):
        PPOAgent(1, 2).compute_gae(bad, [0.5, 0.4, 0.3], [0, 0, 0], 0.2)


def test_dones_other_than_zero_and_one_are_refused():
    with pytest.raises(ValueError, match="terminated must hold only True/False or 0/1"):
        PPOAgent(1, 2).compute_gae([1.0], [0.5], [0.5], 0.2)


# Acting.


def test_an_action_comes_with_its_log_probability_and_the_value_and_no_graph():
    agent = PPOAgent(3, 4, orthogonal=False)
    state = np.array([0.1, -0.2, 0.3])
    logits, value = agent.network(torch.tensor(state, dtype=torch.float32))
    action, log_prob, got_value = agent.select_action(state)
    assert (type(action), type(log_prob), type(got_value)) == (int, float, float)
    assert log_prob == pytest.approx((logits[action] - logits.exp().sum().log()).item(), abs=1e-6)
    assert got_value == pytest.approx(value.item(), abs=1e-6)


def test_actions_are_drawn_as_often_as_the_policy_says():
    agent = PPOAgent(3, 4, orthogonal=False, seed=1)
    state = np.array([1.0, -2.0, 3.0])
    probabilities = agent.network.logits(torch.tensor(state, dtype=torch.float32)).softmax(-1).tolist()
    counts = np.bincount([agent.select_action(state)[0] for _ in range(3000)], minlength=4)
    # Four standard deviations of a share near one half.
    assert (counts / 3000).tolist() == pytest.approx(probabilities, abs=0.037)


def test_the_deterministic_action_is_the_most_probable_one_and_uses_no_random_number():
    agent, twin = PPOAgent(3, 4, orthogonal=False), PPOAgent(3, 4, orthogonal=False)
    state = np.array([1.0, -2.0, 3.0])
    best = agent.network.logits(torch.tensor(state, dtype=torch.float32)).argmax().item()
    assert [agent.select_action(state, deterministic=True)[0] for _ in range(20)] == [best] * 20
    draws = [[a.select_action(state)[0] for _ in range(50)] for a in (agent, twin)]
    assert draws[0] == draws[1]


@pytest.mark.parametrize("state", [np.zeros(2), np.zeros((1, 3)), np.zeros((2, 3)), 0.0])
def test_a_state_of_another_shape_is_refused(state):
    agent = filled(1)
    for call in (agent.select_action, agent.mark_truncated):
        with pytest.raises(ValueError, match=r"state must have shape \(3,\), got"):
            call(state)


# Updating.


def printed_update(network, states, actions, old_log_probs, advantages, returns, *, lr, epochs):
    """The update as A07 §6.1 prints it, in plain steps: full batch, 0.5·MSE, entropy 0.01, gradient norm 0.5."""
    optimizer = torch.optim.Adam(network.parameters(), lr=lr, eps=1e-5)
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    for _ in range(epochs):
        logits, values = network(states)
        log_probs = logits - logits.exp().sum(-1, keepdim=True).log()
        ratio = (log_probs[range(len(actions)), actions] - old_log_probs).exp()
        policy_loss = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
        value_loss = ((values - returns) ** 2).mean()
        entropy = -(log_probs.exp() * log_probs).sum(-1).mean()
        optimizer.zero_grad()
        (policy_loss + 0.5 * value_loss - 0.01 * entropy).backward()
        nn.utils.clip_grad_norm_(network.parameters(), 0.5)
        optimizer.step()


@pytest.mark.parametrize("shared_trunk", [False, True])
def test_a_full_batch_update_is_the_printed_one(shared_trunk):
    agent = filled(50, lr=1e-3, minibatch_size=None, shared_trunk=shared_trunk)
    book = copy.deepcopy(agent.network)
    advantages, returns = agent.compute_gae(agent.rewards, agent.values, agent.dones, 0.3)
    states, old_log_probs = torch.tensor(np.array(agent.states)), torch.tensor(agent.log_probs)
    before = parameters_of(agent)
    printed_update(book, states, agent.actions, old_log_probs, advantages, returns, lr=1e-3, epochs=10)
    info = agent.update(0.3)
    assert info["updates"] == 10
    after = torch.cat([p.detach().flatten() for p in book.parameters()])
    assert (parameters_of(agent) - before).abs().max() > 5e-3
    torch.testing.assert_close(parameters_of(agent), after, atol=2e-5, rtol=0)


def test_erratum_B10_minibatches_give_many_more_gradient_steps_than_the_printed_full_batch():
    assert filled(200, minibatch_size=None).update(0.0)["updates"] == 10
    assert filled(200).update(0.0)["updates"] == 10 * 4


def test_the_reported_value_loss_carries_a_half():
    agent = filled(1, k_epochs=1)
    agent.dones, agent.rewards, agent.values = [1.0], [3.0], [0.0]
    value_everywhere(agent, 0.0)
    # The return is 3, the value 0: ½·3².
    assert agent.update(0.0)["value_loss"] == pytest.approx(4.5)


def test_the_report_is_the_mean_over_gradient_steps_and_the_largest_ratio():
    agent = filled(60, minibatch_size=None, k_epochs=2, lr=1e-3)
    info = agent.update(0.0)
    # Two steps: at the first every ratio is 1 and the loss of whitened advantages 0.
    assert info["ratio_max"] > 1
    assert info["entropy"] == pytest.approx(math.log(2), abs=1e-3)
    names = "policy_loss value_loss entropy approx_kl clip_fraction clip_fraction_outside ratio_max ratio_mean"
    assert set(info) == {*names.split(), "explained_variance", "lr", "updates"}


def test_an_update_empties_the_lists_and_forgets_the_marks():
    agent = filled(5)
    agent.mark_truncated(np.zeros(3))
    agent.update(0.0)
    for name in ("states", "actions", "rewards", "dones", "log_probs", "values", "final_values"):
        assert len(getattr(agent, name)) == 0


@pytest.mark.parametrize("how", ["done", "truncated"])
def test_the_last_value_is_not_read_where_the_last_step_ended_its_episode(how):
    ends = []
    for last_value in (0.0, 1e6):
        agent = filled(20)
        if how == "done":
            agent.dones[-1] = 1.0
        else:
            agent.mark_truncated(np.zeros(3))
        agent.update(last_value)
        ends.append(parameters_of(agent))
    assert torch.equal(*ends)


def test_an_empty_buffer_is_refused():
    agent = PPOAgent(3, 2)
    with pytest.raises(ValueError, match="update needs stored steps, got an empty buffer"):
        agent.update(0.0)
    with pytest.raises(ValueError, match="mark_truncated needs a stored step"):
        agent.mark_truncated(np.zeros(3))


@pytest.mark.parametrize("name", ["states", "actions", "rewards", "dones", "log_probs", "values"])
def test_lists_of_unequal_length_are_refused_with_their_lengths(name):
    agent = filled(5)
    getattr(agent, name).pop()
    with pytest.raises(ValueError, match=f"one item per step each, got .*{name} 4"):
        agent.update(0.0)
    assert len(agent.states) >= 4


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_reward_that_is_not_finite_leaves_network_and_lists_as_they_were(bad):
    agent = filled(100, minibatch_size=8)
    agent.rewards[0] = bad
    before = parameters_of(agent)
    with pytest.raises(ValueError, match="the update was stopped: advantages must be finite"):
        agent.update(0.0)
    assert torch.equal(parameters_of(agent), before)
    assert len(agent.rewards) == 100


def test_the_learning_rate_falls_to_zero_over_total_updates():
    agent = PPOAgent(3, 2, lr=0.4, total_updates=4)
    rates = []
    for _ in range(6):
        store(agent, np.ones((3, 3), np.float32), [1.0] * 3, [0.0] * 3)
        rates.append(agent.update(0.0)["lr"])
    assert rates == pytest.approx([0.4, 0.3, 0.2, 0.1, 0.0, 0.0])
    assert filled(3, lr=0.4).update(0.0)["lr"] == 0.4


def test_stop_kl_ends_an_update_early():
    assert filled(100, lr=0.05).update(0.0)["updates"] == 20
    assert 1 <= filled(100, lr=0.05, stop_kl=0.01).update(0.0)["updates"] < 20


def test_the_seed_fixes_weights_actions_and_minibatches():
    ends = []
    for seed in (3, 3, 4):
        torch.manual_seed(len(ends))
        agent = filled(80, seed=seed)
        agent.update(0.0)
        ends.append(parameters_of(agent))
    assert torch.equal(ends[0], ends[1]) and not torch.equal(ends[0], ends[2])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lr", 0.0),
        ("gamma", 1.1),
        ("gae_lambda", -0.1),
        ("eps_clip", 0.0),
        ("k_epochs", 0),
        ("entropy_coef", -1.0),
        ("value_coef", -1.0),
        ("minibatch_size", 0),
        ("eps_clip_value", 0.0),
        ("max_grad_norm", 0.0),
        ("stop_kl", 0.0),
        ("hidden_dim", 0),
        ("seed", -1),
        ("total_updates", 0),
        ("lr", math.nan),
    ],
)
def test_an_argument_out_of_range_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=name):
        PPOAgent(4, 2, **{name: value})


def test_an_update_that_stop_kl_ends_before_its_first_step_keeps_the_data():
    agent = PPOAgent(4, 2, stop_kl=0.01)
    for _ in range(8):
        agent.states.append(np.zeros(4))
        agent.actions.append(0)
        agent.rewards.append(1.0)
        agent.dones.append(0.0)
        agent.log_probs.append(-3.0)
        agent.values.append(0.0)
    with pytest.raises(ValueError, match="before the first step: log_probs"):
        agent.update(0.0)
    assert len(agent.states) == 8 and agent.updates == 0


@pytest.mark.parametrize("action", [None, 2, -1, 0.7])
def test_an_action_that_does_not_exist_is_named(action):
    agent = PPOAgent(4, 2)
    _, log_prob, value = agent.select_action(np.zeros(4))
    for lists, item in (
        (agent.states, np.zeros(4)),
        (agent.actions, action),
        (agent.rewards, 1.0),
        (agent.dones, 0.0),
        (agent.log_probs, log_prob),
        (agent.values, value),
    ):
        lists.append(item)
    with pytest.raises(ValueError, match=r"actions\[0\] must be a whole number below 2"):
        agent.update(0.0)
