"""lightrlhf.evaluate: rewards by functions, pass@k, files of responses, rankings; results against sums by hand."""

import json
import math
import shutil
from pathlib import Path

import pytest
from helpers import errors, last_checkpoint

from lightrlhf import annotate, evaluate
from lightrlhf.maths.length_control import length_controlled_win_rate
from lightrlhf.maths.ops import share_interval, wilson_interval
from lightrlhf.maths.reward_bench import mean_interval
from lightrlhf.models.loading import find_device
from lightrlhf.rewards.encoding import Sample
from lightrlhf.rewards.functions import as_text
from lightrlhf.rewards.loading import load_scorer
from lightrlhf.storage.jsonl import read_jsonl, write_jsonl

SMALL = ["--max_new_tokens", "8", "--accelerator", "cpu"]


@pytest.fixture
def sft(sft_dir, tmp_path_factory) -> str:
    """A copy of the SFT experiment, to write results into."""
    return shutil.copytree(sft_dir, tmp_path_factory.mktemp("scored") / "sft")


@pytest.fixture
def reward_model(rm_dir, tmp_path_factory) -> str:
    return shutil.copytree(rm_dir, tmp_path_factory.mktemp("scored") / "rm")


def call(*argv: object) -> list[dict]:
    return evaluate.main([*map(str, argv), *SMALL])


def function(name: str) -> list[str]:
    return ["--reward_function", f"helpers.rewards:{name}"]


def written(folder: str | Path, rows: list[dict], name: str = "given.jsonl") -> Path:
    path = Path(folder) / name
    write_jsonl(path, rows)
    return path


def results_of(path: Path, kind: str = "responses") -> tuple[dict, list[dict]]:
    """The results and the records that an evaluation of a file wrote."""
    folder = path.parent / "eval"
    return json.loads((folder / f"{path.stem}_{kind}.json").read_text()), read_jsonl(
        folder / f"{path.stem}_{kind}.jsonl"
    )


def refused(capsys, *argv: object) -> str:
    """The one line of a call that must fail."""
    return errors.refused(capsys, evaluate.main, *argv, *SMALL)


# -------------------------------------------------------------------------------------------------- language models
def test_a_reward_function_scores_each_response(sft):
    (row,) = call("--experiment_dir", sft, *function("vowels"))
    records = read_jsonl(Path(sft) / "eval" / "test.jsonl")
    for record in records:
        text = record["response"]
        assert record["reward"] == sum(letter in "aeiou" for letter in text) + len(text) / 100
    assert row["reward"] == pytest.approx(sum(record["reward"] for record in records) / len(records))
    assert "reward_missing" not in row and "reward_errors" not in row


def test_a_function_beside_a_reward_model_is_weighted_and_shown_by_itself(sft, reward_model):
    (alone,) = call("--experiment_dir", sft, "--rm_experiment_dir", reward_model)
    weights = ["--reward_weights", 2, 0.5]
    (row,) = call("--experiment_dir", sft, "--rm_experiment_dir", reward_model, *function("length"), *weights)
    assert row["reward/reward_model"] == pytest.approx(alone["reward"])
    assert row["reward"] == pytest.approx(2 * alone["reward"] + 0.5 * row["reward/length"])


def test_a_response_without_a_score_is_counted_and_in_no_mean(sft, capsys):
    (row,) = call("--experiment_dir", sft, *function("every_other"), "--num_samples", 5)
    assert (row["reward"], row["reward_missing"], row["reward_errors"]) == (1.0, 2, 2)
    assert "others are counted" in capsys.readouterr().err
    assert [r["reward"] for r in read_jsonl(Path(sft) / "eval" / "test.jsonl")] == [1.0, None, 1.0, None, 1.0]


