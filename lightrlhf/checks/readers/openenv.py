"""OpenEnv's captured calls: a `TrainingTrace`, or its entries. Read from the source of openenv 0.10.0.

Each call of the engine is a row: ids of prompt and completion, the mask over both, log-probabilities of the completion.
Left out, for a capture lacks them: advantages, the trainer's log-probabilities, the loss; a reward is often missing.
"""

from __future__ import annotations

from typing import Any

from lightrlhf.checks.step import Step, from_rows


def is_row(row: dict[str, Any]) -> bool:
    """Whether a row is a trace of turns, or one call."""
    return isinstance(row.get("turns"), list) or "completion_token_ids" in row


def steps(rows: list[dict[str, Any]], name: str) -> list[Step]:
    """One step of all calls; a trace is an episode."""
    made: list[dict[str, Any]] = []
    settings: list[dict[str, Any]] = []
    for number, row in enumerate(rows):
        for turn in row.get("turns", [row]):
            prompt, completion = turn["prompt_token_ids"], turn["completion_token_ids"]
            if len(turn["loss_mask"]) != len(prompt) + len(completion):
                raise ValueError(f"a mask of {len(turn['loss_mask'])} for {len(prompt) + len(completion)} tokens")
            one = {"input_ids": prompt + completion, "loss_mask": turn["loss_mask"], "prompt_len": len(prompt)}
            one |= {"sampler_logprobs": turn["per_token_logps"], "episode": number}
            made.append(one | ({"rewards": turn["reward"]} if turn.get("reward") is not None else {}))
            settings.append((turn.get("metadata") or {}).get("sampling_params") or {})
    config = {}
    for setting in ("temperature", "top_p", "top_k", "min_p"):
        given = {one.get(setting) for one in settings}
        if len(given) == 1 and None not in given:
            config[setting] = given.pop()
    return [from_rows(made, config, name)]
