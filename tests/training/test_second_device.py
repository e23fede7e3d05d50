"""Every training program on a device that is not the CPU: the same figures, the same files, resumed bit by bit."""

import json
import re
from pathlib import Path

import pytest
from helpers import last_checkpoint, metrics, run_killed, weights
from helpers.on_second import even_tokens
from helpers.programs import trained
from helpers.second_runs import FIXED, THERE, figures, gaps, there
from helpers.tiny_runs import ITERATED, PROGRAMS, TRAINED, TinyRuns, experiment_of

from lightrlhf.generation import sampling

LORA, LAST = ["--finetune_mode", "lora"], ["--finetune_mode", "last_layer"]
HALF = ["--precision", "bf16-mixed"]
# Explained variance divides two sums, Adam by the size of each gradient; sums have other roundings.
EXACT, ROUNDED = (2e-6, 1e-5), (0.03, 0.06)
MODES = {  # flags, and the largest difference to the CPU, relative to numbers above 1: of the first step, of others
    "all": ([], EXACT),
    "lora": (LORA, EXACT),
    "last_layer": (LAST, EXACT),
    "all-bf16": (HALF, ROUNDED),
    "lora-bf16": ([*HALF, *LORA], ROUNDED),
    "last_layer-bf16": ([*HALF, *LAST], ROUNDED),
}
FAST = ("sft", "dpo", "ppo", "grpo")


@pytest.fixture(scope="module")
def runs(tmp_path_factory, cafe_data, talk_data, tokenizer) -> TinyRuns:
    return TinyRuns(tmp_path_factory.mktemp("second") / "runs", cafe_data, talk_data, tokenizer)


def assert_same_figures(found: Path, expected: Path, at_first: float, later: float) -> None:
    """Compare the metrics of a run on the device with those of the CPU's: of the first step, and of others."""
    first, *others = (gaps(*rows) for rows in zip(figures(found), figures(expected), strict=True))
    assert max(first)[0] <= at_first, (found.name, max(first))
    assert max(map(max, others))[0] <= later, (found.name, max(map(max, others)))


@pytest.mark.parametrize(
    "mode, programs",
    [
        pytest.param("all", FAST, id="all"),
        pytest.param("all", tuple(set(TRAINED) - {*FAST}), id="all-others", marks=pytest.mark.slow),
        *(pytest.param(mode, TRAINED, id=mode, marks=pytest.mark.slow) for mode in MODES if mode != "all"),
    ],
)
def test_training_gives_the_cpu_s_figures(mode, programs, runs, tmp_path, monkeypatch):
    """In bfloat16 a token is drawn by its number, for roundings would change draws by probabilities."""
    flags, (at_first, later) = MODES[mode]
    changes = ["even"] if HALF[1] in flags else []
    if changes:
        monkeypatch.setattr(sampling, "inverse_cdf", even_tokens)
    calls = {}
    for name in programs:
        trained(name, *runs.flags(name, tmp_path / "cpu" / name, *flags, *FIXED, steps=2))
        own = runs.flags(name, tmp_path / "second" / name, *flags, *FIXED, *THERE, steps=2)
        calls[name] = (f"lightrlhf.{name}", own)
    there(calls, changes=changes)
    for name in programs:
        assert_same_figures(tmp_path / "second" / name, tmp_path / "cpu" / name, at_first, later)


VARIANTS = {  # what else passes go through: a program, its flags, and what is changed on the device
    "prefix cache": ("reflect_rl", ["--with_history", "True"], ""),
    "reflector": ("reflect_rl", ["--reflect_experiment_dir", "CORRIDOR", "--reflect_max_new_tokens", "2"], ""),
    "macro actions": ("ppo", ["--ngram", "2"], ""),
    "random macro actions": ("ppo", ["--termination_condition", "randomized", "--repeat_times", "2"], ""),
    "perplexity": ("ppo", ["--termination_condition", "ppl", "--entropy_coeff", "0.01"], ""),
    "restricted draws": ("grpo", ["--top_k", "40", "--top_p", "0.9", "--min_p", "0.001"], ""),
    "held weights": ("sft", [*LORA, "--base_dtype", "bfloat16"], ""),
    "DoRA": ("dpo", [*LORA, "--use_dora", "True"], ""),
    "buckets": ("grpo", [], "buckets"),
    "buckets of PPO": ("ppo", [], "buckets"),
    "buckets with a cache": ("online_refuel", [], "buckets"),
    "chunks": ("sft", [], "chunks"),
    "chunks of LoRA": ("dpo", LORA, "chunks"),
    "chunks of PPO": ("ppo", ["--entropy_coeff", "0.01"], "chunks"),
    "chunks of distillation": ("distill", [], "chunks"),
}


