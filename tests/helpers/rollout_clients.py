"""The client of rollout servers against fake ones, and the responses that these give when they are in order."""

from pathlib import Path

import torch

from helpers.servers import FakeVLLM, right_ids, wait_at_most
from lightrlhf.cli.groups import RolloutServerArgs
from lightrlhf.generation.server_pool import RolloutServers
from lightrlhf.generation.vllm import Target

PROMPTS = [[5, 9, 3], [5, 9, 3], [8, 2], [8, 2], [7], [7]]
TOKENS = 3
END = 1
SAMPLES = "/v1/completions"


def target(folder: Path, version: str = "token-1", is_adapter: bool = False) -> Target:
    """Weights of a version."""
    return Target(folder / version, version, is_adapter)


def args_of(*servers: FakeVLLM, request: float = 5.0, server: float = 3.0, **options) -> RolloutServerArgs:
    """Flags of a run on servers; request, server: seconds to wait for an answer, and for a server."""
    wait_at_most(request, server)
    given = {"max_new_tokens": TOKENS} | options
    return RolloutServerArgs(rollout_server=[one.url for one in servers], **given)


class Client:
    """Context manager: a client whose servers have weights of `token-1`."""

    def __init__(self, folder: Path, *servers: FakeVLLM, **options) -> None:
        self.args = args_of(*servers, **options)
        self.folder = folder

    def __enter__(self) -> "Client":
        self.servers = RolloutServers(self.args, vocabulary=64)
        self.servers.load(target(self.folder))
        return self

    def __exit__(self, *_: object) -> None:
        self.servers.close()

    def sample(self, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
        """The responses; their log-probabilities must be the fake ones."""
        found = self.servers.start(prompts, self.args, [END], torch.rand(len(prompts), TOKENS)).result()
        assert found.logprobs == [[-token / 8 for token in ids] for ids in found.responses]
        return found.responses


def right(prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    """The responses of servers in order: they number those of equal prompts."""
    numbers = [prompts[:row].count(prompt) for row, prompt in enumerate(prompts)]
    return [right_ids(prompt, number, TOKENS) for prompt, number in zip(prompts, numbers)]
