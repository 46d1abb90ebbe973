"""The reward model: a scalar head on the backbone of the SFT policy, taught by comparisons of two answers.

Here the comparisons come from a simulated judge who sees the gold score and is often wrong, not from people.
"""

import json
import math
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast

from ppo_lab.llm.generate import generate, keyed_uniforms
from ppo_lab.llm.reviews import gold_score
from ppo_lab.llm.sft import encode
from ppo_lab.masking import as_float, check_same_shape

MAX_NEW_TOKENS = 24


class Pair(NamedTuple):
    """Two answers to one prompt, the first preferred. An answer that was finished ends with the word <eos>."""

    prompt: str
    chosen: str
    rejected: str


# The loss and the training


def bradley_terry_loss(chosen_scores: Tensor, rejected_scores: Tensor) -> Tensor:
    """How badly the scores explain the choices:  L = −mean log σ(r_c − r_r).

    chosen_scores, rejected_scores [B]: the scores of the preferred and of the other answer. Only their difference
    matters. Returns a scalar in nats; equal scores give log 2. Raises ValueError for unequal shapes.

    Book: §13.5.1
    Source: Bradley & Terry 1952; Ouyang et al. 2022 (arXiv 2203.02155)
    """
    check_same_shape(chosen_scores=chosen_scores, rejected_scores=rejected_scores)
    return -F.logsigmoid(as_float(chosen_scores) - as_float(rejected_scores)).mean()


def train_reward_model(
    pairs: list[Pair],
    tokenizer: PreTrainedTokenizerFast,
    sft_model: LlamaForCausalLM,
    *,
    seed: int = 0,
    epochs: int = 4,
    batch_size: int = 32,
    lr: float = 1e-3,
) -> LlamaForSequenceClassification:
    """A reward model that starts from the SFT policy's backbone and learns the pairs by the Bradley–Terry loss.

    Its score is read at the last real token of prompt + answer, <eos> included. AdamW with a cosine schedule. The SFT
    model is left as it is. Returns the reward model in evaluation mode. Raises ValueError for no pairs.
    """
    if not pairs:
        raise ValueError("pairs must hold at least one pair, got none")
    generator = torch.Generator().manual_seed(seed)
    model = _new_model(sft_model, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.01)
    n_steps = epochs * math.ceil(len(pairs) / batch_size)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, n_steps)
    model.train()
    for _ in range(epochs):
        for rows in torch.randperm(len(pairs), generator=generator).split(batch_size):
            loss = bradley_terry_loss(*_pair_scores([pairs[row] for row in rows], tokenizer, model))
            optimizer.zero_grad()
            loss.backward()
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
    return model.eval()


@torch.no_grad()
def pair_accuracy(
    pairs: list[Pair], tokenizer: PreTrainedTokenizerFast, model: LlamaForSequenceClassification
) -> float:
    """The share of pairs whose preferred answer has the higher score."""
    chosen, rejected = _pair_scores(pairs, tokenizer, model)
    return (chosen > rejected).float().mean().item()


def scores(texts: list[str], tokenizer: PreTrainedTokenizerFast, model: LlamaForSequenceClassification) -> Tensor:
    """The reward model's scores [B] of texts, each prompt + answer with the word <eos> at its end if it is finished."""
    ids, mask = encode(texts, tokenizer)
    return model(ids, attention_mask=mask).logits.squeeze(-1)


def _pair_scores(
    pairs: list[Pair], tokenizer: PreTrainedTokenizerFast, model: LlamaForSequenceClassification
) -> tuple[Tensor, Tensor]:
    texts = [f"{pair.prompt} {pair.chosen}" for pair in pairs] + [f"{pair.prompt} {pair.rejected}" for pair in pairs]
    chosen, rejected = scores(texts, tokenizer, model).chunk(2)
    return chosen, rejected


def _new_model(sft_model: LlamaForCausalLM, seed: int) -> LlamaForSequenceClassification:
    config = LlamaConfig.from_dict(sft_model.config.to_dict())
    config.num_labels = 1
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForSequenceClassification(config)
    model.model.load_state_dict(sft_model.model.state_dict())
    return model


# The comparisons


def preference_pairs(
    prompts: list[str],
    tokenizer: PreTrainedTokenizerFast,
    sft_model: LlamaForCausalLM,
    *,
    seed: int = 0,
    sharpness: float = 6.0,
) -> list[Pair]:
    """Two answers of the SFT policy to each prompt, ordered by a judge who is often wrong.

    P(first preferred) = σ(sharpness · (gold₁ − gold₂)). Prompts whose two answers have equal gold scores are left out,
    so there may be fewer pairs than prompts. The same seed gives the same pairs on one machine.
    """
    answers = sample_answers(prompts * 2, tokenizer, sft_model, seed)
    chances = torch.rand(len(prompts), generator=torch.Generator().manual_seed(seed)).tolist()
    pairs = []
    for prompt, a, b, chance in zip(prompts, answers[: len(prompts)], answers[len(prompts) :], chances, strict=True):
        difference = torch.tensor(_gold(prompt, a) - _gold(prompt, b))
        if difference != 0:
            first = chance < torch.sigmoid(sharpness * difference)
            pairs.append(Pair(prompt, a, b) if first else Pair(prompt, b, a))
    return pairs


def sample_answers(
    prompts: list[str], tokenizer: PreTrainedTokenizerFast, model: LlamaForCausalLM, seed: int
) -> list[str]:
    """One answer to each prompt, sampled at temperature 1, at most 24 tokens; <eos> is written out where it came."""
    batch = tokenizer(prompts, padding=True, return_tensors="pt")
    responses = generate(
        model,
        batch.input_ids,
        batch.attention_mask.bool(),
        max_new_tokens=MAX_NEW_TOKENS,
        eos_token_ids=tokenizer.eos_token_id,
        uniforms=keyed_uniforms(seed, 0, range(len(prompts)), MAX_NEW_TOKENS),
    )
    return [tokenizer.decode(ids[mask]) for ids, mask in zip(responses.ids, responses.mask, strict=True)]


def _gold(prompt: str, answer: str) -> float:
    """The gold score of a prompt with an answer in which <eos> is written out."""
    text = f"{prompt} {answer}"
    return gold_score(text.removesuffix(" <eos>"), finished=text.endswith(" <eos>"))


def write_pairs(path: Path, pairs: list[Pair]) -> None:
    """Write pairs as JSON lines."""
    path.write_text(
        "".join(json.dumps(pair._asdict(), separators=(",", ":")) + "\n" for pair in pairs), encoding="utf-8"
    )


def read_pairs(path: Path) -> list[Pair]:
    """The pairs in a file of JSON lines."""
    return [Pair(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
