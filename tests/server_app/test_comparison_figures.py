"""Comparisons for a paper: tables in LaTeX and Markdown, figures with bands, and the command that makes them."""

import pytest
from test_compare import a_run
from typer.testing import CliRunner

from wildflower.cli.command import app
from wildflower.server_app.compare import compare
from wildflower.server_app.run_folder import JournalError


@pytest.fixture
def two_methods(tmp_path):
    seeds = [(1, [0.2, 0.4]), (2, [0.4, 0.8])]
    own = [a_run(tmp_path / f"own-{seed}", scores, seed=seed) for seed, scores in seeds]
    other = [a_run(tmp_path / f"other-{seed}", [0.1, 0.2], seed=seed, strategy="fedrolex") for seed, _ in seeds]
    return [*own, *other]


def test_one_table_for_a_paper(two_methods):
    comparison = compare(two_methods)
    head, marks, first, second = comparison.to_markdown().splitlines()
    assert head.startswith("| method | seeds | delivered, % | worst tier, % | whole model, % | rounds to 20 % |")
    assert marks.startswith("| --- | --- |")
    assert first.startswith("| heterofl | 1-2 | 60.0 ± 28.3 | 15.0 ± 7.1 | 30.0 ± 14.1 | 1 |")
    assert second.startswith("| fedrolex | 1-2 | 20.0 ± 0.0 |")
    assert len(head.split("|")) - 2 <= 12
    lines = comparison.to_latex().splitlines()
    assert lines[0].startswith(r"\begin{tabular}{llrrr")
    assert lines[2].startswith(r"method & seeds & delivered, \% &")
    assert lines[4].startswith(r"heterofl & 1-2 & 60.0 $\pm$ 28.3 &")
    assert lines[-1] == r"\end{tabular}"


def test_a_figure_has_a_line_and_a_band_for_each_method(two_methods):
    drawn = compare(two_methods).plot()
    rounds, traffic, hours, memory = drawn.axes
    assert [axes.get_xlabel() for axes in (rounds, traffic, hours)] == [
        "round",
        "training traffic, down and up (MB)",
        "simulated minutes",
    ]
    line = rounds.lines[0]
    assert line.get_label() == "heterofl"
    assert line.get_xydata().tolist() == [[1, pytest.approx(30)], [2, pytest.approx(60)]]
    band = rounds.collections[0].get_paths()[0].vertices
    assert band[:, 1].min() == pytest.approx(30 - 14.142, abs=0.01)
    assert band[:, 1].max() == pytest.approx(60 + 28.284, abs=0.01)
    # 1,900 bytes and 60 simulated seconds a round.
    assert traffic.lines[0].get_xdata().tolist() == pytest.approx([0.0019, 0.0038])
    assert hours.lines[0].get_xdata().tolist() == pytest.approx([1, 2])
    assert memory.get_ylabel() == "memory budget used (%)"
    assert drawn._repr_png_().startswith(b"\x89PNG")
    assert len(compare(two_methods).plot("hours").axes) == 1
    with pytest.raises(JournalError, match="over = 'time': must be among rounds, bytes, hours, memory"):
        compare(two_methods).plot("time")


def test_one_seed_has_no_band(two_methods):
    (axes,) = compare(two_methods[:1]).plot("rounds").axes
    assert (len(axes.lines), len(axes.collections)) == (1, 0)


def test_the_command_writes_them(two_methods, tmp_path):
    folders = [str(folder) for folder in two_methods]
    figure = tmp_path / "out.svg"
    said = CliRunner().invoke(app, ["compare", *folders, "--latex", "--figure", str(figure)])
    assert said.stdout == compare(two_methods).to_latex()
    assert f"Figure: {figure}" in said.stderr
    assert "<svg" in figure.read_text()
    assert CliRunner().invoke(app, ["compare", *folders, "--markdown"]).stdout == compare(two_methods).to_markdown()
    wrong = CliRunner().invoke(app, ["compare", *folders, "--figure", str(tmp_path / "out.txt")])
    assert wrong.exit_code == 1
    assert "cannot draw" in wrong.stderr
