// Copyright The marin_rl Authors
// SPDX-License-Identifier: Apache-2.0
"use strict";

// Texts of the run are inserted through textContent and attributes with fixed names, never as markup.
const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const MINUS = "\u2212";

function element(name, properties = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key === "text") node.textContent = value;
    else if (key === "class") node.className = value;
    else node.setAttribute(key, value);
  }
  node.append(...children);
  return node;
}

function drawn(name, properties = {}, text = "") {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(properties)) node.setAttribute(key, value);
  if (text) node.textContent = text;
  return node;
}

function number(value, digits = 4) {
  if (value === null || value === undefined) return "\u2013";
  if (value === 0) return "0";
  const size = Math.abs(value);
  const far = size >= 1e6 || size < 1e-4;
  const text = far ? value.toExponential(digits - 2).replace(/\.?0*e\+?/, "e") : String(Number(value.toPrecision(digits)));
  return text.replaceAll("-", MINUS);
}

// ---------------------------------------------------------------- plots

const WIDTH = 320, HEIGHT = 170, LEFT = 50, RIGHT = 16, TOP = 8, BOTTOM = 22;

function ticks(low, high, count) {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough * 0.999);
  const values = [];
  for (let index = Math.ceil(low / step - 1e-9); index * step <= high + step * 1e-6; index++) {
    values.push(Number((index * step).toPrecision(12)));
  }
  return values;
}

function bounds(values) {
  let low = Infinity, high = -Infinity;
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  const room = high > low ? (high - low) * 0.05 : Math.abs(high) * 0.1 || 0.5;
  return [low - room, high + room];
}

function frame(x, y, xDomain, yDomain, label, width = WIDTH) {
  const svg = drawn("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, tabindex: "0", role: "img", "aria-label": label });
  for (const value of ticks(...yDomain, 4)) {
    svg.append(drawn("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }));
    svg.append(drawn("text", { x: LEFT - 5, y: y(value) + 4, "text-anchor": "end" }, number(value, 3)));
  }
  for (const value of ticks(...xDomain, 6).filter(Number.isInteger)) {
    svg.append(drawn("text", { x: x(value), y: HEIGHT - 7, "text-anchor": "middle" }, String(value)));
  }
  return svg;
}

// Moves a cursor over the points of a plot by pointer or arrow keys, and reports the index of the current point.
function follow(svg, places, tell) {
  const cursor = drawn("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
  svg.append(cursor);
  let at = places.length - 1;
  const show = (index) => {
    at = Math.max(0, Math.min(places.length - 1, index));
    cursor.setAttribute("x1", places[at]);
    cursor.setAttribute("x2", places[at]);
    cursor.setAttribute("visibility", "visible");
    tell(at);
  };
  const leave = () => {
    cursor.setAttribute("visibility", "hidden");
    tell(null);
  };
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect(), place = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
    let best = 0;
    places.forEach((one, index) => { if (Math.abs(one - place) < Math.abs(places[best] - place)) best = index; });
    show(best);
  });
  svg.addEventListener("pointerleave", leave);
  svg.addEventListener("focus", () => { if (svg.matches(":focus-visible")) show(places.length - 1); });
  svg.addEventListener("blur", leave);
  svg.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1, Home: -places.length, End: places.length }[event.key];
    if (move === undefined) return;
    event.preventDefault();
    show(at + move);
  });
}

function legend(labels, classes) {
  const list = element("div", { class: "legend" });
  const values = labels.map((label, index) => {
    const value = element("b");
    list.append(element("span", {}, element("span", { class: `swatch ${classes[index]}` }), `${label} `, value));
    return value;
  });
  const position = element("span", { class: "faint" });
  list.append(position);
  return { list, values, position };
}

