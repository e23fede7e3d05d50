"""The exchange folder: where a trainer writes the weights that servers load, a new folder for each version.

A version's folder appears complete or not at all, and its name is never reused. The newest two are kept, since a server
may still read the previous one. The exchange folder is named by the trainer's process and removed when the trainer
ends; the files of a killed trainer are removed by the next one that starts on the same machine.

Left out: transfer without files, and cleaning up on machines other than the trainer's.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from contextlib import suppress
from pathlib import Path

from lightrlhf.cli.errors import UsageError
from lightrlhf.generation.vllm import Target
from lightrlhf.models.frozen import is_held
from lightrlhf.models.roles import Policy
from lightrlhf.models.saving import export_for_servers
from lightrlhf.storage.locks import LOCK, Lock, lock_folder
from lightrlhf.storage.temporary import find_left, new_mark
from lightrlhf.storage.writing import make_folder, writing

MEMORY = Path("/dev/shm")  # a file system in memory, on Linux
FOLDER = "LIGHTRLHF_EXCHANGE_DIR"  # environment variable that names another folder
KEPT, ROOM = 2, 1.05  # versions, and their size beside their numbers
PREFIX = "lightrlhf"


def choose_root(size: int) -> Path:
    """Folder that the servers see, for versions of `size` bytes.

    It is the one of LIGHTRLHF_EXCHANGE_DIR, which servers on other machines need; else a file system in memory that has
    room for the versions that are kept; else the temporary folder (TMPDIR).
    """
    if named := os.environ.get(FOLDER):
        return Path(named)
    has_room = os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > ROOM * KEPT * size
    return MEMORY if has_room else Path(tempfile.gettempdir())


class Exchange:
    """The folder of one trainer below `root`; versions of it begin with its own token.

    Raises: UsageError when it cannot be written.
    """

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        mark = new_mark()
        self.token = mark.rpartition("-")[2]
        with writing(self.name, error=UsageError):
            make_folder(self.root)
        self._remove_left()
        self.folder = self.root / f"{PREFIX}-{mark}"
        lock = lock_folder(self.folder, "the exchange folder")
        self._end = weakref.finalize(self, _remove, self.folder, lock, os.getpid())
        self.folder.chmod(0o755)  # a server may run as another user

    def write(self, policy: Policy, step: int, base_dir: Path, as_adapter: bool = False) -> Target:
        """Write the weights that a policy has at a step; the versions before the last one go.

        base_dir: where the base of adapters is stored, if it is nowhere yet.
        Raises: UsageError when there is no room, RunFailure when they cannot be written.
        """
        version = f"{self.token}-{step}"
        place, partial = self.folder / f"version-{step}", self.folder / "partial"
        self._check_space(policy)
        mine = sorted(self.folder.glob("version-*"), key=lambda path: path.stat().st_mtime_ns)
        for old in mine[: 1 - KEPT]:
            shutil.rmtree(old, ignore_errors=True)
        with writing(self.name):  # neither hashed nor synchronised: no one reads it after a crash
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            export_for_servers(policy, partial, base_dir, as_adapter)
            for path in (partial, *partial.rglob("*")):  # a server may run as another user
                path.chmod(0o755 if path.is_dir() else 0o644)
            partial.rename(place)
        return Target(place, version, as_adapter)

    def close(self) -> None:
        """Remove the folder, which the end of the process does, too."""
        self._end()

    def _check_space(self, policy: Policy) -> None:
        needed, free = version_bytes(policy), shutil.disk_usage(self.root).free
        if free < needed * ROOM:
            raise UsageError(
                f"{self.name} has {free / 2**30:.1f} GiB free, the weights take up to {needed / 2**30:.1f} GiB a "
                f"version; free space there, or name in {FOLDER} a folder with more room that the servers see"
            )

    @property
    def name(self) -> str:
        """The folder, as errors name it."""
        return f"weights for servers: {self.root}"

    def _remove_left(self) -> None:
        """Remove folders of trainers of this machine that were killed: their processes and locks are gone."""
        for folder in find_left(self.root, f"{PREFIX}-"):
            if folder.is_symlink() or not folder.is_dir():
                continue
            with suppress(UsageError):
                lock = Lock(folder / LOCK, str(folder))  # its own lock, which this process does not have either
                if lock.handle is not None:  # where there are no locks nothing says whether the trainer lives
                    _remove(folder, lock, os.getpid())


def version_bytes(policy: Policy) -> int:
    """Bytes of the weights that a server loads, at most."""
    least = 4 if is_held(policy.model) else 1  # merged weights are float32
    return sum(tensor.numel() * max(tensor.element_size(), least) for tensor in policy.model.state_dict().values())


def _remove(folder: Path, lock: Lock, owner: int) -> None:
    if os.getpid() == owner:  # not a forked child
        with suppress(OSError):
            for path in folder.iterdir():
                if path.name != LOCK:  # which goes last: what is left after a kill is known to be unused
                    shutil.rmtree(path, ignore_errors=True)
        lock.release()
        shutil.rmtree(folder, ignore_errors=True)
