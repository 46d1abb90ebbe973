"""The models of a run, set up from its settings: who plays which role, and checks before the first token is made."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ppo_lab.files import locate
from ppo_lab.llm.config import PPOSettings, RunSettings
from ppo_lab.llm.engine import DeepSpeedEngine, Engine, TorchEngine, shard_reference
from ppo_lab.llm.generate import generate, keyed_uniforms
from ppo_lab.llm.lora import AdaptersOff, add_adapters
from ppo_lab.llm.models import (
    Actor,
    Critic,
    check_roles,
    disable_dropout,
    eos_token_ids,
    load_language_model,
    load_tokenizer,
    make_critic,
    make_reference,
)
from ppo_lab.llm.prompts import Record, encode_prompts, read_prompts
from ppo_lab.llm.ranks import Ranks
from ppo_lab.llm.rewards import Reward, add_rows, check_context, make_reward, reward_models
from ppo_lab.llm.tokens import left_pad
from ppo_lab.masking import masked_var
from ppo_lab.stability import refresh_reference

# An iteration that no run reaches: the sample behind the units of the scores has noise of its own.
STATISTICS = 2**40


@dataclass
class Roles:
    """The models of a run and what belongs to them.

    actor, critic: engines, critic None when the actor carries the value head or the advantage needs none; reference:
    frozen; reward: prompts and responses as ids and masks → scores [B]; eos_token_ids: what ends an answer;
    reward_mean, reward_std: of the scores of the reference's answers, the units of the scaled scores; ranks: this
    process among others; reference_moved: whether the reference has been refreshed; seconds: of each phase of the
    iteration under way.

    Book: §13.5.1
    Source: Ouyang et al. 2022, arXiv 2203.02155
    """

    actor: Engine
    critic: Engine | None
    reference: nn.Module
    reward: Reward
    tokenizer: PreTrainedTokenizerBase
    eos_token_ids: list[int]
    reward_mean: float = 0.0
    reward_std: float = 1.0
    ranks: Ranks = field(default_factory=Ranks)
    reference_moved: bool = False
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the seconds of a phase to what `seconds` holds of it."""
        started = perf_counter()
        yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + perf_counter() - started

    @contextmanager
    def whole_reference(self, *, change: bool = False) -> Iterator[nn.Module]:
        """The reference with all its weights in this process; change: what is written to them on rank 0 stays."""
        sharded = [p for p in self.reference.parameters() if hasattr(p, "ds_tensor")]
        if not sharded:
            yield self.reference
            return
        import deepspeed

        with deepspeed.zero.GatheredParameters(sharded, modifier_rank=0 if change else None):
            yield self.reference.module

    def refresh_reference(self) -> None:
        """Make the reference a copy of the actor as it is now."""
        with self.actor.whole_weights() as actor, self.whole_reference(change=True) as reference:
            refresh_reference(actor.lm, reference.lm)
        self.reference_moved = True


def make_roles(settings: RunSettings, ranks: Ranks | None = None) -> tuple[Roles, list[list[int]]]:
    """Load the checkpoints that the settings name and give each its role; returns them and the encoded prompts.

    ranks: this process among others, which have been joined already. Raises ValueError for models or prompts that do
    not fit together, and OSError for a checkpoint that is not found.

    Book: §13.5.1
    Source: Ouyang et al. 2022, arXiv 2203.02155
    """
    path, trust = locate(settings.model.actor), settings.model.trust_remote_code
    tokenizer = load_tokenizer(path, trust_remote_code=trust)
    lm = load_language_model(path, trust_remote_code=trust)
    if len(tokenizer) > lm.get_input_embeddings().num_embeddings:
        raise ValueError(
            f"the tokenizer of {path} has {len(tokenizer)} tokens, the model {lm.get_input_embeddings().num_embeddings}"
        )
    rows = read_prompts(settings.data)
    prompts = encode_prompts(rows, tokenizer, lm, settings)
    reward = make_reward(settings.model, tokenizer)
    add_rows(reward, rows, prompts)
    check_chat(reward, rows, settings)
    return assemble(lm, reward, tokenizer, prompts, settings, ranks), prompts


