"""lightrlhf.evaluate: results against computations by hand, files, errors."""

import json
import math
import shutil
from pathlib import Path

import helpers.rewards
import pytest
import torch
from helpers import errors, last_checkpoint, reseal
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from datasets_prep.cafe.judge import judge_answer
from lightrlhf import evaluate
from lightrlhf.data.splits import load_split
from lightrlhf.evaluation import answers
from lightrlhf.maths.ops import wilson_interval, win_rate
from lightrlhf.storage.results import write_results
from lightrlhf.storage.run_dir import pretrained_model

TOOLS = ["--tools", "calculator"]
BY_TURN = ["--by_turn", "True"]
SMALL = ["--max_new_tokens", "8", "--accelerator", "cpu"]


@pytest.fixture
def sft(sft_dir, tmp_path_factory) -> str:
    """A copy of the SFT experiment, to write results into."""
    return shutil.copytree(sft_dir, tmp_path_factory.mktemp("evaluated") / "sft")


@pytest.fixture
def reward_model(rm_dir, tmp_path_factory) -> str:
    return shutil.copytree(rm_dir, tmp_path_factory.mktemp("evaluated") / "rm")


def call(*argv: object) -> list[dict]:
    return evaluate.main([*map(str, argv), *SMALL])


def records(folder: str | Path, split: str = "test") -> list[dict]:
    last = max(Path(folder, "eval").glob(f"{split}*.jsonl"), key=lambda path: path.stat().st_mtime_ns)
    lines = last.read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def plain_folder(experiment_dir: str, folder: Path, **files: str) -> Path:
    """A checkpoint as a Hugging Face folder without manifest, whose files a test may change."""
    shutil.copytree(last_checkpoint(experiment_dir), folder)
    (folder / "manifest.json").unlink()
    (folder / "resume.pt").unlink()
    for name, text in files.items():
        (folder / f"{name}.json").write_text(text, encoding="utf-8")
    return folder


def refused(capsys, *argv: object) -> str:
    """The one line of a call that must fail."""
    return errors.refused(capsys, evaluate.main, *argv, *SMALL)


# ------------------------------------------------------------------------------------------------ language models
def test_perplexity_is_that_of_the_response_tokens(sft, cafe_data):
    model = AutoModelForCausalLM.from_pretrained(last_checkpoint(sft)).double().eval()
    total, count = 0.0, 0
    for row in load_split(cafe_data, "finetune", "test"):
        ids = row["input_ids"].long()[None]
        with torch.no_grad():
            logprobs = model(ids).logits[0].log_softmax(-1)
        for t in range(row["prompt_len"], ids.shape[1]):
            total -= float(logprobs[t - 1, ids[0, t]])
            count += 1
    (row,) = call("--experiment_dir", sft)
    assert row["perplexity"] == pytest.approx(math.exp(total / count), rel=1e-4)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.mark.slow
def test_results_of_other_settings_are_another_file_and_all_settings_are_named(sft, capsys):
    folder = Path(sft) / "eval"
    call("--experiment_dir", sft)
    call("--experiment_dir", sft)
    call("--experiment_dir", sft, "--split", "validation")  # has a file of its own
    assert "wrote" not in capsys.readouterr().out
    first = contents(folder)
    (row,) = call("--experiment_dir", sft, "--num_samples", 2, "--seed", 7, "--temperature", 0.5)
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("wrote"))
    for change in ("--num_samples null, now 2", "--seed 42, now 7", "--temperature 1.0, now 0.5"):
        assert change in line
    (path,) = folder.glob("test-*[0-9].json")
    assert path.name in line and json.loads(path.read_text()) == row
    assert len(records(sft, path.stem)) == 2
    flags = json.loads(path.with_suffix(".args.json").read_text())
    assert flags["num_samples"] == 2 and flags["checkpoint"].startswith("checkpoint-")
    assert first.items() <= contents(folder).items()
    call("--experiment_dir", sft, "--num_samples", 2)
    assert (folder / "test-num_samples=2.json").is_file()
    call("--experiment_dir", sft, "--num_samples", 2)
    assert len(list(folder.glob("test*.jsonl"))) == 3 and first.items() <= contents(folder).items()


