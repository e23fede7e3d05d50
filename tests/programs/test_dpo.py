"""DPO: every loss by its formula in plain Python, one gradient however it is cut, a reference that is checked."""

import json
import math
import random
import re
import shutil
import typing
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from helpers import (
    CHECKPOINT,
    CPU,
    ROOT,
    RunOfOneStep,
    assert_same_gradients,
    last_checkpoint,
    left_padded,
    listing,
    metrics,
    reseal,
    run_program,
    save_model,
    tiny_policy,
    weights,
)
from helpers.errors import error_naming, refused
from helpers.flat import stored_rows
from helpers.programs import assert_resumes
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from lightrlhf import dpo, evaluate
from lightrlhf.cli.errors import RunFailure, UsageError
from lightrlhf.cli.groups import ModelArgs
from lightrlhf.data.batch import micro_batches, preference_batch
from lightrlhf.data.packing import pack
from lightrlhf.data.splits import load_split
from lightrlhf.dpo import DPOArgs, fit_pairs, main, make_pairs, score_rows
from lightrlhf.maths import preference
from lightrlhf.maths.preference import LOSSES, RAPO, Pairs
from lightrlhf.models.loading import load_policy
from lightrlhf.models.tokenizer import load_tokenizer
from lightrlhf.training import reference
from lightrlhf.training.direct_alignment import check_reference, truncate
from lightrlhf.training.means import RunningMean

COUPLED = sorted(preference.RANKED_LOSSES)


def test_the_flags_name_every_loss_and_every_weight():
    hints = typing.get_type_hints(DPOArgs)
    assert set(typing.get_args(hints["loss_type"])) == {*LOSSES}
    assert set(typing.get_args(hints["f_divergence"])) == set(preference.DIVERGENCES)
    for name in (*RAPO, "const:0.7"):
        assert DPOArgs(model_name="tiny", rapo=name).rapo == name
    with pytest.raises(ValueError, match="--rapo best"):
        DPOArgs(model_name="tiny", rapo="best")


# -------------------------------------------------------------------------------------------------- rows and models
def with_columns(rows: list[dict]) -> list[dict]:
    """Rows with a reference of their own and annotated rewards."""
    rng = random.Random(1)
    return [
        row
        | {"ref_chosen_logps": -rng.uniform(5, 60), "ref_rejected_logps": -rng.uniform(5, 60)}
        | {"columns": {"margin": rng.gauss(0, 2), "rejected_score": rng.gauss(0, 1)}}
        for row in rows
    ]


@pytest.fixture
def pairs(cafe_data) -> list[dict]:
    return with_columns(load_split(cafe_data, "preference", "train")[:8])


def arguments(cafe_data, **flags) -> DPOArgs:
    return DPOArgs(data_dir=str(cafe_data), model_name="tiny", **flags)


def logps_by_hand(model, row: dict, side: str) -> torch.Tensor:
    """Summed over the response, from transformers' own logits in the model's own precision."""
    ids = torch.as_tensor(row[f"{side}_input_ids"]).long()
    logprobs = model(ids[None]).logits[0].log_softmax(-1)
    return sum(logprobs[t - 1, ids[t]] for t in range(row["prompt_len"], len(ids)))


