"""Answers to the same few prompts throughout training, in `samples.jsonl`, for programs that sample none to learn from.

At each evaluation the policy continues the first prompts of the validation split greedily, so what differs between two
steps is what was learned. Nothing is drawn from the generators of training, so a run is bitwise the one without them.

Left out: scores of the answers, and weights that are sharded over ranks (`--strategy fsdp`), whose gathering may not
fit where training does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from lightrlhf.cli.errors import UsageError
from lightrlhf.cli.groups import SamplingArgs
from lightrlhf.data.flat import Rows
from lightrlhf.data.splits import Row
from lightrlhf.data.types import Tokenizer
from lightrlhf.generation.engine import generate
from lightrlhf.models.roles import Policy
from lightrlhf.models.tokenizer import end_ids
from lightrlhf.training.rollout_log import log_samples, rollout_row
from lightrlhf.training.run import Run

LONGEST_ANSWER = 128  # tokens


class GreedyArgs(SamplingArgs):
    """Greedy decoding."""

    @property
    def do_sample(self) -> bool:
        """Never."""
        return False


class HeldOut:
    """The first distinct prompts, `--log_rollouts` of them, and the means to answer them.

    rows: with `prompt_len` and the tokens in `input_ids` or `chosen_input_ids`. Those without a prompt, as documents
    are, or with too little room after it are left out; all are, with a note, where the generation engine does not
    support the architecture.
    """

    def __init__(self, run: Run[Any], policy: Policy, rows: Sequence[Row], tokenizer: Tokenizer) -> None:
        self.tokenizer, self.ends = tokenizer, end_ids(tokenizer, policy.model)
        limit = getattr(policy.model.config, "max_position_embeddings", None) or 2**62
        self.args = GreedyArgs(max_new_tokens=min(LONGEST_ANSWER, max(limit // 2, 1)))
        self.prompts = self._first_prompts(rows, limit - self.args.max_new_tokens, run.args.log_rollouts)
        if self.prompts and run.args.strategy == "fsdp":
            run.print0("note: no answers to validation prompts are kept with --strategy fsdp")
            self.prompts = []

    @staticmethod
    def _first_prompts(rows: Sequence[Row], longest: int, number: int) -> list[list[int]]:
        prompts: dict[tuple[int, ...], None] = {}
        if isinstance(rows, Rows):
            lengths = rows.column("prompt_len")
            rows = rows.select(((lengths > 0) & (lengths <= longest)).nonzero()[:, 0])
        for row in rows:
            if len(prompts) == number:
                break
            if 0 < row["prompt_len"] <= longest:
                ids = row["chosen_input_ids"] if "chosen_input_ids" in row else row["input_ids"]
                prompts[tuple(torch.as_tensor(ids[: row["prompt_len"]]).tolist())] = None
        return [list(prompt) for prompt in prompts]

    def log(self, run: Run[Any], model: nn.Module) -> None:
        """Answer the prompts on the first rank, within a phase of the loop, and append the answers to `samples.jsonl`.

        Raises: RunFailure when the file cannot be written.
        """
        if not self.prompts or not run.ranks.is_first:
            return
        policy: Any = getattr(model, "module", model)  # without what Fabric wraps it in
        unused = torch.zeros(len(self.prompts), self.args.max_new_tokens)  # noise, which greedy decoding needs none of
        try:
            with run.autocast():
                answers = generate(policy, self.prompts, self.args, self.ends, unused, len(self.prompts))
        except UsageError as problem:
            run.print0(f"note: no answers to validation prompts are kept: {problem}")
            self.prompts = []
            return
        sampled = zip(self.prompts, answers.responses, answers.truncated)
        log_samples(
            run,
            [
                rollout_row(self.tokenizer, prompt, ids, group=group, score=None, truncated=truncated)
                for group, (prompt, ids, truncated) in enumerate(sampled)
            ],
        )
