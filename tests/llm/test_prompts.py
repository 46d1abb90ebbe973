"""Prompts: hand-made files and data sets, what is refused in them and where, and the ids that a model gets."""

import json
import re
import sys
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BloomConfig, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from ppo_lab.llm.config import DataSettings, make_settings
from ppo_lab.llm.generate import generate
from ppo_lab.llm.prompts import as_row, context_length, encode_prompts, index_rows, read_prompts
from ppo_lab.llm.tokens import left_pad

EOS = 0
WORDS = ["<eos>", *"abcdefghijk", "[user]", "[system]", "[answer]"]
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "[{{ m.role }}] {{ m.content }} {% endfor %}{% if add_generation_prompt %}[answer]{% endif %}"
)
QUESTION = [{"role": "system", "content": "b"}, {"role": "user", "content": "c d"}]


@pytest.fixture
def tokenizer():
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", name_or_path="some/tokenizer")


@pytest.fixture(scope="module")
def lm():
    """A random GPT-2 of 32 learned positions."""
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32, "vocab_size": len(WORDS)}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=EOS)).eval()


def plain(*texts):
    return [{"prompt": text} for text in texts]


def words(n):
    return " ".join((WORDS[1:12] * 4)[:n])


def write_lines(path, *lines):
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return str(path)


# --- text files


def test_the_prompts_of_a_text_file_are_its_lines_that_are_not_empty(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("the first\n\n  the second  \n   \n第三\n", encoding="utf-8")
    assert read_prompts(DataSettings(prompts=str(path))) == [
        {"prompt": "the first", "prompt_place": f"{path}, line 1"},
        {"prompt": "the second", "prompt_place": f"{path}, line 3"},
        {"prompt": "第三", "prompt_place": f"{path}, line 5"},
    ]


def test_a_text_file_written_on_windows_reads_the_same(tmp_path):
    (tmp_path / "prompts.txt").write_bytes(b"\xef\xbb\xbfone\r\n\r\ntwo")
    rows = read_prompts(DataSettings(prompts=str(tmp_path / "prompts.txt")))
    assert [row["prompt"] for row in rows] == ["one", "two"]


def test_the_prompts_of_the_book_are_found_under_data():
    assert read_prompts(DataSettings())[0]["prompt"] == "the narrator of this memoir"


def test_a_file_without_a_prompt_is_refused(tmp_path):
    for name, content in (("empty.txt", ""), ("blank.txt", "\n  \n"), ("empty.jsonl", "\n")):
        (tmp_path / name).write_text(content)
        with pytest.raises(ValueError, match=f"{name} holds no prompt$"):
            read_prompts(DataSettings(prompts=str(tmp_path / name)))


@pytest.mark.parametrize("content", [b"\xff\xfeh\x00i\x00", b"PK\x03\x04\x00\x9c\n\x80"], ids=["UTF-16", "zip"])
@pytest.mark.parametrize("suffix", [".txt", ".jsonl"])
def test_a_file_that_is_no_text_is_refused(tmp_path, content, suffix):
    path = tmp_path / f"binary{suffix}"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"line 1: not text in UTF-8 \(invalid start byte at byte \d\)$"):
        read_prompts(DataSettings(prompts=str(path)))
    with pytest.raises(ValueError, match=r"holds no prompt: .*line 1: not text"):
        read_prompts(DataSettings(prompts=str(path), skip_bad_lines=True))


def test_a_source_that_is_none_of_the_four_is_refused(tmp_path):
    (tmp_path / "prompts.pdf").write_text("a")
    there = [str(tmp_path), str(tmp_path / "prompts.pdf")]
    for name in there:
        with pytest.raises(ValueError, match=r"prompts must be a .txt or .jsonl file, .* is there, but none of these"):
            read_prompts(DataSettings(prompts=name))
    for name in ("no_such_file.txt", "no/such.jsonl", "no/such.csv", str(tmp_path / "nowhere"), "~/a", "a/b/c", ""):
        with pytest.raises(ValueError, match=r"prompts must be a .txt or .jsonl file"):
            read_prompts(DataSettings(prompts=name))


# --- JSON lines


def test_a_json_line_keeps_its_other_columns(tmp_path):
    path = write_lines(tmp_path / "sums.jsonl", {"prompt": " 1 + 2 = ", "answer": 3}, "", {"messages": QUESTION})
    assert read_prompts(DataSettings(prompts=path)) == [
        {"prompt": " 1 + 2 = ", "answer": 3, "prompt_place": f"{path}, line 1"},
        {"messages": QUESTION, "prompt_place": f"{path}, line 3"},
    ]


