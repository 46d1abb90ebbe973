"""Five tiny worlds with known answers, to be run before CartPole: each fails for one kind of fault.

A learner that cannot solve a world of one step has a fault, not bad luck. The worlds are ordered so that each one needs
one thing more than those before it: the first that fails says where to look.
"""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from ppo_lab.control.algorithms import make_learner
from ppo_lab.control.config import Settings
from ppo_lab.control.envs import Envs
from ppo_lab.control.networks import PPONetwork
from ppo_lab.control.rollout import action_logp
from ppo_lab.control.train import Progress, train

GAMMA = 0.5
VALUE_TOLERANCE = 0.1
SURE = 0.9

PROBE_SETTINGS = {
    "gamma": GAMMA,
    "num_envs": 16,
    "n_steps": 8,
    "lr": 0.02,
    "k_epochs": 4,
    "minibatch_size": 32,
    "value_coef": 1.0,
    # An entropy bonus would keep the policy from the sure answer.
    "entropy_coef": 0.0,
    "hidden_dim": 16,
    "target_kl": 0.05,
}
FEW_STEPS, MANY_STEPS = 1000, 4000
ONE_GRADIENT_STEP = ("a2c", "reinforce", "reinforce-baseline")


@dataclass(frozen=True)
class Probe:
    """A world of S states and A actions without chance but for the start, and what a learner must find in it.

    observations [S]: the one number seen in each state. rewards [S][A]. chain: False, every state is an episode of one
    step and all are equally likely; True, state 0 starts and each state leads to the next one. values [S]: V of the
    best policy for γ = 0.5. best_actions [S]: None where there is nothing to choose. fault: what is wrong when this
    probe fails and those before it do not.
    """

    name: str
    observations: tuple[float, ...]
    rewards: tuple[tuple[float, ...], ...]
    values: tuple[float, ...]
    fault: str
    best_actions: tuple[int, ...] | None = None
    chain: bool = False


PROBES = (
    # One step, reward 1. Nothing can matter but the value head and the loss that fits it.
    Probe(
        "probe-value",
        observations=(1.0,),
        rewards=((1.0,),),
        values=(1.0,),
        fault="the value head does not learn: look at the value loss, its coefficient and the optimizer's parameters",
    ),
    # One step, the reward is what was observed. A value that ignores the state settles at 0.
    Probe(
        "probe-observation",
        observations=(-1.0, 1.0),
        rewards=((-1.0,), (1.0,)),
        values=(-1.0, 1.0),
        fault="the value does not follow the observation: look at the gradient through the trunk, and at the order of"
        " states and returns in the batch",
    ),
    # Two steps, reward 1 at the second: the first is worth γ·1 + 0. Without a discount it would be 1, without a
    # bootstrap or with one that stops too early 0.
    Probe(
        "probe-discount",
        observations=(-1.0, 1.0),
        rewards=((0.0,), (1.0,)),
        values=(GAMMA, 1.0),
        chain=True,
        fault="a later reward is not discounted to earlier steps: look at γ, at next_values and at where episodes end",
    ),
    # One step, action 1 earns 1 and action 0 nothing.
    Probe(
        "probe-action",
        observations=(1.0,),
        rewards=((0.0, 1.0),),
        values=(1.0,),
        best_actions=(1,),
        fault="the policy does not move to the better action: look at the sign of the policy loss, the advantages and"
        " the ratio",
    ),
    # One step, the action must answer the observation. Half the reward is had by ignoring it.
    Probe(
        "probe-match",
        observations=(-1.0, 1.0),
        rewards=((1.0, 0.0), (0.0, 1.0)),
        values=(1.0, 1.0),
        best_actions=(0, 1),
        fault="the policy does not follow the observation: look at the pairing of states and actions in a minibatch, at"
        " the gradient through the trunk, and at what policy and value share",
    ),
)


