"""What both models do when their server refuses, breaks off, hangs or answers with rubbish."""

import asyncio
import json
import traceback
from typing import Any

import pytest
from asked_models import DIALECTS, HELLO, asked_model, made_model, streamed
from model_dialects import Dialect
from model_server import KEY, Asked, BrokenOff, Raw, Refused, model_server

from sbx.agent.messages import Image, Message, Response, TokenUsage, ToolCall
from sbx.agent.models import sdk_model
from sbx.errors import BadRequest, Denied, SbxError, Unavailable
from tests.tiers import rows

SAID = Response("a text of some length, more than can come in five events", usage=TokenUsage(3, 4))
QUICK = 0.001
both = pytest.mark.parametrize("dialect", DIALECTS)


# -- asked again -----------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("status", rows([429, 500, 503, 529], [429, 503]))
async def test_a_refusal_that_passes_is_asked_again(dialect: Dialect, status: int) -> None:
    again = Refused(status, retry_after=QUICK)
    async with asked_model(dialect, again, again, SAID, again, SAID) as (model, server):
        assert await model.complete("", HELLO, ()) == SAID
        assert (await streamed(model))[1] == SAID
    assert len(server.requests) == 5


@both
async def test_rate_limits_end_after_the_last_retry(dialect: Dialect) -> None:
    async with asked_model(
        dialect, by=lambda _: Refused(429, "slow down", QUICK), max_retries=2
    ) as (model, server):
        with pytest.raises(Unavailable, match="slow down") as caught:
            await model.complete("", HELLO, ())
    assert caught.value.code == "model_rate_limited"
    assert caught.value.details == {"status": 429}
    assert len(server.requests) == 3


@both
async def test_a_limit_that_lasts_an_hour_is_not_waited_for(dialect: Dialect) -> None:
    async with asked_model(dialect, Refused(429, retry_after=3600)) as (model, server):
        assert (await _failure(model.complete("", HELLO, ()))).code == "model_rate_limited"
    assert len(server.requests) == 1


@both
@pytest.mark.parametrize("then", ["cut", "error", "end"])
async def test_a_stream_that_breaks_off_untold_is_asked_for_again(
    dialect: Dialect, then: Any
) -> None:
    broken = BrokenOff(SAID, after=1, then=then)
    async with asked_model(dialect, broken, broken, SAID, max_retries=2) as (model, server):
        texts, last = await streamed(model)
    assert ("".join(texts), last) == (SAID.content, SAID)
    assert len(server.requests) == 3


@both
async def test_a_stream_that_breaks_off_untold_each_time_is_an_error(dialect: Dialect) -> None:
    broken = BrokenOff(SAID, after=0)
    async with asked_model(dialect, by=lambda _: broken, max_retries=1) as (model, server):
        with pytest.raises(Unavailable) as caught:
            await streamed(model)
    assert caught.value.code == "model_stream_broken"
    assert len(server.requests) == 2


@both
@pytest.mark.parametrize("then", ["cut", "error", "end"])
async def test_a_stream_that_breaks_off_when_text_was_told_is_an_error(
    dialect: Dialect, then: Any
) -> None:
    async with asked_model(dialect, BrokenOff(SAID, after=5, then=then), SAID) as (model, server):
        answer = model.stream("", HELLO, ())
        reported = [await anext(answer)]
        with pytest.raises(Unavailable) as caught:
            reported += [item async for item in answer]
    assert caught.value.code == "model_stream_broken"
    assert reported
    assert not any(isinstance(item, Response) for item in reported)
    assert len(server.requests) == 1


@both
async def test_half_an_answer_that_was_to_come_whole_is_asked_for_again(dialect: Dialect) -> None:
    async with asked_model(dialect, BrokenOff(SAID, after=0), SAID) as (model, _):
        assert await model.complete("", HELLO, ()) == SAID


# -- refused ---------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize(
    ("status", "kind", "code"),
    [
        (400, BadRequest, "model_bad_request"),
        (401, Denied, "model_unauthorized"),
        (402, Denied, "model_unauthorized"),
        (403, Denied, "model_unauthorized"),
        (404, BadRequest, "model_bad_request"),
        (500, Unavailable, "model_unavailable"),
        (529, Unavailable, "model_unavailable"),
    ],
)
async def test_a_refusal_is_told_as_what_to_do_about_it(
    dialect: Dialect, status: int, kind: type[SbxError], code: str
) -> None:
    async with asked_model(dialect, Refused(status), Refused(status), max_retries=0) as (model, _):
        for asked in (model.complete("", HELLO, ()), streamed(model)):
            with pytest.raises(kind) as caught:
                await asked
            assert caught.value.code == code
            assert caught.value.details == {"status": status}


