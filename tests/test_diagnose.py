"""The diagnosis of a run: each rule at its threshold, silence on healthy runs, and what is read and printed."""

import csv
import io
import math
import random
import subprocess
import sys
import time
from itertools import groupby

import numpy as np
import pytest
import torch

from ppo_lab.control import probes
from ppo_lab.control import train as control
from ppo_lab.control.config import tuned
from ppo_lab.control.probes import PROBES
from ppo_lab.diagnostics import __main__ as command
from ppo_lab.diagnostics import diagnose
from ppo_lab.diagnostics.history import COLUMNS, read_history
from ppo_lab.diagnostics.symptoms import RULES
from ppo_lab.diagnostics.watch import FIRST_ROWS, LAST_ROWS, Watch
from ppo_lab.files import DATA, data_path, read_table
from ppo_lab.llm import run as llm
from ppo_lab.llm.failures import SCENARIOS

NAN, INF = math.nan, math.inf
# A row of a healthy language model in the middle of its training.
LLM = {
    "gold": 0.3,
    "repetitive": 0.02,
    "kl_per_response": 1.0,
    "policy_loss": -0.003,
    "value_loss": 0.2,
    "entropy": 1.0,
    "approx_kl": 0.002,
    "clip_fraction": 0.01,
    "ratio_deviation": 2e-6,
    "first_approx_kl": 1e-13,
    "sampler_kl": 0.0,
    "grad_norm": 0.5,
    "explained_variance": 0.3,
    "advantage_std": 0.6,
    "response_length": 10.0,
    "unfinished": 0.0,
    "empty": 0.0,
    "updates": 4,
    "kl_coef": 0.1,
    "seconds_generate": 0.1,
    "seconds_score": 0.1,
    "seconds_update": 0.4,
    "memory_gb": 1.0,
    "memory_limit_gb": 10.0,
}
CONTROL = {
    "steps": 1000,
    "episode_return": 100.0,
    "policy": -0.01,
    "value": 1.0,
    "entropy": 1.0,
    "approx_kl": 0.005,
    "clip_fraction": 0.05,
    "explained_variance": 0.5,
    "updates": 24,
}


def rows_of(healthy=LLM, n_rows=16, **columns):
    """A history that is healthy but for some columns: a number for all rows, a list, or {place: number}."""
    rows = [{"iteration": i, **healthy} for i in range(n_rows)]
    if healthy is LLM:
        # No two batches score alike.
        rows = [{**row, "score": 1.5 + 0.1 * (row["iteration"] % 2)} for row in rows]
    for name, values in columns.items():
        for i, row in enumerate(rows):
            if isinstance(values, dict):
                row[name] = values.get(i, row.get(name))
            else:
                row[name] = values[i] if isinstance(values, list) else values
    return rows


def symptoms(history):
    return [(finding.symptom, finding.iteration) for finding in diagnose(history)]


def first(n_rows, value):
    """A column that has a value in the first rows only."""
    return dict.fromkeys(range(n_rows), value)


def from_place(place, value):
    return dict.fromkeys(range(place, 16), value)


