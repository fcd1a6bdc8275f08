"""Imports that a service makes in a thread after its start.

Functions import these modules at their first use, so that the command line starts fast. In a
service that first use is a request, and the import of a library takes up to 0.1 s of the event
loop. Larger modules, which few services use, are imported in a thread at their first use.
"""

from sbx.imports import import_in_thread

AHEAD = (
    "re2",
    "psutil",
    "jwt",
    "cryptography.exceptions",
    "cryptography.hazmat.primitives.ciphers.aead",
    "sbx.runtime.sandbox",
    "sbx.runtime.processes.emulator",
    "sbx.egress.certificates",
    "sbx.environments.installers",
    "jsonschema_rs",
    "tenacity",
    "aiolimiter",
    "yaml",
    "httpx2",
    "sbx.agent.external.functions",
    "sbx.agent.external.http",
)


async def preload() -> None:
    """Import the modules, one after another."""
    for name in AHEAD:
        await import_in_thread(name)
