"""Faults from reports, planted one by one in real runs of TRL: in the data, the settings, a method or the optimiser.

Each names its report, the run it is planted in, and the names that `check_run` may give it: the right ones.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import TrainerCallback
from trl import DPOTrainer, GRPOTrainer, SFTTrainer
from trl.trainer import dpo_trainer


@dataclass(frozen=True, kw_only=True)
class Plant:
    """A fault. names: what it may be called."""

    report: str
    setting: str
    names: tuple[str, ...]
    options: dict[str, Any] = field(default_factory=dict)
    before: Callable[[Any], None] = lambda trainer: None
    after: Callable[[Any], None] = lambda trainer: None
    patch: tuple[Any, str, Callable[[Any], Any]] | None = None  # of a class or module, until training has ended

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        if self.patch is None:
            yield
            return
        owner, name, make = self.patch
        original = getattr(owner, name)
        setattr(owner, name, make(original))
        try:
            yield
        finally:
            setattr(owner, name, original)


PLANTS: dict[str, Plant] = {}


def plant(name: str, report: str, setting: str, *names: str, **more: Any) -> None:
    PLANTS[name] = Plant(report=report, setting=setting, names=names, **more)


def collated(change: Callable[[dict[str, Any], Any], None]) -> Callable[[Any], None]:
    """The trainer's batches, changed by a collator of the user's."""

    def before(trainer: Any) -> None:
        collate = trainer.data_collator

        def changed(examples: Any) -> Any:
            batch = collate(examples)
            change(batch, trainer)
            return batch

        trainer.data_collator = changed

    return before


def scaled(factor: Callable[[Any], float]) -> Callable[[Any], Any]:
    """compute_loss times a factor."""

    def make(original: Any) -> Any:
        def compute_loss(self: Any, *given: Any, **options: Any) -> Any:
            return original(self, *given, **options) * factor(self)

        return compute_loss

    return make


def generated(change: Callable[[dict[str, Any], Any], None]) -> Callable[[Any], Any]:
    """GRPO's generations, changed before they are used."""

    def make(original: Any) -> Any:
        def generate(self: Any, examples: Any) -> Any:
            output = original(self, examples)
            change(output, self)
            return output

        return generate

    return make


def own_loss(loss: Callable[[Any, Any, Any, Any], torch.Tensor]) -> Callable[[Any], Any]:
    """compute_loss of logits, labels, inputs and num_items_in_batch by the user."""

    def make(original: Any) -> Any:
        def compute_loss(
            self: Any, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            given = {name: inputs[name] for name in ("input_ids", "attention_mask", "position_ids") if name in inputs}
            return loss(model(**given).logits, inputs["labels"], inputs, num_items_in_batch)

        return compute_loss

    return make


def nll(logits: torch.Tensor, labels: torch.Tensor, count: Any = None) -> torch.Tensor:
    total = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return total / ((labels != -100).sum() if count is None else count)


# ------------------------------------------------------------------------------------------------------------- SFT
def end_masked(batch: dict[str, Any], trainer: Any) -> None:
    batch["labels"][batch["input_ids"] == trainer.processing_class.eos_token_id] = -100


def padding_labelled(batch: dict[str, Any], trainer: Any) -> None:
    off = batch["attention_mask"] == 0
    batch["labels"][off] = batch["input_ids"][off]


def prompts_labelled(batch: dict[str, Any], trainer: Any) -> None:
    batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)


def labels_shifted(batch: dict[str, Any], trainer: Any) -> None:
    labels = batch["labels"]
    batch["labels"] = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], -100)], 1)


def start_doubled(batch: dict[str, Any], trainer: Any) -> None:
    for name, value in (("input_ids", trainer.processing_class.bos_token_id), ("attention_mask", 1), ("labels", -100)):
        batch[name] = torch.cat([torch.full_like(batch[name][:, :1], value), batch[name]], 1)


def last_dropped(batch: dict[str, Any], trainer: Any) -> None:
    ids, mask = batch["input_ids"], batch["attention_mask"]
    last = mask.sum(1, keepdim=True) - 1
    for name, value in (("input_ids", 0), ("attention_mask", 0), ("labels", -100)):
        batch[name] = batch[name].scatter(1, last, torch.full_like(ids, value))