@pytest.mark.slow
@pytest.mark.parametrize("change", ["", "buckets", "chunks"])
def test_variants_give_the_cpu_s_figures(change, runs, tmp_path):
    """Other passes and draws; decoding in buckets, as it is captured on CUDA; heads with two rows of logits."""
    calls, expected = {}, {}
    for name, (program, flags, own) in VARIANTS.items():
        if own == change:
            flags = [str(runs.corridor) if word == "CORRIDOR" else word for word in flags]
            given = (program, tmp_path / "second" / name, *flags, *FIXED)
            calls[name] = (f"lightrlhf.{program}", runs.flags(*given, *THERE, steps=2))
            expected[name] = trained(program, *runs.flags(program, tmp_path / "cpu" / name, *given[2:], steps=2))
    there(calls, changes=[change] if change else [])
    for name in calls:
        assert_same_figures(tmp_path / "second" / name, tmp_path / "cpu" / name, *EXACT)


@pytest.mark.slow
def test_frozen_models_may_be_on_another_device(runs, sft_dir, rm_dir, tmp_path):
    """Trainer on one, reference and reward model on the other: nothing crosses but what is meant."""
    models = ["--sft_experiment_dir", sft_dir, "--rm_experiment_dir", rm_dir, *FIXED]
    places = {"cpu": [], "second": THERE}
    given = {place: [*runs.flags("ppo", tmp_path / place, *models, *more, steps=2)] for place, more in places.items()}
    given = {place: without(flags, "--model_name", "--reward_function") for place, flags in given.items()}
    trained("ppo", *given["cpu"])
    found = there({"ppo": ("lightrlhf.ppo", given["second"])}, changes=["apart"])
    assert_same_figures(tmp_path / "second", tmp_path / "cpu", *EXACT)
    assert found["ppo"]["devices"] == ["second:0", "second:1"]


def without(flags: list[str], *names: str) -> list[str]:
    """Flags without some, and their values."""
    pairs = zip(flags[::2], flags[1::2], strict=True)
    return [word for pair in pairs if pair[0] not in names for word in pair]


@pytest.mark.slow
def test_killed_runs_resume_bit_by_bit(runs, tmp_path):
    """With dropout, whose random numbers the device draws: from the state that the checkpoint has of it."""
    programs = ("sft", "ppo", "grpo")
    whole = {name: (f"lightrlhf.{name}", runs.flags(name, tmp_path / "whole" / name, *THERE)) for name in programs}
    there(whole)
    resumed = {}
    for name in programs:
        folder = tmp_path / "killed" / name
        job = {"calls": {name: (f"lightrlhf.{name}", runs.flags(name, folder, *THERE))}}
        run_killed(folder, "**/checkpoint-000002/manifest.json", -1, "helpers.on_second", json.dumps(job))
        resumed[name] = (f"lightrlhf.{name}", ["--resume_from", str(experiment_of(folder))])
    there(resumed)
    for name in programs:
        one, other = (experiment_of(tmp_path / place / name) for place in ("whole", "killed"))
        assert weights(last_checkpoint(one)) == weights(last_checkpoint(other)), name
        assert metrics(one) == metrics(other), name


def test_texts_in_a_row_give_the_figures_of_padded_ones_and_read_nothing(runs, tmp_path):
    """In half precision; attention is a stand-in for CUDA's kernel."""
    half, programs = [*HALF, "--micro_batch_size", "2", *FIXED], ("sft", "ppo")
    ways = {"rows": ["varlen"], "padded": []}
    found = [counted(runs, tmp_path / way, *half, programs=programs, changes=names) for way, names in ways.items()]
    for name in programs:
        rows, padded = (one[name] for one in found)
        assert rows["rows_of_texts"] > 0 == padded["rows_of_texts"]
        update = rows["phases"]["update"][1:]  # the first has the trial pass
        assert update and all(reads <= MOST_READS and not waits for reads, waits in update), rows["reads"]
        furthest = max(gaps(*(figures(tmp_path / way / name) for way in ways)))
        assert furthest[0] <= 0.03, (name, furthest)


SCORED, LEARNED = ["--rm_experiment_dir", "SCORED"], ["--teacher_coeff", "0.5", "--teacher", "TEACHER"]
OFFLOADING = {  # a program, its flags, and how many of its models are offloaded
    "ppo": ("ppo", SCORED, 2),
    "grpo": ("grpo", SCORED, 2),
    "online_refuel": ("online_refuel", SCORED, 2),
    "reflect_rl": ("reflect_rl", ["--init_kl_coeff", "0.1"], 1),
    "distill": ("distill", [], 1),
    "likeliest tokens": ("distill", ["--estimator", "top_k"], 1),
    "sampled tokens": ("distill", ["--estimator", "k1"], 1),
    "teacher of PPO": ("ppo", LEARNED, 2),
    "teacher of GRPO": ("grpo", LEARNED, 2),
}
AT_FIRST = ("grpo", "distill")


