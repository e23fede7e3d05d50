"""Ranks: how several processes start, share a model's weights, and stop when one of them is lost.

Strategies are Fabric's: `ddp` keeps a whole model on each rank and sums gradients; `fsdp` splits weights, gradients and
optimiser state over the ranks, layer by layer (FSDP2, `torch.distributed.fsdp.fully_shard`); `deepspeed` is handed to
Fabric by its name. Processes come from `--devices`, from torchrun, or from SLURM.

A collective waits for ranks that are dead or stuck, for as long as its time-out. So each rank has a `Watch`: a thread
that tells the others, through a small key-value store on rank 0, that it lives and how far it is. Whoever sees that one
of them is gone or late says which in one line and ends its process.

Left out: tensor, pipeline and sequence parallelism, elastic restarts.
"""

from __future__ import annotations

import atexit
import copy
import inspect
import json
import logging
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightrlhf.common.args import RunFailure, TrainArgs, UsageError, to_dict
from lightrlhf.common.checkpoint import sha256
from lightrlhf.common.model import transformer_layers

BEAT = 2.0  # seconds between two signs of life
SILENCE = 40.0  # a rank that gave none for so long is gone; long enough for a thread that gets no turn
DOUBT = 4 * BEAT  # the same once a collective has failed
GRACE = 60  # seconds by which a collective's own time-out comes after ours, which has the better message
OWN_TO_RANK = {"data_dir", "log_dir", "resume_from", "config"}  # paths may differ between machines


# ------------------------------------------------------------------------------------------------------------- start
def make_fabric(args: TrainArgs) -> Any:
    """Fabric for these arguments, not launched yet. Raises: UsageError naming the flags when they do not fit."""
    from lightning.fabric import Fabric
    from lightning.fabric.utilities.exceptions import MisconfigurationException

    for name in ("lightning.fabric", "lightning.pytorch"):
        logging.getLogger(name).setLevel(logging.WARNING)  # six lines about each start
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a stack of C++ where a connection is lost
    devices, num_nodes = processes(args)
    chosen = {"accelerator": args.accelerator, "precision": args.precision, "devices": devices, "num_nodes": num_nodes}
    try:
        return Fabric(**chosen, strategy=_strategy(args, devices * num_nodes))
    except (ValueError, RuntimeError, MisconfigurationException) as problem:
        given = " ".join(f"--{name} {value}" for name, value in [*chosen.items(), ("strategy", args.strategy)])
        raise UsageError(f"{given}: {' '.join(str(problem).split())}") from None


