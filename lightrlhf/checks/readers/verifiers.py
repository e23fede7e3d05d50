"""Episodes and traces of verifiers 0.4 (`to_record`), which prime-rl stamps with advantages and log-probabilities.

A path of the graph of messages, root to leaf, is a row: its nodes hold the ids that each message added. The sampler's
log-probabilities are `logprobs`, the trainer's `trainer_logprobs`. Records have four decimals.
Left out, for records lack them: the loss, masks of the loss of other forms than `mask`, end tokens of the model.
"""

from __future__ import annotations

from typing import Any

from lightrlhf.checks.step import Step, from_rows

DIGITS = 4
ARRAYS = {"sampler_logprobs": "logprobs", "new_logprobs": "trainer_logprobs", "ref_logprobs": "reference_logprobs"}
ARRAYS["advantages"] = "advantages"
CUT = ("max_turns", "max_input_tokens", "max_output_tokens", "max_total_tokens", "compaction_failed")


def is_row(row: dict[str, Any]) -> bool:
    """Whether a row is a trace, or an episode of several."""
    return isinstance(row.get("traces"), list) or (isinstance(row.get("nodes"), list) and "task" in row)


def steps(rows: list[dict[str, Any]], name: str) -> list[Step]:
    """One step of all rows."""
    made: list[dict[str, Any]] = []
    groups: dict[str, int] = {}
    config: dict[str, Any] = {"digits": DIGITS}
    for number, row in enumerate(rows):
        for trace in row.get("traces", [row]):
            key = (row.get("group") or {}).get("id") or trace["task"].get("key") or str(trace["task"].get("data"))
            shared = {"group": groups.setdefault(str(key), len(groups)), "episode": number}
            for one in _paths(trace):
                made.append(one | shared | {"rewards": _reward(trace)})
            settings = [call["sampling"] for call in trace.get("calls", []) if call.get("sampling")]
            for setting in ("temperature", "top_p", "top_k", "min_p"):
                given = {one[setting] for one in settings if one.get(setting) is not None}
                if len(given) == 1:
                    config[setting] = given.pop()
    lacking = {column for one in made for column in ARRAYS if column not in one}
    for one in made:
        for column in lacking:
            one.pop(column, None)
    return [from_rows(made, config, name)] if made else []


def _reward(trace: dict[str, Any]) -> float | None:
    """The weighted sum of a trace's rewards; None where scoring did not run."""
    rewards = [one for one in (trace.get("rewards") or {}).values()]
    known = [one["score"] * one.get("weight", 1.0) for one in rewards if one is not None]
    return sum(known) if known and trace.get("ok", True) else None


def _paths(trace: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each leaf whose path has ids and a sampled token."""
    nodes = trace["nodes"]
    parents = {node.get("parent") for node in nodes}
    cut = {call.get("node") for call in trace.get("calls", []) if call.get("finish_reason") == "length"}
    found: list[dict[str, Any]] = []
    for leaf in (number for number in range(len(nodes)) if number not in parents):
        path, at = [], leaf
        while at is not None:
            path.append(at)
            at = nodes[at].get("parent")
        chosen = [nodes[i] for i in reversed(path)]
        mask = [int(on) for node in chosen for on in node.get("mask") or [0] * len(node["token_ids"])]
        if not any(mask):
            continue
        one: dict[str, Any] = {"input_ids": [token for node in chosen for token in node["token_ids"]]}
        one |= {"loss_mask": mask, "prompt_len": mask.index(1)}
        one["truncated"] = float(leaf in cut or trace.get("stop_condition") in CUT)
        for column, key in ARRAYS.items():
            sampled = [node for node in chosen if any(node.get("mask") or [])]
            if all(node.get(key) for node in sampled):
                one[column] = _spread(mask, [value for node in sampled for value in node[key]])
        found.append(one)
    return found


def _spread(mask: list[int], values: list[float]) -> list[float]:
    """Values of sampled tokens at their places; a ValueError where there are more or fewer."""
    if len(values) != sum(mask):
        raise ValueError(f"{len(values)} numbers of {sum(mask)} sampled tokens")
    left = iter(values)
    return [next(left) if is_on else 0.0 for is_on in mask]
