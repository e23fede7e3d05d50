"""Texts that grow token by token are the whole ones, by decoding a few tokens at a time."""

import random

import pytest
from helpers.templates import ZOO

from lightrlhf.generation.response_texts import LONGEST, Growing, Texts

WORDS = ["a ", "tea", " please", "\n", "é", "你好", "😀", "🏳️‍🌈", " ", ", and", "<think>", "<|im_end|>", "x"]


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("kind", ["qwen_thinking", "llama31_tools", "gemma", "mistral_tools", "llama2", "stripping"])
def test_a_text_grows_into_the_whole_one(kind, skip):
    tokenizer, decoded = ZOO[kind].tokenizer, []
    texts = Texts(tokenizer)
    for seed in range(20):
        text = "".join(random.Random(seed).choices(WORDS, k=40))
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        growing = Growing(lambda part: decoded.append(len(part)) or texts.of_ids(part, skip))
        whole = texts.of_ids(ids, skip)
        assert "".join(growing.add([index]) for index in ids) == whole
        assert "".join(Growing(lambda part: texts.of_ids(part, skip)).add(ids)) == whole
    assert max(decoded) < 20


@pytest.mark.parametrize("token", ["Ã", "<|im_end|>"])
def test_a_text_without_an_end_of_its_characters_has_a_short_window(token):
    tokenizer, decoded = ZOO["chatml"].tokenizer, []
    growing = Growing(lambda part: decoded.append(len(part)) or Texts(tokenizer).of_ids(part, True))
    for _ in range(300):
        growing.add([tokenizer.convert_tokens_to_ids(token)])
    assert max(decoded) <= LONGEST + 2
