"""Diagnoses of a run's curves so far: our `metrics.jsonl`, Hugging Face's `trainer_state.json`, TensorBoard's files.

A curve rose where the 95% interval of the mean of its last quarter lies above the interval of its first quarter. Values
that follow each other are not independent, so an interval is widened by the correlation of neighbours, sqrt((1 + r) /
(1 - r)). A diagnosis needs curves that disagree: a run that may be at its best gets none.

Left out: curves of other names, and what needs a scale, such as an entropy that is low from the start.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightrlhf.checks.logprobs import LARGEST_LOGIT, ROUNDED
from lightrlhf.checks.runs import is_wide
from lightrlhf.checks.step import UNITS
from lightrlhf.checks.verdicts import CANNOT_TELL, RIGHT, WRONG, Verdict
from lightrlhf.cli.errors import UsageError
from lightrlhf.maths.student import interval
from lightrlhf.storage.run_dir import is_experiment_dir, read_args, read_metrics

Curves = Mapping[str, Sequence[float]]
LEAST = 12  # rows, three in each quarter
LEAST_OF_HALVES = 32  # rows, four in each quarter of a half
NAMES = {  # ours, and TRL's
    "score": ("objective/score", "reward"),
    "kl": ("objective/kl", "kl"),
    "equal": ("objective/zero_std_ratio", "frac_reward_zero_std"),
    "truncated": ("completions/truncated_ratio", "completions/clipped_ratio"),
    "length": ("completions/mean_length",),
    "audit": ("audit/score",),
    "entropy": ("objective/entropy", "entropy"),
    "loss": ("policy/loss", "train/loss", "loss"),
    "gradient": ("policy/grad_norm", "train/grad_norm", "grad_norm"),
    "rate": ("train/lr", "learning_rate"),
    "margins": ("rewards/margins",),
    "ratio": ("policy/ratio",),
}
PREFIX = "train/"  # of the names of Hugging Face's trainers in TensorBoard
STILL = 1e-3  # nats, or a margin: fewer than one response in 40 differs (Pinsker: half of the KL, its root)
GONE = 0.1  # of an entropy that was there


def read_curves(path: str) -> dict[str, list[float]]:
    """Values by name, of those in `NAMES` that were logged and mean something. Raises: UsageError."""
    rows = read_rows(Path(path))
    found = {}
    for name, columns in NAMES.items():
        column = next((one for one in columns if any(_is_number(row.get(one)) for row in rows)), None)
        if column is not None:
            found[name] = [float(row[column]) for row in rows if _is_number(row.get(column))]
    if is_experiment_dir(path):
        args = read_args(path)
        if args.get("num_generations") == 1:
            found.pop("equal", None)  # a group of one is equal to itself
        if any(row.get("policy/updates", 1) != 1 for row in rows) or not _is_exact(args):
            found.pop("ratio", None)
        found["lora"] = [float(args.get("finetune_mode") == "lora")]
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_exact(args: Mapping[str, Any]) -> bool:
    """Whether the ratio is of one engine's passes in float32, without dropout."""
    return is_wide(args) and bool(args.get("disable_dropout")) and not args.get("rollout_server")


def read_rows(place: Path) -> list[dict[str, Any]]:
    """Logged rows of a file or folder. Raises: UsageError."""
    file = place if place.name == "trainer_state.json" else place / "trainer_state.json"
    if file.is_file():
        try:
            return [dict(row) for row in json.loads(file.read_text(encoding="utf-8"))["log_history"]]
        except (ValueError, KeyError, TypeError, RecursionError) as problem:
            raise UsageError(f"{file} is not a state of a trainer: {problem}") from problem
    if (place / "metrics.jsonl").is_file() or not list(place.rglob("events.out.tfevents.*")):
        return list(read_metrics(str(place)))
    return _read_events(place)


def _read_events(place: Path) -> list[dict[str, Any]]:
    """Rows by step of TensorBoard's files below a folder, by TensorBoard's own reader. Raises: UsageError."""
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError:
        raise UsageError(f"{place} has TensorBoard's files, and tensorboard is not installed") from None
    rows: dict[int, dict[str, Any]] = {}
    for folder in sorted({file.parent for file in place.rglob("events.out.tfevents.*")}):
        events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 1})
        events.Reload()
        for tag in events.Tags()["scalars"]:
            for event in events.Scalars(tag):
                row = rows.setdefault(event.step, {})
                row[tag] = event.value
                row.setdefault(tag.removeprefix(PREFIX), event.value)
    return [rows[step] for step in sorted(rows)]


