"""Best of n: the favourite of every prompt is kept, all tokens are counted, and more answers score more."""

import math

import pytest
import torch

from ppo_lab.kl import best_of_n_kl
from ppo_lab.llm.best_of_n import best_of_n
from ppo_lab.llm.experience import answers, collect
from ppo_lab.llm.ppo import NonFiniteError, judged_columns


def test_every_prompt_keeps_the_answer_with_the_highest_score(small):
    roles, prompts, ppo = small()
    best, generated = best_of_n(prompts, roles, ppo, 5, iteration=3)
    everything = collect([ids for ids in prompts for _ in range(5)], roles, ppo, 3)
    assert len(best.mask) == len(prompts) == 8
    assert answers(best, roles.tokenizer)[0] == answers(collect(prompts, roles, ppo, 0), roles.tokenizer)[0]
    for i in range(8):
        mine = everything.scores[5 * i : 5 * i + 5].tolist()
        row = 5 * i + mine.index(max(mine))
        assert best.scores[i].item() == max(mine)
        length = int(best.mask[i].sum())
        assert best.response_ids[i, :length].tolist() == everything.response_ids[row, :length].tolist()
        assert length == int(everything.mask[row].sum())
    assert generated == int(everything.mask.sum()) > int(best.mask.sum())


def test_best_of_one_is_the_policy(small):
    roles, prompts, ppo = small()
    best, generated = best_of_n(prompts, roles, ppo, 1)
    plain = collect(prompts, roles, ppo, 0)
    assert torch.equal(best.response_ids, plain.response_ids)
    assert torch.equal(best.scores, plain.scores)
    assert generated == int(plain.mask.sum())


def test_more_answers_score_more_and_cost_more(small):
    roles, prompts, ppo = small()
    runs = [best_of_n(prompts * 8, roles, ppo, n) for n in (1, 4, 16)]
    scores = [judged_columns(experience, roles, None)["score"] for experience, _ in runs]
    assert scores[0] + 0.5 < scores[1] and scores[1] + 0.3 < scores[2]
    assert runs[2][1] > 10 * runs[0][1]


def test_the_log_probabilities_are_those_of_the_sampler(small):
    roles, prompts, ppo = small()
    best, _ = best_of_n(prompts, roles, ppo, 4)
    # The actor is still the reference: only the bound tells that something was selected.
    torch.testing.assert_close(best.old_logp, best.ref_logp, atol=1e-5, rtol=0)
    assert best_of_n_kl(4) > 0.6


def test_best_of_none_is_refused(small):
    roles, prompts, ppo = small()
    with pytest.raises(ValueError, match="n must be a whole number, at least 1, got 0"):
        best_of_n(prompts, roles, ppo, 0)


def test_a_score_that_is_not_finite_is_named_and_not_preferred(small):
    def broken(prompt_ids, prompt_mask, response_ids, mask):
        return torch.where(torch.arange(len(mask)) == 1, math.nan, 0.0)

    roles, prompts, settings = small(reward=broken)
    with pytest.raises(NonFiniteError, match=r"scores is not finite in the answers \[1\]"):
        best_of_n(prompts, roles, settings, 2)
