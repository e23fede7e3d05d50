"""Report on the machine, the installation, which models fit, and how fast they train.

    lightrlhf doctor

Processor, memory, devices, versions, extras, and the largest model whose weights, gradients and optimiser state fit.
Then matrix products, memory, and training and sampling of the model `tiny` are timed, for about `--seconds`.
Exits with status 1 when a required package is missing or older than allowed.

Left out: activations and rollouts, which depend on the run (`lightrlhf estimate` counts them), the network, the disk's
speed.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

import lightrlhf
from lightrlhf.cli.errors import RunFailure, one_line_errors
from lightrlhf.cli.fields import Args, at_least, check_args
from lightrlhf.cli.parser import parse
from lightrlhf.storage.results import print_table

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class DoctorArgs(Args):
    """Report the machine, the installation, the models that fit, and the measured speed."""

    seconds: float = at_least(0, 20.0)
    """Seconds to spend on measuring speed; 0 skips it."""


def run(args: DoctorArgs) -> dict[str, Any]:
    """Print the report; returns it. Raises: RunFailure naming the required packages that are missing or too old."""
    check_args(args, DoctorArgs)
    packages = {name: dict(rows) for name, rows in requirements().items()}
    broken = [f"{name} {state}" for name, state in packages[""].items() if not works(state)]
    report: dict[str, Any] = {"machine": dict(machine())}
    show("Machine", report["machine"])
    extras = {extra: find_missing(rows) for extra, rows in packages.items() if extra}
    report["extras"] = {
        extra: f"needs {', '.join(lacking)}" if lacking else "works" for extra, lacking in extras.items()
    }
    example = next((extra for extra, lacking in extras.items() if lacking), "all")
    names = f"pip install -e '.[{example}]' in the clone, or 'lightrlhf[{example}]' beside an installed wheel"
    show(f"Extras (what is missing: {names})", report["extras"])
    if broken:
        raise RunFailure(f"required packages: {', '.join(broken)}; pip install -e . in the clone, or the wheel again")
    from lightrlhf.training.memory import largest_models

    report["devices"] = devices()
    report["fits"] = fits = {name: largest_models(room) for name, room in report["devices"].items()}
    sizes = [[way, *(billions(fits[name][way]) for name in fits)] for way in largest_models(0)]
    title = "largest model, 30% of the memory kept for activations and rollouts"
    print_table(title, ["parameters", *report["fits"]], sizes)
    if args.seconds:
        report["speed"] = speed(args.seconds)
        show("Speed", report["speed"])
    return report


def show(title: str, values: Mapping[str, str]) -> None:
    """Print a title, and name and value on a line each."""
    width = max(map(len, values), default=0) + 2
    print(f"\n{title}", *(f"  {name:<{width}}{value}" for name, value in values.items()), sep="\n", flush=True)


# --------------------------------------------------------------------------------------------------------- packages
def requirements() -> dict[str, list[tuple[str, str]]]:
    """(package, state) by extra, "" for what is always required; a state is a version, `missing` or what is wanted."""
    from packaging.requirements import Requirement

    found: dict[str, list[tuple[str, str]]] = {"": []}
    try:
        lines = requires("lightrlhf") or []
    except PackageNotFoundError:  # run from a folder that is not installed
        lines = []
    for line in lines:
        wanted = Requirement(line)
        extra = re.search(r"extra == ['\"]([\w-]+)['\"]", line)
        found.setdefault(extra[1] if extra else "", []).append((wanted.name, state_of(wanted)))
    return found


def state_of(wanted: Any) -> str:
    """The installed version, `missing`, or both versions where the installed one is not allowed."""
    try:
        installed = version(wanted.name)
    except PackageNotFoundError:
        return "missing"
    return (
        installed if wanted.specifier.contains(installed, prereleases=True) else f"{installed}, not {wanted.specifier}"
    )


def works(state: str) -> bool:
    return state != "missing" and ", not " not in state


def find_missing(rows: dict[str, str]) -> list[str]:
    """The packages of an extra that are missing or of another version."""
    return [name if state == "missing" else f"{name} {state}" for name, state in rows.items() if not works(state)]


# ---------------------------------------------------------------------------------------------------------- machine
def machine() -> Iterator[tuple[str, str]]:
    """(name, value) of each property of the machine, as far as it is known."""
    yield "lightrlhf", lightrlhf.__version__
    yield "Python", f"{platform.python_version()}, {platform.system()} {platform.release()}, {sys.executable}"
    yield "processor", f"{processor()}, {os.cpu_count()} cores"
    yield "memory", f"{total_memory() / GIB:.1f} GiB" if total_memory() else "not known on this system"
    yield "disk", f"{shutil.disk_usage('.').free / GIB:.0f} GiB free in this folder"
    try:
        import torch
    except ImportError as problem:
        yield "torch", f"cannot be imported: {problem}"
        return
    yield "torch", f"{torch.__version__}, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"
    flags = cpu_flags()
    half = [name for name in ("avx512_bf16", "amx_bf16", "bf16") if name in flags]
    slow = "slow: no instructions for it" if flags else "not known: this system does not list its instructions"
    yield "bfloat16 on the processor", f"fast ({', '.join(half)})" if half else slow
    if torch.backends.mps.is_available():
        yield "GPU", "Apple's (mps), for one rank; it shares the processor's memory and has no float64"
    elif not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        yield "GPU", "none that torch can use" + ("" if built else "; this torch was built for the CPU alone")
    for number in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(number)
        kind = "bfloat16" if torch.cuda.is_bf16_supported() else "no bfloat16: --precision 16-mixed"
        yield f"GPU {number}", f"{found.name}, {found.total_memory / GIB:.1f} GiB, {kind}"


def processor() -> str:
    """The processor's name, as far as the system says."""
    info = Path("/proc/cpuinfo")
    named = re.search(r"model name\s*: (.+)", info.read_text()) if info.is_file() else None
    return named[1] if named else platform.processor() or platform.machine()


