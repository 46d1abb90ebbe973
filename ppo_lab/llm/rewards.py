"""Rewards of whole answers: from a reward model, from a Python function, or a weighted sum of several."""

import importlib
import inspect
import math
import re
import traceback
from collections.abc import Callable, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ppo_lab.files import locate
from ppo_lab.llm.config import ModelSettings
from ppo_lab.llm.models import call, in_float32, load_whole, texts
from ppo_lab.llm.prompts import PLACE, Record, context_length, index_rows
from ppo_lab.llm.tokens import last_index

# Prompts [B, P] and responses [B, T] as ids and masks → scores [B].
Reward = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

# A minus behind a letter, a digit or a bracket is a hyphen or a subtraction.
NUMBER = re.compile(r"(?:(?<![\w)])[-−])?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)")


class RewardModel:
    """Scores whole answers with a sequence-classification model of one output.

    r_φ(x, y) = the `score` head at the last real token, found by the mask and not by the pad id. A model that reads
    another vocabulary gets the decoded text, encoded by its own tokenizer.

    model: of Transformers, num_labels 1; tokenizer: its own; policy_tokenizer: the actor's. Raises ValueError for a
    model with more outputs, or with a smaller vocabulary than the tokenizer that feeds it; when called, for an answer
    that is longer in its tokens than its context.

    Book: §13.5.1; §13.5.3
    Source: Stiennon et al. 2020, arXiv 2009.01325
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        policy_tokenizer: PreTrainedTokenizerBase,
    ):
        if model.config.num_labels != 1:
            raise ValueError(f"the reward model must have 1 output, has {model.config.num_labels}")
        if len(tokenizer) > model.config.get_text_config().vocab_size:
            raise ValueError(
                f"the reward model knows {model.config.get_text_config().vocab_size} tokens, its tokenizer has "
                f"{len(tokenizer)}"
            )
        self.model = model.requires_grad_(False).eval()
        self.tokenizer = tokenizer
        self.policy_tokenizer = policy_tokenizer
        self.same_tokens = tokenizer.get_vocab() == policy_tokenizer.get_vocab()
        self.context = context_length(model)

    @torch.no_grad()
    def __call__(self, prompt_ids: Tensor, prompt_mask: Tensor, response_ids: Tensor, mask: Tensor) -> Tensor:
        """Scores [B] float32 of prompts [B, P] with responses [B, T]; the masks say what is real."""
        ids, real = torch.cat([prompt_ids, response_ids], 1), torch.cat([prompt_mask, mask], 1)
        # The model may lie in CPU memory, and its scores are wanted where the answers are.
        return self._scores(ids.to(self.model.device), real.to(self.model.device)).to(prompt_ids.device)

    def _scores(self, ids: Tensor, real: Tensor) -> Tensor:
        if not self.same_tokens:
            ids, real = self._recoded(ids, real)
        if hasattr(self.model, "score"):
            hidden = call(self.model.base_model, ids, real, required={"use_cache": False}).last_hidden_state
            last = hidden[torch.arange(len(ids), device=ids.device), last_index(real)]
            return in_float32(self.model.score, last).squeeze(-1)
        return self.model(input_ids=ids, attention_mask=real).logits.float().squeeze(-1)

    def _recoded(self, ids: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
        whole = texts(self.policy_tokenizer, ids, real)
        encoded = [torch.tensor(self.tokenizer(text).input_ids) for text in whole]
        longest = max(map(len, encoded))
        if self.context is not None and longest > self.context:
            raise ValueError(
                f"the reward model has a context of {self.context}, prompt and answer have {longest} of its tokens"
            )
        # Padded by hand, for not every tokenizer has a pad token; an encoder counts its positions from the left.
        padded = pad_sequence(encoded, batch_first=True)
        lengths = torch.tensor([[len(each)] for each in encoded])
        return padded.to(ids.device), (torch.arange(longest) < lengths).to(ids.device)


class FunctionReward:
    """Scores whole answers with a Python function: prompts, responses → scores, all lists over the batch.

    The texts are decoded without special tokens. A function with an argument called rows also gets, as rows=, the row
    of the data that each prompt comes from; `add_rows` says which those are. Raises ValueError for a result that is not
    one finite number per answer, and for a prompt that no row belongs to.

    Book: §13.5.1
    Source: none in particular
    """

    def __init__(
        self,
        function: Callable[..., Sequence[float]],
        policy_tokenizer: PreTrainedTokenizerBase,
    ):
        self.function = function
        self.policy_tokenizer = policy_tokenizer
        # The row of each prompt, by its token ids.
        self.rows: dict[tuple[int, ...], Record] = {}
        self.reads_rows = _has_argument(function, "rows")

    def __call__(self, prompt_ids: Tensor, prompt_mask: Tensor, response_ids: Tensor, mask: Tensor) -> Tensor:
        """Scores [B] float32 of prompts [B, P] with responses [B, T]; the masks say what is real."""
        prompts = texts(self.policy_tokenizer, prompt_ids, prompt_mask)
        responses = texts(self.policy_tokenizer, response_ids, mask)
        more = {"rows": self._rows_of(prompt_ids, prompt_mask, prompts)} if self.reads_rows else {}
        result = called(self.function, "reward", prompts, responses, **more)
        try:
            scores = torch.as_tensor(result, dtype=torch.float32, device=prompt_ids.device)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise ValueError(f"{self._must()}, got {result!r:.200}") from error
        if scores.shape != (len(prompts),):
            raise ValueError(f"{self._must()}, got shape {list(scores.shape)} for {len(prompts)} answers")
        wrong = (~scores.isfinite()).nonzero().flatten().tolist()
        if wrong:
            raise ValueError(f"{self._must()}, got {scores[wrong[0]].item()} for {responses[wrong[0]]!r:.200}")
        return scores

    def _rows_of(self, prompt_ids: Tensor, prompt_mask: Tensor, prompts: list[str]) -> list[Record]:
        keys = [tuple(ids[keep].tolist()) for ids, keep in zip(prompt_ids, prompt_mask, strict=True)]
        missing = [prompt for prompt, key in zip(prompts, keys, strict=True) if key not in self.rows]
        if missing:
            raise ValueError(f"the reward function reads the rows of the data, and none has the prompt {missing[0]!r}")
        return [self.rows[key] for key in keys]

    def _must(self) -> str:
        name = getattr(self.function, "__name__", repr(self.function))
        return f"the reward function {name} must return one finite number per answer"


def called(function: Callable[..., Any], what: str, *inputs: Any, **more: Any) -> Any:
    """The result of a user's function. Raises ValueError naming it, its error and the line, if it fails."""
    try:
        return function(*inputs, **more)
    except (Exception, SystemExit) as error:
        *_, place = traceback.extract_tb(error.__traceback__)
        name = getattr(function, "__name__", repr(function))
        raise ValueError(
            f"the {what} function {name} raised {type(error).__name__}: {error} ({place.filename}, line {place.lineno})"
        ) from error