@both
async def test_a_model_that_refuses_images_is_asked_without_them(dialect: Dialect) -> None:
    def answer(asked: Asked) -> Response | Refused:
        refused = Refused(400, "unknown variant `image_url`, expected `text`")
        return refused if "iVBORw0KGgo=" in asked.text else SAID

    shown = Message("user", "look", images=(Image("image/png", "iVBORw0KGgo="),))
    async with asked_model(dialect, by=answer) as (model, server):
        assert await model.complete("", [shown], ()) == SAID
        assert (await streamed(model, shown))[1] == SAID
    assert "images left out" in server.requests[-1].text


@both
async def test_no_error_shows_the_key(dialect: Dialect) -> None:
    """Not even where the server repeats it, and the SDK's error holds the request's headers."""
    wrong = "sk-wrong-9876543210"
    with model_server() as server:
        server.add(
            Refused(400, f"what is {KEY}?"), Raw(b"{", "text/html"), BrokenOff(SAID, after=0)
        )
        for key in (wrong, KEY, KEY, KEY):
            model = made_model(dialect, server, api_key=key, max_retries=0)
            failure = await _failure(model.complete("", HELLO, ()))
            await model.close()
            assert failure.__cause__ is failure.__context__ is None
            shown = traceback.TracebackException.from_exception(failure, capture_locals=True)
            for text in ("".join(shown.format()), repr(failure), json.dumps(failure.to_dict())):
                assert key not in text


@both
async def test_a_redirect_is_not_followed(dialect: Dialect) -> None:
    with model_server(SAID) as elsewhere:
        there = {"location": f"http://127.0.0.1:{elsewhere.port}/v1/messages"}
        async with asked_model(dialect, Raw(b"", status=307, headers=there)) as (model, _):
            failure = await _failure(model.complete("", HELLO, ()))
    assert failure.code == "model_bad_request"
    assert not elsewhere.requests


# -- rubbish ---------------------------------------------------------------------------------------

RUBBISH = [
    b"",
    b"<html>It works!</html>",
    b'{"id": "x", "cho',
    b"null",
    b"[]",
    b'"text"',
    b"{}",
    b'{"choices": [], "content": null}',
    b'{"choices": null, "content": {"a": 1}}',
    b'{"choices": {"a": 1}, "content": "text"}',
    b'{"choices": [null], "content": [null]}',
    b'{"choices": [[]], "content": [[]]}',
    b'{"choices": [{"message": null}], "content": [{"text": "no type"}]}',
    b'{"choices": [{"message": "text"}], "content": [{"type": 3}]}',
    b'{"choices": [{"message": {"content": 3}}], "content": [{"type": "text", "text": 3}]}',
    b'{"choices": [{"message": {"tool_calls": [3]}}], "content": [{"type": "tool_use", "id": []}]}',
    b'{"choices": [{"message": {"tool_calls": [{"function": []}]}}], "content": [3]}',
    b"\xff\xfe{}",
    b'{"choices":' * 5000,
    b"[" * 100_000,
]


@both
@pytest.mark.parametrize("kind", ["application/json", "text/html"])
async def test_rubbish_is_an_error(dialect: Dialect, kind: str) -> None:
    async with asked_model(dialect, *(Raw(body, kind) for body in RUBBISH)) as (model, server):
        for body in RUBBISH:
            failure = await _failure(model.complete("", HELLO, ()))
            assert failure.code == "model_bad_answer", body[:80]
    assert len(server.requests) == len(RUBBISH), "what is no answer is not asked for again"


@both
async def test_rubbish_in_a_stream_is_an_error(dialect: Dialect) -> None:
    events = [b"data: " + body.replace(b"\n", b"") + b"\n\n" for body in RUBBISH]
    named = [b"event: message_start\n" + event for event in events]
    bodies = [*RUBBISH, *events, *named, b"data: [DONE]\n\n"]
    answers = (Raw(body, "text/event-stream") for body in bodies)
    async with asked_model(dialect, *answers, max_retries=0) as (model, _):
        for body in bodies:
            failure = await _failure(streamed(model))
            assert failure.code in ("model_bad_answer", "model_stream_broken"), body[:80]


