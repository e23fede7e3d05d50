"""Memory of training: bytes of a parameter, largest models, peak of a process, flags that lower a phase's memory.

`lightrlhf.estimate`, `lightrlhf.doctor`, `--dry_run` and the error of a run out of memory count by these numbers.
"""

from __future__ import annotations

import re
import sys
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightrlhf.cli.groups import SamplingArgs, TrainArgs

if TYPE_CHECKING:
    from lightrlhf.training.learners import Learner

GIB = 2**30
FLOAT = 4  # bytes; weights that are trained, gradients and optimiser state are float32 in every precision
QUANTISED = {8: 1.0, 4: 0.5 + 4 / 64}  # bytes of a frozen weight by bits; nf4 has a scale for each 64 weights
MOMENTS = {"AdamW": 8, "Adam": 8, "AdamW8bit": 2, "PagedAdamW32bit": 8}  # bytes of a trained weight, by optimiser
ADAPTERS = 0.01  # weights of adapters, as a fraction of the base's
SPARE = 0.3  # share of a device that `largest_models` keeps for activations, rollouts and libraries


def largest_models(memory: float) -> dict[str, float]:
    """Parameters of the largest model whose training fits into these bytes, by way of training."""
    trained = 2 * FLOAT + MOMENTS["AdamW"]
    bases = {"float32": FLOAT, "bfloat16": 2, "4 bits": QUANTISED[4]}
    adapted = {f"LoRA, base in {name}": size + ADAPTERS * trained for name, size in bases.items()}
    return {way: (1 - SPARE) * memory / size for way, size in {"all weights, AdamW": trained, **adapted}.items()}


def checkpoint_bytes(module: nn.Module, learners: Mapping[str, Learner], only_adapters: bool) -> int:
    """Size of a checkpoint but for its tokenizer and configs: weights, and what resuming needs.

    module: the model that is saved; learners: the run's; only_adapters: of a model they are saved, not the base.
    """
    whole: nn.Module = getattr(module, "model", module)  # a role on a shared backbone has its own parameters alone
    weights = [p for p in module.parameters() if p.requires_grad] if only_adapters else whole.parameters()
    size = sum(p.numel() for p in weights) * FLOAT
    for learner in learners.values():
        if learner.module.module is not module:
            size += sum(p.numel() * p.element_size() for p in learner.module.parameters() if p.requires_grad)
        for state in learner.optimizer.state_dict()["state"].values():
            size += sum(v.numel() * v.element_size() for v in state.values() if isinstance(v, Tensor))
    return size


def peak_memory(device: torch.device) -> float:
    """Most memory that this process has used, GiB: what torch allocated on a GPU, else what was resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    try:
        import resource
    except ModuleNotFoundError:  # on Windows
        return 0.0
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIB


# ----------------------------------------------------------------------------------------------- memory that ran out
@runtime_checkable
class RolloutArgs(Protocol):
    """Flags of a program with a separate batch size for sampling."""

    rollout_mini_batch_size: int


def is_out_of_memory(problem: Exception) -> bool:
    """Whether an allocation failed, on a device or on the CPU (where torch raises a plain RuntimeError)."""
    return isinstance(problem, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(problem)


def memory_advice(
    args: TrainArgs, phase: str, problem: Exception, trainable: int, world_size: int, device: torch.device
) -> str:
    """What was requested, what is in use, and up to three flags that lower the memory of this phase."""
    requested, held = allocation(problem), ""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        held = f", {gib(torch.cuda.memory_allocated(device))} of {gib(total)} are in use"
    flags = memory_flags(args, phase, requested, trainable, world_size)
    return f"{gib(requested)} more were requested{held}; what helps: {', '.join(flags)}"


def allocation(problem: Exception) -> float:
    """Bytes that an out-of-memory error says were requested; 0 when it does not say."""
    found = re.search(r"allocate (?:memory: you tried to allocate )?([\d.]+) (bytes|[KMGT]iB)", str(problem))
    units = {"bytes": 0, "KiB": 1, "MiB": 2, "GiB": 3, "TiB": 4}
    return float(found[1]) * 1024 ** units[found[2]] if found else 0.0


def memory_flags(args: TrainArgs, phase: str, wanted: float, learning: int, world_size: int) -> list[str]:
    """Up to three flags that lower the memory of a phase, each with what it would save.

    wanted: bytes of the allocation that failed; learning: parameters with gradients.
    """
    flags = []
    size, half, moments = "micro_batch_size", args.micro_batch_size // 2, MOMENTS[args.optimizer]
    samples = phase in ("rollout", "score", "resample", "evaluation")
    if samples and isinstance(args, RolloutArgs):
        size, half = "rollout_mini_batch_size", args.rollout_mini_batch_size // 2
    if phase != "setup" and half:
        flags.append(f"--{size} {half} (that allocation becomes {gib(wanted / 2)})")
    if samples and isinstance(args, SamplingArgs) and args.max_new_tokens > 1:
        flags.append(f"--max_new_tokens {args.max_new_tokens // 2} (at best half of it too)")
    if not args.activation_checkpointing and phase == "update":
        flags.append("--activation_checkpointing True (activations of one layer at a time, a third more compute)")
    if args.finetune_mode == "all" and learning:
        flags.append(f"--finetune_mode lora (saves {gib((FLOAT + moments) * learning)} of gradients and moments)")
    if args.finetune_mode == "lora" and args.base_dtype == "float32":
        flags.append("--base_dtype bfloat16 (half of the frozen weights)")
    if args.optimizer in ("AdamW", "Adam") and args.strategy in ("auto", "ddp") and learning:
        flags.append(f"--optimizer AdamW8bit (saves {gib((moments - MOMENTS['AdamW8bit']) * learning)} of moments)")
    if args.strategy != "fsdp":
        ranks = max(world_size, 2)
        saved = (2 * FLOAT + moments) * learning * (1 - 1 / ranks)
        flags.append(f"--strategy fsdp --devices {ranks} (saves {gib(saved)} on each)")
    if args.precision == "32-true":
        flags.append("--precision bf16-mixed (about half of the activations)")
    return flags[:3]


def gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB"


class Meter(TorchDispatchMode):
    """Counts the bytes of tensors that are made and freed while it is active: those that live now, and the most."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
        self.now = self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in tree_leaves(out):
            if isinstance(value, Tensor):
                self.note(value)
        return out

    def note(self, value: Tensor) -> None:
        """Count a tensor's storage, once however many tensors view it."""
        storage = value.untyped_storage()
        key = storage._cdata
        if key not in self.live:
            self.live[key] = storage.nbytes()
            self.now += storage.nbytes()
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        self.now -= self.live.pop(key)

    def peak(self, task: Callable[..., None], *args: Any) -> int:
        """Bytes that a task allocates at most beyond what lives when it begins."""
        before = self.most = self.now
        task(*args)
        return self.most - before
