"""A recorder for TRL's trainers: one line writes steps that `lightrlhf check_run` reads.

    record(trainer, "steps")  # before trainer.train()

Of `GRPOTrainer` it writes each generation (ids, masks, the rewards of each function, advantages) and each pass; of
`SFTTrainer` and `DPOTrainer` each step with the rows of all its passes; of all three what the optimiser did to each
parameter. It wraps methods of the trainer, for a callback never sees inputs, and reads what was fed, what came out and
what was differentiated. With `alone` it also passes each row by itself, without gradients and dropout.

Left out: other trainers of TRL, several processes, and images. Run with TRL 0.24, 1.9, 1.12 and 1.16.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Mapping
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightrlhf.checks import capture
from lightrlhf.checks.trl_rows import Origins, differs_at, prompt_ids, rewarded_rows
from lightrlhf.checks.trl_settings import of_dpo, of_grpo, of_sft
from lightrlhf.checks.trl_updates import Updates, callback_of

COPIED = (
    *("prompt_ids", "prompt_mask", "completion_ids", "advantages"),
    *("old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps"),
)
HALF_DIGITS = 3  # of bfloat16 and float16
SLOPE_DIGITS = 4  # of weights of tokens that are taken from gradients in float32
UNEXPLAINED = 0.02  # of a gradient, more than rounding leaves; labels of other tokens leave most of it


def record(trainer: Any, folder: str | Path, most: int = 16, *, alone: bool = True, weights: bool = False) -> None:
    """Write the first `most` steps of a trainer to a folder. Raises: ValueError for another trainer.

    alone: pass each row by itself, too, to tell what padding, packing, dropout or a temperature changed.
    weights: write weights, gradients and states of the optimiser before and after each step.
    """
    place = Path(folder)
    if hasattr(trainer, "_generate_and_score_completions"):
        recorder: Recorder = Samples(trainer, place, most, alone, weights)
    elif hasattr(trainer, "_precompute_ref_logps") or hasattr(trainer, "concatenated_forward"):
        recorder = Pairs(trainer, place, most, alone, weights)
    elif hasattr(getattr(trainer, "args", None), "completion_only_loss"):
        recorder = Texts(trainer, place, most, alone, weights)
    else:
        raise ValueError(
            f"{type(trainer).__name__} is not a GRPOTrainer, DPOTrainer or SFTTrainer; write its steps by numpy.savez"
        )
    place.mkdir(parents=True, exist_ok=True)
    recorder.attach()


class Recorder:
    """Wraps a trainer's steps; a kind of trainer fills passes and steps."""

    def __init__(self, trainer: Any, folder: Path, most: int, alone: bool, weights: bool) -> None:
        self.trainer, self.folder, self.most, self.alone = trainer, folder, most, alone
        self.counts = {"generation": 0, "pass": 0, "step": 0}
        self.watch, self.updates = capture.Watch(), Updates(trainer, folder, weights)
        self.inputs: dict[str, Any] = {}
        self.loss_of, self.step, self.backward = (
            trainer.compute_loss,
            trainer.training_step,
            trainer.accelerator.backward,
        )

    def attach(self) -> None:
        """Replace the methods of the trainer, and watch its models."""
        self.watch.add(self.trainer.model)
        self.watch.add(getattr(self.trainer, "ref_model", None))
        self.trainer.compute_loss, self.trainer.training_step = self.compute_loss, self.training_step
        self.trainer.accelerator.backward = self.differentiate
        self.trainer.add_callback(callback_of(self.begin, self.end, self.flush))

    def compute_loss(self, model: Any, inputs: Any, *given: Any, **options: Any) -> Any:
        self.inputs = dict(inputs)
        return self.loss_of(model, inputs, *given, **options)

    def training_step(self, *given: Any, **options: Any) -> Any:
        self.watch.passes.clear()
        self.watch.is_open = self.counts["step"] < self.most
        try:
            return self.step(*given, **options)
        finally:
            self.watch.is_open = False
            self.watch.passes.clear()

    def differentiate(self, loss: Tensor, *given: Any, **options: Any) -> Any:
        if self.watch.is_open and loss.requires_grad:
            with self.watch.closed():
                self.add_pass(loss / getattr(self.trainer.accelerator, "gradient_accumulation_steps", 1))
        return self.backward(loss, *given, **options)

    def begin(self, optimizer: Any, number: int, most: int) -> None:
        if self.counts["step"] < self.most:
            self.updates.begin(optimizer, number, most)

    def end(self, optimizer: Any, number: int) -> None:
        self.flush()
        self.updates.end(optimizer, number)
        self.counts["step"] += 1

    def add_pass(self, loss: Tensor) -> None:
        raise NotImplementedError

    def flush(self) -> None:
        """Write what was collected since the last optimiser step."""

    def save(self, kind: str, arrays: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        """Write arrays as a step, half-precision numbers as float32."""
        self.counts[kind] += kind != "step"
        number = self.counts[kind] + (kind == "step")
        if number <= self.most:
            save(self.folder / f"{kind}-{number:06}.npz", arrays, config)

    def rows_alone(self, rows: list[Tensor], temperature: float = 1.0, model: Any = None) -> list[capture.Row]:
        """Each row of ids by itself."""
        model = self.trainer.accelerator.unwrap_model(self.trainer.model) if model is None else model
        with self.watch.closed():
            return capture.alone(model, rows, temperature)


def save(path: Path, arrays: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Write tensors and arrays beside their settings."""
    found = {}
    for name, value in arrays.items():
        if isinstance(value, Tensor):
            if value.dtype in (torch.bfloat16, torch.float16):
                config = {**config, "digits": HALF_DIGITS}
            value = value.detach().cpu()
            value = (value.float() if value.is_floating_point() and value.dtype != torch.float64 else value).numpy()
        found[name] = value
    np.savez(path, **found, config=json.dumps(config))


# -------------------------------------------------------------------------------------------------------------- GRPO
class Samples(Recorder):
    """Generations and passes of GRPO."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        trainer = self.trainer
        self.score, self.generate = trainer._calculate_rewards, trainer._generate_and_score_completions
        self.read = trainer._get_per_token_logps_and_entropies
        self.rewards: list[Tensor] = []
        self.rewarded: list[float] = []
        self.texts: Any = []  # that were rewarded
        self.found: list[Tensor] = []
        self.given: dict[tuple[int, ...], list[float]] = {}  # advantages by the ids of rows

    def attach(self) -> None:
        super().attach()
        self.trainer._calculate_rewards = self.calculate_rewards
        self.trainer._generate_and_score_completions = self.generate_and_score
        functions = getattr(self.trainer, "reward_funcs", [])
        self.trainer.reward_funcs = [one if is_hidden(one) else self.seen(one) for one in functions]
        self.trainer._get_per_token_logps_and_entropies = self.logps_and_entropies

    def calculate_rewards(self, *given: Any, **options: Any) -> Any:
        self.texts = []
        self.rewards[:] = [self.score(*given, **options)]
        if len(given) > 3 and self.texts and self.counts["generation"] < self.most:
            self.rewarded = rewarded_rows(self.tokenizer, self.texts, [[int(i) for i in one] for one in given[3]])
        return self.rewards[0].clone()

    def seen(self, function: Any) -> Any:
        """A function of rewards whose texts are kept."""

        @wraps(function)
        def reward(*given: Any, **options: Any) -> Any:
            self.texts = options.get("completions", given[1] if len(given) > 1 else [])
            return function(*given, **options)

        return reward

    @property
    def tokenizer(self) -> Any:
        return getattr(self.trainer.processing_class, "tokenizer", self.trainer.processing_class)

    def generate_and_score(self, examples: Any = (), *given: Any, **options: Any) -> Any:
        with self.watch.closed():
            output = self.generate(examples, *given, **options)
        if self.counts["generation"] < self.most and getattr(self.trainer.model, "training", True):
            arrays = of_inputs(output) | {"rewards": self.rewards[0]}
            arrays |= {"rewarded_row": np.array(self.rewarded)} if len(self.rewarded) == len(self.rewards[0]) else {}
            arrays |= self.alone_arrays(output, is_sampled=True) | self.of_prompts(examples, output)
            self.save("generation", arrays, of_grpo(self.trainer))
            self.given = {}
            for key, value in zip(keys_of(output), output["advantages"]):
                self.given.setdefault(key, []).append(float(value.flatten()[0]))
        return output

    def of_prompts(self, examples: Any, output: Mapping[str, Any]) -> dict[str, Any]:
        """The first token of each prompt that the template does not give."""
        if not self.alone or len(examples) != len(output["prompt_ids"]) or "prompt" not in examples[0]:
            return {}
        found = []
        for example, ids, mask in zip(examples, output["prompt_ids"], output["prompt_mask"]):
            expected = prompt_ids(self.tokenizer, example["prompt"], example)
            row = ids[mask.bool()].tolist()
            cut = len(row) == vars(self.trainer.args).get("max_prompt_length")
            found.append(differs_at(row, expected) if cut or row not in expected else math.nan)
            if not cut and row not in expected and math.isnan(found[-1]):
                found[-1] = float(len(row) - 1)  # a part of the expected ones
        return {"differs_at": np.array(found)}

    def alone_arrays(self, inputs: Mapping[str, Any], is_sampled: bool = False) -> dict[str, Any]:
        """Log-probabilities of responses, each row by itself: (B, C)."""
        if not self.alone:
            return {}
        temperature = self.trainer.args.temperature
        prompts, responses = inputs["prompt_ids"], inputs["completion_ids"]
        last = inputs["completion_mask"].flip(1).cummax(1)[0].flip(1).bool()
        rows = [torch.cat([p[m.bool()], c[on]]) for p, m, c, on in zip(prompts, inputs["prompt_mask"], responses, last)]
        arrays = {name: torch.zeros(responses.shape) for name in ("alone_logprobs", "alone_entropy", "alone_spread")}
        found = self.rows_alone(rows, temperature)
        for row, one in enumerate(found):
            count = int(last[row].sum())
            for name, values in zip(arrays, one):
                arrays[name][row, :count] = values[len(values) - count :]
        if not is_sampled:
            arrays = {"alone_logprobs": arrays["alone_logprobs"]}
        if temperature != 1:
            arrays["plain_logprobs"] = torch.zeros(responses.shape)
            for row, one in enumerate(self.rows_alone(rows)):
                count = int(last[row].sum())
                arrays["plain_logprobs"][row, :count] = one.logprobs[len(one.logprobs) - count :]
        return arrays

    def logps_and_entropies(self, *given: Any, **options: Any) -> Any:
        output = self.read(*given, **options)
        found = output[0] if isinstance(output, tuple) else output["logps"]  # a dict until TRL 0.17
        if found.requires_grad:
            self.found[:] = [found]
        return output

    def training_step(self, *given: Any, **options: Any) -> Any:
        self.found.clear()
        return super().training_step(*given, **options)

    def add_pass(self, loss: Tensor) -> None:
        if self.counts["pass"] >= self.most or not self.found:
            return
        (slopes,) = torch.autograd.grad(loss, self.found[0], retain_graph=True, allow_unused=True)
        slopes = torch.zeros_like(self.found[0]) if slopes is None else slopes
        arrays = of_inputs(self.inputs) | {"new_logprobs": self.found[0], "loss_slopes": slopes, "loss": loss}
        values = [self.given.get(key, []) for key in keys_of(self.inputs)]
        if all(values):
            own = [float(one.flatten()[0]) for one in self.inputs["advantages"]]
            nearest = [min(them, key=lambda one: abs(one - mine)) for them, mine in zip(values, own)]
            arrays["given_advantages"] = np.array(nearest)
        arrays |= self.alone_arrays(self.inputs)
        self.save("pass", arrays, of_grpo(self.trainer, self.inputs))


def is_hidden(function: Any) -> bool:
    """Whether a reward is of a model, or is awaited, so that its texts are not seen."""
    return isinstance(function, torch.nn.Module) or inspect.iscoroutinefunction(function) or not callable(function)


def of_inputs(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Arrays of GRPO's inputs."""
    mask, tools = inputs["completion_mask"], inputs.get("tool_mask")
    arrays = {name: inputs[name] for name in COPIED if inputs.get(name) is not None}
    return arrays | {"loss_mask": mask if tools is None else mask * tools}


def keys_of(inputs: Mapping[str, Any]) -> list[tuple[int, ...]]:
    """Ids of each row, without padding of the prompt."""
    parts = zip(inputs["prompt_ids"], inputs["prompt_mask"], inputs["completion_ids"])
    return [(*prompt[mask.bool()].tolist(), -1, *ids.tolist()) for prompt, mask, ids in parts]


# ------------------------------------------------------------------------------------------------------- SFT and DPO
class Texts(Recorder):
    """Steps of SFT: rows of all passes, a packed row as its texts."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.rows: list[dict[str, Any]] = []
        self.losses: list[float] = []
        self.origins: Origins | None = None
        self.targets: set[int] = set()

    def of_rows(self, one: capture.Pass, texts: list[tuple[int, Tensor]]) -> list[dict[str, Any]]:
        """What the inputs say of each row: {} of arrays (T,) and numbers."""
        labels = self.inputs["labels"]
        if labels.shape != one.input_ids.shape:
            return []
        return [{"labels": labels[row, columns]} for row, columns in texts]

    def settings(self) -> dict[str, Any]:
        return of_sft(self.trainer)

    def add_pass(self, loss: Tensor) -> None:
        one = self.watch.policy()
        head = capture.head_of(self.trainer.model)
        self.losses.append(float(loss.detach()))
        if one is None or head is None:
            return
        gradient = None
        if not vars(self.trainer.args).get("use_liger_kernel"):  # its backward scales saved tensors in place
            (gradient,) = torch.autograd.grad(loss, one.hidden, retain_graph=True, allow_unused=True)
        texts = capture.documents(one)
        known = self.of_rows(one, texts)
        if not known:
            return
        if self.origins is None:
            self.origins = Origins(self.trainer)
        mask = one.attention_mask if one.attention_mask is not None else torch.ones_like(one.input_ids)
        for (row, columns), more in zip(texts, known):
            columns = columns.to(one.input_ids.device)
            ids, on = one.input_ids[row, columns], mask[row, columns].bool()
            hidden = one.hidden[row, columns]
            made = {"input_ids": ids, "attention_mask": on, "micro_batch": float(len(self.losses)), **more}
            made["new_logprobs"] = capture.row_logprobs(head, ids, hidden)
            if gradient is not None:
                made["loss_slopes"], made["unexplained"] = self.slopes(head, ids, hidden, gradient[row, columns])
            limit = vars(self.trainer.args).get("max_length")
            is_cut = limit is not None and int(on.sum()) >= limit
            made |= {"truncated": float(is_cut)} | self.origins.known(ids[on].tolist(), is_cut)
            self.rows.append(made)
        self.pass_alone(self.rows[-len(texts) :])

    def slopes(self, head: Any, ids: Tensor, hidden: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Weights of tokens; which other target explains the gradient is kept."""
        slopes, rest = capture.row_slopes(head, ids, hidden, gradient)
        if bool((rest > UNEXPLAINED).any()):
            for ahead in capture.OTHER_TARGETS:
                if not bool((capture.row_slopes(head, ids, hidden, gradient, ahead)[1] > UNEXPLAINED).any()):
                    self.targets.add(ahead)
        return slopes, rest

    def pass_alone(self, rows: list[dict[str, Any]]) -> None:
        """Add each row's log-probabilities by itself."""
        if self.alone:
            for made, found in zip(rows, self.rows_alone([one["input_ids"][one["attention_mask"]] for one in rows])):
                made["alone_logprobs"] = placed(found.logprobs, made["attention_mask"])

    def ordered(self) -> list[dict[str, Any]]:
        return self.rows

    def flush(self) -> None:
        if self.rows and self.losses:
            config = self.settings() | {"slope_digits": SLOPE_DIGITS, "passes_in_step": len(self.losses)}
            config |= {"slope_targets": sorted(self.targets)} if self.targets else {}
            rows, arrays = self.ordered(), {"loss": np.array(sum(self.losses))}
            for name in ("prompt_len", "response_mask"):
                if not all(name in one for one in rows):
                    rows = [{key: one for key, one in row.items() if key != name} for row in rows]
            arrays |= {name: stacked(name, rows) for name in dict.fromkeys(key for one in rows for key in one)}
            self.save("step", arrays, config)
        self.rows, self.losses, self.targets = [], [], set()


def placed(values: Tensor, where: Tensor) -> Tensor:
    """Values at the places of a mask, (T,), else 0."""
    found = torch.zeros(where.shape, dtype=torch.float64)
    found[where.cpu()] = values.double().cpu()
    return found


def stacked(name: str, rows: list[dict[str, Any]]) -> np.ndarray:
    """One array of all rows, padded on the right; NaN where a row has no number."""
    if not any(isinstance(one.get(name), Tensor) for one in rows):
        return np.array([one.get(name, math.nan) for one in rows], dtype=np.float64)
    width = max(len(one["input_ids"]) for one in rows)
    filler = -100.0 if name == "labels" else 0.0
    table = np.full((len(rows), width), filler, dtype=np.float64)
    for row, one in enumerate(rows):
        values = one.get(name)
        if values is not None:
            table[row, : len(values)] = values.detach().double().cpu().numpy()
    return table.astype(np.float32) if name.endswith("logprobs") else table


class Pairs(Texts):
    """Steps of DPO: the chosen rows of all passes, then the rejected ones."""

    def settings(self) -> dict[str, Any]:
        config = of_dpo(self.trainer)
        config["ref_dropout"] = capture.dropout_of(getattr(self.trainer, "ref_model", None))
        return config

    def of_rows(self, one: capture.Pass, texts: list[tuple[int, Tensor]]) -> list[dict[str, Any]]:
        mask, ref = self.inputs.get("completion_mask"), self.watch.reference()
        sums: list[Any] = [self.inputs.get(f"ref_{side}_logps") for side in ("chosen", "rejected")]
        lengths = None if mask is not None else self.lengths()
        found: list[dict[str, Any]] = []
        for number, (row, columns) in enumerate(texts):
            made: dict[str, Any] = {"half": float(number >= len(texts) // 2)}
            if mask is not None:
                made["loss_mask"] = mask[row, columns].bool()
            elif lengths is not None:
                on = torch.ones(len(columns)) if one.attention_mask is None else one.attention_mask[row, columns].cpu()
                place, count = on.cumsum(0) - 1, int(on.sum())
                prompt, answer = lengths[number]
                start = min(prompt, count) if self.trainer.truncation_mode == "keep_start" else max(count - answer, 0)
                made["loss_mask"] = (on > 0) & (place >= start)
            if ref is not None and ref.logprobs is not None:
                made["ref_logprobs"] = ref.logprobs[row][columns]
            elif sums[0] is not None:
                made["ref_sum"] = float(torch.cat(list(sums))[number])
            found.append(made)
        return found

    def lengths(self) -> list[tuple[int, int]]:
        """(prompt, answer) of each row where the inputs hold them apart, as until TRL 0.29."""
        prompts = self.inputs["prompt_attention_mask"].sum(1).tolist()
        sides = [self.inputs[f"{side}_attention_mask"].sum(1).tolist() for side in ("chosen", "rejected")]
        return [*zip(prompts, sides[0]), *zip(prompts, sides[1])]

    def pass_alone(self, rows: list[dict[str, Any]]) -> None:
        super().pass_alone(rows)
        model = self.trainer.accelerator.unwrap_model(self.trainer.model)
        ref = getattr(self.trainer, "ref_model", None)
        if not self.alone:
            return
        ids = [one["input_ids"][one["attention_mask"]] for one in rows]
        if ref is not None:
            found = self.rows_alone(ids, model=ref)
        elif hasattr(model, "disable_adapter") and "ref" not in model.peft_config:
            with model.disable_adapter():
                found = self.rows_alone(ids)
        elif self.counts["step"] == 0:  # the reference is the start
            found = self.rows_alone(ids)
        else:
            return
        for made, one in zip(rows, found):
            made["alone_ref_logprobs"] = placed(one.logprobs, made["attention_mask"])

    def ordered(self) -> list[dict[str, Any]]:
        return sorted(self.rows, key=lambda one: one["half"])
