"""GGUF files that are broken, hostile or oddly named: one line each, and nothing of them in the cache."""

import errno
import json
import os
import random
import re
import signal
import struct
import sys
import tracemalloc
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from helpers import tiny_model
from helpers.data import CHATML_TEMPLATE, SENTENCES, byte_level, chatml_like, gpt2_like, llama3_like
from helpers.errors import error_naming
from helpers.gguf import infos, with_infos
from helpers.killed import fork, forked, wait
from tokenizers import Regex, Tokenizer, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from lightrlhf.cli.errors import UsageError
from lightrlhf.gguf import files, reading, tokens, writer
from lightrlhf.gguf.files import FOLDER, describe_file, from_gguf
from lightrlhf.models.names import quiet_libraries
from lightrlhf.models.tokenizer import end_ids
from lightrlhf.storage.locks import LOCK
from lightrlhf.storage.seals import damage

HUGE, LARGE = 2**60, 2**31
GGML = "tokenizer.ggml."
TOKENS = f"{GGML}tokens"
INTACT = "give an intact copy"
INSTEAD = "give the folder that it was made of"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LIGHTRLHF_CACHE", str(tmp_path / "cache"))
    quiet_libraries()
    from_gguf.cache_clear()
    return tmp_path / "cache"


def model_of(tokenizer, architecture="llama", **changes):
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    return tiny_model(architecture, vocab_size=len(tokenizer), **ends, **changes)


@pytest.fixture(scope="session")
def source():
    """A model and its tokenizer, in memory."""
    tokenizer = chatml_like()
    return model_of(tokenizer), tokenizer


@pytest.fixture
def write(source, tmp_path, monkeypatch):
    """Writes a GGUF file with other metadata (None leaves one out) or other tensors than its model's."""

    def writes(changes=None, tensors=None, name="tiny") -> Path:
        model, tokenizer = source
        metadata = writer.metadata(model, tokenizer, end_ids(tokenizer, model))
        metadata |= {key: value(metadata[key]) if callable(value) else value for key, value in (changes or {}).items()}
        metadata = {key: value for key, value in metadata.items() if value is not None}
        file = tmp_path / f"{name}.gguf"
        with monkeypatch.context() as patch:
            stored = list(writer.stored_tensors(model, "f32"))
            patch.setattr(writer, "stored_tensors", lambda *_: iter(tensors(stored) if tensors else stored))
            writer.write_gguf(model, metadata, file, "f32", "tiny")
        return file

    return writes


@pytest.fixture
def content(write):
    """What a good file holds."""
    return write().read_bytes()


def refused(name, *told: str, left: tuple[str, ...] = ()) -> str:
    """The one line for a file, which names flag and file and leaves nothing in the cache."""
    from_gguf.cache_clear()
    with pytest.raises(UsageError) as raised, within(20):
        from_gguf(str(name), "--ref_model")
    line = str(raised.value)
    assert raised.value.exit_status == 2 and len(line.splitlines()) == 1 and len(line) < 600
    assert line.startswith(f"--ref_model {name}") and all(text in line for text in told), line
    assert files_in(files.cache_dir()) == sorted(left)
    return line


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


@contextmanager
def within(seconds: int):
    """Ends what hangs, as a loop over 2^60 numbers does, by an exception that nothing catches."""

    def end(*_):
        raise KeyboardInterrupt("it hangs")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def logits_of(model, length=20):
    ids = torch.arange(2, 2 + length)[None]
    with torch.no_grad():
        return model.eval()(ids).logits


# -------------------------------------------------------------------------------------------------------- whole or not
def test_what_is_no_gguf_file_or_ends_early_is_one_line(content, tmp_path):
    file = tmp_path / "broken.gguf"
    for other in (b"", b"GG", b"PK\x03\x04" + bytes(1000), b"not a model\n" * 100):
        file.write_bytes(other)
        refused(file, "is not a readable GGUF file", INTACT)
    numbers = random.Random(0)
    for end in (3, 4, 7, 8, 16, 23, 24, 31, *numbers.sample(range(32, len(content)), 40), len(content) - 1):
        file.write_bytes(content[:end])
        refused(file, "is not a readable GGUF file", "it ends where more was to come" if end > 3 else "", INTACT)


