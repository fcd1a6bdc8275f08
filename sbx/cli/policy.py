"""`sbx policy`: list, show, check and learn policies."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sbx.cli import output, terminal
from sbx.cli.exits import Exit
from sbx.cli.run import (
    CodeOption,
    FileArgument,
    LanguageOption,
    UploadOption,
    check_names,
    code_of,
    text_of,
)
from sbx.cli.script import PythonScript, language_for
from sbx.errors import Conflict, NotFound, SbxError

if TYPE_CHECKING:
    from sbx.policy import Policy, Problem
    from sbx.protocol.languages import Language
    from sbx.protocol.runs import Run
    from sbx.runtime.learning import LearnedPolicy
    from sbx.runtime.sandbox import AsyncSandbox

app = typer.Typer(help="List, show, check and learn policies.", rich_markup_mode=None)

_Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


@app.command("list")
def list_policies(as_json: _Json = False) -> None:
    """List the policies that you can name: the policies of sbx first, then your own."""
    from sbx.policy import available

    entries = available(_search())
    if as_json:
        policies = [
            {
                "name": entry.name,
                "path": str(entry.path),
                "description": entry.description,
                "extends": entry.extends,
                "aliases": list(entry.aliases),
                "problem": entry.problem,
            }
            for entry in entries
        ]
        output.document({"policies": policies})
        return
    rows = [
        (
            ", ".join((entry.name, *entry.aliases)),
            entry.extends or "",
            f"cannot be used: {entry.problem}" if entry.problem else entry.description,
        )
        for entry in entries
    ]
    output.print_table(("policy", "extends", "its purpose"), rows)


@app.command()
def show(
    name: Annotated[str, typer.Argument(help="The name or the file of a policy.", metavar="NAME")],
    as_json: _Json = False,
) -> None:
    """Print the complete policy with every value, as the text of a policy file."""
    from sbx.policy import describe, fingerprint, load, reference
    from sbx.settings_files import to_toml

    policy = load(reference(name), search=_search())
    values = describe(policy)
    if as_json:
        output.document({**values, "fingerprint": fingerprint(policy)})
        return
    del values["name"]  # the name of the file names the policy
    text = f"# {policy.name}, fingerprint {fingerprint(policy)}\n{to_toml(values)}"
    terminal.write(terminal.STDOUT, text)


@app.command()
def check(
    files: Annotated[list[Path], typer.Argument(help="Policy files.", metavar="FILE…")],
    as_json: _Json = False,
) -> int:
    """Check policy files. List every problem with file, line or key, and the right word."""
    checked = [(file, _problems(file)) for file in files]
    if as_json:
        output.document(
            {
                "files": [
                    {
                        "file": str(file),
                        "ok": not problems,
                        "problems": [problem.to_dict() for problem in problems],
                    }
                    for file, problems in checked
                ]
            }
        )
    else:
        for file, problems in checked:
            _print(file, problems)
            for text in _notes_here(file) if not problems else ():
                output.note(f"{file}: {text}")
    return Exit.USAGE if any(problems for _, problems in checked) else Exit.OK


@app.command()
def learn(
    file: FileArgument = None,
    code: CodeOption = None,
    language: LanguageOption = None,
    policy: Annotated[
        str, typer.Option(help="The policy that the learned one extends.", metavar="POLICY")
    ] = "default",
    upload: UploadOption = None,
    allow_private: Annotated[
        bool,
        typer.Option(help="Also allow servers of this host and of private networks."),
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Write the policy to this new file.", metavar="FILE.toml")
    ] = None,
    as_json: _Json = False,
) -> int:
    """Print the narrowest policy with which a task succeeds.

    The task runs several times, each time in a new sandbox: first until none of its requests is
    refused, then with narrower policies. Its requests reach the servers each time.
    """
    import asyncio

    from sbx.policy import load, reference
    from sbx.settings_files import to_toml

    if out is not None and out.exists():
        raise Conflict(f"{out} exists", hint="name a new file")
    base = load(reference(policy), search=_search())
    check_names(upload or [])
    source, from_stdin = code_of(file, code)
    script = language_for(language, file, source, shell=False)
    path = None if file is None or from_stdin or script is not None else Path(file)
    learned = asyncio.run(_learned(base, source, script, path, upload or (), allow_private))
    last = learned.last
    if learned.policy is None:
        failure = last.run.error
        reason = f"{failure.name}: {failure.value}" if failure is not None else last.run.text
        output.failure(
            "the task fails with a permissive policy too: " + terminal.one_line(reason[:500]),
            "run it with sbx run; servers of private networks need --allow-private"
            if last.private
            else "run it with sbx run to see its output",
        )
        return Exit.FAILED
    name = base.name
    table = {"schema": 1, "extends": name, "description": f"Learned from {file or 'code'}"}
    table |= learned.changes
    if as_json:
        output.document({"policy": table, "runs": learned.runs})
        return Exit.OK
    if out is None:
        terminal.write(terminal.STDOUT, to_toml(table))
    else:
        out.write_text(to_toml(table))
        output.note(f"saved: {out}")
    return Exit.OK


async def _learned(
    base: "Policy",
    source: bytes,
    script: "Language | None",
    path: Path | None,
    upload: Sequence[Path],
    allow_private: bool,
) -> "LearnedPolicy":
    from sbx.run_methods import RunCall
    from sbx.runtime.learning import learn
    from sbx.runtime.runtime import Runtime
    from sbx.runtime.settings import Settings

    async def task(box: "AsyncSandbox") -> "Run":
        for each in upload:
            await box.uploads.put(each)
        if script is not None:
            return await box.run_script(text_of(source, str(path)), script)
        copied = PythonScript.of(path, source, None) if path is not None else None
        if copied is not None:
            await copied.copy(box)
        name = copied.path if copied is not None else "-c"
        return await box.run_call(RunCall("file", name, source=source))

    async with Runtime(Settings(fast_path=False)) as runtime:
        return await learn(
            runtime,
            base,
            task,
            python=script is None,
            allow_private=allow_private,
            on_progress=output.note,
        )


def _problems(file: Path) -> list["Problem"]:
    from sbx.policy import Problem
    from sbx.policy import check as check_file

    try:
        return check_file(file, search=_search())
    except NotFound as error:
        hint = error.hint or "name a file; sbx policy show NAME shows a policy by its name"
        return [Problem("no such file", file, hint=hint)]
    except SbxError as error:  # the problem is in a directory of policies, not in this file
        return [Problem(error.message, hint=error.hint)]


def _notes_here(file: Path) -> list[str]:
    """Return what a valid policy has no effect for, or lacks, on this host."""
    from sbx.policy import load

    policy = load(file, search=_search())
    notes = _missing_here(policy)
    if names := policy.network.allow_private:
        import asyncio

        from sbx.egress.addresses import refused_names
        from sbx.egress.resolver import system_lookup

        notes += asyncio.run(refused_names(names, system_lookup))
    return notes


def _missing_here(policy: "Policy") -> list[str]:
    """Return what this host lacks for a policy; another host may have it."""
    from sbx.doctor.host_check import lacking
    from sbx.environments.directory import Environments
    from sbx.runtime.settings import Settings

    name = policy.environment
    if name is not None:
        try:
            Environments(Settings().environments).interpreter(name, policy.name)
        except SbxError as error:
            return [f"{error.message}; {error.hint}"]
        return []
    if policy.interpreter is not None:
        return []
    return [f"preload: {module} is not installed here" for module in lacking(policy.preload)]


def _print(file: Path, problems: list["Problem"]) -> None:
    lines = [] if problems else [f"{file}: ok"]
    for problem in problems:
        lines.append(str(problem))
        if problem.hint:
            lines.append(f"  hint: {problem.hint}")
    text = "".join(f"{terminal.one_line(line) if line[0] != ' ' else line}\n" for line in lines)
    terminal.write(terminal.STDOUT, text)


def _search() -> tuple[Path, ...]:
    from sbx.runtime.settings import Settings

    return Settings().policy_dirs
