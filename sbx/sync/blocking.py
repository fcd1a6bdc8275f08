"""Synchronous counterparts of the asynchronous classes.

A class here names the methods of its asynchronous counterpart, with their types (methods.py). It
works for a sandbox in this process and for one in a service, because both have the same methods; a
test compares them.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

from sbx.aio import Loop
from sbx.protocol.dry_runs import FileChange
from sbx.protocol.files import Unpacked
from sbx.protocol.receipt import Receipt
from sbx.protocol.runs import Run
from sbx.sync.methods import Attribute, Blocking, Part, call, each, follow, wrap, wrap_all

if TYPE_CHECKING:
    from sbx.client.commands import RemoteCommand, RemoteCommands
    from sbx.client.contexts import RemoteContext, RemoteContexts
    from sbx.client.conversation import RemoteConversation
    from sbx.client.dry_runs import RemoteCheckpoint, RemoteDryRun
    from sbx.client.files import RemoteFiles, RemoteUploads
    from sbx.client.grants import RemoteGrants
    from sbx.client.sandbox import RemoteSandbox
    from sbx.client.terminal_socket import RemoteAttached
    from sbx.client.terminals import RemoteTerminal, RemoteTerminals
else:

    class _Names:
        """In place of a class of the client, which an embedding program does not need: an attribute
        is its own name. The type checker reads the signature of the method there."""

        def __getattr__(self, name: str) -> str:
            return name

    RemoteCommand = RemoteCommands = RemoteContext = RemoteContexts = _Names()
    RemoteConversation = RemoteCheckpoint = RemoteDryRun = RemoteFiles = RemoteUploads = _Names()
    RemoteGrants = RemoteSandbox = RemoteAttached = RemoteTerminal = RemoteTerminals = _Names()

DEFAULT_CONVERSATION = "default"


class BlockingFiles(Blocking):
    """The files as the code inside sees them. Paths are relative to /workspace, or absolute.

    Every method raises InvalidPath for a path that leads out, NotFound `file_not_found`, TooLarge,
    Unavailable `no_space`, and Denied where the policy offers no `filesystem`.
    """

    read = call(RemoteFiles.read)
    read_bytes = call(RemoteFiles.read_bytes)
    write = call(RemoteFiles.write)
    list = call(RemoteFiles.list)
    stat = call(RemoteFiles.stat)
    delete = call(RemoteFiles.delete)
    make_directory = call(RemoteFiles.make_directory)
    find = call(RemoteFiles.find)
    grep = call(RemoteFiles.grep)
    move = call(RemoteFiles.move)
    copy = call(RemoteFiles.copy)
    replace = call(RemoteFiles.replace)
    chmod = call(RemoteFiles.chmod)
    watch = each(RemoteFiles.watch)
    archive = each(RemoteFiles.archive)

    def unpack(self, source: bytes | Iterable[bytes], path: str = ".") -> Unpacked:
        """Unpack a tar (plain, gz, bz2, xz) or a zip into a directory, inside the walls. Files of
        the same names are replaced. Start the kernel.

        Raise Denied `processes_denied`, BadRequest `not_an_archive`, TooLarge `archive_too_large`;
        files that were unpacked before the error stay.
        """
        if isinstance(source, bytes | bytearray | memoryview):
            work = self._inner.unpack(bytes(source), path)
        else:
            work = self._inner.unpack(_read_in_thread(iter(source)), path)
        unpacked: Unpacked = self._loop.call(work)
        return unpacked


async def _read_in_thread(source: Iterator[bytes]) -> AsyncIterator[bytes]:
    """Read the caller's iterator in a worker thread, because it may block."""
    while (piece := await asyncio.to_thread(next, source, None)) is not None:
        yield piece


class BlockingUploads(Blocking):
    """The uploads of the user, read-only inside at /workspace/uploads/temparea."""

    put_bytes = call(RemoteUploads.put_bytes)
    list = call(RemoteUploads.list)
    read_bytes = call(RemoteUploads.read_bytes)
    delete = call(RemoteUploads.delete)
    put = call(RemoteUploads.put)


class BlockingCommand(Blocking):
    """One background command. It runs until it ends or its kernel does."""

    id = Attribute[str]()
    status = call(RemoteCommand.status)
    logs = call(RemoteCommand.logs)
    follow = each(RemoteCommand.follow)
    write = call(RemoteCommand.write)
    stop = call(RemoteCommand.stop)
    wait = call(RemoteCommand.wait)


class BlockingCommands(Blocking):
    """The background commands of a conversation."""

    start = wrap(RemoteCommands.start, BlockingCommand)
    get = wrap(RemoteCommands.get, BlockingCommand)
    list = call(RemoteCommands.list)


class BlockingTerminalClient(Blocking):
    """One client of a terminal. Two threads may read and write at the same time."""

    read = call(RemoteAttached.read)
    write = call(RemoteAttached.write)
    resize = call(RemoteAttached.resize)

    def __iter__(self) -> Iterator[bytes]:
        while data := self.read():
            yield data


