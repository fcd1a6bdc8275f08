"""The grants for the jails of a service's policies, for `allowlist` to compare orders with.

They come from the plans themselves: everything that `plan` and `argv` produce for a policy, also
for a narrowed one, is granted.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import replace

from sbx.errors import CannotEnforce
from sbx.forbidden_directories import HostDirectoryFacts
from sbx.isolation.argv import bwrap_argv, zygote_argv
from sbx.isolation.broker.allowlist import take_apart
from sbx.isolation.launch_plan import (
    Bind,
    GuardPaths,
    Interpreter,
    LaunchPlan,
    Mount,
    Paths,
    WayOut,
    ZygotePlan,
)
from sbx.isolation.plan import Filters, plan, zygote_plan
from sbx.isolation.probe import Capabilities
from sbx.policy import Policy

_PARTS = ("skeletons", "binds", "created", "tmpfs", "files", "variables", "commands")


class ProjectDirectories(NamedTuple):
    """Directories that may be mapped: `within` these, of these `owners`, if the rule about `host`
    allows them."""

    within: list[str]
    owners: list[int]
    host: HostDirectoryFacts

    def to_json(self) -> dict[str, Any]:
        return {"within": self.within, "owners": self.owners, "host": self.host.to_json()}


def grants(
    policies: Iterable[tuple[Policy, Interpreter]],
    capabilities: Capabilities,
    filters: Filters,
    *,
    guest: Path,
    data: Path,
    writable: Sequence[Path],
    attachable: Sequence[Path] = (),
    projects: ProjectDirectories | None = None,
) -> dict[str, Any]:
    """Return plain data for `BrokerProcess.confine`. A policy that this host refuses grants
    nothing.

    `attachable`: directories that may be attached to a jail that lives, and all below them.
    `projects`: the working directories that may be mapped.
    `writable`: where the confined process can write, so that nothing there is shown by a policy.
    """
    jail: dict[str, set[Any]] = {name: set() for name in _PARTS}
    zygote: dict[str, set[Any]] = {name: set() for name in _PARTS}
    preload: set[str] = set()
    walls: list[dict[str, Any]] = []
    for policy, interpreter in policies:
        way_out = WayOut("egress") if policy.network.mode == "proxy" else None
        paths = Paths("files", "uploads", interpreter, str(guest), "shared", way_out=way_out)
        frozen = replace(paths, shared="files", shared_read_only=True, way_out=None)
        for variant in _variants(policy):
            try:
                for dry_run in (frozen, replace(frozen, uploads="files")):
                    _add(jail, plan(variant, capabilities, dry_run, filters))
            except CannotEnforce:
                break
            for shown in (paths, *(_of_project(paths) if projects is not None else ())):
                planned = plan(variant, capabilities, shown, filters)
                _add(jail, planned)
                _add(zygote, zygote_plan(variant, capabilities, shown))
                like = {**planned.seal.to_json(), "filter": planned.filter.program.hex()}
                walls += [like] if like not in walls else []
            preload.update(policy.preload)
    return {
        "jail": {name: sorted(items) for name, items in jail.items()},
        "zygote": {name: sorted(items) for name, items in zygote.items()},
        "preload": sorted(preload),
        "walls": walls,
        "data": str(data),
        "attachable": [os.path.abspath(path) for path in attachable],
        "writable": [str(path.resolve()) for path in writable],
        "projects": None if projects is None else projects.to_json(),
    }


def _of_project(paths: Paths) -> Iterator[Paths]:
    """Yield the paths for a copy of a project's files, and for the project itself with the path
    guard and its quarantine. `allowlist` checks the mounts of a project one by one."""
    copied = replace(paths, shared=None, host_directory=True)
    yield copied
    yield replace(copied, guard=GuardPaths("quarantine"))


def _variants(policy: Policy) -> Iterator[Policy]:
    """Yield the policy and its variants: a request may give up system directories, so that the
    directories below become separate mounts. A dry run has no network."""
    bare = policy.filesystem.model_copy(update={"read": ()})
    offline = policy.network.model_copy(update={"mode": "none"})
    for variant in (policy, policy.model_copy(update={"filesystem": bare})):
        yield variant
        if policy.network.mode != "none":
            yield variant.model_copy(update={"network": offline})


def _add(grant: dict[str, set[Any]], planned: LaunchPlan | ZygotePlan) -> None:
    def source(index: int | str) -> str:
        return _source(mounts[index]) if isinstance(index, int) else index

    if isinstance(planned, LaunchPlan):
        mounts: Sequence[Mount] = (*planned.mounts, *planned.own_mounts)
        argv = bwrap_argv(planned, source)
    else:
        mounts = planned.mounts
        argv = zygote_argv(planned, source)
    words = take_apart(argv)
    grant["skeletons"].add(words.skeleton)
    grant["binds"].update(words.binds)
    grant["created"].update(words.created)
    grant["tmpfs"].update((mode, path) for mode, _, path in words.tmpfs)
    grant["files"].update((file.target, file.content) for file in planned.files)
    grant["variables"].update(words.variables)
    grant["commands"].add(planned.command)


def _source(mount: object) -> str:
    return mount.source if isinstance(mount, Bind) else ""
