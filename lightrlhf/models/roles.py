"""Models: a language model that scores its own tokens, and a model with a scalar head, each in a role.

A model is used in a role: policy, reference, critic, reward model. With LoRA several roles can share one backbone,
each with adapters and a head of its own (see `adapters.py`). How they are loaded and saved: `loading.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightrlhf.data.batch import Batch
from lightrlhf.maths.ops import head_logprobs, position_ids
from lightrlhf.models import lora
from lightrlhf.models.prefix_sharing import PackedPairs, pack_pairs


class TokenStats(NamedTuple):
    """What a language model says of the actions of a batch; each (B, T-1), 0 where there is no action."""

    logprobs: Tensor
    entropy: Tensor | None  # only when asked for
    mean_logprobs: Tensor | None  # over the vocabulary; only when asked for


class Role(nn.Module):
    """A Hugging Face model in one role: a model of its own, or with LoRA one of several roles on a shared backbone.

    adapters: those this role speaks with, by name; where it learns the last one does.
    base: hub id or folder of the weights below the adapters; None where they are stored nowhere.
    A role that shares registers only what it trains. Fabric then wraps, clips and saves that and nothing of the
    others. Outside the roles' own passes the backbone speaks as the policy.
    """

    shares_prefixes = False  # of pairs; see `share_prefixes`

    def __init__(
        self,
        model: nn.Module,
        adapters: tuple[str, ...] = (),
        base: str | None = None,
        shares: bool = False,
        learns: bool = True,
    ) -> None:
        super().__init__()
        self.adapters, self.base, self.shares = adapters, base, shares
        if shares:
            self.__dict__["model"] = model  # unregistered
            self.own = lora.own_parts(model, adapters[-1]) if learns else nn.ModuleDict()
        else:
            self.model = model

    def active(self) -> AbstractContextManager:
        """Inside, the model is in this role: its adapters active and, on a shared backbone, its mode set."""
        if not self.adapters and not self.shares:
            return nullcontext()
        return lora.active(self.model, self.adapters, self.training)

    def _inputs(
        self, input_ids: Tensor, attention_mask: Tensor, sequence_ids: Tensor | None = None, paired: bool = False
    ) -> tuple[dict[str, Any], PackedPairs | None]:
        """Arguments of a cacheless forward pass, and how pairs were laid together, if they were."""
        together = pack_pairs(input_ids, attention_mask) if paired and self.shares_prefixes else None
        if together:
            return paired_inputs(self.model, together), together
        return model_inputs(self.model, input_ids, attention_mask, sequence_ids), None

    def train(self, mode: bool = True) -> Role:
        if self.shares:
            self.model.train(mode)
        return super().train(mode)

    def _apply(self, fn: Callable, recurse: bool = True) -> Role:
        if self.shares:  # what moves a role to a device moves its backbone
            self.model._apply(fn)
        return super()._apply(fn, recurse)


class Policy(Role):
    """A causal language model. Its forward pass gives log-probabilities, and makes logits only where actions are."""

    def __init__(self, model: nn.Module, *args: Any, **options: Any) -> None:
        super().__init__(model, *args, **options)
        self.loaded: dict[str, tuple[str, Tensor | None]] = {}  # by source: adapters on the backbone, and their heads
        self.head_is_plain = _head_is_plain(model)

    def reference(self) -> Policy:
        """The policy as it was loaded: on a shared backbone the same weights without the new adapter, else a copy.

        A copy shares the parameters that do not learn, which nothing will change.
        """
        if self.shares:
            reference = Policy(self.model, self.adapters[:-1], self.base, shares=True, learns=False)
            reference.shares_prefixes = self.shares_prefixes
            return reference
        return copy.deepcopy(self, {id(p): p for p in self.parameters() if not p.requires_grad})

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        action_mask: Tensor,
        sequence_ids: Tensor | None = None,
        temperature: float = 1.0,
        with_entropy: bool = False,
        with_mean: bool = False,
        label_ids: Tensor | None = None,
        allowed: Tensor | None = None,
        paired: bool = False,
    ) -> TokenStats:
        """(B, T) ids and masks -> log-probabilities of the actions at `temperature`, entropies and means if asked.

        label_ids (L,), allowed (B, 1, L) bool: an action is one of these tokens, in each row of those allowed there.
        paired: as in `Batch`.
        """
        if not len(input_ids):
            ids, mask, actions = _stand_in(input_ids)
            stats = self.forward(ids, mask, actions, None, temperature, with_entropy, with_mean)
            return TokenStats(*(None if row is None else row[:0] for row in stats))
        targets = input_ids[:, 1:][action_mask]  # (N,)
        if label_ids is None:
            with self.active():
                states, head = self._states(input_ids, attention_mask, action_mask, sequence_ids, paired=paired)
                rows = head_logprobs(states, head, targets, temperature, with_entropy, with_mean)
        else:
            logits = self.choice_logits(input_ids, attention_mask, action_mask, label_ids, allowed)
            logprobs = (logits / temperature).log_softmax(-1)  # (N, L)
            chosen = (targets[:, None] == label_ids).long().argmax(-1, keepdim=True)  # (N, 1)
            entropy = -(logprobs.exp() * logprobs).sum(-1) if with_entropy else None
            rows = (logprobs.gather(-1, chosen)[:, 0], entropy, None)
        return TokenStats(*(None if row is None else _scatter(row, action_mask) for row in rows))

    def choice_logits(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        action_mask: Tensor,
        label_ids: Tensor | None = None,
        allowed: Tensor | None = None,
        cache: Any = None,
    ) -> Tensor:
        """Logits (N, L) of the labels at each of the N actions, very low where one is not allowed; of all tokens
        (N, V) without labels.

        A plain head is cut to the rows of the labels, so this costs nothing that grows with the vocabulary. With a
        `cache` of earlier tokens the attention mask covers them too, and the cache grows by `input_ids`.
        """
        with self.active():
            states, head = self._states(input_ids, attention_mask, action_mask, cache=cache)
            if label_ids is None:
                return head(states).float()
            if type(head) is nn.Linear:
                bias = None if head.bias is None else head.bias[label_ids]
                logits = nn.functional.linear(states, head.weight[label_ids], bias).float()  # (N, L)
            else:
                logits = head(states)[:, label_ids].float()
        here = allowed.expand(-1, action_mask.shape[1], -1)[action_mask]  # (N, L)
        return logits.masked_fill(~here, -1e9)  # not -inf, of which entropy and its gradient would be NaN

    def _states(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        action_mask: Tensor,
        sequence_ids: Tensor | None = None,
        cache: Any = None,
        paired: bool = False,
    ) -> tuple[Tensor, nn.Module]:
        """What predicts the N actions, (N, H), and the head that makes logits of it."""
        inputs, together = self._inputs(input_ids, attention_mask, sequence_ids, paired)
        if cache is not None:
            positions = position_ids(attention_mask)[:, -input_ids.shape[1] :]
            inputs |= {"use_cache": True, "past_key_values": cache, **position_inputs(self.model, positions)}
        if self.head_is_plain:
            states, head = self.model.base_model(**inputs).last_hidden_state, self.model.get_output_embeddings()
        else:  # the architecture changes its logits behind the head (soft caps, scales): these are (N, V)
            states, head = self.model(**inputs).logits, nn.Identity()
        if together is None:
            return states[:, :-1][action_mask], head
        pair = torch.arange(len(action_mask), device=states.device) % len(states)  # (2B,)
        pair, column = pair[:, None].expand_as(action_mask)[action_mask], together.column[:, :-1][action_mask]
        return states[pair, column], head


class ScalarModel(Role):
    """A transformer with a head of one number per token: a reward model or a critic."""

    def __init__(self, model: nn.Module, *args: Any, score: nn.Linear | None = None, **options: Any) -> None:
        super().__init__(model, *args, **options)
        if self.shares:
            self.score = score

    def forward(self, input_ids: Tensor, attention_mask: Tensor, paired: bool = False) -> Tensor:
        """(B, T) ids and mask -> (B, T) float32, the head at each token; paired: as in `Batch`."""
        if not len(input_ids):
            return self.forward(*_stand_in(input_ids)[:2])[:0]
        inputs, together = self._inputs(input_ids, attention_mask, paired=paired)
        with self.active():
            hidden = self.model.base_model(**inputs).last_hidden_state
        head = self.score if self.shares else self.model.score
        values = head(hidden)[..., 0].float()
        return values.repeat(2, 1).gather(1, together.column) if together else values


@contextmanager
def inference(module: nn.Module) -> Iterator[None]:
    """Context manager: eval mode without gradients; the module's mode is restored on leaving, also on errors."""
    was_training = module.training
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        module.train(was_training)


