"""All errors that sbx raises, sorted by the next step of the caller.

    SbxError
    ├── BadRequest       fix the call
    │   ├── PolicyError      … the policy file: names file, line or key
    │   ├── InvalidPath      … the path: `details["reason"]` is the problem
    │   └── TooLarge         … the size: `details["limit"]` in bytes, or in files
    ├── NotFound         the named object does not exist
    ├── Conflict         wait, retry, or remove the conflicting object
    │   └── Closed           the sandbox or runtime was closed
    ├── Denied           the policy forbids it; names the rule
    ├── Unavailable      this machine cannot do it; names the missing capability
    │   └── CannotEnforce    … a hard wall of the policy
    └── Broken           a bug in sbx, or a process of sbx that died

`code` is stable and meant for programs. `message` is one sentence for a user. `hint` suggests the
next step. User code that fails, times out or is killed gives a result, never one of these errors.
"""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class SbxError(Exception):
    """The root: catch it to catch every error that sbx raises on purpose."""

    code: str = "error"

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        hint: str | None = None,
        details: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.details = details or {}
        if code is not None:
            self.code = code
        if hint:
            self.add_note(f"hint: {hint}")  # Python shows it below the message

    def to_dict(self) -> dict[str, Any]:
        """Return the shape of every error report: JSON output, HTTP bodies, logs."""
        body: dict[str, Any] = {"code": self.code, "message": self.message}
        if self.hint:
            body["hint"] = self.hint
        if self.details:
            body["details"] = self.details
        return body


class BadRequest(SbxError):
    code = "validation_error"


class PolicyError(BadRequest):
    code = "invalid_policy"


class InvalidPath(BadRequest):
    code = "invalid_path"


class TooLarge(BadRequest):
    code = "too_large"


class NotFound(SbxError):
    code = "not_found"


class Conflict(SbxError):
    code = "conflict"


class Closed(Conflict):
    code = "closed"


class Denied(SbxError):
    code = "denied"


class Unavailable(SbxError):
    code = "unavailable"


class CannotEnforce(Unavailable):
    code = "cannot_enforce"


class Broken(SbxError):
    code = "internal_error"


KINDS: dict[str, type[SbxError]] = {
    name: kind
    for name, kind in list(globals().items())
    if isinstance(kind, type) and issubclass(kind, SbxError)
}


def kind_of(error: SbxError) -> str:
    """Return the name of the class of an error in `KINDS`, with which another process of sbx can
    raise it again."""
    return next(kind.__name__ for kind in type(error).__mro__ if kind.__name__ in KINDS)


@contextmanager
def needs_extra(feature: str, extra: str) -> Iterator[None]:
    """Raise Unavailable `extra_missing` if an import in the block fails for a missing package."""
    try:
        yield
    except ImportError as error:
        if (error.name or "sbx").partition(".")[0] == "sbx":
            raise
        install = f"pip install 'sbx-runtime[{extra}]'"
        raise Unavailable(
            f"{feature} needs packages that are not installed; run: {install}",
            code="extra_missing",
        ) from error


def is_disk_full(error: BaseException) -> bool:
    """Return whether the file system, or the quota of the user, has no space left."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def out_of_files(error: BaseException) -> Unavailable | None:
    """Return Unavailable if the process may open no further file; None for any other error."""
    if not isinstance(error, OSError) or error.errno not in (errno.EMFILE, errno.ENFILE):
        return None
    return Unavailable(
        "this process has too many open files",
        code="too_many_open_files",
        hint="raise RLIMIT_NOFILE, or close sandboxes that are not in use",
        details={"retry_after_s": 1.0},
    )
