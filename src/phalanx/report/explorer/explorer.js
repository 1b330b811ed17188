"use strict";

const dark = matchMedia("(prefers-color-scheme: dark)");
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const byId = (id) => document.getElementById(id);
const SHOWN_CHOICES = 8;
const LETTERS = ["A", "B"];

const state = { facts: null, layouts: null, selected: [], comparing: false, hidden: new Set(), allChoices: false };
const scatter = new Scatter(byId("scatter"), { onSelect: select, describe: describePoint });

/** The number that a pixel of this color is: alpha, blue, green, red. */
function pixel(text, faint = false) {
  const channels = [1, 3, 5].map((at) => parseInt(text.slice(at, at + 2), 16));
  const paper = [1, 3, 5].map((at) => parseInt(color("--paper").slice(at, at + 2), 16));
  const [red, green, blue] = channels.map((value, at) => Math.round(faint ? 0.3 * value + 0.7 * paper[at] : value));
  return ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0;
}

/** What points are colored by: a category for each row, and the name and color of each category. */
function categories(by) {
  const { layouts, facts } = state;
  if (by === "fit") {
    const colors = [color("--fits"), color("--off"), color("--unfit")];
    return { of: layouts.fits, names: ["fits", "may not fit", "does not fit"], colors, faint: false };
  }
  const values = layouts.values[by];
  const isNumber = typeof values[0] === "number";
  const sorted = isNumber ? [...values].sort((a, b) => a - b) : values;
  const place = values.map((value) => sorted.indexOf(value));
  const palette = isNumber ? facts.palettes.numbers : facts.palettes.names;
  const colors = sorted.map((_, at) =>
    isNumber ? palette[Math.round((at / Math.max(1, sorted.length - 1)) * (palette.length - 1))] : palette[at % palette.length]);
  return { of: layouts.indices[by].map((index) => place[index]), names: sorted.map(String), colors, faint: true };
}

/** Color the points and list the categories; a category that is clicked is hidden. */
function paint() {
  const { layouts, hidden } = state;
  const { of, names, colors, faint } = categories(byId("color-by").value);
  const counts = names.map(() => 0);
  const isShown = names.map((name) => !hidden.has(name));
  const onlyFitting = byId("only-fitting").checked;
  const order = new Uint32Array(layouts.rows);
  let shown = 0;
  for (const fit of onlyFitting ? [1, 0] : [2, 1, 0]) {
    for (let row = 0; row < layouts.rows; row++) {
      if (layouts.fits[row] !== fit) continue;
      counts[of[row]]++;
      if (isShown[of[row]]) order[shown++] = row;
    }
  }
  const strong = colors.map((text) => pixel(text));
  const weak = colors.map((text) => pixel(text, faint));
  const colorOf = new Uint32Array(layouts.rows);
  for (let row = 0; row < layouts.rows; row++) colorOf[row] = (layouts.fits[row] === 2 ? weak : strong)[of[row]];
  scatter.setColors(order.subarray(0, shown), colorOf);
  scatter.draw();
  byId("legend").replaceChildren(...names.map((name, at) => counts[at] > 0 && legendButton(name, colors[at], counts[at])).filter(Boolean));
  byId("empty").hidden = shown > 0;
}

function legendButton(name, shade, count) {
  const isHidden = state.hidden.has(name);
  const toggle = () => {
    isHidden ? state.hidden.delete(name) : state.hidden.add(name);
    paint();
  };
  return element("li", {},
    element("button", { type: "button", "aria-pressed": String(!isHidden), onclick: toggle },
      swatch(shade), name, element("small", {}, ` ${count.toLocaleString("en-US")}`)));
}

/** Limits of both axes around the rows that a test picks, as logarithms with a margin; `most` leaves out the rest. */
function viewOf(isWanted, most = 1) {
  const range = (logs) => {
    const sorted = logs.filter((_, row) => isWanted(row)).sort();
    const [low, high] = [sorted[0], sorted[Math.floor(most * (sorted.length - 1))]];
    const margin = Math.max(0.02, 0.05 * (high - low));
    return [low - margin, high + margin];
  };
  return { x: range(scatter.logX), y: range(scatter.logY) };
}

