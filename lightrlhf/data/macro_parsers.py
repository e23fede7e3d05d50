"""Macro actions from a parser (MA-RLHF, Chai et al. 2025): a response is cut where its constituents end.

A parser is a function from a text to nested character spans. They are laid over the sampled tokens by the place each
token has in the text, so nothing is tokenised again. A constituent of at most `cutoff` tokens is a macro action, a
larger one is divided into its parts, and a part of a single token joins the macro action before it.

`textblob` is the default: a part-of-speech tagger that comes with its data, and a cascade of rules over its tags. It is
rule-based, for English and approximate; `benepar` and `stanza` bring trained constituency parsers, whose models are
read from a local folder. `python` reads programs. Left out: parsing while a response is being sampled.
"""

from __future__ import annotations

import ast
import importlib.util
import io
import re
import tokenize
import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from lightrlhf.cli.args import needs_package
from lightrlhf.cli.errors import RunFailure, UsageError
from lightrlhf.data.batch import Rollout
from lightrlhf.data.tokens import decode
from lightrlhf.maths import macro_actions as segments

SENTENCE = re.compile(r"[^\n]+?(?:(?<=[.!?])(?= )|(?=\n)|\Z)")
WORD = re.compile(r"\w+(?:['’]\w+)*|[^\w\s]")
LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+\Z")
GRAMMAR = r"""
    NP: {<DT|PDT|PRP\$>*<CD|JJ.*|VBN|VBG>*<NN.*>+}
        {<PRP|EX|CD|DT>}
    PP: {<IN|TO><NP>}
    VP: {<MD>?<RB.*>*<VB.*>+<RB.*|RP|TO|VB|NP|PP|CLAUSE>*}
    CLAUSE: {<NP><PP>*<VP>}
"""
PACKAGES = {"textblob": "parse", "benepar": "benepar", "stanza": "stanza"}  # and the extra that brings each
NEED_MODEL = ("benepar", "stanza")


class Span(NamedTuple):
    """Characters `start` to `end` of a text, and what they consist of."""

    start: int
    end: int
    children: tuple[Span, ...] = ()


Parser = Callable[[str], Sequence[Span]]


class ParseError(ValueError):
    """A text that a parser can make nothing of."""


# ---------------------------------------------------------------------------------------------------- from the texts
def parsed_segments(
    rollout: Rollout, tokenizer: Any, parser: Parser, cutoff: int, fallback: int | None
) -> tuple[Tensor, int]:
    """Segments (B, T-1) of the responses, and how many of them could not be parsed.

    Those are cut every `fallback` tokens. Raises: RunFailure when `fallback` is None and a response cannot be parsed.
    """
    starts, failures = [], 0
    for ids, kept in zip(rollout.response_ids(), rollout.action_mask.any(1).tolist()):
        text, ends = token_ends(tokenizer, ids)
        try:
            starts.append(cut_tokens(checked(parser(text), text), ends, cutoff) if kept else [0])
        except Exception as problem:  # whatever a parser raises
            if fallback is None:
                raise RunFailure(
                    f"--on_parse_error raise: {type(problem).__name__}: {problem}: {text[:80]!r}"
                ) from None
            starts.append(list(range(0, len(ids), fallback)) if fallback else [0])
            failures += 1
    return segments.beginning_at(rollout.action_mask, starts), failures


def cut_tokens(spans: Sequence[Span], ends: Sequence[int], cutoff: int) -> list[int]:
    """Numbers of the tokens that begin a macro action; `ends` is where each token ends in the text.

    A token belongs to the span that holds its last character; what lies between two spans belongs to the first.
    """
    lasts = [end - 1 for end in ends]
    starts: list[int] = []

    def divide(parts: Sequence[Span], first: int, last: int) -> None:
        borders = [first, *(bisect_left(lasts, part.start, first, last) for part in parts[1:]), last]
        for part, here, there in zip(parts, borders, borders[1:]):
            if there - here > cutoff and part.children:
                divide(part.children, here, there)
            elif there - here > 1 or (there > here and not starts):
                starts.append(here)

    divide(spans or [Span(0, 0)], 0, len(ends))
    return starts


