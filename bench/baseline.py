"""What people have today: ipykernel without any sandbox, driven by jupyter_client."""

import time

from jupyter_client.manager import start_new_kernel

_KERNEL_S = 60.0


def cold_start_ms() -> float:
    """Milliseconds from nothing to the result of 1+1 in a new ipykernel."""
    began = time.perf_counter()
    manager, client = start_new_kernel(startup_timeout=_KERNEL_S)
    try:
        result: list[str] = []

        def see(message: dict[str, dict[str, dict[str, str]]]) -> None:
            if "data" in message["content"]:
                result.append(message["content"]["data"]["text/plain"])

        client.execute_interactive("1+1", timeout=_KERNEL_S, output_hook=see)
        ended = time.perf_counter()
        assert result == ["2"], result
        return (ended - began) * 1000
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
