"""`wildflower paper`."""

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from wildflower.cli.options import Html, Jobs, Overrides, Seeds, print_table, wrong_values_told
from wildflower.cli.sweep import do_sweep


def paper(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[PAPER/TABLE]",
            help="Such as recipfl/table-3-mnist; recipfl alone lists that paper's, and nothing lists all.",
        ),
    ] = None,
    tiny: Annotated[
        bool, typer.Option("--tiny", help="Run it in a minute: two rounds of three devices, on data that are made.")
    ] = False,
    plan: Annotated[
        bool, typer.Option("--plan", help="Say what it takes at full size and what devices get; run nothing.")
    ] = False,
    copy: Annotated[
        Path | None, typer.Option("--copy", metavar="FOLDER", help="Copy its files there, to be changed; run nothing.")
    ] = None,
    about: Annotated[
        bool, typer.Option("--about", help="Say what it is, and what the paper prints and leaves open; run nothing.")
    ] = False,
    rows: Annotated[
        list[str] | None,
        typer.Option("--row", metavar="NAME", help="A row of it, such as a method; may be given often."),
    ] = None,
    seeds: Seeds = "1-3",
    overrides: Overrides = None,
    jobs: Jobs = 1,
    folder: Annotated[
        Path | None, typer.Option(help="Where the runs lie; default: runs/NAME, by the experiment's name.")
    ] = None,
    html: Html = None,
) -> None:
    """Run a table or figure of one of the five papers, with the paper's model, data, split and rounds.

    At full size most take hours to days on a GPU, and data that must be downloaded: try --tiny and --plan first. Exit
    codes are those of `wildflower sweep`.
    """
    from wildflower.cli import papers
    from wildflower.launch.sweeps import Row, SweepRequest, parse_seeds
    from wildflower.launch.terminal import terminal
    from wildflower.papers import catalog

    console = terminal()
    listed = [one for one in catalog.entries() if name in (None, one.name.partition("/")[0])]
    if listed and not (tiny or plan or copy or about or rows or overrides or folder or html):
        print_table(("experiment", "what", "data"), [(one.name, one.what, one.data) for one in listed])
        return
    if name is None:
        raise typer.BadParameter("name an experiment; `wildflower paper` lists all", param_hint="PAPER/TABLE")
    one = catalog.entry(name)
    methods = papers.chosen(one, rows or [])
    if copy is not None:
        for line in papers.copy(one, copy):
            typer.echo(line)
        return
    for line in papers.about(one):
        console.print(line, markup=False, highlight=False)
    if about:
        return
    with TemporaryDirectory(prefix="wildflower-made-") as data, wrong_values_told():
        if plan:
            for row in methods:
                for part in papers.plan_text(one, row, overrides or [], Path(data)):
                    console.print(part, highlight=False)
            return
        grid = one.values()
        if tiny:
            # Made data and the runs on them must not be taken for the experiment's own.
            methods = [Row(row.name, (*row.overrides, *catalog.tiny(one, row, Path(data)))) for row in methods]
            seeds, grid = "1", {}
        if not any(text.startswith("fleet=") for text in overrides or []):
            # In each row: some rows have a fleet of their own.
            methods = [replace(row, overrides=(*one.settings(), *row.overrides)) for row in methods]
        runs = folder or Path("runs") / (one.name.replace("/", "-") + ("-tiny" if tiny else ""))
        request = SweepRequest(
            one.experiment_file, overrides or [], runs.absolute(), parse_seeds(seeds), methods, grid, jobs
        )
        do_sweep(request, html)
