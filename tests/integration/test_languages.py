"""Scripts in other languages: what they see, what they are given, how they end."""

import asyncio
import inspect
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from msgspec.structs import replace
from speaking import SPOKEN, SUMS, needs_language

from sbx import AsyncSandbox, Runtime
from sbx.errors import BadRequest
from sbx.protocol.languages import Language
from sbx.protocol.runs import Status
from sbx.runtime.processes import languages
from sbx.runtime.processes.languages import InstalledPrograms

pytestmark = pytest.mark.core

# A stand-in for the compiler that people install: it takes the one annotation of the test away.
COMPILER = """
exports.ModuleKind = { ESNext: 99 };
exports.ScriptTarget = { ES2022: 9 };
exports.transpileModule = code => ({ outputText: code.replace(': number', '') });
"""


@pytest_asyncio.fixture(scope="module")
async def runtime() -> AsyncIterator[Runtime]:
    async with Runtime() as runtime:
        yield runtime


@pytest_asyncio.fixture(scope="module")
async def box(runtime: Runtime) -> AsyncIterator[AsyncSandbox]:
    """One for all tests that leave its kernel usable."""
    async with await runtime.create() as box:
        yield box


async def left_in_tmp(box: AsyncSandbox) -> list[str]:
    """What scripts left in /tmp, beside caches."""
    run = await box.run("sorted(n for n in __import__('os').listdir('/tmp') if 'run-' in n)")
    assert run.result is not None
    found: list[str] = eval(run.result, {})
    return found


@pytest.mark.full_tier
@pytest.mark.parametrize("language", SPOKEN)
async def test_a_program_reads_a_file_and_writes_one(box: AsyncSandbox, language: Language) -> None:
    needs_language(language)
    await box.files.write(f"{language}/numbers.csv", "1\n2\n39\n")
    run = await box.run_script(
        inspect.cleandoc(SUMS[language]),
        language,
        args=["big world", "more"],
        env={"GREETING": "gruß"},
        stdin="reader\n",
        cwd=language,
    )
    assert (run.status, run.cause, run.exit_code) == ("error", None, 3), run.text
    assert (run.stdout, run.stderr) == ("hello big world reader\n", "gruß\n")
    assert await box.files.read(f"{language}/sum.txt") == "42\n"
    assert {one.name for one in await box.files.list(language)} == {"numbers.csv", "sum.txt"}
    assert await left_in_tmp(box) == []


async def test_code_that_is_well_ends_with_0_and_reads_an_empty_input(box: AsyncSandbox) -> None:
    run = await box.run_script("cat; echo out", "bash")
    assert (run.status, run.exit_code, run.stdout) == ("ok", 0, "out\n")
    assert (run.execution_count, run.result, run.outputs) == (None, None, ())


async def test_a_long_script_is_no_argument(box: AsyncSandbox) -> None:
    code = f"# {'x' * (1 << 20)}\ntr '\\0' '\\n' < /proc/self/cmdline; cat /proc/$$/cmdline | wc -c"
    run = await box.run_script(code, "bash")
    assert run.ok
    assert int(run.stdout.split()[-1]) < 100


async def test_a_script_runs_beside_a_busy_cell_and_other_scripts(box: AsyncSandbox) -> None:
    await box.run("x = 41")
    cell = asyncio.create_task(box.run("import time\nwhile True: time.sleep(0.01)"))
    waits = "touch s{0}; until [ -e s{1} ]; do sleep 0.01; done; rm -f s{1}"
    scripts = (box.run_script(waits.format(n, (n + 1) % 3), "bash", timeout=55) for n in range(3))
    assert all(run.ok for run in await asyncio.gather(*scripts))
    assert await box.interrupt()
    assert (await cell).status is Status.INTERRUPTED
    assert (await box.run("x + 1")).result == "42"


