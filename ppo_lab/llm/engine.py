"""What holds a model in training: forward, backward, one optimizer step. On one process, or on many by DeepSpeed.

Both engines have the same methods, and nothing else in the code knows which one it has.
"""

import contextlib
import logging
import os
import socket
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ppo_lab.files import digest
from ppo_lab.llm.ranks import Ranks

BETAS = (0.9, 0.95)


class TorchEngine:
    """One model on one process with AdamW.

    module: the model, its parameters in float32; lr: the full learning rate; max_grad_norm: the gradient is scaled down
    to it; bf16: matrix products in bfloat16 (autocast), the weights and the optimizer stay float32.
    """

    def __init__(self, module: nn.Module, *, lr: float, max_grad_norm: float, bf16: bool = False):
        self.module = module
        self.lr = lr
        self.max_grad_norm = max_grad_norm
        self.bf16 = bf16
        self.device = next(module.parameters()).device
        self.grad_norm = float("nan")
        self.steps_together = False
        self.optimizer = torch.optim.AdamW(trainable(module), lr=lr, betas=BETAS, weight_decay=0.0, fused=True)

    def __call__(self, *inputs: Any) -> Any:
        """The module's forward pass."""
        with self.precision():
            return self.module(*inputs)

    def precision(self) -> AbstractContextManager:
        """The context in which every role computes, so that their log-probabilities compare."""
        return torch.autocast(self.device.type, torch.bfloat16) if self.bf16 else contextlib.nullcontext()

    @contextmanager
    def whole_weights(self, *, for_generation: bool = False) -> Iterator[nn.Module]:
        """The module with all its weights in this process, where they are anyway."""
        yield self.module

    def backward(self, loss: Tensor, *, last: bool = True) -> None:
        """Add the gradient of a loss to what has been gathered; last: the step follows."""
        loss.backward()

    def clip_gradient(self) -> float:
        """Scale the gathered gradient down to max_grad_norm; returns its norm before, which grad_norm keeps.

        Raises FloatingPointError naming the parameters if it is not finite.
        """
        self.grad_norm = clip_gradient(self.module, self.max_grad_norm)
        return self.grad_norm

    def step(self, lr_scale: float = 1.0) -> None:
        """One optimizer step along the gathered gradient at the learning rate lr·lr_scale."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr * lr_scale
        self.optimizer.step()
        self.discard()

    def discard(self) -> None:
        """Forget the gathered gradient."""
        self.optimizer.zero_grad(set_to_none=True)


def trainable(module: nn.Module) -> list[nn.Parameter]:
    """The parameters that learn: all of them, or the adapters alone."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def clip_gradient(module: nn.Module, max_grad_norm: float) -> float:
    """Clip the gradients of a module to a norm; returns the norm before. Raises FloatingPointError like the engines."""
    parameters = list(module.parameters())
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    if not norm.isfinite():
        named = module.named_parameters()
        bad = [name for name, p in named if p.grad is not None and not bool(p.grad.isfinite().all())]
        raise FloatingPointError(f"the gradient of {', '.join(bad[:5])} is not finite")
    nn.utils.clip_grads_with_norm_(parameters, max_grad_norm, norm)
    return float(norm)


