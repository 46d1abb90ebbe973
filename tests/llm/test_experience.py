"""Experience: what each role says about each token, and the advantages that follow from it."""

import math
import statistics
from dataclasses import fields, replace

import pytest
import torch
from torch import tensor

from ppo_lab.llm.config import CRITIC_FREE, PPOSettings
from ppo_lab.llm.experience import (
    Experience,
    answers,
    by_length,
    collect,
    estimate,
    greedy_scores,
    sampler_weights,
    score,
    select,
    shaped_scores,
    unwhitened_advantages,
)
from ppo_lab.llm.roles import Roles

EOS = 1


def shaken(small, shake, **changes):
    """Roles that all disagree, and the experience they make."""
    roles, prompts, settings = small(**changes)
    shake(roles.actor.module, seed=1)
    if roles.critic is not None:
        shake(roles.critic.module, seed=2)
    return roles, prompts, settings, collect(prompts, roles, settings, iteration=0)


def rows_of(experience):
    """Each answer by itself, without padding: row number, length of the prompt, ids [1, P + T]."""
    for i in range(len(experience.mask)):
        prompt = experience.prompt_ids[i][experience.prompt_mask[i]]
        response = experience.response_ids[i][experience.mask[i]]
        yield i, len(prompt), torch.cat([prompt, response])[None]


def slow_logp(lm, ids, n_prompt, temperature=1.0):
    """log π of each answer token, from the model called on this one answer without mask or positions."""
    with torch.no_grad():
        log_probs = (lm(input_ids=ids).logits[0] / temperature).log_softmax(-1)
    return tensor([float(log_probs[t - 1, ids[0, t]]) for t in range(n_prompt, ids.shape[1])])


def slow_values(backbone, head, ids, n_prompt):
    """V of the states before each answer token and of the one after the last."""
    with torch.no_grad():
        return head(backbone(input_ids=ids).last_hidden_state[0, n_prompt - 1 :]).squeeze(-1)


# --- collect: the numbers are those of each answer read alone


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("score_batch_size", [1, 3, 8])
def test_log_probabilities_are_those_of_a_forward_pass_over_each_answer(small, shake, score_batch_size, temperature):
    changes = {"score_batch_size": score_batch_size, "temperature": temperature}
    roles, _, _, experience = shaken(small, shake, **changes)
    assert len(set(experience.mask.sum(-1).tolist())) > 2, "the lengths must differ to tell anything"
    for i, n_prompt, ids in rows_of(experience):
        n = ids.shape[1] - n_prompt
        old_logp = slow_logp(roles.actor.module.lm, ids, n_prompt, temperature)
        ref_logp = slow_logp(roles.reference.lm, ids, n_prompt, temperature)
        torch.testing.assert_close(experience.old_logp[i, :n], old_logp, atol=1e-5, rtol=0)
        torch.testing.assert_close(experience.ref_logp[i, :n], ref_logp, atol=1e-5, rtol=0)
        assert (old_logp - ref_logp).abs().max() > 0.01
        assert not experience.old_logp[i, n:].any() and not experience.ref_logp[i, n:].any()


@pytest.mark.parametrize("critic", ["actor", "shared"])
@pytest.mark.parametrize("score_batch_size", [1, 3, 8])
def test_values_are_those_of_the_states_before_each_token_and_after_the_last(small, shake, score_batch_size, critic):
    roles, _, _, experience = shaken(small, shake, score_batch_size=score_batch_size, critic=critic)
    if critic == "shared":
        backbone, head = roles.actor.module.lm.base_model, roles.actor.module.value_head
    else:
        backbone, head = roles.critic.module.backbone, roles.critic.module.head
    for i, n_prompt, ids in rows_of(experience):
        n = ids.shape[1] - n_prompt
        values = slow_values(backbone, head, ids, n_prompt)
        torch.testing.assert_close(experience.values[i, :n], values[:n], atol=1e-5, rtol=0)
        torch.testing.assert_close(experience.final_values[i], values[n], atol=1e-5, rtol=0)
        assert not experience.values[i, n:].any()