def processes(args: TrainArgs) -> tuple[int, int]:
    """Processes on each machine and machines: as torchrun or SLURM has started them, else as the flags say.

    Raises: UsageError when flags are given too and say something else.
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
            raise UsageError(f"--{flag} {value}, but {starter} has made it {found}; leave --{flag} out")
    return here, machines


def _strategy(args: TrainArgs, world_size: int) -> Any:
    from lightning.fabric.strategies import DDPStrategy, DeepSpeedStrategy, ModelParallelStrategy

    timeout = timedelta(seconds=args.ddp_timeout + GRACE)
    if args.strategy == "fsdp":
        return ModelParallelStrategy(shard_layers, world_size, tensor_parallel_size=1, timeout=timeout)
    if args.strategy == "deepspeed":
        strategy = DeepSpeedStrategy(stage=2, timeout=timeout)
        strategy.config["gradient_clipping"] = args.gradient_clip_val
        return strategy
    if args.strategy == "ddp" or world_size > 1:
        # No buffers are sent round before a forward pass: they are constants, and ranks may run unequally many passes.
        known = inspect.signature(nn.parallel.DistributedDataParallel).parameters  # renamed in torch 2.13
        option = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
        return DDPStrategy(timeout=timeout, **{option: False})
    return "auto"


def launch(fabric: Any, args: TrainArgs) -> None:
    """Start the processes and let them find each other. Raises: RunFailure when they do not."""
    try:
        fabric.launch()
    except torch.distributed.DistError as problem:
        line = " ".join(str(problem).split())[:200]
        raise RunFailure(f"the ranks did not all start within --ddp_timeout {args.ddp_timeout} s: {line}") from None


def check_same(fabric: Any, args: TrainArgs) -> None:
    """Every rank must have rank 0's flags and data.

    Raises: UsageError on rank 0, naming the rank and the flag or file; the others leave with the same exit status.
    """
    files = {path.name: sha256(path) for path in sorted(Path(args.data_dir).glob("*.pt"))}
    flags = {name: value for name, value in to_dict(args).items() if name not in OWN_TO_RANK}
    found: list[Any] = [None] * fabric.world_size
    torch.distributed.all_gather_object(found, (flags, files))
    for rank, (their_flags, their_files) in enumerate(found):
        flag, file = _first_difference(found[0][0], their_flags), _first_difference(found[0][1], their_files)
        if not (flag or file):
            continue
        if not fabric.is_global_zero:
            sys.exit(UsageError.exit_status)
        if flag:
            one, other = found[0][0].get(flag), their_flags.get(flag)
            raise UsageError(f"rank {rank} has --{flag} {other}, rank 0 --{flag} {one}; give all ranks the same flags")
        raise UsageError(
            f"--data_dir {args.data_dir}: {file} of rank {rank} is not that of rank 0; "
            "copy the same prepared data to every machine"
        )


def _first_difference(one: dict[str, Any], other: dict[str, Any]) -> str | None:
    return next((name for name in [*one, *other] if one.get(name) != other.get(name)), None)


# ----------------------------------------------------------------------------------------------------- split weights
def shard_layers(module: nn.Module, mesh: Any) -> nn.Module:
    """Split a model over the ranks of a mesh: each transformer layer by itself, what is left in one piece.

    A layer is gathered when its forward or backward pass begins and given up behind it. What is left (embeddings, last
    norm, head) stays whole from the forward pass of the outermost module to its backward pass, so that its forward may
    call parts of the model as it likes.
    """
    from torch.distributed.fsdp import fully_shard

    warnings.filterwarnings("ignore", message=".*returned a view tensor")  # nobody writes into what a model returns
    mesh = mesh["data_parallel"]  # Fabric's has a second dimension for tensor parallelism, of one rank here
    for layer in transformer_layers(module):
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    fully_shard(module, mesh=mesh, reshard_after_forward=False)
    module._get_fsdp_state()._lazy_init()  # otherwise done by whichever part runs first, in sampling not the outermost
    return module


def is_split(module: nn.Module) -> bool:
    """Whether a rank holds only its part of the weights at the moment."""
    from torch.distributed.tensor import DTensor

    return any(isinstance(p, DTensor) for p in module.parameters())


@contextmanager
def whole(module: nn.Module) -> Iterator[None]:
    """Inside, every rank holds all weights of a split model, and forward passes wait for nobody.

    For sampling, where ranks take unequally many passes. All ranks enter and leave together. Does nothing to a model
    that is not split.
    """
    from torch.distributed.fsdp import FSDPModule

    if not is_split(module):
        yield
        return
    parts = [part for part in module.modules() if isinstance(part, FSDPModule)]  # the outermost first
    for part in parts:
        part.set_reshard_after_forward(False, recurse=False)
        part.unshard()
    try:
        yield
    finally:
        for part in parts:
            part.set_reshard_after_forward(part is not parts[0], recurse=False)
            part.reshard()


def gathered(value: Any, keep: bool = True) -> Any:
    """A tensor, or each in a tree of dicts and lists, on the CPU, put together from all ranks' parts.

    A rank that does not `keep` takes part and has None for each tensor.
    """
    from torch.distributed.tensor import DTensor

    if isinstance(value, dict):
        return {key: gathered(part, keep) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(gathered(part, keep) for part in value)
    if not isinstance(value, Tensor):
        return value
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return value.detach().cpu() if keep else None


def split_like(state: dict[str, Any], parameters: list[nn.Parameter]) -> dict[str, Any]:
    """An optimiser's state with each tensor of a parameter's shape split as that parameter is."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    def part(value: Any, parameter: nn.Parameter) -> Any:
        if isinstance(parameter, DTensor) and isinstance(value, Tensor) and value.shape == parameter.shape:
            device = parameter.device_mesh.device_type
            return distribute_tensor(value.to(device), parameter.device_mesh, parameter.placements, src_data_rank=None)
        return value

    order = [index for group in state["param_groups"] for index in group["params"]]
    split = {
        index: {name: part(value, parameter) for name, value in state["state"][index].items()}
        for index, parameter in zip(order, parameters, strict=True)
        if index in state["state"]
    }
    return {**state, "state": split}


