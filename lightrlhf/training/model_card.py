"""Model cards: the README.md of a checkpoint. What was trained, from what, how, and with which results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from lightrlhf.cli.args import is_gguf
from lightrlhf.cli.errors import UsageError
from lightrlhf.models.names import starting_model
from lightrlhf.storage.gguf_files import described
from lightrlhf.storage.run_dir import pretrained, stored


def model_card(
    title: str,
    program: str,
    summary: str,
    args: Mapping[str, Any],
    results: Mapping[str, float] | Sequence[str] = (),
    given: Mapping[str, str] | None = None,
) -> str:
    """A Hugging Face model card in Markdown.

    args: flags by name, those that are None left out; results: values by name, or the lines of a table; given: objects
    that `train` was called with, by name.
    """
    lines = ["---", "library_name: transformers", f"tags: [lightrlhf, {program}]", "---", f"# {title}", "", summary, ""]
    if given:
        lines += ["| given from Python | |", "|---|---|", *(f"| {name} | {kind} |" for name, kind in given.items()), ""]
    lines += ["| argument | value |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in args.items() if value is not None]
    if isinstance(results, Mapping):
        results = ["| result | value |", "|---|---|", *(f"| {k} | {v:.4f} |" for k, v in results.items())]
    if results:
        lines += ["", *results]
    return "\n".join(lines) + "\n"


def described_base(args: Any) -> str | None:
    """The GGUF file that a run goes back to, with its licence; None when it goes back to no such file."""
    name, flag = starting_model(args)
    with suppress(UsageError):  # a run from nothing, or a file that is gone by now
        first = pretrained(name) if name and stored(name, "program") else name
        return described(first, flag) if first and is_gguf(first) else None
    return None
