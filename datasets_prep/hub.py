"""Prepared data on the Hugging Face hub: a dataset repository of the files that were written, with a card.

What goes there has no absolute path: of each its last two parts are left. Left out: the rows that were dropped
(`skipped_*.jsonl`), the licence, which the raw dataset has, and streaming of what is there, for programs read folders.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from datasets_prep import report
from lightrlhf.cli.hub import is_on_hub
from lightrlhf.storage.hub import shorten_paths, uploading
from lightrlhf.storage.seals import read_manifest, seal, sealed_files

USE = """```bash
hf download {repository} --repo-type dataset --local-dir data/{name}
```

Then `--data_dir data/{name}` of a program of lightrlhf trains on them, with a model of this tokenizer. In
Python, `lightrlhf.data.splits.load_split("data/{name}", "finetune", "train")` is a sequence of dicts.
"""


def push(folder: Path, repository: str) -> None:
    """Upload prepared data. Raises: RunFailure in one line; the data stays as it is."""
    with (
        uploading(repository, "dataset", f"the data is {folder}") as upload_folder,
        portable(folder, repository) as copy,
    ):
        upload_folder(folder_path=copy, delete_patterns=["*.pt"])  # splits of an earlier upload that are no more


@contextmanager
def portable(folder: Path, repository: str) -> Iterator[Path]:
    """Context manager: a copy of what was written to a folder, sealed, with a card and without absolute paths."""
    summary, stored = (json.loads((folder / name).read_text(encoding="utf-8")) for name in ("report.json", "args.json"))
    text = card(repository, summary)
    summary["arguments"] = {name: shorten_paths(value) for name, value in summary["arguments"].items()}
    summary["dropped"] = [row | {"first": shorten_paths(row["first"])} for row in summary["dropped"]]
    stored = {name: shorten_paths(value) for name, value in stored.items()}
    with TemporaryDirectory(prefix=".upload-", dir=folder.parent) as temporary:
        copy = Path(temporary) / folder.name
        for name in read_manifest(folder):
            if not name.startswith("skipped_"):
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(folder / name, copy / name)
        report.write(copy, summary)
        (copy / "args.json").write_text(json.dumps(stored, indent=2) + "\n", encoding="utf-8")
        seal(copy, sealed_files(copy))
        (copy / "README.md").write_text(text, encoding="utf-8")
        yield copy


def card(repository: str, summary: dict[str, Any]) -> str:
    """The dataset card: where the data comes from, how to use it, its files and the flags."""
    from huggingface_hub import DatasetCardData

    args, name = summary["arguments"], repository.partition("/")[2]
    source = args["dataset_name"]
    data = DatasetCardData(
        source_datasets=[f"extended|{source}"] if is_on_hub(source) else None,
        task_categories=["text-generation"],
        tags=["lightrlhf", *dict.fromkeys(file.split("_")[0] for file in summary["files"])],
        viewer=False,  # that of the hub reads no .pt files
    )
    files = [f"| `{file}.pt` | {one['rows']} | {one['tokens']} |" for file, one in summary["files"].items()]
    flags = [f"| {flag} | {shorten_paths(value)} |" for flag, value in args.items() if value is not None]
    tokenizer = f" with the tokenizer of `{shorten_paths(args['tokenizer_name'])}`" if args["tokenizer_name"] else ""
    lines = [
        *("---", data.to_yaml(), "---", f"# {name}", ""),
        f"Prepared by lightrlhf from `{shorten_paths(source)}`{tokenizer}; counts and examples: [report](report.md).",
        *("", "## How to use them", "", USE.format(repository=repository, name=name)),
        *("## Files", "", "| file | rows | tokens |", "|---|---|---|", *files, ""),
        *("## Flags", "", "| argument | value |", "|---|---|", *flags),
    ]
    return "\n".join(lines) + "\n"
