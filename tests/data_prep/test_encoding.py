"""Ids and masks under every kind of tokenizer: text comes back, one end token, no doubled beginning."""

import numpy as np
import pytest
from helpers.data import (
    chatml_like,
    collected,
    every,
    gpt2_like,
    llama3_like,
    sentencepiece_like,
    targets_of,
    write_lines,
)
from helpers.errors import error_naming, refused
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from datasets_prep.common import complete
from datasets_prep.encoding import LOSSY
from datasets_prep.generic import prepare_data as generic
from lightrlhf.cli.errors import UsageError
from lightrlhf.data.rendering import render, writes_date
from lightrlhf.data.splits import IGNORE_INDEX
from lightrlhf.data.tokens import encode_prompt, encode_response
from lightrlhf.data.tool_calls import schema_of
from lightrlhf.data.turn_ends import turn_ends

MESSAGES = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "first"}]
KINDS = ["gpt2", "llama3", "chatml", "sentencepiece"]
PROMPTS = ["Human: a large latte, please?\n\nAssistant:", "TL;DR:", "naïve – 日本\n\n", "x"]
RESPONSES = [" Of course!", "Of course", "\nTwo lines\n\nand one", "  two spaces", "日本 🙂", " trailing  "]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    spm = sentencepiece_like(tmp_path_factory.mktemp("sentencepiece"))
    made = {"gpt2": gpt2_like(), "llama3": llama3_like(), "chatml": chatml_like(), "sentencepiece": spm}
    return {kind: complete(tokenizer, None) for kind, tokenizer in made.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_text_comes_back(tokenizers, kind):
    tokenizer = tokenizers[kind]
    rows = [{"prompt": p, "completion": r, "group": f"{p}{r}"} for p in PROMPTS for r in RESPONSES]
    examples, dropped = collected(rows, tokenizer, stage="finetune", remove_same_inputs=False, shuffle=False)
    assert not dropped
    texts = {tokenizer.decode(e.ids[0].tolist(), skip_special_tokens=True) for e in every(examples, "finetune")}
    assert texts == {row["prompt"] + row["completion"] for row in rows}


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_that_give_back_their_text_are_not_noted(tokenizers, kind):
    rows = [{"prompt": p, "completion": r, "group": f"{p}{r}"} for p in PROMPTS for r in RESPONSES]
    talk = [{"role": "user", "content": "naïve"}, {"role": "assistant", "content": "日本 🙂"}]
    examples, _ = collected([*rows, {"messages": talk}], tokenizers[kind], remove_same_inputs=False)
    stages = {stage: every(examples, stage) for stage in ("finetune", "prompts")}
    assert all(LOSSY[0] not in e.notes for found in stages.values() for e in found) and all(stages.values())


@pytest.mark.parametrize("splitter", ["WhitespaceSplit", "Whitespace"])
def test_words_that_a_tokenizer_does_not_know_are_noted(splitter):
    words = {word: index for index, word in enumerate(["<unk>", "<eos>", "a", "latte", "please"])}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = getattr(pre_tokenizers, splitter)()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", unk_token="<unk>")
    rows = [{"prompt": "a latte", "completion": text} for text in ("a latte please", "please", "a mocha please")]
    examples, _ = collected(rows, complete(tokenizer, None), stage="finetune", remove_same_inputs=False, shuffle=False)
    found = {tuple(e.ids[0][e.prompt_len :].tolist()): e.notes for e in every(examples, "finetune")}
    assert found == {(2, 3, 4, 1): (), (4, 1): (), (2, 0, 4, 1): LOSSY}


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_those_of_prompt_and_response_apart(tokenizers, kind):
    tokenizer = tokenizers[kind]
    messages = [{"role": "user", "content": "a latte"}]
    rows = [{"prompt": p, "completion": r} for p in [*PROMPTS, messages] for r in RESPONSES]
    for row in rows:
        examples, _ = collected([row], tokenizer, stage="finetune")
        (example,) = every(examples, "finetune")
        prompt = encode_prompt(tokenizer, row["prompt"])
        assert example.ids[0][: example.prompt_len].tolist() == prompt
        if isinstance(row["prompt"], str):
            assert example.ids[0][len(prompt) :].tolist() == encode_response(tokenizer, row["completion"])


@pytest.mark.parametrize("kind", KINDS)
def test_one_end_token_and_one_beginning(tokenizers, kind):
    tokenizer = tokenizers[kind]
    eos, bos = tokenizer.eos_token_id, tokenizer.bos_token_id
    text = {"prompt": "Human: hello\n\nAssistant:", "completion": " hi"}
    chat = {"prompt": [{"role": "user", "content": "hello"}], "completion": "hi"}
    for row in (text, chat):
        (example,) = every(collected([row], tokenizer, stage="finetune")[0], "finetune")
        ids, targets = example.ids[0].tolist(), targets_of(example, mask_prompt=True).tolist()
        trained = [target for target in targets if target != IGNORE_INDEX]
        assert trained.count(eos) == 1 and trained[-1] == eos
        assert targets[: example.prompt_len] == [IGNORE_INDEX] * example.prompt_len
        assert trained == ids[example.prompt_len :]
        if kind in ("llama3", "sentencepiece"):
            assert ids.count(bos) == 1 and ids[0] == bos


@pytest.mark.parametrize("kind", ["llama3", "sentencepiece"])
def test_a_prompt_that_brings_its_beginning_gets_no_second_one(tokenizers, kind):
    tokenizer = tokenizers[kind]
    row = {"prompt": tokenizer.bos_token + "Human: hello", "completion": " hi there"}
    (example,) = every(collected([row], tokenizer, stage="finetune")[0], "finetune")
    assert example.ids[0].tolist().count(tokenizer.bos_token_id) == 1
    assert example.ids[0][: example.prompt_len].tolist() == encode_prompt(tokenizer, row["prompt"])


@pytest.mark.parametrize("kind", KINDS)
def test_messages_train_every_assistant_turn_and_nothing_else(tokenizers, kind):
    tokenizer = tokenizers[kind]
    messages = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "first answer"},
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": "second answer"},
    ]
    examples, dropped = collected([{"messages": messages}], tokenizer, turn_prompt_length="64")
    assert not dropped
    (example,) = every(examples, "finetune")
    turns = [tokenizer.decode(example.ids[0][a:b].tolist(), skip_special_tokens=True) for a, b in example.spans]
    assert [turn.strip() for turn in turns] == ["first answer", "second answer"]
    targets = targets_of(example, mask_prompt=True)
    assert (targets == tokenizer.eos_token_id).sum() == 2
    rendered = tokenizer.apply_chat_template(messages, tokenize=False)
    assert tokenizer.decode(example.ids[0].tolist()).strip() == rendered.strip()  # rendered once, nothing added
    (dialogue,) = every(examples, "dialogue")
    assert dialogue.spans == example.spans and np.array_equal(dialogue.ids[0], example.ids[0])
    (prompt,) = every(examples, "prompts")
    assert prompt.ids[0].tolist() == encode_prompt(tokenizer, messages[:1])


