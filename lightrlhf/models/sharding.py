"""Sharded models (FSDP2, `torch.distributed.fsdp.fully_shard`): sharding, gathering and full copies.

Weights, gradients and optimiser state are sharded over the ranks, layer by layer.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from lightrlhf.models.roles import transformer_layers


def shard_layers(module: nn.Module, mesh: Any) -> nn.Module:
    """Split a model over the ranks of a mesh: each transformer layer by itself, what is left in one piece.

    A layer is gathered when its forward or backward pass begins and given up behind it. What is left (embeddings, last
    norm, head) stays whole from the forward pass of the outermost module to its backward pass, so that its forward may
    call parts of the model as it likes.
    """
    from torch.distributed.fsdp import fully_shard

    warnings.filterwarnings("ignore", message=".*returned a view tensor")  # nobody writes into what a model returns
    mesh = mesh["data_parallel"]  # Fabric's has a second dimension for tensor parallelism, of one rank here
    for layer in transformer_layers(module):
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    fully_shard(module, mesh=mesh, reshard_after_forward=False)
    module._get_fsdp_state()._lazy_init()  # otherwise done by whichever part runs first, in sampling not the outermost
    return module


def is_sharded(module: nn.Module) -> bool:
    """Whether a rank holds only its part of the weights at the moment."""
    from torch.distributed.tensor import DTensor

    return any(isinstance(p, DTensor) for p in module.parameters())


@contextmanager
def unsharded(module: nn.Module) -> Iterator[None]:
    """Inside, every rank holds all weights of a split model, and forward passes wait for nobody.

    For sampling, where ranks take unequally many passes. All ranks enter and leave together. Does nothing to a model
    that is not split.
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


def full_tensors(value: Any, keep: bool = True) -> Any:
    """A tensor, or each in a tree of dicts and lists, on the CPU, put together from all ranks' parts.

    A rank that does not `keep` takes part and has None for each tensor.
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


def shard_like(state: dict[str, Any], parameters: list[nn.Parameter]) -> dict[str, Any]:
    """An optimiser's state with each tensor of a parameter's shape split as that parameter is."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    def part(value: Any, parameter: nn.Parameter) -> Any:
        if isinstance(parameter, DTensor) and isinstance(value, Tensor) and value.shape == parameter.shape:
            device = parameter.device_mesh.device_type
            return distribute_tensor(value.to(device), parameter.device_mesh, parameter.placements, src_data_rank=None)
        return value

    order = [index for group in state["param_groups"] for index in group["params"]]
    split = {
        index: {name: part(value, parameter) for name, value in state["state"][index].items()}
        for index, parameter in zip(order, parameters, strict=True)
        if index in state["state"]
    }
    return {**state, "state": split}


def meta_copy(module: nn.Module) -> nn.Module:
    """A copy of a module whose tensors have shapes but no memory, to be filled by `filled`."""
    tensors = [*module.parameters(), *module.buffers()]
    memo: dict[int, Any] = {id(tensor): tensor.detach().to("meta") for tensor in tensors}
    for parameter in module.parameters():
        memo[id(parameter)] = nn.Parameter(memo[id(parameter)], requires_grad=parameter.requires_grad)
    return copy.deepcopy(module, memo)


def materialize(meta_copies: nn.Module, module: nn.Module, keep: bool) -> nn.Module:
    """An unsplit copy of a split module on the CPU, tied weights still tied.

    All ranks take part; one that does not `keep` gets the hollow one back.
    """
    once: dict[int, Tensor] = {}
    state = {}
    for name, tensor in [*module.named_parameters(remove_duplicate=False), *module.named_buffers()]:
        if id(tensor) not in once:
            once[id(tensor)] = full_tensors(tensor, keep)
        state[name] = once[id(tensor)]
    if not keep:
        return meta_copies
    copied = copy.deepcopy(meta_copies)
    copied.load_state_dict({name: state[name] for name in copied.state_dict()}, assign=True)
    return copied
