"""Argument groups that programs share: training, model and generation flags, and the checks on their values.

Each program has one frozen dataclass built from these. The docstring of a field is its help. `__post_init__` refuses
bad combinations with one line that names the flag, the value and the remedy, before any model is loaded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from importlib.util import find_spec
from numbers import Integral, Real
from os import PathLike, fspath
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

from lightrlhf.cli.addresses import check_addresses
from lightrlhf.cli.errors import UsageError
from lightrlhf.cli.functions import check_columns, load_function
from lightrlhf.cli.hub import check_repository
from lightrlhf.cli.latest import follow_latest, why_missing
from lightrlhf.cli.lists import PATHS, TEXTS, items_of, names
from lightrlhf.cli.packages import check_package

TYPES: dict[Any, tuple[type, str]] = {
    int: (Integral, "a whole number"),
    float: (Real, "a finite number"),
    bool: (bool, "True or False"),
    str: (str, "a text"),
}
LARGEST = 2**53  # of whole numbers; every smaller one is a float, too
GGUF, PACKAGE = ".gguf", "package:"  # how a name of a model file ends, and of a package that has one begins
RARE = {"rare": True}  # metadata of flags that `--help` leaves to `--help_all`
INPUT = {"input": True}  # metadata of what a program reads; `--help` shows it first
STARTS = INPUT | {"required": "a model"}  # metadata of flags of which a program needs one
SCORES = INPUT | {"required": "a scorer"}
LOWER_IS_BETTER = {"loss", "preference_loss", "nll", "perplexity", "kl"}  # last parts of metrics' names
HIGHER_IS_BETTER = {"accuracies", "margins", "score", "reward", "gold", "win_rate", "success"}


@dataclass(frozen=True, kw_only=True)
class SealArgs:
    """Data."""

    verify: bool = field(default=True, metadata=RARE)
    """Compare what is read of prepared data with the hashes of its `manifest.json`."""


@dataclass(frozen=True, kw_only=True)
class DataArgs(SealArgs):
    """Data."""

    data_dir: str = field(default="data", metadata=INPUT)
    """Folder of the `.pt` splits that a `prepare_data.py` wrote."""

    @property
    def data_name(self) -> str:
        """The folder, as errors name it."""
        return self.data_dir


@dataclass(frozen=True, kw_only=True)
class DataSetsArgs(SealArgs):
    """Data."""

    data_dir: list[str] | str = field(default="data", metadata=PATHS | INPUT)
    """Folder of the `.pt` splits of a `prepare_data.py`, or several."""
    data_weights: list[float] = field(default_factory=list, metadata=RARE)
    """Relative chances of the sets of `data_dir` to be drawn from; in proportion to their rows when not given."""

    @property
    def data_dirs(self) -> list[str]:
        """The sets' folders."""
        return [self.data_dir] if isinstance(self.data_dir, str) else self.data_dir

    @property
    def data_name(self) -> str:
        """The sets' folders, as errors name them."""
        return " + ".join(self.data_dirs)

    def check_data(self) -> None:
        """Make one folder a text. Raises: ValueError, one line, for folders or weights that cannot be meant."""
        given: Any = self.data_dir
        folders = list(given) if isinstance(given, list | tuple) else [given]
        if not folders or not all(isinstance(folder, str | PathLike) for folder in folders):
            raise ValueError(f"--data_dir {given!r} is not a folder or a list of folders")
        folders = [fspath(folder) for folder in folders]
        object.__setattr__(self, "data_dir", folders[0] if len(folders) == 1 else folders)
        twice = next((folder for folder in folders if folders.count(folder) > 1), None)
        if twice is not None:
            raise ValueError(f"--data_dir {twice} is given twice; give it once, with a larger one of --data_weights")
        weights = " ".join(map(str, self.data_weights))
        if self.data_weights and len(self.data_weights) != len(folders):
            raise ValueError(f"--data_weights {weights}: give {len(folders)}, one for each folder of --data_dir")
        if not all(math.isfinite(weight) and weight > 0 for weight in self.data_weights):
            raise ValueError(f"--data_weights {weights} must be finite numbers above 0")


@dataclass(frozen=True, kw_only=True)
class DryRunArgs:
    """Run.

    The flag of every program that can be tried before its work is done. The line above is the title of these flags in
    `--help`, under which those of `RunArgs` follow.
    """

    dry_run: bool = False
    """Do two steps or a batch, print what was done, and write nothing."""