# symptom, since, columns just healthy, columns just sick
EDGES = [
    ("ratio not 1 at the start", 7, {"first_approx_kl": {7: 0.0019}}, {"first_approx_kl": {7: 0.0021}}),
    # In bfloat16 the maximum is large by rounding; it counts where nothing better is recorded.
    ("ratio not 1 at the start", 7, {"ratio_deviation": 9.0},
                                    {"ratio_deviation": {7: 1.1}, "first_approx_kl": NAN}),
    ("ratio not 1 at the start", 7, {"ratio_deviation": 0.9, "first_approx_kl": NAN},
                                    {"ratio_deviation": {7: 1.1}, "first_approx_kl": NAN}),
    ("sampler mismatch", 0, {"sampler_kl": 0.0099}, {"sampler_kl": first(3, 0.0101)}),
    ("sampler mismatch", 0, {"sampler_kl": first(2, 9.0)}, {"sampler_kl": first(3, 9.0)}),
    ("wrong mask", 7, {"kl_per_response": {7: -0.49}}, {"kl_per_response": {7: -0.51}}),
    # Half of the answers were cut; the limit is 12 at least, for one mean was above 11.
    ("wrong mask", 7, {"response_length": {3: 11.5}, "unfinished": {7: 0.5, 8: 0.84}},
                      {"response_length": {3: 11.5, 7: 5.9}, "unfinished": {7: 0.5}}),
    ("negative β", 7, {"kl_coef": {7: 0.0}}, {"kl_coef": {7: -1e-6}}),
    ("KL spike", 7, {"approx_kl": {7: 0.19}}, {"approx_kl": {7: 0.21}}),
    # From 1 nat to 4 is 3 nats; from 2 to 6 three times.
    ("KL spike", 7, {"kl_per_response": from_place(7, 3.99)}, {"kl_per_response": from_place(7, 4.01)}),
    ("KL spike", 7, {"kl_per_response": [2.0] * 7 + [5.99] * 9}, {"kl_per_response": [2.0] * 7 + [6.01] * 9}),
    # √10 · 2.8 = 8.854, and √512 · 2.8 = 63.4.
    ("KL too large", 7, {"kl_per_response": {6: 3.0, 7: 8.8}}, {"kl_per_response": {6: 3.0, 7: 8.9}}),
    ("KL too large", 0, {"kl_per_response": 63.0, "response_length": 512.0},
                        {"kl_per_response": 64.0, "response_length": 512.0}),
    ("loss explosion", 7, {"value_loss": {7: 19}}, {"value_loss": {7: 21}}),
    ("loss explosion", 7, {"grad_norm": {7: 9.9}}, {"grad_norm": {7: 10.1}}),
    # The critic warms up: five norms of 0 are no start to compare with.
    ("loss explosion", 12, {"grad_norm": {**first(5, 0.0), 12: 9.9}}, {"grad_norm": {**first(5, 0.0), 12: 10.1}}),
    ("stuck value loss", 0, {"explained_variance": first(11, 0.0)}, {"explained_variance": first(12, 0.019)}),
    ("stuck value loss", 3, {"explained_variance": from_place(3, 0.021)}, {"explained_variance": from_place(3, -3.0)}),
    ("degenerate advantages", 0, {"advantage_std": first(2, 0.0)}, {"advantage_std": first(3, 0.0009)}),
    # All answers score alike, for five batches; six digits of the mean are the same.
    ("degenerate advantages", 3, {"score": dict.fromkeys((3, 4, 6, 8, 9), 7.0)},
                                 {"score": dict.fromkeys(range(3, 8), 7.0)}),
    ("degenerate advantages", 0, {"score": [1 + 1e-5 * (i % 2) for i in range(16)]},
                                 {"score": [1 + 1e-7 * (i % 2) for i in range(16)]}),
    ("degenerate advantages", 0, {}, {"score": 0.0}),
    ("reward hacking", 0, {"repetitive": first(3, 0.29)}, {"repetitive": first(3, 0.31)}),
    ("reward hacking", 0, {"repetitive": first(2, 0.9)}, {"repetitive": first(3, 0.9)}),
    ("entropy collapse", 7, {"entropy": {7: 0.26}}, {"entropy": {7: 0.24}}),
    ("endless answers", 0, {"unfinished": first(4, 0.9)}, {"unfinished": first(5, 0.31)}),
    ("empty answers", 0, {"empty": first(2, 0.9)}, {"empty": first(3, 0.31)}),
    ("clip range too small", 0, {"clip_fraction": first(4, 0.4)}, {"clip_fraction": first(5, 0.16)}),
    ("clip range too small", 0, {"clip_fraction": 0.2, "approx_kl": 0.0051}, {"clip_fraction": 0.2}),
    ("frozen actor", 0, {"approx_kl": first(7, 0.0)}, {"approx_kl": first(8, 9e-8)}),
    ("non-finite numbers", 7, {"score": {7: 1e30}}, {"score": {7: -INF}}),
    ("non-finite numbers", 7, {"policy_loss": {7: NAN}, "updates": {7: 0}}, {"policy_loss": {7: NAN}}),
    ("out of memory", 7, {"memory_gb": {7: 8.9}}, {"memory_gb": {7: 9.1}}),
    ("frozen actor", 0, {"approx_kl": 1e-5, "kl_per_response": [0.0009, -0.0009] * 7 + [0.0009, 0.0011]},
                        {"approx_kl": 9e-5, "kl_per_response": [0.0009, -0.0009] * 8}),
    # A tenth of a second to score: 10 tokens may take 1 second to write.
    ("slow rollout", 0, {"seconds_generate": 0.99, "seconds_update": 0.1}, {"seconds_generate": 1.2}),
    ("slow rollout", 0, {"seconds_generate": 1.2, "seconds_update": 0.5}, {"seconds_generate": 1.2}),
]  # fmt: skip


