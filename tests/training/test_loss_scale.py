"""`--precision 16-mixed`: what is scaled, skipped and resumed; on CPUs, with torch's scaler for them."""

import math
import shutil
from pathlib import Path

import pytest
import torch
from helpers import CPU, last_checkpoint, metrics, weights
from helpers.errors import error_naming
from torch import nn

from lightrlhf import online_dpo, ppo, sft
from lightrlhf.cli.errors import RunFailure
from lightrlhf.cli.groups import TrainArgs
from lightrlhf.models.quantisation import compute_dtype
from lightrlhf.training import distributed, loss_scale
from lightrlhf.training.run import Run


@pytest.fixture
def scaled_on_cpus(monkeypatch):
    """Let runs scale losses on a CPU; returns a function that sets the scale they begin with."""
    begin = [2.0**16]
    made = loss_scale.scaled_precision

    def on_cpu(device: str):
        precision = made("cpu")
        precision.scaler = torch.amp.GradScaler("cpu", init_scale=begin[0])
        return precision

    monkeypatch.setattr(distributed, "training_device", lambda args: torch.device("cpu"))
    monkeypatch.setattr(distributed, "scaled_precision", on_cpu)
    return lambda scale: begin.__setitem__(0, scale)


def flags_of(cafe_data, model, log_dir, *more: str) -> list[str]:
    flags = ["--data_dir", str(cafe_data), "--model_name", str(model), "--log_dir", str(log_dir), *CPU]
    flags += ["--precision", "16-mixed", "--log_interval", "1", "--keep_last", "0"]
    return [*flags, "--eval_interval", "0", *more]


PPO = ["--reward_function", "helpers.rewards:length", "--rollout_size", "8", "--mini_batch_size", "8", "--epochs", "9"]
PPO += ["--max_new_tokens", "5", "--actor_learning_rate", "1e-3", "--critic_learning_rate", "1e-3"]


@pytest.mark.slow
@pytest.mark.parametrize("program, more", [(sft, []), (ppo, PPO)])
def test_steps_that_overflow_are_skipped_and_a_resumed_run_is_bitwise(
    program, more, cafe_data, base_model, tmp_path, scaled_on_cpus
):
    scaled_on_cpus(2.0**30)  # beyond float16, so the first steps overflow
    more = [*more, "--max_steps", "24", "--save_interval", "4"]
    run = program.main(flags_of(cafe_data, base_model, tmp_path, *more))
    rows = [row for row in metrics(run) if "train/loss_scale" in row]
    scales, skipped = ([row[f"train/{name}"] for row in rows] for name in ("loss_scale", "skipped_steps"))
    assert skipped[0] >= 1 and 4 < skipped[-1] < 40 and scales[-1] < scales[0]
    assert "NaN" not in (Path(run) / "metrics.jsonl").read_text()
    finite = [row for row in rows if row.get("train/grad_norm", row.get("policy/grad_norm"))]
    assert 4 <= len(finite) < len(rows)
    before, state = weights(last_checkpoint(run)), torch.load(last_checkpoint(run) / "resume.pt", weights_only=True)
    for kept in ("checkpoint-000004", "checkpoint-000020"):  # between skipped steps, and after them
        for later in [one for one in sorted(Path(run).glob("checkpoint-*")) if one.name > kept]:
            shutil.rmtree(later)
        program.main(["--resume_from", run])
        again = torch.load(last_checkpoint(run) / "resume.pt", weights_only=True)
        assert weights(last_checkpoint(run)) == before and again["loss_scale"] == state["loss_scale"]
        assert str(again["optimizers"]) == str(state["optimizers"])
        assert [row for row in metrics(run) if "train/loss_scale" in row] == rows
        if kept == "checkpoint-000004":
            program.main(["--resume_from", run])  # nothing more to do
    assert state["loss_scale"]["scaler"]["scale"] == scales[-1] and state["loss_scale"]["skipped"] == skipped[-1]


def test_the_first_skipped_step_changes_no_weight_and_no_moment(cafe_data, base_model, tmp_path, scaled_on_cpus):
    scaled_on_cpus(2.0**40)
    flags = flags_of(cafe_data, base_model, tmp_path, "--max_steps", "1", "--lr_warmup_steps", "0")
    last = last_checkpoint(sft.main(flags))
    assert weights(last) == weights(base_model)
    state = torch.load(last / "resume.pt", weights_only=True)
    assert not state["optimizers"]["policy"]["state"] and state["loss_scale"]["scaler"]["scale"] == 2.0**39
    assert state["schedulers"]["policy"]["last_epoch"] == 1  # a skipped step counts


def test_a_run_that_skips_all_steps_ends_with_one_line(cafe_data, base_model, tmp_path, scaled_on_cpus, capsys):
    scaled_on_cpus(2.0**100)
    with pytest.raises(SystemExit) as stop:
        sft.main(flags_of(cafe_data, base_model, tmp_path, "--max_steps", "40"))
    line = capsys.readouterr().err.partition("error: ")[2]
    assert stop.value.code == 1 and line.count("\n") == 1
    assert "step 20: policy gradients of 20 optimiser steps in a row are not finite, down to a loss scale of " in line
    assert "use --precision bf16-mixed or 32-true" in line


