"""Input that is no step, no run or no data ends `check_run` and `check_data` with one line and status 2."""

import json
import pickle
import shutil

import numpy as np
import pytest
from helpers import reseal
from helpers.programs import main_of
from helpers.steps import policy_step
from helpers.tiny_runs import TinyRuns

from lightrlhf import check_data, check_run
from lightrlhf.storage.checkpoint import checkpoints

FLAT, WIDE = np.ones(16), np.ones((16, 2))


def refused(capsys, main, *argv):
    """The one line of an error."""
    with pytest.raises(SystemExit) as ended:
        main([str(one) for one in argv])
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert ended.value.code == 2
    return line


ARRAYS = {
    "a text": ({"input_ids": np.array([["a"]])}, "input_ids"),
    "objects": ({"input_ids": np.array([[1], [2, 3]], dtype=object)}, "cannot be read"),
    "ids of rows": ({"input_ids": FLAT}, "dimensions"),
    "ids of three": ({"input_ids": np.ones((16, 2, 2))}, "dimensions"),
    "masks of rows": ({"loss_mask": FLAT}, "loss_mask"),
    "NaN in ids": ({"input_ids": WIDE * np.nan}, "whole numbers"),
    "half ids": ({"input_ids": WIDE / 2}, "whole numbers"),
    "NaN in groups": ({"group": FLAT * np.nan}, "group"),
    "groups of tokens": ({"group": WIDE}, "group"),
    "one group": ({"group": np.float64(1)}, "group"),
    "no rows": ({"input_ids": np.zeros((0, 4))}, "(0, 4)"),
    "a loss of tokens": ({"loss": WIDE}, "loss"),
    "a setting as an array": ({"num_generations": np.float64(4)}, "in config"),
}


@pytest.mark.parametrize("arrays, named", ARRAYS.values(), ids=list(ARRAYS))
def test_arrays_of_other_shapes_and_numbers_are_refused(tmp_path, capsys, arrays, named):
    made, config = policy_step(0)
    np.savez(tmp_path / "step.npz", **(made | arrays), config=json.dumps(config))
    assert named in refused(capsys, check_run.main, tmp_path / "step.npz")


SETTINGS = [("method", 3), ("clip_low", "a"), ("loss_type", ["clip"]), ("first_pass", "x"), ("temperature", True)]
SETTINGS += [("num_generations", 0), ("digits", -3), ("eos_token_id", [1, "a"]), ("eos_token_id", "</s>")]


@pytest.mark.parametrize("name, value", SETTINGS)
def test_settings_of_other_types_are_refused(tmp_path, capsys, name, value):
    arrays, config = policy_step(0)
    np.savez(tmp_path / "step.npz", **arrays, config=json.dumps(config | {name: value}))
    assert name in refused(capsys, check_run.main, tmp_path / "step.npz")


@pytest.mark.parametrize("content", [b"", b"junk", pickle.dumps([1])])
def test_files_that_are_no_arrays_are_refused(tmp_path, capsys, content):
    (tmp_path / "step.npz").write_bytes(content)
    assert "step.npz" in refused(capsys, check_run.main, tmp_path / "step.npz")


@pytest.mark.parametrize("config", ["[1]", "3", "no JSON"])
def test_settings_that_are_no_object_are_refused(tmp_path, capsys, config):
    np.savez(tmp_path / "step.npz", input_ids=WIDE, config=config)
    assert "step.npz" in refused(capsys, check_run.main, tmp_path / "step.npz")


ROWS = ['{"input_ids": "abc"}', '{"input_ids": [[1]]}', '{"group": [1, 2]}', "[1]", '{"input_ids": ["a"]}']
ROWS += ['{"input_ids": [1]}\n{"input_ids": 1}', "{", '{"rewards": [1]}\n{"rewards": [1, 2]}']
ROWS += ['{"prompt_ids": 1, "completion_ids": [1]}', '{"rewards": null}\n{"rewards": [1, 2]}']


@pytest.mark.parametrize("rows", ROWS)
def test_rows_of_other_values_are_refused(tmp_path, capsys, rows):
    (tmp_path / "rows.jsonl").write_text(rows + "\n")
    assert str(tmp_path) in refused(capsys, check_run.main, tmp_path)


