"""Programs on the second device, in a process of their own: `--accelerator second` is what it computes on here.

As a program it reads a job from its first argument, `{"calls": {"name": ["lightrlhf.sft", ["--flag", ...]]}}`, and
writes by name how each call failed, or "", what it returned, and what made the host wait in each phase of its steps. In
place of a module, whose `main` is called, `module:function` may be named. `mps_rules`: see `using_device`; `changes`:
some of `CHANGES`, of which `varlen` also reports rows of texts; `fault`: one of `FAULTS`, planted in the library first.
"""

import contextlib
import importlib
import io
import json
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from helpers import second_device, varlen
from helpers.second_device import NAME

on_host: list[Any] = []  # weights of models that are offloaded
offloaded: Counter[str] = (
    Counter()
)  # their models, how often they were fetched, parameters left on the device by phases
waiting: dict[str, list[list[int]]] = {}  # host reads and waiting copies in each phase of each step, by phase


def _mixing(original: Any, *args: Any, **options: Any) -> Any:
    return tree_map_only(torch.Tensor, lambda tensor: tensor + torch.zeros(1), original(*args, **options))


def _reading(original: Any, *args: Any, **options: Any) -> Any:
    result = original(*args, **options)
    found = [getattr(one, "input_ids", one) for one in tree_leaves([result, *args])]
    held = [leaf for leaf in found if isinstance(leaf, torch.Tensor) and leaf.numel()]
    (held[0] if held else args[0].row).flatten()[0].item()
    return result


def _moved(original: Any, policy: Any, batch: Any, *args: Any) -> Any:
    return original(policy, batch.to(policy.model.device), *args)


FAULTS = {  # by room: the function that gets the fault, and what wraps it
    "maths": ("lightrlhf.maths.ops", "policy_loss", _mixing),
    "models": ("lightrlhf.models.roles", "Role._base", _reading),
    "data": ("lightrlhf.data.batch", "Batch.to", _reading),
    "training": ("lightrlhf.training.learners", "Learners.backward", _reading),
    "generation": ("lightrlhf.generation.slots", "Slots._decode", _reading),
    "rewards": ("lightrlhf.rewards.scorers", "score_batch", _mixing),
    "evaluation": ("lightrlhf.evaluation.pairs", "pair_scores", _mixing),
    "serving": ("lightrlhf.generation.rollout", "score_logprobs", _moved),
    "demo": ("lightrlhf.demo.models", "score_logprobs", _moved),
}


def plant(room: str) -> None:
    """Put the fault of a room into the library."""
    module, path, wrap = FAULTS[room]
    owner: Any = importlib.import_module(module)
    *classes, name = path.split(".")
    for one in classes:
        owner = getattr(owner, one)
    setattr(owner, name, _wrapped(wrap, getattr(owner, name)))


def _wrapped(wrap: Any, original: Any) -> Any:
    return lambda *args, **options: wrap(original, *args, **options)


def prepare(changes: Sequence[str] = ()) -> None:
    """Let the library find the device, and Fabric compute on it; before its programs are imported."""
    import lightning.fabric
    from lightning.fabric.accelerators import CPUAccelerator
    from lightning.fabric.strategies import SingleDeviceStrategy

    from lightrlhf.models import loading
    from lightrlhf.training.phases import Phases

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

    measured = Phases.phase

    @contextlib.contextmanager
    def phase(self: Any, name: str, rows: Any = ()) -> Any:
        before = [counter.total() for counter in (second_device.reads, second_device.waits)]
        with measured(self, name, rows):
            yield
        after = [counter.total() for counter in (second_device.reads, second_device.waits)]
        offloaded["left"] += sum(p.device.type != "cpu" for one in on_host for p in _parameters_of(one))
        waiting.setdefault(name, []).append([late - early for early, late in zip(before, after)])

    Phases.phase = phase
    torch.set_num_threads(1)
    lightning.fabric.Fabric = make_fabric
    loading.find_device = find_device
    for module in [one for name, one in sys.modules.items() if name.startswith("lightrlhf.")]:
        if getattr(module, "find_device", None) is find:  # imported before, by the process that forks; a flag may
            importlib.reload(module)  # hold the function, too
    for name in changes:
        CHANGES[name]()


