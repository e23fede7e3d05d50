"""REFUEL: its loss by plain Python, one turn's tokens alone learn, stages leave files that a kill does not change."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import helpers
import pytest
import torch
from helpers import (
    CPU,
    RunOfOneStep,
    assert_same_gradients,
    last_checkpoint,
    run_killed,
    tiny_policy,
    weights,
)
from helpers.rewards import vowels
from safetensors.torch import load_file

from lightrlhf import refuel
from lightrlhf.data.batch import dialogue_pair_batch
from lightrlhf.data.splits import load_split
from lightrlhf.generation.dialogue_pairs import INVALID_REWARD, make_pair, sample_turn
from lightrlhf.refuel import RefuelArgs, main, pair_losses, pairwise_loss, refuel_loss
from lightrlhf.storage.jsonl import read_jsonl

SIZES = ["--iterations", "2", "--num_data", "10", "--num_turns", "3", "--max_new_tokens", "6", "--eta", "2"]
SIZES += ["--mini_batch_size", "4", "--micro_batch_size", "4", "--learning_rate", "1e-3", "--eval_dialogues", "4"]
SIZES += ["--validation_percentage", "0.2", "--eval_interval", "1", "--print_sample_output_freq", "1"]
SPEAKERS = ["--user_function", "helpers.rewards:echo", "--reward_function", "helpers.rewards:vowels"]


@pytest.fixture(scope="module")
def talk_data(tmp_path_factory, tokenizer):
    """The café's conversations with a few dozen rows, in the tokens of the other tests."""
    from datasets_prep.cafe_talk.prepare_data import main as prepare

    folder = tmp_path_factory.mktemp("talk")
    tokenizer.save_pretrained(folder / "tokenizer")
    flags = ["--tokenizer_name", str(folder / "tokenizer"), "--num_dialogues", "40", "--num_held_out", "8"]
    prepare(["--destination_dir", str(folder / "data"), *flags, "--num_proc", "1"])
    return folder / "data"


@pytest.fixture(scope="module")
def flags(talk_data, sft_dir):
    return ["--data_dir", str(talk_data), "--sft_experiment_dir", sft_dir, *SPEAKERS, *SIZES, *CPU]


@pytest.fixture(scope="module")
def finished(flags, tmp_path_factory):
    return Path(main([*flags, "--output_dir", str(tmp_path_factory.mktemp("refuel") / "run")]))


# ------------------------------------------------------------------------------------------------------------- loss
def test_the_loss_is_the_papers():
    """By hand: chosen moved by .5, rejected by -.25, scores 3 and 1, eta .1."""
    logps, old = torch.tensor([-2.0, -5.0]), torch.tensor([-2.5, -4.75])
    rewards = torch.tensor([3.0, 1.0])
    assert float(refuel_loss(logps, old, rewards, eta=0.1)) == pytest.approx((0.5 + 0.25 - 0.2) ** 2)
    assert float(pairwise_loss(logps, old, rewards, beta=0.4)) == pytest.approx(math.log(1 + math.exp(-0.4 * 0.75)))
    tied = torch.tensor([1.0, 1.0])
    assert float(pairwise_loss(logps, old, tied, beta=0.4)) == 0.0
    assert float(refuel_loss(logps, old, tied, eta=0.1)) == pytest.approx(0.75**2)


def pairs_of(*spans: tuple[int, int, int]) -> list[dict]:
    """Rows of a prefix, a turn and what comes behind it (`end` tokens), each with two different turns."""
    rows, generator = [], torch.Generator().manual_seed(4)
    for number, (start, turn, end) in enumerate(spans):
        prefix = torch.randint(2, 61, (start,), generator=generator)
        row = {"old_logps": [-9.0 - number, -11.0 + number]}
        for side, reward in (("chosen", 0.7 + number), ("rejected", 0.2)):
            ids = torch.cat([prefix, torch.randint(2, 61, (turn + end,), generator=generator)])
            places = torch.arange(1, len(ids))
            mask = (places >= start) & (places < start + turn)
            row |= {f"{side}_input_ids": ids, f"{side}_action_mask": mask, f"{side}_reward": reward}
        rows.append(row)
    return rows


