"""Teachers: frozen language models, on a student's backbone where they can be, of the same tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from lightrlhf.cli.groups import FrozenArgs
from lightrlhf.models import lora
from lightrlhf.models.given import as_policy
from lightrlhf.models.loading import load_policy
from lightrlhf.models.names import base_name, resolve
from lightrlhf.models.roles import Policy
from lightrlhf.models.tokenizer import check_stored_ids

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

FLAG = "--teacher"


class TeacherArgs(Protocol):
    """The flags that `load_teacher` reads."""

    @property
    def teacher(self) -> str | None: ...

    @property
    def trust_remote_code(self) -> bool: ...


def load_teacher(
    given: PreTrainedModel | Policy | None, args: TeacherArgs, student: Policy, tokenizer: PreTrainedTokenizerBase
) -> Policy:
    """The given teacher, else that of `--teacher`: adapters on the student's backbone where that is shared and the
    teacher's base, else a model of its own.

    Raises: UsageError when it cannot be loaded, or its tokenizer gives a token another id than the student's.
    """
    frozen = FrozenArgs(trust_remote_code=args.trust_remote_code)
    if given is not None:
        return as_policy(given, frozen, tokenizer)
    assert args.teacher
    source = resolve(args.teacher, FLAG)
    check_stored_ids(tokenizer, "the data", source)
    is_shared = student.shares and student.base == base_name(source, FLAG) is not None
    if not is_shared or lora.holds_dora(source, FLAG):
        return load_policy(source, frozen, tokenizer, FLAG)
    config = lora.adapter_config(source, FLAG)
    if config is not None and source not in student.loaded:
        adapter = f"start_{len(student.loaded)}"
        student.loaded[source] = adapter, lora.load_adapter(student.model, adapter, source, config)
        lora.configure(student.model, active=student.adapters, trainable=("policy",))
    adapters = () if config is None else (student.loaded[source][0],)
    settings = {"shares": True, "trainable": False, "head_is_plain": student.head_is_plain}
    return Policy(student.model, adapters, student.base, **settings)
