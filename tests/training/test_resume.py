"""What `resume.pt` holds: the trained weights that a checkpoint's own files lack, and no others."""

import shutil
from pathlib import Path

import pytest
import torch
from helpers import CPU, last_checkpoint, metrics, reseal, run_program, tiny_model, weights
from safetensors.torch import load_file, save_file

from lightrlhf import ppo, rm, sft
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
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["all", "last_layer", "lora"])
def test_weights_that_the_folder_holds_are_not_written_twice(mode, cafe_data, base_model, tmp_path):
    run = sft.main(flags_of(cafe_data, base_model, tmp_path, "--finetune_mode", mode))
    state = state_of(run)
    assert state["learned"] == {"policy": {}} and len(state["stored"]["policy"]) > 3
    assert is_bitwise(sft.main, run)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["all", "lora"])
def test_nor_those_of_a_reward_model_with_its_head(mode, cafe_data, base_model, tmp_path):
    run = rm.main(flags_of(cafe_data, base_model, tmp_path, "--finetune_mode", mode))
    state = state_of(run)
    assert state["learned"] == {"reward": {}}
    assert any(key.endswith("score.weight") for key in state["stored"]["reward"].values())
    assert is_bitwise(rm.main, run)


@pytest.mark.slow
def test_a_critic_that_no_folder_holds_stays(cafe_data, base_model, tmp_path):
    run = ppo.main(flags_of(cafe_data, base_model, tmp_path, *PPO))
    state = state_of(run)
    assert not state["learned"]["policy"] and "model.score.weight" in state["learned"]["critic"]
    assert is_bitwise(ppo.main, run)


@pytest.mark.slow
def test_an_adapter_that_is_joined_with_an_earlier_one_stays(cafe_data, base_model, tmp_path):
    lora = ["--finetune_mode", "lora", "--max_steps", "2", "--learning_rate", "1e-2"]
    first = sft.main(flags_of(cafe_data, base_model, tmp_path / "first", *lora))
    state = state_of(sft.main(flags_of(cafe_data, first, tmp_path / "second", *lora)))
    assert state["learned"]["policy"] and not state["stored"]["policy"]


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


@pytest.mark.slow
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
