"""The maths of the timer, on a clock that the test moves."""

import pytest


class Clock:
    """A clock that stands still but for the calls under test."""

    def __init__(self):
        self.now, self.calls = 0.0, []

    def __call__(self):
        return self.now

    def taking(self, name, seconds):
        """Return a callable that takes so long, and says so."""

        def call():
            self.calls.append(name)
            self.now += seconds

        return call


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def timer(import_path):
    """The module under test."""
    from common import compare

    return compare


def test_rounds_are_interleaved_and_end_with_the_budget(timer, clock):
    calls = {name: clock.taking(name, 1.0) for name in "ab"}
    timings = timer.compare(calls, 11.0, clock=clock)
    # Two seconds of warm-up, then two rounds of four seconds; a third pair would end at 14.
    assert "".join(clock.calls) == "ab" + "abba" * 2
    assert timings.rounds == 4
    assert clock.now == 10.0


def test_short_calls_are_repeated_within_a_measurement(timer, clock):
    timings = timer.compare({"a": clock.taking("a", 1e-5)}, 0.05, clock=clock)
    assert timings.median("a") == pytest.approx(1e-5)
    assert len(clock.calls) * 1e-5 / timings.rounds >= timer.SHORTEST


def test_ratio_is_of_medians_and_its_spread_of_pairs(timer):
    ratio = timer.Timings({"a": [2.0, 4.0, 9.0], "b": [1.0, 4.0, 3.0]}).ratio("a", "b")
    # Pairs: 2, 1, 3.
    assert ratio.fields("x") == pytest.approx({"x": 4 / 3, "x_q1": 1.5, "x_q3": 2.5})
    assert ratio.fields("x", 100)["x_q1"] == 150
