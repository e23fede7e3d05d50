"""Trained models as one talks to them: loaded when asked for, answering a token at a time, and what an answer is worth.

The shelf holds a few models and forgets the one not used for longest. Several people may use one model at once: each
answer has a key-value cache of its own and they take turns by the token. The KL and the log-ratios of an answer are
those of `lightrlhf.evaluate`: at the sampling temperature, over the whole vocabulary, to what training started from.

Left out: batching the answers of several people in one pass, and servers of other kinds (see `lightrlhf.generate`).
"""

from __future__ import annotations

import ctypes
import gc
import html
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lightrlhf.cli.args import GenerationArgs, ModelArgs
from lightrlhf.cli.errors import UsageError
from lightrlhf.data.batch import Rollout, response_batch
from lightrlhf.data.macro_parsers import make_parser, parsed_segments, token_ends
from lightrlhf.data.splits import check_vocabulary
from lightrlhf.data.tokens import decode, encode_prompt, messages_of
from lightrlhf.generation.engine import generate_steps
from lightrlhf.generation.rollout import score_logprobs
from lightrlhf.maths import macro_actions as segments
from lightrlhf.models.loading import load_policy
from lightrlhf.models.roles import Policy, vocabulary_size
from lightrlhf.models.tokenizer import load_tokenizer
from lightrlhf.rewards.scorers import GroupScorer, Messages, Sample
from lightrlhf.storage.checkpoint import checkpoints
from lightrlhf.storage.run_dir import choices, located, stored

STRONG = 3.0  # nats at which a token's colour is deepest


@dataclass
class LoadedModel:
    """A model with the tokenizer its data was made with."""

    policy: Policy
    tokenizer: Any
    lock: threading.Lock = field(default_factory=threading.Lock)  # a pass at a time; adapters are switched within one


@dataclass
class Answer:
    """What a model said to a prompt, so far."""

    prompt: str | Messages
    prompt_ids: list[int]
    ids: list[int] = field(default_factory=list)
    text: str = ""
    cut: bool = True  # not ended by an end token or a stop string: by its length, or by who reads it

    def sample(self) -> Sample:
        """What a scorer takes."""
        return Sample(self.prompt, self.text, self.cut, self.prompt_ids, self.ids)


@dataclass
class Measures:
    """An answer under the policy and the reference, (1, T-1) as in DESIGN; what its colours and numbers are made of."""

    rollout: Rollout
    log_ratios: list[float]  # of each token of the answer: log pi - log ref

    @property
    def kl(self) -> float:
        """Sum over the answer: its contribution to KL(pi || ref), which may be negative for one sample."""
        return sum(self.log_ratios)


