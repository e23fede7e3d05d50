"""A model whose tensors are not all there is refused by the first one's name; tensors without a place are named."""

import json
import shutil

import pytest
import torch
from helpers import CPU, save_model, tiny_model, tiny_policy
from helpers.errors import error_naming, refused
from helpers.trained import train_a_little
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BertConfig, BertLMHeadModel, MixtralConfig, MixtralForCausalLM

from lightrlhf import sft
from lightrlhf.cli.errors import UsageError
from lightrlhf.cli.groups import ModelArgs
from lightrlhf.models.complete import note_unread
from lightrlhf.models.given import critic_from
from lightrlhf.models.loading import load_policy, load_scalar
from lightrlhf.models.saving import export
from lightrlhf.training.resume import load_trained, trained_weights

FILE, KEY = "model.safetensors", "model.layers.1.self_attn.q_proj.weight"
LORA = ModelArgs(finetune_mode="lora")


def change(folder, edit, file: str = FILE):
    """The folder, with the tensors of a file edited."""
    tensors = load_file(folder / file)
    edit(tensors)
    save_file(tensors, folder / file, {"format": "pt"})
    return folder


def remove(key: str):
    return lambda tensors: tensors.pop(key)


def without(key: str):
    return lambda folder: change(folder, remove(key))


def renamed(folder):
    return change(folder, lambda tensors: tensors.update({f"other.{KEY}": tensors.pop(KEY)}))


def reshaped(folder):
    return change(folder, lambda tensors: tensors.update({KEY: torch.zeros(3, 3)}))


