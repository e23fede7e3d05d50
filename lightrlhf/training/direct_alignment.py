"""Direct alignment, what DPO and KTO share: flags, the reference model, and the truncation of rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from lightrlhf.cli.errors import UsageError
from lightrlhf.cli.fields import at_least, flag, positive
from lightrlhf.cli.groups import FrozenArgs, StartArgs, TrainArgs
from lightrlhf.data.flat import Rows, View, chained
from lightrlhf.data.mixtures import interleave
from lightrlhf.data.rows import Given, SplitArgs, Splits, sources
from lightrlhf.data.splits import Row, token_keys
from lightrlhf.maths.preference import REFERENCE_FREE
from lightrlhf.models.loading import load_policy
from lightrlhf.models.probes import enable_packing
from lightrlhf.models.roles import Policy
from lightrlhf.models.tokenizer import load_tokenizer
from lightrlhf.training.run import Run
from lightrlhf.training.start import Start, check_texts
from lightrlhf.training.start_check import check_start

SCORING_TOLERANCE = 1e-2  # nats per token


@dataclass(frozen=True, kw_only=True)
class PreferenceArgs(TrainArgs, StartArgs):
    """Learning from preferences."""

    ref_model: str | None = flag(None, excludes={"loss_type": REFERENCE_FREE}, show="rarely")
    """Reference model: experiment dir, checkpoint or folder. Default: the initial policy."""
    learning_rate: float = positive(1e-6)
    """Peak learning rate."""
    lr_warmup_ratio: float | None = 0.03
    """Fraction of all steps for a linear warm-up from 0."""
    disable_dropout: bool = True
    """Set the probability of every dropout module to 0."""
    beta: float = positive(0.1)
    """Strength of the KL constraint to the reference: the temperature of the implicit reward."""
    max_length: int | None = at_least(1, None, show="rarely")
    """Maximum tokens of prompt plus response; longer rows are truncated."""
    max_prompt_length: int | None = at_least(1, None, show="rarely")
    """Maximum tokens of a prompt."""
    truncation_mode: Literal["keep_end", "keep_start"] = flag("keep_end", show="rarely")
    """Which end of a prompt to keep when it is truncated to `max_prompt_length`."""

    def _check(self) -> None:
        if self.max_length and (self.max_prompt_length or 0) >= self.max_length:
            raise ValueError(
                f"--max_prompt_length {self.max_prompt_length} leaves no room for a response in --max_length "
                f"{self.max_length}; try --max_prompt_length {self.max_length // 2}"
            )


def read_splits(
    read: Callable[[str, str], tuple[Rows, list[str]]], args: SplitArgs, given: Given | None
) -> Splits[Row]:
    """The rows that `read` gives for a split and a set's folder, with its notes on training rows."""
    loaded = [read("train", folder) for folder in sources(args, given)]
    folders = sources(args, given) if args.eval_interval else []
    held_out = interleave([read("validation", folder)[0] for folder in folders])
    return Splits([rows for rows, _ in loaded], held_out, [note for _, notes in loaded for note in notes])


def source_of(stage: str, split: str, folder: str, given: Given | None, other: str, program: str) -> str:
    """Where the rows of a split are from, for errors. Raises: UsageError when there are only rows for `other`, which
    another program learns from."""
    if given is not None:
        return f"the given {split} rows"
    path, instead = Path(folder, f"{stage}_{split}.pt"), Path(folder, f"{other}_{split}.pt")
    if not path.is_file() and instead.is_file():
        raise UsageError(
            f"{folder} has no {path.name} but {instead.name}; prepare the data again, or use lightrlhf.{program}"
        )
    return str(path)


def truncated(rows: Rows, args: PreferenceArgs) -> tuple[Rows, Tensor]:
    """The rows with prompts of `max_prompt_length` and responses of the rest of `max_length`, and the room (N,) of
    each response.

    A truncated response gets no end token. Raises: UsageError when a prompt leaves no room for a response.
    """
    starts = rows.column("prompt_len").long()
    prompts = starts.clamp(max=args.max_prompt_length or 2**31)  # (N,)
    room = (args.max_length or 2**31) - prompts
    if not (room > 0).all():
        raise UsageError(
            f"--max_length {args.max_length} leaves no room for a response after a prompt of "
            f"{int(prompts[room < 1][0])} tokens; give --max_prompt_length {(args.max_length or 0) // 2 or 1} too"
        )
    lengths = {name: prompts + torch.minimum(rows.column(name) - starts, room) for name in rows.texts}
    if all(torch.equal(one, rows.column(name)) for name, one in lengths.items()):
        return rows, room
    key = f"{args.max_length} {args.max_prompt_length} {args.truncation_mode}"
    return View([rows], None, partial(truncate, args=args), key, {"prompt_len": prompts, **lengths}), room


def number_shortened(rows: Rows, truncated: Rows) -> int:
    """How many of the rows were truncated."""
    shorter = [rows.column(name) > truncated.column(name) for name in ("prompt_len", *rows.texts)]
    return int(torch.stack(shorter).any(0).sum())


def truncate(row: Row, args: PreferenceArgs) -> Row:
    """A row truncated as `truncated` says; the row itself when nothing is too long."""
    start = row["prompt_len"]
    prompt_len = min(start, args.max_prompt_length or start)
    room = (args.max_length or 2**31) - prompt_len
    sides = {name: row[name] for name in token_keys(row)}
    if prompt_len == start and all(len(ids) - start <= room for ids in sides.values()):
        return row
    first = start - prompt_len if args.truncation_mode == "keep_end" else 0
    for name, ids in sides.items():
        response = ids[start : start + min(room, len(ids))]
        sides[name] = torch.cat([torch.as_tensor(ids[first : first + prompt_len]), torch.as_tensor(response)])
    return {**row, "prompt_len": prompt_len, **sides}


# ----------------------------------------------------------------------------------------------------- the reference
def load_reference(run: Run, start: Start[Policy, Row]) -> Policy:
    """The model of `--ref_model`; without one the policy as it was loaded."""
    args = run.args
    if args.ref_model is None:
        return start.policy
    is_prepared = Path(args.data_dirs[0]).is_dir()
    load_tokenizer(args.data_dir if is_prepared else None, args.ref_model, verify=args.verify)  # refuses another one
    plain = FrozenArgs(trust_remote_code=args.trust_remote_code, base_dtype=args.base_dtype)
    reference = load_policy(args.ref_model, plain, start.tokenizer, "--ref_model")
    check_texts(args, reference, chained([start.rows, start.held_out]))
    enable_packing(reference)
    return reference


def check_reference(rows: Sequence[Row], logps: Tensor) -> None:
    """Compare the policy's log-probabilities of rows before the first update, (S, N), with the reference's.

    Gaps are pooled over the tokens of all rows: in bfloat16 a response of two tokens alone may be 0.02 a token off.
    Raises: RunFailure.
    """
    text = token_keys(rows[0])[0]
    stored = torch.tensor([row[f"ref_{text.replace('input_ids', 'logps')}"] for row in rows], dtype=torch.float64)
    tokens = sum(len(row[text]) - row["prompt_len"] for row in rows)
    gap = float((logps[0].to(stored) - stored).abs().sum()) / tokens
    check_start(gap, SCORING_TOLERANCE, "the reference's")
