"""Which sandboxes there are, and who may see which."""

from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager

from sbx import errors
from sbx.runtime.settings import Settings
from sbx.service.auth import Caller
from sbx.service.sandbox import ServiceSandbox

_RETRY_AFTER_S = 30.0


class SandboxIndex:
    """Everything that was not deleted, by id and by session; and how many there may be."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._by_id: dict[str, ServiceSandbox] = {}
        self._by_session: dict[tuple[str, str], ServiceSandbox] = {}
        self._making: dict[str, int] = {}  # how many of an owner are just being made

    def every(self) -> list[ServiceSandbox]:
        return list(self._by_id.values())

    def sorted(self, after: str | None = None) -> list[ServiceSandbox]:
        """By id, those after this one."""
        ids = sorted(self._by_id)
        return [self._by_id[one] for one in ids[bisect_right(ids, after) if after else 0 :]]

    def of_id(self, sandbox_id: str) -> ServiceSandbox | None:
        return self._by_id.get(sandbox_id)

    def remember(self, one: ServiceSandbox) -> None:
        self._by_id[one.id] = one
        if one.row.session_id is not None:
            self._by_session[one.row.owner, one.row.session_id] = one

    def forget(self, one: ServiceSandbox) -> None:
        self._by_id.pop(one.id, None)
        if one.row.session_id is not None:
            key = (one.row.owner, one.row.session_id)
            if self._by_session.get(key) is one:
                del self._by_session[key]

    def known(self, caller: Caller, sandbox_id: str) -> ServiceSandbox | None:
        """By its own id or its session's, where the caller may see it."""
        one = self._by_id.get(sandbox_id)
        if one is None or one.row.owner != caller.owner:
            one = self._by_session.get((caller.owner, sandbox_id))
        if one is None or not caller.sees(one.row.user_id, one.row.agent_id):
            return None
        return one if one.row.deleted_at is None else None

    def found(self, caller: Caller, sandbox_id: str, scope: str | None = None) -> ServiceSandbox:
        one = self.known(caller, sandbox_id)
        if one is None or (scope is not None and not caller.may(scope)):
            raise unknown(sandbox_id)
        return one

    def whole(self, caller: Caller, sandbox_id: str, scope: str) -> ServiceSandbox:
        """For what concerns every conversation of it at once."""
        if not caller.whole_sandbox:
            raise unknown(sandbox_id)
        return self.found(caller, sandbox_id, scope)

    def get_as_operator(self, caller: Caller, sandbox_id: str) -> ServiceSandbox:
        """For the operator, whoever owns it; his own by its session's id too."""
        one = self.known(caller, sandbox_id) or self._by_id.get(sandbox_id)
        if one is None or one.row.deleted_at is not None or not caller.operator:
            raise unknown(sandbox_id)
        return one

    def check_room(self, owner: str) -> None:
        mine = sum(one.row.owner == owner for one in self._by_id.values())
        for there, limit in (
            (len(self._by_id) + sum(self._making.values()), self._settings.sandboxes_max),
            (mine + self._making.get(owner, 0), self._settings.sandboxes_per_owner),
        ):
            if there >= limit:
                raise errors.Unavailable(
                    f"there are {limit} sandboxes, and there may be no more",
                    code="too_many_sandboxes",
                    hint="delete some that are not needed any more",
                    details={"limit": limit, "retry_after_s": _RETRY_AFTER_S},
                )

    @contextmanager
    def creating(self, owner: str) -> Iterator[None]:
        """Within it one more counts. Raises Unavailable `too_many_sandboxes`."""
        self.check_room(owner)
        self._making[owner] = self._making.get(owner, 0) + 1
        try:
            yield
        finally:
            self._making[owner] -= 1
            if not self._making[owner]:
                del self._making[owner]


def unknown(sandbox_id: str) -> errors.NotFound:
    return errors.NotFound(f"there is no sandbox {sandbox_id}", details={"sandbox_id": sandbox_id})
