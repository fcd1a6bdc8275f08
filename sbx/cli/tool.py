"""`sbx tool`: register, list, test and remove external tools of agents."""

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer

from sbx.cli import connect, exits, output
from sbx.cli.connect import ask
from sbx.cli.terminal import one_line
from sbx.errors import BadRequest

if TYPE_CHECKING:
    from sbx.agent.external.registry import SourceStatus
    from sbx.agent.external.source import ToolSource

app = typer.Typer(
    help="External tools of agents: MCP servers, HTTP endpoints, OpenAPI documents, and Python "
    "functions. Each has a file in the directory of tools.",
    rich_markup_mode=None,
)
Name = Annotated[str, typer.Argument(help="The name of a source of tools.", metavar="NAME")]
_SHOWN = 60  # characters of a description
_HEADS = ("source", "kind", "approval", "state", "tools")


@app.command()
def add(
    name: Name,
    file: Annotated[
        Path | None, typer.Option(help="A file with all fields of a source.", metavar="FILE")
    ] = None,
    command: Annotated[
        str | None,
        typer.Option(help="Start this MCP server, and use its streams.", metavar="COMMAND"),
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="Use the MCP server at this address.", metavar="URL")
    ] = None,
    openapi: Annotated[
        Path | None,
        typer.Option(help="Use the operations of an OpenAPI 3 document.", metavar="FILE"),
    ] = None,
    python: Annotated[
        str | None,
        typer.Option(help="Use a function of a module of this host.", metavar="MODULE:FUNCTION"),
    ] = None,
    approval: Annotated[
        Literal["allow", "ask", "deny"] | None,
        typer.Option(help="Whether a person must approve each call; default: ask."),
    ] = None,
    agent: Annotated[
        list[str] | None,
        typer.Option(help="Only this agent has the tools. Repeatable.", metavar="AGENT"),
    ] = None,
    connect_to: connect.Address = None,
    key: connect.Key = None,
    as_json: connect.Json = False,
) -> None:
    """Register a source of tools, with one of --file, --command, --url, --openapi, --python.

    The tools of NAME are called NAME_TOOL, or NAME if there is only one. What a source may do, its
    secrets and its limits are fields of its file; docs/tools.md has them all.
    """
    from sbx.agent.external.source import check_name

    fields: dict[str, Any] = {}
    if command is not None:
        fields["mcp"] = {"command": shlex.split(command)}
    if url is not None:
        fields["mcp"] = {"url": url}
    if openapi is not None:
        fields["openapi"] = {"document": str(openapi.absolute())}
    if python is not None:
        fields["python"] = {"function": python}
    ways = (file, command, url, openapi, python)
    if sum(way is not None for way in ways) != 1:
        raise BadRequest(
            "a source needs exactly one of --file, --command, --url, --openapi and --python",
            hint="sbx tool add --help",
        )
    if approval is not None:
        fields["approval"] = approval
    if agent:
        fields["agents"] = agent
    source = _source(check_name(name), file, fields)
    if connect_to is not None:
        body = source.model_dump(mode="json", exclude_defaults=True)
        added = ask(connect_to, key, lambda client: client.add_tool(name, body))
    else:
        added = _local(_add, name, source)
    if as_json:
        output.document(added)
    else:
        tools = ", ".join(added["tools"]) or "none yet"
        output.note(f"added {name}: its tools are {tools}")
        if added["problem"]:
            output.note(f"it is not ready: {one_line(added['problem'])}")


@app.command("list")
def list_sources(
    connect_to: connect.Address = None,
    key: connect.Key = None,
    as_json: connect.Json = False,
) -> None:
    """List the sources of tools: those of this user, which are opened for it, or of a service."""
    if connect_to is not None:
        sources = ask(connect_to, key, lambda client: client.tool_sources())
    else:
        sources = _local(_list)
    if as_json:
        output.document({"sources": sources})
        return
    empty = "nothing is registered; sbx tool add registers a source of tools"
    output.print_table(_HEADS, [_row(each) for each in sources], empty=empty)


@app.command("test")
def try_out(
    name: Annotated[str, typer.Argument(help="The name of a source, or its file.", metavar="NAME")],
    call: Annotated[str | None, typer.Option(help="Call this tool.", metavar="TOOL")] = None,
    arguments: Annotated[
        str, typer.Option(help="The arguments of the call, a JSON object.", metavar="JSON")
    ] = "{}",
    as_json: connect.Json = False,
) -> int:
    """Open a source here and list its tools, or call one of them without an agent.

    \b
    exit codes:
      0    the source has tools, or the call succeeded
      1    the source has no tools, or the call failed
    """
    from sbx.agent.external.registry import no_source
    from sbx.agent.external.source import read_source

    if "/" in name or name.endswith(".toml"):
        path = Path(name).absolute()
    else:
        path = _directory() / f"{name}.toml"
    if not path.exists():
        raise no_source(path.stem)
    read_source(path)  # names each problem of the file
    document = _local(_try_out, path, call, arguments)
    if as_json:
        output.document(document)
    elif call is not None:
        output.text(document["result"])
    else:
        tools = document["tools"]
        rows = [(each["name"], one_line(each["description"])[:_SHOWN]) for each in tools]
        output.print_table(("tool", "its description"), rows)
    return exits.Exit.OK if document["ok"] else exits.Exit.FAILED


