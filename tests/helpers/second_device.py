"""A device that is not the CPU but computes on it: `second:0` and `second:1`, for tests of every machine.

A tensor of the device holds its data in a CPU tensor. As on GPUs, an operator that mixes it with a CPU tensor of one
dimension or more raises, as does one with a generator of the CPU; random numbers come from a state of the device. What
the host reads from it, and copies to it that wait for it, are counted by call site. With the rules of Apple's GPUs
there is no float64, and no operator for which torch lists a kernel of CPUs but none of MPS.

Tensors are made on it and used under `using_device()`.
"""

import functools
import re
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map_only

NAME = "second"
ROOT = Path(__file__).resolve().parents[2]
COUNT = 2  # devices
CPU = torch.device("cpu")
aten = torch.ops.aten
INDEXING = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default}
CASTS = {aten._to_copy.default, aten.to.device, aten.to.dtype, aten.to.dtype_layout}  # the last in inference mode
COPIES = {aten.copy_.default, aten.to.other, *CASTS}
MAY_MIX = COPIES | INDEXING  # with CPU tensors of any dimension
READING = {  # operators of which a GPU tells the host a number or a shape
    aten._local_scalar_dense.default,
    aten.item.default,  # reached as such in torch's inference mode
    aten.is_nonzero.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.nonzero_numpy.default,
    aten.argwhere.default,
    aten.where.default,
    aten.allclose.default,
    aten.equal.default,
    aten.bincount.default,
    aten.repeat_interleave.Tensor,
    aten._unique2.default,
    aten.unique_dim.default,
    aten.unique_consecutive.default,
}
CAST = ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "addbmm", "scaled_dot_product_attention")  # by autocast
reads: Counter[str] = Counter()  # by the host, by call site
waits: Counter[str] = Counter()  # copies from the host that wait for the device
used: set[str] = set()  # devices that computed something
states: dict[int, torch.Tensor] = {}  # of the random generator of each device


class OnDevice(torch.Tensor):
    """A tensor of the device; `host` has its values."""

    host: torch.Tensor

    @staticmethod
    def __new__(cls, host: torch.Tensor, device: torch.device) -> "OnDevice":
        layout = {"strides": host.stride(), "storage_offset": host.storage_offset(), "layout": host.layout}
        return torch.Tensor._make_wrapper_subclass(cls, host.size(), dtype=host.dtype, device=device, **layout)

    def __init__(self, host: torch.Tensor, device: torch.device) -> None:
        self.host = host

    def tolist(self) -> Any:
        count(reads)
        return self.host.tolist()

    def numpy(self, *args: Any, **options: Any) -> Any:
        raise TypeError(f"cannot convert a tensor of the device {NAME} to numpy")

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if id(self) not in memo:
            copied: torch.Tensor = OnDevice(self.host.detach().clone(), self.device)
            is_parameter = getattr(self, "_is_param", False)
            memo[id(self)] = torch.nn.Parameter(copied, self.requires_grad) if is_parameter else copied
        return memo[id(self)]

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    def untyped_storage(self) -> Any:
        return self.host.untyped_storage()

    def __repr__(self, **options: Any) -> str:
        return f"{self.host!r} on {self.device}"

    def __format__(self, form: str) -> str:
        return format(self.item() if not self.dim() else str(self), form)

    @classmethod
    def __torch_dispatch__(cls, operator, types, args=(), options=None):
        return compute(operator, args, options or {})


class Rules:
    """What the devices lack."""

    float64 = True
    lacking: frozenset[str] = frozenset()  # names of operators


def compute(operator: Any, args: tuple, options: dict[str, Any]) -> Any:
    """What the operator returns, computed on the CPU, on the device that it belongs to."""
    given = [leaf for leaf in tree_leaves((args, options)) if isinstance(leaf, torch.Tensor)]
    own = [tensor for tensor in given if isinstance(tensor, OnDevice)]
    others = [tensor for tensor in given if not isinstance(tensor, OnDevice)]
    devices = {tensor.device for tensor in own}
    is_mixed = own and operator not in MAY_MIX and any(tensor.dim() for tensor in others)
    if operator not in COPIES and (len(devices) > 1 or is_mixed):
        found = ", ".join(sorted({str(tensor.device) for tensor in given}))
        raise RuntimeError(f"{operator}: expected all tensors to be on the same device, but found {found}")
    target = own[0].device if own else None
    asked = [one for one in (*args, options.get("device")) if isinstance(one, torch.device)]
    if asked:
        target = place(asked[0])
        args, options = tree_map_only(torch.device, lambda _: CPU, (args, options))
    elif operator in MAY_MIX - CASTS:
        target = args[operator is aten.to.other].device
    is_there = target is not None and target.type == NAME
    if is_there:
        used.add(str(target))
    _count_transfers(operator, args, options, own, others, is_there)
    if "pin_memory" in options:
        options = {**options, "pin_memory": False}
    unwrapped = tree_map_only(OnDevice, lambda tensor: tensor.host, (args, options))
    result = _run(operator, unwrapped[0], unwrapped[1], target if is_there else None)
    if not is_there:
        return result
    wrapped = tree_map_only(torch.Tensor, lambda t: t if isinstance(t, OnDevice) else OnDevice(t, target), result)
    return return_and_correct_aliasing(operator, args, options, wrapped) if own else wrapped


