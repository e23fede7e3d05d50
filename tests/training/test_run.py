"""Runs: killed and resumed they are as if never killed, and a bad step changes nothing (ranks: test_devices.py)."""

from __future__ import annotations

import json
import math
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from helpers import CPU, kill_seed, last_checkpoint, listing, metrics, reseal, run_killed, save_model, weights
from helpers.data import gpt2_like

from lightrlhf import sft
from lightrlhf.cli.errors import RunFailure
from lightrlhf.cli.groups import TrainArgs
from lightrlhf.models.names import resolve
from lightrlhf.storage.checkpoint import sha256
from lightrlhf.storage.temporary import host
from lightrlhf.training.run import Run

MAINS = {"sft": "lightrlhf.sft", "rm": "lightrlhf.rm", "ppo": "lightrlhf.ppo"}


def main_of(program: str):
    import importlib

    return importlib.import_module(MAINS[program]).main


@pytest.fixture(scope="module")
def noisy_model(tmp_path_factory, tokenizer):
    """A model with dropout, so that resuming must bring back the random numbers too."""
    dropout = {"attn_pdrop": 0.1, "resid_pdrop": 0.1, "embd_pdrop": 0.1}
    return save_model("gpt2", tmp_path_factory.mktemp("models") / "gpt2", tokenizer, **dropout)


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
    run_killed(log_dir, "*/*/*/*/metrics.jsonl", chosen, MAINS[program], *flags, "--log_dir", str(log_dir), delay=delay)
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


@pytest.mark.parametrize("mode", ["lora", "last_layer"])
@pytest.mark.parametrize("program", MAINS)
def test_a_resumed_run_of_adapters_or_the_last_layer_is_bitwise_too(program, mode, cafe_data, noisy_model, tmp_path):
    flags = ["--data_dir", str(cafe_data), "--model_name", str(noisy_model), *CPU, "--finetune_mode", mode]
    flags += ["--lr_warmup_steps", "2", "--save_interval", "2", "--log_interval", "1", "--max_steps", "6"]
    flags += ["--keep_last", "0", "--log_dir", str(tmp_path)]
    if program == "ppo":
        flags += ["--reward_function", "helpers.rewards:length", "--disable_dropout", "False", "--epochs", "9"]
        flags += ["--rollout_size", "8", "--mini_batch_size", "8", "--max_new_tokens", "5", "--ppo_epochs", "2"]
        flags += ["--actor_learning_rate", "1e-3", "--critic_learning_rate", "1e-3"]
    whole = main_of(program)(flags)
    expected, rows = weights(last_checkpoint(whole)), metrics(whole)
    for later in ("checkpoint-000004", "checkpoint-000006"):
        shutil.rmtree(Path(whole) / later)
    again = main_of(program)(["--resume_from", whole])
    assert weights(last_checkpoint(again)) == expected
    assert metrics(again) == rows