@app.command()
def rm(
    name: Name,
    connect_to: connect.Address = None,
    key: connect.Key = None,
) -> None:
    """Remove a source of tools, and end its server."""
    if connect_to is not None:
        ask(connect_to, key, lambda client: client.remove_tool(name))
    else:
        _local(_remove, name)
    output.note(f"removed {name}")


# -- without a service ----------------------------------------------------------------------------


def _directory() -> Path:
    from sbx.runtime.settings import Settings

    return Settings().tools_dir


def _local(work: Any, *arguments: Any) -> Any:
    import asyncio  # a lazy import keeps `sbx --help` fast

    return asyncio.run(work(*arguments))


def _source(name: str, file: Path | None, fields: dict[str, Any]) -> "ToolSource":
    """Return a source of a file or of options. Raise BadRequest `invalid_tool`."""
    from sbx.agent.external.source import parse_source, read_source
    from sbx.settings_files import to_toml

    if file is None:
        return parse_source(to_toml(fields), name)
    source = read_source(file.absolute())
    return source.model_copy(update=fields) if fields else source


async def _add(name: str, source: "ToolSource") -> dict[str, Any]:
    from sbx.agent.external.registry import ExternalTools

    async with ExternalTools(_directory(), only=name) as external:
        await external.add(name, source)
        await external.tools((), lambda _: True)  # waits for a server
        return _document((await external.status())[0])


async def _list() -> list[dict[str, Any]]:
    from sbx.agent.external.registry import ExternalTools

    async with ExternalTools(_directory()) as external:
        await external.tools((), lambda _: True)
        return [_document(status) for status in await external.status()]


async def _try_out(path: Path, call: str | None, arguments: str) -> dict[str, Any]:
    from sbx.agent.external.registry import ExternalTools
    from sbx.agent.messages import ToolCall
    from sbx.agent.tools.execution import unheard
    from sbx.agent.tools.registry import Tools
    from sbx.agent.tools.results import failed
    from sbx.agent.tools.tool import ToolCallRequest, ToolResult
    from sbx.errors import SbxError

    async with ExternalTools(path.parent, only=path.stem) as external:
        tools = await external.tools((), lambda _: True)
        (status,) = await external.status()
        if call is None:
            definitions = [
                {
                    "name": tool.name,
                    "description": tool.definition.description,
                    "parameters": dict(tool.definition.parameters),
                }
                for tool in tools
            ]
            if status.problem is not None:
                output.note(f"it is not ready: {one_line(status.problem)}")
            return {"ok": bool(tools) and status.problem is None, "tools": definitions}
        registry = Tools(tools)
        tool = registry.get(call)
        parsed = registry.parse(ToolCall("call-test", call, arguments))
        if isinstance(parsed, ToolResult):
            return {"ok": False, "result": parsed.text, "images": 0}
        # Without a sandbox: a Python function that uses one fails here.
        request = ToolCallRequest("call-test", cast("Any", None), unheard)
        try:
            output_of_tool = await tool.act(request, parsed)
        except SbxError as error:
            output_of_tool = failed(error)
        assert isinstance(output_of_tool, ToolResult)
        result = output_of_tool
        return {"ok": not result.is_error, "result": result.text, "images": len(result.images)}


async def _remove(name: str) -> None:
    from sbx.agent.external.registry import ExternalTools, no_source
    from sbx.agent.external.source import source_files

    directory = _directory()
    if name not in source_files(directory):
        raise no_source(name)
    async with ExternalTools(directory, only="") as external:
        await external.remove(name)


def _document(status: "SourceStatus") -> dict[str, Any]:
    source = status.source
    return {
        "name": status.name,
        "state": status.state,
        "problem": status.problem,
        "tools": [tool.name for tool in status.tools],
        "source": None if source is None else json.loads(source.model_dump_json()),
    }


def _row(entry: dict[str, Any]) -> tuple[str, ...]:
    source = entry["source"] or {}
    kinds = ("mcp", "http", "openapi", "python")
    kind = next((kind for kind in kinds if source.get(kind)), "")
    problem = entry["problem"]
    state = entry["state"] if problem is None else f"{entry['state']}: {one_line(problem)}"
    names = ", ".join(entry["tools"])
    return entry["name"], kind, source.get("approval", ""), state, names
