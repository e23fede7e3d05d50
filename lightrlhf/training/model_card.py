"""Model cards: the README.md of a checkpoint. What was trained, from what, how, with which results, and how to use it.

A card goes to the hub with its checkpoint, so paths in it are their last two parts. Left out: metrics in the header
(`model-index`), which wants a dataset of the hub for each.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightrlhf.cli.errors import UsageError
from lightrlhf.cli.hub import is_gguf, is_on_hub
from lightrlhf.gguf.files import describe_file
from lightrlhf.storage.hub import shorten_paths
from lightrlhf.storage.run_dir import locate, read_arg, read_args
from lightrlhf.training.provenance import versions

STARTS = ("sft_experiment_dir", "model_name")  # flags of the model that a run starts from, the later stage first
LICENCE = re.compile(r"Licence: ([\w.-]+?)\.(?:\s|$)")  # in the description of a GGUF file
USE = """```python
from transformers import {model}, AutoTokenizer

folder = "."  # a checkpoint, or its name on the hub
model, tokenizer = {model}.from_pretrained(folder{more}), AutoTokenizer.from_pretrained(folder)
```
"""


def model_card(
    title: str,
    program: str,
    summary: str,
    args: Mapping[str, Any],
    results: Mapping[str, float] | Sequence[str] = (),
    given: Mapping[str, str] | None = None,
    header: Mapping[str, Any] | None = None,
    use: str | None = None,
) -> str:
    """A Hugging Face model card in Markdown.

    args: flags by name, those without a value left out; results: values by name, or the lines of a table; given:
    objects that `train` was called with, by name; header: fields of the card's YAML that are others than the flags
    say; use: how to use it, where that is not by transformers.
    """
    from huggingface_hub import ModelCardData

    stages = lineage(args)
    root, root_line = stages[0] if stages else (None, "")
    is_adapter = args.get("finetune_mode") == "lora" and not args.get("merge")
    data = ModelCardData(
        base_model=root if root and is_on_hub(root) else None,
        datasets=hub_datasets(args.get("data_dir")) or None,
        license=licence(root, root_line) if root else None,
        library_name="peft" if is_adapter else "transformers",
        pipeline_tag="text-classification" if program == "rm" else "text-generation",
        tags=["lightrlhf", program],
    )
    for name, value in (header or {}).items():
        setattr(data, name, value)
    has_scores = data.pipeline_tag == "text-classification"
    how = use or USE.format(
        model="AutoModelForSequenceClassification" if has_scores else "AutoModelForCausalLM",
        more=", num_labels=1" if has_scores else "",
    )
    made = ", ".join(f"{name} {number}" for name, number in versions().items())
    lines = ["---", data.to_yaml(), "---", f"# {title}", "", summary, "", "## How to use it", "", how]
    if isinstance(results, Mapping):
        known = {name: value for name, value in results.items() if math.isfinite(value)}
        results = ["| result | value |", "|---|---|", *(f"| {k} | {v:.4f} |" for k, v in known.items())]
    if len(results) > 2:  # a heading and its rule alone are left out
        lines += ["## Results", "", *results, ""]
    if stages:
        lines += ["## Lineage", "", *(f"{number}. {line}" for number, (_, line) in enumerate(stages, start=1))]
        taught = f", taught by {quote(args['teacher'])}" if args.get("teacher") else ""
        lines += [f"{len(stages) + 1}. this model, by `lightrlhf.{program}`{taught}", ""]
    if given:
        lines += ["| given from Python | |", "|---|---|", *(f"| {name} | {kind} |" for name, kind in given.items()), ""]
    lines += ["## Flags", "", f"With {made}.", "", "| argument | value |", "|---|---|"]
    lines += [f"| {name} | {shorten_paths(value)} |" for name, value in args.items() if value not in (None, [])]
    return "\n".join(lines) + "\n"


def lineage(args: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(name, line of a card) of the ancestors of a run with these flags: a pretrained model, then runs, in order.

    Empty where it starts from nothing. A run that is gone by now, or whose arguments were changed, is the first.
    """
    name = next((args[flag] for flag in STARTS if args.get(flag)), None)
    if name is None:
        return []
    if is_gguf(name):
        with suppress(UsageError):  # a file that is gone by now
            return [(name, describe_file(name))]
    elif not is_on_hub(name):
        with suppress(UsageError):
            if before := read_args(name):
                flag = next((flag for flag in STARTS if before.get(flag)), None)
                data = f" on {quote(before['data_dir'])}" if before.get("data_dir") else ""
                line = f"{quote(name)}, by `lightrlhf.{before.get('program')}`{data}"
                return [*lineage({flag: locate(name, flag)} if flag else {}), (name, line)]
    return [(name, quote(name))]


def licence(name: str, line: str) -> str | None:
    """Licence of a pretrained model as its own card or its line in a lineage has it; None when that is unknown.

    Nothing is fetched: the card is in the model's folder, or in the hub's cache.
    """
    from huggingface_hub import ModelCard, try_to_load_from_cache

    if is_gguf(name):
        found = LICENCE.search(line)
        return found[1] if found else None
    with suppress(ValueError, OSError):  # of a card whose header cannot be read, or a name that no model can have
        card = Path(name, "README.md") if Path(name).is_dir() else try_to_load_from_cache(name, "README.md")
        if isinstance(card, str | Path) and Path(card).is_file():
            return ModelCard.load(card).data.license
    return None


def hub_datasets(folders: Any) -> list[str]:
    """Datasets of the hub that prepared data came from."""
    found = []
    for folder in folders if isinstance(folders, list) else [folders] if folders else []:
        with suppress(UsageError):
            name = read_arg(folder, "dataset_name")
            if isinstance(name, str) and is_on_hub(name):
                found.append(name)
    return found


def quote(value: Any) -> str:
    """Names as code, joined by +."""
    return " + ".join(f"`{shorten_paths(one)}`" for one in (value if isinstance(value, list) else [value]))
