"""Exercises of chapter 3, trust region and clip (§13.3). Wrong answers are written as a reader would, without types."""

import torch
from torch import Tensor, tensor

from ppo_lab.exercises.kit import Case, Exercise, Mistake, loss_and_gradient

# --- clipped_surrogate


def _minimum_of_the_ratios(ratio, advantages, eps_clip):
    return torch.minimum(ratio, ratio.clamp(1 - eps_clip, 1 + eps_clip)) * advantages


def _clip_only(ratio, advantages, eps_clip):
    return ratio.clamp(1 - eps_clip, 1 + eps_clip) * advantages


def _maximum(ratio, advantages, eps_clip):
    return torch.maximum(ratio * advantages, ratio.clamp(1 - eps_clip, 1 + eps_clip) * advantages)


def _unclipped(ratio, advantages, eps_clip):
    return ratio * advantages


def _as_a_loss(ratio, advantages, eps_clip):
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - eps_clip, 1 + eps_clip) * advantages)


def _clipped_above_only(ratio, advantages, eps_clip):
    return torch.minimum(ratio * advantages, ratio.clamp(max=1 + eps_clip) * advantages)


CLIPPED_SURROGATE = Exercise(
    "clipped_surrogate",
    ("surrogate",),
    (
        Case(
            "a good action",
            dict(ratio=tensor([0.5, 0.8, 1.0, 1.2, 1.5]), advantages=torch.full((5,), 1.0), eps_clip=0.2),
            tensor([0.5, 0.8, 1.0, 1.2, 1.2]),
        ),
        Case(
            "a bad action",
            dict(ratio=tensor([0.5, 0.8, 1.0, 1.2, 1.5]), advantages=torch.full((5,), -1.0), eps_clip=0.2),
            tensor([-0.8, -0.8, -1.0, -1.2, -1.5]),
        ),
        Case(
            "another ε",
            dict(ratio=tensor([1.5, 0.5]), advantages=tensor([2.0, -2.0]), eps_clip=0.1),
            tensor([2.2, -1.8]),
        ),
        Case(
            "a bad action whose ratio has run away",
            dict(ratio=tensor([50.0]), advantages=tensor([-1.0]), eps_clip=0.2),
            tensor([-50.0]),
        ),
        Case(
            "two rows",
            dict(
                ratio=tensor([[1.5, 1.5], [0.5, 0.5]]),
                advantages=tensor([[1.0, -1.0], [1.0, -1.0]]),
                eps_clip=0.2,
            ),
            tensor([[1.2, -1.5], [0.5, -0.8]]),
        ),
    ),
    (
        Mistake(
            "the minimum is taken before the advantage is multiplied on",
            "A negative advantage turns the order round. Build both products first, then take the smaller one.",
            _minimum_of_the_ratios,
        ),
        Mistake(
            "the ratio is clipped and no minimum is taken",
            "The minimum keeps the slope alive where the policy has moved the wrong way.",
            _clip_only,
        ),
        Mistake(
            "the larger of the two products is taken",
            "The objective is pessimistic: of two promises it believes the smaller one.",
            _maximum,
        ),
        Mistake("nothing is clipped", "For a good action the objective stops growing at ρ = 1 + ε.", _unclipped),
        Mistake(
            "the sign is turned round: this is the loss",
            "Here the objective was asked for, which is to be maximised.",
            _as_a_loss,
        ),
        Mistake(
            "the ratio is clipped above only",
            "For a bad action the objective is flat to the left of 1 − ε.",
            _clipped_above_only,
        ),
    ),
)


# --- clip_slope


def _flat_everywhere_outside(ratio, advantages, eps_clip):
    return torch.where((ratio - 1).abs() > eps_clip, 0.0, advantages)


def _never_flat(ratio, advantages, eps_clip):
    return advantages.clone()


def _right_slope(ratio: Tensor, advantages: Tensor, eps_clip: float) -> Tensor:
    too_far = torch.where(advantages > 0, ratio > 1 + eps_clip, ratio < 1 - eps_clip)
    return torch.where(too_far, 0.0, advantages)


