"""Roles of a model: a language model that returns log-probabilities, or a model with a scalar head.

A model has a role: policy, reference, critic or reward model. With LoRA several roles can share one backbone, each with
its own adapters and head (see `lora.py`). Loading and saving: `loading.py`, `saving.py`.

Left out: encoder-decoder models, value heads of more than one layer.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from lightrlhf.cli.errors import UsageError, first_line
from lightrlhf.data.batch import Batch
from lightrlhf.maths.head import head_logprobs, logit_rows
from lightrlhf.maths.ops import position_ids
from lightrlhf.models import lora
from lightrlhf.models.frozen import HeldLinear, activation_dtype
from lightrlhf.models.packing import PackedTexts, pack_texts
from lightrlhf.models.quantisation import is_quantised

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class TokenStats(NamedTuple):
    """Statistics of a batch's actions under a language model; each (B, T-1), 0 where there is no action."""

    logprobs: Tensor
    entropy: Tensor | None  # None if not requested
    mean_logprobs: Tensor | None  # mean over the vocabulary; None if not requested

    def map(self, function: Callable[[Tensor], Tensor]) -> TokenStats:
        """Apply `function` to each tensor."""
        return TokenStats(function(self.logprobs), *(None if row is None else function(row) for row in self[1:]))


class Role(nn.Module):
    """A Hugging Face model in one role: a model of its own, or with LoRA one of several roles on a shared backbone.

    adapters: names of the adapters that are active in this role; a trainable one comes last, see `lora.belonging`.
    base: hub id or folder of the weights below the adapters; None if they are not stored.
    shares: the backbone is shared. Such a role registers only its own parameters, so Fabric wraps, clips and saves
    those and no others. Outside a role's forward pass the policy's adapters are active.
    """

    model: PreTrainedModel
    packs = False  # the texts of a pass into fewer rows; see `probes.enable_packing`

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
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        group: Tensor | None = None,
    ) -> tuple[dict[str, Any], PackedTexts | None]:
        """Arguments of a forward pass without a KV cache, and the packed texts if they are packed."""
        packed = packed_texts(self.model, input_ids, attention_mask, group) if self.packs else None
        if packed is None:
            return model_inputs(self.model, input_ids, attention_mask), None
        return packed_inputs(self.model, packed), packed

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

        Raises: UsageError if the passes show that the model is no causal language model, or none that works here.
        """
        super().__init__(model, *args, **options)
        self.loaded: lora.LoadedAdapters = {}  # frozen adapters on the backbone
        self.sampled = False  # set by the generation engine, once it has shown that it supports the architecture
        if head_is_plain is None:
            _check_language_model(model)
            head_is_plain = _head_is_plain(model)
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
        reference = copy.deepcopy(self, {id(p): p for p in self.parameters() if not p.requires_grad})
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
    ) -> TokenStats:
        """(B, T) ids and masks -> log-probabilities of the actions at `temperature`; entropies and means on request.

        label_ids (L,), allowed (B, 1, L) bool: restrict the actions to these tokens, in each row to the allowed ones.
        group: as in `Batch`.
        """
        if not len(input_ids):
            ids, mask, actions = _dummy_batch(input_ids)
            return self.forward(ids, mask, actions, temperature, with_entropy, with_mean).map(lambda row: row[:0])
        targets = input_ids[:, 1:][action_mask]  # (N,)
        if label_ids is None:
            with self.active():
                states, head = self._states(input_ids, attention_mask, action_mask, group=group)
                rows = logit_rows(embedding_rows(self.model), input_ids.device.type)
                stats = TokenStats(*head_logprobs(states, head, targets, temperature, with_entropy, with_mean, rows))
        else:
            logits = self.choice_logits(input_ids, attention_mask, action_mask, label_ids, allowed)
            logprobs = (logits / temperature).log_softmax(-1)  # (N, L)
            chosen = (targets[:, None] == label_ids).long().argmax(-1, keepdim=True)  # (N, 1)
            entropy = -(logprobs.exp() * logprobs).sum(-1) if with_entropy else None
            stats = TokenStats(logprobs.gather(-1, chosen)[:, 0], entropy, None)
        return stats.map(lambda row: _scatter(row, action_mask))

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

        Of a linear head only the rows of the labels are used, so the cost is independent of the vocabulary size. With a
        KV `cache` of earlier tokens the attention mask covers them too, and the cache grows by `input_ids`.
        """
        with self.active():
            states, head = self._states(input_ids, attention_mask, action_mask, cache=cache)
            if label_ids is None:
                return head(states).float()
            if isinstance(head, nn.Linear) and type(head) in (nn.Linear, HeldLinear):
                bias = None if head.bias is None else head.bias[label_ids]
                rows = head.weight[label_ids].to(states.dtype)
                logits = nn.functional.linear(states, rows, bias).float()  # (N, L)
            else:
                logits = head(states)[:, label_ids].float()
        if allowed is None:
            return logits
        allowed_here = allowed.expand(-1, action_mask.shape[1], -1)[action_mask]  # (N, L)
        return logits.masked_fill(~allowed_here, -1e9)  # -inf would make the entropy and its gradient NaN

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
            positions = position_ids(attention_mask)[:, -input_ids.shape[1] :]
            inputs |= {"use_cache": True, "past_key_values": cache, **position_inputs(self.model, positions)}
        if self.head_is_plain:
            states, head = self.model.base_model(**inputs).last_hidden_state, self.model.get_output_embeddings()
        else:  # the architecture changes its logits after the head (soft caps, scales): states are logits (B, T, V)
            states, head = self.model(**inputs).logits, nn.Identity()
        if packed is None:
            return states[:, :-1][action_mask], head
        rows = packed.rows[:, None].expand_as(action_mask)[action_mask]  # (N,)
        return states[rows, packed.columns[:, :-1][action_mask]], head


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
            _check_scalar_model(model)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, group: Tensor | None = None) -> Tensor:
        """(B, T) ids and mask -> (B, T) float32 values of the head; group: as in `Batch`."""
        if not len(input_ids):
            return self.forward(*_dummy_batch(input_ids)[:2])[:0]
        inputs, packed = self._inputs(input_ids, attention_mask, group)
        with self.active():
            hidden = self.model.base_model(**inputs).last_hidden_state
        head = self.score if self.shares else scalar_head(self.model)
        values = head(hidden)[..., 0].float()
        return values if packed is None else values[packed.rows].gather(1, packed.columns)


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
    """Value at the last token of each row that is not padding: (B, T) -> (B,)."""
    last = (attention_mask.long() * torch.arange(values.shape[1], device=values.device)).argmax(1)
    return values.gather(1, last[:, None])[:, 0]