def test_declared_sizes_that_no_file_has_neither_hang_nor_fill_the_memory(content, tmp_path):
    architecture = content.index(b"general.architecture") + 20
    types = content.index(b"token_type") + 10
    norm = content.index(b"output_norm.weight") + 18
    huge = struct.pack("<Q", HUGE)
    broken = {
        "tensors": (8, huge),
        "metadata": (16, huge),
        "the characters of a name": (24, huge),
        "the characters of a text": (architecture + 4, huge),
        "the characters of a text, signed": (architecture + 4, b"\xff" * 8),
        "numbers of an array": (types + 8, huge),
        "numbers of an array of bytes": (types + 4, struct.pack("<I", 0) + huge),
        "texts of an array": (types + 4, struct.pack("<I", 8) + huge),
        "an array of arrays": (types + 4, struct.pack("<IQ", 9, 1) * 3000),
        "dimensions": (norm, struct.pack("<I", LARGE)),
        "a dimension": (norm + 4, huge),
        "the place of a tensor": (norm + 16, huge),
    }
    file = tmp_path / "huge.gguf"
    for what, (place, put) in broken.items():
        file.write_bytes(content[:place] + put + content[place + len(put) :])
        assert "is not a readable GGUF file" in refused(file, INTACT), what


def test_an_array_of_more_entries_than_the_file_has_bytes_takes_no_memory(content, tmp_path):
    """In front of a large file, whose bytes could be read as entries for long."""
    types = content.index(b"token_type") + 10
    file = tmp_path / "long.gguf"
    tail = b"\x01" * 2**24
    for kind in (0, 5, 8, 9):
        put = struct.pack("<IQ", kind, HUGE)
        file.write_bytes(content[: types + 4] + put + content[types + 16 :] + tail)
        tracemalloc.start()
        refused(file, f"it has an array of {HUGE} entries, for which it is too short")
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 2**23


# -------------------------------------------------------------------------------------------------------------- layout
QUERY, KEY, NORM = "blk.0.attn_q.weight", "blk.0.attn_k.weight", "output_norm.weight"


@pytest.mark.parametrize(
    "change, told",
    [
        (lambda kind, offset: {QUERY: (kind[KEY], offset[KEY]), KEY: (kind[QUERY], offset[QUERY])}, "begins at byte"),
        (lambda kind, offset: {QUERY: (kind[QUERY], offset[KEY])}, "begins at byte"),
        (lambda kind, offset: {QUERY: (kind[QUERY], offset[QUERY] + 4)}, "begins at byte"),
        (lambda kind, offset: {name: (kind[name], offset[name] + 32) for name in kind}, "it ends where more was"),
        (lambda kind, offset: {NORM: (1, offset[NORM])}, ""),  # float16
        (lambda kind, offset: {QUERY: (1, offset[QUERY])}, "begins at byte"),
        (
            lambda kind, offset: {QUERY: (26, offset[QUERY])},
            f"{QUERY!r} is stored as I32, its general.file_type is F32",
        ),
        (lambda kind, offset: {QUERY: (99, offset[QUERY])}, "is not a readable GGUF file"),
    ],
)
def test_tensors_that_do_not_lie_where_they_should(change, told, content, tmp_path):
    found = infos(content)
    kinds, offsets = ({name: value[at] for name, value in found.items()} for at in (1, 2))
    file = tmp_path / "moved.gguf"
    file.write_bytes(with_infos(content, change(kinds, offsets)))
    refused(file, "is not a readable GGUF file", told, INTACT)


def test_bytes_that_belong_to_no_tensor(content, tmp_path):
    file = tmp_path / "longer.gguf"
    file.write_bytes(content + bytes(32))
    refused(file, "its last tensor ends before byte")


