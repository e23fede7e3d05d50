"""Resuming: the state in a checkpoint's `resume.pt`, and how a run continues from it.

Optimisers, schedules, random states of all ranks, the loop's own state, and those trained weights that the model's own
files do not hold bit for bit: a critic's, rounded ones, adapters that were joined with others. Metrics and samples of
steps that are repeated are dropped from the logs.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightrlhf.cli.errors import UsageError
from lightrlhf.maths.finite import leaves, not_finite
from lightrlhf.models.lora import is_initial
from lightrlhf.models.sharding import full_tensors
from lightrlhf.storage.checkpoint import checkpoints, newest_checkpoint
from lightrlhf.storage.run_dir import check_args, check_logged
from lightrlhf.storage.seals import damage
from lightrlhf.storage.writing import replacing
from lightrlhf.training.provenance import check_given


def read_state(
    directory: Path, program: str, given: Mapping[str, str]
) -> tuple[dict[str, Any], list[tuple[Path, str]]]:
    """`resume.pt` of the newest good checkpoint of a run, memory-mapped, so that ranks share its pages.

    Second, the damaged ones that are newer, newest first, with what is wrong with each. given: the objects that
    `train` was called with, by name.
    Raises: UsageError when there is none, none is good, it is of another program, or the run began with other objects.
    """
    try:
        stored = json.loads((directory / "args.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        raise UsageError(f"--resume_from {directory} is not an experiment dir: no readable args.json") from None
    stored = stored if isinstance(stored, dict) else {}
    if stored.get("program") != program:
        raise UsageError(f"--resume_from {directory} is a run of {stored.get('program')}, not of {program}")
    if "began" not in stored:
        raise UsageError(f"{directory / 'args.json'} does not say how the run began; restore it")
    check_args(directory)
    check_given(stored.get("given", {}), given, f"--resume_from {directory}")
    damaged: list[tuple[Path, str]] = []
    for folder in reversed(checkpoints(directory)):
        state, problem = read_checkpoint(folder)
        if state is not None:
            return state, damaged
        damaged.append((folder, problem))
    if not damaged:
        newest_checkpoint(directory, "--resume_from")  # raises: there is none
    found = "; ".join(f"{folder.name}: {problem}" for folder, problem in damaged)
    raise UsageError(f"--resume_from {directory} has no good checkpoint ({found}); start a new run")


def read_checkpoint(folder: Path) -> tuple[dict[str, Any] | None, str]:
    """`resume.pt` of a checkpoint; None if it is damaged or not finite, and in which way.

    Reading all weights and optimiser states once costs a fraction of comparing the hashes.
    """
    if problem := damage(folder):
        return None, problem
    try:
        state = torch.load(folder / "resume.pt", weights_only=True, mmap=True, map_location="cpu")
        state["learned"] = with_stored(state["learned"], state.pop("stored"), folder)
        parts = {name: state[name] for name in ("learned", "optimizers", "schedulers", "extra")}
        parts["loss_scale"] = state.get("loss_scale")
    except Exception as error:  # unpickling raises whatever the bytes mean
        return None, f"resume.pt cannot be read: {type(error).__name__}"
    bad = not_finite(leaves(parts))
    return (None, f"{bad[0]} is not finite") if bad else (state, "")


def device_rng_state(device: torch.device) -> Tensor | None:
    """State of a device's own random generator, (bytes,) on the host; None on a CPU, whose generator is torch's."""
    if device.type == "cpu":
        return None
    module: Any = torch.get_device_module(device)
    state: Tensor = module.get_rng_state() if device.type == "mps" else module.get_rng_state(device)
    return state


def set_device_rng_state(device: torch.device, state: Tensor | None) -> None:
    """Set a device's own random generator to a state; None leaves it."""
    if state is not None:
        module: Any = torch.get_device_module(device)
        module.set_rng_state(*([state] if device.type == "mps" else [state, device]))


class StepStart(NamedTuple):
    """The state of this rank at the start of a step, which its rollout or scoring may change."""

    step: int  # finished steps
    rng: dict[str, Tensor]  # states of torch's random generators: (bytes,) each
    python_rng: Any
    extra: dict[str, Any]  # the loop's own state


def step_start(step: int, device: torch.device, extra: dict[str, Any]) -> StepStart:
    """The state that a step begins with."""
    states = {"rng": torch.get_rng_state()}
    own = device_rng_state(device)
    if own is not None:
        states[f"{device.type}_rng"] = own
    return StepStart(step, states, random.getstate(), extra)