def policy_inputs(batch: Batch) -> dict[str, Any]:
    """Arguments of `Policy.forward` for a batch."""
    return {
        "input_ids": batch.input_ids,
        "attention_mask": batch.attention_mask,
        "action_mask": batch.action_mask,
        "group": batch.group,
    }


def model_inputs(model: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Any]:
    """Arguments of a forward pass without a KV cache, with explicit positions."""
    positions = position_inputs(model, position_ids(attention_mask))
    return {"input_ids": input_ids, "attention_mask": attention_mask.long(), "use_cache": False, **positions}


def packed_texts(
    model: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor, group: Tensor | None
) -> PackedTexts | None:
    """The texts of a pass, packed; None where they stay separate.

    The mask of packed rows ignores windows and chunks of attention, so no text may exceed one; GPT-Neo's window counts
    the columns of a row.
    """
    config = model.config.get_text_config()
    windows = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
    if any(window and input_ids.shape[1] > window for window in windows):
        return None
    hidden_size = getattr(config, "hidden_size", 1024)  # a rare architecture has no such name
    return pack_texts(input_ids, attention_mask, group, hidden_size, getattr(config, "window_size", None))


def packed_inputs(model: PreTrainedModel, packed: PackedTexts) -> dict[str, Any]:
    """`model_inputs` for packed texts."""
    dtype = activation_dtype(model)
    mask = torch.zeros(packed.visible.shape, dtype=dtype, device=packed.visible.device)
    mask = mask.masked_fill_(~packed.visible, torch.finfo(dtype).min)[:, None]  # (N, 1, W, W)
    positions = position_inputs(model, packed.positions)
    return {"input_ids": packed.input_ids, "attention_mask": mask, "use_cache": False, **positions}


