"""A step of anybody's trainer as arrays and settings: the schema, and its reader.

A step is one file `NAME.npz`, or a folder with `rows.jsonl` (a row a line, of the same names) and `step.json` (the
numbers and the settings). All of it is optional. Arrays are (B, T), and column t is about token t: its
log-probability stands where the token stands, not where it was predicted. An array with fewer columns belongs to the
last ones, so that arrays of completions alone, and shifted ones (B, T-1), are given as they are.

Left out: packed rows, and images.
"""

from __future__ import annotations

import difflib
import json
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightrlhf.cli.errors import UsageError
from lightrlhf.storage.jsonl import read_jsonl

IDS = {
    "input_ids": "(B, T) ids of prompt and response; or prompt_ids and completion_ids",
    "prompt_ids": "(B, P) ids of prompts, padded on either side",
    "completion_ids": "(B, C) ids of responses, padded on the right",
    "labels": "(B, T) ids, -100 where the loss does not count the token; instead of loss_mask",
}
MASKS = {
    "attention_mask": "(B, T) 1 where there is a token, 0 at padding",
    "prompt_mask": "(B, P) the same of prompt_ids",
    "loss_mask": "(B, T) 1 where the loss counts the token (completion_mask in TRL)",
    "response_mask": "(B, T) 1 where there is a token of the response, whether or not it is trained",
}
OF_TOKENS = {  # (B, T), or their sums over each row's trained tokens, (B,)
    "sampler_logprobs": "what the engine that sampled reported",
    "old_logprobs": "of the policy before the update",
    "ref_logprobs": "of the reference",
    "new_logprobs": "of the policy in the update, of which the loss is made",
    "advantages": "of tokens, or of rows, (B,)",
    "token_rewards": "rewards of tokens, the KL included, for GAE",
    "values": "of the critic, for GAE",
    "kl": "the KL term of each token, before its coefficient",
    "loss_slopes": "derivative of the loss by new_logprobs: how much each token counts; NaN where not known",
    "unexplained": "share of the loss's gradient that is along no log-probability of the token",
    "alone_logprobs": "of the policy, each row passed by itself, without padding and dropout",
    "alone_ref_logprobs": "the same of the reference",
    "alone_entropy": "entropy of the distribution that the token was drawn from, in that pass",
    "alone_spread": "variance of the log-probability of a draw from it",
    "plain_logprobs": "alone_logprobs at temperature 1",
}
OF_ROWS = {
    "rewards": "(B,) or (B, R), NaN where a row was not scored",
    "group": "(B,) number of the prompt; default num_generations rows each",
    "truncated": "(B,) 1 where the response was stopped by length",
    "prompt_len": "(B,) tokens of the prompt, without padding",
    "micro_batch": "(B,) number of the pass that the row was in",
    "episode": "(B,) rows of one episode share it",
    "half": "(B,) of a pair: 0 where the row was fed as the chosen one, else 1",
    "side": "(B,) of a pair: 1 where the data set has the row as the chosen one, else 0",
    "ref_sum": "(B,) sum of the reference's log-probabilities, stored before the run",
    "is_known": "(B,) 1 where the data set has the row",
    "differs_at": "(B,) the first token that the template and the text do not give; NaN where all are right",
    "rewarded_row": "(B,) the row whose response was rewarded as this one's, or NaN",
    "given_advantages": "(B,) of the row when it was sampled",
}
OF_PARAMETERS = {  # (P,), of the parameters of a model in one optimiser step
    "trainable": "1 where it is to be trained",
    "optimised": "1 where the optimiser has it",
    "grad_norm": "norm of its gradient after clipping; -1 without a gradient",
    "grad_max": "largest entry of that",
    "change": "largest change of an entry",
    "weight_max": "largest entry before",
    "learning_rate": "of its group",
    "weight_decay": "of its group",
}
NUMBERS = {"loss": "what was differentiated, summed over passes", "clip_fraction": "share of ratios outside the range"}
NUMBERS |= {"total_grad_norm": "norm of the gradient of all rows and parameters, before it is clipped"}
CONFIG: dict[str, str] = {
    "method": "grpo, ppo, dpo or sft",
    "loss_type": "clip, cispo, sapo, reinforce; sigmoid and the other losses of dpo",
    "importance_sampling_level": "token or sequence",
    "clip_low": "range of the ratio below 1",
    "clip_high": "range of the ratio above 1",
    "advantage": "std, mean, batch_std, rloo, maxrl, none; gae",
    "aggregation": "token, sequence, sum, constant, prompt",
    "max_new_tokens": "the longest response that may be sampled",
    "num_items": "the number of tokens that the loss was divided by",
    "passes": "the number of passes that the loss was divided by",
    "num_generations": "responses of a prompt",
    "kl_coeff": "coefficient of the KL",
    "kl_estimator": "k1, k2, k3",
    "kl_placement": "loss or reward",
    "reward_weights": "list of R weights",
    "beta": "of preference losses",
    "label_smoothing": "of preference losses",
    "gamma": "discount of GAE",
    "lambd": "lambda of GAE",
    "temperature": "of sampling",
    "top_p": "of sampling",
    "top_k": "of sampling",
    "min_p": "of sampling",
    "eos_token_id": "number or list",
    "bos_token_id": "number",
    "mask_truncated": "true where responses stopped by length are not trained",
    "first_pass": "true where the update is the first on its samples",
    "entropy_coeff": "coefficient of an entropy bonus, which is not recomputed",
    "dtype": "of the model's passes: float32 (default), bfloat16, float16",
    "advantage_error": "of what was added to advantages since they were made",
    "ids": "bytes where the ids stand for the bytes of texts",
    "digits": "significant digits of the numbers, where they were written as text",
    "slope_digits": "significant digits of loss_slopes, where they were measured",
    "slope_targets": "distances of other tokens whose log-probability explains the gradient",
    "passes_in_step": "number of passes whose losses were summed",
    "dropout": "the largest that is on in the policy",
    "ref_dropout": "the largest that is on in the reference",
    "packed": "true where rows were cut out of packed ones",
    "update": "number of the optimiser step, from 1",
    "updates": "optimiser steps of the run",
    "parameters": "names of parameters",
    "foreign_parameters": "number of the optimiser's parameters that are not the model's",
    "optimizer": "its class",
    "is_first": "true where the optimiser has no state yet",
    "scheduler": "of the learning rate: constant, linear, cosine, constant_with_warmup",
    "warmup": "its updates of warm-up",
    "peak_learning_rate": "the learning rate of the config",
    "max_grad_norm": "of clipping",
    "adapters": "parts of names of parameters that an adapter trains",
    "is_tied": "false where embeddings are to be tied and are not",
    "reference": "none, kept, moved or policy: what became of the reference's weights",
}
FIELDS = {**IDS, **MASKS, **OF_TOKENS, **OF_ROWS, **OF_PARAMETERS, **NUMBERS}
WHOLE = (*IDS, *MASKS, "group", "prompt_len", "micro_batch", "episode")  # whole numbers
TEXTS = {"method", "loss_type", "importance_sampling_level", "advantage", "aggregation", "kl_estimator", "kl_placement"}
TEXTS |= {"dtype", "ids", "optimizer", "scheduler", "reference", "parameters", "adapters"}
SWITCHES = ("mask_truncated", "first_pass", "packed", "is_first", "is_tied")
LISTS = ("reward_weights", "eos_token_id", "parameters", "adapters", "slope_targets")
ALIASES = {"completion_mask": "loss_mask", "action_mask": "loss_mask", "old_per_token_logps": "old_logprobs"}
ALIASES |= {"ref_per_token_logps": "ref_logprobs", "per_token_logps": "new_logprobs"}
ALIASES |= {"sampling_per_token_logps": "sampler_logprobs"}
UNITS = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}  # relative rounding


