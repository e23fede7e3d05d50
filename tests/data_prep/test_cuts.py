"""Dialogues rendered and tokenised once give what they give turn by turn."""

from __future__ import annotations

import pytest
from helpers.data import CHATML_TEMPLATE, arguments, chatml_like, gpt2_like, llama3_like

from datasets_prep import common, encoding
from datasets_prep.encoding import Encoder
from datasets_prep.plans import Planner
from datasets_prep.splits import Placement
from lightrlhf.data.chat import shown_messages
from lightrlhf.data.rendering import Unrendered, render_plain, render_shown

# a prompt of more than five messages begins otherwise than the dialogue does
REMEMBERS = "{% if add_generation_prompt and messages | length > 5 %}{{ 'long ' }}{% endif %}" + CHATML_TEMPLATE
# an answer continues the last word of its prompt
MERGES = CHATML_TEMPLATE.replace("m.role + '\n' +", "m.role + ('' if m.role == 'assistant' else '\n') +").replace(
    "assistant\n", "assistant"
)


def dialogues() -> list[dict]:
    """Rows of one to four turns; some with a system message."""
    rows = []
    for number in range(40):
        turns = 1 + number % 4
        texts = [(f"Could I get {number + n} muffins?", f"Of course, {n} muffins!\n\nBye") for n in range(turns)]
        first = [{"role": "system", "content": "Be kind."}] if number % 3 == 0 else []
        said = [{"role": role, "content": t} for pair in texts for role, t in zip(("user", "assistant"), pair)]
        rows.append({"messages": first + said, "columns": {}})
    return rows


def made(tokenizer, template: str | None, cut: bool, monkeypatch) -> list:
    """What each row gives, and whether it was tokenised as one."""
    if template:
        tokenizer.chat_template = template
    tokenizer = common.complete(tokenizer, None)
    args = arguments()
    encoder = Encoder(args, tokenizer, Placement(args))
    if not cut:
        monkeypatch.setattr(encoder.plans, "cuts", None)
    return encoder(dialogues())


def values(made: tuple) -> list:
    examples, dropped = made
    parts = [(e.stage, e.prompt_len, e.place, [i.tolist() for i in e.ids], e.spans, e.key, e.notes) for e in examples]
    return [parts, dropped]


def number_of_wholes(tokenizer) -> int:
    planner = Planner(arguments(), common.complete(tokenizer, None), wraps=False)
    stages = frozenset({"finetune"})
    return sum(plan.whole is not None for row in dialogues() for plan in planner(row, stages))


@pytest.mark.parametrize("tokenizer", [gpt2_like, chatml_like, llama3_like])
def test_a_cut_dialogue_has_the_ids_of_its_turns(tokenizer, monkeypatch):
    one = values(made(tokenizer(), None, True, monkeypatch))
    assert one == values(made(tokenizer(), None, False, monkeypatch)) and one[0]
    is_parted = (
        tokenizer is not llama3_like
    )  # whose line breaks at the end of a prompt are other words before an answer
    assert number_of_wholes(tokenizer()) == (len(dialogues()) if is_parted else 0)


@pytest.mark.parametrize("template", [REMEMBERS, MERGES], ids=["remembers", "merges"])
def test_a_template_that_cannot_be_cut_is_noticed(template, monkeypatch):
    monkeypatch.setattr(encoding, "EVERY", 7)
    turn_by_turn = values(made(chatml_like(), template, False, monkeypatch))
    assert values(made(chatml_like(), template, True, monkeypatch)) == turn_by_turn


def test_prompt_and_answer_of_one_word_are_tokenised_apart():
    tokenizer = chatml_like()
    tokenizer.chat_template = MERGES
    assert number_of_wholes(tokenizer) == 0


def test_a_content_that_spells_what_a_prompt_ends_with_is_not_cut():
    tokenizer = common.complete(gpt2_like(), None)
    planner = Planner(arguments(), tokenizer, wraps=False)
    said = ("Say this: \n\nAssistant: yes", "No.")
    row = {"messages": [{"role": role, "content": text} for role, text in zip(("user", "assistant"), said)]}
    (plan,) = planner(row, frozenset({"finetune"}))
    assert plan.whole is None


PARTS = "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{{ '<|im_end|>' }}{% endfor %}"
REFUSES = "{% if messages | length > 1 %}{{ raise_exception('too many') }}{% endif %}" + CHATML_TEMPLATE


@pytest.mark.parametrize("template", [CHATML_TEMPLATE, "{{ bos_token }}" + CHATML_TEMPLATE + "{{ tools }}", PARTS])
def test_messages_without_copies_are_rendered_alike(template):
    tokenizer = chatml_like()
    tokenizer.chat_template = template
    for row in dialogues():
        shown = shown_messages(tokenizer, row["messages"])
        text = render_plain(tokenizer, shown, tokenizer.special_tokens_map)
        assert text == render_shown(tokenizer, shown) and "muffins" in text


def test_what_a_template_refuses_is_refused_without_copies():
    tokenizer = chatml_like()
    tokenizer.chat_template = REFUSES
    with pytest.raises(Unrendered, match="many"):
        render_plain(tokenizer, dialogues()[0]["messages"], {})
