"""Report on the prepared data, for people (`report.md`, a histogram) and for programs (`report.json`).

The content hash of a file covers its ids, masks and columns, so two runs with the same arguments have equal hashes,
even if the torch version, the clock or `num_proc` change the bytes on disk.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from datasets_prep.encoding import Dropped, Example
from datasets_prep.flat_rows import content
from datasets_prep.selection import Selection
from datasets_prep.spool import LABELS, Part, batches
from lightrlhf.cli.parser import to_dict
from lightrlhf.data.tokens import marked_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MANY = 0.05  # share of rows
TRIED, SHOWN = 1000, 2  # rows that a dry run reads, and prints of each kind
TOO_LONG = (
    "prompt_too_long",
    "no_trained_tokens",
    "response_too_long",
    "dialogue_too_long",
    "same_responses_after_cut",
)
LENGTHS = {
    "all": ("max_length", "max_prompt_length"),
    "prompts": ("max_prompt_length",),
    "dialogue": ("max_dialogue_length", "turn_prompt_length", "turn_response_length"),
}
REMEDIES = {  # how the reason for dropping a row begins: the flag, or what to do about it
    "response_too_short": "lower --minimum_response_length",
    "prompt_too_long": "raise --max_prompt_length",
    "no_trained_tokens": "raise --max_length",
    "same_responses_after_cut": "raise --max_length",
    "response_too_long": "raise --turn_response_length",
    "dialogue_too_long": "raise --max_dialogue_length",
    "too_many_turns": "raise --max_turns",
    "same_input": "keep all by --remove_same_inputs False",
    "same_responses": "keep all by --remove_same_responses False",
    "special_token_in_text": "remove the token from the text, or give messages",
    "template_drops_": "give a --chat_template that writes it, or rows without it",
    "no_column_": "these are not the columns of this dataset; datasets_prep.generic reads other files",
    "empty_": "write the text, or leave such rows out",
}


def versions() -> dict[str, str]:
    """Versions of Python and the packages that determine the files' contents."""
    from importlib.metadata import version

    names = ("lightrlhf", "torch", "transformers", "tokenizers", "datasets")
    result = {"python": platform.python_version()}
    for name in names:
        try:
            result[name] = version(name)
        except ModuleNotFoundError:  # a checkout that is not installed
            result[name] = "not installed"
    return result


def summarise(
    args: Any, selection: Selection, files: dict[str, Any], tokenizer: PreTrainedTokenizerBase, earlier: dict
) -> dict[str, Any]:
    """Counts and drop reasons, beside what `describe` said of the files.

    `earlier` is the report of a run for another stage in the same folder; its files remain listed.
    """
    if args.stage != "all":
        kept = {name: file for name, file in earlier.get("files", {}).items() if name.split("_")[0] != args.stage}
        files = kept | files
    reasons = [
        {"reason": reason, "stage": stage or "any", "rows": count, "first": selection.drops.first((reason, stage))}
        | ({"remedy": todo} if (todo := remedy(args, reason, stage)) else {})
        for (reason, stage), count in sorted(
            selection.drops.counts.items(), key=lambda one: (one[0][0], one[0][1] or "any")
        )
    ]
    kinds = _by_kind(selection)
    before = {name: [e for e in earlier.get(name, []) if e["stage"] != args.stage] for name in ("read_as", "notes")}
    before = before if args.stage != "all" else {"read_as": [], "notes": []}
    return {
        "arguments": to_dict(args),
        "versions": versions(),
        "read_as": [
            {"format": name, "stage": stage, "rows": len(own), "sample": _sample(selection, int(own[0]), tokenizer)}
            for (name, stage), own in kinds.items()
            if name
        ]
        + before["read_as"],
        "files": files,
        "notes": [{"note": note, "stage": stage, "rows": n} for (note, stage), n in sorted(_notes(selection).items())]
        + before["notes"],
        "dropped": reasons,
    }


