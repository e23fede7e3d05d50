"""Programs beside PPO and GRPO that sample on servers: what they write is what the local engine gives."""

import dataclasses
import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from helpers import SAMPLING_GAP, last_checkpoint, learned, metrics, run_program, weights
from helpers.programs import trained
from helpers.serving import serving
from helpers.tiny_runs import TinyRuns, experiment_of

from lightrlhf import generate, reflect_rl
from lightrlhf.cli.errors import RunFailure
from lightrlhf.data.batch import response_batch
from lightrlhf.generation import samplers
from lightrlhf.generation.server_pool import RolloutServers
from lightrlhf.models.roles import TokenStats
from lightrlhf.storage.jsonl import read_jsonl
from lightrlhf.storage.shards import Shard

SEAL = ("sha256", "bytes")
SLOTS = 8  # of the server and of the local engine, which then do the same arithmetic


@pytest.fixture(scope="module")
def url(runs):
    with serving(runs.model, rollout_mini_batch_size=SLOTS) as (address, _):
        yield address


def run(runs: TinyRuns, program: str, folder: Path, *more: object) -> Path:
    """The experiment dir of a run."""
    return trained(program, *runs.flags(program, folder, "--rollout_mini_batch_size", SLOTS, *more))


# ----------------------------------------------------------------------------------------------------------- generate
@pytest.fixture
def flags(runs):
    small = ["--max_new_tokens", "6", "--accelerator", "cpu", "--rollout_mini_batch_size", str(SLOTS)]
    data = ["--data_dir", str(runs.cafe), "--split", "train", "--num_prompts", "40"]
    return [*data, "--model_name", str(runs.model), *small, "--num_generations", "2"]


def generated(path: Path, flags: list[str], *more: object) -> bytes:
    generate.main([*flags, *map(str, more), "--output_file", str(path)])
    return path.read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        (),
        ("--temperature", "0.7"),
        ("--top_p", "0.8", "--top_k", "9", "--min_p", "0.01"),
        ("--num_generations", "1", "--do_sample", "False", "--repetition_penalty", "1.3"),
        ("--stop_strings", "a", "--eos_ids", "5"),
    ],
)
def test_the_file_is_byte_for_byte_that_of_the_local_engine(more, flags, url, tmp_path):
    local = generated(tmp_path / "local.jsonl", flags, *more)
    served = generated(tmp_path / "served.jsonl", flags, *more, "--rollout_server", url)
    assert local == served
    assert json.loads((tmp_path / "served.args.json").read_text())["rollout_engine"] == "rollout_server"


@pytest.mark.slow
def test_several_temperatures_are_sampled_by_weights_loaded_once(flags, url, tmp_path, monkeypatch):
    loaded = []
    load = RolloutServers.load
    monkeypatch.setattr(RolloutServers, "load", lambda self, target: loaded.append(target) or load(self, target))
    both = ["--temperatures", "0", "0.6", "--num_generations", "1"]
    local = generate.main([*flags, *both, "--output_dir", str(tmp_path / "local")])
    served = generate.main([*flags, *both, "--output_dir", str(tmp_path / "served"), "--rollout_server", url])
    assert [Path(file).read_bytes() for file in local] == [Path(file).read_bytes() for file in served]
    assert len(loaded) == 1


@pytest.mark.slow
def test_a_file_that_was_cut_goes_on_to_the_same_bytes(flags, url, tmp_path):
    """With another server's address, too: only what sampled matters."""
    whole = generated(tmp_path / "rows.jsonl", flags, "--rollout_server", url)
    ends = [n for n, byte in enumerate(whole) if byte == 10]
    for kept in (ends[0] + 1, ends[33] + 20):
        (tmp_path / "rows.jsonl").write_bytes(whole[:kept])
        stored = json.loads((tmp_path / "rows.args.json").read_text())
        (tmp_path / "rows.args.json").write_text(json.dumps({k: stored[k] for k in stored if k not in SEAL}))
        assert generated(tmp_path / "rows.jsonl", flags, "--rollout_server", url + "/v1") == whole
    with pytest.raises(SystemExit):  # no file mixes samples of a server and of the local engine
        generated(tmp_path / "rows.jsonl", flags)


@pytest.mark.slow
def test_weights_of_an_adapter_go_merged(flags, runs, url, tmp_path):
    """The server's own model is another one; it samples from the model of the flag."""
    run_of_adapter = trained("sft", *runs.flags("sft", tmp_path / "sft", "--finetune_mode", "lora", steps=2))
    adapter = ["--model_name", str(run_of_adapter)]
    local = generated(tmp_path / "local.jsonl", [*flags, *adapter])
    served = generated(tmp_path / "served.jsonl", [*flags, *adapter], "--rollout_server", url)
    other = generated(tmp_path / "other.jsonl", flags)
    assert ids_of(tmp_path / "local.jsonl") == ids_of(tmp_path / "served.jsonl") != ids_of(tmp_path / "other.jsonl")
    assert local == served != other


def ids_of(path: Path) -> list:
    return [row["response_ids"] for row in read_jsonl(path)]