class ModelCache:
    """Models by label, at most `capacity` of them in memory; those of `folders` and what they started from.

    data_dir: splits and tokenizer to use instead of those that each experiment was trained on.
    Raises: UsageError when a folder holds a reward model, or no model.
    """

    def __init__(
        self,
        folders: Sequence[str],
        device: torch.device,
        capacity: int = 4,
        models: ModelArgs | None = None,
        data_dir: str | None = None,
        reference_dir: str | None = None,
    ) -> None:
        self.folders, self.device, self.capacity = list(folders), device, capacity
        self.models, self.data_dir, self.reference_dir = models or ModelArgs(), data_dir, reference_dir
        self.lock = threading.Lock()
        self.held: OrderedDict[str, LoadedModel] = OrderedDict()
        for folder in folders:
            if stored(folder, "program") == "rm":
                raise UsageError(
                    f"--experiment_dir {folder} holds a reward model, which scores and does not talk; "
                    "give it as --rm_experiment_dir"
                )

    def labels(self) -> list[str]:
        """What can be talked to now; a run that goes on has more of them later."""
        return list(choices(self.folders))

    def newest(self) -> list[str]:
        """The newest of each experiment, and in front what the first of them started from."""
        last = {folder: label for label, (_, folder) in choices(self.folders).items()}
        found = dict.fromkeys([self.labels()[0], *(last[folder] for folder in dict.fromkeys(self.folders))])
        return list(found)

    def experiment(self, label: str) -> str:
        """The experiment dir behind a label. Raises: UsageError."""
        return self._choice(label)[1]

    def data(self, label: str) -> str | None:
        """Folder of the splits that a model was trained on, or None where it is not known or not there."""
        name = self.data_dir or located(self.experiment(label), "data_dir")
        return name if name is not None and Path(name).is_dir() else None

    def speaker(self, label: str) -> LoadedModel:
        """The model behind a label. Raises: UsageError when it cannot be loaded."""
        return self._hold(self._choice(label)[0], self.data(label))

    def reference(self, label: str) -> LoadedModel | None:
        """What the training of a model started from, or None where that is itself or not known."""
        source, experiment = self._choice(label)
        keys = ("ref_model", "sft_experiment_dir", "model_name")
        name = self.reference_dir or next((located(experiment, key) for key in keys if stored(experiment, key)), None)
        own = stored(experiment, "program") is None or not Path(source).name.startswith("checkpoint-")
        if name in (None, "tiny", source) or (own and self.reference_dir is None):
            return None
        return self._hold(name, self.data(label))

    def _choice(self, label: str) -> tuple[str, str]:
        found = choices(self.folders).get(label)
        if found is None:
            raise UsageError(f"{label} is not there any more; choose another checkpoint")
        return found

    def _hold(self, source: str, data_dir: str | None) -> LoadedModel:
        saved = checkpoints(Path(source))  # of an experiment dir the newest, which may have a label of its own
        source = str(saved[-1]) if saved else source
        with self.lock:  # one load at a time: libraries set global defaults while they load
            if source not in self.held:
                while len(self.held) >= self.capacity:
                    self.held.popitem(last=False)
                    release_memory()
                self.held[source] = load_model(source, data_dir, self.device, self.models)
            self.held.move_to_end(source)
            return self.held[source]


def load_model(source: str, data_dir: str | None, device: torch.device, models: ModelArgs) -> LoadedModel:
    """A policy that only talks. Raises: UsageError."""
    tokenizer = load_tokenizer(data_dir, source)
    policy = load_policy(source, models, tokenizer, "the checkpoint")
    return LoadedModel(policy.requires_grad_(False).eval().to(device), tokenizer)


def release_memory() -> None:
    """Give back what a model occupied that nobody refers to any more; the C library keeps it otherwise."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
        if trim is not None:
            trim(0)


# ---------------------------------------------------------------------------------------------------------- answers
def answers(speaker: LoadedModel, prompt: str | Messages, args: GenerationArgs, seed: int) -> Iterator[Answer]:
    """The answer after each token; a pure function of model, prompt, settings and seed.

    Raises: UsageError when the prompt is empty, or does not fit the model's vocabulary or positions.
    """
    ids = encode_prompt(speaker.tokenizer, prompt)
    if not ids:
        raise UsageError("the prompt is empty; write something")
    check_vocabulary([{"input_ids": ids}], vocabulary_size(speaker.policy), "the prompt")
    noise = torch.rand(1, args.max_new_tokens, generator=torch.Generator().manual_seed(seed % 2**63))
    steps = generate_steps(speaker.policy, ids, args, [speaker.tokenizer.eos_token_id], noise, speaker.tokenizer)
    while True:
        with speaker.lock:
            said = next(steps, None)
        if said is None:
            return
        response = said.responses[0]
        yield Answer(prompt, ids, response, decode(speaker.tokenizer, response), said.truncated[0])


def measure(speaker: LoadedModel, reference: LoadedModel, answer: Answer, temperature: float) -> Measures:
    """Log-probabilities of an answer's tokens under the model and its reference."""
    batch = response_batch([answer.prompt_ids], [answer.ids], speaker.tokenizer.pad_token_id)
    batch = batch.to(speaker.policy.model.device)
    found = []
    for one in (speaker, reference):
        with one.lock:
            found.append(score_logprobs(one.policy, batch, temperature, 1).cpu())  # (1, T-1)
    batch = batch.to("cpu")
    rollout = Rollout(
        input_ids=batch.input_ids,
        attention_mask=batch.attention_mask,
        action_mask=batch.action_mask,
        prompt_len=torch.tensor([len(answer.prompt_ids)]),
        truncated=torch.tensor([answer.cut]),
        logprobs=found[0],
        ref_logprobs=found[1],
    )
    return Measures(rollout, (found[0] - found[1])[batch.action_mask].tolist())