@pytest.mark.parametrize("symptom, since, healthy, sick", EDGES, ids=lambda x: x if isinstance(x, str) else "")
def test_a_rule_speaks_beyond_its_threshold_and_not_before(symptom, since, healthy, sick):
    assert symptoms(rows_of(**healthy)) == []
    assert symptoms(rows_of(**sick)) == [(symptom, since)]


def test_every_rule_stands_at_its_threshold_above():
    assert {rule.symptom for rule in RULES} == {edge[0] for edge in EDGES}


@pytest.mark.parametrize("healthy", [LLM, CONTROL], ids=["llm", "control"])
def test_a_healthy_run_has_no_finding(healthy):
    assert diagnose(rows_of(healthy)) == diagnose([]) == []


def test_a_finding_says_what_since_when_why_and_what_to_do():
    (finding,) = diagnose(rows_of(approx_kl={7: 0.9}))
    assert finding.evidence == "approx_kl is 0.9, above 0.2, in iteration 7"
    assert finding.iteration == 7
    assert "learning rate" in finding.causes[0] and finding.first_try.startswith("Divide lr")
    assert finding.section == "chapter 08, section 2.2; §13.8, §13.6.5"


# --- what a rule needs


def test_the_earliest_symptom_comes_first_and_of_equals_kl_then_value_loss_then_reward():
    sick = {"entropy": {7: 0.1}, "value_loss": {7: 99.0}, "approx_kl": {7: 1.0}}
    assert symptoms(rows_of(**sick)) == [("KL spike", 7), ("loss explosion", 7), ("entropy collapse", 7)]
    sick["value_loss"] = {6: 99.0}
    assert symptoms(rows_of(**sick)) == [("loss explosion", 6), ("KL spike", 7), ("entropy collapse", 7)]


@pytest.mark.parametrize("nothing", [NAN, None, "", "nan"])
@pytest.mark.parametrize("healthy", [LLM, CONTROL], ids=["llm", "control"])
def test_what_is_missing_is_no_evidence(healthy, nothing):
    for name in healthy:
        lost = {name: nothing, "updates": 0} if name in ("policy", "policy_loss") else {name: nothing}
        assert diagnose(rows_of(healthy, **lost)) == [], name
    assert diagnose(rows_of({name: nothing for name in COLUMNS})) == []


@pytest.mark.parametrize("healthy", [LLM, CONTROL], ids=["llm", "control"])
def test_a_column_that_is_not_there_is_not_missed(healthy):
    for name in healthy:
        assert diagnose([{key: row[key] for key in row if key != name} for row in rows_of(healthy)]) == [], name


def test_a_leap_of_the_kl_is_one_between_neighbours():
    rows = rows_of(kl_per_response=from_place(7, 4.5))
    assert symptoms(rows) == [("KL spike", 7)]
    # Every fourth row of a record: what happened in between took four iterations.
    assert symptoms([{**row, "iteration": 4 * row["iteration"]} for row in rows]) == []
    # From hardly anything to little is how every run begins.
    assert symptoms(rows_of(kl_per_response=[0.4] * 7 + [2.0] * 9)) == []
    # Few answers in a batch: one low row is not where the KL stood.
    assert symptoms(rows_of(kl_per_response=[2.0] * 6 + [0.5] + [4.0] * 9)) == []
    # Below 0 is no place to leap from.
    assert symptoms(rows_of(kl_per_response=[-5.0] * 8 + [-1.0] * 8)) == [("wrong mask", 0)]


@pytest.mark.parametrize(
    "excuse",
    [
        {"value_loss": [0.4 - 0.02 * i for i in range(16)]},  # it learns, though slowly
        {"value_loss": {0: 3.0}},  # nothing is left to learn
        {"approx_kl": 0.0, "updates": 1},  # one step per rollout
        {"value_loss": NAN},  # no critic
    ],
    ids=["falls", "tiny", "one step", "no critic"],
)
def test_a_critic_with_an_excuse_is_not_stuck(excuse):
    assert symptoms(rows_of(explained_variance=0.0)) == [("stuck value loss", 0)]
    assert symptoms(rows_of(explained_variance=0.0, **excuse)) == []


@pytest.mark.parametrize(
    "excuse",
    [{"updates": 1}, {"grad_norm": 0.0}, {"grad_norm": {i: NAN for i in range(12)}}, {"entropy": 0.0}],
    ids=["one step", "critic warm-up", "no gradient recorded", "no choice"],
)
def test_an_actor_with_an_excuse_is_not_frozen(excuse):
    assert symptoms(rows_of(approx_kl=0.0)) == [("frozen actor", 0)]
    assert symptoms(rows_of(approx_kl=0.0, **excuse)) == []


