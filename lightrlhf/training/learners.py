"""Learners: trained models with their optimisers and schedules; gradients that are clipped, scaled and checked.

Left out: how models are sharded (`models/sharding.py`), and the scale of losses in float16 (`loss_scale.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from lightrlhf.cli.errors import RunFailure, UsageError
from lightrlhf.cli.groups import FrozenModelsArgs, TrainArgs
from lightrlhf.maths.finite import not_finite
from lightrlhf.models import frozen
from lightrlhf.models.offload import REFUSAL, offload
from lightrlhf.models.quantisation import is_quantised
from lightrlhf.models.roles import Role, count_parameters
from lightrlhf.models.sharding import clip_gradients, full_tensors, is_sharded, materialize, meta_copy, shard_like
from lightrlhf.models.tensor_parallel import check_splittable
from lightrlhf.training.dry_run import DryRun
from lightrlhf.training.faults import first_not_finite
from lightrlhf.training.loss_scale import LossScale
from lightrlhf.training.optimizers import make_optimizer, make_schedule
from lightrlhf.training.order import Order
from lightrlhf.training.progress import Progress
from lightrlhf.training.ranks import Ranks
from lightrlhf.training.resume import Learned, load_trained, trained_weights


class Learner(NamedTuple):
    """A trained model with its optimiser and learning-rate schedule."""

    module: Any  # as Fabric wrapped it
    optimizer: Any
    scheduler: Any


class Learners:
    """The learners of a run by name. resumed: the state of a checkpoint; last_good: returns the end of an error, with
    the last good checkpoint."""

    def __init__(
        self,
        args: TrainArgs,
        ranks: Ranks,
        order: Order,
        progress: Progress,
        last_good: Callable[[], str],
        resumed: Mapping[str, Any] | None = None,
        dry: DryRun | None = None,
    ) -> None:
        self.args, self.ranks, self.fabric, self.order, self.progress = args, ranks, ranks.fabric, order, progress
        self.last_good, self.resumed, self.dry = last_good, resumed, dry
        if isinstance(args, FrozenModelsArgs) and args.offload and ranks.device.type in ("cpu", "mps"):
            raise UsageError(REFUSAL)
        self.num_frozen = 0  # models that share no weights with a trained one
        self.by_name: dict[str, Learner] = {}
        self.parameters: dict[str, tuple[int, int]] = {}  # of each learner: all, and the trained ones
        scaler = getattr(self.fabric.strategy.precision, "scaler", None)
        self.loss_scale = LossScale(scaler) if scaler is not None else None  # with --precision 16-mixed
        if self.loss_scale and resumed and "loss_scale" in resumed:
            self.loss_scale.load(resumed["loss_scale"])
        self._rows: list[Tensor] = []  # that backward passes of a step have read, (b,) each
        self._losses: list[tuple[Tensor, Tensor | None]] = []  # since the last optimiser step, with their rows (b,)
        self._step_of_rows = -1
        self._never_finite: set[str] = set()  # names of buffers that hold infinities from the start, as masks do
        self._meta_copies: dict[str, nn.Module] = {}  # of sharded models, to save full ones

    def __getitem__(self, name: str) -> Learner:
        return self.by_name[name]

    # -------------------------------------------------------------------------------------------------- set-up
    def setup(self, name: str, module: nn.Module, learning_rate: float, num_updates: int) -> nn.Module:
        """Wrap a trainable module with its optimiser and schedule, which `optimize(name)` steps."""
        self.parameters[name] = count_parameters(module)
        if self.order.planned_steps:
            words = f"the number of optimiser steps of {name} in each step is"
            self.order.began.fix(f"updates_of_{name}", num_updates / self.order.planned_steps, words)
        if self.resumed:
            load_trained(self.resumed["learned"][name], module, str(self.args.resume_from))
        wrapped, optimizer = self._wrap(name, module, learning_rate)
        wrapped.train()
        warmup = self._warmup(num_updates)
        scheduler = make_schedule(self.args.lr_scheduler_type, optimizer.optimizer, warmup, num_updates)
        if self.resumed:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            optimizer.load_state_dict(shard_like(self.resumed["optimizers"][name], parameters))
            scheduler.load_state_dict(self.resumed["schedulers"][name])
            for group, rate, factor in zip(optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas):
                group["lr"] = rate * factor(scheduler.last_epoch)  # of a run that now has more steps
        self.by_name[name] = Learner(wrapped, optimizer, scheduler)
        if self.dry:
            self.dry.watch(name, wrapped)
        whole = getattr(wrapped.module, "model", wrapped.module)
        self._never_finite |= set(not_finite(whole.named_buffers()))
        return wrapped

    def _wrap(self, name: str, module: nn.Module, learning_rate: float) -> tuple[Any, Any]:
        """A module and its optimiser as Fabric wraps them."""
        args = self.args
        if self.ranks.tensor_parallel > 1:
            check_splittable(cast(Any, module).model, self.ranks.tensor_parallel)
        if args.strategy == "fsdp":
            self._meta_copies[name] = meta_copy(module)
        if args.strategy == "deepspeed":
            if self.by_name:
                raise UsageError("--strategy deepspeed trains one model at a time; use --strategy fsdp")
            wrapped, optimizer = self.fabric.setup(module, make_optimizer(args, module, learning_rate))
        else:
            wrapped = self.fabric.setup_module(module)  # first, for sharding replaces the parameters
            optimizer = self.fabric.setup_optimizers(make_optimizer(args, module, learning_rate))
        return wrapped, optimizer

    def _warmup(self, num_updates: int) -> int:
        """Steps of the warm-up; notes one that takes more than a third of the run."""
        args, flag = self.args, "lr_warmup_steps" if self.args.lr_warmup_steps is not None else "lr_warmup_ratio"
        steps, ratio = args.lr_warmup_steps, args.lr_warmup_ratio or 0.0
        is_long = 3 * steps > num_updates if steps is not None else 3 * ratio > 1  # a ratio is rounded up
        if is_long and args.lr_scheduler_type != "constant" and not self.by_name:
            self.ranks.print0(
                f"warning: --{flag} {getattr(args, flag)} warms up for more than a third of the {num_updates:,} "
                "optimiser steps of this run; give a smaller one, such as --lr_warmup_ratio 0.03"
            )
        return math.ceil(ratio * num_updates) if steps is None else steps

    def freeze(self, module: nn.Module) -> nn.Module:
        """Freeze a module: no gradients, eval mode, unsharded on this rank's device.

        Unless it shares weights with a trained model, it is held in `--base_dtype`, and with `--offload` on the host.
        """
        module = module.requires_grad_(False).eval()
        args, device = self.args, self.ranks.device
        shares = isinstance(module, Role) and (module.shares or module.borrows)
        if isinstance(args, FrozenModelsArgs) and not shares:
            self.num_frozen += 1
            if args.base_dtype == "bfloat16" and isinstance(module, Role) and not is_quantised(module.model):
                frozen.hold(module.model)
            if args.offload:
                offload(module, device)
                return module
        return module.to(device)

    def check_frozen(self) -> None:
        """Raises: UsageError when flags of frozen models are given, and all of them share weights with trained ones."""
        args = self.args
        if isinstance(args, FrozenModelsArgs) and not self.num_frozen:
            rounds = args.base_dtype == "bfloat16" and args.finetune_mode != "lora"
            if args.offload or rounds:
                given = "--offload True" if args.offload else "--base_dtype bfloat16"
                raise UsageError(
                    f"{given}: this run has no frozen model, or they share the weights of the policy; leave it out"
                )

    # -------------------------------------------------------------------------------------------------- updates
    def autocast(self) -> AbstractContextManager[None]:
        """Autocast to the run's precision, for passes that do not go through a wrapped module."""
        return self.fabric.autocast()

    @contextmanager
    def accumulate(self, module: nn.Module, enabled: bool) -> Iterator[None]:
        """Accumulate gradients: around the passes of a micro-batch; while `enabled`, ranks do not sum gradients yet."""
        with self.ranks.waiting(counted=False):
            if enabled and self.ranks.world_size > 1:
                with self.fabric.no_backward_sync(module):
                    yield
            else:
                yield

    def backward(self, loss: Tensor, row: Tensor | None = None) -> None:
        """Backward pass of a sum divided by its global count; undoes the averaging of gradients over ranks.

        row: (b,) numbers in the data of the micro-batch's rows, on the host, by which errors name them. Whether the
        loss is finite is read before the next optimiser step, so that no micro-batch waits for the one before.
        """
        if self._step_of_rows != self.progress.step:
            self._rows, self._step_of_rows = [], self.progress.step
        if row is not None:
            self._rows.append(row)
        self._losses.append((loss.detach(), row))
        self.fabric.backward(loss * self.ranks.world_size)

    def _check_losses(self, losses: Sequence[float]) -> None:
        """Check the losses of the backward passes since the last optimiser step. Raises: RunFailure."""
        passes, self._losses = self._losses, []
        for loss, (_, row) in zip(losses, passes, strict=True):
            if not math.isfinite(loss):
                named = "" if row is None else self.order.describe(row.tolist())
                where = f"at step {self.progress.step + 1}{named}"
                remedy = "; 16-mixed ends at 65504, try --precision bf16-mixed or 32-true" if self.loss_scale else ""
                raise RunFailure(f"loss is {loss} {where}{remedy}{self.last_good()}")

    def optimize(self, name: str) -> float:
        """Clip gradients, step optimiser and schedule of `name`; returns the gradient norm before clipping.

        With `--precision 16-mixed` a step whose gradients are not finite is skipped, and its norm is NaN.
        Raises: RunFailure, naming the step and its rows, when a loss or a gradient is not finite (with 16-mixed: a
        gradient in many steps in a row); the weights are unchanged then.
        """
        module, optimizer, scheduler = self.by_name[name]
        parameters = [p for p in module.parameters() if p.grad is not None]
        is_scaled = self.loss_scale is not None and bool(parameters)
        with self.ranks.waiting():
            if self.loss_scale and is_scaled:
                self.loss_scale.unscale(optimizer.optimizer)
            total = clip_gradients(parameters, self.args.gradient_clip_val or math.inf)
        norm, *losses = torch.stack([total, *(loss.to(total) for loss, _ in self._losses)]).tolist()
        self._check_losses(losses)
        is_finite, step = math.isfinite(norm), f"step {self.progress.step + 1}"
        if is_finite:
            optimizer.step()
        elif not is_scaled:
            where = f"at {step}{self._describe_step()}{self.last_good()}"
            raise RunFailure(f"{name} gradient norm is {norm} {where}")
        optimizer.zero_grad(set_to_none=True)
        if self.loss_scale and is_scaled:
            if not self._has_gradients():  # others, such as a critic's, were computed with this scale
                self.loss_scale.update()
            if problem := self.loss_scale.count(name, is_finite):
                raise RunFailure(f"{step}: {problem}{self.last_good()}")
        scheduler.step()
        return norm if is_finite else math.nan

    def _describe_step(self) -> str:
        """The rows that this step's backward passes have read on all ranks, as part of an error that all raise."""
        own = [number for row in self._rows for number in row.tolist()]
        return self.order.describe(number for numbers in self.ranks.gather(own) for number in numbers)

    def _has_gradients(self) -> bool:
        return any(p.grad is not None for learner in self.by_name.values() for p in learner.module.parameters())

    def skip_updates(self, number: int) -> None:
        """Advance the schedules past skipped updates."""
        for learner in self.by_name.values():
            for _ in range(number):
                learner.scheduler.step()

    def learning_rate(self, name: str | None = None) -> float:
        """Learning rate of the next update of a learner; of the first one when not named."""
        return self.by_name[name or next(iter(self.by_name))].scheduler.get_last_lr()[0]

    # --------------------------------------------------------------------------------------------- what is saved
    def roles(self) -> dict[str, Any]:
        """The trained models as loaded, without what Fabric wraps them in."""
        return {name: learner.module.module for name, learner in self.by_name.items()}

    def num_trainable(self) -> int:
        """Number of parameters that are trained; with `fsdp` of this rank's shards."""
        modules = [learner.module for learner in self.by_name.values()]
        return sum(p.numel() for module in modules for p in module.parameters() if p.requires_grad)

    def check_finite(self, module: nn.Module, extra: dict[str, Any]) -> None:
        """Raises: RunFailure on every rank when the model, its optimisers or the loop's state are not finite on any."""
        optimizers = {name: learner.optimizer for name, learner in self.by_name.items()}
        found = first_not_finite({**self.roles(), "model": module}, optimizers, extra, self._never_finite)
        problems = self.ranks.gather_processes(found)
        for rank, problem in enumerate(problems):
            if problem:
                on = f" on rank {rank}" if len(problems) > 1 else ""
                raise RunFailure(
                    f"{problem} is not finite{on} after step {self.progress.step}{self._describe_step()}, so no "
                    f"checkpoint is written{self.last_good()}"
                )

    def full(self, module: Any) -> Any:
        """The module itself, or a full copy of a sharded one, which all ranks gather."""
        for name, meta in self._meta_copies.items():
            if self.by_name[name].module.module is module and is_sharded(module):
                return materialize(meta, module, keep=self.ranks.is_first)
        return module

    def gather_trained(self) -> Learned:
        """Trained weights by parameter, by learner, gathered on the first rank's CPU."""
        return {name: trained_weights(role, self.ranks.is_first) for name, role in self.roles().items()}

    def state(self) -> dict[str, Any]:
        """The state to resume from, besides the weights."""
        keep, state = self.ranks.is_first, {}
        state["optimizers"] = {
            name: full_tensors(learner.optimizer.state_dict(), keep) for name, learner in self.by_name.items()
        }
        state["schedulers"] = {name: learner.scheduler.state_dict() for name, learner in self.by_name.items()}
        return state | ({"loss_scale": self.loss_scale.state()} if self.loss_scale else {})
