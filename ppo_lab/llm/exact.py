"""A language model so small that all its answers can be listed: the exact optimum that LLM-PPO is held against.

With one prompt, an answer is one arm of a bandit: R answers, each with a probability and a score. Sums over the list
take the place of samples. Everything is in log space and in nats; axis R runs over the answers, T over the tokens.
"""

from collections.abc import Callable
from string import ascii_lowercase
from typing import NamedTuple

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from ppo_lab.masking import as_float, as_mask, check_positive, check_same_shape, hide

MAX_RESPONSES = 100_000
# The list of pairs is the square of the list of answers.
MAX_COMPARED = 1_000


class Responses(NamedTuple):
    """All answers that can be given, one per row. Behind its EOS an answer is filled with EOS, which does not count."""

    ids: Tensor  # [R, T] int64
    mask: Tensor  # [R, T] bool, True up to and including the EOS


def enumerate_responses(n_tokens: int, eos_token_id: int, max_length: int) -> Responses:
    """Every answer over a vocabulary of n_tokens: those that end with their first EOS, and those cut at max_length.

        R = Σ_{t=1}^{T} (n − 1)^{t−1} + (n − 1)^T        n = n_tokens, T = max_length; the last term has no EOS

    Shorter answers come first, those of one length in the order of their ids, those without EOS last. Returns ids
    [R, T] int64 and mask [R, T] bool, T = max_length. Any token but EOS may stand anywhere, BOS too: a model may sample
    it. Raises ValueError for n_tokens below 2, an eos_token_id outside the vocabulary, max_length below 1, and for more
    than 100,000 answers.

    Book: §13.5.3
    Source: Ziegler et al. 2019, arXiv 1909.08593
    """
    if n_tokens < 2:
        raise ValueError(f"n_tokens must be at least 2, EOS and one word, got {n_tokens}")
    if not 0 <= eos_token_id < n_tokens:
        raise ValueError(f"eos_token_id must be one of the n_tokens {n_tokens} ids from 0, got {eos_token_id}")
    if max_length < 1:
        raise ValueError(f"max_length must be at least 1, got {max_length}")
    n_responses = sum((n_tokens - 1) ** t for t in range(max_length)) + (n_tokens - 1) ** max_length
    if n_responses > MAX_RESPONSES:
        raise ValueError(
            f"max_length {max_length} with n_tokens {n_tokens} gives {n_responses} answers, too many to list"
        )
    words = torch.tensor([token for token in range(n_tokens) if token != eos_token_id])
    going_on = torch.empty(1, 0, dtype=torch.int64)
    ids, lengths = [], []
    for t in range(max_length):
        ids.append(_fill(going_on, eos_token_id, max_length))
        lengths += [t + 1] * len(going_on)
        going_on = torch.cat([going_on.repeat_interleave(len(words), 0), words.repeat(len(going_on))[:, None]], -1)
    ids.append(going_on)
    lengths += [max_length] * len(going_on)
    return Responses(torch.cat(ids), torch.arange(max_length) < torch.tensor(lengths)[:, None])


