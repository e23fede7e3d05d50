"""Tokens per second of episodes by their number of turns, at equal sampled tokens; time in tools; the kept KV cache.

    python -m benchmarks.episodes --output_file benchmarks/results/episodes.json
    python -m benchmarks.episodes --pause 2 --num_episodes 32 --env_workers 16 --size 4M --tokens 128  # and --pause 0

A random model plays episodes of 1, 4 and 8 turns of together `--tokens` sampled tokens behind a prompt of as many as an
observation has, in an environment that answers at once, in processes of its own. Each turn reads the row so far: behind
the keys and values of the turn before, and, for comparison, from its first token. Settings alternate; printed are the
medians, with the smallest and largest, of tokens per second and per processor second of this process, and of the share
of the time in which it waits for environments.

With `--pause` episodes of 4 turns move in lock-step or one by one, where an environment takes so many seconds for one
turn of eight, and a twentieth of it for the others.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.dialogues import TEMPLATE, question
from benchmarks.inputs import SIZES, write_models
from lightrlhf import cpu
from lightrlhf.cli.groups import DecodingArgs, FrozenArgs
from lightrlhf.data.tokens import encode_prompt
from lightrlhf.envs.env_workers import EnvPool
from lightrlhf.envs.episode_sampler import new_episode, turn_noise
from lightrlhf.envs.ways import EnvSpec
from lightrlhf.generation.conversations import Plan
from lightrlhf.generation.engine import Completions, generate
from lightrlhf.generation.episodes import Episode, Limits, Result, play
from lightrlhf.models.loading import load_policy
from lightrlhf.models.tokenizer import load_tokenizer

TURNS = (1, 4, 8)
WORDS = 16  # of an observation


class Asking:
    """Asks on and on, at once or after a while; gymnasium's API."""

    def __init__(self, pause: float = 0.0) -> None:
        self.pause = pause

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        self.seed, self.turn = seed or 0, 0
        return question(self.seed, 0), {}

    def step(self, text: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.turn += 1
        is_slow = random.Random(f"{self.seed} {self.turn}").random() < 1 / 8
        time.sleep(self.pause if is_slow else self.pause / 20)
        return question(self.seed, self.turn), 0.0, False, False, {}


class Timed:
    """A pool, and the seconds in which its results were waited for."""

    def __init__(self, pool: EnvPool) -> None:
        self.pool, self.seconds = pool, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.pool, name)

    def results(self, linger: float) -> Iterator[tuple[int, Result]]:
        results = self.pool.results(linger)
        while True:
            started = time.perf_counter()
            found = next(results, None)
            self.seconds += time.perf_counter() - started
            if found is None:
                return
            yield found


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=sorted(SIZES), default="30M", help="model, one of benchmarks/inputs.py")
    parser.add_argument("--num_episodes", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=256, help="sampled in an episode")
    parser.add_argument("--env_workers", type=int, default=4)
    parser.add_argument("--pause", type=float, help="seconds of a slow turn of the environment")
    parser.add_argument("--repetitions", type=int, default=3, help="measurements of each setting, after one warm-up")
    parser.add_argument("--output_file", type=Path, help="JSON of the figures")
    args = parser.parse_args(argv)
    ways = [(turns, keeps, True) for turns in TURNS for keeps in ((True, False) if turns > 1 else (True,))]
    if args.pause is not None:
        ways = [(4, True, True), (4, True, False)]
    found: dict[tuple[int, bool, bool], list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        write_models(Path(folder), SIZES[args.size], None)
        tokenizer = load_tokenizer(None, f"{folder}/policy")
        tokenizer.chat_template = TEMPLATE
        policy = load_policy(f"{folder}/policy", FrozenArgs(), tokenizer).eval()
        pool = EnvPool(EnvSpec("benchmarks.episodes:Asking", {"pause": args.pause or 0.0}), args.env_workers, 60.0)
        for repetition in range(args.repetitions + 1):
            for way in ways:
                one = measure(policy, tokenizer, Timed(pool), args.num_episodes, args.tokens // way[0], *way)
                if repetition:
                    found.setdefault(way, []).append(one)
        pool.close()
    rows = []
    for (turns, keeps, lockstep), ones in found.items():
        values = {name: [one[name] for one in ones] for name in ones[0]}
        named = {"turns": turns, "keeps_cache": keeps, "lockstep": lockstep}
        rows.append({**named, **{name: spread(own) for name, own in values.items()}})
        told = ", ".join(f"{name} {' '.join(f'{v:.3g}' for v in spread(own))}" for name, own in values.items())
        print(f"{turns} turns, cache {'kept' if keeps else 'dropped'}{'' if lockstep else ', one by one'}: {told}")
    if args.output_file:
        settings = {"size": args.size, "num_episodes": args.num_episodes, "tokens": args.tokens}
        settings |= {"env_workers": args.env_workers, "pause": args.pause}
        args.output_file.write_text(json.dumps({**settings, "rows": rows}, indent=1) + "\n")


def measure(
    policy: Any, tokenizer: Any, pool: Any, num_episodes: int, length: int, turns: int, keeps: bool, lockstep: bool
) -> dict[str, float]:
    """Play episodes of `turns` turns of `length` tokens; keeps: keys and values from turn to turn."""
    settings = DecodingArgs(max_new_tokens=length)
    row = {"row": 0, "input_ids": encode_prompt(tokenizer, [{"role": "user", "content": question(0, 99)}])}
    episodes = [new_episode(tokenizer, row, seed, seed) for seed in range(num_episodes)]
    pack = cpu.KeptPacking()

    def sample(waiting: Sequence[Episode], plans: Sequence[Plan]) -> Completions:
        prefixes = [one.prefix for one in waiting]
        prompts, noise = [plan.ids for plan in plans], turn_noise(settings, waiting)
        sampled = generate(policy, prompts, settings, [], noise, num_episodes, tokenizer, prefixes, pack=pack)
        for one, prefix in zip(waiting, prefixes):
            one.prefix = prefix if keeps else None
        return sampled

    started, used = time.perf_counter(), time.process_time()
    with torch.no_grad():
        play(episodes, pool, sample, tokenizer, Limits(turns, 10**6, 2048, length, 1000), lockstep)
    wall, used = time.perf_counter() - started, time.process_time() - used
    tokens = sum(one.num_tokens for one in episodes)
    assert tokens == num_episodes * length * turns and all(len(one.conversation.rows) == 1 for one in episodes)
    return {"tokens/s": tokens / wall, "tokens/cpu s": tokens / used, "share in tools": pool.seconds / wall}


def spread(values: list[float]) -> list[float]:
    """Median, smallest, largest."""
    return [statistics.median(values), min(values), max(values)]


if __name__ == "__main__":
    main()
