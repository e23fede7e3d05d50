"""Procedural tasks as prompts and demonstrations: splits, options, what a scorer reads back, and refusals."""

import json
import sys

import pytest
from helpers.data import gpt2_like
from helpers.errors import error_naming
from helpers.flat import stored_rows

from datasets_prep.reasoning_gym import items as items_module
from datasets_prep.reasoning_gym import prepare_data
from datasets_prep.reasoning_gym.items import Request, items_of, make, scorable, tasks_of
from lightrlhf.cli.errors import RunFailure
from lightrlhf.data.entries import entry_text, read_entry
from lightrlhf.data.splits import SPLITS

pytest.importorskip("reasoning_gym")
from reasoning_gym.factory import create_dataset, get_score_answer_fn

NO_ANSWER = ("boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour")
KEEP_TUPLES = ("arc_agi", "rearc")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    gpt2_like().save_pretrained(folder)
    return str(folder)


def prepared(folder, tokenizer, *words: str):
    """Files of a preparation by stage and split."""
    prepare_data.main([f"--destination_dir={folder}", f"--tokenizer_name={tokenizer}", "--num_proc=2", *words])
    return {path.stem: stored_rows(path) for path in folder.glob("*_t*.pt")} | {
        path.stem: stored_rows(path) for path in folder.glob("*_validation.pt")
    }


def questions(rows) -> set[str]:
    return {json.loads(row["columns"]["entry"])["question"] for row in rows}


SMALL = ("--tasks", "chain_sum", "count_bits", "graph_color", "--num_samples=30", "--num_held_out=6")


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("config") / "sizes.yaml"
    path.write_text("chain_sum: {max_terms: 2, max_digits: 1}\ncount_bits: {max_n: 40}\n")
    return str(path)


@pytest.fixture(scope="module")
def small(tmp_path_factory, tokenizer, config):
    folder = tmp_path_factory.mktemp("small") / "data"
    return folder, prepared(folder, tokenizer, *SMALL, f"--task_config={config}")


def test_files_have_prompts_with_what_the_scorer_reads_and_demonstrations_that_it_pays(small):
    folder, files = small
    spell = gpt2_like().decode
    for row in files["prompts_train"]:
        columns = row["columns"]
        assert set(columns) == {"task", "entry", "answer"}
        entry = read_entry(columns["entry"])
        assert columns["answer"] == entry["answer"]
        prompt = spell(row["input_ids"])
        assert entry["question"] in prompt and prepare_data.INSTRUCTIONS["tags"] in prompt
        if columns["task"] != "graph_color":
            assert get_score_answer_fn(columns["task"])(columns["answer"], entry) == 1
    assert {row["columns"]["task"] for row in files["prompts_train"]} == {"chain_sum", "count_bits", "graph_color"}
    demonstrations = [spell(row["input_ids"][row["prompt_len"] :]) for row in files["finetune_train"]]
    assert all(text.startswith(" <answer>") and text.endswith("</answer><|endoftext|>") for text in demonstrations)
    assert len(demonstrations) == sum(row["columns"]["answer"] is not None for row in files["prompts_train"])
    assert json.loads((folder / "args.json").read_text())["reward"] == "lightrlhf.rewards.verifiers:reasoning_gym"


def test_options_bound_the_items_and_repeated_questions_are_counted(small, capsys):
    folder, files = small
    entries = [read_entry(row["columns"]["entry"]) for split in SPLITS for row in files[f"prompts_{split}"]]
    sums = [entry["metadata"] for entry in entries if entry["metadata"]["source_dataset"] == "chain_sum"]
    assert {item["num_terms"] for item in sums} == {2} and {item["num_digits"] for item in sums} == {1}
    bits = [entry["metadata"]["number"] for entry in entries if entry["metadata"]["source_dataset"] == "count_bits"]
    assert max(bits) <= 40 and len(set(bits)) == len(bits)  # 40 questions are not enough for 42 rows
    dropped = json.loads((folder / "report.json").read_text())["dropped"]
    assert [row["reason"] for row in dropped] == ["same_question"] and dropped[0]["rows"] > 100


