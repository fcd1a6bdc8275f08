"""Policy: everything that is allowed, as one frozen value.

    Policy
    ├── capabilities, processes, user, env, interpreter, preload, filter, shared, workspace
    ├── filesystem   what of the host is seen, read-only
    ├── network      none, or a proxy with a list of hosts
    ├── secrets      which the proxy puts into requests; inside there are placeholders
    ├── limits       what a jail may use up
    ├── uploads      what a user may put in
    ├── walls        what must stand (hard) and what may be replaced by weaker means (best-effort)
    ├── imports      what a cell may import; a courtesy, the walls are what protects
    ├── pool         how its kernels are started, and how many are kept ready
    ├── tripwire     fake credentials, whose use freezes a sandbox
    └── expect       examples that are checked at load and executed by tests/escape

A value that came out of here is canonical: sets are sorted, what one entry already says is dropped.
The defaults are those of `policies/default.toml`, which gives the reasons and is tested to agree.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    StrictBool,
    model_validator,
)

from sbx.policy import checks
from sbx.policy.problems import invalid
from sbx.policy.units import GIB, KIB, MIB, Cpu, Duration, Rate, Size

SCHEMA = 1
MOST_IDLE = 256  # kernels; each holds some 10 MiB of its own
Capability = Literal["python", "shell", "filesystem"]
Strength = Literal["hard", "best-effort"]
Verdict = Literal["allowed", "denied", "refused", "killed"]

_CAPABILITIES: tuple[Capability, ...] = ("python", "shell", "filesystem")


def _in_order(values: tuple[Capability, ...]) -> tuple[Capability, ...]:
    if not values:
        raise invalid("must not be empty: a sandbox that can do nothing")
    return tuple(known for known in _CAPABILITIES if known in values)


def _some_time(value: float) -> float:
    if value <= 0:
        raise invalid("must be more than 0s")
    return value


_Text = Annotated[str, Field(max_length=4000)]
_Path = Annotated[str, Field(max_length=4000), AfterValidator(checks.plain_path)]
_Interpreter = Annotated[str, Field(max_length=4000), AfterValidator(checks.interpreter)]
_Module = Annotated[str, Field(max_length=200), AfterValidator(checks.module_name)]
_Count = Annotated[int, Field(strict=True, ge=1, le=1 << 31)]
_ListOrAny = tuple[str, ...] | Literal["any"]
_TMPFS = "linux takes a tmpfs of 0 as one without a limit"
_Rate = Annotated[Rate, checks.at_least(64 * KIB, "less would look like a hang")]
_Some = Annotated[Size, checks.at_least(1, "0 would mean none at all, or no limit")]


class Table(BaseModel):
    """A table of a policy file: frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Mount(Table):
    """A folder of the host (`source`), read-only at `target` inside."""

    source: Annotated[_Path, AfterValidator(checks.mount_source)]
    target: Annotated[_Path, AfterValidator(checks.mount_target)]


class Filesystem(Table):
    """What of the host is seen, always read-only; paths that do not exist there are left out.

    `read` shows system paths at their own place; the interpreter is shown without being named.
    `mount` shows folders elsewhere and must exist.
    """

    read: Annotated[
        tuple[Annotated[_Path, AfterValidator(checks.system_path)], ...],
        Field(max_length=checks.MOST_ENTRIES),
        AfterValidator(checks.sorted_set),
    ] = (
        "/bin",
        "/etc/alternatives",
        "/etc/fonts",
        "/etc/java-11-openjdk",
        "/etc/java-17-openjdk",
        "/etc/java-21-openjdk",
        "/etc/java-25-openjdk",
        "/etc/ld.so.cache",
        "/etc/ssl",
        "/lib",
        "/lib64",
        "/sbin",
        "/usr",
    )
    mount: Annotated[tuple[Mount, ...], Field(max_length=checks.MOST_ENTRIES)] = ()

    @model_validator(mode="after")
    def _apart(self) -> "Filesystem":
        """No directory can be made in a read-only one, so nothing is mounted inside another."""
        for index, mount in enumerate(self.mount):
            others = [*self.read, *(other.target for other in self.mount[:index])]
            if taken := checks.overlaps(mount.target, others):
                raise invalid(f"mount[{index}].target {mount.target} overlaps with {taken}")
        return self


