"""Exercises of chapter 8, diagnosis (§13.8). Wrong answers are written as a reader would, without types."""

import math

import torch
from torch import Tensor, tensor

from ppo_lab.exercises.anonymous_runs import HELD_OUT, RUNS
from ppo_lab.exercises.kit import Case, Exercise, Mistake

NO, YES = False, True
NAN = math.nan


# --- find_kl_spike


def _means_before(kl: Tensor, window: int) -> list[float]:
    """For each iteration but the first, the mean of the up to `window` ones before it."""
    return [float(kl[max(0, i - window) : i].mean()) for i in range(1, len(kl))]


def _spikes(kl: Tensor, window: int, factor: float, floor: float) -> list[int]:
    means = enumerate(_means_before(kl, window), start=1)
    return [i for i, mean in means if kl[i] > floor and kl[i] > factor * mean]


def _first(places: list[int]) -> int:
    return places[0] if places else -1


def _largest(kl, window, factor, floor):
    highest = int(kl.argmax())
    return highest if highest in _spikes(kl, window, factor, floor) else -1


def _highest_of_all(kl, window, factor, floor):
    return int(kl.argmax())


def _absolute_threshold(kl, window, factor, floor):
    return _first([i for i, x in enumerate(kl.tolist()) if x > floor])


def _floor_ignored(kl, window, factor, floor):
    return _first(_spikes(kl, window, factor, -math.inf))


def _one_too_early(kl, window, factor, floor):
    return max(_first(_spikes(kl, window, factor, floor)) - 1, -1)


def _last_jump(kl, window, factor, floor):
    return _first(_spikes(kl, window, factor, floor)[::-1])


def _against_the_first(kl, window, factor, floor):
    return _first([i for i, x in enumerate(kl.tolist()) if x > floor and x > factor * kl[0]])


def _against_the_one_before(kl, window, factor, floor):
    return _first(_spikes(kl, 1, factor, floor))


def _against_all_before(kl, window, factor, floor):
    return _first(_spikes(kl, len(kl), factor, floor))


def _itself_in_the_mean(kl, window, factor, floor):
    means = [float(kl[max(0, i - window + 1) : i + 1].mean()) for i in range(len(kl))]
    return _first([i for i, mean in enumerate(means) if kl[i] > floor and kl[i] > factor * mean])


def _factor_as_nats(kl, window, factor, floor):
    means = enumerate(_means_before(kl, window), start=1)
    return _first([i for i, mean in means if kl[i] > floor and kl[i] - mean > factor])


def _series(
    kl: list[float], expected: int, name: str, window: int = 3, factor: float = 4.0, floor: float = 1.0
) -> Case:
    return Case(name, dict(kl=tensor(kl), window=window, factor=factor, floor=floor), tensor(expected))


