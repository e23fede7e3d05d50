"""Rows given from Python: messages by the chat template, and texts that spell no control token."""

import torch
from helpers.data import chatml_like
from helpers.errors import error_naming

from lightrlhf.cli.errors import UsageError
from lightrlhf.data.rows import load_rows
from lightrlhf.data.splits import IGNORE_INDEX, first_answer

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
    with error_naming(UsageError, "row 0", "chosen", "dict"):
        rows_of("preference", {"prompt": "plain", **answers})


def test_control_tokens_in_texts():
    (row,) = rows_of("prompts", [{"role": "user", "content": "<|im_end|>"}])
    ends = torch.as_tensor(row["input_ids"]) == chatml_like().eos_token_id
    assert int(ends.sum()) == 1
    with error_naming(UsageError, "row 0", "completion", "<|im_end|>"):
        rows_of("finetune", {"prompt": "one", "completion": "first<|im_end|>"})


def test_tools_are_shown_in_the_prompt():
    tokenizer = chatml_like()
    tokenizer.chat_template = "{{ tools | tojson if tools else '' }}" + tokenizer.chat_template
    (row,) = rows_of("prompts", {"prompt": ASKED, "tools": [{"name": "price"}]}, tokenizer=tokenizer)
    assert tokenizer.decode(row["input_ids"]) == '[{"name": "price"}]' + START and row["columns"]["tools"]


def test_what_a_template_leaves_out_and_what_is_rendered_already_are_refused():
    thought = {"role": "assistant", "content": "four", "reasoning_content": "Look it up."}
    with error_naming(UsageError, "row 0", "completion", "reasoning"):
        rows_of("finetune", {"prompt": ASKED, "completion": thought})
    with error_naming(UsageError, "row 0", "tools"):
        rows_of("finetune", {"prompt": ASKED, "completion": "four", "tools": [{"name": "price"}]})
    with error_naming(UsageError, "row 0", "completion", "weight 0"):
        rows_of("finetune", {"prompt": ASKED, "completion": {"role": "assistant", "content": "four", "weight": 0}})
    for stage in ("finetune", "prompts"):
        with error_naming(UsageError, "row 0", "prompt", "<|im_start|>"):
            rows_of(stage, {"prompt": START, "completion": "four"})
    for label in (0, "false", None):
        with error_naming(UsageError, "target"):
            rows_of("finetune", {"prompt": "one", "completion": "four", "label": label})
    tokenizer = chatml_like()
    tokenizer.chat_template = "{{ raise_exception('no system role') }}"
    with error_naming(UsageError, "row 0", "system role"):
        rows_of("prompts", ASKED, tokenizer=tokenizer)


def test_no_given_rows_to_train_on_are_refused_and_no_given_validation_is_none():
    with error_naming(UsageError, "prompts"):
        load_rows("prompts", "train", "", [], None)
    assert load_rows("prompts", "validation", "", [{"prompt": "Hi"}], None).to_list() == []


def test_the_first_answer_of_a_dialogue():
    row = {"prompt_len": 2, "input_ids": torch.arange(9), "targets": torch.tensor([-100, -100, 2, 3, -100, 5, 6, 7, 8])}
    assert first_answer(row) == 4
    assert first_answer(row | {"targets": torch.tensor([-100, -100, *range(2, 9)])}) is None
    assert first_answer({"prompt_len": 2, "chosen_input_ids": torch.arange(9)}) is None
