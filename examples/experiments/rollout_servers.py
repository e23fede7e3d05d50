"""The café sampled on servers: learning and time of GRPO and PPO beside the local engine, over seeds.

Every run has the flags of `critic_free_cafe` and the learning rate that was chosen there: 64 responses a step, 48
steps, from the same SFT policy and reward model of its seed. The arms differ in what samples:

    local     the engine in the training process
    own       `python -m lightrlhf.serve` beside it, float32
    own, one step stale    the same, with `--max_staleness 1`
    vLLM      a real one, started by `lightrlhf.serve --engine vllm`; only with `--vllm_python`

Servers correct the gap as they do by default (token weights truncated at 2). The training process has one core and the
server another one, one thread each, so a stale arm may overlap sampling and learning; the local arm has its core alone.
Where the system has one core, or does not bind processes, both share what there is, which the page must say.

Read of each run: gold score, KL and length on the 400 test prompts after the last step; the median seconds of a step
(wall time of sampling, scoring and update); the largest KL a token between server and trainer, that of the first step
and the largest ratio. Claims, by the 95% interval of the paired difference of gold over seeds: that an arm differs from
the local one. A run takes less than ten minutes: ten seeds, 1 to 10; `--seeds 11 12` adds two to those that are there.

    python -m examples.experiments.rollout_servers --vllm_python .venv-vllm/bin/python
"""

from __future__ import annotations

import contextlib
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2

from examples.experiments.cafe_methods import COMMON, METHODS, prepared
from examples.experiments.records import TEN, common_seeds, made_by, results
from examples.experiments.stats import paired, report_claims, shown, shown_gap
from examples.programs import logged
from lightrlhf import evaluate
from lightrlhf.cli.addresses import KEY
from lightrlhf.cli.errors import RunFailure, one_line_errors
from lightrlhf.cli.fields import Args, flag, random_seed
from lightrlhf.cli.parser import parse
from lightrlhf.storage.checkpoint import checkpoints
from lightrlhf.storage.results import print_table
from lightrlhf.storage.run_dir import read_metrics

STEPS, SMOKE_STEPS = 48, 2
RATES = {"GRPO": 1e-3, "PPO": 1e-3}  # of critic_free_cafe
ARMS: dict[str, dict[str, Any]] = {
    "local": {},
    "own": {"engine": "lightrlhf"},
    "own, one step stale": {"engine": "lightrlhf", "max_staleness": 1},
    "vLLM": {"engine": "vllm"},
}
MEASURES = {"gold": "gold score", "kl": "KL, nats", "length": "tokens", "seconds": "seconds a step"}
GAPS = {"first_kl": "KL a token at step 1", "largest_kl": "largest", "largest_ratio": "largest ratio"}
PATIENCE = 300.0  # seconds until a server answers


@dataclass(frozen=True, kw_only=True)
class RolloutServersArgs(Args):
    """Compare sampling on servers with the local engine on the café."""

    output_dir: str = "rollout_servers"
    """Folder for data, logs and results."""
    seeds: list[int] | None = random_seed(None)
    """Seeds to run; 1 to 10 by default."""
    arms: list[str] | None = flag(None, choices=ARMS)
    """Arms to run; all by default, vLLM with `vllm_python` only."""
    vllm_python: str | None = None
    """Interpreter of the environment that has vLLM."""
    smoke: bool = False
    """Run every stage for a moment only, to test that it works; the results mean nothing."""

    def _check(self) -> None:
        if "vLLM" in (self.arms or []) and self.vllm_python is None:
            raise ValueError("--arms vLLM needs --vllm_python, the interpreter of the environment that has it")


@one_line_errors
def main(argv: list[str] | None = None) -> dict[str, bool]:
    """Run what has no result yet; returns which claims hold."""
    args = parse(RolloutServersArgs, argv)
    folder, seeds = Path(args.output_dir).resolve(), args.seeds or TEN
    arms = args.arms or [arm for arm in ARMS if arm != "vLLM" or args.vllm_python]
    settings = {"common": COMMON, "rates": RATES, "steps": STEPS, "smoke": args.smoke}
    with results("rollout_servers", folder, settings) as writer:
        for seed in seeds:
            own = folder / f"seed-{seed}"
            for arm in arms:
                left = [m for m in RATES if not any(key(row) == (arm, m, seed) for row in writer.rows)]
                if left:
                    prepared(own, seed, args.smoke)
                    with sampler(args, own, arm) as where:
                        for method in left:
                            writer.append(run_arm(own, arm, method, seed, where, args.smoke) | made_by())
        seeds = common_seeds(writer.rows, arms)
        rows = sorted((row for row in writer.rows if row["seed"] in seeds), key=lambda row: row["seed"])
    claims = show_results(rows, arms)
    report_claims(claims, folder)
    return claims


def key(row: dict[str, Any]) -> tuple[str, str, int]:
    return row["arm"], row["method"], row["seed"]


# ----------------------------------------------------------------------------------------------------------- servers
@contextlib.contextmanager
def sampler(args: RolloutServersArgs, folder: Path, arm: str) -> Iterator[dict[str, Any]]:
    """Context manager: the flags of an arm, with its server started and the cores divided."""
    flags = {name: value for name, value in ARMS[arm].items() if name != "engine"}
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    mine, others = set(cores[:1]), set(cores[1:2] or cores[:1])
    before = os.environ.get(KEY)
    os.environ[KEY] = before or "key-of-the-experiment"
    try:
        bind(mine)
        if arm == "local":
            yield {}
            return
        with serving(args, folder, ARMS[arm]["engine"], others) as url:
            yield {"rollout_server": [url]} | flags
    finally:
        bind(set(cores))
        if before is None:
            del os.environ[KEY]


