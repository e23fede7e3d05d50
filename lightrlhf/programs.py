"""All programs, in the order of their listings.

Whatever lists programs reads this table: `lightrlhf`, its command, the demo, the tests and, by `make lists`, README and
pages. A new algorithm is one line here, beside its file, its test and its page.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple


class Program(NamedTuple):
    """A program, `lightrlhf/NAME.py`, and what is said of it elsewhere."""

    name: str
    args: str  # its class of arguments
    data: str = ""  # the rows that an algorithm trains on: the first word of their files, or environment
    method: str = ""  # for README; "" where another program has the same page
    papers: tuple[str, ...] = ()  # such as Ouyang 2022: 2203.02155, by number on arXiv or address
    page: str = ""  # below howto/algorithms, if not its own
    uses: tuple[str, ...] = ()  # programs that it imports; all else is in rooms
    turns: tuple[str, str] = ("turn", "shown")  # what the demo calls a text of the policy, and one between two
    trains_one_turn: bool = False  # the first of a dialogue, not all

    @property
    def module(self) -> str:
        """The module that has its `main`."""
        return "lightrlhf.demo.page" if self.name == "demo" else f"lightrlhf.{self.name}"

    def args_class(self) -> Any:
        """Its class of arguments, which imports the program."""
        return getattr(import_module(self.module), self.args)

    @property
    def samples(self) -> bool:
        """Whether it learns from its own samples."""
        return self.data in ("prompts", "dialogue", "environment")


ALGORITHMS = (
    Program("sft", "SFTArgs", "finetune", "supervised fine-tuning", ("Ouyang 2022: 2203.02155",)),
    Program("rm", "RMArgs", "preference", "reward model from preferences", ("Ziegler 2019: 1909.08593",)),
    Program(
        "ppo",
        "PPOArgs",
        "prompts",
        "PPO against a reward model or functions; with `--ngram 5` macro actions",
        ("Schulman 2017: 1707.06347", "Chai 2025: 2410.02743"),
    ),
    Program(
        "grpo",
        "GRPOArgs",
        "prompts",
        "GRPO, Dr. GRPO, DAPO, RLOO, GSPO, CISPO, REINFORCE++",
        ("Shao 2024: 2402.03300",),
    ),
    Program("dpo", "DPOArgs", "preference", "DPO and twenty relatives", ("Rafailov 2023: 2305.18290",)),
    Program(
        "kto",
        "KTOArgs",
        "unpaired",
        "KTO and BCO, from responses labelled good or bad",
        ("Ethayarajh 2024: 2402.01306",),
    ),
    Program(
        "distill",
        "DistillArgs",
        "prompts",
        "on-policy distillation of a teacher's distribution",
        ("Agarwal 2024: 2306.13649",),
    ),
    Program(
        "online_dpo",
        "OnlineDPOArgs",
        "prompts",
        "DPO or RAFT in iterations of the policy's own responses",
        ("Dong 2024: 2405.07863",),
        uses=("dpo", "sft", "generate", "annotate"),
    ),
    Program(
        "refuel",
        "RefuelArgs",
        "refuel",
        "multi-turn dialogues, each turn trained on their outcome",
        ("Gao 2024: 2410.04612",),
    ),
    Program(
        "iterative_refuel",
        "IterativeRefuelArgs",
        "dialogue",
        page="refuel",
        uses=("refuel",),
        turns=("turn", "user"),
        trains_one_turn=True,
    ),
    Program(
        "online_refuel",
        "OnlineRefuelArgs",
        "dialogue",
        page="refuel",
        uses=("refuel",),
        turns=("turn", "user"),
        trains_one_turn=True,
    ),
    Program(
        "reflect_rl",
        "ReflectRLArgs",
        "environment",
        "[text environments](howto/text_environments.md) with a frozen reflector",
        ("Zhou 2024: 2402.12621",),
        turns=("action", "observation"),
    ),
)
TRAINING: dict[str, Program] = {one.name: one for one in ALGORITHMS}
TOOLS: dict[str, Program] = {
    one.name: one
    for one in (
        Program("generate", "GenerateArgs", uses=("generate_episodes",)),
        Program("generate_episodes", "GenerateEpisodesArgs"),
        Program("annotate", "AnnotateArgs"),
        Program("evaluate", "EvaluateArgs", uses=("evaluate_episodes", "evaluate_env", "evaluate_dialogues")),
        Program("evaluate_episodes", "EvaluateEpisodesArgs"),
        Program("evaluate_env", "EvaluateEnvArgs"),
        Program("evaluate_dialogues", "EvaluateDialoguesArgs"),
        Program("judge", "JudgeArgs"),
        Program("check_reward", "CheckRewardArgs"),
        Program("check_run", "CheckRunArgs"),
        Program("check_data", "CheckDataArgs"),
        Program("estimate", "EstimateArgs"),
        Program("sweep", "SweepArgs"),
        Program("plot", "PlotArgs"),
        Program("serve", "ServeArgs"),
        Program("export", "ExportArgs"),
        Program("demo", "DemoArgs"),
        Program("doctor", "DoctorArgs"),
        Program("quickstart", "QuickstartArgs", uses=("sft", "rm", "ppo", "evaluate")),
    )
}
PROGRAMS = TRAINING | TOOLS