E976, ACCUMULATION = "trl#976", "transformers#37766"
END_NAMES = ("end token not trained", "end token missing")
plant("sft: end token masked as padding", E976, "sft/prompt", *END_NAMES, before=collated(end_masked))
plant("sft: end token dropped", "trl#1623", "sft/prompt", "end token missing", before=collated(last_dropped))
plant("sft: padding trained", "open-r1#494", "sft/prompt", "padding trained", before=collated(padding_labelled))
plant("sft: prompts trained", "trl#3728", "sft/prompt", "prompt tokens trained", before=collated(prompts_labelled))
plant("sft: user turns trained", "nanochat#582", "sft/chat", "prompt tokens trained", before=collated(prompts_labelled))
plant("sft: start token twice", "trl#1400", "sft/chat", "doubled start token", before=collated(start_doubled))
plant(
    "sft: labels shifted by hand",
    "transformers#44642",
    "sft/prompt",
    "labels one early",
    before=collated(labels_shifted),
)
plant(
    "sft: labels shifted twice in the loss",
    "open-instruct#1549",
    "sft/prompt",
    "labels shifted twice",
    patch=(SFTTrainer, "compute_loss", own_loss(lambda x, y, i, n: nll(x[:, :-2], y[:, 2:], n))),
)
plant(
    "sft: labels not shifted in the loss",
    "transformers#27161",
    "sft/prompt",
    "labels not shifted",
    patch=(SFTTrainer, "compute_loss", own_loss(lambda x, y, i, n: nll(x, y, n))),
)
plant(
    "sft: mean of means of micro-batches",
    ACCUMULATION,
    "sft/prompt",
    "mean of means of passes",
    patch=(SFTTrainer, "compute_loss", own_loss(lambda x, y, i, n: nll(x[:, :-1], y[:, 1:]) / 2)),
)
plant(
    "sft: not divided by the passes",
    ACCUMULATION,
    "sft/prompt",
    "sum of means of passes",
    patch=(SFTTrainer, "compute_loss", own_loss(lambda x, y, i, n: nll(x[:, :-1], y[:, 1:]))),
)
plant(
    "sft: warm-up longer than the run",
    "EasyContext#21",
    "sft/prompt",
    "warm-up longer than the run",
    options={"warmup_steps": 100},
)


def causal_only(trainer: Any) -> None:
    """An attention that knows nothing of texts: all earlier tokens of the row."""
    for layer in trainer.model.model.layers:
        original = layer.forward

        def forward(hidden: Any, *given: Any, _original: Any = original, **options: Any) -> Any:
            width = hidden.shape[1]
            allowed = torch.ones(width, width, dtype=torch.bool).tril()[None, None]
            return _original(hidden, *given, **options | {"attention_mask": allowed})

        layer.forward = forward


PLANTS["sft: packed texts see each other"] = Plant(
    report="trl#1230", setting="sft/text-packed", names=("texts of a packed row see each other",), before=causal_only
)


def optimiser_of(choose: Callable[[Any], Any], **settings: Any) -> Callable[[Any], None]:
    """An optimiser of the user's, of chosen parameters."""

    def before(trainer: Any) -> None:
        trainer.optimizer = torch.optim.AdamW(
            choose(trainer), lr=trainer.args.learning_rate, weight_decay=0.0, **settings
        )

    return before


def adapters_left_out(trainer: Any) -> list[Any]:
    return [one for name, one in trainer.model.named_parameters() if "lora_B" in name]


def base_unfrozen(trainer: Any) -> None:
    for name, one in trainer.model.named_parameters():
        one.requires_grad_("norm" in name or "lora_" in name)


def half(trainer: Any) -> None:
    trainer.model.to(torch.bfloat16)


class EachMicroBatch(TrainerCallback):
    """Steps the schedule once more a step, as an accelerate that counts processes does."""

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        given["lr_scheduler"].step()


LEFT_OUT = "trained parameters are not in the optimiser"
plant(
    "sft: adapters left out of the optimiser", "peft#1303", "sft/lora", LEFT_OUT, before=optimiser_of(adapters_left_out)
)
plant(
    "sft: base trained beside the adapter",
    "peft#3580",
    "sft/lora",
    "base weights trained beside the adapter",
    before=base_unfrozen,
)
plant(
    "sft: updates lost in bfloat16",
    "torchao#1124",
    "sft/prompt",
    "updates lost to rounding",
    options={"learning_rate": 1e-9},
    before=half,
)
plant(
    "sft: schedule stepped twice",
    "transformers#24088",
    "sft/prompt",
    "learning rate is not the schedule's",
    before=lambda trainer: trainer.add_callback(EachMicroBatch()),
)


# ------------------------------------------------------------------------------------------------------------- DPO
def reference_is_policy(trainer: Any) -> None:
    trainer.ref_model = trainer.model


