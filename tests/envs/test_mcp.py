"""Tools of a server of the Model Context Protocol, by a command and by an address."""

import json
import shlex
import sys
import threading
from http.server import ThreadingHTTPServer

import pytest
from helpers.errors import error_naming
from helpers.mcp_server import COMMAND, Handler

from lightrlhf.cli.errors import UsageError
from lightrlhf.envs.env_workers import EnvPool
from lightrlhf.envs.mcp import McpEnv
from lightrlhf.envs.ways import EnvSpec


@pytest.fixture(params=["command", "address"])
def env(request):
    """An environment, and the sessions that the server of the address has."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    made = EnvSpec(mcp=COMMAND if request.param == "command" else f"http://127.0.0.1:{server.server_port}/mcp").make()
    yield made
    made.close()
    server.shutdown()
    server.server_close()
    assert not Handler.sessions


def call(name, number=0, **arguments):
    return {"id": f"c{number}", "function": {"name": name, "arguments": arguments}}


def say(*calls):
    return {"role": "assistant", "content": "", "tool_calls": list(calls)}


def test_tools_are_listed_and_called(env):
    assert isinstance(env, McpEnv) and not env.gives_reward
    assert [tool["function"]["name"] for tool in env.tools] == ["count", "fail", "picture", "leave"]
    assert env.tools[0]["function"]["parameters"]["required"] == ["by"]
    assert env.reset(1, {}) == []
    answer = env.step(say(call("count", 0, by=2), call("picture", 1), call("count", 2, by=3)))
    assert [one["content"] for one in answer.messages] == ["2", "see\n[image left out]", "5"]
    assert [one["tool_call_id"] for one in answer.messages] == ["c0", "c1", "c2"] and answer.counts == {"calls": 3}
    assert env.step(say()).done and env.finish("answer") is None


def test_each_episode_has_a_session_of_its_own(env):
    for _ in range(2):
        env.reset(1, {})
        assert env.step(say(call("count", by=2))).messages[0]["content"] == "2"


def test_errors_are_observations(env):
    answer = env.step(say(call("fail"), call("count", by="x"), call("counts")))
    told = ["no luck", "error: by is wrong", "error: no tool counts; there is count, fail, picture, leave"]
    assert [one["content"] for one in answer.messages] == told
    assert answer.counts == {"calls": 3, "failed_calls": 3, "tool_errors": 2, "unknown_tools": 1}


def test_a_server_that_leaves_is_a_fault_and_another_one_is_started():
    env = McpEnv(COMMAND)
    with error_naming(ConnectionError, "tools/call"):
        env.step(say(call("leave")))
    env.reset(1, {})
    assert env.step(say(call("count", by=1))).messages[0]["content"] == "1"
    env.close()


PRINTS = """import json, os, sys
for line in sys.stdin:
    message = json.loads(line)
    if "id" in message and message["method"] == "initialize":
        print(json.dumps({"id": message["id"], "result": {"protocolVersion": "1"}}), flush=True)
    elif "id" in message:
        told = [os.environ.get(name) for name in ("PYTHONPATH", "PYTHONHASHSEED", "LIGHTRLHF_USERS_PYTHONPATH")]
        print(json.dumps({"id": message["id"], "result": {"tools": [{"name": json.dumps(told)}]}}), flush=True)
"""


def test_a_command_s_server_has_the_user_s_python_path(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:tests")
    program = tmp_path / "server.py"
    program.write_text(PRINTS)
    pool = EnvPool(EnvSpec(mcp=shlex.join([sys.executable, str(program)])), 1, 20.0)
    pool.close()
    assert json.loads(pool.tools[0]["function"]["name"]) == [f"{tmp_path}:tests", None, None]


def test_a_server_without_tools_is_named(tmp_path):
    program = tmp_path / "server.py"
    program.write_text(PRINTS.replace('"tools":', '"others":'))
    server = shlex.join([sys.executable, str(program)])
    with error_naming(UsageError, f"--mcp {server}: its answer has no 'tools'"):
        McpEnv(server)


@pytest.mark.parametrize(
    "server", ["no-such-command", "", "'", "true", "sh -c 'read x; echo hello'", "http://127.0.0.1:9/mcp"]
)
def test_a_server_that_cannot_be_had_is_named(server):
    with error_naming(UsageError, f"--mcp {server}: ") as told:
        McpEnv(server)
    words = str(told.value)
    assert "Error" not in words and "Expecting value" not in words and "\n" not in words  # Python's own