def hollow_copy(module: nn.Module) -> nn.Module:
    """A copy of a module whose tensors have shapes but no memory, to be filled by `filled`."""
    tensors = [*module.parameters(), *module.buffers()]
    memo: dict[int, Any] = {id(tensor): tensor.detach().to("meta") for tensor in tensors}
    for parameter in module.parameters():
        memo[id(parameter)] = nn.Parameter(memo[id(parameter)], requires_grad=parameter.requires_grad)
    return copy.deepcopy(module, memo)


def filled(hollow: nn.Module, module: nn.Module, keep: bool) -> nn.Module:
    """An unsplit copy of a split module on the CPU, tied weights still tied.

    All ranks take part; one that does not `keep` gets the hollow one back.
    """
    once: dict[int, Tensor] = {}
    state = {}
    for name, tensor in [*module.named_parameters(remove_duplicate=False), *module.named_buffers()]:
        if id(tensor) not in once:
            once[id(tensor)] = gathered(tensor, keep)
        state[name] = once[id(tensor)]
    if not keep:
        return hollow
    copied = copy.deepcopy(hollow)
    copied.load_state_dict({name: state[name] for name in copied.state_dict()}, assign=True)
    return copied


# ------------------------------------------------------------------------------------------------------------- watch
class Watch(threading.Thread):
    """Tells the other ranks that this one lives and how far it is, and ends it when one of them is lost.

    A rank is lost when its process is gone, when it has ended early, or when others have waited for it for `patience`
    seconds. The first to notice prints which and where; exit status 1.
    """

    def __init__(self, fabric: Any, patience: float, good: Callable[[], str]) -> None:
        super().__init__(daemon=True, name="watch")
        self.rank, self.world_size, self.patience, self.good = fabric.global_rank, fabric.world_size, patience, good
        self.first_here = fabric.local_rank == 0
        self.where = "its start"
        self.arrivals = 0  # how many meeting points of all ranks this one has come to
        self.waiting_since: float | None = None
        self.in_doubt: str | None = None  # what a failed collective said
        self._closing = threading.Event()
        self._beats = 0
        self.store = self._connect(fabric)
        self._beat()
        fabric.barrier()
        atexit.register(self._end_early)
        _relieve_observer()
        self.start()

    def _connect(self, fabric: Any) -> Any:
        host, options = os.environ["MASTER_ADDR"], {"timeout": timedelta(seconds=SILENCE), "wait_for_workers": False}
        server = torch.distributed.TCPStore(host, 0, is_master=True, **options) if self.rank == 0 else None
        port = fabric.broadcast(server.port if server else None)
        return server or torch.distributed.TCPStore(host, port, is_master=False, **options)

    @contextmanager
    def waiting(self, counted: bool) -> Iterator[None]:
        """Around what may wait for other ranks; `counted` where every rank comes equally often.

        A collective that fails inside is explained: a run may meet the others outside its phases, too.
        """
        self.arrivals += counted
        self.waiting_since = time.monotonic()
        try:
            yield
        except RuntimeError as problem:
            self.explain(problem)
            raise
        finally:
            self.waiting_since = None

    def explain(self, problem: Exception) -> None:
        """A collective failed: find out whom it waited for, and end. Returns when it was no collective."""
        text = str(problem)
        if isinstance(problem, torch.distributed.DistError) or "gloo" in text or "NCCL" in text:
            self.in_doubt = " ".join(text.split())[:200]
            self.join(SILENCE)

    def close(self) -> None:
        """The end of a run that went well; all ranks come here."""
        self._closing.set()  # from now on a store that is gone is no news
        self.join()
        atexit.unregister(self._end_early)
        torch.distributed.barrier()

    # ------------------------------------------------------------------------------------------------- the thread
    def run(self) -> None:
        seen = {rank: (-1, time.monotonic()) for rank in range(self.world_size)}
        doubted_since = None
        while not self._closing.wait(BEAT):
            try:
                self._beat()
                reports = self._reports()
            except RuntimeError:  # rank 0, which has the store
                if not self._closing.is_set():
                    self._end("rank 0 is gone", claim=self.rank == 1 or self.first_here)
                return
            now = time.monotonic()
            for rank, report in enumerate(reports):
                if report["beats"] != seen[rank][0]:
                    seen[rank] = report["beats"], now
            ended = [rank for rank, report in enumerate(reports) if report["ended"]]
            silent = [rank for rank, (_, last) in seen.items() if now - last > (DOUBT if self.in_doubt else SILENCE)]
            if ended:
                self._end(f"rank {ended[0]} stopped at {reports[ended[0]]['where']}; it says above why")
            if silent:
                self._end(
                    f"rank {silent[0]} is gone (killed, or its machine is); last seen at {reports[silent[0]]['where']}"
                )
            if self.waiting_since and now - self.waiting_since > self.patience:
                self._end(f"{_late(reports)} within --ddp_timeout {self.patience:g} s")
            if self.in_doubt:
                doubted_since = doubted_since or now
                if now - doubted_since > 2 * DOUBT:
                    self._end(f"{_late(reports)}: {self.in_doubt}")

    def _beat(self, ended: bool = False) -> None:
        self._beats += 1
        report = {"beats": self._beats, "arrivals": self.arrivals, "where": self.where, "ended": ended}
        self.store.set(f"rank {self.rank}", json.dumps(report))

    def _reports(self) -> list[dict[str, Any]]:
        return [json.loads(text) for text in self.store.multi_get([f"rank {r}" for r in range(self.world_size)])]

    def _end(self, verdict: str, claim: bool | None = None) -> None:
        """Say what happened, if no other rank has said it, and end this process."""
        if claim is None:
            try:
                claim = self.store.compare_set("verdict", "", f"{self.rank}") == f"{self.rank}".encode()
                self._beat(ended=True)
            except RuntimeError:
                claim = True
        if claim:
            print(f"\nerror: {verdict}{self.good()}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        if self.rank == 0:
            self._linger()
        os._exit(1)  # the main thread may hang in a collective for ever

    def _end_early(self) -> None:
        """This process ends before its run does: tell the others, so that they need not guess."""
        self._closing.set()
        try:
            self._beat(ended=True)
            if self.rank == 0:
                self._linger()
        except RuntimeError:
            return

    def _linger(self) -> None:
        """Rank 0 has the store: it stays until the others have read why they end."""
        until = time.monotonic() + DOUBT
        while time.monotonic() < until and not all(report["ended"] for report in self._reports()):
            time.sleep(0.1)


def _late(reports: list[dict[str, Any]]) -> str:
    fewest = min(report["arrivals"] for report in reports)
    late = [f"rank {rank} (at {r['where']})" for rank, r in enumerate(reports) if r["arrivals"] == fewest]
    if len(late) == len(reports):
        return "the ranks did not get on together, " + ", ".join(late)
    return f"{' and '.join(late)} did not arrive where the others wait"


def _relieve_observer() -> None:
    """Stop Fabric's thread that kills all processes when a child ends: the watch does that and says why."""
    for thread in threading.enumerate():
        if thread.name == "child-process-observer":
            thread._run = lambda: True
