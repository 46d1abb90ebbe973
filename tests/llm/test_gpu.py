"""A model of half a billion random weights on a GPU. Skipped without one; `make gpu-check` prints the numbers."""

import sys

import pytest
import torch
from transformers import Qwen2Config

from ppo_lab.files import DATA, data_path
from ppo_lab.llm.models import Actor, load_language_model
from ppo_lab.llm.tokens import token_logp

sys.path.insert(0, str(DATA.parent / "tools"))
from gpu_check import HALF_BILLION, measure

SMALL = {"batch_size": 8, "minibatch_size": 4, "micro_batch_size": 2, "score_batch_size": 4, "max_new_tokens": 6}


def test_the_check_itself_runs_on_a_small_model():
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = Qwen2Config(**shape, intermediate_size=64, vocab_size=148)
    row = measure(config, device="cpu", **SMALL)
    assert row["tokens_per_second"] > 0 and row["planned_gb"] > 0
    assert 0 <= row["first_score"] <= 1


@pytest.mark.parametrize("changes", [{}, {"gradient_checkpointing": False}, {"bf16": False}], ids=str)
@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_half_a_billion_weights_train_within_15_percent_of_the_plan(changes):
    row = measure(HALF_BILLION, **changes)
    assert row["peak_gb"] == pytest.approx(row["planned_gb"], rel=0.15)
    assert row["first_approx_kl"] < 0.05


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
            ],
        ),
    ],
)
def test_fused_attention_gives_the_log_probabilities_of_the_plain_one(device):
    """Padding on the left, float32: sdpa picks the device's own kernels, a mask of its own included."""
    lm = load_language_model(data_path("models/sft")).to(device)
    ids = torch.randint(4, 148, (3, 12), generator=torch.Generator().manual_seed(0)).to(device)
    mask = torch.arange(12, device=device) >= torch.tensor([[0], [2], [5]], device=device)
    found = []
    for attention in ("eager", "sdpa"):
        lm.set_attn_implementation(attention)
        logits, _ = Actor(lm)(ids, mask, 6)
        found.append(token_logp(logits, ids[:, -6:]))
    assert (found[0] - found[1]).abs().max() < 1e-4
