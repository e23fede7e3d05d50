"""Estimate the memory of a training run on one device before it starts.

The steps of the run are computed on tensors without data (torch's fake tensors): the model as the library builds it,
one update of one micro-batch, the engine's prefill and last decoding step, and a scoring pass. What they allocate and
free is counted by tensor, so every dtype, cast and temporary is included: float32 norms and adapters on a base held in
bfloat16, the float32 copy of a matrix for its product, logits of a chunk, keys in float32 under autocast.

A size such as `1.5B` is a Llama of about that size. Other programs: `online_dpo` and `refuel` are `dpo` (REFUEL's
dialogues are its rows) with the rollout of `grpo` where they sample; `reflect_rl` is `ppo`.

Left out: the libraries and what an allocator wastes (0.5 to 1 GiB, and some percent), loading (on the host, see
howto/finetuning.md), sharding by fsdp, logits that are capped or scaled after the head (Gemma 2), layers that choose
their work by the data.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from lightrlhf import cpu
from lightrlhf.cli.errors import UsageError, first_line, one_line_errors
from lightrlhf.cli.fields import at_least, check_args, flag, positive
from lightrlhf.cli.groups import ModelArgs, SamplingArgs
from lightrlhf.cli.parser import parse
from lightrlhf.data.batch import inference_batch_size
from lightrlhf.data.types import PreTrainedModel
from lightrlhf.generation import graphs
from lightrlhf.generation.engine import no_gradients
from lightrlhf.generation.slots import Slots
from lightrlhf.maths.head import LogitFunction, head_logprobs, head_sum, logit_rows
from lightrlhf.models import forward, frozen, loading, lora, names, offload, quantisation
from lightrlhf.storage.results import print_table
from lightrlhf.teachers.lesson import judge_exactly
from lightrlhf.training.memory import FLOAT, GIB, MOMENTS, QUANTISED, Meter

UNITS = {"M": 1e6, "B": 1e9}
MOST = 1024  # examples of a micro-batch
RESERVE = 2.0  # GiB of a device for its libraries (0.5 to 1 GiB) and what the allocator cannot use


@dataclass(frozen=True, kw_only=True)
class EstimateArgs(ModelArgs):
    """Estimate the memory of a training run on one device."""

    algorithm: Literal["sft", "rm", "ppo", "grpo", "dpo", "distill"] = "sft"
    """Program of the run; `ppo` and `grpo` include a reward model as large as the policy, `grpo` has no KL."""
    teacher: str | None = None
    """PPO, GRPO, distillation: a teacher beside the policy, as `model_name`; else distillation's is the start."""
    share_backbone: bool = True
    """PPO or GRPO with `finetune_mode` lora: share the base weights among all roles."""
    base_dtype: Literal["float32", "bfloat16"] = flag("float32", needs={})
    """Dtype of frozen weights in memory: under adapters, of reference, reward model and teacher."""
    offload: bool = False
    """Models that are not trained lie in the host's memory while they are not used."""
    optimizer: Literal["AdamW", "Adam", "AdamW8bit", "PagedAdamW32bit"] = "AdamW"
    """Optimiser of the run."""
    precision: Literal["32-true", "bf16-mixed", "16-mixed"] = "32-true"
    """Precision of the run."""
    micro_batch_size: int = at_least(1, 8)
    """Examples per forward and backward pass; a pair counts as one."""
    num_generations: int = at_least(1, 8)
    """GRPO, distillation: responses per prompt; the prompt is encoded once."""
    rollout_mini_batch_size: int = at_least(1, 32)
    """Sampling programs: slots of the generation engine, rows decoded at a time."""
    sequence_length: int = at_least(1, 512)
    """Tokens of an example, prompt plus response."""
    max_new_tokens: int = at_least(1, 128)
    """Sampling programs: longest response."""
    accelerator: Literal["cuda", "cpu"] = "cuda"
    """Device of the run; on a CPU, passes without gradients use fewer rows."""
    memory_gb: float | None = positive(None)
    """Memory of the device in GiB: report whether the run fits, and the largest micro-batch (a power of 2)."""

    def _check(self) -> None:
        if not self.model_name or self.model_name == "tiny":
            raise ValueError(
                "--model_name is required: a hub name, a folder, an experiment dir, or a size such as 1.5B"
            )
        rounds = self.base_dtype == "bfloat16" and self.finetune_mode != "lora"
        if not self.has_frozen and (self.offload or rounds):
            given = "--offload True" if self.offload else "--base_dtype bfloat16"
            raise ValueError(
                f"{given} with --finetune_mode {self.finetune_mode}: {self.algorithm} has no frozen model; leave it out"
            )
        if self.teacher and not self.samples:
            raise ValueError(f"--teacher {self.teacher}: {self.algorithm} has no teacher; leave it out")
        if self.offload and self.accelerator == "cpu":
            raise ValueError(offload.REFUSAL)

    @property
    def samples(self) -> bool:
        """Whether the run samples responses."""
        return self.algorithm in ("ppo", "grpo", "distill")

    @property
    def has_frozen(self) -> bool:
        """Whether the run has a model that shares no weights with a trained one."""
        return self.samples and (self.algorithm != "distill" or bool(self.teacher) or self.finetune_mode == "all")

    @property
    def prompt_length(self) -> int:
        """Tokens of a prompt, at least one."""
        return max(self.sequence_length - self.max_new_tokens, 1)


