"""The model that settings name, and what is said of settings that name none."""

import sys
from typing import Any

import pytest
from asked_models import DIALECTS, HELLO
from model_dialects import Dialect
from model_server import KEY, model_server

from sbx.agent.messages import Response
from sbx.agent.models.anthropic import AnthropicModel
from sbx.agent.models.factory import make_model
from sbx.agent.models.openai import OpenAIModel
from sbx.agent.settings import AgentSettings
from sbx.errors import BadRequest, Unavailable

KINDS = {"openai": OpenAIModel, "anthropic": AnthropicModel}


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_settings_name_a_model(dialect: Dialect) -> None:
    with model_server(Response("one"), Response("two")) as server:
        url = server.openai_url if dialect == "openai" else server.anthropic_url
        settings = AgentSettings(
            model_provider=dialect, base_url=url, api_key=KEY, model_name="usual"
        )
        for name in (None, "other"):
            model = make_model(settings, name)
            assert isinstance(model, KINDS[dialect])
            assert model.takes_images
            await model.complete("", HELLO, ())
            await model.close()
        assert [request.body["model"] for request in server.requests] == ["usual", "other"]


async def test_a_server_of_ones_own_needs_no_key() -> None:
    with model_server(Response("hi"), key="no-key-is-needed") as server:
        model = make_model(AgentSettings(base_url=server.openai_url, model_name="local"))
        assert (await model.complete("", HELLO, ())).content == "hi"
        await model.close()


@pytest.mark.parametrize(
    ("given", "missing"),
    [({"api_key": "k"}, "MODEL_NAME"), ({"model_name": "m"}, "API_KEY")],
)
def test_a_missing_setting_is_named(given: dict[str, str], missing: str) -> None:
    with pytest.raises(BadRequest, match=missing) as caught:
        make_model(AgentSettings(**given))
    assert caught.value.code == "missing_setting"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"api_key": "kéy"}, "API_KEY"),
        ({"api_key": "ab\ncd"}, "API_KEY"),
        ({"api_key": " "}, "API_KEY"),
        ({"api_key": "k", "base_url": "localhost:11434"}, "BASE_URL"),
        ({"api_key": "k", "base_url": "http://[::1"}, "BASE_URL"),
        ({"api_key": "k", "base_url": "http://"}, "BASE_URL"),
        ({"api_key": "k", "base_url": "http://user:secret@host"}, "BASE_URL"),
    ],
)
@pytest.mark.parametrize("kind", KINDS.values())
def test_what_cannot_be_a_key_or_a_url_is_refused(
    kind: type[OpenAIModel], options: dict[str, Any], named: str
) -> None:
    with pytest.raises(BadRequest, match=named) as caught:
        kind("m", **options)
    assert caught.value.code == "invalid_settings"


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_missing_sdk_is_told_with_how_to_get_it(
    dialect: Dialect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, dialect, None)
    with pytest.raises(Unavailable, match=dialect) as caught:
        make_model(AgentSettings(model_provider=dialect, api_key="k", model_name="m"))
    assert caught.value.code == "extra_missing"
    assert caught.value.message.endswith("run: pip install 'sbx-runtime[agent]'")
