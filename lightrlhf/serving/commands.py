"""Command lines of vLLM and SGLang with what training needs, and which engine there is.

Log-probabilities must be those at the sampling temperature, sampling settings those of each request alone (not the
model's generation config), numbers those of the training run's precision, and the routes that change weights open.
Those routes ask for no key in vLLM, so both are started on the loopback only.

vLLM's flags are those of 0.32. SGLang's are from its documentation; no test here runs it.
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

ENGINES = ("vllm", "sglang")
MODULES = {"vllm": "vllm.entrypoints.openai.api_server", "sglang": "sglang.launch_server"}
ENDS = (signal.SIGINT, signal.SIGTERM)
VLLM_VARIABLES = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}


class Launch(NamedTuple):
    """How an engine is started."""

    engine: str
    python: str
    model: str  # folder or hub name
    served_name: str
    host: str
    port: int
    dtype: str
    enable_lora: bool
    max_lora_rank: int
    trust_remote_code: bool
    more: str  # flags as the engine spells them

    def command(self, model: str | None = None) -> list[str]:
        """The words of the command, without the key; model: another folder than the launch's."""
        given = {"vllm": "--model", "sglang": "--model-path"}[self.engine]
        words = [self.python, "-m", MODULES[self.engine], given, model or self.model]
        words += ["--served-model-name", self.served_name, "--host", self.host, "--port", str(self.port)]
        words += ["--dtype", self.dtype]
        if self.engine == "vllm":
            words += ["--logprobs-mode", "processed_logprobs", "--max-logprobs", "1", "--generation-config", "vllm"]
        else:
            words += ["--sampling-defaults", "openai"]
        if self.enable_lora:
            words += ["--enable-lora", "--max-lora-rank", str(self.max_lora_rank)]
        if self.enable_lora and self.engine == "sglang":
            words += ["--lora-target-modules", "all"]
        if self.trust_remote_code:
            words.append("--trust-remote-code")
        return [*words, *shlex.split(self.more)]

    def variables(self) -> dict[str, str]:
        """Environment variables that the engine needs, without the key."""
        lora_routes = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"} if self.enable_lora else {}
        return VLLM_VARIABLES | lora_routes if self.engine == "vllm" else {}

    def shown(self, model: str | None = None) -> str:
        """The command as a line for a shell, the key as the variable that holds it."""
        variables = [f"{name}={value}" for name, value in self.variables().items()]
        key = [f'VLLM_API_KEY="${KEY}"'] if self.engine == "vllm" else []
        flag = [] if self.engine == "vllm" else [f'--api-key "${KEY}"']
        return " ".join([*variables, *key, shlex.join(self.command(model)), *flag])


def choose_engine(engine: str, python: str | None) -> str:
    """The engine of `--engine`: for `auto` the first of vLLM and SGLang that is installed, else our own.

    python: another environment's interpreter to look in. Raises: UsageError when it cannot be run, or lacks the engine.
    """
    if engine == "lightrlhf":
        return engine
    wanted = ENGINES if engine == "auto" else (engine,)
    found = [name for name in wanted if (find_spec(name) if python is None else has_package(python, name))]
    if found or (engine == "auto" and python is None):
        return found[0] if found else "lightrlhf"
    where = python or sys.executable
    raise UsageError(
        f"--engine {engine}: {where} has no {' or '.join(wanted)}; install it there, name another environment's "
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
        raise UsageError(f"--python {python} is no Python interpreter; name one such as venv/bin/python")
    return done.returncode == 0


def needs_copy(launch: Launch) -> str | None:
    """Why the engine gets a copy of the model and not the model itself; None if it does not."""
    if (Path(launch.model) / ADAPTER_CONFIG).is_file():
        return "its adapter is merged into its base"
    return None


def start(launch: Launch, key: str) -> None:
    """Become the engine's process; where it needs a copy of the model, run it as a child until it ends.

    Raises: RunFailure when the engine cannot be started, or the child fails.
    """
    environment = {**os.environ, **launch.variables(), "VLLM_API_KEY": key}
    secret = [] if launch.engine == "vllm" else ["--api-key", key]  # vLLM reads it from its environment
    reason = needs_copy(launch)
    if reason is None:
        print(launch.shown(), flush=True)
        try:
            os.execvpe(launch.python, [*launch.command(), *secret], environment)
        except OSError as problem:
            raise RunFailure(f"{launch.python} cannot be run: {problem.strerror}") from None
    print(f"a copy of {launch.model} is served: {reason}", flush=True)
    with standalone_copy(launch.model) as copied:
        print(launch.shown(copied), flush=True)
        status = run_child([*launch.command(copied), *secret], environment)
    if status not in (0, -signal.SIGINT, -signal.SIGTERM):
        raise RunFailure(f"{launch.engine} ended with status {status}; its last lines say why")


def run_child(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """The exit status of a process to which this one passes on SIGINT and SIGTERM."""
    with subprocess.Popen(command, env=environment, start_new_session=True) as process:
        before = {number: signal.signal(number, lambda given, _: process.send_signal(given)) for number in ENDS}
        try:
            return process.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
