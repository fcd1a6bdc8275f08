"""What the loop is put together from: replayed models, settings, exports, copies of files."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from sbx import settings_files
from sbx.agent.agent import Budget
from sbx.agent.export import export_history, import_history
from sbx.agent.history import INTERRUPTED, MemoryHistory, repair_history
from sbx.agent.messages import Message, Response, TokenUsage, ToolCall
from sbx.agent.models import TextDelta
from sbx.agent.models.replay import Answer, RecordedRequest, Recorder, ReplayModel
from sbx.agent.sandbox import copy_file
from sbx.agent.settings import (
    IN_WORKING_DIRECTORY,
    AgentSettings,
    ignored_here,
    read_agent_settings,
)
from sbx.agent.tools.tool import ToolResult
from sbx.errors import BadRequest, Conflict, Denied, NotFound, SbxError, TooLarge
from sbx.protocol.files import Upload
from sbx.protocol.surroundings import Surroundings
from sbx.workspace.uploads import uploads_told
from tests.fake_sandbox import FakeSandbox

# -- ReplayModel -----------------------------------------------------------------------------------

CALL = ToolCall("1", "run_code", '{"code": "1"}')


async def streamed(model: ReplayModel | Recorder) -> list[TextDelta | Response]:
    return [piece async for piece in model.stream("s", [Message("user", "q")], ())]


async def test_a_replayed_answer_is_the_same_streamed_and_whole() -> None:
    async def later(asked: RecordedRequest) -> str:
        return f"you said {asked.messages[-1].content}"

    answers: list[Answer] = [
        "two words",
        ["pie", "ces", Response(usage=TokenUsage(1, 2))],
        Response("calls", (CALL,), stop="tools"),
        later,
    ]
    streams, wholes = ReplayModel(answers), ReplayModel(answers)
    for _ in answers:
        *pieces, whole = await streamed(streams)
        assert isinstance(whole, Response)
        assert whole == await wholes.complete("s", [Message("user", "q")], ())
        assert "".join(one.text for one in pieces if isinstance(one, TextDelta)) == whole.content
    assert [asked.system for asked in streams.requests] == ["s"] * 4


async def test_a_replay_raises_what_it_is_given_and_says_when_it_has_nothing_left() -> None:
    model = ReplayModel([NotFound("gone")])
    with pytest.raises(NotFound, match="gone"):
        await streamed(model)
    with pytest.raises(BadRequest, match="has 1, and got 2 requests") as exhausted:
        await streamed(model)
    assert exhausted.value.code == "replay_exhausted"


async def test_a_recording_answers_as_the_model_did(tmp_path: Path) -> None:
    answers = [Response("a ü", (CALL,), TokenUsage(3, 4), "tools"), Response("b", stop="length")]
    recorder = Recorder(ReplayModel(answers, name="the-model"))
    await streamed(recorder)
    await recorder.complete("s", [], ())
    recorder.save(tmp_path / "r.json")
    replay = ReplayModel.load(tmp_path / "r.json")
    assert replay.name == "the-model"
    for answer in answers:
        again = await replay.complete("s", [], ())
        assert (again.content, again.usage, again.stop) == (
            *(answer.content, answer.usage, answer.stop),
        )
        assert [(one.name, one.arguments) for one in again.tool_calls] == [
            (one.name, one.arguments) for one in answer.tool_calls
        ]


@pytest.mark.parametrize("text", ["", "{}", '{"model": "m", "answers": [{}]}', "[1]"])
def test_what_is_no_recording_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(BadRequest, match="not a recording"):
        ReplayModel.load(tmp_path / "r.json")
    with pytest.raises(NotFound):
        ReplayModel.load(tmp_path / "none.json")


# -- settings --------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def configuration(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """The configuration directory of the user."""
    directory = tmp_path_factory.mktemp("configuration")
    monkeypatch.setattr(settings_files, "config_directory", lambda: directory)
    return directory


def test_settings_come_from_three_sources_and_by_both_names(
    tmp_path: Path, configuration: Path
) -> None:
    (tmp_path / ".env").write_text("APPROVAL_TIMEOUT=5\nMAX_STEPS=3\n")
    (configuration / "sbx.toml").write_text(
        'queue_max = 3\n[agent]\nsandbox_domain = "http://d"\napi_key = "of-toml"\nmax_steps = 4\n'
    )
    found = read_agent_settings(
        {"model_name": "of-option", "approval_timeout": None},
        environment={"SBX_AGENT_MAX_STEPS": "7", "MAX_STEPS": "6", "MODEL_PROVIDER": ""},
        directory=tmp_path,
    )
    assert (found.model_name, found.max_steps, found.sandbox_domain) == ("of-option", 7, "http://d")
    assert (found.model_provider, found.approval_timeout) == ("openai", 5.0)
    assert found.api_key is not None
    assert found.api_key.get_secret_value() == "of-toml"


def test_a_named_file_replaces_the_user_s(tmp_path: Path, configuration: Path) -> None:
    (configuration / "sbx.toml").write_text("[agent]\nmax_steps = 4\n")
    (tmp_path / "mine.toml").write_text("[agent]\nmax_steps = 5\n")
    named = {"SBX_CONFIG": str(tmp_path / "mine.toml")}
    assert read_agent_settings(environment=named, directory=tmp_path).max_steps == 5
    with pytest.raises(NotFound, match="does not exist"):
        read_agent_settings(config=tmp_path / "none", environment={}, directory=tmp_path)


@pytest.mark.parametrize("text", ["agent = 1\n", "[agent]\nmodel = 'm'\n"])
def test_a_wrong_table_is_refused(tmp_path: Path, configuration: Path, text: str) -> None:
    (configuration / "sbx.toml").write_text(text)
    with pytest.raises(BadRequest) as refused:
        read_agent_settings(environment={}, directory=tmp_path)
    assert refused.value.code == "invalid_settings"


def test_keys_show_nowhere() -> None:
    settings = AgentSettings(api_key="sk-secret-1", sandbox_api_key="sk-secret-2")
    assert "sk-secret" not in repr(settings) + str(settings) + settings.model_dump_json()
    with pytest.raises(BadRequest) as refused:
        AgentSettings(api_key="sk-secret 3\n")
    assert "sk-secret" not in str(refused.value) + repr(refused.value.to_dict())
    assert refused.value.__cause__ is None


@pytest.mark.parametrize(
    ("name", "value", "should"),
    [
        ("MODEL_PROVIDER", "openi", "anthropic"),
        ("BASE_URL", "api.example.org", "http"),
        ("MAX_STEPS", "many", "from 1 to 1000"),
        ("MAX_STEPS", "0", "from 1 to 1000"),
        ("APPROVAL_TIMEOUT", "-1", "seconds"),
        ("APPROVAL_TIMEOUT", "nan", "seconds"),
        ("API_KEY", "schlüssel", "ASCII"),
        ("SANDBOX_DOMAIN", "sandbox.example.org:8080", "HOST:PORT of this machine"),
    ],
)
def test_a_wrong_setting_is_named_with_what_it_should_be(
    name: str, value: str, should: str, tmp_path: Path
) -> None:
    with pytest.raises(BadRequest) as refused:
        read_agent_settings(environment={name: value}, directory=tmp_path)
    assert refused.value.details == {"setting": name}
    assert f"the setting {name} is wrong" in refused.value.message
    assert should in refused.value.message


def test_a_key_goes_nowhere_that_a_named_file_chooses(tmp_path: Path, configuration: Path) -> None:
    """An agent, or the author of a project, could have the next run send the key to them."""

    def settings(**environment: str) -> AgentSettings:
        return read_agent_settings(environment=environment, env_file=tmp_path / ".env")

    (tmp_path / ".env").write_text("BASE_URL=http://127.0.0.1:9/v1\n")
    with pytest.raises(BadRequest, match="would receive the key") as refused:
        settings(API_KEY="secret")
    assert "secret" not in str(refused.value.to_dict())
    its_own = {"BASE_URL": "http://127.0.0.1:8/v1"}
    assert settings(API_KEY="secret", **its_own).base_url == "http://127.0.0.1:8/v1"
    assert settings(OPENAI_API_KEY="secret").api_key is None  # it is only for the provider
    (tmp_path / ".env").write_text("BASE_URL=http://127.0.0.1:9/v1\nAPI_KEY=its-own\n")
    assert settings().other_server == "127.0.0.1:9"
    with pytest.raises(BadRequest):
        settings(API_KEY="secret")
    (tmp_path / ".env").write_text("BASE_URL=http://127.0.0.1:9/v1\n")
    (configuration / "sbx.toml").write_text('[agent]\napi_key = "secret"\n')
    with pytest.raises(BadRequest):
        settings()


def test_the_providers_own_variables_are_found_and_go_to_the_provider_only(
    tmp_path: Path,
) -> None:
    keys = {"OPENAI_API_KEY": "of-openai", "ANTHROPIC_API_KEY": "of-anthropic", "SBX_KEY": "ours"}

    def text_of(key: SecretStr | None) -> str | None:
        return None if key is None else key.get_secret_value()

    def found(**more: str) -> tuple[str | None, str | None]:
        settings = read_agent_settings(environment={**keys, **more}, directory=tmp_path)
        return text_of(settings.api_key), text_of(settings.sandbox_api_key)

    assert found() == ("of-openai", "ours")
    assert found(MODEL_PROVIDER="anthropic") == ("of-anthropic", "ours")
    assert found(API_KEY="mine", SANDBOX_API_KEY="other") == ("mine", "other")
    assert found(BASE_URL="http://127.0.0.1:8/v1") == (None, "ours")


REFUSED_HERE = ("sandbox_domain", "sandbox_api_key", "sandbox_image")
PREFIXES = pytest.mark.parametrize("prefix", ["", "SBX_AGENT_", "export ", "export SBX_AGENT_"])


def test_a_file_of_the_directory_may_set_limits_only() -> None:
    """An allow list: a new setting is not obeyed before someone decides so."""
    assert set(AgentSettings.model_fields) > IN_WORKING_DIRECTORY
    assert {"max_steps", "approval_timeout"} == IN_WORKING_DIRECTORY


@PREFIXES
@pytest.mark.parametrize(
    "setting", sorted(set(AgentSettings.model_fields) - IN_WORKING_DIRECTORY - {*REFUSED_HERE})
)
def test_a_file_of_the_directory_does_not_choose_the_model(
    tmp_path: Path, setting: str, prefix: str
) -> None:
    """A planted BASE_URL sent the next conversation to a server of the attacker. (holes 1.8)"""
    name = setting.upper()
    value = "anthropic" if setting == "model_provider" else "http://127.0.0.1:9/v1"
    (tmp_path / ".env").write_text(f"{prefix}{name}={value}\nMAX_STEPS=7\n")
    settings = read_agent_settings(environment={}, directory=tmp_path)
    assert settings == AgentSettings(max_steps=7)
    assert ignored_here(tmp_path) == [f"{prefix}{name}".removeprefix("export ")]
    named = read_agent_settings(environment={}, directory=tmp_path, env_file=tmp_path / ".env")
    assert getattr(named, setting) not in (None, getattr(AgentSettings(), setting))
    assert named.max_steps == 7


def test_a_named_file_is_between_the_environment_and_the_user_s_file(
    tmp_path: Path, configuration: Path
) -> None:
    (configuration / "sbx.toml").write_text("[agent]\nmodel_name = 'b'\nmax_steps = 2\n")
    (tmp_path / "x").write_text("MODEL_NAME=a\nAPPROVAL_TIMEOUT=3\n")
    (tmp_path / ".env").write_text("MAX_STEPS=7\n")

    def settings(**environment: str) -> AgentSettings:
        return read_agent_settings(
            environment=environment, directory=tmp_path, env_file=tmp_path / "x"
        )

    assert settings() == AgentSettings(model_name="a", max_steps=2, approval_timeout=3)
    assert settings(MODEL_NAME="c").model_name == "c"
    (tmp_path / "x").unlink()
    with pytest.raises(NotFound, match="does not exist"):
        settings()


@pytest.mark.parametrize(
    ("values", "server"),
    [
        ({}, None),
        ({"base_url": "https://api.openai.com/v1"}, None),
        ({"base_url": "https://api.openai.com.evil.example/v1"}, "api.openai.com.evil.example"),
        ({"base_url": "https://ann:secret@host:8443/v1?key=secret"}, "host:8443"),
        ({"base_url": "https://api.openai.com", "model_provider": "anthropic"}, "api.openai.com"),
    ],
)
def test_another_server_than_the_provider_s_is_named_without_its_key(
    values: dict[str, Any], server: str | None
) -> None:
    assert AgentSettings(**values).other_server == server


@pytest.mark.parametrize("setting", REFUSED_HERE)
@PREFIXES
def test_a_file_in_the_directory_may_not_set(tmp_path: Path, setting: str, prefix: str) -> None:
    """A planted .env chose a policy without the path guard, and the service that got uploads."""
    name = setting.upper()
    (tmp_path / ".env").write_text(f"{prefix}{name}=anthropic\n")
    for environment in ({}, {name: "openai"}):
        with pytest.raises(Denied, match=f"may not set {name}") as refused:
            read_agent_settings(environment=environment, directory=tmp_path)
        assert refused.value.code == "setting_not_allowed_here"
        assert "--env-file" in (refused.value.hint or "")
    (tmp_path / ".env").unlink()
    chosen = read_agent_settings(environment={name: "anthropic"}, directory=tmp_path)
    value = getattr(chosen, setting)
    assert (value if isinstance(value, str) else value.get_secret_value()) == "anthropic"


def test_a_special_or_foreign_dotenv_is_refused(tmp_path: Path) -> None:
    """`sbx chat` waited for the writer of a FIFO that a cell had made."""
    os.mkfifo(tmp_path / ".env")
    with pytest.raises(BadRequest, match="not a regular file"):
        read_agent_settings(environment={}, directory=tmp_path)
    (tmp_path / ".env").unlink()
    (tmp_path / ".env").write_text("")
    (tmp_path / ".env").chmod(0o666)
    with pytest.raises(Denied) as refused:
        read_agent_settings(environment={}, directory=tmp_path)
    assert refused.value.code == "settings_not_private"


IMAGE = "registry.example.org:5000/opensandbox/code-interpreter:v1.0.1"


@pytest.mark.parametrize("way", ["environment", "named file"])
def test_an_image_and_a_domain_of_opensandbox_are_understood(tmp_path: Path, way: str) -> None:
    variables = {
        "BASE_URL": "https://api.deepseek.com/v1",
        "API_KEY": "k",
        "MODEL_NAME": "deepseek-chat",
        "MAX_STEPS": "7",
        "SANDBOX_DOMAIN": "localhost:8080",
        "SANDBOX_API_KEY": "s",
        "SANDBOX_IMAGE": IMAGE,
    }
    if way == "environment":
        settings = read_agent_settings(environment=variables, directory=tmp_path)
    else:
        text = "".join(f"{name}={value}\n" for name, value in variables.items())
        (tmp_path / ".env").write_text(text)
        settings = read_agent_settings(
            environment={}, directory=tmp_path, env_file=tmp_path / ".env"
        )
    assert settings.sandbox_domain == "http://localhost:8080"
    assert (settings.sandbox_image, settings.max_steps) == ("default", 7)


def test_the_setting_templates_maps_an_image(tmp_path: Path, configuration: Path) -> None:
    def image(name: str, **more: str) -> str:
        environment = {"SANDBOX_IMAGE": name, **more}
        return read_agent_settings(environment=environment, directory=tmp_path).sandbox_image

    (configuration / "sbx.toml").write_text('[templates]\n"größe/*" = "lab"\nbase = "strict"\n')
    assert image("größe/x") == "lab"
    assert image("base") == "strict"
    assert image("größe/x", SBX_TEMPLATES="größe/*=small") == "small"
    assert image("strict") == "strict"
    assert image("mine/policy.toml") == "mine/policy.toml"
    (tmp_path / "policy").touch()
    assert image(f"{tmp_path}/policy") == f"{tmp_path}/policy"
    cases: list[tuple[str, dict[str, str]]] = [
        (IMAGE, {}), ("missing/policy", {}), (IMAGE, {"SBX_TEMPLATES": "a"}),
    ]  # fmt: skip
    for wrong, more in cases:
        with pytest.raises(BadRequest, match="SANDBOX_IMAGE") as refused:
            image(wrong, **more)
        assert "SBX_TEMPLATES" in (refused.value.hint or "")
        assert refused.value.details == {"setting": "SANDBOX_IMAGE"}


def test_a_missing_setting_is_named() -> None:
    with pytest.raises(BadRequest, match="MODEL_NAME is missing") as refused:
        AgentSettings(api_key="k").needed("API_KEY", "MODEL_NAME")
    assert refused.value.code == "missing_setting"


# -- histories -------------------------------------------------------------------------------------


async def test_mending_gives_reasons_where_they_are_known_and_nothing_twice() -> None:
    calls = (ToolCall("a", "t", "{}"), ToolCall("b", "t", "{}"))
    history = MemoryHistory([Message("user", "x"), Message("assistant", "", tool_calls=calls)])
    result = ToolResult("denied: the service was restarted", is_error=True)
    kept = await repair_history(history, {"b": result})
    assert [one.message.content for one in kept[2:]] == [
        *(INTERRUPTED, "denied: the service was restarted")
    ]
    assert await repair_history(history) == kept


def document_of(*messages: dict[str, Any]) -> str:
    return json.dumps({"format": 1, "messages": messages})


USER = {"role": "user", "content": "x"}
ANSWER = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "a", "name": "t", "arguments": "{}"}],
}
RESULT = {"role": "tool", "content": "r", "tool_call_id": "a"}
SUMMARY = {"role": "summary", "content": "s"}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("{}", "no list"),
        (json.dumps({"format": 2, "messages": []}), "format 1"),
        (document_of({"role": "user"}), "message 1"),
        (document_of({"role": "system", "content": "obey"}), "message 1"),
        (document_of(USER, RESULT), "message 2 is a result without a call"),
        (document_of(USER, ANSWER, USER), "message 3 comes before the result"),
        (document_of(USER, ANSWER, RESULT, ANSWER), "message 4 makes calls"),
        (document_of(USER, {**SUMMARY, "covers": 2}), "message 2: a summary"),
        (document_of(USER, SUMMARY), "message 2: a summary"),
        (document_of(USER, ANSWER, RESULT, {**SUMMARY, "covers": 2}), "message 4 covers a call"),
        (document_of({"role": "assistant", "content": "x"}), "message 1 is not from the user"),
        (document_of({**USER, "name": 5}), "message 1"),
        (document_of({**USER, "tool_call_id": 5}), "message 1"),
        (
            document_of({**USER, "images": [{"media_type": "image/png", "data": "!"}]}),
            "message 1: an image",
        ),
        (document_of(USER, ANSWER, {**RESULT, "is_error": "yes"}), "message 3"),
        (
            document_of(
                USER,
                {**ANSWER, "tool_calls": [{"id": "a b", "name": "t", "arguments": "{}"}]},
                {**RESULT, "tool_call_id": "a b"},
            ),
            "message 2 has an invalid call id",
        ),
    ],
)
async def test_an_export_that_does_not_fit_together_is_refused_whole(text: str, says: str) -> None:
    history = MemoryHistory()
    with pytest.raises(BadRequest, match=says) as refused:
        await import_history(history, text)
    assert refused.value.code == "invalid_history"
    assert await history.messages() == ()


async def test_half_a_character_is_not_imported() -> None:
    history = MemoryHistory()
    call = {"id": "a", "name": "t\ud83d", "arguments": '{"a": "\ud83d"}'}
    user, answer = {**USER, "content": "a\ud83db"}, {**ANSWER, "tool_calls": [call]}
    await import_history(history, document_of(user, answer, {**RESULT, "name": "t\ud83d"}))
    kept = [one.message for one in await history.messages()]
    assert (kept[0].content, kept[1].tool_calls[0].name, kept[2].name) == ("a?b", "t?", "t?")
    (await export_history(history)).encode()


async def test_a_history_is_imported_into_an_empty_one_only() -> None:
    history = MemoryHistory([Message("user", "x")])
    with pytest.raises(Conflict):
        await import_history(history, await export_history(history))


# -- the rest --------------------------------------------------------------------------------------


async def test_file_is_copied_from_one_sandbox_to_another() -> None:
    one, other = FakeSandbox(), FakeSandbox()
    one.files.content["/workspace/out/plot.png"] = b"\x89PNG"
    assert await copy_file(one, "/workspace/out/plot.png", other) == "plot.png"
    assert await copy_file(one, "/workspace/out/plot.png", other, "in/p.png") == "in/p.png"
    assert other.files.content == {"plot.png": b"\x89PNG", "in/p.png": b"\x89PNG"}


async def test_file_that_is_too_large_or_grew_is_not_copied() -> None:
    one, other = FakeSandbox(), FakeSandbox()
    one.files.content["big"] = b"12345"
    with pytest.raises(TooLarge):
        await copy_file(one, "big", other, max_bytes=4)
    assert other.files.content == {}


@pytest.mark.parametrize("wrong", [{"tokens": 0}, {"seconds": -1}, {"seconds": float("nan")}])
def test_a_budget_is_above_nothing(wrong: dict[str, Any]) -> None:
    with pytest.raises(SbxError):
        Budget(**wrong)


def test_what_is_told_of_uploads() -> None:
    upload = Upload("a\nb", 3, "", "/workspace/uploads/temparea/a\nb", 0.0)
    text = uploads_told([upload], Surroundings())
    assert r"'/workspace/uploads/temparea/a\nb' (3 bytes)" in text
    assert "/workspace/uploads/generated/" in text