def test_the_prompt_may_be_in_another_field(tmp_path):
    path = write_lines(tmp_path / "sums.jsonl", {"question": "1 + 2", "answer": 3, "prompt": "something else"})
    (row,) = read_prompts(DataSettings(prompts=path, prompt_field="question"))
    assert (row["prompt"], row["question"], row["answer"]) == ("1 + 2", "1 + 2", 3)


@pytest.mark.parametrize(
    "record, prompt_field, expected",
    [
        # A prompt beside a whole conversation is the prompt.
        ({"prompt": "a", "messages": [*QUESTION, {"role": "assistant", "content": "e"}]}, "prompt", ("prompt", "a")),
        ({"prompt": QUESTION}, "prompt", ("messages", QUESTION)),
        ({"turns": QUESTION, "prompt": "a"}, "turns", ("messages", QUESTION)),
        ({"messages": QUESTION, "prompt": None}, "prompt", ("messages", QUESTION)),
        ({"messages": QUESTION}, "messages", ("messages", QUESTION)),
    ],
)
def test_text_is_a_prompt_and_a_list_is_messages(record, prompt_field, expected):
    row = as_row(record, prompt_field)
    name, value = expected
    assert row[name] == value
    assert name == "prompt" or "prompt" not in row


def test_a_line_separator_inside_a_json_text_ends_no_line(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "one\u2028two\x85three"}\n', encoding="utf-8")
    (row,) = read_prompts(DataSettings(prompts=str(path)))
    assert row["prompt"] == "one\u2028two\x85three"


DAMAGED = [
    ('{"prompt": "a"', "not JSON"),
    ("a plain text", "not JSON"),
    ("[" * 100_000, "not JSON"),
    ('["a"]', r"must be an object with the field 'prompt', got \['a'\]"),
    ("7", "must be an object"),
    ({"text": "a"}, "has neither the field 'prompt' nor messages"),
    ({"prompt": None}, "has neither the field 'prompt' nor messages"),
    ({"prompt": ""}, "prompt is empty"),
    ({"prompt": " \n"}, "prompt is empty"),
    ({"prompt": 7}, "prompt must be text, got 7"),
    ({"prompt": {"text": "a"}}, "prompt must be text, got {'text': 'a'}"),
    ('{"prompt": "a\\ud800"}', "half of a surrogate pair"),
    ({"messages": []}, r"messages must be a list of messages, got \[\]"),
    ({"prompt": []}, r"prompt must be a list of messages, got \[\]"),
    ({"messages": "a"}, "messages must be a list of messages, got 'a'"),
    ({"messages": ["a"]}, "messages must hold objects with role and content, got 'a'"),
    ({"messages": [{"content": "a"}]}, "must hold objects with role and content"),
    ({"messages": [{"role": "user"}]}, "content of a message in messages must be text, got None"),
    ({"messages": [{"role": "user", "content": " "}]}, "the last message in messages is empty"),
    ({"messages": [*QUESTION, {"role": "assistant", "content": "a"}]}, "the last message is the assistant's"),
]


@pytest.mark.parametrize("line, message", DAMAGED)
def test_a_damaged_line_is_named_with_its_file(tmp_path, line, message):
    path = write_lines(tmp_path / "prompts.jsonl", {"prompt": "a"}, "", line, {"prompt": "b"})
    with pytest.raises(ValueError, match=re.escape(path) + ", line 3: .*" + message):
        read_prompts(DataSettings(prompts=path))


def test_damaged_lines_can_be_left_out_and_counted(tmp_path, capsys):
    good = [{"prompt": "a"}, {"prompt": "b"}]
    path = write_lines(tmp_path / "prompts.jsonl", good[0], *(line for line, _ in DAMAGED), good[1])
    rows = read_prompts(DataSettings(prompts=path, skip_bad_lines=True))
    assert [row["prompt"] for row in rows] == ["a", "b"]
    assert rows[1]["prompt_place"] == f"{path}, line {len(DAMAGED) + 2}"
    (notice,) = capsys.readouterr().err.splitlines()
    assert notice.startswith(
        f"notice: {len(DAMAGED)} of {len(DAMAGED) + 2} prompts left out, the first: {path}, line 2"
    )


def test_nothing_is_said_when_nothing_was_left_out(tmp_path, capsys):
    read_prompts(DataSettings(prompts=write_lines(tmp_path / "p.jsonl", {"prompt": "a"}), skip_bad_lines=True))
    assert capsys.readouterr().err == ""


