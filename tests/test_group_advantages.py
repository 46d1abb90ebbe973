"""Advantages from a group of answers: by hand, by exact enumeration of small bandits, and against recorded numbers."""

import json
import math
from itertools import product
from pathlib import Path

import pytest
import torch

from ppo_lab.group_advantages import (
    grpo_advantages,
    per_token,
    reinforce_pp_advantages,
    reinforce_pp_baseline_advantages,
    remax_advantages,
    rloo_advantages,
)
from ppo_lab.llm.tokens import token_rewards
from ppo_lab.stability import clip_rewards
from ppo_lab.tabular import bandit

NAN, INF = math.nan, math.inf


def doubles(numbers):
    return torch.tensor(numbers, dtype=torch.float64)


def dr_grpo_advantages(scores, group_index):
    return grpo_advantages(scores, group_index, divide_by_std=False)


BY_GROUP = {"grpo": grpo_advantages, "dr_grpo": dr_grpo_advantages, "rloo": rloo_advantages}
every_group_function = pytest.mark.parametrize("advantages_of", BY_GROUP.values(), ids=BY_GROUP)


# By hand


@pytest.mark.formula("grpo")
def test_grpo_by_hand():
    # Mean 2, squares 4 + 0 + 0 + 4 = 8, std √(8/3).
    scores, std = doubles([0, 2, 2, 4]), math.sqrt(8 / 3)
    ours = grpo_advantages(scores, torch.zeros(4, dtype=torch.long))
    assert ours.tolist() == pytest.approx([-2 / std, 0, 0, 2 / std], rel=1e-6)


def test_eps_is_added_to_the_standard_deviation_not_to_the_variance():
    # Mean 0, std √2.
    ours = grpo_advantages(doubles([-1, 1]), torch.zeros(2, dtype=torch.long), eps=1.0)
    assert ours.tolist() == pytest.approx([-1 / (math.sqrt(2) + 1), 1 / (math.sqrt(2) + 1)])


@pytest.mark.formula("dr-grpo")
def test_dr_grpo_by_hand():
    ours = dr_grpo_advantages(doubles([0, 2, 2, 4, 5, 7]), torch.tensor([0, 0, 0, 0, 1, 1]))
    assert ours.tolist() == [-2, 0, 0, 2, -1, 1]


@pytest.mark.formula("rloo")
def test_rloo_by_hand():
    # The others' means: 8/3, 2, 2, 4/3 in the first group; 7 and 5 in the second.
    ours = rloo_advantages(doubles([0, 2, 2, 4, 5, 7]), torch.tensor([0, 0, 0, 0, 1, 1]))
    assert ours.tolist() == pytest.approx([-8 / 3, 0, 0, 8 / 3, -2, 2])


@pytest.mark.formula("remax")
def test_remax_by_hand():
    # Reward-to-go 1.8, 1.9, 2 and 3; the greedy answers scored 1.5 and 4.
    rewards, mask = doubles([[-0.1, -0.1, 2], [3, 9, 9]]), torch.tensor([[1, 1, 1], [1, 0, 0]])
    ours = remax_advantages(rewards, doubles([1.5, 4]), mask)
    torch.testing.assert_close(ours, doubles([[0.3, 0.4, 0.5], [-1, 0, 0]]))


def test_remax_discounts_the_rewards_and_not_the_baseline():
    ours = remax_advantages(doubles([[0, 0, 4]]), doubles([1]), torch.ones(1, 3), gamma=0.5)
    assert ours.tolist() == [[0, 1, 3]]


@pytest.mark.formula("reinforce-pp")
def test_reinforce_pp_by_hand():
    # Reward-to-go 3, 2, 2 and 1: mean 2, squares 1 + 0 + 0 + 1, variance 2/3.
    rewards, mask = doubles([[1, 0, 2], [1, 9, 9]]), torch.tensor([[1, 1, 1], [1, 0, 0]])
    one = math.sqrt(3 / 2)
    torch.testing.assert_close(reinforce_pp_advantages(rewards, mask), doubles([[one, 0, 0], [-one, 0, 0]]))


