"""Shared test code: tiny models of many architectures, runs of programs, readers of experiment dirs."""

import json
import os
import random
import re
import signal
import subprocess
from pathlib import Path
from subprocess import PIPE

import torch

from helpers.forks import started_program
from helpers.processes import PATIENCE
from lightrlhf.data.batch import Batch, response_batch
from lightrlhf.models.roles import Policy, ScalarModel
from lightrlhf.storage.temporary import MARK, host
from lightrlhf.training.beginning import Beginning
from lightrlhf.training.learners import Learner, Learners
from lightrlhf.training.order import Order
from lightrlhf.training.progress import Progress
from lightrlhf.training.ranks import LocalRanks
from lightrlhf.training.run import Run

ROOT = Path(__file__).resolve().parents[2]
CPU = ["--accelerator", "cpu", "--devices", "1"]
CAFE_SIZES = ["--num_finetune", "60", "--num_preference", "60", "--num_prompts", "40"]
CAFE_SIZES += ["--num_held_out", "12", "--num_held_out_pairs", "12", "--num_proc", "1"]
VOCABULARY = 61

SMALL = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
LLAMA = SMALL | {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA |= {"max_position_embeddings": 256}
GPT2 = SMALL | {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
OPT = SMALL | {"hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 48, "num_hidden_layers": 2}
OPT |= {"num_attention_heads": 4, "max_position_embeddings": 256}
GPT_NEO = SMALL | {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]}
GPT_NEO |= {"window_size": 8, "max_position_embeddings": 256}
FALCON = SMALL | {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
GEMMA2 = LLAMA | {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 6, "final_logit_softcapping": 5.0}
ARCHITECTURES = {
    "llama": LLAMA,
    "gpt2": GPT2,
    "opt": OPT,
    "gpt_neo": GPT_NEO,
    "gpt_neox": LLAMA,
    "qwen2": LLAMA | {"num_key_value_heads": 2},
    "qwen3": LLAMA | {"num_key_value_heads": 2, "head_dim": 8},
    "gemma": LLAMA | {"num_key_value_heads": 2, "head_dim": 8},
    "mistral": LLAMA | {"num_key_value_heads": 2, "sliding_window": 6, "head_dim": 8},
    "gemma2": GEMMA2,
    "phi": LLAMA,
    "falcon": FALCON,
    "bloom": SMALL | {"hidden_size": 32, "n_layer": 2, "n_head": 4},
    "mamba": SMALL | {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
}


def unmarked(name: str) -> str:
    """A file's name; that of a temporary file without the mark of its process, which differs in each."""
    return re.sub(rf"\.{re.escape(host())}-{MARK}\.partial", ".partial", name)


def tiny_model(architecture: str, scalar: bool = False, **changes):
    """A Hugging Face model with random weights, so large that distributions are peaked and errors show."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

    config = AutoConfig.for_model(architecture, **(ARCHITECTURES[architecture] | changes))
    auto = AutoModelForSequenceClassification if scalar else AutoModelForCausalLM
    if scalar:
        config.num_labels = 1
    torch.manual_seed(1)
    model = auto.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def tiny_policy(architecture: str, **changes) -> Policy:
    return Policy(tiny_model(architecture, **changes)).eval()


def tiny_scalar(architecture: str, **changes) -> ScalarModel:
    return ScalarModel(tiny_model(architecture, scalar=True, **changes)).eval()


def save_model(architecture: str, folder: Path, tokenizer, **changes) -> Path:
    """A Hugging Face folder with a tiny model of `tokenizer`'s vocabulary, without the tokenizer."""
    special = {"pad_token_id": tokenizer.pad_token_id, "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
    tiny_model(architecture, **(special | {"vocab_size": len(tokenizer)} | changes)).save_pretrained(folder)
    return folder


def rows_of(*lengths: int) -> list[list[int]]:
    """Random id lists of these lengths, without special tokens."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(2, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


def left_padded(batch: Batch, pad_id: int = 0) -> Batch:
    """A right-padded batch as a left-padded one."""
    width = batch.input_ids.shape[1]
    ids = torch.full_like(batch.input_ids, pad_id)
    mask = torch.zeros_like(batch.attention_mask)
    actions = torch.zeros_like(batch.action_mask)
    for i, length in enumerate(batch.attention_mask.sum(1).tolist()):
        ids[i, width - length :] = batch.input_ids[i, :length]
        mask[i, width - length :] = True
        actions[i, width - length :] = batch.action_mask[i, : length - 1]
    return Batch(input_ids=ids, attention_mask=mask, action_mask=actions)


def alone(batch: Batch, row: int) -> Batch:
    """One row without any padding."""
    length = int(batch.attention_mask[row].sum())
    return Batch(
        input_ids=batch.input_ids[row : row + 1, :length],
        attention_mask=batch.attention_mask[row : row + 1, :length],
        action_mask=batch.action_mask[row : row + 1, : length - 1],
    )


def pair(prompt: list[int], chosen: list[int], rejected: list[int]) -> dict:
    """A row of `preference_*.pt`."""
    return {
        "chosen_input_ids": torch.tensor(prompt + chosen),
        "rejected_input_ids": torch.tensor(prompt + rejected),
        "prompt_len": len(prompt),
    }


PAIRS = [
    pair([5, 9, 3, 8, 7, 2, 6], [11, 12, 1], [11, 4, 13, 1]),  # the responses have a common prefix, too
    pair([4, 8, 2, 7, 6, 5, 5, 5, 9], [10, 1], [1]),
    pair([3, 3, 3, 7, 1, 2, 4, 4, 4, 4], [20, 1], [20, 1]),  # and here they are the same
    pair([6, 2, 9, 9, 9, 9], [7, 8, 1], [7]),  # one is a prefix of the other
]


def gradients(module) -> dict[str, torch.Tensor]:
    """Gradients by name, removed from the module."""
    collected = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    module.zero_grad(set_to_none=True)
    return collected


def assert_same_gradients(one: dict, other: dict, atol: float = 1e-6) -> None:
    """Compare gradients by name; `atol` is relative to the largest of all, so it means the same for every loss."""
    assert one.keys() == other.keys()
    scale = max(float(g.abs().max()) for g in one.values())
    assert scale > 0
    for name, gradient in one.items():
        gap = float((gradient - other[name]).abs().max())
        assert gap <= atol * max(scale, 1.0), f"{name}: {gap} apart, largest gradient {scale}"


class KeptGradients(Learners):
    """Learners of modules without an optimiser; an update keeps their gradients, by learner."""

    def __init__(self, *parts, **options) -> None:
        super().__init__(*parts, **options)
        self.gradients: dict[str, dict[str, torch.Tensor]] = {}

    def optimize(self, name: str) -> float:
        self.gradients[name] = gradients(self[name].module)
        return 0.0


class RunOfOneStep(Run):
    """A run within one step in this process, whose files are never opened; keeps gradients instead of stepping."""

    kind = KeptGradients

    def __init__(self, args, **modules) -> None:
        from lightning.fabric import Fabric

        self.args, self.dry = args, None
        self.ranks, self.progress = LocalRanks(args.seed), Progress()
        self.ranks.fabric, self.ranks.is_first = Fabric(accelerator="cpu", devices=1), False  # it writes nothing
        self.order = Order(args, self.ranks, Beginning(args, 1, {}), ["data"])
        self.learners = self.kind(args, self.ranks, self.order, self.progress, last_good=str)
        self.learners.by_name = {name: Learner(module, None, None) for name, module in modules.items()}
        self._take_verbs()

    @property
    def gradients(self) -> dict[str, dict[str, torch.Tensor]]:
        return self.learners.gradients


# ----------------------------------------------------------------------------------------------------------- programs
def environment() -> dict[str, str]:
    """Environment variables of a program in a process of its own; it can import `helpers`, too."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
    }


def run_program(
    module: str, *flags: str, check: bool = True, patience: float = PATIENCE
) -> subprocess.CompletedProcess:
    """`python -m module flags…` in a process of its own, a fork of one that has imported the libraries."""
    with started_program(module, *flags, cwd=ROOT, env=environment(), stdout=PIPE, stderr=PIPE, text=True) as process:
        out, err = process.communicate(timeout=patience)
    assert not check or process.returncode == 0, out + err
    return subprocess.CompletedProcess([module, *flags], process.returncode, out, err)


def kill_seed() -> int:
    """A new seed for the step or moment at which a test kills a program, or that of $LIGHTRLHF_KILL_SEED.

    It is printed, so pytest shows it with a failure:
    `LIGHTRLHF_KILL_SEED=123 python -m pytest tests/training/test_run.py -k killed` kills at the same step again.
    """
    seed = int(os.environ.get("LIGHTRLHF_KILL_SEED") or random.SystemRandom().randrange(2**32))
    print(f"LIGHTRLHF_KILL_SEED={seed}")
    return seed


def run_killed(folder: Path, pattern: str, rows: int, module: str, *flags: str, delay: float = 0.0) -> None:
    """Like `run_program`, but killed `delay` seconds after the files of `pattern` in `folder` exceed `rows` lines.

    rows = -1: as soon as such a file exists.
    """
    given = [folder, pattern, rows, delay, module, *flags]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with started_program("helpers.killed", *given, cwd=ROOT, env=environment(), **quiet) as process:
        status = process.wait(PATIENCE)
    assert status == -signal.SIGKILL, f"not killed, exit status {status}"


def metrics(experiment_dir: str | Path) -> list[dict[str, float]]:
    """The rows of metrics.jsonl without times."""
    lines = (Path(experiment_dir) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return [{name: value for name, value in row.items() if not name.startswith("time/")} for row in rows]


CHECKPOINT = "README.md chat_template.jinja config.json generation_config.json manifest.json model.safetensors".split()
CHECKPOINT += ["resume.pt", "tokenizer.json", "tokenizer_config.json"]  # of a language model
SAMPLING_GAP = ("sampling/kl", "sampling/ratio_max", "sampling/dropped", "sampling/staleness")


def learned(experiment_dir: str | Path) -> list[dict[str, float]]:
    """The metrics that do not depend on times, or on whether servers sampled."""
    return [
        {name: value for name, value in row.items() if not name.startswith("time/") and name not in SAMPLING_GAP}
        for row in metrics(experiment_dir)
    ]


def listing(folder: str | Path) -> list[str]:
    """Relative paths of all files in a folder and its subfolders."""
    return sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*") if path.is_file())


def last_checkpoint(experiment_dir: str | Path) -> Path:
    from lightrlhf.storage.checkpoint import checkpoints

    return checkpoints(Path(experiment_dir))[-1]


def weights(folder: str | Path) -> bytes:
    """The bytes of a checkpoint's weights: a whole model or an adapter."""
    return next(Path(folder).glob("*model.safetensors")).read_bytes()


def mixed_batch() -> Batch:
    """Three rows of different prompt and response lengths, with pad = eos = 1."""
    return response_batch(rows_of(3, 9, 1), [[*row, 1] for row in rows_of(6, 2, 4)], 1)


def reseal(folder: Path) -> None:
    """Accept the files of a folder that a test has changed, where the folder has a seal."""
    from lightrlhf.storage import seals

    if (folder / "manifest.json").is_file():
        seals.main([str(folder)])
