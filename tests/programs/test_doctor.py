"""The doctor: what it says of packages, of the machine, and of models that fit."""

import pytest
import torch
from helpers.errors import error_naming

from lightrlhf import doctor
from lightrlhf.cli.errors import RunFailure
from lightrlhf.training import roofline


def test_it_reports_the_machine_and_the_models_that_fit(capsys):
    report = doctor.run(doctor.DoctorArgs(seconds=0))
    shown = capsys.readouterr().out
    assert all(name in report["machine"] and name in shown for name in ("Python", "processor", "memory", "torch"))
    sizes = report["fits"]["CPU"]
    assert sizes["all weights, AdamW"] == pytest.approx(0.7 * doctor.total_memory() / 16)
    assert "Speed" not in shown


@pytest.mark.slow
def test_a_speed_is_measured_for_training_and_sampling(monkeypatch):
    monkeypatch.setattr(roofline, "MATRIX_SIZES", ((64, 64, 64),))  # larger ones take seconds without AVX-512
    report = doctor.speed(0.02)
    assert [name for name in report if name.startswith("tiny model")] == list(doctor.tiny_work("cpu"))


@pytest.mark.parametrize(("rate", "measured"), [(1e6, 1), (1e9, 2), (1e13, 4)])
def test_products_that_would_take_seconds_are_left_out(rate, measured, monkeypatch):
    made = []

    def time_of(work, device, repetitions):
        one, other = work.args
        made.append(2 * one.numel() * other.shape[1])
        assert (repetitions > 50) == (len(made) == 1)  # of the first, which may wait for other work
        return made[-1] / rate

    monkeypatch.setattr(roofline, "best_time", time_of)
    assert roofline.best_product_rate(torch.device("cpu"), torch.float32) == pytest.approx(rate)
    assert len(made) == measured and made == sorted(made)


def test_a_rate_has_the_prefix_of_its_unit():
    assert [doctor.with_prefix(rate) for rate in (50.0, 45.6e6, 1.458e12)] == ["50 ", "45.6 M", "1.458 T"]


@pytest.mark.parametrize(
    ("installed", "state", "works"), [("2.0", "2.0", True), (None, "missing", False), ("1.0", "1.0, not >=1.5", False)]
)
def test_packages_are_there_missing_or_of_another_version(installed, state, works, monkeypatch):
    from packaging.requirements import Requirement

    def version(name: str) -> str:
        if installed is None:
            raise doctor.PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(doctor, "version", version)
    assert doctor.state_of(Requirement("some-package>=1.5")) == state and doctor.works(state) is works


def test_a_missing_required_package_is_a_failure_and_a_missing_extra_is_not(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "requires", lambda name: ["torch>=2.0", 'no-such-demo>=1; extra == "demo"'])
    report = doctor.run(doctor.DoctorArgs(seconds=0))
    assert report["extras"] == {"demo": "needs no-such-demo"}
    monkeypatch.setattr(doctor, "requires", lambda name: ["no-such-core>=1"])
    with error_naming(RunFailure, "no-such-core"):
        doctor.run(doctor.DoctorArgs(seconds=0))
