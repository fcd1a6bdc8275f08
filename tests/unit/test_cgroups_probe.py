"""What is concluded from what /proc says, for all kinds of hosts. No cgroup is touched."""

import os
from pathlib import Path

import pytest

from sbx.isolation.cgroups.probe import (
    CONTROLLERS,
    DELEGATE,
    CgroupCapabilities,
    CgroupFacts,
    Layout,
    Missing,
    OwnCgroup,
    _read_or_empty,
    decide,
    locate,
    look,
    scope_command,
    systemd_scope,
)

V2_MOUNT = (
    "26 19 0:21 / /sys/fs/cgroup rw,nosuid,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
)
V1_MOUNTS = """\
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw,discard
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu
33 31 0:30 / /sys/fs/cgroup/cpuacct rw,relatime - cgroup cgroup rw,cpuacct
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
38 31 0:35 / /sys/fs/cgroup/blkio rw,relatime - cgroup cgroup rw,blkio
39 31 0:36 / /sys/fs/cgroup/pids rw,relatime - cgroup cgroup rw,pids
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
"""
V1_CGROUP = """\
9:name=systemd:/
8:pids:/
7:blkio:/
4:memory:/agents/8bd9
2:cpuacct:/
1:cpu:/
0::/
"""
V1_PLACES = {
    "memory": OwnCgroup("/sys/fs/cgroup/memory/agents/8bd9", False),
    "tasks": OwnCgroup("/sys/fs/cgroup/pids", False),
    "cpu": OwnCgroup("/sys/fs/cgroup/cpu", False),
    "io": OwnCgroup("/sys/fs/cgroup/blkio", False),
    "cpuacct": OwnCgroup("/sys/fs/cgroup/cpuacct", False),
}
SCOPE_PATH = "/user.slice/user-1000.slice/user@1000.service/app.slice/run-r1aa8.scope"
USER_SCOPE = ("/usr/bin/env", "XDG_RUNTIME_DIR=/run/user/1000", "/usr/bin/systemd-run", "--user")
NO_USER_SCOPE = (
    "systemd gave no scope; to see its reason, run: systemd-run --user --scope -p Delegate=yes true"
)


def v2_layout(path: str, read_only: bool = False) -> Layout:
    return Layout(2, dict.fromkeys(CONTROLLERS, OwnCgroup("/sys/fs/cgroup" + path, read_only)))


def test_v1_host_has_every_controller_in_a_tree_of_its_own() -> None:
    layout = locate(V1_CGROUP, V1_MOUNTS)
    assert layout == Layout(1, V1_PLACES)
    facts = CgroupFacts(uid=0, writable=frozenset(place.path for place in V1_PLACES.values()))
    assert decide(layout, facts) == CgroupCapabilities(
        version=1,
        controllers={name: V1_PLACES[name].path for name in CONTROLLERS},
        missing={},
        cpuacct="/sys/fs/cgroup/cpuacct",
    )


def test_v1_host_gives_nothing_to_an_unprivileged_user() -> None:
    capabilities = decide(Layout(1, V1_PLACES), CgroupFacts(uid=1000))
    assert capabilities.controllers == {}
    assert capabilities.cpuacct is None
    assert capabilities.missing["tasks"] == Missing(
        "this host has cgroup v1, where uid 1000 may not make groups in /sys/fs/cgroup/pids",
        "start sbx as root, or boot the host with cgroup v2 (systemd.unified_cgroup_hierarchy=1)",
    )


def test_v1_controllers_mounted_together_share_one_place() -> None:
    layout = locate(
        "3:cpu,cpuacct:/a\n2:memory:/b\n",
        "1 0 0:1 / /cg/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
        "2 0 0:2 / /cg/memory rw - cgroup cgroup rw,memory\n",
    )
    together = OwnCgroup("/cg/cpu,cpuacct/a", False)
    memory = OwnCgroup("/cg/memory/b", False)
    assert layout == Layout(1, {"cpu": together, "cpuacct": together, "memory": memory})
    missing = decide(layout, CgroupFacts(uid=0)).missing["tasks"]
    assert missing == Missing(
        "the pids controller of cgroup v1 is not mounted",
        "mount it: mount -t cgroup -o pids none /sys/fs/cgroup/pids",
    )


def test_v2_is_chosen_where_v1_has_neither_memory_nor_tasks() -> None:
    mounts = V2_MOUNT + "40 31 0:37 / /cg/net_cls rw - cgroup cgroup rw,net_cls\n"
    assert locate("5:net_cls:/\n0::/a\n", mounts) == v2_layout("/a")


