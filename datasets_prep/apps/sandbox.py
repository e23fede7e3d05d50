"""Sandbox for model-written programs: each runs in a fresh, isolated process that is killed afterwards.

Layers of isolation:

- always: `python -I` in an empty folder with a clean environment; limits on time, memory, file size, open files and
  output; the process group is killed at the end; the process gets one input and never a test's expected value.
- where the kernel supports them (Linux 5.13, no privilege needed): Landlock (no file can be written, only Python's own
  files can be read) and seccomp, a list of the system calls that are allowed (no process, no network, no signal, no
  change of priorities) for x86-64 and arm64.
- where namespaces are permitted, a private view of the files: without it `stat` tells of any path that the user may
  look up whether it exists, its size and times, as Landlock does not govern that.
- as root, another user (nobody), if Python's files are readable for that one; limits on threads do not hold for root.

Without Landlock and seccomp a program could read the trainer's files and memory, so it is refused unless the
environment variable `LIGHTRLHF_RUN_UNISOLATED_CODE=1` permits it.

Left out: other languages, and programs that need files.
"""

from __future__ import annotations

import json
import os
import platform
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

from datasets_prep.apps.known_names import names_in
from lightrlhf.cli.errors import RunFailure

CHILD = Path(__file__).with_name("sandbox_child.py")
PERMISSION = "LIGHTRLHF_RUN_UNISOLATED_CODE"
SYSTEM_FILES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/usr/share/zoneinfo")
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
MACHINES = ("x86_64", "aarch64")  # with a list of system calls in the child
STARVED = 20  # times the seconds of a run: when a machine is too busy to score
NEWEST_LANDLOCK, NAMESPACES = 6, True  # layers of isolation to use, if the kernel has them; tests take them away


@dataclass(frozen=True)
class Limits:
    """Resource limits of one run."""

    seconds: float = 4.0  # CPU time; twice that in wall time, since the machine may be busy
    memory: int = 2**30  # bytes of address space
    output: int = 2**20  # bytes written
    processes: int = 256  # threads; at most twice as many where the kernel counts all of the user's


@dataclass(frozen=True)
class Outcome:
    """How a run ended; `machinery`: the sandbox failed, or the machine killed or starved the program."""

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
        "names": names_in(program),
        "function": function,
        "arguments": arguments or [],
        "limits": asdict(limits),
        "paths": [sysconfig.get_path("purelib")],
        "readable": readable_files(),
        "needed": [sysconfig.get_path("stdlib"), f"{sysconfig.get_path('stdlib')}/lib-dynload"],
        "namespaces": NAMESPACES,
        "landlock": NEWEST_LANDLOCK,
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
        ended = _spawn(job, text, limits)
        layers = None if ended.layers is None else json.loads(ended.layers)
    except (OSError, MemoryError, ValueError, RecursionError):  # no process, no memory, no room for the input
        return Outcome("machinery")
    if layers is None:
        return Outcome("machinery")
    missing = [name for name in ("landlock", "seccomp") if name not in layers]
    if job["must_isolate"] and missing:
        if "seccomp" in missing and platform.machine() not in MACHINES:
            missing[-1] = f"list of system calls for {platform.machine()}"
        raise RunFailure(
            f"this kernel has no {' and '.join(missing)}, so a model-written program could read your files; "
            f"to run it anyway set {PERMISSION}=1, preferably inside a container"
        )
    if ended.how in ("starved", "killed"):
        return Outcome("machinery")
    if ended.status[:1] != ["true"]:
        return Outcome("compile_error")
    if ended.how == "time_out":
        return Outcome("time_out")
    if ended.how != "exited":
        return Outcome("runtime_error")
    return Outcome("ran", ended.output, _answer(ended.status[1:]))


def _answer(lines: list[str]) -> list[Any] | None:
    """The return value of the called function as plain data in a list, or None."""
    if len(lines) != 1:
        return None
    try:
        return [json.loads(lines[0], parse_int=long_int)]
    except (ValueError, RecursionError):
        return None


def long_int(digits: str) -> int:
    """An integer of any length: Python refuses more than 4,300 digits at once."""
    sign, digits = (-1, digits[1:]) if digits[:1] == "-" else (1, digits)
    value = 0
    for start in range(0, len(digits), 4000):
        part = digits[start : start + 4000]
        value = value * 10 ** len(part) + int(part)
    return sign * value


