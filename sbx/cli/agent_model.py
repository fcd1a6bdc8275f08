"""The model that an agent asks: the one of the settings, or answers that were recorded."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from sbx.agent.models import Model
    from sbx.agent.settings import AgentSettings

Name = Annotated[
    str | None,
    typer.Option("--model", help="A model of the provider; else MODEL_NAME.", metavar="NAME"),
]
MaxSteps = Annotated[
    int | None,
    typer.Option(
        "--max-steps", min=1, help="The most answers of the model; else MAX_STEPS.", metavar="N"
    ),
]
Replay = Annotated[
    Path | None,
    typer.Option(
        "--replay", help="Answers of a recording, instead of a model: no key.", metavar="FILE"
    ),
]
Record = Annotated[
    Path | None,
    typer.Option("--record", help="Write the model's answers down, for --replay.", metavar="FILE"),
]


def settings(
    *,
    model: str | None = None,
    max_steps: int | None = None,
    policy: str | None = None,
    connect: str | None = None,
    key: str | None = None,
) -> "AgentSettings":
    """Return the settings of an agent, with these options before all other sources. Raises as
    `read_agent_settings`."""
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
    """Whoever makes it closes it. Raises BadRequest `missing_setting`, which names it, NotFound for
    a recording, Unavailable `extra_missing`."""
    from sbx.agent.models.replay import ReplayModel

    if replay is not None:
        return ReplayModel.load(replay)
    from sbx.agent.models.made import make_model

    model = make_model(settings)
    if record is None:
        return model
    from sbx.cli.recording import Recording

    return Recording(model, record)
