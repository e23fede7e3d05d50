"""Messages as people have them: weights, reasoning, tools, odd orders; unpaired feedback, documents, previews."""

import json
import re

import pytest
import torch
from helpers.data import arguments, chatml_like, collected, every, gpt2_like, write_lines
from helpers.errors import error_naming

from datasets_prep.common import PrepareArgs, prepare, rows_of
from datasets_prep.encoding import Dropped, Example
from datasets_prep.formats import to_row
from datasets_prep.generic import prepare_data as generic
from datasets_prep.messages import ROLES, as_message, as_messages, is_plain
from datasets_prep.reading import Source
from datasets_prep.turns import BadRow
from lightrlhf.cli.errors import RunFailure, UsageError
from lightrlhf.data.splits import IGNORE_INDEX, load_prompts, load_split

# Writes reasoning and calls of the last answer, reasoning of earlier ones not at all.
THINKING = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>{{ m.reasoning_content or '' }}</think>{% endif %}"
    "{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<call>{{ call.function | tojson }}</call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "price", "parameters": {"type": "object", "properties": {}}}}
CALL = {"type": "function", "function": {"name": "price", "arguments": {"item": "latte"}}}


def message(role: str, content: str, **more) -> dict:
    return {"role": role, "content": content, **more}


USER, ANSWER = message("user", "one"), message("assistant", "first")


def thinking():
    tokenizer = chatml_like()
    tokenizer.chat_template = THINKING
    return tokenizer


def trained(tokenizer, example: Example) -> list[str]:
    return [tokenizer.decode(example.ids[0][a:b].tolist()) for a, b in example.spans]


def finetune(rows, tokenizer, **given) -> tuple[list[Example], list[str]]:
    examples, dropped = collected(rows, tokenizer, stage="finetune", shuffle=False, **given)
    return every(examples, "finetune"), [row.reason for row in dropped]


# ------------------------------------------------------------------------------------------------- assistant messages
@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_is_read_under_each_of_its_names(name):
    row = {"messages": [USER, message("assistant", "It is 4.", **{name: "Look it up."})]}
    ((example,), _) = finetune([to_row(row, {})], thinking())
    assert trained(thinking(), example) == ["<think>Look it up.</think>It is 4.<|im_end|>"]
    both = message("assistant", "It is 4.", **{name: "Look it up.", "reasoning_content": "Look it up."})
    assert to_row({"messages": [USER, both]}, {})["messages"] == to_row(row, {})["messages"]


def test_two_fields_of_other_reasoning_are_refused():
    with pytest.raises(BadRow, match="reasoning"):
        to_row({"messages": [USER, message("assistant", "4", reasoning="a", reasoning_content="b")]}, {})


def test_reasoning_and_tool_calls_are_trained_wherever_they_come():
    tokenizer = thinking()
    answer = message("assistant", "It is 4.", reasoning_content="Look it up.", tool_calls=[CALL])
    expected = (
        '<think>Look it up.</think>It is 4.<call>{"name": "price", "arguments": {"item": "latte"}}</call><|im_end|>'
    )
    for row in ({"messages": [USER, answer]}, {"prompt": [USER], "completion": answer}):
        (example,), _ = finetune([row | {"tools": [TOOL]}], tokenizer)
        assert trained(tokenizer, example) == [expected]
        assert '"price"' in tokenizer.decode(example.ids[0][: example.prompt_len].tolist())
    pair = {"prompt": [USER], "chosen": answer, "rejected": message("assistant", "No idea.", reasoning_content="Hm.")}
    (example,) = every(collected([pair | {"tools": [TOOL]}], tokenizer, stage="preference")[0], "preference")
    texts = [tokenizer.decode(side[example.prompt_len :].tolist()) for side in example.ids]
    assert texts == [expected, "<think>Hm.</think>No idea.<|im_end|>"]


def test_what_a_template_leaves_out_is_refused():
    answer = message("assistant", "4 euros")
    cases = {
        "template_drops_reasoning": {"messages": [USER, answer | {"reasoning_content": "Look it up."}]},
        "template_drops_tool_calls": {"messages": [USER, answer | {"tool_calls": [CALL]}]},
        "template_drops_tools": {"messages": [USER, answer], "tools": [TOOL]},
    }
    for reason, row in cases.items():
        assert finetune([row], chatml_like()) == ([], [reason])
    forgetful = "{% for m in messages if m.role != 'system' %}{{ m.role + m.content + eos_token }}{% endfor %}{% if add_generation_prompt %}assistant{% endif %}"  # noqa: E501
    row = {"messages": [message("system", "Be brief."), USER, ANSWER]}
    assert finetune([row], gpt2_like(), chat_template=forgetful) == ([], ["template_drops_system_message"])