def plain_loss(policy, rows, eta: float, temperature: float):
    """The mean loss in float64, a row at a time, each log-probability looked up by a loop."""
    model = policy.model.double()
    total = 0.0
    for row in rows:
        moved = []
        for side, old in zip(("chosen", "rejected"), row["old_logps"]):
            ids = row[f"{side}_input_ids"]
            logits = model(input_ids=ids[None], use_cache=False).logits[0] / temperature
            said = sum(
                logits[t].log_softmax(-1)[ids[t + 1]] for t in range(len(ids) - 1) if row[f"{side}_action_mask"][t]
            )
            moved.append(said - old)
        total = total + (moved[0] - moved[1] - eta * (row["chosen_reward"] - row["rejected_reward"])) ** 2
    return total / len(rows)


@pytest.mark.parametrize("micro_batch_size", [1, 3])
def test_the_gradient_equals_a_float64_reference(talk_data, micro_batch_size):
    rows, temperature = pairs_of((4, 5, 0), (9, 3, 0), (2, 7, 0)), 0.8
    policy = tiny_policy("llama")
    args = args_of(talk_data, micro_batch_size=micro_batch_size, mini_batch_size=3, eta=0.5, temperature=temperature)
    run = RunOfOneStep(args, policy=policy)
    metrics = refuel.train_step(run, policy, rows, pad_id=0)  # of all pairs, one micro-batch or several
    reference = tiny_policy("llama").double()
    loss = plain_loss(reference, rows, 0.5, temperature)
    loss.backward()
    loss = loss.detach()
    wanted = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    assert_same_gradients({k: v.double() for k, v in run.gradients["policy"].items()}, wanted, atol=2e-5)
    assert metrics["train/loss"] == pytest.approx(float(loss), rel=1e-4)


def args_of(talk_data, **given) -> RefuelArgs:
    fixed = {"data_dir": str(talk_data), "model_name": "tiny", "reward_function": "helpers.rewards:vowels"}
    return RefuelArgs(**fixed, accelerator="cpu", **given)


def test_only_the_turns_own_tokens_have_gradient():
    """Tokens behind the turn change nothing at all; S is the sum over the turn's tokens and no others."""
    policy = tiny_policy("llama")
    (row,) = pairs_of((4, 5, 3))
    batch = dialogue_pair_batch([row], pad_id=0)
    changed = {k: v.clone() if torch.is_tensor(v) else v for k, v in row.items()}
    changed["chosen_input_ids"][9:] = 7
    told = [refuel.turn_logps(policy, b, 1.0) for b in (batch, dialogue_pair_batch([changed], pad_id=0))]
    assert torch.equal(told[0], told[1])
    assert batch.action_mask.sum(1).tolist() == [5, 5]
    spoken = policy(batch.input_ids, batch.attention_mask, batch.attention_mask[:, 1:]).logprobs
    assert torch.allclose(told[0], spoken[:, 3:8].sum(1), atol=1e-5)
    changed["chosen_input_ids"][6] = (changed["chosen_input_ids"][6] + 1) % 61
    assert not torch.equal(told[0][:1], refuel.turn_logps(policy, dialogue_pair_batch([changed], pad_id=0), 1.0)[:1])


def test_one_turn_is_rebel_bitwise(talk_data):
    """REBEL (2404.16767, eq. 2) on prompt and response alone, written from that paper."""
    rows = pairs_of((4, 5, 0), (6, 2, 0))
    policy = tiny_policy("llama")
    batch = dialogue_pair_batch(rows, pad_id=0)
    ours, _ = pair_losses(args_of(talk_data, eta=0.5), refuel.turn_logps(policy, batch, 0.8), rows)
    behind_prompt = batch.attention_mask[:, 1:] & (
        torch.arange(1, batch.input_ids.shape[1]) >= torch.tensor([4, 6, 4, 6])[:, None]
    )
    logps = policy(batch.input_ids, batch.attention_mask, behind_prompt, temperature=0.8).logprobs.sum(1)
    old = torch.tensor([row["old_logps"][side] for side in (0, 1) for row in rows])
    rewards = torch.tensor([row[f"{side}_reward"] for side in ("chosen", "rejected") for row in rows])
    ratio, reward = (logps - old).chunk(2), rewards.chunk(2)
    assert torch.equal(ours, ((ratio[0] - ratio[1]) - 0.5 * (reward[0] - reward[1])) ** 2)


