"""Plans: the texts that a row gives for each stage, before they are tokenised.

Left out: plain prompts and documents that spell control tokens. A chat template has rendered them already; give them as
messages.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

from datasets_prep.cuts import Cuts
from datasets_prep.turns import BadRow, Dialogue, check_text, spells_control_token
from lightrlhf.data.chat import LONGEST, Messages, controls, protect
from lightrlhf.data.rendering import writes_date
from lightrlhf.data.tokens import adds_bos
from lightrlhf.storage.jsonl import Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


PROMPT_AS_TEXT = re.compile(r"(^|\n)(Human|User): .*\n\s*Assistant:\s*$", re.DOTALL)
DATED = ("todays_date_written_by_the_template",)


class Segment(NamedTuple):
    """A text that is tokenised separately."""

    text: str
    kind: str  # "text": plain prompt; "rendered": prompt by the template; "whole"; "answer"; "response": to a plain one
    behind: str | None = None  # the end of the text that it continues; None at the start
    kept: tuple[tuple[int, int], ...] | None = None  # characters that carry loss; None: all


class Plan(NamedTuple):
    """What a row gives for one stage."""

    stage: str
    turns: Sequence[tuple[Segment, Segment | None]]
    notes: tuple[str, ...] = ()
    messages: Messages = ()  # of a dialogue
    refused: str | None = None  # the reason, where this stage alone cannot use the row
    whole: Segment | None = None  # all turns as one text, in their place


class Planner:
    """Plans of rows, by a tokenizer and its chat template; `wraps`: plain prompts become a user message of it."""

    def __init__(self, args: Any, tokenizer: PreTrainedTokenizerBase, wraps: bool) -> None:
        self.cuts = Cuts(tokenizer)
        self.args = args
        self.tokenizer = tokenizer
        self.wraps = wraps
        self.adds_bos = adds_bos(tokenizer)
        self.dated = {has_tools: writes_date(tokenizer, has_tools) for has_tools in (False, True)}

    def __call__(self, row: Row, stages: frozenset[str], cut: bool = True) -> list[Plan]:
        """The texts of each stage of a row; cut False: each turn is rendered alone. Raises: BadRow."""
        cuts = self.cuts if cut else None
        if "messages" in row:
            return self._plans_of_messages(row, stages, cuts)
        if "text" in row:
            return self._plans_of_plain(row, "", {"completion": row["text"]}, stages)
        prompt = row["prompt"] if row.get("is_plain") else self._wrapped(row["prompt"])
        answers: Row = {name: row[name] for name in ("completion", "chosen", "rejected") if name in row}
        notes = self._wrapping_notes(answers) if isinstance(row["prompt"], str) and self.wraps else ()
        if "preference" in stages and self.args.remove_same_responses and answers["chosen"] == answers["rejected"]:
            raise BadRow("same_responses")
        if isinstance(prompt, str):
            return self._plans_of_plain(row, prompt, answers, stages)
        end, best = len(prompt), answers.get("chosen", answers.get("completion"))
        answer = [_message(best)] if best is not None else []
        talk = Dialogue(self.tokenizer, [*prompt, *answer], row.get("tools"), [*map(_message, answers.values())], cuts)
        notes += _notes_on(talk, end)
        prompts: list[tuple[Segment, Segment | None]] = [(Segment(talk.prompt(end), "rendered"), None)]
        plans = [Plan("prompts", prompts)]
        if stages & {"finetune", "preference", "unpaired"}:
            turn = self._turn(talk, end)
            plans += [Plan(stage, [turn]) for stage in ("finetune", "unpaired")]
            if "preference" in stages:
                pair = [turn, self._turn(talk, end, _message(answers["rejected"]))]
                plans.append(Plan("preference", pair, refused=row.get("no_pair")))
        if "dialogue" in stages:
            plans.append(self._plan_of_dialogue(talk))
        noted = [plan._replace(notes=(*plan.notes, *notes)) for plan in plans]
        return [self._noted(plan, row) for plan in noted if plan.stage in stages]

    def _plans_of_messages(self, row: Row, stages: frozenset[str], cuts: Cuts | None) -> list[Plan]:
        messages = row["messages"]
        weighed = [m for m in messages[1:] if m["role"] == "assistant" and m.get("weight", 1)]
        talk = Dialogue(self.tokenizer, messages, row.get("tools"), weighed, cuts)
        if talk.whole:
            return self._plans_of_whole(talk, talk.whole, stages)
        if messages[-1]["role"] != "assistant":
            prompt = Segment(talk.prompt(len(messages)), "rendered")
            notes = ("messages_without_a_last_answer_are_prompts",)
            return [self._noted(Plan("prompts", [(prompt, None)], notes), row)]
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i > 0]
        if not answers:
            raise BadRow("no_user_message")
        plans = []
        if "finetune" in stages:
            trained = [i for i in answers if messages[i].get("weight", 1)]
            if not trained:
                raise BadRow("every_message_has_weight_0")
            opening = ("opening_answer_carries_no_loss",) if messages[0]["role"] == "assistant" else ()
            unweighed = ("message_of_weight_0_carries_no_loss",) if len(trained) < len(answers) else ()
            finetune = [self._turn(talk, i) for i in trained]
            plans.append(Plan("finetune", finetune, (*opening, *unweighed, *_notes_on(talk, trained[-1]))))
        if "dialogue" in stages:
            plans.append(self._plan_of_dialogue(talk))
        if "prompts" in stages:
            plans.append(Plan("prompts", [(Segment(talk.prompt(answers[0]), "rendered"), None)]))
        return [self._noted(plan, row) for plan in plans]

    def _plans_of_whole(self, talk: Dialogue, text: str, stages: frozenset[str]) -> list[Plan]:
        """Plans of a plain dialogue that is tokenised as one text."""
        refused = None
        try:
            for message in talk.messages:
                if message["role"] == "assistant":
                    self._check_length(message)
        except BadRow as bad:
            if "finetune" in stages:
                raise
            refused = str(bad)
        whole, notes = Segment(text, "whole"), DATED if self.dated[False] else ()
        plans = (
            Plan("finetune", (), notes, whole=whole),
            Plan("dialogue", (), notes, talk.messages, refused, whole),
            Plan("prompts", (), notes, whole=whole),
        )
        return [plan for plan in plans if plan.stage in stages]

    def _plan_of_dialogue(self, talk: Dialogue) -> Plan:
        """All turns of user and assistant in alternation, for rollouts with a user."""
        roles = [message["role"] for message in talk.messages]
        turns = roles[1:] if roles[0] in ("system", "developer") else roles
        if any(role != ("user", "assistant")[i % 2] for i, role in enumerate(turns)) or len(turns) % 2:
            return Plan("dialogue", [], refused="role_order_broken")
        try:
            pairs = [self._turn(talk, i) for i, role in enumerate(roles) if role == "assistant"]
            return Plan("dialogue", pairs, messages=talk.messages)
        except BadRow as bad:
            return Plan("dialogue", [], refused=str(bad))

    def _turn(self, talk: Dialogue, index: int, message: dict[str, Any] | None = None) -> tuple[Segment, Segment]:
        """Prompt and answer of a turn, or of another message in its place. Raises: BadRow."""
        self._check_length(message or talk.messages[index])
        turn = talk.turn(index, message)
        return Segment(turn.prompt, "rendered"), Segment(turn.answer, "answer", turn.prompt[-LONGEST:], turn.kept)

    def _plans_of_plain(self, row: Row, prompt: str, answers: Row, stages: frozenset[str]) -> list[Plan]:
        """Plans of a prompt that no template renders; an empty one for a document."""
        if row.get("tools"):
            raise BadRow("tools_need_a_prompt_of_messages")
        if self.adds_bos:
            prompt = prompt.removeprefix(self.tokenizer.bos_token)  # that a prompt may bring
        if "text" not in row:
            check_text(prompt, "prompt")
        start = Segment(self._plain(prompt), "text")

        def turn(name: str) -> tuple[Segment, Segment]:
            answer = answers[name]
            if isinstance(answer, dict):
                if answer.get("reasoning_content") or answer.get("tool_calls"):
                    raise BadRow("reasoning_and_tool_calls_need_a_prompt_of_messages")
                answer = answer["content"]
            check_text(answer, "response")
            self._check_length({"content": answer})
            behind = None if "text" in row else start.text[-LONGEST:]
            return start, Segment(self._plain(answer, keep_tags=True), "response", behind)

        best = "chosen" if "chosen" in answers else "completion"
        plans = [Plan("prompts", [(start, None)])]
        if "preference" in stages:
            plans.append(Plan("preference", [turn("chosen"), turn("rejected")], refused=row.get("no_pair")))
        plans += [Plan(stage, [turn(best)]) for stage in ("finetune", "unpaired") if stage in stages]
        return [plan for plan in plans if plan.stage in stages]

    def _plain(self, text: str, keep_tags: bool = False) -> str:
        """A text that spells no control token: a prompt or document rendered already is given as messages instead."""
        found = controls(self.tokenizer)
        if (found.beside_tags if keep_tags else found.spelled).search(text):
            raise BadRow("special_token_in_text")
        return protect(self.tokenizer, text, keep_tags)

    def _noted(self, plan: Plan, row: Row) -> Plan:
        """The plan with notes on its texts: a stored date, a control token that a content spells as plain text."""
        parts = [part for turn in plan.turns for part in turn if part]
        spelled = any(spells_control_token(self.tokenizer, part.text) for part in parts)
        dated = DATED if self.dated[bool(row.get("tools"))] else ()
        return plan._replace(notes=(*plan.notes, *dated, *(("control_token_spelled_in_text",) if spelled else ())))

    def _wrapping_notes(self, answers: Row) -> tuple[str, ...]:
        """Notes on the answers to a plain prompt that is wrapped. Raises: BadRow for one that is rendered already."""
        texts = [answer for answer in answers.values() if isinstance(answer, str)]
        for text in texts:
            self._plain(text, keep_tags=True)
        return ("answer_begins_with_a_space",) if any(text[:1] == " " for text in texts) else ()

    def _wrapped(self, prompt: str | Messages) -> str | Messages:
        if isinstance(prompt, str) and self.wraps:
            self._plain(prompt)
            if PROMPT_AS_TEXT.search(prompt):
                raise BadRow(
                    "a prompt that is a dialogue as text: give messages, or --wrap_prompts False for plain text"
                )
            return [{"role": "user", "content": prompt}]
        return prompt

    def _check_length(self, message: dict[str, Any]) -> None:
        if len(message["content"].strip()) < self.args.minimum_response_length and not message.get("tool_calls"):
            raise BadRow("response_too_short")


def is_messages(value: Any) -> TypeGuard[list[dict[str, Any]]]:
    """Whether `value` is a list of `{role, content}`."""
    return isinstance(value, list) and all([isinstance(m, dict) and "role" in m and "content" in m for m in value])


def _notes_on(talk: Dialogue, end: int) -> tuple[str, ...]:
    """Notes on a name among the first `end` messages that the template does not write, and on thinking it is told."""
    names = [message["name"] for message in talk.messages[:end] if message.get("name")]
    lost = any(name not in talk.prompt(end) for name in names)
    opened = tuple(f"{name}_is_set_for_answers_with_reasoning" for name in talk.variables)
    return (*(("name_not_written_by_the_template",) if lost else ()), *opened)


def _message(answer: str | dict[str, Any]) -> dict[str, Any]:
    return answer if isinstance(answer, dict) else {"role": "assistant", "content": answer}
