"""Checkpoints of a run: whole or not there at all, and how a run goes on from one.

checkpoints/000010/ holds what the run depends on after 10 iterations: state.json, and for each trained model a folder.
On one process that is a safetensors file; under DeepSpeed it is DeepSpeed's own format, one file per rank, which only
this library reads again. Sampling noise and shuffling depend on the seed and the iteration alone, so there is no state
of random numbers to keep.
"""

import json
import math
import os
import shutil
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from ppo_lab.files import TEMPORARY, replace_file
from ppo_lab.llm.engine import DeepSpeedEngine, Engine, TorchEngine, trainable
from ppo_lab.llm.roles import Roles
from ppo_lab.stability import AdaptiveKLController, FixedKLController

FOLDER = "checkpoints"
STATE = "state.json"
WEIGHTS = "engine.safetensors"
REFERENCE = "reference.safetensors"
NAMES = ("iteration", "world_size", "controller", "reward_mean", "reward_std", "reference_moved")
Controller = AdaptiveKLController | FixedKLController


def save_checkpoint(folder: Path, roles: Roles, controller: Controller, iteration: int, keep: int) -> None:
    """Write a checkpoint after `iteration` iterations, then delete all but the `keep` newest. Every rank calls it.

    It is written under another name and renamed at the end, so a kill at any moment leaves the older ones usable.
    Raises OSError, with the older ones intact, when the disk is full or read-only.
    """
    target = folder / FOLDER / f"{iteration:06d}"
    temporary = target.with_name(target.name + TEMPORARY)
    if roles.ranks.rank == 0:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    roles.ranks.wait()
    try:
        for name, engine in engines(roles).items():
            save_engine(temporary / name, engine)
        save_reference(temporary / REFERENCE, roles)
    except OSError as error:
        # What is half written would keep a full disk full.
        shutil.rmtree(temporary, ignore_errors=True)
        raise OSError(error.errno, error.strerror or str(error), str(target)) from error
    roles.ranks.wait()
    if roles.ranks.rank == 0:
        state = {
            "iteration": iteration,
            "world_size": roles.ranks.world_size,
            "controller": controller.state_dict(),
            "reward_mean": roles.reward_mean,
            "reward_std": roles.reward_std,
            "reference_moved": roles.reference_moved,
        }
        replace_file(temporary / STATE, (json.dumps(state, indent=2) + "\n").encode())
        shutil.rmtree(target, ignore_errors=True)
        temporary.rename(target)
        for old in checkpoints(folder)[:-keep]:
            shutil.rmtree(old)
    roles.ranks.wait()


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a run folder that are whole, oldest first."""
    return sorted(path.parent for path in (folder / FOLDER).glob(f"[0-9]*/{STATE}") if path.parent.name.isdigit())


def read_state(checkpoint: Path, world_size: int) -> dict[str, Any]:
    """The state in a checkpoint. Raises ValueError for a damaged one and for one of another number of ranks."""
    state = read_values(checkpoint / STATE)
    if missing := [name for name in NAMES if name not in state]:
        raise ValueError(f"{checkpoint / STATE} is damaged: {', '.join(missing)} is missing")
    kinds = {"iteration": int, "world_size": int, "controller": dict, "reference_moved": bool}
    for name, kind in kinds.items():
        if type(state[name]) is not kind:
            raise ValueError(f"{checkpoint / STATE} is damaged: {name} cannot be {state[name]!r}")
    numbers = (state["reward_mean"], state["reward_std"], state["controller"].get("kl_coef"))
    if not all(type(x) in (int, float) and math.isfinite(x) for x in numbers) or not state["reward_std"] > 0:
        raise ValueError(f"{checkpoint / STATE} is damaged: reward_mean, reward_std and kl_coef are {numbers}")
    if state["iteration"] != int(checkpoint.name):
        raise ValueError(f"{checkpoint / STATE} is damaged: iteration is {state['iteration']}")
    if state["world_size"] != world_size:
        raise ValueError(
            f"{checkpoint} was saved by {state['world_size']} ranks and cannot go on with {world_size}: start as many"
        )
    return state


def read_values(path: Path) -> dict[str, Any]:
    """The names and values in a JSON file. Raises ValueError naming the file if that is not what it holds."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} is damaged: it holds no names and values")
    return values


def load_checkpoint(checkpoint: Path, roles: Roles, controller: Controller) -> int:
    """Put fresh roles and a controller where a checkpoint left them; returns the iterations that are done.

    Raises ValueError like `read_state`, and for weights that are damaged or of another model.
    """
    state = read_state(checkpoint, roles.ranks.world_size)
    for name, engine in engines(roles).items():
        load_engine(checkpoint / name, engine)
    if state["reference_moved"]:
        load_reference(checkpoint / REFERENCE, roles)
    controller.load_state_dict(state["controller"])
    roles.reward_mean, roles.reward_std = state["reward_mean"], state["reward_std"]
    return state["iteration"]


