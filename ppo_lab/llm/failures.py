"""Runs that fail on purpose: a row of the book's table each, the symptom it must show, and the cure that must work.

Most are the preset `tiny` with some settings changed. Where the fault is one of the code, a function below trains with
the fault in it; the trainer itself knows nothing of this module.
"""

import copy
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel

from ppo_lab.llm.config import PPOSettings, RunSettings, load_preset, make_settings
from ppo_lab.llm.experience import Experience, collect, estimate, score
from ppo_lab.llm.generate import accepted_arguments
from ppo_lab.llm.plan import plan
from ppo_lab.llm.ppo import (
    Prompts,
    Row,
    check_finite,
    judged_columns,
    kl_per_response,
    machine_columns,
    make_controller,
    metrics,
    prompt_batch,
    train,
    update,
)
from ppo_lab.llm.reviews import judge
from ppo_lab.llm.roles import Roles, make_roles
from ppo_lab.llm.tokens import is_finished, token_logp
from ppo_lab.masking import hide

Run = Callable[[RunSettings], list[Row]]


def trained(settings: RunSettings, change: Callable[[Roles], None] | None = None) -> list[Row]:
    """The rows of an ordinary run; change: what is done to the roles before it."""
    roles, prompts = make_roles(settings)
    if change is not None:
        change(roles)
    return [row for row, _ in train(prompts, roles, settings.ppo, judge=judge)]


@dataclass(frozen=True)
class Scenario:
    """A run that fails in a known way, and how it is cured.

    row: the line of the book's table it stands for, "" where the table has none; shows: the symptom in words; symptom:
    the rows of a run → whether they show it; iterations: when it shows; settings: what differs from the preset tiny;
    cure: what is changed on top of them in the cured run; run, run_cured: how the two are computed, by the trainer
    unless the fault is in the code; book_cures: other things to try, what the book advises first of all, each as
    settings on top of the failing ones; run_tried: how those of them are computed that change the code.

    Book: §13.8
    """

    name: str
    row: str
    shows: str
    symptom: Callable[[Sequence[Row]], bool]
    iterations: int
    settings: dict[str, Any] = field(default_factory=dict)
    cure: dict[str, Any] = field(default_factory=dict)
    run: Run = trained
    run_cured: Run = trained
    book_cures: dict[str, dict[str, Any]] = field(default_factory=dict)
    run_tried: dict[str, Run] = field(default_factory=dict)


def run_scenario(scenario: Scenario, *, seed: int = 0, cured: bool = False, book_cure: str | None = None) -> list[Row]:
    """The rows of the failing run, of the cured one, or of one of its book_cures, as metrics.csv has them.

    Nothing is written. The judge of the reviews adds its columns. Raises ValueError for a book_cure that the scenario
    does not have, and for one together with cured.

    Book: §13.8
    """
    if book_cure is not None and (cured or book_cure not in scenario.book_cures):
        known = ", ".join(scenario.book_cures) or "none"
        raise ValueError(f"book_cure must be one of {known}, without cured, got {book_cure!r}")
    changes = {"seed": seed, "iterations": scenario.iterations, **scenario.settings}
    changes |= scenario.cure if cured else scenario.book_cures.get(book_cure, {})
    settings = make_settings({**load_preset("tiny"), **changes}, source=scenario.name)
    return scenario.run_cured(settings) if cured else scenario.run_tried.get(book_cure, scenario.run)(settings)


# Faults of the code: training with one


def train_wrongly(
    prompts: Prompts,
    roles: Roles,
    settings: PPOSettings,
    *,
    spoil: Callable[[Experience, Roles, PPOSettings], Experience] | None = None,
    controller: Any = None,
) -> Iterator[Row]:
    """The loop of `train` with a fault between collecting and estimating; yields the same rows.

    spoil: what happens to the experience there; controller: another one than the settings name, its β of any sign.
    Raises ValueError for settings without a critic, and NonFiniteError as `train` does.
    """
    if settings.group_size != 1 or not settings.with_critic:
        raise ValueError(
            "train_wrongly has the loop of PPO with a critic: group_size must be 1 and advantage gae, "
            f"got {settings.group_size} and {settings.advantage!r}"
        )
    controller = controller or make_controller(settings)
    for iteration in range(settings.iterations):
        roles.seconds = {}
        started, kl_coef = perf_counter(), controller.kl_coef
        experience = collect(prompt_batch(prompts, settings, iteration), roles, settings, iteration)
        if spoil is not None:
            experience = spoil(experience, roles, settings)
        check_finite(experience)
        experience = estimate_with_any_sign(experience, roles, settings, kl_coef)
        with roles.timed("update"):
            steps = update(roles, experience, settings, iteration)
        controller.update(kl_per_response(experience), n_steps=len(experience.mask))
        machine = machine_columns(experience, roles, settings, perf_counter() - started)
        measured = {**judged_columns(experience, roles, judge), **metrics(experience, steps, roles, settings)}
        yield {"iteration": iteration, **measured, "kl_coef": kl_coef, **machine}


