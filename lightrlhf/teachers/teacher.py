"""Teachers: frozen language models that give their distribution where a student acted.

A teacher has the student's tokens. With LoRA it may be adapters on the student's backbone. A teacher on a server, or
with another tokenizer, tells log-probabilities alone.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightrlhf.cli.errors import RunFailure, UsageError
from lightrlhf.cli.groups import FrozenArgs, ModelArgs, TeacherArgs
from lightrlhf.cli.patience import REQUEST, SERVER, patience
from lightrlhf.data.batch import Batch, Rollout, response_batch
from lightrlhf.data.tokens import decode, encode_prompt, encode_text
from lightrlhf.data.turn_ends import turn_ends
from lightrlhf.data.types import PreTrainedModel, Tokenizer
from lightrlhf.generation.rollout import score_logprobs, score_top
from lightrlhf.generation.server_client import HttpThread, ServerClient, retry
from lightrlhf.generation.vllm import VLLM
from lightrlhf.models import lora
from lightrlhf.models.given import as_policy
from lightrlhf.models.loading import load_policy
from lightrlhf.models.names import base_name, model_folder, resolve
from lightrlhf.models.roles import Policy
from lightrlhf.models.tokenizer import check_stored_ids, load_tokenizer
from lightrlhf.rewards.encoding import Encoding, Sample, same_tokenizer, samples_of
from lightrlhf.teachers.borders import crosses_words, last_borders, sum_from, token_starts
from lightrlhf.training.run import Run

FLAG, SERVER_FLAG = "--teacher", "--teacher_server"
AT_ONCE, ATTEMPTS = 16, 8  # rows in a request to a server, and how often it is sent
SIBLING = "prompt with a sibling"  # name of a column
PROBES = (
    "a\u00e9",
    "ae\u0301",
    "a\ufb01",
    "a  b",
    "aB\u0130",
    "a\uff21",
    "a\u2460\n",
)  # texts that normalisation changes


@dataclass(kw_only=True)
class Told:
    """Log-probabilities that a teacher told of a batch, in the places of the rows that it reads."""

    logprobs: Tensor  # (B, T-1) of the tokens
    ids: Tensor | None = None  # (B, T-1, K) the likeliest tokens, with `--estimator top_k`
    top: Tensor | None = None  # (B, T-1, K) their log-probabilities
    to_go: Tensor | None = (
        None  # (B, T-1) the student's less the teacher's from the last border, with another tokenizer
    )
    readable: Tensor | None = None  # (B,) of a teacher with another tokenizer: it can read the response
    noncanonical: int = 0  # rows whose ids are not the student's own for their text


@dataclass(kw_only=True)
class Seen(Batch):
    """What teachers read."""

    teacher: Tensor | None = None  # (B,) int64 number of the row's teacher, of several


def load_teacher(
    given: PreTrainedModel | Policy | None, args: Any, student: Policy, tokenizer: Tokenizer, name: str | None = None
) -> Any:
    """The given teacher, else the model of this name; without both the policy itself, see `own_teacher`.

    It shares the student's backbone where the student shares it and both have one base, else it is a separate model.
    Raises: UsageError when it cannot be loaded, or has another tokenizer, which the flags do not fit.
    """
    frozen = FrozenArgs(trust_remote_code=args.trust_remote_code)
    if given is not None:
        return as_policy(given, frozen, tokenizer)
    if not name:
        return own_teacher(args, student)
    source = resolve(name, FLAG)
    if (model_folder(source) or Path(source)).joinpath("tokenizer.json").is_file():
        own = load_tokenizer(None, source)
        if not same_tokenizer(own, tokenizer):
            check_foreign(args, tokenizer, source)
            return ForeignTeacher(load_policy(source, frozen, own, FLAG), own, tokenizer, args.text_return == "to_go")
    is_shared = student.shares and student.base == base_name(source, FLAG) is not None
    if not is_shared or lora.holds_dora(source, FLAG):
        return load_policy(source, frozen, tokenizer, FLAG)
    config = lora.adapter_config(source, FLAG)
    if config is not None and source not in student.loaded:
        adapter = f"start_{len(student.loaded)}"
        student.loaded[source] = adapter, lora.load_adapter(student.model, adapter, source, config)
        lora.configure(student.model, active=student.adapters, trainable=("policy",))
    adapters = () if config is None else (student.loaded[source][0],)
    settings = {"shares": True, "trainable": False, "head_is_plain": student.head_is_plain}
    return Policy(student.model, adapters, student.base, **settings)


def check_foreign(args: TeacherArgs, tokenizer: Tokenizer, source: str) -> None:
    """Raises: UsageError when the flags do not fit a teacher with another tokenizer."""
    if args.objective != "sequence" or args.estimator != "k1":
        check_stored_ids(tokenizer, "the data", source)  # a vocabulary that is larger alone is the student's
        raise UsageError(
            f"{FLAG} {source} has another tokenizer, so that only texts can be compared; give --objective sequence "
            "--estimator k1, or a teacher with the student's tokenizer"
        )
    if not args.compares_responses:
        raise UsageError(
            f"{FLAG} {source} has another tokenizer: a response is judged as a whole, against the prompt's others; "
            "give --num_generations 4 or more"
        )


def own_teacher(args: TeacherArgs, student: Policy) -> nn.Module:
    """The policy as its own teacher: as it starts, its base, or an average of its weights over the steps."""
    if args.own_teacher == "average":
        return AverageTeacher(student, args)
    if args.own_teacher == "base" and student.shares:
        settings = {"shares": True, "trainable": False, "head_is_plain": student.head_is_plain}
        return Policy(student.model, (), student.base, **settings)
    return student.reference()


class AverageTeacher(nn.Module):
    """A policy whose trained weights are an exponential average of the student's: at each lesson it takes in theirs."""

    def __init__(self, student: Policy, args: TeacherArgs) -> None:
        super().__init__()
        self.decay = args.teacher_decay
        if student.shares:
            own, below = lora.belonging(student.adapters), student.adapters[: -len(lora.belonging(student.adapters))]
            with torch.random.fork_rng(devices=[]):  # the weights drawn are overwritten
                names = lora.add_adapter(student.model, "average", cast(ModelArgs, args), below)
            lora.configure(student.model, active=student.adapters, trainable=("policy",))
            settings = {"shares": True, "trainable": False, "head_is_plain": student.head_is_plain}
            self.policy = Policy(student.model, (*below, *names), student.base, **settings)
            found = [lora.adapter_modules(student.model, *adapters).parameters() for adapters in (own, names)]
            self.pairs = [(mine, theirs.requires_grad_(False)) for mine, theirs in zip(*found, strict=True)]
        else:
            self.policy = copy.deepcopy(student, {id(p): p for p in student.parameters() if not p.requires_grad})
            both = zip(student.parameters(), self.policy.parameters(), strict=True)
            self.pairs = [(mine, theirs) for mine, theirs in both if mine.requires_grad]
        self.restore([mine for mine, _ in self.pairs])

    @torch.no_grad()
    def restore(self, weights: Sequence[Tensor]) -> None:
        """Set the averages."""
        for (_, average), value in zip(self.pairs, weights, strict=True):
            average.copy_(value)

    def state(self) -> dict[str, Any]:
        """The averages, for a checkpoint."""
        return {"teacher": [average.detach().cpu().clone() for _, average in self.pairs]}

    @torch.no_grad()
    def follow(self) -> None:
        """Take in the student's weights."""
        for weight, average in self.pairs:
            average.lerp_(weight.to(average), 1 - self.decay)

    def logits_of(self, seen: Batch) -> Callable[[slice], Tensor]:
        return self.policy.logits_of(seen)


