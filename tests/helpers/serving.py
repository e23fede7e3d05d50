"""`python -m lightrlhf.serve` in a process of its own, which tests may kill and start again on the same port."""

import contextlib
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx2

from helpers import ROOT, environment
from helpers.forks import started_program
from helpers.processes import PATIENCE

KEY = "key-of-the-tests"


class Server:
    """A server of our own engine: `url` without /v1, `process`, `lines` that it printed."""

    def __init__(self, folder: str | Path, **options: object) -> None:
        self.folder, self.options, self.port = str(folder), options, 0
        self.lines: list[str] = []
        self.blocks = contextlib.ExitStack()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start the process and wait until it answers; always on the port of its first start."""
        flags = {"engine": "lightrlhf", "accelerator": "cpu", "port": self.port, **self.options}
        words = [self.folder, *(word for name, value in flags.items() for word in (f"--{name}", value))]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        fork = started_program("lightrlhf.serve", *words, cwd=ROOT, env=environment(), **pipes)
        self.process = self.blocks.enter_context(fork)
        ready = threading.Event()
        self.reader = threading.Thread(target=self._read, args=(self.process, ready), daemon=True)
        self.reader.start()
        assert ready.wait(PATIENCE) and self.process.poll() is None, "".join(self.lines)

    def _read(self, process: subprocess.Popen, ready: threading.Event) -> None:
        for line in process.stdout:
            self.lines.append(line)
            if line.startswith("serving "):
                self.port = int(line.rpartition(":")[2])
                ready.set()
        ready.set()

    def kill(self) -> None:
        """End the process by SIGKILL and wait until it is gone."""
        self.process.kill()
        self.process.wait(PATIENCE)
        self.reader.join(PATIENCE)
        self.blocks.close()

    def restart(self) -> None:
        """Start it again on the same port, killed before if it still runs."""
        self.kill()
        self.start()

    def ask(self, path: str, body: object = None, method: str | None = None, **headers: str) -> httpx2.Response:
        """The answer of a route: GET without a body, else POST; `headers` beside the key."""
        method = method or ("GET" if body is None else "POST")
        given = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", **headers}
        return httpx2.request(method, self.url + path, json=body, headers=given, timeout=PATIENCE)


@contextlib.contextmanager
def serving(folder: str | Path, **options: object) -> Iterator[tuple[str, Server]]:
    """Context manager: (address without /v1, `Server`) of a server of a model folder; `options` are further flags.

    Until the end of the block OPENAI_API_KEY is its key, in this process and in those that it starts.
    """
    before = os.environ.get("OPENAI_API_KEY")
    os.environ["OPENAI_API_KEY"] = before or KEY
    server = Server(folder, **options)
    try:
        server.start()
        yield server.url, server
    finally:
        server.blocks.close()
        if before is None:
            os.environ.pop("OPENAI_API_KEY", None)
        else:
            os.environ["OPENAI_API_KEY"] = before
