"""Seals: `manifest.json` beside files holds the SHA-256 of each as it was written, compared as they are read.

A seal binds content to a name, so a test split copied over the training split is noticed as a flipped bit is. A
checkpoint and a stored base are written and sealed whole; in a folder of prepared data, and in an experiment dir,
only what is read is compared. A large file of data that has the size and date noted in the manifest is taken for
unchanged, so that a start reads no data as a whole; `python -m lightrlhf.storage.seals --verify FOLDER` compares the
content of all files. Files that were changed on purpose are accepted by `python -m lightrlhf.storage.seals FOLDER`,
which seals the folder as it is now.

Left out: signatures. A seal finds accidents and mistakes, not somebody who writes a new manifest.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from lightrlhf.cli.errors import UsageError, one_line_errors
from lightrlhf.storage.temporary import temporary_path
from lightrlhf.storage.writing import sync_folder, write_text, writing

MANIFEST = "manifest.json"
LARGE = 1 << 24  # bytes from which size and date are compared instead of the content
OURS = (MANIFEST, "args.json", "config.json", "adapter_config.json", "tokenizer_config.json", "report.json")


def write_folder(target: Path, write: Callable[[Path], None], replace: bool = False) -> None:
    """Write a folder atomically, with a manifest of hashes; `write(folder)` writes its files.

    replace: the folder may be there, and is then removed. Raises: RunFailure when it cannot be written.
    """
    partial = temporary_path(target)
    with writing(target, kept=lambda: f"{partial} is left, remove it" if partial.exists() else ""):
        try:
            partial.mkdir()
            write(partial)
            hashes = {
                str(file.relative_to(partial)): _hash_and_sync(file)
                for file in sorted(partial.rglob("*"))
                if file.is_file()
            }
            write_text(partial / MANIFEST, json.dumps(hashes, indent=1, sort_keys=True))
            for folder in (path for path in (partial, *partial.rglob("*")) if path.is_dir()):
                sync_folder(folder)
            if replace and target.exists():
                shutil.rmtree(target)
            partial.rename(target)  # refused where another folder with files has appeared
        except BaseException:  # an interrupt, too
            shutil.rmtree(partial, ignore_errors=True)
            raise
        sync_folder(target.parent)


def sha256(file: Path) -> str:
    """SHA-256 of a file's content, in hexadecimal."""
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        for block in iter(lambda: stream.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


def _hash_and_sync(file: Path) -> str:
    with file.open("rb") as stream:
        os.fsync(stream.fileno())
    return sha256(file)


class Noted(NamedTuple):
    """A file in a manifest; `write_folder` notes the hash alone."""

    sha256: str
    bytes: int = -1
    mtime_ns: int = -1

    @classmethod
    def of(cls, file: Path) -> Noted:
        """A file as it is now."""
        before = file.stat()
        return cls(sha256(file), before.st_size, before.st_mtime_ns)

    def has_date_of(self, file: Path) -> bool:
        """Whether a file is large and has the noted size and date."""
        now = file.stat()
        return now.st_size >= LARGE and self[1:] == (now.st_size, now.st_mtime_ns)


def read_manifest(folder: Path) -> dict[str, str]:
    """SHA-256 by file name. Raises: FileNotFoundError, or ValueError when the manifest is damaged."""
    return {name: one.sha256 for name, one in read_notes(folder).items()}


def read_notes(folder: Path) -> dict[str, Noted]:
    """The manifest by file name. Raises: FileNotFoundError, or ValueError when it is damaged."""
    try:
        stored = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        return {name: Noted(one) if isinstance(one, str) else Noted(**one) for name, one in stored.items()}
    except FileNotFoundError:
        raise
    except (OSError, RecursionError) as problem:
        raise ValueError(f"{MANIFEST} cannot be read: {problem}") from None
    except (TypeError, AttributeError):
        raise ValueError(f"{MANIFEST} holds no hashes") from None


def content_hash(file: Path) -> str:
    """SHA-256 of a file; of a large file whose size and date are in the manifest beside it, the noted one."""
    try:
        noted = read_notes(file.parent).get(file.name)
    except (FileNotFoundError, ValueError):
        noted = None
    return noted.sha256 if noted and noted.has_date_of(file) else sha256(file)


def sealed_files(folder: Path) -> list[str]:
    """Names of the files that a manifest lists: all in the folder, behind links too, but the manifest and hidden ones.

    Nothing loads a hidden file; file managers and network file systems add them.
    """
    names = []
    for place, folders, files in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        names += [(Path(place) / name).relative_to(folder).as_posix() for name in files if not name.startswith(".")]
    return sorted(name for name in names if name != MANIFEST)


def accepting(folder: Path) -> str:
    """How to accept the files of a folder that were changed on purpose."""
    return f"accept it by python -m lightrlhf.storage.seals {folder}"


def seal(folder: Path, names: Iterable[str], before: Path | None = None) -> None:
    """Note the hashes, sizes and dates of files that were written to a folder; a name may be a folder in it.

    Other files keep the notes they had (in `before`, which `folder` will replace); in a folder that had no manifest
    they are noted as they are now. Raises: OSError.
    """
    names, earlier = list(names), before or folder
    try:
        notes = read_notes(earlier)
    except FileNotFoundError:
        notes = {name: Noted.of(earlier / name) for name in sealed_files(earlier) if not _within(name, names)}
    except ValueError:
        notes = {}  # a damaged manifest: its files then count as added, until the folder is sealed again
    notes = {name: one for name, one in notes.items() if (earlier / name).is_file() and not _within(name, names)}
    notes |= {name: Noted.of(folder / name) for name in sealed_files(folder) if _within(name, names)}
    stored = {name: one._asdict() for name, one in notes.items()}
    write_text(folder / MANIFEST, json.dumps(stored, indent=1, sort_keys=True))


def check_sealed(folder: Path, names: Iterable[str], verify: bool = True, remedy: str = "") -> None:
    """Compare files that are about to be read with the folder's seal; a name may be a folder, whose files all count.

    A folder that was prepared before there were seals is read with one warning. Of a large file size and date are
    compared, and the content if they differ. verify False: nothing is compared;
    remedy: how to go on, by default that for prepared data.
    Raises: UsageError naming the first file that is not what was written, and how to go on.
    """
    if not verify:
        return
    remedy = remedy or f"prepare it again, {accepting(folder)}, or give --verify False"
    try:
        notes = read_notes(folder)
    except FileNotFoundError:
        return _warn_unsealed(str(folder))
    except ValueError:
        raise UsageError(f"{folder / MANIFEST} is damaged; {remedy}") from None
    if changed := _first_change(folder, _expanded(folder, names, notes), notes, by_date=True):
        raise UsageError(f"{folder}/{changed}; {remedy}")


def damage(folder: Path) -> str | None:
    """What is wrong with a folder by its manifest, the first that is found; None if nothing is."""
    try:
        notes = read_notes(folder)
    except FileNotFoundError:
        return f"it has no {MANIFEST}"
    except ValueError:
        return f"{MANIFEST} cannot be read"
    return _first_change(folder, sorted({*sealed_files(folder), *notes}), notes)


def _first_change(folder: Path, names: Iterable[str], notes: dict[str, Noted], by_date: bool = False) -> str | None:
    """The first of these files that is not as it was sealed, and what is wrong with it; by_date: of large files."""
    for name in names:
        if not (folder / name).is_file():
            return f"{name} is missing"
        if name not in notes:
            return f"{name} was added after the folder was written"
        if by_date and notes[name].has_date_of(folder / name):
            continue
        if sha256(folder / name) != notes[name].sha256:
            return f"{name} is not what was written"
    return None


def _within(name: str, parents: Sequence[str]) -> bool:
    """Whether a name is one of `parents`, or lies in one of them."""
    return any(name == parent or name.startswith(f"{parent}/") for parent in parents)


def _expanded(folder: Path, names: Iterable[str], notes: dict[str, Noted]) -> Iterator[str]:
    """The files of these names, on disk or sealed; a single file that is neither is left out."""
    for name in names:
        sealed = {file for file in notes if _within(file, [name])}
        if (folder / name).is_dir():
            sealed |= {f"{name}/{file}" for file in sealed_files(folder / name)}
        elif (folder / name).exists():
            sealed.add(name)
        yield from sorted(sealed)


@functools.cache  # once a folder and process
def _warn_unsealed(folder: str) -> None:
    if os.environ.get("LOCAL_RANK", "0") == "0":
        line = f"note: {folder} has no {MANIFEST}, so damage to its files goes unnoticed"
        print(f"{line}; seal it: python -m lightrlhf.storage.seals {folder}", flush=True)


@one_line_errors
def main(argv: list[str] | None = None) -> None:
    """Seal folders as they are now, and print what had changed; or verify them."""
    parser = argparse.ArgumentParser(prog="python -m lightrlhf.storage.seals", description=main.__doc__)
    parser.add_argument("folder", nargs="+", type=Path, help="prepared data, a run, a checkpoint or a stored base")
    parser.add_argument("--verify", action="store_true", help="compare the content of all files with the seal instead")
    args = parser.parse_args(argv)
    folders: list[Path] = args.folder
    for folder in folders:
        if not folder.is_dir():
            raise UsageError(f"{folder} is not a folder")
        if not any((folder / name).is_file() for name in OURS):
            raise UsageError(f"{folder} is neither prepared data nor a run, a checkpoint or a stored base")
    for folder in folders if args.verify else ():
        if found := damage(folder):
            raise UsageError(f"{folder}: {found}")
        print(f"{folder}: {len(read_manifest(folder))} files are as they were written")
    for folder in () if args.verify else folders:
        try:
            before = read_manifest(folder)
        except (FileNotFoundError, ValueError):
            before = {}
        try:
            seal(folder, sealed_files(folder))
        except OSError as problem:
            raise UsageError(f"{folder / MANIFEST} cannot be written: {problem.strerror}") from None
        now = read_manifest(folder)
        changed = sorted(name for name, digest in now.items() if before.get(name) != digest)
        print(f"{folder / MANIFEST}: {len(now)} files; new or changed: {', '.join(changed) or 'none'}")


if __name__ == "__main__":
    main()
