"""Float32 matrix products by oneDNN on processors where torch's own are slow.

torch's builds for x86 multiply float32 matrices by Intel's MKL, which leaves AVX-512 unused on processors of other
makers. oneDNN, which is in the same builds and multiplies bfloat16 there, uses it: about twice as fast on an AMD EPYC
with 512-bit units, a tenth faster at most on family 25 (Zen 4), which has 256-bit ones. `aten::mm` and `aten::addmm` of
the CPU are replaced for the process, so linear layers, losses and their gradients gain without a change to any model.
Whether this is done follows from the processor alone, never from a measurement, so a run that is resumed on the same
machine multiplies in the same order.

Left out: batched products (for attention: `attention`), other types, and packing of the weights
beforehand, which gains a tenth more where few rows are multiplied, but a copy of the weights would have to follow each
update.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# Kernels that oneDNN, and torch's bridge to it, keep by the shapes of their matrices: a thousand by default, with which
# training on texts of many lengths takes twice the memory. Read at their first use; the environment may say another.
CACHES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64", "LRU_CACHE_CAPACITY": "64"}
_replaced: list[torch.library.Library] = []  # the kernels are in place as long as this lives


def use_onednn() -> None:
    """Multiply float32 matrices by oneDNN from now on, if this is a processor where MKL is slow."""
    if not _replaced and mkl_is_slow():
        replace_products()


def mkl_is_slow() -> bool:
    """Whether torch multiplies by MKL and has oneDNN's product, and the processor has AVX-512 that MKL does not use."""
    has_both = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
    has_product = hasattr(torch.ops.mkldnn, "_linear_pointwise")  # private, so a release may have none
    if not (has_both and has_product) or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    info = Path("/proc/cpuinfo")
    return info.is_file() and "GenuineIntel" not in info.read_text()


def replace_products() -> None:
    """Replace torch's float32 products on CPUs, in this process."""
    _replaced.append(replace_kernels({"mm": _mm, "addmm": _addmm}))


def limit_caches() -> None:
    """Let oneDNN keep few kernels by the shapes of their matrices, from its first use on."""
    for name, size in CACHES.items():
        os.environ.setdefault(name, size)


def replace_kernels(kernels: dict[str, Callable[..., Any]], **options: Any) -> torch.library.Library:
    """Replace torch's kernels on CPUs, in this process, while the result lives; kernels: by operator."""
    limit_caches()
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there are kernels already
        for operator, kernel in kernels.items():
            library.impl(operator, kernel, "CPU", **options)
    return library


def restore_products() -> None:
    """Give torch its own products back."""
    while _replaced:
        _replaced.pop()._destroy()


def _mm(one: Tensor, other: Tensor) -> Tensor:
    if _is_float(one) and _is_float(other):
        return _multiply(one, other, None)
    return torch.ops.aten.mm.out(one, other, out=one.new_empty(one.shape[0], other.shape[1]))


def _addmm(bias: Tensor, one: Tensor, other: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    is_row = bias.dim() == 1 and bias.shape[0] == other.shape[1] and bias.is_contiguous() and beta == alpha == 1
    if is_row and _is_float(one) and _is_float(other):
        return _multiply(one, other, bias)
    out = one.new_empty(one.shape[0], other.shape[1])
    return torch.ops.aten.addmm.out(bias, one, other, beta=beta, alpha=alpha, out=out)


def _multiply(one: Tensor, other: Tensor, bias: Tensor | None) -> Tensor:
    if one.shape[1] != other.shape[0]:
        raise RuntimeError(
            f"mat1 and mat2 shapes cannot be multiplied ({one.shape[0]}x{one.shape[1]} and "
            f"{other.shape[0]}x{other.shape[1]})"
        )
    if one.stride(0) == 1 and not one.is_contiguous():
        # The gradient of a weight. oneDNN takes the second matrix as it lies, but copies the first one by rows, slowly.
        # So it is copied here; or, where that copies less, the second one is, and the product is computed transposed.
        if bias is None and one.numel() > other.numel() + one.shape[0] * other.shape[1]:
            return _linear(other.t().contiguous(), one, None).t().contiguous()
        one = one.contiguous()
    return _linear(one, other.t(), bias)


def _linear(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """inputs (N, in), weight (out, in) -> (N, out)"""
    return torch.ops.mkldnn._linear_pointwise(inputs, weight, bias, "none", [], "")


def _is_float(matrix: Tensor) -> bool:
    """Whether a matrix is one that oneDNN is given: any layout of float32, but no empty one."""
    return matrix.dtype is torch.float32 and matrix.numel() > 0
