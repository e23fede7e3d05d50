"""KTO and BCO on labelled responses: a step as written down, one gradient however it is cut, resuming, refusals."""

import math
import random
from pathlib import Path

import pytest
import torch
from helpers import CPU, RunOfOneStep, assert_same_gradients, last_checkpoint, metrics, run_program, save_model, weights
from helpers.errors import error_naming, refused
from helpers.programs import assert_resumes
from safetensors.torch import load_file

from lightrlhf import dpo, kto
from lightrlhf.cli.errors import UsageError
from lightrlhf.cli.groups import ModelArgs
from lightrlhf.data.batch import mismatched_rows
from lightrlhf.data.packing import pack
from lightrlhf.data.splits import load_split
from lightrlhf.dpo import DPOArgs
from lightrlhf.kto import KTOArgs, main, middle
from lightrlhf.models.loading import load_policy
from lightrlhf.training.means import RunningMean

LOSSES = ["kto", "bco"]


@pytest.fixture(scope="module")
def data(unpaired_data) -> Path:
    return unpaired_data


@pytest.fixture
def rows(data) -> list[dict]:
    """Eight rows with a reference of their own, as are their mismatches."""
    rng = random.Random(2)
    found = load_split(data, "unpaired", "train")[:8]
    others = mismatched_rows(found, found, 10**6)
    return [
        {**row, "ref_logps": -rng.uniform(5, 60), "mismatch": {**other, "ref_logps": -rng.uniform(90, 160)}}
        for row, other in zip(found, others)
    ]


def arguments(data, **flags) -> KTOArgs:
    return KTOArgs(data_dir=str(data), model_name="tiny", **flags)


def logp_by_hand(model, row: dict) -> torch.Tensor:
    ids = torch.as_tensor(row["input_ids"]).long()
    logprobs = model(ids[None]).logits[0].log_softmax(-1)
    return sum(logprobs[t - 1, ids[t]] for t in range(row["prompt_len"], len(ids)))


