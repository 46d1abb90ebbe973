"""What a run will need, from the configurations of its models alone: held against sums done by hand."""

import json
import os
import re
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from ppo_lab.files import data_path
from ppo_lab.llm import plan as module
from ppo_lab.llm.config import load_preset, make_settings, preset_names
from ppo_lab.llm.memory import MemoryBudget, MemoryRow
from ppo_lab.llm.plan import available_bytes, plan, reward_model_names, verdict
from ppo_lab.llm.ranks import Ranks

# Qwen2.5-7B as its config.json says. Its parameters, by hand: two tables of 152,064 × 3,584; in each of 28 layers the
# four attention matrices with their biases, three of the feed-forward network, two norms; and one norm at the end.
QWEN = {
    "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_size": 3584, "intermediate_size": 18944,
    "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
    "tie_word_embeddings": False,
}  # fmt: skip
_ATTENTION = 3584 * 3584 + 3584 + 2 * (3584 * 512 + 512) + 3584 * 3584
_LAYER = _ATTENTION + 3 * 3584 * 18944 + 2 * 3584
N_QWEN = 2 * 152064 * 3584 + 28 * _LAYER + 3584


GRPO = {"advantage": "grpo", "group_size": 8}


def row_of(budget, start):
    [row] = [row for row in budget.rows if row.what.lower().startswith(start)]
    return row


def n_parameters(model):
    return sum(p.numel() for p in model.parameters())


