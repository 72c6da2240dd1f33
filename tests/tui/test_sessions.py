from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from scripted import finished, step

from tui.conversation import Conversation
from tui.session_store import SessionStore
from tui.settings import Settings


def talk(store: SessionStore, question: str, answer: str = "Yes.") -> Conversation:
    chat = Conversation()
    chat.ask(question)
    chat.request("r", Settings())
    store.save(chat, "toy")
    chat.apply(step("r", [answer]))
    chat.apply(finished("r"))
    store.update(chat.messages[-1])
    return chat


def test_a_conversation_comes_back_as_it_was(tmp_path: Path) -> None:
    store = SessionStore(tmp_path / "chat.sqlite3")
    chat = talk(store, "Why?", "Because [of] it 👩‍👧 \x1b[0m")
    chat.draft = "next"
    store.save(chat, "toy")
    store.close()
    store = SessionStore(tmp_path / "chat.sqlite3")
    again = store.load(chat.session or 0)
    assert again is not None
    assert [m.text for m in again.messages] == [m.text for m in chat.messages]
    assert again.messages[1].stats == chat.messages[1].stats
    assert again.messages[1].spans == chat.messages[1].spans
    assert (again.title, again.draft) == ("Why?", "next")
    store.close()


def test_search_finds_titles_and_messages_and_takes_signs_literally() -> None:
    store = SessionStore(None)
    talk(store, "About whales", "They are 100% mammals_x.")
    talk(store, "About ants", "Six legs.")
    assert [e.title for e in store.entries("mammals")] == ["About whales"]
    assert [e.title for e in store.entries("ANTS")] == ["About ants"]
    assert [e.title for e in store.entries("100%")] == ["About whales"]
    assert store.entries("_") == [e for e in store.entries("_") if e.title == "About whales"]
    assert store.entries("nothing") == []
    assert "mammals" in store.entries("mammals")[0].hit


def test_rename_and_delete_are_final_and_take_the_messages_along() -> None:
    store = SessionStore(None)
    chat = talk(store, "Why?")
    assert chat.session is not None
    store.rename(chat.session, "New title")
    assert store.entries()[0].title == "New title"
    store.delete(chat.session)
    assert store.entries() == [] and store.load(chat.session) is None
    store.update(chat.messages[-1])  # a late save of a deleted chat changes nothing
    assert store.entries() == []


def test_inputs_come_oldest_first_without_repetitions() -> None:
    store = SessionStore(None)
    for question in ("a", "b", "b", "c"):
        talk(store, question)
    assert store.inputs() == ["a", "b", "c"]


def test_a_reply_cut_off_by_a_kill_says_so() -> None:
    store = SessionStore(None)
    chat = Conversation()
    chat.ask("Why?")
    chat.request("r", Settings())
    store.save(chat, "toy")
    store.update_text(chat.messages[1].row or 0, "Half an ans")
    again = store.load(chat.session or 0)
    assert again is not None
    assert (again.messages[1].text, again.messages[1].state) == ("Half an ans", "interrupted")


