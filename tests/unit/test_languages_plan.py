"""Which tool serves a language, and what is started for a script: whole values, nothing runs."""

import os
from pathlib import Path
from typing import Any

import pytest

from sbx.environments.directory import Environments
from sbx.environments.record import ALGORITHM, FORMAT, EnvironmentRecord
from sbx.errors import BadRequest, Denied, InvalidPath, TooLarge
from sbx.guest.tools import script_files
from sbx.isolation.launch_plan import Interpreter
from sbx.policy import Policy, load
from sbx.policy.tables import Filesystem, LimitsPolicy, MountPolicy
from sbx.protocol.languages import LANGUAGES, check_arguments, check_language, language_of
from sbx.runtime.processes.languages import (
    Cache,
    InstalledPrograms,
    ScriptInterpreter,
    VisiblePrograms,
    available,
    find,
    serving,
    unavailable,
    view_of,
)
from sbx.runtime.processes.scripts import Program, Script, check_script, plan_script

DEFAULT = load("default")
RUN = "run-0123456789ab"
AT = f"/tmp/.{RUN}"
EVERYTHING = InstalledPrograms("/bash", "/node", (22, 13, 0), "/deno", "/java", "/go")


def script(language: Any, **given: Any) -> Script:
    return Script(
        **{
            "code": "code",
            "args": ("a", "b c"),
            "cwd": "/workspace/x",
            "env": {},
            "stdin": "in",
            "language": language,
            **given,
        }
    )


# -- which tool ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("language", "found", "name"),
    [
        ("bash", EVERYTHING, "bash"),
        ("javascript", EVERYTHING, "node"),
        ("javascript", InstalledPrograms(deno="/deno"), "deno"),
        ("typescript", EVERYTHING, "node"),
        (
            "typescript",
            InstalledPrograms(node="/node", node_version=(22, 12, 9), deno="/deno"),
            "deno",
        ),
        ("typescript", InstalledPrograms(node="/node", node_version=(22, 12, 9)), None),
        ("typescript", InstalledPrograms(node="/node", node_version=(23, 0, 0)), "node"),
        ("typescript", InstalledPrograms(node="/node"), None),
        ("java", EVERYTHING, "java"),
        ("go", EVERYTHING, "go"),
        *((language, InstalledPrograms(), None) for language in LANGUAGES),
    ],
)
def test_what_serves_a_language(language: Any, found: InstalledPrograms, name: str | None) -> None:
    tool = serving(language, found)
    assert (tool and tool.name) == name


def test_a_compiler_of_the_workspace_makes_any_node_serve_typescript() -> None:
    old = InstalledPrograms(node="/node", node_version=(18, 19, 0))
    assert serving("typescript", old, compiler=True) == ScriptInterpreter("node", "/node")
    assert serving("typescript", InstalledPrograms(), compiler=True) is None


def test_an_environment_brings_its_own_languages(tmp_path: Path) -> None:
    environments = Environments(tmp_path / "environments")
    policy = DEFAULT.model_copy(update={"interpreter": "env:science"})
    assert available(policy, environments) == {}
    programs = environments.top / "science" / "venv" / "bin"
    claim = environments.claim("science")
    try:
        programs.mkdir(parents=True)
        for name in ("python", "go"):
            (programs / name).write_text("")
            (programs / name).chmod(0o755)
        answer = dict.fromkeys(("made_at", "python", "base", "installer", "digest", "lock"), "")
        claim.publish(
            EnvironmentRecord(
                format=FORMAT,
                name="science",
                executable=f"{programs}/python",
                prefixes=(str(programs.parent),),
                requirements=(),
                packages=(),
                algorithm=ALGORITHM,
                files=2,
                bytes=0,
                **answer,
            )
        )
    finally:
        claim.end()
    assert available(policy, environments)["go"] == ScriptInterpreter("go", f"{programs}/go")


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_language_that_is_not_there_says_what_to_install(language: Any) -> None:
    error = unavailable(language, ["bash"])
    assert (error.code, error.details["available"]) == ("language_unavailable", ["bash"])
    assert error.details["install"] in (error.hint or "")


def test_aliases_are_names_of_languages() -> None:
    names = {alias: check_language(alias) for alias in ("js", "node", "ts", "sh", "bash")}
    assert names == {
        "js": "javascript",
        "node": "javascript",
        "ts": "typescript",
        "sh": "bash",
        "bash": "bash",
    }


