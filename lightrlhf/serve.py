"""Serve a checkpoint over HTTP: to a trainer that samples there, or to any program that speaks OpenAI's routes.

`python -m lightrlhf.serve DIR` starts vLLM where it is installed, with the flags that training needs, else the
library's own engine behind the same routes. It listens on the loopback and asks for a key: OPENAI_API_KEY, else a
new one, which is printed. Prompts may be token ids, ids and log-probabilities at the temperature come back, and the
weights can be replaced while it runs.

Left out: several models at a time, encryption, and several devices with our own engine.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import signal
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from lightrlhf.cli.addresses import KEY
from lightrlhf.cli.errors import RunFailure, UsageError, one_line_errors
from lightrlhf.cli.fields import Args, at_least, between, check_args, flag, positive
from lightrlhf.cli.groups import FrozenArgs
from lightrlhf.cli.packages import check_package
from lightrlhf.cli.parser import parse
from lightrlhf.cpu import limit_caches
from lightrlhf.data.templates import use_template
from lightrlhf.generation.vllm_command import Launch, choose_engine, start
from lightrlhf.models.loading import find_device, load_policy
from lightrlhf.models.lora import ADAPTER_CONFIG
from lightrlhf.models.names import base_name, holds_reward_model, resolve
from lightrlhf.models.tokenizer import load_tokenizer
from lightrlhf.serving.engine import Engine

LOOPBACK = ("127.0.0.1", "localhost", "::1")
READY = "serving"  # first word of the line that is printed once requests are answered


def check_host(host: str, flag: str) -> None:
    """Raises: ValueError for an address that others reach, unless there is a key."""
    if host not in LOOPBACK and not os.environ.get(KEY, "").strip():
        raise ValueError(f"{flag} {host} is reachable by others; set a key in {KEY}, or use 127.0.0.1")


def check_text(text: str, flag: str) -> None:
    """Raises: ValueError for an empty text."""
    if not text:
        raise ValueError(f"{flag} is empty; give a name")


def check_words(text: str, flag: str) -> None:
    """Raises: ValueError for a text with an open quote, which a shell cannot split into words."""
    try:
        shlex.split(text)
    except ValueError as problem:
        raise ValueError(f"{flag} {text} cannot be split into words: {problem}") from None


@dataclass(frozen=True, kw_only=True)
class ServeArgs(Args):
    """Serve a checkpoint to trainers and chat programs."""

    model_name: str = flag(show="first", positional=True)
    """Experiment dir, checkpoint, folder or hub name of the model; may be given without its flag."""
    engine: Literal["auto", "vllm", "lightrlhf"] = "auto"
    """Engine that samples; auto: vLLM if installed, else the library's own engine."""
    python: str | None = flag(None, excludes={"engine": "lightrlhf"})
    """Python interpreter of another environment that has vLLM."""
    host: str = flag("127.0.0.1", check=check_host)
    """Address to listen on; a non-loopback address requires a key in OPENAI_API_KEY and our own engine."""
    port: int = between(0, 65535, 8000)
    """Port to listen on; 0: a free port, with our own engine."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Dtype of the computation: float32 for a run with `precision` 32-true, else the type of its `precision`."""
    served_model_name: str | None = flag(None, check=check_text, show="rarely")
    """Model name in requests. Default: `model_name` as given."""
    rollout_mini_batch_size: int = at_least(1, 64)
    """Slots of our own engine: rows decoded at a time."""
    kv_cache_gb: float = positive(1.0)
    """Memory of our own engine for keys and values of running requests and of prefixes that they share, in GiB."""
    chat_template: str | None = flag(None, check=check_text, show="rarely")
    """File of another chat template for our own engine; tools: the model's own, with tools for one that has none."""
    accelerator: str = flag("auto", check=find_device)
    """cpu, cuda, mps, or auto (a GPU if there is one), of our own engine."""
    enable_lora: bool = False
    """Let vLLM load adapters at run time, as training with adapters needs; our own engine always does."""
    max_lora_rank: int = at_least(1, 64, show="rarely")
    """Maximum rank of the adapters."""
    engine_flags: str = flag("", check=check_words, excludes={"engine": "lightrlhf"})
    """Extra flags for vLLM, such as --engine_flags="--max-model-len 4096"."""
    trust_remote_code: bool = flag(False, show="rarely")
    """Allow a model to run code from its repository."""
    print_command: bool = False
    """Only print the vLLM command."""