class DeepSpeedEngine:
    """One model on many processes: DeepSpeed shards its optimizer (stage 1), gradients (2) and weights (3).

    module: the model; lr, max_grad_norm: as for `TorchEngine`; bf16: weights in bfloat16 with a float32 master copy
    inside the optimizer; zero_stage: 0 to 3; offload_optimizer: its state in CPU memory; gather_for_generation: whether
    stage 3 collects all weights on each GPU to generate; ranks: this process.

    Book: §13.6.8
    Source: Rajbhandari et al. 2020, arXiv 1910.02054
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        lr: float,
        max_grad_norm: float,
        bf16: bool,
        zero_stage: int,
        offload_optimizer: bool,
        gather_for_generation: bool,
        ranks: Ranks,
    ):
        import deepspeed

        self.lr = lr
        self.max_grad_norm = max_grad_norm
        self.bf16 = bf16
        self.zero_stage = zero_stage
        self.ranks = ranks
        # Each layer is gathered from all ranks when it is called: whoever calls one more token waits for ever.
        self.steps_together = zero_stage == 3 and not gather_for_generation
        self.device = next(module.parameters()).device
        self.grad_norm = float("nan")
        optimizer = torch.optim.AdamW(trainable(module), lr=lr, betas=BETAS, weight_decay=0.0)
        config = deepspeed_config(module, bf16=bf16, zero_stage=zero_stage, offload_optimizer=offload_optimizer)
        if zero_stage > 0:
            config["gradient_clipping"] = max_grad_norm
        self.engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
        self.module = self.engine.module

    def __call__(self, *inputs: Any) -> Any:
        """The module's forward pass."""
        return self.engine(*inputs)

    def precision(self) -> AbstractContextManager:
        """Nothing to set: in bfloat16 the weights themselves are."""
        return contextlib.nullcontext()

    @contextmanager
    def whole_weights(self, *, for_generation: bool = False) -> Iterator[nn.Module]:
        """The module with all its weights in this process: stage 3 gathers them once and puts them back after.

        for_generation: where gather_for_generation is off, they stay where they are.
        """
        if self.zero_stage < 3 or (self.steps_together and for_generation):
            yield self.module
            return
        from deepspeed.runtime.zero import unwrap_model_for_generation

        error = None
        with unwrap_model_for_generation(self.engine):
            # DeepSpeed restores its hooks only if the body ends normally.
            try:
                yield self.module
            except BaseException as raised:
                error = raised
        if error is not None:
            raise error

    def backward(self, loss: Tensor, *, last: bool = True) -> None:
        """Add the gradient of a loss to what has been gathered; with last it is exchanged, and the step follows."""
        self.engine.set_gradient_accumulation_boundary(last)
        # DeepSpeed takes the mean over the ranks; our losses are parts of one sum.
        self.engine.backward(loss * self.ranks.world_size)

    def clip_gradient(self) -> float:
        """Clip at stage 0; the other stages clip within `step`, and only then is grad_norm known."""
        if self.zero_stage == 0:
            self.grad_norm = clip_gradient(self.module, self.max_grad_norm)
        return self.grad_norm

    def step(self, lr_scale: float = 1.0) -> None:
        """One optimizer step. Raises FloatingPointError if the gradient was not finite; DeepSpeed then took none."""
        for group in self.engine.optimizer.param_groups:
            group["lr"] = self.lr * lr_scale
        self.engine.step()
        if not self.engine.was_step_applied():
            raise FloatingPointError(f"the gradient of the {type(self.module).__name__.lower()} is not finite")
        if self.zero_stage > 0:
            self.grad_norm = float(self.engine.get_global_grad_norm())

    def discard(self) -> None:
        """Forget the gathered gradient."""
        optimizer = self.engine.optimizer
        optimizer.zero_grad(set_to_none=True)
        if hasattr(optimizer, "averaged_gradients"):
            optimizer.averaged_gradients = {}
        if self.zero_stage in (1, 2):
            # What is offloaded adds up on the CPU until a step has set this back.
            optimizer.micro_step_id = -1


Engine = TorchEngine | DeepSpeedEngine


def deepspeed_config(
    module: nn.Module, *, bf16: bool, zero_stage: int, offload_optimizer: bool = False
) -> dict[str, Any]:
    """The configuration that DeepSpeed gets. Batches and clipping are ours: it is told of one answer at a time."""
    vectors = [parameter.numel() for parameter in module.parameters() if parameter.dim() < 2]
    zero: dict[str, Any] = {
        "stage": zero_stage,
        # Matrices are sharded whatever their size; a norm or a bias is not worth a message.
        "stage3_param_persistence_threshold": max(vectors, default=0) + 1,
        # A bucket larger than all gradients together would only take memory.
        "reduce_bucket_size": min(5 * 10**8, max(1, sum(p.numel() for p in trainable(module)))),
    }
    if offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "zero_optimization": zero,
        "bf16": {"enabled": bf16, "check_grad_overflow": True},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }


def shard_reference(module: nn.Module, *, bf16: bool, offload: bool) -> nn.Module:
    """A frozen model with its weights sharded over the ranks (stage 3), gathered layer by layer when it is called.

    offload: the shards lie in CPU memory.
    """
    import deepspeed

    config = deepspeed_config(module, bf16=bf16, zero_stage=3)
    if offload:
        config["zero_optimization"]["offload_param"] = {"device": "cpu"}
    engine, *_ = deepspeed.initialize(model=module, config=config)
    return engine


def quiet_deepspeed(device: torch.device) -> None:
    """Tell DeepSpeed the device, which it would guess aloud. With accelerate installed, saving any model imports it."""
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("DEEPSPEED_LOG_LEVEL", "warning")


def start_deepspeed(device: torch.device) -> None:
    """Join the other ranks: gloo on CPUs, NCCL on GPUs. A process without a launcher is its own group of one."""
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    if "WORLD_SIZE" not in os.environ:
        os.environ |= {**alone, "MASTER_PORT": str(free_port())}
    # torch's own deprecations, dozens of lines for each rank, come through DeepSpeed.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch|deepspeed")
    import deepspeed

    deepspeed.utils.logger.setLevel(logging.WARNING)
    if device.type == "cpu":
        # Otherwise every fresh machine compiles a shared-memory operator for minutes, and a run that is killed in
        # between leaves a lock that stops all later ones.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    else:
        torch.cuda.set_device(device)
    deepspeed.init_distributed(dist_backend="gloo" if device.type == "cpu" else "nccl")


def free_port() -> int:
    """A TCP port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def fingerprint(module: nn.Module) -> str:
    """A hash of the frozen weights that this process holds: all of them, or at stage 3 its own shards."""
    frozen = [(name, p) for name, p in module.named_parameters() if not p.requires_grad]
    # DeepSpeed keeps a shard beside each parameter, which itself is empty or whole from one moment to the next.
    return digest({name: getattr(p, "ds_tensor", p) for name, p in frozen})
