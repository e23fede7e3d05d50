"""`--chat_template`: the bundled one gives tools to a model without them, and a file replaces the model's own."""

import json

import pytest
from helpers import save_model
from helpers.serving import serving
from helpers.templates import CHATML
from helpers.tool_templates import BUNDLED, tool_tokenizer

from lightrlhf.cli.errors import UsageError
from lightrlhf.data.rendering import render
from lightrlhf.data.templates import use_template

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
ASKED = [{"role": "user", "content": "two and three?"}]
CALLED = {"id": "call00000", "type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 3}}}
LATER = [
    {"role": "assistant", "content": "", "tool_calls": [CALLED, {**CALLED, "id": "call00001"}]},
    {"role": "tool", "content": "5", "tool_call_id": "call00000"},
    {"role": "tool", "content": "6", "tool_call_id": "call00001"},
    {"role": "assistant", "content": "It is 5."},
    {"role": "user", "content": "and four?"},
]


@pytest.mark.parametrize("name", BUNDLED)
def test_the_bundled_template_adds_tools_and_changes_nothing_else(name):
    own, tokenizer = tool_tokenizer(name), tool_tokenizer(f"{name} with tools")
    assert render(tokenizer, ASKED, None, True) == render(own, ASKED, None, True)
    text = render(tokenizer, [*ASKED, *LATER], [ADD], True)
    assert text.count('<tools>\n{"type": "function"') == 1 and text.count("<tool_call>\n{") == 3  # one shows the form
    assert "<tool_response>\n5\n</tool_response>\n<tool_response>\n6\n</tool_response>" in text
    assert json.dumps(CALLED["function"]) in text
    if name not in ("gemma", "two_roles", "mistral", "deepseek_r1"):
        system = [{"role": "system", "content": "Be short."}]
        text = render(tokenizer, [*system, *ASKED], [ADD], True)
        assert text.index("Be short.") < text.index("<tools>") < text.index("two and three")


def test_a_template_that_cannot_be_read_is_one_line(tmp_path):
    tokenizer = tool_tokenizer("chatml")
    for path in (tmp_path / "none.jinja", tmp_path):
        with pytest.raises(UsageError, match=path.name):
            use_template(tokenizer, str(path))


@pytest.mark.slow
def test_a_served_model_without_tools_gets_them(tmp_path):
    tokenizer = tool_tokenizer("chatml")
    save_model("llama", tmp_path / "model", tokenizer, max_position_embeddings=1024)
    tokenizer.save_pretrained(tmp_path / "model")
    body = {"messages": ASKED, "tools": [ADD], "max_tokens": 4, "return_token_ids": True, "seed": 1}
    (tmp_path / "own.jinja").write_text(CHATML)
    with serving(tmp_path / "model", chat_template="tools") as (_, server):
        answer = server.ask("/v1/chat/completions", body)
        assert answer.status_code == 200, answer.text
        assert "<tools>" in tokenizer.decode(answer.json()["prompt_token_ids"])
    with serving(tmp_path / "model", chat_template=tmp_path / "own.jinja") as (_, server):
        answer = server.ask("/v1/chat/completions", body)
        assert answer.status_code == 400 and "writes no tools" in answer.text
