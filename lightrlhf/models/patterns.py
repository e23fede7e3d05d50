"""Regular expressions of a peft adapter's config, replaced by the names of the modules that they match.

peft would match them without a limit of time, and one such as `(a*)*b` takes longer than anybody waits.
"""

from __future__ import annotations

import re
import time
from typing import Any

import regex  # unlike `re` with a limit of time
from torch import nn

from lightrlhf.cli.errors import UsageError, first_line

SECONDS = 2.0  # for all patterns of an adapter
ALL_LINEAR = "all-linear"  # peft's own word for all linear layers


def resolve_patterns(config: Any, model: nn.Module, source: str) -> None:
    """Replace the patterns of an adapter's config in place. Raises: UsageError when one takes too long or is wrong."""
    names = [name for name, _ in model.named_modules() if ".lora_" not in name and not name.endswith(".base_layer")]
    end = time.monotonic() + SECONDS

    def matched(pattern: str) -> list[str]:
        compiled = regex.compile(pattern)
        return [name for name in names if compiled.fullmatch(name, timeout=max(end - time.monotonic(), 1e-9))]

    field = ""
    try:
        for field in ("target_modules", "exclude_modules"):
            pattern = getattr(config, field)
            if isinstance(pattern, str) and pattern != ALL_LINEAR:
                setattr(config, field, {*matched(pattern)} if field == "exclude_modules" else sorted(matched(pattern)))
        for field in ("rank_pattern", "alpha_pattern"):
            resolved: dict[str, Any] = {}
            for pattern, value in (getattr(config, field) or {}).items():
                for name in matched(rf"(.*\.)?({pattern})"):
                    resolved.setdefault(re.escape(name), value)  # the first pattern counts
            setattr(config, field, resolved)
        field = "layers_pattern"
        parts = [config.layers_pattern] if isinstance(config.layers_pattern, str) else config.layers_pattern or []
        if not all(re.fullmatch(r"\w+", part) for part in parts):
            raise UsageError(f"{source}: layers_pattern of its adapter is not the name of a list of layers")
    except TimeoutError:
        raise UsageError(
            f"{source}: matching {field} of its adapter takes over {SECONDS:g} s; list the names"
        ) from None
    except (regex.error, TypeError, ValueError) as problem:
        raise UsageError(f"{source}: {field} of its adapter cannot be read: {first_line(problem)}") from None
