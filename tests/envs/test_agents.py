"""Agents of language models: prompts, choices and comments depend only on the seed and the episode."""

import random
from typing import Any

import pytest
import torch
from helpers.corridor import STARTS, WAYS
from helpers.errors import error_naming

pytest.importorskip("gymnasium", reason="needs pip install -e '.[envs]'")

from helpers import ARCHITECTURES, tiny_policy
from helpers.corridor import Corridor, corridor_tokenizer, save_corridor_model

from lightrlhf.cli.errors import RunFailure
from lightrlhf.cli.groups import ModelArgs
from lightrlhf.data.batch import INFERENCE_TOKENS, response_batch
from lightrlhf.envs import agents, information, prompts
from lightrlhf.envs.agents import ActingArgs, ModelAgent, Reflector, load_reflector
from lightrlhf.envs.episodes import Episode, Seat, play
from lightrlhf.models.loading import load_policy


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corridor")
    return [save_corridor_model(folder / name, seed) for seed, name in enumerate(("policy", "reflector"))]


def agent_of(folders, reflects: bool = True, batch_size: int = 64, **options) -> ModelAgent:
    tokenizer = corridor_tokenizer()
    args = ActingArgs(**({"reflect_max_new_tokens": 5} | options))
    policy, frozen = (load_policy(folder, ModelArgs(), tokenizer).eval() for folder in folders)
    reflector = Reflector(frozen, tokenizer, args, 8) if reflects else None
    return ModelAgent(policy, tokenizer, args, 3, batch_size, reflector)


def contents(episodes: list[Episode]) -> list[list[tuple]]:
    return [[(d.action, d.reflection, d.prompt_ids, d.response_ids) for d in one.decisions] for one in episodes]


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_an_episode_is_the_same_however_many_are_played_at_once(way, folders):
    played = [
        play([Corridor() for _ in range(n)], STARTS[:6], agent_of(folders, batch_size=size, **WAYS[way]), "seed")
        for n, size in ((1, 1), (4, 3), (6, 64))
    ]
    assert contents(played[0]) == contents(played[1]) == contents(played[2])
    other = play([Corridor() for _ in range(3)], STARTS[:6], agent_of(folders, **WAYS[way]), "other seed")
    assert contents(played[0]) != contents(other)
    assert [one.start for one in played[1]] == STARTS[:6]


def test_only_admissible_commands_are_chosen_by_their_probabilities(folders):
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
    episodes = play([Corridor()], STARTS, agent_of(folders, reflects=False, shrink_head=False), "0")
    labels = set(prompts.label_ids(corridor_tokenizer(), ["0", "1", "2"]))
    decisions = [one for episode in episodes for one in episode.decisions]
    assert {one.action == "" for one in decisions} == {True, False}
    assert all((one.response_ids[0] in labels) == (one.action != "") for one in decisions)


def test_an_agent_made_greedy_takes_the_most_likely_actions_and_comments(folders):
    args = ActingArgs(reflect_do_sample=True, reflect_max_new_tokens=5, temperature=0.9)
    greedy = args.greedy()
    assert (greedy.do_sample, greedy.reflect_do_sample) == (False, False) and args.do_sample
    assert (greedy.reflect_max_new_tokens, greedy.temperature) == (5, 0.9)
    agent = agent_of(folders, reflects=False)
    agent.args = greedy
    episodes = [play([Corridor()], STARTS[:4], agent, seed) for seed in ("0", "1")]
    assert contents(episodes[0]) == contents(episodes[1])


def test_a_reflector_is_loaded_frozen_with_its_own_tokenizer(folders):
    reflector = load_reflector(folders[1], ActingArgs(reflect_max_new_tokens=5), 8, torch.device("cpu"))
    assert not reflector.policy.training and not any(p.requires_grad for p in reflector.policy.parameters())
    seats = [Seat(Corridor(), Episode({}), random.Random(0), "at 0 of 3", information(None, ["west"]))]
    assert reflector(seats) == agent_of(folders).reflector(seats)


def test_greedy_comments_are_generated_once_and_sampled_ones_every_time(folders, monkeypatch):
    prompted: list[int] = []
    generate = agents.generate

    def counting(policy, rows, *rest, **more):
        prompted.append(len(rows))
        return generate(policy, rows, *rest, **more)

    monkeypatch.setattr(agents, "generate", counting)
    agent = agent_of(folders)
    envs = [Corridor() for _ in range(4)]
    first = play(envs, STARTS, agent, "0")
    texts = {(one.task, decision.observation) for one in first for decision in one.decisions}
    assert sum(prompted) == len(texts)
    play(envs, STARTS, agent, "0")
    assert sum(prompted) == len(texts)
    prompted.clear()
    again = play(envs, STARTS, agent_of(folders, reflect_do_sample=True), "0")
    assert sum(prompted) == sum(len(one.decisions) for one in again) > len(texts)


def test_each_seat_draws_for_itself_whether_it_gets_a_comment(folders):
    episodes = play([Corridor()], STARTS, agent_of(folders, reflect_prob=0.5), "0")
    kinds = [decision.reflection is None for one in episodes for decision in one.decisions]
    assert 0.3 < sum(kinds) / len(kinds) < 0.7
    texts = [corridor_tokenizer().decode(d.prompt_ids) for one in episodes for d in one.decisions]
    assert ["Analyze" in text for text in texts] == [not bare for bare in kinds]


