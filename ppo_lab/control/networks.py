"""The actor-critic network of the agent."""

import math

from torch import Tensor, nn


def _trunk(state_dim: int, hidden_dim: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(state_dim, hidden_dim), nn.Tanh(), nn.Linear(hidden_dim, hidden_dim), nn.Tanh())


class PPONetwork(nn.Module):
    """Policy logits and state value from one state: two hidden tanh layers and two linear heads.

    With shared_trunk=True the heads stand on one trunk, as the book draws it; with False (the default: it measured
    better, see chapter 05) the critic has a trunk of its own. Orthogonal initialisation: gain √2 in the trunks, 1 in
    the critic head and 0.01 in the actor head, so that the first policy is nearly uniform; orthogonal=False keeps
    torch's default, as the book's listing does.

    The book's forward returns the value as [..., 1]; ours has the shape of the batch, [...].

    Book: A07 §6.1
    Source: Schulman et al. 2017 (arXiv:1707.06347); Andrychowicz et al. 2021 (arXiv:2006.05990) on the initialisation
    """

    def __init__(
        self,
        state_dim: int,
        action_dim: int,
        hidden_dim: int = 64,
        *,
        shared_trunk: bool = False,
        orthogonal: bool = True,
    ):
        super().__init__()
        for name, size in (("state_dim", state_dim), ("action_dim", action_dim), ("hidden_dim", hidden_dim)):
            if size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}")
        self.feature = _trunk(state_dim, hidden_dim)
        self.critic_feature = None if shared_trunk else _trunk(state_dim, hidden_dim)
        self.actor_head = nn.Linear(hidden_dim, action_dim)
        self.critic_head = nn.Linear(hidden_dim, 1)
        if orthogonal:
            self._initialise()

    def _initialise(self) -> None:
        for layer in self.modules():
            if isinstance(layer, nn.Linear):
                gain = {self.actor_head: 0.01, self.critic_head: 1.0}.get(layer, math.sqrt(2))
                nn.init.orthogonal_(layer.weight, gain)
                nn.init.zeros_(layer.bias)

    def forward(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [..., action_dim] and values [...] of states [..., state_dim]."""
        features = self.feature(states)
        critic_features = features if self.critic_feature is None else self.critic_feature(states)
        return self.actor_head(features), self.critic_head(critic_features).squeeze(-1)

    def logits(self, states: Tensor) -> Tensor:
        """The policy's logits alone, [..., action_dim]: all that acting needs."""
        return self.actor_head(self.feature(states))

    def policy_parameters(self) -> list[nn.Parameter]:
        """Parameters the policy depends on."""
        return [*self.feature.parameters(), *self.actor_head.parameters()]

    def critic_parameters(self) -> list[nn.Parameter]:
        """Parameters that only the value depends on."""
        trunk = [] if self.critic_feature is None else list(self.critic_feature.parameters())
        return [*trunk, *self.critic_head.parameters()]
