"""Whitening, reward clipping, KL controllers and the refresh of the reference."""

import copy
import datetime
import json
import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from ppo_lab.clip import categorical_entropy, ppo_loss
from ppo_lab.stability import AdaptiveKLController, FixedKLController, clip_rewards, refresh_reference, whiten

NAN, INF = math.nan, math.inf


def literal_whiten(x, mask):
    """(x − mean)/√(var + 1e−8) with n − 1, one number at a time."""
    valid = [value for value, counts in zip(x, mask, strict=True) if counts]
    mean = sum(valid) / len(valid)
    var = sum((value - mean) ** 2 for value in valid) / (len(valid) - 1)
    scale = math.sqrt(var + 1e-8)
    return [(value - mean) / scale if counts else 0.0 for value, counts in zip(x, mask, strict=True)]


# whiten


@pytest.mark.parametrize("scale", [1.0, 1e-4, 1e3])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.formula("reward-whitening", "advantage-whitening")
def test_whitening_is_its_formula(seed, scale):
    generator = torch.Generator().manual_seed(seed)
    x = scale * (torch.randn(3, 7, generator=generator, dtype=torch.float64) + 2)
    mask = torch.rand(3, 7, generator=generator) < 0.7
    flat = x.flatten().tolist(), mask.flatten().tolist()
    assert whiten(x, mask).flatten().tolist() == pytest.approx(literal_whiten(*flat), abs=1e-9)


@pytest.mark.formula("advantage-whitening")
def test_the_result_has_mean_0_and_standard_deviation_1():
    x = 5 + 3 * torch.randn(1000, generator=torch.Generator().manual_seed(0))
    assert whiten(x).mean().abs() < 1e-5
    assert whiten(x).std().item() == pytest.approx(1, abs=1e-5)


