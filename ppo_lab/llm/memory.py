"""How much memory LLM-PPO needs before it is started, and how much a small model really takes.

The budget is arithmetic on counts: bytes per parameter, divided by what ZeRO shards, plus what only one phase needs.
All sizes are bytes; the printed table is in GB = 10⁹ bytes. Every number is for one GPU (and its share of CPU memory).
"""

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig

OFFLOADABLE = ("optimizer", "reference", "reward")


class MemoryRow(NamedTuple):
    """One line of the budget, in bytes on one GPU. phase: "always", "rollout", "score" or "update"."""

    what: str
    phase: str = "always"
    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    temporary: int = 0  # KV cache, activations or logits: free again after the phase
    cpu: int = 0  # offloaded from this GPU to the memory of its host

    @property
    def gpu(self) -> int:
        """All that this line takes on the GPU, in bytes."""
        return self.parameters + self.gradients + self.optimizer + self.temporary


@dataclass(frozen=True)
class MemoryBudget:
    """The lines of a plan, and their sums in bytes. print(budget.table()) shows it.

    Book: §13.5.1
    """

    rows: list[MemoryRow]

    @property
    def models(self) -> int:
        """What lies on the GPU in both phases."""
        return sum(row.gpu for row in self.rows if row.phase == "always")

    @property
    def rollout(self) -> int:
        """On the GPU while answers are generated: the models and the KV cache."""
        return self.models + sum(row.gpu for row in self.rows if row.phase == "rollout")

    @property
    def scoring(self) -> int:
        """On the GPU while the answers are read: the models and the logits of one batch."""
        return self.models + sum(row.gpu for row in self.rows if row.phase == "score")

    @property
    def update(self) -> int:
        """On the GPU while the weights are trained: the models, the activations and the logits."""
        return self.models + sum(row.gpu for row in self.rows if row.phase == "update")

    @property
    def gpu(self) -> int:
        """The most at any time. The phases follow each other, so their temporary parts do not add up."""
        return max(self.rollout, self.scoring, self.update)

    @property
    def cpu(self) -> int:
        """What is offloaded, per GPU: times the GPUs of a host for the memory of that host."""
        return sum(row.cpu for row in self.rows)

    def table(self) -> str:
        """The budget as text, one line per row, in GB = 10⁹ bytes; "-" is nothing."""
        lines = [["GB = 1e9 bytes, per GPU", "parameters", "gradients", "optimizer", "temporary", "GPU", "CPU"]]
        for row in self.rows:
            numbers = (row.parameters, row.gradients, row.optimizer, row.temporary, row.gpu, row.cpu)
            lines.append([row.what if row.phase == "always" else f"{row.what} ({row.phase})", *map(_gb, numbers)])
        for what, total in {"Models": self.models, "Peak": self.gpu}.items():
            lines.append([what, "", "", "", "", _gb(total), _gb(self.cpu)])
        width = max(len(line[0]) for line in lines)
        return "\n".join(f"{line[0]:<{width}}" + "".join(f"{cell:>12}" for cell in line[1:]) for line in lines)


