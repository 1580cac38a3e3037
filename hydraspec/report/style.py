"""The look of HTML pages: light or dark by the reader's preference, no script, no network."""

from __future__ import annotations

from html import escape

CSS = """
:root {
  color-scheme: light dark;
  --page: #f6f7f9; --card: #ffffff; --text: #1b2430; --muted: #5c6775; --line: #dfe3e9;
  --method: #2f6fde; --second: #e08a1e; --baseline: #9aa3af; --good: #1a7f4b; --bad: #c42b30;
  --good-soft: #dcf3e6; --bad-soft: #fbe1e2; --accepted: #35a26b; --own: #c3cad4; --note: #eef3fc;
  --p0: #7a5bd0; --p1: #2aa5a0; --p2: #2f6fde; --p3: #d9568f; --p4: #e08a1e; --p5: #9aa3af;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #12161c; --card: #1a2028; --text: #e4e8ee; --muted: #98a3b2; --line: #2e3742;
    --method: #6ea2ff; --second: #f0a94a; --baseline: #7b8796; --good: #5fd196; --bad: #ff8286;
    --good-soft: #16352a; --bad-soft: #412026; --accepted: #4fc288; --own: #475261;
    --note: #1b2636;
    --p0: #a48bf0; --p1: #4cc7c1; --p2: #6ea2ff; --p3: #f07fb2; --p4: #f0a94a; --p5: #7b8796;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--text);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif;
}
main { max-width: 1080px; margin: 0 auto; padding: 32px 20px 64px; }
h1 { font-size: 26px; line-height: 1.25; margin: 0 0 4px; letter-spacing: -0.01em; }
h2 { font-size: 17px; margin: 0 0 4px; }
p { margin: 4px 0 0; }
a { color: var(--method); }
.muted { color: var(--muted); } .small { font-size: 13px; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(225px, 1fr)); gap: 14px; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(420px, 1fr)); gap: 14px; }
@media (max-width: 480px) { .pair { grid-template-columns: 1fr; } }
.cards, .pair, section.card, .note { margin-top: 14px; }
.pair section.card { margin-top: 0; }
.card {
  background: var(--card); border: 1px solid var(--line); border-radius: 12px; padding: 18px 20px;
  min-width: 0;
}
.card .label { font-size: 13px; color: var(--muted); }
.card .figure { font-size: 31px; line-height: 1.25; font-weight: 650; letter-spacing: -0.02em; }
.card .figure small { font-size: 17px; font-weight: 550; }
.card.good { background: var(--good-soft); border-color: transparent; }
.card.good .figure { color: var(--good); }
.card.bad { background: var(--bad-soft); border-color: transparent; }
.card.bad .figure { color: var(--bad); }
.note {
  background: var(--note); border-left: 3px solid var(--method); border-radius: 6px;
  padding: 10px 16px;
}
.note.warn { border-color: var(--second); }
.note ul { margin: 4px 0 0; padding-left: 20px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; margin-top: 10px; font-size: 14px; }
th, td { text-align: right; padding: 6px 10px; border-bottom: 1px solid var(--line); }
th { font-weight: 550; color: var(--muted); font-size: 13px; vertical-align: bottom; }
th:first-child, td:first-child, .facts td { text-align: left; }
.facts td:first-child { color: var(--muted); white-space: nowrap; padding-right: 24px; }
.facts td { vertical-align: top; }
tbody tr:last-child td { border-bottom: 0; }
td { font-variant-numeric: tabular-nums; }
tr.best td { background: var(--good-soft); }
svg { display: block; width: 100%; height: auto; margin-top: 10px; }
svg text { fill: var(--text); font-size: 12.5px; font-family: inherit; }
svg text.axis { fill: var(--muted); font-size: 11.5px; }
svg .grid { stroke: var(--line); stroke-width: 1; }
svg .whisker { stroke: var(--text); stroke-width: 1.6; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 16px; margin-top: 8px; font-size: 13px; }
.legend i {
  display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 6px;
}
details { margin-top: 10px; }
summary { cursor: pointer; color: var(--muted); }
pre {
  background: var(--page); border-radius: 8px; padding: 12px 14px; margin: 8px 0 0;
  overflow-x: auto; white-space: pre-wrap; overflow-wrap: anywhere;
  font: 13px/1.5 ui-monospace, "SF Mono", Menlo, Consolas, monospace;
}
.requests {
  display: grid; grid-template-columns: repeat(auto-fit, minmax(380px, 1fr)); gap: 4px 28px;
}
@media (max-width: 480px) { .requests { grid-template-columns: 1fr; } }
.request { border-top: 1px solid var(--line); padding-top: 14px; margin-top: 14px; min-width: 0; }
.tag {
  display: inline-block; border: 1px solid var(--line); border-radius: 99px; padding: 0 9px;
  font-size: 12.5px; margin-left: 6px; color: var(--muted);
}
.tag.good { color: var(--good); border-color: var(--good); }
.tag.bad { color: var(--bad); border-color: var(--bad); }
.strip { display: flex; flex-wrap: wrap; gap: 4px 7px; margin-top: 10px; }
.strip span { display: inline-flex; gap: 2px; }
.strip b { width: 11px; height: 15px; border-radius: 3px; background: var(--own); }
.strip b.accepted { background: var(--accepted); }
footer { margin-top: 28px; color: var(--muted); font-size: 13px; }
"""


def page(title: str, body: str) -> str:
    """A whole, self-contained HTML document; `body` is HTML already."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{CSS}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def facts(rows: list[list[str]]) -> str:
    """A table of names and what they are, both to the left; texts are escaped here."""
    body = "".join(
        f"<tr><td>{escape(name)}</td><td>{escape(text)}</td></tr>" for name, text in rows
    )
    return f'<div class="scroll"><table class="facts"><tbody>{body}</tbody></table></div>'


def table(header: list[str], rows: list[list[str]], *, best: set[int] | None = None) -> str:
    """A table of figures, texts escaped here. `best` are rows to mark."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = []
    for number, row in enumerate(rows):
        mark = ' class="best"' if best and number in best else ""
        body.append(f"<tr{mark}>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>")
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


def card(title: str, *contents: str, note: str = "") -> str:
    """A titled box; `note` is text, the contents are HTML already."""
    caption = f'<p class="muted small">{escape(note)}</p>' if note else ""
    return f'<section class="card"><h2>{escape(title)}</h2>{caption}{"".join(contents)}</section>'


def legend(entries: list[tuple[str, str]]) -> str:
    """(name, CSS colour) pairs."""
    items = "".join(
        f'<span><i style="background:{color}"></i>{escape(name)}</span>' for name, color in entries
    )
    return f'<div class="legend">{items}</div>'
