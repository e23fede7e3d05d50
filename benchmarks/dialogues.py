"""Dialogues per second: our rollout of several turns against a loop over Hugging Face's `generate`.

    python -m benchmarks.dialogues

The loop is the straightforward one: per turn, all active dialogues in one left-padded batch, with a KV cache, sampled
tokens kept as they are, the user's turn appended as the template renders it. Both sides have the same random model,
dialogues, user and number of turns; replies end with a probability that makes them `--mean_length` tokens on average.
The loop runs with a dynamic and a static cache, the faster one counts. The sides alternate; printed are the medians of
dialogues per second and of the ratio within a turn, with the smallest and largest.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.inputs import SIZES, write_models
from lightrlhf.cli.groups import DecodingArgs, FrozenArgs
from lightrlhf.data.tokens import encode_prompt
from lightrlhf.generation.dialogues import Dialogue, roll_out, user_turn_ids
from lightrlhf.models.loading import load_policy
from lightrlhf.models.tokenizer import load_tokenizer

TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ 'w2 ' + m['content'] + ' ' }}"
    "{% else %}{{ 'w3 ' + m['content'] + eos_token + ' ' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'w3' }}{% endif %}"
)


def user(dialogues: Sequence[Dialogue], seed: int) -> list[str]:
    """A question of sixteen words, different for each dialogue and turn."""
    return [question(dialogue.index, dialogue.num_turns) for dialogue in dialogues]


def question(index: int, turn: int) -> str:
    return " ".join(f"w{4 + (index * 31 + turn * 7 + i) % 500}" for i in range(16))


def main() -> None:
    """Run the benchmark and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=sorted(SIZES), default="4M", help="model, one of benchmarks/inputs.py")
    parser.add_argument("--num_dialogues", type=int, default=64)
    parser.add_argument("--num_turns", type=int, default=5)
    parser.add_argument("--max_new_tokens", type=int, default=128)
    parser.add_argument("--mean_length", type=float, default=26.0, help="mean tokens of a reply")
    parser.add_argument("--turns", type=int, default=5, help="measurements of each side, after one warm-up")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_models(Path(folder), SIZES[args.size], args.mean_length)
        name = f"{folder}/policy"
        tokenizer = load_tokenizer(None, name)
        tokenizer.chat_template = TEMPLATE
        policy = load_policy(name, FrozenArgs(), tokenizer).eval()
    sampling = DecodingArgs(max_new_tokens=args.max_new_tokens)
    openings = []
    for index in range(args.num_dialogues):
        messages = [{"role": "user", "content": question(index, 0)}]
        openings.append(Dialogue(index, messages, encode_prompt(tokenizer, messages)))

    def ours(seed: int) -> int:
        rolled = roll_out(policy, tokenizer, openings, args.num_turns, user, sampling, seed, args.num_dialogues)
        return sum(end - start for row in rolled for start, end in row.turn_spans)

    sides: dict[str, Callable[[int], int]] = {"ours": ours}
    for cache in ("dynamic", "static"):
        sides[f"generate, {cache} cache"] = lambda seed, cache=cache: loop(
            policy.model, tokenizer, openings, args, cache
        )
    rates: dict[str, list[float]] = {side: [] for side in sides}
    sampled = dict.fromkeys(sides, 0)
    for turn in range(args.turns + 1):
        for side, run in sides.items():
            started = time.perf_counter()
            tokens = run(turn)
            if turn:
                rates[side].append(args.num_dialogues / (time.perf_counter() - started))
                sampled[side] += tokens
    for side, values in rates.items():
        mean = sampled[side] / args.turns / args.num_dialogues / args.num_turns
        spread = f"[{min(values):.2f}, {max(values):.2f}]"
        print(f"{side:24} {statistics.median(values):7.2f} {spread} dialogues/s, {mean:.1f} tokens a reply")
    best = max(list(sides)[1:], key=lambda side: statistics.median(rates[side]))
    ratios = [one / other for one, other in zip(rates["ours"], rates[best])]
    print(f"ours / {best}: {statistics.median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]")


@torch.no_grad()
def loop(model: Any, tokenizer: Any, openings: Sequence[Dialogue], args: Any, cache: str) -> int:
    """Roll out the dialogues by `generate`, one call per turn; returns the number of sampled tokens, ends included."""
    rows, sampled = [list(opening.input_ids) for opening in openings], 0
    for turn in range(args.num_turns):
        batch = tokenizer.pad({"input_ids": rows}, padding_side="left", return_tensors="pt")
        texts = model.generate(
            **batch, do_sample=True, top_k=0, max_new_tokens=args.max_new_tokens, cache_implementation=cache
        )
        for i, reply in enumerate(texts[:, batch["input_ids"].shape[1] :].tolist()):
            end = reply.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in reply else len(reply)
            rows[i] += reply[:end]
            sampled += end
            if turn + 1 < args.num_turns:
                rows[i] += user_turn_ids(tokenizer, question(openings[i].index, turn + 1))
    return sampled


if __name__ == "__main__":
    main()
