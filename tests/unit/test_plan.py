"""plan(): policy and host become one value; what cannot be enforced is refused before anything."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from sbx.errors import CannotEnforce
from sbx.isolation import host as without_walls
from sbx.isolation.argv import bwrap_argv, zygote_argv
from sbx.isolation.host import HostPlan, host_plan
from sbx.isolation.launch_plan import (
    Bind,
    DataFile,
    GuardPaths,
    Interpreter,
    LaunchPlan,
    Paths,
    Symlink,
    Tmpfs,
    Wall,
    WayOut,
)
from sbx.isolation.plan import Filters, decide_walls, plan, zygote_plan
from sbx.isolation.probe import Capabilities, Layer
from sbx.isolation.seccomp import Filter
from sbx.policy import Policy, load, narrow
from sbx.policy.find import shipped_directory
from sbx.policy.tables import Filesystem, MountPolicy, WallsPolicy
from sbx.service.projects.host_mode import POLICY as HOST_POLICY

MIB = 1 << 20
NAMES = ("bwrap", "namespaces", "landlock", "seccomp", "memory", "tasks", "cpu")
HOST = Capabilities(
    linux="6.8.0",
    machine="x86_64",
    root=False,
    bwrap="/usr/bin/bwrap",
    bwrap_options=frozenset({"--disable-userns"}),
    landlock_abi=4,
    own_namespaces=True,
    layers=tuple(Layer(name, True, f"{name} of the host") for name in NAMES),
)
PATHS = Paths(
    files="/data/files",
    uploads="/data/temparea",
    interpreter=Interpreter("/opt/lab/bin/python", ("/opt/lab", "/usr")),
    guest="/opt/lab/packages",
)
FILTERS = Filters(
    default=Filter("default", b"\x01\x02", "d" * 64),
    strict=Filter("strict", b"\x03", "5" * 64),
    allowlist=Filter("allowlist", b"\x04", "a" * 64),
    guard=Filter("guard", b"\x05", "9" * 64),
    last=Filter("last", b"\x07", "0" * 64),
    no_unix=Filter("no_unix", b"\x06", "0" * 64),
)


def without(*names: str, **changes: Any) -> Capabilities:
    layers = (
        Layer(layer.name, False, "gone", f"no {layer.name} here", f"get {layer.name}")
        if layer.name in names
        else layer
        for layer in HOST.layers
    )
    return replace(HOST, layers=tuple(layers), **changes)


def planned(
    policy: Policy | str = "default", host: Capabilities = HOST, **paths: Any
) -> LaunchPlan:
    policy = load(policy) if isinstance(policy, str) else policy
    return plan(policy, host, structs.replace(PATHS, **paths), FILTERS)


@pytest.mark.parametrize(
    ("prefix", "linked"),
    [("/opt/lab", True), ("/home/user/venv", False), ("/home/user", False), ("/home", False),
     ("/home/username", True)],
)  # fmt: skip
def test_the_home_of_other_sandboxes_is_linked_unless_the_host_has_it(
    prefix: str, linked: bool
) -> None:
    interpreter = Interpreter(f"{prefix}/bin/python", (prefix,))
    link = Symlink("/home/user", "/workspace")
    assert (link in planned(interpreter=interpreter).mounts) is linked


def test_default_view_is_the_system_our_guest_and_the_workspace() -> None:
    assert planned().mounts == (
        Bind("/bin", "/bin", optional=True),
        Bind("/etc/alternatives", "/etc/alternatives", optional=True),
        Bind("/etc/fonts", "/etc/fonts", optional=True),
        Bind("/etc/java-11-openjdk", "/etc/java-11-openjdk", optional=True),
        Bind("/etc/java-17-openjdk", "/etc/java-17-openjdk", optional=True),
        Bind("/etc/java-21-openjdk", "/etc/java-21-openjdk", optional=True),
        Bind("/etc/java-25-openjdk", "/etc/java-25-openjdk", optional=True),
        Bind("/etc/ld.so.cache", "/etc/ld.so.cache", optional=True),
        Bind("/etc/ssl", "/etc/ssl", optional=True),
        Bind("/lib", "/lib", optional=True),
        Bind("/lib64", "/lib64", optional=True),
        Bind("/sbin", "/sbin", optional=True),
        Bind("/usr", "/usr", optional=True),
        Tmpfs("/tmp", 256 * MIB, "1777"),
        Tmpfs("/dev/shm", 64 * MIB, "1777"),
        Tmpfs("/sys", 256 << 10, "0755"),
        Bind("/opt/lab", "/opt/lab"),
        Symlink("/etc/os-release", "/usr/lib/os-release"),
        Symlink("/home/user", "/workspace"),
        Bind("/opt/lab/packages/sbx/__init__.py", "/opt/sbx/sbx/__init__.py"),
        Bind("/opt/lab/packages/sbx/guest", "/opt/sbx/sbx/guest"),
        Bind("/opt/lab/packages/sbx/linux", "/opt/sbx/sbx/linux"),
    )
    assert planned().own_mounts == (
        Bind("/data/files", "/workspace", writable=True),
        Bind("/data/files/uploads", "/workspace/uploads", writable=True),
        Bind("/data/temparea", "/workspace/uploads/temparea"),
    )


def test_host_directory_keeps_home_and_uploads_out_of_it() -> None:
    result = planned(
        files="/home/ann/project",
        host_directory=True,
        guard=GuardPaths("/data/quarantine/1/inside"),
    )
    assert Tmpfs("/home/sandbox", 64 * MIB, "0700") in result.mounts
    assert result.own_mounts == (
        Bind("/home/ann/project", "/workspace", writable=True),
        Bind("/data/temparea", "/uploads"),
        Bind("/data/quarantine/1/inside", "/.sbx-quarantine", writable=True),
    )
    assert result.writable_home == "/home/sandbox"
    assert dict(result.environment)["HOME"] == "/home/sandbox"


def test_host_directory_is_written_by_the_path_guard_alone() -> None:
    guard = GuardPaths("/q")
    seal = planned(host_directory=True, guard=guard).seal
    assert seal.write == ("/.sbx-quarantine/items", "/tmp", "/dev/shm", "/home/sandbox")
    assert seal.guarded == ("/workspace",)
    assert seal.guard == {
        "root": "/workspace",
        "filter": "05",
        "link_prefixes": (*load("default").filesystem.read, "/opt/lab", "/usr", "/dev/null"),
        "fifos": True,
    }  # fmt: skip


def test_host_directory_without_landlock_is_refused() -> None:
    policy = load("default")
    walls = policy.walls.model_copy(update={"landlock": "best-effort"})
    guard = GuardPaths("/q")
    with pytest.raises(CannotEnforce) as raised:
        planned(
            policy.model_copy(update={"walls": walls}),
            without("landlock"),
            host_directory=True,
            guard=guard,
        )
    assert raised.value.details["layer"] == "landlock"


@pytest.mark.parametrize(("key", "weaker"), [("protect", False), ("ask", False), ("allow", True)])
def test_receipt_names_the_means_against_host_executables(key: str, weaker: bool) -> None:
    policy = load("default").model_copy(update={"host_executables": key})
    guard = GuardPaths("/q") if key != "allow" else None
    wall = planned(policy, host_directory=True, guard=guard).walls[-1]
    assert (wall.name, wall.demanded, wall.weaker) == ("host_executables", key, weaker)


def test_root_stages_what_another_uid_could_not_walk_to_and_nothing_of_the_system() -> None:
    rooted = planned(host=without(root=True))
    mounts = (*rooted.mounts, *rooted.own_mounts)
    binds = [mount for mount in mounts if isinstance(mount, Bind)]
    assert {bind.target for bind in binds if not bind.staged} == set(
        load("default").filesystem.read
    )


def test_a_zygote_is_shown_what_its_jails_are_and_nothing_of_any_conversation() -> None:
    zygote = zygote_plan(load("data-science"), HOST, PATHS)
    jail = planned("data-science")
    assert (zygote.mounts, zygote.files, zygote.environment) == (
        jail.mounts,
        jail.files[:-1],  # a zygote does not cover its procfs
        jail.environment,
    )
    assert zygote.mount_points == ("/workspace",)
    assert zygote.preload == ("numpy", "pandas", "matplotlib", "matplotlib.pyplot")
    assert zygote.command[-1] == "/opt/sbx/sbx/guest/start/zygote.py"


def test_conversations_of_a_policy_share_a_zygote_and_host_directories_have_another() -> None:
    policy = load("default")
    first = zygote_plan(policy, HOST, PATHS)
    assert first == zygote_plan(policy, HOST, structs.replace(PATHS, files="/b", uploads="/c"))
    project = structs.replace(PATHS, files="/p", host_directory=True)
    assert zygote_plan(policy, HOST, project).mount_points == ("/workspace", "/uploads")
    assert first != zygote_plan(policy, HOST, project)


def test_etc_is_synthetic_and_names_the_policy_s_user() -> None:
    ann = load("default").model_copy(update={"user": "ann"})
    assert planned(ann).files == (
        DataFile(
            "/etc/passwd",
            "root:x:0:0:root:/root:/usr/sbin/nologin\n"
            "ann:x:1000:1000:ann:/workspace:/bin/bash\n"
            "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
        ),
        DataFile("/etc/group", "root:x:0:\nann:x:1000:\nnogroup:x:65534:\nnobody:x:65534:\n"),
        DataFile("/etc/hostname", "sandbox\n"),
        DataFile("/etc/hosts", "127.0.0.1 localhost sandbox\n::1 localhost\n"),
        DataFile("/etc/nsswitch.conf", "passwd: files\ngroup: files\nhosts: files\n"),
        DataFile("/etc/resolv.conf", ""),
        DataFile(
            "/etc/gitconfig",
            "[user]\n\tname = sandbox\n\temail = sandbox@localhost\n[safe]\n\tdirectory = *\n",
        ),
        DataFile("/proc/meminfo", ""),
    )
    read = ("/etc/gitconfig", *ann.filesystem.read)
    filesystem = ann.filesystem.model_copy(update={"read": read})
    shown = planned(ann.model_copy(update={"filesystem": filesystem}))
    assert "/etc/gitconfig" not in {file.target for file in shown.files}


def test_installers_try_once_without_a_network() -> None:
    names = {"PIP_RETRIES", "UV_HTTP_RETRIES", "npm_config_fetch_retries", "CARGO_NET_RETRY"}
    assert {dict(planned().environment).get(name) for name in names} == {"0"}
    networked = planned("networked")
    assert not names & dict(networked.environment).keys()


def test_environment_keeps_every_cache_and_configuration_out_of_the_workspace() -> None:
    environment = dict(planned().environment)
    outside = {
        "HOME": "/workspace",
        "PATH": "/opt/lab/bin:/usr/local/bin:/usr/bin:/bin",
        "SHELL": "/bin/bash",
    }
    assert {name: environment[name] for name in outside} == outside
    in_workspace = {name for name, value in environment.items() if "/workspace" in value}
    assert in_workspace == {"HOME"}


def test_a_policy_s_environment_comes_last() -> None:
    changed = narrow(load("default"), {"env": {"LANG": "de_DE.UTF-8", "MINE": "1"}})
    environment = dict(planned(changed).environment)
    assert (environment["LANG"], environment["MINE"]) == ("de_DE.UTF-8", "1")


def test_the_guest_is_started_isolated_from_its_surroundings() -> None:
    command = ("/opt/lab/bin/python", "-I", "/opt/sbx/sbx/guest/start/cold.py")
    assert planned().command == command


def test_rlimits_stand_in_for_the_groups_that_a_host_lacks() -> None:
    always = {
        "CORE": 1,
        "NOFILE": 512,  # jails of an unprivileged broker have the uid of the host user
        "FSIZE": 512 * MIB,
        "MEMLOCK": 8 * MIB,
        "SIGPENDING": 1024,
        "MSGQUEUE": 800 << 10,
    }
    assert dict(planned().seal.rlimits) == always
    bare = planned(host=without("memory", "tasks", "cpu"))
    assert dict(bare.seal.rlimits) == {**always, "NPROC": 128, "DATA": 2048 * MIB}


@pytest.mark.parametrize(
    ("root", "host_directory", "expected"),
    [(True, False, 1024), (True, True, 512), (False, False, 512), (False, True, 512)],
)
def test_open_files_are_fewer_where_the_uid_is_a_users(
    root: bool, host_directory: bool, expected: int
) -> None:
    paths = structs.replace(PATHS, host_directory=host_directory)
    limited = plan(load("default"), replace(HOST, root=root), paths, FILTERS).seal
    assert dict(limited.rlimits)["NOFILE"] == expected


def test_strict_puts_a_second_filter_on_the_kernel_only() -> None:
    default = planned("default").seal
    assert (default.kernel_filter, default.jail_filter, default.files_only) == (None, None, ())
    strict = planned("strict")
    assert (strict.filter, strict.seal.kernel_filter) == (FILTERS.default, FILTERS.strict)
    assert (strict.seal.jail_filter, strict.seal.files_only) == (
        FILTERS.allowlist,
        ("/workspace", "/tmp"),
    )


def test_allowlist_puts_a_second_filter_on_every_process() -> None:
    seal = planned(load("default").model_copy(update={"filter": "allowlist"})).seal
    assert (seal.jail_filter, seal.kernel_filter, seal.files_only) == (
        FILTERS.allowlist,
        None,
        (),
    )


def test_seal_crosses_the_wall_as_plain_data() -> None:
    assert planned("strict").seal.to_json() == {
        "landlock": True,
        "read": ("/",),
        "write": ("/workspace", "/tmp", "/dev/shm"),
        "devices": tuple(
            f"/dev/{name}"
            for name in ("null", "zero", "full", "random", "urandom", "tty", "ptmx", "pts")
        ),
        "rlimits": dict(planned("strict").seal.rlimits),
        "kernel_filter": "03",
        "jail_filter": "04",
        "files_only": ("/workspace", "/tmp"),
        "guarded": (),
        "guard": None,
        "connect": ("/workspace", "/tmp", "/dev/shm"),
        "last_filter": "07",
        "machine": {"cpu_quota": 1.0, "memory_max": 512 * MIB, "tasks_max": 64},
    }


def with_sockets(word: str, **changes: Any) -> Policy:
    return load("default").model_copy(update={"unix_sockets": word, **changes})


def test_sockets_in_a_host_directory_are_not_among_those_to_connect_to() -> None:
    seal = planned(host_directory=True).seal
    assert seal.connect == ("/tmp", "/dev/shm", "/home/sandbox")
    assert planned(with_sockets("any"), host_directory=True).seal.connect == ("/",)


def test_policy_without_unix_sockets_has_a_filter_for_them() -> None:
    seal = planned(with_sockets("none")).seal
    assert (seal.last_filter, seal.kernel_filter, seal.jail_filter) == (
        FILTERS.no_unix,
        None,
        None,
    )
    assert planned(with_sockets("own")).seal.last_filter is FILTERS.last


MOUNTING = Filesystem(mount=(MountPolicy(source="/srv/wheels", target="/opt/wheels"),))


@pytest.mark.parametrize(
    ("policy", "paths", "expected"),
    [
        (with_sockets("own"), {}, ()),
        (with_sockets("own"), {"shared": "/data/shared"}, ()),
        (with_sockets("own"), {"host_uploads": True}, ("/workspace/uploads/temparea",)),
        (with_sockets("own", filesystem=MOUNTING), {}, ("/opt/wheels",)),
        (with_sockets("none"), {"host_directory": True}, ("/workspace",)),
        (
            with_sockets("own", filesystem=MOUNTING),
            {"host_directory": True, "host_uploads": True},
            ("/workspace", "/uploads", "/opt/wheels"),
        ),
    ],
)
def test_sockets_are_covered_in_every_directory_of_the_host(
    policy: Policy, paths: dict[str, Any], expected: tuple[str, ...]
) -> None:
    made = planned(policy, **paths)
    assert (made.host_directories, made.masks) == (expected, bool(expected))


@pytest.mark.parametrize(
    ("policy", "host"),
    [
        (with_sockets("any"), HOST),
        (with_sockets("own"), replace(HOST, own_namespaces=False)),
    ],
)
def test_nothing_is_covered_by_permission_or_without_namespaces(
    policy: Policy, host: Capabilities
) -> None:
    made = planned(policy, host, host_directory=True)
    assert (made.host_directories, made.masks) == (("/workspace",), False)


def test_walls_of_a_complete_host_are_none_weaker() -> None:
    assert decide_walls(load("default"), HOST) == (
        Wall("namespaces", "hard", "namespaces of the host"),
        Wall("seccomp", "hard", "seccomp of the host"),
        Wall("landlock", "hard", "landlock of the host"),
        Wall("memory", "best-effort", "memory of the host"),
        Wall("tasks", "best-effort", "tasks of the host"),
        Wall("cpu", "best-effort", "cpu of the host"),
    )


def test_receipt_names_the_memory_that_the_watcher_does_not_count() -> None:
    """It named page tables, which count, and neither mappings nor attributes of a tmpfs."""
    (wall,) = (wall for wall in decide_walls(load("default"), without("memory")) if wall.weaker)
    counted, missing = wall.means.split("not counted: ")
    assert "page tables" in counted
    for kind in ("mappings", "file locks", "extended attributes", "inotify", "pipes"):
        assert kind in missing


@pytest.mark.parametrize("name", ["memory", "tasks", "cpu"])
def test_best_effort_falls_to_a_weaker_means_that_it_names(name: str) -> None:
    (wall,) = (wall for wall in decide_walls(load("default"), without(name)) if wall.weaker)
    assert wall.name == name
    assert wall.means not in ("", f"{name} of the host")


@pytest.mark.parametrize(
    ("policy", "layer"),
    [
        ("default", "bwrap"),
        ("default", "namespaces"),
        ("default", "seccomp"),
        ("default", "landlock"),
        ("strict", "memory"),
        ("strict", "tasks"),
        ("strict", "cpu"),
    ],
)
def test_a_hard_wall_that_is_missing_is_refused_with_cause_and_remedy(
    policy: str, layer: str
) -> None:
    with pytest.raises(CannotEnforce) as raised:
        planned(policy, without(layer))
    error = raised.value
    assert (error.code, error.details["layer"], error.hint) == (
        "cannot_enforce",
        layer,
        f"get {layer}",
    )
    assert f"no {layer} here" in error.message


@pytest.mark.parametrize("layer", ["namespaces", "seccomp"])
def test_namespaces_and_seccomp_are_hard_whatever_a_policy_says(layer: str) -> None:
    policy = load("default")
    walls = policy.walls.model_copy(update={layer: "best-effort"})
    with pytest.raises(CannotEnforce):
        planned(policy.model_copy(update={"walls": walls}), without(layer))


def test_landlock_may_be_given_up_where_a_policy_says_so_and_the_plan_tells() -> None:
    policy = load("default")
    walls = policy.walls.model_copy(update={"landlock": "best-effort"})
    result = planned(policy.model_copy(update={"walls": walls}), without("landlock"))
    assert not result.seal.landlock
    assert [wall.name for wall in result.walls if wall.weaker] == ["landlock"]


# -- the way out ----------------------------------------------------------------------------------

PROXY = "http://127.0.0.1:3128"
WAY_OUT = WayOut("/data/egress/1", environment=(("CRM_TOKEN", "sbx-secret-1"),))
PLAIN = Policy(name="plain")
NETWORKED = Policy.model_validate(
    {"name": "net", "network": {"mode": "proxy", "allow": ["example.org", "*.example.com"]}}
)
THERE = structs.replace(PATHS, way_out=WAY_OUT)
PROXY_NAMES = {
    **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), PROXY),
    **dict.fromkeys(("http_proxy", "https_proxy", "all_proxy"), PROXY),
    **dict.fromkeys(("NO_PROXY", "no_proxy"), "localhost,127.0.0.1,::1"),
}


def test_jail_gets_one_directory_more_and_the_names_of_the_proxy() -> None:
    without, planned = plan(PLAIN, HOST, PATHS, FILTERS), plan(NETWORKED, HOST, THERE, FILTERS)
    added = dict(set(planned.environment) - set(without.environment))
    assert added == {**PROXY_NAMES, "CRM_TOKEN": "sbx-secret-1"}
    assert planned == structs.replace(
        without,
        own_mounts=(*without.own_mounts, Bind("/data/egress/1", "/run/sbx")),
        environment=planned.environment,
        network="proxy: 2 hosts",
        way_out=True,
        seal=structs.replace(without.seal, connect=(*without.seal.connect, "/run/sbx")),
    )


def test_certificates_are_named_for_each_program_where_there_are_some() -> None:
    trusting = structs.replace(PATHS, way_out=structs.replace(WAY_OUT, certificates=True))
    planned = plan(NETWORKED, HOST, trusting, FILTERS)
    before = plan(NETWORKED, HOST, THERE, FILTERS)
    bundle = "/run/sbx/certificates.pem"
    assert dict(set(planned.environment) - set(before.environment)) == {
        "SSL_CERT_FILE": bundle,
        "REQUESTS_CA_BUNDLE": bundle,
        "CURL_CA_BUNDLE": bundle,
        "PIP_CERT": bundle,
        "GIT_SSL_CAINFO": bundle,
        "NODE_EXTRA_CA_CERTS": bundle,
    }


def test_a_listed_loopback_goes_through_the_proxy() -> None:
    network = NETWORKED.network.model_copy(update={"allow": ("127.0.0.1:8124", "host.sbx:1")})
    policy = NETWORKED.model_copy(update={"network": network})
    environment = dict(plan(policy, HOST, THERE, FILTERS).environment)
    assert environment["NO_PROXY"] == environment["no_proxy"] == "localhost,::1"


def test_what_the_policy_sets_itself_wins() -> None:
    policy = NETWORKED.model_copy(update={"env": {"NO_PROXY": "intranet.example"}})
    assert dict(plan(policy, HOST, THERE, FILTERS).environment)["NO_PROXY"] == "intranet.example"


def test_policy_without_a_proxy_has_nothing_of_it() -> None:
    planned = plan(PLAIN, HOST, PATHS, FILTERS)
    argv = bwrap_argv(planned, str)
    assert (planned.network, planned.way_out) == ("none", False)
    assert not [word for word in argv if "proxy" in word.lower() or "/run" in word]
    assert not [
        word for word in zygote_argv(zygote_plan(PLAIN, HOST, PATHS), str) if "/run" in word
    ]


@pytest.mark.parametrize(("allow", "said"), [([], "proxy: 0 hosts"), (["a.org"], "proxy: 1 host")])
def test_rule_is_said_with_how_many_hosts(allow: list[str], said: str) -> None:
    network = NETWORKED.network.model_copy(update={"allow": tuple(allow)})
    policy = NETWORKED.model_copy(update={"network": network})
    assert plan(policy, HOST, THERE, FILTERS).network == said


def test_zygote_has_the_mount_point_and_nothing_of_a_sandbox() -> None:
    """Jails of all sandboxes are forked from it: placeholders and certificates are each one's."""
    planned = zygote_plan(NETWORKED, HOST, THERE)
    assert planned == zygote_plan(NETWORKED, HOST, PATHS)
    assert planned.mount_points == ("/workspace", "/run/sbx")
    assert dict(planned.environment).items() >= PROXY_NAMES.items()
    assert "CRM_TOKEN" not in dict(planned.environment)
    argv = " ".join(zygote_argv(planned, str))
    assert "--perms 0755 --dir /run --perms 0755 --dir /run/sbx" in argv


