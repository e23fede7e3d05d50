"""What the page of `lightrlhf.demo` does, without a page: plain values in, plain values out.

A `Desk` is what all visitors share: the models, the reward model, the file of votes. What belongs to one visitor, their
dialogue or the pair they are looking at, is passed in and out, so that nobody sees another's.
"""

from __future__ import annotations

import dataclasses
import random
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lightrlhf.cli.args import GenerationArgs, ModelArgs
from lightrlhf.cli.errors import UsageError
from lightrlhf.data.splits import load_prompts
from lightrlhf.demo import models as chat
from lightrlhf.demo.models import Answer, ModelCache
from lightrlhf.demo.summaries import summary_fields, summary_prompt
from lightrlhf.demo.votes import agreement, append_vote, pair_id, read_votes, tally
from lightrlhf.models.loading import find_device
from lightrlhf.models.tokenizer import load_tokenizer
from lightrlhf.rewards.loading import load_scorer
from lightrlhf.rewards.scorers import GroupScorer, Messages
from lightrlhf.storage.run_dir import labels, located, read_growing, read_metrics, stored

FORMS = ("dialogue", "summary", "as written")
SHOW_EVERY = 0.05  # seconds between two updates of the page
MOST = 4  # models side by side
SLIDERS = ("max_new_tokens", "do_sample", "temperature", "top_k", "top_p")
AS_TRAINED = "as trained"
Turn = dict[str, Any]


