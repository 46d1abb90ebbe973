"""Numbers of each token, by hand and against slow transcriptions in Python numbers."""

import math
from types import SimpleNamespace

import pytest
import torch

from ppo_lab.clip import categorical_entropy
from ppo_lab.llm import tokens
from ppo_lab.llm.config import PPOSettings
from ppo_lab.llm.experience import shaped_scores
from ppo_lab.llm.tokens import (
    is_finished,
    last_index,
    left_pad,
    next_token_values,
    position_ids,
    response_mask,
    token_logp,
    token_rewards,
    token_statistics,
)
from ppo_lab.masking import hide, masked_mean

NAN, INF = math.nan, math.inf


def row(*numbers):
    return torch.tensor([numbers], dtype=torch.float64)


def random_logits(*shape, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(shape, generator=generator)
    ids = torch.randint(shape[-1], shape[:-1], generator=generator)
    return logits.to(dtype), ids


def full_statistics(logits, ids, temperature=1.0):
    """The straightforward form, in float64 and over the whole vocabulary at once."""
    z = logits.double() / temperature
    return z.log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1), categorical_entropy(z)


def gradients(statistics, logits, ids, logp_weight, entropy_weight, **settings):
    """∂(Σ w·logp + Σ v·H)/∂logits."""
    logits = logits.clone().requires_grad_()
    logp, entropy = statistics(logits, ids, **settings)
    loss = (logp_weight * logp).sum() + (entropy_weight * entropy).sum()
    return torch.autograd.grad(loss, logits)[0]


# --- masks and positions


def test_left_pad_ends_every_sequence_in_the_last_column():
    ids, mask = left_pad([[5, 6], [1, 2, 3, 4, 5], [9]], 0)
    assert ids.tolist() == [[0, 0, 0, 5, 6], [1, 2, 3, 4, 5], [0, 0, 0, 0, 9]]
    assert mask.tolist() == [[0, 0, 0, 1, 1], [1, 1, 1, 1, 1], [0, 0, 0, 0, 1]]
    assert mask.dtype == torch.bool


def test_left_pad_takes_a_pad_id_inside_a_prompt_for_a_word():
    ids, mask = left_pad([[0, 0, 7], [0]], 0)
    assert ids.tolist() == [[0, 0, 7], [0, 0, 0]]
    assert mask.tolist() == [[1, 1, 1], [0, 0, 1]]


def test_left_pad_refuses_a_sequence_without_a_token():
    with pytest.raises(ValueError, match="at least one token"):
        left_pad([[1, 2], []], 0)


def test_B28_the_eos_is_trained():
    eos, pad = 2, 0
    ids = torch.tensor([[11, 7, eos, pad, pad]])
    mask = response_mask(ids, eos)
    assert mask.tolist() == [[1, 1, 1, 0, 0]]
    assert mask.dtype == torch.bool
    logits = random_logits(1, 5, 12)[0].requires_grad_()
    masked_mean(token_logp(logits, ids), mask).backward()
    # Up with the EOS, down with the rest; nothing at the padding.
    assert logits.grad[0, 2, eos] > 0
    assert logits.grad[0, 2].sum().item() == pytest.approx(0, abs=1e-6)
    assert (logits.grad[0, 3:] == 0).all()


def test_padding_that_is_the_eos_itself_keeps_the_first_one():
    ids = torch.tensor([[11, 7, 2, 2, 2], [2, 2, 2, 2, 2], [3, 4, 5, 6, 7]])
    assert response_mask(ids, 2).sum(-1).tolist() == [3, 1, 5]


def test_whatever_eos_comes_first_ends_the_response():
    ids = torch.tensor([[4, 13, 2, 5], [4, 2, 13, 5], [4, 5, 6, 13], [4, 5, 6, 7]])
    assert response_mask(ids, [2, 13]).sum(-1).tolist() == [2, 2, 4, 4]
    assert response_mask(ids, {13}).sum(-1).tolist() == [2, 3, 4, 4]


def test_an_eos_behind_the_end_finishes_nothing():
    ids = torch.tensor([[4, 5, 2, 2], [4, 5, 2, 2], [2, 2, 2, 2]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0], [1, 0, 0, 0]]).bool()
    assert is_finished(ids, mask, 2).tolist() == [True, False, True]


