"""`sbx chat`: a conversation with an agent at the terminal."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sbx.cli import agent_options, exits, narrowing, output
from sbx.cli.terminal import STDOUT, one_line, write
from sbx.errors import BadRequest

if TYPE_CHECKING:
    from sbx.protocol.changes import ChangesMode


def chat(
    conversation: Annotated[
        str | None,
        typer.Argument(help="With --resume or --rm: the id of the conversation.", metavar="[ID]"),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Continue a conversation; without ID, the last one."),
    ] = False,
    project: Annotated[
        Path | None,
        typer.Option(
            help="Work in this directory, which is then /workspace. Changes of files are shown and "
            "need your approval.",
            metavar="DIR",
        ),
    ] = None,
    changes: Annotated[
        str | None,
        typer.Option(
            help="In a project: ask about changes of files (the default), or allow them. The "
            "setting is stored with the conversation.",
            metavar="ask|allow",
        ),
    ] = None,
    ask_outside: Annotated[
        list[str] | None,
        typer.Option(
            "--ask-outside",
            help="In a project: do not ask about changes below this directory of the project. "
            'Repeatable; "" clears the list.',
            metavar="DIR",
        ),
    ] = None,
    budget: Annotated[
        list[str] | None,
        typer.Option(
            "--change-budget",
            help="In a project: do not ask about a call that changes at most this many files below "
            "a directory and removes none; DIR:FILES:deletions also allows removals. Repeatable; "
            '"" clears the list.',
            metavar="DIR:FILES",
        ),
    ] = None,
    ask_commands: Annotated[
        bool | None,
        typer.Option(
            "--ask-commands/--no-ask-commands",
            help="In a project: ask before each command, or about the changes that it makes (the "
            "default). The setting is stored with the project.",
        ),
    ] = None,
    no_sandbox: Annotated[
        bool,
        typer.Option(
            "--no-sandbox",
            help="In a project: run on this host itself, unrestricted, as you. Only with "
            "SBX_ALLOW_HOST_MODE=1.",
        ),
    ] = False,
    profile: agent_options.Profile = None,
    policy: agent_options.Policy = None,
    memory: narrowing.Memory = None,
    cpus: narrowing.Cpus = None,
    network_allow: narrowing.NetworkAllow = None,
    env: narrowing.Env = None,
    model: agent_options.ModelName = None,
    max_steps: agent_options.MaxSteps = None,
    connect: agent_options.Connect = None,
    key: agent_options.Key = None,
    env_file: agent_options.EnvFile = None,
    replay: agent_options.Replay = None,
    record: agent_options.Record = None,
    data_dir: Annotated[
        Path | None,
        typer.Option(
            "--data-dir",
            envvar="SBX_CHAT_DIR",
            help="The directory of the conversations; default: in your data directory.",
            metavar="DIR",
        ),
    ] = None,
    as_list: Annotated[bool, typer.Option("--list", help="List the conversations.")] = False,
    rm: Annotated[bool, typer.Option("--rm", help="Delete a conversation and its files.")] = False,
) -> int:
    """Talk with an agent that runs code in a sandbox, and reads and writes files there.

    Messages and files are stored; variables end with the command. Ctrl-C aborts the current answer
    and keeps the conversation. Ctrl-D ends the command. /help lists the commands. If stdin is not a
    terminal, each line is a message, and the exit code is that of the last answer, as for
    sbx agent.

    \b
    Environment variables, or a file that --env-file names, select the model:
      MODEL_PROVIDER  openai (the default; any server for chat completions) or anthropic
      MODEL_NAME      the model
      API_KEY         its key, which never reaches the sandbox
      BASE_URL        its address, if not the provider's default
    """
    import asyncio

    directory = data_dir or agent_options.chat_directory()
    if conversation is not None and not (resume or rm):
        raise BadRequest(
            f"unexpected argument {conversation}",
            hint="sbx chat --resume ID; type messages after the start",
        )
    if rm and conversation is None:
        raise BadRequest(
            "--rm needs the id of a conversation",
            hint="sbx chat --rm ID; sbx chat --list shows them",
        )
    if as_list:
        return _list(directory)
    if no_sandbox and project is None:
        raise BadRequest(
            "--no-sandbox needs a project", hint="name its directory with --project DIR"
        )

    if ask_commands is not None and project is None:
        raise BadRequest("--ask-commands needs a project", hint="name it with --project DIR")
    about_changes = (changes, ask_outside, budget)
    if any(each is not None for each in about_changes) and project is None and not resume:
        raise BadRequest(
            "--changes, --ask-outside and --change-budget need a project",
            hint="name it with --project DIR",
        )

    from sbx.cli.chat_loop import converse
    from sbx.cli.chat_store import ChatSelection, removed
    from sbx.cli.quarantine import offer, quarantine_of
    from sbx.protocol.changes import checked_budgets, checked_prefixes, parse_budget
    from sbx.workspace import quarantine

    chosen = agent_options.profile_of(profile)
    settings = agent_options.settings(
        model=model,
        max_steps=max_steps,
        policy=policy,
        connect=connect,
        key=key,
        env_file=env_file,
        profile=chosen,
    )
    options = ChatSelection(
        directory=directory,
        resume=(conversation or "") if resume or rm else None,
        policy=settings.sandbox_image,
        project=project and Path(os.path.realpath(project)),
        sandboxed=not no_sandbox,
        connect=settings.sandbox_domain,
        key=agent_options.key_of(settings),
        approval_timeout_s=settings.approval_timeout,
        changes=changes_mode(changes),
        profile=chosen,
        agent_id=agent_options.agent_id_of(profile),
        sandbox=narrowing.sandbox_options(
            memory=memory, cpus=cpus, network_allow=network_allow, env=env
        ),
        ask_outside=None if ask_outside is None else checked_prefixes(filter(None, ask_outside)),
        budgets=None
        if budget is None
        else checked_budgets(parse_budget(each) for each in budget if each),
        ask_commands=ask_commands,
    )
    if rm:
        asyncio.run(removed(options))
        return exits.Exit.OK
    chat_model = agent_options.model_of(settings, replay, record, chosen.model.options)
    store = quarantine_of(directory)
    before = {item.id for item in quarantine.items(store)}
    end = asyncio.run(converse(options, chat_model, settings.max_steps))
    # Only one chat at a time uses the directory, so these items belong to this chat.
    new = [item for item in quarantine.items(store) if item.id not in before]
    if end.asks_to_restore:
        offer(new, store)
    if data_dir is not None and any(item in new for item in quarantine.items(store)):
        output.note(f"files are in quarantine: sbx quarantine list --data-dir {data_dir}")
    return exits.Exit.OK if end.last is None else exits.for_agent(end.last)


def changes_mode(changes: str | None) -> "ChangesMode | None":
    match changes:
        case None | "ask" | "allow":
            return changes
    raise BadRequest(f"--changes must be ask or allow, not {changes[:80]!r}")


def _list(directory: Path) -> int:
    import asyncio

    from sbx.cli.chat_store import listed

    for row, first in asyncio.run(listed(directory)):
        write(
            STDOUT,
            f"{row.conversation_id}  {output.since(row.last_used_at)}  {one_line(first)[:80]}\n",
        )
    return exits.Exit.OK
