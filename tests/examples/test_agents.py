"""The experiments with agents: what is scripted, computed by hand, or bounds the rest."""

import math
import random
import re
from types import SimpleNamespace

import pytest
import torch
from transformers.utils import get_json_schema

from examples.experiments import agent_tasks, agents, real_calculator
from examples.experiments.small_models import phrase_tokenizer
from lightrlhf.data.splits import IGNORE_INDEX
from lightrlhf.data.tool_calls import parse
from lightrlhf.envs.games import GuessNumber, calculator
from lightrlhf.generation.conversations import Conversation
from lightrlhf.storage.jsonl import read_jsonl

TOOLS = [get_json_schema(calculator)]


def lines():
    return agents.tokenizer(), agents.LINES


def turns():
    """SmolLM2's marks of turns, for the tokenizer of characters."""
    reader = phrase_tokenizer([*agents.PHRASES, "<|im_start|>", "<|im_end|>"])
    reader.add_special_tokens({"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]})
    reader.chat_template = real_calculator.TEMPLATE
    return reader, real_calculator.TURNS


@pytest.mark.parametrize("make", [lines, turns])
def test_scripted_episodes_are_read_as_episodes_are_played(make):
    reader, form = make()
    rows = agents.scripted(reader, seed=1, count=80, form=form)
    tried, right = {True: 0, False: 0}, 0
    for row in rows:
        ids, targets = row["input_ids"], row["targets"].tolist()
        text = reader.decode(ids)
        asked = re.search(r"\d+\*\d+=", text)[0]
        has_tool = text.count("calculator") > text.count('"calculator"')
        messages, tools = [{"role": "user", "content": asked}], TOOLS if has_tool else None
        one = Conversation(reader)
        while True:  # as `generation.episodes` plays it
            plan = one.begin(messages, tools)
            assert ids[: len(plan.ids)] == plan.ids
            length = next(i for i in range(len(plan.ids), len(ids)) if ids[i] == reader.eos_token_id) + 1
            said = ids[len(plan.ids) : length]
            assert targets[len(plan.ids) : length] == said
            targets[len(plan.ids) : length] = [IGNORE_INDEX] * len(said)
            reply = parse(reader, said, plan.prompt, tools).as_message() if tools else None
            calls = reply.get("tool_calls") if reply else None
            if not calls:
                assert length == len(ids)
                break
            one.end(plan, {}, messages, tools, said, [0.0] * len(said), reply, "tool_calls", "")
            result = {"role": "tool", "content": calculator(**calls[0]["function"]["arguments"])}
            messages = [*messages, reply, result | {"tool_call_id": calls[0]["id"]}]
        assert {*targets} == {IGNORE_INDEX}  # of the rest
        tried[has_tool] += 1
        answer = reader.decode(said, skip_special_tokens=True)
        right += agents.right([], [answer], [calculator(asked[:-1])])[0]
    assert tried == {True: 60, False: 20} and 20 < right < 40  # one in two with the tool


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