# ------------------------------------------------------------------------------------------------------------ pairs
def test_turns_and_horizons_are_what_the_flags_say(talk_data):
    def places(**given):
        args = args_of(talk_data, **given)
        return [sample_turn(args, index, 5, 5) for index in range(3000)]

    drawn = places()
    assert all(h <= last for h, last in drawn)
    shares = [sum(last == t for _, last in drawn) / len(drawn) for t in range(5)]
    assert max(abs(share - 0.2) for share in shares) < 0.03
    at_end = [h for h, last in drawn if last == 4]
    assert max(abs(sum(h == t for h in at_end) / len(at_end) - 0.2) for t in range(5)) < 0.06
    final = places(horizon="final")
    assert {last for _, last in final} == {4} and {h for h, _ in final} == set(range(5))
    assert set(places(turn="last")) == {(4, 4)}
    assert drawn != places(seed=7) and drawn == places()
    few = args_of(talk_data)
    assert max(sample_turn(few, index, 5, 2)[0] for index in range(200)) == 1  # the data's dialogue has two turns


def line(first: list[int], second: list[int], horizon: int = 1) -> dict:
    """A line of `dialogues.jsonl`: both share the first turn and part at the second."""
    sides = {}
    for name, reply in (("first", first), ("second", second)):
        messages = [{"role": role, "content": "x"} for role in ("user", "assistant", "user", "assistant")]
        ids = [2, 3, 4, 5, 6, *reply]
        spans = [[1, 3], [5, len(ids)]]
        sides[name] = {"messages": messages, "input_ids": ids, "turn_spans": spans}
        sides[name] |= {"truncated": [False, False], "full": False}
    return {"index": 0, "turn": 1, "horizon": horizon, **sides}


def test_a_pair_has_the_better_side_as_chosen_and_its_turn_as_mask(talk_data):
    args = args_of(talk_data, total_length=9)
    row = line([7, 8, 1], [9, 1])
    pair = make_pair(args, row, {"first": [0.0, 1.0], "second": [0.0, 2.5]})
    assert pair["chosen_input_ids"] == [2, 3, 4, 5, 6, 9, 1] and pair["chosen_reward"] == 2.5
    assert pair["rejected_input_ids"] == [2, 3, 4, 5, 6, 7, 8, 1] and pair["rejected_reward"] == 1.0
    assert pair["chosen_action_mask"].tolist() == [False] * 4 + [True] * 2
    assert pair["rejected_action_mask"].tolist() == [False] * 4 + [True] * 3
    early = line([7, 8, 1], [9, 1], horizon=4)  # a user who had nothing more to say: the last turn counts
    assert make_pair(args, early, {"first": [0.0, 1.0], "second": [0.0, 2.5]})["chosen_reward"] == 2.5
    for values, why in (
        ({"first": [0.0, INVALID_REWARD], "second": [0.0, 1.0]}, "without a valid reward"),
        ({"first": [INVALID_REWARD, 1.0], "second": [0.0, 1.0]}, "without a valid reward"),
    ):
        assert make_pair(args, row, values) == why
    good = {"first": [0.0, 1.0], "second": [0.0, 2.0]}
    assert make_pair(args, line([7, 1], [7, 1]), good) == "the same reply twice"
    assert make_pair(args, line([7, 8, 8, 8, 1], [9, 1]), good) == "too long"
    full = line([7, 1], [9, 1], horizon=2)
    full["second"]["full"] = True
    assert make_pair(args, full, good) == "without room for the horizon"


