"""`sbx doctor`: report the walls and the start paths that this host supports, with remedies for
the missing ones. With --attack, test whether the walls stop attacks."""

from typing import TYPE_CHECKING, Annotated

import typer

from sbx.cli import output
from sbx.cli.exits import Exit
from sbx.cli.terminal import STDOUT, one_line, write

if TYPE_CHECKING:
    from sbx.doctor.host_check import HostCheck, Live
    from sbx.doctor.report import AttackReport
    from sbx.isolation.receipt import Receipt


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    attack: Annotated[
        bool,
        typer.Option(
            "--attack", help="Run attacks in temporary sandboxes, and report the results."
        ),
    ] = False,
) -> int:
    """Test every layer of this host, and start a sandbox by each path.

    The report names the cause and the remedy of each missing layer. A path is a way to start a
    kernel: cold works on every host; fork and pool are faster, with the same walls. The exit code
    is 0 if the policy `default` runs here, else 3.

    With --attack, run some hundred attacks in sandboxes of the shipped policies instead. This takes
    less than a minute. No attack harms this host, even if its wall is missing. The exit code is 0
    if all attacks were stopped, 1 if one escaped, and 3 if not all could be tried.
    """
    import asyncio

    if attack:
        return _attack(as_json=as_json)

    from sbx.doctor.host_check import examine

    examination = asyncio.run(examine())
    if as_json:
        output.document(
            {
                "ok": examination.ok,
                "linux": examination.linux,
                "machine": examination.machine,
                "root": examination.root,
                "layers": [
                    {
                        "name": layer.name,
                        "found": layer.found,
                        "detail": layer.detail,
                        "cause": layer.cause,
                        "remedy": layer.remedy,
                    }
                    for layer in examination.layers
                ],
                "policies": [verdict.to_dict() for verdict in examination.verdicts],
                "languages": [language.to_dict() for language in examination.languages],
                "live": examination.live.to_dict(),
                "paths": [
                    {
                        "path": check.path,
                        "ok": check.ok,
                        "duration_s": round(check.duration_s, 3),
                        "error": check.error.to_dict() if check.error else None,
                    }
                    for check in examination.paths
                ],
            }
        )
    else:
        _print(examination)
    return Exit.OK if examination.ok else Exit.REFUSED


def _attack(*, as_json: bool) -> int:
    import asyncio

    from sbx.doctor.report import run_attacks

    siege = asyncio.run(run_attacks())
    if as_json:
        output.document(siege.to_dict())
    else:
        _print_siege(siege)
    if siege.escaped:
        return Exit.FAILED
    return Exit.OK if siege.complete else Exit.REFUSED


def _print_siege(siege: "AttackReport") -> None:
    for heads, rows in siege.tables():
        output.print_table(heads, rows)
        write(STDOUT, "\n")
    write(STDOUT, "".join(f"{one_line(line)}\n" for line in siege.sentences()))
    totals = siege.to_dict()
    write(
        STDOUT,
        f"{totals['tried']} attacks tried in {siege.duration_s:.0f} s: {totals['held']} held,"
        f" {len(siege.escaped)} escaped, {len(siege.unclear)} unclear\n",
    )


def _print(examination: "HostCheck") -> None:
    user = "root" if examination.root else "an unprivileged user"
    write(STDOUT, f"Linux {examination.linux} on {examination.machine}, as {user}\n\n")
    output.print_table(
        ("layer", "state", "detail"),
        [
            (layer.name, "found" if layer.found else "missing", layer.detail)
            for layer in examination.layers
        ],
    )
    write(STDOUT, "\n")
    output.print_table(
        ("policy", "runs here", "walls that are weaker here"),
        [
            (
                verdict.policy,
                "yes" if verdict.runs else "no",
                ", ".join(wall for wall, _ in verdict.weaker) or ("none" if verdict.runs else ""),
            )
            for verdict in examination.verdicts
        ],
    )
    write(STDOUT, "\n")
    output.print_table(
        ("path", "works here", "sandbox to result"),
        [
            (
                check.path,
                *(("yes", f"{check.duration_s * 1000:.0f} ms") if check.ok else ("no", "")),
            )
            for check in examination.paths
        ],
    )
    write(STDOUT, "\n")
    output.print_table(
        ("language", "runs here", "by"),
        [
            (language.language, "yes" if language.path else "no", language.path or "")
            for language in examination.languages
        ],
    )
    write(STDOUT, "\n" + "".join(f"{line}\n" for line in _advice(examination)))
    write(STDOUT, f"{one_line(_live(examination.live))}\n")


def _advice(examination: "HostCheck") -> list[str]:
    """Return the hints. They stay outside the tables, so that a command can be copied as a line."""
    lines = []
    for layer in examination.layers:
        if not layer.found:
            lines.append(f"missing: {layer.name}: {one_line(layer.cause or layer.detail)}")
            lines += [f"   hint: {one_line(layer.remedy)}"] if layer.remedy else []
    weaker = {wall: means for verdict in examination.verdicts for wall, means in verdict.weaker}
    lines += [f" weaker: {wall}: {means}" for wall, means in weaker.items()]
    for verdict in examination.verdicts:
        if verdict.cause:
            lines.append(f"  no {verdict.policy}: {one_line(verdict.cause)}")
        if verdict.lacks:
            lines.append(
                f"   note: {verdict.policy} preloads {', '.join(verdict.lacks)}: not installed"
            )
    for language in examination.languages:
        if language.remedy is not None:
            lines.append(f"     no {language.language}: {language.remedy}")
    if examination.live.ok:  # without a working cold path, a slow start is not the problem
        for check in examination.paths:
            if check.error is not None:
                lines.append(f"   slow: no {check.path}: {one_line(check.error.message)}")
    return [*lines, ""] if lines else []


def _live(live: "Live") -> str:
    if live.error is not None:
        return f"live check: failed: {live.error.message}"
    assert live.receipt is not None
    return f"live check: 1 + 1 = 2 in {live.duration_s:.2f} s; {_summary(live.receipt)}"


def _summary(receipt: "Receipt") -> str:
    """Return the receipt as a sentence: the restrictions that Linux reports as in force."""
    limits = ", ".join(
        f"{name} {value}" for name, value in receipt.limits.items() if value not in (None, [])
    )
    return (
        f"host uid {receipt.host_uid}, namespaces {' '.join(receipt.namespaces)}, "
        f"no capabilities, seccomp {' + '.join(receipt.seccomp)}, "
        f"Landlock ABI {receipt.landlock_abi}, network {receipt.network}, "
        f"cgroup limits {limits or 'none'}"
    )
