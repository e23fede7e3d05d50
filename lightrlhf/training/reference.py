"""Log-probabilities of rows under the model that training starts from, or another one, computed once before training.

A step reads them with its rows, so no second model is in memory. Only rows that the planned steps read are scored, in
parts of some consecutive steps. The parts are always the same, since batching changes last bits, and a run of ten steps
must equal a run of five steps that is resumed for five more. With many rows, a file next to the data stores the
finished parts, so a run that is killed before its first checkpoint does not score them again. Checkpoints store all
parts, with a hash of the model's weights and of the rows.

Left out: references that move during training.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn

from lightrlhf.cli.errors import UsageError
from lightrlhf.data.batch import Batch, micro_batch_indices, to_device
from lightrlhf.data.flat import Rows, View
from lightrlhf.data.splits import Row
from lightrlhf.models.forward import inference
from lightrlhf.models.offload import on_device
from lightrlhf.models.roles import Policy, policy_inputs
from lightrlhf.models.saving import hash_weights
from lightrlhf.storage.locks import lock_folder
from lightrlhf.storage.writing import save_tensors
from lightrlhf.training.dry_run import NUM_STEPS
from lightrlhf.training.provenance import versions
from lightrlhf.training.resume import device_rng_state, set_device_rng_state
from lightrlhf.training.run import Run

PART_ROWS = 64  # of each rank, enough to pack rows of similar length together
KEPT_ROWS = 256  # of each rank; with more rows finished parts are kept in a file
WRITE_SECONDS = 10.0  # between two writes of the file
Collate = Callable[[Sequence[Row]], Batch]  # b rows -> S * b texts: all first sides, then all second ones
Parts = dict[str, Tensor]


class AnyRows(Protocol):
    """Rows, or a function that makes one on demand."""

    def __len__(self) -> int: ...

    def __getitem__(self, place: int, /) -> Row: ...


class Scored(NamedTuple):
    """Log-probabilities of N rows with S sides, from before training."""

    state: dict[str, Any]  # for the checkpoint: fingerprint, places, logps
    logps: Tensor | None  # (S, N) float64, NaN where no step reads the row; None without any


# ------------------------------------------------------------------------------------------------------------ passes
def sequence_logps(model: nn.Module, batch: Batch, temperature: float = 1.0) -> Tensor:
    """Log-probability of the actions of each row: (B,)."""
    logprobs: Tensor = model(**policy_inputs(batch), temperature=temperature).logprobs
    return logprobs.sum(1)


def score_rows(
    run: Run, model: nn.Module, rows: Sequence[Row], collate: Collate, sides: int = 2, temperature: float = 1.0
) -> Tensor:
    """Log-probabilities of N rows, dropout off, computed on all ranks: (S, N) on each."""
    logps = torch.zeros(sides, len(rows), device=run.device)
    here = run.ranks.shard(range(len(rows)))
    places = to_device(torch.tensor(here, dtype=torch.int64), run.device)
    logps[:, places] = score_shard(run, model, [rows[i] for i in here], collate, sides, temperature)
    return run.ranks.sum(logps)


def score_shard(
    run: Run,
    model: nn.Module,
    rows: Sequence[Row],
    collate: Collate,
    sides: int = 2,
    temperature: float = 1.0,
    by_token: Tensor | None = None,
    dropout: bool = False,
) -> Tensor:
    """Log-probabilities of this rank's B rows, dropout off: (S, B).

    by_token: (S, B, T-1) of zeros, which gets the log-probability of each action. dropout: as the next training pass
    over these rows in micro-batches draws it, and without using up random numbers.
    """
    logps = torch.zeros(sides, len(rows), device=run.device)
    with on_device(model), replay_dropout(run.device) if dropout else inference(model):
        for index in run.ranks.pad_passes(micro_batch_indices(rows, run.args.micro_batch_size)):
            batch = collate([rows[i] for i in index]).to(run.device)
            with run.autocast():
                logprobs: Tensor = model(**policy_inputs(batch), temperature=temperature).logprobs  # (S b, t-1)
                places = to_device(torch.tensor(index, dtype=torch.int64), run.device)
                logps[:, places] = logprobs.sum(1).float().reshape(sides, -1)
            if by_token is not None:
                by_token[:, places, : logprobs.shape[1]] = logprobs.float().unflatten(0, (sides, -1))
    return logps


@contextmanager
def replay_dropout(device: torch.device) -> Iterator[None]:
    """Context manager: no gradients; restores the random state on exit, for later passes to repeat."""
    host, own = torch.get_rng_state(), device_rng_state(device)
    try:
        with torch.no_grad():
            yield
    finally:
        torch.set_rng_state(host)
        set_device_rng_state(device, own)


# ---------------------------------------------------------------------------------------------------- before training
def score_before_training(
    run: Run,
    model: Policy,
    rows: AnyRows,
    parts: Sequence[Tensor],
    score: Callable[[Policy, list[Row]], Tensor],
    digest: str,
    phase: str = "reference",
) -> Scored:
    """Score the rows of `parts`, given by their indices in `rows`.

    Call this before `run.setup`, which loads the trained weights of a resumed run.
    score: returns the (S, n) log-probabilities of n rows, on all ranks. digest: hash of what they depend on, see
    `fingerprint`; a resumed run takes its checkpoint's if that is the same. phase: named in errors.
    """
    folder = Path(run.files.data_dirs[0])  # given rows have none

    def score_part(part: Sequence[int]) -> Tensor:
        return score(model, [rows[i] for i in part])

    with run.phase(phase):
        model = model.to(run.device)
        place = folder if folder.is_dir() and not run.dry else None
        state = score_parts(run, phase, digest, parts, score_part, place)
    return Scored(state, by_place(state, len(rows)))


def fingerprint(model: Policy, rows: Rows, key: tuple[float, ...] = ()) -> str:
    """SHA-256 of a model's weights and of the rows, and of a key if there is one."""
    digest = hash_weights(model)
    digest.update(rows.digest().encode())
    if key:
        digest.update(repr(key).encode())
    return digest.hexdigest()


