"""Do the steps of tasks, each in a new sandbox, and show their results."""

import asyncio
import hashlib
import json
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, Self

from platformdirs import user_cache_path

from sbx.agent.task import FilledStep
from sbx.agent.workflow import run_steps
from sbx.cli import exits, output
from sbx.cli.agent_task import AgentHost, AgentTask, perform
from sbx.cli.save_files import save_files
from sbx.cli.signals import CancelOnSignal
from sbx.cli.task_results import KeptFiles, ResultFiles, StoredResult
from sbx.cli.terminal import one_line
from sbx.errors import SbxError
from sbx.protocol.agent import AgentEvent, AgentRunEnd, StepEnd

_HEADS = ("input", "state", "steps", "tokens", "time", "answer")
_SHOWN = 60  # characters of an answer


@dataclass(frozen=True, slots=True)
class TaskBounds:
    """The limits of each run. `chosen_steps`: that of the command, which wins."""

    max_steps: int
    chosen_steps: int | None
    max_tokens: int | None
    max_seconds: float | None


@dataclass(slots=True)
class StepWork:
    """A step of an input. `state` is the reason of its end, once it has ended."""

    number: int
    values: Mapping[str, str]
    label: str
    step: FilledStep
    out: Path | None
    state: str = ""
    steps: int = 0
    tokens: int = 0
    answer: str = ""
    error: dict[str, Any] | None = None
    saved: list[str] = field(default_factory=list)
    seconds: float = 0.0
    files: Mapping[str, bytes] = field(default_factory=dict)
    cached: bool = False

    async def follow(self, event: AgentEvent) -> None:
        match event:
            case StepEnd():
                self.steps = event.step
                self.tokens += sum(event.usage.values())
            case AgentRunEnd():
                self.state, self.answer, self.error = event.reason, event.content, event.error
                self.tokens = sum(event.usage.values())

    @property
    def name(self) -> str:
        return ": ".join(filter(None, (self.label, self.step.name)))

    @property
    def row(self) -> tuple[str, ...]:
        answer = self.answer if self.error is None else str(self.error.get("message", ""))
        return (
            self.name,
            f"{self.state} (cached)" if self.cached else self.state,
            str(self.steps),
            str(self.tokens),
            f"{self.seconds:.1f} s",
            one_line(answer)[:_SHOWN],
        )

    @property
    def document(self) -> dict[str, Any]:
        return {
            "input": self.number,
            "step": self.step.name,
            "parameters": dict(self.values),
            "reason": self.state,
            "answer": self.answer,
            "error": self.error,
            "steps": self.steps,
            "tokens": self.tokens,
            "seconds": round(self.seconds, 3),
            "saved": self.saved,
            "cached": self.cached,
        }


@dataclass(frozen=True, slots=True)
class Results:
    """The results of earlier commands: those of the same --out, and those of the cache. The key of
    a result is the hash of its input; `facts` belong to the key in the cache only, so that a resume
    may use another model."""

    facts: str
    resumed: ResultFiles | None = None
    cache: ResultFiles | None = None

    @classmethod
    def of(cls, out: Path | None, cached_s: float, facts: Sequence[Any], *, resume: bool) -> Self:
        """`out`: None if nothing can be resumed. Without `resume` its results are deleted."""
        resumed = cache = None
        if out is not None:
            resumed = ResultFiles(
                out.absolute().with_name(f"{out.absolute().name}.results"), math.inf
            )
            if not resume:
                resumed.clear()
        if cached_s:
            cache = ResultFiles(user_cache_path("sbx") / "tasks", cached_s)
        return cls(json.dumps(facts, sort_keys=True, default=str), resumed, cache)

    def get(self, key: str) -> StoredResult | None:
        for results, name in self._both(key):
            if results is not None and (result := results.get(name)) is not None:
                return result
        return None

    def put(self, key: str, result: StoredResult) -> None:
        for results, name in self._both(key):
            if results is not None:
                results.put(name, result)

    @property
    def kept(self) -> bool:
        return self.resumed is not None or self.cache is not None

    def _both(self, key: str) -> tuple[tuple[ResultFiles | None, str], ...]:
        return (self.resumed, key), (self.cache, _hash([key, self.facts]))


