"""Macro actions from a parser (MA-RLHF, Chai et al. 2025): responses are segmented at constituent boundaries.

A parser maps a text to nested character spans. They are aligned with the sampled tokens by character offsets, without
tokenising the text again. A constituent of at most `cutoff` tokens is a macro action, a larger one is divided into its
children, and a child of a single token joins the preceding macro action.

`textblob` is the default: a part-of-speech tagger with bundled data and a chunk grammar over its tags; rule-based,
English and approximate. `benepar` and `stanza` are trained constituency parsers, whose models are loaded from a local
folder. `python` parses programs.

Left out: parsing during sampling.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from lightrlhf.cli.functions import load_function
from lightrlhf.cli.packages import check_package
from lightrlhf.data.batch import Rollout
from lightrlhf.data.tokens import decode
from lightrlhf.maths.macro_actions import beginning_at

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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
PACKAGES = ("textblob", "benepar", "stanza")
NEED_MODEL = ("benepar", "stanza")


class Span(NamedTuple):
    """Constituent of a text: characters `start` to `end`, and its child constituents."""

    start: int
    end: int
    children: tuple[Span, ...] = ()


Parser = Callable[[str], Sequence[Span]]


class ParseError(ValueError):
    """A text that cannot be parsed."""


# ------------------------------------------------------------------------------------------------ segmenting responses
def parsed_segments(rollout: Rollout, parser: Parser, cutoff: int, fallback: int) -> tuple[Tensor, int]:
    """Segments (B, T-1) of the responses, and the number of responses that could not be parsed.

    Those are segmented every `fallback` tokens, with 0 not at all.
    """
    assert rollout.tokenizer is not None
    starts, failures = [], 0
    rows = zip(rollout.response_ids(), rollout.texts, rollout.action_mask.any(1).tolist())
    for ids, (_, text), has_actions in rows:
        ends = token_ends(rollout.tokenizer, ids, text)
        try:
            starts.append(segment_starts(check_spans(parser(text), text), ends, cutoff) if has_actions else [0])
        except Exception:  # parsers raise any exception
            starts.append(list(range(0, len(ids), fallback)) if fallback else [0])
            failures += 1
    return beginning_at(rollout.action_mask, starts), failures


def segment_starts(spans: Sequence[Span], ends: Sequence[int], cutoff: int) -> list[int]:
    """Indices of the tokens that begin a macro action; `ends` are the character offsets at which the tokens end.

    A token belongs to the span of its last character; characters between two spans belong to the first.
    """
    lasts = [end - 1 for end in ends]
    starts: list[int] = []

    def divide(parts: Sequence[Span], first: int, last: int) -> None:
        borders = [first, *(bisect_left(lasts, part.start, first, last) for part in parts[1:]), last]
        for part, start, end in zip(parts, borders, borders[1:]):
            if end - start > cutoff and part.children:
                divide(part.children, start, end)
            elif end - start > 1 or (end > start and not starts):
                starts.append(start)

    divide(spans or [Span(0, 0)], 0, len(ends))
    return starts


def check_spans(spans: Sequence[Span], text: str) -> Sequence[Span]:
    """The spans, checked to be ordered, disjoint and within their parents. Raises: ParseError."""

    def check(parts: Sequence[Span], start: int, end: int) -> None:
        for part in parts:
            if not start <= part.start < part.end <= end:
                raise ParseError(f"the parser's spans overlap or exceed their parent: {part[:2]} in {(start, end)}")
            check(part.children, part.start, part.end)
            start = part.end

    check(spans, 0, len(text))
    return spans


def token_ends(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], text: str) -> list[int]:
    """The character offset at which each of the sampled ids ends in their text.

    Offsets are the tokenizer's own if encoding the text gives the same ids, else found by decoding incrementally. Each
    of several tokens that form one character ends at the end of that character.
    """
    special = set(tokenizer.all_special_ids)
    visible = [i for i in ids if i not in special]
    if getattr(tokenizer, "is_fast", False):
        # Raw text: its offsets count only where its ids are the sampled ones.
        again = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        if again["input_ids"] == visible:
            offsets = iter([end for _, end in again["offset_mapping"]])
            return _fill_ends([None if i in special else next(offsets) for i in ids], len(text))
    return _fill_ends(list(_ends_by_decoding(tokenizer, ids)), len(text))


def _ends_by_decoding(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> Iterator[int | None]:
    """Number of complete characters after each token, None if it adds none; decodes a window of a few tokens.

    A window, because some tokenizers drop the space before the first decoded token.
    """
    window, known, length = 0, 0, 0  # first token of the window, tokens counted in `length`
    for count in range(1, len(ids) + 1):
        before = decode(tokenizer, ids[window:known])
        now = decode(tokenizer, ids[window:count])
        if len(now) > len(before) and not now.endswith("\ufffd"):  # the replacement character: an incomplete one
            length += len(now) - len(before)
            window, known = known, count
            yield length
        else:
            yield None


def _fill_ends(ends: list[int | None], length: int) -> list[int]:
    """Let a token without characters of its own (a special one, or part of a character) end with the next that has."""
    following, out = length, []
    for end in reversed(ends):
        following = following if end is None else min(end, length)
        out.append(following)
    return out[::-1]


# ----------------------------------------------------------------------------------------------------------- parsers
def parser_model(name: str) -> str | None:
    """The folder of a parser's model, of `benepar:FOLDER` and `stanza:FOLDER`; None for other parsers."""
    kind, _, folder = name.partition(":")
    return folder if kind in NEED_MODEL else None


