"""Four tasks for an agent: analyse data in three turns, repair a failing test suite, read a web
site after a person grants the access, and read twenty files at the same time.

python agent_tasks.py [--live] [TASK…]

Each task checks its result. Without --live the answers of the model come from recordings/, which
were written by hand; with it, from the model that the environment names (MODEL_NAME, API_KEY,
BASE_URL).
"""

import argparse
import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

from sbx import Runtime
from sbx.agent import Agent, Approvals, Budget, ReplayModel, make_model, read_agent_settings
from sbx.agent.agent import OnStep
from sbx.agent.models import Model
from sbx.policy import Policy, load
from sbx.protocol.agent import AgentRunEnd, ToolStart
from sbx.protocol.approvals import ApprovalScope

RECORDINGS = Path(__file__).parent / "recordings"
BUDGET = Budget(tokens=200_000, seconds=300.0)
STEPS = 20


def finished(end: AgentRunEnd) -> AgentRunEnd:
    assert end.reason == "done", f"the run ended with {end.reason}: {end.error}"
    return end


# -- three turns over one table ----------------------------------------------------------------

SALES = {"North": (120, 150, 180), "South": (200, 180, 160), "West": (90, 95, 115)}
QUESTIONS = (
    "sales.csv has the revenue of each region and month. Which region had the highest revenue in"
    " total? Write only its name to best.txt.",
    "Draw the revenue of all regions by month as a line chart, and save it as revenue.png.",
    "Which region grew most from January to March, in percent? Write one sentence with the region"
    " and the rounded percentage to report.md.",
)


async def analysis(runtime: Runtime, model: Model, on_step: OnStep) -> list[AgentRunEnd]:
    rows = [
        f"{region},2026-{month:02},{revenue}"
        for region, revenues in SALES.items()
        for month, revenue in enumerate(revenues, 1)
    ]
    async with await runtime.create("data-science") as box:
        await box.files.write("sales.csv", "\n".join(["region,month,revenue", *rows, ""]))
        agent = Agent(box, model, budget=BUDGET)  # it keeps its history from turn to turn
        ends = [
            finished(await agent.run(question, max_steps=STEPS, on_step=on_step))
            for question in QUESTIONS
        ]
        best, report = await box.files.read("best.txt"), await box.files.read("report.md")
        assert best.strip() == "South", f"best.txt has {best[:80]!r}"
        assert (await box.files.read_bytes("revenue.png")).startswith(b"\x89PNG")
        assert "North" in report, f"report.md has {report[:200]!r}"
        assert "50" in report, f"report.md has {report[:200]!r}"
    return ends


# -- a test suite that fails -------------------------------------------------------------------

CART = '''\
def total(prices, discount=0):
    """Return the sum of the prices, less the discount in percent."""
    return sum(prices) * (1 - discount)


def cheapest(prices):
    return sorted(prices)[1]
'''
TESTS = """\
import unittest

import cart


class CartTest(unittest.TestCase):
    def test_total(self):
        self.assertEqual(cart.total([10, 20]), 30)

    def test_discount(self):
        self.assertEqual(cart.total([100], discount=25), 75)

    def test_cheapest(self):
        self.assertEqual(cart.cheapest([7, 3, 9]), 3)


if __name__ == "__main__":
    unittest.main()
"""
COMMAND = "python -m unittest -q test_cart"


async def suite(runtime: Runtime, model: Model, on_step: OnStep) -> list[AgentRunEnd]:
    async with await runtime.create() as box:
        await box.files.write("cart.py", CART)
        await box.files.write("test_cart.py", TESTS)
        agent = Agent(box, model, budget=BUDGET)
        task = "Some tests in test_cart.py fail. Repair cart.py, and leave the tests as they are."
        # The exit code of the tests ends the task, and not the answer of the model.
        end = finished(
            await agent.run(task, check_command=COMMAND, max_steps=STEPS, on_step=on_step)
        )
        assert await box.files.read("test_cart.py") == TESTS, "the tests were changed"
        run = await box.shell(COMMAND)
        assert run.exit_code == 0, run.stderr
    return [end]


# -- a web site that the policy does not list --------------------------------------------------

PRICES = {"apples": "2.40", "pears": "3.10", "plums": "4.75"}
ADDRESS = "127.0.0.2"  # a server on this host; a site of the Internet needs no allow_private