class Teachers(nn.Module):
    """Several teachers, one for each row."""

    def __init__(self, policies: Sequence[Policy]) -> None:
        super().__init__()
        self.policies = nn.ModuleList(policies)

    def logits_of(self, seen: Batch) -> Callable[[slice], Tensor]:
        """As `Policy.logits_of`, each action's by the teacher of its row."""
        number = cast(Seen, seen).teacher
        assert number is not None
        number = number.cpu()
        asked = number.unique().tolist() or [0]  # without rows one of them, which knows the width V
        rows_of = {i: (number == i).nonzero()[:, 0].to(seen.input_ids.device) for i in asked}
        found = {i: cast(Policy, self.policies[i]).logits_of(seen.select(rows)) for i, rows in rows_of.items()}
        of_action = number[seen.action_mask.cpu().nonzero()[:, 0]]  # (N,)

        def logits(rows: slice) -> Tensor:
            start, stop, _ = rows.indices(len(of_action))
            parts = []
            for i, function in found.items():
                here = (of_action[start:stop] == i).nonzero()[:, 0]
                before = int((of_action[:start] == i).sum())
                parts.append((here, function(slice(before, before + len(here)))))
            out = parts[0][1].new_empty(stop - start, min(part.shape[1] for _, part in parts))  # (n, V)
            for here, part in parts:
                out[here.to(out.device)] = part[:, : out.shape[1]]
            return out

        return logits