def test_erratum_B7_n_minus_1_differs_visibly_in_a_small_batch():
    x = torch.randn(8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert (whiten(x) / whiten(x).std(unbiased=False)).std().item() == pytest.approx(math.sqrt(8 / 7))
    assert whiten(x).std().item() == pytest.approx(1, abs=1e-6)


def test_C3_scaling_without_the_shift_keeps_the_mean():
    x = torch.tensor([0.0, 0, 0, 5, 0, 0, 0, 3])
    kept = whiten(x, shift_mean=False)
    assert kept.mean().item() == pytest.approx(1.0)
    assert kept[0].item() == pytest.approx(0.48, abs=0.01)
    assert whiten(torch.full((4,), 2.5), shift_mean=False).tolist() == [2.5] * 4


@pytest.mark.parametrize("hidden", [NAN, INF, 1e30])
@pytest.mark.parametrize("shift_mean", [True, False])
def test_what_the_mask_hides_counts_for_nothing_and_becomes_0(hidden, shift_mean):
    mask = torch.tensor([True, False, True, True])
    ours = whiten(torch.tensor([1.0, hidden, 2.0, 6.0]), mask, shift_mean=shift_mean)
    alone = whiten(torch.tensor([1.0, 2.0, 6.0]), shift_mean=shift_mean)
    assert ours[mask].tolist() == alone.tolist()
    assert ours[1].item() == 0


@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_number_that_is_not_finite_and_counts_is_not_repaired(bad):
    assert whiten(torch.tensor([1.0, bad, 2.0])).isnan().any()
    assert whiten(torch.tensor([bad])).isnan().all()


@pytest.mark.parametrize("constant", [0.1, -0.3, 1 / 3, 1e6 + 0.1, 1e-7])
@pytest.mark.parametrize("n", [2, 1000, 4097])
def test_a_constant_becomes_exactly_0_in_spite_of_rounding(constant, n):
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        assert (whiten(torch.full((n,), constant, dtype=dtype)) == 0).all()


def test_a_large_offset_costs_no_digits_that_the_input_has():
    x = torch.arange(64.0)
    torch.testing.assert_close(whiten(x + 2.0**16), whiten(x), atol=1e-4, rtol=0)


def test_nothing_valid_gives_zeros():
    assert whiten(torch.tensor([NAN, 1.0]), torch.zeros(2)).tolist() == [0, 0]
    assert whiten(torch.zeros(0)).tolist() == []


def test_whitened_numbers_are_constants_for_the_gradient():
    assert not whiten(torch.randn(4, requires_grad=True)).requires_grad


def test_half_precision_is_whitened_in_float32():
    x = torch.full((4096,), 1.0).bfloat16()
    x[::2] = 2.0
    whitened = whiten(x)
    assert whitened.dtype == torch.float32
    assert whitened[0].item() == pytest.approx(1, abs=1e-3)


def test_a_mask_of_another_shape_is_refused():
    with pytest.raises(ValueError, match="mask must have the shape"):
        whiten(torch.ones(2, 3), torch.ones(3))


def whiten_on_one_rank(rank, folder, scenes):
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=30),
    )
    results = {
        name: [
            whiten(batches[rank], masks and masks[rank], group=dist.group.WORLD, shift_mean=shift_mean).tolist()
            for shift_mean in (True, False)
        ]
        for name, (batches, masks) in scenes.items()
    }
    Path(f"{folder}/rank{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """Whitening on two processes: {scene: [whitened, kept mean]} of either rank."""
    folder = tmp_path_factory.mktemp("two_ranks")
    scenes = {
        "both": ([torch.tensor([1.0, 2.0]), torch.tensor([3.0, 10.0])], None),
        "one empty": (
            [torch.tensor([1.0, 2.0]), torch.tensor([NAN, 10.0])],
            [torch.tensor([True, True]), torch.tensor([False, False])],
        ),
    }
    context = mp.spawn(whiten_on_one_rank, (str(folder), scenes), nprocs=2, join=False)
    try:
        # join returns once a process ends, and True when both have.
        done = context.join(timeout=60) or context.join(timeout=60)
        assert done, "a rank waits for the other"
    finally:
        for process in context.processes:
            process.kill()
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.distributed
def test_B12_two_ranks_share_one_mean_and_one_variance(two_ranks):
    (first, first_kept), (second, _) = (rank["both"] for rank in two_ranks)
    assert first == pytest.approx([-0.734847, -0.489898], abs=1e-5)
    assert second == pytest.approx([-0.244949, 1.469694], abs=1e-5)
    assert first_kept == pytest.approx([4 - 0.734847, 4 - 0.489898], abs=1e-5)
    # Local moments, and the mean of two local variances.
    assert first != pytest.approx([-0.7071, 0.7071], abs=1e-3)
    assert first[0] != pytest.approx(-3 / math.sqrt(12.5), abs=1e-3)


@pytest.mark.distributed
def test_B12_a_rank_without_valid_tokens_still_takes_part(two_ranks):
    (first, _), (second, second_kept) = (rank["one empty"] for rank in two_ranks)
    assert first == pytest.approx([-0.7071, 0.7071], abs=1e-4)
    assert second == second_kept == [0, 0]


def test_B10_a_minibatch_of_one_sample_gives_0_and_the_weights_stay_finite():
    assert whiten(torch.tensor([3.0])).tolist() == [0.0]
    torch.manual_seed(0)
    network = torch.nn.Linear(2, 4)  # three logits and a value
    optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
    states, actions, advantages = torch.randn(5, 2), torch.tensor([0, 1, 2, 0, 1]), torch.randn(5)
    with torch.no_grad():
        old_logp = network(states)[:, :3].log_softmax(-1).gather(1, actions[:, None])[:, 0]
        old_values = network(states)[:, 3]
    for rows in torch.arange(5).split(4):  # four samples, then one
        logits, values = network(states[rows]).split((3, 1), -1)
        loss = ppo_loss(
            logits.log_softmax(-1).gather(1, actions[rows, None])[:, 0],
            old_logp[rows],
            whiten(advantages[rows]),
            values=values[:, 0],
            old_values=old_values[rows],
            returns=old_values[rows] + advantages[rows],
            entropy=categorical_entropy(logits),
        )
        optimizer.zero_grad()
        loss.total.backward()
        optimizer.step()
    assert all(p.isfinite().all() for p in network.parameters())


def test_B11_constant_advantages_become_0():
    assert whiten(torch.tensor([2.0, 2.0, 2.0])).tolist() == [0, 0, 0]


# clip_rewards


@pytest.mark.formula("reward-clipping")
def test_rewards_are_cut_at_the_limit():
    assert clip_rewards(torch.tensor([-9.0, -5.0, 0.5, 7.0, INF]), 5).tolist() == [-5, -5, 0.5, 5, 5]
    assert clip_rewards(torch.tensor([NAN]), 5).isnan()
    for limit in (0, -1, NAN):
        with pytest.raises(ValueError, match="limit must be positive"):
            clip_rewards(torch.zeros(1), limit)


# KL controllers


def test_the_coefficient_follows_the_formula():
    controller, expected = AdaptiveKLController(0.1, target_kl=2.0, horizon=100), 0.1
    for kl, n_steps in [(1.9, 10), (2.5, 50), (0.0, 100), (80.0, 7), (2.0, 5)]:
        error = min(max((kl - 2) / 2, -0.2), 0.2)
        expected *= 1 + error * n_steps / 100
        controller.update(kl, n_steps)
        assert controller.kl_coef == pytest.approx(expected, rel=1e-12)


def test_erratum_B13_the_listing_of_the_book_turns_negative_and_ours_does_not():
    book, ours = 0.2, AdaptiveKLController(0.2, 6.0, horizon=10)  # K_p = 0.1
    books = []
    for _ in range(4):
        book *= 1 + 0.1 * max(-0.2, min(0.2, (0 - 6.0) / 6.0)) * 256
        books.append(book)
        ours.update(0.0, 256)
        assert ours.kl_coef > 0
    assert books == pytest.approx([-0.82, 3.39, -13.99, 57.6], rel=0.01)
    assert ours.kl_coef == pytest.approx(0.2 * 0.8**4)


def test_a_kl_may_be_a_tensor_but_must_be_finite():
    controller = AdaptiveKLController()
    controller.update(torch.tensor(6.3), 256)
    assert controller.kl_coef == pytest.approx(0.200256)
    assert isinstance(controller.kl_coef, float)
    for bad in (NAN, INF):
        with pytest.raises(ValueError, match="current_kl must be finite"):
            controller.update(bad)
    with pytest.raises(ValueError, match="n_steps must be at least 1"):
        controller.update(6.0, 0)
    assert controller.kl_coef == pytest.approx(0.200256)


def test_the_fixed_controller_never_moves():
    controller = FixedKLController(0.05)
    controller.update(50.0, 256)
    assert controller.kl_coef == 0.05
    assert FixedKLController(0).kl_coef == 0
    for bad in (-0.1, NAN, INF):
        with pytest.raises(ValueError, match="kl_coef must be at least 0"):
            FixedKLController(bad)


def test_B35_a_resumed_run_keeps_its_coefficient():
    controller = AdaptiveKLController(0.2, 6.0, 10_000)
    for _ in range(4):
        controller.update(12.0, 256)
    assert controller.kl_coef == pytest.approx(0.204128, abs=1e-6)
    resumed = AdaptiveKLController(0.2, 6.0, 10_000)
    resumed.load_state_dict(controller.state_dict())
    resumed.update(3.0, 256)
    assert resumed.kl_coef == pytest.approx(0.203083, abs=1e-6)
    assert resumed.kl_coef != pytest.approx(0.198976, abs=1e-6)  # started again from 0.2
    fixed = FixedKLController(0.1)
    fixed.load_state_dict(FixedKLController(0.3).state_dict())
    assert fixed.kl_coef == 0.3
    with pytest.raises(ValueError, match="kl_coef must be positive"):
        resumed.load_state_dict({"kl_coef": -1.0})


@pytest.mark.parametrize(
    "field, bad",
    [(field, bad) for field in ("kl_coef", "target_kl", "horizon") for bad in (0, -1)],
)
def test_B22_settings_that_end_in_infinity_are_refused_at_once(field, bad):
    with pytest.raises(ValueError, match=f"{field} must be positive"):
        AdaptiveKLController(**{field: bad})


@pytest.mark.parametrize("kl, expected", [(12, 0.201024), (3, 0.198976), (6.3, 0.200256), (6, 0.2)])
def test_B22_one_update_with_valid_settings(kl, expected):
    controller = AdaptiveKLController(0.2, 6.0, 10_000)
    controller.update(kl, 256)
    assert controller.kl_coef == pytest.approx(expected, abs=1e-7)
    assert controller.kl_coef != pytest.approx(0.20512, abs=1e-6)  # clip forgotten


def test_B23_the_step_count_is_the_number_of_samples_of_the_rollout():
    controller = AdaptiveKLController(0.2, 6.0, 10_000)
    controller.update(12.0, 2 * 128)
    assert controller.kl_coef == pytest.approx(0.201024)
    by_training_step = AdaptiveKLController(0.2, 6.0, 10_000)
    by_training_step.update(12.0, 1000)
    assert by_training_step.kl_coef == pytest.approx(0.204)  # the wrong count
    per_minibatch = AdaptiveKLController(0.2, 6.0, 10_000)
    for _ in range(4 * 4):
        per_minibatch.update(12.0, 256)
    assert per_minibatch.kl_coef > 0.216  # sixteen updates instead of one
    fixed = FixedKLController(0.2)
    fixed.update(12.0, 256)
    assert fixed.kl_coef == 0.2


# refresh_reference


def network(seed):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))


def test_after_a_refresh_the_reference_is_the_policy_and_stays_frozen():
    policy, reference = network(0), network(1)
    policy(torch.randn(8, 3))  # moves the running mean, a buffer
    refresh_reference(policy, reference)
    for name, tensor in policy.state_dict().items():
        assert reference.state_dict()[name].equal(tensor)
        assert reference.state_dict()[name].data_ptr() != tensor.data_ptr()
    assert not reference.training and policy.training
    assert not any(p.requires_grad for p in reference.parameters())
    assert all(p.requires_grad for p in policy.parameters())


def test_training_goes_on_without_moving_the_reference():
    policy, reference = network(0), network(1)
    refresh_reference(policy, reference)
    before = copy.deepcopy(reference.state_dict())
    policy(torch.randn(8, 3)).square().sum().backward()
    torch.optim.SGD(policy.parameters(), lr=0.1).step()
    assert all(reference.state_dict()[name].equal(x) for name, x in before.items())
    assert not reference[0].weight.equal(policy[0].weight)


def test_a_reference_in_another_precision_keeps_it():
    policy, reference = network(0), network(1).bfloat16()
    refresh_reference(policy, reference)
    assert reference[0].weight.dtype == torch.bfloat16
    assert reference[0].weight.equal(policy[0].weight.bfloat16())


def test_a_reference_that_cannot_be_refreshed_is_refused():
    policy = network(0)
    with pytest.raises(ValueError, match=r"shares 0\.weight with policy"):
        refresh_reference(policy, policy)
    with pytest.raises(ValueError, match="same tensors"):
        refresh_reference(policy, torch.nn.Sequential(torch.nn.Linear(3, 4)))
    with pytest.raises(ValueError, match=r"weight must have one shape, got \(4, 3\) and \(4, 2\)"):
        refresh_reference(torch.nn.Linear(3, 4), torch.nn.Linear(2, 4))
