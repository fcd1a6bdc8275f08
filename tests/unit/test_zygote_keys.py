"""Which kernels may come from one zygote: told from policies alone."""

import os
from pathlib import Path
from typing import Any

import pytest

from sbx.isolation.launch_plan import Interpreter, Paths
from sbx.isolation.probe import Capabilities, Layer
from sbx.isolation.seccomp import load_filters
from sbx.kernels.pool.zygotes import Key, key_of
from sbx.policy import Policy, load, narrow

LAYERS = ("bwrap", "namespaces", "landlock", "seccomp", "memory", "tasks", "cpu")
HOST = Capabilities(
    "6.1",
    "x86_64",
    False,
    "/usr/bin/bwrap",
    frozenset(),
    1,
    True,
    tuple(Layer(name, True, "there") for name in LAYERS),
)
PATHS = Paths("/data/files", "/data/uploads", Interpreter("/usr/bin/python3", ("/usr",)), "/guest")
FILTERS = load_filters("x86_64")


def key(request: dict[str, Any], paths: Paths = PATHS, loaded: Policy | None = None) -> Key | None:
    loaded = loaded or load("data-science")
    return key_of(loaded, narrow(loaded, request), HOST, paths, FILTERS)


@pytest.mark.parametrize(
    "request_",
    [
        {"limits": {"memory_max": "64MiB", "tmp_size": "1MiB"}},
        {"env": {"TOKEN": "secret"}},
        {"processes": False},
        {"imports": {"forbid": ["os"]}},
        {"walls": {"memory": "hard"}},
        {"pool": {"max_idle": 0}},
    ],
)
def test_request_that_a_jail_can_put_in_force_shares_the_zygote_and_leaves_nothing_in_it(
    request_: dict[str, Any],
) -> None:
    assert key(request_) == key({})
    assert "secret" not in repr(key(request_))


@pytest.mark.parametrize(
    "request_", [{"filesystem": {"read": ["/usr", "/lib"]}}, {"preload": ["numpy"]}]
)
def test_request_to_see_or_to_import_less_gets_a_zygote_of_its_own(
    request_: dict[str, Any],
) -> None:
    assert key(request_) != key({})


def test_sandboxes_with_other_hosts_share_a_zygote_and_one_without_a_proxy_has_another() -> None:
    """In its environment is where the proxy is; which hosts it lets through is no business of a
    jail."""
    hosts = [{"mode": "proxy", "allow": allow} for allow in (["a.org"], ["a.org", "b.org"])]
    secrets = {"CRM": {"env": "CRM", "hosts": ["a.org"], "from": "env:CRM"}}
    loaded = Policy.model_validate({"name": "net", "network": hosts[1], "secrets": secrets})
    assert key({"network": hosts[0]}, loaded=loaded) == key({}, loaded=loaded)
    assert key({"secrets": {}}, loaded=loaded) == key({}, loaded=loaded)
    assert key({"network": {"mode": "none"}}, loaded=loaded) != key({}, loaded=loaded)


def test_policies_and_interpreters_have_their_own() -> None:
    other = Paths("/x", "/y", Interpreter("/opt/py/bin/python", ("/opt/py",)), "/guest")
    found = {key({}), key({}, other), key({}, loaded=load("default"))}
    assert len(found) == 3


def test_files_of_a_conversation_are_in_no_key() -> None:
    assert key({}) == key({}, Paths("/other/files", "/else", PATHS.interpreter, "/guest"))
    assert "/data" not in repr(key({}))


@pytest.mark.parametrize(
    ("policy", "env", "fits"),
    [
        ("default", {"TOKEN": "x", "MPLBACKEND": "agg"}, True),
        ("default", {"LC_ALL": "C"}, False),
        ("default", {"LANG": "C"}, False),
        ("data-science", {"MPLBACKEND": "agg"}, False),
        ("data-science", {}, True),
    ],
)
def test_variables_that_are_read_before_a_fork_take_the_cold_path_and_say_so(
    policy: str, env: dict[str, str], fits: bool
) -> None:
    found = key({"env": env} if env else {}, loaded=load(policy))
    assert found is not None
    assert bool(found.unfit) is not fits
    assert fits or found.unfit.startswith(f"env: {'Python reads ' * (policy == 'default')}")
    assert fits or next(iter(env)) in found.unfit


def test_environment_that_was_made_anew_or_changed_has_another_zygote(tmp_path: Path) -> None:
    packages = tmp_path / "venv/lib/python3.11/site-packages"
    interpreter = Interpreter(str(tmp_path / "venv/bin/python"), (str(tmp_path),))
    paths = Paths("/x", "/y", interpreter, "/guest")
    packages.mkdir(parents=True)
    keys = [key({}, paths)]
    assert keys[0] == key({}, paths)
    (packages / "new").mkdir()
    os.utime(packages, ns=(1, 1))
    keys.append(key({}, paths))
    tmp_path.joinpath("venv").rename(tmp_path / "old")
    packages.mkdir(parents=True)
    os.utime(packages, ns=(1, 1))
    keys.append(key({}, paths))
    assert len(set(keys)) == 3


def test_directory_in_the_place_of_a_mounted_one_has_another_zygote(tmp_path: Path) -> None:
    shown = tmp_path / "data"
    shown.mkdir()
    filesystem = load("default").filesystem.model_copy(update={"read": (str(shown),)})
    loaded = load("default").model_copy(update={"filesystem": filesystem})
    before = key({}, loaded=loaded)
    (shown / "more").touch()
    assert key({}, loaded=loaded) == before
    shown.rename(tmp_path / "other")
    shown.mkdir()
    assert key({}, loaded=loaded) != before


def test_cold_start_has_none() -> None:
    assert key({"pool": {"start": "cold"}}) is None