class ForeignTeacher(nn.Module):
    """A teacher with another tokenizer and chat template: it tells the log-probability of a whole text.

    A response has log p_T(its text in the teacher's tokens), in even parts for its tokens. Responses whose text is not
    their tokens' alone, such as ones with bytes outside of characters, cannot be read; half a character at the end of
    a truncated one is left out on both sides.
    """

    def __init__(self, policy: Policy, tokenizer: Tokenizer, student: Tokenizer, by_word: bool = False) -> None:
        """by_word: judge a token from the last border of words before it on, see `borders.py`."""
        super().__init__()
        self.policy, self.encoding, self.student, self.by_word = policy, Encoding(tokenizer), student, by_word
        if by_word and crosses_words(tokenizer):
            raise UsageError(f"--text_return to_go: {FLAG} has tokens of several words; leave it out")
        for one, name in ((tokenizer, "the teacher's"), (student, "the student's")):
            for text in PROBES:
                found = decode(one, encode_text(one, text))
                if found != text:
                    raise UsageError(
                        f"{FLAG}: {name} tokenizer writes {found!r} for {text!r}, so texts cannot be compared across "
                        "tokenizers; take a teacher with the student's tokenizer"
                    )

    def read(self, rollout: Rollout, column: str | None) -> list[tuple[list[int], list[int]] | None]:
        """Prompt and response of each row in the teacher's tokens; None where it cannot be read."""
        found = []
        for sample in samples_of(rollout):
            whole = (sample.response_ids or [])[: counted(self.student, sample)]
            text = decode(self.student, whole)
            prompt = sample.columns[column] if column else sample.prompt
            own = sample._replace(prompt=prompt, response=text, response_ids=None, prompt_ids=None)
            is_text = bool(text) and "\ufffd" not in text
            found.append(self.encoding.prompt_and_response(own) if is_text else None)
        return found


def counted(tokenizer: Tokenizer, sample: Sample) -> int:
    """Tokens of a response but for half a character at the end of a truncated one."""
    ids = sample.response_ids or []
    for count in range(len(ids), max(len(ids) - 4, 0), -1):
        if not sample.truncated or not str(tokenizer.decode(ids[:count])).endswith("\ufffd"):
            return count
    return len(ids)


def is_canonical(tokenizer: Tokenizer, sample: Sample) -> bool:
    """Whether a response's ids are the tokenizer's own for its text."""
    ids, ends = (
        (sample.response_ids or [])[: counted(tokenizer, sample)],
        {tokenizer.eos_token_id, *turn_ends(tokenizer)},
    )
    words = ids[:-1] if ids and ids[-1] in ends else ids
    return encode_text(tokenizer, decode(tokenizer, words)) == list(words)


class TeacherServer(nn.Module):
    """A teacher on a server, vLLM's or `lightrlhf.serve`, with the student's tokens."""

    def __init__(self, address: str, run: Run[Any]) -> None:
        super().__init__()
        self.http = HttpThread(patience(REQUEST))
        self.server = VLLM(ServerClient(self.http, address, SERVER_FLAG), patience(REQUEST))
        run.on_end(self.http.close)
        connect = partial(self.server.connect, follows=False)
        self.http.start(self.server.client.wait_until(connect, patience(SERVER))).result()

    def tell(self, seen: Batch, count: int) -> Told:
        """Log-probabilities of the actions, with the `count` likeliest tokens of each. Raises: RunFailure, Busy."""
        lengths = seen.attention_mask.sum(1).tolist()
        texts = [row[:length] for row, length in zip(seen.input_ids.tolist(), lengths)]
        parts = self.http.start(self._ask(texts, count)).result()
        logprobs = torch.zeros(seen.action_mask.shape)  # (B, T-1)
        ids, top = torch.zeros(*logprobs.shape, count, dtype=torch.int64), torch.zeros(*logprobs.shape, count)
        places = [place for part in parts for place in part]
        for row, (text, told) in enumerate(zip(texts, places, strict=True)):
            for column in seen.action_mask[row].nonzero()[:, 0].tolist():
                values = told[column]
                logprobs[row, column] = values[text[column + 1]]
                if count:
                    likely = sorted(values.items(), key=lambda one: -one[1])[:count]
                    if len(likely) < count:
                        raise RunFailure(f"{self.server.client.name} tells fewer than {count} tokens of a place")
                    ids[row, column], top[row, column] = (torch.tensor(column_of) for column_of in zip(*likely))
        return Told(logprobs=logprobs, ids=ids if count else None, top=top if count else None)

    async def _ask(self, texts: list[list[int]], count: int) -> list[list[list[dict[int, float]]]]:
        parts = [texts[start : start + AT_ONCE] for start in range(0, len(texts), AT_ONCE)]
        asked = (retry(partial(self.server.score_top, part, count), ATTEMPTS, 1.0) for part in parts)
        return list(await asyncio.gather(*asked))


