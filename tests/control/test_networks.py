"""The actor-critic network: shapes, who owns which parameters, and the first policy."""

import pytest
import torch

from ppo_lab.control.networks import PPONetwork


def network(**options):
    torch.manual_seed(0)
    return PPONetwork(4, 3, **options)


@pytest.mark.parametrize("leading", [(), (5,), (2, 7)])
@pytest.mark.parametrize("shared_trunk", [False, True])
def test_any_leading_shape_and_a_value_without_an_axis_of_its_own(leading, shared_trunk):
    logits, values = network(shared_trunk=shared_trunk)(torch.randn(*leading, 4))
    assert logits.shape == (*leading, 3)
    assert values.shape == leading


@pytest.mark.parametrize("shared_trunk", [False, True])
def test_the_forward_pass_is_two_tanh_layers_and_a_linear_head(shared_trunk):
    net = network(shared_trunk=shared_trunk, hidden_dim=8)
    state = torch.randn(4)

    def by_hand(trunk, head):
        x = torch.tanh(trunk[0].weight @ state + trunk[0].bias)
        x = torch.tanh(trunk[2].weight @ x + trunk[2].bias)
        return head.weight @ x + head.bias

    logits, value = net(state)
    critic_trunk = net.feature if shared_trunk else net.critic_feature
    torch.testing.assert_close(logits, by_hand(net.feature, net.actor_head))
    torch.testing.assert_close(value, by_hand(critic_trunk, net.critic_head)[0])
    torch.testing.assert_close(net.logits(state), logits)


def test_the_two_trunks_start_different():
    net = network()
    assert not torch.equal(net.feature[0].weight, net.critic_feature[0].weight)


def test_separate_trunks_split_the_parameters_between_policy_and_critic():
    net = network()
    policy, critic = set(net.policy_parameters()), set(net.critic_parameters())
    assert policy.isdisjoint(critic)
    assert policy | critic == set(net.parameters())


def test_a_value_loss_leaves_a_separate_policy_alone_and_moves_a_shared_one():
    for shared_trunk in (False, True):
        net = network(shared_trunk=shared_trunk)
        net(torch.randn(5, 4))[1].sum().backward()
        assert any(p.grad is not None for p in net.policy_parameters()) == shared_trunk
        assert all(p.grad is not None for p in net.critic_parameters())


@pytest.mark.parametrize("shared_trunk", [False, True])
def test_orthogonal_layers_have_the_documented_gains_and_no_bias(shared_trunk):
    net = network(shared_trunk=shared_trunk)
    trunks = [net.feature] if shared_trunk else [net.feature, net.critic_feature]
    gains = {net.actor_head: 0.01, net.critic_head: 1.0}
    gains |= {trunk[i]: 2**0.5 for trunk in trunks for i in (0, 2)}
    for layer, gain in gains.items():
        w = layer.weight.detach()
        w = w if w.shape[0] <= w.shape[1] else w.T
        torch.testing.assert_close(w @ w.T, gain**2 * torch.eye(len(w)), atol=1e-5, rtol=1e-5)
        assert not layer.bias.any()


def test_the_first_policy_is_nearly_uniform_only_with_orthogonal_layers():
    states = torch.randn(200, 4)
    spread = {flag: (network(orthogonal=flag).logits(states).softmax(-1) - 1 / 3).abs().max() for flag in (True, False)}
    assert spread[True] < 0.01 < spread[False]


@pytest.mark.parametrize("name", ["state_dim", "action_dim", "hidden_dim"])
def test_a_size_below_one_is_refused_by_name(name):
    sizes = {"state_dim": 4, "action_dim": 2, "hidden_dim": 8, name: 0}
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        PPONetwork(**sizes)
