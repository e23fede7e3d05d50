"""Diagnoses of a run's curves so far, from our `metrics.jsonl` or the `trainer_state.json` of Hugging Face's trainers.

A curve rose where the 95% interval of the mean of its last quarter lies above the interval of its first quarter. Values
that follow each other are not independent, so the intervals are too narrow where a curve wanders.

Left out: TensorBoard files, a learning rate that is too low, and collapsed entropy, which need a scale to be judged by.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightrlhf.checks.verdicts import CANNOT_TELL, RIGHT, WRONG, Verdict
from lightrlhf.cli.errors import UsageError
from lightrlhf.maths.student import interval
from lightrlhf.storage.run_dir import is_experiment_dir, read_arg, read_metrics

Curves = Mapping[str, Sequence[float]]
LEAST = 12  # rows, three in each quarter
NAMES = {  # ours, and TRL's
    "score": ("objective/score", "reward"),
    "kl": ("objective/kl", "kl"),
    "equal": ("objective/zero_std_ratio", "frac_reward_zero_std"),
    "truncated": ("completions/truncated_ratio", "completions/clipped_ratio"),
    "length": ("completions/mean_length",),
    "audit": ("audit/score",),
}


def read_curves(path: str) -> dict[str, list[float]]:
    """Values by name, of those in `NAMES` that were logged and mean something. Raises: UsageError."""
    place = Path(path)
    file = place if place.name == "trainer_state.json" else place / "trainer_state.json"
    if file.is_file():
        try:
            rows: Iterable[Mapping[str, Any]] = json.loads(file.read_text(encoding="utf-8"))["log_history"]
        except (ValueError, KeyError) as problem:
            raise UsageError(f"{file} is not a state of a trainer: {problem}") from problem
    else:
        rows = read_metrics(path)
    rows = list(rows)
    found = {}
    for name, columns in NAMES.items():
        values = [row[one] for row in rows for one in columns if isinstance(row.get(one), int | float)]
        if values:
            found[name] = values
    if is_experiment_dir(path) and read_arg(path, "num_generations") == 1:
        found.pop("equal", None)  # a group of one is equal to itself
    return found


def diagnose(curves: Curves) -> list[Verdict]:
    """A verdict for each diagnosis, which names the curves that it lacks."""
    return [
        _always(curves, "groups", "equal", "all groups equal", ("tasks too easy or too hard", "one seed for a group")),
        _always(curves, "ends", "truncated", "everything truncated", ("max_new_tokens too small", "no end token")),
        _against(curves, "kl", "kl", "score", "KL rises and the reward falls", ("learning rate", "KL coefficient")),
        _against(curves, "audit", "score", "audit", "reward up and audit down", ("the reward is hacked",)),
        _against(curves, "length", "length", "audit", "length rises and the audit falls", ("a reward of length",)),
    ]


def _lacks(curves: Curves, name: str, *needs: str) -> Verdict | None:
    """A verdict where curves are missing or short."""
    missing = [" or ".join(NAMES[one]) for one in needs if one not in curves]
    if missing:
        return Verdict(name, CANNOT_TELL, evidence=f"needs {', '.join(missing)}")
    short = [one for one in needs if len(curves[one]) < LEAST]
    return Verdict(name, CANNOT_TELL, evidence=f"needs {LEAST} rows of {short[0]}") if short else None


def change(values: Sequence[float]) -> tuple[int, str]:
    """1 where a curve rose, -1 where it fell, else 0, by intervals; and both intervals in words."""
    quarter = len(values) // 4
    (mean, low, high), (last, last_low, last_high) = interval(values[:quarter]), interval(values[-quarter:])
    text = f"{mean:.4g} [{low:.4g}, {high:.4g}] to {last:.4g} [{last_low:.4g}, {last_high:.4g}]"
    return (last_low > high) - (last_high < low), text


def _always(curves: Curves, name: str, of: str, fault: str, causes: tuple[str, ...]) -> Verdict:
    """Wrong where a share was 1 in each row of the last quarter."""
    if lacks := _lacks(curves, name, of):
        return lacks
    last = curves[of][-(len(curves[of]) // 4) :]
    evidence = f"{of}: {min(last):.3g} to {max(last):.3g} in the last {len(last)} rows"
    return Verdict(name, WRONG, fault, evidence, causes) if min(last) == 1 else Verdict(name, RIGHT, evidence=evidence)


def _against(curves: Curves, name: str, first: str, second: str, fault: str, causes: tuple[str, ...]) -> Verdict:
    """Wrong where the first curve rose and the second fell; where it stayed, a run at its best looks the same."""
    if lacks := _lacks(curves, name, first, second):
        return lacks
    (rose, text), (fell, beside) = change(curves[first]), change(curves[second])
    evidence = f"{first} {text}; {second} {beside}"
    if rose > 0 > fell:
        return Verdict(name, WRONG, fault, evidence, causes)
    return Verdict(name, CANNOT_TELL if rose > 0 == fell else RIGHT, evidence=evidence)
