"""`python -m lightrlhf.serve` as a program: our own engine in a process, and the command for vLLM."""

import base64
import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from http.client import HTTPConnection

import pytest
import torch
from helpers import ROOT, environment, last_checkpoint, run_program, save_model
from helpers.forks import started_program
from helpers.processes import PATIENCE
from helpers.serving import serving

from lightrlhf.cli.groups import DecodingArgs, ModelArgs
from lightrlhf.generate import main as generate_main
from lightrlhf.generation.engine import generate
from lightrlhf.generation.openai_client import RemoteArgs, Servers
from lightrlhf.models.loading import load_policy
from lightrlhf.models.tokenizer import end_ids
from lightrlhf.sft import main as sft

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokenizer):
    path = save_model("llama", tmp_path_factory.mktemp("served") / "model", tokenizer)
    tokenizer.save_pretrained(path)
    return path


def test_the_program_answers_as_the_engine_here_also_after_a_kill(folder, tokenizer):
    policy = load_policy(str(folder), ModelArgs(), tokenizer).eval()
    seed = torch.rand(2, 6, generator=torch.Generator().manual_seed(9))
    local = generate(policy, [[5, 6], [7]], DecodingArgs(max_new_tokens=6), end_ids(tokenizer, policy.model), seed, 4)
    noise = base64.b64encode(seed.numpy().astype("<f4").tobytes()).decode()
    body = {"prompt": [[5, 6], [7]], "max_tokens": 6, "noise": noise, "logprobs": 0, "return_token_ids": True}
    with serving(folder, rollout_mini_batch_size=4, served_model_name="tiny") as (url, server):
        for _ in range(2):
            choices = server.ask("/v1/completions", {"model": "tiny", **body}).json()["choices"]
            assert [choice["token_ids"] for choice in choices] == local.responses
            assert [choice["logprobs"]["token_logprobs"] for choice in choices] == local.logprobs
            with contextlib.closing(HTTPConnection("127.0.0.1", server.port)) as held:  # open while the server dies
                held.request("GET", "/health")
                assert held.getresponse().status == 200
                server.restart()
            assert server.url == url
        assert server.lines == [f"serving tiny at {url}\n"] * 3
        assert server.ask("/version", Authorization="Bearer another").status_code == 401


def test_the_client_of_other_programs_speaks_to_it(folder, tmp_path):
    with serving(folder) as (url, _):
        servers = Servers(RemoteArgs(base_url=[f"{url}/v1"]), str(folder))
        servers.wait_until_healthy()
        chat = {"messages": [{"role": "user", "content": "tea"}], "max_tokens": 4, "seed": 1, "temperature": 1.0}
        text = {"prompt": "tea", "max_tokens": 4, "seed": 1}
        replies = list(servers.replies([chat, text, {**text, "max_tokens": 10**6}]))
        servers.close()
        assert replies[0].error is None and replies[1].error is None and replies[0].text and replies[1].text
        assert "does not fit into the 256 positions" in replies[2].error
        (tmp_path / "prompts.jsonl").write_text('{"prompt": "a tea"}\n{"prompt": "a coffee"}\n')
        flags = [
            "--model_name",
            str(folder),
            "--prompts_file",
            str(tmp_path / "prompts.jsonl"),
            "--num_generations",
            "2",
        ]
        flags += ["--rollout_engine", "openai", "--base_url", f"{url}/v1", "--max_new_tokens", "5"]
        generate_main([*flags, "--output_file", str(tmp_path / "out.jsonl")])
        rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
        assert [len(row["responses"]) for row in rows] == [2, 2] and "errors" not in rows[0]


