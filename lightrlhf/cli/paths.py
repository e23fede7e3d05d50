"""Checks of paths that a program reads, before any work."""

from __future__ import annotations

from pathlib import Path

from lightrlhf.cli.latest import why_missing


def check_folder(path: str, flag: str) -> None:
    """Raises: ValueError, one line that names the flag, when a folder does not exist."""
    if not Path(path).is_dir():
        raise ValueError(f"{flag} {path} {why_missing(path)}")


def check_file(path: str, flag: str) -> None:
    """Raises: ValueError, one line that names the flag, when a file does not exist."""
    if not Path(path).is_file():
        raise ValueError(f"{flag} {path} {'is not a file' if Path(path).exists() else 'does not exist'}")