def test_reinforce_pp_discounts():
    # Reward-to-go 1, 2, 4 with γ = ½: mean 7/3, squares 16/9 + 1/9 + 25/9 = 14/3, variance 7/3.
    ours = reinforce_pp_advantages(doubles([[0, 0, 4]]), torch.ones(1, 3), gamma=0.5)
    assert ours[0].tolist() == pytest.approx([x / 3 / math.sqrt(7 / 3) for x in (-4, -1, 5)])


@pytest.mark.formula("reinforce-pp-baseline")
def test_the_baseline_form_weighs_a_long_answer_more():
    # −1 on one token, +1 on three: mean ½, squares 9/4 + 3·1/4 = 3, variance 1.
    mask = torch.tensor([[1, 0, 0], [1, 1, 1]])
    ours = reinforce_pp_baseline_advantages(doubles([4, 6]), torch.tensor([0, 0]), mask)
    torch.testing.assert_close(ours, doubles([[-1.5, 0, 0], [0.5, 0.5, 0.5]]))


def test_per_token_repeats_the_number_of_the_answer():
    ours = per_token(torch.tensor([2.0, -1.0]), torch.tensor([[True, True, False], [True, False, False]]))
    assert ours.tolist() == [[2, 2, 0], [-1, 0, 0]]


def test_a_gap_inside_an_answer_is_skipped_over():
    with_gap, without = torch.tensor([[1, 0, 1]]), torch.tensor([[1, 1]])
    rewards, short = doubles([[1, NAN, 2]]), doubles([[1, 2]])
    for function in (reinforce_pp_advantages, lambda r, m: remax_advantages(r, doubles([7]), m)):
        first, gap, last = function(rewards, with_gap)[0].tolist()
        assert [first, last] == function(short, without)[0].tolist()
        assert gap == 0


# Groups


@every_group_function
def test_labels_order_and_neighbourhood_mean_nothing(advantages_of):
    scores = torch.randn(12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    tidy = torch.tensor([0] * 5 + [1] * 4 + [2] * 3)
    shuffle = torch.randperm(12, generator=torch.Generator().manual_seed(1))
    other_labels = torch.tensor([-7, 10**12, 3])[tidy]
    ours = advantages_of(scores, tidy)
    torch.testing.assert_close(advantages_of(scores[shuffle], other_labels[shuffle]), ours[shuffle])


@every_group_function
def test_a_ragged_group_is_worth_what_it_is_worth_alone(advantages_of):
    scores = doubles([1, 5, 2, 8, 4, 7])
    group_index = torch.tensor([0, 1, 0, 1, 2, 1])
    ours = advantages_of(scores, group_index)
    for label in (0, 1, 2):
        rows = group_index == label
        alone = advantages_of(scores[rows], group_index[rows])
        assert ours[rows].tolist() == alone.tolist()


@every_group_function
def test_the_advantages_of_a_group_sum_to_0(advantages_of):
    scores = torch.randn(30, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    group_index = torch.arange(30) % 4
    ours = advantages_of(scores, group_index)
    for label in range(4):
        assert ours[group_index == label].sum().item() == pytest.approx(0, abs=1e-12)


@every_group_function
def test_a_constant_added_to_one_prompts_scores_changes_nothing(advantages_of):
    scores, group_index = doubles([1, 2, 4, 8, 3, 5]), torch.tensor([0, 0, 0, 1, 1, 1])
    torch.testing.assert_close(
        advantages_of(scores + 100 * group_index, group_index), advantages_of(scores, group_index)
    )


@pytest.mark.parametrize("n", [2, 3, 8])
def test_rloo_is_the_distance_from_the_mean_times_n_over_n_minus_1(n):
    scores = torch.randn(n, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    same = torch.zeros(n, dtype=torch.long)
    torch.testing.assert_close(rloo_advantages(scores, same), n / (n - 1) * (scores - scores.mean()))


def test_two_answers_are_a_comparison_whose_grpo_forgets_by_how_much():
    same = torch.tensor([0, 0])
    for gap in (0.1, 1.0, 100.0):
        scores = doubles([0, gap])
        assert grpo_advantages(scores, same).tolist() == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)], rel=1e-4)
        assert rloo_advantages(scores, same).tolist() == [-gap, gap]