def masks_of(change: Callable[[Any, Any], Any]) -> Callable[[Any], None]:
    """Another completion_mask: of the mask and the attention_mask."""

    def collate(batch: dict[str, Any], trainer: Any) -> None:
        batch["completion_mask"] = change(batch["completion_mask"], batch["attention_mask"])

    return collated(collate)


def sides_exchanged(batch: dict[str, Any], trainer: Any) -> None:
    half = len(batch["input_ids"]) // 2
    for name in ("input_ids", "attention_mask", "completion_mask"):
        batch[name] = batch[name].roll(half, 0)


def reference_rolled(batch: dict[str, Any], trainer: Any) -> None:
    for name in ("ref_chosen_logps", "ref_rejected_logps"):
        batch[name] = batch[name].roll(1, 0)


def during_loss(change: Callable[[Any], Callable[[], None]]) -> Callable[[Any], Any]:
    """A setting that is another one while the loss is computed."""

    def make(original: Any) -> Any:
        def compute_loss(self: Any, *given: Any, **options: Any) -> Any:
            undo = change(self)
            try:
                return original(self, *given, **options)
            finally:
                undo()

        return compute_loss

    return make


def put(name: str, value: Any) -> Callable[[Any], Callable[[], None]]:
    def change(trainer: Any) -> Callable[[], None]:
        before = getattr(trainer, name)
        setattr(trainer, name, value)
        return lambda: setattr(trainer, name, before)

    return change


@contextlib.contextmanager
def adapters_kept(*given: Any, **options: Any) -> Iterator[None]:
    yield


def dropout_on(trainer: Any) -> None:
    for layer in trainer.model.model.layers:
        layer.mlp.down_proj = torch.nn.Sequential(torch.nn.Dropout(0.2), layer.mlp.down_proj)


REFERENCE = (
    "reference of other weights or rows",
    "rows misaligned",
    "the reference is the policy",
    "the reference moved",
)
plant("dpo: reference is the policy", "trl#1500", "dpo/pair", "the reference is the policy", before=reference_is_policy)
plant(
    "dpo: adapters on in the reference",
    "trl#354",
    "dpo/lora",
    REFERENCE[0],
    patch=(dpo_trainer, "use_adapter", lambda original: adapters_kept),
)
plant(
    "dpo: stored reference of other rows",
    "liquid-finetune#42",
    "dpo/precomputed",
    *REFERENCE[:2],
    before=collated(reference_rolled),
)
plant("dpo: dropout on", "trl#639", "dpo/pair", "dropout on in one of the passes", before=dropout_on)
plant(
    "dpo: prompts counted",
    "trl#1640",
    "dpo/pair",
    "mask one early",
    "prompt tokens trained",
    "doubled start token",
    before=masks_of(lambda m, a: a),
)
plant("dpo: mask one late", "verl#6921", "dpo/pair", "mask one late", before=masks_of(lambda m, a: m * m.roll(1, 1)))
plant("dpo: padding counted", "ms-swift#9925", "dpo/pair", "padding trained", before=masks_of(lambda m, a: m | (1 - a)))
plant(
    "dpo: chosen and rejected exchanged",
    "trl#1236",
    "dpo/pair",
    "chosen and rejected exchanged",
    before=collated(sides_exchanged),
)
plant(
    "dpo: loss_type not passed on",
    "ms-swift#10167",
    "dpo/chat-ipo",
    "loss sigmoid",
    patch=(DPOTrainer, "compute_loss", during_loss(put("loss_types", ["sigmoid"]))),
)
plant(
    "dpo: beta not passed on",
    "ms-swift#10167",
    "dpo/pair",
    "beta of 0.5",
    patch=(DPOTrainer, "compute_loss", during_loss(put("beta", 0.5))),
)
plant(
    "dpo: not divided by the passes",
    "trl#2617",
    "dpo/pair",
    "not divided by the passes",
    patch=(DPOTrainer, "compute_loss", scaled(lambda one: 2.0)),
)


def ipo_of_sums(trainer: Any) -> Callable[[], None]:
    """Lengths of 1 in the division, by a mask whose sum is 1."""
    original = torch.Tensor.clamp

    def clamp(self: Any, *given: Any, **options: Any) -> Any:
        found = original(self, *given, **options)
        return torch.ones_like(found) if options == {"min": 1.0} else found

    torch.Tensor.clamp = clamp  # type: ignore[method-assign, assignment]
    return lambda: setattr(torch.Tensor, "clamp", original)


PLANTS["dpo: ipo of sums"] = Plant(
    report="trl#1265",
    setting="dpo/chat-ipo",
    names=("sums in place of means",),
    patch=(DPOTrainer, "compute_loss", during_loss(ipo_of_sums)),
)


