"""Splits: reading, checking and writing the prepared `{stage}_{split}.pt` files.

A split is a file of flat rows (`flat.py`), which is mapped and was checked as it was written, or a list of dicts, which
is checked (`schema.py`) and packed into memory. Files are compared with the folder's seal (`storage/seals.py`) and read
with `weights_only=True`, so they cannot run code.

Left out: datasets that are streamed from elsewhere.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from lightrlhf.cli.errors import UsageError, first_line, list_names
from lightrlhf.cli.groups import DataArgs, DataSetsArgs
from lightrlhf.data.flat import FlatRows, Rows, View, from_stored, share_columns
from lightrlhf.data.packing import pack, write_rows
from lightrlhf.data.schema import IGNORE_INDEX, TEXTS, Row
from lightrlhf.storage.seals import check_sealed, seal

SPLITS = ("train", "validation", "test")


def check_data_folder(folder: str, flag: str = "--data_dir") -> None:
    """Raises: UsageError, before any model is loaded, when a folder of prepared data does not exist."""
    if Path(folder).is_file():
        raise UsageError(
            f"{flag} {folder} is a file; prepare it first: python -m datasets_prep.generic.prepare_data "
            f"--dataset_name {folder} --destination_dir data/mine --tokenizer_name MODEL"
        )
    if not Path(folder).is_dir():
        raise UsageError(
            f"{flag} {folder} does not exist; "
            f"write it first, for example: python -m datasets_prep.cafe.prepare_data --destination_dir {folder}"
        )
    if not any(Path(folder).glob("*_*.pt")):
        below = sorted({str(path.parent) for depth in ("*", "*/*") for path in Path(folder).glob(f"{depth}/*_*.pt")})
        what = f"; did you mean {list_names(below)}?" if below else ", which a folder written by datasets_prep has"
        raise UsageError(f"{flag} {folder} holds no .pt split{what}")


def check_data_dir(args: DataArgs | DataSetsArgs) -> None:
    """Raises: UsageError, before any model is loaded, when a folder of `--data_dir` does not exist."""
    for folder in args.data_dirs:
        check_data_folder(folder)


class NoValidation(UsageError):
    """There is no validation split."""


@contextmanager
def validation_needed_unless(flag: str) -> Iterator[None]:
    """Context manager: the error about a missing validation split names the flag whose 0 does without it."""
    try:
        yield
    except NoValidation as problem:
        raise UsageError(f"{problem}, or give {flag} 0") from None


def load_split(
    data_dir: str | Path, stage: str, split: str, verify: bool = True, vocab_size: int | None = None
) -> Rows:
    """Load the rows of `{data_dir}/{stage}_{split}.pt`; pairs of equal responses are left out, with a note.

    `columns` have the same keys in all rows, see `share_columns`. verify: compare the file with the folder's seal;
    vocab_size: of the tokenizer, above which no token id may lie.
    Raises: UsageError naming the file when it is missing, damaged, changed, empty, of another stage, holds code, or has
    a bad row.
    """
    path = Path(data_dir) / f"{stage}_{split}.pt"
    if not path.is_file():
        splits = sorted(one.name for name in SPLITS for one in Path(data_dir).glob(f"*_{name}.pt"))
        message = f"{path} does not exist; {data_dir} holds {', '.join(splits) or 'no .pt split'}"
        if not any(name.startswith(f"{stage}_") for name in splits) and stage in TEXTS:
            message += f"; {stage} rows are prepared from {', '.join(TEXTS[stage])}"
        if split == "validation":
            raise NoValidation(f"{message}; prepare it with --validation_percentage")
        raise UsageError(message)
    check_sealed(Path(data_dir), [path.name, "args.json"], verify)
    rows = read_rows(path, stage, vocab_size)
    check_counted(rows, str(path))
    share_columns([rows])
    return drop_equal_pairs(rows, str(path)) if stage == "preference" else rows


def read_rows(path: Path, stage: str, vocab_size: int | None = None) -> FlatRows:
    """The rows of a file: flat ones mapped, a list of dicts checked and packed. Raises: as `load_split`."""
    try:
        stored = torch.load(path, weights_only=True, map_location="cpu", mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError:
        raise UsageError(f"{path} holds objects other than plain data and was not loaded; prepare it again") from None
    except Exception as problem:
        raise UsageError(
            f"{path} is damaged ({type(problem).__name__}: {first_line(problem)}); prepare it again"
        ) from None
    if isinstance(stored, dict) and "layout" in stored:
        rows = from_stored(stored, stage, path)
        check_ids(rows, str(path), vocab_size)
        return rows
    if not isinstance(stored, list) or not stored:
        raise UsageError(f"{path} holds no rows; prepare it again with more data or longer --max_length")
    return pack(stored, stage, str(path), vocab_size)


def check_counted(rows: FlatRows, source: str) -> None:
    """Raises: UsageError when demonstrations have no target."""
    if rows.stage == "finetune" and not rows.facts().counted:
        raise UsageError(f"{source}: there is nothing to learn, all targets are {IGNORE_INDEX}; prepare the rows again")


def check_ids(rows: FlatRows, source: str, vocab_size: int | None) -> None:
    """Check the token ids of a file by its facts. Raises: UsageError."""
    end, facts = 2**31 if vocab_size is None else vocab_size, rows.facts()
    if facts.smallest < 0 or facts.largest >= end:
        value = facts.smallest if facts.smallest < 0 else facts.largest
        raise UsageError(f"{source} holds token id {value}, but token ids lie in [0, {end:,}); prepare it again")


def drop_equal_pairs(rows: Rows, source: str = "the given rows") -> Rows:
    """The pairs whose responses differ; prints how many do not. Raises: UsageError when all are equal."""
    longest = torch.stack([rows.column(name) for name in rows.texts]).amax(0)
    different = rows.column("differ_at") < longest
    lost = int((~different).sum())
    if lost == len(rows):
        raise UsageError(f"{source}: chosen and rejected are equal in every row, so there is nothing to learn")
    if lost and os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"{lost:,} pairs of {source} have two equal responses and are left out", flush=True)
    return rows.select(different.nonzero()[:, 0]) if lost else rows


def save_split(data_dir: str | Path, stage: str, split: str, rows: Sequence[Row]) -> Path:
    """Write `{data_dir}/{stage}_{split}.pt` atomically and seal it.

    Raises: UsageError naming a bad row; RunFailure when it cannot be written.
    """
    path = Path(data_dir) / f"{stage}_{split}.pt"
    write_rows(path, stage, rows)
    seal(path.parent, [path.name])
    return path


def hash64(data: bytes) -> int:
    """The first 64 bits of a SHA-256."""
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "big")


def split_by_hash(
    key: bytes, shares: Mapping[str, float], rest: str = "train", hash_function: Callable[[bytes], int] = hash64
) -> str:
    """Split of a row from the 64-bit hash of its key alone; `shares` by split, in this order, `rest` gets what remains.

    A key is the seed with what must stay together, such as the prompt. Shares hold on average, not to the row.
    """
    position, end = hash_function(key) / 2**64, 0.0
    for split, share in shares.items():
        end += share
        if position < end:
            return split
    return rest


def load_prompts(data_dir: str | Path, split: str, verify: bool = True, vocab_size: int | None = None) -> Rows:
    """Load rows `prompt_len, input_ids (the prompt alone), columns` from `prompts_*.pt`, else from `finetune_*.pt`."""
    if (Path(data_dir) / f"prompts_{split}.pt").is_file():
        return load_split(data_dir, "prompts", split, verify, vocab_size)
    rows = load_split(data_dir, "finetune", split, verify, vocab_size)
    lengths = rows.column("prompt_len").long()
    prompts = rows.select(lengths.nonzero()[:, 0])
    if not len(prompts):
        raise UsageError(f"{data_dir}/finetune_{split}.pt holds documents, no prompts; prepare data with prompts")
    return View([prompts], change=prompt_row, key="prompts", columns={"input_ids": lengths[lengths > 0]})


def prompt_row(row: Row) -> Row:
    """The prompt of a demonstration, as a row."""
    return {"prompt_len": row["prompt_len"], "input_ids": row["input_ids"][: row["prompt_len"]], "columns": {}}


def first_answer(row: Row) -> int | None:
    """End of the first answer of a demonstration, which may have several turns; None: of the row."""
    if "targets" not in row:
        return None
    counted = torch.as_tensor(row["targets"])[row["prompt_len"] :] != IGNORE_INDEX
    breaks = (~counted[int(counted.int().argmax()) :]).nonzero() if len(counted) else counted.nonzero()
    return row["prompt_len"] + int(counted.int().argmax()) + int(breaks[0]) if len(breaks) else None


def token_keys(row: Row) -> list[str]:
    """Keys of a row's token ids; of a pair the chosen ones first."""
    return sorted(key for key in row if key.endswith("input_ids"))


def longest_text(rows: Sequence[Row]) -> int:
    """Length in tokens of the longest text of these rows."""
    if isinstance(rows, Rows):
        return max(int(rows.column(name).max()) for name in rows.texts)
    return max(len(row[key]) for row in rows for key in token_keys(row))


def check_vocabulary(rows: Sequence[Row], vocab_size: int, where: str) -> None:
    """Check that the model has an embedding for each token id. Raises: UsageError."""
    if isinstance(rows, Rows):
        smallest, largest, *_ = rows.facts()
    else:
        ids = [torch.as_tensor(row[key]) for row in rows for key in token_keys(row) if len(row[key])]
        smallest, largest = min(int(row.min()) for row in ids), max(int(row.max()) for row in ids)
    if smallest < 0 or largest >= vocab_size:
        raise UsageError(
            f"{where} holds token id {min(smallest, 0) or largest}, but the model has {vocab_size} tokens; "
            "prepare the data again with --tokenizer_name of this model"
        )
