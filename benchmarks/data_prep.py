"""Speed and memory of data preparation: 160,000 helpful-harmless pairs, against a loop over rows.

    python benchmarks/data_prep.py --file hh_harmless_1500.jsonl.gz

The pairs are those of `--file` (Anthropic's format) repeated as often as needed, or by default generated ones of
similar lengths. The loop does the same work naively: read a row, one tokenizer call per text, lists of Python numbers,
`torch.save` at the end. Time and memory of preparation are those of a separate process with its workers; CPU time next
to wall time shows whether the machine was busy with something else.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from datasets_prep.common import PLAIN_TEMPLATE, BadRow
from datasets_prep.helpful_harmless.prepare_data import to_row
from lightrlhf.data.tokens import encode_prompt, encode_response


def main() -> None:
    """Run the benchmark and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--file", help="jsonl.gz file with `chosen` and `rejected` dialogues")
    parser.add_argument("--rows", type=int, default=160_000, help="pairs to prepare")
    parser.add_argument("--loop_rows", type=int, default=10_000, help="pairs for the loop over rows")
    parser.add_argument("--num_proc", type=int, default=2, help="tokenising processes")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        lines = gzip.open(args.file, "rt", encoding="utf-8").read().splitlines() if args.file else generated(1500)
        source, tokenizer_dir = Path(folder, "pairs.jsonl.gz"), Path(folder, "tokenizer")
        with gzip.open(source, "wt", encoding="utf-8", compresslevel=1) as file:
            for number in range(args.rows):
                file.write(lines[number % len(lines)] + "\n")
        tokenizer = train_tokenizer(lines)
        tokenizer.save_pretrained(tokenizer_dir)
        print(f"{args.rows} pairs, {len(lines)} different, vocabulary {len(tokenizer)}")

        for stage in ("all", "preference"):
            seconds, busy, memory = measured(source, tokenizer_dir, Path(folder, stage), stage, args.num_proc)
            print(f"--stage {stage}: {seconds:.1f} s ({busy:.1f} s CPU time), peak memory {memory / 2**30:.2f} GB")
        ours = args.rows / seconds
        theirs = args.loop_rows / loop(lines, tokenizer, args.loop_rows, Path(folder, "a.pt"))
        print(f"pairs per second: {ours:.0f}, row by row {theirs:.0f}, ratio {ours / theirs:.1f}")


def measured(source: Path, tokenizer: Path, destination: Path, stage: str, num_proc: int) -> tuple[float, float, int]:
    """(seconds, CPU seconds, peak bytes) of one run."""
    flags = {"destination_dir": destination, "dataset_name": source, "tokenizer_name": tokenizer, "num_proc": num_proc}
    flags |= {"split": "null", "remove_same_inputs": "False", "stage": stage}
    command = [sys.executable, "-m", "datasets_prep.helpful_harmless.prepare_data"]
    before, start, peak = os.times(), time.perf_counter(), 0
    process = subprocess.Popen([*command, *(f"--{name}={value}" for name, value in flags.items())])
    while process.poll() is None:
        peak = max(peak, memory_of(process.pid))
        time.sleep(0.5)  # polling costs time too
    if process.returncode:
        raise SystemExit(process.returncode)
    after = os.times()
    busy = after.children_user + after.children_system - before.children_user - before.children_system
    return time.perf_counter() - start, busy, peak


def memory_of(pid: int) -> int:
    """Bytes of a process and its children, with shared pages counted once."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    own = next(int(line.split()[1]) * 1024 for line in rollup.splitlines() if line.startswith("Pss:"))
    return own + sum(memory_of(int(child)) for child in children)


def loop(lines: list[str], tokenizer, rows: int, file: Path) -> float:
    """Seconds of the naive loop over `rows` pairs."""
    tokenizer.chat_template = PLAIN_TEMPLATE
    start = time.perf_counter()
    preference = []
    for number in range(rows):
        try:
            row = to_row(json.loads(lines[number % len(lines)]))
        except BadRow:
            continue
        prompt = encode_prompt(tokenizer, row["prompt"])
        chosen, rejected = (prompt + encode_response(tokenizer, " " + row[side]) for side in ("chosen", "rejected"))
        if len(prompt) <= 256 and chosen != rejected:
            preference.append({"prompt_len": len(prompt), "chosen_input_ids": chosen, "rejected_input_ids": rejected})
    torch.save(preference, file)
    return time.perf_counter() - start


def train_tokenizer(lines: list[str]):
    """A byte-level BPE of 8,000 tokens, as GPT-2's."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=8000, special_tokens=["</s>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator((json.loads(line)["chosen"] for line in lines), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


def generated(count: int) -> list[str]:
    """Pairs of random dialogues with about as many turns and words as the real ones."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(1, 9))) for _ in range(3000)]

    def text(low: int, high: int) -> str:
        return " ".join(rng.choices(words, k=rng.randint(low, high)))

    pairs = []
    for _ in range(count):
        turns = [f"\n\nHuman: {text(4, 30)}\n\nAssistant: {text(5, 60)}" for _ in range(rng.randint(0, 4))]
        start = "".join(turns) + f"\n\nHuman: {text(4, 30)}\n\nAssistant:"
        pairs.append({"chosen": f"{start} {text(5, 70)}", "rejected": f"{start} {text(5, 70)}"})
    return [json.dumps(pair) for pair in pairs]


if __name__ == "__main__":
    main()
