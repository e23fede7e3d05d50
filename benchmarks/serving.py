"""Tokens a second and time to the first token of our own server, with several clients at a time.

    python -m benchmarks.serving --model datasets_prep/cafe/base --clients 1 8 32 --output result.json

Every client streams `--requests` responses of `--max_tokens` tokens, one after another, to prompts of 32 to 64 random
tokens. A second server is measured in turns with it: clients of one number at the first, then at the second, `--rounds`
times. `--other TREE` is that of another checkout of this repository, `--vllm PYTHON` a vLLM in its own environment.
Figures are medians over rounds; `ratios` are of ours to the other's tokens per second in each round, the median and
the range. Threads are those of OMP_NUM_THREADS.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from benchmarks.inputs import SIZES, write_models

KEY = "key-of-the-benchmark"
LONGEST = 512  # tokens of a prompt with its response that vLLM is prepared for


def start(tree: Path, model: str, dtype: str, log: Path, *flags: str) -> tuple[subprocess.Popen[bytes], int]:
    """A server of a checkout, and its port once it answers."""
    variables = {**os.environ, "PYTHONPATH": str(tree), "OPENAI_API_KEY": KEY}
    command = [sys.executable, "-m", "lightrlhf.serve", model, "--engine", "lightrlhf", "--accelerator", "cpu"]
    with log.open("wb") as file:
        given = [*command, "--port", "0", "--dtype", dtype, *flags]
        process = subprocess.Popen(given, cwd=tree, env=variables, stdout=file, stderr=file, process_group=0)
    while "serving " not in (text := log.read_text()):
        if process.poll() is not None:
            raise SystemExit(text)
        time.sleep(0.2)
    return process, int(text.strip().rpartition(":")[2])


def start_vllm(python: str, model: str, dtype: str, log: Path, *flags: str) -> tuple[subprocess.Popen[bytes], int]:
    """A vLLM server, and its port once it answers."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[: int(os.environ["OMP_NUM_THREADS"])]))
    variables = {**os.environ, "OPENAI_API_KEY": KEY, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": cores}
    command = [sys.executable, "-m", "lightrlhf.serve", model, "--engine", "vllm", "--python", python]
    more = " ".join([f"--max-model-len {LONGEST} --max-num-seqs 64", *flags])
    with log.open("wb") as file:
        given = [*command, "--port", str(port), "--dtype", dtype, f"--engine_flags={more}"]
        process = subprocess.Popen(given, env=variables, stdout=file, stderr=file, process_group=0)
    while True:
        if process.poll() is not None:
            raise SystemExit(log.read_text()[-4000:])
        with contextlib.suppress(OSError):
            connection = HTTPConnection("127.0.0.1", port, timeout=60)
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return process, port
        time.sleep(0.5)


def ask(port: int, prompt: list[int], max_tokens: int) -> tuple[int, float]:
    """Stream a response: its tokens, and seconds to the first."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream": True, "return_token_ids": True}
    began, first, count = time.perf_counter(), 0.0, 0
    connection = HTTPConnection("127.0.0.1", port, timeout=3600)
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    response = connection.getresponse()
    if response.status != 200:
        raise SystemExit(response.read().decode())
    for line in response:
        if line.startswith(b"data: {"):
            count += len(json.loads(line[6:])["choices"][0]["token_ids"])
            first = first or time.perf_counter() - began
    connection.close()
    return count, first


def measure(port: int, clients: int, args: argparse.Namespace, seed: int) -> dict[str, float]:
    """Tokens a second of all clients, and the median and the largest time to the first token."""
    choose = random.Random(seed)
    prompts = [[[choose.randrange(10, 600) for _ in range(choose.randrange(32, 65))] for _ in range(args.requests)]]
    prompts += [[[choose.randrange(10, 600) for _ in prompt] for prompt in prompts[0]] for _ in range(clients - 1)]

    def work(own: list[list[int]]) -> list[tuple[int, float]]:
        return [ask(port, prompt, args.max_tokens) for prompt in own]

    began = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        found = [row for rows in pool.map(work, prompts) for row in rows]
    seconds, firsts = time.perf_counter() - began, [first for _, first in found]
    tokens = sum(count for count, _ in found)
    return {"tokens_per_second": tokens / seconds, "first_token": statistics.median(firsts), "slowest": max(firsts)}


def main() -> None:
    """Measure, print, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model", default="datasets_prep/cafe/base", help="a folder, or a size of benchmarks/inputs.py"
    )
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--requests", type=int, default=2)
    parser.add_argument("--max_tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--other", type=Path, help="a second checkout")
    parser.add_argument("--vllm", help="the interpreter of an environment with vLLM")
    parser.add_argument("--vllm_flags", default="", help="more flags of vLLM's server")
    parser.add_argument("--output", type=Path, help="to which the result is added, by model and dtype")
    args = parser.parse_args()
    found: dict[str, dict[str, list[Any]]] = {}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        model = write_model(args.model, Path(folder))
        servers = {"this": start(Path.cwd(), model, args.dtype, Path(folder) / "this")}
        stack.callback(end, servers["this"][0])
        if args.other:
            servers["other"] = start(args.other, model, args.dtype, Path(folder) / "other")
            stack.callback(end, servers["other"][0])
        if args.vllm:
            servers["vllm"] = start_vllm(args.vllm, model, args.dtype, Path(folder) / "vllm", args.vllm_flags)
            stack.callback(end, servers["vllm"][0])
        for _, port in servers.values():
            measure(port, max(args.clients), args, 0)  # warms up
        for number in range(args.rounds):
            for clients in args.clients:
                for name, (_, port) in servers.items():
                    row = measure(port, clients, args, number + 1)
                    found.setdefault(name, {}).setdefault(str(clients), []).append(row)
                    print(name, clients, json.dumps(row), flush=True)
    result = {
        name: {
            clients: {key: statistics.median(row[key] for row in rows) for key in rows[0]}
            for clients, rows in by_clients.items()
        }
        for name, by_clients in found.items()
    }
    ratios = {name: ratios_of(found["this"], found[name]) for name in found if name != "this"}
    print(json.dumps({"medians": result, "ratios": ratios}, indent=1))
    if args.output:
        settings = {name: value for name, value in vars(args).items() if name not in ("other", "vllm", "output")}
        settings |= {"threads": os.environ.get("OMP_NUM_THREADS"), "commit": commit()}
        kept = json.loads(args.output.read_text()) if args.output.exists() else {}
        own = {"settings": settings, "medians": result, "ratios": ratios, "rounds": found}
        kept[f"{Path(args.model).name} {args.dtype}"] = own
        args.output.write_text(json.dumps(kept, indent=1) + "\n")


def write_model(name: str, folder: Path) -> str:
    """The folder of a model; a size of `inputs` is written into `folder`."""
    if name not in SIZES:
        return str(Path(name).resolve()) if Path(name).exists() else name
    write_models(folder, SIZES[name], None)
    return str(folder / "policy")


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a server and its processes."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def ratios_of(ours: dict[str, list[Any]], others: dict[str, list[Any]]) -> dict[str, list[float]]:
    """By clients the median, the least and the largest ratio of tokens per second in a round."""
    found = {}
    for clients in ours:
        pairs = zip(ours[clients], others[clients])
        rates = [one["tokens_per_second"] / other["tokens_per_second"] for one, other in pairs]
        found[clients] = [statistics.median(rates), min(rates), max(rates)]
    return found


def commit() -> str:
    """The commit that is measured."""
    return subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    main()