def memory_budget(
    n_params: float,
    *,
    critic_params: float | None = None,
    reference_params: float | None = None,
    reward_params: float | None = None,
    param_bytes: int = 2,
    master_weights: bool = True,
    float32_gradients: bool = False,
    lora_params: float | None = None,
    zero_stage: int = 0,
    n_gpus: int = 1,
    offload: Collection[str] = (),
    kv_cache: int = 0,
    activations: int = 0,
    logits: int = 0,
) -> MemoryBudget:
    """The memory of one LLM-PPO run on each of n_gpus: a row per model, and what generation and update add.

        trained: Ψ·(2 + 2 + 12) bytes in bf16     weights, gradients; Adam's m, v and the float32 master copy of 4 each
        frozen:  Ψ·2 bytes                        no gradients, no optimizer

    n_params: Ψ of the actor. critic_params, reference_params, reward_params: the same size unless given; 0 leaves the
    row out (no critic, a reward that is a Python function). param_bytes: 2 (bf16, fp16) or 4 (float32; then there is no
    master copy). master_weights=False: Adam works on the bf16 weights, m and v are bf16 as well. float32_gradients:
    gradients are accumulated in float32.

    lora_params: trainable parameters of the adapters, in actor and critic each; the models below them are frozen, and
    the reference is the actor with its adapters off, so it has no row of its own. See lora_parameters.

    zero_stage: what each GPU holds only its n-th part of. 0 nothing; 1 optimizer state; 2 gradients as well; 3 weights
    as well, those of reference and reward included. Shares are rounded up to whole parameters. offload: any of
    "optimizer", "reference", "reward", moved to the column `cpu`; the layers fetched back for a forward pass, and the
    gradients that ZeRO-Offload keeps on the CPU, are not accounted for. kv_cache, activations, logits: bytes from
    kv_cache_bytes, activation_bytes, logits_bytes for one GPU. Actor and critic are taken to be trained one after the
    other, so `activations` is for one of them. Buffers, fragments and the CUDA context (a GB or more) come on top.

    The book's table says 56 GB for m, v and master of 7B parameters. That is m and v alone; with the master copy it is
    84 GB, a trained model 112 GB and all four 252 GB (erratum C11).

    Raises ValueError for counts that are negative, zero or not whole, and for stages, dtypes and names that do not
    exist.

    Book: §13.5.1; §13.6.8
    Source: Rajbhandari et al. 2020, arXiv 1910.02054; Ren et al. 2021, arXiv 2101.06840
    """
    same = {"critic_params": critic_params, "reward_params": reward_params}
    same["reference_params"] = 0 if lora_params and reference_params is None else reference_params
    sizes = {name: n_params if size is None else size for name, size in same.items()}
    _check_whole(1, n_params=n_params, lora_params=lora_params, n_gpus=n_gpus)
    _check_whole(0, **sizes, kv_cache=kv_cache, activations=activations, logits=logits)
    _check_choices(param_bytes, zero_stage, offload)
    bytes_each = (
        param_bytes,
        4 if float32_gradients else param_bytes,
        12 if master_weights and param_bytes == 2 else 2 * param_bytes,
    )
    shards = tuple(n_gpus if zero_stage >= stage else 1 for stage in (3, 2, 1))
    rows = [_trained_row("Actor", n_params, lora_params, bytes_each, shards, "optimizer" in offload)]
    if sizes["critic_params"]:
        rows.append(
            _trained_row("Critic", sizes["critic_params"], lora_params, bytes_each, shards, "optimizer" in offload)
        )
    for what in ("reference", "reward"):
        if size := sizes[f"{what}_params"]:
            rows.append(_frozen_row(what, _share(size, shards[0]) * param_bytes, what in offload))
    temporary = {
        ("KV cache", "rollout"): kv_cache,
        ("Activations", "update"): activations,
        ("Logits", "update"): logits,
    }
    rows += [MemoryRow(what, phase, temporary=int(size)) for (what, phase), size in temporary.items() if size]
    return MemoryBudget(rows)


def kv_cache_bytes(batch: int, length: int, layers: int, kv_heads: int, head_dim: int, *, dtype_bytes: int = 2) -> int:
    """The keys and values kept while answers are generated: 2 · B · T · layers · kv_heads · head_dim · bytes.

    batch: answers generated at once on one GPU. length: prompt and answer. kv_heads: key-value heads, fewer than the
    query heads under grouped-query attention. The large item of the rollout. Raises ValueError for counts below 1.

    Book: §13.5.1
    Source: Pope et al. 2022, arXiv 2211.05102
    """
    _check_whole(
        1, batch=batch, length=length, layers=layers, kv_heads=kv_heads, head_dim=head_dim, dtype_bytes=dtype_bytes
    )
    return 2 * batch * length * layers * kv_heads * head_dim * dtype_bytes


def activation_bytes(
    micro_batch: int,
    length: int,
    hidden: int,
    layers: int,
    heads: int,
    *,
    dtype_bytes: int = 2,
    flash_attention: bool = False,
    checkpointing: bool = False,
) -> int:
    """What one forward pass keeps for the backward pass: s·b·h·(34 + 5·a·s/h) bytes a layer in 16 bits.

        s = length (prompt and answer), b = micro_batch, h = hidden, a = heads
        34 = 16 values of 2 bytes and 2 dropout masks of 1;   5 = 2 values and 1 mask; n bytes a value: 16n + 2, 2n + 1

    flash_attention: the attention matrix is never stored, the second term falls away. checkpointing: each layer keeps
    only its input, n·s·b·h, and one layer at a time is rebuilt in full. For GPT-2's layer; embeddings, the last norm
    and the head are not in it. Measured on the CPU in bf16 a GPT-2 layer keeps 1.09 to 1.14 times as much, because
    dropout masks have 2 bytes there, and a Llama layer with fused attention 1.34 times (float32 norms, a gated MLP).

    Raises ValueError for counts below 1.

    Book: §13.5.1; §13.6.8
    Source: Korthikanti et al. 2022, arXiv 2205.05198
    """
    _check_whole(
        1,
        micro_batch=micro_batch,
        length=length,
        hidden=hidden,
        layers=layers,
        heads=heads,
        dtype_bytes=dtype_bytes,
    )
    layer_input = length * micro_batch * hidden
    attention = 0 if flash_attention else (2 * dtype_bytes + 1) * heads * length**2 * micro_batch
    layer = (16 * dtype_bytes + 2) * layer_input + attention
    return layers * dtype_bytes * layer_input + layer if checkpointing else layers * layer


