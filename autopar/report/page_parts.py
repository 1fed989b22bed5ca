"""Parts of the page: tables that sort and can be searched, charts as SVG in its own colours, style and script."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from autopar.errors import AutoparError

NOT_FOUND = "not in this file: "
_ID = re.compile(r'(\bid="|href="#|url\(#)([^")]+)')


def svg_of(figure: Any, prefix: str) -> str:
    """A figure as SVG for a page: text stays text, black becomes the page's colour, names do not clash."""
    from matplotlib import rc_context

    file = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "autopar"}):
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = file.getvalue()
    text = text[text.index("<svg") :].replace("#000000", "currentColor").replace("#262626", "currentColor")
    return _ID.sub(lambda match: f"{match[1]}{prefix}-{match[2]}", text)


def chart(name: str, label: str, draw: Callable[[], Any]) -> str:
    """A figure with a text for those who do not see it; why there is none, where it cannot be drawn."""
    try:
        figure = draw()
    except AutoparError as error:
        return f'<p class="missing">{escape(error.what)}; {escape(error.fix)}</p>'
    return f'<figure role="img" aria-label="{escape(label)}">{svg_of(figure, name)}</figure>'


def data_table(name: str, columns: Sequence[str], rows: Sequence[Sequence[object]], *, search: str = "") -> str:
    """A table; a cell that is a pair has a number to sort by and a text to show."""
    head = "".join(f'<th scope="col"><button type="button">{escape(column)}</button></th>' for column in columns)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    box = f'<input type="search" aria-label="{escape(search)}" placeholder="{escape(search)}">' if search else ""
    return (
        f'<div class="table" data-name="{escape(name)}">{box}<div class="scroll" tabindex="0"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div></div>"
    )


def _cell(value: object) -> str:
    if isinstance(value, tuple):
        number, text = value
        return f'<td class="number" data-value="{float(number)!r}">{escape(str(text))}</td>'
    if isinstance(value, int):
        return f'<td class="number" data-value="{value}">{value}</td>'
    return f"<td>{escape(str(value))}</td>"


STYLE = """
:root { --text: #1b1f24; --soft: #57606a; --line: #d0d7de; --back: #ffffff; --raised: #f6f8fa; --accent: #0757b3; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e6edf3; --soft: #9ea7b3; --line: #3b434d; --back: #0f141a; --raised: #182029; --accent: #6cb2ff; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--text); font: 16px/1.5 system-ui, sans-serif; }
header, main { max-width: 72rem; margin: 0 auto; padding: 0.5rem 1rem; }
h1 { font-size: 1.5rem; margin: 0.5rem 0; } h2 { font-size: 1.25rem; margin: 2rem 0 0.5rem; } h3 { font-size: 1rem; }
nav { display: flex; flex-wrap: wrap; gap: 0.25rem 1rem; } a { color: var(--accent); padding: 0.25rem 0; }
dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(15rem, 1fr)); gap: 0.75rem; margin: 0.5rem 0; }
dl div { background: var(--raised); border: 1px solid var(--line); border-radius: 6px; padding: 0.5rem 0.75rem; }
dt { color: var(--soft); font-size: 0.875rem; } dd { margin: 0; font-weight: 600; overflow-wrap: anywhere; }
figure { margin: 0.5rem 0; max-width: 46rem; } figure svg { width: 100%; height: auto; color: var(--text); }
figure svg text { fill: currentColor; }
.scroll { overflow: auto; max-height: 32rem; border: 1px solid var(--line); border-radius: 6px; }
table { border-collapse: collapse; width: 100%; font-size: 0.875rem; }
th, td { text-align: left; padding: 0.3rem 0.6rem; border-bottom: 1px solid var(--line); vertical-align: top; }
th { position: sticky; top: 0; background: var(--raised); } td.number { text-align: right; white-space: nowrap; }
td { overflow-wrap: anywhere; min-width: 4.5rem; } td:first-child { min-width: 9rem; }
th button { all: unset; cursor: pointer; font-weight: 600; white-space: nowrap; }
th button:focus-visible, .scroll:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; }
th[aria-sort=ascending] button::after { content: " \\25B2"; }
th[aria-sort=descending] button::after { content: " \\25BC"; }
input[type=search] { width: 100%; max-width: 24rem; margin: 0.5rem 0; padding: 0.5rem; font: inherit; color: inherit;
  background: var(--raised); border: 1px solid var(--line); border-radius: 6px; }
.table { margin: 0.75rem 0; } .missing { color: var(--soft); }
pre { overflow: auto; max-height: 32rem; background: var(--raised); padding: 0.75rem; border-radius: 6px; }
pre { font-size: 0.8rem; }
summary { cursor: pointer; padding: 0.25rem 0; }
"""

SCRIPT = """
for (const holder of document.querySelectorAll(".table")) {
  const body = holder.querySelector("tbody");
  const value = (row, column) => {
    const cell = row.cells[column];
    return cell.dataset.value === undefined ? cell.textContent : Number(cell.dataset.value);
  };
  holder.querySelectorAll("th").forEach((head, column) => {
    head.querySelector("button").addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      holder.querySelectorAll("th").forEach(other => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const numbers = (a, b) => typeof a === "number" && typeof b === "number";
      const order = (a, b) => numbers(a, b) ? a - b : String(a).localeCompare(String(b));
      const rows = [...body.rows].sort((a, b) => order(value(a, column), value(b, column)));
      body.append(...(down ? rows.reverse() : rows));
    });
  });
  const search = holder.querySelector("input");
  if (search) search.addEventListener("input", () => {
    const wanted = search.value.toLowerCase();
    for (const row of body.rows) row.hidden = !row.textContent.toLowerCase().includes(wanted);
  });
}
"""
