"""The line of requests before a kernel."""

import asyncio

import pytest

from sbx.jupyter import kernel_session
from sbx.jupyter.kernel_session import PendingRequests, QueuedRequest
from sbx.jupyter.parse import KernelRequest


def asked(kind: str, size: int = 1) -> QueuedRequest:
    header = {"msg_id": "1", "msg_type": kind}
    return QueuedRequest("shell", KernelRequest((b"who",), kind, header, {}, {}, (), size))


async def test_requests_are_taken_in_their_order() -> None:
    line = PendingRequests()
    taking = asyncio.create_task(line.take())
    await asyncio.sleep(0)
    for kind in ("a", "b"):
        await line.put(asked(kind))
    assert [(await taking).request.kind, (await line.take()).request.kind] == ["a", "b"]


async def test_those_of_one_kind_are_removed_and_others_keep_their_place() -> None:
    line = PendingRequests()
    for kind in ("a", "b", "a", "c"):
        line.add(asked(kind))
    assert [one.request.kind for one in line.remove("a")] == ["a", "a"]
    assert [one.request.kind for one in line.remove()] == ["b", "c"]
    taking = asyncio.create_task(line.take())
    await asyncio.sleep(0)
    assert not taking.done()
    taking.cancel()


@pytest.mark.parametrize(("most", "size"), [(2, 1), (100, 40)])
async def test_who_sends_more_than_may_wait_waits(
    monkeypatch: pytest.MonkeyPatch, most: int, size: int
) -> None:
    monkeypatch.setattr(kernel_session, "_MOST", most)
    monkeypatch.setattr(kernel_session, "_BYTES_MAX", 80)
    line = PendingRequests()
    for kind in ("a", "b"):
        await line.put(asked(kind, size))
    putting = asyncio.create_task(line.put(asked("c", size)))
    await asyncio.sleep(0)
    assert not putting.done()
    await line.take()
    await putting
    assert [one.request.kind for one in line.remove()] == ["b", "c"]
