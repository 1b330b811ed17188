"use strict";

const BRIEF = "The file has the step time and the memory of this layout. Memory by part, the timeline, traffic " +
  "and whether Phalanx can train it are in the file for the first choices and the Pareto front; the page that " +
  "phalanx plan explore serves has them for every layout.";

/** A command with a button that copies it. */
function commandBox(title, command) {
  const button = element("button", { type: "button" }, "Copy");
  button.addEventListener("click", async () => {
    await copy(command);
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = "Copy"), 1500);
  });
  return element("div", { class: "command" }, element("span", {}, title), element("code", {}, command), button);
}

/** Put a text on the clipboard; a page from a file has no navigator.clipboard in some browsers. */
async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const field = element("textarea", { style: "position:fixed;opacity:0" }, text);
    document.body.append(field);
    field.select();
    document.execCommand("copy");
    field.remove();
  }
}

function tile(title, value, detail = "") {
  return element("div", {}, element("dt", {}, title), element("dd", {}, value, element("small", {}, detail)));
}

/** What is known of one layout. */
function layoutCard(row, letter, details, longest) {
  const { setup } = state.facts;
  const { layouts } = state;
  const counted = state.facts.counted[row];
  const memory = tile("memory", gib(counted?.memory_bytes ?? layouts.memory[row]),
    counted ? "counted tensor by tensor" : "the formula's estimate");
  const host = details.node_host_bytes > 0 && tile("CPU memory of a node", gib(details.node_host_bytes), details.host_use);
  const range = `80 %: ${seconds(details.low_seconds)} to ${seconds(details.high_seconds)}`;
  return element("article", { class: letter },
    element("header", {}, element("b", { class: "letter" }, letter), element("h3", {}, details.name), cardButton(letter)),
    warnings(details),
    details.is_brief && element("p", { class: "quiet brief" }, BRIEF),
    element("dl", { class: "tiles" },
      tile("step", seconds(details.step_seconds), range),
      tile("tokens/s", si(details.tokens_per_second), `${si(details.tokens_per_second / setup.ranks)} per device`),
      tile("MFU", percent(details.mfu), details.hfu ? `HFU ${percent(details.hfu)}` : ""),
      memory,
      host,
      tile("P(OOM)", percent(details.p_oom), details.fit ?? "by the formula")),
    element("div", { class: "figures" },
      element("div", { class: "column" },
        breakdownFigure(setup, details.parts, details.step_seconds, longest),
        details.traffic && trafficFigure(setup, details.traffic)),
      details.memory && memoryFigure(setup, details.memory),
      details.timeline && timelineFigure(setup, details.timeline)),
    commands(row, details));
}

function warnings({ problem, warnings: texts }) {
  const all = [...texts];
  if (problem) all.unshift(`Phalanx cannot train this layout. ${problem}`);
  return all.length ? element("ul", { class: "problems" }, all.map((text) => element("li", {}, text))) : null;
}

function commands(row, { problem }) {
  const { layouts, facts } = state;
  return element("div", { class: "commands" },
    !problem && facts.setup.commands.train && commandBox("Train it", layouts.trainCommand(row)),
    commandBox("Compare it with the first choice", layouts.compareCommand(row)),
    facts.web ? null : commandBox("Ask for other machines and batches", facts.setup.commands.explore));
}

/** Start or end a comparison. */
function cardButton(letter) {
  const begin = letter === "A" && !state.comparing;
  const toggle = () => {
    state.comparing = begin;
    state.selected = [letter === "B" ? state.selected[0] : state.selected.at(begin ? 0 : -1)];
    showChoices();
    showDetails();
  };
  return element("button", { type: "button", class: "compare", onclick: toggle },
    begin ? "Compare with another" : letter === "A" ? "Keep only B" : "Keep only A");
}

function emptyCard() {
  return element("article", { class: "B empty" },
    element("header", {}, element("b", { class: "letter" }, "B"), element("h3", {}, "Click a second layout")),
    element("p", { class: "quiet" }, "Choose a point of the chart or one of the planner's first choices."));
}

/** Two layouts in numbers, with the difference. */
function comparisonTable(setup, [first, second]) {
  const row = (name, values, format) => element("tr", {},
    element("td", {}, name), values.map((value) => element("td", {}, format(value))),
    element("td", {}, format === seconds ? seconds(values[1] - values[0], true) : ""));
  const parts = Object.entries(setup.parts)
    .filter(([part]) => Math.max(first.parts[part], second.parts[part]) > 0)
    .map(([part, { meaning }]) => row(meaning, [first.parts[part], second.parts[part]], seconds));
  const ratio = second.step_seconds / first.step_seconds;
  const verdict = Math.abs(ratio - 1) < setup.tie_tolerance ? "A and B are equally fast"
    : `B takes ${percent(Math.abs(ratio - 1))} ${ratio > 1 ? "longer" : "less time"} than A`;
  return element("section", {},
    element("h2", {}, verdict),
    element("table", { class: "compared" },
      element("thead", {}, element("tr", {}, ["", "A", "B", "B − A"].map((title) => element("th", {}, title)))),
      element("tbody", {}, parts,
        element("tr", { class: "sum" }, ...row("step", [first.step_seconds, second.step_seconds], seconds).childNodes),
        row("tokens per second", [first.tokens_per_second, second.tokens_per_second], (value) => si(value)),
        row("P(OOM)", [first.p_oom, second.p_oom], percent))));
}
