"""Names of the Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path

from lightrlhf.cli.errors import UsageError

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def is_on_hub(name: str) -> bool:
    """Whether a name is one of the hub, by its form."""
    return bool(HUB_ID.fullmatch(name)) and not Path(name).exists()


def check_repository(name: str) -> None:
    """Look for what `--push_to_hub` needs before hours of work. Raises: UsageError for a wrong name or no token."""
    from huggingface_hub import get_token

    if not HUB_ID.fullmatch(name):
        raise UsageError(f"--push_to_hub {name} is not a name of the form OWNER/NAME")
    if get_token() is None:
        remedy = "log in by `hf auth login`, set HF_TOKEN, or leave --push_to_hub out"
        raise UsageError(f"--push_to_hub {name} needs a token of the hub, and there is none; {remedy}")