def test_rows_with_like_endings_keep_their_own_beginnings(tokenizers):
    end = [{"role": "assistant", "content": "yes"}, {"role": "user", "content": "why?"}]
    rows = [{"prompt": [{"role": "user", "content": start}, *end], "completion": "because"} for start in ("one", "two")]
    examples, _ = collected(rows, tokenizers["chatml"], stage="finetune", shuffle=False)
    texts = [tokenizers["chatml"].decode(e.ids[0].tolist()) for e in every(examples, "finetune")]
    assert ["one" in text for text in sorted(texts)] == [True, False] and len(texts) == 2


def test_pad_may_be_the_end_token(tokenizers):
    for kind in ("gpt2", "chatml", "sentencepiece"):
        assert tokenizers[kind].pad_token_id == tokenizers[kind].eos_token_id
    assert tokenizers["llama3"].pad_token_id != tokenizers["llama3"].eos_token_id


def test_no_token_spans_the_border(tokenizers):
    """Whole, the words would merge: "Ass" + "istant" is one token."""
    tokenizer = tokenizers["gpt2"]
    (example,) = every(
        collected([{"prompt": "Ass", "completion": "istant"}], tokenizer, stage="finetune")[0], "finetune"
    )
    assert len(tokenizer("Assistant")["input_ids"]) < len(example.ids[0]) - 1
    assert tokenizer.decode(example.ids[0][: example.prompt_len].tolist()) == "Ass"