def run(args: EstimateArgs) -> dict[str, float]:
    """Estimate memory; returns the bytes of each part."""
    check_args(args, EstimateArgs)
    parts = estimate(args)
    show(args, parts)
    return parts


# ------------------------------------------------------------------------------------------------------------ the model
def config_of(args: EstimateArgs, flag: Literal["model_name", "teacher"] = "model_name") -> Any:
    """The Hugging Face config of a flag's model. Raises: UsageError without a config, and for a reward model."""
    from transformers import AutoConfig

    names.quiet_libraries()
    name = getattr(args, flag) or ""
    if size := re.fullmatch(r"(\d+\.?\d*)([MB]?)", name.upper()):
        if not size[2]:
            raise UsageError(f"--{flag} {name} has no unit; give {name}B or {name}M for a size, ./{name} for a folder")
        return llama_of(float(size[1]) * UNITS[size[2]])
    source = names.base_name(names.resolve(name), f"--{flag}") or name
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=args.trust_remote_code)
    except (OSError, ValueError) as problem:
        raise UsageError(f"--{flag} {name}: {first_line(problem)}") from None
    if names.holds_reward_model(source):
        raise UsageError(f"--{flag} {name} is a reward model; give the language model from which it was trained")
    return config


def bits_of(args: EstimateArgs, config: Any) -> int | None:
    """Bits of the frozen weights, None for float32: by the flags, or as they were saved.

    Raises: UsageError when all weights are to be trained, but were saved quantised.
    """
    if args.load_in_4bit or args.load_in_8bit:
        return 4 if args.load_in_4bit else 8
    settings = config.to_dict().get("quantization_config") or {}
    bits = 4 if settings.get("load_in_4bit") else 8 if settings.get("load_in_8bit") else None
    if bits and args.finetune_mode != "lora":
        raise UsageError(
            f"--finetune_mode {args.finetune_mode}: the weights of {args.model_name} were saved in {bits} bits and "
            "cannot be trained; use --finetune_mode lora"
        )
    return bits


