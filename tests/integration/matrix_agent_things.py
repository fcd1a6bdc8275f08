"""The things of agents and projects: see matrix_things.py. The model is scripted."""

import json
from typing import Any

from agent_calls import calls
from command import in_process
from matrix_places import PATIENCE_S, error_of
from matrix_things import STARTED, Stream, Thing
from sessions_calls import API, until

from sbx.agent.messages import Response

_LONG = f"import time\nprint({STARTED!r}, flush=True)\ntime.sleep(600)"


class AgentThing(Thing):
    """A thing that the chat of an agent makes."""

    project: str | None = None

    @property
    def chat(self) -> str:
        """Of the conversation with the agent."""
        return f"{API}/conversations/{self.conversation}"

    @property
    def pair(self) -> dict[str, str]:
        return {"user_id": self.user, "agent_id": self.agent}

    async def make_project(self, name: str) -> str:
        self.directory = self.place.directory(f"work-{self.conversation}")
        body = {"name": name, "working_directory": str(self.directory)}
        reply = await self.call("POST", f"{API}/projects", json=body)
        self.project = reply.json()["id"]
        self.ids.add(self.project)
        return error_of(reply)

    def start(self, message: str, *answers: Response) -> Stream:
        """Send a message; the model gives these answers."""
        self.place.model.add(self.conversation, *answers)
        body: dict[str, Any] = {
            **self.pair,
            "conversation_id": self.conversation,
            "message": f"{message} ({self.conversation})",
            "project_id": self.project,
        }
        return self.stream(f"{API}/chat", body)

    async def say(self, message: str, *answers: Response) -> str:
        """Send a message, and return how the run of the agent ends."""
        return str((await self.start(message, *answers).end()).get("reason"))

    async def begin(self) -> None:
        self.running = self.start("work", calls(("run_code", {"code": _LONG})), Response("late"))
        await self.running.until(STARTED)

    async def begin_to_wait(self, command: str) -> str:
        """Let an agent wait for a decision on a command in its project; return the call."""
        answer = calls(("execute_command", {"command": command}))
        self.running = self.start("work", answer, Response("done"))
        waiting: list[str] = []

        async def waits() -> bool:
            reply = await self.call("GET", f"{API}/approvals", params={"limit": 200})
            waiting.extend(
                item["tool_call_id"]
                for item in reply.json()["items"]
                if item["conversation_id"] == self.conversation
            )
            return bool(waiting)

        await until(waits, PATIENCE_S)
        return waiting[0]

    async def abort(self) -> None:
        await self.call("POST", f"{API}/chat/{self.conversation}/abort", params=self.pair)

    async def end(self) -> str:
        assert self.running is not None
        return str((await self.running.end()).get("reason"))

    async def delete_chat(self) -> str:
        return await self.ask("DELETE", self.chat, params=self.pair)


class ChatThing(AgentThing):
    async def prepare(self) -> None:
        """The first message creates the session."""

    async def create(self) -> str:
        answer = await self.say(self.mark, Response(f"answer {self.mark}"))
        await self.learn_ids()
        return answer

    async def use(self) -> str:
        code = f"open('{self.mark}', 'w').write('{self.mark}'); print('{self.mark}')"
        return await self.say("work", calls(("run_code", {"code": code})), Response("done"))

    async def look(self) -> str:
        reply = await self.call("GET", f"{self.chat}/messages", params=self.pair)
        return "200" if reply.status_code == 200 else error_of(reply)

    async def delete(self) -> str:
        return await self.delete_chat()

    async def before_restart(self) -> None:
        await self.begin()


class ProjectThing(AgentThing):
    """The user's directory has a file with the marker, too."""

    async def create(self) -> str:
        answer = await self.make_project(self.mark)
        (self.directory / self.mark).write_text(self.mark)
        return answer

    async def use(self) -> str:
        """Chat in it, with an upload to the conversation."""
        answer = await self.say(self.mark, Response(f"answer {self.mark}"))
        await self.ask(
            "POST",
            f"{self.url}/files/upload",
            data={"conversation_id": self.conversation},
            files={"file": (f"{self.mark}.txt", self.mark.encode())},
        )
        return answer

    async def look(self) -> str:
        return await self.ask("GET", f"{API}/projects/{self.project}")

    async def delete(self) -> str:
        return await self.ask("DELETE", f"{API}/projects/{self.project}")

    async def begin(self) -> None:
        await self.begin_to_wait("echo > made.txt")