def test_a_kind_of_the_same_size_as_that_of_the_file(source, tmp_path):
    model, tokenizer = source
    for type_name, other in (("f16", 30), ("bf16", 1), ("q4_0", 20)):
        file = tmp_path / f"{type_name}.gguf"
        writer.write_gguf(model, writer.metadata(model, tokenizer, end_ids(tokenizer, model)), file, type_name, "tiny")
        reading.open_file(file, "it")
        content = file.read_bytes()
        file.write_bytes(with_infos(content, {QUERY: (other, infos(content)[QUERY][2])}))
        refused(file, f"its general.file_type is {type_name.upper()}")


@pytest.mark.parametrize(
    "key", ["block_count", "embedding_length", "feed_forward_length", "attention.key_length", "vocab_size"]
)
def test_a_model_larger_than_its_file_is_refused_before_it_takes_memory(key, write, monkeypatch):
    load = AutoModelForCausalLM.from_pretrained
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("it was loaded"))
    refused(write({f"llama.{key}": LARGE}), INTACT)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", load)


def test_other_byte_order_versions_and_parts(content, write, source, tmp_path):
    import gguf

    file = tmp_path / "other.gguf"
    writer = gguf.GGUFWriter(file, "llama", endianess=gguf.GGUFEndian.BIG)
    writer.add_tensor("token_embd.weight", torch.zeros(4, 4).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    refused(file, "byte order")
    for version in (0, 1, 99):
        file.write_bytes(content[:4] + struct.pack("<I", version) + content[8:])
        refused(file, "is not a readable GGUF file")
    refused(write({"split.count": 3}), "is one of 3 parts; join them first: llama-gguf-split --merge")
    refused(write({"split.count": 3, TOKENS: None, f"{GGML}token_type": None}), "is one of 3 parts; join them first")


# ------------------------------------------------------------------------------------------------------------- tensors
def changed(place: int, change):
    return lambda stored: [
        one._replace(value=change(one.value)) if index == place else one for index, one in enumerate(stored)
    ]


def with_value(value: float):
    def change(tensor):
        tensor = tensor.clone()
        tensor.view(-1)[3] = value
        return tensor

    return change


def added(name: str):
    return lambda stored: [*stored, writer.Stored(name, "", torch.ones(3, 3), "f32")]


def renamed(stored):
    return [one._replace(name="blk.0.mine.weight") if one.name == "blk.0.attn_v.weight" else one for one in stored]


@pytest.mark.parametrize(
    "tensors, told",
    [
        (lambda stored: [one for one in stored if "attn_v" not in one.name], f"lacks weights: .*; {INTACT}"),
        (lambda stored: [one for one in stored if one.name != "token_embd.weight"], "lacks weights: "),
        (lambda stored: [one for one in stored if ".1." not in one.name], "lacks weights: "),
        (renamed, "lacks weights that its architecture has: model.layers.0.self_attn.v_proj.weight"),
        (changed(5, lambda value: value.T.contiguous()), "lacks weights that .*: model.layers.0.mlp.gate_proj.weight"),
        (changed(5, lambda value: torch.cat([value, value])), f"transformers reads .* as llama; {INSTEAD}"),
        (added("blk.0.mine.weight"), "transformers reads .* as llama"),
        (added("blk.7.attn_q.weight"), "transformers reads .* as llama"),
        (lambda stored: [], "its metadata have llama.block_count 2, which does not fit"),
        (changed(3, with_value(float("nan"))), "weights that are not finite: model.layers.0.self_attn.v_proj.weight"),
        (changed(3, with_value(float("-inf"))), "weights that are not finite"),
        (changed(8, with_value(float("inf"))), "weights that are not finite: model.layers.0.input_layernorm.weight"),
    ],
)
def test_weights_that_are_not_those_of_its_metadata(tensors, told, write):
    line = refused(write(tensors=tensors), "; give ")
    assert re.search(told, line), line


@pytest.mark.parametrize("factors", [torch.zeros(4), torch.full((4,), float("nan")), torch.ones(7), -torch.ones(4)])
def test_factors_of_positions_that_no_model_has(factors, write):
    rope = writer.Stored("rope_freqs.weight", "", factors, "f32")
    refused(write(tensors=lambda stored: [rope, *stored]), "; give ")


# ------------------------------------------------------------------------------------------------------------ metadata
def put(place: int, text: str):
    return lambda tokens: [*tokens[:place], text, *tokens[place + 1 :]]


@pytest.mark.parametrize(
    "changes, told",
    [
        ({"general.architecture": None}, "lack general.architecture"),
        ({"llama.block_count": None}, "lack llama.block_count"),
        ({"llama.block_count": 0}, "llama.block_count 0"),
        ({"llama.block_count": "two"}, "llama.block_count 'two'"),
        ({"llama.block_count": 3}, "lacks weights"),
        ({"llama.block_count": 1}, "transformers reads"),
        ({"llama.context_length": None}, "lack llama.context_length"),
        ({"llama.context_length": 0}, "llama.context_length 0"),
        ({"llama.attention.head_count": None}, "lack llama.attention.head_count"),
        ({"llama.attention.head_count": 0}, "cannot be loaded"),
        ({"llama.attention.head_count": 3}, "cannot be loaded"),
        ({"llama.attention.layer_norm_rms_epsilon": None}, "lack llama.attention.layer_norm_rms_epsilon"),
        ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "layer_norm_rms_epsilon nan"),
        ({"llama.rope.freq_base": 0.0}, "llama.rope.freq_base 0.0"),
        ({"llama.rope.freq_base": float("inf")}, "llama.rope.freq_base inf"),
        ({"llama.rope.freq_base": "high"}, "cannot be loaded"),
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}, "scales its positions ('yarn')"),
        ({"llama.attention.sliding_window": 16}, "attends to 16 tokens at a time, which is not read here"),
        ({"llama.logit_scale": 0.1}, "has logit_scale, which is not read here"),
        ({TOKENS: None}, f"lack {TOKENS}"),
        ({TOKENS: 5}, f"have {TOKENS} 5"),
        ({TOKENS: lambda tokens: tokens[:-5]}, "token_type"),
        ({TOKENS: lambda tokens: tokens[:-5], f"{GGML}token_type": lambda types: types[:-5]}, "cannot be loaded"),
        ({TOKENS: lambda all: [*all, "x1"], f"{GGML}token_type": lambda all: [*all, 1]}, "401 tokens for 400 rows"),
        ({TOKENS: put(399, "a"), f"{GGML}merges": ["t h"]}, "1 of its 400 tokens get another id ("),
        ({TOKENS: lambda tokens: [""] * len(tokens)}, "cannot be loaded"),
        ({f"{GGML}merges": None}, "cannot be loaded"),
        ({f"{GGML}merges": ["a", "b c d"]}, "cannot be loaded"),
        ({f"{GGML}token_type": [1]}, f"have {GGML}token_type [1]"),
        ({f"{GGML}model": "mine"}, "cannot be loaded"),
        ({f"{GGML}pre": "mine"}, f"({GGML}pre 'mine') that is not known here"),
        ({f"{GGML}pre": None}, f"({GGML}pre None) that is not known here"),
        ({f"{GGML}pre": ["a", "b"]}, f"have {GGML}pre ['a', 'b']"),
        ({f"{GGML}eos_token_id": None}, f"lack {GGML}eos_token_id"),
        *(({f"{GGML}{name}_token_id": 400}, f"{name}_token_id 400") for name in reading.TOKEN_IDS),
        ({f"{GGML}eot_token_id": "end"}, "eot_token_id 'end'"),
        ({f"{GGML}eos_token_id": [1, 2]}, "eos_token_id [1, 2]"),
        ({"tokenizer.chat_template": 5}, "have tokenizer.chat_template 5"),
        ({"tokenizer.chat_template": ["a", "b"]}, "have tokenizer.chat_template ['a', 'b']"),
        ({"tokenizer.chat_template": "{% for %}"}, "its chat template does not render: Expected an expression"),
        ({"tokenizer.chat_template": "{{ messages.a.b }}"}, "its chat template does not render: "),
        ({"tokenizer.chat_template": "{{ 1 / 0 }}"}, "its chat template does not render: division by zero"),
    ],
)  # fmt: skip
def test_metadata_of_no_model(changes, told, write):
    changes, file = dict(changes), None
    if "general.architecture" in changes:
        del changes["general.architecture"]
        file = write(changes)
        file.write_bytes(file.read_bytes().replace(b"general.architecture", b"general.architectxxx"))
    refused(file or write(changes), told, "; give ")


