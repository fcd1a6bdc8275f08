"""Runs and events of runs as JSON for a reply. The JSON of their bundles is copied, not decoded.

A run may have hundreds of thousands of small outputs: then one worker thread writes them, so that
the event loop serves other callers meanwhile. There is one thread because all of them share the
interpreter lock with the event loop.
"""

import asyncio
import json
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from fastapi import Response

from sbx.api.sse import Encoded
from sbx.protocol.bundles import weight
from sbx.protocol.events import encode, has_long_text, run_to_json, to_json
from sbx.protocol.runs import Display, Event, MimeBundle, Result, Run, RunEnd

Form = dict[str, Any]
T = TypeVar("T")

_LONG = 10_000  # values that are visited in Python: about 5 ms
_LONG_TEXT = 256 << 10  # characters of output, whose forms follow one another in C: 1 ms each
_worker = ThreadPoolExecutor(1, thread_name_prefix="sbx-encoding")

run_form: Callable[[Run], Form] = partial(run_to_json, encoded=True)
event_form: Callable[[Event], Form] = partial(to_json, encoded=True)


async def encoded_run(
    run: Run, form: Callable[[Run], Form] = run_form, *, recorded: bool = True
) -> bytes:
    """Return the JSON of what `form` makes of the run."""
    form = form if recorded else _unrecorded(form)
    if _is_long_run(run):
        return await asyncio.get_running_loop().run_in_executor(_worker, _encoded, form, run)
    return _encoded(form, run)


async def encoded_event(
    event: Event, form: Callable[[Event], Form] = event_form, *, recorded: bool = True
) -> Encoded:
    """Return the JSON of what `form` makes of the event."""
    if not recorded and isinstance(event, RunEnd):
        form = _unrecorded(form)
    if _is_long_run(event.run) if isinstance(event, RunEnd) else _is_long(_bundles(event)):
        loop = asyncio.get_running_loop()
        return Encoded(event.type, await loop.run_in_executor(_worker, _encoded, form, event))
    return Encoded(event.type, _encoded(form, event))


async def encoded_if_long(form: Form, write: Callable[[int, Form], bytes]) -> Form | bytes:
    """Return an event of the protocol of an SDK, as bytes of `write` if it is long."""
    if not has_long_text(form) and form["type"] != "result":
        return form
    return await asyncio.get_running_loop().run_in_executor(_worker, write, 0, form)


async def encoded_form(form: Form) -> bytes:
    """Return the JSON of a form, which may have a long text."""
    if not has_long_text(form):
        return encode(form)
    return await asyncio.get_running_loop().run_in_executor(_worker, encode, form)


async def encoded_list(entries: Iterable[T], form: Callable[[T], Form]) -> bytes:
    """Return the JSON of what `form` makes of each entry. The thread writes one entry at a time:
    one call for 10,000 of them keeps the interpreter lock for 30 ms."""

    def write() -> bytes:
        return b"[%b]" % b",".join([encode(form(each)) for each in entries])

    return await asyncio.get_running_loop().run_in_executor(_worker, write)


async def list_reply(
    name: str, entries: Iterable[T], form: Callable[[T], Form], **more: bool | int
) -> Response:
    """Return the reply with a long list as `name`, and further fields."""
    pieces = [b'"%b":%b' % (name.encode(), await encoded_list(entries, form))]
    pieces += [b'"%b":%b' % (key.encode(), json.dumps(more[key]).encode()) for key in more]
    return Response(b"{%b}" % b",".join(pieces), media_type="application/json")


def _unrecorded(form: Callable[[T], Form]) -> Callable[[T], Form]:
    """Return the form with `"recorded": false`: the history does not have the run yet. A reply
    without it is about a run that is recorded."""
    return lambda source: {**form(source), "recorded": False}


def _encoded(form: Callable[[Any], Form], source: Any) -> bytes:
    return encode(form(source))


def _bundles(event: Event) -> tuple[MimeBundle, ...]:
    match event:
        case Display() | Result():
            return event.data, event.metadata
    return ()


def _is_long_run(run: Run) -> bool:
    size = len(run.stdout) + len(run.stderr) + len(run.text)
    return size > _LONG_TEXT or _is_long(run.outputs)


def _is_long(bundles: tuple[MimeBundle, ...]) -> bool:
    return len(bundles) > _LONG or weight(bundles) > _LONG


def text_and_images(result: dict[str, Any]) -> tuple[str, list[dict[str, str]]]:
    """Return the text and the images of a run in JSON, as Bay has them: the text of a display with
    an image is omitted.

    The text has the displays in their order, so each search begins where the last one ended. A
    search from the start for each of 3,000 images took 20 s.
    """
    text: str = result["text"]
    images, pieces, end = [], list[str](), 0
    for bundle in result["outputs"]:
        image = bundle.get("image/png")
        if not isinstance(image, str):
            continue
        images.append({"image/png": image})
        plain = bundle.get("text/plain")
        if isinstance(plain, str) and plain != result["result"]:
            line = f"{plain}\n"
            if (start := text.find(line, end)) >= 0:
                pieces.append(text[end:start])
                end = start + len(line)
    return "".join([*pieces, text[end:]]), images