def remedy(args: Any, reason: str, stage: str | None) -> str:
    """What to do about rows dropped for a reason, with the flag's value; "" where the reason says it."""
    todo = next((todo for begin, todo in REMEDIES.items() if reason.startswith(begin)), "")
    if reason == "prompt_too_long" and stage == "dialogue":
        todo = "raise --turn_prompt_length"
    verb, _, name = todo.partition(" --")
    if verb not in ("raise", "lower"):
        return todo
    value = args.longest_prompt() if name == "max_prompt_length" else getattr(args, name)
    return f"{todo} ({value})"


def no_rows(args: Any, selection: Selection) -> str:
    """The error of a preparation without a training split."""
    if selection.splits:
        return (
            f"--dataset_name {args.dataset_name}: all rows are in validation and test, none is left to train on; "
            "give --validation_percentage 0 --test_percentage 0"
        )
    reasons = selection.drops.most(3)
    if not reasons:
        return f"--dataset_name {args.dataset_name} has no rows"
    first = next(kind for kind in selection.drops.counts if kind[0] == reasons[0][0])
    counts = ", ".join(f"{count} x {reason}" for reason, count in reasons)
    todo = "".join(f"; {todo}" for todo in [remedy(args, *first)] if todo)
    where = selection.drops.sources[first][0]
    return f"--dataset_name {args.dataset_name}: no row is left to train on ({counts}; first {where}){todo}"


def _by_kind(selection: Selection) -> dict[tuple[str, str], np.ndarray]:
    """Numbers of examples by the format that they were read as and their stage."""
    kinds: dict[tuple[str, str], np.ndarray] = {}
    for stage in selection.splits:
        numbers = selection.of_stage(stage)
        own = selection.encoded.index["kind"][numbers]
        names: dict[str, list[int]] = {}
        for number, (name, _) in enumerate(selection.encoded.kinds):
            names.setdefault(name or "", []).append(number)
        found = {(name, stage): numbers[np.isin(own, places)] for name, places in names.items()}
        kinds |= {kind: one for kind, one in found.items() if len(one)}
    return dict(sorted(kinds.items()))


def _notes(selection: Selection) -> Counter[tuple[str, str]]:
    """Numbers of examples by note and stage."""
    counts: Counter[tuple[str, str]] = Counter()
    for stage in selection.splits:
        own = np.bincount(selection.encoded.index["kind"][selection.of_stage(stage)])
        for (_, notes), count in zip(selection.encoded.kinds, own.tolist()):
            counts.update({(note, stage): notes.count(note) * count for note in {*notes} if count})
    return counts


def _sample(selection: Selection, number: int, tokenizer: PreTrainedTokenizerBase) -> str:
    example = selection.encoded.example(number)
    return marked(example.stage, example, tokenizer)


def describe(
    selection: Selection,
    stage: str,
    numbers: np.ndarray,
    tokenizer: PreTrainedTokenizerBase,
    write: Callable[[Part], None] = lambda _: None,
) -> dict[str, Any]:
    """Lengths, special tokens, content hash and a sample of a file; its examples go to `write`, some at a time."""
    index = selection.encoded.index[numbers]
    lengths = np.concatenate([index["first"], index["second"]] if stage == "preference" else [index["first"]])
    special = {name: getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "unk")}
    counts, digest = Counter[str](), hashlib.sha256()
    for batch in batches(numbers):
        part = selection.encoded.part(batch)
        for name, token in special.items():
            if token is not None:
                counts[name] += sum(int(np.count_nonzero(side == token)) for side in part.sides)
        digest.update(content(part))
        write(part)
    edges = np.unique(np.linspace(0, max(int(lengths.max()), 1), 21).astype(int))
    labels = [str(LABELS[label]) for label in dict.fromkeys(index["label"].tolist())]
    return {
        "rows": len(index),
        "tokens": int(lengths.sum()),
        "prompt_length": _spread(index["prompt_len"]),
        "length": _spread(lengths),
        "histogram": {"edges": edges.tolist(), "counts": np.histogram(lengths, edges)[0].tolist()},
        "cut_by_max_length": int(index["cut"].sum()),
        **(
            {"labels": {name: int((index["label"] == LABELS.index(name == "True")).sum()) for name in labels}}
            if stage == "unpaired"
            else {}
        ),
        "special_tokens": dict(counts),
        "sha256": digest.hexdigest(),
        "sample": _sample(selection, int(numbers[0]), tokenizer),
    }


