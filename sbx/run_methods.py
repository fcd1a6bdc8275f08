"""The methods that run code, each defined once, and the forwarding of methods to another object.

`RunMethods` and `ScriptMethods` turn each call into a `RunCall`. A class that inherits them only
implements `start_call`, which starts the run of a call, and `give_up`.
"""

import asyncio
import functools
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, Generic, Literal, ParamSpec, Protocol, TypeVar

from sbx.aio import run_to_completion
from sbx.protocol.runs import Event, Run

OnInput = Callable[[str], str | Awaitable[str]]


class StartedRun(Protocol):
    """A run that continues whether or not a caller follows it."""

    async def result(self) -> Run: ...
    def events(self) -> AsyncGenerator[Event, None]: ...


P = ParamSpec("P")
R = TypeVar("R")
RunT = TypeVar("RunT", bound=StartedRun)


@dataclass(frozen=True, slots=True)
class RunCall:
    """The arguments of one call. `language` is that of a script. Of a `file`, `code` is the path,
    or `-c` or `-` as for python3; `source` replaces its content, `stdin_data` is its standard
    input, and `shows_value` displays the value of its last expression."""

    kind: Literal["python", "shell", "script", "file"]
    code: str
    timeout: float | None = None
    on_input: OnInput | None = None
    language: str = ""
    args: Sequence[str] = ()
    cwd: str | None = None
    env: Mapping[str, str] | None = None
    stdin: str | None = None
    stdin_open: bool = False
    source: bytes | None = None
    stdin_data: bytes | None = None
    shows_value: bool = False


class RunMethods(ABC, Generic[RunT]):
    """Cells and shell commands.

    `run` and `shell` wait for the result, and interrupt the run if the call is cancelled. `stream`
    and `stream_shell` yield its events; the last one carries the result. All start the run now. Its
    failure is a result with `status`, `error` and `state_lost`. Raise Denied, BadRequest
    (`invalid_timeout`, `limit_widened`, `invalid_code`, `invalid_env`), TooLarge `code_too_large`,
    and Closed.
    """

    @abstractmethod
    def start_call(self, call: RunCall) -> RunT:
        """Start the run, which continues whether or not a caller follows it."""

    @abstractmethod
    async def give_up(self, run: RunT, /) -> None:
        """Interrupt a run for which no caller waits. Drop it if it has not begun."""

    async def run_call(self, call: RunCall) -> Run:
        """Start the run and wait for its result."""
        return await self.wait_for(self.start_call(call))

    async def wait_for(self, run: RunT) -> Run:
        """Return the result of a run. Give the run up if the call is cancelled."""
        try:
            return await run.result()
        except asyncio.CancelledError:
            await run_to_completion(self.give_up(run))
            raise

    async def run(
        self, code: str, *, timeout: float | None = None, on_input: OnInput | None = None
    ) -> Run:
        """Run a cell and wait for its result. Cancelling the call interrupts the cell.

        `timeout` is in seconds. `on_input` is called with the prompt of each `input()`.
        """
        return await self.run_call(RunCall("python", code, timeout, on_input))

    def stream(
        self, code: str, *, timeout: float | None = None, on_input: OnInput | None = None
    ) -> AsyncGenerator[Event, None]:
        """Run a cell and yield its events; the last one carries the result. The cell continues if
        the caller stops to follow it."""
        return self.start_call(RunCall("python", code, timeout, on_input)).events()

    def start_run(
        self, code: str, *, timeout: float | None = None, on_input: OnInput | None = None
    ) -> RunT:
        """Start a cell."""
        return self.start_call(RunCall("python", code, timeout, on_input))

    async def shell(
        self,
        command: str,
        *,
        timeout: float | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: str | None = None,
    ) -> Run:
        """Run `/bin/bash -c command` inside, also next to a busy cell, and wait for its result."""
        return await self.run_call(
            RunCall("shell", command, timeout, cwd=cwd, env=env, stdin=stdin)
        )

    def stream_shell(
        self,
        command: str,
        *,
        timeout: float | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: str | None = None,
        stdin_open: bool = False,
    ) -> AsyncGenerator[Event, None]:
        """Run a shell command and yield its events; the last one carries the result. With
        `stdin_open` the command also reads the text of `write_stdin`, after `stdin`."""
        return self.start_shell(
            command, timeout=timeout, cwd=cwd, env=env, stdin=stdin, stdin_open=stdin_open
        ).events()

    def start_shell(
        self,
        command: str,
        *,
        timeout: float | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: str | None = None,
        stdin_open: bool = False,
    ) -> RunT:
        """Start a shell command."""
        return self.start_call(
            RunCall("shell", command, timeout, cwd=cwd, env=env, stdin=stdin, stdin_open=stdin_open)
        )


