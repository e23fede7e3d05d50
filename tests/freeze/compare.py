"""Which parts of two records differ, bitwise."""

import re
from collections import Counter
from typing import Any

import torch

from tests.freeze import cases
from tests.freeze.records import FLAG, Record

CLOCK = re.compile(  # what no two printed reports have the same
    r"[\d.,]+ ?(s|ms|min|h|GB|MB|GiB|MiB|KiB|B|tokens/s|tokens a second|%)(?!\w)|lightrlhf-dry-run-\w+|^steps .*"
)


def differences(base: Record, tree: Record) -> list[str]:
    """A line for each part that differs: a file of a run, with its first difference and the number of all."""
    base = {name: value for old, value in base.items() if (name := renamed(old))}
    tree = {name: value for name, value in tree.items() if renamed(name)}
    moved = unplaced(base, tree)
    parts: dict[str, list[str]] = {}
    for name in dict.fromkeys([*base, *tree]):
        if name in moved or (name in base and name in tree and same(base[name], tree[name])):
            continue
        if f"{FLAG} " in name and (name.endswith((" git_commit", " versions")) or not (name in base and name in tree)):
            continue
        parts.setdefault(part_of(name), []).append(f"{name}: {gap_of(name, base, tree)}")
    return [f"{lines[0]}{others(lines[1:])}" for lines in parts.values()]


def others(lines: list[str]) -> str:
    """How many more differ, and of rows their columns."""
    columns = dict.fromkeys(found[1] for line in lines if (found := re.search(r" row \d+ ([^:]*):", line)))
    return f" (and {len(lines)} more{': ' * bool(columns)}{', '.join(columns)})" if lines else ""


def gap_of(name: str, base: Record, tree: Record) -> str:
    if name not in base or name not in tree:
        return f"only in the {'base' if name in base else 'tree'}"
    one, other = base[name], tree[name]
    return f"{shown(one)} in the base, {shown(other)} in the tree{distance(one, other)}"


def renamed(name: str) -> str:
    """A part's name in the tree; empty where the table says that it is not compared."""
    for pattern, now in cases.MOVED.items():
        name = re.sub(pattern, now, name)
    return name


def unplaced(base: Record, tree: Record) -> set[str]:
    """Names of the loop's own state (`extra`) whose values both records have, wherever they are kept."""
    found: set[str] = set()
    for folder in {name.partition(" resume.pt extra")[0] for name in base if " resume.pt extra" in name}:
        own, other = (
            {n: v for n, v in one.items() if n.startswith(f"{folder} resume.pt extra")} for one in (base, tree)
        )
        counts = Counter(fingerprint(v) for v in own.values()) & Counter(fingerprint(v) for v in other.values())
        for values in (own, other):
            left = counts.copy()
            for name, value in values.items():
                if left[fingerprint(value)]:
                    left[fingerprint(value)] -= 1
                    found.add(name)
    return found


def fingerprint(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)} {value.flatten().tolist()}"
    return repr(value)


def part_of(name: str) -> str:
    """The file of a run that a name is of, so that one line tells of all its rows."""
    return re.split(
        r"(?<=\.safetensors) | row \d+| (?=optimizers|schedulers|rng|python_rng|learned|extra)| line \d+", name
    )[0]


def same(one: Any, other: Any) -> bool:
    """Whether two values are bit-equal."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        alike = one.dtype == other.dtype and one.shape == other.shape
        return alike and bits(one) == bits(other)
    if isinstance(one, str) and isinstance(other, str):
        return CLOCK.sub("…", one) == CLOCK.sub("…", other)
    return type(one) is type(other) and repr(one) == repr(other)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor {tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    text = repr(value)
    return text if len(text) < 160 else f"{text[:157]}…"


def distance(one: Any, other: Any) -> str:
    """The largest gap between two tensors or numbers."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and one.shape == other.shape and one.numel():
        return f", at most {float((one.double() - other.double()).abs().max()):.2g} apart"
    if isinstance(one, float) and isinstance(other, float):
        return f", {abs(one - other):.2g} apart"
    return ""
