"""`sbx metrics`: what a monitoring system needs for the metrics of a service."""

from importlib.resources import files

import typer

from sbx.cli import exits
from sbx.cli.terminal import STDOUT, write

app = typer.Typer(help="Print alert rules and a dashboard.", rich_markup_mode=None)


@app.command()
def rules() -> int:
    """Print alert rules for Prometheus, for a scrape job with the name sbx.

    Save them in a file that rule_files of prometheus.yml names.
    """
    return _print("alerts.yml")


@app.command()
def dashboard() -> int:
    """Print a dashboard for Grafana, as JSON to import."""
    return _print("dashboard.json")


def _print(name: str) -> int:
    write(STDOUT, files("sbx.telemetry").joinpath(name).read_text())
    return exits.Exit.OK
