"""Runs: killed and resumed they are as if never killed, and a bad step changes nothing (ranks: test_devices.py)."""

import json
import math
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import CPU, kill_seed, last_checkpoint, listing, metrics, reseal, run_killed, weights
from helpers.data import gpt2_like
from helpers.errors import refused
from helpers.programs import assert_resumes, main_of

from lightrlhf import sft
from lightrlhf.models.names import resolve
from lightrlhf.sft import main
from lightrlhf.storage.seals import sha256
from lightrlhf.storage.temporary import host

PROGRAMS = ("sft", "rm", "ppo")


def long_run(program: str, cafe_data, model, rm_dir) -> list[str]:
    """Flags of a run that takes a few seconds, with short intervals and a part-filled last batch in each epoch."""
    flags = ["--data_dir", str(cafe_data), "--model_name", str(model), "--log_interval", "1", "--save_interval", "4"]
    flags += ["--epochs", "99", *CPU]
    if program == "ppo":
        flags += ["--rm_experiment_dir", rm_dir, "--adaptive_kl_coeff", "True", "--target_kl_coeff", "0.5"]
        flags += ["--rollout_size", "16", "--mini_batch_size", "8", "--micro_batch_size", "4", "--ppo_epochs", "2"]
        flags += ["--max_new_tokens", "6", "--actor_learning_rate", "1e-3", "--critic_learning_rate", "1e-3"]
        return flags + ["--max_steps", "36", "--eval_interval", "9", "--disable_dropout", "False"]
    flags += ["--mini_batch_size", "8", "--micro_batch_size", "4", "--lr_warmup_steps", "5"]
    return flags + ["--max_steps", "120", "--eval_interval", "30"]


def kill_at_some_step(program: str, flags: list[str], log_dir: Path, first: int, last: int) -> tuple[Path, int]:
    """Start the program, kill -9 it somewhere after a random step; returns its experiment dir and the last step."""
    rng = random.Random(kill_seed())
    chosen, delay = rng.randint(first, last), rng.random() * 0.03
    # no `**`: it would trip over checkpoints being pruned
    run_killed(
        log_dir, "*/*/*/*/metrics.jsonl", chosen, f"lightrlhf.{program}", *flags, "--log_dir", str(log_dir), delay=delay
    )
    (args,) = log_dir.rglob("args.json")
    return args.parent, json.loads((args.parent / "metrics.jsonl").read_text().splitlines()[-2])["step"]


@pytest.mark.slow
@pytest.mark.parametrize("program, first, last", [("sft", 6, 40), ("rm", 6, 40), ("ppo", 6, 14)])
def test_killed_at_a_random_step_and_resumed_is_bitwise_as_never_killed(
    program, first, last, cafe_data, noisy_model, rm_dir, tmp_path
):
    flags = long_run(program, cafe_data, noisy_model, rm_dir)
    whole = main_of(program)([*flags, "--log_dir", str(tmp_path / "whole")])
    killed, step = kill_at_some_step(program, flags, tmp_path / "killed", first, last)
    resumed = main_of(program)(["--resume_from", str(killed)])
    assert resumed == str(killed)
    told = f"killed at about step {step}"
    assert last_checkpoint(resumed).name == last_checkpoint(whole).name, told
    assert weights(last_checkpoint(resumed)) == weights(last_checkpoint(whole)), told
    assert metrics(resumed) == metrics(whole), told
    one, other = (torch.load(last_checkpoint(d) / "resume.pt", weights_only=True) for d in (resumed, whole))
    assert str(one["optimizers"]) == str(other["optimizers"]) and one["extra"] == other["extra"], told
    assert torch.equal(one["rng"], other["rng"]), told
    if program == "ppo":
        assert len({row["objective/kl_coeff"] for row in metrics(whole) if "objective/kl_coeff" in row}) > 10
        assert samples(resumed) == samples(whole), told


