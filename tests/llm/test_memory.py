"""The memory budget: by hand, against the numbers of the ZeRO paper, and against what small models really allocate."""

import math

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache, GPT2Config, GPT2Model, LlamaConfig, LlamaModel

from ppo_lab.llm.memory import (
    activation_bytes,
    count_parameters,
    kv_cache_bytes,
    logits_bytes,
    lora_parameters,
    memory_budget,
    model_bytes,
    training_bytes,
)

GB = 10**9
IDS = torch.zeros(2, 32, dtype=torch.int64)


def _llama_config(**changes):
    sizes = {
        "vocab_size": 50,
        "hidden_size": 64,
        "intermediate_size": 170,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    return LlamaConfig(**{**sizes, **changes}, bos_token_id=0, eos_token_id=1)


def _rows(budget):
    return {row.what: row for row in budget.rows}


# --- the table of §13.5.1


def test_table_of_the_book_with_the_master_copy_it_forgot():
    # 7e9 parameters: weights 2 bytes, gradients 2, m 4, v 4, master 4. The book: 56 GB, 84 GB and 220-240 GB.
    budget = memory_budget(7e9)
    for name in ("Actor", "Critic"):
        row = _rows(budget)[name]
        assert (row.parameters, row.gradients, row.optimizer) == (14 * GB, 14 * GB, 84 * GB)
        assert row.gpu == 112 * GB
    for name in ("Reference", "Reward"):
        assert _rows(budget)[name].gpu == _rows(budget)[name].parameters == 14 * GB
    assert len(budget.rows) == 4
    assert budget.models == budget.gpu == 252 * GB
    assert budget.cpu == 0


def test_the_56_gb_of_the_book_are_m_and_v_alone():
    row = memory_budget(7e9).rows[0]
    assert row.optimizer - 7 * 4 * GB == 56 * GB


def test_float32_gradients_add_two_bytes_to_each_trained_parameter():
    budget = memory_budget(7e9, float32_gradients=True)
    assert budget.rows[0].gradients == 28 * GB
    assert budget.models == (252 + 2 * 14) * GB


def test_float32_training_takes_the_same_16_bytes_without_a_master_copy():
    row = memory_budget(1000, param_bytes=4).rows[0]
    assert (row.parameters, row.gradients, row.optimizer) == (4000, 4000, 8000)
    assert memory_budget(1000, param_bytes=4).rows[2].gpu == 4000


def test_pure_bf16_takes_8_bytes():
    row = memory_budget(1000, master_weights=False).rows[0]
    assert (row.parameters, row.gradients, row.optimizer) == (2000, 2000, 4000)


def test_models_of_four_sizes():
    budget = memory_budget(1000, critic_params=200, reference_params=500, reward_params=300)
    assert [row.gpu for row in budget.rows] == [16_000, 3200, 1000, 600]


def test_without_critic_reference_or_reward_model_there_is_no_row():
    assert list(_rows(memory_budget(1000, critic_params=0))) == ["Actor", "Reference", "Reward"]
    assert list(_rows(memory_budget(1000, reward_params=0))) == ["Actor", "Critic", "Reference"]
    assert list(_rows(memory_budget(1000, critic_params=0, reference_params=0, reward_params=0))) == ["Actor"]


# --- ZeRO, offload, LoRA


@pytest.mark.parametrize(("stage", "expected"), [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_zero_stages_as_in_figure_1_of_the_paper(stage, expected):
    # Rajbhandari et al. 2020: 7.5B parameters, 64 GPUs, mixed precision Adam.
    row = memory_budget(7.5e9, zero_stage=stage, n_gpus=64).rows[0]
    assert round(row.gpu / GB, 1) == expected


@pytest.mark.parametrize(
    ("stage", "actor", "frozen"),
    [
        (0, (2000, 2000, 12_000), 2000),
        (1, (2000, 2000, 3000), 2000),
        (2, (2000, 500, 3000), 2000),
        (3, (500, 500, 3000), 500),
    ],
)
def test_what_each_stage_shards_over_four_gpus(stage, actor, frozen):
    rows = _rows(memory_budget(1000, zero_stage=stage, n_gpus=4))
    for name in ("Actor", "Critic"):
        assert (rows[name].parameters, rows[name].gradients, rows[name].optimizer) == actor
    assert rows["Reference"].gpu == rows["Reward"].gpu == frozen


def test_one_gpu_shards_nothing_and_a_share_is_rounded_up():
    assert memory_budget(1000, zero_stage=3).models == memory_budget(1000).models
    # 10 parameters on 4 GPUs: the largest share is 3.
    assert memory_budget(10, zero_stage=3, n_gpus=4).rows[0].gpu == 3 * 16


def test_four_models_of_7b_fit_on_8_gpus_of_80_gb_by_sharding_alone():
    assert memory_budget(7e9, zero_stage=3, n_gpus=8).models == 31.5 * GB


def test_offload_moves_bytes_to_the_cpu_and_loses_none():
    plan = {"zero_stage": 2, "n_gpus": 4}
    rows = _rows(memory_budget(1000, offload={"optimizer", "reference"}, **plan))
    assert (rows["Actor"].optimizer, rows["Actor"].gpu, rows["Actor"].cpu) == (0, 2500, 3000)
    assert (rows["Critic"].optimizer, rows["Critic"].cpu) == (0, 3000)
    assert (rows["Reference"].gpu, rows["Reference"].cpu) == (0, 2000)
    assert (rows["Reward"].gpu, rows["Reward"].cpu) == (2000, 0)
    everything = memory_budget(1000, offload=["optimizer", "reference", "reward"], **plan)
    assert everything.gpu + everything.cpu == memory_budget(1000, **plan).gpu
    assert everything.cpu == 3000 + 3000 + 2000 + 2000


def test_lora_trains_the_adapters_and_needs_no_second_copy_as_reference():
    budget = memory_budget(1000, lora_params=10)
    rows = _rows(budget)
    assert list(rows) == ["Actor", "Critic", "Reward"]
    for name in ("Actor", "Critic"):
        assert (rows[name].parameters, rows[name].gradients, rows[name].optimizer) == (2020, 20, 120)
    # A reference that is another model than the base of the adapters is kept when asked for.
    assert _rows(memory_budget(1000, lora_params=10, reference_params=1000))["Reference"].gpu == 2000


def test_lora_parameters_of_llama_2_7b():
    # A layer has four matrices of 4096 x 4096, and three between 4096 and 11008; 32 layers; rank 16.
    by_hand = 32 * 16 * (4 * (4096 + 4096) + 3 * (4096 + 11_008))
    assert by_hand == 39_976_960
    assert lora_parameters(LlamaConfig(), rank=16) == by_hand


def test_lora_parameters_of_gpt2():
    # GPT-2 writes its matrices as Conv1D: 768 to 2304, 768 to 768, 768 to 3072 and back; the head is the embedding.
    assert lora_parameters(GPT2Config(), rank=8) == 12 * 8 * (3072 + 1536 + 3840 + 3840)


# --- phases and table


def test_rollout_and_update_follow_each_other():
    budget = memory_budget(1000, critic_params=0, reward_params=0, kv_cache=700, activations=400, logits=200)
    assert budget.models == 18_000
    assert budget.rollout == 18_700
    assert budget.update == 18_600
    assert budget.gpu == 18_700


def test_table_is_in_units_of_1e9_bytes():
    budget = memory_budget(7e9, kv_cache=25 * GB, offload=["reference"])
    lines = budget.table().splitlines()
    assert lines[0].startswith("GB = 1e9 bytes, per GPU ")
    assert lines[0].split()[-6:] == ["parameters", "gradients", "optimizer", "temporary", "GPU", "CPU"]
    assert [line.split() for line in lines[1:]] == [
        ["Actor", "14.0", "14.0", "84.0", "-", "112.0", "-"],
        ["Critic", "14.0", "14.0", "84.0", "-", "112.0", "-"],
        ["Reference", "-", "-", "-", "-", "-", "14.0"],
        ["Reward", "14.0", "-", "-", "-", "14.0", "-"],
        ["KV", "cache", "(rollout)", "-", "-", "-", "25.0", "25.0", "-"],
        ["Models", "238.0", "14.0"],
        ["Peak", "263.0", "14.0"],
    ]
    assert len({len(line) for line in lines}) == 1


# --- against real models


def test_counting_parameters_allocates_nothing():
    # Llama 2 7B has 6.74 billion; its float32 weights would take 27 GB.
    assert count_parameters(LlamaConfig()) == 6_738_415_616


@pytest.mark.parametrize("tied", [False, True])
def test_counted_parameters_are_those_of_the_model(tied):
    config = _llama_config(tie_word_embeddings=tied)
    model = AutoModelForCausalLM.from_config(config)
    # Embedding and head of 50 x 64, two layers, the last norm.
    layer = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 170 + 2 * 64
    assert count_parameters(config) == (1 if tied else 2) * 50 * 64 + 2 * layer + 64
    assert model_bytes(model) == 4 * count_parameters(config)
    assert model_bytes(model.bfloat16()) == 2 * count_parameters(config)


def _trained_llama(dtype, master):
    """One AdamW step of a tiny Llama; with `master` the optimizer owns a float32 copy of the weights."""
    model = AutoModelForCausalLM.from_config(_llama_config()).to(dtype)
    weights = list(model.parameters())
    stepped = [weight.detach().float().clone() for weight in weights] if master else weights
    optimizer = torch.optim.AdamW(stepped)
    model(IDS).logits.float().sum().backward()
    if master:
        for copy, weight in zip(stepped, weights, strict=True):
            copy.grad = weight.grad.float()
    optimizer.step()
    for copy in stepped if master else ():
        copy.grad = None
    return model, optimizer


@pytest.mark.parametrize(
    ("dtype", "master", "plan"),
    [
        (torch.bfloat16, True, {}),
        (torch.bfloat16, False, {"master_weights": False}),
        (torch.float32, False, {"param_bytes": 4}),
    ],
)
def test_budget_is_what_adamw_really_allocates(dtype, master, plan):
    model, optimizer = _trained_llama(dtype, master)
    measured, budget = training_bytes(model, optimizer), memory_budget(count_parameters(model.config), **plan).rows[0]
    assert measured.parameters == budget.parameters
    assert measured.gradients == budget.gradients
    step_counts = 4 * len(list(model.parameters()))
    assert measured.optimizer == budget.optimizer + step_counts


def test_gradients_count_only_while_they_exist():
    model, optimizer = _trained_llama(torch.float32, master=False)
    model.zero_grad()
    assert training_bytes(model, optimizer).gradients == 0


@torch.no_grad()
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_kv_cache_is_that_of_a_real_model(kv_heads):
    config = _llama_config(num_key_value_heads=kv_heads)
    output = AutoModelForCausalLM.from_config(config).bfloat16()(IDS, use_cache=True)
    cache = next(x for x in output.values() if isinstance(x, DynamicCache))
    real = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert kv_cache_bytes(batch=2, length=32, layers=2, kv_heads=kv_heads, head_dim=16) == real


def test_kv_cache_of_llama_2_7b_is_half_a_mebibyte_a_token():
    assert kv_cache_bytes(batch=1, length=1, layers=32, kv_heads=32, head_dim=128) == 2**19


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_those_of_a_real_model(dtype):
    logits = AutoModelForCausalLM.from_config(_llama_config()).to(dtype)(IDS).logits
    assert logits_bytes(tokens=2 * 32, vocabulary=50, dtype_bytes=dtype.itemsize) == logits.nbytes


# --- activations


def test_activations_of_one_layer_by_hand():
    # s·b·h = 3·2·8 = 48; 48·34 = 1632; 5·a·s²·b = 5·2·9·2 = 180.
    sizes = {"micro_batch": 2, "length": 3, "hidden": 8, "heads": 2}
    assert activation_bytes(**sizes, layers=1) == 1812
    assert activation_bytes(**sizes, layers=5) == 5 * 1812
    assert activation_bytes(**sizes, layers=5, flash_attention=True) == 5 * 1632
    # Five inputs of 2 bytes a number and one layer rebuilt.
    assert activation_bytes(**sizes, layers=5, checkpointing=True) == 5 * 2 * 48 + 1812
    # In float32 a value takes 4 bytes and a mask still 1: 48·(16·4 + 2) + 36·(2·4 + 1).
    assert activation_bytes(**sizes, layers=1, dtype_bytes=4) == 48 * 66 + 36 * 9


def _saved_bytes(model, ids):
    """What a forward pass keeps for the backward pass, each storage once, weights not."""
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor  # held, so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        # The output is held as well: freeing it would free the graph.
        output = model(input_ids=ids, use_cache=False)
    assert output.last_hidden_state.requires_grad
    return sum(x.untyped_storage().nbytes() for address, x in kept.items() if address not in weights)


def _bytes_per_layer(make, length, prepare=nn.Module.train):
    """The difference that two more layers make, halved: embeddings and last norm drop out."""
    ids = torch.zeros(2, length, dtype=torch.int64)
    one, three = (_saved_bytes(prepare(make(layers).bfloat16()), ids) for layers in (1, 3))
    return (three - one) / 2


def _gpt2(layers):
    sizes = {"vocab_size": 50, "n_embd": 64, "n_head": 4, "n_positions": 256, "bos_token_id": 0, "eos_token_id": 1}
    # The one fused GELU; "gelu_new" of the original keeps every step of its approximation.
    return GPT2Model(GPT2Config(n_layer=layers, activation_function="gelu", attn_implementation="eager", **sizes))


def _llama(layers):
    return LlamaModel(_llama_config(num_hidden_layers=layers, num_key_value_heads=4, attn_implementation="sdpa"))


@pytest.mark.parametrize("length", [32, 128])
def test_gpt2_keeps_what_the_formula_says_and_a_second_byte_for_each_dropout_mask(length):
    measured = _bytes_per_layer(_gpt2, length)
    formula = activation_bytes(micro_batch=2, length=length, hidden=64, layers=1, heads=4)
    # On the CPU a dropout mask is a bf16 tensor: two masks of s·b·h and one of a·s²·b take 2 bytes instead of 1.
    masks = 2 * (2 * length * 64) + 2 * 4 * length**2
    # Mean and inverse spread of two layer norms.
    norms = 2 * 2 * (2 * length) * 2
    assert measured == formula + masks + norms
    assert 1.05 < measured / formula < 1.15


@pytest.mark.parametrize("length", [32, 128])
def test_llama_with_fused_attention_keeps_a_third_more_than_the_formula(length):
    measured = _bytes_per_layer(_llama, length)
    formula = activation_bytes(micro_batch=2, length=length, hidden=64, layers=1, heads=4, flash_attention=True)
    # Measured 1.34 at both lengths: no term grows with the square of the length.
    assert measured / formula == pytest.approx(1.34, abs=0.1)


@pytest.mark.parametrize("make", [_gpt2, _llama])
def test_a_checkpointed_layer_keeps_its_input(make):
    def checkpointed(model):
        # transformers has renamed the switch; the old name warns, the new one is missing before.
        name = next(
            n for n in ("activation_checkpointing_enable", "gradient_checkpointing_enable") if hasattr(model, n)
        )
        getattr(model, name)()
        return model.train()

    sizes = {"micro_batch": 2, "length": 32, "hidden": 64, "heads": 4, "checkpointing": True}
    another_layer = activation_bytes(**sizes, layers=2) - activation_bytes(**sizes, layers=1)
    assert _bytes_per_layer(make, 32, checkpointed) == another_layer == 2 * 2 * 32 * 64


# --- wrong numbers


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("n_params", value) for value in (0, -1, 1.5, math.nan, math.inf)],
        *[(f"{model}_params", value) for model in ("critic", "reference", "reward") for value in (-1, 0.5)],
        *[("lora_params", value) for value in (0, -3)],
        *[("n_gpus", value) for value in (0, -8, 1.5)],
        *[("zero_stage", value) for value in (4, -1)],
        *[("param_bytes", value) for value in (0, 1, 16)],
        *[("offload", value) for value in ("optimizer", ["actor"])],
        *[(name, -1) for name in ("kv_cache", "activations", "logits")],
    ],
)
def test_impossible_plans_are_refused_by_name(name, value):
    with pytest.raises(ValueError, match=f"^{name} must"):
        memory_budget(**{"n_params": 1000, name: value})


@pytest.mark.parametrize(
    ("function", "sizes"),
    [
        (kv_cache_bytes, {"batch": 1, "length": 1, "layers": 1, "kv_heads": 1, "head_dim": 1, "dtype_bytes": 2}),
        (activation_bytes, {"micro_batch": 1, "length": 1, "hidden": 1, "layers": 1, "heads": 1, "dtype_bytes": 2}),
        (logits_bytes, {"tokens": 1, "vocabulary": 1, "dtype_bytes": 2}),
    ],
)
def test_sizes_below_one_are_refused_by_name(function, sizes):
    for name in sizes:
        for value in (0, -1, 0.5):
            with pytest.raises(ValueError, match=f"^{name} must"):
                function(**{**sizes, name: value})


def test_an_adapter_without_rank_is_refused():
    with pytest.raises(ValueError, match=r"^rank must"):
        lora_parameters(_llama_config(), 0)
