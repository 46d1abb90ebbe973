"""The studies behind chapter 09: PPO and what may take its place, for equally many generated tokens.

`tools/make_data.py` runs them and writes data/llm/methods*.csv.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from random import Random
from time import process_time
from typing import Any

import torch
from llm_studies import FINAL_ANSWERS, FINAL_NOISE, held_out, tiny
from transformers import PreTrainedTokenizerBase

from ppo_lab.files import data_path
from ppo_lab.kl import best_of_n_kl
from ppo_lab.llm.best_of_n import best_of_n
from ppo_lab.llm.config import GROUPED, PPOSettings, load_preset, make_settings
from ppo_lab.llm.memory import model_bytes
from ppo_lab.llm.ppo import Prompts, judged_columns, kl_per_response, train
from ppo_lab.llm.preference_training import PreferenceSettings, iterative_dpo, train_on_preferences
from ppo_lab.llm.reviews import judge
from ppo_lab.llm.reward_model import Pair, read_pairs
from ppo_lab.llm.rewards import reward_models
from ppo_lab.llm.roles import Roles, make_roles

SEEDS = range(3)
# Tokens that a method may generate: what PPO's 33 iterations of 128 answers come to. It ends with the iteration in
# which they are used up.
BUDGET = 40_000
ENOUGH_ITERATIONS = 1000
# 474 of 512 prompts gave the judge two answers that differ; the answers that made no pair are paid for as well.
MADE_A_PAIR = 474 / 512
GROUP = 4
# Answers in a round of iterative DPO, two to a prompt.
ROUND = 128
CANDIDATES = (1, 2, 4, 8, 16, 32, 64)
# The score of PPO and RLOO is divided by its standard deviation, 1.75: the same price is 1.75 times larger for DPO.
KL_COEFS = {
    "ppo": (0.02, 0.05, 0.1, 0.2, 0.4),
    "dpo": (0.05, 0.1, 0.2, 0.4, 0.8),
    "rloo": (0.02, 0.05, 0.1, 0.2, 0.4),
}
# Moments of a curve: iterations, or gradient steps on pairs; answers at each, with noise that nothing else has.
EVERY, EVERY_STEPS = 4, 8
CURVE_ANSWERS, CURVE_NOISE = 256, 2**42
QUALITY = ("score", "gold", "positive", "grammatical", "kl", "response_length")
CURVE_COLUMNS = ("method", "seed", "step", "generated_tokens", "seconds", *QUALITY)
COST = ("generated_tokens", "seconds", "tokens_per_answer", "memory_mb", "n_models")
FINAL_COLUMNS = ("method", "seed", *QUALITY, *COST)
FRONTIER_COLUMNS = ("method", "knob", "value", "seed", "gold", "score", "positive", "grammatical", "kl")


@dataclass(frozen=True)
class Run:
    """One method with one seed.

    method: its name in the tables; sampling: how it answers, and how it learns if it is of PPO's kind; preference: how
    it learns from pairs; n: how many answers it chooses from.
    """

    method: str
    sampling: PPOSettings
    preference: PreferenceSettings | None = None
    n: int = 1

    @property
    def learns(self) -> bool:
        """Whether there is anything to train."""
        return self.method != "sft" and self.n == 1


# Those of PPO's kind differ from PPO in the advantage, and in nothing else. GRPO comes a second time, with the price of
# the KL where its paper has it.
POLICY_GRADIENT: dict[str, dict[str, Any]] = {
    "ppo": {"advantage": "gae"},
    "grpo": {"advantage": "grpo"},
    "grpo-paper": {"advantage": "grpo", "kl_coef": 0.0, "kl_loss_coef": 0.1, "kl_loss_kind": "k3"},
    "dr-grpo": {"advantage": "dr-grpo"},
    "rloo": {"advantage": "rloo"},
    "remax": {"advantage": "remax"},
    "reinforce++": {"advantage": "reinforce++"},
    "reinforce++-baseline": {"advantage": "reinforce++-baseline"},
}
OFFLINE = ("dpo", "ipo", "simpo")
# What the sweep in data/README.md chose. Everything is named, so that no default can change a method.
GIVEN_PAIRS = {"lr": 5e-4, "warmup_steps": 10, "epochs": 3, "batch_size": 32}
ON_PAIRS: dict[str, dict[str, Any]] = {
    "dpo": {**GIVEN_PAIRS, "loss": "dpo", "kl_coef": 0.4},
    "ipo": {**GIVEN_PAIRS, "loss": "ipo", "kl_coef": 0.1},
    "simpo": {**GIVEN_PAIRS, "loss": "simpo", "scale": 5.0, "margin": 0.5},
    # Four steps a round, 35 rounds. A warm-up over the first five of them did not help.
    "iterative-dpo": {"loss": "dpo", "kl_coef": 0.2, "lr": 5e-4, "warmup_steps": 0, "epochs": 1, "batch_size": 16},
}


def policy_gradient(method: str, seed: int, **changes: Any) -> Run:
    """PPO or one of those that keep its trainer and leave out the critic."""
    settings = {"seed": seed, "iterations": ENOUGH_ITERATIONS, **POLICY_GRADIENT[method], **changes}
    group = GROUP if settings["advantage"] in GROUPED else 1
    return Run(method, tiny(group_size=group, **settings))


def on_pairs(method: str, seed: int, **changes: Any) -> Run:
    """A method that learns from pairs of answers: given ones, or for iterative DPO those of its own answers."""
    # Any advantage without a critic, so that none is built.
    sampling = tiny(seed=seed, iterations=ENOUGH_ITERATIONS, batch_size=ROUND, advantage="reinforce++")
    return Run(method, sampling, PreferenceSettings(**{"seed": seed, **ON_PAIRS[method], **changes}))


def untrained(n: int, seed: int) -> Run:
    """The SFT policy, and its best of n."""
    name = "sft" if n == 1 else f"best-of-{n}"
    return Run(name, tiny(seed=seed, advantage="reinforce++"), n=n)


def comparison() -> list[Run]:
    """Every method, with settings that a small sweep on another seed found."""
    makers = [(policy_gradient, name) for name in POLICY_GRADIENT]
    makers += [(on_pairs, name) for name in ON_PAIRS] + [(untrained, n) for n in CANDIDATES]
    return [make(which, seed) for make, which in makers for seed in SEEDS]


def frontier() -> list[tuple[str, str, float, Run]]:
    """How much gold a nat of KL buys: method, knob, value and run, the price of the KL or n turned up and down.

    Where the value is that of the comparison, so is the run.
    """
    makers = {"ppo": policy_gradient, "dpo": on_pairs, "rloo": policy_gradient}
    priced = [
        (name, "kl_coef", value, make(name, seed, kl_coef=value))
        for name, make in makers.items()
        for value in KL_COEFS[name]
        for seed in SEEDS
    ]
    return priced + [("best-of-n", "n", n, untrained(n, seed)) for n in CANDIDATES for seed in SEEDS]


def all_runs() -> list[Run]:
    """Those of the comparison and of the frontier, each once."""
    return list(dict.fromkeys([*comparison(), *(run for *_, run in frontier())]))


Result = tuple[list[dict[str, Any]], dict[str, Any]]


def execute(run: Run) -> Result:
    """Train and measure: a row every few steps, none without training, and the row of the finished policy."""
    torch.set_num_threads(1)
    roles, prompts = make_roles(make_settings({**load_preset("tiny"), **asdict(run.sampling)}))
    every = EVERY_STEPS if run.method in OFFLINE else EVERY
    step, tokens, seconds = 0, 0, 0.0
    curve = [moment(run, roles, step, tokens, seconds)] if run.learns else []
    # Processor time: the clock's depends on what else the machine does.
    started = process_time()
    for step, tokens in enumerate(training(run, roles, prompts), start=1):
        seconds += process_time() - started
        if step % every == 0:
            curve.append(moment(run, roles, step, tokens, seconds))
        started = process_time()
    if step % every:
        curve.append(moment(run, roles, step, tokens, seconds))
    return curve, final_row(run, roles, tokens, seconds)


def training(run: Run, roles: Roles, prompts: Prompts) -> Iterator[int]:
    """Train the actor of the roles; yields after each step how many tokens have been generated so far."""
    if run.method in OFFLINE:
        pairs, tokens = paid_pairs(roles.tokenizer, run.sampling.seed)
        for row in train_on_preferences(roles.actor.module.lm, pairs, roles.tokenizer, run.preference):
            read = (row["step"] + 1) * run.preference.batch_size
            yield round(tokens * min(1.0, read / len(pairs)))
    elif run.learns:
        rows = (
            train(prompts, roles, run.sampling)
            if run.preference is None
            else iterative_dpo(prompts, roles, run.preference, run.sampling)
        )
        tokens = 0
        for row, _ in rows:
            tokens += row["generated_tokens"]
            yield tokens
            if tokens >= BUDGET:
                return


def paid_pairs(tokenizer: PreTrainedTokenizerBase, seed: int) -> tuple[list[Pair], int]:
    """As many of the stored pairs as the budget pays for, drawn at random, and what they cost in tokens."""
    pairs = read_pairs(data_path("reviews/preferences.jsonl"))
    Random(seed).shuffle(pairs)
    cost = 0.0
    for number, pair in enumerate(pairs, start=1):
        answers = tokenizer([pair.chosen, pair.rejected], add_special_tokens=False).input_ids
        cost += sum(map(len, answers)) / MADE_A_PAIR
        if cost >= BUDGET:
            return pairs[:number], round(cost)
    raise ValueError(f"BUDGET must be at most {cost:.0f}, the tokens of all stored pairs, got {BUDGET}")


def moment(run: Run, roles: Roles, step: int, tokens: int, seconds: float) -> dict[str, Any]:
    """A row of a curve: what the policy answers now, and what it has cost."""
    quality = measure(run, roles, CURVE_ANSWERS, CURVE_NOISE)[0]
    return {**_key(run), "step": step, "generated_tokens": tokens, "seconds": seconds, **quality}


def final_row(run: Run, roles: Roles, tokens: int, seconds: float) -> dict[str, Any]:
    """The row of the finished policy."""
    quality, tokens_per_answer = measure(run, roles, FINAL_ANSWERS, FINAL_NOISE)
    size, n_models = memory(run, roles)
    cost = (tokens, seconds, tokens_per_answer, size / 1e6, n_models)
    return {**_key(run), **quality, **dict(zip(COST, cost, strict=True))}


def measure(run: Run, roles: Roles, n_answers: int, noise: int) -> tuple[dict[str, float], float]:
    """The policy's answers to held-out prompts: their quality, and the tokens generated for each.

    kl: of the answers to the reference, the policy that training began with; of the best of n its bound.
    """
    answers, tokens = best_of_n(held_out(roles.tokenizer, n_answers), roles, run.sampling, run.n, noise)
    measured = {
        **judged_columns(answers, roles, judge),
        "kl": kl_per_response(answers) if run.n == 1 else best_of_n_kl(run.n),
        "response_length": float(answers.mask.sum(-1).float().mean()),
    }
    return {name: measured[name] for name in QUALITY}, tokens / n_answers


def memory(run: Run, roles: Roles) -> tuple[int, int]:
    """Bytes of all models held in training, without activations, and how many models these are.

    What is trained: weights, gradient and AdamW's two moments, each as large as the weights. What is frozen: weights.
    Methods without training: the models that answer.
    """
    reward = [model.model for model, _ in reward_models(roles.reward)]
    trained = [roles.actor.module] if run.learns else []
    if roles.critic is not None:
        trained.append(roles.critic.module)
    if not run.learns:
        frozen = [roles.actor.module, *(reward if run.n > 1 else [])]
    else:
        # On given pairs the log-probabilities of the reference are numbers, computed once; SimPO has none.
        frozen = [] if run.method in OFFLINE else [roles.reference, *reward]
    return 4 * sum(map(model_bytes, trained)) + sum(map(model_bytes, frozen)), len(trained) + len(frozen)


def tables(results: dict[Run, Result]) -> dict[str, tuple[tuple[str, ...], list[dict[str, Any]]]]:
    """The columns and rows of each table, from the curve and the final row of every run."""
    curves = [row for run in comparison() for row in results[run][0]]
    finals = [results[run][1] for run in comparison()]
    priced = []
    for method, knob, value, run in frontier():
        row = {**results[run][1], "method": method, "knob": knob, "value": value}
        priced.append({column: row[column] for column in FRONTIER_COLUMNS})
    return {
        "methods": (CURVE_COLUMNS, curves),
        "methods_final": (FINAL_COLUMNS, finals),
        "methods_frontier": (FRONTIER_COLUMNS, priced),
    }


def describe(final: dict[str, Any]) -> str:
    """A finished run in one line."""
    return "{method} seed {seed}: gold {gold:.2f}, kl {kl:.1f}, {generated_tokens} tokens".format(**final)


def _key(run: Run) -> dict[str, Any]:
    return {"method": run.method, "seed": run.sampling.seed}
