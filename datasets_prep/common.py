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

Rows are read, encoded (`stream`) and written in a stream, so memory does not grow with them but for some bytes a row;
what was killed goes on when it is called again (`spool`). Left out: packing, which the trainers do.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal

from datasets_prep import report
from datasets_prep.destination import check_own, read_object, replacing
from datasets_prep.encoding import STAGES, Dropped, Encoder
from datasets_prep.flat_rows import write_part
from datasets_prep.hub import push
from datasets_prep.reading import Source
from datasets_prep.selection import Selection
from datasets_prep.splits import Placement, shares_of
from datasets_prep.spool import FOLDER, Encoded, Spool
from datasets_prep.stream import SourceRows, encode
from datasets_prep.turns import BadRow
from lightrlhf.cli.errors import RunFailure, UsageError, first_line
from lightrlhf.cli.fields import at_least, flag, random_seed
from lightrlhf.cli.groups import DryRunArgs
from lightrlhf.cli.hub import check_hub, check_repository, is_gguf
from lightrlhf.cli.parser import parse, to_dict
from lightrlhf.data.chat import declare_ends
from lightrlhf.data.packing import FlatWriter
from lightrlhf.data.rendering import Unrendered, render_shown
from lightrlhf.data.templates import BUNDLED, use_template
from lightrlhf.data.tokens import adds_bos, check_end_token, encode_prompt
from lightrlhf.gguf.files import from_gguf
from lightrlhf.storage.destinations import check_destination
from lightrlhf.storage.jsonl import Row
from lightrlhf.storage.locks import lock_folder
from lightrlhf.storage.temporary import remove
from lightrlhf.storage.writing import save_pickled, writing

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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
    """Jinja chat template, a file, or `tools`: the own one with tools; plain prompts then become a user message."""
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


def rows_of(source: Source, to_row: Callable[[dict], Row], num_samples: int | None) -> SourceRows:
    """Rows of a source; `Dropped` for a raw row that `to_row` rejects."""
    return SourceRows(source, to_row, num_samples)


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
    folder = Path(name)
    if not folder.is_dir():
        check_hub(name, "--tokenizer_name", ("tokenizer_config.json", "config.json"))
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except Exception as problem:  # hub client, network and tokenizer classes raise errors of their own
        why = first_line(problem)
        if folder.is_dir() and not any(folder.glob("*token*.[jm]*")):
            within = max(folder.glob("*/tokenizer.json"), default=None)
            why = "the folder has no tokenizer.json" + (f", but {within.parent} has one" if within else "")
        raise UsageError(f"--tokenizer_name {name}: cannot be loaded ({why})") from None
    declare_ends(tokenizer, name)
    return tokenizer


def complete(tokenizer: PreTrainedTokenizerBase, chat_template: str | None) -> Any:
    """Add a missing pad token and a chat template: `chat_template`, else the tokenizer's own, else the plain one.

    `tools` adds tools to one of the last two.
    Raises: UsageError if there is no usable end token, or the template cannot be rendered.
    """
    check_end_token(tokenizer, "the tokenizer")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if chat_template and chat_template != BUNDLED:
        tokenizer.chat_template = _template(chat_template)
    elif not tokenizer.chat_template:
        tokenizer.chat_template = ("{{ bos_token }}" if adds_bos(tokenizer) else "") + PLAIN_TEMPLATE
    if chat_template == BUNDLED:
        use_template(tokenizer, BUNDLED)
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
        with TemporaryDirectory() as folder, encoded(args, islice(rows, report.TRIED), encoder, folder) as selection:
            if not selection.splits:
                raise RunFailure(report.no_rows(args, selection))
            return report.try_out(args, selection, tokenizer)
    about = fingerprint(args, rows, tokenizer, given, stages)
    with encoded(args, rows, encoder, destination / FOLDER, about) as selection:
        check_kept(args, selection)
        replaced = read_object(destination / "args.json").get("dataset_name")
        earlier = read_object(destination / "report.json")
        stored = to_dict(args) | {"judge": judge, "reward": reward, "versions": report.versions()}
        summary = write(args, selection, tokenizer, earlier, stored, example_prompt, wraps)
    report.show(summary, destination)
    if replaced and args.stage == "all" and replaced != args.dataset_name:
        print(f"  replaced the data that was prepared from {replaced}")
    if args.push_to_hub:
        push(destination, args.push_to_hub)
        print(f"  uploaded to {args.push_to_hub}")
    return summary


