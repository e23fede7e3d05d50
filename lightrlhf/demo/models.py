"""Models of the demo: loaded on demand into an LRU cache; streaming answers, with their log-ratios, KL and reward.

Several users may share a model: each answer has its own KV cache, and forward passes alternate between answers,
one token each. KL and log-ratios are computed as in `lightrlhf.evaluate`: at the sampling temperature, over the whole
vocabulary, to the model that training started from.

Left out: batching answers of several users into one forward pass, and remote servers (see `lightrlhf.generate`).
"""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from lightrlhf.cli.errors import UsageError
from lightrlhf.cli.groups import DecodingArgs, FrozenArgs, ModelArgs
from lightrlhf.data.batch import Rollout, response_batch, seeded_noise
from lightrlhf.data.chat import controls
from lightrlhf.data.macro_parsers import make_parser, parsed_segments, token_ends
from lightrlhf.data.splits import check_vocabulary
from lightrlhf.data.tokens import decode, encode_prompt, messages_of
from lightrlhf.data.types import Tokenizer
from lightrlhf.generation.engine import generate_steps
from lightrlhf.generation.rollout import score_logprobs
from lightrlhf.maths import macro_actions
from lightrlhf.models.loading import load_policy
from lightrlhf.models.roles import Policy, vocabulary_size
from lightrlhf.models.tokenizer import end_ids, load_tokenizer
from lightrlhf.rewards.encoding import Messages, Sample
from lightrlhf.rewards.scorers import GroupScorer
from lightrlhf.storage.checkpoint import checkpoints, step_of
from lightrlhf.storage.run_dir import choices, locate, read_arg, why_no_model
from lightrlhf.storage.seals import check_sealed


@dataclass
class LoadedModel:
    """A policy and the tokenizer of its training data."""

    policy: Policy
    tokenizer: Tokenizer
    lock: threading.Lock = field(default_factory=threading.Lock)  # one forward pass at a time: it switches adapters


@dataclass
class Answer:
    """A response to a prompt, complete or partial."""

    prompt: str | Messages
    prompt_ids: list[int]
    ids: list[int] = field(default_factory=list)
    text: str = ""
    truncated: bool = True  # at the length limit or by the user; no end token or stop string

    def sample(self) -> Sample:
        """The input of a scorer."""
        return Sample(self.prompt, self.text, self.truncated, self.prompt_ids, self.ids)


@dataclass
class Measures:
    """Log-probabilities of an answer under its model and the reference."""

    rollout: Rollout  # one row
    log_ratios: list[float]  # of each token of the answer: log pi - log pi_ref

    @property
    def kl(self) -> float:
        """Sum of the log-ratios: a one-sample estimate of KL(pi || ref), which may be negative."""
        return sum(self.log_ratios)


