"""Sandbox for model-written programs: each runs in a fresh, isolated process that is killed afterwards.

Layers of isolation:

- always: `python -I` in an empty folder with a clean environment; limits on time, memory, file size, open files and
  output; the process group is killed at the end; the process gets one input and never a test's expected value.
- where the kernel supports them (Linux 5.13, no privilege needed): Landlock (no file can be written, only Python's own
  files can be read), seccomp (no process, no network, no signal), namespaces as a further layer.

Without Landlock and seccomp a program could read the trainer's files and memory, so it is refused unless the
environment variable `LIGHTRLHF_RUN_UNISOLATED_CODE=1` permits it.

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
    """Resource limits of one run."""

    seconds: float = 4.0  # CPU time; twice that in wall time, since the machine may be busy
    memory: int = 2**30  # bytes of address space
    output: int = 2**20  # bytes written
    processes: int = 256  # of the user, where the kernel does not forbid new ones entirely


@dataclass(frozen=True)
class Outcome:
    """How a run ended; `machinery`: the sandbox failed before the program ran."""

    kind: Literal["ran", "compile_error", "runtime_error", "time_out", "machinery"]
    output: str = ""  # stdout
    answer: Any = None  # return value of the function in a list of one; None if there is no valid one


def run_program(
    program: str,
    text: str = "",
    function: str | None = None,
    arguments: list[Any] | None = None,
    limits: Limits = Limits(),
) -> Outcome:
    """Run `program` with `text` as its input, or call `function(*arguments)` in it.

    Raises: RunFailure if the kernel supports no isolation and running without is not permitted.
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
        raise RunFailure("model-written programs can only be run on Linux")
    return _run(job, text, limits)


def readable_files() -> list[str]:
    """Files that a program may read: Python and its libraries."""
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
            f"this kernel has no {' and '.join(sorted({'landlock', 'seccomp'} - set(layers)))}, so a model-written "
            f"program could read your files; to run it anyway set {PERMISSION}=1, preferably inside a container"
        )
    if status[:1] != ["true"]:
        return Outcome("compile_error")
    if code is None:
        return Outcome("time_out")
    if code != 0:
        return Outcome("runtime_error")
    return Outcome("ran", output, _answer(status[1:]))


def _answer(lines: list[str]) -> list[Any] | None:
    """The return value of the called function as plain data in a list, or None."""
    if len(lines) != 1:
        return None
    try:
        return [json.loads(lines[0])]
    except (ValueError, RecursionError):
        return None


def _spawn(job: dict[str, Any], given: Any, limits: Limits) -> tuple[list[str] | None, list[str], str, int | None]:
    """(active layers or None, further status lines, printed text, exit status or None after a time-out)."""
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
                texts, finished = _collect(process.pid, process.stdout, status, limits)
            finally:
                os.killpg(process.pid, signal.SIGKILL)  # before it is reaped, so the process id is still its own
    code = process.returncode if finished else None
    too_much = len(texts["output"]) > limits.output
    lines = texts["status"].decode("utf-8", "replace").splitlines()
    layers = json.loads(lines[0]) if lines else None
    return layers, lines[1:], texts["output"].decode("utf-8", "replace"), 1 if too_much and code == 0 else code


def _collect(pid: int, output: Any, status: Any, limits: Limits) -> tuple[dict[str, bytearray], bool]:
    """Output and status until the process ended, wrote too much or timed out; False if it timed out."""
    deadline = time.monotonic() + 2 * limits.seconds
    texts = {"output": bytearray(), "status": bytearray()}
    process_fd = os.pidfd_open(pid)
    with selectors.DefaultSelector() as selector:
        try:
            streams = {"output": output.fileno(), "status": status.fileno()}
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
                    return texts, True  # the caller kills it, which counts as a runtime error
                if any(key.data is None for key, _ in ready):
                    for name, stream in streams.items():
                        while len(texts[name]) <= limits.output and _read(stream, texts[name]):
                            pass
                    return texts, True
            return texts, False
        finally:
            os.close(process_fd)


def _read(stream: int, into: bytearray) -> bool:
    """Read once; whether there was any data."""
    try:
        data = os.read(stream, 2**16)
    except BlockingIOError:
        return False
    into += data
    return bool(data)


def _hide_memory() -> None:
    """Without a kernel sandbox: protect this process's memory and environment from other processes of the user."""
    import ctypes

    ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE
