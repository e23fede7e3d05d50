"""What TensorBoard and W&B get of a run: curves, texts and arguments, read back from their own files."""

import shutil
import socket
import threading
from pathlib import Path

import pytest
from helpers import metrics
from helpers.errors import error_naming
from helpers.programs import main_of

from lightrlhf import sft
from lightrlhf.cli.groups import TrainArgs
from lightrlhf.storage.jsonl import read_jsonl
from lightrlhf.training.loggers import LONGEST_TEXT, SHOWN_TEXTS, TensorBoardLogger, WandbLogger, flat
from lightrlhf.training.run import Run


def events(folder: Path):
    """The event files of a folder as TensorBoard reads them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder / "logs"), size_guidance={"tensors": 0, "scalars": 0}).Reload()


def texts(read, name: str) -> dict[int, str]:
    """Texts of a tag by step."""
    return {one.step: one.tensor_proto.string_val[0].decode() for one in read.Tensors(f"{name}/text_summary")}


def arguments(read) -> dict:
    """Hyper-parameters as TensorBoard's plugin reads them."""
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    content = read.PluginTagToContent("hparams")["_hparams_/session_start_info"]
    values = HParamsPluginData.FromString(content).session_start_info.hparams
    return {name: getattr(value, value.WhichOneof("kind")) for name, value in values.items()}


def test_tensorboard_has_curves_texts_and_arguments_and_drops_repeated_steps(runs, tmp_path):
    more = ["--logger", "tensorboard", "--eval_interval", 2, "--log_rollouts", 3]
    folder = Path(sft.main(runs.flags("sft", tmp_path, *more, steps=4)))
    shutil.rmtree(folder / "checkpoint-000004")
    first = [path.name for path in (folder / "logs").iterdir()]
    sft.main(["--resume_from", str(folder)])
    read = events(folder)
    assert len(list((folder / "logs").iterdir())) == len(first) + 1  # a file more, and no folder
    assert [one.step for one in read.Scalars("train/loss")] == [1, 2, 3, 4]
    assert [one.step for one in read.Scalars("val/loss")] == [2, 4]
    losses = [row["train/loss"] for row in metrics(folder) if "train/loss" in row]
    assert [one.value for one in read.Scalars("train/loss")] == pytest.approx(losses)
    rows = read_jsonl(folder / "samples.jsonl")
    for number in range(3):
        shown = texts(read, f"samples/{number}")
        assert shown.keys() == {2, 4}
        for row in rows:
            if row["group"] == number:
                assert row["prompt"].splitlines()[0] in shown[row["step"]]
                assert row["response"].splitlines()[-1] in shown[row["step"]]
    found = arguments(read)
    assert found["learning_rate"] == 0.01 and found["eval_interval"] == 2 and found["program"] == "sft"
    assert found["use_targets"] == "True" and found["data_weights"] == "[]" and found["versions/torch"]
    assert "_hparams_/session_end_info" in read.PluginTagToContent("hparams")
    assert "_hparams_/experiment" not in read.PluginTagToContent("hparams")  # it would hide the other runs' metrics


def test_the_samples_of_training_are_texts_too(runs, tmp_path):
    flags = runs.flags("grpo", tmp_path, "--logger", "tensorboard", steps=2)
    read = events(Path(main_of("grpo")(flags)))
    shown = texts(read, "rollouts/0")
    assert shown.keys() == {1, 2} and "**prompt**" in shown[1] and "**response, score " in shown[1]
    assert sum("rollouts/" in tag for tag in read.Tags()["tensors"]) == SHOWN_TEXTS


def test_long_texts_are_shortened_and_shown_as_they_are(tmp_path):
    logger = TensorBoardLogger(tmp_path, {}, step=0)
    row = {"prompt": "# no\nheadline", "response": "x" * (LONGEST_TEXT + 7), "score": 0.5}
    logger.log_texts("samples", [row] * (SHOWN_TEXTS + 1), 3)
    logger.close()
    read = events(tmp_path)
    assert len(read.Tags()["tensors"]) == SHOWN_TEXTS
    shown = texts(read, "samples/0")[3]
    assert "    # no\n    headline\n" in shown and "**response, score 0.5**" in shown
    assert shown.endswith("x [7 more characters]") and len(shown) < LONGEST_TEXT + 200


def test_nested_arguments_are_flat_and_of_kinds_that_a_table_has():
    described = {"a": 1, "b": None, "c": [1, "x"], "versions": {"torch": "2"}, "d": True, "e": 0.5}
    assert flat(described) == {"a": 1, "b": "None", "c": "[1, 'x']", "versions/torch": "2", "d": "True", "e": 0.5}


# ------------------------------------------------------------------------------------------------------------- W&B
@pytest.fixture
def offline(tmp_path, monkeypatch):
    """W&B without a network: every address is that of a proxy that counts its callers."""
    wandb = pytest.importorskip("wandb", reason="needs pip install -e '.[wandb]'")
    called = []
    proxy = socket.create_server(("127.0.0.1", 0))

    def listen() -> None:
        while True:
            try:
                connection, _ = proxy.accept()
            except OSError:
                return
            called.append(connection.recv(200))
            connection.close()

    threading.Thread(target=listen, daemon=True).start()
    address = f"http://127.0.0.1:{proxy.getsockname()[1]}"
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, address)
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("CONFIG", "CACHE", "DATA"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path / "home"))
    yield called
    wandb.teardown()
    proxy.shutdown(socket.SHUT_RDWR)
    proxy.close()


@pytest.mark.slow
def test_wandb_gets_config_curves_and_texts_without_a_network(offline, tmp_path):
    import wandb
    from helpers.wandb_files import read_run

    args = TrainArgs(log_dir=str(tmp_path), accelerator="cpu", logger="wandb", wandb_project="coffee", seed=7)
    run = Run(args, "test")
    loop = run.steps(9)
    next(loop)
    run.progress.step = 3
    run.metric_log.log({"train/loss": 1.5})
    rows = [{"prompt": f"a <cup> {i}", "response": "no ☕", "score": 0.5} for i in range(SHOWN_TEXTS + 1)]
    run.metric_log.log_texts("samples", rows, 3)
    run.finish()
    loop.close()
    again = WandbLogger("coffee", run.files.directory, {})  # as a resumed run
    again.log_metrics({"train/loss": 1.25}, 4)
    again.close()
    wandb.teardown()  # until then its files may be cut
    folder, resumed = sorted((run.files.directory / "wandb").glob("offline-run-*"))
    found = read_run(folder)
    assert found["project"] == "coffee" and found["name"] == run.files.directory.name
    assert found["config"]["seed"] == 7 and found["config"]["program"] == "test"
    assert found["config"]["versions"]["torch"] and "git_commit" in found["config"]
    assert found["rows"][0]["train/loss"] == 1.5 and found["rows"][0]["step"] == 3
    page = found["rows"][1]
    assert page["samples/_type"] == "html-file" and page["step"] == 3
    shown = (folder / "files" / page["samples/path"]).read_text(encoding="utf-8")
    assert (
        all(f">a &lt;cup&gt; {i}</pre>" in shown for i in range(SHOWN_TEXTS)) and f"cup&gt; {SHOWN_TEXTS}" not in shown
    )
    assert "<b>response, score 0.5</b>" in shown and ">no ☕</pre>" in shown
    later = read_run(resumed)
    assert later["id"] == found["id"] and later["rows"][0]["train/loss"] == 1.25
    assert not offline


def test_a_project_without_wandb_is_refused():
    with error_naming(ValueError, "--wandb_project coffee", "--logger wandb", "tensorboard"):
        TrainArgs(wandb_project="coffee")