def test_B25_an_answer_cut_at_the_limit_keeps_its_tokens_and_its_score():
    ids = torch.tensor([[5, 6, 7, 8], [5, 6, 7, 13]])
    mask = response_mask(ids, [2, 13])
    assert mask.tolist() == [[1, 1, 1, 1], [1, 1, 1, 1]]
    # The stop token 13 is an end as good as the EOS 2: no penalty there.
    finished = is_finished(ids, mask, [2, 13])
    assert finished.tolist() == [False, True]
    settings = PPOSettings(scale_rewards=False, missing_eos_penalty=1.0)
    answered = SimpleNamespace(scores=torch.tensor([2.0, 2.0]), finished=finished)
    scores = shaped_scores(answered, roles=None, settings=settings)
    zeros = torch.zeros(2, 4)
    assert token_rewards(scores, zeros, zeros, mask, 0.1).tolist() == [[0, 0, 0, 1], [0, 0, 0, 2]]


def test_B27_an_answer_of_the_eos_alone_has_one_token_that_counts():
    ids = torch.full((4, 1), 2)
    mask = response_mask(ids, 2)
    assert mask.tolist() == [[1]] * 4
    scores, zeros = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.zeros(4, 1)
    assert token_rewards(scores, zeros, zeros, mask, 0.1).squeeze(-1).tolist() == [1, 2, 3, 4]
    assert next_token_values(torch.full((4, 1), 0.7), mask).tolist() == [[0]] * 4


def test_positions_count_the_real_tokens():
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [0, 1, 1, 0, 1]])
    assert position_ids(mask).tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 2, 2], [0, 0, 1, 1, 2]]
    assert position_ids(mask).dtype == torch.int64


def test_last_index_of_a_prefix_a_gap_and_nothing():
    mask = torch.tensor([[1, 1, 0, 0], [1, 0, 1, 0], [0, 0, 0, 1], [0, 0, 0, 0]]).bool()
    assert last_index(mask).tolist() == [1, 2, 3, 0]


# --- values


def literal_next_values(values, mask, final):
    """V at the next t' > t that counts; final after the last one; 0 where t itself does not count."""
    result = [0.0] * len(values)
    for t in range(len(values)):
        later = [values[s] for s in range(t + 1, len(values)) if mask[s]]
        if mask[t]:
            result[t] = later[0] if later else final
    return result


@pytest.mark.parametrize("with_final", [False, True])
@pytest.mark.parametrize("kind", ["prefix", "gaps"])
def test_next_token_values_look_at_the_next_token_that_counts(kind, with_final):
    generator = torch.Generator().manual_seed(0)
    values, final = torch.randn(16, 7, generator=generator), torch.randn(16, generator=generator)
    mask = torch.rand(16, 7, generator=generator) < 0.6
    if kind == "prefix":
        mask = torch.arange(7) < torch.randint(0, 8, (16, 1), generator=generator)
    ours = next_token_values(values, mask, final if with_final else None)
    for n in range(16):
        expected = literal_next_values(values[n].tolist(), mask[n].tolist(), final[n].item() if with_final else 0.0)
        assert ours[n].tolist() == expected


@pytest.mark.parametrize("mask", [[1, 1, 0], [1, 0, 1]], ids=["prefix", "gap"])
@pytest.mark.parametrize("hidden", [NAN, INF])
def test_a_hidden_value_reaches_no_token(mask, hidden):
    mask = torch.tensor([mask])
    values = row(0.5, 0.25, 0.125).masked_fill(mask == 0, hidden)
    expected = 0.25 if mask[0, 1] else 0.125
    assert next_token_values(values, mask, torch.tensor([3.0], dtype=torch.float64))[0, 0] == expected
    assert next_token_values(values, mask)[mask == 0].tolist() == [0]


def test_next_token_values_refuse_other_shapes():
    values = torch.zeros(2, 3)
    with pytest.raises(ValueError, match="mask"):
        next_token_values(values, torch.ones(2, 4).bool())
    with pytest.raises(ValueError, match="final_values"):
        next_token_values(values, torch.ones(2, 3).bool(), torch.zeros(2, 1))


# --- log-probabilities and entropy