FIND_KL_SPIKE = Exercise(
    "find_kl_spike",
    ("iteration",),
    (
        _series([0.0, 1.0, 1.5, 2.0, 2.5, 25.0, 40.0, 38.0], 5, "slowly up, then tenfold"),
        _series([0.0, 0.5, 0.9, 1.4, 2.2, 3.2, 4.5, 6.5], -1, "slowly up, to a large KL"),
        _series([0.01, 0.02, 0.3, 0.9, 0.8, 0.9, 1.2], -1, "a jump below the floor"),
        _series([2.0, 9.0, 3.0, 3.0, 3.0, 30.0], 1, "two spikes, the second is higher"),
        _series([1.0, 1.0, 5.0, 7.0, 9.0, 12.0], 2, "a policy that stays where it went"),
        _series([6.0, 1.0, 1.0, 6.5, 1.0, 1.0, 1.0, 6.5], 7, "the mean of three, not of all", factor=3.0),
        _series([0.0, 0.0, 0.0, 8.0, 9.0], 3, "nothing at all before"),
        _series([4.0, 2.0, 4.0, 2.0, 9.0, 2.0], -1, "noise, and a high iteration that is no spike"),
        _series([5.0, 6.0, 5.0, 6.0], -1, "high from the start"),
        _series([1.0, 3.0, 3.0, 8.0], -1, "below the factor", window=2),
    ),
    (
        Mistake(
            "the spike has to be the largest value of the run",
            "After the first jump the KL often goes on rising. Where did it begin?",
            _largest,
        ),
        Mistake(
            "the iteration with the largest KL is returned",
            "A KL that rises slowly and steadily is largest at the end, without any spike.",
            _highest_of_all,
        ),
        Mistake(
            "the KL is compared with the floor alone",
            "A healthy run passes any fixed number of nats, slowly. A spike is large beside what came before.",
            _absolute_threshold,
        ),
        Mistake(
            "the floor is ignored",
            "Close to 0 the estimate is all noise, and 0.3 after 0.02 means nothing.",
            _floor_ignored,
        ),
        Mistake(
            "the iteration before the spike is returned",
            "The list of means begins at iteration 1: its first entry belongs to kl[1].",
            _one_too_early,
        ),
        Mistake("the last spike is returned", "The first one is the cause; the others may follow from it.", _last_jump),
        Mistake(
            "the KL is compared with the very first one",
            "A slow rise reaches any multiple of the start. Compare with the iterations just before.",
            _against_the_first,
        ),
        Mistake(
            "the KL is compared with one iteration only",
            "One low estimate before would make noise a spike. Take the mean of the window.",
            _against_the_one_before,
        ),
        Mistake(
            "the mean runs over all iterations before",
            "An old spike would hide a new one. Only the last `window` count.",
            _against_all_before,
        ),
        Mistake(
            "the mean contains the iteration itself",
            "A spike then hides behind itself: with a window of 3 no factor above 3 is ever reached.",
            _itself_in_the_mean,
        ),
        Mistake(
            "the factor is taken as a number of nats",
            "Compare kl[i] with factor times the mean, not with the mean plus factor.",
            _factor_as_nats,
        ),
    ),
)


# --- ratio_report


def _ratios(logp: Tensor, old_logp: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, logp - old_logp, 0.0).exp()


def _row_mean(x: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, x, 0.0).sum(-1) / mask.sum(-1)


def _report(rho: Tensor, mask: Tensor, eps_clip: float) -> tuple[Tensor, Tensor, Tensor]:
    outside = ((rho - 1).abs() > eps_clip).float()
    return (
        _row_mean(rho - 1 - rho.log(), mask),
        _row_mean(outside, mask),
        torch.where(mask, rho, 0.0).max(-1).values,
    )


def _mean_of_the_epoch(logp, old_logp, mask, eps_clip):
    rho = _ratios(logp, old_logp, mask)
    epoch = _report(rho.flatten()[None], mask.flatten()[None], eps_clip)
    return tuple(x.expand(len(mask)) for x in epoch)


def _padding_counted(logp, old_logp, mask, eps_clip):
    return _report((logp - old_logp).exp(), torch.ones_like(mask), eps_clip)


def _padding_as_ratio_1(logp, old_logp, mask, eps_clip):
    return _report(_ratios(logp, old_logp, mask), torch.ones_like(mask), eps_clip)


def _largest_with_padding(logp, old_logp, mask, eps_clip):
    rho = _ratios(logp, old_logp, mask)
    return *_report(rho, mask, eps_clip)[:2], rho.max(-1).values


def _upside_down(logp, old_logp, mask, eps_clip):
    return _report(_ratios(old_logp, logp, mask), mask, eps_clip)


def _mean_log_ratio(logp, old_logp, mask, eps_clip):
    rho = _ratios(logp, old_logp, mask)
    return -_row_mean(rho.log(), mask), *_report(rho, mask, eps_clip)[1:]


def _squared_log_ratio(logp, old_logp, mask, eps_clip):
    rho = _ratios(logp, old_logp, mask)
    return _row_mean(rho.log().square() / 2, mask), *_report(rho, mask, eps_clip)[1:]


def _log_ratio_outside(logp, old_logp, mask, eps_clip):
    rho = _ratios(logp, old_logp, mask)
    kl, _, largest = _report(rho, mask, eps_clip)
    return kl, _row_mean((rho.log().abs() > eps_clip).float(), mask), largest


