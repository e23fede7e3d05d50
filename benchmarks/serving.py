"""Tokens a second and time to the first token of our own server, with several clients at a time.

    python -m benchmarks.serving --model datasets_prep/cafe/base --clients 1 8 32 --output result.json

Every client streams `--requests` responses of `--max_tokens` tokens, one after another, to prompts of 32 to 64 random
tokens. `--other TREE` is a second checkout of this repository, whose server is measured in turns with this one: clients
of one number at the first server, then at the second, `--rounds` times. Figures are medians over rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

KEY = "key-of-the-benchmark"


def start(tree: Path, model: str, dtype: str, log: Path, *flags: str) -> tuple[subprocess.Popen[bytes], int]:
    """A server of a checkout, and its port once it answers."""
    variables = {**os.environ, "PYTHONPATH": str(tree), "OPENAI_API_KEY": KEY}
    command = [sys.executable, "-m", "lightrlhf.serve", model, "--engine", "lightrlhf", "--accelerator", "cpu"]
    with log.open("wb") as file:
        given = [*command, "--port", "0", "--dtype", dtype, *flags]
        process = subprocess.Popen(given, cwd=tree, env=variables, stdout=file, stderr=file)
    while "serving " not in (text := log.read_text()):
        if process.poll() is not None:
            raise SystemExit(text)
        time.sleep(0.2)
    return process, int(text.strip().rpartition(":")[2])


def ask(port: int, prompt: list[int], max_tokens: int) -> tuple[int, float]:
    """Stream a response: its tokens, and seconds to the first."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream": True, "return_token_ids": True}
    began, first, count = time.perf_counter(), 0.0, 0
    connection = HTTPConnection("127.0.0.1", port, timeout=3600)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Authorization": f"Bearer {KEY}"})
    for line in connection.getresponse():
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
    parser.add_argument("--model", default="datasets_prep/cafe/base")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--requests", type=int, default=2)
    parser.add_argument("--max_tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--other", type=Path, help="a second checkout")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    trees = {"this": Path.cwd()} | ({"other": args.other} if args.other else {})
    model = str(Path(args.model).resolve()) if Path(args.model).exists() else args.model
    found: dict[str, dict[str, list[Any]]] = {name: {} for name in trees}
    with tempfile.TemporaryDirectory() as folder:
        servers = {name: start(tree, model, args.dtype, Path(folder) / name) for name, tree in trees.items()}
        try:
            for _, port in servers.values():
                measure(port, 1, args, 0)  # warms up
            for number in range(args.rounds):
                for clients in args.clients:
                    for name, (_, port) in servers.items():
                        row = measure(port, clients, args, number + 1)
                        found[name].setdefault(str(clients), []).append(row)
                        print(name, clients, json.dumps(row), flush=True)
        finally:
            for process, _ in servers.values():
                process.kill()
    result = {
        name: {
            clients: {key: statistics.median(row[key] for row in rows) for key in rows[0]}
            for clients, rows in by_clients.items()
        }
        for name, by_clients in found.items()
    }
    print(json.dumps(result, indent=1))
    if args.output:
        settings = {name: str(value) for name, value in vars(args).items() if name not in ("other", "output")}
        args.output.write_text(json.dumps({"settings": settings, "medians": result, "rounds": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
