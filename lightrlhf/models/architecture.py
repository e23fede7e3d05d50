"""Checks of an architecture by trial passes on a few tokens: whether it can be a policy, a reward model or a critic.

Left out: a list of supported architectures.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightrlhf.cli.errors import UsageError, first_line
from lightrlhf.data.types import PreTrainedModel
from lightrlhf.models.forward import embedding_rows, inference, model_inputs
from lightrlhf.models.frozen import activation_dtype
from lightrlhf.models.quantisation import is_quantised


def check_language_model(model: PreTrainedModel) -> None:
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


def has_plain_head(model: PreTrainedModel) -> bool:
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


def check_scalar_model(model: PreTrainedModel) -> None:
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
        raise _no_scalar_model(model, "its output differs from its head's at the last token")


def scalar_head(model: PreTrainedModel) -> nn.Linear:
    """The linear head `score` of a model for sequence classification. Raises: UsageError if it has no such head."""
    head = getattr(model, "score", None)
    if not isinstance(head, nn.Linear):
        raise _no_scalar_model(model, "its classifier is not a linear layer on the last token's state")
    return head


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
