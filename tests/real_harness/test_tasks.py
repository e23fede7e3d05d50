"""lm-eval and inspect-ai run a checkpoint on the tasks written for them, and find what `lightrlhf.evaluate` finds."""

import json

import pytest
from helpers.data import chatml_like, gpt2_like, llama3_like
from helpers.harnesses import command_of, save_held_out, write_for
from helpers.real_harness import ask_harness, run_command

from lightrlhf import evaluate
from lightrlhf.data.splits import load_split

pytestmark = pytest.mark.slow
TOKENIZERS = {"ends_in_a_line_break": chatml_like, "begins_with_bos": llama3_like, "plain": gpt2_like}


@pytest.fixture(scope="module", params=TOKENIZERS)
def held_out(request, tmp_path_factory):
    return save_held_out(tmp_path_factory.mktemp(request.param), TOKENIZERS[request.param]())


def test_lm_eval_finds_what_evaluate_finds(held_out, tmp_path, capsys):
    data, model = held_out
    row, folder = write_for("lm_eval", tmp_path, data, model)
    run_command("lm_eval", command_of(capsys.readouterr().out), tmp_path)
    (file,) = (folder / "results").rglob("results*.json")
    found = json.loads(file.read_text(encoding="utf-8"))["results"]
    (evaluated,) = evaluate.main(
        ["--experiment_dir", str(model), "--data_dir", str(data), "--max_new_tokens", "2", "--accelerator", "cpu"]
    )
    assert row["perplexity"] == pytest.approx(evaluated["perplexity"], rel=1e-9)
    assert found["lightrlhf_perplexity"]["perplexity,none"] == pytest.approx(row["perplexity"], rel=1e-6)
    assert found["lightrlhf_pairs"]["acc,none"] == row["pair_accuracy"] and 0 < row["pair_accuracy"] < 1
    assert found["lightrlhf_answers"]["exact_match,none"] == row["exact_match"] and 0 < row["exact_match"] < 1


def test_lm_eval_reads_the_ids_of_the_data(held_out, tmp_path):
    data, model = held_out
    _, folder = write_for("lm_eval", tmp_path, data, model)
    paths = {"pretrained": str(model), "tokenizer": str(data / "tokenizer"), "file": str(folder / "pairs.jsonl")}
    read = ask_harness("lm_eval", tmp_path, **paths)
    rows = load_split(data, "preference", "test")
    wanted = [row[f"{side}_input_ids"].tolist() for row in rows for side in ("chosen", "rejected")]
    assert [prompt + response for prompt, response in read] == wanted


def test_inspect_finds_what_evaluate_finds(held_out, tmp_path, capsys):
    data, model = held_out
    row, folder = write_for("inspect", tmp_path, data, model)
    run_command("inspect", f"{command_of(capsys.readouterr().out)} --log-format json", tmp_path)
    (file,) = (folder / "logs").glob("*.json")
    log = json.loads(file.read_text(encoding="utf-8"))
    (score,) = log["results"]["scores"]
    assert score["metrics"]["accuracy"]["value"] == row["exact_match"] and 0 < row["exact_match"] < 1
    prompts = [row for row in load_split(data, "prompts", "test") if row["columns"]["answer"].strip()]
    longest = max(prompt["prompt_len"] for prompt in prompts)  # inspect-ai counts the padding of a batch
    for sample, prompt in zip(log["samples"], prompts, strict=True):
        is_right = prompt["columns"]["answer"] != "tea"  # the others are the model's own greedy responses
        assert sample["scores"]["exact_match"]["value"] == ("C" if is_right else "I")
        assert sample["output"]["usage"]["input_tokens"] == longest
