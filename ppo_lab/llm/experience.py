"""Experience of one iteration: what was asked and answered, and what every role says about it.

generate → score → token rewards → advantages, each a function over one small dataclass of tensors.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedTokenizerBase

from ppo_lab.gae import gae
from ppo_lab.group_advantages import (
    grpo_advantages,
    per_token,
    reinforce_pp_advantages,
    reinforce_pp_baseline_advantages,
    remax_advantages,
    rloo_advantages,
)
from ppo_lab.importance_sampling import importance_ratio
from ppo_lab.llm.config import PPOSettings
from ppo_lab.llm.generate import generate, keyed_uniforms
from ppo_lab.llm.models import texts
from ppo_lab.llm.ranks import Ranks
from ppo_lab.llm.roles import Roles
from ppo_lab.llm.tokens import is_finished, left_pad, next_token_values, token_logp, token_rewards
from ppo_lab.masking import hide
from ppo_lab.policy_gradient import reward_to_go
from ppo_lab.stability import clip_rewards, whiten


@dataclass
class Experience:
    """Prompts [B, P] padded on the left, responses [B, T] padded on the right, and the numbers of each token.

    mask: what counts in the response; finished [B]: the answer ended by itself; scores [B]: as the reward gave them.
    The rest is [B, T], index t being token y_t and the state before it; final_values [B]: V after the last token.
    sampler_logp is what the sampler computed, old_logp what the training pass does: the ratio is taken to the latter.
    rewards, advantages and returns are None until `estimate` has filled them. baseline_scores, baseline_lengths [B]:
    what the most probable answer to the same prompt scores, as the policy is rewarded with it, and its tokens; None
    unless advantage is remax.
    """

    prompt_ids: Tensor
    prompt_mask: Tensor
    response_ids: Tensor
    mask: Tensor
    finished: Tensor
    scores: Tensor
    sampler_logp: Tensor
    old_logp: Tensor
    ref_logp: Tensor
    values: Tensor
    final_values: Tensor
    baseline_scores: Tensor | None = None
    baseline_lengths: Tensor | None = None
    rewards: Tensor | None = None
    advantages: Tensor | None = None
    returns: Tensor | None = None

    def ids_and_mask(self) -> tuple[Tensor, Tensor]:
        """Prompt and response in one row [B, P + T], and what in it is real."""
        return (
            torch.cat([self.prompt_ids, self.response_ids], 1),
            torch.cat([self.prompt_mask, self.mask], 1),
        )


_PROMPT = ("prompt_ids", "prompt_mask")
_ROW = ("finished", "scores", "final_values", "baseline_scores", "baseline_lengths")


def select(experience: Experience, rows: Tensor) -> Experience:
    """Some rows, without the columns that are padding in all of them."""
    width = int(experience.prompt_mask[rows].sum(-1).max())
    length = int(experience.mask[rows].sum(-1).max())
    chosen = {}
    for item in fields(experience):
        tensor = getattr(experience, item.name)
        if tensor is not None:
            tensor = tensor[rows]
            if item.name in _PROMPT:
                tensor = tensor[:, -width:]
            elif item.name not in _ROW:
                tensor = tensor[:, :length]
        chosen[item.name] = tensor
    return Experience(**chosen)


def by_length(experience: Experience, rows: Tensor, size: int) -> list[Tensor]:
    """The rows in batches of at most `size`, neighbours in length together, so that little padding is computed."""
    if len(rows) <= size:
        return [rows]
    lengths = experience.mask[rows].sum(-1).cpu()
    return list(rows[lengths.argsort(stable=True)].split(size))


def collect(prompts: Sequence[Sequence[int]], roles: Roles, settings: PPOSettings, iteration: int) -> Experience:
    """Stage 1 of an iteration: the actor answers, the frozen roles and the critic read the answers.

    prompts: B lists of token ids. The answer to a prompt depends on the seed, the iteration and its place in the batch,
    not on its neighbours. Returns an Experience without advantages. Raises ValueError like `generate`.

    Book: §13.5.2
    Source: Ziegler et al. 2019, arXiv 1909.08593; Ouyang et al. 2022, arXiv 2203.02155
    """
    experience = answer(prompts, roles, settings, iteration)
    with roles.timed("score"):
        return gather(score(experience, roles, settings), roles.ranks, len(prompts))


def greedy_scores(prompts: Sequence[Sequence[int]], roles: Roles, settings: PPOSettings) -> tuple[Tensor, Tensor]:
    """What ReMax compares with: the most probable answer to each prompt, and how well the reward likes it.

    prompts: lists of token ids. Returns the scores, shaped like those of the sampled answers, and the lengths in
    tokens, [len(prompts)] both.

    Book: §13.9
    Source: Li et al. 2023, arXiv 2310.10505
    """
    experience = answer(prompts, roles, settings, None)
    with roles.timed("score"), torch.no_grad(), roles.actor.precision():
        scores = in_parts(
            experience,
            settings,
            lambda part: {"scores": roles.reward(part.prompt_ids, part.prompt_mask, part.response_ids, part.mask)},
        )
        experience = gather(replace(experience, **scores), roles.ranks, len(prompts))
    return shaped_scores(experience, roles, settings), experience.mask.sum(-1)


def answer(prompts: Sequence[Sequence[int]], roles: Roles, settings: PPOSettings, iteration: int | None) -> Experience:
    """This rank's share of the answers, unread: what the roles say about them is 0.

    iteration: which sampling noise; None for the most probable token each time.
    """
    own = roles.ranks.share(torch.arange(len(prompts))).clamp(min=0)
    padded = left_pad(prompts, roles.tokenizer.pad_token_id)
    prompt_ids, prompt_mask = (x[own].to(roles.actor.device) for x in padded)
    uniforms = None
    if iteration is not None:
        uniforms = keyed_uniforms(settings.seed, iteration, own.tolist(), settings.max_new_tokens)
        uniforms = uniforms.to(roles.actor.device)
    with roles.timed("generate"), roles.actor.whole_weights(for_generation=True) as actor, roles.actor.precision():
        responses = generate(
            actor.lm,
            prompt_ids,
            prompt_mask,
            max_new_tokens=settings.max_new_tokens,
            eos_token_ids=roles.eos_token_ids,
            uniforms=uniforms,
            temperature=settings.temperature,
            anyone=anyone_going_on(roles),
        )
    empty = torch.zeros_like(responses.logp)
    return Experience(
        prompt_ids,
        prompt_mask,
        responses.ids,
        responses.mask,
        is_finished(responses.ids, responses.mask, roles.eos_token_ids),
        scores=empty[:, 0],
        sampler_logp=responses.logp,
        old_logp=responses.logp,
        ref_logp=empty,
        values=empty,
        final_values=empty[:, 0],
    )


def anyone_going_on(roles: Roles) -> Callable[[bool], bool] | None:
    """For a generation whose every step needs all ranks: whether one of them still has an unfinished answer."""
    if not roles.actor.steps_together:
        return None
    return lambda mine: bool(roles.ranks.largest(int(mine), roles.actor.device))


def gather(experience: Experience, ranks: Ranks, n_rows: int) -> Experience:
    """The answers of all ranks, on every rank, in the order of the prompts.

    From here on all ranks hold the same numbers: whitening, the KL and every mean over the batch are global.
    """
    length = ranks.largest(experience.mask.shape[1], experience.mask.device)
    whole = {}
    for item in fields(experience):
        tensor = getattr(experience, item.name)
        if tensor is not None:
            if item.name not in (*_PROMPT, *_ROW):
                tensor = functional.pad(tensor, (0, length - tensor.shape[1]))
            tensor = ranks.gather_rows(tensor, n_rows)
        whole[item.name] = tensor
    return Experience(**whole)


@torch.no_grad()
def score(experience: Experience, roles: Roles, settings: PPOSettings) -> Experience:
    """Let reference, reward and critic read the answers; returns the experience with their numbers.

    In float32 the sampler's own log-probabilities are those of the actor's forward pass to within 1e-5 and are kept. In
    bfloat16 they are computed again by the pass that training uses: the ratio must compare like with like.
    """
    actor, critic = roles.actor, roles.critic

    def logp_of(logits: Tensor, part: Experience) -> Tensor:
        return token_logp(logits, part.response_ids, temperature=settings.temperature)

    def read(part: Experience) -> dict[str, Tensor]:
        ids, real = part.ids_and_mask()
        length = part.response_ids.shape[1]
        with actor.precision():
            found = {"scores": roles.reward(part.prompt_ids, part.prompt_mask, part.response_ids, part.mask)}
            found["ref_logp"] = logp_of(roles.reference(ids, real, length)[0], part)
        if (critic is None and settings.with_critic) or actor.bf16:
            logits, values = actor(ids, real, length)
            found["old_logp"] = logp_of(logits, part)
            del logits
        if not settings.with_critic:
            return found
        if critic is not None:
            values = critic(ids, real, length)
        lengths = part.mask.sum(-1, keepdim=True)
        return {**found, "values": values[:, :-1], "final_values": values.gather(1, lengths).squeeze(1)}

    numbers = in_parts(experience, settings, read)
    numbers = {name: hide(x, experience.mask) if x.dim() == 2 else x for name, x in numbers.items()}
    return replace(experience, **numbers)


def in_parts(
    experience: Experience, settings: PPOSettings, read: Callable[[Experience], dict[str, Tensor]]
) -> dict[str, Tensor]:
    """What `read` says of each part of the answers, put together: tensors [B] or [B, T] by name, 0 where padded."""
    numbers: dict[str, Tensor] = {}
    for rows in by_length(experience, torch.arange(len(experience.mask)), settings.score_batch_size):
        for name, part in read(select(experience, rows)).items():
            whole = numbers.setdefault(name, torch.zeros_like(getattr(experience, name)))
            # A part can have fewer columns than the whole: what is left is padding and stays 0.
            columns = (rows,) if part.dim() == 1 else (rows, slice(part.shape[1]))
            whole[columns] = part.float()
    return numbers


def shaped_scores(experience: Experience, roles: Roles, settings: PPOSettings) -> Tensor:
    """Scores [B] as the policy is rewarded with them: scaled, clipped, whitened, as the settings say, in this order.

    (r − μ_ref)/σ_ref → clip(·, ±c) → whiten over the batch → minus the penalty for an answer without end.

    Book: §13.6.1
    Source: Ziegler et al. 2019, arXiv 1909.08593 (scaling by the reference); Stiennon et al. 2020, arXiv 2009.01325
    """
    scores = experience.scores
    if settings.scale_rewards:
        scores = (scores - roles.reward_mean) / roles.reward_std
    if settings.reward_clip is not None:
        scores = clip_rewards(scores, settings.reward_clip)
    if settings.whiten_scores:
        scores = whiten(scores)
    return scores - settings.missing_eos_penalty * (~experience.finished)


def estimate(experience: Experience, roles: Roles, settings: PPOSettings, kl_coef: float) -> Experience:
    """Token rewards, advantages and returns: all that the update needs beside the tokens.

    r_t from `token_rewards`; Â, R̂ = GAE(r, V); Â whitened over all tokens of the batch, R̂ not. An answer that the
    length limit cut is followed by value 0, as if it had ended; with bootstrap_truncated by the critic's value there.
    Any other advantage than gae: Â from `critic_free_advantages`, R̂ the reward still to come.

    Book: §13.5.3; §13.5.4; §13.9
    Source: Schulman et al. 2016, arXiv 1506.02438; Ziegler et al. 2019, arXiv 1909.08593
    """
    scores = shaped_scores(experience, roles, settings)
    mask, values = experience.mask, experience.values
    logp, ref_logp = experience.old_logp, experience.ref_logp
    rewards = token_rewards(scores, logp, ref_logp, mask, kl_coef, kind=settings.kl_kind)
    if settings.whiten_rewards:
        rewards = whiten(rewards, mask, shift_mean=False)
    if settings.with_critic:
        final_values = hide(experience.final_values, ~experience.finished) if settings.bootstrap_truncated else None
        next_values = next_token_values(values, mask, final_values)
        advantages, returns = gae(
            rewards, values, next_values, gamma=settings.gamma, gae_lambda=settings.gae_lambda, mask=mask
        )
        if settings.whiten_advantages:
            advantages = whiten(advantages, mask)
    else:
        advantages = critic_free_advantages(rewards, experience, settings)
        returns = reward_to_go(rewards, settings.gamma, mask=mask)
    if settings.sampler_correction is not None:
        advantages = advantages * sampler_weights(experience, settings.sampler_correction)
    return replace(experience, rewards=rewards, advantages=advantages, returns=returns)


def critic_free_advantages(rewards: Tensor, experience: Experience, settings: PPOSettings) -> Tensor:
    """Advantages [B, T] from rewards alone, of the kind that the settings name.

    rewards [B, T]: of the tokens, the price of the KL in them. The kinds that compare a group of answers take the sum
    over the answer: with kl_coef 0 and a kl_loss_coef that is the score, as GRPO's paper has it. The rows of a group
    are neighbours, and every rank holds all of them, so neither micro-batches nor ranks can split a group.

    Book: §13.9
    Source: Shao et al. 2024, arXiv 2402.03300 (GRPO); Ahmadian et al. 2024, arXiv 2402.14740 (RLOO)
    """
    mask, kind = experience.mask, settings.advantage
    if kind == "remax":
        return remax_advantages(rewards, experience.baseline_scores, mask, gamma=settings.gamma)
    if kind == "reinforce++":
        return reinforce_pp_advantages(rewards, mask, gamma=settings.gamma)
    totals, group_index = rewards.sum(-1), groups(experience, settings)
    if kind == "reinforce++-baseline":
        return reinforce_pp_baseline_advantages(totals, group_index, mask)
    if kind == "rloo":
        return per_token(rloo_advantages(totals, group_index), mask)
    return per_token(grpo_advantages(totals, group_index, divide_by_std=kind == "grpo"), mask)


def groups(experience: Experience, settings: PPOSettings) -> Tensor:
    """Which answers belong together [B]: neighbours, group_size of them."""
    return torch.arange(len(experience.mask), device=experience.mask.device) // settings.group_size


def unwhitened_advantages(experience: Experience, settings: PPOSettings) -> Tensor:
    """The advantages [B, T] of an estimated experience before any whitening, for the record of their spread."""
    if settings.with_critic or settings.advantage == "reinforce++":
        # Without a critic the values are 0.
        return experience.returns - experience.values
    if settings.advantage == "reinforce++-baseline":
        above_mean = grpo_advantages(experience.rewards.sum(-1), groups(experience, settings), divide_by_std=False)
        return per_token(above_mean, experience.mask)
    return experience.advantages


def sampler_weights(experience: Experience, cap: float) -> Tensor:
    """Weights that make up for a sampler which is not quite the policy: min(π_old/π_sampler, cap), of each token.

    Another engine, or another precision, draws from a slightly different distribution than the training pass computes.
    Returns [B, T], 1 where masked.

    Book: §13.6.8
    Source: Espeholt et al. 2018, arXiv 1802.01561 (truncated importance weights)
    """
    return importance_ratio(experience.old_logp, experience.sampler_logp, experience.mask).clamp(max=cap)


def answers(experience: Experience, tokenizer: PreTrainedTokenizerBase) -> tuple[list[str], list[str]]:
    """Prompts and responses as text."""
    return (
        texts(tokenizer, experience.prompt_ids, experience.prompt_mask),
        texts(tokenizer, experience.response_ids, experience.mask),
    )