def test_v2_root_of_a_machine_without_systemd_is_used_as_it_is() -> None:
    layout = locate("0::/\n", V2_MOUNT)
    assert layout == v2_layout("")
    facts = CgroupFacts(
        uid=0,
        writable=frozenset({"/sys/fs/cgroup"}),
        controllers=frozenset({"cpu", "io", "memory", "pids", "cpuset"}),
        members=(1, 77),
        at_root=True,
    )
    capabilities = decide(layout, facts)
    assert capabilities == CgroupCapabilities(
        version=2,
        controllers=dict.fromkeys(CONTROLLERS, "/sys/fs/cgroup"),
        missing={},
        members=(1, 77),
        at_root=True,
    )
    assert scope_command(capabilities) is None


def test_v2_user_session_without_delegation_names_how_to_see_why_there_is_no_scope() -> None:
    layout = locate("0::/user.slice/user-1000.slice/session-2.scope\n", V2_MOUNT)
    facts = CgroupFacts(
        uid=1000, controllers=frozenset({"cpu", "memory", "pids"}), scope=USER_SCOPE
    )
    path = "/sys/fs/cgroup/user.slice/user-1000.slice/session-2.scope"
    capabilities = decide(layout, facts)
    why = Missing(f"{path} is not delegated to uid 1000", NO_USER_SCOPE)
    assert capabilities == CgroupCapabilities(
        version=2, controllers={}, missing=dict.fromkeys(CONTROLLERS, why), scope=USER_SCOPE
    )
    assert scope_command(capabilities) == list(USER_SCOPE)


def test_v2_delegated_scope_has_all_but_io_whose_remedy_is_the_drop_in() -> None:
    layout = locate(f"0::{SCOPE_PATH}\n", V2_MOUNT)
    path = "/sys/fs/cgroup" + SCOPE_PATH
    facts = CgroupFacts(
        uid=1000,
        writable=frozenset({path}),
        controllers=frozenset({"cpu", "memory", "pids"}),
        members=(782,),
        scope=USER_SCOPE,
    )
    assert decide(layout, facts) == CgroupCapabilities(
        version=2,
        controllers={"memory": path, "tasks": path, "cpu": path},
        missing={"io": Missing(f"the io controller is not handed down to {path}", DELEGATE)},
        members=(782,),
        scope=USER_SCOPE,
    )


def test_scope_is_asked_for_unless_the_processes_of_the_own_group_may_be_moved() -> None:
    capabilities = CgroupCapabilities(
        2, dict.fromkeys(CONTROLLERS, "/cg/a"), {}, members=(782,), scope=USER_SCOPE
    )
    assert scope_command(capabilities) == list(USER_SCOPE)
    assert scope_command(capabilities, movable={782}) is None
    assert scope_command(capabilities._replace(members=())) is None
    assert scope_command(capabilities._replace(scope=None)) is None


def test_scope_is_asked_for_where_the_own_group_lacks_the_cpu_controller() -> None:
    capabilities = CgroupCapabilities(
        2, {"memory": "/cg/a", "tasks": "/cg/a"}, {}, members=(782,), scope=USER_SCOPE
    )
    assert scope_command(capabilities, movable={782}) == list(USER_SCOPE)


def test_v2_in_a_container_is_read_only() -> None:
    mount = (
        "1131 1130 0:27 / /sys/fs/cgroup ro,nosuid,nodev,noexec - cgroup2 cgroup rw,nsdelegate\n"
    )
    layout = locate("0::/\n", mount)
    capabilities = decide(layout, CgroupFacts(uid=0, container=True))
    why = Missing(
        "/sys/fs/cgroup is mounted read-only (as in a container)",
        "start the container with its cgroups writable:"
        " docker run --privileged, or podman run --systemd=always",
    )
    assert layout == v2_layout("", read_only=True)
    assert capabilities == CgroupCapabilities(2, {}, dict.fromkeys(CONTROLLERS, why))
    assert scope_command(capabilities) is None


def test_container_without_a_cgroup_namespace_sees_its_own_group_as_the_mount() -> None:
    mount = "1131 1130 0:27 /docker/7f3a /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    inside = {"memory": OwnCgroup("/sys/fs/cgroup/memory/x", False)}
    assert locate("4:memory:/docker/7f3a/x\n", mount) == Layout(1, inside)


def test_own_group_outside_of_what_is_mounted_counts_as_no_cgroups() -> None:
    assert locate("0::/../../elsewhere\n", V2_MOUNT) == Layout(0, {})
    assert locate("0::/b\n", V2_MOUNT.replace(" / /sys", " /a /sys")) == Layout(0, {})


