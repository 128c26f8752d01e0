"""The pages of `wildflower fleet --serve`, for desks and phones; they load nothing and run no script."""

import time
from collections.abc import Sequence

from jinja2 import Environment, StrictUndefined

STYLE = """
:root { color-scheme: light dark }
body { font: 15px/1.4 system-ui, sans-serif; margin: 1.5rem auto; max-width: 90rem; padding: 0 1rem }
h1 { font-size: 1.4rem }
table { border-collapse: collapse; width: 100% }
td, th { padding: .3rem .6rem; text-align: left; vertical-align: top; border-bottom: 1px solid #8886;
  min-width: 4.5rem; overflow-wrap: anywhere }
th { font-weight: 600; overflow-wrap: normal }
a { color: light-dark(#0550ae, #6cb6ff) }
.alert { border-left: 4px solid; padding-left: .6rem; color: light-dark(#a40000, #ff8f8f) }
@media (max-width: 70rem) {
  table, tbody, tr, td { display: block }
  tr { border: 1px solid #8886; border-radius: 6px; margin: 0 0 .8rem; padding: .3rem }
  tr:has(th), td:empty { display: none }
  td { border: 0; display: grid; grid-template-columns: 8rem 1fr; padding: .1rem .4rem }
  td::before { content: attr(data-name); opacity: .7 }
}
"""
PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1"><meta http-equiv="refresh" content="60">
<title>{{ title }}</title><style>{{ style|safe }}</style></head><body><h1>{{ title }}</h1>
{% for alert in alerts %}<p class="alert">{{ alert }}</p>{% endfor %}
<table><tbody><tr>{% for name in headers %}<th>{{ name }}</th>{% endfor %}</tr>
{% for row in rows %}{% set device = devices[loop.index0] if loop.index0 < devices|length else none %}<tr>
{%- for cell in row %}<td data-name="{{ headers[loop.index0] }}">
{%- if loop.first and device is not none %}<a href="/device/{{ device }}">{{ cell }}</a>{% else %}{{ cell }}{% endif -%}
</td>{% endfor %}</tr>
{% endfor %}</tbody></table>
<p>As of {{ at }}. <a href="/">All devices</a>, <a href="/metrics">figures for Prometheus</a></p></body></html>"""
TEMPLATE = Environment(autoescape=True, undefined=StrictUndefined).from_string(PAGE)


def page(
    title: str, headers: Sequence[str], rows: Sequence[Sequence[str]], alerts: Sequence[str], devices: Sequence[int]
) -> str:
    """Return a page with a table, of whose rows the first are those of `devices` and lead to their pages."""
    at = time.strftime("%Y-%m-%d %H:%M:%S")
    values = {"headers": headers, "rows": rows, "alerts": alerts, "devices": devices, "at": at}
    return TEMPLATE.render(title=title, style=STYLE, **values)