def last_token(values: Tensor, attention_mask: Tensor) -> Tensor:
    """Value at the last real token of each row: (B, T) -> (B,)."""
    last = (attention_mask.long() * torch.arange(values.shape[1], device=values.device)).argmax(1)
    return values.gather(1, last[:, None])[:, 0]


def policy_inputs(batch: Batch) -> dict[str, Any]:
    """The tensors of a batch that `Policy` takes."""
    return {
        "input_ids": batch.input_ids,
        "attention_mask": batch.attention_mask,
        "action_mask": batch.action_mask,
        "sequence_ids": batch.sequence_ids,
        "paired": batch.paired,
    }


def model_inputs(
    model: nn.Module, input_ids: Tensor, attention_mask: Tensor, sequence_ids: Tensor | None = None
) -> dict[str, Any]:
    """Arguments of a cacheless forward pass: positions always given, attention within each packed example only."""
    if sequence_ids is None:
        positions, mask = position_ids(attention_mask), attention_mask.long()
    else:
        positions, mask = _packed_positions(sequence_ids), _packed_attention(sequence_ids, model.dtype)
    return {"input_ids": input_ids, "attention_mask": mask, "use_cache": False, **position_inputs(model, positions)}


def paired_inputs(model: nn.Module, together: PackedPairs) -> dict[str, Any]:
    """The same for pairs that are laid in one row each."""
    mask = _additive(together.seen, model.dtype)
    positions = position_inputs(model, together.positions)
    return {"input_ids": together.input_ids, "attention_mask": mask, "use_cache": False, **positions}


