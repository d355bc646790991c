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
  const steps = data.curves.steps, series = curves.map(({ name }) => data.curves.series[name]);
  const used = steps.map((_, index) => index).filter((index) => series.some((values) => values[index] !== null));
  if (!used.length) return null;
  const xDomain = [steps[used[0]], Math.max(steps[used.at(-1)], steps[used[0]] + 1)];
  const yDomain = span || bounds(series.flat().filter((value) => value !== null));
  const x = (step) => LEFT + ((step - xDomain[0]) / (xDomain[1] - xDomain[0])) * (WIDTH - LEFT - RIGHT);
  const y = (value) => HEIGHT - BOTTOM - ((value - yDomain[0]) / (yDomain[1] - yDomain[0])) * (HEIGHT - TOP - BOTTOM);
  const svg = frame(x, y, xDomain, yDomain, `${title} by step; arrow keys read values`);
  series.forEach((values, index) => {
    const points = used.filter((at) => values[at] !== null).map((at) => `${x(steps[at]).toFixed(1)},${y(values[at]).toFixed(1)}`);
    svg.append(drawn("polyline", { class: `curve ${classes[index]} dash${index}`, points: points.join(" ") }));
    if (points.length <= 30) {
      for (const [cx, cy] of points.map((point) => point.split(","))) {
        svg.append(drawn("circle", { class: `dot ${classes[index]}`, cx, cy, r: 2.5 }));
      }
    }
  });
  const { list, values, position } = legend(curves.map(({ label }) => label), classes);
  follow(svg, used.map((at) => x(steps[at])), (at) => {
    position.textContent = at === null ? "" : `step ${steps[used[at]]}`;
    values.forEach((value, index) => { value.textContent = at === null ? "" : number(series[index][used[at]]); });
  });
  const caption = element("figcaption", { text: title });
  if (unit) caption.append(element("span", { class: "unit", text: ` ${unit}` }));
  return element("figure", {}, caption, svg, list);
}

