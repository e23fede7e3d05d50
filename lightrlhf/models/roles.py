"""Roles of a model: a language model that returns log-probabilities, or a model with a scalar head.

A model has a role: policy, reference, critic or reward model. With LoRA several roles can share one backbone, each with
its own adapters and head (see `lora.py`). Loading and saving: `loading.py`, `saving.py`.

Left out: encoder-decoder models, value heads of more than one layer.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightrlhf.data.batch import Batch, to_device
from lightrlhf.data.types import PreTrainedModel
from lightrlhf.maths.head import LogitFunction, head_logprobs, head_sum, logit_rows
from lightrlhf.maths.ops import position_ids
from lightrlhf.models import lora, varlen
from lightrlhf.models.architecture import (
    check_language_model,
    check_scalar_model,
    has_plain_head,
    scalar_head,
    trial_ids,
)
from lightrlhf.models.forward import (
    cache_inputs,
    causal_inputs,
    embedding_rows,
    exceeds_window,
    inference,
    is_right_padded,
    model_inputs,
    packed_inputs,
    packed_texts,
    position_inputs,
    without_mask,
)
from lightrlhf.models.frozen import HeldLinear
from lightrlhf.models.packing import PackedTexts
from lightrlhf.models.varlen import TextRow


class TokenStats(NamedTuple):
    """Statistics of a batch's actions under a language model; each (B, T-1), 0 where there is no action."""

    logprobs: Tensor
    entropy: Tensor | None  # None if not requested
    mean_logprobs: Tensor | None  # mean over the vocabulary; None if not requested

    def map(self, function: Callable[[Tensor], Tensor]) -> TokenStats:
        """Apply `function` to each tensor."""
        return TokenStats(function(self.logprobs), *(None if row is None else function(row) for row in self[1:]))


class Role(nn.Module):
    """A Hugging Face model in one role: a separate model, or with LoRA one of several roles on a shared backbone.

    adapters: names of the adapters that are active in this role; a trainable one comes last, see `lora.belonging`.
    base: hub id or folder of the weights below the adapters; None if they are not stored.
    shares: the backbone is shared. Such a role registers only its own parameters, so Fabric wraps, clips and saves
    those and no others. Outside a role's forward pass the policy's adapters are active.
    """

    model: PreTrainedModel
    packs = False  # the texts of a pass into fewer rows; see `probes.enable_packing`
    is_causal: bool | None = None  # `without_mask`; None until a trial pass
    attends_by_text: bool | None = None  # `varlen`; likewise
    borrows = False  # frozen weights of another role, though the backbone is not shared

    def __init__(
        self,
        model: PreTrainedModel,
        adapters: tuple[str, ...] = (),
        base: str | None = None,
        shares: bool = False,
        trainable: bool = True,
    ) -> None:
        super().__init__()
        self.adapters, self.base, self.shares = adapters, base, shares
        if shares:
            self.__dict__["model"] = model  # not registered as a submodule
            self.own = lora.adapter_modules(model, *lora.belonging(adapters)) if trainable else nn.ModuleDict()
        else:
            self.model = model

    def active(self) -> AbstractContextManager:
        """Context manager: activates this role's adapters and, on a shared backbone, its train/eval mode."""
        if not self.adapters and not self.shares:
            return nullcontext()
        return lora.active(self.model, self.adapters, self.training)

    def _inputs(
        self, input_ids: Tensor, attention_mask: Tensor, group: Tensor | None = None
    ) -> tuple[dict[str, Any], PackedTexts | TextRow | None]:
        """Arguments of a forward pass without a KV cache, and on the host the packed texts if they are packed."""
        by_text = self.packs and self._takes_texts()
        packed = packed_texts(self.model, input_ids, attention_mask, group, by_text) if self.packs else None
        if packed is None and self._needs_no_mask(attention_mask):
            return causal_inputs(self.model, input_ids, attention_mask), None
        if packed is None:
            return model_inputs(self.model, input_ids, attention_mask), None
        return packed_inputs(self.model, packed), packed

    def _takes_texts(self) -> bool:
        """Whether the model attends to texts that follow one another in a row, in the precision of this pass."""
        model = self.model
        if model.device.type not in varlen.DEVICES or varlen.half_precision(model.device) is None:
            return False
        if self.attends_by_text is None:
            is_plain, ids = model.config._attn_implementation == "sdpa", trial_ids(model, 2).cpu()
            trial = packed_inputs(model, varlen.text_row(ids, torch.ones_like(ids)))
            self.attends_by_text = is_plain and varlen.attends_by_text(model, trial)
        return self.attends_by_text

    def _needs_no_mask(self, attention_mask: Tensor) -> bool:
        """Whether these rows are computed `without_mask`: not on a CPU, whose results do not depend on a trial pass."""
        model, width = self.model, attention_mask.shape[1]
        if model.device.type == "cpu" or model.config._attn_implementation != "sdpa":
            return False
        if exceeds_window(model, width) or not is_right_padded(attention_mask):
            return False
        if self.is_causal is None:
            ids = trial_ids(model, 2)
            with inference(model), without_mask(model) as calls:
                model.base_model(**causal_inputs(model, ids, torch.ones_like(ids)))
            self.is_causal = len(calls) == model.config.get_text_config().num_hidden_layers
        return self.is_causal

    def _base(self, inputs: dict[str, Any], whole: bool = False) -> Any:
        """Output of the transformer for arguments of `_inputs`; of the whole model with its head."""
        run = self.model if whole else self.model.base_model
        with without_mask(self.model) if inputs["attention_mask"] is None else nullcontext():
            return run(**inputs)

    def train(self, mode: bool = True) -> Role:
        if self.shares:
            self.model.train(mode)
        return super().train(mode)

    def _apply(self, fn: Callable, recurse: bool = True) -> Role:
        if self.shares:  # moving a role to a device moves its backbone
            self.model._apply(fn)
        return super()._apply(fn, recurse)


