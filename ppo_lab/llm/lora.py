"""Low-rank adapters: train a small addition to each weight matrix, and read the reference with the additions off."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ppo_lab.llm.models import Actor


def add_adapters(model: PreTrainedModel, rank: int, alpha: int, seed: int) -> None:
    """Freeze a model and give each linear layer but the output a trainable W + (alpha/rank)·B·A, with B = 0 at first.

    rank: of A and B. Raises ValueError when the package peft is not installed, and for a model without linear layers.

    Book: §13.6.8
    Source: Hu et al. 2021, arXiv 2106.09685
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ValueError(f"lora_rank needs the package peft: pip install peft ({error})") from error
    if not linear_layers(model):
        raise ValueError(f"lora_rank needs a model of linear layers, {type(model).__name__} has none of torch's")
    # A is drawn from the global generator; the caller's stays as it was, and all ranks draw the same.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=0.0, target_modules=linear_layers(model))
        inject_adapter_in_model(config, model)


def linear_layers(model: PreTrainedModel) -> list[str]:
    """The names of all linear layers but the output layer."""
    output = model.get_output_embeddings()
    return [name for name, part in model.named_modules() if isinstance(part, nn.Linear) and part is not output]


def switch_adapters(model: nn.Module, on: bool) -> None:
    """Let the adapters of a model act, or pass by them."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for layer in model.modules():
        if isinstance(layer, BaseTunerLayer):
            layer.enable_adapters(on)


class AdaptersOff(nn.Module):
    """The reference of an actor with adapters: the same model without them, so that no second one is kept."""

    def __init__(self, actor: Actor):
        super().__init__()
        self.actor = actor

    def forward(self, *inputs: Any) -> tuple[Tensor, None]:
        """Logits of the frozen weights, as `Actor` returns them."""
        switch_adapters(self.actor.lm, False)
        try:
            logits, _ = self.actor(*inputs)
        finally:
            switch_adapters(self.actor.lm, True)
        return logits, None


def merged(model: PreTrainedModel) -> PreTrainedModel:
    """A plain model with the weights of a model and its adapters together: W + (alpha/rank)·B·A.

    The model itself stays as it is. Raises ImportError without the package peft.
    """
    from peft.tuners.lora import LoraLayer

    weights = {
        name.replace(".base_layer", ""): tensor.detach().clone()
        for name, tensor in model.state_dict().items()
        if ".lora_" not in name
    }
    for name, layer in model.named_modules():
        if isinstance(layer, LoraLayer):
            for adapter in layer.active_adapters:
                weights[f"{name}.weight"] += layer.get_delta_weight(adapter).to(weights[f"{name}.weight"])
    plain = type(model)(model.config).to(model.dtype)
    plain.load_state_dict(weights)
    plain.generation_config = model.generation_config
    return plain