def test_the_gradient_of_a_step_equals_dpo_written_down_in_float64(cafe_data, tokenizer, pairs, tmp_path):
    folder = save_model("llama", tmp_path, tokenizer)
    policy = load_policy(str(folder), ModelArgs(), tokenizer).eval()
    args = arguments(cafe_data, rpo_alpha=0.5, beta=0.2)
    run = RunOfOneStep(args, policy=policy)
    found = dpo.train_step(run, policy, pairs, tokenizer.pad_token_id)
    model, total, nll = load_policy(str(folder), ModelArgs(), tokenizer).model.double().eval(), 0.0, 0.0
    for row in pairs:
        chosen, rejected = (logps_by_hand(model, row, side) for side in ("chosen", "rejected"))
        gap = (chosen - row["ref_chosen_logps"]) - (rejected - row["ref_rejected_logps"])
        total = total + torch.log(1 + torch.exp(-0.2 * gap))
        nll = nll - chosen / (len(row["chosen_input_ids"]) - row["prompt_len"])
    loss = (total + 0.5 * nll) / len(pairs)
    loss.backward()
    expected = {f"model.{name}": p.grad.float() for name, p in model.named_parameters() if p.grad is not None}
    assert_same_gradients(run.gradients["policy"], expected, atol=2e-6)
    assert found["train/loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    assert found["train/preference_loss"] == pytest.approx(float(total.detach()) / len(pairs), rel=1e-5)
    assert found["train/nll"] == pytest.approx(float(nll.detach()) / len(pairs), rel=1e-5)


@pytest.mark.parametrize("loss_type", sorted(LOSSES))
def test_the_gradient_of_a_step_is_the_same_for_every_micro_batch_size(
    loss_type, cafe_data, tokenizer, pairs, tmp_path
):
    policy = load_policy(str(save_model("llama", tmp_path, tokenizer)), ModelArgs(), tokenizer).eval()
    extra = {"rapo": "app_2", "length_alpha": 0.01} if loss_type in preference.LENGTH_LOSSES else {}
    found, reported = [], []
    for micro_batch_size in (8, 1, 2):
        args = arguments(cafe_data, micro_batch_size=micro_batch_size, loss_type=loss_type, rpo_alpha=0.1, **extra)
        run = RunOfOneStep(args, policy=policy)
        reported.append(dpo.train_step(run, policy, pairs, tokenizer.pad_token_id, baseline=0.3))
        found.append(run.gradients["policy"])
    for other in found[1:]:
        assert_same_gradients(found[0], other, atol=5e-6)
    for name, value in reported[0].items():
        assert [row[name] for row in reported] == pytest.approx([value] * 3, abs=1e-4, rel=1e-5), name


@pytest.mark.parametrize("loss_type", COUPLED)
def test_a_ranked_loss_of_a_step_is_that_of_all_its_pairs_together(loss_type, cafe_data, tokenizer, pairs, tmp_path):
    policy = load_policy(str(save_model("llama", tmp_path, tokenizer)), ModelArgs(), tokenizer).eval()
    run = RunOfOneStep(arguments(cafe_data, micro_batch_size=2, loss_type=loss_type), policy=policy)
    found = dpo.train_step(run, policy, pairs, tokenizer.pad_token_id)
    logps = reference.sequence_logps(policy, preference_batch(pairs, tokenizer.pad_token_id))
    loss = LOSSES[loss_type](make_pairs(run.args, pairs, logps)).mean()
    loss.backward()
    expected = {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}
    assert_same_gradients(run.gradients["policy"], expected, atol=5e-6)
    assert found["train/loss"] == pytest.approx(float(loss.detach()), rel=1e-5)


@pytest.mark.parametrize("loss_type", COUPLED)
def test_a_ranked_loss_with_dropout_has_the_slopes_of_the_pass_it_trains(loss_type, cafe_data, pairs, noisy_model):
    """The order of a step's pairs depends on what dropout has drawn: value and gradient are those of one pass."""
    tokenizer = load_tokenizer(str(cafe_data), str(noisy_model))
    policy = load_policy(str(noisy_model), ModelArgs(), tokenizer).train()
    run = RunOfOneStep(arguments(cafe_data, loss_type=loss_type, disable_dropout=False, beta=0.5), policy=policy)
    torch.manual_seed(7)
    found = dpo.train_step(run, policy, pairs, tokenizer.pad_token_id)
    torch.manual_seed(7)
    ordered = next(micro_batches(pairs, 8))  # as one micro-batch
    logps = reference.sequence_logps(policy, preference_batch(ordered, tokenizer.pad_token_id))
    loss = LOSSES[loss_type](make_pairs(run.args, ordered, logps)).mean()
    policy.zero_grad()
    loss.backward()
    expected = {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}
    assert_same_gradients(run.gradients["policy"], expected, atol=5e-6)
    assert found["train/loss"] == pytest.approx(float(loss.detach()), rel=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "opt"])
def test_padding_on_either_side_changes_no_log_probability(architecture):
    policy = tiny_policy(architecture)
    rows = [
        {"prompt_len": 2, "chosen_input_ids": [5, 6, 7, 8, 1], "rejected_input_ids": [5, 6, 9, 1]},
        {"prompt_len": 1, "chosen_input_ids": [5, 1], "rejected_input_ids": [5, 9, 9, 3, 4, 7, 1]},
    ]
    batch = preference_batch(rows, 0)
    together = reference.sequence_logps(policy, batch)
    assert torch.allclose(together, reference.sequence_logps(policy, left_padded(batch)), atol=1e-4)
    for i, row in enumerate(rows):
        for side, logps in (("chosen", together[i]), ("rejected", together[i + 2])):
            assert float(logps) == pytest.approx(float(logps_by_hand(policy.model, row, side)), abs=1e-4)


@torch.no_grad()
def test_scores_come_back_in_the_order_of_the_rows(cafe_data, tokenizer, pairs, tmp_path):
    policy = load_policy(str(save_model("llama", tmp_path, tokenizer)), ModelArgs(), tokenizer).train()
    found = score_rows(RunOfOneStep(arguments(cafe_data, micro_batch_size=2)), policy, pairs, tokenizer.pad_token_id)
    expected = [float(logps_by_hand(policy.model, row, side)) for side in ("chosen", "rejected") for row in pairs]
    assert found.reshape(-1).tolist() == pytest.approx(expected, abs=1e-3)
    assert policy.training and not found.requires_grad


