"""Who plays which role: made from settings, and what is refused before the first token."""

import math

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
)

from ppo_lab.llm.config import make_settings
from ppo_lab.llm.exact import tiny_language_model
from ppo_lab.llm.generate import generate, keyed_uniforms
from ppo_lab.llm.ranks import Ranks
from ppo_lab.llm.rewards import FunctionReward, RewardModel, SumReward
from ppo_lab.llm.roles import (
    assemble,
    cast_weights,
    check_device,
    make_roles,
    score_statistics,
    stop_token_id,
)
from ppo_lab.llm.tokens import left_pad

EOS = 0
WORDS = ["<eos>", *"abcdefghijk"]


def make_tokenizer(words=WORDS, **special):
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **{"eos_token": "<eos>", **special})


def make_model(maker=GPT2LMHeadModel, n_words=12, n_positions=32, **changes):
    """A random GPT-2 with learned positions, with dropout 0.1 as GPT-2 was trained."""
    torch.manual_seed(1)
    config = GPT2Config(
        vocab_size=n_words,
        n_positions=n_positions,
        n_embd=16,
        n_layer=1,
        n_head=2,
        initializer_range=0.4,
        bos_token_id=None,
        eos_token_id=EOS,
        **changes,
    )
    return maker(config)


def make_reward_model(**changes):
    return make_model(GPT2ForSequenceClassification, num_labels=1, **changes)