# ---------------------------------------------------------------------------------------------------------- program
def test_every_stage_leaves_its_files(finished, flags):
    lines = [row for t in (1, 2) for row in read_jsonl(finished / f"iteration-0{t}" / "dialogues.jsonl")]
    assert [row["index"] for row in lines] == list(range(20))
    for row in lines:
        first, second = row["first"], row["second"]
        start = first["turn_spans"][row["turn"]][0]
        assert first["input_ids"][:start] == second["input_ids"][:start]
        assert second["turn_spans"][: row["turn"]] == first["turn_spans"][: row["turn"]]
        assert len(first["turn_spans"]) == 3 and len(second["turn_spans"]) == row["horizon"] + 1
    assert len({json.dumps(row["first"]["input_ids"]) for row in lines}) == 20  # no dialogue comes twice
    rewards = read_jsonl(finished / "iteration-01" / "rewards.jsonl")
    said = [m["content"] for m in lines[0]["first"]["messages"] if m["role"] == "assistant"]
    assert rewards[0]["first"] == vowels(None, said)
    pairs = load_split(finished / "iteration-01" / "pairs", "refuel", "train")
    assert all(row["chosen_reward"] >= row["rejected_reward"] for row in pairs)
    told = json.loads((finished / "iteration-01" / "pairs" / "report.json").read_text())
    assert sum(told["rows"].values()) == told["counts"]["pairs"] and told["reward_queries"] > 30
    rows = json.loads((finished / "results.json").read_text())
    assert [row["iteration"] for row in rows] == [0, 1, 2] and len(rows[2]["score_by_turn"]) == 3
    assert weights(last_checkpoint(finished)) == weights(last_checkpoint(finished / "iteration-02" / "policy"))
    assert weights(last_checkpoint(finished)) != weights(last_checkpoint(finished / "iteration-01" / "policy"))
    samples = read_jsonl(finished / "iteration-01" / "policy" / "samples.jsonl")
    assert {"prefix", "reply", "chosen_reply", "rejected_reply"} <= samples[0].keys()
    assert "score at turn 3" in (finished / "README.md").read_text()


def test_the_experiment_dir_is_all_the_next_stage_needs(finished, sft_dir, talk_data, tmp_path):
    from lightrlhf.evaluate import main as evaluate

    initial = shutil.copytree(sft_dir, tmp_path / "initial")  # it is written to, and other tests use it
    judged = ["--by_turn", "True", "--num_turns", "2", "--max_new_tokens", "4", "--data_dir", str(talk_data)]
    judged += ["--user_function", "datasets_prep.cafe_talk.guest:guest", "--accelerator", "cpu"]
    start, trained = evaluate(["--experiment_dir", str(initial), str(finished), *judged])
    assert start["win_rate"] == [0.5, 0.5] and len(trained["win_rate_interval"]) == 2
    turns = read_jsonl(finished / "eval" / "test" / "turn-2.jsonl")
    assert turns[0]["response"].startswith("assistant: ") and "\n\nuser: " in turns[0]["response"]
    assert (initial / "eval" / "test_by_turn.png").stat().st_size > 5_000


def test_stage_by_stage_is_the_same_as_all_at_once(finished, flags, tmp_path):
    for stage in ("rank", "train"):
        with pytest.raises(SystemExit):
            main([*flags, "--output_dir", str(tmp_path / stage), "--stage", stage])
    run = tmp_path / "run"
    flags = [*flags, "--output_dir", str(run)]
    for stage in ("generate", "rank", "tokenize", "train"):
        main([*flags, "--stage", stage])
    assert not (run / "iteration-02").exists()
    main(["--resume_from", str(run), "--stage", "all"])
    assert_same_run(run, finished)


def assert_same_run(run: Path, other: Path) -> None:
    for t in (1, 2):
        for name in ("dialogues.jsonl", "rewards.jsonl", "evaluation.jsonl", "evaluation.json", "pairs/report.json"):
            assert (run / f"iteration-0{t}" / name).read_bytes() == (other / f"iteration-0{t}" / name).read_bytes(), (
                name
            )
        ours, theirs = (last_checkpoint(where / f"iteration-0{t}" / "policy") for where in (run, other))
        assert weights(ours) == weights(theirs)
    assert (run / "results.json").read_bytes() == (other / "results.json").read_bytes()


