"""How a state becomes a prompt: the one place for fine-tuning, reinforcement learning and evaluation.

    task                                  what stays the same comes first, so that prompts of one episode
    > command                             share their beginning
    result
    observation
    # Analyze:                            a reflector goes on from here; it never sees the commands
    reflection
    # Choose:
    0. first command
    1. second command
    # Action:
    0                                     a policy answers with one label

A label is a single token, which `label_ids` checks, so that a policy chooses among commands by one row of logits.
Without a reflection the part under `# Analyze:` is left out.
"""

from __future__ import annotations

import random
import string
from collections.abc import Sequence
from typing import Any

from lightrlhf.cli.errors import RunFailure, UsageError
from lightrlhf.data.tokens import encode_response
from lightrlhf.envs import Info

ANALYZE, CHOOSE, ACTION = "# Analyze:", "# Choose:", "# Action:"
# Single characters first: they are one token for nearly every tokenizer, "10" to "199" only for some.
SINGLE = [*string.digits, *string.ascii_lowercase, *string.ascii_uppercase]
CHOICES = [*SINGLE, *map(str, range(10, 200))]


def choices(n: int) -> list[str]:
    """The first `n` labels. Raises: RunFailure when there are not so many."""
    if n > len(CHOICES):
        raise RunFailure(f"the environment has {n} commands in one state, but there are only {len(CHOICES)} labels")
    return CHOICES[:n]


def labels_for(info: Info, shuffle: random.Random | None = None, pool: int = len(SINGLE)) -> list[str]:
    """A label for each of `info["admissible"]`, in that order.

    Where an environment's commands are fixed, a command has the same label in every state. With `shuffle` the labels
    are drawn at random from the first `pool`. Raises: RunFailure when a state offers more commands than labels.
    """
    mask = info["action_mask"]
    labels = choices(len(mask)) if shuffle is None else shuffle.sample(choices(max(pool, len(mask))), len(mask))
    return [label for label, offered in zip(labels, mask) if offered]


def label_of(action: str, info: Info, labels: Sequence[str]) -> str:
    """The label of a command that is offered. Raises: ValueError when it is not."""
    return labels[info["admissible"].index(action)]


def action_of(label: str, info: Info, labels: Sequence[str]) -> str | None:
    """The command of a label, None for any other text."""
    label = label.strip()
    return info["admissible"][labels.index(label)] if label in labels else None


def label_ids(tokenizer: Any, labels: Sequence[str]) -> list[int]:
    """The token of each label, as a response begins with it.

    Raises: UsageError when a label is not one token, or two labels are the same one.
    """
    ids = []
    for label in labels:
        tokens = encode_response(tokenizer, label)[:-1]
        if len(tokens) != 1 or tokens[0] in ids:
            usable = f"{len(ids)} commands in a state are the most this tokenizer can tell apart"
            raise UsageError(f"the label {label!r} is not a token of its own but {tokens}; {usable}")
        ids += tokens
    return ids


def state_prompt(text: str, info: Info, with_history: bool = False) -> str:
    """Task, history and observation, one below the other; ends in a line break."""
    parts = [info["task"]] if info["task"] else []
    if with_history:
        parts += [f"> {action}\n{result}" if result else f"> {action}" for action, result in info["history"]]
    return "".join(part.rstrip("\n") + "\n" for part in [*parts, text])


def reflection_prompt(text: str, info: Info, with_history: bool = False) -> str:
    """What a reflector goes on from."""
    return state_prompt(text, info, with_history) + ANALYZE + "\n"


def policy_prompt(
    text: str, info: Info, reflection: str | None, labels: Sequence[str] | None, with_history: bool = False
) -> str:
    """What a policy answers with a label, without `labels` with a command; `reflection` None leaves that part out."""
    prompt = state_prompt(text, info, with_history)
    if reflection is not None:
        prompt += f"{ANALYZE}\n{tidy(reflection)}\n"
    marks = ["-"] * len(info["admissible"]) if labels is None else [f"{label}." for label in labels]
    offered = "".join(f"{mark} {action}\n" for mark, action in zip(marks, info["admissible"], strict=True))
    return f"{prompt}{CHOOSE}\n{offered}{ACTION}\n"


def tidy(reflection: str) -> str:
    """A reflection as it stands in a prompt: what a model wrote past the end of its part is cut off."""
    for heading in (ANALYZE, CHOOSE, ACTION):
        reflection = reflection.partition(heading)[0]
    return reflection.strip()
