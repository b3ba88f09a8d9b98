import json
import pickle
from types import SimpleNamespace

import pytest
import torch

from recompile import hardware
from recompile.hardware import Hardware, cpu_hardware, hardware_from_properties, named_hardware, resolve

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
VALUES = {
    "name": "mine",
    "flop_per_s": {"float32": 2e12, "bfloat16": 8e12},
    "vector_flop_per_s": 1e12,
    "byte_per_s": 1e11,
    "host_byte_per_s": 1e10,
    "memory_bytes": 16e9,
    "launch_s": 1e-6,
    "source": "a label on the lid",
}


# The value


def test_the_mapping_of_rates_is_kept_as_sorted_pairs_so_that_the_value_hashes_and_pickles():
    value = Hardware(**VALUES)
    assert value.flop_per_s == (("bfloat16", 8e12), ("float32", 2e12))
    assert (value.memory_bytes, type(value.memory_bytes)) == (16_000_000_000, int)
    assert {value, pickle.loads(pickle.dumps(value))} == {value}


def test_a_dtype_without_a_rate_of_its_own_runs_at_that_of_float32():
    value = named_hardware()["h100"]
    dtypes = (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float32, torch.int8)
    assert [value.matmul_flop_per_s(dtype) / 1e12 for dtype in dtypes] == [989.5, 1979, 1979, 67, 67]
    assert Hardware(**VALUES).matmul_flop_per_s(torch.float8_e4m3fn) == 2e12


def test_json_gives_back_the_same_value():
    for value in named_hardware().values():
        assert Hardware.from_json(json.loads(json.dumps(value.to_json()))) == value


def test_the_fingerprint_follows_the_numbers_and_not_the_order_or_the_source():
    turned = VALUES | {"flop_per_s": {"bfloat16": 8e12, "float32": 2e12}, "source": "another"}
    assert Hardware(**turned).fingerprint() == Hardware(**VALUES).fingerprint()
    assert Hardware(**VALUES | {"launch_s": 2e-6}).fingerprint() != Hardware(**VALUES).fingerprint()


def test_spills_count_unless_said_otherwise_and_plans_of_either_kind_are_kept_apart():
    assert Hardware.from_json(VALUES).counts_spills and Hardware.from_json(VALUES) == Hardware(**VALUES)
    without = Hardware.from_json(VALUES | {"counts_spills": False})
    assert (without.to_json()["counts_spills"], without == Hardware(**VALUES)) == (False, False)
    assert without.fingerprint() != Hardware(**VALUES).fingerprint()
    with pytest.raises(ValueError, match="field 'counts_spills' must be true or false, not 1"):
        Hardware(**VALUES | {"counts_spills": 1})


def test_memory_is_what_is_allocated_unless_inductors_estimate_is_asked_for():
    estimate = Hardware.from_json(VALUES | {"counts_fused": True})
    assert (Hardware.from_json(VALUES).counts_fused, estimate.counts_fused) == (False, True)
    assert estimate.fingerprint() != Hardware(**VALUES).fingerprint()
    with pytest.raises(ValueError, match="field 'counts_fused' must be true or false, not 'no'"):
        Hardware(**VALUES | {"counts_fused": "no"})


# Named devices


def test_the_named_devices_are_these():
    assert " ".join(named_hardware()) == (
        "a100-40 a100-80 a100-80-pcie h100 h100-pcie h200 b200 mi300x l4 l40s rtx4090 rtx5090 planner-h100"
    )


def test_every_device_name_that_is_recognised_leads_to_a_named_value():
    assert set(hardware.NAME_OF_DEVICE.values()) == set(named_hardware()) - {"planner-h100"}


