"""The signs of sickness: one function per symptom, each with its threshold and what healthy runs show.

A function looks for its columns in a history and returns where the symptom begins and the sentence that says so, or
None. "Healthy" are the tuned runs of this lab: the preset `tiny`, PPO on CartPole and on LunarLander. The thresholds of
language models were measured with answers of about 10 words, 128 in a batch. nan compares false with everything, so a
cell that is missing never counts.

Book: §13.8
"""

import math
from collections.abc import Callable, Iterable
from itertools import pairwise
from statistics import median

from ppo_lab.diagnostics.history import History

Sign = tuple[int, str]


def first_ratio(run: History) -> Sign | None:
    """The ratio is not 1 before the first step: old_logp is not that of the policy which the update starts from.

    first_approx_kl, the mean over the tokens of the first minibatch, above 0.002 nats. Healthy: 10⁻¹³ in float32, 10⁻⁴
    at most in bfloat16. A policy that is two iterations old makes 0.003, one of four 0.012 or more. A record without
    that column has the maximum alone, ratio_deviation = max |log ρ|, of which rounding in bfloat16 makes 0.05 and more,
    the more tokens there are: above 1.
    """
    if known(run["first_approx_kl"]):
        return above(run, "first_approx_kl", 0.002)
    return above(run, "ratio_deviation", 1)


def sampler_mismatch(run: History) -> Sign | None:
    """The answers were written by another policy than the one that is trained.

    sampler_kl above 0.01 nats per token, more than most healthy updates move the policy, in 3 rows on end: a wrong mask
    shows here too, and has said what it is by then. Healthy: 0 in float32; the largest difference of log-probabilities
    seen in bfloat16, 0.05, makes 0.001 where all tokens have it.
    """
    start = lasting(run, run["sampler_kl"], lambda value: value > 0.01, 3)
    if start is None:
        return None
    return start, f"sampler_kl is {run['sampler_kl'][start]:.3g}, above 0.01, {since(run, start)}"


def negative_kl_coef(run: History) -> Sign | None:
    """β below 0, which pays for leaving the reference. No healthy run has it; 0 is allowed."""
    place = first_place(value < 0 for value in run["kl_coef"])
    return None if place is None else (place, f"kl_coef is {run['kl_coef'][place]:.3g}, below 0, {at(run, place)}")


def kl_spike(run: History) -> Sign | None:
    """The policy leaps: within one update, or away from the reference from one iteration to the next.

    approx_kl, the mean over the steps of an update, above 0.2 nats per token or action. Healthy: 0.024 at most on the
    reviews, 0.012 for PPO in classic control and 0.1 for PPO-penalty, which has no clip.
    kl_per_response more than 3 times the largest of the four iterations before, and more than 3 nats above it: with few
    answers in a batch, less is noise. Healthy: 0.8 nats at most.
    """
    return earliest(above(run, "approx_kl", 0.2), leap_of_kl(run))


def leap_of_kl(run: History) -> Sign | None:
    """kl_per_response leaves its last four rows behind; part of `kl_spike`."""
    kl, numbers = run["kl_per_response"], run.iterations
    for place in range(1, len(kl)):
        if numbers[place] != numbers[place - 1] + 1:
            continue
        rows = [i for i in range(max(0, place - 4), place) if run.stretch[i] == run.stretch[place]]
        before = max([0.0, *known(kl[i] for i in rows)])
        if kl[place] > 3 * before and kl[place] > before + 3:
            leap = f"from {before:.3g} at most in the rows before to {kl[place]:.3g} nats, more than 3 times"
            return place, f"kl_per_response leaps {leap}, {at(run, place)}"
    return None


def kl_too_large(run: History) -> Sign | None:
    """The policy has left the reference: kl_per_response above 2.8·√(response_length) nats.

    That is 0.8 nats per token for 12 tokens, where it was measured: healthy 0.34 at most with β = 0.1, 0.58 under a
    controller that aims at 3 nats per response; with β = 0 it grows to 1.3 and beyond. Longer answers were not measured
    here. Others aim at 6 to 10 nats for a summary of 50 tokens and end at some tens for answers of hundreds: a limit
    per token would pass over 200 nats in 512 tokens, and one per response would refuse tens. The root lies between: 20
    nats for 50 tokens, 63 for 512.
    """
    kl, limits = run["kl_per_response"], kl_limits(run)
    place = first_place(value > limit for value, limit in zip(kl, limits, strict=True))
    if place is None:
        return None
    per_token = kl[place] / run["response_length"][place]
    numbers = f"{kl[place]:.3g} nats per response ({per_token:.2g} per token)"
    return place, f"the KL to the reference is {numbers}, above {limits[place]:.3g} for this length, {at(run, place)}"