# ------------------------------------------------------------------------------------------------------------ a step
def test_the_gradient_of_a_step_equals_kto_written_down_in_float64(data, tokenizer, rows, tmp_path):
    folder = save_model("llama", tmp_path, tokenizer)
    policy = load_policy(str(folder), ModelArgs(), tokenizer).eval()
    args = arguments(data, loss_type="kto", beta=0.05, desirable_weight=1.5, undesirable_weight=0.8, micro_batch_size=2)
    run = RunOfOneStep(args, policy=policy)
    found = kto.train_step(run, policy, rows, tokenizer.pad_token_id)
    model = load_policy(str(folder), ModelArgs(), tokenizer).model.double().eval()
    with torch.no_grad():
        gaps = [logp_by_hand(model, row["mismatch"]) - row["mismatch"]["ref_logps"] for row in rows]
    z0 = max(0.0, float(sum(gaps)) / len(rows))
    assert z0 > 0
    loss = 0.0
    for row in rows:
        ratio = logp_by_hand(model, row) - row["ref_logps"]
        weight, sign = (1.5, 1) if row["label"] else (0.8, -1)
        loss = loss + weight * (1 - torch.sigmoid(sign * 0.05 * (ratio - z0))) / len(rows)
    loss.backward()
    expected = {f"model.{name}": p.grad.float() for name, p in model.named_parameters() if p.grad is not None}
    assert_same_gradients(run.gradients["policy"], expected, atol=2e-6)
    assert found["train/loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    assert found["rewards/reference_point"] == pytest.approx(0.05 * z0, rel=1e-5)


def test_a_policy_that_has_become_less_likely_on_mismatches_has_no_negative_reference_point(
    data, tokenizer, rows, tmp_path
):
    policy = load_policy(str(save_model("llama", tmp_path, tokenizer)), ModelArgs(), tokenizer).eval()
    far = [{**row, "mismatch": {**row["mismatch"], "ref_logps": 0.0}} for row in rows]
    run = RunOfOneStep(arguments(data, loss_type="kto"), policy=policy)
    assert kto.train_step(run, policy, far, tokenizer.pad_token_id)["rewards/reference_point"] == 0


@pytest.mark.parametrize("loss_type", LOSSES)
def test_the_gradient_of_a_step_is_the_same_for_every_micro_batch_size(loss_type, data, tokenizer, rows, tmp_path):
    policy = load_policy(str(save_model("llama", tmp_path, tokenizer)), ModelArgs(), tokenizer).eval()
    found, reported = [], []
    for micro_batch_size in (8, 1, 2):
        run = RunOfOneStep(arguments(data, loss_type=loss_type, micro_batch_size=micro_batch_size), policy=policy)
        reported.append(kto.train_step(run, policy, rows, tokenizer.pad_token_id, delta=0.3))
        found.append(run.gradients["policy"])
    for other in found[1:]:
        assert_same_gradients(found[0], other, atol=5e-6)
    for name, value in reported[0].items():
        assert [row[name] for row in reported] == pytest.approx([value] * 3, abs=1e-4, rel=1e-5), name


def test_the_metrics_of_labelled_responses(data, tokenizer, rows, tmp_path):
    policy = load_policy(str(save_model("llama", tmp_path, tokenizer)), ModelArgs(), tokenizer).eval()
    with torch.no_grad():
        logps = [float(logp_by_hand(policy.model, row)) for row in rows]
    args = arguments(data, loss_type="bco", beta=0.1)
    run = RunOfOneStep(args, policy=policy)
    found = kto.train_step(run, policy, rows, tokenizer.pad_token_id, delta=-1.0)
    rewards = [0.1 * (logp - row["ref_logps"]) for logp, row in zip(logps, rows)]
    sides = {side: [i for i, row in enumerate(rows) if row["label"] == good] for side, good in SIDES.items()}
    assert all(sides.values())
    for side, members in sides.items():
        assert found[f"rewards/{side}"] == pytest.approx(sum(rewards[i] for i in members) / len(members), abs=1e-4)
        assert found[f"logps/{side}"] == pytest.approx(sum(logps[i] for i in members) / len(members), abs=1e-3)
    assert found["rewards/margins"] == pytest.approx(found["rewards/chosen"] - found["rewards/rejected"])
    right = sum((reward > -1.0) == row["label"] for reward, row in zip(rewards, rows)) / len(rows)
    assert found["rewards/accuracies"] == pytest.approx(right) and found["rewards/reference_point"] == -1.0
    good = [row for row in rows if row["label"]]
    alone = kto.train_step(run, policy, good, tokenizer.pad_token_id)
    assert not {"rewards/rejected", "rewards/margins"} & alone.keys()


def test_delta_is_the_middle_of_both_labels_however_many_there_are_of_each():
    good, bad = RunningMean(), RunningMean()
    assert middle(good, bad) == 0.0
    good.update(9 * 2.0, 9)
    assert middle(good, bad) == 2.0
    bad.update(-2.0, 1)
    assert middle(good, bad) == 0.0
    bad.update(-4.0, 1)
    assert middle(good, bad) == pytest.approx((2.0 - 3.0) / 2)


SIDES = {"chosen": True, "rejected": False}


# ------------------------------------------------------------------------------------------------------- the program
FEW = ["--lr_warmup_steps", "0", "--log_interval", "1", *CPU]


@pytest.mark.slow
def test_training_separates_good_from_bad(data, sft_dir, tmp_path):
    flags = ["--data_dir", str(data), "--sft_experiment_dir", sft_dir, "--log_dir", str(tmp_path), *FEW]
    flags += ["--epochs", "3", "--mini_batch_size", "20", "--micro_batch_size", "20", "--learning_rate", "3e-3"]
    for loss_type, first in (("kto", 0.5), ("bco", math.log(2))):
        found = metrics(main([*flags, "--loss_type", loss_type]))
        steps = [row for row in found if "train/loss" in row]
        assert steps[0]["train/loss"] == pytest.approx(first, abs=1e-4)
        assert abs(steps[0]["rewards/margins"]) < 1e-3 and steps[0]["rewards/reference_point"] < 1e-3
        assert steps[-1]["rewards/margins"] > 0.05 and steps[-1]["rewards/accuracies"] > 0.55
        assert steps[-1]["train/loss"] < first
        validation = found[-1]
        assert {"val/loss", "val/rewards/margins", "val/rewards/reference_point"} <= validation.keys()


@pytest.mark.slow
def test_validation_measures_all_rows_with_one_reference_point(data, base_model, tokenizer, tmp_path):
    flags = ["--data_dir", str(data), "--model_name", str(base_model), "--log_dir", str(tmp_path), *FEW]
    folder = main([*flags, "--loss_type", "kto", "--max_steps", "2", "--learning_rate", "1e-2", "--beta", "0.5"])
    rows = load_split(data, "unpaired", "validation")
    models = [load_policy(str(d), ModelArgs(), tokenizer).eval().model for d in (last_checkpoint(folder), base_model)]
    everything = [*load_split(data, "unpaired", "train"), *rows]
    width = max(len(row["input_ids"]) for row in everything)
    with torch.no_grad():
        ratios, others = (
            [float(logp_by_hand(models[0], row) - logp_by_hand(models[1], row)) for row in part]
            for part in (rows, mismatched_rows(rows, rows, width))
        )
    point = 0.5 * max(0.0, sum(others) / len(others))
    signs = [1 if row["label"] else -1 for row in rows]
    loss = sum(1 / (1 + math.exp(sign * (0.5 * ratio - point))) for sign, ratio in zip(signs, ratios)) / len(rows)
    last = metrics(folder)[-1]
    assert last["val/rewards/reference_point"] == pytest.approx(point, abs=1e-3)
    assert last["val/loss"] == pytest.approx(loss, abs=1e-3)


@pytest.mark.slow
def test_the_reference_scores_each_step_s_mismatches_before_training(
    data, base_model, tokenizer, tmp_path, monkeypatch
):
    scored: list[int] = []
    trained: list[dict] = []
    score, step = kto.score_rows, kto.train_step
    monkeypatch.setattr(
        kto, "score_rows", lambda run, m, rows, *more: scored.append(len(rows)) or score(run, m, rows, *more)
    )
    monkeypatch.setattr(
        kto, "train_step", lambda run, m, rows, *more: trained.extend(rows) or step(run, m, rows, *more)
    )
    flags = ["--data_dir", str(data), "--model_name", str(base_model), "--log_dir", str(tmp_path), *FEW]
    main([*flags, "--loss_type", "kto", "--max_steps", "3", "--mini_batch_size", "16", "--learning_rate", "1e-2"])
    held_out, block = len(load_split(data, "unpaired", "validation")), 4 * 16  # of the steps that share a part
    assert scored[0] == 8 and block - 8 <= scored[1] <= block and scored[2:5] == [held_out, held_out, block]
    model = load_policy(str(base_model), ModelArgs(), tokenizer).eval().model
    with torch.no_grad():
        expected = [float(logp_by_hand(model, row["mismatch"])) for row in trained]
    assert [row["mismatch"]["ref_logps"] for row in trained] == pytest.approx(expected, abs=1e-3)


@pytest.mark.slow
def test_a_dry_run_scores_the_mismatches_of_its_steps_alone(data, base_model, tmp_path, monkeypatch, capsys):
    scored: list[int] = []
    score = kto.score_rows
    monkeypatch.setattr(
        kto, "score_rows", lambda run, m, rows, *more: scored.append(len(rows)) or score(run, m, rows, *more)
    )
    flags = ["--data_dir", str(data), "--model_name", str(base_model), "--log_dir", str(tmp_path), *FEW]
    main([*flags, "--loss_type", "kto", "--max_steps", "3", "--mini_batch_size", "16", "--dry_run"])
    assert scored[3:5] == [len(load_split(data, "unpaired", "validation")), 2 * 16] and sum(scored[:2]) <= 8 + 2 * 16
    assert "policy, text: " in capsys.readouterr().out and not list(tmp_path.iterdir())


# --------------------------------------------------------------------------------------------------------- resuming
def long_run(data, model) -> list[str]:
    flags = ["--data_dir", str(data), "--model_name", str(model), "--log_interval", "1", "--disable_dropout", "False"]
    flags += ["--mini_batch_size", "8", "--micro_batch_size", "4", "--lr_warmup_steps", "3", "--learning_rate", "1e-3"]
    return [*flags, *CPU]


@pytest.mark.slow
@pytest.mark.parametrize("loss_type", LOSSES)
def test_a_resumed_run_is_bitwise_as_one_that_never_stopped(loss_type, data, noisy_model, tmp_path, capsys):
    flags = [*long_run(data, noisy_model), "--loss_type", loss_type, "--max_steps", "6", "--save_interval", "2"]
    whole = main([*flags, "--keep_last", "0", "--log_dir", str(tmp_path)])
    capsys.readouterr()
    assert_resumes(main, whole)
    assert "log-probabilities again" not in capsys.readouterr().out


@pytest.mark.slow
def test_a_resumed_run_with_more_steps_scores_their_mismatches_too(data, base_model, tmp_path):
    flags = ["--data_dir", str(data), "--model_name", str(base_model), "--log_dir", str(tmp_path), *FEW]
    flags += ["--lr_scheduler_type", "constant", "--loss_type", "kto", "--mini_batch_size", "16"]
    flags += ["--eval_interval", "0", "--learning_rate", "1e-3", "--micro_batch_size", "16"]
    whole, part = (main([*flags, "--max_steps", steps]) for steps in ("4", "2"))
    main(["--resume_from", part, "--max_steps", "4"])
    assert weights(last_checkpoint(part)) == weights(last_checkpoint(whole))


@pytest.mark.slow
@pytest.mark.parametrize("loss_type", LOSSES)
def test_two_ranks_equal_one_at_the_same_global_batch(loss_type, data, base_model, tmp_path):
    """Global batches of 14: the last one of an epoch is uneven."""
    flags = ["--data_dir", str(data), "--model_name", str(base_model), "--log_interval", "1", "--beta", "0.5"]
    flags += ["--optimizer_eps", "1e-2", "--accelerator", "cpu", "--loss_type", loss_type, "--micro_batch_size", "1"]
    flags += ["--lr_warmup_steps", "0", "--learning_rate", "1e-2"]
    one = main([*flags, "--mini_batch_size", "14", "--devices", "1", "--log_dir", str(tmp_path / "one")])
    ranks = ["--mini_batch_size", "7", "--devices", "2", "--strategy", "ddp"]
    run_program("lightrlhf.kto", *flags, *ranks, "--log_dir", str(tmp_path / "two"))
    (args,) = (tmp_path / "two").rglob("args.json")
    points = [row["rewards/reference_point"] for row in metrics(one) if "train/loss" in row]
    assert max(points) > 0.01
    for row, other in zip(metrics(one), metrics(args.parent), strict=True):
        assert row.keys() == other.keys()
        for name in row:
            assert other[name] == pytest.approx(row[name], abs=1e-3, rel=1e-3), (row["step"], name)
    found = [load_file(last_checkpoint(folder) / "model.safetensors") for folder in (one, args.parent)]
    assert max(float((found[0][n] - found[1][n]).abs().max()) for n in found[0]) < 2e-5


# --------------------------------------------------------------------------------------------------------- bad calls
@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--mini_batch_size", "1", "--micro_batch_size", "1"], "--mini_batch_size"),
        (["--rpo_alpha", "1"], "--rpo_alpha"),
        (["--loss_type", "sigmoid"], "--loss_type sigmoid"),
        (["--max_length", "3"], "--max_length 3"),
    ],
)
def test_a_bad_call_is_one_line_and_leaves_nothing_behind(flags, told, data, base_model, tmp_path, capsys):
    good = ["--data_dir", data, "--model_name", base_model, "--log_dir", tmp_path / "logs", "--loss_type", "kto", *CPU]
    assert told in refused(capsys, main, *good, *flags)
    assert not list(tmp_path.rglob("args.json"))


