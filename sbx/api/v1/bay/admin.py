"""Profiles for clients, and collection for operators."""

import asyncio
import time
from math import ceil

from fastapi import APIRouter

from sbx.api.auth import CallerDep, OperatorDep, ServiceDep
from sbx.api.errors import documented
from sbx.api.v1.bay.models import (
    Collected,
    Collection,
    CollectorStatus,
    Profile,
    ProfileContainer,
    ProfileList,
    Resources,
    TaskResult,
    TaskStatus,
)
from sbx.environments.directory import Environments
from sbx.policy import Policy, PolicyInfo, available, load
from sbx.protocol.languages import RunLanguage
from sbx.runtime.processes import languages
from sbx.service.models import TaskReport
from sbx.service.service import Service

router = APIRouter(prefix="/v1", tags=["operation"])
_TASKS = ("idle_session", "expired_sandbox", "orphan_cargo", "orphan_container")
_IMAGE = "sbx"


@router.get("/profiles", responses=documented())
async def profiles(caller: CallerDep, service: ServiceDep, detail: bool = False) -> ProfileList:
    """List the policies for new sandboxes, also under their aliases."""
    return ProfileList(items=await asyncio.to_thread(_profiles, service, detail))


@router.post("/admin/gc/run", responses=documented(423))
async def collect(
    caller: OperatorDep, service: ServiceDep, collection: Collection | None = None
) -> Collected:
    """Remove idle, expired and left-over resources now."""
    began = time.monotonic()
    reports = await service.reaper.collect()
    await service.recording.record(caller, "gc.run", service.instance_id)
    requested = set(_TASKS if collection is None or collection.tasks is None else collection.tasks)
    results = [
        TaskResult(
            task_name=_task_name(report),
            cleaned_count=report.cleaned_count,
            skipped_count=report.skipped_count,
            errors=list(report.errors),
        )
        for report in reports
        if _task_name(report) in requested
    ]
    return Collected(
        results=results,
        total_cleaned=sum(result.cleaned_count for result in results),
        total_errors=sum(len(result.errors) for result in results),
        duration_ms=round((time.monotonic() - began) * 1000),
    )


@router.get("/admin/gc/status", responses=documented())
async def collector(caller: OperatorDep, service: ServiceDep) -> CollectorStatus:
    interval = service.settings.gc_interval
    return CollectorStatus(
        enabled=interval > 0,
        is_running=service.reaper.collecting,
        instance_id=service.instance_id,
        interval_seconds=ceil(interval),
        tasks={name: TaskStatus(enabled=True) for name in _TASKS},
    )


def _task_name(report: TaskReport) -> str:
    return report.task_name.replace("workspace", "cargo")


def _profiles(service: Service, detail: bool) -> list[Profile]:
    search, aliases = service.settings.policy_dirs, service.settings.policy_aliases
    profiles = []
    for info in available(search):
        if info.problem is None:
            policy = load(info.name, search=search)
            names = [info.name, *(name for name in info.aliases if name not in aliases)]
            names += [alias for alias, name in aliases.items() if name == info.name]
            profiles += [_profile(name, info, policy, service, detail) for name in names]
    return profiles


def _languages(policy: Policy, environments: Environments) -> list[RunLanguage]:
    python: list[RunLanguage] = ["python"] if "python" in policy.capabilities else []
    return [*python, *languages.available(policy, environments)]


def _profile(
    name: str, info: PolicyInfo, policy: Policy, service: Service, detail: bool
) -> Profile:
    resources = Resources(
        cpus=policy.limits.cpu_quota, memory=f"{policy.limits.memory_max // (1 << 20)}m"
    )
    kernel = ProfileContainer(
        name="kernel",
        runtime_type="sbx",
        capabilities=list(policy.capabilities),
        resources=resources,
    )
    return Profile(
        id=name,
        image=_IMAGE,
        resources=resources,
        capabilities=list(policy.capabilities),
        idle_timeout=ceil(service.settings.idle_timeout),
        description=info.description or None,
        containers=[kernel] if detail else None,
        languages=_languages(policy, Environments(service.settings.environments)),
    )
