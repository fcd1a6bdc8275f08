"""The tables of a policy file, each a frozen value. An unknown key is an error.

The defaults are those of `policies/default.toml`, which gives the reasons.
"""

import math
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictBool, model_validator

from sbx.policy import checks
from sbx.policy.problems import invalid
from sbx.policy.units import GIB, KIB, MIB, Cpu, Duration, Rate, Size
from sbx.protocol.grants import ACCESS_KINDS, GrantDuration

MOST_IDLE = 256  # kernels; each uses about 10 MiB of private memory


Strength = Literal["hard", "best-effort"]


Verdict = Literal["allowed", "denied", "refused", "killed"]


def _some_time(value: float) -> float:
    if value <= 0:
        raise invalid("must be more than 0s")
    return value


Text = Annotated[str, Field(max_length=4000)]


HostPath = Annotated[str, Field(max_length=4000), AfterValidator(checks.plain_path)]


Module = Annotated[str, Field(max_length=200), AfterValidator(checks.module_name)]


_Count = Annotated[int, Field(strict=True, ge=1, le=1 << 31)]


_ListOrAny = tuple[str, ...] | Literal["any"]


_TMPFS = "Linux treats a tmpfs of size 0 as unlimited"


_Rate = Annotated[Rate, checks.at_least(64 * KIB, "a lower rate would look like a hang")]


_Some = Annotated[Size, checks.at_least(1, "0 would mean nothing at all, or no limit")]


class Table(BaseModel):
    """A table of a policy file: frozen, and an unknown key is an error."""

    # The validator of Policy contains those of its tables, so only that one is built, at first use.
    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


class MountPolicy(Table):
    """A folder of the host (`source`), read-only at `target` inside."""

    source: Annotated[HostPath, AfterValidator(checks.mount_source)]
    target: Annotated[HostPath, AfterValidator(checks.mount_target)]


