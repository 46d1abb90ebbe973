"""The signs of sickness: one function per symptom, each with its threshold and what healthy runs show.

A function looks for its columns in a history and returns where the symptom begins and the sentence that says so, or
None. "Healthy" are the tuned runs of this lab: the preset `tiny`, PPO on CartPole and on LunarLander. nan compares
false with everything, so a cell that is missing never counts.
"""

import math
from collections.abc import Callable, Iterable
from itertools import pairwise
from statistics import median

from ppo_lab.diagnostics.history import History

Sign = tuple[int, str]


def stale_log_probs(run: History) -> Sign | None:
    """The ratio is not 1 before the first step: old_logp is not that of the policy which the update starts from.

    ratio_deviation, the largest |log ρ| before the first step, above 0.2: with ε = 0.2 the clip range is used up before
    anything was learned. Healthy: 3·10⁻⁵ in float32, 0.05 in bfloat16.
    """
    return above(run, "ratio_deviation", 0.2)


def sampler_mismatch(run: History) -> Sign | None:
    """The answers were written by another policy than the one that is trained.

    sampler_kl above 0.01 nats per token, more than most healthy updates move the policy. Healthy: 0 in float32; the
    largest difference of log-probabilities seen in bfloat16, 0.05, makes 0.001 where all tokens have it.
    """
    return above(run, "sampler_kl", 0.01)


def negative_kl_coef(run: History) -> Sign | None:
    """β below 0, which pays for leaving the reference. No healthy run has it; 0 is allowed."""
    place = first_place(value < 0 for value in run["kl_coef"])
    return None if place is None else (place, f"kl_coef is {run['kl_coef'][place]:.3g}, below 0, {at(run, place)}")


def kl_spike(run: History) -> Sign | None:
    """The policy leaps: within one update, or away from the reference from one iteration to the next.

    approx_kl, the mean over the steps of an update, above 0.2 nats per token or action. Healthy: 0.024 at most on the
    reviews, 0.012 for PPO in classic control and 0.1 for PPO-penalty, which has no clip.
    kl_per_response more than 3 times that of the iteration before, which was at least 0.5 nats. Healthy: 2 times.
    """
    kl, numbers = run["kl_per_response"], run.iterations
    leap = first_place(
        before >= 0.5 and now > 3 * before and numbers[place + 1] == numbers[place] + 1
        for place, (before, now) in enumerate(pairwise(kl))
    )
    sign = None
    if leap is not None:
        leap_by = f"from {kl[leap]:.3g} to {kl[leap + 1]:.3g} nats, more than 3 times"
        sign = leap + 1, f"kl_per_response leaps {leap_by}, {at(run, leap + 1)}"
    return earliest(above(run, "approx_kl", 0.2), sign)


def kl_too_large(run: History) -> Sign | None:
    """The policy has left the reference: kl_per_response above 0.8 nats per token of the response.

    Healthy: 0.34 at most with β = 0.1, 0.58 under a controller that aims at 3 nats per response. With β = 0 it grows to
    1.3 and beyond. The sum over a response has no such threshold: it grows with the length.
    """
    per_token = nats_per_token(run)
    place = first_place(value > 0.8 for value in per_token)
    if place is None:
        return None
    number = f"{per_token[place]:.3g} nats per token ({run['kl_per_response'][place]:.3g} per response)"
    return place, f"the KL to the reference is {number}, above 0.8 per token, {at(run, place)}"


def loss_explosion(run: History) -> Sign | None:
    """The losses are in other units than the models, or they diverge.

    value_loss of a language model above 20: scaled rewards end at ±5, and a critic that says 0 then has ½·5² = 12.5.
    Healthy: 0.41 at most. In control a reward has any unit, so there it is 100 times the value_loss of the first row.
    Healthy: 3 times for PPO, 17 times for REINFORCE, whose first episodes are short.
    grad_norm above 20 times its median over the first five rows. Healthy: 3 times.
    """
    loss = run["value_loss"]
    if known(run["kl_per_response"]):
        return earliest(above(run, "value_loss", 20), growing_gradient(run))
    start = next((value for value in loss if value > 0), math.nan)
    place = first_place(value > 100 * start for value in loss)
    if place is None:
        return None
    return place, f"value_loss is {loss[place]:.3g}, above 100 times its start of {start:.3g}, {at(run, place)}"


