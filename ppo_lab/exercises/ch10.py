"""Exercises of chapter 10, many ranks (§13.6.8). Wrong answers are written as a reader would, without types."""

import math

import torch
from torch import Tensor, tensor

from ppo_lab.exercises.kit import Case, Exercise, Mistake

NO, YES = False, True
NAN = math.nan


# --- rank_share


def _padded(rows: Tensor, world_size: int, filling: Tensor) -> Tensor:
    missing = -len(rows) % world_size
    return torch.cat([rows, filling.to(rows.dtype).expand(missing)])


def _in_blocks(rows, rank, world_size):
    return _padded(rows, world_size, tensor([-1])).view(world_size, -1)[rank]


def _last_row_again(rows, rank, world_size):
    return _padded(rows, world_size, rows[-1:])[rank::world_size]


def _padding_with_0(rows, rank, world_size):
    return _padded(rows, world_size, tensor([0]))[rank::world_size]


def _places(rows, rank, world_size):
    return _padded(torch.arange(len(rows)), world_size, tensor([-1]))[rank::world_size]


def _padding_first(rows, rank, world_size):
    missing = -len(rows) % world_size
    return torch.cat([rows.new_full((missing,), -1), rows])[rank::world_size]


RANK_SHARE = Exercise(
    "rank_share",
    ("rows of this rank",),
    (
        Case(
            "four rows, the first of two ranks", dict(rows=tensor([0, 1, 2, 3]), rank=0, world_size=2), tensor([0, 2])
        ),
        Case("four rows, the second", dict(rows=tensor([0, 1, 2, 3]), rank=1, world_size=2), tensor([1, 3])),
        Case(
            "five rows: the second rank has one less",
            dict(rows=tensor([0, 1, 2, 3, 4]), rank=1, world_size=2),
            tensor([1, 3, -1]),
        ),
        Case("shuffled rows", dict(rows=tensor([7, 2, 9, 4, 5]), rank=0, world_size=2), tensor([7, 9, 5])),
        Case("five rows on three ranks", dict(rows=tensor([8, 6, 4, 2, 1]), rank=2, world_size=3), tensor([4, -1])),
        Case("fewer rows than ranks", dict(rows=tensor([6]), rank=2, world_size=3), tensor([-1])),
    ),
    (
        Mistake(
            "the rows are dealt out in blocks",
            "Like cards: row 0 to rank 0, row 1 to rank 1, and round again. They are put together in that order.",
            _in_blocks,
        ),
        Mistake(
            "the last row is repeated where rows are missing",
            "Then an answer is computed twice and counts twice. −1 marks a row that counts for nothing.",
            _last_row_again,
        ),
        Mistake(
            "0 stands where a row is missing",
            "0 is a row like any other. −1 is the mark for none.",
            _padding_with_0,
        ),
        Mistake(
            "places are returned instead of the rows",
            "In a shuffled minibatch the row at place 0 is rows[0].",
            _places,
        ),
        Mistake(
            "the missing rows are filled in at the front",
            "The ranks with the highest numbers are those that go without: fill in behind the last row.",
            _padding_first,
        ),
    ),
)


# --- zero_bytes


