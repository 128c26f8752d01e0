"""Commands about devices: `wildflower probe` and `wildflower bandwidth-server`. Runs where no server is installed."""

import json
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from wildflower.cli.options import AsJson, print_table, wrong_values_told

if TYPE_CHECKING:
    from wildflower.devices.resource_report import DeviceReport


def probe(
    node_config: Annotated[
        str, typer.Option(metavar="'KEY=VALUE ...'", help="As for wildflower-node, such as 'down-mbit-per-s=20'.")
    ] = "",
    state_dir: Annotated[
        Path | None, typer.Option(help="Where the node keeps its state; default: ~/.local/state/wildflower.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print what this machine would report of itself as a node."""
    with wrong_values_told():
        report = own_report(node_config, state_dir)
    if as_json:
        typer.echo(json.dumps(report.to_json()))
    else:
        print_table(["", "this machine"], report_rows(report))


def own_report(node_config: str, state_dir: Path | None) -> "DeviceReport":
    """Return the report of this machine under a node config as wildflower-node takes it. Raises ValueError."""
    from wildflower.client_app.device_report import device_report
    from wildflower.client_app.node_config import read_node_config

    config = read_node_config(node_config)
    if state_dir is not None:
        config["state-dir"] = str(state_dir)
    return device_report(config)


def report_rows(report: "DeviceReport") -> list[list[str]]:
    """Return what a report says, line by line: name and value with its unit."""

    def megabytes(nbytes: int | None) -> str:
        return "none" if nbytes is None else f"{nbytes / 1e6:,.0f} MB"

    def link(mbit_per_s: float | None, age_seconds: float | None) -> str:
        if mbit_per_s is None:
            return "unknown"
        age = "" if age_seconds is None else f", measured {age_seconds:.0f} s ago"
        return f"{mbit_per_s:.3g} Mbit/s ({report.links_from or 'source unknown'}{age})"

    speed = "unknown"
    if report.flop_per_s is not None:
        age = "node config" if report.speed_age_seconds is None else f"measured {report.speed_age_seconds:.0f} s ago"
        speed = f"{report.flop_per_s / 1e9:.3g} GFLOP/s ({age})"
    throttled = {None: "unknown", True: "yes", False: "no"}[report.throttled]
    temperature = "unknown" if report.temperature_celsius is None else f"{report.temperature_celsius:.1f} °C"
    rows = [
        ["kind", report.kind],
        ["memory", f"{megabytes(report.memory_available_bytes)} available of {megabytes(report.memory_total_bytes)}"],
        ["memory set apart by the owner", megabytes(report.memory_limit_bytes)],
        ["link down", link(report.down_mbit_per_s, report.down_age_seconds)],
        ["link up", link(report.up_mbit_per_s, report.up_age_seconds)],
        ["payload limit of the owner", megabytes(report.payload_limit_bytes)],
        ["accelerator", report.accelerator or "none"],
        ["CPUs", f"{report.cpus:g}"],
        ["training speed", speed],
        ["temperature", temperature],
        ["throttled", throttled],
        ["free where it keeps its state", megabytes(report.disk_free_bytes)],
    ]
    if report.resting is not None:
        rows.append(["takes part", f"not now: {report.resting}"])
    if report.links_problem is not None:
        rows.append(["bandwidth probe", report.links_problem])
    return rows


def bandwidth_server(
    token_file: Annotated[Path, typer.Option(help="Holds the token that nodes must know, 16 letters or more.")],
    address: Annotated[str, typer.Option(help="host:port to listen at.")] = "127.0.0.1:9100",
    certificate: Annotated[Path | None, typer.Option(help="TLS certificate chain, PEM.")] = None,
    key: Annotated[Path | None, typer.Option(help="Private key of the certificate, PEM.")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Serve without TLS: the token can be read.")] = False,
) -> None:
    """Let nodes measure their links: run this beside the SuperLink. Ends at SIGTERM or Ctrl-C."""
    from wildflower.devices.bandwidth import make_server, read_token

    with wrong_values_told():
        if insecure and (certificate or key):
            raise ValueError("--insecure together with --certificate or --key: leave out one or the other")
        if not insecure and (certificate is None or key is None):
            raise ValueError("--certificate and --key are needed, or --insecure to serve without TLS")
        pair = None if certificate is None or key is None else (key.read_bytes(), certificate.read_bytes())
        server, port = make_server(address, read_token(token_file), pair)
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    server.start()
    typer.echo(f"Bandwidth service at {address.rpartition(':')[0]}:{port}{' without TLS' if pair is None else ''}")
    stopped.wait()
    server.stop(grace=1.0).wait()