class Missing(Exception):
    """A check needs fields that the step does not have."""


class Step:
    """Arrays of one step, in float64, int64 and bool; `unit` is the relative rounding error of its numbers."""

    def __init__(self, arrays: Mapping[str, Any], config: Mapping[str, Any], name: str = "step") -> None:
        self.name, self.config = name, dict(config)
        given = {ALIASES.get(key, key): np.asarray(value) for key, value in arrays.items()}
        _check_names(given, config, name)
        _check_settings(self.config, name)
        self.unit = _unit(given, self.config)
        self.arrays: dict[str, Tensor] = {}
        for key, value in given.items():
            if value.dtype.kind not in "biuf":
                raise UsageError(f"{name}: {key} must be numbers in rows of equal length, not {value.dtype}")
            _check_array(key, value, name)
            self.arrays[key] = torch.from_numpy(value.astype(np.float64))
        if "input_ids" not in self.arrays and "completion_ids" in self.arrays:
            _join(self.arrays)
        wide = [one.shape[1] for key, one in self.arrays.items() if key not in ("rewards", *PARTS) and one.ndim == 2]
        self.width = self.arrays["input_ids"].shape[1] if "input_ids" in self.arrays else max(wide, default=0)
        for key, one in self.arrays.items():
            if one.ndim == 2 and key not in ("rewards", *PARTS):
                self.arrays[key] = self._at_the_end(key, one)
        sizes = {key: len(one) for key, one in self.arrays.items() if one.ndim}
        if len(set(sizes.values())) > 1:
            raise UsageError(f"{name}: arrays must have as many rows as each other, not {sizes}")
        if "labels" in self.arrays:
            self.arrays.setdefault("loss_mask", (self.arrays["labels"] != -100).double())
        if "num_generations" in self.config and sizes and "group" not in self.arrays:
            self.arrays["group"] = torch.arange(max(sizes.values())).double() // self.config["num_generations"]

    def _at_the_end(self, key: str, value: Tensor) -> Tensor:
        """An array of the last columns with fillers before it: (B, C) -> (B, T)."""
        missing = self.width - value.shape[1]
        if missing < 0:
            raise UsageError(f"{self.name}: {key} has {value.shape[1]} columns, input_ids {self.width}")
        return torch.nn.functional.pad(value, (missing, 0), value=_filler(key))

    def __contains__(self, name: str) -> bool:
        return name in self.arrays

    def need(self, *names: str) -> None:
        """Raises: Missing with all fields, or settings, of these that the step lacks."""
        lacking = [one for one in names if one not in self.arrays and self.config.get(one) is None]
        if lacking:
            raise Missing(", ".join(lacking))

    def need_tokens(self) -> None:
        """Raises: Missing where the ids stand for texts."""
        if self.config.get("ids") == "bytes":
            raise Missing("ids and masks of tokens: the dump has texts")

    def get(self, name: str) -> Tensor:
        """An array in float64. Raises: Missing."""
        self.need(name)
        return self.arrays[name]

    def mask(self, name: str = "loss_mask") -> Tensor:
        """A mask, (B, T) bool. Raises: Missing."""
        return self.get(name) != 0

    def whole(self, name: str) -> Tensor:
        """An array in int64, such as ids or groups numbered from 0. Raises: Missing."""
        values = self.get(name).long()
        return values.unique(return_inverse=True)[1] if name in ("group", "episode", "micro_batch") else values

    def of_tokens(self, name: str) -> Tensor:
        """An array of tokens, (B, T); advantages of rows are repeated. Raises: Missing, also for sums."""
        values = self.get(name)
        if values.ndim < 2 and name != "advantages":
            raise Missing(f"{name} of tokens")
        return values if values.ndim == 2 else values[:, None].expand(-1, self.width)

    def scores(self) -> Tensor:
        """The reward of each row, weighted over functions, NaN where none scored it: (B,). Raises: Missing."""
        rewards = self.get("rewards")
        if rewards.ndim == 1:
            return rewards
        weights = torch.tensor(self.config.get("reward_weights") or [1.0] * rewards.shape[1], dtype=torch.float64)
        return torch.where(rewards.isnan().all(1), torch.nan, (rewards * weights).nansum(1))

    def attended(self) -> Tensor:
        """Where there is a token: (B, T) bool. Raises: Missing."""
        return self.mask("attention_mask")

    def responses(self) -> Tensor:
        """Where there is a token of a response: (B, T) bool. Raises: Missing."""
        if "response_mask" in self:
            return self.mask("response_mask")
        attended = self.attended()
        self.need("prompt_len")
        return attended & (attended.long().cumsum(1) > self.whole("prompt_len")[:, None])

    def is_cut(self) -> bool:
        """Whether tokens were sampled from a part of the vocabulary."""
        top_p, top_k, min_p = (self.config.get(one) or 0 for one in ("top_p", "top_k", "min_p"))
        return 0 < top_p < 1 or top_k > 0 or min_p > 0

    def ends(self) -> set[int]:
        """Ids that end a response. Raises: Missing."""
        self.need("eos_token_id")
        given = self.config["eos_token_id"]
        return {*given} if isinstance(given, list) else {given}


