"""HTML of the demo: what is escaped, which parts a turn has, and thinking apart from the answer."""

import pytest

from lightrlhf.demo.dialogue import end_stream, prompt_of, split_thinking, user_turn
from lightrlhf.demo.markup import cards_as_html, dialogue_as_html, shorten, table_as_html, welcome

EVIL = '<img src=x onerror="window.pwned=1">${1+1}{{7*7}}'
ESCAPED = "&lt;img src=x onerror=&#34;window.pwned=1&#34;&gt;"


@pytest.mark.parametrize(
    ("text", "thinking", "answer"),
    [
        ("Hi.", "", "Hi."),
        ("<think>Well.</think>\n\nHi.", "Well.", "Hi."),
        ("Well.\n</think>\nHi.", "Well.", "Hi."),  # the template has written the first tag
        ("<think>We", "We", ""),
        ("<think></think>Hi.", "", "Hi."),
        ("So <think>Well.</think> Hi.", "Well.", "So  Hi."),
        ("Hi. </think>", "Hi.", ""),
    ],
)
def test_thinking_is_split_from_the_answer(text, thinking, answer):
    assert split_thinking(text) == (thinking, answer)


def test_later_turns_do_not_get_the_thinking():
    answered = {"role": "assistant", "content": "<think>Hm.</think>\nHi."}
    cut = {"role": "assistant", "content": "<think>Hm"}
    talk = [user_turn("a <think>", []), answered, user_turn("b", []), cut]
    contents = [message["content"] for message in prompt_of(talk, "dialogue", "c", "", "", "")]
    assert contents == ["a <think>", "Hi.", "b", "<think>Hm", "c"]


def test_every_text_is_escaped():
    turns = [user_turn(EVIL, EVIL), {"role": "assistant", "content": f"<think>{EVIL}</think>{EVIL}", "label": EVIL}]
    turns += [{"role": "assistant", "content": "", "label": EVIL, "pending": EVIL, "scores": [(EVIL, EVIL)]}]
    shown = [dialogue_as_html(turns), dialogue_as_html([], EVIL, [EVIL]), welcome(EVIL, hint=EVIL)]
    shown += [cards_as_html([EVIL], [EVIL], [[(EVIL, EVIL)]]), table_as_html([EVIL], [[EVIL]], EVIL)]
    for html in shown:
        assert "<img" not in html and html.count(ESCAPED) >= 2


def test_scores_and_thinking_stand_apart_from_the_text():
    answer = {"role": "assistant", "content": "<think>Hm.</think>Hi.", "label": "ppo", "scores": [("KL", "1.20")]}
    shown = dialogue_as_html([user_turn("Hello", "Hello"), answer])
    assert '<div class="text">Hi.</div>' in shown and '<div class="thought">Hm.</div>' in shown
    assert '<ul class="scores" aria-label="Scores"><li><span>KL</span> 1.20</li></ul>' in shown
    assert 'data-act="tokens"' not in shown  # without a reference there are no log-ratios


def test_a_dialogue_is_busy_while_an_answer_is_written():
    question = user_turn("Hello", "Hello")
    pending = {"role": "assistant", "content": "", "label": "ppo", "pending": "Loading ppo …"}
    writing = {"role": "assistant", "content": "Hi", "label": "ppo", "streaming": True}
    assert "Loading ppo …" in dialogue_as_html([question, pending])
    for turns, is_busy in (([question], False), ([question, pending], True), ([question, writing], True)):
        assert ('aria-busy="true"' in dialogue_as_html(turns)) == is_busy
        assert 'aria-busy="true"' not in dialogue_as_html(end_stream(turns))
    assert end_stream([question, pending]) == [question] and end_stream([]) == []
    assert end_stream([question, writing])[1]["content"] == "Hi"


def test_a_table_names_the_column_in_each_cell():
    shown = table_as_html(["model", "wins"], [["ppo", 3]], "Tally")
    assert '<td data-name="wins">3</td>' in shown and '<th scope="col">model</th>' in shown
    assert "no votes" in table_as_html(["model"], [], "Tally", "no votes")
    assert shorten("a\nb " * 100).endswith("…") and len(shorten("a\nb " * 100)) == 160
