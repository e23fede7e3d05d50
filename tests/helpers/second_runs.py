"""Calls on the second device from a test, and how far their results are from the CPU's."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from helpers import run_program, tiny_policy
from helpers.processes import PATIENCE
from helpers.tiny_runs import experiment_of
from lightrlhf.models.offload import offload, on_device

THERE = ["--accelerator", "second"]
FIXED = ["--disable_dropout", "True"]  # dropout of the device draws other numbers
SIGNS = ("accuracies", "sign_align")  # of margins near 0
Calls = Mapping[str, tuple[str, list[str]]]  # by name: a module or a function, and flags


def there(calls: Calls, **job: object) -> dict[str, dict]:
    """What `helpers.on_second` found of calls on the device; all must have succeeded, unless a fault was planted."""
    job_flag = json.dumps({"calls": calls, **job})
    done = run_program("helpers.on_second", job_flag, patience=len(calls) * PATIENCE)
    found = json.loads(done.stdout.splitlines()[-1])
    problems = [f"{name}: {one['problem']}" for name, one in found.items() if one["problem"]]
    assert not problems or "fault" in job, "\n".join(problems)
    return found


def offload_from_device(_: object) -> None:
    """Offload a model that is on the device, as a given one may be."""
    policy, device = tiny_policy("llama").requires_grad_(False).to("second:0"), torch.device("second:0")
    offload(policy, device)
    assert {p.device.type for p in policy.parameters()} == {"cpu"}
    with on_device(policy):
        assert {p.device for p in policy.parameters()} == {device}


def figures(log_dir: Path) -> list[dict[str, float]]:
    """The metrics of a run but times and signs."""
    lines = (experiment_of(log_dir) / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return [{k: v for k, v in row.items() if "time/" not in k and not k.endswith(SIGNS)} for row in rows]


def gaps(found: Any, expected: Any, name: str = "") -> list[tuple[float, str]]:
    """Differences of all numbers of two JSON values, relative to numbers above 1, each with its place.

    All else must be the same.
    """
    if isinstance(expected, float) and not isinstance(found, str):
        if math.isnan(expected) or math.isinf(expected):
            return [(0.0 if found == expected or math.isnan(found) == math.isnan(expected) else math.inf, name)]
        return [(abs(found - expected) / max(1, abs(expected)), name)]
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), name
        return [gap for key, value in expected.items() for gap in gaps(found[key], value, f"{name}/{key}")]
    if isinstance(expected, list):
        assert len(found) == len(expected), name
        return [gap for i, pair in enumerate(zip(found, expected)) for gap in gaps(*pair, f"{name}/{i}")]
    assert found == expected, name
    return []


def contents(folder: Path) -> dict[str, Any]:
    """The JSON files below a folder, whose own name is left out, but those of arguments and sizes."""
    found: dict[str, Any] = {}
    for path in sorted(
        path for path in folder.rglob("*.json*") if not path.name.endswith(("args.json", "manifest.json"))
    ):
        text = path.read_text().replace(str(folder), "")
        values = text.splitlines() if path.suffix == ".jsonl" else [text]
        found[str(path.relative_to(folder))] = [json.loads(value) for value in values]
    return found
