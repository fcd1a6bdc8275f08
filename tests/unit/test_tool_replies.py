"""What the six tools tell a model, over a sandbox whose answers were written down."""

import asyncio
import base64
import json
import struct
import zlib
from typing import Any

import pytest

from sbx.agent.messages import ToolCall
from sbx.agent.tools import paths
from sbx.agent.tools.execution import describe_run
from sbx.agent.tools.figures import Figure, can_be_shown
from sbx.agent.tools.registry import Tools
from sbx.agent.tools.results import cut
from sbx.errors import Denied, InvalidPath, SbxError
from sbx.protocol.runs import Cause, Run, RunError, RunStart, Status, Stderr, Stdout
from tests.unit.fake_toolbox import FakeToolbox, called, ended

TOOLS = Tools()


def png(width: int = 1, height: int = 1) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        crc = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + crc

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    pixels = zlib.compress(b"\0\0")
    parts = chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts


# -- runs in words ---------------------------------------------------------------------------------

ZERO = RunError("ZeroDivisionError", "division by zero", "\x1b[31mTrace\x1b[39m\nZero: division")
MEMORY = RunError("MemoryLimit", "the run used more memory than the limit of 9 bytes", "")


@pytest.mark.parametrize(
    ("run", "text"),
    [
        (Run("r", Status.OK), "(no output)"),
        (
            Run("r", Status.OK, stdout="a\n", stderr="b\n", result="2", exit_code=0),
            "[stdout]\na\n\n[stderr]\nb\n\n[result]\n2\n\nExit code: 0.",
        ),
        (Run("r", Status.OK, stdout="5%\r50%\r100%\r\nend"), "[stdout]\n100%\nend"),
        (Run("r", Status.OK, stdout="\x1b]0;title\x07\x1b[1;31mred\x1b[0m"), "[stdout]\nred"),
        (Run("r", Status.ERROR, error=ZERO), "[error]\nTrace\nZero: division"),
        (
            Run("r", Status.ERROR, error=RunError("CommandNotStarted", "there is no bash", "")),
            "CommandNotStarted: there is no bash",
        ),
        (
            Run("r", Status.KILLED, Cause.MEMORY, error=MEMORY, state_lost=True),
            "The run was killed: the run used more memory than the limit of 9 bytes. The variables"
            " and imports of earlier runs are lost: run again what you need of them.",
        ),
        (Run("r", Status.KILLED, Cause.DISK), "The run was killed: it wrote more to the disk than"),
        (Run("r", Status.TIMEOUT), "The run took longer than its time-out, and was stopped."),
        (Run("r", Status.INTERRUPTED), "The run was interrupted before its end."),
        (Run("r", Status.ERROR, Cause.PIDS, exit_code=1), "refused a further process"),
        (Run("r", Status.ERROR, exit_code=137), "Exit code: 137 (ended by SIGKILL)."),
        (Run("r", Status.ERROR, exit_code=255), "Exit code: 255."),
        (Run("r", Status.OK, stdout="x", truncated=True), "There was more output than may be kept"),
        (
            Run("r", Status.OK, outputs=({"text/plain": "one"}, {"text/plain": "2"}), result="2"),
            "[shown]\none\n\n[result]\n2",
        ),
    ],
)
def test_a_run_in_words(run: Run, text: str) -> None:
    assert text in describe_run(run)


def test_how_a_run_ended_is_left_by_a_cut() -> None:
    text = cut(describe_run(Run("r", Status.ERROR, stdout="x" * 9999, exit_code=3)), 500)
    assert text.endswith("Exit code: 3.")
    assert text.startswith("[stdout]\nxxx")


async def test_output_is_told_as_it_comes() -> None:
    start, end = ended(stdout="ab", stderr="c", exit_code=0)
    box = FakeToolbox(start, Stdout("a"), Stderr("c"), Stdout("b"), end)
    heard: list[tuple[str, str]] = []
    call = ToolCall("1", "execute_command", '{"command": "x", "cwd": "d", "timeout": 2}')
    result = await TOOLS.call(call, box, lambda stream, text: heard.append((stream, text)))
    assert heard == [("stdout", "a"), ("stderr", "c"), ("stdout", "b")]
    assert result.text.endswith("Exit code: 0.")
    assert box.asked == [("shell", "x", "2", "d")]