def test_other_results_of_the_same_settings_are_another_file(sft, capsys, monkeypatch):
    folder = Path(sft) / "eval"
    flags = ["--experiment_dir", sft, "--reward_function", "helpers.rewards:length", "--num_samples", 2]
    call(*flags)
    first = contents(folder)
    monkeypatch.setattr(helpers.rewards, "length", helpers.rewards.constant)  # a function that was edited meanwhile
    call(*flags)
    assert "had the same settings" in capsys.readouterr().out
    assert first.items() <= contents(folder).items() and (folder / "test-2.json").is_file()


def test_undefined_results_are_null(tmp_path):
    row, records = {"kl": math.nan, "interval": (0.5, math.inf)}, [{"gold": {"score": -math.inf}, "text": "é"}]
    for _ in range(2):
        assert write_results(tmp_path, "test", row, records, {}) == "test"
    found = json.loads((tmp_path / "eval" / "test.json").read_text(), parse_constant=pytest.fail)
    assert found == {"kl": None, "interval": [0.5, None]}
    (line,) = (tmp_path / "eval" / "test.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(line, parse_constant=pytest.fail) == {"gold": {"score": None}, "text": "é"}


def test_names_of_settings_fit_in_names_of_files(tmp_path):
    flags = {"a": 1, "b": "/some/where", "c": [1], "d": True, "e": "x" * 99, "model_name": ["run"]}
    write_results(tmp_path, "test", {"n": 1}, [], flags)
    other = {"a": None, "b": "else/where", "c": [1, 2], "d": False, "e": "y", "model_name": ["run", "two"]}
    assert write_results(tmp_path, "test", {"n": 2}, [], other) == "test-a=none-b-c-and-3-more"
    assert write_results(tmp_path, "test", {"n": 3}, [], other) == "test-a=none-b-c-and-3-more-2"
    assert write_results(tmp_path, "test", {"n": 2}, [], other) == "test-a=none-b-c-and-3-more"
    assert write_results(tmp_path, "test", {"n": 4}, [], flags | {"d": False, "e": "y"}) == "test-d=false-e=y"
    (tmp_path / "eval" / "test.json").unlink()  # as a user asks for the plain name again
    assert write_results(tmp_path, "test", {"n": 5}, [], other) == "test"


def test_the_records_hold_what_the_table_averages(sft, cafe_data):
    (row,) = call("--experiment_dir", sft)
    said = records(sft)
    assert json.loads((Path(sft) / "eval" / "test.json").read_text()) == row
    assert len(said) == len(load_split(cafe_data, "prompts", "test"))
    assert all({"prompt", "response", "gold"} <= record.keys() for record in said)
    assert row["gold"] == pytest.approx(sum(r["gold"]["score"] for r in said) / len(said))
    assert row["polite"] == pytest.approx(sum(r["gold"]["polite"] for r in said) / len(said))
    assert row["truncated_ratio"] + row["eos_ratio"] == pytest.approx(1)
    assert 1 <= row["mean_length"] <= 8


def test_the_gold_of_a_record_is_the_judges_of_its_own_text(sft):
    call("--experiment_dir", sft)
    for record in records(sft):
        assert record["gold"] == judge_answer(record["prompt"], record["response"])._asdict()


def test_a_model_draws_with_itself_and_says_the_same_again(sft, tmp_path):
    twin = shutil.copytree(sft, tmp_path / "twin")
    first, second = call("--experiment_dir", sft, twin)
    assert [r["response"] for r in records(sft)] == [r["response"] for r in records(twin)]
    assert "win_rate" not in first
    assert second["win_rate"] == 0.5
    assert second["win_rate_interval"] == wilson_interval(0.5 * len(records(sft)), len(records(sft)))


@pytest.mark.slow
def test_what_is_said_follows_the_seed_and_not_the_batch_size(sft):
    def said(*flags: object) -> list[str]:
        call("--experiment_dir", sft, *flags)
        return [r["response"] for r in records(sft)]

    assert said("--rollout_mini_batch_size", 64) == said("--rollout_mini_batch_size", 3)
    assert said("--seed", 1) != said("--seed", 2)
    assert said("--do_sample", False, "--seed", 1) == said("--do_sample", False, "--seed", 2)


@pytest.mark.slow
def test_kl_is_zero_to_itself_and_not_to_another_model(sft, base_model, tmp_path):
    (row,) = call("--experiment_dir", sft)
    assert "kl" not in row
    assert call("--experiment_dir", sft, "--reference_dir", sft)[0]["kl"] == pytest.approx(0, abs=1e-5)
    to_base = call("--experiment_dir", sft, "--reference_dir", base_model)[0]["kl"]
    assert abs(to_base) > 1e-3
    aligned = shutil.copytree(sft, tmp_path / "aligned")  # as after PPO: args.json has the start of the run
    stored = json.loads((aligned / "args.json").read_text()) | {"sft_experiment_dir": str(base_model)}
    (aligned / "args.json").write_text(json.dumps(stored))
    reseal(aligned)
    assert call("--experiment_dir", aligned)[0]["kl"] == pytest.approx(to_base)


def test_rewards_are_standardised_by_the_reward_models_own_statistics(sft, reward_model, tmp_path):
    def reward(mean: float, std: float) -> tuple[float, list[float]]:
        folder = plain_folder(
            reward_model, tmp_path / f"{mean}{std}", reward_statistics=json.dumps({"mean": mean, "std": std})
        )
        (row,) = call("--experiment_dir", sft, "--rm_experiment_dir", folder)
        return row["reward"], [r["reward"] for r in records(sft)]

    mean, each = reward(0.0, 1.0)
    assert mean == pytest.approx(sum(each) / len(each))
    assert len(set(each)) > 1
    assert reward(1.0, 2.0)[1] == pytest.approx([(r - 1.0) / 2.0 for r in each])


def test_rouge_is_one_when_the_answers_are_the_demonstrations(sft, cafe_data, tokenizer, monkeypatch):
    from lightrlhf.data.batch import Rollout, response_batch

    assert 0 <= call("--experiment_dir", sft, "--rouge", "True")[0]["rougeL"] < 1
    rows = load_split(cafe_data, "finetune", "test")
    batch = response_batch(
        [row["input_ids"][: row["prompt_len"]] for row in rows],
        [row["input_ids"][row["prompt_len"] :] for row in rows],
        pad_id=0,
    )
    zeros = torch.zeros(batch.action_mask.shape)
    same = Rollout(
        input_ids=batch.input_ids,
        attention_mask=batch.attention_mask,
        action_mask=batch.action_mask,
        prompt_len=torch.tensor([row["prompt_len"] for row in rows]),
        truncated=torch.zeros(len(rows), dtype=torch.bool),
        logprobs=zeros,
        ref_logprobs=zeros,
        tokenizer=tokenizer,
    )
    monkeypatch.setattr(answers, "respond_in_parts", lambda *args: [(rows, same)])
    found = answers.rouge(None, None, rows, tokenizer, 0, 8)
    assert [found[name] for name in ("rouge1", "rouge2", "rougeL")] == [1.0, 1.0, 1.0]


def test_use_pretrained_is_row_zero_and_not_what_wins_are_counted_against(sft, base_model, tmp_path):
    twin = shutil.copytree(sft, tmp_path / "twin")
    rows = call("--experiment_dir", sft, twin, "--use_pretrained", "True")
    assert [row["model"] for row in rows] == [base_model.name, "rlhf-supervised-finetuning", rows[1]["model"]]
    assert ["win_rate" in row for row in rows] == [False, False, True]
    assert rows[2]["win_rate"] == 0.5
    assert not (base_model / "eval").exists()


def test_the_pretrained_model_is_found_through_the_chain(rm_dir, base_model):
    assert pretrained_model(rm_dir) == str(base_model)


def test_num_samples_and_split(sft, cafe_data):
    call("--experiment_dir", sft, "--num_samples", 3, "--split", "validation")
    wanted = load_split(cafe_data, "prompts", "validation")[:3]
    assert len(records(sft, "validation")) == len(wanted)


def test_a_hugging_face_folder_is_evaluated_and_left_alone(base_model, cafe_data):
    before = sorted(base_model.rglob("*"))
    (row,) = call("--experiment_dir", base_model, "--data_dir", cafe_data)
    assert row["perplexity"] > 1
    assert sorted(base_model.rglob("*")) == before


# -------------------------------------------------------------------------------------------------- reward models
def test_accuracy_loss_and_margin_by_hand(reward_model, cafe_data):
    model = AutoModelForSequenceClassification.from_pretrained(last_checkpoint(reward_model)).eval()

    def score(ids: torch.Tensor) -> float:
        with torch.no_grad():
            return float(model(ids.long()[None]).logits)

    rows = load_split(cafe_data, "preference", "test")
    scores = [(score(row["chosen_input_ids"]), score(row["rejected_input_ids"])) for row in rows]
    (row,) = call("--experiment_dir", reward_model)
    right = sum(good > bad for good, bad in scores)
    assert row["accuracy"] == pytest.approx(right / len(scores))
    assert row["accuracy_interval"] == pytest.approx(wilson_interval(right, len(scores)))
    assert row["margin"] == pytest.approx(sum(good - bad for good, bad in scores) / len(scores), abs=1e-4)
    losses = [math.log1p(math.exp(bad - good)) for good, bad in scores]
    assert row["loss"] == pytest.approx(sum(losses) / len(losses), abs=1e-4)
    assert len(records(reward_model)) == len(rows)


def test_accuracy_by_group(reward_model):
    (row,) = call("--experiment_dir", reward_model)
    said = records(reward_model)
    assert set(row["by_group"]) == {record["group"] for record in said}
    for group, accuracy in row["by_group"].items():
        members = [r["right"] for r in said if r["group"] == group]
        assert accuracy == pytest.approx(sum(members) / len(members))
    assert sum(len([r for r in said if r["group"] == g]) for g in row["by_group"]) == len(said)


def test_a_reward_model_that_cannot_tell_is_half_right(reward_model, cafe_data, tmp_path):
    folder = plain_folder(reward_model, tmp_path / "blind")
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    model.score.weight.data.zero_()
    model.save_pretrained(folder)
    (row,) = call("--experiment_dir", folder, "--data_dir", cafe_data)
    assert row["accuracy"] == 0.5
    assert row["loss"] == pytest.approx(math.log(2))


def test_the_table_shows_each_model_once_and_intervals_beside_their_value(reward_model, capsys):
    (row,) = call("--experiment_dir", reward_model)
    printed = capsys.readouterr().out
    low, high = row["accuracy_interval"]
    assert f"{row['accuracy']:.3f} [{low:.3f}, {high:.3f}]" in printed
    assert "rlhf-reward-modelling" in printed
    assert all(group in printed for group in row["by_group"])


# -------------------------------------------------------------------------------------------------------- the maths
@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [(8, 10, 0.4902, 0.9433), (0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (300, 400, 0.7054, 0.7899), (0, 0, 0, 1)],
)
def test_wilson_interval_against_published_values(successes, trials, low, high):
    assert wilson_interval(successes, trials) == pytest.approx((low, high), abs=1e-4)


def test_win_rate_splits_ties():
    share, interval = win_rate([(1, 0), (1, 0.5), (0.5, 0.5), (0, 1)])
    assert share == (1 + 1 + 0.5 + 0) / 4
    assert interval == wilson_interval(2.5, 4)


# ----------------------------------------------------------------------------------------------- the other programs
def test_help_names_the_programs_for_environments_and_dialogues(capsys):
    programs = (
        ([], "lightrlhf.evaluate"),
        (["--env", "alfworld"], "evaluate_env"),
        (BY_TURN, "dialogues"),
        (TOOLS, "episodes"),
    )
    for flags, program in programs:
        with pytest.raises(SystemExit):
            evaluate.main([*flags, "--help"])
        text = capsys.readouterr().out
        assert program in text.splitlines()[0]
        assert flags or all(f"evaluate_{name}" in text for name in ("env", "dialogues", "episodes"))


# ------------------------------------------------------------------------------------------------------- bad calls
@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--temperature", "0"], "--do_sample False"),
        (["--data_dir", "nowhere"], "--data_dir nowhere"),
        (["--rm_experiment_dir", "nowhere"], "--rm_experiment_dir nowhere"),
        (["--reference_dir", "nowhere"], "--reference_dir nowhere"),
        (["--split", "dev"], "split"),
        (["--num_sample", "3"], "did you mean --num_samples?"),
        (["--accelerator", "gpu9"], "--accelerator gpu9"),
        (["--mini_batch_size", "8"], "--rollout_mini_batch_size"),
        (["--by_turn", "maybe"], "--by_turn maybe"),
        (["--eval_reps", "2"], "--eval_reps"),
        (["--num_turns", "2"], "--num_turns"),
    ],
)
def test_a_bad_flag_is_one_line(sft, capsys, flags, named):
    with pytest.raises(SystemExit) as stop:
        evaluate.main(["--experiment_dir", str(sft), *SMALL, *flags])
    lines = capsys.readouterr().err.strip().splitlines()
    assert stop.value.code == 2
    assert len(lines) == 1 and named in lines[0], lines


