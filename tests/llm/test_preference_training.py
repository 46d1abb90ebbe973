"""Training on pairs: the encoding, log π of whole answers, each loss on three pairs, and DPO on the policy's own."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from torch import tensor
from transformers import GPT2Config, GPT2LMHeadModel

from ppo_lab.files import data_path
from ppo_lab.llm.config import load_preset, make_settings
from ppo_lab.llm.exact import response_logp, tiny_language_model
from ppo_lab.llm.experience import collect
from ppo_lab.llm.models import Actor
from ppo_lab.llm.ppo import NonFiniteError, judged_columns, kl_per_response
from ppo_lab.llm.preference_training import (
    PreferenceSettings,
    encode_pairs,
    iterative_dpo,
    ranked,
    rows_of,
    sequence_logp,
    train_on_preferences,
)
from ppo_lab.llm.reviews import judge
from ppo_lab.llm.reward_model import Pair, read_pairs
from ppo_lab.llm.roles import make_roles

PAIRS = [
    Pair("a", "a a <eos>", "b <eos>"),
    Pair("b c", "a <eos>", "b b c <eos>"),
    Pair("d", "c a a d a a", "<eos>"),
]


def settings(**changes):
    return PreferenceSettings(**{"lr": 1e-2, "epochs": 20, "batch_size": 2, **changes})


@pytest.fixture
def lm():
    return tiny_language_model(6)


# Pairs as token ids


def test_pairs_become_chosen_rows_then_rejected_rows(tokenizer):
    answers = encode_pairs(PAIRS, with_bos(tokenizer))
    assert answers.prompt_ids.shape == (6, 3) and answers.response_ids.shape == (6, 6)
    real = [(ids[m].tolist(), more[n].tolist()) for ids, m, more, n in zip(*answers, strict=True)]
    assert real == [
        ([0, 2], [2, 2, 1]),
        ([0, 3, 4], [2, 1]),
        ([0, 5], [4, 2, 2, 5, 2, 2]),
        ([0, 2], [3, 1]),
        ([0, 3, 4], [3, 3, 4, 1]),
        ([0, 5], [1]),
    ]
    # Prompts end, and answers begin, in the same column.
    assert answers.prompt_mask[:, -1].all() and answers.mask[:, 0].all()


def test_rows_of_keeps_no_column_of_padding(tokenizer):
    part = rows_of(encode_pairs(PAIRS, with_bos(tokenizer)), tensor([0, 3]))
    assert part.prompt_ids.tolist() == [[0, 2], [0, 2]]
    assert part.response_ids[part.mask].tolist() == [2, 2, 1, 3, 1]
    assert part.response_ids.shape == (2, 3)


def test_nothing_to_learn_from_and_empty_answers_are_refused(tokenizer):
    with pytest.raises(ValueError, match="pairs must hold at least one"):
        encode_pairs([], tokenizer)
    with pytest.raises(ValueError, match="answers must have at least one token"):
        encode_pairs([Pair("a", "b", "")], tokenizer)


def with_bos(tokenizer):
    """The small tokenizer with <bos> before a text, unless it is told to add no special tokens."""
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    return tokenizer


# log π of a whole answer


@torch.no_grad()
def test_log_probability_is_the_sum_over_the_tokens_whatever_the_padding(lm, tokenizer):
    answers = encode_pairs(PAIRS, with_bos(tokenizer))
    logp = sequence_logp(Actor(lm), answers)
    for row in range(6):
        prefix, expected = answers.prompt_ids[row][answers.prompt_mask[row]].tolist(), 0.0
        for token in answers.response_ids[row][answers.mask[row]].tolist():
            expected += lm(tensor([prefix])).logits[0, -1].log_softmax(-1)[token].item()
            prefix.append(token)
        assert logp[row].item() == pytest.approx(expected, abs=1e-4)
    alone = rows_of(answers, tensor([0]))
    exact = response_logp(lm, alone.prompt_ids[0], alone.response_ids, alone.mask)
    assert sequence_logp(Actor(lm), alone).item() == pytest.approx(exact.item(), abs=1e-5)


# Training on given pairs


@pytest.mark.parametrize("loss", ["dpo", "ipo", "simpo"])
def test_three_pairs_are_learned_by_heart(loss, lm, tokenizer):
    answers = encode_pairs(PAIRS, with_bos(tokenizer))
    before = sequence_logp(Actor(lm), answers).detach()
    rows = list(train_on_preferences(lm, PAIRS, tokenizer, settings(loss=loss, kl_coef=0.1)))
    assert [row["step"] for row in rows] == list(range(40))
    assert sum(row["accuracy"] for row in rows[-2:]) == 2
    assert rows[-1]["loss"] < rows[0]["loss"] / 2
    assert rows[-1]["chosen_reward"] > rows[-1]["rejected_reward"]
    chosen, rejected = (sequence_logp(Actor(lm), answers).detach() - before).chunk(2)
    assert (chosen > rejected + 0.5).all()
    assert all(math.isfinite(x) for row in rows for x in row.values())


def test_the_first_step_of_dpo_costs_log_two_and_that_of_ipo_the_squared_margin(lm, tokenizer):
    for loss, expected in (("dpo", math.log(2)), ("ipo", 25.0)):
        row = next(train_on_preferences(copy.deepcopy(lm), PAIRS, tokenizer, settings(loss=loss, kl_coef=0.1)))
        assert row["loss"] == pytest.approx(expected, rel=1e-4)
        assert row["chosen_reward"] == pytest.approx(0, abs=1e-5)


def test_the_reference_is_the_policy_before_the_first_step(lm, tokenizer):
    start, twin = copy.deepcopy(lm), copy.deepcopy(lm)
    own = list(train_on_preferences(lm, PAIRS, tokenizer, settings(epochs=5)))
    given = list(train_on_preferences(twin, PAIRS, tokenizer, settings(epochs=5), reference=start))
    assert own == given
    # Its numbers are read once: what becomes of it afterwards does not matter.
    third, spoiled, rows = copy.deepcopy(start), copy.deepcopy(start), []
    for row in train_on_preferences(third, PAIRS, tokenizer, settings(epochs=5), reference=spoiled):
        rows.append(row)
        with torch.no_grad():
            spoiled.lm_head.weight.zero_()
    assert rows == own


def test_another_reference_gives_other_rewards(lm, tokenizer, shake):
    other = copy.deepcopy(lm)
    shake(other)
    row = next(train_on_preferences(lm, PAIRS, tokenizer, settings(), reference=other))
    assert abs(row["chosen_reward"]) > 1e-3


def test_the_reference_is_left_as_it_is(lm, tokenizer):
    start = copy.deepcopy(lm)
    before = {name: x.clone() for name, x in start.state_dict().items()}
    list(train_on_preferences(lm, PAIRS, tokenizer, settings(epochs=1), reference=start))
    assert all(torch.equal(x, before[name]) for name, x in start.state_dict().items())
    assert all(p.grad is None for p in start.parameters())
    assert not torch.equal(lm.lm_head.weight, start.lm_head.weight)


def test_simpo_asks_no_reference(lm, tokenizer, monkeypatch):
    def never(*_):
        raise AssertionError("SimPO computed log-probabilities of a reference")

    monkeypatch.setattr("ppo_lab.llm.preference_training.reference_logp", never)
    list(train_on_preferences(lm, PAIRS, tokenizer, settings(loss="simpo", epochs=1)))
    with pytest.raises(AssertionError):
        list(train_on_preferences(lm, PAIRS, tokenizer, settings(epochs=1)))
    with pytest.raises(ValueError, match="reference must be None with the loss simpo"):
        next(train_on_preferences(lm, PAIRS, tokenizer, settings(loss="simpo"), reference=lm))


def test_a_stronger_price_keeps_the_policy_nearer(lm, tokenizer):
    moved = []
    for kl_coef in (0.1, 10.0):
        twin = copy.deepcopy(lm)
        list(train_on_preferences(twin, PAIRS, tokenizer, settings(loss="ipo", kl_coef=kl_coef)))
        answers = encode_pairs(PAIRS, tokenizer)
        with torch.no_grad():
            moved.append((sequence_logp(Actor(twin), answers) - sequence_logp(Actor(lm), answers)).abs().mean().item())
    assert moved[0] > 3 * moved[1]


def test_one_seed_one_run_and_another_seed_another_order(lm, tokenizer):
    runs = [
        list(train_on_preferences(copy.deepcopy(lm), PAIRS, tokenizer, settings(seed=seed, epochs=2)))
        for seed in (0, 0, 1)
    ]
    assert runs[0] == runs[1] != runs[2]


def test_dropout_is_turned_off_in_both_models(tokenizer):
    policy, reference = (tiny_gpt2_with_dropout() for _ in range(2))
    row = next(train_on_preferences(policy, PAIRS, tokenizer, settings(), reference=reference))
    # Two equal models with dropout would not give equal log-probabilities.
    assert row["chosen_reward"] == pytest.approx(0, abs=1e-5)


def tiny_gpt2_with_dropout():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        size = {"vocab_size": 6, "n_positions": 32, "n_embd": 16, "n_layer": 1, "n_head": 2}
        return GPT2LMHeadModel(GPT2Config(**size, resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5)).train()


def test_the_learning_rate_rises_in_equal_parts(lm, tokenizer):
    # Adam's first step has the size of the learning rate, and the warm-up makes it a tenth of that.
    for warmup_steps, expected in ((0, 1e-3), (1, 1e-3), (10, 1e-4)):
        twin = copy.deepcopy(lm)
        next(train_on_preferences(twin, PAIRS, tokenizer, settings(lr=1e-3, warmup_steps=warmup_steps)))
        assert (twin.lm_head.weight - lm.lm_head.weight).abs().max().item() == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"loss": "ppo"}, "loss must be one of dpo, ipo, simpo, got 'ppo'"),
        ({"kl_coef": 0.0}, "kl_coef must be positive"),
        ({"scale": -1.0}, "scale must be positive"),
        ({"margin": -0.5}, "margin must be at least 0"),
        ({"lr": math.nan}, "lr must be positive"),
        ({"epochs": 0}, "epochs must be a whole number from 1 .*, got 0"),
        ({"batch_size": 0}, "batch_size must be a whole number from 1"),
        ({"seed": -1}, "seed must be a whole number from 0"),
    ],
)
def test_impossible_settings_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        PreferenceSettings(**changes)


# DPO on the policy's own answers


def test_neighbours_become_pairs_with_the_higher_score_first(small):
    roles, prompts, ppo = small(batch_size=8)
    experience = collect([ids for ids in prompts[:4] for _ in range(2)], roles, ppo, 0)
    scores = tensor([1.0, 2.0, 5.0, 4.0, 3.0, 3.0, -1.0, 0.0])
    answers, ref_logp = ranked(replace(experience, scores=scores))
    # The third pair ties and is none.
    rows = [1, 2, 7, 0, 3, 6]
    assert torch.equal(answers.response_ids, experience.response_ids[rows])
    assert torch.equal(answers.prompt_ids, experience.prompt_ids[rows])
    torch.testing.assert_close(ref_logp, experience.ref_logp[rows].sum(-1))
    with torch.no_grad():
        torch.testing.assert_close(sequence_logp(roles.reference, answers), ref_logp, atol=1e-4, rtol=0)


def test_neighbours_with_other_prompts_are_refused(small):
    roles, prompts, ppo = small(batch_size=8)
    with pytest.raises(ValueError, match="rows 2i and 2i"):
        ranked(collect(prompts[:4], roles, ppo, 0))
    with pytest.raises(ValueError, match="rows 2i and 2i"):
        ranked(collect(prompts[:3], roles, ppo, 0))


def test_rounds_of_dpo_raise_the_score_and_leave_the_reference(small):
    roles, prompts, ppo = small(batch_size=32, iterations=12)
    before = {name: x.clone() for name, x in roles.reference.state_dict().items()}
    run = list(iterative_dpo(prompts, roles, settings(epochs=1, batch_size=8, lr=3e-3), ppo))
    rows = [row for row, _ in run]
    assert [row["iteration"] for row in rows] == list(range(12))
    assert rows[0]["kl_per_response"] == pytest.approx(0, abs=1e-4)
    assert rows[-1]["kl_per_response"] > 0.1
    assert sum(row["score"] for row in rows[-3:]) > sum(row["score"] for row in rows[:3]) + 1.5
    assert all(len(experience.mask) == 32 and 0 < row["pairs"] <= 16 for row, experience in run)
    assert all(row["generated_tokens"] == experience.mask.sum() for row, experience in run)
    assert all(torch.equal(x, before[name]) for name, x in roles.reference.state_dict().items())


def test_the_warm_up_goes_on_from_round_to_round(small):
    # Adam's first steps have about the size of the learning rate, here a tenth, two tenths, … of it.
    roles, prompts, ppo = small(batch_size=4, iterations=3)
    weight, moved = roles.actor.module.lm.lm_head.weight, []
    before = weight.detach().clone()
    for _ in iterative_dpo(prompts, roles, settings(epochs=1, batch_size=64, lr=1e-3, warmup_steps=10), ppo):
        moved.append((weight.detach() - before).abs().max().item())
        before = weight.detach().clone()
    assert moved[0] == pytest.approx(1e-4, rel=0.02)
    assert moved[2] > 2 * moved[0]


def test_a_round_without_a_better_answer_takes_no_step(small):
    roles, prompts, ppo = small(reward=lambda *answers: torch.zeros(len(answers[0])), iterations=2)
    before = roles.actor.module.lm.lm_head.weight.clone()
    rows = [row for row, _ in iterative_dpo(prompts, roles, settings(), ppo)]
    assert [row["pairs"] for row in rows] == [0, 0]
    assert torch.equal(roles.actor.module.lm.lm_head.weight, before)


def test_what_iterative_dpo_cannot_do_is_refused(small):
    roles, prompts, ppo = small(temperature=0.7)
    with pytest.raises(ValueError, match=r"temperature must be 1.* got 0.7"):
        next(iterative_dpo(prompts, roles, settings(), ppo))
    with pytest.raises(ValueError, match="batch_size must be a multiple of group_size 2, got 7"):
        next(iterative_dpo(prompts, roles, settings(), replace(ppo, temperature=1.0, batch_size=7)))
    with pytest.raises(ValueError, match=r"roles\.actor must be trained on one process without DeepSpeed"):
        next(iterative_dpo(prompts, replace(roles, actor=None), settings(), replace(ppo, temperature=1.0)))


# The reviews task


@pytest.fixture
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def reviews_task(**changes):
    chosen = make_settings({**load_preset("tiny"), "advantage": "rloo", "group_size": 2, **changes})
    return *make_roles(chosen), chosen.ppo


def held_out(roles, ppo):
    """Gold score and KL to the start on prompts that nothing was trained on."""
    lines = data_path("reviews/prompts_held_out.txt").read_text(encoding="utf-8").splitlines()
    experience = collect([roles.tokenizer(line).input_ids for line in lines] * 2, roles, ppo, 2**41)
    return judged_columns(experience, roles, judge)["gold"], kl_per_response(experience)


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("changes", [{"loss": "dpo"}, {"loss": "ipo", "kl_coef": 0.1}, {"loss": "simpo"}], ids=str)
def test_fifteen_hundred_stored_comparisons_make_better_reviews(changes):
    roles, _, ppo = reviews_task()
    before, _ = held_out(roles, ppo)
    pairs = read_pairs(data_path("reviews/preferences.jsonl"))[:1500]
    list(train_on_preferences(roles.actor.module.lm, pairs, roles.tokenizer, PreferenceSettings(**changes)))
    after, kl = held_out(roles, ppo)
    assert after > before + 0.15
    assert 0.2 < kl < 5


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_twelve_rounds_on_its_own_answers_make_better_reviews():
    roles, prompts, ppo = reviews_task(iterations=12)
    before, _ = held_out(roles, ppo)
    settings = PreferenceSettings(kl_coef=0.3, lr=5e-4, warmup_steps=40)
    rows = [row for row, _ in iterative_dpo(prompts, roles, settings, ppo, judge=judge)]
    after, kl = held_out(roles, ppo)
    assert after > before + 0.1
    assert 0.1 < kl < 6
    assert {"gold", "grammatical", "seconds_generate", "seconds_update", "memory_gb"} <= set(rows[0])


def test_a_score_that_is_not_finite_is_named_before_it_makes_a_pair(small):
    def broken(prompt_ids, prompt_mask, response_ids, mask):
        return torch.where(torch.arange(len(mask)) == 1, float("nan"), 0.0)

    roles, prompts, ppo = small(reward=broken)
    with pytest.raises(NonFiniteError, match="scores is not finite"):
        list(iterative_dpo(prompts, roles, PreferenceSettings(), ppo))


def test_a_pair_longer_than_the_context_is_named(small):
    roles, _, _ = small()
    long = [*PAIRS, Pair("a", "b", "c " * 63 + "<eos>")]
    with pytest.raises(ValueError, match="pair 3 has 65 tokens with its prompt, the context is 64"):
        list(train_on_preferences(roles.actor.module.lm, long, roles.tokenizer, settings()))
