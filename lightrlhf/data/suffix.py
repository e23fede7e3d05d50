"""Token ids that a chat template writes behind a sampled turn, to be appended to the sampled ids.

Sampled ids are kept and never tokenised again. The next prompt of a conversation is their row and a suffix: the end of
a turn that was cut by its length, the messages behind it, the next generation prompt. The whole conversation is
rendered, and the suffix is what stands behind the sampled turn in it. That holds only where the template writes all
before the suffix as the row has it: the last prompt letter by letter, the sampled turn but for white space. Where it
writes something else, such as earlier turns without their reasoning or calls in another spelling, there is no suffix.

Left out: templates that close a turn with no control token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lightrlhf.data.chat import MARK
from lightrlhf.data.tokens import encode_text
from lightrlhf.data.turn_ends import TurnEnd, answer_end, call_end

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Rewritten(Exception):
    """Why a conversation does not go on behind the sampled ids, in one line."""


def suffix_ids(tokenizer: PreTrainedTokenizerBase, prompt: str, sampled: Sequence[int], text: str) -> list[int]:
    """Token ids of the suffix behind a sampled turn.

    prompt: the text that the template wrote for the conversation before the turn; sampled: the ids of the turn, with
    its end token unless its length cut it; text: the template's text for the conversation with the turn and what
    follows, with a generation prompt. Both texts come from `tokens.prompt_text`.
    Raises: Rewritten.
    """
    if not text.startswith(prompt):
        raise Rewritten("the chat template rewrites what stands before the turn")
    behind = text[len(prompt) :]
    end, is_whole = _end_of(tokenizer, sampled, behind)
    turn, _, rest = behind.partition(end.text)
    written = _squeezed(turn + (end.text if is_whole else ""))
    if written != _squeezed(str(tokenizer.decode(list(sampled), clean_up_tokenization_spaces=False))):
        raise Rewritten("the chat template writes the turn otherwise than it was sampled")
    ids = encode_text(tokenizer, end.text + rest, behind=turn or prompt)
    if not is_whole:
        return ids
    if end.ids[-1] not in ids:
        raise Rewritten("the tokenizer does not split the end of the turn off")
    return ids[ids.index(end.ids[-1]) + 1 :]


def _end_of(tokenizer: PreTrainedTokenizerBase, sampled: Sequence[int], behind: str) -> tuple[TurnEnd, bool]:
    """The end of the turn at the start of a text, and whether it was sampled. Raises: Rewritten."""
    ends = [end for end in (answer_end(tokenizer), call_end(tokenizer)) if end and end.ids]
    found = [end for end in ends if end.text in behind]
    whole = [end for end in found if sampled and sampled[-1] == end.ids[-1]]
    if not found:
        raise Rewritten("the chat template does not close the turn as it ends answers")
    return min(whole or found, key=lambda end: behind.index(end.text)), bool(whole)


def _squeezed(text: str) -> str:
    """A text without white space and marks."""
    return "".join(text.replace(MARK, "").split())