@every_group_function
def test_a_group_of_one_has_nothing_to_be_compared_with(advantages_of):
    assert advantages_of(torch.tensor([5.0, 1.0, 3.0]), torch.tensor([0, 1, 1]))[0].item() == 0
    assert advantages_of(torch.tensor([5.0]), torch.tensor([0])).tolist() == [0]


@every_group_function
@pytest.mark.parametrize("score", [0.1, -0.3, 1 / 3, 1e6 + 0.1, 1e-7])
@pytest.mark.parametrize("n", [3, 7, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_equal_scores_give_exactly_0_in_spite_of_rounding(advantages_of, score, n, dtype):
    scores = torch.full((n,), score, dtype=dtype)
    assert (advantages_of(scores, torch.zeros(n, dtype=torch.long)) == 0).all()


def test_the_last_digit_of_a_score_is_not_blown_up():
    # One float32 step apart at 100: the division by the spread would make ±0.6 of it.
    scores = torch.tensor([100.0, 100.0])
    scores[1] = torch.nextafter(scores[1], torch.tensor(INF))
    assert grpo_advantages(scores, torch.tensor([0, 0])).tolist() == [0, 0]


def test_equal_scores_give_exactly_0_after_whitening_too():
    scores, mask = torch.full((3,), 0.1), torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0]])
    assert (reinforce_pp_baseline_advantages(scores, torch.zeros(3, dtype=torch.long), mask) == 0).all()
    last = torch.tensor([[0, 0, 0.1], [0.1, 0, 0], [0, 0.1, 0]])
    assert (reinforce_pp_advantages(last, mask) == 0).all()


def test_a_group_of_one_enters_the_whitening_of_the_whole_batch_as_0():
    # Tokens −1, 1, 0: mean 0, variance 1.
    ours = reinforce_pp_baseline_advantages(doubles([2, 4, 50]), torch.tensor([0, 0, 1]), torch.ones(3, 1))
    torch.testing.assert_close(ours, doubles([[-1], [1], [0]]))


def test_an_answer_without_tokens_still_counts_in_its_group():
    mask = torch.tensor([[1, 1], [0, 0]])
    scores = doubles([1, 3])
    assert per_token(rloo_advantages(scores, torch.tensor([0, 0])), mask).tolist() == [[-2, -2], [0, 0]]


# Masks, precision, gradients, refusals


def token_functions(rewards, scores, mask):
    """Every function of [B, T], of the same answers."""
    group_index = torch.arange(len(scores)) % 2
    return {
        "remax": remax_advantages(rewards, scores, mask),
        "reinforce++": reinforce_pp_advantages(rewards, mask),
        "reinforce++-baseline": reinforce_pp_baseline_advantages(scores, group_index, mask),
        "per_token": per_token(scores, mask),
    }


@pytest.mark.parametrize("hidden", [NAN, INF, 1e30])
def test_padding_counts_for_nothing_whatever_it_holds(hidden):
    generator = torch.Generator().manual_seed(0)
    rewards, scores = torch.randn(4, 3, generator=generator), torch.randn(4, generator=generator)
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 1, 1]]).bool()
    rewards[~mask] = hidden
    wide = torch.cat([rewards, torch.full((4, 2), hidden)], 1)
    wide_mask = torch.cat([mask, torch.zeros(4, 2, dtype=torch.bool)], 1)
    narrow = token_functions(rewards, scores, mask)
    for name, padded in token_functions(wide, scores, wide_mask).items():
        torch.testing.assert_close(padded[:, :3], narrow[name])
        assert (padded[~wide_mask] == 0).all()


