"""Uploads to the Hugging Face hub, of checkpoints and of prepared data.

Left out: downloads, which transformers and `hf download` do, and branches, tags and pull requests of a repository.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

from lightrlhf.cli.errors import RunFailure, first_line

# of an absolute path in a command or a list of NAME=PATH, but the last one
FOLDERS = re.compile(r"(?<![^\s=,])/(?:[^\s/,]+/)*(?=[^\s/,]+/[^\s/,])")


@contextmanager
def uploading(repository: str, kind: Literal["model", "dataset"], kept: str) -> Iterator[Callable[..., Any]]:
    """Context manager: `HfApi.upload_folder` for a repository, which is created as a private one where it is missing.

    kept: what remains here, for the error. Raises: RunFailure in one line, also for what fails within.
    """
    from huggingface_hub import HfApi

    try:
        api = HfApi()
        api.create_repo(repository, repo_type=kind, private=True, exist_ok=True)
        yield partial(api.upload_folder, repo_id=repository, repo_type=kind)
    except Exception as problem:  # the hub client, the network and the login raise their own
        raise RunFailure(f"--push_to_hub {repository} failed: {first_line(problem)}; {kept}") from problem


def shorten_paths(value: Any) -> Any:
    """A flag's value as a card shows it: of an absolute path, also within a command, its last two parts."""
    if isinstance(value, list):
        return [shorten_paths(one) for one in value]
    if isinstance(value, str) and Path(value).is_absolute() and (" " not in value or os.path.exists(value)):
        return str(Path(*Path(value).parts[1:][-2:]))
    return FOLDERS.sub("", value) if isinstance(value, str) else value
