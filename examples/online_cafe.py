"""The café by three ways from the same SFT policy: PPO, offline DPO, and online DPO, in one table.

Takes the folder of `make quickstart` and trains what it does not hold yet, by the quickstart's settings. Online DPO
asks the reward model as often as PPO does: 6,400 times. The gold judge, which no training has seen, decides. The
settings were fixed before the run; those of online DPO were softened once, after the KL had run away on the validation
split (howto/algorithms/online_dpo.md has both). The last line says which claims held.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets_prep.cafe import prepare_data
from datasets_prep.cafe.pretrain_base import BASE_DIR
from examples import quickstart
from examples.hidden_map import finish
from lightrlhf import dpo, evaluate, online_dpo, ppo, rm, sft
from lightrlhf.common.args import one_line_errors, parse
from lightrlhf.common.checkpoint import checkpoints

DPO = [
    *("--mini_batch_size=32", "--micro_batch_size=32", "--learning_rate=1e-3", "--lr_warmup_steps=5"),
    *("--beta=0.1", "--rpo_alpha=0.5", "--eval_iters=8", "--log_interval=5"),
]
ONLINE = [
    *("--iterations=8", "--prompts_per_iteration=100", "--num_responses=8", "--max_new_tokens=96", "--epochs=2"),
    *("--mini_batch_size=32", "--micro_batch_size=32", "--learning_rate=2e-4", "--lr_warmup_steps=4"),
    *("--beta=0.1", "--rpo_alpha=0.5", "--rollout_mini_batch_size=128", "--eval_prompts=200"),
]


@dataclass(frozen=True, kw_only=True)
class OnlineCafeArgs:
    """Compare PPO, DPO and online DPO on the café."""

    output_dir: str = "quickstart"
    """Folder of `make quickstart`; what it lacks is trained there."""
    seed: int = 1
    """Seed of every stage."""
    smoke: bool = False
    """Run every stage for a moment only; nothing is claimed of the result."""


@one_line_errors
def main(argv: list[str] | None = None) -> dict[str, bool]:
    """Run the program; returns which claims hold."""
    args = parse(OnlineCafeArgs, argv)
    data, logs, seed = f"{args.output_dir}/data/cafe", f"{args.output_dir}/logs", ["--seed", str(args.seed)]
    few = ["--num_finetune=64", "--num_preference=64", "--num_prompts=64", "--num_held_out=16"]
    short = ["--max_steps=1"] if args.smoke else []
    if not Path(data, "args.json").is_file():
        prepare_data.main(["--destination_dir", data, "--tokenizer_name", str(BASE_DIR), *seed, *few * args.smoke])
    common = ["--data_dir", data, "--log_dir", logs, *seed]

    def run(program: Any, name: str, *flags: str) -> str:
        """The newest finished experiment of a program in the folder, else a new one."""
        found = [path.parent for path in Path(logs, name).rglob("args.json") if checkpoints(path.parent)]
        whole = [path for path in found if program is not online_dpo or is_finished(path)]
        if whole:
            return str(max(whole))
        if program is online_dpo and found:
            return program.main(["--resume_from", str(max(found))])
        return program.main([*common, *flags])

    start = run(sft, "rlhf-supervised-finetuning", "--model_name", str(BASE_DIR), *quickstart.SFT, *short)
    reward = run(rm, "rlhf-reward-modelling", "--sft_experiment_dir", start, *quickstart.RM, *short)
    models = ["--sft_experiment_dir", start, "--rm_experiment_dir", reward]
    tiny = ["--iterations=1", "--prompts_per_iteration=8", "--eval_prompts=8", "--max_new_tokens=8"]
    trained = {
        "PPO": run(ppo, "rlhf-ppo", *models, *quickstart.PPO, *short),
        "DPO": run(dpo, "rlhf-dpo", "--sft_experiment_dir", start, *DPO, *short),
        "online DPO": run(online_dpo, "rlhf-online-dpo", *models, *ONLINE, *tiny * args.smoke),
    }
    flags = ["--rm_experiment_dir", reward, "--max_new_tokens", "96", *["--num_samples=8"] * args.smoke]
    rows = evaluate.main(["--experiment_dir", start, *trained.values(), *flags])
    claims = tell(dict(zip(("SFT", *trained), rows)), queries_of(trained, data))
    finish(claims, Path(args.output_dir))
    return claims


def is_finished(run: Path) -> bool:
    """Whether an online run has all its iterations."""
    stored = json.loads((run / "args.json").read_text(encoding="utf-8"))
    return (run / f"iteration-{stored['iterations']:02d}" / "evaluation.json").is_file()


def queries_of(trained: dict[str, str], data: str) -> dict[str, int]:
    """How many responses of its own each way had scored during training (DPO learns from the guests' pairs)."""
    told = json.loads((Path(trained["PPO"]) / "args.json").read_text(encoding="utf-8"))
    steps = int(checkpoints(Path(trained["PPO"]))[-1].name.partition("-")[2])
    last = json.loads((Path(trained["online DPO"]) / "results.json").read_text(encoding="utf-8"))[-1]
    return {"PPO": steps * told["rollout_size"], "DPO": 0, "online DPO": last["reward_queries"]}


def tell(rows: dict[str, dict[str, Any]], queries: dict[str, int]) -> dict[str, bool]:
    """Print the table and the claims."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="the café, held-out orders")
    for name in ("", "gold", "gold win rate over SFT, 95% interval", "KL to SFT, nats", "length", "reward queries"):
        table.add_column(name, justify="right" if name else "left")
    for name, row in rows.items():
        rate = row.get("win_rate")
        low, high = row.get("win_rate_interval", (0, 0))
        wins = f"{rate:.3f} [{low:.3f}, {high:.3f}]" if rate is not None else ""
        kl = f"{row['kl']:.1f}" if "kl" in row else ""
        count = f"{queries[name]:,}" if name in queries else ""
        table.add_row(name, f"{row['gold']:.3f}", wins, kl, f"{row['mean_length']:.1f}", count)
    Console(width=110).print(table)
    claims = {f"{name} wins >= {least:.0%}": rows[name]["win_rate"] >= least for name, least in GOALS.items()}
    return claims


GOALS = {"DPO": 0.7, "online DPO": 0.8}


if __name__ == "__main__":
    main()