class ApprovalThing(AgentThing):
    """A command that waits for a decision."""

    call_id = ""

    async def prepare(self) -> None:
        await super().prepare()
        await self.make_project("directory")

    @property
    def _command(self) -> str:
        return f"echo {self.mark} > made.txt"

    async def create(self) -> str:
        self.call_id = await self.begin_to_wait(self._command)
        self.ids.add(self.call_id)
        return "asks"

    async def ready(self) -> None:
        await self.create()

    async def decide(self, **more: Any) -> str:
        body = {"approved": True, **more}
        answer = await self.ask("POST", f"{API}/approvals/{self.call_id}", json=body)
        assert self.running is not None
        await self.running.end()
        return answer

    async def use(self) -> str:
        return await self.decide()

    async def look(self) -> str:
        reply = await self.call("GET", f"{API}/approvals/{self.call_id}")
        if reply.status_code != 200:
            return error_of(reply)
        if (decision := reply.json()["decision"]) is None:
            return "200 pending"
        by = decision["by"]
        return f"200 {'approved' if decision['approved'] else f'denied by {by}'}"

    async def delete(self) -> str:
        return await self.delete_chat()

    async def begin(self) -> None:
        """Its agent waits already."""

    async def idle(self) -> None:
        await self._time_out()
        await super().idle()

    async def expire(self) -> None:
        """A session does not expire while its agent waits."""
        await self._time_out()
        await super().expire()

    async def _time_out(self) -> None:
        await self.place.later(601)
        await self.end()


class RuleThing(ApprovalThing):
    """A command that needs no approval any longer: its rule was remembered for the project."""

    id = ""

    async def create(self) -> str:
        await super().create()
        answer = await self.decide(remember="exact")
        reply = await self.call("GET", f"{API}/approvals/rules", params={"limit": 200})
        (rule,) = [each for each in reply.json()["items"] if self.mark in str(each)]
        self.id = rule["id"]
        self.ids.add(self.id)
        return answer

    async def ready(self) -> None:
        await self.create()
        await self.use()

    async def use(self) -> str:
        command = calls(("execute_command", {"command": self._command}))
        return await self.say("again", command, Response("done"))

    async def look(self) -> str:
        reply = await self.call("GET", f"{API}/approvals/rules", params={"limit": 200})
        ids = [each["id"] for each in reply.json()["items"]]
        return "200 listed" if self.id in ids else "200 not listed"

    async def delete(self) -> str:
        return await self.ask("DELETE", f"{API}/approvals/rules/{self.id}")

    async def begin(self) -> None:
        await self.begin_to_wait("echo > made.txt")

    async def end(self) -> str:
        """Abort what continues after the deletion of the rule."""
        await self.abort()
        return await super().end()

    async def _time_out(self) -> None:
        pass


class QuarantineThing(AgentThing):
    """A file that a program of the host would obey. Its content has the marker, its command not."""

    id = ""

    async def prepare(self) -> None:
        await super().prepare()
        await self.make_project("directory")

    async def create(self) -> str:
        command = f"printf %s%s {self.mark[:8]} {self.mark[8:]} > .envrc"
        answer = await self.say(
            "work", calls(("execute_command", {"command": command})), Response("done")
        )
        self.id = await self._find()
        self.ids.add(self.id)
        return answer

    async def _find(self) -> str:
        listed = in_process("quarantine", "list", "--json", "--data-dir", self.place.data)
        items = json.loads(listed.stdout)["items"]
        (item,) = [each for each in items if each["directory"] == str(self.directory)]
        return str(item["id"])

    async def use(self) -> str:
        return await self.look()

    async def look(self) -> str:
        answer = await self.ask("GET", f"{API}/quarantine/{self.id}")
        if answer != "503 quarantine_elsewhere":
            return answer
        shown = in_process("quarantine", "show", self.id, "--data-dir", self.place.data)
        return "200" if shown.returncode == 0 else f"404 {shown.stderr}"

    async def begin(self) -> None:
        await self.begin_to_wait("echo > made.txt")

    async def before(self, act: str) -> None:
        """Let its sandbox end, unless the agent works in it."""
        if act == "delete":
            await self.idle()
        await super().before(act)

    async def delete(self) -> str:
        return await self.ask("DELETE", f"{API}/quarantine/{self.id}")


class SubAgentThing(AgentThing):
    """The work of another agent, in a sandbox of its own. No message has the marker."""

    agent = "delegating"

    @property
    def _file(self) -> str:
        return f"word = {self.mark[:8]!r} + {self.mark[8:]!r}\nopen(word, 'w').write(word)\n"

    async def create(self) -> str:
        return await self.say(
            "delegate",
            calls(("delegate", {"task": f"write a file ({self.conversation})"})),
            calls(("run_code", {"code": self._file})),
            Response("it is written"),
            Response("done"),
        )

    async def use(self) -> str:
        return await self.create()

    async def look(self) -> str:
        reply = await self.call("GET", f"{self.chat}/runs", params=self.pair)
        if reply.status_code != 200:
            return error_of(reply)
        run = reply.json()["items"][0]
        return f"200 {run['reason'] or run['status']}"

    async def begin(self) -> None:
        self.running = self.start(
            "delegate",
            calls(("delegate", {"task": f"write a file ({self.conversation})"})),
            calls(("run_code", {"code": self._file + _LONG})),
        )
        await self.running.until("run_code")
        await until(self._wrote, PATIENCE_S)

    async def _wrote(self) -> bool:
        return "files" in await self.place.where(self.mark, "")

    async def delete(self) -> str:
        return await self.delete_chat()

    async def before(self, act: str) -> None:
        if act in ("stop", "delete while it runs"):
            await self.begin()

    async def stop(self) -> str:
        answer = await super().stop()
        await self.end()
        return answer

    async def before_restart(self) -> None:
        await self.begin()
