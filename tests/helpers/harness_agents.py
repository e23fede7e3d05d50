"""Programs of other packages as `--agent` takes them: each runs unchanged in the environment that has its package."""

import asyncio
import json
import os
from pathlib import Path

from helpers.real_harness import environment_of, offline

FOLDER = Path(__file__).parent


async def output_of(name: str, file: str, *words: str, **variables: str) -> str:
    """What a program prints. Raises: RuntimeError when it fails."""
    command = [str(environment_of(name) / "python"), str(FOLDER / file), *words]
    home = Path(os.environ["TMPDIR"]) if "TMPDIR" in os.environ else Path("/tmp")
    env = offline(name, home) | variables
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, env=env)
    text, _ = await process.communicate()
    if process.returncode:
        raise RuntimeError(f"{file} ended with status {process.returncode}")
    return text.decode()


async def smolagents(task: dict, base_url: str, api_key: str) -> float:
    return float(len(await output_of("smolagents", "smolagents_agent.py", base_url, api_key, "whole")))


async def verifiers(task: dict, base_url: str, api_key: str) -> float | None:
    found = await output_of("verifiers", "verifiers_rollout.py", base_url, SESSION_KEY=api_key)
    return json.loads(found.splitlines()[-1])["reward"]