def test_what_a_loss_gets_of_a_row(cafe_data, pairs):
    logps = -torch.arange(1.0, 17.0)

    def made(**flags) -> Pairs:
        return make_pairs(arguments(cafe_data, beta=0.5, **flags), pairs, logps, baseline=0.25)

    found = made(loss_type="kl")
    assert found.policy_rejected_logps.tolist() == [-float(n) for n in range(9, 17)]
    assert found.margins.tolist() == pytest.approx([row["columns"]["margin"] for row in pairs])
    assert found.chosen_lengths.tolist() == [len(row["chosen_input_ids"]) - row["prompt_len"] for row in pairs]
    assert (found.beta, found.baseline, found.rejected_weight) == (0.5, 0.25, 1.0)
    assert made(rapo="const:0.7").rejected_weight == 0.7
    assert made(length_alpha=0.02).length_alpha == 0.02
    by_pair = zip(pairs, *(made(rapo=name).rejected_weight.tolist() for name in ("ra", "app_1", "app_2")))
    for i, (row, ra, app_1, app_2) in enumerate(by_pair):
        implicit = 0.5 * (-(9 + i) - row["ref_rejected_logps"])
        assert ra == pytest.approx(1 / (1 + max(row["columns"]["rejected_score"], 0)))
        assert app_1 == pytest.approx(1 / (1 - 0.1 * 0.5 * row["ref_rejected_logps"]))
        assert app_2 == pytest.approx(1 / (1 + max(implicit, 0)))


def test_no_gradient_flows_through_the_weight_of_the_rejected_side(cafe_data, pairs):
    logps = (-torch.arange(1.0, 17.0)).requires_grad_()
    made = make_pairs(arguments(cafe_data, rapo="app_2"), pairs, logps)
    assert not made.rejected_weight.requires_grad


def test_the_metrics_of_pairs_and_a_tie_is_half_right(cafe_data):
    chosen, rejected = torch.tensor([-3.0, -5.0, -4.0, -2.0]), torch.tensor([-8.0, -7.0, -2.0, -6.0])
    policy = {"policy_chosen_logps": chosen, "policy_rejected_logps": rejected}  # right, tie, wrong, right
    ref = {"ref_chosen_logps": torch.full((4,), -4.0), "ref_rejected_logps": torch.full((4,), -6.0)}
    pairs = Pairs(**policy, **ref, beta=0.5)
    args = arguments(cafe_data, rpo_alpha=0.5)
    sums = torch.stack([torch.tensor(6.0), torch.tensor(2.0), *dpo.pair_sums(args, pairs)]).detach() / 4
    found = dpo.pair_metrics(args, sums.tolist())
    assert found == {
        "loss": 1.75,
        "preference_loss": 1.5,
        "nll": 0.5,
        "rewards/chosen": 0.5 * (1 - 1 + 0 + 2) / 4,
        "rewards/rejected": 0.5 * (-2 - 1 + 4 + 0) / 4,
        "rewards/margins": 0.5 * (3 + 0 - 4 + 2) / 4,
        "rewards/accuracies": 2.5 / 4,
        "logps/chosen": -14 / 4,
        "logps/rejected": -23 / 4,
    }


@pytest.mark.slow
def test_the_baseline_is_the_mean_of_both_sides_of_all_pairs_before(cafe_data, base_model, tmp_path, monkeypatch):
    found, seen, step = [], [], dpo.train_step

    def kept(run, model, rows, pad_id, baseline):
        seen.append(baseline)
        found.append(step(run, model, rows, pad_id, baseline))
        return found[-1]

    monkeypatch.setattr(dpo, "train_step", kept)
    flags = ["--data_dir", str(cafe_data), "--model_name", str(base_model), "--log_dir", str(tmp_path), *FEW]
    main([*flags, "--loss_type", "bco_pair", "--max_steps", "3", "--mini_batch_size", "40", "--learning_rate", "1e-2"])
    rewards = [row["rewards/chosen"] + row["rewards/rejected"] for row in found]
    assert seen[0] == 0 and seen[1] == pytest.approx(rewards[0] / 2)  # steps of 40 and of the other 20 pairs
    assert seen[2] == pytest.approx((40 * rewards[0] + 20 * rewards[1]) / 120)
    assert RunningMean(3.0, 6).value == 0.5


# ------------------------------------------------------------------------------------------------------- truncation
ROW = {"prompt_len": 4, "chosen_input_ids": [1, 2, 3, 4, 11, 12, 13], "rejected_input_ids": [1, 2, 3, 4, 21]}