def check_chat(reward: Reward, rows: Sequence[Record], settings: RunSettings) -> None:
    """Raise ValueError for messages that a reward model with a tokenizer of its own would read without its template."""
    with_messages = settings.data.chat or any("messages" in row for row in rows)
    if with_messages and not all(model.same_tokens for model, _ in reward_models(reward)):
        raise ValueError(
            "messages need a reward model with the actor's tokens: another one has a chat template of its own"
        )


def assemble(
    lm: PreTrainedModel,
    reward: Reward,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    settings: RunSettings,
    ranks: Ranks | None = None,
) -> Roles:
    """Roles around a language model and a reward that are already in memory. The language model becomes the actor."""
    ppo, ranks = settings.ppo, ranks or Ranks()
    device = check_device(settings.engine.device, ranks)
    sharded = needs_deepspeed(settings, ranks)
    lm.to(device)
    if sharded and settings.engine.bf16:
        cast_weights(lm)
    check_context(reward, prompts, ppo.max_new_tokens)
    for model, _ in reward_models(reward):
        model.model.to("cpu" if settings.engine.offload_reward else device)
        if lm.dtype == torch.bfloat16:
            cast_weights(model.model)
    disable_dropout(lm)
    eos = eos_token_ids(tokenizer, lm) + stop_token_id(tokenizer, ppo.stop_token)
    mean, std = 0.0, 1.0
    if ppo.scale_rewards:
        # The actor is still the reference.
        mean, std = score_statistics(lm, reward, prompts, tokenizer.pad_token_id, eos, ppo, ranks)
    actor, critic, reference = make_modules(lm, reward, settings, mean, std)
    if sharded and settings.engine.zero_stage == 3 and reference is not None:
        reference = shard_reference(reference, bf16=settings.engine.bf16, offload=settings.engine.offload_reference)
    engines = [
        None if module is None else make_engine(module.to(device), lr, settings, ranks)
        for module, lr in ((actor, ppo.lr), (critic, ppo.critic_lr))
    ]
    reference = AdaptersOff(engines[0].module) if reference is None else reference
    return Roles(*engines, reference, reward, tokenizer, eos, mean, std, ranks)


def make_modules(
    lm: PreTrainedModel, reward: Reward, settings: RunSettings, mean: float, std: float
) -> tuple[Actor, Critic | None, Actor | None]:
    """Actor, critic and reference around a language model; no reference with adapters, for it is the actor without."""
    critic = first_critic(lm, reward, settings, mean, std)
    rank, alpha = settings.model.lora_rank, settings.model.lora_alpha
    if not rank:
        reference = make_reference(lm)
        actor = Actor(lm, value_head=settings.model.critic == "shared")
        check_roles(actor, reference)
        return actor, critic, reference
    add_adapters(lm, rank, alpha, settings.ppo.seed)
    if critic is not None:
        add_adapters(critic.backbone, rank, alpha, settings.ppo.seed)
    return Actor(lm, value_head=settings.model.critic == "shared"), critic, None


def cast_weights(module: nn.Module) -> None:
    """Parameters to bfloat16, buffers as they are: rotary frequencies with 8 bits would be another model."""
    for parameter in module.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)


def needs_deepspeed(settings: RunSettings, ranks: Ranks) -> bool:
    """Whether the models are trained by DeepSpeed: on several ranks, or sharded."""
    return ranks.world_size > 1 or settings.engine.zero_stage > 0