def position_inputs(model: PreTrainedModel, positions: Tensor) -> dict[str, Tensor]:
    """The `position_ids` argument; empty for Bloom, the only supported architecture that does not accept it."""
    return {} if model.config.model_type == "bloom" else {"position_ids": positions}


def vocabulary_size(module: Role) -> int:
    """Rows of the embedding table; token ids must be below."""
    return embedding_rows(module.model)


def scalar_head(model: PreTrainedModel) -> nn.Linear:
    """The linear head `score` of a model for sequence classification. Raises: UsageError if it has no such head."""
    head = getattr(model, "score", None)
    if not isinstance(head, nn.Linear):
        raise _no_scalar_model(model, "its classifier is no linear layer on the last token's state")
    return head


def embedding_rows(model: PreTrainedModel) -> int:
    """Rows of the embedding table of a Hugging Face model."""
    embedding: Any = model.get_input_embeddings()
    return embedding.weight.shape[0]


def count_parameters(module: nn.Module) -> tuple[int, int]:
    """Number of parameters, those of a shared backbone included, and of this role's trainable ones."""
    sizes = {id(p): p.numel() for part in (getattr(module, "model", module), module) for p in part.parameters()}
    return sum(sizes.values()), sum(p.numel() for p in module.parameters() if p.requires_grad)


def transformer_layers(module: nn.Module) -> nn.ModuleList:
    """The transformer layers: the module list with the most parameters."""
    lists = [part for part in module.modules() if isinstance(part, nn.ModuleList)]
    return max(lists, key=lambda part: sum(p.numel() for p in part.parameters()), default=nn.ModuleList())


