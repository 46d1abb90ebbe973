"""The stored data: complete, described, small, and what the tools that made them promise."""

import csv
import importlib.util
import itertools
import json
import re
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ppo_lab.control.checkpoint import load_network
from ppo_lab.control.config import Settings, tuned
from ppo_lab.control.evaluate import evaluate
from ppo_lab.files import DATA, read_table
from ppo_lab.llm.reviews import make_tokenizer

TOOLS = Path(__file__).resolve().parent.parent / "tools"


def load_tool(name):
    spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


studies = load_tool("studies")
llm_studies = load_tool("llm_studies")
llm_methods = load_tool("llm_methods")
llm_failures = load_tool("llm_failures")
llm_overoptimisation = load_tool("llm_overoptimisation")
llm_ranks = load_tool("llm_ranks")
make_data = load_tool("make_data")
NAMES = list(studies.STUDIES)
LANGUAGE_NAMES = list(llm_studies.STUDIES)
METHOD_TABLES = ("methods", "methods_final", "methods_frontier")
LANGUAGE_KEY = ("study", "trick", "value", "seed")
KEY = ("study", "env_id", "algorithm", "setting", "value", "seed")


def header(path):
    with open(path, newline="", encoding="utf-8") as file:
        return next(csv.reader(file))


def key_of(row):
    """As text: the tables are read back as numbers where they can be."""
    return tuple(f"{x:g}" if isinstance(x, float) else x for x in (row[name] for name in KEY))


def key_of_run(run):
    settings = run.settings
    return (run.study, settings.env_id, settings.algorithm, run.setting, run.value, f"{settings.seed}")


# The stored files


def test_every_study_is_stored_and_nothing_else():
    promised = {f"{name}{part}.csv" for name in NAMES for part in ("", "_final")}
    assert {path.name for path in (DATA / "control").iterdir()} == promised


@pytest.mark.parametrize("name", NAMES)
def test_the_columns_are_the_promised_ones(name):
    assert header(DATA / "control" / f"{name}.csv") == list(studies.CURVE_COLUMNS)
    assert header(DATA / "control" / f"{name}_final.csv") == list(studies.FINAL_COLUMNS)


@pytest.mark.parametrize("name", NAMES)
def test_the_stored_runs_are_those_the_study_defines(name):
    """Whoever changes a study has to make its data again."""
    stored = [key_of(row) for row in read_table(f"control/{name}_final.csv")]
    assert stored == [key_of_run(run) for run in studies.STUDIES[name]()]


@pytest.mark.parametrize("name", NAMES)
def test_every_value_of_a_study_was_run_with_the_same_seeds(name):
    seeds = {}
    for study, _, algorithm, setting, value, seed in map(key_of, read_table(f"control/{name}_final.csv")):
        seeds.setdefault((study, algorithm, setting, value), []).append(seed)
    promised = ["0", "1", "2"] if name.startswith("lander") else ["0", "1", "2", "3", "4"]
    assert all(found == promised for found in seeds.values())


@pytest.mark.parametrize("name", NAMES)
def test_a_curve_ends_where_its_agent_was_measured(name):
    last = {key_of(row): row["steps"] for row in read_table(f"control/{name}.csv")}
    assert last == {key_of(row): row["steps"] for row in read_table(f"control/{name}_final.csv")}


@pytest.mark.parametrize("name", NAMES)
def test_the_curves_of_a_study_have_equally_many_rows(name):
    """So that a figure may stack them: [seeds, rows]."""
    rows = Counter(key_of(row) for row in read_table(f"control/{name}.csv"))
    lengths = {}
    for (study, *_), count in rows.items():
        lengths.setdefault(study, set()).add(count)
    assert all(len(counts) == 1 and max(counts) <= 50 for counts in lengths.values())


@pytest.mark.parametrize("name", NAMES)
def test_the_numbers_are_possible_ones(name):
    for row in read_table(f"control/{name}.csv"):
        assert 0 <= row["clip_fraction"] <= 1 and row["approx_kl"] >= 0
        assert 0 <= row["entropy"] <= np.log(4 if row["env_id"] == studies.LANDER else 2) + 1e-3
        assert row["steps"] >= 1
    for row in read_table(f"control/{name}_final.csv"):
        assert row["greedy_return_min"] <= row["greedy_return"]
        if row["env_id"] == studies.CARTPOLE:
            assert all(1 <= row[name] <= 500 for name in ("greedy_return", "sampled_return"))