def test_an_unknown_language_names_those_there_are() -> None:
    for name in ("perl", "", "Python", "python", "bash "):
        with pytest.raises(BadRequest, match="not a language") as caught:
            check_language(name)
        assert caught.value.code == "unknown_language"
        assert "typescript" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("name", "language"),
    [
        ("a.js", "javascript"),
        ("dir.ts/a.MJS", "javascript"),
        ("a.mts", "typescript"),
        ("Main.java", "java"),
        ("main.go", "go"),
        ("a.sh", "bash"),
        ("a.py", None),
        ("a", None),
        ("dir.js/a", None),
        ("-", None),
        ("", None),
    ],
)
def test_the_end_of_a_name_tells_the_language(name: str, language: str | None) -> None:
    assert language_of(name) == language


# -- looking on the host ---------------------------------------------------------------------------


def program(path: Path, said: str = "", mode: int = 0o755) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho '{said}'\n")
    path.chmod(mode)


def view(top: Path) -> VisiblePrograms:
    return VisiblePrograms(((str(top / "usr"), str(top / "usr")),), (str(top / "usr/bin"),))


def test_programs_are_found_in_what_a_jail_is_shown(tmp_path: Path) -> None:
    binaries = tmp_path / "usr/bin"
    program(binaries / "node", "v22.14.1")
    program(tmp_path / "usr/lib/jvm/bin/java")
    program(tmp_path / "usr/lib/jvm/bin/javac")
    (binaries / "java").symlink_to("../lib/jvm/bin/java")
    found = find(view(tmp_path))
    assert found == InstalledPrograms(
        node=f"{binaries}/node", node_version=(22, 14, 1), java=f"{binaries}/java"
    )


def test_a_link_out_of_what_is_shown_is_no_program_of_a_jail(tmp_path: Path) -> None:
    program(tmp_path / "home/node", "v22.14.1")
    program(tmp_path / "usr/lib/bash")
    binaries = tmp_path / "usr/bin"
    binaries.mkdir()
    (binaries / "node").symlink_to(tmp_path / "home/node")
    (tmp_path / "home/bash").symlink_to(tmp_path / "usr/lib/bash")
    (binaries / "bash").symlink_to(tmp_path / "home/bash")  # back in, by a way not shown
    (binaries / "go").symlink_to("go")
    (tmp_path / "usr/away").symlink_to(tmp_path / "home")
    program(tmp_path / "home/deno")
    (binaries / "deno").symlink_to("../away/deno")
    assert find(view(tmp_path)) == InstalledPrograms()


def test_a_java_without_a_compiler_does_not_serve(tmp_path: Path) -> None:
    program(tmp_path / "usr/bin/java")
    assert find(view(tmp_path)).java is None


def test_a_mount_is_looked_through_under_its_name_inside(tmp_path: Path) -> None:
    program(tmp_path / "node-22/bin/node", "v22.14.1")
    mount = MountPolicy(source=str(tmp_path / "node-22"), target="/opt/node")
    policy = DEFAULT.model_copy(update={"filesystem": Filesystem(read=(), mount=(mount,))})
    found = find(view_of(policy, Interpreter("/opt/lab/bin/python", ())))
    assert found == InstalledPrograms(node="/opt/node/bin/node", node_version=(22, 14, 1))


@pytest.mark.parametrize(("mode", "version"), [(0o755, (22, 14, 1)), (0o775, None), (0o757, None)])
def test_only_what_nobody_else_can_write_is_run_to_be_asked(
    tmp_path: Path, mode: int, version: tuple[int, ...] | None
) -> None:
    mark = tmp_path / "ran"
    program(tmp_path / "usr/bin/node", f"v22.14.1'; touch '{mark}")
    (tmp_path / "usr/bin/node").chmod(mode)
    found = find(view(tmp_path))
    assert (found.node, found.node_version) == (f"{tmp_path}/usr/bin/node", version)
    assert mark.exists() == (version is not None)


@pytest.mark.parametrize("said", ["22.1.0", "v22", "v99999.1.1", "nothing; exit 1", ""])
def test_a_version_that_is_none_is_unknown(tmp_path: Path, said: str) -> None:
    program(tmp_path / "usr/bin/node", said)
    assert find(view(tmp_path)).node_version is None


def test_what_was_found_is_kept_for_a_while_and_not_without_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr("sbx.runtime.processes.languages.time.monotonic", lambda: now)
    cache = Cache(kept_s=60, most=2)
    views = [view(tmp_path / name) for name in "abc"]
    assert cache.find(views[0]) == InstalledPrograms()
    program(tmp_path / "a/usr/bin/bash")
    assert cache.find(views[0]) == InstalledPrograms()
    now = 61.0
    assert cache.kept(views[0]) is None
    assert cache.find(views[0]).bash == f"{tmp_path}/a/usr/bin/bash"
    for one in views[1:]:
        cache.find(one)
    assert cache.kept(views[0]) is None
    assert cache.kept(views[2]) == InstalledPrograms()


