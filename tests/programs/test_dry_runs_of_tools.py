"""`--dry_run` of the tools: one batch is done and printed, and no file is changed."""

import importlib
import json
import tempfile
from pathlib import Path

import pytest
from helpers.corridor import save_corridor_model
from helpers.trees import tree

from lightrlhf.storage.jsonl import write_jsonl

CPU = ["--accelerator", "cpu"]
RESPONSES = [" Sure: a tea.", " No.", " Certainly, one small tea coming up.", " Tea tea tea."]
VOWELS = ["--reward_function", "helpers.rewards:vowels"]


@pytest.fixture
def do(tmp_path, sft_dir, rm_dir, cafe_data, talk_data, monkeypatch, capsys):
    """A function that does a dry run and returns what it printed, once no file differs from before."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def call(program: str, *flags: object, dry: bool = True) -> str:
        folders = [tmp_path, *map(Path, (sft_dir, rm_dir, cafe_data, talk_data))]
        before = tree(*folders)
        capsys.readouterr()
        words = [*map(str, flags), *(["--dry_run"] if dry else [])]
        importlib.import_module(program).main(words)
        assert (tree(*folders) == before) == dry
        return capsys.readouterr().out

    return call


@pytest.fixture
def files(tmp_path) -> list[Path]:
    """Two files of responses to forty prompts."""
    rows = [{"prompt": f"Guest: a tea, {n}!\n", "responses": RESPONSES} for n in range(40)]
    write_jsonl(tmp_path / "one.jsonl", rows)
    write_jsonl(tmp_path / "two.jsonl", [{**row, "responses": RESPONSES[::-1]} for row in rows])
    return [tmp_path / "one.jsonl", tmp_path / "two.jsonl"]


def test_generate_answers_as_many_prompts_as_the_engine_has_slots(do, tmp_path, cafe_data, sft_dir, rm_dir):
    small = ["--data_dir", cafe_data, "--split", "train", "--model_name", sft_dir, "--max_new_tokens", 6, *CPU]
    few = [*small, "--num_generations", 2, "--rollout_mini_batch_size", 8, "--output_file", tmp_path / "rows.jsonl"]
    out = do("lightrlhf.generate", *few, "--rm_experiment_dir", rm_dir)
    assert "the first 4 of 40 prompts took" in out and f"leave --dry_run out to write {tmp_path / 'rows.jsonl'}" in out
    shown = dict(line.split(": ", 1) for line in out.splitlines() if line.startswith(("responses ", "rewards ")))
    do("lightrlhf.generate", *few, "--rm_experiment_dir", rm_dir, dry=False)
    first = json.loads((tmp_path / "rows.jsonl").read_text().splitlines()[0])
    assert [shown[f"responses {n}"] for n in (1, 2)] == first["responses"]
    assert [float(shown[f"rewards {n}"]) for n in (1, 2)] == pytest.approx(first["rewards"], abs=1e-4)
    out = do("lightrlhf.generate", *small, "--temperatures", "0.5", "1.0", "--num_prompts", 5)
    assert "the first 5 of 5 prompts" in out and "temperature=0.5" in out


@pytest.mark.slow
def test_annotate_scores_a_batch_and_shows_the_pair(do, files, tmp_path, cafe_data):
    pairs = ["--choose_type", "max_min", "--output_dir", tmp_path / "pairs", "--data_dir", cafe_data]
    out = do("lightrlhf.annotate", "--responses_file", files[0], *VOWELS, *CPU, "--rollout_mini_batch_size", 16, *pairs)
    assert "chosen: Guest: a tea, 0!\n⟦ Certainly, one small tea coming up." in out and "rejected: " in out
    assert "the first 4 of 40 prompts" in out and "4 pairs" in out and "rewards 4: " in out
    assert "rewards 1: " in do("lightrlhf.annotate", "--responses_file", files[0], *VOWELS, *CPU)


@pytest.mark.slow
def test_judge_compares_a_batch(do, files, capsys):
    both = ["--responses_file", *files, "--judge", "helpers.rewards:vowels"]
    out = do("lightrlhf.judge", *both, "--rollout_mini_batch_size", 3)
    assert "the first 3 of 40 pairs" in out and "verdict: " in out and "one-vs-two" in out
    for flags in (["--judge", "human"], ["--sample", 3]):
        with pytest.raises(SystemExit):
            do("lightrlhf.judge", "--responses_file", *files, *flags)
        told = capsys.readouterr().err
        assert "--dry_run True" in told and " ".join(map(str, flags)) in told


def test_evaluate_takes_a_batch_and_shows_a_record(do, files, cafe_data, sft_dir, rm_dir, capsys):
    small = ["--rollout_mini_batch_size", 4, *CPU]
    models = ["--experiment_dir", sft_dir, rm_dir, "--data_dir", cafe_data, "--max_new_tokens", 6, *small]
    out = do("lightrlhf.evaluate", *models)
    assert out.count("first record of ") == 2 and "of 4 rows at most; nothing was written" in out
    assert "first record of one:" in do("lightrlhf.evaluate", "--responses_file", files[0], *VOWELS, *small)
    with pytest.raises(SystemExit):
        do("lightrlhf.evaluate", *models, "--harness", "lm_eval")
    told = capsys.readouterr().err
    assert "--dry_run True" in told and "--harness lm_eval" in told


@pytest.mark.slow
def test_evaluate_dialogues_and_environments(do, talk_data, sft_dir, tmp_path):
    guest = ["--user_function", "datasets_prep.cafe_talk.guest:guest", "--num_turns", 2, "--max_new_tokens", 4, *CPU]
    flags = ["--experiment_dir", sft_dir, "--data_dir", talk_data, *guest, "--rollout_mini_batch_size", 2]
    out = do("lightrlhf.evaluate_dialogues", *flags)
    assert "first record of " in out and "of 2 openings; nothing was written" in out
    model = save_corridor_model(tmp_path / "corridor", 5)
    out = do("lightrlhf.evaluate_env", "--env", "helpers.corridor:Corridor", "--model_name", model, *CPU)
    assert "story: " in out and "at most 1 of each level" in " ".join(out.split()) and "nothing was written" in out


@pytest.mark.slow
def test_prepared_data_of_an_environment_is_shown_and_its_walks_are_not_kept(do, tmp_path):
    flags = ["--env", "helpers.corridor:Corridor", "--destination_dir", tmp_path / "out", "--num_proc", 1]
    out = do("datasets_prep.text_envs.prepare_data", *flags)
    assert out.count("nothing was written; leave --dry_run out") == 5 and "--- finetune 1" in out