function plot({ title, unit, curves, span }) {
  const classes = curves.map(({ color }) => `s${color}`);
  const steps = data.curves.steps, seriesOf = (ending) => curves.map(({ name }) => data.curves.series[name + ending]);
  const series = seriesOf(""), lowest = seriesOf("<"), highest = seriesOf(">");
  const used = steps.map((_, index) => index).filter((index) => series.some((values) => values[index] !== null));
  if (!used.length) return null;
  const xDomain = [steps[used[0]], Math.max(steps[used.at(-1)], steps[used[0]] + 1)];
  const yDomain = span || bounds([series, lowest, highest].flat(2).filter((value) => value !== null && value !== undefined));
  const x = (step) => LEFT + ((step - xDomain[0]) / (xDomain[1] - xDomain[0])) * (WIDTH - LEFT - RIGHT);
  const y = (value) => HEIGHT - BOTTOM - ((value - yDomain[0]) / (yDomain[1] - yDomain[0])) * (HEIGHT - TOP - BOTTOM);
  const svg = frame(x, y, xDomain, yDomain, `${title} by step; arrow keys read values`);
  const placesOf = (values) =>
    used.filter((at) => values[at] !== null).map((at) => `${x(steps[at]).toFixed(1)},${y(values[at]).toFixed(1)}`);
  lowest.forEach((values, index) => {
    if (!values) return;
    const points = [...placesOf(values), ...placesOf(highest[index]).reverse()].join(" ");
    svg.append(drawn("polygon", { class: `band ${classes[index]}`, points }));
  });
  series.forEach((values, index) => {
    const points = placesOf(values);
    svg.append(drawn("polyline", { class: `curve ${classes[index]} dash${index}`, points: points.join(" ") }));
    if (points.length <= 30) {
      for (const [cx, cy] of points.map((point) => point.split(","))) {
        svg.append(drawn("circle", { class: `dot ${classes[index]}`, cx, cy, r: 2.5 }));
      }
    }
  });
  const { list, values, position } = legend(curves.map(({ label }) => label), classes);
  // Curves of a comparison show their last value.
  const lastOf = (index) => data.groups ? series[index].findLastIndex((value) => value !== null) : -1;
  const tell = (at) => {
    position.textContent = at === null ? "" : `step ${steps[used[at]]}`;
    values.forEach((value, index) => { value.textContent = valueAt(index, at === null ? lastOf(index) : used[at]); });
  };
  const valueAt = (index, at) => at < 0 ? "" : number(series[index][at], data.groups ? 3 : 4) +
    (lowest[index] && lowest[index][at] !== null ? ` (${number(lowest[index][at], 3)} to ${number(highest[index][at], 3)})` : "");
  tell(null);
  follow(svg, used.map((at) => x(steps[at])), tell);
  const caption = element("figcaption", { text: title });
  if (unit) caption.append(element("span", { class: "unit", text: ` ${unit}` }));
  return element("figure", {}, caption, svg, list);
}

function showCurves() {
  const place = byId("curves"), series = Object.keys(data.curves.series);
  const names = data.groups ? [...new Set(series.map((name) => name.replace(/#\d+[<>]?$/, "")))] : series;
  place.append(...data.plots.map(plot).filter((figure) => figure !== null));
  if (!names.length) place.append(element("p", { class: "faint", text: "No records yet." }));
  const choice = byId("metric");
  choice.append(...["", ...names].map((name) => element("option", { text: name || "choose\u2026", value: name })));
  let added = null;
  choice.addEventListener("change", () => {
    if (added) added.remove();
    const name = choice.value, known = data.plots.flatMap(({ curves }) => curves).find((curve) => curve.name === name);
    const curves = data.groups ? groupCurves(name) : [{ name, label: name, color: known ? known.color : 0 }];
    added = name ? plot({ title: name, unit: "", curves, span: null }) : null;
    if (added) place.prepend(added);
  });
}

function showPhases() {
  const { names, bars } = data.phases, place = byId("phases"), classes = names.map((_, index) => `s${index % 9}`);
  if (!bars.length) {
    place.append(element("p", { class: "faint", text: "No timings yet." }));
    return;
  }
  // The first bar includes compilation; it must not shrink the others.
  const totals = bars.map((bar) => bar.total).sort((one, other) => one - other);
  const usual = totals[Math.floor(totals.length * 0.9)] * 1.5;
  const top = Math.min(totals.at(-1), Math.max(usual, totals[Math.floor(totals.length / 2)] * 2)) * 1.05 || 1;
  // Drawn at its real size up to a limit, so that its text is neither too large nor too small.
  const whole = Math.max(WIDTH, Math.min(place.clientWidth, 760));
  const width = (whole - LEFT - RIGHT) / bars.length, x = (index) => LEFT + index * width;
  const y = (value) => HEIGHT - BOTTOM - (Math.min(value, top) / top) * (HEIGHT - TOP - BOTTOM);
  const svg = frame(() => -100, y, [0, 1], [0, top], "Seconds by phase and step; arrow keys read values", whole);
  bars.forEach((bar, index) => {
    let below = 0;
    bar.seconds.forEach((seconds, phase) => {
      const from = y(below), to = y(below + seconds);
      below += seconds;
      svg.append(drawn("rect", { class: `bar ${classes[phase]}`, x: x(index) + width * 0.08, width: width * 0.84, y: to, height: Math.max(from - to, 0) }));
    });
    if (bar.total > top) svg.append(drawn("text", { x: x(index) + width / 2, y: TOP + 2, "text-anchor": "middle" }, "\u2191"));
    if (index % Math.ceil(bars.length / 6) === 0) {
      svg.append(drawn("text", { x: x(index) + width / 2, y: HEIGHT - 7, "text-anchor": "middle" }, String(bar.first)));
    }
  });
  const { list, values, position } = legend(names, classes);
  follow(svg, bars.map((_, index) => x(index) + width / 2), (at) => {
    const bar = at === null ? null : bars[at];
    const steps = bar && (bar.first === bar.last ? `step ${bar.first}` : `steps ${bar.first}\u2013${bar.last}, mean`);
    position.textContent = bar ? `${steps}: ${number(bar.total)} s in all` : "";
    values.forEach((value, index) => { value.textContent = bar ? number(bar.seconds[index], 3) : ""; });
  });
  const caption = element("figcaption", { text: "Seconds per step" });
  if (totals.at(-1) > top) caption.append(element("span", { class: "unit", text: " \u2191 goes beyond the plot" }));
  place.append(element("figure", {}, caption, svg, list));
}
