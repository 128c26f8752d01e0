"""`wildflower report` and `wildflower compare`: what finished runs have come to."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from wildflower.cli.options import Html, RunDir, print_table
from wildflower.plugins.raised_as import raised_as
from wildflower.plugins.user_error import UserError

if TYPE_CHECKING:
    from wildflower.server_app.compare import Comparison


def report(run_dir: RunDir) -> None:
    """Write report.html again from what a run has left so far, and print its figures."""
    from wildflower.launch.showing import summary_table
    from wildflower.launch.terminal import terminal
    from wildflower.server_app.report import write_report
    from wildflower.server_app.run_folder import has_virtual_clock, read_config, read_summary
    from wildflower.server_app.summary import global_model, summarize

    path = write_report(run_dir)
    summary = read_summary(run_dir) or summarize(run_dir, "unfinished", None)
    whole = global_model(run_dir, read_config(run_dir).config)
    terminal().print(summary_table(summary, virtual_clock=has_virtual_clock(run_dir), whole=whole))
    typer.echo(f"Report: {path}")


def compare(
    run_dirs: Annotated[list[Path], typer.Argument(metavar="RUN_DIR...", help="Folders of runs or sweeps.")],
    html: Html = None,
    target: Annotated[
        float | None,
        typer.Option(help="Score to deliver, such as an accuracy of 0.9; default: the worst of the runs'."),
    ] = None,
    latex: Annotated[
        bool, typer.Option("--latex", help="Print one table in LaTeX, for a paper, and nothing else.")
    ] = False,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print one table in Markdown, and nothing else.")
    ] = False,
    figure: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw scores with seeds as bands: .svg, .pdf or .png.")
    ] = None,
) -> None:
    """Lay finished runs side by side, and say which method to take for this fleet.

    The folder of a sweep stands for all its runs.

    Runs that differ only in their seed are one row, with mean and spread.
    """
    from wildflower.server_app.run_folder import runs_of

    if not (latex or markdown):
        comparison = print_comparison(runs_of(run_dirs), html, target)
    else:
        from wildflower.server_app.compare import compare as compare_runs

        comparison = compare_runs(runs_of(run_dirs), target)
        typer.echo(comparison.to_latex() if latex else comparison.to_markdown(), nl=False)
    if figure is not None:
        with raised_as(UserError, f"cannot draw {figure}: ", (OSError, ValueError)):  # of an ending that is no format
            comparison.plot().savefig(figure)
        typer.echo(f"Figure: {figure}", err=latex or markdown)


def print_comparison(
    run_dirs: Sequence[Path], html: Path | None, target: float | None = None, rows: Sequence[str] = ()
) -> "Comparison":
    """Print the tables and the advice of a comparison, and write its page where one is asked for."""
    from wildflower.launch.terminal import terminal
    from wildflower.server_app.compare import compare as compare_runs

    comparison = compare_runs(run_dirs, target, rows)
    for table in comparison.tables:
        print_table(table.headers, table.rows, table.title)
    for sentence in comparison.advice:
        terminal().print(sentence, markup=False, highlight=False)
    if html is not None:
        data = html.with_suffix(".csv")
        for path, text in ((html, comparison.html), (data, comparison.csv)):
            try:
                path.write_text(text, encoding="utf-8")
            except OSError as error:
                raise UserError(f"cannot write {path}: {error.strerror}") from None
        typer.echo(f"Plots: {html}, data: {data}")
    return comparison
