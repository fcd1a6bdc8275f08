"""What this host can do for sbx: its layers, its policies, and sandboxes that truly start."""

import asyncio
import importlib.metadata
import importlib.util
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sbx import errors
from sbx.isolation.plan import decide_walls
from sbx.isolation.probe import Capabilities, Layer
from sbx.isolation.receipt import Receipt
from sbx.policy import Policy, available, load, shipped_directory
from sbx.protocol.languages import LANGUAGES
from sbx.runtime.environments.directory import Environments
from sbx.runtime.languages import available as available_languages
from sbx.runtime.languages import how_to_get
from sbx.runtime.runtime import Runtime
from sbx.runtime.settings import Settings

_GUEST_NEEDS = ("IPython", "ipykernel", "comm", "matplotlib_inline")
_LIVE_POLICY = "default"
_PATHS: Mapping[str, Mapping[str, Any]] = {  # in an order in which none pays for another's zygote
    "cold": {"pool": {"start": "cold"}},
    "pool": {},
    "fork": {"pool": {"max_idle": 0}},
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether one shipped policy can run here. `weaker` are (wall, by which lesser means)."""

    policy: str
    runs: bool
    weaker: tuple[tuple[str, str], ...] = ()
    lacks: tuple[str, ...] = ()
    cause: str | None = None
    remedy: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return {
            "policy": self.policy,
            "runs": self.runs,
            "weaker": [{"wall": wall, "means": means} for wall, means in self.weaker],
            "lacks": list(self.lacks),
            "cause": self.cause,
            "remedy": self.remedy,
        }


@dataclass(frozen=True, slots=True)
class Live:
    """The end of a live check by one path: a receipt, or why there is none. Duration in seconds."""

    path: str
    ok: bool
    duration_s: float
    receipt: Receipt | None = None
    error: errors.SbxError | None = None

    def to_dict(self) -> dict[str, Any]:
        return {
            "path": self.path,
            "ok": self.ok,
            "policy": _LIVE_POLICY,
            "duration_s": round(self.duration_s, 3),
            "receipt": self.receipt.to_dict() if self.receipt else None,
            "error": self.error.to_dict() if self.error else None,
        }


@dataclass(frozen=True, slots=True)
class Spoken:
    """Whether sandboxes of the policy `default` run a language here: by which program, as its path
    is inside, or what to do for it."""

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


@dataclass(frozen=True, slots=True)
class Examination:
    linux: str
    machine: str
    root: bool
    layers: tuple[Layer, ...]
    verdicts: tuple[Verdict, ...]
    paths: tuple[Live, ...]
    languages: tuple[Spoken, ...] = ()

    @property
    def live(self) -> Live:
        """The check of the path that all others fall back to."""
        return next(one for one in self.paths if one.path == "cold")

    @property
    def ok(self) -> bool:
        return self.live.ok and any(v.runs for v in self.verdicts if v.policy == _LIVE_POLICY)


async def examine() -> Examination:
    """Try everything. What fails is part of the answer; raised is only what is no host's fault."""
    settings = Settings()
    async with Runtime(settings) as runtime:
        capabilities = runtime.capabilities
        return Examination(
            linux=capabilities.linux,
            machine=capabilities.machine,
            root=capabilities.root,
            layers=(*capabilities.layers, *_other_layers(capabilities, settings)),
            verdicts=tuple(verdict(policy, capabilities) for policy in shipped()),
            paths=tuple([await _live(runtime, path) for path in _PATHS]),
            languages=await asyncio.to_thread(_languages, Environments(settings.environments)),
        )


def _languages(environments: Environments) -> tuple[Spoken, ...]:
    found = available_languages(load(_LIVE_POLICY), environments)
    return tuple(
        Spoken(one, found[one].path) if one in found else Spoken(one, None, how_to_get(one))
        for one in LANGUAGES
    )


def verdict(policy: Policy, capabilities: Capabilities) -> Verdict:
    """Pure, but for `lacks`: modules of the preload list that this environment has not."""
    try:
        walls = decide_walls(policy, capabilities)
    except errors.CannotEnforce as error:
        return Verdict(policy.name, False, cause=error.message, remedy=error.hint)
    weaker = tuple((wall.name, wall.means) for wall in walls if wall.weaker)
    # How the disk is held is no policy's choice, and so not among its walls before a start.
    disk = [one for one in capabilities.layers if one.name == "disk" and not one.found]
    weaker += tuple((one.name, one.detail) for one in disk)
    lacks = () if policy.interpreter else _lacking(policy.preload)
    return Verdict(policy.name, True, weaker, lacks)


def host_ids(maps: Sequence[str], first: int, count: int) -> Layer:
    """Whether a root broker can become every uid of the range: user_namespaces(7) says that only
    mapped ids exist, and a container may map few. `maps` are the texts of uid_map and gid_map."""
    wanted = range(first, first + count)
    name = "host ids"
    detail = f"{wanted[0]} to {wanted[-1]}, one for each sandbox"
    if all(any(_covers(line, wanted) for line in text.splitlines()) for text in maps):
        return Layer(name, True, detail)
    return Layer(
        name,
        False,
        detail,
        "the user namespace that this runs in (a container's) does not map them all",
        "set SBX_UID_RANGE to a range that /proc/self/uid_map and gid_map have, as [first, count]",
    )


def _covers(line: str, wanted: range) -> bool:
    inside, _, length = map(int, line.split())
    return inside <= wanted[0] and wanted[-1] < inside + length


def _other_layers(capabilities: Capabilities, settings: Settings) -> tuple[Layer, ...]:
    layers = [_interpreter(), _broker(capabilities)]
    if capabilities.root:
        maps = [Path(f"/proc/self/{kind}_map").read_text() for kind in ("uid", "gid")]
        layers.append(host_ids(maps, *settings.uid_range))
    return tuple(layers)


def _interpreter() -> Layer:
    version = ".".join(map(str, sys.version_info[:3]))
    if lacking := _lacking(_GUEST_NEEDS):
        return Layer(
            "interpreter",
            False,
            f"Python {version} at {sys.executable}",
            f"it lacks {', '.join(lacking)}",
            f"run: {sys.executable} -m pip install ipykernel",
        )
    ipython = importlib.metadata.version("ipython")
    return Layer(
        "interpreter", True, f"Python {version} with IPython {ipython} at {sys.executable}"
    )


def _lacking(modules: Sequence[str]) -> tuple[str, ...]:
    tops = dict.fromkeys(module.partition(".")[0] for module in modules)
    return tuple(top for top in tops if importlib.util.find_spec(top) is None)


def _broker(capabilities: Capabilities) -> Layer:
    kind = "mount" if capabilities.root else "user and mount"
    if capabilities.own_namespaces:
        return Layer("broker", True, f"{kind} namespace of its own, uid {os.geteuid()}")
    return Layer(
        "broker",
        False,
        f"no {kind} namespace of its own",
        "this host gives it none; sandboxes that start cold do without",
        "what makes the layer namespaces work makes this work",
    )


def shipped() -> list[Policy]:
    """The policies that come with sbx."""
    shipped = shipped_directory().resolve()
    names = [one.name for one in available() if one.path.resolve().parent == shipped]
    return [load(name) for name in names]


async def _live(runtime: Runtime, path: str) -> Live:
    started = time.monotonic()
    receipt = None
    try:
        if path == "pool":
            await runtime.warm(_LIVE_POLICY)
            started = time.monotonic()
        async with await runtime.create(_LIVE_POLICY, narrower=_PATHS[path]) as box:
            run = await box.run("1 + 1")
            receipt = box.receipt
        took_s = time.monotonic() - started
        if run.result != "2":
            raise errors.Broken(f"1 + 1 ended as {run.status} and gave {run.result!r}")
        if receipt is not None and receipt.path != path:
            why = receipt.fallback or "the setting fast_path (SBX_FAST_PATH) is off"
            raise errors.Unavailable(f"the path {receipt.path} served instead: {why}")
    except errors.SbxError as error:
        return Live(path, False, time.monotonic() - started, receipt, error)
    return Live(path, True, took_s, receipt)
