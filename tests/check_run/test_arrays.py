"""Faults planted one by one in steps of arrays are found and named; clean steps have none."""

import json

import numpy as np
import pytest
import torch
from helpers.errors import error_naming
from helpers.steps import EOS, GROUPS, PROMPT, RESPONSE, SIZE, float32, pair_step, policy_step, sft_step, with_pair_loss

from lightrlhf import check_run
from lightrlhf.check_run import check_steps
from lightrlhf.checks.step import Step
from lightrlhf.cli.errors import UsageError
from lightrlhf.maths import groups, ops, policy_losses


def faults_in(arrays, config):
    """{check: fault} of what is wrong."""
    return {one.name: one.fault for one in check_steps([Step(arrays, config)]) if one.says == "wrong"}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("aggregation", policy_losses.AGGREGATIONS)
@pytest.mark.parametrize("advantage", groups.ADVANTAGES)
def test_a_clean_step_of_a_policy_has_no_fault(seed, aggregation, advantage):
    arrays, config = policy_step(seed, aggregation=aggregation, advantage=advantage, first_pass=seed == 1)
    verdicts = {one.name: one.says for one in check_steps([Step(arrays, config)])}
    assert "wrong" not in verdicts.values()
    assert all(verdicts[name] == "right" for name in ("mask", "members", "logprobs", "advantages", "kl", "loss"))


@pytest.mark.parametrize("made", [pair_step(), pair_step(1, "ipo"), pair_step(2, "hinge"), sft_step(), sft_step(3)])
def test_clean_steps_of_pairs_and_of_sft_have_no_fault(made):
    verdicts = {one.name: one.says for one in check_steps([Step(*made)])}
    assert "wrong" not in verdicts.values() and verdicts["loss"] == verdicts["mask"] == "right"


# ------------------------------------------------------------------------------------------------------------- masks
def moved(values, by):
    """Columns moved, with zeros where none come from."""
    place = np.arange(values.shape[1]) - by
    return np.where((place >= 0) & (place < values.shape[1]), np.roll(values, by, axis=1), np.zeros((), values.dtype))


def first_end(arrays):
    return (arrays["input_ids"] == EOS) & arrays["loss_mask"]


def with_pad_as_end(arrays):
    """Padding is the end token, and counts as text of the response."""
    ids = np.where(arrays["attention_mask"], arrays["input_ids"], EOS)
    return {"input_ids": ids, "loss_mask": arrays["loss_mask"] | ~arrays["attention_mask"], "attention_mask": ids > -1}


MASKS = {
    "mask one early": lambda a: {"loss_mask": moved(a["loss_mask"], -1)},
    "mask one late": lambda a: {"loss_mask": moved(a["loss_mask"], 1) & a["attention_mask"]},
    "prompt tokens trained": lambda a: {"loss_mask": a["attention_mask"] & (np.arange(PROMPT + RESPONSE) > 0)},
    "padding trained": lambda a: {"loss_mask": np.arange(PROMPT + RESPONSE)[None] >= np.full((16, 1), PROMPT)},
    "tokens after the end trained": with_pad_as_end,
    "end token not trained": lambda a: {"loss_mask": a["loss_mask"] & ~first_end(a)},
    "end token missing": lambda a: {"input_ids": np.where(first_end(a), 7, a["input_ids"])},
    "nothing is trained": lambda a: {"loss_mask": a["loss_mask"] & False},
    "doubled start token": lambda a: {"input_ids": np.where(np.arange(PROMPT + RESPONSE) < 2, 2, a["input_ids"])},
}


@pytest.mark.parametrize("fault", MASKS)
def test_a_fault_of_the_mask_is_named(fault):
    arrays, config = policy_step()
    assert faults_in(arrays | MASKS[fault](arrays), config)["mask"] == fault


def test_members_that_share_their_noise_are_named_unless_chance_gives_them():
    arrays, config = policy_step()
    first = np.arange(16) // SIZE * SIZE
    copied = {name: arrays[name][first] for name in ("input_ids", "loss_mask", "attention_mask", "old_logprobs")}
    assert faults_in(arrays | copied, config)["members"] == "members share their noise"
    likely = arrays | copied | {"old_logprobs": copied["old_logprobs"] * 1e-3}
    assert "members" not in faults_in(likely, config)
    assert "members" not in faults_in(arrays | copied, config | {"temperature": 0})


