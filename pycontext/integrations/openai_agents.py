"""A session for OpenAI's Agents SDK: `Runner.run(agent, input, session=ChatSession("conv_9", db))`.

Needs the SDK: extra `openai-agents`.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from agents.memory import SessionSettings

from pycontext import operations
from pycontext.async_chat import AsyncDatabase
from pycontext.errors import BadMessage, NoSuchChat
from pycontext.items import KEY, to_items, to_messages, window_items
from pycontext.messages import Id, identity, to_json
from pycontext.replies import fields_of
from pycontext.rows import ThreadRow

if TYPE_CHECKING:
    from agents import TResponseInputItem

__all__ = ["ChatSession"]

_LOOK_BACK = 20


class ChatSession:
    """A chat as the SDK's `Session`: what a run reads of it is the chat's window, compacted when it is due.

    While everything fits, `get_items` returns the items that were added, all of them and equal to what they
    were. Once it does not, it is what `working_window` reads: the head and the newest part still the items
    that were added, and in place of what lies between a user message with the summary, or with what was left
    out and how to find it. Reasoning is left out of older turns, old tool results are told in a line.

    session_id: the chat, made by the first `add_items`.
    token_budget: the most tokens the items may take; None means the profile's. The SDK sends the agent's
        instructions, tools and the new input on top: what the profile keeps free should have room for them.
    compact: 'after' compacts after a reply is stored, where it is due; 'off' leaves it to a worker.
    session_settings: its limit is how many of the newest items `get_items` returns.
    profile, tenant, owner: for a chat that isn't there.
    """

    session_settings: SessionSettings | None

    def __init__(
        self,
        session_id: Id,
        db: AsyncDatabase,
        *,
        token_budget: int | None = None,
        compact: str | None = "after",
        session_settings: SessionSettings | None = None,
        profile: str | None = None,
        tenant: str | None = None,
        owner: str | None = None,
    ) -> None:
        if compact not in ("after", "off", None):
            raise ValueError(f"compact must be 'after', 'off' or None, not {compact!r}")
        self.session_id = identity(session_id, "session_id")
        self.session_settings = session_settings or SessionSettings()
        self._db = db
        self._token_budget = token_budget
        self._compact = compact
        self._made_with: dict[str, Any] = {"profile": profile, "tenant": tenant, "owner": owner}

    async def get_items(self, limit: int | None = None) -> list[TResponseInputItem]:
        """The window as Responses items, or the newest `limit` of them. A session that isn't there has none.

        Raises BudgetTooSmall. SQL: working_window.
        """
        if limit is None and self.session_settings is not None:
            limit = self.session_settings.limit
        if limit is not None and limit <= 0:
            return []
        try:
            rows = await self._db._run(operations.window_items(self.session_id, self._token_budget))
        except NoSuchChat:
            return []
        found: list[Any] = list(window_items(rows))
        return found if limit is None else found[-limit:]

    async def add_items(self, items: list[TResponseInputItem]) -> None:
        """Store items, all or none of them; durable when this returns.

        After a reply the chat is compacted where that is due: a failure there is logged, never raised. Raises
        BadMessage, AdoptedChat. SQL: append_messages.
        """
        if not items:
            return
        elements = to_messages(map(_added, items))
        try:
            await self._db.append(self.session_id, elements)
        except NoSuchChat:
            await self._db.create_chat(self.session_id, **self._made_with)
            await self._db.append(self.session_id, elements)
        if (
            self._compact == "after"
            and elements[-1]["role"] == "assistant"
            and "tool_calls" not in elements[-1]
        ):
            async with self._db.turn(self.session_id, token_budget=self._token_budget):
                pass

    async def pop_item(self) -> TResponseInputItem | None:
        """Take back the newest item and return it as it was added; None where there is none.

        The chat is rewound: the message is kept, set aside, and a summary placed after it goes with it. Never
        above the line where the user started over. What others add at the same moment is set aside too.
        Of several items of one message the others are stored anew, in the same transaction.
        SQL: rewind_chat, append_messages.
        """
        while True:
            try:
                rows = await self._db.thread(self.session_id, max_rows=_LOOK_BACK)
            except NoSuchChat:
                return None
            place = next((at for at in reversed(range(len(rows))) if rows[at].kind == "message"), None)
            if place is None or any(row.origin == "reset" for row in rows[place:]):
                return None
            before = next((row.message_id for row in reversed(rows[:place]) if row.kind == "message"), "")
            item: Any
            *rest, item = to_items(_stored(rows[place]))
            steps = operations.take_back(self.session_id, before, to_messages(rest), self._db._encodings)
            with suppress(BadMessage):  # another took these rows back meanwhile, and before, too
                if await self._db._run(steps):
                    return item  # type: ignore[no-any-return]

    async def clear_session(self) -> None:
        """Delete the chat, with all that was derived from it. To keep it and draw a line: `db.start_over`.

        SQL: delete_chat.
        """
        with suppress(NoSuchChat):
            await self._db.delete_chat(self.session_id)


def _added(item: Any) -> dict[str, Any]:
    """An item as a dict. Raises BadMessage where it is none."""
    fields = fields_of(item)
    is_reference = fields.keys() <= {"id", "type"} and bool(fields.get("id"))  # whose type may be left out
    is_message = fields.get("type") in (None, "message") and not is_reference
    if is_message and fields.get("role") not in ("user", "assistant", "system", "developer"):
        raise BadMessage(
            "an item needs a type, or a role that a message can have",
            detail=f"got {to_json(fields)[:200]}",
            hint="pass items of the Responses API: {'role': 'user', 'content': …}, {'type': …}",
        )
    return fields


def _stored(row: ThreadRow) -> dict[str, Any]:
    """A stored row as `to_items` takes it."""
    return {
        "role": row.role,
        "content": row.content,
        "tool_calls": row.tool_calls,
        "tool_call_id": row.tool_call_id,
        KEY: (row.metadata or {}).get(KEY),
    }
