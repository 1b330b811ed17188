"use strict";

const MARGIN = { left: 58, right: 16, top: 16, bottom: 46 };
const PICK_PIXELS = 14;

const TICK_DIGITS = [[1, 1.2, 1.4, 1.6, 1.8, 2, 2.5, 3, 3.5, 4, 4.5, 5, 6, 7, 8, 9], [1, 1.5, 2, 3, 4, 5, 6, 8], [1, 2, 3, 5, 7], [1, 2, 5], [1]];

/** Round numbers between two logarithms: as many of each power of ten as there is room for. */
function logTicks(low, high, most) {
  const powers = Array.from({ length: Math.ceil(high) - Math.floor(low) + 1 }, (_, at) => Math.floor(low) + at);
  const choices = TICK_DIGITS.map((digits_) =>
    powers.flatMap((power) => digits_.map((digit) => digit * 10 ** power))
      .filter((tick) => Math.log10(tick) >= low && Math.log10(tick) <= high));
  return choices.find((ticks) => ticks.length <= most) ?? choices.at(-1);
}

/** Number of a tick without trailing zeros. */
const tickText = (tick) => (tick >= 1e4 || tick < 1e-3 ? tick.toExponential(0) : String(Number(tick.toPrecision(3))));

/** Step time against memory: a point for each layout on one canvas, axes and marks on a second one above it. */
class Scatter {
  constructor(box, { onSelect, describe }) {
    this.box = box;
    this.points = box.querySelector(".points");
    this.marks = box.querySelector(".marks");
    this.describe = describe;
    Object.assign(this, { selected: [], hovered: null });
    this.marks.addEventListener("pointerdown", (event) => this.press(event));
    this.marks.addEventListener("pointermove", (event) => this.move(event));
    this.marks.addEventListener("pointerup", (event) => this.release(event, onSelect));
    this.marks.addEventListener("pointerleave", () => this.hover(null));
    this.marks.addEventListener("dblclick", () => this.show(this.home));
    new ResizeObserver(() => this.resize()).observe(box);
  }

  /** Other layouts: seconds and GiB of each, the rows of the front, and the GiB of the device. */
  setData({ x, y, front, limit }) {
    Object.assign(this, { x, y, front, limit, view: null, hovered: null });
    this.logX = logarithms(x);
    this.logY = logarithms(y);
  }

  /** The rows to draw, those above others last, and the color of every row as a number of a pixel. */
  setColors(order, colorOf) {
    Object.assign(this, { order, colorOf });
  }

  show(view) {
    this.view = view;
    this.draw();
  }

