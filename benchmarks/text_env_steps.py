"""Steps per second in a text environment, with a reflector and a policy, over a plain loop on `generate`.

    python -m benchmarks.text_env_steps --policy DIR --reflector DIR

The plain loop is a fair one: transformers' `generate` with its KV cache, batched over all unfinished environments,
left-padded, the reflection up to its end token, one more token for the action. Both sides play the same starts with
the same prompts and weights, on one thread unless OMP_NUM_THREADS is set, and alternate. Prints for each mode of
reflection the median steps per second over the turns and the median ratio, with the smallest and largest.

Here greedy comments are cached by observation; the plain loop generates them each time: `greedy` clears the cache
before each turn, as in the first rollout of a run, `greedy, kept` does not, as in all later ones, since the reflector
is not trained. `sampled` caches nothing and measures the engine alone. `with history` shows both models all earlier
steps: comments are new each time, and both models here resume from their KV caches; it needs models fine-tuned on such
prompts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lightrlhf.cli.errors import one_line_errors
from lightrlhf.cli.fields import Args, at_least, flag
from lightrlhf.cli.groups import FrozenArgs
from lightrlhf.cli.lists import pairs, texts
from lightrlhf.cli.parser import parse
from lightrlhf.data.tokens import decode, encode_prompt
from lightrlhf.envs import check_option, make_env, prompts, read_options
from lightrlhf.envs.agents import ActingArgs, ModelAgent, Reflector, num_choices
from lightrlhf.envs.episodes import Decision, Seat, play
from lightrlhf.models.loading import load_policy
from lightrlhf.models.names import resolve
from lightrlhf.models.tokenizer import load_tokenizer

WAYS = {
    "greedy": {"reflect_do_sample": False},
    "greedy, kept": {"reflect_do_sample": False},
    "sampled": {"reflect_do_sample": True},
    "with history": {"with_history": True},
}


@dataclass(frozen=True, kw_only=True)
class StepsArgs(Args):
    """Compare steps per second in a text environment with a plain loop on `generate`."""

    policy: str
    """Experiment dir or checkpoint of the policy."""
    reflector: str
    """Experiment dir or checkpoint of the reflector."""
    env: str = "dangerous_taxi"
    """Environment."""
    env_options: list[str] = flag([], split=pairs, check=check_option)
    """Options of the environment, as name=value."""
    num_envs: int = at_least(1, 64)
    """Environments at once."""
    ways: list[str] = flag(list(WAYS), split=texts, choices=WAYS)
    """Modes of reflection to measure, each as one word."""
    turns: int = at_least(1, 5)
    """Turns of each side."""


class PlainAgent:
    """Policy and reflector by `generate`, written plainly."""

    def __init__(self, policy: Any, reflector: Any, tokenizer: Any, args: ActingArgs, num_labels: int) -> None:
        self.policy, self.reflector, self.tokenizer, self.args = policy, reflector, tokenizer, args
        self.labels = prompts.choices(num_labels)
        self.label_ids = prompts.label_ids(tokenizer, self.labels)

    @torch.inference_mode()
    def __call__(self, seats: Sequence[Seat]) -> list[Decision]:
        history = self.args.with_history
        texts = [prompts.reflection_prompt(seat.text, seat.info, history) for seat in seats]
        comments = self._generate(self.reflector, texts, self.args.reflect_max_new_tokens, self.args.reflect_do_sample)
        texts = [
            prompts.policy_prompt(seat.text, seat.info, decode(self.tokenizer, comment), self._labels(seat), history)
            for seat, comment in zip(seats, comments)
        ]
        decisions = []
        for seat, (choice, *_) in zip(seats, self._generate(self.policy, texts, 1, True)):
            label = self.labels[self.label_ids.index(choice)] if choice in self.label_ids else ""
            decisions.append(Decision(prompts.action_of(label, seat.info, self._labels(seat)) or "", seat.text))
        return decisions

    def _labels(self, seat: Seat) -> list[str]:
        return prompts.labels_for(seat.info)

    def _generate(self, model: Any, texts: Sequence[str], length: int, do_sample: bool) -> list[list[int]]:
        rows = [encode_prompt(self.tokenizer, text) for text in texts]
        padded = self.tokenizer.pad({"input_ids": rows}, padding_side="left", return_tensors="pt")
        out = model.generate(**padded, max_new_tokens=length, do_sample=do_sample, top_k=0, use_cache=True)
        return out[:, padded["input_ids"].shape[1] :].tolist()


@one_line_errors
def main(argv: list[str] | None = None) -> dict[str, float]:
    """Run the comparison; returns the median ratio by mode of reflection."""
    args = parse(StepsArgs, argv)
    sources = [resolve(args.policy, "--policy"), resolve(args.reflector, "--reflector")]
    envs = [make_env(args.env, **read_options(args.env_options)) for _ in range(args.num_envs)]
    starts = (envs[0].starts("train") * args.num_envs)[: args.num_envs]
    tokenizer = load_tokenizer(None, sources[0])
    policy, reflector = (load_policy(source, FrozenArgs(), tokenizer).eval() for source in sources)
    ratios = {}
    for way in args.ways:
        acting = ActingArgs(**WAYS[way])
        labels = num_choices(envs[0], acting)
        speeds: dict[str, list[float]] = {"here": [], "generate": []}
        comments = Reflector(reflector, tokenizer, acting, args.num_envs)
        for turn in range(args.turns + 1):  # the first warms up
            for name in speeds:
                if name == "here":
                    if way != "greedy, kept":
                        comments.comments.clear()
                    agent: Any = ModelAgent(policy, tokenizer, acting, labels, args.num_envs, comments)
                else:
                    agent = PlainAgent(policy.model, reflector.model, tokenizer, acting, labels)
                started = time.perf_counter()
                steps = sum(len(one.decisions) for one in play(envs, starts, agent, f"benchmark {turn}"))
                if turn:
                    speeds[name].append(steps / (time.perf_counter() - started))
        each = [ours / theirs for ours, theirs in zip(speeds["here"], speeds["generate"])]
        ratios[way] = statistics.median(each)
        here, there = (statistics.median(speeds[name]) for name in speeds)
        span = f"[{min(each):.2f}, {max(each):.2f}]"
        print(f"{way:12} here {here:8.1f} steps/s, generate {there:8.1f}, ratio {ratios[way]:.2f} {span}", flush=True)
    return ratios


if __name__ == "__main__":
    main()
