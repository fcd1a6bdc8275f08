"""What the crash tests share: policies whose preload does what it should not."""

import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

from sbx import Runtime
from sbx.policy import Policy, load
from sbx.policy.tables import MountPolicy

Preloading = Callable[[str], Policy]


@pytest.fixture
async def runtime(own_runtime: Runtime) -> Runtime:
    """One of its own for each test: what it started is killed."""
    return own_runtime


@pytest.fixture
def preloading(tmp_path: Path) -> Preloading:
    """Makes a policy that preloads a module of the given source, from an environment of its own.

    It keeps one kernel ready only when it is told to.
    """
    packages = sysconfig.get_path("purelib")

    def make(source: str) -> Policy:
        home = tmp_path / "environment"
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        own = home / "lib" / version / "site-packages"
        own.mkdir(parents=True)
        (own / "trouble.py").write_text(source)
        (own / "others.pth").write_text(f"{packages}\n/opt/packages\n")
        (home / "bin").mkdir()
        python = home / "bin" / "python"
        python.symlink_to(Path(sys.executable).resolve())
        (home / "pyvenv.cfg").write_text(f"home = {python.resolve().parent}\n")
        default = load("default")
        others = MountPolicy(source=packages, target="/opt/packages")
        seen = default.filesystem.model_copy(update={"mount": (others,)})
        return default.model_copy(
            update={
                "interpreter": str(python),
                "filesystem": seen,
                "preload": ("trouble",),
                "pool": default.pool.model_copy(update={"min_idle": 0}),
            }
        )

    return make