def test_an_actor_that_became_certain_need_not_move():
    still = {"approx_kl": from_place(4, 1e-9), "n_rows": 16}
    assert symptoms(rows_of(CONTROL, entropy=from_place(4, 0.11), **still)) == [("frozen actor", 4)]
    assert symptoms(rows_of(CONTROL, entropy=from_place(4, 0.09), **still)) == []


def test_gold_that_falls_by_more_than_half_of_its_rise_is_hacking_if_the_score_holds():
    rising = [0.1 * i for i in range(9)]
    score = [0.5 * i for i in range(20)]
    # Means of five rows rise from 0.2 to 0.74 around place 9, and fall to 0.49.
    little = rising + [0.8 - 0.035 * i for i in range(1, 12)]
    much = rising + [0.8 - 0.08 * i for i in range(1, 12)]
    assert symptoms(rows_of(n_rows=20, gold=little, score=score)) == []
    assert symptoms(rows_of(n_rows=20, gold=much, score=score)) == [("reward hacking", 8)]
    assert symptoms(rows_of(n_rows=20, gold=much, score=[*score[:10], *score[9::-1]])) == []


def test_without_a_judge_hacking_is_a_score_far_from_the_reference_with_little_entropy():
    unjudged = {name: x for name, x in LLM.items() if name not in ("gold", "repetitive")}
    far = {"kl_per_response": [3.0] * 8 + [8.9] * 8, "score": [0.1 * i for i in range(16)]}
    assert symptoms(rows_of(unjudged, **far, entropy={8: 0.71})) == [("KL too large", 8)]
    assert symptoms(rows_of(unjudged, **far, entropy={8: 0.69})) == [("reward hacking", 8), ("KL too large", 8)]
    assert symptoms(rows_of(**far, entropy={8: 0.69})) == [("KL too large", 8)]


def test_what_explains_another_symptom_stands_before_it():
    sick = {"sampler_kl": 1.0, "kl_per_response": from_place(5, -3.0)}
    assert symptoms(rows_of(**sick)) == [("wrong mask", 5), ("sampler mismatch", 0)]
    # Answers that differ in length: the mask is right, another policy wrote them.
    assert symptoms(rows_of(**sick, response_length=10.3)) == [("sampler mismatch", 0)]
    assert symptoms(rows_of(**{**sick, "sampler_kl": 0.0}, response_length=10.3)) == [("wrong mask", 5)]
    sick = {"sampler_kl": 1.0, "first_approx_kl": from_place(1, 0.1)}
    assert symptoms(rows_of(**sick)) == [("ratio not 1 at the start", 1), ("sampler mismatch", 0)]
    # Gold falls as well, because the limit cuts more and more answers.
    gold, score = [0.5, 0.6, 0.7, 0.6, 0.4, 0.2, 0.0, -0.2] + [-0.3] * 8, [float(i) for i in range(16)]
    assert symptoms(rows_of(gold=gold, score=score)) == [("reward hacking", 2)]
    assert symptoms(rows_of(gold=gold, score=score, unfinished=from_place(3, 0.9))) == [("endless answers", 3)]


def test_the_value_loss_of_control_is_measured_against_its_start():
    start = {0: 1e-4, 1: 0.5, 2: 0.5, 3: 0.5, 4: 7.0}  # median 0.5
    assert symptoms(rows_of(CONTROL, value={**start, 7: 49.0})) == []
    assert symptoms(rows_of(CONTROL, value={**start, 7: 51.0})) == [("loss explosion", 7)]
    # The first success where rewards are rare.
    success = {"value": [1e-4] * 7 + [0.2] * 9, "explained_variance": 0.5}
    assert symptoms(rows_of(CONTROL, **success, episode_return=[0.0] * 7 + [0.1 * i for i in range(1, 10)])) == []
    assert symptoms(rows_of(CONTROL, **success, episode_return=0.0)) == [("loss explosion", 7)]
    # In a study's table `value` is the setting that it varies.
    study = [{name: x for name, x in row.items() if name != "policy"} for row in rows_of(CONTROL, value={7: 1e6})]
    assert diagnose(study) == []


def test_the_entropy_of_control_has_collapsed_if_the_return_is_short_of_its_best():
    low = from_place(7, 0.04)
    returns = [10.0 * i for i in range(16)]
    assert symptoms(rows_of(CONTROL, entropy=low, episode_return=returns)) == []
    assert symptoms(rows_of(CONTROL, entropy=low, episode_return=[*returns[:8], *[60.0] * 8])) == [
        ("entropy collapse", 8)
    ]
    assert symptoms(rows_of(CONTROL, entropy=from_place(7, 0.06), episode_return=[*returns[:8], *[60.0] * 8])) == []


