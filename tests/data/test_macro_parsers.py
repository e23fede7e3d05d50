"""Macro actions from a parser: character offsets of tokens, and segments from constituents."""

import sys
import types

import pytest
import torch
from helpers.errors import error_naming
from helpers.rollouts import rollout_of
from hypothesis import given, settings
from hypothesis import strategies as st

from lightrlhf.data import macro_parsers
from lightrlhf.data.macro_parsers import (
    ParseError,
    Span,
    check_spans,
    make_parser,
    parsed_segments,
    python_spans,
    segment_starts,
    token_ends,
)
from lightrlhf.data.tokens import decode
from lightrlhf.maths import macro_actions as macro

TEXT = "the cat sat on the mat"


def span(words: str, *children: Span) -> Span:
    start = TEXT.index(words)
    return Span(start, start + len(words), children)


WORDS = {word: span(word) for word in ("cat", "sat", "on", "mat")} | {"the": Span(0, 3), "THE": Span(15, 18)}
THE_MAT = span("the mat", WORDS["THE"], WORDS["mat"])
ON_THE_MAT = span("on the mat", WORDS["on"], THE_MAT)
THE_CAT = span("the cat", WORDS["the"], WORDS["cat"])
TREE = span(TEXT, THE_CAT, span("sat on the mat", WORDS["sat"], ON_THE_MAT))
ENDS = [3, 7, 11, 14, 18, 22]


@pytest.mark.parametrize(
    "cutoff, starts",
    [
        (6, [0]),
        (5, [0, 2]),  # the cat | sat on the mat
        (3, [0, 3]),  # `sat` alone joins the cat
        (2, [0, 4]),  # so does `on`
        (1, [0]),  # single tokens all join the one before
    ],
)
def test_constituents_by_hand(cutoff, starts):
    assert segment_starts([TREE], ENDS, cutoff) == starts


def test_a_long_word_and_a_text_without_spans_are_one_segment():
    assert segment_starts([Span(0, 9), Span(10, 12)], [2, 4, 6, 9, 11, 12], 2) == [0, 4]
    assert segment_starts([], [1, 2, 3], 2) == [0]


def test_a_token_that_ends_where_a_span_begins_does_not_belong_to_it():
    assert segment_starts([Span(0, 4), Span(4, 8)], [2, 4, 6, 8], 2) == [0, 2]


@st.composite
def trees(draw, start=0, end=40, depth=3):
    if depth == 0 or end - start < 2:
        return Span(start, end)
    cuts = sorted(draw(st.sets(st.integers(start, end), min_size=2, max_size=6)))
    parts = tuple(draw(trees(a, b, depth - 1)) for a, b in zip(cuts, cuts[1:]))
    return Span(start, end, parts)


@settings(max_examples=60)
@given(trees(), st.lists(st.integers(1, 40), min_size=1, max_size=30).map(sorted), st.integers(1, 6))
def test_parsed_segments_tile_the_response_and_break_at_spans_only(tree, ends, cutoff):
    starts = segment_starts(check_spans([tree], "x" * 40), ends, cutoff)
    assert starts[0] == 0 and starts == sorted(set(starts))
    mask = torch.ones(1, len(ends), dtype=torch.bool)
    segments = macro.beginning_at(mask, [starts])
    assert segments[0].diff().unique().tolist() in ([], [0], [1], [0, 1])
    assert int(segments.max()) + 1 == len(starts)

    def spans_in(node):
        yield node.start
        for part in node.children:
            yield from spans_in(part)

    borders = set(spans_in(tree))
    for start in starts[1:]:  # a span begins between the token before and this one's last character
        assert any(ends[start - 1] - 1 < border <= ends[start] - 1 for border in borders)


def test_segments_begin_at_the_given_actions():
    mask = torch.tensor([[0, 1, 1, 1, 1, 0], [0, 0, 1, 0, 0, 0], [0] * 6], dtype=torch.bool)
    found = macro.beginning_at(mask, [[0, 2, 3], [0], [0]])
    assert found.tolist() == [[-1, 0, 0, 1, 2, -1], [-1, -1, 0, -1, -1, -1], [-1] * 6]


# ---------------------------------------------------------------------------------------------- tokens and characters
@pytest.mark.parametrize("text", ["Certainly, two muffins.", " É un café ☕ für 3 €!", "a\n\n b  c", "日本語"])
def test_the_ends_of_tokens_by_offsets_and_by_decoding(text, tokenizer):
    ids = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
    assert decode(tokenizer, ids) == text
    ends = token_ends(tokenizer, ids, text)
    assert ends == sorted(ends) and ends[-1] == len(text)
    for count in range(len(ids)):
        prefix = decode(tokenizer, ids[: count + 1])
        if not prefix.endswith("\ufffd"):
            assert text[: ends[count]] == prefix
    stepwise = macro_parsers._fill_ends(list(macro_parsers._ends_by_decoding(tokenizer, ids)), len(text))
    assert stepwise == ends


