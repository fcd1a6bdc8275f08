"""Loading: files are found, layered and checked, and what is wrong is named with its place."""

import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from sbx.errors import NotFound, PolicyError, Unavailable
from sbx.policy import available, check, load, reference, unchanged

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(name: str, text: str, schema: str = "schema = 1\n") -> Path:
        path = tmp_path / f"{name}.toml"
        path.write_text(schema + text)
        return path

    return write


def messages(path: Path) -> list[str]:
    return [problem.message for problem in check(path)]


# --- finding ---


def test_alias_is_the_shipped_default() -> None:
    assert load("python-default") == load("default")
    assert load("default").name == "default"


def test_own_policy_is_found_in_search_and_in_the_environment(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("lab", 'description = "mine"')
    assert load("lab", search=[tmp_path]).description == "mine"
    monkeypatch.setenv("SBX_POLICY_DIRS", os.pathsep.join(["/nonexistent", "", str(tmp_path)]))
    assert load("lab").description == "mine"
    assert [info.name for info in available()][-1] == "lab"


def test_earlier_directory_wins(write: Write, tmp_path: Path) -> None:
    (tmp_path / "later").mkdir()
    write("lab", 'description = "earlier"')
    write("later/lab", 'description = "later"')
    assert load("lab", search=[tmp_path, tmp_path / "later"]).description == "earlier"


def test_empty_entry_of_the_environment_is_not_the_working_directory(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("lab", "")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SBX_POLICY_DIRS", os.pathsep)
    with pytest.raises(NotFound):
        load("lab")


def test_a_missing_directory_of_the_environment_is_named_once_a_policy_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SBX_POLICY_DIRS", f"{tmp_path}:/nonexistent")
    assert load("default").name == "default"
    with pytest.raises(NotFound) as raised:
        load("lab")
    assert raised.value.hint == "SBX_POLICY_DIRS names /nonexistent, which does not exist"


def test_unknown_policy_names_the_nearest_and_all() -> None:
    with pytest.raises(NotFound, match="did you mean data-science") as caught:
        load("datascience")
    assert caught.value.code == "policy_not_found"
    assert set(caught.value.details["available"]) >= {"default", "strict", "python-default"}


@pytest.mark.parametrize("name", ["../lab", "/etc/passwd", "lab.toml/", "", "a\0b", ".."])
def test_text_is_never_a_path(name: str, write: Write, tmp_path: Path) -> None:
    """What came with a request could otherwise have any file of the host read and quoted."""
    write("lab", "")
    with pytest.raises(NotFound) as caught:
        load(name, search=[tmp_path / "below"])
    assert caught.value.code == "policy_not_found"


def test_what_a_person_typed_is_a_file_if_it_looks_like_one() -> None:
    assert reference("strict") == "strict"
    assert reference("./lab") == Path("lab")
    assert reference("lab.toml") == Path("lab.toml")


@pytest.mark.parametrize("name", ["default", "strict", "python-default"])
def test_own_file_cannot_take_a_shipped_name(name: str, write: Write, tmp_path: Path) -> None:
    path = write(name, "processes = true")
    for policy in (name, path):
        with pytest.raises(PolicyError, match="comes with sbx") as caught:
            load(policy, search=[tmp_path])
        assert caught.value.code == "policy_shadows"
    listed = {info.path: info.problem for info in available([tmp_path])}
    assert "comes with sbx" in (listed[path] or "")


def test_list_shows_policies_that_cannot_be_used_and_why(write: Write, tmp_path: Path) -> None:
    path = write("lab", "[limits]\ntask_max = 9")
    (info,) = [info for info in available([tmp_path]) if info.name == "lab"]
    assert info.problem == f"{path}: unknown key limits.task_max; did you mean limits.tasks_max?"
    assert all(info.problem is None for info in available())


def test_link_that_leads_nowhere_is_listed_as_a_problem(tmp_path: Path) -> None:
    (tmp_path / "lab.toml").symlink_to("gone.toml")
    (info,) = [info for info in available([tmp_path]) if info.name == "lab"]
    assert "does not exist" in (info.problem or "")


# --- layers ---


def test_tables_merge_by_key_and_lists_replace(write: Write, tmp_path: Path) -> None:
    write("base", '[limits]\ntasks_max = 50\nopen_files = 99\n[imports]\nforbid = ["a", "b"]')
    top = write("top", 'extends = "base"\n[limits]\ntasks_max = 60\n[imports]\nforbid = ["b"]')
    policy = load(top)
    assert (policy.limits.tasks_max, policy.limits.open_files) == (60, 99)
    assert policy.imports.forbid == ("b",)
    assert policy.name == "top"


def test_words_about_a_file_are_not_inherited(write: Write) -> None:
    policy = load(write("lab", 'extends = "strict"'))
    assert (policy.description, policy.expect) == ("", ())
    assert policy.filter == "strict"


def test_circle_of_extends_is_told_as_one(write: Write) -> None:
    write("b", 'extends = "c"')
    write("c", 'extends = "a"')
    assert messages(write("a", 'extends = "b"')) == ["extends: forms a circle: a → b → c → a"]


def test_unknown_extends_is_a_problem_of_the_file_that_says_so(write: Write) -> None:
    (problem,) = check(write("lab", 'extends = "defualt"'))
    assert problem.key == "extends"
    assert 'policy "defualt" does not exist; did you mean default?' in problem.message


def test_problem_is_told_of_the_layer_that_holds_it(write: Write) -> None:
    base = write("base", "[limits]\ntasks_max = 1")
    top = write("top", 'extends = "base"\n[limits]\nopen_files = 1')
    files = {problem.key: problem.file for problem in check(top)}
    assert files == {"limits.tasks_max": base, "limits.open_files": top}


# --- what is wrong ---


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("memory_max = 1", "unknown key memory_max; did you mean limits.memory_max?"),
        ("timeout = 1", "unknown key timeout; did you mean limits.run_timeout?"),
        ("extend = 'default'", "unknown key extend; did you mean extends?"),
        ("[limits]\nmemory_mx = 1",
         "unknown key limits.memory_mx; did you mean limits.memory_max?"),
        ("[limits]\nmode = 1", "unknown key limits.mode; did you mean network.mode?"),
        ("[limit]\ntasks_max = 9", "unknown key limit; did you mean limits?"),
        ("limits = 3", "limits: must be a table, not 3"),
        ("[limits]\ntasks_max = '9'", 'limits.tasks_max: must be a whole number, not "9"'),
        ("[env]\nHOME = 'x'", "env.HOME: HOME is set by sbx itself inside a sandbox"),
        ("[network]\nmode = 'prox'",
         'network.mode: must be "none" or "proxy", not "prox"; did you mean "proxy"?'),
        ("name = 'x'", "name: the file name is the name of the policy; remove the line"),
        ("[[filesystem.mount]]\ntarget = '/opt/x'", "filesystem.mount[0].source: is missing"),
        ("[network]\nmode = 'proxy'\nallow = ['http://a.org']",
         'network.allow[0]: "http://a.org" is not a host to reach'),
        ("[network]\nmode = 'proxy'\nhosts = []",
         "unknown key network.hosts; did you mean network.allow?"),
        ("[network]\nmode = 'proxy'\n[secrets.CRM]\nenv = 'A'\nhosts = ['a.org']\nvalue = 'x'\n"
         "from = 'env:A'", "unknown key secrets.CRM.value"),
        ("[network]\nmode = 'proxy'\n[secrets.CRM]\nenv = 'A'\nhosts = ['a.org']\n"
         "source = 'env:A'\nfrom = 'env:A'",
         "unknown key secrets.CRM.source; did you mean filesystem.mount.source?"),
    ],
)  # fmt: skip
def test_problem_names_key_and_nearest_word(text: str, message: str, write: Write) -> None:
    assert messages(write("lab", text)) == [message]


