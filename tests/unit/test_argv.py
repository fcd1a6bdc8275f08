"""bwrap_argv(): the boundary as one list of words, compared whole."""

from dataclasses import replace

from sbx.isolation.argv import bwrap_argv
from sbx.isolation.filters import Filter
from sbx.isolation.plan import Bind, DataFile, LaunchPlan, Seal, Tmpfs

PLAN = LaunchPlan(
    bwrap="/usr/bin/bwrap",
    options=frozenset({"--disable-userns", "--perms"}),
    mounts=(
        Bind("/usr", "/usr", optional=True),
        Tmpfs("/tmp", 4096),
        Bind("/root/.venv", "/root/.venv", staged=True),
        Bind("/data/files", "/workspace", writable=True, staged=True),
        Bind("/data/maybe", "/workspace/maybe", writable=True, optional=True),
        Tmpfs("/home/sandbox", 64, "0700"),
    ),
    files=(DataFile("/etc/passwd", "…"), DataFile("/etc/hosts", "…")),
    environment=(("HOME", "/workspace"), ("LANG", "C.UTF-8")),
    command=("/root/.venv/bin/python", "-I", "/opt/sbx/sbx/guest/boot.py"),
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
        --uid 1000 --gid 1000 --hostname sandbox
        --disable-userns
        --die-with-parent --as-pid-1 --new-session
        --proc /proc --dev /dev
        --ro-bind-try /usr /usr
        --perms 1777 --size 4096 --tmpfs /tmp
        --ro-bind /stage/2 /root/.venv
        --bind /stage/3 /workspace
        --bind-try /data/maybe /workspace/maybe
        --perms 0700 --size 64 --tmpfs /home/sandbox
        --perms 0444 --file 8 /etc/passwd
        --perms 0444 --file 9 /etc/hosts
        --dir /sandbox --symlink /workspace /sandbox/workspace
        --remount-ro /dev --remount-ro /
        --clearenv
        --setenv HOME /workspace --setenv LANG C.UTF-8
        --chdir / --info-fd 6 --seccomp 7
        """
    )


def test_a_bwrap_that_cannot_forbid_nested_namespaces_is_not_asked_to() -> None:
    """--disable-userns came with 0.8; before, the seccomp filter alone refuses them."""
    older = bwrap_argv(replace(PLAN, options=frozenset()), str)
    assert "--disable-userns" not in older
    assert [word for word in bwrap_argv(PLAN, str) if word != "--disable-userns"] == older


def test_words_with_spaces_or_dashes_stay_one_argument() -> None:
    odd = replace(
        PLAN, mounts=(Bind("/a b", "/--bind"),), environment=(("A", "--setenv B c"),), files=()
    )
    argv = bwrap_argv(odd, str)
    assert argv[argv.index("--ro-bind") : argv.index("--dir")] == ["--ro-bind", "/a b", "/--bind"]
    assert argv[argv.index("--setenv") : argv.index("--chdir")] == ["--setenv", "A", "--setenv B c"]


def test_everything_of_the_plan_is_in_place_before_the_root_becomes_read_only() -> None:
    argv = bwrap_argv(PLAN, str)
    last_mount = max(argv.index(target) for target in ("/home/sandbox", "/etc/hosts"))
    assert last_mount < argv.index("--remount-ro") < argv.index("--seccomp")