def test_scores_are_those_of_the_reward(small, shake):
    _, _, _, experience = shaken(small, shake)
    expected = [ids[0, n_prompt:].tolist().count(2) for _, n_prompt, ids in rows_of(experience)]
    assert experience.scores.tolist() == expected
    assert len(set(expected)) > 1


def test_an_answer_is_finished_if_it_holds_an_eos(small):
    roles, prompts, settings = small(max_new_tokens=3)
    experience = collect(prompts, roles, settings, iteration=0)
    expected = [EOS in ids[0, n_prompt:].tolist() for _, n_prompt, ids in rows_of(experience)]
    assert experience.finished.tolist() == expected
    assert len(set(expected)) == 2


def test_an_answer_depends_on_seed_iteration_and_place_but_not_on_its_neighbours(small):
    roles, prompts, settings = small()
    whole = collect(prompts, roles, settings, iteration=4)
    some = collect(prompts[:3], roles, settings, iteration=4)
    assert answers(some, roles.tokenizer)[1] == answers(whole, roles.tokenizer)[1][:3]
    for other in (
        collect(prompts, roles, settings, iteration=5),
        collect(prompts, roles, replace(settings, seed=1), iteration=4),
    ):
        assert answers(other, roles.tokenizer)[1] != answers(whole, roles.tokenizer)[1]


def test_in_bfloat16_the_log_probabilities_come_from_the_pass_that_training_uses(small, shake):
    roles, _, settings, experience = shaken(small, shake, bf16=True)
    sampled = replace(experience, old_logp=torch.full_like(experience.old_logp, -9.0))
    torch.testing.assert_close(score(sampled, roles, settings).old_logp, experience.old_logp)
    assert experience.old_logp.dtype == experience.values.dtype == experience.scores.dtype == torch.float32


def test_B21_bfloat16_differs_from_float32_by_less_than_a_tenth(small, shake):
    roles, _, _, experience = shaken(small, shake, bf16=True)
    for i, n_prompt, ids in rows_of(experience):
        n = ids.shape[1] - n_prompt
        old_logp, ref_logp = (slow_logp(actor.lm, ids, n_prompt) for actor in (roles.actor.module, roles.reference))
        torch.testing.assert_close(experience.old_logp[i, :n], old_logp, atol=0.1, rtol=0)
        torch.testing.assert_close(experience.ref_logp[i, :n], ref_logp, atol=0.1, rtol=0)


def test_answers_are_text_without_padding_and_special_tokens(tokenizer):
    experience = replace(
        hand_made(),
        prompt_ids=tensor([[2, 0, 3]]),
        prompt_mask=tensor([[False, True, True]]),
        response_ids=tensor([[2, 4, EOS]]),
    )
    assert answers(experience, tokenizer) == (["b"], ["a c"])


# --- select and by_length


def test_select_cuts_the_padding_and_changes_no_number(small, shake):
    roles, _, settings, experience = shaken(small, shake)
    some = torch.arange(8.0)
    experience = estimate(replace(experience, baseline_scores=some, baseline_lengths=some), roles, settings, 0.1)
    rows = tensor([1, 0])
    part = select(experience, rows)
    assert part.prompt_ids.shape == part.prompt_mask.shape == (2, 2)
    assert part.mask.sum(-1).tolist() == experience.mask[rows].sum(-1).tolist()
    assert part.mask.shape[1] == part.mask.sum(-1).max() < experience.mask.shape[1]
    for item in fields(Experience):
        if item.name in ("prompt_ids", "prompt_mask"):
            continue
        for k, i in enumerate(rows.tolist()):
            here, there = getattr(part, item.name)[k], getattr(experience, item.name)[i]
            if here.dim():
                here, there = here[part.mask[k]], there[experience.mask[i]]
            assert torch.equal(here, there), item.name
    alone = [ids.tolist() for _, _, ids in rows_of(part)]
    assert alone == [[ids.tolist() for _, _, ids in rows_of(experience)][i] for i in rows.tolist()]