def _without_the_advantage(ratio, advantages, eps_clip):
    return _right_slope(ratio, advantages, eps_clip).sign()


def _flat_on_the_wrong_side(ratio, advantages, eps_clip):
    return advantages - torch.where((ratio - 1).abs() > eps_clip, _right_slope(ratio, advantages, eps_clip), 0.0)


def _flat_above_only(ratio, advantages, eps_clip):
    return torch.where(ratio > 1 + eps_clip, 0.0, advantages)


CLIP_SLOPE = Exercise(
    "clip_slope",
    ("slope",),
    (
        Case(
            "a good action in the three regions",
            dict(ratio=tensor([0.5, 1.0, 1.5]), advantages=tensor([1.0, 1.0, 1.0]), eps_clip=0.2),
            tensor([1.0, 1.0, 0.0]),
        ),
        Case(
            "a bad action in the three regions",
            dict(ratio=tensor([0.5, 1.0, 1.5]), advantages=tensor([-1.0, -1.0, -1.0]), eps_clip=0.2),
            tensor([0.0, -1.0, -1.0]),
        ),
        Case(
            "advantages of other sizes",
            dict(ratio=tensor([0.7, 1.1, 0.9, 3.0]), advantages=tensor([0.5, 2.0, -3.0, -0.5]), eps_clip=0.2),
            tensor([0.5, 2.0, -3.0, -0.5]),
        ),
        Case(
            "another ε",
            dict(ratio=tensor([0.85, 1.15, 0.85, 1.15]), advantages=tensor([2.0, 2.0, -2.0, -2.0]), eps_clip=0.1),
            tensor([2.0, 0.0, 0.0, -2.0]),
        ),
    ),
    (
        Mistake(
            "the slope is 0 everywhere outside the interval",
            "That is the clip without the minimum. A good action that has become rarer still pulls back.",
            _flat_everywhere_outside,
        ),
        Mistake("no region is flat", "Two of the six regions have slope 0.", _never_flat),
        Mistake(
            "the size of the advantage is lost",
            "Where the objective is ρ·Â, its derivative with respect to ρ is Â.",
            _without_the_advantage,
        ),
        Mistake(
            "the flat regions are on the wrong side",
            "Flat is where the policy has gone far enough: up for a good action, down for a bad one.",
            _flat_on_the_wrong_side,
        ),
        Mistake(
            "it is flat above 1 + ε, whatever the sign of the advantage",
            "A bad action with a large ratio is the worst case: there the slope has to stay.",
            _flat_above_only,
        ),
    ),
)


# --- clipped_value_loss


