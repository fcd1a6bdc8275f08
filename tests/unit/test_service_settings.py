"""Where a setting comes from, which source wins, and what is said of a wrong one."""

import errno
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from sbx import settings_files
from sbx.api.console.settings import address
from sbx.api.server.settings import (
    _DECISIONS,
    IN_WORKING_DIRECTORY,
    LoadedSettings,
    ServiceSettings,
    read_settings,
)
from sbx.cli.console import absolute_paths
from sbx.errors import BadRequest, Denied, NotFound
from sbx.runtime.settings import Settings, own_paths_of
from sbx.workspace import allowed_paths
from sbx.workspace.allowed_paths import OwnPaths


@pytest.fixture(autouse=True)
def configuration(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """The configuration directory of the user."""
    directory = tmp_path_factory.mktemp("configuration")
    monkeypatch.setattr(settings_files, "config_directory", lambda: directory)
    return directory


def read(
    directory: Path, given: Mapping[str, Any] | None = None, /, **environment: str
) -> LoadedSettings:
    return read_settings(given, environment=environment, directory=directory)


def test_each_source_wins_over_those_after_it(tmp_path: Path, configuration: Path) -> None:
    names = ("queue_max", "kernels_max", "zygotes_max", "sandboxes_max", "workspaces_per_owner")
    (tmp_path / "sbx.toml").write_text("".join(f"{name} = 1\n" for name in names))
    dotenv = "".join(f"SBX_{name.upper()}=2\n" for name in names[:4])
    (tmp_path / ".env").write_text(dotenv)
    users = configuration / "sbx.toml"
    users.write_text("".join(f"{name} = 3\n" for name in names[:3]))
    found = read(tmp_path, {"queue_max": 5}, SBX_QUEUE_MAX="4", SBX_KERNELS_MAX="4")
    assert [getattr(found.settings, name) for name in names] == [5, 4, 3, 2, 1]
    assert found.sources == {
        "queue_max": "the command line",
        "kernels_max": "the environment (SBX_KERNELS_MAX)",
        "zygotes_max": str(users),
        "sandboxes_max": f"{tmp_path / '.env'} (SBX_SANDBOXES_MAX)",
        "workspaces_per_owner": str(tmp_path / "sbx.toml"),
    }


def test_a_file_of_the_working_directory_hides_nothing_of_the_user(
    tmp_path: Path, configuration: Path
) -> None:
    """The first sbx.toml counted as a whole: code in a project removed the user's settings with an
    empty one."""
    users = configuration / "sbx.toml"
    users.write_text('mount_dirs = ["/srv/mine"]\nkernels_max = 2\n')
    (tmp_path / "sbx.toml").write_text("kernels_max = 1000\n")
    (tmp_path / ".env").write_text("SBX_KERNELS_MAX=1000\n")
    found = read(tmp_path)
    assert (found.settings.mount_dirs, found.settings.kernels_max) == ((Path("/srv/mine"),), 2)
    assert found.sources == dict.fromkeys(("mount_dirs", "kernels_max"), str(users))


def test_none_of_the_command_line_and_empty_variables_choose_nothing(tmp_path: Path) -> None:
    assert read(tmp_path, {"listen": None}, SBX_LISTEN="").sources == {}


def test_directories_of_policies_are_separated_as_in_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for text in ("/a:/b", "/a::/b:"):
        assert read(tmp_path, SBX_POLICY_DIRS=text).settings.policy_dirs == (Path("/a"), Path("/b"))
        monkeypatch.setenv("SBX_POLICY_DIRS", text)  # a program that embeds sbx, and `sbx run`
        assert Settings().policy_dirs == (Path("/a"), Path("/b"))


@pytest.mark.parametrize("text", ["/a,/b", '["/a", "/b"]'])
def test_other_lists_are_written_with_commas_or_as_json(tmp_path: Path, text: str) -> None:
    assert read(tmp_path, SBX_MOUNT_DIRS=text).settings.mount_dirs == (Path("/a"), Path("/b"))


def test_origins_are_written_with_commas(tmp_path: Path) -> None:
    found = read(tmp_path, SBX_CORS_ORIGINS="https://a.example,http://b.example:81")
    assert found.settings.cors_origins == ("https://a.example", "http://b.example:81")


def test_the_key_is_read_by_bay_s_name_too_and_not_shown(tmp_path: Path) -> None:
    bay = read(tmp_path, BAY_API_KEY="of-bay-0123456789abcdef")
    both = read(tmp_path, BAY_API_KEY="of-bay", SBX_API_KEY="of-sbx-0123456789abcdef")
    assert bay.settings.api_key is not None
    assert bay.settings.api_key.get_secret_value() == "of-bay-0123456789abcdef"
    assert both.settings.api_key is not None
    assert both.settings.api_key.get_secret_value() == "of-sbx-0123456789abcdef"
    assert "0123456789" not in repr(both)


def test_aliases_of_policies_are_pairs_or_a_table(tmp_path: Path) -> None:
    aliases = {"python-default": "lab", "small": "strict"}
    found = read(tmp_path, SBX_POLICY_ALIASES="python-default=lab, small=strict")
    assert found.settings.policy_aliases == aliases
    file = tmp_path / "named.toml"
    file.write_text("[policy_aliases]\npython-default = 'lab'\nsmall = 'strict'\n")
    named = read_settings(config=file, environment={}, directory=tmp_path)
    assert named.settings.policy_aliases == aliases


@pytest.mark.parametrize(("text", "mode"), [("0660", 0o660), ("666", 0o666)])
def test_a_mode_is_octal(tmp_path: Path, text: str, mode: int) -> None:
    assert read(tmp_path, SBX_SOCKET_MODE=text).settings.socket_mode == mode


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("socket_mode", "0999"),
        ("socket_mode", "1777"),
        ("listen", "8765"),
        ("listen", "host:"),
        ("listen", "host:99999"),
        ("queue_max", "many"),
        ("mount_dirs", "[1"),
        ("cors_origins", "*"),
        ("policy_aliases", "a"),
        ("policy_aliases", "default=lab"),
        ("cors_origins", "https://a.example/path"),
        ("log_format", "xml"),
        ("drain_timeout", "-1"),
    ],
)
def test_a_wrong_setting_names_itself_and_its_source(tmp_path: Path, name: str, text: str) -> None:
    with pytest.raises(BadRequest) as raised:
        read(tmp_path, **{f"SBX_{name.upper()}": text})
    assert raised.value.code == "invalid_settings"
    source = f"the environment (SBX_{name.upper()})"
    assert raised.value.details == {"setting": name, "source": source}
    assert f"the setting {name} of {source} is wrong" in raised.value.message


