"""Generation to files: killed, sharded or remote, every prompt has exactly one row."""

import json
import shutil

import pytest
import torch
from helpers import last_checkpoint, run_program
from helpers.errors import refused
from helpers.servers import status

from lightrlhf.cli.groups import ModelArgs
from lightrlhf.data.prompts import subset
from lightrlhf.data.splits import load_prompts, load_split
from lightrlhf.data.tokens import decode, encode_prompt
from lightrlhf.generate import main
from lightrlhf.models.loading import load_scalar
from lightrlhf.models.roles import last_token
from lightrlhf.rewards.loading import reward_statistics
from lightrlhf.storage.jsonl import read_jsonl, write_jsonl
from lightrlhf.storage.shards import Shard

SMALL = ["--max_new_tokens", "6", "--accelerator", "cpu"]


@pytest.fixture
def flags(cafe_data, sft_dir):
    return ["--data_dir", str(cafe_data), "--split", "train", "--model_name", sft_dir, *SMALL, "--num_generations", "2"]


def generated(tmp_path, flags, name: str = "rows.jsonl") -> list[dict]:
    (file,) = main([*flags, "--output_file", str(tmp_path / name)])
    return read_jsonl(file)


def test_each_prompt_gets_k_responses_and_keeps_its_columns(tmp_path, cafe_data, sft_dir, tokenizer):
    prompts = tmp_path / "prompts.jsonl"
    chat = [{"role": "user", "content": "A tea, please."}, {"role": "assistant", "content": "Here you are."}]
    lines = [{"prompt": "Guest: a tea", "table": 3}, {"context_messages": chat[:1]}, {"messages": chat, "table": 5}]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = ["--prompts_file", str(prompts), "--model_name", sft_dir, *SMALL, "--num_generations", "3"]
    rows = generated(tmp_path, flags)
    assert [row.get("table") for row in rows] == [3, None, 5]
    assert [row["prompt"] for row in rows] == ["Guest: a tea", chat[:1], chat[:1]]
    assert [row["index"] for row in rows] == [0, 1, 2]
    for row in rows:
        assert len(row["responses"]) == len(row["response_ids"]) == len(row["truncated"]) == 3
        assert row["responses"] == [decode(tokenizer, ids) for ids in row["response_ids"]]
        assert [ids[-1] != tokenizer.eos_token_id for ids in row["response_ids"]] == row["truncated"]
    assert len(set(rows[0]["responses"])) > 1


def test_responses_of_another_model_in_a_file_of_prompts_are_left_out(tmp_path, sft_dir, tokenizer):
    old = {"prompt": "Guest: a tea", "prompt_ids": [5, 6], "table": 3, "ref_response": "Yes."}
    write_jsonl(tmp_path / "old.jsonl", [old | {"response": "Old.", "responses": ["Old."], "rewards": [9.0]}])
    flags = ["--prompts_file", str(tmp_path / "old.jsonl"), "--model_name", sft_dir, *SMALL]
    (row,) = generated(tmp_path, flags)
    assert not {"response", "reward", "rewards"} & row.keys() and row["responses"] != ["Old."]
    assert row["table"] == 3 and row["ref_response"] == "Yes."
    assert row["prompt_ids"] == encode_prompt(tokenizer, "Guest: a tea")
    same = [{**row, "prompt": decode(tokenizer, ids), "prompt_ids": ids} for ids in [row["prompt_ids"][1:]]]
    write_jsonl(tmp_path / "rendered.jsonl", same)  # a prompt with control tokens has its ids alone
    (again,) = generated(tmp_path, [*flags[2:], "--prompts_file", str(tmp_path / "rendered.jsonl")], "again.jsonl")
    assert again["prompt_ids"] == same[0]["prompt_ids"]


def test_a_subset_is_seeded_and_in_the_order_of_the_data(tmp_path, flags, cafe_data, tokenizer):
    rows = generated(tmp_path, [*flags, "--num_prompts", "5"])
    data = load_prompts(cafe_data, "train")
    chosen = subset(len(data), 5, 1234)
    assert chosen == sorted(set(chosen)) and chosen != subset(len(data), 5, 1)
    assert [row["prompt_ids"] for row in rows] == [data[i]["input_ids"].tolist() for i in chosen]
    assert list(subset(3, None, 0)) == list(subset(3, 5, 0)) == [0, 1, 2]


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_same_file(tmp_path, flags):
    flags = [*flags, "--rollout_mini_batch_size", "2"]  # chunks of 8 prompts
    generated(tmp_path, flags)
    whole, settings = (tmp_path / "rows.jsonl").read_bytes(), (tmp_path / "rows.args.json").read_text()
    stored = json.loads(settings)
    unsealed = {name: value for name, value in stored.items() if name not in ("sha256", "bytes")}
    (tmp_path / "rows.args.json").write_text(json.dumps(unsealed))  # killed after the last row
    generated(tmp_path, flags)
    assert (tmp_path / "rows.args.json").read_text() == settings != json.dumps(unsealed)
    ends = [n for n, byte in enumerate(whole) if byte == 10]
    for kept in (ends[0] + 1, ends[10] + 30, len(whole) - 1):
        (tmp_path / "rows.jsonl").write_bytes(whole[:kept])
        generated(tmp_path, flags)
        assert (tmp_path / "rows.jsonl").read_bytes() == whole, kept