async def do_all(
    works: Sequence[StepWork],
    host: AbstractAsyncContextManager[AgentHost],
    bounds: TaskBounds,
    results: Results,
    at_once: int,
    *,
    as_json: bool,
) -> int:
    """Do all tasks, show their progress and their results, and return the exit code."""
    turns = asyncio.Semaphore(at_once)
    with CancelOnSignal():
        async with host as opened:

            async def work_on(of_input: Mapping[str, StepWork]) -> None:
                async def do(step: FilledStep) -> bool:
                    work = of_input[step.name]
                    async with turns:
                        await _do(work, of_input, opened, bounds, results)
                    await show(work)
                    return work.state == "done"

                await run_steps([work.step for work in of_input.values()], do)
                for work in of_input.values():
                    if not work.state:
                        work.state = "skipped"
                        await show(work)

            async def show(work: StepWork) -> None:
                if as_json:
                    await asyncio.to_thread(output.document, work.document)
                elif len(works) > 1:
                    ended = sum(bool(each.state) and each.seconds > 0 for each in works)
                    output.note(f"{ended} of {len(works)}: {work.name} {work.state}")

            try:
                async with asyncio.TaskGroup() as group:
                    for _, of_input in groupby(works, lambda each: each.number):
                        group.create_task(work_on({each.step.name: each for each in of_input}))
            except BaseExceptionGroup as errors:  # of the output; a failed task is a result
                error: BaseException = errors
                while isinstance(error, BaseExceptionGroup):
                    error = error.exceptions[0]
                raise error from None
    if not as_json:
        _print(works)
    is_done = all(work.state == "done" for work in works)
    return exits.Exit.OK if is_done else exits.Exit.FAILED


def _print(works: Sequence[StepWork]) -> None:
    if works[-1].number > 1:
        output.print_table(_HEADS, [work.row for work in works])
    else:
        needed = {need for work in works for need in work.step.needs}
        for work in works:
            of_step = f"{work.step.name}: " if work.step.name else ""
            if work.step.name not in needed and work.state != "skipped":
                output.text(work.answer)
            if work.error is not None:
                output.failure(f"{of_step}{work.error.get('message', '')}", work.error.get("hint"))
            elif work.state != "done":
                output.failure(f"{of_step or 'the task '}ended before it was done: {work.state}")
    for path in (path for work in works for path in work.saved):
        output.note(f"saved: {path}")


async def _do(
    work: StepWork,
    of_input: Mapping[str, StepWork],
    host: AgentHost,
    bounds: TaskBounds,
    results: Results,
) -> None:
    """Do one step. A failure is its result."""
    started_at = time.monotonic()
    step, needs = work.step, [of_input[name] for name in work.step.needs]
    inputs = {path: need.files[path] for need in needs for path in need.step.files}
    answers = {need.step.name: need.answer for need in needs}
    try:
        key = await asyncio.to_thread(_key, step, answers, inputs) if results.kept else ""
        if results.kept and (result := await asyncio.to_thread(results.get, key)) is not None:
            work.state, work.answer, work.files = "done", result.answer, result.files
            work.cached = True
            if work.out is not None:
                saved = await save_files(KeptFiles(result.files), work.out)
                work.saved = [str(path) for path in saved.paths]
            return
        filled = step.task(answers)
        task = AgentTask(
            text=filled.prompt,
            files=filled.uploads,
            out=work.out,
            max_steps=bounds.chosen_steps or step.max_steps or bounds.max_steps,
            max_tokens=bounds.max_tokens,
            max_seconds=bounds.max_seconds,
            completion_check=filled.check,
            inputs=inputs,
            outputs=step.files,
            step=step.name,
            keeps=results.kept,
        )
        done = await perform(task, host, work.follow)
        work.files = done.files
        if done.saved is not None:
            work.saved = [str(path) for path in done.saved.paths]
        if done.complete:
            await asyncio.to_thread(results.put, key, StoredResult(work.answer, {**done.files}))
    except SbxError as error:
        work.state = "error"
        work.error = {"code": error.code, "message": error.message, "hint": error.hint}
    finally:
        work.seconds = time.monotonic() - started_at


def _key(step: FilledStep, answers: Mapping[str, str], inputs: Mapping[str, bytes]) -> str:
    """Return the hash of a step, and of everything that it gets."""
    contents = {f"inputs/{path}": content for path, content in inputs.items()}
    digests = {path: hashlib.sha256(content).hexdigest() for path, content in contents.items()}
    for path in step.uploads:
        with path.open("rb") as file:
            digests[f"uploads/{path.name}"] = hashlib.file_digest(file, "sha256").hexdigest()
    facts = [step.name, step.texts, dict(step.values), step.files, step.max_steps]
    return _hash([facts, dict(answers), digests])


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
