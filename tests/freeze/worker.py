"""Runs cases in one tree, each in a fork of this process: `python worker.py JOB.json`, the tree first in PYTHONPATH.

Imports nothing of `tests` but its neighbours, for the tree may be of another commit. A line of JSON on standard output
tells how each case ended. A case takes a lock of its own, so that two workers do not run one case of the base at once.
"""

import contextlib
import fcntl
import importlib
import json
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import records

IMPORTED = ["lightrlhf.ppo", "lightrlhf.grpo", "lightrlhf.dpo", "transformers.models.llama.modeling_llama", "peft"]
IMPORTED += ["lightning.fabric.strategies", "torch.distributed.fsdp"]
CHANGES = {"open": 0, "os.mkdir": 0, "os.rename": 1}  # audited events on files, and which argument is the path
PATIENCE = 300.0  # seconds that a step may take


def main() -> None:
    import torch

    job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    for name in IMPORTED:
        with contextlib.suppress(ImportError):  # a module of another commit
            importlib.import_module(name)
    running: dict[int, str] = {}
    todo = list(job["cases"])
    while todo or running:
        while todo and len(running) < job["jobs"]:
            case = todo.pop(0)
            running[fork(lambda case=case: follow(case, Path(job["inputs"])))] = case["name"]
        pid, status = os.waitpid(-1, 0)
        if (name := running.pop(pid, None)) and os.waitstatus_to_exitcode(status):
            report(name, "its process has ended", 0.0)


def report(name: str, error: str, seconds: float) -> None:
    line = json.dumps({"name": name, "error": error, "seconds": round(seconds, 1)}) + "\n"
    os.write(1, line.encode())


def follow(case: dict[str, Any], inputs: Path) -> None:
    """Run a case and write its record, unless it is there."""
    os.setsid()
    record = Path(case["record"])
    record.parent.mkdir(parents=True, exist_ok=True)
    with record.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        begun, error = time.monotonic(), ""
        work = record.with_suffix(f".{os.getpid()}")
        if not record.exists():
            work.mkdir()
            try:
                found = Runs(case, inputs, work).follow()
                part = record.with_suffix(f".{os.getpid()}.part")
                records.save(found, part)
                part.rename(record)
            except Exception as problem:
                error = f"{type(problem).__name__}: {problem}"
            if not case["keep"]:
                shutil.rmtree(work, ignore_errors=True)
        report(case["name"], error, time.monotonic() - begun)