PARTS = ("prompt_ids", "completion_ids", "prompt_mask")


def _join(arrays: dict[str, Tensor]) -> None:
    """Put prompts and responses together; where a prompt's mask is not given, all its tokens count."""
    completions = arrays["completion_ids"]
    prompts = arrays.get("prompt_ids", completions[:, :0])
    arrays["input_ids"] = torch.cat([prompts, completions], 1)
    mask = arrays.get("prompt_mask", torch.ones_like(prompts))
    if "attention_mask" in arrays:
        return
    arrays.setdefault("prompt_len", mask.sum(1))
    response = arrays.get("response_mask", arrays.get("loss_mask"))
    if response is not None and response.ndim == 2 and response.shape[1] == completions.shape[1]:
        last = response.flip(1).cummax(1)[0].flip(1)  # up to the last token that counts
        arrays["attention_mask"] = torch.cat([mask, last], 1)


def _filler(name: str) -> float:
    """What an array has where no value is given."""
    return -100.0 if name == "labels" else 0.0


def _unit(given: Mapping[str, Any], config: Mapping[str, Any]) -> float:
    """The coarsest rounding among the numbers."""
    kinds = [UNITS.get(str(one.dtype), 0.0) for one in given.values()]
    digits = config.get("digits")
    return max(*kinds, 0.0, UNITS["float32"], 0.5 * 10.0 ** (1 - digits) if digits else 0.0)


