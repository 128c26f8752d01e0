"""The command `wildflower`. Everything heavy is imported by the subcommand that needs it, so that --help is quick."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn, cast

import typer

import wildflower
from wildflower.launch.process_ends import run_and_leave
from wildflower.launch.starting import loading_modules
from wildflower.plugins.extras import MissingExtraError

if TYPE_CHECKING:
    from rich.console import Console

    from wildflower.cli.export import Format
    from wildflower.launch.sweeps import Row
    from wildflower.papers.catalog import Entry
    from wildflower.server_app.models import Which

app = typer.Typer(
    help="Federated learning over devices that cannot all train the same model.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)

Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change one key of the run configuration; may be given often."),
]


def main() -> None:
    """Run the command."""
    run_and_leave(_run_app)


def _run_app() -> None:
    try:
        app()
    except MissingExtraError as error:  # any subcommand may need a library that is not installed
        _stop(str(error))
        sys.exit(1)


def _print_versions(wanted: bool) -> None:
    if not wanted:
        return
    from wildflower.server_app.journal import versions

    found = versions()
    for package in ("wildflower", "flwr", "torch", "python"):
        typer.echo(f"{package} {found[package] or 'not installed'}")
    raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_versions, is_eager=True, help="Print versions, also Flower's and torch's."
        ),
    ] = False,
) -> None:
    pass


@app.command()
def run(
    experiment: Annotated[Path, typer.Argument(metavar="EXPERIMENT.toml", help="The experiment file.")],
    overrides: Overrides = None,
    app_dir: Annotated[
        Path | None, typer.Option("--app", help="Folder of the Flower app, when this installation does not hold it.")
    ] = None,
    superlink: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Run it on the real devices that are connected to this SuperLink."),
    ] = None,
    root_certificates: Annotated[
        Path | None, typer.Option(help="PEM file of the authority that signed the SuperLink's certificate.")
    ] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Talk to the SuperLink without TLS.")] = False,
) -> None:
    """Run an experiment and write its report: on devices simulated here, or with --superlink on real ones.

    The exit code is 0 when the run finished, 1 when it failed and 130 when it was stopped.
    """
    with loading_modules():
        from wildflower.launch.before import Deployment
        from wildflower.launch.experiment import run_experiment
        from wildflower.launch.superlink import FlowerError, check_address
        from wildflower.launch.terminal import terminal

    deployment = None
    if superlink is not None:
        if insecure == (root_certificates is not None):
            raise _stop("--superlink needs --root-certificates FILE, or --insecure to talk without TLS")
        try:
            check_address(superlink)
        except FlowerError as error:
            raise _stop(str(error)) from None
        deployment = Deployment(superlink, root_certificates)
    elif insecure or root_certificates is not None:
        raise _stop("--root-certificates and --insecure belong to --superlink HOST:PORT")
    raise typer.Exit(run_experiment(experiment, overrides or [], app_dir, terminal(), deployment))


@app.command()
def sweep(
    experiment: Annotated[Path, typer.Argument(metavar="EXPERIMENT.toml", help="The experiment file.")],
    seeds: Annotated[str, typer.Option(help="Seeds, such as 1-3 or 1,4,7-9.")] = "1-3",
    rows: Annotated[
        Path | None,
        typer.Option(metavar="FILE.toml", help="Named sets of settings, each a table [NAME], each with all seeds."),
    ] = None,
    grid: Annotated[
        list[str] | None,
        typer.Option(
            "--grid",
            metavar="KEY=VALUE,VALUE",
            help="Values of a key, each with all seeds and rows; may be given often.",
        ),
    ] = None,
    overrides: Overrides = None,
    jobs: Annotated[int, typer.Option(min=1, max=256, help="Runs at a time.")] = 1,
    folder: Annotated[
        Path | None, typer.Option(help="Where the runs lie; default: runs/NAME-sweep, by the experiment's name.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write plots and tables here, and a CSV file beside.")
    ] = None,
) -> None:
    """Run an experiment with several seeds, rows and values, as far as runs are missing, and lay them side by side.

    All runs with one seed come before those with the next one. What is finished is not run again, what was stopped goes
    on. The exit code is 0 when all runs are finished, 1 when one failed and 130 when the sweep was stopped.
    """
    from wildflower.launch.experiment_file import SettingsError
    from wildflower.launch.sweeps import folder_of, parse_grid, parse_seeds, read_rows

    try:
        numbers = parse_seeds(seeds)
        all_rows = [] if rows is None else read_rows(rows)
        values = parse_grid(grid or [])
    except SettingsError as error:
        raise _stop(str(error)) from None
    _sweep(experiment, overrides or [], numbers, all_rows, values, folder_of(experiment, folder), jobs, html)


def _sweep(
    experiment: Path,
    overrides: Sequence[str],
    seeds: Sequence[int],
    rows: Sequence["Row"],
    grid: Mapping[str, Sequence[str]],
    folder: Path,
    jobs: int,
    html: Path | None,
) -> NoReturn:
    """Do what a sweep lacks, show its comparison, and leave with the exit code that `sweep` names."""
    from wildflower.launch.experiment import INTERRUPTED
    from wildflower.launch.experiment_file import SettingsError
    from wildflower.launch.superlink import stop_signals_interrupt
    from wildflower.launch.sweeps import sweep as run_sweep
    from wildflower.launch.terminal import terminal
    from wildflower.server_app.run_folder import JournalError

    try:
        with stop_signals_interrupt():
            outcome = run_sweep(experiment, overrides, seeds, rows, grid, folder, jobs, terminal())
    except (SettingsError, JournalError, OSError) as error:
        raise _stop(str(error)) from None
    if outcome.interrupted:
        typer.echo("Stopped; the same command goes on with what is missing.")
    if outcome.finished:
        names = [run.row for run in outcome.finished if run.row]
        _compare([run.run_dir for run in outcome.finished], html, None, names)
    raise typer.Exit(INTERRUPTED if outcome.interrupted else 1 if outcome.failed else 0)


@app.command()
def paper(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[PAPER/TABLE]", help="Such as recipfl/table-3-mnist; all are listed without."),
    ] = None,
    tiny: Annotated[
        bool, typer.Option("--tiny", help="Run it in a minute: two rounds of three devices, on data that are made.")
    ] = False,
    plan: Annotated[
        bool,
        typer.Option("--plan", help="Say what it takes at full size and what devices get; run nothing."),
    ] = False,
    copy: Annotated[
        Path | None, typer.Option("--copy", metavar="FOLDER", help="Copy its files there, to be changed; run nothing.")
    ] = None,
    about: Annotated[
        bool, typer.Option("--about", help="Say what it is, and what the paper prints and leaves open; run nothing.")
    ] = False,
    rows: Annotated[
        list[str] | None,
        typer.Option("--row", metavar="NAME", help="A row, such as a method; may be given often."),
    ] = None,
    seeds: Annotated[str, typer.Option(help="Seeds, such as 1-3 or 1,4,7-9.")] = "1-3",
    overrides: Overrides = None,
    jobs: Annotated[int, typer.Option(min=1, max=256, help="Runs at a time.")] = 1,
    folder: Annotated[
        Path | None, typer.Option(help="Where the runs lie; default: runs/NAME, by the experiment's name.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write plots and tables here, and a CSV file beside.")
    ] = None,
) -> None:
    """Run a table or figure of one of the five papers, with the paper's model, data, split and rounds.

    At full size most take hours to days on a GPU, and data that must be downloaded: try --tiny and --plan first.
    Exit codes are those of `wildflower sweep`.
    """
    from tempfile import TemporaryDirectory

    from wildflower.cli import paper as papers
    from wildflower.launch.experiment_file import SettingsError
    from wildflower.launch.sweeps import Row, parse_seeds
    from wildflower.launch.terminal import terminal
    from wildflower.papers import catalog

    console = terminal()
    if name is None:
        console.print(papers.listed())
        return
    try:
        one = catalog.entry(name)
        methods = papers.chosen(one, rows or [])
        numbers = [1] if tiny else parse_seeds(seeds)
        if copy is not None:
            for line in papers.copy(one, copy):
                typer.echo(line)
            return
        for line in papers.about(one):
            console.print(line, markup=False, highlight=False)
        if about:
            return
        settings = [*one.settings(), *(overrides or [])]
        where = folder or Path("runs") / (one.name.replace("/", "-") + ("-tiny" if tiny else ""))
        with TemporaryDirectory(prefix="wildflower-made-") as data:
            if plan:
                _plan_paper(one, methods, overrides or [], Path(data))
                return
            if tiny:
                methods = [Row(row.name, (*row.overrides, *catalog.tiny(one, row, Path(data)))) for row in methods]
            values = {} if tiny else one.values()
            _sweep(one.experiment_file, settings, numbers, methods, values, where.absolute(), jobs, html)
    except (SettingsError, ValueError, OSError) as error:
        raise _stop(str(error)) from None


def _plan_paper(one: "Entry", rows: Sequence["Row"], overrides: Sequence[str], data: Path) -> None:
    from wildflower.cli.paper import planned, summary
    from wildflower.cli.plan import plan_tables
    from wildflower.launch.terminal import terminal

    console = terminal()
    for row in rows:
        config, found = planned(one, row, overrides, data)
        console.print(f"{row.name}: {summary(config, found)}", markup=False, highlight=False)
        for table in plan_tables(found, by_node=False):
            console.print(table)


@app.command()
def report(run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The folder of a run.")]) -> None:
    """Write report.html again from what a run has left so far, and print its figures."""
    from wildflower.launch.showing import summary_table
    from wildflower.launch.terminal import terminal
    from wildflower.server_app.report import write_report
    from wildflower.server_app.run_folder import JournalError, has_virtual_clock, read_summary
    from wildflower.server_app.summary import summarize

    try:
        path = write_report(run_dir)
        summary = read_summary(run_dir) or summarize(run_dir, "unfinished", None)
    except JournalError as error:
        raise _stop(str(error)) from None
    console = terminal()
    console.print(summary_table(summary, virtual_clock=has_virtual_clock(run_dir)))
    console.print(f"Report: {path}", markup=False, highlight=False, soft_wrap=True)


@app.command()
def compare(
    run_dirs: Annotated[list[Path], typer.Argument(metavar="RUN_DIR...", help="Folders of runs or sweeps.")],
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write plots and tables here, and a CSV file beside.")
    ] = None,
    target: Annotated[
        float | None,
        typer.Option(help="Score to deliver, such as an accuracy of 0.9; default: the worst of the runs'."),
    ] = None,
) -> None:
    """Lay finished runs side by side, and say which method to take for this fleet.

    The folder of a sweep stands for all its runs.

    Runs that differ only in their seed are one row, with mean and spread.
    """
    from wildflower.server_app.run_folder import JournalError, runs_of

    try:
        runs = runs_of(run_dirs)
    except JournalError as error:
        raise _stop(str(error)) from None
    _compare(runs, html, target, [])


def _compare(run_dirs: Sequence[Path], html: Path | None, target: float | None, rows: Sequence[str]) -> None:
    from wildflower.launch.terminal import terminal
    from wildflower.server_app.compare import compare as compare_runs
    from wildflower.server_app.run_folder import JournalError

    try:
        comparison = compare_runs(run_dirs, target, rows)
    except JournalError as error:
        raise _stop(str(error)) from None
    console = terminal()
    for table in comparison.tables:
        _print_table(console, table.title, table.headers, table.rows)
    for sentence in comparison.advice:
        console.print(sentence, markup=False, highlight=False)
    if html is not None:
        data = html.with_suffix(".csv")
        for path, text in ((html, comparison.html), (data, comparison.csv)):
            try:
                path.write_text(text, encoding="utf-8")
            except OSError as error:
                raise _stop(f"cannot write {path}: {error.strerror}") from None
        console.print(f"Plots: {html}, data: {data}", markup=False, highlight=False, soft_wrap=True)


@app.command(context_settings={"allow_interspersed_args": False})  # options after NAME, --help too, are its own
def bench(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="The benchmark; without one they are listed.")
    ] = None,
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[ARGUMENTS]...", help="The benchmark's own, such as --jobs 2.")
    ] = None,
) -> None:
    """Run a recorded benchmark of this clone: what its results lack, as the page in its folder says.

    Its figures and tables are written beside it. It runs in the project's folder.
    """
    from wildflower.cli.bench import BenchError, benchmarks_of, start
    from wildflower.launch.terminal import terminal

    project = Path(wildflower.__file__).parents[1]
    try:
        if name is None:
            _print_table(terminal(), "", ["benchmark", "what it is about"], benchmarks_of(project).items())
        else:
            start(project, name, arguments or [])
    except BenchError as error:
        raise _stop(str(error)) from None


@app.command()
def config(
    experiment: Annotated[Path | None, typer.Argument(metavar="[EXPERIMENT.toml]", help="The experiment file.")] = None,
    overrides: Overrides = None,
    changed: Annotated[bool, typer.Option("--changed", help="Only keys whose values are not the defaults.")] = False,
) -> None:
    """Print every key of the run configuration with its value, where the value comes from, and what it means."""
    from wildflower.launch.experiment_file import SettingsError, beside, resolve
    from wildflower.launch.terminal import terminal
    from wildflower.server_app.config import defaults, descriptions

    with beside(experiment):
        try:
            settings = resolve(experiment, overrides or [])
        except SettingsError as error:
            raise _stop(str(error)) from None
        usual = defaults(settings.config.strategy)
        meanings = descriptions(settings.config.strategy)
        rows = [
            [key, repr(value), Path(settings.sources[key]).name, meanings[key]]
            for key, value in settings.config.to_dict().items()
            if not changed or value != usual[key]
        ]
    _print_table(terminal(), "", ["key", "value", "source", "meaning"], rows)


@app.command()
def check(
    experiment: Annotated[Path, typer.Argument(metavar="EXPERIMENT.toml", help="The experiment file.")],
    overrides: Overrides = None,
) -> None:
    """Show what can be known of a run before its first round: data, model, devices, and what is wrong with them.

    The exit code is 0 when the run can begin and 1 when it cannot.
    """
    with loading_modules():
        from wildflower.cli.check import check as look
        from wildflower.launch.experiment_file import SettingsError, beside, place, resolve
        from wildflower.launch.terminal import terminal
        from wildflower.server_app.run_folder import JournalError

    console = terminal()
    try:
        with beside(experiment):
            config, run_dir = place(resolve(experiment, overrides or []).config, Path.cwd(), datetime.now())
            page = look(config, run_dir, console.width)
    except (SettingsError, JournalError, OSError) as error:
        raise _stop(str(error)) from None
    page.print(console)
    if page.problems:
        raise typer.Exit(1)


@app.command()
def plan(
    experiment: Annotated[Path | None, typer.Argument(metavar="[EXPERIMENT.toml]", help="The experiment file.")] = None,
    overrides: Overrides = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(
            "--run",
            metavar="RUN_DIR",
            help="Plan for the real devices of this run, by their last reports; without EXPERIMENT with its settings.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show what every tier, or with --run every device, would get, what a round takes there, and what binds.

    The exit code is 0 when every device gets a model, 3 when one gets none and 1 when the run could not begin.
    """
    import json

    from wildflower.launch.experiment_file import SettingsError, beside, of_run, place, resolve
    from wildflower.launch.terminal import terminal
    from wildflower.server_app.models import ModelError, modules_of
    from wildflower.server_app.run_folder import JournalError

    of_the_run = run_dir if experiment is None else None
    try:
        with beside(experiment) if of_the_run is None else modules_of(of_the_run):
            if of_the_run is None:
                config, _ = place(resolve(experiment, overrides or []).config, Path.cwd(), datetime.now())
            else:
                config = of_run(of_the_run, overrides or [])
            from wildflower.cli.plan import make_plan, plan_tables

            found = make_plan(config, run_dir)
    except (SettingsError, JournalError, ModelError, ValueError, OSError) as error:
        raise _stop(str(error)) from None
    if as_json:
        typer.echo(json.dumps(found.to_json()))
    else:
        console = terminal()
        console.print(f"{found.method} over {found.family}, whole: {found.whole_parameters:,} parameters", markup=False)
        for table in plan_tables(found, by_node=run_dir is not None):
            console.print(table)
        if found.epsilon is not None:
            text = f"The run costs epsilon {found.epsilon:.3g} with delta {found.delta:g} (docs/privacy.md)"
            console.print(text, markup=False, highlight=False)
        for warning in found.warnings:
            console.print(f"Warning: {warning}", style="yellow", markup=False, highlight=False)
    raise typer.Exit(3 if found.left_out else 0)


