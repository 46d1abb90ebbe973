"""Rewards: models, functions and sums of them on tiny random models, each score against one read by hand."""

import math
from decimal import Decimal

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

from ppo_lab.llm.config import ModelSettings
from ppo_lab.llm.rewards import (
    FunctionReward,
    RewardModel,
    SumReward,
    add_rows,
    check_context,
    exact_match,
    import_function,
    last_number,
    load_reward_model,
    make_reward,
    reward_models,
    reward_sources,
)
from ppo_lab.llm.tokens import left_pad

EOS = 0
WORDS = ["<eos>", *"abcdefghijk"]
PROMPTS = [[5, 6], [2, 3, 4, 5, 6], [7]]
# Answers of 4, 2 and 1 tokens: cut, ended, ended at once.
ANSWERS = [[1, 2, 3, 4], [9, EOS], [EOS]]
ROWS = [prompt + answer for prompt, answer in zip(PROMPTS, ANSWERS, strict=True)]


def make_classifier(kind, n_words=12, num_labels=1):
    """A few thousand parameters and 32 positions, which GPT-2 learns."""
    torch.manual_seed(2)
    shared = {
        "vocab_size": n_words,
        "initializer_range": 0.4,
        "bos_token_id": None,
        "eos_token_id": EOS,
        "pad_token_id": None,
        "num_labels": num_labels,
    }
    if kind == "llama":
        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
        config = LlamaConfig(**shared, **sizes, num_key_value_heads=1, max_position_embeddings=32)
        return LlamaForSequenceClassification(config).eval()
    return GPT2ForSequenceClassification(GPT2Config(**shared, n_embd=16, n_layer=2, n_head=2, n_positions=32)).eval()


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


# --- the reward model


@torch.no_grad()
def test_padding_that_is_the_eos_is_not_scored(kind, batch):
    tokenizer = make_tokenizer()
    model = make_classifier(kind)
    # The second answer ends with a stop token, 9: behind it another id than its own.
    batch[3][1] = torch.tensor([True, False, False, False])
    scores = RewardModel(model, tokenizer, tokenizer)(*batch)
    # Transformers reads the last position of a row without padding.
    expected = [model(torch.tensor([row])).logits.item() for row in (ROWS[0], [*PROMPTS[1], 9], ROWS[2])]
    assert scores.tolist() == pytest.approx(expected, abs=1e-5)
    assert scores.dtype == torch.float32
    # The last of the pads would have said something else.
    padded = model.score(model.base_model(torch.cat([batch[0], batch[2]], 1)).last_hidden_state[:, -1]).squeeze(-1)
    assert padded[1:].tolist() != pytest.approx(expected[1:], abs=1e-2)


def test_the_reward_model_is_frozen_and_evaluates(kind):
    tokenizer = make_tokenizer()
    model = RewardModel(make_classifier(kind).train(), tokenizer, tokenizer).model
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_a_reward_model_of_two_outputs_is_refused():
    tokenizer = make_tokenizer()
    with pytest.raises(ValueError, match="must have 1 output, has 2"):
        RewardModel(make_classifier("llama", num_labels=2), tokenizer, tokenizer)


def test_a_reward_model_smaller_than_its_tokenizer_is_refused():
    tokenizer = make_tokenizer()
    with pytest.raises(ValueError, match="knows 11 tokens, its tokenizer has 12"):
        RewardModel(make_classifier("llama", n_words=11), tokenizer, tokenizer)


MANY = ["<eos>", *(f"w{i}" for i in range(1, 100))]
FEW = ["<pad>", "<unk>", "<eos>", *(f"w{i}" for i in range(99, 52, -1))]


@torch.no_grad()
def test_B31_a_reward_model_of_another_vocabulary_reads_the_text(kind):
    policy, own = make_tokenizer(MANY), make_tokenizer(FEW, pad_token="<pad>", unk_token="<unk>")
    model = make_classifier(kind, n_words=50)
    reward = RewardModel(model, own, policy)
    assert not reward.same_tokens
    prompts, answers = ["w90 w60", "w55"], ["w77 w99", "w98"]
    prompt_ids, prompt_mask = left_pad([policy(text).input_ids for text in prompts], EOS)
    ids, mask = torch.tensor([[77, 99, EOS], [98, EOS, EOS]]), torch.tensor([[1, 1, 1], [1, 1, 0]]).bool()
    scores = reward(prompt_ids, prompt_mask, ids, mask)
    direct = [
        model(torch.tensor([own(f"{p} {a}").input_ids])).logits.item() for p, a in zip(prompts, answers, strict=True)
    ]
    assert scores.tolist() == pytest.approx(direct, abs=1e-5)


