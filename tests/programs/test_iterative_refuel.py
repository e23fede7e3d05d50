"""REFUEL in iterations: turns and pairs are what the flags say, stages leave files that a kill does not change."""

import json
import math
import re
import shutil
from pathlib import Path

import pytest
import torch
from helpers import CPU, last_checkpoint, metrics, reseal, run_killed, tiny_policy, weights
from helpers.errors import error_naming
from helpers.rewards import echo, vowels
from safetensors.torch import load_file

from lightrlhf import iterative_refuel
from lightrlhf.cli.errors import StopTraining, UsageError
from lightrlhf.cli.parser import parse
from lightrlhf.data.splits import load_split
from lightrlhf.evaluate import main as evaluate
from lightrlhf.generation import dialogue_pairs, dialogues
from lightrlhf.generation.dialogue_pairs import INVALID_REWARD, make_pair, sample_turn
from lightrlhf.generation.dialogues import load_dialogues
from lightrlhf.generation.users import ScriptedUser, recorded_user
from lightrlhf.iterative_refuel import IterativeRefuelArgs, main
from lightrlhf.storage.jsonl import read_jsonl
from lightrlhf.training import iterated

SIZES = ["--iterations", "2", "--num_data", "10", "--num_turns", "3", "--max_new_tokens", "6", "--eta", "2"]
SIZES += ["--mini_batch_size", "4", "--micro_batch_size", "4", "--learning_rate", "1e-3", "--eval_dialogues", "4"]
SIZES += ["--validation_percentage", "0.2", "--eval_interval", "1"]
SPEAKERS = ["--user_function", "helpers.rewards:echo", "--reward_function", "helpers.rewards:vowels"]


@pytest.fixture(scope="module")
def flags(talk_data, sft_dir):
    return ["--data_dir", str(talk_data), "--sft_experiment_dir", sft_dir, *SPEAKERS, *SIZES, *CPU]


@pytest.fixture(scope="module")
def finished(flags, tmp_path_factory):
    return Path(main([*flags, "--output_dir", str(tmp_path_factory.mktemp("refuel") / "run")]))


def args_of(talk_data, **given) -> IterativeRefuelArgs:
    fixed = {"data_dir": str(talk_data), "model_name": "tiny", "reward_function": ["helpers.rewards:vowels"]}
    return IterativeRefuelArgs(**fixed, accelerator="cpu", **given)


# ------------------------------------------------------------------------------------------------------------ pairs
def test_turns_and_horizons_are_what_the_flags_say(talk_data):
    def places(**given):
        args = args_of(talk_data, **given)
        return [sample_turn(args, index, 5, 5) for index in range(3000)]

    drawn = places()
    assert all(h <= last for h, last in drawn)
    shares = [sum(last == t for _, last in drawn) / len(drawn) for t in range(5)]
    assert max(abs(share - 0.2) for share in shares) < 0.03
    at_end = [h for h, last in drawn if last == 4]
    assert max(abs(sum(h == t for h in at_end) / len(at_end) - 0.2) for t in range(5)) < 0.06
    final = places(horizon="final")
    assert {last for _, last in final} == {4} and {h for h, _ in final} == set(range(5))
    assert set(places(turn="last")) == {(4, 4)}
    assert drawn != places(seed=7) and drawn == places()
    few = args_of(talk_data)
    assert max(sample_turn(few, index, 5, 2)[0] for index in range(200)) == 1  # the data's dialogue has two turns


def line(first: list[int], second: list[int], horizon: int = 1) -> dict:
    """A line of `dialogues.jsonl`: both share the first turn and part at the second."""
    sides = {}
    for name, reply in (("first", first), ("second", second)):
        messages = [{"role": role, "content": "x"} for role in ("user", "assistant", "user", "assistant")]
        ids = [2, 3, 4, 5, 6, *reply]
        spans = [[1, 3], [5, len(ids)]]
        sides[name] = {"messages": messages, "input_ids": ids, "turn_spans": spans}
        sides[name] |= {"truncated": [False, False], "full": False}
    return {"index": 0, "turn": 1, "horizon": horizon, **sides}


