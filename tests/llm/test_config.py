"""The settings: every value that has no meaning is refused by name, and every name is known."""

import json
from dataclasses import FrozenInstanceError, fields, replace

import pytest

from ppo_lab.llm.config import (
    ADVANTAGES,
    DataSettings,
    EngineSettings,
    ModelSettings,
    PPOSettings,
    RunSettings,
    all_fields,
    check_ranks,
    flat,
    load_preset,
    make_settings,
    preset_names,
)

NAN, INF = float("nan"), float("inf")
WRONG = [
    *[(name, 0, "at least 1") for name in ("iterations", "batch_size", "max_new_tokens", "k_epochs")],
    *[(name, 0, "at least 1") for name in ("minibatch_size", "micro_batch_size", "score_batch_size")],
    *[(name, -1, "0 or more") for name in ("seed", "critic_warmup", "refresh_reference_every", "warmup_iterations")],
    *[(name, -0.1, "0 or more") for name in ("kl_coef", "kl_loss_coef", "missing_eos_penalty")],
    *[(name, -0.1, "0 or more") for name in ("value_coef", "entropy_coef")],
    *[(name, 0.0, "positive") for name in ("temperature", "target_kl", "kl_horizon", "reward_clip", "eps_clip")],
    *[(name, 0.0, "positive") for name in ("eps_clip_high", "eps_clip_value", "lr", "critic_lr", "max_grad_norm")],
    *[(name, 0.0, "positive") for name in ("stop_kl", "ratio_tolerance")],
    *[(name, -1.0, "positive") for name in ("target_kl", "kl_horizon", "lr", "temperature")],
    *[(name, value, "between 0 and 1") for name in ("gamma", "gae_lambda") for value in (-0.01, 1.01)],
    *[(name, "k4", "one of k1, k2, k3") for name in ("kl_kind", "kl_loss_kind")],
    ("seed", 2**31, r"below 2\^31"),
    ("dual_clip", 1.0, "greater than 1"),
    ("top_k", 50, "0 in training: the ratio compares"),
    ("top_p", 0.9, "1.0 in training: the ratio compares"),
    ("min_p", 0.1, "0.0 in training: the ratio compares"),
    ("critic", "value", "one of reward, actor, shared"),
    ("long_prompts", "drop", "one of refuse, cut"),
    ("threads", 0, "at least 1"),
    ("sample_every", -1, "at least 0"),
    ("n_samples", 0, "at least 1"),
    ("sampler_correction", 0.0, "positive"),
    ("checkpoint_every", -1, "at least 0"),
    ("keep", 0, "at least 1"),
    ("eval_every", -1, "at least 0"),
    ("zero_stage", 4, "0, 1, 2 or 3"),
    ("zero_stage", -1, "0, 1, 2 or 3"),
]
FLOATS = sorted(name for name, (_, kind, _, _) in all_fields().items() if kind in (float, float | None))


@pytest.mark.parametrize(("name", "value", "right"), WRONG)
def test_a_wrong_value_is_named_with_what_it_got_and_what_would_be_right(name, value, right):
    with pytest.raises(ValueError, match=f"^{name} must be {right}.*, got ") as error:
        make_settings({name: value})
    assert "\n" not in str(error.value) and str(value) in str(error.value)


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("name", FLOATS)
def test_a_number_that_is_not_finite_is_refused(name, value):
    with pytest.raises(ValueError, match=f"^{name} must be "):
        make_settings({name: value})


def test_B22_an_adaptive_coefficient_of_0_would_stay_0():
    with pytest.raises(ValueError, match="kl_coef must be positive with adaptive_kl"):
        PPOSettings(adaptive_kl=True, kl_coef=0.0)
    assert PPOSettings(adaptive_kl=False, kl_coef=0.0).kl_coef == 0


def test_optional_limits_can_be_switched_off():
    names = ("reward_clip", "eps_clip_high", "dual_clip", "eps_clip_value", "stop_kl", "ratio_tolerance", "stop_token")
    settings = make_settings(dict.fromkeys(names))
    assert all(getattr(settings.ppo, name) is None for name in names)


def test_yaml_reads_3e_4_as_text_and_it_becomes_a_number():
    assert make_settings({"lr": "3e-4", "reward_clip": "1e1", "kl_coef": 1}).ppo == PPOSettings(
        lr=3e-4, reward_clip=10.0, kl_coef=1.0
    )


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("lr", "fast", "float"),
        ("lr", None, "float"),
        ("lr", True, "float"),
        ("iterations", 1.5, "int"),
        ("iterations", "3", "int"),
        ("adaptive_kl", 1, "bool"),
        ("adaptive_kl", "yes", "bool"),
        ("stop_kl", "never", "float or none"),
        ("actor", 3, "str"),
        ("judge", 3, "str or none"),
    ],
)
def test_a_value_of_another_type_is_named_with_its_place(name, value, kind):
    with pytest.raises(ValueError, match=f"^run.yaml: {name} must be {kind}, got {value!r}$"):
        make_settings({name: value}, source="run.yaml")


@pytest.mark.parametrize("name", ["learning_rate", "ppo", "LR"])
def test_an_unknown_setting_is_named_with_its_place(name):
    with pytest.raises(ValueError, match=f"^run.yaml: unknown setting '{name}'$"):
        make_settings({name: 1}, source="run.yaml")