def _only_above(logp, old_logp, mask, eps_clip):
    rho = _ratios(logp, old_logp, mask)
    kl, _, largest = _report(rho, mask, eps_clip)
    return kl, _row_mean((rho > 1 + eps_clip).float(), mask), largest


def _largest_distance(logp, old_logp, mask, eps_clip):
    rho = _ratios(logp, old_logp, mask)
    return *_report(rho, mask, eps_clip)[:2], rho.log().abs().max(-1).values.exp()


def _mask_as_a_factor(logp, old_logp, mask, eps_clip):
    rho = (logp - old_logp).exp()
    outside = ((rho - 1).abs() > eps_clip).float()
    means = [(x * mask).sum(-1) / mask.sum(-1) for x in (rho - 1 - rho.log(), outside)]
    return *means, (rho * mask).max(-1).values


def _updates(new: list, old: list, mask: list, eps_clip: float) -> dict:
    """Probabilities of the taken tokens after and before, one row per minibatch."""
    return dict(logp=tensor(new).log(), old_logp=tensor(old).log(), mask=tensor(mask), eps_clip=eps_clip)


RATIO_REPORT = Exercise(
    "ratio_report",
    ("approx_kl", "share outside", "largest ratio"),
    (
        Case(
            "a minibatch near 1 and one further away",
            _updates([[0.5, 0.6], [0.25, 0.9]], [[0.5, 0.5], [0.5, 0.6]], [[YES, YES], [YES, YES]], 0.25),
            (tensor([0.008839, 0.143841]), tensor([0.0, 1.0]), tensor([1.2, 1.5])),
        ),
        Case(
            "padding",
            _updates(
                [[0.4, 0.1, 0.9], [0.3, 0.6, 0.1]],
                [[0.5, 0.9, 0.1], [0.6, 0.4, 0.2]],
                [[YES, NO, NO], [YES, YES, YES]],
                0.3,
            ),
            (tensor([0.023144, 0.160276]), tensor([0.0, 1.0]), tensor([0.8, 1.5])),
        ),
        Case(
            "the first minibatch of an update, then a second",
            _updates([[0.2, 0.7, 0.4], [0.3, 0.8, 0.6]], [[0.2, 0.7, 0.4], [0.2, 0.5, 0.8]], [[YES] * 3] * 2, 0.1),
            (tensor([0.0, 0.087404]), tensor([0.0, 1.0]), tensor([1.0, 1.6])),
        ),
        Case(
            "a token that the policy has nearly lost",
            _updates([[0.003, 0.55]], [[0.3, 0.5]], [[YES, YES]], 0.2),
            (tensor([1.809930]), tensor([0.5]), tensor([1.1])),
        ),
        Case(
            "NaN in the padding",
            dict(
                logp=tensor([[0.6, 0.5]]).log() * tensor([[1.0, NAN]]),
                old_logp=tensor([[0.4, 0.5]]).log(),
                mask=tensor([[YES, NO]]),
                eps_clip=0.2,
            ),
            (tensor([0.094535]), tensor([1.0]), tensor([1.5])),
        ),
        Case(
            "just inside on both sides",
            _updates([[0.405, 0.61]], [[0.5, 0.51]], [[YES, YES]], 0.2),
            (tensor([0.018876]), tensor([0.0]), tensor([1.196078])),
        ),
    ),
    (
        Mistake(
            "one mean over the whole epoch is reported",
            "Then index 0, where every ratio has to be 1, is not to be seen any more. One number for each row.",
            _mean_of_the_epoch,
        ),
        Mistake("padding counts", "Only places with a True in the mask belong to the means.", _padding_counted),
        Mistake(
            "padding counts as a ratio of 1",
            "It makes short answers look as if the policy had hardly moved. Divide by mask.sum(-1).",
            _padding_as_ratio_1,
        ),
        Mistake(
            "padding enters the largest ratio as a 1",
            "When all ratios have fallen below 1, the largest is below 1. Put a 0 where the mask hides.",
            _largest_with_padding,
        ),
        Mistake(
            "the ratio stands upside down",
            "ρ = π_θ/π_old: the log-probability after the steps minus the one before.",
            _upside_down,
        ),
        Mistake(
            "approx_kl is the mean of −log ρ",
            "Single minibatches can then be negative, and a limit on it does not fire. Use ρ − 1 − log ρ.",
            _mean_log_ratio,
        ),
        Mistake(
            "approx_kl is half the squared log-ratio",
            "That agrees near 1 only. Use ρ − 1 − log ρ.",
            _squared_log_ratio,
        ),
        Mistake("the clip range is laid around log ρ = 0", "It is ρ that is clipped: |ρ − 1| > ε.", _log_ratio_outside),
        Mistake(
            "only ratios above 1 + ε are outside",
            "Below 1 − ε is outside as well.",
            _only_above,
        ),
        Mistake(
            "the largest distance from 1 is returned as a ratio",
            "A ratio of 0.01 is far away, but harmless: its term is small. The large ones carry the loss.",
            _largest_distance,
        ),
        Mistake(
            "a number is multiplied with the mask to hide it",
            "0·NaN is NaN. torch.where(mask, difference, 0.0) does not look at what it hides.",
            _mask_as_a_factor,
        ),
    ),
)


