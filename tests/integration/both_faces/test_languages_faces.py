"""Scripts in other languages, embedded and connected: the same words, the same answers."""

import asyncio
import threading

import pytest

from both_faces.faces import Box, Make, says
from sbx import Sandbox
from sbx.errors import BadRequest, Denied, TooLarge
from sbx.protocol.runs import RunEnd, RunStart


@pytest.mark.full_tier
def test_a_script_is_given_everything_and_tells_everything(cells: Sandbox) -> None:
    code = 'read -r line; pwd; echo "$1-$2-$A-$line"; echo no >&2; exit 4'
    run = cells.run_script(
        code, "bash", args=["a b", "--c"], env={"A": "é"}, stdin="in\n", cwd="/tmp", timeout=20
    )
    assert (run.status, run.exit_code, run.stderr) == ("error", 4, "no\n")
    assert run.stdout == "/tmp\na b---c-é-in\n"


def test_a_language_has_short_names(cells: Sandbox) -> None:
    assert cells.run_script("echo $0 $1", "sh", args=["1"]).ok
    assert cells.run_script("process.stdout.write('js')", "node").stdout == "js"


def test_a_script_is_followed_live(cells: Sandbox) -> None:
    seen = list(cells.stream_script("echo one; sleep 0.2; echo two", "bash"))
    assert isinstance(seen[0], RunStart)
    assert isinstance(seen[-1], RunEnd)
    assert seen[-1].run.stdout == "one\ntwo\n"
    assert any(says(event, "one") for event in seen)


def test_calls_that_are_wrong_raise_the_same(cells: Sandbox, make: Make) -> None:
    with pytest.raises(BadRequest, match="not a language") as caught:
        cells.run_script("1", "perl")
    assert caught.value.code == "unknown_language"
    with pytest.raises(BadRequest, match="without NUL"):
        cells.run_script("1", "bash", args=["\0"])
    with pytest.raises(BadRequest) as caught:
        cells.run_script("1", "bash", timeout=3601)
    assert caught.value.code == "limit_widened"
    with pytest.raises(BadRequest) as caught:
        cells.run_script("1", "bash", env={"A=B": ""})
    assert caught.value.code == "invalid_env"
    with pytest.raises(TooLarge):
        cells.run_script("1", "bash", args=["x" * (1 << 20)])
    with make("strict") as strict, pytest.raises(Denied) as denied:
        strict.run_script("1", "bash")
    assert denied.value.code == "processes_denied"


def test_a_conversation_s_script_sees_its_own_files(cells: Sandbox) -> None:
    cells.files.write("mine", "1")
    other = cells.conversation("other")
    other.files.write("other", "2")
    assert other.run_script("ls", "bash").stdout.split() == ["other", "uploads"]


def test_scripts_run_from_many_threads(cells: Sandbox) -> None:
    answer: list[str] = []

    def run(number: int) -> None:
        answer.append(cells.run_script("echo $1", "bash", args=[str(number)]).stdout)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(answer) == [f"{number}\n" for number in range(6)]


@pytest.mark.full_tier
async def test_cancelling_the_call_ends_the_script(box: Box) -> None:
    code = "trap 'touch told; exit' INT; touch started; while :; do sleep 0.01; done"
    waiting = asyncio.create_task(box.run_script(code, "bash"))
    await _until_there(box, "started")
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await _until_there(box, "told")


async def _until_there(box: Box, name: str) -> None:
    for _ in range(3000):
        if name in {one.name for one in await box.files.list()}:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"there is no {name}")
