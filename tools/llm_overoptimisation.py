"""The study behind section 3 of chapter 08: the reward is climbed without a price on the KL, with other reward models.

`tools/make_data.py` runs it and writes data/llm/overoptimisation.csv, with _models.csv and _answers.csv beside it.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from llm_studies import read_lines
from transformers import LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast

from ppo_lab.files import data_path
from ppo_lab.llm.config import RunSettings, load_preset, make_settings
from ppo_lab.llm.experience import Experience
from ppo_lab.llm.ppo import train
from ppo_lab.llm.reviews import gold_score, judge
from ppo_lab.llm.reward_model import (
    Pair,
    pair_accuracy,
    preference_pairs,
    read_pairs,
    sample_answers,
    scores,
    train_reward_model,
)
from ppo_lab.llm.rewards import RewardModel, reward_models
from ppo_lab.llm.roles import make_roles

STORED = "models/reward"
SEEDS = range(3)
# A seed that no measured run has: the policy whose answers the better reward model is shown.
HACKED_SEED, HACKED_MOMENTS = 100, (20, 35, 50)
ITERATIONS = 50
JUDGED = ("score", "scaled_score", "gold", "positive", "grammatical", "repetitive")
MEASURED = ("kl_per_response", "entropy", "response_length")
MEMBERS = ("score_stored", "score_first_half", "score_second_half")
COLUMNS = ("arm", "kl_coef", "seed", "iteration", *JUDGED, *MEASURED, *MEMBERS)
MODEL_COLUMNS = ("model", "pairs", "accuracy", "on_reference", "on_hacked")
ANSWER_COLUMNS = ("policy", "text", "score", "gold")


@dataclass(frozen=True)
class Run:
    """One run: arm says what the reward is made of, kl_coef is β."""

    arm: str
    kl_coef: float
    seed: int


def runs() -> list[Run]:
    """One model, the mean of three, and one that has seen hacked answers, without a price; two of them with one too."""
    arms = (("one", 0.0), ("ensemble", 0.0), ("better", 0.0), ("one", 0.1), ("better", 0.1))
    return [Run(arm, kl_coef, seed) for arm, kl_coef in arms for seed in SEEDS]


def train_models(folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Train the further reward models into a folder.

    Returns a row for each of the four, the stored one first, and some answers of the reference and of a hacked policy.
    """
    torch.set_num_threads(1)
    roles, _ = make_roles(settings(STORED, 0.0, HACKED_SEED))
    tokenizer, sft_model = roles.tokenizer, roles.reference.lm
    given = read_pairs(data_path("reviews/preferences.jsonl"))
    hacked = list(hacked_policies())
    half = len(given) // 2
    learned_from = {
        "first_half": (given[:half], 1),
        "second_half": (given[half:], 2),
        "better": (given + pairs_of(hacked, tokenizer), 0),
    }
    rows = [described("stored", len(given), roles.reward.model, tokenizer, sft_model, hacked[-1])]
    for name, (pairs, seed) in learned_from.items():
        model = train_reward_model(pairs, tokenizer, sft_model, seed=seed)
        rows.append(described(name, len(pairs), model, tokenizer, sft_model, hacked[-1]))
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    texts = sampled("reference", sft_model, roles.reward.model, tokenizer)
    return rows, texts + sampled("hacked", hacked[-1], roles.reward.model, tokenizer)


def hacked_policies() -> Iterator[LlamaForCausalLM]:
    """The policy at some moments of a run without a price on the KL."""
    chosen = settings(STORED, 0.0, HACKED_SEED, critic="reward")
    roles, prompts = make_roles(chosen)
    for row, _ in train(prompts, roles, chosen.ppo):
        if row["iteration"] + 1 in HACKED_MOMENTS:
            yield copy.deepcopy(roles.actor.module.lm).eval()


def pairs_of(policies: list[LlamaForCausalLM], tokenizer: PreTrainedTokenizerFast) -> list[Pair]:
    """Comparisons of two answers of the same policy to each of the first 512 prompts, judged as the stored ones."""
    prompts = read_lines("reviews/prompts.txt")[:512]
    each = [preference_pairs(prompts, tokenizer, policy, seed=7 + n) for n, policy in enumerate(policies)]
    return [pair for pairs in each for pair in pairs]


