"""`python -m module flags…` as a fork of a process that has imported the libraries: a tenth of the time of a start.

Each test session has one such process, which `main` is. It reads requests, forks, and writes the id of the fork and the
status that it ended with. A fork runs its module as `__main__`, with the files, folder and environment that it was
given, in a session of its own; ranks that it starts are forks of it. Where libraries may read another environment when
they are imported, and outside a test session, the module is run by a new interpreter.
"""

import contextlib
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from helpers import processes

IMPORTED = ["lightrlhf.sft", "lightrlhf.ppo", "lightrlhf.grpo", "lightrlhf.dpo", "lightrlhf.serve", "datasets", "peft"]
IMPORTED += ["lightning.fabric.strategies", "transformers.models.llama.modeling_llama", "torch.distributed.fsdp"]
READ_ONCE = ("HF_", "HUGGINGFACE_", "TRANSFORMERS_", "XDG_", "HOME", "TMPDIR", "PYTHON", "LD_", "CUDA_", "TOKENIZERS_")
READ_ONCE += ("OMP_", "MKL_", "ATEN_", "ONEDNN_MAX_", "GRADIO_")  # variables, by their beginnings
ROOT = Path(__file__).resolve().parents[2]
OWN = {
    "HF_HUB_DISABLE_TELEMETRY",
    "GRADIO_ANALYTICS_ENABLED",
    "GRADIO_RUN_HISTORY",
}  # of these, what the library sets itself


def is_alike(one: Mapping[str, str], other: Mapping[str, str]) -> bool:
    """Whether libraries that were imported in one environment are as they would be in the other."""
    changed = [name for name in {*one, *other} if one.get(name) != other.get(name)]
    return not any(name.startswith(READ_ONCE) for name in changed if name not in OWN)


# ---------------------------------------------------------------------------------------------------------- the session
class Forker:
    """The process that forks, started at the first request of a session."""

    def __init__(self) -> None:
        self.environment: dict[str, str] | None = None  # of the session
        self.requests: socket.socket | None = None
        self.lock = threading.Lock()

    def suits(self, environment: dict[str, str]) -> bool:
        """Whether what was imported in the session's environment is as it would be in this one."""
        return self.environment is not None and is_alike(self.environment, environment)

    def send(self, request: dict[str, Any], handles: list[int]) -> None:
        """Ask for a fork; handles: its input, output and errors, and where its id and status are written."""
        with self.lock:
            if self.requests is None:
                self.requests, other = socket.socketpair()
                options: dict[str, Any] = {"pass_fds": [other.fileno()], "env": self.environment, "cwd": ROOT}
                options |= dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
                command = [sys.executable, "-c", "from helpers.forks import main; main()", str(other.fileno())]
                process = subprocess.Popen(command, start_new_session=True, **options)
                processes.forkers.add(process.pid)
                other.close()
            data = json.dumps(request).encode()
            socket.send_fds(self.requests, [len(data).to_bytes(4, "big")], handles)
            self.requests.sendall(data)


_forker = Forker()


def open_session(environment: dict[str, str]) -> None:
    """Let `started_program` fork, from a process of this environment."""
    _forker.environment = environment


