"""Conversations in the database: how much of one, and of all, is taken."""

from pathlib import Path

import pytest

from server.batches import conversations
from server.batches.conversations import Conversations
from server.batches.folder import Folder, PageRequest
from server.batches.responses import KeptResponses
from server.errors import BadRequest, HttpError, NotFound

ITEM = {"role": "user", "content": "a" * 600}


def test_a_conversation_has_so_many_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversations, "MOST_BYTES", 1000)
    kept = Conversations(Folder(tmp_path, 1 << 30))
    id = kept.create("alice", {}, [ITEM]).id
    with pytest.raises(BadRequest, match="at most 1000 bytes in a conversation"):
        kept.add("alice", id, [ITEM])
    assert len(kept.items("alice", id)) == 1


def test_nothing_is_added_where_the_folder_is_full(tmp_path: Path) -> None:
    folder = Folder(tmp_path, 1 << 30)
    kept = Conversations(folder)
    id = kept.create("alice", {}, []).id
    folder.most_bytes = 1
    with pytest.raises(HttpError, match="full"):
        kept.add("alice", id, [ITEM])


def test_items_are_read_by_pages(tmp_path: Path) -> None:
    kept = Conversations(Folder(tmp_path, 1 << 30))
    id = kept.create("alice", {}, [{**ITEM, "id": name} for name in "abc"]).id
    for after, newest_first, ids, more in (
        (None, True, "cb", True),
        ("b", True, "a", False),
        (None, False, "ab", True),
        ("b", False, "c", False),
        ("x", False, "", False),
    ):
        found = kept.page("alice", id, PageRequest(after, 2, newest_first))
        assert (len(found.data), found.has_more) == (len(ids), more)
        assert (found.first_id, found.last_id) == ((ids[0], ids[-1]) if ids else (None, None))


def test_conversations_that_nobody_uses_are_forgotten_with_their_items(tmp_path: Path) -> None:
    kept = KeptResponses(Folder(tmp_path, 1 << 30), None)
    id = kept.conversations.create("alice", {}, [ITEM]).id
    kept.clean()
    assert len(kept.conversations.items("alice", id)) == 1
    with kept.folder.database.write() as writer:
        writer.execute("UPDATE conversations SET used_at = used_at - 31 * 86400")
    kept.clean()
    with pytest.raises(NotFound):
        kept.conversations.find("alice", id)
    assert kept.folder.database.read("SELECT * FROM items") == []