def response_logp(model: PreTrainedModel, prompt_ids: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    """The log-probability of each answer to one prompt: log π(y|x) = Σ_t log π(y_t | x, y_<t).

    model: any causal language model, without dropout or in eval mode. prompt_ids [P], ids [R, T], mask [R, T] bool as
    from enumerate_responses. One forward for all answers; differentiable. Returns [R] in nats, float32 also for half
    precision; over all answers exp sums to 1. Sampling at temperature 1, all tokens allowed. Raises ValueError for a
    prompt that is not one row of ids or is empty, and for ids and mask of different shapes.

    Book: §13.5.3
    Source: Ziegler et al. 2019, arXiv 1909.08593
    """
    if prompt_ids.ndim != 1 or not len(prompt_ids):
        raise ValueError(
            f"prompt_ids must be one prompt [P] of at least one token, got shape {tuple(prompt_ids.shape)}"
        )
    if ids.ndim != 2:
        raise ValueError(f"ids must have shape [R, T], got {tuple(ids.shape)}")
    mask = as_mask(mask, ids)
    prompts = prompt_ids.expand(len(ids), -1)
    input_ids = torch.cat([prompts, ids], -1)
    attention_mask = torch.cat([torch.ones_like(prompts), mask.long()], -1)
    logits = model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits
    # The logits at a position speak about the next token; those at the last token speak about nothing in the answer.
    logp = as_float(logits[:, len(prompt_ids) - 1 : -1]).log_softmax(-1)
    return hide(logp.gather(-1, ids[..., None]).squeeze(-1), mask).sum(-1)


def optimal_policy(ref_logp: Tensor, scores: Tensor, kl_coef: float) -> Tensor:
    """The policy with the highest objective: π*(y) = π_ref(y)·exp(r(y)/β) / Z,  Z = Σ_y π_ref(y)·exp(r(y)/β).

    ref_logp [R]: log π_ref over all answers. scores [R]: r. kl_coef: β. Returns log π* [R]. A large β leaves the
    reference as it is, a small one puts everything on the best answer that the reference can give. Raises ValueError
    for β not above 0 (the optimum would no longer depend on the reference), scores that are not finite, different
    shapes, and probabilities that do not sum to 1.

    Book: §13.5.3
    Source: Korbak et al. 2022, arXiv 2205.11275; Rafailov et al. 2023, arXiv 2305.18290, eq. 4
    """
    _check_problem(ref_logp, scores, kl_coef)
    return (as_float(ref_logp) + as_float(scores) / kl_coef).log_softmax(-1)


def objective(logp: Tensor, ref_logp: Tensor, scores: Tensor, kl_coef: float) -> Tensor:
    """What LLM-PPO maximises, without sampling: J(π) = E_π[r] − β·KL(π ‖ π_ref), over all answers to one prompt.

        J(π) = β log Z − β·KL(π ‖ π*)        π*, Z: optimal_policy

    So J(π*) = β log Z, and every other policy lies below it by β times its KL to π*. With γ = 1 the sum of the token
    rewards of §13.5.3 has this expectation. logp, ref_logp, scores [R]. Returns a scalar, differentiable in logp.
    Raises ValueError as optimal_policy does.

    Book: §13.5.3
    Source: Ziegler et al. 2019, arXiv 1909.08593; Korbak et al. 2022, arXiv 2205.11275
    """
    _check_problem(ref_logp, scores, kl_coef)
    check_same_shape(logp=logp, ref_logp=ref_logp)
    return (as_float(logp).exp() * as_float(scores)).sum() - kl_coef * exact_kl(logp, ref_logp)


def exact_kl(logp: Tensor, other_logp: Tensor) -> Tensor:
    """How far one policy is from another: KL(π ‖ π') = Σ_y π(y)·(log π(y) − log π'(y)), in nats per response.

    logp, other_logp [R] over all answers. Returns a scalar, differentiable in both. An answer with π(y) = 0 counts 0;
    one with π(y) > 0 and π'(y) = 0 makes it infinite. Raises ValueError for different shapes, and for probabilities
    that do not sum to 1: then the list of answers is not complete.

    Book: §13.5.3
    Source: Kullback & Leibler 1951
    """
    check_same_shape(logp=logp, other_logp=other_logp)
    _check_distribution(logp=logp, other_logp=other_logp)
    possible = logp > -torch.inf
    logp, other_logp = hide(as_float(logp), possible), hide(as_float(other_logp), possible)
    return (hide(logp.exp(), possible) * (logp - other_logp)).sum()


class PairPopulation(NamedTuple):
    """Every ordered pair of answers and how often it is seen, the first one preferred. The weights sum to ½."""

    chosen: Tensor  # [R²] int64, index of an answer
    rejected: Tensor  # [R²] int64
    weights: Tensor  # [R²]


def pair_population(ref_logp: Tensor, scores: Tensor) -> PairPopulation:
    """What infinitely many comparisons say: two answers of the reference, judged by Bradley and Terry.

        w(y, y') = π_ref(y)·π_ref(y')·σ(r(y) − r(y'))        y preferred to y'

    With these weights `dpo_loss` over all pairs is its expectation, and its minimum is π* of optimal_policy: the policy
    whose implicit reward is r up to a constant. ref_logp [R], scores [R]: r, in the units of the judge. Returns R²
    pairs. Raises ValueError as optimal_policy does, and for more than 1,000 answers.

    Book: §13.9
    Source: Bradley & Terry 1952; Rafailov et al. 2023, arXiv 2305.18290, section 4
    """
    _check_problem(ref_logp, scores, kl_coef=1.0)
    n_responses = len(ref_logp)
    if n_responses > MAX_COMPARED:
        raise ValueError(f"ref_logp must list at most {MAX_COMPARED} answers to compare all pairs, got {n_responses}")
    index = torch.arange(n_responses, device=ref_logp.device)
    chosen, rejected = index.repeat_interleave(n_responses), index.repeat(n_responses)
    logp, scores = as_float(ref_logp), as_float(scores)
    log_weights = logp[chosen] + logp[rejected] + logsigmoid(scores[chosen] - scores[rejected])
    return PairPopulation(chosen, rejected, log_weights.exp())


def fit_policy(loss: Callable[[Tensor], Tensor], start_logp: Tensor, *, n_steps: int = 200) -> Tensor:
    """The policy over all answers with the smallest loss, by gradients: one free logit per answer, L-BFGS.

    loss: log π [R] → scalar; start_logp [R]: where the search begins. Returns log π [R] in float64. No model and no
    sampling stand between the loss and its minimum, so what this finds is a property of the loss alone.

    Book: §13.9
    Source: Liu & Nocedal 1989 (L-BFGS)
    """
    logits = start_logp.detach().double().clone().requires_grad_()
    optimizer = torch.optim.LBFGS(
        [logits], max_iter=n_steps, tolerance_grad=1e-12, tolerance_change=1e-16, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss(logits.log_softmax(-1))
        value.backward()
        return value

    optimizer.step(closure)
    return logits.detach().log_softmax(-1)


def total_variation(logp: Tensor, other_logp: Tensor) -> Tensor:
    """How differently two policies answer, at most: TV = ½·Σ_y |π(y) − π'(y)|, between 0 and 1.

    logp, other_logp [R] over all answers. Returns a scalar. Raises ValueError as exact_kl does.

    Book: §13.3.1
    Source: none in particular
    """
    check_same_shape(logp=logp, other_logp=other_logp)
    _check_distribution(logp=logp, other_logp=other_logp)
    return 0.5 * (as_float(logp).exp() - as_float(other_logp).exp()).abs().sum()


def best_of_n_policy(logp: Tensor, scores: Tensor, n: int) -> Tensor:
    """The policy that draws n answers and keeps the one with the highest score, of equal scores the first drawn.

        π_n(y) = π(y)/P(S = r(y)) · (P(S ≤ r(y))^n − P(S < r(y))^n)        S: the score of one draw

    logp [R]: log π over all answers; scores [R]: r; n ≥ 1. Returns log π_n [R]. Its `exact_kl` to π is at most
    `ppo_lab.kl.best_of_n_kl(n)`. Raises ValueError for an n below 1 and as optimal_policy does.

    Book: §13.9
    Source: Beirami et al. 2024, arXiv 2401.01879
    """
    _check_problem(logp, scores, kl_coef=1.0)
    if n < 1:
        raise ValueError(f"n must be at least 1, got {n}")
    # In float64, for the two powers can be close.
    dtype, logp = logp.dtype, logp.double()
    levels, level = torch.unique(scores, return_inverse=True)
    mass = torch.zeros(len(levels), dtype=torch.float64, device=logp.device).index_add(0, level, logp.exp())
    up_to = mass.cumsum(0) / mass.sum()
    below = torch.cat([torch.zeros_like(up_to[:1]), up_to[:-1]])
    chosen = logp - mass.log()[level] + (up_to**n - below**n).log()[level]
    # An answer that is never drawn is never kept, and its level may have no mass.
    return chosen.masked_fill(logp == -torch.inf, -torch.inf).log_softmax(-1).to(dtype)


def tiny_language_model(n_tokens: int = 4, *, hidden_size: int = 16, seed: int = 0) -> LlamaForCausalLM:
    """A Llama of one layer whose answers can be listed, in eval mode: token 0 is BOS, 1 is EOS, the others are words.

    With 4 tokens there are 364 answers of at most 5 tokens, 1,093 of at most 6. The weights are drawn wide, so that the
    answers differ much in probability; a Llama has no dropout. No pad token is set. The same seed gives the same
    weights and leaves the global random state alone. Raises ValueError for n_tokens below 3 and a hidden_size that is
    not a multiple of 4.

    Book: §13.5.1
    Source: Touvron et al. 2023, arXiv 2302.13971
    """
    if n_tokens < 3:
        raise ValueError(f"n_tokens must be at least 3, BOS, EOS and one word, got {n_tokens}")
    if hidden_size < 4 or hidden_size % 4:
        raise ValueError(f"hidden_size must be a multiple of 4, for two heads of even size, got {hidden_size}")
    config = LlamaConfig(
        vocab_size=n_tokens,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=0,
        eos_token_id=1,
        initializer_range=0.3,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).eval()


def tiny_tokenizer(n_tokens: int = 4) -> PreTrainedTokenizerFast:
    """The tokenizer of tiny_language_model: token 0 is <bos>, 1 is <eos>, the others are the words a, b, c, …

    Encoding a text gives <bos> and one id a word, so the empty text is a prompt. Padding is EOS: the masks of ppo_lab
    come from positions, never from the pad id. Raises ValueError for n_tokens below 3 and above 28, where the letters
    end.

    Book: §13.5.1
    """
    if not 3 <= n_tokens <= 2 + len(ascii_lowercase):
        raise ValueError(f"n_tokens must lie between 3 and {2 + len(ascii_lowercase)}, got {n_tokens}")
    words = ("<bos>", "<eos>", *ascii_lowercase[: n_tokens - 2])
    tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<eos>", padding_side="left"
    )


def _fill(prefixes: Tensor, eos_token_id: int, max_length: int) -> Tensor:
    rows, t = prefixes.shape
    return torch.cat([prefixes, torch.full((rows, max_length - t), eos_token_id)], -1)


def _check_problem(ref_logp: Tensor, scores: Tensor, kl_coef: float) -> None:
    check_positive(kl_coef=kl_coef)
    check_same_shape(ref_logp=ref_logp, scores=scores)
    _check_distribution(ref_logp=ref_logp)
    if not bool(torch.isfinite(scores).all()):
        raise ValueError("scores must be finite")


def _check_distribution(**policies: Tensor) -> None:
    for name, logp in policies.items():
        if logp.ndim != 1:
            raise ValueError(f"{name} must have shape [R], one number per answer, got {tuple(logp.shape)}")
        total = as_float(logp.detach()).exp().sum().item()
        if not abs(total - 1) < 1e-3:
            raise ValueError(
                f"{name} must be the log-probabilities of all answers, which sum to 1, got a sum of {total:.4g}"
            )