def test_key_of_control_characters_is_shown_escaped(write: Write) -> None:
    """A terminal that shows the error would otherwise obey it."""
    (message,) = messages(write("lab", '"\\u001b[31mred" = 1'))
    assert message == 'unknown key "\\u001b[31mred"'


def test_every_problem_is_listed_and_the_first_is_the_message(write: Write) -> None:
    path = write("lab", "processes = 1\nshared = 2\n[limits]\ntasks_max = 1")
    with pytest.raises(PolicyError, match=r"lab.toml: .* \(and 2 more problems\)$") as caught:
        load(path)
    listed = [problem["key"] for problem in caught.value.details["problems"]]
    assert listed == ["processes", "shared", "limits.tasks_max"]


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ("", "schema is missing: begin the file with schema = 1"),
        ("schema = 2\nnew = 1\n", "schema: 2 is newer than 1, which this sbx reads"),
        ("schema = true\n", "schema: must be 1, not true"),
    ],
)
def test_schema_is_asked_for_first(schema: str, message: str, write: Write) -> None:
    assert messages(write("lab", "unknown = 1", schema)) == [message]


@pytest.mark.parametrize(
    ("content", "line", "message"),
    [
        (b"schema = 1\n\nlimits = [", 3, "not TOML"),
        (b"schema = 1\nname name\n", 2, "not TOML"),
        (b"schema = 1\n\nuser = '\xff'", 3, "not UTF-8"),
        (b"x = " + b"[" * 100_000, None, "too deep"),
        (b"x = " + b"9" * 10_000, None, "a number that is too large"),
        (b"#" * 300_000, None, "larger than 256KiB"),
    ],
)
def test_file_that_is_no_policy_is_named_with_its_line(
    content: bytes, line: int | None, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "lab.toml"
    path.write_bytes(content)
    (problem,) = check(path)
    assert message in problem.message
    assert (problem.file, problem.line) == (path, line)


def test_deep_tables_on_both_sides_do_not_exhaust_the_stack(write: Write) -> None:
    deep = f"{'a.' * 2_000}a = 1"
    write("base", deep)
    assert messages(write("top", f'extends = "base"\n{deep}')) == ["unknown key a"]


def test_fifo_and_directory_are_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.toml")
    (tmp_path / "folder.toml").mkdir()
    for name in ("fifo.toml", "folder.toml"):
        assert messages(tmp_path / name) == ["cannot be read: it is not a regular file"]


def test_file_that_is_not_there_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"nowhere\.toml"):
        load(tmp_path / "nowhere.toml")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_unreadable_file_and_directory_are_errors(write: Write, tmp_path: Path) -> None:
    path = write("lab", "")
    path.chmod(0)
    assert messages(path) == ["cannot be read: Permission denied"]
    tmp_path.chmod(0)
    try:
        with pytest.raises(PolicyError, match="cannot be read"):
            load("lab", search=[tmp_path])
    finally:
        tmp_path.chmod(0o700)