class Policy(Role):
    """A causal language model. Its forward pass returns log-probabilities and computes logits at actions only."""

    def __init__(self, model: PreTrainedModel, *args: Any, head_is_plain: bool | None = None, **options: Any) -> None:
        """head_is_plain: logits are the head of the last hidden state; None: found by trial passes.

        Raises: UsageError if the passes show that the model is not a causal language model, or none that works here.
        """
        super().__init__(model, *args, **options)
        self.loaded: lora.LoadedAdapters = {}  # frozen adapters on the backbone
        self.sampled = False  # set by the generation engine, once it has shown that it supports the architecture
        if head_is_plain is None:
            check_language_model(model)
            head_is_plain = has_plain_head(model)
        self.head_is_plain = head_is_plain

    def reference(self) -> Policy:
        """A frozen reference: on a shared backbone a role without the new adapter, else a copy of the policy.

        The copy shares the frozen parameters. It lacks an adapter that begins as a part of the weights, whose
        decomposition another machine might round differently when the run is resumed.
        """
        own = lora.belonging(self.adapters) if self.adapters else ()
        if self.shares:
            known = {"shares": True, "trainable": False, "head_is_plain": self.head_is_plain}
            reference = Policy(self.model, self.adapters[: -len(own)], self.base, **known)
            reference.packs = self.packs
            return reference
        kept = {id(p): p for p in self.parameters() if not p.requires_grad}
        borrows = bool(kept)
        reference = copy.deepcopy(self, kept)  # which adds to it
        reference.borrows = borrows
        if len(own) > 1:
            reference.adapters = self.adapters[: -len(own)]
            for name in own:
                lora.remove_adapter(reference.model, name)
        return reference

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        action_mask: Tensor,
        temperature: float = 1.0,
        with_entropy: bool = False,
        with_mean: bool = False,
        label_ids: Tensor | None = None,
        allowed: Tensor | None = None,
        group: Tensor | None = None,
        function: LogitFunction | None = None,
        with_stats: bool = True,
    ) -> Any:
        """(B, T) ids and masks -> `TokenStats` of the actions at `temperature`; entropies and means on request.

        label_ids (L,), allowed (B, 1, L) bool: restrict the actions to these tokens, in each row to the allowed ones.
        group: as in `Batch`. function: of the logits of the N actions, whose sum, (), and values, (N, k), are returned
        behind the statistics, or `with_stats=False` alone; see `maths.head.head_sum`. Ids and masks may be on the host;
        elsewhere they are read from there first.
        """
        input_ids, attention_mask, action_mask = input_ids.cpu(), attention_mask.cpu(), action_mask.cpu()
        group = None if group is None else group.cpu()
        if not len(input_ids):
            ids, mask, actions = dummy_batch(input_ids)
            if function is None:
                found = self.forward(ids, mask, actions, temperature, with_entropy, with_mean)
                return found.map(lambda row: row[:0])
            stats, *summed = self.forward(ids, mask, actions, temperature, with_entropy, function=_of_none(function))
            return (stats.map(lambda row: row[:0]), *summed) if with_stats else tuple(summed)
        device, shape, summed = self.model.device, action_mask.shape, None
        targets = to_device(input_ids[:, 1:][action_mask], device)  # (N,)
        if label_ids is None:
            with self.active():
                states, head = self._states(input_ids, attention_mask, action_mask, group=group)
                rows = logit_rows(embedding_rows(self.model), device.type)
                if function:
                    summed = head_sum(states, head, function, rows)
                    if not with_stats:
                        return summed
                stats = TokenStats(*head_logprobs(states, head, targets, temperature, with_entropy, with_mean, rows))
        else:
            logits = self.choice_logits(input_ids, attention_mask, action_mask, label_ids, allowed)
            logprobs = (logits / temperature).log_softmax(-1)  # (N, L)
            chosen = (targets[:, None] == to_device(label_ids, device)).long().argmax(-1, keepdim=True)  # (N, 1)
            entropy = -(logprobs.exp() * logprobs).sum(-1) if with_entropy else None
            stats = TokenStats(logprobs.gather(-1, chosen)[:, 0], entropy, None)
        places = tuple(to_device(index, device) for index in action_mask.nonzero(as_tuple=True))  # (N,) each
        stats = stats.map(lambda row: row.new_zeros(shape).index_put(places, row))
        return (stats, *summed) if summed else stats

    def choice_logits(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        action_mask: Tensor,
        label_ids: Tensor | None = None,
        allowed: Tensor | None = None,
        cache: Any = None,
    ) -> Tensor:
        """Logits (N, L) of the labels at each of the N actions, very low where not allowed; without labels (N, V).

        All arguments may be on the host. Of a linear head only the rows of the labels are used, so the cost is
        independent of the vocabulary size. With a KV `cache` of earlier tokens the attention mask covers them too, and
        the cache grows by `input_ids`.
        """
        with self.active():
            states, head = self._states(input_ids, attention_mask, action_mask, cache=cache)
            if label_ids is None:
                return head(states).float()
            label_ids = to_device(label_ids, states.device)
            if isinstance(head, nn.Linear) and type(head) in (nn.Linear, HeldLinear):
                bias = None if head.bias is None else head.bias[label_ids]
                rows = head.weight[label_ids].to(states.dtype)
                logits = nn.functional.linear(states, rows, bias).float()  # (N, L)
            else:
                logits = head(states)[:, label_ids].float()
        if allowed is None:
            return logits
        allowed_here = allowed.expand(-1, action_mask.shape[1], -1)[action_mask]  # (N, L)
        hidden = to_device(~allowed_here, logits.device)
        return logits.masked_fill(hidden, -1e9)  # -inf would make the entropy and its gradient NaN

    def logits_of(self, batch: Batch) -> Callable[[slice], Tensor]:
        """The function that gives the logits (n, V), without a gradient, of a slice of the batch's actions.

        Hidden states are computed now, logits when they are wanted, so that (N, V) is never in memory.
        """
        inputs = policy_inputs(batch)
        if not len(batch):
            inputs = dict(zip(inputs, dummy_batch(batch.input_ids)))
        with torch.no_grad(), self.active():
            states, head = self._states(**inputs)

        def logits(rows: slice) -> Tensor:
            with torch.no_grad(), self.active() if hasattr(head, "lora_A") else nullcontext():
                return head(states[rows]).float()

        return logits

    def _states(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        action_mask: Tensor,
        cache: Any = None,
        group: Tensor | None = None,
    ) -> tuple[Tensor, nn.Module]:
        """Hidden states (N, H) that predict the N actions, and the head that maps them to logits."""
        if cache is None:
            inputs, packed = self._inputs(input_ids, attention_mask, group)
        else:
            inputs, packed = model_inputs(self.model, input_ids, attention_mask), None
            positions = to_device(position_ids(attention_mask)[:, -input_ids.shape[1] :], self.model.device)
            inputs |= {**cache_inputs(self.model, cache), **position_inputs(self.model, positions)}
        if self.head_is_plain:
            states, head = self._base(inputs).last_hidden_state, self.model.get_output_embeddings()
        else:  # the architecture changes its logits after the head (soft caps, scales): states are logits (B, T, V)
            states, head = self._base(inputs, whole=True).logits, nn.Identity()
        rows, columns = action_mask.nonzero(as_tuple=True)  # (N,) each
        if packed is not None:
            rows, columns = packed.rows[rows], packed.columns[rows, columns]
        return states[to_device(rows, states.device), to_device(columns, states.device)], head


