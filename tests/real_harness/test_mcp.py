"""A server of the package mcp gives its tools to episodes, by a command and by an address."""

import shlex
import socket
import subprocess
import time
from pathlib import Path

import pytest
from helpers.real_harness import environment_of, offline

from lightrlhf.cli.errors import UsageError
from lightrlhf.envs.mcp import McpEnv

pytestmark = pytest.mark.slow
SERVER = Path(__file__).parents[1] / "helpers/real_mcp_server.py"


def call(name: str, **arguments):
    return {"id": f"call-{name}", "type": "function", "function": {"name": name, "arguments": arguments}}


def started(words: list[str], port: int) -> McpEnv:
    """The tools of a server that is starting."""
    for _ in range(600):
        try:
            return McpEnv(f"http://127.0.0.1:{port}/mcp")
        except UsageError:
            time.sleep(0.2)
    raise AssertionError(f"{words} does not answer")


@pytest.mark.parametrize("way", ["command", "address"])
def test_tools_of_the_package_are_listed_and_called(way, tmp_path):
    words = [str(environment_of("mcp") / "python"), str(SERVER)]
    if way == "command":
        env, process = McpEnv(shlex.join(words)), None
    else:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        process = subprocess.Popen([*words, str(port)], env=offline("mcp", tmp_path))
        env = started(words, port)
    try:
        assert [tool["function"]["name"] for tool in env.tools] == ["count", "fail"]
        assert env.tools[0]["function"]["parameters"]["properties"]["by"]["type"] == "integer"
        assert env.reset(1, {}) == []
        answer = env.step({"role": "assistant", "tool_calls": [call("count", by=2), call("fail"), call("count", by=3)]})
        first, failed, last = [message["content"] for message in answer.messages]
        assert (first, last) == ("2", "5") and failed == "Error executing tool fail"
        assert answer.counts["calls"] == 3 and answer.counts["failed_calls"] == 1
        env.step({"role": "assistant", "tool_calls": [call("count", by="many")]})
        assert env.step({"role": "assistant", "tool_calls": [call("count", by=1)]}).messages[0]["content"] == "6"
    finally:
        env.close()
        if process:
            process.kill()
            process.wait()