def test_a_row_begins_where_the_template_rewrites_history():
    template = (
        "{% for m in messages %}{{ m.role + ':' }}{% if m.role == 'assistant' and not loop.last %}past {% endif %}"
        "{{ m.content + eos_token }}{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    )
    roles = ("user", "assistant", "user", "assistant")
    messages = [{"role": role, "content": f"{role}{n}"} for n, role in enumerate(roles)]
    tokenizer = gpt2_like()
    examples, dropped = collected([{"messages": messages}], tokenizer, chat_template=template, shuffle=False)
    assert [(row.reason, row.stage) for row in dropped] == [("template_rewrites_history", "dialogue")]
    rows = [tokenizer.decode(example.ids[0].tolist()) for example in every(examples, "finetune")]
    end = tokenizer.eos_token
    first = f"user:user0{end}assistant:"
    assert rows == [f"{first}assistant1{end}", f"{first}past assistant1{end}user:user2{end}assistant:assistant3{end}"]
    trained = [tokenizer.decode(e.ids[0][a:b].tolist()) for e in every(examples, "finetune") for a, b in e.spans]
    assert trained == [f"assistant1{end}", f"assistant3{end}"]


def test_chat_template_makes_a_plain_prompt_a_message():
    row = {"prompt": "hello", "completion": "hi"}
    tokenizer = llama3_like()
    template = tokenizer.chat_template
    (example,) = every(collected([row], tokenizer, stage="finetune", chat_template=template)[0], "finetune")
    assert tokenizer.decode(example.ids[0].tolist()) == tokenizer.apply_chat_template(
        [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}], tokenize=False
    )


def test_tools_can_be_added_to_a_template_and_to_a_tokenizer_without_one():
    for tokenizer in (gpt2_like(), chatml_like()):
        added = complete(tokenizer, "tools")
        call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
        asked, answered = {"role": "user", "content": "1?"}, {"role": "assistant", "content": "", "tool_calls": [call]}
        tool = {"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object"}}}
        text = render(added, [asked, answered, {"role": "tool", "name": "add", "content": "two"}], [tool], True)
        assert schema_of(added) and text.count("add") > 1 and text.index("1?") < text.index("two")


def test_plain_template_writes_dialogues_as_they_were_published():
    tokenizer = complete(gpt2_like(), None)
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "\n\nHuman: a\n\nAssistant: b<|endoftext|>\n\nHuman: c\n\nAssistant:"


def test_tokenizer_that_cannot_end_a_response_is_refused():
    tokenizer = gpt2_like()
    tokenizer.eos_token = None
    with error_naming(UsageError, "end token"):
        complete(tokenizer, None)
    with pytest.raises(UsageError, match="--chat_template"):
        complete(gpt2_like(), "{% for m in messages %}")
    with pytest.raises(UsageError, match="--chat_template"):
        complete(gpt2_like(), "no/such/file.jinja")


FAILING = {
    "an import": "{% import 'x' as y %}",
    "an include": "{% include 'x' %}",
    "a base": "{% extends 'x' %}",
    "a long range": "{% for i in range(1000000) %}{% endfor %}",
    "a division": "{{ 1 // 0 }}",
    "itself": "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
    "a long text": "{{ 'a' * 10 ** 15 }}",
}


@pytest.mark.parametrize("name", FAILING)
def test_a_template_that_fails_is_one_line(capsys, tmp_path, name):
    tokenizer = chatml_like()
    tokenizer.chat_template = FAILING[name]
    assert turn_ends(tokenizer) == [] and not writes_date(tokenizer)
    with pytest.raises(UsageError) as problem:
        encode_prompt(tokenizer, [{"role": "user", "content": "a"}])
    assert len(str(problem.value).splitlines()) == 1
    tokenizer.save_pretrained(tmp_path / "own")
    write_lines(tmp_path / "a.jsonl", [{"messages": MESSAGES}])
    flags = [f"--destination_dir={tmp_path / 'out'}", f"--dataset_name={tmp_path / 'a.jsonl'}"]
    chatml_like().save_pretrained(tmp_path / "plain")
    for more in (["--tokenizer_name", "own"], ["--tokenizer_name", "plain", "--chat_template", FAILING[name]]):
        error = refused(capsys, generic.main, *flags, more[0], tmp_path / more[1], *more[2:])
        assert "cannot be rendered" in error
        assert ("--chat_template" in error) == (len(more) > 2)


@pytest.mark.parametrize("name", FAILING)
def test_a_row_for_which_the_template_fails_is_dropped(name):
    tokenizer = chatml_like()
    failing = FAILING[name].replace("{% extends 'x' %}", "{% include 'x' %}")  # which stands first only
    tokenizer.chat_template += "{% if messages[0].content == 'fail' %}" + failing + "{% endif %}"
    rows = [{"messages": [{"role": "user", "content": "fail"}, MESSAGES[1]]}, {"messages": MESSAGES}]
    examples, dropped = collected(rows, tokenizer, stage="finetune")
    assert len(every(examples, "finetune")) == 1
    assert [row.reason.startswith("refused_by_chat_template") for row in dropped] == [True]