@dataclass(frozen=True, kw_only=True)
class RunArgs(DryRunArgs):
    """Run."""

    experiment_name: str = field(default="lightrlhf", metadata=RARE)
    """Folder below `log_dir` for the runs of one algorithm."""
    log_dir: str = "logs"
    """Root folder of all experiment dirs."""
    output_dir: str | None = None
    """Experiment dir itself, new or empty, instead of one below `log_dir`."""
    resume_from: str | None = None
    """Experiment dir of a run to resume; its arguments become the defaults."""
    seed: int = 42
    """Seed of data order, new weights, dropout and sampling."""
    epochs: int | None = None
    """Passes over the training data; 1 when `max_steps` is not given either."""
    max_steps: int | None = None
    """Steps, over as many epochs as they take, but no more than `epochs`."""
    mini_batch_size: int = 8
    """Examples per optimiser step and device."""
    micro_batch_size: int = 8
    """Examples per forward and backward pass; never changes a gradient."""
    save_interval: int = 500
    """Steps between checkpoints."""
    save_minutes: float = field(default=15.0, metadata=RARE)
    """Minutes between checkpoints that are saved by time, besides those of `save_interval`; 0 disables this."""
    keep_last: int = field(default=2, metadata=RARE)
    """Checkpoints to keep; 0 keeps all."""
    log_interval: int = 5
    """Steps between rows of metrics, each the mean over the steps since the previous row."""
    logger: Literal["tensorboard", "csv", "wandb"] = field(default="tensorboard", metadata=RARE)
    """Where metrics and some samples go besides the files of the run; wandb has an extra, csv has metrics alone."""
    wandb_project: str | None = field(default=None, metadata=RARE)
    """W&B project of the run; the name in `experiment_name` when not given."""
    profile: bool = field(default=False, metadata=RARE)
    """Write `profile.json` and `profile.md`: the time of each phase and the least this machine needs for it."""
    save_dtype: Literal["float32", "bfloat16", "float16"] = field(default="float32", metadata=RARE)
    """Numbers of the weights in checkpoints; a resumed run goes on from its own exact ones all the same."""
    push_to_hub: str | None = None
    """Hub repository OWNER/NAME for the last checkpoint; private if it is new."""


@dataclass(frozen=True, kw_only=True)
class EvalArgs:
    """Evaluation during training."""

    eval_interval: int = 100
    """Steps between evaluations on validation data; 0: none."""
    eval_iters: int | None = field(default=None, metadata=RARE)
    """Micro-batches per evaluation; all data when not given."""
    keep_best: str | None = field(default=None, metadata=RARE)
    """Metric, such as val/loss, whose best checkpoint stays as `best`; min:NAME or max:NAME says what is better."""
    early_stop_patience: int | None = field(default=None, metadata=RARE)
    """Stop after so many values of `keep_best` in a row that are no better than the best."""

    def check_eval(self) -> None:
        """Raises: ValueError, one line, when a value is out of range."""
        check_at_least(self, "eval_interval", 0)
        if self.eval_iters is not None:
            check_at_least(self, "eval_iters", 1)
        if self.early_stop_patience is not None:
            check_at_least(self, "early_stop_patience", 1)
            if self.keep_best is None:
                raise ValueError(
                    f"--early_stop_patience {self.early_stop_patience} needs --keep_best METRIC, such as val/loss"
                )
        if self.keep_best is not None and best_metric(self.keep_best)[0].startswith("val/") and not self.eval_interval:
            raise ValueError(f"--keep_best {self.keep_best} is measured in evaluations; give --eval_interval above 0")


@dataclass(frozen=True, kw_only=True)
class RolloutLogArgs:
    """Kept samples."""

    log_rollouts: int = field(default=8, metadata=RARE)
    """Samples kept of a logged step (`rollouts.jsonl`) and an evaluation (`samples.jsonl`); 30 bytes a token."""

    def check_rollout_log(self) -> None:
        """Raises: ValueError, one line, when the number is below 0."""
        check_at_least(self, "log_rollouts", 0)


@dataclass(frozen=True, kw_only=True)
class OptimizerArgs:
    """Optimiser and schedule."""

    optimizer: Literal["AdamW", "Adam", "AdamW8bit", "PagedAdamW32bit"] = field(default="AdamW", metadata=RARE)
    """Optimiser class of `torch.optim`, or of bitsandbytes: 8-bit state, or state paged out of the GPU's memory."""
    optimizer_beta1: float = field(default=0.9, metadata=RARE)
    """Decay of the first moment."""
    optimizer_beta2: float = field(default=0.95, metadata=RARE)
    """Decay of the second moment."""
    optimizer_eps: float = field(default=1e-6, metadata=RARE)
    """Added to the denominator of the optimiser's step."""
    weight_decay: float = 0.0
    """Decoupled weight decay of matrices, not of biases and norms."""
    gradient_clip_val: float = field(default=1.0, metadata=RARE)
    """Largest global gradient norm; 0 switches clipping off."""
    lr_scheduler_type: Literal["constant", "constant_with_warmup", "linear", "cosine"] = "cosine"
    """Learning-rate schedule (transformers.get_scheduler)."""
    lr_warmup_ratio: float | None = None
    """Share of all steps for a linear warm-up from 0."""
    lr_warmup_steps: int | None = field(default=None, metadata=RARE)
    """Steps of that warm-up, instead of `lr_warmup_ratio`."""

    PRECEDENCE: ClassVar = {"lr_warmup_ratio": "lr_warmup_steps"}  # typed, the first drops a stored second