def test_the_tables_are_small():
    assert sum(path.stat().st_size for path in (DATA / "control").iterdir()) <= 1_500_000


def test_the_readme_names_every_file():
    text = (DATA / "README.md").read_text(encoding="utf-8")
    folders = ("control", "lander", "llm", "llm_ranks", "reviews", "models/sft", "models/reward")
    files = [path.relative_to(DATA).as_posix() for folder in folders for path in (DATA / folder).iterdir()]
    assert [name for name in files if f"`{name}`" not in text] == []


# The stored studies of the language models


def language_key(row):
    """As text, for the same reason as `key_of`."""
    return tuple(f"{row[name]:g}" if isinstance(row[name], float) else row[name] for name in LANGUAGE_KEY)


def test_every_language_study_is_stored_and_nothing_else():
    stems = [name.removeprefix("llm_") for name in LANGUAGE_NAMES]
    promised = {f"{stem}{part}.csv" for stem in stems for part in ("", "_final")}
    promised |= {f"{name}.csv" for name in METHOD_TABLES}
    promised |= {"failures.csv", "overoptimisation.csv", "overoptimisation_models.csv", "overoptimisation_answers.csv"}
    assert {path.name for path in (DATA / "llm").iterdir()} == promised


@pytest.mark.parametrize("name", LANGUAGE_NAMES)
def test_the_stored_language_runs_are_those_the_study_defines(name):
    stem = name.removeprefix("llm_")
    stored = [language_key(row) for row in read_table(f"llm/{stem}_final.csv")]
    runs = llm_studies.STUDIES[name]()
    assert stored == [(run.study, run.trick, run.value, f"{run.settings.seed}") for run in runs]
    assert header(DATA / "llm" / f"{stem}.csv") == list(llm_studies.CURVE_COLUMNS)
    assert header(DATA / "llm" / f"{stem}_final.csv") == list(llm_studies.FINAL_COLUMNS)


@pytest.mark.parametrize("name", LANGUAGE_NAMES)
def test_a_language_curve_goes_from_the_first_iteration_to_the_last(name):
    """Every run of a study at the same iterations, so that a figure may stack them: [seeds, rows]."""
    stem, steps = name.removeprefix("llm_"), {}
    for row in read_table(f"llm/{stem}.csv"):
        steps.setdefault(language_key(row), []).append(row["iteration"])
    n_iterations = {run.settings.iterations for run in llm_studies.STUDIES[name]()}.pop()
    every = range(0, n_iterations, llm_studies.EVERY)
    assert {tuple(found) for found in steps.values()} == {tuple(sorted({*every, n_iterations - 1}))}
    assert {row["iteration"] for row in read_table(f"llm/{stem}_final.csv")} == {n_iterations}


@pytest.mark.parametrize("name", LANGUAGE_NAMES)
def test_the_numbers_of_a_language_run_are_possible_ones(name):
    stem = name.removeprefix("llm_")
    for row in read_table(f"llm/{stem}.csv") + read_table(f"llm/{stem}_final.csv"):
        assert all(0 <= row[share] <= 1 for share in ("positive", "grammatical", "repetitive"))
        assert -2.5 <= row["gold"] <= 1 and 1 <= row["response_length"] <= 24
    for row in read_table(f"llm/{stem}.csv"):
        # An untouched policy is 0 nats away, up to the rounding of a mean over samples.
        assert row["kl_to_start"] > -1e-3 and row["approx_kl"] >= 0 and 0 <= row["clip_fraction"] <= 1
        assert row["iteration"] > 0 or abs(row["kl_to_start"]) < 1e-4


def test_the_language_tables_are_small():
    sizes = {path.name: path.stat().st_size for path in (DATA / "llm").iterdir()}
    assert sizes.pop("failures.csv") <= 800_000
    assert sum(sizes.values()) <= 400_000


# The runs with other reward models