@app.command()
def export(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The folder of a run.")],
    file_format: Annotated[
        str, typer.Option("--format", help="pt2, onnx, pte, or safetensors: the weights alone.")
    ] = "pt2",
    tier: Annotated[str | None, typer.Option(help="The model of a tier; default: the global one.")] = None,
    architecture: Annotated[
        str | None, typer.Option(metavar="JSON", help="The model of an architecture, as models.json writes it.")
    ] = None,
    which: Annotated[
        str, typer.Option(help="Of the best evaluation by the score of that model itself, or of the newest.")
    ] = "best",
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where to; default: the folder `export` of the run.")
    ] = None,
) -> None:
    """Write a model of a run exactly as it was scored, as a file that works without Wildflower (docs/export.md)."""
    import json

    from wildflower.cli.export import FORMATS, ExportError, facts_path, read_facts
    from wildflower.cli.export import export as export_model
    from wildflower.models.architecture import Architecture
    from wildflower.server_app.models import ModelError
    from wildflower.server_app.units import score_format
    from wildflower.tasks.metrics import scale_of

    if file_format not in FORMATS:
        raise _stop(f"--format {file_format!r}: must be one of {', '.join(FORMATS)}")
    try:
        wanted = None if architecture is None else Architecture.from_json(json.loads(architecture))
    except (ValueError, TypeError) as error:
        raise _stop(f"--architecture {architecture!r}: {error}") from None
    try:
        path = export_model(
            run_dir,
            file_format=cast("Format", file_format),
            which=cast("Which", which),
            tier=tier,
            architecture=wanted,
            out=out,
        )
    except (ModelError, ExportError, OSError) as error:
        raise _stop(str(error)) from None
    typer.echo(f"{path} ({path.stat().st_size / 1e6:.3g} MB); labels and preparation: {facts_path(path)}")
    facts, whose = read_facts(path), f"of tier {tier} " if tier is not None else ""
    scale = scale_of(facts.metric)
    scored = f"{scale.label} {score_format(scale)(facts.score)}"
    typer.echo(f"It is the model {whose}as it was in round {facts.round}: {scored}")


