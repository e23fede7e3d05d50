"""A run over SGLang's routes as it documents them, answered by our own engine: the run of the local engine."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
from helpers import last_checkpoint, metrics, weights
from helpers.servers import FakeSGLang
from helpers.tiny_runs import TinyRuns, experiment_of

from lightrlhf.cli.args import ModelArgs, RolloutServerArgs
from lightrlhf.generation import rollout_servers
from lightrlhf.generation.engine import generate
from lightrlhf.models.loading import load_policy
from lightrlhf.models.tokenizer import load_tokenizer
from lightrlhf.serving.weights import load_weights

OF_SERVERS = ("sampling/kl", "sampling/ratio_max", "sampling/dropped", "sampling/staleness", "time/")


class SGLangOfOurs(FakeSGLang):
    """SGLang's routes before our engine; `uniforms` are what the request under way samples with.

    SGLang draws numbers of its own: the test passes those of the run behind the back of the routes.
    """

    def __init__(self, model: Path) -> None:
        super().__init__()
        self.tokenizer = load_tokenizer(None, str(model))
        self.policy = load_policy(str(model), ModelArgs(), self.tokenizer).eval()
        self.uniforms = torch.empty(0)

    def right(self, path: str, body: dict) -> object:
        if path == "/update_weights_from_disk":
            assert self.is_paused and body["flush_cache"]
            load_weights(self.policy.model, Path(body["model_path"]))
        return super().right(path, body)

    def generate(self, body: dict) -> list[dict]:
        assert not self.is_paused and body["return_logprob"]
        given, prompts = body["sampling_params"], body["input_ids"]
        ends = given["stop_token_ids"]
        args = RolloutServerArgs(max_new_tokens=given["max_new_tokens"], temperature=given["temperature"])
        found = generate(self.policy, prompts, args, ends, self.uniforms, 32, self.tokenizer)
        answers = []
        for prompt, ids, values, cut in zip(prompts, found.responses, found.logprobs, found.truncated):
            end = {"type": "length", "length": len(ids)} if cut else {"type": "stop", "matched": ids[-1]}
            answers.append(self.answer(prompt, ids, values, end))
        return answers


@pytest.fixture(scope="module")
def runs(tmp_path_factory, cafe_data, talk_data, tokenizer) -> TinyRuns:
    return TinyRuns(tmp_path_factory.mktemp("runs"), cafe_data, talk_data, tokenizer)


def run(runs: TinyRuns, program: str, folder: Path, *more: object) -> Path:
    flags = runs.flags(program, folder, "--rollout_mini_batch_size", 32, "--eval_interval", 3, *more)
    importlib.import_module(f"lightrlhf.{program}").main(flags)
    return experiment_of(folder)


def learned(experiment: Path) -> list[dict[str, float]]:
    return [{k: v for k, v in row.items() if not k.startswith(OF_SERVERS)} for row in metrics(experiment)]


@pytest.mark.parametrize("program", ["ppo", "grpo"])
def test_a_run_over_the_routes_of_sglang_is_that_of_the_local_engine(program, runs, tmp_path, monkeypatch):
    local = run(runs, program, tmp_path / "local")
    with SGLangOfOurs(runs.model) as server:
        sample = rollout_servers.SGLang.sample

        async def with_uniforms(self, ask, of_client, chunk, *more):
            server.uniforms = chunk.uniforms
            return await sample(self, ask, of_client, chunk, *more)

        monkeypatch.setattr(rollout_servers.SGLang, "sample", with_uniforms)
        served = run(
            runs, program, tmp_path / "served", "--rollout_server", server.url, "--sampling_correction", "none"
        )
        assert server.version.endswith("-6") and len(server.bodies["/update_weights_from_disk"]) == 7
    assert learned(local) == learned(served)
    assert weights(last_checkpoint(local)) == weights(last_checkpoint(served))
    gaps = [row for row in metrics(served) if "sampling/kl" in row]
    assert len(gaps) == 6 and max(row["sampling/kl"] for row in gaps) < 1e-9
