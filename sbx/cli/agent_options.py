"""The options of `sbx agent`, `sbx chat` and `sbx mcp`: the model and the sandbox of an agent."""

import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sbx.cli import exits, output
from sbx.cli.local_runtime import local_runtime
from sbx.cli.terminal import STDOUT, one_line, write
from sbx.errors import BadRequest, NotFound, SbxError

if TYPE_CHECKING:
    from sbx.agent.delegation import OpenSandbox
    from sbx.agent.models import Model
    from sbx.agent.profile import AgentProfile
    from sbx.agent.sandbox import ToolSandbox
    from sbx.agent.settings import AgentSettings
    from sbx.agent.tools.tool import Tool
    from sbx.runtime.runtime import Runtime

ModelName = Annotated[
    str | None,
    typer.Option("--model", help="A model of the provider; default: MODEL_NAME.", metavar="NAME"),
]
MaxSteps = Annotated[
    int | None,
    typer.Option(
        "--max-steps",
        min=1,
        help="The step limit: answers of the model; default: MAX_STEPS.",
        metavar="N",
    ),
]
Replay = Annotated[
    Path | None,
    typer.Option(
        "--replay",
        help="Replay recorded answers instead of asking a model; needs no key.",
        metavar="FILE",
    ),
]
Record = Annotated[
    Path | None,
    typer.Option("--record", help="Record the model's answers, for --replay.", metavar="FILE"),
]
Profile = Annotated[
    str | None,
    typer.Option(
        "--profile",
        help="The profile of the agent: its id, or a file; sbx agent list shows them.",
        metavar="AGENT",
    ),
]
Policy = Annotated[
    str | None,
    typer.Option(
        "--policy",
        help="The name or the file of a policy; for a service, a name. Default: SANDBOX_IMAGE, "
        "else default.",
        metavar="POLICY",
    ),
]
Connect = Annotated[
    str | None,
    typer.Option(
        "--connect",
        envvar="SBX_SOCKET",
        help="Use a sandbox in a service: its socket, or http://HOST:PORT. Default: "
        "SANDBOX_DOMAIN, else a sandbox in this process.",
        metavar="ADDR",
    ),
]
Key = Annotated[
    str | None,
    typer.Option(
        "--key",
        help="A key or a token for that service. Prefer SBX_KEY: other users can see the "
        "options of a command.",
        metavar="KEY",
    ),
]
EnvFile = Annotated[
    Path | None,
    typer.Option(
        "--env-file",
        help="Take all settings of this file, such as .env. The .env of the working directory"
        " otherwise sets limits only: code in a sandbox may have written it.",
        metavar="FILE",
    ),
]
_CONVERSATION = "default"
_ENDING_S = 10.0


def settings(
    *,
    model: str | None = None,
    max_steps: int | None = None,
    policy: str | None = None,
    connect: str | None = None,
    key: str | None = None,
    env_file: Path | None = None,
    profile: "AgentProfile | None" = None,
) -> "AgentSettings":
    """Return the settings of an agent. These options override the profile, and both override all
    other sources. Print which settings of `.env` are ignored.

    Raise the errors of `read_agent_settings`.
    """
    from sbx.agent.settings import read_agent_settings

    if env_file is None:
        note_ignored()
    if profile is not None:
        model = model or profile.model.name
        max_steps = max_steps or profile.limits.max_steps
        policy = policy or profile.policy
    return read_agent_settings(
        {
            "model_name": model,
            "max_steps": max_steps,
            "sandbox_image": policy,
            "sandbox_domain": connect,
            "sandbox_api_key": key,
        },
        env_file=env_file,
    )


def note_ignored() -> None:
    """Print the settings in `.env` of the working directory that are not obeyed, and the option
    that takes them."""
    from sbx.agent.settings import ignored_here

    if names := ignored_here():
        output.note(
            f".env of this directory does not set {', '.join(names)}: code in a project can write"
            " it. --env-file .env takes all its settings"
        )


def profile_directory() -> Path:
    from sbx.runtime.settings import Settings

    return Settings().agents_dir


def profile_of(name: str | None) -> "AgentProfile":
    """Return the profile with this name, or in this file; an empty one without a name.

    Raise NotFound `agent_not_found`, BadRequest `invalid_profile`.
    """
    from sbx.agent.profile import NO_PROFILE, profile_files, read_profile

    if name is None:
        return NO_PROFILE
    if "/" in name or name.endswith(".toml"):
        return read_profile(Path(name))
    directory = profile_directory()
    if name not in profile_files(directory):
        raise no_profile(name, f" in {directory}")
    return read_profile(directory / f"{name}.toml")


def check_files(files: "Sequence[Path]", read: "Callable[[Path], object]", *, as_json: bool) -> int:
    """Read files, print every problem of each, and return the exit code."""
    checked: list[tuple[Path, list[str]]] = []
    for file in files:
        try:
            read(file)
            checked.append((file, []))
        except BadRequest as error:
            checked.append((file, (error.details or {}).get("problems") or [error.message]))
    if as_json:
        documents = [
            {"file": str(file), "ok": not problems, "problems": problems}
            for file, problems in checked
        ]
        output.document({"files": documents})
    for file, problems in checked if not as_json else ():
        lines = [f"{file}: {problem}" for problem in problems] or [f"{file}: ok"]
        write(STDOUT, "".join(f"{one_line(line)}\n" for line in lines))
    return exits.Exit.USAGE if any(problems for _, problems in checked) else exits.Exit.OK


