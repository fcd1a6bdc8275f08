"""What a host can do, and for each known host that cannot: why, and what to do about it."""

import os
import stat
import subprocess
from pathlib import Path

import pytest

from sbx.errors import CannotEnforce
from sbx.isolation import probe
from sbx.isolation.plan import decide_walls
from sbx.isolation.probe import Capabilities, HostFacts, Layer, explain, parse_version
from sbx.policy import Policy

DENIED = "bwrap: setting up uid map: Permission denied"
NO_NAMESPACE = "bwrap: No permissions to create new namespace"


def host(*, root: bool = False, container: bool = False, **sysctls: str) -> HostFacts:
    names = {name.replace("__", "/"): value for name, value in sysctls.items()}
    return HostFacts(root=root, sysctls=names, container=container)


@pytest.mark.parametrize("root", [False, True], ids=["user", "root"])
def test_ubuntu_apparmor_is_named_with_the_profile_that_mends_it(root: bool) -> None:
    """Root meets it, too: bwrap runs as the jail's uid, which is never root's."""
    ubuntu = host(root=root, kernel__apparmor_restrict_unprivileged_userns="1")
    cause, remedy = explain(DENIED, ubuntu)
    assert "AppArmor" in cause
    assert DENIED in cause
    assert "bwrap-userns-restrict" in remedy


def test_debian_sysctl_is_named_with_its_command() -> None:
    cause, remedy = explain(NO_NAMESPACE, host(kernel__unprivileged_userns_clone="0"))
    assert "turned off" in cause
    assert remedy == "run: sysctl -w kernel.unprivileged_userns_clone=1"


def test_a_host_that_counts_namespaces_to_zero_is_told_to_count_on() -> None:
    _, remedy = explain(NO_NAMESPACE, host(root=True, user__max_user_namespaces="0"))
    assert remedy == "run: sysctl -w user.max_user_namespaces=15000"


def test_a_container_that_masks_proc_is_told_of_systempaths() -> None:
    stderr = "bwrap: Can't mount proc on /newroot/proc: Operation not permitted"
    _, remedy = explain(stderr, host(container=True))
    assert "systempaths=unconfined" in remedy


def test_a_container_with_its_own_filter_is_told_of_seccomp() -> None:
    cause, remedy = explain(NO_NAMESPACE, host(container=True))
    assert "container" in cause
    assert "seccomp=unconfined" in remedy


def test_sysctls_that_allow_are_not_blamed() -> None:
    allowing = host(
        kernel__apparmor_restrict_unprivileged_userns="0",
        kernel__unprivileged_userns_clone="1",
        user__max_user_namespaces="15000",
    )
    assert (
        explain(NO_NAMESPACE, allowing)[0] == f"bwrap cannot make its namespaces ({NO_NAMESPACE})"
    )


@pytest.mark.parametrize("stderr", ["", " \n "])
def test_a_bwrap_that_says_nothing_still_gets_a_sentence(stderr: str) -> None:
    assert "without a word" in explain(stderr, host())[0]


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("bubblewrap 0.8.0\n", (0, 8, 0)),
        ("bubblewrap 0.11", (0, 11, 0)),
        ("bubblewrap 1.2.3-rc1", (1, 2, 3)),
        ("bubblewrap", None),
        ("bwrap 0.8.0", None),
        ("", None),
        ("bubblewrap 0.8.0\nbubblewrap 0.9.0", None),
    ],
)
def test_version_parsing(text: str, version: tuple[int, ...] | None) -> None:
    assert parse_version(text) == version


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def probed_path() -> str:
    """The bwrap of this host."""
    paths = probe.find_bwraps()
    if not paths:
        pytest.skip("no bubblewrap on this host")
    return paths[0]


