"""Programs that speak OpenAI's chat train as episodes: what their sessions recorded is what is learned from."""

import pytest
import torch
from helpers import metrics
from helpers.agent_runs import KEEPS, agent_args, model_of, trained
from helpers.errors import error_naming
from helpers.servers import FakeVLLM, wait_at_most
from helpers.serving import serving
from helpers.templates import ZOO

from lightrlhf.cli.errors import RunFailure
from lightrlhf.envs.agent_sessions import AgentSessions
from lightrlhf.generation.session_client import ServedSession

pytestmark = pytest.mark.slow
TOKENIZER = ZOO[KEEPS].tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("served")
    model_of(KEEPS).save_pretrained(made)
    TOKENIZER.save_pretrained(made)
    return made


@pytest.fixture(scope="module")
def url(folder):
    with serving(folder) as (address, _):
        yield address


@pytest.fixture
def traces(monkeypatch):
    """What sessions told, in order."""
    kept, trace = [], ServedSession.trace

    async def keep(session):
        kept.append(await trace(session))
        return kept[-1]

    monkeypatch.setattr(ServedSession, "trace", keep)
    return kept


def run(program: str, tmp_path, *urls: str, **flags):
    """The rollouts and metrics of a run of a program of `helpers.agent_programs`."""
    rollouts = []
    flags = {"max_steps": 1, "env_workers": 4, "rollout_size": 3} | flags
    agent = {"agent": f"helpers.agent_programs:{program}", "env": None, "max_turns": 8, "rollout_server": [*urls]}
    folder = trained(KEEPS, tmp_path, on_step=lambda step, row, rollout: rollouts.append(rollout), **agent | flags)
    return rollouts, metrics(folder)


def test_rows_are_those_of_the_traces_and_the_value_is_the_reward(url, traces, tmp_path):
    (rollout, _), rows = run("talk", tmp_path, url, max_steps=2, num_generations=4, mini_batch_size=12)
    first = traces[:12]
    expected = {(tuple(row.ids), tuple(map(bool, row.mask[1:]))) for trace in first for row in trace.rows}
    found = set()
    for ids, mask, action, logprobs, gap in zip(
        rollout.input_ids, rollout.attention_mask, rollout.action_mask, rollout.logprobs, rollout.sampling_gap
    ):
        ids = ids[mask].tolist()
        found.add((tuple(ids), tuple(action[: len(ids) - 1].tolist())))
        (row,) = [row for trace in first for row in trace.rows if row.ids == ids]
        sampled = (logprobs - gap)[: len(ids) - 1] * action[: len(ids) - 1]
        assert torch.allclose(sampled, torch.tensor(row.logprobs[1:]), atol=1e-5)
    began = [row.began for trace in first for row in trace.rows]
    assert found == expected and len(rollout) == len(began)
    assert began.count("first") == 12 and began.count("edited") == 4
    last = rollout.select(rollout.ends())
    for columns in last.columns:
        facts, word = columns["episode"], columns["word"]
        said = [message["content"] for message in columns["messages"] if message["role"] == "assistant"]
        assert facts["turns"] == len(said) == len(facts["rewards"]) == (3 if word == "water" else 2)
        assert facts["stop_reason"] == ("fault" if word == "milk" else "done")  # it gave None
        assert facts["rows"] >= (2 if word == "water" else 1)
        assert facts["score"] is None if word == "milk" else facts["score"] > 0
    cut = sum(turn.stop_reason == "length" for trace in first for turn in trace.turns)
    assert sum(columns["episode"]["counts"]["truncated_turns"] for columns in last.columns) == cut > 0
    assert rows[0]["objective/valid_ratio"] == pytest.approx(2 / 3) and rows[0]["policy/grad_norm"] > 0
    assert max(row["sampling/kl"] for row in rows) < 1e-9 and rows[0]["episodes/no_reward_ratio"] == pytest.approx(
        1 / 3
    )
    versions = [{turn.version for turn in trace.turns} for trace in traces]
    assert len(set.union(*versions[:12])) == 1 and set.union(*versions[:12]).isdisjoint(set.union(*versions[12:]))
    seeds = {trace.turns[1].request["messages"][-1]["content"] for trace in first}
    assert len(seeds) == 3  # one for a group


def test_exceptions_hangs_exits_and_silence_cost_their_episode_alone(url, tmp_path, capsys):
    (rollout,), (row,) = run("misbehave", tmp_path, url, env_timeout=5.0)
    reasons = {columns["word"]: columns["episode"] for columns in rollout.columns}
    assert reasons["tea"]["stop_reason"] == "fault" and reasons["tea"]["score"] is None
    assert reasons["water"]["stop_reason"] == "env_timeout" and reasons["milk"]["stop_reason"] == "env_crashed"
    assert reasons["water"]["score"] == reasons["milk"]["score"] == 0
    assert {facts["turns"] for facts in reasons.values()} == {1}
    assert "ValueError: no tea" in capsys.readouterr().out and row["episodes/no_reward_ratio"] == pytest.approx(1 / 3)
    (rollout,), _ = run("silent", tmp_path / "silent", url)
    assert {columns["episode"]["stop_reason"] for columns in rollout.columns} == {"fault"}
    assert "asked for no turn" in capsys.readouterr().out
    (rollout,), _ = run("parts", tmp_path / "parts", url)
    assert {columns["messages"][0]["content"] for columns in rollout.columns} == {"Some tea?"}
    run("hot", tmp_path / "hot", url)
    assert "errors: step: HTTPError" in capsys.readouterr().out


def test_episodes_of_a_server_that_is_killed_are_played_again_by_the_other(folder, url, traces, tmp_path, monkeypatch):
    wait_at_most(60.0, 60.0)
    end, ended = AgentSessions._end, []
    with serving(folder) as (other, server):

        async def killing(self, session, *more):
            ended.append(session)
            if len(ended) == 2:
                server.process.kill()
            return await end(self, session, *more)

        monkeypatch.setattr(AgentSessions, "_end", killing)
        (rollout,), (row,) = run("talk", tmp_path, url, other)
    assert row["objective/valid_ratio"] == pytest.approx(2 / 3) and len(ended) > 9
    reasons = {(columns["word"], columns["episode"]["stop_reason"]) for columns in rollout.columns}
    assert reasons == {("tea", "done"), ("water", "done"), ("milk", "fault")}  # for which it gives None


def test_what_a_program_cannot_run_on_is_refused_by_name(tmp_path):
    with error_naming(ValueError, "--agent x:y", "--rollout_server"):
        agent_args(env=None, agent="x:y")
    with error_naming(ValueError, "--agent x:y", "--env"):
        agent_args(agent="x:y", rollout_server=["http://a:1"])
    wait_at_most(5.0, 3.0)
    with FakeVLLM() as server, error_naming(RunFailure, server.url, "--agent", "lightrlhf.serve"):
        run("talk", tmp_path, server.url)