def test_a_killed_process_loses_nothing_that_was_saved(tmp_path: Path) -> None:
    path = tmp_path / "chat.sqlite3"
    code = (
        "import sys, time; from pathlib import Path\n"
        "from tui.session_store import SessionStore; from tui.conversation import Conversation\n"
        "from tui.settings import Settings\n"
        "store = SessionStore(Path(sys.argv[1])); chat = Conversation(); chat.ask('Why?')\n"
        "chat.request('r', Settings()); store.save(chat, 'toy')\n"
        "store.later(store.update_text, chat.messages[1].row, 'Half').result()\n"
        "print('saved', flush=True); time.sleep(60)\n"
    )
    root = Path(__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, cwd=root, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "saved"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    store = SessionStore(path)
    again = store.load(store.entries()[0].session)
    assert again is not None and [m.text for m in again.messages] == ["Why?", "Half"]
    store.close()


def test_a_damaged_database_is_set_aside_and_the_chat_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "chat.sqlite3"
    path.write_bytes(b"this is not a database, " * 100)
    store = SessionStore(path)
    assert "damaged" in store.problem
    assert len(list(tmp_path.glob("chat.sqlite3.broken-*"))) == 1
    talk(store, "Why?")
    assert len(store.entries()) == 1
    store.close()


@pytest.mark.parametrize("table", ["messages", "sessions"])
def test_a_partly_damaged_database_is_set_aside_when_it_is_read(tmp_path: Path, table: str) -> None:
    path = tmp_path / "chat.sqlite3"
    store = SessionStore(path)
    for i in range(40):
        talk(store, f"Why {i}?", "Because. " * 100)
    store.close()
    with sqlite3.connect(path) as db:
        size = db.execute("PRAGMA page_size").fetchone()[0]
        [(page,)] = db.execute("SELECT rootpage FROM sqlite_master WHERE name=?", (table,))
    data = bytearray(path.read_bytes())
    data[(page - 1) * size : page * size] = bytes((b * 7 + 13) % 256 for b in data[:size])
    path.write_bytes(data)
    store = SessionStore(path)
    store.inputs()
    assert store.entries() == [] and "damaged" in store.problem
    aside = [p.name for p in tmp_path.glob("chat.sqlite3.broken-*")]
    assert len([name for name in aside if not name.endswith(("-wal", "-shm"))]) == 1
    talk(store, "Why?")
    assert len(store.entries()) == 1
    store.close()


def test_a_row_that_cannot_be_read_costs_itself_alone(tmp_path: Path) -> None:
    path = tmp_path / "chat.sqlite3"
    store = SessionStore(path)
    chat = talk(store, "Why?", "Because.")
    store.close()
    with sqlite3.connect(path) as db:
        db.execute("UPDATE messages SET stats='{broken', spans='[[1,2', state='x' WHERE id=2")
        db.execute("UPDATE messages SET text=x'fffe00', role='alien' WHERE id=1")
        db.execute("UPDATE sessions SET title=cast(x'41ff' AS TEXT), updated='abc'")
    store = SessionStore(path)
    again = store.load(chat.session or 0)
    assert again is not None and not store.problem
    assert [m.text for m in again.messages] == ["", "Because."]
    assert (again.messages[1].stats, again.messages[1].state) == ({}, "interrupted")
    assert [entry.title for entry in store.entries()] == ["A\ufffd"]
    store.close()


def test_a_folder_that_cannot_be_written_is_said_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = SessionStore(tmp_path / "file" / "chat.sqlite3")
    assert "not saved" in store.problem
    talk(store, "Why?")
    assert len(store.entries()) == 1, "the chat works in memory"


def test_an_unsent_draft_is_found_again() -> None:
    store = SessionStore(None)
    assert store.unsent() is None
    chat = Conversation(draft="half a question")
    store.save(chat, "toy")
    assert store.unsent() == chat.session
    talk(store, "Why?")
    assert store.unsent() is None, "only when it is the newest"


def test_two_programs_may_use_one_database(tmp_path: Path) -> None:
    path = tmp_path / "chat.sqlite3"
    one, two = SessionStore(path), SessionStore(path)
    talk(one, "from one")
    talk(two, "from two")
    assert {e.title for e in one.entries()} == {"from one", "from two"}
    one.close()
    two.close()


def test_forgotten_messages_are_gone() -> None:
    store = SessionStore(None)
    chat = talk(store, "Why?")
    store.forget(chat.truncate(1))
    again = store.load(chat.session or 0)
    assert again is not None and len(again.messages) == 1
    with pytest.raises(sqlite3.ProgrammingError):
        store.close()
        store.entries()


def test_the_folder_of_the_chats_is_the_users_alone(tmp_path: Path) -> None:
    store = SessionStore(tmp_path / "data" / "chat.sqlite3")
    store.close()
    assert (tmp_path / "data").stat().st_mode & 0o777 == 0o700


def test_a_database_from_before_versions_were_counted_opens_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "chat.sqlite3"
    store = SessionStore(path)
    talk(store, "Why?", "Because.")
    store.close()
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version=0")
    store = SessionStore(path)
    assert not store.problem and [e.title for e in store.entries()] == ["Why?"]
    store.close()
    with sqlite3.connect(path) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (1,)


def test_a_database_of_a_newer_program_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "chat.sqlite3"
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version=99")
    store = SessionStore(path)
    assert "newer version" in store.problem
    talk(store, "Why?")
    assert len(store.entries()) == 1, "the chat works in memory"
    store.close()
    with sqlite3.connect(path) as db:
        assert db.execute("SELECT count(*) FROM sqlite_master").fetchone() == (0,)
