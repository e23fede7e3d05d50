"""The taxi through GRPO: its prompts are Reflect-RL's, each a row of its own, and its rewards the environment's."""

import pytest

pytest.importorskip("gymnasium", reason="needs pip install -e '.[envs]'")

from examples.experiments import taxi_agents
from examples.experiments.small_models import phrase_tokenizer
from lightrlhf.data.tokens import encode_prompt
from lightrlhf.envs import prompts
from lightrlhf.envs.dangerous_taxi import DangerousTaxi
from lightrlhf.envs.ways import GymEnv
from lightrlhf.generation.conversations import Conversation
from lightrlhf.generation.episode_env import opening
from lightrlhf.generation.episodes import Episode as PlayedEpisode
from lightrlhf.generation.episodes import Limits, take_turn
from lightrlhf.storage.jsonl import read_jsonl


def test_both_programs_read_the_same_prompts():
    tokenizer = phrase_tokenizer([])
    tokenizer.chat_template = taxi_agents.TEMPLATE
    row = taxi_agents.starts()[0]
    env, taxi = GymEnv(taxi_agents.LabelledTaxi(pickup_bonus=1)), DangerousTaxi(pickup_bonus=1)
    text, info = taxi.reset(options=row["options"])
    one = PlayedEpisode([{"role": "user", "content": row["prompt"]}], 0, 0, row, Conversation(tokenizer))
    one.messages = opening(one.messages, env.reset(0, row))
    limits = Limits(20, 20, 1000, 1, 1000)
    done = False
    while not done:
        action = taxi.expert()
        with taxi_agents.earlier_states_are_left_out():
            plan = one.conversation.begin(one.messages, None)
        labels = prompts.labels_for(info)
        assert plan.ids == encode_prompt(tokenizer, prompts.policy_prompt(text, info, None, labels))
        (label,) = tokenizer(prompts.label_of(action, info, labels))["input_ids"]
        answer = env.step(take_turn(one, plan, None, limits, [label], [0.0], True))
        one.messages += answer.messages
        text, reward, done, _, info = taxi.step(action)
        assert (answer.reward, answer.done) == (reward, done)
    assert info["success"] and len(one.conversation.rows) == one.num_turns > 5


def test_another_reply_than_a_label_is_fatal():
    taxi = taxi_agents.LabelledTaxi()
    taxi.reset(options=taxi_agents.starts()[0]["options"])
    *_, reward, done, _, info = taxi.step("south")
    assert (reward, done, info["invalid"]) == (-0.5, True, True)


@pytest.mark.thorough
def test_the_arms_run_and_resume(tmp_path):
    words = ["--smoke", "True", "--seeds", "1", "--output_dir", str(tmp_path)]
    taxi_agents.main(words)
    rows = read_jsonl(tmp_path / "results.jsonl")
    assert [row["arm"] for row in rows] == [*taxi_agents.ARMS]
    assert [[one["iterations"] for one in row["results"]] for row in rows] == [[1, 2]] * 3
    taxi_agents.main(words)
    assert read_jsonl(tmp_path / "results.jsonl") == rows
