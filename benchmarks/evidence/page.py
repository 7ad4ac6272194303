"""Blocks of a report, and their form in Markdown and in HTML."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from benchmarks.evidence.charts import Chart, style, svg
from benchmarks.evidence.records import Record


@dataclass(frozen=True)
class Words:
    """A paragraph in Markdown; only `code`, **bold** and [links](of/files.md) are understood."""

    text: str


@dataclass(frozen=True)
class Heading:
    text: str


@dataclass(frozen=True)
class Points:
    items: Sequence[str]


@dataclass(frozen=True)
class Table:
    """A table; its cells are Markdown, its first column is aligned to the left."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Figures:
    """Charts, side by side if there is room; `name` and a number name each chart's file."""

    name: str
    charts: Sequence[Chart]


Block = Words | Heading | Points | Table | Figures


@dataclass(frozen=True)
class Section:
    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Page:
    title: str
    sections: Sequence[Section]


def provenance(record: Record) -> Words:
    """Returns the paragraph that each record's part begins with: the origin of its numbers."""
    machine = ", ".join(
        text if key == "device" else f"{key} {text}" for key, text in record.machine.items()
    )
    seeds = ", ".join(str(seed) for seed in record.seeds)
    return Words(
        f"`{record.command}`  \n{machine}; commit {record.commit}, {record.date}; "
        + (f"seeds {seeds}; " if seeds else "no seeds; ")
        + f"[rows](evidence/{record.name}.json)"
    )


def settings_of(record: Record) -> Words:
    settings = ", ".join(f"{key} {_setting(value)}" for key, value in record.settings.items())
    return Words(f"Settings: {settings}." if settings else "No settings.")


def _setting(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def number(value: object, digits: int = 3) -> str:
    """Returns a table's cell for `value`; an empty one for None."""
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, float | int):
        return str(value)
    if isinstance(value, int) or value == 0 or 0.01 <= abs(value) < 10**digits:
        return f"{value:.{digits}g}" if isinstance(value, float) else str(value)
    return f"{value:.{digits - 1}e}" if abs(value) < 0.01 else f"{value:.0f}"


def markdown(page: Page, head: str) -> tuple[str, dict[str, str]]:
    """Returns the page's text, and by file name the figures that it shows.

    The text expects the figures in a folder `evidence/figures`.
    """
    files: dict[str, str] = {}
    parts = [head, f"# {page.title}"]
    for section in page.sections:
        parts.append(f"## {section.title}")
        for block in section.blocks:
            if isinstance(block, Figures):
                parts.append("\n".join(_pictures(block, files)))
            elif isinstance(block, Table):
                parts.append(_markdown_table(block))
            elif isinstance(block, Heading):
                parts.append(f"### {block.text}")
            elif isinstance(block, Points):
                parts.append("\n".join(f"- {item}" for item in block.items))
            else:
                parts.append(block.text)
    return "\n\n".join(parts) + "\n", files


def _pictures(figures: Figures, files: dict[str, str]) -> list[str]:
    lines = []
    for place, chart in enumerate(figures.charts, 1):
        name = f"{figures.name}-{place}.svg"
        files[name] = svg(chart, alone=True)
        lines.append(f'<img src="evidence/figures/{name}" alt="{escape(chart.title)}" width="420">')
    return lines


def _markdown_table(table: Table) -> str:
    rule = "|".join(["---", *["---:"] * (len(table.columns) - 1)])
    rows = ["| " + " | ".join(_in_cell(cell) for cell in row) + " |" for row in table.rows]
    return "\n".join(["| " + " | ".join(table.columns) + " |", f"|{rule}|", *rows])


def _in_cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def html(page: Page) -> str:
    """Returns the page as one HTML file that needs no network; links to files become plain text."""
    parts, contents = [], []
    for place, section in enumerate(page.sections, 1):
        parts.append(f'<section><h2 id="{place}">{escape(section.title)}</h2>')
        under = []
        for number, block in enumerate(section.blocks, 1):
            target = f"{place}-{number}"
            parts.append(_html_block(block, target))
            if isinstance(block, Heading):
                under.append(_html_link(target, block.text))
        parts.append("</section>")
        items = f"<ul>{''.join(under)}</ul>" if under else ""
        contents.append(_html_link(str(place), section.title, items))
    title = escape(page.title)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="color-scheme" content="light dark"><title>{title}</title>'
        f"<style>{_PAGE_STYLE}{style()}</style></head>\n<body><main><h1>{title}</h1>\n"
        f"<nav><ul>{''.join(contents)}</ul></nav>\n"
        + "\n".join(parts)
        + "\n</main></body></html>\n"
    )


def _html_link(target: str, text: str, under: str = "") -> str:
    return f'<li><a href="#{target}">{escape(text)}</a>{under}</li>'


def _html_block(block: Block, target: str) -> str:
    """Returns a block in HTML; `target` is the id by which the contents link to a heading."""
    if isinstance(block, Figures):
        charts = "".join(f"<figure>{svg(chart, alone=False)}</figure>" for chart in block.charts)
        return f'<div class="figures">{charts}</div>'
    if isinstance(block, Points):
        return f"<ul>{''.join(f'<li>{_inline(item)}</li>' for item in block.items)}</ul>"
    if isinstance(block, Heading):
        return f'<h3 id="{target}">{escape(block.text)}</h3>'
    if isinstance(block, Words):
        return f"<p>{_inline(block.text)}</p>"
    head = "".join(f"<th>{_inline(name)}</th>" for name in block.columns)
    rows = "".join(
        "<tr>" + "".join(f"<td>{_inline(cell)}</td>" for cell in row) + "</tr>"
        for row in block.rows
    )
    return (
        f'<div class="table"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'
        "</div>"
    )


def _inline(text: str) -> str:
    # Take code out first: its text must stay as it is.
    pieces = re.split(r"`([^`]*)`", escape(text, quote=False))
    for place, piece in enumerate(pieces):
        if place % 2:
            pieces[place] = f"<code>{piece}</code>"
            continue
        piece = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", piece)
        piece = re.sub(r"\*\*([^*]*)\*\*", r"<strong>\1</strong>", piece)
        pieces[place] = piece.replace("  \n", "<br>\n")
    return "".join(pieces)


_PAGE_STYLE = (
    ":root{color-scheme:light dark;--back:#fff;--text:#1c1c1c;--soft:#5a5a5a;--edge:#dcdcdc}"
    "@media(prefers-color-scheme:dark){:root{--back:#161616;--text:#ececec;--soft:#aaa;"
    "--edge:#3a3a3a}}"
    "body{margin:0;background:var(--back);color:var(--text);font:16px/1.5 system-ui,sans-serif}"
    "main{max-width:1100px;margin:auto;padding:16px}h1{font-size:1.6em}"
    "h2{font-size:1.2em;margin-top:2em;border-top:1px solid var(--edge);padding-top:1em}"
    "nav{font-size:.9em}nav ul{margin:0;padding-left:1.2em}a{color:inherit}"
    "code{font-size:.85em;overflow-wrap:anywhere;color:var(--soft)}"
    ".figures{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,330px),1fr));"
    "gap:16px}figure{margin:0}.chart{width:100%;height:auto}"
    ".table{overflow-x:auto}table{border-collapse:collapse;font-size:.85em}"
    "td,th{padding:3px 10px;border-bottom:1px solid var(--edge);text-align:right;"
    "font-variant-numeric:tabular-nums}td{white-space:nowrap}"
    "td:first-child,th:first-child{text-align:left}"
)
