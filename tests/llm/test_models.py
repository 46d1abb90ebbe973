"""The four roles on tiny random models, each against the plain model read one row at a time."""

import copy
import math
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

from ppo_lab.llm.generate import generate, keyed_uniforms
from ppo_lab.llm.models import (
    Actor,
    Critic,
    ValueHead,
    check_roles,
    disable_dropout,
    eos_token_ids,
    load_language_model,
    load_tokenizer,
    make_critic,
    make_reference,
    texts,
)
from ppo_lab.llm.rewards import RewardModel
from ppo_lab.llm.tokens import left_pad, token_logp

EOS = 0
WORDS = ["<eos>", *"abcdefghijk"]
N_WORDS = len(WORDS)
PROMPTS = [[5, 6], [2, 3, 4, 5, 6], [7]]
# Answers of 4, 2 and 1 tokens: cut, ended, ended at once.
ANSWERS = [[1, 2, 3, 4], [9, EOS], [EOS]]
ROWS = [prompt + answer for prompt, answer in zip(PROMPTS, ANSWERS, strict=True)]


def config_of(kind, n_words=N_WORDS, **changes):
    """Sizes of a few thousand parameters; GPT-2 has learned positions."""
    shared = {
        "vocab_size": n_words,
        "initializer_range": 0.4,
        "bos_token_id": None,
        "eos_token_id": EOS,
        "pad_token_id": None,
    }
    if kind == "llama":
        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
        return LlamaConfig(**shared, **sizes, num_key_value_heads=1, max_position_embeddings=32, **changes)
    return GPT2Config(**shared, n_embd=16, n_layer=2, n_head=2, n_positions=32, **changes)


def make_lm(kind, **changes):
    torch.manual_seed(1)
    return {"llama": LlamaForCausalLM, "gpt2": GPT2LMHeadModel}[kind](config_of(kind, **changes)).eval()


def make_classifier(kind, n_words=N_WORDS, num_labels=1):
    torch.manual_seed(2)
    maker = {"llama": LlamaForSequenceClassification, "gpt2": GPT2ForSequenceClassification}[kind]
    return maker(config_of(kind, n_words, num_labels=num_labels)).eval()


def make_tokenizer(words=WORDS, **special):
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **{"eos_token": "<eos>", **special})


@pytest.fixture(params=["llama", "gpt2"])
def kind(request):
    return request.param


@pytest.fixture
def batch():
    """Prompts padded on the left, answers on the right, both with the EOS: ids and masks."""
    prompt_ids, prompt_mask = left_pad(PROMPTS, EOS)
    ids = torch.tensor([answer + [EOS] * (4 - len(answer)) for answer in ANSWERS])
    mask = torch.arange(4) < torch.tensor([[len(answer)] for answer in ANSWERS])
    return prompt_ids, prompt_mask, ids, mask


def joined(batch):
    prompt_ids, prompt_mask, ids, mask = batch
    return torch.cat([prompt_ids, ids], 1), torch.cat([prompt_mask, mask], 1)


# --- actor and critic: which position belongs to which token


class Counting(nn.Module):
    """A backbone whose hidden state at position i is the number i."""

    def forward(self, input_ids, attention_mask=None, use_cache=False):
        hidden = torch.arange(input_ids.shape[1], dtype=torch.float32).expand(input_ids.shape)
        return SimpleNamespace(last_hidden_state=hidden.unsqueeze(-1))


def test_B26_the_value_is_that_of_the_state_before_the_token():
    head = ValueHead(1, 1)
    head.weight.data.fill_(1.0)
    head.bias.data.fill_(10.0)
    ids = torch.zeros(1, 5, dtype=torch.int64)
    # Outputs 10 11 12 13 14; three tokens of prompt, two of answer: 12 and 13, and 14 after the end.
    assert Critic(Counting(), head)(ids, torch.ones_like(ids), 2).tolist() == [[12, 13, 14]]


@torch.no_grad()
def test_B26_the_log_probability_is_read_one_place_before_the_token(kind, batch):
    lm = make_lm(kind)
    logits, values = Actor(lm)(*joined(batch), 4)
    assert values is None
    assert logits.shape == (3, 4, N_WORDS)
    logp = token_logp(logits, batch[2])
    for n, (prompt, answer) in enumerate(zip(PROMPTS, ANSWERS, strict=True)):
        alone = lm(torch.tensor([ROWS[n]])).logits[0].log_softmax(-1)
        expected = [alone[len(prompt) - 1 + k, token].item() for k, token in enumerate(answer)]
        assert logp[n, : len(answer)].tolist() == pytest.approx(expected, abs=1e-5)
        one_late = [alone[len(prompt) + k, token].item() for k, token in enumerate(answer)]
        assert one_late != pytest.approx(expected, abs=1e-2)


