"""What keeps a long run steady: whitening, reward clipping, control of the KL penalty, a reference that moves."""

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ppo_lab.masking import as_float, as_mask, check_positive, hide, is_flat


def whiten(
    x: Tensor, mask: Tensor | None = None, *, shift_mean: bool = True, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Shift to mean 0 and scale to standard deviation 1.

    (x − mean) / √(var + 1e−8), var = Σ(x − mean)² / (n − 1); with shift_mean=False the mean is added back afterwards.
    For a spread near 1 the book's division by std + ϵ gives the same to 8 digits. Numbers without spread, up to
    rounding, and fewer than two that count, become 0 (the mean with shift_mean=False).

    x [...]; mask [...] True = counts. With `group`, mean and variance are those of the elements of all its ranks; every
    rank must call, even one where nothing counts. Returns [...], without gradient, 0 where masked; float32 for
    half-precision inputs. Raises ValueError for a mask of another shape.

    Book: §13.6.1; §13.6.2
    Source: Ziegler et al. 2019, arXiv 1909.08593 (rewards); the PPO code of OpenAI Baselines (advantages)
    """
    mask = as_mask(mask, x)
    x = hide(as_float(x.detach()), mask)
    n = torch.full_like(x.sum(), x.numel()) if mask is None else mask.sum().to(x.dtype)
    total, n = _sum_over_ranks(torch.stack([x.sum(), n]), group)
    mean = total / n.clamp(min=1)
    centred = hide(x - mean, mask)
    variance = _sum_over_ranks(centred.square().sum(), group) / (n - 1).clamp(min=1)
    whitened = (centred / (variance + 1e-8).sqrt()).masked_fill(is_flat(variance, mean), 0.0)
    return whitened if shift_mean else hide(whitened + mean, mask)


def _sum_over_ranks(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    if group is not None:
        dist.all_reduce(x, group=group)
    return x


def clip_rewards(x: Tensor, limit: float) -> Tensor:
    """Rewards cut off at ±limit.

    clip(x, −c, +c)

    x [...], limit c > 0, both in units of the reward. Returns [...]; nan stays nan.
    Raises ValueError for a limit that is not positive.

    Book: §13.6.1
    Source: Mnih et al. 2015 (Atari rewards clipped at ±1)
    """
    check_positive(limit=limit)
    return x.clamp(-limit, limit)


class AdaptiveKLController:
    """KL coefficient that rises while the KL is above its target and falls while it is below.

    β ← β·(1 + clip(KL/target − 1, −0.2, +0.2)·min(n_steps/horizon, 1))

    kl_coef: β at the start; target_kl: nats per response; horizon: number of episodes in which β can change by a factor
    of about e^0.2. The book's K_p is 1/horizon. Its listing multiplies K_p = 0.1 by n_steps without a bound: with a KL
    of 0, β is 0 at 50 steps and negative beyond. Here the factor stays between 0.8 and 1.2. All three must be positive:
    a β of 0 would stay 0 for ever. Raises ValueError otherwise.

    Book: §13.6.5
    Source: Ziegler et al. 2019, arXiv 1909.08593
    """

    def __init__(self, kl_coef: float = 0.2, target_kl: float = 6.0, horizon: float = 10_000):
        check_positive(kl_coef=kl_coef, target_kl=target_kl, horizon=horizon)
        self.kl_coef = kl_coef
        self.target_kl = target_kl
        self.horizon = horizon

    def update(self, current_kl: float, n_steps: int = 1) -> None:
        """Move kl_coef once per rollout.

        current_kl: mean KL of the rollout, nats per response; n_steps: episodes in it, over all ranks (not the number
        of the training step). Raises ValueError for a KL that is not finite or n_steps below 1.
        """
        current_kl = float(current_kl)
        if not math.isfinite(current_kl):
            raise ValueError(f"current_kl must be finite, got {current_kl}")
        if n_steps < 1:
            raise ValueError(f"n_steps must be at least 1, got {n_steps}")
        error = min(max(current_kl / self.target_kl - 1, -0.2), 0.2)
        self.kl_coef *= 1 + error * min(n_steps / self.horizon, 1)

    def state_dict(self) -> dict[str, float]:
        """What a resumed run needs: the coefficient. Target and horizon are settings and come from the constructor."""
        return {"kl_coef": self.kl_coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Take over the coefficient of a saved controller."""
        check_positive(kl_coef=state["kl_coef"])
        self.kl_coef = state["kl_coef"]


class FixedKLController:
    """KL coefficient that never moves; stands in for `AdaptiveKLController`.

    β ← β.  kl_coef: β ≥ 0, and 0 means no penalty. Raises ValueError for another number.

    Book: §13.6.5
    Source: Stiennon et al. 2020, arXiv 2009.01325; Ouyang et al. 2022, arXiv 2203.02155
    """

    def __init__(self, kl_coef: float):
        if not 0 <= kl_coef < math.inf:
            raise ValueError(f"kl_coef must be at least 0 and finite, got {kl_coef}")
        self.kl_coef = kl_coef

    def update(self, current_kl: float, n_steps: int = 1) -> None:
        """Leave kl_coef as it is."""

    def state_dict(self) -> dict[str, float]:
        """The coefficient."""
        return {"kl_coef": self.kl_coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Take over the coefficient of a saved controller."""
        self.kl_coef = state["kl_coef"]


@torch.no_grad()
def refresh_reference(policy: nn.Module, reference: nn.Module) -> None:
    """Make the reference a copy of the policy as it is now: π_ref ← π_θ.

    Parameters and buffers are copied into the reference's own storage, which then stays where it is: frozen and in eval
    mode. The KL to the reference starts again at 0, so the distance to the first reference is no longer bounded.
    Raises ValueError if the two modules have other names or shapes, or share storage.

    Book: §13.6.4
    Source: DeepSeek-AI 2025, arXiv 2501.12948 (the version in Nature describes the refresh; see ERRATA)
    """
    source = dict(policy.named_parameters()) | dict(policy.named_buffers())
    target = dict(reference.named_parameters()) | dict(reference.named_buffers())
    if source.keys() != target.keys():
        raise ValueError(f"policy and reference must have the same tensors, differ in {source.keys() ^ target.keys()}")
    for name, tensor in target.items():
        if tensor.shape != source[name].shape:
            raise ValueError(f"{name} must have one shape, got {tuple(source[name].shape)} and {tuple(tensor.shape)}")
        if tensor.data_ptr() == source[name].data_ptr() and tensor.numel():
            raise ValueError(f"reference must have storage of its own, shares {name} with policy")
        tensor.copy_(source[name])
    reference.requires_grad_(False)
    reference.eval()