/** Look at what fits, at the best, or at all layouts. */
function setView(name) {
  const { layouts, facts } = state;
  if (name === "all") return scatter.show(viewOf(() => true));
  const best = new Set([...facts.front, ...facts.ranked]);
  return scatter.show(name === "front" ? viewOf((row) => best.has(row)) : fittingView(layouts));
}

function fittingView({ fits }) {
  const view = viewOf(fits.includes(0) ? (row) => fits[row] < 2 : () => true, 0.97);
  view.y[1] = Math.max(view.y[1], Math.log10(1.4 * scatter.limit));
  return view;
}

function describePoint(row) {
  const { facts, layouts } = state;
  const source = facts.counted[row] ? "counted" : "estimated";
  return `${layouts.name(row)}\n${seconds(layouts.seconds[row])} a step, ${gib(layouts.memory[row])} ${source}`;
}

/** Show other facts: those in the page, or those of new choices. */
async function load(facts) {
  const layouts = await Layouts.unpack(facts.columns, facts.setup, facts.counted);
  Object.assign(state, { facts, layouts, selected: [facts.ranked[0]], comparing: false, hidden: new Set() });
  const memoryGib = layouts.memory.map((bytes) => bytes / GIB);
  scatter.setData({ x: layouts.seconds, y: memoryGib, front: facts.front, limit: facts.setup.memory_bytes / GIB });
  showHead();
  showChoices();
  scatter.resize();
  paint();
  scatter.home = fittingView(layouts);
  scatter.show(scatter.home);
  await showDetails();
}

function showHead() {
  const { setup } = state.facts;
  byId("title").textContent = setup.title;
  document.title = `${setup.title} - Phalanx`;
  byId("summary").replaceChildren(...setup.summary.map((text) => element("li", {}, text)));
  byId("notes").replaceChildren(...setup.notes.map((text) => element("li", {}, text)));
}

/** The planner's first choices, in its order. */
function showChoices() {
  const { facts, layouts, allChoices } = state;
  const rows = allChoices ? facts.ranked : facts.ranked.slice(0, SHOWN_CHOICES);
  const items = rows.map((row, at) => {
    const { step_seconds, memory_bytes, p_oom, mfu } = facts.counted[row];
    const figures = `${seconds(step_seconds)} · ${gib(memory_bytes)} · MFU ${percent(mfu)} · P(OOM) ${percent(p_oom)}`;
    const letter = LETTERS[state.selected.indexOf(row)];
    const button = element("button", { type: "button", onclick: () => select(row), "aria-pressed": String(Boolean(letter)) },
      element("b", {}, letter ?? String(at + 1)),
      element("span", {}, layouts.name(row), element("small", {}, figures)));
    return element("li", letter ? { class: letter } : {}, button);
  });
  byId("choices-list").className = allChoices ? "all" : "";
  byId("choices-list").replaceChildren(...items);
  const more = facts.ranked.length - SHOWN_CHOICES;
  byId("more-choices").hidden = more <= 0;
  byId("more-choices").textContent = allChoices ? "show fewer" : `${more} more`;
}

/** Take a layout as A, or as B while two are compared. */
function select(row) {
  state.selected = state.comparing ? [state.selected[0], row] : [row];
  showChoices();
  showDetails();
}

/** Details from the page or the server; of a layout without, what the columns have. */
async function detailsOf(row) {
  const { facts, layouts } = state;
  if (facts.details[row]) return inflateJson(facts.details[row]);
  if (facts.web) return post("layout", { ...facts.choices, layout: row });
  const total = layouts.seconds[row];
  const tokens_per_second = facts.setup.tokens_per_step / total;
  return {
    name: layouts.name(row), step_seconds: total, parts: layouts.parts(row), p_oom: layouts.p_oom[row], warnings: [],
    low_seconds: total / layouts.interval_factor[row], high_seconds: total * layouts.interval_factor[row],
    tokens_per_second, mfu: facts.setup.mfu_per_token_rate * tokens_per_second, is_brief: true,
  };
}