# --- examples ---


@pytest.mark.parametrize(
    ("run", "then", "message"),
    [
        ("1 +", "allowed", "expect[0].run: is not Python: invalid syntax"),
        ("import json", "refused",
         "expect[0].run: is not refused: no rule of [imports] applies to it"),
        ("import socket", "allowed",
         "expect[0].run: is refused and not allowed: line 1: the policy forbids socket"),
        ("import socket", "refused", None),
        ("import json", "killed", None),
    ],
)  # fmt: skip
def test_example_is_decided_at_load_where_it_can_be(
    run: str, then: str, message: str | None, write: Write
) -> None:
    example = f"[[expect]]\nrun = '{run}'\nthen = '{then}'\nwhy = 'because'"
    path = write("lab", f"[imports]\nforbid = ['socket']\n{example}")
    assert messages(path) == ([message] if message else [])


def test_a_process_with_too_many_open_files_blames_no_policy(write: Write, tmp_path: Path) -> None:
    path = write("lab", "")
    _, hard = limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    raised = []
    for read in (
        lambda: load("lab", search=(tmp_path,)),
        lambda: check(path),
        lambda: available((tmp_path,)),
    ):
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
        try:
            read()
        except Exception as error:  # noqa: BLE001  # told below, where files can be opened
            raised.append(error)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    assert [type(error) for error in raised] == [Unavailable] * 3
    assert {getattr(error, "code", "") for error in raised} == {"too_many_open_files"}
    assert str(tmp_path) not in str(raised)


# --- again ---


@pytest.fixture
def old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Makes files look as if they were last changed long ago; linux itself sets ctime, so the
    clock of the loader goes ahead instead."""
    monkeypatch.setattr("time.time_ns", lambda: 1 << 62)
    return lambda path: os.utime(path, ns=(1, 1))


def test_policy_that_was_loaded_is_given_again_until_any_file_of_it_changes(
    write: Write, tmp_path: Path, old: Callable[[Path], None]
) -> None:
    below = write("below", "processes = true")
    above = write("above", 'extends = "below"')
    assert unchanged("above", search=[tmp_path]) is None
    first = load("above", search=[tmp_path])
    for path in (above, below):
        again = unchanged("above", search=[tmp_path])
        assert again is first
        path.write_text(path.read_text() + '\ndescription = "changed"\n')
        old(path)
        assert unchanged("above", search=[tmp_path]) is None
        first = load("above", search=[tmp_path])


def test_policy_that_another_file_would_shadow_is_not_given_again(
    write: Write, tmp_path: Path, old: Callable[[Path], None]
) -> None:
    write("mine", "")
    earlier = tmp_path / "earlier"
    earlier.mkdir()
    (earlier / "mine.toml").symlink_to(tmp_path / "later.txt")  # which leads nowhere yet
    search = [earlier, tmp_path]
    load("mine", search=search)
    assert unchanged("mine", search=search) is not None
    (tmp_path / "later.txt").write_text('schema = 1\ndescription = "the earlier one"\n')
    assert unchanged("mine", search=search) is None
    assert load("mine", search=search).description == "the earlier one"
    assert unchanged("mine", search=[tmp_path]) is None


def test_policy_that_was_changed_a_moment_ago_is_read_again(write: Write, tmp_path: Path) -> None:
    write("mine", "")
    load("mine", search=[tmp_path])
    assert unchanged("mine", search=[tmp_path]) is None


def test_policy_of_the_environment_is_known_by_that(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: Callable[[Path], None]
) -> None:
    write("mine", "")
    monkeypatch.setenv("SBX_POLICY_DIRS", str(tmp_path))
    found = load("mine")
    assert unchanged("mine") is found
    monkeypatch.setenv("SBX_POLICY_DIRS", "")
    assert unchanged("mine") is None