class ScriptMethods(RunMethods[RunT]):
    """Also files of Python, and scripts in `bash`, `javascript`, `typescript`, `java` or `go`, next
    to a busy cell.

    A script keeps only the files that it writes. Its packages are those of the workspace:
    `node_modules`, jars in `lib` or `jars`, a `go.mod` with `vendor`. Raise BadRequest
    `unknown_language`, `invalid_arguments` and `language_unavailable`, Denied `processes_denied`.
    """

    async def run_script(
        self,
        code: str,
        language: str,
        *,
        args: Sequence[str] = (),
        timeout: float | None = None,
        env: Mapping[str, str] | None = None,
        stdin: str | None = None,
        cwd: str | None = None,
    ) -> Run:
        """Run a script and wait for its result. Cancelling the call interrupts the script."""
        return await self.run_call(
            RunCall("script", code, timeout, None, language, args, cwd, env, stdin)
        )

    def stream_script(
        self,
        code: str,
        language: str,
        *,
        args: Sequence[str] = (),
        timeout: float | None = None,
        env: Mapping[str, str] | None = None,
        stdin: str | None = None,
        cwd: str | None = None,
    ) -> AsyncGenerator[Event, None]:
        """Run a script and yield its events; the last one carries the result."""
        return self.start_script(
            code, language, args=args, timeout=timeout, env=env, stdin=stdin, cwd=cwd
        ).events()

    def start_script(
        self,
        code: str,
        language: str,
        *,
        args: Sequence[str] = (),
        timeout: float | None = None,
        env: Mapping[str, str] | None = None,
        stdin: str | None = None,
        cwd: str | None = None,
    ) -> RunT:
        """Start a script. If its language is not available, the result of the run has the error."""
        return self.start_call(
            RunCall("script", code, timeout, None, language, args, cwd, env, stdin)
        )

    async def run_file(
        self,
        file: str | bytes,
        args: Sequence[str] = (),
        *,
        stdin: str | bytes | None = None,
        timeout: float | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        on_input: OnInput | None = None,
    ) -> Run:
        """Run a file of Python as `python3 FILE [ARG…]`, and wait for its result. Cancelling the
        call interrupts it.

        `file` is a path in the workspace, or the code as bytes. The program has its own variables,
        and ends before the call returns: `exit_code` and `ok` are those of its process. `stdin` is
        its standard input. Without it, `on_input` answers the questions of `input()`.
        """
        return await self.run_call(_file(file, args, stdin, timeout, env, cwd, on_input))

    def stream_file(
        self,
        file: str | bytes,
        args: Sequence[str] = (),
        *,
        stdin: str | bytes | None = None,
        timeout: float | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        on_input: OnInput | None = None,
    ) -> AsyncGenerator[Event, None]:
        """Run a file of Python and yield its events; the last one carries the result."""
        call = _file(file, args, stdin, timeout, env, cwd, on_input)
        return self.start_call(call).events()

    def start_file(
        self,
        file: str | bytes,
        args: Sequence[str] = (),
        *,
        stdin: str | bytes | None = None,
        timeout: float | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        on_input: OnInput | None = None,
    ) -> RunT:
        """Start a file of Python."""
        return self.start_call(_file(file, args, stdin, timeout, env, cwd, on_input))


def _file(
    file: str | bytes,
    args: Sequence[str],
    stdin: str | bytes | None,
    timeout: float | None,
    env: Mapping[str, str] | None,
    cwd: str | None,
    on_input: OnInput | None,
) -> RunCall:
    path, source = (file, None) if isinstance(file, str) else ("-", bytes(file))
    return RunCall(
        "file",
        path,
        timeout,
        on_input,
        args=args,
        cwd=cwd,
        env=env,
        source=source,
        stdin_data=stdin.encode() if isinstance(stdin, str) else stdin,
    )


def to_default(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """Return a method that calls the same method of `self._default`: the conversation `default` of
    a sandbox, the context `default` of a conversation."""
    name = method.__name__

    @functools.wraps(method)
    def forward(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        result: R = getattr(self._default, name)(*args, **kwargs)
        return result

    return forward