@pytest.mark.parametrize(("language", "how"), [("python", "run"), ("go", "script")])
async def test_python_is_a_cell_and_other_languages_are_scripts(language: str, how: str) -> None:
    box = FakeToolbox(*ended())
    await called(TOOLS, "run_code", json.dumps({"code": "x", "language": language}), box)
    assert [asked[0] for asked in box.asked] == [how]


async def test_whoever_goes_away_gives_up_the_run() -> None:
    def gone(stream: str, text: str) -> None:
        raise asyncio.CancelledError

    box = FakeToolbox(RunStart("r"), Stdout("a"), *ended())
    with pytest.raises(asyncio.CancelledError):
        await TOOLS.call(ToolCall("1", "run_code", '{"code": "x"}'), box, gone)
    assert len(box.given_up) == 1


async def test_a_run_without_a_result_is_an_error() -> None:
    result = await called(TOOLS, "run_code", '{"code": "x"}', FakeToolbox(RunStart("r")))
    assert result.is_error
    assert "run_lost" in result.text


# -- figures ---------------------------------------------------------------------------------------


async def test_figures_are_kept_as_files_and_given_as_images() -> None:
    whole, broken = base64.b64encode(png()).decode(), base64.b64encode(png()[:-3]).decode()
    outputs = (
        {"image/png": whole, "text/plain": "<Figure>"},
        {"image/png": broken},
        {"image/png": "no base64!"},
        {"image/svg+xml": "<svg/>"},
        {"image/png": 7, "text/plain": "seven"},
    )
    box = FakeToolbox(*ended(outputs=outputs))
    result = await called(TOOLS, "run_code", '{"code": "x"}', box)
    assert [image.data for image in result.images] == [whole]
    assert [path.rpartition("-")[2] for path in box.files.content] == ["1.png", "2.png", "3.svg"]
    assert all(path in result.text for path in box.files.content)
    assert "<Figure>" not in result.text


async def test_many_figures_are_bounded() -> None:
    outputs = tuple({"image/png": base64.b64encode(png()).decode()} for _ in range(50))
    box = FakeToolbox(*ended(outputs=outputs))
    result = await called(TOOLS, "run_code", '{"code": "x"}', box)
    assert (len(result.images), len(box.files.content)) == (8, 20)
    assert "further figures were not kept" in result.text


@pytest.mark.parametrize(
    ("media_type", "content", "shown"),
    [
        ("image/png", png(8000, 8000), True),
        ("image/png", png(8001, 1), False),
        ("image/png", png(0, 1), False),
        ("image/png", b"\x89PNG\r\n\x1a\n", False),
        ("image/gif", b"GIF89a", False),
        ("image/jpeg", b"\xff\xd8\xff\xe0\0\4ab\xff\xc0\0\x0b\x08\0\1\0\2\1\1\0\0\xff\xd9", True),
        (
            "image/jpeg",
            b"\xff\xd8\xff\xe0\0\4ab\xff\xc0\0\x0b\x08\xff\1\0\2\1\1\0\0\xff\xd9",
            False,
        ),
        ("image/jpeg", b"\xff\xd8\xff\xe0\0\0ab\xff\xd9", False),
        ("image/jpeg", b"\xff\xd8\xff", False),
    ],
)
def test_only_what_a_provider_takes_is_an_image(
    media_type: str, content: bytes, shown: bool
) -> None:
    assert can_be_shown(Figure(media_type, content)) is shown


# -- files -----------------------------------------------------------------------------------------


async def read(content: bytes, **asked: Any) -> str:
    box = FakeToolbox()
    await box.files.write("a.dat", content)
    return (await called(TOOLS, "read_file", json.dumps({"path": "a.dat", **asked}), box)).text


