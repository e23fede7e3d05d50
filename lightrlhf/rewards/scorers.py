"""Scorers: a score for each response, from a reward model, a model that compares two responses, or a function.

Responses come in groups, one group a prompt, because a comparing model scores a response by how often it beats the
others of its group. A score that is not a finite number is None: it is for the caller to count. A scorer may have
another tokenizer and chat template than the policy; sampled ids that decode to the same text in the scorer's tokenizer
are scored as they are, never tokenised again.
"""

from __future__ import annotations

import importlib
import inspect
import json
import math
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightrlhf.cli.args import ModelArgs
from lightrlhf.cli.errors import RunFailure, UsageError, first_line
from lightrlhf.data.batch import Rollout, inference_batches, response_batch
from lightrlhf.data.tokens import decode, encode_prompt, encode_response, pair_prompt
from lightrlhf.models.loading import load_scalar
from lightrlhf.models.names import holds_reward_model, quiet_libraries, resolve
from lightrlhf.models.quantisation import is_quantised, keep_unpacked
from lightrlhf.models.roles import ScalarModel, last_token
from lightrlhf.models.tokenizer import load_tokenizer

Scorer = Callable[[Rollout], Tensor]
STATISTICS = "reward_statistics.json"


@dataclass
class RewardModelScorer:
    """Scores by a reward model; its own tokenizer when it has another one than the policy (text in, score out)."""

    model: ScalarModel
    tokenizer: Any
    policy_tokenizer: Any
    batch_size: int

    @torch.no_grad()
    def __call__(self, rollout: Rollout) -> Tensor:
        """(B,) scores at each row's last token."""
        batch: Any = rollout
        if not same_tokenizer(self.tokenizer, self.policy_tokenizer):
            prompts = [
                encode_prompt(self.tokenizer, decode(self.policy_tokenizer, ids)) for ids in rollout.prompt_ids()
            ]
            answers = [
                encode_response(self.tokenizer, decode(self.policy_tokenizer, ids)) for ids in rollout.response_ids()
            ]
            cut = rollout.truncated.tolist()  # what was stopped by its length gets no end token here either
            answers = [ids[:-1] if truncated else ids for ids, truncated in zip(answers, cut)]
            batch = response_batch(prompts, answers, self.tokenizer.pad_token_id).to(rollout.input_ids.device)
        scores = torch.zeros(len(rollout), device=rollout.input_ids.device)
        for rows in inference_batches(batch.attention_mask.sum(1), self.batch_size):
            width = max(int(batch.attention_mask[rows].sum(1).max()), 2)
            ids, mask = batch.input_ids[rows, :width], batch.attention_mask[rows, :width]
            scores[rows] = last_token(self.model(ids, mask), mask)
        return scores


@dataclass
class FunctionScorer:
    """Scores by a Python function `f(prompts, completions, **columns) -> list[float]`; NaN masks a sample."""

    function: Callable[..., list[float]]
    tokenizer: Any

    def __call__(self, rollout: Rollout) -> Tensor:
        """(B,) scores. Raises: RunFailure when the function fails or does not return one number per completion."""
        prompts = [decode(self.tokenizer, ids) for ids in rollout.prompt_ids()]
        completions = [decode(self.tokenizer, ids) for ids in rollout.response_ids()]
        names = {name for columns in rollout.columns for name in columns}
        columns = {name: [row.get(name) for row in rollout.columns] for name in names}
        try:
            scores = [float(score) for score in self.function(prompts, completions, **columns)]
        except Exception as problem:  # whatever a user's function raises
            where = traceback.extract_tb(problem.__traceback__)[-1]
            raise RunFailure(
                f"the reward function failed with {type(problem).__name__}: {problem} ({where.filename}:{where.lineno})"
            ) from problem
        if len(scores) != len(prompts):
            raise RunFailure(f"the reward function returned {len(scores)} scores for {len(prompts)} completions")
        return torch.tensor(scores, device=rollout.input_ids.device)


def load_function(
    path: str, flag: str, shape: str = "f(prompts, completions, **columns) -> list[float]"
) -> Callable[..., Any]:
    """The function behind `package.module:name`. Raises: UsageError naming `flag`, and the `shape` it must have."""
    module, colon, name = path.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as problem:
        raise UsageError(f"{flag} {path} cannot be imported as package.module:function: {problem}") from None
    if not colon or not callable(function):
        raise UsageError(f"{flag} {path} is not of the form package.module:function")
    if not any(p.kind is p.VAR_KEYWORD for p in inspect.signature(function).parameters.values()):
        raise UsageError(f"{flag} {path} must accept **columns: {shape}")
    return function