  resize() {
    const ratio = window.devicePixelRatio || 1;
    const { width, height } = this.box.getBoundingClientRect();
    if (!width || (width === this.width && height === this.height && ratio === this.ratio)) return;
    Object.assign(this, { width, height, ratio });
    for (const canvas of [this.points, this.marks]) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
    }
    if (this.view) this.draw();
  }

  get plot() {
    const { left, right, top, bottom } = MARGIN;
    return { left, top, width: this.width - left - right, height: this.height - top - bottom };
  }

  toX(log) {
    const { left, width } = this.plot;
    return left + ((log - this.view.x[0]) / (this.view.x[1] - this.view.x[0])) * width;
  }

  toY(log) {
    const { top, height } = this.plot;
    return top + height - ((log - this.view.y[0]) / (this.view.y[1] - this.view.y[0])) * height;
  }

  draw() {
    if (!this.width || !this.view) return;
    this.drawPoints();
    this.drawMarks();
  }

  /** Set pixels of an image: a hundred thousand points take some milliseconds so. */
  drawPoints() {
    const { ratio, order, logX, logY, colorOf, view } = this;
    const { left, top, width, height } = this.plot;
    const context = this.points.getContext("2d");
    const pixels = Math.max(1, Math.round((order.length > 8000 ? 2 : order.length > 2000 ? 3 : 5) * ratio));
    const image = context.createImageData(Math.round(width * ratio), Math.round(height * ratio));
    const ink = new Uint32Array(image.data.buffer);
    const scaleX = image.width / (view.x[1] - view.x[0]);
    const scaleY = image.height / (view.y[1] - view.y[0]);
    const round = pixels > 3;
    for (const row of order) {
      const centerX = Math.round((logX[row] - view.x[0]) * scaleX);
      const centerY = image.height - Math.round((logY[row] - view.y[0]) * scaleY);
      const fromX = centerX - (pixels >> 1);
      const fromY = centerY - (pixels >> 1);
      if (fromX < 0 || fromY < 0 || fromX + pixels > image.width || fromY + pixels > image.height) continue;
      for (let dy = 0; dy < pixels; dy++) {
        const inset = round && (dy === 0 || dy === pixels - 1) ? 1 : 0;
        const start = (fromY + dy) * image.width + fromX;
        ink.fill(colorOf[row], start + inset, start + pixels - inset);
      }
    }
    context.clearRect(0, 0, this.points.width, this.points.height);
    context.putImageData(image, Math.round(left * ratio), Math.round(top * ratio));
  }

  drawMarks() {
    const context = this.marks.getContext("2d");
    context.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    context.clearRect(0, 0, this.width, this.height);
    context.font = "12px system-ui, sans-serif";
    this.drawAxes(context);
    this.drawLimit(context);
    this.drawFront(context);
    this.selected.forEach(({ row, letter }) => this.drawSelected(context, row, letter));
    if (this.hovered !== null) this.ring(context, this.hovered, color("--ink"), 5);
    if (this.drag) this.drawDrag(context);
  }

  drawAxes(context) {
    const { left, top, width, height } = this.plot;
    const { x, y } = this.view;
    context.strokeStyle = color("--line");
    context.fillStyle = color("--quiet");
    context.lineWidth = 1;
    context.textAlign = "center";
    for (const tick of logTicks(x[0], x[1], width / 60)) {
      const at = Math.round(this.toX(Math.log10(tick))) + 0.5;
      stroke(context, [at, top], [at, top + height]);
      context.fillText(tickText(tick), at, top + height + 18);
    }
    context.textAlign = "right";
    for (const tick of logTicks(y[0], y[1], height / 34)) {
      const at = Math.round(this.toY(Math.log10(tick))) + 0.5;
      stroke(context, [left, at], [left + width, at]);
      context.fillText(tickText(tick), left - 8, at + 4);
    }
    context.fillStyle = color("--ink");
    context.textAlign = "center";
    context.fillText("step time, s", left + width / 2, top + height + 38);
    context.save();
    context.translate(14, top + height / 2);
    context.rotate(-Math.PI / 2);
    context.fillText("memory of the fullest rank, GiB", 0, 0);
    context.restore();
  }

  /** What the device has. */
  drawLimit(context) {
    const { left, top, width, height } = this.plot;
    const at = this.toY(Math.log10(this.limit));
    if (!(at > top && at < top + height)) return;
    context.strokeStyle = color("--off");
    context.setLineDash([6, 4]);
    stroke(context, [left, at], [left + width, at]);
    context.setLineDash([]);
    const label = `device memory: ${digits(this.limit)} GiB`;
    const wide = context.measureText(label).width + 12;
    context.fillStyle = colorWith(color("--paper"), 0.85);
    context.fillRect(left + width - wide, at - 19, wide, 17);
    context.fillStyle = color("--off");
    context.textAlign = "right";
    context.fillText(label, left + width - 6, at - 6);
  }

  drawFront(context) {
    const inside = this.clip(context);
    context.strokeStyle = color("--ink");
    context.lineWidth = 1.5;
    context.beginPath();
    this.front.forEach((row, at) => {
      const [px, py] = this.place(row);
      if (at) context.lineTo(px, this.place(this.front[at - 1])[1]);
      at ? context.lineTo(px, py) : context.moveTo(px, py);
    });
    context.stroke();
    for (const row of this.front) this.ring(context, row, color("--ink"), 3.5, color("--paper"));
    inside();
  }

  clip(context) {
    const { left, top, width, height } = this.plot;
    context.save();
    context.beginPath();
    context.rect(left - 5, top - 5, width + 10, height + 10);
    context.clip();
    return () => context.restore();
  }

  place(row) {
    return [this.toX(this.logX[row]), this.toY(this.logY[row])];
  }

  ring(context, row, ink, radius, fill = null) {
    const [px, py] = this.place(row);
    context.beginPath();
    context.arc(px, py, radius, 0, 2 * Math.PI);
    if (fill) {
      context.fillStyle = fill;
      context.fill();
    }
    context.strokeStyle = ink;
    context.lineWidth = 1.5;
    context.stroke();
  }

  drawSelected(context, row, letter) {
    const [px, py] = this.place(row);
    const { left, top, width, height } = this.plot;
    if (px < left - 5 || px > left + width + 5 || py < top - 5 || py > top + height + 5) return;
    const accent = color(letter === "A" ? "--accent" : "--second");
    this.ring(context, row, accent, 6);
    const [labelX, labelY] = [Math.min(px + 15, left + width - 10), Math.max(py - 15, top + 10)];
    context.fillStyle = accent;
    context.beginPath();
    context.arc(labelX, labelY, 9, 0, 2 * Math.PI);
    context.fill();
    context.fillStyle = color("--paper");
    context.textAlign = "center";
    context.font = "bold 12px system-ui, sans-serif";
    context.fillText(letter, labelX, labelY + 4);
  }

  drawDrag(context) {
    const { from, to } = this.drag;
    context.strokeStyle = color("--accent");
    context.lineWidth = 1;
    context.strokeRect(from[0], from[1], to[0] - from[0], to[1] - from[1]);
  }

  /** The row of the nearest drawn point, or null. */
  pick(px, py) {
    const { left, top, width, height } = this.plot;
    const { x, y } = this.view;
    const [scaleX, scaleY] = [width / (x[1] - x[0]), height / (y[1] - y[0])];
    let [best, nearest] = [null, PICK_PIXELS ** 2];
    for (const rows of [this.order, this.front]) {
      for (const row of rows) {
        const acrossX = left + (this.logX[row] - x[0]) * scaleX - px;
        const acrossY = top + height - (this.logY[row] - y[0]) * scaleY - py;
        const distance = acrossX * acrossX + acrossY * acrossY;
        if (distance <= nearest) [best, nearest] = [row, distance];
      }
    }
    return best;
  }

  position(event) {
    const box = this.marks.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  }

  press(event) {
    if (event.button || event.pointerType !== "mouse") return;
    const at = this.position(event);
    this.drag = { from: at, to: at };
    this.marks.setPointerCapture(event.pointerId);
  }

  move(event) {
    if (!this.view) return;
    if (this.drag) {
      this.drag.to = this.position(event);
      this.drawMarks();
    } else if (event.pointerType === "mouse") {
      this.hover(this.pick(...this.position(event)), this.position(event));
    }
  }

  release(event, onSelect) {
    if (event.button > 0) return null;
    const { from, to } = this.drag ?? { from: this.position(event), to: this.position(event) };
    this.drag = null;
    const isBox = Math.abs(to[0] - from[0]) > 8 && Math.abs(to[1] - from[1]) > 8;
    if (isBox) return this.zoom(from, to);
    const row = this.pick(...to);
    return row === null ? this.drawMarks() : onSelect(row);
  }

  zoom(from, to) {
    const { left, top, width, height } = this.plot;
    const { x, y } = this.view;
    const logX = (px) => x[0] + ((px - left) / width) * (x[1] - x[0]);
    const logY = (py) => y[0] + ((top + height - py) / height) * (y[1] - y[0]);
    const ordered = (a, b) => [Math.min(a, b), Math.max(a, b)];
    this.show({ x: ordered(logX(from[0]), logX(to[0])), y: ordered(logY(from[1]), logY(to[1])) });
  }

  hover(row, at) {
    if (row === this.hovered) return;
    this.hovered = row;
    if (this.view) this.drawMarks();
    showTip(row === null ? null : this.describe(row), this.marks, at);
  }
}

function logarithms(values) {
  const logs = new Float32Array(values.length);
  for (let row = 0; row < values.length; row++) logs[row] = Math.log10(values[row]);
  return logs;
}

/** A color as #rrggbb, with an opacity. */
const colorWith = (text, opacity) => `${text}${Math.round(255 * opacity).toString(16).padStart(2, "0")}`;

function stroke(context, from, to) {
  context.beginPath();
  context.moveTo(...from);
  context.lineTo(...to);
  context.stroke();
}
