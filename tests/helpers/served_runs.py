"""Training runs on servers of our own engine, both in forks of a warm process, so that a kill costs tenths of a second.

A server writes down what it answers. Which prompts make a request depends on the number of servers alone, and a request
is one call of the engine, so a run on two servers is bit by bit the same whichever of them sample.
"""

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from helpers import last_checkpoint, metrics, weights
from helpers.killed import fork, forked, wait, with_events
from helpers.processes import PATIENCE
from helpers.programs import main_of
from helpers.servers import wait_at_most
from helpers.tiny_runs import TinyRuns, experiment_of

KEY = "key-of-the-tests"


class ForkedServer:
    """A server of a model folder, in a fork; `answered()` are the requests that it answered, over all its lives."""

    def __init__(self, model: Path, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.model, self.output, self.notes = model, folder / "output", folder / "notes.jsonl"
        self.port, self.pid = 0, 0
        self.notes.touch()
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it, on its port from the second time on, and wait until it answers."""
        self.output.write_bytes(b"")
        self.pid = fork(self._serve, self.output)
        end = time.monotonic() + PATIENCE
        while not (lines := [line for line in self.output.read_text().splitlines() if line.startswith("serving ")]):
            assert time.monotonic() < end and os.waitpid(self.pid, os.WNOHANG) == (0, 0), self.output.read_text()
            time.sleep(0.01)
        self.port = int(lines[0].rpartition(":")[2])

    def kill(self) -> None:
        """End it by SIGKILL; nothing if it is not running."""
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            wait(self.pid)
            self.pid = 0

    def answered(self) -> list[dict[str, Any]]:
        """The complete notes: version, prompt and ids of each row."""
        return [json.loads(line) for line in self.notes.read_text().split("\n")[:-1]]

    def _serve(self) -> None:
        from lightrlhf import serve
        from lightrlhf.serving.engine import Engine

        starter, complete = os.getppid(), Engine.complete

        def ends_with_its_starter() -> None:
            while os.getppid() == starter:
                time.sleep(0.5)
            os._exit(1)

        async def noted(engine: Engine, request: Any) -> Any:
            answer = await complete(engine, request)
            rows = zip(request.rows, answer.choices)
            notes = [{"version": answer.version, "prompt": prompt, "ids": choice.ids} for prompt, choice in rows]
            with self.notes.open("a") as file:
                file.write("".join(json.dumps(note) + "\n" for note in notes))
            return answer

        threading.Thread(target=ends_with_its_starter, daemon=True).start()
        Engine.complete = noted
        flags = {"engine": "lightrlhf", "accelerator": "cpu", "port": self.port, "rollout_mini_batch_size": 32}
        serve.main([str(self.model), *(str(word) for name, value in flags.items() for word in (f"--{name}", value))])


class ServedRuns:
    """Runs of a program on servers, in forks; `folder` has a folder of each."""

    def __init__(
        self,
        runs: TinyRuns,
        program: str,
        folder: Path,
        servers: list[ForkedServer],
        *more: object,
        patience: float = 600.0,
    ) -> None:
        self.runs, self.program, self.folder, self.servers = runs, program, folder, servers
        self.exchange, self.output = folder / "exchange", folder / "output"
        urls = [server.url for server in servers]
        self.more = ["--rollout_mini_batch_size", 32, "--eval_interval", 3, "--log_rollouts", 1000]
        self.more += ["--rollout_server", *urls, *more]
        self.patience = patience  # seconds until a run ends without a server
        self.exchange.mkdir()

    def call(self, name: str, at: int = 0, tell: Path | None = None) -> Callable[[], None]:
        """A run that dies at its event number `at`, and writes what it learns from."""
        flags = self.runs.flags(self.program, self.folder / name, *self.more)
        return with_events(self._noting(name, flags), self.folder / name, at, tell)

    def start(self, name: str) -> int:
        """Start a run; returns its process id."""
        flags = self.runs.flags(self.program, self.folder / name, *self.more)
        return fork(self._noting(name, flags), self.output)

    def resume(self, name: str) -> int:
        """Resume a run; returns its exit status."""
        flags = ["--resume_from", str(self.experiment(name))]
        return forked(self._noting(name, flags), self.output)

    def experiment(self, name: str) -> Path:
        return experiment_of(self.folder / name)

    def state(self, name: str) -> dict[str, Any]:
        """All that must be bit-equal to the run that was left alone."""
        run = self.experiment(name)
        stored = torch.load(last_checkpoint(run) / "resume.pt", weights_only=True)
        names = ("optimizers", "schedulers", "extra", "rng", "python_rng", "step")
        return {
            **{key: stored[key] for key in names},
            "weights": weights(last_checkpoint(run)),
            "metrics": [row for row in metrics(run) if "val/kl" not in row],
            "evaluations": [row for row in metrics(run) if "val/kl" in row],
            "rollouts": (run / "rollouts.jsonl").read_bytes(),
        }

    def learned(self, name: str) -> list[dict[str, Any]]:
        """Of each call for samples: the version that was asked for, prompts and responses."""
        path = self.folder / f"{name}.jsonl"
        return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []

    def unknown(self, name: str) -> list[str]:
        """Rows learned from that no server answered by the version that was asked for."""
        notes = [note for server in self.servers for note in server.answered()]
        known = {(note["version"], tuple(note["prompt"]), tuple(note["ids"])) for note in notes}
        return [
            f"row {row} of {call['version']}"
            for call in self.learned(name)
            for row, (prompt, ids) in enumerate(zip(call["prompts"], call["responses"], strict=True))
            if (call["version"], tuple(prompt), tuple(ids)) not in known
        ]

    def _noting(self, name: str, flags: list[str]) -> Callable[[], None]:
        def call() -> None:
            from lightrlhf.generation import exchange
            from lightrlhf.generation.server_pool import RolloutServers

            exchange.MEMORY = self.exchange
            wait_at_most(600.0, self.patience)
            sample = RolloutServers._sample

            async def noted(servers: RolloutServers, prompts: list, *more: Any) -> Any:
                version = servers.target.version
                found = await sample(servers, prompts, *more)
                with (self.folder / f"{name}.jsonl").open("a") as file:
                    row = {"version": version, "prompts": prompts, "responses": found.responses}
                    file.write(json.dumps(row) + "\n")
                return found

            RolloutServers._sample = noted
            main_of(self.program)(flags)

        return call


def error_of(output: Path) -> str:
    """The one line of a run that failed."""
    return next((line for line in reversed(output.read_text().splitlines()) if line.startswith("error: ")), "")