@dataclass
class DemoBackend:
    """What all visitors share: models, reward model, votes. Whatever belongs to one visitor is passed in and out."""

    args: Any  # DemoArgs
    shelf: ModelCache
    votes_file: Path
    lock: threading.Lock = field(default_factory=threading.Lock)
    prompts_of: dict[tuple[str, str], list[list[int]]] = field(default_factory=dict)
    loaded_scorer: GroupScorer | None = None

    @classmethod
    def open(cls, args: Any) -> DemoBackend:
        """Raises: UsageError when an experiment dir holds nothing to talk to."""
        models = ModelArgs(
            trust_remote_code=args.trust_remote_code,
            load_in_8bit=args.load_in_8bit,
            load_in_4bit=args.load_in_4bit,
        )
        device = find_device(args.accelerator)
        shelf = ModelCache(args.experiment_dir, device, args.max_models, models, args.data_dir, args.reference_dir)
        last = args.experiment_dir[-1]
        beside = Path(last if stored(last, "program") else ".") / "votes.jsonl"
        return cls(args, shelf, Path(args.votes_file or beside))

    # ------------------------------------------------------------------------------------------------------- prompts
    def settings(self, max_new_tokens: float, do_sample: bool, temperature: float, top_k: float, top_p: float) -> Any:
        """The page's settings with what only the command line sets. Raises: ValueError naming the setting."""
        chosen = {"max_new_tokens": int(max_new_tokens), "do_sample": do_sample, "top_k": int(top_k)}
        return dataclasses.replace(self.args, **chosen, temperature=temperature, top_p=top_p)

    def settings_of(self, label: str) -> list[Any]:
        """The generation settings that an experiment was trained with. Raises: UsageError when it has none."""
        experiment = self.shelf.experiment(label)
        found = [stored(experiment, name) for name in SLIDERS]
        if None in found:
            raise UsageError(f"{Path(experiment).name}: this training did not sample, so it has no generation settings")
        return found

    def prompts(self, label: str, split: str) -> list[list[int]]:
        """The ids of a split's prompts. Raises: UsageError when the data is not there."""
        known = self._data(label), split
        if known not in self.prompts_of:
            self.prompts_of[known] = [torch.as_tensor(row["input_ids"]).tolist() for row in load_prompts(*known)]
        return self.prompts_of[known]

    def prompt(self, label: str, split: str, index: int) -> str | Messages:
        """One of them, as a dialogue where the chat template makes just its ids, else as text."""
        return chat.as_prompt(self.shelf.speaker(label).tokenizer, self.prompts(label, split)[index])

    def test_prompt(self, label: str) -> str | Messages:
        """Any prompt of the test split."""
        return self.prompt(label, "test", random.randrange(len(self.prompts(label, "test"))))

    def form(self, label: str) -> str:
        """How prompts of a model's data are written, told by its example."""
        folder = self.shelf.data(label)
        if folder is None or not (Path(folder) / "example_prompt.pt").is_file():
            return FORMS[0]
        ids, tokenizer = chat.example_prompt(folder), load_tokenizer(folder, None)
        return filled(chat.as_prompt(tokenizer, ids))[1]

    def example(self, label: str) -> str | Messages:
        """The prompt of `example_prompt.pt`. Raises: UsageError."""
        return chat.as_prompt(self.shelf.speaker(label).tokenizer, chat.example_prompt(self._data(label)))

    def _data(self, label: str) -> str:
        folder = self.shelf.data(label)
        if folder is None:
            raise UsageError(f"the data that {label} was trained on is not here; start the page with --data_dir")
        return folder

    # ------------------------------------------------------------------------------------------------------- answers
    def scorer(self) -> GroupScorer | None:
        """The reward model; None where none is known. Raises: UsageError when it cannot be loaded."""
        with self.lock:
            if self.loaded_scorer is None and (name := self.reward_model()):
                self.loaded_scorer = load_scorer(name, self.shelf.device, 8, "--rm_experiment_dir")
            return self.loaded_scorer

    def reward_model(self) -> str | None:
        """`--rm_experiment_dir`, else that of the last experiment that has one, where it is there."""
        found = [located(folder, "rm_experiment_dir") for folder in reversed(self.args.experiment_dir)]
        return self.args.rm_experiment_dir or next((name for name in found if name and Path(name).is_dir()), None)

    def answer(self, label: str, prompt: str | Messages, settings: GenerationArgs, seed: int) -> Iterator[Answer]:
        """One answer as it grows, a few times a second, and as it ends."""
        yield from at_intervals(chat.answers(self.shelf.speaker(label), prompt, settings, seed))

    def measured(self, label: str, answer: Answer, temperature: float) -> chat.Measures | None:
        """The answer under its model and the reference; None for a model that has none."""
        reference = self.shelf.reference(label)
        return reference and chat.measure(self.shelf.speaker(label), reference, answer, temperature)

    # ---------------------------------------------------------------------------------------------------------- chat
    def reply(self, turns: list[Turn], label: str, seed: float, *sliders: Any) -> Iterator[list[Turn]]:
        """The dialogue with a new answer to its last question, growing; an answer that is there is replaced."""
        asked = next((i for i in reversed(range(len(turns))) if turns[i]["role"] == "user"), None)
        if asked is None:
            raise UsageError("there is no question yet; write one")
        before, question = turns[:asked], {**turns[asked], "tries": turns[asked]["tries"] + 1}
        noise = int(seed or 0) * 1_000_003 + 1000 * asked + question["tries"]
        for answer in self.answer(label, question["prompt"], self.settings(*sliders), noise):
            said = {"role": "assistant", "content": answer.text.strip(), "answer": answer, "label": label}
            yield [*before, question, said]

    def judged(self, turns: list[Turn], temperature: float) -> list[Turn]:
        """The dialogue with reward, KL and length of its last answer."""
        if not turns or turns[-1]["role"] != "assistant" or "answer" not in turns[-1]:
            return turns
        last = turns[-1]
        measures = self.measured(last["label"], last["answer"], temperature)
        (reward,) = chat.rewards(self.scorer(), [last["answer"]])
        return [*turns[:-1], {**last, "measures": measures, "told": told_of(last["answer"], reward, measures)}]

    def tokens(self, turns: list[Turn], macro: str) -> str:
        """The last answer's tokens as HTML. Raises: UsageError when there is none, or nothing to compare it with."""
        last = turns[-1] if turns else {}
        if "answer" not in last:
            raise UsageError("there is no answer yet")
        label, measures = last["label"], last.get("measures")
        if measures is None:
            raise UsageError(f"{label} has no reference that its tokens could be compared with; see --reference_dir")
        tokenizer = self.shelf.speaker(label).tokenizer
        length = None if macro == AS_TRAINED else int(macro)
        cut = chat.macro_segments(self.shelf.experiment(label), measures, tokenizer, length)
        return chat.tokens_as_html(chat.pieces(tokenizer, last["answer"].ids), measures.log_ratios, cut)

    # -------------------------------------------------------------------------------------------------- side by side
    def beside(self, names: Sequence[str], prompt: str | Messages, seed: float, *sliders: Any) -> Iterator[list[Any]]:
        """Answers of some models to one prompt, growing together, and in the end a table of what they are worth."""
        if not 2 <= len(names) <= MOST:
            raise UsageError(f"choose 2 to {MOST} models, not {len(names)}")
        settings = self.settings(*sliders)
        streams = [chat.answers(self.shelf.speaker(name), prompt, settings, int(seed or 0)) for name in names]
        found: list[Answer | None] = [None] * len(names)
        for found in at_intervals(together(streams)):
            yield [[answer.text.strip() if answer else "" for answer in found], []]
        scores = chat.rewards(self.scorer(), found)
        table = []
        for name, answer, score in zip(names, found, scores):
            measures = self.measured(name, answer, settings.temperature)
            end = "cut" if answer.cut else "ended"
            table.append([name, shown(score), shown(measures and measures.kl), len(answer.ids), end])
        yield [[answer.text.strip() for answer in found], table]

    # ------------------------------------------------------------------------------------------------- compare blind
    def next_pair(self, one: str, other: str, rater: str) -> dict[str, Any]:
        """Two answers that this rater has not judged, in an order only the file will tell.

        Raises: UsageError when there is nothing left, or nobody who judges.
        """
        rater = rater.strip()
        if not rater:
            raise UsageError("write your name first: votes are counted by rater")
        if one == other or not (one and other):
            raise UsageError("choose two different models")
        names = sorted((one, other))
        count = len(self.prompts(one, self.args.split))
        votes = [vote for vote in read_votes(self.votes_file) if vote.get("split") == self.args.split]
        index = next_index(count, votes, names, rater, self.args.overlap, self.args.seed)
        if index is None:
            raise UsageError("you have judged every pair of these two models; choose others")
        prompt = self.prompt(one, self.args.split, index)
        said, cut = [], []
        for place, name in enumerate(names):  # noise of their own, or models that differ little would say the same
            *_, answer = chat.answers(self.shelf.speaker(name), prompt, self.args, self.args.seed + 2 * index + place)
            said.append(answer.text.strip() if isinstance(prompt, list) else answer.text)
            cut.append(answer.cut)
        name = pair_id(prompt, names, said)
        order = random.Random(f"{self.args.seed} {name} {rater}").sample([0, 1], 2)
        return {
            "pair": name,
            "rater": rater,
            "split": self.args.split,
            "index": index,
            "prompt": prompt,
            "responses": [said[i] for i in order],
            "models": [names[i] for i in order],
            "cut": [cut[i] for i in order],
            "settings": {key: getattr(self.args, key) for key in (*SLIDERS, "seed")},
        }

    def vote(self, pair: dict[str, Any] | None, verdict: str, comment: str) -> bool:
        """Write a vote down; False when this rater had voted on this pair. Raises: UsageError without a pair."""
        if not pair:
            raise UsageError("there is no pair to judge; ask for the next one")
        when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        return append_vote(self.votes_file, {**pair, "verdict": verdict, "comment": comment.strip(), "time": when})

    def counted(self) -> tuple[list[list[Any]], str]:
        """The table of the votes so far, and a line on how far raters agree."""
        votes = read_votes(self.votes_file)
        table = []
        for row in tally(votes):
            interval = "{:.2f} [{:.2f}, {:.2f}]".format(row["win_rate"], *row["win_rate_interval"])
            counts = [row[name] for name in ("pairs", "votes", "wins", "ties", "losses")]
            table.append([row["model"], row["against"], *counts, interval, shown(row["prefers_shown_first"])])
        both = agreement(votes)
        skips = sum(vote["verdict"] == "skip" for vote in votes)
        line = f"Votes in `{self.votes_file}`: {len(votes)}, of them skips: {skips}."
        if both["pairs"]:
            line += f" Two or more judged {both['pairs']} pairs; two of them said the same in {both['equal']:.0%}"
            line += f", Krippendorff's alpha {shown(both['alpha'])}."
        return table, line

    # ---------------------------------------------------------------------------------------------------------- runs
    def runs(self) -> dict[str, str]:
        """Experiment dirs by label, that of the reward model too."""
        reward_model = self.reward_model()
        folders = [*self.args.experiment_dir, *([reward_model] if reward_model else [])]
        return {label: folder for label, folder in labels(folders).items() if (Path(folder) / "args.json").is_file()}

    def metrics(self, chosen: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
        """Rows of metrics of the chosen runs; a run without any is left out."""
        runs = self.runs()
        folders = {label: runs[label] for label in chosen if (Path(runs[label]) / "metrics.jsonl").is_file()}
        return {label: read_metrics(folder) for label, folder in folders.items()}

    def samples(self, label: str | None) -> list[list[Any]]:
        """Step, prompt, response and score of the texts kept through training, oldest first; none of no run."""
        folder = self.runs().get(label)
        rows = folder and read_growing(Path(folder) / "samples.jsonl") or []
        return [[row.get("step"), row.get("prompt"), row.get("response"), shown(row.get("score"))] for row in rows]

    def card(self, label: str | None) -> str:
        """The model card, without what only the hub reads; empty of no run."""
        folder = self.runs().get(label)
        if folder is None or not (Path(folder) / "README.md").is_file():
            return ""
        text = (Path(folder) / "README.md").read_text(encoding="utf-8")
        return text.split("---\n", 2)[-1] if text.startswith("---\n") else text


def at_intervals(values: Iterator[Any]) -> Iterator[Any]:
    """The first value, some in between, and the last: a page cannot show a thousand updates a second."""
    last, waiting = 0.0, []
    for value in values:
        waiting = [value]
        if time.monotonic() - last >= SHOW_EVERY:
            yield waiting.pop()
            last = time.monotonic()
    yield from waiting


def together(streams: Sequence[Iterator[Answer]]) -> Iterator[list[Answer | None]]:
    """All answers so far, each time one of them has grown by a token; they take turns."""
    found: list[Answer | None] = [None] * len(streams)
    going = dict(enumerate(streams))
    while going:
        for place, stream in list(going.items()):
            answer = next(stream, None)
            if answer is None:
                del going[place]
            else:
                found[place] = answer
        yield list(found)


def next_index(
    count: int, votes: Sequence[Turn], models: Sequence[str], rater: str, overlap: float, seed: int
) -> int | None:
    """The next prompt for a rater: of a fixed random order the first that they have not judged, and that is either one
    for everybody or judged by nobody."""
    own = {vote.get("index") for vote in votes if sorted(vote["models"]) == models and vote["rater"] == rater}
    others = {vote.get("index") for vote in votes if sorted(vote["models"]) == models}
    for place, index in enumerate(random.Random(seed).sample(range(count), count)):
        for_all = int((place + 1) * overlap + 1e-9) > int(place * overlap + 1e-9)
        if index not in own and (for_all or index not in others):
            return index
    return None


def told_of(answer: Answer, reward: float | None, measures: chat.Measures | None) -> str:
    """One line about an answer."""
    parts = [f"reward {reward:.2f}"] if reward is not None else []
    parts += [f"KL {measures.kl:.2f}"] if measures else []
    return " · ".join([*parts, f"{len(answer.ids)} tokens" + (", cut" if answer.cut else "")])


def shown(value: float | None) -> str:
    """A number for a table."""
    return "–" if value is None else f"{value:.2f}"


def prompt_of(turns: list[Turn], form: str, text: str, subreddit: str, title: str, post: str) -> str | Messages:
    """What a model reads: the dialogue so far with this message, a post to be summarised, or the text as it is.

    Raises: UsageError when there is nothing to read.
    """
    if form == "summary":
        if not post.strip():
            raise UsageError("the post is empty; write something")
        return summary_prompt(subreddit.strip().removeprefix("r/"), title.strip(), post.strip())
    if not text.strip():
        raise UsageError("the message is empty; write something")
    if form == "as written":
        return text
    before = [{"role": turn["role"], "content": turn["content"]} for turn in turns]
    return [*before, {"role": "user", "content": text}]


def filled(prompt: str | Messages) -> tuple[list[Turn], str, str, str, str, str]:
    """The inputs that spell a prompt: earlier turns, form, text, subreddit, title and post."""
    if isinstance(prompt, list):
        earlier = [
            asked(m["content"], prompt[: i + 1]) if m["role"] == "user" else dict(m) for i, m in enumerate(prompt)
        ]
        return earlier[:-1], "dialogue", prompt[-1]["content"], "", "", ""
    if fields := summary_fields(prompt):
        return [], "summary", "", *fields
    return [], "as written", prompt, "", "", ""


def asked(content: str, prompt: str | Messages) -> Turn:
    """A turn of the person."""
    return {"role": "user", "content": content, "prompt": prompt, "tries": 0}


def bubbles(turns: list[Turn]) -> list[dict[str, str]]:
    """What the chat window shows."""
    return [
        {"role": turn["role"], "content": turn["content"] + (f"\n\n[{turn['told']}]" if "told" in turn else "")}
        for turn in turns
    ]
