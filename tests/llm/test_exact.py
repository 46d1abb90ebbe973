"""The exact optimum of LLM-PPO: all answers listed, π* and its objective by hand, by gradient ascent, by sampling."""

import math
from itertools import product

import pytest
import torch
from torch import tensor

from ppo_lab.kl import best_of_n_kl
from ppo_lab.llm.config import make_settings
from ppo_lab.llm.exact import (
    best_of_n_policy,
    enumerate_responses,
    exact_kl,
    fit_policy,
    objective,
    optimal_policy,
    pair_population,
    response_logp,
    tiny_language_model,
    tiny_tokenizer,
    total_variation,
)
from ppo_lab.llm.ppo import llm_ppo_iteration, make_controller
from ppo_lab.llm.roles import assemble
from ppo_lab.preference import dpo_loss

EOS = 1
PROMPT = tensor([0])
HALVES = tensor([0.5, 0.5]).log()


def _random_problem(n_responses=7, seed=0):
    generator = torch.Generator().manual_seed(seed)
    draw = torch.randn(3, n_responses, generator=generator, dtype=torch.float64)
    return draw[0].log_softmax(-1), draw[1], draw[2].log_softmax(-1)


# --- all answers


def test_two_tokens_and_length_two_give_three_answers():
    ids, mask = enumerate_responses(n_tokens=2, eos_token_id=1, max_length=2)
    assert ids.tolist() == [[1, 1], [0, 1], [0, 0]]
    assert mask.tolist() == [[True, False], [True, True], [True, True]]


@pytest.mark.parametrize(("n_tokens", "max_length", "expected"), [(4, 5, 364), (4, 6, 1093), (3, 1, 3), (6, 4, 781)])
def test_number_of_answers_by_hand(n_tokens, max_length, expected):
    # 4 tokens, length 5: 1 + 3 + 9 + 27 + 81 end with EOS, 243 do not.
    ids, mask = enumerate_responses(n_tokens, 0, max_length)
    assert ids.shape == mask.shape == (expected, max_length)


@pytest.mark.parametrize("eos_token_id", [0, 1, 2])
def test_the_list_is_every_sequence_cut_behind_its_first_eos(eos_token_id):
    ids, mask = enumerate_responses(3, eos_token_id, 4)
    listed = [tuple(row[keep].tolist()) for row, keep in zip(ids, mask, strict=True)]
    expected = set()
    for sequence in product(range(3), repeat=4):
        end = sequence.index(eos_token_id) + 1 if eos_token_id in sequence else 4
        expected.add(sequence[:end])
    assert len(listed) == len(set(listed))
    assert set(listed) == expected
    assert (ids[~mask] == eos_token_id).all()
    lengths = mask.sum(-1).tolist()
    assert lengths == sorted(lengths)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [((1, 0, 3), "n_tokens"), ((3, 3, 3), "eos_token_id"), ((3, -1, 3), "eos_token_id"), ((3, 0, 0), "max_length")],
)
def test_impossible_lists_are_refused(arguments, name):
    with pytest.raises(ValueError, match=f"^{name} must"):
        enumerate_responses(*arguments)


def test_a_list_too_long_to_be_one_is_refused_before_it_is_made():
    with pytest.raises(ValueError, match="max_length 20 with n_tokens 50000"):
        enumerate_responses(50_000, 0, 20)


# --- what the model gives them


@pytest.mark.parametrize("prompt_ids", [PROMPT, tensor([0, 2, 3])])
def test_probabilities_of_all_answers_sum_to_one(prompt_ids):
    logp = response_logp(tiny_language_model(), prompt_ids, *enumerate_responses(4, EOS, 5))
    assert logp.shape == (364,)
    assert logp.exp().sum().item() == pytest.approx(1.0, abs=1e-6)


