"""The conversations on disk: SQLite in WAL mode, and one writer thread for what may wait.

What the user typed is committed before anything is generated; a reply that is being written is
committed about once a second by ``autosave``. A damaged database is set aside, never deleted, and
the chat goes on.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from . import paths
from .conversation import ChatMessage, Conversation, Role, Span, State

# Migration n takes a database from version n to n + 1 (``PRAGMA user_version``). Databases from
# before versions were counted have version 0 and these tables already.
_MIGRATIONS = (
    """
CREATE TABLE IF NOT EXISTS sessions (
    id INTEGER PRIMARY KEY,
    title TEXT NOT NULL DEFAULT '',
    system TEXT NOT NULL DEFAULT '',
    model TEXT NOT NULL DEFAULT '',
    draft TEXT NOT NULL DEFAULT '',
    created REAL NOT NULL,
    updated REAL NOT NULL
);
CREATE TABLE IF NOT EXISTS messages (
    id INTEGER PRIMARY KEY,
    session INTEGER NOT NULL REFERENCES sessions(id) ON DELETE CASCADE,
    role TEXT NOT NULL,
    text TEXT NOT NULL,
    state TEXT NOT NULL,
    note TEXT NOT NULL DEFAULT '',
    stats TEXT NOT NULL DEFAULT '{}',
    spans TEXT NOT NULL DEFAULT '[]',
    thinking INTEGER NOT NULL DEFAULT 0,
    created REAL NOT NULL
);
CREATE INDEX IF NOT EXISTS messages_by_session ON messages(session, id);
""",
)


@dataclass(frozen=True, slots=True)
class SessionEntry:
    """One line of the list of sessions; ``hit`` shows where a search matched."""

    session: int
    title: str
    model: str
    updated: float
    messages: int
    hit: str = ""


class SessionStore:
    """All conversations. ``path`` None keeps them in memory only."""

    def __init__(self, path: Path | None) -> None:
        self.problem = ""
        self._path = path
        self._lock = threading.RLock()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="sessions")
        self._db = self._open(path)

    def _open(self, path: Path | None) -> sqlite3.Connection:
        if path is not None:
            try:
                paths.make_private(path.parent)
                return _connect(str(path))
            except (sqlite3.OperationalError, OSError) as error:
                self.problem = f"chats are not saved: {path}: {error}"
            except sqlite3.DatabaseError:
                return self._start_anew(path)
        return _connect(":memory:")

    def _start_anew(self, path: Path) -> sqlite3.Connection:
        """Set a damaged database aside and open a new one in its place."""
        aside = path.with_name(f"{path.name}.broken-{int(time.time())}")
        for end in ("", "-wal", "-shm"):  # the last two belong to it, where they are
            with contextlib.suppress(FileNotFoundError):
                path.with_name(path.name + end).replace(f"{aside}{end}")
        self.problem = f"the saved chats are damaged; kept as {aside}"
        return _connect(str(path))

    def _read(self, sql: str, values: Any = ()) -> list[Any]:
        """All rows; none if the database turns out to be damaged, which is then set aside."""
        with self._lock:
            try:
                return self._db.execute(sql, values).fetchall()
            except sqlite3.DatabaseError as error:
                if isinstance(error, sqlite3.OperationalError) or self._path is None:
                    raise
                self._db.close()
                self._db = self._start_anew(self._path)
                return []

    # Writing

    def save(self, conversation: Conversation, model: str = "") -> int:
        """Write the session row and every message not yet written; returns the session's id."""
        now = time.time()
        values = (conversation.title, conversation.system, model, conversation.draft, now)
        with self._lock, self._db:
            if conversation.session is None:
                conversation.session = self._db.execute(
                    "INSERT INTO sessions (title, system, model, draft, updated, created)"
                    " VALUES (?, ?, ?, ?, ?, ?)",
                    (*values, now),
                ).lastrowid
            else:
                self._db.execute(
                    "UPDATE sessions SET title=?, system=?, model=?, draft=?, updated=? WHERE id=?",
                    (*values, conversation.session),
                )
            for message in conversation.messages:
                if message.row is None:
                    message.row = self._db.execute(
                        "INSERT INTO messages (session, role, text, state, note, stats, spans,"
                        " thinking, created) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                        (conversation.session, message.role, *_columns(message), now),
                    ).lastrowid
        assert conversation.session is not None
        return conversation.session

    def update(self, message: ChatMessage) -> None:
        """Write a message's present text, state and figures."""
        if message.row is None:
            return
        self._write(
            "UPDATE messages SET text=?, state=?, note=?, stats=?, spans=?, thinking=? WHERE id=?",
            (*_columns(message), message.row),
        )

    def update_text(self, row: int, text: str) -> None:
        self._write("UPDATE messages SET text=? WHERE id=?", (text, row))

    def save_draft(self, session: int, draft: str) -> None:
        self._write("UPDATE sessions SET draft=? WHERE id=?", (draft, session))

    def rename(self, session: int, title: str) -> None:
        self._write("UPDATE sessions SET title=? WHERE id=?", (title, session))

    def delete(self, session: int) -> None:
        self._write("DELETE FROM sessions WHERE id=?", (session,))

    def forget(self, messages: list[ChatMessage]) -> None:
        """Remove messages that were replaced (regenerated, or after an edited turn)."""
        with self._lock, self._db:
            self._db.executemany(
                "DELETE FROM messages WHERE id=?", [(m.row,) for m in messages if m.row is not None]
            )

    def _write(self, sql: str, values: tuple[object, ...]) -> None:
        with self._lock, self._db:
            self._db.execute(sql, values)

    def autosave(self, conversation: Conversation, model: str) -> None:
        """Save what a growing reply and the draft have changed by since the last time."""
        reply = conversation.reply
        if reply and reply.streaming and reply.row and len(reply.text) != reply.saved_length:
            reply.saved_length = len(reply.text)
            self.later(self.update_text, reply.row, reply.text)
        if conversation.draft != conversation.saved_draft:
            conversation.saved_draft = conversation.draft
            if conversation.session is not None:
                self.later(self.save_draft, conversation.session, conversation.draft)
            elif conversation.draft.strip():
                self.save(conversation, model)

    def later(self, work: Callable[..., None], *values: object) -> Future[None]:
        """Run one of the methods above on the writer thread, in order."""
        return self._writer.submit(work, *values)

    # Reading

    def entries(self, search: str = "", limit: int = 500) -> list[SessionEntry]:
        """Newest first; with ``search``, those whose title or any message contains it."""
        pattern = "%" + search.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_") + "%"
        rows = self._read(
            """
                SELECT s.id, s.title, s.model, s.updated,
                       (SELECT count(*) FROM messages m WHERE m.session = s.id),
                       CASE WHEN :search = '' THEN '' ELSE coalesce((
                           SELECT substr(m.text, max(1, instr(lower(m.text), lower(:search)) - 20),
                                         80)
                           FROM messages m WHERE m.session = s.id AND m.text LIKE :like ESCAPE '\\'
                           ORDER BY m.id LIMIT 1), '') END AS hit
                FROM sessions s
                WHERE :search = '' OR s.title LIKE :like ESCAPE '\\' OR hit != ''
                ORDER BY s.updated DESC, s.id DESC LIMIT :limit
                """,
            {"search": search, "like": pattern, "limit": limit},
        )
        return [_entry(*row) for row in rows]

    def load(self, session: int) -> Conversation | None:
        """The conversation, or None when it is gone. A reply cut off by a kill says so."""
        heads = self._read("SELECT title, system, draft FROM sessions WHERE id=?", (session,))
        rows = self._read(
            "SELECT id, role, text, state, note, stats, spans, thinking FROM messages"
            " WHERE session=? ORDER BY id",
            (session,),
        )
        if not heads:
            return None
        title, system, draft = map(_text, heads[0])
        messages = list(map(_message, rows))
        return Conversation(session, title, system, draft, messages, saved_draft=draft)

    def unsent(self) -> int | None:
        """The newest session, if it is nothing but a draft that was never sent."""
        newest = next(iter(self.entries(limit=1)), None)
        if newest is None or newest.messages:
            return None
        drafts = self._read("SELECT draft FROM sessions WHERE id=?", (newest.session,))
        return newest.session if drafts and _text(drafts[0][0]).strip() else None

    def inputs(self, limit: int = 200) -> list[str]:
        """What was typed lately in any session, oldest first, without repetitions in a row."""
        rows = self._read(
            "SELECT text FROM messages WHERE role='user' ORDER BY id DESC LIMIT ?", (limit,)
        )
        texts = [_text(text) for (text,) in reversed(rows)]
        return [text for i, text in enumerate(texts) if i == 0 or texts[i - 1] != text]

    def close(self) -> None:
        self._writer.shutdown(wait=True)
        with self._lock:
            self._db.close()


