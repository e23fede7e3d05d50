"""A task of verifiers, unchanged, over a session of `lightrlhf.serve`."""

import json
import subprocess
from pathlib import Path

import pytest
from helpers import save_model
from helpers.real_harness import environment_of, offline
from helpers.serving import serving

pytestmark = pytest.mark.slow


def test_a_task_of_verifiers_is_recorded_token_by_token(tmp_path, tokenizer):
    folder = save_model("llama", tmp_path / "model", tokenizer, max_position_embeddings=512)
    tokenizer.save_pretrained(folder)
    programs = environment_of("verifiers")
    with serving(folder) as (url, server):
        session = server.ask("/sessions", {"max_tokens": 8, "seed": 1}).json()
        command = [programs / "python", Path(__file__).parents[1] / "helpers/verifiers_rollout.py"]
        home = {"HOME": str(tmp_path), "SESSION_KEY": session["key"]}
        done = subprocess.run(
            [*command, url + session["base_url"]],
            capture_output=True,
            text=True,
            env={**offline("verifiers", tmp_path), **home},
        )
        trace = server.ask(f"/sessions/{session['id']}/trace").json()
    assert done.returncode == 0, done.stderr[-3000:]
    rollout = json.loads(done.stdout.splitlines()[-1])
    (turn,), (row,) = trace["turns"], trace["rows"]
    assert rollout["error"] is None and rollout["reply"] == turn["reply"]["content"]
    assert rollout["reward"] == float("e" in turn["reply"]["content"])
    assert sum(row["mask"]) == turn["end"] - turn["start"] > 0
    assert turn["request"]["messages"] == [{"role": "user", "content": "Guess a letter."}]