@pytest.mark.full_tier
@pytest.mark.parametrize(
    ("language", "code"),
    [
        ("bash", "while :; do :; done"),
        ("javascript", "process.on('SIGINT', () => {}); for (;;) {}"),
    ],
)
async def test_a_script_has_a_time_out_of_its_own(
    box: AsyncSandbox, language: Language, code: str
) -> None:
    needs_language(language)
    await box.run("x = 41")
    run = await box.run_script(code, language, timeout=0.5)
    assert (run.status, run.state_lost) == ("timeout", False)
    assert (await box.run("x + 1")).result == "42"
    assert await left_in_tmp(box) == []


async def test_a_script_that_replaces_its_own_place_loses_nothing_of_others(
    box: AsyncSandbox,
) -> None:
    await box.files.write("precious/file", "kept")
    run = await box.run_script('d=${0%/*}; rm -r "$d"; ln -s /workspace/precious "$d"', "bash")
    assert run.ok, run.text
    assert await box.files.read("precious/file") == "kept"
    assert (await box.shell("rm /tmp/.run-*")).ok


async def test_where_tmp_is_full_the_script_is_told_and_the_kernel_lives(runtime: Runtime) -> None:
    small = {"limits": {"tmp_size": "1MiB"}}
    async with await runtime.create(narrower=small) as box:
        run = await box.run_script(f"# {'x' * (2 << 20)}", "bash")
        assert (run.status, run.exit_code) == ("error", 126)
        assert "No space left" in run.stderr
        assert await left_in_tmp(box) == []
        assert (await box.run_script("echo on", "bash")).stdout == "on\n"


# -- what lies beside ------------------------------------------------------------------------------


async def test_javascript_finds_modules_and_files_beside_which_it_runs(box: AsyncSandbox) -> None:
    needs_language("javascript")
    await box.files.write("js/node_modules/greet/index.js", "module.exports = n => `hi ${n}`")
    await box.files.write("js/old.js", "exports.x = 40")
    await box.files.write("js/new.mjs", "export const y = 2")
    module = "import greet from 'greet'; import old from './old.js'; import { y } from './new.mjs';"
    run = await box.run_script(
        f"{module}\nconsole.log(greet('new'), old.x + y, await 1)", "javascript", cwd="js"
    )
    assert (run.status, run.stdout) == ("ok", "hi new 42 1\n"), run.text
    script = """
        const greet = require('greet'), { x } = require('./old');
        if (require.main === module) import('./new.mjs').then(({ y }) =>
            console.log(greet('old'), x + y, __dirname));
    """
    run = await box.run_script(script, "javascript", cwd="js")
    assert (run.status, run.stdout) == ("ok", "hi old 42 /workspace/js\n"), run.text


@pytest.mark.full_tier
@pytest.mark.parametrize(
    ("code", "exit_code", "said"),
    [
        ("console.log(1", 1, "SyntaxError: missing )"),
        ("throw new Error('thrown')", 1, "Error: thrown"),
        ("import fs from 'fs';\nthrow new Error('thrown')", 1, "(script).js:2"),
        ("import './nowhere.mjs'", 1, "ERR_MODULE_NOT_FOUND"),
        ("await new Promise(() => {})", 13, ""),
        ("await 1; process.exit(0)", 0, ""),
        ("process.exitCode = 7; setTimeout(() => {}, 1)", 7, ""),
    ],
)
async def test_javascript_fails_as_by_node_itself(
    box: AsyncSandbox, code: str, exit_code: int, said: str
) -> None:
    needs_language("javascript")
    run = await box.run_script(code, "javascript")
    assert run.exit_code == exit_code, run.text
    assert said in run.stderr


async def test_what_javascript_printed_before_it_exits_is_not_lost(box: AsyncSandbox) -> None:
    needs_language("javascript")
    code = "for (let n = 0; n < 3000; n++) console.log('x'.repeat(999)); process.exit(5)"
    run = await box.run_script(code, "javascript")
    assert (run.exit_code, len(run.stdout)) == (5, 3_000_000)