def test_settings_of_rows_must_be_an_object(tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_text('{"input_ids": [1]}\n')
    (tmp_path / "step.json").write_text("[1]")
    assert "step.json" in refused(capsys, check_run.main, tmp_path)


@pytest.mark.parametrize("log", ["[]", '{"log_history": 3}', '{"log_history": [1]}', "{", "{}"])
def test_a_state_of_no_trainer_is_refused(tmp_path, capsys, log):
    (tmp_path / "trainer_state.json").write_text(log)
    assert "trainer_state.json" in refused(capsys, check_run.main, tmp_path, "--follow", "True")


# ------------------------------------------------------------------------------------------------------------ own runs
@pytest.fixture(scope="module")
def made(tmp_path_factory, cafe_data, talk_data, tokenizer):
    return TinyRuns(tmp_path_factory.mktemp("odd"), cafe_data, talk_data, tokenizer)


@pytest.fixture(scope="module")
def whole(made):
    return main_of("grpo")(made.flags("grpo", made.folder / "logs", steps=4))


@pytest.fixture
def run(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    return tmp_path / "run"


CHANGES = {
    "no ids": lambda row: row.pop("prompt_ids"),
    "a text": lambda row: row.update(response_ids="abc"),
    "ids below 0": lambda row: row.update(response_ids=[-1] * len(row["response_ids"])),
    "a short mask": lambda row: row["mask"].pop(),
    "a long list": lambda row: row["advantages"].append(1.0),
    "no group": lambda row: row.pop("group"),
    "a score of text": lambda row: row.update(score="1"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=list(CHANGES))
def test_rollouts_that_no_run_has_written_are_refused(run, capsys, change):
    rows = [json.loads(line) for line in (run / "rollouts.jsonl").read_text().splitlines()]
    change(rows[1])
    (run / "rollouts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "row 2" in refused(capsys, check_run.main, run)


@pytest.mark.parametrize("name, content", [("model.safetensors", b"junk"), ("generation_config.json", b"{")])
def test_damaged_checkpoints_are_refused(run, capsys, name, content):
    (checkpoints(run)[-1] / name).write_bytes(content)
    assert name in refused(capsys, check_run.main, run)


def test_ids_beyond_the_vocabulary_of_a_checkpoint_are_not_passed(run):
    rows = [json.loads(line) for line in (run / "rollouts.jsonl").read_text().splitlines()]
    for row in rows:
        row["response_ids"] = [10**6] * len(row["response_ids"])
    (run / "rollouts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    says = {one.name: one.says for one in check_run.run(check_run.CheckRunArgs(run=str(run)))}
    assert says["samples"] == says["trainer"] == "cannot tell"


def test_arguments_of_another_version_are_refused(run, capsys):
    args = json.loads((run / "args.json").read_text())
    del args["init_kl_coeff"]
    (run / "args.json").write_text(json.dumps(args))
    reseal(run)
    assert "init_kl_coeff" in refused(capsys, check_run.main, run)


def test_runs_that_just_began_or_lost_the_end_of_a_line_are_judged_by_what_there_is(run):
    text = (run / "rollouts.jsonl").read_text()
    (run / "rollouts.jsonl").write_text(text[: len(text) // 2])
    says = {one.name: one.says for one in check_run.run(check_run.CheckRunArgs(run=str(run)))}
    assert says["advantages"] == says["weights"] == "right"
    for folder in checkpoints(run):
        shutil.rmtree(folder)
    says = {one.name: one.says for one in check_run.run(check_run.CheckRunArgs(run=str(run)))}
    assert says["advantages"] == "right" and says["weights"] == "cannot tell"


def test_other_versions_are_of_one_size(made, run, capsys):
    np.savez(run / "step.npz", input_ids=np.ones((1, 4)), loss_mask=np.ones((1, 4)), old_logprobs=-np.ones((1, 4)))
    flags = [run / "step.npz", "--model_name", made.model, "--other_models", made.teacher]
    assert "--other_models" in refused(capsys, check_run.main, *flags)


# ---------------------------------------------------------------------------------------------------------------- data
@pytest.mark.parametrize("name, content", [("a.jsonl", b"{\n"), ("a.parquet", b"junk"), ("a.jsonl", b"\xff\xfe\0")])
def test_data_that_cannot_be_read_has_status_2(cafe_data, tmp_path, capsys, name, content):
    (tmp_path / name).write_bytes(content)
    flags = [tmp_path / name, "--tokenizer_name", cafe_data / "tokenizer"]
    assert name in refused(capsys, check_data.main, *flags)


def test_ids_beyond_64_bits_are_a_row_refused(cafe_data, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"input_ids": [99999999999999999999, 2]}\n{"input_ids": [3, 2]}\n')
    args = check_data.CheckDataArgs(data=str(tmp_path / "a.jsonl"), tokenizer_name=str(cafe_data / "tokenizer"))
    assert "rows refused" in {one.fault for one in check_data.run(args)}


def test_results_lie_in_folders_that_are_made(tmp_path):
    arrays, config = policy_step(0)
    np.savez(tmp_path / "step.npz", **arrays, config=json.dumps(config))
    out = tmp_path / "new" / "found.json"
    check_run.run(check_run.CheckRunArgs(run=str(tmp_path / "step.npz"), output_file=str(out)))
    assert json.loads(out.read_text())
