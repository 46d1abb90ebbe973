"""What holds a model in training: forward, backward, one optimizer step."""

import contextlib
from typing import Any

import torch
from torch import Tensor, nn


class TorchEngine:
    """One model on one process with AdamW.

    module: the model, its parameters in float32; lr: the full learning rate; max_grad_norm: the gradient is scaled down
    to it; bf16: matrix products in bfloat16 (autocast), the weights and the optimizer stay float32.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        lr: float,
        max_grad_norm: float,
        bf16: bool = False,
        betas: tuple[float, float] = (0.9, 0.95),
    ):
        self.module = module
        self.lr = lr
        self.max_grad_norm = max_grad_norm
        self.bf16 = bf16
        self.device = next(module.parameters()).device
        self.optimizer = torch.optim.AdamW(module.parameters(), lr=lr, betas=betas, weight_decay=0.0, fused=True)

    def __call__(self, *inputs: Any) -> Any:
        """The module's forward pass."""
        with precision(self.device, self.bf16):
            return self.module(*inputs)

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a loss to what has been gathered since the last step."""
        loss.backward()

    def clip_gradient(self) -> float:
        """Scale the gathered gradient down to max_grad_norm; returns its norm before.

        Raises FloatingPointError naming the parameters if it is not finite.
        """
        norm = nn.utils.get_total_norm([p.grad for p in self.module.parameters() if p.grad is not None])
        # Looked at before the clip, which spreads a norm of nan over all gradients.
        if not norm.isfinite():
            named = self.module.named_parameters()
            bad = [name for name, p in named if p.grad is not None and not bool(p.grad.isfinite().all())]
            raise FloatingPointError(f"the gradient of {', '.join(bad[:5])} is not finite")
        nn.utils.clip_grads_with_norm_(self.module.parameters(), self.max_grad_norm, norm)
        return float(norm)

    def step(self, lr_scale: float = 1.0) -> None:
        """One optimizer step along the gathered gradient at the learning rate lr·lr_scale."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr * lr_scale
        self.optimizer.step()
        self.discard()

    def discard(self) -> None:
        """Forget the gathered gradient."""
        self.optimizer.zero_grad(set_to_none=True)


def precision(device: torch.device, bf16: bool) -> contextlib.AbstractContextManager:
    """The context in which every role computes: autocast to bfloat16, or nothing."""
    return torch.autocast(device.type, torch.bfloat16) if bf16 else contextlib.nullcontext()
