"""More than one rank: the same weights as one, no rank waits for ever for another, memory that runs out is explained.

Two ranks on gloo and the CPU. What needs many pairs of processes is forked off one that has imported the libraries
(`two_ranks.py`), all at once; the ranks that torchrun and Fabric's launcher start are forks, too (`forks.py`).
"""

import itertools
import json
import shutil
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import psutil
import pytest
import torch
from helpers import CPU, ROOT, environment, last_checkpoint, metrics, reseal, run_program, save_model
from helpers.errors import error_naming
from helpers.flat import stored_rows
from helpers.forks import started_program
from helpers.processes import PATIENCE
from helpers.programs import main_of
from safetensors.torch import load_file

from lightrlhf.cli.errors import UsageError
from lightrlhf.cli.groups import TrainArgs
from lightrlhf.cli.patience import RANK
from lightrlhf.models.tokenizer import load_tokenizer
from lightrlhf.ppo import PPOArgs
from lightrlhf.storage.checkpoint import newest_checkpoint
from lightrlhf.storage.jsonl import read_jsonl
from lightrlhf.training import restarts
from lightrlhf.training.distributed import processes
from lightrlhf.training.memory import allocation, memory_flags
from lightrlhf.training.restarts import check_restarts

LATE = 20  # seconds after which ranks stop waiting for one that hangs; any that works comes earlier

PROGRAMS = {  # what is run, and the flags beside those of all
    "sft": ["sft"],
    "rm": ["rm"],
    "dpo": ["dpo"],
    "ppo": ["ppo"],
    "several": ["sft", "--experiment_name", "several", "--data_weights", "1", "2"],  # of two sets
    "max_kl": ["ppo", "--experiment_name", "max_kl", "--max_kl", "1e-3", "--ppo_epochs", "4"],
    "grpo": ["grpo"],
    "no_reference": ["grpo", "--experiment_name", "no_reference"],  # 81 rows at once, so ranks score 40 and 41
    "lora": ["ppo", "--finetune_mode", "lora", "--experiment_name", "lora"],  # one backbone, but four under fsdp
}
SPLIT = ["sft", "rm", "dpo", "ppo", "grpo"]  # those with `--tensor_parallel`
TOLERANCE = 2e-6  # of weights of about 0.1, after steps of a learning rate of 1e-2; ranks add up in another order


# ----------------------------------------------------------------------------------------------- what the jobs are
@pytest.fixture(scope="module")
def odd_data(cafe_data, tmp_path_factory):
    """27 training rows and 5 for validation of each kind: neither epochs nor evaluations divide by two."""
    folder = tmp_path_factory.mktemp("odd") / "cafe" / "odd"
    shutil.copytree(cafe_data, folder)
    for path in folder.glob("*_*.pt"):
        if path.stem.endswith(("_train", "_validation")):
            rows = stored_rows(path)
            torch.save(rows[: 27 if "train" in path.stem else 5], path)
            reseal(path.parent)
    shutil.copytree(folder, folder / "second")
    rows = stored_rows(folder / "finetune_train.pt")
    torch.save(rows[:8], folder / "second" / "finetune_train.pt")
    reseal(folder / "second")
    return folder