def _connect(path: str) -> sqlite3.Connection:
    """Open a database and bring it to the newest version.

    Raises OperationalError for one that a newer program has changed.
    """
    db = sqlite3.connect(path, timeout=5.0, check_same_thread=False)
    db.text_factory = lambda raw: raw.decode("utf-8", "replace")
    try:
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=NORMAL")
        db.execute("PRAGMA foreign_keys=ON")
        (version,) = db.execute("PRAGMA user_version").fetchone()
        if version > len(_MIGRATIONS):
            raise sqlite3.OperationalError("a newer version of the program made it")
        for number, script in enumerate(_MIGRATIONS[version:], version + 1):
            db.executescript(f"BEGIN IMMEDIATE;{script};PRAGMA user_version={number};COMMIT;")
    except sqlite3.DatabaseError:
        db.close()
        raise
    return db


def _entry(id: int, title: Any, model: Any, updated: Any, messages: int, hit: Any) -> SessionEntry:
    when = float(updated) if isinstance(updated, int | float) else 0.0
    return SessionEntry(id, _text(title), _text(model), when, messages, _text(hit))


def _message(row: tuple[Any, ...]) -> ChatMessage:
    """A message from its row. If its figures cannot be read, its text is kept."""
    id, role, text, state, note, stats, spans, thinking = row
    try:
        figures = dict(json.loads(stats))
        marks: list[Span] = [(str(piece), str(origin), c) for piece, origin, c in json.loads(spans)]
    except (ValueError, TypeError):
        figures, marks = {}, []
    ended = state in get_args(State) and state != "streaming"
    return ChatMessage(
        role=role if role in get_args(Role) else "assistant",
        text=_text(text),
        state=state if ended else "interrupted",
        note=_text(note),
        stats=figures,
        spans=marks,
        expects_thinking=bool(thinking),
        row=id,
    )


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _columns(message: ChatMessage) -> tuple[object, ...]:
    return (
        message.text,
        message.state,
        message.note,
        json.dumps(message.stats),
        json.dumps(message.spans, ensure_ascii=False),
        int(message.expects_thinking),
    )