# --- runs that are healthy


def runs_of(name, *keys):
    """The runs of a study's table, each with the names that tell them apart."""
    rows = read_table(name)
    for key, run in groupby(rows, key=lambda row: tuple(row[column] for column in keys)):
        yield key, list(run)


@pytest.mark.parametrize("name", ["one_process", "resumed", "stage0", "stage1", "stage2", "stage3"])
def test_the_stored_run_on_ranks_is_healthy(name):
    assert diagnose(data_path(f"llm_ranks/{name}.csv")) == []


def test_the_stored_run_on_lunar_lander_is_healthy():
    assert diagnose(data_path("lander")) == []


def test_the_tuned_runs_of_the_studies_of_language_models_are_healthy():
    studies = ("adaptive_kl", "critic", "kl_coef", "reference_refresh", "reward_units", "tricks", "updates")
    # What each study has of the preset's own settings.
    preset = {"kl_coef": 0.1, "critic": "reward", "refresh_reference_every": 0.0, "reward_scale": "scaled"}
    preset |= {"tuned": "tuned", "k_epochs": 2.0, "minibatch_size": 64.0}
    n_runs = 0
    for study in studies:
        for (trick, value, seed), run in runs_of(f"llm/{study}.csv", "trick", "value", "seed"):
            if value == preset.get(trick):
                assert diagnose(run) == [], (study, trick, seed)
                n_runs += 1
    assert n_runs == 24


def test_the_tuned_runs_of_all_six_algorithms_on_cartpole_are_healthy():
    runs = list(runs_of("control/algorithms.csv", "algorithm", "seed"))
    assert len(runs) == 30
    assert [key for key, run in runs if diagnose(run)] == []


def test_the_reference_runs_of_lunar_lander_are_healthy():
    assert [seed for seed, run in runs_of("control/lander.csv", "seed") if diagnose(run)] == []


@pytest.mark.parametrize("name", [probe.name for probe in PROBES])
def test_a_solved_probe_is_healthy(name, monkeypatch):
    rows = []
    monkeypatch.setattr(probes, "train", lambda *run: rows.extend(control.train(*run)) or rows)
    for seed in range(3):
        rows.clear()
        assert probes.run_probe(name, seed=seed).passed
        assert len(rows) >= 12 and diagnose(rows) == [], seed


def test_a_run_of_cartpole_trained_now_is_healthy():
    _, rows = control.train_agent(tuned("CartPole-v1", seed=3))
    assert diagnose(rows) == []


# --- runs that are not


@pytest.mark.parametrize(
    "symptom, algorithm, changes",
    [
        ("KL spike", "ppo", {"lr": 0.1}),
        ("stuck value loss", "ppo", {"value_coef": 0.0, "total_steps": 13_000}),
        ("frozen actor", "ppo", {"lr": 1e-9, "total_steps": 8_500}),
        ("clip range too small", "ppo", {"eps_clip": 0.001}),
        ("entropy collapse", "a2c", {"lr": 0.1, "total_steps": 15_000}),
    ],
)
def test_a_run_of_cartpole_that_was_set_wrongly_is_told(symptom, algorithm, changes):
    settings = tuned("CartPole-v1", algorithm, **{"total_steps": 8_000, **changes})
    _, rows = control.train_agent(settings)
    assert diagnose(rows)[0].symptom == symptom


# What a reader is told of each scenario of ppo_lab.llm.failures.
TOLD = {
    "loss_explosion": "loss explosion",
    "kl_spike": "KL spike",
    "stuck_critic": "stuck value loss",
    "reward_hacking": "reward hacking",
    "out_of_memory": "out of memory",
    "slow_rollout": "slow rollout",
    "crawling": "clip range too small",
    "lagging_sampler": "ratio not 1 at the start",
    "stale_log_probs": "ratio not 1 at the start",
    "equal_rewards": "degenerate advantages",
    "negative_kl_coef": "negative β",
    "endless_answers": "endless answers",
    "padding_counted": "wrong mask",
    "eos_masked": "wrong mask",
    "frozen_actor": "frozen actor",
}


def test_every_scenario_of_the_zoo_has_its_symptom():
    assert set(TOLD) == set(SCENARIOS)