@both
async def test_rubbish_in_a_refusal_is_an_error_all_the_same(dialect: Dialect) -> None:
    answers = (Raw(body, "application/json", 400) for body in RUBBISH)
    async with asked_model(dialect, *answers) as (model, _):
        for body in RUBBISH:
            failure = await _failure(model.complete("", HELLO, ()))
            assert failure.code == "model_bad_request", body[:80]
            assert len(failure.message) < 600


@both
async def test_an_answer_beyond_all_bounds_is_an_error(
    dialect: Dialect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sdk_model, "ANSWER_MAX", 100_000)
    endless = Raw(b'data: {"' + b"x" * 200_000, "text/event-stream")
    whole = Raw(b'{"' + b"x" * 200_000)
    async with asked_model(dialect, endless, whole) as (model, server):
        for asked in (streamed(model), model.complete("", HELLO, ())):
            assert "longer than 100000 bytes" in (await _failure(asked)).message
    assert len(server.requests) == 2


@both
async def test_compression_that_was_not_asked_for_is_an_error(dialect: Dialect) -> None:
    packed = Raw(b"\x1f\x8b", headers={"content-encoding": "gzip"})
    async with asked_model(dialect, packed) as (model, server):
        assert "compressed" in (await _failure(model.complete("", HELLO, ()))).message
    assert server.requests[0].headers["accept-encoding"] == "identity"


# -- silence ---------------------------------------------------------------------------------------


@both
async def test_a_server_that_says_nothing_more_is_given_up(dialect: Dialect) -> None:
    hung = BrokenOff(SAID, after=1, then="hang")
    async with asked_model(dialect, hung, hung, timeout_s=0.2, max_retries=0) as (model, server):
        for asked in (streamed(model), model.complete("", HELLO, ())):
            server.left.clear()
            failure = await _failure(asked)
            assert (failure.code, "in time" in failure.message) == ("model_unavailable", True)
            assert await asyncio.to_thread(server.left.wait, 10)


@both
@pytest.mark.parametrize("whole", [True, False])
async def test_cancellation_ends_the_request(dialect: Dialect, whole: bool) -> None:
    async with asked_model(dialect, BrokenOff(SAID, after=5, then="hang")) as (model, server):
        asked = model.complete("", HELLO, ()) if whole else streamed(model)
        task = asyncio.ensure_future(asked)
        assert await asyncio.to_thread(server.hanging.wait, 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(server.left.wait, 10)


@both
async def test_a_stream_that_nobody_reads_on_ends_the_request(dialect: Dialect) -> None:
    async with asked_model(dialect, BrokenOff(SAID, after=5, then="hang")) as (model, server):
        answer = model.stream("", HELLO, ())
        await anext(answer)
        await answer.aclose()
        assert await asyncio.to_thread(server.left.wait, 10)


@both
async def test_a_server_that_is_not_there_is_an_error(dialect: Dialect) -> None:
    with model_server() as server:
        pass
    model = made_model(dialect, server, max_retries=0)
    failure = await _failure(model.complete("", HELLO, ()))
    await model.close()
    assert failure.code == "model_unavailable"
    assert "cannot be reached" in failure.message


@both
async def test_a_late_answer_and_many_at_once(dialect: Dialect) -> None:
    """Each conversation gets its own answer, with calls of its own, over one client."""

    def answer(asked: Any) -> BrokenOff:
        call = ToolCall("x", "f", json.dumps({"of": asked.messages[0]["content"]}))
        return BrokenOff(Response("", (call,), stop="tools"), delay_s=0.01)

    async with asked_model(dialect, by=answer) as (model, _):
        texts = [f"marker-{n}" for n in range(30)]
        reported = await asyncio.gather(*(streamed(model, Message("user", text)) for text in texts))
    for text, (_, response) in zip(texts, reported, strict=True):
        assert text in response.tool_calls[0].arguments


async def _failure(asked: Any) -> SbxError:
    with pytest.raises(SbxError) as caught:
        await asked
    return caught.value
