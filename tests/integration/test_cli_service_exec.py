"""`sbx exec` and `sbx cp`: code into a sandbox of a running service, files in and out."""

import asyncio
import hashlib
import json
import os
import pty
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from command import COMMAND, environment, started
from serving import Service

from sbx.cli.cp_between import copy_file
from sbx.client import Client

STUBBORN = """
import time
print('ready', flush=True)
while True:
    try:
        time.sleep(60)
    except KeyboardInterrupt:
        print('no', flush=True)
"""


@pytest.fixture(scope="module")
def box(service: Service) -> str:
    """One for all of them: each leaves it fit for the next."""
    made = service.quick("create")
    assert made.returncode == 0, made.stderr
    return made.stdout.strip()


def refusal(ended: "subprocess.CompletedProcess[str]", code: int) -> str:
    assert (ended.returncode, ended.stdout) == (code, ""), ended
    assert ended.stderr.startswith("error: ")
    assert "Traceback" not in ended.stderr
    return ended.stderr


# -- exec ------------------------------------------------------------------------------------------


def test_output_goes_where_it_went_inside_and_state_is_kept(service: Service, box: str) -> None:
    code = "import sys\nprint('out')\nprint('err', file=sys.stderr)\nx = 6\nx * 7"
    ended = service.quick("exec", box, "-c", code)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "out\n42\n", "err\n")
    assert service.quick("exec", box, "-c", "x").stdout == "6\n"


def test_a_notebook_continues_after_an_expected_error(
    service: Service, box: str, tmp_path: Path
) -> None:
    cells = [
        {"cell_type": "code", "source": source, "metadata": {"tags": tags}}
        for source, tags in (
            ("1 / 0", ["raises-exception"]),
            ("print('never')", ["skip-execution"]),
            ("print('after')", []),
        )
    ]
    (tmp_path / "n.ipynb").write_text(json.dumps({"cells": cells, "nbformat": 4}))
    ended = service.quick("exec", box, tmp_path / "n.ipynb")
    assert (ended.returncode, ended.stdout) == (0, "after\n")
    assert "ZeroDivisionError" in ended.stderr


def test_code_comes_from_a_file_or_from_stdin(service: Service, box: str, tmp_path: Path) -> None:
    (tmp_path / "cell.py").write_text("print('from a file, é')")
    assert service.quick("exec", box, tmp_path / "cell.py").stdout == "from a file, é\n"
    assert service.quick("exec", box, "-", stdin=b"print('from stdin')").stdout == "from stdin\n"


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["-c", "1 / 0"], 1),
        (["-c", "import sys; sys.exit(7)"], 7),
        (["--shell", "-c", "exit 5"], 5),
        (["--timeout", "0.5", "-c", "while True: pass"], 124),
        (["-c", "import os; os.kill(os.getpid(), 9)"], 137),
    ],
    ids=["raises", "sys.exit", "shell", "time-out", "killed"],
)
def test_exit_codes_are_those_of_sbx_run(
    service: Service, box: str, words: list[str], code: int
) -> None:
    assert service.quick("exec", box, *words).returncode == code
    assert service.quick("exec", box, "-c", "print('goes on')").stdout == "goes on\n"


def test_json_is_the_run_and_events_are_lines(service: Service, box: str) -> None:
    run = json.loads(service.quick("exec", box, "--json", "-c", r"print('\x1b[31mred'); 2").stdout)
    assert (run["status"], run["stdout"], run["result"]) == ("ok", "\x1b[31mred\n", "2")
    ended = service.quick("exec", box, "--events", "-c", "print(1)\n1 / 0")
    kinds = [json.loads(line)["type"] for line in ended.stdout.splitlines()]
    assert list(dict.fromkeys(kinds)) == ["run_start", "stdout", "error", "run_end"]
    assert ended.returncode == 1


def test_a_conversation_has_variables_and_files_of_its_own(service: Service, box: str) -> None:
    service.quick("exec", box, "-c", "mine = 1; open('mine.txt', 'w').close()")
    look = "import os; print('mine' in globals(), os.path.exists('mine.txt'))"
    ended = service.quick("exec", box, "--conversation", "other", "-c", look)
    assert ended.stdout == "False False\n"


def test_a_command_gets_cwd_env_and_stdin(service: Service, box: str) -> None:
    service.quick("exec", box, "--shell", "-c", "mkdir -p sub")
    words = ["--shell", "--cwd", "sub", "--env", "MODE=x", "--stdin"]
    ended = service.quick(
        "exec", box, *words, "-c", 'echo "$MODE ${PWD##*/} $(cat)"', stdin=b"piped in"
    )
    assert ended.stdout == "x sub piped in\n"


