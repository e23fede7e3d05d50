"""Turns of a dialogue: the inputs of users, the prompts made of them, and the thinking of answers.

A turn is a dictionary: `role` and `content`; a user's turn also has `prompt` (the input of the model, without a system
message) and `attempts` (number of answers so far); an answer has `answer`, `label` of its model, and `scores` and
`measures` once they are known. An unfinished answer is `streaming`; one without text yet has `pending`, the reason.
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
    """Build the prompt of the inputs: the dialogue with a new message, a post to summarize, or the text unchanged.

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
    """Replace unpaired surrogates in an input, which no file can store. Raises: UsageError when it is too long."""
    text = text or ""
    if len(text) > limit:
        raise UsageError(f"the {name} has {len(text)} characters; enter at most {limit}")
    return text.encode("utf-8", "replace").decode()


def user_turn(content: str, prompt: str | Messages) -> Turn:
    """Make a turn of the user."""
    return {"role": "user", "content": content, "prompt": prompt, "attempts": 0}


def edit_turn(turns: list[Turn], index: Any, text: Any) -> list[Turn]:
    """Replace the text of a user's message; the turns after it are dropped.

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
    """Return the turn at an index that the page sent. Raises: UsageError when it does not exist."""
    if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < len(turns):
        raise UsageError("this message was removed from the dialogue; reload the page")
    return turns[index]


def with_system(prompt: str | Messages, system: str) -> str | Messages:
    """Put a system message before a prompt, or replace its own; a prompt of text is unchanged."""
    if not system.strip() or isinstance(prompt, str):
        return prompt
    rest = prompt[1:] if prompt and prompt[0]["role"] == "system" else prompt
    return [{"role": "system", "content": system}, *rest]


def split_system(turns: list[Turn]) -> tuple[str, list[Turn]]:
    """Split a dialogue into the text of its system message, which may be empty, and the other turns."""
    if turns and turns[0]["role"] == "system":
        return turns[0]["content"], turns[1:]
    return "", turns


def split_thinking(text: str) -> tuple[str, str]:
    """Split a text into (thinking, answer): the text between <think> and </think>, and the rest.

    Some chat templates write <think> into the prompt, so a text with </think> alone begins with thinking. One without
    </think> is all thinking, cut off or still being written.
    """
    thinking, ended, answer = text.partition(THOUGHT)
    before, began, inner = thinking.partition(THINK)
    if not (began or ended):
        return "", text
    return (inner if began else before).strip(), ((before if began else "") + answer).strip()


def content_of(turn: Turn) -> str:
    """Return the content of a turn for later prompts: an answer without its thinking, if it has more."""
    content: str = turn["content"]
    return content if turn["role"] == "user" else split_thinking(content)[1] or content


def end_stream(turns: list[Turn]) -> list[Turn]:
    """Mark the last answer of a dialogue as complete; an answer that never began is removed."""
    if turns and "pending" in turns[-1]:
        return turns[:-1]
    return [*turns[:-1], {key: value for key, value in turns[-1].items() if key != "streaming"}] if turns else turns