def estimate_with_any_sign(experience: Experience, roles: Roles, settings: PPOSettings, kl_coef: float) -> Experience:
    """`estimate`, for a negative β as well, which it refuses.

    −β·(log π − log π_ref) = −(−β)·(log π_ref − log π): the two change places.
    """
    if kl_coef >= 0:
        return estimate(experience, roles, settings, kl_coef)
    swapped = replace(experience, old_logp=experience.ref_logp, ref_logp=experience.old_logp)
    estimated = estimate(swapped, roles, settings, -kl_coef)
    return replace(estimated, old_logp=experience.old_logp, ref_logp=experience.ref_logp)


class BookKLController:
    """The adaptive KL controller as the book prints it: β ← β·(1 + K_p·clip(KL/target − 1, ±0.2)·n_steps).

    With K_p = 0.1 the factor is 1 ± 0.02·n_steps at the limits of the clip: from 50 answers on it is 0 or
    negative while the KL is small. `AdaptiveKLController` is the one to use.

    kl_coef: β at the start; target_kl: nats per response; gain: K_p.

    Book: §13.6.5
    Source: none; Ziegler et al. 2019, arXiv 1909.08593 has no n_steps
    """

    def __init__(self, kl_coef: float, target_kl: float, gain: float = 0.1):
        self.kl_coef = kl_coef
        self.target_kl = target_kl
        self.gain = gain

    def update(self, current_kl: float, n_steps: int) -> None:
        """Move kl_coef once per rollout of n_steps answers."""
        error = min(max(current_kl / self.target_kl - 1, -0.2), 0.2)
        self.kl_coef *= 1 + self.gain * error * n_steps


def with_book_controller(settings: RunSettings) -> list[Row]:
    """β steered by the book's class, with batches of more than 50 answers."""
    roles, prompts = make_roles(settings)
    controller = BookKLController(settings.ppo.kl_coef, settings.ppo.target_kl)
    return list(train_wrongly(prompts, roles, settings.ppo, controller=controller))


LAG = 8


def with_lagging_sampler(settings: RunSettings) -> list[Row]:
    """Answers, and their log-probabilities, from a copy of the actor that gets its weights every 8 iterations.

    So it is where another engine generates and the transfer of the weights fails. The two fit together: the ratio says
    how far the policy has moved from the one that answered, and the clip lets the gradient of what went far go.
    """
    return trained(settings, lag)


def with_lagging_sampler_read_again(settings: RunSettings) -> list[Row]:
    """Answers of the old copy with log-probabilities of the actor of now: the ratio is 1, and knows no difference.

    The KL to the reference, a mean over answers of another policy, can come out below 0.
    """

    def spoil(experience: Experience, roles: Roles, ppo: PPOSettings) -> Experience:
        return replace(experience, old_logp=logp_of(roles.actor, experience, ppo))

    roles, prompts = make_roles(settings)
    lag(roles)
    return list(train_wrongly(prompts, roles, settings.ppo, spoil=spoil))


def lag(roles: Roles) -> None:
    """Let a copy of the actor generate, which gets the actor's weights in every eighth iteration."""
    actor = roles.actor
    old = copy.deepcopy(actor.module)
    rollouts = 0

    @contextmanager
    def whole_weights(*, for_generation: bool = False) -> Iterator[nn.Module]:
        nonlocal rollouts
        if for_generation:
            if rollouts % LAG == 0:
                old.load_state_dict(actor.module.state_dict())
            rollouts += 1
        yield old if for_generation else actor.module

    actor.whole_weights = whole_weights


AGE = 4


