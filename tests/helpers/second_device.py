"""A second device without float64, like Apple's GPUs, that computes on the CPU.

A tensor of the device holds its data in a CPU tensor. An operator that mixes it with a CPU tensor of one dimension or
more raises, as those of GPUs do; one that makes a float64 tensor of the device raises, as those of MPS do. Tensors are
made on it and used under `using_device()`.
"""

import importlib
import json
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map_only

NAME = "second"
DEVICE = torch.device("cpu")  # `using_device` makes it
aten = torch.ops.aten
MAY_MIX = {aten.copy_.default, aten._to_copy.default, aten.index.Tensor}
MAY_MIX |= {aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default}


class OnDevice(torch.Tensor):
    """A tensor of the device; `host` has its values."""

    host: torch.Tensor

    @staticmethod
    def __new__(cls, host: torch.Tensor) -> "OnDevice":
        layout = {"strides": host.stride(), "storage_offset": host.storage_offset(), "layout": host.layout}
        return torch.Tensor._make_wrapper_subclass(cls, host.size(), dtype=host.dtype, device=DEVICE, **layout)

    def __init__(self, host: torch.Tensor) -> None:
        self.host = host

    def tolist(self) -> Any:
        return self.host.tolist()

    def numpy(self, *args: Any, **options: Any) -> Any:
        raise TypeError(f"cannot convert a tensor of the device {NAME} to numpy")

    @classmethod
    def __torch_dispatch__(cls, operator, types, args=(), options=None):
        return compute(operator, args, options or {})


def compute(operator: Any, args: tuple, options: dict[str, Any]) -> Any:
    """What the operator returns, computed on the CPU, on the device that it belongs to."""
    given = [leaf for leaf in tree_leaves((args, options)) if isinstance(leaf, torch.Tensor)]
    own = [tensor for tensor in given if isinstance(tensor, OnDevice)]
    if own and operator not in MAY_MIX and any(t.dim() for t in given if not isinstance(t, OnDevice)):
        raise RuntimeError(f"{operator}: expected all tensors on one device, found {NAME} and cpu")
    wraps = bool(own)
    if options.get("device") is not None:
        wraps = torch.device(options["device"]).type == NAME
        options = {**options, "device": torch.device("cpu")}
    elif operator in MAY_MIX and operator is not aten._to_copy.default:
        wraps = isinstance(args[0], OnDevice)
    if "pin_memory" in options:
        options = {**options, "pin_memory": False}
    unwrapped = tree_map_only(OnDevice, lambda tensor: tensor.host, (args, options))
    result = operator(*unwrapped[0], **unwrapped[1])
    if not wraps:
        return result
    if any(leaf.dtype is torch.float64 for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)):
        raise TypeError(f"{operator}: the device {NAME} has no float64")
    wrapped = tree_map_only(torch.Tensor, _wrap, result)
    return return_and_correct_aliasing(operator, args, options, wrapped) if own else wrapped


def _wrap(tensor: torch.Tensor) -> OnDevice:
    return tensor if isinstance(tensor, OnDevice) else OnDevice(tensor)


class Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, operator, types, args=(), options=None):
        options = options or {}
        asked = options.get("device")
        if asked is not None and torch.device(asked).type == NAME:
            return compute(operator, args, options)
        if any(isinstance(leaf, OnDevice) for leaf in tree_leaves((args, options))):
            return compute(operator, args, options)
        return operator(*args, **options)


def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    getattr(target, "host", target).copy_(getattr(source, "host", source))
    return target


class _Module(backend_registration._DummyBackendModule):
    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


_libraries: list[torch.library.Library] = []


@contextmanager
def using_device() -> Iterator[torch.device]:
    """Context manager: the device, registered for the rest of the process, and tensors on it."""
    global DEVICE
    if not _libraries:
        backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
        DEVICE = torch.device(NAME, 0)
        others, kernels = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
        others.fallback(lambda operator, *args, **options: compute(operator, args, options), "PrivateUse1")
        kernels.impl("_copy_from", _copy_from, "PrivateUse1")
        kernels.impl("_fused_sdp_choice", lambda *args, **options: 0, "PrivateUse1")  # attention by plain products
        for name, operator in (
            ("empty_strided", aten.empty_strided.default),
            ("empty.memory_format", aten.empty.memory_format),
        ):
            kernels.impl(name, partial(_make, operator), "PrivateUse1")
        _libraries.extend((others, kernels))
    with Dispatch():
        yield DEVICE


def _make(operator: Any, *args: Any, **options: Any) -> Any:
    return compute(operator, args, {**options, "device": DEVICE})


# ---------------------------------------------------------------------------------------------------------- a process
def run_there(calls: dict[str, list[str]]) -> dict[str, str]:
    """Train each program on the device, with its flags and no checkpoint; returns by name how it failed, or ""."""
    from lightning.fabric import Fabric
    from lightning.fabric.accelerators import CPUAccelerator
    from lightning.fabric.strategies import SingleDeviceStrategy

    from lightrlhf.maths import float64
    from lightrlhf.training import run
    from lightrlhf.training.phases import Phases

    class Accelerator(CPUAccelerator):
        def setup_device(self, device: torch.device) -> None:
            pass

    def make_fabric(args: Any) -> Any:
        return Fabric(strategy=SingleDeviceStrategy(DEVICE, accelerator=Accelerator()), precision=args.precision)

    torch.set_num_threads(1)
    run.make_fabric = make_fabric
    Phases.save = lambda *args, **options: None  # safetensors reads addresses, which tensors of the device have not
    float64.WITHOUT.add(NAME)
    endings = {}
    with using_device():
        for name, flags in calls.items():
            try:
                importlib.import_module(f"lightrlhf.{name}").main(flags)
                endings[name] = ""
            except BaseException:  # an exit, too
                endings[name] = traceback.format_exc()
        endings["maths"] = compare_maths()
    return endings


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

    here, there = computed(torch.device("cpu")), computed(DEVICE)
    return ", ".join(name for name, value in here.items() if there[name] != value)


if __name__ == "__main__":
    print(json.dumps(run_there(json.loads(sys.argv[1]))))