@dataclass(frozen=True)
class _Ended:
    """A child that ended; `starved`: on a machine too busy to run it, `killed`: from outside, as short of memory."""

    how: Literal["exited", "failed", "time_out", "starved", "killed"]
    layers: str | None  # its first line, JSON
    status: list[str]  # further lines
    output: str


def _spawn(job: dict[str, Any], text: str, limits: Limits) -> _Ended:
    """Run the child process. Raises: OSError, MemoryError, ValueError if that is not possible."""
    if os.environ.get(PERMISSION) == "1":
        _hide_memory()
    environment = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "OPENBLAS_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="solution-") as folder, tempfile.TemporaryFile() as job_file:
        given, empty = Path(folder, "input"), Path(folder, "empty")
        given.write_bytes(text.encode("utf-8", "replace"))
        given.chmod(0o444)  # /dev/stdin is opened by whichever user the child becomes
        empty.mkdir()
        job_file.write(json.dumps(job | {"input": str(given)}).encode())
        job_file.seek(0)
        status_read, status_write = os.pipe()
        descriptors = (job_file.fileno(), status_write)
        numbers = map(str, (*descriptors, os.getpid()))
        command = [sys.executable, "-I", "-S", "-B", "-X", "utf8", str(CHILD), *numbers]
        try:
            with given.open("rb") as stdin:
                process = subprocess.Popen(
                    command,
                    stdin=stdin,
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
                texts, how = _collect(process.pid, process.stdout, status, limits)
                cpu_time = _cpu_time(process.pid)
            finally:
                os.killpg(process.pid, signal.SIGKILL)  # before it is reaped, so the process id is still its own
    if how == "exited" and process.returncode != 0:
        how = "failed"
        if process.returncode == -signal.SIGXCPU:
            how = "time_out"
        if process.returncode == -signal.SIGKILL:  # no call of its own brings that about but one that ignores SIGXCPU
            how = "time_out" if cpu_time >= max(int(limits.seconds), 1) else "killed"
    lines = texts["status"].decode("utf-8", "replace").splitlines()
    return _Ended(how, lines[0] if lines else None, lines[1:], texts["output"].decode("utf-8", "replace"))


def _collect(pid: int, output: Any, status: Any, limits: Limits) -> tuple[dict[str, bytearray], Any]:
    """Output and status until the process ended, wrote too much or timed out, and which of them it was."""
    began = time.monotonic()
    deadline = began + 2 * limits.seconds
    texts = {"output": bytearray(), "status": bytearray()}
    process_fd = os.pidfd_open(pid)
    with selectors.DefaultSelector() as selector:
        try:
            streams = {"output": output.fileno(), "status": status.fileno()}
            for name, stream in streams.items():
                os.set_blocking(stream, False)
                selector.register(stream, selectors.EVENT_READ, name)
            selector.register(process_fd, selectors.EVENT_READ, None)
            while True:
                if (now := time.monotonic()) >= deadline:
                    # time in which a busy machine did not let it run is not its own
                    deadline = began + 2 * limits.seconds + _waited(pid)
                    if now >= deadline:
                        return texts, "time_out"
                    if now >= began + STARVED * limits.seconds:
                        return texts, "starved"
                ready = selector.select(max(deadline - now, 0.01))
                for key, _ in ready:
                    if key.data and not _read(key.fd, texts[key.data]):
                        selector.unregister(key.fd)
                if max(map(len, texts.values())) > limits.output:
                    return texts, "failed"  # the caller kills it
                if any(key.data is None for key, _ in ready):
                    for name, stream in streams.items():
                        while len(texts[name]) <= limits.output and _read(stream, texts[name]):
                            pass
                    too_much = max(map(len, texts.values())) > limits.output
                    return texts, "failed" if too_much else "exited"
        finally:
            os.close(process_fd)


def _waited(pid: int) -> float:
    """Seconds in which a process could have run but other processes did; 0 where the kernel does not count them."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def _cpu_time(pid: int) -> float:
    """Seconds of CPU time of a process that has not been reaped."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


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
