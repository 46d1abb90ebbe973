"""The settings of a run: what they refuse, and what they default to."""

from dataclasses import FrozenInstanceError, fields, replace

import pytest

from ppo_lab.control.config import ALGORITHMS, WHITEN, Settings, tuned


@pytest.mark.parametrize(
    ("name", "value", "right"),
    [
        ("total_steps", 0, "at least 1"),
        ("num_envs", 0, "at least 1"),
        ("n_steps", -5, "at least 1"),
        ("k_epochs", 0, "at least 1"),
        ("minibatch_size", 0, "at least 1"),
        ("hidden_dim", 0, "at least 1"),
        ("checkpoint_every", 0, "at least 1"),
        ("lr", 0.0, "positive"),
        ("lr", float("nan"), "a finite number"),
        ("eps_clip", -0.2, "positive"),
        ("eps_clip_value", 0.0, "positive"),
        ("stop_kl", -1.0, "positive"),
        ("max_grad_norm", float("inf"), "a finite number"),
        ("kl_coef", 0.0, "positive"),
        ("target_kl", 0.0, "positive"),
        ("gamma", 1.01, "between 0 and 1"),
        ("gae_lambda", -0.1, "between 0 and 1"),
        ("seed", -1, "0 or more"),
        ("seed", 2**63, "below 2^63"),
        ("value_coef", -0.5, "0 or more"),
        ("entropy_coef", -0.01, "0 or more"),
        ("algorithm", "sac", "one of ppo, ppo-penalty, trpo, a2c, reinforce, reinforce-baseline"),
        ("whiten", "batch", "one of minibatch, rollout, none"),
    ],
)
def test_a_meaningless_setting_is_refused_by_name(name, value, right):
    with pytest.raises(ValueError) as refused:
        replace(Settings(), **{name: value})
    assert str(refused.value) == f"{name} must be {right}, got {value!r}"


@pytest.mark.parametrize(
    ("name", "value"),
    [("gamma", 0.0), ("gamma", 1.0), ("gae_lambda", 1.0), ("entropy_coef", 0.0), ("seed", 0), ("stop_kl", None)],
)
def test_the_ends_of_a_range_are_allowed(name, value):
    assert getattr(replace(Settings(), **{name: value}), name) == value


def test_trpo_cannot_share_a_trunk():
    with pytest.raises(ValueError, match="shared_trunk must be false for trpo"):
        Settings(algorithm="trpo", shared_trunk=True)


def test_settings_cannot_change_during_a_run():
    with pytest.raises(FrozenInstanceError):
        Settings().lr = 1.0


def test_every_setting_explains_itself():
    for setting in fields(Settings):
        assert setting.metadata["help"], setting.name


def test_the_defaults_are_those_of_the_ppo_paper_where_it_names_them():
    # Schulman et al. 2017, table 3: Adam 3e-4, 10 epochs, minibatch 64, γ 0.99, λ 0.95; section 6.1: ε = 0.2.
    settings = Settings()
    assert (settings.lr, settings.k_epochs, settings.minibatch_size) == (3e-4, 10, 64)
    assert (settings.gamma, settings.gae_lambda, settings.eps_clip) == (0.99, 0.95, 0.2)


def test_tuned_starts_from_the_defaults_for_an_unknown_environment():
    assert tuned("Acrobot-v1") == replace(Settings(), env_id="Acrobot-v1")


def test_tuned_takes_changes_last():
    for algorithm in ALGORITHMS:
        settings = tuned("CartPole-v1", algorithm, seed=7, total_steps=123)
        assert (settings.algorithm, settings.seed, settings.total_steps) == (algorithm, 7, 123)


def test_tuned_refuses_what_settings_refuse():
    with pytest.raises(ValueError, match="gamma must be between 0 and 1, got 2"):
        tuned("CartPole-v1", gamma=2)
    with pytest.raises(TypeError, match="learning_rate"):
        tuned("CartPole-v1", learning_rate=1e-3)


def test_only_reinforce_baseline_subtracts_a_baseline():
    assert [algorithm for algorithm in ALGORITHMS if Settings(algorithm=algorithm).baseline] == ["reinforce-baseline"]


@pytest.mark.parametrize("whiten", WHITEN)
def test_each_way_of_whitening_is_allowed(whiten):
    assert Settings(whiten=whiten).whiten == whiten
