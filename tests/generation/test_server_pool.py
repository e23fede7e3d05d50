"""The client of rollout servers against servers that are wrong, slow, gone, or have other weights than given."""

import threading
import time

import pytest
import torch
from helpers.errors import error_naming
from helpers.rollout_clients import END, PROMPTS, SAMPLES, Client, args_of, right, target
from helpers.servers import FakeVLLM, reply
from helpers.wrong_replies import json_reply, wrong_replies

from lightrlhf.cli.errors import RunFailure, ServersGone
from lightrlhf.generation import server_client, server_pool, vllm
from lightrlhf.generation.server_pool import RolloutServers, chunks_of
from lightrlhf.generation.vllm import NO_VERSION

SICK = [  # one of each class; all of them are among the nightly attacks
    "token_ids [False]",
    "token_ids of another vocabulary",
    "index 0",
    "prompts in another order",
]
BYTES = [
    "body deep", "broken gzip", "reset in the midst", "status 429", "status 404", "status 308 to \xff",
    "closed at once",
]  # fmt: skip


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(server_pool, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(server_pool, "PROBE_SECONDS", 0.02)
    monkeypatch.setattr(server_client, "PROBE_SECONDS", 0.02)
    monkeypatch.setattr(vllm, "RESET_SECONDS", 0.01)


# -------------------------------------------------------------------------------------------------------------- answers
def test_responses_are_those_of_the_prompts_in_order(tmp_path):
    with FakeVLLM() as server, Client(tmp_path, server) as client:
        assert client.sample() == right()
        assert server.version == "token-1" and not server.is_paused
        (body,) = server.bodies[SAMPLES]
    assert body["stop_token_ids"] == [END] and body["top_p"] == 1.0 and body["temperature"] == 1.0
    assert body["prompt"] == PROMPTS[::2] and body["n"] == 2 and body["cache_salt"] == "token-1"


def test_no_wrong_reply_is_a_response_and_the_next_attempt_is_right(tmp_path, capsys):
    table = wrong_replies()
    for name in SICK + BYTES:
        with FakeVLLM({SAMPLES: [table[name]]}) as server, Client(tmp_path, server) as client:
            assert client.sample() == right(), name
    assert "Traceback" not in capsys.readouterr().err


def test_a_server_that_is_always_wrong_ends_with_one_line_that_names_it(tmp_path):
    table = wrong_replies()
    for name in (SICK[0], "body deep", "status 404"):
        with FakeVLLM({SAMPLES: [table[name]] * 99}) as server, Client(tmp_path, server) as client:
            with pytest.raises(ServersGone, match=server.url) as problem:
                client.sample()
            assert "\n" not in str(problem.value)


def test_the_prompts_of_a_wrong_server_go_to_the_others(tmp_path, capsys):
    step = wrong_replies()[SICK[0]]
    prompts = [[n, n + 1] for n in range(2, 34)]
    with FakeVLLM({SAMPLES: [step] * 9999}) as sick, FakeVLLM() as well, Client(tmp_path, sick, well) as client:
        assert client.sample(prompts) == right(prompts)
    assert f"{sick.url} failed" in capsys.readouterr().err


def test_a_request_that_is_refused_ends_with_the_reason(tmp_path):
    step = reply(b'{"error": {"message": "prompt is\\ntoo long"}}', {"Content-Type": "application/json"}, 400)
    with FakeVLLM({SAMPLES: [step]}) as server, Client(tmp_path, server) as client:
        with error_naming(RunFailure, server.url, SAMPLES, "prompt is too long"):
            client.sample()


# --------------------------------------------------------------------------------------------------------------- speeds
def test_a_late_server_is_not_asked_twice_but_left_out(tmp_path, capsys):
    release = threading.Event()

    def late(server, body, answer):
        release.wait(10)
        return answer

    with FakeVLLM({SAMPLES: [late]}) as slow, FakeVLLM() as fast:
        with Client(tmp_path, slow, fast, request=0.4) as client:
            assert client.sample() == right()
            release.set()
    assert "no whole reply within 0.4 s" in capsys.readouterr().err


def test_servers_share_by_what_they_finish(tmp_path):
    release, prompts = threading.Event(), [[n, 3] for n in range(2, 42)]

    def slow(server, body, answer):
        assert release.wait(20)
        return answer

    def last(server, body, answer):
        if sum(len(one["prompt"]) for one in fast.bodies[SAMPLES]) >= 35:
            release.set()
        return answer

    with FakeVLLM({SAMPLES: [slow]}) as held, FakeVLLM({SAMPLES: [last] * 99}) as fast:
        with Client(tmp_path, held, fast, request=30.0) as client:
            assert client.sample(prompts) == right(prompts)
    asked = [len(one["prompt"]) for server in (held, fast) for one in server.bodies[SAMPLES]]
    assert asked == [5] * 8 and len(held.bodies[SAMPLES]) == 1  # nothing is asked twice


def test_a_retry_after_is_obeyed_within_limits(tmp_path, monkeypatch):
    for value, longest in (("0.2", 60.0), ("99999", 0.3)):
        monkeypatch.setattr(server_pool, "LONGEST_PAUSE", longest)
        step = reply(b"{}", {"Retry-After": value}, 429)
        with FakeVLLM({SAMPLES: [step]}) as server, Client(tmp_path, server) as client:
            began = time.monotonic()
            assert client.sample() == right()
            assert time.monotonic() - began >= 0.2


def test_chunks_keep_groups_whole_and_lose_nothing():
    for num_servers in (1, 2, 3, 7):
        for sizes in ([1], [4] * 8, [1] * 100, [3, 1, 5, 2], [2000], [600, 600, 600]):
            prompts = [[number] for number, size in enumerate(sizes) for _ in range(size)]
            uniforms = torch.rand(len(prompts), 2)
            chunks = chunks_of(prompts, uniforms, None, num_servers)
            assert [prompt for chunk in chunks for prompt in chunk.prompts] == prompts
            assert torch.equal(torch.cat([chunk.uniforms for chunk in chunks]), uniforms)
            whole = [{tuple(prompt) for prompt in chunk.prompts} for chunk in chunks]
            assert sum(map(len, whole)) == len(sizes)  # no group is in two of them
            assert all(len(chunk.prompts) <= 1024 or len(chunk.prompts) in sizes for chunk in chunks)


# ------------------------------------------------------------------------------------------------------------- versions
def test_other_weights_before_or_after_a_request_are_not_used(tmp_path, capsys):
    """Another trainer, or a restart: the version is read on both sides of a request."""

    def turn(server, body, answer):
        server.version = "other"
        return answer

    other = json_reply({"weight_version": "other"})
    for script in ({"/weight_info": [None, other]}, {SAMPLES: [turn]}):
        with FakeVLLM(script) as server, Client(tmp_path, server) as client:
            assert client.sample() == right()
            assert server.version == "token-1" and len(server.bodies["/collective_rpc"]) == 2
        assert "weights of version other, not token-1" in capsys.readouterr().err


@pytest.mark.parametrize("route", ["/pause", "/collective_rpc", "/reset_prefix_cache", "/update_weight_version"])
def test_a_load_that_fails_midway_never_has_the_new_version(route, tmp_path, capsys):
    before = {"/update_weight_version": 2}.get(route, 1)  # requests of the first load, and to unset the version
    failure = reply(b'{"error": {"message": "EngineCore encountered an issue"}}', status=500)
    script = {route: [None] * (before + (route == "/update_weight_version")) + [failure] * 2}
    with FakeVLLM(script) as sick, FakeVLLM() as well, Client(tmp_path, sick, well) as client:
        client.servers.load(target(tmp_path, "token-2"))
        assert sick.version in ("token-1", NO_VERSION) and (not sick.is_paused)
        assert client.sample() == right()
        assert "EngineCore encountered an issue" in capsys.readouterr().err


def test_a_cache_is_reset_until_the_server_says_yes(tmp_path):
    no = json_reply({"success": False})
    with FakeVLLM({"/reset_prefix_cache": [no, no]}) as server, Client(tmp_path, server) as client:
        assert len(server.bodies["/reset_prefix_cache"]) == 3
        assert client.sample() == right()


def test_a_cache_that_is_never_reset_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(vllm, "RESETS", 3)
    no = json_reply({"success": False})
    with FakeVLLM({"/reset_prefix_cache": [no] * 9}) as server:
        with error_naming(RunFailure, "prefix cache", "3 attempts"):
            with Client(tmp_path, server):
                pass
        assert server.version == NO_VERSION and not server.is_paused


def test_a_server_that_stays_paused_is_one_line(tmp_path):
    with FakeVLLM({"/resume": [json_reply({"status": "resumed"})] * 9}) as server:
        with error_naming(RunFailure, server.url, "paused"):
            with Client(tmp_path, server):
                pass


def test_a_server_that_keeps_its_version_is_one_line(tmp_path):
    stuck = json_reply({"weight_version": "default"})
    with FakeVLLM({"/weight_info": [stuck] * 99}) as server:
        with error_naming(RunFailure, "default", "another trainer"):
            with Client(tmp_path, server):
                pass


def test_an_adapter_has_a_new_name_and_the_one_before_is_dropped(tmp_path):
    with FakeVLLM() as server, Client(tmp_path, server) as client:
        for version in ("token-2", "token-3"):
            client.servers.load(target(tmp_path, version, is_adapter=True))
            assert list(server.adapters) == [version] and client.sample() == right()
        body = server.bodies[SAMPLES][-1]
    assert body["model"] == "token-3"


def test_an_adapter_from_another_folder_is_one_line(tmp_path):
    models = json_reply({"data": [{"id": "tiny"}, {"id": "token-2", "root": "/other", "parent": "tiny"}]})
    with FakeVLLM({"/v1/models": [None, None, None, models]}) as server:
        client = RolloutServers(args_of(server))
        with error_naming(RunFailure, "token-2", "/other"):
            client.load(target(tmp_path, "token-2", is_adapter=True))
        client.close()


# ----------------------------------------------------------------------------------------------------------- connecting
def connecting(server: FakeVLLM, patience: float = 3.0) -> str:
    """Why a client cannot be made."""
    with pytest.raises(RunFailure, match=server.url) as problem:
        RolloutServers(args_of(server, server=patience))
    assert "\n" not in str(problem.value)
    return str(problem.value)


def test_what_is_no_server_of_rollouts_is_one_line():
    no = reply(b'{"detail": "Not Found"}', status=404)
    with FakeVLLM({"/version": [no] * 9}) as server:
        assert "neither vLLM nor lightrlhf.serve" in connecting(server)
    with FakeVLLM({"/server_info": [no] * 9}) as server:
        assert "not in developer mode" in connecting(server)
    with FakeVLLM({"/version": [reply(b"", status=401)]}) as server:
        assert "refused the key (status 401)" in connecting(server)
    with FakeVLLM({"/health": [reply(b"", status=503)] * 999}) as server:
        assert "did not answer within 0.3 s" in connecting(server, patience=0.3)


ODD = ([], 3, "a", None, [3], {"data": []}, {"data": [3]}, {"data": [{}]}, {"data": [{"id": "a", "parent": "b"}]})
ODD += ({"version": []}, {"vllm_config": 3}, {"vllm_config": {"model_config": [3]}}, {"model_path": []}, {"success": 0})
ABOUT = ("/version", "/v1/models", "/server_info", "/weight_info", "/is_paused", "/collective_rpc")
ABOUT += ("/reset_prefix_cache",)


@pytest.mark.slow
def test_odd_answers_of_every_route_are_one_line_or_harmless(tmp_path, monkeypatch):
    monkeypatch.setattr(vllm, "RESETS", 2)
    for route in ABOUT:
        for value in ODD:
            with FakeVLLM({route: [json_reply(value)] * 99}) as server:
                try:
                    with Client(tmp_path, server, server=0.2) as client:
                        assert client.sample() == right(), (route, value)
                except RunFailure as problem:
                    assert server.url in str(problem) and "\n" not in str(problem), (route, value)


def test_a_prompt_without_room_is_one_line(tmp_path):
    with FakeVLLM(max_model_len=5) as server, Client(tmp_path, server) as client:
        assert client.sample([[5, 9]]) == right([[5, 9]])
        with error_naming(RunFailure, "5 tokens", "6"):
            client.sample()


def test_all_gone_is_one_line_after_the_patience(tmp_path, capsys):
    with FakeVLLM() as one, FakeVLLM() as other, Client(tmp_path, one, other, server=0.3) as client:
        for server in (one, other):
            server.listener.shutdown(2)
            server.listener.close()
        with error_naming(ServersGone, "--rollout_server", "0.3 s") as problem:
            client.sample()
        assert one.url in str(problem.value) and other.url in str(problem.value)


def test_no_prompt_needs_no_server(tmp_path):
    with FakeVLLM() as server, Client(tmp_path, server) as client:
        assert client.sample([]) == [] and not server.bodies[SAMPLES]


def test_sleeping_and_scores(tmp_path):
    with FakeVLLM() as server, Client(tmp_path, server) as client:
        client.servers.sleep(True)
        client.servers.sleep(False)
        assert all(len(server.bodies[route]) == 1 for route in ("/sleep", "/wake_up"))
        wrong = [json_reply(value) for value in (None, [], {"choices": 3}, {"choices": [{"index": 0}]})]
        wrong += [json_reply({"choices": [{"index": 0, "prompt_logprobs": [None, {"9": {"logprob": 10**400}}]}]})]
        server.script["/v1/completions"] = wrong
        server.bodies["/v1/completions"].clear()
        for _ in wrong:
            assert client.servers.score([[5, 9]]) == []


def test_closing_ends_a_load_that_does_not_come_to_an_end(tmp_path):
    """The request that resumes a server fails then, which must not keep the task alive that was cancelled."""
    reached, release = threading.Event(), threading.Event()

    def hang(server, body, answer):
        reached.set()
        release.wait(20)
        return answer

    wrong, failure = json_reply({"choices": []}), reply(b"{}", status=500)
    script = {SAMPLES: [wrong] * 99, "/pause": [None, hang], "/resume": [None, failure]}
    script["/health"] = [None, None] + [failure] * 500
    with FakeVLLM(script) as sick, FakeVLLM() as well, Client(tmp_path, sick, well) as client:
        assert client.sample([[n] for n in range(2, 34)]) == right([[n] for n in range(2, 34)])
        assert reached.wait(20)
        closing = threading.Thread(target=client.servers.close, daemon=True)
        closing.start()
        closing.join(8)
        release.set()
        assert not closing.is_alive()