def _has_argument(function: Callable[..., Any], name: str) -> bool:
    try:
        return name in inspect.signature(function).parameters
    except ValueError:
        # A function written in C may have no signature to read.
        return False


class SumReward:
    """A weighted sum of rewards: r = Σ_i w_i r_i.

    sources: each reward with its weight.

    Book: §13.5.1
    Source: none in particular
    """

    def __init__(self, sources: Sequence[tuple[Reward, float]]):
        self.sources = list(sources)

    def __call__(self, prompt_ids: Tensor, prompt_mask: Tensor, response_ids: Tensor, mask: Tensor) -> Tensor:
        """Scores [B] float32 of prompts [B, P] with responses [B, T]; the masks say what is real."""
        answers = (prompt_ids, prompt_mask, response_ids, mask)
        return torch.stack([weight * reward(*answers) for reward, weight in self.sources]).sum(0)


def reward_models(reward: Reward) -> list[tuple[RewardModel, float]]:
    """The reward models in a reward, each with its weight."""
    return [(source, weight) for source, weight in _sources(reward) if isinstance(source, RewardModel)]


def _sources(reward: Reward) -> list[tuple[Reward, float]]:
    return reward.sources if isinstance(reward, SumReward) else [(reward, 1.0)]


def check_context(reward: Reward, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    """Raise ValueError if a reward model that reads the actor's tokens is too short for the longest prompt and answer.

    A reward model with tokens of its own is checked when it reads an answer.
    """
    longest = max(map(len, prompts))
    for model, _ in reward_models(reward):
        if model.same_tokens and model.context is not None and longest + max_new_tokens > model.context:
            raise ValueError(
                f"the reward model has a context of {model.context}, the longest prompt of {longest} tokens and "
                f"max_new_tokens of {max_new_tokens} do not fit"
            )


def make_reward(settings: ModelSettings, tokenizer: PreTrainedTokenizerBase) -> Reward:
    """The reward that the settings name: a model, a Python function, or a weighted sum of several of them.

    tokenizer: the actor's. Functions that read the rows of the data get them by `add_rows`. Raises ValueError for a
    source that is none, and OSError for a checkpoint that is not found.

    Book: §13.5.1
    Source: none in particular
    """
    sources = [(_load_source(name, settings, tokenizer), w) for name, w in reward_sources(settings.reward)]
    return sources[0][0] if len(sources) == 1 and sources[0][1] == 1 else SumReward(sources)


def add_rows(reward: Reward, rows: Sequence[Record], prompts: Sequence[Sequence[int]]) -> None:
    """Let the functions in a reward that read rows find those of these prompts, given encoded as well.

    Each data set whose answers are scored is added once: the prompts of training, and those of an evaluation.
    """
    readers = [source for source, _ in _sources(reward) if isinstance(source, FunctionReward) and source.reads_rows]
    if readers:
        index = index_rows(rows, prompts)
        for reader in readers:
            reader.rows = index | reader.rows


def reward_sources(text: str) -> list[tuple[str, float]]:
    """The names and weights in the setting reward: "models/reward*0.5,my_module:my_function" → 0.5 and 1.

    Raises ValueError for a source without a name and for a weight that is no finite number.
    """
    sources = []
    for part in text.split(","):
        name, _, weight = part.strip().partition("*")
        if not name:
            raise ValueError(f"reward must be one source or several joined by commas, got {text!r}")
        sources.append((name.strip(), _weight(weight) if "*" in part else 1.0))
    return sources


def _weight(text: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = math.nan
    if not math.isfinite(weight):
        raise ValueError(f"reward: the weight behind * must be a finite number, got {text!r}")
    return weight


def _load_source(name: str, settings: ModelSettings, tokenizer: PreTrainedTokenizerBase) -> Reward:
    where = locate(name)
    if isinstance(where, str) and ":" in name:
        return FunctionReward(import_function(name, "reward"), tokenizer)
    return load_reward_model(where, tokenizer, trust_remote_code=settings.trust_remote_code)


def import_function(name: str, setting: str) -> Callable[..., Any]:
    """The function that module:function names. Raises ValueError naming the setting if there is none."""
    module, _, function = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, SyntaxError, ValueError) as error:
        raise ValueError(f"{setting} must be module:function, {name!r} cannot be imported: {error}") from error
    if not callable(found):
        raise ValueError(f"{setting} must be module:function, {name!r} is no function")
    return found


def load_reward_model(
    path: str | Path, policy_tokenizer: PreTrainedTokenizerBase, *, trust_remote_code: bool = False
) -> RewardModel:
    """A reward model and its tokenizer from a folder or a hub name. Raises ValueError like `RewardModel`.

    Like `load_whole` as well: a head that is not in the checkpoint is no reward model.
    """
    model = load_whole(AutoModelForSequenceClassification, path, trust_remote_code=trust_remote_code)
    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    return RewardModel(model, tokenizer, policy_tokenizer)


def exact_match(prompts: Sequence[str], responses: Sequence[str], rows: Sequence[Record]) -> list[float]:
    """1 for a response whose last number is the answer of its row, else 0: the reward of arithmetic.

    A number has digits, with a sign, thousands in groups of three and decimals if any: −1,234.50. Of a text in the
    column answer the last number counts as well. Numbers are compared, not their spelling: 7.0 is 7.
    Raises ValueError naming the row of the first answer that holds no number.

    Book: §13.5.1
    Source: Cobbe et al. 2021, arXiv 2110.14168 (the final number decides)
    """
    scores = []
    for response, row in zip(responses, rows, strict=True):
        answer = last_number(str(row.get("answer")))
        if answer is None:
            raise ValueError(
                f"exact_match needs a number in the column answer, got {row.get('answer')!r:.60} in "
                f"{row.get(PLACE, 'a row')}"
            )
        scores.append(float(last_number(response) == answer))
    return scores


def last_number(text: str) -> Decimal | None:
    """The last number in a text, None if there is none."""
    found = NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "").replace("−", "-")) if found else None
