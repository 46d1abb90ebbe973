"""Prompts: read from a file of lines or a data set, checked one by one, and encoded for a model."""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ppo_lab.files import locate
from ppo_lab.llm.config import DataSettings, RunSettings
from ppo_lab.llm.ranks import notice

Record = dict[str, Any]

# The column that `read_prompts` adds to a row: where it stands, for messages.
PLACE = "prompt_place"
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?")


def read_prompts(data: DataSettings) -> list[Record]:
    """The prompts that the settings name, with whatever else stands beside them.

    A .txt file has one prompt a line, a .jsonl file one JSON object; a folder written by `save_to_disk` and a data set
    of the hub (owner/name, or owner/name:subset) are read by the package datasets. The prompt is in the column
    prompt_field, as text or as a list of messages {"role", "content"}, or in the column messages. Empty lines are
    skipped.

    Returns a dict per prompt: "prompt", a text, or "messages", a list; every other column as it is; "prompt_place",
    where it stands. Raises ValueError naming the line or row for one that holds no prompt; with skip_bad_lines these
    are counted and reported once on stderr. Raises ValueError as well if there is nothing to read, or no prompt in it.

    Book: §13.5.2
    Source: none in particular
    """
    records, parse = _records(data)
    rows, bad = [], []
    for place, record in records:
        try:
            rows.append({**parse(record, data.prompt_field), PLACE: place})
        except ValueError as error:
            bad.append(f"{place}: {error}")
            if not data.skip_bad_lines:
                raise ValueError(bad[0]) from error
    if not rows:
        raise ValueError(f"{data.prompts} holds no prompt" + (f": {bad[0]}" if bad else ""))
    if bad:
        notice(f"{len(bad)} of {len(bad) + len(rows)} prompts left out, the first: {bad[0]}")
    return rows


def _records(data: DataSettings) -> tuple[Iterator[tuple[str, Any]], Callable[[Any, str], Record]]:
    """What may hold a prompt, each with its place, and the function that reads it."""
    path = locate(data.prompts)
    if isinstance(path, Path) and path.is_file() and path.suffix in PARSERS:
        return _lines(path), PARSERS[path.suffix]
    if isinstance(path, Path) and path.is_dir() and any((path / name).is_file() for name in SAVED):
        return _dataset_rows(_load_dataset(path, data), data), as_row
    hub = isinstance(path, str) and HUB_NAME.fullmatch(path) and Path(path).suffix not in (*PARSERS, ".json", ".csv")
    if hub:
        return _dataset_rows(_load_dataset(path, data), data), as_row
    what = "is there, but none of these" if isinstance(path, Path) else "is not there"
    raise ValueError(
        f"prompts must be a .txt or .jsonl file, a folder of save_to_disk or a data set of the hub: {data.prompts!r} "
        f"{what}"
    )


def _lines(path: Path) -> Iterator[tuple[str, bytes]]:
    # Only \n ends a line: a JSON text may hold the other characters that `splitlines` splits at.
    for number, line in enumerate(path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        if line.strip():
            yield f"{path}, line {number}", line


def _text_row(line: bytes, prompt_field: str) -> Record:
    return as_row({"prompt": _decoded(line).strip()}, "prompt")


def _json_row(line: bytes, prompt_field: str) -> Record:
    try:
        record = json.loads(_decoded(line))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"not JSON ({error})") from error
    return as_row(record, prompt_field)


def _decoded(line: bytes) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"not text in UTF-8 ({error.reason} at byte {error.start})") from error


PARSERS = {".txt": _text_row, ".jsonl": _json_row}
SAVED = ("state.json", "dataset_dict.json")


def as_row(record: Any, prompt_field: str) -> Record:
    """A prompt with its columns, checked: the column prompt_field is under "prompt", or under "messages" if a list.

    Raises ValueError for a record that is no dict, and for a prompt that is missing, empty or no text.
    """
    if not isinstance(record, dict):
        raise ValueError(f"must be an object with the field {prompt_field!r}, got {record!r:.60}")
    name = prompt_field if record.get(prompt_field) is not None else "messages"
    prompt = record.get(name)
    if prompt is None:
        raise ValueError(f"has neither the field {prompt_field!r} nor messages")
    if name == prompt_field and not isinstance(prompt, list):
        _check_text(prompt, prompt_field)
        return {**record, "prompt": prompt}
    _check_messages(prompt, name)
    return {**{column: x for column, x in record.items() if column != "prompt"}, "messages": prompt}


def _check_messages(messages: Any, name: str) -> None:
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"{name} must be a list of messages, got {messages!r:.60}")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f"{name} must hold objects with role and content, got {message!r:.60}")
        _check_text(message.get("content"), f"the content of a message in {name}", may_be_empty=True)
    _check_text(messages[-1]["content"], f"the last message in {name}")
    if messages[-1]["role"] == "assistant":
        raise ValueError(f"{name} must end where the answer begins, but the last message is the assistant's")