def test_the_stored_runs_with_other_reward_models_are_those_of_the_tool():
    """Every run of the tool from the first iteration to the last, and nothing else."""
    stored = {}
    for row in read_table("llm/overoptimisation.csv"):
        stored.setdefault((row["arm"], row["kl_coef"], row["seed"]), []).append(row["iteration"])
    assert list(stored) == [(run.arm, run.kl_coef, float(run.seed)) for run in llm_overoptimisation.runs()]
    assert set(map(tuple, stored.values())) == {tuple(range(llm_overoptimisation.ITERATIONS))}
    assert header(DATA / "llm" / "overoptimisation.csv") == list(llm_overoptimisation.COLUMNS)


def test_the_stored_reward_models_learned_from_the_stored_pairs():
    """The stored one from all of them, the two of the ensemble from a half each, the better one from more."""
    pairs = {row["model"]: row["pairs"] for row in read_table("llm/overoptimisation_models.csv")}
    assert pairs["stored"] == 3400 and pairs["first_half"] == pairs["second_half"] == 1700 and pairs["better"] > 3400
    answers = read_table("llm/overoptimisation_answers.csv")
    assert [row["policy"] for row in answers] == ["reference"] * 3 + ["hacked"] * 3


# The stored failures


def test_the_stored_failures_are_the_runs_of_the_tool():
    """Whoever changes a scenario has to make the data again; the iterations of a run are all there, in order."""
    stored = {}
    for row in read_table("llm/failures.csv"):
        stored.setdefault((row["scenario"], row["variant"], row["seed"]), []).append(row["iteration"])
    assert list(stored) == [(run.scenario, run.variant, float(run.seed)) for run in llm_failures.runs()]
    for (scenario, variant, _), iterations in stored.items():
        changes = llm_failures.ALL[scenario].book_cures.get(variant, {})
        assert iterations == list(range(changes.get("iterations", llm_failures.ALL[scenario].iterations)))


def test_a_stored_failure_has_the_columns_of_a_run():
    """An estimate of the memory has nothing else; every other row has all the numbers of metrics.csv."""
    rows = read_table("llm/failures.csv")
    assert tuple(rows[0])[:4] == (*llm_failures.KEY, "iteration")
    for row in rows:
        filled = [name for name, value in row.items() if value != ""]
        estimate = [*llm_failures.KEY, "iteration", "memory_gb", "memory_limit_gb"]
        assert filled == (estimate if row["scenario"] == "out_of_memory" else list(row))


# The stored comparison of methods


def method_rows(name):
    return read_table(f"llm/{name}.csv")


def test_the_stored_methods_are_those_that_the_tool_compares():
    compared = [(run.method, float(run.sampling.seed)) for run in llm_methods.comparison()]
    assert [(row["method"], row["seed"]) for row in method_rows("methods_final")] == compared
    assert {seed for _, seed in compared} == {0, 1, 2}
    columns = (llm_methods.CURVE_COLUMNS, llm_methods.FINAL_COLUMNS, llm_methods.FRONTIER_COLUMNS)
    assert [header(DATA / "llm" / f"{name}.csv") for name in METHOD_TABLES] == [list(names) for names in columns]
    assert sum((DATA / "llm" / f"{name}.csv").stat().st_size for name in METHOD_TABLES) <= 150_000


def settings_in_the_readme():
    """Of each method: the table of settings in the section on chapter 09, as numbers where they are some."""
    section = (DATA / "README.md").read_text(encoding="utf-8").split("## PPO and what may take its place")[1]
    table = section.split("| method | settings |")[1].split("\n\n")[0]
    found = {}
    for line in table.splitlines()[2:]:
        methods, settings = line.strip("| ").split(" | ")
        pairs = re.findall(r"`(\w+)` ([\w.]+)", settings)
        values = {name: float(x) if x[0].isdigit() else x for name, x in pairs}
        found |= {method: values for method in re.findall(r"`([^`]+)`", methods)}
    return found


def test_every_method_runs_with_the_settings_that_the_readme_names():
    described = settings_in_the_readme()
    trained = [run for run in llm_methods.comparison() if run.learns]
    assert set(described) == {run.method for run in trained}
    for run in trained:
        given = run.sampling if run.preference is None else run.preference
        assert {name: getattr(given, name) for name in described[run.method]} == described[run.method]
    for method, given in llm_methods.ON_PAIRS.items():
        assert set(described[method]) == set(given) - {"loss"} >= {"lr", "warmup_steps", "epochs", "batch_size"}


