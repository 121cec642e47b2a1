// Draws each figure from the JSON inside it: before and after (and what was observed) above each other on one time scale.
// Times in the data are whole microseconds. Plain JavaScript, no network.
"use strict";

const PHASES = ["forward", "backward", "update"];
const GUTTER = 78, RIGHT = 16, LANE = 30, GAP = 5, HEAD = 24, FOOT = 22, AXIS = 26;
const [TITLE, COUNT, PHASE, STREAM, START, LENGTH] = [0, 1, 2, 3, 4, 5];

const ms = (us) => (us / 1000).toLocaleString("en", us < 1e5 ? { minimumFractionDigits: 2, maximumFractionDigits: 2 }
  : { minimumFractionDigits: 1, maximumFractionDigits: 1 }) + " ms";
const size = (n) => n >= 1e9 ? (n / 1e9).toFixed(1) + " GB" : n >= 1e6 ? (n / 1e6).toFixed(1) + " MB"
  : n >= 1e3 ? (n / 1e3).toFixed(1) + " kB" : n + " B";
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();

// Not by colour alone: backward is striped, update dotted, exposed communication crossed.
function hatch(context, kind, ink, scale) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 8;
  const t = tile.getContext("2d");
  t.strokeStyle = t.fillStyle = ink;
  t.lineWidth = 1.2;
  t.beginPath();
  if (kind !== "dots") { t.moveTo(-2, 2); t.lineTo(2, -2); t.moveTo(0, 8); t.lineTo(8, 0); t.moveTo(6, 10); t.lineTo(10, 6); }
  if (kind === "cross") { t.moveTo(-2, 6); t.lineTo(2, 10); t.moveTo(0, 0); t.lineTo(8, 8); t.moveTo(6, -2); t.lineTo(10, 2); }
  if (kind === "dots") { t.rect(1, 1, 1.6, 1.6); t.rect(5, 5, 1.6, 1.6); t.fill(); } else { t.stroke(); }
  const pattern = context.createPattern(tile, "repeat");
  pattern.setTransform(new DOMMatrix().scale(1 / scale));
  return pattern;
}

function palette(context, scale) {
  const names = ["paper", "lane", "ink", "muted", "line", "on", "accent", "forward", "backward", "update", "message", "exposed"];
  const ink = Object.fromEntries(names.map((n) => [n, colour(n)]));
  const faint = ink.on + "55";
  ink.over = { backward: hatch(context, "stripes", faint, scale), update: hatch(context, "dots", ink.on + "99", scale),
    exposed: hatch(context, "cross", ink.exposed, scale) };
  return ink;
}

function fill(context, ink, kind, x, y, width, height) {
  context.fillStyle = ink[kind];
  context.fillRect(x, y, width, height);
  if (ink.over[kind]) {
    context.fillStyle = ink.over[kind];
    context.fillRect(x, y, width, height);
  }
}

function expose(context, ink, x, y, width, height) {
  context.fillStyle = ink.paper;
  context.fillRect(x, y, width, height);
  context.fillStyle = ink.over.exposed;
  context.fillRect(x, y, width, height);
  context.fillStyle = ink.exposed;
  context.fillRect(x, y, width, 2);
  context.fillRect(x, y + height - 2, width, 2);
}