@torch.no_grad()
def test_B31_permuted_ids_change_no_score(kind):
    own = make_tokenizer(pad_token="<eos>")
    model = make_classifier(kind)
    scores = []
    for words in (WORDS, ["<eos>", *WORDS[:0:-1]]):
        policy = make_tokenizer(words)
        reward = RewardModel(model, own, policy)
        prompt_ids, prompt_mask = left_pad([policy("a b").input_ids, policy("c").input_ids], EOS)
        ids = torch.tensor([policy("d e").input_ids, policy("f f").input_ids])
        scores.append(reward(prompt_ids, prompt_mask, ids, torch.ones(2, 2).bool()))
        assert reward.same_tokens == (words == WORDS)
    assert scores[0].tolist() == pytest.approx(scores[1].tolist(), abs=1e-5)


@torch.no_grad()
def test_an_encoder_can_be_the_reward_model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = BertForSequenceClassification(
        BertConfig(vocab_size=50, max_position_embeddings=32, num_labels=1, initializer_range=0.4, **sizes)
    ).eval()
    policy, own = make_tokenizer(MANY), make_tokenizer(FEW, pad_token="<pad>", unk_token="<unk>")
    prompt_ids, prompt_mask = left_pad([[90, 60], [55]], EOS)
    ids, mask = torch.tensor([[77, 99, EOS], [98, EOS, EOS]]), torch.tensor([[1, 1, 1], [1, 1, 0]]).bool()
    scores = RewardModel(model, own, policy)(prompt_ids, prompt_mask, ids, mask)
    direct = [model(torch.tensor([own(text).input_ids])).logits.item() for text in ("w90 w60 w77 w99", "w55 w98")]
    assert scores.tolist() == pytest.approx(direct, abs=1e-5)


def test_a_reward_model_is_loaded_with_its_own_tokenizer(tmp_path, batch):
    model, tokenizer = make_classifier("llama"), make_tokenizer()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loaded = load_reward_model(tmp_path, tokenizer)
    assert loaded.same_tokens
    assert loaded(*batch).tolist() == RewardModel(model, tokenizer, tokenizer)(*batch).tolist()


@torch.no_grad()
def test_B29_another_vocabulary_without_a_pad_token_is_read_as_well(kind):
    own, policy = make_tokenizer(["<eos>", *WORDS[:0:-1]]), make_tokenizer()
    model = make_classifier(kind)
    prompt_ids, prompt_mask = left_pad([[1, 2], [3]], EOS)
    ids, mask = torch.tensor([[9, 8, EOS], [7, EOS, EOS]]), torch.tensor([[1, 1, 1], [1, 1, 0]]).bool()
    scores = RewardModel(model, own, policy)(prompt_ids, prompt_mask, ids, mask)
    direct = [model(torch.tensor([own(text).input_ids])).logits.item() for text in ("a b i h", "c g")]
    assert scores.tolist() == pytest.approx(direct, abs=1e-5)


def test_B30_an_answer_longer_than_the_context_of_the_reward_model_is_refused():
    # One word of the actor is up to three of this reward model.
    own, policy = make_tokenizer(["<eos>", "x"], unk_token="<eos>"), make_tokenizer(["<eos>", "x x x"])
    reward = RewardModel(make_classifier("gpt2", n_words=2), own, policy)
    ids, mask = torch.ones(1, 8, dtype=torch.int64), torch.ones(1, 8).bool()
    assert reward(ids[:, :2], mask[:, :2], ids, mask).shape == (1,)
    with pytest.raises(ValueError, match="context of 32, prompt and answer have 33 of its tokens"):
        reward(ids[:, :3], mask[:, :3], ids, mask)


