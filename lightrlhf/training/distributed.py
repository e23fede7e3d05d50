"""Starting ranks: Fabric's strategies, processes from `--devices`, torchrun or SLURM, and equal flags on each.

`ddp` keeps a whole model on each rank and sums gradients; `fsdp` shards weights, gradients and optimiser state (see
`models/sharding.py`); `deepspeed` is handed to Fabric by its name.

Left out: pipeline and sequence parallelism; for restarts see `restarts.py`.
"""

from __future__ import annotations

import atexit
import inspect
import logging
import math
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightrlhf import cpu
from lightrlhf.cli.errors import RunFailure, UsageError
from lightrlhf.cli.groups import DataArgs, DataSetsArgs, DeviceArgs, TensorParallelArgs, TrainArgs
from lightrlhf.cli.parser import to_dict
from lightrlhf.cli.patience import RANK, patience
from lightrlhf.models.loading import find_device
from lightrlhf.models.sharding import shard_layers
from lightrlhf.storage.seals import content_hash
from lightrlhf.training.loss_scale import scaled_precision
from lightrlhf.training.restarts import check_restarts
from lightrlhf.training.watchdog import COLLECTIVE_GRACE

OWN_TO_RANK = {"data_dir", "log_dir", "output_dir", "resume_from", "config"}  # paths may differ between machines


def make_fabric(args: TrainArgs) -> Any:
    """Fabric for these arguments, not launched yet. Raises: UsageError naming the flags when they do not fit."""
    from lightning.fabric import Fabric
    from lightning.fabric.plugins import MixedPrecision
    from lightning.fabric.utilities.exceptions import MisconfigurationException

    for name in ("lightning.fabric", "lightning.pytorch"):
        logging.getLogger(name).setLevel(logging.WARNING)  # six lines at each start
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else a C++ stack trace for each lost connection
    device = training_device(args)
    check_restarts()
    cpu.enable()
    devices, num_nodes = processes(args)
    if devices * num_nodes % (size := tensor_parallel(args)):
        raise UsageError(f"--tensor_parallel {size} does not divide {devices * num_nodes} ranks; change one of them")
    chosen: dict[str, Any] = {"accelerator": device.type, "devices": devices, "num_nodes": num_nodes}
    precision: dict[str, Any] = {"precision": args.precision}
    if args.precision == "16-mixed":
        precision = {"plugins": scaled_precision("cuda")}
    elif args.precision == "bf16-mixed" and device.type not in ("cpu", "cuda"):  # Fabric: the autocast of CUDA
        precision = {"plugins": MixedPrecision("bf16-mixed", device.type)}
    try:
        return Fabric(**chosen, **precision, strategy=_strategy(args, devices * num_nodes))
    except (ValueError, RuntimeError, MisconfigurationException) as problem:
        flags = {**chosen, "precision": args.precision, "strategy": args.strategy}
        given = " ".join(f"--{name} {value}" for name, value in flags.items())
        raise UsageError(f"{given}: {' '.join(str(problem).split())}") from None


def tensor_parallel(args: TrainArgs) -> int:
    """Ranks that share the matrices of each layer."""
    return args.tensor_parallel if isinstance(args, TensorParallelArgs) else 1


def training_device(args: DeviceArgs) -> torch.device:
    """The device that each rank computes on.

    Raises: UsageError when this machine has none, or it cannot run by `--precision`, `--devices` or `--strategy`.
    """
    try:
        device = find_device(args.accelerator)
    except ValueError as problem:
        raise UsageError(str(problem)) from None
    if args.precision == "16-mixed" and device.type != "cuda":  # Fabric would take bfloat16 instead
        raise UsageError(
            f"--precision 16-mixed needs a CUDA GPU, which --accelerator {args.accelerator} is not here; "
            "use --precision 32-true or bf16-mixed"
        )
    ranks = math.prod(processes(args))
    if device.type == "mps" and (ranks > 1 or args.strategy != "auto"):
        raise UsageError(
            f"--accelerator {args.accelerator} is an Apple GPU (mps) here, which trains on one rank without a "
            f"--strategy, but there are {ranks} with --strategy {args.strategy}; leave them out, or use "
            "--accelerator cpu"
        )
    return device


