"""PPO for language models: one iteration as the book lists it, and the loop around it."""

import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, fields, replace
from numbers import Real
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor

from ppo_lab.clip import PPOLoss, ppo_loss
from ppo_lab.diagnostics import explained_variance
from ppo_lab.kl import approx_kl, kl_estimate
from ppo_lab.llm.config import PPOSettings
from ppo_lab.llm.engine import fingerprint
from ppo_lab.llm.experience import (
    Experience,
    answers,
    by_length,
    collect,
    estimate,
    greedy_scores,
    select,
    shaped_scores,
    unwhitened_advantages,
)
from ppo_lab.llm.rewards import called
from ppo_lab.llm.roles import Roles
from ppo_lab.llm.tokens import token_statistics
from ppo_lab.masking import hide, masked_mean, masked_var
from ppo_lab.stability import AdaptiveKLController, FixedKLController

Judge = Callable[[list[str], list[str], list[bool]], dict[str, list[float]]]
Prompts = Sequence[Sequence[int]]
Row = dict[str, float]


@dataclass
class Step:
    """What one gradient step saw: the parts of the loss, ratio statistics, and the gradient norms before the clip."""

    policy_loss: float = 0.0
    value_loss: float = 0.0
    entropy: float = 0.0
    approx_kl: float = 0.0
    clip_fraction: float = 0.0
    clip_fraction_outside: float = 0.0
    ratio_max: float = 0.0
    ratio_deviation: float = 0.0
    grad_norm: float = 0.0
    critic_grad_norm: float = 0.0


# What a judge may not call its columns.
RESERVED = {
    "iteration",
    "iterations",
    "prompt",
    "response",
    "score",
    "kl",
    "scaled_score",
    "kl_per_response",
    "kl_coef",
}
RESERVED |= {item.name for item in fields(Step)}


class NonFiniteError(FloatingPointError):
    """A loss or a gradient is not finite. `experience` holds the answers it came from, `rows` their places."""

    def __init__(self, message: str, experience: Experience, rows: Tensor):
        super().__init__(message)
        self.experience = experience
        self.rows = rows


def llm_ppo_iteration(
    prompts: Prompts,
    roles: Roles,
    controller: AdaptiveKLController | FixedKLController,
    settings: PPOSettings,
    iteration: int = 0,
) -> tuple[Experience, list[Step]]:
    """One iteration of PPO with four models: answer, score, estimate advantages, update K times.

    Stage 1 fills an Experience: y ~ π_old, log π_old, log π_ref, r_φ, V_old, token rewards, Â, R̂. Stage 2 takes the
    gradient steps. The controller's β prices the KL of stage 1 and moves once, after stage 2.

    The book's listing with its faults mended: V_old is stored, padding is masked, the entropy comes from the logits,
    and no copy of the actor is made, because log π_old is all that is needed of it.

    prompts: lists of token ids, each answered group_size times, next to each other; iteration: the number of this one,
    from 0, which picks the sampling noise. Any other advantage than gae drops V and the value loss and keeps all else;
    ReMax answers each prompt once more, greedily. Returns the experience and one Step for each gradient step taken.
    Raises NonFiniteError before a step that would destroy a model, and ValueError if the ratio is not 1 before the
    first step.

    Book: §13.5.4; §13.9
    Source: Ziegler et al. 2019, arXiv 1909.08593; Ouyang et al. 2022, arXiv 2203.02155
    """
    experience = collect([ids for ids in prompts for _ in range(settings.group_size)], roles, settings, iteration)
    if settings.advantage == "remax":
        scores, lengths = (x.repeat_interleave(settings.group_size) for x in greedy_scores(prompts, roles, settings))
        experience = replace(experience, baseline_scores=scores, baseline_lengths=lengths)
    check_finite(experience)
    experience = estimate(experience, roles, settings, controller.kl_coef)
    with roles.timed("update"):
        steps = update(roles, experience, settings, iteration)
    controller.update(kl_per_response(experience), n_steps=len(experience.mask))
    return experience, steps


def check_finite(experience: Experience) -> None:
    """Raise NonFiniteError for what a role said that is not finite, before whitening spreads it over all answers."""
    mask = experience.mask
    named = {"scores": experience.scores[:, None].expand_as(mask), "values": experience.values}
    named |= {"old_logp": experience.old_logp, "ref_logp": experience.ref_logp}
    if not all(bool((x.isfinite() | ~mask).all()) for x in named.values()):
        raise _non_finite(named, mask, torch.arange(len(mask)), experience)


