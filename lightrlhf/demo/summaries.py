"""Prompts of the TL;DR summarization dataset: Reddit posts as text, and back."""

from __future__ import annotations

import re


def summary_prompt(subreddit: str, title: str, post: str) -> str:
    """A Reddit post as the summarization set writes it; the space behind the mark belongs to the summary."""
    return f"SUBREDDIT: r/{subreddit}\nTITLE: {title}\nPOST: {post}\nTL;DR:"


def summary_fields(prompt: str) -> tuple[str, str, str] | None:
    """Subreddit, title and post of such a prompt; None of any other."""
    found = re.fullmatch(r"SUBREDDIT: r/(.*?)\nTITLE: (.*?)\nPOST: (.*)\nTL;DR:", prompt, re.DOTALL)
    return found and found.groups()
