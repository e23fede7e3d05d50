"""`rollouts.jsonl`: samples of an RL program with what it learned from them, one row a sample.

Written where metrics are, after the first step and every `--log_interval`-th one: the first `--log_rollouts` samples of
the step, which are all samples of its first prompts, and always the same ones. Rows of steps that a resumed run repeats
are dropped (`training/resume.py`), so the file is the same as that of a run that was never interrupted.

Left out: the texts of tokens, which the ids give with the checkpoint's tokenizer, and samples of ranks but the first.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from lightrlhf.data.batch import Rollout
from lightrlhf.data.splits import Row
from lightrlhf.data.tokens import decode
from lightrlhf.storage.jsonl import append_jsonl
from lightrlhf.training.resume import forget_rows_after
from lightrlhf.training.run import Run

FILE = "rollouts.jsonl"
LONGEST_COLUMN = 500  # characters of a column of the data as JSON; longer ones are left out
DIGITS = 5  # significant ones of a number


def log_rollouts(
    run: Run[Any],
    rollout: Rollout,
    tokenizer: Any,
    scores: Tensor,
    rewards: Mapping[str, Tensor] | None = None,
    advantages: Tensor | None = None,
    values: Tensor | None = None,
    audit: Tensor | None = None,
) -> None:
    """Log samples of the step that follows `run.step`, before its update.

    scores, each of `rewards` by name, audit: (B,), NaN where there is none; advantages, values: (B, T-1).
    Raises: RunFailure when the file cannot be written.
    """
    number = num_logged(run, len(rollout))
    if not number:
        return
    with run.phase("writing of rollouts"):
        first = rollout.group.argsort(stable=True)[:number]  # of the first prompts, also where groups were replaced
        part = rollout.select(first).to("cpu")
        starts, ends = (part.prompt_len - 1).tolist(), (part.attention_mask.sum(1) - 1).tolist()
        prompts, responses, truncated = part.prompt_ids(), part.response_ids(), part.truncated.tolist()
        groups, log_ratios = part.group.tolist(), part.logprobs - part.ref_logprobs
        has_reference = not part.ref_logprobs.isnan().any()

        def by_token(values: Tensor | None, i: int) -> list[float] | None:
            return None if values is None else values[i, starts[i] : ends[i]].tolist()

        parts = {name: reward[first].tolist() for name, reward in (rewards or {}).items()}
        totals = scores[first].tolist()
        audits = [None] * number if audit is None else audit[first].tolist()
        advantages, values = (None if column is None else column[first].cpu() for column in (advantages, values))
        rows = [
            rollout_row(
                tokenizer,
                prompts[i],
                responses[i],
                group=groups[i],
                mask=part.action_mask[i, starts[i] : ends[i]].long().tolist(),
                log_ratio=by_token(log_ratios if has_reference else None, i),
                advantages=by_token(advantages, i),
                values=by_token(values, i),
                score=totals[i],
                rewards={name: reward[i] for name, reward in parts.items()},
                audit=audits[i],
                truncated=truncated[i],
                columns=part.columns[i] if part.columns else {},
            )
            for i in range(number)
        ]
        append_rollouts(run, rows)


def num_logged(run: Run[Any], num_samples: int) -> int:
    """How many of this rank's samples of the step that follows `run.step` are logged."""
    is_due = run.is_first and (run.step == 0 or (run.step + 1) % run.args.log_interval == 0)
    return min(run.args.log_rollouts, num_samples) if is_due else 0


def append_rollouts(run: Run[Any], rows: Iterable[Row]) -> None:
    """Append rows of the step that follows `run.step`. Raises: RunFailure when the file cannot be written."""
    with run.writing():
        append_jsonl(run.directory / FILE, [{"step": run.step + 1, "version": run.step, **row} for row in rows])


def write_iteration(directory: Path, number: int, version: int | None, rows: Iterable[Row]) -> None:
    """Write the rows of an iteration after those of earlier ones; a second time it replaces them."""
    forget_rows_after(directory / FILE, number - 1)
    append_jsonl(directory / FILE, [{"step": number, "version": version, **row} for row in rows])


def rollout_row(
    tokenizer: Any,
    prompt_ids: Sequence[int],
    response_ids: Sequence[int],
    *,
    group: int,
    score: float | None,
    mask: Sequence[int] | None = None,
    log_ratio: Sequence[float] | None = None,
    advantages: Sequence[float] | None = None,
    values: Sequence[float] | None = None,
    rewards: Mapping[str, float | None] | None = None,
    audit: float | None = None,
    truncated: bool | None = None,
    columns: Mapping[str, Any] | None = None,
) -> Row:
    """A sample as a row of the file; what a program does not have is None.

    group: number of the prompt among those of the step; mask: 1 where the policy sampled the token of the response,
    0 where it was shown it, by default all sampled; log_ratio, advantages, values: one number a token of the response.
    """
    return {
        "prompt": decode(tokenizer, list(prompt_ids)),
        "group": group,
        "response": decode(tokenizer, list(response_ids)),
        "prompt_ids": list(prompt_ids),
        "response_ids": list(response_ids),
        "mask": [1] * len(response_ids) if mask is None else list(mask),
        "log_ratio": _rounded_row(log_ratio),
        "advantages": _rounded_row(advantages),
        "values": _rounded_row(values),
        "score": rounded(score),
        "rewards": {name: rounded(reward) for name, reward in (rewards or {}).items()},
        "audit": rounded(audit),
        "truncated": truncated,
        "columns": {name: value for name, value in (columns or {}).items() if _is_small(value)},
    }


def rounded(value: float | None) -> float | None:
    """A number to `DIGITS` significant digits; None for one that is not finite, which JSON cannot hold."""
    if value is None or not math.isfinite(value):
        return None
    number = float(f"{value:.{DIGITS}g}")
    return int(number) if number.is_integer() else number


def _rounded_row(values: Sequence[float] | None) -> list[float | None] | None:
    return None if values is None else [rounded(value) for value in values]


def _is_small(value: Any) -> bool:
    """Whether a column's value is short, and one that JSON and UTF-8 can hold."""
    try:
        return len(json.dumps(value, ensure_ascii=False, allow_nan=False).encode()) <= LONGEST_COLUMN
    except (TypeError, ValueError):
        return False