@pytest.mark.parametrize("name", ["mine", "bert", "../../mine", "a\nb", "\x1b[31m", "x" * 10_000, "", "clip"])
def test_architectures_that_cannot_be_read(name, write, monkeypatch):
    import gguf

    class Renamed(gguf.GGUFWriter):
        def __init__(self, file, _):
            super().__init__(file, name)

    monkeypatch.setattr(gguf, "GGUFWriter", Renamed)
    sizes = ("block_count", "context_length", "embedding_length", "attention.head_count")
    values = {"block_count": 2, "context_length": 64, "embedding_length": 32, "attention.head_count": 4}
    more = {f"{name}.{key}": values[key] for key in sizes}
    line = refused(write({**more, f"{name}.attention.layer_norm_epsilon": 1e-5}), "; give ")
    assert line.isprintable()


def test_an_architecture_that_is_no_text(content, tmp_path):
    place = content.index(b"general.architecture") + 20
    file = tmp_path / "number.gguf"
    file.write_bytes(content[:place] + struct.pack("<IIQ5s", 9, 0, 5, b"llama") + content[place + 21 :])
    refused(file)


def test_the_code_of_a_template_is_not_run(write, tmp_path):
    for reached in ("''.__class__.__mro__[1].__subclasses__()", "messages.append.__globals__.x", "cycler.__init__.x"):
        refused(write({"tokenizer.chat_template": "{{" + reached + "}}"}), "does not render")
    touching = "{{ lipsum.__globals__.os.system('touch " + str(tmp_path / "ran") + "') }}"
    refused(write({"tokenizer.chat_template": touching}), "does not render")
    assert not (tmp_path / "ran").exists()