def described(
    name: str,
    n_pairs: int,
    model: LlamaForSequenceClassification,
    tokenizer: PreTrainedTokenizerFast,
    sft_model: LlamaForCausalLM,
    hacked: LlamaForCausalLM,
) -> dict[str, Any]:
    """How good a reward model is.

    accuracy: on the held-out pairs; on_reference, on_hacked: correlation with the gold score over answers of the
    reference and of a hacked policy to the held-out prompts.
    """
    held_out = read_pairs(data_path("reviews/preferences_held_out.jsonl"))
    row = {"model": name, "pairs": n_pairs, "accuracy": pair_accuracy(held_out, tokenizer, model)}
    for column, policy in (("on_reference", sft_model), ("on_hacked", hacked)):
        row[column] = correlation(model, tokenizer, policy)
    return row


@torch.no_grad()
def correlation(
    model: LlamaForSequenceClassification, tokenizer: PreTrainedTokenizerFast, policy: LlamaForCausalLM
) -> float:
    """Pearson's correlation of scores and gold over one answer of a policy to each held-out prompt."""
    texts, gold = read_answers(policy, tokenizer)
    both = torch.stack([scores(texts, tokenizer, model), torch.tensor(gold)])
    return float(torch.corrcoef(both)[0, 1])


@torch.no_grad()
def sampled(
    policy: str, lm: LlamaForCausalLM, model: LlamaForSequenceClassification, tokenizer: PreTrainedTokenizerFast
) -> list[dict[str, Any]]:
    """The first three prompts with their answers, what the model thinks of them, and their gold scores."""
    texts, gold = read_answers(lm, tokenizer)
    told = scores(texts, tokenizer, model).tolist()
    rows = list(zip(texts, told, gold, strict=True))[:3]
    return [{"policy": policy, "text": text, "score": score, "gold": true} for text, score, true in rows]


def read_answers(policy: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> tuple[list[str], list[float]]:
    """Each held-out prompt with one answer of a policy, and their gold scores."""
    prompts = read_lines("reviews/prompts_held_out.txt")
    texts = [f"{p} {a}" for p, a in zip(prompts, sample_answers(prompts, tokenizer, policy, 11), strict=True)]
    return texts, [gold_score(text.removesuffix(" <eos>"), finished=text.endswith(" <eos>")) for text in texts]


def execute(run: Run, folder: Path) -> list[dict[str, Any]]:
    """The rows of a run. folder: where `train_models` put the models."""
    torch.set_num_threads(1)
    names = [STORED, str(folder / "first_half"), str(folder / "second_half")]
    ensemble = ",".join(f"{name}*0.3333" for name in names)
    reward = {"one": STORED, "ensemble": ensemble, "better": str(folder / "better")}[run.arm]
    chosen = settings(reward, run.kl_coef, run.seed)
    roles, prompts = make_roles(chosen)
    members = members_of(ensemble)
    units: list[tuple[float, float]] = []
    rows = []
    for row, experience in train(prompts, roles, chosen.ppo, judge=judge):
        told = [ask(member, experience) for member in members]
        # Standard deviations from the first answers, which are the reference's.
        units = units or [(float(x.mean()), float(x.std())) for x in told]
        means = [(float(x.mean()) - mean) / std for x, (mean, std) in zip(told, units, strict=True)]
        row |= {"arm": run.arm, "seed": run.seed, **dict(zip(MEMBERS, means, strict=True))}
        rows.append({name: row[name] for name in COLUMNS})
    return rows


def members_of(ensemble: str) -> list[RewardModel]:
    """The reward models of a sum, to look on in every run, whatever it is rewarded with."""
    roles, _ = make_roles(settings(ensemble, 0.0, 0))
    return [model for model, _ in reward_models(roles.reward)]


def ask(model: RewardModel, experience: Experience) -> torch.Tensor:
    """What a reward model thinks of the answers of an iteration, [B]."""
    return model(experience.prompt_ids, experience.prompt_mask, experience.response_ids, experience.mask)


def settings(reward: str, kl_coef: float, seed: int, critic: str = "actor") -> RunSettings:
    """The preset tiny with another reward, β and seed.

    The critic starts from the actor in every measured run: from a sum of reward models it cannot.
    """
    changes = {"reward": reward, "critic": critic, "kl_coef": kl_coef, "seed": seed, "iterations": ITERATIONS}
    return make_settings({**load_preset("tiny"), **changes})


def describe(rows: list[dict[str, Any]]) -> str:
    """A finished run in one line."""
    last = rows[-1]
    return "{arm}, β {kl_coef:g}, seed {seed}: gold {gold:.2f}, kl {kl_per_response:.1f}".format(**last)
