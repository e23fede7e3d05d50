"""Episodes as data for sft: its targets are what the engine sampled, and its other ids what the engine read."""

import json
from collections import Counter

import pytest
import torch
from helpers import last_checkpoint, metrics
from helpers.agent_runs import KEEPS, PROMPTS, REWRITES, Game, model_of
from helpers.episodes import LocalPool
from helpers.errors import error_naming, refused
from helpers.templates import ZOO

from lightrlhf import GRPOArgs, UsageError, generate, generate_episodes, grpo, sft
from lightrlhf.data.batch import finetune_batch
from lightrlhf.data.splits import load_split
from lightrlhf.envs import episode_sampler
from lightrlhf.generate_episodes import GenerateEpisodesArgs, split_of
from lightrlhf.storage.jsonl import read_jsonl


@pytest.fixture
def flags(tmp_path, monkeypatch):
    """Flags of three prompts, and games in this process."""
    monkeypatch.setattr(generate_episodes, "make_pool", lambda args: LocalPool(Game, size=4))
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    given = ["--env", "helpers.episodes:Told", "--prompts_file", str(tmp_path / "prompts.jsonl")]
    given += ["--num_generations", "4", "--max_new_tokens", "5", "--max_turns", "4", "--accelerator", "cpu"]
    return [*given, "--rollout_mini_batch_size", "8", "--output_dir", str(tmp_path / "data")]


def model(name: str, tmp_path) -> list[str]:
    folder = tmp_path / name
    if not folder.is_dir():
        model_of(name).save_pretrained(folder)
        ZOO[name].tokenizer.save_pretrained(folder)
    return ["--model_name", str(folder)]


def spy(monkeypatch) -> list[tuple[list[int], list[int]]]:
    """What the engine read and sampled, turn by turn."""
    seen, own = [], episode_sampler.generate

    def generating(policy, prompts, *rest, **more):
        sampled = own(policy, prompts, *rest, **more)
        seen.extend((list(ids), list(new)) for ids, new in zip(prompts, sampled.responses))
        return sampled

    monkeypatch.setattr(episode_sampler, "generate", generating)
    return seen


def trained_turns(row) -> list[tuple[list[int], list[int]]]:
    """What a row of the split has before each of its trained parts, and that part."""
    ids, targets = row["input_ids"].tolist(), row["targets"].tolist()
    assert all(target in (-100, token) for token, target in zip(ids, targets))
    starts = [i for i, target in enumerate(targets) if target != -100 and (i == 0 or targets[i - 1] == -100)]
    assert starts[0] == row["prompt_len"]
    ends = [next((i for i in range(start, len(ids)) if targets[i] == -100), len(ids)) for start in starts]
    return [(ids[:start], ids[start:end]) for start, end in zip(starts, ends)]


@pytest.mark.parametrize("name", [KEEPS, pytest.param(REWRITES, marks=pytest.mark.slow)])
def test_sft_trains_what_was_sampled_behind_what_was_read(name, flags, tmp_path, monkeypatch):
    seen = spy(monkeypatch)
    (folder,) = generate.main([*flags, *model(name, tmp_path)])
    rows, episodes = load_split(folder, "finetune", "train"), read_jsonl(tmp_path / "data" / "episodes.jsonl")
    turns = [turn for row in rows for turn in trained_turns(row)]
    assert sorted(turns) == sorted(seen) and len(turns) == sum(one["episode"]["turns"] for one in episodes) > 12
    assert (len(rows) > len(episodes)) == (name == REWRITES)
    batch = finetune_batch(list(rows), 0, use_targets=True)
    assert batch.num_actions == sum(len(new) for _, new in seen) == sum(one["episode"]["tokens"] for one in episodes)
    assert batch.input_ids[:, 1:][batch.action_mask].tolist() == [
        i for row in rows for _, new in trained_turns(row) for i in new
    ]