def test_a_tokenizer_that_is_read_with_other_ids(write, monkeypatch):
    read = reading.complete_tokenizer

    def swapped(tokenizer, stored):
        tokens = list(stored[TOKENS])
        tokens[300], tokens[301] = tokens[301], tokens[300]
        return read(write_and_read(tokens), stored)

    def write_and_read(tokens):
        file = write({TOKENS: tokens}, name="swapped")
        return AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)

    file = write()
    monkeypatch.setattr(reading, "complete_tokenizer", swapped)
    refused(file, "2 of its 400 tokens get another id", INTACT)


# --------------------------------------------------------------------------------------------------------------- names
def test_names_of_files(write, tmp_path, monkeypatch):
    file = write()
    odd = tmp_path / "två modeller" / "мой model [1] 'x' $HOME.gguf"
    odd.parent.mkdir()
    file.rename(odd)
    (tmp_path / "link.gguf").symlink_to(odd)
    monkeypatch.setenv("HOME", str(odd.parent))
    folder = from_gguf(str(odd))
    assert damage(folder) is None and folder.name.startswith(odd.stem) and odd.name in describe_file(str(odd))
    assert from_gguf(f"~/{odd.name}") == folder
    assert AutoModelForCausalLM.from_pretrained(from_gguf(str(tmp_path / "link.gguf"))).config.hidden_size == 32
    (tmp_path / "folder.gguf").mkdir()
    (tmp_path / "gone.gguf").symlink_to(tmp_path / "nowhere.gguf")
    for name, told in (
        (tmp_path / "folder.gguf", "is a folder; give the .gguf file in it"),
        (tmp_path / "gone.gguf", "does not exist"),
        ("~no_such_user/x.gguf", "does not exist"),
        ("x" * 5000 + ".gguf", "does not exist"),
        ("a\0b.gguf", "does not exist"),
    ):
        with pytest.raises(UsageError) as raised:
            from_gguf(str(name), "--ref_model")
        assert str(raised.value) == f"--ref_model {name} {told}"


