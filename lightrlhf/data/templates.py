"""A chat template other than the tokenizer's own: a file, or the bundled one with tools.

`tools.jinja` stands before the tokenizer's own template, so that every family keeps its own marks of turns.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lightrlhf.cli.errors import UsageError
from lightrlhf.data.chat import template_of
from lightrlhf.data.rendering import ANSWERED, ASKED, Unrendered, render_shown, said

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BUNDLED = "tools"


def use_template(tokenizer: PreTrainedTokenizerBase, given: str | None) -> None:
    """Give a tokenizer the chat template of a file, or its own one with tools by the name `tools`; None: as it is.

    Raises: UsageError when the file cannot be read, or there is no template to add tools to.
    """
    if given is None:
        return
    if given != BUNDLED:
        try:
            tokenizer.chat_template = Path(given).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as problem:
            raise UsageError(f"--chat_template {given} cannot be read: {problem}") from None
        return
    own = template_of(tokenizer)
    if not own:
        raise UsageError(f"--chat_template {given}: the tokenizer has no chat template to add tools to; give a file")
    try:
        takes_system = ANSWERED in render_shown(tokenizer, [said("system", ANSWERED), said("user", ASKED)])
    except Unrendered:
        takes_system = False
    before = Path(__file__).with_name("tools.jinja").read_text(encoding="utf-8")
    tokenizer.chat_template = f"{{%- set tools_in_system = {str(takes_system).lower()} -%}}\n{before}{own.lstrip()}"
