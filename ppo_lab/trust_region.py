"""Staying near the old policy: the hard KL limit of TRPO and the soft KL penalty of PPO-Penalty."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ppo_lab.importance_sampling import surrogate
from ppo_lab.masking import as_float, check_positive, check_same_shape


def categorical_kl(old_logits: Tensor, logits: Tensor) -> Tensor:
    """How far the new policy is from the old one, per state, exactly.

        KL(π_old ‖ π_θ) = Σ_a π_old(a|s) · (log π_old(a|s) − log π_θ(a|s))

    old_logits, logits [..., A]: unnormalised log-probabilities over the actions; half precision is computed in float32.
    An action with π_old = 0 (logit −∞) adds 0 to the value and the gradient; one with π_old > 0 and π_θ = 0 makes the
    KL infinite, as it is. Returns [...] in nats. Raises ValueError for unequal shapes.

    Book: §13.3.1; §13.3.2; A07 §1.1
    Source: Schulman et al. 2015, arXiv 1502.05477
    """
    check_same_shape(old_logits=old_logits, logits=logits)
    old_logp = torch.log_softmax(as_float(old_logits), -1)
    new_logp = torch.log_softmax(as_float(logits), -1)
    old_probs = old_logp.exp()
    # −∞ − (−∞) is NaN, and 0 · NaN stays NaN in the gradient: the difference is dropped before the product.
    difference = (old_logp - new_logp).masked_fill(old_probs == 0, 0.0)
    return (old_probs * difference).sum(-1)


def fisher_vector_product(kl: Tensor, parameters: Iterable[Tensor], vector: Tensor, *, damping: float = 0.1) -> Tensor:
    """The damped Fisher matrix times a vector, without the matrix.

        (F + damping·I) v   with   F = ∇²_θ KL(π_old ‖ π_θ) at θ = θ_old = E[∇log π · ∇log πᵀ]
        F v = ∇_θ ( (∇_θ KL)ᵀ v )

    kl: scalar mean KL over states, a differentiable function of the parameters, taken at θ = θ_old. Elsewhere its
    second derivative is not the Fisher matrix. parameters: n numbers in all; vector [n] in the same order, each
    parameter flattened. damping ≥ 0.

    Returns [n]. Raises ValueError when kl is not a differentiable scalar or vector has another length.

    Book: §13.3.1; A07 §1.1
    Source: Pearlmutter 1994; Schulman et al. 2015, arXiv 1502.05477
    """
    if kl.ndim != 0 or not kl.requires_grad:
        raise ValueError(f"kl must be a scalar that depends on the parameters, got shape {tuple(kl.shape)}")
    parameters = list(parameters)
    n = sum(p.numel() for p in parameters)
    if vector.shape != (n,):
        raise ValueError(f"vector must have shape ({n},), one number per parameter, got {tuple(vector.shape)}")
    kl_gradient = _flat_gradient(kl, parameters, create_graph=True)
    return _flat_gradient(kl_gradient @ vector, parameters) + damping * vector


def conjugate_gradient(
    product: Callable[[Tensor], Tensor], b: Tensor, *, iterations: int = 10, tolerance: float = 1e-10
) -> Tensor:
    """The solution x of M x = b for a symmetric positive definite M that is known by its products only.

    product(v) [n] -> [n] returns M v; b [n]. In exact arithmetic n iterations solve the system. Stops early once
    ‖b − M x‖² ≤ tolerance·‖b‖².

    Returns [n]. Raises ValueError for iterations < 0, and when a direction p has pᵀMp ≤ 0 or not finite: then M is not
    positive definite.

    Book: §13.3.1; A07 §1.1
    Source: Hestenes & Stiefel 1952
    """
    if iterations < 0:
        raise ValueError(f"iterations must be 0 or more, got {iterations}")
    x = torch.zeros_like(b)
    residual = b.clone()
    direction = residual.clone()
    residual_sq = residual @ residual
    enough = tolerance * residual_sq
    for _ in range(iterations):
        if residual_sq <= enough:
            break
        image = product(direction)
        curvature = direction @ image
        if not (curvature > 0 and torch.isfinite(curvature)):
            raise ValueError(f"product must be positive definite, got pᵀMp = {curvature.item()} along a direction p")
        step = residual_sq / curvature
        x = x + step * direction
        residual = residual - step * image
        next_residual_sq = residual @ residual
        direction = residual + (next_residual_sq / residual_sq) * direction
        residual_sq = next_residual_sq
    return x


class TrustRegionStep(NamedTuple):
    """What trpo_step did. Numbers are Python floats; without an accepted step the parameters are the old ones."""

    accepted: bool
    surrogate_before: float
    surrogate_after: float
    kl: float  # mean KL(π_old ‖ π_new), nats per state
    step_fraction: float  # of the full natural-gradient step; 0 when none was accepted


def trpo_step(
    parameters: Iterable[Tensor],
    surrogate_fn: Callable[[], Tensor],
    kl_fn: Callable[[], Tensor],
    *,
    max_kl: float = 0.01,
    iterations: int = 10,
    damping: float = 0.1,
    backtracks: int = 10,
    shrink: float = 0.5,
) -> TrustRegionStep:
    """One natural-gradient step inside the trust region, in place.

        maximise E[ρ_t Â_t]   subject to   E[KL(π_old ‖ π_θ)] ≤ max_kl
        x = (F + damping·I)⁻¹ g        g = ∇_θ surrogate, by conjugate gradient; F is never formed
        θ = θ_old + shrinkʲ · √(2·max_kl / (gᵀx)) · x        j = 0, 1, … backtracks − 1

    The objective is linearised and the KL replaced by its quadratic model; the line search then takes the first j for
    which the measured surrogate grows and the measured mean KL keeps the limit. The limit is thus kept on the sample
    the closures hold, not on every state.

    parameters: the tensors to change. surrogate_fn() and kl_fn(): differentiable scalars at the present parameters, the
    surrogate to maximise, the mean KL in nats per state; at the start the policy must be the old one. max_kl > 0;
    iterations of the conjugate gradient.

    Returns a TrustRegionStep. When no j is accepted, gᵀx is 0 or not finite in this precision, or a closure raises, the
    parameters are put back exactly. Raises ValueError for a surrogate, gradient or KL at the start that is not finite,
    and for arguments out of range.

    Book: §13.3.1; A07 §1.1
    Source: Schulman et al. 2015, arXiv 1502.05477
    """
    _check_search(max_kl, damping, backtracks, shrink)
    parameters = list(parameters)
    surrogate, kl = surrogate_fn(), kl_fn()
    before, kl_before = surrogate.item(), kl.item()
    gradient = _flat_gradient(surrogate, parameters)
    _check_start(before, kl_before, gradient)
    rejected = TrustRegionStep(False, before, before, kl_before, 0.0)
    if not bool(gradient.any()):
        return rejected

    direction = conjugate_gradient(
        lambda v: fisher_vector_product(kl, parameters, v, damping=damping), gradient, iterations=iterations
    )
    slope = (gradient @ direction).item()
    # A saturated policy has a gradient whose square is below what float32 can hold.
    if not 0 < slope < math.inf:
        return rejected
    full_step = math.sqrt(2 * max_kl / slope) * direction
    old = [p.detach().clone() for p in parameters]
    accepted = False
    try:
        for j in range(backtracks):
            _move(parameters, old, shrink**j * full_step)
            with torch.no_grad():
                after, kl_after = surrogate_fn().item(), kl_fn().item()
            # A trial that is not finite fails a comparison and is cut back like any other.
            accepted = before < after < math.inf and kl_after <= max_kl
            if accepted:
                return TrustRegionStep(True, before, after, kl_after, shrink**j)
        return rejected
    finally:
        if not accepted:
            _copy(parameters, old)


def kl_penalty_objective(ratio: Tensor, advantages: Tensor, kl: Tensor, kl_coef: float) -> Tensor:
    """The surrogate with a soft KL penalty, per element; to maximise.

        J^KL-PEN = ρ_t · Â_t − β · KL(π_old(·|s_t) ‖ π_θ(·|s_t))

    ratio, advantages, kl [..., T], t = 0 … T−1; kl in nats per state. kl_coef is β ≥ 0.

    Returns [..., T], float32 for half precision. No gradient flows into the advantages. Raises ValueError for unequal
    shapes or a negative kl_coef.

    Book: §13.3.2
    Source: Schulman et al. 2017, arXiv 1707.06347
    """
    check_same_shape(ratio=ratio, advantages=advantages, kl=kl)
    if not kl_coef >= 0:
        raise ValueError(f"kl_coef must not be negative, got {kl_coef}")
    return surrogate(ratio, advantages) - kl_coef * as_float(kl)


class AdaptivePenalty:
    """The penalty coefficient β of PPO-Penalty, adapted to hold the KL near a target.

        β ← 2β     when KL > 1.5 · target_kl
        β ← β/2    when KL < target_kl / 1.5

    kl_coef: β to start with; target_kl: mean KL(π_old ‖ π_new) of one policy update, nats per state. Call update once
    per iteration, after all epochs over one rollout, not after each epoch. Both must be positive, else ValueError.

    Book: §13.3.2
    Source: Schulman et al. 2017, arXiv 1707.06347
    """

    def __init__(self, kl_coef: float, target_kl: float):
        self.load_state_dict({"kl_coef": kl_coef, "target_kl": target_kl})

    def update(self, measured_kl: float) -> float:
        """Adapt β to the KL of the last update and return it. Raises ValueError for a KL that is not finite."""
        if not math.isfinite(measured_kl):
            raise ValueError(f"measured_kl must be finite, got {measured_kl}")
        if measured_kl > 1.5 * self.target_kl:
            self.kl_coef *= 2
        elif measured_kl < self.target_kl / 1.5:
            self.kl_coef /= 2
        # Far beyond any useful β, but short of 0 and ∞, from which doubling and halving never return.
        self.kl_coef = min(max(self.kl_coef, 1e-100), 1e100)
        return self.kl_coef

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint has to keep."""
        return {"kl_coef": self.kl_coef, "target_kl": self.target_kl}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Take over a stored state. Raises ValueError for a value that is not positive and finite."""
        check_positive(kl_coef=state["kl_coef"], target_kl=state["target_kl"])
        self.kl_coef = float(state["kl_coef"])
        self.target_kl = float(state["target_kl"])


def _flat_gradient(scalar: Tensor, parameters: Iterable[Tensor], *, create_graph: bool = False) -> Tensor:
    gradients = torch.autograd.grad(
        scalar, list(parameters), create_graph=create_graph, retain_graph=True, materialize_grads=True
    )
    return torch.cat([g.reshape(-1) for g in gradients])


def _move(parameters: Sequence[Tensor], old: Sequence[Tensor], step: Tensor) -> None:
    pieces = step.split([p.numel() for p in old])
    _copy(parameters, [start + piece.reshape(start.shape) for start, piece in zip(old, pieces, strict=True)])


@torch.no_grad()
def _copy(parameters: Sequence[Tensor], numbers: Sequence[Tensor]) -> None:
    for p, number in zip(parameters, numbers, strict=True):
        p.copy_(number)


def _check_search(max_kl: float, damping: float, backtracks: int, shrink: float) -> None:
    check_positive(max_kl=max_kl)
    if not damping >= 0:
        raise ValueError(f"damping must not be negative, got {damping}")
    if backtracks < 1:
        raise ValueError(f"backtracks must be at least 1, got {backtracks}")
    if not 0 < shrink < 1:
        raise ValueError(f"shrink must lie between 0 and 1, got {shrink}")


def _check_start(surrogate: float, kl: float, gradient: Tensor) -> None:
    if not math.isfinite(surrogate):
        raise ValueError(f"surrogate_fn must return a finite number, got {surrogate}")
    if not math.isfinite(kl):
        raise ValueError(f"kl_fn must return a finite number, got {kl}")
    if not bool(torch.isfinite(gradient).all()):
        raise ValueError("the gradient of surrogate_fn must be finite, got NaN or infinity in it")