def _check_text(text: Any, name: str, *, may_be_empty: bool = False) -> None:
    if not isinstance(text, str):
        raise ValueError(f"{name} must be text, got {text!r:.60}")
    if not text.strip() and not may_be_empty:
        raise ValueError(f"{name} is empty")
    if re.search("[\ud800-\udfff]", text):
        raise ValueError(f"{name} holds half of a surrogate pair, which is no character")


def _load_dataset(path: Path | str, data: DataSettings) -> Any:
    """The data set of a folder or of the hub, one split of it."""
    try:
        import datasets
    except ImportError as error:
        raise ValueError(
            f"prompts {data.prompts!r} is a data set, read by the package datasets: pip install datasets ({error})"
        ) from error
    try:
        if isinstance(path, str):
            name, _, subset = path.partition(":")
            return datasets.load_dataset(name, subset or None, split=data.split)
        loaded = datasets.load_from_disk(str(path))
    except (OSError, ValueError, KeyError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(f"the data set {data.prompts!r} cannot be read: {error!r}") from error
    if not isinstance(loaded, dict):
        return loaded
    if data.split not in loaded:
        raise ValueError(f"split must be one of {', '.join(loaded)} for {data.prompts!r}, got {data.split!r}")
    return loaded[data.split]


def _dataset_rows(dataset: Any, data: DataSettings) -> Iterator[tuple[str, Record]]:
    for number, row in enumerate(dataset):
        yield f"{data.prompts}, row {number} (the first is 0)", row


def encode_prompts(
    rows: Sequence[Record], tokenizer: PreTrainedTokenizerBase, lm: PreTrainedModel, settings: RunSettings
) -> list[list[int]]:
    """Token ids of each prompt, short enough that the longest answer still fits into the model's context.

    Messages pass through the tokenizer's chat template, and with chat a plain prompt does so as a user's message. A
    prompt that is too long is refused, or with long_prompts cut from the left: its end is what the answer follows.
    Raises ValueError naming both lengths, for an answer longer than the context, for a prompt without a token, and for
    messages that the tokenizer has no template for.
    """
    context = context_length(lm)
    budget = None if context is None else context - settings.ppo.max_new_tokens
    if budget is not None and budget < 1:
        raise ValueError(
            f"max_new_tokens must leave room for a prompt: {settings.ppo.max_new_tokens} of a context of {context}"
        )
    encoded = []
    for number, row in enumerate(rows, 1):
        place = row.get(PLACE, f"prompt {number}")
        ids = _encode(row, tokenizer, settings.data.chat, place)
        if not ids:
            raise ValueError(f"{place}: the prompt ({row.get('prompt')!r:.60}) has no token")
        if budget is not None and len(ids) > budget and settings.data.long_prompts == "refuse":
            raise ValueError(
                f"{place}: the prompt has {len(ids)} tokens, the context of {context} leaves {budget} beside "
                f"{settings.ppo.max_new_tokens} new ones: shorten it, or set long_prompts to cut"
            )
        encoded.append(ids if budget is None else ids[-budget:])
    return encoded


def _encode(row: Record, tokenizer: PreTrainedTokenizerBase, chat: bool, place: str) -> list[int]:
    if "prompt" in row and not chat:
        return tokenizer(row["prompt"]).input_ids
    messages = [{"role": "user", "content": row["prompt"]}] if "prompt" in row else row["messages"]
    if tokenizer.chat_template is None:
        raise ValueError(f"{place}: messages need a chat template, the tokenizer {tokenizer.name_or_path} has none")
    try:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    except TemplateError as error:
        raise ValueError(f"{place}: the chat template of {tokenizer.name_or_path} refuses it: {error}") from error


def context_length(lm: PreTrainedModel) -> int | None:
    """How many positions a model has, None if its configuration does not say."""
    config = lm.config.get_text_config()
    return getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)


def index_rows(rows: Sequence[Record], prompts: Sequence[Sequence[int]]) -> dict[tuple[int, ...], Record]:
    """The row of each encoded prompt, to be found by its token ids; of equal prompts, the first.

    Says once on stderr how many of them have other columns than the first: a function would not see those.
    """
    index: dict[tuple[int, ...], Record] = {}
    hidden = 0
    for row, ids in zip(rows, prompts, strict=True):
        first = index.setdefault(tuple(ids), row)
        hidden += {**first, PLACE: None} != {**row, PLACE: None}
    if hidden:
        notice(f"{hidden} prompts repeat an earlier one with other columns, a reward sees those of the first")
    return index