def checked(spans: Sequence[Span], text: str) -> Sequence[Span]:
    """The spans, if they are in order, apart from each other and within their parents. Raises: ParseError."""

    def check(parts: Sequence[Span], start: int, end: int) -> None:
        for part in parts:
            if not start <= part.start < part.end <= end:
                raise ParseError(f"a parser's spans overlap or leave their parent: {part[:2]} in {(start, end)}")
            check(part.children, part.start, part.end)
            start = part.end

    check(spans, 0, len(text))
    return spans


def token_ends(tokenizer: Any, ids: Sequence[int]) -> tuple[str, list[int]]:
    """The text of sampled ids, and the character at which each token ends in it.

    By the tokenizer's own offsets where it makes the same ids of the text, else by decoding step by step. A character
    that several tokens make together ends with each of them.
    """
    text = decode(tokenizer, ids)
    special = set(tokenizer.all_special_ids)
    spoken = [i for i in ids if i not in special]
    if getattr(tokenizer, "is_fast", False):
        again = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        if again["input_ids"] == spoken:
            found = iter([end for _, end in again["offset_mapping"]])
            return text, _filled([None if i in special else next(found) for i in ids], len(text))
    return text, _filled(list(_ends_by_decoding(tokenizer, ids)), len(text))


def _ends_by_decoding(tokenizer: Any, ids: Sequence[int]) -> Iterator[int | None]:
    """Characters that are complete behind each token, None where it adds none; decodes a window of a few tokens.

    A window is needed because some tokenizers leave out the space in front of the first token they decode.
    """
    window, known, length = 0, 0, 0  # first token of the window, tokens counted in `length`
    for count in range(1, len(ids) + 1):
        before = decode(tokenizer, ids[window:known])
        now = decode(tokenizer, ids[window:count])
        if len(now) > len(before) and not now.endswith("\ufffd"):  # which stands for the start of a character
            length += len(now) - len(before)
            window, known = known, count
            yield length
        else:
            yield None


def _filled(ends: list[int | None], length: int) -> list[int]:
    """A token that adds nothing (part of a character, a special one) ends with the next one that does."""
    following, out = length, []
    for end in reversed(ends):
        following = following if end is None else min(end, length)
        out.append(following)
    return out[::-1]


# ------------------------------------------------------------------------------------------------------- the parsers
def check_parser(name: str, model: str | None) -> None:
    """Raises: ValueError, one line, when a parser's package or its model is not there."""
    if ":" not in name and name not in (*PACKAGES, "python"):
        known = ", ".join((*PACKAGES, "python"))
        raise ValueError(f"--parser {name} is none of {known}, nor of the form package.module:function")
    if name in PACKAGES and importlib.util.find_spec(name) is None:
        raise ValueError(needs_package(f"--parser {name}", name, PACKAGES[name]))
    if name in NEED_MODEL and model is None:
        raise ValueError(f"--parser {name} needs --parser_model, the local folder of a downloaded model")
    if name not in NEED_MODEL and model is not None:
        raise ValueError(f"--parser_model {model} is of no use to --parser {name}")


def make_parser(name: str, model: str | None) -> Parser:
    """The parser of a name that `check_parser` let pass. Raises: UsageError when an import path leads nowhere."""
    if name == "python":
        return python_spans
    if ":" in name:
        module, _, function = name.partition(":")
        try:
            return getattr(importlib.import_module(module), function)
        except (ImportError, AttributeError, ValueError) as problem:
            raise UsageError(f"--parser {name} cannot be imported as package.module:function: {problem}") from None
    return constituents({"textblob": textblob_trees, "benepar": benepar_trees, "stanza": stanza_trees}[name](model))