def test_half_precision_is_computed_in_float32():
    scores, index = torch.tensor([1.0, 2.0, 4.0, 8.0]).bfloat16(), torch.tensor([0, 0, 1, 1])
    rewards, mask = torch.ones(4, 2).bfloat16(), torch.ones(4, 2)
    for function in BY_GROUP.values():
        assert function(scores, index).dtype == torch.float32
        assert function(scores, index).tolist() == function(scores.float(), index).tolist()
    for advantages in token_functions(rewards, scores, mask).values():
        assert advantages.dtype == torch.float32


def test_whole_number_scores_are_welcome():
    assert rloo_advantages(torch.tensor([0, 1, 1]), torch.zeros(3, dtype=torch.int32)).tolist() == [-1, 0.5, 0.5]


def test_advantages_are_constants_for_the_gradient():
    scores, rewards = torch.randn(4, requires_grad=True), torch.randn(4, 2, requires_grad=True)
    for function in BY_GROUP.values():
        assert not function(scores, torch.tensor([0, 0, 1, 1])).requires_grad
    for name, advantages in token_functions(rewards, scores, torch.ones(4, 2)).items():
        assert not advantages.requires_grad, name


@every_group_function
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_score_that_is_not_finite_is_refused(advantages_of, bad):
    with pytest.raises(ValueError, match=f"scores must be finite, got {bad}"):
        advantages_of(torch.tensor([1.0, bad, 2.0]), torch.tensor([0, 0, 1]))


def test_a_reward_that_counts_and_is_not_finite_is_refused():
    rewards, mask = torch.tensor([[1.0, NAN]]), torch.ones(1, 2)
    with pytest.raises(ValueError, match="rewards must be finite, got nan"):
        reinforce_pp_advantages(rewards, mask)
    with pytest.raises(ValueError, match="rewards must be finite, got nan"):
        remax_advantages(rewards, torch.zeros(1), mask)
    with pytest.raises(ValueError, match="baseline_scores must be finite, got nan"):
        remax_advantages(torch.ones(1, 2), torch.tensor([NAN]), mask)
    with pytest.raises(ValueError, match="scores must be finite, got nan"):
        reinforce_pp_baseline_advantages(torch.tensor([NAN, 1.0]), torch.tensor([0, 0]), torch.ones(2, 2))


@every_group_function
def test_other_shapes_and_labels_are_refused(advantages_of):
    with pytest.raises(ValueError, match=r"scores \(4,\), group_index \(4, 1\)"):
        advantages_of(torch.ones(4), torch.zeros(4, 1, dtype=torch.long))
    with pytest.raises(ValueError, match=r"scores must be \[B\]"):
        advantages_of(torch.ones(2, 2), torch.zeros(2, 2, dtype=torch.long))
    for dtype in (torch.float32, torch.bool):
        with pytest.raises(ValueError, match="group_index must hold integers"):
            advantages_of(torch.ones(4), torch.zeros(4, dtype=dtype))


def test_other_shapes_of_tokens_are_refused():
    rewards, mask = torch.ones(2, 3), torch.ones(2, 3)
    with pytest.raises(ValueError, match=r"rewards must be \[B, T\]"):
        reinforce_pp_advantages(torch.ones(3), torch.ones(3))
    with pytest.raises(ValueError, match="mask must have the shape"):
        reinforce_pp_advantages(rewards, torch.ones(2, 1))
    with pytest.raises(ValueError, match="mask must have the shape"):
        remax_advantages(rewards, torch.ones(2), torch.ones(3, 2))
    with pytest.raises(ValueError, match=r"baseline_scores must be \[B\]"):
        remax_advantages(rewards, torch.ones(2, 1), mask)
    with pytest.raises(ValueError, match=r"advantages must be \[B\] and mask \[B, T\]"):
        per_token(torch.ones(3), mask)
    with pytest.raises(ValueError, match=r"advantages must be \[B\] and mask \[B, T\]"):
        per_token(torch.ones(2), torch.ones(2))
    with pytest.raises(ValueError, match="mask must hold only"):
        per_token(torch.ones(2), 2 * mask)