def kl_limits(run: History) -> list[float]:
    """The largest kl_per_response that is in order, row by row; part of `kl_too_large`."""
    return [2.8 * math.sqrt(length) if length > 0 else math.nan for length in run["response_length"]]


def loss_explosion(run: History) -> Sign | None:
    """The losses are in other units than the models, or they diverge.

    value_loss of a language model above 20: scaled rewards end at ±5, and a critic that says 0 then has ½·5² = 12.5.
    Healthy: 0.41 at most. In control a reward has any unit, so there it is 100 times the median of its first five rows,
    in a row whose return is no new best: where rewards are rare, the first success is a large loss. Healthy: 4 times.
    grad_norm above 20 times the median of its first five rows that are not 0. Healthy: 3 times.
    """
    if known(run["kl_per_response"]):
        return earliest(above(run, "value_loss", 20), growing(run, "grad_norm", 20))
    best, rises = -math.inf, []
    for value in run["episode_return"]:
        rises.append(value > best)
        best = max(best, value)
    return growing(run, "value_loss", 100, excused=rises)


def growing(run: History, name: str, factor: float, excused: list[bool] | None = None) -> Sign | None:
    """A column above a multiple of the median of its first five positive rows; part of `loss_explosion`."""
    values = run[name]
    first = [value for value in known(values) if value > 0][:5]
    if len(first) < 5:
        return None
    start = median(first)
    excused = excused or [False] * len(values)
    place = first_place(value > factor * start and not free for value, free in zip(values, excused, strict=True))
    if place is None:
        return None
    return place, f"{name} is {values[place]:.3g}, above {factor} times its start of {start:.3g}, {at(run, place)}"


def stuck_value_loss(run: History) -> Sign | None:
    """The critic is trained and learns nothing.

    explained_variance below 0.02 in 12 rows on end, over which value_loss falls by less than 15 %, first three against
    last three. Healthy: 4 rows with a critic that starts from the reward model, 10 with one from the actor, and
    value_loss falls by a quarter or more over them. Late in a solved task the returns are all the same and nothing is
    left to explain, so rows with a value_loss below a tenth of its start do not count. Nor do rows of one step per
    rollout (approx_kl = 0: A2C, REINFORCE): their critic has had few chances.
    """
    loss, explained = run["value_loss"], run["explained_variance"]
    least = next(iter(known(loss)), math.nan) / 10
    tried = [
        i for i, moved in enumerate(run["approx_kl"]) if moved > 0 and loss[i] > least and math.isfinite(explained[i])
    ]
    for rows in windows(run, tried, 12):
        if all(explained[i] < 0.02 for i in rows):
            before, after = (mean(loss[i] for i in some) for some in (rows[:3], rows[-3:]))
            if after >= 0.85 * before:
                numbers = f"explained_variance is below 0.02 while value_loss goes from {before:.3g} to {after:.3g}"
                return rows[0], f"{numbers} in 12 iterations, {since(run, rows[0])}"
    return None


def degenerate_advantages(run: History) -> Sign | None:
    """All answers are worth the same, and what whitening blows up is noise.

    advantage_std, before whitening, below 0.001 in 3 rows on end. Healthy: 0.07 at least. A critic's errors and the KL
    keep it larger though all answers score alike: then score is the same number, to 6 digits, in 5 rows on end.
    Healthy: five differ by half a percent at least.
    """
    start = lasting(run, run["advantage_std"], lambda value: value < 0.001, 3)
    narrow = None if start is None else (start, f"advantage_std is below 0.001, {since(run, start)}")
    score = run["score"]
    for rows in windows(run, [i for i, value in enumerate(score) if math.isfinite(value)], 5):
        values = [score[i] for i in rows]
        if max(values) - min(values) <= 1e-6 * abs(values[0]):
            spread = f"while advantage_std is {run['advantage_std'][rows[0]]:.3g}"
            equal = rows[0], f"score is {values[0]:.6g} in 5 iterations, {spread}, {since(run, rows[0])}"
            return earliest(narrow, equal)
    return narrow


