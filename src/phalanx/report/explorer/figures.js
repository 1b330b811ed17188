"use strict";

/** A bar of parts side by side, as shares of `whole`; parts below a thousandth are left out. */
function stackedBar(parts, whole, describe) {
  const shown = parts.filter(({ size }) => size > whole / 1000);
  return element("div", { class: "bar" }, shown.map(({ name, size, color }) => {
    const part = element("span", { class: "part", style: `width:${(100 * size) / whole}%;background:${color}` });
    withTip(part, () => describe(name, size));
    return part;
  }));
}

function swatch(color) {
  return element("span", { class: "swatch", style: `background:${color}` });
}

/** Where the seconds of a step go: a bar, and a row for each part. `longest` is the longest compared step. */
function breakdownFigure(setup, seconds_, total, longest) {
  const parts = Object.entries(setup.parts)
    .map(([name, { meaning, color }]) => ({ name, meaning, color, size: Math.max(0, seconds_[name]) }))
    .filter(({ size }) => size > total / 10_000);
  const bar = stackedBar(parts, longest, (name, size) => `${setup.parts[name].meaning}: ${seconds(size)}`);
  const rows = parts.map(({ meaning, color, size }) =>
    element("tr", {},
      element("td", {}, swatch(color), meaning),
      element("td", {}, seconds(size)),
      element("td", {}, percent(size / total))));
  return element("section", {},
    element("h4", {}, "Where a step goes"),
    bar,
    element("table", { class: "parts" }, element("tbody", {}, rows)));
}

/** Memory of the fullest rank of each pipeline rank, by part, and the most of all parts at one time. */
function memoryFigure(setup, memory) {
  const roles = Object.entries(memory);
  const sum = (parts) => Object.values(parts).reduce((total, size) => total + size, 0);
  const names = Object.keys(setup.memory_parts).filter((name) => roles.some(([, { parts }]) => parts[name] > 0));
  const limit = setup.memory_bytes;
  const longest = 1.04 * Math.max(limit, ...roles.map(([, { parts, peak_bytes }]) => Math.max(sum(parts), peak_bytes)));
  const at = (bytes) => `left:${(100 * bytes) / longest}%`;
  const every = Math.ceil(roles.length / 16);
  const rows = roles.map(([role, { parts, peak_bytes }], index) => {
    const label = role === "rank" ? "every rank" : role.replace("pp", "stage ");
    const shown = names.map((name) => ({ name, size: parts[name] ?? 0, color: setup.memory_parts[name].color }));
    const bar = stackedBar(shown, longest, (name, size) => `${label}, ${setup.memory_parts[name].meaning}: ${gib(size)}`);
    const peak = element("i", { class: "peak", style: at(peak_bytes) });
    withTip(peak, () => `${label}, at one time: ${gib(peak_bytes)}`);
    return [
      element("span", { class: "role" }, index % every ? "" : label),
      element("div", { class: "track" }, bar, element("i", { class: "limit", style: at(limit) }), peak),
      element("span", { class: "total" }, index % every ? "" : gib(peak_bytes)),
    ];
  });
  const height = roles.length > 48 ? 5 : roles.length > 16 ? 9 : roles.length > 1 ? 18 : 26;
  const legend = names.map((name) =>
    element("li", {}, swatch(setup.memory_parts[name].color), setup.memory_parts[name].meaning));
  return element("section", {},
    element("h4", {}, roles.length > 1 ? "Memory of a rank, by pipeline rank" : "Memory of a rank"),
    element("ul", { class: "legend" }, legend),
    element("div", { class: "memory", style: `--row:${height}px` }, rows.flat()),
    element("p", { class: "quiet" },
      `Counted tensor by tensor. Parts have their maxima at different times; the mark and the number are all of ` +
      `them at one time. Dashed: the ${gib(limit)} of the device.`));
}

/** Bytes that a rank sends in a step, by kind of parallelism and kind of link. */
function trafficFigure(setup, traffic) {
  const axes = Object.entries(traffic);
  const heading = element("h4", {}, "Traffic of a step, by kind of link");
  if (!axes.length) return element("section", {}, heading, element("p", { class: "quiet" }, "No rank sends anything."));
  const links = Object.entries(setup.links).map(([link, { name, color }]) =>
    ({ link, name, color, size: axes.reduce((total, [, sizes]) => total + sizes[link], 0) / setup.ranks }));
  const used = links.filter(({ size }) => size > 0);
  const whole = used.reduce((total, { size }) => total + size, 0);
  const cells = (sizes) => used.map(({ link }) => element("td", {}, sizes[link] ? si(sizes[link] / setup.ranks, "B") : "–"));
  const body = axes.map(([axis, sizes]) => element("tr", {}, element("td", {}, setup.axes[axis]), cells(sizes)));
  const total = element("tr", { class: "sum" }, element("td", {}, "all"), used.map(({ size }) => element("td", {}, si(size, "B"))));
  return element("section", {},
    heading,
    stackedBar(used, whole, (name, size) => `${name}: ${si(size, "B")}, ${percent(size / whole)}`),
    element("table", { class: "traffic" },
      element("thead", {}, element("tr", {}, element("th", {}), used.map(({ name, color }) => element("th", {}, swatch(color), name)))),
      element("tbody", {}, body, axes.length > 1 && total)),
    element("p", { class: "quiet" }, "Bytes that a rank sends, the mean of all ranks."));
}

/** Passes of a simulated step with their starts, from order, durations and waits (details.py). */
function timelinePasses({ ranks, seconds: durations }) {
  return ranks.map(({ kinds, stages, micros, waits }) => {
    const waitBefore = new Map(waits);
    let now = 0;
    return [...kinds].map((kind, at) => {
      const start = now + (waitBefore.get(at) ?? 0);
      now = start + durations[kind][stages[at]];
      return { kind, stage: stages[at], micro: micros[at], start, end: now };
    });
  });
}