def cpu_flags() -> set[str]:
    info = Path("/proc/cpuinfo")
    flags = re.search(r"^(?:flags|Features)\s*: (.+)", info.read_text(), re.MULTILINE) if info.is_file() else None
    return set(flags[1].split()) if flags else set()


def total_memory() -> int:
    """Bytes of memory that this process may use: the machine's or its container's limit; 0 if not known."""
    if not hasattr(os, "sysconf"):  # on Windows
        return 0
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else "max"
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(total, int(text)) if text.isdigit() else total


# ----------------------------------------------------------------------------------------------------------- models
def devices() -> dict[str, int]:
    """Bytes of memory of each device that trains."""
    import torch

    gpus = {
        f"GPU {number}": torch.cuda.get_device_properties(number).total_memory
        for number in range(torch.cuda.device_count())
    }
    return ({"CPU": total_memory()} if total_memory() else {}) | gpus


def billions(parameters: float) -> str:
    return f"{parameters / 1e9:.1f}B" if parameters >= 1e9 else f"{parameters / 1e6:.0f}M"


# ------------------------------------------------------------------------------------------------------------ speed
def speed(seconds: float) -> dict[str, str]:
    """Products, memory, and tokens a second of the model `tiny`: trained, and sampled by the engine."""
    import torch

    from lightrlhf.models.loading import find_device
    from lightrlhf.training.roofline import measure_ceilings

    device = find_device("auto")
    shown = {}
    for dtype in (torch.float32, torch.bfloat16):
        ceilings = measure_ceilings(device, dtype)
        shown[f"products in {str(dtype).removeprefix('torch.')}"] = f"{with_prefix(ceilings.flops)}FLOP/s"
    shown["memory"] = f"{with_prefix(ceilings.bandwidth)}B/s"
    for name, work in tiny_work(device).items():
        shown[name] = f"{rate(work, seconds / 2):,.0f} tokens/s"
    return shown


def with_prefix(number: float) -> str:
    """A rate with four digits and the prefix of its unit."""
    power = max(0, min(4, (len(f"{number:.0f}") - 1) // 3))
    return f"{number / 1000**power:.4g} {' kMGT'[power].strip()}"


def tiny_work(device: Any) -> dict[str, Callable[[], int]]:
    """Work with a model of the size of `tiny`, by name: each call returns how many tokens it trained or sampled."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from lightrlhf.cli.groups import SamplingArgs
    from lightrlhf.generation.engine import generate
    from lightrlhf.models.roles import Policy
    from lightrlhf.models.tiny import MAX_POSITIONS, SIZES

    config = LlamaConfig(vocab_size=1024, max_position_embeddings=MAX_POSITIONS, tie_word_embeddings=True, **SIZES)
    model = LlamaForCausalLM(config).to(device)
    ids = torch.randint(1024, (32, 128), device=device)  # (B, T)
    noise = torch.rand(32, 64)  # (B, new tokens)

    def train() -> int:
        model.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        return ids.numel()

    def sample() -> int:
        args = SamplingArgs(max_new_tokens=noise.shape[1])
        return sum(map(len, generate(Policy(model), ids.tolist(), args, [], noise, len(ids)).responses))

    return {"tiny model, forward and backward": train, "tiny model, sampling": sample}


def rate(work: Callable[[], int], seconds: float) -> float:
    """Units of work a second, after a first call that is not counted."""
    work()
    done, started = 0, time.perf_counter()
    while not done or time.perf_counter() - started < seconds:
        done += work()
    return done / (time.perf_counter() - started)


@one_line_errors
def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run the program; returns the report."""
    return run(parse(DoctorArgs, argv))


if __name__ == "__main__":
    main()