def bind(cores: set[int]) -> None:
    """Bind this process to cores, where the system can."""
    if cores:
        os.sched_setaffinity(0, cores)


@contextlib.contextmanager
def serving(args: RolloutServersArgs, folder: Path, engine: str, cores: set[int]) -> Iterator[str]:
    """Context manager: address of a server of the seed's SFT policy, which has answered."""
    _, start, _ = prepared(folder, 0, args.smoke)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "lightrlhf.serve", start, "--engine", engine, "--port", str(port)]
    if engine == "vllm":
        more = "--enforce-eager --max-model-len 512"
        command += ["--python", str(args.vllm_python), f"--engine_flags={more}"]
    else:
        command += ["--accelerator", "cpu", "--rollout_mini_batch_size", str(COMMON["rollout_mini_batch_size"])]
    threads = {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with (folder / "server.txt").open("a") as log:
        process = subprocess.Popen(command, env=os.environ | threads, stdout=log, stderr=log, start_new_session=True)
    try:
        if cores:
            os.sched_setaffinity(process.pid, cores)
        wait_for(process, f"http://127.0.0.1:{port}", folder / "server.txt")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(PATIENCE)


def wait_for(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    """Wait until a server answers. Raises: RunFailure when its process has ended, or after a while."""
    end = time.monotonic() + PATIENCE
    while process.poll() is None and time.monotonic() < end:
        with contextlib.suppress(httpx2.RequestError):
            if httpx2.get(url + "/health", timeout=5.0).status_code == 200:
                return
        time.sleep(0.5)
    raise RunFailure(f"the server did not answer at {url}; its output is {log}")


# -------------------------------------------------------------------------------------------------------------- runs
def run_arm(folder: Path, arm: str, method: str, seed: int, where: dict[str, Any], smoke: bool) -> dict[str, Any]:
    """Train by one method in one arm; returns what is read of the run."""
    data, start, reward = prepared(folder, seed, smoke)
    program, own_flags, rate_flag = METHODS[method]
    steps = SMOKE_STEPS if smoke else STEPS
    flags = {"data_dir": data, "sft_experiment_dir": start, "rm_experiment_dir": reward, "seed": seed}
    flags |= {"log_dir": folder / "logs" / arm.replace(" ", "_"), "max_steps": steps, rate_flag: RATES[method]}
    flags |= {"eval_interval": 0, "save_interval": steps}
    experiment = logged(folder / "output.txt", program, **flags, **COMMON, **own_flags, **where)
    last = str(checkpoints(Path(experiment))[-1])
    few = {"max_new_tokens": 96, "rollout_mini_batch_size": 128, "num_samples": 8 if smoke else None}
    models = {"model_name": [last], "reference_dir": start, "rm_experiment_dir": reward}
    (result,) = logged(folder / "output.txt", evaluate, **models, **few, accelerator="cpu")
    rows = [row for row in read_metrics(experiment) if "time/update" in row]
    phases = ("rollout", "score", "resample", "update")
    row = {"arm": arm, "method": method, "seed": seed, "gold": result["gold"], "kl": result["kl"]}
    row |= {"length": result["mean_length"]}
    row["seconds"] = statistics.median(sum(one.get(f"time/{phase}", 0.0) for phase in phases) for one in rows)
    row["sampling_seconds"] = statistics.median(one["time/rollout"] for one in rows)
    if where:
        kls = [one["sampling/kl"] for one in rows]
        row |= {
            "first_kl": kls[0],
            "largest_kl": max(kls),
            "fresh_kl": max(kls[:1] if "max_staleness" in where else kls),
        }
        row |= {"largest_ratio": max(one["sampling/ratio_max"] for one in rows)}
    print(f"{arm}, {method}, seed {seed}: " + ", ".join(f"{name} {row[name]:.3f}" for name in MEASURES), flush=True)
    return row


# ----------------------------------------------------------------------------------------------------------- results
def show_results(rows: Sequence[dict[str, Any]], arms: Sequence[str]) -> dict[str, bool]:
    """Print the tables; returns which claims hold."""
    claims: dict[str, bool] = {}
    for method in RATES:
        table = []
        by_arm = {arm: [row for row in rows if (row["arm"], row["method"]) == (arm, method)] for arm in arms}
        for arm, mine in by_arm.items():
            cells = [shown([row[name] for row in mine], 1 if name == "length" else 3) for name in MEASURES]
            gaps = [f"{max(row[name] for row in mine):.2g}" if "first_kl" in mine[0] else "" for name in GAPS]
            table.append((arm, *cells, *gaps))
        title = f"{method} on the café: mean over {len(by_arm[arms[0]])} seeds [95% interval]"
        print_table(title, ("", *MEASURES.values(), *GAPS.values()), table, width=150)
        for arm in arms:
            if arm != "local" and "local" in by_arm:
                gap = paired([row["gold"] for row in by_arm[arm]], [row["gold"] for row in by_arm["local"]])
                print(f"  gold, {arm} minus local: {shown_gap(gap)}")
                claims[f"{method}: {arm} differs from local"] = gap[1] > 0 or gap[2] < 0
    return claims


if __name__ == "__main__":
    main()
