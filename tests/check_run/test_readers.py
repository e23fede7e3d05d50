"""Dumps of other trainers. `verifiers_0.4.0.jsonl` was written by that package's classes; the rest is by the source."""

import json
from pathlib import Path

import pytest
from helpers.errors import error_naming

from lightrlhf import check_run
from lightrlhf.checks.readers import read_foreign
from lightrlhf.cli.errors import UsageError

VERIFIERS = Path(__file__).with_name("verifiers_0.4.0.jsonl")


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def verdicts_of(path):
    return {one.name: one for one in check_run.run(check_run.CheckRunArgs(run=str(path)))}


def wrong(verdicts):
    return {name: one.fault for name, one in verdicts.items() if one.says == "wrong"}


# -------------------------------------------------------------------------------------------------------------- verl
def verl_rows(step, *, alike=False):
    return [
        {
            "input": f"user\nWhat is {group} and {step}?",
            "output": f"The answer is {group + step}, by way {0 if alike else member}.",
            "gts": str(group),
            "score": float(member % 2),
            "step": step,
        }
        for group in range(4)
        for member in range(4)
    ]


@pytest.mark.parametrize("alike", [False, True])
def test_dumps_of_verl_show_members_that_share_their_noise(tmp_path, alike):
    for step in (2, 10):
        write(tmp_path / f"{step}.jsonl", verl_rows(step, alike=alike))
    assert [one.name for one in read_foreign(str(tmp_path))] == ["2.jsonl, step 2", "10.jsonl, step 10"]
    found = verdicts_of(tmp_path)
    assert wrong(found) == ({"members": "members share their noise"} if alike else {})
    assert found["mask"].evidence == "needs ids and masks of tokens: the dump has texts"
    assert found["advantages"].evidence == "needs advantages"


def test_short_answers_that_are_alike_are_no_fault(tmp_path):
    rows = [row | {"output": "yes"} for row in verl_rows(1)]
    assert verdicts_of(write(tmp_path / "1.jsonl", rows))["members"].says == "cannot tell"


# --------------------------------------------------------------------------------------------- verifiers and prime-rl
def changed(tmp_path, change):
    """The fixture with a change to each node that was sampled."""
    rows = [json.loads(line) for line in VERIFIERS.read_text().splitlines()]
    for row in rows:
        for trace in row["traces"]:
            for node in trace["nodes"]:
                if node["sampled"]:
                    change(node)
    return write(tmp_path / "traces.jsonl", rows)


def test_episodes_of_verifiers_are_rows_of_their_paths():
    (step,) = read_foreign(str(VERIFIERS))
    assert step.get("input_ids").shape == (4, 15) and step.mask().sum(1).tolist() == [7] * 4
    assert step.whole("group").tolist() == [0, 0, 1, 1] and step.whole("episode").tolist() == [0, 1, 2, 3]
    assert step.config["temperature"] == 1.0 and step.get("prompt_len").tolist() == [4.0] * 4
    found = verdicts_of(VERIFIERS)
    assert not wrong(found)
    assert [found[name].says for name in ("mask", "members", "logprobs", "advantages")] == ["right"] * 4


def sign(node):
    node["advantages"] = [-one for one in node["advantages"]]


def zeros(node):
    node["trainer_logprobs"] = [0.0 for _ in node["trainer_logprobs"]]


def nothing(node):
    node["mask"] = [False for _ in node["mask"]]


@pytest.mark.parametrize(
    "change, fault",
    [(sign, {"advantages": "sign"}), (zeros, {"logprobs": "missing log-probabilities read as 0"})],
)
def test_faults_in_episodes_are_named(tmp_path, change, fault):
    assert wrong(verdicts_of(changed(tmp_path, change))) == fault


def test_traces_whose_numbers_do_not_fit_their_masks_are_refused(tmp_path):
    def cut(node):
        node["logprobs"] = node["logprobs"][1:]

    with error_naming(UsageError, "traces.jsonl", "sampled tokens"):
        verdicts_of(changed(tmp_path, cut))
    with error_naming(UsageError, "traces.jsonl"):
        verdicts_of(changed(tmp_path, nothing))


# ----------------------------------------------------------------------------------------------------------- OpenEnv
def openenv_turn(number, **more):
    prompt, completion = [5, 6, 7 + number], [20 + number, 21, 1]
    turn = {"prompt_token_ids": prompt, "completion_token_ids": completion, "loss_mask": [0, 0, 0, 1, 1, 1]}
    turn |= {"per_token_logps": [-0.5, -1.0, -0.25], "metadata": {"sampling_params": {"temperature": 0.7}}}
    return turn | {"node_id": str(number)} | more


def test_captures_of_openenv_are_read_as_a_trace_and_as_entries(tmp_path):
    (tmp_path / "trace.json").write_text(json.dumps({"schema_version": 1, "turns": [openenv_turn(i) for i in (0, 1)]}))
    write(tmp_path / "entries.jsonl", [openenv_turn(i, reward=0.5) for i in (0, 1)])
    for name in ("trace.json", "entries.jsonl"):
        (step,) = read_foreign(str(tmp_path / name))
        assert step.config["temperature"] == 0.7 and step.mask().sum() == 6
        assert step.get("sampler_logprobs")[0].tolist() == [0, 0, 0, -0.5, -1.0, -0.25]
        assert not wrong(verdicts_of(tmp_path / name))
    early = [openenv_turn(i, loss_mask=[0, 0, 1, 1, 1, 0]) for i in (0, 1)]
    assert wrong(verdicts_of(write(tmp_path / "early.jsonl", early))) == {"mask": "mask one early"}
    with error_naming(UsageError, "short.jsonl", "mask"):
        verdicts_of(write(tmp_path / "short.jsonl", [openenv_turn(0, loss_mask=[1])]))


def test_other_json_is_not_taken_for_a_dump(tmp_path):
    write(tmp_path / "other.jsonl", [{"text": "a"}])
    assert read_foreign(str(tmp_path / "other.jsonl")) == []
    (tmp_path / "broken.json").write_text("{")
    with error_naming(UsageError, "broken.json"):
        read_foreign(str(tmp_path / "broken.json"))


def test_files_of_other_endings_are_not_read(tmp_path):
    assert read_foreign(str(write(tmp_path / "1.txt", verl_rows(1)))) == []
    assert read_foreign(str(write(tmp_path / "1.jsonl", verl_rows(1))))[0].get("loss_mask").unique().tolist() == [0, 1]


def test_groups_and_weights_of_verifiers_are_its_own(tmp_path):
    rows = [json.loads(line) for line in VERIFIERS.read_text().splitlines()]
    for number, row in enumerate(rows):
        row["group"] = {"id": str(number % 2)}
        for trace in row["traces"]:
            trace["rewards"] = {"a": {"score": 2.0, "weight": 0.5}, "b": {"score": 3.0}, "c": None}
    (step,) = read_foreign(str(write(tmp_path / "traces.jsonl", rows)))
    assert step.whole("group").tolist() == [0, 1, 0, 1] and step.get("rewards").tolist() == [4.0] * 4
    assert step.config["digits"] == 4
    for row in rows:
        row["traces"][0]["ok"] = False
    assert read_foreign(str(write(tmp_path / "traces.jsonl", rows)))[0].get("rewards").isnan().all()