def _spread(lengths: np.ndarray) -> dict[str, float]:
    low, middle, high = np.percentile(lengths, [5, 50, 95]).tolist()
    mean, longest = round(float(lengths.mean()), 1), int(lengths.max())
    return {"mean": mean, "p5": low, "median": middle, "p95": high, "max": longest}


def marked(stage: str, example: Example, tokenizer: PreTrainedTokenizerBase) -> str:
    """The decoded row with ⟦ and ⟧ around trained tokens; both sides of a pair."""

    sides = []
    for ids in example.ids:
        spans = [] if stage == "prompts" else example.spans or [(example.prompt_len, len(ids))]
        sides.append(marked_text(tokenizer, ids.tolist(), spans))
    return "\n--- rejected ---\n".join(sides)


def write(folder: Path, summary: dict[str, Any]) -> None:
    """Write report.json, report.md and lengths.png to `folder`."""
    (folder / "report.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    (folder / "report.md").write_text(_markdown(summary), encoding="utf-8", errors="replace")
    _draw_lengths(folder / "lengths.png", summary["files"])


def _markdown(summary: dict[str, Any]) -> str:
    args = summary["arguments"]
    shared = "no prompt crosses stages" if args["split"] else "every stage uses all prompts"
    lines = [f"# Data report: {args['dataset_name']}", "", f"Splits are by prompt; {shared}.", "", "## Files", ""]
    lines += ["| file | rows | tokens | prompt p50 / max | length p50 / p95 / max | cut | bos / eos / unk |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for name, file in summary["files"].items():
        prompt, length, special = file["prompt_length"], file["length"], file["special_tokens"]
        lines.append(
            f"| {name} | {file['rows']} | {file['tokens']} | {prompt['median']:.0f} / {prompt['max']} "
            f"| {length['median']:.0f} / {length['p95']:.0f} / {length['max']} | {file['cut_by_max_length']} "
            f"| {' / '.join(str(special.get(token, '-')) for token in ('bos', 'eos', 'unk'))} |"
        )
    if any("labels" in file for file in summary["files"].values()):
        lines += ["", "## Labels", "", "| file | true | false |", "|---|---|---|"]
        for name, file in summary["files"].items():
            if labels := file.get("labels"):
                lines.append(f"| {name} | {labels.get('True', 0)} | {labels.get('False', 0)} |")
    lines += ["", "Cut rows were longer than `--max_length`; no end token was invented for them.", ""]
    lines += ["![lengths](lengths.png)"]
    for title, kind, names in (
        ("Read as", "read_as", ("format", "stage", "rows")),
        ("Notes", "notes", ("note", "stage", "rows")),
        ("Dropped rows", "dropped", ("reason", "stage", "rows", "first")),
    ):
        if summary[kind]:
            lines += ["", f"## {title}", "", f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
            lines += [f"| {' | '.join(str(entry[name]) for name in names)} |" for entry in summary[kind]]
    lines += ["", "## One row of each kind", "", "⟦ and ⟧ stand around what is trained."]
    samples = {f"{read['stage']}, read as {read['format']}": read["sample"] for read in summary["read_as"]}
    for name, sample in (samples or {name: file["sample"] for name, file in summary["files"].items()}).items():
        lines += ["", f"### {name}", "", *(f"    {line}" for line in sample.splitlines())]
    lines += ["", "## Content hashes", ""]
    lines += [f"- {name}: `{file['sha256']}`" for name, file in summary["files"].items()]
    return "\n".join(lines) + "\n"


def _draw_lengths(path: Path, files: dict[str, dict]) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for name, file in files.items():
        if name.endswith("_train"):
            axes.stairs(file["histogram"]["counts"], file["histogram"]["edges"], label=name)
    axes.set(xlabel="tokens in a row", ylabel="rows", title="Lengths of the training splits")
    axes.legend()
    figure.savefig(path, metadata={"Software": None})


def _counted(entries: Iterable[dict[str, Any]]) -> str:
    """Rows by stage."""
    return ", ".join(f"{entry['rows']} {entry['stage']} rows" for entry in entries)


def length_warnings(summary: dict[str, Any]) -> list[str]:
    """A line for each stage of which more than `MANY` of the rows were dropped or truncated for their length."""
    lines = []
    for stage in dict.fromkeys(name.rpartition("_")[0] for name in summary["files"]):
        files = [file for name, file in summary["files"].items() if name.rpartition("_")[0] == stage]
        lost = sum(d["rows"] for d in summary["dropped"] if d["reason"] in TOO_LONG and d["stage"] == stage)
        kept, cut = sum(file["rows"] for file in files), sum(file["cut_by_max_length"] for file in files)
        if lost + cut > MANY * (kept + lost):
            given = {name: summary["arguments"][name] for name in LENGTHS.get(stage, LENGTHS["all"])}
            flags = " or ".join(f"--{name}{'' if value is None else f' {value}'}" for name, value in given.items())
            share = (lost + cut) / (kept + lost)
            lines.append(
                f"{share:.0%} of the {stage} rows are too long ({lost} dropped, {cut} truncated); raise {flags}"
            )
    return lines


def try_out(args: Any, selection: Selection, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Print the first rows of each kind, decoded and with the trained part marked, and counts; returns the report."""
    for (name, stage), numbers in _by_kind(selection).items():
        read = f", read as {name}" if name else ""
        for number, example in enumerate(map(selection.encoded.example, numbers[:SHOWN].tolist()), start=1):
            label = "" if example.label is None else f", label {example.label}"
            print(f"--- {stage} {number}{read}{label}: {len(example.ids[0])} tokens")
            print(marked(stage, example, tokenizer))
    every = [(stage, split, own) for stage, splits in selection.splits.items() for split, own in splits.items()]
    files = {f"{stage}_{split}": describe(selection, stage, own, tokenizer) for stage, split, own in every}
    summary = summarise(args, selection, files, tokenizer, earlier={})
    print(f"⟦ and ⟧ stand around what is trained. Of the first {TRIED:,} rows:")
    for stage, splits in selection.splits.items():
        print(f"  kept for {stage}: {', '.join(f'{len(rows)} {split}' for split, rows in splits.items())}")
    _show_reasons(summary)
    print("nothing was written; leave --dry_run out to prepare all rows")
    return summary


def show(summary: dict[str, Any], destination: Path) -> None:
    """Print the short form."""
    print(f"{destination}:")
    for name, file in summary["files"].items():
        print(f"  {name + '.pt':28s} {file['rows']:8d} rows  {file['tokens']:10d} tokens")
    stages = dict.fromkeys(name.split("_")[0] for name in summary["files"])
    for split in ("validation", "test"):
        without = [stage for stage in stages if f"{stage}_{split}" not in summary["files"]]
        if without and summary["arguments"][f"{split}_percentage"]:
            print(f"  no {split} rows for {', '.join(without)}: dropped, or too few rows for --{split}_percentage")
    _show_reasons(summary)
    print(f"  details: {destination / 'report.md'}")


def _show_reasons(summary: dict[str, Any]) -> None:
    """Print what rows were read as, what was noted and dropped, and warnings."""
    for kind, name, verb in (
        ("read_as", "format", "read as"),
        ("notes", "note", "noted"),
        ("dropped", "reason", "dropped"),
    ):
        for value in dict.fromkeys(entry[name] for entry in summary[kind]):
            entries = [entry for entry in summary[kind] if entry[name] == value]
            first = f", first {entries[0]['first']}" if kind == "dropped" else ""
            todo = "".join(f"; {todo}" for todo in dict.fromkeys(e["remedy"] for e in entries if "remedy" in e))
            print(f"  {verb} {value}: {_counted(entries)}{first}{todo}")
    for line in length_warnings(summary):
        print(f"  warning: {line}")
    for name, file in summary["files"].items():
        if len(file.get("labels", "ab")) == 1 and name.endswith("_train"):
            print(f"  warning: all rows of {name} have the label {next(iter(file['labels']))}; kto and bco need both")


def write_skipped(path: Path, dropped: Iterable[Dropped]) -> None:
    """Write the rows that were dropped, with their reasons, as JSON lines."""
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(dataclasses.asdict(row), default=str) + "\n" for row in dropped)