# --- which_failure


HEALTHY, KL_SPIKE, STUCK_CRITIC, REWARD_HACKING = range(4)


def _diagnosed(approx_kl: float, explained_variance: float, gold_lost: float) -> int:
    """KL first, then the critic, then the reward."""
    if approx_kl > 0.2:
        return KL_SPIKE
    if explained_variance < 0.05:
        return STUCK_CRITIC
    return REWARD_HACKING if gold_lost > 0.2 else HEALTHY


def _score_alone(score, gold, kl_per_response, approx_kl, explained_variance):
    return HEALTHY if score[-1] > score[0] else STUCK_CRITIC


def _distance_alone(score, gold, kl_per_response, approx_kl, explained_variance):
    return KL_SPIKE if kl_per_response.max() > 10 else HEALTHY


def _distance_first(score, gold, kl_per_response, approx_kl, explained_variance):
    return _diagnosed(float(kl_per_response.max()) / 50, float(explained_variance.max()), float(gold.max() - gold[-1]))


def _gold_first(score, gold, kl_per_response, approx_kl, explained_variance):
    if gold.max() - gold[-1] > 0.2:
        return REWARD_HACKING
    return _diagnosed(float(approx_kl.max()), float(explained_variance.max()), 0.0)


def _critic_first(score, gold, kl_per_response, approx_kl, explained_variance):
    if explained_variance[-1] < 0.05:
        return STUCK_CRITIC
    return _diagnosed(float(approx_kl.max()), float(explained_variance.max()), float(gold.max() - gold[-1]))


def _once_useless(score, gold, kl_per_response, approx_kl, explained_variance):
    return _diagnosed(float(approx_kl.max()), float(explained_variance.min()), float(gold.max() - gold[-1]))


def _critic_never_asked(score, gold, kl_per_response, approx_kl, explained_variance):
    return _diagnosed(float(approx_kl.max()), 1.0, float(gold.max() - gold[-1]))


def _last_update_alone(score, gold, kl_per_response, approx_kl, explained_variance):
    return _diagnosed(float(approx_kl[-1]), float(explained_variance.max()), float(gold.max() - gold[-1]))


def _against_the_start(score, gold, kl_per_response, approx_kl, explained_variance):
    return _diagnosed(float(approx_kl.max()), float(explained_variance.max()), float(gold[0] - gold[-1]))


def _unseen(*failures: int) -> list[Case]:
    """The runs that the reader has not seen, with what is wrong with each."""
    runs = enumerate(zip(HELD_OUT, failures, strict=True), start=1)
    return [Case(f"unseen run {number}", run, tensor(failure)) for number, (run, failure) in runs]


