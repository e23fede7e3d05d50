"""Pretrain the café's base model: a Llama of under 1M parameters trained on orders and answers.

Real users start from a base model; so does the quickstart, from the one this script writes to `base/`. Half of each
batch are conversations that mix good and flawed answers exactly as the demonstrations do, for next-token prediction.
The other half are good answers in which words were replaced, for replaced-token detection (ELECTRA, Clark et al. 2020):
a temporary head classifies which words differ from the order. Next-token prediction alone taught a model of this size
to copy an order but, in a quarter of an hour, not to detect a wrong one, and a reward model depends on the features of
its base. Both halves use orders of the training split only, and neither preference pairs nor gold scores.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from datasets_prep.cafe.tokenizer import PROMPT, train_tokenizer
from datasets_prep.cafe.world import MIXTURE, corrupted, good_plan, orders, random_answer, replaced_words, request
from datasets_prep.destination import replacing
from lightrlhf.cli.errors import one_line_errors
from lightrlhf.cli.fields import Args, at_least, positive, random_seed
from lightrlhf.cli.parser import parse
from lightrlhf.models.names import quiet_libraries
from lightrlhf.models.tiny import tiny_config
from lightrlhf.storage.destinations import check_destination

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BASE_DIR = Path(__file__).resolve().parent / "base"
DETECTION_WEIGHT = 2.0


@dataclass(frozen=True, kw_only=True)
class PretrainArgs(Args):
    """Pretrain the café's base model."""

    destination_dir: str = str(BASE_DIR)
    """Output folder."""
    num_steps: int = at_least(1, 2500)
    """Optimiser steps."""
    batch_size: int = at_least(2, 64)
    """Conversations per step, half of them corrupted."""
    learning_rate: float = positive(2e-3)
    """Peak learning rate, after 100 steps of warm-up, then a cosine to a twentieth."""
    seed: int = random_seed(7)
    """Seed of corpus, tokenizer and initialisation."""


def batches(args: PretrainArgs, tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Infinite batches (B, T): ids, mask of next-token prediction, labels 1 / 0 / -1 for replaced, kept, ignored."""
    rng = random.Random(args.seed)
    source = orders(rng, "train")
    while True:
        rows = [_row(rng, next(source), tokenizer, i % 2 == 1) for i in range(args.batch_size * 16)]
        rows.sort(key=lambda row: len(row[0]))
        groups = [rows[i : i + args.batch_size] for i in range(0, len(rows), args.batch_size)]
        rng.shuffle(groups)
        for group in groups:
            width = max(len(ids) for ids, _, _ in group)
            ids = torch.zeros(len(group), width, dtype=torch.int64)
            replaced = torch.full((len(group), width), -1.0)
            for i, (row, labels, _) in enumerate(group):
                ids[i, : len(row)] = torch.tensor(row)
                replaced[i, : len(row)] = torch.tensor(labels)
            read = (ids != tokenizer.pad_token_id) & ~torch.tensor([swapped for *_, swapped in group])[:, None]
            yield ids, read, replaced


def _row(
    rng: random.Random, order: Any, tokenizer: PreTrainedTokenizerBase, swap: bool
) -> tuple[list[int], list[float], bool]:
    # Raw text: words of the café's own grammar.
    opening = tokenizer(PROMPT.format(request=request(rng, order)))["input_ids"]
    if not swap:
        answer = tokenizer(" " + random_answer(rng, order, **MIXTURE))["input_ids"] + [tokenizer.eos_token_id]
        return opening + answer, [-1.0] * (len(opening) + len(answer)), False
    plan = corrupted(rng, good_plan(rng, order))
    spans = replaced_words(order, plan)
    answer = tokenizer(" " + plan.text(), return_offsets_mapping=True)
    labels = [
        float(any(start < last + 1 and first + 1 < end for first, last in spans))  # spans exclude the first space
        for start, end in answer["offset_mapping"]
    ]
    return opening + answer["input_ids"], [-1.0] * len(opening) + labels, True


@one_line_errors
def main(argv: list[str] | None = None) -> None:
    """Run the program."""
    args = parse(PretrainArgs, argv)
    check_destination(Path(args.destination_dir), "--destination_dir")
    quiet_libraries()
    from tqdm import tqdm
    from transformers import LlamaForCausalLM

    torch.manual_seed(args.seed)
    tokenizer = train_tokenizer(seed=args.seed)
    model = LlamaForCausalLM(tiny_config(tokenizer))
    detector = nn.Linear(model.config.hidden_size, 1)
    trainable = [*model.parameters(), *detector.parameters()]
    optimizer = torch.optim.AdamW(trainable, lr=args.learning_rate, betas=(0.9, 0.95), weight_decay=0.05)
    bar = tqdm(range(args.num_steps), desc="pretrain", mininterval=5)
    for step, (ids, read, replaced) in zip(bar, batches(args, tokenizer)):
        decay = 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / args.num_steps))
        for group in optimizer.param_groups:
            group["lr"] = args.learning_rate * min(1.0, (step + 1) / 100) * decay
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state  # (B, T, H)
        next_token = F.cross_entropy(model.lm_head(hidden[:, :-1][read[:, 1:]]), ids[:, 1:][read[:, 1:]])
        labelled = replaced >= 0  # (B, T)
        scores = detector(hidden[labelled])[:, 0]
        detection = F.binary_cross_entropy_with_logits(scores, replaced[labelled])
        (next_token + DETECTION_WEIGHT * detection).backward()
        nn.utils.clip_grad_norm_(trainable, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            recall = float((scores > 0)[replaced[labelled] > 0].float().mean())
            bar.set_postfix(loss=f"{next_token.item():.3f}", recall=f"{recall:.3f}", refresh=False)
    with replacing(Path(args.destination_dir), []) as folder:
        model.bfloat16().save_pretrained(folder)
        tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main()