def growing_gradient(run: History) -> Sign | None:
    """grad_norm above 20 times its median over the first five rows; part of `loss_explosion`."""
    norms = run["grad_norm"]
    first = [norm for norm in known(norms)[:5] if norm > 0]
    if len(first) < 5:
        return None
    start = median(first)
    place = first_place(norm > 20 * start for norm in norms)
    if place is None:
        return None
    return place, f"grad_norm is {norms[place]:.3g}, above 20 times its start of {start:.3g}, {at(run, place)}"


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
    for rows in windows(tried, 12):
        if all(explained[i] < 0.02 for i in rows):
            before, after = (mean(loss[i] for i in some) for some in (rows[:3], rows[-3:]))
            if after >= 0.85 * before:
                numbers = f"explained_variance is below 0.02 while value_loss goes from {before:.3g} to {after:.3g}"
                return rows[0], f"{numbers} in 12 iterations, {since(run, rows[0])}"
    return None


def degenerate_advantages(run: History) -> Sign | None:
    """All answers are worth the same: advantage_std below 0.001 in 3 rows on end. Healthy: 0.09 at least."""
    start = lasting(run["advantage_std"], lambda value: value < 0.001, 3)
    return None if start is None else (start, f"advantage_std is below 0.001, {since(run, start)}")


def reward_hacking(run: History) -> Sign | None:
    """The reward model is pleased and the text gets worse.

    With a judge's column gold, which training never sees: the mean of 5 rows has fallen by more than half of what it
    had risen, and by more than 4 times the usual step from row to row, while score has not fallen. Healthy: it falls by
    a tenth of its rise. With a judge's column repetitive: above 0.3 in 3 rows on end. Healthy: 0.15 at most. Without a
    judge: kl_per_response above 0.8 nats per token, entropy below 0.7 of its start, score still above it.
    """
    repeated = lasting(run["repetitive"], lambda value: value > 0.3, 3)
    sign = None
    if repeated is not None:
        sign = repeated, f"repetitive is above 0.3, {since(run, repeated)}"
    without_judge = None if known(run["gold"]) else unjudged_hacking(run)
    return earliest(falling_gold(run), sign, without_judge)


def falling_gold(run: History) -> Sign | None:
    """score holds and gold falls; part of `reward_hacking`. Begins where gold was best."""
    places = [i for i, x in enumerate(run["gold"]) if math.isfinite(x + run["score"][i])]
    if len(places) < 6:
        return None
    gold, score = ([run[name][i] for i in places] for name in ("gold", "score"))
    step = mean(abs(after - before) for before, after in pairwise(gold))
    means = [(mean(gold[i : i + 5]), mean(score[i : i + 5])) for i in range(len(gold) - 4)]
    best = 0
    for i, (now, score_now) in enumerate(means):
        best = i if now > means[best][0] else best
        fall, rise = means[best][0] - now, means[best][0] - means[0][0]
        if fall > rise / 2 and fall > 4 * step and score_now >= means[best][1]:
            start = places[best + 2]
            numbers = f"gold has fallen from {means[best][0]:.2f} to {now:.2f}, more than half of its rise, while score"
            return start, f"{numbers} went from {means[best][1]:.2f} to {score_now:.2f}, {since(run, start)}"
    return None