@pytest.mark.parametrize("name", [name for name in named_hardware() if name != "planner-h100"])
def test_the_figures_of_a_named_device_are_dense_consistent_and_sourced(name):
    value = named_hardware()[name]
    rates = dict(value.flop_per_s)
    assert rates["float64"] <= rates["float32"] <= rates["tfloat32"] < rates["bfloat16"] == rates["float16"]
    assert rates.get("float8", 2 * rates["float16"]) == pytest.approx(2 * rates["float16"], rel=0.02)
    assert 90 < rates["bfloat16"] / value.byte_per_s < 450  # FLOP per byte; with sparsity it would be double
    assert "TFLOPS" in value.source and "GB" in value.source and "PCIe" in value.source and "Launch" in value.source


# Resolving the option


def test_a_name_a_value_and_a_dict_resolve_on_any_device():
    value = Hardware(**VALUES)
    assert resolve("H100", CPU) is named_hardware()["h100"]
    assert resolve(value, CUDA) is value
    assert resolve(VALUES, CPU) == value
    assert resolve("cpu", CUDA) == cpu_hardware()


@pytest.mark.parametrize("as_path", [str, lambda path: path])
def test_a_json_file_resolves_by_text_or_path(tmp_path, as_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(VALUES))
    assert resolve(as_path(path), CPU) == Hardware(**VALUES)


@pytest.mark.parametrize("value", ["h1000", "", 7, ["h100"], torch.device("cpu")])
def test_anything_else_is_refused_with_the_option_the_value_and_what_is_accepted(value):
    with pytest.raises(ValueError) as refusal:
        resolve(value, CPU)
    assert str(refusal.value) == (
        f"option 'hardware': {value!r} is not known; accepted: one of a100-40, a100-80, a100-80-pcie, h100, h100-pcie, "
        "h200, b200, mi300x, l4, l40s, rtx4090, rtx5090, planner-h100, cpu; the path of a JSON file; a dict of its "
        "fields; a Hardware; or None to detect"
    )


WITHOUT_SPEED = {name: value for name, value in VALUES.items() if name != "byte_per_s"}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (
            json.dumps(WITHOUT_SPEED),
            "missing field 'byte_per_s'; it has name, flop_per_s, vector_flop_per_s, byte_per_s",
        ),
        (json.dumps(VALUES | {"bandwidth": 1}), "unknown field 'bandwidth'; it has name, flop_per_s"),
        (json.dumps(VALUES | {"byte_per_s": "3e12"}), "field 'byte_per_s' must be a positive number, not '3e12'"),
        (json.dumps(VALUES | {"byte_per_s": True}), "field 'byte_per_s' must be a positive number, not True"),
        (json.dumps(VALUES | {"byte_per_s": 0}), "field 'byte_per_s' must be a positive number, not 0"),
        (json.dumps(VALUES | {"memory_bytes": 0.5}), "field 'memory_bytes' must be a positive whole number, not 0.5"),
        (json.dumps(VALUES | {"launch_s": -1}), "field 'launch_s' must be a number of seconds, 0 or more, not -1"),
        (json.dumps(VALUES | {"name": ""}), "field 'name' must be a name, not ''"),
        (json.dumps(VALUES | {"flop_per_s": {"bfloat16": 1}}), "field 'flop_per_s' must be a mapping of dtype names, "),
        (
            json.dumps(VALUES | {"flop_per_s": 1e12}),
            "field 'flop_per_s' must be a mapping of dtype names, float32 among",
        ),
        ("[1]", "must be one object with the fields name, flop_per_s"),
    ],
)
def test_a_wrong_file_is_refused_with_its_name_and_the_field(tmp_path, text, complaint):
    path = tmp_path / "wrong.json"
    path.write_text(text)
    with pytest.raises(ValueError) as refusal:
        resolve(path, CPU)
    assert str(refusal.value).startswith(f"option 'hardware': '{path}': {complaint}")


def test_a_file_that_is_no_json_or_not_there_is_refused_with_its_name(tmp_path):
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(ValueError, match=r"option 'hardware': '.*broken\.json' is not JSON: Expecting"):
        resolve(tmp_path / "broken.json", CPU)
    with pytest.raises(ValueError, match=r"option 'hardware': cannot read '.*none\.json': No such file"):
        resolve(str(tmp_path / "none.json"), CPU)


