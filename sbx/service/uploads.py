"""Uploads of users: the same functions for every surface of the API.

An upload is a file on the disk, a row with its owner, and an audit line. The file counts: a row may
be late, or outlive its file. The caller of a function holds the lease of the sandbox.
"""

from collections.abc import AsyncIterator, Sequence

from sbx.errors import NotFound
from sbx.protocol.files import Upload
from sbx.service.caller import Caller
from sbx.service.leases import SandboxLease
from sbx.service.models import SandboxView
from sbx.service.notices import Notice, Notices
from sbx.service.recording import Recording
from sbx.service.sandboxes import Sandboxes
from sbx.service.session_rules import FileRules
from sbx.store import Store
from sbx.store import uploads as rows
from sbx.store.uploads import UploadRow
from sbx.workspace.uploads import UploadLimits


class UserUploads:
    """The uploads of all sandboxes of a service."""

    def __init__(
        self, store: Store, sandboxes: Sandboxes, recording: Recording, notices: Notices
    ) -> None:
        self._store = store
        self._sandboxes = sandboxes
        self._recording = recording
        self._notices = notices

    async def store(
        self,
        use: SandboxLease,
        conversation: str,
        name: str,
        chunks: AsyncIterator[bytes],
        *,
        of_session: bool = False,
    ) -> Upload:
        """Store an upload in a conversation, created if need be. Replace the upload of this name in
        one step. Raise as `put` of `sbx.workspace.uploads`.

        `of_session`: the caller named the session, so the audit line does as well.
        """
        uploads = use.conversation(conversation).uploads
        upload = await uploads.put_stream(name, chunks, limits_of(await use.view()))
        await self._stored(use, conversation, upload, of_session)
        return upload

    async def finish(
        self, use: SandboxLease, conversation: str, partial_id: str, sha256: str
    ) -> Upload:
        """Store a resumable upload that is complete. Raise as `store`."""
        target = use.conversation(conversation)
        partials, limits = target.files.partials, limits_of(await use.view())
        upload = await target.uploads.put_partial(partials, partial_id, sha256, limits)
        await self._stored(use, conversation, upload, of_session=False)
        return upload

    async def delete(
        self, use: SandboxLease, conversation: str, name: str, *, of_session: bool = False
    ) -> None:
        """Raise NotFound."""
        await use.conversation(conversation).uploads.delete(name)
        await rows.forget(self._recording.pending, use.id, conversation, name)
        await self._store.fold()
        record = self._recording.record_session if of_session else self._recording.record_sandbox
        await record(
            use.caller, "upload.delete", (await use.view()), conversation=conversation, name=name
        )
        self._announce(await use.view(), conversation)

    async def conversations_with(
        self, caller: Caller, view: SandboxView, name: str
    ) -> Sequence[str]:
        """Return the conversations within the caller's bounds that have an upload of this name."""
        matches = []
        async with self._sandboxes.using(
            caller, view.id, scope="files:read", starts=False, kept=True
        ) as use:
            for conversation in await rows.conversations_with(self._store, view.id, name):
                if not caller.sees(view.user_id, view.agent_id, conversation):
                    continue
                try:
                    await use.conversation(conversation).uploads.get(name)
                except NotFound:
                    continue  # an operator may have removed the file
                matches.append(conversation)
        return matches

    async def _stored(
        self, use: SandboxLease, conversation: str, upload: Upload, of_session: bool
    ) -> None:
        row = UploadRow(
            use.id,
            conversation,
            upload.name,
            upload.size,
            upload.sha256,
            upload.uploaded_at,
            use.caller.owner,
        )
        await rows.put(self._recording.pending, row)
        record = self._recording.record_session if of_session else self._recording.record_sandbox
        await record(
            use.caller,
            "upload.put",
            (await use.view()),
            conversation=conversation,
            name=upload.name,
            size=upload.size,
            sha256=upload.sha256,
        )
        self._announce(await use.view(), conversation)

    def _announce(self, view: SandboxView, conversation: str) -> None:
        body = {
            "type": "uploads.changed",
            "sandbox_id": view.id,
            "conversation_id": conversation,
        }
        bounds = view.user_id, view.agent_id, conversation
        self._notices.publish(Notice(view.owner, body, ("files:read",), *bounds))


def limits_of(view: SandboxView) -> UploadLimits | None:
    """Return the limits of a session. Without a session, those of the policy hold."""
    if not view.upload_limits:
        return None
    return FileRules.from_json(view.upload_limits).within(view.policy)