@pytest.fixture
def qwen(tmp_path):
    """A folder that holds the configuration of a model and nothing else: no weights can be loaded from it."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    return str(tmp_path)


def seven_billion(qwen, **changes):
    values = {"actor": qwen, "critic": "actor", "reward": "ppo_lab.llm.rewards:exact_match", "bf16": True, **changes}
    return make_settings(values)


def test_the_parameters_of_the_tiny_preset_are_those_of_its_models():
    budget = plan(make_settings(load_preset("tiny")), 1)
    lm = n_parameters(AutoModelForCausalLM.from_pretrained(data_path("models/sft")))
    reward = n_parameters(AutoModelForSequenceClassification.from_pretrained(data_path("models/reward")))
    # float32: 4 bytes for a weight and 4 for its gradient, 8 for Adam's two moments; no gradient for what is frozen.
    for name, n, trained in (("actor", lm, True), ("critic", reward, True), ("reference", lm, False)):
        row = row_of(budget, name)
        # The estimate leaves out the head of one output.
        n -= 64 if name == "critic" else 0
        assert row.parameters == 4 * n, name
        assert (row.gradients, row.optimizer) == ((4 * n, 8 * n) if trained else (0, 0)), name
    assert row_of(budget, "reward").parameters == 4 * (reward - 64)


def test_seven_billion_on_eight_gpus_by_hand(qwen):
    assert N_QWEN == 7_615_616_512
    budget = plan(seven_billion(qwen, zero_stage=3), 8)
    # 2 bytes of weights, 2 of gradients, 12 of Adam and the master copy, all divided by eight.
    actor = row_of(budget, "actor")
    assert actor.parameters == pytest.approx(2 * N_QWEN / 8, abs=8)
    assert actor.gradients == pytest.approx(2 * N_QWEN / 8, abs=8)
    assert actor.optimizer == pytest.approx(12 * N_QWEN / 8, abs=8)
    assert row_of(budget, "critic").optimizer == pytest.approx(12 * N_QWEN / 8, abs=8)
    assert row_of(budget, "reference").parameters == pytest.approx(2 * N_QWEN / 8, abs=8)
    assert not [row for row in budget.rows if row.what.lower().startswith("reward")]


@pytest.mark.parametrize(("stage", "divided"), [(0, ()), (1, ("o",)), (2, ("o", "g")), (3, ("o", "g", "p"))])
def test_each_stage_shards_one_thing_more(qwen, stage, divided):
    row = row_of(plan(seven_billion(qwen, zero_stage=stage), 4), "actor")
    found = {"p": row.parameters / 2, "g": row.gradients / 2, "o": row.optimizer / 12}
    for name, n in found.items():
        assert n == pytest.approx(N_QWEN / (4 if name in divided else 1), abs=4), name


def test_what_is_offloaded_leaves_the_gpu(qwen):
    on = plan(seven_billion(qwen, zero_stage=3), 8)
    off = plan(seven_billion(qwen, zero_stage=3, offload_optimizer=True, offload_reference=True), 8)
    moved = (2 * 12 + 2) * N_QWEN / 8
    assert off.cpu == pytest.approx(moved, rel=1e-6) and on.cpu == 0
    assert on.gpu - off.gpu == pytest.approx(moved, rel=1e-6)


def test_a_reward_model_can_be_offloaded():
    settings = make_settings({**load_preset("tiny"), "offload_reward": True})
    budget = plan(settings, 1)
    reward = row_of(budget, "reward")
    assert (reward.gpu, reward.cpu) == (0, row_of(plan(make_settings(load_preset("tiny")), 1), "reward").gpu)


def test_bfloat16_on_one_process_keeps_weights_of_four_bytes(qwen):
    assert row_of(plan(seven_billion(qwen), 1), "actor").parameters == 4 * N_QWEN
    assert row_of(plan(seven_billion(qwen, zero_stage=1), 1), "actor").parameters == 2 * N_QWEN
    assert row_of(plan(seven_billion(qwen, zero_stage=1, bf16=False), 1), "actor").parameters == 4 * N_QWEN


def test_adapters_need_no_reference_and_train_little(qwen):
    budget = plan(seven_billion(qwen, zero_stage=2, lora_rank=16), 1)
    # B·A of rank 16 beside each matrix, 16·(inputs + outputs): q, o, k, v and three of the feed-forward network.
    pairs = 2 * (3584 + 3584) + 2 * (3584 + 512) + 3 * (3584 + 18944)
    n_adapters = 28 * 16 * pairs
    actor = row_of(budget, "actor")
    assert actor.optimizer == pytest.approx(12 * n_adapters, rel=1e-6)
    assert actor.parameters == pytest.approx(2 * (N_QWEN + n_adapters), rel=1e-6)
    assert not [row for row in budget.rows if row.what.lower().startswith("reference")]


def test_the_cache_of_generation_is_that_of_a_rank_s_own_answers(qwen):
    settings = seven_billion(qwen, zero_stage=3, batch_size=31, max_new_tokens=44)
    # 31 answers on 2 ranks are 16; 300 tokens with keys and values of 4·128 numbers of 2 bytes in 28 layers.
    budget = plan(settings, 2, prompt_length=256)
    assert row_of(budget, "kv cache").phase == "rollout"
    assert row_of(budget, "kv cache").temporary == 16 * 300 * 28 * 2 * 4 * 128 * 2


def test_stage_3_gathers_the_whole_actor_to_generate(qwen):
    gathered = row_of(plan(seven_billion(qwen, zero_stage=3), 8), "gathered")
    assert gathered.phase == "rollout" and gathered.temporary == 2 * N_QWEN
    for changes in ({"zero_stage": 3, "gather_for_generation": False}, {"zero_stage": 2}):
        budget = plan(seven_billion(qwen, **changes), 8)
        assert not [row for row in budget.rows if row.what.lower().startswith("gathered")]


def test_a_reward_model_is_whole_on_every_gpu(qwen):
    # Only the reference is sharded beside the trained models.
    for n_models in (1, 2):
        budget = plan(seven_billion(qwen, zero_stage=3, reward=",".join([qwen] * n_models)), 8)
        assert row_of(budget, "reward").parameters == n_models * 2 * N_QWEN


def test_the_logits_are_those_of_a_micro_batch_and_their_gradient(qwen):
    for minibatch_size, rows in ((64, 4), (6, 3)):
        settings = seven_billion(
            qwen, zero_stage=3, minibatch_size=minibatch_size, micro_batch_size=4, max_new_tokens=10
        )
        budget = plan(settings, 2)
        # bfloat16: 2 bytes for each of 152,064 words at each token of the answers, twice.
        assert 2 * rows * 10 * 152064 * 2 in [row.temporary for row in budget.rows if row.phase == "update"]


@pytest.mark.parametrize(
    ("reward", "names"),
    [
        ("models/reward", ["models/reward"]),
        ("my_module:score", []),
        ("my_module:score,models/reward*0.5,other", ["models/reward", "other"]),
    ],
)
def test_a_reward_function_has_no_weights(reward, names):
    assert reward_model_names(make_settings({"reward": reward, "critic": "actor"})) == names


def test_a_shared_critic_is_no_second_model():
    budget = plan(make_settings({**load_preset("tiny"), "critic": "shared"}), 1)
    assert not [row for row in budget.rows if row.what.lower().startswith("critic")]


def test_no_weights_are_loaded(qwen, monkeypatch):
    # There are none in the folder, and nobody asks the machine for memory.
    monkeypatch.setattr(torch.nn.Linear, "__init__", no_memory_for(torch.nn.Linear.__init__))
    assert plan(seven_billion(qwen, zero_stage=3), 8).gpu > 0


def no_memory_for(original):
    def on_meta(self, *args, **kwargs):
        original(self, *args, **kwargs)
        assert self.weight.device.type == "meta"

    return on_meta


@pytest.mark.parametrize("name", sorted(set(preset_names()) - {"tiny"}))
def test_every_preset_says_what_it_needs(name, monkeypatch):
    """The estimate in the comment of the preset, from the configuration of its models."""
    text = (module_presets() / f"{name}.yaml").read_text(encoding="utf-8")
    number = float(re.search(r"^# Memory: about (\d+) GB", text, re.MULTILINE).group(1))
    n_gpus = int(found.group(1)) if (found := re.search(r"on each of (\d+) GPUs", text)) else 1
    monkeypatch.setattr(module, "model_config", lambda model, settings: known_config(model))
    budget = plan(make_settings(load_preset(name), source=name), n_gpus)
    assert budget.gpu / 1e9 == pytest.approx(number, rel=0.1)


def module_presets():
    from ppo_lab.llm.config import PRESETS

    return PRESETS


def known_config(name):
    """The shapes of the models that the presets name, as their config.json on the hub says."""
    from transformers import AutoConfig

    shapes = {
        "Qwen/Qwen2.5-0.5B-Instruct": (896, 4864, 24, 14, 2, 151936, True),
        "Qwen/Qwen2.5-1.5B-Instruct": (1536, 8960, 28, 12, 2, 151936, True),
        "Qwen/Qwen2.5-7B-Instruct": (3584, 18944, 28, 28, 4, 152064, False),
        "HuggingFaceTB/SmolLM2-135M-Instruct": (576, 1536, 30, 9, 3, 49152, True),
    }
    kind = "llama" if "SmolLM" in name else "qwen2"
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    names += ("vocab_size", "tie_word_embeddings")
    return AutoConfig.for_model(kind, **dict(zip(names, shapes[name], strict=True)))


# --- the verdict


def test_the_verdict_is_one_line_with_both_numbers():
    budget = MemoryBudget([MemoryRow("actor", parameters=2_500_000_000)])
    assert verdict(budget, 24_000_000_000) == "memory per process: 2.50 GB estimated, 24.0 GB free: fits"
    assert verdict(budget, 2_500_000_000) == "memory per process: 2.50 GB estimated, 2.5 GB free: fits"
    assert verdict(budget, 2_499_999_999) == "memory per process: 2.50 GB estimated, 2.5 GB free: does NOT fit"


def test_the_verdict_tells_of_what_is_offloaded_and_of_what_is_not_known():
    budget = MemoryBudget([MemoryRow("actor", parameters=2_000_000_000, cpu=9_000_000_000)])
    gpu = "memory per process: 2.00 GB estimated, 3.0 GB free: fits"
    assert verdict(budget, 3_000_000_000, 8_000_000_000) == f"{gpu}; offloaded 9.00 GB, 8.0 GB free: does NOT fit"
    assert verdict(budget, 3_000_000_000, 9_000_000_000) == f"{gpu}; offloaded 9.00 GB, 9.0 GB free: fits"
    unknown = "memory per process: 2.00 GB estimated, free memory unknown; offloaded 9.00 GB, free memory unknown"
    assert verdict(budget, None, None) == unknown


def test_the_ranks_of_a_machine_share_its_memory(monkeypatch):
    monkeypatch.setattr(os, "sysconf", lambda name: {"SC_PAGE_SIZE": 4096, "SC_AVPHYS_PAGES": 1000}[name])
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    cpu = torch.device("cpu")
    assert available_bytes(cpu, Ranks()) == 4_096_000
    assert available_bytes(cpu, Ranks(0, 4)) == 1_024_000
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert available_bytes(cpu, Ranks(0, 4)) == 2_048_000


def test_a_gpu_says_itself_what_is_free(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (7, 80))
    assert available_bytes(SimpleNamespace(type="cuda"), Ranks()) == 7


def test_without_a_critic_the_plan_has_neither_its_weights_nor_its_activations(qwen):
    with_critic, without = (plan(seven_billion(qwen, **changes), 1) for changes in ({}, GRPO))
    assert [row.what for row in without.rows] == [row.what for row in with_critic.rows if row.what != "Critic"]
    # 16 bytes for each of its parameters.
    assert with_critic.models - without.models == 16 * N_QWEN
    rows = [next(row for row in budget.rows if row.what == "Activations") for budget in (with_critic, without)]
    assert rows[0].temporary == 2 * rows[1].temporary
