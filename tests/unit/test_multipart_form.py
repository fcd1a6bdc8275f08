"""The streamed reader of forms: bounded, and never taken in by a body that is cut or malformed."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from starlette.requests import Request

from sbx.api.multipart import Form, FormLimits, read_form, spool_to_disk
from sbx.errors import BadRequest, SbxError, TooLarge, Unavailable
from sbx.service.limits import UploadSlots

END = b"--B--\r\n"
LIMITS = FormLimits()


def part(header: str | bytes, content: bytes = b"x") -> bytes:
    head = header.encode() if isinstance(header, str) else header
    return b"--B\r\nContent-Disposition: " + head + b"\r\n\r\n" + content + b"\r\n"


async def pieces(body: bytes, size: int) -> AsyncIterator[bytes]:
    for start in range(0, len(body), size):
        yield body[start : start + size]


def form_of(body: bytes, size: int = 1 << 16, limits: FormLimits = LIMITS) -> Form:
    return Form(pieces(body, size), b"B", limits)


async def read(form: Form) -> list[tuple[str, str | None, bytes]]:
    return [
        (one.name, one.filename, b"".join([chunk async for chunk in one.chunks()]))
        async for one in form
    ]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 1 << 16])
async def test_a_form_is_the_same_however_it_is_cut_into_pieces(size: int) -> None:
    content = b"\r\n--B\r\r\n-\r\n--\r\n--B-x" * 20
    body = (
        part('form-data; name="conversation_id"', "ü".encode())
        + part('form-data; name="file"; filename="a b.csv"', content)
        + part('form-data; name="empty"', b"")
        + END
    )
    assert await read(form_of(body, size)) == [
        ("conversation_id", None, "ü".encode()),
        ("file", "a b.csv", content),
        ("empty", None, b""),
    ]


@pytest.mark.parametrize(
    ("header", "filename"),
    [
        ('form-data; name="f"; filename="données.csv"', "données.csv"),
        (r'form-data; name="f"; filename="a\"b\\c.csv"', 'a"b\\c.csv'),
        (r'form-data; name="f"; filename="C:\dir\x.csv"', r"C:\dir\x.csv"),
        ("form-data; name=f; filename=x.csv", "x.csv"),
        ("form-data; name=\"f\"; filename*=UTF-8''%E2%82%AC.csv", "€.csv"),
        ('form-data; name="f"; filename="a.csv"; filename*=UTF-8\'\'b.csv', "a.csv"),
        ('form-data; name="f"; filename="a;b=c.csv"', "a;b=c.csv"),
        ('form-data; name="f"; filename=""', ""),
        ('form-data; name="f"', None),
    ],
)
async def test_names_of_files_are_kept_as_they_were_sent(header: str, filename: str | None) -> None:
    ((name, found, _),) = await read(form_of(part(header) + END))
    assert (name, found) == ("f", filename)


async def test_bytes_of_a_name_that_are_no_utf8_are_not_replaced() -> None:
    body = part(b'form-data; name="f"; filename="a\xff.csv"') + END
    ((_, found, _),) = await read(form_of(body))
    assert found == "a\udcff.csv"


@pytest.mark.parametrize(
    "header",
    [
        "form-data",
        "attachment; name=f",
        'form-data; filename="x"',
        'form-data; name="f',
        'form-data; name="f"; name="g"',
        'form-data; name="f"; filename="' + "\\" * 999,
        "form-data; name=\"f\"; filename*=latin1''x",
        'form-data; name="f"; filename*=x',
    ],
)
async def test_a_part_that_does_not_say_its_name_is_refused(header: str) -> None:
    with pytest.raises(BadRequest) as refused:
        await read(form_of(part(header) + END))
    assert refused.value.code == "malformed_form"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"--B",
        b"--B\r\n",
        part("form-data; name=f"),
        part("form-data; name=f")[:-9],
        b"\r\n\r\n",
    ],
)
async def test_a_body_that_ends_before_its_form_is_refused(body: bytes) -> None:
    with pytest.raises(BadRequest) as refused:
        await read(form_of(body))
    assert refused.value.code == "truncated_body"


@pytest.mark.parametrize(
    "body", [b"hello", b"--C\r\n\r\n", b"--B\r\nbad header\r\n\r\n", b"--B\r\n: x\r\n\r\n"]
)
async def test_what_is_no_form_is_refused(body: bytes) -> None:
    with pytest.raises(BadRequest) as refused:
        await read(form_of(body))
    assert refused.value.code in ("malformed_form", "truncated_body")


async def refusal(body: bytes, limits: FormLimits = LIMITS) -> SbxError:
    with pytest.raises(SbxError) as refused:
        await read(form_of(body, limits=limits))
    return refused.value


async def test_ten_thousand_fields_are_refused_after_the_first_few() -> None:
    body = part("form-data; name=f") * 10_000 + END
    error = await refusal(body)
    assert (error.code, error.details) == ("too_many_parts", {"limit": 32})


async def test_headers_of_a_part_are_bounded_in_all() -> None:
    many = b"--B\r\n" + b"".join(b"x-%d: y\r\n" % n for n in range(5_000)) + b"\r\n"
    assert (await refusal(many)).code in ("headers_too_large", "malformed_form")
    one = b"--B\r\nx: " + b"y" * 100_000
    assert (await refusal(one)).code in ("headers_too_large", "malformed_form")


async def test_the_same_header_twice_is_refused() -> None:
    body = b"--B\r\nContent-Disposition: form-data; name=f\r\n" * 1
    body += b"content-disposition: form-data; name=g\r\n\r\nx\r\n" + END
    assert (await refusal(body)).code == "malformed_form"


async def text(body: bytes, limits: FormLimits = LIMITS) -> list[str]:
    return [await one.text() async for one in form_of(body, limits=limits)]


async def test_a_field_is_bounded_and_text() -> None:
    limits = FormLimits(field_bytes=10)
    assert await text(part("form-data; name=f", b"x" * 10) + END, limits) == ["x" * 10]
    with pytest.raises(TooLarge) as large:
        await text(part("form-data; name=f", b"x" * 11) + END, limits)
    assert large.value.details == {"limit": 10}
    with pytest.raises(BadRequest):
        await text(part("form-data; name=f", b"\xff") + END)


async def test_a_part_that_nobody_reads_is_passed_over() -> None:
    body = part("form-data; name=a", b"a" * 100_000) + part("form-data; name=b", b"b") + END
    seen = []
    async for one in form_of(body, 999):
        seen.append(one.name)
        if one.name == "b":
            assert await one.text() == "b"
    assert seen == ["a", "b"]


async def test_what_follows_the_end_is_passed_over() -> None:
    assert len(await read(form_of(part("form-data; name=a") + END + b"epilogue" * 1000, 100))) == 1


@pytest.mark.parametrize(
    "kind",
    [None, "", "application/json", "multipart/form-data", "multipart/mixed; boundary=B", "\xff"],
)
def test_another_type_of_body_is_refused(kind: str | None) -> None:
    headers = [] if kind is None else [(b"content-type", kind.encode("latin-1"))]
    with pytest.raises(BadRequest) as refused:
        read_form(Request({"type": "http", "headers": headers}))
    assert refused.value.code == "unsupported_media_type"


def test_a_boundary_that_is_too_long_is_refused() -> None:
    kind = b"multipart/form-data; boundary=" + b"B" * 5000
    with pytest.raises(BadRequest) as refused:
        read_form(Request({"type": "http", "headers": [(b"content-type", kind)]}))
    assert refused.value.code == "malformed_form"


async def test_what_is_set_aside_comes_back_whole_and_leaves_nothing(tmp_path: Path) -> None:
    body = bytes(range(256)) * 5000
    async with spool_to_disk(pieces(body, 1000), tmp_path, len(body)) as chunks:
        assert os.listdir(tmp_path) == []
        assert b"".join([chunk async for chunk in chunks]) == body
    with pytest.raises(TooLarge):
        async with spool_to_disk(pieces(body, 1000), tmp_path, len(body) - 1):
            pass
    assert os.listdir(tmp_path) == []


async def test_uploads_beyond_their_number_wait_a_moment_and_are_then_refused() -> None:
    slots = UploadSlots(1, 1, wait_s=0.05)
    async with slots.take("alice"):
        with pytest.raises(Unavailable) as refused:
            async with slots.take("bob"):
                pass
        assert refused.value.code == "too_many_uploads"
        assert refused.value.details["limit"] == 1
        assert refused.value.details["retry_after_s"] > 0
        waiting = asyncio.create_task(enter(slots))
        await asyncio.sleep(0)
    await waiting


async def enter(slots: UploadSlots, owner: str = "bob") -> None:
    async with slots.take(owner):
        pass


async def test_an_owner_has_a_share_of_the_uploads_and_of_their_queue() -> None:
    slots = UploadSlots(3, 2, wait_s=600)
    async with slots.take("alice"), slots.take("alice"):
        more = [asyncio.create_task(enter(slots, "alice")) for _ in range(5)]
        await asyncio.sleep(0)
        assert not slots.awaited()
        async with asyncio.timeout(60):
            await enter(slots)
        async with slots.take("bob"):
            waiting = asyncio.create_task(enter(slots))
            await asyncio.sleep(0)
            assert slots.awaited()
        await waiting
        assert not slots.awaited()
    await asyncio.gather(*more)
