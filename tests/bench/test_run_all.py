"""The report of all benchmarks holds what each of them says, and tells which failed."""

import sys
from pathlib import Path

import pytest

from bench import run_all
from bench.markdown import markdown, median_and_range
from bench.run_all import Benchmark

TABLE = Benchmark("table", "A table.", "-c \"print('| a |\\n|--:|\\n| 1 |')\"", "")
TEXT = Benchmark("plain text", "Text.", '-c "print(1)"', "")
BROKEN = Benchmark("broken", "Fails.", '-c "print(2); exit(3)"', "")


def test_report_has_a_section_for_each(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "report.md"
    monkeypatch.setattr(run_all, "BENCHMARKS", (TABLE, TEXT, BROKEN))
    monkeypatch.setattr(sys, "argv", ["run_all", "--report", str(report)])
    with pytest.raises(SystemExit, match="These failed: broken"):
        run_all.main()
    text = report.read_text()
    assert "\n| a |\n|--:|\n| 1 |\n" in text and "```text\n1\n```" in text
    assert "2\n```\n\nIt failed, with status 3." in text
    assert "[plain text](#plain-text)" in text and "\n## plain text\n" in text


def test_tables_have_a_column_a_field() -> None:
    rows = [
        {"a_b": 1.234, "c": median_and_range([3, 1, 2])},
        {"a_b": 2, "c": median_and_range([5])},
    ]
    assert markdown(rows) == ["| a b | c |", "|---|---|", "| 1.23 | 2.0 (1.0-3.0) |", "| 2 | 5.0 |"]
