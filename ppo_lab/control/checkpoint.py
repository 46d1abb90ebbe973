"""What a run leaves on disk: config.json and checkpoint.safetensors. No pickle: they hold numbers and text only.

A folder with these two files is an agent. The checkpoint of a run holds the network, the optimizer's state and that of
the random numbers as tensors, and the rest as JSON in the file's metadata; a bare agent's holds the network only. Every
file is written under a temporary name first and then renamed, so that it is whole at any moment.
"""

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

import safetensors
import safetensors.torch
from torch import Tensor

from ppo_lab.control.algorithms import Learner
from ppo_lab.control.config import Settings
from ppo_lab.control.networks import PPONetwork
from ppo_lab.files import digest, replace_file
from ppo_lab.run_folder import CONFIG

if TYPE_CHECKING:
    from ppo_lab.control.train import Progress

CHECKPOINT = "checkpoint.safetensors"
FORMAT = "ppo_lab control 1"


def save_config(folder: Path, settings: Settings) -> None:
    """Write the settings of a run to config.json."""
    replace_file(folder / CONFIG, (json.dumps(asdict(settings), indent=2) + "\n").encode())


def load_config(folder: Path) -> Settings:
    """The settings in a folder's config.json. Raises ValueError for a folder without one and for a damaged one."""
    path = folder / CONFIG
    if not path.is_file():
        raise ValueError(f"{folder} holds no run: there is no {CONFIG} in it")
    return _settings(_parse(path.read_bytes(), path), path)


def save_checkpoint(folder: Path, settings: Settings, learner: Learner, progress: "Progress") -> None:
    """Write all that a run depends on to checkpoint.safetensors, in place of the one before."""
    tensors = {**_prefixed("network", learner.network.state_dict()), "generator": learner.generator.get_state()}
    for index, state in learner.optimizer.state_dict()["state"].items():
        tensors |= _prefixed(f"optimizer.{index}", state)
    progress_state = {"iteration": progress.iteration, "steps": progress.steps, "recent": list(progress.recent)}
    _write(folder, tensors, settings, progress=progress_state, penalty=learner.penalty.state_dict())


def load_checkpoint(folder: Path, settings: Settings, learner: Learner, progress: "Progress") -> None:
    """Put a learner and a progress where the checkpoint left them; both have to be fresh ones of the same settings.

    Raises ValueError for a checkpoint that is missing, damaged, of other settings, of another environment's shape, or
    of an agent without optimizer state.
    """
    tensors, state = _read(folder, settings)
    path = folder / CHECKPOINT
    if "progress" not in state:
        raise ValueError(f"{path} holds a network only: it can be evaluated, not trained further")
    _load_network_state(learner.network, tensors, path)
    optimizer = learner.optimizer.state_dict()
    optimizer["state"] = _optimizer_state(tensors)
    learner.optimizer.load_state_dict(optimizer)
    learner.generator.set_state(tensors["generator"])
    learner.penalty.load_state_dict(state["penalty"])
    progress.iteration = state["progress"]["iteration"]
    progress.steps = state["progress"]["steps"]
    progress.recent.extend((episode_return, length) for episode_return, length in state["progress"]["recent"])


def save_network(folder: str | Path, network: PPONetwork, settings: Settings) -> None:
    """Write a trained network and its settings as an agent: config.json and checkpoint.safetensors, nothing else."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_config(folder, settings)
    _write(folder, _prefixed("network", network.state_dict()), settings)


def load_network(folder: str | Path) -> tuple[PPONetwork, Settings]:
    """The network and the settings of a run or an agent on disk.

    Raises ValueError, in one line, for a folder that holds none and for damaged files.
    """
    folder = Path(folder)
    settings = load_config(folder)
    tensors, _ = _read(folder, settings)
    path = folder / CHECKPOINT
    ends = tensors.get("network.feature.0.weight"), tensors.get("network.actor_head.weight")
    if any(end is None or end.dim() != 2 for end in ends):
        raise ValueError(f"{path} holds no network of ppo_lab")
    network = PPONetwork(
        ends[0].shape[1],
        ends[1].shape[0],
        settings.hidden_dim,
        shared_trunk=settings.shared_trunk,
        orthogonal=settings.orthogonal,
    )
    _load_network_state(network, tensors, path)
    return network, settings


def _write(folder: Path, tensors: dict[str, Tensor], settings: Settings, **state: Any) -> None:
    text = json.dumps({"settings": asdict(settings), **state})
    tensors = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    # safetensors has no checksum of its own: a flipped bit would load as a slightly different network.
    sha = hashlib.sha256((digest(tensors) + text).encode()).hexdigest()
    metadata = {"format": FORMAT, "state": text, "sha256": sha}
    replace_file(folder / CHECKPOINT, safetensors.torch.save(tensors, metadata))


def _read(folder: Path, settings: Settings) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and JSON state of the checkpoint, whole and of these settings, else ValueError."""
    path = folder / CHECKPOINT
    if not path.is_file():
        raise ValueError(f"{folder} holds no {CHECKPOINT}")
    try:
        with safetensors.safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} is damaged or no safetensors file: {error}") from error
    if metadata.get("format") != FORMAT:
        raise ValueError(f"{path} was not written by this version of ppo_lab.control")
    text = metadata.get("state", "")
    if hashlib.sha256((digest(tensors) + text).encode()).hexdigest() != metadata.get("sha256"):
        raise ValueError(f"{path} is damaged: its checksum does not fit")
    state = _parse(text.encode(), path)
    own = _settings(state["settings"], path)
    for name, value in asdict(own).items():
        if value != getattr(settings, name):
            raise ValueError(f"{path} was trained with {name} {value!r}, {CONFIG} says {getattr(settings, name)!r}")
    return tensors, state


def _load_network_state(network: PPONetwork, tensors: dict[str, Tensor], path: Path) -> None:
    found = {name.removeprefix("network."): x for name, x in tensors.items() if name.startswith("network.")}
    wanted = network.state_dict()
    for name in sorted(wanted.keys() | found.keys()):
        shapes = [list(x[name].shape) if name in x else "none" for x in (found, wanted)]
        if shapes[0] != shapes[1]:
            raise ValueError(f"{path} does not fit: {name} has the shape {shapes[0]}, this network's {shapes[1]}")
    network.load_state_dict(found)


def _optimizer_state(tensors: dict[str, Tensor]) -> dict[int, dict[str, Tensor]]:
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if name.startswith("optimizer."):
            _, index, key = name.split(".")
            state.setdefault(int(index), {})[key] = tensor
    return state


def _prefixed(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}


def _parse(text: bytes, path: Path) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} is damaged: it holds no JSON object")
    return value


def _settings(values: dict[str, Any], path: Path) -> Settings:
    """Settings read from JSON. One that an older file does not know has its default: that is how it was trained."""
    kinds = get_type_hints(Settings)
    for name, value in values.items():
        if name not in kinds:
            raise ValueError(f"{path} has the unknown setting {name}")
        if not _is_a(value, kinds[name]):
            raise ValueError(f"{path}: {name} cannot be {value!r}")
    try:
        return Settings(**values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _is_a(value: Any, kind: Any) -> bool:
    """Whether a value read from JSON is of a field's type; an int may stand for a float, a bool for nothing else."""
    kinds = get_args(kind) or (kind,)
    return type(value) in kinds or (type(value) is int and float in kinds)