# ------------------------------------------------------------------------------------------------- the scale of several
def one_update(tmp_path: Path, precision: str, weight: float, overflow: tuple[str, ...] = ()) -> tuple[Run, dict]:
    """Two models of a run after an optimiser step of each; their gradients are clipped."""
    args = TrainArgs(log_dir=str(tmp_path), accelerator="cpu", precision=precision, gradient_clip_val=0.5)  # type: ignore[arg-type]
    run: Run = Run(args, "test")
    modules = {name: nn.Linear(3, 1, bias=False) for name in ("policy", "critic")}
    for module in modules.values():
        nn.init.constant_(module.weight, weight)
        run.setup("policy" if module is modules["policy"] else "critic", module, 0.1, 10)
    inputs = torch.tensor([[1.0, -2.0, 3.0]])
    for name, module in modules.items():  # both before the first step
        loss = (inputs @ module.weight.T).square().sum()
        run.backward(loss)
        if name in overflow:
            module.weight.grad[0, 1] = math.inf
    norms = {name: run.optimize(name) for name in modules}
    return run, {**{name: module.weight.detach().clone() for name, module in modules.items()}, "norms": norms}


def test_gradients_are_unscaled_before_they_are_clipped(tmp_path, scaled_on_cpus):
    _, plain = one_update(tmp_path, "32-true", 0.25)
    _, scaled = one_update(tmp_path, "16-mixed", 0.25)  # the scale is a power of two
    assert plain["norms"] == scaled["norms"] and plain["norms"]["policy"] > 0.5
    assert all(torch.equal(plain[name], scaled[name]) for name in ("policy", "critic"))


@pytest.mark.parametrize("overflow", [("policy",), ("critic",), ("policy", "critic")])
def test_models_of_one_pass_share_a_scale_that_changes_after_both(overflow, tmp_path, scaled_on_cpus):
    _, plain = one_update(tmp_path, "32-true", 0.25)
    run, scaled = one_update(tmp_path, "16-mixed", 0.25, overflow)
    for name in ("policy", "critic"):
        if name in overflow:
            assert (scaled[name] == 0.25).all() and math.isnan(scaled["norms"][name])
        else:
            assert torch.equal(scaled[name], plain[name]) and scaled["norms"][name] == plain["norms"][name]
    assert run.learners.loss_scale is not None and run.learners.loss_scale.metrics() == {
        "train/skipped_steps": len(overflow), "train/loss_scale": 2.0**15
    }  # fmt: skip


def test_an_optimiser_that_overflows_in_every_step_is_named_although_the_other_does_not(tmp_path, scaled_on_cpus):
    run, _ = one_update(tmp_path, "16-mixed", 0.25)
    module = run.learners["critic"].module
    with error_naming(RunFailure, "critic", "20 optimiser steps"):
        for _ in range(30):
            for name in ("policy", "critic"):
                run.backward(run.learners[name].module.module.weight.sum())
            module.module.weight.grad[0, 0] = math.inf
            run.optimize("policy")
            run.optimize("critic")
    assert run.learners.loss_scale is not None and run.learners.loss_scale.skipped == 20


# ------------------------------------------------------------------------------------------------------------ refused
@pytest.mark.parametrize("program, accelerator", [(sft, "cpu"), (sft, "auto"), (ppo, "auto"), (online_dpo, "cpu")])
def test_without_a_gpu_it_is_refused_before_a_model_is_loaded(
    program, accelerator, cafe_data, base_model, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    more = ["--reward_function", "helpers.rewards:length"] if program is not sft else []
    flags = ["--data_dir", str(cafe_data), "--model_name", str(base_model), "--log_dir", str(tmp_path), *more]
    with pytest.raises(SystemExit) as stop:
        program.main([*flags, "--precision", "16-mixed", "--accelerator", accelerator])
    lines = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2 and len([line for line in lines if line.startswith("error: ")]) == 1
    assert "--precision 16-mixed needs a CUDA GPU" in lines[-1] and "use --precision 32-true or bf16-mixed" in lines[-1]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("strategy", ["deepspeed", "fsdp"])
def test_sharded_models_are_refused(strategy, monkeypatch):
    monkeypatch.setattr("lightrlhf.cli.packages.find_spec", lambda name: object())
    with error_naming(ValueError, "--precision 16-mixed", f"--strategy {strategy}"):
        TrainArgs(precision="16-mixed", strategy=strategy)


def test_each_precision_has_its_dtype():
    expected = {"32-true": torch.float32, "bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
    assert {name: compute_dtype(TrainArgs(precision=name)) for name in expected} == expected  # type: ignore[arg-type]
