// Copyright The marin_rl Authors
// SPDX-License-Identifier: Apache-2.0

// ---------------------------------------------------------------- comparison of runs

const groupCurves = (name) => data.groups
  .map((label, index) => ({ name: `${name}#${index}`, label, color: index % 9 }))
  .filter((curve) => data.curves.series[curve.name]);

const swatch = (group) => element("span", { class: `swatch s${group % 9}` });

function showOverview() {
  const head = data.groups.map((label, index) => element("th", { scope: "col" }, swatch(index), label));
  const rows = data.overview.map(([label, cells]) =>
    element("tr", {}, element("th", { scope: "row", text: label }), ...cells.map((text) => element("td", { text }))));
  byId("overview").append(
    element("thead", {}, element("tr", {}, element("td"), ...head)), element("tbody", {}, ...rows));
  byId("h-overview").parentElement.hidden = false;
}

function sideBySideHead() {
  byId("h-rollouts").textContent = `Rollouts of ${data.purpose}, side by side`;
  byId("rollouts").className = "side";
  const heads = data.runs.map(({ name, group }, run) => element("th", { scope: "col" }, swatch(group), name,
    element("span", { class: "faint", text: data.steps[run] === null ? "" : ` step ${data.steps[run]}` })));
  return [element("th", { scope: "col", text: "task" }), ...heads];
}

// A row for each task with a rollout that passes the filters, with all its rollouts.
function showSideBySide() {
  const tasks = [...new Set(table.rows.map(({ task }) => task))], kept = new Set(tasks);
  table.rows = data.rollouts.filter(({ task }) => kept.has(task));
  const shown = tasks.slice(0, table.shown);
  document.querySelector("#rollouts tbody").replaceChildren(...shown.map(taskRow));
  byId("count").textContent = `${shown.length} of ${tasks.length} tasks` +
    (tasks.length < data.tasks.length ? `, filtered from ${data.tasks.length}` : "") +
    (data.tasks.length > 1 ? ", first those on which the runs differ most" : "");
  byId("more").hidden = tasks.length <= shown.length;
}

function taskRow(task) {
  const rollouts = table.rows.filter((rollout) => rollout.task === task), first = rollouts.find(({ prompt }) => prompt) || rollouts[0];
  const head = element("th", { scope: "row" }, element("div", { class: "reply", text: first.prompt }));
  if (first.expected) head.append(element("div", { class: "faint", text: `answer: ${first.expected}` }));
  const cells = data.tasks[task].map((cell, run) => {
    if (!cell) return element("td", { class: "faint", text: "none" });
    const shown = rollouts.filter((rollout) => rollout.run === run), left = cell.count - shown.length;
    const mean = cell.count > 1 ? [element("p", { class: "faint", text: `mean ${number(cell.mean)} \u00b7 ${cell.count} rollouts` })] : [];
    const more = left ? [element("p", { class: "faint", text: `${left} more` })] : [];
    return element("td", {}, ...mean, ...shown.map(reply), ...more);
  });
  return element("tr", {}, head, ...cells);
}

function reply(rollout) {
  const link = element("a", { href: addressOf(rollout), title: rollout.id, text: number(rollout.reward) });
  link.setAttribute("aria-current", String(rollout === table.current));
  link.addEventListener("click", () => { if (link.hash === location.hash) openRollout(rollout); });
  const text = rollout.turns.at(-1)?.messages.at(-1)?.content || "";
  const why = rollout.reason ? [element("div", { class: "faint", text: rollout.reason })] : [];
  return element("div", { class: "one" }, link, element("div", {}, element("div", { class: "reply", text }), ...why));
}
