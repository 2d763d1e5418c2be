"""Predictions of when requests are done that share the device, from steps that were made up."""

from __future__ import annotations

import pytest

from engine.pace import Pace, Share

SETTLED = 200  # steps after which nothing of the first guess is left


def learned(seconds: float, alone_s: list[float]) -> Pace:
    pace = Pace()
    for _ in range(SETTLED):
        pace.learn(seconds, alone_s)
    return pace


def test_at_first_the_cost_model_is_believed() -> None:
    assert Pace().done_s([Share(2.0), Share(3.0)]) == [2.0, 5.0]
    assert Pace().done_s([]) == []


def test_what_shares_every_step_is_done_together() -> None:
    """Four requests in a step that takes twice as long as one alone: all end after twice the time of one."""
    pace = learned(0.2, [0.1] * 4)
    assert pace.done_s([Share(3.0)] * 4) == pytest.approx([6.0] * 4)
    assert pace.done_s([Share(3.0)] * 8)[4:] == pytest.approx([7.5, 9.0, 10.5, 12.0])


def test_those_who_come_in_hold_up_whoever_leads() -> None:
    pace = learned(0.2, [0.1] * 4)
    assert pace.done_s([Share(1.0), *[Share(3.0, entry_s=0.5)] * 3])[0] == pytest.approx(2.0 + 1.5)


def test_pictures_of_one_request_go_side_by_side() -> None:
    assert learned(0.2, [0.1] * 4).done_s([Share(12.0, num_images=4)]) == pytest.approx([6.0])


def test_a_device_that_is_slower_than_its_profile_makes_everybody_wait_longer() -> None:
    assert learned(0.5, [0.1]).done_s([Share(1.0), Share(1.0)]) == pytest.approx([5.0, 10.0])


def test_a_small_request_in_a_large_ones_step_counts_little() -> None:
    assert learned(0.5, [0.4, 0.1]).sharing == pytest.approx(1.25)


def test_steps_of_requests_that_are_gone_teach_nothing() -> None:
    pace = Pace()
    pace.learn(1.0, [])
    assert pace == Pace()


def test_one_step_that_stood_still_is_soon_forgotten() -> None:
    pace = Pace()
    pace.learn(600.0, [0.1])
    assert pace.slowdown < 3.0
