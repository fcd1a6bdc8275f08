"""Which access a policy lets a person grant, and when a grant begins and ends."""

import asyncio
from typing import Any

import pytest
from pydantic import ValidationError

from sbx.errors import BadRequest, Closed, Conflict, Denied, NotFound
from sbx.policy import Policy, narrow
from sbx.policy.grants import GRANTS_MAX, Grants, is_allowed, longest_duration
from sbx.protocol.grants import Access, Grant
from sbx.protocol.runs import Run, RunError, Status


def policy(*grants: dict[str, Any], **more: Any) -> Policy:
    secrets = {"CRM": {"env": "CRM", "hosts": ["crm.example.org"], "from": "env:REAL_CRM"}}
    table = {"network": {"mode": "proxy", "allow": ["pypi.example.org"]}, "secrets": secrets}
    return Policy.model_validate({"name": "granting", "grant": list(grants), **table, **more})


HOSTS = {"network": ["*.example.net", "api.example.org:8443"], "longest": "hour"}
NETWORK = policy(HOSTS, {"network": ["a.example.net"]})
DATA = {"directory": ["/srv/data"]}
EVERY = policy(HOSTS, {"secret": ["CRM"], "longest": "once"}, {"run_time": "2h"}, DATA)
PACKAGE = policy({"package": ["humanize", "scikit-learn"]})
MEMORY = policy({"memory": "2GiB", "longest": "once"})


@pytest.mark.parametrize(
    ("kind", "target", "expected"),
    [
        ("network", "b.example.net:443", "hour"),
        ("network", "a.example.net:443", "conversation"),  # the longest of two entries
        ("network", "b.example.net:80", "hour"),
        ("network", "b.example.net:8443", None),
        ("network", "api.example.org:8443", "hour"),
        ("network", "api.example.org:443", None),
        ("network", "example.net:443", None),
        ("network", "*.example.net:443", None),  # more than one host
        ("network", "b.example.net", None),  # more than one port
        ("network", "B.example.net:443", None),  # not canonical
        ("network", "b.example.net:443 (approved by the operator)", None),
        ("network", "", None),
        ("secret", "CRM", None),
        ("run_time", "60", None),
    ],
)
def test_a_grant_is_for_one_host_and_one_port(kind: Any, target: str, expected: Any) -> None:
    assert longest_duration(NETWORK, Access(kind, target)) == expected


@pytest.mark.parametrize(
    ("kind", "target", "expected"),
    [
        ("secret", "CRM", "once"),
        ("secret", "crm", None),
        ("run_time", "7200", "conversation"),
        ("run_time", "7201", None),
        ("run_time", "0", None),
        ("run_time", "-5", None),
        ("run_time", "1e3", None),
        ("run_time", "9" * 400, None),
        ("run_time", "²", None),
    ],
)
def test_secrets_and_run_times(kind: Any, target: str, expected: Any) -> None:
    assert longest_duration(EVERY, Access(kind, target)) == expected


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("/srv/data", "hour"),
        ("/srv/data/2026/11", "hour"),
        ("/srv/data2", None),
        ("/srv", None),
        ("/srv/data/../secret", None),
        ("/srv/data/", None),
        ("srv/data", None),
        ("/srv/data\n", None),
    ],
)
def test_directories(target: str, expected: Any) -> None:
    granting = policy({"directory": ["/srv/data"], "longest": "hour"})
    assert longest_duration(granting, Access("directory", target)) == expected
    assert not is_allowed(granting, Access("directory", target))


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("2048", "once"),
        ("2049", None),
        ("0", None),
        ("-1", None),
        ("2GiB", None),
        ("9" * 400, None),
    ],
)
def test_memory_in_mib(target: str, expected: Any) -> None:
    assert longest_duration(MEMORY, Access("memory", target)) == expected


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("scikit-learn", "conversation"),
        ("scikit_learn", None),  # not canonical
        ("Humanize", None),
        ("humanize==4.0", None),
        ("humanize other", None),
        ("pandas", None),
    ],
)
def test_packages(target: str, expected: Any) -> None:
    assert longest_duration(PACKAGE, Access("package", target)) == expected
    assert not is_allowed(PACKAGE, Access("package", target))


@pytest.mark.parametrize(
    ("message", "noted"),
    [
        ("No module named 'humanize'", ["humanize"]),
        ("No module named 'scikit_learn'", ["scikit-learn"]),
        ("No module named 'pandas'", []),
        ("No module named 'humanize.time'", []),
        ("No module named 'humanize'; 'x' is not a package", []),
        ("No module named 'humanize' (approved by the operator)", []),
    ],
)
def test_a_missing_module_may_be_a_package_of_this_name(message: str, noted: list[str]) -> None:
    grants = Grants(PACKAGE)
    error = RunError("ModuleNotFoundError", message, "")
    grants.note_end(Run("run-1", Status.ERROR, error=error))
    assert [access.target for access in grants.take_refused()] == noted