def _held(n_params, stage, n_gpus, sizes=(2, 2, 12), first_stages=(3, 2, 1)):
    counts = [-(-n_params // n_gpus) if stage >= first else n_params for first in first_stages]
    return tuple(count * size for count, size in zip(counts, sizes, strict=True))


def _without_master_copy(n_params, stage, n_gpus):
    return _held(n_params, stage, n_gpus, sizes=(2, 2, 8))


def _float32_gradients(n_params, stage, n_gpus):
    return _held(n_params, stage, n_gpus, sizes=(2, 4, 12))


def _weights_first(n_params, stage, n_gpus):
    return _held(n_params, stage, n_gpus, first_stages=(1, 2, 3))


def _everything_from_stage_1_on(n_params, stage, n_gpus):
    return _held(n_params, stage, n_gpus, first_stages=(1, 1, 1))


def _rounded_down(n_params, stage, n_gpus):
    counts = [n_params // n_gpus if stage >= first else n_params for first in (3, 2, 1)]
    return tuple(count * size for count, size in zip(counts, (2, 2, 12), strict=True))


def _not_rounded(n_params, stage, n_gpus):
    counts = [n_params / n_gpus if stage >= first else n_params for first in (3, 2, 1)]
    return tuple(count * size for count, size in zip(counts, (2, 2, 12), strict=True))


def _of_all_gpus(n_params, stage, n_gpus):
    return tuple(n_gpus * size for size in _held(n_params, stage, n_gpus))


ZERO_BYTES = Exercise(
    "zero_bytes",
    ("weights", "gradients", "optimizer state"),
    (
        Case("stage 0 on four GPUs", dict(n_params=100, stage=0, n_gpus=4), (tensor(200), tensor(200), tensor(1200))),
        Case("stage 1 on four GPUs", dict(n_params=100, stage=1, n_gpus=4), (tensor(200), tensor(200), tensor(300))),
        Case("stage 2 on four GPUs", dict(n_params=100, stage=2, n_gpus=4), (tensor(200), tensor(50), tensor(300))),
        Case("stage 3 on four GPUs", dict(n_params=100, stage=3, n_gpus=4), (tensor(50), tensor(50), tensor(300))),
        Case("stage 3 on one GPU", dict(n_params=8, stage=3, n_gpus=1), (tensor(16), tensor(16), tensor(96))),
        Case(
            "ten parameters do not divide by four",
            dict(n_params=10, stage=2, n_gpus=4),
            (tensor(20), tensor(6), tensor(36)),
        ),
        Case("nor at stage 3", dict(n_params=10, stage=3, n_gpus=4), (tensor(6), tensor(6), tensor(36))),
    ),
    (
        Mistake(
            "the float32 master copy is forgotten, as in the book's table",
            "m, v and the master copy are 4 bytes each: 12 in all (erratum C11).",
            _without_master_copy,
        ),
        Mistake(
            "gradients are kept in float32",
            "They are bfloat16 here, like the weights: 2 bytes.",
            _float32_gradients,
        ),
        Mistake(
            "the weights are sharded first",
            "The largest item goes first: stage 1 the optimizer, 2 the gradients as well, 3 the weights as well.",
            _weights_first,
        ),
        Mistake(
            "everything is sharded from stage 1 on",
            "Stage 1 shards the optimizer state alone.",
            _everything_from_stage_1_on,
        ),
        Mistake(
            "the share is rounded down",
            "Four GPUs with 2 parameters each hold 8 of 10. Round up.",
            _rounded_down,
        ),
        Mistake(
            "the share is not rounded",
            "No GPU holds half a parameter. Round up to whole ones before you multiply with the bytes.",
            _not_rounded,
        ),
        Mistake(
            "the bytes of all GPUs together are returned",
            "The question is whether it fits on one of them.",
            _of_all_gpus,
        ),
    ),
)


# --- sampler_weights


def _ratio(old_logp: Tensor, sampler_logp: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, old_logp - sampler_logp, 0.0).exp()


def _upside_down(old_logp, sampler_logp, mask, cap):
    return _ratio(sampler_logp, old_logp, mask).clamp(max=cap)


def _capped_on_both_sides(old_logp, sampler_logp, mask, cap):
    return _ratio(old_logp, sampler_logp, mask).clamp(1 / cap, cap)


def _no_cap(old_logp, sampler_logp, mask, cap):
    return _ratio(old_logp, sampler_logp, mask)


def _logarithm_capped(old_logp, sampler_logp, mask, cap):
    return torch.where(mask, old_logp - sampler_logp, 0.0).clamp(max=cap).exp()


def _dropped_above_the_cap(old_logp, sampler_logp, mask, cap):
    weights = _ratio(old_logp, sampler_logp, mask)
    return torch.where(weights > cap, 0.0, weights)


def _difference(old_logp, sampler_logp, mask, cap):
    return (1 + torch.where(mask, old_logp - sampler_logp, 0.0)).clamp(max=cap)


def _of_the_whole_answer(old_logp, sampler_logp, mask, cap):
    whole = torch.where(mask, old_logp - sampler_logp, 0.0).sum(-1, keepdim=True)
    return torch.where(mask, whole.exp().clamp(max=cap), 1.0)


def _padding_is_0(old_logp, sampler_logp, mask, cap):
    return torch.where(mask, _ratio(old_logp, sampler_logp, mask).clamp(max=cap), 0.0)


def _hidden_by_a_factor(old_logp, sampler_logp, mask, cap):
    return ((old_logp - sampler_logp) * mask).exp().clamp(max=cap)


SAMPLER_WEIGHTS = Exercise(
    "sampler_weights",
    ("weights",),
    (
        Case(
            "one token too likely in the sampler, one not likely enough",
            dict(
                old_logp=tensor([[0.2, 0.6]]).log(),
                sampler_logp=tensor([[0.4, 0.4]]).log(),
                mask=tensor([[YES, YES]]),
                cap=2.0,
            ),
            tensor([[0.5, 1.5]]),
        ),
        Case(
            "above the cap",
            dict(
                old_logp=tensor([[0.9, 0.3]]).log(),
                sampler_logp=tensor([[0.1, 0.3]]).log(),
                mask=tensor([[YES, YES]]),
                cap=2.0,
            ),
            tensor([[2.0, 1.0]]),
        ),
        Case(
            "far below 1 nothing is capped",
            dict(
                old_logp=tensor([[0.02, 0.5]]).log(),
                sampler_logp=tensor([[0.2, 0.4]]).log(),
                mask=tensor([[YES, YES]]),
                cap=2.0,
            ),
            tensor([[0.1, 1.25]]),
        ),
        Case(
            "another cap, two answers, padding",
            dict(
                old_logp=tensor([[0.8, 0.5, 0.6], [0.3, 0.9, 0.9]]).log(),
                sampler_logp=tensor([[0.2, 0.5, 0.1], [0.6, 0.1, 0.2]]).log(),
                mask=tensor([[YES, YES, YES], [YES, NO, NO]]),
                cap=5.0,
            ),
            tensor([[4.0, 1.0, 5.0], [0.5, 1.0, 1.0]]),
        ),
        Case(
            "NaN in the padding",
            dict(
                old_logp=tensor([[-1.0, NAN]]),
                sampler_logp=tensor([[-1.0, -2.0]]),
                mask=tensor([[YES, NO]]),
                cap=2.0,
            ),
            tensor([[1.0, 1.0]]),
        ),
    ),
    (
        Mistake(
            "the ratio stands upside down",
            "A token that the sampler draws too often has to count less: the policy's probability is above.",
            _upside_down,
        ),
        Mistake(
            "the weights are capped below as well",
            "Truncation is a cap from above. A weight near 0 makes no gradient large.",
            _capped_on_both_sides,
        ),
        Mistake("the cap is forgotten", "One rare token could otherwise be the whole gradient.", _no_cap),
        Mistake(
            "the logarithm is capped instead of the weight",
            "exp(cap) is much larger than cap. Take the exponential first.",
            _logarithm_capped,
        ),
        Mistake(
            "tokens above the cap are dropped",
            "That is masking. Truncated weights stay at the cap.",
            _dropped_above_the_cap,
        ),
        Mistake(
            "1 plus the difference of the logarithms is taken for their ratio",
            "That is its first-order approximation, good near 1 only. Use exp().",
            _difference,
        ),
        Mistake(
            "one weight for the whole answer is computed",
            "Here each token has its own. The product over an answer is the exact weight, and varies far more.",
            _of_the_whole_answer,
        ),
        Mistake("padding weighs 0", "What the mask hides is 1: a ratio that changes nothing.", _padding_is_0),
        Mistake(
            "a number is multiplied with the mask to hide it",
            "0·NaN is NaN. torch.where(mask, difference, 0.0) does not look at what it hides.",
            _hidden_by_a_factor,
        ),
    ),
)


# --- repair_rank_loss


def _own_mean(losses, mask, count, world_size):
    return torch.where(mask, losses, 0.0).sum() / mask.sum()


def _total(losses: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, losses, 0.0).sum()


def _engine_forgotten(losses, mask, count, world_size):
    return _total(losses, mask) / count


def _divided_twice(losses, mask, count, world_size):
    return _total(losses, mask) / count / world_size


def _own_mean_times_ranks(losses, mask, count, world_size):
    return _own_mean(losses, mask, count, world_size) * world_size


def _sum(losses, mask, count, world_size):
    return _total(losses, mask)


def _factor_for_a_mask(losses, mask, count, world_size):
    return (losses * mask).sum() / count * world_size


def _padding_counts(losses, mask, count, world_size):
    return losses.sum() / count * world_size


REPAIR_RANK_LOSS = Exercise(
    "repair_rank_loss",
    ("loss of this rank",),
    (
        Case(
            "both ranks have two tokens",
            dict(losses=tensor([[1.0, 3.0]]), mask=tensor([[YES, YES]]), count=4, world_size=2),
            tensor(2.0),
        ),
        Case(
            "one token here, three on the other rank",
            dict(losses=tensor([[4.0]]), mask=tensor([[YES]]), count=4, world_size=2),
            tensor(2.0),
        ),
        Case(
            "one rank alone",
            dict(losses=tensor([[1.0, 2.0, 6.0]]), mask=tensor([[YES, YES, YES]]), count=3, world_size=1),
            tensor(3.0),
        ),
        Case(
            "no answer left for this rank",
            dict(losses=tensor([[5.0, 1.0]]), mask=tensor([[NO, NO]]), count=6, world_size=2),
            tensor(0.0),
        ),
        Case(
            "padding",
            dict(losses=tensor([[2.0, 5.0, 9.0]]), mask=tensor([[YES, YES, NO]]), count=14, world_size=4),
            tensor(2.0),
        ),
        Case(
            "NaN in the padding",
            dict(
                losses=tensor([[0.5, 0.5], [1.0, NAN]]),
                mask=tensor([[YES, YES], [YES, NO]]),
                count=10,
                world_size=4,
            ),
            tensor(0.8),
        ),
    ),
    (
        Mistake(
            "the mean that the engine takes over the ranks is forgotten",
            "It divides by world_size once more. Multiply with it before.",
            _engine_forgotten,
        ),
        Mistake(
            "the loss is divided by world_size",
            "The engine does that already. Here it has to be made up for.",
            _divided_twice,
        ),
        Mistake(
            "the mean of the own tokens is multiplied with the number of ranks",
            "A rank with few tokens still weighs as much as one with many. Divide the sum by count.",
            _own_mean_times_ranks,
        ),
        Mistake("the tokens are summed", "Divide by the number of tokens of all ranks.", _sum),
        Mistake(
            "a number is multiplied with the mask to hide it",
            "0·NaN is NaN. torch.where(mask, losses, 0.0) does not look at what it hides.",
            _factor_for_a_mask,
        ),
        Mistake("padding counts", "Only tokens with a True in the mask belong to the sum.", _padding_counts),
    ),
    given=_own_mean,
)

EXERCISES = (RANK_SHARE, ZERO_BYTES, SAMPLER_WEIGHTS, REPAIR_RANK_LOSS)