@torch.no_grad()
def test_log_probability_is_the_sum_over_the_tokens_one_by_one():
    model, prompt_ids = tiny_language_model(seed=3), tensor([0, 2])
    ids, mask = enumerate_responses(4, EOS, 3)
    logp = response_logp(model, prompt_ids, ids, mask)
    for row in (0, 2, 5, len(ids) - 1):
        prefix, expected = prompt_ids.tolist(), 0.0
        for token in ids[row][mask[row]].tolist():
            expected += model(tensor([prefix])).logits[0, -1].log_softmax(-1)[token].item()
            prefix.append(token)
        assert logp[row].item() == pytest.approx(expected, abs=1e-5)


@torch.no_grad()
def test_what_stands_behind_eos_does_not_matter():
    model = tiny_language_model()
    ids, mask = enumerate_responses(4, EOS, 3)
    other_filling = ids.masked_fill(~mask, 3)
    torch.testing.assert_close(
        response_logp(model, PROMPT, other_filling, mask), response_logp(model, PROMPT, ids, mask)
    )


@torch.no_grad()
def test_sampled_answers_are_as_frequent_as_listed():
    model = tiny_language_model(seed=1)
    ids, mask = enumerate_responses(4, EOS, 2)
    probability = response_logp(model, PROMPT, ids, mask).exp()
    torch.manual_seed(0)
    first = torch.multinomial(model(PROMPT[None]).logits[0, -1].softmax(-1), 4000, replacement=True)
    rows = torch.stack([torch.zeros_like(first), first], -1)
    second = torch.multinomial(model(rows).logits[:, -1].softmax(-1), 1).squeeze(-1)
    sampled = torch.stack([first, torch.where(first == EOS, EOS, second)], -1)
    frequency = (sampled[:, None] == ids).all(-1).float().mean(0)
    # Three standard errors of a share over 4,000 draws are at most 0.024.
    assert (frequency - probability).abs().max() < 0.024


def test_wrong_prompts_and_shapes_are_refused():
    model, (ids, mask) = tiny_language_model(), enumerate_responses(4, EOS, 2)
    for prompt_ids in (PROMPT[None], PROMPT[:0]):
        with pytest.raises(ValueError, match=r"^prompt_ids must be one prompt"):
            response_logp(model, prompt_ids, ids, mask)
    with pytest.raises(ValueError, match=r"^ids must have shape"):
        response_logp(model, PROMPT, ids[0], mask[0])
    with pytest.raises(ValueError, match=r"^mask must have the shape"):
        response_logp(model, PROMPT, ids, mask[:, :1])


# --- the optimum


@pytest.mark.formula("optimal-policy")
def test_two_answers_by_hand():
    # π* ∝ (½·e⁰, ½·e¹): 1/(1+e) = 0.268941 and e/(1+e) = 0.731059; J(π*) = log((1+e)/2) = 0.620115.
    scores = tensor([0.0, 1.0])
    best = optimal_policy(HALVES, scores, kl_coef=1.0)
    assert best.exp().tolist() == pytest.approx([0.268941, 0.731059], abs=1e-6)
    assert objective(best, HALVES, scores, kl_coef=1.0).item() == pytest.approx(0.620115, abs=1e-6)
    # The reference itself has no KL and earns the mean score; always the better answer earns 1 and pays KL = log 2.
    assert objective(HALVES, HALVES, scores, kl_coef=1.0).item() == pytest.approx(0.5)
    certain = tensor([-math.inf, 0.0])
    assert objective(certain, HALVES, scores, kl_coef=1.0).item() == pytest.approx(1 - math.log(2))


def test_kl_of_two_coins_by_hand():
    # ¼·log(¼/½) + ¾·log(¾/½) = 0.130812; the other way round ½·log(½/¼) + ½·log(½/¾) = 0.143841.
    quarters = tensor([0.25, 0.75]).log()
    assert exact_kl(quarters, HALVES).item() == pytest.approx(0.130812, abs=1e-6)
    assert exact_kl(HALVES, quarters).item() == pytest.approx(0.143841, abs=1e-6)
    assert exact_kl(HALVES, HALVES).item() == 0
    certain = tensor([-math.inf, 0.0])
    assert exact_kl(certain, HALVES).item() == pytest.approx(math.log(2))
    assert exact_kl(HALVES, certain).item() == math.inf


