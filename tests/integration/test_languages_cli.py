"""Languages on the command line: `sbx run`, `sbx exec`, and what `sbx doctor` says of them."""

from pathlib import Path

import pytest
from command import in_process
from serving import Service
from speaking import needs_language

from sbx.doctor import host_check
from sbx.environments.directory import Environments
from sbx.runtime.processes import languages
from sbx.runtime.processes.languages import InstalledPrograms


@pytest.mark.core
def test_run_takes_the_language_from_the_option_or_the_end_of_the_name(
    tmp_path: Path,
) -> None:
    needs_language("javascript")
    (tmp_path / "a.mjs").write_text(
        "import os from 'node:os'; console.log(process.argv.slice(2).join()); process.exit(5)"
    )
    ended = in_process("run", tmp_path / "a.mjs", "x", "y z")
    assert (ended.returncode, ended.stdout, ended.stderr) == (5, "x,y z\n", "")
    ended = in_process("run", "--language", "bash", "-", stdin=b"echo from stdin")
    assert (ended.returncode, ended.stdout) == (0, "from stdin\n")
    ended = in_process("run", "-l", "python", tmp_path / "a.mjs")
    assert (ended.returncode, "SyntaxError" in ended.stderr) == (1, True)


def test_run_refuses_what_means_nothing(tmp_path: Path) -> None:
    for words, said in (
        (["-l", "perl", "-c", "1"], "not a language"),
        (["-l", "bash", "--shell", "-c", "1"], "exclude each other"),
        (["--shell", "-", "arg"], "arguments are for a script"),
        (["-", "arg"], "arguments are for a script"),
        (["-l", "bash", "--policy", "strict", "-c", "1"], "does not allow processes"),
    ):
        ended = in_process("run", *words)
        assert ended.returncode in (2, 3), ended
        assert said in ended.stderr
        assert ended.stdout == ""


def test_exec_runs_scripts_in_a_sandbox_of_the_service(service: Service, tmp_path: Path) -> None:
    (tmp_path / "a.sh").write_text('read -r line; pwd; echo "$1 $A $line"; exit 5')
    box = service.quick("create").stdout.strip()
    words = ("exec", box, "--cwd", "/tmp", "--env", "A=1", "-i", tmp_path / "a.sh", "x")
    ended = service.quick(*words, stdin=b"in\n")
    assert (ended.returncode, ended.stdout) == (5, "/tmp\nx 1 in\n"), ended
    ended = service.quick("exec", box, "-l", "bash", "-c", "echo 1", "--json")
    assert '"exit_code": 0' in ended.stdout
    ended = service.quick("exec", box, "--context", "other", "-l", "bash", "-c", "1")
    assert ended.returncode == 2


def test_doctor_says_which_languages_there_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(languages, "find", lambda view: InstalledPrograms(bash="/usr/bin/bash"))
    monkeypatch.setattr(languages, "_cache", languages.Cache())
    answer = {one.language: one for one in host_check._languages(Environments(tmp_path))}
    assert answer["bash"].to_dict() == {
        "language": "bash",
        "available": True,
        "path": "/usr/bin/bash",
        "remedy": None,
    }
    assert (answer["java"].path, answer["java"].remedy) == (None, "install default-jdk on the host")
    live = host_check.Live("cold", False, 0.0)
    found = host_check.HostCheck("6", "x86_64", True, (), (), (live,), tuple(answer.values()))
    assert ("no java", "install default-jdk on the host") in found.hints()