def same_tokenizer(one: Any, other: Any) -> bool:
    """Whether two tokenizers give the same ids."""
    return one is other or (one.get_vocab() == other.get_vocab() and one.eos_token_id == other.eos_token_id)


def reward_statistics(model_dir: str | Path) -> tuple[float, float]:
    """Mean and standard deviation of a reward model's scores on its own validation split; (0, 1) when not stored."""
    path = Path(model_dir) / STATISTICS
    if not path.is_file():
        return 0.0, 1.0
    stored = json.loads(path.read_text(encoding="utf-8"))
    return stored["mean"], max(stored["std"], 1e-6)


Messages = list[dict[str, str]]


# What a row of responses (a line of `lightrlhf.generate`) holds; other names in it are columns of the data.
ROW = ("index", "prompt", "responses", "truncated", "prompt_ids", "response_ids", "rewards", "response", "reward")
ROW += ("errors", "ref_ids", "rejected_ids", "ref_response", "ref_reward", "rejected_response", "rejected_reward")


class Sample(NamedTuple):
    """A response to be scored."""

    prompt: str | Messages
    response: str
    truncated: bool = False  # stopped by its length: no end token is put behind it
    prompt_ids: list[int] | None = None
    response_ids: list[int] | None = None
    columns: dict[str, Any] = {}


Groups = Sequence[Sequence[Sample]]
GroupScorer = Callable[[Groups], list[list[float | None]]]


@dataclass
class Encoding:
    """How samples become ids of a scorer."""

    tokenizer: Any
    wrap_prompts: bool = False  # whether a text prompt becomes a user message
    longest: int | None = None  # positions of the model

    def prompt_and_response(self, sample: Sample) -> tuple[list[int], list[int]]:
        """Ids of both, the response ending with one end token unless it was truncated."""
        if ids := self.own_ids(sample):
            return ids
        prompt = sample.prompt
        if self.wrap_prompts and isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        start = encode_prompt(self.tokenizer, prompt)
        if isinstance(prompt, str):
            response = encode_response(self.tokenizer, sample.response)
            return start, response[:-1] if sample.truncated else response
        whole = [*prompt, {"role": "assistant", "content": sample.response}]
        text = self.tokenizer.apply_chat_template(whole, tokenize=False).rstrip()
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids[: len(start)], ids[len(start) :]

    def own_ids(self, sample: Sample) -> tuple[list[int], list[int]] | None:
        """The ids a sample came with, when in this tokenizer they are just this prompt and response."""
        prompt, response = sample.prompt_ids, sample.response_ids
        if not prompt or not response or max(*prompt, *response) >= len(self.tokenizer):
            return None
        wrapped = self.wrap_prompts and isinstance(sample.prompt, str)
        if (
            wrapped
            or not self.may_end(response[-1], sample.truncated)
            or decode(self.tokenizer, response) != sample.response
        ):
            return None
        if isinstance(sample.prompt, str):
            same = decode(self.tokenizer, prompt) == sample.prompt
        else:
            same = encode_prompt(self.tokenizer, sample.prompt) == list(prompt)
        return (list(prompt), list(response)) if same else None

    def may_end(self, last: int, truncated: bool) -> bool:
        """Whether a response can end with this id: what another tokenizer ends with may be anything in this one."""
        if truncated or last == self.tokenizer.eos_token_id:
            return not (truncated and last == self.tokenizer.eos_token_id)
        if last not in self.tokenizer.all_special_ids:
            return True  # ended by a stop string
        return self.tokenizer.decode([last]) in (self.tokenizer.chat_template or "")  # the end of a turn

    def fits(self, length: int) -> bool:
        return 0 < length <= (self.longest or math.inf)


