"""A directory of the host is mounted to a sandbox that lives, whichever path its kernels came."""

# ruff: noqa: ASYNC240  # a look at a file blocks nothing that matters to a test

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from places import short_directory

from sbx import AsyncSandbox, Runtime
from sbx.errors import BadRequest, Broken, Conflict, Denied, NotFound, Unavailable
from sbx.policy import Policy, load

pytestmark = [pytest.mark.core, pytest.mark.needs("landlock")]
SHARED = "/workspace/shared"


@pytest.fixture
def source() -> Iterator[Path]:
    with short_directory() as top:
        top.chmod(0o755)
        found = top / "wheels"
        found.mkdir(mode=0o755)
        (found / "a.txt").write_text("hello")
        (found / "below").mkdir(mode=0o755)
        yield found


def sharing(start: str = "fork", max_idle: int = 0, host_executables: str = "allow") -> Policy:
    policy = load("default")
    pool = policy.pool.model_copy(
        update={"start": start, "min_idle": 0, "max_idle": max_idle if start == "fork" else 0}
    )
    return policy.model_copy(
        update={"shared": True, "pool": pool, "host_executables": host_executables}
    )


@pytest.fixture
async def box(runtime: Runtime) -> AsyncIterator[AsyncSandbox]:
    async with await runtime.create(sharing()) as box:
        yield box


async def read(box: AsyncSandbox, path: str) -> str:
    """What a cell reads there, or the errno that it meets."""
    run = await box.run(
        f"import errno\ntry:\n    print(open({path!r}).read(), end='')\n"
        "except OSError as error:\n    print(errno.errorcode[error.errno], end='')"
    )
    return run.stdout


@pytest.mark.parametrize("path", ["pool", "fork", "cold"])
@pytest.mark.unprivileged
async def test_a_live_kernel_sees_it_and_so_does_a_later_one(path: str, source: Path) -> None:
    async with Runtime() as runtime:
        policy = sharing("cold" if path == "cold" else "fork", 1 if path == "pool" else 0)
        if path == "pool":
            await runtime.warm(policy, count=1)
        async with await runtime.create(policy) as box:
            assert (await box.start()).path == path
            assert await read(box, "/mnt/wheels/a.txt") == "ENOENT"
            assert await box.mount(source) == "/mnt/wheels"
            assert await read(box, "/mnt/wheels/a.txt") == "hello"
            assert (await box.shell("cat /mnt/wheels/a.txt")).stdout == "hello"
            beside = await box.contexts.create("beside")
            assert (await beside.run("print(open('/mnt/wheels/a.txt').read())")).stdout == "hello\n"
            other = box.conversation("other")
            assert (await other.run("print(open('/mnt/wheels/a.txt').read())")).stdout == "hello\n"
            await box.stop()
            assert await read(box, "/mnt/wheels/a.txt") == "hello"
            await box.unmount("/mnt/wheels")
            assert await read(box, "/mnt/wheels/a.txt") == "ENOENT"
            assert (await box.run("import os; os.listdir('/mnt')")).result == "[]"
            await box.stop()
            assert await read(box, "/mnt/wheels/a.txt") == "ENOENT"


@pytest.mark.unprivileged
async def test_it_is_read_only_without_set_id_bits_and_devices(
    box: AsyncSandbox, source: Path
) -> None:
    await box.start()
    await box.mount(source, "/mnt/w")
    mounts = (await box.shell("grep ' /mnt' /proc/self/mountinfo")).stdout.splitlines()
    assert len(mounts) == 2
    for line in mounts:
        assert set(line.split()[5].split(",")) >= {"ro", "nosuid", "nodev"}
    for path in ("/mnt/w/new", "/mnt/w/below/new", "/mnt/new"):
        run = await box.run(f"open({path!r}, 'w')")
        assert run.error is not None
        assert "Read-only" in run.error.value
    assert sorted(os.listdir(source)) == ["a.txt", "below"]