def test_select_keeps_what_has_not_been_estimated_yet_empty(small):
    roles, prompts, settings = small()
    part = select(collect(prompts, roles, settings, 0), tensor([1]))
    assert part.rewards is part.advantages is part.returns is None


def test_batches_by_length_are_a_partition_from_the_shortest_to_the_longest():
    lengths = tensor([3, 1, 4, 1, 5, 2, 6])
    experience = replace(hand_made(), mask=torch.arange(6) < lengths[:, None])
    parts = by_length(experience, tensor([0, 2, 3, 4, 6]), 2)
    # Lengths 3, 4, 1, 5, 6.
    assert [part.tolist() for part in parts] == [[3, 0], [2, 4], [6]]
    assert [part.tolist() for part in by_length(experience, tensor([6, 0]), 2)] == [[6, 0]]


# --- scores


def hand_made(n_rows=1):
    """An answer of three tokens: score 2, the log-probabilities of B24, values ½, 1, 1½ and 2 behind the last token."""
    return Experience(
        prompt_ids=tensor([[0]]).repeat(n_rows, 1),
        prompt_mask=tensor([[True]]).repeat(n_rows, 1),
        response_ids=tensor([[2, 3, EOS]]).repeat(n_rows, 1),
        mask=tensor([[True, True, True]]).repeat(n_rows, 1),
        finished=tensor([True]).repeat(n_rows),
        scores=tensor([2.0]).repeat(n_rows),
        sampler_logp=tensor([[-1.0, -2.0, -0.5]]).repeat(n_rows, 1),
        old_logp=tensor([[-1.0, -2.0, -0.5]]).repeat(n_rows, 1),
        ref_logp=tensor([[-1.1, -1.8, -0.8]]).repeat(n_rows, 1),
        values=tensor([[0.5, 1.0, 1.5]]).repeat(n_rows, 1),
        final_values=tensor([2.0]).repeat(n_rows),
    )


def units(mean=0.0, std=1.0):
    """Roles of which only the units of the scores are read."""
    return Roles(None, None, None, None, None, [EOS], mean, std)


PLAIN = PPOSettings(scale_rewards=False, reward_clip=None, whiten_advantages=False)


def test_scores_are_scaled_then_clipped_then_whitened_then_fined():
    experience = replace(
        hand_made(4), scores=tensor([10.0, -1.0, 1.0, 4.0]), finished=tensor([True, False, True, True])
    )
    roles = units(mean=1.0, std=2.0)
    expected = {
        (True, None, False, 0.0): [4.5, -1.0, 0.0, 1.5],
        (True, 2.0, False, 0.0): [2.0, -1.0, 0.0, 1.5],
        (False, 2.0, False, 0.0): [2.0, -1.0, 1.0, 2.0],
        # 2, −1, 0, 1.5 have mean 0.625 and variance 5.6875/3.
        (True, 2.0, True, 0.0): [0.998625, -1.180193, -0.453921, 0.635489],
        (True, 2.0, True, 0.5): [0.998625, -1.680193, -0.453921, 0.635489],
    }
    for (scale, clip, whiten, penalty), scores in expected.items():
        settings = replace(
            PLAIN, scale_rewards=scale, reward_clip=clip, whiten_scores=whiten, missing_eos_penalty=penalty
        )
        torch.testing.assert_close(shaped_scores(experience, roles, settings), tensor(scores), atol=1e-5, rtol=0)


def test_B25_only_an_answer_without_end_is_fined():
    experience = replace(hand_made(2), finished=tensor([True, False]))
    settings = replace(PLAIN, missing_eos_penalty=1.0)
    assert shaped_scores(experience, units(), settings).tolist() == [2.0, 1.0]
    assert estimate(experience, units(), settings, 0.0).rewards.tolist() == [[0, 0, 2], [0, 0, 1]]


