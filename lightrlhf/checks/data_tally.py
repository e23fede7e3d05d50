"""Faults of all rows of a data set, in one pass, and the verdicts on them.

Rows are not kept: of each a few hashes are, 64 bits each, by which duplicates, leaks and contradictions are found.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from lightrlhf.checks.data_faults import FAULTS, OPEN, faults_of_text, id_faults, pair_faults, with_prompt
from lightrlhf.checks.data_rows import Item, Text, runs_of, without_padding
from lightrlhf.checks.template_marks import Headers, Marks, entries_of, headers_in
from lightrlhf.checks.verdicts import CANNOT_TELL, RIGHT, WRONG, Verdict
from lightrlhf.data.tokens import marked_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

AROUND = 24  # tokens shown on each side of a fault
SHOWN = 200  # tokens of a sample
PAIRS = ("preference", "refuel")  # kinds of two texts
OF_TEXTS = ("template", "texts", "rows")  # checks that need texts, not ids


class First(NamedTuple):
    """The first row with a fault."""

    source: str
    shown: str = ""  # its text around the fault, with ⟦ and ⟧ around what is trained


class Tally:
    """Counts of faults, and what is needed across rows; `texts`: the rows are texts that were encoded here.

    limit: tokens that rows are cut to later; asked_for: flags of the preparation, by which some faults are meant.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        marks: Marks,
        texts: bool = False,
        limit: int | None = None,
        asked_for: Mapping[str, Any] | None = None,
    ) -> None:
        self.tokenizer, self.marks, self.texts, self.limit = tokenizer, marks, texts, limit
        asked_for = asked_for or {}
        self.trains_prompts = asked_for.get("mask_prompt") is False
        self.keeps_equal = asked_for.get("remove_same_inputs") is False
        self.counts: Counter[str] = Counter()
        self.firsts: dict[str, First] = {}
        self.details: dict[str, Counter[str]] = {}  # the subject of a fault, such as the system message
        self.rows: Counter[str] = Counter()  # by kind
        self.tokens = self.trained = self.answers = self.rendered = 0
        self.longest: Counter[str] = Counter()  # length of the longest text, by kind
        self.splits: set[str] = set()
        self.samples: dict[str, First] = {}  # by kind
        self._open: dict[tuple[str, int], tuple[int, First]] = {}  # texts without an end, by kind and length
        self._rows: set[int] = set()
        self._prompts: dict[int, str] = {}  # prompts and their split
        self._labels: dict[int, int] = {}  # what was rated, and how

    def add(self, item: Item) -> None:
        """Count a row."""
        self.rows[item.kind] += 1
        self.splits.add(item.split)
        texts = [without_padding(text, self.marks.pad, self.marks.ends) for text in item.texts]
        item = item._replace(texts=tuple(texts))
        wrong = [
            (found.fault, f"id {text.ids[found.place]}") for text in texts for found in id_faults(text, self.marks)
        ]
        if wrong or not all(len(text.ids) for text in texts):
            for fault, shown in wrong or [("no trained token", "")]:
                self.count(fault, First(item.source, shown))
            return
        entries = [entries_of(self.tokenizer, text.ids.tolist()) for text in texts]
        headers = [headers_in(one, self.marks) for one in entries]
        if item.kind == "preference" and texts[0].prompt_len is None:
            item = with_prompt(item, headers)
        for text, own, around in zip(item.texts, entries, headers):
            self._add_text(item, text, own, around)
        for fault in item.faults:
            self.count(fault, self._first(item.source, item.texts[0], 0))
        if item.kind == "preference":
            for found in pair_faults(item):
                self.count(found.fault, self._first(item.source, item.texts[0], found.place))
        self._compare(item, headers[0])

    def _add_text(self, item: Item, text: Text, entries: list[str], headers: Headers) -> None:
        self.tokens += len(text.ids)
        self.trained += int(text.trained.sum())
        self.answers += item.kind != "prompts"
        self.rendered += bool(headers.answers)
        self.longest[item.kind] = max(self.longest[item.kind], len(text.ids))
        if item.kind not in self.samples:
            self.samples[item.kind] = self._first(item.source, text, 0, SHOWN)
        if self.limit is not None and len(text.ids) > self.limit and item.kind != "prompts":
            fault = "answers cut" if text.trained[: self.limit].any() else "answers cut before their first token"
            self.count(fault, self._first(item.source, text, self.limit))
        has_mask = item.kind != "preference" or text.prompt_len is not None
        has_mask &= "labels of another length" not in item.faults
        seen = set()
        for found in faults_of_text(text, item.kind, entries, headers, self.marks) if has_mask else ():
            if found.fault == "user text trained" and self.trains_prompts:
                continue
            if found.fault == OPEN:
                known = self._open.get((item.kind, len(text.ids)))
                number, first = known or (0, self._first(item.source, text, found.place))
                self._open[item.kind, len(text.ids)] = number + 1, first
            elif found.fault not in seen:
                self.count(found.fault, self._first(item.source, text, found.place))
                seen.add(found.fault)

    def count(self, fault: str, first: First, detail: str = "") -> None:
        """Count a row with a fault."""
        self.counts[fault] += 1
        self.firsts.setdefault(fault, first)
        if detail:
            self.details.setdefault(fault, Counter())[detail] += 1

    def _first(self, source: str, text: Text, place: int, around: int = AROUND) -> First:
        start, end = max(place - around, 0), place + around
        shown = marked_text(self.tokenizer, text.ids[start:end].tolist(), runs_of(text.trained[start:end]))
        return First(source, f"{'…' if start else ''}{shown}{'…' if end < len(text.ids) else ''}")

    def _compare(self, item: Item, headers: Headers) -> None:
        """Compare a row with those before it."""
        texts = item.texts
        parts = [part for text in texts for part in (text.ids.tobytes(), text.trained.tobytes())]
        row = _hash(repr((item.kind, item.split, item.label, item.about)).encode(), *parts)
        first = self._first(item.source, texts[0], 0)
        if row in self._rows:
            self.count("duplicates", first)
        self._rows.add(row)
        prompt = _hash(item.about.encode(), texts[0].ids[: _prompt_end(texts[0], headers)].tobytes())
        if self._prompts.setdefault(prompt, item.split) != item.split:
            self.count("prompts in two splits", first)
        if item.kind == "unpaired":
            rated, label = _hash(b"u", texts[0].ids.tobytes()), int(bool(item.label))
        elif item.kind == "preference":
            sides = [_hash(b"p", text.ids.tobytes()) for text in texts]
            rated, label = hash((min(sides), max(sides))), int(sides[0] <= sides[1])
        else:
            return
        if self._labels.setdefault(rated, label) != label:
            self.count("contradicting labels", first)

    # ------------------------------------------------------------------------------------------------------- verdicts
    def verdicts(self) -> list[Verdict]:
        """The verdicts on all rows."""
        self._close()
        checks = list(dict.fromkeys(fault.check for fault in FAULTS.values()))
        if not self.rows["preference"] + self.rows["unpaired"]:
            checks.remove("preferences")
        found = []
        for check in checks:
            wrong = [name for name in self.counts if FAULTS[name].check == check]
            if check == "duplicates" and self.keeps_equal:
                wrong = []
            found += [self._wrong(name) for name in wrong]
            if not wrong:
                lacking = self._lacking(check)
                evidence = lacking or (self._trained() if check == "trained" else "")
                found.append(Verdict(check, CANNOT_TELL if lacking else RIGHT, evidence=evidence))
        return found

    def _wrong(self, name: str) -> Verdict:
        fault, first = FAULTS[name], self.firsts[name]
        about = "; ".join(f"{count} x {detail}" for detail, count in self.details.get(name, Counter()).most_common(5))
        rows = max(sum(self.rows.values()), self.counts[name])
        evidence = f"{self.counts[name]:,} times in {rows:,} rows{about and f' ({about})'}, first {first.source}"
        evidence += first.shown and f": {first.shown}"
        return Verdict(fault.check, WRONG, name, evidence, fault.causes, fault.look_at)

    def _trained(self) -> str:
        share = self.trained / max(self.tokens, 1)
        return f"{share:.0%} of {self.tokens:,} tokens in {sum(self.rows.values()):,} rows are trained"

    def _close(self) -> None:
        """Tell rows that were cut from rows whose end token is missing, by their lengths."""
        for kind, longest in self.longest.items():
            found = {length: one for (own, length), one in self._open.items() if own == kind}
            cut, _ = found.get(longest, (0, None))
            has_others = sum(count for count, _ in found.values()) < self.rows[kind] * (1 + (kind in PAIRS))
            is_cut = cut > 1 and has_others or len(found) == 1  # else the longest misses its end as the others do
            for length, (count, first) in found.items():
                fault = "answers cut" if is_cut and length == longest else "end token missing"
                self.firsts.setdefault(fault, first)
                self.counts[fault] += count
        self._open = {}

    def _lacking(self, check: str) -> str:
        """What is missing for a check; "" if nothing is."""
        if check in OF_TEXTS and not self.texts:
            return "needs messages or texts: these rows are ids"
        if check in ("trained", "labels", "end", "lengths") and not self.answers:
            return "needs answers: these rows are prompts"
        if check == "mask" and self.trains_prompts:
            return "needs a mask: --mask_prompt False trains prompts, too"
        if check == "mask" and not self.marks.answer:
            return "needs a chat template that writes something before each answer"
        if check == "mask" and not self.rendered:
            return "needs rows that the chat template rendered: none has its headers"
        if check == "prompt" and not self.rendered:
            return "needs rows that the chat template rendered: none has its headers"
        if check == "duplicates" and self.keeps_equal and (number := self.counts["duplicates"]):
            return f"{number:,} rows are kept twice by --remove_same_inputs False"
        if check == "splits" and len(self.splits) < 2:
            return "needs two splits"
        if check == "lengths" and self.texts and self.limit is None:
            return f"needs --max_length: the longest row has {max(self.longest.values()):,} tokens"
        return ""


def _prompt_end(text: Text, headers: Headers) -> int:
    """Tokens of the prompt of an answer; all of a document, and of a dialogue, since dialogues may begin alike."""
    runs = runs_of(text.trained)
    starts = headers.answers if runs and runs[0][0] == 0 else [start for start, _ in runs]
    return starts[0] if len(starts) == 1 else len(text.ids)


def _hash(*parts: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(b"\0".join(parts), digest_size=8).digest(), "big")