def test_input_reads_lines_of_a_pipe(service: Service, box: str) -> None:
    code = "first = input('who? '); second = input(); print(first, '+', second)\ninput()"
    ended = service.quick("exec", box, "-c", code, stdin="Ada\nZoë\n".encode())
    assert ended.stdout == "Ada + Zoë\n"
    assert (ended.returncode, "EOFError" in ended.stderr) == (1, True)


def test_input_asks_at_a_terminal(service: Service, box: str) -> None:
    ours, theirs = pty.openpty()
    try:
        with subprocess.Popen(
            [*COMMAND, "exec", box, "-c", "print('hello', input('who? '))"],
            stdin=theirs,
            stdout=subprocess.PIPE,
            stderr=theirs,
            env=environment(SBX_SOCKET=str(service.socket)),
        ) as process:
            said = b""
            while b"who? " not in said:
                said += os.read(ours, 1024)
            os.write(ours, b"Ada\n")
            assert process.stdout is not None
            assert process.stdout.read() == b"hello Ada\n"
            assert process.wait(60) == 0
    finally:
        os.close(ours)
        os.close(theirs)


def test_ctrl_c_interrupts_and_the_variables_stay(service: Service, box: str) -> None:
    code = "kept = 5\nimport time\nprint('ready', flush=True)\ntime.sleep(60)"
    with started("exec", box, "-c", code, env={"SBX_SOCKET": str(service.socket)}) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        assert process.stderr is not None
        assert process.stderr.read().decode().endswith("error: interrupted\n")
    assert service.quick("exec", box, "-c", "kept").stdout == "5\n"


def test_a_second_ctrl_c_ends_the_kernel(service: Service, box: str) -> None:
    with started("exec", box, "-c", STUBBORN, env={"SBX_SOCKET": str(service.socket)}) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGINT)
        process.stdout.readline()  # the code has seen it, and goes on
        process.send_signal(signal.SIGINT)
        assert process.wait(60) in (130, 137)
    assert service.quick("exec", box, "-c", "print('anew')").stdout == "anew\n"


def test_sigterm_interrupts_the_run_and_leaves(service: Service, box: str) -> None:
    code = "import time\nprint('ready', flush=True)\ntime.sleep(60)"
    with started("exec", box, "-c", code, env={"SBX_SOCKET": str(service.socket)}) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.terminate()
        assert process.wait(60) == 143
    began = time.monotonic()
    assert service.quick("exec", box, "-c", "print('free')").stdout == "free\n"
    assert time.monotonic() - began < 30


def test_ctrl_c_while_it_waits_in_the_queue_hits_no_other_run(service: Service, box: str) -> None:
    env = {"SBX_SOCKET": str(service.socket)}
    busy = (
        "import os, time\nprint('busy', flush=True)\n"
        "while not os.path.exists('go'): time.sleep(0.01)\nprint('done')"
    )
    with started("exec", box, "-c", busy, env=env) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == b"busy\n"
        with (
            started("exec", box, "-c", "print('never')", env=env) as second,
            service.http() as http,
        ):
            end = time.monotonic() + 60
            while "sbx_queue_waiting 1.0" not in http.get("/metrics").text:
                assert time.monotonic() < end, "it never waited"
                time.sleep(0.05)
            second.send_signal(signal.SIGINT)
            assert second.wait(60) == 130
            assert second.stdout is not None
            assert second.stdout.read() == b""
        assert service.quick("exec", box, "--shell", "-c", "touch go").returncode == 0
        assert first.stdout.read() == b"done\n"
        assert first.wait(60) == 0


def test_exec_says_what_is_wrong(service: Service, box: str) -> None:
    for words in (
        ["exec", box],
        ["exec", box, "--cwd", "sub", "-c", "1"],
        ["exec", box, "--shell", "--stdin", "-"],
        ["exec", box, "--timeout", "-1", "-c", "1"],
        ["exec", "sandbox-000000000000", "-c", "1"],
        ["exec", box, "no-such-file.py"],
    ):
        refusal(service.quick(*words), 2)
    both = service.quick("exec", box, "--json", "--events", "-c", "1")
    assert (both.returncode, json.loads(both.stdout)["error"]["code"]) == (2, "validation_error")
    big = service.quick("exec", box, "--shell", "-i", "-c", "cat", stdin=b"x" * (2 << 20))
    assert "sbx cp" in refusal(big, 2)


