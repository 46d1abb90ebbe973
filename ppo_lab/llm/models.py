"""Actor, reference and critic, built from any Hugging Face checkpoint; the reward has a module of its own."""

import copy
import sys
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from ppo_lab.llm.generate import accepted_arguments, padding_arguments
from ppo_lab.llm.ranks import notice
from ppo_lab.llm.tokens import position_ids


class Actor(nn.Module):
    """A causal language model seen as a policy over the next token, if asked with a value head on the same trunk.

    π(y_t|s_t) = softmax of the logits at the position before y_t; V(s_t) = the head at that position.

    lm: a causal language model of Transformers; value_head: whether the critic shares its trunk.

    Book: §13.5.1; §13.7
    Source: Ziegler et al. 2019, arXiv 1909.08593 (the shared trunk)
    """

    def __init__(self, lm: PreTrainedModel, *, value_head: bool = False):
        super().__init__()
        self.lm = lm
        self.value_head = make_value_head(lm) if value_head else None

    def forward(self, input_ids: Tensor, attention_mask: Tensor, n_response: int) -> tuple[Tensor, Tensor | None]:
        """Logits that predict the last n_response tokens, and the values of the states around them.

        input_ids, attention_mask [B, P + T], n_response T. Returns logits [B, T, V], of the states before the tokens,
        and values [B, T + 1], of the same states and the one after the last token, or None without a value head. Only
        these positions pass the output layer.
        """
        length = input_ids.shape[1]
        before = torch.arange(length - n_response - 1, length - 1, device=input_ids.device)
        with_values = self.value_head is not None
        output = call(
            self.lm,
            input_ids,
            attention_mask,
            required={"use_cache": False, "output_hidden_states": with_values},
            accepted={"logits_to_keep": before},
        )
        logits = output.logits
        if logits.shape[1] == length:
            logits = logits[:, before]
        if not with_values:
            return logits, None
        return logits, self.value_head(output.hidden_states[-1][:, -n_response - 1 :])


class Critic(nn.Module):
    """A transformer with a scalar head: the value of the state at each position of a response.

    backbone: a model of Transformers without its head; head: a linear layer to one number.

    Book: §13.5.1
    Source: Ouyang et al. 2022, arXiv 2203.02155 (started from the reward model)
    """

    def __init__(self, backbone: PreTrainedModel, head: "ValueHead"):
        super().__init__()
        self.backbone = backbone
        self.head = head

    def forward(self, input_ids: Tensor, attention_mask: Tensor, n_response: int) -> Tensor:
        """Values [B, T + 1] of the states before the last n_response = T tokens and of the one after them."""
        output = call(self.backbone, input_ids, attention_mask, required={"use_cache": False})
        return self.head(output.last_hidden_state[:, -n_response - 1 :])


def call(
    model: nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor,
    *,
    required: dict[str, Any],
    accepted: dict[str, Any] | None = None,
) -> Any:
    """One forward pass with positions counted from each row's first real token, if the model takes positions.

    required keyword arguments are always passed, accepted ones if the model's forward names them.
    """
    known = accepted_arguments(type(model))
    optional = {**padding_arguments(attention_mask, position_ids(attention_mask)), **(accepted or {})}
    return model(
        input_ids=input_ids,
        **required,
        **{name: value for name, value in optional.items() if name in known},
    )


class ValueHead(nn.Linear):
    """A linear layer to one number, computed in float32 whatever the model's precision: [..., H] → [...].

    A TD error is a small difference of two values, and bfloat16 has steps of 0.004 near 1.
    """

    def forward(self, hidden: Tensor) -> Tensor:
        """The value of each hidden state."""
        return in_float32(self, hidden).squeeze(-1)


def in_float32(layer: nn.Linear, hidden: Tensor) -> Tensor:
    """A linear layer in float32, also within autocast and with weights in bfloat16."""
    bias = None if layer.bias is None else layer.bias.float()
    with torch.autocast(hidden.device.type, enabled=False):
        return functional.linear(hidden.float(), layer.weight.float(), bias)


def make_value_head(model: PreTrainedModel) -> ValueHead:
    """A linear layer from the hidden size to one number that begins at 0: a critic that knows nothing yet."""
    head = ValueHead(model.config.get_text_config().hidden_size, 1)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


def make_reference(lm: PreTrainedModel) -> Actor:
    """A frozen copy of the language model, with storage of its own: π_ref."""
    reference = Actor(copy.deepcopy(lm))
    reference.requires_grad_(False)
    return reference.eval()