@pytest.mark.parametrize("eps", [0.0, -1e-6, NAN])
def test_an_eps_that_is_not_positive_is_refused(eps):
    with pytest.raises(ValueError, match="eps must be positive"):
        grpo_advantages(torch.ones(2), torch.tensor([0, 0]), eps=eps)


def test_a_gamma_outside_0_and_1_is_refused():
    with pytest.raises(ValueError, match="gamma"):
        reinforce_pp_advantages(torch.ones(1, 2), torch.ones(1, 2), gamma=1.1)
    with pytest.raises(ValueError, match="gamma"):
        remax_advantages(torch.ones(1, 2), torch.ones(1), torch.ones(1, 2), gamma=-0.1)


# What they do to the gradient, exactly: every group of answers a bandit can give, weighted by its probability


LOGITS = doubles([0.3, -0.5, 1.0])
REWARDS = [0.0, 1.0, 10.0]


def expected_update(advantages_of, rewards, n, logits=LOGITS):
    """E[1/n Σ_i Â_i ∇log π(a_i)] over all groups of n answers; ∇log π(a) of a softmax is 1[a] − π."""
    probabilities = logits.softmax(-1)
    same = torch.zeros(n, dtype=torch.long)
    total = torch.zeros_like(logits)
    for actions in product(range(len(logits)), repeat=n):
        advantages = advantages_of(doubles([rewards[a] for a in actions]), same)
        for action, advantage in zip(actions, advantages, strict=True):
            score = torch.eye(len(logits), dtype=torch.float64)[action] - probabilities
            total += math.prod(probabilities[a].item() for a in actions) * advantage * score / n
    return total


def cosine(a, b):
    return (a @ b / a.norm() / b.norm()).item()


@pytest.mark.parametrize("n", [2, 3, 4])
def test_rloo_estimates_the_policy_gradient_itself(n):
    exact = bandit(REWARDS).objective_gradient(LOGITS[None])[0]
    torch.testing.assert_close(expected_update(rloo_advantages, REWARDS, n), exact)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_a_mean_that_contains_the_own_score_shrinks_it_by_n_minus_1_over_n(n):
    exact = bandit(REWARDS).objective_gradient(LOGITS[None])[0]
    torch.testing.assert_close(expected_update(dr_grpo_advantages, REWARDS, n), (n - 1) / n * exact)


def test_remax_estimates_the_policy_gradient_itself():
    exact = bandit(REWARDS).objective_gradient(LOGITS[None])[0]
    greedy = REWARDS[int(LOGITS.argmax())]

    def against_the_greedy_answer(scores, _):
        return remax_advantages(scores[:, None], torch.full_like(scores, greedy), torch.ones(len(scores), 1))[:, 0]

    torch.testing.assert_close(expected_update(against_the_greedy_answer, REWARDS, 1), exact)


def test_the_division_by_the_spread_gives_every_prompt_the_same_weight():
    # Two prompts with the same policy; the second one's rewards are ten times the first one's.
    small, large = [0.0, 1.0, 2.0], [0.0, 10.0, 20.0]
    exact = [bandit(rewards).objective_gradient(LOGITS[None])[0] for rewards in (small, large)]
    torch.testing.assert_close(exact[1], 10 * exact[0])
    for advantages_of, ratio in ((grpo_advantages, 1), (dr_grpo_advantages, 10), (rloo_advantages, 10)):
        first, second = (expected_update(advantages_of, rewards, 3) for rewards in (small, large))
        torch.testing.assert_close(second, ratio * first, rtol=1e-5, atol=1e-8)


def test_grpo_does_not_follow_the_gradient_of_the_expected_score():
    small, large = [0.0, 1.0, 2.0], [0.0, 10.0, 20.0]
    exact = torch.cat([bandit(rewards).objective_gradient(LOGITS[None])[0] for rewards in (small, large)])

    def over_both(advantages_of):
        return torch.cat([expected_update(advantages_of, rewards, 3) for rewards in (small, large)])

    assert cosine(over_both(rloo_advantages), exact) == pytest.approx(1, abs=1e-12)
    assert cosine(over_both(dr_grpo_advantages), exact) == pytest.approx(1, abs=1e-12)
    assert cosine(over_both(grpo_advantages), exact) < 0.85