# -- cp --------------------------------------------------------------------------------------------


def test_files_go_in_and_come_out_byte_for_byte(service: Service, box: str, tmp_path: Path) -> None:
    content = os.urandom(3 << 20)
    (tmp_path / "big.bin").write_bytes(content)
    sent = service.quick("cp", tmp_path / "big.bin", f"{box}:data/")
    assert (sent.returncode, sent.stderr) == (0, "")
    assert sent.stdout == f"{tmp_path}/big.bin -> {box}:data/big.bin\n"
    look = "import hashlib; print(hashlib.sha256(open('data/big.bin','rb').read()).hexdigest())"
    assert (
        service.quick("exec", box, "-c", look).stdout.strip() == hashlib.sha256(content).hexdigest()
    )
    got = service.quick("cp", "--json", f"{box}:data/big.bin", tmp_path / "back.bin")
    assert json.loads(got.stdout)["copied"] == [
        {
            "source": f"{box}:data/big.bin",
            "target": f"{tmp_path}/back.bin",
            "size": len(content),
        }
    ]
    assert (tmp_path / "back.bin").read_bytes() == content


def test_a_directory_takes_files_under_their_own_names(
    service: Service, box: str, tmp_path: Path
) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(name)
    service.quick("exec", box, "--shell", "-c", "mkdir -p here")
    both = [tmp_path / "a.txt", tmp_path / "b.txt"]
    assert service.quick("cp", *both, f"{box}:here").returncode == 0
    assert service.quick("exec", box, "--shell", "-c", "ls here").stdout == "a.txt\nb.txt\n"
    (tmp_path / "out").mkdir()
    assert service.quick("cp", f"{box}:here/a.txt", f"{box}:here/b.txt", tmp_path / "out").stdout
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["a.txt", "b.txt"]
    assert service.quick("cp", tmp_path / "a.txt", f"{box}:").stdout.endswith(f"{box}:a.txt\n")


def test_what_goes_to_temparea_is_an_upload(service: Service, box: str, tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_text("a,b\n")
    sent = service.quick("cp", tmp_path / "table.csv", f"{box}:uploads/temparea/")
    assert sent.returncode == 0, sent.stderr
    look = "open('/workspace/uploads/temparea/table.csv').read()"
    assert service.quick("exec", box, "-c", look).stdout == "'a,b\\n'\n"
    assert service.quick("exec", box, "-c", look.replace("')", "', 'w')")).returncode == 1
    got = service.quick("cp", f"{box}:uploads/temparea/table.csv", tmp_path / "back.csv")
    assert (got.returncode, (tmp_path / "back.csv").read_text()) == (0, "a,b\n")


def test_directories_go_in_and_come_out(service: Service, box: str, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "sub" / "empty").mkdir(parents=True)
    (tree / "sub" / "run").write_text("#!/bin/sh\necho ran\n")
    (tree / "sub" / "run").chmod(0o755)
    (tree / "é.bin").write_bytes(os.urandom(600_001))
    (tree / "link").symlink_to("sub/run")
    sent = service.quick("cp", "-r", tree, f"{box}:")
    assert (sent.returncode, sent.stderr) == (0, "")
    assert sent.stdout == f"{tree} -> {box}:tree\n"
    assert service.quick("exec", box, "--shell", "-c", "tree/link").stdout == "ran\n"
    assert service.quick("cp", "-r", f"{tree}/.", f"{box}:new/name").returncode == 0
    assert service.quick("exec", box, "--shell", "-c", "new/name/sub/run").stdout == "ran\n"
    got = service.quick("cp", "-r", f"{box}:tree", tmp_path / "back")
    assert (got.returncode, got.stderr) == (
        0,
        "1 entries were left out: links, devices and pipes\n",
    )
    back = tmp_path / "back"
    assert (back / "é.bin").read_bytes() == (tree / "é.bin").read_bytes()
    assert (back / "sub" / "empty").is_dir()
    assert not (back / "link").exists()
    assert service.quick("cp", "-r", f"{box}:tree/sub", back).returncode == 0
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "trap" / "tree").mkdir(parents=True)
    (tmp_path / "trap" / "tree" / "sub").symlink_to(tmp_path / "elsewhere")
    trapped = service.quick("cp", "-r", f"{box}:tree", tmp_path / "trap")
    assert "is a link" in refusal(trapped, 2)
    assert not list((tmp_path / "elsewhere").iterdir())