@pytest.mark.parametrize(
    ("flags", "prompt_len", "chosen", "rejected"),
    [
        ({}, 4, [1, 2, 3, 4, 11, 12, 13], [1, 2, 3, 4, 21]),
        ({"max_length": 7}, 4, [1, 2, 3, 4, 11, 12, 13], [1, 2, 3, 4, 21]),
        ({"max_length": 6}, 4, [1, 2, 3, 4, 11, 12], [1, 2, 3, 4, 21]),
        ({"max_prompt_length": 3}, 3, [2, 3, 4, 11, 12, 13], [2, 3, 4, 21]),
        ({"max_prompt_length": 3, "truncation_mode": "keep_start"}, 3, [1, 2, 3, 11, 12, 13], [1, 2, 3, 21]),
        ({"max_prompt_length": 2, "max_length": 4}, 2, [3, 4, 11, 12], [3, 4, 21]),
        ({"max_prompt_length": 9, "max_length": 10}, 4, [1, 2, 3, 4, 11, 12, 13], [1, 2, 3, 4, 21]),
    ],
)
def test_a_pair_is_cut_at_its_named_end(flags, prompt_len, chosen, rejected, cafe_data):
    cut = truncate(ROW, arguments(cafe_data, **flags))
    assert cut["prompt_len"] == prompt_len
    assert list(map(int, cut["chosen_input_ids"])) == chosen
    assert list(map(int, cut["rejected_input_ids"])) == rejected


def test_pairs_that_are_equal_once_cut_are_left_out_and_told(cafe_data):
    folder = cafe_data
    same = {"prompt_len": 1, "chosen_input_ids": [5, 6, 7], "rejected_input_ids": [5, 6, 8]}
    other = {"prompt_len": 1, "chosen_input_ids": [5, 6, 7], "rejected_input_ids": [5, 9, 8]}
    rows, notes = fit_pairs(arguments(folder, max_length=2), pack([same, other], "preference"), "the pairs")
    assert [list(map(int, row["rejected_input_ids"])) for row in rows] == [[5, 9]]
    assert [note.split(" pairs")[0] for note in notes] == ["2 of 2", "1"]
    with error_naming(UsageError, "--max_length 2"):
        fit_pairs(arguments(folder, max_length=2), pack([same], "preference"), "the pairs")


# ------------------------------------------------------------------------------------------------------- the program
FEW = ["--lr_warmup_steps", "0", "--log_interval", "1", *CPU]


@pytest.fixture(scope="module")
def dpo_dir(cafe_data, sft_dir, logs) -> str:
    flags = ["--data_dir", str(cafe_data), "--sft_experiment_dir", sft_dir, "--log_dir", str(logs), *FEW]
    return main([*flags, "--max_steps", "2", "--learning_rate", "1e-2"])


@pytest.fixture(scope="module")
def scored_data(cafe_data, tmp_path_factory) -> Path:
    """The café's pairs with margins and rewards."""
    folder = shutil.copytree(cafe_data, tmp_path_factory.mktemp("scored") / "cafe")
    for split in ("train", "validation"):
        rows = with_columns(load_split(cafe_data, "preference", split).to_list())
        torch.save(rows, folder / f"preference_{split}.pt")
        reseal(folder)
    return folder


def test_an_experiment_dir_holds_exactly_what_is_promised(dpo_dir, sft_dir):
    found = [name for name in listing(dpo_dir) if "events.out" not in name and not name.startswith("eval/")]
    files = ["README.md", "args.json", "manifest.json", "metrics.jsonl", "samples.jsonl"]
    assert found == sorted(files + [f"checkpoint-000002/{name}" for name in CHECKPOINT])
    assert Path(dpo_dir).parts[-4] == "rlhf-dpo"
    rows = metrics(dpo_dir)
    assert [row["step"] for row in rows] == [1, 2, 2]
    common = {f"rewards/{name}" for name in ("chosen", "rejected", "margins", "accuracies")}
    common |= {"logps/chosen", "logps/rejected"}
    losses = {"loss", "preference_loss", "nll"}
    assert rows[0].keys() == {"step", "train/grad_norm", "train/lr"} | {f"train/{name}" for name in losses} | common
    assert rows[2].keys() == {"step"} | {f"val/{name}" for name in losses | common}
    assert weights(last_checkpoint(dpo_dir)) != weights(last_checkpoint(sft_dir))


def test_a_run_begins_at_log_two_and_moves_away(dpo_dir):
    first, second, validation = metrics(dpo_dir)
    assert first["train/loss"] == pytest.approx(math.log(2), abs=1e-4)
    assert first["rewards/margins"] == pytest.approx(0, abs=1e-3)
    assert abs(second["rewards/margins"]) > 1e-3
    assert validation["val/rewards/margins"] == pytest.approx(
        validation["val/rewards/chosen"] - validation["val/rewards/rejected"]
    )


def test_training_learns_the_pairs_it_sees(cafe_data, sft_dir, logs):
    flags = ["--data_dir", str(cafe_data), "--sft_experiment_dir", sft_dir, "--log_dir", str(logs), *FEW]
    flags += ["--epochs", "4", "--mini_batch_size", "20", "--micro_batch_size", "20", "--learning_rate", "3e-3"]
    found = [row for row in metrics(main([*flags, "--eval_interval", "0"])) if "train/loss" in row]
    assert found[-1]["train/loss"] < 0.6 < found[0]["train/loss"]
    assert found[-1]["rewards/accuracies"] > 0.6


