"""Servers of rollouts that misbehave: what is no sample of the given weights never becomes a response.

Every case is tried once, after which the server is in order, so that the responses must be right; and for good, which
must end in one line that names the server, or in right responses of another server.
"""

import time

import pytest
from helpers.rollout_clients import SAMPLES, Client, right
from helpers.servers import FakeVLLM
from helpers.wrong_replies import of_bytes, wrong_replies

from lightrlhf.cli.errors import RunFailure
from lightrlhf.generation import server_client, server_pool, vllm

SLOW = ("drips", "100 without")
LOADS = ("/pause", "/collective_rpc", "/reset_prefix_cache", "/update_weight_version", "/resume", "/weight_info")


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    for module, name, value in (
        (server_pool, "RETRY_SECONDS", 0.01),
        (server_pool, "PROBE_SECONDS", 0.02),
        (server_client, "PROBE_SECONDS", 0.02),
        (server_pool, "MAX_RETURNS", 2),
        (vllm, "RESETS", 3),
        (vllm, "RESET_SECONDS", 0.01),
    ):
        monkeypatch.setattr(module, name, value)


def outcome(tmp_path, *servers: FakeVLLM) -> str:
    """Whether the responses are right, or the line that says why there are none."""
    try:
        with Client(tmp_path, *servers, request=0.5, server=2.0) as client:
            return "right" if client.sample() == right() else "WRONG responses"
    except RunFailure as problem:
        named = servers[0].url in str(problem) and "\n" not in str(problem)
        return f"line: {problem}" if named else f"a line of nothing: {problem!r}"
    except BaseException as problem:
        return f"traceback {problem!r}"


def test_no_wrong_reply_is_a_response(case, tmp_path, capsys):
    for name, step in wrong_replies().items():
        for times in (1, 99):
            if times > 1 and name.startswith((*SLOW, "Retry-After", "body 17", "bomb")):
                continue
            began = time.monotonic()
            with FakeVLLM({SAMPLES: [step] * times}) as server:
                seen = outcome(tmp_path, server)
            held = seen == "right" if times == 1 else seen.startswith("line: ")
            held &= time.monotonic() - began < 20
            case(f"{'once' if times == 1 else 'always'}, {name}", held, seen[:90])
        if not name.startswith((*SLOW, "body 17", "bomb", "prompts in")):  # there each request is of one prompt
            with FakeVLLM({SAMPLES: [step] * 999}) as sick, FakeVLLM() as well:
                seen = outcome(tmp_path, sick, well)
            case(f"beside another server, {name}", seen == "right", seen[:90])
    assert "Traceback" not in capsys.readouterr().err


def test_no_weights_are_loaded_by_a_wrong_reply(case, tmp_path):
    """At the first load a wrong reply ends in a line, or does not matter: then the responses are right."""
    for route in LOADS:
        for name, step in of_bytes().items():
            if name.startswith((*SLOW, "Retry-After", "body 17", "bomb")):
                continue
            with FakeVLLM({route: [step]}) as server:
                seen = outcome(tmp_path, server)
                loaded = server.version == "token-1"
            held = (seen == "right" and loaded) or seen.startswith("line: ")
            case(f"{route}, {name}", held, seen[:90])