class Fork:
    """The interface of `subprocess.Popen` for a fork."""

    stdin = None

    def __init__(self, module: str, flags: list[str], cwd: Path, environment: dict[str, str], pipes: dict[str, Any]):
        self.args, self.returncode = [module, *flags], None
        handles, ours, is_text = [os.open(os.devnull, os.O_RDONLY)], {}, pipes.get("text", False)
        for number, name in enumerate(("stdout", "stderr"), 1):
            handle, ours[name] = self._opened(pipes.get(name, number), handles, is_text)
            handles.append(handle)
        self.stdout, self.stderr = ours["stdout"], ours["stderr"]
        self.status, told = os.pipe()
        handles.append(told)
        request = {"module": module, "flags": flags, "cwd": str(cwd), "environment": environment}
        _forker.send(request, handles)
        for handle in handles:
            os.close(handle)
        self.pid = int.from_bytes(os.read(self.status, 4), "big")
        assert self.pid, "the process that forks has ended"

    @staticmethod
    def _opened(asked: Any, handles: list[int], is_text: bool) -> tuple[int, IO[Any] | None]:
        """The handle of the fork's output, and our end of it where it is a pipe."""
        if asked == subprocess.PIPE:
            read, write = os.pipe()
            return write, open(read, encoding="utf-8", errors="replace") if is_text else open(read, "rb")
        if asked == subprocess.STDOUT:
            return os.dup(handles[1]), None
        if asked == subprocess.DEVNULL:
            return os.open(os.devnull, os.O_WRONLY), None
        return os.dup(asked if isinstance(asked, int) else asked.fileno()), None

    def poll(self) -> int | None:
        """The exit status, negative for a signal; None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit status. Raises: subprocess.TimeoutExpired."""
        if self.returncode is None:
            if not select.select([self.status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            status = os.read(self.status, 4)
            self.returncode = int.from_bytes(status, "big", signed=True) if status else -signal.SIGKILL
            os.close(self.status)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[Any, Any]:
        """All that it prints until it ends. Raises: subprocess.TimeoutExpired."""
        read: dict[str, Any] = {}
        streams = {name: stream for name in ("stdout", "stderr") if (stream := getattr(self, name)) is not None}
        readers = [
            threading.Thread(target=lambda name=name, stream=stream: read.update({name: stream.read()}), daemon=True)
            for name, stream in streams.items()
        ]
        for reader in readers:
            reader.start()
        self.wait(timeout)
        for reader in readers:
            reader.join(timeout)
        return read.get("stdout"), read.get("stderr")

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@contextlib.contextmanager
def started_program(module: str, *flags: object, cwd: Path, env: dict[str, str], **pipes: Any) -> Iterator[Any]:
    """`python -m module flags…` in a process, which is killed with its session at the end of the block."""
    words = [str(flag) for flag in flags]
    if not _forker.suits(env):
        with processes.started([sys.executable, "-m", module, *words], cwd=cwd, env=env, **pipes) as process:
            yield process
        return
    fork = Fork(module, words, cwd, env, pipes)
    try:
        yield fork
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(fork.pid, signal.SIGKILL)
        fork.kill()
        fork.wait(processes.PATIENCE)
        for stream in (fork.stdout, fork.stderr):
            if stream is not None:
                stream.close()


# -------------------------------------------------------------------------------------------------- the forking process
def main() -> None:
    import torch

    torch.set_num_threads(1)
    for name in IMPORTED:
        importlib.import_module(name)
    requests = socket.socket(fileno=int(sys.argv[1]))
    ended, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    told: dict[int, int] = {}  # where the status of each fork is written, by its id
    while True:
        ready, _, _ = select.select([requests, ended], [], [])
        if ended in ready:
            os.read(ended, 4096)
            report(told)
        if requests in ready:
            size, handles, _, _ = socket.recv_fds(requests, 4, 4)
            if not size:
                return  # the session has ended
            request = received(requests, int.from_bytes(size, "big"))
            *given, status = handles
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                requests.close()
                for handle in (ended, wakes, status, *told.values()):
                    os.close(handle)
                follow(request, given)
            told[pid] = status
            os.write(status, pid.to_bytes(4, "big"))
            for handle in given:
                os.close(handle)


def received(requests: socket.socket, size: int) -> dict[str, Any]:
    data = b""
    while len(data) < size:
        data += requests.recv(size - len(data))
    request: dict[str, Any] = json.loads(data)
    return request


def report(told: dict[int, int]) -> None:
    """Report the statuses of forks that have ended."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        handle = told.pop(pid)
        with contextlib.suppress(OSError):  # a pipe without a reader
            os.write(handle, os.waitstatus_to_exitcode(status).to_bytes(4, "big", signed=True))
        os.close(handle)


def follow(request: dict[str, Any], handles: list[int]) -> None:
    """Run a module in this fork, which ends."""
    os.setsid()
    for number, handle in enumerate(handles):
        os.dup2(handle, number)
        os.close(handle)
    fork_ranks()
    os.chdir(request["cwd"])
    run_module(request["module"], request["flags"], request["environment"])


def fork_ranks() -> None:
    """Let Fabric's launcher and torch's, which stages and torchrun use, start ranks as forks of this process."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
    from torch.distributed.launcher import api

    subprocess.Popen = RanksAsForks  # type: ignore[misc]
    subprocess_handler.Popen = RanksAsForks
    config = api.LaunchConfig
    api.LaunchConfig = lambda **options: config(**options | {"start_method": "fork"})


def run_module(module: str, flags: list[str], environment: Mapping[str, str]) -> None:
    """Run a module as `__main__`, and end as a program of its own would."""
    import atexit

    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))
    given = dict(environment)
    os.environ.clear()
    os.environ.update(given)
    sys.argv = [module, *flags]
    sys.modules.pop(module, None)  # else runpy warns that it was imported
    status: Any = 1
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as stop:
        status = stop.code
        if status is not None and not isinstance(status, int):
            print(status, file=sys.stderr)
            status = 1
    except BaseException:
        traceback.print_exc()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status or 0)


class RanksAsForks(subprocess.Popen):
    """`subprocess.Popen` of a fork, where `python -m module`, as Fabric and torchrun start ranks, is a fork of it."""

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *more):  # type: ignore
        environment = os.environ if env is None else env
        given = [] if isinstance(args, str) else [str(word) for word in args if word != "-u"]
        pipes = more[3:9]  # of input, output and errors: the read and the write ends
        is_plain = not (preexec_fn or pass_fds) and all(pipes[n] == -1 for n in (1, 2, 4))
        if not (given[:2] == [sys.executable, "-m"] and is_plain and is_alike(os.environ, environment)):
            return super()._execute_child(args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *more)
        self.pid = os.fork()
        if self.pid == 0:
            for number, handle in ((0, pipes[0]), (1, pipes[3]), (2, pipes[5])):
                if handle != -1:
                    os.dup2(handle, number)
            if more[14]:
                os.setsid()
            os.chdir(cwd or ".")
            run_module(given[2], given[3:], environment)
        self._child_created = True
        self._close_pipe_fds(*pipes)
