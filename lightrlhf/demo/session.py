"""Backend of `lightrlhf.demo`, independent of the user interface: plain values in, plain values out.

A `DemoBackend` holds what all users share: models, reward model and votes file. The state of a user, a dialogue or the
current pair, is passed in and returned, so users never see the state of others.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from lightrlhf.cli.errors import UsageError
from lightrlhf.cli.fields import check_args
from lightrlhf.cli.groups import FrozenArgs
from lightrlhf.data.batch import mix_seed
from lightrlhf.data.splits import load_prompts
from lightrlhf.data.tokens import encode_prompt
from lightrlhf.data.types import Tokenizer
from lightrlhf.demo import models
from lightrlhf.demo.args import MAX_NAME, DemoArgs
from lightrlhf.demo.dialogue import FORMS, Turn, clean_text, prompt_values, turn_at, with_system
from lightrlhf.demo.markup import Scores, tokens_as_html
from lightrlhf.demo.models import Answer, Measures, ModelCache, as_prompt, example_prompt, format_score, stream_answer
from lightrlhf.demo.votes import WITHDRAWN, agreement, append_vote, pair_id, read_votes, tally
from lightrlhf.models.loading import find_device
from lightrlhf.models.names import resolve
from lightrlhf.models.tokenizer import load_tokenizer
from lightrlhf.rewards.encoding import Messages
from lightrlhf.rewards.loading import load_scorer
from lightrlhf.rewards.scorers import GroupScorer
from lightrlhf.storage.run_dir import experiment_of, labels, locate, read_arg

UPDATE_SECONDS = 0.05  # shortest time between two updates of a streamed answer
MAX_SIDE_BY_SIDE = 4
MAX_MODELS = 4  # in memory; the least recently used one is unloaded first
SLIDERS = ("max_new_tokens", "do_sample", "temperature", "top_k", "top_p")
AS_TRAINED = "as trained"
STARTERS = (  # for a model without data
    "Explain in two sentences why the sky is blue.",
    "Write a short, polite answer to a guest who waited too long.",
    "What is 17 times 24? Think step by step.",
)
MAX_SUGGESTIONS = 4
T = TypeVar("T")


@dataclass
class DemoBackend:
    """State shared by all users: models, reward model, votes."""

    args: DemoArgs
    cache: ModelCache
    votes_file: Path
    lock: threading.Lock = field(default_factory=threading.Lock)
    prompt_ids: dict[tuple[str, str], list[list[int]]] = field(default_factory=dict)  # by data dir and split
    loaded_scorer: GroupScorer | None = None

    @classmethod
    def open(cls, args: DemoArgs) -> DemoBackend:
        """Open the backend of the flags. Raises: UsageError when an experiment dir has a reward model or is not one."""
        check_args(args, DemoArgs)
        model_args = FrozenArgs(
            trust_remote_code=args.trust_remote_code,
            load_in_8bit=args.load_in_8bit,
            load_in_4bit=args.load_in_4bit,
        )
        device = find_device(args.accelerator)
        for name in args.model_name:
            if not Path(name).is_dir():  # a run may be before its first checkpoint
                resolve(name)
        places = args.data_dir, args.reference_dir, args.verify
        cache = ModelCache(args.model_name, device, MAX_MODELS, model_args, *places)
        last = args.model_name[-1]
        default_file = (experiment_of(last) if read_arg(last, "program") else Path()) / "votes.jsonl"
        return cls(args, cache, Path(args.votes_file or default_file))

    # ------------------------------------------------------------------------------------------- settings and prompts
    def settings(self, *sliders: Any) -> DemoArgs:
        """Return the flags with the values of `SLIDERS`. Raises: ValueError naming a value out of range."""
        values = dict(zip(SLIDERS, sliders, strict=True))
        for name, value in values.items():
            wanted = "true or false" if name == "do_sample" else "a number"
            is_number = type(value) in (int, float) and math.isfinite(value)
            if not (isinstance(value, bool) if name == "do_sample" else is_number):
                raise ValueError(f"{name} {str(value)[:40]} must be {wanted}")
        whole = {name: int(values[name]) for name in ("max_new_tokens", "top_k")}
        return dataclasses.replace(self.args, **values | whole)

    def stored_settings(self, label: str) -> list[Any]:
        """Return the `SLIDERS` that an experiment was trained with. Raises: UsageError when it did not sample."""
        experiment = self.cache.experiment(label)
        values = {name: read_arg(experiment, name) for name in SLIDERS}
        if values["do_sample"] is None:  # not a flag of programs that always sample
            values["do_sample"] = True
        if None in values.values():
            raise UsageError(f"{Path(experiment).name} was not trained on samples, so it has no generation settings")
        return list(values.values())

    def prompts(self, label: str, split: str) -> list[list[int]]:
        """Return the token ids of a split's prompts. Raises: UsageError when the data is missing."""
        key = self._data(label), split
        if key not in self.prompt_ids:
            rows = load_prompts(*key, self.args.verify)
            self.prompt_ids[key] = [torch.as_tensor(row["input_ids"]).tolist() for row in rows]
        return self.prompt_ids[key]

    def as_prompts(self, label: str, rows: Sequence[Sequence[int]]) -> list[str | Messages]:
        """Return prompts as messages where the chat template of a model's data reproduces their ids, else as text."""
        tokenizer = load_tokenizer(self._data(label), None, verify=self.args.verify)
        return [as_prompt(tokenizer, ids) for ids in rows]

    def test_prompt(self, label: str) -> str | Messages:
        """Return a random prompt of the test split."""
        return self.as_prompts(label, [random.choice(self.prompts(label, "test"))])[0]

    def example(self, label: str) -> str | Messages:
        """Return the prompt of `example_prompt.pt`. Raises: UsageError when it is missing."""
        return self.as_prompts(label, [example_prompt(self._data(label), self.args.verify)])[0]

    def form(self, label: str) -> str:
        """Return the item of `FORMS` that matches the example prompt of a model's data."""
        folder = self.cache.data(label)
        has_example = folder is not None and (Path(folder) / "example_prompt.pt").is_file()
        return prompt_values(self.example(label))[1] if has_example else FORMS[0]

    def suggestions(self, label: str) -> list[str | Messages]:
        """Return prompts to begin with: the example and the first test prompts of a model's data, else `STARTERS`.

        Empty where the data cannot be read; the button that loads a test prompt says why.
        """
        if self.cache.data(label) is None:
            return [[{"role": "user", "content": text}] for text in STARTERS]
        try:
            return [self.example(label), *self.as_prompts(label, self.prompts(label, "test")[: MAX_SUGGESTIONS - 1])]
        except UsageError:
            return []

    def _data(self, label: str) -> str:
        folder = self.cache.data(label)
        if folder is None:
            raise UsageError(f"the training data of {label} was not found; restart the demo with --data_dir")
        return folder

    # ------------------------------------------------------------------------------------------------------- scores
    def scorer(self) -> GroupScorer | None:
        """Load the reward model; None without one. Raises: UsageError when it cannot be loaded."""
        with self.lock:
            if self.loaded_scorer is None and (name := self.reward_model()):
                trust = self.args.trust_remote_code
                self.loaded_scorer = load_scorer(name, self.cache.device, 8, "--rm_experiment_dir", trust)
            return self.loaded_scorer

    def reward_model(self) -> str | None:
        """Return `--rm_experiment_dir`, else the reward model of the last experiment that has one."""
        stored_names = [locate(folder, "rm_experiment_dir") for folder in reversed(self.args.model_name)]
        found = (name for name in stored_names if name and Path(name).is_dir())
        return self.args.rm_experiment_dir or next(found, None)

    def measure(self, label: str, answer: Answer, temperature: float) -> Measures | None:
        """Compute the log-probabilities of an answer under its model and the reference; None without a reference."""
        reference = self.cache.reference(label)
        return None if reference is None else models.measure(self.cache.model(label), reference, answer, temperature)

    # ---------------------------------------------------------------------------------------------------------- chat
    def reply(self, turns: list[Turn], label: str, system: str, seed: float, *sliders: Any) -> Iterator[list[Turn]]:
        """Stream the dialogue with a new answer to the last user turn, in place of an existing answer.

        The first value has a pending answer with the reason to wait. If the answer fails, the last value is the
        dialogue as it was.
        """
        index = next((i for i in reversed(range(len(turns))) if turns[i]["role"] == "user"), None)
        if index is None:
            raise UsageError("there is no message to answer; send one first")
        earlier, attempts = turns[:index], turns[index]["attempts"]
        question = {**turns[index], "attempts": attempts + 1}
        try:
            pending = {"role": "assistant", "content": "", "label": label, "pending": self.waits_for(label)}
            yield [*earlier, question, pending]
            model, answer_seed = self.cache.model(label), mix_seed(1000 * index + attempts, start=int(seed or 0))
            prompt = with_system(question["prompt"], clean_text("system prompt", system))
            check_system(model.tokenizer, prompt, label)
            for answer in throttle(stream_answer(model, prompt, self.settings(*sliders), answer_seed)):
                turn = {"role": "assistant", "content": answer.text.strip(), "answer": answer, "label": label}
                yield [*earlier, question, {**turn, "streaming": True}]
        except Exception:
            yield turns
            raise

    def waits_for(self, label: str) -> str:
        """Say why an answer is pending. Raises: UsageError when the model no longer exists."""
        return "Answering …" if self.cache.is_loaded(label) else f"Loading {label} …"

    def score_last(self, turns: list[Turn], temperature: float) -> list[Turn]:
        """Add reward, KL and length to the last answer."""
        if not turns or "answer" not in turns[-1]:
            return turns
        last = turns[-1]
        temperature = dataclasses.replace(self.args, temperature=temperature).temperature  # checked
        measures = self.measure(last["label"], last["answer"], temperature)
        (reward,) = models.rewards(self.scorer(), [last["answer"]])
        return [*turns[:-1], {**last, "measures": measures, "scores": scores_of(last["answer"], reward, measures)}]

    def with_tokens(self, turns: list[Turn], index: Any, macro_length: str) -> list[Turn]:
        """Show an answer's tokens in place of its text, or the text again.

        Raises: UsageError when the turn is not a scored answer, or its model has no reference.
        """
        turn = dict(turn_at(turns, index))
        if turn.pop("tokens", None) is None:
            turn["tokens"] = self.tokens(turn, macro_length)
        return [*turns[:index], turn, *turns[index + 1 :]]

    def tokens(self, turn: Turn, macro_length: str) -> str:
        """Draw the tokens of an answer. Raises: UsageError when it is not scored or its model has no reference."""
        if "scores" not in turn:
            raise UsageError("only a finished answer has tokens; send a message first")
        label, measures = turn["label"], turn["measures"]
        if measures is None:
            raise UsageError(f"{label} has no reference model for log-ratios; restart the demo with --reference_dir")
        tokenizer = self.cache.model(label).tokenizer
        ngram = None if macro_length == AS_TRAINED else int(macro_length)
        segments = models.macro_segments(self.cache.experiment(label), measures, ngram)
        return tokens_as_html(models.token_texts(tokenizer, turn["answer"].ids), measures.log_ratios, segments)

    # -------------------------------------------------------------------------------------------------- side by side
    def side_by_side(
        self, names: Sequence[str], prompt: str | Messages, system: str, seed: float, *sliders: Any
    ) -> Iterator[tuple[list[str], list[Scores]]]:
        """Stream the answers of several models to one prompt: their texts, and at the end their scores."""
        names = names if isinstance(names, list) else []
        if not 2 <= len(names) <= MAX_SIDE_BY_SIDE:
            raise UsageError(f"choose 2 to {MAX_SIDE_BY_SIDE} models, not {len(names)}")
        yield [""] * len(names), []
        settings, prompt = self.settings(*sliders), with_system(prompt, clean_text("system prompt", system))
        for name in names:
            check_system(self.cache.model(name).tokenizer, prompt, name)
        streams = [stream_answer(self.cache.model(name), prompt, settings, int(seed or 0)) for name in names]
        partial: list[Answer | None] = []
        for partial in throttle(interleave(streams)):
            yield [answer.text.strip() if answer else "" for answer in partial], []
        answers = [answer for answer in partial if answer is not None]
        scored = [
            scores_of(answer, reward, self.measure(name, answer, settings.temperature))
            for name, answer, reward in zip(names, answers, models.rewards(self.scorer(), answers))
        ]
        yield [answer.text.strip() for answer in answers], scored

    # ------------------------------------------------------------------------------------------------- compare blind
    def next_pair(self, one: str, other: str, rater: str) -> dict[str, Any]:
        """Sample the next two answers for this rater, in random order: a vote without verdict, comment and time.

        Raises: UsageError when no pair is left, without a rater, or unless the models differ.
        """
        rater = clean_text("name", rater, MAX_NAME).strip()
        if not rater:
            raise UsageError("enter your name first; votes are counted per rater")
        if one == other or not (one and other):
            raise UsageError("choose two different models")
        names = sorted((one, other))
        prompts = self.prompts(one, self.args.split)
        votes = [vote for vote in read_votes(self.votes_file) if vote.get("split") == self.args.split]
        index = next_index(len(prompts), votes, names, rater, self.args.overlap, self.args.seed)
        if index is None:
            raise UsageError("you have voted on every pair of these two models; choose others")
        (prompt,) = self.as_prompts(one, [prompts[index]])
        responses, truncated = [], []
        for place, name in enumerate(names):  # a seed each, because similar models would answer the same on one
            *_, answer = stream_answer(self.cache.model(name), prompt, self.args, self.args.seed + 2 * index + place)
            responses.append(answer.text.strip() if isinstance(prompt, list) else answer.text)
            truncated.append(answer.truncated)
        pair = pair_id(prompt, names, responses)
        order = random.Random(f"{self.args.seed} {pair} {rater}").sample([0, 1], 2)
        shown: dict[str, list[Any]] = {"responses": responses, "models": names, "cut": truncated}
        vote = {"pair": pair, "rater": rater, "split": self.args.split, "index": index, "prompt": prompt}
        vote |= {name: [values[i] for i in order] for name, values in shown.items()}
        return vote | {"settings": {key: getattr(self.args, key) for key in (*SLIDERS, "seed")}}

    def vote(self, pair: dict[str, Any] | None, verdict: str, comment: str) -> bool:
        """Store a vote; False if this rater has already voted on the pair. Raises: UsageError without a pair."""
        if not pair:
            raise UsageError("there is no pair to vote on; press Next pair")
        return self._append({**pair, "verdict": verdict, "comment": clean_text("comment", comment).strip()})

    def withdraw(self, pair: dict[str, Any] | None) -> None:
        """Take a vote back, so that the rater may vote on the pair again. Raises: UsageError when there is no vote."""
        if not pair or not self._append({**pair, "verdict": WITHDRAWN}):
            raise UsageError("there is no vote to undo")

    def _append(self, vote: dict[str, Any]) -> bool:
        return append_vote(self.votes_file, {**vote, "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())})

    def vote_table(self) -> tuple[list[list[Any]], str]:
        """Return rows of the tally, and a sentence with the number of votes and the agreement of raters."""
        votes = read_votes(self.votes_file)
        rows = []
        for row in tally(votes):
            win_rate = "{:.2f} [{:.2f}, {:.2f}]".format(row["win_rate"], *row["win_rate_interval"])
            counts = [row[name] for name in ("pairs", "votes", "wins", "ties", "losses")]
            rows.append([row["model"], row["against"], *counts, win_rate, format_score(row["prefers_shown_first"])])
        agreed = agreement(votes)
        skips = sum(vote["verdict"] == "skip" for vote in votes)
        line = f"{len(votes)} votes in {self.votes_file}, {skips} of them skips."
        if agreed["pairs"]:
            line += f" Agreement on the {agreed['pairs']} pairs with two or more votes: {agreed['equal']:.0%}"
            line += f", Krippendorff's alpha {format_score(agreed['alpha'])}."
        return rows, line

    # ---------------------------------------------------------------------------------------------------------- runs
    def runs(self) -> dict[str, str]:
        """Return experiment dirs by label, the reward model's among them."""
        reward_model = self.reward_model()
        folders = [*self.args.model_name, *([reward_model] if reward_model else [])]
        return {label: folder for label, folder in labels(folders).items() if (Path(folder) / "args.json").is_file()}


def throttle(values: Iterator[T]) -> Iterator[T]:
    """Yield the first and the last value, and in between at most one per `UPDATE_SECONDS`."""
    last_time = 0.0
    skipped: list[T] = []
    for value in values:
        skipped = [value]
        if time.monotonic() - last_time >= UPDATE_SECONDS:
            yield skipped.pop()
            last_time = time.monotonic()
    yield from skipped


def interleave(streams: Sequence[Iterator[Answer]]) -> Iterator[list[Answer | None]]:
    """Yield the latest answers of all streams, each time one token further."""
    latest: list[Answer | None] = [None] * len(streams)
    for answers in itertools.zip_longest(*streams):
        latest = [new or old for new, old in zip(answers, latest)]
        yield latest


def next_index(
    count: int, votes: Sequence[dict[str, Any]], models: Sequence[str], rater: str, overlap: float, seed: int
) -> int | None:
    """Return the index of the next prompt for a rater; None when all are done.

    In a seeded random order, the share `overlap` of prompts is shown to every rater, and each other prompt to the first
    rater who gets to it. Prompts that this rater has voted on are skipped.
    """
    cast = [vote for vote in votes if sorted(vote["models"]) == models]
    own = {vote.get("index") for vote in cast if vote["rater"] == rater}
    taken = {vote.get("index") for vote in cast}
    for place, index in enumerate(random.Random(seed).sample(range(count), count)):
        for_all = int((place + 1) * overlap + 1e-9) > int(place * overlap + 1e-9)
        if index not in own and (for_all or index not in taken):
            return index
    return None


def check_system(tokenizer: Tokenizer, prompt: str | Messages, label: str) -> None:
    """Raise UsageError when a chat template writes the system message of a prompt as an answer of the model."""
    if isinstance(prompt, str) or prompt[0]["role"] != "system":
        return
    try:
        as_answer = encode_prompt(tokenizer, [{**prompt[0], "role": "assistant"}, *prompt[1:]])
    except UsageError:  # a template that wants turns to alternate
        return
    if as_answer == encode_prompt(tokenizer, prompt):
        raise UsageError(f"the chat template of {label} has no system messages; empty the system prompt")


def scores_of(answer: Answer, reward: float | None, measures: Measures | None) -> Scores:
    """Format reward, KL and length of an answer."""
    parts = [("reward", f"{reward:.2f}")] if reward is not None else []
    parts += [("KL", f"{measures.kl:.2f}")] if measures else []
    return [*parts, ("", f"{len(answer.ids)} tokens" + (", truncated" if answer.truncated else ""))]