class Filesystem(Table):
    """The visible part of the host, always read-only.

    `read` shows system paths at their own place; paths that do not exist on the host are skipped.
    The interpreter is visible without an entry. `mount` shows folders at another place, and they
    must exist.
    """

    read: Annotated[
        tuple[Annotated[HostPath, AfterValidator(checks.system_path)], ...],
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
    mount: Annotated[tuple[MountPolicy, ...], Field(max_length=checks.MOST_ENTRIES)] = ()

    @model_validator(mode="after")
    def _apart(self) -> "Filesystem":
        """Refuse nested mounts: Linux cannot create a mount point in a read-only directory."""
        for index, mount in enumerate(self.mount):
            others = [*self.read, *(other.target for other in self.mount[:index])]
            if taken := checks.overlaps(mount.target, others):
                raise invalid(f"mount[{index}].target {mount.target} overlaps with {taken}")
        return self


class NetworkRule(Table):
    """The requests that are allowed to `host`: one of `methods` at one of `paths`.

    Once a host has a rule, only requests that match one of its rules are allowed. A path that ends
    in * matches every path with that prefix. The rules apply only to requests that the proxy can
    read: plain HTTP, and TLS that the proxy itself terminates.
    """

    host: Annotated[str, AfterValidator(checks.host_pattern)]
    methods: Annotated[_ListOrAny, checks.any_or(checks.method, checks.sorted_set)] = "any"
    paths: Annotated[_ListOrAny, checks.any_or(checks.path_pattern, checks.sorted_set)] = "any"


class Network(Table):
    """`none`: only a private loopback. `proxy`: the hosts of `allow`, and no other way out.

    An entry is a name, an address, or `*.` and a name for all names below it. It has a port, or
    means the default ports of the web, 80 and 443. A name must resolve to a public address, unless
    the name or the address is in `allow_private`. `connections_max` limits the open connections of
    all conversations of a sandbox. `bytes_max` limits the traffic of one sandbox through the proxy,
    both directions together, until the sandbox is stopped. `time_max` limits the duration of one
    connection.
    """

    mode: Literal["none", "proxy"] = "none"
    allow: Annotated[
        tuple[Annotated[str, AfterValidator(checks.destination)], ...],
        Field(max_length=checks.MOST_ENTRIES),
        AfterValidator(checks.sorted_set),
    ] = ()
    rule: Annotated[tuple[NetworkRule, ...], Field(max_length=checks.MOST_ENTRIES)] = ()
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
                raise invalid(f'{name} has an effect only with mode = "proxy"')
        return self


class SecretPolicy(Table):
    """A secret that code inside can use but not read: its variable `env` contains a placeholder.

    The proxy replaces the placeholder with the real value in `header` of requests to `hosts`, and
    nowhere else; in plain HTTP only with `allow_plain`. The runtime reads the secret from the
    location in `from`: `env:NAME`, a variable of the runtime, or `file:/path`.
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


class GrantPolicy(Table):
    """Access that the policy refuses, and that a person may grant to one conversation.

    An entry has one of six kinds. `network`: code may reach these hosts, written as in
    `network.allow`; each grant is for one host and one port. `secret`: the proxy inserts these
    secrets only after a grant. `directory`: these directories of the host, and those below them,
    can be seen read-only. `run_time`: a run may take this long instead of `wall_time`.
    `memory`: the sandbox may use so many bytes instead of `memory_max`. `package`: these packages,
    with their dependencies, may be installed for the conversation.
    `longest` is the longest duration of a grant: for one run, for an hour, or until the
    conversation ends.
    """

    network: Annotated[
        tuple[Annotated[str, AfterValidator(checks.destination)], ...],
        Field(max_length=checks.MOST_ENTRIES),
        AfterValidator(checks.sorted_set),
    ] = ()
    secret: Annotated[
        tuple[Annotated[str, AfterValidator(checks.secret_name)], ...],
        Field(max_length=checks.MOST_ENTRIES),
        AfterValidator(checks.sorted_set),
    ] = ()
    directory: Annotated[
        tuple[Annotated[HostPath, AfterValidator(checks.mount_source)], ...],
        Field(max_length=checks.MOST_ENTRIES),
        AfterValidator(checks.sorted_set),
    ] = ()
    run_time: Annotated[Duration, AfterValidator(_some_time)] | None = None
    memory: Size | None = None
    package: Annotated[
        tuple[Annotated[str, AfterValidator(checks.package_name)], ...],
        Field(max_length=checks.MOST_ENTRIES),
        AfterValidator(checks.sorted_set),
    ] = ()
    longest: GrantDuration = "conversation"

    @model_validator(mode="after")
    def _of_one_kind(self) -> "GrantPolicy":
        kinds = [getattr(self, kind) for kind in ACCESS_KINDS]
        if sum(map(bool, kinds)) != 1:
            raise invalid(f"a grant has exactly one of {', '.join(ACCESS_KINDS)}")
        return self


class LimitsPolicy(Table):
    """The resources that a jail may use, in bytes, seconds and CPUs.

    Files in /tmp and /dev/shm count as memory. `run_timeout` is the time-out of a run that requests
    none; it is never more than `wall_time`, the maximum that a run may request. `output_max` limits
    the output of one run, and `file_size_max` a single file. `workspace_max` and `workspace_files`
    limit the files of a conversation; directories count as files. They limit the growth of a
    directory of the host. The files that conversations share have the same limits again.
    `io_read_max` and `io_write_max` are bytes per second of all jails of a sandbox together, on the
    disk of the workspace.
    """

    memory_max: Annotated[
        Size, checks.at_least(32 * MIB, "an interpreter cannot start with less")
    ] = GIB
    tasks_max: Annotated[int, Field(strict=True, ge=8, le=1 << 22)] = 128
    cpu_quota: Cpu = 1.0
    run_timeout: Annotated[Duration, AfterValidator(_some_time)] = 60.0
    wall_time: Annotated[Duration, AfterValidator(_some_time)] = 3600.0
    output_max: _Some = 16 * MIB
    open_files: Annotated[int, Field(strict=True, ge=64, le=1 << 20)] = 1024
    file_size_max: _Some = 512 * MIB
    tmp_size: Annotated[Size, checks.at_least(MIB, _TMPFS)] = 256 * MIB
    shm_size: Annotated[Size, checks.at_least(64 * KIB, _TMPFS)] = 64 * MIB
    workspace_max: _Some = GIB
    workspace_files: _Count = 50_000
    io_read_max: _Rate = math.inf
    io_write_max: _Rate = math.inf

    @property
    def default_timeout_s(self) -> float:
        """The time-out of a run that requests none, in seconds."""
        return min(self.run_timeout, self.wall_time)


class UploadsPolicy(Table):
    """The files that a user may upload to a conversation. `allowed_types` are file name endings, or
    "any"."""

    max_file_size: _Some = 100 * MIB
    max_file_count: _Count = 50
    allowed_types: Annotated[_ListOrAny, checks.any_or(checks.file_type, checks.sorted_set)] = "any"
    total_max: _Some = GIB


class WallsPolicy(Table):
    """hard: refuse to start without it. best-effort: use the next weaker one, named in the receipt.

    Namespaces and seccomp have no weaker replacement: without them nothing starts. `io` has an
    effect only if `limits.io_read_max` or `limits.io_write_max` is set.
    """

    namespaces: Strength = "hard"
    seccomp: Strength = "hard"
    landlock: Strength = "hard"
    memory: Strength = "best-effort"
    tasks: Strength = "best-effort"
    cpu: Strength = "best-effort"
    io: Strength = "best-effort"


class Imports(Table):
    """The modules that a cell may import, checked in its text before it runs.

    A module includes all its submodules. `forbid` wins over `allow` and may name a member, such as
    os.system. The rules are a convenience for the author of the code: the walls provide the
    protection.
    """

    allow: Annotated[_ListOrAny, checks.any_or(checks.module_name, checks.topmost)] = "any"
    forbid: Annotated[
        tuple[Module, ...], Field(max_length=checks.MOST_ENTRIES), AfterValidator(checks.topmost)
    ] = ()


class PoolPolicy(Table):
    """How kernels are started, and how many are kept ready for the next request.

    fork   forked from a process that has already imported all modules; all kernels of one such
           process share its address layout and its hash seed, until it is replaced
    cold   a separate process from its first instruction

    Once the policy is in use, `min_idle` kernels are kept ready, and up to `max_idle` while kernels
    are requested faster than they can be started. All sandboxes of a policy share them. A request
    with smaller numbers affects only its own sandbox, which with `max_idle = 0` uses none of them.
    """

    start: Literal["fork", "cold"] = "fork"
    min_idle: Annotated[int, Field(strict=True, ge=0, le=MOST_IDLE)] = 1
    max_idle: Annotated[int, Field(strict=True, ge=0, le=MOST_IDLE)] = 4

    @model_validator(mode="after")
    def _in_order(self) -> "PoolPolicy":
        if self.min_idle > self.max_idle:
            raise invalid(f"min_idle {self.min_idle} is more than max_idle {self.max_idle}")
        return self


class HoneytokenPolicy(Table):
    """Fake credentials inside, different in each sandbox.

    Their use shows that code has searched for secrets. It freezes the sandbox and notifies an
    operator.

    `env` names the variables with a fake credential. `file` also puts some into a file that
    AWS_SHARED_CREDENTIALS_FILE names. `host_suffix` ends the fake host name in a variable *_URL,
    *_URI or *_DSN. `watch` selects where a use is detected: in traffic through the proxy, in files
    through the API, or in the output.
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
    """An example: the result of the cell `run` under this policy, and the reason.

    allowed   the cell succeeds
    denied    the cell runs, and a wall causes an exception in it
    refused   the cell does not start: the import rules name the problem
    killed    the cell runs and is killed from outside
    """

    run: Annotated[Text, Field(min_length=1)]
    then: Verdict
    why: Annotated[Text, Field(min_length=1)]