async def test_several_are_mounted_and_one_taken_away(box: AsyncSandbox, source: Path) -> None:
    await box.start()
    for name in ("a", "b", "c"):
        await box.mount(source, f"/mnt/{name}")
    with pytest.raises(Conflict) as raised:
        await box.mount(source, "/mnt/b")
    assert raised.value.code == "already_mounted"
    await box.unmount("/mnt/b")
    assert (await box.run("import os; sorted(os.listdir('/mnt'))")).result == "['a', 'c']"
    assert [one.target for one in await box.mounts()] == ["/mnt/a", "/mnt/c"]
    with pytest.raises(NotFound):
        await box.unmount("/mnt/b")
    await box.mount(source, "/mnt/b")
    assert await read(box, "/mnt/b/a.txt") == "hello"


async def test_what_is_shared_can_be_written_to(box: AsyncSandbox, source: Path) -> None:
    writable = source / "below"
    if os.geteuid() == 0:
        os.chown(writable, 65_432, 65_432)
    writable.chmod(0o777)
    await box.run(f"import os; os.mkdir('{SHARED}/w')")
    await box.mount(writable, f"{SHARED}/w", read_only=False)
    assert (await box.run(f"open('{SHARED}/w/f', 'w').write('x')")).ok
    assert (writable / "f").read_text() == "x"
    await box.unmount(f"{SHARED}/w")
    assert await read(box, f"{SHARED}/w/f") == "ENOENT"
    assert (writable / "f").exists()


@pytest.mark.parametrize(
    ("target", "read_only"),
    [
        ("/mnt", True),
        ("/mnt/", True),
        ("/mnt/a/b", True),
        ("/mnt/..", True),
        ("/mnt/.a", True),
        ("/mnt/a\n", True),
        ("/workspace/x", True),
        ("/usr/x", True),
        ("mnt/x", True),
        ("/mnt/x", False),
    ],
)
async def test_other_targets_are_refused(
    box: AsyncSandbox, source: Path, target: str, read_only: bool
) -> None:
    with pytest.raises(BadRequest) as raised:
        await box.mount(source, target, read_only=read_only)
    assert raised.value.code == "invalid_target"
    assert raised.value.hint


async def test_a_sandbox_that_shares_nothing_has_no_shared_target(
    runtime: Runtime, source: Path
) -> None:
    async with await runtime.create() as box:
        with pytest.raises(BadRequest, match="has no /workspace/shared"):
            await box.mount(source, f"{SHARED}/w")


async def test_what_is_no_directory_of_the_host_is_refused(box: AsyncSandbox, source: Path) -> None:
    (source / "link").symlink_to("/")
    for forbidden in ("/", "/proc", "/dev", "/run"):
        with pytest.raises(Denied) as denied:
            await box.mount(forbidden, "/mnt/x")
        assert denied.value.code == "directory_forbidden", forbidden
    for wrong in (source / "none", source / "a.txt", "wheels"):
        with pytest.raises(BadRequest) as raised:
            await box.mount(wrong, "/mnt/x")
        assert raised.value.code == "invalid_source", wrong
    for wrong in (source / "link", f"{source}/../wheels"):
        with pytest.raises(BadRequest):
            await box.mount(wrong, "/mnt/x")


@pytest.mark.parametrize("host_executables", ["protect", "ask"])
async def test_nothing_is_written_to_where_nothing_guards_it(
    runtime: Runtime, source: Path, host_executables: str
) -> None:
    if os.geteuid() == 0:
        os.chown(source / "below", 65_432, 65_432)
    async with await runtime.create(sharing(host_executables=host_executables)) as box:
        with pytest.raises(Denied) as raised:
            await box.mount(source / "below", f"{SHARED}/w", read_only=False)
        assert raised.value.code == "mount_not_guarded"
        assert await box.mounts() == ()


@pytest.mark.needs("root")
async def test_what_belongs_to_root_is_never_written_to(box: AsyncSandbox, source: Path) -> None:
    with pytest.raises(Denied) as raised:
        await box.mount(source, f"{SHARED}/w", read_only=False)
    assert raised.value.code == "source_of_root"


async def test_a_source_that_was_replaced_is_not_shown_to_a_later_kernel(
    box: AsyncSandbox, source: Path
) -> None:
    await box.mount(source, "/mnt/w")
    source.rename(source.with_name("aside"))
    source.mkdir()
    with pytest.raises(Broken) as raised:
        await box.run("1")
    assert raised.value.code == "path_replaced"
    await box.unmount("/mnt/w")
    assert (await box.run("1")).ok