PLANTED = (
    "mkdir -p out/src && cd out && echo 1 > src/a.txt && echo 'touch M' > .envrc"
    " && git init -q . && git config core.fsmonitor 'touch M'"
    " && git init -q --bare lib && git -C lib config core.fsmonitor 'touch M'"
    " && mkdir -p env && echo 'home = /tmp' > env/pyvenv.cfg && echo x > env/python"
)


def test_cp_leaves_out_the_files_that_programs_of_the_host_obey(
    service: Service, box: str, tmp_path: Path
) -> None:
    """`git status` in the fetched directory ran a command that code in the sandbox had chosen."""
    planted = service.quick(
        "exec", box, "--shell", "-c", f"rm -rf out; {PLANTED} && touch .gitignore .new"
    )
    assert planted.returncode == 0, planted.stderr
    got = service.quick("cp", "-r", f"{box}:out", tmp_path)
    assert got.returncode == 3
    assert got.stderr.splitlines() == [
        "left out: out/.envrc (direnv would obey it on the host)",
        "left out: out/.git (git would obey it on the host)",
        "left out: out/.new (its name is new and begins with a dot, so a program may obey it on the"
        " host)",
        "left out: out/env (python would obey it on the host)",
        "left out: out/lib (git would obey it on the host)",
        "hint: look at them first; --with-host-executables copies them too",
    ]
    assert [str(path.relative_to(tmp_path)) for path in sorted(tmp_path.rglob("*"))] == [
        "out",
        "out/.gitignore",
        "out/src",
        "out/src/a.txt",
    ]
    for where in ("out", "out/lib"):
        subprocess.run(["git", "-C", tmp_path / where, "status"], capture_output=True, check=False)
    assert not list(tmp_path.rglob("M"))
    answer = json.loads(service.quick("cp", "-r", "--json", f"{box}:out/lib", tmp_path).stdout)
    assert answer["left_out"] == [{"path": "out/lib", "name": "git directory", "program": "git"}]
    assert not (tmp_path / "lib" / "HEAD").exists()


def test_cp_takes_host_executables_that_the_user_names_or_asks_for(
    service: Service, box: str, tmp_path: Path
) -> None:
    planted = service.quick("exec", box, "--shell", "-c", f"rm -rf out; {PLANTED}")
    assert planted.returncode == 0, planted.stderr
    assert service.quick("cp", f"{box}:out/.envrc", tmp_path).returncode == 0
    assert (tmp_path / ".envrc").read_text() == "touch M\n"
    every = service.quick("cp", "-r", "--with-host-executables", f"{box}:out", tmp_path)
    assert (every.returncode, every.stderr) == (0, "")
    assert (tmp_path / "out" / ".git" / "config").exists()
    assert (tmp_path / "out" / "lib" / "HEAD").exists()


def test_cp_does_not_complete_a_repository_that_begins_on_the_host(
    service: Service, box: str, tmp_path: Path
) -> None:
    for name in ("objects", "refs"):
        (tmp_path / "out" / name).mkdir(parents=True)
    code = "rm -rf out; mkdir out; echo 'ref: refs/heads/x' > out/HEAD; echo 1 > out/a"
    assert service.quick("exec", box, "--shell", "-c", code).returncode == 0
    assert service.quick("cp", "-r", f"{box}:out", tmp_path).returncode == 3
    assert not (tmp_path / "out" / "HEAD").exists()


