"""lightrlhf.export: what it writes is the model it was made of, and what is not is not kept."""

import json

import pytest
import torch
from helpers import CPU, save_model, tiny_model
from helpers.data import CHATML_TEMPLATE, byte_level, gpt2_like, llama3_like, sentencepiece_like
from helpers.errors import error_naming, refused
from helpers.go_template import render as render_go
from helpers.templates import ZOO
from helpers.trained import tied_adapter
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

from lightrlhf import export, sft
from lightrlhf.cli.errors import RunFailure, UsageError
from lightrlhf.cli.groups import ModelArgs
from lightrlhf.data.rendering import render
from lightrlhf.gguf import tokens, writer
from lightrlhf.gguf.modelfile import chat_texts
from lightrlhf.models import export_check, lora
from lightrlhf.models.loading import load_policy
from lightrlhf.models.tokenizer import load_tokenizer
from lightrlhf.storage.seals import damage

TYPES = tuple(writer.FILE_TYPES)
IDS = torch.arange(2, 30)[None]


@pytest.fixture(autouse=True)
def _a_cache_of_its_own(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("LIGHTRLHF_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="session")
def cafe_model(tmp_path_factory, tokenizer):
    """A folder of a tiny Llama with the café's tokenizer."""
    folder = save_model("llama", tmp_path_factory.mktemp("export") / "barista", tokenizer, hidden_size=64)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def lora_dir(cafe_data, base_model, tmp_path_factory):
    """The experiment dir of two SFT steps with LoRA."""
    flags = ["--max_steps", "2", "--lr_warmup_steps", "0", "--learning_rate", "1e-2", "--finetune_mode", "lora"]
    flags += ["--log_dir", str(tmp_path_factory.mktemp("lora")), *CPU]
    return sft.main(["--data_dir", str(cafe_data), "--model_name", str(base_model), *flags])


def exported(model, kind: str, folder, *flags: str):
    """The folder of an export; its files are sealed."""
    target = folder / "out"
    assert export.main([str(model), "--to", kind, "--destination_dir", str(target), *flags]) == str(target)
    assert damage(target) is None and not list(folder.glob(".*"))
    return target


def logits_of(model, ids=IDS):
    with torch.no_grad():
        return model.eval()(ids).logits


def stored(tokenizer, architecture: str, folder, **changes):
    """A folder of a tiny model with a tokenizer of its own."""
    save_model(architecture, folder, tokenizer, **changes)
    tokenizer.save_pretrained(folder)
    return folder


def read(file):
    return AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)


# ------------------------------------------------------------------------------------------------------------- folders
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_merged_weights_in_each_type(dtype, cafe_model, tmp_path, capsys):
    folder = exported(cafe_model, "merged", tmp_path, "--dtype", dtype)
    model, source = (AutoModelForCausalLM.from_pretrained(one) for one in (folder, cafe_model))
    assert model.dtype == getattr(torch, dtype) and (folder / "README.md").is_file()
    for one, other in zip(model.parameters(), source.parameters()):
        assert torch.equal(one, other.to(model.dtype))
    mine, own = (AutoTokenizer.from_pretrained(one) for one in (folder, cafe_model))
    assert mine.chat_template == own.chat_template
    printed = capsys.readouterr().out
    assert "model.safetensors" in printed and f"wrote {folder}" in printed


def test_safetensors_bf16_is_merged_in_bfloat16(cafe_model, tmp_path):
    folder = exported(cafe_model, "safetensors-bf16", tmp_path)
    assert AutoModelForCausalLM.from_pretrained(folder).dtype == torch.bfloat16


@pytest.mark.slow
def test_the_adapter_of_a_run_is_merged_or_exported_for_the_hub(lora_dir, tmp_path):
    tokenizer = load_tokenizer(None, str(lora_dir))
    source = logits_of(load_policy(str(lora_dir), ModelArgs(), tokenizer).model)
    merged = exported(lora_dir, "merged", tmp_path)
    assert torch.equal(logits_of(AutoModelForCausalLM.from_pretrained(merged)), source)
    adapter = exported(lora_dir, "adapter", tmp_path / "adapter")
    assert torch.allclose(logits_of(AutoModelForCausalLM.from_pretrained(adapter)), source, atol=1e-4)
    names = {path.name for path in adapter.iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "README.md"} <= names
    assert "resume.pt" not in names and "model.safetensors" not in names
    file = next(exported(lora_dir, "gguf", tmp_path / "gguf", "--gguf_type", "f32").glob("*.gguf"))
    assert torch.allclose(logits_of(read(file)), source, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["merged", "gguf"])
def test_an_adapter_on_a_tied_output_layer_is_exported_whole(kind, tokenizer, tmp_path, monkeypatch):
    policy, folder = tied_adapter("llama", tmp_path, tokenizer)
    flags = ["--gguf_type", "f32"] if kind == "gguf" else []
    out = exported(folder, kind, tmp_path, *flags)
    model = read(next(out.glob("*.gguf"))) if kind == "gguf" else AutoModelForCausalLM.from_pretrained(out)
    assert torch.allclose(logits_of(model), logits_of(policy.model), atol=1e-4)
    monkeypatch.setattr(lora, "untie", lambda model, layer: None)  # as if a merge changed the embedding
    with error_naming(RunFailure, "logits"):
        export.run(export.ExportArgs(model_name=str(folder), to=kind, destination_dir=str(tmp_path / "doubled")))


def test_an_adapter_can_name_its_base_on_the_hub(lora_dir, tmp_path):
    folder = exported(lora_dir, "adapter", tmp_path, "--base_model_name", "somebody/base")
    assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] == "somebody/base"
    assert "base_model: somebody/base" in (folder / "README.md").read_text()


