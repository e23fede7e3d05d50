"""The claims that papers make, beside the experiment that tests each here; written down before the runs that are kept.

A figure of a paper stands here only where it was read in the paper's abstract, its repository or a text that quotes it;
`says` is the claim alone elsewhere.

Left out: claims about speed and memory (howto/speed.md), and those that an experiment here was not made for.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from examples.experiments.agent_tasks import end
from examples.experiments.readings import Read, each, equal_kl
from examples.experiments.records import Row
from examples.experiments.stats import restricted

LIMIT = 60  # rollouts of a run on letters


@dataclass(frozen=True, kw_only=True)
class Claim:
    """That an arm is better than a control, in one measure of one experiment.

    where: values of columns that choose the experiment's rows. matched: a second control with the same horizon; where
    the arm is better than the first control alone, the claim holds only at the same lambda.
    """

    says: str
    measure: str
    experiment: str
    arm: str
    control: str
    read: Read
    where: dict[str, Any] = field(default_factory=dict)
    matched: str | None = None
    less_is_better: bool = False
    digits: int = 3


@dataclass(frozen=True, kw_only=True)
class Section:
    """The claims of a section of howto/results.md, which says what their papers report and in which setting."""

    title: str
    claims: tuple[Claim, ...]
    not_measurable: tuple[str, ...] = ()


def column(name: str) -> Read:
    """The value of a column."""
    return each(lambda row: float(row[name]))


def result(name: str) -> Read:
    """A value of the column `result`."""
    return each(lambda row: float(row["result"][name]))


def success(iterations: int) -> Read:
    """Sampled success on held-out starts after so many iterations; of an arm without RL its only one."""

    def value(row: Row) -> float:
        by_iteration = {one["iterations"]: one["success"] for one in row["results"]}
        return float(by_iteration.get(iterations, row["results"][-1]["success"]))

    return each(value)


rollouts = each(lambda row: restricted([row["rollouts"]], LIMIT)[0])
last_turn = each(lambda row: float(row["scores"][-1]))
gold_at_end = each(lambda row: float(row["curve"][-1]["gold"]))

TOKEN, MATCHED, MACRO = "token", "token at lambda^(1/8)", "n=8"
MACRO_ACTIONS = Section(
    title="macro actions",
    claims=tuple(
        Claim(
            says=says,
            measure=measure,
            experiment="macro_actions",
            where={"setting": setting},
            arm=MACRO,
            control=TOKEN,
            matched=MATCHED,
            read=read,
            less_is_better=read is rollouts,
            digits=1 if read is rollouts else 3,
        )
        for says, measure, setting, read in (
            (
                "macro actions learn faster",
                "letters, rollouts to a score of .9",
                "share",
                rollouts,
            ),
            (
                "and where the reward depends on the position",
                f"letters, score of the last five of {LIMIT} rollouts",
                "position",
                column("score"),
            ),
            (
                "and under a noisy reward",
                "letters, rollouts to a score of .9",
                "noise",
                rollouts,
            ),
            (
                "and score higher on text",
                "café, gold score after 15 rollouts",
                "cafe",
                column("gold"),
            ),
        )
    )
    + (
        Claim(
            says="and write more programs that pass their tests",
            measure="small problems, pass@1 after 30 rollouts",
            experiment="unit_tests",
            arm="n=5",
            control="token",
            read=column("pass_1"),
        ),
        Claim(
            says="PPO on unit tests is better than SFT",
            measure="small problems, pass@1 after 30 rollouts",
            experiment="unit_tests",
            arm="n=5",
            control="SFT",
            read=column("pass_1"),
        ),
    ),
    not_measurable=("scores, win rates and pass@1 of models of 2B to 27B on TL;DR, HH-RLHF, WebGPT and APPS",),
)


def refuel_claims(task: str, measure: str) -> tuple[Claim, ...]:
    """The three claims about the order of arms at the last turn; LT-MIXIN was the better last-turn arm."""
    said = (
        ("the policy's own prefixes are better than the data's", "REFUEL", "MT-MIXIN"),
        ("continuing to the last turn is better than sampling only that turn", "MT-MIXIN", "LT-MIXIN"),
        ("REFUEL is better than training the last turn", "REFUEL", "LT-MIXIN"),
    )
    return tuple(
        Claim(
            says=says,
            measure=measure,
            experiment=f"refuel_{task}",
            arm=arm,
            control=control,
            read=last_turn,
        )
        for says, arm, control in said
    )


REFUEL = Section(
    title="REFUEL",
    claims=(
        *refuel_claims("two_slots", "two slots, gold score at the last turn"),
        *refuel_claims("cafe", "café, gold score at the last turn"),
    ),
    not_measurable=("win rates of an 8B model against a 70B model, judged by GPT-4",),
)
ONLINE = Section(
    title="online DPO",
    claims=(
        Claim(
            says="online is better than offline",
            measure="hidden map, share of right tokens at equal KL",
            experiment="hidden_map",
            arm="online",
            control="offline, SFT policy",
            read=equal_kl,
        ),
        Claim(
            says="own responses are better than foreign text",
            measure="hidden map, share of right tokens at equal KL",
            experiment="hidden_map",
            arm="offline, SFT policy",
            control="offline, foreign text",
            read=equal_kl,
        ),
        Claim(
            says="online is better than offline",
            measure="café, gold win rate over the SFT policy",
            experiment="online_cafe",
            arm="online DPO",
            control="DPO",
            read=column("win_rate"),
        ),
    ),
    not_measurable=("AlpacaEval 2, MT-Bench and Arena-Hard of an 8B model",),
)


def reflect_claim(task: str, says: str, arm: str, control: str, iterations: int) -> Claim:
    return Claim(
        says=says,
        measure=f"{task}, success after {iterations} iterations",
        experiment=f"reflect_rl_{task}",
        arm=arm,
        control=control,
        read=success(iterations),
    )


POSITIVE, RL = "Reflect-RL, positive", "SFT+RL"
NEGATIVES, REFLECTOR, AFTER_SFT = "negative examples help", "a reflector helps RL", "RL is better than SFT alone"
REFLECT_RL = Section(
    title="Reflect-RL",
    claims=(
        reflect_claim("taxi", AFTER_SFT, RL, "SFT", 50),
        reflect_claim("taxi", REFLECTOR, POSITIVE, RL, 50),
        reflect_claim("taxi", NEGATIVES, "Reflect-RL", POSITIVE, 50),
        reflect_claim("explore", AFTER_SFT, RL, "SFT", 25),
        reflect_claim("explore", REFLECTOR, POSITIVE, RL, 25),
        reflect_claim("explore", NEGATIVES, "Reflect-RL", POSITIVE, 25),
        reflect_claim("household", AFTER_SFT, "SFT+RL, oracle's commands", "SFT, oracle's commands", 40),
    ),
    not_measurable=("success of GPT-2 XL with reflections written by GPT-4, on the published tasks of AutoExplore",),
)


def switch_claim(says: str, arm: str, name: str, control: str = "default", less: bool = False) -> Claim:
    measure = {"right": "right answers at the end", "speed": "right answers, mean of the run"}
    measure["wrong_length"] = "growth of wrong answers, words"
    return Claim(
        says=says,
        measure=measure[name],
        experiment="grpo_switches",
        arm=arm,
        control=control,
        read=result(name),
        less_is_better=less,
        digits=2 if less else 3,
    )


def critic_free(says: str, arm: str, control: str) -> Claim:
    return Claim(
        says=says,
        measure="café, gold score after 3,072 samples",
        experiment="critic_free_cafe",
        arm=arm,
        control=control,
        read=gold_at_end,
    )


DEFAULT, SEVERAL = "default", "several updates"
COMPARED = ("right", "speed")  # measures of GRPO's switches that decide what mattered
SWITCHES = {  # table: control, arms
    "advantage": (DEFAULT, ["mean", "batch_std", "rloo", "maxrl", "reinforce_pp", "reinforce_pp_baseline"]),
    "aggregation": (DEFAULT, ["sequence", "sum", "constant", "prompt"]),
    "KL": (DEFAULT, ["KL in the reward", "KL in the loss"]),
    "prompts and updates": (DEFAULT, ["resample_rounds 4", SEVERAL]),
    "ratio": (SEVERAL, ["clip_coeff_high .28", "gspo", "cispo", "sapo"]),
}
WITHOUT_A_CRITIC = Section(
    title="without a critic",
    claims=(
        critic_free("GRPO is better than PPO", "GRPO", "PPO"),
        critic_free("RLOO is better than PPO", "RLOO", "PPO"),
    ),
)
RELATIVES = Section(
    title="switches",
    claims=(
        switch_claim("Dr. GRPO: no division by the deviation", "mean", "right"),
        switch_claim(
            "Dr. GRPO: constant weights keep wrong answers short",
            "constant",
            "wrong_length",
            "sequence",
            less=True,
        ),
        switch_claim("RLOO: the mean of the others as the baseline", "rloo", "right"),
        switch_claim("MaxRL: division by the mean", "maxrl", "right"),
        switch_claim("REINFORCE++: whitened, without a baseline", "reinforce_pp", "right"),
        switch_claim("DAPO: dynamic sampling (30% more samples)", "resample_rounds 4", "right"),
        switch_claim("DAPO: clip-higher", "clip_coeff_high .28", "right", SEVERAL),
        switch_claim("GSPO: the ratio of whole responses", "gspo", "right", SEVERAL),
        switch_claim("CISPO: a bounded weight for every token", "cispo", "right", SEVERAL),
        switch_claim("SAPO: soft bounds", "sapo", "right", SEVERAL),
    ),
    not_measurable=("mathematics and code, billions of parameters, responses of thousands of tokens",),
)
REAL_MODEL = Section(
    title="real model",
    claims=tuple(
        Claim(
            says="GRPO is better than RAFT from the same samples",
            measure=f"`{task}`, right greedy answers",
            experiment="real_reasoning",
            where={"task": task},
            arm="GRPO",
            control="RAFT",
            read=column("greedy"),
        )
        for task in ("letter_counting", "gcd")
    ),
)
POSITION = "distill by position"  # claims about `distilled_cafe` were listed after its rows, which say them all
DISTILLATION = Section(
    title="distillation",
    claims=tuple(
        Claim(
            says=says,
            measure="café, gold score after 3,072 samples",
            experiment=experiment,
            arm=arm,
            control=control,
            read=gold_at_end,
        )
        for says, experiment, arm, control in (
            ("on-policy distillation is better than RL", "distilled_cafe", POSITION, "GRPO"),
            ("and than SFT on the teacher's samples", "distilled_cafe", POSITION, "SFT on the teacher"),
            ("the KL of responses is better than of positions", "distilled_cafe", "distill by sequence", POSITION),
            ("another tokenizer: words on are better than the response", "other_tokenizer", "to go", "response"),
            ("and than SFT on the teacher's texts", "other_tokenizer", "to go", "SFT on texts"),
        )
    )
    + tuple(
        Claim(
            says="a hint to oneself is better than GRPO",
            measure=f"`{task}`, right greedy answers after 16,384 samples",
            experiment="hinted_reasoning",
            where={"task": task},
            arm="hint",
            control="GRPO",
            read=column("accuracy"),
        )
        for task in ("chain_sum", "count_bits")
    ),
    not_measurable=("summaries, translation and mathematics, teachers of billions of parameters",),
)
WITH_TOOL, WITHOUT_TOOL = "with the tool", "without the tool"
AGENTS = Section(
    title="agents",
    claims=tuple(
        Claim(
            says=says,
            measure="taxi, success after 75 iterations",
            experiment="taxi_agents",
            arm="GRPO, credit by turn",
            control=control,
            read=success(75),
        )
        for says, control in (
            ("`grpo --env` is better than `reflect_rl` without a reflector", "Reflect-RL's program, SFT+RL"),
            ("credit by turn is better than by episode", "GRPO, credit by episode"),
        )
    )
    + (
        Claim(
            says="a calculator helps",
            measure="products, right at the end",
            experiment="agents",
            arm=f"sums: {WITH_TOOL}",
            control=f"sums: {WITHOUT_TOOL}",
            read=each(end),
        ),
        Claim(
            says="and SmolLM2",
            measure="products, right at the end",
            experiment="real_calculator",
            arm=WITH_TOOL,
            control=WITHOUT_TOOL,
            read=each(lambda row: end(row, 4)),
        ),
    ),
)
SECTIONS = (WITHOUT_A_CRITIC, RELATIVES, MACRO_ACTIONS, ONLINE, REFUEL, REFLECT_RL, REAL_MODEL, DISTILLATION, AGENTS)