def engines(roles: Roles) -> dict[str, Engine]:
    """The engines of a run by name."""
    named = {"actor": roles.actor, "critic": roles.critic}
    return {name: engine for name, engine in named.items() if engine is not None}


def save_engine(folder: Path, engine: Engine) -> None:
    """The weights and the optimizer's state of one model."""
    if isinstance(engine, DeepSpeedEngine):
        try:
            engine.engine.save_checkpoint(str(folder.parent), tag=folder.name, save_latest=False)
        except RuntimeError as error:
            # What torch's writer makes of a full disk.
            raise OSError(f"{folder} cannot be written: {error}") from error
        return
    tensors = {f"weights.{name}": x for name, x in engine.module.state_dict().items()}
    for index, state in engine.optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{index}.{name}": x for name, x in state.items()}
    folder.mkdir()
    save_tensors(folder / WEIGHTS, tensors)


def load_engine(folder: Path, engine: Engine) -> None:
    """Put a fresh engine where its checkpoint left it."""
    if isinstance(engine, DeepSpeedEngine):
        try:
            engine.engine.load_checkpoint(str(folder.parent), tag=folder.name)
        except (RuntimeError, AssertionError, EOFError, UnpicklingError, OSError) as error:
            raise ValueError(f"{folder} is missing, damaged or does not fit: {error}") from error
        return
    tensors = _read(folder / WEIGHTS)
    weights = {name.removeprefix("weights."): x for name, x in tensors.items() if name.startswith("weights.")}
    own = engine.module.state_dict()
    # Tied weights are stored under one of their names.
    for name in own:
        if name not in weights:
            same = [n for n in weights if n in own and own[n].data_ptr() == own[name].data_ptr()]
            if not same:
                raise ValueError(f"{folder / WEIGHTS} does not fit: {name} is missing")
            weights[name] = weights[same[0]]
    try:
        engine.module.load_state_dict(weights)
    except RuntimeError as error:
        raise ValueError(f"{folder / WEIGHTS} does not fit: {error}") from error
    optimizer = engine.optimizer.state_dict()
    optimizer["state"] = _optimizer_state(tensors, folder / WEIGHTS)
    check_optimizer(optimizer["state"], engine, folder / WEIGHTS)
    engine.optimizer.load_state_dict(optimizer)


def check_optimizer(state: dict[int, dict[str, Tensor]], engine: TorchEngine, path: Path) -> None:
    """Raise ValueError unless every parameter that learns has its state, of its own shape; torch does not look.

    An engine that has not stepped, in a critic's warm-up say, has none.
    """
    learning = trainable(engine.module)
    if state and set(state) != set(range(len(learning))):
        raise ValueError(f"{path} does not fit: optimizer state for {len(state)} of {len(learning)} parameters")
    for index, entries in state.items():
        for name, tensor in entries.items():
            if tensor.dim() and tensor.shape != learning[index].shape:
                shapes = f"{list(tensor.shape)}, its parameter {list(learning[index].shape)}"
                raise ValueError(f"{path} does not fit: optimizer.{index}.{name} has the shape {shapes}")


def save_reference(path: Path, roles: Roles) -> None:
    """The reference, if it has moved since the start: otherwise it is made again from the first checkpoint."""
    if not roles.reference_moved:
        return
    with roles.whole_reference() as reference:
        if roles.ranks.rank == 0:
            tensors = dict(reference.named_parameters()) | dict(reference.named_buffers())
            save_tensors(path, tensors)


def load_reference(path: Path, roles: Roles) -> None:
    """Put the reference where the checkpoint left it."""
    tensors = _read(path)
    with roles.whole_reference(change=True) as reference, torch.no_grad():
        for name, own in (*reference.named_parameters(), *reference.named_buffers()):
            if name in tensors:
                own.copy_(tensors[name])
    roles.reference_moved = True


def save_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write tensors straight to the disk; `replace_file` would need them all once more in memory."""
    temporary = path.with_name(path.name + TEMPORARY)
    safetensors.torch.save_file(_unshared(tensors), temporary)
    with open(temporary, "rb") as file:
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _unshared(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Each storage once: safetensors refuses tied weights."""
    found: dict[int, str] = {}
    for name, x in tensors.items():
        if x.numel():
            found.setdefault(x.data_ptr(), name)
    kept = set(found.values())
    return {name: x.detach().cpu().contiguous() for name, x in tensors.items() if name in kept or not x.numel()}


def _read(path: Path) -> dict[str, Tensor]:
    try:
        with safetensors.safe_open(path, "pt") as file:
            return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except (safetensors.SafetensorError, FileNotFoundError) as error:
        raise ValueError(f"{path} is missing, damaged or no safetensors file: {error}") from error


def _optimizer_state(tensors: dict[str, Tensor], path: Path) -> dict[int, dict[str, Tensor]]:
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if name.startswith("optimizer."):
            _, index, key = name.split(".")
            if not index.isdigit():
                raise ValueError(f"{path} is damaged: it holds {name}")
            state.setdefault(int(index), {})[key] = tensor
    return state
