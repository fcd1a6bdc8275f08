"""The checker: does the end agree with every reply? Pure: records in, findings out.

lost                the reply promised the act, and it is not there
refused_but_done    the reply denied the act, and it was done
executed_twice      the code of one request was executed more than once
unrecorded          a run is not in the history, and its reply did not say so
record_differs      the history has another result than the reply
replay_differs      two replies under one Idempotency-Key differ
revoked_works       a credential was accepted after its revocation
valid_refused       a credential was refused that was never revoked
revocation_refused  a full disk prevented a revocation or a deletion
unreported          a sandbox or a terminal is there that no reply explains
server_error        a reply has the status 500
request_refused     a correct request was refused as incorrect
deadline            a client waited longer than its deadline
process_end         the service ended, or did not end, without a reason
not_healed          the service did not answer the survey
left_behind         something of the service is on the host after its end
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

from bench.torture.ledger import LATE, SURVEY, Act, Ledger, Life, Struck

_INCORRECT = (400, 401, 403, 405, 413, 415, 422)
_FREES = ("credential.revoke", "sandbox.delete")
_ABSENT = "(absent)"


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """One disagreement between the replies and the end."""

    rule: str
    target: str
    text: str
    at: float = 0.0


def findings(ledger: Ledger) -> list[Finding]:
    """Return every disagreement, sorted by rule."""
    acts = sorted(ledger.acts, key=lambda act: act.began)
    rules = (_replies, _files, _sandboxes, _executions, _terminals, _chats)
    every = [finding for rule in rules for finding in rule(acts)]
    every += [*_records(acts, ledger.faults), *_credentials(acts, ledger.lives)]
    every += [finding for life in ledger.lives for finding in _life(life)]
    every += [Finding("left_behind", left, "it is still there") for left in ledger.left]
    first: dict[tuple[str, str, str], Finding] = {}
    every.sort(key=lambda finding: finding.at)
    for finding in every:  # a later survey finds the same again
        first.setdefault((finding.rule, finding.target, finding.text), finding)
    return sorted(first.values())


def summary(every: Iterable[Finding]) -> dict[str, int]:
    """How many findings each rule has."""
    return dict(sorted(Counter(finding.rule for finding in every).items()))


def _replies(acts: list[Act]) -> Iterator[Finding]:
    for act in acts:
        reply = f"{act.status} {act.code}".strip()
        if act.status == 500:
            yield Finding("server_error", act.kind, reply, act.began)
        if act.code == LATE:
            text = f"no reply within {act.ended - act.began:.0f} s"
            yield Finding("deadline", f"{act.kind} {act.target}", text, act.began)
        if act.status in _INCORRECT and act.kind != "credential.use":
            yield Finding("request_refused", act.kind, reply, act.began)
        if act.status == 507 and act.kind in _FREES:
            yield Finding("revocation_refused", f"{act.kind} {act.target}", reply, act.began)
        failed = act.kind == "run" and not (act.seen and act.seen["success"])
        if act.client == SURVEY and (failed or act.status is None or act.status >= 500):
            yield Finding("not_healed", f"{act.kind} {act.target}", reply, act.began)


def _files(acts: list[Act]) -> Iterator[Finding]:
    for target, history in _grouped(acts, "file."):
        possible, refused = {_ABSENT}, set[str]()
        for act in history:
            if act.kind == "file.read":
                seen = {200: act.seen, 404: _ABSENT}.get(act.status or 0)
                if seen is None or seen in possible:
                    continue
                rule = "refused_but_done" if seen in refused else "lost"
                text = f"{seen} in place of {' or '.join(sorted(possible))}"
                yield Finding(rule, f"file {target}", text, act.began)
                possible = {seen}
                continue
            after = _ABSENT if act.kind == "file.delete" else act.seen
            match act.outcome:
                case "done":
                    possible, refused = {after}, set()
                case "unknown":
                    possible = possible | {after}
                case "not_done":
                    refused.add(after)


def _sandboxes(acts: list[Act]) -> Iterator[Finding]:
    created = [act for act in acts if act.kind == "sandbox.create"]
    done = [act for act in created if act.outcome == "done"]
    replied, answered = {act.seen for act in done}, {act.key for act in done}
    for target, history in _by(acts, _sandbox_of).items():
        possible, refused = set[int](), set[int]()
        for act in history:
            match act.kind, act.outcome:
                case "sandbox.create", "done":
                    possible = {200}
                case "sandbox.delete", "done":
                    possible, refused = {404}, set()
                case "sandbox.delete", "unknown":
                    possible = possible | {404}
                case "sandbox.delete", "not_done":
                    refused.add(404)
                case "sandbox.get", _ if act.status in (200, 404) and act.status not in possible:
                    rule = "refused_but_done" if act.status in refused else "lost"
                    text = "it is there again" if act.status == 200 else "it is gone"
                    yield Finding(rule, f"sandbox {target}", text, act.began)
    for act in acts:
        if act.kind == "sandboxes" and act.status == 200:
            earlier = (creation for creation in created if creation.began < act.ended)
            lost = {creation.key for creation in earlier if creation.outcome == "unknown"}
            unknown = lost - answered
            if len(extra := set(act.seen) - replied) > len(unknown):
                text = f"{len(extra)} sandboxes, of which {len(unknown)} may be of lost replies"
                yield Finding("unreported", act.target, text, act.began)


def _executions(acts: list[Act]) -> Iterator[Finding]:
    """Compare the counters that the code incremented with the replies to the requests."""
    requests = _by(acts, lambda act: (act.target, act.key) if act.kind in ("run", "chat") else None)
    observed = _by(acts, lambda act: act.target if act.kind == "counters" else None)
    for (target, key), attempts in requests.items():
        for act in observed.get(target, ()):
            before = [attempt for attempt in attempts if attempt.ended <= act.began]
            if act.status not in (200, 404) or not before:
                continue
            count = (act.seen or {}).get(key, 0)
            if count > 1:
                yield Finding("executed_twice", f"{target} {key}", f"{count} times", act.began)
            if count == 0 and any(_succeeded(attempt) for attempt in before):
                yield Finding("lost", f"{target} {key}", "the file of the run", act.began)
            if count and len(before) == len(attempts) and _all_denied(attempts):
                replies = {f"{attempt.status} {attempt.code}" for attempt in attempts}
                text = ", ".join(sorted(replies))
                yield Finding("refused_but_done", f"{target} {key}", text, act.began)


def _records(acts: list[Act], faults: Iterable[Struck]) -> Iterator[Finding]:
    """Yield runs that the history lacks or tells otherwise. A run that was cut off is recorded too,
    unless the store could not be written then."""
    hinders = [fault for fault in faults if fault.kind in ("disk_full", "store_locked")]
    runs = _by(acts, lambda act: act.target if act.kind == "run" and act.seen else None)
    for act in acts:
        if act.kind != "history" or act.status != 200:
            continue
        for run in runs.get(act.target, ()):
            if run.ended > act.began or run.seen.get("recorded") is False:
                continue
            finished = run.outcome == "done"
            hindered = any(fault.began < run.ended and run.began < fault.ended for fault in hinders)
            if not finished and (hindered or act.client != SURVEY):  # else it may still be running
                continue
            if (row := act.seen.get(run.seen["id"])) is None:
                yield Finding("unrecorded", f"{act.target} {run.seen['id']}", run.key, run.began)
            elif finished and row != {name: run.seen[name] for name in ("success", "output")}:
                text = f"{row} for {run.seen}"
                yield Finding("record_differs", f"{act.target} {run.seen['id']}", text, run.began)
    for key, attempts in _by(acts, lambda act: act.key if act.kind == "run" else None).items():
        replies = [act.seen for act in attempts if act.outcome == "done"]
        if any(reply != replies[0] for reply in replies[1:]):
            yield Finding("replay_differs", key, f"{replies}", attempts[0].began)


def _credentials(acts: list[Act], lives: Iterable[Life]) -> Iterator[Finding]:
    """Yield wrong replies to keys and tokens. A revocation that was not recorded holds until the
    end of the process that answered it."""
    ends = [life.ended for life in lives]
    for target, history in _grouped(acts, "credential."):
        revocations = [act for act in history if act.kind == "credential.revoke"]
        holds = [
            (
                act.ended,
                inf if act.seen else min((end for end in ends if end > act.ended), default=inf),
            )
            for act in revocations
            if act.outcome == "done"
        ]
        for act in history:
            if act.kind != "credential.use" or act.status is None:
                continue
            reply = f"{act.status} {act.code}".strip()
            revoked = any(since < act.began and act.ended < until for since, until in holds)
            if revoked and act.status < 300:
                yield Finding("revoked_works", target, reply, act.began)
            earlier = (revocation for revocation in revocations if revocation.began < act.ended)
            if act.status == 401 and not any(earlier):
                yield Finding("valid_refused", target, reply, act.began)


def _terminals(acts: list[Act]) -> Iterator[Finding]:
    for target, history in _grouped(acts, "terminal."):
        opened = [act for act in history if act.kind == "terminal.open"]
        closed = [act for act in history if act.kind == "terminal.close" and act.outcome == "done"]
        replied = {act.seen for act in opened if act.outcome == "done"}
        for act in history:
            if act.kind != "terminal.list" or act.status != 200:
                continue
            gone = {request.seen for request in closed if request.ended <= act.began}
            for terminal in sorted(gone & set(act.seen)):
                yield Finding("lost", f"{target} {terminal}", "its end", act.began)
            unknown = [request for request in opened if request.outcome == "unknown"]
            if len(extra := set(act.seen) - replied) > len(unknown):
                text = f"{len(extra)} terminals, of which {len(unknown)} may be of lost replies"
                yield Finding("unreported", target, text, act.began)


def _chats(acts: list[Act]) -> Iterator[Finding]:
    chats = _by(acts, lambda act: act.target if act.kind == "chat" and _succeeded(act) else None)
    for act in acts:
        if act.kind == "messages" and act.status == 200:
            for chat in chats.get(act.target, ()):
                if chat.ended <= act.began and chat.seen["answer"] not in act.seen:
                    yield Finding("lost", f"{act.target} {chat.key}", "the answer", act.began)


def _life(life: Life) -> Iterator[Finding]:
    name = f"process {life.pid}"
    if life.forced:
        yield Finding("process_end", name, f"it did not end after {life.cause}", life.ended)
    elif life.cause == "terminate" and life.exit_code != 0:
        yield Finding("process_end", name, f"exit code {life.exit_code} after SIGTERM", life.ended)
    elif not life.cause and not life.excuse:
        text = "it did not start" if life.ready is None else "it ended by itself"
        yield Finding("process_end", name, f"{text}: exit code {life.exit_code}", life.ended)


def _sandbox_of(act: Act) -> str | None:
    """Return the sandbox that an act is about; a creation without a reply has none."""
    if act.kind == "sandbox.create":
        return act.seen if act.outcome == "done" else None
    return act.target if act.kind.startswith("sandbox.") else None


def _succeeded(act: Act) -> bool:
    return act.outcome == "done" and bool(act.seen["success"])


def _all_denied(attempts: Iterable[Act]) -> bool:
    return all(act.outcome == "not_done" for act in attempts)


def _grouped(acts: Iterable[Act], prefix: str) -> Iterator[tuple[str, list[Act]]]:
    """Return the acts on each target whose kind begins with `prefix`."""
    groups = _by(acts, lambda act: act.target if act.kind.startswith(prefix) else None)
    yield from groups.items()


def _by(acts: Iterable[Act], key: Callable[[Act], Any]) -> Mapping[Any, list[Act]]:
    """Return the acts by their key, in their order; those with None are left out."""
    groups: dict[Any, list[Act]] = {}
    for act in acts:
        if (name := key(act)) is not None:
            groups.setdefault(name, []).append(act)
    return groups