def test_a_run_gets_its_export_by_default(lora_dir):
    folder = export.main([str(lora_dir), "--to", "safetensors-bf16"])
    assert folder == f"{lora_dir}/export/rlhf-supervised-finetuning-000002-merged-bfloat16"


def test_a_reward_model_is_merged_and_no_gguf(rm_dir, tmp_path, capsys):
    folder = exported(rm_dir, "merged", tmp_path)
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    assert model.config.num_labels == 1 and model.config.pad_token_id is not None
    line = refused(capsys, export.main, rm_dir, "--to", "gguf", "--destination_dir", tmp_path / "g")
    assert "--to gguf" in line and str(rm_dir) in line and "reward model" in line


# ---------------------------------------------------------------------------------------------------------------- GGUF
@pytest.mark.slow
@pytest.mark.parametrize("type_name", TYPES)
def test_gguf_in_each_type(type_name, cafe_model, tmp_path):
    file = next(exported(cafe_model, "gguf", tmp_path, "--gguf_type", type_name).glob("*.gguf"))
    assert file.name == f"barista-{type_name}.gguf"
    source = logits_of(AutoModelForCausalLM.from_pretrained(cafe_model))
    difference = (logits_of(read(file)) - source).abs().max() / source.abs().max()
    assert difference <= {"f32": 0, "f16": 2e-3, "bf16": 2e-2, "q8_0": 0.05}.get(type_name, 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", writer.ARCHITECTURES)
@pytest.mark.parametrize("tied", [True, False])
def test_gguf_of_each_architecture_is_a_model_by_its_name(architecture, tied, tmp_path):
    window = {"sliding_window": 128} if architecture == "mistral" else {}  # longer than the texts of the check
    model = stored(gpt2_like(), architecture, tmp_path / architecture, tie_word_embeddings=tied, **window)
    folder = exported(model, "gguf", tmp_path, "--gguf_type", "f32")
    again = exported(next(folder.glob("*.gguf")), "merged", tmp_path / "again")
    one, other = (AutoModelForCausalLM.from_pretrained(path) for path in (model, again))
    assert torch.equal(logits_of(one), logits_of(other))


@pytest.mark.slow
def test_gguf_of_biases_and_scaled_positions(tmp_path):
    rope = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    more = {"attention_bias": True, "mlp_bias": True, "rope_parameters": rope, "hidden_size": 64}
    model = stored(llama3_like(), "llama", tmp_path / "tiny", num_key_value_heads=2, **more)
    folder = exported(model, "gguf", tmp_path, "--gguf_type", "f32")
    again = exported(next(folder.glob("*.gguf")), "merged", tmp_path / "again")
    assert json.loads((again / "config.json").read_text())["rope_parameters"] == rope


def test_gguf_with_a_sentencepiece_tokenizer(tmp_path):
    tokenizer = sentencepiece_like(tmp_path / "pieces")
    tokenizer.pad_token = tokenizer.eos_token
    model = stored(tokenizer, "llama", tmp_path / "tiny")
    exported(model, "gguf", tmp_path, "--gguf_type", "f32")


@pytest.mark.slow
def test_rows_without_a_token_get_a_name(tmp_path):
    tokenizer = gpt2_like()
    model = stored(tokenizer, "llama", tmp_path / "tiny", vocab_size=len(tokenizer) + 3)
    folder = exported(model, "gguf", tmp_path, "--gguf_type", "f32")
    again = exported(next(folder.glob("*.gguf")), "merged", tmp_path / "again")
    assert json.loads((again / "config.json").read_text())["vocab_size"] == len(tokenizer) + 3


def test_the_known_ways_to_split_a_text_and_others():
    llama3 = {"type": "Split", "pattern": {"Regex": tokens.LLAMA3}, "behavior": "Isolated", "invert": False}
    joined = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    split = {**joined, "use_regex": True}
    digits = {"type": "Digits", "individual_digits": True}

    def named(*steps: dict, **model: object) -> str:
        pre = {"type": "Sequence", "pretokenizers": list(steps)}
        parts = {"pre_tokenizer": pre, "normalizer": None, "model": {"type": "BPE", **model}}
        return tokens.pre_tokenizer_name(None, parts)

    assert named(split) == "gpt-2" and named(digits, split) == "smollm"
    assert named(llama3, joined, ignore_merges=True) == "llama-bpe" and named(llama3, joined) == "smaug-bpe"
    for steps, model in (
        ([{**split, "add_prefix_space": True}], {}),
        ([{**llama3, "invert": True}, joined], {}),
        ([{**llama3, "behavior": "Removed"}, joined], {}),
        ([{"type": "Whitespace"}, joined], {}),
        ([split], {"ignore_merges": True}),
    ):
        with error_naming(UsageError, "tokenise"):
            named(*steps, **model)


@pytest.mark.parametrize("kind", ZOO.values(), ids=ZOO)
def test_a_tokenizer_of_the_zoo_is_written_rightly_or_refused(kind, tmp_path):
    """The check itself decides: llama.cpp has no name for the way in which these split their texts."""
    model = stored(kind.tokenizer, "llama", tmp_path / "tiny")
    try:
        exported(model, "gguf", tmp_path, "--gguf_type", "f32")
    except SystemExit as stopped:
        assert stopped.code in (1, 2)
    assert (tmp_path / "out").exists() or [path.name for path in tmp_path.iterdir()] == ["tiny"]


# ----------------------------------------------------------------------------------------------------------- the check
def broken_weights(monkeypatch):
    """Query and key rows are left in transformers' order."""
    monkeypatch.setattr(writer, "interleave_halves", lambda value, heads: value)


def broken_rope(monkeypatch):
    monkeypatch.setattr(writer, "hyperparameters", _changed(writer.hyperparameters, "rope.freq_base", 5e4))


def broken_norms(monkeypatch):
    name = "attention.layer_norm_rms_epsilon"
    monkeypatch.setattr(writer, "hyperparameters", _changed(writer.hyperparameters, name, 0.5))


def _changed(function, key, value):
    return lambda *args: function(*args) | {key: value}


def broken_ends(monkeypatch):
    monkeypatch.setattr(tokens, "name_ends", lambda tokenizer, model: {"eos": tokenizer.eos_token_id, "eot": 5})


def broken_template(monkeypatch):
    name = "tokenizer.chat_template"
    metadata = _changed(tokens.tokenizer_metadata, name, CHATML_TEMPLATE)
    monkeypatch.setattr(writer, "tokenizer_metadata", metadata)


def broken_type(monkeypatch):
    """Written coarser than it says."""
    monkeypatch.setattr(writer, "write_gguf", _coarser(writer.write_gguf))


def _coarser(write):
    return lambda model, described, file, type_name, name: write(model, described, file, "q8_0", name)


@pytest.mark.slow
@pytest.mark.parametrize(
    "break_it, told",
    [
        (broken_weights, "blk.0.attn_q.weight is not the source's"),
        (broken_rope, "its logits differ by"),
        (broken_norms, "its logits differ by"),
        (broken_ends, "its tokens that end a response differ"),
        (broken_template, "its chat template's rendering differ"),
        (broken_type, "weight is not the source's"),
    ],
)
def test_what_is_not_the_model_is_not_kept(break_it, told, cafe_model, tmp_path, monkeypatch, capsys):
    break_it(monkeypatch)
    error = refused(capsys, export.main, cafe_model, "--to", "gguf", "--destination_dir", tmp_path / "out", status=1)
    assert error.startswith("error: the export was not kept") and told in error
    assert not list(tmp_path.iterdir())


def test_another_way_to_split_texts_is_not_kept(tmp_path, monkeypatch):
    """Where it makes other tokens, as it does of this tokenizer's numbers."""
    bpe = byte_level(["<|endoftext|>"], ["pay $1234567.89 now"] * 8)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|endoftext|>", pad_token="<|endoftext|>")
    args = {"model_name": str(stored(tokenizer, "llama", tmp_path / "tiny")), "destination_dir": str(tmp_path / "out")}
    monkeypatch.setattr(tokens, "pre_tokenizer_name", lambda *_: "qwen2")
    with error_naming(RunFailure, "token ids"):
        export.run(export.ExportArgs(to="gguf", **args))


def test_a_merged_folder_that_is_not_the_model_is_not_kept(cafe_model, tmp_path, monkeypatch):
    save = export_check.check
    monkeypatch.setattr(export.checks, "check", lambda model, *more: save(_shifted(model), *more))
    with error_naming(RunFailure, "embed_tokens"):
        export.run(export.ExportArgs(model_name=str(cafe_model), to="merged", destination_dir=str(tmp_path / "out")))
    assert not list(tmp_path.iterdir())


def test_what_others_have_at_its_place_is_left_alone(cafe_model, tmp_path, monkeypatch):
    """A folder that appears while it works, and a file that is called as if it were a part of the export."""
    check, out = export_check.check, tmp_path / "out"
    (tmp_path / ".out.partial").write_text("mine")

    def slow(*given):
        out.mkdir()
        (out / "notes.txt").write_text("mine")
        return check(*given)

    monkeypatch.setattr(export.checks, "check", slow)
    with error_naming(RunFailure, "out", "Directory not empty"):
        export.run(export.ExportArgs(model_name=str(cafe_model), to="merged", destination_dir=str(out)))
    assert {path.name for path in tmp_path.iterdir()} == {"out", ".out.partial"}
    assert [path.read_text() for path in (out / "notes.txt", tmp_path / ".out.partial")] == ["mine", "mine"]


def _shifted(model):
    with torch.no_grad():
        model.get_input_embeddings().weight[3, 4] += 1e-3
    return model


# -------------------------------------------------------------------------------------------------------------- Ollama
@pytest.mark.parametrize("name", ["chatml", "llama3", "gemma", "mistral", "open", "cafe"])
def test_a_chat_template_in_go_renders_the_same(name, tokenizer):
    tokenizer = tokenizer if name == "cafe" else ZOO[name].tokenizer
    texts = chat_texts(tokenizer)
    dialogue = [{"role": "user", "content": "A {{ .Latte }}, please."}, {"role": "assistant", "content": "One?"}]
    dialogue += [{"role": "user", "content": "Two."}]
    for messages in (dialogue[:1], dialogue, [{"role": "system", "content": "Be brief."}, *dialogue]):
        if messages[0]["role"] != "system" or texts.around_system:
            assert render_go(texts.in_go(), messages) == render(tokenizer, messages, add_generation_prompt=True)


@pytest.mark.parametrize("name", ["bare", "llama2", "qwen_thinking"])
def test_a_chat_template_that_does_more_is_refused_or_the_same(name):
    try:
        texts = chat_texts(ZOO[name].tokenizer)
    except UsageError as problem:
        assert "\n" not in str(problem)
    else:
        messages = [{"role": "user", "content": "Two."}]
        assert render_go(texts.in_go(), messages) == render(ZOO[name].tokenizer, messages, add_generation_prompt=True)


def test_a_folder_for_ollama(tmp_path):
    model = stored(llama3_like(), "llama", tmp_path / "tiny", num_key_value_heads=2)
    folder = exported(model, "ollama", tmp_path, "--gguf_type", "f16", "--temperature", "0.7")
    lines = (folder / "Modelfile").read_text()
    assert lines.startswith("FROM ./tiny-f16.gguf\n") and (folder / "tiny-f16.gguf").is_file()
    assert 'PARAMETER stop "<|eot_id|>"\nPARAMETER temperature 0.7\n' in lines
    assert "<|begin_of_text|>" not in lines  # which the file says llama.cpp is to add


@pytest.mark.parametrize("date, is_told", [("2024\n", False), ("{{ strftime_now('%Y') }}\n", True)])
def test_todays_date_in_a_modelfile_is_told(tmp_path, capsys, date, is_told):
    tokenizer = llama3_like()
    tokenizer.chat_template = date + tokenizer.chat_template
    model = stored(tokenizer, "llama", tmp_path / "tiny", num_key_value_heads=2)
    exported(model, "ollama", tmp_path, "--gguf_type", "f16")
    assert ("present date" in capsys.readouterr().out) == is_told


# ------------------------------------------------------------------------------------------------------------ refusals
@pytest.mark.parametrize(
    "flags, told",
    [
        (["--to", "onnx"], "--to onnx"),
        (["--to", "gguf", "--gguf_type", "q3_k"], "--gguf_type q3_k"),
        (["--to", "adapter"], "holds full weights, not an adapter; use --to merged"),
        ([], "--to"),
    ],
)
def test_wrong_arguments_are_one_line(flags, told, cafe_model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert told in refused(capsys, export.main, cafe_model, *flags)


def test_a_folder_that_is_there_is_left_alone(cafe_model, tmp_path, capsys):
    (tmp_path / "mine").mkdir()
    flags = [str(cafe_model), "--to", "merged", "--destination_dir", str(tmp_path / "mine")]
    assert "exists; name a new one" in refused(capsys, export.main, *flags)
    assert not list((tmp_path / "mine").iterdir())
    too_long = [str(cafe_model), "--to", "merged", "--destination_dir", str(tmp_path / ("a" * 300))]
    assert "cannot be written: File name too long" in refused(capsys, export.main, *too_long)


def test_architectures_and_templates_that_cannot_be_written(tokenizer, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    other = stored(tokenizer, "opt", tmp_path / "opt")
    line = refused(capsys, export.main, other, "--to", "gguf")
    assert "opt" in line and "GGUF" in line and "llama" in line
    plain = stored(gpt2_like(), "llama", tmp_path / "plain")
    assert "the tokenizer has none; use --to gguf" in refused(capsys, export.main, plain, "--to", "ollama")
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
    scaled = stored(gpt2_like(), "llama", tmp_path / "scaled", rope_parameters=yarn)
    assert "rope_type yarn" in refused(capsys, export.main, scaled, "--to", "gguf")


def test_half_precision_that_overflows_is_not_kept(tokenizer, tmp_path):
    model = tiny_model("llama", vocab_size=len(tokenizer), pad_token_id=0, eos_token_id=1)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] = 1e5
    model.save_pretrained(tmp_path / "large")
    tokenizer.save_pretrained(tmp_path / "large")
    args = {"model_name": str(tmp_path / "large"), "destination_dir": str(tmp_path / "out")}
    with error_naming(RunFailure, "up_proj.weight", "--gguf_type"):
        export.run(export.ExportArgs(to="gguf", gguf_type="f16", **args))
    assert not (tmp_path / "out").exists()