# -- what is started -------------------------------------------------------------------------------


def test_bash_is_started_with_its_script_in_a_file() -> None:
    assert plan_script(
        script("bash"), ScriptInterpreter("bash", "/usr/bin/bash"), DEFAULT, RUN
    ) == Program(
        argv=("/usr/bin/bash", f"{AT}/script.sh", "a", "b c"),
        cwd="/workspace/x",
        env={},
        stdin="in",
        files=((f"{AT}/script.sh", "code"),),
    )


@pytest.mark.parametrize(
    ("language", "name"), [("javascript", "script.mjs"), ("typescript", "script.mts")]
)
def test_node_is_told_its_share_of_memory_and_runs_our_launcher(language: str, name: str) -> None:
    planned = plan_script(
        script(language), ScriptInterpreter("node", "/usr/bin/node"), DEFAULT, RUN
    )
    assert planned == Program(
        argv=(
            "/usr/bin/node",
            "--max-old-space-size=512",
            "/opt/sbx/sbx/guest/tools/script.cjs",
            language,
            f"{AT}/{name}",
            "a",
            "b c",
        ),
        cwd="/workspace/x",
        env={},
        stdin="in",
        files=((f"{AT}/{name}", "code"),),
    )


def test_deno_sees_the_files_beside_which_it_runs() -> None:
    planned = plan_script(
        script("typescript"), ScriptInterpreter("deno", "/opt/deno"), DEFAULT, RUN
    )
    assert planned.argv[:2] == ("/opt/deno", "run")
    assert planned.argv[-3:] == (f"{AT}/script.mts", "a", "b c")
    assert planned.env["DENO_DIR"] == "/tmp/.cache/deno"
    assert planned.files == (
        (f"{AT}/script.mts", "code"),
        (
            f"{AT}/imports.json",
            '{"imports": {"./": "file:///workspace/x/", "./script.mts": "./script.mts"}}',
        ),
    )


def test_java_is_told_its_share_of_memory_and_cpus_and_where_jars_are() -> None:
    limits = LimitsPolicy(memory_max=100 << 20, cpu_quota=2.5)
    policy = DEFAULT.model_copy(update={"limits": limits})
    assert plan_script(
        script("java"), ScriptInterpreter("java", "/usr/bin/java"), policy, RUN
    ) == Program(
        argv=(
            "/usr/bin/java",
            "-Xmx50m",
            "-XX:ActiveProcessorCount=3",
            "-XX:+UseSerialGC",
            "-XX:-UsePerfData",
            "-Djava.util.prefs.userRoot=/tmp",
            f"{AT}/Main.java",
            "a",
            "b c",
        ),
        cwd="/workspace/x",
        env={"CLASSPATH": "/workspace/x/lib/*:/workspace/x/jars/*"},
        stdin="in",
        files=((f"{AT}/Main.java", "code"),),
    )


def test_go_is_built_and_becomes_the_program_so_that_its_exit_code_is_told() -> None:
    planned = plan_script(
        script("go"), ScriptInterpreter("go", "/usr/local/go/bin/go"), DEFAULT, RUN
    )
    assert planned.argv == (
        "/bin/bash",
        "-c",
        'go build -o "$0.out" "$0" && exec "$0.out" "$@"',
        f"{AT}/main.go",
        "a",
        "b c",
    )
    assert planned.env["PATH"].startswith("/usr/local/go/bin:")
    caches = {planned.env[name] for name in ("GOCACHE", "GOPATH")}
    assert caches == {"/tmp/.cache/go-build", "/tmp/.cache/go"}
    assert (planned.env["GOMAXPROCS"], planned.env["GOMEMLIMIT"]) == ("1", "512MiB")
    assert planned.env["GOPROXY"] == "off"


def test_what_the_caller_sets_goes_before_what_we_set() -> None:
    asked = script("java", env={"CLASSPATH": "mine", "A": "1"})
    planned = plan_script(asked, ScriptInterpreter("java", "/usr/bin/java"), DEFAULT, RUN)
    assert planned.env == {"CLASSPATH": "mine", "A": "1"}


# -- what may be asked for -------------------------------------------------------------------------


