"""The log of metrics."""

import pytest
from helpers import metrics


@pytest.mark.parametrize("logger", ["tensorboard", "csv"])
def test_metrics_go_to_the_file_and_to_the_logger(run, logger):
    one = run(logger=logger)
    one.progress.step = 3
    one.metric_log.log({"train/loss": 1.5})
    one.finish()
    assert metrics(one.files.directory) == [{"step": 3, "train/loss": 1.5}]
    assert any(path.stat().st_size for path in (one.files.directory / "logs").iterdir())