def reward_hacking(run: History) -> Sign | None:
    """The reward model is pleased and the text gets worse.

    With a judge's column gold, which training never sees: the mean of 5 rows has fallen by more than half of what it
    had risen, and by more than 4 times the usual step from row to row, while score has not fallen. Healthy: it falls by
    a tenth of its rise. With a judge's column repetitive: above 0.3 in 3 rows on end. Healthy: 0.15 at most. Without a
    judge: a KL that is too large (`kl_too_large`), entropy below 0.7 of its start, score still above it.
    """
    repeated = lasting(run, run["repetitive"], lambda value: value > 0.3, 3)
    sign = None
    if repeated is not None:
        sign = repeated, f"repetitive is above 0.3, {since(run, repeated)}"
    without_judge = None if known(run["gold"]) else unjudged_hacking(run)
    return earliest(falling_gold(run), sign, without_judge)


def falling_gold(run: History) -> Sign | None:
    """score holds and gold falls; part of `reward_hacking`. Begins where gold was best."""
    gold, score = run["gold"], run["score"]
    places = [i for i in range(len(run)) if math.isfinite(gold[i] + score[i])]
    if len(places) < 6:
        return None
    step = mean(abs(gold[after] - gold[before]) for before, after in pairwise(places))
    means = [
        (rows, *(mean(column[i] for i in rows) for column in (gold, score, run["unfinished"])))
        for rows in windows(run, places, 5)
    ]
    best = first = means[0] if means else None
    for rows, now, score_now, cut in means:
        best = (rows, now, score_now) if now > best[1] else best
        fall, rise = best[1] - now, best[1] - first[1]
        # Where the limit cuts many answers, their length explains the fall: `endless_answers`.
        if fall > rise / 2 and fall > 4 * step and score_now >= best[2] and not cut > 0.2:
            start = best[0][2]
            numbers = f"gold has fallen from {best[1]:.2f} to {now:.2f}, more than half of its rise, while score"
            return start, f"{numbers} went from {best[2]:.2f} to {score_now:.2f}, {since(run, start)}"
    return None


def unjudged_hacking(run: History) -> Sign | None:
    """The score stands high, far from the reference and with little entropy; part of `reward_hacking`."""
    kl, entropy, score, limits = run["kl_per_response"], run["entropy"], run["score"], kl_limits(run)
    first_entropy, first_score = (next(iter(known(values)), math.nan) for values in (entropy, score))
    place = first_place(
        far > limit and left < 0.7 * first_entropy and now > first_score
        for far, limit, left, now in zip(kl, limits, entropy, score, strict=True)
    )
    if place is None:
        return None
    numbers = f"{kl[place]:.3g} nats (above {limits[place]:.3g}) and entropy at {entropy[place] / first_entropy:.0%}"
    return place, f"score rises with the KL at {numbers} of its start (below 70 %), {at(run, place)}"


def collapsed_entropy(run: History) -> Sign | None:
    """The policy has stopped trying anything else.

    A language model: entropy below a quarter of the first row's. Healthy: half of it. In control a solved task ends
    like this too, so there it is 5 % and the return must be short of its best by a tenth of what it had gained.
    Healthy: 26 % at least.
    """
    entropy, returns = run["entropy"], run["episode_return"]
    start = next((value for value in entropy if value > 0), math.nan)
    if known(returns):
        limit = "5 %"
        fallen = short_of_best(returns)
        place = first_place(value < start / 20 and short for value, short in zip(entropy, fallen, strict=True))
    else:
        limit = "a quarter"
        place = first_place(value < start / 4 for value in entropy)
    if place is None:
        return None
    return place, f"entropy is {entropy[place]:.3g}, below {limit} of its start of {start:.3g}, {at(run, place)}"


def short_of_best(returns: list[float]) -> list[bool]:
    """Where the return has lost a tenth of what it had gained; part of `collapsed_entropy`."""
    lowest, best, short = math.inf, -math.inf, []
    for value in returns:
        lowest, best = min(lowest, value), max(best, value)
        short.append(value < best - (best - lowest) / 10)
    return short