def test_pass_at_k_of_several_responses_to_each_prompt(sft):
    flags = ["--num_generations", 4, "--pass_k", 1, 2, 4, "--pass_threshold", 3]
    (row,) = call("--experiment_dir", sft, *function("whole_vowels"), *flags, "--num_samples", 5)
    records = read_jsonl(Path(sft) / "eval" / "test.jsonl")
    assert [r["index"] for r in records] == [i for i in range(5) for _ in range(4)]
    assert all(len({r["prompt"] for r in records if r["index"] == i}) == 1 for i in range(5))
    assert len({r["response"] for r in records}) > 5
    right = [sum(r["reward"] >= 3 for r in records if r["index"] == i) for i in range(5)]
    assert [r["passed"] for r in records] == [r["reward"] >= 3 for r in records]
    assert 0 < sum(right) < 20
    chances = [1 - math.comb(4 - c, 2) / 6 for c in right]
    assert row["pass@1"] == pytest.approx(sum(right) / 20)
    assert row["pass@2"] == pytest.approx(sum(chances) / 5)
    assert row["pass@2_interval"] == pytest.approx(
        share_interval(chances, [records[4 * i]["prompt"] for i in range(5)])
    )
    assert row["pass@4"] == sum(c > 0 for c in right) / 5


def test_the_first_response_of_one_is_the_one_without_several(sft):
    """One generation per prompt samples what it sampled before there could be several."""
    call("--experiment_dir", sft, "--num_samples", 4, "--num_generations", 1)
    one = [r["response"] for r in read_jsonl(Path(sft) / "eval" / "test.jsonl")]
    call("--experiment_dir", sft, "--num_samples", 4)
    assert one == [r["response"] for r in read_jsonl(Path(sft) / "eval" / "test.jsonl")]


@pytest.mark.slow
def test_win_rates_of_models_are_plain_and_at_equal_lengths(sft, base_model, cafe_data, tmp_path):
    twin = shutil.copytree(sft, tmp_path / "twin")
    models = ["--experiment_dir", base_model, sft, twin, "--data_dir", cafe_data, "--num_generations", 3]
    base, first, second = call(*models, *function("length"))
    records = read_jsonl(Path(sft) / "eval" / "test.jsonl")
    assert "win_rate" not in base and first == {**second, "model": first["model"]}
    call("--experiment_dir", sft, "--num_generations", 3, *function("length"))
    assert read_jsonl(Path(sft) / "eval" / "test.jsonl") == records
    low, high = first["length_controlled_win_rate_interval"]
    assert 0 <= low <= first["length_controlled_win_rate"] <= high <= 1


# ------------------------------------------------------------------------------------------------------------- files
def test_a_file_of_responses_is_scored_as_it_is(tmp_path, capsys):
    rows = [
        {"prompt": "p", "responses": ["aa bb", "c"], "truncated": [False, True]},
        {"prompt": "q", "response": "aei"},
        {"prompt": "r", "responses": ["x", None]},
    ]
    path = written(tmp_path, rows)
    (row,) = call("--responses_file", path, *function("length"))
    stored, records = results_of(path)
    assert stored == row and row["model"] == "given"
    assert [(r["index"], r["reward"]) for r in records] == [(0, 0.5), (0, 0.1), (1, 0.3), (2, 0.1), (2, None)]
    assert (row["responses"], row["mean_words"], row["truncated_ratio"]) == (4, 5 / 4, 1 / 4)
    assert row["reward"] == pytest.approx(1.0 / 4) and row["reward_missing"] == 1
    assert "given" in capsys.readouterr().out
    (row,) = call("--responses_file", path, *function("length"), "--num_samples", 1)
    assert row["responses"] == 2 and row["reward"] == pytest.approx(0.3)


def test_columns_of_a_file_reach_the_function(tmp_path):
    path = written(
        tmp_path, [{"prompt": "p", "response": "abc", "worth": 2}, {"prompt": "q", "response": "a", "worth": 5}]
    )
    assert call("--responses_file", path, *function("worth"))[0]["reward"] == (6 + 5) / 2


def test_pass_at_k_of_a_file_takes_rows_of_one_index_together(tmp_path):
    """As the records of an evaluation with several generations, and with a threshold that no float32 reaches."""
    flat = [{"prompt": p, "index": i, "response": t} for i, p, t in ((0, "p", "0.7"), (0, "p", "0.6"), (1, "p", "0.1"))]
    path = written(tmp_path, [*flat, {"prompt": "p", "index": 1, "response": "0.2"}])
    flags = ["--pass_k", "1,2", "--pass_threshold", 0.7]
    (row,) = call("--responses_file", path, *function("thousands"), *flags)
    assert (row["pass@1"], row["pass@2"]) == (0.25, 0.5)
    assert row["pass@2_interval"] == pytest.approx(wilson_interval(0.5, 1))  # both rows have the same prompt
    assert [r["passed"] for r in results_of(path)[1]] == [True, False, False, False]


