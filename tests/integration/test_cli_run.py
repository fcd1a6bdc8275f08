"""`sbx run`: what is shown, what is refused, and how it ends."""

import base64
import json
import os
import subprocess
from pathlib import Path

import pytest
from command import COMMAND, environment, in_process, sbx, started

PIXEL = base64.b64encode(
    bytes.fromhex(
        "89504e470d0a1a0a0000000d4948445200000001000000010804000000b51c0c020000000b4944415478"
        "da6364f80f00010501012718e3660000000049454e44ae426082"
    )
).decode()


def error_of(words: list[str | Path], **options: str) -> tuple[int, str]:
    """The exit code and the one sentence; nothing on stdout, and no traceback."""
    ended = in_process(*words, stdin=b"", **options)
    first, *more = ended.stderr.splitlines()
    assert ended.stdout == ""
    assert first.startswith("error: ")
    assert all(line.startswith("hint: ") for line in more)
    return ended.returncode, first


def test_prints_and_the_last_value_go_to_stdout_and_nothing_else_does() -> None:
    ended = in_process(
        "run", "-c", "import sys\nprint('out')\nprint('err', file=sys.stderr)\n6 * 7"
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "out\n42\n", "err\n")


def test_code_comes_from_a_file_or_from_stdin(tmp_path: Path) -> None:
    (tmp_path / "cell.py").write_text("\ufeffprint('from a file, é')")
    assert in_process("run", tmp_path / "cell.py").stdout == "from a file, é\n"
    assert in_process("run", "-", stdin=b"print('from stdin')").stdout == "from stdin\n"


def test_code_that_raises_ends_with_1_and_its_traceback_without_colours_on_stderr() -> None:
    ended = in_process("run", "-c", "print('before', end='')\n1 / 0")
    assert (ended.returncode, ended.stdout) == (1, "before")
    assert "ZeroDivisionError: division by zero" in ended.stderr
    assert "\x1b" not in ended.stderr


@pytest.mark.parametrize(("argument", "code"), [("7", 7), ("'told why'", 1)])
def test_sys_exit_gives_its_own_code(argument: str, code: int) -> None:
    ended = in_process("run", "-c", f"import sys\nsys.exit({argument})")
    assert ended.returncode == code
    assert ("told why" in ended.stderr) == (code == 1)


def test_a_shell_script_ends_the_process_with_its_own_code() -> None:
    ended = sbx("run", "--shell", "-c", "echo out; echo err >&2; exit 5")
    assert (ended.returncode, ended.stdout, ended.stderr) == (5, "out\n", "err\n")


def test_a_run_beyond_its_time_out_ends_with_124() -> None:
    ended = in_process("run", "--timeout", "0.5", "-c", "while True: pass")
    assert ended.returncode == 124
    assert "error: the run took longer than its time-out" in ended.stderr


def test_a_policy_may_be_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = 'schema = 1\nextends = "default"\n[env]\nMODE = "mine"\n'
    (tmp_path / "lab.toml").write_text(own)
    monkeypatch.chdir(tmp_path)
    ended = in_process("run", "--policy", "lab.toml", "-c", "import os; os.environ['MODE']")
    assert ended.stdout == "'mine'\n"


def test_a_run_that_a_limit_killed_ends_with_137_and_names_the_limit() -> None:
    ended = in_process("run", "-c", "hoard = b'x' * (3 << 30)")
    assert (ended.returncode, ended.stdout) == (137, "")
    assert ended.stderr.startswith("error: killed (memory): ")
    assert "limits.memory_max" in ended.stderr


def test_control_characters_are_written_out_and_colours_dropped_where_none_are_shown() -> None:
    ended = in_process(
        "run", "-c", r"print('\x1b[31mred\x1b[0m \x1b]0;title\x07 \x9b2J', flush=True)"
    )
    assert ended.stdout == "red \\x1b]0;title\\x07 \\x9b2J\n"


def test_json_is_the_whole_run_as_one_document_with_the_exact_text() -> None:
    ended = in_process("run", "--json", "-c", r"print('\x1b[31mred\x9b'); 2")
    run = json.loads(ended.stdout)
    assert (run["status"], run["stdout"], run["result"]) == ("ok", "\x1b[31mred\x9b\n", "2")
    assert ended.stdout.isascii()
    assert ended.stderr == ""


def test_events_are_lines_of_json_that_end_with_the_run() -> None:
    ended = in_process("run", "--events", "-c", "print(1)\n1 / 0")
    events = [json.loads(line) for line in ended.stdout.splitlines()]
    kinds = [event["type"] for event in events]
    # Python itself prints the traceback of a program
    assert list(dict.fromkeys(kinds)) == ["run_start", "stdout", "stderr", "run_end"]
    assert events[-1]["run"]["error"]["name"] == "ZeroDivisionError"
    assert (ended.returncode, ended.stderr) == (1, "")


