"""The update: the gradient is that of the book's loss token by token, and nothing that is wrong reaches a parameter."""

import math
from dataclasses import fields, replace

import pytest
import torch
from torch import tensor
from transformers import GPT2Config, GPT2LMHeadModel

from ppo_lab.files import digest
from ppo_lab.llm import ppo
from ppo_lab.llm.config import CRITIC_FREE, PPOSettings
from ppo_lab.llm.experience import Experience, collect, estimate
from ppo_lab.llm.ppo import (
    NonFiniteError,
    Step,
    gather_gradients,
    kl_per_response,
    llm_ppo_iteration,
    make_controller,
    memory_limit,
    metrics,
    prompt_batch,
    sample_table,
    train,
    update,
)
from ppo_lab.llm.rewards import FunctionReward
from ppo_lab.llm.roles import Roles
from ppo_lab.stability import AdaptiveKLController, FixedKLController

ALL = torch.arange(8)


def hash_of(engine):
    return digest(engine.module.state_dict())


def hashes(roles):
    return hash_of(roles.actor), hash_of(roles.critic)


def gradient_of(roles):
    """All gradients of actor and critic in one row; what has none counts as 0."""
    modules = [engine.module for engine in (roles.actor, roles.critic) if engine is not None]
    parameters = [p for module in modules for p in module.parameters()]
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters])


def experience_of(roles, prompts, settings, iteration=0, kl_coef=0.1):
    return estimate(collect(prompts, roles, settings, iteration), roles, settings, kl_coef)


def moved(small, shake, **changes):
    """Roles that have moved since the experience was made, so that no ratio is 1 and no value is the old one."""
    roles, prompts, settings = small(**changes)
    shake(roles.actor.module, seed=1)
    if roles.critic is not None:
        shake(roles.critic.module, seed=2)
    experience = experience_of(roles, prompts, settings)
    shake(roles.actor.module, seed=3)
    if roles.critic is not None:
        shake(roles.critic.module, seed=4)
    return roles, settings, experience


# --- the gradient


def slow_losses(roles, experience, settings):
    """The losses of each answer summed over its tokens, each read alone and each token by the book's formula."""
    low, high = 1 - settings.eps_clip, 1 + (settings.eps_clip_high or settings.eps_clip)
    losses = []
    for i in range(len(experience.mask)):
        prompt = experience.prompt_ids[i][experience.prompt_mask[i]]
        ids = torch.cat([prompt, experience.response_ids[i][experience.mask[i]]])[None]
        logits = roles.actor.module.lm(input_ids=ids).logits[0] / settings.temperature
        log_probs = logits.log_softmax(-1)
        if not settings.with_critic:
            values = torch.zeros(ids.shape[1])
        elif roles.critic is None:
            hidden = roles.actor.module.lm.base_model(input_ids=ids).last_hidden_state[0]
            values = roles.actor.module.value_head(hidden).squeeze(-1)
        else:
            hidden = roles.critic.module.backbone(input_ids=ids).last_hidden_state[0]
            values = roles.critic.module.head(hidden).squeeze(-1)
        loss = 0.0
        for t in range(ids.shape[1] - len(prompt)):
            before = len(prompt) - 1 + t
            logp, v = log_probs[before, ids[0, before + 1]], values[before]
            advantage, v_old, v_target = (
                x[i, t] for x in (experience.advantages, experience.values, experience.returns)
            )
            ratio = (logp - experience.old_logp[i, t]).exp()
            gain = torch.min(ratio * advantage, ratio.clamp(low, high) * advantage)
            if settings.dual_clip is not None and advantage < 0:
                gain = torch.max(gain, settings.dual_clip * advantage)
            errors = [(v - v_target) ** 2]
            if settings.eps_clip_value is not None:
                c = settings.eps_clip_value
                errors.append((v_old + (v - v_old).clamp(-c, c) - v_target) ** 2)
            entropy = -(log_probs[before].exp() * log_probs[before]).sum()
            d = logp - experience.ref_logp[i, t]
            kl = {"k1": d, "k2": 0.5 * d**2, "k3": (-d).exp() - 1 + d}[settings.kl_loss_kind]
            loss = loss - gain
            if settings.with_critic:
                loss = loss + settings.value_coef * 0.5 * torch.stack(errors).max()
            loss = loss - settings.entropy_coef * entropy + settings.kl_loss_coef * kl
        losses.append(loss)
    return losses


def slow_gradient(roles, loss):
    roles.actor.discard()
    if roles.critic is not None:
        roles.critic.discard()
    loss.backward()
    return gradient_of(roles)


