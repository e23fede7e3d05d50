"""Numbers of a trainer's model, taken from outside: hidden states, log-probabilities, and their weights in a loss.

The gradient of a loss by the last hidden state at a position, less its part along the gradient of the next token's
log-probability, is 0 where the loss is a function of log-probabilities alone; the part along it, by projection, is the
derivative of the loss by that log-probability: how much each token counts, whatever the code of the loss.

`alone` passes each row by itself, without padding and dropout: what any batch of the same weights has to give.

Left out: models whose logits are more than their output layer times the last hidden state, virtual tokens, images.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

CERTAIN = 1e-2  # a token with at most this much probability on others has a gradient that is mostly rounding
OTHER_TARGETS = {0: "own token", 2: "token after the next"}  # by the distance of what is predicted


class Pass(NamedTuple):
    """Inputs of a pass and its last hidden states."""

    input_ids: Tensor  # (B, T)
    attention_mask: Tensor | None  # (B, T)
    position_ids: Tensor | None  # (1 or B, T)
    hidden: Tensor  # (B, T, H), in the graph where the policy was passed with gradients
    logprobs: list[Tensor] | None  # of each row, (T,), of a pass without gradients


class Watch:
    """Passes through the decoders of models while `is_open`; close it by leaving `closed`."""

    def __init__(self) -> None:
        self.is_open, self.passes = False, list[Pass]()
        self.seen: set[int] = set()

    def add(self, model: nn.Module | None) -> None:
        """Watch a model, once."""
        decoder = None if model is None else decoder_of(model)
        if decoder is not None and id(decoder) not in self.seen:
            self.seen.add(id(decoder))
            decoder.register_forward_hook(partial(self._hook, head_of(model)), with_kwargs=True)

    def _hook(self, head: Any, _: nn.Module, given: tuple[Any, ...], options: dict[str, Any], output: Any) -> None:
        ids = options.get("input_ids", given[0] if given else None)
        hidden = output[0] if isinstance(output, tuple) else getattr(output, "last_hidden_state", None)
        if not self.is_open or ids is None or hidden is None:
            return
        mask, places = options.get("attention_mask"), options.get("position_ids")
        mask = mask if isinstance(mask, Tensor) and mask.ndim == 2 else None
        places = places if isinstance(places, Tensor) else None
        logprobs = None  # a reference may have other adapters in its output layer, but not later
        if not hidden.requires_grad and head is not None and hidden.shape[:2] == ids.shape:
            logprobs = [row_logprobs(head, *one) for one in zip(ids, hidden)]
        self.passes.append(Pass(ids, mask, places, hidden, logprobs))

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Passes in here are not watched."""
        before, self.is_open = self.is_open, False
        try:
            yield
        finally:
            self.is_open = before

    def policy(self) -> Pass | None:
        """The last pass with gradients."""
        return next((one for one in reversed(self.passes) if one.hidden.requires_grad), None)

    def reference(self) -> Pass | None:
        """The last pass without gradients."""
        return next((one for one in reversed(self.passes) if not one.hidden.requires_grad), None)


def unwrapped(model: Any) -> nn.Module:
    """The causal language model in an adapter or a wrapper of ranks."""
    while hasattr(model, "module"):
        model = model.module
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def decoder_of(model: Any) -> nn.Module | None:
    """The part of a causal language model below its output layer."""
    model = unwrapped(model)
    found = getattr(model, getattr(model, "base_model_prefix", ""), None)
    return found if isinstance(found, nn.Module) and found is not model else None


def head_of(model: Any) -> nn.Module | None:
    """The output layer of a model whose logits are that layer of the last hidden state alone, else None."""
    model = unwrapped(model)
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    scaled = [getattr(config, name, None) for name in ("final_logit_softcapping", "logit_scale", "logits_scaling")]
    return None if any(one not in (None, 1.0) for one in scaled) else model.get_output_embeddings()


def dropout_of(model: nn.Module | None) -> float:
    """The largest dropout that is on, or 0."""
    modules = [one for one in ([] if model is None else model.modules()) if one.training]
    rates = [one.p if isinstance(one, nn.Dropout) else getattr(one, "attention_dropout", 0.0) for one in modules]
    return max((float(rate) for rate in rates if isinstance(rate, float | int)), default=0.0)


