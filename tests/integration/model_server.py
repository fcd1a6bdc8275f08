"""A model's server on 127.0.0.1, scripted, that speaks both wire formats as providers do.

    with model_server(Response("hello"), Refused(429, retry_after=0.01)) as server:
        model = OpenAIModel("scripted", api_key=KEY, base_url=server.openai_url)
        ...
        assert server.requests[0].body["messages"][-1]["content"] == "hi"

It serves from a thread of its own, so the same `with` fits a test with an event loop, one without,
and a service or command in another process (`server.openai_url`, `server.anthropic_url` and KEY
are its settings). POST /v1/chat/completions and POST /v1/messages, streamed or not as the request
says; a request that a provider would refuse (a call without its result, a wrong key, …) gets the
400 or 401 that it would get there.

What is answered, one for each request in the order they come:

    Response(…)            of sbx.agent.messages, in the dialect of the request
    Refused(status, …)     an error as providers write it, with Retry-After where wanted
    Raw(body, …)           these very bytes: HTML, half a JSON, what you like
    BrokenOff(response, …)      this answer, late, cut off, left hanging, or ended by an error
                           after so many events
    function(Asked)        … that gives one of these; for what depends on the request

`by=function` answers whatever comes when these are used up; it is the thing for many conversations
at once. An exception in a function is raised again at the end of the `with`. `server.requests`
are all that came, in order; `server.hanging` is set when an answer hangs, `server.left` when a
client hung up before its answer ended.
"""

import asyncio
import json
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import h11
from model_dialects import Dialect, Event, error, events, fault_in, whole

from sbx.agent.messages import Response

KEY = "sk-model-server-0123456789abcdef"
_PATHS: dict[str, Dialect] = {"/v1/chat/completions": "openai", "/v1/messages": "anthropic"}
_JSON = {"content-type": "application/json"}


@dataclass(frozen=True)
class Asked:
    """One request. Names of headers are in small letters; `body` is its JSON."""

    dialect: Dialect
    headers: dict[str, str]
    body: Any

    @property
    def key(self) -> str:
        """Messages may name it in either header, whichever SDK it is."""
        bearer = self.headers.get("authorization", "").removeprefix("Bearer ")
        return self.headers.get("x-api-key", bearer)

    @property
    def messages(self) -> list[Any]:
        """As they came; the system prompt is among them in one dialect only."""
        return list(self.body["messages"])

    @property
    def text(self) -> str:
        """All of the conversation as one text, to look for a word in."""
        return json.dumps([self.body.get("system"), self.messages], ensure_ascii=False)


@dataclass(frozen=True)
class Refused:
    """An HTTP error. `retry_after` in seconds."""

    status: int
    message: str = "refused by the script"
    retry_after: float | None = None
    kind: str = "error"


@dataclass(frozen=True)
class Raw:
    """`headers` beside the content type."""

    body: bytes
    content_type: str = "application/json"
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class BrokenOff:
    """`delay_s` before anything is sent. `after` events (of a stream; otherwise: half of the
    body) it breaks off: `cut` closes the connection without an end, `hang` says nothing more until
    the client leaves, `error` tells an error as an event, `end` ends the body properly."""

    response: Response = field(default_factory=Response)
    delay_s: float = 0.0
    after: int | None = None
    then: Literal["cut", "hang", "error", "end"] = "cut"


Answer = Response | Refused | Raw | BrokenOff
Script = Answer | Callable[[Asked], Answer]


