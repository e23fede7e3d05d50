"""What is on disk: every file, folder and link below some folders, to see that nothing has changed."""

import hashlib
from pathlib import Path


def tree(*folders: Path) -> dict[str, str]:
    """By path the hash of a file's bytes, the target of a link, nothing of a folder."""
    found = {}
    for path in (path for folder in folders for path in (folder, *folder.rglob("*"))):
        if path.is_symlink():
            found[str(path)] = str(path.readlink())
        else:
            found[str(path)] = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
    return found
