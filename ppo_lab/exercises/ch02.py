"""Exercises of chapter 2, importance sampling (§13.2). Wrong answers are written as a reader would, without types."""

import math

import torch
from torch import Tensor, tensor

from ppo_lab.exercises.kit import Case, Exercise, Mistake, loss_and_gradient

NO, YES = False, True


# --- importance_ratio


def _upside_down(logp, old_logp):
    return (old_logp - logp).exp()


def _quotient_of_exponentials(logp, old_logp):
    return logp.exp() / old_logp.exp()


def _quotient_of_logs(logp, old_logp):
    return logp / old_logp


def _log_ratio(logp, old_logp):
    return logp - old_logp


def _difference_of_probabilities(logp, old_logp):
    return logp.exp() - old_logp.exp()


IMPORTANCE_RATIO = Exercise(
    "importance_ratio",
    ("ratio",),
    (
        Case(
            "new probability 0.6, old 0.3",
            dict(logp=tensor([0.6]).log(), old_logp=tensor([0.3]).log()),
            tensor([2.0]),
        ),
        Case(
            "the same policy",
            dict(logp=tensor([-0.1, -7.3]), old_logp=tensor([-0.1, -7.3])),
            tensor([1.0, 1.0]),
        ),
        Case(
            "two rows",
            dict(
                logp=tensor([[0.5, 0.2], [0.9, 0.1]]).log(),
                old_logp=tensor([[0.25, 0.8], [0.9, 0.4]]).log(),
            ),
            tensor([[2.0, 0.25], [1.0, 0.25]]),
        ),
        Case(
            "probabilities far below the smallest float",
            dict(logp=tensor([-801.0, -799.0]), old_logp=tensor([-800.0, -800.0])),
            tensor([0.367879, 2.718282]),
        ),
    ),
    (
        Mistake("the ratio is upside down", "The new policy belongs in the numerator.", _upside_down),
        Mistake(
            "both probabilities are computed before they are divided",
            "Both are 0 in float32, and 0/0 is NaN. Subtract the logarithms first.",
            _quotient_of_exponentials,
        ),
        Mistake(
            "the logarithms are divided",
            "log(x/y) is log x − log y, and not log x / log y.",
            _quotient_of_logs,
        ),
        Mistake("the exponential is missing", "This is log ρ. An unchanged policy has ρ = 1.", _log_ratio),
        Mistake(
            "the probabilities are subtracted",
            "A ratio tells how many times as likely an action is now; an unchanged policy has ρ = 1.",
            _difference_of_probabilities,
        ),
    ),
)


# --- self_normalised_estimate


def _ordinary_estimate(f, ratio):
    return (ratio * f).mean()


def _without_weights(f, ratio):
    return f.mean()


def _divided_by_the_sum_of_f(f, ratio):
    return (ratio * f).sum() / f.sum()


def _softmax_weights(f, ratio):
    return (ratio.softmax(-1) * f).sum()


SELF_NORMALISED_ESTIMATE = Exercise(
    "self_normalised_estimate",
    ("estimate",),
    (
        Case("two samples", dict(f=tensor([1.0, 0.0]), ratio=tensor([3.0, 1.0])), tensor(0.75)),
        Case("equal weights", dict(f=tensor([1.0, 2.0, 3.0]), ratio=tensor([1.0, 1.0, 1.0])), tensor(2.0)),
        Case("f is 10 everywhere", dict(f=tensor([10.0, 10.0, 10.0]), ratio=tensor([0.2, 5.0, 0.3])), tensor(10.0)),
        Case(
            "four samples",
            dict(f=tensor([1.0, 2.0, 3.0, 4.0]), ratio=tensor([0.5, 2.0, 1.0, 1.5])),
            tensor(2.7),
        ),
        Case("a sample p never gives", dict(f=tensor([5.0, 1.0]), ratio=tensor([0.0, 2.0])), tensor(1.0)),
    ),
    (
        Mistake(
            "the sum is divided by the number of samples",
            "That is the ordinary estimate. Divide by the sum of the weights.",
            _ordinary_estimate,
        ),
        Mistake(
            "the weights are left out",
            "The samples come from q: without weights this estimates the mean of f under q.",
            _without_weights,
        ),
        Mistake(
            "the sum is divided by the sum of f",
            "The weights are to be normalised: the denominator holds them, and not f.",
            _divided_by_the_sum_of_f,
        ),
        Mistake(
            "the weights go through a softmax",
            "They are probability ratios already, no logarithms. Divide each by their sum.",
            _softmax_weights,
        ),
    ),
)