def probed(bwrap: str) -> Capabilities:
    return probe.probe(own_namespaces=False, cgroup_layers=(), become=None, bwrap=bwrap)


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ('[ "$1" = --version ] && echo bubblewrap 0.4.1', "older than 0.5.0"),
        ("echo what is it", "printed 'what is it', not a version"),
        ("echo bubblewrap 0.8.0; exit 1", "not a version"),
        ("head -c 100000 /dev/urandom", "not a version"),
    ],
    ids=["old", "chatty", "failing", "garbage"],
)
def test_a_bwrap_that_is_none_is_a_missing_layer(tmp_path: Path, text: str, cause: str) -> None:
    found = probed(script(tmp_path / "bwrap", text))
    layer = found.layer("bwrap")
    assert (found.bwrap, layer.available) == (None, False)
    assert cause in (layer.cause or "")
    assert "apt-get install bubblewrap" in (layer.remedy or "")
    assert not found.layer("namespaces").available


def test_a_bwrap_that_is_not_there_is_a_missing_layer(tmp_path: Path) -> None:
    layer = probed(str(tmp_path / "bwrap")).layer("bwrap")
    assert not layer.available
    assert layer.remedy


def test_a_bwrap_that_cannot_make_namespaces_says_which_it_can(tmp_path: Path) -> None:
    fake = """case "$*" in
        --version) echo bubblewrap 0.9.1;;
        --help) echo '    --disable-userns    …';;
        *--unshare-net*) echo 'bwrap: loopback: Failed RTM_NEWADDR' >&2; exit 1;;
    esac"""
    found = probed(script(tmp_path / "bwrap", fake))
    assert found.bwrap_options == {"--disable-userns"}
    layer = found.layer("namespaces")
    assert not layer.available
    assert layer.detail == "alone these work: user pid ipc uts cgroup"
    assert "RTM_NEWADDR" in (layer.cause or "")


def test_a_newer_bwrap_with_unknown_options_is_taken(tmp_path: Path) -> None:
    fake = """case "$1" in
        --version) echo bubblewrap 2.0.0;;
        --help) printf '    --new-thing X\\n    --disable-userns\\n';;
        *) case "$*" in *oldroot*) exit 1;; esac;;
    esac"""
    found = probed(script(tmp_path / "bwrap", fake))
    assert found.layer("bwrap").detail == f"2.0.0 at {tmp_path}/bwrap"
    assert found.layer("namespaces").available


def test_bwrap_is_never_looked_for_in_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(tmp_path / "bwrap", "echo planted")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert str(tmp_path / "bwrap") not in probe.find_bwraps()
    places = [str(tmp_path / "nowhere"), str(tmp_path), f"{tmp_path}/../{tmp_path.name}"]
    assert probe.find_bwraps(places) == [str(tmp_path / "bwrap")]


def test_capabilities_cross_the_broker_s_socket_unchanged() -> None:
    found = Capabilities(
        linux="6.8",
        machine="x86_64",
        root=True,
        bwrap=None,
        bwrap_options=frozenset({"--b", "--a"}),
        landlock_abi=3,
        own_namespaces=False,
        layers=(Layer("memory", False, "none", "why", "remedy"), Layer("cpu", True, "v1")),
    )
    assert Capabilities.from_json(found.to_json()) == found


def test_host_without_bwrap_is_told_where_it_was_looked_for(tmp_path: Path) -> None:
    assert probe.find_bwraps([str(tmp_path)]) == []
    options, layer = probe._bwrap(None)
    assert (options, layer.available, layer.detail) == (frozenset(), False, "not found")
    assert all(place in (layer.cause or "") for place in probe._BWRAP_PLACES)


def test_bwrap_that_cannot_be_executed_is_a_missing_layer(tmp_path: Path) -> None:
    path = tmp_path / "bwrap"
    path.write_bytes(b"no program")
    path.chmod(0o755)
    assert "not a version" in (probed(str(path)).layer("bwrap").cause or "")


def test_linux_without_landlock_or_filters_lacks_these_layers() -> None:
    assert not probe._landlock(0).available
    assert probe._landlock(99) == Layer("landlock", True, "ABI 99")
    without, unknown = probe._seccomp(False, "x86_64"), probe._seccomp(True, "riscv64")
    assert (without.available, without.cause) == (False, "this linux has no seccomp filters")
    assert (unknown.available, unknown.cause) == (False, "sbx ships no filter for riscv64")


