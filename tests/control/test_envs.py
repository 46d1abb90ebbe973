"""Environments: a reset is no transition, the last state of an episode is the real one, refusals take one line."""

import sys

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from ppo_lab.control.envs import Envs, make_env, make_envs


class Counter(gym.Env):
    """Observes the number of steps taken in the episode, earns 1 a step, terminates after `length` of them."""

    action_space = gym.spaces.Discrete(2)
    observation_space = gym.spaces.Box(0, np.inf, (1,), np.float32)

    def __init__(self, length=1000, reuse=False):
        self.length, self.reuse = length, reuse
        self.shown = np.zeros(1, np.float32)

    def _observe(self):
        self.shown[0] = self.count
        return self.shown if self.reuse else self.shown.copy()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return self._observe(), {}

    def step(self, action):
        self.count += 1
        return self._observe(), 1.0, self.count >= self.length, False, {}


class Echo(gym.Env):
    """Observes a 2×3 table and earns the action it was given, from a space that starts at 5."""

    action_space = gym.spaces.Discrete(3, start=5)
    observation_space = gym.spaces.Box(0, 10, (2, 3), np.float64)

    def reset(self, *, seed=None, options=None):
        return np.arange(6.0).reshape(2, 3), {}

    def step(self, action):
        return np.arange(6.0).reshape(2, 3), float(action), False, False, {}


class Numbered(gym.Env):
    """Observes a number, not a vector."""

    action_space = gym.spaces.Discrete(2)
    observation_space = gym.spaces.Discrete(4)


@pytest.fixture(autouse=True)
def registered():
    gym.register("Counter", entry_point=Counter)
    gym.register("CounterOfThree", entry_point=Counter, kwargs={"length": 3})
    gym.register("CounterCutAtThree", entry_point=Counter, max_episode_steps=3)
    gym.register("Echo", entry_point=Echo)
    gym.register("Numbered", entry_point=Numbered)
    yield
    for name in ("Counter", "CounterOfThree", "CounterCutAtThree", "Echo", "Numbered"):
        del gym.registry[name]


def steps(envs, n):
    """n steps with action 0."""
    return [envs.step(np.zeros(envs.num_envs, dtype=np.int64)) for _ in range(n)]


def column(taken, name):
    return [getattr(step, name).reshape(-1)[0].item() for step in taken]


def test_the_step_that_only_resets_is_marked():
    envs = make_envs("CounterOfThree", 1)
    assert envs.reset(0).tolist() == [[0]]
    taken = steps(envs, 8)
    assert column(taken, "valid") == [True, True, True, False, True, True, True, False]
    assert column(taken, "states") == [1, 2, 3, 0, 1, 2, 3, 0]
    assert column(taken, "terminated") == [False, False, True, False, False, False, True, False]
    assert column(taken, "rewards") == [1, 1, 1, 0, 1, 1, 1, 0]


def test_the_state_after_a_time_limit_is_the_last_of_the_old_episode():
    envs = make_envs("CounterCutAtThree", 1)
    envs.reset(0)
    taken = steps(envs, 4)
    assert column(taken, "truncated") == [False, False, True, False]
    assert column(taken, "terminated") == [False] * 4
    assert column(taken, "states")[2] == 3


def test_no_valid_step_leads_from_one_episode_into_another():
    envs = make_envs("CounterOfThree", 2)
    before = envs.reset(0)
    for step in steps(envs, 20):
        assert (step.states[step.valid] == before[step.valid] + 1).all()
        before = step.states


def test_fresh_episodes_after_reset_are_valid_at_once():
    envs = make_envs("CounterOfThree", 1)
    envs.reset(0)
    assert column(steps(envs, 3), "terminated")[-1]
    envs.reset(1)
    assert column(steps(envs, 4), "valid") == [True, True, True, False]


def test_B41_every_finished_episode_is_counted_once_with_its_return_and_length():
    envs = make_envs("CounterOfThree", 2)
    envs.reset(0)
    steps(envs, 10)
    assert envs.drain_episodes() == [(3.0, 3)] * 4
    assert envs.drain_episodes() == []
    steps(envs, 1)
    assert envs.drain_episodes() == [(3.0, 3)] * 2


def test_B41_an_episode_dropped_by_a_reset_is_not_counted():
    envs = make_envs("CounterOfThree", 1)
    envs.reset(0)
    steps(envs, 2)
    envs.reset(0)
    steps(envs, 3)
    assert envs.drain_episodes() == [(3.0, 3)]


@pytest.mark.filterwarnings("ignore:.*share an object")
@pytest.mark.parametrize("reuse", [False, True])
def test_B42_a_kept_state_is_not_overwritten_by_later_steps(reuse):
    envs = make_envs("Counter", 1, reuse=reuse)
    kept = [envs.reset(0), *(step.states for step in steps(envs, 2))]
    assert [states.tolist() for states in kept] == [[[0]], [[1]], [[2]]]