def test_killed_while_it_trains_it_ends_the_same(finished, flags, tmp_path):
    run = tmp_path / "run"
    flags = [*flags, "--output_dir", str(run), "--save_interval", "1"]
    run_killed(run, "iteration-01/training/**/checkpoint-000001", -1, "lightrlhf.refuel", *flags)
    assert not (run / "iteration-02").exists()
    main(flags)
    assert_same_run(run, finished)


@pytest.mark.slow
def test_two_ranks_do_what_one_does(flags, tmp_path):
    """Only training is of several processes; half the batch on each of two is the same batch."""
    runs = []
    for devices, size in (("1", "4"), ("2", "2")):
        given = dict(zip(flags[::2], flags[1::2])) | {"--mini_batch_size": size, "--micro_batch_size": size}
        given |= {"--devices": devices, "--output_dir": str(tmp_path / devices), "--iterations": "1"}
        given |= {"--validation_percentage": "0", "--max_steps": "2"}  # 8 of 10 pairs: no batch has an odd row
        runs.append(Path(main([word for pair in given.items() for word in pair])) / "iteration-01")
    assert (runs[0] / "rewards.jsonl").read_bytes() == (runs[1] / "rewards.jsonl").read_bytes()
    one, two = (load_file(last_checkpoint(run / "policy") / "model.safetensors") for run in runs)
    assert all(torch.allclose(one[name], two[name], atol=1e-5) for name in one)


def test_a_policy_that_came_to_say_the_same_each_time_ends_the_run(finished, flags, tmp_path, capsys, monkeypatch):
    def alike_later(args, row, scores):
        return "the same reply twice" if row["index"] >= 10 else make_pair(args, row, scores)

    monkeypatch.setattr(refuel, "make_pair", alike_later)
    run = tmp_path / "run"
    for _ in range(2):  # the same command again says the same again
        main([*flags, "--output_dir", str(run)])
        told = capsys.readouterr().out
        assert "no pair to train on: 10 the same reply twice; iteration 1 is the last" in told and "finished: " in told
    assert weights(last_checkpoint(run)) == weights(last_checkpoint(finished / "iteration-01" / "policy"))
    monkeypatch.setattr(refuel, "make_pair", lambda *_: "the same reply twice")  # from the start: a mistake
    with pytest.raises(SystemExit):
        main([*flags, "--output_dir", str(tmp_path / "other")])


def test_a_half_written_line_is_written_again(finished, tmp_path):
    run = shutil.copytree(finished, tmp_path / "run", symlinks=True)
    for name in ("dialogues.jsonl", "rewards.jsonl"):
        path = run / "iteration-02" / name
        path.write_bytes(path.read_bytes()[:-40])
    for name in ("policy", "pairs"):
        shutil.rmtree(run / "iteration-02" / name)
    (run / "checkpoint-000002").unlink()
    (run / "iteration-02" / "evaluation.json").unlink()
    stored = json.loads((run / "args.json").read_text())
    (run / "args.json").write_text(json.dumps(stored | {"output_dir": str(run)}))
    main(["--resume_from", str(run)])
    assert_same_run(run, finished)


def test_old_log_probabilities_of_another_machine_are_stale(finished, tmp_path, capsys):
    """Kept ones are taken only where the hash of weights, precision and device is the same."""
    path = finished / "iteration-01" / "pairs" / "old_logprobs.pt"
    stored = torch.load(path, weights_only=True)
    run = shutil.copytree(finished, tmp_path / "run", symlinks=True)
    shutil.rmtree(run / "iteration-01" / "policy")
    shutil.rmtree(run / "iteration-02")
    for link in run.glob("checkpoint-*"):
        link.unlink()
    mine = run / "iteration-01" / "pairs" / "old_logprobs.pt"
    args = json.loads((run / "args.json").read_text()) | {"output_dir": str(run)}
    (run / "args.json").write_text(json.dumps(args))
    torch.save({"fingerprint": "of another machine", "logps": stored["logps"] + 1}, mine)
    main(["--resume_from", str(run), "--stage", "train"])
    assert "computed anew" in capsys.readouterr().out
    again = torch.load(mine, weights_only=True)
    assert again["fingerprint"] == stored["fingerprint"] and torch.equal(again["logps"], stored["logps"])


