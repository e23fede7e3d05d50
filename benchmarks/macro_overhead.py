"""Overhead of macro actions: seconds of a PPO iteration with segments, relative to token PPO.

    python -m benchmarks.macro_overhead

Short runs on the café's bundled model; the conditions alternate, each turn in another order, so that the position in a
turn favours none. Learning rates are close to zero, so that all sample the same answers and do the same work. Prints
the median over turns of the seconds of an iteration, and of its ratio to token PPO in the same turn, with the smallest
and largest. An iteration's time varies by more than segments can cost, so the parts they affect, segmentation and
advantage estimation, are also timed alone, as a share of an iteration of token PPO. The rest is the same for both.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

from datasets_prep.cafe import prepare_data
from datasets_prep.cafe.pretrain_base import BASE_DIR
from lightrlhf import ppo
from lightrlhf.storage.run_dir import read_metrics

CONDITIONS = {
    "token": [],
    "fixed, n=5": ["--ngram=5"],
    "randomized": ["--termination_condition=randomized"],
    "ppl": ["--termination_condition=ppl"],
    "parsing": ["--termination_condition=parsing"],
}
SIZES = ["--rollout_size=64", "--rollout_mini_batch_size=64", "--mini_batch_size=32", "--micro_batch_size=32"]
FLAGS = ["--max_new_tokens=64", "--actor_learning_rate=1e-9", "--critic_learning_rate=1e-9", "--log_interval=1"]
FLAGS += ["--eval_interval=0", "--save_interval=1000", "--logger=csv", "--accelerator=cpu"]


def constant(prompts: list[str], completions: list[str], **columns: object) -> list[float]:
    """A constant reward."""
    return [0.0] * len(completions)


def timed(function: Callable[..., Any], taken: list[float]) -> Callable[..., Any]:
    """The function, with each call's seconds appended to `taken`."""

    def call(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        result = function(*args, **kwargs)
        taken.append(time.perf_counter() - started)
        return result

    return call


def main() -> None:
    """Run the benchmark and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=5, help="measurements of each condition")
    parser.add_argument("--steps", type=int, default=6, help="rollouts per turn; the first is a warm-up")
    args = parser.parse_args()
    whole: dict[str, list[float]] = {name: [] for name in CONDITIONS}  # seconds of an iteration
    parts: dict[str, list[float]] = {name: [] for name in CONDITIONS}  # of segmentation and advantage estimation in it
    segmenting: list[float] = []
    estimating: list[float] = []
    ppo.segment_responses, ppo.estimate_advantages = (
        timed(ppo.segment_responses, segmenting),
        timed(ppo.estimate_advantages, estimating),
    )
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        with contextlib.redirect_stdout(io.StringIO()):
            prepare_data.main(["--destination_dir", f"{folder}/data", "--tokenizer_name", str(BASE_DIR)])
        where = ["--data_dir", f"{folder}/data", "--log_dir", f"{folder}/logs", "--model_name", str(BASE_DIR)]
        reward = "--reward_function=benchmarks.macro_overhead:constant"
        for turn in range(args.turns):
            names = list(CONDITIONS)
            for name in names[turn % len(names) :] + names[: turn % len(names)]:  # rotated
                segmenting.clear()
                estimating.clear()
                with contextlib.redirect_stdout(io.StringIO()):
                    run = ppo.main([*where, reward, *SIZES, *FLAGS, f"--max_steps={args.steps}", *CONDITIONS[name]])
                rows = read_metrics(run)[1:]
                whole[name].append(
                    statistics.median(row["time/rollout"] + row["time/score"] + row["time/update"] for row in rows)
                )
                parts[name].append(statistics.median(map(sum, zip(segmenting[1:], estimating[1:]))))
    print("             iteration, ratio to token PPO    segmentation and advantages, more than token PPO")
    for name in CONDITIONS:
        ratios = [ours / token for ours, token in zip(whole[name], whole["token"])]
        more = [(one - other) / token for one, other, token in zip(parts[name], parts["token"], whole["token"])]
        print(
            f"{name:12} {statistics.median(whole[name]):.3f} s   {statistics.median(ratios):.3f} "
            f"[{min(ratios):.3f}, {max(ratios):.3f}]     {1000 * statistics.median(parts[name]):5.1f} ms   "
            f"{100 * statistics.median(more):+.2f}% [{100 * min(more):+.2f}, {100 * max(more):+.2f}] of an iteration"
        )


if __name__ == "__main__":
    main()