VARIANTS = [
    {},
    {"critic": "shared"},
    {"temperature": 0.7},
    {"gradient_checkpointing": True},
    {"value_coef": 0.3, "eps_clip_value": None},
    {"eps_clip": 0.05, "eps_clip_high": 0.4, "dual_clip": 1.1, "eps_clip_value": 0.01},
    {"entropy_coef": 0.3},
    {"entropy_coef": 0.3, "critic": "shared", "kl_loss_coef": 0.5},
    *[{"kl_loss_coef": 0.5, "kl_loss_kind": kind} for kind in ("k1", "k2", "k3")],
    *[{"advantage": kind, "group_size": 2, "kl_loss_coef": 0.5} for kind in ("grpo", "rloo", "reinforce++")],
]


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_the_gradient_is_that_of_the_book_s_loss_averaged_over_all_tokens(small, shake, changes):
    roles, settings, experience = moved(small, shake, **changes)
    gather_gradients(roles, experience, ALL, settings)
    gradient = gradient_of(roles)
    expected = slow_gradient(roles, sum(slow_losses(roles, experience, settings)) / experience.mask.sum())
    assert gradient.abs().max() > 0.01
    torch.testing.assert_close(gradient, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("critic", ["actor", "shared"])
@pytest.mark.parametrize("micro_batch_size", [1, 2, 3, 4])
def test_B34_the_micro_batch_size_is_no_mathematics(small, shake, micro_batch_size, critic):
    roles, settings, experience = moved(small, shake, critic=critic, entropy_coef=0.1, kl_loss_coef=0.2)
    whole = gather_gradients(roles, experience, ALL, settings)
    expected = gradient_of(roles)
    roles.actor.discard()
    if roles.critic is not None:
        roles.critic.discard()
    parts = gather_gradients(roles, experience, ALL, replace(settings, micro_batch_size=micro_batch_size))
    torch.testing.assert_close(gradient_of(roles), expected, atol=1e-5, rtol=0)
    for item in fields(Step):
        assert getattr(parts, item.name) == pytest.approx(getattr(whole, item.name), abs=1e-5), item.name


def test_B34_the_mean_runs_over_tokens_and_is_not_the_mean_of_the_answers_means(small, shake):
    roles, settings, experience = moved(small, shake, micro_batch_size=1)
    lengths = experience.mask.sum(-1)
    assert len(set(lengths.tolist())) > 2
    gather_gradients(roles, experience, ALL, settings)
    gradient = gradient_of(roles)
    losses = torch.stack(slow_losses(roles, experience, settings))
    token_mean = slow_gradient(roles, losses.sum() / lengths.sum())
    answer_means = slow_gradient(roles, torch.stack(slow_losses(roles, experience, settings)).div(lengths).mean())
    torch.testing.assert_close(gradient, token_mean, atol=1e-5, rtol=1e-4)
    assert (gradient - answer_means).norm() > 0.1 * gradient.norm()


def test_B34_nothing_is_carried_from_one_minibatch_into_the_next(small, shake):
    # 8 answers in minibatches of 6: the last one has 2, the next epoch begins with nothing gathered.
    roles, settings, experience = moved(small, shake, minibatch_size=6, micro_batch_size=4, ratio_tolerance=None)
    assert len(update(roles, experience, settings, iteration=0)) == 2 * settings.k_epochs
    assert not gradient_of(roles).any()


def every_first_token(roles):
    """One answer for each of the six tokens: an expectation over π can be taken by hand."""
    ids = torch.arange(6)[:, None]
    mask = torch.ones_like(ids, dtype=torch.bool)
    prompt = torch.zeros_like(ids)
    zeros = torch.zeros(6, 1)
    with torch.no_grad():
        logp, ref_logp = (
            actor.lm(input_ids=prompt[:1]).logits[0, 0].log_softmax(-1)[:, None]
            for actor in (roles.actor.module, roles.reference)
        )
    numbers = {"scores": zeros[:, 0], "values": zeros, "final_values": zeros[:, 0], "rewards": zeros}
    numbers |= {"sampler_logp": logp, "old_logp": logp, "ref_logp": ref_logp, "advantages": zeros, "returns": zeros}
    return Experience(prompt, mask, ids, mask, mask[:, 0], **numbers)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_the_expected_gradient_of_each_kl_loss(small, shake, kind):
    """k1 as a loss pulls nowhere, k2 has the gradient of KL(π ‖ ref), k3 that of KL(ref ‖ π)."""
    roles, _, settings = small(kl_loss_coef=1.0, kl_loss_kind=kind)
    shake(roles.actor.module)
    experience = every_first_token(roles)
    gradient = 0.0
    for i in range(6):
        gather_gradients(roles, experience, tensor([i]), settings)
        gradient = gradient + experience.old_logp[i].exp() * gradient_of(roles)
        roles.actor.discard()
        roles.critic.discard()
    log_pi = roles.actor.module.lm(input_ids=tensor([[0]])).logits[0, 0].log_softmax(-1)
    log_ref = experience.ref_logp.squeeze(-1)
    forward, reverse = (log_ref.exp() * (log_ref - log_pi)).sum(), (log_pi.exp() * (log_pi - log_ref)).sum()
    expected = slow_gradient(roles, {"k1": 0 * reverse, "k2": reverse, "k3": forward}[kind])
    torch.testing.assert_close(gradient, expected, atol=1e-5, rtol=1e-4)
    assert kind == "k1" or expected.norm() > 0.1


# --- one iteration


def gpt2_with_dropout():
    config = GPT2Config(
        vocab_size=6, n_positions=32, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=1,
        resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1, initializer_range=0.3,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return GPT2LMHeadModel(config).train()


@pytest.mark.parametrize("minibatch_size", [1, 8])
@pytest.mark.parametrize("score_batch_size", [1, 8])
def test_B20_the_ratio_is_1_as_long_as_no_step_was_taken(small, minibatch_size, score_batch_size):
    lm = gpt2_with_dropout()
    changes = {"minibatch_size": minibatch_size, "score_batch_size": score_batch_size, "lr": 1e-12}
    roles, prompts, settings = small(lm, **changes)
    _, steps = llm_ppo_iteration(prompts, roles, make_controller(settings), settings)
    assert len(steps) == 2 * 8 // minibatch_size
    for step in steps:
        assert step.ratio_deviation < 1e-5 and abs(step.ratio_max - 1) < 1e-5
        assert step.clip_fraction == step.clip_fraction_outside == 0
        assert step.approx_kl < 1e-6
    # Minus the mean of whitened advantages; those of a single answer have another mean.
    assert abs(sum(s.policy_loss for s in steps)) < 1e-5 or minibatch_size == 1
    assert lm.training


def test_B20_dropout_in_the_update_is_noticed_before_a_step(small):
    torch.manual_seed(0)
    roles, prompts, settings = small(gpt2_with_dropout())
    for part in roles.actor.module.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.1
    before = hashes(roles)
    with pytest.raises(
        ValueError, match=r"ratio must be 1 before the first step: \|log ρ\| is .*, ratio_tolerance 0.01"
    ):
        llm_ppo_iteration(prompts, roles, make_controller(settings), settings)
    assert hashes(roles) == before


def test_another_temperature_in_training_than_in_sampling_is_noticed_before_a_step(small):
    roles, prompts, settings = small()
    experience = experience_of(roles, prompts, settings)
    before = hashes(roles)
    with pytest.raises(ValueError, match="do not compute the same log-probabilities"):
        update(roles, experience, replace(settings, temperature=0.7), 0)
    assert hashes(roles) == before
    update(roles, experience, replace(settings, temperature=0.7, ratio_tolerance=None), 0)
    assert hashes(roles) != before


@pytest.mark.parametrize("micro_batch_size", [1, 8])
def test_B21_in_bfloat16_the_first_ratio_is_1_to_a_tenth(small, micro_batch_size):
    changes = {"bf16": True, "score_batch_size": 8, "micro_batch_size": micro_batch_size, "ratio_tolerance": 0.1}
    roles, prompts, settings = small(**changes)
    for row, _ in train(prompts, roles, settings):
        assert row["ratio_deviation"] < 0.1
        assert all(math.isfinite(x) for x in row.values())


def scripted_kl(monkeypatch, *measured):
    """Let the minibatches report these approx_kl; returns the list that counts how many were asked."""
    loss_of, values, asked = ppo.ppo_loss, iter(measured), []

    def scripted(*args, **kwargs):
        asked.append(1)
        return loss_of(*args, **kwargs)._replace(approx_kl=tensor(next(values)))

    monkeypatch.setattr(ppo, "ppo_loss", scripted)
    return asked


def test_B16_the_step_over_the_limit_is_refused_and_so_are_all_later_ones(small, monkeypatch):
    roles, prompts, settings = small(stop_kl=0.0225, k_epochs=3, minibatch_size=4, iterations=1)
    asked = scripted_kl(monkeypatch, 0.010, 0.020, 0.030, *[0.001] * 20)
    stepped = []
    for engine in (roles.actor, roles.critic):
        engine.optimizer.register_step_post_hook(lambda optimizer, *_: stepped.append(optimizer))
    [(row, _)] = train(prompts, roles, settings)
    assert len(asked) == 3
    assert stepped == [roles.actor.optimizer, roles.critic.optimizer] * 2
    assert row["updates"] == 2 and row["approx_kl"] == pytest.approx(0.015)
    assert not gradient_of(roles).any()


def test_an_update_without_a_single_step_is_recorded_as_such(small, monkeypatch):
    roles, prompts, settings = small(stop_kl=0.01, iterations=1)
    scripted_kl(monkeypatch, 0.02)
    before = hashes(roles)
    [(row, _)] = train(prompts, roles, settings)
    assert row["updates"] == 0
    assert all(math.isnan(row[name]) for name in ("policy_loss", "value_loss", "grad_norm", "ratio_max"))
    assert hashes(roles) == before


def test_every_epoch_goes_through_all_answers_once_in_another_order(small, monkeypatch):
    roles, prompts, settings = small(k_epochs=2, minibatch_size=3)
    seen, gather = [], ppo.gather_gradients

    def spy(roles, experience, rows, *args, **kwargs):
        seen.append(rows.tolist())
        return gather(roles, experience, rows, *args, **kwargs)

    monkeypatch.setattr(ppo, "gather_gradients", spy)
    experience = experience_of(roles, prompts, settings)
    for iteration in (0, 1, 0):
        update(roles, experience, replace(settings, ratio_tolerance=None), iteration)
    assert [len(rows) for rows in seen[:6]] == [3, 3, 2, 3, 3, 2]
    orders = [[i for rows in seen[first : first + 3] for i in rows] for first in range(0, 18, 3)]
    assert all(sorted(order) == list(range(8)) for order in orders)
    assert len({tuple(order) for order in orders[:4]}) == 4
    assert orders[4:] == orders[:2]


def test_the_learning_rates_rise_in_equal_parts(small):
    roles, prompts, settings = small(warmup_iterations=4, iterations=6, lr=1e-3, critic_lr=1e-2)
    rates = []
    for _ in train(prompts, roles, settings):
        rates.append([engine.optimizer.param_groups[0]["lr"] for engine in (roles.actor, roles.critic)])
    expected = [[1e-3 * scale, 1e-2 * scale] for scale in (0.25, 0.5, 0.75, 1.0, 1.0, 1.0)]
    torch.testing.assert_close(tensor(rates), tensor(expected))


def test_critic_warm_up_leaves_the_actor_untouched(small):
    roles, prompts, settings = small(critic_warmup=2, iterations=3)
    seen = [hashes(roles)]
    norms = []
    for row, _ in train(prompts, roles, settings):
        seen.append(hashes(roles))
        norms.append(row["grad_norm"])
    actors, critics = zip(*seen, strict=True)
    assert actors[0] == actors[1] == actors[2] != actors[3]
    assert len(set(critics)) == 4
    assert norms[:2] == [0, 0] and norms[2] > 0


@pytest.mark.parametrize("max_grad_norm", [1e-3, 1e3])
def test_the_norms_recorded_are_those_before_the_clip(small, shake, max_grad_norm):
    roles, settings, experience = moved(small, shake, max_grad_norm=max_grad_norm, k_epochs=1, ratio_tolerance=None)
    gather_gradients(roles, experience, ALL, settings)
    expected = [
        sum(float(p.grad.square().sum()) for p in engine.module.parameters() if p.grad is not None) ** 0.5
        for engine in (roles.actor, roles.critic)
    ]
    ppo.discard(roles)
    [step] = update(roles, experience, settings, 0)
    assert [step.grad_norm, step.critic_grad_norm] == pytest.approx(expected, rel=1e-4)
    assert min(expected) > 0.01


@pytest.mark.parametrize("critic", ["actor", "shared"])
def test_the_critic_learns_the_returns(small, critic):
    changes = {"critic": critic, "k_epochs": 60, "eps_clip_value": None, "lr": 1e-2, "critic_lr": 1e-2}
    roles, prompts, settings = small(**changes)
    assert (roles.critic is None) == (critic == "shared")
    experience = experience_of(roles, prompts, settings)
    assert not experience.values.any()
    steps = update(roles, experience, settings, 0)
    assert steps[-1].value_loss < 0.25 * steps[0].value_loss
    # Before the first step V = 0, and the loss is half the mean square of the returns.
    assert steps[0].value_loss == pytest.approx(float(0.5 * experience.returns[experience.mask].square().mean()))


def test_B10_a_single_answer_of_a_single_token_trains_the_critic_and_stays_finite(small):
    roles, prompts, settings = small(max_new_tokens=1, whiten_scores=False, kl_coef=0.0, k_epochs=1)
    experience, steps = llm_ppo_iteration(prompts[:1], roles, make_controller(settings), settings)
    assert experience.mask.shape == (1, 1)
    assert experience.advantages.tolist() == [[0]]
    assert len(steps) == 1 and math.isfinite(steps[0].value_loss)
    assert all(bool(p.isfinite().all()) for engine in (roles.actor, roles.critic) for p in engine.module.parameters())


def test_B10_a_last_minibatch_of_one_answer_stays_finite(small):
    roles, prompts, settings = small(minibatch_size=4)
    _, steps = llm_ppo_iteration(prompts[:5], roles, make_controller(settings), settings)
    assert len(steps) == 2 * settings.k_epochs
    assert all(bool(p.isfinite().all()) for engine in (roles.actor, roles.critic) for p in engine.module.parameters())


@pytest.mark.parametrize("whiten_scores", [False, True])
def test_B11_scores_that_are_all_equal_teach_the_actor_nothing(small, whiten_scores):
    # λ = 1 and no KL: every advantage is the score itself, and whitening leaves 0.
    changes = {"gae_lambda": 1.0, "kl_coef": 0.0, "whiten_scores": whiten_scores}
    roles, prompts, settings = small(reward=lambda *args: torch.full((8,), 3.0), **changes)
    before = hash_of(roles.actor)
    experience, steps = llm_ppo_iteration(prompts, roles, make_controller(settings), settings)
    assert not experience.advantages.any()
    assert all(step.grad_norm == 0 for step in steps)
    assert hash_of(roles.actor) == before


def test_B27_answers_that_end_at_once_are_counted_and_trained_on(small):
    # One point for each place in the vocabulary.
    roles, prompts, settings = small(reward=lambda *given: given[2][:, 0].float(), iterations=1, kl_coef=0.0)
    # Whatever comes first ends the answer.
    roles.eos_token_ids = list(range(6))
    before = hashes(roles)
    [(row, experience)] = train(prompts, roles, settings)
    assert experience.mask.tolist() == [[True]] * 8
    assert experience.rewards.tolist() == experience.scores[:, None].tolist()
    assert row["empty"] == 1 and row["response_length"] == 1 and row["unfinished"] == 0
    assert all(new != old for new, old in zip(hashes(roles), before, strict=True))


# --- KL control


@pytest.mark.parametrize(("kl", "expected"), [(12, 0.201024), (3, 0.198976), (6.3, 0.200256), (6, 0.2)])
def test_B22_B23_the_coefficient_moves_once_per_iteration_by_the_number_of_answers(small, monkeypatch, kl, expected):
    roles, prompts, settings = small(
        adaptive_kl=True, kl_coef=0.2, target_kl=6.0, kl_horizon=10_000, k_epochs=4, minibatch_size=64,
        micro_batch_size=64, max_new_tokens=1,
    )  # fmt: skip
    moves, move = [], AdaptiveKLController.update

    def spy(self, *args, **kwargs):
        moves.append(kwargs)
        move(self, *args, **kwargs)

    monkeypatch.setattr(AdaptiveKLController, "update", spy)
    monkeypatch.setattr(ppo, "kl_per_response", lambda experience: kl)
    controller = make_controller(settings)
    _, steps = llm_ppo_iteration([*prompts] * 32, roles, controller, settings, iteration=1000)
    assert len(steps) == 16
    assert moves == [{"n_steps": 256}]
    assert controller.kl_coef == pytest.approx(expected, abs=1e-6)


def test_B23_a_fixed_coefficient_stays(small, monkeypatch):
    roles, prompts, settings = small(adaptive_kl=False, kl_coef=0.2)
    monkeypatch.setattr(ppo, "kl_per_response", lambda experience: 12.0)
    controller = make_controller(settings)
    llm_ppo_iteration(prompts, roles, controller, settings)
    assert isinstance(controller, FixedKLController) and controller.kl_coef == 0.2


def test_B35_the_state_of_the_controller_is_its_coefficient():
    settings = PPOSettings(adaptive_kl=True, kl_coef=0.2, target_kl=6.0, kl_horizon=10_000)
    controller = make_controller(settings)
    for _ in range(4):
        controller.update(12.0, n_steps=256)
    assert controller.kl_coef == pytest.approx(0.204128, abs=1e-6)
    resumed = make_controller(settings)
    resumed.load_state_dict(controller.state_dict())
    resumed.update(3.0, n_steps=256)
    assert resumed.kl_coef == pytest.approx(0.203083, abs=1e-6)


def test_the_row_holds_the_coefficient_that_priced_its_rewards(small):
    changes = {"adaptive_kl": True, "kl_coef": 0.5, "target_kl": 6.0, "kl_horizon": 8.0, "iterations": 2}
    roles, prompts, settings = small(reward=lambda *args: torch.zeros(8), **changes)
    rows, experiences = zip(*train(prompts, roles, settings), strict=True)
    # A KL of 0 is far below the target: 20 % down within the horizon of 8 answers.
    assert [row["kl_coef"] for row in rows] == pytest.approx([0.5, 0.4])
    for row, x in zip(rows, experiences, strict=True):
        torch.testing.assert_close(x.rewards, -row["kl_coef"] * (x.old_logp - x.ref_logp))


# --- the reference


def test_B32_the_reference_stays_and_the_actor_walks_away_from_it(small):
    roles, prompts, settings = small(lr=1e-2)
    reference, actor = digest(roles.reference.state_dict()), hash_of(roles.actor)
    storages = {p.data_ptr() for p in roles.actor.module.parameters()}
    assert not storages & {p.data_ptr() for p in roles.reference.parameters()}
    kls = [row["kl_per_response"] for row, _ in train(prompts * 8, roles, replace(settings, batch_size=64))]
    assert len(kls) == 3
    assert abs(kls[0]) < 1e-5
    assert digest(roles.reference.state_dict()) == reference
    assert hash_of(roles.actor) != actor
    last = collect(prompts * 32, roles, settings, iteration=3)
    assert kl_per_response(last) > 0.01
    assert not roles.reference.training
    assert all(p.grad is None and not p.requires_grad for p in roles.reference.parameters())


def test_a_reference_that_is_changed_from_outside_is_noticed_at_the_end(small, shake):
    roles, prompts, settings = small()
    run = train(prompts, roles, settings)
    next(run)
    shake(roles.reference, 1e-6)
    with pytest.raises(ValueError, match="the reference must not change in training"):
        list(run)


def test_the_reference_can_follow_every_other_iteration(small):
    roles, prompts, settings = small(refresh_reference_every=2, iterations=3, lr=1e-2)
    same, kls = [], []
    for row, _ in train(prompts, roles, settings):
        same.append(digest(roles.reference.lm.state_dict()) == digest(roles.actor.module.lm.state_dict()))
        kls.append(row["kl_per_response"])
    assert same == [False, True, False]
    assert abs(kls[0]) < 1e-5 and abs(kls[1]) > 1e-3 and abs(kls[2]) < 1e-5
    storages = {p.data_ptr() for p in roles.actor.module.parameters()}
    assert not storages & {p.data_ptr() for p in roles.reference.parameters()}


# --- what is not finite


def named_in(error):
    return set(map(int, str(error.value).partition("[")[2].strip("]").split(",")))


def assert_holding(named, experience, token):
    """The answers named are those whose input holds a token, with or without those that only end in it."""
    ids, real = experience.ids_and_mask()
    rows = [row[keep].tolist() for row, keep in zip(ids, real, strict=True)]
    inputs, whole = ({i for i, row in enumerate(rows) if token in row[:stop]} for stop in (-1, None))
    assert inputs <= named <= whole
    assert 0 < len(whole) < len(rows)


def spoil(module, token):
    with torch.no_grad():
        module.get_input_embeddings().weight[token] = math.nan


@pytest.mark.parametrize("micro_batch_size", [2, 8])
def test_a_critic_that_is_not_finite_is_named_before_any_parameter_moves(small, micro_batch_size):
    roles, prompts, settings = small(micro_batch_size=micro_batch_size, minibatch_size=4)
    spoil(roles.critic.module.backbone, token=5)
    before = hashes(roles)
    with pytest.raises(NonFiniteError, match=r"^values is not finite in the answers \[[\d, ]+\]$") as error:
        next(train(prompts, roles, settings))
    assert_holding(named_in(error), error.value.experience, 5)
    assert hashes(roles) == before


def test_an_actor_that_is_not_finite_is_named_before_any_parameter_moves(small):
    roles, prompts, settings = small()
    experience = experience_of(roles, prompts, settings)
    spoil(roles.actor.module.lm, token=5)
    before = hashes(roles)
    with pytest.raises(NonFiniteError, match=r"^logp is not finite in the answers \[") as error:
        update(roles, experience, settings, 0)
    assert_holding(named_in(error), experience, 5)
    assert error.value.experience is experience
    assert hashes(roles) == before
    assert not gradient_of(roles).any()


@pytest.mark.parametrize("spoilt", ["actor", "critic"])
def test_a_gradient_that_is_not_finite_stops_both_models(small, spoilt):
    roles, prompts, settings = small()
    name, parameter = list(getattr(roles, spoilt).module.named_parameters())[-1]
    parameter.register_hook(lambda gradient: gradient * math.nan)
    before = hashes(roles)
    with pytest.raises(NonFiniteError, match=f"^the gradient of {name} is not finite$") as error:
        next(train(prompts, roles, settings))
    assert sorted(error.value.rows.tolist()) == list(range(8))
    assert hashes(roles) == before
    assert not gradient_of(roles).any()


def test_a_step_that_was_sound_is_kept_when_a_later_one_is_not(small):
    roles, prompts, settings = small(minibatch_size=4, k_epochs=1)
    parameter = next(roles.actor.module.parameters())
    calls = iter([1.0, math.nan])
    parameter.register_hook(lambda gradient: gradient * next(calls))
    stepped = []
    roles.actor.optimizer.register_step_post_hook(lambda *_: stepped.append(hash_of(roles.actor)))
    with pytest.raises(NonFiniteError):
        next(train(prompts, roles, settings))
    assert stepped == [hash_of(roles.actor)]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_reward_function_that_returns_no_number_is_refused(small, tokenizer, bad):
    reward = FunctionReward(lambda prompts, responses: [bad if p == "b c" else 1.0 for p in prompts], tokenizer)
    roles, prompts, settings = small(reward=reward)
    before = hashes(roles)
    with pytest.raises(ValueError, match="must return one finite number per answer"):
        next(train(prompts, roles, settings))
    assert hashes(roles) == before


def test_a_score_that_is_not_finite_is_named_before_it_spreads(small):
    scores = tensor([1.0, 1, 1, math.nan, 1, 1, 1, 1])
    roles, prompts, settings = small(reward=lambda *args: scores, whiten_scores=True)
    before = hashes(roles)
    with pytest.raises(NonFiniteError, match=r"^scores is not finite in the answers \[3\]$"):
        next(train(prompts, roles, settings))
    assert hashes(roles) == before


# --- prompts


def test_every_prompt_is_asked_once_a_round_in_another_order():
    prompts, settings = [[i] for i in range(10)], PPOSettings(batch_size=4)
    asked = [prompt[0] for iteration in range(10) for prompt in prompt_batch(prompts, settings, iteration)]
    rounds = [asked[first : first + 10] for first in range(0, 40, 10)]
    assert all(sorted(order) == list(range(10)) for order in rounds)
    assert len({tuple(order) for order in rounds}) == 4


def test_the_order_of_the_prompts_depends_on_the_seed_alone():
    prompts = [[i] for i in range(10)]
    batches = [prompt_batch(prompts, PPOSettings(batch_size=8, seed=seed), 3) for seed in (1, 1, 2)]
    assert batches[0] == batches[1] != batches[2]


def test_a_batch_can_hold_more_than_all_prompts():
    batch = prompt_batch([[0], [1], [2]], PPOSettings(batch_size=8), 0)
    assert sorted(batch[:3]) == sorted(batch[3:6]) == [[0], [1], [2]]
    assert len(batch) == 8 and batch[6] != batch[7]


# --- the record


def numbers_of(row):
    """All but how fast the machine was and how much memory it took."""
    machine = ("tokens_per_second", "memory_gb")
    return {name: x for name, x in row.items() if name not in machine and not name.startswith("seconds_")}


def test_one_seed_gives_one_run_and_another_seed_another(small):
    runs = []
    for seed in (3, 3, 4):
        roles, prompts, settings = small(seed=seed)
        torch.manual_seed(len(runs))
        runs.append([numbers_of(row) for row, _ in train(prompts, roles, settings)])
    assert runs[0] == runs[1]
    assert all(row != other for row, other in zip(runs[0], runs[2], strict=True))


def test_a_row_by_hand():
    old_logp = tensor([[-1.0, -2.0, -0.5], [-1.0, 0.0, 0.0], [-1.0, -1.0, -1.0], [-0.25, -1.0, 0.0]])
    ref_logp = tensor([[-1.1, -1.8, -0.8], [-1.5, 0.0, 0.0], [-1.0, -1.0, -1.0], [-0.25, -1.0, 0.0]])
    experience = Experience(
        prompt_ids=tensor([[0]] * 4),
        prompt_mask=tensor([[True]] * 4),
        response_ids=tensor([[2, 3, 1], [1, 1, 1], [2, 2, 2], [2, 1, 1]]),
        mask=tensor([[1, 1, 1], [1, 0, 0], [1, 1, 1], [1, 1, 0]]).bool(),
        finished=tensor([True, True, False, True]),
        scores=tensor([2.0, 0.0, 1.0, 1.0]),
        sampler_logp=old_logp - tensor([[0.1], [0.0], [0.0], [0.0]]),
        old_logp=old_logp,
        ref_logp=ref_logp,
        values=tensor([[1.0, 1.0, 1.0], [0.0, 9.0, 9.0], [1.0, 1.0, 1.0], [0.0, 0.0, 9.0]]),
        final_values=torch.zeros(4),
        rewards=None,
        advantages=torch.zeros(4, 3),
        returns=tensor([[3.0, 3.0, 3.0], [0.0, 9.0, 9.0], [1.0, 1.0, 1.0], [0.0, 0.0, 9.0]]),
    )
    settings = PPOSettings(scale_rewards=True, reward_clip=None, missing_eos_penalty=1.0)
    roles = Roles(None, None, None, None, None, [1], reward_mean=1.0, reward_std=2.0)
    steps = [
        Step(policy_loss=1.0, approx_kl=0.1, ratio_max=1.5, ratio_deviation=0.0, grad_norm=2.0),
        Step(policy_loss=2.0, approx_kl=0.3, ratio_max=1.2, ratio_deviation=0.4, grad_norm=4.0),
    ]
    row = metrics(experience, steps, roles, settings)
    # KL: 0.1 − 0.2 + 0.3 and 0.5 over four answers and nine tokens. Scores: ½, −½, 0 − 1, 0.
    # Returns 3 three times, 0 three times, 1 three times: variance (3·25/9 + 3·16/9 + 3·1/9)/8 = 1.75. Returns minus
    # values: 2 three times and 0 six times: variance (3·16/9 + 6·4/9)/8 = 1.
    # The sampler is 0.1 nats off on three of nine tokens: (e^0.1 − 1 − 0.1)/3.
    expected = {
        "scaled_score": -0.25, "kl_per_response": 0.175, "kl_per_token": 0.7 / 9, "policy_loss": 1.5,
        "approx_kl": 0.2, "ratio_max": 1.5, "ratio_deviation": 0.0, "grad_norm": 3.0, "updates": 2,
        "explained_variance": 1 - 1 / 1.75, "advantage_std": 1.0, "response_length": 2.25, "unfinished": 0.25,
        "empty": 0.25, "sampler_kl": (math.exp(0.1) - 1.1) / 3,
    }  # fmt: skip
    assert {name: row[name] for name in expected} == pytest.approx(expected, abs=1e-6)


def verdict(prompts, responses, finished):
    return {"n_words": [float(len(text.split())) for text in responses], "ended": [float(x) for x in finished]}


def test_a_judge_adds_its_means_and_training_does_not_see_them(small):
    roles, prompts, settings = small()
    judged = list(train(prompts, roles, settings, judge=verdict))
    roles, prompts, settings = small()
    plain = list(train(prompts, roles, settings))
    for (row, experience), (other, _) in zip(judged, plain, strict=True):
        words = int(((experience.response_ids >= 2) & experience.mask).sum())
        assert row["n_words"] == words / 8
        assert row["ended"] == 1 - row["unfinished"]
        assert list(row)[:4] == ["iteration", "score", "n_words", "ended"]
        assert row["score"] == float(experience.scores.mean())
        columns = {"n_words", "ended"}
        assert {name: x for name, x in numbers_of(row).items() if name not in columns} == numbers_of(other)


def test_the_table_of_samples_shows_text_score_kl_and_verdict(small, shake):
    roles, prompts, settings = small()
    shake(roles.actor.module)
    experience = collect(prompts, roles, settings, 0)
    table = sample_table(experience, roles, verdict, n_samples=3)
    assert [line["prompt"] for line in table] == ["", "a", "b c"]
    for i, line in enumerate(table):
        assert list(line) == ["prompt", "response", "score", "kl", "n_words", "ended"]
        assert line["score"] == line["response"].split().count("a") == float(experience.scores[i])
        assert line["n_words"] == len(line["response"].split())
        gap = (experience.old_logp[i] - experience.ref_logp[i])[experience.mask[i]]
        assert line["kl"] == pytest.approx(float(gap.sum()), abs=1e-5)
    assert len(sample_table(experience, roles, None, n_samples=100)) == 8


# --- without a critic


def test_each_prompt_is_answered_group_size_times_by_neighbours(small):
    roles, prompts, settings = small(advantage="rloo", group_size=4)
    experience, _ = llm_ppo_iteration(prompts[:2], roles, make_controller(settings), settings)
    asked = [ids[mask].tolist() for ids, mask in zip(experience.prompt_ids, experience.prompt_mask, strict=True)]
    assert asked == [prompts[0]] * 4 + [prompts[1]] * 4
    answers = [ids[mask].tolist() for ids, mask in zip(experience.response_ids, experience.mask, strict=True)]
    assert all(len({tuple(x) for x in group}) > 1 for group in (answers[:4], answers[4:]))


def test_an_iteration_asks_batch_size_over_group_size_prompts():
    settings = PPOSettings(batch_size=6, group_size=3)
    prompts = [[n] for n in range(4)]
    asked = [prompt_batch(prompts, settings, iteration) for iteration in range(2)]
    assert [len(batch) for batch in asked] == [2, 2]
    assert sorted(ids for batch in asked for ids in batch) == prompts


@pytest.mark.parametrize("minibatch_size", [8, 3])
@pytest.mark.parametrize("micro_batch_size", [1, 3])
def test_a_group_may_be_torn_by_minibatches_and_micro_batches(small, shake, minibatch_size, micro_batch_size):
    # The advantages are settled before anything is divided, so the gradient of some rows is theirs alone.
    rows = torch.arange(8)[:minibatch_size]
    gradients = []
    for size in (micro_batch_size, 8):
        roles, settings, experience = moved(small, shake, advantage="grpo", group_size=4, micro_batch_size=size)
        gather_gradients(roles, experience, rows, settings)
        gradients.append(gradient_of(roles))
    torch.testing.assert_close(*gradients, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", CRITIC_FREE)
def test_the_record_of_a_run_without_critic_says_nan_where_a_critic_would_speak(small, kind):
    roles, prompts, settings = small(advantage=kind, group_size=4)
    before = hash_of(roles.actor)
    row, experience = list(train(prompts, roles, settings))[-1]
    assert hash_of(roles.actor) != before
    nan = {name for name, x in row.items() if not math.isfinite(x)}
    assert nan == {"value_loss", "critic_grad_norm", "explained_variance"}
    greedy = int(experience.baseline_lengths[::4].sum()) if kind == "remax" else 0
    assert row["generated_tokens"] == int(experience.mask.sum()) + greedy


def test_grpo_s_advantage_of_a_group_that_is_all_alike_moves_nothing(small):
    def always_one(prompt_ids, prompt_mask, response_ids, mask):
        return torch.ones(len(mask))

    roles, prompts, settings = small(reward=always_one, advantage="grpo", group_size=4, kl_coef=0.0)
    before = hash_of(roles.actor)
    llm_ppo_iteration(prompts[:2], roles, make_controller(settings), settings)
    assert hash_of(roles.actor) == before


def test_the_first_minibatch_sees_the_policy_that_sampled(small):
    roles, prompts, settings = small(minibatch_size=4, lr=0.1)
    experience, steps = llm_ppo_iteration(prompts, roles, make_controller(settings), settings)
    row = metrics(experience, steps, roles, settings)
    assert row["first_approx_kl"] == steps[0].approx_kl < 1e-9
    assert row["approx_kl"] > 1e-3


def test_the_memory_there_is_is_that_of_the_container(small, monkeypatch):
    roles, _, _ = small()
    assert 1e8 < memory_limit(roles) < 1e14
    monkeypatch.setattr(ppo, "container_limit", lambda: 5e7)
    assert memory_limit(roles) == 5e7
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert memory_limit(roles) == 2.5e7