async def test_a_symlink_planted_at_the_target_leads_nowhere(
    box: AsyncSandbox, source: Path
) -> None:
    """The target is the attacker's: it is walked without symlinks, from the jail's root."""
    for planted in ("/tmp/elsewhere", "../uploads", "/mnt", "/"):
        await box.run(
            "import os, contextlib\nos.makedirs('/tmp/elsewhere', exist_ok=True)\n"
            f"with contextlib.suppress(OSError): os.unlink('{SHARED}/w')\n"
            f"os.symlink({planted!r}, '{SHARED}/w')"
        )
        with pytest.raises(Unavailable) as raised:
            await box.mount(source, f"{SHARED}/w")
        assert raised.value.code == "mount_failed"
    seen = await box.shell("grep -c wheels /proc/self/mountinfo")
    assert seen.stdout == "0\n"
    assert await box.mounts() == ()


@pytest.mark.full_tier
async def test_a_jail_that_renames_meanwhile_wins_nothing(box: AsyncSandbox, source: Path) -> None:
    """What was mounted is at its target, or nowhere; and nothing hangs."""
    await box.run(
        "import os, threading\nstop = False\n"
        f"os.makedirs('{SHARED}/w'); os.makedirs('{SHARED}/v')\n"
        "def turn():\n"
        "    while not stop:\n"
        "        for one, other in (('w', 'x'), ('v', 'w'), ('w', 'v'), ('x', 'w')):\n"
        "            try:\n"
        f"                os.rename('{SHARED}/' + one, '{SHARED}/' + other)\n"
        "            except OSError: pass\n"
        "threading.Thread(target=turn, daemon=True).start()"
    )
    for _ in range(40):
        try:
            await box.mount(source, f"{SHARED}/w")
        except (Conflict, Unavailable):
            assert "wheels" not in (await box.shell("cat /proc/self/mountinfo")).stdout
        else:
            await box.unmount(f"{SHARED}/w")
    await box.run("stop = True")
    left = await box.shell("grep wheels /proc/self/mountinfo")
    assert left.stdout == ""
    assert await box.mounts() == ()


async def test_what_another_jail_moved_away_is_unmounted_all_the_same(
    box: AsyncSandbox, source: Path
) -> None:
    """A mount point can be renamed where nothing is mounted on it: in another conversation, which
    shares the directory. The mount goes along, and is found wherever it is."""
    await box.run(f"import os; os.makedirs('{SHARED}/w')")
    other = box.conversation("other")
    await other.start()
    await box.mount(source, f"{SHARED}/w")
    for talk in (other, box.conversation("default")):
        assert talk.receipt is not None
    late = box.conversation("late")
    await late.start()
    kernel = other.contexts.default._kernel
    assert kernel is not None
    await kernel.jail.detach(f"{SHARED}/w")  # so that nothing is mounted on it there
    moved = await other.run(f"import os; os.rename('{SHARED}/w', '{SHARED}/hidden')")
    assert moved.ok, moved
    assert await read(box, f"{SHARED}/hidden/a.txt") == "hello"
    with pytest.raises(NotFound):
        await box.unmount(f"{SHARED}/w")
    assert await read(box, f"{SHARED}/hidden/a.txt") == "ENOENT"


async def test_a_jail_that_dies_meanwhile_is_no_failure(box: AsyncSandbox, source: Path) -> None:
    """It would have been shown to it, and will be to the next."""
    await box.start()
    kernel = box.conversation("default").contexts.default._kernel
    assert kernel is not None
    await kernel.jail.kill()
    with pytest.raises(Broken) as raised:
        await kernel.jail.attach(str(source), "/mnt/x", read_only=True, expected=(0, 0))
    assert raised.value.code == "jail_gone"
    await box.mount(source)
    assert await read(box, "/mnt/wheels/a.txt") == "hello"


async def test_the_last_of_many_is_refused(
    box: AsyncSandbox, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sbx.runtime.live_mounts.MOUNTS_MAX", 2)
    for name in ("a", "b"):
        await box.mount(source, f"/mnt/{name}")
    with pytest.raises(Conflict) as raised:
        await box.mount(source, "/mnt/c")
    assert raised.value.code == "too_many_mounts"