def test_those_of_ppo_kind_differ_from_ppo_in_the_advantage():
    """And in the size of the groups where they need some; GRPO as its paper in the price of the KL."""
    base = vars(llm_studies.tiny())
    for method in llm_methods.POLICY_GRADIENT:
        settings = vars(llm_methods.policy_gradient(method, seed=0).sampling)
        changed = {name for name, value in settings.items() if value != base[name]} - {"seed", "iterations"}
        of_kl = {"kl_coef", "kl_loss_coef", "kl_loss_kind"} if method == "grpo-paper" else set()
        of_advantage = set() if method == "ppo" else {"advantage"}
        assert changed - {"group_size"} == of_advantage | of_kl
        assert ("group_size" in changed) == (settings["group_size"] == 4)


def test_the_stored_runs_on_pairs_took_as_many_steps_as_their_settings_say():
    """A pass takes a step for every 32 pairs; a round of iterative DPO generates two answers to each of 64 prompts."""
    tokenizer, described = make_tokenizer(), settings_in_the_readme()
    ends = {(row["method"], row["seed"]): row for row in method_rows("methods")}
    for method in llm_methods.OFFLINE:
        for seed in llm_methods.SEEDS:
            pairs, _ = llm_methods.paid_pairs(tokenizer, seed)
            assert ends[method, seed]["step"] == described[method]["epochs"] * -(-len(pairs) // 32)
    for seed in llm_methods.SEEDS:
        end = ends["iterative-dpo", seed]
        assert 8 < end["generated_tokens"] / end["step"] / 128 < 13


def test_the_frontier_has_every_price_with_every_seed():
    stored = [(row["method"], row["knob"], row["value"], row["seed"]) for row in method_rows("methods_frontier")]
    assert stored == [(*point, run.sampling.seed) for *point, run in llm_methods.frontier()]


def test_every_trained_method_has_generated_as_many_tokens():
    """The last iteration may go past the budget: by 128 answers of at most 24 tokens, twice as many with ReMax."""
    for row in method_rows("methods_final"):
        trained = row["method"] != "sft" and not row["method"].startswith("best-of-")
        spent = row["generated_tokens"] - llm_methods.BUDGET
        assert 0 <= spent < 2 * 128 * 24 if trained else row["generated_tokens"] == row["seconds"] == 0


def test_a_curve_of_a_method_goes_from_the_start_to_the_end_of_its_budget():
    spent = {(row["method"], row["seed"]): row["generated_tokens"] for row in method_rows("methods_final")}
    curves = {}
    for row in method_rows("methods"):
        curves.setdefault((row["method"], row["seed"]), []).append(row)
    assert set(curves) == {run for run, tokens in spent.items() if tokens}
    for run, rows in curves.items():
        first, last = rows[0], rows[-1]
        assert (first["step"], first["generated_tokens"], first["seconds"]) == (0, 0, 0) and abs(first["kl"]) < 1e-4
        assert last["generated_tokens"] == spent[run]
        for name in ("step", "generated_tokens", "seconds"):
            assert all(row[name] <= following[name] for row, following in itertools.pairwise(rows))


def test_the_numbers_of_a_method_are_possible_ones():
    for row in (row for name in METHOD_TABLES for row in method_rows(name)):
        numbers = [x for x in row.values() if not isinstance(x, str)]
        assert np.isfinite(numbers).all()
        assert 0 <= row["positive"] <= 1 and 0 <= row["grammatical"] <= 1
        assert -2.5 <= row["gold"] <= 1 and row["kl"] > -1e-3


def test_the_best_of_n_pays_for_n_answers_each_time():
    paid = {}
    for row in method_rows("methods_final"):
        paid.setdefault(row["method"], []).append(row["tokens_per_answer"])
    for n in llm_methods.CANDIDATES[1:]:
        assert sum(paid[f"best-of-{n}"]) == pytest.approx(n * sum(paid["sft"]), rel=0.05)


def test_models_and_memory_of_the_methods():
    """Trained models take four times their weights, frozen ones once: PPO has two of each."""
    size = {row["method"]: (row["memory_mb"], row["n_models"]) for row in method_rows("methods_final")}
    weights = size["sft"][0]
    for method, (trained, frozen) in {"ppo": (2, 2), "grpo": (1, 2), "iterative-dpo": (1, 2), "dpo": (1, 0)}.items():
        assert size[method] == (pytest.approx((4 * trained + frozen) * weights, rel=0.01), trained + frozen)


# The stored runs on many ranks


def rank_run(name):
    return read_table(f"llm_ranks/{name}.csv")


def furthest(rows, others):
    """The largest difference of two runs in any column."""
    return max(abs(row[name] - other[name]) for row, other in zip(rows, others, strict=True) for name in row)


def test_the_rank_runs_are_those_the_tool_defines():
    names = {*llm_ranks.runs(), "resumed"}
    assert {path.name for path in (DATA / "llm_ranks").iterdir()} == {f"{name}.csv" for name in names}
    for name in names:
        assert header(DATA / "llm_ranks" / f"{name}.csv") == list(llm_ranks.COLUMNS)
        assert [row["iteration"] for row in rank_run(name)] == list(range(llm_ranks.ITERATIONS))
    assert sum(path.stat().st_size for path in (DATA / "llm_ranks").iterdir()) <= 60_000


def test_every_stage_on_two_ranks_is_the_run_of_one_process():
    """As long as no random number falls between two roundings of one probability: here for eleven iterations."""
    alone, first = rank_run("one_process"), rank_run("stage0")
    for stage in llm_ranks.STAGES:
        assert furthest(rank_run(f"stage{stage}")[:11], alone[:11]) < 2e-4
        assert furthest(rank_run(f"stage{stage}"), first) < 1e-4


def test_a_killed_and_resumed_run_is_the_straight_one_bit_for_bit():
    resumed, straight = (DATA / "llm_ranks" / f"{name}.csv" for name in ("resumed", "stage3"))
    assert resumed.read_bytes() == straight.read_bytes()


# The stored agent


def test_the_stored_agent_is_the_tuned_one_without_an_optimizer():
    _, settings = load_network(DATA / "lander")
    assert settings == tuned(studies.LANDER)
    assert {path.name for path in (DATA / "lander").iterdir()} == {
        "config.json",
        "checkpoint.safetensors",
        "metrics.csv",
    }
    assert (DATA / "lander" / "checkpoint.safetensors").stat().st_size < 100_000


def test_the_stored_metrics_reach_the_end_of_the_run():
    rows = read_table("lander/metrics.csv")
    assert 50 <= len(rows) <= 100
    assert rows[-1]["steps"] >= tuned(studies.LANDER).total_steps
    assert rows[-1]["episode_return"] > rows[0]["episode_return"] + 200


@pytest.mark.slow
def test_the_stored_agent_lands():
    """200 points are Gymnasium's own mark for a solved LunarLander."""
    network, settings = load_network(DATA / "lander")
    assert evaluate(network, settings.env_id, 10, seed=7).mean() > 200


# The reviews and their models


def test_reviews_and_models_are_complete_and_small():
    model = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in (DATA / "models" / "sft").iterdir()} == model | {"generation_config.json"}
    assert {path.name for path in (DATA / "models" / "reward").iterdir()} == model
    texts = {"reviews.txt", "prompts.txt", "prompts_held_out.txt"}
    pairs = {"preferences.jsonl", "preferences_held_out.jsonl"}
    assert {path.name for path in (DATA / "reviews").iterdir()} == texts | pairs
    assert sum(path.stat().st_size for path in (DATA / "reviews").iterdir()) <= 1_000_000
    assert sum(path.stat().st_size for path in (DATA / "models").rglob("*")) <= 500_000