def test_an_answer_without_probability_gives_a_finite_gradient():
    logits = tensor([-math.inf, 0.0, 0.5], requires_grad=True)
    reference = tensor([0.2, 0.3, 0.5]).log()
    objective(logits.log_softmax(-1), reference, tensor([9.0, 0.0, 1.0]), kl_coef=0.5).backward()
    assert torch.isfinite(logits.grad).all()


@pytest.mark.parametrize("kl_coef", [0.05, 0.5, 3.0])
def test_objective_of_the_optimum_is_beta_log_z(kl_coef):
    reference, scores, _ = _random_problem()
    pairs = zip(reference.tolist(), scores.tolist(), strict=True)
    log_z = math.log(sum(math.exp(logp) * math.exp(score / kl_coef) for logp, score in pairs))
    best = optimal_policy(reference, scores, kl_coef)
    assert objective(best, reference, scores, kl_coef).item() == pytest.approx(kl_coef * log_z, rel=1e-12)


@pytest.mark.parametrize("kl_coef", [0.05, 0.5, 3.0])
def test_every_other_policy_is_below_by_beta_times_its_kl_to_the_optimum(kl_coef):
    for seed in range(5):
        reference, scores, policy = _random_problem(seed=seed)
        best = optimal_policy(reference, scores, kl_coef)
        gap = objective(best, reference, scores, kl_coef) - objective(policy, reference, scores, kl_coef)
        assert gap.item() == pytest.approx(kl_coef * exact_kl(policy, best).item(), rel=1e-9)
        assert gap > 0


def test_gradient_ascent_on_logits_ends_at_the_optimum():
    reference, scores, start = _random_problem()
    logits = start.clone().requires_grad_()
    for _ in range(400):
        (gradient,) = torch.autograd.grad(objective(logits.log_softmax(-1), reference, scores, 2.0), logits)
        logits = (logits + gradient).detach().requires_grad_()
    found = logits.detach().log_softmax(-1)
    torch.testing.assert_close(found, optimal_policy(reference, scores, 2.0), atol=1e-4, rtol=0)


def test_beta_moves_the_optimum_from_the_reference_to_the_best_answer():
    reference, scores, _ = _random_problem()
    torch.testing.assert_close(optimal_policy(reference, scores, 1e9), reference, atol=1e-8, rtol=0)
    greedy = optimal_policy(reference, scores, 1e-3)
    assert greedy.argmax() == scores.argmax()
    assert greedy.max().exp().item() == pytest.approx(1.0)
    # A small β brings the scores to ±1e4 nats; in log space nothing overflows.
    assert torch.isfinite(optimal_policy(reference.float(), scores.float(), 1e-4)).all()


def test_a_constant_added_to_all_scores_changes_nothing_but_the_level():
    reference, scores, _ = _random_problem()
    best = optimal_policy(reference, scores, 0.3)
    torch.testing.assert_close(optimal_policy(reference, scores + 5, 0.3), best)
    levels = [objective(best, reference, scores + shift, 0.3).item() for shift in (0, 5)]
    assert levels[1] - levels[0] == pytest.approx(5)


@pytest.mark.parametrize("kl_coef", [0.0, -0.1, math.nan, math.inf])
def test_without_a_penalty_there_is_no_such_optimum(kl_coef):
    with pytest.raises(ValueError, match="kl_coef must be positive"):
        optimal_policy(HALVES, tensor([0.0, 1.0]), kl_coef)
    with pytest.raises(ValueError, match="kl_coef must be positive"):
        objective(HALVES, HALVES, tensor([0.0, 1.0]), kl_coef)


