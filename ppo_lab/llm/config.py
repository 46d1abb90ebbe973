"""The settings of a run: models, data, PPO itself, the machine. Presets are YAML files in presets/."""

from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

import yaml

PRESETS = Path(__file__).parent / "presets"
CRITICS = ("reward", "actor", "shared")
KINDS = ("k1", "k2", "k3")
# Those that compare the answers to one prompt with each other, and all that do without a critic.
GROUPED = ("grpo", "dr-grpo", "rloo", "reinforce++-baseline")
CRITIC_FREE = (*GROUPED, "remax", "reinforce++")
ADVANTAGES = ("gae", *CRITIC_FREE)
LONG_PROMPTS = ("refuse", "cut")


def setting(default: Any, help: str) -> Any:
    """A field with the sentence that --help shows."""
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class ModelSettings:
    """Which checkpoints play the four roles."""

    actor: str = setting("models/sft", "language model to train: a folder, a hub name, or a name under data/")
    reward: str = setting("models/reward", "reward model, the same ways, or module:function; or a sum: A*0.5,B*2")
    critic: str = setting(
        "reward", "where the critic starts: " + ", ".join(CRITICS) + " (a value head on the actor); advantage gae only"
    )
    lora_rank: int = setting(0, "train adapters of this rank (package peft) instead of all weights; 0 for all weights")
    lora_alpha: int = setting(32, "scale of the adapters: alpha / rank")
    trust_remote_code: bool = setting(False, "run the Python code that a checkpoint brings")


@dataclass(frozen=True)
class DataSettings:
    """Which prompts are answered, and who judges the answers for the record."""

    prompts: str = setting("reviews/prompts.txt", ".txt or .jsonl file, or a data set: its folder or hub name")
    prompt_field: str = setting("prompt", "where .jsonl and data sets have the prompt; else it is read from messages")
    split: str = setting("train", "which part of a data set that has several")
    chat: bool = setting(False, "put a plain prompt into the chat template, as a user's message; messages always are")
    skip_bad_lines: bool = setting(False, "leave out lines without a prompt and count them, instead of stopping")
    eval_prompts: str | None = setting(None, "held-out prompts, given like prompts; none for no evaluation")
    judge: str | None = setting(None, "module:function that adds columns to the metrics; training never sees them")
    long_prompts: str = setting("refuse", "a prompt too long for the context: refuse, or cut it from the left")