WORKING = """case "$*" in
    --version) echo bubblewrap {version};;
    --help) echo '    --disable-userns    …';;
    *oldroot*) exit {link};;
    *) exit {code};;
esac"""


@pytest.mark.parametrize(
    ("kinds", "chosen"),
    [
        (["broken", "follows", "fixed"], "fixed"),
        (["broken", "follows"], "follows"),
        (["old", "follows"], "follows"),
        (["setuid", "follows"], "follows"),
        (["fixed", "follows"], "fixed"),
        (["broken"], "broken"),
    ],
)
def test_first_bwrap_that_passes_its_trial_is_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kinds: list[str], chosen: str
) -> None:
    """The first one on the path was taken, also if it made no namespace or followed links."""
    texts = {
        "broken": WORKING.format(version="0.9.0", link=1, code=1),
        "old": WORKING.format(version="0.4.0", link=0, code=0),
        "follows": WORKING.format(version="0.8.0", link=0, code=0),
        "fixed": WORKING.format(version="0.8.0", link=1, code=0),
        "setuid": WORKING.format(version="0.8.0", link=1, code=0),
    }
    for kind in kinds:
        (tmp_path / kind).mkdir()
        path = script(tmp_path / kind / "bwrap", texts[kind])
        if kind == "setuid":
            Path(path).chmod(0o4755)
    monkeypatch.setattr(probe.find_bwraps, "__defaults__", ([str(tmp_path / k) for k in kinds],))
    found = probe.probe(own_namespaces=False, cgroup_layers=(), become=None)
    assert found.bwrap == str(tmp_path / chosen / "bwrap")
    assert found.layer("namespaces").available == (chosen != "broken")
    assert ("CVE-2026-87766" in found.layer("bwrap").detail) == (chosen == "follows")


@pytest.mark.parametrize("how", ["setuid", "setgid", "writable", "directory", "group"])
def test_a_bwrap_that_others_control_or_that_has_rights_is_refused(
    tmp_path: Path, how: str
) -> None:
    """A set-id bwrap does its set-up with the rights of root (CVE-2026-41163)."""
    path = Path(script(tmp_path / "bwrap", WORKING.format(version="0.8.0", link=1, code=0)))
    assert probed(str(path)).layer("bwrap").available
    mode = {"setuid": 0o4755, "setgid": 0o2755, "writable": 0o757}.get(how, 0o755)
    path.chmod(mode)
    tmp_path.chmod(0o757 if how == "directory" else 0o755)
    if how == "group":
        if os.geteuid() != 0:
            pytest.skip("only root gives a file to another group")
        os.chown(path, 0, 4242)
        path.chmod(0o775)
    found = probed(str(path))
    tmp_path.chmod(0o755)
    layer = found.layer("bwrap")
    assert (found.bwrap, layer.available) == (None, False)
    assert ("rights of root" if how.startswith("set") else "other users") in (layer.cause or "")
    assert "chmod" in (layer.remedy or "")
    with pytest.raises(CannotEnforce) as refused:
        decide_walls(Policy(name="x"), found)
    assert layer.cause
    assert layer.cause in refused.value.message
    assert refused.value.hint == layer.remedy


def test_a_real_bwrap_follows_links_as_its_trial_shows(tmp_path: Path) -> None:
    """The trial agrees with the hole itself: a directory of the host, made below a planted link."""
    bwrap = probed_path()
    layer = probed(bwrap).layer("bwrap")
    source, outside = tmp_path / "source", tmp_path / "outside"
    source.mkdir()
    outside.mkdir()
    (source / "link").symlink_to(f"/oldroot{outside}")
    words = ("--tmpfs", "/tmp", "--bind", str(source), "/tmp/w", "--dir", "/tmp/w/link/made")
    subprocess.run(
        [bwrap, "--unshare-user", "--ro-bind", "/", "/", *words, "--", "/bin/true"], check=False
    )
    assert os.listdir(outside) == (["made"] if "CVE-2026-87766" in layer.detail else [])