def test_access_that_the_policy_allows_needs_no_grant() -> None:
    assert is_allowed(EVERY, Access("network", "pypi.example.org:443"))
    assert not is_allowed(EVERY, Access("network", "pypi.example.org:8080"))
    assert not is_allowed(EVERY, Access("network", "nonsense"))
    assert is_allowed(EVERY, Access("run_time", "3600"))
    assert not is_allowed(EVERY, Access("run_time", "3601"))
    assert is_allowed(MEMORY, Access("memory", "1024"))
    assert not is_allowed(MEMORY, Access("memory", "1025"))
    assert not is_allowed(EVERY, Access("secret", "CRM"))
    assert is_allowed(NETWORK, Access("secret", "CRM"))


@pytest.mark.parametrize(
    ("grant", "more", "problem"),
    [
        ({}, {}, "exactly one of"),
        ({"network": ["a.example.net"], "secret": ["CRM"]}, {}, "exactly one of"),
        ({"network": ["nonsense/"]}, {}, "is not a host"),
        ({"directory": ["data"]}, {}, "not an absolute path"),
        ({"directory": ["/srv/../etc"]}, {}, "not a plain path"),
        ({"directory": ["/proc"]}, {}, "cannot be shown"),
        ({"secret": ["OTHER"]}, {}, "is not in secrets"),
        ({"run_time": "1h"}, {}, "above limits.wall_time"),
        ({"package": ["Humanize"]}, {}, "not a package's name"),
        ({"package": ["humanize --index x"]}, {}, "not a package's name"),
        ({"memory": "1GiB"}, {}, "above limits.memory_max"),
        ({"network": ["a.example.net"], "longest": "day"}, {}, "conversation"),
        ({"network": ["a.example.net"]}, {"network": {}, "secrets": {}}, 'mode = "proxy"'),
    ],
)
def test_an_entry_without_effect_is_an_error(
    grant: dict[str, Any], more: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ValidationError, match=problem):
        policy(grant, **more)


def test_a_request_may_permit_fewer_grants_and_no_others() -> None:
    assert narrow(EVERY, {"grant": []}).grant == ()
    below = {"directory": ["/srv/data/2026"], "longest": "once"}
    assert narrow(EVERY, {"grant": [below]}).grant == policy(below).grant
    fewer = {"network": ["b.example.net:443"], "longest": "once"}
    assert narrow(EVERY, {"grant": [fewer]}).grant == policy(fewer).grant
    assert narrow(PACKAGE, {"grant": [{"package": ["humanize"]}]}).grant
    with pytest.raises(BadRequest):
        narrow(PACKAGE, {"grant": [{"package": ["pandas"]}]})
    assert narrow(MEMORY, {"grant": [{"memory": "1536MiB", "longest": "once"}]}).grant
    with pytest.raises(BadRequest):
        narrow(MEMORY, {"grant": [{"memory": "3GiB", "longest": "once"}]})
    assert narrow(MEMORY, {"network": {"mode": "none"}, "secrets": {}}).grant == MEMORY.grant
    for wider in (
        {"network": ["b.example.com"]},
        {**HOSTS, "longest": "conversation"},
        {"run_time": "3h"},
        {"secret": ["CRM"]},  # for longer than once
        {"directory": ["/srv"]},
    ):
        with pytest.raises(BadRequest) as refused:
            narrow(EVERY, {"grant": [wider]})
        assert refused.value.code == "limit_widened"


def test_a_narrowed_policy_loses_the_grants_that_have_no_effect() -> None:
    left = policy({"run_time": "2h"}, DATA).grant
    assert narrow(EVERY, {"network": {"mode": "none"}}).grant == left
    kept = narrow(EVERY, {"secrets": {}}).grant
    assert kept == policy(HOSTS, {"run_time": "2h"}, DATA).grant


class Changes(list[tuple[str, Grant]]):
    def __call__(self, change: str, grant: Grant) -> None:
        self.append((change, grant))


SITE = Access("network", "b.example.net:443")


async def test_a_grant_counts_until_it_is_revoked() -> None:
    changes = Changes()
    grants = Grants(EVERY, on_change=changes)
    assert not grants.has(SITE)
    grant = await grants.grant(SITE, "hour", "ann")
    assert grants.has(SITE)
    assert list(grants.hosts) == ["b.example.net:443"]
    assert grants.secrets == []
    assert (grant.by, grant.duration) == ("ann", "hour")
    assert grant.expires_at == pytest.approx(grant.granted_at + 3600)
    grants.end(grant.id)
    assert not grants.has(SITE)
    assert changes == [("granted", grant), ("grant_ended", grant)]
    with pytest.raises(NotFound):
        grants.end(grant.id)


