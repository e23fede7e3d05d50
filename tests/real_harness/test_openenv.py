"""A server of the package openenv-core plays its environment with episodes, and they train a policy for a step."""

import socket
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from helpers import metrics
from helpers.agent_runs import KEEPS, trained
from helpers.errors import error_naming
from helpers.real_harness import environment_of, offline

from lightrlhf.cli.errors import UsageError
from lightrlhf.envs.openenv import OpenEnv

pytestmark = pytest.mark.slow
SERVER = Path(__file__).parents[1] / "helpers/real_openenv_server.py"


@contextmanager
def served(folder: Path, *words: str):
    """Context manager: an environment of a server of three, which leaves clients that answer no ping for .2 seconds."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [str(environment_of("openenv") / "python"), str(SERVER), str(port), *words]
    process = subprocess.Popen(command, env=offline("openenv", folder))
    try:
        yield started(f"ws://127.0.0.1:{port}")
    finally:
        process.kill()
        process.wait()


def started(url: str) -> OpenEnv:
    for _ in range(600):
        try:
            return OpenEnv(url)
        except UsageError:
            time.sleep(0.2)
    raise AssertionError(f"{url} does not answer")


def act(**action):
    return {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "act", "arguments": action}}]}


def test_fields_are_a_tool_and_a_wrong_action_an_observation(tmp_path):
    with served(tmp_path, "fields") as env:
        parameters = env.tools[0]["function"]["parameters"]
        assert parameters["required"] == ["number"] and [*parameters["properties"]] == [
            "number",
            "tone",
            "notes",
            "place",
        ]
        assert parameters["properties"]["place"]["$ref"] == "#/$defs/Place" and "Place" in parameters["$defs"]
        assert env.reset(4, {"options": {"greeting": "go", "unknown": 1}})[0]["content"] == "go"
        loud = env.step(act(number=3, tone="loud", place={"row": 1}))
        assert (loud.messages[0]["content"], loud.reward, loud.done) == ("wrong" * 20_000, 0, False)
        for action, text in (
            ({"number": -1}, "number Input should be greater"),
            ({"n": 1}, "number Field required, n "),
        ):
            answer = env.step(act(**action))
            assert answer.messages[0]["content"].startswith(f"error: Invalid message: {text}") and not answer.done
            assert answer.counts == {"calls": 1, "failed_calls": 1, "wrong_arguments": 1}
        time.sleep(1.0)  # several pings
        right = env.step(act(number=4))
        assert (right.messages[0]["content"], right.reward, right.done) == ("right", 1, True)
        assert env.finish("done") == 0


def test_a_text_is_the_action_and_episodes_train_a_policy(tmp_path):
    with served(tmp_path) as env:
        assert env.tools is None and env.reset(14, {})[0]["content"] == "guess"
        assert env.step({"content": "4"}).done and env.reset(15, {})
        with error_naming(ValueError, "no luck"):
            env.step({"content": "crash"})
        others = [OpenEnv(env.url) for _ in range(2)]
        with error_naming(ValueError, "CAPACITY_REACHED", "lower --env_workers"):
            OpenEnv(env.url).reset(1, {})
        for one in (env, *others):
            one.close()
        rows = metrics(trained(KEEPS, tmp_path, env=env.url, env_workers=2, max_turns=2))
    for row in rows:
        assert row["episodes/no_reward_ratio"] == 0 and row["objective/valid_ratio"] == 1, row
        assert row["episodes/turns"] == 2 and row["episodes/calls"] == 2 and row["episodes/stop_turns_ratio"] == 1