@pytest.mark.slow
def test_shards_are_merged_by_the_last_one(tmp_path, flags, monkeypatch):
    rows = generated(tmp_path, flags)
    for rank in (2, 0, 1):
        assert not (tmp_path / "shards.jsonl").exists()
        ours = Shard(rank, 3), torch.device("cpu"), lambda: None
        monkeypatch.setattr("lightrlhf.generate.start_ranks", lambda args, ours=ours: ours)
        main([*flags, "--output_file", str(tmp_path / "shards.jsonl")])
    assert read_jsonl(tmp_path / "shards.jsonl") == rows


@pytest.mark.slow
@pytest.mark.parametrize("starter", ["devices", "torchrun"])
def test_two_ranks_write_what_one_writes(tmp_path, flags, starter):
    rows = generated(tmp_path, flags)
    file = tmp_path / "ranks.jsonl"
    flags = [*flags, "--output_file", str(file)]
    if starter == "devices":
        run_program("lightrlhf.generate", *flags, "--devices", "2")
    else:
        ranks = ["--standalone", "--nproc_per_node", "2", "-m"]
        run_program("torch.distributed.run", *ranks, "lightrlhf.generate", *flags)
    assert read_jsonl(file) == rows
    shards = [read_jsonl(tmp_path / f"ranks.part-{rank}-of-2.jsonl") for rank in (0, 1)]
    assert shards[0] + shards[1] == rows and min(map(len, shards)) >= len(rows) // 2


def test_rewards_best_of_n_and_the_datas_own_answers(tmp_path, flags, cafe_data, rm_dir, tokenizer):
    options = ["--rm_experiment_dir", rm_dir, "--ref_scores", "True", "--num_prompts", "4"]
    options += ["--prompts_from", "preference"]
    rows = generated(tmp_path, [*flags, *options])
    data = load_split(cafe_data, "preference", "train")
    pairs = {tuple(row["chosen_input_ids"].tolist()): row for row in data}
    for row in rows:
        best = max(range(2), key=lambda k: row["rewards"][k])
        assert (row["response"], row["reward"]) == (row["responses"][best], row["rewards"][best])
        ours = next(ids for ids in pairs if decode(tokenizer, ids).endswith(row["ref_response"]))
        assert pairs[ours]["columns"]["group"] == row["group"]
        assert isinstance(row["ref_reward"], float) and isinstance(row["rejected_reward"], float)
    model = load_scalar(rm_dir, ModelArgs(), tokenizer, 0).eval()
    mean, std = reward_statistics(last_checkpoint(rm_dir))
    ids = torch.tensor([rows[0]["prompt_ids"] + rows[0]["response_ids"][1]])
    alone = (last_token(model(ids, ids >= 0), ids >= 0).item() - mean) / std
    assert rows[0]["rewards"][1] == pytest.approx(alone, abs=1e-5)


@pytest.mark.parametrize("stage", ["finetune", "preference"])
def test_scoring_the_datas_answers_changes_no_prompt(tmp_path, flags, rm_dir, stage):
    flags = [*flags, "--prompts_from", stage, "--rm_experiment_dir", rm_dir]
    plain, scored = (generated(tmp_path, [*flags, "--ref_scores", yes], f"{yes}.jsonl") for yes in ("False", "True"))
    assert all("ref_reward" in row and ("rejected_reward" in row) == (stage == "preference") for row in scored)
    answers = ("ref_response", "ref_reward", "rejected_response", "rejected_reward")
    assert plain == [{name: value for name, value in row.items() if name not in answers} for row in scored]


def test_prompts_without_answers_are_refused_when_answers_are_to_be_scored(tmp_path, flags, rm_dir, capsys):
    with pytest.raises(SystemExit) as stop:
        generated(tmp_path, [*flags, "--rm_experiment_dir", rm_dir, "--ref_scores", "True"])
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert stop.value.code == 2 and "prompts_train.pt have no answers; add --prompts_from preference" in error