def test_token_statistics_by_hand():
    # Probabilities ½, ¼, ¼: −log 2 and −log 4 nats, entropy 1.5·log 2.
    logits = torch.tensor([0.5, 0.25, 0.25]).log().expand(2, 3)
    logp, entropy = token_statistics(logits, torch.tensor([0, 2]))
    assert logp.tolist() == pytest.approx([-math.log(2), -math.log(4)])
    assert entropy.tolist() == pytest.approx([1.5 * math.log(2)] * 2)
    # At temperature ½ the weights are squared: 4 : 1 : 1.
    logp, entropy = token_statistics(logits, torch.tensor([0, 2]), temperature=0.5)
    assert logp.tolist() == pytest.approx([math.log(4 / 6), math.log(1 / 6)])
    assert entropy.tolist() == pytest.approx([-4 / 6 * math.log(4 / 6) - 2 / 6 * math.log(1 / 6)] * 2)


@pytest.mark.parametrize("chunk", [1, 3 * 50, 2**22])
@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.0])
@pytest.mark.parametrize("entropy_weight", [0.0, -0.3])
def test_token_statistics_are_those_of_the_full_softmax(monkeypatch, chunk, temperature, entropy_weight):
    # Chunks of one row, of three rows (the last one is shorter) and of all.
    monkeypatch.setattr(tokens, "CHUNK", chunk)
    logits, ids = random_logits(2, 5, 50)
    logp, entropy = token_statistics(logits, ids, temperature=temperature)
    expected_logp, expected_entropy = full_statistics(logits, ids, temperature)
    assert logp.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(logp.double(), expected_logp, atol=1e-5, rtol=0)
    torch.testing.assert_close(entropy.double(), expected_entropy, atol=1e-5, rtol=0)
    weights = torch.randn(2, 5, generator=torch.Generator().manual_seed(1))
    arguments = logits, ids, weights, entropy_weight * weights.flip(0)
    ours = gradients(token_statistics, *arguments, temperature=temperature)
    theirs = gradients(full_statistics, *arguments, temperature=temperature)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


def test_bfloat16_logits_are_read_in_float32():
    logits, ids = random_logits(2, 5, 50, dtype=torch.bfloat16)
    logp, entropy = token_statistics(logits, ids)
    expected_logp, expected_entropy = full_statistics(logits, ids)
    torch.testing.assert_close(logp.double(), expected_logp, atol=1e-5, rtol=0)
    torch.testing.assert_close(entropy.double(), expected_entropy, atol=1e-5, rtol=0)
    # Within bfloat16 itself the same numbers are a hundredth off.
    assert (logits.log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1) - expected_logp).abs().max() > 1e-3
    ours = gradients(token_statistics, logits, ids, torch.ones(2, 5), torch.ones(2, 5))
    theirs = gradients(full_statistics, logits.float(), ids, torch.ones(2, 5), torch.ones(2, 5))
    assert ours.dtype == torch.bfloat16
    torch.testing.assert_close(ours.float(), theirs, atol=1e-3, rtol=2**-8)


def test_a_forbidden_token_costs_nothing_but_its_own_probability():
    logits, ids = random_logits(3, 4, 6)
    logits[..., 2] = -INF
    ids[:] = 1
    ids[0, 0] = 2  # the forbidden one itself
    logp, entropy = token_statistics(logits, ids)
    allowed = [0, 1, 3, 4, 5]
    expected_logp, expected_entropy = full_statistics(logits[..., allowed], torch.ones_like(ids))
    assert logp[0, 0] == -INF
    torch.testing.assert_close(logp[1:].double(), expected_logp[1:], atol=1e-5, rtol=0)
    torch.testing.assert_close(entropy.double(), expected_entropy, atol=1e-5, rtol=0)
    for entropy_weight in (0.01, 5.0):
        weights = torch.ones(2, 4), torch.full((2, 4), entropy_weight)
        ours = gradients(token_statistics, logits[1:], ids[1:], *weights, temperature=0.7)
        assert (ours[..., 2] == 0).all()
        theirs = gradients(full_statistics, logits[1:, :, allowed], ids[1:], *weights, temperature=0.7)
        torch.testing.assert_close(ours[..., allowed], theirs, atol=1e-4, rtol=0)