@pytest.mark.slow
def test_no_held_out_question_is_in_train_for_any_seed_size_and_stage(small, tmp_path, tokenizer):
    _, files = small
    config = tmp_path / "sizes.json"
    config.write_text('{"chain_sum": {"max_terms": 2, "max_digits": 1}}')
    words = ("--tasks", "chain_sum", "--num_samples=80", "--num_held_out=15", f"--task_config={config}")
    other = prepared(tmp_path / "other", tokenizer, *words, "--seed=43", "--stage=finetune")
    again = prepared(tmp_path / "other", tokenizer, *words, "--seed=43", "--stage=prompts")
    assert len(other["finetune_train"]) == len(again["prompts_train"]) == 80
    for split in SPLITS:
        here = questions(files[f"prompts_{split}"]) | questions(again[f"prompts_{split}"])
        for later in SPLITS[SPLITS.index(split) + 1 :]:
            assert not here & (questions(files[f"prompts_{later}"]) | questions(again[f"prompts_{later}"]))


def test_neighbouring_seeds_share_no_items():
    """Those of reasoning-gym itself share all items but one."""
    ours, theirs = (make(Request("chain_sum", {"min_digits": 4}, seed, {"train": 20}, {}, True)) for seed in (42, 43))
    assert {item.question for item in ours.kept}.isdisjoint(item.question for item in theirs.kept)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_files_whatever_the_hash_seed(tmp_path, tokenizer, monkeypatch):
    words = ("--tasks", "isomorphic_strings", "polynomial_multiplication", "gcd", "--num_samples=4", "--num_held_out=1")
    hashes = []
    for number in ("1", "2"):
        monkeypatch.setenv("PYTHONHASHSEED", number)
        prepared(tmp_path / number, tokenizer, *words, f"--num_proc={number}")
        report = json.loads((tmp_path / number / "report.json").read_text())
        hashes.append({name: file["sha256"] for name, file in report["files"].items()})
    assert hashes[0] == hashes[1]


@pytest.mark.slow
def test_answers_alone_have_one_line_and_the_instruction_may_be_empty(tmp_path, tokenizer, capsys):
    words = ("--answer_format=alone", "--num_samples=2", "--num_held_out=1")
    files = prepared(tmp_path / "alone", tokenizer, "--tasks", "gcd", "--instruction=", *words)
    row = files["finetune_train"][0]
    text = gpt2_like().decode(row["input_ids"])
    assert "final answer.\n\nAssistant:" in text and text.removesuffix("<|endoftext|>")[-1].isdigit()
    assert refused(tmp_path, tokenizer, capsys, "--tasks", "rotate_matrix", *words)[1].startswith(
        "error: --answer_format alone: rotate_matrix item "
    )


def refused(folder, tokenizer, capsys, *words: str) -> tuple[int, str]:
    """Exit status and error line."""
    with pytest.raises(SystemExit) as stop:
        prepared(folder / "refused", tokenizer, *words)
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert not (folder / "refused").exists()
    return stop.value.code, line


@pytest.mark.parametrize(
    "words, said",
    [
        (["chain_sun"], "--tasks chain_sun is no task of reasoning-gym that can be prepared; did you mean chain_sum?"),
        (["composite"], "--tasks composite is no task of reasoning-gym that can be prepared; it mixes tasks"),
        (["gcd", "gcd"], "--tasks gcd is given twice"),
        (["gcd", "--stage=preference"], "--stage preference: reasoning tasks have the stages finetune and prompts"),
    ],
)
def test_a_wrong_task_or_stage_is_one_line(words, said, tmp_path, tokenizer, capsys):
    status, line = refused(tmp_path, tokenizer, capsys, "--tasks", *words)
    assert status == 2 and said in line


