"""The symptoms of a sick run, what they come from and what to try first, and `diagnose`, which looks for them all.

Book: §13.8
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ppo_lab.diagnostics import rules
from ppo_lab.diagnostics.history import History, read_history


@dataclass(frozen=True)
class Finding:
    """A symptom of a run, and what to do about it.

    symptom: its short name; evidence: the number, the threshold, and since when; iteration: since which one; causes:
    the most likely first; first_try: what to change first; section: where this lab and the book treat it; machine:
    whether it is the machine that ails, not the learning.

    Book: §13.8
    """

    symptom: str
    evidence: str
    iteration: int
    causes: tuple[str, ...]
    first_try: str
    section: str
    machine: bool = False


@dataclass(frozen=True)
class Rule:
    """A symptom, the function of `rules` that looks for its signs, and the advice for it.

    explained_by: other symptoms that, where they are found, are the reason for this one.
    """

    symptom: str
    signs: Callable[[History], rules.Sign | None]
    causes: tuple[str, ...]
    first_try: str
    section: str
    explained_by: tuple[str, ...] = ()
    machine: bool = False


def diagnose(history: Iterable[Mapping[str, Any]] | str | Path | History) -> list[Finding]:
    """What is wrong with a run, by its record: the earliest symptom first; an empty list for a healthy run.

    Of symptoms that begin together those of the KL come first, then those of the value loss, then those of the reward.
    A symptom that another one explains stands behind it; the machine's stand last. A rule is asked where its columns
    are; a missing cell or a nan is no evidence. The thresholds stand at the functions of `ppo_lab.diagnostics.rules`,
    each beside what healthy runs of this lab show; those of language models were measured with answers of about 10
    words.

    history: rows of metrics as `train` yields them, or a CSV's rows as text, or the path of a run folder or of a CSV
    file, or what `read_history` made of them; of one run, its iterations rising. Returns at most one finding per
    symptom. Raises like `read_history`.

    Book: §13.8
    Source: none in particular; the thresholds are measured here
    """
    run = read_history(history)
    signs = {rule.symptom: sign for rule in RULES if (sign := rule.signs(run)) is not None}
    found = [rule for rule in RULES if rule.symptom in signs]
    # Sorting keeps the order of the rules where the keys are equal.
    found.sort(key=lambda rule: order(rule, {symptom: place for symptom, (place, _) in signs.items()}))
    return [finding(run, rule, *signs[rule.symptom]) for rule in found]


def order(rule: Rule, places: dict[str, int]) -> tuple[bool, int, bool]:
    """What findings are sorted by. places: of all symptoms that were found, where they begin."""
    explanations = [places[symptom] for symptom in rule.explained_by if symptom in places]
    return rule.machine, max([places[rule.symptom], *explanations]), bool(explanations)


def finding(run: History, rule: Rule, place: int, evidence: str) -> Finding:
    """The finding of a rule whose signs begin at a place of the history."""
    return Finding(
        rule.symptom, evidence, run.iterations[place], rule.causes, rule.first_try, rule.section, machine=rule.machine
    )


# In the order of the book's rule of thumb: KL, value loss, reward; then the machine.
RULES = (
    Rule(
        "ratio not 1 at the start",
        rules.first_ratio,
        (
            "the sampler has old weights, and old_logp is its own",
            "old_logp was computed with an older policy, or after a step",
            "the two passes differ: dropout, temperature, positions, mask, precision",
        ),
        "Hand the sampler the weights before every batch, compute old_logp with the pass that trains, and keep "
        "ratio_tolerance on.",
        "chapter 08, section 2.8; §13.5.4",
    ),
    Rule(
        "sampler mismatch",
        rules.sampler_mismatch,
        (
            "the sampler has old weights, or its own temperature, top-p or precision",
            "a mask that counts tokens which the sampler did not choose",
        ),
        "Copy the weights to the sampler before every batch; what is left, sampler_correction mends.",
        "chapter 08, section 2.8; §13.5.4",
        explained_by=("wrong mask", "ratio not 1 at the start"),
    ),
    Rule(
        "wrong mask",
        rules.wrong_mask,
        (
            "padding after the EOS counts as if the policy had chosen it",
            "the EOS does not count, as where the mask is told from the padding by its id",
            "a mask that is shifted by one token",
        ),
        "Make the mask by position, True up to and including the first EOS: response_mask.",
        "chapter 08, section 2.11; §13.5.4",
    ),
    Rule(
        "negative β",
        rules.negative_kl_coef,
        ("a controller whose step can be larger than 1, as the book's with n_steps of 50 and more", "a wrong sign"),
        "Use AdaptiveKLController, whose factor stays positive, or a fixed kl_coef.",
        "chapter 08, section 2.9; §13.6.5",
    ),
    Rule(
        "KL spike",
        rules.kl_spike,
        (
            "the learning rate is too high, or has no warm-up",
            "too many passes or minibatches over one batch, with a clip that is too wide or off",
            "β is too small to hold the policy",
            "a few tokens with a huge ratio and a negative advantage",
        ),
        "Divide lr by 3, again until approx_kl is below 0.2; then fewer k_epochs, or stop_kl to end an update in time.",
        "chapter 08, section 2.2; §13.8, §13.6.5",
    ),
    Rule(
        "KL too large",
        rules.kl_too_large,
        (
            "β is too small for the size of the rewards, or 0",
            "rewards in large units, which make the same β small",
            "a reward model that pays for text far from the reference",
            "an adaptive β that reacts too slowly: kl_horizon",
        ),
        "Raise kl_coef, or set adaptive_kl with a target_kl; see that the rewards are scaled.",
        "chapter 08, section 2.4; §13.8, §13.6.5",
        explained_by=("reward hacking",),
    ),
    Rule(
        "frozen actor",
        rules.frozen_actor,
        (
            "the learning rate is far too small",
            "the optimizer holds other parameters than those that act: a copy, or frozen ones",
            "advantages that are all 0",
        ),
        "See that grad_norm is above 0 and that a parameter changes over one step; then raise lr.",
        "chapter 08, section 2.12; §13.8",
    ),
    Rule(
        "clip range too small",
        rules.small_clip_range,
        ("eps_clip is too small: nearly every token is clipped after one step", "minibatches that undo each other"),
        "Set eps_clip to 0.2.",
        "chapter 08, section 2.7; §13.8, §13.3.3",
    ),
    Rule(
        "loss explosion",
        rules.loss_explosion,
        (
            "the reward model's scores are large and not scaled",
            "a critic that starts as a reward model and speaks in its units",
            "no limit on rewards and gradients",
            "the learning rate of the critic is too high",
        ),
        "Set scale_rewards and reward_clip, so that the critic sees numbers near 1; in control, a smaller lr.",
        "chapter 08, section 2.1; §13.8, §13.6.1",
    ),
    Rule(
        "stuck value loss",
        rules.stuck_value_loss,
        (
            "the learning rate of the critic is too low",
            "a critic that starts from nothing, or from a model that reads other text",
            "value clipping narrower than the distance to go",
            "rewards that the state does not tell: noise",
        ),
        "Raise critic_lr: Adam divides a larger value_coef out again.",
        "chapter 08, section 2.3; §13.8, §13.6.3",
    ),
    Rule(
        "degenerate advantages",
        rules.degenerate_advantages,
        (
            "all answers get the same reward: a task too easy or too hard, or a reward that is constant",
            "answers of a group that are all alike",
        ),
        "Look at the scores of one batch: a reward must tell answers apart. Whitening blows up what is left, noise.",
        "chapter 08, section 2.7; §13.8, §13.6.2",
    ),
    Rule(
        "reward hacking",
        rules.reward_hacking,
        (
            "β is too small, or the run is too long: the policy has found the reward model's mistakes",
            "a reward model trained on few or on other answers",
            "a reward that pays for length or for single words",
        ),
        "Stop at the iteration where gold was best; then raise kl_coef, then a better reward model or several.",
        "chapter 08, section 2.4; §13.8",
    ),
    Rule(
        "entropy collapse",
        rules.collapsed_entropy,
        (
            "the learning rate is too high: one lucky answer was made certain",
            "no price on leaving the reference, no entropy bonus",
            "a reward that only one answer gets",
        ),
        "Lower lr; in control a small entropy_coef, for a language model a larger kl_coef.",
        "chapter 08, section 5; §13.8, §13.3.4",
    ),
    Rule(
        "endless answers",
        rules.endless_answers,
        (
            "max_new_tokens is too small for the task",
            "the reward grows with the length, and nothing pays for the end",
            "the EOS is masked or not among the stop tokens, so that ending is never learned",
        ),
        "Set missing_eos_penalty, which ends them, and raise kl_coef, which keeps them text. Then read some answers.",
        "chapter 08, section 2.10; §13.8, §13.5.3",
    ),
    Rule(
        "empty answers",
        rules.empty_answers,
        ("every token costs more than it earns: a negative reward, or a large β", "the wrong token counts as the EOS"),
        "Look at the scores of empty answers, and at the sign and the units of the reward.",
        "chapter 08, section 5; §13.8",
    ),
    Rule(
        "non-finite numbers",
        rules.non_finite,
        ("a log-probability of −∞ or a ratio that overflows", "a loss that diverges", "a reward that is not finite"),
        "Look at the first row that has one: what was large in the row before?",
        "chapter 08, section 5; §13.8",
    ),
    Rule(
        "out of memory",
        rules.out_of_memory,
        ("four models and long answers", "micro_batch_size or score_batch_size too large for the longest answers"),
        "Set zero_stage 3 if the models fill the memory, and a smaller micro_batch_size if the answers do.",
        "chapter 08, section 2.5; §13.8, §13.6.8",
        machine=True,
    ),
    Rule(
        "slow rollout",
        rules.slow_rollout,
        ("one answer at a time, or a small batch", "no key-value cache", "one device generates for all"),
        "Generate larger batches, with the cache; then on more devices, or with an engine made for it.",
        "chapter 08, section 2.6; §13.8, §13.6.8",
        machine=True,
    ),
)
