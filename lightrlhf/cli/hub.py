"""Names of models: on the Hugging Face hub, and of GGUF files."""

from __future__ import annotations

import re
from pathlib import Path

from lightrlhf.cli.errors import UsageError

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
GGUF, PACKAGE = ".gguf", "package:"  # suffix of a model file, prefix of a package with one


def is_gguf(name: str) -> bool:
    """Whether a model name is a GGUF file, or a package that contains one."""
    return name.lower().endswith(GGUF) or name.startswith(PACKAGE)


def is_on_hub(name: str) -> bool:
    """Whether a name has the form of a hub name."""
    return bool(HUB_ID.fullmatch(name)) and not Path(name).exists()


def check_repository(name: str, flag: str = "--push_to_hub") -> None:
    """Check before training that a push to the hub can work. Raises: UsageError for a wrong name or no token."""
    from huggingface_hub import get_token

    if not HUB_ID.fullmatch(name):
        raise UsageError(f"{flag} {name} is not a name of the form OWNER/NAME")
    if get_token() is None:
        remedy = f"log in by `hf auth login`, set HF_TOKEN, or leave {flag} out"
        raise UsageError(f"{flag} {name}: no Hugging Face access token was found; {remedy}")