def test_without_prompts_of_its_own_those_of_the_demonstrations_are_taken(tmp_path, flags, cafe_data, rm_dir):
    for name in ("finetune_train.pt", "preference_train.pt", "tokenizer"):
        (tmp_path / "data" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "data" / name).symlink_to(cafe_data / name)
    flags = [*flags, "--data_dir", str(tmp_path / "data")]
    rows = generated(tmp_path, [*flags, "--rm_experiment_dir", rm_dir, "--ref_scores", "True"], "scored.jsonl")
    data = load_split(cafe_data, "finetune", "train")
    assert [row["prompt_ids"] for row in rows] == [row["input_ids"][: row["prompt_len"]].tolist() for row in data]
    assert [row["response_ids"] for row in generated(tmp_path, flags)] == [row["response_ids"] for row in rows]


def test_an_error_comes_before_the_progress_bar(tmp_path, flags, capsys):
    with pytest.raises(SystemExit):
        generated(tmp_path, [*flags, "--max_new_tokens", "999"])
    told = capsys.readouterr().err
    assert "--max_new_tokens 999" in told and "prompts/s" not in told and "generate:" not in told


def test_temperatures_have_a_file_each_and_zero_is_greedy(tmp_path, cafe_data, sft_dir, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = ["--data_dir", str(cafe_data), "--model_name", sft_dir, *SMALL, "--temperatures", "0", "1", "0.7"]
    files = main(flags)
    name = f"{cafe_data.parent.name}-{cafe_data.name}"
    assert [file.split("/")[:3] for file in files] == [["results", name, f"temperature={t}"] for t in ("0", "1", "0.7")]
    greedy, one, cool = (read_jsonl(file) for file in files)
    assert greedy != one != cool
    assert [row["prompt"] for row in greedy] == [row["prompt"] for row in one]


def test_servers_answer_in_order_and_a_second_start_asks_for_the_rest_only(tmp_path, serve):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"p{n}", "n": n}) + "\n" for n in range(12)))
    one = serve({"p7": [status(404)]})
    two = serve({"p3": [status(400, {"detail": "too long"})] * 4})
    flags = ["--prompts_file", str(prompts), "--model_name", "m", "--num_generations", "2", "--max_workers", "1"]
    flags += ["--rollout_engine", "openai", "--base_url", one.url, two.url]
    with pytest.raises(SystemExit) as stopped:
        generated(tmp_path, flags)
    assert stopped.value.code == 1
    left = read_jsonl(tmp_path / "rows.jsonl")
    assert [row["n"] for row in left] == list(range(7))
    before = one.asked["p6"] + two.asked["p6"]
    rows = generated(tmp_path, flags)
    assert [row["n"] for row in rows] == list(range(12)) and rows[:7] == left
    assert one.asked["p6"] + two.asked["p6"] == before
    assert rows[3]["errors"] == ["status 400: too long"] and rows[4]["responses"] == ["p4!", "p4!"]


@pytest.mark.parametrize(
    "wrong, message",
    [
        ([], "--data_dir or --prompts_file"),
        (["--data_dir", "/nowhere"], "--data_dir /nowhere does not exist"),
        (["--prompts_file", "none.jsonl"], "--prompts_file none.jsonl does not exist"),
        (
            ["--data_dir", ".", "--rollout_engine", "openai", "--base_url", "http://a/v1", "--eos_ids", "5"],
            "--eos_ids 5",
        ),
        (["--data_dir", ".", "--base_url", "http://a/v1"], "--base_url http://a/v1"),
        (["--data_dir", ".", "--temperatures", "0", "--num_generations", "2"], "--num_generations 2"),
        (["--data_dir", ".", "--temperatures", "1", "2", "--output_file", "x"], "--temperatures"),
        (["--data_dir", ".", "--K=2"], "--num_generations"),
        (["--data_dir", ".", "--mini_batch_size=2"], "--rollout_mini_batch_size"),
        (["--data_dir", ".", "--my_world_size", "2"], "--devices"),
        (["--data_dir", ".", "--local_index", "1"], "torchrun"),
    ],
)
def test_bad_flags_are_one_line(wrong, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts_test.pt").touch()
    assert message in refused(capsys, main, "--model_name", "m", *wrong)


@pytest.mark.parametrize(
    "line, message",
    [
        ("{", ":2 is not JSON"),
        ('{"text": "a"}', "row 2 has no prompt"),
        ('{"prompt": ""}', "row 2"),
        ('{"prompt": [3]}', "row 2 has"),
    ],
)
def test_a_bad_line_of_prompts_is_named(line, message, tmp_path, sft_dir, capsys):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a"}\n' + line + "\n")
    assert message in refused(capsys, main, "--model_name", sft_dir, "--prompts_file", prompts, *SMALL)


def test_rows_of_an_older_checkpoint_are_not_resumed_with_a_newer_one(tmp_path, flags, sft_dir, capsys):
    generated(tmp_path, flags)
    copy = tmp_path / "sft"
    shutil.copytree(sft_dir, copy)
    flags[flags.index(sft_dir)] = str(copy)
    with pytest.raises(SystemExit):
        generated(tmp_path, flags)
    assert "rows.jsonl has rows of other settings: model_name was" in capsys.readouterr().err
