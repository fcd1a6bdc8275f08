"""Environments of real wheels, from a directory: made, used by kernels, verified, removed."""

import asyncio
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import product
from pathlib import Path
from typing import Any

import psutil
import pytest
from command import COMMAND, environment, family, in_process, sbx, started
from places import short_directory
from scripted_uv import ScriptedUv
from service_process import service
from wheelhouse import wheel, wheels_of_the_kernel

from sbx import Runtime, errors
from sbx.environments import pythons
from sbx.environments.directory import Environments
from sbx.isolation.launch_plan import Paths
from sbx.isolation.seccomp import load_filters
from sbx.kernels.pool.zygotes import Key, key_of
from sbx.policy import Policy, load
from sbx.runtime.settings import Settings
from tests.tiers import rows

_BY_PIP = ("--installer", "pip")
_BY_UV = ("--installer", "uv")
_UNFIT = {
    "sbx_fit.py": "VALUE = 1",
    "sbx_threaded.py": "import threading\nVALUE = 2\n"
    "threading.Thread(target=threading.Event().wait, daemon=True).start()\n",
    "sbx_opened.py": "VALUE = 4\nFILE = open('/dev/null')\n",
}
# The most-used packages for data, without those that need a GPU or a service.
_DATA = {  # package: its module
    **{name: name for name in ("numpy", "pandas", "scipy", "pyarrow", "polars", "duckdb")},
    **{name: name for name in ("seaborn", "openpyxl", "sqlalchemy", "networkx")},
    "scikit-learn": "sklearn",
    "matplotlib": "matplotlib.pyplot",
    "statsmodels": "statsmodels.api",
    "plotly": "plotly.express",
    "pillow": "PIL",
}
_TINY = "HERE = 'in the environment'\n\ndef double(number):\n    return 2 * number\n"


class WheelsHost:
    """Wheels, environments made of them, and policies that name these.

    `hollow` are wheels of the same names with next to nothing in them, for what no kernel runs in.
    `uv` makes environments without any wheel, for tests of which no installer is the subject.
    """

    def __init__(self, top: Path) -> None:
        self.wheels, self.hollow, self.environments, self.policies = (
            top / name for name in ("wheels", "hollow", "environments", "policies")
        )
        self.uv = ScriptedUv.make(top / "uv")
        for directory in (self.wheels, self.hollow, self.policies):
            directory.mkdir()
        wheels_of_the_kernel(self.wheels)
        wheel(self.hollow, "ipykernel", "9.0", {"ipykernel.py": "", "IPython.py": ""})
        for directory in (self.wheels, self.hollow):
            wheel(directory, "tiny", "1.0", {"tiny.py": _TINY.replace("2 *", "1 *")})
            wheel(directory, "tiny", "2.0", {"tiny.py": _TINY})
            wheel(directory, "needy", "1.0", {"needy.py": ""}, needs="tiny<2")
        # No network: what is not among the wheels is not there.
        self.variables = {
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(self.wheels),
            "PIP_NO_CACHE_DIR": "1",
            "SBX_ENVIRONMENTS": str(self.environments),
            "SBX_POLICY_DIRS": str(self.policies),
        }

    @property
    def hollow_variables(self) -> dict[str, str]:
        return {**self.variables, "PIP_FIND_LINKS": str(self.hollow)}

    @property
    def scripted_variables(self) -> dict[str, str]:
        return {**self.variables, "PATH": f"{self.uv.directory}:{os.environ['PATH']}"}

    def env(
        self, *words: str | Path, more: Mapping[str, str] | None = None
    ) -> "subprocess.CompletedProcess[str]":
        """A process of its own, for tests with an event loop."""
        return sbx("env", *words, env={**self.variables, **(more or {})})

    def quick(
        self, *words: str | Path, more: Mapping[str, str] | None = None
    ) -> "subprocess.CompletedProcess[str]":
        """The same in this process."""
        return in_process("env", *words, stdin=b"", **{**self.variables, **(more or {})})

    def create_hollow(self, name: str, *words: str | Path) -> "subprocess.CompletedProcess[str]":
        """By pip, of hollow wheels."""
        return in_process(
            "env", "create", name, *words, *_BY_PIP, stdin=b"", **self.hollow_variables
        )

    def create(self, name: str, *words: str | Path) -> "subprocess.CompletedProcess[str]":
        """By the script."""
        return sbx("env", "create", name, *words, *_BY_UV, env=self.scripted_variables)

    def create_quick(self, name: str, *words: str | Path) -> "subprocess.CompletedProcess[str]":
        """The same in this process."""
        return in_process(
            "env", "create", name, *words, *_BY_UV, stdin=b"", **self.scripted_variables
        )

    def create_whole(self, name: str, *words: str | Path) -> "subprocess.CompletedProcess[str]":
        """By pip, one in which kernels run."""
        return self.quick("create", name, *words, *_BY_PIP)

    def policy(
        self, name: str, environment: str, *, start: str = "fork", preload: Sequence[str] = ()
    ) -> str:
        (self.policies / f"{name}.toml").write_text(
            f'schema = 1\nextends = "default"\ninterpreter = "env:{environment}"\n'
            f'preload = {json.dumps(preload)}\n[pool]\nstart = "{start}"\nmin_idle = 0\n'
        )
        return name

    def settings(self) -> Settings:
        return Settings(environments=self.environments, policy_dirs=(self.policies,))

    @property
    def there(self) -> list[str]:
        """Everything in the directory of environments, hidden or not."""
        return sorted(os.listdir(self.environments)) if self.environments.is_dir() else []


