"""GGUF files with other kinds and places of tensors, and files that are already converted.

The latter have any content, and the folder of a tiny model in a cache of the test's own.
"""

import struct
from pathlib import Path
from tempfile import NamedTemporaryFile

from helpers import save_model
from lightrlhf.gguf.files import FOLDER, folder_of
from lightrlhf.storage.seals import write_folder


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


def infos(content: bytes) -> dict[str, tuple[int, int, int]]:
    """Of each tensor in the header: the place of its kind there, which its offset follows, its kind and its offset."""
    from gguf import GGUFReader

    with NamedTemporaryFile(suffix=".gguf") as file:
        file.write(content)
        file.flush()
        tensors = GGUFReader(file.name).tensors
    parts = {tensor.name: [int(part.nbytes) for part in tensor.field.parts] for tensor in tensors}
    places = {tensor.name: tensor.field.offset + sum(parts[tensor.name][:4]) for tensor in tensors}
    return {name: (place, *struct.unpack_from("<IQ", content, place)) for name, place in places.items()}


def with_infos(content: bytes, changes: dict[str, tuple[int, int]]) -> bytes:
    """A file with other kinds and offsets of some tensors."""
    changed, found = bytearray(content), infos(content)
    for name, values in changes.items():
        struct.pack_into("<IQ", changed, found[name][0], *values)
    return bytes(changed)
