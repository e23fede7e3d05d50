"""Comments on states by a language model at an OpenAI-compatible server, given the oracle's knowledge.

The prompt contains the rules, the state, and as a hint the right command; the model writes the thought of a player who
found it without help. For a negative example the prompt also contains the wrong command, and the model explains what
is wrong with it.

No request is paid for twice: replies are cached by a hash of the request, in a file that several datasets may share.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tqdm import tqdm

from datasets_prep.text_envs.walks import Example
from lightrlhf.envs import prompts
from lightrlhf.generation.openai_client import RemoteArgs, Servers
from lightrlhf.storage.jsonl import JsonlWriter

ANALYST = """\
{instructions}

You are the thought of a player just before the next move, one or two sentences, at most {words} words, in the first \
person. Say where things stand, what to beware of, and end with the move to make, word for word. Never say that \
somebody told you."""
SPOILER = "(Only for you, the right move is: {expert})"
MISTAKE = "(Only for you: the player is tempted by {action}, which is wrong. The right move is: {expert}. Say why not.)"


def request(example: Example, negative: bool, instructions: str, words: int, temperature: float) -> dict[str, Any]:
    """The body of a chat completion for one state."""
    spoiler = (MISTAKE if negative else SPOILER).format(action=example.action, expert=example.expert)
    moves = ", ".join(example.admissible)
    state = prompts.state_prompt(example.text, example.info(), with_history=True)
    messages = [
        {"role": "system", "content": ANALYST.format(instructions=instructions, words=words)},
        {"role": "user", "content": f"{state}\nPossible moves: {moves}\n{spoiler}"},
    ]
    return {"messages": messages, "max_tokens": 4 * words, "temperature": temperature}


def key_of(body: dict[str, Any]) -> str:
    """Cache key of a request."""
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def generated_comments(bodies: Iterable[dict[str, Any]], args: RemoteArgs, model: str, path: Path) -> dict[str, str]:
    """Comments by key of their request; "" if a server refused it or the reply was empty.

    args: the flags of servers. Raises: RunFailure when the servers fail; earlier replies are kept.
    """
    with JsonlWriter(path, {"reflection_model": model}) as file:
        known = {row["key"]: row["reflection"] for row in file.rows}
        missing = {key_of(body): body for body in bodies}
        missing = {key: body for key, body in missing.items() if key not in known}
        if missing:
            with Servers(args, model) as servers:
                servers.wait_until_healthy()
                replies = servers.replies(missing.values())
                for key, reply in zip(missing, tqdm(replies, total=len(missing), desc="reflections", disable=None)):
                    known[key] = prompts.tidy(reply.text)
                    file.append({"key": key, "reflection": known[key], "error": reply.error})
        return known