def test_extreme_logits_stay_finite():
    logits = torch.tensor([[1e4, -1e4, 0.0], [-1e4, -1e4, -1e4]])
    logp, entropy = token_statistics(logits, torch.tensor([1, 0]))
    assert logp.tolist() == pytest.approx([-2e4, -math.log(3)])
    assert entropy.tolist() == pytest.approx([0, math.log(3)])
    ours = gradients(token_statistics, logits, torch.tensor([1, 0]), torch.ones(2), torch.ones(2))
    assert ours.isfinite().all()


def test_the_statistics_leave_the_logits_as_they_were():
    logits, ids = random_logits(2, 5, 50)
    before = logits.clone()
    gradients(token_statistics, logits, ids, torch.ones(2, 5), torch.ones(2, 5))
    token_statistics(logits, ids)
    assert logits.equal(before)


def test_no_gradient_at_a_token_that_does_not_count():
    logits, ids = random_logits(2, 4, 9)
    logits.requires_grad_()
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]]).bool()
    logp, entropy = token_statistics(logits, ids)
    (masked_mean(logp, mask) + masked_mean(entropy, mask)).backward()
    assert (logits.grad[~mask] == 0).all()
    assert (logits.grad[mask].abs().sum(-1) > 0).all()


def test_B33_only_one_number_per_token_is_kept_beside_the_logits():
    logits, ids = random_logits(2, 8, 1000, dtype=torch.bfloat16)
    logits.requires_grad_()
    kept = []

    def pack(tensor):
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        logp, entropy = token_statistics(logits, ids)
    copies = [x for x in kept if x.untyped_storage().data_ptr() != logits.untyped_storage().data_ptr()]
    assert len(copies) < len(kept)
    assert max(x.numel() for x in copies) == 2 * 8
    # The plain form keeps a float32 table for each of the two.
    expected_logp, expected_entropy = full_statistics(logits.detach(), ids)
    torch.testing.assert_close(logp.double(), expected_logp, atol=1e-5, rtol=0)
    torch.testing.assert_close(entropy.double(), expected_entropy, atol=1e-5, rtol=0)


def test_B19_the_mean_entropy_counts_no_padding():
    per_token = torch.tensor([[0.8, 0.6, -1.0]])
    assert masked_mean(per_token, torch.tensor([[1, 1, 0]])).item() == pytest.approx(0.7)
    # The same with logits: ten more pads, whatever the model says there, change nothing.
    logits, ids = random_logits(1, 2, 7)
    alone = token_statistics(logits, ids)[1].mean()
    junk = torch.cat([logits, 50 * random_logits(1, 10, 7, seed=1)[0]], 1)
    _, entropy = token_statistics(junk, torch.cat([ids, torch.zeros(1, 10).long()], 1))
    mask = torch.arange(12)[None] < 2
    assert masked_mean(entropy, mask).item() == pytest.approx(alone.item())
    assert (entropy >= 0).all()
    assert entropy.mean() < 0.5 * alone


def test_token_statistics_refuse_shapes_and_temperatures_without_meaning():
    logits, ids = random_logits(2, 5, 50)
    for wrong in (ids[:, :4], ids[0], ids.unsqueeze(-1)):
        with pytest.raises(ValueError, match="logits must have the shape of ids"):
            token_statistics(logits, wrong)
    for temperature in (0.0, -1.0, NAN):
        with pytest.raises(ValueError, match="temperature must be positive"):
            token_logp(logits, ids, temperature=temperature)


def test_token_logp_is_the_first_half():
    logits, ids = random_logits(2, 5, 50)
    assert token_logp(logits, ids, temperature=0.7).equal(token_statistics(logits, ids, temperature=0.7)[0])


# --- rewards


@pytest.mark.formula("token-rewards")
def test_B24_a_price_for_leaving_the_reference_and_the_score_once():
    logp, ref_logp = row(-1, -2, -0.5), row(-1.1, -1.8, -0.8)
    ours = token_rewards(torch.tensor([2.0]), logp, ref_logp, torch.ones(1, 3).bool(), 0.1)
    assert ours[0].tolist() == pytest.approx([-0.01, 0.02, 1.97])
    assert ours.sum().item() == pytest.approx(1.98)