@dataclass
class ModelScorer:
    """A reward model: ours, any sequence classifier with one label, or one whose own code gives a `score`."""

    model: nn.Module
    encoding: Encoding
    batch_size: int
    mean: float = 0.0
    std: float = 1.0

    def __call__(self, groups: Groups) -> list[list[float | None]]:
        """Standardised scores; None for a text with more tokens than the model has positions."""
        samples = [sample for group in groups for sample in group]
        if is_encoder(self.model):
            values = iter(self._score_texts(samples))
        else:
            values = iter(self._score_ids([self.encoding.prompt_and_response(sample) for sample in samples]))
        return [[finite((next(values) - self.mean) / self.std) for _ in group] for group in groups]

    def _score_ids(self, rows: list[tuple[list[int], list[int]]]) -> list[float]:
        def score(batch: list[tuple[list[int], list[int]]]) -> Tensor:
            pad = self.encoding.tokenizer.pad_token_id
            laid = response_batch([p for p, _ in batch], [r for _, r in batch], pad).to(self.model.device)
            return score_batch(self.model, laid.input_ids, laid.attention_mask)

        lengths = [len(prompt) + len(response) for prompt, response in rows]
        return in_batches(rows, lengths, self.encoding, self.model.device, self.batch_size, score)

    def _score_texts(self, samples: list[Sample]) -> list[float]:
        """Encoders read prompt and response as the two texts of a pair."""
        tokenizer = self.encoding.tokenizer
        texts = [(as_text(sample.prompt), sample.response) for sample in samples]

        @torch.no_grad()
        def score(batch: list[tuple[str, str]]) -> Tensor:
            prompts, responses = zip(*batch)
            inputs = tokenizer(list(prompts), list(responses), padding=True, return_tensors="pt")
            return self.model(**inputs.to(self.model.device)).logits[:, 0].float()

        lengths = [len(tokenizer(*text)["input_ids"]) for text in texts]
        return in_batches(texts, lengths, self.encoding, self.model.device, self.batch_size, score)


@dataclass
class PairScorer:
    """A model that compares two responses (`rm --loss_type pair`).

    A response's score is its mean chance of beating each other response of its group, asked in both orders: in [0, 1],
    of K responses K (K - 1) comparisons. Without another response there is none.
    """

    model: nn.Module
    encoding: Encoding
    batch_size: int

    def __call__(self, groups: Groups) -> list[list[float | None]]:
        """Mean chances of winning."""
        rows, places = [], []
        for g, group in enumerate(groups):
            encoded = [self.encoding.prompt_and_response(sample) for sample in group]
            for a, (prompt, first) in enumerate(encoded):
                for b, (_, second) in enumerate(encoded):
                    if a != b:
                        rows.append(pair_prompt(self.encoding.tokenizer, prompt, first, second))
                        places.append((g, a, b))

        def score(batch: list[list[int]]) -> Tensor:
            laid = response_batch(batch, [[] for _ in batch], self.encoding.tokenizer.pad_token_id)
            laid = laid.to(self.model.device)
            return score_batch(self.model, laid.input_ids, laid.attention_mask)

        lengths = [len(row) for row in rows]
        logits = in_batches(rows, lengths, self.encoding, self.model.device, self.batch_size, score)
        chances: list[list[list[float]]] = [[[] for _ in group] for group in groups]
        for (g, a, b), logit in zip(places, logits):
            chance = 1 / (1 + math.exp(-logit)) if abs(logit) < 500 else float(logit > 0)
            chances[g][a].append(chance)
            chances[g][b].append(1 - chance)
        return [[finite(sum(c) / len(c)) if c else None for c in group] for group in chances]


@dataclass
class FunctionGroupScorer:
    """A Python function `f(prompts, completions, **columns) -> list[float]`, as PPO takes it."""

    function: Callable[..., Sequence[float]]
    name: str = "the reward function"
    failures: int = field(default=0, init=False)

    def __call__(self, groups: Groups) -> list[list[float | None]]:
        """Its numbers. Raises: RunFailure when it fails or does not return one for each completion."""
        samples = [sample for group in groups for sample in group]
        names = {name for sample in samples for name in sample.columns}
        columns = {name: [sample.columns.get(name) for sample in samples] for name in names}
        try:
            scores = list(self.function([as_text(s.prompt) for s in samples], [s.response for s in samples], **columns))
        except Exception as problem:  # whatever a user's function raises
            raise RunFailure(f"{self.name} failed with {type(problem).__name__}: {problem}") from problem
        if len(scores) != len(samples):
            raise RunFailure(f"{self.name} returned {len(scores)} scores for {len(samples)} completions")
        values = iter(scores)
        return [[number(next(values)) for _ in group] for group in groups]


def score_rows(scorer: GroupScorer, rows: Sequence[dict[str, Any]]) -> list[list[float | None]]:
    """Scores of the responses of rows as `lightrlhf.generate` writes them; None for a response that is missing."""
    groups, places = [], []
    for row in rows:
        kept = [k for k, response in enumerate(row["responses"]) if response is not None]
        ids, cut = row.get("response_ids"), row.get("truncated")
        columns = {name: value for name, value in row.items() if name not in ROW}
        groups.append(
            [
                Sample(
                    prompt=row["prompt"],
                    response=row["responses"][k],
                    truncated=bool(cut[k]) if cut else False,
                    prompt_ids=row.get("prompt_ids"),
                    response_ids=ids[k] if ids else None,
                    columns=columns,
                )
                for k in kept
            ]
        )
        places.append(kept)
    found = []
    for row, kept, values in zip(rows, places, scorer(groups)):
        scores: list[float | None] = [None] * len(row["responses"])
        for k, value in zip(kept, values):
            scores[k] = value
        found.append(scores)
    return found