class Rule(Table):
    """What may be asked of `host`, which has no rule but such: one of `methods` at one of `paths`.

    A path ends in * where all that begins so is meant. Only what the proxy can read is held to it:
    plain HTTP, and TLS that it ends itself.
    """

    host: Annotated[str, AfterValidator(checks.host_pattern)]
    methods: Annotated[_ListOrAny, checks.any_or(checks.method, checks.sorted_set)] = "any"
    paths: Annotated[_ListOrAny, checks.any_or(checks.path_pattern, checks.sorted_set)] = "any"


class Network(Table):
    """`none`: only a loopback of its own. `proxy`: the hosts of `allow`, and no other way out.

    An entry is a name, an address, or `*.` and a name for all below it, with a port or with those
    of the web, 80 and 443. What a name leads to must be a public address, unless the name or the
    address is in `allow_private`. `connections_max` are open at once in all conversations of a
    sandbox; `bytes_max` is what goes through the proxy of one sandbox, both ways together, until
    the sandbox is stopped; `time_max` the longest that one connection lasts.
    """

    mode: Literal["none", "proxy"] = "none"
    allow: Annotated[
        tuple[Annotated[str, AfterValidator(checks.destination)], ...],
        Field(max_length=checks.MOST_ENTRIES),
        AfterValidator(checks.sorted_set),
    ] = ()
    rule: Annotated[tuple[Rule, ...], Field(max_length=checks.MOST_ENTRIES)] = ()
    allow_private: Annotated[
        tuple[Annotated[str, AfterValidator(checks.private_host)], ...],
        Field(max_length=checks.MOST_ENTRIES),
        AfterValidator(checks.sorted_set),
    ] = ()
    connections_max: Annotated[int, Field(strict=True, ge=1, le=10_000)] = 32
    bytes_max: _Some = GIB
    time_max: Annotated[Duration, AfterValidator(_some_time)] = 600.0

    @model_validator(mode="after")
    def _only_with_the_proxy(self) -> "Network":
        for name in ("allow", "rule", "allow_private"):
            if getattr(self, name) and self.mode == "none":
                raise invalid(f'{name} means something only with mode = "proxy"')
        return self


class Secret(Table):
    """A secret that code inside can use and not read: the variable `env` holds a placeholder there.

    The proxy puts the real value in its place, in `header` of requests to `hosts` and nowhere else;
    over plain HTTP only with `allow_plain`. The runtime reads it where `from` says: `env:NAME`, a
    variable of its own, or `file:/path`.
    """

    model_config = ConfigDict(serialize_by_alias=True)

    env: Annotated[str, AfterValidator(checks.env_name)]
    hosts: Annotated[
        tuple[Annotated[str, AfterValidator(checks.host_pattern)], ...],
        Field(min_length=1, max_length=checks.MOST_ENTRIES),
        AfterValidator(checks.sorted_set),
    ]
    header: Annotated[str, AfterValidator(checks.header)] = "Authorization"
    source: Annotated[str, AfterValidator(checks.secret_source)] = Field(alias="from")
    allow_plain: StrictBool = False


class Limits(Table):
    """What a jail may use up. Bytes, seconds, CPUs; what is written to /tmp and /dev/shm is memory.

    `wall_time` is the longest that one run may take, and the ceiling of a run's own time-out.
    `output_max` is what one run may print; `file_size_max` the largest single file;
    `workspace_max` and `workspace_files` what a conversation may keep, directories counted as
    files, and the same again what conversations share. `io_read_max` and `io_write_max` are bytes a
    second of all jails of a sandbox together, on the disk of the workspace.
    """

    memory_max: Annotated[Size, checks.at_least(32 * MIB, "below it no interpreter starts")] = GIB
    tasks_max: Annotated[int, Field(strict=True, ge=8, le=1 << 22)] = 128
    cpu_quota: Cpu = 1.0
    wall_time: Annotated[Duration, AfterValidator(_some_time)] = 60.0
    output_max: _Some = 16 * MIB
    open_files: Annotated[int, Field(strict=True, ge=64, le=1 << 20)] = 1024
    file_size_max: _Some = 512 * MIB
    tmp_size: Annotated[Size, checks.at_least(MIB, _TMPFS)] = 256 * MIB
    shm_size: Annotated[Size, checks.at_least(64 * KIB, _TMPFS)] = 64 * MIB
    workspace_max: _Some = GIB
    workspace_files: _Count = 50_000
    io_read_max: _Rate = math.inf
    io_write_max: _Rate = math.inf


