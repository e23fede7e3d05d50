"""Flags of teachers, whose distribution a policy learns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

from lightrlhf.cli.addresses import check_address
from lightrlhf.cli.errors import UsageError
from lightrlhf.cli.fields import Bounds, at_least, between, flag
from lightrlhf.cli.groups.sampling import SamplingArgs

ESTIMATORS = ("exact", "top_k", "k1")
REFUSED = {  # estimators that other programs have, and why they are refused here
    "k1_loss": "back-propagated, k1 has a gradient of mean 0 that does not depend on the teacher; give k1",
    "k2_loss": "back-propagated, k2 has the gradient of k1 with --objective position; give that",
    "k3_loss": "back-propagated, k3 has the gradient of the forward KL, not of the one that it estimates; give k1, or "
    "exact with --beta 0",
    "k2_reward": "as a reward k2 has the gradient of no divergence; give k1",
    "k3_reward": "as a reward k3 has the gradient of the reverse KL less the forward one's; give k1",
}


def check_estimator(name: str, flag: str) -> None:
    """Raises: ValueError, with the reason, for an estimator whose gradient is another one than it says."""
    if name in REFUSED:
        raise ValueError(f"{flag} {name}: {REFUSED[name]}")
    if name not in ESTIMATORS:
        raise ValueError(f"{flag} {name} must be one of: {'; '.join(ESTIMATORS)}")


@dataclass(frozen=True, kw_only=True)
class TeacherArgs(SamplingArgs):
    """Teacher."""

    teacher: str | None = flag(None, show="first")
    """Teacher: hub name, folder or experiment dir of a language model; several as `NAME=MODEL,NAME=MODEL`."""
    teacher_column: str | None = flag(None, needs="teacher", show="rarely")
    """Column of the prompts with the name of their teacher, where `--teacher` has several."""
    teacher_server: str | None = flag(
        None, check=partial(check_address, example="http://localhost:8000"), excludes={"teacher": ...}, show="rarely"
    )
    """Address of a server (vLLM or `lightrlhf.serve`) of the teacher, with the student's tokenizer."""
    own_teacher: Literal["start", "average", "base"] = flag(
        "start", excludes={"teacher": ..., "teacher_server": ...}, show="rarely"
    )
    """Without `--teacher`: the policy as it starts, an average of it over the steps, or its base without adapters."""
    teacher_decay: float = between(0, 1, 0.99, needs={"own_teacher": "average"}, show="rarely")
    """Share of the average that a step keeps, with `--own_teacher average`."""
    estimator: str = flag("exact", check=check_estimator, show="rarely")
    """exact: the whole vocabulary; top_k: the teacher's likeliest tokens and a tail; k1: the sampled tokens alone."""
    teacher_top_k: int = flag(20, Bounds(least=1, most=128), needs={"estimator": "top_k"}, show="rarely")
    """Likeliest tokens of the teacher at a position, with `--estimator top_k`."""
    text_return: Literal["response", "to_go"] = flag(
        "response", needs={"teacher": ..., "estimator": "k1"}, show="rarely"
    )
    """Judgement of a token by a teacher with another tokenizer: the response's, or that from the word before it on."""
    privileged_column: str | None = None
    """Column of the prompts that the teacher reads instead of the prompt: a text or messages."""
    objective: Literal["position", "sequence"] = "position"
    """Divergence of each position with its prefix held fixed, or the KL of whole responses."""
    beta: float = between(0, 1, 1.0)
    """Divergence of a position: 1 reverse KL, 0 forward KL, between them the generalised Jensen-Shannon divergence."""

    @property
    def has_teacher(self) -> bool:
        """Whether the policy learns from a teacher."""
        return True

    @property
    def shows_siblings(self) -> bool:
        """Whether teachers read other responses to the prompt."""
        return False

    @property
    def compares_responses(self) -> bool:
        """Whether a response has others to be compared with."""
        return True

    @property
    def teacher_models(self) -> dict[str, str]:
        """The models of `--teacher` by name; a single one has no name."""
        if not self.teacher:
            return {}
        if not self.teacher_column:
            return {"": self.teacher}
        return dict(pair.split("=", 1) for pair in self.teacher.split(",") if "=" in pair)

    def _check(self) -> None:
        if not self.has_teacher:
            return
        if self.teacher_column and len(self.teacher_models) < 2:
            raise ValueError(
                f"--teacher {self.teacher} with --teacher_column: give at least two as NAME=MODEL,NAME=MODEL"
            )
        if self.teacher_server and self.estimator == "exact":
            raise ValueError(
                "--teacher_server tells no whole distribution, which --estimator exact needs; give top_k or k1"
            )
        if self.estimator == "k1" and self.beta != 1:
            raise ValueError(f"--beta {self.beta} with --estimator k1, which estimates the reverse KL; leave it at 1")
        if self.own_teacher == "base" and getattr(self, "finetune_mode", "") != "lora":
            raise ValueError("--own_teacher base is the policy without adapters and needs --finetune_mode lora")
        if self.own_teacher == "average" and getattr(self, "strategy", "") in ("fsdp", "deepspeed"):
            raise ValueError("--own_teacher average needs whole weights on each rank; take --strategy ddp, or start")
        for name, value, whole in (
            ("temperature", self.temperature, 1),
            ("top_k", self.top_k, 0),
            ("top_p", self.top_p, 1),
            ("min_p", self.min_p, 0),
        ):
            if value != whole:
                raise ValueError(
                    f"--{name} {value}: the divergence is the student's at temperature 1 over all tokens, so responses "
                    f"are sampled from that; leave it at {whole}"
                )
        if self.objective == "sequence" and self.beta != 1:
            raise ValueError(
                f"--beta {self.beta} with --objective sequence: the KL of whole responses is of the student's own; "
                "leave it at 1, or use --objective position"
            )

    def _check_given(self, given: Mapping[str, object]) -> None:
        is_given = given.get("teacher") is not None
        named = self.teacher or self.teacher_server or is_given or self.shows_siblings
        if self.has_teacher and not (named or self.privileged_column):
            raise UsageError(
                "--teacher or --teacher_server is needed, or --privileged_column, by which the policy teaches itself"
            )
        if self.teacher and is_given:
            raise UsageError(f"--teacher {self.teacher} contradicts teacher; give one of them")