# ---------------------------------------------------------------------------------------------------------- loading
def load_scorer(
    name: str,
    device: torch.device,
    batch_size: int,
    flag: str,
    trust_remote_code: bool = False,
    wrap_prompts: bool = False,
) -> GroupScorer:
    """The scorer of a reward model or a pair-preference model.

    wrap_prompts: whether a text prompt becomes a user message of the model's chat template.
    Raises: UsageError naming `flag` when it cannot be loaded, is no reward model, or needs code that is not trusted.
    """
    source = resolve(name, flag)
    config = _config(source)
    custom = "AutoModelForSequenceClassification" in config.get("auto_map", {})
    if custom and not trust_remote_code:
        raise UsageError(f"{flag} {name} needs the code in its own folder; allow it by --trust_remote_code True")
    if custom:
        model, tokenizer = _load_custom(source, flag)
    elif not holds_reward_model(source):
        raise UsageError(f"{flag} {name} holds no reward model: its head is none that classifies")
    else:
        model = load_scalar(source, ModelArgs(), None, 0, flag).model
        tokenizer = _plain(source) if is_encoder(model) else load_tokenizer(None, source)
    model = model.requires_grad_(False).eval().to(device)
    longest = getattr(model.config, "max_position_embeddings", None)
    encoding = Encoding(tokenizer, wrap_prompts, longest)
    if getattr(model.config, "compares_pairs", False):
        return PairScorer(model, encoding, batch_size)
    return ModelScorer(model, encoding, batch_size, *reward_statistics(source))


def _config(source: str) -> dict[str, Any]:
    try:
        return json.loads((Path(source) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}  # loading says what is wrong


def _load_custom(source: str, flag: str) -> tuple[nn.Module, Any]:
    quiet_libraries()
    from transformers import AutoModelForSequenceClassification

    tokenizer = load_tokenizer(None, source)
    try:
        model = AutoModelForSequenceClassification.from_pretrained(source, dtype=torch.float32, trust_remote_code=True)
    except Exception as problem:  # the folder's code may raise anything
        raise UsageError(f"{flag} {source} cannot be loaded: {first_line(problem)}") from None
    if is_quantised(model):
        keep_unpacked(model, f"{flag} {source}", torch.float32)
    if model.config.pad_token_id is None:
        model.config.pad_token_id = tokenizer.pad_token_id
    return model, tokenizer


def _plain(source: str) -> Any:
    """An encoder's tokenizer, which may have no end token."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError) as problem:
        raise UsageError(f"no tokenizer in {source}: {first_line(problem)}") from None


# ---------------------------------------------------------------------------------------------------------- helpers
def in_batches(
    rows: Sequence[Any],
    lengths: Sequence[int],
    encoding: Encoding,
    device: torch.device,
    batch_size: int,
    score: Callable[[list[Any]], Tensor],
) -> list[float]:
    """`score` of rows of like length together; NaN for rows that do not fit the model."""
    values = [math.nan] * len(rows)
    fitting = [i for i, length in enumerate(lengths) if encoding.fits(length)]
    for part in inference_batches(torch.tensor([lengths[i] for i in fitting], device=device), batch_size):
        index = [fitting[i] for i in part.tolist()]
        for i, value in zip(index, score([rows[i] for i in index]).tolist()):
            values[i] = value
    return values


@torch.no_grad()
def score_batch(model: nn.Module, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """(B, T) right-padded rows -> (B,): the head at the last token, or what the model's own code calls `score`."""
    if hasattr(model, "score"):
        return last_token(ScalarModel(model)(input_ids, attention_mask), attention_mask)
    out = model(input_ids=input_ids, attention_mask=attention_mask.long())
    score = getattr(out, "score", None)
    return (out.logits if score is None else score).reshape(len(input_ids), -1)[:, 0].float()


def is_encoder(model: nn.Module) -> bool:
    """Whether a classifier reads pairs of texts (BERT and its kin): no head `score`, no code of its own."""
    return not hasattr(model, "score") and not hasattr(model.config, "auto_map")


def as_text(prompt: str | Messages) -> str:
    """A prompt as plain text: of messages, what each says, a line apart."""
    return prompt if isinstance(prompt, str) else "\n\n".join(message["content"] for message in prompt)


def number(value: Any) -> float | None:
    """A finite float, or None."""
    try:
        return finite(float(value))
    except (TypeError, ValueError):
        return None


def finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