def test_rewards_in_a_file_are_taken_where_no_flag_says_what_scores(tmp_path):
    rows = [
        {"prompt": "p", "responses": ["a", "b"], "rewards": [1.0, None]},
        {"prompt": "p", "responses": [None], "rewards": [1.0]},
        {"prompt": "q", "response": "c", "reward": 0},
    ]
    (row,) = call("--responses_file", written(tmp_path, rows), "--pass_k", 1)
    assert (row["reward"], row["reward_missing"]) == (0.5, 2) and row["pass@1"] == pytest.approx(0.5 / 3)


@pytest.mark.slow
def test_a_response_that_hangs_or_crashes_the_function_is_missing_and_has_not_passed(tmp_path):
    texts = ["fine", "hang", "die", "raise", "none"]
    path = written(tmp_path, [{"prompt": "p", "responses": texts}])
    (row,) = call("--responses_file", path, *function("shaky"), "--reward_timeout", 2, "--pass_k", 1)
    assert (row["reward"], row["reward_missing"], row["pass@1"]) == (1.0, 4, pytest.approx(0.2))
    assert [row[f"reward_{kind}"] for kind in ("timeouts", "crashes", "errors")] == [1, 1, 1]


def test_win_rates_of_files_by_their_rewards(tmp_path):
    """Verdicts on the same prompt are one observation; the reward is the length, which length control sees."""
    prompts = ["p", "q", "r", "r", "s"]
    ours, theirs = ["a a", "a", "a a a", "a a a", "raise"], ["a", "a", "a", "a", "a"]
    one, two = (
        written(tmp_path, [{"prompt": p, "response": t} for p, t in zip(prompts, texts)], f"{name}.jsonl")
        for name, texts in (("theirs", theirs), ("ours", ours))
    )
    first, second = call("--responses_file", one, two, *function("length"))
    assert "win_rate" not in first and second["win_rate"] == (1 + 0.5 + 1 + 1 + 1) / 5
    won, lengths = [1, 0.5, 1, 1, 1], [(2, 1), (1, 1), (3, 1), (3, 1), (1, 1)]
    assert second["win_rate_interval"] == pytest.approx(share_interval(won, prompts))
    rate, interval = length_controlled_win_rate(won, list(zip(*lengths)), [json.dumps(p) for p in prompts], 42)
    assert second["length_controlled_win_rate"] == pytest.approx(rate) != second["win_rate"]
    assert second["length_controlled_win_rate_interval"] == pytest.approx(interval)
    assert results_of(two)[0] == json.loads(json.dumps(second))


def test_a_reward_model_scores_a_file_as_annotate_does(reward_model, tmp_path):
    rows = [{"prompt": "Guest: A tea, please.", "responses": ["Sure, a tea.", "No."], "truncated": [True, False]}]
    path = written(tmp_path, rows)
    call("--responses_file", path, "--rm_experiment_dir", reward_model)
    scored = annotate.main(["--responses_file", str(path), "--rm_experiment_dir", str(reward_model)])
    (row,) = read_jsonl(scored)
    assert [r["reward"] for r in results_of(path)[1]] == row["rewards"]


# ---------------------------------------------------------------------------------------------------------- rankings
FOUR = [  # the texts are their scores, see `thousands`
    {"id": "1", "subset": "Math", "prompt": "a", "chosen": ["4"], "rejected": ["1", "2", "3"], "num_correct": 1},
    {"id": "2", "subset": "Math", "prompt": "b", "chosen": ["3"], "rejected": ["3", "1", "3"]},
    {"id": "3", "subset": "Focus", "prompt": "c", "chosen": ["0"], "rejected": ["1", "2", "3"]},
]
TIES = [
    {"id": "ref:7", "subset": "Ties", "prompt": "d", "chosen": ["5"], "rejected": ["1", "2"]},
    {"id": "tied:7", "subset": "Ties", "prompt": "e", "chosen": ["5", "4", "4.5"], "rejected": ["2", "0"]},
]