def test_incomplete_lists_wrong_shapes_and_broken_scores_are_refused():
    scores = tensor([0.0, 1.0])
    with pytest.raises(ValueError, match=r"ref_logp must be .* got a sum of 0.5"):
        optimal_policy(HALVES - math.log(2), scores, 1.0)
    with pytest.raises(ValueError, match=r"^logp must be .* got a sum of 0.5"):
        exact_kl(HALVES - math.log(2), HALVES)
    with pytest.raises(ValueError, match=r"ref_logp \(2,\), scores \(1, 2\)"):
        optimal_policy(HALVES, scores[None], 1.0)
    with pytest.raises(ValueError, match=r"logp \(1,\), ref_logp \(2,\)"):
        objective(tensor([0.0]), HALVES, scores, 1.0)
    with pytest.raises(ValueError, match="scores must be finite"):
        optimal_policy(HALVES, tensor([0.0, math.nan]), 1.0)


# --- the tiny model


def test_tiny_model_walks_to_the_exact_optimum():
    ids, mask = enumerate_responses(4, EOS, 4)
    model = tiny_language_model()
    reference = response_logp(model, PROMPT, ids, mask).detach()
    scores = ((ids == 2) & mask).sum(-1).float()
    best = optimal_policy(reference, scores, 0.5)
    before = exact_kl(reference, best).item()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(100):
        optimizer.zero_grad()
        (-objective(response_logp(model, PROMPT, ids, mask), reference, scores, 0.5)).backward()
        optimizer.step()
    after = exact_kl(response_logp(model, PROMPT, ids, mask).detach(), best).item()
    assert before > 1
    assert after < 0.05


def test_tiny_model_is_the_same_for_one_seed_and_leaves_the_random_state_alone():
    torch.manual_seed(5)
    state = torch.get_rng_state()
    models = [tiny_language_model(seed=seed) for seed in (0, 0, 1)]
    assert torch.equal(torch.get_rng_state(), state)
    weights = [model.lm_head.weight for model in models]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert not models[0].training


def test_tiny_model_has_preferences_of_its_own():
    # A flat reference would hide the difference between π_ref·exp(r/β) and exp(r/β).
    for seed in range(3):
        ids, mask = enumerate_responses(4, EOS, 4)
        logp = response_logp(tiny_language_model(seed=seed), PROMPT, ids, mask)
        entropy = -(logp.exp() * logp).sum().item()
        assert 1 < entropy < math.log(len(ids)) - 0.5


def test_tiny_model_refuses_sizes_it_cannot_have():
    with pytest.raises(ValueError, match=r"^n_tokens must be at least 3"):
        tiny_language_model(2)
    for hidden_size in (0, 6):
        with pytest.raises(ValueError, match=r"^hidden_size must be a multiple of 4"):
            tiny_language_model(hidden_size=hidden_size)


# --- its tokenizer


def test_tiny_tokenizer_speaks_the_tokens_of_the_model():
    tokenizer = tiny_tokenizer()
    assert len(tokenizer) == tiny_language_model().config.vocab_size == 4
    assert tokenizer("").input_ids == [0]
    assert tokenizer("a b b").input_ids == [0, 2, 3, 3]
    assert tokenizer.decode([0, 2, 3, 3, 1]) == "<bos> a b b <eos>"
    assert tokenizer.decode([2, 3, 1], skip_special_tokens=True) == "a b"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, EOS, EOS)


def test_tiny_tokenizer_refuses_sizes_for_which_there_are_no_letters():
    for n_tokens in (2, 29):
        with pytest.raises(ValueError, match=r"^n_tokens must lie between 3 and 28"):
            tiny_tokenizer(n_tokens)