def test_tokens_that_encoding_never_gives_keep_their_offsets(tokenizer):
    text = "two muffins"
    ids = [i for letter in text for i in tokenizer(letter)["input_ids"]]  # letter by letter, as a model may sample
    assert decode(tokenizer, ids) == text
    assert token_ends(tokenizer, ids, text) == list(range(1, len(text) + 1))


# ----------------------------------------------------------------------------------------------------------- parsers
def texts_of(spans, text, minimum=4):
    for part in spans:
        if part.end - part.start >= minimum:
            yield text[part.start : part.end]
        yield from texts_of(part.children, text, minimum)


def test_textblob_finds_phrases_without_a_download(monkeypatch):
    import socket

    monkeypatch.setattr(socket, "socket", None)
    text = "The old man (Bob) will buy a new car in the city. He left!"
    spans = check_spans(make_parser("textblob")(text), text)
    found = list(texts_of(spans, text))
    assert {"The old man", "will buy a new car in the city", "in the city", "He left"} <= set(found)
    assert [text[s.start : s.end] for s in spans] == ["The old man (Bob) will buy a new car in the city.", "He left!"]


def test_python_is_segmented_at_statements_and_expressions():
    text = "x = 1\nif x > 0:\n    print('é', x + 2)\n"
    spans = check_spans(python_spans(text), text)
    assert [text[s.start : s.end] for s in spans] == ["x = 1", "if x > 0:\n    print('é', x + 2)"]
    assert {"x > 0", "print('é', x + 2)", "x + 2"} <= set(texts_of(spans, text))


def test_a_program_that_does_not_parse_is_segmented_into_lines():
    text = "x = = 1\ny = 2\n"
    assert [text[s.start : s.end] for s in check_spans(python_spans(text), text)] == ["x = = 1", "y = 2"]
    with pytest.raises(ParseError):
        python_spans("print((1\n")


def test_the_trees_of_trained_parsers_are_aligned_with_the_words(monkeypatch):
    """With fakes of benepar and stanza, since no package contains their models."""
    nltk = pytest.importorskip("nltk")
    seen = []

    def parse(words):
        seen.append(words)
        return nltk.Tree("S", [nltk.Tree("NP", [nltk.Tree("DT", [words[0]]), nltk.Tree("NN", [words[1]])]), *words[2:]])

    fake = types.SimpleNamespace(
        Parser=lambda model: types.SimpleNamespace(parse=lambda sentence: parse(sentence)),
        InputSentence=lambda words: words,
    )
    monkeypatch.setitem(sys.modules, "benepar", fake)
    spans = make_parser("benepar:folder")("the cat sat. it left")
    assert seen == [["the", "cat", "sat", "."], ["it", "left"]]
    assert spans[0] == Span(0, 12, (Span(0, 7, (Span(0, 3), Span(4, 7))), Span(8, 11), Span(11, 12)))

    class Node:
        def __init__(self, *children):
            self.children = children

    tree = Node(Node(Node(Node()), Node(Node())))  # ROOT -> S -> two preterminals, each over a word
    sentence = types.SimpleNamespace(sentences=[types.SimpleNamespace(constituency=tree)])
    monkeypatch.setitem(sys.modules, "stanza", types.SimpleNamespace(Pipeline=lambda *_, **__: lambda words: sentence))
    assert make_parser("stanza:folder")("it left") == [Span(0, 7, (Span(0, 2), Span(3, 7)))]
    with error_naming(ParseError, "leaves"):
        make_parser("stanza:folder")("it left early")


def test_a_response_that_cannot_be_parsed_is_counted_and_segmented_by_the_fallback(tokenizer):
    texts = ["two muffins, please", "broken muffins, please"]
    responses = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in texts]
    rollout = rollout_of([[5], [5, 6]], responses)
    rollout.tokenizer = tokenizer

    def parser(text):
        if "broken" in text:
            raise IndexError("no tree")
        return [Span(0, 11), Span(11, len(text))]

    for fallback, sizes in ((1, [1] * len(responses[1])), (0, [len(responses[1])])):
        segments, failures = parsed_segments(rollout, parser, 50, fallback)
        assert failures == 1
        assert torch.equal(segments >= 0, rollout.action_mask)
        assert segments[1][rollout.action_mask[1]].bincount().tolist() == sizes


@pytest.mark.parametrize("spans", [[Span(0, 99)], [Span(0, 3), Span(2, 4)], [Span(0, 3, (Span(1, 4),))], [Span(2, 2)]])
def test_spans_that_overlap_or_exceed_their_parent_are_an_error(spans):
    with pytest.raises(ParseError):
        check_spans(spans, TEXT)
