"""lightrlhf.evaluate --harness: the format of the files, the ids of their texts, and wrong arguments in one line.

The harnesses themselves read these files in tests/real_harness.
"""

import json
import shlex
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from helpers import errors, last_checkpoint
from helpers.data import chatml_like, gpt2_like, llama3_like, sentencepiece_like
from helpers.harnesses import command_of, lines_of, save_held_out, save_lines, write_for

from lightrlhf import evaluate
from lightrlhf.data.splits import load_split
from lightrlhf.evaluation import pairs
from lightrlhf.evaluation.texts import split_text, target_spans, text_of
from lightrlhf.models.tokenizer import load_tokenizer

TOKENIZERS = {"ends_in_a_line_break": chatml_like, "begins_with_bos": llama3_like, "plain": gpt2_like}


@pytest.fixture(scope="module", params=TOKENIZERS)
def held_out(request, tmp_path_factory):
    return save_held_out(tmp_path_factory.mktemp(request.param), TOKENIZERS[request.param]())


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    return save_held_out(tmp_path_factory.mktemp("chat"), chatml_like())


def refused(capsys, *argv: object) -> str:
    """The one line of a call that must fail."""
    return errors.refused(capsys, evaluate.main, *argv, "--accelerator", "cpu")


# ------------------------------------------------------------------------------------------------------------ texts
def test_texts_are_read_back_as_the_ids_of_the_data(held_out, tmp_path):
    data, model = held_out
    write_for("lm_eval", tmp_path, data, model)
    tokenizer = load_tokenizer(data)

    def read(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    for row, document in zip(load_split(data, "finetune", "test"), lines_of(tmp_path / "lm_eval/perplexity.jsonl")):
        response, *space = document["responses"]
        assert read(document["prompt"] + response) == row["input_ids"].tolist()
        assert document["prompt"] == document["prompt"].rstrip()
        start = len(read(document["prompt"] + "".join(space)))
        assert start == row["prompt_len"] and start + document["num_tokens"] == len(row["input_ids"])
    for row, document in zip(load_split(data, "preference", "test"), lines_of(tmp_path / "lm_eval/pairs.jsonl")):
        ids = [read(document["prompt"] + response) for response in document["responses"]]
        assert ids == [row[f"{side}_input_ids"].tolist() for side in ("chosen", "rejected")]
    answered = [row for row in load_split(data, "prompts", "test") if row["columns"]["answer"].strip()]
    for row, document in zip(answered, lines_of(tmp_path / "lm_eval/answers.jsonl"), strict=True):
        assert read(document["prompt"]) == row["input_ids"].tolist()
        assert document["answer"] == row["columns"]["answer"].strip()


def test_ids_that_no_text_has_are_left_out(tmp_path):
    tokenizer = gpt2_like()
    ids = tokenizer("Print the sum.")["input_ids"]
    assert text_of(tokenizer, ids) == "Print the sum."
    letters = [tokenizer.convert_tokens_to_ids(letter) for letter in "the"]
    assert text_of(tokenizer, letters) is None  # it has a token of its own
    assert split_text(tokenizer, ids, 1) is not None and split_text(tokenizer, ids, 0) is None
    llama = sentencepiece_like(tmp_path)
    assert split_text(llama, llama("ANSWER: print")["input_ids"], 3) is not None


def test_each_answer_of_a_dialogue_is_a_span():
    assert [*target_spans({"targets": [5, -100, 7, 8, -100, -100, 9]})] == [(2, 4), (6, 7)]
    assert [*target_spans({"targets": [-100, 4]})] == [(1, 2)]


# ------------------------------------------------------------------------------------------------------------ tasks
def test_the_task_of_lm_eval(chat, tmp_path, capsys):
    data, model = chat
    row, folder = write_for("lm_eval", tmp_path, data, model, "--num_samples", 4)
    printed = capsys.readouterr().out
    words = shlex.split(command_of(printed))
    assert words[:5] == ["lm_eval", "run", "--model", "hf", "--model_args"]
    assert words[5] == f"pretrained={model},tokenizer={data}/tokenizer,dtype=float32,add_bos_token=False"
    tasks = words[words.index("--tasks") + 1].split(",")
    for task in tasks:
        text = (folder / f"{task}.yaml").read_text(encoding="utf-8")
        settings = yaml.safe_load(text.replace("!function", ""))
        file = Path(settings["dataset_kwargs"]["data_files"]["test"])
        assert settings["task"] == task and file.is_absolute() and len(lines_of(file)) == 4
    assert f"perplexity: {row['perplexity']:.6f}" in printed
    (evaluated,) = evaluate.main(
        ["--experiment_dir", str(model), "--data_dir", str(data), "--num_samples", "4", "--max_new_tokens", "2"]
    )
    assert row["perplexity"] == pytest.approx(evaluated["perplexity"])


def test_the_scores_of_lm_eval_subtract_the_white_space(tmp_path, chat):
    write_for("lm_eval", tmp_path, *chat)
    scores: dict = {}
    exec((tmp_path / "lm_eval" / "lightrlhf_scores.py").read_text(encoding="utf-8"), scores)
    assert scores["likelihood"]({"num_tokens": 3}, [(-5.0, False), (-1.5, True)]) == {"perplexity": (-3.5, 3)}
    assert scores["likelihood"]({"num_tokens": 3}, [(-5.0, False)]) == {"perplexity": (-5.0, 3)}
    assert scores["exact_match"]({"answer": "72"}, [" 72\n"]) == {"exact_match": 1.0}
    assert scores["exact_match"]({"answer": "72"}, ["72 clips"]) == {"exact_match": 0.0}


@pytest.mark.slow
def test_an_experiment_gets_its_files_beside_its_results(sft_dir, tmp_path, capsys):
    run = shutil.copytree(sft_dir, tmp_path / "sft")
    (row,) = evaluate.main(["--experiment_dir", str(run), "--harness", "lm_eval", "--accelerator", "cpu"])
    assert row.keys() == {"model", "perplexity", "pair_accuracy"}  # the café has no answers
    words = shlex.split(command_of(capsys.readouterr().out))
    assert words[words.index("--include_path") + 1] == str(run / "eval" / "lm_eval")
    assert f"pretrained={last_checkpoint(run)}," in words[5]
    assert not (run / "eval" / "test.json").exists()


def test_the_task_of_inspect(chat, tmp_path, capsys):
    row, folder = write_for("inspect", tmp_path, *chat)
    command = command_of(capsys.readouterr().out)
    assert command.startswith(f"cd {folder} && inspect eval lightrlhf_answers.py ")
    assert f"model_path={chat[1]}" in command and row["exact_match"] == 0.5
    compile((folder / "lightrlhf_answers.py").read_text(encoding="utf-8"), "task", "exec")
    assert json.loads((folder / "model.json").read_text())["do_sample"] is False


# ---------------------------------------------------------------------------------------------------------- answers
def test_the_file_of_alpaca_eval(chat, tmp_path):
    asked = [{"instruction": "Print the sum.", "dataset": "own", "output": "5", "generator": "another"}]
    (tmp_path / "alpaca_eval.json").write_text(json.dumps(asked))
    _, folder = write_for("alpaca_eval", tmp_path, *chat, "--harness_questions", tmp_path / "alpaca_eval.json")
    (row,) = json.loads((folder / "outputs.json").read_text(encoding="utf-8"))
    assert (row["instruction"], row["dataset"], row["generator"]) == ("Print the sum.", "own", "model")
    assert row["output"] and row["output"] != "5"


def test_the_second_turn_of_mt_bench_follows_the_first(chat, tmp_path):
    turns = ["Print the sum.", "Anything else?"]
    asked = save_lines(tmp_path / "question.jsonl", {"question_id": 81, "category": "math", "turns": turns})
    _, folder = write_for("mt_bench", tmp_path, *chat, "--harness_questions", asked, "--do_sample", False)
    assert lines_of(folder / "data" / "mt_bench" / "question.jsonl") == lines_of(asked)
    (row,) = lines_of(folder / "data" / "mt_bench" / "model_answer" / "model.jsonl")
    first, second = row["choices"][0]["turns"]
    assert (row["question_id"], row["model_id"]) == (81, "model")
    alone = save_lines(tmp_path / "alone.jsonl", {"question_id": 1, "turns": turns[1:]})
    _, folder = write_for("mt_bench", tmp_path, *chat, "--harness_questions", alone, "--do_sample", False)
    (row,) = lines_of(folder / "data" / "mt_bench" / "model_answer" / "model.jsonl")
    assert row["choices"][0]["turns"] != [second]


def test_the_file_of_arena_hard(chat, tmp_path):
    asked = save_lines(tmp_path / "question.jsonl", {"uid": "a1", "category": "hard_prompt", "prompt": "Print."})
    _, folder = write_for("arena_hard", tmp_path, *chat, "--harness_questions", asked)
    (row,) = lines_of(folder / "data" / "arena-hard-v2.0" / "model_answer" / "model.jsonl")
    assert (row["uid"], row["model"], row["messages"][0]["content"]) == ("a1", "model", "Print.")
    assert row["messages"][1]["content"]["answer"]


def test_the_scores_of_rewardbench(rm_dir, tmp_path):
    row, folder = write_for("rewardbench", tmp_path, None, rm_dir)
    (file,) = folder.glob("*_outputs.jsonl")
    scores = lines_of(file)
    run = shutil.copytree(rm_dir, tmp_path / "rm")
    (evaluated,) = evaluate.main(["--experiment_dir", str(run), "--accelerator", "cpu"])
    assert row["accuracy"] == evaluated["accuracy"]
    assert {name: row[f"accuracy, {name}"] for name in evaluated["by_group"]} == evaluated["by_group"]
    records = sorted((r["chosen"], r["rejected"]) for r in lines_of(run / "eval" / "test.jsonl"))
    for (chosen, rejected), one in zip(
        records, sorted(scores, key=lambda r: (r["scores_chosen"], r["scores_rejected"]))
    ):
        assert one["scores_chosen"] == pytest.approx(chosen, abs=1e-5)
        assert one["scores_rejected"] == pytest.approx(rejected, abs=1e-5)
        assert one["results"] == (chosen > rejected) and one["text_chosen"].endswith("<eos>")


def test_a_pair_has_its_own_scores_whatever_its_length(monkeypatch):
    rows = [{f"{side}_input_ids": [5] * n for side, n in (("chosen", m), ("rejected", m + 1))} for m in (9, 3, 6)]

    def lengths(model, rows, pad_id):
        return tuple(torch.tensor([len(r[f"{side}_input_ids"]) for r in rows]) for side in ("chosen", "rejected"))

    monkeypatch.setattr(pairs, "pair_scores", lengths)
    assert pairs.score_pairs(None, rows, 0, 2).tolist() == [[9, 3, 6], [10, 4, 7]]


# ------------------------------------------------------------------------------------------------------- wrong flags
def test_wrong_flags_are_one_line(chat, tmp_path, capsys):
    data, model = chat
    here = ["--experiment_dir", model, "--data_dir", data, "--harness_dir", tmp_path / "out"]
    assert "--harness" in refused(capsys, *here, "--harness", "helm")
    assert "--harness_dir" in refused(capsys, *here)
    assert "--harness_questions" in refused(capsys, *here, "--harness", "mt_bench")
    missing = ["--harness_questions", tmp_path / "none.jsonl"]
    assert "none.jsonl does not exist" in refused(capsys, *here, "--harness", "mt_bench", *missing)
    (tmp_path / "asked.jsonl").write_text("{}")
    asked = ["--harness_questions", tmp_path / "asked.jsonl"]
    assert "--harness_questions" in refused(capsys, *here, "--harness", "lm_eval", *asked)
    assert "--stop_strings" in refused(capsys, *here, "--harness", "lm_eval", "--stop_strings", "x")
    assert "holds a language model" in refused(capsys, *here, "--harness", "rewardbench")
    assert "name a --harness_dir" in refused(capsys, *here[:4], "--harness", "lm_eval")
    twice = ["--experiment_dir", model, model, *here[2:]]
    assert "is for one --model_name" in refused(capsys, *twice, "--harness", "lm_eval")
    assert not (tmp_path / "out").exists()


def test_a_reward_model_is_for_rewardbench(rm_dir, tmp_path, capsys):
    here = ["--experiment_dir", rm_dir, "--harness_dir", tmp_path / "out"]
    assert "holds a reward model" in refused(capsys, *here, "--harness", "lm_eval")


def test_data_without_answers_is_named(sft_dir, tmp_path, capsys):
    here = ["--experiment_dir", sft_dir, "--harness_dir", tmp_path / "out"]
    assert "has no prompts with ground_truth, answer, solution" in refused(capsys, *here, "--harness", "inspect")


@pytest.mark.parametrize(
    "harness, row, said",
    [
        ("alpaca_eval", {"prompt": "Print."}, "row 1 has under 'instruction' no value, not a text"),
        ("mt_bench", {"question_id": 1, "turns": "Print."}, "under 'turns' 'Print.', not a list of texts"),
        ("mt_bench", {"question_id": None, "turns": ["Print."]}, "under 'question_id' None"),
        ("arena_hard", {"uid": "a", "prompt": ""}, "under 'prompt' '', not a text"),
    ],
)
def test_questions_of_another_benchmark_are_named(harness, row, said, chat, tmp_path, capsys):
    asked = save_lines(tmp_path / "asked.jsonl", row)
    here = ["--experiment_dir", chat[1], "--data_dir", chat[0], "--harness_dir", tmp_path / "out"]
    line = refused(capsys, *here, "--harness", harness, "--harness_questions", asked)
    assert str(asked) in line and said in line


@pytest.mark.parametrize("text, said", [("[]", "has no rows"), ('{"a": 1}', "holds no list"), ("[", "cannot be read")])
def test_a_list_that_is_none_is_named(text, said, chat, tmp_path, capsys):
    (tmp_path / "asked.json").write_text(text)
    here = ["--experiment_dir", chat[1], "--data_dir", chat[0], "--harness_dir", tmp_path / "out"]
    assert said in refused(capsys, *here, "--harness", "alpaca_eval", "--harness_questions", tmp_path / "asked.json")


def test_turns_without_a_chat_template_are_named(tmp_path, capsys):
    data, model = save_held_out(tmp_path, gpt2_like())
    asked = save_lines(tmp_path / "asked.jsonl", {"question_id": 1, "turns": ["Print.", "Again."]})
    here = ["--experiment_dir", model, "--data_dir", data, "--harness_dir", tmp_path / "out"]
    line = refused(capsys, *here, "--harness", "mt_bench", "--harness_questions", asked)
    assert "question 1 has 2 turns, but the tokenizer has no chat template" in line