@pytest.mark.parametrize("number, status", [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_ends_it_at_once_while_a_request_runs(folder, number, status):
    body = json.dumps({"prompt": [5], "n": 4096, "max_tokens": 250, "ignore_eos": True, "stream": True})
    with serving(folder) as (_, server):
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n"
            key = os.environ["OPENAI_API_KEY"]
            client.sendall(f"{head}Authorization: Bearer {key}\r\n\r\n{body}".encode())
            assert client.recv(12) == b"HTTP/1.1 200"
            server.process.send_signal(number)
            assert server.process.wait(PATIENCE) == status
        server.reader.join(PATIENCE)
        assert len(server.lines) == 1, server.lines


def test_a_key_is_made_and_printed(folder):
    variables = {name: value for name, value in environment().items() if name != "OPENAI_API_KEY"}
    flags = [folder, "--engine", "lightrlhf", "--port", "0", "--accelerator", "cpu"]
    pipes = {"stdout": subprocess.PIPE, "text": True}
    with started_program("lightrlhf.serve", *flags, cwd=ROOT, env=variables, **pipes) as process:
        line = process.stdout.readline()
        assert line.startswith("key: export OPENAI_API_KEY=") and len(line) > 60
        assert process.stdout.readline().startswith("serving ")


@pytest.mark.parametrize(
    "flags, status, words",
    [
        (["--host", "0.0.0.0"], 2, "--host 0.0.0.0 is reachable by others; set a key in OPENAI_API_KEY"),
        (["--engine_flags", "'"], 2, "--engine_flags ' cannot be split into words"),
        (["--engine", "lightrlhf", "--print_command", "True"], 2, "there is no command"),
        (["--engine", "vllm", "--python", "/none"], 2, "--python /none cannot be run"),
        (["--engine", "vllm", "--python", sys.executable], 2, "has no vllm; install it there"),
    ],
)
def test_wrong_flags_are_one_line(folder, flags, status, words, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    done = run_program("lightrlhf.serve", str(folder), *flags, check=False)
    assert done.returncode == status and words in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_wrong_models_and_ports_are_one_line(rm_dir, folder, tmp_path):
    done = run_program("lightrlhf.serve", str(tmp_path / "none"), check=False)
    assert done.returncode == 2 and "none does not exist" in done.stderr
    done = run_program("lightrlhf.serve", rm_dir, check=False)
    assert done.returncode == 2 and "holds a reward model" in done.stderr
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run_program("lightrlhf.serve", str(folder), "--engine", "lightrlhf", "--port", port, check=False)
    assert done.returncode == 1 and done.stderr.startswith(f"error: --host 127.0.0.1 --port {port}: ")


# ------------------------------------------------------------------------------------------------------ other engines
FAKE = """
import json, os, pathlib, sys
words, shown = sys.argv[1:], {name: value for name, value in os.environ.items() if name.startswith("VLLM_")}
model = pathlib.Path(words[1])
files = sorted(path.name for path in model.iterdir())
pathlib.Path(os.environ["RECORD"]).write_text(json.dumps([words, shown, files]))
"""


@pytest.fixture
def engines(tmp_path, monkeypatch):
    """An environment in which vLLM seems to be installed: it writes down how it was started."""
    path = tmp_path / "packages" / "vllm" / "entrypoints" / "openai" / "api_server.py"
    path.parent.mkdir(parents=True)
    path.write_text(FAKE)
    (tmp_path / "packages" / "vllm" / "__init__.py").touch()
    wrapper = tmp_path / "python"
    wrapper.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path / "packages"} exec {sys.executable} "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("RECORD", str(tmp_path / "record.json"))
    monkeypatch.setenv("OPENAI_API_KEY", "a-secret-key")
    return wrapper


def test_vllm_is_started_with_what_training_needs(engines, folder, tmp_path):
    flags = ["--python", engines, "--port", "8123", "--dtype", "bfloat16", "--enable_lora", "True"]
    flags += ["--max_lora_rank", "16", "--served_model_name", "tiny", "--engine_flags=--max-model-len 128"]
    shown = run_program("lightrlhf.serve", str(folder), *flags, "--print_command", "True").stdout
    assert not (tmp_path / "record.json").exists() and "a-secret-key" not in shown
    line = run_program("lightrlhf.serve", str(folder), *flags).stdout
    assert line == shown
    words, variables, _ = json.loads((tmp_path / "record.json").read_text())
    given = ["--model", str(folder), "--served-model-name", "tiny", "--host", "127.0.0.1", "--port", "8123"]
    given += ["--dtype", "bfloat16", "--logprobs-mode", "processed_logprobs", "--max-logprobs", "128"]
    given += ["--generation-config", "vllm", "--enable-lora", "--max-lora-rank", "16", "--max-model-len", "128"]
    assert words == given
    assert shown.endswith(f"{engines} -m vllm.entrypoints.openai.api_server {shlex.join(given)}\n")
    assert {name: variables.get(name) for name in ("VLLM_SERVER_DEV_MODE", "VLLM_ALLOW_RUNTIME_LORA_UPDATING")} == {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    }
    assert variables["VLLM_API_KEY"] == "a-secret-key"


def test_an_adapter_is_merged_before_another_engine_gets_it(engines, sft_dir, cafe_data, tmp_path):
    flags = ["--max_steps", "1", "--finetune_mode", "lora", "--accelerator", "cpu", "--devices", "1"]
    flags += ["--model_name", sft_dir]
    experiment = sft(["--data_dir", str(cafe_data), "--log_dir", str(tmp_path / "logs"), *flags])
    checkpoint = last_checkpoint(experiment)
    before = sorted(checkpoint.parent.iterdir())
    run_program("lightrlhf.serve", experiment, "--python", engines)
    words, _, files = json.loads((tmp_path / "record.json").read_text())
    assert words[1] != str(checkpoint) and "model.safetensors" in files and "tokenizer.json" in files
    assert not any(name.startswith("adapter") for name in files)
    assert sorted(checkpoint.parent.iterdir()) == before


def test_another_engine_stays_on_the_loopback(engines, folder):
    done = run_program("lightrlhf.serve", str(folder), "--python", engines, "--host", "0.0.0.0", check=False)
    assert done.returncode == 2 and "without asking for a key; use 127.0.0.1" in done.stderr
    done = run_program("lightrlhf.serve", str(folder), "--python", engines, "--port", "0", check=False)
    assert done.returncode == 2 and "--port 0: vllm needs a fixed port" in done.stderr