def test_a_file_that_cannot_be_read(write, monkeypatch, cache):
    def denied(_):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(files, "sha256", denied)
    refused(write(), "cannot be read: Permission denied; allow access to it")


@pytest.mark.parametrize(
    "name, told",
    [
        ("nothing", "no such package is installed here; pip install"),
        ("none", "the package holds none; give the path"),
        ("two", "the package holds 2 of them (a.gguf, b.gguf); give the path"),
        ("four", "the package holds 4 of them (a.gguf, b.gguf, c.gguf and 1 more)"),
        ("a_module", "no such package"),
        ("../none", "no such package"),
        ("none.inner", "no such package"),
        ("", "no such package"),
        ("none/../two", "no such package"),
        ("__main__", "no such package"),
        ("/etc", "no such package"),
    ],
)
def test_names_of_packages(name, told, tmp_path, monkeypatch):
    for package, letters in {"none": (), "two": "ab", "four": "abcd"}.items():
        (tmp_path / "site" / package / "inner").mkdir(parents=True)
        (tmp_path / "site" / package / "__init__.py").write_text("raise SystemError('not to be imported')\n")
        for file in letters:
            (tmp_path / "site" / package / "inner" / f"{file}.gguf").touch()
    (tmp_path / "site" / "a_module.py").write_text("raise SystemError('not to be imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    refused(f"package:{name}", told)


def test_a_package_whose_import_raises_is_read_all_the_same(write, tmp_path, monkeypatch):
    file = write()
    package = tmp_path / "site" / "weights_of_one"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemError('not to be imported')\n")
    file.rename(package / file.name)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert damage(from_gguf("package:weights_of_one")) is None


def test_without_the_package_gguf(write, monkeypatch):
    file = write()
    monkeypatch.setitem(sys.modules, "gguf", None)
    refused(file, "gguf", "pip install")


# --------------------------------------------------------------------------------------------------------------- cache
def test_the_folder_is_whole_and_used_again_without_file_system_writes_or_libraries(write, cache, monkeypatch):
    file = write()
    folder = from_gguf(str(file))
    assert folder.parent == cache / FOLDER and damage(folder) is None and LOCK not in files_in(cache)
    assert [path.name for path in (cache / FOLDER).iterdir()] == [folder.name]
    from_gguf.cache_clear()
    for name in ("lock_folder", "read_gguf", "write_folder"):
        monkeypatch.setattr(files, name, lambda *_, **__: pytest.fail("it was converted again"))
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert from_gguf(str(file)) == folder
    monkeypatch.setenv("LIGHTRLHF_CACHE", "~/models")
    monkeypatch.setenv("HOME", str(cache))
    assert files.cache_dir() == cache / "models"


def test_a_damaged_folder_says_how_to_go_on_and_that_helps(write):
    file = write()
    folder = from_gguf(str(file))
    for path in (folder / "config.json", folder / "model.safetensors", folder / "manifest.json"):
        before = path.read_bytes()
        path.write_bytes(before[:-2])
        line = refused(file, f"{folder} is damaged (", "); delete it, and it is converted again", left=files_in(folder))
        assert "checkpoint" not in line
        path.write_bytes(before)
    (folder / "config.json").unlink()
    refused(file, "(config.json is missing); delete it", left=files_in(folder))
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    from_gguf.cache_clear()
    assert from_gguf(str(file)) == folder and damage(folder) is None


def test_a_cache_that_cannot_be_written_names_the_variable(write, cache, monkeypatch):
    file = write()

    def fails(number):
        def write_model(folder, *_):
            (folder / "config.json").write_text("{}")
            raise OSError(number, os.strerror(number))

        return write_model

    for number in (errno.ENOSPC, errno.EACCES, errno.EROFS):
        with monkeypatch.context() as patch:
            patch.setattr(files, "write_model", fails(number))
            with error_naming(UsageError, os.strerror(number), "LIGHTRLHF_CACHE") as raised:
                from_gguf(str(file))
        assert len(str(raised.value).splitlines()) == 1 and not files_in(cache)
    cache.rmdir()
    cache.write_text("a file where the cache should be")
    with error_naming(UsageError, "LIGHTRLHF_CACHE") as raised:
        from_gguf(str(file))
    assert raised.value.exit_status == 2


def test_a_killed_conversion_is_done_again(write, cache, tmp_path, monkeypatch, capsys):
    file = write()
    write_model = files.write_model

    def killed(folder, *rest):
        write_model(folder, *rest)
        os.kill(os.getpid(), signal.SIGKILL)

    with monkeypatch.context() as patch:
        patch.setattr(files, "write_model", killed)
        assert forked(lambda: from_gguf(str(file)), tmp_path / "printed") == -signal.SIGKILL
    assert any(path.name.endswith(".partial") for path in (cache / FOLDER).iterdir())
    folder = from_gguf(str(file))
    assert damage(folder) is None and [path.name for path in (cache / FOLDER).iterdir()] == [folder.name]


def test_of_two_processes_one_converts_and_both_have_the_folder(write, cache, tmp_path, monkeypatch):
    file, read = write(), files.read_gguf
    starts, goes = os.pipe()

    def waits(*given):  # until the other process has begun, too
        os.read(starts, 1)
        return read(*given)

    monkeypatch.setattr(files, "read_gguf", waits)

    def convert():
        assert damage(from_gguf(str(file))) is None

    both = [fork(convert, tmp_path / f"printed{number}") for number in range(2)]
    printed = [tmp_path / f"printed{number}" for number in range(2)]
    while not any(path.exists() and "waiting for process" in path.read_text() for path in printed):
        assert all(os.waitpid(pid, os.WNOHANG)[0] == 0 for pid in both), [path.read_text() for path in printed]
    os.write(goes, b"xx")
    assert [wait(pid) for pid in both] == [0, 0]
    assert sum("converting it" in path.read_text() for path in printed) == 1
    assert len(list((cache / FOLDER).iterdir())) == 1
    os.close(starts)
    os.close(goes)


# ----------------------------------------------------------------------------------------------------------- same model
def split_by(tokenizer, pattern: str, **changes):
    """A tokenizer whose texts are split by a regular expression alone; changes: of its BPE."""
    state = json.loads(tokenizer.to_str())
    backend = Tokenizer.from_str(json.dumps(state | {"model": state["model"] | changes}))
    joined = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), joined])
    return backend


