"""Experiment dirs with logs and without models, for the tab Runs."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def experiment(
    folder: Path, rows: Sequence[dict[str, Any]], samples: Sequence[dict[str, Any]] = (), **args: Any
) -> str:
    """An experiment dir with these metrics, samples and arguments."""
    folder.mkdir(parents=True)
    (folder / "args.json").write_text(json.dumps({"experiment_name": "ppo", "program": "ppo", **args}))
    (folder / "README.md").write_text("---\ntags: []\n---\n# A model card\n")
    for name, lines in (("metrics.jsonl", rows), ("samples.jsonl", samples)):
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(folder)


def scores(number: int, start: float, warned: Sequence[int] = ()) -> list[dict[str, float]]:
    """Rows of metrics with a score that rises by 1 a step, and an audit that warns at some steps."""
    return [
        {
            "step": step,
            "objective/score": start + step,
            "audit/score": 1.0,
            "audit/warning": float(step in warned),
            "my/metric": -float(step),
            "time/rollout": 3.0,
            "time/update": 2.0,
            "time/tokens_per_second": 50.0,
        }
        for step in range(1, number + 1)
    ]


def said(steps: Sequence[int], name: str) -> list[Row]:
    """Samples of a run: two a step."""
    return [
        {"step": step, "prompt": f"Ask <b>{name}</b> ${{x}} {{{{y}}}}", "response": f"{name} {n} at {step}", "score": n}
        for step in steps
        for n in (0, 1)
    ]
