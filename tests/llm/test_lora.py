"""Adapters: nothing at first, a small addition to each matrix later, and a reference without them."""

import builtins
from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from ppo_lab.files import digest
from ppo_lab.llm.config import make_settings
from ppo_lab.llm.exact import tiny_language_model
from ppo_lab.llm.lora import AdaptersOff, add_adapters, linear_layers, merged, switch_adapters
from ppo_lab.llm.models import Actor
from ppo_lab.llm.ppo import train
from ppo_lab.llm.run import export

IDS = torch.tensor([[0, 2, 3, 4, 1]])
MASK = torch.ones_like(IDS, dtype=torch.bool)


def test_without_peft_it_says_what_to_install(monkeypatch):
    original = builtins.__import__

    def without(name, *args, **kwargs):
        if name.partition(".")[0] == "peft":
            raise ImportError("No module named 'peft'")
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ValueError, match=r"^lora_rank needs the package peft: pip install peft"):
        add_adapters(tiny_language_model(6), 2, 4, seed=0)


def adapted(rank=2, alpha=6, seed=0):
    pytest.importorskip("peft")
    lm = tiny_language_model(6)
    add_adapters(lm, rank, alpha, seed)
    return lm


def adapters_of(lm):
    return {name: p for name, p in lm.named_parameters() if ".lora_" in name}