def with_stale_log_probs(settings: RunSettings) -> list[Row]:
    """Fresh answers of the actor, but old_logp from a copy of it that is 4 iterations old.

    So it is where log π_old is asked of a copy, as the listing makes one, and the copy is not made anew in time.
    """
    roles, prompts = make_roles(settings)
    copies: deque[nn.Module] = deque(maxlen=AGE + 1)

    def spoil(experience: Experience, roles: Roles, ppo: PPOSettings) -> Experience:
        copies.append(copy.deepcopy(roles.actor.module))
        return replace(experience, old_logp=logp_of(copies[0], experience, ppo))

    return list(train_wrongly(prompts, roles, settings.ppo, spoil=spoil))


@torch.no_grad()
def logp_of(actor: Callable, experience: Experience, settings: PPOSettings) -> Tensor:
    """log π(y_t) of the answers by this actor, [B, T], 0 where masked."""
    logits, _ = actor(*experience.ids_and_mask(), experience.response_ids.shape[1])
    return hide(token_logp(logits, experience.response_ids, temperature=settings.temperature), experience.mask)


def with_frozen_actor(settings: RunSettings) -> list[Row]:
    """The actor is copied after the optimizer was made, which goes on stepping the weights of the original."""

    def freeze(roles: Roles) -> None:
        roles.actor.module = copy.deepcopy(roles.actor.module)

    return trained(settings, freeze)


def with_padding_counted(settings: RunSettings) -> list[Row]:
    """A mask that is True up to the longest answer of the batch, so that what follows an EOS counts as chosen."""

    def spoil(experience: Experience, roles: Roles, ppo: PPOSettings) -> Experience:
        return read_again(replace(experience, mask=torch.ones_like(experience.mask)), roles, ppo)

    roles, prompts = make_roles(settings)
    return list(train_wrongly(prompts, roles, settings.ppo, spoil=spoil))


def with_eos_masked(settings: RunSettings) -> list[Row]:
    """A mask without the EOS, as where it is told from the padding by its id: ending an answer is never trained."""

    def spoil(experience: Experience, roles: Roles, ppo: PPOSettings) -> Experience:
        ids, eos = experience.response_ids, roles.eos_token_ids
        mask = experience.mask & ~torch.isin(ids, torch.tensor(eos, device=ids.device))
        return read_again(replace(experience, mask=mask, finished=is_finished(ids, mask, eos)), roles, ppo)

    roles, prompts = make_roles(settings)
    return list(train_wrongly(prompts, roles, settings.ppo, spoil=spoil))


def read_again(experience: Experience, roles: Roles, settings: PPOSettings) -> Experience:
    """The experience after its mask has changed: every role reads the answers anew, the actor too."""
    experience = score(experience, roles, settings)
    return replace(experience, old_logp=logp_of(roles.actor, experience, settings))


def with_single_answers(settings: RunSettings) -> list[Row]:
    """Answers generated one prompt at a time instead of in a batch; the same answers."""

    def take_apart(roles: Roles) -> None:
        single = SimpleNamespace(lm=OneAtATime(roles.actor.module.lm))

        @contextmanager
        def whole_weights(*, for_generation: bool = False) -> Iterator[Any]:
            yield single if for_generation else roles.actor.module

        roles.actor.whole_weights = whole_weights

    return trained(settings, take_apart)


class OneAtATime(nn.Module):
    """A language model that `generate` can call with a batch, and that computes each row alone, with its own cache."""

    def __init__(self, lm: PreTrainedModel):
        super().__init__()
        self.lm = lm
        # Transformers 5.20 renamed it.
        self.cache_name = "cache" if "cache" in accepted_arguments(type(lm)) else "past_key_values"

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: "Caches | None" = None,
        use_cache: bool = True,
        logits_to_keep: int = 1,
    ) -> "Answer":
        """Logits of the last token of each row, and the caches of all rows."""
        padding = {"attention_mask": attention_mask, "position_ids": position_ids}
        outputs = []
        for row, ids in enumerate(input_ids):
            given = {name: tensor[row : row + 1] for name, tensor in padding.items() if tensor is not None}
            given[self.cache_name] = None if cache is None else cache[row]
            outputs.append(self.lm(input_ids=ids[None], use_cache=use_cache, logits_to_keep=logits_to_keep, **given))
        logits = torch.cat([output.logits for output in outputs])
        return Answer(logits=logits, cache=Caches(output[self.cache_name] for output in outputs))


class Caches(list):
    """The caches of the rows."""

    def batch_select_indices(self, rows: Tensor) -> None:
        """Keep these rows, as a cache of Transformers does."""
        self[:] = [self[row] for row in rows.tolist()]


