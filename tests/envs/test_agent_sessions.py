"""Sessions of agents' programs: lost and late ones give no reward, and none stays open."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.errors import error_naming

from lightrlhf.cli.errors import UsageError
from lightrlhf.envs import agent_sessions
from lightrlhf.envs.agent_program import AgentProgram
from lightrlhf.envs.agent_sessions import AgentSessions, anew
from lightrlhf.envs.env_workers import EnvPool
from lightrlhf.envs.ways import EnvSpec
from lightrlhf.generation.conversations import Conversation
from lightrlhf.generation.episode_env import Fault
from lightrlhf.generation.episodes import Episode
from lightrlhf.generation.server_client import Busy, InvalidResponse
from lightrlhf.generation.session_client import SessionRow, SessionTurn, Trace
from lightrlhf.generation.vllm import Target

ROW, TURN = SessionRow([8], [1], [-0.5], "first"), SessionTurn(0, 0, 1, "v1", "stop", {}, {})
TRACE = Trace([ROW], [TURN], {}, [], failed_requests=0, is_answered=True)
TARGET = Target(Path(), "v1", False)


class Session:
    """A session that tells a trace, or raises."""

    def __init__(self, told):
        self.told, self.is_open = told, True
        self.client = SimpleNamespace(name="--rollout_server http://a:1")

    async def trace(self):
        if isinstance(self.told, Exception):
            raise self.told
        return self.told

    async def end(self):
        self.is_open = False
        raise Busy("gone")


def sessions_of(url: str, monkeypatch, num_processes: int = 1) -> AgentSessions:
    monkeypatch.setattr(agent_sessions, "vocabulary_size", lambda policy: 9)
    served = SimpleNamespace(policy=None, ranks=SimpleNamespace(num_processes=num_processes))
    return AgentSessions(SimpleNamespace(agent="x:y", rollout_server=[url]), None, served)


def test_several_ranks_are_refused(monkeypatch):
    with error_naming(UsageError, "--agent x:y", "one process", "2"):
        sessions_of("http://a:1", monkeypatch, 2)


def in_a_thread(work):
    """The result of a coroutine, also where a browser's loop runs in this thread."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, work).result()


@pytest.mark.parametrize(
    ("told", "stop_reason", "problem"),
    [
        (TRACE, "done", None),
        (TRACE, "env_timeout", None),
        (TRACE._replace(is_answered=False), "done", None),
        (TRACE._replace(is_answered=False), "env_timeout", "env_timeout"),
        (TRACE._replace(failed_requests=2), "done", "failed 2"),
        (InvalidResponse("no trace"), "done", "no trace"),
        (TRACE._replace(turns=[TURN, TURN._replace(version="v0")]), "done", "version v0, not v1"),
        (TRACE._replace(rows=[ROW._replace(ids=[9])]), "done", "token 9, the model has 9"),
    ],
)
def test_what_a_server_failed_or_was_late_with_is_no_episode(monkeypatch, told, stop_reason, problem):
    monkeypatch.setattr(agent_sessions, "PROBE_SECONDS", 0.0)
    sessions, session = sessions_of("http://a:1", monkeypatch), Session(told)
    work = sessions._end(session, TARGET, stop_reason)
    if problem:
        with error_naming(Busy, problem):
            in_a_thread(work)
    else:
        assert in_a_thread(work) == told
    assert not session.is_open
    sessions.close()


def test_an_episode_that_is_played_again_has_its_seed_and_noise_and_no_turn():
    one = Episode([{"role": "user", "content": "a"}], 5, 7, {"row": 3}, Conversation(None), rewards=[1.0])
    again = anew(one)
    assert (again.messages, again.seed, again.noise, again.prompt) == (one.messages, 5, 7, {"row": 3})
    assert again.rewards == [] and again.conversation is not one.conversation


def test_open_sessions_end_with_the_run(monkeypatch):
    sessions = sessions_of("http://a:1", monkeypatch)
    found = sessions.open[3] = Session(TRACE)
    sessions.close()
    assert not found.is_open and not sessions.http.thread.is_alive()


def test_a_cancelled_program_is_a_fault():
    pool = EnvPool(EnvSpec(agent="helpers.agent_programs:cancelled"), 1, 30.0)
    try:
        pool.reset(0, 1, {})
        ((_, _),) = pool.results()
        pool.step(0, {"base_url": "", "api_key": ""})
        ((_, result),) = pool.results()
        assert isinstance(result, Fault) and "CancelledError" in result.text
    finally:
        pool.close()


def test_episodes_share_an_open_loop_and_leave_no_tasks():
    """What a program forgot to close closes when it is collected, during a later episode."""
    seen = []

    async def program(task, base_url, api_key):
        seen.append((asyncio.get_running_loop(), asyncio.ensure_future(asyncio.sleep(600))))
        return 1.0

    def two_episodes():
        played = AgentProgram("helpers.agent_programs:talk")
        played.function = program
        for seed in range(2):
            played.reset(seed, {})
            played.step({"base_url": "", "api_key": ""})
        return played.finish("done"), seen[0][0].is_closed()

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(two_episodes).result() == (1.0, False)
    assert seen[0][0] is seen[1][0] and all(left.cancelled() for _, left in seen)