def test_a_ranking_file_is_scored_as_the_benchmark_scores_it(tmp_path, capsys):
    path = written(tmp_path, FOUR + TIES)
    (row,) = call("--ranking_file", path, *function("thousands"))
    by = row["by_subset"]
    ties = 0.3 + 0.3 + 0.2 + 0.2 + 0.01 * math.tanh(2 / 1 - 1)  # gaps of 3 and 2, a spread of 1
    assert (by["Math"], by["Focus"], by["Ties"]) == pytest.approx(((1 + 1 / 3) / 2, 0, ties))
    assert by["Math_interval"] == pytest.approx(wilson_interval(4 / 3, 2))
    assert by["Ties_interval"][0] == pytest.approx(wilson_interval(1, 1)[0])  # one question
    names = ("Math", "Focus", "Ties")
    mean, interval = mean_interval([by[n] for n in names], [by[f"{n}_interval"] for n in names])
    assert (row["ranking_score"], row["ranking_score_interval"]) == (pytest.approx(mean), pytest.approx(interval))
    assert row["model"] == "thousands" and row["prompts"] == 5 and "unscored_prompts" not in row
    stored, records = results_of(path, "ranking")
    assert stored == json.loads(json.dumps(row))
    assert [r["right"] for r in records] == [1, pytest.approx(1 / 3), 0, None, None]
    assert (records[3]["id"], records[3]["chosen"], records[3]["rejected"]) == ("ref:7", [5.0], [1.0, 2.0])
    printed = capsys.readouterr().out
    low, high = by["Math_interval"]
    assert "Math" in printed and f"{by['Math']:.3f} [{low:.3f}, {high:.3f}]" in printed


def test_a_prompt_with_an_unscored_response_is_counted_and_in_no_mean(tmp_path):
    rows = [*FOUR, {"subset": "Math", "prompt": "a", "chosen": "nan", "rejected": ["1", "2", "3"]}]
    path = written(tmp_path, rows)
    (row,) = call("--ranking_file", path, *function("thousands"))
    assert row["unscored_prompts"] == 1 and row["by_subset"]["Math"] == pytest.approx(2 / 3)
    assert results_of(path, "ranking")[1][3]["right"] is None
    path = written(tmp_path, [FOUR[0], {**rows[3], "subset": "Safety"}])
    (row,) = call("--ranking_file", path, *function("thousands"))
    assert "ranking_score" not in row  # no mean over other subsets than the benchmark's
    assert "Safety" not in row["by_subset"]


def test_reward_models_and_functions_rank_the_same_file(reward_model, tmp_path, capsys):
    path = written(tmp_path, [{"prompt": r["prompt"], "chosen": r["chosen"], "rejected": r["rejected"]} for r in FOUR])
    plain = shutil.copytree(last_checkpoint(reward_model), tmp_path / "plain")
    ours, folder, of_length = call(
        "--ranking_file", path, "--experiment_dir", reward_model, plain, *function("length"), "--num_samples", 2
    )
    assert ours == {**folder, "model": ours["model"]} and of_length["by_subset"]["all"] == 1 / 4
    scorer = load_scorer(str(reward_model), find_device("cpu"), 8, "--experiment_dir")
    for record, row in zip(read_jsonl(Path(reward_model) / "eval" / "given_ranking.jsonl"), FOUR):
        scores = scorer([[Sample(row["prompt"], text) for text in (*row["chosen"], *row["rejected"])]])[0]
        assert [*record["chosen"], *record["rejected"]] == pytest.approx(scores, abs=1e-5)


def test_reward_models_may_rank_by_their_chat_template(reward_model, tmp_path):
    flags = ["--ranking_file", str(written(tmp_path, FOUR)), "--experiment_dir", str(reward_model)]
    assert evaluate.parse(evaluate.EvaluateArgs, [*flags, "--rm_chat_template", "True"]).rm_chat_template


def test_a_prompt_of_messages_is_ranked(tmp_path):
    prompt = [{"role": "user", "content": "hello"}]
    path = written(tmp_path, [{"prompt": prompt, "chosen": "good day", "rejected": "go"}])
    assert call("--ranking_file", path, *function("letters_said"))[0]["ranking_score"] == 1
    assert as_text(results_of(path, "ranking")[1][0]["prompt"]) == "hello"


