"""Servers of rollouts that misbehave: what is no sample of the given weights never becomes a response.

Every case is tried once, after which the server is in order, so that the responses must be right; and for good, which
must end in one line that names the server, or in right responses of another server.
"""

from __future__ import annotations

import time

import pytest
from helpers.rollout_clients import PROMPTS, SAMPLES, Client, right
from helpers.servers import FakeSGLang, FakeVLLM
from helpers.wrong_replies import of_bytes, of_sglang, of_vllm

from lightrlhf.cli.errors import RunFailure
from lightrlhf.generation import rollout_servers

ROW = "rollout servers"
SLOW = ("drips", "100 without")
LOADS = {
    FakeVLLM: ("/pause", "/collective_rpc", "/reset_prefix_cache", "/update_weight_version", "/resume", "/weight_info"),
    FakeSGLang: ("/pause_generation", "/update_weights_from_disk", "/continue_generation", "/get_model_info"),
}


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    for name, value in {"RETRY_SECONDS": 0.01, "PROBE_SECONDS": 0.02, "RESETS": 3, "MAX_RETURNS": 2}.items():
        monkeypatch.setattr(rollout_servers, name, value)


def outcome(tmp_path, kind: type, *servers: FakeVLLM) -> str:
    """Whether the responses are right, or the line that says why there are none."""
    try:
        with Client(tmp_path, *servers, request_timeout=0.5, health_timeout=2.0) as client:
            return "right" if client.sample() == right(kind, PROMPTS) else "WRONG responses"
    except RunFailure as problem:
        named = servers[0].url in str(problem) and "\n" not in str(problem)
        return f"line: {problem}" if named else f"a line of nothing: {problem!r}"
    except BaseException as problem:
        return f"traceback {problem!r}"


@pytest.mark.parametrize("kind", [FakeVLLM, FakeSGLang], ids=["vLLM", "SGLang"])
def test_no_wrong_reply_is_a_response(case, kind, tmp_path, capsys):
    table = {**(of_vllm() if kind is FakeVLLM else of_sglang()), **of_bytes()}
    for name, step in table.items():
        for times in (1, 99):
            if times > 1 and name.startswith((*SLOW, "Retry-After", "body 17", "bomb")):
                continue
            began = time.monotonic()
            with kind({SAMPLES[kind]: [step] * times}) as server:
                seen = outcome(tmp_path, kind, server)
            held = seen == "right" if times == 1 else seen.startswith("line: ")
            held &= time.monotonic() - began < 20
            case(f"{kind.__name__[4:]}, {'once' if times == 1 else 'always'}, {name}", held, seen[:90])
        if not name.startswith((*SLOW, "body 17", "bomb", "prompts in")):  # there each request is of one prompt
            with kind({SAMPLES[kind]: [step] * 999}) as sick, kind() as well:
                seen = outcome(tmp_path, kind, sick, well)
            case(f"{kind.__name__[4:]}, beside another server, {name}", seen == "right", seen[:90])
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("kind", [FakeVLLM, FakeSGLang], ids=["vLLM", "SGLang"])
def test_no_weights_are_loaded_by_a_wrong_reply(case, kind, tmp_path):
    """At the first load a wrong reply ends in a line, or does not matter: then the responses are right."""
    for route in LOADS[kind]:
        for name, step in of_bytes().items():
            if name.startswith((*SLOW, "Retry-After", "body 17", "bomb")):
                continue
            with kind({route: [step]}) as server:
                seen = outcome(tmp_path, kind, server)
                loaded = server.version == "token-1"
            held = (seen == "right" and loaded) or seen.startswith("line: ")
            case(f"{kind.__name__[4:]}, {route}, {name}", held, seen[:90])