@pytest.mark.parametrize("prefix", ["dataset", "policy"])
def test_the_baselines_are_two_flags(flags, talk_data, tmp_path, prefix):
    """Last turn only: both sides end with the turn that learns; from the data's dialogue, its tokens come before."""
    run = Path(main([*flags, "--iterations", "1", "--turn", "last", "--prefix", prefix, "--output_dir", str(tmp_path)]))
    known = {tuple(row["input_ids"].tolist()) for row in load_split(talk_data, "dialogue", "train")}
    for row in read_jsonl(run / "iteration-01" / "dialogues.jsonl"):
        assert row["turn"] == row["horizon"] == 2 and len(row["first"]["turn_spans"]) == 3
        start = row["first"]["turn_spans"][2][0]
        of_data = any(ids[:start] == tuple(row["first"]["input_ids"][:start]) for ids in known)
        assert of_data == (prefix == "dataset")


def test_no_valid_reward_is_told_in_one_line(flags, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        main([*flags, "--output_dir", str(tmp_path), "--reward_function", "helpers.rewards:always_nan"])
    told = capsys.readouterr().err.strip().splitlines()[-1]
    assert stop.value.code == 2 and "gives no pair to train on: 10 without a valid reward" in told


# ----------------------------------------------------------------------------------------------------------- online
ONLINE = ["--setting", "online", "--reward_function", "helpers.rewards:vowels", "--rollout_size", "6"]
ONLINE += ["--max_new_tokens", "6", "--mini_batch_size", "4", "--micro_batch_size", "4", "--learning_rate", "1e-3"]
ONLINE += ["--max_steps", "3", "--save_interval", "1"]
ONLINE += ["--log_interval", "1", "--eval_interval", "2", "--eval_dialogues", "4"]


@pytest.fixture
def online(talk_data, sft_dir, tmp_path):
    return ["--data_dir", str(talk_data), "--sft_experiment_dir", sft_dir, *ONLINE, *CPU, "--log_dir", str(tmp_path)]


def test_online_starts_at_the_initial_policy_and_goes_on_bitwise(online):
    run = Path(main([*online, "--noptepochs", "2", "--print_sample_output_freq", "2"]))
    rows = helpers.metrics(run)
    first = next(row for row in rows if "objective/kl" in row)
    assert first["objective/kl"] == pytest.approx(0.0, abs=1e-5) and first["objective/valid_ratio"] == 1.0
    assert sum("val/score" in row for row in rows) == 2 and (run / "samples.jsonl").is_file()
    end = weights(last_checkpoint(run))
    assert end != weights(run / "checkpoint-000002")
    shutil.rmtree(run / "checkpoint-000003")
    main(["--resume_from", str(run)])
    assert weights(last_checkpoint(run)) == end
    assert [row for row in helpers.metrics(run) if "val/score" not in row] == [r for r in rows if "val/score" not in r]


def online_pairs(talk_data, tokenizer, **given):
    """Pairs of one step of tiny models, with what they were made of."""
    from lightrlhf.generation.dialogues import load_dialogues

    fixed = {"setting": "online", "max_new_tokens": 5, "kl_coef": 0.0, "data_dir": str(talk_data)}
    fixed |= {"reward_function": "helpers.rewards:vowels", "model_name": "tiny", "accelerator": "cpu"}
    args = RefuelArgs(**(fixed | given))
    policy = tiny_policy("llama", vocab_size=len(tokenizer), pad_token_id=0, eos_token_id=1)
    reference = tiny_policy("llama", vocab_size=len(tokenizer), pad_token_id=0, eos_token_id=1)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.mul_(1.05)
    run = RunOfOneStep(args, policy=policy)
    run.autocast = helpers.nullcontext
    scorer = refuel.annotate.make_scorer(args, args.rollout_mini_batch_size)
    rows = load_dialogues(str(talk_data), "train")[:8]
    pairs, told = refuel.online_pairs(run, policy, reference, scorer, rows, tokenizer)
    return args, policy, reference, rows, pairs, told


def test_online_rewards_are_the_score_less_the_kl_at_the_turn_and_a_cut_turn_is_penalised(talk_data, tokenizer):
    penalty = {"penalty_reward_value": -7.0}
    _, policy, reference, _, plain, told = online_pairs(talk_data, tokenizer, **penalty)
    *_, charged, _ = online_pairs(talk_data, tokenizer, kl_coef=0.3, **penalty)
    assert 0 < told["completions/truncated_ratio"]
    for one, other in zip(plain, charged):
        for place, side in enumerate(("chosen", "rejected")):
            ids, mask = one[f"{side}_input_ids"], one[f"{side}_action_mask"]
            assert (one[f"{side}_reward"] == -7.0) == (ids[-1] != tokenizer.eos_token_id)
            inputs = torch.tensor([ids]), torch.ones(1, len(ids), dtype=torch.bool), mask[None]
            with torch.no_grad():
                said, known = (model(*inputs, temperature=0.8).logprobs.sum() for model in (policy, reference))
            assert one["old_logps"][place] == pytest.approx(float(said), abs=1e-4)
            assert other[f"{side}_reward"] == pytest.approx(one[f"{side}_reward"] - 0.3 * float(said - known), abs=1e-4)


def test_online_pairs_share_the_datas_prefix_and_whitened_rewards_have_mean_0(talk_data, tokenizer):
    *_, rows, pairs, _ = online_pairs(talk_data, tokenizer, whiten_rewards=True)
    rewards = torch.tensor([pair[f"{side}_reward"] for pair in pairs for side in ("chosen", "rejected")])
    assert float(rewards.mean()) == pytest.approx(0, abs=1e-5)
    assert float(rewards.var(correction=0)) == pytest.approx(1, abs=1e-3)
    starts = []
    for row, pair in zip(rows, pairs):
        start = int(pair["chosen_action_mask"].long().argmax()) + 1
        assert pair["chosen_input_ids"][:start] == pair["rejected_input_ids"][:start] == row.input_ids[:start]
        starts.append([span[0] for span in row.turn_spans].index(start))
    assert len(set(starts)) > 1  # turns differ within a batch


def test_only_the_top_layers_learn_and_the_reference_shares_the_others(base_model, tokenizer, talk_data):
    args = args_of(talk_data, num_layers_unfrozen=1)
    policy = refuel.load_learner(args, str(base_model), "--model_name", tokenizer)
    learning = {name for name, p in policy.named_parameters() if p.requires_grad}
    assert learning and all(".layers.1." in name or "lm_head" in name for name in learning)
    reference = policy.reference()
    for name, parameter in reference.named_parameters():
        assert (dict(policy.named_parameters())[name] is parameter) == (name not in learning)
    assert refuel.shares_parameters(reference, policy)


def test_offloaded_models_go_back_to_the_cpu(talk_data, tokenizer, rm_dir):
    *_, told = online_pairs(talk_data, tokenizer, reward_function=None, rm_experiment_dir=rm_dir, offload=True)
    assert told["objective/valid_ratio"] == 1.0
    moved = []

    class Module:
        def to(self, device):
            moved.append(str(device))

    with refuel.at_work(Module(), torch.device("cpu", 0), offload=True):
        moved.append("work")
    assert moved == ["cpu:0", "work", "cpu"]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--user_model", "x"], "--user_model x has no place in --setting online"),
        (["--stage", "rank"], "--stage rank has no place in --setting online"),
        (["--num_layers_unfrozen", "2", "--finetune_mode", "lora"], "both say what learns"),
        (["--max_new_tokens", "900"], "does not fit into --total_length 2048"),
    ],
)
def test_what_the_online_setting_refuses(online, capsys, given, told):
    with pytest.raises(SystemExit) as stop:
        main([*online, *given])
    assert stop.value.code == 2 and told in capsys.readouterr().err
