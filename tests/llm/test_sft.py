"""The SFT loss by hand, what training does to a tiny model, and the stored policy."""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ppo_lab.files import data_path
from ppo_lab.llm.reviews import judge, make_reviews, make_tokenizer, prompts, vocabulary
from ppo_lab.llm.reward_model import sample_answers
from ppo_lab.llm.sft import encode, sft_loss, train_sft


def tiny(seed=0, epochs=2):
    texts = make_reviews(64, seed=1)
    return train_sft(texts, make_tokenizer(), seed=seed, hidden_size=16, n_layers=1, epochs=epochs, batch_size=16)


# The loss


def test_the_loss_is_the_mean_negative_log_probability_of_the_next_tokens():
    """Vocabulary of two. Probabilities of the right tokens: 3/4 at position 1, 1/5 at position 2; 3 is padding."""
    logits = torch.tensor([[[math.log(1.0), math.log(3.0)], [math.log(1.0), math.log(4.0)], [9.0, -9.0], [5.0, 5.0]]])
    ids, mask = torch.tensor([[0, 1, 0, 1]]), torch.tensor([[True, True, True, False]])
    assert sft_loss(logits, ids, mask).item() == pytest.approx(-(math.log(3 / 4) + math.log(1 / 5)) / 2, abs=1e-6)


def test_padding_changes_nothing():
    generator = torch.Generator().manual_seed(0)
    logits, ids = torch.randn(2, 4, 7, generator=generator), torch.randint(7, (2, 4), generator=generator)
    mask = torch.tensor([[True] * 4, [True] * 4])
    padded = torch.cat([logits, torch.full((2, 3, 7), 50.0)], 1), torch.cat([ids, ids[:, :3]], 1)
    longer = torch.cat([mask, torch.zeros(2, 3, dtype=torch.bool)], 1)
    assert sft_loss(*padded, longer).item() == pytest.approx(sft_loss(logits, ids, mask).item(), abs=1e-6)


def test_an_indifferent_model_pays_log_v():
    ids = torch.tensor([[1, 5, 2]])
    assert sft_loss(torch.zeros(1, 3, 8), ids, torch.ones(1, 3)).item() == pytest.approx(math.log(8), abs=1e-6)


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="ids and mask"):
        sft_loss(torch.zeros(1, 3, 8), torch.zeros(1, 3, dtype=torch.long), torch.ones(1, 2))


def test_texts_are_padded_on_the_right():
    ids, mask = encode(["the plot", "the plot was good . <eos>"], make_tokenizer())
    assert ids[0, 3:].tolist() == [0, 0, 0, 0] and ids[0, 0] == 1
    assert mask.sum(1).tolist() == [3, 7]


# Training


def test_training_repeats_with_its_seed_and_leaves_the_global_generator_alone():
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    first, again, other = tiny(), tiny(), tiny(seed=1)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)


def test_nothing_to_read_is_refused():
    with pytest.raises(ValueError, match="texts must hold at least one"):
        train_sft([], make_tokenizer())


def test_training_lowers_the_loss_and_ties_the_embeddings():
    """An untrained model pays about log V, 5 nats."""
    model = tiny(epochs=20)
    ids, mask = encode([f"{text} <eos>" for text in make_reviews(64, seed=1)], make_tokenizer())
    assert sft_loss(model(ids, attention_mask=mask).logits, ids, mask) < 3.5
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not model.training and model.config.max_position_embeddings == 64


# The stored policy


@pytest.fixture(scope="module")
def stored():
    model = AutoModelForCausalLM.from_pretrained(data_path("models/sft"), dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(data_path("models/sft"))


def test_the_stored_policy_loads_in_float32_with_its_tokenizer(stored):
    model, tokenizer = stored
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert tokenizer.get_vocab() == make_tokenizer().get_vocab()
    assert tokenizer.padding_side == "left" and tokenizer.pad_token_id == 0
    ids = tokenizer("the plot was good . <eos>")["input_ids"]
    assert ids == make_tokenizer()("the plot was good . <eos>")["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "the plot was good ."
    assert model.config.vocab_size == len(vocabulary())


def test_the_stored_policy_writes_grammatical_reviews_of_both_kinds(stored):
    model, tokenizer = stored
    openings = prompts(512, seed=8)
    answers = sample_answers(openings, tokenizer, model, seed=11)
    finished = [answer.endswith(" <eos>") for answer in answers]
    columns = judge(openings, [answer.removesuffix(" <eos>") for answer in answers], finished)
    means = {name: sum(column) / 512 for name, column in columns.items()}
    assert sum(finished) >= 505
    assert means["grammatical"] >= 0.93
    assert 0.38 <= means["positive"] <= 0.52
    assert means["repetitive"] <= 0.05


def test_the_stored_policy_knows_reviews_it_has_not_read(stored):
    """Nats a token; the corpus has about 1.3, of which the choice of words is nearly all."""
    model, tokenizer = stored
    ids, mask = encode([f"{text} <eos>" for text in make_reviews(200, seed=77)], tokenizer)
    with torch.no_grad():
        assert sft_loss(model(ids, attention_mask=mask).logits, ids, mask) < 1.45
