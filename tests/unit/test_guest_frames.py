"""The wire inside a jail: whole frames, any bytes, and nothing that is not JSON."""

import json
import os
import signal
import socket
import threading
from collections.abc import Iterator

import pytest

from sbx.guest import frames
from sbx.guest.frames import FrameError, FrameReader, FrameWriter, RawFrame


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def _content(data: bytes) -> dict[str, object]:
    (frame,) = FrameReader().feed(data)
    return frame.content


def test_a_frame_is_a_length_and_json() -> None:
    data = frames.encode("stream", {"text": "é"}, "7")
    assert int.from_bytes(data[:4], "big") == len(data) - 4
    assert json.loads(data[4:]) == {"type": "stream", "content": {"text": "é"}, "id": "7"}


def test_reader_finds_frames_in_any_pieces() -> None:
    sent = [RawFrame("a", {"n": 1}), RawFrame("b", {}, "x"), RawFrame("c", {"text": "y" * 1000})]
    data = b"".join(frames.encode(frame.type, frame.content, frame.id) for frame in sent)
    for size in (1, 3, 7, len(data)):
        reader = FrameReader()
        pieces = [data[start : start + size] for start in range(0, len(data), size)]
        assert [frame for piece in pieces for frame in reader.feed(piece)] == sent


def test_receive_takes_one_frame_and_not_a_byte_more(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = pair
    ours.sendall(frames.encode("boot", {"a": 1}) + b"rest")
    assert frames.receive(theirs) == RawFrame("boot", {"a": 1})
    assert theirs.recv(10) == b"rest"


def test_receive_tells_the_end_of_the_stream_from_a_cut_frame(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = pair
    ours.sendall(frames.encode("boot", {})[:-1])
    ours.close()
    with pytest.raises(FrameError, match="ended inside"):
        frames.receive(theirs)
    assert frames.receive(theirs) is None


@pytest.mark.parametrize("body", [b"{", b"[]", b'{"content": {}}', b'{"type": 3}', b"\xff"])
def test_what_is_no_frame_is_refused(body: bytes) -> None:
    with pytest.raises(FrameError, match="not a frame"):
        FrameReader().feed(len(body).to_bytes(4, "big") + body)


def test_reader_refuses_a_length_before_it_gathers_it() -> None:
    with pytest.raises(FrameError, match="larger than"):
        FrameReader().feed((frames.MAX_RECEIVED + 1).to_bytes(4, "big"))


def test_a_body_larger_than_a_frame_is_refused() -> None:
    with pytest.raises(FrameError, match="larger than a frame"):
        frames.encode("display_data", {"data": "x" * frames.MAX_SENT})


def test_lone_surrogates_arrive_as_text() -> None:
    assert _content(frames.encode("stream", {"text": 'a\udc80"é'})) == {"text": 'a\\udc80"é'}


def test_numbers_that_json_lacks_arrive_as_text() -> None:
    content = _content(frames.encode("x", {"values": [float("nan"), float("inf"), 1.5]}))
    assert content == {"values": ["nan", "inf", 1.5]}


def test_bytes_become_base64_and_odd_keys_strings() -> None:
    content = _content(frames.encode("x", {"png": b"\x89PNG", "by": {(1, 2): {3}}}))
    assert content == {"png": "iVBORw==", "by": {"(1, 2)": [3]}}


def test_a_cycle_is_refused() -> None:
    cycle: list[object] = []
    cycle.append(cycle)
    with pytest.raises(FrameError):
        frames.encode("x", {"data": cycle})


def test_depth_is_judged_without_recursing_for_ever() -> None:
    deep: list[object] = []
    for _ in range(frames.MAX_DEPTH):
        deep = [deep]
    assert frames.too_deep(deep)
    assert not frames.too_deep({"a": [{"b": (1, 2)}]})


def test_frames_of_many_threads_do_not_mix(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    writer = FrameWriter(ours)
    text = "x" * 100_000

    def send(name: str) -> None:
        for _ in range(20):
            writer.send("stream", {"name": name, "text": text})

    threads = [threading.Thread(target=send, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    received = [frames.receive(theirs) for _ in range(80)]
    for thread in threads:
        thread.join()
    assert all(frame and frame.content["text"] == text for frame in received)


class _StruckError(Exception):
    pass


def test_an_exception_from_a_signal_handler_leaves_frames_whole(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    """The send blocks half-way on a full socket; the handler raises there."""
    ours, theirs = pair
    writer = FrameWriter(ours)
    big = "x" * 4_000_000

    def strike(_number: int, _frame: object) -> None:
        raise _StruckError

    def strike_in_send() -> None:
        theirs.recv(1, socket.MSG_PEEK)  # the frame has begun, and the socket cannot take all of it
        os.kill(os.getpid(), signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, strike)
    striker = threading.Thread(target=strike_in_send)
    striker.start()
    try:
        with pytest.raises(_StruckError):
            writer.send("stream", {"text": big})
    finally:
        striker.join()
        signal.signal(signal.SIGUSR1, before)
    later = threading.Thread(target=writer.send, args=("stream", {"text": "after"}))
    later.start()
    first, second = frames.receive(theirs), frames.receive(theirs)
    later.join()
    assert first
    assert second
    assert (len(first.content["text"]), second.content["text"]) == (len(big), "after")


def test_a_forked_child_cannot_write_to_the_socket(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = pair
    script = (
        "import os, socket, sys\n"
        "from sbx.guest.frames import FrameWriter\n"
        "writer = FrameWriter(socket.socket(fileno=int(sys.argv[1])))\n"
        "writer.mute_forks()\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    writer.send('stream', {'text': 'child'})\n"
        "    os.write(int(sys.argv[1]), b'raw bytes of the child')\n"
        "    os._exit(0)\n"
        "os.waitpid(pid, 0)\n"
        "writer.send('stream', {'text': 'parent'})\n"
    )
    import subprocess
    import sys
    from pathlib import Path

    subprocess.run(
        [sys.executable, "-c", script, str(ours.fileno())],
        pass_fds=[ours.fileno()],
        cwd=Path(frames.__file__).parents[2],
        env={**os.environ, "PYTHONPATH": str(Path(frames.__file__).parents[2])},
        check=True,
    )
    ours.close()
    assert frames.receive(theirs) == RawFrame("stream", {"text": "parent"})
    assert frames.receive(theirs) is None