class ProbeVector:
    """N copies of a probe behind Gymnasium's vector interface, with next-step autoreset: what `Envs` can step."""

    metadata: ClassVar[dict[str, Any]] = {}

    def __init__(self, probe: Probe, num_envs: int):
        self.num_envs = num_envs
        self.chain = probe.chain
        # All that Envs reads of the two spaces.
        self.single_observation_space = SimpleNamespace(shape=(1,))
        self.single_action_space = SimpleNamespace(n=len(probe.rewards[0]), start=0)
        # The state behind the last one is the end of an episode.
        self.end = len(probe.observations)
        self.observations = np.array([*probe.observations, 0.0])
        self.rewards = np.array([*probe.rewards, np.zeros(len(probe.rewards[0]))])

    def reset(self, *, seed: int) -> tuple[np.ndarray, dict]:
        """Fresh episodes everywhere; returns (observations [N, 1], info)."""
        self.generator = np.random.default_rng(seed)
        self.state = self._starts()
        return self._observe(), {}

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict]:
        """Actions [N] to (observations [N, 1], rewards, terminated, truncated [N], info)."""
        resets = self.state == self.end
        rewards = self.rewards[self.state, actions]
        following = self.state + 1 if self.chain else self.end
        self.state = np.where(resets, self._starts(), following)
        return self._observe(), rewards, self.state == self.end, np.zeros(self.num_envs, dtype=bool), {}

    def close(self) -> None:
        """Nothing to close."""

    def _starts(self) -> np.ndarray:
        return self.generator.integers(1 if self.chain else self.end, size=self.num_envs)

    def _observe(self) -> np.ndarray:
        return self.observations[self.state, None]


class ProbeReport(NamedTuple):
    """What a learner found in a probe; prints as one line.

    values [S]: V of each state, empty for REINFORCE without a critic. probabilities [S]: π of the best action in each
    state, empty where there is nothing to choose. fault: what to look at, None if the probe passed.
    """

    name: str
    values: list[float]
    right_values: list[float]
    probabilities: list[float]
    fault: str | None

    @property
    def passed(self) -> bool:
        """Whether the answer was found."""
        return self.fault is None

    def __str__(self) -> str:
        found = [f"V {_listed(self.values)}, right {_listed(self.right_values)}"] if self.values else []
        if self.probabilities:
            found.append(f"π(best) {_listed(self.probabilities)}, right above {SURE}")
        line = f"{'✓' if self.passed else '✗'} {self.name}: {'; '.join(found)}"
        return line if self.passed else f"{line}: {self.fault}"


def _listed(numbers: list[float]) -> str:
    return " ".join(f"{number:.2f}" for number in numbers)


def run_probe(name: str, algorithm: str = "ppo", *, seed: int = 0, **changes: Any) -> ProbeReport:
    """Train a fresh learner in one probe, well under a second, and judge what it found.

    It passes if every |V − right| < 0.1 and every π(best action) > 0.9. `changes` are `Settings` to try, a fault on
    purpose among them: value_coef=0 or gamma=0.9 must fail. Raises ValueError for an unknown probe, settings out of
    range, and for a probe that judges values only if the algorithm has no critic.

    Book: §13.8
    Source: the idea of probe environments is Andy Jones's, 2021, "Debugging RL, without the agonizing pain"
    """
    probe = _probe(name)
    if algorithm == "reinforce" and probe.best_actions is None:
        raise ValueError(f"algorithm must have a critic for {name}, got 'reinforce'")
    steps = MANY_STEPS if algorithm in ONE_GRADIENT_STEP else FEW_STEPS
    settings = Settings(
        **{**PROBE_SETTINGS, "total_steps": steps, **changes}, env_id=name, algorithm=algorithm, seed=seed
    )
    envs = Envs(ProbeVector(probe, settings.num_envs))
    learner = make_learner(envs.state_dim, envs.action_dim, settings)
    for _ in train(settings, learner, envs, Progress()):
        pass
    return judge(probe, learner.network, critic=algorithm != "reinforce")


def run_probes(algorithm: str = "ppo", *, seed: int = 0, **changes: Any) -> list[ProbeReport]:
    """`run_probe` on all probes that apply to the algorithm, in order. The first that fails names the fault.

    Book: §13.8
    """
    applicable = [probe for probe in PROBES if algorithm != "reinforce" or probe.best_actions is not None]
    return [run_probe(probe.name, algorithm, seed=seed, **changes) for probe in applicable]


@torch.no_grad()
def judge(probe: Probe, network: PPONetwork, *, critic: bool = True) -> ProbeReport:
    """Compare a network with the answer of a probe; critic=False looks at the policy only."""
    logits, values = network(torch.tensor(probe.observations)[:, None])
    right_values, probabilities = torch.tensor(probe.values), torch.empty(0)
    if probe.best_actions is not None:
        probabilities = action_logp(logits, torch.tensor(probe.best_actions)).exp()
    if not critic:
        values = right_values = torch.empty(0)
    found = bool(((values - right_values).abs() < VALUE_TOLERANCE).all() and (probabilities > SURE).all())
    numbers = (values.tolist(), right_values.tolist(), probabilities.tolist())
    return ProbeReport(probe.name, *numbers, None if found else probe.fault)


def _probe(name: str) -> Probe:
    for probe in PROBES:
        if probe.name == name:
            return probe
    raise ValueError(f"name must be one of {', '.join(probe.name for probe in PROBES)}, got {name!r}")
