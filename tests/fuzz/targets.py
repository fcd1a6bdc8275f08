"""What is fuzzed: each takes any bytes, and fails by an exception.

    frames       what comes over the wall: cut into pieces, split, decoded, and looked into
    paths        the one rule for paths that callers name
    rules        the cell's text as the rules of a policy read it, inside and at load

A target holds what it gets to everything that the rest of the runtime goes by.
"""

import ast
import contextlib
import json
import posixpath
import unicodedata
from collections.abc import Callable
from typing import Any

import msgspec

from sbx.errors import InvalidPath
from sbx.guest import import_rules
from sbx.kernels import frames as wire
from sbx.policy import imports
from sbx.policy.tables import Imports
from sbx.workspace.paths import WorkspaceArea, check_name, resolve

_PIECES = (1, 3, 7, 64, 1 << 16)
_TYPES = sorted(wire.KERNEL_FRAMES | wire.SUPERVISOR_FRAMES)
_ONE_OF_EACH_TYPE = range(7, 7 + 2 * len(_TYPES), 2)  # first bytes of `frames`


def frames(data: bytes) -> None:
    """The first byte says how: as a stream in pieces of some size, or as one frame of some type
    whose content the rest is."""
    if not data:
        return
    how, rest = data[0], data[1:]
    if how < len(_PIECES):
        bodies = _split(rest, _PIECES[how])
    elif how & 1:
        kind = _TYPES[how // 2 % len(_TYPES)].encode()
        bodies = [b'{"type":"' + kind + b'","id":"1","content":' + rest + b"}"]
    else:
        bodies = [rest]
    for body in bodies:
        for dialect in (wire.KERNEL, wire.SUPERVISOR):
            try:
                frame = dialect.decode(body)
            except wire.MalformedFrame as error:
                _is_safe_in_a_log(str(error))
                continue
            assert frame.size == len(body)
            assert frame.id is None or isinstance(frame.id, str)
            _look_into(frame.content)


def _is_safe_in_a_log(said: str) -> None:
    assert said.isascii()
    assert said.isprintable()


def _split(stream: bytes, size: int) -> list[bytes]:
    splitter, bodies = wire.FrameDecoder(), []
    with contextlib.suppress(wire.MalformedFrame):
        for start in range(0, len(stream), size):
            bodies += splitter.feed(stream[start : start + size])
    assert sum(4 + len(body) for body in bodies) <= len(stream)
    return bodies


def _look_into(content: Any) -> None:
    """As `sbx.runtime.run.active_run` does, and everything that is sent on after it."""
    for name in content.__struct_fields__:
        value = getattr(content, name)
        with contextlib.suppress(wire.MalformedFrame):
            if isinstance(value, msgspec.Raw):
                _is_plain(wire.loose(value))
            elif isinstance(value, dict) and name == "data":
                for mime, part in wire.bundle(value).items():
                    assert isinstance(mime, str)
                    _is_plain(part)
            elif isinstance(value, list) and value and isinstance(value[0], msgspec.Raw):
                for part in value:
                    _is_plain(wire.loose(part))
            else:
                _is_plain(value if not isinstance(value, bytes) else None)


def _is_plain(value: Any) -> None:
    """It goes into JSON by every encoder that we use, and comes back as it was."""
    assert _depth(value) <= wire.DEPTH_MAX
    assert json.loads(json.dumps(value, allow_nan=False)) == value
    assert msgspec.json.decode(msgspec.json.encode(value)) == value


def _depth(value: Any) -> int:
    inner: Any = ()
    if isinstance(value, dict):
        inner = value.values()
    elif isinstance(value, list):
        inner = value
    else:
        return 0
    return 1 + max(map(_depth, inner), default=0)


_TOP = {
    WorkspaceArea.FILES: "/workspace",
    WorkspaceArea.UPLOADS: "/workspace/uploads/temparea",
    WorkspaceArea.SHARED: "/workspace/shared",
}

_RESERVED = {("uploads",), ("uploads", "temparea"), ("uploads", "generated"), ("shared",)}


def paths(data: bytes) -> None:
    """The first byte says of which rule; the rest is the path, also where it is not UTF-8."""
    how, path = data[:1], data[1:].decode("utf-8", "surrogateescape")
    apart, changing = bool(how and how[0] & 1), bool(how and how[0] & 2)
    with contextlib.suppress(InvalidPath):
        assert check_name(path) == path
        _is_component(path)
    try:
        location = resolve(path, changing=changing, uploads_apart=apart)
    except InvalidPath as error:
        assert error.details["reason"]  # noqa: PT017  (most of these are refused)
        return
    for part in location.relative:
        _is_component(part)
    assert location == resolve(path, uploads_apart=apart)
    if changing:
        assert location.part is not WorkspaceArea.UPLOADS
        assert location.relative
        assert (
            apart or location.part is not WorkspaceArea.FILES or location.relative not in _RESERVED
        )
    if not apart and not path.startswith("/"):
        meant = posixpath.normpath(posixpath.join("/workspace", path))
        assert posixpath.join(_TOP[location.part], *location.relative) == meant


def _is_component(name: str) -> None:
    assert name not in ("", ".", "..")
    assert "/" not in name
    assert not any(unicodedata.category(char) == "Cc" for char in name)
    assert 1 <= len(name.encode()) <= 255


_RULES = Imports(allow=("os", "math", "json", "a"), forbid=("os.system", "subprocess", "a.b"))
_INSIDE = import_rules.ImportRules(frozenset(_RULES.allow), frozenset(_RULES.forbid))


def rules(data: bytes) -> None:
    """Both readers of the rules come to an answer; what is plainly imported gets the same one."""
    code = data.decode("utf-8", "surrogateescape")
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        with contextlib.suppress(SyntaxError, RecursionError):
            imports.refusals(code, _RULES)
        return
    inside = import_rules.check(tree, _INSIDE)
    if inside is not None:
        assert inside.line >= 1
        assert inside.sentence(_INSIDE)
    at_load = imports.refusals(code, _RULES)
    if all(isinstance(node, ast.Module | ast.Import | ast.alias) for node in ast.walk(tree)):
        assert bool(at_load) == (inside is not None)


TARGETS: dict[str, Callable[[bytes], None]] = {"frames": frames, "paths": paths, "rules": rules}

SEEDS: dict[str, tuple[bytes, ...]] = {
    "frames": (
        b"\x00\x00\x00\x00\x02{}\x00\x00\x00\x01x",
        b"\xf0" + b'{"type":"stream","id":"1","content":{"name":"stdout","text":"x"}}',
        b"\xf0"
        + b'{"type":"display_data","content":{"data":{"a/b":[[1,2.5,null,{"c":"\\u00e9"}]]},'
        b'"metadata":{},"transient":{"display_id":"1"},"cut":false}}',
        b'\xf0{"type":"execute_reply","id":"1","content":{"status":"error","execution_count":1,'
        b'"payload":[{}],"user_expressions":{},"ename":"E","evalue":"v","traceback":["t"]}}',
        b'\xf0{"type":"fed","id":"1","content":{"bytes":3,"open":true}}',
        b'\xf0{"type":"tty","id":"1","content":{"data":"eA=="}}',
        b'\xf0{"type":"exited","id":"1","content":{"code":0}}',
        b'\xf0{"type":"exited","id":"1","content":{"error":"no"}}',
        b'\xf0{"type":"kernel_exited","content":{"signal":9}}',
        b'\xf0{"type":"complete_reply","id":"1","content":{"matches":["a"],"cursor_start":0,'
        b'"cursor_end":1,"status":"ok"}}',
        b"\xf0" + b"[" * 100 + b"]" * 100,
        b"\x07" + b"1" * 4301,
        b"\x07-1e308",
        *(bytes([one]) + b'{"data":{"a":1}}' for one in _ONE_OF_EACH_TYPE),
    ),
    "paths": (
        b"\x00a/../../etc/passwd",
        b"\x00/workspace/uploads/temparea/x",
        b"\x02uploads/../shared/x",
        b"\x01/uploads/../etc",
        b"\x00/sandbox/workspace/./a//b/",
        b"\x00\xff\xfe",
        b"\x03..",
        b"\x02" + b"a" * 256,
        "\x00a\uff0f..\uff0fb".encode(),
    ),
    "rules": (
        b"import os as o; o.system('x')",
        b"from os import system as s, path\ns()",
        b"__import__('subprocess').run",
        b"import a.b.c, math",
        b"from . import x\nfrom a import *",
        b"getattr(os, 'system')",
    ),
}

WORDS: dict[str, tuple[str, ...]] = {
    "frames": (
        *wire.KERNEL_FRAMES,
        *wire.SUPERVISOR_FRAMES,
        *("type", "id", "content", "data", "metadata", "transient", "name", "text", "stdout"),
        *('":', '","', "null", "true", "1e999", "NaN", "-0", "\\u0000", "\\ud800", "[[[[", "{}"),
    ),
    "paths": (
        *("..", "../", "/", "//", "./"),
        *("workspace", "sandbox", "uploads", "temparea", "shared"),
    ),
    "rules": ("import ", "from ", " as ", "os", "system", "subprocess", "__import__(", "getattr("),
}
"""Words for libFuzzer's dictionary."""