@pytest.fixture(scope="module")
def zoo():
    """The stored runs of the zoo by scenario, variant and seed."""
    return dict(runs_of("llm/failures.csv", "scenario", "variant", "seed"))


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_every_stored_failure_is_named_first_and_every_cured_run_is_healthy(zoo, scenario):
    for seed in range(3):
        found = symptoms(zoo[scenario, "failure", seed])
        assert found[0][0] == TOLD[scenario], (seed, found)
        assert diagnose(zoo[scenario, "cure", seed]) == [], seed


def test_the_healthy_runs_of_the_zoo_are_healthy_whenever_one_looks(zoo):
    for seed in range(3):
        run = zoo["healthy", "healthy", seed]
        assert len(run) == 33 and all(diagnose(run[: n + 1]) == [] for n in range(33))


@pytest.mark.parametrize("scenario", [name for name in SCENARIOS if name != "reward_hacking"])
def test_who_looks_after_every_iteration_is_told_the_same(zoo, scenario):
    # Before gold falls, the KL is large: reward hacking is told later.
    for seed in range(3):
        run = zoo[scenario, "failure", seed]
        looks = (symptoms(run[: n + 1]) for n in range(len(run)))
        assert next(found for found in looks if found)[0][0] == TOLD[scenario], seed


def test_no_number_is_too_wild():
    generator = random.Random(0)
    wild = [0.0, -1.0, 1e308, -1e308, INF, -INF, NAN, 1e-320, None, "", "1e999", 10**300]
    for _ in range(200):
        diagnose([{name: generator.choice(wild) for name in COLUMNS if generator.random() < 0.9} for _ in range(20)])


# --- what it reads


def write_csv(path, rows):
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_rows_texts_a_file_and_a_folder_say_the_same(tmp_path):
    rows = rows_of(approx_kl={7: 0.9}, entropy={9: 0.1})
    expected = diagnose(rows)
    assert [finding.symptom for finding in expected] == ["KL spike", "entropy collapse"]
    path = write_csv(tmp_path / "metrics.csv", rows)
    texts = [{name: str(x) for name, x in row.items()} for row in rows]
    assert diagnose(texts) == diagnose(path) == diagnose(str(tmp_path)) == diagnose(tmp_path) == expected


def test_numbers_of_any_kind_count():
    rows = rows_of(approx_kl={7: torch.tensor(0.9)}, value_loss={7: np.float32(99)}, updates=True)
    assert symptoms(rows) == [("KL spike", 7), ("loss explosion", 7)]


def test_a_history_without_iterations_counts_its_rows():
    rows = rows_of(approx_kl={7: 0.9})
    rows[3]["iteration"] = ""
    assert symptoms(rows) == [("KL spike", 7)]
    for row in rows:
        del row["iteration"]
    assert symptoms(rows) == [("KL spike", 7)]


def test_other_columns_may_hold_anything():
    assert diagnose(rows_of(answer="great great", positive=INF, judge=None)) == []


@pytest.mark.parametrize(
    "text, words",
    [
        ("", "holds no iterations"),
        ("iteration,approx_kl\n", "holds no iterations"),
        ("Dear diary,\ntoday it rained\n", "has none of the columns that a rule reads (score, kl_per_response, "),
        ("iteration;approx_kl\n0;0.5\n", "has none of the columns that a rule reads (score, kl_per_response, "),
    ],
)
def test_a_file_that_is_no_record_is_refused(tmp_path, text, words):
    path = tmp_path / "metrics.csv"
    path.write_text(text)
    with pytest.raises(ValueError) as error:
        diagnose(tmp_path)
    assert str(error.value).startswith(f"{path} {words}")
    # A run that was stopped in its first iteration has such a file; it can go on.
    if "Dear" not in text and ";" not in text:
        assert Watch(tmp_path).rows == []


@pytest.mark.parametrize("wrong", [{"approx_kl": [0.5]}, ["approx_kl"], np.ones((3, 2)), None, 3, b"runs", "a\0b", {}])
def test_what_is_neither_rows_nor_a_path_is_refused(wrong):
    with pytest.raises(ValueError, match="history must be rows of metrics or a path, got "):
        diagnose(wrong)


def test_a_history_is_read_once():
    rows = rows_of(approx_kl={7: 0.9})
    history = read_history(row for row in rows)
    assert read_history(history) is history and diagnose(history) == diagnose(rows) != []
    with pytest.raises(KeyError):
        history[0]


