"""A server whose responses are written beforehand: what clients see of them does not depend on a model."""

import contextlib
import threading
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

from lightrlhf.serve import listening
from lightrlhf.serving.answers import Answer, Choice
from lightrlhf.serving.app import App
from lightrlhf.serving.listening import serve
from lightrlhf.serving.requests import Served

KEY = "key-of-the-tests"


class Scripted:
    """An engine that gives the texts of a list, one a choice and over again, whatever it is asked."""

    def __init__(self, tokenizer: Any, texts: list[str]) -> None:
        self.tokenizer, self.texts, self.name, self.root, self.version = tokenizer, texts, "model", "", "default"
        self.adapters: dict[str, Any] = {}
        self.asked: list[Any] = []
        self.num_given = 0
        self.scheduler = SimpleNamespace(num_waiting=lambda: 0)

    def limits(self) -> Served:
        return Served(self.tokenizer, len(self.tokenizer), 100_000, 100_000, ["model"])

    def _choice(self) -> Choice:
        text = self.texts[self.num_given % len(self.texts)]
        self.num_given += 1
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return Choice(ids, [-0.5] * len(ids), "stop")

    async def complete(self, asked) -> Answer:
        self.asked.append(asked)
        return Answer([self._choice() for _ in asked.rows], None, self.version)

    async def stream(self, asked) -> AsyncIterator[tuple[int, Choice, Answer]]:
        self.asked.append(asked)
        about = Answer([], None, self.version)
        for index in range(len(asked.rows)):
            choice = self._choice()
            for length in range(1, len(choice.ids)):
                yield index, Choice(choice.ids[:length], choice.logprobs[:length], None), about
            yield index, choice, about


@contextlib.contextmanager
def scripted(tokenizer: Any, texts: list[str]) -> Iterator[tuple[str, Scripted]]:
    """Context manager: the address of a server in a thread of its own, and its engine."""
    engine = Scripted(tokenizer, texts)
    with listening("127.0.0.1", 0) as listener:
        listener.listen()
        port = listener.getsockname()[1]
        thread = threading.Thread(target=serve, args=(App(engine, KEY).asgi, listener, "ready"), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{port}/v1", engine
