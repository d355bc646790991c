// Copyright The marin_rl Authors
// SPDX-License-Identifier: Apache-2.0

// ---------------------------------------------------------------- one rollout

const COLOURS = {
  advantage: { label: "advantage", of: (turn) => turn.advantages, diverging: true },
  logprob: { label: "log-prob", of: (turn) => turn.logprobs, diverging: false },
  value: { label: "value", of: (turn) => turn.values, diverging: true },
  difference: { label: `policy ${MINUS} learner log-prob`, of: (turn) => turn.difference, diverging: true },
};
let colour = "advantage";

const addressOf = (rollout) => `#${[...(data.runs ? [rollout.run] : []), rollout.step, rollout.purpose, rollout.id].map(encodeURIComponent).join("/")}`;

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
    ["run", data.runs ? data.runs[rollout.run].name : ""],
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
  byId("about").textContent = data.about;
  byId("notes").append(...data.notes.map((note) => element("li", { text: note })));
  if (data.groups) showOverview();
  showCurves();
  byId("h-phases").parentElement.hidden = Boolean(data.groups);
  byId("h-rollouts").parentElement.hidden = data.tasks?.length === 0;
  if (!data.groups) showPhases();
  makeTable();
  addEventListener("hashchange", followAddress);
  followAddress();
}

showPage();
