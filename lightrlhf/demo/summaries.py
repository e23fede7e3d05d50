"""Prompt format of the TL;DR summarization dataset: builds the prompt of a Reddit post and parses it back."""

from __future__ import annotations

import re


def summary_prompt(subreddit: str, title: str, post: str) -> str:
    """The prompt of a Reddit post; it ends without a space, because the space after `TL;DR:` starts the summary."""
    return f"SUBREDDIT: r/{subreddit}\nTITLE: {title}\nPOST: {post}\nTL;DR:"


def summary_fields(prompt: str) -> tuple[str, str, str] | None:
    """Subreddit, title and post of such a prompt; None for any other text."""
    match = re.fullmatch(r"SUBREDDIT: r/(.*?)\nTITLE: (.*?)\nPOST: (.*)\nTL;DR:", prompt, re.DOTALL)
    return (match[1], match[2], match[3]) if match else None