def test_a_pair_has_the_better_side_as_chosen_and_its_turn_as_mask(talk_data):
    args = args_of(talk_data, total_length=9)
    row = line([7, 8, 1], [9, 1])
    pair = make_pair(args, row, {"first": [0.0, 1.0], "second": [0.0, 2.5]})
    assert pair["chosen_input_ids"] == [2, 3, 4, 5, 6, 9, 1] and pair["chosen_reward"] == 2.5
    assert pair["rejected_input_ids"] == [2, 3, 4, 5, 6, 7, 8, 1] and pair["rejected_reward"] == 1.0
    assert pair["chosen_action_mask"].tolist() == [False] * 4 + [True] * 2
    assert pair["rejected_action_mask"].tolist() == [False] * 4 + [True] * 3
    early = line([7, 8, 1], [9, 1], horizon=4)  # a user who had nothing more to say: the last turn counts
    assert make_pair(args, early, {"first": [0.0, 1.0], "second": [0.0, 2.5]})["chosen_reward"] == 2.5
    for values, why in (
        ({"first": [0.0, INVALID_REWARD], "second": [0.0, 1.0]}, "without a valid reward"),
        ({"first": [INVALID_REWARD, 1.0], "second": [0.0, 1.0]}, "without a valid reward"),
    ):
        assert make_pair(args, row, values) == why
    good = {"first": [0.0, 1.0], "second": [0.0, 2.0]}
    assert make_pair(args, line([7, 1], [7, 1]), good) == "the same reply twice"
    assert make_pair(args, line([7, 8, 8, 8, 1], [9, 1]), good) == "too long"
    full = line([7, 1], [9, 1], horizon=2)
    full["second"]["full"] = True
    assert make_pair(args, full, good) == "without room for the horizon"


def test_an_opening_without_room_for_a_reply_gives_no_pair(talk_data, tokenizer, monkeypatch):
    policy = tiny_policy("llama", vocab_size=len(tokenizer), pad_token_id=0, eos_token_id=1)
    rows = load_dialogues(str(talk_data), "train")[:6]
    openings = [len(row.before(0).input_ids) for row in rows]
    monkeypatch.setattr(dialogues, "max_positions", lambda policy: sorted(openings)[3] + 5)
    for turn in ("random", "last"):
        args = args_of(talk_data, max_new_tokens=5, num_turns=1, turn=turn)
        lines = dialogue_pairs.branch(args, policy, tokenizer, recorded_user, None, rows)
        scored = iterative_refuel.score_pairs(lambda groups: [[1.0]] * len(groups), lines)
        for length, row, scores in zip(openings, lines, scored, strict=True):
            pair = make_pair(args, row, scores)
            assert (pair == "without room for the horizon") == (length > sorted(openings)[3])


