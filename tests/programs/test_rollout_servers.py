"""Runs that sample on servers: bitwise those of the engine in the process, with one or several ranks, and resumed."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from helpers import SAMPLING_GAP, last_checkpoint, learned, metrics, run_program, weights
from helpers.programs import trained
from helpers.servers import wait_at_most
from helpers.serving import serving
from helpers.tiny_runs import TinyRuns, experiment_of

from lightrlhf.cli.patience import RANK, REQUEST
from lightrlhf.generation import served
from lightrlhf.generation.server_pool import RolloutServers
from lightrlhf.storage.checkpoint import checkpoints

PROGRAMS = ("ppo", "grpo")
NONE = ("--sampling_correction", "none")


@pytest.fixture(scope="module")
def url(runs):
    with serving(runs.model, rollout_mini_batch_size=32) as (address, _):
        yield address


def run(runs: TinyRuns, program: str, folder: Path, *more: object) -> Path:
    """The experiment dir of a run of six steps that evaluates every third one."""
    return trained(program, *runs.flags(program, folder, "--rollout_mini_batch_size", 32, "--eval_interval", 3, *more))


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_without_a_correction_a_run_is_bitwise_that_of_the_local_engine(program, runs, url, tmp_path):
    local = run(runs, program, tmp_path / "local")
    served = run(runs, program, tmp_path / "served", "--rollout_server", url, *NONE)
    assert learned(local) == learned(served)
    assert weights(last_checkpoint(local)) == weights(last_checkpoint(served))
    gaps = [row for row in metrics(served) if "sampling/kl" in row]
    assert len(gaps) == 6 and max(row["sampling/kl"] for row in gaps) < 1e-9
    assert not any(name in row for row in metrics(local) for name in SAMPLING_GAP)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_with_a_correction_weights_are_about_one_and_learning_is_the_same(program, kind, runs, url, tmp_path):
    local = run(runs, program, tmp_path / "local")
    served = run(runs, program, tmp_path / "served", "--rollout_server", url, "--sampling_correction", kind)
    for one, other in zip(learned(local), learned(served), strict=True):
        assert one == pytest.approx(other, rel=1e-3, abs=1e-4)
    gaps = [row for row in metrics(served) if "sampling/kl" in row]
    assert all(abs(row["sampling/ratio_max"] - 1) < 1e-4 and row["sampling/dropped"] == 0 for row in gaps)


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_run_that_was_cut_goes_on_bit_equal_beside_the_same_server(program, runs, url, tmp_path):
    whole = run(runs, program, tmp_path / "whole", "--rollout_server", url)
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    cut = experiment_of(tmp_path / "cut")
    for folder in checkpoints(cut)[1:]:
        shutil.rmtree(folder)
    trained(program, "--resume_from", cut)
    assert learned(cut) == learned(whole)
    assert weights(last_checkpoint(cut)) == weights(last_checkpoint(whole))


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_one_step_stale_weights_sample_while_others_are_learned(program, runs, url, tmp_path):
    stale = run(runs, program, tmp_path / "stale", "--rollout_server", url, "--max_staleness", 1)
    rows = [row for row in metrics(stale) if "sampling/staleness" in row]
    assert [row["sampling/staleness"] for row in rows] == [0, 1, 1, 1, 1, 1]
    assert rows[0]["sampling/kl"] < 1e-9 < rows[1]["sampling/kl"]
    fresh = learned(run(runs, program, tmp_path / "fresh", "--rollout_server", url))
    same = {name: value for name, value in learned(stale)[0].items() if name in fresh[0]}
    assert same == fresh[0]  # the first step has the same samples; the second has those of older weights
    assert learned(stale)[1] != fresh[1]


@pytest.mark.slow
def test_two_ranks_sample_as_one(runs, url, tmp_path):
    """The first rank asks for both; the rollout of a step is that of one rank with twice the size."""
    same = ["--rollout_server", url, "--disable_dropout", "True", "--optimizer_eps", "1e-2"]
    same += ["--termination_condition", "randomized"]  # of lengths that are drawn for the rows of all ranks
    one = run(runs, "ppo", tmp_path / "one", *same, "--rollout_size", 8, "--mini_batch_size", 8)
    more = ("--rollout_mini_batch_size", 32, "--eval_interval", 3, "--devices", 2)
    run_program("lightrlhf.ppo", *runs.flags("ppo", tmp_path / "two", *same, *more))
    two = experiment_of(tmp_path / "two")
    for row, other in zip(learned(one), learned(two), strict=True):
        assert row["step"] == other["step"]
        names = [name for name in row if name.startswith(("objective", "completions", "val/"))]
        assert {n: row[n] for n in names} == pytest.approx({n: other[n] for n in names}, rel=1e-3, abs=1e-4)


@pytest.mark.slow
def test_the_exchange_folder_keeps_two_versions_and_goes_with_the_run(runs, url, tmp_path, monkeypatch):
    seen = []
    write = served.Exchange.write

    def written(self, *args, **options):
        target = write(self, *args, **options)
        seen.append((target, sorted(path.name for path in self.folder.glob("version-*"))))
        return target

    monkeypatch.setattr(served.Exchange, "write", written)
    monkeypatch.setattr("lightrlhf.generation.exchange.MEMORY", tmp_path / "exchange")
    (tmp_path / "exchange").mkdir()
    run(runs, "grpo", tmp_path / "run", "--rollout_server", url)
    assert [versions for _, versions in seen][-1] == ["version-5", "version-6"]
    assert len({target.version for target, _ in seen}) == len(seen) == 7
    assert not list((tmp_path / "exchange").iterdir())


@pytest.mark.parametrize(
    "given, message",
    [
        (["--top_p", "0.9"], "--top_p 0.9 with --rollout_server"),
        (["--top_k", "5"], "--top_k 5 with --rollout_server"),
        (["--min_p", "0.1"], "--min_p 0.1 with --rollout_server"),
        (["--rollout_server", "nowhere"], "--rollout_server nowhere is not an address"),
        (["--rollout_server", "http://a:1", "http://a:1"], "is given twice"),
        (["--devices", "2"], f"{RANK} 900 with {REQUEST} 600"),
    ],
)
def test_flags_that_cannot_be_meant_are_one_line(given, message, runs, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv(RANK, "900")
    more = [] if "--rollout_server" in given else ["--rollout_server", "http://127.0.0.1:9"]
    with pytest.raises(SystemExit) as stopped:
        run(runs, "grpo", tmp_path, *more, *given)
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert stopped.value.code == 2 and message in error


@pytest.mark.slow
def test_a_sleeping_server_is_woken_before_it_is_asked(runs, url, tmp_path, monkeypatch):
    """Also where no weights are loaded, as for the rollout after an evaluation; and at the end."""
    told: list[str] = []
    sleep, start = RolloutServers.sleep, RolloutServers.start
    monkeypatch.setattr(
        RolloutServers, "sleep", lambda s, asleep: told.append("sleep" if asleep else "wake") or sleep(s, asleep)
    )
    monkeypatch.setattr(RolloutServers, "start", lambda *words: told.append("sample") or start(*words))
    monkeypatch.setenv("LIGHTRLHF_SERVER_SLEEP", "1")
    run(runs, "ppo", tmp_path, "--rollout_server", url)
    assert told.count("sample") == 8
    assert [one for one in told if one != "sample"] == ["sleep", "wake"] * 8
    assert all(before == "wake" for before, one in zip(told, told[1:]) if one == "sample")


def test_a_server_that_is_not_there_is_one_line_and_leaves_nothing(runs, tmp_path, capsys):
    wait_at_most(600, 0.5)
    with pytest.raises(SystemExit) as stopped:
        run(runs, "ppo", tmp_path, "--rollout_server", "http://127.0.0.1:9")
    assert stopped.value.code == 1
    said = capsys.readouterr().err
    assert said.count("waiting up to 0.5 s for --rollout_server http://127.0.0.1:9") == 1
    assert "--rollout_server http://127.0.0.1:9 did not answer within 0.5 s" in said
    assert not list(tmp_path.rglob("args.json"))


@pytest.mark.slow
def test_what_a_run_writes_has_the_flags_of_its_servers(runs, url, tmp_path):
    experiment = run(runs, "ppo", tmp_path, "--rollout_server", url)
    stored = json.loads((experiment / "args.json").read_text())
    assert stored["rollout_server"] == [url] and stored["sampling_correction"] == "token_truncate"
    assert all(math.isfinite(value) for row in metrics(experiment) for value in row.values())
    assert torch.load(last_checkpoint(experiment) / "resume.pt", weights_only=False)["step"] == 6
