"""A real vLLM, in the environment of the interpreter that $LIGHTRLHF_VLLM_PYTHON names.

Test files that import this are skipped where there is none.
"""

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from helpers import ROOT, environment
from helpers.processes import PATIENCE, started
from helpers.serving import KEY

PYTHON = "LIGHTRLHF_VLLM_PYTHON"
if not os.environ.get(PYTHON):
    pytest.skip(f"needs a real vLLM: make test-vllm installs one and sets {PYTHON}", allow_module_level=True)

# Cached blocks of 32 tokens, the fewest on a CPU. Without compiling and warming up, which take minutes.
FLAGS = "--enforce-eager --max-model-len 256 --block-size 32"
SMALL = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_CI_ENV": "1"}  # GiB; no warm-up


@contextlib.contextmanager
def serving_vllm(folder: str | Path, **options: object) -> Iterator[str]:
    """Context manager: the address of `lightrlhf.serve` of a model folder by vLLM; `options` are further flags.

    Raises: AssertionError with the server's last lines when it does not come up.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = {"engine": "vllm", "python": os.environ[PYTHON], "port": port, "engine_flags": FLAGS, **options}
    command = [sys.executable, "-m", "lightrlhf.serve", str(folder)]
    command += [f"--{name}={value}" for name, value in flags.items()]
    here = environment() | SMALL | {"PYTHONPATH": str(ROOT), "OPENAI_API_KEY": KEY}
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile("w+") as log:
        with started(command, cwd=ROOT, env=here, stdout=log, stderr=subprocess.STDOUT) as process:
            end = time.monotonic() + PATIENCE
            while not is_up(url):
                if process.poll() is not None or time.monotonic() > end:
                    log.seek(0)
                    raise AssertionError("vLLM did not come up:\n" + "".join(log.readlines()[-40:]))
                time.sleep(0.2)
            try:
                yield url
            finally:
                process.terminate()  # so that it removes its files in shared memory
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(60)


def is_up(url: str) -> bool:
    try:
        return httpx2.get(f"{url}/health", timeout=10).status_code == 200
    except httpx2.RequestError:
        return False


def assert_no_gap(rows: list[dict[str, float]]) -> None:
    """At each of three steps, of which two had weights that the server was given while it ran, all is rounding."""
    assert len(rows) == 3
    for row in rows:
        assert row["sampling/kl"] < 1e-6 and abs(row["sampling/ratio_max"] - 1) < 1e-3 and row["sampling/dropped"] == 0