def test_ppo_with_four_models_walks_to_the_exact_optimum():
    ids, mask = enumerate_responses(4, EOS, 4)

    def reward(prompt_ids, prompt_mask, response_ids, response_mask):
        return ((response_ids == 2) & response_mask).sum(-1).float()

    values = {"critic": "actor", "batch_size": 128, "max_new_tokens": 4, "kl_coef": 0.5, "scale_rewards": False}
    settings = make_settings({**values, "lr": 1e-3, "critic_lr": 1e-2, "eps_clip_value": None})
    model = tiny_language_model()
    reference = response_logp(model, PROMPT, ids, mask).detach()
    best = optimal_policy(reference, reward(None, None, ids, mask), 0.5)
    roles = assemble(model, reward, tiny_tokenizer(), [[0]], settings)
    controller = make_controller(settings.ppo)
    for iteration in range(20):
        llm_ppo_iteration([[0]] * 128, roles, controller, settings.ppo, iteration)
    end = exact_kl(response_logp(model, PROMPT, ids, mask).detach(), best).item()
    assert exact_kl(reference, best) > 2
    assert end < 0.2


# --- DPO and PPO, two roads to one policy


def _tiny_problem(seed=0):
    """log π_ref and scores of all 121 answers of at most four tokens: one point for each word a."""
    ids, mask = enumerate_responses(4, EOS, 4)
    with torch.no_grad():
        logp = response_logp(tiny_language_model(seed=seed), PROMPT, ids, mask).double()
    return logp.log_softmax(-1), ((ids == 2) & mask).sum(-1).double()


def _population_dpo(reference, scores, kl_coef):
    pairs = pair_population(reference, scores)
    ref_chosen, ref_rejected = reference[pairs.chosen], reference[pairs.rejected]

    def loss(logp):
        chosen, rejected = logp[pairs.chosen], logp[pairs.rejected]
        return dpo_loss(chosen, rejected, ref_chosen, ref_rejected, kl_coef=kl_coef, weights=pairs.weights).total

    return loss


@pytest.mark.formula("optimal-policy", "implicit-reward")
@pytest.mark.parametrize("seed", [0, 1])
def test_dpo_on_all_comparisons_and_the_objective_of_ppo_end_at_the_same_policy(seed):
    reference, scores = _tiny_problem(seed)
    best = optimal_policy(reference, scores, 0.5)
    by_dpo = fit_policy(_population_dpo(reference, scores, 0.5), reference)
    by_ppo = fit_policy(lambda logp: -objective(logp, reference, scores, 0.5), reference)
    assert total_variation(reference, best) > 0.5
    assert total_variation(by_dpo, best) < 1e-3
    assert total_variation(by_ppo, best) < 1e-3
    # The reward that DPO never saw is in the policy it found, up to a constant.
    implied = 0.5 * (by_dpo - reference)
    likely = best > math.log(1e-4)
    torch.testing.assert_close((implied - implied[0])[likely], (scores - scores[0])[likely], atol=0.05, rtol=0)


def test_another_beta_for_dpo_is_another_optimum():
    reference, scores = _tiny_problem()
    by_dpo = fit_policy(_population_dpo(reference, scores, 2.0), reference)
    assert total_variation(by_dpo, optimal_policy(reference, scores, 2.0)) < 1e-3
    assert total_variation(by_dpo, optimal_policy(reference, scores, 0.5)) > 0.3


@pytest.mark.formula("bradley-terry")
def test_the_population_of_two_answers_by_hand():
    # ¼·σ(0) for an answer against itself; ¼·σ(−1) = 0.067235 and ¼·σ(1) = 0.182765 for the two orders.
    pairs = pair_population(HALVES, tensor([0.0, 1.0]))
    assert list(zip(pairs.chosen.tolist(), pairs.rejected.tolist(), strict=True)) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert pairs.weights.tolist() == pytest.approx([0.125, 0.067235, 0.182765, 0.125], abs=1e-6)


def test_the_weights_of_a_population_sum_to_a_half():
    reference, scores, _ = _random_problem()
    assert pair_population(reference, scores).weights.sum().item() == pytest.approx(0.5)


def test_total_variation_by_hand():
    quarters = tensor([0.25, 0.75]).log()
    assert total_variation(HALVES, quarters).item() == pytest.approx(0.25)
    assert total_variation(tensor([-math.inf, 0.0]), tensor([0.0, -math.inf])).item() == 1
    assert total_variation(HALVES, HALVES).item() == 0


