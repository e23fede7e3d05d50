"""Data preparation shared by all datasets: load -> filter -> tokenise -> split -> write -> report.

A dataset's `prepare_data.py` turns its raw rows into plain dicts with TRL's columns and calls `run`. One stream of rows
yields every file that its columns allow and `--stage` requests:

    finetune    prompt + completion (or chosen), messages, text {prompt_len, input_ids, targets}
    preference  prompt + chosen + rejected                      {prompt_len, chosen_input_ids, rejected_input_ids}
    unpaired    prompt + completion + label                     {prompt_len, input_ids, label, columns}
    prompts     prompt, with plain columns for a reward         {prompt_len, input_ids, columns}
    dialogue    messages (or a prompt of messages)              {messages, input_ids, turn_spans}

A prompt is text or messages, a response is text or one assistant message (content, reasoning_content, tool_calls), and
an assistant message of `weight` 0 carries no loss. A row may also have `tools`, `split` and `stage` (kept as given),
`group` (rows of one group never cross splits or stages; by default the prompt, or the first user message), `columns`,
`source` (its file and line, for error messages), `read_as` (the format it had) and `notes`, both for the report, and
`no_pair` (why its two answers are no pair, which leaves its prompt and the chosen one to the other stages).

A file holds flat tensors that programs map (`lightrlhf/data/flat.py`), four bytes a token. Left out: streaming of
datasets that do not fit in memory, and packing (the trainers do it).
"""

from __future__ import annotations

import functools
import json
import os
import random
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from tqdm import tqdm

from datasets_prep import encoding, report
from datasets_prep.destination import check_own, read_object, replacing
from datasets_prep.encoding import STAGES, Dropped, Encoder, Example
from datasets_prep.hub import push
from datasets_prep.reading import Source
from datasets_prep.splits import Placement, shares_of
from datasets_prep.turns import BadRow
from lightrlhf.cli.errors import RunFailure, UsageError, first_line
from lightrlhf.cli.fields import at_least, flag, random_seed
from lightrlhf.cli.groups import DryRunArgs
from lightrlhf.cli.hub import check_repository, is_gguf
from lightrlhf.cli.parser import parse, to_dict
from lightrlhf.data.chat import declare_ends
from lightrlhf.data.packing import write_rows
from lightrlhf.data.rendering import Unrendered, render_shown
from lightrlhf.data.splits import SPLITS
from lightrlhf.data.tokens import adds_bos, check_end_token, encode_prompt
from lightrlhf.gguf.files import from_gguf
from lightrlhf.storage.destinations import check_destination
from lightrlhf.storage.jsonl import Row
from lightrlhf.storage.locks import lock_folder
from lightrlhf.storage.writing import save_pickled

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHUNK = 1000  # rows tokenised per call
RESPONSE_ROOM = 128  # tokens left for a response by default, as many as the trainers sample
# Chat template for a tokenizer without one: the format in which the helpful-harmless dataset was published, with an end
# token after each answer, so that every turn of a dialogue has one.
PLAIN_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'system' %}{{ message.content }}{% endif %}"
    "{% if message.role == 'user' %}{{ '\\n\\nHuman: ' + message.content }}{% endif %}"
    "{% if message.role == 'assistant' %}{{ '\\n\\nAssistant: ' + message.content + eos_token }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '\\n\\nAssistant:' }}{% endif %}"
)
# between stages in one folder


def check_lengths(text: str, flag: str) -> None:
    """Raises: ValueError unless a text is a number or several, with commas between them."""
    if not all(word.strip().isdigit() for word in text.split(",")):
        raise ValueError(f"{flag} {text} must be a number or a list such as 1024,768,512")