def unjudged_hacking(run: History) -> Sign | None:
    """The score stands high, far from the reference and with little entropy; part of `reward_hacking`."""
    per_token, entropy, score = nats_per_token(run), run["entropy"], run["score"]
    first_entropy, first_score = (next(iter(known(values)), math.nan) for values in (entropy, score))
    place = first_place(
        far > 0.8 and left < 0.7 * first_entropy and now > first_score
        for far, left, now in zip(per_token, entropy, score, strict=True)
    )
    if place is None:
        return None
    numbers = f"{per_token[place]:.2f} nats per token (above 0.8) and entropy at {entropy[place] / first_entropy:.0%}"
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
    response_length too short for unfinished: an answer that was cut is as long as the limit, which no mean exceeds.
    """
    kl, lengths = run["kl_per_response"], run["response_length"]
    place = first_place(value < -0.5 for value in kl)
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
    place = lasting(possible, lambda share: share > 0.3, 5)
    if place is None:
        return None
    length = run["response_length"][place]
    return place, f"unfinished is above 0.3 (response_length {length:.3g} there), {since(run, place)}"


def empty_answers(run: History) -> Sign | None:
    """Answers that are an EOS and nothing else: empty above 0.3 in 3 rows on end. Healthy: 0."""
    start = lasting(run["empty"], lambda value: value > 0.3, 3)
    return None if start is None else (start, f"empty is above 0.3, {since(run, start)}")


def small_clip_range(run: History) -> Sign | None:
    """The clip stops every step: clip_fraction above 0.15 in 5 rows on end whose mean approx_kl is below 0.005.

    With ε = 0.2 an update that clips so much has moved by 0.01 or more. Healthy: clip_fraction 0.02 on the reviews, 0.1
    for PPO in control.
    """
    clipped, moved = run["clip_fraction"], run["approx_kl"]
    for rows in windows([i for i in range(len(run)) if math.isfinite(clipped[i] + moved[i])], 5):
        if all(clipped[i] > 0.15 for i in rows) and (kl := mean(moved[i] for i in rows)) < 0.005:
            numbers = f"clip_fraction is above 0.15 though approx_kl is {kl:.2g}, below 0.005"
            return rows[0], f"{numbers}, {since(run, rows[0])}"
    return None


def frozen_actor(run: History) -> Sign | None:
    """Steps are taken and the policy stays: approx_kl below 10⁻⁷ in 8 rows of several steps on end.

    Healthy: 10⁻⁴ at least, 10⁻⁶ in the last iteration of a learning rate that falls to 0. Rows that prove nothing do
    not count: those of a single step, before which ρ is 1, and those with grad_norm 0, in which the critic warms up.
    """
    moved = [
        value if steps > 1 and norm != 0 else math.nan
        for value, steps, norm in zip(run["approx_kl"], run["updates"], run["grad_norm"], strict=True)
    ]
    place = lasting(moved, lambda value: value < 1e-7, 8)
    return None if place is None else (place, f"approx_kl is below 1e-7 after several steps, {since(run, place)}")


def out_of_memory(run: History) -> Sign | None:
    """memory_gb above 0.9 of memory_limit_gb: a longer batch of answers will not fit."""
    used, limits = run["memory_gb"], run["memory_limit_gb"]
    place = first_place(now > 0.9 * limit for now, limit in zip(used, limits, strict=True))
    if place is None:
        return None
    return place, f"memory_gb is {used[place]:.3g}, above 0.9 of the {limits[place]:.3g} there are, {at(run, place)}"


def slow_rollout(run: History) -> Sign | None:
    """Generating takes more than 0.7 of the time of all phases, in the median of at least 3 rows.

    Healthy: 0.17, the tiny model in batches of 128. One prompt at a time it is 0.82.
    """
    phases = zip(run["seconds_generate"], run["seconds_score"], run["seconds_update"], strict=True)
    shares = [times[0] / sum(times) for times in phases if sum(times) > 0]
    if len(shares) < 3 or median(shares) <= 0.7:
        return None
    return 0, f"seconds_generate is {median(shares):.0%} of the time, above 70 %, {since(run, 0)}"


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


def lasting(values: list[float], holds: Callable[[float], bool], n_rows: int) -> int | None:
    """Where the first n_rows values on end begin that all fulfil a condition; nan values are passed over."""
    start, length = 0, 0
    for place, value in enumerate(values):
        if math.isnan(value):
            continue
        if not holds(value):
            length = 0
            continue
        start = place if length == 0 else start
        length += 1
        if length == n_rows:
            return start
    return None


def windows(places: list[int], n_rows: int) -> Iterable[list[int]]:
    """Every n_rows neighbours of a list."""
    return (places[i : i + n_rows] for i in range(len(places) - n_rows + 1))


def known(values: Iterable[float]) -> list[float]:
    """The finite values."""
    return [value for value in values if math.isfinite(value)]


def mean(values: Iterable[float]) -> float:
    """The mean; unlike that of the library it is infinite where a sum is, and does not raise."""
    values = list(values)
    return sum(values) / len(values)


def nats_per_token(run: History) -> list[float]:
    """kl_per_response ÷ response_length, row by row."""
    pairs = zip(run["kl_per_response"], run["response_length"], strict=True)
    return [kl / length if length > 0 else math.nan for kl, length in pairs]
