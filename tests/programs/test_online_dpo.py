"""Online preference learning: its stages leave their files, a kill changes nothing, its flags mean what they say."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from helpers import CPU, last_checkpoint, listing, run_killed, run_program, weights
from helpers.errors import error_naming, refused
from helpers.rewards import vowels
from helpers.tiny_runs import experiment_of
from safetensors.torch import load_file

from lightrlhf import online_dpo
from lightrlhf.cli.errors import StopTraining, UsageError
from lightrlhf.cli.parser import parse
from lightrlhf.data.splits import load_prompts, load_split
from lightrlhf.evaluate import main as evaluate
from lightrlhf.online_dpo import OnlineDPOArgs, main
from lightrlhf.plot import main as plot
from lightrlhf.rm import main as rm
from lightrlhf.storage.jsonl import read_jsonl
from lightrlhf.training.iterated import Iteration

SIZES = ["--iterations", "2", "--prompts_per_iteration", "8", "--num_generations", "4", "--max_new_tokens", "6"]
SIZES += ["--eval_prompts", "6", "--mini_batch_size", "4", "--micro_batch_size", "4", "--learning_rate", "1e-3"]
SIZES += ["--lr_warmup_steps", "0", "--seed", "20261128"]  # a thousand of it exceed 32 bits


@pytest.fixture
def flags(cafe_data, sft_dir):
    models = ["--sft_experiment_dir", sft_dir, "--reward_function", "helpers.rewards:vowels"]
    return ["--data_dir", str(cafe_data), *models, *SIZES, *CPU]


@pytest.fixture(scope="module")
def finished(cafe_data, sft_dir, tmp_path_factory):
    models = ["--sft_experiment_dir", sft_dir, "--reward_function", "helpers.rewards:vowels"]
    logs = tmp_path_factory.mktemp("online")
    return Path(main(["--data_dir", str(cafe_data), *models, *SIZES, *CPU, "--log_dir", str(logs)]))


def test_every_iteration_keeps_its_files_and_fresh_prompts(finished, cafe_data):
    prompts = [read_jsonl(finished / f"iteration-0{t}" / "prompts.jsonl") for t in (1, 2)]
    known = {tuple(row["input_ids"].tolist()) for row in load_prompts(cafe_data, "train")}
    shards = [{tuple(row["prompt_ids"]) for row in rows} for rows in prompts]
    assert shards[0] | shards[1] <= known and not shards[0] & shards[1] and [len(rows) for rows in prompts] == [8, 8]
    for t in (1, 2):
        folder = finished / f"iteration-0{t}"
        responses, rewards = read_jsonl(folder / "responses.jsonl"), read_jsonl(folder / "rewards.jsonl")
        assert [row["responses"] for row in responses] == [row["responses"] for row in rewards]
        assert rewards[0]["rewards"] == vowels(None, rewards[0]["responses"])
        pairs = load_split(folder / "pairs", "preference", "train")
        best, worst = max(rewards[0]["rewards"]), min(rewards[0]["rewards"])
        assert pairs[0]["columns"]["margin"] == best - worst
        assert not (folder / "training").exists()
    results = json.loads((finished / "results.json").read_text())
    assert [row["iteration"] for row in results] == [0, 1, 2]
    assert [row["reward_queries"] for row in results] == [0, 32, 64]
    assert results[0]["kl"] == pytest.approx(0.0, abs=1e-4) and results[0]["win_rate"] == 0.5
    assert abs(results[1]["kl"]) > 1e-3
    assert {"reward", "gold", "mean_length", "truncated_ratio", "pairs", "gold_win_rate"} <= results[2].keys()
    assert (finished / "curves.png").stat().st_size > 10_000


def test_it_starts_each_time_from_the_last_policy_and_is_held_at_the_first(finished, sft_dir):
    first, second = (json.loads((finished / f"iteration-0{t}/policy/args.json").read_text()) for t in (1, 2))
    initial = str(last_checkpoint(sft_dir))
    assert first["sft_experiment_dir"] == first["ref_model"] == second["ref_model"] == initial
    assert second["sft_experiment_dir"] == str(last_checkpoint(finished / "iteration-01" / "policy"))
    answered = [json.loads((finished / f"iteration-0{t}/responses.args.json").read_text()) for t in (1, 2)]
    assert [told["model_name"] for told in answered] == [initial, second["sft_experiment_dir"]]
    assert answered[0]["seed"] != answered[1]["seed"] and first["seed"] != second["seed"]


def test_the_experiment_dir_is_all_the_next_stage_needs(finished, cafe_data):
    assert weights(last_checkpoint(finished)) == weights(last_checkpoint(finished / "iteration-02" / "policy"))
    small = ["--num_samples", "2", "--max_new_tokens", "4", "--accelerator", "cpu"]
    (row,) = evaluate(["--experiment_dir", str(finished), *small])
    assert row["model"] == "rlhf-online-dpo" and "kl" in row
    plot(["--experiment_dir", str(finished)])


STOPS = [  # each start is killed when this is there
    "iteration-01/responses.args.json",
    "iteration-01/pairs/args.json",
    "iteration-01/training/**/checkpoint-000001",
    "iteration-02/prompts.jsonl",
    "iteration-02/training/**/metrics.jsonl",
]


@pytest.mark.slow
def test_killed_at_any_stage_it_ends_the_same(finished, flags, tmp_path):
    """Each start is a process of its own, killed by SIGKILL; the last one ends by itself."""
    flags, resume = [*flags, "--log_dir", str(tmp_path), "--save_interval", "1"], []
    for stop in STOPS:
        run_killed(tmp_path, f"*/*/*/*/{stop}", -1, "lightrlhf.online_dpo", *flags, *resume)
        run = experiment_of(tmp_path)
        resume = ["--resume_from", str(run)]
    run_program("lightrlhf.online_dpo", *flags, *resume)
    for t in (1, 2):
        for name in ("responses.jsonl", "rewards.jsonl", "evaluation.jsonl", "evaluation.json"):
            assert (run / f"iteration-0{t}" / name).read_bytes() == (finished / f"iteration-0{t}" / name).read_bytes()
        ours, theirs = (last_checkpoint(where / f"iteration-0{t}" / "policy") for where in (run, finished))
        assert weights(ours) == weights(theirs)
    assert (run / "results.json").read_bytes() == (finished / "results.json").read_bytes()


@pytest.mark.slow
def test_two_ranks_do_what_one_does(finished, flags, tmp_path):
    """Stages of several devices are programs of their own; half the batch on each of two is the same batch."""
    given = dict(zip(flags[::2], flags[1::2])) | {"--devices": "2", "--mini_batch_size": "2", "--micro_batch_size": "2"}
    given |= {"--iterations": "1", "--prompts_per_iteration": "8", "--log_dir": str(tmp_path)}
    run_program("lightrlhf.online_dpo", *(word for pair in given.items() for word in pair))
    run = experiment_of(tmp_path)
    ours, theirs = (folder / "iteration-01" for folder in (run, finished))
    assert (ours / "rewards.jsonl").read_bytes() == (theirs / "rewards.jsonl").read_bytes()
    one, other = (load_file(last_checkpoint(folder / "policy") / "model.safetensors") for folder in (ours, theirs))
    assert all(torch.allclose(one[name], other[name], atol=1e-5) for name in one)


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["model.safetensors", "resume.pt", "manifest.json"])
def test_a_damaged_policy_of_the_last_iteration_is_trained_again(damage, flags, finished, tmp_path, capsys):
    run = Path(main([*flags, "--log_dir", str(tmp_path)]))
    newest = last_checkpoint(run / "iteration-02" / "policy")
    (newest / damage).unlink()
    again = Path(main(["--resume_from", str(run)]))
    assert f"note: {newest} is damaged (" in capsys.readouterr().out
    for folder in (again, finished):
        assert (folder / "checkpoint-000002").resolve() == last_checkpoint(folder / "iteration-02" / "policy").resolve()
    assert weights(again / "checkpoint-000002") == weights(finished / "checkpoint-000002")
    assert [*run.rglob("damaged-*")]


@pytest.mark.slow
def test_a_finished_run_is_not_done_again(finished):
    before = {name: (finished / name).stat().st_mtime_ns for name in listing(finished) if "iteration" in name}
    main(["--resume_from", str(finished)])
    assert before == {name: (finished / name).stat().st_mtime_ns for name in listing(finished) if "iteration" in name}


@pytest.mark.slow
def test_stop_strings_and_end_tokens_reach_the_responses_and_stay_in_the_pairs(flags, tmp_path, tokenizer):
    ends = ["--eos_ids", "20", "30", "--stop_strings", "e", "a"]
    run = Path(main([*flags, "--log_dir", str(tmp_path), "--iterations", "1", *ends]))
    rows = read_jsonl(run / "iteration-01" / "rewards.jsonl")
    stopped = [
        ids
        for row in rows
        for ids, text, cut in zip(row["response_ids"], row["responses"], row["truncated"])
        if not cut and (ids[-1] in (20, 30) or text[-1] in "ea")
    ]
    assert stopped and not any(tokenizer.eos_token_id in ids for ids in stopped)
    sampled = {(*row["prompt_ids"], *ids) for row in rows for ids in row["response_ids"]}
    for pair in load_split(run / "iteration-01" / "pairs", "preference", "train"):
        assert {tuple(pair[f"{side}_input_ids"].tolist()) for side in ("chosen", "rejected")} <= sampled


@pytest.mark.slow
def test_a_loss_without_a_reference_gets_none_and_labelled_responses_are_refused(flags, tmp_path, capsys):
    run = Path(main([*flags, "--log_dir", str(tmp_path), "--iterations", "1", "--loss_type", "cpo"]))
    stored = json.loads((run / "iteration-01/policy/args.json").read_text())
    assert stored["loss_type"] == "cpo" and stored["ref_model"] is None
    for loss_type in ("kto", "bco"):
        assert f"--loss_type {loss_type}" in refused(capsys, main, *flags, "--loss_type", loss_type)


@pytest.mark.slow
def test_offline_is_the_same_loop_with_the_initial_policy_responding(flags, tmp_path, sft_dir):
    run = Path(main([*flags, "--log_dir", str(tmp_path), "--responder", "initial", "--reference", "moving"]))
    told = json.loads((run / "iteration-02/responses.args.json").read_text())
    assert told["model_name"] == str(last_checkpoint(sft_dir))
    stored = json.loads((run / "iteration-02/policy/args.json").read_text())
    assert stored["ref_model"] is None
    assert stored["sft_experiment_dir"] == str(last_checkpoint(run / "iteration-01" / "policy"))


@pytest.mark.slow
def test_raft_learns_the_best_response_of_each_prompt(flags, tmp_path):
    run = Path(main([*flags, "--log_dir", str(tmp_path), "--training_step", "raft", "--iterations", "1"]))
    rows = load_split(run / "iteration-01" / "pairs", "finetune", "train")
    for row, line in zip(rows, read_jsonl(run / "iteration-01" / "rewards.jsonl")):
        best = line["rewards"].index(max(line["rewards"]))
        assert row["input_ids"].tolist() == line["prompt_ids"] + line["response_ids"][best]
        response = row["targets"][row["prompt_len"] :]
        assert torch.equal(response, row["input_ids"][row["prompt_len"] :])
        assert (row["targets"][: row["prompt_len"]] == -100).all()
    assert json.loads((run / "iteration-01/policy/args.json").read_text())["program"] == "sft"


@pytest.mark.slow
def test_raft_leaves_out_prompts_without_a_best_response_and_counts_them(flags, tmp_path):
    flags[flags.index("helpers.rewards:vowels")] = "helpers.rewards:many_vowels"  # 1 or 0
    some = ["--iterations", "1", "--seed", "42"]  # whose responses have both kinds of prompts
    run = Path(main([*flags, "--log_dir", str(tmp_path), "--training_step", "raft", *some]))
    lines = read_jsonl(run / "iteration-01" / "rewards.jsonl")
    unequal = [line for line in lines if len(set(line["rewards"])) > 1]
    assert 0 < len(unequal) < len(lines)
    rows = load_split(run / "iteration-01" / "pairs", "finetune", "train")
    assert [row["input_ids"][: row["prompt_len"]].tolist() for row in rows] == [line["prompt_ids"] for line in unequal]
    counts = json.loads((run / "iteration-01" / "pairs" / "report.json").read_text())["raft"]
    assert counts == {"demonstrations": len(unequal), "equal scores": len(lines) - len(unequal)}


@pytest.mark.slow
def test_a_model_that_compares_scores_it_and_adapters_learn_from_it(flags, tmp_path, cafe_data, sft_dir):
    data = ["--data_dir", str(cafe_data), "--log_dir", str(tmp_path), *CPU]
    pair_dir = rm([*data, "--sft_experiment_dir", sft_dir, "--loss_type", "pair", "--max_steps", "1"])
    place = flags.index("--reward_function")
    flags[place : place + 2] = ["--rm_experiment_dir", pair_dir]
    options = ["--choose_type", "max_random", "--finetune_mode", "lora"]
    run = Path(main([*flags, "--log_dir", str(tmp_path), *options]))
    results = json.loads((run / "results.json").read_text())
    assert results[0]["reward"] == pytest.approx(0.5) and results[2]["kl"] != results[1]["kl"] != 0
    rewards = [reward for row in read_jsonl(run / "iteration-01" / "rewards.jsonl") for reward in row["rewards"]]
    assert sum(rewards) == pytest.approx(len(rewards) / 2)


@pytest.mark.parametrize(
    "wrong, message",
    [
        (["--prompts_per_iteration", "1000"], "need 2000 prompts, but"),
        (["--responder", "nobody"], "--responder (last, initial or a model) nobody does not exist"),
        (["--reward_weights", "2,3"], "--reward_weights 2.0 3.0: give 1, one for each reward"),
        (["--num_nodes", "2"], "--num_nodes 2"),
        (["--sft_experiment_dir", "null", "--model_name", "tiny"], "--model_name tiny"),
        (["--eval_interval", "5"], "--eval_interval"),
        (["--do_sample", "False"], "--do_sample: responses are samples"),
    ],
)
def test_bad_flags_are_one_line(wrong, message, flags, tmp_path, capsys):
    given = dict(zip(flags[::2], flags[1::2])) | dict(zip(wrong[::2], wrong[1::2])) | {"--log_dir": str(tmp_path)}
    with pytest.raises(SystemExit) as stopped:
        main([word for pair in given.items() for word in pair])
    assert stopped.value.code == 2 and message in capsys.readouterr().err
    assert not list(tmp_path.rglob("args.json"))


def test_a_refused_run_leaves_no_experiment_dir(flags, tmp_path, sft_dir, capsys):
    given = dict(zip(flags[::2], flags[1::2])) | {"--rm_experiment_dir": sft_dir, "--log_dir": str(tmp_path)}
    del given["--reward_function"]
    with pytest.raises(SystemExit) as stop:
        main([word for pair in given.items() for word in pair])
    assert stop.value.code == 2 and "holds a language model" in capsys.readouterr().err
    assert not list(tmp_path.rglob("args.json"))


@pytest.mark.slow
def test_on_step_adds_metrics_and_a_stopped_run_says_what_is_left(flags, tmp_path, capsys):
    args = parse(OnlineDPOArgs, [*flags, "--log_dir", str(tmp_path), "--iterations", "3"])

    def stop_after_two(iteration, metrics):
        if iteration == 2:
            raise StopTraining
        return {"own/iteration": iteration}

    run = online_dpo.train(args, on_step=stop_after_two)
    told = capsys.readouterr().out.splitlines()[-1]
    assert told == f"2 of 3 iterations done, left: iteration 3; --resume_from {run} does them"
    rows = read_jsonl(run / "metrics.jsonl")  # the first one is of the start
    assert [row.get("own/iteration") for row in rows] == [None, 1, None]


def test_a_run_with_other_flags_is_not_resumed(finished, capsys):
    assert "beta was 0.1 there" in refused(capsys, main, "--resume_from", finished, "--beta", "0.3")


def test_rewards_are_standardised_in_training_as_the_flag_says(flags, cafe_data, tmp_path, monkeypatch):
    stages = []
    monkeypatch.setattr(online_dpo.annotate, "run", lambda stage, reward: stages.append(stage))
    (tmp_path / "responses.jsonl").touch()
    args = parse(OnlineDPOArgs, [*flags, "--normalize_rewards", "False"])
    online_dpo.score_and_choose(Iteration(args, 1, tmp_path, "", "", str(cafe_data), None), None)
    assert not stages[0].normalize_rewards


@pytest.mark.slow
def test_given_objects_do_what_flags_do_and_are_required_to_resume(finished, flags, cafe_data, tmp_path):
    given = dict(zip(flags[::2], flags[1::2])) | {"--log_dir": str(tmp_path)}
    del given["--reward_function"]
    args = parse(OnlineDPOArgs, [word for pair in given.items() for word in pair])
    seen = []

    def stop_after_one(iteration, metrics):
        seen.append((iteration, metrics))
        raise StopTraining

    prompts = {split: load_prompts(cafe_data, split) for split in ("train", "validation")}
    run = online_dpo.train(args, prompts=prompts, reward=vowels, on_step=stop_after_one)
    assert seen[0][0] == 1 and "val/win_rate" in seen[0][1] and not (run / "iteration-02").exists()
    ours, theirs = (folder / "iteration-01" for folder in (run, finished))
    assert (ours / "rewards.jsonl").read_bytes() == (theirs / "rewards.jsonl").read_bytes()
    assert weights(last_checkpoint(ours / "policy")) == weights(last_checkpoint(theirs / "policy"))
    with error_naming(UsageError, "reward", "resume"):
        online_dpo.train(dataclasses.replace(args, resume_from=str(run)), prompts=prompts, reward=max)


@pytest.mark.slow
def test_a_failure_of_a_rank_ends_the_program_with_its_line_and_status(flags, tmp_path):
    given = dict(zip(flags[::2], flags[1::2])) | {"--devices": "2", "--mini_batch_size": "2", "--micro_batch_size": "2"}
    given |= {"--iterations": "1", "--log_dir": str(tmp_path), "--learning_rate": "1e30", "--epochs": "3"}
    ended = run_program("lightrlhf.online_dpo", *(word for pair in given.items() for word in pair), check=False)
    errors = ended.stderr
    assert ended.returncode == 1 and "Traceback" not in errors
    assert "error: policy gradient norm is nan" in errors or "error: loss is nan" in errors
    assert "error: lightrlhf.dpo stopped on rank" in errors
