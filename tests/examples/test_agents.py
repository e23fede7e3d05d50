"""The experiments with agents: what is scripted, computed by hand, or bounds the rest."""

import math
import random
from types import SimpleNamespace

import pytest
import torch
from transformers.utils import get_json_schema

from examples.experiments import agent_tasks, agents
from lightrlhf.data.chat import MARK
from lightrlhf.data.rendering import render
from lightrlhf.data.tokens import prompt_text
from lightrlhf.data.tool_calls import parse
from lightrlhf.envs.games import GuessNumber, calculator
from lightrlhf.storage.jsonl import read_jsonl

TOOLS = [get_json_schema(calculator)]


def test_scripted_episodes_read_as_the_template_writes_them():
    reader = agents.tokenizer()
    rows = agents.scripted(reader, seed=1, count=40)
    called = [row for row in rows if reader.decode(row["input_ids"]).startswith("calculator\n")]
    assert len(called) == 40
    right = 0
    for row in called:
        text = reader.decode(row["input_ids"])
        asked, said = text.removeprefix("calculator\n").split("\n")[0], text.split("\n")[-1].removesuffix("<eos>")
        prompt = [{"role": "user", "content": asked}]
        begin = prompt_text(reader, prompt, TOOLS)
        assert reader.decode(row["input_ids"][: row["prompt_len"]]) == begin
        first = row["targets"][row["prompt_len"] :].tolist()
        end = first.index(reader.eos_token_id) + 1
        reply = parse(reader, row["input_ids"][row["prompt_len"] :][:end], begin, TOOLS).as_message()
        messages = [*prompt, reply]
        if calls := reply.get("tool_calls"):
            result = {"role": "tool", "content": calculator(**calls[0]["function"]["arguments"])}
            messages += [result | {"tool_call_id": calls[0]["id"]}, {"role": "assistant", "content": said}]
        assert render(reader, messages, TOOLS).replace(MARK, "") == text
        right += agents.right([], [said], [calculator(asked[:-1])])[0]
    assert 0 < right < 20  # one in eight


def test_credit_of_one_turn_is_its_own_reward():
    columns = [{"episode": {"rewards": rewards}} for rewards in ([0.0, 1.0], [0.5], [])]
    rollout = SimpleNamespace(columns=columns)
    own = agents.rewards_of_turns(rollout, None, torch.tensor([1.0, 0.5, math.nan]), 3)
    assert own[:2].tolist() == [[0, 1, 0], [0.5, 0, 0]] and own[2].isnan().all()


def test_the_bounds_of_guessing_are_those_of_played_games():
    def played(choose) -> float:
        won, rng, game = 0, random.Random(0), GuessNumber()
        for seed in range(4000):
            game.reset(seed=seed)
            low, high, done = 1, game.highest, False
            while not done:
                guess = choose(rng, low, high)
                hint, reward, done, cut, _ = game.step(str(guess))
                low, high = (guess + 1, high) if hint == "higher" else (low, guess - 1)
                won, done = won + reward, done or cut
        return won / 4000

    bounds = agent_tasks.bounds()
    assert played(lambda rng, low, high: (low + high) // 2) == bounds["halving"] == 1
    assert played(lambda rng, low, high: rng.randint(1, 9)) == pytest.approx(bounds["at random"], abs=0.025)
    among = bounds["at random among the allowed"]
    assert played(lambda rng, low, high: rng.randint(low, high)) == pytest.approx(among, abs=0.025)


@pytest.mark.thorough
def test_agents_run_and_resume(tmp_path):
    words = ["--smoke", "True", "--seeds", "1", "--output_dir", str(tmp_path)]
    agents.main(words)
    rows = read_jsonl(tmp_path / "results.jsonl")
    assert [row["arm"] for row in rows] == [*agents.ARMS] and all(
        {"scores", "seconds", "commit", "processor"} <= row.keys() for row in rows
    )
    agents.main(words)
    assert read_jsonl(tmp_path / "results.jsonl") == rows
