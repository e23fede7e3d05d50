"""Episodes of tests: environments in this process, whose answers come in any order, and all episodes of four words."""

import math
import random
from collections.abc import Callable, Iterator
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lightrlhf.generation.conversations import Conversation
from lightrlhf.generation.engine import Completions
from lightrlhf.generation.episode_env import Answer, Fault
from lightrlhf.generation.episodes import Episode, Limits, play


class LocalPool:
    """A pool of `size` environments in this process. An exception becomes a `Fault`; no process can be lost."""

    def __init__(self, make: Callable[[], Any], size: int = 100, order: int = 0, gives_reward: bool = True) -> None:
        self.make, self.size, self.order = make, size, random.Random(order)
        first = make()
        self.tools, self.gives_reward, self.has_outcome = first.tools, gives_reward, getattr(first, "has_outcome", True)
        self.envs: dict[int, Any] = {}
        self.asked: list[tuple[int, str, tuple[Any, ...]]] = []
        self.log: list[tuple[int, str, tuple[Any, ...]]] = []

    def reset(self, episode: int, seed: int, row: dict[str, Any]) -> None:
        self._ask(episode, "reset", seed, row)

    def step(self, episode: int, reply: dict[str, Any]) -> None:
        self._ask(episode, "step", reply)

    def finish(self, episode: int, stop_reason: str) -> None:
        self._ask(episode, "finish", stop_reason)

    def drop(self, episode: int) -> None:
        del self.envs[episode]

    def _ask(self, episode: int, name: str, *values: Any) -> None:
        self.asked.append((episode, name, values))
        self.log.append(self.asked[-1])

    def results(self, linger: float = math.inf) -> Iterator[tuple[int, Any]]:
        """In any order; with a finite `linger` some, at least one."""
        while ready := [one for one in self.asked if one[0] in self.envs or len(self.envs) < self.size]:
            one = self.order.choice(ready) if len(self.envs) >= self.size or self.order.random() < 0.5 else ready[0]
            self.asked.remove(one)
            episode, name, values = one
            env = self.envs.setdefault(episode, None) or self.make()
            self.envs[episode] = env
            try:
                result = getattr(env, name)(*values)
            except ZeroDivisionError as problem:
                result = Fault("errors", str(problem))
            broke = isinstance(result, Answer) and result.done and result.stop_reason.startswith("env_")
            if name == "finish" or isinstance(result, Fault) or broke:
                del self.envs[episode]
            yield episode, result
            if linger < math.inf and self.order.random() < 0.3:
                return


class Told:
    """An environment without tools that takes `num_turns` turns; its outcome is the length of what was said."""

    tools: Any = None

    def __init__(self, num_turns: int = 2) -> None:
        self.num_turns, self.said = num_turns, []

    def reset(self, seed: int, row: dict[str, Any]) -> list[dict[str, Any]]:
        self.seed, self.said = seed, []
        return []

    def step(self, reply: dict[str, Any]) -> Answer:
        self.said.append(reply["content"])
        if len(self.said) == self.num_turns:
            return Answer(done=True)
        return Answer([{"role": "user", "content": f"And {len(self.said)}?"}])

    def finish(self, stop_reason: str) -> float:
        return float(sum(map(len, self.said)))


# -------------------------------------------------------------------------------------------------------- enumeration
WORDS = ["<e>", "<u>", "a", "b"]  # the whole vocabulary
TEMPLATE = """{%- for m in messages -%}{%- if m.role == 'user' -%}{{ '<u> ' + m.content + ' ' }}
{%- elif KEPT -%}{{ m.content + ' <e> ' }}{%- endif -%}{%- endfor -%}"""


def tiny_words(keeps: bool) -> PreTrainedTokenizerFast:
    """A tokenizer of four words, whose template writes earlier replies, or leaves them out."""
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="b"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<e>", pad_token="<e>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<u>"]})
    tokenizer.chat_template = TEMPLATE.replace("KEPT", "true" if keeps else "false")
    return tokenizer


class GoOrStop(Told):
    """Saying b stops, all else goes on, up to three turns; each turn has a reward, and so has the outcome."""

    def step(self, reply):
        self.said.append(reply["content"].strip())
        done = self.said[-1] == "b" or len(self.said) == 3
        reward = {"a": 0.5, "b": -0.25}.get(self.said[-1], 0.125) * len(self.said)
        return Answer([] if done else [{"role": "user", "content": "ab"[len(self.said) - 1]}], reward, done)

    def finish(self, stop_reason):
        return 1.0 * (self.said == ["a", "", "a"]) + 0.5 * (self.said[:2] == ["a", "b"])


def all_episodes(tokenizer, num_turns: int = 5, length: int = 1) -> list[Episode]:
    """An episode for each course that one can take, in up to `num_turns` turns of up to `length` tokens."""
    courses = [(0,)]
    found = []
    while courses:
        course = courses.pop(0)

        def sample(episodes, plans, course=course):
            """The next turn of the one episode, by the course, and then by first words."""
            rest = [*course[episodes[0].num_tokens :], *[0] * length][:length]
            ids = rest[: rest.index(0) + 1] if 0 in rest else rest
            return Completions([ids], [[0.0] * len(ids)], [ids[-1] != 0], 0.0)

        one = Episode([{"role": "user", "content": "a"}], 0, 0, {"row": 0}, Conversation(tokenizer))
        play([one], LocalPool(GoOrStop), sample, tokenizer, Limits(num_turns, 99, 99, length, 99))
        found.append(one)
        turns = one.conversation.turns
        taken = [i for turn in turns for i in one.conversation.rows[turn.row].ids[turn.start : turn.end]]
        while taken and taken[-1] == len(WORDS) - 1:
            taken.pop()
        if taken:
            courses.append((*taken[:-1], taken[-1] + 1))
    return found