@dataclass
class ModelCache:
    """LRU cache of models by label: the checkpoints of `folders` and the models that their training started from.

    Raises: UsageError when a folder has a reward model, or is neither a model folder nor an experiment dir.
    """

    folders: Sequence[str]
    device: torch.device
    capacity: int = 4  # models kept in memory
    model_args: ModelArgs = field(default_factory=FrozenArgs)
    data_dir: str | None = None  # splits and tokenizer in place of those that each experiment was trained on
    reference_dir: str | None = None  # reference model in place of the one that each experiment started from
    verify: bool = True  # compare the data with its checksums
    lock: threading.Lock = field(default_factory=threading.Lock)
    loaded: OrderedDict[str, LoadedModel] = field(default_factory=OrderedDict)  # by path, least recently used first

    def __post_init__(self) -> None:
        for folder in self.folders:
            if Path(folder).is_dir() and (reason := why_no_model(Path(folder))):
                raise UsageError(f"--model_name {folder} {reason}")
            if read_arg(folder, "program") == "rm":
                raise UsageError(
                    f"--model_name {folder} is a reward model, which generates no text; pass it as --rm_experiment_dir"
                )

    def labels(self) -> list[str]:
        """Labels of all models available now; a running experiment adds checkpoints."""
        return list(choices(self.folders))

    def newest(self) -> list[str]:
        """The model that the first experiment started from, then the newest checkpoint of each experiment."""
        last = {folder: label for label, (_, folder) in choices(self.folders).items()}
        return list(dict.fromkeys([self.labels()[0], *(last[folder] for folder in dict.fromkeys(self.folders))]))

    def experiment(self, label: str) -> str:
        """Return the experiment dir of a label. Raises: UsageError when it no longer exists."""
        return self._choice(label)[1]

    def data(self, label: str) -> str | None:
        """Folder of the splits that a model was trained on; None if unknown or missing."""
        name = self.data_dir or locate(self.experiment(label), "data_dir")
        return name if name is not None and Path(name).is_dir() else None

    def model(self, label: str) -> LoadedModel:
        """Return the model of a label. Raises: UsageError when it cannot be loaded."""
        return self._load(self._choice(label)[0], self.data(label))

    def reference(self, label: str) -> LoadedModel | None:
        """Return the model that training started from; None if it is unknown, or the model was not trained here."""
        source, experiment = self._choice(label)
        keys = ("ref_model", "sft_experiment_dir", "model_name")
        name = self.reference_dir or next((locate(experiment, key) for key in keys if read_arg(experiment, key)), None)
        untrained = read_arg(experiment, "program") is None or step_of(Path(source)) is None
        if name is None or name in ("tiny", source) or (untrained and self.reference_dir is None):
            return None
        return self._load(name, self.data(label))

    def _choice(self, label: str) -> tuple[str, str]:
        choice = choices(self.folders).get(label) if isinstance(label, str) else None
        if choice is None:
            raise UsageError(f"{label} no longer exists; choose another checkpoint")
        return choice

    def is_loaded(self, label: str) -> bool:
        """Whether a model is in memory. Raises: UsageError when it no longer exists."""
        return newest(self._choice(label)[0]) in self.loaded

    def _load(self, source: str, data_dir: str | None) -> LoadedModel:
        source = newest(source)
        with self.lock:  # one load at a time: libraries set global defaults while they load
            if source not in self.loaded:
                while len(self.loaded) >= self.capacity:
                    self.loaded.popitem(last=False)
                    release_memory()
                self.loaded[source] = load_model(source, data_dir, self.device, self.model_args, self.verify)
            self.loaded.move_to_end(source)
            return self.loaded[source]


def newest(source: str) -> str:
    """Return the newest checkpoint of an experiment dir; any other path is unchanged."""
    saved = checkpoints(Path(source))
    return str(saved[-1]) if saved else source


def load_model(
    source: str, data_dir: str | None, device: torch.device, args: ModelArgs, verify: bool = True
) -> LoadedModel:
    """Load a policy for inference. Raises: UsageError when it cannot be loaded."""
    tokenizer = load_tokenizer(data_dir, source, verify=verify)
    policy = load_policy(source, args, tokenizer, "the checkpoint")
    return LoadedModel(policy.requires_grad_(False).eval().to(device), tokenizer)


