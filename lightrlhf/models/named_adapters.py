"""Adapters by name on a model in memory, each a policy that shares the model with the others.

An adapter is loaded whole, or the model stays as it was.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from lightrlhf.cli.errors import UsageError, first_line
from lightrlhf.maths.finite import not_finite
from lightrlhf.models import lora
from lightrlhf.models.roles import Policy

MOST_ADAPTERS = 4


class Adapter(NamedTuple):
    """An adapter on the model."""

    policy: Policy
    layer_name: str  # in the model's layers, where names may have no dots
    folder: str


class NamedAdapters:
    """The adapters on a policy's model.

    taken: the name of the model itself; merged_into: the base of an adapter that was merged into the model's weights,
    else None.
    """

    def __init__(self, policy: Policy, taken: str, merged_into: str | None = None) -> None:
        self.policy, self.taken, self.merged_into = policy, taken, merged_into
        self.by_name: dict[str, Adapter] = {}
        self.num_loaded = 0
        self.trained = [weight for weight in policy.model.parameters() if weight.requires_grad]

    def load(self, name: str, folder: str) -> None:
        """Load a peft folder under a name. Raises: UsageError when that is taken, or the folder does not fit."""
        if name == self.taken or name in self.by_name:
            raise UsageError(f"{name} is loaded already; give each version another name")
        if len(self.by_name) >= MOST_ADAPTERS:
            raise UsageError(f"{MOST_ADAPTERS} adapters are loaded; unload one of {', '.join(self.by_name)}")
        if self.merged_into is not None:
            raise UsageError(
                f"the model is an adapter, merged here into {self.merged_into}, and {folder} would come on top; "
                f"serve {self.merged_into} to load adapters"
            )
        if not Path(folder).is_dir():
            raise UsageError(f"{folder} is not a folder that this server can see")
        model, layer_name = self.policy.model, f"served_{self.num_loaded}"
        self.num_loaded += 1
        try:
            config = lora.adapter_config(folder, "lora_path")
            if config is None:
                raise UsageError(f"{folder} holds no adapter ({lora.ADAPTER_CONFIG})")
            lora.load_adapter(model, layer_name, folder, config)
            weights = lora.adapter_modules(model, layer_name).to(model.device)
            if bad := not_finite(weights.named_parameters()):
                raise UsageError(f"{folder} has weights that are not finite: {bad[0].replace('/', '.')}")
            plain, base = self.policy.head_is_plain, self.policy.base
            role = Policy(model, (layer_name,), base, shares=True, trainable=False, head_is_plain=plain).eval()
            self.by_name[name] = Adapter(role, layer_name, folder)
        except Exception as problem:  # a damaged file makes the libraries raise anything
            lora.remove_adapter(model, layer_name)
            raise UsageError(f"{folder} cannot be loaded: {first_line(problem)}") from None
        finally:
            self._configure()

    def unload(self, name: str) -> None:
        """Remove an adapter. Raises: UsageError when the name is unknown."""
        if name not in self.by_name:
            raise UsageError(f"no adapter {name!r} is loaded")
        lora.remove_adapter(self.policy.model, self.by_name.pop(name).layer_name)
        self._configure()

    def _configure(self) -> None:
        """Let the model be as it was outside of the roles of adapters; beside those its weights are frozen."""
        lora.configure(self.policy.model, active=self.policy.adapters, trainable=())
        for weight in () if self.by_name else self.trained:  # which torch multiplies in another order than frozen ones
            weight.requires_grad_(True)
