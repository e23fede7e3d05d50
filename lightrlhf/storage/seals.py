"""Seals: `manifest.json` beside files holds the SHA-256 of each as it was written, compared as they are read.

A seal binds content to a name, so a test split copied over the training split is noticed as a flipped bit is. A
checkpoint and a stored base are written and sealed whole; in a folder of prepared data, and in an experiment dir,
only what is read is compared. Files that were changed on purpose are accepted by
`python -m lightrlhf.storage.seals FOLDER`, which seals the folder as it is now.

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

from lightrlhf.cli.errors import UsageError, one_line_errors
from lightrlhf.storage.temporary import temporary_path
from lightrlhf.storage.writing import sync_folder, write_text, writing

MANIFEST = "manifest.json"
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


def read_manifest(folder: Path) -> dict[str, str]:
    """SHA-256 by file name. Raises: FileNotFoundError, or ValueError when the manifest is damaged."""
    try:
        hashes = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise
    except (OSError, RecursionError) as problem:
        raise ValueError(f"{MANIFEST} cannot be read: {problem}") from None
    if not isinstance(hashes, dict) or not all(isinstance(one, str) for one in hashes.values()):
        raise ValueError(f"{MANIFEST} holds no hashes")
    return hashes


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
    """Note the hashes of files that were written to a folder; a name may be a folder in it.

    Other files keep the hashes they had (in `before`, which `folder` will replace); in a folder that had no
    manifest their present hashes are noted. Raises: OSError.
    """
    names, earlier = list(names), before or folder
    try:
        hashes = read_manifest(earlier)
    except FileNotFoundError:
        hashes = {name: sha256(earlier / name) for name in sealed_files(earlier) if not _within(name, names)}
    except ValueError:
        hashes = {}  # a damaged manifest: its files then count as added, until the folder is sealed again
    hashes = {name: one for name, one in hashes.items() if (earlier / name).is_file() and not _within(name, names)}
    hashes |= {name: sha256(folder / name) for name in sealed_files(folder) if _within(name, names)}
    write_text(folder / MANIFEST, json.dumps(hashes, indent=1, sort_keys=True))


def check_sealed(folder: Path, names: Iterable[str], verify: bool = True, remedy: str = "") -> None:
    """Compare files that are about to be read with the folder's seal; a name may be a folder, whose files all count.

    A folder that was prepared before there were seals is read with one warning. verify False: nothing is compared;
    remedy: how to go on, by default that for prepared data.
    Raises: UsageError naming the first file that is not what was written, and how to go on.
    """
    if not verify:
        return
    remedy = remedy or f"prepare it again, {accepting(folder)}, or give --verify False"
    try:
        hashes = read_manifest(folder)
    except FileNotFoundError:
        return _warn_unsealed(str(folder))
    except ValueError:
        raise UsageError(f"{folder / MANIFEST} is damaged; {remedy}") from None
    if changed := _first_change(folder, _expanded(folder, names, hashes), hashes):
        raise UsageError(f"{folder}/{changed}; {remedy}")


def damage(folder: Path) -> str | None:
    """What is wrong with a folder by its manifest, the first that is found; None if nothing is."""
    try:
        hashes = read_manifest(folder)
    except FileNotFoundError:
        return f"it has no {MANIFEST}"
    except ValueError:
        return f"{MANIFEST} cannot be read"
    return _first_change(folder, sorted({*sealed_files(folder), *hashes}), hashes)


def _first_change(folder: Path, names: Iterable[str], hashes: dict[str, str]) -> str | None:
    """The first of these files that is not as it was sealed, and what is wrong with it."""
    for name in names:
        if not (folder / name).is_file():
            return f"{name} is missing"
        if name not in hashes:
            return f"{name} was added after the folder was written"
        if sha256(folder / name) != hashes[name]:
            return f"{name} is not what was written"
    return None


def _within(name: str, parents: Sequence[str]) -> bool:
    """Whether a name is one of `parents`, or lies in one of them."""
    return any(name == parent or name.startswith(f"{parent}/") for parent in parents)


def _expanded(folder: Path, names: Iterable[str], hashes: dict[str, str]) -> Iterator[str]:
    """The files of these names, on disk or sealed; a single file that is neither is left out."""
    for name in names:
        sealed = {file for file in hashes if _within(file, [name])}
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
    """Seal folders as they are now, and print what had changed."""
    parser = argparse.ArgumentParser(prog="python -m lightrlhf.storage.seals", description=main.__doc__)
    parser.add_argument("folder", nargs="+", type=Path, help="prepared data, a run, a checkpoint or a stored base")
    folders: list[Path] = parser.parse_args(argv).folder
    for folder in folders:
        if not folder.is_dir():
            raise UsageError(f"{folder} is not a folder")
        if not any((folder / name).is_file() for name in OURS):
            raise UsageError(f"{folder} is neither prepared data nor a run, a checkpoint or a stored base")
    for folder in folders:
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