def test_bad_experiment_dirs_are_one_line(sft, reward_model, base_model, cafe_data, tmp_path, capsys):
    assert "model_name" in refused(capsys)
    assert "nowhere" in refused(capsys, "--experiment_dir", "nowhere")
    assert "args.json" in refused(capsys, "--experiment_dir", tmp_path, "--data_dir", cafe_data)
    assert "--data_dir" in refused(capsys, "--experiment_dir", base_model)
    assert "language model, not a reward model" in refused(capsys, "--experiment_dir", sft, "--rm_experiment_dir", sft)
    assert "reward model, not a language model" in refused(
        capsys, "--experiment_dir", sft, "--reference_dir", reward_model
    )


def test_a_start_from_nothing_has_no_pretrained_model(sft, tmp_path, capsys):
    tiny = shutil.copytree(sft, tmp_path / "tiny")
    stored = json.loads((tiny / "args.json").read_text()) | {"model_name": "tiny"}
    (tiny / "args.json").write_text(json.dumps(stored))
    reseal(tiny)
    assert "--use_pretrained" in refused(capsys, "--experiment_dir", tiny, "--use_pretrained", "True")


def test_a_damaged_checkpoint_is_named(sft, tmp_path, capsys):
    broken = shutil.copytree(sft, tmp_path / "broken")
    with (last_checkpoint(broken) / "model.safetensors").open("r+b") as file:
        file.seek(-8, 2)
        file.write(b"damaged!")
    assert "model.safetensors is not what was written" in refused(capsys, "--experiment_dir", broken)


def test_results_that_cannot_be_written_are_one_line(sft, tmp_path, capsys):
    full = shutil.copytree(sft, tmp_path / "full", ignore=shutil.ignore_patterns("eval"))
    (full / "eval").write_text("a file where the folder should be")
    assert "cannot be written" in refused(capsys, "--experiment_dir", full)


def test_by_turn_without_a_value_is_true():
    assert evaluate.program_for(["--by_turn", "--seed", "1"]) == (evaluate.evaluate_dialogues.main, ["--seed", "1"])
    assert evaluate.program_for(["--seed", "1", "--by_turn"]) == (evaluate.evaluate_dialogues.main, ["--seed", "1"])
    assert evaluate.program_for(["--by_turn", "False", "--seed", "1"]) == (None, ["--seed", "1"])