# ---------------------------------------------------------------------------------------------------------- program
def test_every_stage_leaves_its_files(finished, flags):
    lines = [row for t in (1, 2) for row in read_jsonl(finished / f"iteration-0{t}" / "dialogues.jsonl")]
    assert [row["index"] for row in lines] == list(range(20))
    for row in lines:
        first, second = row["first"], row["second"]
        start = first["turn_spans"][row["turn"]][0]
        assert first["input_ids"][:start] == second["input_ids"][:start]
        assert second["turn_spans"][: row["turn"]] == first["turn_spans"][: row["turn"]]
        assert len(first["turn_spans"]) == 3 and len(second["turn_spans"]) == row["horizon"] + 1
    assert len({json.dumps(row["first"]["input_ids"]) for row in lines}) == 20  # no dialogue comes twice
    rewards = read_jsonl(finished / "iteration-01" / "rewards.jsonl")
    said = [m["content"] for m in lines[0]["first"]["messages"] if m["role"] == "assistant"]
    assert rewards[0]["first"] == vowels(None, said)
    pairs = load_split(finished / "iteration-01" / "pairs", "refuel", "train")
    assert all(row["chosen_reward"] >= row["rejected_reward"] for row in pairs)
    told = json.loads((finished / "iteration-01" / "pairs" / "report.json").read_text())
    assert sum(told["rows"].values()) == told["counts"]["pairs"] and told["reward_queries"] > 30
    rows = json.loads((finished / "results.json").read_text())
    assert [row["iteration"] for row in rows] == [0, 1, 2] and len(rows[2]["score_by_turn"]) == 3
    assert weights(last_checkpoint(finished)) == weights(last_checkpoint(finished / "iteration-02" / "policy"))
    assert weights(last_checkpoint(finished)) != weights(last_checkpoint(finished / "iteration-01" / "policy"))
    samples = read_jsonl(finished / "iteration-01" / "policy" / "samples.jsonl")
    assert samples[0]["prompt"] and samples[0]["columns"].keys() == {"chosen_reply", "rejected_reply"}
    assert "score at turn 3" in (finished / "README.md").read_text()


def test_each_iteration_has_a_seed_splits_counts_and_scores_of_its_own(finished):
    results, queries, seeds = json.loads((finished / "results.json").read_text()), 0, set()
    for number in (1, 2):
        folder = finished / f"iteration-0{number}"
        seeds.add(json.loads((folder / "policy" / "args.json").read_text())["seed"])
        told = json.loads((folder / "pairs" / "report.json").read_text())
        rewards = read_jsonl(folder / "rewards.jsonl")
        assert told["reward_queries"] == sum(len(row["first"]) + len(row["second"]) for row in rewards)
        assert 0 < told["rows"]["train"] < told["counts"]["pairs"]  # others are held out
        queries += told["reward_queries"]
        assert results[number]["reward_queries"] == queries
        played = read_jsonl(folder / "evaluation.jsonl")
        assert all(end - start <= 6 for row in played for start, end in row["turn_spans"])  # no turn is the data's
        means = [sum(row["scores"][h] for row in played) / len(played) for h in range(3)]
        assert results[number]["score_by_turn"] == pytest.approx(means) and len(set(means)) > 1
    assert len(seeds) == 2


def test_a_dialogue_without_a_score_is_told_from_one_of_score_0():
    row = line([7, 8, 1], [9, 1])
    scored = iterative_refuel.score_pairs(lambda groups: [[None if i % 2 else 0.0] for i in range(len(groups))], [row])
    assert scored == [{"index": 0, "first": [0.0, INVALID_REWARD], "second": [0.0, INVALID_REWARD]}]


def test_a_turn_without_a_score_has_no_mean(finished, tmp_path, capsys):
    scores = [[1.0, INVALID_REWARD, None], [4.0, 2.0], [INVALID_REWARD]]
    assert iterative_refuel.means_by_turn(scores)[:2] == [2.5, 2.0]
    assert math.isnan(iterative_refuel.means_by_turn(scores)[2])
    run = shutil.copytree(finished, tmp_path / "run", symlinks=True)
    evaluation = run / "iteration-02" / "evaluation.json"
    evaluation.write_text(json.dumps(json.loads(evaluation.read_text()) | {"score_by_turn": [0.25, None, 1.5]}))
    main(["--resume_from", str(run)])
    assert "score by turn 0.250 - 1.500" in capsys.readouterr().out
    assert "| 2 | 0.250 | - | 1.500 |" in (run / "README.md").read_text()
    assert {"val/score_turn_1", "val/score_turn_3"} == {name for name in metrics(run)[-1] if "val/" in name}