def test_B30_a_reward_model_of_the_actors_tokens_is_checked_beforehand():
    tokenizer = make_tokenizer()
    reward = RewardModel(make_classifier("gpt2"), tokenizer, tokenizer)
    for made in (reward, SumReward([(reward, 0.5)])):
        check_context(made, [[1] * 24, [1]], 8)
        with pytest.raises(ValueError, match="context of 32, the longest prompt of 25 tokens and max_new_tokens of 8"):
            check_context(made, [[1] * 25, [1]], 8)
    check_context(FunctionReward(count_words, tokenizer), [[1] * 99], 8)
    # With other tokens the number of the actor's says nothing.
    check_context(RewardModel(make_classifier("gpt2"), make_tokenizer(WORDS[::-1]), tokenizer), [[1] * 99], 8)


# --- a function as the reward


def test_a_function_sees_texts_without_padding_and_special_tokens(batch):
    seen = []

    def reward(prompts, responses):
        seen.append((prompts, responses))
        return [len(response.split()) for response in responses]

    scores = FunctionReward(reward, make_tokenizer())(*batch)
    assert seen == [(["e f", "b c d e f", "g"], ["a b c d", "i", ""])]
    assert scores.tolist() == [4, 1, 0]
    assert scores.dtype == torch.float32


@pytest.mark.parametrize(
    "result",
    [
        [1.0, math.nan, 2.0],
        [1.0, math.inf, 2.0],
        [1.0, 2.0],
        [[1.0], [2.0], [3.0]],
        1.0,
        [],
        None,
        ["a", "b", "c"],
        [1.0, None, 2.0],
    ],
    ids=["nan", "inf", "two of three", "a column", "one for all", "empty", "None", "texts", "a gap"],
)
def test_a_function_that_does_not_score_every_answer_is_refused(batch, result):
    with pytest.raises(ValueError, match="one finite number per answer"):
        FunctionReward(lambda prompts, responses: result, make_tokenizer())(*batch)


def test_a_function_may_return_a_tensor(batch):
    reward = FunctionReward(lambda prompts, responses: torch.tensor([1, 2, 3]), make_tokenizer())
    assert reward(*batch).tolist() == [1, 2, 3]


def count_words(prompts, responses):
    return [len(response.split()) for response in responses]


def reads_rows(prompts, responses, rows):
    return [row["points"] for row in rows]


def test_a_result_that_is_no_number_is_shown_with_its_answer(batch):
    reward = FunctionReward(lambda prompts, responses: [1.0, math.nan, 2.0], make_tokenizer())
    with pytest.raises(ValueError, match="got nan for 'i'"):
        reward(*batch)


# --- a function that reads the rows of the data


def test_a_function_gets_the_row_of_each_prompt_in_the_order_of_the_batch(batch):
    reward = FunctionReward(reads_rows, make_tokenizer())
    add_rows(
        reward, [{"points": 7.0}, {"points": 5.0}, {"points": 2.0}, {"points": 9.0}], [[7], [5, 6], PROMPTS[1], [8]]
    )
    assert reward(*batch).tolist() == [5, 2, 7]
    backwards = [x.flip(0) for x in batch]
    assert reward(*backwards).tolist() == [7, 2, 5]


def test_a_padded_prompt_is_not_taken_for_one_that_begins_with_the_pad(batch):
    reward = FunctionReward(reads_rows, make_tokenizer())
    add_rows(reward, [{"points": 1.0}, {"points": 2.0}], [[EOS, 5], [5]])
    ids, mask = left_pad([[EOS, 5], [5]], EOS)
    assert ids[0].tolist() == ids[1].tolist()
    assert reward(ids, mask, *(x[:2] for x in batch[2:])).tolist() == [1, 2]


def test_a_prompt_without_a_row_is_named(batch):
    reward = FunctionReward(reads_rows, make_tokenizer())
    with pytest.raises(ValueError, match="none has the prompt 'e f'"):
        reward(*batch)
    add_rows(reward, [{"points": 1.0}, {"points": 2.0}], [PROMPTS[0], PROMPTS[2]])
    with pytest.raises(ValueError, match="none has the prompt 'b c d e f'"):
        reward(*batch)