def test_messages_of_weight_0_carry_no_loss():
    tokenizer = chatml_like()
    second = [message("user", "two"), message("assistant", "second")]
    row = {"messages": [USER, ANSWER | {"weight": 0}, *second]}
    (example,), _ = finetune([row], tokenizer)
    assert trained(tokenizer, example) == ["second<|im_end|>"] and example.notes == (
        "message_of_weight_0_carries_no_loss",
    )
    assert finetune([{"messages": [USER, ANSWER | {"weight": 0}]}], tokenizer) == ([], ["every_message_has_weight_0"])
    assert finetune([{"messages": [USER, ANSWER | {"weight": 0.5}]}], tokenizer)[1] == ["message_weight_is_not_0_or_1"]
    weighted = [{"messages": [USER, ANSWER | {"weight": 1}, *second]}]
    assert trained(tokenizer, finetune(weighted, tokenizer)[0][0]) == ["first<|im_end|>", "second<|im_end|>"]


def test_odd_orders_of_roles():
    tokenizer = chatml_like()
    (example,), _ = finetune([{"messages": [USER, USER, ANSWER]}], tokenizer)
    assert trained(tokenizer, example) == ["first<|im_end|>"]
    (example,), _ = finetune([{"messages": [ANSWER, USER, message("assistant", "second")]}], tokenizer)
    assert trained(tokenizer, example) == ["second<|im_end|>"] and example.notes == ("opening_answer_carries_no_loss",)
    assert finetune([{"messages": [USER, ANSWER, USER]}], tokenizer) == ([], ["messages_end_without_an_answer"])
    assert finetune([{"messages": [ANSWER]}], tokenizer) == ([], ["no_user_message"])
    alternating = {"messages": [USER, USER, ANSWER]}
    assert [row.reason for row in collected([alternating], tokenizer, stage="dialogue")[1]] == ["role_order_broken"]


def test_a_turn_ends_as_the_template_ends_it():
    tokenizer = chatml_like()
    tokenizer.add_special_tokens({"eos_token": "<|endoftext|>"})
    second = [message("user", "two"), message("assistant", "second")]
    (example,), _ = finetune([{"messages": [USER, ANSWER, *second]}], tokenizer)
    assert trained(tokenizer, example) == ["first<|im_end|>", "second<|im_end|>"]
    assert tokenizer.eos_token_id not in example.ids[0]
    tokenizer.chat_template = tokenizer.chat_template.replace("<|im_end|>", "")
    (example,), _ = finetune([{"messages": [USER, ANSWER]}], tokenizer)
    assert trained(tokenizer, example) == ["first<|endoftext|>"]


# ------------------------------------------------------------------------------------------------- other kinds of rows
RATED = [{"prompt": f"p{n // 2}", "completion": f" good {n}" if n % 2 else f" bad {n}", "label": bool(n % 2)} for n in range(80)]  # fmt: skip # noqa: E501


def test_unpaired_feedback(tmp_path):
    args = arguments(destination_dir=str(tmp_path / "data"))
    report = prepare(args, RATED, tokenizer=gpt2_like())
    assert {name.rpartition("_")[0] for name in report["files"]} == {"unpaired", "prompts"}
    rows = [
        row for split in ("train", "validation", "test") for row in load_split(tmp_path / "data", "unpaired", split)
    ]
    decoded = {gpt2_like().decode(row["input_ids"].tolist()): row["label"] for row in rows}
    assert decoded == {f"{row['prompt']}{row['completion']}<|endoftext|>": row["label"] for row in RATED}
    assert report["files"]["unpaired_train"]["labels"].keys() == {"True", "False"}
    splits = [
        {
            gpt2_like().decode(row["input_ids"][: row["prompt_len"]].tolist())
            for row in load_split(tmp_path / "data", "unpaired", split)
        }
        for split in ("train", "validation", "test")
    ]
    assert not splits[0] & splits[1] and not splits[0] & splits[2]


def test_good_responses_are_demonstrations_only_when_asked():
    made, reasons = finetune(RATED, gpt2_like(), remove_same_inputs=False)
    assert len(made) == 40 and reasons == ["label_is_false"] * 40
    assert all("good" in text for example in made for text in trained(gpt2_like(), example))


