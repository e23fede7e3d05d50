"""Prompts of a state: one format for fine-tuning, reinforcement learning and evaluation.

    task                                  constant parts come first, so that prompts of an episode share a prefix
    > command
    result
    observation
    # Analyze:                            the reflector continues from here; its prompt has no commands
    reflection
    # Choose:
    0. first command
    1. second command
    # Action:
    0                                     the policy answers with one label

A label is a single token (`label_ids` checks it), so that a policy chooses among commands by one row of logits.
Without a reflection the section `# Analyze:` is omitted.
"""

from __future__ import annotations

import random
import string
from collections.abc import Sequence

import numpy as np

from lightrlhf.cli.errors import RunFailure, UsageError
from lightrlhf.data.tokens import encode_response
from lightrlhf.data.types import Tokenizer
from lightrlhf.envs import Info

ANALYZE, CHOOSE, ACTION = "# Analyze:", "# Choose:", "# Action:"
# Single characters first: they are one token in nearly every tokenizer, "10" to "199" only in some.
SINGLE = [*string.digits, *string.ascii_lowercase, *string.ascii_uppercase]
CHOICES = [*SINGLE, *map(str, range(10, 200))]


def choices(n: int) -> list[str]:
    """The first `n` labels. Raises: RunFailure when there are fewer."""
    if n > len(CHOICES):
        raise RunFailure(f"the environment has {n} commands in one state, but there are only {len(CHOICES)} labels")
    return CHOICES[:n]


def labels_for(info: Info, shuffle: random.Random | None = None, pool: int = len(SINGLE)) -> list[str]:
    """A label for each of `info["admissible"]`, in that order.

    If an environment's commands are fixed, a command has the same label in every state. With `shuffle` the labels are
    drawn at random from the first `pool`. Raises: RunFailure when a state has more commands than there are labels.
    """
    mask = info["action_mask"]
    mask = mask if len(mask) <= pool else np.trim_zeros(mask, "b")  # the padding of a state with few commands
    labels = choices(len(mask)) if shuffle is None else shuffle.sample(choices(max(pool, len(mask))), len(mask))
    return [label for label, available in zip(labels, mask) if available]


def label_of(action: str, info: Info, labels: Sequence[str]) -> str:
    """The label of an admissible command. Raises: ValueError for any other."""
    return labels[info["admissible"].index(action)]


def action_of(label: str, info: Info, labels: Sequence[str]) -> str | None:
    """The command of a label; None for any other text."""
    label = label.strip()
    return info["admissible"][labels.index(label)] if label in labels else None


def label_ids(tokenizer: Tokenizer, labels: Sequence[str]) -> list[int]:
    """The token id of each label at the beginning of a response.

    Raises: UsageError when a label is not a single token, or two labels are the same token.
    """
    ids: list[int] = []
    for label in labels:
        tokens = encode_response(tokenizer, label)[:-1]
        if len(tokens) != 1 or tokens[0] in ids:
            usable = f"this tokenizer supports at most {len(ids)} commands in a state"
            raise UsageError(f"the label {label!r} is not a single token but {tokens}; {usable}")
        ids += tokens
    return ids


def state_prompt(text: str, info: Info, with_history: bool = False) -> str:
    """Task, history and observation, each on its own lines; ends in a line break."""
    parts = [info["task"]] if info["task"] else []
    if with_history:
        parts += [f"> {action}\n{result}" if result else f"> {action}" for action, result in info["history"]]
    return "".join(part.rstrip("\n") + "\n" for part in [*parts, text])


def reflection_prompt(text: str, info: Info, with_history: bool = False) -> str:
    """The prompt of the reflector."""
    return state_prompt(text, info, with_history) + ANALYZE + "\n"


def policy_prompt(
    text: str, info: Info, reflection: str | None, labels: Sequence[str] | None, with_history: bool = False
) -> str:
    """The prompt of the policy, which answers with a label, or if `labels` is None with a command.

    `reflection` None omits that section.
    """
    prompt = state_prompt(text, info, with_history)
    if reflection is not None:
        prompt += f"{ANALYZE}\n{tidy(reflection)}\n"
    marks = ["-"] * len(info["admissible"]) if labels is None else [f"{label}." for label in labels]
    commands = "".join(f"{mark} {action}\n" for mark, action in zip(marks, info["admissible"], strict=True))
    return f"{prompt}{CHOOSE}\n{commands}{ACTION}\n"


def tidy(reflection: str) -> str:
    """A reflection as it is inserted into a prompt: cut at the first heading that the model generated."""
    for heading in (ANALYZE, CHOOSE, ACTION):
        reflection = reflection.partition(heading)[0]
    return reflection.strip()