async def test_a_file_is_read_as_it_is_or_with_line_numbers() -> None:
    assert await read(b"one\r\ntwo\n") == "one\r\ntwo\n"
    assert await read(b"") == "(the file is empty)"
    assert await read(b"one\r\ntwo\nthree", offset=2) == (
        "     2\ttwo\n     3\tthree\n[lines 2 to 3 of 3]"
    )
    assert await read(b"one\ntwo\nthree\n", limit=1) == (
        "     1\tone\n[lines 1 to 1 of 3; continue with offset 2]"
    )
    assert "has 3 lines" in await read(b"one\ntwo\nthree\n", offset=4)


async def test_long_files_and_lines_are_cut_without_a_copy() -> None:
    text = await read(b"x" * 100_000)
    assert "cut out here; read them with offset and limit" in text
    assert len(text) < 32_768
    text = await read(b"y" * 100_000 + b"\nz\n", limit=2)
    assert len(text) < 3000
    assert text.endswith("     2\tz\n[lines 1 to 2 of 2]")
    text = await read((b"w" * 1000 + b"\n") * 100, offset=1)
    assert len(text) < 32_768
    assert text.endswith("of 100; continue with offset 32]")


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (png(), "PNG image"),
        (b"%PDF-1.7\0", "PDF document"),
        ("text".encode("utf-16"), "text in UTF-16"),
        (b"a\0b", "of an unknown binary type"),
        ("Größe".encode("latin-1"), "of an unknown binary type"),
    ],
)
async def test_binary_is_refused_with_its_size_and_type(content: bytes, kind: str) -> None:
    assert f"not UTF-8 text: {len(content)} bytes, {kind}" in await read(content)


async def test_a_file_that_is_too_large_is_not_read() -> None:
    text = await read(b"x" * (paths.READ_MAX + 1))
    assert f"has {paths.READ_MAX + 1} bytes" in text


async def edited(content: str, **asked: Any) -> tuple[str, str]:
    box = FakeToolbox()
    await box.files.write("a", content)
    result = await called(TOOLS, "edit_file", json.dumps({"path": "a", **asked}), box)
    return result.text, box.files.content["/workspace/a"].decode()


@pytest.mark.parametrize(
    ("content", "old", "said"),
    [
        ("a b c", "x", "is not in 'a'"),
        ("a\nb\nb\n", "b", "is in 'a' 2 times, at lines 2, 3"),
        ("b " * 20, "b", "20 times, at lines 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, …"),
        ("a\r\nb", "a\nb", "CRLF"),
        ("if x:\n    y", "if x: y", "other white space"),
        ("new", "new", "are the same"),
    ],
)
async def test_an_edit_that_is_not_sure_is_refused_and_says_which(
    content: str, old: str, said: str
) -> None:
    text, after = await edited(content, old_string=old, new_string="new")
    assert said in text
    assert after == content


async def test_an_edit_replaces_one_or_all() -> None:
    text, after = await edited("a\nb\n", old_string="b", new_string="b\\1\r\n")
    assert (text, after) == ("replaced once in a, at line 2 of the old text", "a\nb\\1\r\n\n")
    text, after = await edited("b\nb\n", old_string="b", new_string="", replace_all=True)
    assert (text, after) == ("replaced 2 times in a, at lines 1, 2 of the old text", "\n\n")


async def test_an_edit_computes_its_size_before_it_replaces() -> None:
    """A model asked for 2^40 bytes by a file and a text of 1 MiB each (holes 2.2a)."""
    asked = {"old_string": "a", "new_string": "b" * (1 << 20), "replace_all": True}
    text, after = await edited("a" * (1 << 20), **asked)
    assert "larger than the limit of 16777216 bytes" in text
    assert len(after) == 1 << 20


async def test_edits_of_one_answer_do_not_lose_each_other() -> None:
    box = FakeToolbox()
    await box.files.write("a", "0123456789")
    real = box.files.read_bytes

    async def slow(path: str) -> bytes:
        content = await real(path)
        await asyncio.sleep(0)
        return content

    box.files.read_bytes = slow  # type: ignore[method-assign]
    edits = [{"path": "a", "old_string": str(n), "new_string": "x"} for n in range(10)]
    await asyncio.gather(*(called(TOOLS, "edit_file", json.dumps(edit), box) for edit in edits))
    assert box.files.content["/workspace/a"] == b"x" * 10


