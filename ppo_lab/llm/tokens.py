"""From token ids to the numbers PPO works with: masks, positions, log-probabilities, values and rewards of each token.

A batch is a left-padded prompt [B, P] followed by a right-padded response [B, T]. Everything of shape [B, T] belongs to
the response: index t is token y_t, sampled in the state before it.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ppo_lab.kl import kl_estimate
from ppo_lab.masking import as_float, as_mask, check_same_shape, hide

# Logits read at once in float32, 16 MiB: large enough to keep the processor busy, small beside the logits themselves.
CHUNK = 2**22
# A log-probability whose probability is 0 in float32, and which a large weight does not carry to infinity.
LOWEST = -1000.0


def left_pad(sequences: Sequence[Sequence[int]], pad_token_id: int) -> tuple[Tensor, Tensor]:
    """Token ids of unequal length as one table, padded on the left, and what in it is real.

    sequences: B lists of ids, none empty. Returns ids [B, P] and mask [B, P], True = a token of the sequence. The mask
    comes from the lengths, so a pad id that is also a real token does no harm. Raises ValueError for an empty sequence.
    """
    if not sequences or any(len(sequence) == 0 for sequence in sequences):
        raise ValueError("there must be sequences, each with at least one token, got an empty one")
    width = max(len(sequence) for sequence in sequences)
    ids = torch.tensor([[pad_token_id] * (width - len(sequence)) + list(sequence) for sequence in sequences])
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    return ids, torch.arange(width) >= width - lengths[:, None]


def response_mask(response_ids: Tensor, eos_token_ids: int | Iterable[int]) -> Tensor:
    """What counts in a response: everything up to and including its first end-of-sequence token.

    mask_t = no EOS among y_0 … y_{t−1}. Decided by position, never by the pad id: the EOS was chosen by the policy and
    is trained, whatever id the padding has. A response without EOS counts whole.

    response_ids [B, T], t = 0 … T−1; eos_token_ids: one id or several. Returns bool [B, T].

    Book: §13.5.3
    Source: none in particular
    """
    is_eos = _is_one_of(response_ids, eos_token_ids)
    return (is_eos.cumsum(-1) - is_eos.long()) == 0


def is_finished(response_ids: Tensor, mask: Tensor, eos_token_ids: int | Iterable[int]) -> Tensor:
    """Whether each response ended by itself: an end-of-sequence token lies among the tokens that count. Bool [B]."""
    return (_is_one_of(response_ids, eos_token_ids) & mask).any(-1)


def _is_one_of(ids: Tensor, eos_token_ids: int | Iterable[int]) -> Tensor:
    eos = [eos_token_ids] if isinstance(eos_token_ids, int) else list(eos_token_ids)
    return torch.isin(ids, torch.tensor(eos, device=ids.device))


def position_ids(attention_mask: Tensor) -> Tensor:
    """Where each real token stands in its own sequence, counted from 0 whatever the padding before it.

    p_t = (number of real tokens up to and including t) − 1, and 0 in the padding.

    attention_mask [B, L], True = real. Returns int64 [B, L]. A model with learned positions reads the wrong row of its
    table without them, as soon as a prompt is padded on the left.

    Book: §13.5.2
    Source: Radford et al. 2019 (learned positions)
    """
    return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)


def last_index(mask: Tensor) -> Tensor:
    """Index of the last element that counts in each row, int64 [B]; 0 for a row where nothing does."""
    return (torch.arange(mask.shape[-1], device=mask.device) * mask.long()).argmax(-1)


def next_token_values(values: Tensor, mask: Tensor, final_values: Tensor | None = None) -> Tensor:
    """Value of the state each token leads to: that of the next position which counts.

    V(s_{t+1}) = V at the next t' > t with mask_t' = 1, and after the last one final_values, or 0 without them.

    values [B, T], t = 0 … T−1, of the states before the tokens; mask [B, T] True = counts; final_values [B]: the value
    after the last token, for responses that were cut off at the length limit and are to be bootstrapped (0 for those
    that ended). Returns [B, T], 0 where masked. A masked gap (text of a tool, say) is skipped.
    Raises ValueError for unequal shapes.

    Book: §13.5.4
    Source: Schulman et al. 2016, arXiv 1506.02438
    """
    mask = as_mask(mask, values)
    values = hide(as_float(values), mask)
    following = values.new_zeros(values.shape[:-1]) if final_values is None else as_float(final_values)
    check_same_shape(final_values=following, rows=values[..., 0])
    if bool((mask[..., 1:] <= mask[..., :-1]).all()):
        # No gap: the values shift by one place, and what follows the last token goes behind it.
        shifted = torch.cat([values[..., 1:], torch.zeros_like(values[..., :1])], -1)
        shifted.scatter_(-1, last_index(mask).unsqueeze(-1), following.unsqueeze(-1))
        return hide(shifted, mask)
    result = torch.zeros_like(values)
    for t in range(values.shape[-1] - 1, -1, -1):
        result[..., t] = following
        following = torch.where(mask[..., t], values[..., t], following)
    return hide(result, mask)


class _TokenStatistics(torch.autograd.Function):
    """log π of the given ids and the entropy of π, reading the logits in chunks.

    Autograd would keep a float32 copy of all logits for each of the two. Here only log Σ exp is kept, one number per
    token, and the gradient is written chunk by chunk:
    ∂log π(a)/∂z_i = (1[i = a] − π_i)/τ,  ∂H/∂z_i = −π_i·(log π_i + H)/τ.
    """

    @staticmethod
    def forward(ctx, logits: Tensor, ids: Tensor, temperature: float, with_entropy: bool) -> tuple[Tensor, Tensor]:
        """log π(ids) and H, both [..., T]; H is 0 without with_entropy."""
        rows, ids = logits.reshape(-1, logits.shape[-1]), ids.reshape(-1)
        logp, entropy, log_total = (torch.zeros(len(rows), dtype=torch.float32, device=rows.device) for _ in range(3))
        for chunk in _chunks(rows):
            scaled = _scaled(rows[chunk], temperature)
            log_probs, taken = scaled.log_softmax(-1), ids[chunk, None]
            logp[chunk] = log_probs.gather(-1, taken).squeeze(-1)
            # Of the largest logit, because that of the token taken may be −inf.
            log_total[chunk] = scaled.amax(-1) - log_probs.amax(-1)
            if with_entropy:
                entropy[chunk] = -_sum_plogp(log_probs, log_probs.exp())
        ctx.save_for_backward(rows, ids, log_total, entropy)
        ctx.temperature, ctx.shape = temperature, logits.shape
        return logp.view(logits.shape[:-1]), entropy.view(logits.shape[:-1])

    @staticmethod
    def backward(ctx, grad_logp: Tensor, grad_entropy: Tensor) -> tuple[Tensor, None, None, None]:
        """The gradient of the logits; the other arguments have none."""
        rows, ids, log_total, entropy = ctx.saved_tensors
        grad_logp, grad_entropy = grad_logp.reshape(-1, 1) / ctx.temperature, grad_entropy.reshape(-1, 1)
        with_entropy = bool(grad_entropy.any())
        gradient = torch.empty_like(rows)
        for chunk in _chunks(rows):
            log_probs = _scaled(rows[chunk], ctx.temperature) - log_total[chunk, None]
            probs = log_probs.exp()
            factor = -grad_logp[chunk]
            if with_entropy:
                surprise = log_probs.clamp_(min=LOWEST).add_(entropy[chunk, None])
                factor = factor - grad_entropy[chunk] / ctx.temperature * surprise
            grad = probs.mul_(factor).scatter_add_(-1, ids[chunk, None], grad_logp[chunk])
            # What a mask hides has no gradient, even if its logits are NaN.
            grad.masked_fill_((grad_logp[chunk] == 0) & (grad_entropy[chunk] == 0), 0.0)
            gradient[chunk] = grad.to(gradient.dtype)
        return gradient.view(ctx.shape), None, None, None


def _chunks(rows: Tensor) -> Iterable[slice]:
    size = max(1, CHUNK // rows.shape[-1])
    return (slice(start, start + size) for start in range(0, len(rows), size))


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    return logits.float() if temperature == 1 else logits.float() / temperature


def _sum_plogp(log_probs: Tensor, probs: Tensor) -> Tensor:
    """Σ p·log p with 0·log 0 = 0: a forbidden token has a log-probability of −inf, and 0·inf would be nan."""
    return torch.linalg.vecdot(probs, log_probs.clamp_(min=LOWEST))


def token_statistics(logits: Tensor, ids: Tensor, *, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probability of each given token and entropy of the distribution it was drawn from.

    log π(y_t|s_t) = z_{y_t}/τ − log Σ_i exp(z_i/τ)  and  H_t = −Σ_i π_i·log π_i, the same numbers as
    log_softmax(logits/τ).gather(ids) and `categorical_entropy(logits/τ)`, without a float32 copy of the logits.

    logits z [..., T, V], those that predict the ids; ids [..., T]; temperature τ > 0, the one the tokens were sampled
    with. Returns (logp, entropy), both [..., T] float32, in nats. Raises ValueError for shapes that do not fit and a
    temperature that is not positive.

    Book: §13.5.3; §13.3.4
    Source: none in particular; the softmax
    """
    _check_logits(logits, ids, temperature)
    return _TokenStatistics.apply(logits, ids, temperature, True)