@pytest.mark.slow
def test_several_sets_and_the_best_checkpoint_outlive_a_kill_at_a_random_step(cafe_data, noisy_model, tmp_path):
    other = shutil.copytree(cafe_data, tmp_path / "other")
    flags = [*long_run("sft", cafe_data, noisy_model, ""), "--learning_rate", "1e-2", "--eval_interval", "5"]
    flags += ["--data_dir", str(cafe_data), str(other), "--data_weights", "3", "1", "--keep_best", "val/loss"]
    whole = main_of("sft")([*flags, "--log_dir", str(tmp_path / "whole")])
    killed, step = kill_at_some_step("sft", flags, tmp_path / "killed", 6, 60)
    resumed = main_of("sft")(["--resume_from", str(killed)])
    told = f"killed at about step {step}"
    assert metrics(resumed) == metrics(whole), told
    bests = [(Path(folder) / "best").resolve() for folder in (resumed, whole)]
    assert bests[0].name == bests[1].name and weights(bests[0]) == weights(bests[1]), told
    assert weights(last_checkpoint(resumed)) == weights(last_checkpoint(whole)), told


def samples(folder) -> str:
    return (Path(folder) / "samples.jsonl").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["lora", "last_layer"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_resumed_run_of_adapters_or_the_last_layer_is_bitwise_too(program, mode, cafe_data, noisy_model, tmp_path):
    flags = ["--data_dir", str(cafe_data), "--model_name", str(noisy_model), *CPU, "--finetune_mode", mode]
    flags += ["--lr_warmup_steps", "2", "--save_interval", "2", "--log_interval", "1", "--max_steps", "6"]
    flags += ["--keep_last", "0", "--log_dir", str(tmp_path)]
    if program == "ppo":
        flags += ["--reward_function", "helpers.rewards:length", "--disable_dropout", "False", "--epochs", "9"]
        flags += ["--rollout_size", "8", "--mini_batch_size", "8", "--max_new_tokens", "5", "--ppo_epochs", "2"]
        flags += ["--actor_learning_rate", "1e-3", "--critic_learning_rate", "1e-3"]
    assert_resumes(main_of(program), main_of(program)(flags))


def test_a_finished_run_that_is_resumed_does_nothing_more(sft_dir, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(sft_dir, folder)

    before = weights(last_checkpoint(folder)), metrics(folder)
    main(["--resume_from", str(folder)])
    assert (weights(last_checkpoint(folder)), metrics(folder)) == before


@pytest.mark.slow
@pytest.mark.parametrize("program", ["sft", "rm"])
def test_a_run_is_not_resumed_on_data_of_another_tokenizer(program, cafe_data, tmp_path, capsys):
    flags = ["--data_dir", str(cafe_data), "--model_name", "tiny", "--log_dir", str(tmp_path), "--max_steps", "1", *CPU]
    folder = main_of(program)(flags)
    other = shutil.copytree(cafe_data, tmp_path / "other")
    gpt2_like().save_pretrained(other / "tokenizer")
    reseal(other)
    line = refused(capsys, main_of(program), "--resume_from", folder, "--data_dir", other, "--max_steps", "2")
    assert "prepared with a tokenizer other than that of" in line or "but token ids lie in [0, " in line
    same = shutil.copytree(cafe_data, tmp_path / "same")
    main_of(program)(["--resume_from", folder, "--data_dir", str(same), "--max_steps", "2"])
    assert f"this run began on {cafe_data} and continues with {same}" in capsys.readouterr().out


def test_lines_that_a_kill_cut_in_the_middle_are_dropped_on_resuming(sft_dir, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(sft_dir, folder)
    before, kept = metrics(folder), samples(folder)
    for name in ("metrics.jsonl", "samples.jsonl"):
        with (folder / name).open("ab") as file:
            file.write('{"step": 2, "response": "☕'.encode()[:-1])
    main(["--resume_from", str(folder)])
    assert metrics(folder) == before and samples(folder) == kept != ""


@pytest.mark.slow
def test_what_a_killed_process_left_is_removed_on_resuming_and_files_of_users_are_not(sft_dir, tmp_path):
    run = Path(shutil.copytree(sft_dir, tmp_path / "run", symlinks=True))
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    left = [f".README.md.{host()}-{int(ended.stdout)}-0123abcd.partial"]
    left += [f".checkpoint-000009.elsewhere-{int(ended.stdout)}-0123abcd.partial"]  # the lock says that it has ended
    mine = ["draft.partial", ".checkpoint-mine.partial", f".README.md.elsewhere-{int(ended.stdout)}-0123abcd.partial"]
    for name in (*left, *mine):
        (run / name).write_text("half")
    sft.main(["--resume_from", str(run)])
    assert all((run / name).exists() for name in mine) and not any((run / name).exists() for name in left)


def test_texts_with_line_separators_of_unicode_survive_resuming(sft_dir, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(sft_dir, folder)
    line = json.dumps({"step": 1, "response": "one\u2028two\x85three"}, ensure_ascii=False) + "\n"
    (folder / "samples.jsonl").write_text(line, encoding="utf-8")
    main(["--resume_from", str(folder)])
    assert samples(folder) == line


DAMAGES = {
    "flipped": lambda at: (at / "resume.pt").write_bytes((at / "resume.pt").read_bytes()[:-1] + b"?"),
    "missing": lambda at: (at / "model.safetensors").unlink(),
    "without a manifest": lambda at: (at / "manifest.json").unlink(),
    "not finite": lambda at: spoil(at),
}


def spoil(folder: Path) -> None:
    """Save an optimiser state with a NaN, as if the fault had been in memory."""
    state = torch.load(folder / "resume.pt", weights_only=True)
    next(iter(state["optimizers"]["policy"]["state"].values()))["exp_avg"][0] = math.nan
    torch.save(state, folder / "resume.pt")
    names = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({name: sha256(folder / name) for name in names}))


@pytest.fixture(scope="module")
def three_steps(cafe_data, base_model, tmp_path_factory):
    flags = ["--data_dir", str(cafe_data), "--model_name", str(base_model), *CPU, "--save_interval", "1"]
    flags += ["--max_steps", "3", "--log_interval", "1", "--eval_interval", "0", "--keep_last", "3"]
    return Path(sft.main([*flags, "--log_dir", str(tmp_path_factory.mktemp("three"))]))


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_run_goes_on_from_the_last_good_checkpoint_and_keeps_the_damaged_one(damage, three_steps, tmp_path, capsys):
    run = shutil.copytree(three_steps, tmp_path / "run", symlinks=True)
    DAMAGES[damage](run / "checkpoint-000003")
    sft.main(["--resume_from", str(run)])
    out = capsys.readouterr().out
    assert f"note: {run}/checkpoint-000003 is damaged (" in out and "going on from step 2" in out
    assert f"the damaged checkpoint is kept as {run}/damaged-checkpoint-000003" in out
    assert (run / "damaged-checkpoint-000003").is_dir()
    assert weights(last_checkpoint(run)) == weights(last_checkpoint(three_steps))
    assert metrics(run) == metrics(three_steps)


def test_a_run_without_a_good_checkpoint_says_so_and_stays_as_it_is(three_steps, tmp_path, capsys):
    run = shutil.copytree(three_steps, tmp_path / "run", symlinks=True)
    for one in run.glob("checkpoint-*"):
        (one / "manifest.json").unlink()
    before = listing(run)
    assert "has no good checkpoint (checkpoint-000003: it has no manifest.json; " in refused(
        capsys, sft.main, "--resume_from", run
    )
    assert listing(run) == before


def test_a_run_with_copies_of_checkpoints_goes_on_from_its_newest_and_keeps_them(three_steps, tmp_path):
    run = shutil.copytree(three_steps, tmp_path / "run", symlinks=True)
    copies = [shutil.copytree(run / "checkpoint-000001", run / f"checkpoint-{n}") for n in ("000001-backup", "best")]
    sft.main(["--resume_from", str(run), "--max_steps", "4", "--keep_last", "1"])
    kept = sorted(path.name for path in run.glob("checkpoint-*"))
    assert kept == ["checkpoint-000001-backup", "checkpoint-000004", "checkpoint-best"]
    assert [row["step"] for row in metrics(run) if "train/loss" in row] == [1, 2, 3, 4]
    assert resolve(str(run)) == str(run / "checkpoint-000004")
    assert all((copy / "model.safetensors").is_file() for copy in copies)


def test_a_resumed_run_may_go_on_longer(sft_dir, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(sft_dir, folder)
    main(["--resume_from", str(folder), "--max_steps", "4"])
    assert last_checkpoint(folder).name == "checkpoint-000004"
    assert [row["step"] for row in metrics(folder) if "train/loss" in row] == [1, 2, 3, 4]
