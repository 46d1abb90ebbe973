"""Sampling responses: prompts in, token ids and their log-probabilities out."""

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ppo_lab.llm.tokens import position_ids


class Responses(NamedTuple):
    """What was sampled: ids [B, T], mask [B, T] (True up to and including the first EOS) and logp [B, T] in nats.

    T is the longest response. Where the mask is False, ids hold an EOS and logp is 0.
    """

    ids: Tensor
    mask: Tensor
    logp: Tensor


@torch.no_grad()
def generate(
    model: nn.Module,
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    *,
    max_new_tokens: int,
    eos_token_ids: int | Iterable[int],
    uniforms: Tensor | None,
    temperature: float = 1.0,
    anyone: Callable[[bool], bool] | None = None,
) -> Responses:
    """Sample one response to each prompt from softmax(logits/τ), with a key-value cache.

    y_t = the first token whose cumulative probability exceeds u_t: with u_t uniform in [0, 1), a draw from π(·|s_t).
    Nothing truncates the distribution (no top-k, top-p, min-p): the log-probabilities of training could not follow.
    A row that has ended leaves the batch, so the work follows the tokens that are really made.

    model: a causal language model of Transformers; prompt_ids [B, P] left-padded, prompt_mask [B, P] True = real;
    max_new_tokens: T at most; eos_token_ids: one id or several; uniforms [B, max_new_tokens], see `keyed_uniforms`, or
    None for the most probable token each time; temperature τ > 0; anyone: for a model that all ranks must call equally
    often, tells from whether this rank goes on whether any does. Returns Responses, with the log-probabilities of
    softmax(logits/τ). The model keeps its mode. Raises ValueError for shapes that do not fit and for settings out of
    range.

    Book: §13.5.2
    Source: none in particular; inverse transform sampling
    """
    eos = torch.tensor([eos_token_ids] if isinstance(eos_token_ids, int) else list(eos_token_ids))
    if not len(eos):
        raise ValueError("eos_token_ids must name at least one token, got none")
    eos = eos.to(prompt_ids.device)
    _check(prompt_ids, prompt_mask, uniforms, max_new_tokens, temperature)
    n_prompts = len(prompt_ids)
    ids = eos[0].repeat(n_prompts, max_new_tokens)
    mask = torch.zeros_like(ids, dtype=torch.bool)
    logp = torch.zeros(ids.shape, device=ids.device)

    rows = torch.arange(n_prompts, device=ids.device)
    attention_mask, positions, tokens, memory = prompt_mask, position_ids(prompt_mask), prompt_ids, None
    ended = max_new_tokens
    with evaluating(model):
        for t in range(max_new_tokens):
            logits, memory = _next_logits(model, tokens, attention_mask, positions, memory)
            chosen, logp[rows, t] = sample(logits / temperature, None if uniforms is None else uniforms[rows, t])
            ids[rows, t], mask[rows, t] = chosen, True
            going_on = ~torch.isin(chosen, eos)
            mine = bool(going_on.any())
            if t == max_new_tokens - 1 or not (mine if anyone is None else anyone(mine)):
                break
            if not mine:
                # The others go on. One row stays to keep step with them; what it makes is hidden below.
                going_on[0], ended = True, min(ended, t + 1)
            attention_mask = torch.cat([attention_mask, torch.ones_like(attention_mask[:, :1])], 1)
            tokens, positions = chosen[:, None], positions[:, -1:] + 1
            if not going_on.all():
                memory.batch_select_indices(going_on.nonzero().squeeze(-1))
                rows, attention_mask = rows[going_on], attention_mask[going_on]
                tokens, positions = tokens[going_on], positions[going_on]
    length = min(ended, t + 1)
    return Responses(ids[:, :length], mask[:, :length], logp[:, :length])


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode for a while: in training mode gradient checkpointing switches the cache off."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def sample(logits: Tensor, uniforms: Tensor | None) -> tuple[Tensor, Tensor]:
    """One token per row from softmax(logits) and its log-probability; the most probable one without uniforms.

    logits [B, V]; uniforms [B] in [0, 1). Returns ids [B] and logp [B] in nats. About ten times faster
    than torch.multinomial on a vocabulary of 8,000: one cumulative sum, and one random number instead of V.
    Raises FloatingPointError for logits that are not finite.
    """
    probs = logits.float().softmax(-1)
    if not bool(probs[:, 0].isfinite().all()):
        # One NaN in a row of logits makes all its probabilities NaN.
        raise FloatingPointError("the logits of the next token are not finite: the model's weights are damaged")
    if uniforms is None:
        chosen = probs.argmax(-1, keepdim=True)
    else:
        cumulative = probs.cumsum(-1)
        total = cumulative[:, -1:]
        # Below the total, so that some token exceeds it. right=True: a token of probability 0 is never the first to.
        level = torch.minimum(uniforms.to(total)[:, None] * total, total.nextafter(torch.zeros_like(total)))
        chosen = torch.searchsorted(cumulative, level, right=True)
    return chosen.squeeze(-1), probs.gather(-1, chosen).log().squeeze(-1)


