"""Pretrain the café's base model: a Llama of under 1M parameters that has read many conversations at the counter.

Real users start from a base model; so does the quickstart, from the one this script writes to `base/`. Its corpus
mixes good and flawed answers exactly as the demonstrations do, each followed by what the guest says to it ("No, I asked
for two scones."), which is how a language model learns what a wrong order is. It holds orders of the training split
only, and neither preference pairs nor gold scores.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from datasets_prep.cafe.tokenizer import PROMPT, train_tokenizer
from datasets_prep.cafe.world import MIXTURE, Order, Plan, flawed, good_plan, orders, random_flaws, reaction, request
from lightrlhf.common.args import check_at_least, one_line_errors, parse
from lightrlhf.common.model import quiet_libraries, tiny_config

BASE_DIR = Path(__file__).resolve().parent / "base"


@dataclass(frozen=True, kw_only=True)
class PretrainArgs:
    """Pretrain the café's base model."""

    destination_dir: str = str(BASE_DIR)
    """Folder to write."""
    num_steps: int = 10_000
    """Optimiser steps of `batch_size` conversations."""
    batch_size: int = 64
    """Conversations per step."""
    learning_rate: float = 2e-3
    """Peak learning rate, after 200 steps of warm-up, then a cosine to a twentieth."""
    seed: int = 7
    """Seed of corpus, tokenizer and initialisation."""
    compile: bool = True
    """Let torch compile the model; about a third faster on a CPU."""

    def __post_init__(self) -> None:
        check_at_least(self, "num_steps", 1)
        check_at_least(self, "batch_size", 1)


def conversation(rng: random.Random, order: Order) -> tuple[str, str, str]:
    """Request, answer and reaction."""
    plan: Plan = good_plan(rng, order)
    for flaw in random_flaws(rng, order, **MIXTURE):
        plan = flawed(rng, plan, flaw)
    return PROMPT.format(request=request(rng, order)), " " + plan.text(), "\nGuest: " + reaction(rng, order, plan)


def batches(args: PretrainArgs, tokenizer) -> Iterator[Tensor]:
    """Endless (B, T) id batches, padded with 0, conversations of like length together."""
    rng = random.Random(args.seed)
    source = orders(rng, "train")
    end = [tokenizer.eos_token_id]
    while True:
        texts = [conversation(rng, next(source)) for _ in range(args.batch_size * 16)]
        rows = [
            opening + answer + end + react + end
            for opening, answer, react in zip(*(tokenizer(list(part))["input_ids"] for part in zip(*texts)))
        ]
        rows.sort(key=len)
        groups = [rows[i : i + args.batch_size] for i in range(0, len(rows), args.batch_size)]
        rng.shuffle(groups)
        for group in groups:
            batch = torch.zeros(len(group), max(map(len, group)), dtype=torch.int64)
            for i, row in enumerate(group):
                batch[i, : len(row)] = torch.tensor(row)
            yield batch


@one_line_errors
def main(argv: list[str] | None = None) -> None:
    """Run the program."""
    args = parse(PretrainArgs, argv)
    quiet_libraries()
    from tqdm import tqdm
    from transformers import LlamaForCausalLM

    torch.manual_seed(args.seed)
    tokenizer = train_tokenizer(seed=args.seed)
    model = LlamaForCausalLM(tiny_config(tokenizer))
    backbone = torch.compile(model.model, dynamic=True) if args.compile else model.model
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
    bar = tqdm(range(args.num_steps), desc="pretrain", mininterval=5)
    for step, ids in zip(bar, batches(args, tokenizer)):
        decay = 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / args.num_steps))
        for group in optimizer.param_groups:
            group["lr"] = args.learning_rate * min(1.0, (step + 1) / 200) * decay
        mask = ids[:, 1:] != tokenizer.pad_token_id
        hidden = backbone(input_ids=ids, use_cache=False).last_hidden_state[:, :-1][mask]
        loss = F.cross_entropy(model.lm_head(hidden), ids[:, 1:][mask])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            bar.set_postfix(loss=f"{loss.item():.4f}", refresh=False)
    model.to(torch.bfloat16).save_pretrained(args.destination_dir)
    tokenizer.save_pretrained(args.destination_dir)


if __name__ == "__main__":
    main()