@dataclass(frozen=True, kw_only=True)
class TeacherTermArgs(TeacherArgs):
    """Teacher beside a reward."""

    teacher: str | None = flag(None, needs="teacher_coeff", show="rarely")
    """Teacher: hub name, folder or experiment dir of a language model with the policy's tokenizer."""
    teacher_coeff: float = at_least(0, 0.0, show="rarely")
    """Weight of the divergence from a teacher beside the loss of the reward, as in `lightrlhf.distill`."""
    privileged_column: str | None = flag(None, needs="teacher_coeff", show="rarely")
    """Column of the prompts that the teacher reads instead of the prompt: a text or messages."""
    objective: Literal["position", "sequence"] = flag("position", needs="teacher_coeff", show="rarely")
    """Divergence of each position with its prefix held fixed, or the KL of whole responses."""
    beta: float = between(0, 1, 1.0, needs="teacher_coeff", show="rarely")
    """Divergence of a position: 1 reverse KL, 0 forward KL, between them the generalised Jensen-Shannon divergence."""

    @property
    def has_teacher(self) -> bool:
        """Whether the policy learns from a teacher, too."""
        return self.teacher_coeff > 0

    def _check(self) -> None:
        for name in ("teacher_server", "own_teacher", "estimator", "text_return"):
            if not self.has_teacher and getattr(self, name) != vars(TeacherArgs)[name]:
                raise ValueError(f"--{name} {getattr(self, name)} needs --teacher_coeff")

    def _check_given(self, given: Mapping[str, object]) -> None:
        if given.get("teacher") is not None and not self.has_teacher:
            raise UsageError("teacher needs --teacher_coeff above 0")