def diagnose(curves: Curves) -> list[Verdict]:
    """A verdict for each diagnosis, which names the curves that it lacks."""
    is_lora = bool(curves.get("lora", [0.0])[0])
    return [
        _finite(curves),
        _always(curves, "groups", "equal", "all groups equal", ("tasks too easy or too hard", "one seed for a group")),
        _always(curves, "ends", "truncated", "everything truncated", ("max_new_tokens too small", "no end token")),
        _against(curves, "kl", "kl", "score", "KL rises and the reward falls", ("learning rate", "KL coefficient")),
        _runs_away(curves),
        _entropy(curves),
        _moves(curves, is_lora),
        _against(curves, "audit", "score", "audit", "reward up and audit down", ("the reward is hacked",)),
        _against(curves, "length", "length", "audit", "length rises and the audit falls", ("a reward of length",)),
        _ratio(curves),
        _loss(curves),
    ]


def _finite(curves: Curves) -> Verdict:
    """Wrong where a number is NaN or infinite."""
    bad = [(name, i) for name, values in curves.items() for i, one in enumerate(values) if not math.isfinite(one)]
    if not bad:
        return Verdict("finite", RIGHT if curves else CANNOT_TELL, evidence=", ".join(curves) or "needs curves")
    many = f"{bad[0][0]}: row {bad[0][1]}, and {len(bad) - 1} more numbers"
    return Verdict("finite", WRONG, "numbers are not finite", many, ("learning rate", "overflow of float16"))


def _runs_away(curves: Curves) -> Verdict:
    """Wrong where the KL grows faster from quarter to quarter, and the reward no longer rises."""
    if lacks := _lacks(curves, "growth", "kl", "score", least=LEAST_OF_HALVES):
        return lacks
    values, half = curves["kl"], len(curves["score"]) // 2
    size = len(values) // 4
    means = [_interval(values[i * size : (i + 1) * size]) for i in range(4)]
    steps = [(low - high, mean - before) for (mean, low, _), (before, _, high) in zip(means[1:], means)]
    grows = all(gap > 0 for gap, _ in steps) and steps[2][1] > 2 * steps[1][1] > 4 * steps[0][1]
    rises, text = change(curves["score"][half:])
    evidence = f"kl by quarters {', '.join(f'{mean:.4g}' for mean, _, _ in means)}; score since half of it {text}"
    if grows and rises <= 0:
        return Verdict("growth", WRONG, "KL runs away", evidence, ("learning rate", "KL coefficient", "no clipping"))
    return Verdict("growth", RIGHT, evidence=evidence)


def _entropy(curves: Curves) -> Verdict:
    """Wrong where the entropy fell to a tenth and the reward did not rise."""
    if lacks := _lacks(curves, "entropy", "entropy", "score"):
        return lacks
    quarter = len(curves["entropy"]) // 4
    (_, low, _), (_, _, high) = _interval(curves["entropy"][:quarter]), _interval(curves["entropy"][-quarter:])
    rises, text = change(curves["score"])
    evidence = f"entropy {change(curves['entropy'])[1]}; score {text}"
    if low > 0 and high < GONE * low:
        causes = ("learning rate", "an entropy bonus of 0", "a KL coefficient of 0", "few tasks")
        if rises <= 0:
            return Verdict("entropy", WRONG, "entropy gone", evidence, causes)
        return Verdict("entropy", CANNOT_TELL, evidence=f"a policy at its best has no entropy, too: {evidence}")
    return Verdict("entropy", RIGHT, evidence=evidence)


