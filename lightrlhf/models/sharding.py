"""Sharded models (FSDP2, `torch.distributed.fsdp.fully_shard`): sharding, gathering and full copies.

Weights, gradients and optimiser state are sharded over the ranks, layer by layer; with tensor parallelism, over the
groups of ranks that share a layer's matrices (see `tensor_parallel.py`).

Left out: FSDP1, CPU offloading.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightrlhf.models.roles import transformer_layers
from lightrlhf.models.tensor_parallel import split_layers


def shard_layers(module: nn.Module, mesh: Any) -> nn.Module:
    """Shard a model over the ranks of a mesh (data parallel, tensor parallel), its layers split over the second first.

    One unit is each transformer layer, and one all other parameters.

    A layer is gathered for its forward and backward pass and resharded after each. The other parameters (embeddings,
    last norm, head) stay gathered from the outermost module's forward pass to its backward pass, so that its forward
    may call parts of the model separately.
    """
    from torch.distributed.fsdp import fully_shard

    warnings.filterwarnings("ignore", message=".*returned a view tensor")  # outputs are never modified in place
    if mesh["tensor_parallel"].size() > 1:
        logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)  # advice on each gathering
        split_layers(cast(Any, module).model, mesh["tensor_parallel"])
    mesh = mesh["data_parallel"]
    for layer in transformer_layers(module):
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    fully_shard(module, mesh=mesh, reshard_after_forward=False)
    root: Any = module  # `fully_shard` has made it an FSDPModule
    root._get_fsdp_state()._lazy_init()  # must run on the outermost module, which in sampling is not called first
    return module


def is_sharded(module: nn.Module) -> bool:
    """Whether this rank currently holds only its shard of the weights."""
    from torch.distributed.tensor import DTensor

    return any(isinstance(p, DTensor) for p in module.parameters())


@contextmanager
def gather_shards(module: nn.Module) -> Iterator[None]:
    """Context manager: gathers the full weights of a sharded model, so forward passes need no collectives.

    For sampling, where ranks run different numbers of passes. All ranks must enter and leave together. Does nothing
    to a model that is not sharded.
    """
    from torch.distributed.fsdp import FSDPModule

    if not is_sharded(module):
        yield
        return
    parts = [part for part in module.modules() if isinstance(part, FSDPModule)]  # the outermost first
    for part in parts:
        part.set_reshard_after_forward(False, recurse=False)
        part.unshard()
    try:
        yield
    finally:
        for part in parts:
            part.set_reshard_after_forward(part is not parts[0], recurse=False)
            part.reshard()
        state: Any = parts[0]._get_fsdp_state()
        state._comm_ctx.post_forward_order.clear()  # by which the next backward pass would gather, ranks unlike


def full_tensors(value: Any, keep: bool = True) -> Any:
    """Gather a sharded tensor, or each tensor of a tree of dicts and lists, onto the CPU.

    All ranks must take part; without `keep` a rank gets None for each tensor.
    """
    from torch.distributed.tensor import DTensor

    if isinstance(value, dict):
        return {key: full_tensors(part, keep) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(full_tensors(part, keep) for part in value)
    if not isinstance(value, Tensor):
        return value
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return value.detach().cpu() if keep else None


def _whole(norm: Tensor) -> Tensor:
    """A norm on its device, gathered if it is sharded."""
    whole: Tensor = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    return whole


def clip_gradients(parameters: Sequence[nn.Parameter], largest: float) -> Tensor:
    """Scale the gradients to a global norm of at most `largest`; returns the norm before, whole on each rank.

    Split matrices lie on a mesh of two dimensions and other parameters on one, between which torch computes nothing.
    """
    by_mesh: defaultdict[Any, list[nn.Parameter]] = defaultdict(list)
    for parameter in parameters:
        by_mesh[getattr(parameter.grad, "device_mesh", None)].append(parameter)
    if len(by_mesh) < 2:
        return _whole(nn.utils.clip_grad_norm_(parameters, largest))
    norms = [_whole(nn.utils.get_total_norm([p.grad for p in own])) for own in by_mesh.values()]  # type: ignore[misc]
    norm = torch.linalg.vector_norm(torch.stack(norms))
    for own in by_mesh.values():
        nn.utils.clip_grads_with_norm_(own, largest, norm)
    return norm


def shard_like(state: dict[str, Any], parameters: list[nn.Parameter]) -> dict[str, Any]:
    """Shard an optimiser's full state: each tensor of a parameter's shape is sharded like that parameter."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    def shard(value: Any, parameter: nn.Parameter) -> Any:
        if isinstance(parameter, DTensor) and isinstance(value, Tensor) and value.shape == parameter.shape:
            device = parameter.device_mesh.device_type
            return distribute_tensor(value.to(device), parameter.device_mesh, parameter.placements, src_data_rank=None)
        return value

    order = [index for group in state["param_groups"] for index in group["params"]]
    sharded = {
        index: {name: shard(value, parameter) for name, value in state["state"][index].items()}
        for index, parameter in zip(order, parameters, strict=True)
        if index in state["state"]
    }
    return {**state, "state": sharded}


def meta_copy(module: nn.Module) -> nn.Module:
    """A copy of the module on the meta device, see `materialize`."""
    tensors = [*module.parameters(), *module.buffers()]
    memo: dict[int, Any] = {id(tensor): tensor.detach().to("meta") for tensor in tensors}
    for parameter in module.parameters():
        memo[id(parameter)] = nn.Parameter(memo[id(parameter)], requires_grad=parameter.requires_grad)
    return copy.deepcopy(module, memo)


def materialize(meta_module: nn.Module, module: nn.Module, keep: bool) -> nn.Module:
    """A full copy of a sharded module on the CPU, from its `meta_copy`; tied weights stay tied.

    All ranks must take part; without `keep` a rank gets `meta_module` back.
    """
    gathered: dict[int, Tensor] = {}
    state = {}
    for name, tensor in [*module.named_parameters(remove_duplicate=False), *module.named_buffers()]:
        if id(tensor) not in gathered:
            gathered[id(tensor)] = full_tensors(tensor, keep)
        state[name] = gathered[id(tensor)]
    if not keep:
        return meta_module
    copied = copy.deepcopy(meta_module)
    copied.load_state_dict({name: state[name] for name in copied.state_dict()}, assign=True)
    return copied
