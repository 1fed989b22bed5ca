"""The page: one file, its tables and charts with their data, nothing of a hostile plan executed; in a browser too."""

from __future__ import annotations

import re
import shutil
import subprocess
from functools import cache
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from torch import nn

import autopar
from autopar.report.page import report_page
from autopar.report.pictures import communication_of

VOID = {"meta", "link", "input", "br"}
SECTIONS = {"summary", "measured", "modules", "memory", "communication", "step", "frontier", "decisions", "code"}
CHARTS = {"memory", "communication", "step", "frontier"}
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@cache
def plan() -> autopar.Plan:
    layers = [nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)) for _ in range(3)]
    made = autopar.make_plan(
        nn.Sequential(*layers), autopar.Mesh((2, 2), ("dp", "tp"), hardware="cpu"), example_inputs=torch.ones(64, 64),
        search="megatron", optimizer=torch.optim.AdamW,
    )  # fmt: skip
    _ = made.frontier
    return made


@cache
def page() -> str:
    return report_page(plan())


class Reader(HTMLParser):
    """Checks that elements close in order, and gathers what is asked of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.sources: list[str] = []
        self.tables: dict[str, list[list[str]]] = {}
        self.headers: list[str] = []
        self.charts: list[str] = []
        self.buttons = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag not in VOID:
            self.open.append(tag)
        if "id" in given:
            self.ids.append(str(given["id"]))
        self.sources += [str(given[name]) for name in ("src", "href", "xlink:href") if name in given]
        if tag == "div" and "data-name" in given:
            self.tables[str(given["data-name"])] = []
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        self.buttons += tag == "button"
        if tag == "figure":
            self.charts.append(str(given["aria-label"]))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    @property
    def rows(self) -> list[list[str]]:
        return self.tables[next(reversed(self.tables))]

    def handle_data(self, data: str) -> None:
        if "table" in self.open and self.open[-1] in ("td", "button"):
            self.rows[-1][-1] += data

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag


@cache
def read() -> Reader:
    return Reader(page())


def test_the_page_is_one_well_formed_file_that_loads_nothing() -> None:
    assert read().open == []
    assert len(read().ids) == len(set(read().ids))
    assert all(source.startswith(("#", "data:")) for source in read().sources)
    assert not re.search(r"url\((?!#)|@import|fetch\(|XMLHttpRequest", page())
    assert set(read().ids) >= SECTIONS


def test_every_chart_is_there_with_its_data() -> None:
    assert len(read().charts) == len(CHARTS)
    svgs = re.findall(r"<svg.*?</svg>", page(), re.DOTALL)
    assert len(svgs) == len(CHARTS)
    memory = next(svg for svg in svgs if "memory over one step" in svg)
    assert plan().details is not None and plan().details.timeline is not None
    for kind in plan().details.timeline.bytes_by_kind:
        assert f">{kind.replace('_', ' ')}<" in memory
    moves = next(svg for svg in svgs if "communication by collective" in svg)
    assert all(f"{collective}, {axis}" in moves for collective, axis in communication_of(plan()))
    assert all("#000000" not in svg for svg in svgs)  # black would not be seen on a dark page


def test_tables_have_the_plans_numbers_and_buttons_that_sort() -> None:
    tables = read().tables
    assert {"modules", "kinds", "alive", "moves", "decisions", "points"} <= tables.keys()
    assert tables["modules"][0][:2] == ["module", "copies"]
    folded = {row[0]: row[1] for row in tables["modules"][1:]}
    assert folded["[1-2].0"] == "2"
    assert sum(int(row[2]) for row in tables["moves"][1:]) == sum(len(entry.moves) for entry in plan().entries)
    assert read().buttons == sum(len(rows[0]) for rows in tables.values())
    assert len(tables["points"]) == 1 + len(plan().frontier)


def test_a_loaded_plan_has_its_page_and_says_what_is_not_in_the_file(tmp_path: Path) -> None:
    plan().save(tmp_path / "plan.json")
    text = report_page(autopar.Plan.load(tmp_path / "plan.json"))
    found = Reader(text)
    assert len(found.charts) == len(CHARTS) - 1  # the simulated step needs the model
    assert "simulates the step" in text
    assert sorted(found.tables["modules"]) == sorted(read().tables["modules"])


def test_nothing_that_a_plan_file_says_becomes_part_of_the_page() -> None:
    data = plan().to_json()
    attack = "$</script><script>alert(1)</script>\"'><img src=x onerror=alert(1)>[/bold]"
    data["mesh"]["hardware"] = attack
    data["mesh"]["axes"] = [attack, "b"]
    data["costs"] = {key: value | {"where": attack} for key, value in data["costs"].items()}
    data["details"]["timeline"]["alive"][0][0] = attack
    data["details"]["code"] = {attack: [attack]}
    text = report_page(autopar.Plan.from_json(data))
    assert "<script>alert" not in text and "<img" not in text
    assert Reader(text).open == []
    assert "[/bold]" in str(autopar.Plan.from_json(data))


def test_a_plan_that_was_edited_has_a_page_too() -> None:
    data = plan().to_json()
    name = next(iter(data["parameters"]))
    data["parameters"][name] = "S0,R" if data["parameters"][name] != "S0,R" else "R,R"
    text = report_page(autopar.Plan.from_json(data))
    assert "not priced" in text and "not in this file" in text


PROBE = """<script>
const rows = () => [...document.querySelectorAll('[data-name=decisions] tbody tr')];
const times = () => rows().map(row => Number(row.cells[3].dataset.value));
const head = document.querySelectorAll('[data-name=decisions] th')[3];
head.querySelector('button').click(); const up = times();
head.querySelector('button').click(); const down = times();
const search = document.querySelector('[data-name=decisions] input');
search.value = 'relu'; search.dispatchEvent(new Event('input'));
const sorted = up.every((v, i) => !i || up[i - 1] <= v) && down.every((v, i) => !i || down[i - 1] >= v);
const shown = rows().filter(row => !row.hidden);
const found = shown.length > 0 && shown.every(row => row.textContent.includes('relu')) && shown.length < rows().length;
const fits = document.documentElement.scrollWidth <= window.innerWidth;
document.body.dataset.probe = `sorted ${sorted}, found ${found}, charts ${document.querySelectorAll('svg').length}`;
document.body.dataset.fits = `${fits} ${document.documentElement.scrollWidth} ${window.innerWidth}`;
</script></body>"""


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_a_browser_opens_it_sorts_and_searches_its_tables_without_an_error(tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text(page().replace("</body>", PROBE), encoding="utf-8")
    done = subprocess.run(
        [str(CHROMIUM), "--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--v=0",
         f"--user-data-dir={tmp_path / 'profile'}", "--window-size=500,800", "--virtual-time-budget=2000", "--dump-dom",
         (tmp_path / "report.html").as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert f'data-probe="sorted true, found true, charts {len(CHARTS)}"' in done.stdout
    assert 'data-fits="true' in done.stdout, re.findall(r'data-fits="[^"]*"', done.stdout)
    assert "CONSOLE" not in done.stderr, done.stderr
