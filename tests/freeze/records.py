"""What is compared of a case: by name, such as `run 0 metrics row 3 train/loss`, a number, a text or a tensor."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

VERSION = 2  # to raise where records of the same runs change
TIMES = re.compile(r"^time/|^speed/|per_second|_s$|seconds|^memory")  # names of what no two runs have the same
CLOCK = re.compile(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d")  # in the names of experiment dirs
STATE = ("optimizers", "schedulers", "rng", "python_rng", "learned", "stored", "loss_scale", "step", "extra")
OUTPUTS = ("out/**/*", "logs*/**/eval/**/*")  # of programs that do not train
TREES = (Mapping, list, tuple, torch.Tensor)
FLAG = "args.json"  # a flag that only one of two trees has is no difference

Record = dict[str, Any]


def save(record: Record, path: Path) -> None:
    torch.save(record, path)


def load(path: Path) -> Record:
    return torch.load(path, weights_only=False)


def experiments(folder: Path) -> list[Path]:
    """All experiment dirs below a folder, outer ones first."""
    found = [path.parent for path in folder.rglob("args.json") if not path.parent.is_symlink()]
    real = {path.resolve(): path for path in sorted(found, key=lambda path: "latest" in path.parts, reverse=True)}
    return sorted(real.values(), key=lambda path: (len(path.parts), str(path)))


def of(work: Path) -> Record:
    """The record of all runs and output files below a folder."""
    found: Record = {}
    for folder in sorted(path for path in work.glob("logs*") if path.is_dir()):
        for number, run in enumerate(experiments(folder)):
            found |= {f"{folder.name} run {number} {name}": value for name, value in of_run(run).items()}
    for path in sorted(path for place in OUTPUTS for path in work.glob(place) if path.suffix in (".jsonl", ".json")):
        place = CLOCK.sub("…", str(path.relative_to(work)))
        found |= {f"{place} {name}": value for name, value in of_file(path, work)}
    return found


def of_run(run: Path) -> Record:
    """The record of one experiment dir."""
    found: Record = {}
    for path in sorted(run.glob("*.json*")):
        if path.suffix == ".jsonl" or path.name in ("evaluation.json", "results.json"):
            found |= {f"{path.name} {name}": value for name, value in of_file(path, run)}
    for name, value in json.loads((run / "args.json").read_text(encoding="utf-8")).items():
        if name != "program" and "/" not in (text := json.dumps(value)):  # no paths, no addresses
            found[f"{FLAG} {name}"] = text
    for folder in sorted(run.glob("checkpoint-*")):
        found |= {f"{folder.name} {name}": value for name, value in of_checkpoint(folder)}
    best = run / "best"
    found["best"] = best.resolve().name if best.exists() else ""
    return found


def of_checkpoint(folder: Path) -> Iterator[tuple[str, Any]]:
    from safetensors.torch import load_file

    for path in sorted(folder.glob("*.safetensors")):
        for key, tensor in load_file(path).items():
            yield f"{path.name} {key}", tensor
    if (folder / "resume.pt").exists():
        state = torch.load(folder / "resume.pt", weights_only=True)
        for part in STATE:
            for name, value in leaves(state.get(part)):
                yield f"resume.pt {part}{name}", value


def of_file(path: Path, base: Path) -> Iterator[tuple[str, Any]]:
    """Values of a JSON or JSONL file by line and name, without times; paths are those below `base`."""
    text = path.read_text(encoding="utf-8").replace(str(base), "…")
    text = CLOCK.sub("…", text)
    rows = [json.loads(line) for line in text.split("\n") if line] if path.suffix == ".jsonl" else [json.loads(text)]
    yield "rows", len(rows)
    for number, row in enumerate(rows):
        for name, value in leaves(row):
            if not any(TIMES.search(part) for part in name.split(" ")):
                yield f"row {number}{name}", value


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Tensors and plain values of a tree, with their places in it."""
    if isinstance(value, Mapping):
        for key, member in value.items():
            yield from leaves(member, f"{name} {key}")
    elif isinstance(value, list | tuple) and any(
        isinstance(member, Mapping | list | tuple | torch.Tensor) for member in value
    ):
        for key, member in enumerate(value):
            yield from leaves(member, f"{name} {key}")
    elif value is not None:
        yield name, list(value) if isinstance(value, tuple) else value


def printed(text: str, places: Mapping[str, Path], number: int) -> Record:
    """The lines that a step printed, with short names for its folders."""
    for name, place in places.items():
        text = text.replace(str(place), f"{{{name}}}")
    return {f"printed {number} line {i}": line for i, line in enumerate(text.split("\n"))}