@pytest.mark.parametrize(
    "text, said",
    [
        ("{gcd: {max_valu: 3}}", "gcd has no option max_valu; it has max_numbers, max_value, min_numbers, min_value"),
        ("{gcd: {max_value: 0}}", 'gcd refuses {"max_value": 0}: max_value must be > min_value'),
        ("{gcd: {max_value: many}}", 'gcd refuses {"max_value": "many"}: '),
        ("{gcd: {size: 3}}", "gcd's size is set by --seed, --num_samples and --num_held_out"),
        ("{gcd: 3}", "gcd needs options such as {max_terms: 3}, not 3"),
        ("{lcm: {}}", "lcm is not among --tasks gcd"),
        ("[gcd]", "must hold options by task"),
        ("{gcd", "cannot be read"),
        (None, "cannot be read"),
    ],
)
def test_a_wrong_option_is_one_line_that_names_the_file(text, said, tmp_path, tokenizer, capsys):
    path = tmp_path / "options.yaml"
    if text is not None:
        path.write_text(text)
    status, line = refused(tmp_path, tokenizer, capsys, "--tasks", "gcd", f"--task_config={path}")
    assert status == 2 and line.startswith(f"error: --task_config {path}") and said in line


def test_the_missing_package_is_one_line(tmp_path, tokenizer, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    status, line = refused(tmp_path, tokenizer, capsys, "--tasks", "gcd")
    assert status == 2 and "needs the package reasoning-gym" in line and "'.[verify]'" in line


def test_a_task_that_raises_is_one_line_that_names_it():
    broken = Request("gcd", {"max_value": 0}, 1, {"train": 1}, {}, True)
    with error_naming(RunFailure, "--tasks gcd", "max_value must be > min_value"):
        items_of([broken], 1)


def test_a_split_without_items_left_is_filled_as_far_as_it_goes(capsys):
    made = make(Request("count_bits", {"max_n": 8}, 1, {"train": 20, "test": 20}, {"test": 0.5}, True))
    assert made.count("train") + made.count("test") == 8 and made.draws >= items_module.PATIENCE
    assert made.repeated and not made.unscored


def test_entries_keep_tuples_only_where_the_scorer_needs_them():
    for task in ("chain_sum", *KEEP_TUPLES):
        entry = create_dataset(task, seed=1, size=1)[0]
        score = get_score_answer_fn(task)
        text = scorable(entry, score)
        assert score(entry["answer"], read_entry(text)) == 1
        assert (text == entry_text(entry)) == (task == "chain_sum")
    assert read_entry(entry_text({"a": (1, [2, (3,)]), "b": {"tuple": [1], "c": 2}}, keep_tuples=True)) == {
        "a": (1, [2, (3,)]),
        "b": {"tuple": [1], "c": 2},
    }


@pytest.mark.nightly
def test_every_task_of_the_package_can_be_written(tmp_path, tokenizer):
    """All 105 tasks; five state no answer, so they have prompts alone."""
    words = ("--num_samples=2", "--test_percentage=0", "--validation_percentage=0", "--max_length=60000")
    files = prepared(tmp_path / "all", tokenizer, "--tasks", "all", *words)
    tasks = [row["columns"]["task"] for row in files["prompts_train"]]
    assert sorted(tasks) == sorted(tasks_of(["all"]) * 2) and len(set(tasks)) >= 105
    unanswered = {row["columns"]["task"] for row in files["prompts_train"] if row["columns"]["answer"] is None}
    assert unanswered == set(NO_ANSWER)
    assert len(files["finetune_train"]) == len(tasks) - 2 * len(NO_ANSWER)
    for row in files["prompts_train"]:
        if row["columns"]["answer"] is not None:
            score = get_score_answer_fn(row["columns"]["task"])
            assert score(row["columns"]["answer"].strip(), read_entry(row["columns"]["entry"])) == 1