def test_settings_that_are_not_named_keep_their_defaults():
    assert make_settings({}) == RunSettings()
    settings = make_settings({"lr": 1e-5, "critic": "shared", "threads": 2, "long_prompts": "cut"})
    expected = RunSettings(
        ModelSettings(critic="shared"),
        DataSettings(long_prompts="cut"),
        PPOSettings(lr=1e-5),
        EngineSettings(threads=2),
    )
    assert settings == expected


def test_a_run_can_be_set_up_again_from_its_record():
    settings = make_settings({"lr": 1 / 3, "seed": 7, "judge": "a:b", "stop_kl": 0.1, "bf16": True})
    assert make_settings(json.loads(json.dumps(flat(settings)))) == settings


def test_every_setting_has_one_name_and_a_sentence_of_help():
    groups = (ModelSettings, DataSettings, PPOSettings, EngineSettings)
    names = [x.name for group in groups for x in fields(group)]
    assert len(names) == len(set(names)) == len(all_fields())
    assert all(text and "\n" not in text for _, _, _, text in all_fields().values())


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_is_valid_and_says_only_what_differs(name):
    preset = load_preset(name)
    make_settings(preset, source=name)
    assert "tiny" in preset_names()


def test_an_unknown_preset_is_refused_with_those_there_are():
    with pytest.raises(ValueError, match=r"^preset must be one of .*tiny.*, got 'huge'$"):
        load_preset("huge")
    with pytest.raises(ValueError, match="preset must be one of"):
        load_preset("../presets/tiny")


def test_settings_cannot_be_changed_behind_the_checks():
    settings = PPOSettings()
    with pytest.raises(FrozenInstanceError):
        settings.lr = -1.0
    with pytest.raises(ValueError, match="lr must be positive"):
        replace(settings, lr=-1.0)


def test_a_shared_trunk_cannot_warm_its_critic_up_alone():
    with pytest.raises(ValueError, match="critic_warmup must be 0 with critic shared"):
        make_settings({"critic": "shared", "critic_warmup": 2})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"offload_optimizer": True}, "offload_optimizer needs zero_stage 1, 2 or 3, got 0"),
        ({"offload_reference": True, "zero_stage": 2}, "offload_reference needs zero_stage 3, got 2"),
        ({"eval_every": 5}, "eval_every needs eval_prompts, got none"),
    ],
)
def test_what_does_not_go_together_is_named(values, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        make_settings(values)


@pytest.mark.parametrize(
    ("values", "world_size", "message"),
    [
        ({"batch_size": 7}, 8, "batch_size must be at least the number of ranks, got 7 for 8 ranks"),
        ({"minibatch_size": 4}, 8, "minibatch_size must be at least the number of ranks, got 4 for 8 ranks"),
        ({"bf16": True}, 2, "bf16 on several ranks needs zero_stage 1, 2 or 3, got 0"),
    ],
)
def test_B38_numbers_that_do_not_go_with_the_ranks_are_named(values, world_size, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        check_ranks(make_settings(values), world_size)


def test_B38_any_batch_that_gives_each_rank_an_answer_will_do():
    # 31 answers in minibatches of 9 and micro-batches of 2 on 8 ranks: what is left over is filled with empty rows.
    check_ranks(make_settings({"batch_size": 31, "minibatch_size": 9, "micro_batch_size": 2}), 8)
    check_ranks(make_settings({"batch_size": 8, "minibatch_size": 8}), 8)
    check_ranks(make_settings({"batch_size": 1, "minibatch_size": 1, "bf16": True}), 1)
    check_ranks(make_settings({"bf16": True, "zero_stage": 1}), 2)


# --- advantages without a critic


@pytest.mark.parametrize("kind", ADVANTAGES)
def test_every_kind_of_advantage_is_a_setting(kind):
    settings = make_settings({"advantage": kind, "group_size": 4})
    assert (settings.ppo.advantage, settings.ppo.group_size) == (kind, 4)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"advantage": "ppo"}, "advantage must be one of gae, grpo, dr-grpo, rloo, reinforce.*, got 'ppo'"),
        ({"advantage": "grpo"}, "group_size must be at least 2 with advantage grpo, got 1"),
        ({"advantage": "dr-grpo"}, "group_size must be at least 2"),
        ({"advantage": "rloo"}, "group_size must be at least 2"),
        ({"advantage": "reinforce++-baseline"}, "group_size must be at least 2"),
        ({"advantage": "grpo", "group_size": 2, "gamma": 0.9}, "gamma must be 1 with advantage grpo.*, got 0.9"),
        ({"group_size": 0}, "group_size must be at least 1, got 0"),
        ({"group_size": 5}, "batch_size must be a multiple of group_size 5, got 128"),
        ({"advantage": "remax", "critic_warmup": 1}, "critic_warmup must be 0 with advantage remax"),
        ({"advantage": "remax", "bootstrap_truncated": True}, "bootstrap_truncated must be no with advantage remax"),
        ({"advantage": "remax", "whiten_scores": True}, "whiten_scores must be no with advantage remax"),
        ({"advantage": "remax", "whiten_rewards": True}, "whiten_rewards must be no with advantage remax"),
        ({"advantage": "reinforce++", "critic": "shared"}, "critic must not be shared with advantage reinforce"),
    ],
)
def test_what_does_not_go_with_an_advantage_is_refused(values, message):
    with pytest.raises(ValueError, match=message):
        make_settings(values)
