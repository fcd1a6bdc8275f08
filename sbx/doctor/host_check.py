"""Examine this host: its layers, the policies that run here, and live checks in sandboxes."""

import asyncio
import importlib.metadata
import importlib.util
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct, field
from msgspec.structs import asdict, replace

from sbx import errors
from sbx.doctor.resources import HostResources
from sbx.environments.directory import Environments
from sbx.isolation.plan import decide_walls
from sbx.isolation.probe import Capabilities, Layer
from sbx.isolation.receipt import Receipt
from sbx.policy import Policy, available, load, shipped_directory
from sbx.protocol.languages import LANGUAGES
from sbx.runtime.processes.languages import available as available_languages
from sbx.runtime.processes.languages import how_to_get
from sbx.runtime.runtime import Runtime
from sbx.runtime.settings import UNREADABLE, Settings, unreadable

_GUEST_NEEDS = ("IPython", "ipykernel", "comm", "matplotlib_inline")
_LIVE_POLICY = "default"
# In this order, no check pays for the zygote of another.
_PATHS: Mapping[str, Mapping[str, Any]] = {
    "cold": {"pool": {"start": "cold"}},
    "pool": {},
    "fork": {"pool": {"max_idle": 0}},
}


class PolicyCheck(Struct, frozen=True):
    """Whether one shipped policy can run here. `weaker` has pairs (wall, the weaker means).
    `not_forked` is the reason why its kernels start cold, and `preload_failed` has the modules that
    they do not have at the start, with the reasons; both of a kernel that was started."""

    policy: str
    runs: bool
    weaker: tuple[tuple[str, str], ...] = ()
    lacks: tuple[str, ...] = ()
    cause: str | None = None
    remedy: str | None = None
    not_forked: str | None = None
    preload_failed: Mapping[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {
            "policy": self.policy,
            "runs": self.runs,
            "weaker": [{"wall": wall, "means": means} for wall, means in self.weaker],
            "lacks": list(self.lacks),
            "cause": self.cause,
            "remedy": self.remedy,
            "not_forked": self.not_forked,
            "preload_failed": dict(self.preload_failed),
        }


class Live(Struct, frozen=True):
    """The result of a live check by one path: a receipt or an error. The duration is in seconds."""

    path: str
    ok: bool
    duration_s: float
    receipt: Receipt | None = None
    error: errors.SbxError | None = None

    def to_dict(self) -> dict[str, Any]:
        return {
            "path": self.path,
            "ok": self.ok,
            "duration_s": round(self.duration_s, 3),
            "error": self.error.to_dict() if self.error else None,
        }

    def sentence(self) -> str:
        """Return the result, with the restrictions that Linux reports as in force."""
        if self.error is not None:
            return f"live check: failed: {self.error.message}"
        assert self.receipt is not None
        receipt = self.receipt
        limits = ", ".join(
            f"{name} {value}" for name, value in receipt.limits.items() if value not in (None, [])
        )
        return (
            f"live check: 1 + 1 = 2 in {self.duration_s:.2f} s; "
            f"host uid {receipt.host_uid}, namespaces {' '.join(receipt.namespaces)}, "
            f"no capabilities, seccomp {' + '.join(receipt.seccomp)}, "
            f"Landlock ABI {receipt.landlock_abi}, network {receipt.network}, "
            f"cgroup limits {limits or 'none'}"
        )


class CheckResult(Struct, frozen=True):
    """Whether sandboxes of the policy `default` can run a language here.

    `path` is the path of its program inside the sandbox. `remedy` is the way to install it.
    """

    language: str
    path: str | None
    remedy: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return {
            "language": self.language,
            "available": self.path is not None,
            "path": self.path,
            "remedy": self.remedy,
        }


class HostCheck(Struct, frozen=True):
    linux: str
    machine: str
    root: bool
    layers: tuple[Layer, ...]
    verdicts: tuple[PolicyCheck, ...]
    paths: tuple[Live, ...]
    languages: tuple[CheckResult, ...] = ()
    resources: HostResources | None = None

    @property
    def live(self) -> Live:
        """The check of the path `cold`, which is the fallback of all others."""
        return next(check for check in self.paths if check.path == "cold")

    @property
    def ok(self) -> bool:
        return self.live.ok and any(v.runs for v in self.verdicts if v.policy == _LIVE_POLICY)

    def to_dict(self) -> dict[str, Any]:
        receipt = self.live.receipt
        return {
            "ok": self.ok,
            "linux": self.linux,
            "machine": self.machine,
            "root": self.root,
            "resources": asdict(self.resources) if self.resources is not None else None,
            "layers": [
                {
                    "name": layer.name,
                    "found": layer.available,
                    "detail": layer.detail,
                    "cause": layer.cause,
                    "remedy": layer.remedy,
                }
                for layer in self.layers
            ],
            "policies": [verdict.to_dict() for verdict in self.verdicts],
            "languages": [language.to_dict() for language in self.languages],
            "live": {
                **self.live.to_dict(),
                "policy": _LIVE_POLICY,
                "receipt": receipt.to_dict() if receipt else None,
            },
            "paths": [check.to_dict() for check in self.paths],
        }

    def tables(self) -> list[tuple[tuple[str, ...], list[tuple[str, ...]]]]:
        """Return a table of the layers, of the policies, of the paths, and of the languages."""
        layers: list[tuple[str, ...]] = [
            (layer.name, "found" if layer.available else "missing", layer.detail)
            for layer in self.layers
        ]
        policies: list[tuple[str, ...]] = [
            (
                verdict.policy,
                "yes" if verdict.runs else "no",
                ", ".join(wall for wall, _ in verdict.weaker) or ("none" if verdict.runs else ""),
            )
            for verdict in self.verdicts
        ]
        paths: list[tuple[str, ...]] = [
            (check.path, "yes", f"{check.duration_s * 1000:.0f} ms")
            if check.ok
            else (check.path, "no", "")
            for check in self.paths
        ]
        languages: list[tuple[str, ...]] = [
            (language.language, "yes" if language.path else "no", language.path or "")
            for language in self.languages
        ]
        return [
            (("layer", "state", "detail"), layers),
            (("policy", "runs here", "walls that are weaker here"), policies),
            (("path", "works here", "sandbox to result"), paths),
            (("language", "runs here", "by"), languages),
        ]

    def hints(self) -> list[tuple[str, str]]:
        """Return the causes and the remedies, each with a label."""
        hints = self.resources.hints() if self.resources is not None else []
        for layer in self.layers:
            if not layer.available:
                hints.append(("missing", f"{layer.name}: {layer.cause or layer.detail}"))
                hints += [("hint", layer.remedy)] if layer.remedy else []
        weaker = {wall: means for verdict in self.verdicts for wall, means in verdict.weaker}
        hints += [("weaker", f"{wall}: {means}") for wall, means in weaker.items()]
        for verdict in self.verdicts:
            if verdict.cause:
                hints.append((f"no {verdict.policy}", verdict.cause))
            if verdict.lacks:
                lacks = ", ".join(verdict.lacks)
                hints.append(("note", f"{verdict.policy} preloads {lacks}: not installed"))
            if verdict.not_forked:
                hints.append(("slow", f"{verdict.policy} starts cold: {verdict.not_forked}"))
            hints += [
                ("slow", f"{verdict.policy} does not preload {module}: {why}")
                for module, why in verdict.preload_failed.items()
                if module.partition(".")[0] not in verdict.lacks
            ]
        hints += [
            (f"no {language.language}", language.remedy)
            for language in self.languages
            if language.remedy is not None
        ]
        if self.live.ok:  # without a working cold path, a slow start is not the problem
            hints += [
                ("slow", f"no {check.path}: {check.error.message}")
                for check in self.paths
                if check.error is not None
            ]
        return hints


async def examine() -> HostCheck:
    """Run all checks. A failed check is part of the result; raise only errors that the host did not
    cause."""
    settings = Settings()
    async with Runtime(settings) as runtime:
        capabilities = runtime.capabilities
        return HostCheck(
            linux=capabilities.linux,
            machine=capabilities.machine,
            root=capabilities.root,
            layers=(*capabilities.layers, *_other_layers(capabilities, settings)),
            verdicts=tuple([await _check(runtime, policy) for policy in shipped()]),
            paths=tuple([await _live(runtime, path) for path in _PATHS]),
            languages=await asyncio.to_thread(_languages, Environments(settings.environments)),
            resources=HostResources.read(),
        )


async def _check(runtime: Runtime, policy: Policy) -> PolicyCheck:
    """Return the verdict on a policy. If it preloads modules, start a kernel."""
    check = verdict(policy, runtime.capabilities)
    if not check.runs or not policy.preload:
        return check
    async with await runtime.create(policy) as box:
        receipt = await box.start()
    return replace(check, not_forked=receipt.fallback, preload_failed=receipt.preload_failed)


def _languages(environments: Environments) -> tuple[CheckResult, ...]:
    programs = available_languages(load(_LIVE_POLICY), environments)
    return tuple(
        CheckResult(language, programs[language].path)
        if language in programs
        else CheckResult(language, None, how_to_get(language))
        for language in LANGUAGES
    )


def verdict(policy: Policy, capabilities: Capabilities) -> PolicyCheck:
    """Return the verdict on one policy.

    The function is pure, except for `lacks`: the modules of the preload list that are missing in
    this environment.
    """
    try:
        walls = decide_walls(policy, capabilities)
    except errors.CannotEnforce as error:
        return PolicyCheck(policy.name, False, cause=error.message, remedy=error.hint)
    weaker = tuple((wall.name, wall.means) for wall in walls if wall.weaker)
    # The policy does not choose the disk limit's mechanism, so it is not among the planned walls.
    disk = [layer for layer in capabilities.layers if layer.name == "disk" and not layer.available]
    weaker += tuple((layer.name, layer.detail) for layer in disk)
    lacks = () if policy.interpreter else lacking(policy.preload)
    return PolicyCheck(policy.name, True, weaker, lacks)


def host_ids(maps: Sequence[str], first: int, count: int) -> Layer:
    """Return the layer that reports whether a root broker can switch to every uid of the range.

    Only mapped ids exist, see user_namespaces(7), and a container may map only a few. `maps` are
    the contents of uid_map and gid_map.
    """
    ids = range(first, first + count)
    name = "host ids"
    detail = f"{ids[0]} to {ids[-1]}, one for each sandbox"
    if all(any(_covers(line, ids) for line in text.splitlines()) for text in maps):
        return Layer(name, True, detail)
    return Layer(
        name,
        False,
        detail,
        "the user namespace of this process (a container) does not map all of them",
        "set SBX_UID_RANGE to a range within /proc/self/uid_map and gid_map, as [first, count]",
    )


def _covers(line: str, ids: range) -> bool:
    inside, _, length = map(int, line.split())
    return inside <= ids[0] and ids[-1] < inside + length


def _other_layers(capabilities: Capabilities, settings: Settings) -> tuple[Layer, ...]:
    layers = [_interpreter(), _broker(capabilities), _operator_directories(settings)]
    if capabilities.root:
        maps = [Path(f"/proc/self/{kind}_map").read_text() for kind in ("uid", "gid")]
        layers.append(host_ids(maps, *settings.uid_range))
    return tuple(layers)


def _interpreter() -> Layer:
    version = ".".join(map(str, sys.version_info[:3]))
    if missing := lacking(_GUEST_NEEDS):
        return Layer(
            "interpreter",
            False,
            f"Python {version} at {sys.executable}",
            f"it lacks {', '.join(missing)}",
            f"run: {sys.executable} -m pip install ipykernel",
        )
    ipython = importlib.metadata.version("ipython")
    return Layer(
        "interpreter", True, f"Python {version} with IPython {ipython} at {sys.executable}"
    )


def _operator_directories(settings: Settings) -> Layer:
    """Return whether this user can read the directories of agents, tools and tasks. One that does
    not exist has no files."""
    problems = [
        f"{path} cannot be read: {error.strerror}"
        for path, error in unreadable(settings.operator_directories)
        if not isinstance(error, FileNotFoundError)
    ]
    return Layer(
        "operator files",
        not problems,
        "the directories of agents, tools and tasks",
        "; ".join(problems) or None,
        UNREADABLE if problems else None,
    )


def lacking(modules: Sequence[str]) -> tuple[str, ...]:
    tops = dict.fromkeys(module.partition(".")[0] for module in modules)
    return tuple(top for top in tops if importlib.util.find_spec(top) is None)


def _broker(capabilities: Capabilities) -> Layer:
    kind = "mount" if capabilities.root else "user and mount"
    if capabilities.own_namespaces:
        return Layer("broker", True, f"separate {kind} namespace, uid {os.geteuid()}")
    return Layer(
        "broker",
        False,
        f"no separate {kind} namespace",
        "this host does not allow one; sandboxes that start cold do not need it",
        "apply the remedy of the layer namespaces",
    )


def shipped() -> list[Policy]:
    """Return the policies that sbx ships."""
    shipped = shipped_directory().resolve()
    names = [entry.name for entry in available() if entry.path.resolve().parent == shipped]
    return [load(name) for name in names]


async def _live(runtime: Runtime, path: str) -> Live:
    started_at = time.monotonic()
    receipt = None
    try:
        if path == "pool":
            await runtime.warm(_LIVE_POLICY)
            started_at = time.monotonic()
        async with await runtime.create(_LIVE_POLICY, narrower=_PATHS[path]) as box:
            run = await box.run("1 + 1")
            receipt = box.receipt
        took_s = time.monotonic() - started_at
        if run.result != "2":
            raise errors.Broken(f"1 + 1 ended as {run.status} with the result {run.result!r}")
        if receipt is not None and receipt.path != path:
            cause = receipt.fallback or "the setting fast_path (SBX_FAST_PATH) is off"
            raise errors.Unavailable(f"the path {receipt.path} served instead: {cause}")
    except errors.SbxError as error:
        return Live(path, False, time.monotonic() - started_at, receipt, error)
    return Live(path, True, took_s, receipt)