class Timeline {
  constructor(figure) {
    this.data = JSON.parse(figure.querySelector("script").textContent);
    this.made = new Map(this.data.made); // transfer -> the op that makes it
    this.canvas = figure.querySelector(".plot > canvas");
    this.tip = figure.querySelector(".tip");
    this.detail = figure.querySelector(".detail");
    this.swatches = figure.querySelectorAll(".keys canvas");
    this.hover = this.pinned = this.mouse = this.drag = null;
    let y = 0;
    for (const track of this.data.tracks) {
      track.y = y + HEAD;
      track.network = track.y + track.streams * (LANE + GAP);
      y = track.network + LANE + FOOT;
    }
    this.height = y + AXIS;
    this.canvas.style.height = this.height + "px";
    this.whole();
    this.listen(figure);
    new ResizeObserver(() => this.draw()).observe(this.canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  whole() { this.from = 0; this.to = this.data.end * 1.06; }
  x(us) { return GUTTER + (us - this.from) / (this.to - this.from) * this.span; }
  snap(us) { return Math.round(this.x(us) * this.scale) / this.scale; } // to the screen's pixels: no seams between ops
  at(x) { return this.from + (x - GUTTER) / this.span * (this.to - this.from); }

  zoom(factor, around) {
    const width = Math.min(this.data.end * 1.06, Math.max(50, (this.to - this.from) * factor));
    const share = (around - this.from) / (this.to - this.from);
    this.from = around - share * width;
    this.to = this.from + width;
    this.pan(0);
  }

  pan(us) {
    const width = this.to - this.from;
    this.from = Math.max(0, Math.min(this.data.end * 1.06 - width, this.from + us));
    this.to = this.from + width;
    this.draw();
  }

  draw() {
    const scale = this.scale = devicePixelRatio || 1, width = this.canvas.clientWidth;
    this.span = width - GUTTER - RIGHT;
    this.canvas.width = Math.round(width * scale);
    this.canvas.height = Math.round(this.height * scale);
    const c = this.context = this.canvas.getContext("2d");
    c.scale(scale, scale);
    this.ink = palette(c, scale);
    this.font = (weight) => { c.font = weight + " 12px system-ui, sans-serif"; };
    c.textBaseline = "middle";
    this.axis(width);
    for (const track of this.data.tracks) this.track(track, width);
    for (const item of [this.pinned, this.hover]) if (item) this.mark(item);
    for (const swatch of this.swatches) this.swatch(swatch, scale);
  }

  swatch(canvas, scale) {
    canvas.width = 26 * scale;
    canvas.height = 14 * scale;
    const c = canvas.getContext("2d"), ink = palette(c, scale);
    c.scale(scale, scale);
    if (canvas.dataset.kind === "exposed") expose(c, ink, 0, 0, 26, 14); else fill(c, ink, canvas.dataset.kind, 0, 0, 26, 14);
  }

  axis(width) {
    const c = this.context, bottom = this.height - AXIS;
    const rough = (this.to - this.from) / Math.max(2, this.span / 110);
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = power * [1, 2, 5, 10].find((k) => k * power >= rough);
    this.font("400");
    c.textAlign = "center";
    for (let t = Math.ceil(this.from / step) * step; t <= this.to; t += step) {
      const x = Math.round(this.x(t)) + 0.5;
      c.fillStyle = this.ink.line;
      c.fillRect(x, 6, 1, bottom - 2);
      c.fillStyle = this.ink.muted;
      const digits = Math.max(0, -Math.floor(Math.log10(step / 1000)));
      const label = (t / 1000).toLocaleString("en", { maximumFractionDigits: digits });
      if (x < width - 24) c.fillText(label, x, bottom + 14);
    }
    c.textAlign = "left";
    c.fillText("ms", 14, bottom + 14);
  }

  track(track, width) {
    const c = this.context, ink = this.ink, lanes = [];
    for (let s = 0; s < track.streams; s++) lanes.push([s ? "" : "compute", track.y + s * (LANE + GAP)]);
    lanes.push(["network", track.network]);
    for (const [label, y] of lanes) {
      this.font("400");
      c.fillStyle = ink.muted;
      c.fillText(label, 14, y + LANE / 2);
      c.fillStyle = ink.lane;
      c.fillRect(GUTTER, y, this.span, LANE);
    }
    c.save();
    c.beginPath();
    c.rect(GUTTER, track.y - HEAD, this.span, this.height);
    c.clip();
    for (const b of track.blocks) this.box(PHASES[b[PHASE]], b[START], b[START] + b[LENGTH], track.y + b[STREAM] * (LANE + GAP), this.data.names[b[TITLE]]);
    for (const [k, m] of track.messages.entries()) {
      this.box("message", m.start, m.end, track.network + m.lane * (LANE + 1) / track.lanes, this.name(m, k), LANE / track.lanes);
    }
    for (const [start, end] of track.exposed) {
      const x = this.x(start), w = this.x(end) - x;
      if (w >= 0.5 && x < width && x + w > GUTTER) expose(c, ink, x, track.network + LANE - 9, w, 9);
    }
    if (track.step) this.end(track);
    c.restore();
    this.font("600");
    c.fillStyle = ink.ink;
    c.fillText(track.label, 14, track.y - HEAD / 2 + 1);
  }

  end(track) {
    const c = this.context, x = Math.round(this.x(track.step)), first = this.data.tracks[0];
    const share = 100 * (track.step / first.step - 1), percent = Math.abs(share).toFixed(1);
    const change = track === first ? "" : ` (${percent === "0.0" ? "" : share < 0 ? "\u2212" : "+"}${percent} %)`;
    const text = ms(track.step) + change;
    this.font("600");
    c.fillStyle = this.ink.ink;
    c.fillRect(x, track.y - 6, 2, track.network + LANE - track.y + 10);
    const right = GUTTER + this.span;
    c.textAlign = "right";
    if (x > GUTTER) c.fillText(text, Math.min(right, Math.max(x + 1, GUTTER + 330)), track.y - HEAD / 2 + 1);
    c.textAlign = "left";
    if (track !== first) {
      c.setLineDash([3, 3]);
      c.strokeStyle = this.ink.muted;
      c.strokeRect(Math.round(this.x(first.step)) + 0.5, track.y, 0, track.network + LANE - track.y);
      c.setLineDash([]);
    }
  }

  box(kind, start, end, y, label, height = LANE) {
    const c = this.context, [x, right] = [this.snap(start), this.snap(end)], w = Math.max(right - x, 1 / this.scale);
    if (x + w < GUTTER || x > GUTTER + this.span) return;
    fill(c, this.ink, kind, x, y, w > 6 ? w - 1 / this.scale : w, height);
    const left = Math.max(x, GUTTER), room = x + w - left - 8;
    if (room < 14 || height < 14) return;
    this.font("400");
    const short = this.shorten(label, room);
    if (!short) return;
    const high = kind === "message" && height === LANE ? 0.42 : 0.5; // above the strip that says it is exposed
    if (this.ink.over[kind]) { // a plain ground, so that stripes and dots do not run through the letters
      c.fillStyle = this.ink[kind];
      c.fillRect(left + 2, y + height / 2 - 8, c.measureText(short).width + 4, 16);
    }
    c.fillStyle = this.ink.on;
    c.fillText(short, left + 4, y + height * high);
  }

  shorten(label, room) {
    const c = this.context;
    const [, number, name] = label.match(/^(#\d+ )?(.*)$/s); // messages have one
    const parts = name.split("/");
    for (let k = 0; k < parts.length; k++) {
      const text = (number || "") + parts.slice(k).join("/");
      if (c.measureText(text).width <= room) return text;
    }
    if (number) return c.measureText(number).width <= room + 6 ? number : "";
    const last = parts[parts.length - 1];
    const fits = Math.floor(last.length * room / c.measureText(last).width) - 1;
    return fits >= 3 ? last.slice(0, fits) + "\u2026" : "";
  }

  name(m, k) {
    const op = this.made.get(m.members[0]) ?? m.members[0];
    const first = this.data.names[op].replace(/^gradient_tape\//, "") + (m.part ? m.part[0] : "");
    return `#${k + 1} ${first}` + (m.members.length > 1 ? ` +${m.members.length - 1}` : "");
  }

  // Frames one op or message; of a message also its boundaries.
  mark({ track, item, op }) {
    const c = this.context, ink = this.ink;
    const y = op ? track.y + item[STREAM] * (LANE + GAP) : track.network;
    const [start, end] = op ? [item[START], item[START] + item[LENGTH]] : [item.start, item.end];
    c.save();
    c.beginPath();
    c.rect(GUTTER - 2, 0, this.span + 4 + RIGHT, this.height);
    c.clip();
    c.strokeStyle = ink.ink;
    c.lineWidth = 2;
    c.strokeRect(this.x(start) - 1, y - 1, Math.max(2, this.x(end) - this.x(start)) + 1, LANE + 2);
    if (!op && item.ready !== undefined) {
      const low = track.network + LANE + 7, [left, right] = [this.x(item.ready), this.x(item.needed)];
      c.lineWidth = 1.5;
      c.beginPath();
      for (const x of [left, right]) { c.moveTo(x, track.y - 2); c.lineTo(x, low + 4); }
      c.moveTo(left, low);
      c.lineTo(right, low);
      c.stroke();
      this.font("400");
      c.fillStyle = ink.ink;
      c.textAlign = left > GUTTER + 90 ? "right" : "left";
      c.fillText("start boundary", left + (left > GUTTER + 90 ? -5 : 5), low + 7);
      const inside = right > GUTTER + this.span - 85;
      c.textAlign = inside ? "right" : "left";
      c.fillText("end boundary", right + (inside ? -5 : 5), low + 7);
      c.textAlign = "left";
    }
    c.restore();
  }

  find(x, y) {
    const us = this.at(x), reach = 2 / this.span * (this.to - this.from);
    for (const track of this.data.tracks) {
      const near = (start, end) => us >= start - reach && us <= end + reach;
      const away = (start, end) => Math.max(start - us, us - end, 0);
      const best = (items, times, op) => items.filter((i) => near(...times(i))).map((item) => ({ track, item, op }))
        .sort((a, b) => away(...times(a.item)) - away(...times(b.item)))[0] || null;
      if (y >= track.network && y <= track.network + LANE) {
        const lane = Math.min(track.lanes - 1, Math.floor((y - track.network) / LANE * track.lanes));
        return best(track.messages.filter((m) => m.lane === lane), (m) => [m.start, m.end], false);
      }
      const stream = Math.floor((y - track.y) / (LANE + GAP));
      if (y >= track.y && y < track.network) return best(track.blocks.filter((b) => b[STREAM] === stream), (b) => [b[START], b[START] + b[LENGTH]], true);
    }
    return null;
  }

  describe({ track, item, op }, most) {
    if (op) {
      const more = item[COUNT] > 1 ? ` and ${item[COUNT] - 1} more` : "";
      return `${this.data.names[item[TITLE]]}${more}\n${PHASES[item[PHASE]]}, ${ms(item[LENGTH])}: from ${ms(item[START])} to ${ms(item[START] + item[LENGTH])}`;
    }
    const members = item.members.map((m, k) => this.data.names[m] + (item.part ? item.part[k] : "")
      + (this.made.has(m) ? ", made by " + this.data.names[this.made.get(m)] : ""));
    const list = members.slice(0, most).join("\n") + (members.length > most ? `\nand ${members.length - most} more` : "");
    const kind = item.ready === undefined ? "" : `\nstart boundary ${ms(item.ready)}, submitted ${ms(item.submitted)}, end boundary ${ms(item.needed)}, slack ${ms(item.slack)}`;
    const number = track.messages.indexOf(item) + 1;
    return `Message ${number} of ${track.messages.length}: ${members.length} ${members.length > 1 ? "members" : "member"}, ${size(item.bytes)}\n`
      + `travels ${ms(item.end - item.start)}: from ${ms(item.start)} to ${ms(item.end)}${kind}\n${list}`;
  }

  show(event) {
    const box = this.canvas.getBoundingClientRect(), [x, y] = [event.clientX - box.left, event.clientY - box.top];
    const found = x < GUTTER ? null : this.find(x, y);
    this.tip.hidden = !found;
    if (found) {
      this.tip.textContent = this.describe(found, 4);
      const left = Math.min(x + 14, box.width - this.tip.offsetWidth - 8);
      this.tip.style.left = Math.max(4, left) + "px";
      const low = found.op ? y + 18 : found.track.network + LANE + FOOT - 2; // leaves the names of boundaries free
      this.tip.style.top = low + "px";
    }
    if ((found && found.item) !== (this.hover && this.hover.item)) {
      this.hover = found;
      this.draw();
    }
    return found;
  }

  pin(found) {
    this.pinned = found;
    if (found) {
      this.detail.textContent = `${found.track.label}. ${this.describe(found, 200)}`;
      const [start, end] = found.op ? [found.item[START], found.item[START] + found.item[LENGTH]] : [found.item.start, found.item.end];
      if (end < this.from || start > this.to) this.pan((start + end - this.from - this.to) / 2);
    } else this.detail.textContent = this.detail.dataset.empty;
    this.draw();
  }

  step(key) {
    const tracks = this.data.tracks.filter((t) => t.messages.length);
    if (!tracks.length) return;
    const old = this.pinned && !this.pinned.op ? this.pinned : null;
    let t = old ? tracks.indexOf(old.track) : 0, k = old ? old.track.messages.indexOf(old.item) : -1;
    if (key === "ArrowUp" || key === "ArrowDown") t = Math.max(0, Math.min(tracks.length - 1, t + (key === "ArrowDown" ? 1 : -1)));
    const list = tracks[t].messages;
    k = { ArrowRight: k + 1, ArrowLeft: k - 1, Home: 0, End: list.length - 1 }[key] ?? Math.max(0, k);
    this.pin({ track: tracks[t], item: list[Math.max(0, Math.min(list.length - 1, k))], op: false });
  }

  listen(figure) {
    const canvas = this.canvas;
    const middle = () => this.pinned && !this.pinned.op ? (this.pinned.item.start + this.pinned.item.end) / 2 : (this.from + this.to) / 2;
    const act = { in: () => this.zoom(0.5, middle()), out: () => this.zoom(2, middle()), whole: () => { this.whole(); this.draw(); } };
    for (const button of figure.querySelectorAll("button")) button.addEventListener("click", act[button.dataset.act]);
    canvas.addEventListener("pointermove", (event) => {
      if (this.drag && event.buttons) {
        const moved = (this.drag.x - event.clientX) / this.span * (this.to - this.from);
        this.drag.far ||= Math.abs(event.clientX - this.drag.first) > 4;
        this.drag.x = event.clientX;
        if (this.drag.far) this.pan(moved);
      } else this.show(event);
    });
    canvas.addEventListener("pointerdown", (event) => { this.drag = { x: event.clientX, first: event.clientX, far: false }; });
    canvas.addEventListener("pointerup", (event) => {
      if (this.drag && !this.drag.far) this.pin(this.show(event));
      this.drag = null;
    });
    canvas.addEventListener("pointerleave", () => { this.tip.hidden = true; this.hover = this.drag = null; this.draw(); });
    canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey && !event.shiftKey) return; // the page scrolls
      event.preventDefault();
      const box = canvas.getBoundingClientRect();
      if (event.shiftKey) this.pan((event.deltaX || event.deltaY) / this.span * (this.to - this.from));
      else this.zoom(event.deltaY > 0 ? 1.25 : 0.8, this.at(event.clientX - box.left));
    }, { passive: false });
    canvas.addEventListener("keydown", (event) => {
      const keys = { "+": act.in, "=": act.in, "-": act.out, 0: act.whole, Escape: () => this.pin(null) };
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      if (keys[event.key]) keys[event.key]();
      else if (/^(Arrow|Home|End)/.test(event.key)) this.step(event.key);
      else return;
      event.preventDefault();
    });
  }
}

for (const figure of document.querySelectorAll("figure")) new Timeline(figure);