def position_inputs(model: nn.Module, positions: Tensor) -> dict[str, Tensor]:
    """The argument that gives a model its positions; none for Bloom, the only architecture that takes no such."""
    return {} if model.config.model_type == "bloom" else {"position_ids": positions}


def vocabulary_size(module: Policy | ScalarModel) -> int:
    """Rows of the embedding table: ids at or above have no meaning to the model."""
    return module.model.get_input_embeddings().weight.shape[0]


def count_parameters(module: Role) -> tuple[int, int]:
    """All parameters, those of a shared backbone too, and the learning ones of this role."""
    everything = {id(p): p.numel() for part in (module.model, module) for p in part.parameters()}
    return sum(everything.values()), sum(p.numel() for p in module.parameters() if p.requires_grad)


def transformer_layers(module: nn.Module) -> nn.ModuleList:
    """The list of modules that holds most of a model's parameters."""
    lists = [part for part in module.modules() if isinstance(part, nn.ModuleList)]
    return max(lists, key=lambda part: sum(p.numel() for p in part.parameters()), default=nn.ModuleList())


# -------------------------------------------------------------------------------------------------------------- helpers
def _stand_in(nothing: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A row for a rank without any, which still has to take part when split weights are gathered; it learns nothing."""
    ids = nothing.new_zeros(1, 2)
    return ids, ids == 0, ids[:, 1:] == 0


def _scatter(row: Tensor, action_mask: Tensor) -> Tensor:
    """(N,) values of the actions back to (B, T-1), 0 elsewhere."""
    return torch.zeros(action_mask.shape, dtype=row.dtype, device=row.device).masked_scatter(action_mask, row)


def _head_is_plain(model: nn.Module) -> bool:
    """Whether the head applied to the last hidden state gives the model's logits, tried on a few tokens."""
    ids = torch.arange(4, device=model.device)[None]
    with inference(model):
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        plain: Callable[[Tensor], Tensor] = model.get_output_embeddings()
        return torch.allclose(plain(hidden), model(input_ids=ids, use_cache=False).logits, atol=1e-4, rtol=1e-3)


def _packed_positions(sequence_ids: Tensor) -> Tensor:
    """Positions that restart with each example: (B, T) -> (B, T)."""
    index = torch.arange(sequence_ids.shape[1], device=sequence_ids.device).expand_as(sequence_ids)
    starts = torch.ones_like(sequence_ids, dtype=torch.bool)
    starts[:, 1:] = sequence_ids[:, 1:] != sequence_ids[:, :-1]
    return index - torch.where(starts, index, torch.zeros_like(index)).cummax(1).values


def _packed_attention(sequence_ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Additive causal mask within each example: (B, T) -> (B, 1, T, T), 0 where seen."""
    width = sequence_ids.shape[1]
    causal = torch.ones(width, width, dtype=torch.bool, device=sequence_ids.device).tril()
    return _additive((sequence_ids[:, :, None] == sequence_ids[:, None, :]) & causal, dtype)


def _additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """(B, T, T) bool -> (B, 1, T, T), 0 where seen."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, torch.finfo(dtype).min)[:, None]
