"""Chat templates: messages rendered as text in which contents cannot spell a control token.

What a user, an environment or a file wrote may contain `<|im_end|>` as text. Tokenised as it is, that text would end
the user's turn. So a mark, a character that no text contains, is put inside each such spelling before the template is
rendered, and the text is split at the marks before it is tokenised: the template's own tokens are found, those that a
content spells are not.

Control tokens are the tokenizer's special tokens, and added tokens that the template writes or that look like markup,
whether or not they were declared special. Tags of reasoning and tools, such as `<think>`, that were not declared
special are left in the content of assistant messages, where templates expect them.

Left out: images and documents. A control token of a single character cannot be split, nor can texts that a tokenizer
normalises to one; such texts are refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

from lightrlhf.cli.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = Sequence[dict[str, Any]]
MARK = "\ufdd0"  # a noncharacter of Unicode: reserved for use within a program
ESCAPED = r"\ufdd0"
LONGEST = 64  # characters at the end of a text in which a control token is looked for
ROLES = (  # of messages in files and requests, by their names there
    dict.fromkeys(("user", "human"), "user")
    | dict.fromkeys(("assistant", "gpt", "chatgpt", "bot", "model"), "assistant")
    | dict.fromkeys(("tool", "function", "observation", "ipython"), "tool")
    | {"system": "system", "developer": "developer"}
)
FIELDS = ("content", "reasoning_content", "tool_calls", "tool_call_id", "name")  # of a message, which a template reads
MARKUP = re.compile(r"<\S.*>|\[\S.*\]|\{\S.*\}", re.DOTALL)
TAG = re.compile(r"</?(think|thought|reason|scratchpad|answer|tool|function)\w*>")


class Controls(NamedTuple):
    """Control tokens of a tokenizer."""

    ids: frozenset[int]
    ending_ids: frozenset[int]  # those that may end a turn: all but `<think>` and its like
    spelled: re.Pattern[str]  # the text of any
    beside_tags: re.Pattern[str]  # the text of any but `<think>` and its like
    texts: tuple[str, ...]
    stripping: tuple[str, ...]  # the texts of those that take the spaces behind them
    beginnings: frozenset[str]  # texts that more text makes one of them
    firsts: frozenset[str]  # their first characters
    by_other_texts: bool  # whether other texts may become one, for the tokenizer normalises texts first
    unknown: int | None  # the id of what the vocabulary lacks, where that is a token of its own


def controls(tokenizer: PreTrainedTokenizerBase) -> Controls:
    """Control tokens of a tokenizer with its present chat template."""
    special = tuple(tokenizer.all_special_ids)  # which may change without the size
    return _controls(tokenizer, len(tokenizer), template_of(tokenizer), special)


def model_of(tokenizer: PreTrainedTokenizerBase) -> Any:
    """The model of a tokenizer of the package `tokenizers`, such as its BPE; None of any other."""
    return getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)


@lru_cache(maxsize=16)
def _controls(tokenizer: PreTrainedTokenizerBase, size: int, template: str, special: tuple[int, ...]) -> Controls:
    named = set(tokenizer.all_special_tokens)
    texts, tags, stripping, ids = set(), set(), set(), {*special}
    by_other_texts = _normalises_to_tokens(tokenizer)
    ending_ids = set(ids)
    for index, token in tokenizer.added_tokens_decoder.items():
        text = token.content
        declared = token.special or text in named
        if not (declared or (text.strip() and (text in template or MARKUP.fullmatch(text)))):
            continue  # a word, or a run of spaces
        ids.add(index)
        by_other_texts |= token.normalized or len(text) == 1
        if len(text) > 1:
            texts.add(text)
        if token.rstrip:
            stripping.add(text)
        if not declared and TAG.fullmatch(text):
            tags.add(text)
        else:
            ending_ids.add(index)
    beginnings = frozenset(text[:end] for text in texts for end in range(1, len(text)))
    patterns = any_of(texts), any_of(texts - tags)
    kinds = tuple(sorted(texts)), tuple(sorted(stripping))
    firsts = frozenset(text[0] for text in texts)
    others = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}
    unknown = None if tokenizer.unk_token_id in others else tokenizer.unk_token_id
    return Controls(
        frozenset(ids), frozenset(ending_ids), *patterns, *kinds, beginnings, firsts, by_other_texts, unknown
    )


def _normalises_to_tokens(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a normalised text may become any entry of the vocabulary, a control token too. Merges do not make one."""
    model = model_of(tokenizer)
    if model is None or tokenizer.backend_tokenizer.normalizer is None:
        return False
    return type(model).__name__ != "BPE" or bool(model.ignore_merges)