class ScalarModel(Role):
    """A transformer with a scalar head: a reward model or a critic."""

    def __init__(
        self,
        model: PreTrainedModel,
        *args: Any,
        score: nn.Linear | None = None,
        is_encoder: bool = False,
        **options: Any,
    ) -> None:
        """score: the head on a shared backbone; is_encoder: the model is used whole, by its own classifier.

        Raises: UsageError unless the head at the last token gives the model's own output, or it is an encoder.
        """
        super().__init__(model, *args, **options)
        if score is not None:
            self.score = score  # else the head is the model's
        elif not is_encoder:
            check_scalar_model(model)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, group: Tensor | None = None) -> Tensor:
        """(B, T) ids and mask -> (B, T) float32 values of the head; group: as in `Batch`. All may be on the host."""
        input_ids, attention_mask = input_ids.cpu(), attention_mask.cpu()
        group = None if group is None else group.cpu()
        if not len(input_ids):
            return self.forward(*dummy_batch(input_ids)[:2])[:0]
        inputs, packed = self._inputs(input_ids, attention_mask, group)
        with self.active():
            hidden = self._base(inputs).last_hidden_state
        head = self.score if self.shares else scalar_head(self.model)
        values = head(hidden)[..., 0].float()
        if packed is None:
            return values
        return values[to_device(packed.rows, values.device)].gather(1, to_device(packed.columns, values.device))


