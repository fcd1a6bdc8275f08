"""What an operator may choose, from keyword arguments or the environment (SBX_*)."""

from pathlib import Path
from typing import Annotated

from platformdirs import user_config_path
from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

_FIRST_UID = 1_900_000_000  # above what systemd gives to containers (systemd.io/UIDS-GIDS)
_UIDS = 100_000_000


class Settings(BaseSettings):
    """Settings of a runtime. Durations in seconds.

    `data_dir`: where workspaces lie; None is a private temporary directory, gone with the runtime.
    `uid_range`: first host uid and how many, from which a root broker gives each sandbox its own.
    """

    model_config = SettingsConfigDict(env_prefix="SBX_", frozen=True, extra="forbid")

    data_dir: Path | None = None
    policy_dirs: tuple[Path, ...] = Field(
        default_factory=lambda: (user_config_path("sbx") / "policies",)
    )
    bwrap: Path | None = None
    cgroups: bool = True
    uid_range: tuple[Annotated[int, Field(gt=0)], Annotated[int, Field(gt=0)]] = (
        _FIRST_UID,
        _UIDS,
    )
    start_timeout: Annotated[float, Field(gt=0)] = 30.0
    interrupt_grace: Annotated[float, Field(gt=0)] = 1.0