def test_within_one_prompt_the_division_can_turn_the_update_around():
    # Scores 0, 1, 10 with probabilities 0.4, 0.4, 0.2: the 1 is below the mean of 2.4, but it wins more comparisons of
    # two than it loses, and after the division every comparison counts the same.
    rewards, logits = [0.0, 1.0, 10.0], doubles([0.4, 0.4, 0.2]).log()
    exact = bandit(rewards).objective_gradient(logits[None])[0]
    assert exact[1].item() == pytest.approx(0.4 * (1 - 2.4))
    assert expected_update(rloo_advantages, rewards, 2, logits)[1].item() == pytest.approx(0.4 * (1 - 2.4))
    # 0.4 · (0.4 − 0.2) comparisons won more than lost, at 1/√2 each.
    assert expected_update(grpo_advantages, rewards, 2, logits)[1].item() == pytest.approx(
        0.08 / math.sqrt(2), rel=1e-4
    )


# Recorded numbers of verl and OpenRLHF (tests/golden). A case whose answer is not ours is named, with the convention
# that makes the difference; that convention, put on top of our numbers, must give theirs.


CASES = json.loads((Path(__file__).parent / "golden" / "group_advantages.json").read_text())["cases"]

ONE_KEEPS_ITS_SCORE = "a group of one has mean 0 and spread 1, so its advantage is its score; ours is 0"
ONE_IS_NAN = "a group of one is divided by n − 1 = 0; ours is 0"
DIVIDED_BY_N = "the variance of the whitening is divided by n; ours by n − 1"
CLIPPED_AFTERWARDS = "the reward clip is put on the advantages; ours is put on the scores"
LENGTH_WEIGHTED = "OPO, another estimator: the baseline weighs the scores of a group by their lengths"
WHOLE_BATCH = "FlashREINFORCE, another estimator: one group, the whole batch"


DIFFERENT = {
    11: DIVIDED_BY_N,
    13: ONE_KEEPS_ITS_SCORE,
    14: ONE_KEEPS_ITS_SCORE,
    15: ONE_KEEPS_ITS_SCORE,
    16: ONE_KEEPS_ITS_SCORE,
    19: ONE_KEEPS_ITS_SCORE,
    30: DIVIDED_BY_N,
    42: DIVIDED_BY_N,
    54: DIVIDED_BY_N,
    63: ONE_KEEPS_ITS_SCORE,
    64: ONE_KEEPS_ITS_SCORE,
    65: ONE_KEEPS_ITS_SCORE,
    66: ONE_KEEPS_ITS_SCORE,
    69: ONE_KEEPS_ITS_SCORE,
    70: ONE_IS_NAN,
    72: ONE_IS_NAN,
    77: DIVIDED_BY_N,
    80: DIVIDED_BY_N,
    83: DIVIDED_BY_N,
    86: DIVIDED_BY_N,
    87: CLIPPED_AFTERWARDS,
}


def reason(case):
    """Why the case is not ours, or None."""
    estimator = case["inputs"]["estimator"]
    if estimator == "opo":
        return LENGTH_WEIGHTED
    if estimator == "flash_reinforce":
        return WHOLE_BATCH
    return DIFFERENT.get(int(case["id"][-3:]))


def recorded(numbers):
    """A float64 tensor of nested lists, in which nan is a string."""
    return doubles([[float(x) for x in row] for row in numbers])


