"""Policy: all permissions and limits, as one frozen value.

    Policy
    ├── capabilities, processes, user, env, interpreter, preload, filter, shared, workspace
    ├── filesystem   the visible part of the host, read-only
    ├── network      none, or a proxy with a list of hosts
    ├── secrets      the proxy puts them into requests; inside there are placeholders
    ├── grant        access that a person may grant while code runs
    ├── limits       the resources that a jail may use
    ├── uploads      the files that a user may upload
    ├── walls        which walls are required (hard) or replaceable by weaker ones (best-effort)
    ├── imports      the modules that a cell may import; convenience only, the walls protect
    ├── pool         how its kernels are started, and how many are kept ready
    ├── honeytoken     fake credentials, whose use freezes a sandbox
    └── expect       examples that are checked at load and executed by tests/escape

Values of these models are canonical: sets are sorted, and redundant entries are dropped. The
defaults are those of `policies/default.toml`, which gives the reasons. A test verifies that both
agree.
"""

import hashlib
import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    Field,
    PlainSerializer,
    StrictBool,
    model_validator,
)

from sbx.policy import checks
from sbx.policy.problems import invalid
from sbx.policy.tables import (
    Expect,
    Filesystem,
    GrantPolicy,
    HoneytokenPolicy,
    Imports,
    LimitsPolicy,
    Module,
    Network,
    PoolPolicy,
    SecretPolicy,
    Table,
    Text,
    UploadsPolicy,
    WallsPolicy,
)

SCHEMA = 1
Capability = Literal["python", "shell", "filesystem"]

_CAPABILITIES: tuple[Capability, ...] = ("python", "shell", "filesystem")


def _in_order(values: tuple[Capability, ...]) -> tuple[Capability, ...]:
    if not values:
        raise invalid("must not be empty: the sandbox could do nothing")
    return tuple(capability for capability in _CAPABILITIES if capability in values)


_Interpreter = Annotated[str, Field(max_length=4000), AfterValidator(checks.interpreter)]