async def test_a_listing_is_one_line_each_and_bounded() -> None:
    box = FakeToolbox()
    for name in ["a\nfile  9  b", *(f"{n:04}" for n in range(600))]:
        await box.files.write(name, "123")
    rows = (await called(TOOLS, "list_files", "{}", box)).text.split("\n")
    assert len(rows) == 501
    assert rows[0] == "file                 3  /workspace/0000"
    assert "only the first" in rows[-1]
    result = await called(TOOLS, "list_files", '{"pattern": "a*"}', box)
    assert result.text == "file                 3  /workspace/a\\nfile  9  b"


# -- paths -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/etc/passwd", "/", "/tmpfs/x", "//etc", "/tmp/../etc/passwd"])
async def test_a_path_that_code_sees_and_tools_do_not_reach_says_so(path: str) -> None:
    box = FakeToolbox()
    with pytest.raises(InvalidPath) as caught:
        await paths.read(box, path)
    assert "below /workspace or /tmp" in (caught.value.hint or "")
    assert not box.asked


@pytest.mark.parametrize("path", ["/tmp/a\nb", "/tmp/\0", "/tmp/a\x7f", "/tmp/../tmp/../x"])
async def test_an_odd_path_below_tmp_never_gets_inside(path: str) -> None:
    box = FakeToolbox()
    with pytest.raises(InvalidPath):
        await paths.read(box, path)
    assert not box.asked


HOSTILE = '/tmp/a\'; rm -rf "$HOME" `x` \\ {} {{}} ") END-OF-PROGRAM'


async def test_a_hostile_path_is_data() -> None:
    box = FakeToolbox(*ended(stdout='{"size": 1, "content": ""}'))
    await paths.read(box, HOSTILE)
    told_inside = "".join(asked[1] for asked in box.asked)
    assert "rm -rf" not in told_inside
    assert "END-OF-PROGRAM\n" in told_inside
    request = told_inside.split('main("')[-1].split('"')[0]
    assert json.loads(base64.b64decode(request))["path"] == HOSTILE


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        ("", "tmp_unreachable"),
        ("no json", "tmp_unreachable"),
        ('{"size": "big"}', "tmp_unreachable"),
        ('{"entries": [{"path": "x", "kind": "door", "size": 1}]}', "tmp_unreachable"),
        ('{"size": 1, "content": "no base64!"}', "tmp_unreachable"),
        ('{"size": 99999999}', "file_too_large"),
        ('{"error": "No such file", "errno": 2}', "file_not_found"),
        ('{"error": "Permission denied", "errno": 13}', "file_not_permitted"),
        ('{"error": "Is a directory", "errno": 21}', "invalid_path"),
    ],
)
async def test_what_comes_back_from_inside_is_not_believed(answer: str, code: str) -> None:
    with pytest.raises(SbxError) as caught:
        await paths.read(FakeToolbox(*ended(stdout=answer)), "/tmp/x")
    assert caught.value.code == code


class InAProject(FakeToolbox):
    sandboxed = True
    commands_allowed = False


async def test_where_no_command_may_run_tmp_is_reached_by_a_cell() -> None:
    answer = ended(stdout='{"size": 0}')
    denied = FakeToolbox(*answer, refused=Denied("no", code="processes_denied"))
    await paths.write(denied, "/tmp/x", b"")
    assert [asked[0] for asked in denied.asked] == ["shell", "run"]
    project = InAProject(*answer)
    await paths.write(project, "/tmp/x", b"")
    assert [asked[0] for asked in project.asked] == ["run"]


async def test_with_the_sandbox_off_every_path_is_the_host_s() -> None:
    box = InAProject()
    box.sandboxed = False
    with pytest.raises(InvalidPath):
        await paths.read(box, "/tmp/x")
    assert not box.asked


async def test_a_large_file_for_tmp_is_a_script_and_a_huge_one_refused() -> None:
    box = FakeToolbox(*ended(stdout='{"size": 0}'))
    await paths.write(box, "/tmp/x", b"x" * 200_000)
    assert [asked[0] for asked in box.asked] == ["script"]
    with pytest.raises(SbxError) as caught:
        await paths.write(box, "/tmp/x", b"x" * (5 << 20))
    assert caught.value.code == "file_too_large"
