"""A task small enough to check by hand: six tokens, a Llama or GPT-2 of one layer, a reward that counts the word a."""

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from ppo_lab.llm.config import make_settings
from ppo_lab.llm.exact import tiny_language_model
from ppo_lab.llm.roles import assemble

WORDS = ("<bos>", "<eos>", "a", "b", "c", "d")
PROMPTS = [[0], [0, 2], [0, 3, 4], [0, 5, 2, 4]] * 2
SETTINGS = {
    "critic": "actor",
    "batch_size": 8,
    "max_new_tokens": 6,
    "iterations": 3,
    "minibatch_size": 8,
    "micro_batch_size": 8,
    "scale_rewards": False,
    "warmup_iterations": 0,
}


def count_a(prompt_ids, prompt_mask, response_ids, mask):
    """One point for each a (token 2) of the answer."""
    return ((response_ids == 2) & mask).sum(-1).float()


@pytest.fixture
def tokenizer():
    model = WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<bos>")
    backend = Tokenizer(model)
    backend.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>", pad_token="<eos>", unk_token="<bos>"
    )


@pytest.fixture
def small(tokenizer):
    """A function (changes of the settings) → roles, prompts, PPO settings of the small task."""

    def make(lm=None, reward=count_a, **changes):
        settings = make_settings({**SETTINGS, **changes})
        lm = tiny_language_model(len(WORDS)) if lm is None else lm
        return assemble(lm, reward, tokenizer, PROMPTS, settings), PROMPTS, settings.ppo

    return make


@pytest.fixture
def shake():
    """A function (module, size) that moves every parameter a little, so that no two models agree by accident."""

    def move(module, size=0.1, seed=1):
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(size * torch.randn(parameter.shape, generator=generator))

    return move
