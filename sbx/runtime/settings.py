"""What an operator may choose, from keyword arguments or the environment (SBX_*)."""

from pathlib import Path
from typing import Annotated, Any

from platformdirs import user_config_path
from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict, SettingsError

from sbx.errors import BadRequest

_FIRST_UID = 1_900_000_000  # above what systemd gives to containers (systemd.io/UIDS-GIDS)
_UIDS = 100_000_000


class Settings(BaseSettings):
    """Settings of a runtime. Durations in seconds.

    `data_dir`: where workspaces lie; None is a private temporary directory, gone with the runtime.
    `uid_range`: first host uid and how many, from which a root broker gives each sandbox its own.
    Raises BadRequest `invalid_settings`, naming the one that is wrong.
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

    def __init__(self, **given: Any) -> None:
        try:
            super().__init__(**given)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            name = str(first["loc"][0]) if first["loc"] else "?"
            raise BadRequest(
                f"the setting {name} (SBX_{name.upper()}) is wrong: {first['msg']}",
                code="invalid_settings",
                hint="correct it, or leave it out for its default",
            ) from None
        except SettingsError as error:
            raise BadRequest(
                f"a setting of the environment (SBX_*) cannot be read: {error}",
                code="invalid_settings",
                hint="lists are written as JSON, as in [1900000000, 1000]",
            ) from None