def test_B42_a_kept_state_of_the_built_in_cartpole_is_not_overwritten():
    envs = make_envs("CartPole-v1", 2)
    kept = [envs.reset(0), *(step.states for step in steps(envs, 3))]
    copies = [states.copy() for states in kept]
    steps(envs, 5)
    assert all((now == then).all() for now, then in zip(kept, copies, strict=True))


def test_B43_one_seed_gives_different_environments_and_the_same_ones_again():
    first = make_envs("CartPole-v1", 3).reset(42)
    assert len({tuple(row) for row in first.tolist()}) == 3
    assert (make_envs("CartPole-v1", 3).reset(42) == first).all()
    assert (make_envs("CartPole-v1", 3).reset(43) != first).all()


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Acrobot-v1"])
def test_B43_the_next_episode_starts_elsewhere(env_id):
    options = {} if env_id == "CartPole-v1" else {"max_episode_steps": 5}
    envs = make_envs(env_id, 1, **options)
    first = envs.reset(42)
    for step in steps(envs, 30):
        if not step.valid[0]:
            assert (step.states != first).any()
            return
    pytest.fail("no episode ended")


def test_B43_steps_repeat_with_the_seed():
    runs = []
    for _ in range(2):
        envs = make_envs("CartPole-v1", 2)
        envs.reset(7)
        runs.append(np.stack([step.states for step in steps(envs, 40)]))
    assert (runs[0] == runs[1]).all()


def test_actions_count_from_zero_whatever_the_space_starts_at():
    envs = make_envs("Echo", 1)
    envs.reset(0)
    assert envs.action_dim == 3
    assert [envs.step(np.array([a])).rewards[0] for a in (0, 1, 2)] == [5, 6, 7]


def test_observations_are_flattened_to_float32():
    envs = make_envs("Echo", 2)
    states = envs.reset(0)
    assert envs.state_dim == 6
    assert states.dtype == np.float32
    assert states.tolist() == [[0, 1, 2, 3, 4, 5]] * 2


def test_a_vector_environment_that_resets_in_the_same_step_is_refused():
    same_step = SyncVectorEnv([lambda: Counter(3)], autoreset_mode=AutoresetMode.SAME_STEP)
    with pytest.raises(ValueError, match="next-step autoreset"):
        Envs(same_step)


def refusal(call):
    """The message of the ValueError a call raises; one line."""
    with pytest.raises(ValueError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_continuous_actions_are_refused():
    message = refusal(lambda: make_envs("Pendulum-v1", 1))
    assert "Pendulum-v1" in message and "Discrete" in message


def test_observations_that_are_no_vector_are_refused():
    message = refusal(lambda: make_envs("Numbered", 1))
    assert "Numbered" in message and "Box" in message


@pytest.mark.parametrize("make", [lambda name: make_envs(name, 1), make_env])
@pytest.mark.parametrize("name", ["NoSuchGame-v0", "CartPole-v9", "LunarLander-v2", "not a name", ""])
def test_an_unknown_environment_is_refused_by_name(make, name):
    assert repr(name) in refusal(lambda: make(name))


def test_no_environment_at_all_is_refused():
    assert refusal(lambda: make_envs("CartPole-v1", 0)) == "num_envs must be at least 1, got 0"


@pytest.mark.parametrize("make", [lambda name: make_envs(name, 1), make_env])
def test_B44_without_box2d_one_line_says_what_to_install(make, monkeypatch):
    monkeypatch.setitem(sys.modules, "Box2D", None)
    for name in [name for name in sys.modules if name.startswith("gymnasium.envs.box2d")]:
        monkeypatch.delitem(sys.modules, name)
    message = refusal(lambda: make("LunarLander-v3"))
    assert message.startswith("LunarLander-v3 needs a package that is not installed: pip install")


def test_one_environment_for_loops_written_by_hand():
    env = make_env("CartPole-v1")
    state, _ = env.reset(seed=0)
    assert state.shape == (4,)
    env.close()


def test_an_environment_of_a_module_is_found_by_its_long_name(tmp_path, monkeypatch):
    source = "import gymnasium as gym\nfrom gymnasium.envs.classic_control import CartPoleEnv\n"
    (tmp_path / "myworlds.py").write_text(source + "gym.register('MyPole-v0', CartPoleEnv)\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert make_envs("myworlds:MyPole-v0", 2).state_dim == 4
    with pytest.raises(ValueError, match="names a module that cannot be imported"):
        make_envs("nosuchmodule:MyPole-v0", 2)
