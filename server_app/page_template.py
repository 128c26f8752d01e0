"""The template of a page, its style, and the script that draws its charts: texts, of which `pages` makes pages."""

MACROS = """
{%- macro row(cells, tag, text_columns, muted=false) -%}
<tr{% if muted %} class="muted"{% endif %}>{% for cell in cells -%}
<{{ tag }}{% if loop.index > text_columns %} class=n{% endif %}>{{ cell }}</{{ tag }}>
{%- endfor %}</tr>
{%- endmacro -%}
{%- macro cells_of(it) -%}
<div class="wide"><table><thead>{{ row(it.headers, "th", it.text_columns) }}</thead><tbody>
{%- for cells in it.rows %}{{ row(cells, "td", it.text_columns, loop.index0 in it.muted) }}{% endfor -%}
</tbody></table></div>
{%- endmacro -%}
{%- macro export(title, kind, ending, text) -%}
<a download="{{ title | lower | replace(" ", "-") }}.{{ ending }}"
href="data:text/plain;base64,{{ text | letters }}">{{ kind }}</a>
{%- endmacro -%}
{%- macro table(it) -%}
{{ cells_of(it) }}<p class="export">{{ export(it.title, "CSV", "csv", it.csv()) }}
{{ export(it.title, "LaTeX", "tex", it.latex()) }} {{ export(it.title, "Markdown", "md", it.markdown()) }}</p>
{%- endmacro -%}
{%- macro heading(text) -%}<h2>{{ text }}</h2>{%- endmacro -%}
{%- macro paragraph(text, css="lead") -%}<p class="{{ css }}">{{ text }}</p>{%- endmacro -%}
{%- macro points(title, sentences) -%}<section class="points"><h2>{{ title }}</h2>
<ul>{% for it in sentences %}<li>{{ it }}</li>{% endfor %}</ul></section>{%- endmacro -%}
{%- macro preformatted(text) -%}<pre>{{ text }}</pre>{%- endmacro -%}
{#- (label, figure, what else to know about it), each in a card -#}
{%- macro cards(figures) -%}<div class="cards">{% for label, figure, more in figures -%}
<div class=card><span>{{ label }}</span><strong>{{ figure }}</strong><small>{{ more }}</small></div>{% endfor %}</div>
{%- endmacro -%}
{#- folded: what stands on the fold; "" where the table is not folded -#}
{%- macro shown(it, folded="") -%}
{% if folded %}<details><summary>{{ folded }}</summary>
{{ table(it) }}</details>{% else %}{{ table(it) }}{% endif %}
{%- endmacro -%}
{%- macro data(files) -%}<p class="note">Data: {% for file, what in files -%}
<a href="{{ file }}">{{ file }}</a> ({{ what }}){{ "" if loop.last else ", " }}{% endfor %}</p>{%- endmacro -%}
{%- macro chart(it) -%}
<figure{% if it.wide %} class="row"{% endif %}><figcaption>{{ it.title }}</figcaption>
{%- if it.legend %}<ul class="legend">{% for entry in it.legend -%}
<li><button data-trace="{{ entry.trace }}">
<span class="stroke {{ entry.dash }}" style="color: var(--{{ entry.color }})"></span>{{ entry.name }}</button></li>
{%- endfor %}</ul>{% endif %}
{%- if it.key %}<ul class="legend">{% for color, meaning in it.key %}
<li><span class="box" style="background: var(--{{ color }})"></span>{{ meaning }}</li>
{%- endfor %}</ul>{% endif %}
{%- if it.traces %}
<div class="plot" data-figure="{{ number_of(it) }}" style="height: {{ it.height }}px" role="img"
aria-label="{{ it.title }}"></div>
<p class="export"><button data-svg="{{ it.title }}">SVG</button></p>{% else -%}
<p class="empty">nothing was measured</p>{% endif %}
{%- if it.note %}<p class="note">{{ it.note }}</p>{% endif %}</figure>
{%- endmacro -%}
"""

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title><style>{{ style | safe }}</style></head><body><main>
<h1>{{ name }}{% if badge %} <span class="badge {{ badge }}">{{ badge }}</span>{% endif %}</h1>
{% for block in blocks -%}
{% if block is string %}{{ block }}
{% else %}<div class="charts">{% for it in block.drawn %}{{ chart(it) }}{% endfor %}</div>
{%- if block.constant %}<p class="note">The same in every round: {{ block.constant }}.</p>{% endif %}
{% endif %}
{%- endfor %}
</main>
{% if figures -%}
<p class="trouble" id="trouble" hidden></p>
<noscript><p class="note">The charts need JavaScript; all they show is in the data beside this page.</p></noscript>
<script type="application/json" id="figures">{{ figures | tojson }}</script>
<script type="application/octet-stream" id="library">{{ library | safe }}</script>
<script>{{ script | safe }}</script>
{%- endif %}
</body></html>
"""

# Draws the figures in the colors of the page's style, again when these change from light to dark.
SCRIPT = """
(async () => {
  if (typeof DecompressionStream === "undefined") {
    throw new Error("this browser cannot unpack their library; browsers of 2023 and later can");
  }
  const bytes = Uint8Array.from(atob(document.getElementById("library").textContent), (c) => c.charCodeAt(0));
  const unpacked = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const library = document.createElement("script");
  library.textContent = await new Response(unpacked).text();
  document.head.append(library);
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const plots = [...document.querySelectorAll("[data-figure]")];
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
  const colored = (trace) => {
    if (trace.type === "heatmap") {
      return { ...trace, colorscale: trace.meta.map(([step, name]) => [step, color(name)]) };
    }
    const named = color(trace.meta);
    if (trace.fill) return { ...trace, fillcolor: `${named}2e`, line: { width: 0, color: named } };
    if (trace.type === "bar") return { ...trace, marker: { color: named, line: { width: 0 } } };
    const inside = trace.marker.symbol ? named : color("card");
    return {
      ...trace,
      line: { ...trace.line, color: named },
      error_x: { ...trace.error_x, color: named },
      marker: { ...trace.marker, color: inside, line: { width: 1.5, color: named } },
    };
  };
  const axis = (given, common) => ({ ...common, ...given });
  const figure = (plot) => {
    const { traces, layout } = figures[plot.dataset.figure];
    const common = { gridcolor: color("rule"), linecolor: color("rule"), zeroline: false, automargin: true };
    const title = { ...layout.xaxis.title, standoff: 6, font: { size: 11.5 } };
    return { data: traces.map(colored), layout: {
      ...layout,
      xaxis: axis({ ...layout.xaxis, title }, { ...common, nticks: 6, showgrid: false }),
      yaxis: axis(layout.yaxis, { ...common, nticks: 6 }),
      showlegend: false,
      margin: { l: 52, r: 12, t: 8, b: 34 },
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: getComputedStyle(document.body).fontFamily, size: 11.5, color: color("soft") },
      hoverlabel: { bgcolor: color("card"), bordercolor: color("rule"), font: { size: 12.5, color: color("ink") } },
    } };
  };
  const draw = () => plots.forEach((plot) => {
    const { data, layout } = figure(plot);
    Plotly.react(plot, data, layout, { displayModeBar: false });
  });
  draw();
  const resized = new ResizeObserver((entries) => entries.forEach((entry) => Plotly.Plots.resize(entry.target)));
  plots.forEach((plot) => resized.observe(plot));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  for (const button of document.querySelectorAll("button[data-trace]")) {
    button.addEventListener("click", () => {
      const off = button.classList.toggle("off");
      const plot = button.closest("figure").querySelector(".plot");
      const number = Number(button.dataset.trace);
      figures[plot.dataset.figure].traces[number].visible = !off;  // which the next drawing reads
      Plotly.restyle(plot, { visible: !off }, [number]);
    });
  }
  // Outside of the page a chart needs its title, its legend and a ground of its own.
  for (const button of document.querySelectorAll("button[data-svg]")) {
    button.addEventListener("click", () => {
      const plot = button.closest("figure").querySelector(".plot");
      const { data, layout } = figure(plot);
      data.filter((trace) => trace.colorbar).forEach((trace) => { trace.showscale = true; });
      const around = { title: { text: button.dataset.svg }, showlegend: data.some((trace) => trace.showlegend) };
      const ground = { paper_bgcolor: color("card"), margin: { l: 60, r: 20, t: 50, b: 50 } };
      const size = { format: "svg", width: 640, height: Math.max(400, plot.clientHeight) };
      const filename = button.dataset.svg.toLowerCase().replaceAll(/[^a-z0-9]+/g, "-");
      Plotly.downloadImage({ data, layout: { ...layout, ...around, ...ground } }, { ...size, filename });
    });
  }
})().catch((error) => {
  const trouble = document.getElementById("trouble");
  trouble.textContent = `The charts cannot be drawn: ${error.message}. All they show is in the data beside this page.`;
  trouble.hidden = false;
  document.querySelector("h1").after(trouble);
});
"""

STYLE = """
:root { color-scheme: light dark; --back: #f6f7f9; --card: #fff; --ink: #1c2330; --soft: #5d6778; --rule: #e1e5eb;
  --c0: #2563eb; --c1: #d9480f; --c2: #0f9d6b; --c3: #9333ea; --c4: #b7860b; --c5: #0891b2; --c6: #db2777;
  --c7: #64748b;
  --s0: #cfe3f7; --s1: #a3c9ee; --s2: #72abe2; --s3: #4489d0; --s4: #2566b3; --s5: #123f7c;
  --good: #0f9d6b; --bad: #d42a2a; --failed: #d42a2a; --late: #e8a317; --refused: #a33bc2; --skipped: #a9b1bd; }
@media (prefers-color-scheme: dark) { :root { --back: #10141b; --card: #181e28; --ink: #e7ebf2; --soft: #98a3b5;
  --rule: #2b3442;
  --c0: #6ea8fe; --c1: #ff9a62; --c2: #45d19d; --c3: #c79bff; --c4: #e6c04c; --c5: #4fd0e6; --c6: #ff86bd;
  --c7: #a6b2c4;
  --s0: #1d3a5c; --s1: #23538a; --s2: #2f72b8; --s3: #4f97df; --s4: #85bdf2; --s5: #cbe4fd;
  --good: #45d19d; --bad: #ff6b6b; --failed: #ff6b6b; --late: #f2b84b; --refused: #d184ea; --skipped: #5b6676; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--ink); font: 15px/1.5 system-ui, -apple-system, "Segoe UI",
  sans-serif; }
main { max-width: 1320px; margin: 0 auto; padding: 24px 20px 48px; }
h1 { font-size: 26px; line-height: 1.25; margin: 0 0 2px; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 32px 0 10px; }
p.lead { color: var(--soft); margin: 0 0 18px; overflow-wrap: anywhere; }
.badge { display: inline-block; vertical-align: 4px; font-size: 13px; font-weight: 600; padding: 1px 10px;
  border-radius: 99px;
  margin-left: 8px; border: 1.5px solid currentColor; color: var(--soft); }
.badge.finished { color: var(--good); } .badge.failed { color: var(--bad); }
.cards { display: grid; grid-template-columns: repeat(4, 1fr); gap: 12px; }
.card, figure, .wide, pre, details { background: var(--card); border: 1px solid var(--rule); border-radius: 10px; }
.card { padding: 12px 14px; display: flex; flex-direction: column; }
.card span, .card small, .note, .empty { color: var(--soft); font-size: 13px; }
.card strong { font-size: 22px; line-height: 1.35; font-variant-numeric: tabular-nums; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 380px), 1fr)); gap: 14px;
  margin-top: 14px; }