def test_a_wrong_dict_is_refused_in_the_name_of_the_option():
    with pytest.raises(ValueError, match="option 'hardware': missing field 'byte_per_s'"):
        resolve(WITHOUT_SPEED, CPU)


# Detection


def pretend(monkeypatch, **properties):
    """Have torch.cuda report one device with these properties."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**properties))


@pytest.mark.parametrize(
    ("device_name", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA GeForce RTX 5090", "rtx5090"),
    ],
)
def test_a_known_gpu_is_detected_by_its_name(monkeypatch, device_name, name):
    pretend(monkeypatch, name=device_name)
    assert resolve(None, CUDA) is named_hardware()[name]


UNNAMED = {
    "multi_processor_count": 132,
    "clock_rate": 1_830_000,
    "memory_clock_rate": 2_619_000,
    "memory_bus_width": 5120,
    "total_memory": 85 * 10**9,
    "major": 9,
    "minor": 0,
}


def test_an_unknown_gpu_is_derived_from_its_properties_and_says_so(monkeypatch):
    pretend(monkeypatch, name="NVIDIA H100 of a new kind", **UNNAMED)
    derived, h100 = resolve(None, CUDA), named_hardware()["h100"]
    assert (derived.name, derived.memory_bytes) == ("NVIDIA H100 of a new kind", 85 * 10**9)
    assert derived.source.startswith("Nominal, from the driver's properties: 132 multiprocessors at 1.83 GHz")
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn):
        assert derived.matmul_flop_per_s(dtype) == pytest.approx(h100.matmul_flop_per_s(dtype), rel=0.1)
    assert derived.byte_per_s == pytest.approx(h100.byte_per_s, rel=0.01)


@pytest.mark.parametrize(
    ("capability", "dtypes"),
    [
        ((7, 0), "float16 float32 float64"),
        ((8, 7), "bfloat16 float16 float32 float64 tfloat32"),
        ((11, 0), "bfloat16 float16 float32 float64 float8 tfloat32"),
        ((6, 1), "float16 float32 float64"),
    ],
)
def test_a_capability_without_an_entry_takes_the_next_older_one(capability, dtypes):
    major, minor = capability
    derived = hardware_from_properties(SimpleNamespace(name="x", **UNNAMED | {"major": major, "minor": minor}))
    assert " ".join(dtype for dtype, _ in derived.flop_per_s) == dtypes


def test_an_unknown_amd_gpu_is_not_taken_for_an_nvidia_one_of_the_same_number():
    derived = hardware_from_properties(SimpleNamespace(name="x", **UNNAMED), is_hip=True)
    assert derived.matmul_flop_per_s(torch.bfloat16) == 132 * 1.83e9 * 1024
    assert "AMD CDNA2" in derived.source


@pytest.mark.parametrize(
    ("device", "reason"),
    [("cuda", "no CUDA device is available"), ("meta", "only cpu and cuda can be detected")],
)
def test_what_cannot_be_detected_is_refused_with_what_is_accepted(monkeypatch, device, reason):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        ValueError, match=f"option 'hardware': None, but '{device}' says nothing: {reason}; accepted: one"
    ):
        resolve(None, torch.device(device))


def test_the_cpu_is_the_same_at_every_call_and_says_that_it_is_nominal():
    assert resolve(None, CPU) == cpu_hardware()
    assert cpu_hardware().source.startswith("Nominal, not measured: ")


@pytest.mark.parametrize(
    ("capability", "threads", "float32", "byte_per_s"),
    [("AVX512", 2, 112e9, 16e9), ("AVX2", 8, 224e9, 64e9), ("DEFAULT", 64, 896e9, 100e9)],
)
def test_the_cpu_follows_threads_and_vector_width(monkeypatch, capability, threads, float32, byte_per_s):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    value = cpu_hardware()
    assert value.matmul_flop_per_s(torch.float32) == pytest.approx(float32)
    assert (value.vector_flop_per_s, value.byte_per_s) == (pytest.approx(float32 / 2), byte_per_s)