class ModelServer:
    """Made by `model_server`."""

    def __init__(
        self, answers: tuple[Script, ...], by: Callable[[Asked], Answer] | None, key: str
    ) -> None:
        self.requests: list[Asked] = []
        self.hanging = threading.Event()
        self.left = threading.Event()
        self.failures: list[Exception] = []
        self.port = 0
        self._answers = deque(answers)
        self._by = by
        self._key = key
        self._connections: set[asyncio.Task[None]] = set()

    @property
    def anthropic_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def openai_url(self) -> str:
        return f"{self.anthropic_url}/v1"

    def add(self, *answers: Script) -> None:
        """For what is asked after those that are left."""
        self._answers.extend(answers)

    def forget(self) -> None:
        """Give none of the answers that are left."""
        self._answers.clear()

    async def serve(self, ready: Callable[[], None], ended: asyncio.Event) -> None:
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        ready()
        try:
            await ended.wait()
        finally:
            server.close()
            for task in self._connections:
                task.cancel()
            await asyncio.gather(*self._connections, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            with suppress(_Cut, h11.RemoteProtocolError, asyncio.CancelledError):
                await self._converse(_Wire(reader, writer))
        except ConnectionError:
            self.left.set()
        finally:
            self._connections.discard(task)
            writer.transport.abort()

    async def _converse(self, wire: "_Wire") -> None:
        while (heard := await wire.request()) is not None:
            request, body = heard
            headers = {name.decode(): value.decode() for name, value in request.headers}
            dialect = _PATHS.get(request.target.decode().partition("?")[0])
            if dialect is None:
                await wire.reply(404, b'{"error": {"message": "no such path"}}')
            else:
                asked = Asked(dialect, headers, json.loads(body))
                await self._tell(wire, asked, self._answer(asked))
            if not wire.next_request():
                return

    def _answer(self, asked: Asked) -> Answer:
        self.requests.append(asked)
        if asked.key != self._key:
            reported = (
                f"Incorrect API key provided: {asked.key}"  # providers do so, more or less masked
            )
            return Refused(401, reported, kind="authentication_error")
        if (fault := fault_in(asked.dialect, asked.body)) is not None:
            return Refused(400, fault, kind="invalid_request_error")
        script = self._answers.popleft() if self._answers else self._by
        if script is None:
            return Refused(400, "the script has no answer left", kind="invalid_request_error")
        if not callable(script):
            return script
        try:
            return script(asked)
        except Exception as failure:  # noqa: BLE001  # the test's own, raised again at the end
            self.failures.append(failure)
            return Refused(400, f"the script failed: {failure!r}", kind="invalid_request_error")

    async def _tell(self, wire: "_Wire", asked: Asked, answer: Answer) -> None:
        match answer:
            case Refused():
                body = json.dumps(error(asked.dialect, answer.kind, answer.message)).encode()
                wait = answer.retry_after
                await wire.reply(answer.status, body, {} if wait is None else {"retry-after": wait})
            case Raw():
                kind = {"content-type": answer.content_type}
                await wire.reply(answer.status, answer.body, {**kind, **answer.headers})
            case Response():
                await self._tell(wire, asked, BrokenOff(answer))
            case BrokenOff():
                if answer.delay_s:
                    await asyncio.sleep(answer.delay_s)
                tell = self._tell_events if asked.body.get("stream") else self._tell_whole
                await tell(wire, asked, answer)

    async def _tell_whole(self, wire: "_Wire", asked: Asked, reported: BrokenOff) -> None:
        body = json.dumps(whole(asked.dialect, reported.response, asked.body["model"])).encode()
        if reported.after is None:
            return await wire.reply(200, body)
        await wire.start(200, {**_JSON, "content-length": len(body)})
        await wire.send(body[: len(body) // 2])
        return await self._break_off(wire, asked, reported)

    async def _tell_events(self, wire: "_Wire", asked: Asked, reported: BrokenOff) -> None:
        await wire.start(200, {"content-type": "text/event-stream"})
        for event in events(asked.dialect, reported.response, asked.body["model"])[
            : reported.after
        ]:
            await wire.send(_written(event))
        if reported.after is None:
            await wire.end()
        else:
            await self._break_off(wire, asked, reported)

    async def _break_off(self, wire: "_Wire", asked: Asked, reported: BrokenOff) -> None:
        match reported.then:
            case "cut":
                raise _Cut
            case "hang":
                self.hanging.set()
                await wire.client_leaves()
                raise ConnectionError
            case "error":
                data = error(asked.dialect, "overloaded_error", "the script broke off")
                await wire.send(_written(("error", data)))
        await wire.end()


def _written(event: Event) -> bytes:
    name, data = event
    text = data if isinstance(data, str) else json.dumps(data)
    return (f"event: {name}\n" if name else "").encode() + f"data: {text}\n\n".encode()


class _Cut(Exception):
    """The script ends this connection."""


class _Wire:
    """One connection, request by request."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._http = h11.Connection(h11.SERVER)

    async def request(self) -> tuple[h11.Request, bytes] | None:
        """The next one, whole; None when the client closed."""
        request: h11.Request | None = None
        body = bytearray()
        while True:
            match event := self._http.next_event():
                case h11.NEED_DATA:
                    self._http.receive_data(await self._reader.read(65_536))
                case h11.Request():
                    request = event
                case h11.Data():
                    body += event.data
                case h11.EndOfMessage():
                    assert request is not None
                    return request, bytes(body)
                case _:
                    return None

    def next_request(self) -> bool:
        """Whether the connection can carry one."""
        if self._http.our_state is not h11.DONE or self._http.their_state is not h11.DONE:
            return False
        self._http.start_next_cycle()
        return True

    async def reply(
        self, status: int, body: bytes, headers: Mapping[str, object] | None = None
    ) -> None:
        await self.start(status, {**_JSON, "content-length": len(body), **(headers or {})})
        await self.send(body)
        await self.end()

    async def start(self, status: int, headers: Mapping[str, object]) -> None:
        named = [(name, str(value)) for name, value in headers.items()]
        await self._write(h11.Response(status_code=status, headers=named))

    async def send(self, data: bytes) -> None:
        await self._write(h11.Data(data=data))

    async def end(self) -> None:
        await self._write(h11.EndOfMessage())

    async def client_leaves(self) -> None:
        with suppress(ConnectionError):
            while await self._reader.read(65_536):
                pass

    async def _write(self, event: h11.Response | h11.Data | h11.EndOfMessage) -> None:
        self._writer.write(self._http.send(event) or b"")
        await self._writer.drain()


@contextmanager
def model_server(
    *answers: Script, by: Callable[[Asked], Answer] | None = None, key: str = KEY
) -> Iterator[ModelServer]:
    """A server that answers as the module's docstring says, until the end of the `with`."""
    server = ModelServer(answers, by, key)
    loop, ended, listening = asyncio.new_event_loop(), asyncio.Event(), threading.Event()

    def serve() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(server.serve(listening.set, ended))

    thread = threading.Thread(target=serve, name="model server")
    thread.start()
    listening.wait(60)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join()
    for failure in server.failures:
        raise failure