@pytest.mark.slow
def test_a_server_of_other_weights_is_refused(flags, runs, url, tmp_path, monkeypatch, capsys):
    """A server that keeps its own weights is found by the probabilities of the first responses."""
    from lightrlhf.models import saving

    export = saving.export_for_servers

    def changed(module, *args):
        embedding = module.model.get_input_embeddings().weight.data
        embedding += 0.3
        export(module, *args)
        embedding -= 0.3

    monkeypatch.setattr("lightrlhf.generation.exchange.export_for_servers", changed)
    with pytest.raises(SystemExit) as stopped:
        generated(tmp_path / "rows.jsonl", flags, "--rollout_server", url)
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert stopped.value.code == RunFailure.exit_status
    assert "servers sample from other probabilities than the policy: KL" in error
    assert (tmp_path / "rows.jsonl").read_bytes() == b""


@pytest.mark.parametrize(
    "given, message",
    [
        (["--rollout_server", "nowhere"], "--rollout_server nowhere is not an address"),
        (["--max_staleness", "1"], "max_staleness"),
    ],
)
def test_flags_of_generate_that_cannot_be_meant_are_one_line(given, message, flags, tmp_path, capsys):
    more = [] if "--rollout_server" in given else ["--rollout_server", "http://127.0.0.1:9"]
    with pytest.raises(SystemExit) as stopped:
        generated(tmp_path / "rows.jsonl", flags, *more, *given)
    assert stopped.value.code == 2 and message in capsys.readouterr().err.strip().splitlines()[-1]


