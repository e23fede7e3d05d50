"""Programs that speak OpenAI's chat, as `--agent` takes them."""

import asyncio
import json
import os
import time
import urllib.request


async def ask(base_url: str, api_key: str, messages: list, **more) -> dict:
    """The message of an answer."""
    body = json.dumps({"model": "any", "messages": messages, **more}).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {api_key}"}
    request = urllib.request.Request(f"{base_url}/chat/completions", body, headers)
    answer = await asyncio.to_thread(lambda: json.load(urllib.request.urlopen(request, timeout=300)))
    return answer["choices"][0]["message"]


async def talk(task: dict, base_url: str, api_key: str) -> float | None:
    """Two turns; of some words the first is then forgotten, of others there is no reward, or an exception."""
    assert "OPENAI_API_KEY" not in os.environ
    word, messages = task["word"], list(task["messages"])
    for turn in range(2):
        messages.append(await ask(base_url, api_key, messages))
        messages.append({"role": "user", "content": f"And {turn}, with {task['seed']}?"})
    if word == "water":  # forgets
        messages[1] = {"role": "assistant", "content": "Water."}
        messages.append(await ask(base_url, api_key, messages))
    if word == "milk":
        return None
    return float(sum(len(message["content"]) for message in messages if message["role"] == "assistant"))


async def misbehave(task: dict, base_url: str, api_key: str) -> float:
    """One turn, and what the word says."""
    reply = await ask(base_url, api_key, task["messages"])
    word = task["word"]
    if word == "tea":
        raise ValueError("no tea")
    if word == "water":
        time.sleep(600)
    if word == "milk":
        os._exit(3)
    return float("nan") if word == "nan" else float(len(reply["content"]))


async def cancelled(task: dict, base_url: str, api_key: str) -> float:
    raise asyncio.CancelledError


async def parts(task: dict, base_url: str, api_key: str) -> float:
    """Sends its text as a list of parts."""
    messages = [{"role": "user", "content": [{"type": "text", "text": "Some "}, {"type": "text", "text": "tea?"}]}]
    await ask(base_url, api_key, messages)
    return 1.0


def silent(task: dict, base_url: str, api_key: str) -> float:
    return 1.0


async def hot(task: dict, base_url: str, api_key: str) -> float:
    await ask(base_url, api_key, task["messages"], temperature=0.1)
    return 1.0