def kl_per_response(experience: Experience) -> float:
    """Mean over the answers of Σ_t log π_old − log π_ref, in nats: the KL to the reference, per whole answer."""
    return float((experience.old_logp - experience.ref_logp).sum(-1).mean())


def update(roles: Roles, experience: Experience, settings: PPOSettings, iteration: int) -> list[Step]:
    """Stage 2: K passes over the experience in shuffled minibatches, one optimizer step of actor and critic each.

    With stop_kl the update ends before the first step whose minibatch has a larger approx_kl. The first iterations
    raise the learning rate in equal parts, and with critic_warmup leave the actor alone. Returns the steps taken.

    Book: §13.5.4; §13.6.6; §13.6.7
    Source: Schulman et al. 2017, arXiv 1707.06347
    """
    generator = torch.Generator().manual_seed(settings.seed * 1_000_003 + iteration)
    lr_scale = min(1.0, (iteration + 1) / max(1, settings.warmup_iterations))
    train_actor = iteration >= settings.critic_warmup
    steps: list[Step] = []
    for _ in range(settings.k_epochs):
        order = torch.randperm(len(experience.mask), generator=generator)
        for rows in order.split(settings.minibatch_size):
            step = gather_gradients(roles, experience, rows, settings, train_actor=train_actor)
            if not steps:
                check_ratio(step, settings, bf16=roles.actor.bf16)
            if settings.stop_kl is not None and step.approx_kl > settings.stop_kl:
                discard(roles)
                return steps
            take_step(roles, step, experience, rows, lr_scale, train_actor=train_actor)
            steps.append(step)
    return steps


def gather_gradients(
    roles: Roles, experience: Experience, rows: Tensor, settings: PPOSettings, *, train_actor: bool = True
) -> Step:
    """Forward and backward passes of one minibatch, in micro-batches of answers of similar length.

    Every mean runs over the tokens of the whole minibatch, so the gradient does not depend on the micro-batch size.
    Returns what the minibatch showed. Raises NonFiniteError naming the tensor and the answers.
    """
    count = experience.mask[rows].sum()
    step = Step()
    parts = by_length(experience, roles.ranks.share(rows), settings.micro_batch_size)
    for number, micro in enumerate(parts, start=1):
        part = select(experience, micro)
        # A row of −1 stands for no answer: it keeps this rank in step with the others and counts for nothing.
        mask = part.mask & (micro >= 0)[:, None].to(part.mask.device)
        # A frozen actor needs no graph, which would stay alive beside that of the next micro-batch.
        with torch.set_grad_enabled(train_actor or roles.critic is None):
            logits, values = roles.actor(*part.ids_and_mask(), part.response_ids.shape[1])
        loss, kl_loss, deviation = micro_loss(roles, logits, values, part, mask, micro, experience, settings, count)
        backward(roles, loss, kl_loss, settings, train_actor=train_actor, last=number == len(parts))
        _add(step, loss, deviation, float(mask.sum() / count))
        del logits, values, loss, kl_loss
    return over_ranks(step, roles)


def over_ranks(step: Step, roles: Roles) -> Step:
    """The step as all ranks together took it: sums of the parts that each one saw, and the largest ratios."""
    if roles.ranks.world_size == 1:
        return step
    sums = roles.ranks.reduce(torch.tensor(astuple(step), dtype=torch.float64, device=roles.actor.device)).tolist()
    largest = torch.tensor([step.ratio_max, step.ratio_deviation], dtype=torch.float64, device=roles.actor.device)
    ratio_max, ratio_deviation = roles.ranks.reduce(largest, torch.distributed.ReduceOp.MAX).tolist()
    return replace(Step(*sums), ratio_max=ratio_max, ratio_deviation=ratio_deviation)