def check_device(name: str, ranks: Ranks) -> torch.device:
    """The torch device of that name; auto is this rank's GPU, or the CPU where there is none.

    Raises ValueError for one that this machine does not have.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and torch.cuda.is_available():
        # Some launchers show each process its own GPU alone.
        name = f"cuda:{ranks.local_rank % torch.cuda.device_count()}"
    try:
        return torch.zeros(1, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {name!r} cannot be used: {error}") from error


def make_engine(module: Actor | Critic, lr: float, settings: RunSettings, ranks: Ranks) -> Engine:
    """The engine that trains an actor or a critic: without dropout, with gradient checkpointing if it is set."""
    engine = settings.engine
    disable_dropout(module)
    if engine.gradient_checkpointing:
        trunk = module.lm if isinstance(module, Actor) else module.backbone
        # Transformers 5.24 renamed it.
        enable = getattr(trunk, "activation_checkpointing_enable", None) or trunk.gradient_checkpointing_enable
        enable({"use_reentrant": False})
        # Transformers checkpoints in training mode only.
        trunk.train()
    common = {"lr": lr, "max_grad_norm": settings.ppo.max_grad_norm, "bf16": engine.bf16}
    if not needs_deepspeed(settings, ranks):
        return TorchEngine(module, **common)
    return DeepSpeedEngine(
        module,
        **common,
        zero_stage=engine.zero_stage,
        offload_optimizer=engine.offload_optimizer,
        gather_for_generation=engine.gather_for_generation,
        ranks=ranks,
    )


def score_statistics(
    reference: PreTrainedModel,
    reward: Reward,
    prompts: Sequence[Sequence[int]],
    pad_token_id: int,
    eos: list[int],
    ppo: PPOSettings,
    ranks: Ranks,
    n_answers: int = 256,
) -> tuple[float, float]:
    """Mean and standard deviation of the scores of the reference's answers: the units of scaled scores.

    Raises ValueError if all answers score the same.

    Book: §13.6.1
    Source: Ziegler et al. 2019, arXiv 1909.08593
    """
    uniforms = keyed_uniforms(ppo.seed, STATISTICS, range(n_answers), ppo.max_new_tokens)
    device = next(reference.parameters()).device
    scores = []
    for rows in ranks.share(torch.arange(n_answers)).clamp(min=0).split(ppo.score_batch_size):
        prompt_ids, prompt_mask = left_pad([prompts[row % len(prompts)] for row in rows.tolist()], pad_token_id)
        prompt_ids, prompt_mask = prompt_ids.to(device), prompt_mask.to(device)
        responses = generate(
            reference,
            prompt_ids,
            prompt_mask,
            max_new_tokens=ppo.max_new_tokens,
            eos_token_ids=eos,
            uniforms=uniforms[rows].to(device),
            temperature=ppo.temperature,
        )
        scores.append(reward(prompt_ids, prompt_mask, responses.ids, responses.mask))
    scores = ranks.gather_rows(torch.cat(scores), n_answers)
    mean, std = float(scores.mean()), float(masked_var(scores).sqrt())
    if not math.isfinite(std):
        raise ValueError(f"scale_rewards needs scores of ordinary size, those of the reference have the mean {mean:g}")
    if not std > 0:
        raise ValueError(f"scale_rewards needs scores that differ: all answers of the reference got {mean:g}")
    return mean, std


def first_critic(lm: PreTrainedModel, reward: Reward, settings: RunSettings, mean: float, std: float) -> Critic | None:
    """The critic before training: a copy of the reward model or of the actor. None on the actor's trunk or without one.

    mean, std: the units of the scores, which a critic from the reward model takes over; from a sum it begins with the
    model's part of it, (w r − mean)/std. Raises ValueError if the reward has not exactly one model, with a positive
    weight, or if that reads other tokens than the actor's.
    """
    if settings.model.critic == "shared" or not settings.ppo.with_critic:
        return None
    if settings.model.critic == "actor":
        return make_critic(lm)
    models = [(model, weight) for model, weight in reward_models(reward) if model.same_tokens and weight > 0]
    if len(models) != 1 or len(reward_models(reward)) != 1:
        raise ValueError(
            "critic must be actor or shared with this reward: a critic from the reward model needs exactly one, with a "
            "positive weight, that reads the actor's tokens"
        )
    model, weight = models[0]
    return make_critic(model.model, mean=mean / weight, std=std / weight)


def stop_token_id(tokenizer: PreTrainedTokenizerBase, token: str | None) -> list[int]:
    """The id of a further token that ends an answer. Raises ValueError for one the tokenizer does not know."""
    if token is None:
        return []
    known = tokenizer.get_vocab()
    if token not in known:
        raise ValueError(f"stop_token must be a token of the tokenizer, got {token!r}")
    return [known[token]]