def processes(args: DeviceArgs) -> tuple[int, int]:
    """Number of processes per machine and of machines: as torchrun or SLURM started them, else as the flags say.

    Raises: UsageError when a flag contradicts the launcher.
    """
    from lightning.fabric.plugins.environments import SLURMEnvironment, TorchElasticEnvironment

    environment = os.environ
    if TorchElasticEnvironment.detect():
        starter, here = "torchrun", int(environment["LOCAL_WORLD_SIZE"])
        machines = int(environment["WORLD_SIZE"]) // here
    elif SLURMEnvironment.detect() and int(environment["SLURM_NTASKS"]) > 1:
        starter, machines = "SLURM", int(environment.get("SLURM_NNODES", 1))
        here = int(environment["SLURM_NTASKS"]) // machines
    else:
        return args.devices, args.num_nodes
    for flag, value, found in (("devices", args.devices, here), ("num_nodes", args.num_nodes, machines)):
        if value not in (1, found):
            raise UsageError(f"--{flag} {value}, but {starter} started {found}; leave out --{flag}")
    return here, machines


def _strategy(args: TrainArgs, world_size: int) -> Any:
    from lightning.fabric.strategies import DDPStrategy, DeepSpeedStrategy, ModelParallelStrategy

    timeout = timedelta(seconds=patience(RANK) + COLLECTIVE_GRACE)
    if args.strategy == "fsdp":
        size = tensor_parallel(args)
        return ModelParallelStrategy(shard_layers, world_size // size, tensor_parallel_size=size, timeout=timeout)
    if args.strategy == "deepspeed":
        strategy = DeepSpeedStrategy(stage=2, timeout=timeout)
        strategy.config = {**(strategy.config or {}), "gradient_clipping": args.gradient_clip_val}
        return strategy
    if args.strategy == "ddp" or world_size > 1:
        # Buffers are not broadcast before a forward pass: they are constants, and ranks may run unequally many passes.
        known = inspect.signature(nn.parallel.DistributedDataParallel).parameters  # renamed in torch 2.13
        option = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
        options: dict[str, Any] = {option: False}
        return DDPStrategy(timeout=timeout, **options)
    return "auto"


def launch(fabric: Any, args: TrainArgs) -> Any:
    """Fabric with the processes of all ranks started. Raises: RunFailure when they do not all connect in time."""
    try:
        fabric.launch()
    except torch.distributed.DistError as problem:
        line = " ".join(str(problem).split())[:200]
        raise RunFailure(f"the ranks did not all start within {RANK} {patience(RANK):g} s: {line}") from None
    leave_at_exit()
    return fabric


def leave_at_exit() -> None:
    """Leave a group of gloo before the interpreter ends: a thread of it that outlives that aborts the process."""

    def leave() -> None:
        if torch.distributed.is_initialized() and torch.distributed.get_backend() == "gloo":
            torch.distributed.destroy_process_group()

    atexit.register(leave)


def check_same(fabric: Any, args: TrainArgs) -> None:
    """Check that every rank has rank 0's flags and data.

    Raises: UsageError on rank 0, naming the rank and the flag or file; the others exit with the same status.
    """
    if fabric.world_size == 1:
        return
    folders = args.data_dirs if isinstance(args, DataArgs | DataSetsArgs) else []
    paths = [(number, path) for number, folder in enumerate(folders) for path in sorted(Path(folder).glob("*.pt"))]
    paths = [(number, path) for number, path in paths if "logprobs" not in path.name]  # what runs keep next to the data
    files = {f"{path.name}{f' of set {n + 1}' if len(folders) > 1 else ''}": content_hash(path) for n, path in paths}
    flags = {name: value for name, value in to_dict(args).items() if name not in OWN_TO_RANK}
    gathered: list[Any] = [None] * fabric.world_size
    torch.distributed.all_gather_object(gathered, (flags, files))
    own_flags, own_files = gathered[0]
    for rank, (their_flags, their_files) in enumerate(gathered):
        flag, file = _first_difference(own_flags, their_flags), _first_difference(own_files, their_files)
        if not (flag or file):
            continue
        if not fabric.is_global_zero:
            sys.exit(UsageError.exit_status)
        if flag:
            one, other = own_flags.get(flag), their_flags.get(flag)
            raise UsageError(f"rank {rank} has --{flag} {other}, rank 0 --{flag} {one}; give all ranks the same flags")
        raise UsageError(
            f"--data_dir {' '.join(folders)}: {file} of rank {rank} differs from rank 0's; "
            "copy the same prepared data to every machine"
        )


def _first_difference(one: dict[str, Any], other: dict[str, Any]) -> str | None:
    return next((name for name in [*one, *other] if one.get(name) != other.get(name)), None)