def our_advantages(case):
    """Our answer [B, T] to a case of one of our estimators."""
    inputs = case["inputs"]
    mask = torch.tensor(inputs["mask"])
    if inputs["estimator"] in ("remax", "reinforce_pp"):
        if "kl" in inputs:
            kl = doubles(inputs["kl"])
            rewards = token_rewards(doubles(inputs["scores"]), kl, torch.zeros_like(kl), mask, inputs["kl_coef"])
        else:
            rewards = doubles(inputs["rewards"])
        if inputs["estimator"] == "remax":
            return remax_advantages(rewards, doubles(inputs["reward_baselines"]), mask)
        return reinforce_pp_advantages(rewards, mask, gamma=inputs["gamma"])
    scores, group_index = doubles(inputs["scores"]), torch.tensor(inputs["group_index"])
    if inputs["estimator"] == "reinforce_pp_baseline":
        return reinforce_pp_baseline_advantages(scores, group_index, mask)
    if inputs["estimator"] == "grpo":
        return per_token(grpo_advantages(scores, group_index, eps=inputs["eps"]), mask)
    return per_token(BY_GROUP[inputs["estimator"]](scores, group_index), mask)


def literal_whiten(x, mask):
    valid = x[mask]
    return torch.where(mask, (x - valid.mean()) / (valid.var() + 1e-8).sqrt(), 0.0)


def their_advantages(case):
    """What our answer becomes under the convention of the case."""
    inputs = case["inputs"]
    mask, scores = torch.tensor(inputs["mask"]).bool(), doubles(inputs.get("scores", []))
    group_index = torch.tensor(inputs.get("group_index", []), dtype=torch.long)
    same_group = group_index[:, None] == group_index
    why = reason(case)
    if why == LENGTH_WEIGHTED:
        weights = same_group * mask.sum(-1)
        raw = scores - weights.double() @ scores / weights.sum(1)
        return per_token(torch.where(same_group.sum(1) == 1, scores, raw), mask)
    if why == WHOLE_BATCH:
        return per_token(dr_grpo_advantages(scores, torch.zeros_like(group_index)), mask)
    if why == CLIPPED_AFTERWARDS:
        return clip_rewards(our_advantages(case), inputs["reward_clip"][1])
    if why == DIVIDED_BY_N:
        n = int(mask.sum())
        return our_advantages(case) * math.sqrt(n / (n - 1))
    alone = same_group.sum(1) == 1
    if inputs["estimator"] == "reinforce_pp_baseline":
        above_mean = torch.where(alone, scores, dr_grpo_advantages(scores, group_index))
        return literal_whiten(per_token(above_mean, mask), mask)
    replaced = torch.full_like(scores, NAN) if why == ONE_IS_NAN else scores / (1 + inputs.get("eps", 0))
    return torch.where(alone[:, None], per_token(replaced, mask), our_advantages(case))


def agrees(case, ours):
    theirs, mask = recorded(case["expected"]["advantages"]), torch.tensor(case["inputs"]["mask"]).bool()
    if case["compare"] == "mask":
        theirs, ours = theirs[mask], ours[mask]
    tolerance = 3e-5 if case["dtype"] == "float32" else 1e-6
    return torch.allclose(ours, theirs, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("case", [case for case in CASES if not reason(case)], ids=lambda case: case["id"])
def test_golden_case_agrees(case):
    assert agrees(case, our_advantages(case))


@pytest.mark.parametrize("case", [case for case in CASES if reason(case)], ids=lambda case: case["id"])
def test_golden_case_differs_by_its_convention_and_by_nothing_else(case):
    assert agrees(case, their_advantages(case))
    if reason(case) not in (LENGTH_WEIGHTED, WHOLE_BATCH):
        assert not agrees(case, our_advantages(case))


def test_every_golden_case_is_compared():
    counts = {why: sum(reason(case) == why for case in CASES) for why in {reason(case) for case in CASES}}
    assert counts == {
        None: 54,
        ONE_KEEPS_ITS_SCORE: 10,
        ONE_IS_NAN: 2,
        DIVIDED_BY_N: 8,
        CLIPPED_AFTERWARDS: 1,
        LENGTH_WEIGHTED: 7,
        WHOLE_BATCH: 5,
    }


def test_scores_whose_variance_overflows_are_refused_and_not_taken_for_equal():
    with pytest.raises(ValueError, match="scores must be of ordinary size"):
        grpo_advantages(torch.tensor([1e20, 2e20]), torch.tensor([0, 0]))
