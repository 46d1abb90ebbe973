"""Make everything in data/ again. `make data` calls this.

python tools/make_data.py                       everything; goes on where an interrupted call stopped
python tools/make_data.py --only eps_clip lander_agent
python tools/make_data.py --list
"""

import argparse
import csv
import json
import multiprocessing
import os
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

# One thread per process: the networks are tiny, and the processes share the cores. Set before torch is loaded.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import llm_failures
import llm_methods
import llm_overoptimisation
import llm_ranks
import llm_studies
import studies
import torch
from llm_studies import read_lines

from ppo_lab.control.checkpoint import load_network, save_network
from ppo_lab.control.config import tuned
from ppo_lab.control.train import train_in_folder
from ppo_lab.files import replace_file, write_table
from ppo_lab.llm.reviews import make_reviews, make_tokenizer, prompts
from ppo_lab.llm.reward_model import pair_accuracy, preference_pairs, train_reward_model, write_pairs
from ppo_lab.llm.sft import train_sft

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "data"
# Ignored by git. Names what an interrupted call has finished.
FINISHED = ROOT / "runs" / "make_data.json"
AGENT = "lander_agent"
REVIEWS, REVIEW_MODELS = "reviews", "review_models"
RANKS = "llm_ranks"
FAILURES = "llm_failures"
OVEROPTIMISATION = "llm_overoptimisation"
METHODS = "llm_methods"
STUDIES = studies.STUDIES | llm_studies.STUDIES
# The language-model studies come last: they start from the review models.
NAMES = (*studies.STUDIES, AGENT, REVIEWS, REVIEW_MODELS, *llm_studies.STUDIES, METHODS, FAILURES)
NAMES += (OVEROPTIMISATION, RANKS)
N_REVIEWS = 3000
N_PROMPTS, N_HELD_OUT = 1024, 128
N_PAIRS = 3400


def make_study(name: str, workers: int) -> None:
    """Run a study and write its two tables: NAME.csv, the curves, and NAME_final.csv, what came out.

    data/control/ holds those of the agents, data/llm/ those of the language models, without the "llm_" of their name.
    """
    tool, folder = (llm_studies, "llm") if name in llm_studies.STUDIES else (studies, "control")
    runs = tool.STUDIES[name]()
    curves, finals = [], []
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        for done, (curve, final) in enumerate(pool.imap(tool.execute, runs), start=1):
            curves += curve
            finals.append(final)
            print(f"  {done}/{len(runs)} {tool.describe(final)}", flush=True)
    stem = name.removeprefix("llm_")
    write_table(DATA / folder / f"{stem}.csv", tool.CURVE_COLUMNS, curves)
    write_table(DATA / folder / f"{stem}_final.csv", tool.FINAL_COLUMNS, finals)


def make_methods(workers: int) -> None:
    """Write the tables of chapter 09: methods.csv, methods_final.csv and methods_frontier.csv in data/llm."""
    runs, results = llm_methods.all_runs(), {}
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        for run, result in zip(runs, pool.imap(llm_methods.execute, runs), strict=True):
            results[run] = result
            print(f"  {len(results)}/{len(runs)} {llm_methods.describe(result[1])}", flush=True)
    for name, (columns, rows) in llm_methods.tables(results).items():
        write_table(DATA / "llm" / f"{name}.csv", columns, rows)


def make_failures(workers: int) -> None:
    """Write data/llm/failures.csv: every scenario of chapter 08, failing and cured, iteration by iteration."""
    runs, rows = llm_failures.runs(), []
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        for done, found in enumerate(pool.imap(llm_failures.execute, runs), start=1):
            rows += found
            print(f"  {done}/{len(runs)} {llm_failures.describe(found)}", flush=True)
    rows = llm_failures.same_columns(rows)
    write_table(DATA / "llm" / "failures.csv", rows[0], rows)


def make_overoptimisation(workers: int) -> None:
    """Write the tables of chapter 08, section 3: overoptimisation.csv, with _models.csv and _answers.csv beside it."""
    runs, rows = llm_overoptimisation.runs(), []
    with tempfile.TemporaryDirectory() as temporary:
        models, answers = llm_overoptimisation.train_models(Path(temporary))
        execute = partial(llm_overoptimisation.execute, folder=Path(temporary))
        with multiprocessing.get_context("spawn").Pool(workers) as pool:
            for done, found in enumerate(pool.imap(execute, runs), start=1):
                rows += found
                print(f"  {done}/{len(runs)} {llm_overoptimisation.describe(found)}", flush=True)
    stem = DATA / "llm" / "overoptimisation"
    write_table(stem.with_suffix(".csv"), llm_overoptimisation.COLUMNS, rows)
    write_table(Path(f"{stem}_models.csv"), llm_overoptimisation.MODEL_COLUMNS, models)
    write_table(Path(f"{stem}_answers.csv"), llm_overoptimisation.ANSWER_COLUMNS, answers)


