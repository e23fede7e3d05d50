"""The token that ends an assistant turn, read off the chat template."""

from __future__ import annotations

import copy

import pytest
from helpers.data import CHATML_TEMPLATE, LLAMA2_TEMPLATE, LLAMA3_TEMPLATE, sentencepiece_like
from helpers.ends import EOS, GEMMA, PHI3, tokenizer_of

from datasets_prep.common import PLAIN_TEMPLATE, complete
from lightrlhf.data.tokens import turn_end

TAGS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
)
OPEN = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n\n' }}{% endfor %}"
PICKY = "{% if messages | length < 9 %}{{ raise_exception('nine messages, please') }}{% endif %}"
MISSING = "{{ messages[0].parts.text + '' }}"
DEAF = "{{ bos_token }}{% for m in messages %}<|im_end|>{% endfor %}"


@pytest.mark.parametrize(
    "template, end",
    [
        (CHATML_TEMPLATE, "<|im_end|>"),
        (LLAMA3_TEMPLATE, "<|eot_id|>"),
        (GEMMA, "<end_of_turn>"),
        (PHI3, "<|end|>"),
        (TAGS, "<|im_end|>"),
        (PLAIN_TEMPLATE, EOS),
    ],
)
def test_the_template_says_what_ends_a_turn(template, end):
    marks = ("<|im_start|>", "<|im_end|>", "<|eot_id|>", "<start_of_turn>", "<end_of_turn>", "<|end|>")
    tokenizer = tokenizer_of(template, *marks)
    assert turn_end(tokenizer) == tokenizer.convert_tokens_to_ids(end)


def test_sentencepiece_in_the_shape_of_llama_2_and_mistral(tmp_path):
    tokenizer = complete(sentencepiece_like(tmp_path), None)
    assert turn_end(tokenizer) == tokenizer.eos_token_id
    tokenizer.chat_template = LLAMA2_TEMPLATE
    assert turn_end(tokenizer) == tokenizer.eos_token_id


def test_an_added_token_that_is_not_special_ends_a_turn():
    tokenizer = tokenizer_of(CHATML_TEMPLATE, added=("<|im_end|>",))
    assert turn_end(tokenizer) == tokenizer.convert_tokens_to_ids("<|im_end|>")


def test_an_added_run_of_newlines_does_not_end_a_turn():
    tokenizer = tokenizer_of(OPEN, added=("\n\n",))
    assert turn_end(tokenizer) is None
    tokenizer.chat_template = OPEN + "{{ eos_token }}"
    assert turn_end(tokenizer) == tokenizer.eos_token_id


@pytest.mark.parametrize("template", [None, "", OPEN, PICKY, MISSING, DEAF])
def test_no_end_without_a_template_that_writes_one(template):
    assert turn_end(tokenizer_of(template, "<|im_end|>")) is None


def test_a_marker_that_is_plain_text_ends_no_turn():
    assert turn_end(tokenizer_of(CHATML_TEMPLATE)) is None


def test_a_changed_template_or_end_token_is_read_again():
    tokenizer = tokenizer_of(CHATML_TEMPLATE, "<|im_end|>", "<|eot_id|>")
    other = copy.deepcopy(tokenizer)
    assert turn_end(tokenizer) == tokenizer.convert_tokens_to_ids("<|im_end|>")
    tokenizer.chat_template = PLAIN_TEMPLATE
    assert turn_end(tokenizer) == tokenizer.eos_token_id
    tokenizer.eos_token = "<|eot_id|>"
    assert turn_end(tokenizer) == tokenizer.convert_tokens_to_ids("<|eot_id|>")
    assert turn_end(other) == other.convert_tokens_to_ids("<|im_end|>")