@dataclass(frozen=True, kw_only=True)
class DeviceArgs:
    """Devices (Lightning Fabric)."""

    accelerator: str = "auto"
    """cpu, cuda, mps, or auto (a GPU if there is one)."""
    devices: int = 1
    """Processes on this machine, one device each."""
    num_nodes: int = field(default=1, metadata=RARE)
    """Machines."""
    strategy: Literal["auto", "ddp", "fsdp", "deepspeed"] = "auto"
    """Whole models on each rank (ddp), sharded ones (fsdp), or DeepSpeed's ZeRO-2."""
    ddp_timeout: int = field(default=1800, metadata=RARE)
    """Seconds that ranks wait for each other before the run ends and names the one that did not come."""
    precision: Literal["32-true", "bf16-mixed", "16-mixed"] = "32-true"
    """Precision of forward and backward passes; weights stay in float32."""


@dataclass(frozen=True, kw_only=True)
class TensorParallelArgs:
    """Devices (Lightning Fabric)."""

    tensor_parallel: int = field(default=1, metadata=RARE)
    """Ranks that share the matrices of each layer and read the same rows, within `strategy` fsdp."""

    def check_tensor_parallel(self) -> None:
        """Raises: ValueError, one line, when layers cannot be split with these flags."""
        check_at_least(self, "tensor_parallel", 1)
        if self.tensor_parallel == 1:
            return
        flag, mode = f"--tensor_parallel {self.tensor_parallel}", getattr(self, "finetune_mode", "all")
        if (strategy := getattr(self, "strategy", "auto")) != "fsdp":
            raise ValueError(f"{flag} needs --strategy fsdp, not {strategy}")
        if mode != "all":
            raise ValueError(f"{flag} cannot split the frozen weights of --finetune_mode {mode}; leave one of them out")


