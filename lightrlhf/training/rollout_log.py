"""Sample logs: `rollouts.jsonl`, training samples of an RL program, and `samples.jsonl`, answers to fixed prompts.

One row a sample, in both files of the same form. `rollouts.jsonl` is written where metrics are, after the first step
and every `--log_interval`-th one: the first `--log_rollouts` samples of the step, which are all samples of its first
prompts, and always the same ones. `samples.jsonl` is written at evaluations. Rows of steps that a resumed run repeats
are dropped (`training/resume.py`), so the files are the same as if the run was never interrupted. A file that
has reached `MOST_BYTES` gets no more rows.

Left out: the texts of tokens, which the ids give with the checkpoint's tokenizer, samples of ranks but the first, and
making room in a full file, for a resumed run would choose other rows.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from lightrlhf.data.batch import Rollout
from lightrlhf.data.scores import Scores
from lightrlhf.data.splits import Row
from lightrlhf.data.tokens import decode
from lightrlhf.data.types import Tokenizer
from lightrlhf.storage.jsonl import append_jsonl
from lightrlhf.training.resume import forget_rows_after
from lightrlhf.training.run import Run

FILE = "rollouts.jsonl"
SAMPLES = "samples.jsonl"
MOST_BYTES = 10**9  # of either file; about 30 million tokens
LONGEST_COLUMN = 500  # bytes of a column of the data as JSON; longer ones are left out
LONGEST_FACTS = 10_000  # of the column `episode`
DIGITS = 5  # significant ones of a number


def log_rollouts(
    run: Run[Any], rollout: Rollout, scores: Scores, advantages: Tensor, values: Tensor | None = None
) -> None:
    """Log samples of the step that follows `run.step`, before its update; advantages, values: (B, T-1).

    Raises: RunFailure when the file cannot be written.
    """
    number = num_logged(run, len(rollout))
    if not number:
        return
    with writing_rollouts(run):
        append_rollouts(run, rollout_rows(rollout, number, scores.total, scores, advantages, values))


@contextmanager
def writing_rollouts(run: Run[Any]) -> Iterator[None]:
    """Context manager around making and writing the rows of a step: its phase, with its time counted as logging."""
    with run.phase("writing of rollouts"), run.metric_log.time_writing():
        yield


def rollout_rows(
    rollout: Rollout,
    number: int,
    total: Tensor,
    scores: Scores | None = None,
    advantages: Tensor | None = None,
    values: Tensor | None = None,
) -> list[Row]:
    """Rows of the samples of the first prompts, `number` of them.

    total: (B,) scores that were learned from, NaN where there is none; scores: each reward's and the audit's;
    advantages, values: (B, T-1).
    """
    first = rollout.group.argsort(stable=True)[:number]  # of the first prompts, also where groups were replaced
    part = rollout.select(first)
    starts, ends = (part.prompt_len - 1).tolist(), (part.attention_mask.sum(1) - 1).tolist()
    prompts, responses, truncated = part.prompt_ids(), part.response_ids(), part.truncated.tolist()
    groups, log_ratios = part.group.tolist(), part.logprobs - part.ref_logprobs
    has_reference = not part.ref_logprobs.isnan().any()

    def by_token(values: Tensor | None, i: int) -> list[float] | None:
        return None if values is None else values[i, starts[i] : ends[i]].tolist()

    texts = [rollout.texts[i] for i in first.tolist()]
    totals, parts, audits = total[first].tolist(), {}, [None] * number
    if scores is not None:
        parts = {name: reward[first].tolist() for name, reward in scores.by_name().items()}
        audits = audits if scores.audit is None else scores.audit[first].tolist()
    advantages, values = (None if column is None else column[first] for column in (advantages, values))
    return [
        rollout_row(
            rollout.tokenizer,
            prompts[i],
            responses[i],
            texts=texts[i],
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
        for i in range(len(first))
    ]


def num_due(run: Run[Any]) -> int:
    """How many samples of the step that follows `run.step` the first rank logs, of as many; equal on all ranks."""
    is_due = run.step == 0 or (run.step + 1) % run.args.log_interval == 0
    return (1 if run.dry else run.args.log_rollouts) if is_due else 0


def num_logged(run: Run[Any], num_samples: int) -> int:
    """How many of this rank's samples of the step that follows `run.step` are logged."""
    return min(num_due(run), num_samples) if run.ranks.is_first else 0


def append_rollouts(run: Run[Any], rows: Sequence[Row]) -> None:
    """Append rows of the step that follows `run.step`; a dry run keeps the first one to show it.

    Raises: RunFailure when the file cannot be written.
    """
    if run.dry:
        run.dry.sample = run.dry.sample or rows[0]
        return
    _append(run, FILE, run.step + 1, rows)