def with_reference(rows: Rows, logps: Tensor | None) -> View:
    """The rows with the log-probabilities of their sides under the reference, the first of (S, N); 0 without one."""
    names = [f"ref_{name.replace('input_ids', 'logps')}" for name in rows.texts]
    values = torch.zeros(len(names), len(rows)) if logps is None else logps[:, : len(rows)]
    return View([rows], columns=dict(zip(names, values)))


# ------------------------------------------------------------------------------------------- which rows are scored
def blocks(run: Run[Any], num_steps: int, of_dry_run: bool = False) -> list[range]:
    """The steps whose rows are scored together; the last part may exceed the planned steps."""
    if of_dry_run:
        return [range(min(NUM_STEPS, num_steps))]
    size = math.ceil(PART_ROWS / run.args.mini_batch_size)
    return [range(first, first + size) for first in range(0, num_steps, size)]


def parts_to_score(run: Run[Any], num_rows: int, num_validation: int, num_steps: int) -> list[Tensor]:
    """Indices of the rows that the steps, the check before them and evaluations read, validation last.

    In a dry run only the rows of its steps.
    """
    if not run.dry:
        return _parts(run, num_rows, num_validation, num_steps, False)
    parts = _parts(run, num_rows, num_validation, num_steps, True)
    planned = _parts(run, num_rows, num_validation, num_steps, False)
    run.dry.scored = len(torch.cat(parts).unique()), len(torch.cat(planned).unique())
    return parts


def _parts(run: Run[Any], num_rows: int, num_validation: int, num_steps: int, of_dry_run: bool) -> list[Tensor]:
    args = run.args
    size, per_epoch = args.mini_batch_size, math.ceil(num_rows / (args.mini_batch_size * run.ranks.world_size))
    if not run.order.weights:
        num_steps = min(num_steps, per_epoch)  # one epoch reads every row
    parts = [torch.arange(min(num_rows, max(args.micro_batch_size, run.ranks.world_size)))]
    for steps in blocks(run, num_steps, of_dry_run):
        parts.append(torch.tensor([row for step in steps for row in run.order.draw(num_rows, step, size)]))
    evaluated = run.order.eval_rows(range(num_validation), args.micro_batch_size)
    return parts + in_parts(run, [num_rows + row for row in evaluated])


def in_parts(run: Run[Any], places: Sequence[int]) -> list[Tensor]:
    """Indices that every run scores, in parts."""
    size = PART_ROWS * run.ranks.world_size
    return [torch.tensor(places[start : start + size]) for start in range(0, len(places), size)]


