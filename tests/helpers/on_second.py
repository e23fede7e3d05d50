"""Programs on the second device, in a process of their own: `--accelerator second` is what it computes on here.

As a program it reads a job from its first argument, and writes by name how each call failed, or "", and what the host
read: `{"mps_rules": false, "calls": {"name": ["lightrlhf.sft", ["--flag", ...]]}}`.
"""

import contextlib
import importlib
import io
import json
import sys
import traceback
from typing import Any

import torch

from helpers import second_device
from helpers.second_device import NAME


def prepare(mps_rules: bool = False) -> None:
    """Let the library find the device, and Fabric compute on it; before its programs are imported."""
    import lightning.fabric
    from lightning.fabric.accelerators import CPUAccelerator
    from lightning.fabric.strategies import SingleDeviceStrategy

    from lightrlhf.maths import float64
    from lightrlhf.models import loading

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

    torch.set_num_threads(1)
    lightning.fabric.Fabric = make_fabric
    for module in [one for name, one in sys.modules.items() if name.startswith("lightrlhf.")]:
        if getattr(module, "find_device", None) is find:
            module.find_device = find_device
    if mps_rules:
        float64.WITHOUT.add(NAME)


def run(calls: dict[str, tuple[str, list[str]]], mps_rules: bool = False) -> dict[str, Any]:
    """By name: how the call failed, or "", and its host reads and waiting copies by call site."""
    found: dict[str, Any] = {}
    with second_device.using_device(mps_rules):
        for name, (module, flags) in calls.items():
            second_device.reads.clear()
            second_device.waits.clear()
            problem, printed = "", io.StringIO()
            try:
                with contextlib.redirect_stdout(printed):
                    importlib.import_module(module).main(flags)
            except BaseException as error:  # an exit, too
                problem = "" if isinstance(error, SystemExit) and not error.code else traceback.format_exc()
            transfers = {"reads": dict(second_device.reads), "waits": dict(second_device.waits)}
            found[name] = {"problem": problem, "printed": printed.getvalue(), **transfers}
        if mps_rules:
            found["maths"] = {"problem": compare_maths()}
    return found


def compare_maths() -> str:
    """Names of functions that compute in float64 and whose results for tensors of the device are not the CPU's."""
    from lightrlhf.maths import groups, ops, policy_losses, sampling_gap

    numbers, mask = torch.randn(6, 5), torch.rand(6, 5) < 0.7
    group, scores = torch.arange(6) // 3, torch.tensor([1.0, 0.0, 1.0, torch.nan, 0.5, 0.25])

    def computed(where: torch.device) -> dict[str, Any]:
        own = [tensor.to(where) for tensor in (numbers, mask, group, scores)]
        moments = groups.group_moments(own[3], own[2], 2)
        found: dict[str, Any] = {}
        for kind in sampling_gap.CORRECTIONS:
            found[f"weights, {kind}"] = sampling_gap.importance_weights(*own[:2], kind, 1.5)
            size = sampling_gap.gap_size(*own[:2], kind, 1.5)
            found[f"size, {kind}"] = torch.tensor([*size.metrics().values()])
        for name, estimator in groups.ADVANTAGES.items():
            found[f"advantages, {name}"] = groups.group_advantages(own[3], moments, estimator)
        for name in policy_losses.AGGREGATIONS:
            found[f"weights of tokens, {name}"] = policy_losses.token_weights(own[1], own[2], 2, name, 5)
        found["explained variance"] = ops.explained_variance(own[0], own[0] * 2 + 1, own[1])
        return {name: value.tolist() for name, value in found.items()}

    here, there = computed(torch.device("cpu")), computed(torch.device(NAME, 0))
    return ", ".join(name for name, value in here.items() if there[name] != value)


if __name__ == "__main__":
    job = json.loads(sys.argv[1])
    prepare(job.get("mps_rules", False))
    print(json.dumps(run(job["calls"], job.get("mps_rules", False))))
