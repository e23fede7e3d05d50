"""What the rows of `python -m tests.gpu` share: the device, models of published shapes, and a row's result."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

Figures = dict[str, Any]  # of a row, as JSON; `shown` is the text of its line


class LeftOut(Exception):
    """A row that this machine cannot run, with the reason."""


@dataclass(frozen=True)
class Setting:
    """Where rows run, and on models of which size."""

    device: str
    size: str  # full, or tiny: every line runs, and nothing is measured
    folder: Path  # of models, data and runs

    @property
    def is_tiny(self) -> bool:
        return self.size == "tiny"

    @property
    def is_cuda(self) -> bool:
        return self.device == "cuda"

    @property
    def half(self) -> str:
        """Float16 with a scaled loss, which exists on CUDA alone."""
        return "16-mixed" if self.is_cuda else "bf16-mixed"

    def where(self) -> list[str]:
        """The flags of a run on this device."""
        return ["--accelerator", self.device, "--devices", "1"]

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.is_cuda:
            torch.cuda.synchronize()


@dataclass(frozen=True)
class Row:
    """One line of the table: a correctness check, which passes or fails, or a measurement."""

    section: str
    run: Callable[[Setting], Figures]
    seconds: float = 15  # that it takes on a fast card, so that none is begun which cannot end


def needs(package: str) -> None:
    """Raises: LeftOut unless a package is installed."""
    if importlib.util.find_spec(package) is None:
        raise LeftOut(f"{package} is not installed")


def needs_memory(at: Setting, gigabytes: float) -> None:
    """Raises: LeftOut where the card has not so many GiB."""
    if at.is_cuda and (total := torch.cuda.get_device_properties(0).total_memory / 2**30) < gigabytes:
        raise LeftOut(f"needs {gigabytes:.0f} GiB, the card has {total:.0f}")


# Width, width of the MLP, layers, heads, heads of keys and values, tokens, tied head: Llamas with the shapes of
# Qwen2.5-0.5B, Llama-3.2-1B and Qwen2.5-7B.
SHAPES = {
    "tiny": (64, 128, 2, 4, 2, 512, True),
    "0.5B": (896, 4864, 24, 14, 2, 151936, True),
    "1B": (2048, 8192, 16, 32, 8, 128256, True),
    "7B": (3584, 18944, 28, 28, 4, 152064, False),
}


def config(at: Setting, size: str) -> Any:
    """The config of a model of this size; of a tiny one in the dry run."""
    from transformers import LlamaConfig

    width, inner, layers, heads, kv_heads, vocabulary, tied = SHAPES["tiny" if at.is_tiny else size]
    return LlamaConfig(
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocabulary,
        tie_word_embeddings=tied,
        max_position_embeddings=4096,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )


def model(at: Setting, size: str, dtype: torch.dtype = torch.float32) -> Any:
    """A causal language model with random weights, made on the device."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(at.device):
            return AutoModelForCausalLM.from_config(config(at, size), dtype=dtype)
    finally:
        torch.set_default_dtype(before)


@cache
def tokenizer(vocabulary: int) -> Any:
    """One word an id."""
    from benchmarks.inputs import make_tokenizer

    return make_tokenizer(vocabulary)


def free() -> None:
    """Give the memory of deleted models back to the device."""
    import gc

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
