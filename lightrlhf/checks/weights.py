"""Passes of a model over rows of a step, one row at a time, so that no padding can disturb them.

In float64 where the model fits into memory, else in float32. Faults make other passes: another prompt,
a cache of other weights, padding that is read, adapters of another scale, rounding of bfloat16.

Left out: models beyond the memory in float32, quantised ones, images, and the rounding of 8 bits.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightrlhf.checks.step import Missing, Step
from lightrlhf.cli.groups import FrozenArgs
from lightrlhf.data.types import PreTrainedModel
from lightrlhf.models.forward import cache_inputs, inference, position_inputs
from lightrlhf.models.loading import load_model
from lightrlhf.models.lora import ADAPTER_CONFIG, lora_layers
from lightrlhf.models.names import base_name, resolve

MOST_ROWS = 8
MOST_NUMBERS = 2**25  # logits that are kept: 256 MB in float64
MEMORY = Path("/proc/meminfo")


class Text(NamedTuple):
    """A row without its padding."""

    number: int  # of the row in the step
    ids: list[int]
    places: list[int]  # of the trained tokens in ids, from 1 on
    columns: list[int]  # of the same in the step
    prompt: int  # tokens before the first trained one
    padding: int  # columns before the first token


class Weights(NamedTuple):
    """A loaded model; its tokenizer's ids are the step's."""

    name: str
    model: PreTrainedModel
    folder: Path | None  # None for a hub name

    @property
    def dtype(self) -> torch.dtype:
        """Of the passes that are taken as exact."""
        return self.model.dtype


def load(name: str, flag: str) -> Weights:
    """A language model in the widest dtype that fits. Raises: Missing where none does, UsageError for a wrong name."""
    from transformers import AutoModelForCausalLM

    source = resolve(name, flag)
    base = Path(base_name(source, flag) or "")
    files = [file for folder in {base, Path(source)} if folder.is_dir() for file in folder.glob("*.safetensors")]
    size, free = 2 * sum(file.stat().st_size for file in files), _free_memory()  # half precision becomes float32
    if size > free:
        raise Missing(f"{size / 1e9:.1f} GB of memory for {name} in float32")
    model = load_model(AutoModelForCausalLM, source, flag, FrozenArgs(disable_dropout=False), None)[0]
    _restore_dropout(model, Path(source))
    model.eval().requires_grad_(False)
    parameters = 12 * sum(one.numel() for one in model.parameters())  # bytes, beside those in float32
    return Weights(name, model.double() if parameters < free else model, Path(source) if files else None)


def _free_memory() -> float:
    """Bytes that may be taken; infinite where the system does not say."""
    if not MEMORY.is_file():
        return float("inf")
    (line,) = (one for one in MEMORY.read_text().splitlines() if one.startswith("MemAvailable"))
    return 0.8 * 1024 * int(line.split()[1])


def _restore_dropout(model: PreTrainedModel, folder: Path) -> None:
    """The dropout of an adapter as it was trained, which loading sets to 0."""
    file = folder / ADAPTER_CONFIG
    rate = json.loads(file.read_text(encoding="utf-8")).get("lora_dropout") if file.is_file() else 0
    for layer in lora_layers(model).values() if rate else ():
        for name in layer.lora_dropout:
            layer.lora_dropout[name] = torch.nn.Dropout(rate)


def texts_of(step: Step, vocabulary: int) -> list[Text]:
    """The rows of a step that have a trained token. Raises: Missing."""
    step.need("input_ids", "loss_mask")
    step.need_tokens()
    attended, mask, ids = step.attended(), step.mask().clone(), step.whole("input_ids")
    mask[:, 0] = False  # nothing predicts it
    texts = []
    for row in (mask & attended).any(1).nonzero()[:, 0].tolist():
        columns = attended[row].nonzero()[:, 0]
        text, trained = ids[row, columns].tolist(), mask[row, columns]
        trained[0] = False
        places = trained.nonzero()[:, 0].tolist()
        if places and min(text) >= 0 and max(text) < vocabulary:
            texts.append(Text(row, text, places, columns[places].tolist(), min(places), int(columns[0])))
    if not texts:
        raise Missing("rows of ids of this model's vocabulary with a trained token")
    return texts


def sample(step: Step, vocabulary: int) -> list[Text]:
    """Rows spread over a step, and as many of their tokens as logits may be kept. Raises: Missing."""
    texts = texts_of(step, vocabulary)
    count = min(len(texts), MOST_ROWS)
    chosen = [texts[i * len(texts) // count] for i in range(count)]
    most = max(MOST_NUMBERS // vocabulary // count, 1)
    return [one._replace(places=one.places[:most], columns=one.columns[:most]) for one in chosen]


def recorded(step: Step, name: str, texts: Sequence[Text]) -> Tensor:
    """An array at the tokens of texts, (N,)."""
    values = step.of_tokens(name)
    return torch.cat([values[one.number, one.columns] for one in texts])


def targets(texts: Sequence[Text]) -> Tensor:
    """The ids of the tokens, (N,)."""
    return torch.tensor([one.ids[place] for one in texts for place in one.places])


def logits_of(model: PreTrainedModel, ids: Sequence[int], places: Sequence[int], **inputs: Any) -> Tensor:
    """The logits that predict the tokens at places of a text: (n, V)."""
    given = torch.tensor([list(ids)], device=model.device)
    found = model(input_ids=given, **({"use_cache": False} | inputs)).logits[0]  # (T, V)
    return found[[place - 1 for place in places]]


Pass = Callable[[PreTrainedModel, Text], Tensor | None]  # logits (n, V) of a text; None where it has none


def run(model: PreTrainedModel, texts: Sequence[Text], one_pass: Pass | None = None) -> Tensor | None:
    """The logits of all tokens, (N, V), in float64 or float32; None where a text has no such pass."""
    one_pass = one_pass or (lambda model, text: logits_of(model, text.ids, text.places))
    with torch.no_grad():
        found = [one_pass(model, text) for text in texts]
    wide = torch.float64 if model.dtype == torch.float64 else torch.float32
    kept = [one.to(wide) for one in found if one is not None]
    return torch.cat(kept) if len(kept) == len(found) else None


def of_prompt(change: Callable[[list[int]], list[int] | None]) -> Pass:
    """A pass after another prompt."""

    def one_pass(model: PreTrainedModel, text: Text) -> Tensor | None:
        prompt = change(text.ids[: text.prompt])
        beyond = model.config.get_text_config().vocab_size
        if not prompt or prompt == text.ids[: text.prompt] or max(prompt) >= beyond:
            return None
        moved = len(prompt) - text.prompt
        ids = prompt + text.ids[text.prompt :]
        return logits_of(model, ids, [place + moved for place in text.places])

    return one_pass


def of_padding(is_read: bool, pad_id: int) -> Pass:
    """A pass of a row padded on the left, whose positions count the padding, and which may attend to it."""

    def one_pass(model: PreTrainedModel, text: Text) -> Tensor | None:
        places = [text.padding + place for place in text.places]
        ids = [pad_id] * text.padding + text.ids
        mask = [int(is_read)] * text.padding + [1] * len(text.ids)
        positions = position_inputs(model, torch.arange(len(ids))[None])
        return logits_of(model, ids, places, attention_mask=torch.tensor([mask]), **positions)

    return one_pass


def of_old_cache(old: PreTrainedModel) -> Pass:
    """A pass whose prompt was read by other weights."""

    def one_pass(model: PreTrainedModel, text: Text) -> Tensor | None:
        if text.prompt < 2:
            return None
        from transformers import DynamicCache

        cache, prompt = DynamicCache(), text.prompt - 1
        with inference(old):
            old(input_ids=torch.tensor([text.ids[:prompt]]), **cache_inputs(old, cache))
        places = [place - prompt for place in text.places]
        return logits_of(model, text.ids[prompt:], places, **cache_inputs(model, cache))

    return one_pass


@contextmanager
def in_dtype(model: PreTrainedModel, dtype: torch.dtype) -> Iterator[PreTrainedModel]:
    """Context manager: a copy of the model with its weights and passes in a dtype."""
    changed: Any = copy.deepcopy(model)
    yield changed.to(dtype)


@contextmanager
def autocast(model: PreTrainedModel, dtype: torch.dtype) -> Iterator[PreTrainedModel]:
    """Context manager: the model in float32 with products of matrices in a dtype."""
    with in_dtype(model, torch.float32) as single, torch.autocast("cpu", dtype):
        yield single


@contextmanager
def adapters_scaled(model: PreTrainedModel, factor: float) -> Iterator[PreTrainedModel]:
    """Context manager: the model with its adapters times a factor, 0 for none."""
    layers = lora_layers(model).values()
    before = [dict(layer.scaling) for layer in layers]
    try:
        for layer, scaling in zip(layers, before):
            layer.scaling.update({name: value * factor for name, value in scaling.items()})
        yield model
    finally:
        for layer, scaling in zip(layers, before):
            layer.scaling.update(scaling)


@contextmanager
def adapters_merged(model: PreTrainedModel, dtype: torch.dtype | None, keeps_tied: bool) -> Iterator[PreTrainedModel]:
    """Context manager: a copy with its adapters merged, rounded to a dtype, or into the embedding that is tied, too."""
    merged = copy.deepcopy(model)
    for layer in lora_layers(merged).values():
        weight, names = layer.get_base_layer().weight, list(layer.lora_A)
        delta = sum(layer.get_delta_weight(name) for name in names)
        tied = weight is merged.get_input_embeddings().weight
        if tied and not keeps_tied:
            layer.get_base_layer().weight = weight = torch.nn.Parameter(weight.clone(), requires_grad=False)
        summed = weight + delta
        weight.data.copy_(summed if dtype is None else summed.to(dtype))
        layer.scaling.update(dict.fromkeys(names, 0.0))
    yield merged


@contextmanager
def with_dropout(model: PreTrainedModel, seed: int) -> Iterator[PreTrainedModel]:
    """Context manager: the model in training mode; its noise depends on the seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            yield model.train()
        finally:
            model.eval()


def drops(model: PreTrainedModel) -> bool:
    """Whether a pass in training mode differs from one in eval mode."""
    rates = [module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)]
    named = ("attention_dropout", "dropout", "hidden_dropout")
    return any(rates) or any(getattr(module, name, 0.0) for module in model.modules() for name in named)