def micro_loss(
    roles: Roles,
    logits: Tensor,
    values: Tensor | None,
    part: Experience,
    mask: Tensor,
    rows: Tensor,
    whole: Experience,
    settings: PPOSettings,
    count: Tensor,
) -> tuple[PPOLoss, Tensor, Tensor]:
    """The PPO loss of some answers, the KL term of the loss, and the largest |log ρ|.

    logits, values: what the actor says about them; part: those answers, cut to their length; mask [b, T]: what counts
    in them; rows: their places in the whole experience, for the message; count: the number of tokens that all means
    divide by.
    """
    if roles.critic is not None:
        values = roles.critic(*part.ids_and_mask(), part.response_ids.shape[1])
    logp, entropy = token_statistics(logits, part.response_ids, temperature=settings.temperature)
    values = None if values is None else values[:, :-1].float()
    loss = ppo_loss(
        logp,
        part.old_logp,
        part.advantages,
        values=values,
        old_values=part.values,
        returns=part.returns,
        entropy=entropy,
        mask=mask,
        count=count,
        eps_clip=settings.eps_clip,
        eps_clip_high=settings.eps_clip_high,
        dual_clip=settings.dual_clip,
        eps_clip_value=settings.eps_clip_value,
        value_coef=settings.value_coef,
        entropy_coef=settings.entropy_coef,
    )
    kl_loss = logp.new_zeros(())
    if settings.kl_loss_coef:
        kl = kl_estimate(logp, part.ref_logp, settings.kl_loss_kind)
        kl_loss = settings.kl_loss_coef * masked_mean(kl, mask, count=count)
    if not bool((loss.total + kl_loss).isfinite()):
        named = {"logp": logp, "values": values, "entropy": entropy, "advantages": part.advantages}
        named |= {"old_logp": part.old_logp, "ref_logp": part.ref_logp, "returns": part.returns}
        raise _non_finite({name: x for name, x in named.items() if x is not None}, mask, rows, whole)
    deviation = hide(logp.detach() - part.old_logp, mask).abs().max()
    return loss, kl_loss, deviation


def backward(
    roles: Roles, loss: PPOLoss, kl_loss: Tensor, settings: PPOSettings, *, train_actor: bool, last: bool = True
) -> None:
    """Hand each engine the part of the loss that its model is responsible for; last: the step follows."""
    actor_loss = loss.policy - settings.entropy_coef * loss.entropy + kl_loss
    critic_loss = settings.value_coef * loss.value
    if roles.critic is None:
        roles.actor.backward(actor_loss + critic_loss if train_actor else critic_loss, last=last)
        return
    if train_actor:
        roles.actor.backward(actor_loss, last=last)
    roles.critic.backward(critic_loss, last=last)


def take_step(
    roles: Roles, step: Step, experience: Experience, rows: Tensor, lr_scale: float, *, train_actor: bool
) -> None:
    """One optimizer step of actor and critic, if both gradients are finite, else NonFiniteError and no step.

    DeepSpeed's stages 1 to 3 look at a gradient only when they step: with a bad one of the critic alone, the actor has
    moved by then. The run ends all the same, and its last checkpoint is from before.
    """
    stepping = [roles.actor] if train_actor or roles.critic is None else []
    stepping += [roles.critic] if roles.critic is not None else []
    try:
        for engine in stepping:
            engine.clip_gradient()
        for engine in stepping:
            engine.step(lr_scale)
    except FloatingPointError as error:
        discard(roles)
        raise NonFiniteError(str(error), experience, rows) from error
    step.grad_norm = roles.actor.grad_norm if roles.actor in stepping else 0.0
    step.critic_grad_norm = roles.critic.grad_norm if roles.critic in stepping else 0.0


def discard(roles: Roles) -> None:
    """Forget the gradients that were gathered."""
    roles.actor.discard()
    if roles.critic is not None:
        roles.critic.discard()


def check_ratio(step: Step, settings: PPOSettings, *, bf16: bool = False) -> None:
    """Raise ValueError if the ratio is not 1 before the first step of an iteration.

    The policy has not moved yet, so ρ = 1 up to rounding. Anything else is a difference between sampling and training:
    dropout, another temperature, missing positions, another precision.
    """
    limit = settings.ratio_tolerance
    # In bfloat16 one token among many may be far off by rounding alone; their mean may not.
    name, deviation = ("approx_kl", step.approx_kl) if bf16 else ("|log ρ|", step.ratio_deviation)
    if limit is not None and deviation > limit:
        raise ValueError(
            f"the ratio must be 1 before the first step: {name} is {deviation:.4g}, ratio_tolerance {limit:g}; "
            "sampling and training do not compute the same log-probabilities"
        )


def _add(step: Step, loss: PPOLoss, deviation: Tensor, share: float) -> None:
    """Add one micro-batch: the losses are parts of sums already, the statistics are means to be weighted."""
    # One transfer from the device instead of eight.
    numbers = torch.stack([*(x.detach() for x in loss), deviation]).tolist()
    _, policy, value, entropy, approx_kl, clip_fraction, outside, ratio_max, _, deviation = numbers
    step.policy_loss += policy
    step.value_loss += value
    step.entropy += entropy
    step.approx_kl += share * approx_kl
    step.clip_fraction += share * clip_fraction
    step.clip_fraction_outside += share * outside
    step.ratio_max = max(step.ratio_max, ratio_max)
    step.ratio_deviation = max(step.ratio_deviation, deviation)