def rewards(scorer: GroupScorer | None, said: Sequence[Answer]) -> list[float | None]:
    """Scores of answers to one prompt; None where there is no scorer, or it has nothing to compare an answer with."""
    return [None] * len(said) if scorer is None else scorer([[answer.sample() for answer in said]])[0]


# --------------------------------------------------------------------------------------------- looking at the tokens
def macro_segments(experiment: str, measures: Measures, tokenizer: Any, ngram: int | None = None) -> list[int]:
    """Which macro action each token of an answer belongs to: of `ngram` tokens, or as the experiment was trained.

    Random lengths are drawn anew, so they show what such a cut looks like. Raises: UsageError when a parser is missing.
    """
    rollout = measures.rollout
    condition = "fixed" if ngram is not None else stored(experiment, "termination_condition") or "fixed"
    if condition == "fixed":
        length = ngram if ngram is not None else stored(experiment, "ngram")
        cut = segments.fixed(rollout.action_mask, 1 if length is None else length)
    elif condition == "ppl":
        cut = segments.perplexity(rollout.action_mask, rollout.ref_logprobs)
    elif condition == "randomized":
        width = stored(experiment, "repeat_times") * len(segments.RANDOM_LENGTHS)
        cut = segments.randomized(rollout.action_mask, torch.rand(1, width))
    else:
        parser = make_parser(stored(experiment, "parser"), stored(experiment, "parser_model"))
        cut, _ = parsed_segments(rollout, tokenizer, parser, stored(experiment, "parsing_cutoff"), fallback=1)
    return cut[rollout.action_mask].tolist()


def pieces(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The text of each token; of the tokens that make one character together, the first ones have all of it."""
    text, ends = token_ends(tokenizer, ids)
    return [text[start:end] for start, end in zip([0, *ends], ends)]


def tokens_as_html(texts: Sequence[str], log_ratios: Sequence[float], cut: Sequence[int]) -> str:
    """Tokens coloured by log-ratio (green: more likely than under the reference, red: less), a bar between segments
    unless each token is one. An end token, which has no text, is named.
    """
    spans, has_bars = [], len(set(cut)) < len(cut)
    for i, (text, ratio, segment) in enumerate(zip(texts, log_ratios, cut)):
        colour = "46, 160, 67" if ratio > 0 else "218, 54, 51"
        strength = min(abs(ratio) / STRONG, 1.0) * 0.75
        bar = (
            "border-left: 2px solid currentColor; padding-left: 1px;"
            if has_bars and i and segment != cut[i - 1]
            else ""
        )
        shown = html.escape(text).replace("\n", "\u21b5\n") or "<i> end</i>"
        spans.append(
            f'<span class="token" title="log-ratio {ratio:+.3f}, segment {segment}" '
            f'style="background: rgba({colour}, {strength:.2f}); white-space: pre-wrap; {bar}">{shown}</span>'
        )
    return f'<div class="tokens">{"".join(spans)}</div>'


# ---------------------------------------------------------------------------------------------------------- prompts
def as_prompt(tokenizer: Any, ids: Sequence[int]) -> str | Messages:
    """A prompt whose ids, encoded again, are these: a dialogue where the chat template makes just them, else text."""
    return messages_of(tokenizer, ids) or tokenizer.decode(ids, clean_up_tokenization_spaces=False)


def example_prompt(data_dir: str) -> list[int]:
    """Ids of `example_prompt.pt`. Raises: UsageError."""
    path = Path(data_dir) / "example_prompt.pt"
    try:
        return [int(i) for i in torch.load(path, weights_only=True)["input_ids"]]
    except FileNotFoundError:
        raise UsageError(f"{path} does not exist; prepare the data again") from None
    except Exception as problem:
        raise UsageError(f"{path} is damaged ({type(problem).__name__}); prepare the data again") from None
