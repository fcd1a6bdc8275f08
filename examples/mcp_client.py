"""A client of the Model Context Protocol that uses a sandbox through `sbx mcp`."""

import asyncio
import sys

from mcp import Client, StdioServerParameters
from mcp_types import TextContent


async def main() -> None:
    server = StdioServerParameters(command=sys.executable, args=["-m", "sbx", "mcp"])
    async with Client(server) as client:
        print("tools:", ", ".join(tool.name for tool in (await client.list_tools()).tools))
        for code in ("x = 6", "print(x * 7)", "open('/etc/shadow')"):
            result = await client.call_tool("run_code", {"code": code})
            text = "".join(part.text for part in result.content if isinstance(part, TextContent))
            print(code, "->", "error" if result.is_error else text.strip())


if __name__ == "__main__":
    asyncio.run(main())