def test_episodes_are_written_with_what_was_said_and_given(flags, tmp_path):
    generate.main([*flags, *model(KEEPS, tmp_path)])
    episodes = read_jsonl(tmp_path / "data" / "episodes.jsonl")
    assert [(one["index"], one["prompt"]) for one in episodes] == [(i, i // 4) for i in range(12)]
    assert [one["columns"] for one in episodes] == [{"word": row["word"]} for row in PROMPTS for _ in range(4)]
    for one in episodes:
        facts, replies = one["episode"], [m["content"] for m in one["messages"] if m["role"] == "assistant"]
        assert one["messages"][0]["content"].startswith(f"Say {one['columns']['word']}\n\nYou have ")
        assert (
            len(replies) == facts["turns"] == len(facts["rewards"]) == len(facts["calls"])
            and facts["stop_reason"] == "done"
        )
        letters = [
            float(sum(c in one["columns"]["word"] for c in "".join(replies[: n + 1]))) for n in range(len(replies))
        ]
        assert facts["rewards"] == letters and one["score"] == sum(letters) + 2 * letters[-1] == one["rewards"]["env"]
    first = [Counter(one["messages"][0]["content"] for one in episodes if one["prompt"] == n) for n in range(3)]
    assert all(len(texts) == 1 for texts in first)  # one seed of the environment for all of a prompt
    assert len({json.dumps(one["messages"]) for one in episodes}) == 12


def test_the_good_ones_are_chosen_and_chosen_anew_without_playing_again(flags, tmp_path, monkeypatch, capsys):
    flags = [*flags, *model(KEEPS, tmp_path)]
    generate.main([*flags, "--min_reward", "0", "--validation_percentage", "0.1"])
    assert (tmp_path / "data" / "finetune_validation.pt").is_file()
    episodes = read_jsonl(tmp_path / "data" / "episodes.jsonl")
    monkeypatch.setattr(generate_episodes, "load_player", None)
    for least in sorted({one["score"] for one in episodes})[1:3]:
        generate.main([*flags, "--min_reward", str(least)])
        own = [row["input_ids"].tolist() for row in load_split(tmp_path / "data", "finetune", "train")]
        good = [one["rows"][0]["input_ids"] for one in episodes if one["score"] >= least]
        assert sorted(own) == sorted(good) and 0 < len(good) < 12
        counts = json.loads((tmp_path / "data" / "report.json").read_text())["counts"]
        assert counts == {"chosen": len(good), "below --min_reward": 12 - len(good)}
        assert not (tmp_path / "data" / "finetune_validation.pt").exists()
    told = refused(capsys, generate.main, *flags, "--min_reward", "1e6")
    assert "no episode is left to train on (12 below --min_reward; the highest score is" in told


def test_equal_prompts_are_in_one_split():
    args = GenerateEpisodesArgs(
        model_name="m", prompts_file=__file__, output_dir="d", env="sums", validation_percentage=0.4
    )
    rows = [{"index": n, "prompt": f"{n % 20}", "answer": n // 40} for n in range(80)]
    splits = [split_of(args, row) for row in rows]
    assert splits[:20] == splits[20:40] and splits[40:60] == splits[60:] and splits[:40] != splits[40:]
    assert 20 < splits.count("validation") < 45


@pytest.mark.slow
def test_a_killed_program_goes_on_to_the_same_episodes(flags, tmp_path):
    flags, file = [*flags, *model(REWRITES, tmp_path)], tmp_path / "data" / "episodes.jsonl"
    generate.main(flags)
    whole = file.read_bytes()
    ends = [n for n, byte in enumerate(whole) if byte == 10]
    for kept in (ends[2] + 30, ends[9] + 1):
        file.write_bytes(whole[:kept])
        generate.main(flags)
        assert file.read_bytes() == whole


@pytest.mark.slow
def test_an_episode_whose_environment_failed_is_in_no_data(flags, tmp_path, monkeypatch):
    finish = Game.finish
    monkeypatch.setattr(Game, "finish", lambda self, why: finish(self, why) / (self.word != "tea"))
    generate.main([*flags, *model(KEEPS, tmp_path)])
    report = json.loads((tmp_path / "data" / "report.json").read_text())
    assert report["counts"] == {"chosen": 8, "without a reward, by a fault": 4}
    assert [one["score"] is None for one in read_jsonl(tmp_path / "data" / "episodes.jsonl")] == [True] * 4 + [
        False
    ] * 8


@pytest.mark.slow
def test_tools_in_processes_give_data_that_sft_trains_on(flags, tmp_path, monkeypatch):
    monkeypatch.undo()
    flags = ["--tools", "calculator", *flags[2:], *model(KEEPS, tmp_path), "--env_workers", "1"]
    flags += ["--reward_function", "helpers.rewards:length", "--min_reward", "0.1"]
    (folder,) = generate.main(flags)
    (first, *_) = read_jsonl(tmp_path / "data" / "episodes.jsonl")
    assert first["tools"][0]["function"]["name"] == "calculator" and first["rewards"]["length"] == first["score"]
    run = sft.main(
        [
            "--data_dir",
            folder,
            *model(KEEPS, tmp_path),
            "--max_steps",
            "1",
            "--eval_interval",
            "0",
            "--log_dir",
            str(tmp_path / "logs"),
        ]
    )
    assert metrics(run)[-1]["train/loss"] > 0 and last_checkpoint(run).is_dir()


def test_a_dry_run_shows_an_episode_and_writes_nothing(flags, tmp_path, capsys):
    generate.main([*flags, *model(KEEPS, tmp_path), "--dry_run"])
    shown = capsys.readouterr().out
    assert "mark the trained tokens" in shown and "score: " in shown and "⟦" in shown
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("wrong", "facts"),
    [
        (["--env", "ches"], ["--env ches is unknown", "guess_number"]),
        (["--env", "no.such:Class"], ["--env no.such:Class cannot be imported"]),
        (["--env", "none.py:Class"], ["--env none.py:Class cannot be imported", "does not exist"]),
        (["--tools", "calculater"], ["--tools calculater is unknown", "calculator"]),
        (["--tools", "calculator", "--min_reward", "1"], ["--min_reward 1.0", "--reward_function"]),
        (["--env", "sums", "--do_sample", "False", "--num_generations", "2"], ["--num_generations 2"]),
    ],
)
def test_what_cannot_be_played_is_refused_before_a_model_is_loaded(wrong, facts, tmp_path, capsys, monkeypatch):
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n')
    monkeypatch.setattr(torch.nn.Module, "__init__", None)
    flags = ["--model_name", "none", "--prompts_file", tmp_path / "p.jsonl", "--output_dir", tmp_path / "data", *wrong]
    told = refused(capsys, generate.main, *flags)
    assert all(fact in told for fact in facts)


def test_grpo_refuses_a_wrong_environment_before_it_loads_a_model(cafe_data, capsys):
    flags = ["--data_dir", cafe_data, "--model_name", cafe_data, "--env", "ches"]
    assert "--env ches is unknown; give guess_number" in refused(capsys, grpo.main, *flags)
    with error_naming(UsageError, "--tools no_such_module:add cannot be imported"):
        grpo.train(GRPOArgs(tools=["no_such_module:add"], model_name="m", data_dir=str(cafe_data)), reward=len)
    with error_naming(UsageError, "--mcp no-such-command --all: there is no such command"):
        grpo.train(GRPOArgs(mcp="no-such-command --all", model_name="m", data_dir=str(cafe_data)), reward=len)


def test_data_of_another_program_is_not_written_over(flags, tmp_path, capsys):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "args.json").write_text('{"dataset_name": "mine"}')
    assert "holds data of another program" in refused(capsys, generate.main, *flags, *model(KEEPS, tmp_path))