# -------------------------------------------------------------------------------------------------- finished parts
def score_parts(
    run: Run[Any],
    phase: str,
    digest: str,
    parts: Iterable[Tensor],
    score: Callable[[Sequence[int]], Tensor],
    folder: Path | None,
) -> dict[str, Any]:
    """Log-probabilities of the rows at some places, for a checkpoint: fingerprint, places, logps.

    Values in `run.resumed["extra"]["reference"]` are reused if its fingerprint is `digest`; logps: the S columns,
    concatenated. phase: named in errors; score: returns the log-probabilities of some places, (S * n,) on all ranks;
    folder: for the file with the finished parts; None writes no file.
    """
    stored = run.resumed["extra"].get("reference") if run.resumed else None
    known = stored if stored and stored["fingerprint"] == digest else None
    if stored and not known:
        run.print0("the reference, the data or its batches have changed since then: computing log-probabilities again")
    places = [torch.as_tensor(known["places"])] if known else []
    found = [torch.as_tensor(known["logps"]).reshape(-1, len(places[0]))] if known and len(places[0]) else []
    left = _unseen(parts, places)
    is_kept = folder is not None and sum(map(len, left)) > KEPT_ROWS * run.ranks.world_size
    file = Finished(run, folder / f"logprobs-{_file_digest(run, digest)}.pt" if folder and is_kept else None)
    try:
        for part in filter(len, left):
            key = hashlib.sha256(repr(part.tolist()).encode()).hexdigest()
            if key not in file.parts:
                with run.phase(phase):
                    logps = score(part.tolist()).cpu().reshape(-1, len(part))
                file.add(key, logps)
            found.append(file.parts[key])
            places.append(part)
    finally:  # after a signal, too
        file.write()
    empty = [torch.zeros(0, dtype=torch.int64)], [torch.zeros(1, 0)]
    whole = {"places": torch.cat(places or empty[0]), "logps": torch.cat(found or empty[1], 1).flatten()}
    return {"fingerprint": digest, **whole}


def _unseen(parts: Iterable[Tensor], known: Sequence[Tensor]) -> list[Tensor]:
    """The places of each part that are neither known nor in an earlier one, in ascending order."""
    given = [part.long() for part in parts]
    seen = torch.zeros(1 + max((int(one.max()) for one in (*given, *known) if len(one)), default=0), dtype=torch.bool)
    for one in known:
        seen[one] = True
    left = []
    for one in given:
        left.append(one[~seen[one]].unique())
        seen[one] = True
    return left


class Finished:
    """The scored parts by a hash of their indices, and the file in which the first rank stores them, if any."""

    def __init__(self, run: Run[Any], path: Path | None) -> None:
        self.run, self.path = run, path
        self.parts: Parts = run.ranks.broadcast(self._read() if path and run.ranks.is_first else {})
        self._written, self._at = len(self.parts), time.monotonic()

    def add(self, key: str, logps: Tensor) -> None:
        """Add the (S, n) log-probabilities of a part, and write the file if the last write is long enough ago."""
        self.parts[key] = logps
        if time.monotonic() - self._at >= WRITE_SECONDS:
            self.write()

    def write(self) -> None:
        """Write the added parts; if that fails, a line says so once."""
        if self.path is None or not self.run.ranks.is_first or len(self.parts) == self._written:
            return
        try:
            with lock_folder(self.path.parent, wait=True):  # others may train on the same data
                parts = self._read() | self.parts
                save_tensors(self.path, {key: (logps, hash_tensor(logps)) for key, logps in parts.items()})
        except UsageError as problem:
            self.run.print0(f"note: {problem}; a run that is killed before its first checkpoint starts scoring again")
            self.path = None
        self._written, self._at = len(self.parts), time.monotonic()

    def _read(self) -> Parts:
        """The parts in the file, without those that have changed since then."""
        try:
            stored = torch.load(cast(Path, self.path), weights_only=True)
            return {key: logps for key, (logps, sha256) in stored.items() if hash_tensor(logps) == sha256}
        except Exception:  # there is no file, or unpickling damaged bytes raises anything
            return {}


def by_place(scored: dict[str, Any], size: int) -> Tensor | None:
    """(S, size) log-probabilities; NaN, which stops a run, where unscored; None without any score."""
    if not len(scored["places"]):
        return None
    places = torch.as_tensor(scored["places"])
    columns = torch.as_tensor(scored["logps"], dtype=torch.float64).reshape(-1, len(places))
    logps = columns.new_full((len(columns), size), torch.nan)
    known = places < size  # a run of more steps may have scored more
    logps[:, places[known]] = columns[:, known]
    return logps


def hash_tensor(values: Tensor) -> str:
    """SHA-256 of a tensor's values on the CPU."""
    return hashlib.sha256(values.contiguous().numpy().tobytes()).hexdigest()


def _file_digest(run: Run[Any], digest: str) -> str:
    """A digest of the rows, the model with its config, and everything that changes the last bits of a score."""
    args, device = run.args, run.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    sources = sorted((flag, sorted(one["files"].items())) for flag, one in run.order.began.sources.items())
    ranks = run.ranks.world_size, run.ranks.tensor_parallel, torch.get_num_threads()
    settings = (digest, sources, versions(), args.precision, name, args.micro_batch_size, ranks)
    return hashlib.sha256(repr(settings).encode()).hexdigest()[:16]