# -------------------------------------------------------------------------------------------------------- advantages
def advantages_by(name, scores, group):
    scores, group = torch.from_numpy(np.asarray(scores)).double(), torch.from_numpy(np.asarray(group)).long()
    moments = groups.group_moments(scores, group, int(group.max()) + 1)
    return float32(groups.group_advantages(scores, moments, groups.ADVANTAGES[name]))


def planted_advantages(fault, arrays):
    rewards, group, right = arrays["rewards"], arrays["group"], arrays["advantages"]
    scaled = right * np.sqrt(SIZE / (SIZE - 1))
    return {
        "std with n": lambda: scaled,
        "mean": lambda: advantages_by("mean", rewards, group),
        "batch_std": lambda: advantages_by("batch_std", rewards, group),
        "rloo": lambda: advantages_by("rloo", rewards, group),
        "none": lambda: rewards,
        "baseline of the batch": lambda: advantages_by("std", rewards, group * 0),
        "groups interleaved": lambda: advantages_by("std", rewards, np.arange(16) % GROUPS),
        "groups of 8 rows": lambda: advantages_by("std", rewards, np.arange(16) // 8),
        "groups cut by batches": lambda: advantages_by("std", rewards, group * 6 + arrays["micro_batch"]),
        "sign": lambda: -right,
        "rows misaligned": lambda: np.roll(right, 3),
        "rewards of other rows": lambda: advantages_by("std", np.roll(rewards, 1), group),
        "advantages clipped": lambda: right.clip(-0.5, 0.5),
        "scaled by 0.5": lambda: 0.5 * right,
        "advantages of 0": lambda: 0 * right,
        "differs from every known formula": lambda: right**3,
    }[fault]()


@pytest.mark.parametrize(
    "fault",
    "std with n;mean;batch_std;rloo;none;baseline of the batch;groups interleaved;groups of 8 rows;"
    "groups cut by batches;sign;rows misaligned;rewards of other rows;advantages clipped;scaled by 0.5;advantages of 0;"
    "differs from every known formula".split(";"),
)
def test_a_fault_of_advantages_is_named(fault):
    arrays, config = policy_step()
    planted = arrays | {"advantages": planted_advantages(fault, arrays)}
    assert faults_in(planted, config)["advantages"] == fault


@pytest.mark.parametrize("as_zero", [True, False])
def test_an_unscored_row_that_learns_is_named(as_zero):
    arrays, config = policy_step()
    rewards = arrays["rewards"].copy()
    rewards[5] = np.nan
    right = {"rewards": rewards, "advantages": advantages_by("std", rewards, arrays["group"])}
    assert "advantages" not in faults_in(arrays | right, config)
    wrong = advantages_by("std", np.nan_to_num(rewards), arrays["group"]) if as_zero else arrays["advantages"]
    found = faults_in(arrays | {"rewards": rewards, "advantages": wrong}, config)
    assert found["advantages"] == ("unscored rows taken as 0" if as_zero else "unscored rows have an advantage")


def test_gae_and_its_faults():
    arrays, config = policy_step()
    mask = torch.from_numpy(arrays["loss_mask"])
    rewards, values = (torch.where(mask, torch.randn(mask.shape).double(), 0.0) for _ in range(2))
    made = {name: ops.gae(rewards, values, mask, *ways)[0] for name, ways in {"": (0.9, 0.8), "g": (1, 0.8)}.items()}
    config = config | {"advantage": "gae", "gamma": 0.9, "lambd": 0.8}
    arrays = arrays | {"token_rewards": rewards.numpy(), "values": values.numpy()}
    assert "advantages" not in faults_in(arrays | {"advantages": float32(made[""])}, config)
    assert "advantages" not in faults_in(arrays | {"advantages": float32(ops.whiten(made[""], mask))}, config)
    assert faults_in(arrays | {"advantages": float32(made["g"])}, config)["advantages"] == "gamma 1"
    rows = torch.cat([ops.whiten(row[None], one[None]) for row, one in zip(made[""], mask)])
    assert faults_in(arrays | {"advantages": float32(rows)}, config)["advantages"] == "whitened per sequence"


# ------------------------------------------------------------------------------------------------- log-probabilities
LOGPROBS = {
    ("logprobs", "missing log-probabilities read as 0"): lambda a: a["old_logprobs"] * (np.arange(16)[:, None] % 4 > 0),
    ("logprobs", "log-probabilities above 0"): lambda a: -a["old_logprobs"],
    ("logprobs", "log-probabilities missing"): lambda a: np.where(a["group"][:, None] == 1, np.nan, a["old_logprobs"]),
    ("ratio", "log-probabilities one late"): lambda a: moved(a["old_logprobs"], -1),
    ("ratio", "log-probabilities one early"): lambda a: moved(a["old_logprobs"], 1),
    ("ratio", "ratio not 1 at the first pass"): lambda a: a["old_logprobs"] * 0.8,
}


@pytest.mark.parametrize("check, fault", LOGPROBS)
def test_a_fault_of_log_probabilities_is_named(check, fault):
    arrays, config = policy_step(first_pass=True)
    if fault.endswith("early"):  # so that no row has its end at the border
        arrays["loss_mask"] = arrays["loss_mask"] & (np.arange(PROMPT + RESPONSE) < PROMPT + RESPONSE - 1)
    planted = arrays | {"old_logprobs": LOGPROBS[check, fault](arrays)}
    assert faults_in(planted, config)[check] == fault


def test_rows_of_equal_length_that_are_moved_are_named():
    arrays, config = policy_step(first_pass=True)
    arrays["loss_mask"] = np.zeros_like(arrays["loss_mask"]) | (np.arange(PROMPT + RESPONSE) // 2 == 2)
    arrays["new_logprobs"] = np.random.default_rng(0).uniform(-4, -1, arrays["loss_mask"].shape)
    planted = arrays | {"old_logprobs": np.roll(arrays["new_logprobs"], 5, axis=0)}
    assert faults_in(planted, config)["ratio"] == "rows misaligned"


KLS = {
    "k1": lambda new, ref: ops.kl_k1(new, ref),
    "k2": lambda new, ref: ops.kl_k2(new, ref),
    "k3 of the sign": lambda new, ref: -ops.kl_k3(new, ref),
    "k3 reversed": lambda new, ref: ops.kl_k3(ref, new),
    "absolute difference": lambda new, ref: (new - ref).abs(),
    "ratio in place of its logarithm": lambda new, ref: (new - ref).exp(),
}


@pytest.mark.parametrize("fault", KLS)
def test_another_kl_is_named(fault):
    arrays, config = policy_step()
    new, ref = (torch.from_numpy(arrays[name]) for name in ("new_logprobs", "ref_logprobs"))
    assert faults_in(arrays | {"kl": float32(KLS[fault](new, ref))}, config)["kl"] == fault


# ----------------------------------------------------------------------------------------------------------- the loss
def loss_of(arrays, config, weights=None, losses=None, kl=0.05, estimator=ops.kl_k3):
    """A loss and its slopes, written here by themselves."""
    mask = torch.from_numpy(arrays["loss_mask"])
    new = torch.from_numpy(arrays["new_logprobs"]).clone().requires_grad_()
    old, ref = (torch.from_numpy(arrays[name]) for name in ("old_logprobs", "ref_logprobs"))
    advantages, ratio = torch.from_numpy(arrays["advantages"])[:, None], (new - old).exp()
    surrogate = ratio * advantages, ratio.clamp(0.8, 1.28) * advantages
    made = -torch.minimum(*surrogate) if losses is None else losses(ratio, advantages)
    made = made + kl * estimator(new, ref)
    weights = mask / mask.sum() if weights is None else weights(mask)
    loss = torch.where(mask, weights * made, 0.0).sum()
    (slopes,) = torch.autograd.grad(loss, new)
    return arrays | {"loss": float32(loss), "loss_slopes": float32(slopes)}


def per_pass(mask):
    passes = torch.arange(16) // 3
    tokens = torch.zeros(6).index_add(0, passes, mask.sum(1).float())
    return mask / (6 * tokens[passes])[:, None]


LOSSES = {
    "aggregation sequence": {"weights": lambda m: m / (16 * m.sum(1, keepdim=True))},
    "aggregation sum": {"weights": lambda m: m / 16},
    "aggregation constant": {"weights": lambda m: m / (16 * RESPONSE)},
    "mean of means of passes": {"weights": per_pass},
    "padding of prompts counted": {"weights": lambda m: m / m.numel()},
    "sum in place of mean": {"weights": lambda m: m.float()},
    "divided by the passes twice": {"weights": lambda m: m / m.sum() / 6},
    "not divided by the passes": {"weights": lambda m: m / m.sum() * 6},
    "no clipping": {"losses": lambda r, a: -r * a},
    "max in place of min": {"losses": lambda r, a: -torch.maximum(r * a, r.clamp(0.8, 1.28) * a)},
    "always clipped": {"losses": lambda r, a: -r.clamp(0.8, 1.28) * a},
    "upper range is the lower": {"losses": lambda r, a: -torch.minimum(r * a, r.clamp(0.8, 1.2) * a)},
    "ranges exchanged": {"losses": lambda r, a: -torch.minimum(r * a, r.clamp(0.72, 1.2) * a)},
    "clip range 0.1": {"losses": lambda r, a: -torch.minimum(r * a, r.clamp(0.9, 1.1) * a)},
    "sign of advantages": {"losses": lambda r, a: -torch.minimum(r * -a, r.clamp(0.8, 1.28) * -a)},
    "KL by k1": {"estimator": ops.kl_k1},
    "KL by k2": {"estimator": ops.kl_k2},
    "no KL": {"kl": 0.0},
    "sign of the KL": {"kl": -0.05},
    "KL without its coefficient": {"kl": 1.0},
    "differs from every known formula": {"losses": lambda r, a: -(r**1.7) * a},
}


@pytest.mark.parametrize("has_slopes", [True, False])
@pytest.mark.parametrize("fault", LOSSES)
def test_another_loss_is_named(fault, has_slopes):
    arrays, config = policy_step()
    planted = loss_of(arrays, config, **LOSSES[fault])
    if not has_slopes:
        del planted["loss_slopes"]
    assert faults_in(planted, config)["loss"] == fault


def test_the_loss_of_the_tests_is_the_clean_one():
    arrays, config = policy_step()
    assert not faults_in(loss_of(arrays, config), config)


def test_tokens_of_a_pass_in_place_of_those_of_the_step_are_named():
    arrays, config = policy_step()
    config["num_items"] = 3 * int(arrays["loss_mask"].sum())
    found = faults_in(arrays, config)
    assert found["loss"] == "tokens of this pass in place of the step's"


@pytest.mark.parametrize(
    "fault, changes",
    [
        ("beta of 1", {"beta": 1.0}),
        ("label smoothing 0.1", {"label_smoothing": 0.1}),
        ("without the reference", {"ref_chosen_logps": torch.zeros(8), "ref_rejected_logps": torch.zeros(8)}),
    ],
)
def test_another_loss_of_pairs_is_named(fault, changes):
    arrays, config = pair_step()
    assert faults_in(with_pair_loss(arrays, config, **changes)[0], config)["loss"] == fault


def test_faults_of_pairs_are_named():
    arrays, config = pair_step()
    every = arrays["attention_mask"].copy()
    every[:, 0] = False
    assert faults_in(with_pair_loss(arrays, config, every)[0], config)["loss"] == "prompt tokens counted"
    other = with_pair_loss(arrays, config | {"loss_type": "ipo"})[0]
    assert faults_in(other, config)["loss"] == "loss ipo"
    half = len(arrays["input_ids"]) // 2
    rows = np.roll(np.arange(2 * half), half)
    exchanged = with_pair_loss({name: value[rows] for name, value in arrays.items() if value.ndim}, config)[0]["loss"]
    assert faults_in(arrays | {"loss": exchanged}, config)["loss"] == "chosen and rejected exchanged"
    same = {name: np.concatenate([arrays[name][:half]] * 2) for name in ("input_ids", "loss_mask")}
    assert faults_in(arrays | same, config)["pairs"] == "chosen and rejected are the same"
    ids = arrays["input_ids"].copy()
    ids[half:, :PROMPT] = np.roll(ids[half:, :PROMPT], 1, axis=0)
    assert faults_in(arrays | {"input_ids": ids}, config)["pairs"] == "prompts of a pair differ"


@pytest.mark.parametrize("fault", ["divided by all tokens", "mean of means of passes", "sum in place of mean"])
def test_another_mean_of_sft_is_named(fault):
    arrays, config = sft_step()
    logprobs, mask = torch.from_numpy(arrays["new_logprobs"]), torch.from_numpy(arrays["loss_mask"])
    weights = {
        "divided by all tokens": lambda: mask / (arrays["attention_mask"].sum() - 16),
        "mean of means of passes": lambda: per_pass(mask),
        "sum in place of mean": lambda: mask.float(),
    }[fault]()
    loss = float32(-(torch.where(mask, logprobs, 0.0) * weights).sum())
    assert faults_in(arrays | {"loss": loss}, config)["loss"] == fault


# --------------------------------------------------------------------------------------------------- files and fields
def test_what_is_missing_is_named():
    arrays, config = policy_step()
    for name in ("rewards", "group"):
        del arrays[name]
    del config["num_generations"], config["kl_estimator"]
    found = {one.name: one for one in check_steps([Step(arrays, config)])}
    assert found["advantages"].evidence == "needs rewards, group" and found["loss"].says == "cannot tell"


def test_a_file_of_arrays_and_a_folder_of_rows_give_the_same(tmp_path, capsys):
    arrays, config = policy_step()
    arrays["advantages"] = -arrays["advantages"]
    np.savez(tmp_path / "step.npz", **arrays, config=json.dumps(config))
    (tmp_path / "rows").mkdir()
    of_rows = {name: value.tolist() for name, value in arrays.items() if value.ndim}
    lengths = arrays["attention_mask"].sum(1)
    with (tmp_path / "rows" / "rows.jsonl").open("w") as file:
        for row, length in enumerate(lengths):
            cut = {name: v[row][:length] if isinstance(v[row], list) else v[row] for name, v in of_rows.items()}
            file.write(json.dumps(cut) + "\n")
    (tmp_path / "rows" / "step.json").write_text(json.dumps(config | {"loss": float(arrays["loss"])}))
    written = []
    for place in ("step.npz", "rows"):
        with pytest.raises(SystemExit) as ended:
            check_run.main([str(tmp_path / place), f"--output_file={tmp_path / 'found.json'}"])
        assert ended.value.code == 1 and "advantages: sign" in capsys.readouterr().out
        written.append(
            [(one["name"], one["says"], one["fault"]) for one in json.loads((tmp_path / "found.json").read_text())]
        )
    assert written[0] == written[1]


def test_arrays_of_completions_alone_and_other_names_are_read():
    arrays, config = policy_step()
    for name in ("input_ids", "attention_mask", "prompt_len"):
        ids = arrays.pop(name)
        if name == "input_ids":
            arrays |= {"prompt_ids": ids[:, :PROMPT], "completion_ids": ids[:, PROMPT:]}
    arrays["completion_mask"] = arrays.pop("loss_mask")
    for name, value in arrays.items():
        if value.ndim == 2 and not name.endswith("ids"):
            arrays[name] = value[:, PROMPT:]
    verdicts = {one.name: one.says for one in check_steps([Step(arrays, config)])}
    assert [verdicts[name] for name in ("mask", "advantages", "kl", "loss")] == ["right"] * 4


def test_wrong_files_are_refused_with_their_field(tmp_path):
    with error_naming(UsageError, "advantage_s", "advantages"):
        Step({"advantage_s": np.zeros(3)}, {})
    with error_naming(UsageError, "rewards", "group"):
        Step({"rewards": np.zeros(3), "group": np.zeros(4)}, {})
    np.savez(tmp_path / "objects.npz", rewards=np.array([{}, []], dtype=object))
    with error_naming(UsageError, "objects.npz"):
        check_run.read_steps(str(tmp_path / "objects.npz"))
    with error_naming(UsageError, tmp_path / "nothing"):
        check_run.read_steps(str(tmp_path / "nothing"))