def token_logp(logits: Tensor, ids: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Log-probability of each given token: `token_statistics` without the entropy and its cost, same arguments.

    Book: §13.5.3
    Source: none in particular; the softmax
    """
    _check_logits(logits, ids, temperature)
    return _TokenStatistics.apply(logits, ids, temperature, False)[0]


def _check_logits(logits: Tensor, ids: Tensor, temperature: float) -> None:
    if logits.shape[:-1] != ids.shape:
        raise ValueError(
            f"logits must have the shape of ids and a vocabulary axis, got {tuple(logits.shape)} for ids "
            f"{tuple(ids.shape)}"
        )
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")


def token_rewards(
    scores: Tensor, logp: Tensor, ref_logp: Tensor, mask: Tensor, kl_coef: float, *, kind: str = "k1"
) -> Tensor:
    """Reward of each token: a price for leaving the reference, and the score of the whole answer at its last token.

    r_t = −β·KL_t + [t is the last token that counts]·score, with KL_t = log π(y_t|s_t) − log π_ref(y_t|s_t) for k1.

    scores [B]; logp [B, T] of the policy that sampled the tokens, ref_logp [B, T], both in nats; mask [B, T] True =
    counts; kl_coef β ≥ 0; kind: see `kl_estimate`. Returns [B, T], without gradient, 0 where masked. An answer in which
    nothing counts gets no score. Raises ValueError for unequal shapes, a negative β or another kind.

    Book: §13.5.3
    Source: Ziegler et al. 2019, arXiv 1909.08593
    """
    check_same_shape(logp=logp, ref_logp=ref_logp)
    check_same_shape(scores=scores, rows=logp[..., 0])
    if not kl_coef >= 0:
        raise ValueError(f"kl_coef must be at least 0, got {kl_coef}")
    mask = as_mask(mask, logp)
    rewards = hide(-kl_coef * kl_estimate(logp.detach(), ref_logp.detach(), kind), mask)
    last = last_index(mask).unsqueeze(-1)
    score = hide(as_float(scores.detach()), mask.any(-1)).unsqueeze(-1)
    return rewards.scatter_add(-1, last, score.to(rewards.dtype))
