"""ppo_lab: PPO from the policy gradient to RLHF, one implementation for the notebooks and for training.

`import ppo_lab` loads torch and the mathematics. The agents, which need Gymnasium or Transformers, load when first
named: `from ppo_lab import PPOAgent`.
"""

from importlib import import_module
from typing import Any

from ppo_lab.clip import PPOLoss, categorical_entropy, clipped_surrogate, clipped_value_loss, ppo_loss
from ppo_lab.diagnostics import Finding, diagnose, explained_variance, ratio_statistics

# The function takes the name over from its module: `import ppo_lab.gae as x` gives the function too.
from ppo_lab.gae import compute_gae, gae, monte_carlo_advantage, n_step_advantage, td_residual
from ppo_lab.group_advantages import (
    grpo_advantages,
    reinforce_pp_advantages,
    reinforce_pp_baseline_advantages,
    remax_advantages,
    rloo_advantages,
)
from ppo_lab.importance_sampling import effective_sample_size, importance_estimate, importance_ratio, surrogate
from ppo_lab.kl import approx_kl, best_of_n_kl, kl_estimate
from ppo_lab.masking import masked_mean, masked_var
from ppo_lab.policy_gradient import discounted_return, optimal_baseline, policy_gradient_loss, reward_to_go
from ppo_lab.preference import dpo_loss, ipo_loss, simpo_loss
from ppo_lab.stability import AdaptiveKLController, FixedKLController, clip_rewards, refresh_reference, whiten
from ppo_lab.tabular import TabularMDP
from ppo_lab.trust_region import (
    AdaptivePenalty,
    categorical_kl,
    conjugate_gradient,
    fisher_vector_product,
    kl_penalty_objective,
    trpo_step,
)

_LAZY = {
    "PPOAgent": "ppo_lab.control.agent",
    "PPONetwork": "ppo_lab.control.networks",
    "llm_ppo_iteration": "ppo_lab.llm.ppo",
}

__all__ = [
    "AdaptiveKLController",
    "AdaptivePenalty",
    "Finding",
    "FixedKLController",
    "PPOAgent",
    "PPOLoss",
    "PPONetwork",
    "TabularMDP",
    "approx_kl",
    "best_of_n_kl",
    "categorical_entropy",
    "categorical_kl",
    "clip_rewards",
    "clipped_surrogate",
    "clipped_value_loss",
    "compute_gae",
    "conjugate_gradient",
    "diagnose",
    "discounted_return",
    "dpo_loss",
    "effective_sample_size",
    "explained_variance",
    "fisher_vector_product",
    "gae",
    "grpo_advantages",
    "importance_estimate",
    "importance_ratio",
    "ipo_loss",
    "kl_estimate",
    "kl_penalty_objective",
    "llm_ppo_iteration",
    "masked_mean",
    "masked_var",
    "monte_carlo_advantage",
    "n_step_advantage",
    "optimal_baseline",
    "policy_gradient_loss",
    "ppo_loss",
    "ratio_statistics",
    "refresh_reference",
    "reinforce_pp_advantages",
    "reinforce_pp_baseline_advantages",
    "remax_advantages",
    "reward_to_go",
    "rloo_advantages",
    "simpo_loss",
    "surrogate",
    "td_residual",
    "trpo_step",
    "whiten",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