async def test_typescript_by_a_compiler_of_the_workspace(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_language("javascript")
    monkeypatch.setattr(languages, "find", without_typescript(languages.find))
    monkeypatch.setattr(languages, "_cache", languages.Cache())
    async with await runtime.create() as box:
        typed = "const n: number = 42; console.log(n)"
        with pytest.raises(BadRequest) as caught:
            await box.run_script(typed, "typescript")
        assert caught.value.code == "language_unavailable"
        assert "typescript" in (caught.value.hint or "")
        await box.files.write("node_modules/typescript/package.json", '{"main": "index.js"}')
        await box.files.write("node_modules/typescript/index.js", COMPILER)
        run = await box.run_script(typed, "typescript")
        assert (run.status, run.stdout) == ("ok", "42\n"), run.text


def without_typescript(find: Any) -> Any:
    return lambda view: replace(find(view), node_version=(20, 0, 0), deno=None)


async def test_typescript_by_what_the_host_has(box: AsyncSandbox) -> None:
    needs_language("typescript")
    run = await box.run_script("enum E { A = 42 }\nconsole.log(E.A)", "typescript")
    assert (run.status, run.stdout, run.stderr) == ("ok", "42\n", "")


@pytest.mark.full_tier
@pytest.mark.timeout(60)
async def test_java_finds_the_jars_of_the_workspace(box: AsyncSandbox) -> None:
    needs_language("java")
    greeter = "package greet; public class Greeter { public static int answer() { return 42; } }"
    await box.files.write("java/greet/Greeter.java", greeter)
    made = await box.shell(
        "javac -J-XX:TieredStopAtLevel=1 -d /tmp/classes greet/Greeter.java && mkdir lib"
        " && python3 -c \"import shutil; shutil.make_archive('lib/greet', 'zip', '/tmp/classes')\""
        " && mv lib/greet.zip lib/greet.jar",
        cwd="java",
    )
    assert made.ok, made.text
    code = (
        "class A { public static void main(String[] args) {"
        " System.out.print(greet.Greeter.answer()); } }"
    )
    run = await box.run_script(code, "java", cwd="java")
    assert (run.status, run.stdout) == ("ok", "42"), run.text
    elsewhere = await box.run_script(code, "java")
    assert "package greet does not exist" in elsewhere.stderr


async def test_go_finds_the_packages_of_its_module(box: AsyncSandbox) -> None:
    needs_language("go")
    await box.files.write("go/go.mod", "module example.org/mine\n\ngo 1.18\n")
    await box.files.write("go/greet/greet.go", "package greet\n\nfunc Answer() int { return 42 }\n")
    code = (
        'package main\nimport ("fmt"; "example.org/mine/greet")\n'
        "func main() { fmt.Print(greet.Answer()) }"
    )
    run = await box.run_script(code, "go", cwd="go")
    assert (run.status, run.stdout) == ("ok", "42"), run.text
    failed = await box.run_script("package main\nfunc main() { x := 1 }", "go")
    assert failed.status is Status.ERROR
    assert "declared" in failed.stderr
    assert await left_in_tmp(box) == []


# -- what is refused -------------------------------------------------------------------------------


async def test_a_language_that_is_not_there_says_so_and_starts_nothing(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(languages, "find", lambda view: InstalledPrograms(bash="/usr/bin/bash"))
    monkeypatch.setattr(languages, "_cache", languages.Cache())
    async with await runtime.create() as box:
        for language, package in (("java", "default-jdk"), ("go", "golang")):
            with pytest.raises(BadRequest) as caught:
                await box.run_script("1", language)
            assert caught.value.code == "language_unavailable"
            assert caught.value.details == {
                "language": language,
                "install": package,
                "available": ["bash"],
            }
            with pytest.raises(BadRequest):
                async for _ in box.stream_script("1", language):
                    pass
        assert box.receipt is None