@pytest.fixture(scope="module")
def wheels_host(own_temporary_directory: Path) -> Iterator[WheelsHost]:
    top = Path(tempfile.mkdtemp(prefix="environments-", dir=own_temporary_directory))
    top.chmod(0o755)
    made = WheelsHost(top)
    done = made.create_whole("small", "tiny")
    assert done.returncode == 0, done.stderr
    yield made
    shutil.rmtree(top)


@pytest.fixture
async def runtime(wheels_host: WheelsHost) -> AsyncIterator[Runtime]:
    async with Runtime(wheels_host.settings()) as runtime:
        yield runtime


# -- made ------------------------------------------------------------------------------------------


@pytest.mark.core
def test_it_is_told_with_versions_hashes_and_where_it_lies(wheels_host: WheelsHost) -> None:
    answer = json.loads(wheels_host.quick("show", "small", "--json").stdout)
    assert {"name": "tiny", "version": "2.0"} in answer["packages"]
    assert answer["requirements"] == ["tiny"]
    assert answer["python"] == ".".join(map(str, sys.version_info[:3]))
    assert answer["algorithm"] == "sha256"
    assert re.fullmatch(r"[0-9a-f]{64}", answer["digest"])
    lock = Path(answer["lock_path"]).read_text()
    assert re.search(r"^tiny==2\.0 \\\n    --hash=sha256:[0-9a-f]{64}$", lock, re.MULTILINE)
    listed = wheels_host.quick("list")
    assert re.search(r"^small +3\.", listed.stdout, re.MULTILINE)


@pytest.mark.core
def test_pip_takes_its_lock_with_require_hashes(wheels_host: WheelsHost, tmp_path: Path) -> None:
    lock = wheels_host.environments / "small" / "requirements.lock"
    words = ["-m", "pip", "download", "--require-hashes", "--no-deps", "-q", "-r", str(lock)]
    subprocess.run(
        [sys.executable, *words, "-d", str(tmp_path)],
        env=environment(**wheels_host.variables),
        check=True,
        timeout=60,
    )
    assert (tmp_path / "tiny-2.0-py3-none-any.whl").is_file()