def _check_names(arrays: Iterable[str], settings: Iterable[str], where: str) -> None:
    """Raises: UsageError for a name that the schema lacks, with the nearest one."""
    for name in arrays:
        if name in CONFIG:
            raise UsageError(f"{where}: {name} is a setting; give it in config")
    for name in (*arrays, *settings):
        if name not in FIELDS and name not in CONFIG:
            near = difflib.get_close_matches(name, [*FIELDS, *CONFIG, *ALIASES], 1)
            hint = f"; did you mean {near[0]}?" if near else "; howto/check_run.md lists the fields"
            raise UsageError(f"{where}: unknown field {name}{hint}")


def _check_array(key: str, value: np.ndarray[Any, Any], where: str) -> None:
    """Raises: UsageError for an array of another shape than its name has, and for ids that are not whole numbers."""
    shapes = {**dict.fromkeys([*IDS, *MASKS], (2,)), **dict.fromkeys(OF_TOKENS, (1, 2)), "rewards": (1, 2)}
    wanted = shapes.get(key, (0, 1) if key in NUMBERS else (1,))
    if value.ndim not in wanted or (key not in NUMBERS and not len(value)):
        meant = " or ".join(map(str, wanted))
        raise UsageError(f"{where}: {key} must have {meant} dimensions and a row, not the shape {value.shape}")
    if key in WHOLE and not (np.isfinite(value).all() and (value == np.floor(value)).all()):
        raise UsageError(f"{where}: {key} must be whole numbers, but has NaN, infinite or other numbers")


def _check_settings(config: Mapping[str, Any], where: str) -> None:
    """Raises: UsageError for a setting of another type than it has."""
    for key, value in config.items():
        one = value[0] if key in LISTS and isinstance(value, list) and value else value
        kinds = (str,) if key in TEXTS else (bool,) if key in SWITCHES else (int, float)
        is_right = isinstance(one, kinds) and (key in SWITCHES or not isinstance(one, bool))
        if isinstance(value, list) and key in LISTS:
            is_right = not value or (is_right and len({isinstance(each, kinds) for each in value}) == 1)
        if value is not None and not is_right:
            name = "a text" if key in TEXTS else "true or false" if key in SWITCHES else "a number"
            raise UsageError(f"{where}: setting {key} must be {name}, not {str(value)[:40]!r}; it is {CONFIG[key]}")
    for key in ("num_generations", "digits", "max_new_tokens"):
        if config.get(key) is not None and not 1 <= config[key] < 10**9:
            raise UsageError(f"{where}: setting {key} {config[key]} must be at least 1")


# ------------------------------------------------------------------------------------------------------------- files
def read_steps(path: str) -> list[Step]:
    """The steps at a path: a file, a folder of rows, or a folder of files. Raises: UsageError."""
    place = Path(path)
    if place.suffix == ".npz":
        return [_read_npz(place)]
    if (place / "rows.jsonl").is_file():
        return [_read_rows(place)]
    files = sorted(place.glob("*.npz"))
    if not files:
        raise UsageError(f"{path} has no step: give a .npz file, or a folder with rows.jsonl, or an experiment dir")
    return [_read_npz(one) for one in files]


