"""A planted credential that is used ends what runs, and nothing starts until that is unfrozen."""

import asyncio
import base64
import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from persistent_sandboxes import ME, OTHER

from sbx import AsyncSandbox, Runtime, Settings
from sbx.errors import Conflict, NotFound
from sbx.policy import Policy, load
from sbx.protocol.runs import Cause, Status
from sbx.service.run import RunRequest
from sbx.service.service import Service

pytestmark = pytest.mark.core


def wired(start: str = "fork", **chosen: Any) -> Policy:
    policy = load("default")
    pool = policy.pool.model_copy(update={"start": start, "min_idle": 0, "max_idle": 0})
    table = policy.model_dump(mode="json") | {"honeytoken": {"enabled": True, **chosen}}
    return Policy.model_validate(table).model_copy(update={"pool": pool})


@pytest.fixture
async def box(runtime: Runtime) -> AsyncIterator[AsyncSandbox]:
    async with await runtime.create(wired()) as box:
        yield box


async def value(box: AsyncSandbox, name: str = "GITHUB_TOKEN") -> str:
    await box.start()
    assert box.honeytokens is not None
    return box.honeytokens.environment[name]


async def frozen(box: AsyncSandbox) -> str:
    """What it says of the wire and the place, once it starts nothing any more."""
    with pytest.raises(Conflict) as raised:
        await box.run("1")
    assert raised.value.code == "honeytoken"
    assert raised.value.hint
    assert not box.conversation("default").alive
    return f"{raised.value.details['token']} in {raised.value.details['where']}"


@pytest.mark.parametrize("start", ["fork", "cold"])
async def test_each_sandbox_has_values_of_its_own_in_variables_and_a_file(start: str) -> None:
    seen = set()
    look = (
        "import os, hashlib, configparser\n"
        "file = configparser.ConfigParser(); file.read(os.environ['AWS_SHARED_CREDENTIALS_FILE'])\n"
        "held = [os.environ[n] for n in ('AWS_ACCESS_KEY_ID', 'AWS_SECRET_ACCESS_KEY',"
        " 'DATABASE_URL', 'GITHUB_TOKEN')] + list(file['default'].values())\n"
        "assert held[0].startswith('AKIA') and held[3].startswith('ghp_')\n"
        "assert '.corp.internal:5432/' in held[2]\n"
        "[hashlib.sha256(one.encode()).hexdigest() for one in held]"
    )
    async with Runtime() as runtime:
        for _ in range(2):
            async with await runtime.create(wired(start)) as box:
                run = await box.run(look)
                assert run.result is not None, run.error
                again = await box.conversation("other").run(look)
                assert again.result == run.result
                in_shell = await box.shell("printf %s $GITHUB_TOKEN | sha256sum")
                assert in_shell.stdout.split()[0] in run.result
                seen |= set(eval(run.result))
    assert len(seen) == 12


ENDINGS = {
    "printed": "print({0!r})",
    "printed in pieces": (
        "import sys, time\nfor one in {0!r}:\n    sys.stdout.write(one); sys.stdout.flush()\n"
        "    time.sleep(0.002)"
    ),
    "to standard error": "import sys; sys.stderr.write({0!r})",
    "as a value": "{0!r}",
    "in an exception": "raise ValueError({0!r})",
    "in hexadecimal": "print({0!r}.encode().hex())",
    "in base64": "import base64; print(base64.b64encode(b'a' + {0!r}.encode() + b'zz').decode())",
    "in lines": (
        "import base64\nraw = {0!r}.encode()\nprint(base64.encodebytes(b'x' * 30 + raw).decode())"
    ),
    "small": "print({0!r}.lower())",
    "shown": "from IPython.display import display, JSON; display(JSON({{'a': [{0!r}]}}))",
    "by a child": "import subprocess; subprocess.run(['printenv'])",
    "raw": "get_ipython().system('echo $GITHUB_TOKEN')",
}


