"""Check data before it trains a model: what is trained, and which of the usual faults are in it.

    lightrlhf check_data data/mine
    lightrlhf check_data rows.jsonl --tokenizer MODEL

Reads folders of ours, rows of ids as TRL has them (JSON lines, parquet, arrow; see `checks.data_rows`), and chat files:
messages, prompts with completions or pairs, encoded as our preparation does. Prints a sample of each kind with ⟦ and ⟧
around what is trained, a table of the checks, and each fault with its first row. Exits with status 1 when a check says
"wrong".

Left out: the quality of answers (`lightrlhf.judge`), and changes that a trainer makes to rows after it has read them.
"""

from __future__ import annotations

import json
import sys
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from datasets_prep.common import complete, load_tokenizer
from datasets_prep.encoding import Dropped, Encoder, Example, Place
from datasets_prep.formats import to_row
from datasets_prep.generic.prepare_data import GenericArgs
from datasets_prep.reading import Source
from datasets_prep.turns import BadRow
from lightrlhf.checks.data_rows import Item, Text, is_tokenised, of_prepared, of_tokenised
from lightrlhf.checks.data_tally import First, Tally
from lightrlhf.checks.template_marks import marks_of
from lightrlhf.checks.verdicts import Verdict, is_wrong, show, write
from lightrlhf.cli.errors import RunFailure, UsageError, first_line, one_line_errors
from lightrlhf.cli.fields import Args, at_least, check_args, flag
from lightrlhf.cli.parser import parse
from lightrlhf.data.flat import from_stored
from lightrlhf.data.schema import FIELDS, Row
from lightrlhf.data.templates import use_template
from lightrlhf.storage.destinations import check_output

CHUNK = 256  # rows encoded at a time
LONG = 2**31 - 1  # a length beyond every row
REASONS = {  # why the preparation drops a row: the fault
    "template_drops_": "template drops text",
    "refused_by_chat_template": "template refuses rows",
    "special_token_in_text": "control tokens in texts",
    "an answer or text that ends with": "control tokens in texts",
    "same_responses": "chosen equals rejected",
}
SPELLED = "control_token_spelled_in_text"  # a note of the preparation, which encodes it as plain text


@dataclass(frozen=True, kw_only=True)
class CheckDataArgs(Args):
    """Find faults of masks, end tokens, templates, lengths, splits and labels in data."""

    data: str = flag(show="first", positional=True)
    """Folder of prepared data, or a file or folder of JSON lines, parquet or arrow: rows of ids, or texts."""
    tokenizer_name: str | None = flag(None, show="first")
    """Tokenizer of the model: hub name or local folder. Default: the one stored with prepared data."""
    chat_template: str | None = None
    """Jinja file of a chat template instead of the tokenizer's own; `tools` adds tools to its own."""
    max_length: int | None = at_least(1, None)
    """Tokens that a trainer cuts rows of texts to."""
    num_samples: int | None = at_least(1, None)
    """Maximum number of rows to read of each file or split."""
    output_file: str | None = flag(None, check=check_output)
    """JSON file for the verdicts."""


def run(args: CheckDataArgs) -> list[Verdict]:
    """Print the verdicts on data; returns them. Raises: UsageError when data or tokenizer cannot be read."""
    check_args(args, CheckDataArgs)
    files = prepared_files(Path(args.data))
    source = None if files else source_of(args.data)
    tokenizer = load_tokenizer(tokenizer_of(args, files))
    pad, wraps = tokenizer.pad_token_id, bool(tokenizer.chat_template or args.chat_template)
    use_template(tokenizer, args.chat_template)
    if source is None:
        tally = Tally(tokenizer, marks_of(tokenizer, pad), asked_for=asked_for(files[0].parent))
        for path in files:
            for item in of_split(path, tally, args.num_samples):
                tally.add(item)
    else:
        first = next(iter(source), None)
        if first is None:
            raise UsageError(f"{args.data} has no rows")
        is_ids = is_tokenised(first.values)
        if not is_ids:
            complete(tokenizer, None)
        tally = Tally(tokenizer, marks_of(tokenizer, pad), texts=not is_ids, limit=None if is_ids else args.max_length)
        items = of_ids(source, tally) if is_ids else of_texts(source, tally, args, wraps)
        for item in islice(items, args.num_samples):
            tally.add(item)
    if not tally.rows and not tally.counts:
        raise UsageError(f"{args.data} has no rows")
    for kind, sample in tally.samples.items():
        print(f"{kind}, {sample.source}: {sample.shown}")
    verdicts = tally.verdicts()
    show(args.data, verdicts)
    if args.output_file is not None:
        write(args.output_file, verdicts)
    return verdicts


def tokenizer_of(args: CheckDataArgs, files: list[Path]) -> str:
    """The name of the tokenizer, given or stored with the data. Raises: UsageError."""
    stored = files[0].parent / "tokenizer" if files else None
    if args.tokenizer_name is None and not (stored and stored.is_dir()):
        raise UsageError(f"--tokenizer_name is needed for {args.data}, which has no tokenizer folder")
    return args.tokenizer_name or str(stored)