def test_the_reflectors_prompt_has_no_commands_and_a_history_only_on_request(folders):
    env = Corridor()
    text, info = env.reset(options=STARTS[0])
    text, *_, info = env.step("wait")
    assert "wait" in prompts.reflection_prompt(text, info, with_history=True)
    bare = prompts.reflection_prompt(text, info, with_history=False)
    assert "wait" not in bare and "Choose" not in bare
    assert prompts.policy_prompt(text, info, None, None).endswith("# Choose:\n- west\n- east\n- wait\n# Action:\n")


@pytest.mark.slow
@pytest.mark.parametrize("way", [{}, {"reflect_do_sample": True}, {"max_new_tokens": 4}])
def test_a_prefix_cache_changes_no_episode_and_saves_tokens(folders, way):
    """With a history: the same episodes as without a cache, from fewer tokens of both models."""

    def episodes(reuses_prefixes: bool) -> tuple[list[Episode], list[int]]:
        agent, num_tokens = agent_of(folders, with_history=True, batch_size=3, **way), [0, 0]
        for number, reader in enumerate((agent, agent.reflector)):
            assert reader.reuses_prefixes
            reader.reuses_prefixes = reuses_prefixes

            def count(_: Any, inputs: tuple[torch.Tensor, ...], number: int = number) -> None:
                num_tokens[number] += inputs[0].numel()

            reader.policy.model.get_input_embeddings().register_forward_pre_hook(count)
        return play([Corridor() for _ in range(4)], STARTS[:9], agent, "0"), num_tokens

    (cached, fewer), (plain, more) = episodes(True), episodes(False)
    assert contents(cached) == contents(plain)
    assert all(few < 0.9 * many for few, many in zip(fewer, more)), (fewer, more)
    for one, other in zip(*([d.logprobs for e in part for d in e.decisions] for part in (cached, plain))):
        assert one == pytest.approx(other, abs=1e-5)
    bare = agent_of(folders)
    assert not bare.reuses_prefixes and not bare.reflector.reuses_prefixes


def test_the_token_budget_of_a_pass_changes_no_episode(folders, monkeypatch):
    def episodes() -> tuple[list[Episode], int]:
        agent, widest = agent_of(folders), [0]
        count = lambda _, given: widest.append(len(given[0]))
        agent.policy.model.get_input_embeddings().register_forward_pre_hook(count)
        return play([Corridor() for _ in range(4)], STARTS[:9], agent, "0"), max(widest)

    (batched, several), _ = episodes(), monkeypatch.setitem(INFERENCE_TOKENS, "cpu", 1)
    alone, one = episodes()
    assert contents(batched) == contents(alone) and several > one == 1


def test_prompts_that_are_too_long_and_too_many_commands_are_refused(tmp_path, folders):
    short = save_corridor_model(tmp_path / "short", max_position_embeddings=20)
    with pytest.raises(RunFailure, match="20 positions"):
        play([Corridor()], STARTS, agent_of([short, folders[1]], reflects=False), "0")
    agent = agent_of(folders, reflects=False)
    many = information(None, [f"go {i}" for i in range(9)])
    with error_naming(RunFailure, "9 commands", "3 labels", "--max_choices"):
        agent([Seat(Corridor(), Episode({}), random.Random(0), "at 0 of 3", many)])


@pytest.mark.parametrize("shuffles", [False, True])
def test_the_padding_of_a_mask_needs_no_labels(shuffles, folders):
    """As of ALFWorld's published games, whose masks are wider than the number of labels."""
    agent = agent_of(folders, reflects=False, shuffle_action=shuffles, max_choices=3)
    few = information(None, ["go west", "go east"], max_commands=9)
    seats = [Seat(Corridor(), Episode({}), random.Random(seed), "at 0 of 3", few) for seed in range(8)]
    assert {decision.action for decision in agent(seats)} <= {"go west", "go east"}


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma2", "phi", "bloom"])
def test_a_head_cut_to_labels_gives_the_whole_heads_logits(architecture):
    policy = tiny_policy(architecture)
    batch = response_batch([[5, 9, 3], [4, 8, 2, 7, 6]], [[11], [13]], 0)
    labels = torch.tensor([11, 13, 40])
    allowed = torch.tensor([[[True, True, False]], [[True, True, True]]])
    inputs = (batch.input_ids, batch.attention_mask, batch.action_mask)
    with torch.no_grad():
        scores = policy.choice_logits(*inputs, labels, allowed)
        stats = policy(*inputs, temperature=0.7, with_entropy=True, label_ids=labels, allowed=allowed)
        for row, (prompt, action) in enumerate((([5, 9, 3], 0), ([4, 8, 2, 7, 6], 1))):
            logits = policy.model(torch.tensor([prompt])).logits[0, -1][labels].double()
            logits[~allowed[row, 0]] = -torch.inf
            assert torch.allclose(scores[row].double().clamp(min=-1e8), logits.clamp(min=-1e8), atol=1e-4)
            logprobs = (logits / 0.7).log_softmax(-1)
            assert float(stats.logprobs[row].sum()) == pytest.approx(float(logprobs[action]), abs=1e-4)
            finite = logprobs[allowed[row, 0]]
            assert float(stats.entropy[row].sum()) == pytest.approx(float(-(finite.exp() * finite).sum()), abs=1e-4)
    assert architecture in ARCHITECTURES


@pytest.mark.slow
def test_the_benchmark_of_steps_plays_both_sides(folders, capsys):
    from benchmarks import text_env_steps

    flags = ["--env", "helpers.corridor:Corridor", "--policy", folders[0], "--reflector", folders[1]]
    ratios = text_env_steps.main([*flags, "--num_envs", "4", "--turns", "1"])
    assert list(ratios) == ["greedy", "greedy, kept", "sampled", "with history"] and min(ratios.values()) > 0
    assert capsys.readouterr().out.count(" steps/s") == 4