def implicit(folder: str, reference: str, tokenizer, rows: list[dict], beta: float) -> list[float]:
    """Margins of the implicit rewards."""
    policy, other = (
        load_policy(str(last_checkpoint(d)), ModelArgs(), tokenizer).eval().model for d in (folder, reference)
    )
    with torch.no_grad():
        ratios = [
            [
                float(logps_by_hand(policy, row, side) - logps_by_hand(other, row, side))
                for side in ("chosen", "rejected")
            ]
            for row in rows
        ]
    return [beta * (chosen - rejected) for chosen, rejected in ratios]


def test_validation_and_evaluation_measure_the_implicit_reward(dpo_dir, sft_dir, cafe_data, tokenizer):
    margins = implicit(dpo_dir, sft_dir, tokenizer, load_split(cafe_data, "preference", "validation"), 0.1)
    last = metrics(dpo_dir)[-1]
    assert last["val/rewards/margins"] == pytest.approx(sum(margins) / len(margins), abs=1e-4)
    assert last["val/rewards/accuracies"] == pytest.approx(sum(m > 0 for m in margins) / len(margins))
    assert last["val/loss"] == pytest.approx(sum(math.log1p(math.exp(-m)) for m in margins) / len(margins), abs=1e-4)
    pairs = load_split(cafe_data, "preference", "test")
    margins = implicit(dpo_dir, sft_dir, tokenizer, pairs, 0.1)
    (row,) = evaluate.main(["--experiment_dir", dpo_dir, "--max_new_tokens", "4", "--accelerator", "cpu"])
    assert row["implicit_accuracy"] == pytest.approx(sum(m > 0 for m in margins) / len(margins))
    assert row["implicit_margin"] == pytest.approx(sum(margins) / len(margins), abs=1e-4)
    low, high = row["implicit_accuracy_interval"]
    assert low < row["implicit_accuracy"] < high and abs(row["kl"]) > 0


@pytest.mark.slow
@pytest.mark.parametrize("flags", [[], ["--ref_model"]])
def test_the_reference_is_packed_as_the_policy_is(flags, cafe_data, base_model, tmp_path, monkeypatch):
    packs, score = [], reference.score_rows
    monkeypatch.setattr(
        reference, "score_rows", lambda run, role, *given: packs.append(role.packs) or score(run, role, *given)
    )
    given = ["--data_dir", str(cafe_data), "--model_name", str(base_model), "--log_dir", str(tmp_path)]
    main([*given, *(word for flag in flags for word in (flag, str(base_model))), "--max_steps", "1", *CPU])
    assert packs and all(packs)


def test_what_evaluation_takes_as_reference(dpo_dir, sft_dir, tmp_path):
    def reference(*flags: str, **stored: object) -> tuple:
        folder = shutil.copytree(dpo_dir, tmp_path / str(len(list(tmp_path.iterdir()))))
        args = json.loads((folder / "args.json").read_text()) | stored
        (folder / "args.json").write_text(json.dumps(args))
        reseal(folder)
        given = evaluate.EvaluateArgs(model_name=[str(folder)], **dict(zip(flags[::2], flags[1::2])))
        return evaluate.reference_of(given, str(folder))

    assert reference() == (sft_dir, "--reference_dir")
    assert reference(ref_model="other") == ("other", "--reference_dir")
    assert reference("reference_dir", dpo_dir, ref_model="other") == (dpo_dir, "--reference_dir")
    for program in ("dpo", "ppo"):
        started = reference(sft_experiment_dir=None, model_name="hub/name", program=program)
        assert started == ("hub/name", "--model_name")
    assert reference(sft_experiment_dir=None, model_name="tiny")[0] is None
    assert reference(sft_experiment_dir=None, model_name="hub/name", program="sft")[0] is None


def test_a_supervised_model_has_no_implicit_reward(sft_dir, tmp_path):
    folder = shutil.copytree(sft_dir, tmp_path / "sft")
    (row,) = evaluate.main(["--experiment_dir", str(folder), "--max_new_tokens", "4", "--accelerator", "cpu"])
    assert "implicit_accuracy" not in row