@dataclass(frozen=True)
class PPOSettings:
    """All that the mathematics of a run depends on. Raises ValueError naming the field and what would be right.

    Book: §13.5; §13.6; §13.9
    """

    seed: int = setting(0, "fixes the prompts, the answers and the minibatches")
    iterations: int = setting(33, "rounds of generating, scoring and updating")
    batch_size: int = setting(128, "answers per iteration (B)")
    group_size: int = setting(1, "answers to each prompt; batch_size / group_size prompts are asked per iteration")
    max_new_tokens: int = setting(24, "longest answer, in tokens")
    temperature: float = setting(1.0, "τ of sampling; enters the log-probabilities of all roles")
    top_k: int = setting(0, "must stay 0: a truncated distribution is not the one that the ratio compares")
    top_p: float = setting(1.0, "must stay 1, as top_k")
    min_p: float = setting(0.0, "must stay 0, as top_k")
    stop_token: str | None = setting(None, "a further token that ends an answer; none for the EOS alone")
    missing_eos_penalty: float = setting(0.0, "taken off the score of an answer that the length limit cut")
    bootstrap_truncated: bool = setting(False, "continue a cut answer with the critic's value; no for 0")
    kl_coef: float = setting(0.1, "β, the price of a nat of KL to the reference")
    adaptive_kl: bool = setting(False, "move β towards target_kl")
    target_kl: float = setting(6.0, "nats per response that the adaptive β aims at")
    kl_horizon: float = setting(10_000.0, "responses in which the adaptive β changes by at most about 20 %")
    kl_kind: str = setting("k1", "estimator of the KL in the reward: " + ", ".join(KINDS))
    kl_loss_coef: float = setting(0.0, "weight of a KL term in the loss")
    kl_loss_kind: str = setting("k2", "estimator of that term; k2's gradient is that of KL(π ‖ ref)")
    refresh_reference_every: int = setting(0, "iterations between copies of the actor to the reference; 0 for never")
    scale_rewards: bool = setting(True, "measure scores in standard deviations from the reference's mean score")
    reward_clip: float | None = setting(5.0, "scores beyond ± this are cut; none for no limit")
    whiten_scores: bool = setting(False, "whiten the scores of a batch (§13.6.1)")
    whiten_rewards: bool = setting(False, "divide token rewards by their spread, mean kept, as TRL's option does")
    advantage: str = setting("gae", "gae, with a critic; without one: " + ", ".join(CRITIC_FREE))
    whiten_advantages: bool = setting(True, "whiten the advantages of a batch (§13.6.2); gae only")
    gamma: float = setting(1.0, "discount γ per token; must stay 1 where whole answers of a group are compared")
    gae_lambda: float = setting(0.95, "λ of GAE; gae only")
    k_epochs: int = setting(2, "passes over one batch (K)")
    minibatch_size: int = setting(64, "answers per gradient step")
    micro_batch_size: int = setting(64, "answers per backward pass: memory, not mathematics")
    score_batch_size: int = setting(128, "answers per forward pass without gradient: memory, not mathematics")
    eps_clip: float = setting(0.2, "clip range ε of the ratio")
    eps_clip_high: float | None = setting(None, "upper ε if it differs (clip-higher)")
    dual_clip: float | None = setting(None, "bound c > 1 on the loss of bad tokens; none for no bound")
    eps_clip_value: float | None = setting(0.2, "clip range of the values, in scaled rewards; none: no clip; gae only")
    value_coef: float = setting(1.0, "weight c_v of the value loss, which carries a factor ½ inside; gae only")
    entropy_coef: float = setting(0.0, "weight c_e of the entropy bonus")
    lr: float = setting(5e-4, "learning rate of the actor")
    critic_lr: float = setting(1e-3, "learning rate of a critic of its own; gae only")
    warmup_iterations: int = setting(5, "iterations in which the learning rates rise to their full size")
    critic_warmup: int = setting(0, "first iterations that train the critic alone")
    sampler_correction: float | None = setting(None, "cap of the weights that mend a sampler which differs; none: none")
    max_grad_norm: float = setting(1.0, "gradient norm above which a gradient is scaled down, of each model")
    stop_kl: float | None = setting(None, "end an update before a step whose approx_kl is above this; none for never")
    ratio_tolerance: float | None = setting(0.01, "largest |log ρ| before the first step (bf16: approx_kl); none: free")

    def __post_init__(self) -> None:
        check_ppo(self)

    @property
    def with_critic(self) -> bool:
        """Whether the advantage needs values, and so a critic."""
        return self.advantage == "gae"


@dataclass(frozen=True)
class EngineSettings:
    """How the machine computes it."""

    device: str = setting("auto", "torch device; auto is the GPU of this process, or the CPU where there is none")
    zero_stage: int = setting(0, "what DeepSpeed shards over the GPUs: 0 nothing, 1 optimizer, 2 gradients, 3 weights")
    offload_optimizer: bool = setting(False, "keep the optimizer's state in CPU memory (stages 1 to 3)")
    offload_reference: bool = setting(False, "keep the reference's weights in CPU memory (stage 3)")
    bf16: bool = setting(False, "compute in bfloat16; weights float32 (DeepSpeed: bfloat16 with a float32 copy)")
    gradient_checkpointing: bool = setting(False, "compute activations twice instead of keeping them")
    offload_reward: bool = setting(False, "keep the reward model in CPU memory and let it score there")
    gather_for_generation: bool = setting(True, "collect all weights on each GPU to generate (stage 3); no: per layer")
    threads: int = setting(1, "threads of torch on the CPU")
    checkpoint_every: int = setting(0, "iterations between two checkpoints; 0 for none")
    keep: int = setting(2, "newest checkpoints that are kept")
    eval_every: int = setting(0, "iterations between two evaluations on eval_prompts; 0 for none")
    sample_every: int = setting(8, "iterations between two tables of sampled answers; 0 for none")
    n_samples: int = setting(8, "answers in such a table")


@dataclass(frozen=True)
class RunSettings:
    """The four groups together."""

    model: ModelSettings = field(default_factory=ModelSettings)
    data: DataSettings = field(default_factory=DataSettings)
    ppo: PPOSettings = field(default_factory=PPOSettings)
    engine: EngineSettings = field(default_factory=EngineSettings)

    def __post_init__(self) -> None:
        if self.model.critic not in CRITICS:
            raise ValueError(f"critic must be one of {', '.join(CRITICS)}, got {self.model.critic!r}")
        if self.model.critic == "shared" and self.ppo.critic_warmup:
            raise ValueError("critic_warmup must be 0 with critic shared: its loss would move the actor's trunk too")
        if self.model.critic == "shared" and not self.ppo.with_critic:
            raise ValueError(f"critic must not be shared with advantage {self.ppo.advantage}, which has no critic")
        if self.data.long_prompts not in LONG_PROMPTS:
            raise ValueError(f"long_prompts must be one of {', '.join(LONG_PROMPTS)}, got {self.data.long_prompts!r}")
        check_engine(self)