def wrong_mask(run: History) -> Sign | None:
    """Numbers that no mask of whole answers gives.

    kl_per_response below −0.5 nats: an average over answers may fall below 0 by its noise. Healthy: −0.008 at least.
    Answers of another policy may have it too, so where there is a `sampler_mismatch` it counts only if response_length
    is a whole number, as where padding makes all answers equally long.
    response_length too short for unfinished: an answer that was cut is as long as the limit, which no mean exceeds.
    """
    kl, lengths = run["kl_per_response"], run["response_length"]
    place = first_place(
        value < -0.5 and not (sampler > 0.01 and length % 1 != 0)
        for value, sampler, length in zip(kl, run["sampler_kl"], lengths, strict=True)
    )
    negative = None if place is None else (place, f"kl_per_response is {kl[place]:.3g}, below -0.5, {at(run, place)}")
    place = first_place(cut_too_short(run))
    if place is None:
        return negative
    share = f"{run['unfinished'][place]:.0%} of the answers count as cut by the length limit"
    least = run["unfinished"][place] * math.ceil(max(known(lengths)))
    return earliest(
        negative, (place, f"{share}, but response_length is {lengths[place]:.3g}, below {least:.3g}, {at(run, place)}")
    )


def cut_too_short(run: History) -> list[bool]:
    """Where the mean length is below the share of cut answers times the limit; part of `wrong_mask`."""
    longest = math.ceil(max(known(run["response_length"]), default=0))
    pairs = zip(run["unfinished"], run["response_length"], strict=True)
    return [share > 0.3 and length < 0.99 * share * longest for share, length in pairs]


def endless_answers(run: History) -> Sign | None:
    """Answers do not end: unfinished above 0.3 in 5 rows on end. Healthy: 0.08 at most."""
    possible = [
        math.nan if wrong else share for share, wrong in zip(run["unfinished"], cut_too_short(run), strict=True)
    ]
    place = lasting(run, possible, lambda share: share > 0.3, 5)
    if place is None:
        return None
    length = run["response_length"][place]
    return place, f"unfinished is above 0.3 (response_length {length:.3g} there), {since(run, place)}"


def empty_answers(run: History) -> Sign | None:
    """Answers that are an EOS and nothing else: empty above 0.3 in 3 rows on end. Healthy: 0."""
    start = lasting(run, run["empty"], lambda value: value > 0.3, 3)
    return None if start is None else (start, f"empty is above 0.3, {since(run, start)}")


def small_clip_range(run: History) -> Sign | None:
    """The clip stops every step: clip_fraction above 0.15 in 5 rows on end whose mean approx_kl is below 0.005.

    With ε = 0.2 an update that clips so much has moved by 0.01 or more. Healthy: clip_fraction 0.02 on the reviews, 0.1
    for PPO in control.
    """
    clipped, moved = run["clip_fraction"], run["approx_kl"]
    for rows in windows(run, [i for i in range(len(run)) if math.isfinite(clipped[i] + moved[i])], 5):
        if all(clipped[i] > 0.15 for i in rows) and (kl := mean(moved[i] for i in rows)) < 0.005:
            numbers = f"clip_fraction is above 0.15 though approx_kl is {kl:.2g}, below 0.005"
            return rows[0], f"{numbers}, {since(run, rows[0])}"
    return None


def frozen_actor(run: History) -> Sign | None:
    """Steps are taken and the policy stays: approx_kl below 10⁻⁷ in 8 rows on end.

    Healthy: 10⁻⁴ at least, 10⁻⁶ in the last iteration of a learning rate that falls to 0. In bfloat16 rounding makes
    10⁻⁵ of nothing; there it is approx_kl below 10⁻⁴ and kl_per_response within ±0.001, in 16 rows on end. Healthy:
    0.02 in the second iteration. Rows that prove nothing do not count: those of a single step, before which ρ is 1,
    those without a gradient, in which the critic warms up, and those with less than a tenth of the first entropy,
    whose policy is certain and need not move. Solved probes of `ppo_lab.control.probes` have 2 %.
    """
    entropy, norms = run["entropy"], run["grad_norm"]
    least = next(iter(known(entropy)), math.nan) / 10
    no_norms = not known(norms)
    proof = [
        steps > 1 and (no_norms or norm > 0) and not left <= least
        for steps, norm, left in zip(run["updates"], norms, entropy, strict=True)
    ]
    moved = [value if counts else math.nan for value, counts in zip(run["approx_kl"], proof, strict=True)]
    place = lasting(run, moved, lambda value: value < 1e-7, 8)
    sign = None if place is None else (place, f"approx_kl is below 1e-7 after several steps, {since(run, place)}")
    kl = run["kl_per_response"]
    moved = [value if abs(far) < 1e-3 else math.inf for value, far in zip(moved, kl, strict=True)]
    place = lasting(run, moved, lambda value: value < 1e-4, 16)
    if place is None:
        return sign
    text = f"approx_kl is below 1e-4 and kl_per_response within 0.001 of 0 after several steps, {since(run, place)}"
    return earliest(sign, (place, text))


