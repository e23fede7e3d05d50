"""Results of every kind from one process, to be compared bitwise: `python bitwise.py SHARED FOLDER FLAGS_OF_RUNS`.

SHARED has the `data` and the models `llama` and `scalar` that all processes start from. Written is
`FOLDER/results.pt`: by name a tree of plain values and tensors.
"""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch

from helpers import CAFE_SIZES, last_checkpoint, metrics, rows_of, tiny_model
from helpers.programs import main_of
from helpers.tiny_runs import experiment_of

PROGRAMS = ("sft", "rm", "dpo", "ppo")


def prepared_files(folder: Path) -> dict[str, str]:
    """SHA-256 of the splits and the tokenizer that the café's preparation writes."""
    from datasets_prep.cafe.prepare_data import main

    main(["--destination_dir", str(folder), *CAFE_SIZES])
    files = [*folder.rglob("*.pt"), *folder.rglob("tokenizer.json")]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(files)}


def batches(shared: Path) -> dict[str, Any]:
    """Orders of epochs, micro-batches of a split, subsets and the noise of sampling."""
    from lightrlhf.data.batch import epoch_order, finetune_batch, micro_batch_indices
    from lightrlhf.data.prompts import subset
    from lightrlhf.data.splits import load_split

    rows = load_split(str(shared / "data"), "finetune", "train")
    order = epoch_order(len(rows), 42, 1)
    batch = finetune_batch([rows[i] for i in order[:8]], 0, False)
    return {
        "orders": [epoch_order(1000, 42, epoch) for epoch in range(3)],
        "micro-batches": micro_batch_indices([rows[i] for i in order], 4),
        "ids": batch.input_ids,
        "masks": batch.action_mask,
        "subset": subset(1000, 100, 1234),
        "noise": torch.rand(64, 64, generator=torch.Generator().manual_seed(5)),
    }


def losses() -> dict[str, Any]:
    """Every preference loss and its gradient on fixed log-probabilities."""
    from lightrlhf.maths.preference import LOSSES, Pairs

    found = {}
    for name, loss in LOSSES.items():
        logps = -torch.arange(4 * 37, dtype=torch.float32).mul(7).remainder(29).div(8).view(4, 37)
        logps.requires_grad_()
        lengths = torch.arange(37) % 5 + 4.0
        pairs = Pairs(**dict(zip(NAMES, logps)), beta=0.3, chosen_lengths=lengths, rejected_lengths=lengths + 1)
        values = loss(pairs)
        found[name] = (values.detach(), *torch.autograd.grad(values.sum(), logps))
    return found


NAMES = ("policy_chosen_logps", "policy_rejected_logps", "ref_chosen_logps", "ref_rejected_logps")


def generated(shared: Path, folder: Path, *flags: str) -> list[Any]:
    """Ids of responses."""
    from lightrlhf.generate import main
    from lightrlhf.storage.jsonl import read_jsonl

    given = ["--data_dir", str(shared / "data"), "--split", "train", "--model_name", str(shared / "llama")]
    given += ["--num_prompts", "16", "--max_new_tokens", "24", "--accelerator", "cpu"]
    (file,) = main([*given, *flags, "--output_file", str(folder / f"{len(flags)}.jsonl")])
    return [row["response_ids"] for row in read_jsonl(file)]


def scores(shared: Path) -> torch.Tensor:
    """Scores of a reward model with fixed weights."""
    from transformers import AutoModelForSequenceClassification

    from lightrlhf.models.roles import ScalarModel
    from lightrlhf.rewards.scorers import score_batch

    model = ScalarModel(AutoModelForSequenceClassification.from_pretrained(shared / "scalar")).eval()
    ids = torch.tensor(rows_of(*[48] * 8))
    with torch.no_grad():
        return score_batch(model, ids, torch.ones_like(ids, dtype=torch.bool))


def trained(program: str, flags: list[str]) -> dict[str, Any]:
    """Weights and metrics of a run."""
    from safetensors.torch import load_file

    main_of(program)(flags)
    run = experiment_of(Path(flags[flags.index("--log_dir") + 1]))
    return {"weights": load_file(next(last_checkpoint(run).glob("*model.safetensors"))), "metrics": metrics(run)}


def main() -> None:
    shared, folder, flags = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
    results = {
        "prepared files": prepared_files(folder / "cafe" / "tiny"),
        "batches and noise": batches(shared),
        "weights drawn at a seed": tiny_model("llama").state_dict(),
        "preference losses": losses(),
        "scores": scores(shared),
        "greedy ids": generated(shared, folder, "--do_sample", "False"),
        "sampled ids": generated(shared, folder, "--num_generations", "2", "--seed", "3"),
        **{f"{program}, 3 steps": trained(program, flags[program]) for program in PROGRAMS},
    }
    facts = {"capability": torch.backends.cpu.get_cpu_capability(), "threads": torch.get_num_threads()}
    torch.save({"results": results, **facts}, folder / "results.pt")


if __name__ == "__main__":
    main()