def save(folder, model, tokenizer):
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def checkpoints(tmp_path):
    """Settings that name a policy and a reward model without a pad token, and prompts of two and of five words."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a b\n\n  c d e f g  \n")
    return {
        "actor": save(tmp_path / "actor", make_model(), make_tokenizer()),
        "reward": save(tmp_path / "reward", make_reward_model(), make_tokenizer()),
        "prompts": str(prompts),
        "max_new_tokens": 8,
    }


def count_letters(prompts, responses):
    return [float(len(prompt) + 3 * len(response)) for prompt, response in zip(prompts, responses, strict=True)]


# --- the whole set


def test_B29_four_roles_from_checkpoints_without_a_pad_token(checkpoints, capsys):
    roles, prompts = make_roles(make_settings(checkpoints))
    assert prompts == [[1, 2], [3, 4, 5, 6, 7]]
    assert capsys.readouterr().err.count("notice:") == 1
    assert roles.tokenizer.pad_token_id == EOS
    assert roles.eos_token_ids == [EOS]
    assert isinstance(roles.reward, RewardModel)
    # Nobody shares anything with anybody.
    modules = [roles.actor.module, roles.critic.module, roles.reference, roles.reward.model]
    storages = [{p.untyped_storage().data_ptr() for p in module.parameters()} for module in modules]
    assert len(set.union(*storages)) == sum(len(each) for each in storages)
    trained = [all(p.requires_grad for p in module.parameters()) for module in modules]
    assert trained == [True, True, False, False]


def test_no_role_keeps_its_dropout(checkpoints):
    roles, _ = make_roles(make_settings(checkpoints))
    for module in (roles.actor.module, roles.critic.module, roles.reference):
        assert {part.p for part in module.modules() if isinstance(part, torch.nn.Dropout)} == {0.0}


def test_each_engine_has_the_learning_rate_of_its_role(checkpoints):
    roles, _ = make_roles(make_settings({**checkpoints, "lr": 0.25, "critic_lr": 0.5, "max_grad_norm": 3.0}))
    assert (roles.actor.lr, roles.critic.lr) == (0.25, 0.5)
    assert roles.actor.max_grad_norm == roles.critic.max_grad_norm == 3.0


@torch.no_grad()
def test_the_critic_begins_with_the_scaled_score(checkpoints):
    roles, prompts = make_roles(make_settings(checkpoints))
    prompt_ids, prompt_mask = left_pad(prompts, EOS)
    ids = torch.tensor([[9, 8, EOS], [7, EOS, EOS]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]]).bool()
    scores = roles.reward(prompt_ids, prompt_mask, ids, mask)
    values = roles.critic(torch.cat([prompt_ids, ids], 1), torch.cat([prompt_mask, mask], 1), 3)
    after = [values[0, 3].item(), values[1, 2].item()]
    assert roles.reward_std > 0 and roles.reward_mean != 0
    expected = ((scores - roles.reward_mean) / roles.reward_std).tolist()
    assert after == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("critic", ["actor", "shared"])
def test_a_critic_from_the_actor_begins_at_0(checkpoints, critic):
    roles, prompts = make_roles(make_settings({**checkpoints, "critic": critic}))
    ids, mask = left_pad([[*prompt, 9, 8] for prompt in prompts], EOS)
    assert (roles.critic is None) == (critic == "shared")
    values = roles.actor(ids, mask, 2)[1] if critic == "shared" else roles.critic(ids, mask, 2)
    assert values.tolist() == [[0.0] * 3] * 2


def test_gradient_checkpointing_changes_no_gradient(checkpoints):
    gradients = []
    for on in (False, True):
        roles, prompts = make_roles(make_settings({**checkpoints, "gradient_checkpointing": on}))
        ids, mask = left_pad([[*prompt, 9, 8] for prompt in prompts], EOS)
        roles.actor(ids, mask, 2)[0].square().mean().backward()
        gradients.append([p.grad for p in roles.actor.module.parameters()])
        assert roles.actor.module.lm.training is on
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, recomputed)


def test_a_stop_token_ends_answers_too(checkpoints):
    roles, _ = make_roles(make_settings({**checkpoints, "stop_token": "h"}))
    assert roles.eos_token_ids == [EOS, 8]
    with pytest.raises(ValueError, match="stop_token must be a token of the tokenizer, got 'z'"):
        make_roles(make_settings({**checkpoints, "stop_token": "z"}))
    assert stop_token_id(make_tokenizer(), None) == []


def test_a_checkpoint_that_is_nowhere_is_named(checkpoints, tmp_path):
    with pytest.raises(OSError, match="nowhere"):
        make_roles(make_settings({**checkpoints, "actor": str(tmp_path / "nowhere")}))


# --- rewards


@pytest.fixture
def length_module(tmp_path, monkeypatch):
    """A module judge_of_tests, whose function length counts letters and spaces."""
    (tmp_path / "judge_of_tests.py").write_text(
        "def length(prompts, responses):\n    return [len(response) for response in responses]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)


def test_a_reward_may_be_a_function_of_a_module(checkpoints, length_module):
    roles, prompts = make_roles(make_settings({**checkpoints, "reward": "judge_of_tests:length", "critic": "actor"}))
    assert isinstance(roles.reward, FunctionReward)
    ids = torch.tensor([[9, 8, EOS], [7, EOS, EOS]])
    scores = roles.reward(*left_pad(prompts, EOS), ids, torch.ones(2, 3).bool())
    assert scores.tolist() == [len("i h"), len("g")]


def test_a_critic_from_a_function_is_refused(checkpoints):
    settings = make_settings({**checkpoints, "critic": "reward"})
    tokenizer = make_tokenizer(pad_token="<eos>")
    with pytest.raises(ValueError, match="critic must be actor or shared"):
        assemble(make_model(), FunctionReward(count_letters, tokenizer), tokenizer, [[1, 2]], settings)


@torch.no_grad()
def test_a_critic_from_a_sum_begins_with_the_part_of_its_model(checkpoints, length_module):
    alone, _ = make_roles(make_settings(checkpoints))
    checkpoints["reward"] += "*0.5,judge_of_tests:length*3"
    roles, prompts = make_roles(make_settings(checkpoints))
    assert isinstance(roles.reward, SumReward)
    prompt_ids, prompt_mask = left_pad(prompts, EOS)
    ids, mask = torch.tensor([[9, 8, 7], [7, 9, 8]]), torch.ones(2, 3).bool()
    scores = alone.reward(prompt_ids, prompt_mask, ids, mask)
    values = roles.critic(torch.cat([prompt_ids, ids], 1), torch.cat([prompt_mask, mask], 1), 3)[:, 3]
    expected = [(0.5 * score - roles.reward_mean) / roles.reward_std for score in scores.tolist()]
    assert values.tolist() == pytest.approx(expected, abs=1e-4)
    # The units are those of the whole sum.
    assert roles.reward(prompt_ids, prompt_mask, ids, mask).tolist() == pytest.approx(
        [0.5 * score + 3 * len("i h g") for score in scores.tolist()], abs=1e-5
    )


@pytest.mark.parametrize("pattern", ["{0},{0}", "{0}*-1", "judge_of_tests:length"])
def test_a_critic_needs_one_reward_model_of_positive_weight(checkpoints, length_module, pattern):
    checkpoints["reward"] = pattern.format(checkpoints["reward"])
    with pytest.raises(ValueError, match="critic must be actor or shared with this reward"):
        make_roles(make_settings(checkpoints))
    roles, _ = make_roles(make_settings({**checkpoints, "critic": "actor"}))
    assert roles.critic is not None


def test_a_function_reads_the_row_that_stands_beside_its_prompt(checkpoints, tmp_path, monkeypatch):
    (tmp_path / "sums.jsonl").write_text(
        '{"prompt": "a b", "points": 4}\n{"messages": [], "points": 1}\n{"prompt": "c d e f g", "points": 9}\n'
    )
    (tmp_path / "judge_of_rows.py").write_text(
        "def points(prompts, responses, rows):\n    return [row['points'] for row in rows]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    changes = {"prompts": str(tmp_path / "sums.jsonl"), "reward": "judge_of_rows:points*0.5", "critic": "actor"}
    roles, prompts = make_roles(make_settings({**checkpoints, **changes, "skip_bad_lines": True}))
    ids = torch.tensor([[9, 8, EOS], [7, EOS, EOS]])
    assert roles.reward(*left_pad(prompts[::-1], EOS), ids, torch.ones(2, 3).bool()).tolist() == [4.5, 2]
    # The mean over the answers of the reference, which takes each prompt in turn.
    assert roles.reward_mean == pytest.approx(3.25)


def test_B31_a_critic_that_would_read_other_tokens_is_refused(checkpoints, tmp_path):
    permuted = make_tokenizer(["<eos>", *WORDS[:0:-1]], pad_token="<eos>")
    checkpoints["reward"] = save(tmp_path / "other", make_reward_model(), permuted)
    with pytest.raises(ValueError, match="critic must be actor or shared"):
        make_roles(make_settings({**checkpoints, "critic": "reward"}))
    roles, _ = make_roles(make_settings({**checkpoints, "critic": "actor"}))
    assert not roles.reward.same_tokens


# --- the units of the scores


def statistics_of(score_batch_size, reward):
    settings = make_settings({"max_new_tokens": 8, "score_batch_size": score_batch_size})
    return score_statistics(
        make_model().eval(), reward, [[1, 2], [3, 4, 5]], EOS, [EOS], settings.ppo, Ranks(), n_answers=20
    )


def test_the_units_are_mean_and_spread_of_the_answers_of_the_reference():
    seen = []

    def reward(prompts, responses):
        seen.extend(count_letters(prompts, responses))
        return count_letters(prompts, responses)

    mean, std = statistics_of(20, FunctionReward(reward, make_tokenizer()))
    assert len(seen) == 20
    assert mean == pytest.approx(sum(seen) / 20)
    assert std == pytest.approx(math.sqrt(sum((x - mean) ** 2 for x in seen) / 19))


@pytest.mark.parametrize("score_batch_size", [1, 7])
def test_the_units_do_not_depend_on_the_batch_size(score_batch_size):
    reward = FunctionReward(count_letters, make_tokenizer())
    assert statistics_of(score_batch_size, reward) == pytest.approx(statistics_of(20, reward))


def test_scores_that_are_all_equal_have_no_unit():
    with pytest.raises(ValueError, match="scores that differ: all answers of the reference got 3"):
        statistics_of(20, FunctionReward(lambda prompts, responses: [3.0] * len(prompts), make_tokenizer()))


def test_without_scaling_the_units_are_those_of_the_reward(checkpoints):
    roles, _ = make_roles(make_settings({**checkpoints, "scale_rewards": False}))
    assert (roles.reward_mean, roles.reward_std) == (0.0, 1.0)


# --- the machine


def test_a_device_that_does_not_exist_is_refused():
    assert check_device("cpu", Ranks()) == torch.device("cpu")
    for name in ("no_such_device", "cuda:99"):
        with pytest.raises(ValueError, match=f"device '{name}' cannot be used"):
            check_device(name, Ranks())


def test_make_roles_refuses_it_in_the_same_words(checkpoints):
    with pytest.raises(ValueError, match="device 'cuda:99' cannot be used"):
        make_roles(make_settings({**checkpoints, "device": "cuda:99"}))


# --- what a reward model must be able to read


def test_B29_a_reward_tokenizer_without_a_pad_token_reads_texts_of_unequal_length(checkpoints, tmp_path):
    permuted = make_tokenizer(["<eos>", *WORDS[:0:-1]])
    checkpoints["reward"] = save(tmp_path / "other", make_reward_model(), permuted)
    roles, prompts = make_roles(make_settings({**checkpoints, "critic": "actor", "scale_rewards": False}))
    ids, mask = torch.tensor([[9, 8, EOS], [7, EOS, EOS]]), torch.tensor([[1, 1, 1], [1, 1, 0]]).bool()
    scores = roles.reward(*left_pad(prompts, EOS), ids, mask)
    direct = [
        roles.reward.model(torch.tensor([permuted(t).input_ids])).logits.item() for t in ("a b i h", "c d e f g g")
    ]
    assert scores.tolist() == pytest.approx(direct, abs=1e-5)


@pytest.mark.parametrize("critic", ["reward", "actor"])
def test_B30_a_reward_model_with_a_shorter_context_is_refused(checkpoints, tmp_path, critic):
    checkpoints["reward"] = save(tmp_path / "short", make_reward_model(n_positions=10), make_tokenizer())
    with pytest.raises(ValueError, match="context of 10, the longest prompt of 5 tokens and max_new_tokens of 8"):
        make_roles(make_settings({**checkpoints, "critic": critic}))


def test_the_answers_behind_the_units_are_no_answers_of_a_run():
    settings = make_settings({"max_new_tokens": 8}).ppo
    run = keyed_uniforms(settings.seed, 0, range(20), 8)
    asked = []

    def reward(prompt_ids, prompt_mask, ids, mask):
        asked.append(ids)
        return ids.sum(-1).float()

    lm = make_model().eval()
    score_statistics(lm, reward, [[1, 2]], EOS, [EOS], settings, Ranks(), n_answers=20)
    first = generate(lm, *left_pad([[1, 2]] * 20, EOS), max_new_tokens=8, eos_token_ids=EOS, uniforms=run).ids
    assert first.shape != asked[0].shape or not first.equal(asked[0])


def test_weights_in_bfloat16_leave_the_rotary_frequencies_alone():
    lm = tiny_language_model()
    frequencies = next(buffer for name, buffer in lm.named_buffers() if name.endswith("inv_freq")).clone()
    cast_weights(lm)
    assert {p.dtype for p in lm.parameters()} == {torch.bfloat16}
    assert torch.equal(next(b for name, b in lm.named_buffers() if name.endswith("inv_freq")), frequencies)


@pytest.mark.parametrize("kind", ["grpo", "remax", "reinforce++"])
def test_an_advantage_without_critic_builds_none(small, kind):
    roles, _, _ = small(critic="reward", advantage=kind, group_size=2)
    assert roles.critic is None
    assert roles.actor.module.value_head is None
