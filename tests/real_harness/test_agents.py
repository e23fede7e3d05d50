"""Programs of agents that speak OpenAI's chat call tools through `lightrlhf.serve`, unchanged."""

import subprocess

import pytest
from helpers.real_harness import environment_of, offline
from helpers.scripted import KEY, scripted
from helpers.tool_templates import tool_tokenizer

PROGRAM = '''
import sys
from smolagents import OpenAIServerModel, ToolCallingAgent, tool

@tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    print("added", a, b)
    return a + b

model = OpenAIServerModel(model_id="model", api_base=sys.argv[1], api_key=sys.argv[2])
agent = ToolCallingAgent(tools=[add], model=model, stream_outputs=sys.argv[3] == "stream", verbosity_level=0)
print("answer", agent.run("What is 2 + 3?", max_steps=4))
'''
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
    (tmp_path / "agent.py").write_text(PROGRAM)
    with scripted(tool_tokenizer(name), texts) as (url, engine):
        words = [str(environment_of("smolagents") / "python"), "agent.py", url, KEY, way]
        options = {"capture_output": True, "text": True, "cwd": tmp_path, "env": offline("smolagents", tmp_path)}
        done = subprocess.run(words, timeout=300, **options)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "added 2 3" in done.stdout and done.stdout.rstrip().endswith("answer 5")
    assert len(engine.asked) == 2 and all(asked.tools for asked in engine.asked)
    assert "5" in engine.tokenizer.decode(engine.asked[1].prompts[0]).rpartition("add")[2]