# ------------------------------------------------------------------------------------------------------ prepared by us
def prepared_files(path: Path) -> list[Path]:
    """The `.pt` splits that a path names; none for other data. Raises: UsageError."""
    if not path.exists():
        raise UsageError(f"{path}: no such file or folder")
    found = sorted(path.glob("*_*.pt")) if path.is_dir() else [path] if path.suffix == ".pt" else []
    return [file for file in found if file.stem.rpartition("_")[0] in FIELDS]


def asked_for(folder: Path) -> dict[str, Any]:
    """The flags with which data was prepared; empty where they are not known."""
    try:
        return dict(json.loads((folder / "args.json").read_text()))
    except (OSError, ValueError, TypeError):
        return {}


def of_split(path: Path, tally: Tally, num_samples: int | None) -> Iterator[Item]:
    """The rows of a `.pt` split, whatever is wrong with them. Raises: UsageError for a damaged file."""
    stage, _, split = path.stem.rpartition("_")
    try:
        stored = torch.load(path, weights_only=True, map_location="cpu", mmap=zipfile.is_zipfile(path))
    except Exception as problem:  # a damaged file makes it raise anything
        raise UsageError(f"{path} cannot be read ({first_line(problem)})") from None
    is_flat = isinstance(stored, dict) and "layout" in stored
    rows: Iterable[Row] = from_stored(stored, stage, path) if is_flat else stored
    for number, row in enumerate(islice(rows, num_samples)):
        source = f"{path.name} row {number}"
        try:
            yield of_prepared(row, stage, source, split)
        except (KeyError, TypeError, ValueError, AttributeError) as problem:
            tally.count("rows refused", First(source), f"{type(problem).__name__} {first_line(problem)}")


# ----------------------------------------------------------------------------------------------------- files of others
def source_of(name: str) -> Source:
    """The raw rows of files. Raises: UsageError."""
    try:
        return Source(name, skip_bad_lines=True)
    except UsageError as problem:
        raise UsageError(str(problem).removeprefix("--dataset_name ")) from None


def of_ids(source: Source, tally: Tally) -> Iterator[Item]:
    """Rows of ids."""
    for raw in source:
        try:
            yield from of_tokenised(raw.values, raw.source, raw.split or "train")
        except (KeyError, TypeError, ValueError, IndexError, OverflowError) as problem:
            tally.count("rows refused", First(raw.source), f"{type(problem).__name__} {first_line(problem)}")


def of_texts(source: Source, tally: Tally, args: CheckDataArgs, wraps: bool) -> Iterator[Item]:
    """Rows of texts, encoded as our preparation does, but for limits on their length."""
    given = GenericArgs(
        destination_dir="", tokenizer_name="", dataset_name=args.data, max_length=LONG, max_prompt_length=LONG,
        max_dialogue_length=LONG, remove_same_responses=False, wrap_prompts=wraps,
    )  # fmt: skip
    encoder = Encoder(given, tally.tokenizer, place_of, wraps)
    rows = read_rows(source, tally)
    while chunk := list(islice(rows, CHUNK)):
        examples, dropped = encoder(chunk)
        for drop in dropped:
            count_dropped(drop, tally)
        for example in examples:
            if SPELLED in example.notes:
                tally.count("control tokens in texts", First(example.place.source))
            yield of_example(example)


def read_rows(source: Source, tally: Tally) -> Iterator[Row]:
    """The rows that our preparation reads."""
    for raw in source:
        try:
            if raw.broken:
                raise BadRow(raw.broken)
            row = to_row(raw.values)
        except BadRow as bad:
            count_dropped(Dropped(str(bad), raw.source), tally)
        else:
            yield {"split": raw.split, **row, "source": raw.source}


def count_dropped(dropped: Dropped, tally: Tally) -> None:
    """Count a row that our preparation does not encode, by its reason."""
    reason = dropped.reason
    fault = next((fault for begin, fault in REASONS.items() if reason.startswith(begin)), "rows refused")
    tally.count(fault, First(dropped.source), reason.removeprefix("template_drops_").replace("_", " "))


def place_of(row: Row) -> Place:
    """The one stage of a row that shows all of it."""
    if "label" in row:
        stage = "unpaired"
    elif "rejected" in row:
        stage = "preference"
    else:
        is_open = "messages" in row and row["messages"][-1]["role"] != "assistant"
        has_answer = not is_open and any(name in row for name in ("messages", "completion", "chosen", "text"))
        stage = "finetune" if has_answer else "prompts"
    return Place(0, row.get("split") or "train", frozenset({stage}), row["source"])


def of_example(example: Example) -> Item:
    """An encoded row."""
    stage, start = example.stage, example.prompt_len
    texts = []
    for ids in example.ids:
        if stage == "finetune":
            spans = example.spans
        else:
            spans = [] if stage == "prompts" else [(start, len(ids))]
        texts.append(Text.of_spans(ids, spans, start))
    return Item(stage, tuple(texts), example.place.source, example.place.split, example.label)


@one_line_errors
def main(argv: list[str] | None = None) -> list[Verdict]:
    """Run the program; exits with status 1 when a fault is found, else returns the verdicts."""
    try:
        verdicts = run(parse(CheckDataArgs, argv))
    except RunFailure as problem:  # of reading: a failure has the status of a fault
        raise UsageError(str(problem)) from None
    if is_wrong(verdicts):
        sys.exit(1)
    return verdicts


if __name__ == "__main__":
    main()
