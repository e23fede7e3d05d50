"""Episodes: what agents see and say, and that it depends on nothing but the seed and the episode."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from helpers.corridor import STARTS, WAYS

pytest.importorskip("gymnasium", reason="needs pip install -e '.[envs]'")

from helpers import ARCHITECTURES, tiny_policy
from helpers.corridor import Corridor, corridor_tokenizer, save_corridor_model

from lightrlhf.cli.args import ModelArgs
from lightrlhf.cli.errors import RunFailure
from lightrlhf.data.batch import INFERENCE_TOKENS, response_batch
from lightrlhf.envs import agents as module
from lightrlhf.envs import information, prompts
from lightrlhf.envs.agents import (
    ActingArgs,
    Episode,
    ModelAgent,
    Reflector,
    Seat,
    count,
    oracle_agent,
    play,
    random_agent,
    rates,
)
from lightrlhf.models.loading import load_policy


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corridor")
    return [save_corridor_model(folder / name, seed) for seed, name in enumerate(("policy", "reflector"))]


def agent_of(folders, reflects: bool = True, batch_size: int = 64, **options) -> ModelAgent:
    tokenizer = corridor_tokenizer()
    args = ActingArgs(**({"reflect_max_new_tokens": 5} | options))
    policy, frozen = (load_policy(folder, ModelArgs(), tokenizer).eval() for folder in folders)
    reflector = Reflector(frozen, tokenizer, prompts, args, 8) if reflects else None
    return ModelAgent(policy, tokenizer, prompts, args, 3, batch_size, reflector)


def said(found: list[Episode]) -> list[list[tuple]]:
    return [[(d.action, d.reflection, d.prompt_ids, d.response_ids) for d in one.decisions] for one in found]


@pytest.mark.parametrize("way", WAYS)
def test_an_episode_is_the_same_however_many_are_played_at_once(way, folders):
    played = [
        play([Corridor() for _ in range(n)], STARTS[:6], agent_of(folders, batch_size=size, **WAYS[way]), "seed")
        for n, size in ((1, 1), (4, 3), (6, 64))
    ]
    assert said(played[0]) == said(played[1]) == said(played[2])
    assert said(played[0]) != said(
        play([Corridor() for _ in range(3)], STARTS[:6], agent_of(folders, **WAYS[way]), "other seed")
    )
    assert [one.start for one in played[1]] == STARTS[:6]


def test_oracle_and_random_agents_and_what_is_counted_of_them():
    found = play([Corridor(), Corridor()], STARTS, oracle_agent, "0")
    means = rates(count(found))
    assert means["success"] == 1 and means["invalid_ratio"] == 0
    assert means["reward"] == pytest.approx(-means["cost"]) and means["reward"] > 0.6
    assert means["length"] == sum(len(one.decisions) for one in found) / len(found)
    lost = rates(count(play([Corridor()], STARTS, random_agent, "0")))
    assert lost["success"] < 0.9 and lost["invalid_ratio"] > 0.1
    story = found[0].story()
    assert story.startswith("Task: go west\n--- 1 ---\nat -1 of 3\nAction: west  (reward -0.05)")
    assert story.endswith("=== success after 2 actions, cost -0.9\n")


def test_a_bandits_episode_ends_after_one_decision_and_an_endless_one_is_refused(monkeypatch):
    assert {len(one.decisions) for one in play([Corridor()], STARTS, random_agent, "0", most_decisions=1)} == {1}
    monkeypatch.setattr(module, "MOST_STEPS", 4)
    with pytest.raises(RunFailure, match="was not done after 4 actions"):
        play([Corridor()], [{"level": 1, "goal": "east", "at": -4}], oracle_agent, "0", most_decisions=99)


def test_only_what_is_offered_is_chosen_by_probabilities_over_what_is_offered(folders):
    agent = agent_of(folders, reflects=False)
    everything, some = ["west", "east", "wait"], ["west", "wait"]
    info = information(everything, some)
    seats = [Seat(Corridor(), Episode({}), random.Random(i), "at 0 of 3", info) for i in range(60)]
    decisions = agent(seats)
    assert {one.action for one in decisions} == set(some)
    assert all(one.allowed == [0, 2] for one in decisions)
    logits = agent.policy.model(torch.tensor([decisions[0].prompt_ids])).logits[0, -1].double()
    shares = logits[agent.label_ids[[0, 2]]].log_softmax(-1)
    for one in decisions:
        assert one.logprobs[0] == pytest.approx(float(shares[some.index(one.action)]), abs=1e-5)


def test_a_token_that_is_no_label_is_no_action(folders):
    found = play([Corridor()], STARTS, agent_of(folders, reflects=False, shrink_head=False), "0")
    labels = set(prompts.label_ids(corridor_tokenizer(), ["0", "1", "2"]))
    decisions = [one for episode in found for one in episode.decisions]
    assert {one.action == "" for one in decisions} == {True, False}
    assert all((one.response_ids[0] in labels) == (one.action != "") for one in decisions)


def test_greedy_comments_are_made_once_and_sampled_ones_every_time(folders, monkeypatch):
    asked: list[int] = []
    generate = module.generate
    monkeypatch.setattr(
        module,
        "generate",
        lambda policy, rows, *rest, **more: asked.append(len(rows)) or generate(policy, rows, *rest, **more),
    )
    agent = agent_of(folders)
    envs = [Corridor() for _ in range(4)]
    first = play(envs, STARTS, agent, "0")
    texts = {(one.task, decision.observation) for one in first for decision in one.decisions}
    assert sum(asked) == len(texts)
    play(envs, STARTS, agent, "0")
    assert sum(asked) == len(texts)
    asked.clear()
    again = play(envs, STARTS, agent_of(folders, reflect_do_sample=True), "0")
    assert sum(asked) == sum(len(one.decisions) for one in again) > len(texts)


def test_each_seat_has_its_own_coin_for_a_comment(folders):
    found = play([Corridor()], STARTS, agent_of(folders, reflect_prob=0.5), "0")
    kinds = [decision.reflection is None for one in found for decision in one.decisions]
    assert 0.3 < sum(kinds) / len(kinds) < 0.7
    texts = [corridor_tokenizer().decode(d.prompt_ids) for one in found for d in one.decisions]
    assert ["Analyze" in text for text in texts] == [not bare for bare in kinds]


def test_the_reflector_never_sees_the_commands_and_the_history_only_when_asked(folders):
    env = Corridor()
    text, info = env.reset(options=STARTS[0])
    text, *_, info = env.step("wait")
    assert "wait" in prompts.reflection_prompt(text, info, with_history=True)
    bare = prompts.reflection_prompt(text, info, with_history=False)
    assert "wait" not in bare and "Choose" not in bare
    assert prompts.policy_prompt(text, info, None, None).endswith("# Choose:\n- west\n- east\n- wait\n# Action:\n")


@pytest.mark.parametrize("way", [{}, {"reflect_do_sample": True}, {"max_new_tokens": 4}])
def test_what_an_episode_has_grown_by_is_all_that_is_read(folders, way):
    """With a history: the same episodes as when every prompt is read whole, and fewer tokens read by both models."""

    def episodes(keeps: bool) -> tuple[list[Episode], list[int]]:
        agent, fed = agent_of(folders, with_history=True, batch_size=3, **way), [0, 0]
        for number, reader in enumerate((agent, agent.reflector)):
            assert reader.keeps
            reader.keeps = keeps

            def count(_: Any, given: tuple[torch.Tensor, ...], number: int = number) -> None:
                fed[number] += given[0].numel()

            reader.policy.model.get_input_embeddings().register_forward_pre_hook(count)
        return play([Corridor() for _ in range(4)], STARTS[:9], agent, "0"), fed

    (growing, fewer), (whole, more) = episodes(True), episodes(False)
    assert said(growing) == said(whole)
    assert all(few < 0.9 * many for few, many in zip(fewer, more)), (fewer, more)
    for one, other in zip(*([d.logprobs for e in found for d in e.decisions] for found in (growing, whole))):
        assert one == pytest.approx(other, abs=1e-5)
    bare = agent_of(folders)
    assert not bare.keeps and not bare.reflector.keeps


def test_a_processor_reads_few_prompts_at_once_and_chooses_the_same(folders, monkeypatch):
    def episodes() -> tuple[list[Episode], int]:
        agent, widest = agent_of(folders), [0]
        count = lambda _, given: widest.append(len(given[0]))
        agent.policy.model.get_input_embeddings().register_forward_pre_hook(count)
        return play([Corridor() for _ in range(4)], STARTS[:9], agent, "0"), max(widest)

    (together, several), _ = episodes(), monkeypatch.setitem(INFERENCE_TOKENS, "cpu", 1)
    alone, one = episodes()
    assert said(together) == said(alone) and several > one == 1


def test_prompts_that_do_not_fit_and_too_many_commands_are_one_line(tmp_path, folders):
    short = save_corridor_model(tmp_path / "short", max_position_embeddings=20)
    with pytest.raises(RunFailure, match="do not fit into the policy's 20 positions"):
        play([Corridor()], STARTS, agent_of([short, folders[1]], reflects=False), "0")
    agent = agent_of(folders, reflects=False)
    many = information(None, [f"go {i}" for i in range(9)])
    with pytest.raises(RunFailure, match="9 commands for 3 labels; raise --max_choices"):
        agent([Seat(Corridor(), Episode({}), random.Random(0), "at 0 of 3", many)])


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma2", "phi", "bloom"])
def test_a_head_cut_to_labels_gives_the_whole_heads_logits(architecture):
    policy = tiny_policy(architecture)
    batch = response_batch([[5, 9, 3], [4, 8, 2, 7, 6]], [[11], [13]], 0)
    labels = torch.tensor([11, 13, 40])
    allowed = torch.tensor([[[True, True, False]], [[True, True, True]]])
    inputs = (batch.input_ids, batch.attention_mask, batch.action_mask)
    with torch.no_grad():
        found = policy.choice_logits(*inputs, labels, allowed)
        stats = policy(*inputs, temperature=0.7, with_entropy=True, label_ids=labels, allowed=allowed)
        for row, (prompt, action) in enumerate((([5, 9, 3], 0), ([4, 8, 2, 7, 6], 1))):
            logits = policy.model(torch.tensor([prompt])).logits[0, -1][labels].double()
            logits[~allowed[row, 0]] = -torch.inf
            assert torch.allclose(found[row].double().clamp(min=-1e8), logits.clamp(min=-1e8), atol=1e-4)
            logprobs = (logits / 0.7).log_softmax(-1)
            assert float(stats.logprobs[row].sum()) == pytest.approx(float(logprobs[action]), abs=1e-4)
            kept = logprobs[allowed[row, 0]]
            assert float(stats.entropy[row].sum()) == pytest.approx(float(-(kept.exp() * kept).sum()), abs=1e-4)
    assert architecture in ARCHITECTURES


def test_the_benchmark_of_steps_plays_both_sides(folders, capsys):
    from benchmarks import text_env_steps

    flags = ["--env", "helpers.corridor:Corridor", "--policy", folders[0], "--reflector", folders[1]]
    ratios = text_env_steps.main([*flags, "--num_envs", "4", "--turns", "1"])
    assert list(ratios) == ["greedy", "greedy, kept", "sampled", "with history"] and all(
        ratio > 0 for ratio in ratios.values()
    )
    assert capsys.readouterr().out.count(" steps/s") == 4
