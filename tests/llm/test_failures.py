"""The zoo of failures: every scenario shows its symptom, and its cure takes it away."""

from dataclasses import replace

import pytest
import torch

from ppo_lab.files import read_table
from ppo_lab.llm.experience import collect, estimate
from ppo_lab.llm.failures import (
    SCENARIOS,
    BookKLController,
    OneAtATime,
    actor_stands_still,
    critic_is_stuck,
    estimate_with_any_sign,
    gain,
    kl_is_negative,
    lag,
    log_probs_are_stale,
    logp_of,
    not_empty,
    nothing_is_told_apart,
    number_of_words,
    reward_is_hacked,
    run_scenario,
    sampler_lags,
    train_wrongly,
)
from ppo_lab.llm.generate import generate, keyed_uniforms
from ppo_lab.llm.ppo import NonFiniteError, train
from ppo_lab.llm.reviews import judge
from ppo_lab.llm.tokens import left_pad

NAMES = list(SCENARIOS)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# Every scenario and its cure, trained


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_failing_run_shows_its_symptom(name):
    assert SCENARIOS[name].symptom(run_scenario(SCENARIOS[name], seed=0))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_cured_run_does_not(name):
    assert not SCENARIOS[name].symptom(run_scenario(SCENARIOS[name], seed=0, cured=True))


# The stored runs, three seeds each


@pytest.fixture(scope="module")
def stored():
    """The stored runs: scenario, variant, seed → rows."""
    runs = {}
    for row in read_table("llm/failures.csv"):
        runs.setdefault((row["scenario"], row["variant"], int(row["seed"])), []).append(row)
    return runs


@pytest.mark.parametrize("name", NAMES)
def test_every_stored_failure_shows_its_symptom_and_no_cured_run_does(stored, name):
    for seed in range(3):
        assert SCENARIOS[name].symptom(stored[name, "failure", seed])
        assert not SCENARIOS[name].symptom(stored[name, "cure", seed])


@pytest.mark.parametrize("name", NAMES)
def test_a_healthy_run_shows_no_symptom(stored, name):
    for seed in range(3):
        assert not SCENARIOS[name].symptom(stored["healthy", "healthy", seed])


def test_every_row_of_the_book_s_table_has_a_scenario():
    rows = [scenario.row for scenario in SCENARIOS.values() if scenario.row]
    # Not to learn has two suspects in the book: the clip range and the advantages.
    assert sorted(row for row in rows if rows.count(row) > 1) == ["does not learn"] * 2 and len(set(rows)) == 7
    assert all(name == scenario.name for name, scenario in SCENARIOS.items())


# The faults


def test_the_loop_with_a_fault_is_the_trainer_s_when_there_is_none(small):
    roles, prompts, ppo = small()
    rows = list(train_wrongly(prompts, roles, ppo))
    roles, prompts, ppo = small()
    expected = [row for row, _ in train(prompts, roles, ppo, judge=judge)]
    measured = [name for name in expected[0] if "second" not in name and name != "memory_gb"]
    assert [list(row) for row in rows] == [list(row) for row in expected]
    assert [[row[name] for name in measured] for row in rows] == [[row[name] for name in measured] for row in expected]


def test_the_book_s_controller_turns_negative_from_fifty_answers_on():
    """KL 0, factor 1 − 0.02·n: 0.02 at 49 answers, 0 at 50, and −4.12 at 256."""
    controller = BookKLController(0.2, target_kl=6.0)
    controller.update(0.0, n_steps=49)
    assert controller.kl_coef == pytest.approx(0.004)
    controller = BookKLController(0.2, target_kl=6.0)
    followed = []
    for _ in range(4):
        controller.update(0.0, n_steps=256)
        followed.append(controller.kl_coef)
    assert followed == pytest.approx([-0.824, 3.39488, -13.98691, 57.62605], rel=1e-6)
    controller.update(6.0, n_steps=256)
    assert controller.kl_coef == pytest.approx(57.62605)