@pytest.mark.full_tier
@pytest.mark.parametrize("how", ENDINGS)
async def test_an_output_that_holds_one_ends_the_run(box: AsyncSandbox, how: str) -> None:
    secret = await value(box)
    run = await box.run(ENDINGS[how].format(secret))
    assert (run.status, run.cause) == (Status.KILLED, Cause.HONEYTOKEN)
    assert run.error is not None
    assert run.error.name == "Honeytoken"
    assert secret not in run.stdout + run.stderr + str(run.outputs)
    assert (await frozen(box)).endswith(" in an output")


async def test_a_command_and_all_that_runs_beside_it_end(box: AsyncSandbox) -> None:
    await value(box)
    other = box.conversation("other")
    sleeping = other.start_run("print('on', flush=True); import time; time.sleep(600)")
    async for event in sleeping.events():
        if event.type == "stdout":
            break
    run = await box.shell("echo $AWS_SECRET_ACCESS_KEY; sleep 600")
    assert (run.status, run.cause) == (Status.KILLED, Cause.HONEYTOKEN)
    async with asyncio.timeout(60):
        beside = await sleeping.result()
    assert (beside.status, beside.cause) == (Status.KILLED, Cause.HONEYTOKEN)
    assert await frozen(box) == "AWS_SECRET_ACCESS_KEY in an output"
    with pytest.raises(Conflict):
        await other.run("1")


async def test_unfrozen_sandbox_runs_again(box: AsyncSandbox) -> None:
    secret = await value(box)
    await box.run(f"print({secret!r})")
    await frozen(box)
    assert await box.unfreeze()
    assert not await box.unfreeze()
    assert (await box.run("1 + 1")).result == "2"
    assert (await box.run(f"print({secret!r})")).cause is Cause.HONEYTOKEN


async def test_a_file_on_its_way_out_is_looked_at(box: AsyncSandbox) -> None:
    secret = await value(box)
    await box.run("import os; open('x', 'w').write(' ' * 1_000_000 + os.environ['GITHUB_TOKEN'])")

    async def download() -> None:
        async with await box.files.open_stream("x") as stream:
            async for piece in stream.chunks():
                assert secret.encode() not in piece

    with pytest.raises(Conflict) as raised:
        await download()
    assert raised.value.code == "honeytoken"
    assert await frozen(box) == "GITHUB_TOKEN in a download"
    with pytest.raises(Conflict):
        await box.files.read_bytes("x")


async def test_a_file_on_its_way_in_is_looked_at(box: AsyncSandbox) -> None:
    secret = (await value(box)).encode()

    async def pieces() -> AsyncIterator[bytes]:
        yield b"x" * 100 + secret[:10]
        yield secret[10:]

    with pytest.raises(Conflict):
        await box.uploads.put_stream("a.txt", pieces())
    assert await frozen(box) == "GITHUB_TOKEN in an upload"
    assert await box.uploads.list() == ()
    with pytest.raises(Conflict):
        await box.files.write("b.txt", base64.b64encode(secret))


async def test_a_file_that_comes_in_pieces_is_looked_at_when_it_is_whole(
    box: AsyncSandbox,
) -> None:
    secret = (await value(box)).encode()
    partials = box.files.partials
    begun = await partials.begin("u.txt", len(secret), upload=True)
    for part in (secret[:10], secret[10:]):

        async def piece(part: bytes = part) -> AsyncIterator[bytes]:
            yield part

        at = partials.get(begun.id).offset
        await partials.append(begun.id, at, hashlib.sha256(part).hexdigest(), piece())
    with pytest.raises(Conflict) as raised:
        await box.uploads.put_partial(partials, begun.id, hashlib.sha256(secret).hexdigest())
    assert raised.value.code == "honeytoken"
    assert await frozen(box) == "GITHUB_TOKEN in a file that came in"
    assert await box.uploads.list() == ()