# ------------------------------------------------------------------------------------------------ log-probabilities
def token_logprobs(head: Callable[[Tensor], Tensor], hidden: Tensor, targets: Tensor) -> Tensor:
    """Log-probability of each target, (N,), of hidden states (N, H), in float32."""
    return head(hidden).float().log_softmax(-1).gather(-1, targets[:, None])[:, 0]


def row_logprobs(head: nn.Module, ids: Tensor, hidden: Tensor) -> Tensor:
    """Log-probabilities of ids (T,), each where its token stands and 0 for the first, of hidden states (T, H)."""
    with torch.no_grad():
        found = token_logprobs(head, hidden[:-1].detach(), ids[1:])
    return torch.cat([found.new_zeros(1), found])


def row_slopes(head: nn.Module, ids: Tensor, hidden: Tensor, gradient: Tensor, ahead: int = 1) -> tuple[Tensor, Tensor]:
    """How much each token counts, and the rest of the gradient: (T,), (T,).

    ids: (T,). hidden, gradient: (T, H), of the loss. The slope of a token stands where it stands, NaN where it is
    certain, and 0 for those that nothing predicts. The rest is the part of the gradient that no weight explains, of 1.
    ahead: the distance of the token that is predicted.
    """
    states = hidden.detach().requires_grad_()
    count = len(ids) - ahead
    if count <= 0:
        return torch.zeros(len(ids)), torch.zeros(len(ids))
    with torch.enable_grad():
        found = token_logprobs(head, states[:count], ids[ahead:])
        (along,) = torch.autograd.grad(found.sum(), states)
    along, gradient = along[:count].double().cpu(), gradient[:count].double().cpu()
    size = along.square().sum(-1)
    slopes = (along * gradient).sum(-1) / size.clamp(min=1e-300)
    whole = gradient.norm(dim=-1)
    rest = torch.where(whole > 0, (gradient - slopes[:, None] * along).norm(dim=-1) / whole.clamp(min=1e-300), 0.0)
    certain = found.detach().cpu().exp() > 1 - CERTAIN
    slopes = torch.where(certain & (whole > 0), torch.nan, slopes)
    rest = torch.where(certain, 0.0, rest)
    front = torch.zeros(ahead, dtype=torch.float64)
    return torch.cat([front, slopes]), torch.cat([front, rest])


class Row(NamedTuple):
    """What is known of one row passed alone; all (T,)."""

    logprobs: Tensor
    entropy: Tensor  # of the distribution from which the token was drawn
    spread: Tensor  # variance of the log-probability of a draw from it


def alone(model: Any, rows: Sequence[Tensor], temperature: float = 1.0) -> list[Row]:
    """Log-probabilities of rows of ids, (T,) each, every row by itself, with dropout off."""
    modes = {one: one.training for one in model.modules()}
    model.eval()
    found = []
    try:
        with torch.no_grad():
            for ids in rows:
                output = model(input_ids=ids[None], attention_mask=torch.ones_like(ids)[None], use_cache=False)
                logprobs = (output.logits[0, -len(ids) :].float() / temperature).log_softmax(-1)[:-1]  # (T-1, V)
                entropy = -(logprobs.exp() * logprobs).sum(-1)
                spread = (logprobs.exp() * (logprobs + entropy[:, None]).square()).sum(-1)
                of_ids = logprobs.gather(-1, ids[1:, None])[:, 0]
                zero = of_ids.new_zeros(1)
                found.append(Row(*(torch.cat([zero, one]).cpu() for one in (of_ids, entropy, spread))))
    finally:
        for one, mode in modes.items():
            one.training = mode
    return found


def documents(one: Pass) -> list[tuple[int, Tensor]]:
    """(row, its columns) of each text of a pass: rows as they are, and the parts of packed rows."""
    count, width = one.input_ids.shape
    columns = torch.arange(width)
    if one.attention_mask is not None or one.position_ids is None:
        return [(row, columns) for row in range(count)]
    places = one.position_ids.expand(count, -1).cpu()
    found = []
    for row in range(count):
        starts = (places[row] == 0).nonzero()[:, 0].tolist() or [0]
        found += [(row, columns[a:b]) for a, b in zip(starts, [*starts[1:], width]) if b > a]
    return found