function showCurves() {
  const place = byId("curves"), names = Object.keys(data.curves.series);
  place.append(...data.plots.map(plot).filter((figure) => figure !== null));
  if (!names.length) place.append(element("p", { class: "faint", text: "No records yet." }));
  const choice = byId("metric");
  choice.append(...["", ...names].map((name) => element("option", { text: name || "choose\u2026", value: name })));
  let added = null;
  choice.addEventListener("change", () => {
    if (added) added.remove();
    const name = choice.value, known = data.plots.flatMap(({ curves }) => curves).find((curve) => curve.name === name);
    added = name ? plot({ title: name, unit: "", curves: [{ name, label: name, color: known ? known.color : 0 }], span: null }) : null;
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

// ---------------------------------------------------------------- the table of rollouts

const PAGE = 25, EXCERPT = 90;
const components = [...new Set(data.rollouts.flatMap((rollout) => rollout.rewards.map(([name]) => name)))];
const rewardOf = (rollout, name) => (rollout.rewards.find(([one]) => one === name) || [name, null])[1];
const COLUMNS = [
  { name: "id", value: (rollout) => rollout.id, always: true },
  { name: "step", value: (rollout) => rollout.step, number: true },
  { name: "prompt", value: (rollout) => rollout.prompt, text: true },
  { name: "answer", value: (rollout) => rollout.expected, text: true },
  { name: "reply", value: (rollout) => rollout.reply, text: true },
  { name: "reward", value: (rollout) => rollout.reward, number: true, always: true },
  { name: "reason", value: (rollout) => rollout.reason, text: true },
  ...(components.length > 1 ? components : []).map((name) =>
    ({ name, value: (rollout) => rewardOf(rollout, name), number: true })),
  { name: "status", value: (rollout) => rollout.status },
  { name: "environment", value: (rollout) => rollout.environment },
  { name: "advantage", value: (rollout) => rollout.advantage, number: true },
  { name: "turns", value: (rollout) => rollout.num_turns, number: true },
  { name: "tokens", value: (rollout) => rollout.num_generated_tokens, number: true },
  { name: "not trained", value: (rollout) => rollout.not_trained || "" },
].filter(({ value, text, always }) =>
  always || (text ? data.rollouts.some(value) : new Set(data.rollouts.map(value)).size > 1));
// At first in the order of the data: groups with different rewards first.
const table = { sorted: null, descending: false, shown: PAGE, current: null, rows: [] };
const filters = {};

function compare(one, other) {
  if (one === null || other === null) return (one === null) - (other === null);
  const order = typeof one === "number" ? one - other : one.localeCompare(other, undefined, { numeric: true });
  return table.descending ? -order : order;
}

function passes(rollout) {
  const words = filters.text.value.trim().toLowerCase();
  const least = filters.least.value, most = filters.most.value;
  return ["step", "environment", "status"].every((name) => !filters[name].value || String(rollout[name]) === filters[name].value)
    && (least === "" || (rollout.reward !== null && rollout.reward >= Number(least)))
    && (most === "" || (rollout.reward !== null && rollout.reward <= Number(most)))
    && (!words || haystack(rollout).includes(words));
}

const haystacks = new Map();
function haystack(rollout) {
  if (!haystacks.has(rollout)) {
    const parts = rollout.last_observation ? [...rollout.turns, rollout.last_observation] : rollout.turns;
    const contents = parts.flatMap((part) => part.messages.map((message) => message.content));
    haystacks.set(rollout, [rollout.id, rollout.group_id, rollout.task_id, rollout.error || "", rollout.reason, rollout.expected,
      ...contents].join("\n").toLowerCase());
  }
  return haystacks.get(rollout);
}

function showTable() {
  table.rows = data.rollouts.filter(passes);
  if (table.sorted !== null) {
    const value = COLUMNS[table.sorted].value;
    table.rows.sort((one, other) => compare(value(one), value(other)));
  }
  document.querySelectorAll("#rollouts thead th").forEach((head, index) => {
    const order = index === table.sorted ? (table.descending ? "descending" : "ascending") : "none";
    head.setAttribute("aria-sort", order);
    head.querySelector("span").textContent = { none: "", ascending: " \u25b2", descending: " \u25bc" }[order];
  });
  const body = document.querySelector("#rollouts tbody");
  body.replaceChildren(...table.rows.slice(0, table.shown).map(tableRow));
  const shown = Math.min(table.shown, table.rows.length);
  byId("count").textContent = `${shown} of ${table.rows.length} rollouts` +
    (table.rows.length < data.rollouts.length ? `, filtered from ${data.rollouts.length}` : "") +
    (table.sorted === null && data.rollouts.length > 1 ? ", first those of groups with different rewards" : "");
  byId("more").hidden = table.rows.length <= table.shown;
}

// Both ends of a text matter: a reply ends with its answer.
function excerpt(text) {
  const characters = [...text];
  return characters.length <= EXCERPT ? text
    : `${characters.slice(0, EXCERPT / 2).join("")}\u2026${characters.slice(1 - EXCERPT / 2).join("")}`;
}

function tableRow(rollout) {
  const link = element("a", { href: addressOf(rollout), text: rollout.id });
  // The address of the open rollout does not change.
  link.addEventListener("click", () => { if (link.hash === location.hash) openRollout(rollout); });
  const cells = COLUMNS.map((column, index) => {
    const value = column.value(rollout);
    if (index === 0) return element("th", { scope: "row" }, link);
    if (column.text) return element("td", {}, element("div", { class: "excerpt", text: excerpt(value) }));
    return element("td", column.number ? { class: "number", text: number(value) } : { class: "clip", text: value });
  });
  return element("tr", { "aria-current": String(rollout === table.current) }, ...cells);
}

function makeTable() {
  const head = document.querySelector("#rollouts thead tr");
  COLUMNS.forEach((column, index) => {
    const button = element("button", { type: "button" }, column.name, element("span", { "aria-hidden": "true" }));
    button.addEventListener("click", () => {
      // The third click restores the first order.
      const isLast = table.sorted === index && table.descending !== Boolean(column.number);
      table.descending = table.sorted === index ? !table.descending : Boolean(column.number);
      table.sorted = isLast ? null : index;
      showTable();
    });
    head.append(element("th", { scope: "col", class: column.number ? "number" : "" }, button));
  });
  const refresh = () => { table.shown = PAGE; showTable(); };
  const add = (name, label, control) => {
    filters[name] = control;
    control.id = `filter-${name}`;
    control.addEventListener("input", refresh);
    byId("filters").append(element("label", {}, `${label} `, control));
  };
  for (const name of ["step", "environment", "status"]) {
    const values = [...new Set(data.rollouts.map((rollout) => String(rollout[name])))];
    add(name, name, element("select", {}, ...["", ...values].map((value) => element("option", { value, text: value || "all" }))));
  }
  add("least", "reward from", element("input", { type: "number", step: "any" }));
  add("most", "to", element("input", { type: "number", step: "any" }));
  add("text", "contains", element("input", { type: "search" }));
  byId("more").addEventListener("click", () => { table.shown += PAGE; showTable(); });
  showTable();
}

// ---------------------------------------------------------------- one rollout

const COLOURS = {
  advantage: { label: "advantage", of: (turn) => turn.advantages, diverging: true },
  logprob: { label: "log-prob", of: (turn) => turn.logprobs, diverging: false },
  value: { label: "value", of: (turn) => turn.values, diverging: true },
  difference: { label: `policy ${MINUS} learner log-prob`, of: (turn) => turn.difference, diverging: true },
};
let colour = "advantage";

const addressOf = (rollout) => `#${[rollout.step, rollout.purpose, rollout.id].map(encodeURIComponent).join("/")}`;

// Opens the rollout of the page's address; links, and the browser's back button, change the address.
function followAddress() {
  const selected = data.rollouts.find((rollout) => addressOf(rollout) === location.hash);
  if (selected) openRollout(selected);
  else if (table.current) closeRollout();
}

function closeRollout() {
  table.current = null;
  showTable();
  byId("one").hidden = true;
}

function openRollout(rollout) {
  table.current = rollout;
  showTable();
  const place = byId("one");
  place.hidden = false;
  hideTip();
  const heading = element("h2", { id: "h-one", tabindex: "-1", text: rollout.id });
  place.replaceChildren(heading, navigation(rollout), facts(rollout), rewards(rollout), colouring(rollout));
  rollout.turns.forEach((turn, index) => place.append(turnView(turn, index)));
  if (rollout.last_observation) place.append(lastObservation(rollout.last_observation));
  if (!rollout.turns.length) place.append(element("p", { class: "faint", text: "It has no turns." }));
  paint(rollout);
  heading.focus({ preventScroll: true });
  place.scrollIntoView();
}

function navigation(rollout) {
  const at = table.rows.indexOf(rollout);
  const go = (label, to) => {
    const button = element("button", { type: "button", text: label });
    button.disabled = !to;
    button.addEventListener("click", () => { location.hash = addressOf(to); });
    return button;
  };
  const back = element("button", { type: "button", text: "Back to the table" });
  back.addEventListener("click", () => byId("h-rollouts").scrollIntoView());
  return element("p", { class: "controls" }, go("Previous", table.rows[at - 1]), go("Next", table.rows[at + 1]), back);
}

const pairs = (named) => named.map(([name, value]) => `${name} ${number(value)}`).join(", ");

function facts(rollout) {
  const list = element("dl");
  const known = [
    ["step", `${rollout.step}${rollout.purpose === "training" ? "" : ` (${rollout.purpose})`}`],
    ["group", rollout.group_id], ["task", rollout.task_id], ["environment", rollout.environment], ["answer", rollout.answer],
    ["status", rollout.status], ["reason", rollout.error ? "" : rollout.reason], ["not trained", rollout.not_trained], ["error", rollout.error],
    ["advantage", rollout.advantage === null ? "" : number(rollout.advantage)],
    ["metrics", pairs(rollout.metrics)], ["seconds", pairs(rollout.seconds)], ["info", rollout.info],
  ];
  for (const [name, value] of known) {
    if (value) list.append(element("dt", { text: name }), element("dd", { text: value }));
  }
  return list;
}

function rewards(rollout) {
  const body = element("tbody"), results = new Map(rollout.evaluations.map((one) => [one.component, one]));
  const given = new Map(rollout.rewards);
  const line = (label, values, why, level) => body.append(element("tr", {},
    element(level ? "td" : "th", { scope: "row", class: level ? "faint" : "", text: label }),
    ...values.map((value) => element("td", { class: "number", text: value })), element("td", { text: why })));
  for (const name of new Set([...given.keys(), ...results.keys()])) {
    const one = results.get(name);
    const more = one ? one.metrics.map(([metric, value]) => `${metric} ${number(value)}`) : [];
    const why = one ? [one.reason, one.failure, one.error, ...more].filter(Boolean).join(" \u00b7 ") : "";
    line(name, [number(given.get(name)), one ? number(one.score) : "", one ? number(one.weight) : ""], why, 0);
    for (const step of one ? one.steps : []) {
      const measured = step.metrics.map(([metric, value]) => `${metric} ${number(value)}`);
      line(`turn ${step.turn}`, ["", number(step.base_reward), ""], [step.reason, ...measured].filter(Boolean).join(" \u00b7 "), 1);
    }
  }
  line("total", [number(rollout.reward), "", ""], "", 0);
  const head = ["component", "reward", "score", "weight", "reason"].map((name, index) =>
    element("th", { scope: "col", class: index > 0 && index < 4 ? "number" : "", text: name }));
  return element("div", { class: "scroll words", tabindex: "0", role: "region", "aria-label": "rewards" },
    element("table", {}, element("thead", {}, element("tr", {}, ...head)), body));
}

function colouring(rollout) {
  const choice = element("select", { id: "colour" }), present = (name) => rollout.turns.some((turn) => COLOURS[name].of(turn) !== null);
  for (const [name, { label }] of Object.entries(COLOURS)) {
    const option = element("option", { value: name, text: present(name) ? label : `${label} (not stored)` });
    option.disabled = !present(name);
    choice.append(option);
  }
  if (!present(colour)) colour = Object.keys(COLOURS).find(present) || colour;
  choice.value = colour;
  choice.addEventListener("change", () => { colour = choice.value; paint(rollout); });
  return element("div", { class: "bar-top controls" }, element("label", {}, "Tokens coloured by ", choice),
    element("span", { class: "scale", id: "scale" }));
}

function turnView(turn, index) {
  const parts = [`turn ${index}`, `${turn.ids.length} tokens`, `stop: ${turn.stop_reason}`];
  const first = turn.versions[0], last = turn.versions[1];
  parts.push(first === last ? `weights ${first}` : `weights ${first}\u2013${last}`);
  for (const [label, value] of [["reward", turn.reward], ["episode advantage", turn.episode_advantage],
    ["step return", turn.step_return], ["step advantage", turn.step_advantage]]) {
    if (value !== null) parts.push(`${label} ${number(value)}`);
  }
  if (turn.anchor_state) parts.push(`anchor ${turn.anchor_state.slice(0, 12)}`);
  const view = element("div", { class: "turn" }, element("p", { class: "faint", text: parts.join(" \u00b7 ") }));
  const shown = turn.messages.at(-1)?.role === "assistant" ? turn.messages.slice(0, -1) : turn.messages;
  view.append(...observation(shown, turn.observed));
  view.append(element("div", { class: "message assistant" }, element("div", { class: "role", text: "assistant" }), tokensOf(turn, index)));
  if (turn.action !== null) view.append(element("p", { class: "faint", text: `action: ${turn.action}` }));
  if (turn.rewards.length > 1) view.append(element("p", { class: "faint", text: `rewards: ${pairs(turn.rewards)}` }));
  if (turn.info) view.append(element("p", { class: "faint", text: `info: ${turn.info}` }));
  return view;
}

function observation(messages, observed) {
  const shown = messages.map((message) => element("div", { class: "message" },
    element("div", { class: "role", text: message.role }), element("div", { class: "content", text: message.content })));
  return [...shown, element("details", {}, element("summary", { text: "exact observation tokens" }),
    element("div", { class: "tokens", text: observed }))];
}

function lastObservation(last) {
  return element("div", { class: "turn" }, element("p", { class: "faint", text: "last observation \u00b7 not answered" }),
    ...observation(last.messages, last.observed));
}

function tokensOf(turn, index) {
  const place = element("div", { class: "tokens", tabindex: "0", role: "group", "data-turn": String(index),
    "aria-label": `tokens of turn ${index}; arrow keys read their values` });
  const spans = turn.texts.map((text) => element("span", text ? { text } : { class: "part" }));
  place.append(...spans);
  const places = new Map(spans.map((span, at) => [span, at]));
  let at = -1;
  const show = (to) => {
    if (spans[at]) spans[at].classList.remove("here");
    at = Math.max(0, Math.min(spans.length - 1, to));
    if (!spans[at]) return;
    spans[at].classList.add("here");
    spans[at].scrollIntoView({ block: "nearest" });
    showTip(spans[at], tokenValues(turn, at));
  };
  const leave = () => {
    if (spans[at]) spans[at].classList.remove("here");
    hideTip();
  };
  place.addEventListener("pointerover", (event) => {
    if (places.has(event.target)) showTip(event.target, tokenValues(turn, places.get(event.target)));
  });
  place.addEventListener("pointerleave", hideTip);
  place.addEventListener("focus", () => { if (place.matches(":focus-visible")) show(Math.max(at, 0)); });
  place.addEventListener("blur", leave);
  place.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -10, ArrowDown: 10, Home: -spans.length, End: spans.length }[event.key];
    if (move === undefined) return;
    event.preventDefault();
    show(at + move);
  });
  return place;
}

