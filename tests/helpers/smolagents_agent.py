"""An agent of smolagents with a tool, in an environment that has it: the address, a key, and stream or whole."""

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