def log_samples(run: Run[Any], rows: Sequence[Row], split: str = "validation") -> None:
    """Append new samples by the policy as it is after `run.step` to prompts of a split.

    Raises: RunFailure when the file cannot be written.
    """
    if run.ranks.is_first and rows and not run.dry:
        with run.metric_log.time_writing():
            _append(run, SAMPLES, run.step, [{"split": split, **row} for row in rows])


def _append(run: Run[Any], name: str, step: int, rows: Sequence[Row]) -> None:
    """Append rows to a file of the experiment dir, unless it is full, and pass them to the logger."""
    path = run.files.directory / name
    with run.files.writing():
        before = path.stat().st_size if path.exists() else 0
        if before < MOST_BYTES:
            append_jsonl(path, [{"step": step, "version": run.step, **row} for row in rows])
            if path.stat().st_size >= MOST_BYTES:
                run.print0(
                    f"note: {path} has {MOST_BYTES / 1e6:,.0f} MB and gets no more samples; fewer of a step are kept "
                    "by --log_rollouts, of fewer steps by --log_interval and --eval_interval"
                )
    run.metric_log.log_texts(name.removesuffix(".jsonl"), rows, step)


def write_iteration(directory: Path, number: int, rows: Iterable[Row]) -> None:
    """Write the rows of an iteration after earlier ones' rows; a second time it replaces them."""
    forget_rows_after(directory / FILE, number - 1)
    append_jsonl(directory / FILE, [{"step": number, **row} for row in rows])


def rollout_row(
    tokenizer: Tokenizer | None,
    prompt_ids: Sequence[int],
    response_ids: Sequence[int],
    *,
    texts: tuple[str, str] | None = None,
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
    """A sample as a row of the file; None for values that a program lacks.

    texts: of prompt and response, decoded from the ids when not given; group: number of the prompt within the step;
    mask: 1 where the policy sampled the token of the response, 0 where it was shown it, by default all sampled;
    log_ratio, advantages, values: one number a token of the response.
    """
    if texts is None:
        assert tokenizer is not None
        texts = decode(tokenizer, list(prompt_ids)), decode(tokenizer, list(response_ids))
    prompt, response = texts
    return {
        "prompt": prompt,
        "group": group,
        "response": response,
        "prompt_ids": list(prompt_ids),
        "response_ids": list(response_ids),
        "mask": [1] * len(response_ids) if mask is None else list(mask),
        "log_ratio": _round_row(log_ratio),
        "advantages": _round_row(advantages),
        "values": _round_row(values),
        "score": round_number(score),
        "rewards": {name: round_number(reward) for name, reward in (rewards or {}).items()},
        "audit": round_number(audit),
        "truncated": truncated,
        "columns": {name: value for name, value in (columns or {}).items() if _is_small(name, value)},
    }


def turns_row(
    tokenizer: Tokenizer,
    ids: list[int],
    spans: list[tuple[int, int]],
    numbers: dict[str, list[list[float]]],
    **facts: Any,
) -> Row:
    """Ids with sampled turns [start, end) as a row of the file, whose response begins with the first turn.

    numbers: by name a number for each token of each turn, 0 elsewhere; facts: as in `rollout_row`.
    """
    first = spans[0][0] if spans else len(ids)
    by_turn: dict[str, list[list[float]]] = {"mask": [[1] * (end - start) for start, end in spans], **numbers}
    for name, values in by_turn.items():
        facts[name] = [0] * len(ids)
        for (start, end), own in zip(spans, values):
            facts[name][start:end] = own
        del facts[name][:first]
    return rollout_row(tokenizer, ids[:first], ids[first:], **facts)


def round_number(value: float | None) -> float | None:
    """A number to `DIGITS` significant digits; None for one that is not finite, which JSON cannot hold."""
    if value is None or not math.isfinite(value):
        return None
    number = float(f"{value:.{DIGITS}g}")
    return int(number) if number.is_integer() else number


def _round_row(values: Sequence[float] | None) -> list[float | None] | None:
    return None if values is None else [round_number(value) for value in values]


def _is_small(name: str, value: Any) -> bool:
    """Whether a column's value is short, and one that JSON and UTF-8 can hold."""
    try:
        size = len(json.dumps(value, ensure_ascii=False, allow_nan=False).encode())
        return size <= (LONGEST_FACTS if name == "episode" else LONGEST_COLUMN)
    except (TypeError, ValueError):
        return False
