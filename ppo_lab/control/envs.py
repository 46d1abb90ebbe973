"""Vector environments: the only module that imports Gymnasium."""

from importlib import import_module
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode


class EnvStep(NamedTuple):
    """What one action in each of N environments led to. Arrays have shape [N], `states` [N, state_dim].

    `states` is the state each transition led to, before any reset. Where `valid` is False nothing happened but a reset:
    the environment ended its episode one step earlier, ignored this action and now shows the first state of the next
    episode. Such a step is no transition and must not be learned from.
    """

    states: np.ndarray
    rewards: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    valid: np.ndarray


class Envs:
    """N copies of an environment, stepped together.

    Gymnasium's next-step autoreset spends one step on each reset; `step` marks it (`valid` False), so that the state
    after a transition is always the real final observation, never the first one of the next episode. Finished episodes
    are counted in `episodes`, a list of (return, length), until `drain_episodes` takes them.
    """

    def __init__(self, envs: gym.vector.VectorEnv):
        mode = envs.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP)
        if mode != AutoresetMode.NEXT_STEP:
            raise ValueError(f"envs must use next-step autoreset, got {mode}")
        self.envs = envs
        self.num_envs = envs.num_envs
        self.state_dim = int(np.prod(envs.single_observation_space.shape))
        self.action_dim = int(envs.single_action_space.n)
        self.first_action = int(envs.single_action_space.start)
        self.episodes: list[tuple[float, int]] = []

    def reset(self, seed: int) -> np.ndarray:
        """Start fresh episodes everywhere; returns the first states [N, state_dim].

        Episodes under way are dropped. The seed sets every source of chance in the environments.
        """
        states, _ = self.envs.reset(seed=seed)
        self._ended = np.zeros(self.num_envs, dtype=bool)
        self._returns = np.zeros(self.num_envs)
        self._lengths = np.zeros(self.num_envs, dtype=int)
        return self._flat(states)

    def step(self, actions: np.ndarray) -> EnvStep:
        """Take actions [N] (0 … action_dim − 1) and return an `EnvStep`."""
        states, rewards, terminated, truncated, _ = self.envs.step(actions + self.first_action)
        valid = ~self._ended
        ended = terminated | truncated
        self._returns += rewards
        self._lengths += valid
        for i in np.flatnonzero(ended):
            self.episodes.append((float(self._returns[i]), int(self._lengths[i])))
            self._returns[i] = self._lengths[i] = 0
        self._ended = ended
        return EnvStep(self._flat(states), rewards, terminated, truncated, valid)

    def drain_episodes(self) -> list[tuple[float, int]]:
        """(return, length) of the episodes that ended since the last call."""
        episodes, self.episodes = self.episodes, []
        return episodes

    def close(self) -> None:
        self.envs.close()

    def _flat(self, states: np.ndarray) -> np.ndarray:
        return states.reshape(self.num_envs, -1).astype(np.float32, copy=False)


def make_envs(env_id: str, num_envs: int, **options: Any) -> Envs:
    """N environments by Gymnasium id, for any Box observation (flattened) and Discrete actions.

    Gymnasium's own vectorised version is used where there is one (CartPole), else N copies stepped in turn. `options`
    go to the environment.

    Raises ValueError, in one line, for an unknown id, an environment whose packages are missing, a Box action space, an
    observation that is not a Box, or num_envs < 1.
    """
    if num_envs < 1:
        raise ValueError(f"num_envs must be at least 1, got {num_envs}")
    spec = _spec(env_id)
    mode = "vector_entry_point" if spec.vector_entry_point is not None and not options else "sync"
    try:
        envs = gym.make_vec(spec, num_envs=num_envs, vectorization_mode=mode, **options)
    except gym.error.DependencyNotInstalled as error:
        raise ValueError(_missing(env_id)) from error
    _check_spaces(env_id, envs)
    return Envs(envs)


def make_env(env_id: str, **options: Any) -> gym.Env:
    """One environment by Gymnasium id, for loops written by hand and for recording; its spaces are not looked at.

    Raises ValueError, in one line, for an unknown id or an environment whose packages are missing.
    """
    try:
        return gym.make(_spec(env_id), **options)
    except gym.error.DependencyNotInstalled as error:
        raise ValueError(_missing(env_id)) from error


def _spec(env_id: str) -> gym.envs.registration.EnvSpec:
    # "module:Name-v0" names an environment that the module registers when it is imported.
    module, _, name = env_id.rpartition(":")
    try:
        if module:
            import_module(module)
        return gym.spec(name)
    except ImportError as error:
        raise ValueError(f"env_id {env_id!r} names a module that cannot be imported: {error}") from error
    except gym.error.Error as error:
        raise ValueError(f"env_id {env_id!r} is not an environment Gymnasium knows: {error}") from error


def _missing(env_id: str) -> str:
    return f'{env_id} needs a package that is not installed: pip install "gymnasium[box2d,classic-control]"'


def _check_spaces(env_id: str, envs: gym.vector.VectorEnv) -> None:
    observations, actions = envs.single_observation_space, envs.single_action_space
    if not isinstance(actions, gym.spaces.Discrete):
        envs.close()
        raise ValueError(f"{env_id} has the action space {actions}; ppo_lab's agents need a Discrete one")
    if not isinstance(observations, gym.spaces.Box):
        envs.close()
        raise ValueError(f"{env_id} has the observation space {observations}; ppo_lab's agents need a Box")