def test_data_of_the_other_kind_is_refused_with_the_program_that_fits(data, cafe_data, base_model, capsys):
    line = refused(capsys, main, "--data_dir", cafe_data, "--model_name", base_model, "--loss_type", "bco", *CPU)
    assert "unpaired_train.pt" in line and "preference_train.pt" in line and "lightrlhf.dpo" in line
    line = refused(capsys, dpo.main, "--data_dir", data, "--model_name", base_model, *CPU)
    assert "preference_train.pt" in line and "unpaired_train.pt" in line and "lightrlhf.kto" in line


@pytest.mark.parametrize("loss_type", LOSSES)
def test_dpo_names_the_program_that_has_these_losses(loss_type, capsys):
    line = refused(capsys, dpo.main, "--model_name", "tiny", "--loss_type", loss_type)
    assert f"--loss_type {loss_type}" in line and f"lightrlhf.kto --loss_type {loss_type}" in line
    with pytest.raises(ValueError, match="lightrlhf.kto"):
        DPOArgs(model_name="tiny", loss_type=loss_type)


def test_rows_that_nothing_can_be_learned_from_are_refused(tokenizer, base_model, tmp_path):
    def train(rows: list[dict], loss_type: str) -> None:
        args = KTOArgs(model_name=str(base_model), log_dir=str(tmp_path), loss_type=loss_type, accelerator="cpu")
        kto.train(args, tokenizer=tokenizer, rows=rows)

    rows = [{"prompt": f"tea {i}?", "completion": " yes", "label": True} for i in range(4)]
    for loss_type in LOSSES:
        with error_naming(UsageError, "4 rows", "label True"):
            train(rows, loss_type)
    rows = [{"prompt": "tea?", "completion": f" {i}", "label": i > 1} for i in range(4)]
    with error_naming(UsageError, "kto", "--loss_type bco"):
        train(rows, "kto")
    with error_naming(UsageError, "row 2", "label 1", "True or False"):
        train([*rows[:2], {**rows[2], "label": 1}], "bco")
    with error_naming(UsageError, "row 0", "['label', 'prompt']"):
        train([{"prompt": "tea?", "label": True}], "bco")