@app.command()
def predict(
    source: Annotated[Path, typer.Argument(metavar="RUN_DIR|FILE", help="The folder of a run, or an exported model.")],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder of the images.")],
    tier: Annotated[str | None, typer.Option(help="The model of a tier; default: the global one.")] = None,
    which: Annotated[
        str, typer.Option(help="Of the best evaluation by the score of that model itself, or of the newest.")
    ] = "best",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Print what a model of images says of every image of a folder. The exit code is 1 where one cannot be read.

    Models of texts, tables and signals are used by way of `wildflower export` (docs/export.md).
    """
    import json

    from wildflower.cli.export import ExportError
    from wildflower.cli.predict import PredictError
    from wildflower.cli.predict import predict as predict_folder
    from wildflower.launch.terminal import terminal
    from wildflower.server_app.models import ModelError

    try:
        found = predict_folder(source, folder, which=cast("Which", which), tier=tier)
    except (ModelError, ExportError, PredictError) as error:
        raise _stop(str(error)) from None
    if as_json:
        typer.echo(json.dumps([prediction.to_json() for prediction in found]))
    else:
        rows = [
            [p.file, p.problem or p.label or f"{p.value:g}", "" if p.share is None else f"{p.share:.1%}"] for p in found
        ]
        _print_table(terminal(), "", ["image", "prediction", "share"], rows)
    raise typer.Exit(1 if any(prediction.problem for prediction in found) else 0)


@app.command()
def supernet(
    experiment: Annotated[Path, typer.Argument(metavar="EXPERIMENT.toml", help="Task, family and training.")],
    output: Annotated[Path, typer.Option("--output", metavar="FILE", help="Where the weights go: *.safetensors.")],
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option(min=0, help="Steps of the optimizer; 0: weights stay as they begin.")] = 1000,
    random: Annotated[
        int, typer.Option(min=0, help="Random sub-networks of each step, beside the largest and the smallest.")
    ] = 2,
    held_out: Annotated[
        float, typer.Option(min=0, max=1, help="Share of the training examples on which sub-networks are scored.")
    ] = 0.1,
    pairs: Annotated[
        int, typer.Option(min=0, help="Random sub-networks that are scored in the end, for an accuracy predictor.")
    ] = 0,
    initial: Annotated[
        Path | None,
        typer.Option(help="File of first weights, such as torchvision's of a MobileNet."),
    ] = None,
) -> None:
    """Train a supernet on the experiment's data, which are public then; stopped, it goes on where it was."""
    from wildflower.cli.supernet_command import SupernetError, Wanted, train
    from wildflower.launch.experiment_file import SettingsError, beside, resolve
    from wildflower.launch.terminal import terminal
    from wildflower.strategies.supernet_training import SupernetParams

    if output.suffix != ".safetensors":
        raise _stop(f"--output {output} must end with .safetensors")
    console = terminal()
    with beside(experiment):
        try:
            config = resolve(experiment, overrides or []).config
            wanted = Wanted(output.absolute(), SupernetParams(steps=steps, random=random), held_out, pairs, initial)
            written = train(config, wanted, console)
        except (SettingsError, SupernetError) as error:
            raise _stop(str(error)) from None
    console.print(f"Supernet: {written}", markup=False, highlight=False, soft_wrap=True)


@app.command()
def nodes(
    superlink: Annotated[str, typer.Option(metavar="HOST:PORT", help="The SuperLink that the nodes are connected to.")],
    run_dir: Annotated[
        Path | None, typer.Option("--run", metavar="RUN_DIR", help="The folder of a run, for its nodes' last reports.")
    ] = None,
    root_certificates: Annotated[
        Path | None, typer.Option(help="PEM file of the authority that signed the SuperLink's certificate.")
    ] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Talk to the SuperLink without TLS.")] = False,
    release: Annotated[
        int | None, typer.Option(metavar="NODE", help="Release a node from quarantine before the run's next round.")
    ] = None,
) -> None:
    """List the nodes that a SuperLink knows, and with --run what each said last."""
    from wildflower.cli.nodes import HEADERS, node_rows
    from wildflower.launch.superlink import FlowerError
    from wildflower.launch.terminal import terminal
    from wildflower.server_app.node_records import ask_release
    from wildflower.server_app.run_folder import JournalError

    if release is not None and run_dir is None:
        raise _stop("--release needs --run RUN_DIR, the run in which the node is quarantined")
    if insecure == (root_certificates is not None):
        raise _stop("--superlink needs --root-certificates FILE, or --insecure to talk without TLS")
    try:
        if release is not None and run_dir is not None:
            ask_release(run_dir, release)
        rows = node_rows(superlink, root_certificates, run_dir)
    except (FlowerError, JournalError) as error:
        raise _stop(str(error)) from None
    _print_table(terminal(), "", HEADERS, rows)


@app.command()
def probe(
    node_config: Annotated[
        str, typer.Option(metavar="'KEY=VALUE ...'", help="As for wildflower-node, such as 'down-mbit-per-s=20'.")
    ] = "",
    state_dir: Annotated[
        Path | None, typer.Option(help="Where the node keeps its state; default: ~/.local/state/wildflower.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Print what this machine would report of itself as a node."""
    import json

    from wildflower.cli.probe_command import own_report, report_rows
    from wildflower.launch.terminal import terminal

    try:
        report = own_report(node_config, state_dir)
    except (ValueError, OSError) as error:
        raise _stop(str(error)) from None
    if as_json:
        typer.echo(json.dumps(report.to_json()))
        return
    _print_table(terminal(), "", ["", "this machine"], report_rows(report))


@app.command()
def bandwidth_server(
    token_file: Annotated[Path, typer.Option(help="Holds the token that nodes must know, 16 letters or more.")],
    address: Annotated[str, typer.Option(help="host:port to listen at.")] = "127.0.0.1:9100",
    certificate: Annotated[Path | None, typer.Option(help="TLS certificate chain, PEM.")] = None,
    key: Annotated[Path | None, typer.Option(help="Private key of the certificate, PEM.")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Serve without TLS: the token can be read.")] = False,
) -> None:
    """Let nodes measure their links: run this beside the SuperLink. Ends at SIGTERM or Ctrl-C."""
    from wildflower.cli.probe_command import serve_bandwidth

    try:
        serve_bandwidth(address, token_file, certificate, key, insecure=insecure, say=typer.echo)
    except (ValueError, OSError) as error:
        raise _stop(str(error)) from None


def _print_table(console: "Console", title: str, headers: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    from wildflower.launch.terminal import tables_of

    for table in tables_of(title, headers, rows, console.width):
        console.print(table)


def _stop(message: str) -> typer.Exit:
    typer.secho(f"Error: {message}", fg=typer.colors.RED, err=True)
    return typer.Exit(1)
