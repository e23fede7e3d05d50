"""Programs on a disk that fails: forked from one warm process, in which a preloaded library fails the nth write."""

import ctypes
import errno
import json
import mmap
import os
import shutil
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any, NamedTuple

from lightrlhf.programs import PROGRAMS

ERRNOS = (errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EIO)
SOURCE = Path(__file__).with_suffix(".c")


class Orders(ctypes.Structure):
    """What `faulty_disk.c` maps, too."""

    _fields_ = [(name, ctypes.c_int) for name in ("armed", "at", "error", "count", "used")]
    _fields_ += [("folder", ctypes.c_char * 1004), ("log", ctypes.c_char * (1 << 20))]


class Ended(NamedTuple):
    """How a forked program ended; events: the calls that changed the folder, or their number when one was to fail."""

    status: int
    out: str
    err: str
    events: list[tuple[str, str]]
    reached: bool


class WarmProcess:
    """A process that has imported the programs, and forks one for each call."""

    def __init__(self, folder: Path, environment: dict[str, str], fails: bool = True) -> None:
        self.folder = folder
        given = dict(environment)
        self.orders: Any = None
        if fails:
            library, file = folder / "faulty_disk.so", folder / "orders"
            compiler = shutil.which("gcc") or shutil.which("cc") or "cc"
            subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, SOURCE, "-ldl"], check=True)
            file.write_bytes(bytes(ctypes.sizeof(Orders)))
            with file.open("r+b") as handle:
                self.orders = Orders.from_buffer(mmap.mmap(handle.fileno(), 0))
            given |= {"LD_PRELOAD": str(library), "FAULTY_DISK": str(file)}
        command = [sys.executable, "-m", "helpers.faulty_disk"]
        self.process = subprocess.Popen(
            command, env=given, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=folder
        )

    def run(self, program: str, *argv: Any, at: int = 0, number: int = 0, under: Path | None = None) -> Ended:
        """Run `program`'s main; `at`: the call under a folder, counted from 1, that fails with this errno."""
        orders = self.orders
        if orders is not None:
            orders.armed, orders.at, orders.error, orders.count, orders.used = bool(under), at, number, 0, 0
            orders.folder = os.fsencode(under or "")
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps([program, *map(str, argv)]) + "\n")
        self.process.stdin.flush()
        status = int(self.process.stdout.readline())
        out, err = ((self.folder / name).read_text(errors="replace") for name in ("out", "err"))
        events = []
        if orders is not None:
            orders.armed = 0
            lines = bytes(orders.log[: orders.used] if not at else b"").decode().splitlines()
            events = [(call, path) for call, _, path in (line.partition(" ") for line in lines)]
        return Ended(status, out, err, events, orders is not None and 0 < at <= orders.count)

    def close(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait(30)


def _fork(program: str, argv: list[str]) -> int:
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    status = 99
    try:
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        module, _, function = program.partition(":")
        main = getattr(__import__(module, fromlist=["main"]), function or "main")
        try:
            main(argv)
            status = 0
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    try:
        import atexit
        import gc

        gc.collect()  # what a dying process would print of files that cannot be flushed
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


def serve() -> None:
    """Fork a program for each line of standard input, and answer with its exit status."""
    import torch

    torch.set_num_threads(1)
    import lightning.fabric  # noqa: F401
    import matplotlib.figure  # noqa: F401
    import peft  # noqa: F401
    import torch.utils.tensorboard
    import transformers.models.llama.modeling_llama  # noqa: F401

    for program in PROGRAMS.values():
        __import__(program.module)
    for module in ("generic.prepare_data", "cafe.prepare_data", "train_tokenizer"):
        __import__(f"datasets_prep.{module}")
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        program, *argv = json.loads(line)
        answers.write(f"{_fork(program, argv)}\n")
        answers.flush()


if __name__ == "__main__":
    serve()
