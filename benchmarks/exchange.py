"""Seconds in which new weights reach a vLLM server through the exchange folder, by phase.

    LIGHTRLHF_VLLM_PYTHON=.venv-vllm/bin/python python -m benchmarks.exchange

Models with random weights in the shapes of Llama: 135M (that of SmolLM2-135M) and 1B. Weights are those of a trainer
(float32, or bfloat16 to see what half the bytes are worth), numbers of the server as its `--dtype` says. Each turn
writes a version as training does, then pauses the server, has it load the version, resets the prefix cache, and
resumes. Prints the median over turns of each phase, the largest of the whole, and the size of a version.

1B in float32 on one machine takes more than 24 GB: the trainer's weights, two versions in memory, and the server's.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import torch

from lightrlhf.generation.exchange import Exchange
from lightrlhf.generation.vllm_command import Launch
from lightrlhf.models.roles import Policy

LLAMA = {"vocab_size": 49152, "tie_word_embeddings": True, "max_position_embeddings": 2048}
SIZES: dict[str, dict[str, Any]] = {
    "135M": LLAMA
    | {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
    | {"num_attention_heads": 9, "num_key_value_heads": 3},
    "1B": LLAMA
    | {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22}
    | {"num_attention_heads": 32, "num_key_value_heads": 4},
}
TYPES = ("float32 to float32", "float32 to bfloat16", "bfloat16 to bfloat16")  # of the trainer to the server
PHASES = ("write", "pause", "load", "reset", "resume")
FLAGS = "--enforce-eager --max-model-len 256 --skip-tokenizer-init"
PATIENCE = 600.0  # seconds until a server is up


def random_model(size: str, dtype: torch.dtype) -> Policy:
    """A model with random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", pad_token_id=0, bos_token_id=1, eos_token_id=1, **SIZES[size])
    return Policy(AutoModelForCausalLM.from_config(config, dtype=dtype))


@contextlib.contextmanager
def serving(python: str, folder: Path, dtype: str) -> Iterator[httpx2.Client]:
    """Context manager: a client of vLLM with a folder's model."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launch = Launch(
        python=python,
        model=str(folder),
        served_name="model",
        host="127.0.0.1",
        port=port,
        dtype=dtype,
        enable_lora=False,
        max_lora_rank=1,
        trust_remote_code=False,
        more=FLAGS,
    )
    small = launch.variables() | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_CI_ENV": "1"}
    with tempfile.TemporaryFile("w+") as log:
        streams: dict[str, Any] = {"stdout": log, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(launch.command(), env=os.environ | small, start_new_session=True, **streams)
        try:
            with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE) as client:
                wait(client, process, log)
                yield client
        finally:
            process.terminate()
            process.wait()


def wait(client: httpx2.Client, process: subprocess.Popen[bytes], log: Any) -> None:
    """Wait until a server is up. Raises: SystemExit with its last lines when it ends."""
    end = time.monotonic() + PATIENCE
    while True:
        with contextlib.suppress(httpx2.RequestError):
            if client.get("/health").status_code == 200:
                return
        if process.poll() is not None or time.monotonic() > end:
            log.seek(0)
            sys.exit("vLLM did not come up:\n" + "".join(log.readlines()[-20:]))
        time.sleep(0.2)


def measure(python: str, size: str, types: str, turns: int) -> None:
    """Print a row of the table."""
    weights, _, dtype = types.partition(" to ")
    policy, exchange = random_model(size, getattr(torch, weights)), Exchange()
    taken: dict[str, list[float]] = {phase: [] for phase in PHASES}

    def timed(phase: str, work: Callable[[], Any]) -> Any:
        started = time.perf_counter()
        result = work()
        taken[phase].append(time.perf_counter() - started)
        return result

    with contextlib.closing(exchange):
        first = exchange.write(policy, 0, exchange.folder).folder
        size_of_version = sum(file.stat().st_size for file in first.iterdir())
        with serving(python, first, dtype) as client:

            def post(path: str, body: Any = None) -> Callable[[], None]:
                return lambda: client.post(path, json=body or {}).raise_for_status() and None

            for turn in range(1, turns + 1):
                target = timed("write", partial(exchange.write, policy, turn, exchange.folder))
                path = {"weights_path": str(target.folder)}
                timed("pause", post("/pause?mode=wait"))
                timed("load", post("/collective_rpc", {"method": "reload_weights", "kwargs": path}))
                timed("reset", post("/reset_prefix_cache"))
                timed("resume", post("/resume"))
    whole = [sum(parts) for parts in zip(*taken.values())]
    medians = "  ".join(f"{statistics.median(taken[phase]):7.3f}" for phase in PHASES)
    parts = f"{statistics.median(whole):7.3f} {max(whole):8.3f}"
    print(f"{size:5} {types:21} {size_of_version / 1e9:6.2f}  {medians}  {parts}", flush=True)


def main() -> None:
    """Run the benchmark and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=5, help="versions that are written and loaded")
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=SIZES)
    parser.add_argument("--types", nargs="+", default=list(TYPES), choices=TYPES, help="of the trainer to the server")
    args = parser.parse_args()
    python = os.environ.get("LIGHTRLHF_VLLM_PYTHON") or sys.exit("LIGHTRLHF_VLLM_PYTHON names no interpreter with vLLM")
    print(f"size  types                     GB  {'  '.join(f'{phase:>7}' for phase in PHASES)}    whole  largest")
    for size in args.sizes:
        for types in args.types:
            measure(python, size, types, args.turns)


if __name__ == "__main__":
    main()
