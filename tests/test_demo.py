"""The demo's parts that need no training: text, batches, the budget in bytes, table, picture, conclusions."""

import json
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

pytest.importorskip("matplotlib")
pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parent.parent))

from demo import report, text, train_gpt2
from demo.training import Configuration, ModelSize, Run, build_model, forward_and_backward
from recompile.measurement import Measurement

MIB = 2**20


def run_of(name: str, peak_mib: int, memory_budget: float | str | None = None, backend: str = "recompile") -> Run:
    run = Run(Configuration(name, backend, memory_budget), torch.nn.Identity(), torch.nn.Identity())
    timeline = ((0.0, 0), (0.01, peak_mib * MIB), (0.02, MIB))
    run.losses, run.step_seconds = [5.5, 3.25], [0.3, 0.1, 0.2]
    run.measurement = Measurement(peak_mib * MIB, 0.02, timeline)
    return run


def row_of(run: Run, **changes) -> report.Row:
    """The row of a run that was never compiled, so that recompile has nothing to explain."""
    configuration, run.configuration = run.configuration, Configuration(run.configuration.name, None)
    row = report.row_of(run, train_gpt2.budget_bytes_of(Run(configuration, run.model, run.forward)))
    run.configuration = configuration
    facts = {"backend": configuration.backend or "eager", "memory_budget": configuration.memory_budget} | changes
    return report.Row(**({name: getattr(row, name) for name in report.Row.__slots__} | facts))


def test_without_a_file_the_text_is_pythons_help_topics():
    name, content = text.load_text(None)
    assert name == "pydoc_data.topics"
    assert len(content) > 300_000
    assert b'The "if" statement' in content


def test_a_file_is_read_as_bytes_and_named_without_its_folder(tmp_path):
    (tmp_path / "poem.txt").write_bytes("ä\r\n".encode())
    assert text.load_text(tmp_path / "poem.txt") == ("poem.txt", b"\xc3\xa4\r\n")


def test_every_window_is_dealt_once_before_any_is_dealt_again():
    batches = text.cut_into_batches(b"aabbccddeef", num_batches=5, batch_size=2, sequence_length=2, seed=0)
    dealt = [bytes(window.tolist()) for batch in batches for window in batch]
    assert batches.shape == (5, 2, 2) and batches.dtype == torch.int64
    assert sorted(dealt[:5]) == sorted(dealt[5:]) == [b"aa", b"bb", b"cc", b"dd", b"ee"]


def test_the_same_seed_deals_the_same_batches():
    first, again, other = (text.cut_into_batches(bytes(range(256)), 4, 4, 8, seed) for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_a_text_shorter_than_a_sequence_is_refused():
    with pytest.raises(ValueError, match="the text has 3 bytes, and one sequence takes 8"):
        text.cut_into_batches(b"abc", 1, 1, 8, 0)


def test_the_model_starts_from_the_same_weights_and_trains():
    size = ModelSize(num_layers=1, width=8, num_heads=2, sequence_length=4, batch_size=2)
    one, two = build_model(size, 0.0), build_model(size, 0.1)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    loss = forward_and_backward(Run(Configuration("eager", None), one, one), torch.zeros(2, 4, dtype=torch.int64))
    assert loss.item() == pytest.approx(5.5, abs=0.2)  # About log(256).
    assert all(parameter.grad is not None for parameter in one.parameters())


def test_the_byte_budget_of_another_model_size_lies_between_the_measured_peaks():
    runs = {"0.5": run_of("recompile 0.5", 90, 0.5), "0.1": run_of("recompile 0.1", 41, 0.1)}
    options = train_gpt2.parse(["--layers", "2"])
    configuration = train_gpt2.in_bytes(options, ModelSize(num_layers=2), runs)
    assert configuration == Configuration("recompile 65MiB", "recompile", "65MiB")
    with pytest.raises(ValueError, match=r"bytes needs 0\.5 and 0\.1 before it"):
        train_gpt2.in_bytes(options, ModelSize(num_layers=2), {})


def test_a_byte_budget_can_be_asked_for():
    configuration = train_gpt2.in_bytes(train_gpt2.parse(["--budget-mib", "7"]), ModelSize(), {})
    assert configuration.memory_budget == "7MiB"


@pytest.mark.parametrize("arguments", [["--steps", "0"], ["--layers", "x"], ["--only", "fast"]])
def test_bad_arguments_are_refused(arguments, capsys):
    with pytest.raises(SystemExit):
        train_gpt2.parse(arguments)
    assert arguments[0] in capsys.readouterr().err


def test_the_table_has_a_line_for_each_configuration():
    rows = [
        row_of(run_of("eager", 160, backend=None)),
        row_of(run_of("recompile 0.1", 40, 0.1), predicted_peak_bytes=39 * MIB, recompute_flops=1_500_000_000),
    ]
    console = Console(width=120)
    with console.capture() as capture:
        console.print(report.table_of(rows))
    cells = [line.replace("│", " ").split() for line in capture.get().splitlines() if "│" in line]
    assert ["eager", "160.0", "-", "200", "-", "5.500", "3.250"] in cells
    assert ["recompile", "0.1", "40.0", "39.0", "200", "1.500", "5.500", "3.250"] in cells


def test_the_conclusions_follow_from_the_figures():
    runs = run_of("recompile None", 100), run_of("recompile 0.1", 40, 0.1), run_of("recompile 64MiB", 60, "64MiB")
    sentences, budgets_respected = report.conclusions([row_of(run) for run in runs])
    assert budgets_respected
    assert sentences[0] == "The budget of 64MiB was respected: 60.0 MiB were measured."
    assert sentences[1].startswith("At memory_budget=0.1 the step needs 40% of the memory and 100% of the time")
    assert sentences[2].startswith("The loss falls from 5.50 to between 3.250 and 3.250")


def test_a_budget_that_was_not_respected_is_said_and_ends_with_an_error(tmp_path):
    runs = [run_of("recompile 64MiB", 65, "64MiB")]
    rows = [row_of(run) for run in runs]
    options = train_gpt2.parse(["--out", str(tmp_path)])
    console = Console(width=200)
    with console.capture() as capture:
        code = train_gpt2.show(options, ModelSize(), "some text", runs, rows, console)
    assert code == 1
    assert "The budget of 64MiB was NOT respected: 65.0 MiB were measured." in capture.get()


def test_the_results_are_a_picture_and_json_with_figures_and_versions(tmp_path):
    runs = [
        run_of("eager", 160, backend=None),
        run_of("recompile 0.5", 80, 0.5),
        run_of("recompile 64MiB", 60, "64MiB"),
    ]
    rows = [row_of(run) for run in runs]
    report.draw_memory(runs, rows, tmp_path / "memory.png")
    report.write_results(rows, ModelSize(), "some text", tmp_path / "results.json")
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["versions"]["torch"] == torch.__version__
    assert results["machine"]["cpu_threads"] == torch.get_num_threads()
    assert [row["peak_bytes"] // MIB for row in results["configurations"]] == [160, 80, 60]


def test_text_that_is_not_there_gets_a_sentence(capsys):
    assert train_gpt2.main(["--text", "missing.txt"]) == 1
    assert "missing.txt" in capsys.readouterr().out