def _non_finite(named: dict[str, Tensor], mask: Tensor, rows: Tensor, whole: Experience) -> NonFiniteError:
    for name, tensor in named.items():
        bad = (~tensor.isfinite() & mask).any(-1)
        if bool(bad.any()):
            where = rows[bad.nonzero().squeeze(-1).cpu()].tolist()
            return NonFiniteError(f"{name} is not finite in the answers {where[:8]}", whole, rows)
    return NonFiniteError("the loss is not finite, though its inputs are", whole, rows)


def prompt_batch(prompts: Prompts, settings: PPOSettings, iteration: int) -> list[Sequence[int]]:
    """The prompts of an iteration: the set is gone through in shuffled order, again and again in another one."""
    if not prompts:
        raise ValueError("prompts must hold at least one prompt, got none")
    n_prompts = settings.batch_size // settings.group_size
    places = range(iteration * n_prompts, (iteration + 1) * n_prompts)
    rounds = {n: _order(len(prompts), settings.seed, n) for n in {place // len(prompts) for place in places}}
    return [prompts[rounds[place // len(prompts)][place % len(prompts)]] for place in places]


def _order(n: int, seed: int, round_number: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed * 1_000_003 + round_number)
    return torch.randperm(n, generator=generator).tolist()


def make_controller(settings: PPOSettings) -> AdaptiveKLController | FixedKLController:
    """The controller of β that the settings name."""
    if settings.adaptive_kl:
        return AdaptiveKLController(settings.kl_coef, settings.target_kl, settings.kl_horizon)
    return FixedKLController(settings.kl_coef)


def train(
    prompts: Prompts,
    roles: Roles,
    settings: PPOSettings,
    *,
    judge: Judge | None = None,
    controller: AdaptiveKLController | FixedKLController | None = None,
    first_iteration: int = 0,
) -> Iterator[tuple[Row, Experience]]:
    """Iterations until settings.iterations; yields one row of metrics and the experience of each.

    judge: prompts, responses, finished → columns that are logged beside the score and never trained on. controller and
    first_iteration: where a run goes on. Raises ValueError at the end if the reference has changed in between.
    """
    frozen = fingerprint(roles.reference)
    controller = controller or make_controller(settings)
    for iteration in range(first_iteration, settings.iterations):
        roles.seconds = {}
        started = perf_counter()
        kl_coef = controller.kl_coef
        experience, steps = llm_ppo_iteration(
            prompt_batch(prompts, settings, iteration), roles, controller, settings, iteration
        )
        every = settings.refresh_reference_every
        if every and (iteration + 1) % every == 0:
            roles.refresh_reference()
            frozen = fingerprint(roles.reference)
        machine = machine_columns(experience, roles, settings, perf_counter() - started)
        judged = judged_columns(experience, roles, judge)
        measured = metrics(experience, steps, roles, settings)
        yield {"iteration": iteration, **judged, **measured, "kl_coef": kl_coef, **machine}, experience
    if fingerprint(roles.reference) != frozen:
        raise ValueError("the reference must not change in training, but its hash did: every KL was measured wrongly")


def machine_columns(experience: Experience, roles: Roles, settings: PPOSettings, seconds: float) -> Row:
    """What an iteration of so many seconds cost: tokens, time of its phases, and memory beside what there is of it."""
    tokens = generated_tokens(experience, settings)
    return {
        "generated_tokens": tokens,
        "tokens_per_second": tokens / seconds,
        **{f"seconds_{phase}": seconds for phase, seconds in roles.seconds.items()},
        "memory_gb": peak_memory(roles) / 1e9,
        "memory_limit_gb": memory_limit(roles) / 1e9,
    }


def peak_memory(roles: Roles) -> int:
    """The most bytes this process has held: on its GPU, or of its main memory."""
    if roles.actor.device.type == "cuda":
        return torch.cuda.max_memory_allocated(roles.actor.device)
    try:
        import resource
    except ImportError:
        # Windows has no such count.
        return 0
    # Linux counts in kilobytes, macOS in bytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def memory_limit(roles: Roles) -> float:
    """All bytes that this process could hold: those of its GPU, or its share of the main memory; nan if unknown."""
    if roles.actor.device.type == "cuda":
        return torch.cuda.mem_get_info(roles.actor.device)[1]
    if not hasattr(os, "sysconf") or "SC_PHYS_PAGES" not in os.sysconf_names:
        # Windows does not tell.
        return math.nan
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(machine, container_limit()) / roles.ranks.on_this_machine


def container_limit() -> float:
    """The bytes that a container grants, inf where there is none or where it does not say."""
    try:
        return float(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii"))
    except (OSError, ValueError):
        # Without a limit the file says "max".
        return math.inf


def generated_tokens(experience: Experience, settings: PPOSettings) -> int:
    """Tokens that the iteration sampled: those of the answers, and of the greedy ones that ReMax compares with."""
    tokens = int(experience.mask.sum())
    if experience.baseline_lengths is not None:
        tokens += int(experience.baseline_lengths[:: settings.group_size].sum())
    return tokens


def judged_columns(experience: Experience, roles: Roles, judge: Judge | None) -> Row:
    """The mean of every column of a judge, beside the mean score of the reward."""
    columns = {"score": float(experience.scores.mean())}
    if judge is not None:
        judged = ask(judge, *answers(experience, roles.tokenizer), experience.finished.tolist())
        columns |= {name: sum(values) / len(values) for name, values in judged.items()}
    return columns


def ask(judge: Judge, prompts: list[str], responses: list[str], finished: list[bool]) -> dict[str, list[float]]:
    """What a judge says. Raises ValueError unless it is one finite number per answer in columns of its own."""
    columns = called(judge, "judge", prompts, responses, finished)
    must = "the judge must return a dict of columns, one finite number per answer"
    if not isinstance(columns, dict):
        raise ValueError(f"{must}, got {columns!r:.200}")
    for name, values in columns.items():
        if name in RESERVED:
            raise ValueError(f"the judge must not name a column {name}: the record has one")
        numbers = list(values) if isinstance(values, Sequence) and not isinstance(values, str) else []
        if len(numbers) != len(prompts) or not all(isinstance(x, Real) and math.isfinite(x) for x in numbers):
            raise ValueError(f"{must}, got {values!r:.100} in column {name} for {len(prompts)} answers")
    return columns


def sample_table(experience: Experience, roles: Roles, judge: Judge | None, n_samples: int) -> list[dict[str, object]]:
    """The first answers of a batch as text, each with its score, its KL to the reference and what the judge says."""
    some = select(experience, torch.arange(min(n_samples, len(experience.mask))))
    prompts, responses = answers(some, roles.tokenizer)
    columns: dict[str, list] = {"prompt": prompts, "response": responses, "score": some.scores.tolist()}
    columns["kl"] = (some.old_logp - some.ref_logp).sum(-1).tolist()
    if judge is not None:
        columns |= ask(judge, prompts, responses, some.finished.tolist())
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def metrics(experience: Experience, steps: list[Step], roles: Roles, settings: PPOSettings) -> Row:
    """One row: the KL first, then the critic, then the rest. Means over the steps taken, nan without any.

    sampler_kl: KL of the sampler to the training pass, per token; entropy: mean per token in nats; explained_variance:
    of the critic before the update; advantage_std: before whitening; first_approx_kl: of the first minibatch, before
    any step, 0 but for rounding; unfinished: share of answers that the length limit cut; empty: share that are an EOS
    alone. What describes a critic is nan without one.
    """
    mask = experience.mask
    lengths = mask.sum(-1)
    kl = experience.old_logp - experience.ref_logp
    row = {
        "scaled_score": float(shaped_scores(experience, roles, settings).mean()),
        "kl_per_response": kl_per_response(experience),
        "kl_per_token": float(masked_mean(kl, mask)),
        "sampler_kl": float(approx_kl(experience.old_logp, experience.sampler_logp, mask)),
        **{item.name: mean_or_nan([getattr(step, item.name) for step in steps]) for item in fields(Step)},
        "ratio_max": max((step.ratio_max for step in steps), default=float("nan")),
        "ratio_deviation": steps[0].ratio_deviation if steps else float("nan"),
        "first_approx_kl": steps[0].approx_kl if steps else float("nan"),
        "explained_variance": float(explained_variance(experience.values, experience.returns, mask)),
        "advantage_std": float(masked_var(unwhitened_advantages(experience, settings), mask).sqrt()),
        "response_length": float(lengths.float().mean()),
        "unfinished": float((~experience.finished).float().mean()),
        "empty": float(((lengths == 1) & experience.finished).float().mean()),
        "updates": len(steps),
    }
    if not settings.with_critic:
        row |= dict.fromkeys(("value_loss", "critic_grad_norm", "explained_variance"), math.nan)
    return row


def mean_or_nan(values: list[float]) -> float:
    """The mean of some numbers, nan of none."""
    return sum(values) / len(values) if values else float("nan")
