"""`wildflower fleet`: the real devices of a run by name, what each has and gets, and what binds."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from wildflower.cli.fleet_state import HEADERS, fleet_rows, newest_run, state_of
from wildflower.cli.options import Insecure, RootCertificates, deployment_at
from wildflower.plugins.user_error import UserError

if TYPE_CHECKING:
    from rich.console import Group, RenderableType

    from wildflower.launch.before import Deployment


def fleet(
    run_dir: Annotated[
        Path | None,
        typer.Argument(
            metavar="[RUN_DIR]",
            help="The folder of a run, or of runs: then the newest. Without it, only what the SuperLink knows.",
        ),
    ] = None,
    superlink: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Ask this SuperLink for names, and who is connected.")
    ] = None,
    root_certificates: RootCertificates = None,
    insecure: Insecure = False,
    watch: Annotated[
        float | None, typer.Option(min=1, metavar="SECONDS", help="Go on, and look again so often; Ctrl-C ends it.")
    ] = None,
    serve: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Serve a page there instead; Ctrl-C ends it.")
    ] = None,
    release: Annotated[
        int | None, typer.Option(metavar="NODE", help="Release a node from quarantine before the run's next round.")
    ] = None,
) -> None:
    """Show the real devices of a run: when each was seen, what it has, which model it got, and what binds.

    With --serve they are a page for browsers, with figures for Prometheus at /metrics. Whoever reaches it reads it.
    The page has a history of thirty days, which is kept in fleet.sqlite beside the run's folder.

    The exit code is 0 when every device gets a model and 3 when one gets none.
    """
    from rich.live import Live

    from wildflower.launch.terminal import terminal
    from wildflower.server_app.node_records import ask_release

    if superlink is None and (insecure or root_certificates is not None):
        raise UserError("--root-certificates and --insecure belong to --superlink HOST:PORT")
    if run_dir is None and (superlink is None or serve is not None or release is not None):
        raise UserError("name the folder of a run, RUN_DIR; without one, --superlink HOST:PORT lists its nodes")
    if release is not None and run_dir is not None:
        ask_release(newest_run(run_dir), release)
    deployment = None if superlink is None else deployment_at(superlink, root_certificates, insecure)
    if serve is not None and run_dir is not None:
        from wildflower.cli.fleet_serve import serve_fleet

        serve_fleet(serve, run_dir, deployment)
        return
    console = terminal()
    page, left_out = _page(run_dir, deployment, console.width)
    if watch is None:
        console.print(page)
    else:
        with Live(page, console=console, auto_refresh=False) as live:
            try:
                while True:
                    time.sleep(watch)
                    page, left_out = _page(run_dir, deployment, console.width)
                    live.update(page, refresh=True)
            except KeyboardInterrupt:
                pass
    raise typer.Exit(3 if left_out else 0)


def _page(run_dir: Path | None, deployment: "Deployment | None", width: int) -> "tuple[Group, bool]":
    """Return what is shown now, and whether a device gets no model."""
    from rich.console import Group
    from rich.text import Text

    from wildflower.launch.terminal import tables_of

    state = state_of(run_dir, deployment)
    rows, plan = fleet_rows(state, time.time()), state.plan
    parts: list[RenderableType] = list(tables_of("", HEADERS, rows, width))
    if plan and plan.left_out:
        parts += [Text(f"Warning: {warning}", style="yellow") for warning in plan.warnings]
        parts.append(Text(f"wildflower plan --run {run_dir} says what each device needs, and tries other settings."))
    return Group(*parts), bool(plan and plan.left_out)
