"use strict";
const dark = matchMedia("(prefers-color-scheme: dark)");
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** A figure in the page's colors; heat maps have few bytes near the paper's own. */
function dressed({ data, layout }) {
  const axis = { gridcolor: color("--line"), linecolor: color("--line"), ticks: "outside", tickcolor: "transparent" };
  return [
    data.map((trace) => (trace.type === "heatmap" ? { ...trace, reversescale: dark.matches } : trace)),
    {
      ...layout,
      paper_bgcolor: "transparent",
      plot_bgcolor: "transparent",
      font: { family: "system-ui, sans-serif", size: 12, color: color("--ink") },
      hoverlabel: { bgcolor: color("--card"), bordercolor: color("--line"), font: { color: color("--ink") } },
      template: { layout: { xaxis: axis, yaxis: axis } },
    },
    { displayModeBar: false, responsive: true },
  ];
}

/** Draw the figures of a part of the page; those of a closed report have no width yet, and follow when it opens. */
function draw(part = document) {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  for (const place of part.querySelectorAll(".figure"))
    if (!place.closest("details:not([open])")) Plotly.react(place, ...dressed(figures[place.id]));
}

/** Sort a table by a column: numbers before texts, the first click ascending, the second descending. */
function sort(head) {
  const body = head.closest("table").tBodies[0];
  const direction = head.ariaSort === "ascending" ? "descending" : "ascending";
  const value = (row) => JSON.parse(row.cells[head.cellIndex].dataset.value);
  const order = ([a], [b]) =>
    (a === null) - (b === null) ||
    (direction === "ascending" ? 1 : -1) *
      (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true }));
  for (const other of head.parentElement.cells) other.ariaSort = other === head ? direction : null;
  body.append(...[...body.rows].map((row) => [value(row), row]).sort(order).map(([, row]) => row));
}

/** What the run is now; figures that are drawn stay where they are and get new numbers. */
async function refresh() {
  const answer = await fetch("main.html");
  if (!answer.ok) throw new Error(await answer.text());
  const next = document.createElement("template");
  next.innerHTML = await answer.text();
  for (const place of next.content.querySelectorAll(".figure")) {
    const drawn = document.getElementById(place.id);
    if (drawn) place.replaceWith(drawn);
  }
  const open = [...document.querySelectorAll("details")].map((details) => details.open);
  document.querySelector("main").replaceWith(next.content);
  document.querySelectorAll("details").forEach((details, at) => (details.open = open[at] ?? details.open));
  draw();
}

function keepFresh(seconds) {
  const state = document.getElementById("state");
  refresh()
    .then(() => (state.textContent = `live, every ${seconds} s`))
    .catch((error) => (state.textContent = `not updated: ${error.message}`))
    .finally(() => setTimeout(keepFresh, 1000 * seconds, seconds));
}

dark.addEventListener("change", () => draw());
document.addEventListener("toggle", ({ target }) => target.open && draw(target), true);
document.addEventListener("click", ({ target }) => {
  if (target.closest(".sortable th")) sort(target.closest("th"));
  const link = target.closest(".sortable a");
  if (link) document.querySelector(link.hash).closest("details").open = true;
});
draw();
if (document.body.dataset.every) keepFresh(Number(document.body.dataset.every));
