"""The code in docs/ runs as it stands. Where Inductor's code generation adds nothing, graphs are interpreted."""

import pytest

from tests.documents import ROOT, run_blocks

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def test_the_snippets_on_experiments_run(tmp_path, monkeypatch, capsys, handed_to_inductor):
    monkeypatch.chdir(tmp_path)
    run_blocks(ROOT / "docs" / "experiments.md")
    printed = capsys.readouterr().out
    assert [line.split()[0] for line in printed.splitlines() if line.endswith(" us") and " MiB " in line][:4] == [
        "mincut", "stock", "save_all", "full",
    ]  # fmt: skip
    assert "planner keep_matmuls, hardware h100" in printed
    assert "2 matmuls in forward and backward" in printed