# --- effective_sample_size


def _sum_not_squared(ratio):
    return ratio.sum() / ratio.square().sum()


def _share_of_the_samples(ratio):
    return ratio.sum().square() / ratio.square().sum() / len(ratio)


def _inverse(ratio):
    return ratio.square().sum() / ratio.sum().square()


def _perplexity(ratio):
    probs = ratio / ratio.sum()
    return torch.special.entr(probs).sum().exp()


def _not_normalised(ratio):
    return 1 / ratio.square().sum()


EFFECTIVE_SAMPLE_SIZE = Exercise(
    "effective_sample_size",
    ("sample size",),
    (
        Case("four equal weights", dict(ratio=tensor([1.0, 1.0, 1.0, 1.0])), tensor(4.0)),
        Case("all of them doubled", dict(ratio=tensor([2.0, 2.0, 2.0, 2.0])), tensor(4.0)),
        Case("one weight of 100", dict(ratio=tensor([100.0, 1.0, 1.0, 1.0])), tensor(1.060582)),
        Case("two weights are 0", dict(ratio=tensor([1.0, 1.0, 0.0, 0.0])), tensor(2.0)),
        Case("mixed weights", dict(ratio=tensor([2.0, 0.5, 1.0, 0.5])), tensor(2.909091)),
    ),
    (
        Mistake(
            "the sum in the numerator is not squared",
            "Doubling all weights must change nothing, so numerator and denominator need the same power.",
            _sum_not_squared,
        ),
        Mistake(
            "the result is divided by the number of samples",
            "That is a share between 0 and 1. A number of samples was asked for: n for equal weights.",
            _share_of_the_samples,
        ),
        Mistake("the fraction is upside down", "Equal weights must give n, the largest value.", _inverse),
        Mistake(
            "the exponential of the entropy of the weights is taken",
            "That is another count of the same kind, the perplexity. Here the squares of the weights are wanted.",
            _perplexity,
        ),
        Mistake(
            "the weights are not normalised first",
            "1 / Σ w² is right for weights that sum to 1. These are ratios.",
            _not_normalised,
        ),
    ),
)


# --- episode_ratio


def _hidden_log_ratio(logp: Tensor, old_logp: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, logp - old_logp, 0.0)


def _mean_ratio(logp, old_logp, mask):
    ratio = torch.where(mask, (logp - old_logp).exp(), 0.0)
    return ratio.sum(-1) / mask.sum(-1)


def _geometric_mean(logp, old_logp, mask):
    return (_hidden_log_ratio(logp, old_logp, mask).sum(-1) / mask.sum(-1)).exp()


def _sum_of_ratios(logp, old_logp, mask):
    return torch.where(mask, (logp - old_logp).exp(), 0.0).sum(-1)


def _padding_counted(logp, old_logp, mask):
    return (logp - old_logp).sum(-1).exp()


def _multiplied_by_the_mask(logp, old_logp, mask):
    return ((logp - old_logp) * mask).sum(-1).exp()


def _ratio_zero_in_the_padding(logp, old_logp, mask):
    return torch.where(mask, (logp - old_logp).exp(), 0.0).prod(-1)


