"""Names of models: on the Hugging Face hub, and of GGUF files."""

from __future__ import annotations

import re
from pathlib import Path

from lightrlhf.cli.errors import UsageError

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
GGUF, PACKAGE = ".gguf", "package:"  # how a name of a model file ends, and of a package that has one begins


def is_gguf(name: str) -> bool:
    """Whether a model's name stands for a GGUF file, or a package that has one."""
    return name.lower().endswith(GGUF) or name.startswith(PACKAGE)


def is_on_hub(name: str) -> bool:
    """Whether a name is one of the hub, by its form."""
    return bool(HUB_ID.fullmatch(name)) and not Path(name).exists()


def check_repository(name: str, flag: str = "--push_to_hub") -> None:
    """Look for what a push to the hub needs before hours of work. Raises: UsageError for a wrong name or no token."""
    from huggingface_hub import get_token

    if not HUB_ID.fullmatch(name):
        raise UsageError(f"{flag} {name} is not a name of the form OWNER/NAME")
    if get_token() is None:
        remedy = f"log in by `hf auth login`, set HF_TOKEN, or leave {flag} out"
        raise UsageError(f"{flag} {name}: no access token of the Hugging Face hub was found; {remedy}")