def test_the_experiment_dir_is_all_the_next_stage_needs(finished, sft_dir, talk_data, tmp_path):
    initial = shutil.copytree(sft_dir, tmp_path / "initial")  # it is written to, and other tests use it
    judged = ["--by_turn", "True", "--num_turns", "2", "--max_new_tokens", "4", "--data_dir", str(talk_data)]
    judged += ["--user_function", "datasets_prep.cafe_talk.guest:guest", "--accelerator", "cpu"]
    start, trained = evaluate(["--experiment_dir", str(initial), str(finished), *judged])
    assert start["win_rate"] == [0.5, 0.5] and len(trained["win_rate_interval"]) == 2
    turns = read_jsonl(finished / "eval" / "test" / "turn-2.jsonl")
    assert turns[0]["response"].startswith("assistant: ") and "\n\nuser: " in turns[0]["response"]
    assert (initial / "eval" / "test_by_turn.png").stat().st_size > 5_000


@pytest.mark.slow
def test_stage_by_stage_is_the_same_as_all_at_once(finished, flags, tmp_path, capsys):
    for stage in ("rank", "train"):
        with pytest.raises(SystemExit):
            main([*flags, "--output_dir", str(tmp_path / stage), "--stage", stage])
    run = tmp_path / "run"
    flags = [*flags, "--output_dir", str(run)]
    told = []
    for stage in ("generate", "rank", "tokenize", "train"):
        main([*flags, "--stage", stage])
        told.append(capsys.readouterr().out.splitlines()[-1])
    assert told == [
        f"{done} of 2 iterations done, left: {left}iteration 2; --resume_from {run} does them"
        for done, left in (
            (0, "rank, tokenize and train of iteration 1, "),
            (0, "tokenize and train of iteration 1, "),
            (0, "train of iteration 1, "),
            (1, ""),
        )
    ]
    assert not (run / "iteration-02").exists()
    main(["--resume_from", str(run)])  # all that is left, whatever stage the run began with
    assert re.fullmatch(rf"finished in \d+ s: {re.escape(str(run))}", capsys.readouterr().out.splitlines()[-1])
    assert_same_run(run, finished)
    main(["--resume_from", str(run), "--stage", "generate", "--iterations", "3"])
    assert "2 of 3 iterations done, left: rank, tokenize and train of iteration 3;" in capsys.readouterr().out


@pytest.mark.slow
def test_an_interrupted_stage_is_not_the_input_of_the_next(finished, tmp_path, capsys):
    run = shutil.copytree(finished, tmp_path / "run", symlinks=True)
    stored = json.loads((run / "args.json").read_text())
    (run / "args.json").write_text(json.dumps(stored | {"output_dir": str(run)}))
    reseal(run)
    folder = run / "iteration-02"
    (run / "checkpoint-000002").unlink()
    for name in ("policy", "pairs"):
        shutil.rmtree(folder / name)
    for name, stage, following in (("rewards", "rank", "tokenize"), ("dialogues", "generate", "rank")):
        lines = (folder / f"{name}.jsonl").read_text().splitlines(keepends=True)
        (folder / f"{name}.jsonl").write_text("".join(lines[:7]))
        with pytest.raises(SystemExit) as stop:
            main(["--resume_from", str(run), "--stage", following])
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert stop.value.code == 2 and f"has 7 of 10 rows; run --stage {stage} again" in error


def test_a_stage_reads_only_the_dialogues_it_needs(flags, talk_data, tmp_path, monkeypatch):
    read = []

    def load(data_dir, split, verify):
        read.append(split)
        return load_dialogues(data_dir, split, verify)

    monkeypatch.setattr(iterative_refuel, "load_dialogues", load)
    flags = [*flags, "--output_dir", str(tmp_path / "run")]
    for stage, splits in (
        ("generate", ["train", "validation"]),
        ("rank", []),
        ("tokenize", []),
        ("generate", ["train"]),
    ):
        read.clear()
        main([*flags, "--stage", stage])
        assert read == splits


