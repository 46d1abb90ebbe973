"""What a run will need, told before any weight is loaded."""

import os
from dataclasses import replace

import torch
from transformers import AutoConfig, PreTrainedConfig

from ppo_lab.files import locate
from ppo_lab.llm.config import RunSettings
from ppo_lab.llm.memory import (
    MemoryBudget,
    MemoryRow,
    activation_bytes,
    count_parameters,
    kv_cache_bytes,
    logits_bytes,
    lora_parameters,
    memory_budget,
)
from ppo_lab.llm.ranks import Ranks
from ppo_lab.llm.rewards import reward_sources

PROMPT_LENGTH = 256


def plan(settings: RunSettings, world_size: int, prompt_length: int = PROMPT_LENGTH) -> MemoryBudget:
    """The memory budget of a run on each of world_size GPUs, from the configurations of its models alone.

    prompt_length: tokens of a long prompt, which are not known before the tokenizer has read them all.

    Book: §13.5.1; §13.6.8
    """
    config = model_config(settings.model.actor, settings)
    actor_params = count_parameters(config)
    reward_params = sum(count_parameters(model_config(name, settings)) for name in reward_model_names(settings))
    critic_params = {"shared": 0, "actor": actor_params, "reward": reward_params}[settings.model.critic]
    if not settings.ppo.with_critic:
        critic_params = 0
    ppo, engine = settings.ppo, settings.engine
    rank = settings.model.lora_rank
    value_bytes = 2 if engine.bf16 else 4
    # Autocast on one process keeps the weights in float32; DeepSpeed holds them in bfloat16 with a master copy.
    sharded = world_size > 1 or engine.zero_stage > 0
    text = config.get_text_config()
    heads, layers = text.num_attention_heads, text.num_hidden_layers
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    length = prompt_length + ppo.max_new_tokens
    rows = -(-ppo.batch_size // world_size)
    micro = min(ppo.micro_batch_size, -(-ppo.minibatch_size // world_size))
    offload = [name for name in ("optimizer", "reference", "reward") if getattr(engine, f"offload_{name}")]
    budget = memory_budget(
        actor_params,
        critic_params=critic_params,
        reference_params=None if rank else actor_params,
        # Stage 3 divides what DeepSpeed holds, and a reward model is whole on every GPU.
        reward_params=reward_params * (world_size if engine.zero_stage == 3 else 1),
        param_bytes=2 if engine.bf16 and sharded else 4,
        lora_params=lora_parameters(config, rank) if rank else None,
        zero_stage=engine.zero_stage,
        n_gpus=world_size,
        offload=offload,
        kv_cache=kv_cache_bytes(rows, length, layers, kv_heads, head_dim, dtype_bytes=value_bytes),
        activations=update_activations(text, settings, micro, length),
        # The logits of the answers and their gradient.
        logits=2 * logits_bytes(micro * ppo.max_new_tokens, text.vocab_size, dtype_bytes=value_bytes),
    )
    rows = list(budget.rows)
    if engine.zero_stage == 3 and world_size > 1 and engine.gather_for_generation:
        rows.append(MemoryRow("Gathered actor", "rollout", temporary=actor_params * value_bytes))
    scored = logits_bytes(ppo.score_batch_size * ppo.max_new_tokens, text.vocab_size, dtype_bytes=value_bytes)
    # Scoring follows generation: its logits take the place of the cache, and of the gathered weights.
    rows.append(MemoryRow("Logits of scoring", "score", temporary=scored))
    return replace(budget, rows=rows)


def update_activations(text: PreTrainedConfig, settings: RunSettings, micro: int, length: int) -> int:
    """What the backward passes of one micro-batch keep: actor and critic go forward before either goes backward."""
    one_model = activation_bytes(
        micro,
        length,
        text.hidden_size,
        text.num_hidden_layers,
        text.num_attention_heads,
        dtype_bytes=2 if settings.engine.bf16 else 4,
        flash_attention=True,
        checkpointing=settings.engine.gradient_checkpointing,
    )
    alone = settings.model.critic == "shared" or not settings.ppo.with_critic
    return one_model * (1 if alone else 2)


def reward_model_names(settings: RunSettings) -> list[str]:
    """The models among the sources of the reward; the others are functions."""
    return [name for name, _ in reward_sources(settings.model.reward) if ":" not in name]


def model_config(name: str, settings: RunSettings) -> PreTrainedConfig:
    """The configuration of a checkpoint, without its weights."""
    return AutoConfig.from_pretrained(locate(name), trust_remote_code=settings.model.trust_remote_code)


def available_bytes(device: torch.device, ranks: Ranks) -> int | None:
    """Free memory for this process: of its GPU, or its share of the main memory; None where it cannot be told."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return main_memory(ranks)


def main_memory(ranks: Ranks) -> int | None:
    """This process's share of the free main memory; None where the system does not tell (Windows, macOS)."""
    if not hasattr(os, "sysconf") or "SC_AVPHYS_PAGES" not in os.sysconf_names:
        return None
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES") // ranks.on_this_machine


def verdict(budget: MemoryBudget, available: int | None, main: int | None = None) -> str:
    """Estimate, available and what follows, in one line. main: free CPU memory, for what is offloaded to it."""
    line = f"memory per process: {budget.gpu / 1e9:.2f} GB estimated, {_compared(budget.gpu, available)}"
    if budget.cpu:
        line += f"; offloaded {budget.cpu / 1e9:.2f} GB, {_compared(budget.cpu, main)}"
    return line


def _compared(needed: int, available: int | None) -> str:
    if available is None:
        return "free memory unknown"
    return f"{available / 1e9:.1f} GB free: {'fits' if needed <= available else 'does NOT fit'}"