def llama_of(parameters: float) -> Any:
    """The config of a Llama of about this many parameters, with a width of 128 per layer, as from 1B to 70B."""
    from transformers import LlamaConfig

    width = min(range(64, 16384, 64), key=lambda w: abs(llama_size(w) - parameters))
    return LlamaConfig(
        hidden_size=width,
        intermediate_size=8 * width // 3,
        num_hidden_layers=max(width // 128, 2),
        num_attention_heads=width // 64,
        vocab_size=32000,
        tie_word_embeddings=True,
    )


def llama_size(width: int) -> float:
    return 12 * width**2 * max(width // 128, 2) + 32000 * width


def build(args: EstimateArgs, config: Any) -> tuple[PreTrainedModel, int | None]:
    """The model as the library builds it, on the meta device, and the bits of its frozen weights if quantised.

    Quantised layers stand as such held in bfloat16: both are cast for their product, one at a time.
    """
    from transformers import AutoModelForCausalLM

    bits = bits_of(args, config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config).float()
        if args.holds_base:
            frozen.hold(model)
        for name in lora.linear_layers(model) if bits else ():
            layer: Any = model.get_submodule(name)
            layer.weight.data = layer.weight.data.to(frozen.HELD)
            layer.__class__ = frozen.KINDS.get(type(layer), type(layer))
        loading.choose_trainable(model, args, {}, "policy")
    return model.train(), bits


def give_storage(model: PreTrainedModel) -> None:
    """Replace meta tensors by fake ones, which have a device and so a precision; tied ones stay tied."""
    made: dict[int, Any] = {}
    for module in model.modules():
        for name, parameter in [*module.named_parameters(recurse=False, remove_duplicate=False)]:
            fake = torch.empty(parameter.shape, dtype=parameter.dtype)
            made.setdefault(id(parameter), nn.Parameter(fake, parameter.requires_grad))
            setattr(module, name, made[id(parameter)])
        for name, buffer in [*module.named_buffers(recurse=False)]:
            module.register_buffer(name, torch.empty(buffer.shape, dtype=buffer.dtype))


class Sizes(NamedTuple):
    """Bytes of all models of a run, and how many parameters it trains."""

    weights: float
    learning: int
    on_host: tuple[float, ...] = ()  # bytes of models that are on the device for their own passes alone
    taught: float = 0.0  # bytes of the teacher, which is there in the update


def sizes_of(args: EstimateArgs, model: PreTrainedModel, bits: int | None, teacher: PreTrainedModel | None) -> Sizes:
    """Weights of all roles, trained and frozen, that a run has on its device, and the number of trained parameters.

    A critic or reward model is the policy's body with a scalar head. A reference copies what is trained and shares the
    rest, as a teacher without a name does. Models on another base and copies of all weights are in `--base_dtype`.
    """
    width = model.config.get_text_config().hidden_size
    body = {id(p): p for p in model.base_model.parameters()}.values()
    quantised: list[Any] = [model.get_submodule(name).weight for name in lora.linear_layers(model)] if bits else []
    saved = sum(p.nbytes - QUANTISED[bits or 4] * p.numel() for p in quantised)
    policy, policy_trained = sum(p.nbytes for p in model.parameters()) - saved, count_trainable(model.parameters())
    scalar, scalar_trained = sum(p.nbytes for p in body) - saved + FLOAT * width, count_trainable(body) + width
    if args.algorithm == "rm":
        return Sizes(scalar, scalar_trained)
    weights, learning = policy, policy_trained
    whole, reward_model = frozen_bytes(frozen_model(args, model.config))
    reference = whole if args.finetune_mode == "all" else FLOAT * policy_trained
    taught = frozen_bytes(teacher)[0] if teacher is not None and args.teacher else 0.0
    if args.algorithm == "ppo":
        weights, learning = weights + reference, learning + scalar_trained
    if not args.samples:
        return Sizes(weights, learning)
    if args.algorithm == "distill":
        taught = taught or (0.0 if args.finetune_mode == "lora" else reference)
        return Sizes(weights + taught, learning, (taught,) if args.offload else (), taught)
    if args.finetune_mode == "lora" and args.share_backbone:
        adapters = FLOAT * count_trainable(body)
        others = [adapters + FLOAT * width] * (2 if args.algorithm == "ppo" else 1)  # of the critic, a reward model
        return Sizes(policy + sum(others) + taught, learning, (taught,) if args.offload else (), taught)
    on_host = (reward_model, reference) if args.algorithm == "ppo" and args.finetune_mode == "all" else (reward_model,)
    weights += reward_model + taught + (scalar if args.algorithm == "ppo" else 0)
    return Sizes(weights, learning, (*on_host, taught) if args.offload else (), taught)


def frozen_model(args: EstimateArgs, config: Any) -> PreTrainedModel:
    """A language model as a frozen one is held, on the meta device."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        whole: Any = AutoModelForCausalLM.from_config(config).float()
        if args.base_dtype == "bfloat16":
            frozen.hold(whole)
    return whole.requires_grad_(False).eval()


def frozen_bytes(whole: PreTrainedModel) -> tuple[float, float]:
    """Bytes of a frozen language model, and of a reward model with its body."""
    width = whole.config.get_text_config().hidden_size
    sizes = (sum(p.nbytes for p in part.parameters()) for part in (whole, whole.base_model))
    return next(sizes), next(sizes) + FLOAT * width


def count_trainable(parameters: Iterable[nn.Parameter]) -> int:
    return sum(p.numel() for p in parameters if p.requires_grad)


# -------------------------------------------------------------------------------------------------------------- the run
def estimate(args: EstimateArgs, config: Any = None) -> dict[str, float]:
    """Bytes of each part, and `peak`: weights, optimiser, and the larger of an update and a rollout.

    config: of Hugging Face, `--model_name`'s when not given. Raises: UsageError when there is none, or the model
    cannot pass tensors without data.
    """
    from torch._subclasses import FakeTensorMode

    config = config or config_of(args)
    model, bits = build(args, config)
    teacher = None
    if args.teacher or args.algorithm == "distill":
        teacher = frozen_model(args, config_of(args, "teacher") if args.teacher else config)
    weights, learning, on_host, taught = sizes_of(args, model, bits, teacher)
    fake = FakeTensorMode(allow_non_fake_inputs=True)  # active only where tensors are made: masks are looked at
    try:
        with fake:
            for one in filter(None, (model, teacher)):
                give_storage(one)
        with Meter() as meter:
            for one in filter(None, (model, teacher)):
                for value in (*one.parameters(), *one.buffers()):
                    meter.note(value)
            rollout = 0.0
            if args.samples:  # the largest model that waits on the host comes for its passes
                passes = meter.peak(score, args, model, fake) + max(on_host, default=0.0)
                rollout = max(meter.peak(sample, args, model, fake), passes)
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.grad = torch.empty_like(parameter)  # of earlier micro-batches
            activations = meter.peak(update, args, model, fake, teacher) + (taught if args.offload else 0)
    except UsageError:
        raise
    except Exception as problem:  # each architecture that looks at its data raises something else
        raise UsageError(
            f"--model_name {args.model_name}: the architecture {config.model_type} cannot be estimated: a pass without "
            f"data fails ({type(problem).__name__}: {first_line(problem)[:200]}); take a size such as 1.5B for it"
        ) from None
    parts: dict[str, float] = {
        "weights": weights - sum(on_host),
        "gradients": FLOAT * learning,
        "optimizer": MOMENTS[args.optimizer] * learning,
        "activations": activations,
        "rollout": rollout,
    }
    return parts | {"peak": parts["weights"] + parts["optimizer"] + max(parts["gradients"] + activations, rollout)}


def pass_inputs(model: PreTrainedModel, rows: int, length: int, fake: Any) -> dict[str, Any]:
    """Inputs of a pass over rows without data. A single row has some: transformers looks whether it is padded."""
    mask = torch.ones(rows, length, dtype=torch.bool)
    inputs = forward.model_inputs(model, mask.long(), mask)
    return inputs if rows == 1 else without_data(inputs, fake)


def without_data(inputs: dict[str, Any], fake: Any) -> dict[str, Any]:
    return {name: fake.from_tensor(one) if isinstance(one, Tensor) else one for name, one in inputs.items()}


def update_inputs(args: EstimateArgs, model: PreTrainedModel, rows: int, length: int, fake: Any) -> dict[str, Any]:
    """Inputs of a micro-batch; the rows of a group of GRPO share their prompt, where that costs less."""
    if args.algorithm in ("grpo", "distill") and rows > 1:
        number = torch.arange(rows)
        ids, mask = torch.zeros(rows, length, dtype=torch.int64), torch.ones(rows, length, dtype=torch.bool)
        ids[:, args.prompt_length :] = (number % args.num_generations)[:, None]
        packed = forward.packed_texts(model, ids, mask, number // args.num_generations)
        if packed is not None:
            return without_data(forward.packed_inputs(model, packed), fake)
    return pass_inputs(model, rows, length, fake)


def autocast(args: EstimateArgs) -> AbstractContextManager:
    """The run's precision; the fake tensors are on a CPU."""
    dtype = quantisation.MIXED.get(args.precision)
    return nullcontext() if dtype is None else torch.autocast("cpu", dtype=dtype)


def update(args: EstimateArgs, model: PreTrainedModel, fake: Any, teacher: PreTrainedModel | None = None) -> None:
    """Forward and backward pass of a micro-batch, judged by a teacher's whole distribution if there is one."""
    rows = args.micro_batch_size * (2 if args.algorithm in ("rm", "dpo") else 1)
    length = args.prompt_length + args.max_new_tokens if args.samples else args.sequence_length
    inputs = update_inputs(args, model, rows, length, fake)
    count = rows * (args.max_new_tokens if args.samples else length - 1)
    with autocast(args):
        function = None if teacher is None else judged(teacher, pass_inputs(teacher, rows, length, fake), count)
        states = model.base_model(**inputs).last_hidden_state  # (B, T, H)
        if args.algorithm == "rm":
            with fake:
                head = nn.Linear(states.shape[-1], 1, bias=False)
            loss = head(states).float().sum()
        else:
            by_token = logprobs(model, states, count, args.accelerator).sum() if args.algorithm != "distill" else 0
            chunk = logit_rows(forward.embedding_rows(model), args.accelerator)
            own = actions(states, count), model.get_output_embeddings()
            loss = by_token + (head_sum(*own, function, chunk)[0] if function else 0)
    loss.backward()


def judged(teacher: PreTrainedModel, inputs: dict[str, Any], count: int) -> LogitFunction:
    """A teacher's judgement of the actions: hidden states now, logits (n, V) when they are wanted."""
    with torch.no_grad():
        states = actions(teacher.base_model(**inputs).last_hidden_state, count)  # (N, H)
    head = torch.no_grad()(lambda rows: teacher.get_output_embeddings()(states[rows]).float())
    judge = judge_exactly(head, torch.zeros(count, dtype=torch.int64), beta=1)

    def function(logits: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        found = judge(logits, rows)
        return found.loss.sum(), torch.stack(found, 1).detach()

    return function


def actions(states: Tensor, count: int) -> Tensor:
    """Hidden states (N, H) of the actions; states: (B, T, H)."""
    return states.flatten(0, 1)[torch.arange(count) % states[..., 0].numel()]


def logprobs(model: PreTrainedModel, states: Tensor, count: int, device: str) -> Tensor:
    """Log-probabilities (N,) of the actions; states (B, T, H)."""
    chosen = actions(states, count)  # (N, H)
    targets, rows = torch.zeros(count, dtype=torch.int64), logit_rows(forward.embedding_rows(model), device)
    return head_logprobs(chosen, model.get_output_embeddings(), targets, chunk_size=rows)[0]


class RoundedSlots(Slots):
    """Slots with as many columns as captured steps have, which run on CUDA alone."""

    columns_for = staticmethod(graphs.BucketedSlots.columns_for)


def sample(args: EstimateArgs, model: PreTrainedModel, fake: Any) -> None:
    """Prefill a rollout's slots, decode the last token, and prefill the prompts that come next."""
    slots = args.rollout_mini_batch_size
    repeats = args.num_generations if args.algorithm in ("grpo", "distill") else 1
    prompts = [[row // repeats % forward.embedding_rows(model)] * args.prompt_length for row in range(2 * slots)]
    prefixes: list[Any] | None = None
    if args.accelerator == "cuda":
        prefixes = [None] * len(prompts)  # with a list of them the engine prefills as many prompts as a GPU does
    settings = SamplingArgs(max_new_tokens=args.max_new_tokens)
    with (
        forward.inference(model),
        autocast(args),
        no_gradients(model) if args.precision != "32-true" else nullcontext(),
    ):
        kind, uniforms = RoundedSlots if prefixes else Slots, torch.zeros(len(prompts), args.max_new_tokens)
        dtype = cpu.packed_dtype(model, args.max_new_tokens, frozen.activation_dtype(model))
        copy = [
            torch.empty_like(weight, dtype=dtype) for weight in model.parameters() if dtype
        ]  # of the packed decoder
        engine = kind(model, prompts, settings, [], uniforms, slots, prefixes)
        engine.admit(torch.arange(slots))
        for layer in engine.layers:
            layer.end = engine.num_columns - 1
        engine.step()
        if engine.groups:
            engine.prefilled = engine._prefill(slots)
        del copy


def score(args: EstimateArgs, model: PreTrainedModel, fake: Any) -> None:
    """Log-probabilities of a rollout, in one pass of the most rows."""
    length = args.prompt_length + args.max_new_tokens
    rows = inference_batch_size(length, args.rollout_mini_batch_size, torch.device(args.accelerator))
    inputs = pass_inputs(model, rows, length, fake)
    with forward.inference(model), autocast(args):
        states = model.base_model(**inputs).last_hidden_state
        logprobs(model, states, rows * args.max_new_tokens, args.accelerator)


# ----------------------------------------------------------------------------------------------------------- the answer
def show(args: EstimateArgs, parts: dict[str, float]) -> None:
    """Print the parts as a table, and what fits into `--memory_gb`."""
    lines: list[list[str] | None] = [[name, f"{size / GIB:.2f}"] for name, size in parts.items()]
    title = f"{args.algorithm} of {args.model_name}, --finetune_mode {args.finetune_mode}"
    print_table(title, ["part", "GiB"], [*lines[:-1], None, lines[-1]])
    if args.memory_gb is not None:
        print(verdict(args, parts["peak"], args.memory_gb))


def verdict(args: EstimateArgs, peak: float, memory_gb: float) -> str:
    """Whether a peak fits into GiB of memory less the reserve, and the largest micro-batch (1, 2, 4 …) that does."""
    room = (memory_gb - RESERVE) * GIB

    def fits(size: int) -> bool:
        return estimate(dataclasses.replace(args, micro_batch_size=size))["peak"] <= room

    answer = "fits" if peak <= room else "does not fit"
    largest = 0
    while largest < MOST and fits(max(2 * largest, 1)):
        largest = max(2 * largest, 1)
    most = f"up to --micro_batch_size {largest} does" if largest else "not even --micro_batch_size 1 does"
    return f"it {answer} into {memory_gb:g} GiB with {RESERVE:g} kept free; {most}"


@one_line_errors
def main(argv: list[str] | None = None) -> dict[str, float]:
    """Run the program; returns the bytes of each part."""
    return run(parse(EstimateArgs, argv))


if __name__ == "__main__":
    main()
