// Copyright The marin_rl Authors
// SPDX-License-Identifier: Apache-2.0

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
const CHOICES = data.tasks ? ["environment", "status"] : ["step", "environment", "status"];

function compare(one, other) {
  if (one === null || other === null) return (one === null) - (other === null);
  const order = typeof one === "number" ? one - other : one.localeCompare(other, undefined, { numeric: true });
  return table.descending ? -order : order;
}

function passes(rollout) {
  const words = filters.text.value.trim().toLowerCase();
  const least = filters.least.value, most = filters.most.value;
  return CHOICES.every((name) => !filters[name].value || String(rollout[name]) === filters[name].value)
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
  if (data.tasks) {
    showSideBySide();
    return;
  }
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
  if (data.tasks) head.append(...sideBySideHead());
  else COLUMNS.forEach((column, index) => {
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
  for (const name of CHOICES) {
    const values = [...new Set(data.rollouts.map((rollout) => String(rollout[name])))];
    add(name, name, element("select", {}, ...["", ...values].map((value) => element("option", { value, text: value || "all" }))));
  }
  add("least", "reward from", element("input", { type: "number", step: "any" }));
  add("most", "to", element("input", { type: "number", step: "any" }));
  add("text", "contains", element("input", { type: "search" }));
  byId("more").addEventListener("click", () => { table.shown += PAGE; showTable(); });
  showTable();
}