WHICH_FAILURE = Exercise(
    "which_failure",
    ("failure (0 healthy, 1 KL spike, 2 stuck critic, 3 reward hacking)",),
    (
        Case("run A", RUNS["A"], tensor(KL_SPIKE)),
        Case("run B", RUNS["B"], tensor(STUCK_CRITIC)),
        Case("run C", RUNS["C"], tensor(REWARD_HACKING)),
        *_unseen(KL_SPIKE, STUCK_CRITIC, REWARD_HACKING, HEALTHY, HEALTHY, REWARD_HACKING, KL_SPIKE),
    ),
    (
        Mistake(
            "the score is asked",
            "It rises in all of these runs: the policy learns what it is paid for, also when that is the failure.",
            _score_alone,
        ),
        Mistake(
            "only the KL to the reference is asked",
            "It is large after a spike and after reward hacking. How fast did it get there: what does approx_kl say?",
            _distance_alone,
        ),
        Mistake(
            "the KL to the reference tells the spike",
            "A policy that is paid for leaving gets far away in small steps too. approx_kl is the size of one update.",
            _distance_first,
        ),
        Mistake(
            "falling gold is called reward hacking, whatever the KL says",
            "A policy that was thrown far away writes worse, too. KL first: an update that was far too large.",
            _gold_first,
        ),
        Mistake(
            "the critic of the last iteration is asked first",
            "A spike ruins the critic as well. KL first, then the critic.",
            _critic_first,
        ),
        Mistake(
            "one bad explained variance makes a stuck critic",
            "Every critic begins near 0 or below. Stuck is one that never gets away from there.",
            _once_useless,
        ),
        Mistake(
            "the critic is not asked",
            "Score and gold look well in one of the runs, and its critic predicts nothing from first to last.",
            _critic_never_asked,
        ),
        Mistake(
            "only the last update is looked at",
            "After a spike the policy may stand still, where it was thrown. Take the largest approx_kl of the run.",
            _last_update_alone,
        ),
        Mistake(
            "gold is compared with its start",
            "A hacked run rises before it falls. Compare the end with the best.",
            _against_the_start,
        ),
    ),
)


# --- overoptimisation_point