def test_B11_whitened_scores_that_are_all_equal_are_zero():
    assert shaped_scores(hand_made(3), units(), replace(PLAIN, whiten_scores=True)).tolist() == [0, 0, 0]


def test_B10_the_whitened_score_of_a_single_answer_is_zero():
    assert shaped_scores(hand_made(1), units(), replace(PLAIN, whiten_scores=True)).tolist() == [0]


# --- estimate


def test_rewards_advantages_and_returns_of_three_tokens_by_hand():
    result = estimate(hand_made(), units(), PLAIN, kl_coef=0.1)
    # −0.1·(logp − ref_logp), and 2 on the last. δ = 0.49, 0.52, 0.47; Â_t = δ_t + 0.95·Â_{t+1}.
    torch.testing.assert_close(result.rewards, tensor([[-0.01, 0.02, 1.97]]))
    torch.testing.assert_close(result.advantages, tensor([[1.408175, 0.9665, 0.47]]))
    torch.testing.assert_close(result.returns, tensor([[1.908175, 1.9665, 1.97]]))


def test_whitened_advantages_have_mean_0_and_spread_1_and_the_returns_stay():
    result = estimate(hand_made(), units(), replace(PLAIN, whiten_advantages=True), kl_coef=0.1)
    # 1.408175, 0.9665, 0.47: mean 0.948225, standard deviation 0.469354.
    torch.testing.assert_close(result.advantages, tensor([[0.979963, 0.038936, -1.018899]]), atol=1e-5, rtol=0)
    torch.testing.assert_close(result.returns, tensor([[1.908175, 1.9665, 1.97]]))


def test_whitened_rewards_keep_their_mean():
    result = estimate(hand_made(), units(), replace(PLAIN, whiten_rewards=True), kl_coef=0.1)
    # Mean 0.66, variance (0.67² + 0.64² + 1.31²)/2 = 1.2873.
    expected = [0.66 - 0.67 / 1.2873**0.5, 0.66 - 0.64 / 1.2873**0.5, 0.66 + 1.31 / 1.2873**0.5]
    torch.testing.assert_close(result.rewards, tensor([expected]))


@pytest.mark.parametrize(
    ("kind", "rewards"), [("k2", [-0.0005, -0.002, 1.9955]), ("k3", [-0.000484, -0.00214, 1.995918])]
)
def test_the_kl_in_the_reward_can_be_another_estimator(kind, rewards):
    # d = log π − log π_ref = 0.1, −0.2, 0.3. k2 = d²/2; k3 = e^−d − 1 + d.
    result = estimate(hand_made(), units(), replace(PLAIN, kl_kind=kind), kl_coef=0.1)
    torch.testing.assert_close(result.rewards, tensor([rewards]), atol=1e-6, rtol=0)


def test_a_cut_answer_ends_in_0_or_is_continued_by_the_critic():
    cut = replace(hand_made(2), finished=tensor([True, False]))
    ended = [1.408175, 0.9665, 0.47]
    # 2 follows the last token: δ = 0.49, 0.52, 2.47.
    continued = [3.213175, 2.8665, 2.47]
    for bootstrap, expected in ((False, [ended, ended]), (True, [ended, continued])):
        result = estimate(cut, units(), replace(PLAIN, bootstrap_truncated=bootstrap), kl_coef=0.1)
        torch.testing.assert_close(result.advantages, tensor(expected))