# The tools


def test_values_are_written_as_a_reader_would():
    values = (None, True, False, "rollout", 0.2, 1e-4, 2000, 1e6)
    assert [studies.label(x) for x in values] == ["none", "on", "off", "rollout", "0.2", "0.0001", "2000", "1e+06"]


def test_a_study_varies_one_setting_and_the_seed():
    base = Settings(lr=0.5)
    runs = studies.vary("name", base, "eps_clip", (0.1, 0.3), seeds=(0, 1))
    assert [(run.value, run.settings.eps_clip, run.settings.seed) for run in runs] == [
        ("0.1", 0.1, 0),
        ("0.1", 0.1, 1),
        ("0.3", 0.3, 0),
        ("0.3", 0.3, 1),
    ]
    assert all(run.settings.lr == 0.5 and run.study == "name" for run in runs)


def test_details_differ_from_the_tuned_run_in_one_setting():
    base = tuned(studies.CARTPOLE)
    for run in studies.details():
        changed = [name for name, value in vars(run.settings).items() if value != getattr(base, name)]
        assert set(changed) - {"seed"} == ({run.setting} if run.value != "tuned" else set())


def test_a_curve_is_thinned_to_the_first_row_past_each_mark():
    run = studies.Run("s", "lr", "1", Settings(total_steps=100), points=4)
    rows = [{"steps": steps} for steps in (10, 20, 30, 49, 50, 74, 99, 108)]
    assert [row["steps"] for row in studies._thinned(rows, run)] == [30, 50, 99, 108]


