"""Flags of sampling on servers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

from lightrlhf.cli.addresses import check_address
from lightrlhf.cli.fields import Args, above, flag, positive
from lightrlhf.cli.groups.devices import DeviceArgs
from lightrlhf.cli.groups.sampling import SamplingArgs

WITH_SERVERS = "rollout_server"


@dataclass(frozen=True, kw_only=True)
class TimeoutArgs(Args):
    """Patience with servers."""

    request_timeout: float = positive(600.0, show="rarely")
    """Seconds until an unanswered request counts as failed."""
    health_timeout: float = positive(600.0, show="rarely")
    """Seconds to wait until every server is up, and for a rollout server when all have failed."""


@dataclass(frozen=True, kw_only=True)
class ServerArgs(TimeoutArgs):
    """Sampling on servers."""

    rollout_server: list[str] = flag([], unique=True, check=partial(check_address, example="http://localhost:8000"))
    """Addresses of servers that sample in place of this process: vLLM or `lightrlhf.serve`."""
    exchange_dir: str | None = flag(None, needs=WITH_SERVERS, show="rarely")
    """Folder that servers see, for weights; when not given a file system in memory, else the temporary folder."""
    max_sampling_kl: float | None = positive(None, needs=WITH_SERVERS, show="rarely")
    """Largest KL a token between servers and trainer; when not given 1e-6, with a mixed precision 0.01."""

    @property
    def sampling_correction(self) -> str:
        """Importance weights; a program that learns from no log-probabilities of its samples has no flag for them."""
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
        """Steps that the weights of a sample may be older than its own step."""
        return 0

    @property
    def server_sleep(self) -> bool:
        """Whether servers free the accelerator's memory while this process learns."""
        return False


@dataclass(frozen=True, kw_only=True)
class RolloutServerArgs(SamplingArgs, ServerArgs):
    """Sampling on servers."""

    exchange_adapter: bool = flag(
        False,
        needs={WITH_SERVERS: ..., "finetune_mode": "lora"},
        excludes={"load_in_8bit": True, "load_in_4bit": True, "base_dtype": "bfloat16", "use_dora": True},
        show="rarely",
    )
    """Give servers the adapter of `--finetune_mode lora` alone, which they put on their base; else merged weights."""
    sampling_correction: Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "none"] = flag(
        "token_truncate", needs=WITH_SERVERS, show="rarely"
    )
    """Importance weights between servers and trainer, of tokens or sequences, truncated or masked; none: no weights."""
    sampling_bound: float = above(1, 2.0, needs=WITH_SERVERS, show="rarely")
    """Largest of these weights (C); masked ones are 0 outside [1 / C, C]."""

    def _check(self) -> None:
        if not self.rollout_server:
            return
        for flag_, value, whole in (("top_k", self.top_k, 0), ("top_p", self.top_p, 1), ("min_p", self.min_p, 0)):
            if value != whole:
                raise ValueError(
                    f"--{flag_} {value} with --rollout_server: a server's log-probabilities would be those of the kept "
                    f"tokens alone, another distribution than the one that learns; leave it at {whole}"
                )
        if isinstance(self, DeviceArgs) and self.devices * self.num_nodes > 1:
            if self.ddp_timeout < self.request_timeout + self.health_timeout:
                raise ValueError(
                    f"--ddp_timeout {self.ddp_timeout} with --request_timeout {self.request_timeout:g} and "
                    f"--health_timeout {self.health_timeout:g}: other ranks would give up before the servers are; "
                    "raise the first"
                )


@dataclass(frozen=True, kw_only=True)
class AheadServerArgs(RolloutServerArgs):
    """Sampling on servers."""

    max_staleness: Literal[0, 1] = flag(0, needs=WITH_SERVERS, excludes={"server_sleep": True}, show="rarely")
    """At 1 servers sample the next rollout while this one is learned from, by weights one step older."""
    server_sleep: bool = flag(False, needs=WITH_SERVERS, show="rarely")
    """Have servers free the accelerator's memory while this process learns, where both share one."""
