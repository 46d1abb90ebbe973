"""The probes: the worlds are what they say, sound learners solve them, and each fault fails at its own probe."""

import numpy as np
import pytest
import torch

from ppo_lab.control import algorithms
from ppo_lab.control.config import ALGORITHMS
from ppo_lab.control.envs import Envs
from ppo_lab.control.networks import PPONetwork
from ppo_lab.control.probes import GAMMA, PROBES, ProbeVector, judge, run_probe, run_probes
from ppo_lab.tabular import TabularMDP

NAMES = [probe.name for probe in PROBES]
VALUE_ONLY = NAMES[:3]


def as_mdp(probe):
    """The probe as an MDP with an end state, for exact values."""
    n = len(probe.observations)
    after = [s + 1 if probe.chain else n for s in range(n)] + [n]
    rewards = torch.tensor([*probe.rewards, [0.0] * len(probe.rewards[0])])
    transition = torch.nn.functional.one_hot(torch.tensor(after), n + 1)[:, None].repeat(1, rewards.shape[1], 1)
    start = torch.tensor([1.0, *[0.0] * n]) if probe.chain else torch.tensor([1 / n] * n + [0.0])
    return TabularMDP(transition, rewards, start, GAMMA, terminal=torch.arange(n + 1) == n)


@pytest.mark.parametrize("probe", PROBES, ids=NAMES)
def test_the_stated_answer_is_the_exact_value_of_the_stated_actions(probe):
    mdp, n = as_mdp(probe), len(probe.observations)
    logits = torch.zeros_like(mdp.reward)
    if probe.best_actions is not None:
        logits[range(n), list(probe.best_actions)] = 100.0
    assert mdp.state_values(logits)[:n].tolist() == pytest.approx(probe.values)
    assert (mdp.advantages(logits)[:n] <= 1e-9).all()


@pytest.mark.parametrize("probe", PROBES, ids=NAMES)
def test_the_environment_steps_as_its_tables_say(probe):
    envs = Envs(ProbeVector(probe, 8))
    rng = np.random.default_rng(0)
    seen = envs.reset(0)
    for _ in range(30):
        actions = rng.integers(envs.action_dim, size=8)
        step = envs.step(actions)
        for i in np.flatnonzero(step.valid):
            state = probe.observations.index(seen[i, 0])
            assert step.rewards[i] == probe.rewards[state][actions[i]]
            ends = not probe.chain or state == len(probe.observations) - 1
            assert step.terminated[i] == ends
            assert step.states[i, 0] == (0 if ends else probe.observations[state + 1])
        resets = ~step.valid
        assert not step.terminated[resets].any() and not step.rewards[resets].any()
        starts = probe.observations[:1] if probe.chain else probe.observations
        assert set(step.states[resets, 0].tolist()) <= set(starts)
        seen = step.states
    lengths = {length for _, length in envs.drain_episodes()}
    assert lengths == {len(probe.observations) if probe.chain else 1}


def test_both_observations_come_up_and_the_seed_fixes_them():
    first, second, other = (ProbeVector(PROBES[1], 100).reset(seed=seed)[0] for seed in (0, 0, 1))
    assert 30 < (first == 1).sum() < 70
    assert (first == second).all() and (first != other).any()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_solves_the_probes_that_apply_to_it(algorithm):
    reports = run_probes(algorithm)
    assert [report.name for report in reports] == (NAMES[3:] if algorithm == "reinforce" else NAMES)
    assert all(report.passed for report in reports), "\n".join(map(str, reports))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3, 4])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_solves_them_from_other_seeds(algorithm, seed):
    reports = run_probes(algorithm, seed=seed)
    assert all(report.passed for report in reports), "\n".join(map(str, reports))


def first_failure(**changes):
    """The name of the first probe PPO fails, with every one before it passed."""
    return next((report.name for report in (run_probe(name, **changes) for name in NAMES) if not report.passed), None)


def test_fault_no_value_loss():
    assert first_failure(value_coef=0.0) == "probe-value"


def test_fault_a_batch_whose_returns_belong_to_other_states(monkeypatch):
    flatten = algorithms.flatten

    def shuffled(rollout, scores, advantages, returns):
        batch = flatten(rollout, scores, advantages, returns)
        return batch._replace(returns=batch.returns[torch.randperm(len(batch.returns))])

    torch.manual_seed(0)
    monkeypatch.setattr(algorithms, "flatten", shuffled)
    assert first_failure() == "probe-observation"


def test_fault_no_discount():
    assert first_failure(gamma=1.0) == "probe-discount"


def test_fault_every_step_taken_for_the_last(monkeypatch):
    gae = algorithms.gae

    def cut(rewards, values, next_values, *, terminated, **options):
        return gae(rewards, values, next_values, terminated=torch.ones_like(terminated), **options)

    monkeypatch.setattr(algorithms, "gae", cut)
    assert first_failure() == "probe-discount"


def test_fault_advantages_with_the_wrong_sign(monkeypatch):
    gae = algorithms.gae

    def flipped(*args, **options):
        advantages, returns = gae(*args, **options)
        return -advantages, returns

    monkeypatch.setattr(algorithms, "gae", flipped)
    assert first_failure() == "probe-action"


def test_fault_actions_that_belong_to_other_states(monkeypatch):
    flatten = algorithms.flatten

    def shifted(*args):
        batch = flatten(*args)
        return batch._replace(
            actions=batch.actions.roll(1), logp=batch.logp.roll(1), advantages=batch.advantages.roll(1)
        )

    monkeypatch.setattr(algorithms, "flatten", shifted)
    assert first_failure() == "probe-match"


def test_a_report_prints_what_was_found_and_what_to_look_at():
    network = PPONetwork(1, 2, 4)
    for p in network.parameters():
        torch.nn.init.zeros_(p)
    report = judge(PROBES[4], network)
    assert not report.passed
    assert report.values == [0, 0] and report.right_values == [1, 1] and report.probabilities == [0.5, 0.5]
    assert str(report) == (
        "✗ probe-match: V 0.00 0.00, right 1.00 1.00; π(best) 0.50 0.50, right above 0.9: " + PROBES[4].fault
    )


def test_a_right_value_with_an_unsure_policy_fails():
    network = PPONetwork(1, 2, 4)
    for p in network.parameters():
        torch.nn.init.zeros_(p)
    network.critic_head.bias.data.fill_(1.0)
    for bias, passes in ((2.0, False), (2.4, True)):  # π = 0.88 and 0.92
        network.actor_head.bias.data[1] = bias
        assert judge(PROBES[3], network).passed == passes


def test_a_sure_policy_with_a_wrong_value_fails_unless_there_is_no_critic():
    network = PPONetwork(1, 2, 4)
    for p in network.parameters():
        torch.nn.init.zeros_(p)
    network.actor_head.bias.data[1] = 10.0
    assert not judge(PROBES[3], network).passed
    assert judge(PROBES[3], network, critic=False).passed
    network.critic_head.bias.data.fill_(0.95)
    assert judge(PROBES[3], network).passed
    network.critic_head.bias.data.fill_(0.85)
    assert not judge(PROBES[3], network).passed


@pytest.mark.parametrize("name", VALUE_ONLY)
def test_reinforce_without_a_critic_is_not_asked_for_values(name):
    with pytest.raises(ValueError, match=f"algorithm must have a critic for {name}"):
        run_probe(name, "reinforce")


def test_an_unknown_probe_is_refused_with_the_list():
    with pytest.raises(ValueError, match=r"name must be one of probe-value, .*, got 'probe'"):
        run_probe("probe")