def test_an_empty_system_message_is_no_damage():
    messages = [{"role": "system", "content": ""}, {"role": "user", "content": "a"}]
    assert as_row({"messages": messages}, "prompt") == {"messages": messages}


# --- data sets


@pytest.fixture
def hub(monkeypatch):
    """The package datasets, replaced: `load_dataset` gives two rows and keeps what it was asked for."""
    asked = []

    def load_dataset(name, subset, split):
        asked.append((name, subset, split))
        if name == "no/such":
            raise FileNotFoundError("not on the hub")
        return [{"prompt": "a", "answer": 1}, {"prompt": "b", "answer": 2}]

    errors = SimpleNamespace(DatasetsError=LookupError)
    module = SimpleNamespace(load_dataset=load_dataset, asked=asked, exceptions=errors)
    monkeypatch.setitem(sys.modules, "datasets", module)
    return module


def test_a_name_that_is_no_file_is_a_data_set_of_the_hub(hub):
    rows = read_prompts(DataSettings(prompts="someone/sums"))
    assert rows[1] == {"prompt": "b", "answer": 2, "prompt_place": "someone/sums, row 1 (the first is 0)"}
    read_prompts(DataSettings(prompts="someone/sums:main", split="test"))
    assert hub.asked == [("someone/sums", None, "train"), ("someone/sums", "main", "test")]


def test_a_row_without_the_field_is_named(hub):
    with pytest.raises(ValueError, match=r"someone/sums, row 0 \(the first is 0\): has neither the field 'question'"):
        read_prompts(DataSettings(prompts="someone/sums", prompt_field="question"))


def test_a_data_set_that_is_not_there_is_named(hub):
    with pytest.raises(ValueError, match=r"the data set 'no/such' cannot be read: .*not on the hub"):
        read_prompts(DataSettings(prompts="no/such"))


def test_without_the_package_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"'someone/sums' is a data set, .*: pip install datasets"):
        read_prompts(DataSettings(prompts="someone/sums"))


def test_a_folder_that_the_package_has_written(tmp_path):
    datasets = pytest.importorskip("datasets")
    both = {"prompt": ["a", None], "messages": [None, QUESTION], "answer": [1, 2]}
    datasets.Dataset.from_dict(both).save_to_disk(tmp_path / "one")
    rows = read_prompts(DataSettings(prompts=str(tmp_path / "one")))
    assert (rows[0]["prompt"], rows[0]["answer"]) == ("a", 1)
    assert (rows[1]["messages"], rows[1]["answer"]) == (QUESTION, 2)
    parts = {name: datasets.Dataset.from_dict({"prompt": [name]}) for name in ("train", "test")}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "two")
    for name in parts:
        assert read_prompts(DataSettings(prompts=str(tmp_path / "two"), split=name))[0]["prompt"] == name
    with pytest.raises(ValueError, match=r"split must be one of train, test for .*two', got 'dev'"):
        read_prompts(DataSettings(prompts=str(tmp_path / "two"), split="dev"))
    (tmp_path / "one" / "state.json").write_text("{}")
    with pytest.raises(ValueError, match=r"the data set .*one' cannot be read"):
        read_prompts(DataSettings(prompts=str(tmp_path / "one")))


# --- chat templates


def test_messages_pass_through_the_template_of_the_tokenizer(tokenizer, lm):
    tokenizer.chat_template = TEMPLATE
    encoded = encode_prompts([{"messages": QUESTION}, {"prompt": "a"}], tokenizer, lm, make_settings({}))
    assert tokenizer.convert_ids_to_tokens(encoded[0]) == ["[system]", "b", "[user]", "c", "d", "[answer]"]
    assert tokenizer.convert_ids_to_tokens(encoded[1]) == ["a"]


def test_with_chat_a_plain_prompt_is_what_a_user_says(tokenizer, lm):
    tokenizer.chat_template = TEMPLATE
    rows = [{"messages": QUESTION}, {"prompt": "a"}]
    encoded = encode_prompts(rows, tokenizer, lm, make_settings({"chat": True}))
    assert [len(ids) for ids in encoded] == [6, 3]
    assert tokenizer.convert_ids_to_tokens(encoded[1]) == ["[user]", "a", "[answer]"]


def test_a_tokenizer_without_a_template_is_named(tokenizer, lm):
    for rows, changes in ((plain("a"), {"chat": True}), ([{"messages": QUESTION}], {})):
        with pytest.raises(ValueError, match="chat template, the tokenizer some/tokenizer has none"):
            encode_prompts(rows, tokenizer, lm, make_settings(changes))


