"""Charts as SVG: more is further right and further up, and steps of axes are round numbers."""

from xml.etree import ElementTree

import pytest
from svg_charts import Chart, Line, svg, ticks


def test_more_load_is_further_right_and_more_time_further_up() -> None:
    chart = Chart("t", "x", "y", [Line("a", [(1, 10), (2, 40)])])
    low, high = ElementTree.fromstring(svg(chart)).findall("{http://www.w3.org/2000/svg}circle")
    assert float(low.attrib["cx"]) < float(high.attrib["cx"]) <= 420
    assert float(low.attrib["cy"]) > float(high.attrib["cy"]) >= 0


@pytest.mark.parametrize("most", [0.003, 1, 999, 0])
def test_ticks_reach_over_the_largest_value_in_a_few_steps(most: float) -> None:
    found = ticks(most)
    assert found[0] == 0 and found[-1] >= most and 1 <= len(found) - 1 <= 8