def test_the_advised_weight_makes_the_weighted_counts_equal(data):
    rows = [{"input_ids": [i, 5], "prompt_len": 1, "label": i % 3 > 0, "columns": {}} for i in range(9)]
    rows = pack(rows, "unpaired")  # 6 good, 3 bad
    for good, bad, advised in ((1.0, 1.0, "2"), (2.0, 1.0, "4"), (1.0, 1.75, None)):
        notes = kto.check_labels(arguments(data, desirable_weight=good, undesirable_weight=bad), rows)
        assert [note.split("--undesirable_weight ")[1].split()[0] for note in notes] == ([advised] if advised else [])


def test_rows_from_python_and_the_advice_on_weights(tokenizer, base_model, tmp_path, capsys):
    rows = [{"prompt": f"tea {i}?", "completion": f" {i} please", "label": i % 3 > 0} for i in range(9)]
    more = {"mini_batch_size": 4, "micro_batch_size": 4, "max_steps": 3, "accelerator": "cpu", "eval_interval": 0}
    args = KTOArgs(model_name=str(base_model), log_dir=str(tmp_path), loss_type="kto", **more)
    folder = kto.train(args, tokenizer=tokenizer, rows=rows)
    assert "--undesirable_weight 2 " in capsys.readouterr().out
    assert last_checkpoint(folder).is_dir()  # the third mini-batch has one row