function tokenValues(turn, at) {
  const lines = [`token ${at}: ${turn.texts[at] || "part of a character"} (id ${turn.ids[at]})`, `log-prob ${number(turn.logprobs[at])}`];
  if (turn.learner) lines.push(`learner ${number(turn.learner[at])}, difference ${number(turn.difference[at], 3)}`);
  if (turn.reference) lines.push(`reference ${number(turn.reference[at])}`);
  if (turn.values) lines.push(`value ${number(turn.values[at])}` +
    (turn.value_targets ? `, target ${number(turn.value_targets[at])}` : ""));
  lines.push(turn.advantages ? `advantage ${number(turn.advantages[at])}` : "not trained on");
  return lines.join("\n");
}

function showTip(span, text) {
  const tip = byId("tip"), box = span.getBoundingClientRect();
  tip.textContent = text;
  tip.hidden = false;
  const left = Math.min(Math.max(box.left, 8), document.documentElement.clientWidth - tip.offsetWidth - 8);
  const below = box.bottom + 6 + tip.offsetHeight < innerHeight;
  tip.style.left = `${Math.max(left, 8)}px`;
  tip.style.top = `${below ? box.bottom + 6 : box.top - tip.offsetHeight - 6}px`;
}

function hideTip() {
  byId("tip").hidden = true;
}