def constituents(tree_of: Callable[[list[str]], Any]) -> Parser:
    """A parser from a function that makes a tree of the words of one sentence, its leaves in their order."""

    def parse(text: str) -> list[Span]:
        spans = []
        for sentence in SENTENCE.finditer(text):
            words = [(word.start(), word.end()) for word in WORD.finditer(text, *sentence.span())]
            if words:
                leaves = iter(words)
                span = _span_of(tree_of([text[start:end] for start, end in words]), leaves)
                if span is None or next(leaves, None) is not None:
                    raise ParseError("a tree has other leaves than its sentence has words")
                spans.append(span)
        return spans

    return parse


def _span_of(tree: Any, words: Iterator[tuple[int, int]]) -> Span | None:
    """The tree over the next words; chains of single children become one span."""
    parts = [] if isinstance(tree, (str, tuple)) else list(getattr(tree, "children", tree))
    if not parts:
        return Span(*next(words))
    spans = tuple(_span_of(part, words) for part in parts)
    return spans[0] if len(spans) == 1 else Span(spans[0].start, spans[-1].end, spans)


def textblob_trees(_: None = None) -> Callable[[list[str]], Any]:
    """Chunks of TextBlob's tags by a cascade of rules: NP, PP, VP, CLAUSE. No download, English, approximate."""
    import nltk
    from textblob.en import tag

    chunker = nltk.RegexpParser(GRAMMAR, loop=2)

    def tree_of(words: list[str]) -> Any:
        tags = [name for _, name in tag(" ".join(words), tokenize=False)]
        return chunker.parse(list(zip(words, tags, strict=True)))

    return tree_of


def benepar_trees(model: str) -> Callable[[list[str]], Any]:
    """The Berkeley neural parser (Kitaev et al. 2019), from a local model folder."""
    import benepar

    parser = benepar.Parser(model)
    return lambda words: parser.parse(benepar.InputSentence(words=words))


def stanza_trees(model: str) -> Callable[[list[str]], Any]:
    """Stanza's constituency parser (Bauer et al. 2023), from a local resources folder with an `en` model."""
    import stanza

    pipeline = stanza.Pipeline(
        "en",
        dir=model,
        processors="tokenize,pos,constituency",
        tokenize_pretokenized=True,
        download_method=None,
        verbose=False,
    )
    return lambda words: pipeline([words]).sentences[0].constituency


def python_spans(text: str) -> list[Span]:
    """Statements and expressions of a program by `ast`; its logical lines by `tokenize` where it does not parse."""
    line_starts = [line.start() for line in LINE.finditer(text)]
    lines = [line[0] for line in LINE.finditer(text)]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # odd escapes in programs
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return _logical_lines(text, line_starts)

    def place(line: int, column: int) -> int:
        return line_starts[line - 1] + len(lines[line - 1].encode("utf-8")[:column].decode("utf-8"))

    def spans_below(node: ast.AST) -> tuple[Span, ...]:
        found: list[Span] = []
        for child in ast.iter_child_nodes(node):
            if getattr(child, "end_lineno", None) is None:
                found += spans_below(child)  # arguments, operators: nodes without a place of their own
                continue
            start, end = place(child.lineno, child.col_offset), place(child.end_lineno, child.end_col_offset)
            children = tuple(part for part in spans_below(child) if start <= part.start and part.end <= end)
            found.append(Span(start, end, children))
        apart: list[Span] = []
        for span in sorted(found):
            if span.start < span.end and (not apart or apart[-1].end <= span.start):
                apart.append(span)
        return tuple(apart)

    return list(spans_below(tree))


def _logical_lines(text: str, line_starts: list[int]) -> list[Span]:
    lines: list[list[Span]] = [[]]
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.NEWLINE:
                lines.append([])
            elif token.string.strip():
                start = line_starts[token.start[0] - 1] + token.start[1]
                lines[-1].append(Span(start, line_starts[token.end[0] - 1] + token.end[1]))
    except (tokenize.TokenError, SyntaxError) as problem:
        raise ParseError(f"no Python: {problem}") from None
    return [Span(parts[0].start, parts[-1].end, tuple(parts)) for parts in lines if parts]
