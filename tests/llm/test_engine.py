"""What holds a model in training: gradients gathered, clipped, stepped along or forgotten."""

import math

import pytest
import torch
from torch import nn, tensor

from ppo_lab.llm.engine import TorchEngine


def line(weight=(3.0, 4.0), **settings):
    """A linear model without bias, so that the gradient of its output is the input."""
    module = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        module.weight.copy_(tensor([weight]))
    return TorchEngine(module, **{"lr": 0.01, "max_grad_norm": 1.0, **settings})


def test_gradients_add_up_until_a_step():
    engine = line()
    engine.backward(engine(tensor([1.0, 0.0])).sum())
    engine.backward(engine(tensor([2.0, -4.0])).sum())
    assert engine.module.weight.grad.tolist() == [[3, -4]]
    engine.step()
    assert engine.module.weight.grad is None


def test_a_forgotten_gradient_moves_nothing():
    engine = line()
    engine.backward(engine(tensor([1.0, 2.0])).sum())
    engine.discard()
    assert engine.clip_gradient() == 0
    engine.step()
    assert engine.module.weight.tolist() == [[3, 4]]


@pytest.mark.parametrize(("max_grad_norm", "left"), [(1.0, [0.6, -0.8]), (10.0, [3.0, -4.0])])
def test_the_norm_is_the_one_before_the_clip(max_grad_norm, left):
    engine = line(max_grad_norm=max_grad_norm)
    engine.backward(engine(tensor([3.0, -4.0])).sum())
    assert engine.clip_gradient() == pytest.approx(5.0)
    assert engine.grad_norm == pytest.approx(5.0)
    torch.testing.assert_close(engine.module.weight.grad, tensor([left]), atol=1e-5, rtol=0)


@pytest.mark.parametrize("lr_scale", [1.0, 0.25, 0.0])
def test_the_first_step_of_adam_has_the_length_of_the_learning_rate(lr_scale):
    # m̂/√v̂ is the sign of the gradient at the first step, whatever its size.
    engine = line()
    engine.backward(engine(tensor([0.5, -7.0])).sum())
    engine.step(lr_scale)
    expected = tensor([[3 - 0.01 * lr_scale, 4 + 0.01 * lr_scale]])
    torch.testing.assert_close(engine.module.weight.detach(), expected, atol=1e-6, rtol=0)


def test_a_scale_lasts_for_one_step_only():
    engine = line()
    for lr_scale in (0.1, 1.0):
        engine.backward(engine(tensor([1.0, 1.0])).sum())
        engine.step(lr_scale)
    torch.testing.assert_close(engine.module.weight.detach(), tensor([[3 - 0.011, 4 - 0.011]]), atol=1e-6, rtol=0)


def test_the_weights_do_not_decay():
    engine = line()
    engine.backward(0 * engine(tensor([1.0, 1.0])).sum())
    engine.step()
    assert engine.module.weight.tolist() == [[3, 4]]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_named(bad):
    engine = TorchEngine(nn.ModuleDict({"good": nn.Linear(1, 1), "bad": nn.Linear(1, 1)}), lr=0.1, max_grad_norm=1.0)
    good, spoilt = engine.module["good"], engine.module["bad"]
    engine.backward(good(tensor([1.0])).sum())
    spoilt.weight.grad = tensor([[bad]])
    before = [p.detach().clone() for p in engine.module.parameters()]
    with pytest.raises(FloatingPointError, match=r"^the gradient of bad\.weight is not finite$"):
        engine.clip_gradient()
    assert all(torch.equal(p, old) for p, old in zip(engine.module.parameters(), before, strict=True))


def test_in_bfloat16_only_the_products_are_half():
    engine = line(weight=(1.0, 1 / 3), bf16=True)
    out = engine(tensor([1.0, 1.0]))
    assert out.dtype == torch.bfloat16
    assert engine.module.weight.dtype == torch.float32
    engine.backward(out.sum())
    assert engine.module.weight.grad.dtype == torch.float32
    engine.step()
    assert engine.optimizer.state[engine.module.weight]["exp_avg"].dtype == torch.float32


@pytest.mark.parametrize(("bf16", "dtype"), [(False, torch.float32), (True, torch.bfloat16)])
def test_the_precision_is_that_of_every_role(bf16, dtype):
    with line(bf16=bf16).precision():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == dtype
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