def test_an_error_is_json_with_json() -> None:
    ended = in_process("run", "--json", "-c", "1", "--policy", "defualt")
    error = json.loads(ended.stdout)["error"]
    assert (ended.returncode, error["code"]) == (2, "policy_not_found")
    assert "did you mean default?" in error["message"]
    assert ended.stderr == ""


def test_uploads_are_copied_in_read_only(tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_text("a,b\n")
    look = (
        "path = '/workspace/uploads/temparea/table.csv'\nprint(open(path).read())\nopen(path, 'w')"
    )
    ended = in_process("run", "--upload", tmp_path / "table.csv", "-c", look)
    assert ended.stdout == "a,b\n\n"
    assert "Read-only file system" in ended.stderr or "Permission denied" in ended.stderr


def test_a_directory_of_uploads_and_variables_are_seen_inside(tmp_path: Path) -> None:
    (tmp_path / "data.txt").write_text("seen")
    tmp_path.chmod(0o755)  # a root runtime gives its jails uids of their own, which must get in
    code = "import os; print(open('uploads/temparea/data.txt').read(), os.environ['MODE'])"
    ended = in_process("run", "--uploads", tmp_path, "--env", "MODE=a=b", "-c", code)
    assert ended.stdout == "seen a=b\n"


def test_a_host_directory_as_workspace_gets_the_files_and_nothing_of_ours(tmp_path: Path) -> None:
    workspace = tmp_path / "project"
    workspace.mkdir()
    os.chown(workspace, 12345, 12345) if os.geteuid() == 0 else None
    ended = in_process("run", "--workspace", workspace, "-c", "open('made.txt', 'w').write('here')")
    assert (ended.returncode, os.listdir(workspace)) == (0, ["made.txt"])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has directories of root")
def test_a_workspace_from_which_the_host_runs_as_root_is_refused() -> None:
    code, sentence = error_of(["run", "-c", "1", "--workspace", "/etc"])
    assert code == 3
    assert "cannot be shown to a sandbox" in sentence


def test_figures_are_written_only_where_asked_and_over_no_file(tmp_path: Path) -> None:
    code = (
        f"from IPython.display import display\n"
        f"for _ in range(2): display({{'image/png': '{PIXEL}', 'text/plain': '<fig>'}}, raw=True)"
    )
    (tmp_path / "figure-1.png").write_text("mine")
    ended = in_process("run", "--figures", tmp_path, "-c", code)
    assert ended.stdout == "<fig>\n<fig>\n"
    assert (tmp_path / "figure-1.png").read_text() == "mine"
    assert sorted(os.listdir(tmp_path)) == ["figure-1.png", "figure-2.png", "figure-3.png"]
    assert (tmp_path / "figure-3.png").read_bytes().startswith(b"\x89PNG")
    assert f"figure: {tmp_path}/figure-3.png" in ended.stderr


def test_code_reads_no_pipe_without_the_option() -> None:
    """It may be hostile, and the pipe may be the input of the program that starts it."""
    ended = in_process("run", "-c", "input('name? ')", stdin=b"secret\n")
    assert ended.returncode == 1
    assert "EOFError: EOF when reading a line" in ended.stderr
    assert "secret" not in ended.stdout + ended.stderr


def test_input_reads_lines_of_a_pipe_and_the_end_is_an_error_of_the_code() -> None:
    ended = in_process("run", "-i", "-c", "print(input('who? '))\ninput()", stdin=b"Ada\n")
    assert (ended.returncode, ended.stdout) == (1, "who? Ada\n")
    assert ended.stderr.endswith("EOFError: EOF when reading a line\n")
    assert 'File "<string>", line 2, in <module>\n' in ended.stderr
    assert "sbx/guest" not in ended.stderr


def test_input_without_any_stdin_is_its_end() -> None:
    """A socket of sbx had the number 0, and the answer was read from there."""
    words = ["sh", "-c", 'exec "$@" <&-', "sh", *COMMAND]
    ended = subprocess.run(
        [*words, "run", "-i", "-c", "input()"], capture_output=True, env=environment(), check=False
    )
    assert ended.returncode == 1
    assert ended.stderr.endswith(b"EOFError: EOF when reading a line\n")


def test_a_command_and_a_script_get_stdin_on_request() -> None:
    assert in_process("run", "--shell", "-c", "cat", stdin=b"a").stdout == ""
    assert in_process("run", "--shell", "-i", "-c", "cat", stdin=b"a b\n").stdout == "a b\n"
    script = in_process("run", "-i", "-l", "bash", "-c", "read x; echo $x", stdin=b"a b\n")
    assert script.stdout == "a b\n"


@pytest.mark.parametrize("words", [["--shell", "-i", "-"], ["-i", "-"]])
def test_stdin_is_not_the_code_and_its_input_too(words: list[str]) -> None:
    ended = in_process("run", *words, stdin=b"true")
    assert ended.returncode == 2
    assert "stdin is already the script" in ended.stderr


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["run"], 2, "the code is missing"),
        (["run", "x.py", "-c", "1"], 2, "FILE and -c exclude each other"),
        (["run", "no-such.py"], 2, "file no-such.py does not exist"),
        (["run", "/"], 2, "cannot be read"),
        (["run", "/dev/zero"], 2, "longer than 64 MiB"),
        (["run", "-c", "1", "--timeout", "0"], 2, "seconds above 0"),
        (["run", "-c", "1", "--timeout", "nan"], 2, "seconds above 0"),
        (["run", "-c", "1", "--timeout", "3601"], 2, "longer than the policy's wall_time"),
        (["run", "-c", "1", "--timeout", "soon"], 2, "--timeout"),
        (["run", "-c", "1", "--upload", "/no/such.csv"], 2, "file /no/such.csv does not exist"),
        (["run", "-c", "1", "--upload", "/etc"], 2, "is a directory"),
        (["run", "-c", "1", "--upload", "a/x.csv", "--upload", "b/x.csv"], 2, "named x.csv"),
        (["run", "-c", "1", "--upload", "x.csv", "--uploads", "."], 2, "exclude each other"),
        (["run", "-c", "1", "--uploads", "/no/such"], 2, "'/no/such' does not exist"),
        (["run", "-c", "1", "--workspace", "/no/such"], 2, "'/no/such' does not exist"),
        (["run", "-c", "1", "--env", "NAME"], 2, "the value is missing"),
        (["run", "-c", "1", "--env", "LD_PRELOAD=x.so"], 2, "LD_PRELOAD"),
        (["run", "-c", "1", "--figures", "/dev/null/x"], 2, "figures cannot be written"),
        (["run", "-c", "1", "--tiemout", "3"], 2, "no such option: --tiemout"),
        (["rnu"], 2, "no such command"),
        (["run", "--shell", "-c", "ls", "--policy", "strict"], 3, "does not offer shell"),
    ],
)
def test_a_wrong_call_gets_one_sentence(words: list[str], code: int, said: str) -> None:
    got, sentence = error_of([*words])
    assert (got, said in sentence) == (code, True), sentence


