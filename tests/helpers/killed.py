"""Programs that kill themselves, at a moment or at an event.

As a program: `python killed.py FOLDER PATTERN ROWS DELAY MODULE flags…`. `MODULE`'s main ends by SIGKILL, `DELAY`
seconds after the files of `PATTERN` in `FOLDER` have more than `ROWS` lines in total (-1: after the first of them
exists). As a module: runs in forks of a process that has imported the libraries, so that a kill costs tenths of a
second. Events are what changes a file, and the backward passes and optimiser steps between.
"""

import importlib
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from helpers import last_checkpoint, metrics, unmarked, weights
from helpers.processes import die_when
from helpers.tiny_runs import ITERATED, SAMPLING

At = int | tuple[str, int]
CHANGES = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.symlink", "os.truncate", "shutil.rmtree")


def fork(call: Callable[[], Any], output: Path) -> int:
    """Start `call` in a fork of this process, printing to a file; returns its process id."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        handle = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # not pytest's
        call()
        status = 0
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def wait(pid: int) -> int:
    """The exit status of a fork, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def forked(call: Callable[[], Any], output: Path) -> int:
    """Run `call` in a fork of this process; returns its exit status, negative for a signal."""
    return wait(fork(call, output))


def pair(calls: list[Callable[[], Any]], output: Path) -> list[int]:
    """Start two ranks in forks of this process; returns their process ids."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def of_rank(rank: int) -> Callable[[], Any]:
        def call() -> Any:
            shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "NODE_RANK": 0, "WORLD_SIZE": 2}
            os.environ.update({key: str(value) for key, value in (shared | {"LOCAL_RANK": rank}).items()})
            return calls[rank]()

        return call

    return [fork(of_rank(rank), output) for rank in range(2)]


def wait_for_pair(pids: list[int], ends_both: bool = True) -> list[int]:
    """The exit statuses of two ranks; when one was killed the other is killed, too, unless it is to end by itself."""
    ends: dict[int, int] = {}
    while len(ends) < 2:
        pid, status = os.waitpid(-1, 0)
        if pid in pids:
            ends[pid] = os.waitstatus_to_exitcode(status)
            if ends[pid] < 0 and ends_both and len(ends) < 2:
                os.kill(next(other for other in pids if other != pid), signal.SIGKILL)
    return [ends[pid] for pid in pids]


def with_events(
    call: Callable[[], Any], folder: Path, at: At = 0, tell: Path | None = None, number: int = signal.SIGKILL
) -> Callable[[], None]:
    """A call that gets a signal at its event number `at`, counted from 1, and at all events after it.

    at: 0 for none; or a name and how often it has happened then. tell: file that gets all events; folder: events on
    files are counted below it. An event within `Phases.save` begins with `save `. For a fork only.
    """

    def counted() -> None:
        events = Events(str(folder), at, number)
        try:
            call()
        finally:
            if tell:
                tell.write_text(json.dumps(events.seen))

    return counted


def state_of(run: Path, program: str) -> dict:
    """The state that a resumed run must share with an uninterrupted one."""
    runs = [run] if program not in ITERATED else sorted(run.glob("iteration-*/policy"))
    import torch

    found: dict = {"names": sorted(path.name for path in run.iterdir() if not path.name.startswith(".best"))}
    for number, one in enumerate(runs):
        state = torch.load(last_checkpoint(one) / "resume.pt", weights_only=True)
        found |= {
            f"{number} {name}": state[name] for name in ("optimizers", "schedulers", "extra", "rng", "python_rng")
        }
        found |= {f"{number} weights": weights(last_checkpoint(one)), f"{number} metrics": metrics(one)}
    if program in SAMPLING:
        found["rollouts"] = (run / "rollouts.jsonl").read_bytes()
    if program in ITERATED:
        found["evaluations"] = [path.read_text() for path in sorted(run.glob("iteration-*/evaluation.json"))]
    return found


def differs(one: dict, other: dict) -> str:
    """Names of what differs between two states; empty if nothing does."""
    names = [name for name in {**one, **other} if not same(one.get(name), other.get(name))]
    return f"{', '.join(names)} differ" if names else ""


def same(one: Any, other: Any) -> bool:
    import torch

    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


class Events:
    """Counts events of this process, which gets a signal from one of them on; permanent, so only for forks."""

    def __init__(self, folder: str, at: At, number: int) -> None:
        import torch
        from transformers import modeling_utils

        from lightrlhf.training.learners import Learners
        from lightrlhf.training.metric_log import MetricLog
        from lightrlhf.training.phases import Phases

        self.folder, self.at, self.number, self.seen, self.saving, self.waiting = folder, at, number, [], 0, False
        sys.addaudithook(self._audit)
        self._around(os, "fsync")
        self._around(torch, "save", file=1)
        self._around(modeling_utils, "safe_save_file", file=1)
        for owner, name in ((Learners, "backward"), (Learners, "optimize"), (MetricLog, "log")):
            self._around(owner, name)
        if int(os.environ.get("WORLD_SIZE", 1)) > 1:
            from torch.distributed.tensor import DTensor

            self._around(DTensor, "full_tensor")  # of a sharded weight or state
        phase, save = Phases.phase, Phases.save

        @contextmanager
        def entered(phases: Any, name: str, *rows: Any) -> Iterator[None]:
            with phase(phases, name, *rows):
                self.happens(f"in {name}")
                yield

        def saving(*arguments: Any, **options: Any) -> None:
            self.happens("begins saving")
            self.saving += 1
            save(*arguments, **options)
            self.saving -= 1
            self.happens("has saved")

        Phases.phase, Phases.save = entered, saving

    def happens(self, name: str) -> None:
        """Record an event, and send the signal from event `at` on."""
        self.seen.append(f"{'save ' if self.saving else ''}{name}")
        name, times = self.at if isinstance(self.at, tuple) else ("", self.at)
        if 0 < times <= (self.seen.count(name) if name else len(self.seen)):
            os.kill(os.getpid(), self.number)

    def _audit(self, kind: str, arguments: tuple) -> None:
        if kind not in CHANGES or self.waiting:
            return
        path = arguments[0]
        if kind == "open" and not (isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)):
            return
        is_relative = kind in ("os.remove", "os.rmdir") and len(arguments) > 1 and arguments[-1] not in (-1, None)
        if is_relative or (isinstance(path, str | os.PathLike) and os.fspath(path).startswith(self.folder)):
            self.happens(f"{kind} {unmarked(Path(path).name)}")

    def _around(self, owner: Any, name: str, file: int | None = None) -> None:
        """Events before and after a function; of one that writes a file (its second argument) also in the middle."""
        function = getattr(owner, name)

        def wrapped(*arguments: Any, **options: Any) -> Any:
            self.happens(f"before {name}")
            result = function(*arguments, **options)
            if file is not None and isinstance(arguments[file], str | os.PathLike):
                # as if it came within the write, which a signal that is handled does not end
                if len(self.seen) + 1 == self.at and self.number == signal.SIGKILL:
                    self.waiting = True
                    os.truncate(arguments[file], os.path.getsize(arguments[file]) // 2)
                self.happens(f"within {name}")
            self.happens(f"after {name}")
            return result

        setattr(owner, name, wrapped)


def main() -> None:
    folder, pattern, rows, delay, module, *flags = sys.argv[1:]

    def far_enough() -> bool:
        found = Path(folder).glob(pattern)
        files = [path for path in found if "latest" not in path.parts]  # a link to the newest run
        return bool(files) and (int(rows) < 0 or sum(file.read_bytes().count(b"\n") for file in files) > int(rows))

    die_when(far_enough, float(delay))
    importlib.import_module(module).main(flags)


if __name__ == "__main__":
    main()
