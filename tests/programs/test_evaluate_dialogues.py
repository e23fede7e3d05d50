"""lightrlhf.evaluate_dialogues: results by turn, files, errors."""

import json
import math
import shutil
from pathlib import Path

import pytest
from helpers import reseal
from helpers.errors import refused

from datasets_prep.cafe_talk.prepare_data import main as prepare
from lightrlhf import evaluate, evaluate_dialogues
from lightrlhf.evaluate_dialogues import by_turn, results_by_turn
from lightrlhf.generation import dialogues
from lightrlhf.maths.ops import wilson_interval
from lightrlhf.storage.jsonl import read_jsonl

SMALL = ["--num_turns", "2", "--max_new_tokens", "4", "--num_samples", "4", "--accelerator", "cpu"]
GUEST = ["--user_function", "datasets_prep.cafe_talk.guest:guest"]


@pytest.fixture(scope="module")
def talk_data(tmp_path_factory, tokenizer) -> Path:
    folder = tmp_path_factory.mktemp("talk")
    tokenizer.save_pretrained(folder / "tokenizer")
    reseal(folder)
    flags = ["--tokenizer_name", str(folder / "tokenizer"), "--num_dialogues", "20", "--num_held_out", "6"]
    prepare(["--destination_dir", str(folder / "data"), *flags, "--num_proc", "1"])
    return folder / "data"


@pytest.fixture
def experiment(sft_dir, tmp_path) -> str:
    """A copy of the SFT experiment, to write results into."""
    return str(shutil.copytree(sft_dir, tmp_path / "sft"))


def test_the_results_are_in_the_experiment_dir(experiment, talk_data, tmp_path, capsys):
    twin = str(shutil.copytree(experiment, tmp_path / "twin"))
    flags = ["--model_name", experiment, twin, "--data_dir", str(talk_data), *GUEST, *SMALL]
    first, second = evaluate_dialogues.main(flags)
    assert first["win_rate"] == second["win_rate"] == [0.5, 0.5]
    assert first["score_by_turn"] == second["score_by_turn"] and first["count"] == [4, 4]
    folder = Path(twin, "eval")
    assert json.loads((folder / "test_by_turn.json").read_text()) == json.loads(json.dumps(second))
    records = read_jsonl(folder / "test_by_turn.jsonl")
    assert second["score_by_turn"][0] == pytest.approx(sum(record["scores"][0] for record in records) / 4)
    turns = [read_jsonl(folder / "test" / f"turn-{turn}.jsonl") for turn in (1, 2)]
    assert turns[1][0]["response"].startswith(turns[0][0]["response"]) and turns[0][0]["prompt"][-1]["role"] == "user"
    printed = capsys.readouterr().out
    assert "score after each turn" in printed and "0.500 [" in printed
    assert (Path(experiment) / "eval" / "test_by_turn.png").stat().st_size > 5_000
    assert evaluate.main(["--by_turn", "True", *flags]) == [first, second]
    before = {path: path.read_bytes() for path in Path(twin, "eval").rglob("*.jsonl")}
    evaluate_dialogues.main([*flags, "--seed", "7"])
    assert all(path.read_bytes() == content for path, content in before.items())
    assert len(read_jsonl(folder / "test-seed=7" / "turn-2.jsonl")) == 4
    assert (Path(experiment) / "eval" / "test_by_turn-seed=7.png").is_file()


def test_by_turn_ties_count_half_and_missing_scores_do_not_count():
    ours, others = [[1.0, 2.0], [0.0, None], [3.0]], [[0.0, 2.0], [0.0, 1.0], [2.0, 4.0]]
    results = results_by_turn(by_turn(ours, 2), by_turn(others, 2))
    assert results["count"] == [3, 2]
    assert results["win_rate"] == pytest.approx([2.5 / 3, 0.25])
    assert results["win_rate_interval"][1] == wilson_interval(0.5, 2)
    assert results["score_by_turn"] == pytest.approx([4 / 3, 2.5])  # a dialogue that ended counts with its last score
    assert math.isnan(results_by_turn(by_turn([[None]], 1), by_turn([[1.0]], 1))["score_by_turn"][0])


def test_openings_without_room_for_a_reply_are_left_out(experiment, talk_data, monkeypatch, capsys):
    openings = sorted(len(row.before(0).input_ids) for row in dialogues.load_dialogues(str(talk_data), "test")[:4])
    left_out = sum(length > openings[1] for length in openings)
    monkeypatch.setattr(dialogues, "max_positions", lambda policy: openings[1] + 4)
    (row,) = evaluate_dialogues.main(["--model_name", experiment, "--data_dir", str(talk_data), *GUEST, *SMALL])
    assert 0 < left_out == row["without_room"] and row["count"] == [4 - left_out] * 2
    assert f"{left_out} of 4 openings leave {experiment} no room" in capsys.readouterr().out
    assert len(read_jsonl(Path(experiment, "eval", "test", "turn-2.jsonl"))) == 4 - left_out


@pytest.mark.parametrize(
    "flags, named",
    [
        (["--data_dir", "nowhere"], "--data_dir nowhere"),
        (["--model_name", "nowhere"], "--model_name nowhere"),
        (["--mini_batch_size", "8"], "--rollout_mini_batch_size"),
        (["--by_turn", "True"], "--by_turn"),
        (["--user_model", "m", "--user_function", "a:b"], "--user_function"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_bad_flag_is_one_line(flags, named, sft_dir, capsys):
    assert named in refused(capsys, evaluate_dialogues.main, "--model_name", sft_dir, *flags)


def test_data_without_a_judge_needs_a_reward_model(experiment, talk_data, tmp_path, capsys):
    data = shutil.copytree(talk_data, tmp_path / "data")
    stored = json.loads((data / "args.json").read_text()) | {"judge": None}
    (data / "args.json").write_text(json.dumps(stored))
    reseal(data)
    assert "--rm_experiment_dir" in refused(
        capsys, evaluate_dialogues.main, "--model_name", experiment, "--data_dir", data, *GUEST, *SMALL
    )