@torch.no_grad()
def test_the_value_head_reads_the_trunk_of_the_actor(kind, batch):
    lm = make_lm(kind)
    actor = Actor(lm, value_head=True)
    logits, values = actor(*joined(batch), 4)
    assert values.tolist() == [[0.0] * 5] * 3
    assert logits.equal(Actor(lm)(*joined(batch), 4)[0])
    actor.value_head.weight.normal_(generator=torch.Generator().manual_seed(0))
    actor.value_head.bias.fill_(0.5)
    values = actor(*joined(batch), 4)[1]
    for n, row in enumerate(ROWS):
        hidden = lm.base_model(torch.tensor([row])).last_hidden_state[0]
        expected = hidden @ actor.value_head.weight[0] + 0.5
        n_values = len(ANSWERS[n]) + 1
        assert values[n, :n_values].tolist() == pytest.approx(expected[-n_values:].tolist(), abs=1e-5)


def test_a_value_on_the_trunk_trains_the_trunk(kind, batch):
    actor = Actor(make_lm(kind), value_head=True)
    actor.value_head.weight.data.fill_(0.1)
    actor(*joined(batch), 4)[1].square().mean().backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in actor.lm.get_input_embeddings().parameters())


@torch.no_grad()
def test_values_do_not_depend_on_padding_and_neighbours(kind, batch):
    critic = make_critic(make_classifier(kind))
    values = critic(*joined(batch), 4)
    for n, row in enumerate(ROWS):
        n_answer = len(ANSWERS[n])
        ids = torch.tensor([row])
        alone = critic(ids, torch.ones_like(ids), n_answer)
        assert alone.shape == (1, n_answer + 1)
        assert values[n, : n_answer + 1].tolist() == pytest.approx(alone[0].tolist(), abs=1e-5)


class AllLogits(nn.Module):
    """A language model that cannot leave logits out and takes no positions; its logits at position i are all i."""

    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace()

    def forward(self, input_ids, attention_mask=None, use_cache=False, output_hidden_states=False):
        return SimpleNamespace(logits=torch.arange(input_ids.shape[1]).expand(len(input_ids), -1).unsqueeze(-1))


def test_a_model_that_returns_all_logits_is_cut_to_the_response():
    ids = torch.zeros(2, 5, dtype=torch.int64)
    logits, _ = Actor(AllLogits())(ids, torch.ones_like(ids), 2)
    assert logits.squeeze(-1).tolist() == [[2, 3], [2, 3]]


# --- dropout


def largest_log_ratio(actor, batch):
    """Of a forward pass in training mode against the sampler's log-probabilities."""
    prompt_ids, prompt_mask = batch[:2]
    ids, mask, old_logp = generate(
        actor.lm,
        prompt_ids,
        prompt_mask,
        max_new_tokens=8,
        eos_token_ids=EOS,
        uniforms=keyed_uniforms(0, 0, range(3), 8),
    )
    actor.train()
    with torch.no_grad():
        logits, _ = actor(torch.cat([prompt_ids, ids], 1), torch.cat([prompt_mask, mask], 1), ids.shape[1])
    return (token_logp(logits, ids) - old_logp)[mask].abs().max().item()


@pytest.mark.parametrize("dropout", ["attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop"])
def test_B20_without_dropout_the_ratio_begins_at_1(batch, dropout):
    kind = "llama" if dropout == "attention_dropout" else "gpt2"
    changes = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0} if kind == "gpt2" else {}
    actor = Actor(make_lm(kind, **{**changes, dropout: 0.5}))
    assert largest_log_ratio(actor, batch) > 0.01
    disable_dropout(actor)
    assert largest_log_ratio(actor, batch) < 1e-5
    # The modes are left alone: gradient checkpointing works in training mode only.
    assert all(part.training for part in actor.modules())


# --- the reference


def fingerprint(module):
    return [parameter.detach().clone() for parameter in module.parameters()]


def unchanged(module, before):
    return all(now.equal(old) for now, old in zip(module.parameters(), before, strict=True))


