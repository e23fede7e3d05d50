"""Every training program on a device that is not the CPU: the same figures, the same files, resumed bit by bit."""

import json
import math
from pathlib import Path

import pytest
from helpers import run_program
from helpers.programs import trained
from helpers.tiny_runs import ITERATED, PROGRAMS, TRAINED, TinyRuns, experiment_of

THERE = ["--accelerator", "second"]
FIXED = ["--disable_dropout", "True"]  # dropout of the device draws other numbers
MODES = {  # flags, and the largest difference to the CPU, relative to numbers above 1: of the first step, of others
    "all": ([], 1e-6, 1e-5),  # Adam divides by the size of each gradient
    "lora": (["--finetune_mode", "lora"], 1e-6, 1e-5),
    "last_layer": (["--finetune_mode", "last_layer"], 1e-6, 1e-5),
    "bf16": (["--precision", "bf16-mixed"], 0.03, 0.03),  # roundings of 2**-8, of other sums
}
FAST = ("sft", "dpo", "ppo", "grpo")
SIGNS = ("accuracies", "sign_align")  # of margins near 0


@pytest.fixture(scope="module")
def runs(tmp_path_factory, cafe_data, talk_data, tokenizer) -> TinyRuns:
    return TinyRuns(tmp_path_factory.mktemp("second") / "runs", cafe_data, talk_data, tokenizer)


def there(calls: dict[str, tuple[str, list[str]]], **job: object) -> dict[str, dict]:
    """What `helpers.on_second` found of calls on the device; all must have succeeded, unless a fault was planted."""
    done = run_program("helpers.on_second", json.dumps({"calls": calls, **job}))
    found = json.loads(done.stdout.splitlines()[-1])
    if "fault" in job:
        return found
    assert {name: one["problem"] for name, one in found.items()} == dict.fromkeys(found, "")
    return found


def figures(log_dir: Path) -> list[dict[str, float]]:
    """The metrics of a run but times and signs."""
    lines = (experiment_of(log_dir) / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return [{k: v for k, v in row.items() if "time/" not in k and not k.endswith(SIGNS)} for row in rows]


def differences(found: list[dict[str, float]], expected: list[dict[str, float]]) -> list[tuple[float, str]]:
    """The largest difference of each row of two runs' figures, relative to numbers above 1, and of which figure."""
    assert [sorted(row) for row in found] == [sorted(row) for row in expected] and expected
    gaps = []
    for row, other in zip(found, expected):
        known = [name for name, value in other.items() if isinstance(value, float) and not math.isnan(value)]
        assert all(math.isnan(row[name]) for name in other if name not in known and isinstance(row[name], float))
        gaps.append(max((abs(row[name] - other[name]) / max(1, abs(other[name])), name) for name in known))
    return gaps


@pytest.mark.parametrize(
    "mode, programs",
    [
        pytest.param("all", FAST, id="all"),
        pytest.param("all", tuple(set(TRAINED) - {*FAST}), id="all-others", marks=pytest.mark.slow),
        *(pytest.param(mode, TRAINED, id=mode, marks=pytest.mark.slow) for mode in MODES if mode != "all"),
    ],
)
def test_training_gives_the_cpu_s_figures(mode, programs, runs, tmp_path):
    flags, at_first, later = MODES[mode]
    calls = {}
    for name in programs:
        trained(name, *runs.flags(name, tmp_path / "cpu" / name, *flags, *FIXED, steps=2))
        own = runs.flags(name, tmp_path / "second" / name, *flags, *FIXED, *THERE, steps=2)
        calls[name] = (f"lightrlhf.{name}", own)
    there(calls)
    for name in programs:
        first, *others = differences(figures(tmp_path / "second" / name), figures(tmp_path / "cpu" / name))
        assert first[0] <= at_first, (name, first)
        assert max(others)[0] <= later, (name, others)


def test_texts_in_a_row_give_the_figures_of_padded_ones_and_read_nothing(runs, tmp_path):
    """In half precision; attention is a stand-in for CUDA's kernel."""
    half, programs = ["--precision", "bf16-mixed", "--micro_batch_size", "2", *FIXED], ("sft", "ppo")
    found = [counted(runs, tmp_path / f"{way}", *half, programs=programs, varlen=way) for way in (True, False)]
    for name in programs:
        rows, padded = (one[name] for one in found)
        assert rows["rows_of_texts"] > 0 == padded["rows_of_texts"]
        update = rows["phases"]["update"][1:]  # the first has the trial pass
        assert update and all(reads <= MOST_READS and not waits for reads, waits in update), rows["reads"]
        gaps = differences(*(figures(tmp_path / f"{way}" / name) for way in (True, False)))
        assert max(gaps)[0] <= 0.03, (name, gaps)


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