def _run(operator: Any, args: tuple, options: dict[str, Any], device: torch.device | None) -> Any:
    """The operator's result, by the rules and the random numbers of the device, if it is one of these."""
    if device is None:
        return operator(*args, **options)
    if operator._schema.name.removeprefix("aten::") in Rules.lacking:
        raise NotImplementedError(f"{operator} is not implemented for the device {NAME}")
    if torch.Tag.nondeterministic_seeded not in operator.tags:
        result = operator(*args, **options)
    elif options.get("generator") is not None:
        raise RuntimeError(f"{operator}: expected a generator of the device {NAME}, found one of the CPU")
    else:
        host, index = torch.get_rng_state(), device.index
        torch.set_rng_state(states[index])
        try:
            result = operator(*args, **options)
            states[index] = torch.get_rng_state()
        finally:
            torch.set_rng_state(host)
    values = (leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))
    if not Rules.float64 and any(value.dtype is torch.float64 for value in values):
        raise TypeError(f"{operator}: the device {NAME} has no float64")
    return result


def _count_transfers(
    operator: Any, args: tuple, options: dict[str, Any], own: list, others: list, is_there: bool
) -> None:
    """Count what makes the host wait for the device."""
    if own and operator in READING:
        count(reads)
    elif own and operator in INDEXING and any(_is_mask(leaf) for leaf in tree_leaves(args[1])):
        count(reads)
    elif own and operator in COPIES and not is_there:
        count(reads)
    elif is_there and operator in COPIES and any(tensor.numel() for tensor in others):
        given = dict(zip((one.name for one in operator._schema.arguments), args)) | options
        if not given.get("non_blocking"):
            count(waits)


def _is_mask(value: Any) -> bool:
    return isinstance(value, OnDevice) and value.dtype in (torch.bool, torch.uint8)


def count(counter: Counter[str]) -> None:
    """Count a transfer at the innermost line of the project that led to it, or as of the backward pass."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT) and ".venv" not in path.parts and path != Path(__file__).resolve():
            counter[f"{path.relative_to(ROOT)}:{frame.f_lineno} {frame.f_code.co_name}"] += 1
            return
        frame = frame.f_back
    counter["backward"] += 1


def place(device: Any) -> torch.device:
    """A device with its index."""
    device = torch.device(device)
    return torch.device(NAME, device.index or 0) if device.type == NAME else device


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
    if isinstance(source, OnDevice) != isinstance(target, OnDevice) and source.numel() and not non_blocking:
        count(reads if isinstance(source, OnDevice) else waits)
    getattr(target, "host", target).copy_(getattr(source, "host", source))
    return target


class _Module(backend_registration._DummyBackendModule):
    """What torch asks of the module of a device."""

    def device_count(self) -> int:
        return COUNT

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def manual_seed_all(self, seed: int) -> None:
        for index in range(COUNT):
            states[index] = torch.Generator().manual_seed(seed + 1).get_state()

    def get_rng_state(self, device: Any = NAME) -> torch.Tensor:
        return states[place(device if isinstance(device, str | torch.device) else f"{NAME}:{device}").index].clone()

    def set_rng_state(self, state: torch.Tensor, device: Any = NAME) -> None:
        states[place(device if isinstance(device, str | torch.device) else f"{NAME}:{device}").index] = state.clone()


_libraries: list[torch.library.Library] = []


@contextmanager
def using_device(mps_rules: bool = False) -> Iterator[torch.device]:
    """Context manager: the first device, registered for the rest of the process, and tensors on both."""
    if not _libraries:
        module = _Module()
        backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=module)
        module.manual_seed_all(torch.initial_seed())
        others, kernels = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
        others.fallback(lambda operator, *args, **options: compute(operator, args, options), "PrivateUse1")
        kernels.impl("_copy_from", _copy_from, "PrivateUse1")
        kernels.impl("_fused_sdp_choice", lambda *args, **options: 0, "PrivateUse1")  # attention by plain products
        for name, operator in (
            ("empty_strided", aten.empty_strided.default),
            ("empty.memory_format", aten.empty.memory_format),
        ):
            kernels.impl(name, partial(_make, operator), "PrivateUse1")
        others.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
        for name in CAST:
            kernels.impl(name, partial(_cast, getattr(aten, name).default), "AutocastPrivateUse1")
        _libraries.extend((others, kernels))
        torch.accelerator.synchronize = lambda device=None, /: None  # nothing runs beside the host
    Rules.float64, Rules.lacking = not mps_rules, _without_mps() if mps_rules else frozenset()
    with Dispatch():
        yield torch.device(NAME, 0)


def _make(operator: Any, *args: Any, **options: Any) -> Any:
    return compute(operator, args, {**options, "device": place(options.get("device") or NAME)})


def _cast(operator: Any, *args: Any, **options: Any) -> Any:
    """The operator in the type of autocast, as it is on the CPU."""
    dtype = torch.get_autocast_dtype(NAME)
    autocast = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)
    with torch._C._ExcludeDispatchKeyGuard(autocast):
        cast = tree_map_only(torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, (args, options))
        return operator(*cast[0], **cast[1])


@functools.cache
def _without_mps() -> frozenset[str]:
    """Operators with a kernel of CPUs and none of MPS, by the table that torch is generated from."""
    import torchgen

    table = Path(torchgen.__file__).parent / "packaged" / "ATen" / "native" / "native_functions.yaml"
    lacking, having = set(), set()
    for entry in re.split(r"\n- func: ", table.read_text(encoding="utf-8"))[1:]:
        name = re.match(r"[\w.]+", entry)[0].partition(".")[0]  # type: ignore[index]
        kernels = re.findall(r"^ {4}([\w, ]+):", entry, re.M)
        keys = {key.strip() for line in kernels for key in line.split(",")}
        if keys & {"MPS", "CompositeExplicitAutograd", "CompositeImplicitAutograd"} or not keys:
            having.add(name)
        elif "CPU" in keys:
            lacking.add(name)
    return frozenset(lacking - having)
