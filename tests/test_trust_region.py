"""Trust region: hand values, the Fisher matrix built in full, and the rule of the adaptive penalty."""

import math
from itertools import pairwise

import pytest
import torch
from torch import nn, tensor

from ppo_lab.importance_sampling import importance_ratio, surrogate
from ppo_lab.tabular import corridor
from ppo_lab.trust_region import (
    AdaptivePenalty,
    categorical_kl,
    conjugate_gradient,
    fisher_vector_product,
    kl_penalty_objective,
    trpo_step,
)

NAN, INF = math.nan, math.inf


# --- categorical_kl


@pytest.mark.formula("a07-kl-limit")
def test_kl_by_hand_and_in_the_right_direction():
    old, new = tensor([0.5, 0.5]).log(), tensor([0.75, 0.25]).log()
    # KL(old ‖ new) = ½ ln(2/3) + ½ ln 2 = ½ ln(4/3); the other way round it is ¾ ln(3/2) − ¼ ln 2.
    assert categorical_kl(old, new).item() == pytest.approx(0.5 * math.log(4 / 3))
    assert categorical_kl(new, old).item() == pytest.approx(0.75 * math.log(1.5) - 0.25 * math.log(2))


def test_kl_is_zero_at_the_old_policy_and_positive_elsewhere():
    logits = torch.randn(100, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert torch.equal(categorical_kl(logits, logits.clone()), torch.zeros(100).double())
    assert (categorical_kl(logits, logits.roll(1, 0)) > 0).all()


def test_kl_ignores_a_shift_of_the_logits():
    logits, new = tensor([1.0, 2.0, 3.0]), tensor([0.0, -1.0, 1.0])
    torch.testing.assert_close(categorical_kl(logits, new), categorical_kl(logits + 100, new - 50))


def test_kl_is_the_sum_over_actions_of_each_state():
    generator = torch.Generator().manual_seed(1)
    old, new = torch.randn(2, 3, 2, 4, generator=generator, dtype=torch.float64).unbind()
    got = categorical_kl(old, new)
    assert got.shape == (3, 2)
    for i in range(3):
        for j in range(2):
            p = [math.exp(x) for x in old[i, j].tolist()]
            q = [math.exp(x) for x in new[i, j].tolist()]
            expected = sum(
                a / sum(p) * (math.log(a / sum(p)) - math.log(b / sum(q))) for a, b in zip(p, q, strict=True)
            )
            assert got[i, j].item() == pytest.approx(expected)


@pytest.mark.parametrize("third", [-INF, 0.0])
def test_an_action_the_old_policy_forbids_adds_nothing(third):
    old = tensor([0.5, 0.5, 0.0], dtype=torch.float64).log()
    logits = tensor([0.2, -0.2, third], dtype=torch.float64, requires_grad=True)
    kl = categorical_kl(old, logits)
    kl.backward()
    probs = torch.softmax(logits.detach(), -1).tolist()
    assert kl.item() == pytest.approx(-0.5 * (math.log(2 * probs[0]) + math.log(2 * probs[1])))
    # ∇KL = π_θ − π_old
    assert logits.grad.tolist() == pytest.approx([probs[0] - 0.5, probs[1] - 0.5, probs[2]])


def test_kl_is_infinite_when_the_new_policy_forbids_what_the_old_one_does():
    assert categorical_kl(torch.zeros(2), tensor([0.0, -INF])).item() == INF


def test_kl_of_nan_logits_stays_visible():
    assert categorical_kl(tensor([0.0, NAN]), torch.zeros(2)).isnan()
    assert categorical_kl(torch.zeros(2), tensor([0.0, NAN])).isnan()


def test_kl_of_half_precision_is_computed_in_float32():
    old, new = tensor([1.0, 0.0]).bfloat16(), tensor([1.125, 0.0]).bfloat16()
    kl = categorical_kl(old, new)
    assert kl.dtype == torch.float32
    assert kl.item() == pytest.approx(categorical_kl(tensor([1.0, 0.0]), tensor([1.125, 0.0])).item())


def test_kl_refuses_to_broadcast():
    with pytest.raises(ValueError, match=r"old_logits \(4,\), logits \(1, 4\)"):
        categorical_kl(torch.zeros(4), torch.zeros(1, 4))


# --- fisher_vector_product


def _softmax_policy(n_states=6, n_features=3, n_actions=4, seed=0):
    """Linear softmax policy with a bias: parameters, a function of them that gives logits [N, A]."""
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(n_states, n_features, generator=generator, dtype=torch.float64)
    weight = torch.randn(n_features, n_actions, generator=generator, dtype=torch.float64).requires_grad_()
    bias = torch.randn(n_actions, generator=generator, dtype=torch.float64).requires_grad_()
    return [weight, bias], lambda: states @ weight + bias


def _fisher_matrix(parameters, logits_fn):
    """F = mean over states of Σ_a π(a|s) ∇log π(a|s) ∇log π(a|s)ᵀ, one score at a time."""
    logp = torch.log_softmax(logits_fn(), -1)
    n = sum(p.numel() for p in parameters)
    fisher = torch.zeros(n, n, dtype=torch.float64)
    for s in range(logp.shape[0]):
        for a in range(logp.shape[1]):
            score = torch.cat([g.flatten() for g in torch.autograd.grad(logp[s, a], parameters, retain_graph=True)])
            fisher += logp[s, a].exp().item() * torch.outer(score, score) / logp.shape[0]
    return fisher


@pytest.mark.parametrize("damping", [0.0, 0.1])
def test_product_equals_the_explicit_fisher_matrix(damping):
    parameters, logits_fn = _softmax_policy()
    fisher = _fisher_matrix(parameters, logits_fn) + damping * torch.eye(16, dtype=torch.float64)
    kl = categorical_kl(logits_fn().detach(), logits_fn()).mean()
    columns = [fisher_vector_product(kl, parameters, e, damping=damping) for e in torch.eye(16, dtype=torch.float64)]
    torch.testing.assert_close(torch.stack(columns, 1), fisher)


def test_product_is_finite_when_an_action_is_forbidden():
    logits = tensor([[0.3, -0.4, 0.0], [0.1, 0.2, 0.5]], dtype=torch.float64, requires_grad=True)
    forbidden = tensor([[False, False, True], [False, False, False]])

    def logits_fn():
        return logits.masked_fill(forbidden, -INF)

    kl = categorical_kl(logits_fn().detach(), logits_fn()).mean()
    got = torch.stack(
        [fisher_vector_product(kl, [logits], e, damping=0.0) for e in torch.eye(6, dtype=torch.float64)], 1
    )
    # Per state the Fisher matrix of a softmax is diag(π) − ππᵀ; the mean over two states halves it.
    expected = torch.zeros(6, 6, dtype=torch.float64)
    for s, pi in enumerate(torch.softmax(logits_fn().detach(), -1)):
        expected[3 * s : 3 * s + 3, 3 * s : 3 * s + 3] = (torch.diag(pi) - torch.outer(pi, pi)) / 2
    torch.testing.assert_close(got, expected)


def test_a_parameter_the_policy_does_not_use_has_no_curvature():
    parameters, logits_fn = _softmax_policy()
    unused = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    kl = categorical_kl(logits_fn().detach(), logits_fn()).mean()
    product = fisher_vector_product(kl, [*parameters, unused], torch.ones(18, dtype=torch.float64), damping=0.25)
    assert product[-2:].tolist() == [0.25, 0.25]


def test_A19_half_the_quadratic_form_is_the_kl_of_a_small_step():
    parameters, logits_fn = _softmax_policy()
    old = logits_fn().detach()
    direction = torch.randn(16, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    kl = categorical_kl(old, logits_fn()).mean()
    curvature = direction @ fisher_vector_product(kl, parameters, direction, damping=0.0)
    errors = []
    for size in (0.5, 0.05, 0.005):
        with torch.no_grad():
            for p, piece in zip(parameters, (size * direction).split([12, 4]), strict=True):
                p.add_(piece.reshape(p.shape))
            exact = categorical_kl(old, logits_fn()).mean()
            for p, piece in zip(parameters, (size * direction).split([12, 4]), strict=True):
                p.sub_(piece.reshape(p.shape))
        errors.append(abs(exact / (0.5 * size**2 * curvature) - 1).item())
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < 0.01


def test_product_takes_a_generator_of_parameters():
    policy = nn.Linear(2, 3)
    logits = policy(torch.ones(1, 2))
    kl = categorical_kl(logits.detach(), logits).mean()
    assert fisher_vector_product(kl, policy.parameters(), torch.ones(9)).shape == (9,)


def test_product_errors_name_the_argument():
    x = torch.zeros(2, requires_grad=True)
    with pytest.raises(ValueError, match="kl must be a scalar"):
        fisher_vector_product(x * x, [x], torch.ones(2))
    with pytest.raises(ValueError, match="kl must be a scalar that depends"):
        fisher_vector_product(torch.zeros(()), [x], torch.ones(2))
    with pytest.raises(ValueError, match=r"vector must have shape \(2,\).*got \(3,\)"):
        fisher_vector_product((x * x).sum(), [x], torch.ones(3))


# --- conjugate_gradient


def _positive_definite(n, seed=0):
    root = torch.randn(n, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return root @ root.T + torch.eye(n, dtype=torch.float64)


def test_conjugate_gradient_by_hand():
    # (4 1; 1 3) x = (1, 2) has the solution (1/11, 7/11), found in two iterations.
    matrix = tensor([[4.0, 1.0], [1.0, 3.0]], dtype=torch.float64)
    b = tensor([1.0, 2.0], dtype=torch.float64)
    assert conjugate_gradient(lambda v: matrix @ v, b, iterations=2).tolist() == pytest.approx([1 / 11, 7 / 11])
    # One iteration stops at (bᵀb / bᵀMb) b = (5/20) b.
    assert conjugate_gradient(lambda v: matrix @ v, b, iterations=1).tolist() == pytest.approx([0.25, 0.5])


def test_conjugate_gradient_solves_what_a_direct_solver_solves():
    matrix = _positive_definite(12)
    b = torch.arange(12, dtype=torch.float64) - 5
    x = conjugate_gradient(lambda v: matrix @ v, b, iterations=50, tolerance=1e-20)
    torch.testing.assert_close(x, torch.linalg.solve(matrix, b))


def test_conjugate_gradient_stops_once_it_is_close_enough():
    calls = []

    def product(v):
        calls.append(1)
        return 3.0 * v

    assert conjugate_gradient(product, tensor([3.0, 6.0])).tolist() == [1.0, 2.0]
    assert len(calls) == 1


def test_the_tolerance_is_relative_to_b():
    matrix = _positive_definite(8)
    b = torch.ones(8, dtype=torch.float64)
    small = conjugate_gradient(lambda v: matrix @ v, 1e-12 * b, iterations=20)
    torch.testing.assert_close(1e12 * small, conjugate_gradient(lambda v: matrix @ v, b, iterations=20))


def test_zero_right_side_gives_zero():
    assert conjugate_gradient(lambda v: 2 * v, torch.zeros(3)).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("factor", [-1.0, 0.0, NAN, INF])
def test_a_product_that_is_not_positive_definite_is_refused(factor):
    with pytest.raises(ValueError, match="product must be positive definite"):
        conjugate_gradient(lambda v: factor * v, torch.ones(2), iterations=1)


# --- trpo_step


def _one_number(start=0.0):
    return torch.full((1,), start, dtype=torch.float64, requires_grad=True)


@pytest.mark.formula("trpo")
def test_the_full_step_by_hand():
    # Surrogate 3θ, KL ½θ²: F = 1, x = 3, and √(2·0.02/9)·3 = 0.2, where the KL is 0.02, just the limit.
    theta = _one_number()
    step = trpo_step([theta], lambda: 3 * theta.sum(), lambda: (theta**2).sum() / 2, max_kl=0.02001, damping=0.0)
    assert step.accepted
    assert step.step_fraction == 1.0
    assert theta.item() == pytest.approx(math.sqrt(2 * 0.02001))
    assert step.surrogate_before == 0.0
    assert step.surrogate_after == pytest.approx(3 * theta.item())
    assert step.kl == pytest.approx(0.02001)


def test_the_step_is_cut_back_until_the_measured_kl_keeps_the_limit():
    # KL ½θ² + θ⁴ against ½: the quadratic model allows θ = 1, where the KL is 1.5; at θ = ½ it is 0.1875.
    theta = _one_number()
    step = trpo_step([theta], lambda: theta.sum(), lambda: (theta**2 / 2 + theta**4).sum(), max_kl=0.5, damping=0.0)
    assert step == (True, 0.0, 0.5, 0.1875, 0.5)
    assert theta.item() == 0.5


def test_shrink_sets_how_far_it_is_cut_back():
    theta = _one_number()
    step = trpo_step(
        [theta], lambda: theta.sum(), lambda: (theta**2 / 2 + theta**4).sum(), max_kl=0.5, damping=0.0, shrink=0.1
    )
    assert step.step_fraction == 0.1
    assert theta.item() == pytest.approx(0.1)


def test_a_trial_that_is_not_finite_is_cut_back_too():
    theta = _one_number()

    def kl_fn():
        return (theta**2).sum() / 2 + (NAN if theta.item() > 0.3 else 0.0)

    step = trpo_step([theta], lambda: theta.sum(), kl_fn, max_kl=0.5, damping=0.0)
    assert step.accepted
    assert theta.item() == 0.25


def test_parameters_are_put_back_exactly_when_no_step_improves():
    # Grows at θ = 0.1 with slope 1, but falls again within 1e-6: eleven halvings of a step of 0.1 are not enough.
    theta = _one_number(0.1)
    kept = theta.detach().clone()

    def surrogate_fn():
        return (theta - kept - 1e6 * (theta - kept) ** 2).sum()

    step = trpo_step([theta], surrogate_fn, lambda: ((theta - kept) ** 2).sum() / 2, max_kl=0.005, damping=0.0)
    assert step == (False, 0.0, 0.0, 0.0, 0.0)
    assert torch.equal(theta.detach(), kept)


def test_parameters_are_put_back_when_a_closure_fails_half_way():
    theta = _one_number()

    def surrogate_fn():
        if theta.item() != 0:
            raise RuntimeError("half way")
        return theta.sum()

    with pytest.raises(RuntimeError, match="half way"):
        trpo_step([theta], surrogate_fn, lambda: (theta**2).sum() / 2)
    assert theta.item() == 0.0


def test_no_gradient_means_no_step():
    theta = _one_number(2.0)
    step = trpo_step([theta], lambda: 0 * theta.sum() + 4, lambda: ((theta - 2) ** 2).sum() / 2)
    assert step == (False, 4.0, 4.0, 0.0, 0.0)
    assert theta.item() == 2.0


def _rollout(seed=0):
    """Old logits, taken actions and advantages of a linear softmax policy, with closures over its parameters."""
    parameters, logits_fn = _softmax_policy(n_states=40, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    old = logits_fn().detach()
    actions = torch.multinomial(torch.softmax(old, -1), 1, generator=generator)
    advantages = torch.randn(40, generator=generator, dtype=torch.float64)

    def logp():
        return torch.log_softmax(logits_fn(), -1).gather(1, actions).squeeze(1)

    old_logp = logp().detach()
    return (
        parameters,
        logits_fn,
        lambda: surrogate(importance_ratio(logp(), old_logp), advantages).mean(),
        lambda: categorical_kl(old, logits_fn()).mean(),
    )


def test_the_step_equals_the_natural_gradient_from_the_full_matrix():
    parameters, logits_fn, surrogate_fn, kl_fn = _rollout()
    gradient = torch.cat([g.flatten() for g in torch.autograd.grad(surrogate_fn(), parameters)])
    damped = _fisher_matrix(parameters, logits_fn) + 0.1 * torch.eye(16, dtype=torch.float64)
    direction = torch.linalg.solve(damped, gradient)
    start = torch.cat([p.detach().flatten() for p in parameters])
    expected = start + math.sqrt(2 * 0.001 / (gradient @ direction)) * direction

    step = trpo_step(parameters, surrogate_fn, kl_fn, max_kl=0.001, iterations=30)
    assert step.step_fraction == 1.0
    torch.testing.assert_close(torch.cat([p.detach().flatten() for p in parameters]), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.formula("trpo")
def test_every_step_keeps_the_limit_and_improves(seed):
    parameters, _, surrogate_fn, kl_fn = _rollout(seed)
    step = trpo_step(parameters, surrogate_fn, kl_fn, max_kl=0.05, damping=1e-3)
    assert step.accepted
    assert step.surrogate_after > step.surrogate_before
    assert 0.005 < step.kl <= 0.05
    assert step.kl == pytest.approx(kl_fn().item())
    assert step.surrogate_after == pytest.approx(surrogate_fn().item())


@pytest.mark.formula("a07-kl-limit")
def test_A19_the_limit_holds_for_the_mean_not_for_every_state():
    parameters, logits_fn, surrogate_fn, kl_fn = _rollout()
    old = logits_fn().detach()
    trpo_step(parameters, surrogate_fn, kl_fn, max_kl=0.05, damping=1e-3)
    kl = categorical_kl(old, logits_fn())
    assert kl.mean() <= 0.05
    assert kl.max() > 2 * 0.05


def test_steps_on_exact_surrogates_climb_J():
    world = corridor(5)
    logits = torch.zeros(5, 2, dtype=torch.float64, requires_grad=True)
    values = [world.objective(logits).item()]
    for _ in range(10):
        old = logits.detach().clone()
        visits = world.discounted_visitation(old)
        trpo_step(
            [logits],
            lambda old=old: world.surrogate(logits, old),
            lambda old=old, visits=visits: (visits * categorical_kl(old, logits)).sum() / visits.sum(),
            max_kl=0.02,
            damping=1e-4,
        )
        values.append(world.objective(logits).item())
    assert all(after > before for before, after in pairwise(values))
    # The best policy walks right: four moves, the reward with the last of them.
    assert values[0] < 0.3
    assert values[-1] == pytest.approx(0.9**3, abs=0.01)


def test_trpo_works_on_the_parameters_of_a_float32_network():
    torch.manual_seed(0)
    policy = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))
    states, advantages = torch.randn(64, 4), torch.randn(64)
    old = policy(states).detach()
    actions = torch.distributions.Categorical(logits=old).sample()

    def surrogate_fn():
        logp, old_logp = (torch.log_softmax(x, -1).gather(1, actions[:, None])[:, 0] for x in (policy(states), old))
        return surrogate(importance_ratio(logp, old_logp), advantages).mean()

    step = trpo_step(policy.parameters(), surrogate_fn, lambda: categorical_kl(old, policy(states)).mean())
    assert step.accepted
    assert 0 < step.kl <= 0.01
    assert all(p.grad is None for p in policy.parameters())


def test_numbers_that_are_not_finite_at_the_start_are_refused():
    theta = _one_number()

    def square():
        return (theta**2).sum() / 2

    with pytest.raises(ValueError, match="surrogate_fn must return a finite number, got nan"):
        trpo_step([theta], lambda: theta.sum() * NAN, square)
    with pytest.raises(ValueError, match="kl_fn must return a finite number, got inf"):
        trpo_step([theta], lambda: theta.sum(), lambda: (theta**2).sum() + INF)
    with pytest.raises(ValueError, match="gradient of surrogate_fn must be finite"):
        trpo_step([theta], lambda: theta.sqrt().sum(), square)
    assert theta.item() == 0.0


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_kl", 0.0), ("max_kl", NAN), ("damping", -1.0), ("backtracks", 0), ("shrink", 1.0), ("shrink", 0.0)],
)
def test_trpo_arguments_out_of_range_are_named(name, value):
    theta = _one_number()
    with pytest.raises(ValueError, match=name):
        trpo_step([theta], lambda: theta.sum(), lambda: (theta**2).sum(), **{name: value})


# --- PPO-Penalty


@pytest.mark.formula("kl-penalty")
def test_penalty_objective_by_hand():
    got = kl_penalty_objective(tensor([1.5, 0.5]), tensor([2.0, -1.0]), tensor([0.1, 0.4]), 0.5)
    assert got.tolist() == pytest.approx([2.95, -0.7])


def test_penalty_pulls_back_only_once_the_policy_has_moved():
    # ∇KL(π_old ‖ π_θ) = π_θ − π_old: nothing at the old policy, against the move afterwards.
    old = torch.zeros(2, dtype=torch.float64)
    for moved, expected in [(0.0, [0.0, 0.0]), (1.0, [0.5 - 1 / (1 + math.exp(-1)), 1 / (1 + math.exp(-1)) - 0.5])]:
        logits = tensor([moved, 0.0], dtype=torch.float64, requires_grad=True)
        zero = torch.zeros((), dtype=torch.float64)
        kl_penalty_objective(zero, zero, categorical_kl(old, logits), 1.0).backward()
        assert logits.grad.tolist() == pytest.approx(expected, abs=1e-15)


def test_penalty_objective_errors_name_the_argument():
    with pytest.raises(ValueError, match=r"ratio \(4,\), advantages \(4,\), kl \(4, 1\)"):
        kl_penalty_objective(torch.ones(4), torch.ones(4), torch.ones(4, 1), 1.0)
    for bad in (-0.1, NAN):
        with pytest.raises(ValueError, match="kl_coef"):
            kl_penalty_objective(torch.ones(1), torch.ones(1), torch.ones(1), bad)


@pytest.mark.parametrize(("measured_kl", "expected"), [(0.05, 0.4), (0.005, 0.1), (0.012, 0.2)])
def test_B23_paper_rule_doubles_and_halves_outside_the_band(measured_kl, expected):
    penalty = AdaptivePenalty(kl_coef=0.2, target_kl=0.01)
    assert penalty.update(measured_kl) == expected
    assert penalty.kl_coef == expected


@pytest.mark.parametrize(
    ("measured_kl", "expected"),
    [(0.0149, 0.2), (0.0151, 0.4), (0.0067, 0.2), (0.0066, 0.1), (0.0, 0.1), (-0.001, 0.1)],
)
def test_B23_the_limits_are_three_halves_and_two_thirds_of_the_target(measured_kl, expected):
    assert AdaptivePenalty(0.2, 0.01).update(measured_kl) == expected


def test_penalty_holds_still_on_the_limits_themselves():
    assert AdaptivePenalty(1.0, 2.0).update(3.0) == 1.0
    assert AdaptivePenalty(1.0, 3.0).update(2.0) == 1.0


@pytest.mark.parametrize(("kl_coef", "target_kl"), [(0.0, 1.0), (-1.0, 1.0), (NAN, 1.0), (1.0, 0.0), (1.0, INF)])
def test_penalty_refuses_arguments_that_are_not_positive(kl_coef, target_kl):
    with pytest.raises(ValueError, match="kl_coef" if target_kl == 1.0 else "target_kl"):
        AdaptivePenalty(kl_coef, target_kl)


@pytest.mark.parametrize("measured_kl", [NAN, INF])
def test_penalty_refuses_a_kl_that_is_not_finite(measured_kl):
    penalty = AdaptivePenalty(0.2, 0.01)
    with pytest.raises(ValueError, match="measured_kl must be finite"):
        penalty.update(measured_kl)
    assert penalty.kl_coef == 0.2


@pytest.mark.parametrize(("one_side", "other_side"), [(0.0, 1.0), (1.0, 0.0)])
def test_penalty_can_still_turn_after_thousands_of_updates_on_one_side(one_side, other_side):
    penalty = AdaptivePenalty(0.2, 0.01)
    for _ in range(3000):
        penalty.update(one_side)
    stuck = penalty.kl_coef
    assert 0 < stuck < INF
    assert penalty.update(other_side) == pytest.approx(stuck * (2 if other_side else 0.5))


def test_penalty_state_survives_a_checkpoint():
    penalty = AdaptivePenalty(0.2, 0.01)
    penalty.update(1.0)
    restored = AdaptivePenalty(7.0, 7.0)
    restored.load_state_dict(penalty.state_dict())
    assert penalty.state_dict() == {"kl_coef": 0.4, "target_kl": 0.01}
    assert restored.update(0.005) == 0.2
    with pytest.raises(ValueError, match="kl_coef"):
        restored.load_state_dict({"kl_coef": 0.0, "target_kl": 0.01})
    assert restored.kl_coef == 0.2


def test_no_gradient_flows_into_the_advantages_of_the_penalised_surrogate():
    ratio, advantages = torch.ones(2, requires_grad=True), torch.tensor([1.0, -1.0], requires_grad=True)
    kl_penalty_objective(ratio, advantages, torch.zeros(2), kl_coef=1.0).sum().backward()
    assert ratio.grad.tolist() == [1.0, -1.0] and advantages.grad is None


def test_a_saturated_policy_takes_no_step_and_raises_nothing():
    logits = torch.tensor([70.0, 0.0], requires_grad=True)
    old = logits.detach().clone()
    step = trpo_step([logits], lambda: logits.softmax(-1)[1], lambda: categorical_kl(old, logits))
    assert not step.accepted and torch.equal(logits, old)


def test_no_iteration_of_conjugate_gradient_gives_zero_and_fewer_are_refused():
    assert conjugate_gradient(lambda v: v, torch.ones(2), iterations=0).tolist() == [0.0, 0.0]
    with pytest.raises(ValueError, match="iterations must be 0 or more, got -1"):
        conjugate_gradient(lambda v: v, torch.ones(2), iterations=-1)