def test_rows_of_an_evaluation_are_added_to_those_of_the_training(batch):
    reward = SumReward([(FunctionReward(reads_rows, make_tokenizer()), 2.0)])
    add_rows(reward, [{"points": 5.0}], [PROMPTS[0]])
    add_rows(reward, [{"points": 2.0}, {"points": 7.0}, {"points": 99.0}], [*PROMPTS[1:], PROMPTS[0]])
    assert reward(*batch).tolist() == [10, 4, 14]


def test_the_rows_are_indexed_only_for_a_function_that_reads_them(capsys):
    same = [{"points": 1.0}, {"points": 2.0}]
    add_rows(FunctionReward(count_words, make_tokenizer()), same, [[5], [5]])
    assert capsys.readouterr().err == ""
    add_rows(FunctionReward(reads_rows, make_tokenizer()), same, [[5], [5]])
    assert "1 prompts repeat an earlier one with other columns" in capsys.readouterr().err


def test_a_function_without_a_readable_signature_gets_the_two_lists():
    # `min` is written in C; called with the two lists it returns the smaller one.
    reward = FunctionReward(min, make_tokenizer())
    assert not reward.reads_rows


# --- several sources


@torch.no_grad()
def test_a_sum_adds_its_sources_by_their_weights(batch):
    tokenizer = make_tokenizer()
    model = RewardModel(make_classifier("llama"), tokenizer, tokenizer)
    scores = SumReward([(model, 0.5), (FunctionReward(count_words, tokenizer), -2.0)])(*batch)
    direct = [make_classifier("llama")(torch.tensor([row])).logits.item() for row in ROWS]
    expected = [0.5 * score - 2 * words for score, words in zip(direct, [4, 1, 0], strict=True)]
    assert scores.tolist() == pytest.approx(expected, abs=1e-5)
    assert scores.dtype == torch.float32


def test_the_models_of_a_reward_are_found_with_their_weights():
    tokenizer = make_tokenizer()
    model, function = RewardModel(make_classifier("gpt2"), tokenizer, tokenizer), FunctionReward(count_words, tokenizer)
    assert reward_models(model) == [(model, 1.0)]
    assert reward_models(function) == []
    assert reward_models(SumReward([(function, 2.0), (model, 0.25)])) == [(model, 0.25)]


@pytest.mark.parametrize(
    "text, sources",
    [
        ("models/reward", [("models/reward", 1.0)]),
        ("models/reward*0.5,my_module:my_function*0.1", [("models/reward", 0.5), ("my_module:my_function", 0.1)]),
        (" a:f * -2 , b ", [("a:f", -2.0), ("b", 1.0)]),
        ("a*1e-3", [("a", 0.001)]),
    ],
)
def test_the_setting_names_sources_and_weights(text, sources):
    assert reward_sources(text) == sources


@pytest.mark.parametrize("text", ["", ",", "a,,b", "a,", "*2", "a, *2"])
def test_a_source_without_a_name_is_refused(text):
    with pytest.raises(ValueError, match="reward must be one source or several joined by commas"):
        reward_sources(text)


