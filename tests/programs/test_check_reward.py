"""lightrlhf.check_reward: each case it tries, by a function with that fault."""

import json

import pytest
import torch
from helpers.errors import refused
from helpers.flat import stored_rows

from lightrlhf.check_reward import CheckRewardArgs, main, run
from lightrlhf.data.splits import save_split

pytestmark = pytest.mark.usefixtures("light_functions")
FAULTS = {  # function: the cases that are suspicious
    "exact": set(),
    "in_tags": {"right answer"},
    "pays_anything": {"nothing", "random words", "a refusal", "the prompt", "all answers", "another answer"},
    "pays_nothing": {"right answer"},
    "pays_silence": {"nothing"},
    "pays_a_quarter": {"random words", "a refusal", "the prompt"},
    "pays_a_refusal_once": {"a refusal"},
    "pays_echoes": {"the prompt"},
    "contains": {"all answers"},
    "counts": {"right answer", "answer x 100"},
    "any_number": {"another answer"},
    "dies_of_words": {"random words"},
    "raises_at_words": {"random words", "a refusal", "the prompt", "all answers", "answer x 100"},
    "knows_half": {"right answer"},
}


@pytest.fixture
def data(tmp_path, tokenizer):
    folder = tmp_path / "data"
    tokenizer.save_pretrained(folder / "tokenizer")
    texts = ["Guest: a tea, please.\n", "Guest: a coffee!\n", "Guest: two teas.\n"]
    rows = []
    for number in range(12):
        ids = tokenizer(texts[number % 3], add_special_tokens=False)["input_ids"]
        rows.append({"prompt_len": len(ids), "input_ids": torch.tensor(ids), "columns": {"answer": number // 2}})
    save_split(folder, "prompts", "train", rows)
    return folder


def checked(data, *functions: str, **settings):
    paths = [f"answers:{name}" for name in functions]
    return run(CheckRewardArgs(data_dir=str(data), reward_function=paths, **settings))


@pytest.mark.parametrize("function", FAULTS)
def test_each_fault_is_found_and_no_other(data, function, capsys):
    results = checked(data, function)
    assert {row["case"] for row in results if row["suspicious"]} == FAULTS[function]
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("suspicious: ")]
    assert len(lines) == len(FAULTS[function])
    for line in lines:
        assert f"answers:{function}: " in line and "(row " in line


def test_a_hung_call_is_killed_and_counted(data):
    results = {row["case"]: row for row in checked(data, "sleeps_on_silence", num_prompts=1, reward_timeout=0.5)}
    assert results["nothing"]["timeouts"] == 1 and "killed after 0.5 seconds" in results["nothing"]["suspicious"]
    assert not results["right answer"]["suspicious"]


def test_a_row_that_is_not_scored_is_no_failure(data):
    (right, *_) = checked(data, "knows_half")
    assert right["unscored"] == 6 and right["errors"] == 0 and right["mean"] == 1.0
    assert right["example"]["score"] is None


def test_answers_are_put_into_their_format(data):
    assert not any(row["suspicious"] for row in checked(data, "in_tags", answer_format="<a>{}</a>"))


def test_tasks_are_judged_apart(data, tokenizer):
    rows = stored_rows(data / "prompts_train.pt")
    for number, row in enumerate(rows):
        row["columns"]["task"] = "even" if number // 2 % 2 == 0 else "odd"
    save_split(data, "prompts", "train", rows)
    results = checked(data, "knows_half", num_prompts=3)
    assert {row["task"] for row in results if row["suspicious"]} == {"odd"}


def test_the_exit_status_and_the_file_of_results(data, tmp_path, capsys):
    flags = ["--data_dir", str(data), "--output_file", str(tmp_path / "found.json"), "--reward_function"]
    assert main([*flags, "answers:exact"])
    with pytest.raises(SystemExit) as stop:
        main([*flags, "answers:exact", "answers:pays_silence"])
    assert stop.value.code == 1
    found = json.loads((tmp_path / "found.json").read_text())
    assert [row["reward_function"] for row in found if row["suspicious"]] == ["answers:pays_silence"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--reward_function", "answers:nothing"], "cannot be imported"),
        (["--reward_function", "answers:exact", "--answer_format", "x"], "--answer_format x"),
    ],
)
def test_bad_arguments_are_one_line(data, flags, words, capsys):
    assert words in refused(capsys, main, "--data_dir", data, *flags)


@pytest.fixture
def unanswered(data):
    rows = stored_rows(data / "prompts_train.pt")
    save_split(data, "prompts", "train", [row | {"columns": {"unit": 1}} for row in rows])
    return data


def test_cases_that_need_no_answer_are_tried_without_a_column_of_answers(unanswered, capsys):
    results = checked(unanswered, "pays_anything")
    assert {row["case"]: row["mean"] for row in results} == dict.fromkeys(
        ("nothing", "random words", "a refusal", "the prompt"), 1.0
    )
    assert not any(row["suspicious"] for row in results)  # there is no pay of a right answer to compare with
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("skipped")]
    assert all(word in line for word in ("right answer", "all answers", "another answer", "ground_truth"))


def test_a_function_that_needs_the_answer_fails_without_one(unanswered):
    results = checked(unanswered, "exact")
    assert len(results) == 4 and all("fails on 12 of 12" in row["suspicious"] for row in results)


def test_only_tasks_without_answers_are_cut_short(data):
    rows = stored_rows(data / "prompts_train.pt")
    for number, row in enumerate(rows):
        row["columns"] = {"task": "odd"} if number % 2 else row["columns"] | {"task": "even"}
    save_split(data, "prompts", "train", rows)
    cases = [row["task"] for row in checked(data, "pays_nothing")]
    assert cases.count("even") == 8 and cases.count("odd") == 4