@contextmanager
def encoded(
    args: PrepareArgs, rows: Iterable[Row | Dropped], encoder: Encoder, folder: str | Path, about: Any = None
) -> Iterator[Selection]:
    """Encode all rows into a folder, which goes with the `with` block; yields the examples that are kept.

    about: what the rows and the encoder are; a folder that was left by a killed preparation of the same is gone on
    with. After an interrupt by the user it stays, too.
    """
    with writing(f"--destination_dir {args.destination_dir}"):
        try:
            spool = Spool(Path(folder), about)
        except BaseException:
            remove(Path(folder))
            raise
        if spool.rows:
            print(f"{folder}: continues after the {spool.rows:,} rows that an interrupted preparation has read")
        elif spool.was_other:
            print(f"{folder}: an interrupted preparation had other arguments or another source; begins anew")
        try:
            encode(rows, encoder, spool, args.num_proc or os.cpu_count() or 1)
            yield Selection(args, Encoded(spool))
        except KeyboardInterrupt:
            spool.close()
            raise
        except BaseException:
            spool.remove()
            raise
        spool.remove()


def fingerprint(
    args: PrepareArgs, rows: Any, tokenizer: PreTrainedTokenizerBase, given: frozenset[str], stages: tuple[str, ...]
) -> dict[str, Any] | None:
    """What decides the encoded rows; None for rows that are not of a source."""
    if not isinstance(rows, SourceRows):
        return None
    names = ("num_proc", "push_to_hub", "destination_dir")
    arguments = {name: value for name, value in to_dict(args).items() if name not in names}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    known = [
        backend.to_str() if backend else repr(tokenizer),
        str(tokenizer.chat_template),
        str(tokenizer.special_tokens_map),
    ]
    return {
        "arguments": arguments,
        "tokenizer": hashlib.sha256("".join(known).encode()).hexdigest(),
        "source": [*rows.source.files(), sorted(given), stages],
        "versions": report.versions(),
    }


def check_kept(args: PrepareArgs, selection: Selection) -> None:
    """Raises: RunFailure where no row is left to train on, or some labels are no labels."""
    odd = next((kind for kind in selection.drops.counts if kind[0].startswith("label is neither")), None)
    if "unpaired" in selection.splits and odd:
        raise RunFailure(f"{selection.drops.sources[odd][0]}: {odd[0]}; other rows have such labels")
    if not any("train" in splits for splits in selection.splits.values()):
        raise RunFailure(report.no_rows(args, selection))


def write(
    args: PrepareArgs,
    selection: Selection,
    tokenizer: PreTrainedTokenizerBase,
    earlier: dict[str, Any],
    stored: dict[str, Any],
    example_prompt: str | list[dict[str, str]],
    wraps: bool,
) -> dict[str, Any]:
    """Write all files; returns the report. stored: for args.json."""
    with replacing(Path(args.destination_dir), STAGES if args.stage == "all" else [args.stage]) as folder:
        files = {
            f"{stage}_{split}": write_split(folder, selection, stage, split, args, tokenizer)
            for stage, splits in selection.splits.items()
            for split in splits
        }
        tokenizer.save_pretrained(folder / "tokenizer")
        if isinstance(example_prompt, str) and wraps:
            example_prompt = [{"role": "user", "content": example_prompt}]
        ids = encode_prompt(tokenizer, example_prompt)
        text = example_prompt if isinstance(example_prompt, str) else tokenizer.decode(ids)
        save_pickled(folder / "example_prompt.pt", {"prompt": text, "input_ids": ids, "attention_mask": [1] * len(ids)})
        if args.save_skipped_examples:
            report.write_skipped(folder / f"skipped_{args.stage}.jsonl", selection.dropped())
        summary = report.summarise(args, selection, files, tokenizer, earlier)
        report.write(folder, summary)
        (folder / "args.json").write_text(json.dumps(stored, indent=2) + "\n", encoding="utf-8")
    return summary


# -------------------------------------------------------------------------------------------------------------- write
def write_split(
    folder: Path, selection: Selection, stage: str, split: str, args: PrepareArgs, tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    """Write a `.pt` file; returns what the report says of it."""
    numbers = selection.splits[stage][split]
    try:
        with FlatWriter(folder / f"{stage}_{split}.pt", stage) as file:
            return report.describe(
                selection,
                stage,
                numbers,
                tokenizer,
                lambda part: write_part(file, part, args.mask_prompt),
            )
    except RunFailure as problem:  # names a temporary file; its cause gets the name of the destination
        raise problem.__cause__ or problem from None
