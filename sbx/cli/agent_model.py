"""The model of an agent: the model from the settings, or recorded answers."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from sbx.agent.models import Model
    from sbx.agent.settings import AgentSettings

Name = Annotated[
    str | None,
    typer.Option("--model", help="A model of the provider; default: MODEL_NAME.", metavar="NAME"),
]
MaxSteps = Annotated[
    int | None,
    typer.Option(
        "--max-steps",
        min=1,
        help="The step limit: answers of the model; default: MAX_STEPS.",
        metavar="N",
    ),
]
Replay = Annotated[
    Path | None,
    typer.Option(
        "--replay",
        help="Replay recorded answers instead of asking a model; needs no key.",
        metavar="FILE",
    ),
]
Record = Annotated[
    Path | None,
    typer.Option("--record", help="Record the model's answers, for --replay.", metavar="FILE"),
]


def settings(
    *,
    model: str | None = None,
    max_steps: int | None = None,
    policy: str | None = None,
    connect: str | None = None,
    key: str | None = None,
) -> "AgentSettings":
    """Return the settings of an agent. These options override all other sources.

    Raise the errors of `read_agent_settings`.
    """
    from sbx.agent.settings import read_agent_settings

    return read_agent_settings(
        {
            "model_name": model,
            "max_steps": max_steps,
            "sandbox_image": policy,
            "sandbox_domain": connect,
            "sandbox_api_key": key,
        }
    )


def made(settings: "AgentSettings", replay: Path | None, record: Path | None) -> "Model":
    """Return the model. The caller closes it.

    Raise BadRequest `missing_setting`, which names the setting, NotFound for a missing recording,
    and Unavailable `extra_missing`.
    """
    from sbx.agent.models.replay import ReplayModel

    if replay is not None:
        return ReplayModel.load(replay)
    from sbx.agent.models.factory import make_model

    model = make_model(settings)
    if record is None:
        return model
    from sbx.cli.recording import ChatRecording

    return ChatRecording(model, record)
