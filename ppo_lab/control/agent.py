"""The agent with the names the book prints: lists filled by a loop of your own, and one update on what they hold."""

import sys
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from ppo_lab.clip import PPOLoss
from ppo_lab.control.algorithms import Batch, check_finite, make_learner, ppo_update
from ppo_lab.control.config import Settings
from ppo_lab.control.rollout import action_logp, sample_actions
from ppo_lab.diagnostics import explained_variance
from ppo_lab.gae import gae


class PPOAgent:
    """PPO-Clip for one environment and a loop written by hand.

    The loop appends to the lists states, actions, rewards, dones, log_probs and values, one item per step, and calls
    `update` when it has enough of them. The update is `ppo_update`, the one of every training run here.

    lr: Adam's learning rate; gamma γ; gae_lambda λ; eps_clip ε; k_epochs K passes over the stored steps; entropy_coef
    c_e; value_coef c_v, on a loss that carries ½; minibatch_size: steps per gradient step, None for all of them at
    once; eps_clip_value ε_v in reward units, None for no clipping; max_grad_norm: longer gradients are scaled down to
    it; stop_kl in nats: ends an update early; total_updates: the number of updates over which the learning rate falls
    to 0 in a straight line, None to keep it. hidden_dim, shared_trunk, orthogonal: see `PPONetwork`. seed: fixes the
    first weights, the actions drawn and the order of the minibatches. Raises ValueError naming an argument that is out
    of range.

    The book's main loop runs with this class unchanged. What differs from the printed listing, and why:
    - `select_action` builds no graph (torch.no_grad).
    - The book's 0.5·MSE is value_coef=1.0 here, which is the default; the reported value_loss is ½·MSE.
    - Minibatches of 64 in random order, as the book's text says; its listing takes one step per pass on all steps
      (minibatch_size=None). Advantages are whitened within each minibatch; the listing whitens all of them at once.
    - The critic has a trunk of its own and the layers start orthogonal, with a nearly uniform first policy; the listing
      shares the trunk and keeps torch's initialisation. Adam's eps is 1e-5, not 1e-8.
    - All random numbers come from seed; the listing seeds the environment only. It runs on the CPU, which is faster
      for networks of this size.
    - `mark_truncated` tells a time limit from death. Without it, a loop that stores done = 1 at a limit teaches that
      nothing follows there, and one that stores 0 lets the next episode's values into this one.
    - `update` returns means over its gradient steps; the listing returns the last one.

    Book: A07 §6.1; A07 §5
    Source: Schulman et al. 2017 (arXiv:1707.06347)
    """

    def __init__(
        self,
        state_dim: int,
        action_dim: int,
        lr: float = 3e-4,
        gamma: float = 0.99,
        gae_lambda: float = 0.95,
        eps_clip: float = 0.2,
        k_epochs: int = 10,
        entropy_coef: float = 0.01,
        value_coef: float = 1.0,
        *,
        minibatch_size: int | None = 64,
        eps_clip_value: float | None = None,
        max_grad_norm: float = 0.5,
        stop_kl: float | None = None,
        hidden_dim: int = 64,
        shared_trunk: bool = False,
        orthogonal: bool = True,
        seed: int = 0,
        total_updates: int | None = None,
    ):
        self.settings = Settings(
            seed=seed,
            lr=lr,
            gamma=gamma,
            gae_lambda=gae_lambda,
            k_epochs=k_epochs,
            # One minibatch larger than any rollout is the whole rollout.
            minibatch_size=sys.maxsize if minibatch_size is None else minibatch_size,
            eps_clip=eps_clip,
            eps_clip_value=eps_clip_value,
            value_coef=value_coef,
            entropy_coef=entropy_coef,
            max_grad_norm=max_grad_norm,
            stop_kl=stop_kl,
            hidden_dim=hidden_dim,
            shared_trunk=shared_trunk,
            orthogonal=orthogonal,
        )
        if total_updates is not None and total_updates < 1:
            raise ValueError(
                f"total_updates must be at least 1, or None to keep the learning rate, got {total_updates}"
            )
        self.state_dim, self.action_dim = int(state_dim), int(action_dim)
        self.total_updates = total_updates
        self.updates = 0
        self.learner = make_learner(self.state_dim, self.action_dim, self.settings)
        self.network = self.learner.network
        self._clear()

    def _clear(self) -> None:
        self.states: list[np.ndarray] = []
        self.actions: list[int] = []
        self.rewards: list[float] = []
        self.dones: list[float] = []
        self.log_probs: list[float] = []
        self.values: list[float] = []
        self.final_values: dict[int, float] = {}

    @torch.no_grad()
    def select_action(self, state: np.ndarray, deterministic: bool = False) -> tuple[int, float, float]:
        """An action for one state, drawn from the policy or, if deterministic, its most probable one.

        state [state_dim]. Returns (action, log π(action|state) in nats, V(state)).
        Raises ValueError for a state of another shape.

        Book: A07 §6.1
        """
        logits, value = self.network(self._as_state(state))
        if deterministic:
            action = logits.argmax(-1)
        else:
            noise = torch.empty_like(logits).exponential_(generator=self.learner.generator)
            action = sample_actions(logits, noise)
        return action.item(), action_logp(logits, action).item(), value.item()

    @torch.no_grad()
    def mark_truncated(self, final_state: np.ndarray) -> None:
        """Say that the step stored last was cut off by a time limit: the world went on, only the looking stopped.

        That step then bootstraps from V(final_state) and the λ-sum ends there, whatever `dones` says of it: do not
        call it for a step that also terminated. Call it after the step is stored and before `update`. final_state
        [state_dim]: the state that step led to, before any reset. Raises ValueError when no step is stored or the state
        has another shape.

        Book: A07 §6.1, whose loop cannot say this
        Source: Pardo et al. 2018 (arXiv:1712.00378)
        """
        if not self.rewards:
            raise ValueError("mark_truncated needs a stored step, got an empty buffer: call it before update")
        _, value = self.network(self._as_state(final_state))
        self.final_values[len(self.rewards) - 1] = value.item()

    def compute_gae(
        self,
        rewards: Sequence[float],
        values: Sequence[float],
        dones: Sequence[float],
        last_value: float,
        final_values: Mapping[int, float] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Advantages and returns of consecutive steps, t = 0 … T−1; `ppo_lab.gae.gae` does the work.

        Â_t = δ_t + γλ·(1 − done_t)·Â_{t+1},  δ_t = r_t + γ·(1 − done_t)·V(s_{t+1}) − V(s_t);  R̂_t = Â_t + V(s_t).

        rewards, values, dones: T numbers each, dones 0 or 1; last_value: V of the state after the last step, not read
        where that step is done. final_values {t: V}: steps cut off by a time limit, where δ_t takes this V as
        V(s_{t+1}) and the sum ends, done or not. Returns (advantages, returns), both [T].
        Raises ValueError for unequal lengths or dones other than 0 and 1.

        Book: A07 §6.1; A07 §4.1
        Source: Schulman et al. 2016 (arXiv:1506.02438)
        """
        final_values = final_values or {}
        next_values = [*values[1:], last_value]
        terminated = [float(done) for done in dones]
        truncated = [t in final_values for t in range(len(rewards))]
        for t, value in final_values.items():
            next_values[t], terminated[t] = value, 0.0
        return gae(
            torch.tensor(rewards, dtype=torch.float32),
            torch.tensor(values, dtype=torch.float32),
            torch.tensor(next_values, dtype=torch.float32),
            gamma=self.settings.gamma,
            gae_lambda=self.settings.gae_lambda,
            terminated=torch.tensor(terminated),
            truncated=torch.tensor(truncated),
        )

    def update(self, last_value: float) -> dict[str, float]:
        """Learn from the stored steps with `ppo_update`, then forget them.

        last_value: V of the state after the last stored step, from `select_action`; not read where that step is done or
        marked truncated. Returns the means over the gradient steps of policy_loss, value_loss (with its ½), entropy in
        nats, approx_kl, clip_fraction, clip_fraction_outside and ratio_mean; the largest ratio_max; explained_variance
        of the values the steps were taken with; lr; and updates, the number of gradient steps.

        Raises ValueError for an empty buffer, lists of unequal length, an action that does not exist, a stored number
        that is not finite, and when stop_kl lets no step be taken; network and lists are then left as they were. A loss
        that overflows in the middle of the update raises too, but then steps have been taken.

        Book: A07 §6.1; A07 §5
        Source: Schulman et al. 2017 (arXiv:1707.06347)
        """
        self._check_lists()
        batch = self._batch(last_value)
        lr = self._learning_rate()
        self.learner.optimizer.param_groups[0]["lr"] = lr
        losses = ppo_update(self.learner, batch, self.settings)
        if not losses:
            raise ValueError(
                f"approx_kl was above stop_kl {self.settings.stop_kl} before the first step: log_probs are not those of"
                " the present network"
            )
        self.updates += 1
        self._clear()
        explained = explained_variance(batch.values, batch.returns).item()
        return {**_summary(losses), "explained_variance": explained, "lr": lr, "updates": len(losses)}

    @torch.no_grad()
    def _batch(self, last_value: float) -> Batch:
        advantages, returns = self.compute_gae(self.rewards, self.values, self.dones, last_value, self.final_values)
        states = torch.from_numpy(np.array(self.states, dtype=np.float32))
        batch = Batch(
            states=states,
            actions=torch.tensor(self.actions),
            logits=self.network.logits(states),
            logp=torch.tensor(self.log_probs),
            values=torch.tensor(self.values),
            advantages=advantages,
            returns=returns,
        )
        return check_finite(batch)

    def _learning_rate(self) -> float:
        if self.total_updates is None:
            return self.settings.lr
        return self.settings.lr * max(0.0, 1 - self.updates / self.total_updates)

    def _as_state(self, state: np.ndarray) -> Tensor:
        state = torch.as_tensor(np.asarray(state, dtype=np.float32))
        if state.shape != (self.state_dim,):
            raise ValueError(f"state must have shape ({self.state_dim},), got {tuple(state.shape)}")
        return state

    def _check_lists(self) -> None:
        names = ("states", "actions", "rewards", "dones", "log_probs", "values")
        lengths = {name: len(getattr(self, name)) for name in names}
        if set(lengths.values()) == {0}:
            raise ValueError("update needs stored steps, got an empty buffer: append to states, actions, … first")
        if len(set(lengths.values())) > 1:
            listed = ", ".join(f"{name} {length}" for name, length in lengths.items())
            raise ValueError(f"the lists must hold one item per step each, got {listed}")
        for t, action in enumerate(self.actions):
            if not isinstance(action, int | np.integer) or not 0 <= action < self.action_dim:
                raise ValueError(f"actions[{t}] must be a whole number below {self.action_dim}, got {action!r}")
        if any(t >= len(self.rewards) for t in self.final_values):
            raise ValueError("mark_truncated was called for a step that is not stored any more")


def _summary(losses: Sequence[PPOLoss]) -> dict[str, float]:
    mean = {name: torch.stack([getattr(loss, name) for loss in losses]).mean().item() for name in PPOLoss._fields}
    del mean["total"]
    summary = {"policy_loss": mean.pop("policy"), "value_loss": mean.pop("value")}
    return {**summary, **mean, "ratio_max": max(loss.ratio_max.item() for loss in losses)}
