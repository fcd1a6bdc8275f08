"""Templates of prompts: those that sbx has, and those of an owner."""

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from sbx.aio import Clock
from sbx.errors import Conflict, NotFound, Unavailable
from sbx.store import Store, console
from sbx.store.console import TemplateRow as TemplateRow

_PER_OWNER = 200


def _built_in(
    name: str, title: str, description: str, prompt: str, **variables: str
) -> TemplateRow:
    labels = [
        {"name": key, "label": key.replace("_", " ").capitalize(), "default": default}
        for key, default in variables.items()
    ]
    return TemplateRow(f"built-in-{name}", "", title, description, prompt, labels, None, None, 0.0)


BUILT_IN: Sequence[TemplateRow] = (
    _built_in(
        "summarise",
        "Summarise a table",
        "Describe the columns, the missing values and the main figures of a file.",
        "Read the uploaded file {{file}}. Describe its columns, their types and the missing values,"
        " and summarise the main figures in a short table.",
        file="data.csv",
    ),
    _built_in(
        "clean",
        "Clean a CSV file",
        "Fix types, names and duplicates, and write a clean copy.",
        "Clean the uploaded file {{file}}: give the columns consistent names, fix their types,"
        " remove duplicate rows, and list all other problems. Write the result as {{result}}.",
        file="data.csv",
        result="clean.csv",
    ),
    _built_in(
        "chart",
        "Draw a chart",
        "Show one question about a file as a chart.",
        "Read the uploaded file {{file}} and draw a chart that answers this question:"
        " {{question}} Label the axes and explain the chart in two sentences.",
        file="data.csv",
        question="How do the values change over time?",
    ),
    _built_in(
        "explain",
        "Explain and fix code",
        "Run a script, explain its error and fix it.",
        "Run {{file}}, explain its error, fix it, and show the changed lines and the new output.",
        file="script.py",
    ),
    _built_in(
        "compare",
        "Compare two files",
        "List the differences between two files.",
        "Compare {{first}} with {{second}}. List the differences in their structure and their"
        " values, the most important one first.",
        first="before.csv",
        second="after.csv",
    ),
)


class PromptTemplates:
    """The templates of a service. A missing template is NotFound, a change of a built-in one
    Conflict `built_in`."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock

    async def list_for(self, owner: str) -> Sequence[TemplateRow]:
        """Return the built-in templates, and those of the owner, the oldest first."""
        return [*BUILT_IN, *await console.templates_of(self._store, owner)]

    async def get(self, owner: str, template_id: str) -> TemplateRow:
        for row in await self.list_for(owner):
            if row.id == template_id:
                return row
        raise NotFound(f"template {template_id[:80]!r} does not exist")

    async def add(self, owner: str, fields: Mapping[str, Any]) -> TemplateRow:
        """Raise Unavailable `too_many_templates`."""
        if len(await console.templates_of(self._store, owner)) >= _PER_OWNER:
            raise Unavailable(
                f"there are {_PER_OWNER} templates, which is the limit",
                code="too_many_templates",
                hint="delete some that are no longer needed",
                details={"limit": _PER_OWNER},
            )
        at = self._clock.now()
        row = TemplateRow(
            id=f"template-{secrets.token_hex(8)}", owner=owner, created_at=at, **fields
        )
        await console.put_template(self._store, row)
        return row

    async def change(self, owner: str, template_id: str, fields: Mapping[str, Any]) -> TemplateRow:
        row = replace(await self._own(owner, template_id), **fields)
        await console.put_template(self._store, row)
        return row

    async def delete(self, owner: str, template_id: str) -> None:
        """Delete a template; a second time does nothing."""
        if template_id in {row.id for row in BUILT_IN}:
            raise _is_built_in()
        await console.delete_template(self._store, template_id, owner)

    async def _own(self, owner: str, template_id: str) -> TemplateRow:
        row = await self.get(owner, template_id)
        if row in BUILT_IN:
            raise _is_built_in()
        return row


def _is_built_in() -> Conflict:
    return Conflict(
        "this template is part of sbx", code="built_in", hint="make a copy, and change the copy"
    )
