"""GGUF files that are already converted: any content, and the folder of a tiny model in a cache of the test's own."""

from __future__ import annotations

from pathlib import Path

from helpers import save_model
from lightrlhf.storage.checkpoint import write_folder
from lightrlhf.storage.gguf_files import FOLDER, folder_of


def converted(file: Path, cache: Path, tokenizer) -> Path:
    """Write `file` and, in `cache`, the folder that its name is resolved to; returns that folder."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"GGUF")
    folder = cache / FOLDER / folder_of(file).name
    folder.parent.mkdir(parents=True, exist_ok=True)
    write_folder(folder, lambda partial: _write(partial, file, tokenizer))
    return folder


def _write(folder: Path, file: Path, tokenizer) -> None:
    save_model("llama", folder, tokenizer)
    tokenizer.save_pretrained(folder)
    (folder / "README.md").write_text(f"Converted from `{file.name}`.\nLicence: apache-2.0.\n")
