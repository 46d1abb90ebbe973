"""Supervised fine-tuning: a small language model of our own that reads the reviews, the policy that PPO starts from."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

N_HEADS = 4
MAX_LENGTH = 64


def sft_loss(logits: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    """Mean negative log-likelihood of the tokens that count:  L = −(1/n) Σ_t log π(a_t | s_t).

    logits [B, T, V], of all positions; ids [B, T] token ids; mask [B, T] True = counts. Position t − 1 predicts token
    t; the first token is predicted by nothing and never counts. Returns a scalar in nats.
    Raises ValueError for shapes that do not fit.

    Book: §13.5.1
    """
    if logits.dim() != 3 or logits.shape[:2] != ids.shape or mask.shape != ids.shape:
        shapes = f"logits {tuple(logits.shape)}, ids {tuple(ids.shape)}, mask {tuple(mask.shape)}"
        raise ValueError(f"logits must be [B, T, V], ids and mask [B, T], got {shapes}")
    targets = ids[:, 1:].masked_fill(~mask[:, 1:].bool(), -100)
    return F.cross_entropy(logits[:, :-1].float().flatten(0, 1), targets.flatten())


def train_sft(
    texts: list[str],
    tokenizer: PreTrainedTokenizerFast,
    *,
    seed: int = 0,
    hidden_size: int = 64,
    n_layers: int = 2,
    epochs: int = 15,
    batch_size: int = 64,
    lr: float = 5e-3,
) -> LlamaForCausalLM:
    """A Llama trained from scratch to write such texts: <bos> + text + <eos>, every token counts.

    AdamW with a cosine schedule over `epochs` passes. Embeddings and output layer are tied. The same seed gives the
    same model on one machine. Returns it in evaluation mode. Raises ValueError for no texts.
    """
    if not texts:
        raise ValueError("texts must hold at least one text, got none")
    generator = torch.Generator().manual_seed(seed)
    model = _new_model(tokenizer, seed, hidden_size, n_layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.01)
    n_steps = epochs * math.ceil(len(texts) / batch_size)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, n_steps)
    model.train()
    for _ in range(epochs):
        for rows in torch.randperm(len(texts), generator=generator).split(batch_size):
            ids, mask = encode([f"{texts[row]} {tokenizer.eos_token}" for row in rows], tokenizer)
            loss = sft_loss(model(ids, attention_mask=mask).logits, ids, mask)
            optimizer.zero_grad()
            loss.backward()
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
    return model.eval()


def encode(texts: list[str], tokenizer: PreTrainedTokenizerFast) -> tuple[Tensor, Tensor]:
    """Token ids [B, T] of texts and their mask [B, T], True at real tokens; padded on the right."""
    batch = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
    return batch.input_ids, batch.attention_mask.bool()


def _new_model(tokenizer: PreTrainedTokenizerFast, seed: int, hidden_size: int, n_layers: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=5 * hidden_size // 2,
        num_hidden_layers=n_layers,
        num_attention_heads=N_HEADS,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    # The initialisation draws from the global generator; the caller's stays as it was.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)