@dataclass(frozen=True, kw_only=True)
class PrepareArgs(DryRunArgs):
    """Flags of every dataset."""

    destination_dir: str
    """Output folder of the `.pt` splits, the tokenizer and the report."""
    tokenizer_name: str
    """Tokenizer of the model to be trained: hub name or local folder."""
    dataset_name: str
    """Hub id, or a local folder or file: JSON, JSON lines, CSV (each also gzipped), parquet or arrow."""
    dataset_config: str | None = None
    """Configuration of a hub dataset that has several."""
    dataset_revision: str | None = flag(None, show="rarely")
    """Branch, tag or commit of a hub dataset."""
    stage: Literal["all", "finetune", "preference", "unpaired", "prompts", "dialogue"] = "all"
    """Files to write; `all` writes every kind that the columns allow."""
    split: str | None = None
    """Shares of the prompts for SFT, reward model and RL, such as 2,4,4; null lets each stage use all prompts."""
    max_length: int = at_least(1, 1024)
    """Maximum tokens of prompt and response; longer ones are truncated and get no end token."""
    max_prompt_length: int | None = at_least(1, None)
    """Maximum tokens of a prompt; rows with a longer one are dropped. By default 128 tokens are left for a response."""
    minimum_response_length: int = at_least(0, 1, show="rarely")
    """Minimum characters of a response; rows with a shorter one are dropped."""
    max_turns: int = at_least(1, 5, show="rarely")
    """Maximum turns of a dialogue."""
    turn_prompt_length: str = flag("128", check=check_lengths, show="rarely")
    """Maximum tokens of a user turn; a list such as 1024,768,512 sets it by the dialogue's number of turns."""
    turn_response_length: str = flag("512", check=check_lengths, show="rarely")
    """Maximum tokens of an assistant turn; a list sets it by the dialogue's number of turns."""
    max_dialogue_length: int = at_least(1, 3200, show="rarely")
    """Maximum tokens of a dialogue."""
    remove_same_inputs: bool = True
    """Keep only the first row of each prompt (for dialogues: of each sequence of user turns)."""
    remove_same_responses: bool = flag(True, show="rarely")
    """Drop pairs whose chosen and rejected responses are equal."""
    mask_prompt: bool = flag(True, show="rarely")
    """Mask prompt tokens in `targets`, so that they carry no loss."""
    chat_template: str | None = None
    """Jinja chat template or a file with one; plain prompts then become a user message."""
    wrap_prompts: bool | None = flag(None, show="rarely")
    """Make a plain prompt a user message of the chat template; by default with `chat_template`."""
    num_samples: int | None = at_least(1, None)
    """Maximum number of raw rows to read."""
    skip_bad_lines: bool = flag(False, show="rarely")
    """Leave out and count lines of JSON and rows of CSV that cannot be read, instead of stopping at the first."""
    validation_percentage: float = at_least(0, 0.1)
    """Share of prompts in the validation split, unless the source has one."""
    test_percentage: float = at_least(0, 0.1)
    """Share of prompts in the test split, unless the source has one."""
    shuffle: bool = True
    """Shuffle the rows of each split."""
    seed: int = random_seed(42)
    """Seed of splits and shuffling."""
    save_skipped_examples: bool = False
    """Write dropped rows with their reason to skipped_{stage}.jsonl."""
    num_proc: int | None = at_least(1, None, show="rarely")
    """Tokenising processes; one per core by default."""
    push_to_hub: str | None = flag(None, check=check_repository)
    """Hub dataset repository OWNER/NAME for what is written; private if it is new."""

    def _check(self) -> None:
        if self.validation_percentage + self.test_percentage >= 1:
            raise ValueError(
                f"--validation_percentage {self.validation_percentage} and --test_percentage {self.test_percentage} "
                "leave no training split; use shares such as 0.1"
            )
        shares_of(self.split)

    def longest_prompt(self) -> int:
        """Maximum tokens of a prompt."""
        return self.max_prompt_length or self.max_length - min(RESPONSE_ROOM, self.max_length // 2)

    def wraps(self, tokenizer: PreTrainedTokenizerBase) -> bool:
        """Whether plain prompts become a user message."""
        return bool(self.chat_template) if self.wrap_prompts is None else self.wrap_prompts


# ---------------------------------------------------------------------------------------------------------- programs
def run(
    args_class: type[PrepareArgs],
    to_row: Callable[[dict], Row],
    argv: list[str] | None = None,
    **details: Any,
) -> None:
    """Main function of a dataset's script: parse, read raw rows, convert each with `to_row`, prepare.

    `to_row` takes the raw columns and returns a row or raises `BadRow(reason)`; `details` are passed to `prepare`.
    Raises: UsageError for invalid arguments, RunFailure for invalid data.
    """
    args = parse(args_class, argv)
    source = source_of(args)
    tokenizer = load_tokenizer(args.tokenizer_name)
    prepare(args, rows_of(source, to_row, args.num_samples), tokenizer=tokenizer, given=source.given, **details)


def source_of(args: PrepareArgs) -> Source:
    """The raw rows that the flags name; damaged files are found before a model is converted for its tokenizer.

    Raises: UsageError or RunFailure.
    """
    source = Source(args.dataset_name, args.dataset_config, args.dataset_revision, args.skip_bad_lines)
    source.check(min(args.num_samples or report.TRIED, report.TRIED) if args.dry_run else args.num_samples)
    return source


def rows_of(source: Source, to_row: Callable[[dict], Row], num_samples: int | None) -> Iterator[Row | Dropped]:
    """Rows of a source; `Dropped` for a raw row that `to_row` rejects."""
    for raw in islice(source, num_samples):
        if raw.broken:
            yield Dropped(raw.broken, raw.source)
            continue
        try:
            row = to_row(raw.values)
        except BadRow as bad:
            yield Dropped(str(bad), raw.source, row=raw.values)  # few, so kept even if they are not saved
            continue
        held_out = raw.split if raw.split != "train" else None  # `Placement` carves missing splits out of train
        yield {"split": held_out, **row, "source": raw.source}


def column(raw: dict, name: str, kind: type | tuple[type, ...] = str) -> Any:
    """A column of a raw row. Raises: BadRow if it is missing, null, of another type, or empty text."""
    if name not in raw:
        raise BadRow(f"no_column_{name}")
    if raw[name] is None:
        raise BadRow(f"{name}_is_null")
    if not isinstance(raw[name], kind):
        raise BadRow(f"{name}_is_{type(raw[name]).__name__}")
    if isinstance(raw[name], str) and not raw[name].strip():
        raise BadRow(f"{name}_is_empty")
    return raw[name]


def load_tokenizer(name: str) -> Any:
    """The tokenizer of a hub name, a folder or a GGUF file. Raises: UsageError."""
    from transformers import AutoTokenizer

    if is_gguf(name):
        name = str(from_gguf(name, "--tokenizer_name"))
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except Exception as problem:  # hub client, network and tokenizer classes raise errors of their own
        has_files = not Path(name).is_dir() or any(Path(name).glob("*token*"))
        why = first_line(problem) if has_files else "the folder has no tokenizer.json"
        raise UsageError(f"--tokenizer_name {name}: cannot be loaded ({why})") from None
    declare_ends(tokenizer, name)
    return tokenizer


def complete(tokenizer: PreTrainedTokenizerBase, chat_template: str | None) -> Any:
    """Add a missing pad token and a chat template: `chat_template`, else the tokenizer's own, else the plain one.

    Raises: UsageError if there is no usable end token, or the template cannot be rendered.
    """
    check_end_token(tokenizer, "the tokenizer")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if chat_template:
        tokenizer.chat_template = _template(chat_template)
    elif not tokenizer.chat_template:
        tokenizer.chat_template = ("{{ bos_token }}" if adds_bos(tokenizer) else "") + PLAIN_TEMPLATE
    try:
        render_shown(tokenizer, [{"role": "user", "content": "Hello"}])
    except Unrendered as problem:
        whose = "--chat_template" if chat_template else "the tokenizer's chat template"
        raise UsageError(f"{whose} cannot be rendered ({problem})") from None
    return tokenizer


def _template(given: str) -> str:
    if "{" in given:
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise UsageError(f"--chat_template {given}: neither a Jinja template nor a readable file ({problem})") from None


# ----------------------------------------------------------------------------------------------------------- prepare
def _locking(prepare: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Decorator of `prepare`: one process at a time writes to a destination, from reading what is there to the end."""

    @functools.wraps(prepare)
    def locked(args: PrepareArgs, *rest: Any, **details: Any) -> dict[str, Any]:
        destination = Path(args.destination_dir)
        check_destination(destination, "--destination_dir")
        if args.dry_run or destination.is_file():  # which is refused by its own name
            return prepare(args, *rest, **details)
        with lock_folder(destination, "--destination_dir"):
            return prepare(args, *rest, **details)

    return locked


@_locking
def prepare(
    args: PrepareArgs,
    rows: Iterable[Row | Dropped],
    *,
    judge: str | None = None,
    reward: str | None = None,
    example_prompt: str | list[dict[str, str]] = "Hello, how are you?",
    tokenizer: PreTrainedTokenizerBase | None = None,
    given: frozenset[str] = frozenset(),
    stages: tuple[str, ...] = STAGES,
) -> dict[str, Any]:
    """Write the files of howto/datasets.md for `rows` into `args.destination_dir`; returns the report.

    `judge` and `reward` are import paths (`module:function`) stored in args.json; `given` are the held-out splits of
    the source, which are then not carved out of train; `stages` are those that the dataset supports.
    A dry run reads the first rows, prints some, and leaves the destination as it is.
    Raises: UsageError or RunFailure, with the destination unchanged; RunFailure when the upload fails afterwards.
    """
    tokenizer = tokenizer or load_tokenizer(args.tokenizer_name)
    wraps = args.wraps(tokenizer)
    tokenizer = complete(tokenizer, args.chat_template)
    destination = Path(args.destination_dir)
    check_own(destination, args.stage, to_dict(args))
    if args.stage not in ("all", *stages):
        raise UsageError(f"--stage {args.stage}: this dataset supports {', '.join(stages)}")
    encoder = Encoder(args, tokenizer, Placement(args, stages, given, wraps), wraps)
    if args.dry_run:
        examples, dropped = collect(args, islice(rows, report.TRIED), encoder)
        if not examples:
            raise RunFailure(report.no_rows(args, examples, dropped))
        return report.try_out(args, examples, dropped, tokenizer)
    examples, dropped = collect(args, rows, encoder)
    if "unpaired" in examples and (odd := next((d for d in dropped if d.reason.startswith("label is neither")), None)):
        raise RunFailure(f"{odd.source}: {odd.reason}; other rows have such labels")
    if not any("train" in splits for splits in examples.values()):
        raise RunFailure(report.no_rows(args, examples, dropped))
    replaced = read_object(destination / "args.json").get("dataset_name")
    summary = report.summarise(args, examples, dropped, tokenizer, earlier=read_object(destination / "report.json"))
    with replacing(destination, STAGES if args.stage == "all" else [args.stage]) as folder:
        for stage, splits in examples.items():
            for split, members in splits.items():
                write_rows(folder / f"{stage}_{split}.pt", stage, table(stage, members, args.mask_prompt))
        tokenizer.save_pretrained(folder / "tokenizer")
        if isinstance(example_prompt, str) and wraps:
            example_prompt = [{"role": "user", "content": example_prompt}]
        ids = encode_prompt(tokenizer, example_prompt)
        text = example_prompt if isinstance(example_prompt, str) else tokenizer.decode(ids)
        save_pickled(folder / "example_prompt.pt", {"prompt": text, "input_ids": ids, "attention_mask": [1] * len(ids)})
        if args.save_skipped_examples:
            report.write_skipped(folder / f"skipped_{args.stage}.jsonl", dropped)
        report.write(folder, summary)
        stored = to_dict(args) | {"judge": judge, "reward": reward, "versions": report.versions()}
        (folder / "args.json").write_text(json.dumps(stored, indent=2) + "\n", encoding="utf-8")
    report.show(summary, destination)
    if replaced and args.stage == "all" and replaced != args.dataset_name:
        print(f"  replaced the data that was prepared from {replaced}")
    if args.push_to_hub:
        push(destination, args.push_to_hub)
        print(f"  uploaded to {args.push_to_hub}")
    return summary


# ------------------------------------------------------------------------------------------------------------ collect
def collect(
    args: PrepareArgs, rows: Iterable[Row | Dropped], encoder: Encoder
) -> tuple[dict[str, dict[str, list[Example]]], list[Dropped]]:
    """Examples by stage and split, and dropped rows; independent of `num_proc`."""
    dropped: list[Dropped] = []
    seen: set[tuple[str, int]] = set()
    unique: list[Example] = []
    for examples, rejected in _encoded(_usable(rows, dropped), encoder, args.num_proc or os.cpu_count() or 1):
        dropped += rejected
        for example in examples:
            duplicate = (example.stage, example.key) in seen
            if duplicate and (args.remove_same_inputs or example.stage == "dialogue"):
                reason = "same_dialogue" if example.stage == "dialogue" else "same_input"
                dropped.append(Dropped(reason, example.place.source, example.stage, example.row))
                continue
            seen.add((example.stage, example.key))
            unique.append(example)
    held_out: dict[int, str] = {}
    for split in ("validation", "test"):  # test wins over validation, both over train
        held_out |= {example.place.group: split for example in unique if example.place.split == split}
    result: dict[str, dict[str, list[Example]]] = defaultdict(lambda: defaultdict(list))
    for example in unique:
        belongs = held_out.get(example.place.group, "train")
        if belongs != example.place.split:
            reason = f"prompt_also_in_{belongs}"
            dropped.append(Dropped(reason, example.place.source, example.stage, example.row))
        else:
            result[example.stage][example.place.split].append(example)
    stages = [stage for stage in STAGES if stage in result]
    ordered = {stage: {split: result[stage][split] for split in SPLITS if split in result[stage]} for stage in stages}
    if args.shuffle:
        for stage, splits in ordered.items():
            for split, members in splits.items():
                random.Random(f"{args.seed}/{stage}/{split}").shuffle(members)
    return ordered, dropped


def _usable(rows: Iterable[Row | Dropped], dropped: list[Dropped]) -> Iterator[Row]:
    for row in tqdm(rows, unit=" rows", disable=None):
        if isinstance(row, Dropped):
            dropped.append(row)
        else:
            yield row


def _encoded(rows: Iterator[Row], encoder: Encoder, num_proc: int) -> Iterator[tuple[list[Example], list[Dropped]]]:
    """Encode chunks of rows, in order; in this process if there is only one chunk."""
    chunks = iter(lambda: list(islice(rows, CHUNK)), [])
    first = list(islice(chunks, 2))
    if num_proc == 1 or len(first) < 2:
        yield from map(encoder, first)
        yield from map(encoder, chunks)
        return
    with _pool(num_proc, encoder) as pool:
        waiting = deque(pool.submit(encoding.work, chunk) for chunk in first)
        for chunk in chunks:  # a few chunks are queued at a time, so memory does not grow with the file
            waiting.append(pool.submit(encoding.work, chunk))
            if len(waiting) > 3 * num_proc:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


@contextmanager
def _pool(num_proc: int, encoder: Encoder) -> Iterator[ProcessPoolExecutor]:
    try:
        with ProcessPoolExecutor(num_proc, initializer=encoding.start_worker, initargs=(encoder,)) as pool:
            yield pool
    except BrokenProcessPool:
        raise RunFailure("a tokenising process was killed, perhaps for memory; use a lower --num_proc") from None


# -------------------------------------------------------------------------------------------------------------- write
def table(stage: str, examples: list[Example], mask_prompt: bool) -> list[dict[str, Any]]:
    """Rows of one `.pt` file, as plain dicts whose ids are int32 views of one tensor."""
    ids = _views([part for example in examples for part in example.ids])
    if stage == "finetune":
        targets = _views([encoding.targets_of(example, mask_prompt) for example in examples])
        return [{"prompt_len": e.prompt_len, "input_ids": i, "targets": t} for e, i, t in zip(examples, ids, targets)]
    if stage == "preference":
        return [
            {"prompt_len": e.prompt_len, "chosen_input_ids": chosen, "rejected_input_ids": rejected}
            | ({"columns": e.extra} if e.extra else {})
            for e, chosen, rejected in zip(examples, ids[0::2], ids[1::2])
        ]
    if stage == "unpaired":
        return [
            {"prompt_len": e.prompt_len, "input_ids": i, "label": e.label, "columns": e.extra}
            for e, i in zip(examples, ids)
        ]
    if stage == "prompts":
        return [{"prompt_len": e.prompt_len, "input_ids": i, "columns": e.extra} for e, i in zip(examples, ids)]
    return [
        {"messages": e.extra, "input_ids": i, "turn_spans": e.spans} | ({"columns": e.columns} if e.columns else {})
        for e, i in zip(examples, ids)
    ]


def _views(arrays: list[np.ndarray]) -> tuple[torch.Tensor, ...]:
    whole = torch.from_numpy(np.concatenate(arrays))  # (sum of lengths,) int32
    return whole.split([len(array) for array in arrays])
