"""One rollout of a task of verifiers, in an environment that has it: the model's address is the argument.

The key is in SESSION_KEY. Prints the rollout's reward, last reply and error as JSON.
"""

import asyncio
import json
import sys

import verifiers.v1 as vf


class Data(vf.TaskData):
    answer: str


class Guess(vf.Task[Data]):
    @vf.reward
    async def won(self, trace) -> float:
        return float(self.data.answer in (trace.last_reply or ""))


async def main(url: str) -> None:
    config = vf.AgentConfig(
        harness={"id": "null"},
        runtime={"type": "subprocess"},
        model="policy",
        client=vf.EvalClientConfig(base_url=url, api_key_var="SESSION_KEY"),
        max_turns=2,
    )
    task = Guess(Data(prompt="Guess a letter.", answer="e"), vf.TaskConfig())
    trace = await vf.make_agent(config).run(task)
    error = getattr(trace, "error", None)
    print(json.dumps({"reward": trace.reward, "reply": trace.last_reply, "error": error and str(error)}))


asyncio.run(main(sys.argv[1]))