def test_an_unknown_name_in_the_file_is_refused_with_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "sbx.toml").write_text("sockets = 'x'\n")
    with pytest.raises(BadRequest, match="names the setting sockets") as raised:
        read(tmp_path)
    assert raised.value.hint == "did you mean socket?"


def test_a_file_that_is_no_toml_is_refused_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "sbx.toml").write_text("listen: x\n")
    with pytest.raises(BadRequest, match=r"sbx\.toml is not valid TOML"):
        read(tmp_path)


def test_variables_that_look_like_ours_and_are_none_are_told(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("SBX_TYPO=1\nDATABASE_URL=x\n")
    assert read(tmp_path, SBX_SOKET="x", SBX_DEBUG="1", PATH="y").unknown == (
        ("SBX_SOKET", "the environment"),
        ("SBX_TYPO", str(tmp_path / ".env")),
    )


FIELDS = set(ServiceSettings.model_fields)
VALUES = {
    "uid_range": "[1, 2]",
    "policy_aliases": "{a = 'strict'}",
    "templates": "{a = 'strict'}",
    "cgroups": "false",
    "fast_path": "false",
    "console": "'127.0.0.1:8766'",
    "console_socket": "false",
    "console_url": "'https://sbx.example.org'",
    "console_frames_url": "'https://sbx-out.example.org'",
    "allow_host_mode": "true",
}


def test_each_setting_is_allowed_in_a_working_directory_or_not() -> None:
    """Each other setting has a reason that the refusal states."""
    assert FIELDS > IN_WORKING_DIRECTORY
    assert set(_DECISIONS) == FIELDS - IN_WORKING_DIRECTORY
    for name in IN_WORKING_DIRECTORY:  # numbers, and words of a closed list
        shown = str(ServiceSettings.model_fields[name].annotation)
        assert not {"Path", "bool"} & set(re.findall(r"\w+", shown)), name


def refused_here(directory: Path, setting: str, **environment: str) -> None:
    with pytest.raises(Denied) as raised:
        read(directory, **environment)
    assert raised.value.code == "setting_not_allowed_here"
    assert raised.value.details["setting"] == setting
    assert "--config" in (raised.value.hint or "")


@pytest.mark.parametrize("setting", sorted(FIELDS - IN_WORKING_DIRECTORY))
def test_a_file_of_the_working_directory_may_not_set(tmp_path: Path, setting: str) -> None:
    """`sbx serve` in a project executed the program that a planted SBX_BWRAP named."""
    variable = f"SBX_{setting.upper()}"
    (tmp_path / ".env").write_text(f"{variable}={tmp_path}/planted\n")
    refused_here(tmp_path, setting)
    refused_here(tmp_path, setting, **{variable: "chosen"})  # also where another source wins
    (tmp_path / ".env").unlink()
    (tmp_path / "sbx.toml").write_text(f"{setting} = {VALUES.get(setting, repr('/x'))}\n")
    refused_here(tmp_path, setting)


def test_another_name_of_a_setting_is_refused_alike(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("export BAY_API_KEY=of-bay-0123456789abcdef\n")
    refused_here(tmp_path, "api_key")
    (tmp_path / ".env").write_text("")
    (tmp_path / "sbx.toml").write_text("policies = ['/x']\n")
    refused_here(tmp_path, "policy_dirs")


def test_a_named_file_of_the_working_directory_may_set_all(tmp_path: Path) -> None:
    file = tmp_path / "sbx.toml"
    file.write_text('bwrap = "/chosen"\n')
    named = read_settings(config=file, environment={}, directory=tmp_path)
    assert named.settings.bwrap == Path("/chosen")
    assert read(tmp_path, SBX_CONFIG=str(file)).sources == {"bwrap": str(file)}


def test_a_named_env_file_may_set_all_and_replaces_that_of_the_directory(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("SBX_QUEUE_MAX=3\n")
    (tmp_path / "x").write_text("SBX_BWRAP=/chosen\nSBX_TYPO=1\n")
    named = read_settings(env_file=tmp_path / "x", environment={}, directory=tmp_path)
    assert named.settings.bwrap == Path("/chosen")
    assert named.settings.queue_max != 3
    assert named.unknown == (("SBX_TYPO", str(tmp_path / "x")),)
    with pytest.raises(NotFound, match="does not exist"):
        read_settings(env_file=tmp_path / "y", environment={}, directory=tmp_path)


def test_relative_paths_are_made_absolute_for_another_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`sbx console` starts a service in `/`: there `SBX_DATA_DIR=data` would mean /data."""
    monkeypatch.chdir(tmp_path)
    given = {
        "SBX_DATA_DIR": "data",
        "SBX_CONFIG": "c.toml",
        "SBX_POLICY_DIRS": f"a{os.pathsep}/b",
        "SBX_MOUNT_DIRS": "m,/n",
        "SBX_PROJECT_DIRS": '["p"]',
        "SBX_LISTEN": "127.0.0.1:1",
        "PATH": "bin",
    }
    assert absolute_paths(given) == {
        **given,
        "SBX_DATA_DIR": f"{tmp_path}/data",
        "SBX_CONFIG": f"{tmp_path}/c.toml",
        "SBX_POLICY_DIRS": f"{tmp_path}/a{os.pathsep}/b",
        "SBX_MOUNT_DIRS": f'["{tmp_path}/m", "/n"]',
        "SBX_PROJECT_DIRS": f'["{tmp_path}/p"]',
    }
    paths = {name for name, info in ServiceSettings.model_fields.items() if "Path" in str(info)}
    made = absolute_paths({f"SBX_{name.upper()}": "x" for name in paths})
    assert all(f"{tmp_path}/x" in value for value in made.values()), made


def test_a_file_of_the_configuration_directory_may_set_all(
    tmp_path: Path, configuration: Path
) -> None:
    (configuration / "sbx.toml").write_text('bwrap = "/chosen"\n')
    (configuration / ".env").write_text("SBX_CGROUPS=false\n")
    assert read(tmp_path).settings.bwrap == Path("/chosen")
    there = read(configuration).settings
    assert (there.bwrap, there.cgroups) == (Path("/chosen"), False)


def test_the_table_of_agents_is_the_user_s(tmp_path: Path, configuration: Path) -> None:
    (configuration / "sbx.toml").write_text("queue_max = 3\n[agent]\nmax_steps = 5\n")
    assert read(tmp_path).settings.queue_max == 3
    (tmp_path / "sbx.toml").write_text("[agent]\nmax_steps = 5\n")
    with pytest.raises(Denied, match=r"may not set \[agent\]") as raised:
        read(tmp_path)
    assert raised.value.code == "setting_not_allowed_here"


def refused_file(directory: Path) -> tuple[str, str]:
    with pytest.raises(BadRequest) as raised:
        read(directory)
    assert raised.value.hint
    return raised.value.code, raised.value.message.partition(" cannot be read: ")[2]


@pytest.mark.parametrize("name", [".env", "sbx.toml"])
def test_a_special_file_is_refused_and_not_waited_for(tmp_path: Path, name: str) -> None:
    """A cell made a FIFO, and `sbx config` waited for a writer."""
    os.mkfifo(tmp_path / name)
    assert refused_file(tmp_path) == ("invalid_settings", "it is not a regular file")
    (tmp_path / name).unlink()
    (tmp_path / name).mkdir()
    assert refused_file(tmp_path) == ("invalid_settings", "it is not a regular file")


@pytest.mark.parametrize("name", [".env", "sbx.toml"])
def test_a_large_file_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"#" * ((1 << 20) + 1))
    assert refused_file(tmp_path) == ("invalid_settings", "it is larger than 1 MiB")


@pytest.mark.parametrize("name", [".env", "sbx.toml"])
def test_a_symlink_out_of_the_working_directory_is_refused(tmp_path: Path, name: str) -> None:
    top = tmp_path / "project"
    top.mkdir()
    (tmp_path / "secret").write_text("")
    (top / name).symlink_to("../secret")
    assert refused_file(top)[0] == "invalid_settings"
    (top / name).unlink()
    (top / "own").write_text("")
    (top / name).symlink_to("own")
    assert read(top).sources == {}


def test_the_user_s_file_may_be_a_symlink(tmp_path: Path, configuration: Path) -> None:
    (tmp_path / "dotfiles.toml").write_text("queue_max = 3\n")
    (configuration / "sbx.toml").symlink_to(tmp_path / "dotfiles.toml")
    (tmp_path / "work").mkdir()
    assert read(tmp_path / "work").settings.queue_max == 3


@pytest.mark.parametrize("name", [".env", "sbx.toml"])
def test_a_file_that_others_can_write_is_not_taken(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("")
    (tmp_path / name).chmod(0o666)
    with pytest.raises(Denied) as raised:
        read(tmp_path)
    assert raised.value.code == "settings_not_private"


def test_a_named_file_must_be_there_and_replaces_the_usual_ones(tmp_path: Path) -> None:
    (tmp_path / "sbx.toml").write_text("queue_max = 1\n")
    (tmp_path / "mine.toml").write_text("queue_max = 2\n")
    named = read(tmp_path, SBX_CONFIG=str(tmp_path / "mine.toml"))
    assert named.settings.queue_max == 2
    with pytest.raises(NotFound, match=r"none\.toml"):
        read(tmp_path, SBX_CONFIG=str(tmp_path / "none.toml"))


def test_paths_are_taken_from_the_working_directory_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = read(tmp_path, {"socket": Path("a/b.sock"), "data_dir": Path("d")})
    assert found.settings.socket == tmp_path / "a/b.sock"
    assert found.settings.data == tmp_path / "d"


def test_an_embedded_runtime_reads_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sbx.toml").write_text("queue_max = 1\n")
    (tmp_path / ".env").write_text("SBX_QUEUE_MAX=1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SBX_QUEUE_MAX", raising=False)
    assert Settings().queue_max != 1
    assert ServiceSettings(data_dir=tmp_path).queue_max != 1


@pytest.mark.parametrize(
    ("text", "parts"), [("127.0.0.1:80", ("127.0.0.1", 80)), ("[::1]:0", ("::1", 0))]
)
def test_an_address_has_a_host_and_a_port(text: str, parts: tuple[str, int]) -> None:
    assert address(text) == parts


# -- the paths of services ------------------------------------------------------------------------


def test_the_paths_of_a_service_are_those_of_its_file() -> None:
    values = {
        "data_dir": "/svc/data",
        "socket": "/svc/s.sock",
        "environments": "/svc/env",
        "policies": ["/svc/policies", "relative", 5],
        "queue_max": 3,
    }
    private = (Path("/svc/data"), Path("/svc/data-projects"), Path("/svc/s.sock"))
    code = (Path("/svc/env"), Path("/svc/policies"))
    assert own_paths_of(values) == OwnPaths(private, code)
    assert own_paths_of({"data_dir": "data", "socket": 5, "policy_dirs": "/x"}) == OwnPaths()


def test_a_workspace_contains_no_service_of_the_user(
    tmp_path: Path, configuration: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`sbx run --workspace ~/svc` printed the key in ~/svc/data, which ~/.config/sbx/sbx.toml
    named."""
    (configuration / "sbx.toml").write_text(f'data_dir = "{tmp_path}/svc/data"\n')
    (tmp_path / "svc/data").mkdir(parents=True)
    with pytest.raises(Denied, match=f"it contains {tmp_path}/svc/data, which belongs to sbx"):
        allowed_paths.check(tmp_path / "svc", Settings().own_paths)
    named = tmp_path / "named.toml"
    named.write_text(f'data_dir = "{tmp_path}/other"\n')
    monkeypatch.setenv("SBX_CONFIG", str(named))
    assert tmp_path / "other" in Settings().own_paths.private


def test_a_file_of_the_working_directory_names_no_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sbx.toml").write_text('data_dir = "/srv"\n')
    monkeypatch.chdir(tmp_path)
    assert Path("/srv") not in Settings().own_paths.private


def test_a_wrong_file_of_the_user_is_no_reason_to_show_more(configuration: Path) -> None:
    (configuration / "sbx.toml").write_text("data_dir =\n")
    with pytest.raises(BadRequest, match="is not valid TOML"):
        _ = Settings().own_paths


def test_a_file_that_this_process_cannot_read_is_left_out(
    configuration: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service dropped its rights, or the system's file is for root only."""

    def refuse(*_: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    (configuration / "sbx.toml").write_text('data_dir = "/srv/x"\n')
    with monkeypatch.context() as patched:
        patched.setattr("sbx.settings_files.os.open", refuse)
        own = Settings().own_paths
    assert Path("/srv/x") not in own.private
    assert Path("/srv/x") in Settings().own_paths.private


def test_no_workspace_may_contain_the_bubblewrap_that_a_setting_names(tmp_path: Path) -> None:
    """Code inside could replace the program that starts the next sandbox."""
    program = tmp_path / "bin" / "bwrap"
    program.parent.mkdir()
    program.touch()
    own = Settings(bwrap=program, data_dir=tmp_path / "data").own_paths
    assert program in own.code
    assert program in own_paths_of({"bwrap": str(program)}).code
    with pytest.raises(Denied) as refused:
        allowed_paths.check(tmp_path, own)
    assert refused.value.code == "directory_forbidden"


# Settings of limits that count for all owners, with the share of one owner or the reason without.
SHARES = {
    "sandboxes_max": "sandboxes_per_owner",
    "kernels_max": "kernels_per_owner",
    "uploads_at_once": "uploads_per_owner",
    "connections_max": "a quarter (sbx/api/admission.py)",
    "zygotes_max": "of policies, which the operator chooses; without one a start is cold",
    "queue_max": "of one conversation",
    "history_max": "of one sandbox",
    "audit_size_max": "of one file, which another one continues",
}


def test_each_limit_of_the_service_has_a_share_for_one_owner() -> None:
    """Connections, agents and kernels of two owners kept all others out (holes 2.10, 2.11)."""
    fields = ServiceSettings.model_fields
    limits = {name for name in fields if name.endswith(("_max", "_at_once"))}
    assert limits == SHARES.keys()
    partners = {name for name in fields if name.endswith("_per_owner")}
    documented = Path(__file__).parents[2].joinpath("docs/service.md").read_text(encoding="utf-8")
    table = documented.partition("## Limits")[2]
    for name in (*SHARES, *partners):
        shared = SHARES.get(name, name)
        assert shared in partners or " " in shared
        assert f"`{name}`" in table or name in ("zygotes_max", "history_max", "audit_size_max")