def check_parser(name: str) -> None:
    """Check that a parser exists, with its package and model. Raises: ValueError."""
    kind, colon, _ = name.partition(":")
    if kind in PACKAGES:
        check_package(f"--parser {name}", kind)
    elif not colon and kind != "python":
        known = ", ".join((*PACKAGES, "python"))
        raise ValueError(f"--parser {name} is neither one of {known} nor of the form package.module:function")
    if parser_model(name) == "":
        raise ValueError(f"--parser {name} has no model; give the local folder of a downloaded one: {kind}:FOLDER")


def make_parser(name: str) -> Parser:
    """The parser of a name that passed `check_parser`. Raises: UsageError when an import path cannot be imported."""
    if name == "python":
        return python_spans
    if name == "textblob":
        return constituents(textblob_trees())
    if folder := parser_model(name):
        return constituents({"benepar": benepar_trees, "stanza": stanza_trees}[name.partition(":")[0]](folder))
    return load_function(name, "--parser", takes_columns=False)


def constituents(tree_of: Callable[[list[str]], Any]) -> Parser:
    """A parser from a function that maps the words of one sentence to a tree with these leaves, in order."""

    def parse(text: str) -> list[Span]:
        spans = []
        for sentence in SENTENCE.finditer(text):
            words = [(word.start(), word.end()) for word in WORD.finditer(text, *sentence.span())]
            if words:
                leaves = iter(words)
                span = _span_of(tree_of([text[start:end] for start, end in words]), leaves)
                if next(leaves, None) is not None:
                    raise ParseError("the leaves of a tree are not the words of its sentence")
                spans.append(span)
        return spans

    return parse


def _span_of(tree: Any, words: Iterator[tuple[int, int]]) -> Span:
    """The span of a tree over the next words; a chain of single children becomes one span."""
    parts = [] if isinstance(tree, (str, tuple)) else list(getattr(tree, "children", tree))
    if not parts:
        return Span(*next(words))
    spans = tuple(_span_of(part, words) for part in parts)
    return spans[0] if len(spans) == 1 else Span(spans[0].start, spans[-1].end, spans)


def textblob_trees() -> Callable[[list[str]], Any]:
    """Chunks (NP, PP, VP, CLAUSE) of TextBlob's part-of-speech tags. No download, English, approximate."""
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
    """Statements and expressions of a program from `ast`; if it does not parse, logical lines from `tokenize`."""
    line_starts = [line.start() for line in LINE.finditer(text)]
    lines = [line[0] for line in LINE.finditer(text)]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escape sequences
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return _logical_lines(text, line_starts)

    def offset(line: int, column: int) -> int:
        return line_starts[line - 1] + len(lines[line - 1].encode("utf-8")[:column].decode("utf-8"))

    def spans_below(node: ast.AST) -> tuple[Span, ...]:
        spans: list[Span] = []
        child: Any  # positions are attributes of some subclasses of AST only
        for child in ast.iter_child_nodes(node):
            if getattr(child, "end_lineno", None) is None:
                spans += spans_below(child)  # arguments, operators: nodes without a position
                continue
            start, end = offset(child.lineno, child.col_offset), offset(child.end_lineno, child.end_col_offset)
            children = tuple(part for part in spans_below(child) if start <= part.start and part.end <= end)
            spans.append(Span(start, end, children))
        disjoint: list[Span] = []
        for span in sorted(spans):
            if span.start < span.end and (not disjoint or disjoint[-1].end <= span.start):
                disjoint.append(span)
        return tuple(disjoint)

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
        raise ParseError(f"not Python: {problem}") from None
    return [Span(parts[0].start, parts[-1].end, tuple(parts)) for parts in lines if parts]
