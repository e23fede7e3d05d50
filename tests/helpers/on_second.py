"""Programs on the second device, in a process of their own: `--accelerator second` is what it computes on here.

As a program it reads a job from its first argument, `{"calls": {"name": ["lightrlhf.sft", ["--flag", ...]]}}`, and
writes by name how each call failed, or "", and what made the host wait in each phase of its steps. `mps_rules`: see
`using_device`; `fault`: one of `FAULTS`, planted in the library first; `varlen`: texts in a row attend by a stand-in
for CUDA's kernel, whose calls are reported.
"""

import contextlib
import importlib
import io
import json
import sys
import traceback
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from helpers import second_device, varlen
from helpers.second_device import NAME

waiting: dict[str, list[list[int]]] = {}  # host reads and waiting copies in each phase of each step, by phase


def _bad_loss(original: Any, *args: Any, **options: Any) -> Any:
    return original(*args, **options) + torch.zeros(1)


def _reading(original: Any, *args: Any, **options: Any) -> Any:
    result = original(*args, **options)
    found = [getattr(one, "input_ids", one) for one in tree_leaves([result, *args])]
    held = [leaf for leaf in found if isinstance(leaf, torch.Tensor) and leaf.numel()]
    (held[0] if held else args[0].row).flatten()[0].item()
    return result


FAULTS = {  # by room: the function that gets the fault, and what wraps it
    "maths": ("lightrlhf.maths.ops", "policy_loss", _bad_loss),
    "models": ("lightrlhf.models.roles", "Role._base", _reading),
    "data": ("lightrlhf.data.batch", "Batch.to", _reading),
    "training": ("lightrlhf.training.learners", "Learners.backward", _reading),
    "generation": ("lightrlhf.generation.slots", "Slots._decode", _reading),
}


def plant(room: str) -> None:
    """Put the fault of a room into the library."""
    module, path, wrap = FAULTS[room]
    owner: Any = importlib.import_module(module)
    *classes, name = path.split(".")
    for one in classes:
        owner = getattr(owner, one)
    setattr(owner, name, _wrapped(wrap, getattr(owner, name)))


def _wrapped(wrap: Any, original: Any) -> Any:
    return lambda *args, **options: wrap(original, *args, **options)


def prepare() -> None:
    """Let the library find the device, and Fabric compute on it; before its programs are imported."""
    import lightning.fabric
    from lightning.fabric.accelerators import CPUAccelerator
    from lightning.fabric.strategies import SingleDeviceStrategy

    from lightrlhf.models import loading
    from lightrlhf.training.phases import Phases

    class Accelerator(CPUAccelerator):
        def setup_device(self, device: torch.device) -> None:
            pass

    fabric, find = lightning.fabric.Fabric, loading.find_device

    def make_fabric(accelerator: str, devices: int, num_nodes: int, strategy: Any, **precision: Any) -> Any:
        if accelerator != NAME:
            return fabric(accelerator=accelerator, devices=devices, num_nodes=num_nodes, strategy=strategy, **precision)
        return fabric(strategy=SingleDeviceStrategy(torch.device(NAME, 0), accelerator=Accelerator()), **precision)

    def find_device(accelerator: str, flag: str = "--accelerator") -> torch.device:
        return torch.device(NAME, 0) if accelerator in ("auto", NAME) else find(accelerator, flag)

    measured = Phases.phase

    @contextlib.contextmanager
    def phase(self: Any, name: str, rows: Any = ()) -> Any:
        before = [counter.total() for counter in (second_device.reads, second_device.waits)]
        with measured(self, name, rows):
            yield
        after = [counter.total() for counter in (second_device.reads, second_device.waits)]
        waiting.setdefault(name, []).append([late - early for early, late in zip(before, after)])

    Phases.phase = phase
    torch.set_num_threads(1)
    lightning.fabric.Fabric = make_fabric
    for module in [one for name, one in sys.modules.items() if name.startswith("lightrlhf.")]:
        if getattr(module, "find_device", None) is find:
            module.find_device = find_device


def run(calls: dict[str, tuple[str, list[str]]], mps_rules: bool = False) -> dict[str, Any]:
    """By name: how the call failed, or "", and its host reads and waiting copies by call site."""
    found: dict[str, Any] = {}
    with second_device.using_device(mps_rules):
        for name, (module, flags) in calls.items():
            second_device.reads.clear()
            second_device.waits.clear()
            varlen.calls.clear()
            waiting.clear()
            problem, printed = "", io.StringIO()
            try:
                with contextlib.redirect_stdout(printed):
                    importlib.import_module(module).main(flags)
            except BaseException as error:  # an exit, too
                problem = "" if isinstance(error, SystemExit) and not error.code else traceback.format_exc()
            transfers = {"reads": dict(second_device.reads), "waits": dict(second_device.waits)}
            found[name] = {"problem": problem, "printed": printed.getvalue(), **transfers, "phases": dict(waiting)}
            found[name]["rows_of_texts"] = len(varlen.calls)
    return found


def attend_by_text() -> None:
    """Let texts follow one another in a row on the device, as on CUDA."""
    from lightrlhf.models import varlen as library

    library.DEVICES.add(NAME)
    library.kernel = lambda: varlen.attend_alone


if __name__ == "__main__":
    job = json.loads(sys.argv[1])
    prepare()
    if job.get("varlen"):
        attend_by_text()
    if "fault" in job:
        plant(job["fault"])
    print(json.dumps(run(job["calls"], job.get("mps_rules", False))))
