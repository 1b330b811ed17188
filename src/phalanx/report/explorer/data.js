"use strict";

/** Bytes of a base64 text of a zlib stream. */
async function inflate(base64) {
  const text = atob(base64);
  const bytes = new Uint8Array(text.length);
  for (let at = 0; at < text.length; at++) bytes[at] = text.charCodeAt(at);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

async function inflateJson(base64) {
  return JSON.parse(new TextDecoder().decode(await inflate(base64)));
}

/** Numbers of `width` bytes from planes of bytes of equal weight (columns.py). */
function fromPlanes(bytes, offset, rows, width) {
  const whole = new Uint8Array(rows * width);
  for (let plane = 0; plane < width; plane++) {
    for (let row = 0, from = offset + plane * rows; row < rows; row++) whole[row * width + plane] = bytes[from + row];
  }
  return whole.buffer;
}

/** All layouts of a plan: choices and predictions in columns. A layout is known by its row. */
class Layouts {
  static async unpack(packed, setup, counted) {
    const layouts = new Layouts();
    const bytes = await inflate(packed.data);
    const rows = packed.rows;
    let offset = 0;
    Object.assign(layouts, { rows, setup, values: packed.choices, indices: {} });
    for (const name of Object.keys(packed.choices)) {
      layouts.indices[name] = new Uint16Array(fromPlanes(bytes, offset, rows, 2));
      offset += 2 * rows;
    }
    for (const name of packed.numbers) {
      layouts[name] = new Float32Array(fromPlanes(bytes, offset, rows, 4));
      offset += 4 * rows;
    }
    layouts.seconds = new Float64Array(rows);
    for (const part of Object.keys(setup.parts)) {
      const column = layouts[part];
      for (let row = 0; row < rows; row++) layouts.seconds[row] += column[row];
    }
    layouts.fits = layouts.fit(counted);
    return layouts;
  }

  value(name, row) {
    return this.values[name][this.indices[name][row]];
  }

  /** Of every layout 0: likely to fit; 1: may not fit; 2: does not fit. Counted memory goes before the formula's. */
  fit(counted) {
    const { safe_oom_probability: safe, max_oom_probability: most } = this.setup;
    const category = (risk) => (risk < safe ? 0 : risk < most ? 1 : 2);
    const fits = new Uint8Array(this.rows);
    for (let row = 0; row < this.rows; row++) fits[row] = category(this.p_oom[row]);
    for (const [row, { p_oom }] of Object.entries(counted)) fits[row] = category(p_oom);
    return fits;
  }

  parts(row) {
    return Object.fromEntries(Object.keys(this.setup.parts).map((part) => [part, this[part][row]]));
  }

  /** The layout in a line, as the planner writes it. */
  name(row) {
    const [dp, tp, cp, ep, pp] = ["dp", "tp", "cp", "ep", "pp"].map((axis) => this.value(axis, row));
    const data = this.value("data_parallel", row);
    const chunks = this.value("virtual_stages", row);
    const checkpointing = this.value("activation_checkpointing", row);
    const offload = this.value("offload", row);
    const outer = this.value("rank_order", row) === "pipeline_outer" ? " (outer)" : "";
    return [
      `${data}${data === "hsdp" ? ` of ${this.value("dp_shard", row)}` : ""} dp ${dp}`,
      tp > 1 && `tp ${tp}`,
      cp > 1 && `cp ${cp} ${this.value("cp_method", row)}`,
      ep > 1 && `ep ${ep}`,
      pp > 1 && `pp ${pp}${outer} ${this.value("schedule", row)}${chunks > 1 ? ` x ${chunks}` : ""}`,
      `micro-batch ${this.value("micro_batch_size", row)} x ${this.value("micro_batches", row)}`,
      checkpointing !== "none" && `recompute ${checkpointing === "offload" ? "full, offload inputs" : checkpointing}`,
      offload !== "none" && `offload ${offload}`,
    ].filter(Boolean).join(", ");
  }

  /** Fields of the layout that are not the default, as a run file has them: pairs of name and value. */
  fields(row) {
    const meaningful = {
      dp_shard: this.value("data_parallel", row) === "hsdp",
      cp_method: this.value("cp", row) > 1,
      schedule: this.value("pp", row) > 1,
      virtual_stages: this.value("pp", row) > 1,
      rank_order: this.value("pp", row) > 1,
    };
    return Object.entries(this.setup.layout_defaults)
      .filter(([field]) => meaningful[field] ?? true)
      .map(([field, common]) => [field, this.value(field, row), common])
      .filter(([, value, common]) => value !== common)
      .map(([field, value]) => [field, value]);
  }

  /** The command that trains the layout: all choices of the run file's own layout are dropped first. */
  trainCommand(row) {
    const settings = this.fields(row).map(([field, value]) => `--set ${quoted(`layout.${field}=${value}`)}`);
    return [this.setup.commands.train, "--set layout=", ...settings].join(" ");
  }

  /** The command that compares the layout with the planner's first choice. */
  compareCommand(row) {
    const text = this.fields(row).map(([field, value]) => `${field}=${value}`).join(",");
    return `${this.setup.commands.compare} ${quoted(text)}`;
  }
}

/** A word of a shell's command line. */
const quoted = (word) => (/^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", `'"'"'`)}'`);

const GIB = 2 ** 30;
const digits = (value) => value.toLocaleString("en-US", { minimumSignificantDigits: 3, maximumSignificantDigits: 3 });
const gib = (bytes) => `${digits(bytes / GIB)} GiB`;
const percent = (share) => `${(100 * share).toFixed(share < 0.0995 ? 1 : 0)} %`;

/** Seconds with three digits; `sign` writes a plus too. */
function seconds(value, sign = false) {
  const size = Math.abs(value);
  const [scale, unit] = size >= 1 || size === 0 ? [1, "s"] : size >= 1e-3 ? [1e3, "ms"] : [1e6, "µs"];
  const shown = size === 0 ? "0" : digits(value * scale);
  return `${sign && value > 0 ? "+" : ""}${shown.replace("-", "−")} ${unit}`;
}

/** A number with three digits and the prefix of its power of 1000. */
function si(value, unit = "") {
  const prefixes = ["", "k", "M", "G", "T", "P", "E"];
  let power = 0;
  while (value >= 999.5 && power < prefixes.length - 1) [value, power] = [value / 1000, power + 1];
  return `${power || value % 1 ? digits(value) : value} ${prefixes[power]}${unit}`.trim();
}

/** An element with attributes and children; text is never read as HTML. */
function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return made;
}