@pytest.mark.parametrize(
    "names",
    [AT_FIRST, pytest.param(tuple(name for name in OFFLOADING if name not in AT_FIRST), marks=pytest.mark.slow)],
    ids=["first", "others"],
)
def test_offloaded_models_are_on_the_device_for_their_passes_alone(names, runs, tmp_path):
    """Figures are the same bit by bit, in bfloat16 too."""
    scored = trained("rm", *runs.flags("rm", tmp_path / "rm", *FIXED, steps=1))
    words, found = {"SCORED": scored, "TEACHER": runs.teacher}, {}
    for way in ("True", "False"):
        calls = {}
        for name in names:
            program, flags, _ = OFFLOADING[name]
            more = [re.sub("SCORED|TEACHER", lambda word: str(words[word[0]]), flag) for flag in flags]
            more += ["--base_dtype", "bfloat16", "--offload", way, *FIXED, *THERE]
            calls[name] = (f"lightrlhf.{program}", runs.flags(program, tmp_path / way / name, *more, steps=2))
        found[way] = there(calls, changes=["offload"])
    for name in names:
        seen = found["True"][name]["offloaded"]
        assert seen["models"] == OFFLOADING[name][2] and seen["fetched"] >= 2 and not seen["left"], (name, seen)
        assert found["False"][name]["offloaded"]["models"] == 0
        assert figures(tmp_path / "True" / name) == figures(tmp_path / "False" / name)


def test_a_model_on_the_device_is_offloaded_from_it():
    there({"offload": ("helpers.second_runs:offload_from_device", [])})


@pytest.mark.slow
def test_programs_that_iterate_run(runs, tmp_path):
    there({name: (f"lightrlhf.{name}", runs.flags(name, tmp_path / name, *THERE)) for name in ITERATED})


@pytest.mark.slow
def test_no_program_needs_what_apple_s_gpus_lack(runs, tmp_path):
    """Two steps of each program, without float64 and without the operators that torch has for CPUs alone."""
    more = {
        "grpo": ["--normalize_advantages", "True", "--normalize_each_reward", "True", "--aggregation", "prompt"],
        "reflect_rl": ["--eval_interval", "1"],
        "rm": ["--eval_interval", "1"],
    }
    more["grpo"] += ["--audit_function", "helpers.rewards:length"]
    flags = {name: runs.flags(name, tmp_path / name, *more.get(name, []), *THERE, steps=2) for name in PROGRAMS}
    there({name: (f"lightrlhf.{name}", own) for name, own in flags.items()}, mps_rules=True)


# --------------------------------------------------------------------------------------------- what the host waits for
ONE_UPDATE = {"grpo": ["--mini_batch_size", "6", "--ppo_epochs", "1"]}  # a step, as the other programs have
MOST_READS = 5  # of an update


def counted(
    runs: TinyRuns, logs: Path, *flags: str, programs: tuple[str, ...] = FAST, **job: object
) -> dict[str, dict]:
    """Host reads and waiting copies of three steps of programs."""
    own = {name: [*ONE_UPDATE.get(name, []), *flags, *THERE] for name in programs}
    calls = {name: (f"lightrlhf.{name}", runs.flags(name, logs / name, *own[name], steps=3)) for name in programs}
    return there(calls, **job)


def test_an_update_waits_for_the_device_a_few_times_and_a_micro_batch_never(runs, tmp_path):
    """Of passes of two texts the host reads no more, and no less, than of twice as many passes of one."""
    found = [counted(runs, tmp_path / size, "--micro_batch_size", size) for size in ("2", "1")]
    for name in FAST:
        whole, cut = (one[name]["phases"]["update"] for one in found)
        assert whole == cut and len(cut) == 3, (name, whole, cut)
        assert all(reads <= MOST_READS and not waits for reads, waits in cut), (name, found[1][name]["reads"])


def test_a_decoding_step_reads_nothing(runs, tmp_path):
    """The host looks which rows have ended after the last of up to 16 tokens, whatever their number."""
    found = [counted(runs, tmp_path / n, "--max_new_tokens", n, programs=("ppo",))["ppo"] for n in ("3", "12")]
    short, long = ([reads for reads, _ in one["phases"]["rollout"]] for one in found)
    assert short == long, found[1]["reads"]


@pytest.mark.slow
@pytest.mark.parametrize("room", ["maths", "models", "data", "training", "generation"])
def test_a_fault_planted_in_a_room_is_found(room, runs, tmp_path):
    """A tensor of the CPU in a loss, and reads by the host in a pass, a batch, a backward pass and a decoding step."""
    if room == "generation":
        short, long = (
            counted(runs, tmp_path / n, "--max_new_tokens", n, programs=("ppo",), fault=room)["ppo"]["phases"][
                "rollout"
            ]
            for n in ("3", "12")
        )
        assert short[0][0] < long[0][0]
        return
    one = counted(runs, tmp_path / room, "--micro_batch_size", "1", programs=("ppo",), fault=room)["ppo"]
    updates = one["phases"].get("update", [])
    assert "same device" in one["problem"] if room == "maths" else any(reads > MOST_READS for reads, _ in updates)
