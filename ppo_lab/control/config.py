"""The settings of a training run, and the tuned ones for the book's two environments."""

import math
from dataclasses import dataclass, field, fields, replace
from typing import Any

ALGORITHMS = ("ppo", "ppo-penalty", "trpo", "a2c", "reinforce", "reinforce-baseline")
WHITEN = ("minibatch", "rollout", "none")


def _setting(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class Settings:
    """All that a run depends on. Two runs with equal settings give equal numbers on one machine.

    Raises ValueError naming the field, what it got and what would be right.

    Book: A07 §7
    """

    env_id: str = _setting("CartPole-v1", "Gymnasium environment with a Discrete action space")
    algorithm: str = _setting("ppo", "update rule: " + ", ".join(ALGORITHMS))
    seed: int = _setting(0, "fixes the network, the actions, the minibatches and the environments")
    total_steps: int = _setting(50_000, "environment steps to learn from, over all environments")
    num_envs: int = _setting(8, "environments stepped together (N)")
    n_steps: int = _setting(256, "steps of each environment per rollout (T)")
    lr: float = _setting(3e-4, "learning rate of Adam at the start")
    anneal_lr: bool = _setting(True, "let the learning rate fall to 0 in a straight line over the run")
    reward_scale: float = _setting(1.0, "factor on the rewards the critic learns from, so that values stay near 1")
    gamma: float = _setting(0.99, "discount factor γ")
    gae_lambda: float = _setting(0.95, "λ of GAE")
    k_epochs: int = _setting(10, "passes over one rollout (K)")
    minibatch_size: int = _setting(64, "transitions per gradient step")
    eps_clip: float = _setting(0.2, "clip range ε of the ratio")
    eps_clip_value: float | None = _setting(
        None, "clip range of the value loss, in scaled rewards; none for no clipping"
    )
    value_coef: float = _setting(0.5, "weight c_v of the value loss, which carries a factor ½ inside")
    entropy_coef: float = _setting(0.01, "weight c_e of the entropy bonus")
    max_grad_norm: float = _setting(0.5, "gradient norm above which the gradient is scaled down")
    stop_kl: float | None = _setting(None, "end an update before a step whose approx_kl is above this; none for never")
    whiten: str = _setting(
        "minibatch",
        "where advantages are whitened (one-step algorithms: minibatch is the rollout): " + ", ".join(WHITEN),
    )
    hidden_dim: int = _setting(64, "width of the two hidden layers")
    shared_trunk: bool = _setting(False, "one trunk for both heads, as the book draws it")
    orthogonal: bool = _setting(True, "orthogonal initialisation; no for torch's default")
    kl_coef: float = _setting(1.0, "β that PPO-Penalty starts with")
    target_kl: float = _setting(0.01, "KL per update, in nats: PPO-Penalty's target, TRPO's limit δ")
    checkpoint_every: int = _setting(
        10,
        "iterations between two checkpoints; each starts fresh episodes: n_steps times this is the longest",
    )

    def __post_init__(self) -> None:
        check_settings(self)

    @property
    def baseline(self) -> bool:
        """Whether REINFORCE subtracts V."""
        return self.algorithm == "reinforce-baseline"


_POSITIVE = ("total_steps", "num_envs", "n_steps", "k_epochs", "minibatch_size", "hidden_dim", "checkpoint_every")
_POSITIVE_FLOATS = (
    "lr",
    "reward_scale",
    "eps_clip",
    "max_grad_norm",
    "kl_coef",
    "target_kl",
    "eps_clip_value",
    "stop_kl",
)


def check_settings(settings: Settings) -> None:
    """Raise ValueError for the first setting that has no meaning."""

    def refuse(name: str, right: str) -> None:
        raise ValueError(f"{name} must be {right}, got {getattr(settings, name)!r}")

    for name in fields(settings):
        value = getattr(settings, name.name)
        if isinstance(value, float) and not math.isfinite(value):
            refuse(name.name, "a finite number")
    for name in _POSITIVE:
        if getattr(settings, name) < 1:
            refuse(name, "at least 1")
    for name in _POSITIVE_FLOATS:
        value = getattr(settings, name)
        if value is not None and value <= 0:
            refuse(name, "positive")
    for name in ("gamma", "gae_lambda"):
        if not 0 <= getattr(settings, name) <= 1:
            refuse(name, "between 0 and 1")
    for name in ("seed", "value_coef", "entropy_coef"):
        if getattr(settings, name) < 0:
            refuse(name, "0 or more")
    if settings.seed >= 2**63:
        refuse("seed", "below 2^63")
    if settings.algorithm not in ALGORITHMS:
        refuse("algorithm", "one of " + ", ".join(ALGORITHMS))
    if settings.whiten not in WHITEN:
        refuse("whiten", "one of " + ", ".join(WHITEN))
    if settings.algorithm == "trpo" and settings.shared_trunk:
        refuse("shared_trunk", "false for trpo: fitting the value would move the policy out of the trust region")


# What was measured to work; every other pair starts from the defaults above.
TUNED: dict[tuple[str, str], dict[str, Any]] = {
    ("CartPole-v1", "ppo"): {
        "num_envs": 16,
        "n_steps": 64,
        "minibatch_size": 256,
        "k_epochs": 6,
        "lr": 2e-3,
        "gamma": 0.98,
        "entropy_coef": 0.0,
    },
    ("LunarLander-v3", "ppo"): {
        "total_steps": 900_000,
        "num_envs": 16,
        "n_steps": 128,
        "minibatch_size": 512,
        "k_epochs": 6,
        "lr": 2e-3,
        "reward_scale": 0.05,
        "gamma": 0.995,
        "gae_lambda": 0.98,
        "entropy_coef": 0.005,
    },
    ("CartPole-v1", "ppo-penalty"): {
        "num_envs": 16,
        "n_steps": 64,
        "minibatch_size": 256,
        "k_epochs": 8,
        "lr": 3e-3,
    },
    ("CartPole-v1", "trpo"): {
        "num_envs": 16,
        "n_steps": 64,
        "minibatch_size": 256,
        "k_epochs": 8,
        "lr": 5e-3,
    },
    # One gradient step per rollout: many small rollouts, and a gradient clip that seldom binds.
    ("CartPole-v1", "a2c"): {"num_envs": 16, "n_steps": 32, "lr": 1e-2, "max_grad_norm": 100.0},
    # Steps of an episode that has not ended are dropped: a rollout is longer than the longest episode, 500 steps.
    ("CartPole-v1", "reinforce"): {"num_envs": 1, "n_steps": 512, "lr": 1e-2},
    ("CartPole-v1", "reinforce-baseline"): {"num_envs": 1, "n_steps": 512, "lr": 1e-2},
}


def tuned(env_id: str, algorithm: str = "ppo", **changes: Any) -> Settings:
    """The tuned settings of an environment and algorithm, with changes."""
    known = TUNED.get((env_id, algorithm), {})
    return replace(Settings(), env_id=env_id, algorithm=algorithm, **{**known, **changes})