def keyed_uniforms(seed: int, iteration: int, rows: Iterable[int], n_tokens: int) -> Tensor:
    """Uniform numbers that depend on (seed, iteration, row, position) alone.

    So the response to a prompt is the same in any batch, on any number of processes.

    rows: index of each prompt in the whole batch of the iteration, all at least 0. Returns float64
    [len(rows), n_tokens] in [0, 1).

    Source: Steele et al. 2014 (the mixing function of SplitMix64)
    """
    rows = list(rows)
    if min([seed, iteration, *rows]) < 0:
        raise ValueError(f"seed, iteration and rows must be at least 0, got {seed}, {iteration} and {rows[:3]}")
    key = _mix(_mix(np.array([seed], np.uint64)) ^ np.array([iteration], np.uint64))
    key = _mix(key ^ np.array(rows, np.uint64))[:, None]
    bits = _mix(_mix(key ^ np.arange(n_tokens, dtype=np.uint64)))
    return torch.from_numpy((bits >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def _mix(x: np.ndarray) -> np.ndarray:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@cache
def accepted_arguments(model_class: type[nn.Module]) -> frozenset[str]:
    """The arguments that a model's forward names: not every architecture takes positions, or slices its logits."""
    return frozenset(inspect.signature(model_class.forward).parameters)


def padding_arguments(attention_mask: Tensor, positions: Tensor) -> dict[str, Tensor]:
    """What a forward pass has to be told about padding: nothing, if there is none, and attention is faster then."""
    return {} if bool(attention_mask.all()) else {"attention_mask": attention_mask, "position_ids": positions}


def _next_logits(
    model: nn.Module, tokens: Tensor, attention_mask: Tensor, positions: Tensor, memory: Any
) -> tuple[Tensor, Any]:
    accepted = accepted_arguments(type(model))
    # Transformers 5.20 renamed it.
    cache_name = "cache" if "cache" in accepted else "past_key_values"
    optional = {**padding_arguments(attention_mask, positions), "logits_to_keep": 1}
    output = model(
        input_ids=tokens,
        use_cache=True,
        **{cache_name: memory},
        **{name: value for name, value in optional.items() if name in accepted},
    )
    return output.logits[:, -1], output[cache_name]


def _check(
    prompt_ids: Tensor, prompt_mask: Tensor, uniforms: Tensor | None, max_new_tokens: int, temperature: float
) -> None:
    if prompt_ids.dim() != 2 or prompt_ids.shape != prompt_mask.shape or not prompt_ids.numel():
        raise ValueError(
            f"prompt_ids and prompt_mask must have one shape [B, P], got {tuple(prompt_ids.shape)} and "
            f"{tuple(prompt_mask.shape)}"
        )
    if not bool(prompt_mask[:, -1].all()):
        raise ValueError("prompts must be padded on the left: the last column of prompt_mask must be all True")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    if uniforms is not None and tuple(uniforms.shape) != (len(prompt_ids), max_new_tokens):
        raise ValueError(
            f"uniforms must have the shape {(len(prompt_ids), max_new_tokens)}, got {tuple(uniforms.shape)}"
        )