def asked(policy: Policy = DEFAULT, code: str = "1", **given: Any) -> Script:
    words: dict[str, Any] = {"args": (), "cwd": None, "env": None, "stdin": None, **given}
    return check_script(policy, code, "bash", **words)


def test_a_script_starts_in_the_workspace_with_an_input_that_is_empty() -> None:
    assert asked() == Script("1", "bash", (), "/workspace", {}, "")
    assert asked(cwd="sub").cwd == "/workspace/sub"


def test_a_policy_without_processes_refuses_scripts() -> None:
    with pytest.raises(Denied) as caught:
        asked(load("strict"))
    assert caught.value.code == "processes_denied"
    with pytest.raises(Denied) as caught:
        asked(DEFAULT.model_copy(update={"capabilities": ("python",)}))
    assert caught.value.code == "capability_not_supported"


@pytest.mark.parametrize(
    ("given", "error", "code"),
    [
        ({"code": "\ud800"}, BadRequest, "invalid_code"),
        ({"code": "x" * ((8 << 20) + 1)}, TooLarge, "code_too_large"),
        ({"stdin": "x" * ((8 << 20) + 1)}, TooLarge, "code_too_large"),
        ({"env": {"A=B": "1"}}, BadRequest, "invalid_env"),
        ({"cwd": "a\0b"}, InvalidPath, "invalid_path"),
        ({"args": ["a\0b"]}, BadRequest, "invalid_arguments"),
        ({"args": ["\ud800"]}, BadRequest, "invalid_arguments"),
        ({"args": [1]}, BadRequest, "invalid_arguments"),
        ({"args": "text"}, BadRequest, "invalid_arguments"),
        ({"args": ["a"] * 1001}, BadRequest, "invalid_arguments"),
        ({"args": ["a" * (120 << 10)]}, TooLarge, "arguments_too_large"),
    ],
)
def test_what_no_process_can_be_given_is_refused(
    given: dict[str, Any], error: type[Exception], code: str
) -> None:
    with pytest.raises(error) as caught:
        asked(**given)
    assert getattr(caught.value, "code", None) == code


def test_arguments_up_to_their_bounds_are_taken() -> None:
    assert len(check_arguments(["a"] * 1000)) == 1000
    assert check_arguments(["a" * ((120 << 10) - 1)])


# -- the files of a script -------------------------------------------------------------------------


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(script_files, "_ROOT", f"{tmp_path}/")
    return tmp_path


def test_files_are_written_for_their_owner_alone_and_removed(root: Path) -> None:
    files = [[f"{root}/.run/a", "é"], [f"{root}/.run/b", ""]]
    script_files.write(files)
    assert (root / ".run/a").read_text() == "é"
    assert (root / ".run").stat().st_mode & 0o777 == 0o700
    assert (root / ".run/a").stat().st_mode & 0o777 == 0o600
    (root / ".run/a.out").write_text("what a compiler made")
    script_files.remove(files)
    assert os.listdir(root) == []
    script_files.remove(files)  # it is gone already


@pytest.mark.parametrize(
    "path",
    ["/etc/x/y", "{root}/x", "{root}/../x/y", "{root}/x/..", "{root}/a/b/c", "{root}//x", ""],
)
def test_no_other_place_is_ever_written(root: Path, path: str) -> None:
    with pytest.raises(ValueError, match="not a valid path for a file of a script"):
        script_files.write([[path.format(root=root), "x"]])


def test_a_link_in_the_place_of_the_directory_is_not_followed(root: Path) -> None:
    precious = root / "precious"
    precious.mkdir()
    (precious / "file").write_text("kept")
    (root / ".run").symlink_to(precious)
    with pytest.raises(OSError, match=r"Not a directory|symbolic links"):
        script_files.write([[f"{root}/.run/a", "x"]])
    script_files.remove([[f"{root}/.run/a", ""]])
    assert os.listdir(precious) == ["file"]


def test_a_file_that_is_there_already_is_not_written_over(root: Path) -> None:
    (root / ".run").mkdir()
    (root / ".run/a").write_text("kept")
    with pytest.raises(FileExistsError):
        script_files.write([[f"{root}/.run/a", "x"]])
    assert (root / ".run/a").read_text() == "kept"


def test_removal_is_bounded_and_leaves_directories(root: Path) -> None:
    (root / ".run/below").mkdir(parents=True)
    for number in range(200):
        (root / f".run/{number}").touch()
    script_files.remove([[f"{root}/.run/a", ""]])
    assert 136 <= len(os.listdir(root / ".run")) <= 138
    assert (root / ".run/below").is_dir()