def test_messages_that_the_template_refuses_are_named(tokenizer, lm):
    tokenizer.chat_template = TEMPLATE
    rows = [{"messages": [{"role": "tool", "content": "a"}], "prompt_place": "chats.jsonl, line 4"}]
    with pytest.raises(ValueError, match=r"chats.jsonl, line 4: the chat template of some/tokenizer refuses .* tools"):
        encode_prompts(rows, tokenizer, lm, make_settings({}))


# --- lengths


def test_B30_a_prompt_too_long_for_the_context_is_refused_with_both_numbers(tokenizer, lm):
    settings = make_settings({"max_new_tokens": 8})
    encoded = encode_prompts(plain(words(24), words(3)), tokenizer, lm, settings)
    assert [len(ids) for ids in encoded] == [24, 3]
    with pytest.raises(ValueError, match="prompt 2: the prompt has 25 tokens, the context of 32 leaves 24 beside 8"):
        encode_prompts(plain(words(24), words(25)), tokenizer, lm, settings)
    with pytest.raises(ValueError, match="prompt 1: the prompt has 40 tokens"):
        encode_prompts(plain(words(40)), tokenizer, lm, settings)


def test_B30_the_message_names_the_line_of_the_file(tokenizer, lm, tmp_path):
    path = write_lines(tmp_path / "prompts.txt", "a", "", words(25))
    with pytest.raises(ValueError, match=re.escape(path) + ", line 3: the prompt has 25 tokens"):
        encode_prompts(read_prompts(DataSettings(prompts=path)), tokenizer, lm, make_settings({"max_new_tokens": 8}))


def test_B30_or_cut_from_the_left_so_that_the_answer_follows_its_end(tokenizer, lm):
    settings = make_settings({"max_new_tokens": 8, "long_prompts": "cut"})
    prompts = [words(n) for n in (24, 25, 40)]
    encoded = encode_prompts(plain(*prompts), tokenizer, lm, settings)
    assert encoded == [tokenizer(prompt).input_ids[-24:] for prompt in prompts]
    # Eight tokens fit behind each of them.
    ids = generate(lm, *left_pad(encoded, EOS), max_new_tokens=8, eos_token_ids=99, uniforms=None).ids
    assert ids.shape == (3, 8)
    assert lm(torch.cat([torch.tensor(encoded), ids], 1)).logits.shape[1] == 32
    # One more, unchecked, and the table of positions has no row for it.
    with pytest.raises(IndexError):
        lm(torch.zeros(1, 33, dtype=torch.int64))


@pytest.mark.parametrize("max_new_tokens", [32, 40])
def test_B30_an_answer_as_long_as_the_context_is_refused(tokenizer, lm, max_new_tokens):
    settings = make_settings({"max_new_tokens": max_new_tokens, "long_prompts": "cut"})
    with pytest.raises(ValueError, match=f"max_new_tokens must leave room for a prompt: {max_new_tokens} of a .* 32"):
        encode_prompts(plain("a"), tokenizer, lm, settings)


def test_a_model_that_names_no_context_takes_any_prompt(tokenizer):
    # Bloom has no table of positions: the distance between two tokens enters its attention instead.
    lm = SimpleNamespace(config=BloomConfig())
    assert context_length(lm) is None
    assert len(encode_prompts(plain(words(40)), tokenizer, lm, make_settings({}))[0]) == 40


def test_a_prompt_without_a_token_is_refused(tokenizer, lm):
    with pytest.raises(ValueError, match=r"prompt 2: the prompt \(' '\) has no token"):
        encode_prompts(plain("a", " "), tokenizer, lm, make_settings({}))


# --- back from the ids to the rows


def test_the_row_of_a_prompt_is_found_by_its_ids(capsys):
    rows = [{"answer": 1, "prompt_place": "line 1"}, {"answer": 2, "prompt_place": "line 2"}]
    assert index_rows(rows, [[5, 6], [6, 5]]) == {(5, 6): rows[0], (6, 5): rows[1]}
    assert capsys.readouterr().err == ""


def test_of_equal_prompts_the_first_is_found_and_the_others_are_counted(capsys):
    rows = [{"answer": answer, "prompt_place": f"line {i}"} for i, answer in enumerate((1, 1, 2, 3))]
    assert index_rows(rows, [[5]] * 4) == {(5,): rows[0]}
    assert "notice: 2 prompts repeat an earlier one with other columns" in capsys.readouterr().err
