"""Small Markov decision processes whose values and gradients are known exactly.

The truth every estimator is held against: V, Q, J(θ) and ∇J(θ) come from linear algebra over the tables, not from
samples. All numbers are float64. The policy is a softmax over logits [S, A], θ is the logits.

Time, where there is any, is the last axis: without a horizon V is [S] and Q [S, A]; with a horizon of H steps the
values depend on the step as well, and V is [S, H], Q [S, A, H], for t = 0 … H−1.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ppo_lab.masking import check_positive, check_same_shape, check_unit_interval


class Trajectories(NamedTuple):
    """Sampled episodes, one per row: N episodes, T steps. What the mask hides is 0 or False."""

    states: Tensor  # [N, T] int64
    actions: Tensor  # [N, T] int64
    rewards: Tensor  # [N, T] float64
    terminated: Tensor  # [N, T] bool, the episode ended with this transition
    truncated: Tensor  # [N, T] bool, the episode went on but the sampling stopped
    mask: Tensor  # [N, T] bool, steps that were taken
    next_states: Tensor  # [N, T] int64, the state this transition led to


@dataclass(eq=False)
class TabularMDP:
    """A finite Markov decision process with known tables.

    transition [S, A, S]: P(s'|s, a). reward [S, A]: the reward of taking a in s. start [S]: P(s_0). gamma in [0, 1].
    terminal [S] bool: entering such a state ends the episode; its own rows of the tables are never read. horizon: every
    episode ends after that many steps, if not before; None: it goes on until a terminal state.

    Raises ValueError for tables of other shapes, rows that are not distributions, a start in a terminal state, and for
    gamma = 1 without a horizon when an episode may never end (then J is infinite).

    Book: §13.1.1
    Source: Sutton & Barto 2018
    """

    transition: Tensor
    reward: Tensor
    start: Tensor
    gamma: float
    terminal: Tensor | None = None
    horizon: int | None = None

    def __post_init__(self) -> None:
        self.transition, self.reward, self.start = self.transition.double(), self.reward.double(), self.start.double()
        self.terminal = (torch.zeros(len(self.reward)) if self.terminal is None else self.terminal).bool()
        self._check_shapes()
        self._check_numbers()
        self.reward = self.reward.masked_fill(self.terminal[:, None], 0.0)
        # The moves after which the episode goes on; what is missing from a row is the probability that it ends.
        self._onward = self.transition.masked_fill(self.terminal[:, None, None] | self.terminal, 0.0)

    def policy(self, logits: Tensor) -> Tensor:
        """π(a|s) = softmax over the actions, [S, A]. Raises ValueError for logits of another shape.

        Book: §13.1.1
        """
        check_same_shape(logits=logits, reward=self.reward)
        return torch.softmax(logits.double(), -1)

    def state_values(self, logits: Tensor) -> Tensor:
        """The value of each state under π: V = r_π + γ P_π V, differentiable in the logits.

        Solved as (I − γ P_π) V = r_π, or backwards from V_H = 0 when there is a horizon. Terminal states have V = 0.
        Returns [S], with a horizon [S, H].

        Book: §13.1.4
        Source: Sutton & Barto 2018
        """
        step, reward = self._step_matrix(logits), (self.policy(logits) * self.reward).sum(-1)
        if self.horizon is None:
            return torch.linalg.solve(torch.eye(len(step)).to(step) - self.gamma * step, reward)
        values = [reward]
        for _ in range(self.horizon - 1):
            values.append(reward + self.gamma * step @ values[-1])
        return torch.stack(values[::-1], -1)

    def action_values(self, logits: Tensor) -> Tensor:
        """The value of each action: Q(s, a) = r(s, a) + γ Σ_{s'} P(s'|s, a) V(s'). Returns [S, A], or [S, A, H].

        With a horizon the V on the right is that of the next step, and 0 after the last.

        Book: §13.1.3
        Source: Sutton & Barto 2018
        """
        values = self.state_values(logits)
        if self.horizon is None:
            return self.reward + self.gamma * self._onward @ values
        next_values = torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], -1)
        return self.reward[..., None] + self.gamma * self._onward @ next_values

    def advantages(self, logits: Tensor) -> Tensor:
        """How much better an action is than the policy: A(s, a) = Q(s, a) − V(s). Returns [S, A], or [S, A, H].

        Book: §13.1.4
        Source: Baird 1993
        """
        return self.action_values(logits) - self.state_values(logits).unsqueeze(1)

    def objective(self, logits: Tensor) -> Tensor:
        """The expected return J(θ) = E[Σ_t γ^t r_t], a scalar that autograd can differentiate.

        Book: §13.1.1
        Source: Sutton & Barto 2018
        """
        values = self.state_values(logits)
        return self.start @ (values if self.horizon is None else values[:, 0])

    def objective_gradient(self, logits: Tensor) -> Tensor:
        """∇J by the policy-gradient theorem, without autograd. Returns [S, A].

            ∂J/∂θ(s, a) = d(s) · π(a|s) · A(s, a)        d: discounted_visitation

        With a horizon the right side is summed over t. The γ^t inside d is part of the gradient of J; the usual
        estimators, which leave it out, follow another direction when γ < 1.

        Book: §13.1.3; §13.1.4
        Source: Sutton et al. 2000
        """
        visits, advantages = self.discounted_visitation(logits), self.advantages(logits)
        weights = visits.unsqueeze(1) * advantages
        return self.policy(logits) * (weights if self.horizon is None else weights.sum(-1))

    def surrogate(self, logits: Tensor, old_logits: Tensor) -> Tensor:
        """The exact expectation of the importance-sampling surrogate around the old policy; differentiable.

            L(θ) = Σ_s d_old(s) Σ_a π_θ(a|s) · A_old(s, a)

        States and advantages are those of π_old, only the actions are reweighted. L(θ_old) = 0. Its gradient is ∇J at
        θ = θ_old and nowhere else in general; J(θ) − J(θ_old) would need the visitation of π_θ. Returns a scalar.

        Book: §13.2.2; §13.3.1
        Source: Kakade & Langford 2002; Schulman et al. 2015, arXiv 1502.05477
        """
        visits, advantages = self.discounted_visitation(old_logits), self.advantages(old_logits)
        weights = visits.unsqueeze(1) * advantages
        return (self.policy(logits) * (weights if self.horizon is None else weights.sum(-1))).sum()

    def discounted_visitation(self, logits: Tensor) -> Tensor:
        """How often each state is acted in, later visits counting less: d(s) = Σ_t γ^t P(s_t = s).

        Returns [S], with a horizon the terms [S, H]; terminal states have 0. It does not sum to 1. Divided by its sum
        it is the normalised discounted occupancy, (1 − γ) d for a process that never ends.

        Book: §13.1.3
        Source: Sutton et al. 2000
        """
        return self._visitation(logits, self.gamma)

    def stationary_visitation(self, logits: Tensor) -> Tensor:
        """The share of all steps that is spent in each state when episodes follow each other without end. Returns [S].

            μ(s') = Σ_s μ(s) P(s'|s),   Σ_s μ(s) = 1        a move that ends the episode goes to a new start instead

        No discount enters: this is where a long rollout takes its states from, and so what estimators without γ^t
        weight their states by. It differs from the normalised discounted_visitation unless γ = 1. Terminal states have
        0. Raises ValueError when the process has several closed parts, for then the share depends on the start.

        Book: §13.1.3
        Source: Sutton & Barto 2018
        """
        step = self._step_matrix(logits)
        if self.horizon is not None:
            visits = self._visitation(logits, 1.0)
            return visits.sum(-1) / visits.sum()
        restarting = step + (1 - step.sum(-1, keepdim=True)) * self.start
        balance = torch.eye(len(step)).to(step) - restarting.T
        if torch.linalg.matrix_rank(balance.detach()) < len(step) - 1:
            raise ValueError("transition must have one closed part: here the long-run share depends on the start")
        # One balance equation follows from the others; the sum of μ takes its place.
        balance = torch.cat([balance[1:], torch.ones_like(balance[:1])])
        return torch.linalg.solve(balance, torch.eye(len(step)).to(step)[-1])

    def sample(self, logits: Tensor, n_episodes: int, max_steps: int, seed: int) -> Trajectories:
        """Independent episodes of at most max_steps steps, N = n_episodes, T = max_steps; all episodes step together.

        An episode that has not ended after max_steps is marked truncated there. One that reaches the horizon has ended:
        it is terminated. The same seed gives the same episodes. Raises ValueError for counts below 1.

        Book: §13.1.1
        """
        check_positive(n_episodes=n_episodes, max_steps=max_steps)
        generator = torch.Generator().manual_seed(seed)
        policy = self.policy(logits).detach()
        dtypes = [torch.int64] * 2 + [torch.float64] + [torch.bool] * 3 + [torch.int64]
        out = Trajectories(*(torch.zeros(n_episodes, max_steps, dtype=dtype) for dtype in dtypes))
        rows = torch.arange(n_episodes)
        state = torch.multinomial(self.start, n_episodes, replacement=True, generator=generator)
        for t in range(max_steps):
            action = torch.multinomial(policy[state], 1, generator=generator).squeeze(1)
            following = torch.multinomial(self.transition[state, action], 1, generator=generator).squeeze(1)
            ends = self.terminal[following] | (t + 1 == self.horizon)
            out.states[rows, t], out.actions[rows, t], out.next_states[rows, t] = state, action, following
            out.rewards[rows, t] = self.reward[state, action]
            out.mask[rows, t] = True
            out.terminated[rows, t] = ends
            out.truncated[rows, t] = ~ends & (t + 1 == max_steps)
            rows, state = rows[~ends], following[~ends]
            if not len(rows):
                break
        return out

    def _step_matrix(self, logits: Tensor) -> Tensor:
        return torch.einsum("sa,saz->sz", self.policy(logits), self._onward)

    def _visitation(self, logits: Tensor, gamma: float) -> Tensor:
        step = self._step_matrix(logits)
        if self.horizon is None:
            return torch.linalg.solve(torch.eye(len(step)).to(step) - gamma * step.T, self.start)
        visits = [self.start]
        for _ in range(self.horizon - 1):
            visits.append(gamma * visits[-1] @ step)
        return torch.stack(visits, -1)

    def _check_shapes(self) -> None:
        if self.reward.ndim != 2:
            raise ValueError(f"reward must have shape [S, A], got {tuple(self.reward.shape)}")
        n_states, n_actions = self.reward.shape
        wanted = {"transition": (n_states, n_actions, n_states), "start": (n_states,), "terminal": (n_states,)}
        for name, shape in wanted.items():
            if (got := tuple(getattr(self, name).shape)) != shape:
                raise ValueError(f"{name} must have shape {shape} to go with reward {(n_states, n_actions)}, got {got}")

    def _check_numbers(self) -> None:
        for name, rows in {"transition": self.transition[~self.terminal], "start": self.start}.items():
            if bool((rows < 0).any()) or not torch.allclose(rows.sum(-1), torch.ones(()).double(), atol=1e-6):
                raise ValueError(f"{name} must hold probabilities that sum to 1 over its last axis")
        if bool(self.start[self.terminal].any()):
            raise ValueError("start must give terminal states probability 0")
        check_unit_interval(gamma=self.gamma)
        check_positive(horizon=self.horizon)
        if self.gamma == 1 and self.horizon is None and not self._always_ends():
            raise ValueError("gamma must be below 1, or a horizon given, when some state cannot reach a terminal one")

    def _always_ends(self) -> bool:
        possible, reaches_end = (self.transition > 0).any(1), self.terminal
        for _ in range(len(self.start)):
            reaches_end = reaches_end | (possible & reaches_end).any(-1)
        return bool(reaches_end.all())


def bandit(rewards: Sequence[float]) -> TabularMDP:
    """One state, one step, one action per reward; logits [1, A].

    Book: §13.1.4
    """
    reward = torch.as_tensor(rewards, dtype=torch.float64)[None]
    return TabularMDP(torch.ones(1, reward.shape[1], 1), reward, torch.ones(1), gamma=1.0, horizon=1)


def two_state_chain(gamma: float = 0.5) -> TabularMDP:
    """Two steps that always follow each other: state 0, state 1, end (state 2). Logits [3, 2].

    Action 1 earns 1 in state 0, action 0 earns 1.5 in state 1, the others nothing. With one logit shared by both states
    and γ = 0.5, the derivative of J and the estimate without γ^t have opposite signs (erratum A2).

    Book: §13.1.1; §13.1.3
    """
    return _episodic([[1, 1], [2, 2], [2, 2]], [[0, 1], [1.5, 0], [0, 0]], gamma)


def paid_door() -> TabularMDP:
    """A door that costs something to open: logits [3, 2], γ = 1, end in state 2.

    In state 0 action 0 ends the episode with nothing, action 1 pays 0.2 and leads to state 1. There action 1 earns 1,
    action 0 nothing, and the episode ends. How often state 1 is seen depends on the policy, so the surrogate and J part
    ways once the policy moves (erratum A6).

    Book: §13.2.2
    """
    return _episodic([[2, 1], [2, 2], [2, 2]], [[0, -0.2], [0, 1], [0, 0]], 1.0)


def corridor(n: int, gamma: float = 0.9) -> TabularMDP:
    """n cells in a row: start in cell 0, the last cell ends the episode. Action 0 steps left, 1 right; logits [n, 2].

    The step into the last cell earns 1, all others nothing; left of cell 0 is a wall. Raises ValueError for n < 2.

    Book: §13.4.1
    """
    if n < 2:
        raise ValueError(f"n must be at least 2, got {n}")
    moves = [[max(cell - 1, 0), min(cell + 1, n - 1)] for cell in range(n)]
    return _episodic(moves, [[0, float(cell == n - 2)] for cell in range(n)], gamma)


def _episodic(next_state: list[list[int]], reward: list[list[float]], gamma: float) -> TabularMDP:
    """A world without chance that starts in state 0 and ends in the last state."""
    transition = torch.nn.functional.one_hot(torch.tensor(next_state), len(next_state))
    states = torch.arange(len(next_state))
    reward_table = torch.tensor(reward, dtype=torch.float64)
    return TabularMDP(transition, reward_table, states == 0, gamma, terminal=states == states[-1])