class Uploads(Table):
    """What a user may put into a conversation. `allowed_types` are file name endings, or "any"."""

    max_file_size: _Some = 100 * MIB
    max_file_count: _Count = 50
    allowed_types: Annotated[_ListOrAny, checks.any_or(checks.file_type, checks.sorted_set)] = "any"
    total_max: _Some = GIB


class Walls(Table):
    """hard: refuse to start without it. best-effort: the next weaker means, named in the receipt.

    There is nothing weaker than namespaces and seccomp: without them nothing starts anyhow.
    `io` asks for something where `limits.io_read_max` or `limits.io_write_max` does.
    """

    namespaces: Strength = "hard"
    seccomp: Strength = "hard"
    landlock: Strength = "hard"
    memory: Strength = "best-effort"
    tasks: Strength = "best-effort"
    cpu: Strength = "best-effort"
    io: Strength = "best-effort"


class Imports(Table):
    """What a cell may import, told from its text before it runs.

    A module stands for all its submodules. `forbid` wins over `allow` and may name a member, such
    as os.system. A courtesy to whoever wrote the code: the walls are what protects.
    """

    allow: Annotated[_ListOrAny, checks.any_or(checks.module_name, checks.topmost)] = "any"
    forbid: Annotated[
        tuple[_Module, ...], Field(max_length=checks.MOST_ENTRIES), AfterValidator(checks.topmost)
    ] = ()


class Pool(Table):
    """How kernels come to be, and how many are kept ready for whoever asks next.

    fork   forked from a process that has imported everything already; all kernels of one such
           process share its address layout and its hash seed, until it is replaced
    cold   a process of its own from the first instruction on

    `min_idle` are kept ready once the policy is in use, up to `max_idle` while kernels are asked
    for faster than they can be made. All sandboxes of a policy share them: a request that makes the
    numbers smaller speaks of its own sandbox only, which with `max_idle = 0` takes none of them.
    """

    start: Literal["fork", "cold"] = "fork"
    min_idle: Annotated[int, Field(strict=True, ge=0, le=MOST_IDLE)] = 1
    max_idle: Annotated[int, Field(strict=True, ge=0, le=MOST_IDLE)] = 4

    @model_validator(mode="after")
    def _in_order(self) -> "Pool":
        if self.min_idle > self.max_idle:
            raise invalid(f"min_idle {self.min_idle} is more than max_idle {self.max_idle}")
        return self


class Tripwire(Table):
    """Fake credentials that are planted inside, other ones in each sandbox. Who uses one has looked
    for secrets: the sandbox is frozen, and an operator told.

    `env` names the variables that hold one; `file` plants some in a file, too, which
    AWS_SHARED_CREDENTIALS_FILE names. `host_suffix` ends the fake host name in a variable *_URL,
    *_URI or *_DSN. `watch`: what passes the proxy, files through the API, what is written out.
    """

    enabled: StrictBool = False
    env: Annotated[
        tuple[Annotated[str, AfterValidator(checks.env_name)], ...],
        Field(min_length=1, max_length=32),
        AfterValidator(checks.sorted_set),
    ] = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "DATABASE_URL", "GITHUB_TOKEN")
    file: StrictBool = True
    host_suffix: Annotated[
        str, Field(max_length=200, pattern=r"\A[a-z0-9]([a-z0-9-]*\.)*[a-z0-9-]*[a-z0-9]\z")
    ] = "corp.internal"
    watch: Annotated[
        tuple[Literal["files", "network", "output"], ...],
        Field(min_length=1),
        AfterValidator(checks.sorted_set),
    ] = ("files", "network", "output")


class Expect(Table):
    """An example: what becomes of the cell `run` under this policy, and why.

    allowed   the cell ends well
    denied    the cell runs, and a wall answers with an exception in it
    refused   the cell does not start: the import rules name what is wrong
    killed    the cell runs, and is ended from outside
    """

    run: Annotated[_Text, Field(min_length=1)]
    then: Verdict
    why: Annotated[_Text, Field(min_length=1)]


