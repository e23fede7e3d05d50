"""Records what an optimiser step of Hugging Face's trainers did to each parameter, beside its settings."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from lightrlhf.checks.capture import unwrapped
from lightrlhf.checks.updates import EPSILON


def digest(value: Tensor) -> tuple[float, float]:
    """Two sums that a change of a tensor changes."""
    value = value.detach().float()
    return float(value.double().sum()), float(value.double().square().sum())


class Updates:
    """Parameters before and after one optimiser step; `begin` and `end` enclose it."""

    def __init__(self, trainer: Any, folder: Path, weights: bool) -> None:
        self.trainer, self.folder, self.weights = trainer, folder, weights
        self.before: dict[str, Any] = {}
        self.reference = getattr(trainer, "ref_model", None)
        self.of_reference = self._reference()
        self.is_fresh, self.skipped = True, 0
        given = (getattr(trainer, name, None) for name in ("optimizer", "lr_scheduler"))
        self.is_own = any(one is not None for one in given)  # else they are made by train()

    def _named(self) -> dict[str, nn.Parameter]:
        return dict(self.trainer.accelerator.unwrap_model(self.trainer.model).named_parameters())

    def _reference(self) -> list[tuple[float, float]]:
        return [] if self.reference is None else [digest(one) for one in self.reference.parameters()]

    def begin(self, optimizer: Any, number: int, most: int) -> None:
        """Before the step: gradients are clipped and still there."""
        named = self._named()
        held = {id(one): group for group in optimizer.param_groups for one in group["params"]}
        own = {id(one) for one in named.values()}
        rows = []
        for one in named.values():
            group = held.get(id(one), {})
            size = -1.0 if one.grad is None else float(one.grad.detach().double().norm())
            top = -1.0 if one.grad is None else float(one.grad.detach().abs().max())
            rows.append((one.requires_grad, id(one) in held, size, top, group.get("lr"), group.get("weight_decay")))
        names = ("trainable", "optimised", "grad_norm", "grad_max", "learning_rate", "weight_decay")
        self.arrays = {name: np.array(values, dtype=np.float64) for name, values in zip(names, zip(*rows))}
        self.before = {name: one.detach().clone() if one.requires_grad else digest(one) for name, one in named.items()}
        self.config = self._settings(optimizer, number, most) | {"parameters": list(named)}
        self.config["foreign_parameters"] = sum(one not in own for one in held)
        if self.weights:
            self._save(f"weights-{number:06}-before", named, optimizer)

    def _settings(self, optimizer: Any, number: int, most: int) -> dict[str, Any]:
        args, model = self.trainer.args, self.trainer.accelerator.unwrap_model(self.trainer.model)
        inner = getattr(optimizer, "optimizer", optimizer)
        kind = args.lr_scheduler_type
        config: dict[str, Any] = {
            "method": "update",
            "update": number - self.skipped,
            "updates": most,
            "optimizer": type(inner).__name__,
        }
        warm = args.get_warmup_steps(most) if hasattr(args, "get_warmup_steps") else args.warmup_steps
        has_own = self.is_own or vars(args).get("lr_scheduler_kwargs")
        name = "another" if has_own else kind
        config |= {"scheduler": getattr(name, "value", str(name)), "warmup": most - 1 if self.is_own else warm}
        config |= {"peak_learning_rate": args.learning_rate, "max_grad_norm": args.max_grad_norm}
        is_usual = all(group.get("eps") in (EPSILON, None) for group in optimizer.param_groups)
        config["is_first"] = self.is_fresh and not inner.state and is_usual
        config["dtype"] = str(next(model.parameters()).dtype).removeprefix("torch.")
        self.is_fresh = False
        adapters = getattr(model, "peft_config", None)
        if adapters is not None:
            parts: list[str] = [getattr(model.base_model, "prefix", None) or "lora_"]
            for one in adapters.values():
                parts += ["modules_to_save"] * bool(getattr(one, "modules_to_save", None))
                parts += ["bias"] * (getattr(one, "bias", "none") != "none")
                parts += ["trainable_tokens"] * bool(getattr(one, "trainable_token_indices", None))
            config["adapters"] = parts
        base: Any = unwrapped(model)
        ins, outs = base.get_input_embeddings(), base.get_output_embeddings()
        if getattr(base.config, "tie_word_embeddings", False) and adapters is None and outs is not None:
            config["is_tied"] = ins.weight is outs.weight
        return config

    def end(self, optimizer: Any, number: int) -> None:
        """After the step, before its gradients are dropped."""
        if not self.before:
            return
        if getattr(optimizer, "step_was_skipped", False):  # gradients of float16 that overflowed
            self.before, self.skipped = {}, self.skipped + 1
            return
        named, change, largest = self._named(), [], []
        for name, one in named.items():
            before = self.before[name]
            if isinstance(before, Tensor):
                change.append(float((one.detach() - before).abs().max()))
                largest.append(float(before.abs().max()))
            else:
                change.append(float(digest(one) != before))
                largest.append(math.nan)
        self.arrays |= {"change": np.array(change), "weight_max": np.array(largest)}
        self.config["reference"] = self._of_reference(named)
        found: dict[str, Any] = {**self.arrays, "config": json.dumps(self.config)}
        np.savez(self.folder / f"update-{number:06}.npz", **found)
        if self.weights:
            self._save(f"weights-{number:06}-after", named, optimizer)
        self.before = {}

    def _of_reference(self, named: Mapping[str, nn.Parameter]) -> str:
        """none, kept, moved or policy: the state of the reference."""
        if self.reference is None:
            return "none"
        places = {one.data_ptr() for one in named.values() if one.requires_grad}
        if any(one.data_ptr() in places for one in self.reference.parameters()):
            return "policy"
        is_moved = self._reference() != self.of_reference
        return "moved" if is_moved and not vars(self.trainer.args).get("sync_ref_model") else "kept"

    def _save(self, name: str, named: Mapping[str, nn.Parameter], optimizer: Any) -> None:
        """Weights, gradients and states of the optimiser, by parameter."""
        from safetensors.torch import save_file

        found = {}
        for key, one in named.items():
            found[key] = one.detach()
            if one.grad is not None:
                found[f"{key}.grad"] = one.grad
            for part, value in getattr(optimizer, "optimizer", optimizer).state.get(one, {}).items():
                if isinstance(value, Tensor):
                    found[f"{key}.{part}"] = value
        save_file({key: one.detach().cpu().clone() for key, one in found.items()}, self.folder / f"{name}.safetensors")


def callback_of(begin: Any, end: Any, flush: Any) -> Any:
    """A callback that encloses each optimiser step."""
    from transformers import TrainerCallback

    class Enclosed(TrainerCallback):  # type: ignore[misc, unused-ignore]
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            begin(given["optimizer"], state.global_step + 1, state.max_steps)

        def on_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            end(given["optimizer"], state.global_step + 1)

        def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            flush()

    return Enclosed()