def test_as_root_the_directory_is_staged_since_a_jail_cannot_walk_there() -> None:
    planned = plan(NETWORKED, replace(HOST, root=True), THERE, FILTERS)
    assert planned.own_mounts[-1] == Bind("/data/egress/1", "/run/sbx", staged=True)


# -- the plan without walls ------------------------------------------------------------------------

WITH_WALLS = sorted(path.stem for path in shipped_directory().glob("*.toml"))
UNWALLED = "guest/start/unwalled.py"


def test_host_plan_starts_the_guest_directly() -> None:
    guest = Path(without_walls.__file__).parents[1] / UNWALLED
    assert guest.is_file()
    assert host_plan("host", Path("/work"), {"PATH": "/bin"}) == HostPlan(
        command=(sys.executable, "-P", str(guest)),
        environment=(("PATH", "/bin"),),
        directory="/work",
    )


@pytest.mark.parametrize("name", [*WITH_WALLS, "python-default", "HOST", "host ", "", "hosted"])
def test_no_other_policy_gets_the_plan_without_walls(name: str) -> None:
    with pytest.raises(CannotEnforce, match="has walls"):
        host_plan(name, Path("/work"), {})


@pytest.mark.parametrize("policy", [*map(load, WITH_WALLS), HOST_POLICY], ids=lambda one: one.name)
def test_every_plan_of_a_jail_has_walls(policy: Policy) -> None:
    """Also for a policy file that is named `host`, and on a host with the necessary layers only."""
    weak = dict.fromkeys(("landlock", "memory", "tasks", "cpu"), "best-effort")
    weaker = policy.model_copy(update={"walls": WallsPolicy.model_validate(weak)})
    for made in (planned(policy), planned(weaker, without(*weak))):
        assert type(made) is LaunchPlan
        assert (made.bwrap, made.filter) == (HOST.bwrap, FILTERS.default)
        assert {wall.name for wall in made.walls} >= {"namespaces", "seccomp"}
        assert not any(word.endswith(UNWALLED) for word in made.command)