def tell(run: Run[Any], teacher: nn.Module, seen: Batch, batch: Batch) -> Told:
    """The log-probabilities of a batch by a teacher, which reads `seen`, by `--estimator`."""
    args, count = run.args, run.args.teacher_top_k if run.args.estimator == "top_k" else 0
    if isinstance(teacher, TeacherServer):
        return teacher.tell(seen, count)
    size = args.rollout_mini_batch_size
    with run.autocast():
        if isinstance(teacher, ForeignTeacher):
            assert isinstance(batch, Rollout)
            return tell_texts(teacher, batch, args.privileged_column, size)
        if isinstance(teacher, Teachers):
            number = cast(Seen, seen).teacher
            assert number is not None
            rows = [(number == i).nonzero()[:, 0] for i in range(len(teacher.policies))]
            parts = [(own, cast(Policy, one)) for own, one in zip(rows, teacher.policies) if len(own)]
        else:
            parts = [(torch.arange(len(seen)), cast(Policy, getattr(teacher, "policy", teacher)))]
        logprobs = torch.zeros(seen.action_mask.shape)  # (B, T-1)
        ids, top = torch.zeros(*logprobs.shape, count, dtype=torch.int64), torch.zeros(*logprobs.shape, count)
        for own, policy in parts:
            part = seen.select(own)
            width = part.action_mask.shape[1]
            logprobs[own, :width] = score_logprobs(policy, part, 1.0, size)
            if count:
                ids[own, :width], top[own, :width] = score_top(policy, part, count, size)
    return Told(logprobs=logprobs, ids=ids if count else None, top=top if count else None)


def tell_texts(teacher: ForeignTeacher, rollout: Rollout, column: str | None, size: int) -> Told:
    """log p_T of the texts of responses, in even parts for their tokens; see `ForeignTeacher`."""
    rows, samples, mask = teacher.read(rollout, column), samples_of(rollout), rollout.action_mask
    known = [i for i, row in enumerate(rows) if row is not None]
    pairs = [row for row in rows if row is not None]
    logprobs, readable = rollout.logprobs.clone(), torch.tensor([row is not None for row in rows])
    to_go = torch.zeros_like(logprobs) if teacher.by_word else None  # (B, T-1)
    if pairs:
        batch = response_batch([prompt for prompt, _ in pairs], [ids for _, ids in pairs], 0)
        by_token = score_logprobs(teacher.policy, batch, 1.0, size)  # (b, t-1)
        for i, (_, ids), values, own in zip(known, pairs, by_token, batch.action_mask):
            places = mask[i].nonzero()[: counted(teacher.student, samples[i]), 0]  # the rest costs nothing
            logprobs[i, places] = values.sum() / max(len(places), 1)
            if to_go is not None:
                to_go[i, places] = later_gap(teacher, samples[i], rollout.logprobs[i, places], ids, values[own])
    odd = sum(not is_canonical(teacher.student, sample) for sample in samples)
    return Told(logprobs=logprobs * mask, to_go=to_go, readable=readable, noncanonical=odd)


