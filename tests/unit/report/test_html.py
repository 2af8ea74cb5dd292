import dataclasses
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree as ET

import numpy as np
import pytest

from verl_omni_core.report.chart import line_chart
from verl_omni_core.report.html import Report, render, write_report
from verl_omni_core.report.images import PicturePair
from verl_omni_core.report.summary import HeldOut, duration, summary

SVG = "{http://www.w3.org/2000/svg}"
HELD_OUT = HeldOut(base=0.5, trained=0.625, low=0.08, high=0.17, prompts=128, samples_per_prompt=4)
PICTURE = np.zeros((3, 32, 96), np.uint8)
REPORT = Report(
    run_id="demo<1>",
    steps=30,
    seconds=372.0,
    rewards=[(1, 0.4), (2, 0.5)],
    validations=[(0, 0.5), (30, 0.625)],
    held_out=HELD_OUT,
    pairs=[PicturePair('the word "A" & <b>', 42, PICTURE, PICTURE, 0.25, None)],
    metrics={"critic/rewards/mean": 0.5, "actor/loss": 1e-9},
    settings_digest="abc123",
    engine={"engine": "vllm-omni", "requests": 2048},
    settings={"run.seed": 42},
    statistics={30: {"mean@4": 0.625, "best@4/mean": 0.875}, 0: {"mean@4": 0.5, "best@4/mean": 0.75}},
)


class Checker(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open, self.sources, self.tags = [], [], []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.sources += [value for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "img", "br", "link", "line", "circle", "polyline"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("line", "circle", "polyline"):
            assert self.open.pop() == tag


def test_the_page_stands_alone_and_is_well_formed() -> None:
    checker = Checker()
    checker.feed(render(REPORT))
    assert checker.open == []
    assert len(checker.sources) == 2
    assert all(str(source).startswith("data:image/png;base64,") for source in checker.sources)
    assert not {"script", "link", "iframe"} & set(checker.tags)


def test_the_page_has_the_numbers_of_the_run() -> None:
    page = render(REPORT)
    numbers = ("<dd>0.500</dd>", "<strong>0.625</strong>", "+0.125", "+0.080 to +0.170", "128 prompts, 4 fixed seeds")
    facts = ("6 min 12 s", "vllm-omni", "2048", "abc123", "critic/rewards/mean", "1e-09", "run.seed", "no score")
    for text in numbers + facts:
        assert text in page, text


def test_held_out_statistics_stand_in_the_order_of_the_steps() -> None:
    page = re.sub(r"\s+", "", render(REPORT))
    row = '<tr><th>{}</th><tdclass="number">{}</td><tdclass="number">{}</td></tr>'
    first, last = row.format(0, "0.5000", "0.7500"), row.format(30, "0.6250", "0.8750")
    assert first + last in page and '<thclass="number">best@4</th>' in page


@pytest.mark.parametrize(("low", "high", "kind"), [(0.1, 0.2, "gain"), (-0.2, -0.1, "loss"), (-0.1, 0.2, "open")])
def test_a_gain_is_shown_as_one_only_where_its_interval_leaves_out_zero(low: float, high: float, kind: str) -> None:
    page = render(dataclasses.replace(REPORT, held_out=dataclasses.replace(HELD_OUT, low=low, high=high)))
    assert f'<dd class="{kind}">' in page


def test_what_comes_from_data_is_escaped() -> None:
    page = render(REPORT)
    assert "<b>" not in page
    assert "demo<1>" not in page
    assert "demo&lt;1&gt;" in page


def test_a_run_without_validation_or_pictures_says_so() -> None:
    page = render(dataclasses.replace(REPORT, held_out=None, pairs=[], validations=[], rewards=[], metrics={}))
    assert "Not compared" in page
    assert "No pictures were kept" in page
    assert "no values yet" in page


def test_writing_replaces_an_older_report(tmp_path: Path) -> None:
    path = write_report(tmp_path / "run" / "report.html", REPORT)
    write_report(path, dataclasses.replace(REPORT, run_id="second"))
    assert "second" in path.read_text()
    assert [file.name for file in path.parent.iterdir()] == ["report.html"]


def test_a_chart_places_points_in_proportion() -> None:
    chart = ET.fromstring(line_chart({"a": [(0, 0.0), (5, 0.5), (10, 1.0)]}, x_label="x", y_label="y"))
    (line,) = chart.iter(f"{SVG}polyline")
    places = [tuple(map(float, place.split(","))) for place in str(line.get("points")).split()]
    (x0, y0), (x1, y1), (x2, y2) = places
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)
    assert y0 - y1 == pytest.approx(y1 - y2, abs=0.2)
    assert y0 > y2


@pytest.mark.parametrize(
    "points",
    [
        [(1, 0.5)],
        [(1, 0.0), (2, 0.0)],
        [(1, float("nan")), (2, 1.0)],
        [(0, -1e-3), (1000, 5e3)],
        [(1, 1e-12), (2, 3e-12)],
    ],
)
def test_a_chart_takes_any_numbers(points: list[tuple[float, float]]) -> None:
    chart = ET.fromstring(line_chart({"a": points, "b<": points}, x_label="x", y_label="y & z"))
    assert len(list(chart.iter(f"{SVG}polyline"))) == 2
    numbers = [float(v) for c in chart.iter(f"{SVG}circle") for v in (c.get("cx"), c.get("cy"))]
    assert all(0 <= number <= 720 for number in numbers)
    assert len(list(chart.iter(f"{SVG}text"))) < 40


def test_the_summary_has_numbers_interval_and_paths() -> None:
    text = summary(run_id="demo", steps=30, seconds=3700, held_out=HELD_OUT, report="runs/demo/report.html",
                   picture="runs/demo/images/before_after.png")  # fmt: skip
    assert "0.500 before, 0.625 after" in text
    assert "+0.125" in text
    assert "+0.080 to +0.170" in text
    assert text.endswith("runs/demo/report.html")
    assert "before_after.png" in text
    assert len({re.match(r"[^:]+:\s+", line).end() for line in text.splitlines()}) == 1


def test_the_summary_of_a_run_without_validation_claims_nothing() -> None:
    text = summary(run_id="demo", steps=3, seconds=5, held_out=None, report="r.html")
    assert "not compared" in text
    assert "Gain" not in text


@pytest.mark.parametrize(("seconds", "text"), [(-1, "0 s"), (59.4, "59 s"), (59.6, "1 min 00 s"), (7505, "2 h 05 min")])
def test_durations_read_like_people_say_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text