def last_token(values: Tensor, attention_mask: Tensor) -> Tensor:
    """Value at the last token of each row that is not padding: (B, T) -> (B,)."""
    last = (attention_mask.long() * torch.arange(values.shape[1], device=values.device)).argmax(1)
    return values.gather(1, last[:, None])[:, 0]


def policy_inputs(batch: Batch) -> dict[str, Any]:
    """Arguments of `Policy.forward` for a batch, on the host."""
    own = batch.on_host
    masks = {"attention_mask": own.attention_mask, "action_mask": own.action_mask}
    return {"input_ids": own.input_ids, **masks, "group": own.group}


def scalar_inputs(batch: Batch) -> dict[str, Any]:
    """Arguments of `ScalarModel.forward` for a batch, on the host."""
    own = batch.on_host
    return {"input_ids": own.input_ids, "attention_mask": own.attention_mask, "group": own.group}


def max_positions(policy: Policy) -> float:
    """Positions of a model; infinite when its config has no limit."""
    return getattr(policy.model.config, "max_position_embeddings", None) or math.inf


def vocabulary_size(module: Role) -> int:
    """Rows of the embedding table; token ids must be below."""
    return embedding_rows(module.model)


def count_parameters(module: nn.Module) -> tuple[int, int]:
    """Number of parameters, with a shared backbone's, and number of this role's trainable ones."""
    sizes = {id(p): p.numel() for part in (getattr(module, "model", module), module) for p in part.parameters()}
    return sum(sizes.values()), sum(p.numel() for p in module.parameters() if p.requires_grad)


def transformer_layers(module: nn.Module) -> nn.ModuleList:
    """The transformer layers: the module list with the most parameters."""
    lists = [part for part in module.modules() if isinstance(part, nn.ModuleList)]
    return max(lists, key=lambda part: sum(p.numel() for p in part.parameters()), default=nn.ModuleList())


# -------------------------------------------------------------------------------------------------------------- helpers
def _of_none(function: LogitFunction) -> LogitFunction:
    """A function of no actions, and 0 times the logits of a dummy row, so that all weights have a gradient."""

    def of_none(logits: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        total, values = function(logits[:0], slice(0, 0))
        return total + 0.0 * logits.sum(), values

    return of_none


def dummy_batch(empty_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, mask and action mask of one row without actions, with which a rank without rows joins the collectives."""
    ids = empty_ids.new_zeros(1, 2)
    return ids, ids == 0, ids[:, 1:] == 0
