"""Names of models: on the Hugging Face hub, and of GGUF files."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from lightrlhf.cli.errors import UsageError

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
GGUF, PACKAGE = ".gguf", "package:"  # suffix of a model file, prefix of a package with one
HUB_PATIENCE = 10.0  # seconds, as the hub's own library waits for metadata


def is_gguf(name: str) -> bool:
    """Whether a model name is a GGUF file, or a package that contains one."""
    return name.lower().endswith(GGUF) or name.startswith(PACKAGE)


def is_on_hub(name: str) -> bool:
    """Whether a name has the form of a hub name."""
    return bool(HUB_ID.fullmatch(name)) and not Path(name).exists()


@cache
def check_hub(name: str, flag: str, files: tuple[str, ...]) -> None:
    """Look once for a name of which the hub's cache has none of these files: without network its own library tries for
    a minute.

    Raises: UsageError when it is neither a folder here nor on the hub.
    """
    from huggingface_hub import HfApi, constants, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        if any(isinstance(try_to_load_from_cache(name, file), str) for file in files):
            return
        HfApi().model_info(name, timeout=HUB_PATIENCE)
    except HfHubHTTPError as problem:
        if problem.response is not None and problem.response.status_code in (401, 403, 404):
            raise UsageError(f"{flag} {name} is neither a folder here nor a model on the hub") from None
    except HFValidationError:
        raise UsageError(f"{flag} {name} is neither a folder here nor a name of the hub") from None
    except Exception:  # of the hub's HTTP library, which depends on its version
        why = ", for HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else ""
        raise UsageError(f"{flag} {name} is not a folder here, and the hub cannot be reached{why}") from None


def check_repository(name: str, flag: str = "--push_to_hub") -> None:
    """Check before training that a push to the hub can work. Raises: UsageError for a wrong name or no token."""
    from huggingface_hub import get_token

    if not HUB_ID.fullmatch(name):
        raise UsageError(f"{flag} {name} is not a name of the form OWNER/NAME")
    if get_token() is None:
        remedy = f"log in by `hf auth login`, set HF_TOKEN, or leave {flag} out"
        raise UsageError(f"{flag} {name}: no Hugging Face access token was found; {remedy}")
