"""Turns of a dialogue: what users enter, the prompt that a model gets of it, and an answer's thinking.

A turn is a dictionary: `role` and `content`; of a user's turn `prompt` (what the model gets, without a system message)
and `attempts` (answers so far); of an answer `answer`, `label` of its model, `scores` and `measures` once they are
known. An answer that is being written is `streaming`; one without text yet has `pending`, the reason.
Left out: tools, images, and branches of a dialogue (an edit_turn message drops what follows it).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightrlhf.cli.errors import UsageError
from lightrlhf.demo.summaries import summary_fields, summary_prompt

if TYPE_CHECKING:
    from lightrlhf.rewards.encoding import Messages

FORMS = ("dialogue", "summary", "as written")
MAX_CHARACTERS = 100_000  # of a text
THINK, THOUGHT = "<think>", "</think>"
Turn = dict[str, Any]


def prompt_of(turns: list[Turn], form: str, text: str, subreddit: str, title: str, post: str) -> str | Messages:
    """The prompt of the user's inputs: the dialogue with a new message, a post to summarize, or the text unchanged.

    Earlier answers are in it without their thinking, as reasoning models are trained.
    Raises: UsageError when message or post is empty or too long.
    """
    text, subreddit, title, post = (
        clean_text(name, value)
        for name, value in (("message", text), ("subreddit", subreddit), ("title", title), ("post", post))
    )
    if form == "summary":
        if not post.strip():
            raise UsageError("the post is empty; enter a text")
        return summary_prompt(subreddit.strip().removeprefix("r/"), title.strip(), post.strip())
    if not text.strip():
        raise UsageError("the message is empty; enter a text")
    if form == "as written":
        return text
    earlier = [{"role": turn["role"], "content": content_of(turn)} for turn in turns]
    return [*earlier, {"role": "user", "content": text}]


def prompt_values(prompt: str | Messages) -> tuple[list[Turn], str, str, str, str, str]:
    """Inverse of `prompt_of`: earlier turns, form, text, subreddit, title and post."""
    if isinstance(prompt, list):
        turns = [
            user_turn(message["content"], prompt[: i + 1]) if message["role"] == "user" else dict(message)
            for i, message in enumerate(prompt)
        ]
        return turns[:-1], "dialogue", prompt[-1]["content"], "", "", ""
    if fields := summary_fields(prompt):
        return [], "summary", "", *fields
    return [], "as written", prompt, "", "", ""


def clean_text(name: str, text: str | None, limit: int = MAX_CHARACTERS) -> str:
    """What a user entered, without halves of characters, which no file can store. Raises: UsageError when too long."""
    text = text or ""
    if len(text) > limit:
        raise UsageError(f"the {name} has {len(text)} characters; enter at most {limit}")
    return text.encode("utf-8", "replace").decode()


def user_turn(content: str, prompt: str | Messages) -> Turn:
    """A message of the user and the prompt that it makes."""
    return {"role": "user", "content": content, "prompt": prompt, "attempts": 0}


def edit_turn(turns: list[Turn], index: Any, text: Any) -> list[Turn]:
    """The dialogue up to a message of the user, with another text; what followed it is dropped.

    Raises: UsageError when there is no such message, or its new text is empty or too long.
    """
    chosen = turn_at(turns, index)
    text = clean_text("message", text if isinstance(text, str) else "")
    if chosen.get("role") != "user":
        raise UsageError("only your own messages can be edit_turn")
    if not text.strip():
        raise UsageError("the message is empty; enter a text")
    before = chosen["prompt"]
    prompt = text if isinstance(before, str) else [*before[:-1], {"role": "user", "content": text}]
    return [*turns[:index], user_turn(text, prompt)]


def turn_at(turns: list[Turn], index: Any) -> Turn:
    """The turn that the page names. Raises: UsageError when there is none."""
    if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < len(turns):
        raise UsageError("this message is no longer in the dialogue; reload the page")
    return turns[index]


def with_system(prompt: str | Messages, system: str) -> str | Messages:
    """A prompt with a system message in front, which replaces its own; unchanged without one, or if it is a text."""
    if not system.strip() or isinstance(prompt, str):
        return prompt
    rest = prompt[1:] if prompt and prompt[0]["role"] == "system" else prompt
    return [{"role": "system", "content": system}, *rest]


def split_system(turns: list[Turn]) -> tuple[str, list[Turn]]:
    """The text of a system message at the start, empty if there is none, and the other turns."""
    if turns and turns[0]["role"] == "system":
        return turns[0]["content"], turns[1:]
    return "", turns


def split_thinking(text: str) -> tuple[str, str]:
    """(thinking, answer): the text between <think> and </think> apart from the rest.

    Some chat templates write <think> into the prompt, so a text with </think> alone begins with thinking. One without
    </think> is all thinking, cut off or still being written.
    """
    thinking, ended, answer = text.partition(THOUGHT)
    before, began, inner = thinking.partition(THINK)
    if not (began or ended):
        return "", text
    return (inner if began else before).strip(), ((before if began else "") + answer).strip()


def content_of(turn: Turn) -> str:
    """What a turn says to later ones: of an answer the text behind its thinking, if it got so far."""
    content: str = turn["content"]
    return content if turn["role"] == "user" else split_thinking(content)[1] or content


def end_stream(turns: list[Turn]) -> list[Turn]:
    """The dialogue after the end of a stream: without an answer that never began, the last one being complete."""
    if turns and "pending" in turns[-1]:
        return turns[:-1]
    return [*turns[:-1], {key: value for key, value in turns[-1].items() if key != "streaming"}] if turns else turns
