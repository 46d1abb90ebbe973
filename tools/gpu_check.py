"""Train a model of Qwen2.5-0.5B's size, with random weights, on a GPU and print a table: `make gpu-check`.

Nothing is downloaded. Peak memory is held against the plan, so a wrong estimate shows. Needs a CUDA device.
"""

import sys
import tempfile
import time
from dataclasses import replace

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, Qwen2Config

from ppo_lab.llm.config import RunSettings, load_preset, make_settings
from ppo_lab.llm.models import load_tokenizer
from ppo_lab.llm.plan import plan
from ppo_lab.llm.ppo import train
from ppo_lab.llm.roles import assemble, locate

PROMPT_LENGTH = 64
HALF_BILLION = Qwen2Config(
    hidden_size=896,
    num_hidden_layers=24,
    num_attention_heads=14,
    num_key_value_heads=2,
    intermediate_size=4864,
    vocab_size=151936,
    tie_word_embeddings=True,
)


def half_of_the_ids(prompt_ids: Tensor, prompt_mask: Tensor, response_ids: Tensor, mask: Tensor) -> Tensor:
    """A reward that asks for small token ids: the share of the answer below the middle of the vocabulary."""
    small = (response_ids < HALF_BILLION.vocab_size // 2) & mask
    return small.sum(-1).float() / mask.sum(-1)


def measure(config: PreTrainedConfig, **changes: object) -> dict[str, float]:
    """Train a model of random weights for three iterations; returns what was planned and what it took."""
    settings = make_settings(
        {**load_preset("qwen2.5-0.5b"), "chat": False, "iterations": 3, "warmup_iterations": 1, **changes}
    )
    torch.manual_seed(settings.ppo.seed)
    tokenizer = load_tokenizer(locate("models/sft"))
    prompts = torch.randint(10, config.vocab_size, (settings.ppo.batch_size, PROMPT_LENGTH)).tolist()
    budget = planned(config, settings)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    roles = assemble(AutoModelForCausalLM.from_config(config), half_of_the_ids, tokenizer, prompts, settings)
    started = time.perf_counter()
    rows = [row for row, _ in train(prompts, roles, settings.ppo)]
    first, last = rows[0], rows[-1]
    return {
        "planned_gb": budget / 1e9,
        "peak_gb": last["memory_gb"],
        "tokens_per_second": last["tokens_per_second"],
        "seconds": time.perf_counter() - started,
        "first_score": first["score"],
        "last_score": last["score"],
        "first_approx_kl": first["approx_kl"],
    }


def planned(config: PreTrainedConfig, settings: RunSettings) -> int:
    """The bytes that the plan expects, from the configuration alone."""
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        model = replace(settings.model, actor=folder)
        return plan(replace(settings, model=model), 1, PROMPT_LENGTH).gpu


def main() -> int:
    """The command; returns its exit code."""
    if not torch.cuda.is_available():
        print("gpu-check: no CUDA device on this machine", file=sys.stderr)
        return 2
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}\n")
    print("| | planned GB | peak GB | tokens/s | seconds |\n|---|---|---|---|---|")
    variants = {
        "bf16, checkpointing": {},
        "bf16": {"gradient_checkpointing": False},
        "float32": {"bf16": False},
        "bf16, DeepSpeed stage 1": {"zero_stage": 1},
    }
    for name, changes in variants.items():
        row = measure(HALF_BILLION, **changes)
        print(
            f"| {name} | {row['planned_gb']:.1f} | {row['peak_gb']:.1f} | {row['tokens_per_second']:,.0f} | "
            f"{row['seconds']:.0f} |",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