class Policy(Table):
    """What is allowed. Equal and hashable by value; see `fingerprint` for a name of that value.

    `processes` says whether a cell may start any, and goes with `filter`: the strict one has no
    fork and no exec, the others cannot take them away. `shell` starts processes by its nature.
    `interpreter` None is the runtime's own environment, else the path of a Python, or `env:NAME`.
    `unix_sockets` says which Unix sockets code may connect to: `own` those that were made inside,
    `any` also those of the host that lie in a directory which is shown, `none` no socket that has a
    name at all; pairs stay.
    `workspace` is what a notebook's kernel has as /workspace: a directory of its own, or the one
    that the notebook lies in. Other front ends are told of a directory by whoever calls them.
    `host_executables` is for a directory of the host as workspace: `protect` keeps files that a
    program of the host obeys out of reach and puts new ones into the quarantine, `ask` also offers
    to restore them where a user is present, `allow` does neither.
    """

    name: Annotated[str, AfterValidator(checks.policy_name)]
    description: _Text = ""
    capabilities: Annotated[tuple[Capability, ...], AfterValidator(_in_order)] = _CAPABILITIES
    processes: StrictBool = True
    filter: Literal["default", "allowlist", "strict"] = "default"
    shared: StrictBool = False
    unix_sockets: Literal["any", "own", "none"] = "own"
    workspace: Literal["own", "cwd"] = "own"
    host_executables: Literal["protect", "ask", "allow"] = "protect"
    user: Annotated[str, AfterValidator(checks.user_name)] = "sandbox"
    interpreter: _Interpreter | None = None
    preload: Annotated[tuple[_Module, ...], Field(max_length=100)] = ()
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
        Mapping[Annotated[str, AfterValidator(checks.secret_name)], Secret],
        AfterValidator(checks.secrets),
        PlainSerializer(dict, dict[str, Secret]),
    ] = Field(default_factory=lambda: MappingProxyType({}))
    limits: Limits = Limits()
    uploads: Uploads = Uploads()
    walls: Walls = Walls()
    imports: Imports = Imports()
    pool: Pool = Pool()
    tripwire: Tripwire = Tripwire()
    expect: Annotated[tuple[Expect, ...], Field(max_length=checks.MOST_ENTRIES)] = ()

    def __hash__(self) -> int:
        return hash(fingerprint(self))

    @property
    def environment(self) -> str | None:
        """The name of the environment that is its interpreter; None when none is."""
        if self.interpreter is None or not self.interpreter.startswith(checks.ENVIRONMENT):
            return None
        return self.interpreter.removeprefix(checks.ENVIRONMENT)

    def __deepcopy__(self, memo: object = None) -> Self:
        return self  # nothing in it can change

    @model_validator(mode="after")
    def _no_contradiction(self) -> "Policy":
        if self.processes == (self.filter == "strict"):
            raise invalid(
                f"processes = {str(self.processes).lower()} contradicts "
                f'filter = "{self.filter}": only the strict filter takes processes away',
                hint='for no processes set processes = false and filter = "strict"',
            )
        if not self.processes and "shell" in self.capabilities:
            raise invalid(
                "capabilities names shell, which needs processes = true",
                hint='without processes: capabilities = ["python", "filesystem"]',
            )
        return self

    @model_validator(mode="after")
    def _proxy_can_be_reached(self) -> "Policy":
        if self.network.mode == "proxy" and self.filter == "strict":
            raise invalid(
                'network.mode = "proxy" contradicts filter = "strict", which lets nothing connect',
                hint='set network.mode = "none", or filter = "default" and processes = true',
            )
        if self.secrets and self.network.mode != "proxy":
            raise invalid('secrets mean something only with network.mode = "proxy"')
        for name, secret in self.secrets.items():
            if secret.env in self.env:
                raise invalid(f"env.{secret.env} is set already, and secrets.{name} would set it")
        return self


def describe(policy: Policy) -> dict[str, Any]:
    """The whole policy as JSON, every value with its unit and `schema`; nothing is left out."""
    return {"schema": SCHEMA, **policy.model_dump(mode="json")}


def fingerprint(policy: Policy) -> str:
    """16 hex digits that name what is enforced: policies that differ only in their description
    and examples share it."""
    said = policy.model_dump(mode="json", exclude={"description", "expect"})
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:16]