def test_a_byte_order_mark_is_no_part_of_a_name(tmp_path, capsys):
    path = tmp_path / "metrics.csv"
    path.write_text("approx_kl,iteration\n0.5,0\n", encoding="utf-8-sig")
    assert symptoms(path) == [("KL spike", 0)]
    assert Watch(tmp_path).rows == [{"approx_kl": "0.5", "iteration": "0"}]


def test_a_line_that_was_cut_short_lacks_its_last_cells(tmp_path):
    path = tmp_path / "metrics.csv"
    path.write_text("iteration,entropy,approx_kl\n0,1,0.5\n1,1\n")
    history = read_history(path)
    assert history["approx_kl"][0] == 0.5 and math.isnan(history["approx_kl"][1])
    assert symptoms(path) == [("KL spike", 0)]


@pytest.mark.parametrize(
    "text, words",
    [
        ("iteration,approx_kl\n0,0.1\n1,much\n", "line 3, column approx_kl: 'much' is not a number"),
        ("iteration,approx_kl\nzero,0.1\n", "line 2, column iteration: 'zero' is not a number"),
        ("iteration,approx_kl\n0,0.1,7\n", "line 2: more cells than the header has columns"),
        ("iteration,approx_kl\n0,0.1\n1,0.1\n0,0.1\n", "line 4: iteration 0 follows 1: a history is one run, in order"),
        ("iteration,policy,value\n0,1,big\n", "line 2, column value: 'big' is not a number"),
        ("iteration,approx_kl\n1,0.1\n,0.1\n0,0.1\n", "line 4: iteration 0 follows 1: a history is one run, in order"),
        ("iteration,approx_kl\n0,0\n0.5,0\n", "line 3: iteration must be a whole number, got 0.5"),
        ("iteration,approx_kl\n1e300,0\n", "line 2: iteration must be a whole number, got 1e+300"),
        ("iteration,approx_kl\ninf,0\n", "line 2: iteration must be a whole number, got inf"),
        ("approx_kl,iteration\n0,0\napprox_kl,iteration\n0,0\n", "line 3: a second header: two runs in one file"),
    ],
)
def test_a_damaged_file_is_named_with_line_and_column(tmp_path, text, words):
    path = tmp_path / "metrics.csv"
    path.write_text(text)
    with pytest.raises(ValueError) as error:
        diagnose(path)
    assert str(error.value) == f"{path}, {words}"


def test_a_damaged_row_is_named_with_its_place():
    with pytest.raises(ValueError, match="row 3, column entropy: 'low' is not a number"):
        diagnose(rows_of(entropy={3: "low"}))
    with pytest.raises(ValueError, match="row 16: iteration 0 follows 15"):
        diagnose(rows_of() + rows_of())


def test_a_file_that_is_no_text_is_refused(tmp_path):
    path = tmp_path / "metrics.csv"
    path.write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(ValueError, match="not a CSV file"):
        diagnose(path)


# --- the command


def test_the_command_prints_every_finding_with_its_causes(tmp_path, capsys):
    write_csv(tmp_path / "metrics.csv", rows_of(approx_kl={7: 0.9}, entropy={9: 0.1}))
    assert command.main([str(tmp_path)]) == 0
    first_part, second, measured = capsys.readouterr().out.split("\n\n")
    assert first_part.startswith("KL spike, since iteration 7\n  approx_kl is 0.9, above 0.2, in iteration 7\n")
    assert "    1. the learning rate is too high" in first_part and "  first try: Divide lr by 3" in first_part
    assert second.startswith("entropy collapse, since iteration 9\n")
    assert measured == "(the thresholds were measured with answers of about 10 words, 128 in a batch)\n"


def test_the_command_says_that_it_found_nothing(capsys):
    assert command.main([str(DATA / "lander")]) == 0
    assert capsys.readouterr().out == "nothing found in 89 iterations\n"


def test_the_command_ends_with_one_line_where_there_is_no_record(tmp_path, capsys):
    (tmp_path / "damaged.csv").write_text("iteration,approx_kl\n0,much\n")
    (tmp_path / "empty.csv").write_text("")
    for name in ("missing", "damaged.csv", "empty.csv", "."):
        assert command.main([str(tmp_path / name)]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1 and err.startswith(f"diagnostics: {tmp_path}")


def test_the_command_starts_without_a_warning():
    line = [sys.executable, "-W", "error", "-m", "ppo_lab.diagnostics", str(DATA / "lander")]
    ran = subprocess.run(line, capture_output=True, text=True, timeout=120)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "nothing found in 89 iterations\n", "")


# --- the trainers