def _errors(values: Tensor, old_values: Tensor, returns: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Squared errors of the values, and of the values kept near the old ones."""
    clipped = old_values + (values - old_values).clamp(-eps, eps)
    return (values - returns).square(), (clipped - returns).square()


def _minimum_of_the_errors(values, old_values, returns, eps_clip_value):
    return 0.5 * torch.minimum(*_errors(values, old_values, returns, eps_clip_value)).mean()


def _without_the_half(values, old_values, returns, eps_clip_value):
    return torch.maximum(*_errors(values, old_values, returns, eps_clip_value)).mean()


def _clipped_error_only(values, old_values, returns, eps_clip_value):
    return 0.5 * _errors(values, old_values, returns, eps_clip_value)[1].mean()


def _plain_error(values, old_values, returns, eps_clip_value):
    return 0.5 * (values - returns).square().mean()


def _summed_error(values, old_values, returns, eps_clip_value):
    return 0.5 * torch.maximum(*_errors(values, old_values, returns, eps_clip_value)).sum()


CLIPPED_VALUE_LOSS = Exercise(
    "clipped_value_loss",
    ("loss",),
    (
        Case(
            "moved towards the return, by too much",
            dict(values=tensor([8.0]), old_values=tensor([5.0]), returns=tensor([10.0]), eps_clip_value=0.2),
            tensor(11.52),
        ),
        Case(
            "moved away from the return",
            dict(values=tensor([1.0]), old_values=tensor([5.0]), returns=tensor([10.0]), eps_clip_value=0.2),
            tensor(40.5),
        ),
        Case(
            "moved by less than ε_v",
            dict(values=tensor([5.1]), old_values=tensor([5.0]), returns=tensor([6.0]), eps_clip_value=0.2),
            tensor(0.405),
        ),
        Case(
            "three values",
            dict(
                values=tensor([1.0, 8.0, 5.1]),
                old_values=tensor([5.0, 5.0, 5.0]),
                returns=tensor([10.0, 10.0, 6.0]),
                eps_clip_value=0.2,
            ),
            tensor(17.475),
        ),
        Case(
            "downwards, a wider range",
            dict(values=tensor([3.0]), old_values=tensor([6.0]), returns=tensor([1.0]), eps_clip_value=1.0),
            tensor(8.0),
        ),
    ),
    (
        Mistake(
            "the smaller of the two errors is taken",
            "A loss is pessimistic when it believes the larger one. With the minimum the range becomes a bonus.",
            _minimum_of_the_errors,
        ),
        Mistake("the ½ is missing", "The loss carries the factor ½ inside.", _without_the_half),
        Mistake(
            "only the clipped error is used",
            "Then a value that has moved away from the return costs nothing more. Take the larger error.",
            _clipped_error_only,
        ),
        Mistake("nothing is clipped", "V_clip stays within ε_v of the old value, not of the return.", _plain_error),
        Mistake("the elements are summed", "The loss is a mean over the elements.", _summed_error),
    ),
)


# --- categorical_kl


def _kl(old_logits: Tensor, logits: Tensor) -> Tensor:
    return (old_logits.softmax(-1) * (old_logits.log_softmax(-1) - logits.log_softmax(-1))).sum(-1)


def _reversed_kl(old_logits, logits):
    return _kl(logits, old_logits)


def _raw_logits(old_logits, logits):
    return (old_logits.softmax(-1) * (old_logits - logits)).sum(-1)


def _weighted_by_the_new_policy(old_logits, logits):
    return (logits.softmax(-1) * (old_logits.log_softmax(-1) - logits.log_softmax(-1))).sum(-1)


def _mean_over_actions(old_logits, logits):
    return _kl(old_logits, logits) / logits.shape[-1]


def _cross_entropy(old_logits, logits):
    return -(old_logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)


def _negative_kl(old_logits, logits):
    return -_kl(old_logits, logits)


CATEGORICAL_KL = Exercise(
    "categorical_kl",
    ("KL",),
    (
        Case(
            "from 0.5, 0.5 to 0.9, 0.1",
            dict(old_logits=tensor([0.5, 0.5]).log(), logits=tensor([0.9, 0.1]).log()),
            tensor(0.510826),
        ),
        Case(
            "the same policy",
            dict(old_logits=tensor([1.0, 2.0, 4.0]), logits=tensor([1.0, 2.0, 4.0])),
            tensor(0.0),
        ),
        Case(
            "the same policy, logits shifted by 3",
            dict(old_logits=tensor([1.0, 2.0, 4.0]), logits=tensor([4.0, 5.0, 7.0])),
            tensor(0.0),
        ),
        Case(
            "two states",
            dict(
                old_logits=tensor([[0.7, 0.2, 0.1], [0.2, 0.3, 0.5]]).log(),
                logits=tensor([[0.2, 0.3, 0.5], [0.7, 0.2, 0.1]]).log(),
            ),
            tensor([0.634897, 0.675806]),
        ),
        Case(
            "logits that are not normalised",
            dict(old_logits=tensor([2.0, 0.0, -1.0]), logits=tensor([0.0, 1.0, 0.0])),
            tensor(0.912983),
        ),
    ),
    (
        Mistake(
            "the two policies have changed places",
            "KL(old ‖ new) weights the log-differences with the old policy, which took the samples.",
            _reversed_kl,
        ),
        Mistake(
            "the logits are used as log-probabilities",
            "Shifting all logits changes no policy: apply log_softmax first.",
            _raw_logits,
        ),
        Mistake(
            "the new policy is the weight, the old one comes first in the logarithm",
            "The weight and the first logarithm belong to the same policy, the old one. A KL is never negative.",
            _weighted_by_the_new_policy,
        ),
        Mistake("the mean over the actions is taken", "The KL is a sum over the actions.", _mean_over_actions),
        Mistake(
            "the entropy of the old policy is left in",
            "This is the cross-entropy, which is not 0 for equal policies. Subtract log π_new from log π_old.",
            _cross_entropy,
        ),
        Mistake("the sign is turned round", "A KL is never negative.", _negative_kl),
    ),
)


# --- adaptive_kl_coef


def _rule(kl_coef: float, measured_kl: float, target_kl: float, upper: float, lower: float, factor: float) -> float:
    if measured_kl > upper * target_kl:
        return kl_coef * factor
    return kl_coef / factor if measured_kl < lower * target_kl else kl_coef


def _wrong_way(kl_coef, measured_kl, target_kl):
    return _rule(kl_coef, measured_kl, target_kl, 1.5, 1 / 1.5, 0.5)


def _no_band(kl_coef, measured_kl, target_kl):
    return _rule(kl_coef, measured_kl, target_kl, 1, 1, 2)


def _limits_of_two(kl_coef, measured_kl, target_kl):
    return _rule(kl_coef, measured_kl, target_kl, 2, 0.5, 2)


def _symmetric_band(kl_coef, measured_kl, target_kl):
    return _rule(kl_coef, measured_kl, target_kl, 1.5, 0.5, 2)


def _factor_one_and_a_half(kl_coef, measured_kl, target_kl):
    return _rule(kl_coef, measured_kl, target_kl, 1.5, 1 / 1.5, 1.5)


ADAPTIVE_KL_COEF = Exercise(
    "adaptive_kl_coef",
    ("coefficient",),
    (
        Case("far above the target", dict(kl_coef=0.2, measured_kl=0.05, target_kl=0.01), tensor(0.4)),
        Case("far below the target", dict(kl_coef=0.2, measured_kl=0.003, target_kl=0.01), tensor(0.1)),
        Case("a little above the target", dict(kl_coef=0.2, measured_kl=0.012, target_kl=0.01), tensor(0.2)),
        Case("a little below the target", dict(kl_coef=0.2, measured_kl=0.009, target_kl=0.01), tensor(0.2)),
        Case("just above the upper limit", dict(kl_coef=1.0, measured_kl=0.0155, target_kl=0.01), tensor(2.0)),
        Case("just below the lower limit", dict(kl_coef=1.0, measured_kl=0.0063, target_kl=0.01), tensor(0.5)),
        Case("just inside the lower limit", dict(kl_coef=1.0, measured_kl=0.0070, target_kl=0.01), tensor(1.0)),
    ),
    (
        Mistake(
            "the coefficient moves the wrong way",
            "The policy has moved too far: the penalty has to grow.",
            _wrong_way,
        ),
        Mistake(
            "there is no band around the target",
            "Between target/1.5 and 1.5·target the coefficient stays as it is.",
            _no_band,
        ),
        Mistake("the limits are twice and half the target", "The limits are 1.5 and 1/1.5.", _limits_of_two),
        Mistake(
            "the lower limit is half the target",
            "The band is symmetric in ratios: 1.5 times and 1/1.5 times the target, not plus and minus a half.",
            _symmetric_band,
        ),
        Mistake(
            "the coefficient changes by the factor 1.5",
            "1.5 is the limit of the band. The coefficient is doubled or halved.",
            _factor_one_and_a_half,
        ),
    ),
)


# --- repair_policy_loss


def _minimum_too_early(logp, old_logp, advantages, eps_clip):
    ratio = (logp - old_logp).exp()
    clipped = ratio.clamp(1 - eps_clip, 1 + eps_clip)
    pessimistic = torch.minimum(ratio, clipped)
    return -(pessimistic * advantages).mean()


def _maximum_of_the_ratios(logp, old_logp, advantages, eps_clip):
    ratio = (logp - old_logp).exp()
    return -(torch.maximum(ratio, ratio.clamp(1 - eps_clip, 1 + eps_clip)) * advantages).mean()


def _maximum_of_the_products(logp, old_logp, advantages, eps_clip):
    return -_maximum((logp - old_logp).exp(), advantages, eps_clip).mean()


def _clipped_ratio_only(logp, old_logp, advantages, eps_clip):
    return -_clip_only((logp - old_logp).exp(), advantages, eps_clip).mean()


def _objective(logp, old_logp, advantages, eps_clip):
    return -_as_a_loss((logp - old_logp).exp(), advantages, eps_clip).mean()


def _not_clipped(logp, old_logp, advantages, eps_clip):
    return -_unclipped((logp - old_logp).exp(), advantages, eps_clip).mean()


REPAIR_POLICY_LOSS = Exercise(
    "repair_policy_loss",
    ("loss", "gradient"),
    (
        Case(
            "good actions with ratios 1.5 and 0.5",
            dict(
                logp=tensor([0.6, 0.2]).log(),
                old_logp=tensor([0.4, 0.4]).log(),
                advantages=tensor([1.0, 1.0]),
                eps_clip=0.2,
            ),
            (tensor(-0.85), tensor([0.0, -0.25])),
        ),
        Case(
            "a bad action that has become more likely",
            dict(logp=tensor([0.6]).log(), old_logp=tensor([0.4]).log(), advantages=tensor([-1.0]), eps_clip=0.2),
            (tensor(1.5), tensor([1.5])),
        ),
        Case(
            "a bad action that has become rarer",
            dict(logp=tensor([0.2]).log(), old_logp=tensor([0.4]).log(), advantages=tensor([-1.0]), eps_clip=0.2),
            (tensor(0.8), tensor([0.0])),
        ),
        Case(
            "all four together",
            dict(
                logp=tensor([0.6, 0.6, 0.2, 0.2]).log(),
                old_logp=torch.full((4,), 0.4).log(),
                advantages=tensor([1.0, -1.0, 1.0, -1.0]),
                eps_clip=0.2,
            ),
            (tensor(0.15), tensor([0.0, 0.375, -0.125, 0.0])),
        ),
        Case(
            "larger advantages, a smaller ε",
            dict(
                logp=tensor([0.6, 0.2]).log(),
                old_logp=tensor([0.4, 0.4]).log(),
                advantages=tensor([2.0, -2.0]),
                eps_clip=0.1,
            ),
            (tensor(-0.2), tensor([0.0, 0.0])),
        ),
        Case(
            "nothing to clip",
            dict(
                logp=tensor([0.42, 0.38]).log(),
                old_logp=torch.full((2,), 0.4).log(),
                advantages=tensor([2.0, -2.0]),
                eps_clip=0.1,
            ),
            (tensor(-0.1), tensor([-1.05, 0.95])),
        ),
    ),
    (
        Mistake(
            "the larger of the two ratios is taken",
            "That is right for bad actions only. Multiply both ratios by the advantage first, then take the minimum.",
            _maximum_of_the_ratios,
        ),
        Mistake(
            "the larger of the two products is taken",
            "The objective is the smaller product; the minus sign in front of the mean makes a loss of it.",
            _maximum_of_the_products,
        ),
        Mistake(
            "the minimum is gone and the ratio is always clipped",
            "Then a bad action that has become more likely has no gradient at all.",
            _clipped_ratio_only,
        ),
        Mistake("the sign is turned round", "The loss is minus the objective.", _objective),
        Mistake("nothing is clipped", "Keep the clip; only the order of two operations is wrong.", _not_clipped),
    ),
    given=_minimum_too_early,
    measure=loss_and_gradient("logp"),
)

EXERCISES = (
    CLIPPED_SURROGATE,
    CLIP_SLOPE,
    CLIPPED_VALUE_LOSS,
    CATEGORICAL_KL,
    ADAPTIVE_KL_COEF,
    REPAIR_POLICY_LOSS,
)