def move_frozen() -> None:
    """Let references and reward models be on the other device."""
    from lightrlhf.rewards import loading
    from lightrlhf.training.learners import Learners

    load, device = loading.load_scorer, f"{NAME}:1"
    Learners.freeze = lambda own, module: module.requires_grad_(False).eval().to(device)
    loading.load_scorer = lambda name, _, *args, **options: load(name, torch.device(device), *args, **options)


def use_buckets() -> None:
    """Let decoding steps have buckets, as those that CUDA captures; here they run as they are."""
    from lightrlhf.generation import graphs

    graphs.DEVICES.add(NAME)


def cut_logits() -> None:
    """Let two rows of logits exist at a time."""
    from lightrlhf.models import roles

    roles.logit_rows = lambda size, device: 2


def draw_evenly() -> None:
    """Draw each token that is not excluded equally often, so that a draw does not depend on roundings."""
    from lightrlhf.generation import sampling

    sampling.inverse_cdf = even_tokens


def even_tokens(probs: torch.Tensor, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """In place of `sampling.inverse_cdf`: of each row's tokens with a probability the one at a uniform number."""
    places = (probs > 0).cumsum(-1)
    wanted = (uniforms * places[:, -1]).long()[:, None]
    return (places > wanted).int().argmax(-1), probs.sum(-1)


def watch_offloading() -> None:
    """Count the models whose weights wait on the host, and how often they are fetched."""
    from lightrlhf.models.offload import HostWeights

    begin, fetch = HostWeights.__init__, HostWeights.fetch

    def begin_counted(self: Any, *given: Any) -> None:
        begin(self, *given)
        on_host.append(self)

    def fetch_counted(self: Any) -> None:
        fetch(self)
        offloaded["fetched"] += 1
        assert all(p.device.type == NAME for p in _parameters_of(self))

    HostWeights.__init__, HostWeights.fetch = begin_counted, fetch_counted


def _parameters_of(weights: Any) -> list[Any]:
    return [getattr(owner, name) for owner, name, _ in weights.places]


def attend_by_text() -> None:
    """Let texts follow one another in a row on the device, as on CUDA."""
    from lightrlhf.models import varlen as library

    library.DEVICES.add(NAME)
    library.kernel = lambda: varlen.attend_alone


CHANGES = {
    "apart": move_frozen,
    "buckets": use_buckets,
    "chunks": cut_logits,
    "even": draw_evenly,
    "offload": watch_offloading,
    "varlen": attend_by_text,
}


def run(calls: dict[str, tuple[str, list[str]]], mps_rules: bool = False) -> dict[str, Any]:
    """By name: how the call failed, or "", and its host reads and waiting copies by call site."""
    found: dict[str, Any] = {}
    with second_device.using_device(mps_rules), in_threads():
        for name, (target, flags) in calls.items():
            second_device.reads.clear()
            second_device.waits.clear()
            varlen.calls.clear()
            on_host.clear()
            offloaded.clear()
            second_device.used.clear()
            waiting.clear()
            problem, printed, returned = "", io.StringIO(), None
            module, _, function = target.partition(":")
            try:
                with contextlib.redirect_stdout(printed):
                    returned = getattr(importlib.import_module(module), function or "main")(flags)
            except BaseException as error:  # an exit, too
                problem = "" if isinstance(error, SystemExit) and not error.code else traceback.format_exc()
            transfers = {"reads": dict(second_device.reads), "waits": dict(second_device.waits)}
            transfers |= {"devices": sorted(second_device.used)}
            outcome = {"problem": problem, "printed": printed.getvalue(), "returned": returned}
            found[name] = {**outcome, **transfers, "phases": dict(waiting), "rows_of_texts": len(varlen.calls)}
            found[name]["offloaded"] = {"models": len(on_host), **offloaded}
    return found


@contextlib.contextmanager
def in_threads() -> Iterator[None]:
    """Context manager: threads that start in it compute on the device, too, as those of a server do."""
    run_thread = threading.Thread.run

    def run_on_device(self: threading.Thread) -> None:
        with second_device.Dispatch():
            run_thread(self)

    threading.Thread.run = run_on_device  # type: ignore[method-assign]
    try:
        yield
    finally:
        threading.Thread.run = run_thread  # type: ignore[method-assign]


def main(argv: list[str] | None = None) -> None:
    """Do the job, and print what was found."""
    job = json.loads((argv or sys.argv[1:])[0])
    prepare(job.get("changes", ()))
    if "fault" in job:
        plant(job["fault"])
    print(json.dumps(run(job["calls"], job.get("mps_rules", False))))


if __name__ == "__main__":
    main()