def _read_npz(path: Path) -> Step:
    """A step of a file of arrays, read without pickle; its settings are JSON in the array `config`."""
    if not path.exists():
        raise UsageError(f"{path} does not exist")
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        config = json.loads(str(arrays.pop("config", "{}")))
    except (OSError, ValueError, KeyError, EOFError, RecursionError, zipfile.BadZipFile, zlib.error) as problem:
        raise UsageError(f"{path} cannot be read as arrays: {problem}; write it by numpy.savez") from problem
    return Step(arrays, _settings(config, path), path.name)


def _read_rows(folder: Path) -> Step:
    """A step of `rows.jsonl` and `step.json`; shorter rows are padded on the right."""
    rows = read_jsonl(folder / "rows.jsonl")
    settings = folder / "step.json"
    try:
        other = json.loads(settings.read_text(encoding="utf-8")) if settings.is_file() else {}
    except (ValueError, RecursionError) as problem:
        raise UsageError(f"{settings} is not JSON: {problem}") from problem
    for number, row in enumerate(rows):
        _check_row(row, f"{folder / 'rows.jsonl'} row {number}")
    return from_rows(rows, _settings(other, settings), str(folder))


def _settings(found: Any, where: Path) -> dict[str, Any]:
    """Settings as an object. Raises: UsageError."""
    if not isinstance(found, dict):
        raise UsageError(f"{where}: settings must be an object, not a {type(found).__name__}")
    return found


def _check_row(row: Any, where: str) -> None:
    """Raises: UsageError for a row that has other values than numbers, and lists of them."""
    if not isinstance(row, dict):
        raise UsageError(f"{where} must be an object, not a {type(row).__name__}")
    for key, value in row.items():
        is_one = key in OF_ROWS and key != "rewards"
        each = value if isinstance(value, list) and not is_one else [value]
        if not all(one is None or isinstance(one, int | float) for one in each):
            raise UsageError(f"{where}: {key} must be {'a number' if is_one else 'numbers'}")


def _joined(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows whose prompt and response are apart, each as one text; others as they are."""
    parts = [[row.get(key) or [] for key in PARTS] for row in rows]
    names = {key for row in rows for key in row}
    are_lists = all(isinstance(one, list) for row in parts for one in row)
    if "input_ids" in names or "completion_ids" not in names or not are_lists:
        return rows
    made = []
    for row, (prompt, response, mask) in zip(rows, parts):
        mask = [int(bool(one)) for one in mask] or [1] * len(prompt)
        one = {} if "attention_mask" in row else {"attention_mask": mask + [1] * len(response), "prompt_len": sum(mask)}
        rest = {key: value for key, value in row.items() if key not in PARTS}
        made.append(one | rest | {"input_ids": prompt + response})
    return made


def from_rows(rows: list[dict[str, Any]], other: Mapping[str, Any], name: str) -> Step:
    """A step of rows of lists and numbers; within a row a shorter list belongs to its last tokens."""
    rows = _joined(rows)
    names = dict.fromkeys(key for row in rows for key in row)
    of_tokens = [[one for key, one in row.items() if isinstance(one, list) and key != "rewards"] for row in rows]
    lengths = [max(map(len, lists), default=0) for lists in of_tokens]
    width = max(lengths, default=0)
    arrays: dict[str, Any] = {}
    for key in names:
        values = [row.get(key) for row in rows]
        lists = {isinstance(value, list) for value in values if value is not None}
        if len(lists) > 1:
            raise UsageError(f"{name}: {key} must be a list in all rows, or in none")
        if key == "rewards" or True not in lists:
            try:
                arrays[key] = np.array([np.nan if value is None else value for value in values], dtype=np.float64)
            except ValueError:
                raise UsageError(f"{name}: {key} must have as many numbers in each row, null for none") from None
            continue
        table = np.full((len(rows), width), _filler(key))
        for row, (value, length) in enumerate(zip(values, lengths)):
            if value:
                table[row, length - len(value) : length] = [np.nan if one is None else one for one in value]
        arrays[key] = table
    if "attention_mask" not in arrays and width:
        arrays["attention_mask"] = np.arange(width)[None] < np.array(lengths)[:, None]
    numbers = {key: value for key, value in other.items() if key in NUMBERS}
    return Step({**arrays, **numbers}, {key: one for key, one in other.items() if key not in NUMBERS}, name)