def test_no_cgroup_file_system_is_version_0() -> None:
    layout = locate("0::/\n", "27 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n")
    capabilities = decide(layout, CgroupFacts(uid=0))
    why = Missing(
        "no cgroup file system that shows this process's own group is mounted",
        "mount one: mount -t cgroup2 none /sys/fs/cgroup",
    )
    assert capabilities == CgroupCapabilities(0, {}, dict.fromkeys(CONTROLLERS, why))
    assert locate("", "") == layout


def test_process_taken_along_by_a_runtime_has_the_group_where_that_one_made_its_own() -> None:
    assert locate("0::/a/sbx-r1-77-1234/sup\n", V2_MOUNT) == v2_layout("/a")
    assert locate("0::/a/service/sup\n", V2_MOUNT) == v2_layout("/a/service/sup")


def test_mount_point_with_a_blank_is_read() -> None:
    mount = V2_MOUNT.replace("/sys/fs/cgroup", "/my\\040groups")
    assert locate("0::/a\n", mount).places["memory"].path == "/my groups/a"


def test_v2_root_whose_linux_has_the_memory_controller_off_is_told_how_to_boot_it() -> None:
    layout = locate("0::/a\n", V2_MOUNT)
    facts = CgroupFacts(
        uid=0, writable=frozenset({"/sys/fs/cgroup/a"}), controllers=frozenset({"cpu"})
    )
    assert "cgroup_enable=memory at boot" in decide(layout, facts).missing["memory"].remedy


def test_v2_user_without_a_systemd_of_their_own_is_told_to_enable_lingering() -> None:
    missing = decide(v2_layout("/a"), CgroupFacts(uid=1000)).missing["memory"]
    assert "loginctl enable-linger" in missing.remedy


# -- reading, in a directory that looks like a host ------------------------------------------------


def test_facts_of_a_v2_group_are_read_from_its_files(tmp_path: Path) -> None:
    layout = Layout(2, dict.fromkeys(CONTROLLERS, OwnCgroup(str(tmp_path), False)))
    for name, text in (("cgroup.controllers", "cpu memory pids\n"), ("cgroup.procs", "7\n9\n")):
        (tmp_path / name).write_text(text)
    (tmp_path / "cgroup.subtree_control").touch()
    facts = look(layout)
    assert facts == CgroupFacts(
        os.geteuid(),
        frozenset({str(tmp_path)}),
        frozenset({"cpu", "memory", "pids"}),
        (7, 9),
        at_root=True,
        container=facts.container,
        scope=facts.scope,
    )
    (tmp_path / "cgroup.events").touch()
    (tmp_path / "cgroup.subtree_control").unlink()
    assert look(layout) == facts._replace(at_root=False, writable=frozenset())


@pytest.mark.parametrize("program", ["/usr/bin/systemd-run", "/bin/systemd-run"])
def test_systemd_starts_scopes_where_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    root = str(tmp_path)
    assert systemd_scope(0, root) is None
    (tmp_path / program[1:]).parent.mkdir(parents=True)
    (tmp_path / program[1:]).touch()
    assert systemd_scope(0, root) is None  # installed, and not running
    (tmp_path / "run/systemd/system").mkdir(parents=True)
    options = ("--scope", "--quiet", "--collect", "-p", "Delegate=yes", "--")
    assert systemd_scope(0, root) == (root + program, *options)
    assert systemd_scope(1000, root) is None
    runtime_dir = tmp_path / "run/user/1000"
    runtime_dir.mkdir(parents=True)
    (runtime_dir / "bus").touch()
    user = ("/usr/bin/env", f"XDG_RUNTIME_DIR={runtime_dir}", root + program, "--user", *options)
    assert systemd_scope(1000, root) == user
    monkeypatch.setenv("XDG_RUNTIME_DIR", f"{root}/elsewhere")
    assert systemd_scope(1000, root) is None


def test_file_that_is_not_there_reads_as_empty(tmp_path: Path) -> None:
    assert _read_or_empty(str(tmp_path / "cgroup")) == ""


def test_controller_that_was_found_can_be_given_up_with_its_reason() -> None:
    capabilities = CgroupCapabilities(1, {"cpu": "/c", "io": "/i"}, {}, cpuacct="/a")
    why = Missing("no disk", "use one")
    assert capabilities.without("io", why) == CgroupCapabilities(
        1, {"cpu": "/c"}, {"io": why}, cpuacct="/a"
    )
