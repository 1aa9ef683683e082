"""Conversations that are kept: metadata, and items that clients and the responses of a conversation add."""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection, Sequence
from typing import Any

import msgspec

from server.batches.bodies import Page, page_of
from server.batches.folder import Folder, PageRequest, new_id, not_found
from server.errors import too_many
from server.schemas.conversations.response_input import kind_of
from server.schemas.conversations.responses import MAX_ITEMS

MOST_BYTES = 64 << 20
"""Bytes of all items of a conversation, which is read as a whole."""

_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"}


class Conversation(msgspec.Struct):
    """A conversation as clients see it."""

    id: str
    created_at: int
    metadata: dict[str, str]
    object: str = "conversation"


class Conversations:
    """The conversations in the database of a folder. All functions block."""

    def __init__(self, folder: Folder) -> None:
        self._folder, self._database = folder, folder.database

    def create(self, owner: str, metadata: dict[str, str], items: Sequence[Any]) -> Conversation:
        """Begin a conversation. Raises an error if the folder is full, or the owner has too many."""
        self._folder.check_count("conversations", owner)
        self._folder.check_room()
        found = Conversation(new_id("conv_"), int(time.time()), metadata)
        with self._database.write(durable=False) as writer:
            writer.execute(
                "INSERT INTO conversations VALUES (?, ?, ?, ?, ?)",
                (found.id, owner, time.time(), time.time(), msgspec.json.encode(metadata)),
            )
            self._add(writer, found.id, items)
        return found

    def find(self, owner: str, id: str) -> Conversation:
        """The conversation of an id. Raises NotFound."""
        rows = self._database.read("SELECT * FROM conversations WHERE id = ? AND owner = ?", id, owner)
        if not rows:
            raise not_found("conversation", id)
        return Conversation(id, int(rows[0]["at"]), msgspec.json.decode(rows[0]["metadata"]))

    def update(self, owner: str, id: str, metadata: dict[str, str]) -> Conversation:
        """Give a conversation other metadata."""
        with self._database.write(durable=False) as writer:
            self._touch(writer, owner, id)
            given = (msgspec.json.encode(metadata), id)
            writer.execute("UPDATE conversations SET metadata = ? WHERE id = ?", given)
        return self.find(owner, id)

    def delete(self, owner: str, id: str) -> None:
        """Forget a conversation and its items."""
        with self._database.write() as writer:
            self._touch(writer, owner, id)
            writer.execute("DELETE FROM conversations WHERE id = ?", (id,))

    def items(self, owner: str, id: str) -> list[msgspec.Raw]:
        """The items of a conversation, the first one first. Raises NotFound."""
        self.find(owner, id)
        rows = self._database.read("SELECT item FROM items WHERE conversation = ? ORDER BY number", id)
        return [msgspec.Raw(row["item"]) for row in rows]

    def item(self, owner: str, id: str, item: str) -> bytes:
        """One item of a conversation. Raises NotFound."""
        self.find(owner, id)
        rows = self._database.read("SELECT item FROM items WHERE conversation = ? AND id = ?", id, item)
        if not rows:
            raise not_found("item", item)
        return rows[0]["item"]

    def page(self, owner: str, id: str, asked: PageRequest) -> Page[msgspec.Raw]:
        """The part of a conversation's items that is asked for; no others are read. Raises NotFound."""
        self.find(owner, id)
        beyond, order = ("<", "DESC") if asked.newest_first else (">", "ASC")
        which, values = "conversation = ?", [id]
        if asked.after is not None:
            which += f" AND number {beyond} (SELECT number FROM items WHERE conversation = ? AND id = ?)"
            values += [id, asked.after]
        ordered = f"{which} ORDER BY number {order} LIMIT ?"
        rows = self._database.read(f"SELECT id, item FROM items WHERE {ordered}", *values, asked.limit + 1)
        found = [(row["id"], msgspec.Raw(row["item"])) for row in rows[: asked.limit]]
        return page_of(found, len(rows) > asked.limit)

    def add(self, owner: str, id: str, items: Sequence[Any]) -> Page[msgspec.Raw]:
        """Add items behind the last one, and return them as clients see them. It is not waited for the disk.

        Raises an error if the conversation is no longer there or too long, or the folder is full, and OSError
        if the disk is.
        """
        self._folder.check_room()
        with self._database.write(durable=False) as writer:
            return page_of(self.add_in(writer, owner, id, items), more=False)

    def add_in(self, writer: Any, owner: str, id: str, items: Sequence[Any]) -> list[tuple[str, msgspec.Raw]]:
        """Add items in a transaction, and return them with their ids. Errors come before it writes."""
        self._touch(writer, owner, id)
        return self._add(writer, id, items)

    def delete_item(self, owner: str, id: str, item: str) -> Conversation:
        """Forget one item of a conversation."""
        with self._database.write(durable=False) as writer:
            self._touch(writer, owner, id)
            which = "DELETE FROM items WHERE conversation = ? AND id = ?"
            if not writer.execute(which, (id, item)).rowcount:
                raise not_found("item", item)
        return self.find(owner, id)

    def _touch(self, writer: Any, owner: str, id: str) -> None:
        """Note that a conversation is in use. Raises NotFound."""
        used = "UPDATE conversations SET used_at = ? WHERE id = ? AND owner = ?"
        if not writer.execute(used, (time.time(), id, owner)).rowcount:
            raise not_found("conversation", id)

    def _add(self, writer: Any, id: str, items: Sequence[Any]) -> list[tuple[str, msgspec.Raw]]:
        which = "SELECT id, length(item) AS bytes FROM items WHERE conversation = ?"
        rows = writer.execute(which, (id,)).fetchall()
        taken, before = {row["id"] for row in rows}, sum(row["bytes"] for row in rows)
        if len(taken) + len(items) > MAX_ITEMS:
            raise too_many("items", MAX_ITEMS, "items", len(taken) + len(items))
        added: dict[str, bytes] = {}
        for each in items:
            shown = as_shown(each, taken)
            taken.add(shown["id"])
            added[shown["id"]] = msgspec.json.encode(shown)
        new = sum(map(len, added.values()))
        if before + new > MOST_BYTES:
            raise too_many("items", MOST_BYTES, "bytes in a conversation", before + new)
        values = [(id, *each) for each in added.items()]
        writer.executemany("INSERT INTO items (conversation, id, item) VALUES (?, ?, ?)", values)
        self._folder.counted += new
        return [(each, msgspec.Raw(item)) for each, item in added.items()]


def as_shown(given: dict[str, Any], taken: Collection[str] = ()) -> dict[str, Any]:
    """An item of a request as clients see it: with an id of its own, a status, and content in parts."""
    item = {name: value for name, value in given.items() if value is not None}
    item = {"type": kind_of(item), "status": "completed", **item}
    if not isinstance(id := item.get("id"), str) or id in taken:
        item["id"] = f"{_PREFIXES.get(str(item.get('type')), 'item')}_{secrets.token_hex(16)}"
    if isinstance(text := item.get("content"), str):
        is_answer = item.get("role") == "assistant"
        kind = {"type": "output_text", "annotations": []} if is_answer else {"type": "input_text"}
        item["content"] = [{**kind, "text": text}]
    return item
