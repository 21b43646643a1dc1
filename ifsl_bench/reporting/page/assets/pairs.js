"use strict";
// The heat map of pairwise differences: a table of buttons, in which arrow keys move.

function drawPairs(one, shown) {
  const pick = find("#pairs select");
  for (const option of pick.options) option.disabled = !one.pairs[option.value];
  if (!one.pairs[pick.value]) pick.value = Object.keys(one.pairs)[0] || "acc";
  const metric = pick.value;
  const known = new Map();
  for (const [a, b, mean, interval, p, told, seeds, fixed] of one.pairs[metric] || []) {
    known.set(a + " " + b, [a, b, mean, interval, p, told, seeds, fixed]);
    known.set(b + " " + a, [b, a, -mean, interval, p, told, seeds, fixed]);
  }
  const rows = shown.filter((n) => one.ranked.includes(n) && [...known.values()].some((pair) => pair[0] === n));
  find("#pairs").hidden = rows.length < 2;
  if (rows.length < 2) return;
  const most = Math.max(...[...known.values()].map((pair) => Math.abs(pair[2])), 0.01);
  const name = (n) => DATA.rows[n].name;
  const button = (said, text, onclick, more = {}) =>
    el("button", { type: "button", tabindex: -1, "aria-label": said, title: said, onclick, ...more }, text);
  const cell = (a, b) => {
    if (a === b) return button(name(a), "·", () => showRow(a));
    const both = `${name(a)} minus ${name(b)}`;
    const pair = known.get(a + " " + b);
    if (!pair) return button(both + ": not compared", "");
    const mean = pair[2];
    const digits = mean.toFixed(Math.abs(mean) < 9.95 ? 1 : 0);
    const text = Number(digits) === 0 ? "0.0" : (mean > 0 ? "+" : "") + digits;
    const strength = (0.06 + 0.5 * Math.sqrt(Math.abs(mean) / most)).toFixed(2);
    return button(`${both}: ${text}${pair[5] ? ", significant" : ""}`, text, () => showPair(pair, one, metric), {
      class: pair[5] ? "told" : "",
      style: `background: rgba(var(${mean > 0 ? "--rise" : "--fall"}), ${strength})`,
    });
  };
  find("#pairs table").replaceChildren(
    el("thead", {}, el("tr", {}, el("td"), ...rows.map((b) => el("th", { scope: "col" }, el("span", {}, name(b)))))),
    el(
      "tbody",
      {},
      ...rows.map((a) => el("tr", {}, el("th", { scope: "row" }, name(a)), ...rows.map((b) => el("td", {}, cell(a, b))))),
    ),
  );
  const first = find("#pairs tbody button");
  if (first) first.tabIndex = 0;
}

find("#pairs table").addEventListener("keydown", (event) => {
  const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
  const from = event.target.closest("td");
  if (!step || !from) return;
  event.preventDefault();
  const lines = all("#pairs tbody tr");
  const to = find(
    "button",
    lines[lines.indexOf(from.parentNode) + step[0]]?.cells[from.cellIndex + step[1]] || el("td"),
  );
  if (!to) return;
  find("button", from).tabIndex = -1;
  to.tabIndex = 0;
  to.focus();
});
find("#pairs select").addEventListener("input", update);
