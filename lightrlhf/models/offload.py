"""Frozen models in the host's memory while they are not used (`--offload`).

Weights lie in pinned memory, from which a GPU copies without the host's help, and are on the device within `on_device`
alone; they do not change, so nothing is copied back. Buffers stay on the device.

Left out: models that share weights with a trained one; copying a layer while the one before computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from lightrlhf.data.batch import to_device

OFFLOADED = "offloaded"  # attribute of a module
REFUSAL = "--offload True: the memory of this device is the host's own; leave it out"


class HostWeights:
    """The parameters of a frozen module, which lie on the host until they are fetched."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self.device, self.is_there = device, False
        self.places: list[tuple[nn.Module, str, int]] = []  # where a parameter belongs, tied ones at several
        self.host: dict[int, nn.Parameter] = {}
        for owner in module.modules():
            for name, parameter in owner.named_parameters(recurse=False):
                if id(parameter) not in self.host:
                    weights = parameter.detach().cpu()
                    weights = weights.pin_memory() if device.type == "cuda" else weights
                    self.host[id(parameter)] = nn.Parameter(weights, requires_grad=False)
                self.places.append((owner, name, id(parameter)))
            for name, buffer in owner.named_buffers(recurse=False):
                owner.register_buffer(name, buffer.to(device), name not in owner._non_persistent_buffers_set)
        self.put(self.host)

    def put(self, parameters: Mapping[int, nn.Parameter]) -> None:
        """Let the module compute with these parameters."""
        for owner, name, key in self.places:
            setattr(owner, name, parameters[key])

    def fetch(self) -> None:
        """Copy the parameters to the device."""
        there = {key: to_device(one.data, self.device) for key, one in self.host.items()}
        self.put({key: nn.Parameter(weights, requires_grad=False) for key, weights in there.items()})
        self.is_there = True

    def release(self) -> None:
        """Free them there."""
        self.put(self.host)
        self.is_there = False


def offload(module: nn.Module, device: torch.device) -> None:
    """Keep a frozen module's parameters on the host from now on, but within `on_device`."""
    setattr(module, OFFLOADED, HostWeights(module, device))


@contextmanager
def on_device(module: nn.Module) -> Iterator[None]:
    """Context manager: the parameters of offloaded modules, this one or parts of it, are on their device."""
    with ExitStack() as stack:
        for weights in [vars(part)[OFFLOADED] for part in module.modules() if OFFLOADED in vars(part)]:
            if not weights.is_there:
                stack.callback(weights.release)
                weights.fetch()
        yield