@pytest.mark.slow
def test_another_reference_is_what_rewards_are_measured_from(cafe_data, sft_dir, base_model, tokenizer, tmp_path):
    flags = ["--data_dir", str(cafe_data), "--sft_experiment_dir", sft_dir, "--log_dir", str(tmp_path), *FEW]
    flags += ["--mini_batch_size", "60", "--micro_batch_size", "60", "--max_steps", "1", "--eval_interval", "0"]
    (row,) = metrics(main([*flags, "--ref_model", str(base_model)]))
    pairs = load_split(cafe_data, "preference", "train")
    policy = load_policy(str(last_checkpoint(sft_dir)), ModelArgs(), tokenizer).eval().model
    reference = load_policy(str(base_model), ModelArgs(), tokenizer).eval().model
    with torch.no_grad():
        gaps = [logps_by_hand(policy, p, "chosen") - logps_by_hand(reference, p, "chosen") for p in pairs]
    assert row["rewards/chosen"] == pytest.approx(0.1 * float(sum(gaps)) / len(pairs), abs=1e-3)
    assert abs(row["rewards/chosen"]) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags", [["--loss_type", "aot_pair"], ["--loss_type", "kl", "--rapo", "ra"], ["--f_divergence", "js"]], ids=str
)
def test_losses_that_need_more_run_from_the_command_line(flags, scored_data, base_model, tmp_path):
    more = ["--data_dir", str(scored_data), "--model_name", str(base_model), "--log_dir", str(tmp_path), *FEW]
    folder = main([*more, *flags, "--max_steps", "2", "--micro_batch_size", "4", "--eval_iters", "1"])
    assert all(math.isfinite(value) for row in metrics(folder) for value in row.values())


@pytest.mark.slow
@pytest.mark.parametrize("loss_type", sorted(preference.REFERENCE_FREE))
def test_a_loss_without_a_reference_computes_none(loss_type, cafe_data, sft_dir, tokenizer, tmp_path, monkeypatch):
    def fail(*_):
        raise AssertionError("a reference pass")

    monkeypatch.setattr(reference, "score_before_training", fail)
    flags = ["--data_dir", str(cafe_data), "--sft_experiment_dir", sft_dir, "--log_dir", str(tmp_path), *FEW]
    flags += ["--mini_batch_size", "60", "--micro_batch_size", "60", "--max_steps", "2", "--beta", "1.5"]
    rows = metrics(main([*flags, "--loss_type", loss_type]))
    model = load_policy(str(last_checkpoint(sft_dir)), ModelArgs(), tokenizer).eval().model
    pairs = load_split(cafe_data, "preference", "train")
    with torch.no_grad():
        logps = [[float(logps_by_hand(model, row, side)) for side in ("chosen", "rejected")] for row in pairs]
    lengths = [[len(row[f"{s}_input_ids"]) - row["prompt_len"] for s in ("chosen", "rejected")] for row in pairs]
    for i, side in enumerate(("chosen", "rejected")):
        per_token = [logp[i] / length[i] for logp, length in zip(logps, lengths)]
        rewards = {
            "simpo": [1.5 * x for x in per_token],
            "orpo": [x - math.log(1 - math.exp(x)) for x in per_token],
            "cpo": [1.5 * logp[i] for logp in logps],
        }[loss_type]
        assert rows[0][f"rewards/{side}"] == pytest.approx(sum(rewards) / len(pairs), rel=1e-3)
    assert rows[0]["rewards/margins"] == pytest.approx(rows[0]["rewards/chosen"] - rows[0]["rewards/rejected"])
    (run,) = (str(path.parent) for path in tmp_path.rglob("args.json"))
    (row,) = evaluate.main(["--experiment_dir", run, "--max_new_tokens", "4", "--accelerator", "cpu"])
    assert "implicit_accuracy" not in row


def test_the_default_margin_of_simpo_is_half_of_beta(cafe_data, pairs):
    logps = -torch.arange(1.0, 17.0)
    assert make_pairs(arguments(cafe_data, loss_type="simpo", beta=2.5), pairs, logps).gamma == 1.25
    assert make_pairs(arguments(cafe_data, loss_type="simpo", simpo_gamma=0.3), pairs, logps).gamma == 0.3


def test_another_divergence_changes_the_rewards_and_the_loss(cafe_data, pairs):
    logps = -torch.arange(1.0, 17.0)
    args = arguments(cafe_data, f_divergence="alpha", f_alpha=0.25, beta=0.5)
    made = make_pairs(args, pairs, logps)
    ratio = -1.0 - pairs[0]["ref_chosen_logps"]
    assert float(preference.implicit_rewards(made)[0][0]) == pytest.approx(
        0.5 * (1 - math.exp(-0.25 * ratio)) / 0.25, rel=1e-5
    )
    other = make_pairs(arguments(cafe_data, beta=0.5), pairs, logps)
    assert not torch.allclose(made.logits, other.logits)
    assert torch.equal(dpo.pair_sums(arguments(cafe_data, beta=0.5), other)[0], (0.5 * other.chosen_ratio).sum())


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["lora", "last_layer"])
def test_a_checkpoint_is_a_plain_folder_and_every_mode_starts_at_the_reference(
    mode, cafe_data, sft_dir, tokenizer, tmp_path
):
    flags = ["--data_dir", str(cafe_data), "--sft_experiment_dir", sft_dir, "--log_dir", str(tmp_path), *FEW]
    folder = main([*flags, "--max_steps", "3", "--learning_rate", "1e-2", "--finetune_mode", mode])
    assert metrics(folder)[0]["train/loss"] == pytest.approx(math.log(2), abs=1e-4)
    theirs = AutoModelForCausalLM.from_pretrained(last_checkpoint(folder)).eval()
    rows = load_split(cafe_data, "preference", "validation")
    margins = implicit(folder, sft_dir, tokenizer, rows, 0.1)
    assert metrics(folder)[-1]["val/rewards/margins"] == pytest.approx(sum(margins) / len(rows), abs=1e-3)
    assert theirs.config.architectures == ["LlamaForCausalLM"]
    assert weights(last_checkpoint(folder)) != weights(last_checkpoint(sft_dir))