def test_a_wrong_setting_is_named() -> None:
    code, sentence = error_of(["run", "-c", "1"], SBX_START_TIMEOUT="soon")
    assert (code, "SBX_START_TIMEOUT" in sentence) == (2, True)


def test_a_machine_that_cannot_is_3_with_the_remedy() -> None:
    ended = in_process("run", "-c", "1", SBX_BWRAP="/no/such/bwrap")
    assert ended.returncode == 3
    assert "hint: correct SBX_BWRAP, or unset it" in ended.stderr
    assert "install it: apt-get install bubblewrap" in ended.stderr


def test_script_that_is_not_utf_8_names_the_line(tmp_path: Path) -> None:
    (tmp_path / "script.sh").write_bytes(b"x=1\ny='\xff'\n")
    code, sentence = error_of(["run", tmp_path / "script.sh"])
    assert (code, "line 2 has the byte 0xff" in sentence) == (2, True)


def test_python_file_has_the_encoding_that_it_declares(tmp_path: Path) -> None:
    (tmp_path / "latin.py").write_bytes(b"# coding: latin-1\nprint('\xe9')\n")
    assert in_process("run", tmp_path / "latin.py").stdout == "é\n"
    (tmp_path / "none.py").write_bytes(b"x = 1\ny = '\xff'\n")
    ended = in_process("run", tmp_path / "none.py")
    assert (ended.returncode, "SyntaxError" in ended.stderr) == (1, True)


def test_a_reader_that_stops_reading_ends_it_quietly() -> None:
    with started("run", "-c", "while True: print('y' * 1000)") as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(60) == 141
        assert process.stderr is not None
        assert process.stderr.read() == b""


def test_a_full_disk_behind_stdout_is_said() -> None:
    with open("/dev/full", "wb") as full, started("run", "-c", "1", stdout=full) as process:
        assert process.wait(60) == 3
        assert process.stderr is not None
        assert process.stderr.readline().startswith(b"error: the output cannot be written")


def test_nothing_is_left_of_any_of_it(tmp_path: Path) -> None:
    for words in (["-c", "1"], ["-c", "1/0"], ["-c", "1", "--upload", "/no/such"]):
        in_process("run", *words, TMPDIR=str(tmp_path))
        assert os.listdir(tmp_path) == []