figure { margin: 0; padding: 12px 14px; min-width: 0; display: flex; flex-direction: column; }
figcaption { font-weight: 600; }
.plot { margin-top: auto; min-width: 0; max-width: 100%; overflow: hidden; } .charts figure.row { grid-column: 1 / -1; }
.note { margin: 6px 0 0; } .trouble { color: var(--bad); font-weight: 600; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 2px 14px; margin: 2px 0 6px; padding: 0;
  font-size: 13px;
  color: var(--soft); overflow-wrap: anywhere; }
.export { margin: 2px 0 0; text-align: right; font-size: 12px; }
.export a, .export button { font: inherit; color: var(--soft); background: none; border: 0; padding: 2px 4px;
  cursor: pointer; text-decoration: underline; }
.points { background: var(--card); border: 1px solid var(--rule); border-radius: 10px; padding: 2px 16px 8px;
  margin: 14px 0; }
.points h2 { margin: 10px 0 4px; font-size: 16px; } .points ul { margin: 0; padding-left: 18px; }
.points li { margin: 3px 0; overflow-wrap: anywhere; }
tr.muted td { color: var(--soft); font-style: italic; }
.legend button { font: inherit; color: inherit; background: none; border: 0; padding: 0; cursor: pointer; }
.legend button.off { opacity: .4; }
.stroke { display: inline-block; width: 20px; border-top: 2.5px solid; margin-right: 5px; vertical-align: 4px; }
.stroke.dash { border-top-style: dashed; } .stroke.dot { border-top-style: dotted; }
.box { display: inline-block; width: 12px; height: 12px; border-radius: 3px; margin-right: 5px;
  vertical-align: -1px; }
table { border-collapse: collapse; width: 100%; font-size: 14px; } th, td { padding: 6px 12px; text-align: left; }
th { color: var(--soft); font-weight: 600; white-space: nowrap; border-bottom: 1px solid var(--rule); }
tr + tr td { border-top: 1px solid var(--rule); } td { overflow-wrap: anywhere; min-width: 60px; }
td:first-child { min-width: 110px; }
th.n, td.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
pre { padding: 12px 14px; overflow-x: auto; font-size: 13px; line-height: 1.45; border-left: 4px solid var(--bad); }
details { padding: 10px 14px; margin-top: 12px; } summary { cursor: pointer; font-weight: 600; }
  details .wide { border: 0; }
@media (max-width: 900px) { .cards { grid-template-columns: 1fr 1fr; } }
@media (max-width: 600px) { main { padding: 16px 12px 32px; } h1 { font-size: 22px; }
  th, td { padding: 5px 8px; } .cards { gap: 8px; } .card strong { font-size: 19px;
  } }
.wide { overflow-x: auto; }
"""
