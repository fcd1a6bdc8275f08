"""The options that tighten the policy of a new sandbox."""

import tomllib
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from sbx.errors import BadRequest

Memory = Annotated[
    str | None,
    typer.Option(
        "--memory",
        help="The memory limit, such as 512MiB; at most that of the policy.",
        metavar="SIZE",
    ),
]
Cpus = Annotated[
    float | None,
    typer.Option(
        "--cpus", help="The CPU limit, such as 0.5; at most that of the policy.", metavar="N"
    ),
]
Env = Annotated[
    list[str] | None,
    typer.Option("--env", help="An environment variable. Repeatable.", metavar="NAME=VALUE"),
]
NetworkAllow = Annotated[
    list[str] | None,
    typer.Option(
        "--network-allow",
        help="Of the hosts that the policy allows, allow only this one. Repeatable.",
        metavar="HOST",
    ),
]


def sandbox_options(
    *,
    memory: str | None,
    cpus: float | None,
    network_allow: Sequence[str] | None,
    env: Sequence[str] | None,
    narrow: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the arguments `narrower` and `env` of a new sandbox; only those that are needed.

    `narrow` has pairs such as `limits.tasks_max=8`, for the other keys. Raise BadRequest for an
    option that is not well formed. Whether the policy permits it is checked when the sandbox is
    created.
    """
    tables = narrower(narrow)
    if memory is not None:
        _set(tables, "limits", "memory_max", memory)
    if cpus is not None:
        _set(tables, "limits", "cpu_quota", f"{cpus * 100:g}%")
    if network_allow:
        _set(tables, "network", "allow", list(network_allow))
    options: dict[str, Any] = {"narrower": tables} if tables else {}
    return options | ({"env": variables(env)} if env else {})


def _set(tables: dict[str, Any], table: str, key: str, value: object) -> None:
    inner = tables.setdefault(table, {})
    if not isinstance(inner, dict) or key in inner:
        raise BadRequest(f"{table}.{key} is set twice", hint="use one of the options")
    inner[key] = value


def variables(pairs: Sequence[str]) -> dict[str, str]:
    """Parse the `--env NAME=VALUE` options. Raise BadRequest."""
    environment = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise BadRequest(
                f"--env {pair}: the value is missing", hint="write it as --env NAME=VALUE"
            )
        environment[name] = value
    return environment


def narrower(pairs: Sequence[str]) -> dict[str, Any]:
    """Parse `a.b=value` pairs into nested tables. A value is parsed as TOML, or else it is text."""
    tables: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        *above, last = name.strip().split(".")
        if not equals or not last:
            raise BadRequest(
                f"--narrow {pair}: the value is missing",
                hint="write it as limits.memory_max=256MiB",
            )
        try:
            value: Any = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            value = text.strip()
        table = tables
        for part in above:
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                raise BadRequest(f"--narrow {pair}: {part} already has a value")
        table[last] = value
    return tables