def check_engine(settings: RunSettings) -> None:
    """Raise ValueError for the first setting of the machine that has no meaning, alone or together with others."""
    engine = settings.engine
    least = {"threads": 1, "sample_every": 0, "n_samples": 1, "checkpoint_every": 0, "keep": 1, "eval_every": 0}
    for name, number in least.items():
        if getattr(engine, name) < number:
            raise ValueError(f"{name} must be at least {number}, got {getattr(engine, name)}")
    if engine.threads > 1024:
        raise ValueError(f"threads must be at most 1024, got {engine.threads}")
    if engine.zero_stage not in (0, 1, 2, 3):
        raise ValueError(f"zero_stage must be 0, 1, 2 or 3, got {engine.zero_stage}")
    if engine.offload_optimizer and engine.zero_stage == 0:
        raise ValueError("offload_optimizer needs zero_stage 1, 2 or 3, got 0")
    if engine.offload_reference and engine.zero_stage != 3:
        raise ValueError(f"offload_reference needs zero_stage 3, got {engine.zero_stage}")
    if not 0 <= settings.model.lora_rank < 2**20 or not 1 <= settings.model.lora_alpha < 2**20:
        raise ValueError(
            f"lora_rank must be at least 0, lora_alpha at least 1, both below 2^20, got {settings.model.lora_rank} and "
            f"{settings.model.lora_alpha}"
        )
    if settings.model.lora_rank and settings.ppo.refresh_reference_every:
        raise ValueError(
            "refresh_reference_every must be 0 with lora_rank: the reference is the actor without adapters"
        )
    if engine.eval_every and settings.data.eval_prompts is None:
        raise ValueError("eval_every needs eval_prompts, got none")


def check_ranks(settings: RunSettings, world_size: int) -> None:
    """Raise ValueError for settings that do not go with a number of ranks."""
    for name in ("batch_size", "minibatch_size"):
        number = getattr(settings.ppo, name)
        if number < world_size:
            raise ValueError(f"{name} must be at least the number of ranks, got {number} for {world_size} ranks")
    if world_size > 1 and settings.engine.bf16 and settings.engine.zero_stage == 0:
        raise ValueError("bf16 on several ranks needs zero_stage 1, 2 or 3, got 0: DeepSpeed's stage 0 drifts")


_AT_LEAST_1 = ("iterations", "batch_size", "max_new_tokens", "k_epochs", "minibatch_size", "micro_batch_size")
_AT_LEAST_1 += ("score_batch_size", "group_size")
_AT_LEAST_0 = ("seed", "kl_coef", "kl_loss_coef", "missing_eos_penalty", "value_coef", "entropy_coef", "critic_warmup")
_AT_LEAST_0 += ("refresh_reference_every", "warmup_iterations")
_POSITIVE = ("temperature", "target_kl", "kl_horizon", "reward_clip", "eps_clip", "eps_clip_high", "eps_clip_value")
_POSITIVE += ("lr", "critic_lr", "max_grad_norm", "stop_kl", "ratio_tolerance", "sampler_correction")


def check_ppo(settings: PPOSettings) -> None:
    """Raise ValueError for the first setting that has no meaning."""

    def refuse(name: str, right: str) -> None:
        raise ValueError(f"{name} must be {right}, got {getattr(settings, name)!r}")

    for item in fields(settings):
        value = getattr(settings, item.name)
        if isinstance(value, float) and not abs(value) < 1e38:
            refuse(item.name, "a finite number below 1e38" + (", or none for no limit" if item.default is None else ""))
        if isinstance(value, int) and value >= 2**31:
            refuse(item.name, "below 2^31")
    for name in _AT_LEAST_1:
        if getattr(settings, name) < 1:
            refuse(name, "at least 1")
    for name in _AT_LEAST_0:
        if getattr(settings, name) < 0:
            refuse(name, "0 or more")
    for name in _POSITIVE:
        if getattr(settings, name) is not None and getattr(settings, name) <= 0:
            refuse(name, "positive")
    for name in ("gamma", "gae_lambda"):
        if not 0 <= getattr(settings, name) <= 1:
            refuse(name, "between 0 and 1")
    for name in ("kl_kind", "kl_loss_kind"):
        if getattr(settings, name) not in KINDS:
            refuse(name, "one of " + ", ".join(KINDS))
    if settings.dual_clip is not None and settings.dual_clip <= 1:
        refuse("dual_clip", "greater than 1")
    if settings.adaptive_kl and settings.kl_coef == 0:
        refuse("kl_coef", "positive with adaptive_kl: a β of 0 stays 0")
    check_advantage(settings)
    for name, off in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0)):
        if getattr(settings, name) != off:
            refuse(name, f"{off} in training: the ratio compares π_θ with π_old, and a truncated sampler is neither")


