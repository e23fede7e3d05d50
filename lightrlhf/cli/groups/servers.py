"""Flags of sampling on servers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

from lightrlhf.cli.addresses import check_address
from lightrlhf.cli.fields import Args, above, flag
from lightrlhf.cli.groups.devices import DeviceArgs
from lightrlhf.cli.groups.sampling import SamplingArgs
from lightrlhf.cli.patience import RANK, REQUEST, SERVER, patience

WITH_SERVERS = "rollout_server"


@dataclass(frozen=True, kw_only=True)
class ServerArgs(Args):
    """Sampling on servers."""

    rollout_server: list[str] = flag([], unique=True, check=partial(check_address, example="http://localhost:8000"))
    """Addresses of servers (vLLM or `lightrlhf.serve`) that sample instead of this process."""

    @property
    def sampling_correction(self) -> str:
        """Importance weights; no flag in a program that does not learn from its samples' log-probabilities."""
        return "none"

    @property
    def sampling_bound(self) -> float:
        """Largest of these weights."""
        return 2.0

    @property
    def exchange_adapter(self) -> bool:
        """Whether servers get the adapter alone."""
        return False

    @property
    def max_staleness(self) -> int:
        """Largest age in steps of the weights that samples come from."""
        return 0


@dataclass(frozen=True, kw_only=True)
class RolloutServerArgs(SamplingArgs, ServerArgs):
    """Sampling on servers."""

    exchange_adapter: bool = flag(
        False,
        needs={WITH_SERVERS: ..., "finetune_mode": "lora"},
        excludes={"load_in_8bit": True, "load_in_4bit": True, "base_dtype": "bfloat16", "use_dora": True},
        show="rarely",
    )
    """Send servers only the adapter of `--finetune_mode lora`, for their own base weights; else merged weights."""
    sampling_correction: Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "none"] = flag(
        "token_truncate", needs=WITH_SERVERS, show="rarely"
    )
    """Importance weights between servers and trainer: per token or sequence, truncated or masked; or none."""
    sampling_bound: float = above(1, 2.0, needs=WITH_SERVERS, show="rarely")
    """Cap C of the importance weights; masked ones are 0 outside [1 / C, C]."""

    def _check(self) -> None:
        if not self.rollout_server:
            return
        for flag_, value, whole in (("top_k", self.top_k, 0), ("top_p", self.top_p, 1), ("min_p", self.min_p, 0)):
            if value != whole:
                raise ValueError(
                    f"--{flag_} {value} with --rollout_server: a server gives log-probabilities over the tokens that "
                    f"{flag_} keeps, and the policy is trained over all tokens; leave it at {whole}"
                )
        if isinstance(self, DeviceArgs) and self.devices * self.num_nodes > 1:
            waits = [patience(name) for name in (RANK, REQUEST, SERVER)]
            if waits[0] < waits[1] + waits[2]:
                raise ValueError(
                    f"{RANK} {waits[0]:g} with {REQUEST} {waits[1]:g} and {SERVER} {waits[2]:g}: other ranks would "
                    "give up before the servers are; raise the first"
                )


@dataclass(frozen=True, kw_only=True)
class AheadServerArgs(RolloutServerArgs):
    """Sampling on servers."""

    max_staleness: Literal[0, 1] = flag(0, needs=WITH_SERVERS, show="rarely")
    """1: servers sample the next rollout during this update, from weights one step older."""