# -------------------------------------------------------------------------------------------------------------- helpers
def _dummy_batch(empty_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, mask and action mask of one row without actions, with which a rank without rows joins the collectives."""
    ids = empty_ids.new_zeros(1, 2)
    return ids, ids == 0, ids[:, 1:] == 0


def _scatter(row: Tensor, action_mask: Tensor) -> Tensor:
    """Scatter (N,) values of the actions to (B, T-1), 0 elsewhere."""
    return torch.zeros(action_mask.shape, dtype=row.dtype, device=row.device).masked_scatter(action_mask, row)


def _head_is_plain(model: PreTrainedModel) -> bool:
    """Whether the model's logits are its output embedding of its last hidden state, by a trial pass.

    In that pass large random values take the place of the states and of the head's output, so a soft cap or a scale on
    their way shows however small the model's own values are.
    """
    head, drawn, given = model.get_output_embeddings(), torch.Generator().manual_seed(0), {}
    if head is None or model.base_model is model:
        return False

    def random_like(values: Tensor) -> Tensor:
        exponents = torch.rand(values.shape, generator=drawn) * 6 - 2  # 0.01 to 10,000
        return (torch.randn(values.shape, generator=drawn) * 10**exponents).to(values)

    def replace_states(module: nn.Module, args: Any, output: Any) -> Any:
        given["states"] = output.last_hidden_state = random_like(output.last_hidden_state)
        return output

    def replace_logits(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        given["input"], given["logits"] = args[0], random_like(output)
        return given["logits"]

    hooks = [model.base_model.register_forward_hook(replace_states), head.register_forward_hook(replace_logits)]
    try:
        with inference(model):
            logits = model(input_ids=trial_ids(model, 4), use_cache=False).logits
    except (AttributeError, IndexError, TypeError, RuntimeError):  # no such states, or a head that is called otherwise
        return False
    finally:
        for hook in hooks:
            hook.remove()
    if given.keys() != {"states", "input", "logits"} or logits.shape != given["logits"].shape:
        return False
    return torch.equal(given["input"], given["states"]) and torch.equal(logits.float(), given["logits"].float())


def _check_language_model(model: PreTrainedModel) -> None:
    """Check by trial passes that neither padding nor later tokens change a token's logits. Raises: UsageError."""
    kind, ids = model.config.model_type, trial_ids(model, 8)
    rows, mask = ids.repeat(2, 1), torch.ones(2, 8, dtype=torch.bool, device=ids.device)
    rows[0, 5:], mask[0, 5:] = ids[0, 0], False  # (2, 8): five tokens and padding, and all eight
    remedy = "give a causal language model, such as a Llama, Qwen or GPT-2"
    try:
        with inference(model):
            alone = model(input_ids=ids[:, :5], use_cache=False).logits[0].float()  # (5, V)
            padded, longer = model(**model_inputs(model, rows, mask)).logits[:, :5].float()
    except torch.OutOfMemoryError:
        raise
    except Exception as problem:
        seen = f"{type(problem).__name__}: {first_line(problem)[:200]}"
        raise UsageError(
            f"the architecture {kind} cannot be a policy, a pass over padded rows fails ({seen}); {remedy}"
        ) from None
    if not is_close(longer, alone, model):
        raise UsageError(
            f"the architecture {kind} cannot be a policy: later tokens change earlier ones' logits; {remedy}"
        )
    if not is_close(padded, alone, model):
        raise UsageError(f"the architecture {kind} cannot be a policy: its logits change with padding; {remedy}")


def _check_scalar_model(model: PreTrainedModel) -> None:
    """Check that the head at a padded row's last token gives the model's own output. Raises: UsageError."""
    head, ids = scalar_head(model), trial_ids(model, 5)
    rows, mask = nn.functional.pad(ids, (0, 2), value=int(ids[0, 0])), torch.arange(7, device=ids.device)[None] < 5
    try:
        with inference(model):
            alone = model(input_ids=ids, use_cache=False).logits.float()  # (1, labels)
            states = model.base_model(**model_inputs(model, rows, mask)).last_hidden_state  # (1, 7, H)
            found = head(states).float()
    except torch.OutOfMemoryError:
        raise
    except Exception as problem:
        raise _no_scalar_model(model, f"{type(problem).__name__}: {first_line(problem)[:200]}") from None
    if not is_close(found[:, 4], alone, model, found):
        raise _no_scalar_model(model, "its output is not that of its head at the last token")


def _no_scalar_model(model: PreTrainedModel, why: str) -> UsageError:
    return UsageError(
        f"the architecture {model.config.model_type} cannot be a reward model or critic ({why}); "
        "take one such as Llama, Qwen or GPT-2 for it"
    )


def is_close(values: Tensor, expected: Tensor, model: PreTrainedModel, spread: Tensor | None = None) -> bool:
    """Whether two results of the model differ by rounding only, measured by how far apart the values of `spread` lie.

    spread: the expected values if not given. An absolute tolerance would let anything pass in a model of small weights.
    """
    exact = activation_dtype(model) in (torch.float32, torch.float64) and not is_quantised(model)
    relative, rounding = (1e-4, 1e-5) if exact else (0.1, 1e-2)
    parts = (values, expected, expected if spread is None else spread)
    values, expected, spread = (part.float().nan_to_num(0.0, 0.0, 0.0) for part in parts)
    tolerance = relative * (spread.max() - spread.min()) + rounding * spread.abs().max()
    return bool((values - expected).abs().max() <= tolerance)


def trial_ids(model: PreTrainedModel, count: int) -> Tensor:
    """A row of `count` different tokens (1, count), spread over the vocabulary.

    The first ones often are control tokens, which pretraining never showed: a fine-tuned model of 135M parameters
    multiplied their rounding by a hundred.
    """
    rows = embedding_rows(model)
    return (torch.arange(1, 1 + count, device=model.device) * max(rows // (count + 1), 1)).remainder(rows)[None]
