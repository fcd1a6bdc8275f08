"""The client without asyncio: the same names, over an event loop in a separate thread."""

import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Self

from sbx import errors
from sbx.aio import Loop
from sbx.client.client import Client
from sbx.client.files import RemoteFiles, RemoteUploads
from sbx.client.sandbox import RemoteSandbox
from sbx.sync.blocking import (
    BlockingConversation,
    BlockingFiles,
    BlockingSandbox,
    BlockingUploads,
)
from sbx.sync.methods import Attribute, Blocking, Part, call, each, wrap


class ConnectedFiles(BlockingFiles):
    """The files of a sandbox in a service, and their way to and from this host."""

    upload = call(RemoteFiles.upload)
    download = call(RemoteFiles.download)


class ConnectedUploads(BlockingUploads):
    """The uploads of a sandbox in a service."""

    download = call(RemoteUploads.download)


class ConnectedConversation(BlockingConversation):
    """One conversation of a sandbox in a service."""

    files = Part(ConnectedFiles)
    uploads = Part(ConnectedUploads)


class ConnectedSandbox(BlockingSandbox, ConnectedConversation):
    """A sandbox of a service; the end of `with` closes it, and so deletes it."""

    policy = Attribute[str | None]()  # its name, if this client created the sandbox
    info = call(RemoteSandbox.info)

    def conversation(self, name: str) -> ConnectedConversation:
        """Return the conversation `name`; its first use creates it."""
        return ConnectedConversation(self._loop, self._named(name))


class BlockingClient(Blocking):
    """A service: `with BlockingClient() as client`. See `Client` for arguments and errors. Calls
    may come from any thread."""

    def __init__(
        self,
        connect: str | os.PathLike[str] | None = None,
        *,
        key: str | None = None,
        timeout: float = 30.0,
        retries: int = 3,
    ) -> None:
        client = Client(connect, key=key, timeout=timeout, retries=retries)
        self.loop = Loop("sbx-client")
        super().__init__(self.loop, client)
        self._created: set[RemoteSandbox] = set()

    address = Attribute[str]()

    create = wrap(Client.create, ConnectedSandbox)
    get = call(Client.get)
    sandboxes = call(Client.sandboxes)
    inspect = call(Client.inspect)
    extend = call(Client.extend)
    keepalive = call(Client.keepalive)
    stop = call(Client.stop)
    resume = call(Client.resume)
    delete = call(Client.delete)

    history = call(Client.history)
    events = call(Client.events)
    follow_events = each(Client.follow_events)
    run_events = each(Client.run_events)
    interrupt_run = call(Client.interrupt_run)

    workspaces = call(Client.workspaces)
    create_workspace = call(Client.create_workspace)
    delete_workspace = call(Client.delete_workspace)
    ensure_session = call(Client.ensure_session)

    chat = each(Client.chat)
    start_chat = call(Client.start_chat)
    follow_chat = each(Client.follow_chat)
    abort_chat = call(Client.abort_chat)
    messages = call(Client.messages)
    agent_runs = call(Client.agent_runs)
    approvals = call(Client.approvals)
    approval = call(Client.approval)
    decide = call(Client.decide)
    approval_rules = call(Client.approval_rules)
    revoke_rule = call(Client.revoke_rule)
    projects = call(Client.projects)
    create_project = call(Client.create_project)
    project = call(Client.project)
    change_project = call(Client.change_project)
    delete_project = call(Client.delete_project)
    tools = call(Client.tools)
    tool_sources = call(Client.tool_sources)
    add_tool = call(Client.add_tool)
    remove_tool = call(Client.remove_tool)
    task_templates = call(Client.task_templates)
    start_task = call(Client.start_task)
    tasks = call(Client.tasks)
    task = call(Client.task)
    abort_task = call(Client.abort_task)
    resume_task = call(Client.resume_task)
    invoke = call(Client.invoke)

    me = call(Client.me)
    changes = each(Client.changes)
    make_login_code = call(Client.make_login_code)
    logins = call(Client.logins)
    end_login = call(Client.end_login)
    agent_conversations = call(Client.agent_conversations)
    agent_conversation = call(Client.agent_conversation)
    rename_conversation = call(Client.rename_conversation)
    delete_conversation = call(Client.delete_conversation)
    active_runs = call(Client.active_runs)
    run_report = call(Client.run_report)
    agents = call(Client.agents)
    create_agent = call(Client.create_agent)
    agent = call(Client.agent)
    replace_agent = call(Client.replace_agent)
    delete_agent = call(Client.delete_agent)
    templates = call(Client.templates)
    create_template = call(Client.create_template)
    template = call(Client.template)
    change_template = call(Client.change_template)
    delete_template = call(Client.delete_template)
    policies = call(Client.policies)
    policy = call(Client.policy)
    project_directories = call(Client.project_directories)
    quarantine = call(Client.quarantine)
    quarantined = call(Client.quarantined)
    restore_quarantined = call(Client.restore_quarantined)
    drop_quarantined = call(Client.drop_quarantined)
    details = call(Client.details)
    ended_sandboxes = call(Client.ended_sandboxes)
    network_decisions = call(Client.network_decisions)
    recorded_run = call(Client.recorded_run)
    complete = call(Client.complete)
    describe = call(Client.describe)

    keys = call(Client.keys)
    make_key = call(Client.make_key)
    revoke_key = call(Client.revoke_key)
    tokens = call(Client.tokens)
    make_token = call(Client.make_token)
    revoke_token = call(Client.revoke_token)
    unfreeze = call(Client.unfreeze)
    collect = call(Client.collect)
    profiles = call(Client.profiles)
    health = call(Client.health)
    request = call(Client.request)

    def sandbox(self, sandbox_id: str) -> ConnectedSandbox:
        """Return an existing sandbox, by its id or the id of a session."""
        return ConnectedSandbox(self.loop, self._inner.sandbox(sandbox_id))

    def create_until_close(
        self,
        policy: Any,
        *,
        narrower: Mapping[str, Any] | None,
        env: Mapping[str, str] | None,
        ttl_s: float | None = None,
    ) -> RemoteSandbox:
        """Create a sandbox that the end of this client deletes."""
        sandbox: RemoteSandbox = self.loop.call(
            self._inner.create(policy, narrower=narrower, env=env, ttl_s=ttl_s)
        )
        self._created.add(sandbox)
        return sandbox

    def close(self) -> None:
        """Cut every connection, and end the thread; a second call does nothing."""
        self.loop.end(self._end())

    async def _end(self) -> None:
        for sandbox in self._created:
            with suppress(errors.SbxError):  # the service may have ended, with the sandbox
                await sandbox.close()
        await self._inner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