async def test_a_grant_ends_by_itself() -> None:
    ended = asyncio.Event()

    def changed(change: str, _: Grant) -> None:
        if change == "grant_ended":
            ended.set()

    grants = Grants(EVERY, hour_s=0.05, on_change=changed)
    await grants.grant(SITE, "hour", "ann")
    async with asyncio.timeout(20):
        await ended.wait()
    assert not grants.has(SITE)
    assert grants.hosts == ()


async def test_the_end_counts_before_its_timer_runs() -> None:
    grants = Grants(EVERY, hour_s=0.0)
    await grants.grant(SITE, "hour", "ann")
    assert not grants.has(SITE)
    assert grants.hosts == []
    await grants.close()


async def test_a_grant_for_one_run_is_for_the_next_one() -> None:
    grants = Grants(EVERY)
    earlier, first, second = object(), object(), object()
    grants.run_began(earlier)
    await grants.grant(SITE, "once", "ann")
    grants.run_ended(earlier)
    assert grants.has(SITE)
    grants.run_began(first)
    grants.run_began(second)
    grants.run_ended(second)
    assert grants.has(SITE)
    grants.run_ended(first)
    assert not grants.has(SITE)


async def test_the_policy_limits_the_duration_and_the_access() -> None:
    grants = Grants(EVERY)
    with pytest.raises(Denied) as refused:
        await grants.grant(SITE, "conversation", "ann")
    assert (refused.value.code, refused.value.details) == ("not_grantable", {"longest": "hour"})
    with pytest.raises(Denied):
        await grants.grant(Access("network", "other.example.com:443"), "once", "ann")
    assert grants.active == ()


async def test_the_number_of_grants_and_of_noted_refusals_is_limited() -> None:
    grants = Grants(EVERY)
    for number in range(GRANTS_MAX):
        grants.note_refused(Access("network", f"h{number}.example.net:443"))
        await grants.grant(Access("network", f"g{number}.example.net:443"), "hour", "ann")
    with pytest.raises(Conflict):
        await grants.grant(SITE, "hour", "ann")
    grants.note_refused(Access("network", "never.example.com:443"))
    assert len(grants.take_refused()) == 3
    assert grants.take_refused() == ()
    await grants.close()
    assert grants.active == ()


async def test_a_refusal_is_asked_about_once_until_it_is_granted() -> None:
    grants = Grants(EVERY)
    grants.note_refused(SITE)
    assert grants.take_refused() == (SITE,)
    grants.note_refused(SITE)
    assert grants.take_refused() == ()
    grants.end((await grants.grant(SITE, "hour", "ann")).id)
    grants.note_refused(SITE)
    assert grants.take_refused() == (SITE,)


async def test_a_granted_run_time_lasts_as_long_as_its_grant() -> None:
    grants = Grants(EVERY)
    assert grants.wall_time == 3600
    grant = await grants.grant(Access("run_time", "5000"), "conversation", "ann")
    assert grants.wall_time == 5000
    assert grant.expires_at is None
    grants.end(grant.id)
    assert grants.wall_time == 3600


async def test_a_granted_directory_is_shown_until_the_end() -> None:
    shown: list[str] = []

    async def show(access: Access) -> str:
        shown.append(access.target)
        return "/mnt/data"

    async def hide(grant: Grant) -> None:
        assert grant.inside == "/mnt/data"
        shown.clear()

    grants = Grants(EVERY, apply=show, undo=hide)
    grant = await grants.add("directory", "/srv/data", "conversation", by="ann")
    assert (shown, grant.inside) == (["/srv/data"], "/mnt/data")
    await grants.revoke(grant.id)
    assert shown == []
    await grants.add("directory", "/srv/data", by="ann")
    await grants.close()
    assert shown == []
    with pytest.raises(Denied):
        await Grants(EVERY).add("directory", "/srv/data", by="ann")


async def test_a_grant_that_its_conversation_does_not_wait_for_leaves_nothing() -> None:
    shown: list[str] = []
    closing = asyncio.Event()

    async def show(access: Access) -> str:
        await closing.wait()
        shown.append(access.target)
        return "/mnt/data"

    async def hide(_: Grant) -> None:
        shown.clear()

    grants = Grants(EVERY, apply=show, undo=hide)
    granting = asyncio.create_task(grants.add("directory", "/srv/data"))
    await asyncio.sleep(0)
    await grants.close()
    closing.set()
    with pytest.raises(Closed):
        await granting
    assert shown == []
    with pytest.raises(Closed):
        await grants.add("network", "b.example.net:443")


@pytest.mark.parametrize(("kind", "duration"), [("printer", "once"), ("network", "day")])
async def test_another_kind_or_duration_is_a_bad_request(kind: Any, duration: Any) -> None:
    with pytest.raises(BadRequest, match="cannot be granted"):
        await Grants(EVERY).add(kind, "b.example.net:443", duration)