def _by_kl(kl: Tensor, proxy: Tensor, gold: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    order = kl.argsort()
    return kl[order], proxy[order], gold[order]


def _turn(kl: Tensor, proxy: Tensor, gold: Tensor, place: int) -> tuple[Tensor, Tensor, Tensor]:
    """What is reported when gold turns at this place of the table, which is in the order of KL."""
    return kl[place], proxy[-1] - proxy[place], gold[place] - gold[-1]


def _peak_of_the_proxy(kl, proxy, gold):
    kl, proxy, gold = _by_kl(kl, proxy, gold)
    return _turn(kl, proxy, gold, int(proxy.argmax()))


def _end_of_the_run(kl, proxy, gold):
    kl, proxy, gold = _by_kl(kl, proxy, gold)
    return _turn(kl, proxy, gold, -1)


def _place_in_the_table(kl, proxy, gold):
    kl, proxy, gold = _by_kl(kl, proxy, gold)
    place = int(gold.argmax())
    return tensor(float(place)), *_turn(kl, proxy, gold, place)[1:]


def _not_sorted(kl, proxy, gold):
    return _turn(kl, proxy, gold, int(gold.argmax()))


def _last_of_equals(kl, proxy, gold):
    kl, proxy, gold = _by_kl(kl, proxy, gold)
    return _turn(kl, proxy, gold, len(gold) - 1 - int(gold.flip(0).argmax()))


def _gained_until_then(kl, proxy, gold):
    kl, proxy, gold = _by_kl(kl, proxy, gold)
    place = int(gold.argmax())
    return kl[place], proxy[place] - proxy[0], gold[place] - gold[0]


def _peak_to_peak(kl, proxy, gold):
    place = int(gold.argmax())
    return kl[place], proxy.max() - proxy[place], gold[place] - gold.min()


def _first_fall(kl, proxy, gold):
    kl, proxy, gold = _by_kl(kl, proxy, gold)
    falls = (gold.diff() < 0).nonzero()
    return _turn(kl, proxy, gold, int(falls[0]) if len(falls) else -1)


def _widest_gap(kl, proxy, gold):
    kl, proxy, gold = _by_kl(kl, proxy, gold)
    return _turn(kl, proxy, gold, int((proxy - gold).argmax()))


def _curve(kl: list[float], proxy: list[float], gold: list[float]) -> dict:
    return dict(kl=tensor(kl), proxy=tensor(proxy), gold=tensor(gold))


OVEROPTIMISATION_POINT = Exercise(
    "overoptimisation_point",
    ("KL of the turn", "proxy gained after it", "gold lost after it"),
    (
        Case(
            "gold turns at 5 nats, the proxy goes on",
            _curve([0.0, 2.0, 5.0, 10.0, 20.0], [0.0, 1.0, 1.8, 2.4, 2.7], [0.0, 0.3, 0.5, 0.2, -0.3]),
            (tensor(5.0), tensor(0.9), tensor(0.8)),
        ),
        Case(
            "the same points in another order",
            _curve([10.0, 0.0, 20.0, 5.0, 2.0], [2.4, 0.0, 2.7, 1.8, 1.0], [0.2, 0.0, -0.3, 0.5, 0.3]),
            (tensor(5.0), tensor(0.9), tensor(0.8)),
        ),
        Case(
            "gold has not turned yet",
            _curve([0.0, 1.0, 3.0], [0.1, 0.6, 1.0], [0.1, 0.2, 0.4]),
            (tensor(3.0), tensor(0.0), tensor(0.0)),
        ),
        Case(
            "the proxy falls at the end, too",
            _curve([0.0, 4.0, 9.0, 16.0], [0.0, 1.5, 2.5, 2.3], [0.1, 0.6, 0.3, 0.0]),
            (tensor(4.0), tensor(0.8), tensor(0.6)),
        ),
        Case(
            "gold falls from the first update on",
            _curve([0.0, 6.0, 30.0], [-0.2, 1.0, 2.0], [0.1, -0.5, -0.9]),
            (tensor(0.0), tensor(2.2), tensor(1.0)),
        ),
        Case(
            "a small dip, a higher peak, and a tie",
            _curve([0.5, 1.0, 2.0, 3.0, 4.0, 6.0], [0.0, 0.4, 1.4, 1.1, 1.4, 1.6], [0.0, 0.2, 0.1, 0.5, 0.5, 0.4]),
            (tensor(3.0), tensor(0.5), tensor(0.1)),
        ),
    ),
    (
        Mistake(
            "the peak of the proxy is taken",
            "The proxy is what is being optimised: it peaks long after gold has turned, or not at all.",
            _peak_of_the_proxy,
        ),
        Mistake(
            "the point with the largest KL is taken",
            "That is where the run was stopped, not where it should have been.",
            _end_of_the_run,
        ),
        Mistake(
            "the number of the row is returned",
            "Another learning rate gets as far in other iterations. The distance is kl[place].",
            _place_in_the_table,
        ),
        Mistake(
            "the last row is taken for the largest KL",
            "Points of several runs, or of a noisy one, are in no order. Sort by kl first.",
            _not_sorted,
        ),
        Mistake(
            "of equal gold scores the further one is taken",
            "For the same gold the nearer policy is the better one: the first maximum after sorting.",
            _last_of_equals,
        ),
        Mistake(
            "gain and loss are measured from the start to the turn",
            "The question is what happens after it: the point with the largest KL against the turn.",
            _gained_until_then,
        ),
        Mistake(
            "the highest proxy and the lowest gold are compared with the turn",
            "Compare two policies, not the extremes of two curves: the one at the turn and the furthest one.",
            _peak_to_peak,
        ),
        Mistake(
            "the first fall of gold is taken",
            "Gold is noisy, and may rise again. The turn is its highest point.",
            _first_fall,
        ),
        Mistake(
            "the widest gap between proxy and gold is taken",
            "They have different units, so their difference means nothing. Only gold says where gold turns.",
            _widest_gap,
        ),
    ),
)


# --- repair_first_ratio


def _chosen(log_probs: Tensor, response_ids: Tensor) -> Tensor:
    return log_probs.gather(-1, response_ids[..., None])[..., 0]


def _temperature_forgotten(logits, response_ids, old_logp, temperature):
    logp = _chosen(logits.log_softmax(-1), response_ids)
    return (logp - old_logp).exp()


def _temperature_multiplied(logits, response_ids, old_logp, temperature):
    return (_chosen((logits * temperature).log_softmax(-1), response_ids) - old_logp).exp()


def _divided_after_the_softmax(logits, response_ids, old_logp, temperature):
    return (_chosen(logits.log_softmax(-1), response_ids) / temperature - old_logp).exp()


def _old_logp_scaled(logits, response_ids, old_logp, temperature):
    return (_chosen(logits.log_softmax(-1), response_ids) - old_logp * temperature).exp()


def _both_scaled(logits, response_ids, old_logp, temperature):
    return (_chosen((logits / temperature).log_softmax(-1), response_ids) - old_logp / temperature).exp()


def _old_over_new(logits, response_ids, old_logp, temperature):
    return (old_logp - _chosen((logits / temperature).log_softmax(-1), response_ids)).exp()


def _compared_with_itself(logits, response_ids, old_logp, temperature):
    logp = _chosen((logits / temperature).log_softmax(-1), response_ids)
    return (logp - logp.detach()).exp()


def _left_as_a_logarithm(logits, response_ids, old_logp, temperature):
    return _chosen((logits / temperature).log_softmax(-1), response_ids) - old_logp


def _sampled(odds: list, response_ids: list, old_probs: list, temperature: float) -> dict:
    """Logits with these odds at temperature 1, and the probabilities that the sampler noted."""
    return dict(
        logits=tensor(odds).log(),
        response_ids=tensor(response_ids),
        old_logp=tensor(old_probs).log(),
        temperature=temperature,
    )


REPAIR_FIRST_RATIO = Exercise(
    "repair_first_ratio",
    ("ratio",),
    (
        Case(
            "before the first step, temperature 1",
            _sampled([[[1.0, 3.0], [4.0, 1.0]]], [[1, 1]], [[0.75, 0.2]], 1.0),
            tensor([[1.0, 1.0]]),
        ),
        Case(
            "before the first step, temperature 0.5",
            _sampled([[[1.0, 3.0], [2.0, 1.0]]], [[1, 1]], [[0.9, 0.2]], 0.5),
            tensor([[1.0, 1.0]]),
        ),
        Case(
            "before the first step, temperature 2",
            _sampled([[[4.0, 1.0], [1.0, 9.0]]], [[0, 0]], [[2 / 3, 0.25]], 2.0),
            tensor([[1.0, 1.0]]),
        ),
        Case(
            "after some steps, temperature 0.5",
            _sampled([[[1.0, 3.0], [2.0, 1.0]]], [[1, 0]], [[0.8, 0.5]], 0.5),
            tensor([[1.125, 1.6]]),
        ),
        Case(
            "after some steps, temperature 1",
            _sampled([[[1.0, 3.0]], [[4.0, 1.0]]], [[0], [1]], [[0.5], [0.1]], 1.0),
            tensor([[0.5], [2.0]]),
        ),
    ),
    (
        Mistake(
            "the logits are multiplied by the temperature",
            "A low temperature sharpens: dividing by 0.5 doubles the logits.",
            _temperature_multiplied,
        ),
        Mistake(
            "the log-probabilities are divided by the temperature",
            "Then the probabilities do not add up to 1. Divide the logits, before the softmax.",
            _divided_after_the_softmax,
        ),
        Mistake(
            "the log-probability of the sampler is scaled",
            "It is what the sampler did, and stays as it is. The trainer has to compute the same.",
            _old_logp_scaled,
        ),
        Mistake(
            "both log-probabilities are scaled",
            "old_logp holds the temperature already.",
            _both_scaled,
        ),
        Mistake("the ratio stands upside down", "ρ = π_θ/π_old.", _old_over_new),
        Mistake(
            "the policy is compared with itself",
            "That ratio is 1 for ever, also after a hundred steps, and nothing is ever clipped. Use old_logp.",
            _compared_with_itself,
        ),
        Mistake("the logarithm of the ratio is returned", "The ratio is exp() of it.", _left_as_a_logarithm),
    ),
    given=_temperature_forgotten,
)

EXERCISES = (FIND_KL_SPIKE, RATIO_REPORT, WHICH_FAILURE, OVEROPTIMISATION_POINT, REPAIR_FIRST_RATIO)
