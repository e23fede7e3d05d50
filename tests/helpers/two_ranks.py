"""Two or more ranks of our programs as forked processes, many times over: the libraries are imported once.

Takes jobs (JSON) and writes the exit statuses and outputs of each, by name, to standard output.
A job has `calls`, a list of [module or module:function, flags] that all ranks make in turn in one process each, and
may have: `ranks`, their number, else two; `folders`, a working directory per rank; `kill`, the rank to kill as soon as
there is a checkpoint below `log_dir`; `variables`, of the environment, per rank.
"""

import importlib
import json
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path

from helpers.processes import PATIENCE


def main() -> None:
    import torch
    import transformers  # noqa: F401

    torch.set_num_threads(1)
    jobs = json.loads(sys.argv[1])
    for job in jobs:
        for name, _ in job["calls"]:
            called(name)
    for name in ("lightning.fabric.strategies", "transformers.models.llama.modeling_llama", "torch.distributed.fsdp"):
        importlib.import_module(name)
    processes = {job["name"]: (job, start(job)) for job in jobs}  # before any thread
    for job, (pids, _) in processes.values():
        if "kill" in job:
            threading.Thread(target=kill_when_saved, args=(job, pids), daemon=True).start()
    json.dump({name: ending(*started) for name, (_, started) in processes.items()}, sys.stdout)


def called(name: str):
    """The function of an import path `module:function`, or `main` of a module."""
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function or "main")


def start(job: dict) -> tuple[list[int], list[Path]]:
    """Fork the ranks; returns their ids and what they print to."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pids, outputs = [], []
    number = job.get("ranks", 2)
    for rank in range(number):
        output = Path(tempfile.mkstemp()[1])
        pid = os.fork()
        if pid == 0:
            shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "NODE_RANK": 0, "WORLD_SIZE": number}
            own = {"LOCAL_RANK": rank, **job.get("variables", [{}] * number)[rank]}
            os.environ.update({key: str(value) for key, value in (shared | own).items()})
            if "folders" in job:
                os.chdir(job["folders"][rank])
            handle = os.open(output, os.O_WRONLY)
            os.dup2(handle, 1)
            os.dup2(handle, 2)
            follow(job["calls"])
        pids.append(pid)
        outputs.append(output)
    return pids, outputs


def follow(calls: list) -> None:
    """Make the calls in this process, and end as a program of its own would."""
    import atexit
    import traceback

    status = 0
    try:
        for name, flags in calls:
            called(name)(flags)
    except SystemExit as stop:
        status = stop.code or 0
    except BaseException:
        traceback.print_exc()
        status = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def kill_when_saved(job: dict, pids: list[int]) -> None:
    while not list(Path(job["log_dir"]).glob("*/*/*/*/checkpoint-*")):
        time.sleep(0.02)
    os.kill(pids[job["kill"]], signal.SIGKILL)


def ending(pids: list[int], outputs: list[Path]) -> dict:
    """Exit statuses (negative: a signal), and what was printed; a job that takes too long is killed."""
    ends: dict[int, int] = {}
    started = time.monotonic()
    while len(ends) < len(pids):
        for pid in pids:
            if pid not in ends:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    ends[pid] = os.waitstatus_to_exitcode(status)
                elif time.monotonic() - started > 2 * PATIENCE:  # all jobs run at once
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    texts = [output.read_text(errors="replace") for output in outputs]
    return {"status": [ends[pid] for pid in pids], "text": texts}


if __name__ == "__main__":
    main()