def test_documents_train_every_token(tmp_path):
    (example,), _ = finetune([{"text": "Human: hello"}], gpt2_like())
    assert trained(gpt2_like(), example) == ["Human: hello<|endoftext|>"] and example.prompt_len == 0
    assert finetune([{"text": "Human: hello <|endoftext|> again"}], gpt2_like()) == ([], ["special_token_in_text"])
    prepare(arguments(destination_dir=str(tmp_path)), [{"text": f"text {n}"} for n in range(60)], tokenizer=gpt2_like())
    row = load_split(tmp_path, "finetune", "train")[0]
    assert row["targets"].tolist() == row["input_ids"].tolist() and IGNORE_INDEX not in row["targets"]
    with error_naming(UsageError, "prompts"):
        load_prompts(tmp_path, "train")


def test_plain_prompts_may_be_wrapped():
    tokenizer = chatml_like()
    row = {"prompt": "hello", "completion": "hi"}
    plain, wrapped = (finetune([row], tokenizer, wrap_prompts=wraps)[0][0].ids[0] for wraps in (None, True))
    assert tokenizer.decode(plain.tolist()) == "hellohi<|im_end|>"
    assert (
        tokenizer.decode(wrapped.tolist()) == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nhi<|im_end|>"
    )


# ------------------------------------------------------------------------------------------------- splits and lengths
def test_a_sets_own_test_split_serves_every_stage():
    row = {"completion": " answer", "split": "test"}
    rows = [{"prompt": f"p{n}", **row} for n in range(50)] + [
        {"prompt": f"q{n}", "completion": " a b"} for n in range(50)
    ]
    examples, _ = collected(rows, split="1,0,1")
    assert len(examples["finetune"]["test"]) >= 50 and len(examples["prompts"]["test"]) >= 50
    kinds = [
        {e.ids[0][: e.prompt_len].tobytes() for e in examples[stage]["train"]} for stage in ("finetune", "prompts")
    ]
    assert kinds[0] and kinds[1] and not kinds[0] & kinds[1]


def test_room_for_a_response():
    assert PrepareArgs(destination_dir="", tokenizer_name="", dataset_name="").longest_prompt() == 1024 - 128
    assert arguments(max_length=64).longest_prompt() == 32 and arguments(max_prompt_length=99).longest_prompt() == 99


def test_many_rows_lost_to_length_are_a_warning(tmp_path, capsys):
    rows = [{"prompt": f"p{n}" + " word" * (60 if n % 8 == 0 else 1), "completion": " yes"} for n in range(80)]
    prepare(arguments(destination_dir=str(tmp_path), max_prompt_length=40), rows, tokenizer=gpt2_like())
    assert "warning: 12% of the finetune rows are too long (10 dropped, 0 truncated)" in capsys.readouterr().out
    prepare(arguments(destination_dir=str(tmp_path)), rows, tokenizer=gpt2_like())
    assert "warning" not in capsys.readouterr().out


def test_a_dry_run_prints_rows_and_counts_and_writes_nothing(tmp_path, capsys):
    file = write_lines(tmp_path / "mine.jsonl", ({"prompt": f"p{n}", "completion": " yes"} for n in range(30)))
    gpt2_like().save_pretrained(tmp_path / "tokenizer")
    flags = {"destination_dir": tmp_path / "out", "dataset_name": file, "tokenizer_name": tmp_path / "tokenizer"}
    generic.main([*(f"--{name}={value}" for name, value in flags.items()), "--dry_run"])
    out = capsys.readouterr().out
    assert out.count("⟦ yes<|endoftext|>⟧") == 2 and "finetune 1" in out and "nothing was written" in out
    kept = [sum(map(int, re.findall(r"\d+", line))) for line in out.splitlines() if "kept for" in line]
    assert kept == [30, 30]  # finetune and prompts
    assert not (tmp_path / "out").exists()


def test_control_tokens_in_contents_are_counted_in_the_report(tmp_path):
    rows = [{"messages": [message("user", f"<|im_end|> {n}"), message("assistant", "fine")]} for n in range(30)]
    report = prepare(arguments(destination_dir=str(tmp_path)), rows, tokenizer=chatml_like())
    notes = {(note["note"], note["stage"]): note["rows"] for note in report["notes"]}
    assert notes["control_token_spelled_in_text", "finetune"] == 30
    assert "control_token_spelled_in_text" in (tmp_path / "report.md").read_text()
    row = load_split(tmp_path, "finetune", "train")[0]
    end = chatml_like().eos_token_id
    assert int((torch.as_tensor(row["input_ids"]) == end).sum()) == 2
    assert json.loads((tmp_path / "report.json").read_text())["notes"] == report["notes"]