def test_a_finished_run_that_is_resumed_does_nothing_more(sft_dir, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(sft_dir, folder)
    from lightrlhf.sft import main

    before = weights(last_checkpoint(folder)), metrics(folder)
    main(["--resume_from", str(folder)])
    assert (weights(last_checkpoint(folder)), metrics(folder)) == before


@pytest.mark.parametrize("program", ["sft", "rm"])
def test_a_run_is_not_resumed_on_data_of_another_tokenizer(program, cafe_data, tmp_path, capsys):
    flags = ["--data_dir", str(cafe_data), "--model_name", "tiny", "--log_dir", str(tmp_path), "--max_steps", "1", *CPU]
    folder = main_of(program)(flags)
    other = shutil.copytree(cafe_data, tmp_path / "other")
    gpt2_like().save_pretrained(other / "tokenizer")
    reseal(other)
    with pytest.raises(SystemExit):
        main_of(program)(["--resume_from", folder, "--data_dir", str(other), "--max_steps", "2"])
    line = capsys.readouterr().err
    assert "prepared with a tokenizer other than that of" in line or "but token ids lie in [0, " in line
    same = shutil.copytree(cafe_data, tmp_path / "same")
    main_of(program)(["--resume_from", folder, "--data_dir", str(same), "--max_steps", "2"])
    assert f"this run began on {cafe_data} and goes on with {same}" in capsys.readouterr().out


def test_lines_that_a_kill_cut_in_the_middle_are_dropped_on_resuming(sft_dir, tmp_path):
    from lightrlhf.sft import main

    folder = tmp_path / "copy"
    shutil.copytree(sft_dir, folder)
    before, kept = metrics(folder), samples(folder)
    for name in ("metrics.jsonl", "samples.jsonl"):
        with (folder / name).open("ab") as file:
            file.write('{"step": 2, "response": "☕'.encode()[:-1])
    main(["--resume_from", str(folder)])
    assert metrics(folder) == before and samples(folder) == kept != ""


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
    from lightrlhf.sft import main

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
    with pytest.raises(SystemExit) as stop:
        sft.main(["--resume_from", str(run)])
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert stop.value.code == 2 and "has no good checkpoint (checkpoint-000003: it has no manifest.json; " in line
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
    from lightrlhf.sft import main

    folder = tmp_path / "copy"
    shutil.copytree(sft_dir, folder)
    main(["--resume_from", str(folder), "--max_steps", "4"])
    assert last_checkpoint(folder).name == "checkpoint-000004"
    assert [row["step"] for row in metrics(folder) if "train/loss" in row] == [1, 2, 3, 4]


# ------------------------------------------------------------------------------------------------------ data and steps
@pytest.fixture
def run(tmp_path):
    """A run that has begun its loop, so that its folder is there."""
    loops = []

    def make(**changes) -> Run:
        one = Run(TrainArgs(log_dir=str(tmp_path), accelerator="cpu", **changes), "test")
        loops.append(one.steps(99))
        next(loops[-1])
        return one

    yield make
    for loop in loops:
        loop.close()


def test_an_epoch_sees_every_row_once_and_the_last_batch_may_be_small(run):
    one = run(epochs=2)
    rows = [{"number": i} for i in range(11)]
    assert one.num_steps(range(11), 4) == 6
    batches = [[row["number"] for row in one.global_batch(rows, step, 4)] for step in range(6)]
    assert [len(batch) for batch in batches] == [4, 4, 3, 4, 4, 3]
    assert sorted(sum(batches[:3], [])) == sorted(sum(batches[3:], [])) == list(range(11))
    assert batches[:3] != batches[3:]


@pytest.mark.parametrize("world_size, num_rows", [(2, 9), (3, 10), (4, 5)])
def test_ranks_share_a_batch_without_overlap_and_none_goes_empty(run, world_size, num_rows):
    one = run()
    one.ranks.world_size = world_size
    seen = []
    for step in range(one.num_steps(range(num_rows), 2)):
        batch = one.global_batch([{"number": i} for i in range(num_rows)], step, 2)
        shares = []
        for rank in range(world_size):
            one.ranks.rank = rank
            shares.append([row["number"] for row in one.ranks.shard(batch)])
        assert all(shares) and max(map(len, shares)) - min(map(len, shares)) <= 1
        assert sum(shares, []) == [row["number"] for row in batch]
        seen += sum(shares, [])
    one.ranks.world_size = 1
    assert set(seen) == set(range(num_rows)) and len(seen) < num_rows + world_size


@pytest.mark.parametrize(
    "flags, steps",
    [
        ({}, 10),
        ({"epochs": 5}, 50),
        ({"max_steps": 3}, 3),
        ({"max_steps": 35}, 35),  # into the fourth epoch
        ({"epochs": 5, "max_steps": 35}, 35),
        ({"epochs": 1, "max_steps": 10}, 10),
    ],
)
def test_max_steps_alone_goes_on_through_epochs(run, capsys, flags, steps):
    assert run(**flags).num_steps(range(100), 10) == steps
    assert "--epochs" not in capsys.readouterr().out


def test_epochs_that_end_a_run_before_max_steps_say_so(run, capsys):
    assert run(epochs=1, max_steps=35).num_steps(range(100), 10) == 10
    assert "--epochs 1 ends this run at step 10, before --max_steps 35" in capsys.readouterr().out


def test_a_run_goes_on_into_the_next_epoch(sft_dir, cafe_data, base_model, tmp_path, capsys):
    """Unless its flags name a number of epochs."""
    from lightrlhf.sft import main

    flags = ["--data_dir", str(cafe_data), "--model_name", str(base_model), "--log_dir", str(tmp_path), *CPU]
    flags += ["--mini_batch_size", "20", "--micro_batch_size", "20", "--log_interval", "1", "--eval_interval", "0"]
    folder = main([*flags, "--max_steps", "5"])  # an epoch has 3
    assert last_checkpoint(folder).name == "checkpoint-000005"
    short = main([*flags, "--max_steps", "2", "--epochs", "1"])
    capsys.readouterr()
    main(["--resume_from", short, "--max_steps", "5"])
    assert last_checkpoint(short).name == "checkpoint-000003"
    assert "--epochs 1 ends this run at step 3, before --max_steps 5" in capsys.readouterr().out
    main(["--resume_from", short, "--max_steps", "5", "--epochs", "null"])
    assert last_checkpoint(short).name == "checkpoint-000005"


def test_noise_follows_from_seed_and_step_alone(run):
    one = run(seed=1)
    torch.rand(7)
    draws = [torch.rand(3, generator=one.generator(*key)) for key in ((5,), (5,), (6,), (5, 0), (-1,))]
    assert torch.equal(draws[0], draws[1])
    assert len({tuple(draw.tolist()) for draw in draws}) == 4


# ------------------------------------------------------------------------------------------------------------ learning
def linear() -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(3, 1)


def test_the_gradient_norm_is_clipped_to_the_given_value(run):
    one = run(gradient_clip_val=0.5, max_steps=1)
    module = linear()
    wrapped = one.setup("policy", module, 1e-3, 10)
    one.backward(wrapped(100 * torch.ones(1, 3)).sum())
    assert one.optimize("policy") == pytest.approx(math.sqrt(3 * 100**2 + 1), rel=1e-3)  # told before clipping
    (state, *_) = one.learners["policy"].optimizer.optimizer.state.values()
    first_moment = math.sqrt(float(state["exp_avg"].pow(2).sum())) / (1 - 0.9)
    assert first_moment == pytest.approx(0.5, rel=1e-3)  # of the weight; the bias has a hundredth of it


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_step(run, bad):
    one = run()
    wrapped = one.setup("policy", linear(), 1e-3, 10)
    one.step = 6
    with pytest.raises(RunFailure, match=f"loss is -?{bad} at step 7; no checkpoint had been written yet"):
        one.backward(wrapped(torch.ones(1, 3)).sum() * bad)


def test_a_gradient_that_is_not_finite_stops_the_run_before_the_weights_move(run):
    one = run()
    module = linear()
    wrapped = one.setup("policy", module, 1e-3, 10)
    before = [p.clone() for p in module.parameters()]
    (wrapped(torch.ones(1, 3)).sum()).backward()
    module.weight.grad[0, 0] = math.nan
    with pytest.raises(RunFailure, match="policy gradient norm is nan at step 1"):
        one.optimize("policy")
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters()))


