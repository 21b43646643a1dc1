"use strict";
// Which table is shown, sorting, filters and the address. The tables are there already; names come as text, never as HTML.
const DATA = JSON.parse(document.getElementById("data").textContent);
const find = (selector, within = document) => within.querySelector(selector);
const all = (selector, within = document) => [...within.querySelectorAll(selector)];
const controls = find("#controls");
const CHECKS = ["published", "options", "provisional", "more"];
const DEFAULTS = Object.fromEntries(CHECKS.map((name) => [name, controls.elements[name].defaultChecked]));

/** An element with attributes and children; children that are strings become text. */
function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value != null) made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

function svg(tag, attributes, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function mark({ look: [color, symbol, , further] }) {
  const uses = (further ? [symbol, "dot"] : [symbol]).map((name) => svg("use", { href: "#mark-" + name }));
  return svg("svg", { class: "mark", "aria-hidden": true, style: `color: ${color}` }, ...uses);
}

const TASKS = DATA.boards.filter((one, i) => DATA.boards.findIndex((other) => other.task === one.task) === i);
let wanted = ""; // the setting, kept while a task is shown that lacks it

function fill(menu, texts, chosen) {
  menu.replaceChildren(
    ...[...texts].map(([value, text]) => el("option", { value, selected: value === chosen }, text)),
  );
  menu.parentNode.hidden = texts.size < 2;
}

/** Shows a task: its protocol is chosen, and menus offer what there is of that, and of the data set. */
function choose(one) {
  const { protocol, data, task } = controls.elements;
  const alike = TASKS.filter((other) => other.protocol === one.protocol);
  const near = alike.filter((other) => other.data === one.data);
  protocol.value = one.protocol;
  fill(data, new Map(alike.map((other) => [other.data, other.choices[0]])), one.data);
  fill(task, new Map(near.map((other) => [other.task, other.choices[1]])), one.task);
}

/** The first task of what is chosen: of the protocol, as far as there is one of the data set, and of as many shots. */
function nearest() {
  const { protocol, data } = controls.elements;
  const { shots } = board();
  const score = (one) => 4 * (one.protocol === protocol.value) + 2 * (one.data === data.value) + (one.shots === shots);
  return TASKS.reduce((best, one) => (score(one) > score(best) ? one : best));
}

/** The task and setting that are shown, as the data have them. */
function board() {
  const here = DATA.boards.filter((one) => one.task === controls.elements.task.value);
  return here.find((one) => one.setting === wanted) || here[0];
}

function article(one) {
  return all("article.board").find((a) => a.dataset.task === one.task && a.dataset.setting === one.setting);
}

/** The numbers of the rows that pass the filters, in the ranking's order. */
function filter(one) {
  const words = controls.elements.search.value.toLowerCase().split(/\s+/).filter(Boolean);
  const rows = all("tbody tr", article(one));
  const shown = new Set();
  for (const line of rows) {
    const row = DATA.rows[line.dataset.row];
    const said = (row.label + " " + row.source).toLowerCase();
    const flags = line.dataset.flags.split(" ").filter(Boolean);
    line.hidden = !(
      flags.every((flag) => controls.elements[flag].checked) && words.every((word) => said.includes(word))
    );
    if (!line.hidden) shown.add(Number(line.dataset.row));
  }
  find(".none", article(one)).hidden = shown.size > 0;
  controls.elements.count.value = shown.size + " of " + rows.length + " rows";
  return one.rows.filter((number) => shown.has(number));
}

function update() {
  const one = board();
  const settings = DATA.boards.filter((other) => other.task === one.task);
  fill(controls.elements.setting, new Map(settings.map((other) => [other.setting, other.said])), one.setting);
  for (const other of all("article.board")) other.hidden = other !== article(one);
  for (const other of all(".overview"))
    other.hidden = other.dataset.setting !== one.setting || other.dataset.protocol !== one.protocol;
  for (const table of all("table.results")) table.classList.toggle("full", controls.elements.more.checked);
  const shown = filter(one);
  drawChips(one, shown);
  drawPairs(one, shown);
  drawPlots(one, shown);
  writeAddress();
}

// --- sorting ---------------------------------------------------------------------------------------------------------

/** What a cell is sorted by: its first number, or its text; nothing comes last either way. */
function sortKey(cell, numeric) {
  const text = (cell.dataset.key || cell.textContent).trim();
  if (!numeric) return text.toLowerCase() || null;
  const number = parseFloat(text);
  return Number.isNaN(number) ? null : number;
}

function sortBy(heading) {
  const table = heading.closest("table");
  const at = heading.cellIndex;
  const numeric = heading.classList.contains("n");
  const usual = numeric && heading.textContent.trim() !== "rank" ? "descending" : "ascending";
  const other = usual === "descending" ? "ascending" : "descending";
  const order = heading.getAttribute("aria-sort") === usual ? other : usual;
  for (const th of all("thead th", table)) th.removeAttribute("aria-sort");
  heading.setAttribute("aria-sort", order);
  const sign = order === "ascending" ? 1 : -1;
  const lines = all("tbody tr", table).map((line) => [sortKey(line.cells[at], numeric), line]);
  lines.sort(([a], [b]) => {
    if (a === null || b === null) return (a === null) - (b === null);
    return sign * (typeof a === "string" ? a.localeCompare(b) : a - b);
  });
  find("tbody", table).append(...lines.map(([, line]) => line));
}

// --- the address: what is shown can be linked to --------------------------------------------------------------------

function writeAddress(row = null) {
  const said = new URLSearchParams({ task: controls.elements.task.value, setting: controls.elements.setting.value });
  if (controls.elements.search.value) said.set("search", controls.elements.search.value);
  for (const name of CHECKS)
    if (controls.elements[name].checked !== DEFAULTS[name]) said.set(name, Number(!DEFAULTS[name]));
  if (row) said.set("row", row);
  history.replaceState(null, "", "#" + String(said).replaceAll("+", "%20"));
}

function readAddress() {
  // The + in the name of a task, which an address would otherwise have for a space.
  const said = new URLSearchParams(location.hash.slice(1).replaceAll("+", "%2B"));
  const named = TASKS.find((one) => one.task === said.get("task"));
  if (!named) return update();
  choose(named);
  if (said.get("setting")) wanted = said.get("setting");
  controls.elements.search.value = said.get("search") || "";
  for (const name of CHECKS) controls.elements[name].checked = said.has(name) ? said.get(name) === "1" : DEFAULTS[name];
  const name = said.get("row");
  update();
  const number = name ? board().rows.find((n) => DATA.rows[n].name === name) : undefined;
  if (number !== undefined) showRow(number);
}

// --- what people do --------------------------------------------------------------------------------------------------

function start() {
  let waiting = 0;
  controls.addEventListener("submit", (event) => event.preventDefault());
  controls.addEventListener("input", ({ target }) => {
    if (target.name === "setting") wanted = target.value;
    if (["protocol", "data"].includes(target.name)) choose(nearest());
    clearTimeout(waiting);
    waiting = setTimeout(update, 120);
  });
  document.addEventListener("click", (event) => {
    const target = event.target.closest(".sort, .reset, [data-row]");
    if (!target || event.target.closest("dialog, a")) return;
    if (target.matches(".sort")) sortBy(target.closest("th"));
    else if (target.matches(".reset")) {
      controls.elements.search.value = "";
      for (const name of ["published", "options", "provisional"]) controls.elements[name].checked = true;
      update();
    } else if (!String(getSelection())) showRow(Number(target.dataset.row));
  });
  addEventListener("hashchange", () => {
    find("#details").close();
    readAddress();
    find("main").scrollIntoView();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", update);
  const mine = TASKS.find((one) => one.rows.some((number) => DATA.rows[number].source === "yours"));
  choose(mine || TASKS[0]);
  for (const { value, parentNode, form } of controls.elements.protocol)
    parentNode.parentNode.hidden ||= !TASKS.some((one) => one.protocol === value);
  readAddress();
  document.documentElement.dataset.drawn = Math.round(performance.now());
}