def test_a_watch_says_the_first_finding_once(tmp_path, capsys):
    watch = Watch(tmp_path)
    for row in rows_of(approx_kl=from_place(7, 0.9), entropy={9: 0.1}):
        watch.see(row)
    out, err = capsys.readouterr()
    assert out == "" and err == (
        "iteration 7: KL spike: approx_kl is 0.9, above 0.2, in iteration 7. First try: Divide lr by 3, again until "
        "approx_kl is below 0.2; then fewer k_epochs, or stop_kl to end an update in time. "
        f"(python -m ppo_lab.diagnostics {tmp_path} tells more)\n"
    )


def test_a_watch_of_a_resumed_run_knows_its_rows(tmp_path, capsys):
    rows = rows_of(approx_kl=0.0, n_rows=8)
    write_csv(tmp_path / "metrics.csv", rows[:5])
    watch = Watch(tmp_path)
    for row in rows[5:]:
        watch.see(row)
    assert capsys.readouterr().err.startswith("iteration 0: frozen actor: ")
    # What was said before the run stopped is not said again.
    write_csv(tmp_path / "metrics.csv", rows)
    Watch(tmp_path).see({**rows[-1], "iteration": 8})
    assert capsys.readouterr().err == ""


def test_a_watch_says_the_machines_first_finding_beside_that_of_the_learning(tmp_path, capsys):
    slow = {"seconds_generate": 9.0}
    sick = rows_of(**slow, memory_gb=from_place(5, 9.5), approx_kl={9: 0.9}, entropy={11: 0.1})
    watch = Watch(tmp_path)
    for row in sick:
        watch.see(row)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[:2] for line in lines] == [["iteration 0", "slow rollout"], ["iteration 9", "KL spike"]]
    assert symptoms(sick) == [("KL spike", 9), ("entropy collapse", 11), ("slow rollout", 0), ("out of memory", 5)]


def test_a_finding_that_cannot_be_written_ends_no_run(tmp_path, monkeypatch):
    class Full(io.StringIO):
        def write(self, text):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(sys, "stderr", Full())
    watch = Watch(tmp_path)
    for row in rows_of(approx_kl={2: 0.9}):
        watch.see(row)
    assert watch.said == {False}


def test_an_early_finding_of_a_resumed_run_silences_itself_only(tmp_path, capsys):
    rows = rows_of(approx_kl={2: 0.9, 6: 0.9}, entropy={9: 0.1})
    write_csv(tmp_path / "metrics.csv", rows[:5])
    watch = Watch(tmp_path)
    for row in rows[5:]:
        watch.see(row)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("iteration 9: entropy collapse: ")


def test_rows_that_were_far_apart_are_no_neighbours(tmp_path, capsys):
    # Sick at the end of what is kept of the start, and again a hundred rows before now: never for long.
    sick = {17: 0.9, 18: 0.9, 19: 0.9, 60: 0.9, 61: 0.9}
    watch = Watch(tmp_path)
    for row in rows_of(n_rows=170, unfinished=sick, clip_fraction=sick):
        watch.see(row)
    assert capsys.readouterr().err == ""
    # In a record of every fourth row four iterations are no gap.
    rows = rows_of(unfinished=first(5, 0.9))
    assert symptoms([{**row, "iteration": 4 * row["iteration"]} for row in rows]) == [("endless answers", 0)]


def test_a_watch_keeps_the_start_and_the_end_of_a_long_run(tmp_path):
    watch = Watch(tmp_path)
    for row in rows_of(n_rows=200):
        watch.see(row)
    kept = [row["iteration"] for row in watch.rows]
    assert kept == [*range(FIRST_ROWS), *range(200 - LAST_ROWS, 200)]
    # One look costs little beside an iteration.
    started = time.process_time()
    for _ in range(20):
        diagnose(watch.rows)
    assert (time.process_time() - started) / 20 < 0.02


def test_the_trainer_of_control_says_what_is_wrong_once(tmp_path, capsys):
    flags = "--total-steps 4000 --lr 0.3 --checkpoint-every 2"
    assert control.main(["--out", str(tmp_path / "run"), *flags.split()]) == 0
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and err.startswith("iteration 1: KL spike: approx_kl is ")


def test_the_trainer_of_language_models_says_what_is_wrong_once(tmp_path, capsys):
    flags = "--iterations 3 --batch-size 8 --minibatch-size 4 --max-new-tokens 8 --lr 0.05 --warmup-iterations 0"
    assert llm.main(["--out", str(tmp_path / "run"), *flags.split()]) == 0
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and err.startswith("iteration 0: KL spike: approx_kl is ")
