"""Training a language model on pairs of answers: DPO, IPO and SimPO on given pairs, and DPO on the policy's own.

pairs → token ids → log π of whole answers → loss → step. No reward model, no critic and, on given pairs, no sampling.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ppo_lab.llm.config import PPOSettings, setting
from ppo_lab.llm.engine import Engine, TorchEngine
from ppo_lab.llm.experience import Experience, collect, shaped_scores
from ppo_lab.llm.models import Actor, disable_dropout
from ppo_lab.llm.ppo import (
    Judge,
    Prompts,
    Row,
    check_finite,
    judged_columns,
    kl_per_response,
    machine_columns,
    mean_or_nan,
    prompt_batch,
)
from ppo_lab.llm.prompts import context_length
from ppo_lab.llm.reward_model import Pair
from ppo_lab.llm.roles import Roles
from ppo_lab.llm.tokens import left_pad, token_logp
from ppo_lab.masking import check_positive, hide
from ppo_lab.preference import PreferenceLoss, dpo_loss, ipo_loss, simpo_loss

LOSSES = ("dpo", "ipo", "simpo")
WITH_REFERENCE = {"dpo": dpo_loss, "ipo": ipo_loss}


@dataclass(frozen=True)
class PreferenceSettings:
    """All that a run on pairs depends on. Raises ValueError naming the field and what would be right.

    Book: §13.9
    """

    loss: str = setting("dpo", "what is minimised: " + ", ".join(LOSSES))
    kl_coef: float = setting(0.5, "β of DPO and IPO, the price of a nat")
    scale: float = setting(10.0, "s of SimPO, which multiplies the mean log-probability per token")
    margin: float = setting(0.5, "m of SimPO, by which the chosen answer is to be ahead")
    lr: float = setting(3e-4, "learning rate")
    warmup_steps: int = setting(10, "gradient steps in which the learning rate rises to its full size")
    epochs: int = setting(2, "passes over the pairs")
    batch_size: int = setting(32, "pairs per gradient step")
    max_grad_norm: float = setting(1.0, "gradient norm above which a gradient is scaled down")
    seed: int = setting(0, "fixes the order of the pairs")

    def __post_init__(self) -> None:
        if self.loss not in LOSSES:
            raise ValueError(f"loss must be one of {', '.join(LOSSES)}, got {self.loss!r}")
        check_positive(kl_coef=self.kl_coef, scale=self.scale, lr=self.lr, max_grad_norm=self.max_grad_norm)
        if not 0 <= self.margin < float("inf"):
            raise ValueError(f"margin must be at least 0 and finite, got {self.margin}")
        for name, least in {"warmup_steps": 0, "epochs": 1, "batch_size": 1, "seed": 0}.items():
            number = getattr(self, name)
            if not isinstance(number, int) or not least <= number < 2**31:
                raise ValueError(f"{name} must be a whole number from {least} to 2^31, got {number}")


class Answers(NamedTuple):
    """Prompts [B, P] padded on the left with responses [B, T] padded on the right, and what in them is real.

    For 2N rows that are N pairs, row i is the chosen answer of pair i and row N + i the rejected one.
    """

    prompt_ids: Tensor
    prompt_mask: Tensor
    response_ids: Tensor
    mask: Tensor


def encode_pairs(pairs: Sequence[Pair], tokenizer: PreTrainedTokenizerBase) -> Answers:
    """The token ids of N pairs, 2N rows: all chosen answers, then all rejected ones, with their prompts.

    An answer gets no special token that its text does not name: one that was finished ends with the EOS written out.
    Raises ValueError for no pairs and for an answer without a token.
    """
    if not pairs:
        raise ValueError("pairs must hold at least one pair, got none")
    texts = [pair.chosen for pair in pairs] + [pair.rejected for pair in pairs]
    encoded = [tokenizer(text, add_special_tokens=False).input_ids for text in texts]
    if not all(encoded):
        raise ValueError("answers must have at least one token, the EOS if nothing else, got an empty one")
    prompts = [tokenizer(pair.prompt).input_ids for pair in pairs]
    lengths = torch.tensor([len(ids) for ids in encoded])
    response_ids = pad_sequence([torch.tensor(ids) for ids in encoded], batch_first=True)
    mask = torch.arange(response_ids.shape[1]) < lengths[:, None]
    return Answers(*left_pad(prompts * 2, tokenizer.pad_token_id), response_ids, mask)


def sequence_logp(actor: nn.Module | Engine, answers: Answers) -> Tensor:
    """The log-probability of each whole answer, at temperature 1: log π(y|x) = Σ_t log π(y_t | x, y_<t).

    actor: an Actor, or an engine that holds one; answers: B rows. Returns [B] float32 in nats, differentiable. Like the
    log π of PPO it comes from `Actor` and `token_logp`.

    Book: §13.5.3; §13.9
    Source: Rafailov et al. 2023, arXiv 2305.18290
    """
    ids = torch.cat([answers.prompt_ids, answers.response_ids], 1)
    real = torch.cat([answers.prompt_mask, answers.mask], 1)
    logits, _ = actor(ids, real, answers.response_ids.shape[1])
    return hide(token_logp(logits, answers.response_ids), answers.mask).sum(-1)


def train_on_preferences(
    lm: PreTrainedModel,
    pairs: Sequence[Pair],
    tokenizer: PreTrainedTokenizerBase,
    settings: PreferenceSettings,
    reference: PreTrainedModel | None = None,
) -> Iterator[Row]:
    """Teach a language model a set of pairs, in place; yields a row of metrics for each gradient step.

    The reference is frozen and the pairs do not change, so its log-probabilities are always the same numbers: they are
    computed once, before the first step. From then on training holds one model and makes one forward pass per answer,
    where DPO as it is usually told holds two models and makes two. SimPO has no reference at all.

    lm: it learns; reference: π_ref, by default lm as it is before the first step, which needs no second model. Dropout
    is turned off in both. A row has step, loss, accuracy, the mean rewards and log-probabilities of both kinds of
    answers, of this step's pairs before the step, and grad_norm. It is normal that the log-probability of the chosen
    answers falls too: the loss sees only the difference. Raises ValueError for no pairs, for a reference that SimPO
    would not use, and for log-probabilities that are not finite.

    Book: §13.9
    Source: Rafailov et al. 2023, arXiv 2305.18290; Azar et al. 2023, arXiv 2310.12036; Meng et al. 2024, arXiv
    2405.14734
    """
    if reference is not None and settings.loss == "simpo":
        raise ValueError("reference must be None with the loss simpo: it has no reference")
    disable_dropout(lm)
    engine = TorchEngine(Actor(lm), lr=settings.lr, max_grad_norm=settings.max_grad_norm)
    answers = encode_pairs(pairs, tokenizer)
    check_lengths(answers, lm)
    answers = Answers(*(x.to(engine.device) for x in answers))
    ref_logp = None
    if settings.loss in WITH_REFERENCE:
        reference = lm if reference is None else reference
        disable_dropout(reference)
        ref_logp = reference_logp(Actor(reference), answers, settings.batch_size)
    yield from take_steps(engine, answers, ref_logp, settings)


def check_lengths(answers: Answers, lm: PreTrainedModel) -> None:
    """Raise ValueError for a pair that is longer than the model's context."""
    context, lengths = context_length(lm), answers.prompt_mask.sum(-1) + answers.mask.sum(-1)
    longest = int(lengths.argmax())
    if context is not None and lengths[longest] > context:
        pair = longest % (len(lengths) // 2)
        raise ValueError(f"pair {pair} has {int(lengths[longest])} tokens with its prompt, the context is {context}")


@torch.no_grad()
def reference_logp(reference: Actor, answers: Answers, batch_size: int) -> Tensor:
    """The log-probability [B] of each answer under the reference, batch by batch and without a graph."""
    parts = torch.arange(len(answers.mask)).split(batch_size)
    return torch.cat([sequence_logp(reference, rows_of(answers, rows)) for rows in parts])


def take_steps(
    engine: Engine, answers: Answers, ref_logp: Tensor | None, settings: PreferenceSettings, first_step: int = 0
) -> Iterator[Row]:
    """Passes over N pairs in shuffled batches, one optimizer step each; yields a row for every step.

    answers: 2N rows; ref_logp [2N], which SimPO does not read; first_step: where the count, and the warm-up, go on.
    """
    generator = torch.Generator().manual_seed(settings.seed)
    n_pairs, step = len(answers.mask) // 2, first_step
    for _ in range(settings.epochs):
        for some in torch.randperm(n_pairs, generator=generator).split(settings.batch_size):
            if not len(some):
                return
            rows = torch.cat([some, some + n_pairs])
            part = rows_of(answers, rows)
            logp = sequence_logp(engine, part)
            loss = loss_of(logp, part.mask.sum(-1), None if ref_logp is None else ref_logp[rows], settings)
            engine.backward(loss.total)
            engine.clip_gradient()
            engine.step(min(1.0, (step + 1) / max(1, settings.warmup_steps)))
            yield {"step": step, **_row(loss, logp), "grad_norm": engine.grad_norm}
            step += 1


def loss_of(logp: Tensor, lengths: Tensor, ref_logp: Tensor | None, settings: PreferenceSettings) -> PreferenceLoss:
    """The loss that the settings name, of 2N rows: log-probabilities, lengths in tokens, those of the reference."""
    if settings.loss == "simpo":
        return simpo_loss(*logp.chunk(2), *lengths.chunk(2), scale=settings.scale, margin=settings.margin)
    return WITH_REFERENCE[settings.loss](*logp.chunk(2), *ref_logp.chunk(2), kl_coef=settings.kl_coef)


def iterative_dpo(
    prompts: Prompts, roles: Roles, settings: PreferenceSettings, sampling: PPOSettings, *, judge: Judge | None = None
) -> Iterator[tuple[Row, Experience]]:
    """DPO on the policy's own answers, again and again; yields a row of metrics and the experience of each round.

    A round: the actor as it is now gives two answers to each prompt, the reward says which one is better, and DPO on
    these pairs moves the actor. What offline DPO lacks is thereby back: the pairs are about what the policy does now.
    So are generation and a reward model; there is still no critic, no advantage and no ratio. Two answers with equal
    scores are no pair.

    The reference stays what it was at the start, in all rounds, so that β prices the same distance as in PPO. With the
    last round's policy as reference the whole way would have no price.

    prompts: lists of token ids; roles: roles.actor's model is trained, with an optimizer of its own; settings: epochs
    are passes over the pairs of one round; sampling: seed, iterations (rounds), batch_size (answers per round, two to a
    prompt), max_new_tokens and what shapes a score (reward_clip, missing_eos_penalty …). A row has iteration, the means
    of score and judge, kl_per_response of the answers to the reference, pairs, the means of loss and accuracy over the
    steps, and what `machine_columns` says. The warm-up goes on from round to round. Raises ValueError for an odd
    batch_size, for a temperature other than 1, and for an actor that DeepSpeed holds.

    Book: §13.9
    Source: Xu et al. 2023, arXiv 2312.16682
    """
    if sampling.temperature != 1:
        raise ValueError(f"temperature must be 1, at which log π of an answer is taken, got {sampling.temperature}")
    if not isinstance(roles.actor, TorchEngine):
        raise ValueError("roles.actor must be trained on one process without DeepSpeed")
    # Pairs are groups of two, and with this advantage no critic reads them.
    sampling = replace(sampling, advantage="rloo", group_size=2)
    old = roles.actor
    engine = TorchEngine(old.module, lr=settings.lr, max_grad_norm=settings.max_grad_norm, bf16=old.bf16)
    roles, n_steps = replace(roles, actor=engine), 0
    for iteration in range(sampling.iterations):
        roles.seconds = {}
        started = perf_counter()
        asked = [ids for ids in prompt_batch(prompts, sampling, iteration) for _ in range(2)]
        experience = collect(asked, roles, sampling, iteration)
        check_finite(experience)
        answers, ref_logp = ranked(replace(experience, scores=shaped_scores(experience, roles, sampling)))
        order = replace(settings, seed=settings.seed * 1_000_003 + iteration)
        with roles.timed("update"):
            steps = list(take_steps(engine, answers, ref_logp, order, first_step=n_steps))
        seconds = perf_counter() - started
        n_steps += len(steps)
        row = {
            "iteration": iteration,
            **judged_columns(experience, roles, judge),
            "kl_per_response": kl_per_response(experience),
            "pairs": len(answers.mask) // 2,
            **{name: mean_or_nan([step[name] for step in steps]) for name in ("loss", "accuracy")},
            **machine_columns(experience, roles, sampling, seconds),
        }
        yield row, experience


def ranked(experience: Experience) -> tuple[Answers, Tensor]:
    """The pairs in an experience whose neighbours, rows 2i and 2i + 1, answer one prompt: the higher score is chosen.

    Returns 2N rows and their log π_ref [2N]. Two answers with equal scores are left out. Raises ValueError for an odd
    number of rows and for neighbours with different prompts.
    """
    n_rows = len(experience.mask)
    if n_rows % 2 or not torch.equal(experience.prompt_ids[0::2], experience.prompt_ids[1::2]):
        raise ValueError(f"rows 2i and 2i + 1 of experience must answer the same prompt, got {n_rows} other rows")
    scores, first = experience.scores.view(-1, 2), torch.arange(0, n_rows, 2, device=experience.scores.device)
    differ, second_wins = scores[:, 0] != scores[:, 1], (scores[:, 1] > scores[:, 0]).long()
    rows = torch.cat([(first + second_wins)[differ], (first + 1 - second_wins)[differ]])
    whole = Answers(experience.prompt_ids, experience.prompt_mask, experience.response_ids, experience.mask)
    return Answers(*(x[rows] for x in whole)), experience.ref_logp[rows].sum(-1)


def rows_of(answers: Answers, rows: Tensor) -> Answers:
    """Some rows, without the columns that are padding in all of them."""
    part = Answers(*(x[rows] for x in answers))
    width, length = int(part.prompt_mask.sum(-1).max()), int(part.mask.sum(-1).max())
    return Answers(
        part.prompt_ids[:, -width:], part.prompt_mask[:, -width:], part.response_ids[:, :length], part.mask[:, :length]
    )


def _row(loss: PreferenceLoss, logp: Tensor) -> Row:
    chosen_logp, rejected_logp = logp.detach().chunk(2)
    return {
        "loss": loss.total.item(),
        "accuracy": loss.accuracy.item(),
        "chosen_reward": loss.chosen_reward.mean().item(),
        "rejected_reward": loss.rejected_reward.mean().item(),
        "chosen_logp": chosen_logp.mean().item(),
        "rejected_logp": rejected_logp.mean().item(),
    }