def check_advantage(settings: PPOSettings) -> None:
    """Raise ValueError for an unknown kind of advantage and for what does not go with it."""
    kind, size = settings.advantage, settings.group_size
    if kind not in ADVANTAGES:
        raise ValueError(f"advantage must be one of {', '.join(ADVANTAGES)}, got {kind!r}")
    if settings.batch_size % size:
        raise ValueError(f"batch_size must be a multiple of group_size {size}, got {settings.batch_size}")
    if kind in GROUPED and size < 2:
        raise ValueError(f"group_size must be at least 2 with advantage {kind}, got {size}: an answer needs others")
    if kind in GROUPED and settings.gamma != 1:
        raise ValueError(f"gamma must be 1 with advantage {kind}, which compares whole answers, got {settings.gamma}")
    if not settings.with_critic and settings.critic_warmup:
        raise ValueError(f"critic_warmup must be 0 with advantage {kind}, which has no critic")
    if not settings.with_critic and settings.bootstrap_truncated:
        raise ValueError(f"bootstrap_truncated must be no with advantage {kind}: there is no critic to continue with")
    for name in ("whiten_scores", "whiten_rewards"):
        if kind == "remax" and getattr(settings, name):
            raise ValueError(f"{name} must be no with advantage remax: the greedy answer's score has no such units")


def preset_names() -> list[str]:
    """The presets that come with the package."""
    return sorted(path.stem for path in PRESETS.glob("*.yaml"))


def load_preset(name: str) -> dict[str, Any]:
    """The settings of a preset, flat. Raises ValueError for a name that is none."""
    if name not in preset_names():
        raise ValueError(f"preset must be one of {', '.join(preset_names())}, got {name!r}")
    return yaml.safe_load((PRESETS / f"{name}.yaml").read_text(encoding="utf-8"))


def load_config(path: Path) -> dict[str, Any]:
    """The settings in a YAML file, flat. Raises ValueError naming the file for anything else."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no YAML file: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold settings as name: value, got {type(values).__name__}")
    return values


def all_fields() -> dict[str, tuple[str, Any, Any, str]]:
    """Every setting by name: its group, type, default and help."""
    listed = {}
    for group, kind in get_type_hints(RunSettings).items():
        kinds = get_type_hints(kind)
        listed |= {x.name: (group, kinds[x.name], x.default, x.metadata["help"]) for x in fields(kind)}
    return listed


def make_settings(values: dict[str, Any], *, source: str = "settings") -> RunSettings:
    """Settings from flat values; those not named keep their defaults.

    source: what the message calls the place where they come from. Raises ValueError for an unknown name, a value of
    another type, and like the settings themselves.
    """
    known = all_fields()
    groups: dict[str, dict[str, Any]] = {group: {} for group in get_type_hints(RunSettings)}
    for name, value in values.items():
        if name not in known:
            raise ValueError(f"{source}: unknown setting {name!r}")
        group, kind, _, _ = known[name]
        groups[group][name] = _converted(name, value, kind, source)
    kinds = get_type_hints(RunSettings)
    return RunSettings(**{group: kinds[group](**given) for group, given in groups.items()})


def _converted(name: str, value: Any, kind: Any, source: str) -> Any:
    kinds = get_args(kind) or (kind,)
    if float in kinds and type(value) is int:
        return float(value)
    if float in kinds and isinstance(value, str):
        # YAML reads 3e-4, without a point, as text.
        try:
            return float(value)
        except ValueError:
            pass
    if type(value) not in kinds:
        names = " or ".join("none" if k is type(None) else k.__name__ for k in kinds)
        raise ValueError(f"{source}: {name} must be {names}, got {value!r}")
    return value


def flat(settings: RunSettings) -> dict[str, Any]:
    """The settings as one flat dict, as `make_settings` takes them."""
    groups = [getattr(settings, x.name) for x in fields(settings)]
    return {x.name: getattr(group, x.name) for group in groups if is_dataclass(group) for x in fields(group)}