class Runs:
    """The steps of a case: each a call of a program's `main` in a fork, or in a fork per rank."""

    def __init__(self, case: dict[str, Any], inputs: Path, work: Path) -> None:
        self.case, self.work = case, work
        self.places = {"in": inputs, "work": work, "log": work / "logs"}
        self.servers: list[tuple[int, int]] = []  # process and port of each

    def follow(self) -> dict[str, Any]:
        """Returns the record. Raises: RuntimeError when a step ends otherwise than the case says."""
        found: dict[str, Any] = {}
        before = listed(self.work)
        try:
            for number, step in enumerate(self.case["steps"]):
                self.serve()
                output, errors = self.work / f"output-{number}", self.work / f"errors-{number}"
                status = self.call(step, output, errors)
                if status != step["status"]:
                    text = "".join(path.read_text(errors="replace")[-2000:] for path in (output, errors))
                    raise RuntimeError(f"step {number} ({step['program']}) ended with {status}:\n{text}")
                if step["printed"]:
                    found |= records.printed(output.read_text(errors="replace"), self.places, number)
                output.unlink()
                errors.unlink()
        finally:
            for pid, _ in self.servers:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
        if all(step["printed"] for step in self.case["steps"]):
            found["written"] = sorted(listed(self.work) - before)
        return found | records.of(self.work)

    def call(self, step: dict[str, Any], output: Path, errors: Path) -> int:
        """Run a step; returns its exit status, of two ranks the first that is not 0."""
        flags = [self.filled(str(flag)) for flag in step["flags"]]
        variables = {name: self.filled(str(value)) for name, value in step["variables"].items()}

        def of_rank(rank: int) -> Callable[[], None]:
            def call() -> None:
                os.environ.update(variables, TMPDIR=str(self.work))
                tempfile.tempdir = str(self.work)
                if step["ranks"] > 1:
                    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "NODE_RANK": 0, "LOCAL_RANK": rank}
                    os.environ.update({key: str(value) for key, value in shared.items()}, WORLD_SIZE=str(step["ranks"]))
                if step["kill"]:
                    die_at(step["kill"])
                os.chdir(self.work)
                main = importlib.import_module(f"lightrlhf.{step['program']}").main
                main(flags)

            return call

        port = free_port()
        pids = [fork(of_rank(rank), output, errors) for rank in range(step["ranks"])]
        statuses = [wait(pid, step["program"]) for pid in pids]
        return next((status for status in statuses if status), 0)

    def filled(self, text: str) -> str:
        """A flag with the names in braces filled in."""
        for name, place in self.places.items():
            text = text.replace(f"{{{name}}}", str(place))
        text = re.sub(r"\{run(.*?)\}", lambda found: str(self.run(found[1])), text)
        text = re.sub(r"\{server(\d)\}", lambda found: f"http://127.0.0.1:{self.servers[int(found[1])][1]}", text)
        return re.sub(r"\{pid(\d)\}", lambda found: str(self.servers[int(found[1])][0]), text)

    def run(self, name: str) -> Path:
        """The experiment dir below the log folder, or below one beside it."""
        return records.experiments(self.work / f"logs{name}")[0]

    def serve(self) -> None:
        """Start the case's rollout servers; again on their ports where they have ended."""
        for number in range(self.case["servers"]):
            port = 0
            if number < len(self.servers):
                pid, port = self.servers[number]
                try:
                    if os.waitpid(pid, os.WNOHANG) == (0, 0):
                        continue
                except ChildProcessError:
                    pass
            output = self.work / f"server-{number}"
            output.write_bytes(b"")
            flags = [str(self.places["in"] / self.case["served"]), "--engine", "lightrlhf", "--accelerator", "cpu"]
            flags += ["--port", str(port), "--rollout_mini_batch_size", "32"]
            pid = fork(lambda flags=flags: importlib.import_module("lightrlhf.serve").main(flags), output)
            end = time.monotonic() + PATIENCE
            while not (found := re.search(r"^serving .*:(\d+)", output.read_text(), re.MULTILINE)):
                if time.monotonic() > end or os.waitpid(pid, os.WNOHANG) != (0, 0):
                    raise RuntimeError(f"the server has ended: {output.read_text()[-2000:]}")
                time.sleep(0.02)
            self.servers[number : number + 1] = [(pid, int(found[1]))]


def fork(call: Callable[[], Any], output: Path | None = None, errors: Path | None = None) -> int:
    """Start `call` in a fork of this process, printing to files; returns its process id."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        if output:
            for number, path in ((1, output), (2, errors or output)):
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
            sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))
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


def wait(pid: int, name: str) -> int:
    """The exit status of a fork, negative for a signal. Raises: RuntimeError when it takes too long."""
    end = time.monotonic() + PATIENCE
    while (found := os.waitpid(pid, os.WNOHANG)) == (0, 0):
        if time.monotonic() > end:
            os.kill(pid, signal.SIGKILL)
            raise RuntimeError(f"{name} takes more than {PATIENCE:.0f} s")
        time.sleep(0.01)
    return os.waitstatus_to_exitcode(found[1])


def die_at(pattern: str) -> None:
    """Kill this process as soon as it changes a file whose path matches; permanent, so for a fork only."""

    def audit(event: str, arguments: tuple) -> None:
        if event not in CHANGES:
            return
        path, mode = arguments[CHANGES[event]], arguments[2] if event == "open" else os.O_WRONLY
        is_change = isinstance(mode, int) and mode & (os.O_WRONLY | os.O_RDWR)
        if is_change and isinstance(path, str | os.PathLike) and re.search(pattern, os.fspath(path)):
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(audit)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def listed(folder: Path) -> set[str]:
    """All files below a folder."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}


if __name__ == "__main__":
    main()
