"""Figures measured on this machine, kept in a file, used from then on."""

import json

import pytest
import torch

from recompile import calibration, hardware
from recompile.calibration import best_seconds, calibrate, copy_rate, stored_path
from recompile.hardware import Hardware, cpu_hardware, detect, resolve

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small(tmp_path, monkeypatch):
    """A cache of its own, and sizes that take milliseconds."""
    monkeypatch.setenv(calibration.FOLDER_VARIABLE, str(tmp_path / "hardware"))
    monkeypatch.setattr(calibration, "COPY_BYTES", {"cpu": 2**16})
    monkeypatch.setattr(calibration, "MATMUL_SIZE", {"cpu": 32})


def test_a_calibrated_cpu_is_what_is_detected_from_then_on_and_nominal_again_without_the_file():
    assert detect() == detect("cpu") == resolve(None, CPU) == resolve("cpu", CPU) == cpu_hardware()
    measured = calibrate("cpu")
    assert detect("cpu") == resolve(None, CPU) == resolve("cpu", CPU) == measured != cpu_hardware()
    stored_path(CPU).unlink()
    assert detect("cpu") == cpu_hardware()


def test_what_is_measured_is_said_and_the_rest_is_nominal():
    measured, nominal = hardware.calibrate("cpu"), cpu_hardware()
    assert measured.source.startswith("matmul rates and copy bandwidth measured on 20")
    assert measured.source.endswith(nominal.source)
    assert dict(measured.flop_per_s).keys() == dict(nominal.flop_per_s).keys()
    assert (measured.launch_s, measured.memory_bytes) == (nominal.launch_s, nominal.memory_bytes)


def test_a_path_of_ones_own_is_a_file_for_the_option_hardware(tmp_path):
    measured = calibrate("cpu", tmp_path / "new" / "mine.json")
    assert Hardware.from_json(json.loads((tmp_path / "new" / "mine.json").read_text())) == measured
    assert resolve(str(tmp_path / "new" / "mine.json"), CPU) == measured
    assert detect("cpu") == cpu_hardware()


def test_the_best_run_counts_and_the_first_one_does_not():
    seconds = iter([3.0, *[5.0] * 8, 2.0])
    calls = []
    assert best_seconds(lambda: calls.append(1), lambda run: run() or next(seconds)) == 2.0
    assert len(calls) == 1 + calibration.NUM_RUNS


def test_a_copy_reads_and_writes():
    assert copy_rate(CPU, lambda run: 0.5) == 2 * 2**16 / 0.5


def test_a_damaged_calibration_is_refused_by_name():
    calibrate("cpu")
    stored_path(CPU).write_text("{}")
    with pytest.raises(ValueError, match=r"threads\.json': missing field"):
        detect("cpu")


def test_a_device_that_is_not_there_is_refused():
    if torch.cuda.is_available():
        pytest.skip("this machine has one")
    for function in (detect, calibrate):
        with pytest.raises(ValueError, match="no CUDA device is available"):
            function("cuda")