def test_a_sampler_that_differs_is_made_up_for_by_weights_cut_at_the_cap():
    sampler_logp = tensor([[-1.0, -2.0 - math.log(3), -0.5 + math.log(2)]])
    experience = replace(hand_made(), sampler_logp=sampler_logp)
    # π_old/π_sampler = 1, 3, ½.
    torch.testing.assert_close(sampler_weights(experience, 2.0), tensor([[1.0, 2.0, 0.5]]))
    torch.testing.assert_close(sampler_weights(experience, 5.0), tensor([[1.0, 3.0, 0.5]]))
    hidden = replace(experience, mask=tensor([[True, False, True]]))
    torch.testing.assert_close(sampler_weights(hidden, 5.0), tensor([[1.0, 1.0, 0.5]]))
    result = estimate(experience, units(), replace(PLAIN, sampler_correction=2.0), kl_coef=0.1)
    plain = estimate(experience, units(), PLAIN, kl_coef=0.1)
    torch.testing.assert_close(result.advantages, plain.advantages * tensor([[1.0, 2.0, 0.5]]))
    torch.testing.assert_close(result.returns, plain.returns)


def slow_estimate(experience, kl_coef, gamma, gae_lambda):
    """The book's stage 1 for one answer after another: token rewards, GAE, whitening over all tokens of all answers."""
    raw, returns = [], []
    for i in range(len(experience.mask)):
        n = int(experience.mask[i].sum())
        logp, ref_logp = experience.old_logp[i].tolist(), experience.ref_logp[i].tolist()
        rewards = [-kl_coef * (logp[t] - ref_logp[t]) for t in range(n)]
        rewards[-1] += float(experience.scores[i])
        v_extended = [*experience.values[i, :n].tolist(), 0.0]
        advantages, carried = [0.0] * n, 0.0
        for t in reversed(range(n)):
            delta = rewards[t] + gamma * v_extended[t + 1] - v_extended[t]
            carried = delta + gamma * gae_lambda * carried
            advantages[t] = carried
        raw.append(advantages)
        returns.append([a + v for a, v in zip(advantages, v_extended, strict=False)])
    everything = tensor([a for advantages in raw for a in advantages])
    mean, std = float(everything.mean()), float(everything.std())
    return [[(a - mean) / std for a in advantages] for advantages in raw], returns