def out_of_memory(run: History) -> Sign | None:
    """memory_gb above 0.9 of memory_limit_gb: a longer batch of answers will not fit."""
    used, limits = run["memory_gb"], run["memory_limit_gb"]
    place = first_place(now > 0.9 * limit for now, limit in zip(used, limits, strict=True))
    if place is None:
        return None
    return place, f"memory_gb is {used[place]:.3g}, above 0.9 of the {limits[place]:.3g} there are, {at(run, place)}"


def slow_rollout(run: History) -> Sign | None:
    """A step of generating, one token of each answer, takes longer than scoring the whole answers; median of 3 rows.

    That is seconds_generate ÷ response_length > seconds_score. Batched and with a cache, a step is one pass of one
    model over the newest tokens, and cannot cost more than the passes of all models over all tokens. Healthy: 0.13 of
    it, the tiny model in batches of 128; one prompt at a time, 1.5. Only where generating takes more than 0.7 of the
    time of all phases: there it matters. The share alone says little: small models on a GPU have 0.79 when all is well.
    """
    names = ("seconds_generate", "seconds_score", "seconds_update", "response_length")
    rows = [row for row in zip(*(run[name] for name in names), strict=True) if sum(row[:3]) > 0 and row[3] > 0]
    if len(rows) < 3:
        return None
    share = median(generate / (generate + scoring + update) for generate, scoring, update, _ in rows)
    step, scoring = median(row[0] / row[3] for row in rows), median(row[1] for row in rows)
    if not (share > 0.7 and step > scoring):
        return None
    numbers = f"{step:.2g} s per token of an answer, above the {scoring:.2g} s for scoring whole answers"
    return 0, f"generating takes {share:.0%} of the time, {numbers}, {since(run, 0)}"


def non_finite(run: History) -> Sign | None:
    """A number is infinite, or the policy's loss is nan after steps were taken."""
    signs = []
    for name, column in run.columns.items():
        if all(map(math.isfinite, column)):
            continue
        lost = name in ("policy_loss", "policy")
        place = first_place(
            math.isinf(value) or (lost and math.isnan(value) and steps > 0)
            for value, steps in zip(column, run["updates"], strict=True)
        )
        if place is not None:
            signs.append((place, f"{name} is {column[place]}, {at(run, place)}"))
    return earliest(*signs)


def above(run: History, name: str, limit: float) -> Sign | None:
    """The first row in which a column is above a limit."""
    place = first_place(value > limit for value in run[name])
    return None if place is None else (place, f"{name} is {run[name][place]:.3g}, above {limit:g}, {at(run, place)}")


def at(run: History, place: int) -> str:
    return f"in iteration {run.iterations[place]}"


def since(run: History, place: int) -> str:
    return f"since iteration {run.iterations[place]}"


def earliest(*signs: Sign | None) -> Sign | None:
    """The sign that begins first; of several, the one named first."""
    return min((sign for sign in signs if sign is not None), key=lambda sign: sign[0], default=None)


def first_place(conditions: Iterable[bool]) -> int | None:
    """The first place where a condition holds."""
    return next((place for place, holds in enumerate(conditions) if holds), None)


def lasting(run: History, values: list[float], holds: Callable[[float], bool], n_rows: int) -> int | None:
    """Where the first n_rows values on end begin that all fulfil a condition; nan values are passed over."""
    start, length = 0, 0
    for place, value in enumerate(values):
        if math.isnan(value):
            continue
        if not holds(value):
            length = 0
            continue
        if length == 0 or run.stretch[place] != run.stretch[start]:
            start, length = place, 0
        length += 1
        if length == n_rows:
            return start
    return None


def windows(run: History, places: list[int], n_rows: int) -> Iterable[list[int]]:
    """Every n_rows neighbours of a list of places, between which no rows are left out."""
    some = (places[i : i + n_rows] for i in range(len(places) - n_rows + 1))
    return (rows for rows in some if run.stretch[rows[0]] == run.stretch[rows[-1]])


def known(values: Iterable[float]) -> list[float]:
    """The finite values."""
    return [value for value in values if math.isfinite(value)]


def mean(values: Iterable[float]) -> float:
    """The mean; unlike that of the library it is infinite where a sum is, and does not raise."""
    values = list(values)
    return sum(values) / len(values)
