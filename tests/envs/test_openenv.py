"""Environments of an OpenEnv server: actions of a text or of fields, errors, and the WebSocket's frames."""

import threading
from contextlib import contextmanager

import pytest
from helpers.errors import error_naming
from helpers.openenv_server import DEFINITIONS, FIELDS, PONGS, TEXT, Server

from lightrlhf.cli.errors import UsageError
from lightrlhf.envs.openenv import OpenEnv
from lightrlhf.envs.ways import EnvSpec


@contextmanager
def served(fields):
    """Context manager: the environment of a server."""
    with Server(fields) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        try:
            env = EnvSpec(env=server.url).make()
            yield env
            env.close()
        finally:
            server.shutdown()


def act(*actions):
    calls = [{"id": f"c{i}", "function": {"name": "act", "arguments": given}} for i, given in enumerate(actions)]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def test_a_text_is_the_action_where_that_has_one_field():
    with served(TEXT) as env:
        assert isinstance(env, OpenEnv) and env.tools is None and env.gives_reward and not env.has_outcome
        assert env.reset(14, {"options": {"greeting": "go " * 40_000}})[0]["content"] == "go " * 40_000
        assert env.finish("turns") is None  # no turn had a reward
        wrong = env.step({"content": "3"})
        assert (wrong.messages[0]["content"], wrong.reward, wrong.done) == ("wrong", 0.0, False)
        refused = env.step({"content": "three"})
        assert refused.messages[0]["content"] == "error: Invalid message: text is no number"
        assert refused.counts == {"calls": 1, "failed_calls": 1, "wrong_arguments": 1} and not refused.done
        right = env.step({"content": "4"})
        assert (right.reward, right.done, env.finish("done")) == (1.0, True, 0.0)
        assert env.reset(15, {})[0]["content"] == "guess" and env.step({"content": "5"}).done


def test_fields_are_a_tool_and_rewards_of_a_turn_add_up():
    with served(FIELDS) as env:
        function = env.tools[0]["function"]
        assert function["name"] == "act" and function["parameters"]["required"] == ["number"]
        assert function["parameters"]["properties"] == FIELDS and function["parameters"]["$defs"] == DEFINITIONS
        env.reset(4, {})
        answer = env.step(act({"number": 3, "loud": True}, {"number": "x"}, {"number": 4}, {"number": 5}))
        texts = [message["content"] for message in answer.messages]
        assert texts[0] == "wrong" * 20_000 and texts[2:] == ["right", "error: the episode is over"]
        assert (answer.reward, answer.done) == (1.0, True)
        assert answer.counts == {"calls": 4, "failed_calls": 1, "wrong_arguments": 1}
        assert env.step(act()).stop_reason == "answer"
        other = {"tool_calls": [{"id": "c", "function": {"name": "go", "arguments": {}}}]}
        assert env.step(other).counts == {"calls": 1, "failed_calls": 1, "unknown_tools": 1}


@pytest.mark.parametrize(
    ("text", "kind", "told"),
    [
        ("crash", ValueError, "no luck"),
        ("leave", ConnectionError, "closed"),
        ("full", ValueError, "lower --env_workers"),
    ],
)
def test_other_errors_are_faults(text, kind, told):
    """Those of a lost connection in all later calls, too, whether or not they can be sent."""
    with served(TEXT) as env:
        env.reset(1, {})
        with error_naming(kind, told):
            env.step({"content": text})
        for _ in range(2 * (text != "crash")):
            with error_naming(ConnectionError, "closed"):
                env.step({"content": text})


def test_pings_are_answered_while_no_call_waits():
    with served(TEXT) as env:
        env.reset(1, {})
        assert env.step({"content": "pause"}).messages[0]["content"] == "yes" and PONGS.get(timeout=9) == b"late"


def test_a_server_that_cannot_be_had_is_named():
    with error_naming(UsageError, "--env ws://127.0.0.1:9"):
        OpenEnv("ws://127.0.0.1:9")
    with served(TEXT) as env, error_naming(UsageError, f"--env {env.url}/elsewhere", "404"):
        OpenEnv(f"{env.url}/elsewhere")
    with error_naming(UsageError, "no fields"), served({}):
        pass