# --- best of n


@pytest.mark.formula("best-of-n")
def test_best_of_n_by_hand():
    # The worse of two equally probable answers is kept when both draws are it: ¼. With equal scores nothing is chosen.
    best = best_of_n_policy(HALVES, tensor([0.0, 1.0]), 2)
    assert best.exp().tolist() == pytest.approx([0.25, 0.75])
    tied = best_of_n_policy(tensor([0.2, 0.3, 0.5]).log(), tensor([1.0, 1.0, 0.0]), 2)
    # P(score 1) = 1 − ¼, shared two to three.
    assert tied.exp().tolist() == pytest.approx([0.3, 0.45, 0.25])
    assert best_of_n_policy(HALVES, tensor([0.0, 1.0]), 1).exp().tolist() == pytest.approx([0.5, 0.5])


@pytest.mark.formula("best-of-n")
@pytest.mark.parametrize("n", [2, 3])
def test_best_of_n_is_what_all_tuples_of_draws_say(n):
    reference, scores, _ = _random_problem()
    scores = scores.round(decimals=0)
    probs, expected = reference.exp().tolist(), [0.0] * 7
    for draws in product(range(7), repeat=n):
        expected[max(draws, key=lambda i: scores[i])] += math.prod(probs[i] for i in draws)
    assert len(scores.unique()) < 7
    assert best_of_n_policy(reference, scores, n).exp().tolist() == pytest.approx(expected, abs=1e-12)


@pytest.mark.formula("best-of-n-kl")
def test_the_kl_of_best_of_n_is_at_most_the_bound():
    for seed in (0, 1):
        reference, scores = _tiny_problem(seed)
        # Scores without ties, and the number of a's with many.
        fine = scores + torch.rand(len(scores), generator=torch.Generator().manual_seed(seed)).double()
        for n in (2, 4, 16, 64):
            kls = [exact_kl(best_of_n_policy(reference, s, n), reference).item() for s in (scores, fine)]
            assert 0 < kls[0] < kls[1] < best_of_n_kl(n)


def test_best_of_n_lies_below_the_optimum_at_the_same_kl():
    reference, scores = _tiny_problem()
    best = best_of_n_policy(reference, scores, 4)
    kl, earned = exact_kl(best, reference).item(), (best.exp() * scores).sum().item()
    # π* is the highest mean score that its own KL can buy: look for the β at which it pays what best of 4 pays.
    low, high = 1e-2, 1e2
    for _ in range(60):
        kl_coef = math.sqrt(low * high)
        found = optimal_policy(reference, scores, kl_coef)
        low, high = (kl_coef, high) if exact_kl(found, reference) > kl else (low, kl_coef)
    assert exact_kl(found, reference).item() == pytest.approx(kl, abs=1e-6)
    assert 0.9 * (found.exp() * scores).sum() < earned < (found.exp() * scores).sum()


def test_best_of_none_and_lists_too_long_to_compare_are_refused():
    with pytest.raises(ValueError, match="n must be at least 1, got 0"):
        best_of_n_policy(HALVES, tensor([0.0, 1.0]), 0)
    with pytest.raises(ValueError, match=r"ref_logp must list at most 1000 answers .* got 1001"):
        pair_population(torch.zeros(1001).log_softmax(-1), torch.zeros(1001))
    with pytest.raises(ValueError, match=r"logp \(1,\), other_logp \(2,\)"):
        total_variation(tensor([0.0]), HALVES)


def test_best_of_n_never_keeps_what_is_never_drawn():
    policy = best_of_n_policy(tensor([0.25, 0.75, 0.0]).log(), tensor([0.0, 1.0, 2.0]), 2)
    # Both draws the first answer: 1/16.
    assert policy.exp().tolist() == pytest.approx([1 / 16, 15 / 16, 0.0])
    assert policy.dtype == torch.float32
