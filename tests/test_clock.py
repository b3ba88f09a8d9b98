"""The clock's verdict on predicted times, from hand-made figures."""

from benchmarks.clock import Timed, pairs_in_order, summary

PLANS = [Timed("a", 1.0, 2.0), Timed("b", 1.05, 1.9), Timed("c", 1.2, 2.2), Timed("d", 1.5, 2.1)]


def test_only_pairs_that_are_predicted_apart_count():
    # c and d against a and b are in order; d is predicted slower than c and was faster; a and b are too close
    assert pairs_in_order(PLANS) == (4, 5)
    assert pairs_in_order(PLANS[:2]) == (0, 0)


def test_the_summary_says_how_many_and_shows_each_plan_beside_the_fastest():
    text = summary({"gpt": PLANS, "tiny": PLANS[:2]})
    assert "| gpt | 4 | 0.600 | 4 of 5 |" in text
    assert "| tiny | 2 | - | 0 of 0 |" in text
    assert "| gpt | d | 1500.0 | 2100.0 | 1.500 | 1.050 |" in text
