"""Log-probabilities of responses under the policy, and under its reference before training begins.

The reference is the policy as it was loaded, or `--ref_model`: it scores the rows that the steps will read, so no
second model is in memory during training. Rows are pairs, or for the losses of `UNPAIRED_LOSSES` labelled responses. A
checkpoint stores the log-probabilities with a hash of the reference's weights and of the tokens.

Left out: references that move during training.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightrlhf.cli.groups import FrozenArgs
from lightrlhf.data.batch import Batch, micro_batches, mismatched_rows, preference_batch, unpaired_batch
from lightrlhf.data.splits import Row, check_vocabulary, longest_text, token_keys
from lightrlhf.maths.preference import REFERENCE_FREE
from lightrlhf.maths.unpaired import UNPAIRED_LOSSES
from lightrlhf.models.forward import inference
from lightrlhf.models.loading import load_policy
from lightrlhf.models.probes import check_positions, enable_packing
from lightrlhf.models.roles import Policy, policy_inputs, vocabulary_size
from lightrlhf.models.saving import hash_weights
from lightrlhf.models.tokenizer import load_tokenizer
from lightrlhf.training.run import Run
from lightrlhf.training.scored import blocks, in_parts, score_parts
from lightrlhf.training.start_check import check_start

SCORING_TOLERANCE = 1e-2  # nats per token


def sequence_logps(model: nn.Module, batch: Batch) -> Tensor:
    """Log-probability of each whole response: (2B,), the chosen ones first; (B,) of labelled responses."""
    return model(**policy_inputs(batch)).logprobs.sum(1)


def make_batch(args: Any, rows: list[Row], pad_id: int) -> Batch:
    """B pairs as 2B rows, the chosen ones first, or B labelled responses."""
    return (unpaired_batch if args.loss_type in UNPAIRED_LOSSES else preference_batch)(rows, pad_id)


def score_rows(run: Run, model: nn.Module, rows: list[Row], pad_id: int) -> Tensor:
    """Log-probabilities of N rows, dropout off, computed on all ranks: (2N,) or (N,) on each, the chosen ones first."""
    sides = 1 if run.args.loss_type in UNPAIRED_LOSSES else 2
    logps = torch.zeros(sides, len(rows), device=run.device)
    here = run.shard(range(len(rows)))
    logps[:, here] = score_shard(run, model, [rows[i] for i in here], pad_id).reshape(sides, -1)
    return run.sum_over_ranks(logps).reshape(-1)


def score_shard(run: Run, model: nn.Module, rows: list[Row], pad_id: int, dropout: bool = False) -> Tensor:
    """Log-probabilities of this rank's B rows: (2B,) or (B,), the chosen ones first.

    dropout: as the next training pass over these rows in micro-batches draws it, and without using up random numbers.
    """
    sides = 1 if run.args.loss_type in UNPAIRED_LOSSES else 2
    logps = torch.zeros(sides, len(rows), device=run.device)
    numbered = [{**row, "index": index} for index, row in enumerate(rows)]
    with replayed_dropout(run.device) if dropout else inference(model):
        for micro in run.pad_passes(micro_batches(numbered, run.args.micro_batch_size)):
            with run.autocast():
                scores = sequence_logps(model, make_batch(run.args, micro, pad_id).to(run.device))  # (2B,) or (B,)
            logps[:, [row["index"] for row in micro]] = scores.float().reshape(sides, -1)
    return logps.reshape(-1)


@contextmanager
def replayed_dropout(device: torch.device) -> Iterator[None]:
    """Context manager: no gradients, and on leaving the random state of before, for later passes to repeat."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.no_grad():
        yield


