"""`sbx policy list | show | check`, and the rest of the command's first page."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from command import ROOT, environment, in_process

from sbx import __version__
from sbx.cli.app import _COMMANDS


def test_list_names_the_shipped_ones_and_ones_own(tmp_path: Path) -> None:
    (tmp_path / "lab.toml").write_text('schema = 1\nextends = "strict"\ndescription = "[red]x"\n')
    (tmp_path / "typo.toml").write_text("schema = 1\nmemory = 3\n")
    env = {"SBX_POLICY_DIRS": str(tmp_path)}
    answer = json.loads(in_process("policy", "list", "--json", stdin=b"", **env).stdout)["policies"]
    found = {one["name"]: one for one in answer}
    assert list(found)[:5] == ["data-science", "default", "networked", "notebook", "strict"]
    assert found["lab"]["extends"] == "strict"
    assert "limits.memory_max" in found["typo"]["problem"]
    table = in_process("policy", "list", stdin=b"", **env).stdout
    assert "[red]x" in table
    assert "cannot be used" in table


@pytest.mark.parametrize("name", ["default", "strict", "data-science", "python-default"])
def test_what_show_prints_is_a_policy_file_of_the_same_value(name: str, tmp_path: Path) -> None:
    (tmp_path / "copy.toml").write_text(in_process("policy", "show", name).stdout)
    copy = json.loads(in_process("policy", "show", tmp_path / "copy.toml", "--json").stdout)
    shown = json.loads(in_process("policy", "show", name, "--json").stdout)
    for one in (copy, shown):
        del one["name"], one["fingerprint"]
    assert copy == shown


def test_check_names_file_line_key_and_the_right_word(tmp_path: Path) -> None:
    (tmp_path / "broken.toml").write_text("schema = 1\n[limits\n")
    (tmp_path / "typo.toml").write_text('schema = 1\n[limits]\nmemory_mox = "1GiB"\n')
    (tmp_path / "good.toml").write_text('schema = 1\nextends = "default"\n')
    files = [tmp_path / f"{name}.toml" for name in ("broken", "typo", "good", "none")]
    ended = in_process("policy", "check", *files)
    assert ended.returncode == 2
    assert f"{files[0]}:2: not TOML" in ended.stdout
    assert "did you mean limits.memory_max?" in ended.stdout
    assert f"{files[2]}: ok" in ended.stdout
    assert f"{files[3]}: no such file" in ended.stdout


def test_check_of_good_files_ends_with_0(tmp_path: Path) -> None:
    (tmp_path / "good.toml").write_text('schema = 1\nextends = "default"\n')
    ended = in_process("policy", "check", "--json", tmp_path / "good.toml")
    assert (ended.returncode, json.loads(ended.stdout)["files"][0]["ok"]) == (0, True)


def test_help_lists_the_exit_codes_and_version_is_the_packages() -> None:
    assert "137  killed" in in_process("--help").stdout
    assert in_process().stdout == in_process("--help").stdout


def test_help_has_groups_a_short_option_and_every_command() -> None:
    shown = in_process("-h").stdout
    assert shown == in_process("--help").stdout
    titles = ("Run code here:", "This host:", "Sandboxes of a service:", "Operate a service:")
    assert [line for line in shown.splitlines() if line in titles] == list(titles)
    for name in _COMMANDS:
        assert f"\n  {name}  " in shown, name
    assert "--figures" in in_process("run", "-h").stdout


def test_ls_is_ps_and_version_is_a_command(tmp_path: Path) -> None:
    nowhere = ("--connect", str(tmp_path / "none.sock"))
    assert in_process("ls", *nowhere).stderr == in_process("ps", *nowhere).stderr
    assert in_process("version").stdout == in_process("--version").stdout


def test_the_version_imports_no_command() -> None:
    code = (
        "import sys\nfrom sbx.cli import main\nassert main(['--version']) == 0\n"
        "print(sorted({'pydantic', 'sbx.cli.command', 'sbx.policy'} & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, check=True, text=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_shell_completes_commands() -> None:
    words = {"_SBX_COMPLETE": "complete_bash", "COMP_WORDS": "sbx st", "COMP_CWORD": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "sbx"],
        env={**environment(), **words},
        capture_output=True,
        check=True,
        text=True,
    )
    assert done.stdout.split() == ["stats", "stop", "store"]
    line = f"sbx {__version__} (sbx-runtime: sandboxes for the code of AI agents)\n"
    assert in_process("--version").stdout == line


def test_help_loads_nothing_heavy() -> None:
    look = (
        "import sys; from sbx.cli import main; main(['--help']); "
        "heavy = {'pydantic', 'msgspec', 'rich', 'IPython', 'asyncio'} & set(sys.modules); "
        "print(sorted(heavy), file=sys.stderr)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", look],
        capture_output=True,
        env=environment(),
        cwd=ROOT,
        check=True,
    )
    assert ended.stderr == b"[]\n"