def sharded(folder):
    """The folder in shards, and the shard of `KEY`."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    (folder / FILE).unlink()
    model.save_pretrained(folder, max_shard_size="20KB")
    index = json.loads((folder / f"{FILE}.index.json").read_text())
    return index, index["weight_map"][KEY]


def without_in_its_shard(folder):
    _, shard = sharded(folder)
    return change(folder, remove(KEY), shard)


def without_in_its_index(folder):
    index, shard = sharded(folder)
    del index["weight_map"][KEY]
    (folder / f"{FILE}.index.json").write_text(json.dumps(index))
    return change(folder, remove(KEY), shard)


def pickled(folder):
    tensors = load_file(folder / FILE)
    del tensors[KEY]
    torch.save(tensors, folder / "pytorch_model.bin")
    (folder / FILE).unlink()
    return folder


@pytest.fixture
def copied(base_model, tmp_path):
    return shutil.copytree(base_model, tmp_path / "model")


DAMAGES = {
    "missing": (without(KEY), FILE, KEY),
    "renamed": (renamed, FILE, KEY, f"other.{KEY}"),
    "reshaped": (reshaped, FILE, KEY, "3 x 3", "32 x 32"),
    "shard": (without_in_its_shard, "model-0000", KEY),
    "index": (without_in_its_index, f"{FILE}.index.json", KEY),
    "pickle": (pickled, "pytorch_model.bin", KEY),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_model_that_is_not_whole_is_refused_in_each_role(damage, copied, tokenizer):
    break_it, *facts = DAMAGES[damage]
    folder = str(break_it(copied))
    for load in (load_policy, lambda *given: load_scalar(*given[:3], 0, given[3])):
        for args in (ModelArgs(), LORA):
            with error_naming(UsageError, f"--ref_model {folder}", *facts):
                load(folder, args, tokenizer, "--ref_model")


def test_an_untied_output_layer_is_no_tensor_that_may_be_missing(copied, tokenizer):
    folder = str(without("lm_head.weight")(copied))
    with error_naming(UsageError, "lm_head.weight"):
        load_policy(folder, ModelArgs(), tokenizer)
    load_scalar(folder, ModelArgs(), tokenizer, 0)


@pytest.mark.parametrize("architecture, key", [("llama", "lm_head.weight"), ("gpt2", "lm_head.weight")])
def test_a_tied_output_layer_need_not_be_stored(architecture, key, tokenizer, tmp_path, capsys):
    folder = save_model(architecture, tmp_path / "tied", tokenizer, tie_word_embeddings=True)
    assert key not in load_file(folder / FILE)
    load_policy(str(folder), ModelArgs(), tokenizer)
    load_scalar(str(folder), ModelArgs(), tokenizer, 0)
    assert capsys.readouterr().out == ""


def test_an_architecture_with_another_head_is_refused_as_such(tokenizer, tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    BertLMHeadModel(BertConfig(vocab_size=len(tokenizer), is_decoder=True, **sizes)).save_pretrained(tmp_path)
    with error_naming(UsageError, "bert", "reward model"):
        load_scalar(str(tmp_path), ModelArgs(), tokenizer, 0)


def test_quantised_weights_are_drawn_of_no_missing_tensor(copied, tokenizer):
    pytest.importorskip("bitsandbytes")
    with error_naming(UsageError, KEY):
        load_policy(str(without(KEY)(copied)), ModelArgs(finetune_mode="lora", load_in_4bit=True), tokenizer)


def test_a_missing_expert_is_no_expert_less(tokenizer, tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = MixtralConfig(vocab_size=len(tokenizer), num_key_value_heads=2, num_local_experts=2, **sizes)
    MixtralForCausalLM(config).save_pretrained(tmp_path)
    key = next(key for key in load_file(tmp_path / FILE) if "experts.1." in key)
    with error_naming(UsageError, "intact copy"):
        load_policy(str(without(key)(tmp_path)), ModelArgs(), tokenizer)


@pytest.mark.parametrize("mode", ["all", "lora"])
def test_a_reward_model_without_its_head_is_refused(mode, base_model, tokenizer, tmp_path):
    reward = load_scalar(str(base_model), ModelArgs(finetune_mode=mode), tokenizer, seed=0)
    train_a_little(reward)
    folder = tmp_path / "reward"
    folder.mkdir()
    export(reward, folder, tmp_path / "base")
    file = FILE if mode == "all" else "adapter_model.safetensors"
    change(folder, remove("score.weight" if mode == "all" else "base_model.model.score.weight"), file)
    with error_naming(UsageError, "score.weight" if mode == "all" else "head"):
        load_scalar(str(folder), ModelArgs(), tokenizer, 0, "--rm_experiment_dir", needs_head=True)


def test_tensors_without_a_place_are_named_once(copied, tokenizer, capsys):
    change(copied, lambda tensors: tensors.update({f"v_head.{i}": torch.zeros(2) for i in range(5)}))
    note_unread.cache_clear()
    for _ in range(2):
        load_policy(str(copied), ModelArgs(), tokenizer)
    out = capsys.readouterr().out
    assert out.count("\n") == 1 and "no place for 5 of its tensors: v_head.0, v_head.1, v_head.2 and 2 more" in out
    config = json.loads((copied / "config.json").read_text()) | {"num_hidden_layers": 1}
    (copied / "config.json").write_text(json.dumps(config))
    load_scalar(str(copied), ModelArgs(), tokenizer, 0)
    out = capsys.readouterr().out
    assert "model.layers.1.input_layernorm.weight" in out and "v_head" not in out  # heads of other tasks are expected


def test_buffers_of_older_releases_need_no_note(tokenizer, tmp_path, capsys):
    folder = save_model("gpt2", tmp_path / "gpt2", tokenizer)
    old = {"transformer.h.0.attn.masked_bias": torch.tensor(-1e4), "transformer.h.0.attn.bias": torch.ones(1, 1, 4, 4)}
    change(folder, lambda tensors: tensors.update(old))
    load_policy(str(folder), ModelArgs(), tokenizer)
    assert capsys.readouterr().out == ""


def test_a_program_ends_before_it_trains_on_random_weights(cafe_data, copied, tmp_path, capsys):
    flags = ["--data_dir", str(cafe_data), "--log_dir", str(tmp_path / "logs"), *CPU, "--max_steps", "1"]
    assert KEY in refused(capsys, sft.main, *flags, "--model_name", str(without(KEY)(copied)))
    assert not list((tmp_path / "logs").rglob("checkpoint-*"))


def test_a_critic_of_a_given_policy_has_no_random_layer():
    policy = tiny_policy("llama")
    policy.model.model.layers = policy.model.model.layers[:1]  # and the config still says two
    with error_naming(UsageError, "policy", "model.layers.1."):
        critic_from(policy, ModelArgs(), 0)


def test_a_resumed_run_has_all_its_trained_weights():
    module = tiny_model("llama")
    weights = trained_weights(module)
    del weights[KEY]
    with error_naming(UsageError, "--resume_from run", KEY):
        load_trained(weights, module, "run")


class Code:
    """An object whose pickle would write a file."""

    def __init__(self, file) -> None:
        self.file = file

    def __reduce__(self):
        return open, (str(self.file), "w")


@pytest.fixture
def adapter(base_model, tokenizer, tmp_path):
    """The folder of an adapter, and its weights, which the folder lacks."""
    policy = load_policy(str(base_model), LORA, tokenizer)
    train_a_little(policy)
    folder = tmp_path / "adapter"
    folder.mkdir()
    export(policy, folder, tmp_path / "base")
    stored = load_file(folder / "adapter_model.safetensors")
    (folder / "adapter_model.safetensors").unlink()
    return folder, stored


def test_an_adapter_as_a_pickle_of_tensors_is_read(adapter, tokenizer):
    folder, stored = adapter
    save_file(stored, folder / "adapter_model.safetensors", {"format": "pt"})
    expected = load_policy(str(folder), ModelArgs(), tokenizer).model.state_dict()
    (folder / "adapter_model.safetensors").unlink()
    torch.save(stored, folder / "adapter_model.bin")
    found = load_policy(str(folder), ModelArgs(), tokenizer).model.state_dict()
    assert all(torch.equal(value, found[key]) for key, value in expected.items())


@pytest.mark.parametrize(
    "content, told",
    [
        ("code", "more than tensors"),
        ("bytes", "cannot be read"),
        ("list", "cannot be read"),
        ("strings", "does not fit its base"),
        ("nothing", "without its weights"),
    ],
)
def test_an_adapter_as_another_pickle_is_one_line(content, told, adapter, cafe_data, tmp_path, capfd):
    folder, stored = adapter
    file = folder / "adapter_model.bin"
    if content == "bytes":
        file.write_bytes(b"hello")
    elif content != "nothing":
        held = {"code": stored | {"x": Code(tmp_path / "ran")}, "list": [1, 2], "strings": dict.fromkeys(stored, "x")}
        torch.save(held[content], file)
    with pytest.raises(SystemExit) as ended:
        sft.main(["--data_dir", str(cafe_data), "--log_dir", str(tmp_path), *CPU, "--model_name", str(folder)])
    told_lines = [line for line in capfd.readouterr().err.splitlines() if line.strip()]
    assert ended.value.code == 2 and len(told_lines) == 1 and told in told_lines[0] and str(folder) in told_lines[0]
    assert not (tmp_path / "ran").exists()