def make_critic(source: PreTrainedModel, *, mean: float = 0.0, std: float = 1.0) -> Critic:
    """A critic from the reward model, or from a language model with a head that begins at 0.

    From a reward model its first values are (r − mean)/std: the scores in the units the trainer has rescaled them to.

    Raises ValueError for a classifier without a linear `score` head and for an std that is not positive.
    """
    if not std > 0:
        raise ValueError(f"std must be positive, got {std}")
    backbone = copy.deepcopy(source.base_model)
    head = make_value_head(source)
    if hasattr(source, "score"):
        if not isinstance(source.score, nn.Linear):
            raise ValueError(f"the score head must be one linear layer, got {type(source.score).__name__}")
        bias = 0.0 if source.score.bias is None else float(source.score.bias)
        head.weight.data.copy_(source.score.weight.detach() / std)
        head.bias.data.fill_((bias - mean) / std)
    elif getattr(source, "classifier", None) is not None:
        raise ValueError(f"{type(source).__name__} has no linear `score` head: start the critic from the actor")
    critic = Critic(backbone, head.to(source.dtype))
    return critic.requires_grad_(True)


def disable_dropout(module: nn.Module) -> None:
    """Turn off every dropout: with it the ratio of an unchanged policy would not be 1.

    Modes stay as they are, because gradient checkpointing of Transformers works in training mode only.
    """
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        for name, value in vars(part).items():
            if "dropout" in name and isinstance(value, float):
                setattr(part, name, 0.0)


def texts(tokenizer: PreTrainedTokenizerBase, ids: Tensor, mask: Tensor) -> list[str]:
    """The text of each row, of the tokens that count, without special tokens."""
    return [tokenizer.decode(row[keep], skip_special_tokens=True) for row, keep in zip(ids, mask, strict=True)]


def load_tokenizer(path: str | Path, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """A tokenizer that can pad: without a pad token of its own it uses EOS, and says so once on stderr.

    That is safe here, for every mask comes from lengths and never from a comparison with the pad id.
    Raises ValueError for a tokenizer without an EOS token.
    """
    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    if tokenizer.eos_token_id is None:
        raise ValueError(f"the tokenizer of {path} has no EOS token: an answer could never end")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
        notice(f"{path} has no pad token, padding with {tokenizer.eos_token}")
    return tokenizer


def quiet_loading() -> None:
    """Keep the progress bars of Transformers out of files and notebooks; a terminal has them."""
    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()


def load_language_model(path: str | Path, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """A causal language model in float32 from a folder or a hub name; safetensors only, nothing pickled.

    Raises ValueError like `load_whole`.
    """
    return load_whole(AutoModelForCausalLM, path, trust_remote_code=trust_remote_code)


def load_whole(kind: Any, path: str | Path, *, trust_remote_code: bool) -> PreTrainedModel:
    """A model of one of Transformers' Auto classes, in float32, with every weight read from the checkpoint.

    Raises ValueError for a file that is damaged, and for weights that are missing or of another shape: they would
    be random numbers.
    """
    quiet_loading()
    try:
        model, report = kind.from_pretrained(
            path,
            dtype=torch.float32,
            use_safetensors=True,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
        )
    except (safetensors.SafetensorError, RuntimeError) as error:
        raise ValueError(f"the weights of {path} are damaged or do not fit its config.json: {error}") from error
    if report["missing_keys"]:
        raise ValueError(f"{path} lacks the weights {', '.join(sorted(report['missing_keys'])[:3])}")
    return model


def eos_token_ids(tokenizer: PreTrainedTokenizerBase, lm: PreTrainedModel) -> list[int]:
    """Every id that ends an answer: the tokenizer's EOS first, then those of the model's generation settings."""
    configured = getattr(lm.generation_config, "eos_token_id", None)
    configured = configured if isinstance(configured, list) else [configured]
    return list(dict.fromkeys([tokenizer.eos_token_id, *(i for i in configured if i is not None)]))


def check_roles(actor: Actor, reference: Actor) -> None:
    """Raise ValueError if a parameter of the actor is frozen, or if actor and reference share storage.

    A shared tensor would keep the KL at 0 for ever, a frozen one would not learn.
    """
    frozen = [name for name, parameter in actor.named_parameters() if not parameter.requires_grad]
    if frozen:
        raise ValueError(f"every parameter of the actor must be trainable, frozen: {', '.join(frozen[:3])}")
    storages = {parameter.data_ptr() for parameter in actor.parameters()}
    shared = [name for name, parameter in reference.named_parameters() if parameter.data_ptr() in storages]
    if shared:
        raise ValueError(f"the reference must have storage of its own, shares {', '.join(shared[:3])} with the actor")