@pytest.mark.full_tier
def test_requirements_come_from_a_file_and_agree_with_packages(
    wheels_host: WheelsHost, tmp_path: Path
) -> None:
    (tmp_path / "requirements.txt").write_text("# what we need\nneedy >= 1  # and so tiny 1\n")
    done = wheels_host.create_hollow("filed", "-r", tmp_path / "requirements.txt", "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert {"name": "tiny", "version": "1.0"} in answer["packages"]
    assert done.stderr == ""
    assert wheels_host.quick("remove", "filed").returncode == 0
    assert wheels_host.there == ["small"]


def test_what_cannot_be_resolved_is_said_with_the_installer_s_lines_and_leaves_nothing(
    wheels_host: WheelsHost,
) -> None:
    done = wheels_host.create_hollow("impossible", "needy", "tiny==2.0")
    assert done.returncode == 3
    assert "conflict" in done.stderr.lower()
    assert "hint: request fewer fixed versions" in done.stderr
    assert wheels_host.there == ["small"]


def test_hashes_of_a_file_must_be_those_of_the_index(
    wheels_host: WheelsHost, tmp_path: Path
) -> None:
    (tmp_path / "r.txt").write_text("tiny==2.0 --hash=sha256:" + "1" * 64 + "\n")
    wheels_host.uv.forget()
    done = wheels_host.create_quick("swapped", "-r", tmp_path / "r.txt", "--json")
    assert done.returncode == 2
    assert json.loads(done.stdout)["error"]["code"] == "hash_mismatch"
    assert not [call for call in wheels_host.uv.calls if call.startswith("pip install")]
    assert wheels_host.there == ["small"]


@pytest.mark.core
@pytest.mark.parametrize("name", ["../up", "a/b", ".hidden", "", "a" * 65, "x y", "-x", "a\n"])
def test_a_hostile_name_is_refused(wheels_host: WheelsHost, name: str) -> None:
    environments = Environments(wheels_host.environments)
    for act in (environments.claim, environments.get, environments.remove):
        with pytest.raises(errors.BadRequest) as raised:
            act(name)
        assert raised.value.code == "invalid_environment"
    assert wheels_host.there == ["small"]


def test_a_hostile_name_is_a_wrong_call_of_the_command(wheels_host: WheelsHost) -> None:
    assert wheels_host.create_quick("../up", "tiny").returncode == 2
    assert wheels_host.quick("remove", "--force", "..").returncode == 2
    assert not (wheels_host.environments.parent / "up").exists()


@pytest.mark.parametrize("word", ["--index-url=https://evil.example", "./tiny"])
def test_an_option_in_place_of_a_package_is_refused(wheels_host: WheelsHost, word: str) -> None:
    done = wheels_host.quick("create", "--json", "--", "steered", "tiny", word)
    assert done.returncode == 2
    assert json.loads(done.stdout)["error"]["code"] == "invalid_requirement"
    assert wheels_host.there == ["small"]


def test_without_build_no_code_of_a_source_distribution_runs(
    wheels_host: WheelsHost, tmp_path: Path
) -> None:
    source = tmp_path / "evil"
    source.mkdir()
    (source / "setup.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    packed = shutil.make_archive(str(tmp_path / "evil-1.0"), "gztar", tmp_path, "evil")
    for path in (source, packed):
        refused = wheels_host.create_quick("evil", f"evil @ file://{path}")
        assert "is not a wheel" in refused.stderr
        assert refused.returncode == 2
    assert not (tmp_path / "ran").exists()
    assert "evil" not in wheels_host.there


def _evil_source(directory: Path) -> tuple[Path, Path]:
    """A source distribution whose build makes a file, and that file."""
    source, ran = directory / "evil", directory / "ran"
    source.mkdir()
    (source / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "back"\nbackend-path = ["."]\n'
    )
    (source / "back.py").write_text(f"open({str(ran)!r}, 'w')\n")
    packed = shutil.make_archive(str(directory / "evil-1.0"), "gztar", directory, "evil")
    return Path(packed), ran


@pytest.mark.parametrize(
    ("installer", "target"),
    rows(
        product(["pip", "uv"], ["archive", "directory", "wheel", "repository"]),
        ci_tier=[("pip", "archive"), ("uv", "archive"), ("pip", "wheel")],
    ),
)
def test_metadata_of_a_wheel_cannot_demand_a_build(
    wheels_host: WheelsHost, tmp_path: Path, installer: str, target: str
) -> None:
    """`Requires-Dist: evil @ file:///…/evil-1.0.tar.gz` in a wheel of the index ran its setup.py on
    the host, since --only-binary of pip does not hold for a URL. (holes 1.7)"""
    if installer == "uv" and importlib.util.find_spec("uv") is None:
        pytest.skip("no uv here, which is the extra `env`")
    archive, ran = _evil_source(tmp_path)
    urls = {
        "archive": archive.as_uri(),
        "directory": (tmp_path / "evil").as_uri(),
        "wheel": wheel(tmp_path, "evil", "1.0", {"evil.py": ""}).as_uri(),
        "repository": f"git+file://{tmp_path}/evil",
    }
    index = tmp_path / "index"
    shutil.copytree(wheels_host.hollow, index)
    wheel(index, "lured", "1.0", {"lured.py": ""}, needs=f"evil @ {urls[target]}")
    more = {
        "PIP_FIND_LINKS": str(index),
        "UV_FIND_LINKS": str(index),
        "UV_NO_INDEX": "1",
        "UV_CACHE_DIR": str(tmp_path / "cache"),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    refused = wheels_host.quick(
        "create", "--json", "lured", "lured", "--installer", installer, more=more
    )
    assert refused.returncode != 0
    error = json.loads(refused.stdout.splitlines()[-1])["error"]
    assert error["code"] == "environment_unresolved", error
    if installer == "pip":
        assert "--build" in error["hint"], error
    assert not ran.exists()
    assert "lured" not in wheels_host.there


class _Server(ThreadingHTTPServer):
    """Serves a directory on loopback, and records the paths of requests."""

    def __init__(self, directory: Path) -> None:
        self.paths: list[str] = []
        super().__init__(("127.0.0.1", 0), partial(_Files, directory=str(directory)))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Files(SimpleHTTPRequestHandler):
    server: _Server

    def log_message(self, format: str, *args: Any) -> None:
        self.server.paths.append(self.path)


@contextmanager
def _serving(directory: Path) -> Iterator[_Server]:
    with _Server(directory) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("installer", ["pip", "uv"])
def test_address_that_only_metadata_names_is_not_fetched(
    wheels_host: WheelsHost, tmp_path: Path, installer: str
) -> None:
    """pip fetched it first, so the author of a package chose a host that this one contacts. The
    same address is fetched if the request names it. (holes 1.7)"""
    if installer == "uv" and importlib.util.find_spec("uv") is None:
        pytest.skip("no uv here, which is the extra `env`")
    index, other = tmp_path / "index", tmp_path / "other"
    other.mkdir()
    shutil.copytree(wheels_host.hollow, index)
    evil = wheel(other, "evil", "1.0", {"evil.py": ""})
    with _serving(index) as packages, _serving(other) as elsewhere:
        demanded = f"evil @ {elsewhere.url}/{evil.name}"
        wheel(index, "lured", "1.0", {"lured.py": ""}, needs=demanded)
        more = {
            "PIP_FIND_LINKS": packages.url,
            "UV_FIND_LINKS": packages.url,
            "UV_NO_INDEX": "1",
            "UV_CACHE_DIR": str(tmp_path / "cache"),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        options = "--json", "--installer", installer
        refused = wheels_host.quick("create", *options, "lured", "lured", more=more)
        error = json.loads(refused.stdout.splitlines()[-1])["error"]
        assert error["code"] == "environment_unresolved", error
        assert any("lured" in path for path in packages.paths)
        assert elsewhere.paths == []
        named = f"named-{installer}"
        wheels_host.quick("create", *options, named, "lured", demanded, more=more)
        assert elsewhere.paths
        wheels_host.quick("remove", named)


@pytest.mark.full_tier
def test_with_build_the_code_of_a_source_distribution_runs(
    wheels_host: WheelsHost, tmp_path: Path
) -> None:
    """The control of the tests above: the same package, with the consent that --build is."""
    archive, ran = _evil_source(tmp_path)
    more = {"PIP_FIND_LINKS": str(wheels_host.hollow)}
    words = ("create", "built", f"evil @ {archive.as_uri()}", "--build", *_BY_PIP)
    assert wheels_host.quick(*words, more=more).returncode != 0  # it builds nothing
    assert ran.exists()


def test_no_code_of_a_wheel_runs_while_it_is_installed(
    wheels_host: WheelsHost, tmp_path: Path
) -> None:
    content = {"startup.pth": f"import os; open({str(tmp_path / 'ran')!r}, 'w')\n"}
    wheel(tmp_path, "startup", "1.0", content)
    (path,) = tmp_path.glob("startup-*.whl")
    made = wheels_host.create_hollow("startup", f"startup @ file://{path}")
    assert made.returncode == 0, made.stderr
    assert list((wheels_host.environments / "startup").rglob("startup.pth"))
    assert not (tmp_path / "ran").exists()
    assert wheels_host.quick("remove", "startup").returncode == 0


def test_a_name_that_is_taken_is_told_so(wheels_host: WheelsHost) -> None:
    done = wheels_host.create_quick("small", "tiny")
    assert done.returncode == 3
    assert "there is an environment small already" in done.stderr
    assert wheels_host.quick("show", "small").returncode == 0


@pytest.mark.full_tier
def test_of_two_who_make_one_name_at_once_one_wins(wheels_host: WheelsHost) -> None:
    words = [*COMMAND, "env", "create", "raced", "tiny", *_BY_UV, "--json"]
    both = [
        subprocess.Popen(
            words,
            stdout=subprocess.PIPE,
            env=environment(**wheels_host.scripted_variables),
            text=True,
        )
        for _ in range(2)
    ]
    answer = [json.loads(one.communicate(timeout=60)[0]) for one in both]
    assert sorted(one.returncode for one in both) == [0, 3]
    (lost,) = [one["error"]["code"] for one in answer if "error" in one]
    assert lost in ("environment_in_the_making", "environment_exists")
    assert wheels_host.quick("show", "raced", "--verify").returncode == 0
    assert wheels_host.quick("remove", "raced").returncode == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_creation_leaves_nothing(
    wheels_host: WheelsHost, number: signal.Signals
) -> None:
    """It ends its installer, too."""
    wheels_host.uv.forget()
    wheels_host.uv.hang()
    words = ("env", "create", "stopped", "tiny", *_BY_UV)
    with started(*words, env=wheels_host.scripted_variables) as process:
        assert process.stderr is not None
        wheels_host.uv.wait_for_call("pip compile")
        installer = family(process)[1:]
        assert installer
        process.send_signal(number)
        assert process.wait(60) == 128 + number
        assert b"no environment was created" in process.stderr.read()
    assert psutil.wait_procs(installer, timeout=60)[1] == []
    wheels_host.uv.go_on()
    assert wheels_host.there == ["small"]


def test_what_a_killed_creation_leaves_is_none_and_gives_way(wheels_host: WheelsHost) -> None:
    wheels_host.uv.forget()
    wheels_host.uv.hang()
    words = ("env", "create", "killed", "tiny", *_BY_UV)
    with started(*words, env=wheels_host.scripted_variables) as process:
        wheels_host.uv.wait_for_call("pip compile")
        installer = family(process)[1:]
        process.kill()
        process.wait(60)
    assert "killed" in wheels_host.there
    assert wheels_host.quick("show", "killed").returncode == 2
    early = wheels_host.create_quick("killed", "tiny")
    assert early.returncode == 3
    assert "being created or removed" in early.stderr
    wheels_host.uv.go_on()
    assert psutil.wait_procs(installer, timeout=60)[1] == []
    done = wheels_host.create_quick("killed", "tiny")
    assert done.returncode == 0, done.stderr
    assert wheels_host.quick("show", "killed", "--verify").returncode == 0
    assert wheels_host.quick("remove", "killed").returncode == 0
    assert wheels_host.there == ["small"]


def test_what_takes_too_long_is_ended_and_leaves_nothing(wheels_host: WheelsHost) -> None:
    wheels_host.uv.forget()
    wheels_host.uv.hang()
    done = wheels_host.create_quick("slow", "tiny", "--timeout", "0.3")
    wheels_host.uv.go_on()
    assert done.returncode == 3
    assert "did not end in time" in done.stderr
    assert wheels_host.there == ["small"]


# -- verified --------------------------------------------------------------------------------------


@pytest.mark.core
def test_a_changed_a_missing_and_an_added_file_are_found(wheels_host: WheelsHost) -> None:
    assert "are unchanged" in wheels_host.quick("show", "small", "--verify").stdout
    site = next(
        (wheels_host.environments / "small" / "venv" / "lib").glob("python3*/site-packages")
    )
    before = (site / "tiny.py").read_bytes()
    comm = (site / "comm" / "__init__.py").rename(site / "comm" / "moved.py")
    try:
        (site / "tiny.py").write_text(_TINY.replace("2", "3"))
        done = wheels_host.quick("show", "small", "--verify", "--json")
        assert done.returncode == 1
        found = json.loads(done.stdout)["verified"]
        assert not found["ok"]
        assert [Path(one).name for one in found["changed"]] == ["tiny.py"]
        assert [Path(one).name for one in found["missing"]] == ["__init__.py"]
        assert [Path(one).name for one in found["added"]] == ["moved.py"]
    finally:
        comm.rename(site / "comm" / "__init__.py")
        (site / "tiny.py").write_bytes(before)
    assert wheels_host.quick("show", "small", "--verify").returncode == 0


def test_a_list_of_hashes_that_was_changed_is_told_so(wheels_host: WheelsHost) -> None:
    listed = wheels_host.environments / "small" / "files.json"
    before = listed.read_bytes()
    try:
        listed.write_bytes(before.replace(b'"file ', b'"fine ', 1))
        done = wheels_host.quick("show", "small", "--verify")
        assert done.returncode == 3
        assert "was changed" in done.stderr
    finally:
        listed.write_bytes(before)


@pytest.mark.core
def test_a_directory_that_others_can_write_to_is_not_used(wheels_host: WheelsHost) -> None:
    small = wheels_host.environments / "small"
    small.chmod(0o777)
    try:
        with pytest.raises(errors.Denied) as raised:
            Environments(wheels_host.environments).get("small")
        assert raised.value.code == "environment_not_private"
    finally:
        small.chmod(0o755)


def test_no_file_of_it_is_set_id_or_for_others_to_write(wheels_host: WheelsHost) -> None:
    for path in (wheels_host.environments / "small" / "venv").rglob("*"):
        mode = path.lstat().st_mode
        if not stat.S_ISLNK(mode):
            assert mode & 0o444 == 0o444
            assert not mode & (stat.S_ISUID | stat.S_ISGID | 0o022)


# -- used ------------------------------------------------------------------------------------------

_LOOK = """
import os, sys, tiny
try:
    with open(tiny.__file__, "a"):
        pass
    written = "yes"
except OSError as error:
    written = type(error).__name__
beside = os.path.exists(os.path.join(os.path.dirname(sys.prefix), "environment.json"))
print(tiny.double(21), sys.prefix, written, beside)
"""


@pytest.mark.core
@pytest.mark.parametrize("start", ["cold", "fork"])
async def test_a_jail_imports_from_it_and_cannot_write_to_it(
    wheels_host: WheelsHost, runtime: Runtime, start: str
) -> None:
    name = wheels_host.policy(f"small-{start}", "small", start=start)
    async with await runtime.create(name) as box:
        answer = (await box.run(_LOOK)).stdout.split()
        assert answer[0] == "42"
        assert answer[1] == str(wheels_host.environments / "small" / "venv")
        assert answer[2] in ("OSError", "PermissionError")  # read-only, or another's
        assert answer[3] == "False"
        assert box.receipt is not None
        assert box.receipt.path == start
        by_shell = await box.shell("python -c 'import tiny; print(tiny.HERE)'")
        assert by_shell.stdout.strip() == "in the environment"


async def test_a_granted_package_runs_no_code_of_the_environment_and_its_wheels(
    wheels_host: WheelsHost, runtime: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a grant, the Python of the policy ran on the host with its site-packages: a .pth file and
    the module pip of an environment ran there."""
    archive, ran = _evil_source(tmp_path)
    index = tmp_path / "index"
    shutil.copytree(wheels_host.wheels, index)
    line = f"import os; open({str(ran)!r}, 'w')\n"
    wheel(index, "planted", "1.0", {"planted.pth": line})
    wheel(index, "lured", "1.0", {"lured.py": ""}, needs=f"evil @ {archive.as_uri()}")
    wheel(index, "needing", "1.0", {"needing.py": "import tiny"}, needs="tiny")
    (other := tmp_path / "other").mkdir()
    evil = wheel(other, "evil", "1.0", {"evil.py": ""})
    made = wheels_host.env(
        *("create", "planting", "tiny", "planted", *_BY_PIP), more={"PIP_FIND_LINKS": str(index)}
    )
    assert made.returncode == 0, made.stderr
    for name, value in {**wheels_host.variables, "PIP_FIND_LINKS": str(index)}.items():
        monkeypatch.setenv(name, value)
    name = wheels_host.policy("planting", "planting")
    with (wheels_host.policies / f"{name}.toml").open("a") as file:
        file.write('[[grant]]\npackage = ["lured", "luring", "needing", "tiny"]\n')
    async with await runtime.create(name) as box:
        with _serving(other) as elsewhere:
            needs = f"evil @ {elsewhere.url}/{evil.name}"
            wheel(index, "luring", "1.0", {"luring.py": ""}, needs=needs)
            with pytest.raises(errors.Unavailable) as refused:
                await box.grants.add("package", "luring", "hour")
            assert refused.value.code == "environment_unresolved"
            assert elsewhere.paths == []  # pip fetched it before it refused
        with pytest.raises(errors.Unavailable) as refused:
            await box.grants.add("package", "lured", "hour")
        assert refused.value.code == "environment_unresolved"
        with pytest.raises(errors.Conflict, match="tiny is in the environment already"):
            await box.grants.add("package", "tiny", "hour")
        await box.grants.add("package", "needing", "hour")
        assert (await box.run("import needing; print(needing.tiny.double(4))")).stdout == "8\n"
    assert not ran.exists()
    assert wheels_host.env("remove", "planting", "--force").returncode == 0


@pytest.mark.core
async def test_other_policies_do_not_see_it_and_zygotes_are_not_shared(
    wheels_host: WheelsHost, runtime: Runtime
) -> None:
    async with (
        await runtime.create(wheels_host.policy("with-it", "small")) as one,
        await runtime.create("default", narrower={"pool": {"min_idle": 0}}) as other,
    ):
        look = (
            f"import os, sys; print(os.path.exists({str(wheels_host.environments)!r}), sys.prefix)"
        )
        assert (await one.run(look)).stdout.split()[0] == "True"
        assert (await other.run(look)).stdout.split() == ["False", sys.prefix]
        failed = await other.run("import tiny")
        assert failed.error is not None
        assert failed.error.name == "ModuleNotFoundError"
        for box in (one, other):
            assert box.receipt is not None
            assert box.receipt.path == "fork"


@pytest.mark.core
async def test_an_environment_that_is_not_there_is_told_with_how_to_make_it(
    wheels_host: WheelsHost, runtime: Runtime
) -> None:
    with pytest.raises(errors.PolicyError) as raised:
        await runtime.create(wheels_host.policy("without", "nowhere"))
    assert raised.value.code == "environment_unavailable"
    assert raised.value.hint is not None
    assert "sbx env create nowhere" in raised.value.hint


@pytest.mark.full_tier
async def test_a_new_one_of_the_same_name_gets_a_zygote_of_its_own(
    wheels_host: WheelsHost, runtime: Runtime
) -> None:
    """A zygote has imported from the one before: it must not serve for the one after."""
    policy = Policy(name="again", interpreter="env:again")
    keys = []
    for version in ("1.0", "2.0"):
        done = await asyncio.to_thread(wheels_host.create, "again", f"tiny=={version}")
        assert done.returncode == 0, done.stderr
        keys += [await _key(wheels_host, runtime, policy) for _ in range(2)]
        assert (await asyncio.to_thread(wheels_host.env, "remove", "again")).returncode == 0
    assert keys[0] == keys[1] != keys[2] == keys[3]


async def _key(wheels_host: WheelsHost, runtime: Runtime, policy: Policy) -> Key | None:
    found = Environments(wheels_host.environments).interpreter("again", policy.name)
    filters = load_filters(platform.machine())
    return key_of(policy, policy, runtime.capabilities, Paths("", "", found, "/guest"), filters)


@pytest.mark.core
async def test_one_that_is_in_use_is_not_removed_without_force(
    wheels_host: WheelsHost, runtime: Runtime
) -> None:
    value = Policy(**load("default").model_dump() | {"interpreter": "env:small"})
    for path in wheels_host.policies.glob("*.toml"):
        path.unlink()
    async with await runtime.create(value, narrower={"pool": {"start": "cold"}}) as box:
        await box.run("1")
        done = await asyncio.to_thread(wheels_host.env, "remove", "small", "--json")
        assert done.returncode == 3
        details = json.loads(done.stdout)["error"]["details"]
        assert details["policies"] == []
        assert details["processes"]
    wheels_host.policy("names-it", "small")
    done = await asyncio.to_thread(wheels_host.env, "remove", "small")
    assert done.returncode == 3
    assert "the policy names-it names it" in done.stderr


async def test_a_sandbox_whose_environment_is_removed_by_force_says_so(
    wheels_host: WheelsHost, runtime: Runtime
) -> None:
    small = wheels_host.environments / "small"
    async with await runtime.create(wheels_host.policy("losing-it", "small", start="cold")) as box:
        assert (await box.run("1")).ok
        await box.stop()
        away = small.rename(wheels_host.environments / ".away")  # as if by --force
        try:
            with pytest.raises(errors.PolicyError) as raised:
                await box.run("1")
        finally:
            away.rename(small)
        assert raised.value.code == "environment_unavailable"
        assert "was removed" in raised.value.message
        assert (await box.run("1")).ok


@pytest.mark.full_tier
def test_sbx_run_and_the_synchronous_sandbox_use_it_too(wheels_host: WheelsHost) -> None:
    policy = wheels_host.policies / f"{wheels_host.policy('plain', 'small', start='cold')}.toml"
    code = (
        "from pathlib import Path; from sbx import Sandbox\n"
        f"with Sandbox(Path({str(policy)!r})) as box:\n"
        "    print(box.run('import tiny; tiny.double(21)').result)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(**wheels_host.variables),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.strip() == "42", done.stderr
    ran = in_process(
        "run",
        "--policy",
        "plain",
        "-c",
        "import tiny; tiny.HERE",
        stdin=b"",
        **wheels_host.variables,
    )
    assert ran.returncode == 0, ran.stderr
    assert "in the environment" in ran.stdout


def _others() -> list[pythons.Python]:
    """The newest of each other minor version that this host has."""
    found = asyncio.run(pythons.every(os.environ))
    newest: dict[tuple[int, int], pythons.Python] = {}
    for one in found:
        if one.unfit is None and one.version[:2] != sys.version_info[:2]:
            newest.setdefault(one.version[:2], one)
    return list(newest.values())


@pytest.mark.full_tier
def test_another_python_of_the_host_runs_cells_cold_and_forked(
    wheels_host: WheelsHost, pytestconfig: pytest.Config
) -> None:
    others = _others()
    if not others:
        pytest.skip("this host has no other Python that kernels can run")
    for python in others if pytestconfig.getoption("--full") else others[:1]:
        done = wheels_host.create_whole(
            "other", "tiny", "--python", ".".join(map(str, python.version))
        )
        assert done.returncode == 0, done.stderr
        answer = asyncio.run(_versions(wheels_host))
        assert answer == [(python.text, "cold"), (python.text, "fork")]
        assert wheels_host.quick("remove", "other", "--force").returncode == 0


async def _versions(wheels_host: WheelsHost) -> list[tuple[str, str]]:
    answer = []
    async with Runtime(wheels_host.settings()) as runtime:
        for start in ("cold", "fork"):
            async with await runtime.create(
                wheels_host.policy("other", "other", start=start)
            ) as box:
                done = await box.run(
                    "import platform, ssl, tiny, threading\n"
                    "ran = []\n"
                    "thread = threading.Thread(target=ran.append, args=(tiny.double(21),))\n"
                    "thread.start(); thread.join()\n"
                    "assert ran == [42]\n"
                    "print(platform.python_version())"
                )
                assert done.ok, done.error
                assert done.stderr == ""
                assert (await box.run("1/0")).error is not None
                assert (await box.run("while True: pass", timeout=0.3)).status == "timeout"
                assert (await box.run("ran")).result == "[42]"
                assert box.receipt is not None
                answer.append((done.stdout.strip(), box.receipt.path))
    (wheels_host.policies / "other.toml").unlink()
    return answer


def test_a_python_that_is_too_old_or_not_there_is_refused(wheels_host: WheelsHost) -> None:
    old = wheels_host.create_quick("old", "tiny", "--python", "3.10")
    assert old.returncode == 2
    assert "3.11 or later" in old.stderr
    far = wheels_host.create_quick("far", "tiny", "--python", "3.99")
    assert far.returncode == 3
    assert "this host has no Python 3.99" in far.stderr
    none = wheels_host.create_quick("none", "tiny", "--python", "/bin/true")
    assert none.returncode == 3
    assert wheels_host.there == ["small"]


@pytest.mark.full_tier
@pytest.mark.needs("root", "landlock", "seccomp")
def test_a_service_that_gave_up_root_uses_those_that_were_there_at_its_start(
    wheels_host: WheelsHost,
) -> None:
    wheels_host.policy("early", "small")
    variables = wheels_host.variables
    with (
        short_directory() as top,
        service(top, env=variables) as started_service,
        started_service.client() as client,
    ):

        def run(policy: str) -> Any:
            made = client.post("/v1/sandboxes", json={"profile": policy}).json()["id"]
            code = {"code": "import tiny; print(tiny.double(21))"}
            return client.post(f"/v1/sandboxes/{made}/python/exec", json=code)

        def answer(policy: str) -> str:
            done = run(policy)
            assert done.status_code == 200, done.text
            return str(done.json()["output"].strip())

        assert answer("early") == "42"
        assert wheels_host.create_quick("later", "tiny").returncode == 0
        wheels_host.policy("late", "later")
        late = run("late")
        assert late.status_code == 403
        assert late.json()["error"]["code"] == "not_granted"
        assert "start the service again" in late.text
        (wheels_host.policies / "late.toml").unlink()
        assert wheels_host.quick("remove", "later").returncode == 0
        assert answer("early") == "42"


# -- preloaded -------------------------------------------------------------------------------------


async def test_a_module_that_cannot_be_forked_is_left_to_the_code(wheels_host: WheelsHost) -> None:
    wheel(wheels_host.wheels, "unfit", "1.0", _UNFIT)
    done = await asyncio.to_thread(wheels_host.env, "create", "unfit", "unfit", *_BY_PIP)
    assert done.returncode == 0, done.stderr
    modules = [name.removesuffix(".py") for name in _UNFIT]
    policy = wheels_host.policy("unfit", "unfit", preload=modules)
    async with Runtime(wheels_host.settings()) as runtime, await runtime.create(policy) as box:
        run = await box.run(f"import sys; [name in sys.modules for name in {modules}]")
        assert run.result == "[True, False, False]"
        receipt = box.receipt
        assert receipt is not None
        assert (receipt.path, receipt.fallback) == ("fork", "")
        threaded, opened = (receipt.preload_failed[name] for name in modules[1:])
        assert "starts threads, which a fork does not copy (" in threaded
        assert "leaves 1 files open" in opened
        run = await box.run(
            "import sbx_threaded, sbx_opened; sbx_threaded.VALUE + sbx_opened.VALUE"
        )
        assert run.result == "6"


@pytest.fixture
def data_environments(own_temporary_directory: Path) -> Path:
    """The directory of an environment with the packages of `_DATA`, from the package index."""
    top = Path(tempfile.mkdtemp(prefix="data-", dir=own_temporary_directory))
    top.chmod(0o755)
    made = subprocess.run(
        [*COMMAND, "env", "create", "data", *_DATA, "--json", "--timeout", "900"],
        env={**os.environ, "SBX_ENVIRONMENTS": str(top)},
        capture_output=True,
        text=True,
        timeout=960,
        check=False,
    )
    if "environment_unresolved" in made.stdout:
        pytest.skip(f"the package index was not reached: {made.stdout[-300:]}")
    assert made.returncode == 0, made.stderr
    return top


@pytest.mark.full_tier
@pytest.mark.timeout(1200)
async def test_the_packages_that_people_use_are_forked(data_environments: Path) -> None:
    policy = Policy.model_validate(
        {"name": "data", "interpreter": "env:data", "preload": list(_DATA.values())}
    )
    settings = Settings(environments=data_environments, start_timeout=300)
    async with Runtime(settings) as runtime:
        await runtime.warm(policy)
        async with await runtime.create(policy) as box:
            receipt = await box.start()
            assert receipt.path == "pool"
            # polars 2 starts a thread, and statsmodels imports it.
            assert set(receipt.preload_failed) <= {"polars", "statsmodels.api"}
            used = "import polars, pyarrow, duckdb; duckdb.sql('select 42').fetchall()"
            assert (await box.run(used)).result == "[(42,)]"