class Policy(Table):
    """The permissions and limits. Equal and hashable by value; `fingerprint` names that value.

    `processes` states whether a cell may start processes, and must agree with `filter`: the strict
    filter has no fork and no exec, and the others always allow both. `shell` always needs
    processes. `interpreter` None is the environment of the runtime; otherwise it is the path of a
    Python, or `env:NAME`. `unix_sockets` states to which Unix sockets code may connect: `own` to
    those that were created inside, `any` also to those of the host in a visible directory, and
    `none` to no socket that has a name. Socket pairs are always allowed.

    `workspace` is the /workspace of a notebook's kernel: a private directory, or the directory of
    the notebook. For other front ends, the caller passes the directory. `host_executables` applies
    if the workspace is a directory of the host. `protect` makes files inaccessible that a program
    of the host obeys, and puts new ones into quarantine. `ask` also offers to restore them if a
    user is present. `allow` does neither.
    """

    name: Annotated[str, AfterValidator(checks.policy_name)]
    description: Text = ""
    capabilities: Annotated[tuple[Capability, ...], AfterValidator(_in_order)] = _CAPABILITIES
    processes: StrictBool = True
    filter: Literal["default", "allowlist", "strict"] = "default"
    shared: StrictBool = False
    unix_sockets: Literal["any", "own", "none"] = "own"
    workspace: Literal["own", "cwd"] = "own"
    host_executables: Literal["protect", "ask", "allow"] = "protect"
    user: Annotated[str, AfterValidator(checks.user_name)] = "sandbox"
    interpreter: _Interpreter | None = None
    preload: Annotated[tuple[Module, ...], Field(max_length=100)] = ()
    env: Annotated[
        Mapping[
            Annotated[str, AfterValidator(checks.env_name)],
            Annotated[str, AfterValidator(checks.env_value)],
        ],
        AfterValidator(checks.env),
        PlainSerializer(dict, dict[str, str]),
    ] = Field(default_factory=lambda: MappingProxyType({}))
    filesystem: Filesystem = Filesystem()
    network: Network = Network()
    secrets: Annotated[
        Mapping[Annotated[str, AfterValidator(checks.secret_name)], SecretPolicy],
        AfterValidator(checks.secrets),
        PlainSerializer(dict, dict[str, SecretPolicy]),
    ] = Field(default_factory=lambda: MappingProxyType({}))
    grant: Annotated[tuple[GrantPolicy, ...], Field(max_length=checks.MOST_ENTRIES)] = ()
    limits: LimitsPolicy = LimitsPolicy()
    uploads: UploadsPolicy = UploadsPolicy()
    walls: WallsPolicy = WallsPolicy()
    imports: Imports = Imports()
    pool: PoolPolicy = PoolPolicy()
    honeytoken: HoneytokenPolicy = HoneytokenPolicy()
    expect: Annotated[tuple[Expect, ...], Field(max_length=checks.MOST_ENTRIES)] = ()

    def __hash__(self) -> int:
        return hash(fingerprint(self))

    @property
    def environment(self) -> str | None:
        """Return the name of the environment that is the interpreter; None for any other
        interpreter."""
        if self.interpreter is None or not self.interpreter.startswith(checks.ENVIRONMENT):
            return None
        return self.interpreter.removeprefix(checks.ENVIRONMENT)

    def __deepcopy__(self, memo: object = None) -> Self:
        return self  # it is immutable

    @model_validator(mode="after")
    def _no_contradiction(self) -> "Policy":
        if self.processes == (self.filter == "strict"):
            raise invalid(
                f"processes = {str(self.processes).lower()} contradicts "
                f'filter = "{self.filter}": only the strict filter forbids processes',
                hint='to forbid processes, set processes = false and filter = "strict"',
            )
        if not self.processes and "shell" in self.capabilities:
            raise invalid(
                "capabilities includes shell, which needs processes = true",
                hint='without processes: capabilities = ["python", "filesystem"]',
            )
        return self

    @model_validator(mode="after")
    def _proxy_can_be_reached(self) -> "Policy":
        if self.network.mode == "proxy" and self.filter == "strict":
            raise invalid(
                'network.mode = "proxy" contradicts filter = "strict", which allows no connections',
                hint='set network.mode = "none", or filter = "default" and processes = true',
            )
        if self.secrets and self.network.mode != "proxy":
            raise invalid('secrets have an effect only with network.mode = "proxy"')
        for name, secret in self.secrets.items():
            if secret.env in self.env:
                raise invalid(f"env.{secret.env} and secrets.{name} would set the same variable")
        return self

    @model_validator(mode="after")
    def _grants_have_an_effect(self) -> "Policy":
        for index, grant in enumerate(self.grant):
            if grant.network and self.network.mode != "proxy":
                raise invalid(f'grant[{index}].network needs network.mode = "proxy"')
            for name in grant.secret:
                if name not in self.secrets:
                    raise invalid(f"grant[{index}].secret {name} is not in secrets")
            if grant.run_time is not None and grant.run_time <= self.limits.wall_time:
                raise invalid(
                    f"grant[{index}].run_time must be above limits.wall_time, which every run has"
                )
            if grant.memory is not None and grant.memory <= self.limits.memory_max:
                raise invalid(f"grant[{index}].memory must be above limits.memory_max")
        return self


def describe(policy: Policy) -> dict[str, Any]:
    """Return the whole policy as JSON data, with every value, its unit, and `schema`."""
    return {"schema": SCHEMA, **policy.model_dump(mode="json")}


def fingerprint(policy: Policy) -> str:
    """Return 16 hex digits that identify the enforced rules.

    Policies that differ only in their description and examples have the same fingerprint.
    """
    enforced = policy.model_dump(mode="json", exclude={"description", "expect"})
    return hashlib.sha256(json.dumps(enforced, sort_keys=True).encode()).hexdigest()[:16]