def test_ranks_of_torchrun_are_refused(flags, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("lightrlhf.generate.start_ranks", lambda args: (Shard(0, 2), None, None))
    with pytest.raises(SystemExit):
        generated(tmp_path / "rows.jsonl", flags, "--rollout_server", "http://127.0.0.1:9")
    assert "only one process may query servers, not 2" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------------- iterations
def files_of(experiment: Path) -> dict[str, bytes]:
    """The sampled, scored and evaluated files of all iterations."""
    return {str(file.relative_to(experiment)): file.read_bytes() for file in experiment.glob("iteration-*/*.jsonl")}


@pytest.mark.slow
@pytest.mark.parametrize("program", ["online_dpo", "iterative_refuel"])
def test_iterations_are_those_of_the_local_engine(program, runs, url, tmp_path, monkeypatch):
    written = []
    write = samplers.ServedPolicy._load
    monkeypatch.setattr(
        samplers.ServedPolicy, "_load", lambda self, full: write(self, full) or written.append(self.servers.target)
    )
    local = run(runs, program, tmp_path / "local")
    assert not written
    served = run(runs, program, tmp_path / "served", "--rollout_server", url)
    assert files_of(local) == files_of(served)
    assert learned(local) == learned(served)
    assert weights(last_checkpoint(local)) == weights(last_checkpoint(served))
    assert len({target.version for target in written}) == len(written) == 2  # one of each iteration
    assert not any(target.folder.exists() for target in written)


# ----------------------------------------------------------------------------------------------------- while training
@pytest.mark.slow
def test_online_refuel_is_that_of_the_local_engine(runs, url, tmp_path):
    more = ["--eval_interval", 3, "--eval_dialogues", 2]
    local = run(runs, "online_refuel", tmp_path / "local", *more)
    served = run(runs, "online_refuel", tmp_path / "served", *more, "--rollout_server", url)
    assert learned(local) == learned(served)
    assert weights(last_checkpoint(local)) == weights(last_checkpoint(served))
    gaps = [row for row in metrics(served) if "objective/score" in row]
    assert len(gaps) == 6 and max(row["sampling/kl"] for row in gaps) < 1e-9
    assert all(abs(row["sampling/ratio_max"] - 1) < 1e-4 for row in gaps)
    assert not any(name in row for row in metrics(local) for name in SAMPLING_GAP)


@pytest.mark.slow
def test_two_ranks_of_online_refuel_share_servers(runs, url, tmp_path):
    """Their dialogues end after different numbers of rounds."""
    more = ("--rollout_mini_batch_size", SLOTS, "--disable_dropout", "True", "--optimizer_eps", "1e-2")
    both = ("--devices", 2, "--rollout_size", 3, "--rollout_server", url)
    run_program("lightrlhf.online_refuel", *runs.flags("online_refuel", tmp_path / "two", *more, *both))
    one = run(runs, "online_refuel", tmp_path / "one", *more, "--rollout_size", 6, "--mini_batch_size", 8)
    for row, other in zip(learned(one), learned(experiment_of(tmp_path / "two")), strict=True):
        names = [name for name in row if name.startswith(("objective", "completions"))]
        assert {n: row[n] for n in names} == pytest.approx({n: other[n] for n in names}, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("flag", ["max_staleness", "sampling_correction"])
def test_what_needs_log_probabilities_is_no_flag_of_refuel(flag, runs, tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        run(runs, "online_refuel", tmp_path, "--rollout_server", "http://127.0.0.1:9", f"--{flag}", "1")
    assert stopped.value.code == 2 and flag in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------- environments
needs_envs = pytest.mark.skipif(find_spec("gymnasium") is None, reason="needs pip install -e '.[envs]'")
ACTING = {
    "labels": (),
    "policy gradient by group": ("--entropy_coeff", "0.1", "--replay_buffer_size", 4),
    "ppo": ("--trainer", "ppo", "--num_generations", 1, "--mini_batch_size", 4, "--entropy_coeff", "0.1"),
    "shuffled labels": ("--shuffle_action", "True", "--with_history", "True", "--max_choices", 5),
    "any token": ("--shrink_head", "False", "--temperature", "0.8"),
    "written": ("--max_new_tokens", 3),
}


@pytest.fixture(scope="module")
def corridor_url(runs):
    with serving(runs.corridor, rollout_mini_batch_size=SLOTS) as (address, _):
        yield address


@pytest.mark.slow
@needs_envs
@pytest.mark.parametrize("way", ACTING)
def test_decisions_of_servers_are_those_of_the_local_policy(way, runs, corridor_url, tmp_path):
    """Labels are in the order of their ids here, so equal random numbers choose equal ones."""
    more = (*ACTING[way], "--eval_interval", 3)
    local = run(runs, "reflect_rl", tmp_path / "local", *more)
    served = run(runs, "reflect_rl", tmp_path / "served", *more, "--rollout_server", corridor_url)
    for one, other in zip(learned(local), learned(served), strict=True):
        assert one == pytest.approx(other, rel=1e-3, abs=1e-4)
    gaps = [row for row in metrics(served) if "objective/score" in row]
    assert len(gaps) == 6 and max(row["sampling/kl"] for row in gaps) < 1e-9
    assert all(abs(row["sampling/ratio_max"] - 1) < 1e-4 and row["sampling/dropped"] == 0 for row in gaps)
    assert not any(name in row for row in metrics(local) for name in SAMPLING_GAP)
    assert played(local) == played(served)


def played(experiment: Path) -> list[tuple]:
    """The kept episodes, without numbers that rounding changes."""
    rows = read_jsonl(experiment / "rollouts.jsonl")
    assert rows
    return [(row["step"], row["prompt"], row["response"], row["columns"]) for row in rows]


@pytest.mark.slow
@needs_envs
def test_ranks_share_servers_while_they_play_episodes_of_other_lengths(runs, corridor_url, tmp_path):
    more = ("--disable_dropout", "True", "--eval_interval", 3, "--micro_batch_size", 4)
    two = ("--devices", 2, "--rollout_mini_batch_size", SLOTS)
    for name, server in (("local", ()), ("served", ("--rollout_server", corridor_url))):
        run_program("lightrlhf.reflect_rl", *runs.flags("reflect_rl", tmp_path / name, *more, *two, *server))
    local, served = (experiment_of(tmp_path / name) for name in ("local", "served"))
    for one, other in zip(learned(local), learned(served), strict=True):
        assert one == pytest.approx(other, rel=1e-3, abs=1e-4)


@needs_envs
@pytest.mark.parametrize("trainer", ["pg", "ppo"])
def test_weights_multiply_what_decisions_contribute(trainer):
    """A weight of 2 for a decision gives the loss that the decision twice gives."""
    plain = response_batch([[5, 6], [7]], [[3], [4, 2]], 0)
    old, new, entropy = torch.rand(3, *plain.action_mask.shape, dtype=torch.float64)
    zeros = torch.zeros(2, dtype=torch.float64)
    numbers = {"advantages": torch.tensor([1.5, -0.5]).double(), "returns": zeros, "values": zeros, "rewards": zeros}
    labels = {"allowed": torch.zeros(2, 1, 0, dtype=torch.bool), "episode": torch.arange(2)}
    batch = plain.extend(reflect_rl.DecisionBatch, logprobs=old, **numbers, **labels)

    def loss(rows: list[int], correction: torch.Tensor | None) -> float:
        index = torch.tensor(rows)
        part = dataclasses.replace(batch, correction=correction).select(index)
        stats = TokenStats(new[index], entropy[index], None)
        if trainer == "pg":
            return float(reflect_rl.policy_gradient_loss(stats, part, 0.3)[0])
        return float(reflect_rl.ppo_loss(stats, part, 0.2, 0.3)[0])

    weights = torch.tensor([[2.0], [3.0]]).double().expand_as(old)
    assert loss([0, 1], weights) == pytest.approx(loss([0, 0, 1, 1, 1], None))


@needs_envs
@pytest.mark.parametrize(
    "given, message",
    [(["--max_staleness", "1"], "max_staleness"), (["--top_p", "0.9"], "--top_p 0.9 with --rollout_server")],
)
def test_flags_of_reflect_rl_that_cannot_be_meant_are_one_line(given, message, runs, tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        run(runs, "reflect_rl", tmp_path, "--rollout_server", "http://127.0.0.1:9", *given)
    assert stopped.value.code == 2 and message in capsys.readouterr().err.strip().splitlines()[-1]