@pytest.mark.slow
def test_the_last_policy_of_a_finished_run_is_uploaded(finished, tmp_path, monkeypatch, capsys):
    sent = []
    monkeypatch.setattr(iterated, "upload", lambda *given: sent.append(given))
    monkeypatch.setenv("HF_TOKEN", "hf_of_nobody")
    stored = json.loads((finished / "args.json").read_text())
    run = shutil.copytree(finished, tmp_path / "run", symlinks=True)
    (run / "args.json").write_text(json.dumps(stored | {"output_dir": str(run), "push_to_hub": "somebody/talk"}))
    reseal(run)
    main(["--resume_from", str(run), "--iterations", "3", "--stage", "generate"])
    assert not sent
    main(["--resume_from", str(run), "--iterations", "2"])
    assert sent == [(last_checkpoint(run / "iteration-02" / "policy"), "somebody/talk")]
    assert "uploaded" in capsys.readouterr().out


def assert_same_run(run: Path, other: Path) -> None:
    for t in (1, 2):
        for name in ("dialogues.jsonl", "rewards.jsonl", "evaluation.jsonl", "evaluation.json", "pairs/report.json"):
            assert (run / f"iteration-0{t}" / name).read_bytes() == (other / f"iteration-0{t}" / name).read_bytes(), (
                name
            )
        ours, theirs = (last_checkpoint(where / f"iteration-0{t}" / "policy") for where in (run, other))
        assert weights(ours) == weights(theirs)
    assert (run / "results.json").read_bytes() == (other / "results.json").read_bytes()


@pytest.mark.slow
def test_killed_while_it_trains_it_ends_the_same(finished, flags, tmp_path):
    run = tmp_path / "run"
    flags = [*flags, "--output_dir", str(run), "--save_interval", "1"]
    run_killed(run, "iteration-01/training/**/checkpoint-000001", -1, "lightrlhf.iterative_refuel", *flags)
    assert not (run / "iteration-02").exists()
    main(flags)
    assert_same_run(run, finished)


@pytest.mark.thorough
def test_two_ranks_do_what_one_does(flags, tmp_path):
    """Only training is of several processes; half the batch on each of two is the same batch."""
    runs = []
    for devices, size in (("1", "4"), ("2", "2")):
        given = dict(zip(flags[::2], flags[1::2])) | {"--mini_batch_size": size, "--micro_batch_size": size}
        given |= {"--devices": devices, "--output_dir": str(tmp_path / devices), "--iterations": "1"}
        given |= {"--validation_percentage": "0", "--max_steps": "2"}  # 8 of 10 pairs: no batch has an odd row
        runs.append(Path(main([word for pair in given.items() for word in pair])) / "iteration-01")
    assert (runs[0] / "rewards.jsonl").read_bytes() == (runs[1] / "rewards.jsonl").read_bytes()
    one, two = (load_file(last_checkpoint(run / "policy") / "model.safetensors") for run in runs)
    assert all(torch.allclose(one[name], two[name], atol=1e-5) for name in one)


@pytest.mark.slow
def test_a_policy_that_came_to_say_the_same_each_time_ends_the_run(finished, flags, tmp_path, capsys, monkeypatch):
    def alike_later(args, row, scores):
        return "the same reply twice" if row["index"] >= 10 else make_pair(args, row, scores)

    monkeypatch.setattr(dialogue_pairs, "make_pair", alike_later)
    run = tmp_path / "run"
    for _ in range(2):  # the same command again says the same again
        main([*flags, "--output_dir", str(run)])
        told = capsys.readouterr().out
        assert "no pair to train on: 10 the same reply twice; iteration 1 is the last" in told
        assert "\nfinished in " in told
    assert weights(last_checkpoint(run)) == weights(last_checkpoint(finished / "iteration-01" / "policy"))
    monkeypatch.setattr(dialogue_pairs, "make_pair", lambda *_: "the same reply twice")  # from the start: a mistake
    with pytest.raises(SystemExit):
        main([*flags, "--output_dir", str(tmp_path / "other")])