EPISODE_RATIO = Exercise(
    "episode_ratio",
    ("weight",),
    (
        Case(
            "one step",
            dict(logp=tensor([[0.6]]).log(), old_logp=tensor([[0.3]]).log(), mask=tensor([[YES]])),
            tensor([2.0]),
        ),
        Case(
            "ratios 2, 0.5 and 3",
            dict(
                logp=tensor([[0.6, 0.2, 0.9]]).log(),
                old_logp=tensor([[0.3, 0.4, 0.3]]).log(),
                mask=tensor([[YES, YES, YES]]),
            ),
            tensor([3.0]),
        ),
        Case(
            "two episodes, the second is shorter",
            dict(
                logp=tensor([[-1.0, -1.0, -1.0], [math.log(0.6), 5.0, 5.0]]),
                old_logp=tensor([[-1.5, -1.0, -1.0], [math.log(0.4), 3.0, 3.0]]),
                mask=tensor([[YES, YES, YES], [YES, NO, NO]]),
            ),
            tensor([1.648721, 1.5]),
        ),
        Case(
            "NaN in the padding",
            dict(
                logp=tensor([[math.log(0.6), math.log(0.9), math.nan]]),
                old_logp=tensor([[math.log(0.3), math.log(0.3), -math.inf]]),
                mask=tensor([[YES, YES, NO]]),
            ),
            tensor([6.0]),
        ),
        Case(
            "eight steps with ratio 1.5",
            dict(
                logp=torch.full((1, 8), 0.6).log(),
                old_logp=torch.full((1, 8), 0.4).log(),
                mask=torch.full((1, 8), YES),
            ),
            tensor([25.628906]),
        ),
    ),
    (
        Mistake(
            "the mean of the ratios is taken",
            "The probability of an episode is a product over its steps, and so is its ratio.",
            _mean_ratio,
        ),
        Mistake(
            "the log-ratios are averaged, not summed",
            "That is the geometric mean of the ratios, which forgets how long the episode is.",
            _geometric_mean,
        ),
        Mistake(
            "the ratios are added",
            "Probabilities of successive steps multiply: add the log-ratios, then take the exponential.",
            _sum_of_ratios,
        ),
        Mistake("the padding is counted", "Only steps with mask True belong to the episode.", _padding_counted),
        Mistake(
            "the mask is multiplied on",
            "0 times NaN is NaN. torch.where(mask, log_ratio, 0.0) leaves the padding out.",
            _multiplied_by_the_mask,
        ),
        Mistake(
            "the ratio is 0 in the padding",
            "One factor of 0 makes the product 0. A step that does not count has the ratio 1.",
            _ratio_zero_in_the_padding,
        ),
    ),
)


# --- surrogate_gradient


def _one_hot(action: int, logits: Tensor) -> Tensor:
    return torch.eye(len(logits), dtype=logits.dtype)[action]


def _ratio(logits: Tensor, old_logits: Tensor, action: int) -> Tensor:
    return (logits.log_softmax(-1) - old_logits.log_softmax(-1))[action].exp()


def _without_the_ratio(logits, old_logits, action, advantage):
    return advantage * (_one_hot(action, logits) - logits.softmax(-1))


def _score_of_the_old_policy(logits, old_logits, action, advantage):
    return _ratio(logits, old_logits, action) * advantage * (_one_hot(action, logits) - old_logits.softmax(-1))


def _inverse_ratio(logits, old_logits, action, advantage):
    return _ratio(old_logits, logits, action) * advantage * (_one_hot(action, logits) - logits.softmax(-1))


def _gradient_of_the_loss(logits, old_logits, action, advantage):
    return _ratio(logits, old_logits, action) * advantage * (logits.softmax(-1) - _one_hot(action, logits))


def _without_the_advantage(logits, old_logits, action, advantage):
    return _ratio(logits, old_logits, action) * (_one_hot(action, logits) - logits.softmax(-1))


SURROGATE_GRADIENT = Exercise(
    "surrogate_gradient",
    ("gradient",),
    (
        Case(
            "the old policy itself",
            dict(logits=tensor([0.0, 0.0]), old_logits=tensor([0.0, 0.0]), action=0, advantage=1.0),
            tensor([0.5, -0.5]),
        ),
        Case(
            "a good action, twice as likely now",
            dict(logits=tensor([0.6, 0.4]).log(), old_logits=tensor([0.3, 0.7]).log(), action=0, advantage=1.0),
            tensor([0.8, -0.8]),
        ),
        Case(
            "a bad action, rarer now",
            dict(
                logits=tensor([0.5, 0.3, 0.2]).log(),
                old_logits=tensor([0.2, 0.3, 0.5]).log(),
                action=2,
                advantage=-1.0,
            ),
            tensor([0.2, 0.12, -0.32]),
        ),
        Case(
            "ratio 1, but another policy",
            dict(
                logits=tensor([0.5, 0.3, 0.2]).log(),
                old_logits=tensor([0.2, 0.3, 0.5]).log(),
                action=1,
                advantage=2.0,
            ),
            tensor([-1.0, 1.4, -0.4]),
        ),
        Case(
            "logits that are not normalised",
            dict(
                logits=tensor([0.6, 0.4]).log() + 5,
                old_logits=tensor([0.3, 0.7]).log() - 2,
                action=0,
                advantage=0.5,
            ),
            tensor([0.4, -0.4]),
        ),
    ),
    (
        Mistake(
            "the ratio is missing",
            "This is the plain policy gradient, right at θ_old only. ∇ρ = ρ·∇log π_θ(a).",
            _without_the_ratio,
        ),
        Mistake(
            "the score is that of the old policy",
            "The derivative is taken with respect to the new logits: the probabilities in the score are the new ones.",
            _score_of_the_old_policy,
        ),
        Mistake("the ratio is upside down", "ρ = π_θ(a) / π_old(a).", _inverse_ratio),
        Mistake(
            "the sign is turned round",
            "The surrogate is to be maximised: a good action's own logit has a positive derivative.",
            _gradient_of_the_loss,
        ),
        Mistake(
            "the advantage is missing", "The gradient of ρ·Â was asked for, not that of ρ.", _without_the_advantage
        ),
    ),
)


