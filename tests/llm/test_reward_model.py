"""The Bradley–Terry loss by hand, the simulated judge, and the stored reward model with its faults."""

import math

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from ppo_lab.files import data_path
from ppo_lab.llm.reviews import gold_score, make_reviews, make_tokenizer, prompts
from ppo_lab.llm.reward_model import (
    Pair,
    bradley_terry_loss,
    pair_accuracy,
    preference_pairs,
    read_pairs,
    sample_answers,
    scores,
    train_reward_model,
    write_pairs,
)
from ppo_lab.llm.sft import train_sft

PAIRS = [Pair("the plot", "was good . <eos>", "was dull . <eos>"), Pair("my aunt", "and i <eos>", "loved the <eos>")]


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="module")
def tiny_sft(tokenizer):
    return train_sft(make_reviews(32, seed=1), tokenizer, hidden_size=16, n_layers=1, epochs=1, batch_size=16)


def gold(prompt, answer):
    return gold_score(f"{prompt} {answer.removesuffix(' <eos>')}", finished=answer.endswith("<eos>"))


# The loss


def test_bradley_terry_loss_by_hand():
    """−log σ(1) = log(1 + 1/e) = 0.313262."""
    assert bradley_terry_loss(torch.tensor([2.0]), torch.tensor([1.0])).item() == pytest.approx(0.313262, abs=1e-6)
    assert bradley_terry_loss(torch.tensor([1.0]), torch.tensor([2.0])).item() == pytest.approx(1.313262, abs=1e-6)
    both = bradley_terry_loss(torch.tensor([2.0, 1.0]), torch.tensor([1.0, 2.0])).item()
    assert both == pytest.approx((0.313262 + 1.313262) / 2, abs=1e-6)


def test_only_the_difference_of_scores_matters():
    chosen, rejected = torch.tensor([0.5, -2.0, 3.0]), torch.tensor([0.1, 1.0, 3.0])
    shifted = bradley_terry_loss(chosen + 7, rejected + 7)
    assert shifted.item() == pytest.approx(bradley_terry_loss(chosen, rejected).item(), abs=1e-6)
    assert bradley_terry_loss(chosen, chosen).item() == pytest.approx(math.log(2), abs=1e-6)


def test_a_hopeless_pair_costs_its_difference_and_stays_finite():
    chosen = torch.tensor([-400.0], requires_grad=True)
    loss = bradley_terry_loss(chosen, torch.tensor([400.0]))
    loss.backward()
    assert loss.item() == pytest.approx(800)
    assert chosen.grad.item() == pytest.approx(-1)


def test_scores_of_unequal_shapes_are_refused():
    with pytest.raises(ValueError, match=r"chosen_scores \(2,\), rejected_scores \(2, 1\)"):
        bradley_terry_loss(torch.zeros(2), torch.zeros(2, 1))


# Training


def test_training_starts_from_the_backbone_and_leaves_the_policy_alone(tiny_sft, tokenizer):
    before = {name: tensor.clone() for name, tensor in tiny_sft.state_dict().items()}
    model = train_reward_model(PAIRS, tokenizer, tiny_sft, epochs=0)
    for name, tensor in tiny_sft.model.state_dict().items():
        assert torch.equal(model.model.state_dict()[name], tensor)
    train_reward_model(PAIRS, tokenizer, tiny_sft, epochs=1)
    assert all(torch.equal(tensor, before[name]) for name, tensor in tiny_sft.state_dict().items())


def test_it_learns_two_pairs_by_heart(tiny_sft, tokenizer):
    model = train_reward_model(PAIRS, tokenizer, tiny_sft, epochs=30, lr=1e-2)
    assert pair_accuracy(PAIRS, tokenizer, model) == 1.0
    swapped = [Pair(pair.prompt, pair.rejected, pair.chosen) for pair in PAIRS]
    assert pair_accuracy(swapped, tokenizer, model) == 0.0


def test_nothing_to_compare_is_refused(tiny_sft, tokenizer):
    with pytest.raises(ValueError, match="pairs must hold at least one"):
        train_reward_model([], tokenizer, tiny_sft)


