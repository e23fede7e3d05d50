"""verl's `trainer.rollout_data_dir`: a file `STEP.jsonl` of texts and scores. Read from the source of verl 0.9.1.

Texts become bytes, which are their ids here, so that members of a group can be compared; groups are rows of one prompt.
Left out, for the dump lacks them: ids, masks, end tokens, log-probabilities, advantages, the loss.
"""

from __future__ import annotations

from typing import Any

from lightrlhf.checks.step import Step, from_rows


def is_row(row: dict[str, Any]) -> bool:
    """Whether a row has verl's columns."""
    return {"input", "output", "score", "step"} <= row.keys()


def steps(rows: list[dict[str, Any]], name: str) -> list[Step]:
    """One step a number of the column `step`."""
    found = []
    for number in dict.fromkeys(row["step"] for row in rows):
        made: list[dict[str, Any]] = []
        prompts: dict[str, int] = {}
        for row in (one for one in rows if one["step"] == number):
            prompt, response = (list(str(row[key]).encode()) for key in ("input", "output"))
            one = {"input_ids": prompt + response, "loss_mask": [0] * len(prompt) + [1] * len(response)}
            group = prompts.setdefault(str(row["input"]), len(prompts))
            made.append(one | {"prompt_len": len(prompt), "group": group, "rewards": row["score"]})
        found.append(from_rows(made, {"method": "grpo", "ids": "bytes"}, f"{name}, step {number}"))
    return found
