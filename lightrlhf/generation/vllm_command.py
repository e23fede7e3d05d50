"""The command that starts vLLM with the flags that training needs, and the choice between it and our own engine.

Log-probabilities must be at the sampling temperature, sampling settings from each request only (not from the model's
generation config), the dtype is the training run's, and the routes that change weights open. vLLM asks for no key on
those routes, so it is started on the loopback only. The flags are vLLM 0.32's.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from lightrlhf.cli.addresses import KEY
from lightrlhf.cli.errors import RunFailure, UsageError
from lightrlhf.models.lora import ADAPTER_CONFIG
from lightrlhf.models.saving import standalone_copy

MOST_TOP = 128  # likeliest tokens, of each place of a prompt, that a request may ask for
MODULE = "vllm.entrypoints.openai.api_server"
ENDS = (signal.SIGINT, signal.SIGTERM)
VARIABLES = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}


class Launch(NamedTuple):
    """How vLLM is started."""

    python: str
    model: str  # folder or hub name
    served_name: str
    host: str
    port: int
    dtype: str
    enable_lora: bool
    max_lora_rank: int
    trust_remote_code: bool
    more: str  # flags as vLLM spells them

    def command(self, model: str | None = None) -> list[str]:
        """The words of the command, without the key; model: another folder than the launch's."""
        words = [self.python, "-m", MODULE, "--model", model or self.model]
        words += ["--served-model-name", self.served_name, "--host", self.host, "--port", str(self.port)]
        words += ["--dtype", self.dtype]
        words += ["--logprobs-mode", "processed_logprobs", "--max-logprobs", str(MOST_TOP)]
        words += ["--generation-config", "vllm"]
        if self.enable_lora:
            words += ["--enable-lora", "--max-lora-rank", str(self.max_lora_rank)]
        if self.trust_remote_code:
            words.append("--trust-remote-code")
        return [*words, *shlex.split(self.more)]

    def variables(self) -> dict[str, str]:
        """Environment variables that vLLM needs, without the key."""
        lora_routes = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"} if self.enable_lora else {}
        return VARIABLES | lora_routes

    def as_line(self, model: str | None = None) -> str:
        """The command as a line for a shell, the key as the variable that holds it."""
        variables = [f"{name}={value}" for name, value in self.variables().items()]
        return " ".join([*variables, f'VLLM_API_KEY="${KEY}"', shlex.join(self.command(model))])


def choose_engine(engine: str, python: str | None) -> str:
    """The engine of `--engine`; `auto` is vLLM where it is installed, else our own.

    python: another environment's interpreter to look in. Raises: UsageError when it cannot be run, or lacks vLLM.
    """
    if engine == "lightrlhf":
        return engine
    if find_spec("vllm") if python is None else has_package(python, "vllm"):
        return "vllm"
    if engine == "auto" and python is None:
        return "lightrlhf"
    raise UsageError(
        f"--engine {engine}: {python or sys.executable} has no vllm; install it there, name another environment's "
        "interpreter by --python, or use --engine lightrlhf"
    )


def has_package(python: str, package: str) -> bool:
    """Whether another interpreter finds a package. Raises: UsageError when it cannot be run."""
    code = f"import sys, importlib.util as util; sys.exit(0 if util.find_spec({package!r}) else 3)"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True)
    except OSError as problem:
        raise UsageError(f"--python {python} cannot be run: {problem.strerror}; name an interpreter") from None
    if done.returncode not in (0, 3):
        raise UsageError(f"--python {python} is not a Python interpreter; name one such as venv/bin/python")
    return done.returncode == 0


def start(launch: Launch, key: str) -> None:
    """Become vLLM's process; of an adapter serve a merged copy by a child process until it ends.

    Raises: RunFailure when vLLM cannot be started, or the child fails.
    """
    environment = {**os.environ, **launch.variables(), "VLLM_API_KEY": key}
    if not (Path(launch.model) / ADAPTER_CONFIG).is_file():
        print(launch.as_line(), flush=True)
        try:
            os.execvpe(launch.python, launch.command(), environment)
        except OSError as problem:
            raise RunFailure(f"{launch.python} cannot be run: {problem.strerror}") from None
    print(f"a copy of {launch.model} is served: its adapter is merged into its base", flush=True)
    with standalone_copy(launch.model) as copied:
        print(launch.as_line(copied), flush=True)
        status = run_child(launch.command(copied), environment)
    if status not in (0, -signal.SIGINT, -signal.SIGTERM):
        raise RunFailure(f"vLLM ended with status {status}; its last lines say why")


def run_child(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """The exit status of a process to which this one passes on SIGINT and SIGTERM."""
    with subprocess.Popen(command, env=environment, start_new_session=True) as process:
        before = {number: signal.signal(number, lambda given, _: process.send_signal(given)) for number in ENDS}
        try:
            return process.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