def test_B32_the_reference_stays_what_the_policy_was(kind, batch):
    actor = Actor(make_lm(kind))
    reference = make_reference(actor.lm)
    check_roles(actor, reference)
    assert not any(parameter.requires_grad for parameter in reference.parameters())
    assert not reference.training
    assert not {p.untyped_storage().data_ptr() for p in actor.parameters()} & {
        p.untyped_storage().data_ptr() for p in reference.parameters()
    }

    def kl():
        with torch.no_grad():
            logp, ref_logp = (token_logp(model(*joined(batch), 4)[0], batch[2]) for model in (actor, reference))
        return (logp - ref_logp)[batch[3]]

    assert (kl() == 0).all()
    before, ref_before = fingerprint(actor), fingerprint(reference)
    optimizer = torch.optim.SGD(actor.parameters(), lr=1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        (-token_logp(actor(*joined(batch), 4)[0], batch[2])[batch[3]].mean()).backward()
        optimizer.step()
    assert unchanged(reference, ref_before)
    assert not unchanged(actor, before)
    # The sampled tokens have become more probable than they are for the reference.
    assert kl().mean() > 0


def test_a_frozen_parameter_in_the_actor_is_refused(kind):
    actor = Actor(make_lm(kind))
    name, parameter = next(iter(actor.named_parameters()))
    parameter.requires_grad_(False)
    with pytest.raises(ValueError, match=f"frozen: {name}"):
        check_roles(actor, make_reference(make_lm(kind)))


def test_a_reference_that_shares_a_tensor_is_refused(kind):
    actor = Actor(make_lm(kind))
    with pytest.raises(ValueError, match="storage of its own"):
        check_roles(actor, Actor(actor.lm))
    reference = make_reference(actor.lm)
    embedding = actor.lm.get_input_embeddings().weight
    reference.lm.get_input_embeddings().weight = nn.Parameter(embedding.data)
    with pytest.raises(ValueError, match="shares"):
        check_roles(actor, reference)


# --- the first critic


@torch.no_grad()
def test_a_critic_from_the_reward_model_begins_with_its_scores_in_new_units(kind, batch):
    tokenizer = make_tokenizer()
    model = make_classifier(kind)
    scores = RewardModel(model, tokenizer, tokenizer)(*batch)
    values = make_critic(model, mean=0.3, std=2.0)(*joined(batch), 4)
    # After the last token the whole answer has been read.
    after = values.gather(1, batch[3].sum(-1, keepdim=True)).squeeze(1)
    assert after.tolist() == pytest.approx([(score - 0.3) / 2.0 for score in scores.tolist()], abs=1e-5)


def test_a_critic_from_an_encoder_is_refused():
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    with pytest.raises(ValueError, match="no linear `score` head"):
        make_critic(BertForSequenceClassification(BertConfig(vocab_size=50, num_labels=1, **sizes)))


def test_a_critic_from_the_actor_begins_at_0_and_learns(kind, batch):
    lm = make_lm(kind)
    critic = make_critic(lm)
    values = critic(*joined(batch), 4)
    assert values.tolist() == [[0.0] * 5] * 3
    (values - 1).square().mean().backward()
    assert critic.head.weight.grad.abs().sum() > 0
    assert all(parameter.requires_grad for parameter in critic.parameters())
    shared = {p.data_ptr() for p in lm.parameters()} & {p.data_ptr() for p in critic.parameters()}
    assert shared == set()


def test_a_critic_from_a_frozen_reward_model_learns_and_leaves_it_alone(kind, batch):
    tokenizer = make_tokenizer()
    model = RewardModel(make_classifier(kind), tokenizer, tokenizer).model
    before = copy.deepcopy(model.state_dict())
    critic = make_critic(model)
    critic(*joined(batch), 4).square().mean().backward()
    torch.optim.SGD(critic.parameters(), lr=0.1).step()
    assert all(tensor.equal(before[name]) for name, tensor in model.state_dict().items())
    assert not critic.head.weight.equal(model.score.weight)


@pytest.mark.parametrize("std", [0.0, -1.0, math.nan])
def test_a_spread_that_is_none_is_refused(std):
    with pytest.raises(ValueError, match="std must be positive"):
        make_critic(make_classifier("llama"), std=std)


# --- loading


def test_texts_hold_what_counts():
    ids = torch.tensor([[0, 1, 2, 3], [4, 0, 5, 5]])
    mask = torch.tensor([[0, 1, 1, 0], [1, 1, 1, 0]]).bool()
    assert texts(make_tokenizer(), ids, mask) == ["a b", "d e"]


def test_B29_a_tokenizer_without_a_pad_token_pads_with_eos_and_says_so(tmp_path, capsys):
    make_tokenizer().save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == EOS
    notice = capsys.readouterr().err
    assert notice.count("notice:") == 1 and "no pad token, padding with <eos>" in notice
    ids, mask = left_pad([tokenizer("a b").input_ids, tokenizer("a b c d e").input_ids], tokenizer.pad_token_id)
    assert ids.tolist() == [[EOS, EOS, EOS, 1, 2], [1, 2, 3, 4, 5]]
    assert mask.sum(-1).tolist() == [2, 5]


def test_a_pad_token_of_its_own_is_kept_without_a_word(tmp_path, capsys):
    make_tokenizer([*WORDS, "<pad>"], pad_token="<pad>").save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path).pad_token_id == N_WORDS
    assert "notice" not in capsys.readouterr().err


def test_a_tokenizer_without_eos_is_refused(tmp_path):
    make_tokenizer(eos_token=None).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no EOS token"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "configured, expected", [(None, [EOS]), (EOS, [EOS]), (5, [EOS, 5]), ([5, EOS, 7, 5], [EOS, 5, 7])]
)
def test_every_eos_of_the_model_ends_an_answer(configured, expected):
    lm = make_lm("llama")
    lm.generation_config.eos_token_id = configured
    assert eos_token_ids(make_tokenizer(), lm) == expected


def test_a_checkpoint_is_read_in_float32(kind, tmp_path):
    lm = make_lm(kind)
    copy.deepcopy(lm).to(torch.bfloat16).save_pretrained(tmp_path)
    loaded = load_language_model(tmp_path)
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float32}
    for ours, original in zip(loaded.parameters(), lm.parameters(), strict=True):
        assert ours.equal(original.bfloat16().float())


def test_a_pickled_checkpoint_is_not_opened(tmp_path):
    lm = make_lm("llama")
    lm.config.save_pretrained(tmp_path)
    torch.save(lm.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(OSError, match="safetensors"):
        load_language_model(tmp_path)