def test_cp_says_what_is_wrong(service: Service, box: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    here = tmp_path / "a.txt"
    for words, said in (
        ([tmp_path, f"{box}:"], "use -r"),
        ([tmp_path / "missing", f"{box}:"], "missing"),
        ([here, tmp_path / "b.txt"], "ID:PATH"),
        ([f"{box}:a", f"{box}:b"], "a"),
        ([f"{box}:a", "sandbox-000000000000:b"], "a"),
        (["sandbox-000000000000:a", f"{box}:b"], "sandbox-000000000000"),
        ([here], "the target is missing"),
        ([f"{box}:missing.txt", tmp_path], "missing.txt"),
        ([here, f"{box}:../../etc/passwd"], "workspace"),
        ([f"{box}:a", f"{box}:b", here], "is not a directory"),
        ([here, "sandbox-000000000000:"], "sandbox-000000000000"),
    ):
        assert said in refusal(service.quick("cp", *words), 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt"]  # and nothing half done


@pytest.fixture
def other(service: Service) -> Iterator[str]:
    sandbox = service.quick("create").stdout.strip()
    yield sandbox
    service.quick("rm", sandbox)


def test_files_go_from_one_sandbox_to_another(service: Service, box: str, other: str) -> None:
    """It was refused: copy to a file on this machine first."""
    make = "mkdir -p tree/größe tree/empty; head -c 3000000 /dev/urandom > tree/größe/ü.bin;"
    make += " ln -s größe/ü.bin tree/link; echo a > one.txt; echo b > two.txt"
    assert service.quick("exec", box, "--shell", "-c", make).returncode == 0
    done = service.quick("cp", f"{box}:one.txt", f"{box}:two.txt", f"{other}:into/")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[1] == f"{box}:two.txt -> {other}:into/two.txt"
    assert service.quick("exec", other, "--shell", "-c", "cat into/*").stdout == "a\nb\n"
    document = json.loads(service.quick("cp", "--json", f"{box}:one.txt", f"{other}:").stdout)
    assert document["copied"] == [
        {"source": f"{box}:one.txt", "target": f"{other}:one.txt", "size": 2}
    ]
    up = service.quick("cp", f"{box}:one.txt", f"{other}:uploads/temparea/")
    assert up.returncode == 0, up.stderr
    refused = service.quick("exec", other, "--shell", "-c", "echo x > uploads/temparea/one.txt")
    assert refused.returncode != 0
    assert "use -r" in refusal(service.quick("cp", f"{box}:tree", f"{other}:"), 2)
    tree = service.quick("cp", "-r", f"{box}:tree", f"{other}:")
    assert (tree.returncode, tree.stdout) == (0, f"{box}:tree -> {other}:tree\n"), tree.stderr
    look = "find tree -type d | sort; readlink tree/link; sha256sum tree/größe/ü.bin"
    ours, theirs = (
        service.quick("exec", each, "--shell", "-c", look).stdout for each in (box, other)
    )
    assert ours == theirs != ""
    within = service.quick("cp", "-r", f"{other}:tree", f"{other}:again")
    assert within.returncode == 0, within.stderr
    assert service.quick("cp", "-r", f"{other}:tree", f"{other}:tree/below").returncode == 2


def test_a_copy_between_owners_needs_the_rights_of_both(service: Service, box: str) -> None:
    key = service.quick("key", "create", "--owner", "someone", "--json")
    theirs = json.loads(key.stdout)["key"]
    sandbox = service.quick("create", "--key", theirs).stdout.strip()
    for words in (
        (f"{box}:one.txt", f"{sandbox}:"),
        (f"{sandbox}:x", f"{box}:"),
    ):
        assert "does not exist" in refusal(service.quick("cp", *words, "--key", theirs), 2)
    service.quick("rm", sandbox, "--key", theirs)


@pytest.mark.parametrize("upload", [None, "ü.bin"])
async def test_an_interrupted_copy_between_sandboxes_leaves_nothing(
    service: Service, box: str, other: str, upload: str | None
) -> None:
    def stop(_done: int, _size: int | None) -> None:
        raise asyncio.CancelledError

    def files() -> set[Path]:
        return {path for path in service.data.rglob("*") if path.is_file() and "ü" in path.name}

    async with Client(service.socket) as client:
        source, target = (client.sandbox(each).conversation("default") for each in (box, other))
        await source.files.write("source-ü.bin", os.urandom(2 << 20))
        await target.files.write("ü.bin", b"old")
        before = files()
        with pytest.raises(asyncio.CancelledError):
            await copy_file(source, "source-ü.bin", target, "ü.bin", upload, stop)
        assert await target.files.read_bytes("ü.bin") == b"old"
        assert await target.uploads.list() == ()
    assert files() == before


def test_a_bar_is_shown_at_a_terminal_and_nowhere_else(
    service: Service, box: str, tmp_path: Path
) -> None:
    with (tmp_path / "big.bin").open("wb") as file:
        file.truncate(200 << 20)
    ours, theirs = pty.openpty()
    try:
        with subprocess.Popen(
            [*COMMAND, "cp", str(tmp_path / "big.bin"), f"{box}:big.bin"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=theirs,
            env=environment(SBX_SOCKET=str(service.socket), TERM="xterm", COLUMNS="120"),
        ) as process:
            os.close(theirs)
            said = b""
            try:
                while piece := os.read(ours, 4096):
                    said += piece
            except OSError:  # nobody holds its other end any more
                pass
            assert process.wait(60) == 0
        assert b"big.bin" in said
        assert b"MB" in said
    finally:
        os.close(ours)
    service.quick("exec", box, "--shell", "-c", "rm big.bin")