def test_a_policy_that_does_not_start_at_its_reference_is_refused(cafe_data, sft_dir, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(reference, "with_reference", make_wrong)
    flags = ["--data_dir", str(cafe_data), "--sft_experiment_dir", sft_dir, "--log_dir", str(tmp_path), *FEW]
    with pytest.raises(SystemExit) as stopped:
        main([*flags, "--max_steps", "1"])
    assert stopped.value.code == RunFailure.exit_status
    assert "reference" in capsys.readouterr().err


@pytest.mark.parametrize("gap", [0.04, 4.0])
def test_rounding_in_a_response_of_two_tokens_is_no_other_reference(gap):
    """0.02 a token by rounding, beside a response of 60 tokens that is as far off; all of it in 62 tokens counts."""
    text = {"chosen_input_ids": torch.zeros(6), "rejected_input_ids": torch.zeros(6), "prompt_len": 4}
    rows = [
        {**text, "ref_chosen_logps": -3.0},
        {**text, "chosen_input_ids": torch.zeros(64), "ref_chosen_logps": -90.0},
    ]
    with nullcontext() if gap < 1 else error_naming(RunFailure, "reference"):
        check_reference(rows, torch.tensor([[-3.0 - gap, -90.0 + gap], [0.0, 0.0]]))


def make_wrong(rows, logps):
    return [row | {"ref_chosen_logps": 5.0, "ref_rejected_logps": 0.0} for row in rows]


# --------------------------------------------------------------------------------------------------------- resuming
def long_run(data, model) -> list[str]:
    flags = ["--data_dir", str(data), "--model_name", str(model), "--log_interval", "1", "--disable_dropout", "False"]
    return [*flags, "--mini_batch_size", "8", "--micro_batch_size", "4", "--lr_warmup_steps", "3", *CPU]


@pytest.mark.slow
@pytest.mark.parametrize(
    "more", [["--loss_type", "bco_pair"], ["--loss_type", "aot_pair", "--finetune_mode", "lora"]], ids=str
)
def test_a_resumed_run_is_bitwise_as_one_that_never_stopped(more, cafe_data, noisy_model, tmp_path, monkeypatch):
    flags = [*long_run(cafe_data, noisy_model), *more, "--max_steps", "6", "--save_interval", "2", "--keep_last", "0"]
    whole = main([*flags, "--learning_rate", "1e-3", "--log_dir", str(tmp_path)])
    scored: list[int] = []
    original = reference.score_rows
    monkeypatch.setattr(
        reference,
        "score_rows",
        lambda run, model, rows, *more: scored.append(len(rows)) or original(run, model, rows, *more),
    )
    assert_resumes(main, whole)
    everything = sum(len(load_split(cafe_data, "preference", split)) for split in ("train", "validation"))
    assert everything not in scored, "the reference was computed again"


@pytest.mark.slow
def test_a_reference_that_is_no_longer_the_same_is_refused(cafe_data, base_model, tokenizer, tmp_path, capsys):
    folder = shutil.copytree(base_model, tmp_path / "model")
    flags = ["--data_dir", str(cafe_data), "--model_name", str(folder), "--log_dir", str(tmp_path / "logs"), *FEW]
    run = main([*flags, "--max_steps", "2"])

    def stored() -> dict:
        return torch.load(last_checkpoint(run) / "resume.pt", weights_only=True)["extra"]["reference"]

    before = stored()
    main(["--resume_from", run, "--max_steps", "3"])
    assert stored()["fingerprint"] == before["fingerprint"] and "log-probabilities again" not in capsys.readouterr().out
    assert torch.equal(stored()["places"][: len(before["places"])], before["places"])
    save_model("llama", folder, tokenizer, initializer_range=0.5)
    assert f"--model_name {folder} is not what it was when the run began" in refused(
        capsys, main, "--resume_from", run, "--max_steps", "4"
    )


def test_a_fingerprint_follows_weights_and_tokens():
    def fingerprint(**changed):
        return reference.fingerprint(policy, pack([{**ROW, **changed}], "preference"))

    policy = tiny_policy("llama")
    first = fingerprint()
    assert fingerprint() == first
    assert fingerprint(prompt_len=3) != first
    assert fingerprint(rejected_input_ids=[1, 2, 3, 4, 22]) != first
    with torch.no_grad():
        next(policy.parameters())[0, 0] += 1e-6
    assert fingerprint() != first


# ------------------------------------------------------------------------------------------------------------ ranks
@pytest.mark.slow
@pytest.mark.parametrize("loss_type", ["sigmoid", "aot_pair"])
def test_two_ranks_equal_one_at_the_same_global_batch(loss_type, cafe_data, base_model, tmp_path):
    """60 rows in global batches of 14: the last one of an epoch is uneven."""
    flags = ["--data_dir", str(cafe_data), "--model_name", str(base_model), "--log_interval", "1"]
    flags += ["--optimizer_eps", "1e-2", "--accelerator", "cpu", "--loss_type", loss_type, "--rpo_alpha", "0.1"]
    flags += ["--micro_batch_size", "1", "--lr_warmup_steps", "0", "--learning_rate", "1e-2"]
    one = main([*flags, "--mini_batch_size", "14", "--devices", "1", "--log_dir", str(tmp_path / "one")])
    ranks = ["--mini_batch_size", "7", "--devices", "2", "--strategy", "ddp"]
    run_program("lightrlhf.dpo", *flags, *ranks, "--log_dir", str(tmp_path / "two"))
    (args,) = (tmp_path / "two").rglob("args.json")
    for row, other in zip(metrics(one), metrics(args.parent), strict=True):
        assert row.keys() == other.keys()
        for name in row:
            assert other[name] == pytest.approx(row[name], abs=1e-4, rel=1e-4), (row["step"], name)
    weights_of = [load_file(last_checkpoint(folder) / "model.safetensors") for folder in (one, args.parent)]
    assert max(float((weights_of[0][n] - weights_of[1][n]).abs().max()) for n in weights_of[0]) < 1e-5
    assert weights(last_checkpoint(one)) != (base_model / "model.safetensors").read_bytes()


# --------------------------------------------------------------------------------------------------------- bad calls
@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--margin_scale", "2"], "scale the margins"),
        (["--rapo", "const:x"], "--rapo"),
        (["--max_length", "8", "--max_prompt_length", "8"], "try --max_prompt_length 4"),
        (["--max_length", "3"], "--max_length 3 leaves no room"),
        (["--loss_type", "kl"], "--loss_type kl needs a number in the column margin, but row 0 of"),
        (["--rapo", "ra"], "--rapo ra needs a number in the column rejected_score, but row 0 of"),
        (["--ref_model", "nowhere"], "--ref_model nowhere does not exist"),
        (["--sft_experiment_dir", "nowhere"], "--sft_experiment_dir nowhere does not exist"),
    ],
)
def test_a_bad_call_is_one_line_and_leaves_nothing_behind(flags, told, cafe_data, base_model, tmp_path, capsys):
    good = ["--data_dir", cafe_data, "--model_name", base_model, "--log_dir", tmp_path / "logs", *CPU]
    assert told in refused(capsys, main, *good, *flags)
    assert not list(tmp_path.rglob("args.json"))