def release_memory() -> None:
    """Return the memory of unreferenced models to the device and the operating system; glibc would keep it."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
        if trim is not None:
            trim(0)


# ---------------------------------------------------------------------------------------------------------- answers
def stream_answer(model: LoadedModel, prompt: str | Messages, args: DecodingArgs, seed: int) -> Iterator[Answer]:
    """Yield the answer after each token; a pure function of model, prompt, settings and seed.

    Raises: UsageError when the prompt is empty, or does not fit the model's vocabulary or positions.
    """
    tokenizer = model.tokenizer
    ids = encode_prompt(tokenizer, prompt)
    if not ids:
        raise UsageError("the prompt is empty; type a message")
    check_vocabulary([{"input_ids": ids}], vocabulary_size(model.policy), "the prompt")
    uniforms = seeded_noise(seed % 2**63, 1, args.max_new_tokens)
    steps = generate_steps(model.policy, ids, args, end_ids(tokenizer, model.policy.model), uniforms, tokenizer)
    while True:
        with model.lock:
            step = next(steps, None)
        if step is None:
            return
        response = step.responses[0]
        yield Answer(prompt, ids, response, decode(tokenizer, response), step.truncated[0])


def measure(model: LoadedModel, reference: LoadedModel, answer: Answer, temperature: float) -> Measures:
    """Compute the log-probabilities of an answer under the model and its reference."""
    batch, logprobs = response_batch([answer.prompt_ids], [answer.ids], model.tokenizer.pad_token_id), []
    for scored in (model, reference):
        with scored.lock:
            logprobs.append(score_logprobs(scored.policy, batch, temperature, 1))  # (1, T-1)
    sampled = {"prompt_len": torch.tensor([len(answer.prompt_ids)]), "truncated": torch.tensor([answer.truncated])}
    sampled |= {"group": torch.zeros(1, dtype=torch.int64), "logprobs": logprobs[0], "ref_logprobs": logprobs[1]}
    rollout = batch.extend(Rollout, **sampled, tokenizer=model.tokenizer)
    return Measures(rollout, (logprobs[0] - logprobs[1])[batch.action_mask].tolist())


def rewards(scorer: GroupScorer | None, answers: Sequence[Answer]) -> list[float | None]:
    """Score answers to one prompt; None without a scorer, or where a pair scorer has no second answer."""
    return [None] * len(answers) if scorer is None else scorer([[answer.sample() for answer in answers]])[0]


# ----------------------------------------------------------------------------------------------------------- tokens
def macro_segments(experiment: str, measures: Measures, ngram: int | None = None) -> list[int]:
    """Return the index of each token's macro action: `ngram` tokens each, or as the experiment was trained.

    Random lengths are sampled anew, so they only illustrate the segmentation. Raises: UsageError when the package of
    the experiment's parser is not installed.
    """
    rollout = measures.rollout
    condition = "fixed" if ngram is not None else read_arg(experiment, "termination_condition") or "fixed"
    if condition == "fixed":
        length = ngram if ngram is not None else read_arg(experiment, "ngram")
        segments = macro_actions.fixed_segments(rollout.action_mask, 1 if length is None else length)
    elif condition == "ppl":
        segments = macro_actions.perplexity(rollout.action_mask, rollout.ref_logprobs)
    elif condition == "randomized":
        width = read_arg(experiment, "repeat_times") * len(macro_actions.RANDOM_LENGTHS)
        segments = macro_actions.random_segments(rollout.action_mask, torch.rand(1, width))
    else:
        parser = make_parser(read_arg(experiment, "parser"))
        segments, _ = parsed_segments(rollout, parser, read_arg(experiment, "parsing_cutoff"), fallback=1)
    return segments[rollout.action_mask].tolist()


def format_score(value: float | None) -> str:
    """Format a number of a table."""
    return "–" if value is None else f"{value:.2f}"


def token_texts(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """Return the text of each token; a character made of several tokens belongs to the first of them."""
    text = decode(tokenizer, ids)
    ends = token_ends(tokenizer, ids, text)
    return [text[start:end] for start, end in zip([0, *ends], ends)]


# ---------------------------------------------------------------------------------------------------------- prompts
def as_prompt(tokenizer: Tokenizer, ids: Sequence[int]) -> str | Messages:
    """Decode a prompt, such that encoding it gives `ids` again: messages if the template reproduces them, else text.

    Raises: UsageError for a prompt with control tokens that no messages give, such as one with tools.
    """
    if messages := messages_of(tokenizer, ids):
        return [*messages]
    text = str(tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))
    found = controls(tokenizer).spelled.search(text.removeprefix(tokenizer.bos_token or ""))
    if found and encode_prompt(tokenizer, text) != list(ids):
        raise UsageError(f"a prompt with {found[0]} in it cannot be shown as messages; choose another")
    return text


def example_prompt(data_dir: str, verify: bool = True) -> list[int]:
    """Token ids of `example_prompt.pt`. Raises: UsageError when the file is missing, damaged or changed."""
    path = Path(data_dir) / "example_prompt.pt"
    check_sealed(Path(data_dir), [path.name], verify)
    try:
        return [int(i) for i in torch.load(path, weights_only=True)["input_ids"]]
    except FileNotFoundError:
        raise UsageError(f"{path} does not exist; prepare the data again") from None
    except Exception as problem:
        raise UsageError(f"{path} is damaged ({type(problem).__name__}); prepare the data again") from None