class Mismatches:
    """KTO's mismatched prompts and responses of the validation rows, and of each step.

    They follow from the order of the data, so the reference scores them before training, and a resumed run has the
    same. Their places follow those of the rows: first validation, then the steps, with a whole batch each.
    No mismatched text is longer than the longest of the data.
    """

    def __init__(self, run: Run, rows: list[Row], validation: list[Row], num_steps: int) -> None:
        self.run, self.rows, self.validation = run, rows, validation
        self.blocks = blocks(run, num_steps, of_dry_run=run.dry is not None)
        self.width = longest_text(rows + validation)
        args = run.args
        self.size = args.mini_batch_size * run.world_size
        self.key = (len(rows), args.seed, self.size, *args.data_weights)
        self.end = self._start(self.blocks[-1].stop)
        self.logps = torch.empty(1, 0)  # (1, end), once they are scored
        self._last: tuple[int, list[Row]] = -2, []  # a step and its mismatched rows

    def parts(self) -> list[list[int]]:
        """All places to score, in parts."""
        parts = in_parts(self.run, range(self._start(-1), self._start(0)))
        for steps in self.blocks:
            ends = [(self._start(step), self._start(step) + len(self._batch(step))) for step in steps]
            parts.append([place for first, end in ends for place in range(first, end)])
        return parts

    def row(self, place: int) -> Row:
        """The mismatched row at a place."""
        step, number = divmod(place - self._start(0), self.size)
        if place < self._start(0):
            step, number = -1, place - self._start(-1)
        if self._last[0] != step:  # places come in order
            self._last = step, self._mismatched(self.validation if step < 0 else self._batch(step))
        return self._last[1][number]

    def add(self, batch: list[Row], step: int) -> list[Row]:
        """Rows of a step, or of validation (-1), with their `mismatch` and its log-probability under the reference."""
        values = self.logps[0, self._start(step) : self._start(step) + len(batch)].tolist()
        columns = zip(batch, self._mismatched(batch), values, strict=True)
        return [{**row, "mismatch": {**other, "ref_logps": logp}} for row, other, logp in columns]

    def _start(self, step: int) -> int:
        first = len(self.rows) + len(self.validation)
        return first if step < 0 else first + len(self.validation) + step * self.size

    def _batch(self, step: int) -> list[Row]:
        return self.run.global_batch(self.rows, step, self.run.args.mini_batch_size)

    def _mismatched(self, batch: list[Row]) -> list[Row]:
        return mismatched_rows(batch, self.rows, self.width)


def reference_logps(
    run: Run, policy: Policy, rows: list[Row], tokenizer: Any, parts: list[list[int]], mismatches: Mismatches | None
) -> dict[str, Any]:
    """Log-probabilities under the reference of the rows at the places of `parts`, as `score_parts` returns them.

    Mismatched rows come last. Call this before `run.setup`, which loads the trained weights of a resumed run. A loss
    without a reference has no log-probabilities.
    """
    if run.args.loss_type in REFERENCE_FREE:
        return {"fingerprint": None, "places": [], "logps": []}
    reference = policy
    if run.args.ref_model is not None:
        load_tokenizer(
            run.args.data_dir if Path(run.args.data_dirs[0]).is_dir() else None,
            run.args.ref_model,
            verify=run.args.verify,
        )  # refuses a model with another tokenizer
        plain = FrozenArgs(trust_remote_code=run.args.trust_remote_code, base_dtype=run.args.base_dtype)
        reference = load_policy(run.args.ref_model, plain, tokenizer, "--ref_model")
        check_vocabulary(rows, vocabulary_size(reference), run.args.data_name)
        check_positions(rows, reference, run.args.data_name)
        enable_packing(reference)
    digest = fingerprint(reference, rows, mismatches.key if mismatches else ())

    def score(part: Sequence[int]) -> Tensor:
        chosen = [rows[i] if mismatches is None or i < len(rows) else mismatches.row(i) for i in part]
        return score_rows(run, reference.to(run.device), chosen, tokenizer.pad_token_id)

    folder = Path(run.data_dirs[0])  # given rows have none
    parts = parts + (mismatches.parts() if mismatches else [])
    return score_parts(run, "reference", digest, parts, score, folder if folder.is_dir() and not run.dry else None)


def fingerprint(reference: Policy, rows: list[Row], key: tuple[float, ...] = ()) -> str:
    """SHA-256 of a model's weights and of the rows' tokens, and of a key if there is one."""
    digest = hash_weights(reference)
    for row in rows:
        sides = [torch.as_tensor(row[name]).tolist() for name in token_keys(row)]
        digest.update(repr((row["prompt_len"], sides)).encode())
    if key:
        digest.update(repr(key).encode())
    return digest.hexdigest()


def with_reference(rows: list[Row], logps: Tensor | None) -> list[Row]:
    """The rows with the log-probabilities of their responses under the reference, the first (S, N); 0 without one."""
    names = [f"ref_{name.replace('input_ids', 'logps')}" for name in token_keys(rows[0])]
    values = torch.zeros(len(names), len(rows)) if logps is None else logps[:, : len(rows)]
    return [{**row, **dict(zip(names, column))} for row, column in zip(rows, values.T.tolist(), strict=True)]


def compare_start(run: Run, model: nn.Module, rows: list[Row], pad_id: int) -> None:
    """Raises: RunFailure when policy and reference, which start from the same weights, give other log-probabilities.

    Gaps are pooled over the tokens of all rows: in bfloat16 a response of two tokens alone may be 0.02 a token off.
    """
    rows = rows[: max(run.args.micro_batch_size, run.world_size)]
    text = token_keys(rows[0])[0]
    scores = score_rows(run, model, rows, pad_id)[: len(rows)].tolist()
    given = [(row[f"ref_{text.replace('input_ids', 'logps')}"], len(row[text]) - row["prompt_len"]) for row in rows]
    gap = sum(abs(score - logp) for score, (logp, _) in zip(scores, given)) / sum(length for _, length in given)
    check_start(gap, SCORING_TOLERANCE, "the reference's")