# ------------------------------------------------------------------------------------------------------- bad calls
@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--reward_function", "nowhere:f"], "--reward_function nowhere:f"),
        (["--reward_function", "helpers.rewards:takes_no_columns"], "**columns"),
        ([*function("length"), *function("length")[1:]], "given twice"),
        ([*function("length"), "--reward_weights", "1", "2"], "--reward_weights"),
        (["--reward_timeout", "2"], "--reward_timeout 2.0"),
        (["--reward_weights", "2"], "--reward_weights 2.0"),
        (["--rm_chat_template", "True"], "--rm_chat_template True"),
        ([*function("length"), "--trust_remote_code", "True"], "--trust_remote_code True"),
        (["--num_generations", "2", "--do_sample", "False"], "--num_generations 2"),
        (["--pass_k", "1"], "--pass_k 1 needs --reward_function"),
        ([*function("length"), "--pass_k", "1", "4", "--num_generations", "2"], "--pass_k 4 needs --num_generations"),
        (["--responses_file", "FILE", *function("length")], "--responses_file"),
        (["--ranking_file", "nowhere.jsonl"], "--ranking_file nowhere.jsonl does not exist"),
        (["--ranking_file", "FILE"], "language model, not a reward model"),
    ],
)
def test_a_bad_flag_is_one_line(sft, tmp_path, capsys, flags, named):
    path = written(tmp_path, FOUR)
    assert named in refused(capsys, "--experiment_dir", sft, *[path if flag == "FILE" else flag for flag in flags])


def test_a_file_without_what_scores_it_is_one_line(tmp_path, capsys):
    path = written(tmp_path, [{"prompt": "p", "response": "a"}])
    assert "has no rewards yet" in refused(capsys, "--responses_file", path)
    ranked = refused(capsys, "--ranking_file", written(tmp_path, FOUR, "four.jsonl"))
    assert "--model_name" in ranked and "--reward_function" in ranked
    assert "--responses_file nowhere does not exist" in refused(capsys, "--responses_file", "nowhere")
    assert "--model_name" in refused(capsys)


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        ([], "has no rows"),
        ([{"prompt": "p"}], "row 1 has neither 'responses' nor 'response'"),
        ([{"response": "r"}], "row 1 has no 'prompt'"),
        ([{"prompt": 3, "response": "r"}], "row 1 has under 'prompt' 3"),
        ([{"prompt": "p", "responses": ["a"], "rewards": [1, 2]}], "1 responses but 2 values"),
        ([{"prompt": "p", "response": "a"}, {"prompt": "q", "responses": ["a", "b"]}], "--pass_k 2 needs 2 responses"),
    ],
)
def test_a_bad_file_of_responses_is_one_line(tmp_path, capsys, rows, named):
    assert named in refused(capsys, "--responses_file", written(tmp_path, rows), *function("length"), "--pass_k", 2)


def test_files_with_other_prompts_are_not_compared(tmp_path, capsys):
    rows = [{"prompt": p, "response": "a"} for p in "pq"]
    one, two = written(tmp_path, rows), written(tmp_path, rows[::-1], "other.jsonl")
    assert "response 1 has another prompt" in refused(capsys, "--responses_file", one, two, *function("length"))
    two = written(tmp_path, rows[:1], "other.jsonl")
    assert "give as many" in refused(capsys, "--responses_file", one, two, *function("length"))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"prompt": 3}, "row 2 has a 'prompt'"),
        ({"chosen": []}, "row 2 has under 'chosen'"),
        ({"rejected": ["a", 3]}, "row 2 has under 'rejected'"),
        ({"subset": 3}, "row 2 has a 'subset'"),
        ({"subset": "Ties", "id": "7"}, "row 2 of the subset Ties has the id '7'"),
        ({"subset": "Ties", "id": "tied:7"}, "row 2 has the id 'tied:7' but one chosen"),
        ({"subset": "Ties", "id": "ref:7"}, "row 2 has the id 'ref:7' of row 1"),
    ],
)
def test_a_bad_ranking_file_is_one_line(tmp_path, capsys, change, named):
    path = written(tmp_path, [TIES[0], {**FOUR[0], **change}])
    assert named in refused(capsys, "--ranking_file", path, *function("thousands"))


def test_other_kinds_of_ranking_files_are_one_line(tmp_path, capsys):
    assert "has no rows" in refused(capsys, "--ranking_file", written(tmp_path, []), *function("length"))
    path = written(tmp_path, FOUR, "test.parquet")
    assert "from_parquet" in refused(capsys, "--ranking_file", path, *function("length"))