def test_bad_models_and_columns_are_one_line(cafe_data, scored_data, base_model, rm_dir, tmp_path, capsys):
    start = ["--log_dir", tmp_path / "logs", *CPU]
    line = refused(capsys, main, *start, "--data_dir", cafe_data)
    assert "--sft_experiment_dir" in line and "--model_name" in line
    given = [*start, "--model_name", base_model]
    assert f"--ref_model {rm_dir}" in refused(capsys, main, *given, "--data_dir", cafe_data, "--ref_model", rm_dir)
    folder = shutil.copytree(scored_data, tmp_path / "data")
    rows = stored_rows(folder / "preference_train.pt")
    rows[2]["columns"]["margin"] = math.nan
    torch.save(rows, folder / "preference_train.pt")
    reseal(folder)
    line = refused(capsys, main, *given, "--data_dir", folder, "--loss_type", "tv")
    assert "row 2" in line and "nan" in line


def test_arguments_are_stored_with_the_run(dpo_dir):
    stored = json.loads((Path(dpo_dir) / "args.json").read_text())
    assert stored["program"] == "dpo" and stored["beta"] == 0.1 and stored["loss_type"] == "sigmoid"


# -------------------------------------------------------------------------------------------------------------- page
def test_the_page_explains_every_loss():
    page = (ROOT / "howto" / "algorithms" / "dpo.md").read_text(encoding="utf-8")
    table = page.split("## Losses")[1].split("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == {*LOSSES}
    assert {f"--rapo {name}" for name in RAPO} <= set(re.findall(r"^\| `(--rapo \w+)` \|", table, re.MULTILINE))
