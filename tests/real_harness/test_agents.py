"""Programs of agents that speak OpenAI's chat call tools through `lightrlhf.serve`, unchanged."""

import subprocess
from pathlib import Path

import pytest
from helpers import metrics
from helpers.agent_runs import KEEPS, model_of, trained
from helpers.real_harness import environment_of, offline
from helpers.scripted import KEY, scripted
from helpers.serving import serving
from helpers.templates import ZOO
from helpers.tool_templates import tool_tokenizer

PROGRAM = Path(__file__).parents[1] / "helpers/smolagents_agent.py"
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call><|im_end|>'
FINAL = '<tool_call>\n{"name": "final_answer", "arguments": {"answer": "5"}}\n</tool_call><|im_end|>'


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen25", "chatml with tools", "llama31_tools"])
@pytest.mark.parametrize("way", ["whole", "stream"])
def test_an_agent_of_smolagents_calls_a_tool_and_answers(name, way, tmp_path):
    texts = [CALL, FINAL]
    if name == "llama31_tools":
        texts = ['{"name": "add", "parameters": {"a": 2, "b": 3}}<|eom_id|>']
        texts += ['{"name": "final_answer", "parameters": {"answer": "5"}}<|eom_id|>']
    with scripted(tool_tokenizer(name), texts) as (url, engine):
        words = [str(environment_of("smolagents") / "python"), str(PROGRAM), url, KEY, way]
        options = {"capture_output": True, "text": True, "cwd": tmp_path, "env": offline("smolagents", tmp_path)}
        done = subprocess.run(words, timeout=300, **options)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "added 2 3" in done.stdout and done.stdout.rstrip().endswith("answer 5")
    assert len(engine.asked) == 2 and all(asked.tools for asked in engine.asked)
    assert "5" in engine.tokenizer.decode(engine.asked[1].prompts[0]).rpartition("add")[2]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smolagents", "verifiers"])
def test_an_unchanged_program_is_trained_for_a_step(name, tmp_path):
    """A model that has learned nothing calls no tool; its episodes are learned from all the same."""
    environment_of(name)
    model = model_of(KEEPS)
    model.config.max_position_embeddings = 32768  # the agent's instructions are long
    model.save_pretrained(tmp_path / "model")
    ZOO[KEEPS].tokenizer.save_pretrained(tmp_path / "model")
    with serving(tmp_path / "model") as (url, _):
        sizes = {"num_generations": 2, "rollout_size": 1, "mini_batch_size": 2, "micro_batch_size": 1, "env_workers": 2}
        agent = {"agent": f"helpers.harness_agents:{name}", "env": None, "max_turns": 8, "env_timeout": 400.0}
        folder = trained(KEEPS, tmp_path, model, max_steps=1, rollout_server=[url], **sizes, **agent)
    (row,) = metrics(folder)
    assert row["objective/valid_ratio"] == 1 and row["episodes/stop_done_ratio"] == 1, row
    assert row["episodes/turns"] >= 1 and row["sampling/kl"] < 1e-9