def make_agent() -> None:
    """Train the LunarLander agent as a reader would and write data/lander: the network, its settings, its metrics."""
    folder = DATA / "lander"
    with tempfile.TemporaryDirectory() as temporary:
        run = Path(temporary) / "run"
        print(" ", train_in_folder(tuned(studies.LANDER), run), flush=True)
        network, settings = load_network(run)
        with open(run / "metrics.csv", newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    save_network(folder, network, settings)
    write_table(folder / "metrics.csv", rows[0], thin(rows))


def make_review_files() -> None:
    """Write data/reviews: the corpus, and the prompts to train with and those to measure with."""
    all_prompts = prompts(N_PROMPTS + N_HELD_OUT, seed=0)
    write_lines(DATA / "reviews" / "reviews.txt", make_reviews(N_REVIEWS, seed=0))
    write_lines(DATA / "reviews" / "prompts.txt", all_prompts[:N_PROMPTS])
    write_lines(DATA / "reviews" / "prompts_held_out.txt", all_prompts[N_PROMPTS:])


def make_review_models() -> None:
    """Write data/models, the SFT policy and the reward model, and the comparisons the latter learned from."""
    torch.set_num_threads(1)
    tokenizer = make_tokenizer()
    sft_model = train_sft(read_lines("reviews/reviews.txt"), tokenizer)
    pairs = preference_pairs(read_lines("reviews/prompts.txt") * 4, tokenizer, sft_model, seed=0)[:N_PAIRS]
    held_out = preference_pairs(read_lines("reviews/prompts_held_out.txt") * 4, tokenizer, sft_model, seed=1)
    reward_model = train_reward_model(pairs, tokenizer, sft_model)
    print(f"  held-out accuracy of the reward model {pair_accuracy(held_out, tokenizer, reward_model):.3f}", flush=True)
    write_pairs(DATA / "reviews" / "preferences.jsonl", pairs)
    write_pairs(DATA / "reviews" / "preferences_held_out.jsonl", held_out)
    for name, model in (("sft", sft_model), ("reward", reward_model)):
        model.half().save_pretrained(DATA / "models" / name)
        tokenizer.save_pretrained(DATA / "models" / name)


def make_rank_runs() -> None:
    """Write data/llm_ranks: the same training on one process, on two ranks at each stage, and resumed after a kill."""
    for name, rows in llm_ranks.execute().items():
        write_table(DATA / RANKS / f"{name}.csv", llm_ranks.COLUMNS, rows)


def write_lines(path: Path, lines: list[str]) -> None:
    """A text file of one text a line, replaced in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, "".join(f"{line}\n" for line in lines).encode())


def thin(rows: list[dict[str, str]], keep: int = 100) -> list[dict[str, Any]]:
    """About `keep` rows, equally spaced, the last one always among them; numbers shortened as in every table."""
    every = -(-len(rows) // keep)
    return [{name: _number(text) for name, text in row.items()} for row in rows[::-1][::every][::-1]]


def _number(text: str) -> int | float:
    return int(text) if text.isdigit() else float(text)


def make(name: str, workers: int) -> None:
    """Make one part of the data, and say how long it took."""
    print(f"{name}: begins", flush=True)
    started = time.perf_counter()
    others = {AGENT: make_agent, REVIEWS: make_review_files, REVIEW_MODELS: make_review_models, RANKS: make_rank_runs}
    if name in others:
        others[name]()
    elif name == METHODS:
        make_methods(workers)
    elif name == FAILURES:
        make_failures(workers)
    elif name == OVEROPTIMISATION:
        make_overoptimisation(workers)
    else:
        make_study(name, workers)
    print(f"{name}: {(time.perf_counter() - started) / 60:.1f} minutes", flush=True)


def make_all(workers: int) -> None:
    """Make everything; what an interrupted call has finished is not made twice."""
    finished = json.loads(FINISHED.read_text()) if FINISHED.exists() else []
    for name in NAMES:
        if name in finished:
            print(f"{name}: finished before the interruption", flush=True)
            continue
        make(name, workers)
        finished.append(name)
        FINISHED.parent.mkdir(exist_ok=True)
        replace_file(FINISHED, json.dumps(finished).encode())
    FINISHED.unlink()


def main() -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python tools/make_data.py", description="Make everything in data/ again.")
    parser.add_argument("--only", nargs="+", choices=NAMES, metavar="NAME", help="these alone, finished or not")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="processes (default: 2)")
    parser.add_argument("--list", action="store_true", help="print the names and the number of runs")
    flags = parser.parse_args()
    if flags.workers < 1:
        parser.error(f"--workers must be at least 1, got {flags.workers}")
    if flags.list:
        for name in NAMES:
            print(f"{name:18} {len(STUDIES[name]()) if name in STUDIES else 1:4} runs")
        return 0
    try:
        if flags.only:
            for name in flags.only:
                make(name, flags.workers)
        else:
            make_all(flags.workers)
    except KeyboardInterrupt:
        print("interrupted: the study under way is not stored", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
