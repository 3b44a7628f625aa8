import re

from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.pages import Point, pareto_front, scatter_chart

POINTS = st.lists(
    st.builds(
        Point, st.integers(1, 9).map(float), st.integers(1, 9).map(float), st.text("ab", max_size=2), st.booleans()
    )
)


@settings(max_examples=60, deadline=None)
@given(POINTS)
def test_the_front_is_that_of_brute_force(points):
    def beats(one, other):
        return one.fits and one.x <= other.x and one.y <= other.y and (one.x, one.y) != (other.x, other.y)

    wanted = {(one.x, one.y) for one in points if one.fits and not any(beats(other, one) for other in points)}
    front = pareto_front(points)
    assert [(one.x, one.y) for one in front] == sorted(wanted)
    if points:
        html = scatter_chart("t", points, x_name="x", x_unit="GiB", y_name="y")
        assert html.count('r="5.5" class="point front"><title>') == len(front)


def test_dots_name_their_candidates_and_far_ones_are_counted():
    points = [Point(8, 1, "fast"), Point(2, 4, "small"), Point(9, 90, "slow"), Point(30, 1, "large", fits=False)]
    html = scatter_chart("t", points, x_name="memory", x_unit="GiB", y_name="time", limit=10)
    assert "<title>fast: 1, 8 GiB</title>" in html
    assert "1 of 4 candidates are not drawn" in html or "2 of 4 candidates are not drawn" in html
    assert "capacity 10 GiB" in html


def test_chosen_points_have_a_ring_and_are_within_the_frame():
    """Also if they lie far from the front, as a plan does whose compiled figures differ from the computed ones."""
    points = [Point(8, 1, "fast"), Point(2, 4, "small")]
    html = scatter_chart(
        "t", points, x_name="memory", x_unit="GiB", y_name="time", limit=10, unit="computed",
        chosen=[Point(12, 6, "1. fast")], chosen_name="this plan, compiled", show_x="{:.1f} GiB".format,
    )  # fmt: skip
    x, y = re.search(
        r'cx="([\d.]+)%" cy="([\d.]+)" r="9" class="point chosen"><title>1. fast: 6, 12.0 GiB<', html
    ).groups()
    assert 0 < float(x) < 100
    assert 0 < float(y) < 340
    assert ">this plan, compiled</li>" in html
    assert "time against memory, computed" in html
    # The label of the limit is above the frame, where no dot can be.
    assert re.search(r'y="-7" class="level-label end">capacity 10.0 GiB<', html)