def later_gap(teacher: ForeignTeacher, sample: Sample, logprobs: Tensor, ids: list[int], values: Tensor) -> Tensor:
    """The student's `logprobs` (n,) from each token's last border on, less the teacher's `values` (m,): (n,).

    ids: the teacher's tokens. Where they write another text, as with a chat template that trims responses, it is not
    known which are behind a border: then each token is judged by the whole response.
    """
    own, tokenizer = (sample.response_ids or [])[: len(logprobs)], teacher.encoding.tokenizer
    text = decode(teacher.student, own)
    starts, others = token_starts(teacher.student, own, text), token_starts(tokenizer, ids, text)
    borders = last_borders(text, starts) * int(decode(tokenizer, ids) == text and bool(others.any()))
    return sum_from(logprobs, starts, borders) - sum_from(values, others, borders)


def seen_by_teacher(args: TeacherArgs, batch: Batch) -> Batch:
    """What the teacher reads: the responses behind the prompts, or behind the words of `--privileged_column`.

    Raises: RunFailure when a prompt has no such words.
    """
    name = SIBLING if args.shows_siblings else args.privileged_column
    several = teacher_numbers(args, batch) if args.teacher_column else None
    if name is None or not isinstance(batch, Rollout):
        return batch.extend(Seen, teacher=several)
    is_judged = batch.action_mask.any(1)  # (B,); a response without a score is not
    assert batch.tokenizer is not None
    prompts = []
    for number, columns in zip(batch.row.tolist() if batch.row is not None else [], batch.columns):
        if not columns.get(name):
            raise RunFailure(
                f"--privileged_column {args.privileged_column}: prompt {number} has no such column, or an empty one"
            )
        prompts.append(encode_prompt(batch.tokenizer, columns[name]))
    pad_id = int(batch.tokenizer.pad_token_id)
    seen = response_batch(prompts, batch.response_ids(), pad_id)
    mask = seen.action_mask & is_judged[:, None]
    return seen.extend(Seen, group=batch.group, action_mask=mask, teacher=several)


def add_siblings(args: Any, rollout: Rollout, scores: Tensor) -> tuple[Rollout, Tensor]:
    """A rollout whose privileged words are the prompt and a sibling, and which rows (B,) have one, as 1 and 0.

    The sibling is the best other response to the prompt on this rank, of those that score at least `--sibling_score`
    (Hübotter et al. 2026, 2601.20802). scores: (B,), NaN without one.
    Raises: RunFailure when the prompt is a chat whose messages are not known.
    """
    assert rollout.tokenizer is not None
    name, columns, found = args.privileged_column, [], torch.zeros(len(rollout))
    if name is None and rollout.tokenizer.chat_template:
        raise RunFailure(
            "--sibling_score writes a response into the prompt, whose messages are not known behind a chat template; "
            "give --privileged_column, a column with the messages or text of the prompt"
        )
    good = torch.where(scores >= args.sibling_score, scores, -torch.inf)  # NaN is not
    for row, (prompt, _) in enumerate(rollout.texts):
        others = torch.where(
            (rollout.group == rollout.group[row]) & (torch.arange(len(rollout)) != row), good, -torch.inf
        )
        asked = rollout.columns[row].get(name) if name else prompt
        if asked and len(others) and float(others.max()) > -torch.inf:
            found[row], asked = 1.0, with_hint(asked, rollout.texts[int(others.argmax())][1])
        columns.append({**rollout.columns[row], SIBLING: asked})
    return dataclasses.replace(rollout, columns=columns), found


def with_hint(prompt: Any, response: str) -> Any:
    """A prompt, a text or messages, with a good response behind its last words."""
    hint = f"\n\nA good response was:\n{response}\n\n"
    if isinstance(prompt, str):
        return prompt + hint
    *before, last = prompt
    return [*before, {**last, "content": f"{last['content']}{hint}".rstrip()}]


def teacher_numbers(args: TeacherArgs, batch: Batch) -> Tensor:
    """Number of each row's teacher, (B,), by its name in `--teacher_column`. Raises: RunFailure without one."""
    assert isinstance(batch, Rollout) and args.teacher_column
    names, numbers = list(args.teacher_models), []
    for number, columns in zip(batch.row.tolist() if batch.row is not None else [], batch.columns):
        if (name := columns.get(args.teacher_column)) not in names:
            raise RunFailure(
                f"--teacher_column {args.teacher_column}: prompt {number} names {name!r}, which is not a teacher; "
                f"{FLAG} has {', '.join(names)}"
            )
        numbers.append(names.index(name))
    return torch.tensor(numbers, dtype=torch.int64)
