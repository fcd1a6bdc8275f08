"""bwrap_argv(): the boundary as one list of words, compared whole."""

from msgspec.structs import replace

from sbx.isolation.argv import bwrap_argv, zygote_argv
from sbx.isolation.launch_plan import Bind, DataFile, LaunchPlan, Seal, Tmpfs, ZygotePlan
from sbx.isolation.seccomp import Filter

PLAN = LaunchPlan(
    bwrap="/usr/bin/bwrap",
    options=frozenset({"--disable-userns", "--perms"}),
    mounts=(
        Bind("/usr", "/usr", optional=True),
        Tmpfs("/tmp", 4096),
        Tmpfs("/home/sandbox", 64, "0700"),
        Bind("/root/.venv", "/root/.venv", staged=True),
    ),
    own_mounts=(
        Bind("/data/files", "/workspace", writable=True, staged=True),
        Bind("/data/maybe", "/workspace/maybe", writable=True, optional=True),
    ),
    files=(DataFile("/etc/passwd", "…"), DataFile("/etc/hosts", "…")),
    environment=(("HOME", "/workspace"), ("LANG", "C.UTF-8")),
    command=("/root/.venv/bin/python", "-I", "/opt/sbx/sbx/guest/start/cold.py"),
    filter=Filter("default", b"", ""),
    seal=Seal(True, ("/",), ("/workspace",), (), (), None),
    walls=(),
)


def words(text: str) -> list[str]:
    return text.split()


def test_the_whole_list() -> None:
    assert bwrap_argv(PLAN, lambda index: f"/stage/{index}") == words(
        """
        --unshare-user --unshare-pid --unshare-net --unshare-ipc --unshare-uts --unshare-cgroup
        --uid 1000 --gid 1000
        --disable-userns
        --hostname sandbox --die-with-parent --as-pid-1 --new-session
        --proc /proc --dev /dev
        --dev-bind /dev/null /proc/keys --dev-bind /dev/null /proc/key-users
        --ro-bind-try /usr /usr
        --perms 1777 --size 4096 --tmpfs /tmp
        --perms 0755 --dir /home
        --perms 0700 --size 64 --tmpfs /home/sandbox
        --perms 0755 --dir /root
        --ro-bind /stage/3 /root/.venv
        --bind /stage/4 /workspace
        --perms 0755 --dir /workspace
        --bind-try /data/maybe /workspace/maybe
        --perms 0444 --file 8 /etc/passwd
        --perms 0444 --file 9 /etc/hosts
        --dir /sandbox --symlink /workspace /sandbox/workspace
        --perms 0755 --dir /mnt
        --remount-ro /dev --remount-ro /
        --clearenv
        --setenv HOME /workspace --setenv LANG C.UTF-8
        --chdir / --info-fd 6 --seccomp 7
        """
    )


def test_the_memory_of_the_machine_is_a_file_that_pid_1_writes() -> None:
    argv = bwrap_argv(replace(PLAN, files=(*PLAN.files, DataFile("/proc/meminfo", ""))), str)
    at = argv.index("/proc/meminfo")
    assert argv[at - 4 : at + 1] == words("--perms 0644 --bind-data 10 /proc/meminfo")


def test_a_limited_devpts_of_the_broker_covers_the_one_of_bubblewrap() -> None:
    argv = bwrap_argv(replace(PLAN, staged_devpts=True), lambda index: f"/stage/{index}")
    without = bwrap_argv(PLAN, lambda index: f"/stage/{index}")
    at = without.index("/proc/key-users") + 1
    assert argv == [*without[:at], "--dev-bind", "/stage/pts", "/dev/pts", *without[at:]]


def test_a_bwrap_that_cannot_forbid_nested_namespaces_is_not_asked_to() -> None:
    """--disable-userns came with 0.8; before, the seccomp filter alone refuses them."""
    older = bwrap_argv(replace(PLAN, options=frozenset()), str)
    assert "--disable-userns" not in older
    assert [word for word in bwrap_argv(PLAN, str) if word != "--disable-userns"] == older


def test_words_with_spaces_or_dashes_stay_one_argument() -> None:
    odd = replace(
        PLAN,
        mounts=(Bind("/a b", "/--bind"),),
        own_mounts=(),
        environment=(("A", "--setenv B c"),),
        files=(),
    )
    argv = bwrap_argv(odd, str)
    assert argv[argv.index("--ro-bind") : argv.index("--dir")] == ["--ro-bind", "/a b", "/--bind"]
    assert argv[argv.index("--setenv") : argv.index("--chdir")] == ["--setenv", "A", "--setenv B c"]


def test_a_zygote_has_the_same_view_without_files_and_the_power_to_give_it_to_others() -> None:
    plan = ZygotePlan(
        bwrap="/usr/bin/bwrap",
        mounts=(Tmpfs("/tmp", 4096), Bind("/opt/lab/lib", "/opt/lab/lib")),
        mount_points=("/workspace",),
        files=(DataFile("/etc/hosts", "…"),),
        environment=(("HOME", "/workspace"),),
        command=("/opt/lab/bin/python", "-I", "/opt/sbx/sbx/guest/start/zygote.py"),
        preload=("numpy",),
    )
    assert zygote_argv(plan, lambda index: f"/stage/{index}") == words(
        """
        --unshare-pid --unshare-net --unshare-ipc --unshare-uts --unshare-cgroup
        --userns 7
        --cap-add CAP_SYS_ADMIN --cap-add CAP_SYS_CHROOT
        --cap-add CAP_SETUID --cap-add CAP_SETGID
        --cap-add CAP_NET_ADMIN --cap-add CAP_CHOWN
        --hostname sandbox --die-with-parent --as-pid-1 --new-session
        --proc /proc --dev /dev
        --perms 1777 --size 4096 --tmpfs /tmp
        --perms 0755 --dir /opt
        --perms 0755 --dir /opt/lab
        --ro-bind /opt/lab/lib /opt/lab/lib
        --perms 0755 --dir /workspace
        --perms 0444 --file 8 /etc/hosts
        --dir /sandbox --symlink /workspace /sandbox/workspace
        --perms 0755 --dir /mnt
        --remount-ro /dev --remount-ro /
        --clearenv
        --setenv HOME /workspace
        --chdir / --info-fd 6
        """
    )