def declare_ends(tokenizer: PreTrainedTokenizerBase, source: str) -> None:
    """Declare as special tokens what a model's generation config ends at and its tokenizer has as plain entries.

    Otherwise texts could spell them. Only those that look like markup: a response may end at a word or a line, too.
    source: the folder or hub name of both.
    """
    from tokenizers import AddedToken
    from transformers import GenerationConfig

    try:
        stored = GenerationConfig.from_pretrained(source).eos_token_id
    except Exception:  # it has none, or a damaged one, which loading the model refuses
        return
    ids = {stored} if isinstance(stored, int) else {*(stored or ())}
    ids -= {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    plain = [text for text, index in tokenizer.get_vocab().items() if index in ids and MARKUP.fullmatch(text)]
    tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text in plain])


def any_of(texts: set[str]) -> re.Pattern[str]:
    """A pattern that matches any of the texts, the longest first; without texts it matches nothing."""
    longest_first = sorted(texts, key=lambda text: (-len(text), text))
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def template_of(tokenizer: PreTrainedTokenizerBase, tools: Any = None) -> str:
    """The chat template of a tokenizer, that for tools if it has several; empty without one."""
    given = tokenizer.chat_template
    if isinstance(given, dict):
        return str(given.get("tool_use", given["default"]) if tools else given["default"])
    return str(given or "")


def protect(tokenizer: PreTrainedTokenizerBase, text: str, keep_tags: bool = False) -> str:
    """`text` with a mark inside each control token that it spells; `keep_tags`: except `<think>` and its like.

    Another mark stands behind the beginning of a control token at its end, which the text behind it may complete.
    """
    return _protected(controls(tokenizer), text, keep_tags)


def _protected(found: Controls, text: str, keep_tags: bool) -> str:
    pattern = found.beside_tags if keep_tags else found.spelled
    text = text.replace(MARK, "\ufffd").replace(ESCAPED, ESCAPED[0] + MARK + ESCAPED[1:])  # see `render_shown`
    if not any([first in text for first in found.firsts]):  # as in most texts, and faster than to look for tokens
        return text
    while pattern.search(text):  # again for tokens within tokens
        text = pattern.sub(lambda match: match[0][0] + MARK + match[0][1:], text)
    content = text.rstrip()  # templates trim
    end = content[-LONGEST:]
    if any(end[start:] in found.beginnings for start in range(len(end))):
        return content + MARK + text[len(content) :]
    return text


def ends_with_control(tokenizer: PreTrainedTokenizerBase, text: str) -> bool:
    """Whether a control token is the end of a text, but for spaces that it takes."""
    found = controls(tokenizer)
    return text.endswith(found.texts) or text.rstrip().endswith(found.stripping)


def check_spelling(tokenizer: PreTrainedTokenizerBase, text: str, ids: Sequence[int]) -> None:
    """Check that the ids of a text with marks have no control token that it does not spell outside of them.

    Only tokenizers that normalise texts need it: to them `<|IM_END|>` may be `<|im_end|>`. Raises: UsageError.
    """
    found = controls(tokenizer)
    if not found.by_other_texts:
        return
    written = sum(len(found.spelled.findall(piece)) for piece in text.split(MARK))
    if sum(i in found.ids and i != found.unknown for i in ids) > written:
        raise UsageError("a text spells a control token of the tokenizer and cannot be encoded as text; leave it out")


def shown_messages(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, found: Controls | None = None
) -> list[dict[str, Any]]:
    """Messages as passed to a template: protected, and without the fields that only affect the loss.

    found: the tokenizer's control tokens, where the caller has looked them up.
    Raises: UsageError for a role that is not in `ROLES`; templates would render or drop it silently.
    """
    for number, message in enumerate(messages):
        if message["role"] not in ROLES:
            role = str(message["role"])[:20]
            raise UsageError(f"message {number} has the role {role!r}; use system, developer, user, assistant or tool")
    found = found or controls(tokenizer)

    def shown(message: dict[str, Any]) -> dict[str, Any]:
        role = ROLES[message["role"]]
        is_answer = role == "assistant"
        result = {"role": "system" if role == "developer" and role not in template_of(tokenizer) else role}
        content = message.get("content")
        if len(message) == 2 and isinstance(content, str):  # as most are
            result["content"] = _protected(found, content, is_answer)
            return result
        for name in FIELDS:
            if (value := message.get(name)) is not None:
                keep_tags = is_answer and name == "content"
                if isinstance(value, str):
                    result[name] = _protected(found, value, keep_tags)
                else:
                    result[name] = _mapped(value, partial(_protected, found, keep_tags=keep_tags))
        return result

    return [shown(message) for message in messages]


def shown_tools(
    tokenizer: PreTrainedTokenizerBase, tools: Sequence[dict[str, Any]] | None
) -> list[dict[str, Any]] | None:
    """Tools as a template gets them."""
    return [_mapped(tool, partial(protect, tokenizer)) for tool in tools] if tools else None


def _mapped(value: Any, function: Callable[[str], str]) -> Any:
    """`value` with `function` applied to every text in it."""
    if isinstance(value, str):
        return function(value)
    if isinstance(value, dict):
        return {function(key): _mapped(inner, function) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_mapped(inner, function) for inner in value]
    return value