/** Take the memory that the server counted of a layout that was clicked: its point moves there. */
function takeCounted(row, { step_seconds, counted_bytes: memory_bytes, p_oom, mfu }) {
  const { facts, layouts } = state;
  if (!memory_bytes || facts.counted[row]) return;
  facts.counted[row] = { step_seconds, memory_bytes, p_oom, mfu };
  layouts.memory[row] = memory_bytes;
  layouts.fits = layouts.fit(facts.counted);
  scatter.logY[row] = Math.log10(memory_bytes / GIB);
  paint();
}

async function showDetails() {
  const rows = [...state.selected];
  scatter.selected = rows.map((row, at) => ({ row, letter: LETTERS[at] }));
  scatter.drawMarks();
  byId("details").classList.add("busy");
  try {
    const details = await Promise.all(rows.map(detailsOf));
    if (rows.join() !== state.selected.join()) return; // another was clicked meanwhile
    rows.forEach((row, at) => takeCounted(row, details[at]));
    const longest = Math.max(...details.map(({ step_seconds }) => step_seconds));
    const cards = rows.map((row, at) => layoutCard(row, LETTERS[at], details[at], longest));
    if (state.comparing && rows.length < 2) cards.push(emptyCard());
    byId("details").className = state.comparing ? "two" : "";
    byId("details").replaceChildren(...cards);
    byId("details").dataset.row = rows.at(-1);
    byId("comparison").replaceChildren(...(rows.length === 2 ? [comparisonTable(state.facts.setup, details)] : []));
    showProblem(null);
  } catch (error) {
    byId("details").classList.remove("busy");
    showProblem(error.message);
  }
}

function showProblem(text) {
  byId("problem").hidden = !text;
  byId("problem").textContent = text ?? "";
}

/** Answer of the planner that serves this page. Throws an error with its message. */
async function post(path, choices) {
  const headers = { "Content-Type": "application/json" };
  const answer = await fetch(path, { method: "POST", headers, body: JSON.stringify(choices) }).catch(() => {
    throw new Error("The planner does not answer: start phalanx plan explore again, and open the address that it prints.");
  });
  const body = await answer.json();
  if (!answer.ok) throw new Error(body.problem);
  return body;
}

async function plan(event) {
  event.preventDefault();
  const form = byId("choices");
  const { machine, nodes, batch, seq_len } = form.elements;
  const choices = { machine: machine.value, nodes: nodes.valueAsNumber, batch: batch.valueAsNumber, seq_len: seq_len.valueAsNumber };
  form.classList.add("busy");
  form.elements.plan.disabled = true;
  form.elements.plan.textContent = "Planning …";
  try {
    await load(await post("plan", choices));
  } catch (error) {
    showProblem(error.message);
  } finally {
    form.classList.remove("busy");
    form.elements.plan.disabled = false;
    form.elements.plan.textContent = "Plan";
  }
}

async function start() {
  document.body.append(tip);
  const facts = JSON.parse(byId("facts").textContent);
  byId("color-by").addEventListener("change", () => (state.hidden.clear(), paint()));
  byId("only-fitting").addEventListener("change", paint);
  byId("more-choices").addEventListener("click", () => {
    state.allChoices = !state.allChoices;
    showChoices();
  });
  for (const button of document.querySelectorAll("[data-view]")) {
    button.addEventListener("click", () => setView(button.dataset.view));
  }
  byId("choices")?.addEventListener("submit", plan);
  dark.addEventListener("change", () => (paint(), showDetails()));
  await load(facts);
  requestAnimationFrame(() => setTimeout(() => {
    state.readyAt = performance.now();
    document.body.dataset.ready = "true";
  }));
}

start();