def test_the_rows_of_the_micro_batch_are_named(run):
    one = run()
    one.mix([4, 10])  # two sets, of which the second begins at row 4
    one.order.data_dirs = ["first", "second"]
    one.name_batch([9, 3, 4])
    with pytest.raises(
        RunFailure, match=r"loss is nan at step 1 \(training rows 3 of first, 0 of second, counted from 0"
    ):
        one.backward(torch.tensor(math.nan), torch.tensor([1, 2]))
    one.order.ends = []
    one.name_batch(range(30))
    with pytest.raises(RunFailure, match=r"\(training rows 0, 1, .*, 15 and 14 more, counted from 0\)"):
        one.backward(torch.tensor(math.inf))


class Saved(torch.nn.Linear):
    """Linear weights and a mask, which may be saved."""

    def __init__(self) -> None:
        super().__init__(3, 1)
        self.register_buffer("mask", torch.tensor([0.0, -math.inf]))
        self.register_buffer("scale", torch.ones(2))
        self.adapters = ()


@pytest.mark.parametrize("place", ["weight", "bias", "scale", "exp_avg", "exp_avg_sq", "loop"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_in_memory_is_not_saved(run, place, bad):
    one, module = run(), Saved()
    wrapped = one.setup("policy", module, 1e-3, 10)
    one.global_batch([{}] * 5, 0, 2)
    one.backward(wrapped(torch.ones(1, 3)).sum())
    one.optimize("policy")
    one.step = 1
    module.mask = torch.tensor([0.0, -math.inf, -math.inf])  # as a mask that grows
    one.learners.check_finite(module, {"kl": 1.0})  # its own -inf is no fault
    if hasattr(module, place):
        getattr(module, place).data.view(-1)[0] = bad
    elif place != "loop":
        one.learners["policy"].optimizer.optimizer.state[module.weight][place][0, 0] = bad
    with pytest.raises(
        RunFailure, match=r"is not finite after step 1 \(training rows \d, \d, .*no checkpoint is written"
    ):
        one.keep(module, None, lambda: {"kl": bad if place == "loop" else 1.0})
        one.save()
    assert not list(one.directory.glob("checkpoint-*"))


def test_biases_and_norms_are_not_decayed(run):
    one = run(weight_decay=0.1)
    one.setup("policy", linear(), 1e-3, 10)
    groups = one.learners["policy"].optimizer.param_groups
    assert [(group["weight_decay"], group["params"][0].dim()) for group in groups] == [(0.1, 2), (0.0, 1)]


def test_warm_up_may_be_a_share_of_all_steps(run):
    for ratio, steps in ((0.5, 3), (0.4, 3), (0.0, 0)):  # rounded up
        one = run(lr_scheduler_type="constant_with_warmup", lr_warmup_ratio=ratio)
        wrapped, found = one.setup("policy", linear(), 0.1, 6), []
        for _ in range(6):
            found.append(one.learning_rate("policy"))
            one.backward(wrapped(torch.ones(1, 3)).sum())
            one.optimize("policy")
        assert found == pytest.approx([0.1 * min(step / steps, 1) if steps else 0.1 for step in range(6)])


@pytest.mark.parametrize(
    "flags, updates, warns",
    [
        ({"lr_warmup_steps": 3}, 9, None),
        ({"lr_warmup_steps": 4}, 9, "--lr_warmup_steps 4"),
        ({"lr_warmup_steps": 100}, 18, "--lr_warmup_steps 100"),
        ({"lr_warmup_ratio": 0.34}, 100, "--lr_warmup_ratio 0.34"),
        ({"lr_warmup_ratio": 0.03}, 2, None),  # one step of two, because a ratio is rounded up
        ({"lr_warmup_steps": 100, "lr_scheduler_type": "constant"}, 18, None),
        ({}, 18, None),
    ],
)
def test_a_warm_up_of_more_than_a_third_of_the_run_is_told_once(run, capsys, flags, updates, warns):
    one = run(**flags)
    for name in ("policy", "critic"):
        one.setup(name, linear(), 0.1, updates)
    told = [line for line in capsys.readouterr().out.splitlines() if "warms up" in line]
    assert len(told) == (warns is not None) and (not told or f"{warns} warms up for more than a third" in told[0])


@pytest.mark.parametrize(
    "name, rates",
    [
        ("constant", [1, 1, 1, 1, 1, 1]),
        ("constant_with_warmup", [0, 0.5, 1, 1, 1, 1]),
        ("linear", [0, 0.5, 1, 0.75, 0.5, 0.25]),
        ("cosine", [0, 0.5, 1, *((1 + math.cos(math.pi * i / 4)) / 2 for i in (1, 2, 3))]),
    ],
)
def test_the_schedule_is_the_named_one(run, name, rates):
    one = run(lr_scheduler_type=name, lr_warmup_steps=2)
    wrapped = one.setup("policy", linear(), 0.1, 6)
    found = []
    for _ in range(6):
        found.append(one.learning_rate("policy"))
        one.backward(wrapped(torch.ones(1, 3)).sum())
        one.optimize("policy")
    assert found == pytest.approx([0.1 * rate for rate in rates])


# ----------------------------------------------------------------------------------------------------------- the files
def test_two_runs_of_one_second_have_folders_of_their_own(run, monkeypatch):
    monkeypatch.setattr(time, "strftime", lambda *a: "2030-01-01_00-00-00")
    folders = [run().directory for _ in range(3)]
    assert len(set(folders)) == 3 and all(folder.is_dir() for folder in folders)


def test_arguments_are_stored_with_versions_and_commit(run):
    stored = json.loads((run(seed=7).directory / "args.json").read_text())
    assert stored["seed"] == 7 and stored["program"] == "test"
    assert {"python", "torch", "transformers", "lightning"} <= stored["versions"].keys() and "git_commit" in stored


@pytest.mark.parametrize("logger", ["tensorboard", "csv"])
def test_metrics_go_to_the_file_and_to_the_logger(run, logger):
    one = run(logger=logger)
    one.step = 3
    one.log({"train/loss": 1.5})
    one.finish()
    assert metrics(one.directory) == [{"step": 3, "train/loss": 1.5}]
    assert any(path.stat().st_size for path in (one.directory / "logs").iterdir())


def test_the_last_checkpoint_goes_to_the_hub_without_resume_state(cafe_data, tmp_path, monkeypatch):
    import huggingface_hub

    sent = {}

    class Hub:
        def create_repo(self, repository, **options):
            sent.update(options, repository=repository)

        def upload_folder(self, **options):
            sent.update(options)

    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    monkeypatch.setenv("HF_TOKEN", "hf_of_nobody")
    where = ["--data_dir", str(cafe_data), "--log_dir", str(tmp_path), "--model_name=tiny", *CPU]
    folder = sft.main([*where, "--max_steps=1", "--eval_interval=0", "--push_to_hub=somebody/cafe"])
    assert sent["repository"] == sent["repo_id"] == "somebody/cafe" and sent["private"]
    assert sent["folder_path"] == Path(folder) / "checkpoint-000001"
    assert "resume.pt" in sent["ignore_patterns"]


def test_a_failed_upload_is_one_line_and_keeps_the_checkpoint(cafe_data, tmp_path, monkeypatch, capsys):
    import huggingface_hub

    class Hub:
        def create_repo(self, repository, **options):
            raise OSError("no network\nand more")

    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    monkeypatch.setenv("HF_TOKEN", "hf_of_nobody")
    where = ["--data_dir", str(cafe_data), "--log_dir", str(tmp_path), "--model_name=tiny", *CPU]
    with pytest.raises(SystemExit) as stop:
        sft.main([*where, "--max_steps=1", "--eval_interval=0", "--push_to_hub=somebody/cafe"])
    assert stop.value.code == 1
    assert "error: --push_to_hub somebody/cafe failed: no network; the checkpoint is" in capsys.readouterr().err
    assert len(list(tmp_path.rglob("checkpoint-000001"))) == 1