def test_the_trainer_refuses_a_negative_price(small):
    """8 answers and a gain of 1: after the first iteration, with a KL of 0, the factor is 1 − 0.2·8."""
    roles, prompts, ppo = small()
    with pytest.raises(ValueError, match="kl_coef must be at least 0"):
        list(train(prompts, roles, ppo, controller=BookKLController(0.1, 6.0, gain=1.0)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lagging_sampler", "stale_log_probs"])
def test_the_trainer_refuses_a_ratio_that_does_not_start_at_1_unless_it_is_told_to_tolerate_it(name):
    with pytest.raises(ValueError, match="the ratio must be 1 before the first step"):
        run_scenario(replace(SCENARIOS[name], settings={}, iterations=2))


def test_a_lagging_sampler_answers_with_the_weights_of_the_last_transfer(small, shake):
    """Its answers and log-probabilities stay as they were when the actor moves, until the eighth rollout after."""
    roles, prompts, ppo = small()
    lag(roles)
    first = collect(prompts, roles, ppo, 0)
    shake(roles.actor.module)
    for _ in range(7):
        later = collect(prompts, roles, ppo, 0)
        assert torch.equal(later.response_ids, first.response_ids)
        assert torch.equal(later.old_logp, first.old_logp)
    moved = collect(prompts, roles, ppo, 0)
    assert (logp_of(roles.actor, moved, ppo) - moved.old_logp).abs().max() < 1e-5
    assert (logp_of(roles.actor, first, ppo) - first.old_logp).abs().max() > 0.01


def test_log_probabilities_asked_again_are_those_of_the_sampler_and_0_where_masked(small):
    roles, prompts, ppo = small()
    experience = collect(prompts, roles, ppo, 0)
    logp = logp_of(roles.actor, experience, ppo)
    assert torch.allclose(logp, experience.sampler_logp, atol=1e-5)
    assert (~experience.mask).any() and not logp[~experience.mask].any()


def test_log_probs_of_another_policy_cost_three_tenths_of_the_gain_and_a_lagging_sampler_half(stored):
    """What the gold score gains, over three seeds. To ask again for the log-probs hides the lag and cures nothing."""
    for seed in range(3):
        fresh = gain(stored["stale_log_probs", "cure", seed], "gold")
        assert gain(stored["stale_log_probs", "failure", seed], "gold") < 0.7 * fresh
        fresh = gain(stored["lagging_sampler", "cure", seed], "gold")
        lagging = stored["lagging_sampler", "failure", seed]
        assert gain(lagging, "gold") < 0.5 * fresh
        assert [row["ratio_deviation"] < 1e-4 for row in lagging] == [i % 8 == 0 for i in range(16)]
        for tried in ("recomputed", "recomputed, sampler_correction"):
            rows = stored["lagging_sampler", tried, seed]
            assert gain(rows, "gold") < 0.6 * fresh
            assert max(row["ratio_deviation"] for row in rows) < 1e-4 and max(row["sampler_kl"] for row in rows) > 0.05
            assert min(row["kl_per_response"] for row in rows) < -0.5


def test_of_equal_rewards_only_the_reward_is_the_cure(stored):
    """A wider clip range, no whitening, no price: nothing of it gains; a reward that tells answers apart does."""
    for seed in range(3):
        assert gain(stored["equal_rewards", "reward model alone", seed], "gold") > 0.2
        for tried in ("ε = 0.3", "no whitening", "no KL penalty", "no KL penalty, no whitening"):
            assert nothing_is_told_apart(stored["equal_rewards", tried, seed])


def test_of_the_cure_of_endless_answers_the_penalty_alone_ends_them_and_the_price_alone_does_not(stored):
    for seed in range(3):
        assert stored["endless_answers", "EOS penalty alone", seed][-1]["unfinished"] < 0.15
        assert stored["endless_answers", "larger β alone", seed][-1]["unfinished"] > 0.3


def test_the_loop_with_a_fault_refuses_what_it_does_not_do(small):
    roles, prompts, ppo = small(advantage="rloo", group_size=2)
    with pytest.raises(ValueError, match="group_size must be 1 and advantage gae, got 2 and 'rloo'"):
        next(train_wrongly(prompts, roles, ppo))


def test_the_loop_with_a_fault_ends_before_a_number_that_is_not_finite_does_harm(small):
    def spoil(experience, roles, settings):
        return replace(experience, scores=experience.scores.where(torch.arange(8) != 5, torch.inf))

    roles, prompts, ppo = small()
    with pytest.raises(NonFiniteError, match=r"scores is not finite in the answers \[5\]"):
        next(train_wrongly(prompts, roles, ppo, spoil=spoil))


def test_a_negative_price_pays_for_leaving_the_reference(small, shake):
    """r_t = score at the last token − β·(log π − log π_ref), whatever the sign of β."""
    roles, prompts, ppo = small()
    shake(roles.actor.module)
    experience = collect(prompts, roles, ppo, 0)
    estimated = estimate_with_any_sign(experience, roles, ppo, -0.5)
    for row, length in enumerate(experience.mask.sum(-1).tolist()):
        expected = [0.5 * float(experience.old_logp[row, t] - experience.ref_logp[row, t]) for t in range(length)]
        expected[-1] += float(experience.scores[row])
        assert estimated.rewards[row, :length].tolist() == pytest.approx(expected, abs=1e-6)
        assert not estimated.rewards[row, length:].any()
    assert torch.equal(estimated.old_logp, experience.old_logp)
    assert torch.equal(estimated.ref_logp, experience.ref_logp)
    for name in ("rewards", "advantages", "returns"):
        usual = getattr(estimate(experience, roles, ppo, 0.5), name)
        assert torch.equal(getattr(estimate_with_any_sign(experience, roles, ppo, 0.5), name), usual)


def test_one_prompt_at_a_time_gets_the_answers_of_the_batch(small):
    roles, prompts, _ = small()
    given = {"max_new_tokens": 6, "eos_token_ids": roles.eos_token_ids, "uniforms": keyed_uniforms(0, 0, range(8), 6)}
    lm = roles.actor.module.lm
    together = generate(lm, *left_pad(prompts, 1), **given)
    alone = generate(OneAtATime(lm), *left_pad(prompts, 1), **given)
    assert torch.equal(alone.ids, together.ids) and torch.equal(alone.mask, together.mask)
    assert torch.allclose(alone.logp, together.logp, atol=1e-5)
    assert len(set(together.mask.sum(-1).tolist())) > 1


def test_four_models_of_seven_billion_do_not_fit_and_sharded_they_do():
    """7.62·10⁹ parameters: actor and critic 16 bytes each, reference and reward 2 each; and what one phase needs."""
    scenario = SCENARIOS["out_of_memory"]
    [whole] = run_scenario(scenario)
    assert 36 * 7.62 < whole["memory_gb"] < 36 * 7.62 + 5
    # ZeRO-3 divides all but the reward by 8, and collects the actor to generate.
    [sharded] = run_scenario(scenario, cured=True)
    assert 34 * 7.62 / 8 + 2 * 7.62 + 2 * 7.62 < sharded["memory_gb"] < 80 == sharded["memory_limit_gb"]
    for name, fits in {"ZeRO-3": True, "offload": True, "shorter rollout": False}.items():
        [row] = run_scenario(scenario, book_cure=name)
        assert (row["memory_gb"] <= row["memory_limit_gb"]) == fits


def test_the_words_of_an_answer_are_its_reward():
    assert number_of_words(["x", "y"], ["a b  c", ""]) == [3.0, 0.0]


def test_a_reward_for_any_word_at_all_tells_no_two_answers_apart():
    assert not_empty(["x"] * 3, ["bad", " good film", " "]) == [1.0, 1.0, 0.0]


# Refusals and hand-made rows


def test_a_cure_that_the_book_does_not_name_is_refused():
    with pytest.raises(ValueError, match="must be one of ε = 0"):
        run_scenario(SCENARIOS["crawling"], book_cure="prayer")
    with pytest.raises(ValueError, match="without cured"):
        run_scenario(SCENARIOS["crawling"], cured=True, book_cure="ε = 0.3")


def test_hacking_needs_a_gold_score_that_falls_while_the_score_rises():
    gold = [0.0, 0.4, 0.3, 0.1, 0.1, 0.1]
    rows = [{"gold": g, "score": float(i), "repetitive": 0.5} for i, g in enumerate(gold)]
    assert reward_is_hacked(rows)
    assert not reward_is_hacked([{**row, "gold": 0.1} for row in rows])
    assert not reward_is_hacked([{**row, "score": -row["score"]} for row in rows])
    assert not reward_is_hacked([{**row, "repetitive": 0.1} for row in rows])


def test_a_critic_that_learns_is_not_stuck():
    rows = [{"value_loss": 0.3, "explained_variance": 0.001} for _ in range(8)]
    assert critic_is_stuck(rows)
    assert critic_is_stuck([{**row, "explained_variance": -0.4} for row in rows])
    assert not critic_is_stuck([*rows[:-1], {"value_loss": 0.3, "explained_variance": 0.1}])
    assert not critic_is_stuck([{**row, "value_loss": 0.3 / (i + 1)} for i, row in enumerate(rows)])


def test_advantages_that_differ_or_a_gold_score_that_rises_are_not_equal_rewards():
    rows = [{"advantage_std": 0.1, "gold": 0.02 * i} for i in range(6)]
    assert nothing_is_told_apart(rows)
    assert not nothing_is_told_apart([*rows[:-1], {**rows[-1], "advantage_std": 0.2}])
    assert not nothing_is_told_apart([{**row, "gold": 2 * row["gold"]} for row in rows])


def test_a_ratio_that_does_not_start_at_1_is_told_by_what_the_sampler_said():
    lagging = [{"ratio_deviation": 0.3, "sampler_kl": 0.0}]
    stale = [{"ratio_deviation": 0.3, "sampler_kl": 0.02}]
    rounding = [{"ratio_deviation": 1e-6, "sampler_kl": 0.02}]
    assert [sampler_lags(rows) for rows in (lagging, stale, rounding)] == [True, False, False]
    assert [log_probs_are_stale(rows) for rows in (lagging, stale, rounding)] == [False, True, False]


def test_a_little_below_zero_is_noise_and_not_a_mask():
    rows = [{"kl_per_response": -0.01, "response_length": 22.0}]
    assert not kl_is_negative(rows)
    assert kl_is_negative([{**rows[0], "kl_per_response": -2.0}])
    assert not kl_is_negative([{**rows[0], "kl_per_response": -2.0, "response_length": 12.3}])


def test_an_actor_without_a_gradient_has_no_fault_of_its_own():
    row = {"approx_kl": 1e-13, "kl_per_response": 1e-7, "grad_norm": 0.4}
    assert actor_stands_still([row, row])
    assert not actor_stands_still([row, {**row, "kl_per_response": 0.02}])
    assert not actor_stands_still([row, {**row, "grad_norm": 0.0}])