def move(lm, size=0.3):
    """Let the adapters do something."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in adapters_of(lm).values():
            p.add_(size * torch.randn(p.shape, generator=generator))


def test_all_linear_layers_but_the_output_get_an_adapter():
    lm = tiny_language_model(6)
    names = {name.rpartition(".")[2] for name in linear_layers(lm)}
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    lm = adapted(rank=2)
    trained = {name for name, p in lm.named_parameters() if p.requires_grad}
    assert trained == set(adapters_of(lm)) and len(trained) == 2 * 7
    for name, part in lm.named_modules():
        if isinstance(part, nn.Linear) and name.endswith("base_layer"):
            name = name.removesuffix(".base_layer")
            a, b = (adapters_of(lm)[f"{name}.lora_{letter}.default.weight"] for letter in "AB")
            assert a.shape == (2, part.in_features) and b.shape == (part.out_features, 2)
            assert bool(a.any()) and not bool(b.any())


def test_a_model_with_fresh_adapters_is_the_model_without():
    plain = tiny_language_model(6)
    assert torch.equal(adapted()(IDS).logits, plain(IDS).logits)


def test_the_seed_alone_decides_what_the_adapters_are():
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first = digest(adapters_of(adapted(seed=3)))
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(6)
    assert digest(adapters_of(adapted(seed=3))) == first != digest(adapters_of(adapted(seed=4)))


def by_hand(lm, rank, alpha):
    """The plain model with W + (alpha/rank)·B·A written into each of its matrices."""
    adapters, plain = adapters_of(lm), tiny_language_model(6)
    with torch.no_grad():
        for name in linear_layers(plain):
            a, b = (adapters[f"{name}.lora_{letter}.default.weight"] for letter in "AB")
            plain.get_submodule(name).weight += alpha / rank * b @ a
    return plain


def test_an_adapter_adds_alpha_over_rank_times_B_A():
    lm = adapted(rank=2, alpha=6)
    move(lm)
    expected = by_hand(lm, 2, 6)(IDS).logits
    torch.testing.assert_close(lm(IDS).logits, expected, atol=1e-5, rtol=1e-5)
    assert (expected - tiny_language_model(6)(IDS).logits).abs().max() > 0.1


def test_merging_gives_a_plain_model_and_leaves_the_adapted_one():
    lm = adapted(rank=2, alpha=6)
    move(lm)
    before = digest(lm.state_dict())
    plain = merged(lm)
    assert digest(lm.state_dict()) == before
    assert type(plain) is type(tiny_language_model(6))
    assert plain.state_dict().keys() == tiny_language_model(6).state_dict().keys()
    expected = by_hand(lm, 2, 6)
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(tensor, expected.state_dict()[name], atol=1e-6, rtol=1e-6)
    assert all(p.requires_grad for p in plain.parameters())


def test_the_reference_is_the_actor_with_its_adapters_off():
    lm = adapted()
    actor = Actor(lm)
    reference = AdaptersOff(actor)
    move(lm)
    with torch.no_grad():
        logits, none = reference(IDS, MASK, 3)
        assert none is None
        plain, _ = Actor(tiny_language_model(6))(IDS, MASK, 3)
        torch.testing.assert_close(logits, plain, atol=1e-6, rtol=1e-6)
        assert not torch.allclose(actor(IDS, MASK, 3)[0], plain, atol=0.1)


def test_an_error_in_the_reference_leaves_the_adapters_on():
    lm = adapted()
    move(lm)
    expected = lm(IDS).logits
    with pytest.raises(IndexError):
        AdaptersOff(Actor(lm))(torch.full_like(IDS, 99), MASK, 3)
    assert torch.equal(lm(IDS).logits, expected)


def test_adapters_can_be_switched_off_and_on():
    lm = adapted()
    move(lm)
    on = lm(IDS).logits
    switch_adapters(lm, False)
    torch.testing.assert_close(lm(IDS).logits, tiny_language_model(6)(IDS).logits)
    switch_adapters(lm, True)
    assert torch.equal(lm(IDS).logits, on)
    assert {name for name, p in lm.named_parameters() if p.requires_grad} == set(adapters_of(lm))


# --- in training


@pytest.mark.parametrize("critic", ["actor", "shared"])
def test_training_moves_the_adapters_and_the_value_head_alone(small, critic):
    pytest.importorskip("peft")
    roles, prompts, settings = small(lora_rank=2, lr=1e-2, critic_lr=1e-2, critic=critic)
    engines = [engine for engine in (roles.actor, roles.critic) if engine is not None]
    before = [{name: p.detach().clone() for name, p in engine.module.named_parameters()} for engine in engines]
    rows = [row for row, _ in train(prompts, roles, settings)]
    assert rows[0]["kl_per_response"] == pytest.approx(0, abs=1e-5)
    assert abs(rows[2]["kl_per_response"]) > 1e-3
    for engine, old in zip(engines, before, strict=True):
        moved = {name for name, p in engine.module.named_parameters() if not torch.equal(p, old[name])}
        heads = {name for name in old if name.startswith("head.") or ".head." in name or "value_head" in name}
        assert moved == {name for name in old if ".lora_" in name} | heads
    assert isinstance(roles.reference, AdaptersOff)


def test_training_goes_the_way_that_a_reward_points(small):
    pytest.importorskip("peft")
    roles, prompts, settings = small(lora_rank=4, lr=3e-2, kl_coef=0.01)
    rows = [row for row, _ in train(prompts, roles, replace(settings, iterations=12))]
    assert sum(row["score"] for row in rows[-3:]) > sum(row["score"] for row in rows[:3]) + 2


def test_the_export_is_plain_and_is_what_was_trained(small, tmp_path):
    pytest.importorskip("peft")
    roles, prompts, settings = small(lora_rank=2, lr=1e-2)
    list(train(prompts, roles, settings))
    export(roles, tmp_path / "actor")
    lm, report = AutoModelForCausalLM.from_pretrained(tmp_path / "actor", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    torch.testing.assert_close(lm(IDS).logits, roles.actor.module.lm(IDS).logits, atol=1e-5, rtol=1e-5)
    assert (lm(IDS).logits - tiny_language_model(6)(IDS).logits).abs().max() > 1e-3


def test_a_model_without_linear_layers_is_refused(small):
    """GPT-2 has layers of its own kind, which store their matrices the other way round."""
    pytest.importorskip("peft")
    lm = GPT2LMHeadModel(
        GPT2Config(vocab_size=6, n_positions=16, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=1)
    )
    with pytest.raises(ValueError, match=r"^lora_rank needs a model of linear layers, GPT2LMHeadModel has none"):
        small(lm, lora_rank=2)


@pytest.mark.parametrize(("rank", "alpha"), [(-1, 32), (2, 0)])
def test_a_rank_or_a_scale_without_meaning_is_refused(rank, alpha):
    with pytest.raises(ValueError, match=f"lora_rank must be at least 0, .* got {rank} and {alpha}"):
        make_settings({"lora_rank": rank, "lora_alpha": alpha})


def test_a_reference_that_is_the_actor_cannot_be_refreshed():
    with pytest.raises(ValueError, match="refresh_reference_every must be 0 with lora_rank"):
        make_settings({"lora_rank": 2, "refresh_reference_every": 5})