/** The passes of a step on each pipeline rank. */
function timelineFigure(setup, timeline) {
  const section = element("section", { class: "wide" }, element("h4", {}, "The passes of a step, by pipeline rank"));
  if (!timeline.ranks) {
    section.append(element("p", { class: "quiet" }, timeline.note));
    return section;
  }
  const passes = timelinePasses(timeline);
  const kinds = Object.entries(setup.passes).filter(([kind]) => passes.some((rank) => rank.some((one) => one.kind === kind)));
  const row = passes.length > 64 ? 5 : passes.length > 24 ? 9 : passes.length > 8 ? 14 : 20;
  const canvas = element("canvas", { class: "timeline", style: `height:${row * passes.length + 24}px` });
  const draw = () => drawTimeline(canvas, setup, passes, timeline.makespan, row);
  new ResizeObserver(draw).observe(canvas);
  withTip(canvas, (event) => describePass(canvas, setup, passes, timeline.makespan, row, event));
  section.append(
    element("ul", { class: "legend" }, kinds.map(([, { name, colors }]) => element("li", {}, swatch(colors[0]), name))),
    canvas,
    element("p", { class: "quiet" },
      `Simulated with the times that the planner gives each pass: ${seconds(timeline.makespan)} of passes and waiting, ` +
      `without sends and exchanges of data-parallel ranks. Numbers are micro-batches` +
      `${passes.some((rank) => new Set(rank.map(({ stage }) => stage)).size > 1) ? "; lighter are later stages of a rank" : ""}.`));
  return section;
}

const TIMELINE_LEFT = 26;

function drawTimeline(canvas, setup, passes, makespan, row) {
  const { width, height } = canvas.getBoundingClientRect();
  const ratio = window.devicePixelRatio || 1;
  if (!width) return;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  context.font = `${Math.min(11, row - 4)}px system-ui, sans-serif`;
  context.textBaseline = "middle";
  const scale = (width - TIMELINE_LEFT - 8) / makespan;
  const every = Math.ceil(passes.length / (passes.length > 24 ? 12 : 24));
  passes.forEach((rank, index) => {
    const first = Math.min(...rank.map(({ stage }) => stage));
    context.fillStyle = color("--card");
    context.fillRect(TIMELINE_LEFT, index * row, width - TIMELINE_LEFT - 8, row - 1);
    for (const { kind, stage, micro, start, end } of rank) {
      const [x, wide] = [TIMELINE_LEFT + start * scale, (end - start) * scale];
      context.fillStyle = setup.passes[kind].colors[stage === first ? 0 : 1];
      context.fillRect(x, index * row, Math.max(0.5, wide - (wide > 4 ? 1 : 0)), row - 1);
      if (row >= 14 && wide > 6 + 6 * String(micro).length) {
        context.fillStyle = "#ffffff";
        context.textAlign = "center";
        context.fillText(micro, x + wide / 2, index * row + row / 2);
      }
    }
    if (index % every) return;
    context.fillStyle = color("--quiet");
    context.textAlign = "right";
    context.save();
    context.font = "11px system-ui, sans-serif";
    context.fillText(index, TIMELINE_LEFT - 6, index * row + row / 2);
    context.restore();
  });
  drawTimeAxis(context, width, passes.length * row, makespan, scale);
}

function drawTimeAxis(context, width, top, makespan, scale) {
  const rough = makespan / Math.max(2, width / 110);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((digit) => digit * power).find((size) => size >= rough);
  const [factor, unit] = makespan >= 1 ? [1, "s"] : [1e3, "ms"];
  context.font = "11px system-ui, sans-serif";
  context.fillStyle = color("--quiet");
  for (let at = 0; at <= makespan; at += step) {
    context.textAlign = at ? "center" : "left";
    const label = `${Number((factor * at).toPrecision(6))} ${unit}`;
    if (TIMELINE_LEFT + at * scale < width - 20) context.fillText(label, TIMELINE_LEFT + at * scale, top + 13);
  }
}

function describePass(canvas, setup, passes, makespan, row, event) {
  const box = canvas.getBoundingClientRect();
  const rank = Math.floor((event.clientY - box.top) / row);
  const time = ((event.clientX - box.left - TIMELINE_LEFT) / (box.width - TIMELINE_LEFT - 8)) * makespan;
  const found = passes[rank]?.find(({ start, end }) => start <= time && time < end);
  if (!passes[rank] || time < 0 || time > makespan) return null;
  if (!found) return `rank ${rank}: waiting`;
  const { kind, stage, micro, start, end } = found;
  return `rank ${rank}: ${setup.passes[kind].name}, stage ${stage}, micro-batch ${micro}, ${seconds(end - start)}`;
}

const tip = element("div", { id: "tip", role: "status" });

/** Show a text next to the pointer, or nothing. */
function showTip(text, anchor, at) {
  tip.style.display = text ? "block" : "none";
  if (!text) return;
  tip.textContent = text;
  const box = anchor.getBoundingClientRect();
  const [x, y] = [box.left + at[0], box.top + at[1]];
  const width = tip.offsetWidth;
  tip.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - width - 4))}px`;
  tip.style.top = `${y > tip.offsetHeight + 16 ? y - tip.offsetHeight - 10 : y + 18}px`;
}

/** Show what `describe` says of an element under the pointer. */
function withTip(target, describe) {
  target.addEventListener("pointermove", (event) => {
    const box = target.getBoundingClientRect();
    showTip(describe(event), target, [event.clientX - box.left, event.clientY - box.top]);
  });
  target.addEventListener("pointerleave", () => showTip(null));
}