def run(args: ServeArgs) -> None:
    """Serve until the process is ended."""
    check_args(args, ServeArgs)
    engine = choose_engine(args.engine, args.python)
    source = resolve(args.model_name)
    if holds_reward_model(source):
        raise UsageError(f"{args.model_name} holds a reward model, which generates no text; give a language model")
    if engine == "lightrlhf":
        run_own(args, source)
        return
    if args.host not in LOOPBACK:
        raise UsageError(f"--host {args.host}: {engine} changes weights without asking for a key; use 127.0.0.1")
    if args.chat_template is not None:
        raise UsageError(
            f"--chat_template needs our own engine; for {engine} give --engine_flags='--chat-template FILE'"
        )
    if args.port == 0:
        raise UsageError(f"--port 0: {engine} needs a fixed port; give one such as 8000")
    launch = Launch(
        python=args.python or sys.executable,
        model=str(Path(source).resolve()) if Path(source).is_dir() else source,
        served_name=args.served_model_name or args.model_name,
        host=args.host,
        port=args.port,
        dtype=args.dtype,
        enable_lora=args.enable_lora,
        max_lora_rank=args.max_lora_rank,
        trust_remote_code=args.trust_remote_code,
        more=args.engine_flags,
    )
    if args.print_command:
        print(launch.as_line(), flush=True)
    else:
        start(launch, find_key())


def run_own(args: ServeArgs, source: str) -> None:
    """Serve by the library's own engine. Raises: UsageError when the port is taken or a package is missing."""
    if args.engine_flags:
        raise UsageError(f"--engine_flags {args.engine_flags} needs vLLM, which is not installed here")
    if args.print_command:
        raise UsageError("--print_command True: vLLM is not used, so there is no command")
    for package in ("starlette", "uvicorn", "pydantic"):
        check_package("lightrlhf.serve with our own engine", package, UsageError)
    end_at_once()
    with listening(args.host, args.port) as listener:
        from lightrlhf.serving.app import App
        from lightrlhf.serving.listening import serve

        address = f"[{args.host}]" if ":" in args.host else args.host
        engine = load_engine(args, source)
        key = find_key()
        ready = f"{READY} {engine.name} at http://{address}:{listener.getsockname()[1]}"
        serve(App(engine, key).asgi, listener, ready)


def load_engine(args: ServeArgs, source: str) -> Engine:
    """The model on its device."""
    limit_caches()  # prompts have all lengths
    tokenizer = load_tokenizer(None, source)
    use_template(tokenizer, args.chat_template)
    policy = load_policy(source, FrozenArgs(trust_remote_code=args.trust_remote_code), tokenizer)
    is_adapter = (Path(source) / ADAPTER_CONFIG).is_file()
    return Engine(
        policy.to(find_device(args.accelerator)),
        tokenizer,
        name=args.served_model_name or args.model_name,
        root=source,
        num_slots=args.rollout_mini_batch_size,
        dtype=getattr(torch, args.dtype),
        cache_bytes=int(args.kv_cache_gb * 2**30),
        merged_into=base_name(source, "--model_name") if is_adapter else None,
    )


def find_key() -> str:
    """OPENAI_API_KEY, else a new key, which is printed. Raises: UsageError for one that is not valid in a header."""
    key = os.environ.get(KEY, "").strip()
    if key and not (key.isascii() and key.isprintable()):
        raise UsageError(f"{KEY} has characters that are not allowed in an HTTP header; set it again")
    if not key:
        key = secrets.token_urlsafe(32)
        print(f"key: export {KEY}={key}", flush=True)
    return key


@contextlib.contextmanager
def listening(host: str, port: int) -> Iterator[socket.socket]:
    """Context manager: a bound socket; it listens once requests are answered. Raises: RunFailure when it is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as problem:
            raise RunFailure(f"--host {host} --port {port}: {problem.strerror}; use another, or --port 0") from None
        yield listener


def end_at_once() -> None:
    """Make SIGTERM and SIGINT end the process at once, with status 0 and 130: there is nothing to store."""

    def end(number: int, frame: Any) -> None:
        os._exit(130 if number == signal.SIGINT else 0)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)


@one_line_errors
def main(argv: list[str] | None = None) -> None:
    """Run the program."""
    run(parse(ServeArgs, argv))


if __name__ == "__main__":
    main()