def logits_bytes(tokens: int, vocabulary: int, *, dtype_bytes: int = 4) -> int:
    """One tensor of logits: tokens · vocabulary · bytes. tokens: all response tokens of one micro-batch.

    A log-softmax over the whole vocabulary, a float32 copy and the gradient each cost as much again. Raises ValueError
    for counts below 1.

    Book: §13.5.1
    """
    _check_whole(1, tokens=tokens, vocabulary=vocabulary, dtype_bytes=dtype_bytes)
    return tokens * vocabulary * dtype_bytes


def count_parameters(config: PreTrainedConfig) -> int:
    """The number of parameters of the causal language model that a config describes; tied weights count once.

    Nothing is allocated and nothing downloaded: the model is built on the meta device.

    Book: §13.5.1
    """
    return sum(weight.numel() for weight in _meta_model(config).parameters())


def lora_parameters(config: PreTrainedConfig, rank: int) -> int:
    """Trainable parameters of LoRA adapters on every weight matrix of the layers: Σ rank·(inputs + outputs).

    The matrices are those of attention and MLP; embeddings, the output head and stacked experts get no adapter. Raises
    ValueError for a rank below 1.

    Book: §13.6.8
    Source: Hu et al. 2021, arXiv 2106.09685
    """
    _check_whole(1, rank=rank)
    model = _meta_model(config)
    matrices = [
        module.weight
        for module in model.modules()
        if getattr(module, "weight", None) is not None
        and module.weight.ndim == 2
        and not isinstance(module, nn.Embedding)
        and module is not model.get_output_embeddings()
    ]
    return rank * sum(sum(weight.shape) for weight in matrices)


def model_bytes(module: nn.Module) -> int:
    """The bytes its parameters really take; tied weights count once, buffers not at all.

    Book: §13.5.1
    """
    return sum(weight.nbytes for weight in module.parameters())


def training_bytes(module: nn.Module, optimizer: torch.optim.Optimizer) -> MemoryRow:
    """The bytes that training a module really takes: a row to hold against that of memory_budget.

    Weights the optimizer steps that are not the module's own (float32 master copies) count as optimizer state.
    Gradients count where they exist now, state after the first step. AdamW keeps a step count of 4 bytes for each
    tensor, which the budget leaves out.

    Book: §13.5.1
    """
    own = {id(weight) for weight in module.parameters()}
    stepped = [weight for group in optimizer.param_groups for weight in group["params"]]
    copies = [weight for weight in stepped if id(weight) not in own]
    state = [x for entries in optimizer.state.values() for x in entries.values() if isinstance(x, torch.Tensor)]
    gradients = [weight.grad for weight in [*module.parameters(), *copies] if weight.grad is not None]
    return MemoryRow(
        type(module).__name__,
        parameters=model_bytes(module),
        gradients=sum(gradient.nbytes for gradient in gradients),
        optimizer=sum(tensor.nbytes for tensor in [*state, *copies]),
    )


def _trained_row(
    what: str,
    n_params: float,
    lora_params: float | None,
    bytes_each: tuple[int, int, int],
    shards: tuple[int, ...],
    offloaded: bool,
) -> MemoryRow:
    # In the order weights, gradients, optimizer state: how many there are, bytes for each, parts they are cut into.
    learning = lora_params or n_params
    counts = (n_params + (lora_params or 0), learning, learning)
    held = [_share(count, n) * size for count, n, size in zip(counts, shards, bytes_each, strict=True)]
    on_gpu, on_cpu = (0, held[2]) if offloaded else (held[2], 0)
    return MemoryRow(what, parameters=held[0], gradients=held[1], optimizer=on_gpu, cpu=on_cpu)


def _frozen_row(what: str, size: int, offloaded: bool) -> MemoryRow:
    return MemoryRow(what.capitalize(), parameters=0 if offloaded else size, cpu=size if offloaded else 0)


def _share(count: float, n_gpus: int) -> int:
    return -(-int(count) // n_gpus)


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f}" if size else "-"


def _meta_model(config: PreTrainedConfig) -> nn.Module:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def _check_whole(least: int, **counts: float | None) -> None:
    for name, count in counts.items():
        if count is not None and not (least <= count < math.inf and count == int(count)):
            raise ValueError(f"{name} must be a whole number of at least {least}, got {count}")


def _check_choices(param_bytes: int, zero_stage: int, offload: Collection[str]) -> None:
    if param_bytes not in (2, 4):
        raise ValueError(f"param_bytes must be 2 (bf16, fp16) or 4 (float32), got {param_bytes}")
    if zero_stage not in (0, 1, 2, 3):
        raise ValueError(f"zero_stage must be 0, 1, 2 or 3, got {zero_stage}")
    if not set(offload) <= set(OFFLOADABLE):
        raise ValueError(f"offload must hold names from {OFFLOADABLE}, got {offload!r}")
