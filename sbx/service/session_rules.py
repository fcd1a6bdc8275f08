"""The limits of sessions and their uploads, which the settings of the service read as well."""

from collections.abc import Mapping
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from sbx.errors import BadRequest
from sbx.policy import Policy
from sbx.workspace.uploads import UploadLimits

UNITS = {"KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30}
TYPES = ("csv", "xlsx", "json", "txt", "pkl", "png", "jpg", "pdf")


class FileRules(Struct, frozen=True):
    """The limits of the uploads to a session: bytes of a file as `size` units, files of a
    conversation, and extensions in lower case."""

    size: int = 100
    unit: str = "MB"
    count: int = 50
    types: tuple[str, ...] = TYPES

    @property
    def max_bytes(self) -> int:
        return self.size * UNITS[self.unit]

    def narrowed(self, request: Mapping[str, Any]) -> "FileRules":
        """Return the rules that a request tightens; `request` has the fields of the sessions API.
        Raise BadRequest `limit_widened`, which names the limit."""
        rules = self
        if (size := request.get("max_file_size")) is not None:
            rules = replace(rules, size=size, unit=request.get("max_file_size_unit") or "MB")
            if rules.max_bytes > self.max_bytes:
                raise widened("max_file_size", f"{self.size} {self.unit}", self.max_bytes)
        if (count := request.get("max_file_count")) is not None:
            if count > self.count:
                raise widened("max_file_count", str(self.count), self.count)
            rules = replace(rules, count=count)
        if (types := request.get("allowed_file_types")) is not None:
            plain = tuple(dict.fromkeys(kind.lower().removeprefix(".") for kind in types))
            if not set(plain) <= set(self.types):
                raise widened("allowed_file_types", ", ".join(self.types), list(self.types))
            rules = replace(rules, types=plain)
        return rules

    def to_json(self) -> dict[str, Any]:
        """Return the fields of the sessions API, which the store has as well."""
        return {
            "max_file_size": self.size,
            "max_file_size_unit": self.unit,
            "max_file_count": self.count,
            "allowed_file_types": list(self.types),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "FileRules":
        return cls(
            size=data["max_file_size"],
            unit=data["max_file_size_unit"],
            count=data["max_file_count"],
            types=tuple(data["allowed_file_types"]),
        )

    def within(self, policy: Policy) -> UploadLimits:
        """Return the limits of one upload: these rules, and those of the session's policy."""
        most, workspace_max = policy.uploads, policy.limits.workspace_max
        allowed = frozenset(self.types)
        if most.allowed_types != "any":
            allowed &= frozenset(most.allowed_types)
        return UploadLimits(
            max_file_size=min(self.max_bytes, most.max_file_size, workspace_max),
            max_file_count=min(self.count, most.max_file_count),
            max_total_bytes=min(most.total_max, workspace_max),
            allowed_types=allowed,
        )


class SessionRules(Struct, frozen=True):
    """The operator's settings for sessions; a request may only narrow them. `ttl_s` in seconds."""

    policy: str = "default"
    ttl_s: int = 7200
    files: FileRules = FileRules()

    def ttl(self, request: int | None) -> int:
        """Return the seconds of a new session. Raise BadRequest `limit_widened`."""
        if request is None:
            return self.ttl_s
        if request > self.ttl_s:
            raise widened("ttl", f"{self.ttl_s} s", self.ttl_s)
        return request


def widened(field: str, shown: str, limit: Any) -> BadRequest:
    return BadRequest(
        f"{field} may only be narrowed, and the limit is {shown}",
        code="limit_widened",
        hint="ask for less, or leave it out for the operator's setting",
        details={"field": field, "limit": limit},
    )