def qwen2_like():
    """The class that transformers takes for Qwen2 whatever a folder says has this split and this end token."""
    backend = split_by(byte_level(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]), tokens.QWEN2)
    named = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "extra_special_tokens": ["<|im_start|>"]}
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=CHATML_TEMPLATE, **named)


SHAPES = [
    ("llama", {"num_key_value_heads": 2, "head_dim": 6}),
    ("llama", {"rms_norm_eps": 1e-3, "rope_parameters": {"rope_type": "default", "rope_theta": 777.0}}),
    ("qwen2", {"num_key_value_heads": 1}),
    ("qwen3", {"num_key_value_heads": 4, "head_dim": 10}),
    ("gpt2", {}),
]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("architecture, more", SHAPES, ids=[f"{name}{len(more)}" for name, more in SHAPES])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_file_is_its_model_and_tokenizer(architecture, more, tied, seed, tmp_path):
    numbers = random.Random(f"{architecture} {tied} {seed}")
    layers, heads, width = numbers.randint(1, 3), 4, 4 * numbers.choice([2, 6, 10])
    names = ("n_layer", "n_head", "n_embd") if architecture == "gpt2" else (
        "num_hidden_layers", "num_attention_heads", "hidden_size")  # fmt: skip
    sizes = dict(zip(names, (layers, heads, width)))
    sizes |= {"n_inner" if architecture == "gpt2" else "intermediate_size": numbers.randint(1, 70)}
    sizes |= {"n_positions" if architecture == "gpt2" else "max_position_embeddings": numbers.randint(30, 90)}
    kinds = [qwen2_like] if architecture == "qwen2" else [gpt2_like, chatml_like, llama3_like, qwen2_like]
    tokenizer = numbers.choice(kinds)()
    model = model_of(tokenizer, architecture, tie_word_embeddings=tied, **(sizes | more))
    file = tmp_path / "tiny.gguf"
    writer.write_gguf(model, writer.metadata(model, tokenizer, end_ids(tokenizer, model)), file, "f32", "tiny")
    folder = from_gguf(str(file))
    read, ids = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), AutoTokenizer.from_pretrained(folder)
    assert torch.allclose(logits_of(read), logits_of(model), atol=1e-6, rtol=1e-6)
    assert read.config.tie_word_embeddings == tied
    alphabet = [*"".join(SENTENCES), *"0123456789", *"\n\t  é日本🙂ß'’\r", *tokenizer.all_special_tokens, *SENTENCES]
    for _ in range(50):
        text = "".join(numbers.choices(alphabet, k=numbers.randint(0, 40)))
        assert ids(text)["input_ids"] == tokenizer(text)["input_ids"], text
        assert ids.decode(ids(text)["input_ids"]) == tokenizer.decode(tokenizer(text)["input_ids"]), text
    ends = ("eos_token_id", "bos_token_id", "chat_template")
    assert all(getattr(ids, name) == getattr(tokenizer, name) for name in ends)