# --- repair_surrogate


def _logp(logits: Tensor, actions: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(-1, actions[:, None]).squeeze(-1)


def _two_slips(logits, actions, old_logp, advantages):
    logp = logits.log_softmax(-1).gather(-1, actions[:, None]).squeeze(-1)
    log_ratio = old_logp - logp
    ratio = log_ratio.exp()
    return (ratio * advantages).mean()


def _only_the_ratio_mended(logits, actions, old_logp, advantages):
    return ((_logp(logits, actions) - old_logp).exp() * advantages).mean()


def _only_the_sign_mended(logits, actions, old_logp, advantages):
    return -((old_logp - _logp(logits, actions)).exp() * advantages).mean()


def _plain_policy_gradient(logits, actions, old_logp, advantages):
    return -(_logp(logits, actions) * advantages).mean()


def _product_over_the_batch(logits, actions, old_logp, advantages):
    return -((_logp(logits, actions) - old_logp).sum().exp() * advantages).mean()


def _summed(logits, actions, old_logp, advantages):
    return -((_logp(logits, actions) - old_logp).exp() * advantages).sum()


def _detached(logits, actions, old_logp, advantages):
    return -((_logp(logits, actions) - old_logp).exp().detach() * advantages).mean()


REPAIR_SURROGATE = Exercise(
    "repair_surrogate",
    ("loss", "gradient"),
    (
        Case(
            "the old policy itself, mean advantage 0",
            dict(
                logits=tensor([[0.0, 0.0], [0.0, 0.0]]),
                actions=tensor([0, 1]),
                old_logp=tensor([0.5, 0.5]).log(),
                advantages=tensor([1.0, -1.0]),
            ),
            (tensor(0.0), tensor([[-0.25, 0.25], [-0.25, 0.25]])),
        ),
        Case(
            "a good action, more likely now",
            dict(
                logits=tensor([[0.6, 0.4]]).log(),
                actions=tensor([0]),
                old_logp=tensor([0.3]).log(),
                advantages=tensor([1.0]),
            ),
            (tensor(-2.0), tensor([[-0.8, 0.8]])),
        ),
        Case(
            "a good action, rarer now",
            dict(
                logits=tensor([[0.3, 0.7]]).log(),
                actions=tensor([0]),
                old_logp=tensor([0.6]).log(),
                advantages=tensor([1.0]),
            ),
            (tensor(-0.5), tensor([[-0.35, 0.35]])),
        ),
        Case(
            "two samples with ratios 2 and 0.5",
            dict(
                logits=tensor([[0.6, 0.4], [0.8, 0.2]]).log(),
                actions=tensor([0, 1]),
                old_logp=tensor([0.3, 0.4]).log(),
                advantages=tensor([1.0, -3.0]),
            ),
            (tensor(-0.25), tensor([[-0.4, 0.4], [-0.6, 0.6]])),
        ),
    ),
    (
        Mistake(
            "the ratio is right and the sign of the loss is not",
            "The surrogate is to be maximised, an optimizer minimises: the two slips hid each other.",
            _only_the_ratio_mended,
        ),
        Mistake(
            "the sign is right and the ratio is upside down",
            "ρ = π_θ / π_old: the new log-probability comes first.",
            _only_the_sign_mended,
        ),
        Mistake(
            "the ratio is replaced by the log-probability",
            "Its gradient is right at the old policy only.",
            _plain_policy_gradient,
        ),
        Mistake(
            "one ratio is made of the whole batch",
            "Each sample has its own ratio: nothing is summed before the exponential.",
            _product_over_the_batch,
        ),
        Mistake("the samples are summed", "The loss is a mean over the samples.", _summed),
        Mistake("no gradient flows through the ratio", "The ratio carries the gradient: do not detach it.", _detached),
    ),
    given=_two_slips,
    measure=loss_and_gradient("logits"),
)

EXERCISES = (
    IMPORTANCE_RATIO,
    SELF_NORMALISED_ESTIMATE,
    EFFECTIVE_SAMPLE_SIZE,
    EPISODE_RATIO,
    SURROGATE_GRADIENT,
    REPAIR_SURROGATE,
)