@pytest.mark.parametrize(("gamma", "gae_lambda"), [(1.0, 0.95), (0.9, 0.5)])
def test_estimate_is_the_book_s_loop_over_single_answers(small, shake, gamma, gae_lambda):
    changes = {"gamma": gamma, "gae_lambda": gae_lambda, "reward_clip": None}
    roles, _, settings, experience = shaken(small, shake, **changes)
    result = estimate(experience, roles, settings, kl_coef=0.3)
    advantages, returns = slow_estimate(experience, 0.3, gamma, gae_lambda)
    for i, (a, r) in enumerate(zip(advantages, returns, strict=True)):
        torch.testing.assert_close(result.advantages[i, : len(a)], tensor(a), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(result.returns[i, : len(r)], tensor(r), atol=1e-4, rtol=1e-4)
        assert not result.advantages[i, len(a) :].any() and not result.returns[i, len(r) :].any()


# --- advantages without a critic: each worked out here from scores and groups, answer by answer


def totals_of(experience, kl_coef=0.1):
    """Score minus the price of the whole answer's KL, by hand."""
    kl = (experience.old_logp - experience.ref_logp).sum(-1)
    return [float(r) - kl_coef * float(k) for r, k in zip(experience.scores, kl, strict=True)]


def estimated(small, shake, **changes):
    roles, prompts, settings = small(**changes)
    shake(roles.actor.module, seed=1)
    prompts = [ids for ids in prompts[: 8 // settings.group_size] for _ in range(settings.group_size)]
    experience = collect(prompts, roles, settings, iteration=0)
    if settings.advantage == "remax":
        scores, lengths = greedy_scores(prompts, roles, settings)
        experience = replace(experience, baseline_scores=scores, baseline_lengths=lengths)
    return roles, settings, estimate(experience, roles, settings, 0.1)


def assert_each_token_has(experience, expected):
    for i, advantage in enumerate(expected):
        n = int(experience.mask[i].sum())
        torch.testing.assert_close(experience.advantages[i, :n], torch.full((n,), advantage), atol=1e-5, rtol=1e-5)
        assert not experience.advantages[i, n:].any()


def test_rloo_compares_an_answer_with_the_other_one_to_the_same_prompt(small, shake):
    _, _, experience = estimated(small, shake, advantage="rloo", group_size=2)
    r = totals_of(experience)
    assert_each_token_has(experience, [r[i] - r[i ^ 1] for i in range(8)])
    assert len({round(x, 3) for x in r}) > 4


@pytest.mark.parametrize("kind", ["grpo", "dr-grpo"])
def test_grpo_compares_with_the_mean_of_the_group_and_may_divide_by_its_spread(small, shake, kind):
    _, _, experience = estimated(small, shake, advantage=kind, group_size=4)
    r = totals_of(experience)
    groups = [r[:4], r[4:]]
    spread = statistics.stdev if kind == "grpo" else lambda group: 1.0
    assert_each_token_has(experience, [(x - statistics.mean(g)) / spread(g) for g in groups for x in g])


def test_reinforce_pp_whitens_the_reward_to_come_over_all_tokens(small, shake):
    _, _, experience = estimated(small, shake, advantage="reinforce++")
    to_come = [
        sum(float(x) for x in experience.rewards[i, t:][experience.mask[i, t:]])
        for i in range(8)
        for t in range(int(experience.mask[i].sum()))
    ]
    mean, spread = statistics.mean(to_come), statistics.stdev(to_come)
    expected = tensor([(x - mean) / spread for x in to_come])
    torch.testing.assert_close(experience.advantages[experience.mask], expected, atol=1e-4, rtol=1e-4)


def test_remax_compares_with_the_most_probable_answer(small, shake):
    roles, _, experience = estimated(small, shake, advantage="remax", missing_eos_penalty=0.25)
    for i in range(8):
        ids = experience.prompt_ids[i][experience.prompt_mask[i]].tolist()
        greedy = []
        while len(greedy) < 6 and EOS not in greedy:
            with torch.no_grad():
                greedy.append(int(roles.actor.module.lm(input_ids=tensor([ids + greedy])).logits[0, -1].argmax()))
        baseline = greedy.count(2) - 0.25 * (EOS not in greedy)
        assert float(experience.baseline_scores[i]) == baseline
        assert int(experience.baseline_lengths[i]) == len(greedy)
        to_come = [sum(experience.rewards[i, t:].tolist()) for t in range(int(experience.mask[i].sum()))]
        found = experience.advantages[i][experience.mask[i]].tolist()
        assert found == pytest.approx([x - baseline for x in to_come], abs=1e-5)


@pytest.mark.parametrize("kind", CRITIC_FREE)
def test_without_a_critic_there_are_no_values_and_returns_are_what_is_still_to_come(small, shake, kind):
    roles, _, experience = estimated(small, shake, advantage=kind, group_size=4)
    assert roles.critic is None
    assert not experience.values.any() and not experience.final_values.any()
    first = [float(x) for x in experience.returns[:, 0]]
    assert first == pytest.approx(totals_of(experience), abs=1e-5)


def spread_of(experience, numbers):
    return statistics.stdev(x for i, x in enumerate(numbers) for _ in range(int(experience.mask[i].sum())))


def test_the_spread_of_the_advantages_is_recorded_before_any_whitening(small, shake):
    _, settings, experience = estimated(small, shake, advantage="reinforce++-baseline", group_size=4)
    r = totals_of(experience)
    above_mean = [x - statistics.mean(group) for group in (r[:4], r[4:]) for x in group]
    found = unwhitened_advantages(experience, settings)[experience.mask].std()
    assert float(found) == pytest.approx(spread_of(experience, above_mean), rel=1e-4)
    assert float(experience.advantages[experience.mask].std()) == pytest.approx(1.0, abs=1e-4)

    _, settings, experience = estimated(small, shake, advantage="reinforce++")
    assert torch.equal(unwhitened_advantages(experience, settings), experience.returns)
