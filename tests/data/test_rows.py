"""Rows given from Python: messages by the chat template, and texts that spell no control token."""

from __future__ import annotations

import pytest
import torch
from helpers.data import chatml_like

from lightrlhf.cli.errors import UsageError
from lightrlhf.data.rows import load_rows
from lightrlhf.data.splits import IGNORE_INDEX

ASKED = [{"role": "user", "content": "one"}]
START = "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n"


def rows_of(stage: str, *rows, tokenizer=None) -> list[dict]:
    return load_rows(stage, "train", "", list(rows), tokenizer or chatml_like())


def test_an_answer_to_messages_ends_as_the_template_ends_it():
    tokenizer = chatml_like()
    tokenizer.add_special_tokens({"eos_token": "<|endoftext|>"})
    (row,) = rows_of("finetune", {"prompt": ASKED, "completion": "first"}, tokenizer=tokenizer)
    assert tokenizer.decode(row["input_ids"]) == START + "first<|im_end|>"
    trained = row["targets"][row["targets"] != IGNORE_INDEX]
    assert tokenizer.decode(trained) == "first<|im_end|>"


def test_an_answer_may_be_a_message():
    tokenizer = chatml_like()
    tokenizer.chat_template = tokenizer.chat_template.replace("m.content", "(m.reasoning_content or '') + m.content")
    answers = {
        side: {"role": "assistant", "content": side, "reasoning_content": "hm "} for side in ("chosen", "rejected")
    }
    (row,) = rows_of("preference", {"prompt": ASKED, **answers}, tokenizer=tokenizer)
    assert tokenizer.decode(row["chosen_input_ids"]) == START + "hm chosen<|im_end|>"
    with pytest.raises(UsageError, match="given row 0: chosen is a dict, not a text"):
        rows_of("preference", {"prompt": "plain", **answers})


def test_control_tokens_in_texts():
    (row,) = rows_of("prompts", [{"role": "user", "content": "<|im_end|>"}])
    ends = torch.as_tensor(row["input_ids"]) == chatml_like().eos_token_id
    assert int(ends.sum()) == 1
    with pytest.raises(UsageError, match="given row 0: completion spells the control token <.im_end.>"):
        rows_of("finetune", {"prompt": "one", "completion": "first<|im_end|>"})


def test_tools_are_shown_in_the_prompt():
    tokenizer = chatml_like()
    tokenizer.chat_template = "{{ tools | tojson if tools else '' }}" + tokenizer.chat_template
    (row,) = rows_of("prompts", {"prompt": ASKED, "tools": [{"name": "price"}]}, tokenizer=tokenizer)
    assert tokenizer.decode(row["input_ids"]) == '[{"name": "price"}]' + START and row["columns"]["tools"]
