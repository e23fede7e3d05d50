"""Memory of our own server over many requests: after a warm-up, and after as many again as are asked for.

    python -m benchmarks.serving_memory --model datasets_prep/cafe/base --warm_up 1000 --requests 10000

Clients ask at a time for responses of `--max_tokens` tokens to prompts of 32 to 64 random tokens. The cache of keys and
values has 64 MiB, so that the warm-up fills it. Resident memory is read from /proc, so that this runs on Linux alone.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.serving import ask, start

CACHE = "--kv_cache_gb", "0.0625"


def resident(process_id: int) -> float:
    """MiB of a process in memory."""
    return int(re.search(r"VmRSS:\s*(\d+)", Path(f"/proc/{process_id}/status").read_text())[1]) / 1024


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="datasets_prep/cafe/base")
    parser.add_argument("--warm_up", type=int, default=1000)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--max_tokens", type=int, default=8)
    parser.add_argument("--every", type=int, default=500, help="requests between two printed figures")
    args = parser.parse_args()
    choose, found = random.Random(0), {}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.clients) as pool:
        process, port = start(Path.cwd(), str(Path(args.model).resolve()), "float32", Path(folder) / "log", *CACHE)
        try:
            marks = [*range(args.every, args.warm_up + args.requests, args.every)]
            counts = sorted({*marks, args.warm_up, args.warm_up + args.requests})
            for before, count in zip([0, *counts], counts):
                lengths = [choose.randrange(32, 65) for _ in range(count - before)]
                prompts = [[choose.randrange(10, 600) for _ in range(length)] for length in lengths]
                list(pool.map(lambda prompt: ask(port, prompt, args.max_tokens), prompts))
                found[count] = resident(process.pid)
                print(count, f"{found[count]:.1f} MiB", flush=True)
        finally:
            process.kill()
    first, last = found[args.warm_up], found[args.warm_up + args.requests]
    print(json.dumps({"warm": first, "end": last, "growth_percent": 100 * (last / first - 1)}))


if __name__ == "__main__":
    main()
