"""`sbx config`: every setting of the service, with its value and its source."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sbx.cli import output

if TYPE_CHECKING:
    from sbx.api.server.settings import ServiceSettings


def config(
    file: Annotated[
        Path | None,
        typer.Option("--config", help="The file with the settings.", metavar="FILE"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Show every setting of `sbx serve`, its value and its source.

    Sources, the first that names a setting wins: the command line of `sbx serve`, the environment
    (SBX_*), sbx.toml of your configuration directory, .env and then sbx.toml of the working
    directory, the default. The files of the working directory may set limits and logging only; sbx
    refuses other settings there. A file that --config names may set all; it replaces both sbx.toml.
    """
    from sbx.api.server.settings import ServiceSettings, read_settings

    result = read_settings(config=file)
    rows = [
        (name, _plain(result.settings, name), result.sources.get(name, "default"))
        for name in ServiceSettings.model_fields
    ]
    if as_json:
        output.document(
            {
                "settings": [
                    {"name": name, "value": value, "source": source} for name, value, source in rows
                ],
                "unknown": [{"name": name, "source": source} for name, source in result.unknown],
            }
        )
        return
    output.print_table(
        ("setting", "value", "source"),
        [(name, _text(value), source) for name, value, source in rows],
    )
    for name, source in result.unknown:
        output.note(f"{name} in {source} is not a setting of sbx")


def _plain(settings: "ServiceSettings", name: str) -> Any:
    """Return the value as JSON. Never show the API key."""
    value = getattr(settings, name)
    if name == "api_key":
        return None if value is None else "(hidden)"
    if name == "socket_mode":
        return None if value is None else f"{value:04o}"
    if isinstance(value, tuple):
        return [str(element) if isinstance(element, Path) else element for element in value]
    return str(value) if isinstance(value, Path) else value


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "-"
    return str(value)
