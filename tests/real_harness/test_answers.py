"""AlpacaEval, MT-Bench and RewardBench read the files written for them; no judge but one of the test is asked.

Arena-Hard is no package, and was not run.
"""

import json

import pytest
from helpers.data import chatml_like
from helpers.harnesses import lines_of, save_held_out, save_lines, write_for
from helpers.real_harness import ask_harness

pytestmark = pytest.mark.slow
REQUESTS = ("Could I get a large oat latte?", "Print the sum.", "Anything else, please?", "72 clips?")


@pytest.fixture(scope="module")
def held_out(tmp_path_factory):
    return save_held_out(tmp_path_factory.mktemp("answers"), chatml_like())


def test_alpaca_eval_judges_the_file(held_out, tmp_path):
    asked = save_lines(tmp_path / "questions.jsonl", *({"instruction": text, "dataset": "own"} for text in REQUESTS))
    _, folder = write_for("alpaca_eval", tmp_path, *held_out, "--harness_questions", asked)
    rows = json.loads((folder / "outputs.json").read_text(encoding="utf-8"))
    lengths = [len(row["output"]) for row in rows]
    middle = sorted(lengths)[1] + 1  # between the lengths, so that some responses win
    reference = [{**row, "output": "x" * middle, "generator": "reference"} for row in rows]
    (tmp_path / "reference.json").write_text(json.dumps(reference), encoding="utf-8")
    files = {"outputs": str(folder / "outputs.json"), "reference": str(tmp_path / "reference.json")}
    found = ask_harness("alpaca_eval", tmp_path, **files, folder=str(tmp_path))
    wins = [1.0 if length > middle else 0.5 if length == middle else 0.0 for length in lengths]
    assert found["outputs"] == [row["output"] for row in rows]
    assert found["win_rates"] == {"model": pytest.approx(100 * sum(wins) / len(wins))}
    assert 0 < sum(wins) < len(wins)


def test_fastchat_scores_both_turns(held_out, tmp_path):
    questions = [
        {"question_id": 81 + i, "category": "roleplay", "turns": [text, "Why?"]} for i, text in enumerate(REQUESTS)
    ]
    asked = save_lines(tmp_path / "question.jsonl", *questions)
    _, folder = write_for("mt_bench", tmp_path, *held_out, "--harness_questions", asked)
    said = {
        row["question_id"]: row["choices"][0]["turns"]
        for row in lines_of(folder / "data/mt_bench/model_answer/model.jsonl")
    }
    read = ask_harness("mt_bench", tmp_path, folder=str(folder / "data" / "mt_bench"))
    for question, (model, number, score, seen) in zip(questions, read, strict=True):
        first, second = said[question["question_id"]]
        assert (model, number) == ("model", question["question_id"])
        assert seen == [question["turns"][0], first, "Why?", second] and score == len(second)


def test_rewardbench_scores_the_pairs_of_the_split(rm_dir, tmp_path):
    row, folder = write_for("rewardbench", tmp_path, None, rm_dir)
    (file,) = folder.glob("*_outputs.jsonl")
    found = ask_harness("rewardbench", tmp_path, file=str(file))["subsets"]
    assert len(found) > 1
    assert {f"accuracy, {name}": value for name, value in found.items()} == {
        name: value for name, value in row.items() if name.startswith("accuracy, ")
    }


def test_rewardbench_scores_sections_of_its_own_pairs(rm_dir, tmp_path):
    texts = [{"prompt": text, "chosen": f"Of course! {text}", "rejected": "No."} for text in REQUESTS]
    subsets = ("alpacaeval-easy", "refusals-offensive")
    pairs = save_lines(tmp_path / "pairs.jsonl", *({**row, "subset": s} for s in subsets for row in texts))
    row, folder = write_for("rewardbench", tmp_path, None, rm_dir, "--harness_questions", pairs)
    (file,) = folder.glob("*_outputs.jsonl")
    sections = ask_harness("rewardbench", tmp_path, file=str(file))["sections"]
    assert (sections["Chat"], sections["Safety"]) == tuple(row[f"accuracy, {name}"] for name in subsets)
