"""Run 200 untrusted snippets, each in a new sandbox, eight at a time.

python fan_out.py [COUNT]
"""

import asyncio
import sys
from collections import Counter

from sbx import Runtime

SNIPPETS = [
    "sum(range(1000))",
    "import time; time.sleep(60)",
    "x = bytearray(1 << 30)",
    "open('/etc/passwd').read()[:4] + open('/root/.ssh/id_rsa').read()",
]
NARROWER = {"limits": {"memory_max": "64MiB"}}


async def main(count: int) -> None:
    places = asyncio.Semaphore(8)

    async with Runtime() as runtime:
        await runtime.warm("default", count=4, new=True)

        async def outcome(number: int) -> str:
            # Only each 20th snippet is hostile: those take their whole time-out or memory.
            code = SNIPPETS[number // 20 % 4 if number % 20 == 0 else 0]
            async with places, await runtime.create("default", narrower=NARROWER) as box:
                run = await box.run(code, timeout=1)
                return run.status.value if run.cause is None else f"killed: {run.cause.value}"

        outcomes = Counter(await asyncio.gather(*map(outcome, range(count))))
    print(f"{count} snippets:", ", ".join(f"{n} {name}" for name, n in outcomes.most_common()))


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 200))