def test_rendered_prompts_are_not_wrapped_once_more():
    rendered = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    for row in ({"prompt": rendered, "completion": "hi you"}, {"prompt": "hello", "completion": "hi you<|im_end|>"}):
        assert finetune([row], chatml_like(), wrap_prompts=True) == ([], ["special_token_in_text"])
    (example,), _ = finetune([{"prompt": "hello", "completion": " hi"}], chatml_like(), wrap_prompts=True)
    assert example.notes == ("answer_begins_with_a_space",)


def test_a_prompt_that_both_sides_begin_with_stays_text():
    row = {"prompt": "The sky", "chosen": " is blue", "rejected": " is red", "is_plain": True}
    examples, _ = collected([row], chatml_like(), wrap_prompts=True)
    assert set(examples) == {"finetune", "preference", "prompts"}
    (example,) = every(examples, "preference")
    assert chatml_like().decode(example.ids[0].tolist()) == "The sky is blue<|im_end|>"


def test_labels_of_another_kind_are_refused_as_a_whole(tmp_path):
    rows = [{"prompt": f"p{n}", "completion": " fine", "label": n % 5} for n in range(40)]
    file = write_lines(tmp_path / "stars.jsonl", rows)
    gpt2_like().save_pretrained(tmp_path / "tokenizer")
    args = arguments(generic.GenericArgs, destination_dir=str(tmp_path / "out"), dataset_name=str(file))
    with error_naming(RunFailure, "stars.jsonl:3", "label"):
        prepare(args, rows_of(Source(str(file)), to_row, None), tokenizer=gpt2_like())


def test_nothing_to_train_on_says_why(tmp_path):
    args = arguments(destination_dir=str(tmp_path), test_percentage=0.5, validation_percentage=0.49)
    with error_naming(RunFailure, "validation", "test"):
        prepare(args, [{"prompt": "p", "completion": " fine", "split": "test"}], tokenizer=gpt2_like())
    first = arguments(destination_dir=str(tmp_path), dry_run=True)
    with error_naming(RunFailure, "1 x prompt_is_null"):
        prepare(first, [Dropped("prompt_is_null", "file:1")], tokenizer=gpt2_like())


@pytest.mark.parametrize(
    "date, dated",
    [
        ("{{ strftime_now('%d %b %Y') }}", [True, True]),
        ("26 Jul 2024", [False, False]),
        ("{% if tools %}{{ strftime_now('%Y') }}{% endif %}", [False, True]),
    ],
)
def test_a_date_that_stays_in_rows_is_noted(date, dated):
    tokenizer = thinking()
    tokenizer.chat_template = date + tokenizer.chat_template
    rows = [{"messages": [USER, ANSWER]}, {"messages": [USER, ANSWER], "tools": [TOOL]}]
    notes = [finetune([row], tokenizer)[0][0].notes for row in rows]
    assert ["todays_date_written_by_the_template" in note for note in notes] == dated


def test_a_name_that_the_template_does_not_write_is_noted():
    rows = [{"messages": [USER | {"name": "bob"}, ANSWER]}, {"prompt": [USER | {"name": "bob"}], "completion": "first"}]
    for row in rows:
        (example,), _ = finetune([row], chatml_like())
        assert example.notes == ("name_not_written_by_the_template",)
    tokenizer = chatml_like()
    tokenizer.chat_template = tokenizer.chat_template.replace("m.role", "(m.name or m.role)", 1)
    assert finetune(rows[:1], tokenizer)[0][0].notes == ()


def test_turns_of_a_dialogue_are_whole_where_tags_count_a_part():
    tokenizer = chatml_like()
    body = "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}plainly {% generation %}"
    body += "{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    tokenizer.chat_template = body + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    examples, _ = collected([{"messages": [USER, ANSWER]}], tokenizer)
    ((finetuned,), (dialogue,)) = every(examples, "finetune"), every(examples, "dialogue")
    assert [text.strip() for text in trained(tokenizer, finetuned)] == ["first"]  # the space is the word's token's
    assert trained(tokenizer, dialogue) == ["plainly first<|im_end|>"]


def test_a_plain_message_is_read_as_any_other():
    for role in ROLES:
        turn = {"role": role, "content": "some words"}
        assert is_plain(turn) == (role != "function_call")
        if is_plain(turn):
            assert as_messages([turn]) == [as_message(turn)]
    odd = [{"role": "user"}, {"role": "User", "content": "a"}, {"role": ["user"], "content": "a"}, ["a", "b"]]
    odd += [{"role": "user", "content": None}, {"content": "a", "from": "user"}, {"role": "alien", "content": "a"}]
    assert not any(map(is_plain, odd))