@pytest.mark.parametrize("text", ["a*", "a*half", "a*nan", "a*inf", "a*2*3", "b,a*0,5x*y"])
def test_a_weight_that_is_no_number_is_refused(text):
    with pytest.raises(ValueError, match=r"the weight behind \* must be a finite number, got"):
        reward_sources(text)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a reward model "reward" and a module "judge_of_sums", in which the test runs."""
    make_classifier("gpt2").save_pretrained(tmp_path / "reward")
    make_tokenizer().save_pretrained(tmp_path / "reward")
    (tmp_path / "judge_of_sums.py").write_text(
        "def length(prompts, responses):\n    return [len(response.split()) for response in responses]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_setting_becomes_a_model_a_function_or_a_sum(folder, batch):
    made = [
        make_reward(ModelSettings(reward=name), make_tokenizer())
        for name in ("reward", "judge_of_sums:length", "reward*0.5, judge_of_sums:length*3", "reward*2")
    ]
    assert [type(each) for each in made] == [RewardModel, FunctionReward, SumReward, SumReward]
    model, length, both, twice = (each(*batch) for each in made)
    assert length.tolist() == [4, 1, 0]
    assert both.tolist() == pytest.approx((0.5 * model + 3 * length).tolist(), abs=1e-5)
    assert twice.tolist() == pytest.approx((2 * model).tolist(), abs=1e-5)


def test_a_folder_with_a_colon_in_its_name_is_a_folder(folder, batch):
    (folder / "reward").rename(folder / "step:10")
    assert isinstance(make_reward(ModelSettings(reward="step:10"), make_tokenizer()), RewardModel)


def test_a_model_that_is_nowhere_is_named(folder):
    with pytest.raises(OSError, match="nowhere"):
        make_reward(ModelSettings(reward=f"judge_of_sums:length,{folder}/nowhere"), make_tokenizer())


@pytest.mark.parametrize("name", ["no_such_module:f", "math:no_such_function", "math:pi", "math:", ":f", "a:b:c"])
def test_a_function_that_is_not_there_is_refused(name):
    with pytest.raises(ValueError, match="reward must be module:function"):
        import_function(name, "reward")


def test_a_module_that_is_not_python_is_refused(folder):
    (folder / "broken_judge.py").write_text("def f(:\n")
    with pytest.raises(ValueError, match=r"'broken_judge:f' cannot be imported: .*line 1"):
        import_function("broken_judge:f", "reward")


def test_a_function_is_found():
    assert import_function("math:sqrt", "reward") is math.sqrt


# --- arithmetic


@pytest.mark.parametrize(
    "text, number",
    [
        ("The answer is 72.", "72"),
        ("48 / 2 = 24, and 48 + 24 = 72", "72"),
        ("#### 1,234.50", "1234.5"),
        ("it costs $7.00", "7"),
        ("x=-5", "-5"),
        ("about −5 degrees", "-5"),
        ("10-5", "5"),
        ("(3)-5", "5"),
        ("one of 1,2,3", "3"),
        ("1,2345", "2345"),
        ("page .5", "0.5"),
        ("**18**", "18"),
        ("007", "7"),
        ("no number", None),
        ("", None),
        ("- , .", None),
    ],
)
def test_the_last_number_of_a_text(text, number):
    assert last_number(text) == (None if number is None else Decimal(number))


@pytest.mark.parametrize(
    "answer, response, score",
    [
        (72, "the sum is 72", 1.0),
        ("72", "72.0", 1.0),
        (72.0, "72", 1.0),
        ("48 / 2 = 24\n#### 72", "So 72!", 1.0),
        ("1,000", "1000", 1.0),
        (0.1, "0.1", 1.0),
        (72, "it is 72, or 73", 0.0),
        (72, "172", 0.0),
        (5, "-5", 0.0),
        (72, "seventy-two", 0.0),
        (72, "", 0.0),
    ],
)
def test_an_answer_is_right_if_its_last_number_is(answer, response, score):
    assert exact_match(["a question"], [response], [{"answer": answer}]) == [score]


@pytest.mark.parametrize("row", [{}, {"answer": None}, {"answer": "none"}, {"answer": ""}])
def test_a_row_without_a_number_is_named(row):
    with pytest.raises(ValueError, match=r"needs a number in the column answer, got .* in sums\.jsonl, line 3"):
        exact_match(["a", "b"], ["7", "8"], [{"answer": 7}, {**row, "prompt_place": "sums.jsonl, line 3"}])


def test_exact_match_is_a_source_like_any_other():
    words = ["<eos>", "1", "+", "2", "is", "3", "4"]
    tokenizer = make_tokenizer(words)
    reward = make_reward(ModelSettings(reward="ppo_lab.llm.rewards:exact_match*2"), tokenizer)
    prompts = [[1, 2, 3, 4], [1, 2, 1, 4]]
    add_rows(reward, [{"answer": 3}, {"answer": 2}], prompts)
    prompt_ids, prompt_mask = left_pad(prompts, EOS)
    ids = torch.tensor([[5, EOS], [6, EOS]])
    assert reward(prompt_ids, prompt_mask, ids, torch.ones(2, 2).bool()).tolist() == [2, 0]
