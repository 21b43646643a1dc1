"use strict";
// Where a number comes from: the dialogs of a row and of a pair of rows.
const METRICS = {
  acc: "Acc.",
  calibrated_acc: "cal. Acc.",
  delta: "Δ",
  delta_a: "Δ a",
  delta_b: "Δ b",
  base_joint: "base joint",
  base_alone: "base alone",
  novel_joint: "novel joint",
  novel_alone: "novel alone",
  harmonic: "harmonic mean",
  ausuc: "AUSUC",
  calibrated_delta: "cal. Δ",
};

function plusMinus([mean, interval]) {
  return mean.toFixed(2) + (interval == null ? "" : " ± " + interval.toFixed(2));
}

/** Facts as [name, text] from numbers in the list of texts. */
const facts = (pairs) => pairs.map(([name, text]) => [DATA.texts[name], DATA.texts[text]]);

/** Names and texts: the short ones beside each other, the long ones below. */
function list(pairs) {
  const [short, long] = [true, false].map((kind) => pairs.filter(([, text]) => text.length <= 24 === kind));
  const item = ([name, text]) => el("div", {}, el("dt", {}, name), el("dd", {}, text));
  return el(
    "div",
    {},
    ...(short.length ? [el("dl", { class: "grid" }, ...short.map(item))] : []),
    ...(long.length ? [el("dl", {}, ...long.map(item))] : []),
  );
}

/** A word as a shell takes it. */
const quoted = (word) => (/^[\w@%+=:,./-]+$/.test(word) ? word : "'" + word.replaceAll("'", "'\\''") + "'");

/** A text with a button that copies it. */
function copied(text) {
  const button = el(
    "button",
    {
      type: "button",
      onclick: async () => {
        try {
          await navigator.clipboard.writeText(text);
          button.textContent = "copied";
        } catch {
          getSelection().selectAllChildren(button.previousSibling);
          button.textContent = "selected; copy it";
        }
      },
    },
    "copy",
  );
  return el("div", {}, el("pre", {}, text), button);
}

function open(title, ...parts) {
  const dialog = find("#details");
  const close = el("button", { type: "button", onclick: () => dialog.close() }, "close");
  dialog.replaceChildren(
    el("header", {}, el("h2", { id: "details-title" }, ...title), close),
    el("div", { class: "inside" }, ...parts),
  );
  if (!dialog.open) dialog.showModal();
  dialog.scrollTop = 0;
  close.focus();
}

function cited(row) {
  const part = (title, number) => {
    const [text, bibtex] = DATA.citations[number];
    const parts = text ? [el("p", {}, text)] : [];
    if (bibtex) parts.push(copied(bibtex));
    return parts.length ? [el("h3", {}, title), ...parts] : [];
  };
  const method = row.cited_method === undefined ? [] : part("The method", row.cited_method);
  return [...part(row.origin ? "The method" : "The paper that prints the row", row.cited), ...method];
}

/** What each seed says besides; rows of a table, the longest texts left to lines of their own. */
function perSeed(seeds) {
  const names = [...new Set(seeds.flatMap((seed) => facts(seed).map(([name]) => name)))];
  const values = seeds.map((seed) => Object.fromEntries(facts(seed)));
  const short = names.filter((name) => values.every((value) => (value[name] || "").length <= 24));
  const table = el(
    "table",
    {},
    el("thead", {}, el("tr", {}, ...short.map((name) => el("th", { scope: "col" }, name)))),
    el("tbody", {}, ...values.map((value) => el("tr", {}, ...short.map((name) => el("td", {}, value[name] || ""))))),
  );
  const long = names.filter((name) => !short.includes(name));
  const lines = values.map((value) =>
    el(
      "details",
      { open: true },
      el("summary", {}, "seed " + value.seed),
      list(long.filter((name) => value[name]).map((name) => [name, value[name]])),
    ),
  );
  return [el("div", { class: "scroll", tabindex: 0 }, table), ...(long.length ? lines : [])];
}

function showRow(number) {
  const row = DATA.rows[number];
  const about = [
    ["task", row.task],
    ["source", row.source],
  ];
  if (row.setting) about.push(["setting", row.setting]);
  if (row.printed !== undefined) about.push(["± of Acc., as printed", row.printed.toFixed(2) + ", of unknown kind"]);
  if (row.note) about.push(["note", row.note]);
  const values = Object.entries(row.values).map(([name, value]) => [METRICS[name], plusMinus(value)]);
  const parts = [
    list(about),
    el("h3", {}, "In percent" + (row.origin ? ", ± the 95% interval over episodes" : ", as printed")),
    list(values),
  ];
  if (row.origin) {
    const [shared, seeds] = row.origin;
    // A stored row is found by its name anywhere; yours may lie in a folder that only its file names.
    const [, file] = facts(shared)
      .concat(...seeds.map(facts))
      .find(([name]) => name === "file");
    const stored = row.source === "stored";
    const said = stored ? quoted(row.name) + " " + quoted(row.task) : quoted(file);
    parts.push(
      el("h3", {}, "Where it comes from"),
      list(facts(shared)),
      el("h3", {}, seeds.length > 1 ? "Each seed" : "Its seed"),
      ...perSeed(seeds),
      el("h3", {}, "To see more, or to run it again" + (stored ? "" : ", in the folder of results")),
      copied("ifsl-bench show " + said + "\nifsl-bench reproduce " + said),
    );
  }
  open([mark(row), row.name], ...parts, ...cited(row));
  writeAddress(row.name);
}

function showPair(pair, one, metric) {
  const [a, b, mean, interval, p, told, seeds, fixed] = pair;
  const rows = [DATA.rows[a], DATA.rows[b]];
  const said = [
    [METRICS[metric], (mean > 0 ? "+" : "") + mean.toFixed(2) + " ± " + interval.toFixed(2) + " points"],
    ["p", (p < 1e-15 ? "< 1e-15" : String(p)) + ", of this difference alone"],
    [
      "ranking",
      told ? "significant among all comparisons (Holm, 5%)" : "not significant among all comparisons (Holm, 5%)",
    ],
    [
      "over",
      (fixed & 1 ? "episodes" : "episodes and training seeds") +
        (fixed & 2 ? " and test images" : ", test images held fixed") +
        (fixed & 1 ? ", of these trained models" : ""),
    ],
    ["seeds", DATA.texts[seeds] || "none in common"],
    ["task", one.task + ", " + one.said],
  ];
  const labels = rows.map((row) => quoted(row.name)).join(" ");
  open(
    [rows[0].name + " minus " + rows[1].name],
    list(said),
    el("h3", {}, "All metrics, and each seed"),
    copied("ifsl-bench compare " + labels + " --task " + quoted(one.task)),
    el("h3", {}, "Where the two come from"),
    ...rows.map((row, i) =>
      el("p", {}, el("button", { type: "button", onclick: () => showRow(pair[i]) }, mark(row), row.name)),
    ),
  );
}

find("#details").addEventListener("close", (event) => {
  if (!event.target.open) writeAddress(); // else another row has taken its place by now
});
find("#details").addEventListener("click", (event) => {
  if (event.target === event.currentTarget) event.currentTarget.close(); // beside it
});
