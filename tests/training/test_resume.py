"""What `resume.pt` holds: the trained weights that a checkpoint's own files lack, and no others."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from helpers import CPU, last_checkpoint, metrics, reseal, run_program, tiny_model, weights
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from lightrlhf import grpo, ppo, rm, sft
from lightrlhf.cli.groups import ModelArgs
from lightrlhf.models.loading import load_policy
from lightrlhf.models.rounding import rounded_copy
from lightrlhf.models.saving import export_for_servers, self_contained
from lightrlhf.models.tokenizer import load_tokenizer
from lightrlhf.training.resume import read_checkpoint, with_stored, without_stored

PPO = ["--reward_function", "helpers.rewards:length", "--rollout_size", "8", "--mini_batch_size", "8", "--epochs", "9"]
PPO += ["--max_new_tokens", "5", "--actor_learning_rate", "1e-3", "--critic_learning_rate", "1e-3", "--ppo_epochs", "2"]


def flags_of(cafe_data, model, log_dir, *more: str) -> list[str]:
    flags = ["--data_dir", str(cafe_data), "--model_name", str(model), "--log_dir", str(log_dir), *CPU]
    flags += ["--save_interval", "2", "--log_interval", "1", "--max_steps", "4", "--keep_last", "0"]
    return [*flags, "--eval_interval", "0", *more]


def state_of(run: str | Path) -> dict:
    return torch.load(last_checkpoint(run) / "resume.pt", weights_only=True)


def is_bitwise(main, run: str) -> bool:
    """Whether the run ends as it did when it goes on from its first checkpoint alone."""
    expected, rows, state = weights(last_checkpoint(run)), metrics(run), read_checkpoint(last_checkpoint(run))[0]
    assert state is not None
    state = {name: {key: value.clone() for key, value in own.items()} for name, own in state["learned"].items()}
    for later in sorted(Path(run).glob("checkpoint-*"))[1:]:
        shutil.rmtree(later)
    main(["--resume_from", run])
    learned = read_checkpoint(last_checkpoint(run))[0]["learned"]  # type: ignore[index]
    same = all(torch.equal(value, learned[name][key]) for name, own in state.items() for key, value in own.items())
    return same and weights(last_checkpoint(run)) == expected and metrics(run) == rows


# ------------------------------------------------------------------------------------------------------ what is stored
@pytest.mark.parametrize("mode", ["all", "last_layer", "lora"])
def test_weights_that_the_folder_holds_are_not_written_twice(mode, cafe_data, base_model, tmp_path):
    run = sft.main(flags_of(cafe_data, base_model, tmp_path, "--finetune_mode", mode))
    state = state_of(run)
    assert state["learned"] == {"policy": {}} and len(state["stored"]["policy"]) > 3
    assert is_bitwise(sft.main, run)


@pytest.mark.parametrize("mode", ["all", "lora"])
def test_nor_those_of_a_reward_model_with_its_head(mode, cafe_data, base_model, tmp_path):
    run = rm.main(flags_of(cafe_data, base_model, tmp_path, "--finetune_mode", mode))
    state = state_of(run)
    assert state["learned"] == {"reward": {}}
    assert any(key.endswith("score.weight") for key in state["stored"]["reward"].values())
    assert is_bitwise(rm.main, run)


def test_a_critic_that_no_folder_holds_stays(cafe_data, base_model, tmp_path):
    run = ppo.main(flags_of(cafe_data, base_model, tmp_path, *PPO))
    state = state_of(run)
    assert not state["learned"]["policy"] and "model.score.weight" in state["learned"]["critic"]
    assert is_bitwise(ppo.main, run)


def test_an_adapter_that_is_joined_with_an_earlier_one_stays(cafe_data, base_model, tmp_path):
    lora = ["--finetune_mode", "lora", "--max_steps", "2", "--learning_rate", "1e-2"]
    first = sft.main(flags_of(cafe_data, base_model, tmp_path / "first", *lora))
    state = state_of(sft.main(flags_of(cafe_data, first, tmp_path / "second", *lora)))
    assert state["learned"]["policy"] and not state["stored"]["policy"]


def test_merged_weights_leave_the_adapter_in_the_state(cafe_data, base_model, tmp_path):
    more = ["--finetune_mode", "lora", "--merge", "True", "--learning_rate", "1e-2"]
    run = sft.main(flags_of(cafe_data, base_model, tmp_path, *more))
    assert state_of(run)["learned"]["policy"] and is_bitwise(sft.main, run)


def test_weights_are_found_in_shards_by_their_bits_under_any_name(tmp_path):
    model = tiny_model("gpt2")  # its head is tied
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    learned = {"one": {f"renamed.{name}": value.detach() for name, value in model.named_parameters()}}
    rest, places = without_stored(learned, tmp_path)
    assert rest == {"one": {}} and len(places["one"]) == len(learned["one"])
    again = with_stored(rest, places, tmp_path)["one"]
    assert all(torch.equal(again[name], value) for name, value in learned["one"].items())


def test_only_the_same_bits_and_dtype_count_as_stored(tmp_path):
    values = torch.arange(64.0) - 5
    save_file({"a": values, "half": torch.ones(3).half()}, tmp_path / "model.safetensors")
    close, negative = values.clone(), values.clone()
    close[6] = torch.nextafter(close[6], torch.tensor(9.0))  # none of the values that are looked at first
    negative[5] = -0.0
    learned = {"same": values, "close": close, "-0": negative, "float32": torch.ones(3), "wide": values[None]}
    rest, places = without_stored({"one": learned}, tmp_path)
    assert places == {"one": {"same": "a"}} and list(rest["one"]) == ["close", "-0", "float32", "wide"]


def test_a_folder_that_lost_a_weight_is_not_resumed_from(cafe_data, base_model, tmp_path, capsys):
    run = sft.main(flags_of(cafe_data, base_model, tmp_path))
    last = last_checkpoint(run)
    stored = load_file(last / "model.safetensors")
    del stored["model.norm.weight"]
    save_file(stored, last / "model.safetensors", metadata={"format": "pt"})
    reseal(last)
    assert read_checkpoint(last) == (None, "resume.pt cannot be read: KeyError")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_ranks_store_and_resume_the_same_way(strategy, cafe_data, base_model, tmp_path):
    more = ["--devices", "2", "--strategy", strategy, "--mini_batch_size", "4", "--micro_batch_size", "4"]
    run_program("lightrlhf.sft", *flags_of(cafe_data, base_model, tmp_path, *more))
    (args,) = tmp_path.rglob("args.json")
    assert state_of(args.parent)["learned"] == {"policy": {}}
    assert is_bitwise(lambda flags: run_program("lightrlhf.sft", *flags), str(args.parent))


# --------------------------------------------------------------------------------------------------------- save_dtype
def dtypes(file: Path) -> set[str]:
    with safe_open(file, framework="pt") as stored:
        return {stored.get_slice(key).get_dtype() for key in stored.keys()}


@pytest.mark.parametrize("dtype, kind", [("bfloat16", "BF16"), ("float16", "F16")])
@pytest.mark.parametrize("program", [sft, ppo])
def test_a_rounded_folder_and_a_run_that_goes_on_exactly(program, dtype, kind, cafe_data, base_model, tmp_path):
    from transformers import AutoModelForCausalLM

    more = [*(PPO if program is ppo else []), "--save_dtype", dtype]
    run = program.main(flags_of(cafe_data, base_model, tmp_path, *more))
    last = last_checkpoint(run)
    assert dtypes(last / "model.safetensors") == {kind}
    assert json.loads((last / "config.json").read_text())["dtype"] == dtype
    learned = state_of(run)["learned"]["policy"]
    rounded = AutoModelForCausalLM.from_pretrained(last).state_dict()
    assert learned and all(value.dtype == torch.float32 for value in learned.values())
    assert all(torch.equal(v.to(getattr(torch, dtype)), rounded[k.removeprefix("model.")]) for k, v in learned.items())
    assert is_bitwise(program.main, run)


def test_the_trained_weights_are_those_of_a_run_that_is_not_rounded(cafe_data, base_model, tmp_path):
    plain, rounded = (
        sft.main(flags_of(cafe_data, base_model, tmp_path / dtype, "--save_dtype", dtype))
        for dtype in ("float32", "bfloat16")
    )
    one, other = (read_checkpoint(last_checkpoint(run))[0]["learned"]["policy"] for run in (plain, rounded))
    assert all(torch.equal(one[name], other[name]) for name in one) and metrics(plain) == metrics(rounded)
    sft.main(["--resume_from", rounded, "--save_dtype", "float32", "--max_steps", "6"])  # as exact as if never rounded
    sft.main(["--resume_from", plain, "--max_steps", "6"])
    assert weights(last_checkpoint(rounded)) == weights(last_checkpoint(plain))


def test_adapters_and_heads_are_rounded_and_their_base_is_not(cafe_data, tmp_path):
    more = ["--finetune_mode", "lora", "--save_dtype", "bfloat16", "--learning_rate", "1e-2"]
    run = rm.main(flags_of(cafe_data, "tiny", tmp_path, *more))
    last = last_checkpoint(run)
    assert dtypes(last / "adapter_model.safetensors") == {"BF16"} and "base_model.model.score.weight" in load_file(
        last / "adapter_model.safetensors"
    )
    assert dtypes(Path(run) / "base" / "model.safetensors") == {"F32"}
    assert is_bitwise(rm.main, run)
    scored = grpo.main(  # the next stage reads them as float32
        ["--data_dir", str(cafe_data), "--model_name", "tiny", "--rm_experiment_dir", run, *CPU, "--max_steps", "1"]
        + ["--log_dir", str(tmp_path / "grpo"), "--rollout_size", "4", "--num_generations", "2", "--eval_interval", "0"]
        + ["--mini_batch_size", "4", "--micro_batch_size", "4", "--max_new_tokens", "3"]
    )
    assert dtypes(last_checkpoint(scored) / "model.safetensors") == {"F32"}


def test_tied_weights_stay_tied_and_the_model_stays_as_it_is(tmp_path):
    model = tiny_model("gpt2")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    copied = rounded_copy(model, torch.bfloat16)
    assert copied.lm_head.weight is copied.transformer.wte.weight
    copied.save_pretrained(tmp_path)
    assert dtypes(tmp_path / "model.safetensors") == {"BF16"}
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert rounded_copy(model, torch.float32) is model


def test_a_merged_upload_is_rounded_and_weights_for_servers_are_not(cafe_data, tmp_path):
    more = ["--finetune_mode", "lora", "--save_dtype", "bfloat16", "--max_steps", "2"]
    last = last_checkpoint(sft.main(flags_of(cafe_data, "tiny", tmp_path, *more)))
    with self_contained(last, torch.bfloat16) as folder:
        assert dtypes(folder / "model.safetensors") == {"BF16"}
    policy = load_policy(str(last), ModelArgs(finetune_mode="lora"), load_tokenizer(cafe_data))
    assert {p.dtype for p in policy.parameters()} == {torch.float32}
    for name in ("merged", "adapter"):
        (tmp_path / name).mkdir()
        export_for_servers(policy, tmp_path / name, tmp_path / "base", as_adapter=name == "adapter")
        assert dtypes(next((tmp_path / name).glob("*.safetensors"))) == {"F32"}


def test_a_value_beyond_float16_is_refused_and_named(cafe_data, base_model, tmp_path, capsys):
    large = shutil.copytree(base_model, tmp_path / "large")
    stored = load_file(large / "model.safetensors")
    stored["model.norm.weight"][3] = 70000.0
    save_file(stored, large / "model.safetensors", metadata={"format": "pt"})
    more = ["--save_dtype", "float16", "--learning_rate", "1e-9"]
    with pytest.raises(SystemExit) as stop:
        sft.main(flags_of(cafe_data, large, tmp_path / "logs", *more))
    line = capsys.readouterr().err.partition("error: ")[2]  # after a progress bar
    assert stop.value.code == 1 and line.count("\n") == 1
    assert "--save_dtype float16: model.norm.weight has the value 70000, beyond 65504" in line
    assert "use --save_dtype float32 or bfloat16" in line
    assert not list((tmp_path / "logs").rglob("*checkpoint-*"))