def test_the_score_is_the_head_at_the_last_real_token(tiny_sft, tokenizer):
    model = train_reward_model(PAIRS, tokenizer, tiny_sft, epochs=1)
    texts = ["the plot was good . <eos>", "the plot was good . i loved the cast . <eos>"]
    alone = model.model(tokenizer(texts[0], return_tensors="pt").input_ids).last_hidden_state[0, -1]
    expected = (model.score.weight[0] * alone).sum().item()
    assert scores(texts, tokenizer, model)[0].item() == pytest.approx(expected, abs=1e-5)
    assert model.config.num_labels == 1 and model.config.pad_token_id == tokenizer.pad_token_id


# The comparisons


def test_a_sharp_judge_is_always_right_and_a_blunt_one_guesses(tiny_sft, tokenizer):
    def share_right(sharpness):
        pairs = preference_pairs(prompts(300, seed=2), tokenizer, tiny_sft, seed=4, sharpness=sharpness)
        right = [gold(pair.prompt, pair.chosen) > gold(pair.prompt, pair.rejected) for pair in pairs]
        return sum(right) / len(right)

    assert share_right(1e6) == 1.0
    assert share_right(0.0) == pytest.approx(0.5, abs=0.1)


def test_answers_repeat_with_their_seed_and_write_out_eos(tiny_sft, tokenizer):
    openings = prompts(40, seed=2)
    answers = sample_answers(openings, tokenizer, tiny_sft, seed=4)
    assert answers == sample_answers(openings, tokenizer, tiny_sft, seed=4)
    assert answers != sample_answers(openings, tokenizer, tiny_sft, seed=5)
    for answer in answers:
        words = answer.split()
        assert len(words) == 24 or words[-1] == "<eos>"
        assert "<eos>" not in words[:-1]


def test_pairs_survive_the_file(tmp_path):
    write_pairs(tmp_path / "pairs.jsonl", PAIRS)
    assert read_pairs(tmp_path / "pairs.jsonl") == PAIRS


# The stored reward model


@pytest.fixture(scope="module")
def stored():
    model = AutoModelForSequenceClassification.from_pretrained(data_path("models/reward"), dtype=torch.float32)
    return AutoTokenizer.from_pretrained(data_path("models/reward")), model


@pytest.fixture(scope="module")
def held_out():
    return read_pairs(data_path("reviews/preferences_held_out.jsonl"))


def test_the_stored_reward_model_is_right_about_most_held_out_pairs(stored, held_out):
    assert {parameter.dtype for parameter in stored[1].parameters()} == {torch.float32}
    assert 0.72 <= pair_accuracy(held_out, *stored) <= 0.9


@torch.no_grad()
def test_its_scores_follow_the_gold_score_only_roughly(stored, held_out):
    answers = [(pair.prompt, answer) for pair in held_out for answer in (pair.chosen, pair.rejected)]
    proxy = scores([f"{prompt} {answer}" for prompt, answer in answers], *stored)
    truth = torch.tensor([gold(prompt, answer) for prompt, answer in answers])
    assert 0.55 <= torch.corrcoef(torch.stack([proxy, truth]))[0, 1].item() <= 0.85


@torch.no_grad()
def test_it_takes_praise_words_for_a_good_review(stored):
    """The hole that a policy without a leash falls into."""
    heap, honest, blame = (
        "the plot was great wonderful the the excellent the i lovely",
        "the plot was fine .",
        "the plot was dull .",
    )
    proxy = scores([f"{text} <eos>" for text in (heap, honest, blame)], *stored)
    assert gold_score(heap) < gold_score(honest)
    assert proxy[0] > proxy[1] > proxy[2]


def test_held_out_pairs_answer_prompts_that_training_never_saw(held_out):
    train = {pair.prompt for pair in read_pairs(data_path("reviews/preferences.jsonl"))}
    assert not train & {pair.prompt for pair in held_out}
    assert train <= set(data_path("reviews/prompts.txt").read_text(encoding="utf-8").splitlines())
