"""The environment variables that point the SDK of another product at a service."""

from typing import Literal

Sdk = Literal["opensandbox", "e2b"]
SDKS: tuple[Sdk, ...] = ("opensandbox", "e2b")


def sdk_variables(sdk: Sdk, host: str, key: str) -> dict[str, str]:
    """Return the variables for a service on TCP at `host` (with the port), and a key or a token."""
    if sdk == "e2b":
        secret = key.removeprefix("sk-sbx-")
        return {
            "E2B_API_URL": f"http://{host}",
            "E2B_SANDBOX_URL": f"http://{host}",
            "E2B_API_KEY": key if secret == key else f"e2b_{secret}",
        }
    return {"OPEN_SANDBOX_DOMAIN": f"{host}/opensandbox", "OPEN_SANDBOX_API_KEY": key}
