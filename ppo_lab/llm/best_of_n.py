"""Best of n: no training at all, n answers to each prompt and the reward's favourite among them."""

from collections.abc import Sequence

import torch

from ppo_lab.llm.config import PPOSettings
from ppo_lab.llm.experience import Experience, collect, select
from ppo_lab.llm.ppo import check_finite
from ppo_lab.llm.roles import Roles


def best_of_n(
    prompts: Sequence[Sequence[int]], roles: Roles, settings: PPOSettings, n: int, iteration: int = 0
) -> tuple[Experience, int]:
    """Let the actor give n answers to each prompt and keep the one with the highest score.

    y = argmax_i r_φ(x, y_i),  y_1 … y_n ~ π(·|x)

    The baseline that every training has to beat: it needs the policy and the reward model, and pays for each answer
    that it keeps with n answers. Of equal scores the first drawn wins.

    prompts: B lists of token ids; settings: seed, max_new_tokens, temperature and score_batch_size; n ≥ 1; iteration
    picks the sampling noise. All B·n answers are generated in one batch. Returns an Experience of B rows in the order
    of the prompts, and the number of generated tokens, those of the answers not kept included. log π in it is that of
    the policy which sampled, not of the best-of-n policy: `kl_per_response` does not see the selection, whose KL to the
    sampler is at most `ppo_lab.kl.best_of_n_kl(n)` nats. Raises ValueError for an n below 1,
    NonFiniteError for a score that is not finite.

    Book: §13.9
    Source: Stiennon et al. 2020, arXiv 2009.01325; Nakano et al. 2021, arXiv 2112.09332
    """
    if not isinstance(n, int) or n < 1:
        raise ValueError(f"n must be a whole number, at least 1, got {n}")
    repeated = [prompt for prompt in prompts for _ in range(n)]
    experience = collect(repeated, roles, settings, iteration)
    check_finite(experience)
    best = experience.scores.view(len(prompts), n).argmax(-1)
    rows = torch.arange(len(prompts), device=best.device) * n + best
    return select(experience, rows), int(experience.mask.sum())
