"""A flag for every setting of the agents."""

import argparse
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, get_type_hints

from ppo_lab.command import Parser, reader, shown
from ppo_lab.control.config import Settings, tuned

GROUPS = {
    "what to learn": "env_id algorithm seed total_steps",
    "experience": "num_envs n_steps reward_scale gamma gae_lambda whiten",
    "update": "lr anneal_lr k_epochs minibatch_size eps_clip eps_clip_value value_coef entropy_coef max_grad_norm "
    "stop_kl kl_coef target_kl",
    "network": "hidden_dim shared_trunk orthogonal",
    "checkpoints": "checkpoint_every",
}


def add_settings_flags(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> None:
    """Add one flag per setting. The help shows the tuned defaults of the --env-id and --algorithm in arguments.

    A flag that is not given is absent from the parsed result: `given_settings` has to tell given from default.
    """
    first = Parser(prog=parser.prog, add_help=False, allow_abbrev=False)
    first.add_argument("--env-id", default=Settings.env_id)
    first.add_argument("--algorithm", default=Settings.algorithm)
    chosen, _ = first.parse_known_args(arguments)
    defaults = tuned(chosen.env_id, chosen.algorithm)
    kinds = get_type_hints(Settings)
    helps = {setting.name: setting.metadata["help"] for setting in fields(Settings)}
    for title, names in GROUPS.items():
        group = parser.add_argument_group(title)
        for name in names.split():
            flag = "--" + name.replace("_", "-")
            text = f"{helps[name]} (default: {shown(getattr(defaults, name))})".replace("%", "%%")
            group.add_argument(flag, help=text, default=argparse.SUPPRESS, **reader(kinds[name]))


def given_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings whose flags were given, by name."""
    return {name: value for name, value in vars(arguments).items() if name in get_type_hints(Settings)}