# ------------------------------------------------------------------------------------------------------------ GRPO
def of_advantages(change: Callable[[Any, Any], Any]) -> tuple[type, str, Any]:
    def generation(output: dict[str, Any], trainer: Any) -> None:
        output["advantages"] = change(output["advantages"], trainer)

    return (GRPOTrainer, "_generate_and_score_completions", generated(generation))


def all_counted(output: dict[str, Any], trainer: Any) -> None:
    output["completion_mask"] = torch.ones_like(output["completion_mask"])


def ends_by_padding(output: dict[str, Any], trainer: Any) -> None:
    ids, mask = output["completion_ids"], output["completion_mask"]
    output["completion_mask"] = mask * (ids != trainer.processing_class.eos_token_id)


def late_mask(output: dict[str, Any], trainer: Any) -> None:
    mask = output["completion_mask"]
    output["completion_mask"] = mask * (torch.arange(mask.shape[1]) > 0)


def one_text(output: dict[str, Any], trainer: Any) -> None:
    for name in ("completion_ids", "completion_mask"):
        output[name] = output[name].view(-1, 4, output[name].shape[1])[:, :1].expand(-1, 4, -1).flatten(0, 1).clone()


def without_temperature(original: Any) -> Any:
    def logps(self: Any, model: Any, ids: Any, mask: Any, keep: int, *given: Any, **options: Any) -> Any:
        output = model(input_ids=ids, attention_mask=mask).logits[:, -keep - 1 : -1].log_softmax(-1)
        found = output.gather(-1, ids[:, -keep:, None])[..., 0]
        return found, -(output.exp() * output).sum(-1), None

    return logps


def attention_left_out(original: Any) -> Any:
    def logps(self: Any, model: Any, ids: Any, mask: Any, *given: Any, **options: Any) -> Any:
        return original(self, model, ids, torch.ones_like(mask), *given, **options)

    return logps


def one_place_off(original: Any) -> Any:
    def logps(self: Any, *given: Any, **options: Any) -> Any:
        found, *others = original(self, *given, **options)
        return torch.cat([found[:, 1:], found[:, :1]], 1), *others

    return logps


def samples_greedy(trainer: Any) -> None:
    trainer.generation_config.do_sample = False
    trainer.generation_config.temperature = trainer.generation_config.top_p = None


def samples_hot(trainer: Any) -> None:
    trainer.generation_config.temperature = 2.5


