"""`--dry_run` of the training programs: a step whose texts are shown as they are trained, and no file changed."""

import re
import tempfile

import pytest
import torch
from helpers import last_checkpoint, run_program, save_model
from helpers.programs import main_of
from helpers.served_runs import KEY, ForkedServer
from helpers.tiny_runs import PROGRAMS, SAMPLING, TRAINED, experiment_of
from helpers.trees import tree

from lightrlhf.data.splits import load_split
from lightrlhf.data.tokens import marked_text
from lightrlhf.training.dry_run import ENDING, in_words, spans_of


@pytest.fixture
def dry(runs, tmp_path, monkeypatch, capsys):
    """A function that does a dry run and returns what it printed, once no file differs from before."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def do(program: str, *more: object, **flags) -> str:
        before = tree(tmp_path, runs.folder, runs.cafe, runs.talk)
        main_of(program)(runs.flags(program, tmp_path / "logs", "--dry_run", "True", *more, **flags))
        assert tree(tmp_path, runs.folder, runs.cafe, runs.talk) == before
        return capsys.readouterr().out

    return do


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_dry_run_shows_its_first_batch_and_writes_nothing(program, dry):
    more = ["--eval_interval", 1] * (program in TRAINED) + ["--eval_dialogues", 2] * (program == "online_refuel")
    out = dry(program, *more)
    assert re.search(r"^(policy|reward): the first micro-batch has \d+ texts?: .* trained", out, re.MULTILINE)
    assert re.search(r"^(policy|reward), (text|chosen): (\d+) tokens, \d+ trained\n[^⟦]+⟦[^⟧]+⟧", out, re.MULTILINE)
    assert ("\nfirst sample: score" in out) == (program in SAMPLING)
    assert ("\nevaluation " in out) == (program in TRAINED) and re.search(
        r"\nsteps +[\d.]+ s, [\d.]+ s, of the last ", out
    )
    assert out.count("nothing is written in a dry run") == 1 and out.endswith(f"{ENDING}\n")


@pytest.mark.slow
@pytest.mark.parametrize("flags", [["--student_share", 0.5], ["--estimator", "top_k"], ["--estimator", "k1"]], ids=str)
def test_a_dry_run_of_distillation_tries_its_flags(flags, dry):
    """Steps on demonstrations, too, and what a teacher tells."""
    out = dry("distill", *flags, "--objective", "position")
    assert "policy: the first micro-batch has" in out and "⟦" in out and out.endswith(f"{ENDING}\n")


def test_what_is_shown_is_what_is_trained(dry, runs, tokenizer):
    """One row of a step is a row of the data; of a pair each side, of a reward model the token of the score."""
    rows = {marked(tokenizer, row, "input_ids") for row in load_split(runs.cafe, "finetune", "train")}
    one = ["--mini_batch_size", 1, "--micro_batch_size", 1]
    assert shown(dry("sft", *one), "policy, text") in rows
    assert shown(dry("sft"), "policy, text") in rows
    pairs = load_split(runs.cafe, "preference", "train")
    sides = {tuple(marked(tokenizer, row, f"{side}_input_ids") for side in ("chosen", "rejected")) for row in pairs}
    out = dry("dpo", *one)
    chosen, rejected = (shown(out, f"policy, {side}") for side in ("chosen", "rejected"))
    assert (chosen, rejected) in sides
    end = f"⟦{tokenizer.eos_token}⟧"
    out = dry("rm", *one)
    chosen, rejected = (shown(out, f"reward, {side}") for side in ("chosen", "rejected"))
    assert chosen.endswith(end) and chosen.count("⟦") == rejected.count("⟦") == 1
    assert (chosen.replace("⟦", "").replace("⟧", "")) in {one.replace("⟦", "").replace("⟧", "") for one, _ in sides}


def marked(tokenizer, row: dict, name: str) -> str:
    ids = torch.as_tensor(row[name]).tolist()
    return marked_text(tokenizer, ids, [(row["prompt_len"], len(ids))])


def shown(out: str, title: str) -> str:
    """The text below a line with this title, to the next title or the table."""
    found = re.search(rf"^{title}: .*\n((?:.|\n)*?)(?=\n\n|\npolicy,|\nreward,)", out, re.MULTILINE)
    assert found, title
    return found[1]


def test_the_trained_tokens_of_a_mean_of_scores_are_those_from_where_the_texts_part(dry):
    out = dry("rm", "--loss_type", "average", "--mini_batch_size", 1, "--micro_batch_size", 1)
    chosen, rejected = (shown(out, f"reward, {side}") for side in ("chosen", "rejected"))
    assert chosen.partition("⟦")[0] == rejected.partition("⟦")[0] and chosen.endswith("⟧")
    assert len(chosen.partition("⟦")[2]) > 10


def test_a_sample_is_shown_though_none_is_kept_and_responses_of_equal_scores_are_named(dry):
    assert "\nfirst sample: score" in dry("ppo", "--log_rollouts", 0)
    flags = ["--reward_function", "helpers.rewards:constant", "--resample_rounds", 0, "--init_kl_coeff", 0]
    assert "policy: the first step has nothing to learn from" in dry("grpo", *flags)


def test_only_rows_that_are_read_are_scored_before_the_first_step(dry):
    few = ["--mini_batch_size", 2, "--micro_batch_size", 2]
    for program, what, total in (("dpo", "reference", 60), ("refuel", "old log-probabilities", 12)):
        found = re.search(rf"{what} [\d.]+ s for (\d+) of {total} rows; all of them about", dry(program, *few))
        assert found and int(found[1]) < total


@pytest.mark.parametrize("flags", [[], ["--finetune_mode", "lora"]], ids=str)
def test_the_size_of_a_checkpoint_is_that_of_its_weights_and_its_state(flags, dry, runs, tokenizer, tmp_path):
    folder = save_model("llama", tmp_path / "wide", tokenizer, hidden_size=128, intermediate_size=512)
    tokenizer.save_pretrained(folder)
    wide = ["--model_name", folder, "--max_steps", 1, *flags]
    found = re.search(r"checkpoint about ([\d.]+) MiB", dry("sft", *wide))
    main_of("sft")(runs.flags("sft", tmp_path / "logs", *wide))
    folder = last_checkpoint(experiment_of(tmp_path / "logs"))
    size = sum(path.stat().st_size for path in folder.iterdir() if path.suffix in (".safetensors", ".pt"))
    assert float(found[1]) == pytest.approx(size / 2**20, rel=0.1, abs=0.1)


@pytest.mark.slow
def test_two_ranks_print_once(runs, tmp_path):
    done = run_program("lightrlhf.sft", *runs.flags("sft", tmp_path / "logs", "--dry_run", "True", "--devices", 2))
    assert done.returncode == 0 and done.stdout.count(ENDING) == 1, done.stderr
    assert "2 ranks" in done.stdout and not list(tmp_path.iterdir())


def test_wrong_combinations_are_refused(dry, runs, sft_dir, capsys):
    for program, flags, message in (
        ("sft", ["--resume_from", sft_dir], "--dry_run True"),
        ("iterative_refuel", ["--stage", "rank"], "--stage rank"),
        ("sft", ["--output_dir", runs.model], "is not empty"),
        ("online_dpo", ["--output_dir", runs.model], "is not empty"),
        ("sft", ["--log_dir", runs.model / "config.json"], "is not a folder"),
    ):
        with pytest.raises(SystemExit) as stopped:
            dry(program, *flags)
        error = capsys.readouterr().err.strip()
        assert stopped.value.code == 2 and message in error.splitlines()[-1]


@pytest.mark.slow
def test_servers_sample_and_no_weights_are_left(dry, runs, tmp_path_factory, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    exchange = tmp_path_factory.mktemp("exchange")
    server = ForkedServer(runs.model, tmp_path_factory.mktemp("server") / "one")
    monkeypatch.setattr("lightrlhf.generation.exchange.MEMORY", exchange)
    flags = ["--rollout_server", server.url, "--rollout_mini_batch_size", 32]
    try:
        assert "\nfirst sample: score" in dry("grpo", *flags, "--finetune_mode", "lora")
        assert len({note["version"] for note in server.answered()}) == 2 and not list(exchange.iterdir())
    finally:
        server.kill()


def test_spans_and_times():
    assert spans_of([0, 1, 1, 0, 1]) == [(1, 3), (4, 5)] and spans_of([]) == [] and spans_of([True]) == [(0, 1)]
    assert [in_words(s) for s in (3, 119, 120, 7200, 172800)] == [
        "about 3.0 s",
        "about 119.0 s",
        "about 2.0 minutes",
        "about 2.0 hours",
        "about 2.0 days",
    ]