def _moves(curves: Curves, is_lora: bool) -> Verdict:
    """Wrong where the policy stays where it began though it has something to learn."""
    of_pairs = "margins" in curves
    if lacks := _lacks(curves, "moves", *(("margins",) if of_pairs else ("kl", "score", "equal"))):
        return lacks
    rate = f"; learning rate {max(curves['rate']):.3g}" if curves.get("rate") else ""
    fault = "learning rate too low for LoRA" if is_lora else "the policy does not move"
    causes = ("adapters need ten times the rate of all weights",) if is_lora else ("learning rate", "frozen weights")
    values = curves["margins" if of_pairs else "kl"]
    _, low, high = _interval(values[-(len(values) // 4) :])
    rises, text = change(values)
    evidence = f"{'margins' if of_pairs else 'kl'} {text}{rate}"
    if max(abs(low), abs(high)) >= STILL:
        return Verdict("moves", RIGHT, evidence=evidence)
    is_learning = bool(rises)
    if not of_pairs:
        score, beside = change(curves["score"])
        evidence = f"{evidence}; score {beside}"
        is_learning |= bool(score) or min(curves["equal"][-(len(curves["equal"]) // 4) :]) == 1
    if is_learning:
        return Verdict("moves", CANNOT_TELL, evidence=f"it has moved little so far: {evidence}")
    return Verdict("moves", WRONG, fault, evidence, causes)


def _ratio(curves: Curves) -> Verdict:
    """Wrong where the mean ratio of only updates is not 1."""
    if lacks := _lacks(curves, "ratio", "ratio"):
        return lacks._replace(evidence=f"{lacks.evidence} of one update a rollout, in float32, without dropout")
    mean, low, high = _interval(curves["ratio"])
    evidence = f"ratio {mean:.6g} [{low:.6g}, {high:.6g}]"
    error = UNITS["float32"] * LARGEST_LOGIT * ROUNDED
    if low - error <= 1 <= high + error or min(abs(one - 1) for one in curves["ratio"]) <= error:
        return Verdict("ratio", RIGHT, evidence=evidence)
    causes = ("another temperature", "stale weights of the sampler", "dropout in one of the passes")
    return Verdict("ratio", WRONG, "ratio not 1 at the first pass", evidence, causes)


def _loss(curves: Curves) -> Verdict:
    """Right where a policy's loss is about 0 and its gradient is not: advantages of a group sum to 0."""
    if lacks := _lacks(curves, "loss", "loss", "gradient"):
        return lacks
    mean, low, high = _interval(curves["loss"])
    last = curves["gradient"][-(len(curves["gradient"]) // 4) :]
    evidence = f"loss {mean:.4g} [{low:.4g}, {high:.4g}], gradient norm {min(last):.4g} to {max(last):.4g} at the end"
    if max(last) == 0:
        return Verdict("loss", WRONG, "no gradient", evidence, ("all groups equal", "nothing trained", "a cut graph"))
    if "score" in curves and low <= 0 <= high:
        evidence = f"{evidence}; a loss of 0 is right: advantages of a group sum to 0, look at the reward"
    return Verdict("loss", RIGHT, evidence=evidence)


def _lacks(curves: Curves, name: str, *needs: str, least: int = LEAST) -> Verdict | None:
    """A verdict where curves are missing or short."""
    missing = [" or ".join(NAMES[one]) for one in needs if one not in curves]
    if missing:
        return Verdict(name, CANNOT_TELL, evidence=f"needs {', '.join(missing)}")
    short = [one for one in needs if len(curves[one]) < least]
    return Verdict(name, CANNOT_TELL, evidence=f"needs {least} rows of {short[0]}") if short else None


def change(values: Sequence[float]) -> tuple[int, str]:
    """1 where a curve rose, -1 where it fell, else 0, by intervals; and both intervals in words."""
    quarter = max(len(values) // 4, 1)
    (mean, low, high), (last, last_low, last_high) = _interval(values[:quarter]), _interval(values[-quarter:])
    text = f"{mean:.4g} [{low:.4g}, {high:.4g}] to {last:.4g} [{last_low:.4g}, {last_high:.4g}]"
    return (last_low > high) - (last_high < low), text


def _interval(values: Sequence[float]) -> tuple[float, float, float]:
    """(mean, low, high): the 95% interval of the mean, widened by the correlation of neighbours."""
    mean, low, high = interval(values)
    middle = (len(values) - 1) / 2
    slope = sum((i - middle) * one for i, one in enumerate(values)) / max(
        sum((i - middle) ** 2 for i in range(len(values))), 1
    )
    gaps = [one - mean - slope * (i - middle) for i, one in enumerate(values)]  # left by the trend
    spread = sum(one * one for one in gaps)
    shared = sum(first * second for first, second in zip(gaps, gaps[1:])) / spread if spread else 0.0
    shared = min(max(shared, 0.0), 0.9)
    factor = ((1 + shared) / (1 - shared)) ** 0.5
    return mean, mean - (mean - low) * factor, mean + (high - mean) * factor


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