@dataclass(frozen=True, kw_only=True)
class TrainArgs(RunArgs, OptimizerArgs, DeviceArgs):
    """Flags that every training program has."""

    def __post_init__(self) -> None:
        check_types(self)
        if self.dry_run and self.resume_from:
            raise ValueError(
                f"--dry_run True with --resume_from {self.resume_from}: a dry run shows the first step of a new run; "
                "leave one of them out"
            )
        for name in ("micro_batch_size", "mini_batch_size"):
            check_at_least(self, name, 1)
        if self.mini_batch_size % self.micro_batch_size:
            fits = [n for n in range(self.micro_batch_size, 0, -1) if self.mini_batch_size % n == 0][0]
            raise ValueError(
                f"--mini_batch_size {self.mini_batch_size} must be a multiple of --micro_batch_size "
                f"{self.micro_batch_size}; try --micro_batch_size {fits}"
            )
        for name in ("save_interval", "log_interval", "devices", "num_nodes", "ddp_timeout"):
            check_at_least(self, name, 1)
        for name in ("keep_last", "save_minutes", "gradient_clip_val", "weight_decay", "seed"):
            check_at_least(self, name, 0)
        if self.lr_warmup_steps is not None:
            check_at_least(self, "lr_warmup_steps", 0)
        if self.push_to_hub is not None:
            check_repository(self.push_to_hub)
        if self.logger == "wandb":
            check_package("--logger wandb", "wandb")
        if self.wandb_project is not None and self.logger != "wandb":
            raise ValueError(
                f"--wandb_project {self.wandb_project} is of --logger wandb, not {self.logger}; leave it out"
            )
        if self.strategy == "deepspeed" and find_spec("deepspeed") is None:
            raise ValueError("--strategy deepspeed needs the package deepspeed; install it with: pip install deepspeed")
        if self.precision == "16-mixed" and self.strategy in ("fsdp", "deepspeed"):
            raise ValueError(
                f"--precision 16-mixed scales losses, which --strategy {self.strategy} does not support here; "
                "use --precision bf16-mixed or --strategy ddp"
            )
        if self.optimizer in ("AdamW8bit", "PagedAdamW32bit"):
            check_package(f"--optimizer {self.optimizer}", "bitsandbytes")
        if self.optimizer in ("AdamW8bit", "PagedAdamW32bit") and self.strategy in ("fsdp", "deepspeed"):
            raise ValueError(
                f"--optimizer {self.optimizer} cannot be sharded by --strategy {self.strategy}; use --optimizer AdamW"
            )
        if self.lr_warmup_ratio is not None and not 0 <= self.lr_warmup_ratio <= 1:
            raise ValueError(f"--lr_warmup_ratio {self.lr_warmup_ratio} must lie in [0, 1]")
        if self.lr_warmup_steps is not None:
            object.__setattr__(self, "lr_warmup_ratio", None)
        check_positive(self, "optimizer_eps")
        for name in ("optimizer_beta1", "optimizer_beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"--{name} {getattr(self, name)} must lie in [0, 1)")
        for name in ("epochs", "max_steps"):
            if getattr(self, name) is not None:
                check_at_least(self, name, 1)


@dataclass(frozen=True, kw_only=True)
class ModelArgs:
    """Model, and which of its weights are trained."""

    model_name: str | None = field(default=None, metadata=STARTS)
    """Hub name, folder, experiment dir, GGUF file, `package:NAME` (the one in it), or `tiny` (a small new Llama)."""
    trust_remote_code: bool = field(default=False, metadata=RARE)
    """Allow a hub model to run code of its own repository."""
    disable_dropout: bool = field(default=False, metadata=RARE)
    """Set the probability of every dropout module to 0."""
    finetune_mode: Literal["all", "last_layer", "lora"] = "all"
    """Train all weights, last layer and head, or adapters."""
    lora_rank: int = 8
    """Rank of the adapters."""
    lora_alpha: float = 16.0
    """Scale of the adapters: alpha / rank."""
    lora_dropout: float = field(default=0.0, metadata=RARE)
    """Dropout on the input of the adapters."""
    lora_targets: str = field(default="all-linear", metadata=RARE)
    """Modules with adapters, separated by commas; `all-linear`: every linear layer but the head."""
    use_rslora: bool = field(default=False, metadata=RARE)
    """Scale of the adapters: alpha / sqrt(rank), which suits high ranks (rsLoRA)."""
    use_dora: bool = field(default=False, metadata=RARE)
    """Also train the length of each row of the adapted weights (DoRA); not where models share a backbone."""
    init_lora_weights: Literal["default", "gaussian", "orthogonal", "pissa", "olora"] = field(
        default="default", metadata=RARE
    )
    """Initial adapters; pissa and olora: a part of the weights, subtracted again by a frozen adapter."""
    load_in_8bit: bool = field(default=False, metadata=RARE)
    """Frozen weights in 8 bits (bitsandbytes), with `finetune_mode` lora."""
    load_in_4bit: bool = False
    """Frozen weights in 4 bits (nf4), with `finetune_mode` lora."""
    base_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype in which frozen weights are held with `finetune_mode` lora; products follow `precision` all the same."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""
    attn_implementation: Literal["sdpa", "eager", "flash_attention_2"] = field(default="sdpa", metadata=RARE)
    """Attention by torch's kernels (eager where an architecture has none), plain products, or flash-attn."""
    merge: bool = field(default=False, metadata=RARE)
    """Save merged weights instead of a peft folder that names its base."""

    def check_start(self, policy: object = None) -> None:
        """Raises: UsageError unless `--model_name` names the model to start from or `policy` is one."""
        if policy is None and self.model_name is None:
            raise UsageError("--model_name is needed: a hub name, a folder, an experiment dir, or tiny")

    def lora_target_names(self) -> list[str]:
        """The items of `--lora_targets`, in brackets or not."""
        return items_of([self.lora_targets], names)

    def check_model(self) -> None:
        """Raises: ValueError, one line, when an adapter option is out of range."""
        check_at_least(self, "lora_rank", 1)
        check_positive(self, "lora_alpha")
        if not 0 <= self.lora_dropout < 1:
            raise ValueError(f"--lora_dropout {self.lora_dropout} must lie in [0, 1)")
        if self.lora_dropout and self.disable_dropout:
            raise ValueError(f"--lora_dropout {self.lora_dropout} contradicts --disable_dropout True; give one of them")
        for name in ("load_in_8bit", "load_in_4bit"):
            if getattr(self, name):
                self._check_quantisation(name)
        if self.base_dtype != "float32":
            self._check_base_dtype()
        self._check_variants()
        if self.attn_implementation == "flash_attention_2":
            self._check_flash_attention()
        if self.merge and self.finetune_mode != "lora":
            raise ValueError(f"--merge True has no adapters to merge with --finetune_mode {self.finetune_mode}")

    def _check_base_dtype(self) -> None:
        flag = f"--base_dtype {self.base_dtype}"
        if self.finetune_mode != "lora":
            raise ValueError(
                f"{flag} with --finetune_mode {self.finetune_mode}: weights are trained in float32; leave it out, or "
                "use --finetune_mode lora"
            )
        if self.use_dora or self.init_lora_weights in ("pissa", "olora"):
            other = "--use_dora True" if self.use_dora else f"--init_lora_weights {self.init_lora_weights}"
            raise ValueError(f"{other} reads or changes the base in float32; leave {flag} out")
        if self.load_in_8bit or self.load_in_4bit:
            raise ValueError(f"{flag} contradicts --load_in_{4 if self.load_in_4bit else 8}bit True; give one of them")
        if (strategy := getattr(self, "strategy", "auto")) in ("fsdp", "deepspeed"):
            raise ValueError(f"{flag} cannot be sharded by --strategy {strategy}; use --strategy ddp")

    def _check_flash_attention(self) -> None:
        flag = f"--attn_implementation {self.attn_implementation}"
        if (accelerator := getattr(self, "accelerator", "auto")) in ("cpu", "mps"):
            raise ValueError(f"{flag} runs on CUDA alone, not with --accelerator {accelerator}; leave {flag} out")
        if getattr(self, "precision", None) == "32-true":
            raise ValueError(f"{flag} computes in 16 bits, not with --precision 32-true; give --precision bf16-mixed")
        check_package(flag, "flash_attn")

    def _check_variants(self) -> None:
        init = f"--init_lora_weights {self.init_lora_weights}"
        given = {"--use_rslora True": self.use_rslora, "--use_dora True": self.use_dora}
        given[init] = self.init_lora_weights != "default"
        for flag, value in given.items():
            if value and self.finetune_mode != "lora":
                raise ValueError(f"{flag} requires --finetune_mode lora")
        if self.init_lora_weights == "orthogonal" and self.lora_rank % 2:
            raise ValueError(f"{init} needs an even rank, not --lora_rank {self.lora_rank}")
        begins_as_a_part = self.init_lora_weights in ("pissa", "olora")
        if begins_as_a_part and self.use_dora:
            raise ValueError(f"{init} subtracts by a second adapter, and one of --use_dora True must stand alone")
        if (begins_as_a_part or self.use_dora) and (self.load_in_8bit or self.load_in_4bit):
            flag = init if begins_as_a_part else "--use_dora True"
            bits = "--load_in_8bit True" if self.load_in_8bit else "--load_in_4bit True"
            raise ValueError(f"{flag} needs weights that are not quantised; remove it or {bits}")

    def _check_quantisation(self, name: str) -> None:
        if self.load_in_8bit and self.load_in_4bit:
            raise ValueError("--load_in_8bit True and --load_in_4bit True exclude each other; give one of them")
        if self.finetune_mode != "lora":
            raise ValueError(
                f"--{name} True with --finetune_mode {self.finetune_mode}: quantised weights cannot be trained; "
                "use --finetune_mode lora"
            )
        if self.model_name == "tiny":
            raise ValueError(f"--{name} True needs a model on disk or on the hub, not --model_name tiny")
        strategy = getattr(self, "strategy", "auto")
        if strategy in ("fsdp", "deepspeed"):
            raise ValueError(f"--{name} True cannot be sharded by --strategy {strategy}; use --strategy ddp")
        check_package(f"--{name} True", "bitsandbytes")


@dataclass(frozen=True, kw_only=True)
class StartArgs(ModelArgs):
    """Model, and which of its weights are trained."""

    sft_experiment_dir: str | None = field(default=None, metadata=STARTS)
    """Experiment dir or checkpoint to start from, else `model_name`."""

    def check_start(self, policy: object = None) -> None:
        """Raises: UsageError unless a flag names the model to start from or `policy` is one."""
        if isinstance(policy, str | Path):
            raise UsageError(f"policy: {policy} is a name, not a model; give it as --model_name, or load it")
        if policy is not None and self.sft_experiment_dir is not None:
            raise UsageError(f"--sft_experiment_dir {self.sft_experiment_dir} contradicts policy; give one of them")
        if policy is None and self.sft_experiment_dir is None and self.model_name is None:
            raise UsageError("--sft_experiment_dir or --model_name is needed: the policy to start from")


@dataclass(frozen=True, kw_only=True)
class RewardArgs:
    """Reward."""

    rm_experiment_dir: str | None = field(default=None, metadata=SCORES)
    """Experiment dir or checkpoint of the reward model."""
    reward_function: list[str] = field(default_factory=list, metadata=SCORES)
    """Python functions `package.module:name` that score, one or several, instead of a reward model or beside it."""
    reward_weights: list[float] = field(default_factory=list)
    """Weight of each reward in their sum, the reward model's first; all 1 when not given."""
    reward_timeout: float = field(default=0.0, metadata=RARE)
    """Seconds a function has for one response, each in a process that can be killed; 0 calls it here, without limit."""

    def check_reward(self, reward: object = None) -> None:
        """Raises: UsageError unless flags or `reward` say what scores responses, each by something that can."""
        functions: Any = self.reward_function if reward is None else reward
        given = list(functions) if isinstance(functions, list | tuple) else [functions]
        if not (given or self.rm_experiment_dir) or (reward is not None and (not given or self.reward_function)):
            raise UsageError(
                "--rm_experiment_dir or --reward_function (from Python: reward) is needed, of the last two only one: "
                "what scores responses"
            )
        check_reward_model(self.rm_experiment_dir)
        twice = next((path for path in self.reward_function if self.reward_function.count(path) > 1), None)
        if twice is not None:
            raise UsageError(f"--reward_function {twice} is given twice; give it once, with a larger --reward_weights")
        num_rewards = len(given) + (self.rm_experiment_dir is not None)
        if self.reward_weights and len(self.reward_weights) != num_rewards:
            weights = " ".join(map(str, self.reward_weights))
            first = ", that of the reward model first" if self.rm_experiment_dir else ""
            raise UsageError(f"--reward_weights {weights}: give {num_rewards}, one for each reward{first}")
        if self.reward_weights and not any(self.reward_weights):
            raise UsageError("--reward_weights are all 0; give at least one reward a weight")
        if self.reward_timeout < 0:
            raise UsageError(f"--reward_timeout {self.reward_timeout} must be at least 0")
        for function in given:
            if reward is None:
                load_function(function, "--reward_function")
            else:
                check_columns(function, "reward")


@dataclass(frozen=True, kw_only=True)
class AuditArgs(RewardArgs):
    """Reward."""

    audit_function: str | None = None
    """Python function `package.module:name` that also scores the samples and is never trained on; see `audit/score`."""

    def check_audit(self) -> None:
        """Raises: UsageError when the function cannot be imported, or is the reward itself."""
        if self.audit_function is not None:
            load_function(self.audit_function, "--audit_function")
            if self.audit_function in self.reward_function:
                raise UsageError(f"--audit_function {self.audit_function} is the reward itself; give another one")


@dataclass(frozen=True, kw_only=True)
class SamplingArgs:
    """Sampling of responses."""

    do_sample: ClassVar[bool] = True
    repetition_penalty: ClassVar[float] = 1.0
    max_new_tokens: int = 128
    """Longest response, end token included."""
    temperature: float = 1.0
    """Divides the logits, in sampling and in log-probabilities."""
    top_k: int = 0
    """Sample among the k most likely tokens; 0 takes all."""
    top_p: float = 1.0
    """Sample among the most likely tokens of this total probability."""
    min_p: float = field(default=0.0, metadata=RARE)
    """Sample among the tokens at least this times as likely as the most likely one; 0 takes all."""
    eos_ids: list[int] = field(default_factory=list, metadata=RARE)
    """Token ids that end a response, besides the model's own end tokens."""
    stop_strings: list[str] = field(default_factory=list, metadata=TEXTS | RARE)
    """Texts that end a response as soon as it contains one, each a word of its own; its tokens stay as sampled."""

    def check_generation(self) -> None:
        """Raises: ValueError, one line, when a sampling option is out of range."""
        check_at_least(self, "max_new_tokens", 1)
        check_at_least(self, "top_k", 0)
        if not self.temperature > 0:
            remedy = "; for greedy text use --do_sample False" if isinstance(self, GenerationArgs) else ""
            raise ValueError(f"--temperature {self.temperature} must be above 0{remedy}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"--top_p {self.top_p} must lie in (0, 1]")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"--min_p {self.min_p} must lie in [0, 1]")
        check_positive(self, "repetition_penalty")
        if any(index < 0 for index in self.eos_ids):
            raise ValueError(f"--eos_ids {min(self.eos_ids)} must be at least 0")
        if "" in self.stop_strings:
            raise ValueError("--stop_strings '' would end every response at once; give a text")


@dataclass(frozen=True, kw_only=True)
class TimeoutArgs:
    """Patience with servers."""

    request_timeout: float = field(default=600.0, metadata=RARE)
    """Seconds until an unanswered request counts as failed."""
    health_timeout: float = field(default=600.0, metadata=RARE)
    """Seconds to wait until every server is up, and for a rollout server when all have failed."""

    def check_timeouts(self) -> None:
        """Raises: ValueError, one line, when a limit is out of range."""
        check_positive(self, "request_timeout", "health_timeout")


@dataclass(frozen=True, kw_only=True)
class ServerArgs(TimeoutArgs):
    """Sampling on servers."""

    exchange_adapter: ClassVar[bool] = False  # flags of programs that learn from log-probabilities of their samples
    max_staleness: ClassVar[int] = 0
    sampling_correction: ClassVar[str] = "none"
    sampling_bound: ClassVar[float] = 2.0
    server_sleep: ClassVar[bool] = False
    rollout_server: list[str] = field(default_factory=list)
    """Addresses of servers that sample in place of this process: vLLM or `lightrlhf.serve`."""
    exchange_dir: str | None = field(default=None, metadata=RARE)
    """Folder that servers see, for weights; when not given a file system in memory, else the temporary folder."""
    max_sampling_kl: float | None = field(default=None, metadata=RARE)
    """Largest KL a token between servers and trainer; when not given 1e-6, with a mixed precision 0.01."""

    def check_servers(self) -> None:
        """Raises: ValueError, one line, when an address or a limit cannot be used."""
        check_addresses(self.rollout_server, "--rollout_server", "http://localhost:8000")
        twice = next((url for url in self.rollout_server if self.rollout_server.count(url) > 1), None)
        if twice is not None:
            raise ValueError(f"--rollout_server {twice} is given twice; give each server once")
        self.check_timeouts()
        if self.max_sampling_kl is not None:
            check_positive(self, "max_sampling_kl")
        for name in ("exchange_dir", "max_sampling_kl"):
            if not self.rollout_server and getattr(self, name) is not None:
                raise ValueError(f"--{name} {getattr(self, name)} requires --rollout_server")


@dataclass(frozen=True, kw_only=True)
class RolloutServerArgs(SamplingArgs, ServerArgs):
    """Sampling on servers."""

    exchange_adapter: bool = field(default=False, metadata=RARE)  # type: ignore[misc]  # as in GenerationArgs
    """Give servers the adapter of `--finetune_mode lora` alone, which they put on their base; else merged weights."""
    max_staleness: Literal[0, 1] = 0  # type: ignore[misc]
    """At 1 servers sample the next rollout while this one is learned from, by weights one step older."""
    sampling_correction: Literal[  # type: ignore[misc]
        "token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "none"
    ] = field(default="token_truncate", metadata=RARE)
    """Importance weights between servers and trainer, of tokens or sequences, truncated or masked; none: no weights."""
    sampling_bound: float = field(default=2.0, metadata=RARE)  # type: ignore[misc]
    """Largest of these weights (C); masked ones are 0 outside [1 / C, C]."""
    server_sleep: bool = field(default=False, metadata=RARE)  # type: ignore[misc]
    """Have servers free the accelerator's memory while this process learns, where both share one."""

    def check_rollout_servers(self) -> None:
        """Raises: ValueError, one line, when an option contradicts another."""
        self.check_servers()
        if not self.sampling_bound > 1:
            raise ValueError(f"--sampling_bound {self.sampling_bound} must be above 1; 2 is usual")
        if not self.rollout_server:
            kept = {"rollout_server", *(other.name for other in fields(SamplingArgs))}
            for one in fields(RolloutServerArgs):
                if one.name not in kept and getattr(self, one.name) != one.default:
                    raise ValueError(f"--{one.name} {getattr(self, one.name)} requires --rollout_server")
            return
        others = getattr(self, "devices", 1) * getattr(self, "num_nodes", 1) > 1
        patience = getattr(self, "ddp_timeout", math.inf)
        if others and patience < self.request_timeout + self.health_timeout:
            raise ValueError(
                f"--ddp_timeout {patience} with --request_timeout {self.request_timeout:g} and --health_timeout "
                f"{self.health_timeout:g}: other ranks would give up before the servers are; raise the first"
            )
        if self.server_sleep and self.max_staleness:
            raise ValueError(
                "--server_sleep True: at --max_staleness 1 servers sample all the time; leave one of them out"
            )
        if self.exchange_adapter and getattr(self, "finetune_mode", "lora") != "lora":
            raise ValueError("--exchange_adapter True requires --finetune_mode lora")
        if self.exchange_adapter and (getattr(self, "load_in_4bit", False) or getattr(self, "load_in_8bit", False)):
            raise ValueError(
                "--exchange_adapter True: a server's base is not quantised as that of this process; leave it out"
            )
        if self.exchange_adapter and getattr(self, "base_dtype", "float32") != "float32":
            raise ValueError(
                "--exchange_adapter True: a server's base is not rounded as --base_dtype rounds that of this process; "
                "leave one of them out"
            )
        if self.exchange_adapter and getattr(self, "use_dora", False):
            raise ValueError("--exchange_adapter True: vLLM loads no DoRA adapter; leave it out")
        for flag, value, whole in (("top_k", self.top_k, 0), ("top_p", self.top_p, 1), ("min_p", self.min_p, 0)):
            if value != whole:
                raise ValueError(
                    f"--{flag} {value} with --rollout_server: a server's log-probabilities would be those of the kept "
                    f"tokens alone, another distribution than the one that learns; leave it at {whole}"
                )


@dataclass(frozen=True, kw_only=True)
class GenerationArgs(SamplingArgs):
    """Sampling of responses."""

    do_sample: bool = True  # type: ignore[misc]  # a program that learns from its samples has no such flag
    """Sample; when false take the most likely token."""
    repetition_penalty: float = field(default=1.0, metadata=RARE)  # type: ignore[misc]
    """Divides positive logits of tokens already in prompt or response, multiplies negative ones; 1 changes nothing."""


def best_metric(keep_best: str) -> tuple[str, bool]:
    """The metric of `--keep_best` and whether lower is better. Raises: ValueError when the name does not say which."""
    side, prefixed, name = keep_best.partition(":")
    if prefixed and side in ("min", "max"):
        return name, side == "min"
    last = keep_best.rpartition("/")[2]
    if last not in LOWER_IS_BETTER | HIGHER_IS_BETTER:
        raise ValueError(
            f"--keep_best {keep_best}: say which value is better, --keep_best min:{keep_best} or max:{keep_best}"
        )
    return keep_best, last in LOWER_IS_BETTER


def check_types(args: Any) -> None:
    """Make paths texts, with the run's own name in place of `latest`.

    Raises: ValueError, one line, when a value cannot be meant whatever its flag. That is one of another type than its
    field, as calls from Python can give; a number that is not finite, or too large to be exact; a seed below 0 or of
    more than 32 bits; a text that no file system or file takes.
    """
    for name, hint in get_type_hints(type(args)).items():
        value = getattr(args, name, None)
        options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        kinds = [option for option in options if option is not NoneType]
        if get_origin(hint) is ClassVar or (value is None and NoneType in options):
            continue
        if str in kinds and isinstance(value, str | PathLike):
            value = _as_path(value)
            object.__setattr__(args, name, value)
        of_items = next((get_args(kind)[0] for kind in kinds if get_origin(kind) is list), None)
        if of_items is not None and isinstance(value, list | tuple):
            items = [_as_path(item) for item in value]
            object.__setattr__(args, name, items)
            for item in items:
                check_value(name, item, of_items)
        elif len(kinds) == 1 and of_items is not None:
            raise ValueError(f"--{name} {value!r} is not a list")
        elif len(kinds) == 1:
            check_value(name, value, kinds[0])
        elif isinstance(value, str):
            check_value(name, value, str)


def _as_path(value: Any) -> Any:
    """A path as text, with the run's own name in place of `latest`; any other value unchanged."""
    value = fspath(value) if isinstance(value, PathLike) else value
    return follow_latest(value) if isinstance(value, str) else value


def check_value(name: str, value: Any, kind: Any) -> None:
    """Raises: ValueError naming the flag when a value of it, or an item of its list, cannot be meant."""
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise ValueError(f"--{name} {value} is not one of {', '.join(map(str, get_args(kind)))}")
    elif kind in TYPES:
        accepted, words = TYPES[kind]
        if not isinstance(value, accepted) or (kind is not bool and isinstance(value, bool)):
            raise ValueError(f"--{name} {value!r} is not {words}")
        if isinstance(value, str) and ("\0" in value or not _is_unicode(value)):
            raise ValueError(f"--{name} {value!r} has characters that no file takes")
        number: Any = value
        if kind is float and not (isinstance(number, Integral) or math.isfinite(number)):
            raise ValueError(f"--{name} {value} must be a finite number")
        if isinstance(number, int) and abs(number) > LARGEST:
            raise ValueError(f"--{name} has a number of {len(str(number))} digits, which is beyond any use")
        if isinstance(number, int) and (name == "seed" or name.endswith("_seed")) and not 0 <= number < 2**32:
            raise ValueError(f"--{name} {value} must be at least 0 and below 2^32")


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def check_args(args: Any, args_class: type) -> None:
    """Raises: UsageError when a program called from Python got something else than its own arguments."""
    if not isinstance(args, args_class):
        given = args.__name__ if isinstance(args, type) else type(args).__name__
        raise UsageError(f"args: {args_class.__name__}(...) is needed, not {given}")


def check_at_least(args: Any, name: str, least: float) -> None:
    """Raises: ValueError when field `name` of `args` is below `least` or not finite."""
    value = getattr(args, name)
    if not (math.isfinite(value) and value >= least):
        raise ValueError(f"--{name} {value} must be at least {least}")


def check_positive(args: Any, *names: str) -> None:
    """Raises: ValueError when one of the fields is not a finite number above 0."""
    for name in names:
        value = getattr(args, name)
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"--{name} {value} must be a finite number above 0")


def is_gguf(name: str) -> bool:
    """Whether a model's name is that of a GGUF file, or of a package that has one."""
    return name.lower().endswith(GGUF) or name.startswith(PACKAGE)


def check_reward_model(name: str | None) -> None:
    """Raises: UsageError when `--rm_experiment_dir` is no folder here; called before any model is loaded."""
    if not name or Path(name).is_dir():
        return
    if is_gguf(name):
        raise UsageError(
            f"--rm_experiment_dir {name}: a GGUF file holds a language model, not a reward model; "
            f"train one on it: python -m lightrlhf.rm --model_name {name}"
        )
    raise UsageError(f"--rm_experiment_dir {name} {why_missing(name)}")


def check_data_dir(args: Any) -> None:
    """Raises: UsageError when a folder of `--data_dir` does not exist; called before any model is loaded."""
    for folder in args.data_dirs if isinstance(args, DataSetsArgs) else [args.data_dir]:
        if Path(folder).is_file():
            raise UsageError(
                f"--data_dir {folder} is a file; prepare it first: python -m datasets_prep.generic.prepare_data "
                f"--dataset_name {folder} --destination_dir data/mine --tokenizer_name MODEL"
            )
        if not Path(folder).is_dir():
            raise UsageError(
                f"--data_dir {folder} does not exist; "
                f"write it first, for example: python -m datasets_prep.cafe.prepare_data --destination_dir {folder}"
            )
