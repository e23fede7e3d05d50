"""The café by three ways from the same SFT policy: PPO, offline DPO, and online DPO, in one table over seeds.

Every stage but online DPO has the quickstart's settings, and all ways see the café's 6,400 prompts or 6,000 pairs once.
PPO scores one response to each prompt, online DPO eight; its beta was found on seed 100, which is none of the five. The
gold judge, which no training has seen, decides. The last line says which claims held;
howto/algorithms/online_dpo.md tells what was tried before.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets_prep.cafe import prepare_data
from datasets_prep.cafe.pretrain_base import BASE_DIR
from examples import quickstart
from examples.hidden_map import finish, interval, show
from lightrlhf import dpo, evaluate, online_dpo, ppo, rm, sft
from lightrlhf.cli.errors import one_line_errors
from lightrlhf.cli.parser import parse
from lightrlhf.storage.checkpoint import checkpoints
from lightrlhf.storage.jsonl import JsonlWriter

DPO = [
    *("--mini_batch_size=32", "--micro_batch_size=32", "--learning_rate=1e-3", "--lr_warmup_steps=5"),
    *("--beta=0.1", "--rpo_alpha=0.5", "--eval_iters=8", "--log_interval=5"),
]
ONLINE = [
    *("--iterations=8", "--num_responses=8", "--max_new_tokens=96"),
    *("--mini_batch_size=32", "--micro_batch_size=32", "--learning_rate=2e-4"),
    *("--beta=0.3", "--rpo_alpha=0.5", "--rollout_mini_batch_size=128", "--eval_prompts=200"),
]


@dataclass(frozen=True, kw_only=True)
class OnlineCafeArgs:
    """Compare PPO, DPO and online DPO on the café."""

    output_dir: str = "online_cafe"
    """Folder for data, logs and results; what is there is not trained again."""
    seeds: list[int] | None = None
    """Seeds to run; 1 to 5 when not given."""
    smoke: bool = False
    """Run every stage for a moment only; nothing is claimed of the result."""

    def __post_init__(self) -> None:
        for seed in self.seeds or []:
            if seed < 0:
                raise ValueError(f"--seeds {seed} must be at least 0")


@one_line_errors
def main(argv: list[str] | None = None) -> dict[str, bool]:
    """Run the program; returns which claims hold."""
    args = parse(OnlineCafeArgs, argv)
    folder, seeds = Path(args.output_dir), args.seeds or [1, 2, 3, 4, 5]
    with JsonlWriter(folder / "results.jsonl", {"dpo": DPO, "online": ONLINE, "smoke": args.smoke}) as writer:
        done = {row["seed"] for row in writer.rows}
        for seed in seeds:
            if seed not in done:
                writer.append({"seed": seed, "ways": run_seed(folder / f"seed-{seed}", seed, args.smoke)})
        results = [row["ways"] for row in writer.rows if row["seed"] in seeds]
    claims = tell(results)
    finish(claims, folder)
    return claims


def run_seed(folder: Path, number: int, smoke: bool) -> dict[str, dict[str, Any]]:
    """Train and evaluate each way; what was measured of it, with its reward queries."""
    data, logs, seed = f"{folder}/data/cafe", f"{folder}/logs", ["--seed", str(number)]
    few = ["--num_finetune=64", "--num_preference=64", "--num_prompts=64", "--num_held_out=16"]
    short = ["--max_steps=1"] if smoke else []
    if not Path(data, "args.json").is_file():
        prepare_data.main(["--destination_dir", data, "--tokenizer_name", str(BASE_DIR), *seed, *few * smoke])
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
        "online DPO": run(online_dpo, "rlhf-online-dpo", *models, *ONLINE, *tiny * smoke),
    }
    flags = ["--rm_experiment_dir", reward, "--max_new_tokens", "96", *["--num_samples=8"] * smoke]
    rows = evaluate.main(["--experiment_dir", start, *trained.values(), *flags])
    queries = queries_of(trained, data)
    return {name: {**row, "reward_queries": queries.get(name)} for name, row in zip(("SFT", *trained), rows)}


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


def tell(results: list[dict[str, dict[str, Any]]]) -> dict[str, bool]:
    """Print the table; returns which claims hold."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"the café, held-out orders: mean over {len(results)} seeds [95% interval]")
    for name in ("", "gold", "gold win rate over SFT", "KL to SFT, nats", "length", "reward queries"):
        table.add_column(name, justify="right" if name else "left")
    for way in results[0]:
        ends = [ways[way] for ways in results]
        names = ("gold", "win_rate", "kl")
        measures = [show(interval([end[name] for end in ends])) if name in ends[0] else "" for name in names]
        length = sum(end["mean_length"] for end in ends) / len(ends)
        queries = ends[0]["reward_queries"]
        table.add_row(way, *measures, f"{length:.1f}", "" if queries is None else f"{queries:,}")
    Console(width=130).print(table)
    for way in GOALS:
        print(f"  {way}, win rate of each seed:", *(f"{ways[way]['win_rate']:.3f}" for ways in results))
    return {
        f"{way} wins >= {least:.0%}": interval([ways[way]["win_rate"] for ways in results])[0] >= least
        for way, least in GOALS.items()
    }


GOALS = {"DPO": 0.7, "online DPO": 0.8}


if __name__ == "__main__":
    main()