def test_a_run_becomes_a_curve_and_one_final_row():
    settings = Settings(total_steps=300, num_envs=2, n_steps=50, k_epochs=1, seed=3)
    curve, final = studies.execute(studies.Run("tiny", "k_epochs", "1", settings, points=2))
    assert [tuple(row) for row in curve] == [studies.CURVE_COLUMNS] * 2
    assert tuple(final) == studies.FINAL_COLUMNS
    assert (final["study"], final["setting"], final["value"], final["seed"]) == ("tiny", "k_epochs", "1", 3)
    assert 300 <= final["steps"] == curve[-1]["steps"] <= 400


def test_a_trick_differs_from_the_tuned_run_in_one_setting():
    base = vars(llm_studies.tiny())
    for run in llm_studies.llm_tricks():
        changed = {name for name, value in vars(run.settings).items() if value != base[name]} - {"seed"}
        if run.trick == "kl_loss":
            # The price moves from the reward to the loss; k2 is the preset's kind.
            assert changed | {"kl_loss_kind"} == {"kl_coef", "kl_loss_coef", "kl_loss_kind"}
        else:
            assert changed == ({run.trick} if run.trick != "tuned" else set())


def test_a_run_in_smaller_units_is_the_same_run_in_larger_numbers():
    """Scores, β and the clip are converted; whitened advantages hide the unit from the policy."""
    tiny = llm_studies.tiny(iterations=1, batch_size=8, max_new_tokens=6, eps_clip_value=None)
    unit = llm_studies.UNIT
    converted = replace(tiny, kl_coef=unit * tiny.kl_coef, reward_clip=unit * tiny.reward_clip)
    (plain,), _ = llm_studies.execute(llm_studies.Run("units", "x", "1", tiny))
    (large,), _ = llm_studies.execute(llm_studies.Run("units", "x", "50", converted, unit))
    assert large["score"] == pytest.approx(unit * plain["score"], rel=1e-4)
    assert large["advantage_std"] == pytest.approx(unit * plain["advantage_std"], rel=1e-3)
    assert large["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-2)
    assert large["explained_variance"] == pytest.approx(plain["explained_variance"], abs=1e-3)


def test_a_language_run_measures_the_way_from_the_first_reference():
    """A refresh after each iteration keeps the logged KL of the next one at 0; the drift goes on."""
    settings = llm_studies.tiny(iterations=5, batch_size=16, max_new_tokens=8, refresh_reference_every=1)
    settings = replace(settings, warmup_iterations=0, lr=2e-3)
    curve, final = llm_studies.execute(llm_studies.Run("r", "x", "1", settings))
    assert [row["iteration"] for row in curve] == [0, 4]
    assert [tuple(row) for row in curve] == [llm_studies.CURVE_COLUMNS] * 2
    assert tuple(final) == llm_studies.FINAL_COLUMNS
    assert abs(curve[-1]["kl_per_response"]) < 1e-4 < 0.01 < curve[-1]["kl_to_start"]
    assert final["iteration"] == 5 and final["kl_to_start"] > 0.01


def test_the_pairs_that_the_budget_pays_for():
    """Pairs that were not kept are paid for as well, so each costs a little more than its two answers."""
    tokenizer = make_tokenizer()
    pairs, tokens = llm_methods.paid_pairs(tokenizer, seed=0)
    own = sum(len(tokenizer(text, add_special_tokens=False).input_ids) for pair in pairs for text in pair[1:])
    assert llm_methods.BUDGET <= tokens < llm_methods.BUDGET + 60
    assert own / tokens == pytest.approx(474 / 512, abs=1e-3)
    assert pairs != llm_methods.paid_pairs(tokenizer, seed=1)[0] and len(set(pairs)) == len(pairs)


@pytest.mark.parametrize("method", ["ppo", "dpo", "iterative-dpo"])
def test_a_method_ends_with_the_step_that_uses_up_its_budget(method, monkeypatch):
    monkeypatch.setattr(llm_methods, "BUDGET", 1700)
    monkeypatch.setattr(llm_methods, "CURVE_ANSWERS", 8)
    monkeypatch.setattr(llm_methods, "FINAL_ANSWERS", 8)
    make = llm_methods.policy_gradient if method == "ppo" else llm_methods.on_pairs
    curve, final = llm_methods.execute(make(method, seed=0))
    assert [tuple(row) for row in curve] == [llm_methods.CURVE_COLUMNS] * 2
    assert tuple(final) == llm_methods.FINAL_COLUMNS
    assert 1700 <= final["generated_tokens"] == curve[-1]["generated_tokens"] < 1700 + 1.5 * 1700
    assert curve[-1]["kl"] != 0 < final["seconds"]


def test_a_failing_run_becomes_rows_with_its_name():
    [row] = llm_failures.execute(llm_failures.Run("out_of_memory", "shorter rollout", 2))
    assert list(row.items())[:4] == [
        ("scenario", "out_of_memory"),
        ("variant", "shorter rollout"),
        ("seed", 2),
        ("iteration", 0),
    ]
    assert llm_failures.describe([row]) == "out_of_memory, shorter rollout, seed 2: symptom"


def test_rows_with_fewer_numbers_are_filled_up():
    assert llm_failures.same_columns([{"a": 1, "b": 2}, {"a": 3}]) == [{"a": 1, "b": 2}, {"a": 3, "b": None}]


def test_thinned_metrics_keep_the_last_row_and_whole_numbers():
    rows = [{"steps": f"{i}", "entropy": f"{i / 2}"} for i in range(10)]
    assert make_data.thin(rows, keep=4) == [{"steps": i, "entropy": i / 2} for i in (0, 3, 6, 9)]


@pytest.fixture
def made(tmp_path, monkeypatch):
    """make_data with its record in a temporary folder; the list of what it makes."""
    names = []
    monkeypatch.setattr(make_data, "FINISHED", tmp_path / "runs" / "finished.json")
    monkeypatch.setattr(make_data, "make", lambda name, workers: names.append(name))
    return names


def test_everything_is_made_once_and_the_record_removed(made):
    make_data.make_all(workers=1)
    assert made == list(make_data.NAMES)
    assert not make_data.FINISHED.exists()


def test_an_interrupted_call_goes_on_after_the_last_finished_study(made, monkeypatch):
    def make_two(name, workers):
        if len(made) == 2:
            raise KeyboardInterrupt
        made.append(name)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(make_data, "make", make_two)
        make_data.make_all(workers=1)
    assert json.loads(make_data.FINISHED.read_text()) == list(make_data.NAMES[:2])
    make_data.make_all(workers=1)
    assert made == list(make_data.NAMES)
    assert not make_data.FINISHED.exists()


def test_one_study_alone_leaves_the_record_as_it_is(made, monkeypatch):
    make_data.FINISHED.parent.mkdir()
    make_data.FINISHED.write_text('["algorithms"]')
    monkeypatch.setattr(sys, "argv", ["make_data.py", "--only", "eps_clip"])
    assert make_data.main() == 0
    assert made == ["eps_clip"]
    assert make_data.FINISHED.read_text() == '["algorithms"]'
