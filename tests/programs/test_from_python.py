"""Programs called from Python: objects instead of flags, a hook, and resuming with the same objects."""

import copy
import dataclasses
import json
import math
import sys
from pathlib import Path
from statistics import mean

import pytest
import torch
from helpers import last_checkpoint, metrics, save_model, tiny_model, weights
from helpers.errors import error_naming, refused
from helpers.rewards import vowels

import lightrlhf
from lightrlhf import DPOArgs, GRPOArgs, PPOArgs, RMArgs, SFTArgs, StopTraining, UsageError, dpo, grpo, ppo, rm, sft
from lightrlhf.data import batch
from lightrlhf.storage.jsonl import read_jsonl
from lightrlhf.training import rollout_log

SMALL = {"accelerator": "cpu", "micro_batch_size": 2, "mini_batch_size": 4, "log_interval": 1, "lr_warmup_steps": 0}
PROMPTS = ["Guest: a tea, please.\n", "Guest: two muffins.\n", "Guest: a latte!\n", "Guest: water.\n"] * 2
REPLIES = [{"prompt": prompt, "completion": " Certainly."} for prompt in PROMPTS]
PAIRS = [{"prompt": prompt, "chosen": " Certainly.", "rejected": " No."} for prompt in PROMPTS]


def model_of(tokenizer):
    special = {"pad_token_id": tokenizer.pad_token_id, "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
    return tiny_model("llama", vocab_size=len(tokenizer), **special)


def short(prompts, completions, **columns):
    return [-float(len(text)) for text in completions]


def ppo_args(tmp_path, **flags) -> PPOArgs:
    sizes = {"rollout_size": 4, "rollout_mini_batch_size": 4, "max_new_tokens": 6, "eval_interval": 0}
    return PPOArgs(log_dir=str(tmp_path), **(SMALL | sizes | flags))


def test_ppo_trains_given_objects_and_records_them(tokenizer, tmp_path):
    model, seen = model_of(tokenizer), []
    before = {name: p.clone() for name, p in model.named_parameters()}
    folder = ppo.train(
        ppo_args(tmp_path, max_steps=2, actor_learning_rate=1e-2),
        policy=model,
        tokenizer=tokenizer,
        prompts=PROMPTS,
        reward=short,
        on_step=lambda step, row: seen.append((step, row["objective/score"])),
    )
    assert any(not torch.equal(before[name], p) for name, p in model.named_parameters())  # trained in place
    assert seen == [(row["step"], row["objective/score"]) for row in metrics(folder)]
    given = json.loads((folder / "args.json").read_text())["given"]
    assert set(given) == {"policy", "tokenizer", "prompts", "reward"} and "sha256" in given["policy"]
    assert given["prompts"].startswith("8 rows sha256:") and given["reward"].endswith(":short")
    card = (last_checkpoint(folder) / "README.md").read_text()
    assert given["policy"] in card and given["reward"] in card
    assert folder.parent.name == "prompts" and folder.parent.parent.name == "given"


@pytest.mark.slow
def test_no_file_of_a_run_has_numbers_that_json_does_not_know(tokenizer, tmp_path, capsys):
    def endless(prompts, completions, **columns):
        return [math.inf if row % 2 else 1.0 for row in range(len(completions))]

    seen = []
    objects = {"policy": model_of(tokenizer), "tokenizer": tokenizer, "prompts": PROMPTS, "reward": endless}
    args = ppo_args(tmp_path, max_steps=2, clip_rewards=True)
    folder = ppo.train(args, **objects, on_step=lambda step, row: seen.append(row["reward/endless"]))
    assert seen == [math.inf] * 2 and "objective/score" in metrics(folder)[0]
    files = [*folder.rglob("*.json"), *folder.rglob("*.jsonl")]
    lines = [line for path in files if path.suffix == ".jsonl" for line in path.read_text().splitlines()]
    for text in [*lines, *(path.read_text() for path in files if path.suffix == ".json")]:
        json.loads(text, parse_constant=pytest.fail)
    assert not any("reward/endless" in row for row in metrics(folder))
    assert capsys.readouterr().out.count("note: reward/endless is inf at step 1") == 1


def test_grpo_trains_given_objects_on_several_rewards(tokenizer, tmp_path):
    model = model_of(tokenizer)
    before = {name: p.clone() for name, p in model.named_parameters()}
    sizes = {"num_generations": 2, "rollout_size": 2, "rollout_mini_batch_size": 4, "max_new_tokens": 6}
    args = GRPOArgs(
        log_dir=str(tmp_path), max_steps=2, learning_rate=1e-2, eval_interval=0, resample_rounds=2, **SMALL, **sizes
    )
    rewards = [short, vowels]
    folder = grpo.train(args, policy=model, tokenizer=tokenizer, prompts=PROMPTS, reward=rewards)
    assert any(not torch.equal(before[name], p) for name, p in model.named_parameters())
    assert {"reward/short", "reward/vowels"} <= metrics(folder)[0].keys()


def test_an_advantage_may_be_a_function_of_the_script(tokenizer, tmp_path, monkeypatch):
    tables = []

    def halves(scores):
        tables.append(tuple(scores.shape))
        return scores / 2

    monkeypatch.setattr(sys.modules["__main__"], "halves", halves, raising=False)
    sizes = {"num_generations": 4, "rollout_size": 2, "rollout_mini_batch_size": 8, "max_new_tokens": 6}
    args = GRPOArgs(advantage="__main__:halves", log_dir=str(tmp_path), max_steps=1, eval_interval=0, **SMALL, **sizes)
    folder = grpo.train(args, policy=model_of(tokenizer), tokenizer=tokenizer, prompts=PROMPTS, reward=short)
    assert tables == [(2, 4)] * 2  # the trial, and the step
    assert all(row["advantages"][0] == row["score"] / 2 for row in read_jsonl(folder / "rollouts.jsonl"))


@pytest.mark.slow
@pytest.mark.parametrize("flags", [{}, {"finetune_mode": "lora"}], ids=["all", "lora"])
def test_a_resumed_run_wants_the_objects_it_began_with(flags, tokenizer, tmp_path):
    objects = {"tokenizer": tokenizer, "prompts": PROMPTS, "reward": short}
    args = ppo_args(tmp_path, max_steps=3, save_interval=1, **flags)
    whole = ppo.train(args, policy=model_of(tokenizer), **objects)
    begun = ppo.train(dataclasses.replace(args, max_steps=1), policy=model_of(tokenizer), **objects)
    again = dataclasses.replace(args, resume_from=str(begun))
    other = model_of(tokenizer)
    other.lm_head.weight.data.mul_(2)
    with error_naming(UsageError, "policy", "resume"):
        ppo.train(again, policy=other, **objects)
    with error_naming(UsageError, "prompts", "8 rows"):
        ppo.train(again, policy=model_of(tokenizer), **(objects | {"prompts": PROMPTS[:4]}))
    with error_naming(UsageError, "policy", "not given"):
        ppo.train(dataclasses.replace(again, model_name="tiny"), **objects)
    ppo.train(again, policy=model_of(tokenizer), **objects)
    assert weights(last_checkpoint(begun)) == weights(last_checkpoint(whole))
    assert metrics(begun) == metrics(whole)


def test_stop_training_ends_after_the_step_with_a_checkpoint(tokenizer, tmp_path):
    def stop(step, row):
        if step == 2:
            raise StopTraining

    objects = {"tokenizer": tokenizer, "prompts": PROMPTS, "reward": short}
    folder = ppo.train(ppo_args(tmp_path, epochs=9), policy=model_of(tokenizer), **objects, on_step=stop)
    assert [row["step"] for row in metrics(folder)] == [1, 2]
    assert last_checkpoint(folder).name == "checkpoint-000002"


@pytest.mark.slow
@pytest.mark.parametrize("by_parsing", [False, True])
def test_on_step_returns_metrics_and_has_the_rollout_whose_texts_are_decoded_once(
    by_parsing, tokenizer, tmp_path, monkeypatch
):
    """By the reward; the parser, the log of rollouts and on_step read the same texts."""
    decoded, seen, decode = [], [], batch.decode
    monkeypatch.setattr(batch, "decode", lambda *given: decoded.append(given) or decode(*given))
    monkeypatch.setattr(rollout_log, "decode", pytest.fail)

    def on_step(step, metrics, rollout):
        seen.append([text for _, text in rollout.texts])
        return {"own/length": mean(map(len, seen[-1])), "own/twice": torch.tensor(2 * step), "own/none": math.nan}

    how = {"termination_condition": "parsing", "parser": "python"} if by_parsing else {}
    args = ppo_args(tmp_path, max_steps=2, log_rollouts=4, keep_best="max:own/twice", **how)
    objects = {"tokenizer": tokenizer, "prompts": PROMPTS, "reward": short}
    folder = ppo.train(args, policy=model_of(tokenizer), **objects, on_step=on_step)
    assert [row["own/length"] for row in metrics(folder)] == [mean(map(len, texts)) for texts in seen]
    assert [row["own/twice"] for row in metrics(folder)] == [2.0, 4.0] and "own/none" not in metrics(folder)[0]
    assert (folder / "best").resolve().name == "checkpoint-000002"
    rollouts = read_jsonl(folder / "rollouts.jsonl")
    assert sorted(row["response"] for row in rollouts) == sorted(seen[0] + seen[1])
    assert len(decoded) == 2 * 2 * 4  # prompt and response, in two steps of four rows


@pytest.mark.slow
@pytest.mark.parametrize("returned", [3, ["a"], {"a": "b"}])
def test_what_on_step_returns_besides_metrics_is_refused(returned, tokenizer, tmp_path):
    objects = {"tokenizer": tokenizer, "prompts": PROMPTS, "reward": short}
    with error_naming(UsageError, "on_step", str(returned)):
        ppo.train(ppo_args(tmp_path), policy=model_of(tokenizer), **objects, on_step=lambda step, row: returned)


@pytest.mark.slow
def test_a_mistake_of_on_step_comes_out_as_it_is(tokenizer, tmp_path):
    objects = {"tokenizer": tokenizer, "prompts": PROMPTS, "reward": short}
    with pytest.raises(ZeroDivisionError):
        ppo.train(ppo_args(tmp_path), policy=model_of(tokenizer), **objects, on_step=lambda step, row: 1 / 0)


@pytest.mark.parametrize(
    ("program", "args_class", "rows"),
    [(sft, SFTArgs, REPLIES), (rm, RMArgs, PAIRS), (dpo, DPOArgs, PAIRS)],
    ids=["sft", "rm", "dpo"],
)
def test_other_programs_train_on_given_texts(program, args_class, rows, tokenizer, tmp_path):
    args = args_class(log_dir=str(tmp_path), max_steps=2, eval_interval=2, **SMALL)
    given = {"train": rows, "validation": rows[:4]}
    folder = program.train(args, policy=model_of(tokenizer), tokenizer=tokenizer, rows=given)
    assert [row["step"] for row in metrics(folder)] == [1, 2, 2] and "val/loss" in metrics(folder)[-1]
    assert "train: 8 rows, validation: 4 rows" in json.loads((folder / "args.json").read_text())["given"]["rows"]


def test_given_texts_are_the_rows_that_preparation_would_write(cafe_data, tokenizer):
    from lightrlhf.data.rows import load_rows
    from lightrlhf.data.splits import load_split

    prepared = load_split(cafe_data, "preference", "train")[:3]
    texts = []
    for row in prepared:
        start = row["prompt_len"]
        parts = [row["chosen_input_ids"][:start], *(row[f"{s}_input_ids"][start:-1] for s in ("chosen", "rejected"))]
        texts.append(dict(zip(("prompt", "chosen", "rejected"), map(tokenizer.decode, parts))))
    for row, again in zip(prepared, load_rows("preference", "train", "", texts, tokenizer)):
        for side in ("chosen", "rejected"):
            assert again[f"{side}_input_ids"].tolist() == row[f"{side}_input_ids"].tolist()


def test_mistakes_are_exceptions_and_not_exits(tokenizer, tmp_path):
    objects = {"policy": model_of(tokenizer), "tokenizer": tokenizer, "prompts": PROMPTS}
    with error_naming(UsageError, "--reward_function"):
        ppo.train(ppo_args(tmp_path), **objects)
    with error_naming(UsageError, "row 0"):
        ppo.train(ppo_args(tmp_path), **(objects | {"prompts": [{"text": "a"}]}), reward=short)
    with error_naming(UsageError, "policy"):
        ppo.train(ppo_args(tmp_path), prompts=PROMPTS, reward=short)
    with pytest.raises(ValueError, match="--mini_batch_size 6"):
        ppo_args(tmp_path, mini_batch_size=6)
    assert not list(Path(tmp_path).rglob("args.json"))


@pytest.mark.slow
def test_a_folder_and_a_given_model_train_alike(tokenizer, tmp_path):
    """The same weights by name and as an object."""
    folder = save_model("llama", tmp_path / "base", tokenizer)
    tokenizer.save_pretrained(folder)
    objects = {"prompts": PROMPTS, "reward": short}
    by_name = ppo.train(ppo_args(tmp_path, max_steps=2, model_name=str(folder)), **objects)
    by_object = ppo.train(ppo_args(tmp_path, max_steps=2), policy=model_of(tokenizer), tokenizer=tokenizer, **objects)
    assert metrics(by_name) == metrics(by_object)
    assert weights(last_checkpoint(by_name)) == weights(last_checkpoint(by_object))


def test_every_exported_name_is_there():
    for name in lightrlhf.__all__:
        assert getattr(lightrlhf, name) is not None
    with pytest.raises(AttributeError):
        lightrlhf.nothing  # noqa: B018


@pytest.mark.slow
def test_a_stop_at_an_evaluation_of_a_reward_model_is_saved(tokenizer, tmp_path):
    def stop(step, row):
        if "val/loss" in row:
            raise StopTraining

    args = RMArgs(log_dir=str(tmp_path), epochs=9, eval_interval=2, **SMALL)
    given = {"train": PAIRS, "validation": PAIRS[:4]}
    folder = rm.train(args, policy=model_of(tokenizer), tokenizer=tokenizer, rows=given, on_step=stop)
    assert last_checkpoint(folder).name == "checkpoint-000002"


@pytest.mark.slow
def test_a_model_with_adapters_is_refused_and_frozen_weights_are_trained(tokenizer, tmp_path):
    from lightrlhf.cli.groups import ModelArgs
    from lightrlhf.models.given import as_policy, critic_from

    model = model_of(tokenizer)
    as_policy(model, ModelArgs(finetune_mode="last_layer"), tokenizer)
    again = as_policy(model, ModelArgs(), tokenizer)
    assert all(p.requires_grad for p in again.parameters())
    as_policy(model, ModelArgs(finetune_mode="lora"), tokenizer)
    with error_naming(UsageError, "adapters"):
        as_policy(model, ModelArgs(finetune_mode="lora"), tokenizer)
    half = as_policy(model_of(tokenizer).to(torch.bfloat16), ModelArgs(), tokenizer)
    state = torch.get_rng_state()
    critic = critic_from(half, ModelArgs(), seed=0)
    assert {p.dtype for p in [*half.parameters(), *critic.parameters()]} == {torch.float32}
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.slow
def test_an_infinite_reward_is_clipped_and_trained_on(tokenizer, tmp_path):
    def reward(prompts, completions, **columns):
        return [-float("inf"), 1.0, 2.0, float("inf")][: len(prompts)]

    args = ppo_args(tmp_path, max_steps=1, reward_clip_value=3.0)
    folder = ppo.train(args, policy=model_of(tokenizer), tokenizer=tokenizer, prompts=PROMPTS, reward=reward)
    assert metrics(folder)[0]["objective/score"] == pytest.approx((-3 + 1 + 2 + 3) / 4)


def test_given_rows_are_hashed_whatever_holds_them():
    from lightrlhf.training.provenance import describe_given

    class Rows:
        def __init__(self, *rows):
            self.rows = rows

        def __len__(self):
            return len(self.rows)

        def __getitem__(self, index):
            return self.rows[index]

    one, same, other = ({"train": Rows(*rows)} for rows in (PAIRS, PAIRS, PAIRS[1:] + PAIRS[:1]))
    assert describe_given(rows=one) == describe_given(rows=same) != describe_given(rows=Rows(*PAIRS[:3], PAIRS[0]))
    assert describe_given(rows=Rows(*REPLIES)) != describe_given(rows=Rows(*REPLIES[:-1], {"prompt": "x"}))


def test_a_run_of_given_objects_is_not_resumed_from_the_command_line(tokenizer, tmp_path, capsys):
    objects = {"tokenizer": tokenizer, "prompts": PROMPTS, "reward": short}
    folder = ppo.train(ppo_args(tmp_path, max_steps=1), policy=model_of(tokenizer), **objects)
    error = refused(capsys, ppo.main, "--resume_from", folder)
    assert "from Python" in error and "prompts" in error


@pytest.mark.parametrize(
    ("changes", "fact"),
    [
        ({"finetune_mode": "qlora"}, "--finetune_mode qlora"),
        ({"normalize_advantages": "False"}, "--normalize_advantages 'False'"),
        ({"max_steps": "2"}, "--max_steps '2'"),
        ({"rollout_size": 64.0}, "--rollout_size 64.0"),
        ({"epochs": True}, "--epochs True"),
        ({"actor_learning_rate": "1e-4"}, "--actor_learning_rate '1e-4'"),
        ({"model_name": 3}, "--model_name 3"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_fields_of_another_type_are_refused(changes, fact):
    with error_naming(ValueError, fact):
        PPOArgs(**changes)


def test_a_path_is_stored_as_a_text(tmp_path):
    assert PPOArgs(log_dir=tmp_path).log_dir == str(tmp_path)


class Frame(dict):
    """A table whose iteration yields the names of its columns, as of a DataFrame."""

    def iterrows(self):
        return iter(self.items())


@pytest.mark.parametrize(
    ("objects", "facts"),
    [
        ({"prompts": PROMPTS[0]}, ["prompts", "str"]),
        ({"prompts": 5}, ["prompts", "int"]),
        ({"prompts": Frame(prompt=PROMPTS)}, ["Frame", ".to_dict"]),
        ({"prompts": {"train": "abc"}}, ["'train'"]),
        ({"prompts": [PROMPTS[0], None]}, ["row 1", "NoneType"]),
        ({"prompts": [""]}, ["row 0", "prompt"]),
        ({"prompts": [[{"rolle": "user", "content": "Tea"}]]}, ["row 0", "role"]),
        ({"prompts": [[{"role": "user", "content": "Tea"}]]}, ["row 0", "template"]),
        ({"reward": "module:name"}, ["reward", "str"]),
        ({"reward": lambda prompts, completions: [0.0]}, ["reward", "**columns"]),
        ({"on_step": "print"}, ["on_step", "str"]),
        ({"policy": "some/folder"}, ["policy", "some/folder", "--model_name"]),
        ({"tokenizer": "some/folder"}, ["tokenizer", "str"]),
        ({"args": {"sft_experiment_dir": "x"}}, ["--sft_experiment_dir x", "policy"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_objects_that_cannot_work_are_refused_before_anything_is_written(objects, facts, tokenizer, tmp_path):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = None
    args = ppo_args(tmp_path, **objects.get("args", {}))
    given = {"tokenizer": tokenizer, "prompts": PROMPTS, "reward": short, "policy": model_of(tokenizer)} | objects
    given.pop("args", None)
    with error_naming(UsageError, *facts):
        ppo.train(args, **given)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("column", ["chosen", "rejected"])
def test_a_preference_row_of_messages_is_refused(column, tokenizer, tmp_path):
    rows = [PAIRS[0], {**PAIRS[1], column: [{"role": "assistant", "content": "No."}]}]
    with error_naming(UsageError, "row 1", column, "list"):
        dpo.train(DPOArgs(log_dir=str(tmp_path), **SMALL), policy=model_of(tokenizer), tokenizer=tokenizer, rows=rows)


@pytest.mark.slow
def test_a_given_tokenizer_without_pad_token_pads_with_its_end_token(tokenizer, tmp_path):
    model, tokenizer = model_of(tokenizer), copy.deepcopy(tokenizer)
    tokenizer.pad_token = None
    folder = sft.train(
        SFTArgs(log_dir=str(tmp_path), max_steps=1, **SMALL), policy=model, tokenizer=tokenizer, rows=REPLIES
    )
    assert metrics(folder) and tokenizer.pad_token_id == tokenizer.eos_token_id
    tokenizer.eos_token = None
    with error_naming(UsageError, "tokenizer", "eos_token"):
        sft.train(SFTArgs(log_dir=str(tmp_path), **SMALL), policy=model, tokenizer=tokenizer, rows=REPLIES)


def shifted(tokenizer, folder: Path):
    """A tokenizer with the same tokens under other ids."""
    from transformers import AutoTokenizer

    tokenizer.save_pretrained(folder)
    stored = json.loads((folder / "tokenizer.json").read_text())
    first, second = list(stored["model"]["vocab"])[-2:]
    vocab = stored["model"]["vocab"]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (folder / "tokenizer.json").write_text(json.dumps(stored))
    return AutoTokenizer.from_pretrained(folder)


def test_a_given_tokenizer_with_other_ids_than_the_data_is_refused(cafe_data, tokenizer, tmp_path):
    args = SFTArgs(log_dir=str(tmp_path / "logs"), data_dir=str(cafe_data), **SMALL)
    other = shifted(tokenizer, tmp_path / "other")
    with error_naming(UsageError, "tokenizer"):
        sft.train(args, policy=model_of(tokenizer), tokenizer=other)


def test_a_given_policy_with_a_tokenizer_of_other_ids_is_refused(cafe_data, tokenizer, tmp_path):
    from transformers import AutoModelForCausalLM

    model_of(tokenizer).save_pretrained(tmp_path / "model")
    shifted(tokenizer, tmp_path / "model")
    policy = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    args = SFTArgs(log_dir=str(tmp_path / "logs"), data_dir=str(cafe_data), **SMALL)
    with error_naming(UsageError, "policy", "token ids"):
        sft.train(args, policy=policy)


def test_a_bad_response_is_no_target(tokenizer, tmp_path):
    rows = [{**row, "label": i > 0} for i, row in enumerate(REPLIES)]
    with error_naming(UsageError, "row 0", "label False"):
        sft.train(SFTArgs(log_dir=str(tmp_path), **SMALL), policy=model_of(tokenizer), tokenizer=tokenizer, rows=rows)