def flags_of(program: str, data, model, global_batch: int, ranks: int) -> list[str]:
    """A run of two steps, the second with one row less; micro-batches of one row, so ranks have 7 and 6 of them."""
    flags = ["--data_dir", data, *([f"{data}/second"] if program == "several" else [])]
    flags += ["--model_name", model, "--log_interval", 1, "--eval_interval", 2, "--logger", "csv"]
    flags += ["--accelerator", "cpu", "--optimizer_eps", "1e-2", "--micro_batch_size", 1, "--devices", ranks]
    flags += ["--mini_batch_size", global_batch // ranks, "--lr_warmup_steps", 0]
    flags += ["--log_rollouts", 99] if PROGRAMS[program][0] in ("ppo", "grpo") else []
    flags += PROGRAMS[program][1:] or ["--experiment_name", program]
    if PROGRAMS[program][0] == "ppo":
        flags += ["--rollout_size", global_batch // ranks, "--reward_function", "helpers.rewards:length"]
        flags += ["--max_new_tokens", 6, "--actor_learning_rate", "1e-2", "--critic_learning_rate", "1e-2"]
        flags += ["--rollout_mini_batch_size", 2, "--adaptive_kl_coeff", True]
    else:
        flags += ["--learning_rate", "1e-2"]
    if PROGRAMS[program][0] == "grpo":  # 39 rows in the second step: the seventh of 13 groups lies on both ranks
        flags += ["--rollout_size", global_batch // ranks, "--num_generations", 3, "--max_new_tokens", 6]
        flags += ["--mini_batch_size", 3 * global_batch // ranks, "--ppo_epochs", 2, "--rollout_mini_batch_size", 2]
        flags += ["--reward_function", "helpers.rewards:many_vowels", "--resample_rounds", 2]
        flags += ["--advantage", "batch_std", "--init_kl_coeff", "0.1"]
    if program == "no_reference":
        flags += ["--rollout_size", 2 * global_batch // ranks, "--mini_batch_size", 6 * global_batch // ranks]
        flags += ["--rollout_mini_batch_size", 1, "--init_kl_coeff", 0]
    return [str(flag) for flag in flags]


@pytest.fixture(scope="module")
def alone(odd_data, base_model, tmp_path_factory):
    """Each program on one rank, and SFT stopped after its first step."""
    logs = tmp_path_factory.mktemp("alone")
    found = {}
    for program in PROGRAMS:
        flags = flags_of(program, odd_data, base_model, 14, 1)
        found[program] = Path(main_of(PROGRAMS[program][0])([*flags, "--log_dir", str(logs)]))
    flags = [*flags_of("sft", odd_data, base_model, 14, 1), "--log_dir", str(logs / "begun")]
    found["begun"] = Path(main_of("sft")([*flags, "--max_steps", "1"]))
    return found


@pytest.fixture(scope="module")
def together(odd_data, base_model, alone, tmp_path_factory):
    """What comes of all jobs of two ranks, and the folder of their experiments."""
    logs = tmp_path_factory.mktemp("together")
    jobs = []
    for strategy in ("ddp", "fsdp"):
        calls = []
        for program in PROGRAMS:
            where = ["--strategy", strategy, "--log_dir", str(logs / strategy)]
            calls.append(
                [f"lightrlhf.{PROGRAMS[program][0]}", [*flags_of(program, odd_data, base_model, 14, 2), *where]]
            )
        if strategy == "fsdp":
            calls[0][0] = "helpers.faulty_ranks:sharded"
        begun = calls[0][1][:-1] + [str(logs / f"{strategy}-begun"), "--max_steps", "1"]
        taken_over = shutil.copytree(alone["begun"], logs / f"{strategy}-taken-over")
        more = ["--devices", "2", "--strategy", strategy, "--mini_batch_size", "7", "--max_steps", "2"]
        calls += [["lightrlhf.sft", begun], ["lightrlhf.sft", ["--resume_from", str(taken_over), *more]]]
        jobs.append({"name": strategy, "calls": calls})

    for name, strategy, function in (
        ("fails", "fsdp", "fails_on_rank_one"),
        ("hangs", "ddp", "hangs_on_rank_one"),
        ("killed", "fsdp", "length"),
    ):
        flags = flags_of("ppo", odd_data, base_model, 14, 2)
        flags[flags.index("helpers.rewards:length")] = f"helpers.rewards:{function}"
        flags += ["--strategy", strategy, "--epochs", "99", "--eval_interval", "0", "--save_interval", "1"]
        flags += ["--log_dir", str(logs / name)]
        job = {"name": name, "calls": [["lightrlhf.ppo", flags]], "log_dir": str(logs / name)}
        more = {"killed": {"kill": 0}, "hangs": {"variables": [{RANK: LATE}] * 2}}
        jobs.append(job | more.get(name, {}))

    flags = [*flags_of("sft", odd_data, base_model, 14, 2), "--epochs", "99", "--log_dir", str(logs / "leaves")]
    jobs.append({"name": "leaves", "calls": [["helpers.faulty_ranks:killed", flags]]})

    folders = [tmp_path_factory.mktemp(f"machine{rank}") for rank in range(2)]
    for rank, folder in enumerate(folders):
        shutil.copytree(odd_data, folder / "data")
        if rank:
            rows = stored_rows(folder / "data" / "finetune_validation.pt")
            torch.save(rows[:-1], folder / "data" / "finetune_validation.pt")
            reseal(folder / "data")
    slurm = {"SLURM_NTASKS": 2, "SLURM_NTASKS_PER_NODE": 2, "SLURM_NNODES": 1, "SLURM_NODEID": 0, "SLURM_JOB_ID": 7}
    variables = [slurm | {"SLURM_PROCID": rank, "SLURM_LOCALID": rank} for rank in range(2)]
    calls = [["lightrlhf.sft", flags_of("sft", "data", base_model, 14, 1) + ["--log_dir", str(logs / "data")]]]
    places = [str(folder) for folder in folders]
    jobs.append({"name": "data", "calls": calls, "folders": places, "variables": variables})

    return ends_of(jobs), logs


def ends_of(jobs: list[dict]) -> dict[str, dict]:
    """Exit statuses and outputs of jobs that run at once, by name; see `two_ranks.py`."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with started_program("helpers.two_ranks", json.dumps(jobs), cwd=ROOT, env=environment(), **pipes) as process:
        out, err = process.communicate(timeout=3 * PATIENCE)
    assert process.returncode == 0, err
    return json.loads(out)


def experiment(folder: Path) -> Path:
    (args,) = folder.rglob("args.json")
    return args.parent


def gap(one: Path, other: Path) -> float:
    """Largest difference between the weights of two experiments' last checkpoints."""
    assert last_checkpoint(one).name == last_checkpoint(other).name
    a, b = (load_file(next(last_checkpoint(folder).glob("*model.safetensors"))) for folder in (one, other))
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def said(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("error: ")]


# --------------------------------------------------------------------------------------------------- as one rank does
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_ranks_learn_as_one_does(strategy, together, alone):
    """Each program, with uneven batches, rollouts, groups and evaluations: metrics, weights and moments."""
    ending, logs = together
    assert ending[strategy]["status"] == [0, 0], ending[strategy]["text"]
    for program in PROGRAMS:
        one, two = alone[program], experiment(logs / strategy / program)
        for row, other in zip(metrics(one), metrics(two), strict=True):
            assert other == pytest.approx(row, abs=2e-5, rel=1e-4), (program, row["step"])
        assert gap(one, two) < TOLERANCE, program
        if program == "grpo":
            assert sum(row.get("sampling/wasted_tokens", 0) for row in metrics(two))  # groups were replaced
        if (one / "rollouts.jsonl").is_file():  # of the first rank alone
            rows, others = (read_jsonl(folder / "rollouts.jsonl") for folder in (one, two))
            named = {(row["step"], row["group"], *row["response_ids"]): row for row in rows}
            assert 0.3 * len(rows) < len(others) < 0.7 * len(rows), program
            for row in others:
                same = named[(row["step"], row["group"], *row["response_ids"])]
                assert [row[name] for name in ("prompt", "score")] == [same[name] for name in ("prompt", "score")]
                assert row["advantages"] == pytest.approx(same["advantages"], abs=1e-3)
        if program == "max_kl":
            assert min(row.get("policy/updates", 4) for row in metrics(two)) < 4  # of 4 passes
        assert max(row.get("policy/grad_norm", row.get("train/grad_norm", 0)) for row in metrics(one)) > 0.1, program
        kept = [torch.load(last_checkpoint(folder) / "resume.pt", weights_only=True) for folder in (one, two)]
        assert kept[0]["learned"].keys() == kept[1]["learned"].keys()
        for model, optimizer in kept[0]["optimizers"].items():
            for index, state in optimizer["state"].items():
                for name, value in state.items():
                    other = kept[1]["optimizers"][model]["state"][index][name]
                    torch.testing.assert_close(other, value, atol=TOLERANCE, rtol=1e-3)


@pytest.fixture(scope="module")
def split(odd_data, base_model, alone, tmp_path_factory):
    """Two groups of two ranks that share layers: the job's end, and the folder of its experiments."""
    logs = tmp_path_factory.mktemp("split")
    more = ["--devices", "4", "--strategy", "fsdp", "--tensor_parallel", "2"]
    flags = {program: [*flags_of(program, odd_data, base_model, 14, 2), *more] for program in SPLIT}
    flags["grpo"][flags["grpo"].index("helpers.rewards:many_vowels")] = "helpers.faulty_ranks:many_vowels"
    calls = [[f"lightrlhf.{program}", [*flags[program], "--log_dir", str(logs)]] for program in SPLIT]
    calls[0][0] = "helpers.faulty_ranks:split"
    begun = [*flags["sft"], "--output_dir", str(logs / "begun")]
    calls += [["lightrlhf.sft", [*begun, "--max_steps", "1"]]]
    calls += [["lightrlhf.sft", ["--resume_from", str(logs / "begun"), "--max_steps", "2"]]]
    taken_over = shutil.copytree(alone["begun"], logs / "taken-over")
    resumed = ["--resume_from", str(taken_over), *more, "--mini_batch_size", "7", "--max_steps", "2"]
    tokenizer = load_tokenizer(str(odd_data), None)
    qwen3 = save_model("qwen3", logs / "qwen3", tokenizer)  # which has norms of queries and keys
    tokenizer.save_pretrained(qwen3)
    qwen3_flags = [*flags_of("sft", odd_data, qwen3, 14, 2), *more, "--output_dir", str(logs / "four")]
    calls += [["lightrlhf.sft", resumed], ["lightrlhf.sft", qwen3_flags]]
    main_of("sft")([*flags_of("sft", odd_data, qwen3, 14, 1), "--output_dir", str(logs / "one")])
    jobs = [{"name": "split", "calls": calls, "ranks": 4}]
    pair = [*flags_of("grpo", odd_data, base_model, 14, 1), *more, "--devices", "2", "--output_dir", str(logs / "pair")]
    pair[pair.index("helpers.rewards:many_vowels")] = "helpers.faulty_ranks:many_vowels"
    jobs.append({"name": "pair", "calls": [["lightrlhf.grpo", pair]]})
    return ends_of(jobs), logs


@pytest.mark.slow
def test_ranks_that_share_layers_learn_as_one_does(split, alone):
    """Metrics and weights of each program over 2 x 2 ranks, of GRPO over 1 x 2, and SFT of a Qwen3; uneven batches."""
    endings, logs = split
    assert endings["split"]["status"] == [0, 0, 0, 0], endings["split"]["text"]
    assert endings["pair"]["status"] == [0, 0], endings["pair"]["text"]
    for program, folder in [*((program, experiment(logs / program)) for program in SPLIT), ("grpo", logs / "pair")]:
        one, four = alone[program], folder
        for row, other in zip(metrics(one), metrics(four), strict=True):
            if program == "dpo" and row["step"] == 1:  # a margin of 0, whose sign is that of a rounding error
                del row["rewards/accuracies"], other["rewards/accuracies"]
            assert other == pytest.approx(row, abs=2e-5, rel=1e-4), (program, row["step"])
            for name in ("train/loss", "val/loss"):
                assert abs(other.get(name, 0) - row.get(name, 0)) < TOLERANCE, (program, name)
        assert gap(one, four) < TOLERANCE, program
    assert gap(logs / "one", logs / "four") < TOLERANCE


@pytest.mark.slow
def test_a_run_whose_ranks_share_layers_resumes_bitwise_and_takes_over_others(split, alone):
    endings, logs = split
    assert endings["split"]["status"] == [0, 0, 0, 0], endings["split"]["text"]
    assert gap(experiment(logs / "sft"), logs / "begun") == 0
    assert gap(alone["sft"], logs / "taken-over") < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_run_begun_on_one_rank_ends_on_two_and_the_other_way_round(strategy, together, alone):
    ending, logs = together
    assert gap(alone["sft"], logs / f"{strategy}-taken-over") < TOLERANCE
    begun = experiment(logs / f"{strategy}-begun")
    assert last_checkpoint(begun).name == "checkpoint-000001"
    main_of("sft")(
        ["--resume_from", str(begun), *CPU, "--strategy", "auto", "--mini_batch_size", "14", "--max_steps=2"]
    )
    assert gap(alone["sft"], begun) < TOLERANCE


@pytest.mark.slow
def test_torchrun_starts_the_ranks_without_a_flag(odd_data, base_model, alone, tmp_path):
    flags = flags_of("sft", odd_data, base_model, 14, 2)
    del flags[flags.index("--devices") : flags.index("--devices") + 2]
    command = ["--standalone", "--nproc_per_node", "2", "-m", "lightrlhf.sft", *flags, "--log_dir", str(tmp_path)]
    run_program("torch.distributed.run", *command)
    found = experiment(tmp_path)
    stored = torch.load(last_checkpoint(found) / "resume.pt", weights_only=True)
    assert stored["world_size"] == 2
    assert gap(alone["sft"], found) < TOLERANCE


@pytest.mark.slow
def test_a_rank_killed_under_torchrun_is_restarted_and_the_run_ends_bitwise_the_same(
    odd_data, base_model, tmp_path, monkeypatch
):
    """From the checkpoint of the first step, and anew in the same folder where there is none yet."""
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    flags = [*flags_of("sft", odd_data, base_model, 14, 1), "--epochs", "2"]
    del flags[flags.index("--devices") : flags.index("--devices") + 2]
    runs = {}
    for name, module, interval in (
        ("undisturbed", "lightrlhf.sft", 1),
        ("restarted", "helpers.faulty_ranks", 1),
        ("anew", "helpers.faulty_ranks", 500),
    ):
        command = ["--standalone", "--nproc_per_node", "2", "--max-restarts", "1", "-m", module, *flags]
        command += ["--mini_batch_size", "7", "--save_interval", str(interval), "--output_dir", str(tmp_path / name)]
        said = run_program("torch.distributed.run", *command).stdout
        assert ("restarted by torchrun" in said) == (name != "undisturbed")
        assert ("starts anew" in said) == (name == "anew")
        runs[name] = tmp_path / name
    for name in ("restarted", "anew"):
        assert gap(runs["undisturbed"], runs[name]) == 0
        rows = [metrics(runs[one]) for one in ("undisturbed", name)]
        assert [row["step"] for row in rows[0]] == [row["step"] for row in rows[1]]
        assert [row.get("train/loss") for row in rows[0]] == [row.get("train/loss") for row in rows[1]]


def test_each_run_of_a_script_that_is_restarted_finds_its_own(tmp_path, monkeypatch, capsys):
    """The first had a checkpoint, the second none; the third had not begun."""
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "attempt_0" / "0" / "error.json"))
    fabric = types.SimpleNamespace(is_global_zero=True, broadcast=lambda value: value)
    args, runs = TrainArgs(), [tmp_path / "one", tmp_path / "two"]
    for attempt in (runs, [*runs, None]):
        monkeypatch.setattr(restarts, "_runs", itertools.count())
        found = []
        for run in attempt:
            found.append(restarts.as_restarted(fabric, args).resume_from)
            if attempt is runs:
                (run / "checkpoint-000001").mkdir(parents=True)
                (run / "checkpoint-000001" / "resume.pt").touch()
                restarts.note_run(run)
        if attempt is runs:
            assert found == [None, None]
            shutil.rmtree(runs[1] / "checkpoint-000001")
    assert found == [str(runs[0]), None, None] and not runs[1].exists()


@pytest.mark.parametrize(
    "variables, error",
    [
        ({"TORCHELASTIC_USE_AGENT_STORE": "True"}, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"),
        ({"TORCHELASTIC_USE_AGENT_STORE": "False", "TORCHELASTIC_ERROR_FILE": ""}, "--log-dir /dev/null"),
    ],
)
def test_a_torchrun_whose_restarts_would_hang_is_refused_at_once(variables, error, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    check_restarts()  # it restarts nothing
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    with error_naming(UsageError, "--max-restarts 3", error):
        check_restarts()


@pytest.mark.parametrize(
    "environment, flags, found",
    [
        ({}, {"devices": 4, "num_nodes": 2}, (4, 2)),
        ({"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}, {}, (4, 2)),
        ({"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}, {"devices": 4}, (4, 2)),
        ({"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}, {"devices": 4}, "--devices 4"),
        ({"SLURM_NTASKS": "16", "SLURM_NNODES": "2", "SLURM_JOB_NAME": "train"}, {}, (8, 2)),
        ({"SLURM_NTASKS": "16", "SLURM_NNODES": "2", "SLURM_JOB_NAME": "train"}, {"num_nodes": 3}, "--num_nodes 3"),
        ({"SLURM_NTASKS": "1", "SLURM_JOB_NAME": "train"}, {"devices": 2}, (2, 1)),
    ],
)
def test_torchrun_and_slurm_say_how_many_processes_there_are(environment, flags, found, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if isinstance(found, tuple):
        assert processes(TrainArgs(**flags)) == found
    else:
        with error_naming(UsageError, found):
            processes(TrainArgs(**flags))


@pytest.mark.slow
def test_ranks_leave_the_process_group_before_the_interpreter_ends(tmp_path):
    """Else a thread of gloo may abort the process at the end of a run that went well: one in ten when busy."""
    script = f"""
import atexit
import torch.distributed as ranks
from lightrlhf.training.distributed import leave_at_exit
atexit.register(lambda: print("still a member:", ranks.is_initialized()))
ranks.init_process_group("gloo", init_method="file://{tmp_path}/ranks", rank=0, world_size=1)
leave_at_exit()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment())
    assert done.stdout.split() == ["still", "a", "member:", "False"], done.stderr


# ---------------------------------------------------------------------------------------------------- when one is lost
@pytest.mark.slow
def test_a_rank_that_fails_ends_the_other_which_says_so(together):
    ending, logs = together
    first, second = ending["fails"]["text"]
    assert ending["fails"]["status"] == [1, 1]
    (line,) = said(second)
    assert "failed: ValueError: no more" in line
    (line,) = said(first)
    assert line.startswith("error: rank 1 failed during score of step 3; see its error above; the last good")
    newest_checkpoint(experiment(logs / "fails"), "--resume_from")  # raises when it is not intact


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_named(together):
    ending, _ = together
    assert ending["hangs"]["status"] == [1, 1]
    (line,) = said("".join(ending["hangs"]["text"]))
    assert "rank 1 (at score of step 3)" in line and f"within {RANK} {LATE} s" in line


@pytest.mark.slow
def test_the_other_rank_ends_when_the_first_is_killed(together):
    ending, logs = together
    assert ending["killed"]["status"] == [-signal.SIGKILL, 1]
    (line,) = said("".join(ending["killed"]["text"]))
    assert line.startswith("error: rank 0 is gone; the last good checkpoint is")
    newest_checkpoint(experiment(logs / "killed"), "--resume_from")


@pytest.mark.slow
def test_a_rank_lost_between_two_phases_is_told(together):
    """Where the other waits for it while it writes a row of metrics."""
    ending, _ = together
    assert ending["leaves"]["status"] == [1, -signal.SIGKILL]
    text = "".join(ending["leaves"]["text"])
    (line,) = said(text)
    assert line.startswith("error: rank 1 is gone") and "Traceback" not in text


@pytest.mark.slow
def test_a_rank_killed_under_the_launcher_ends_the_program(odd_data, base_model, tmp_path):
    """Fabric starts the second rank; it is killed, and the first ends by itself, non-zero, with the line."""
    flags = [*flags_of("sft", odd_data, base_model, 14, 2), "--epochs", "999", "--save_interval", "1"]
    flags += ["--log_dir", str(tmp_path)]
    with started_program(
        "lightrlhf.sft", *flags, cwd=ROOT, env=environment(), stderr=subprocess.PIPE, text=True
    ) as process:
        while not list(tmp_path.glob("*/*/*/*/checkpoint-*")) and process.poll() is None:
            time.sleep(0.05)
        assert process.poll() is None, process.communicate()[1]
        (child,) = psutil.Process(process.pid).children()
        child.kill()
        _, text = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1, text
    assert len(said(text)) == 1, text
    (line,) = said(text)
    assert line.startswith("error: rank 1 is gone (killed, or its machine is); last seen at")
    newest_checkpoint(experiment(tmp_path), "--resume_from")


@pytest.mark.slow
def test_a_rank_with_other_data_is_refused_before_anything_is_trained(together):
    ending, logs = together
    assert ending["data"]["status"] == [2, 2], ending["data"]["text"]
    (line,) = said("".join(ending["data"]["text"]))
    assert line.startswith("error: --data_dir data: finetune_validation.pt of rank 1 differs")
    assert not list((logs / "data").rglob("args.json"))


# --------------------------------------------------------------------------------------------------------------- memory
@pytest.mark.slow
def test_memory_that_runs_out_is_told_with_the_phase_and_three_flags(
    cafe_data, base_model, tmp_path, monkeypatch, capsys
):
    """A batch of 2**40 rows, which is a view until the model computes with it; the allocator's own error."""
    from lightrlhf import rm

    small = rm.preference_batch
    monkeypatch.setattr(
        rm, "preference_batch", lambda rows, pad: small(rows, pad).map(lambda t: t[:1].expand(2**40, -1))
    )
    flags = ["--data_dir", str(cafe_data), "--model_name", str(base_model), "--log_dir", str(tmp_path), *CPU]
    with pytest.raises(SystemExit) as stop:
        rm.main(flags)
    assert stop.value.code == 1
    (line,) = said(capsys.readouterr().err.replace("\r", "\n"))
    assert line.startswith("error: out of memory in update of step 1: ") and "GiB more were requested" in line
    assert "--micro_batch_size 4 (" in line and "--finetune_mode lora (" in line and line.count(" --") == 3


def test_the_flags_that_help_fit_the_phase_and_what_is_set():
    args = PPOArgs(data_dir=".", model_name="tiny", reward_function=["a:b"], rollout_mini_batch_size=16)
    flags = memory_flags(args, "rollout", 2**32, 10**9, 1)
    assert [flag.split()[0] for flag in flags][:2] == ["--rollout_mini_batch_size", "--max_new_tokens"]
    assert flags[0] == "--rollout_mini_batch_size 8 (that allocation becomes 2.00 GiB)"
    assert memory_flags(args, "resample", 2**32, 10**9, 1) == flags  # of GRPO, which samples there too
    flags = memory_flags(args, "update", 2**32, 10**9, 1)
    assert flags[0].startswith("--micro_batch_size 4 ")
    assert "--finetune_mode lora (saves 11.18 GiB of gradients and moments)" in flags  # 12 bytes of 10**9 parameters


@pytest.mark.parametrize(
    "message, size",
    [
        ("CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 79.1 GiB", 1.5 * 2**30),
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes. Error code 12", 4096),
        ("std::bad_alloc", 0),
    ],
)
def test_the_size_of_an_allocation_is_read_from_its_error(message, size):
    assert allocation(RuntimeError(message)) == size