@pytest.mark.slow
def test_a_half_written_line_is_written_again(finished, tmp_path):
    run = shutil.copytree(finished, tmp_path / "run", symlinks=True)
    for name in ("dialogues.jsonl", "rewards.jsonl"):
        path = run / "iteration-02" / name
        path.write_bytes(path.read_bytes()[:-40])
    for name in ("policy", "pairs"):
        shutil.rmtree(run / "iteration-02" / name)
    (run / "checkpoint-000002").unlink()
    (run / "iteration-02" / "evaluation.json").unlink()
    stored = json.loads((run / "args.json").read_text())
    (run / "args.json").write_text(json.dumps(stored | {"output_dir": str(run)}))
    reseal(run)
    main(["--resume_from", str(run)])
    assert_same_run(run, finished)


@pytest.mark.slow
@pytest.mark.parametrize("prefix", ["dataset", "policy"])
def test_the_baselines_are_two_flags(flags, talk_data, tmp_path, prefix):
    """Last turn only: both sides end with the turn that learns; from the data's dialogue, its tokens come before."""
    run = Path(main([*flags, "--iterations", "1", "--turn", "last", "--prefix", prefix, "--output_dir", str(tmp_path)]))
    known = {tuple(row["input_ids"].tolist()) for row in load_split(talk_data, "dialogue", "train")}
    for row in read_jsonl(run / "iteration-01" / "dialogues.jsonl"):
        assert row["turn"] == row["horizon"] == 2 and len(row["first"]["turn_spans"]) == 3
        start = row["first"]["turn_spans"][2][0]
        of_data = any(ids[:start] == tuple(row["first"]["input_ids"][:start]) for ids in known)
        assert of_data == (prefix == "dataset")


def test_no_valid_reward_is_one_line(flags, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        main([*flags, "--output_dir", str(tmp_path), "--reward_function", "helpers.rewards:always_nan"])
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert stop.value.code == 2 and "10 without a valid reward" in error


@pytest.mark.slow
def test_given_objects_do_what_flags_do_and_are_required_to_resume(finished, flags, talk_data, tmp_path):
    given = {name[2:]: value for name, value in zip(flags[::2], flags[1::2])}
    words = [w for n, v in given.items() if n not in ("user_function", "reward_function") for w in (f"--{n}", v)]
    args = parse(IterativeRefuelArgs, [*words, "--output_dir", str(tmp_path / "run")])
    objects = {"user": ScriptedUser(echo, "echo"), "reward": vowels}
    seen = []

    def stop_after_one(iteration, metrics):
        seen.append((iteration, metrics))
        raise StopTraining

    run = iterative_refuel.train(args, **objects, on_step=stop_after_one)
    assert not (run / "iteration-02").exists() and seen[0][0] == 1 and "val/score_turn_3" in seen[0][1]
    assert "vowels" in json.loads((run / "args.json").read_text())["given"]["reward"]
    with error_naming(UsageError, "user", "resume"):
        iterative_refuel.train(args, reward=vowels)
    iterative_refuel.train(args, **objects)
    assert_same_run(run, finished)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["--reward.kl_coef", "0.1"], "--init_kl_coeff"),
        (["--print_sample_output_freq", "5"], "evaluation"),
        (["--num_nodes", "2"], "--devices"),
        (["--base_url", "http://localhost:1/v1"], "--user_model"),
        (["--validation_percentage", "0.5"], "[0, 0.5)"),
    ],
)
def test_bad_flags_and_refuels_own_are_refused_in_one_line(flags, tmp_path, capsys, wrong, message):
    with pytest.raises(SystemExit) as stop:
        main([*flags, "--output_dir", str(tmp_path / "run"), *wrong])
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert stop.value.code == 2 and wrong[0] in error and message in error
    assert not (tmp_path / "run").exists()
