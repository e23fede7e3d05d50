"""Runs programs that a model wrote, each in a fresh process that is shut in and thrown away.

What holds where:

- always: `python -I` in an empty folder with a clean environment; limits on time, memory, file size, open files and
  output; the process group is killed at the end; the process gets one input and never a test's expected value.
- where the kernel grants it (Linux 5.13, no privilege needed): Landlock (nothing may be written, only Python's own
  files read), seccomp (no process, no network, no signal), namespaces as a further layer.

Without Landlock and seccomp a program could read the trainer's files and memory, so running it is refused until the
environment variable `LIGHTRLHF_RUN_UNISOLATED_CODE=1` says so.

Left out: other languages, and programs that need files.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from lightrlhf.cli.errors import RunFailure

CHILD = Path(__file__).with_name("sandbox_child.py")
PERMISSION = "LIGHTRLHF_RUN_UNISOLATED_CODE"
SYSTEM_FILES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/usr/share/zoneinfo")
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")


@dataclass(frozen=True)
class Limits:
    """What one run may use."""

    seconds: float = 4.0  # of processor time; of the clock on the wall twice that, as the machine may be busy
    memory: int = 2**30  # bytes of address space
    output: int = 2**20  # bytes written
    processes: int = 256  # of the user, where the kernel does not forbid new ones altogether


@dataclass(frozen=True)
class Outcome:
    """How a run ended. `machinery` means that the program never got to run, which is not its fault."""

    kind: Literal["ran", "compile_error", "runtime_error", "time_out", "machinery"]
    output: str = ""  # what it printed
    answer: Any = None  # what the function returned, a list of one value; None when nothing valid came


def run_program(
    program: str,
    text: str = "",
    function: str | None = None,
    arguments: list[Any] | None = None,
    limits: Limits = Limits(),
) -> Outcome:
    """Run `program` with `text` as its input, or call `function(*arguments)` in it.

    Raises: RunFailure when the kernel grants no isolation and nobody allowed to run without.
    """
    job = {
        "program": program,
        "function": function,
        "arguments": arguments or [],
        "limits": asdict(limits),
        "paths": [sysconfig.get_path("purelib")],
        "readable": readable_files(),
        "must_isolate": os.environ.get(PERMISSION) != "1",
    }
    if not hasattr(os, "pidfd_open"):
        raise RunFailure("model-written programs can be run on Linux only")
    return _run(job, text, limits)


def readable_files() -> list[str]:
    """What a program may read: Python and its libraries."""
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    return [*(sysconfig.get_path(name) for name in names), f"{sys.base_prefix}/lib", *SYSTEM_FILES, *DEVICES]


def _run(job: dict[str, Any], text: str, limits: Limits) -> Outcome:
    try:
        with tempfile.TemporaryFile() as given:
            given.write(text.encode("utf-8", "replace"))
            given.seek(0)
            layers, status, output, code = _spawn(job, given, limits)
    except OSError:  # no process, no memory, no room for the temporary file
        return Outcome("machinery")
    if layers is None:
        return Outcome("machinery")
    if job["must_isolate"] and not {"landlock", "seccomp"} <= set(layers):
        raise RunFailure(
            f"this kernel grants no {' and '.join(sorted({'landlock', 'seccomp'} - set(layers)))}, so a program that a "
            f"model wrote could read your files; to run it all the same set {PERMISSION}=1, best inside a container"
        )
    if status[:1] != ["true"]:
        return Outcome("compile_error")
    if code is None:
        return Outcome("time_out")
    if code != 0:
        return Outcome("runtime_error")
    return Outcome("ran", output, _answer(status[1:]))


def _answer(lines: list[str]) -> list[Any] | None:
    """The one answer of a called function, as plain data in a list, or None."""
    if len(lines) != 1:
        return None
    try:
        return [json.loads(lines[0])]
    except (ValueError, RecursionError):
        return None


def _spawn(job: dict, given: Any, limits: Limits) -> tuple[list[str] | None, list[str], str, int | None]:
    """(layers in force or None, further status lines, printed text, exit status or None after a time-out)."""
    if os.environ.get(PERMISSION) == "1":
        _hide_memory()
    environment = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "OPENBLAS_NUM_THREADS": "1"}
    status_read, status_write = os.pipe()
    with tempfile.TemporaryDirectory(prefix="solution-") as empty, tempfile.TemporaryFile() as job_file:
        job_file.write(json.dumps(job).encode())
        job_file.seek(0)
        descriptors = (job_file.fileno(), status_write)
        numbers = map(str, (*descriptors, os.getpid()))
        command = [sys.executable, "-I", "-S", "-B", "-X", "utf8", str(CHILD), *numbers]
        try:
            process = subprocess.Popen(
                command,
                stdin=given,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                cwd=empty,
                env=environment,
                pass_fds=descriptors,
                start_new_session=True,
            )
        except BaseException:
            os.close(status_read)
            raise
        finally:
            os.close(status_write)
        with process, open(status_read, "rb", buffering=0) as status:
            try:
                texts, finished = _collect(process, status, limits)
            finally:
                os.killpg(process.pid, signal.SIGKILL)  # before it is reaped, so that the number is still its own
    code = process.returncode if finished else None
    too_much = len(texts["output"]) > limits.output
    lines = texts["status"].decode("utf-8", "replace").splitlines()
    layers = json.loads(lines[0]) if lines else None
    return layers, lines[1:], texts["output"].decode("utf-8", "replace"), 1 if too_much and code == 0 else code


def _collect(process: subprocess.Popen, status: Any, limits: Limits) -> tuple[dict[str, bytearray], bool]:
    """What came out until the process ended, spoke too much, or its time was over; and whether it ended by itself."""
    deadline = time.monotonic() + 2 * limits.seconds
    texts = {"output": bytearray(), "status": bytearray()}
    process_fd = os.pidfd_open(process.pid)
    with selectors.DefaultSelector() as selector:
        try:
            streams = {"output": process.stdout.fileno(), "status": status.fileno()}
            for name, stream in streams.items():
                os.set_blocking(stream, False)
                selector.register(stream, selectors.EVENT_READ, name)
            selector.register(process_fd, selectors.EVENT_READ, None)
            while (left := deadline - time.monotonic()) > 0:
                ready = selector.select(left)
                for key, _ in ready:
                    if key.data and not _read(key.fd, texts[key.data]):
                        selector.unregister(key.fd)
                if max(map(len, texts.values())) > limits.output:
                    return texts, True  # killed for it below, which counts as a runtime error
                if any(key.data is None for key, _ in ready):
                    for name, stream in streams.items():
                        while len(texts[name]) <= limits.output and _read(stream, texts[name]):
                            pass
                    return texts, True
            return texts, False
        finally:
            os.close(process_fd)


def _read(stream: int, into: bytearray) -> bool:
    """Read once; whether there was anything."""
    try:
        data = os.read(stream, 2**16)
    except BlockingIOError:
        return False
    into += data
    return bool(data)


def _hide_memory() -> None:
    """Without a kernel sandbox, keep other processes of this user out of this one's memory and environment."""
    import ctypes

    ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE
