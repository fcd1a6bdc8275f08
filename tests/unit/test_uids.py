"""The files of two workspaces never belong to one uid of the host."""

from functools import partial
from pathlib import Path

import pytest

from sbx.errors import Unavailable
from sbx.service import workspaces
from sbx.service.workspaces import own_uid
from sbx.store import Store
from sbx.store import workspaces as workspaces_table
from sbx.store.workspaces import WorkspaceRow


async def test_uid_of_a_workspace_is_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workspaces, "_UID_ATTEMPTS", 64)
    async with await Store.open(tmp_path / "sbx.db") as store:
        for name in ("a", "b", "c"):
            workspace = WorkspaceRow(name, "me", None, name, None, None, 1, 1)
            await store.write(partial(workspaces_table.add_workspace, row=workspace))
        first = await own_uid(store, "a", (1000, 2))
        second = await own_uid(store, "b", (1000, 2))
        assert {first, second} == {1000, 1001}
        assert await own_uid(store, "a", (1000, 2)) == first
        with pytest.raises(Unavailable, match="nearly every host uid"):
            await own_uid(store, "c", (1000, 2))
        await store.write(lambda on: workspaces_table.free_uid(on, "a"))
        assert await own_uid(store, "c", (1000, 2)) == first