def reference_moves(trainer: Any) -> None:
    class Moves(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            with torch.no_grad():
                for ours, theirs in zip(trainer.model.parameters(), trainer.ref_model.parameters()):
                    theirs.lerp_(ours, 0.5)

    trainer.add_callback(Moves())


def other_texts(original: Any) -> Any:
    def rewards(self: Any, inputs: Any, prompts: Any, completions: Any, ids: Any) -> Any:
        return original(self, inputs, prompts, completions[1:] + completions[:1], ids)

    return rewards


def interleaved(original: Any) -> Any:
    def generate(self: Any, examples: Any) -> Any:
        order = [i % 4 * (len(examples) // 4) + i // 4 for i in range(len(examples))]
        return original(self, [examples[i] for i in order])

    return generate


def advantages_unshuffled(original: Any) -> Any:
    def prepare(self: Any, batch: Any) -> Any:
        inputs = dict(original(self, batch))
        if self.model.training:
            inputs["advantages"] = inputs["advantages"].roll(1, 0)
        return inputs

    return prepare


def no_header(original: Any) -> Any:
    def tokenize(self: Any, prompts: Any) -> Any:
        found = self.processing_class.apply_chat_template(prompts, tokenize=False)
        return [self.processing_class(one, add_special_tokens=False)["input_ids"] for one in found], None, {}

    return tokenize


LOGPS = "_get_per_token_logps_and_entropies"
MASK = "_generate_and_score_completions"
plant(
    "grpo: temperature not applied",
    "trl#3029",
    "grpo/warm",
    "temperature not applied",
    patch=(GRPOTrainer, LOGPS, without_temperature),
)
plant(
    "grpo: padding attended",
    "trl#2708",
    "grpo/dapo",
    "padding changes the pass",
    patch=(GRPOTrainer, LOGPS, attention_left_out),
)
plant(
    "grpo: log-probabilities one off",
    "trl#3733",
    "grpo/dapo",
    "log-probabilities one early",
    "log-probabilities one late",
    patch=(GRPOTrainer, LOGPS, one_place_off),
)
plant(
    "grpo: tokens after the end counted",
    "trl#7039",
    "grpo/dapo",
    "tokens after the end trained",
    "padding trained",
    patch=(GRPOTrainer, MASK, generated(all_counted)),
)
plant(
    "grpo: end token masked as padding",
    "trl#4970",
    "grpo/dapo",
    *END_NAMES,
    patch=(GRPOTrainer, MASK, generated(ends_by_padding)),
)
plant("grpo: mask one late", "SkyRL#758", "grpo/dapo", "mask one late", patch=(GRPOTrainer, MASK, generated(late_mask)))
plant(
    "grpo: one seed for a group",
    "frontier2 3.3: reproducible mode",
    "grpo/dapo",
    "members share their noise",
    patch=(GRPOTrainer, MASK, generated(one_text)),
)
plant(
    "grpo: rows of groups interleaved",
    "R1-V#67",
    "grpo/dapo",
    "prompts of a group differ",
    patch=(GRPOTrainer, MASK, interleaved),
)
plant("grpo: sign of advantages", "verl, kl sign (RAGEN#58)", "grpo/dapo", "sign", patch=of_advantages(lambda a, t: -a))
plant(
    "grpo: baseline of the batch",
    "flow_grpo#46",
    "grpo/kl",
    "baseline of the batch",
    patch=of_advantages(lambda a, t: whole(t)),
)
plant(
    "grpo: std with n",
    "frontier2 3.3: AsyncGRPO",
    "grpo/dapo",
    "std with n",
    patch=of_advantages(lambda a, t: a * (4 / 3) ** 0.5),
)
plant(
    "grpo: advantages of other rows",
    "async GRPO, trl#6072",
    "grpo/dapo",
    "rows misaligned",
    patch=(GRPOTrainer, "_prepare_inputs", advantages_unshuffled),
)
plant(
    "grpo: rewards of other texts",
    "trl#6072",
    "grpo/dapo",
    "rewarded text of another row",
    patch=(GRPOTrainer, "_calculate_rewards", other_texts),
)
plant(
    "grpo: divided by the passes twice",
    "trl#2617",
    "grpo/kl",
    "divided by the passes twice",
    patch=(GRPOTrainer, "compute_loss", scaled(lambda one: 0.5)),
)
plant(
    "grpo: scaled by steps",
    "trl#6024",
    "grpo/dapo",
    "scaled by 4",
    patch=(GRPOTrainer, "compute_loss", scaled(lambda one: 4.0)),
)
plant(
    "grpo: aggregation of another loss",
    "trl#3187",
    "grpo/kl",
    "aggregation token",
    patch=(GRPOTrainer, "compute_loss", during_loss(put("loss_type", "bnpo"))),
)
plant(
    "grpo: sign of the KL",
    "ToolRL#52",
    "grpo/kl",
    "sign of the KL",
    patch=(GRPOTrainer, "compute_loss", during_loss(put("beta", -0.05))),
)
plant(
    "grpo: no KL",
    "OpenRLHF#773",
    "grpo/kl",
    "no KL",
    patch=(GRPOTrainer, "compute_loss", during_loss(put("beta", 0.0))),
)
plant(
    "grpo: clip range ignored",
    "ms-swift#10167",
    "grpo/kl",
    "no clipping",
    "clip range 0.1",
    options={"learning_rate": 3e-2},
    patch=(GRPOTrainer, "compute_loss", during_loss(put("epsilon_high", 9.0))),
)
plant(
    "grpo: greedy samples",
    "frontier2 3.3: temperature forced",
    "grpo/dapo",
    "samples too likely for the policy",
    "members share their noise",
    before=samples_greedy,
)
plant(
    "grpo: samples of another temperature",
    "trl#3029",
    "grpo/dapo",
    "samples too unlikely for the policy",
    before=samples_hot,
)
plant("grpo: reference moves", "trl#1500", "grpo/kl", "the reference moved", before=reference_moves)
plant(
    "grpo: no header in the prompt",
    "trl#1640",
    "grpo/kl",
    "ids are not the template's of the text",
    patch=(GRPOTrainer, "_tokenize_prompts", no_header),
)


def whole(trainer: Any) -> torch.Tensor:
    """Advantages over the batch, of the rewards that were just given."""
    rewards = trainer.last_rewards.nansum(1)
    return (rewards - rewards.mean()) / (rewards.std() + 1e-4)


def keep_rewards(original: Any) -> Any:
    def rewards(self: Any, *given: Any, **options: Any) -> Any:
        self.last_rewards = original(self, *given, **options)
        return self.last_rewards

    return rewards


GRPOTrainer._calculate_rewards = keep_rewards(GRPOTrainer._calculate_rewards)