class Answer(dict):
    """What a model of Transformers returns, as far as `generate` reads it."""

    __getattr__ = dict.__getitem__


# Memory, by estimate

# Qwen2.5-7B, as its config.json says.
SEVEN_BILLION = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}
N_GPUS, GPU_GB = 8, 80.0


def memory_estimate(settings: RunSettings) -> list[Row]:
    """One row: what each of 8 GPUs of 80 GB would have to hold, with four models of 7.6 billion parameters.

    Nothing is allocated: `plan` counts.

    Book: §13.8; §13.5.1
    """
    with tempfile.TemporaryDirectory() as folder:
        AutoConfig.for_model("qwen2", **SEVEN_BILLION).save_pretrained(folder)
        budget = plan(replace(settings, model=replace(settings.model, actor=folder, reward=folder)), N_GPUS)
    return [{"iteration": 0, "memory_gb": budget.gpu / 1e9, "memory_limit_gb": GPU_GB}]


# Rewards of our own


def number_of_words(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
    """A reward that likes long answers: their words."""
    return [float(len(response.split())) for response in responses]


def not_empty(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
    """A reward that (nearly) every answer gets: 1 for having a word in it."""
    return [float(bool(response.strip())) for response in responses]


# What the rows of a failing run show, and those of a cured one do not


def column(rows: Sequence[Row], name: str) -> list[float]:
    """One number of each row."""
    return [row[name] for row in rows]


def gain(rows: Sequence[Row], name: str) -> float:
    """Mean of the last three rows minus that of the first two."""
    return fmean(column(rows[-3:], name)) - fmean(column(rows[:2], name))


def losses_explode(rows: Sequence[Row]) -> bool:
    """A value loss above 100 and a policy loss above 1 from the first iteration on."""
    return max(column(rows[:2], "value_loss")) > 100 and max(map(abs, column(rows[:2], "policy_loss"))) > 1


def kl_spikes(rows: Sequence[Row]) -> bool:
    """Within four iterations updates of more than 0.3 nats a token, and 10 nats an answer to the reference."""
    return max(column(rows[:4], "approx_kl")) > 0.3 and max(column(rows[:4], "kl_per_response")) > 10


def critic_is_stuck(rows: Sequence[Row]) -> bool:
    """The value loss does not fall, and no return is explained."""
    return gain(rows, "value_loss") > -0.02 and max(column(rows[-6:], "explained_variance")) < 0.02


def reward_is_hacked(rows: Sequence[Row]) -> bool:
    """The gold score falls by 0.2 from its best while the score goes on rising; a third of the answers repeat."""
    gold, score = column(rows, "gold"), column(rows, "score")
    best = gold.index(max(gold))
    fell = gold[best] - fmean(gold[-3:]) > 0.2 and fmean(score[-3:]) > score[best]
    return fell and fmean(column(rows[-3:], "repetitive")) > 1 / 3


def memory_is_short(rows: Sequence[Row]) -> bool:
    """More than there is."""
    return max(row["memory_gb"] - row["memory_limit_gb"] for row in rows) > 0


def rollout_dominates(rows: Sequence[Row]) -> bool:
    """Generating takes longer than all the rest of an iteration."""
    return median(row["seconds_generate"] - row["seconds_score"] - row["seconds_update"] for row in rows) > 0


def learning_crawls(rows: Sequence[Row]) -> bool:
    """The clip binds on a seventh of all tokens, and the score gains less than 0.6 standard deviations."""
    return min(column(rows, "clip_fraction")) > 1 / 7 and gain(rows, "scaled_score") < 0.6


def nothing_is_told_apart(rows: Sequence[Row]) -> bool:
    """The advantages hardly differ before they are whitened, and the gold score gains less than 0.1."""
    return max(column(rows[-3:], "advantage_std")) < 0.15 and gain(rows, "gold") < 0.1


def sampler_lags(rows: Sequence[Row]) -> bool:
    """The ratio is not 1 before the first step, and old_logp is what the sampler said."""
    return max(column(rows, "ratio_deviation")) > 0.1 and max(column(rows, "sampler_kl")) < 1e-6


def log_probs_are_stale(rows: Sequence[Row]) -> bool:
    """The ratio is not 1 before the first step, and old_logp is not what the sampler said."""
    return max(column(rows, "ratio_deviation")) > 0.1 and max(column(rows, "sampler_kl")) > 0.005


def kl_coef_is_negative(rows: Sequence[Row]) -> bool:
    """β below 0: leaving the reference is paid for."""
    return min(column(rows, "kl_coef")) < 0


def answers_do_not_end(rows: Sequence[Row]) -> bool:
    """Nearly all answers run into the length limit, which they did not at first."""
    return rows[0]["unfinished"] < 0.1 and min(column(rows[-2:], "unfinished")) > 0.8


def kl_is_negative(rows: Sequence[Row]) -> bool:
    """A KL below 0 by more than noise, and all answers equally long."""
    lengths = column(rows, "response_length")
    return min(column(rows, "kl_per_response")) < -1 and all(length == round(length) for length in lengths)


def no_answer_has_an_end(rows: Sequence[Row]) -> bool:
    """All answers count as cut by the length limit, though they are far from it."""
    return min(column(rows, "unfinished")) > 0.9 and max(column(rows, "response_length")) < 20


def actor_stands_still(rows: Sequence[Row]) -> bool:
    """Updates with a gradient, and not the least KL, neither to the old policy nor to the reference."""
    still = max(column(rows, "approx_kl")) < 1e-8 and max(map(abs, column(rows, "kl_per_response"))) < 1e-4
    return still and min(column(rows, "grad_norm")) > 0


_RAW = {"reward": "models/reward*50", "scale_rewards": False, "reward_clip": None, "whiten_advantages": False}
_RAW |= {"eps_clip_value": None, "max_grad_norm": 1e9}
_LONG = {"reward": "models/reward,ppo_lab.llm.failures:number_of_words*2", "critic": "actor", "kl_coef": 0.02}
_ALIKE = {"reward": "ppo_lab.llm.failures:not_empty", "critic": "actor", "scale_rewards": False}
_LARGE = {"bf16": True, "batch_size": 512, "max_new_tokens": 512, "minibatch_size": 128, "micro_batch_size": 4}
_LARGE |= {"score_batch_size": 16, "gradient_checkpointing": True}

SCENARIOS: dict[str, Scenario] = {
    scenario.name: scenario
    for scenario in (
        Scenario(
            "loss_explosion",
            row="loss explodes early in training",
            shows="value loss in the thousands, policy loss above 1, from the first update on",
            symptom=losses_explode,
            iterations=6,
            settings=_RAW,
            cure={"scale_rewards": True, "reward_clip": 5.0, "whiten_advantages": True, "max_grad_norm": 1.0},
            book_cures={
                "reward whitening": {"whiten_scores": True},
                # The critic begins as the reward model and speaks in its units.
                "reward whitening, new critic": {"whiten_scores": True, "critic": "actor"},
                "reward clipping": {"reward_clip": 5.0},
                "gradient clipping": {"max_grad_norm": 1.0},
            },
        ),
        Scenario(
            "kl_spike",
            row="KL soars out of control",
            shows="more than 10 nats to the reference within four iterations, updates of more than 0.3 nats a token",
            symptom=kl_spikes,
            iterations=8,
            settings={"kl_coef": 0.005, "lr": 1e-2, "warmup_iterations": 0},
            # The preset. "lower lr" shows that the learning rate is what cures; "larger β" that the price is not.
            cure={"kl_coef": 0.1, "lr": 5e-4, "warmup_iterations": 5},
            book_cures={
                "adaptive KL": {"adaptive_kl": True},
                "adaptive KL, horizon 128": {"adaptive_kl": True, "kl_horizon": 128.0},
                "lower lr": {"lr": 5e-4},
                "larger β": {"kl_coef": 0.1},
            },
        ),
        Scenario(
            "stuck_critic",
            row="value loss does not fall",
            shows="value loss level or rising, explained variance 0 or less",
            symptom=critic_is_stuck,
            iterations=12,
            settings={"critic": "actor", "critic_lr": 1e-6},
            # The preset. "higher critic_lr" and "better start" are its two halves.
            cure={"critic": "reward", "critic_lr": 1e-3},
            book_cures={
                "critic warm-up": {"critic_warmup": 5},
                "larger value_coef": {"value_coef": 10.0},
                "higher critic_lr": {"critic_lr": 1e-3},
                "better start": {"critic": "reward"},
            },
        ),
        Scenario(
            "reward_hacking",
            row="output degenerates (repeated phrases)",
            shows="the score rises, the gold score turns and falls, answers repeat themselves, the KL grows on",
            symptom=reward_is_hacked,
            iterations=50,
            settings={"kl_coef": 0.0},
            cure={"kl_coef": 0.1},
            book_cures={"early stop": {"iterations": 20}, "KL penalty": {"kl_coef": 0.05}},
        ),
        Scenario(
            "out_of_memory",
            row="out of GPU memory in training",
            shows="the estimate is above the memory of the GPU",
            symptom=memory_is_short,
            iterations=1,
            settings=_LARGE,
            cure={"zero_stage": 3},
            run=memory_estimate,
            run_cured=memory_estimate,
            book_cures={
                "ZeRO-3": {"zero_stage": 3},
                "offload": {"zero_stage": 1, "offload_optimizer": True, "offload_reward": True},
                "shorter rollout": {"max_new_tokens": 128},
            },
        ),
        Scenario(
            "slow_rollout",
            row="rollout too slow",
            shows="generating takes longer than scoring and updating together",
            symptom=rollout_dominates,
            iterations=3,
            run=with_single_answers,
        ),
        Scenario(
            "crawling",
            row="does not learn",
            shows="the clip binds on a seventh of all tokens or more, the score hardly rises",
            symptom=learning_crawls,
            iterations=12,
            settings={"eps_clip": 0.001},
            cure={"eps_clip": 0.2},
            book_cures={"ε = 0.3": {"eps_clip": 0.3}},
        ),
        Scenario(
            "equal_rewards",
            row="does not learn",
            shows="advantages that hardly differ before whitening, and a gold score that stays where it was",
            symptom=nothing_is_told_apart,
            iterations=12,
            settings=_ALIKE,
            # The reward does it; it brings the preset's scaling along, which equal scores cannot have.
            cure={"reward": "models/reward", "scale_rewards": True},
            book_cures={
                "reward model alone": {"reward": "models/reward"},
                "ε = 0.3": {"eps_clip": 0.3},
                "no whitening": {"whiten_advantages": False},
                # Without a price, the critic's error is all that whitening has to blow up.
                "no KL penalty": {"kl_coef": 0.0},
                "no KL penalty, no whitening": {"kl_coef": 0.0, "whiten_advantages": False},
            },
        ),
        Scenario(
            "lagging_sampler",
            row="",
            shows="the ratio is not 1 before the first step, though the sampler agrees with log π_old",
            symptom=sampler_lags,
            iterations=16,
            settings={"ratio_tolerance": None},
            run=with_lagging_sampler,
            book_cures={"recomputed": {}, "recomputed, sampler_correction": {"sampler_correction": 2.0}},
            run_tried={
                "recomputed": with_lagging_sampler_read_again,
                "recomputed, sampler_correction": with_lagging_sampler_read_again,
            },
        ),
        Scenario(
            "stale_log_probs",
            row="",
            shows="the ratio is not 1 before the first step, and the sampler disagrees with log π_old",
            symptom=log_probs_are_stale,
            iterations=12,
            settings={"ratio_tolerance": None},
            run=with_stale_log_probs,
        ),
        Scenario(
            "negative_kl_coef",
            row="",
            shows="β below 0, then a value loss that multiplies",
            symptom=kl_coef_is_negative,
            iterations=10,
            cure={"adaptive_kl": True},
            run=with_book_controller,
        ),
        Scenario(
            "endless_answers",
            row="",
            shows="answers grow until the length limit cuts all of them",
            symptom=answers_do_not_end,
            iterations=16,
            settings=_LONG,
            # The penalty alone ends the answers, but words are paid for and the grammar goes; the price alone leaves a
            # third to a half of them cut.
            cure={"missing_eos_penalty": 4.0, "kl_coef": 0.1},
            book_cures={"EOS penalty alone": {"missing_eos_penalty": 4.0}, "larger β alone": {"kl_coef": 0.1}},
        ),
        Scenario(
            "padding_counted",
            row="",
            shows="a negative KL, and all answers as long as the longest",
            symptom=kl_is_negative,
            iterations=10,
            run=with_padding_counted,
        ),
        Scenario(
            "eos_masked",
            row="",
            shows="all answers count as cut, though they are far from the limit",
            symptom=no_answer_has_an_end,
            iterations=10,
            run=with_eos_masked,
        ),
        Scenario(
            "frozen_actor",
            row="",
            shows="no KL at all, to the old policy or to the reference, and gradients all the same",
            symptom=actor_stands_still,
            iterations=8,
            run=with_frozen_actor,
        ),
    )
}