def agent_id_of(name: str | None) -> str | None:
    """Return the id of the agent whose profile has this name or file."""
    return None if name is None else Path(name).name.removesuffix(".toml")


@asynccontextmanager
async def external_tools(
    agent_id: str | None, profile: "AgentProfile"
) -> "AsyncIterator[Sequence[Tool]]":
    """Yield the external tools of this user that an agent has."""
    from sbx.agent.external.registry import ExternalTools
    from sbx.runtime.settings import Settings

    async with ExternalTools(Settings().tools_dir) as external:
        yield await external.tools(
            (agent_id,), lambda source: source.allows(None, None, agent_id), profile.external
        )


def no_profile(name: str, place: str = "") -> NotFound:
    return NotFound(
        f"the agent {name[:80]!r} has no profile{place}",
        code="agent_not_found",
        hint="sbx agent list shows the profiles",
    )


def model_of(
    settings: "AgentSettings",
    replay: Path | None,
    record: Path | None,
    options: Mapping[str, Any] | None = None,
) -> "Model":
    """Return the model. The caller closes it.

    Raise BadRequest `missing_setting`, which names the setting, NotFound for a missing recording,
    and Unavailable `extra_missing`.
    """
    from sbx.agent.models.replay import ReplayModel

    if replay is not None:
        return ReplayModel.load(replay)
    from sbx.agent.models.factory import make_model

    if (server := settings.other_server) is not None:
        output.note(f"the model's server is {one_line(server)}")
    model = make_model(settings, options=options)
    if record is None:
        return model
    return _recorded(model, record)


def _recorded(model: "Model", path: Path) -> "Model":
    """Return a model whose answers are written to a file when it is closed.

    Raise BadRequest for a path that cannot be written, before the first request.
    """
    from sbx.agent.models.replay import Recorder

    def write() -> None:
        try:
            recorder.save(path)
        except OSError as error:
            raise BadRequest(
                f"{path} cannot be written: {error.strerror}",
                hint="name a file that you can write for --record",
            ) from error

    class RecordedModel(Recorder):
        async def close(self) -> None:
            write()
            await super().close()

    recorder = RecordedModel(model)
    write()
    return recorder


@asynccontextmanager
async def sandboxes(
    policy: str, options: Mapping[str, Any], address: str | None, key: str | None
) -> "AsyncIterator[OpenSandbox]":
    """Yield a function that opens a new sandbox, in this process or in the service at `address`,
    and deletes it on exit. `options` are those of `narrowing.sandbox_options`. Raise as
    `Runtime.create` or `Client.create`."""
    if address is not None:
        yield lambda: _there(policy, options, address, key)
        return
    async with local_runtime(policy) as runtime:
        yield lambda: _box(runtime, policy, options)


@asynccontextmanager
async def new_sandbox(
    policy: str, options: Mapping[str, Any], address: str | None, key: str | None
) -> "AsyncIterator[ToolSandbox]":
    """Yield one new sandbox; see `sandboxes`."""
    async with sandboxes(policy, options, address, key) as open_sandbox, open_sandbox() as sandbox:
        yield sandbox


def key_of(settings: "AgentSettings") -> str | None:
    """Return the service's key in plain text."""
    key = settings.sandbox_api_key
    return None if key is None else key.get_secret_value()


@asynccontextmanager
async def _box(
    runtime: "Runtime", policy: str, options: Mapping[str, Any]
) -> "AsyncIterator[ToolSandbox]":
    from sbx.policy import reference

    async with await runtime.create(reference(policy), **options) as box:
        yield box.conversation(_CONVERSATION)


@asynccontextmanager
async def _there(
    policy: str, options: Mapping[str, Any], connect: str, key: str | None
) -> "AsyncIterator[ToolSandbox]":
    import asyncio  # a lazy import keeps `sbx --help` fast

    from sbx.client import Client

    async with Client(connect, key=key) as client:
        box = await client.create(policy, **options)
        try:
            yield box.conversation(_CONVERSATION)
        finally:
            # A service that exited has ended the sandbox itself.
            with suppress(SbxError, TimeoutError):
                async with asyncio.timeout(_ENDING_S):
                    await box.close()


@asynccontextmanager
async def existing_sandbox(
    address: str, key: str | None, sandbox: str, conversation: str
) -> "AsyncIterator[ToolSandbox]":
    """Yield a conversation of a sandbox in a service, which stays. Raise NotFound."""
    from sbx.client import Client

    async with Client(address, key=key) as client:
        box = client.sandbox(sandbox)
        await box.info()
        yield box.conversation(conversation)


def chat_directory() -> Path:
    """Return the directory of the conversations: SBX_CHAT_DIR, or one in the user's data
    directory.

    Raise RuntimeError for a user without a home.
    """
    from platformdirs import user_data_path

    override = os.environ.get("SBX_CHAT_DIR")
    return Path(override) if override else user_data_path("sbx") / "chat"