function paint(rollout) {
  const { of, diverging } = COLOURS[colour];
  let limit = 0;
  for (const turn of rollout.turns) for (const value of of(turn) || []) limit = Math.max(limit, Math.abs(value || 0));
  document.querySelectorAll("#one .tokens[data-turn]").forEach((place) => {
    const values = of(rollout.turns[Number(place.dataset.turn)]);
    [...place.children].forEach((span, at) => {
      const value = values ? values[at] || 0 : 0;
      span.classList.remove("positive", "negative", "unlikely");
      if (!value || !limit) return;
      span.classList.add(diverging ? (value > 0 ? "positive" : "negative") : "unlikely");
      span.style.setProperty("--v", (Math.abs(value) / limit).toFixed(3));
    });
  });
  const scale = byId("scale");
  if (!limit) {
    scale.replaceChildren("all are 0");
    return;
  }
  scale.replaceChildren(number(-limit, 3), element("span", { class: `ramp ${diverging ? "diverging" : "sequential"}` }),
    diverging ? `+${number(limit, 3)}` : "0");
}

// ---------------------------------------------------------------- the page

function showPage() {
  byId("run").textContent = data.run;
  byId("about").textContent = `${data.steps} steps recorded \u00b7 ${data.rollouts.length} rollouts on this page`;
  byId("notes").append(...data.notes.map((note) => element("li", { text: note })));
  showCurves();
  showPhases();
  makeTable();
  addEventListener("hashchange", followAddress);
  followAddress();
}

showPage();
