"""What is kept for a while: each of the three bounds by itself."""

from __future__ import annotations

from app.shelf import Shelf


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_the_oldest_go_first() -> None:
    shelf = Shelf[str](max_items=2, max_bytes=100, max_age_s=10)
    for name in "abc":
        shelf.put(name, name.upper(), 1)
    assert [shelf.get(name) for name in "abc"] == [None, "B", "C"]


def test_bytes_are_bounded_and_the_newest_stays() -> None:
    shelf = Shelf[str](max_items=9, max_bytes=10, max_age_s=10)
    shelf.put("a", "A", 6)
    shelf.put("b", "B", 6)
    assert [shelf.get(name) for name in "ab"] == [None, "B"]
    shelf.put("c", "C", 60)
    assert [shelf.get(name) for name in "bc"] == [None, "C"]
    shelf.put("d", "D", 1)
    assert [shelf.get(name) for name in "cd"] == [None, "D"]


def test_nothing_outlives_its_age() -> None:
    clock = Clock()
    shelf = Shelf[str](max_items=9, max_bytes=10, max_age_s=10, clock=clock)
    shelf.put("a", "A", 1)
    clock.now_s = 9.9
    assert shelf.get("a") == "A"
    shelf.put("b", "B", 1)
    clock.now_s = 10.0
    assert (shelf.get("a"), shelf.get("b")) == (None, "B")
    assert repr(shelf) == "<Shelf: 1 items, 1 bytes>"


def test_a_name_holds_one_thing() -> None:
    shelf = Shelf[str](max_items=2, max_bytes=10, max_age_s=10)
    shelf.put("a", "old", 8)
    shelf.put("a", "new", 8)
    assert shelf.get("a") == "new"
    assert shelf.drop("a") and not shelf.drop("a")
    assert repr(shelf) == "<Shelf: 0 items, 0 bytes>"