def rng_states(states: dict[str, Tensor], world_size: int) -> dict[str, Tensor]:
    """States of the random generators on all ranks, gathered from each rank's own: (ranks, bytes) each."""
    gathered = [states]
    if world_size > 1:
        gathered = [states] * world_size
        torch.distributed.all_gather_object(gathered, states)
    return {name: torch.stack([rank_states[name] for rank_states in gathered]) for name in states}


def restore_rng(state: dict[str, Any], device: torch.device, rank: int) -> None:
    """Set the random generators of a rank to the states of `resume.pt`."""
    rank = min(rank, len(state["rng"]) - 1)
    torch.set_rng_state(state["rng"][rank].clone())
    own = state.get(f"{device.type}_rng")
    set_device_rng_state(device, None if own is None else own[rank].clone())
    random.setstate(state["python_rng"])


def trained_weights(module: nn.Module, keep: bool = True) -> dict[str, Tensor]:
    """Trainable parameters by name, and where they began if that counts, gathered on the CPU; see `full_tensors`."""
    named = module.named_parameters()
    return {name: full_tensors(p, keep) for name, p in named if p.requires_grad or is_initial(name)}


Learned = dict[str, dict[str, Tensor]]  # trained weights by parameter, by learner


def without_stored(learned: Learned, folder: Path) -> tuple[Learned, dict[str, dict[str, str]]]:
    """The trained weights that the safetensors files of a folder lack; and of the others, their names there.

    Weights are found by their bits, for transformers and peft save them under other names than parameters have.
    """
    stored, known = read_weights(folder), defaultdict(list)
    for key, tensor in stored.items():
        known[_glimpse(tensor)].append(key)
    places: dict[str, dict[str, str]] = {learner: {} for learner in learned}
    for learner, weights in learned.items():
        for name, weight in weights.items():
            bits = _bits(weight)
            same = (key for key in known[_glimpse(weight)] if torch.equal(_bits(stored[key]), bits))
            if key := next(same, ""):
                places[learner][name] = key
    rest = {of: {name: weight for name, weight in own.items() if name not in places[of]} for of, own in learned.items()}
    return rest, places


def with_stored(learned: Learned, places: dict[str, dict[str, str]], folder: Path) -> Learned:
    """All trained weights: from `resume.pt`, and the others from the model's files, memory-mapped.

    Raises: KeyError when these do not have one of them.
    """
    stored = read_weights(folder) if any(places.values()) else {}
    found = {of: {name: stored[key] for name, key in keys.items()} for of, keys in places.items()}
    return {learner: {**found.get(learner, {}), **weights} for learner, weights in learned.items()}


def read_weights(folder: Path) -> dict[str, Tensor]:
    """The weights in the safetensors files of a folder by their names there, memory-mapped."""
    from safetensors.torch import load_file

    return {key: tensor for file in sorted(folder.glob("*.safetensors")) for key, tensor in load_file(file).items()}


def _glimpse(tensor: Tensor) -> tuple[Any, ...]:
    """Dtype, shape and some values of a tensor: the same for equal ones, and cheap."""
    bits = _bits(tensor)
    return tensor.dtype, tensor.shape, *bits[:: max(1, len(bits) // 16)].tolist()


def _bits(tensor: Tensor) -> Tensor:
    """The values of a tensor as one row of whole numbers, by which 0 differs from -0."""
    numbers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.reshape(-1).view(numbers[tensor.element_size()])


def load_trained(weights: dict[str, Tensor], module: nn.Module, directory: str) -> None:
    """Load trained weights into a module. Raises: UsageError when it has no such parameters."""
    now = dict(module.named_parameters())
    for key, value in weights.items():
        if key not in now or now[key].shape != value.shape:
            raise UsageError(f"--resume_from {directory} was trained with another model: {key}")
    if missing := [key for key, parameter in now.items() if parameter.requires_grad and key not in weights]:
        raise UsageError(f"--resume_from {directory} lacks trained weights: {missing[0]}")
    module.load_state_dict(weights, strict=False)


def forget_rows_after(path: Path, step: int) -> None:
    """Drop logged rows of steps that a resumed run repeats, and a last line that a kill cut.

    Raises: UsageError when a row has no step.
    """
    if not path.is_file():
        return
    with replacing(path) as temporary, path.open("rb") as file, temporary.open("wb") as kept:
        for number, line in enumerate(file, start=1):
            try:
                row = json.loads(line.decode("utf-8", "replace"))
            except (ValueError, RecursionError):
                continue
            check_logged(row, path, number)
            if row["step"] <= step:
                kept.write(line.removesuffix(b"\n") + b"\n")