class BlockingTerminal(Blocking):
    """One terminal."""

    id = Attribute[str]()
    status = call(RemoteTerminal.status)
    screen = call(RemoteTerminal.screen)
    resize = call(RemoteTerminal.resize)
    close = call(RemoteTerminal.close)

    @contextmanager
    def attach(self) -> Iterator[BlockingTerminalClient]:
        """Become a client of the terminal: the first read draws its screen."""
        attaching = self._inner.attach()

        async def enter() -> Any:
            return await attaching.__aenter__()

        async def leave() -> None:
            await attaching.__aexit__(None, None, None)

        client = self._loop.call(enter())
        try:
            yield BlockingTerminalClient(self._loop, client)
        finally:
            self._loop.call(leave())


class BlockingTerminals(Blocking):
    """The terminals of a conversation: a shell or command on a pty, with any number of clients."""

    open = wrap(RemoteTerminals.open, BlockingTerminal)
    get = wrap(RemoteTerminals.get, BlockingTerminal)
    list = wrap_all(RemoteTerminals.list, BlockingTerminal)
    close = call(RemoteTerminals.close)


class BlockingDryRun(Blocking):
    """The result of a command on a frozen copy of the files, and the changes that it would make."""

    id = Attribute[str]()
    run = Attribute[Run]()
    changes = Attribute[Sequence[FileChange]]()
    truncated = Attribute[bool]()  # there are more changes than `changes` lists
    left_out = Attribute[Sequence[str]]()  # FIFOs, sockets and the like, and unreadable files
    expires_at = Attribute[float]()  # seconds of the epoch
    commit = call(RemoteDryRun.commit)
    discard = call(RemoteDryRun.discard)


class BlockingCheckpoint(Blocking):
    """The files as they were at a moment."""

    id = Attribute[str]()
    restore = call(RemoteCheckpoint.restore)
    discard = call(RemoteCheckpoint.discard)


class BlockingKernel(Blocking):
    """The methods of a kernel, which contexts and conversations share."""

    run = call(RemoteContext.run)
    stream = follow(RemoteContext.start_run)
    shell = call(RemoteContext.shell)
    stream_shell = follow(RemoteContext.start_shell)
    interrupt = call(RemoteContext.interrupt)
    stop = call(RemoteContext.stop)
    read_receipt = call(RemoteContext.read_receipt)

    @property
    def receipt(self) -> Receipt | None:
        """The walls around the live kernel, read back now. None without a kernel."""
        return self.read_receipt()


class BlockingContext(BlockingKernel):
    """One kernel of a conversation: its own variables and order of runs, over the same files."""

    name = Attribute[str]()
    restart = call(RemoteContext.restart)


class BlockingContexts(Blocking):
    """Named kernels over the files of one conversation; `default` is its own."""

    create = wrap(RemoteContexts.create, BlockingContext)
    get = wrap(RemoteContexts.get, BlockingContext)
    list = wrap_all(RemoteContexts.list, BlockingContext)
    delete = call(RemoteContexts.delete)


class BlockingGrants(Blocking):
    """The access of a conversation beyond its policy, which the policy permits to grant."""

    list = call(RemoteGrants.list)
    add = call(RemoteGrants.add)
    revoke = call(RemoteGrants.revoke)


class BlockingConversation(BlockingKernel):
    """One conversation of a sandbox."""

    files = Part(BlockingFiles)
    uploads = Part(BlockingUploads)
    contexts = Part(BlockingContexts)
    commands = Part(BlockingCommands)
    terminals = Part(BlockingTerminals)
    grants = Part(BlockingGrants)
    run_script = call(RemoteConversation.run_script)
    stream_script = follow(RemoteConversation.start_script)
    run_file = call(RemoteConversation.run_file)
    stream_file = follow(RemoteConversation.start_file)
    write_stdin = call(RemoteConversation.write_stdin)
    dry_run = wrap(RemoteConversation.dry_run, BlockingDryRun)
    checkpoint = wrap(RemoteConversation.checkpoint, BlockingCheckpoint)
    surroundings = call(RemoteConversation.surroundings)
    usage = call(RemoteConversation.usage)
    stream_usage = each(RemoteConversation.stream_usage)
    start = call(RemoteConversation.start)


class BlockingSandbox(BlockingConversation):
    """A sandbox. Its own methods are those of its conversation `default`."""

    id = Attribute[str]()
    mount = call(RemoteSandbox.mount)
    unmount = call(RemoteSandbox.unmount)
    mounts = call(RemoteSandbox.mounts)
    unfreeze = call(RemoteSandbox.unfreeze)
    close = call(RemoteSandbox.close)

    def __init__(self, loop: Loop, inner: Any) -> None:
        super().__init__(loop, inner)
        self._parts = self._named(DEFAULT_CONVERSATION)  # also readable after `close`

    def conversation(self, name: str) -> BlockingConversation:
        """Return the conversation `name`, with its own files and variables. Create it if needed."""
        return BlockingConversation(self._loop, self._named(name))

    def _named(self, name: str) -> Any:
        async def get() -> Any:
            return self._inner.conversation(name)

        return self._loop.call(get())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def beneath(conversation: BlockingConversation) -> tuple[Loop, Any]:
    """Return the loop and the asynchronous counterpart of a conversation, for code that is written
    for asyncio and serves both."""
    return conversation._loop, conversation._inner
