"""What a host can do, and for each known host that cannot: why, and what to do about it."""

import stat
from pathlib import Path

import pytest

from sbx.isolation import probe
from sbx.isolation.probe import Capabilities, HostFacts, Layer, explain, parse_version

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
    assert (found.bwrap, layer.found) == (None, False)
    assert cause in (layer.cause or "")
    assert "apt-get install bubblewrap" in (layer.remedy or "")
    assert not found.layer("namespaces").found


def test_a_bwrap_that_is_not_there_is_a_missing_layer(tmp_path: Path) -> None:
    layer = probed(str(tmp_path / "bwrap")).layer("bwrap")
    assert not layer.found
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
    assert not layer.found
    assert layer.detail == "alone these work: user pid ipc uts cgroup"
    assert "RTM_NEWADDR" in (layer.cause or "")


def test_a_newer_bwrap_with_unknown_options_is_taken(tmp_path: Path) -> None:
    fake = """case "$1" in
        --version) echo bubblewrap 2.0.0;;
        --help) printf '    --new-thing X\\n    --disable-userns\\n';;
    esac"""
    found = probed(script(tmp_path / "bwrap", fake))
    assert found.layer("bwrap").detail == f"2.0.0 at {tmp_path}/bwrap"
    assert found.layer("namespaces").found


def test_bwrap_is_never_looked_for_in_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(tmp_path / "bwrap", "echo planted")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert probe.find_bwrap() != str(tmp_path / "bwrap")
    assert probe.find_bwrap([str(tmp_path / "nowhere"), str(tmp_path)]) == str(tmp_path / "bwrap")


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
    assert probe.find_bwrap([str(tmp_path)]) is None
    options, layer = probe._bwrap(None)
    assert (options, layer.found, layer.detail) == (frozenset(), False, "not found")
    assert all(place in (layer.cause or "") for place in probe._BWRAP_PLACES)


def test_bwrap_that_cannot_be_executed_is_a_missing_layer(tmp_path: Path) -> None:
    path = tmp_path / "bwrap"
    path.write_bytes(b"no program")
    path.chmod(0o755)
    assert "not a version" in (probed(str(path)).layer("bwrap").cause or "")


def test_linux_without_landlock_or_filters_lacks_these_layers() -> None:
    assert not probe._landlock(0).found
    assert probe._landlock(99) == Layer("landlock", True, "ABI 99")
    without, unknown = probe._seccomp(False, "x86_64"), probe._seccomp(True, "riscv64")
    assert (without.found, without.cause) == (False, "this linux has no seccomp filters")
    assert (unknown.found, unknown.cause) == (False, "sbx ships no filter for riscv64")