class Shop(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        name = self.path.strip("/")
        links = "".join(f'<li><a href="/{each}">{each}</a></li>' for each in PRICES)
        body = f"<ul>{links}</ul>" if not name else f"<p class=price>{PRICES.get(name, '?')}</p>"
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: object) -> None:
        """Print nothing for each request."""


@contextmanager
def shop() -> Iterator[str]:
    server = HTTPServer((ADDRESS, 0), Shop)
    serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    serving.start()
    try:
        yield f"{ADDRESS}:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        serving.join()


def granting(host: str) -> Policy:
    """A policy without any host, in which a person may grant this one for an hour."""
    table = load("networked").model_dump(mode="json")
    table["network"]["allow_private"] = [ADDRESS]
    table["grant"] = [{"network": [host], "longest": "hour"}]
    return Policy.model_validate(table)


async def scrape(runtime: Runtime, model: Model, on_step: OnStep) -> list[AgentRunEnd]:
    task = (
        "site.txt has the address of a shop, with one page for each fruit. Write the fruits and"
        " their prices to prices.csv, with the columns fruit and price, sorted by fruit."
    )
    approvals, granted = Approvals(), []
    with shop() as host:
        async with await runtime.create(granting(host)) as box:
            await box.files.write("site.txt", f"http://{host}/")
            agent = Agent(box, model, approvals=approvals, budget=BUDGET)
            ends = []
            async for event in agent.stream(task, max_steps=STEPS, on_step=on_step):
                if isinstance(event, ToolStart) and event.approval_required:
                    # A program decides here in the place of a person, by the access alone.
                    granted.append((event.tool_args["kind"], event.tool_args["target"]))
                    call, me = event.tool_call_id, ApprovalScope("local")
                    if granted[-1] == ("network", host):
                        await approvals.decide(me, call, True, remember="hour")
                    else:
                        await approvals.decide(me, call, False)
                if isinstance(event, AgentRunEnd):
                    ends.append(finished(event))
            text = await box.files.read("prices.csv")
            expected = "".join(f"{fruit},{price}\n" for fruit, price in PRICES.items())
            assert text.replace("\r", "") == f"fruit,price\n{expected}", f"prices.csv is {text!r}"
            assert granted == [("network", host)], f"asked for {granted}"
    return ends


# -- twenty files at the same time -------------------------------------------------------------

FILES = 20


async def files(runtime: Runtime, model: Model, on_step: OnStep) -> list[AgentRunEnd]:
    places = asyncio.Semaphore(5)

    async def total(number: int) -> AgentRunEnd:
        async with places, await runtime.create() as box:
            amounts = [number * each for each in range(1, 11)]
            lines = "\n".join(["amount", *map(str, amounts), ""])
            await box.uploads.put_bytes("bookings.csv", lines.encode())
            copied = ReplayModel.load(RECORDINGS / "files.json")
            agent = Agent(box, copied if isinstance(model, ReplayModel) else model, budget=BUDGET)
            task = "Add the amounts of the upload bookings.csv. Write only the sum to total.txt."
            end = finished(await agent.run(task, max_steps=STEPS, on_step=on_step))
            text = await box.files.read("total.txt")
            assert text.strip() == str(sum(amounts)), f"total.txt of {number} has {text[:80]!r}"
            return end

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(total(number)) for number in range(1, FILES + 1)]
    return [task.result() for task in tasks]


Task = Callable[[Runtime, Model, OnStep], Awaitable[list[AgentRunEnd]]]
TASKS: dict[str, Task] = {
    "analysis": analysis,
    "suite": suite,
    "scrape": scrape,
    "files": files,
}


@dataclass
class Steps:
    count: int = 0

    def __call__(self, _: object) -> None:
        self.count += 1


async def main(names: list[str], *, live: bool) -> None:
    async with Runtime() as runtime:
        for name in names:
            recording = RECORDINGS / f"{name}.json"
            model = make_model(read_agent_settings()) if live else ReplayModel.load(recording)
            steps = Steps()
            try:
                ends = await TASKS[name](runtime, model, steps)
            finally:
                await model.close()
            print(f"{name}: {len(ends)} runs done in {steps.count} steps")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", nargs="*", metavar="TASK", help=f"{', '.join(TASKS)}; default: all")
    parser.add_argument("--live", action="store_true", help="ask the model of the environment")
    options = parser.parse_args()
    if unknown := set(options.task) - TASKS.keys():
        parser.error(f"unknown task: {', '.join(sorted(unknown))}")
    asyncio.run(main(options.task or list(TASKS), live=options.live))