@pytest.mark.parametrize("is_whole", [True, False], ids=["llama-bpe", "smaug-bpe"])
def test_words_that_are_tokens_are_whole_where_the_file_says_so(is_whole, tmp_path):
    bpe = llama3_like().backend_tokenizer
    vocabulary = bpe.get_vocab(with_added_tokens=True)
    vocabulary["zqj"] = len(vocabulary)  # no merge makes it
    backend = split_by(bpe, tokens.LLAMA3, vocab=vocabulary, ignore_merges=is_whole)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|eot_id|>", pad_token="<|pad|>")
    model, file = model_of(tokenizer), tmp_path / "tiny.gguf"
    writer.write_gguf(model, writer.metadata(model, tokenizer, end_ids(tokenizer, model)), file, "f32", "tiny")
    read = AutoTokenizer.from_pretrained(from_gguf(str(file)))
    for text in ("zqj", "a zqj 12345 zqj's", "Zqj\n\n zqj"):
        assert read(text, add_special_tokens=False) == tokenizer(text, add_special_tokens=False)
    assert (len(read("zqj", add_special_tokens=False)["input_ids"]) == 1) == is_whole


@pytest.mark.parametrize(
    "pattern, whole, adds, begins",
    [
        ("LLAMA3", True, None, True),  # llama.cpp's default of llama-bpe
        ("LLAMA3", True, False, False),
        ("LLAMA3", False, None, False),  # smaug-bpe
        ("LLAMA3", False, True, True),
        ("QWEN2", False, None, False),
    ],
)
def test_a_text_begins_with_a_bos_where_the_file_or_llama_cpp_says_so(pattern, whole, adds, begins, tmp_path):
    backend = split_by(llama3_like().backend_tokenizer, getattr(tokens, pattern), ignore_merges=whole)
    named = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>", "pad_token": "<|pad|>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **named)
    model, file = model_of(tokenizer), tmp_path / "tiny.gguf"
    metadata = writer.metadata(model, tokenizer, end_ids(tokenizer, model)) | {f"{GGML}add_bos_token": adds}
    kept = {key: value for key, value in metadata.items() if value is not None}
    writer.write_gguf(model, kept, file, "f32", "tiny")
    read = AutoTokenizer.from_pretrained(from_gguf(str(file)))
    plain = read("The cat", add_special_tokens=False)["input_ids"]
    assert read("The cat")["input_ids"] == [read.bos_token_id] * begins + plain


def test_a_tokenizer_that_transformers_would_load_as_another_is_refused(tmp_path):
    tokenizer = chatml_like()
    model, file = model_of(tokenizer, "qwen2"), tmp_path / "tiny.gguf"
    writer.write_gguf(model, writer.metadata(model, tokenizer, end_ids(tokenizer, model)), file, "f32", "tiny")
    refused(file, "transformers takes Qwen2Tokenizer for qwen2, which splits its texts otherwise; take another model")