@pytest.mark.formula("token-rewards")
def test_the_score_lands_on_the_last_token_that_counts():
    logp, ref_logp = row(-1, -1, -1, -1), row(-1.5, -1.5, -1.5, -1.5)
    for mask, expected in [
        ([1, 1, 0, 0], [-0.1, 2.9, 0, 0]),
        ([1, 0, 0, 0], [2.9, 0, 0, 0]),
        ([1, 0, 1, 0], [-0.1, 0, 2.9, 0]),
        ([1, 1, 1, 1], [-0.1, -0.1, -0.1, 2.9]),
    ]:
        ours = token_rewards(torch.tensor([3.0]), logp, ref_logp, torch.tensor([mask]), 0.2)
        assert ours[0].tolist() == pytest.approx(expected)


@pytest.mark.parametrize(
    "kind, kl", [("k1", [0.1, -0.2]), ("k2", [0.005, 0.02]), ("k3", [math.exp(-0.1) - 0.9, math.exp(0.2) - 1.2])]
)
def test_every_estimator_of_the_kl(kind, kl):
    ours = token_rewards(torch.tensor([1.0]), row(-1, -2), row(-1.1, -1.8), torch.ones(1, 2).bool(), 0.5, kind=kind)
    assert ours[0].tolist() == pytest.approx([-0.5 * kl[0], 1 - 0.5 * kl[1]])


@pytest.mark.parametrize("hidden", [NAN, INF, -INF])
def test_what_the_mask_hides_reaches_no_reward(hidden):
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]]).bool()
    logp, ref_logp = -torch.ones(3, 3), -2 * torch.ones(3, 3)
    # The last answer is empty: nothing counts, so its score counts neither, even if it is no number.
    scores = torch.tensor([1.0, 2.0, hidden])
    ours = token_rewards(scores, hide(logp, mask, hidden), hide(ref_logp, mask, hidden), mask, 0.5)
    assert ours.tolist() == [[-0.5, 0.5, 0], [1.5, 0, 0], [0, 0, 0]]


def test_a_reward_that_is_no_number_stays_visible_where_it_counts():
    ours = token_rewards(torch.tensor([NAN]), row(-1, -1), row(-1, NAN), torch.ones(1, 2).bool(), 0.5)
    assert ours.isnan().tolist() == [[False, True]]


def test_rewards_carry_no_gradient():
    logp = row(-1, -2).requires_grad_()
    ours = token_rewards(torch.ones(1, requires_grad=True), logp, row(-1, -1), torch.ones(1, 2).bool(), 0.5)
    assert not ours.requires_grad


def test_bfloat16_log_probabilities_are_subtracted_in_float32():
    logp, ref_logp = (torch.tensor([[x]], dtype=torch.bfloat16) for x in (-3.0, -3.015625))
    ours = token_rewards(torch.tensor([1.0]), logp, ref_logp, torch.ones(1, 1).bool(), 0.1)
    assert ours.dtype == torch.float32
    assert ours.item() == pytest.approx(1 - 0.1 * 0.015625)


def test_token_rewards_refuse_what_does_not_fit():
    scores, logp, mask = torch.zeros(2), torch.zeros(2, 3), torch.ones(2, 3).bool()
    with pytest.raises(ValueError, match="ref_logp"):
        token_rewards(scores, logp, torch.zeros(2, 1), mask, 0.1)
    with pytest.raises(ValueError, match="scores"):
        token_rewards(torch.zeros(2, 1), logp, logp, mask, 0.1)
    with pytest.raises(ValueError, match="mask"):
        token_rewards(scores, logp, logp, mask[:, :2], 0.1)
    for kl_coef in (-0.1, NAN):
        with pytest.raises(ValueError, match="kl_coef"):
            token_rewards(scores, logp, logp, mask, kl_coef)
    with pytest.raises(ValueError, match="kind"):
        token_rewards(scores, logp, logp, mask, 0.1, kind="k4")


def test_a_nan_that_the_mask_hides_reaches_no_gradient():
    logits = torch.zeros(1, 3, 4)
    logits[0, 2] = NAN
    logits.requires_grad_()
    logp, entropy = token_statistics(logits, torch.tensor([[1, 2, 3]]))
    mask = torch.tensor([[True, True, False]])
    (masked_mean(logp, mask) + masked_mean(entropy, mask)).backward()
    assert torch.equal(logits.grad[0, 2], torch.zeros(4))
    assert logits.grad[0, 0].tolist() == pytest.approx([-0.125, 0.375, -0.125, -0.125])