async def test_what_the_proxy_reads_springs_it(box: AsyncSandbox) -> None:
    secret = await value(box)
    assert box.honeytokens is not None
    host = (await value(box, "DATABASE_URL")).partition("@")[2].partition(":")[0]
    assert box.honeytokens.at_proxy("pypi.example") is None
    assert box.honeytokens.at_proxy(f"GET https://{host.upper()}/ HTTP/1.1") == host
    assert await frozen(box) == f"{host} in a request to the proxy"
    assert box.honeytokens.at_proxy(f"token={secret}") == "GITHUB_TOKEN"


async def test_only_what_is_watched_counts(runtime: Runtime) -> None:
    async with await runtime.create(wired(watch=["network"], file=False)) as box:
        secret = await value(box)
        assert secret in (await box.run("import os; print(os.environ)")).stdout
        await box.files.write("a", secret)
        assert await box.files.read("a") == secret
        assert (await box.run("import os; os.path.exists('/tmp/.aws')")).result == "False"


@pytest.mark.full_tier
async def test_a_policy_without_them_plants_nothing(own_runtime: Runtime) -> None:
    async with await own_runtime.create() as box:
        assert box.honeytokens is None
        run = await box.run("import os; [n for n in os.environ if 'AWS' in n or 'TOKEN' in n]")
        assert run.result == "[]"
    assert not (own_runtime.data.path / "tripwire_key").exists()


async def test_a_service_remembers_and_only_an_operator_unfreezes(tmp_path: Path) -> None:
    policies = tmp_path / "policies"
    policies.mkdir()
    (policies / "wired.toml").write_text(
        'schema = 1\nextends = "default"\n[pool]\nmin_idle = 0\nmax_idle = 0\n'
        "[honeytoken]\nenabled = true\n"
    )
    settings = Settings(data_dir=tmp_path / "data", policy_dirs=(policies,))
    code = "import os; print(os.environ['GITHUB_TOKEN'])"
    async with Service(settings) as service:
        made = await service.sandboxes.create(ME, policy="wired")
        handle = await service.runs.start(ME, made.id, "default", RunRequest("python", code))
        run = await handle.result()
        assert (run.status, run.cause) == (Status.KILLED, Cause.HONEYTOKEN)
        await service.sandboxes.stop(ME, made.id)
        view = await service.sandboxes.get(ME, made.id)
        assert view.failure is not None
        assert (view.state.value, view.failure["code"]) == ("failed", "honeytoken")
    async with Service(settings) as service:
        with pytest.raises(Conflict) as raised:
            async with service.sandboxes.using(ME, made.id, scope="execute") as use:
                await use.active.conversation("default").start()
        assert raised.value.code == "honeytoken"
        assert raised.value.details["token"] == "GITHUB_TOKEN"
        row = await service.runs.history.entry(ME, made.id, run.run_id)
        assert row.run is not None
        assert row.run.cause is Cause.HONEYTOKEN
        with pytest.raises(NotFound):
            service.sandboxes.index.get_as_operator(OTHER, made.id)
        assert service.sandboxes.index.get_as_operator(ME, made.id).unfreeze()
        assert not service.sandboxes.index.get_as_operator(ME, made.id).unfreeze()
        async with service.sandboxes.using(ME, made.id, scope="execute") as use:
            assert (await use.active.conversation("default").run("1")).ok
        events = (await service.events.page(ME, made.id)).items
        assert [one.type for one in events if one.type in ("honeytoken", "unfrozen")] == [
            "honeytoken",
            "unfrozen",
        ]
    log = (tmp_path / "data" / "audit.jsonl").read_text().splitlines()
    state_events = [one for one in map(json.loads, log) if one["what"] == "honeytoken"]
    assert [(one["object"], one["details"]["token"]) for one in state_events] == [
        (made.id, "GITHUB_TOKEN")
    ]


async def test_a_kernel_that_starts_meanwhile_is_not_left(box: AsyncSandbox) -> None:
    secret = await value(box)
    other = box.conversation("other")
    starting = asyncio.create_task(other.start())
    run = await box.run(f"print({secret!r})")
    assert run.cause is Cause.HONEYTOKEN
    with suppress(Conflict):
        await starting
    await asyncio.sleep(0.3)
    assert not other.alive
