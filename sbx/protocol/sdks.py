"""The environment variables that point the SDK of another product at a service."""

from typing import Literal

Sdk = Literal["opensandbox", "shipyard"]
SDKS: tuple[Sdk, ...] = ("opensandbox", "shipyard")


def sdk_variables(sdk: Sdk, host: str, key: str) -> dict[str, str]:
    """Return the variables for a service on TCP at `host` (with the port), and a key or a token."""
    if sdk == "shipyard":
        return {"SHIPYARD_ENDPOINT": f"http://{host}/shipyard", "SHIPYARD_TOKEN": key}
    return {"OPEN_SANDBOX_DOMAIN": f"{host}/opensandbox", "OPEN_SANDBOX_API_KEY": key}
