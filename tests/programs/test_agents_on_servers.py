"""GRPO on episodes whose turns servers sample equals GRPO in this process, even if a server is killed."""

import pytest
import torch
from helpers import last_checkpoint, metrics, weights
from helpers.agent_runs import KEEPS, REWRITES, Game, model_of, trained
from helpers.episodes import LocalPool, Told
from helpers.servers import FakeVLLM, right_ids, wait_at_most
from helpers.serving import serving
from helpers.templates import ZOO

from lightrlhf.envs import episode_sampler
from lightrlhf.generation.engine import generate
from lightrlhf.generation.rollout import Rollout

pytestmark = pytest.mark.slow
SLOTS = 4
NONE = {"sampling_correction": "none"}


def saved(name: str, folder):
    model_of(name).save_pretrained(folder)
    ZOO[name].tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def play(monkeypatch, tmp_path):
    """Runs: their rollouts, metrics and last weights."""

    def run(name: str, make=Game, **flags) -> tuple[list[Rollout], list[dict], dict]:
        rollouts: list[Rollout] = []
        monkeypatch.setattr(episode_sampler, "open_pool", lambda run: LocalPool(make, size=4))
        flags = {"max_steps": 2, "save_interval": 2, "rollout_mini_batch_size": SLOTS} | flags
        folder = trained(name, tmp_path, on_step=lambda step, row, rollout: rollouts.append(rollout), **flags)
        return rollouts, metrics(folder), weights(last_checkpoint(folder))

    return run


def assert_same(found: list[Rollout], expected: list[Rollout], **tolerances: float) -> None:
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.input_ids, other.input_ids) and torch.equal(one.action_mask, other.action_mask)
        torch.testing.assert_close(one.logprobs, other.logprobs, **({"rtol": 0, "atol": 0} | tolerances))
        facts, expected_facts = ([row["episode"] for row in rollout.columns] for rollout in (one, other))
        assert facts == expected_facts


@pytest.mark.parametrize("name", [KEEPS, REWRITES])
def test_a_server_samples_the_episodes_of_this_process(name, play, tmp_path, monkeypatch):
    """Within rounding; bit by bit where this process reads each prompt anew, as a server does."""
    with serving(saved(name, tmp_path / "model"), rollout_mini_batch_size=SLOTS) as (url, _):
        served, rows, end = play(name, rollout_server=[url], **NONE)
    assert max(row["sampling/kl"] for row in rows) < 1e-9 and rows[0]["episodes/turns"] > 1
    assert all(row["sampling/staleness"] == 0 for row in rows)
    assert_same(served, play(name)[0], atol=1e-5)
    # without cached prefixes
    monkeypatch.setattr(episode_sampler, "generate", lambda *given, **more: generate(*given[:-1], **more))
    anew, _, weights_of_anew = play(name)
    assert_same(served, anew)
    assert end == weights_of_anew


def test_a_server_that_is_killed_in_the_middle_changes_nothing(play, tmp_path, capfd):
    wait_at_most(600.0, 600.0)
    with serving(saved(KEEPS, tmp_path / "model")) as (one, _), serving(tmp_path / "model") as (two, other):
        urls, answers = {"rollout_server": [one, two]}, []

        class Killing(Game):
            def step(self, reply):
                answers.append(reply)
                if len(answers) == 8:
                    other.process.kill()
                return super().step(reply)

        whole = play(KEEPS, **urls)
        assert "is left out" not in capfd.readouterr().err
        cut = play(KEEPS, Killing, **urls)
    assert "is left out, 1 go on" in capfd.readouterr().err and len(answers) > 8
    assert_same(cut[0], whole[0])
    assert cut[2] == whole[2]


def test_ids_of_vllm_are_taken_as_they_are_and_its_room_ends_episodes(play, monkeypatch):
    """What it samples here comes from no model, so the comparison with one is left out."""
    monkeypatch.setattr(episode_sampler, "refuse_gap", lambda *given: None)
    monkeypatch.setattr(episode_sampler.EpisodeSampler, "_check_start", lambda *given: None)
    wait_at_most(5.0, 3.0)
    with FakeVLLM(max_model_len=80) as server:
        rollouts, _, _ = play(KEEPS, lambda: Told(4), rollout_server=[server.url], max_steps=1, **NONE)
    (rollout,) = rollouts
    facts = [row["episode"] for row in rollout.columns]
    assert {one["stop_reason"] for one in facts} == {"context"} and {one["turns"] for one in facts} == {2}
    asked = [prompt for body in server.bodies["/v1/completions"] for prompt in body["prompt"]]
    for ids, action in zip(rollout.input_ids.tolist(), rollout.action_mask.tolist()):
        starts = [t + 1 for t, (one, before) in enumerate(zip(action, [False, *action])) if one and not before]
        assert starts and all(ids[:start] in asked for start in starts)
        assert all(ids[start : start + 5] in [right_ids(ids[:start], n, 5) for n in range(3)] for start in starts)
