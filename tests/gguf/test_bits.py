"""Single bits of a GGUF file's header: it is refused, or read as the same model.

Left out: bits of metadata such as a number of heads, which only a checksum would show, and of the weights themselves.
"""

import random
import struct
import time

import pytest
import torch
from helpers import tiny_model
from helpers.data import chatml_like
from helpers.gguf import infos

from lightrlhf.cli.errors import UsageError
from lightrlhf.gguf import writer
from lightrlhf.gguf.reading import open_file, read_gguf
from lightrlhf.models.names import quiet_libraries
from lightrlhf.models.tokenizer import end_ids

TYPES = ("f32", "f16", "q8_0", "q4_0")


@pytest.fixture(scope="module")
def contents(tmp_path_factory):
    """A tiny model in each type."""
    quiet_libraries()
    tokenizer, folder = chatml_like(), tmp_path_factory.mktemp("gguf")
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    model = tiny_model("llama", vocab_size=len(tokenizer), **ends)
    for name in TYPES:
        writer.write_gguf(
            model, writer.metadata(model, tokenizer, end_ids(tokenizer, model)), folder / name, name, "tiny"
        )
    return {name: (folder / name).read_bytes() for name in TYPES}


def flipped(content: bytes, place: int, bit: int) -> bytes:
    changed = bytearray(content)
    changed[place + bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def refusal(function, file) -> str:
    """Why a file is refused; empty if it is read."""
    try:
        function(file, "it")
    except UsageError as problem:
        return str(problem)
    return ""


@pytest.mark.parametrize("type_name", TYPES)
def test_each_bit_of_kinds_and_offsets(type_name, contents, tmp_path, case):
    content, file = contents[type_name], tmp_path / "flipped.gguf"
    for name, (place, _, _) in infos(content).items():
        for bit in range(96):
            file.write_bytes(flipped(content, place, bit))
            told = refusal(open_file, file)
            case(f"{type_name} {name} bit {bit}", bool(told) and "\n" not in told, told)


def test_bits_of_names_and_shapes_give_the_same_model_or_none(contents, tmp_path, case):
    content, file, draw = contents["f16"], tmp_path / "flipped.gguf", random.Random(0)
    file.write_bytes(content)
    expected = read_gguf(file, "it")[0].state_dict()
    first, last = content.index(b"token_embd.weight") - 8, max(place for place, _, _ in infos(content).values())
    for _ in range(60):
        place, bit = draw.randrange(first, last), draw.randrange(8)
        file.write_bytes(flipped(content, place, bit))
        try:
            found = read_gguf(file, "it")[0].state_dict()
        except UsageError as problem:
            case(f"byte {place} bit {bit}", True, str(problem))
            continue
        case(f"byte {place} bit {bit}", all(torch.equal(value, found[key]) for key, value in expected.items()), "read")


def test_numbers_of_entries_that_no_file_has(contents, tmp_path, case):
    content, file = contents["q8_0"], tmp_path / "huge.gguf"
    for key in (b"tokenizer.ggml.tokens", b"tokenizer.ggml.token_type", b"tokenizer.ggml.merges"):
        place = content.index(key) + len(key) + 4
        for kind in range(13):
            for count in (2**20, 2**32, 2**60, 2**64 - 1):
                put = struct.pack("<IQ", kind, count)
                file.write_bytes(content[:place] + put + content[place + len(put) :])
                start = time.perf_counter()
                told = refusal(open_file, file)
                spent = time.perf_counter() - start
                case(f"{key.decode()} {count} of kind {kind}", bool(told) and spent < 2, f"{spent:.2f} s {told}")
