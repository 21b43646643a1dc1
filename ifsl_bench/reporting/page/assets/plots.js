"use strict";
// What Plotly draws. It reads names, ticks and hover texts as HTML, so that each goes through `label`.
const muted = new Set(); // names of rows that the chips have put out
const label = (text) => text.replace(/[&<>]/g, (mark) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;" })[mark]);
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const narrow = () => innerWidth < 600;

function drawChips(one, shown) {
  const rows = shown.map((number) => DATA.rows[number]).filter((row) => row.origin);
  const chips = rows.map((row) =>
    el(
      "label",
      {},
      el("input", { type: "checkbox", value: row.name, checked: !muted.has(row.name) }),
      mark(row),
      row.curve || row.validation || row.after ? stroke(row) : "",
      row.name,
    ),
  );
  const every = rows.some((row) => muted.has(row.name));
  const button = el(
    "button",
    {
      type: "button",
      onclick: () => {
        for (const row of rows) every ? muted.delete(row.name) : muted.add(row.name);
        update();
        find("#chips button")?.focus(); // a new one has taken the place of this
      },
    },
    every ? "all" : "none",
  );
  find("#chips").replaceChildren(find("#chips legend"), ...chips, ...(rows.length > 1 ? [button] : []));
  find("#chips").hidden = !rows.length;
}

const DASHES = { solid: "", dash: "5 3", dot: "1.5 3", dashdot: "5 3 1.5 3" };

/** A piece of the row's line, as plots draw it. */
const stroke = ({ look: [color, , dash] }) =>
  svg(
    "svg",
    { class: "stroke", viewBox: "0 0 24 4", "aria-hidden": true, style: `color: ${color}` },
    svg("path", { d: "M0 2H24", "stroke-dasharray": DASHES[dash] }),
  );

function layout(more) {
  const axis = {
    gridcolor: colour("--line"),
    zeroline: false,
    linecolor: colour("--soft"),
    automargin: true,
    tickfont: { size: 11 },
    title: { standoff: 8 },
  };
  const { xaxis = {}, yaxis = {}, ...rest } = more;
  return {
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    showlegend: false,
    hovermode: "closest",
    margin: { l: 48, r: 12, t: 30, b: 42 },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("--soft"), activecolor: colour("--ink") },
    height: 420,
    dragmode: narrow() ? false : "zoom",
    font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: colour("--ink") },
    hoverlabel: {
      align: "left",
      bgcolor: colour("--paper"),
      bordercolor: colour("--soft"),
      font: { color: colour("--ink") },
    },
    xaxis: { ...axis, ...xaxis, title: { ...axis.title, ...xaxis.title } },
    yaxis: { ...axis, ...yaxis, title: { ...axis.title, ...yaxis.title } },
    ...rest,
  };
}

/** Draws into a figure, or says why there is nothing to draw: `nothing`, where rows are switched on. */
function draw(id, traces, more, nothing, any = true) {
  const canvas = find("#" + id + " .canvas");
  if (!traces.length) {
    Plotly.purge(canvas);
    canvas.classList.remove("js-plotly-plot"); // purge leaves it, and what is said here would stay below the next plot
    canvas.replaceChildren(el("p", {}, any ? nothing : "No rows are switched on."));
    return;
  }
  if (!canvas.classList.contains("js-plotly-plot")) canvas.replaceChildren();
  const modes = ["select2d", "lasso2d", "zoomIn2d", "zoomOut2d"];
  Plotly.react(canvas, traces, layout(more), {
    displaylogo: false,
    responsive: true,
    modeBarButtonsToRemove: modes,
    showSendToCloud: false, // nothing leaves this page
    plotlyServerURL: "",
  });
  for (const name of ["plotly_click", "plotly_relayout"]) canvas.removeAllListeners?.(name);
  canvas.on("plotly_click", (event) => {
    const number = event.points[0]?.data.meta;
    if (Number.isInteger(number)) showRow(number);
  });
}

/** A trace of a row: a click on it says where it comes from. */
const trace = (number, text, more) => ({
  type: "scatter",
  mode: "markers",
  meta: number,
  hoverinfo: "text",
  hovertext: label(DATA.rows[number].name) + "<br>" + text,
  ...more,
});
const symbol = (row, open = "") => row.look[1] + open + (row.look[3] ? "-dot" : "");
const marker = (row, { size = 10, ...more } = {}) => ({
  color: row.look[0],
  symbol: symbol(row),
  size: row.look[3] ? size + 2 : size, // the line is the dot's, and takes its width from the mark
  line: { color: colour("--paper"), width: row.look[3] ? 1 : 0 },
  ...more,
});

function drawPlots(one, shown) {
  const measured = one.rows.some((number) => DATA.rows[number].origin);
  const inSessions = one.protocol === "sessions";
  const curves = find("#curves");
  if ((curves.nextElementSibling === find("#board")) !== inSessions)
    find("#board")[inSessions ? "before" : "after"](curves);
  curves.hidden = !(measured || inSessions);
  find("#plots").hidden = !measured;
  for (const id of ["sessions", "forgetting", "variance"]) find("#" + id).hidden = !inSessions;
  find("#tradeoff").hidden = inSessions;
  const rows = shown.filter((number) => DATA.rows[number].origin && !muted.has(DATA.rows[number].name));
  if (inSessions) {
    drawSessions(shown.filter((number) => rows.includes(number) || !DATA.rows[number].origin));
    drawForgetting(rows);
    drawVariance(rows);
  } else drawTradeoff(one, rows);
  drawSeeds(rows);
  drawValidation(rows);
  drawCost(rows);
}

// --- base against novel accuracy -------------------------------------------------------------------------------------

function drawTradeoff(one, numbers) {
  const known = numbers.filter((number) => DATA.rows[number].point);
  const traces = known.flatMap((number) => tradeoffOf(number));
  const points = known.flatMap((number) => [DATA.rows[number].point, DATA.rows[number].calibrated].filter(Boolean));
  const span = (at) => {
    const values = points.map((point) => point[at]);
    return values.length ? [Math.max(0, Math.min(...values) - 6), Math.min(100, Math.max(...values) + 6)] : [0, 100];
  };
  const [x, y] = [span(0), span(1)];
  if (traces.length) traces.unshift(...levels(one.queries, y));
  draw(
    "tradeoff",
    traces,
    {
      xaxis: { title: { text: "base accuracy, %" }, range: [...x], showgrid: false }, // Plotly writes into them
      yaxis: { title: { text: "novel accuracy, %" }, range: [...y], showgrid: false },
      annotations: levelNames(one.queries, y, x, y),
      margin: { l: 48, r: narrow() ? 52 : 66, t: 30, b: 42 }, // the names of lines stand at the right
    },
    "No row here has base and novel accuracies.",
    numbers.length,
  );
  const canvas = find("#tradeoff .canvas");
  if (traces.length)
    canvas.on("plotly_relayout", (event) => {
      if (!Object.keys(event).some((name) => /^[xy]axis/.test(name))) return; // of what is done here
      const { xaxis, yaxis } = canvas.layout;
      Plotly.relayout(canvas, { annotations: levelNames(one.queries, y, xaxis.range, yaxis.range) });
    });
}

function tradeoffOf(number) {
  const row = DATA.rows[number];
  const traces = [];
  if (row.curve) {
    traces.push(
      trace(number, "", {
        x: row.curve[0],
        y: row.curve[1],
        mode: "lines",
        hoverinfo: "skip",
        line: { color: row.look[0], dash: row.look[2], width: 1.5 },
      }),
    );
  }
  const said = ([base, novel]) => `base ${base.toFixed(2)}, novel ${novel.toFixed(2)}`;
  if (row.calibrated) {
    traces.push(
      trace(
        number,
        said(row.calibrated) +
          ` with the bias found on validation<br>cal. Acc. ${plusMinus(row.values.calibrated_acc)}`,
        {
          x: [row.calibrated[0]],
          y: [row.calibrated[1]],
          marker: marker(row, { symbol: symbol(row, "-open"), size: 9, line: { width: 2 } }),
        },
      ),
    );
  }
  traces.push(
    trace(number, said(row.point) + `<br>Acc. ${plusMinus(row.values.acc)}`, {
      x: [row.point[0]],
      y: [row.point[1]],
      marker: marker(row, { size: 11 }),
    }),
  );
  return traces;
}

// Novel accuracy at a base accuracy x where the accuracy over all queries, or the harmonic mean, is `level`.
const levelsOf = ([bottom, top]) => {
  const step = top - bottom > 30 ? 10 : 5;
  return Array.from({ length: 100 / step - 1 }, (_, i) => step * (i + 1));
};
const equalAcc =
  (level, [base, novel]) =>
  (x) =>
    (level * (base + novel) - base * x) / novel;
const equalHarmonic = (level) => (x) => (2 * x > level ? (level * x) / (2 * x - level) : NaN);

function levels(queries, range) {
  const grid = Array.from({ length: 401 }, (_, i) => i / 4);
  const within = (y) => (y >= 0 && y <= 100 ? y : null);
  const line = (y, dash, name) => ({
    type: "scatter",
    mode: "lines",
    x: grid,
    y: grid.map((x) => within(y(x))),
    hoverinfo: "text",
    hovertext: name,
    line: { color: colour("--soft"), width: 0.7, dash },
    opacity: 0.55,
  });
  return levelsOf(range).flatMap((level) => [
    line(equalAcc(level, queries), "dot", `Acc. ${level}`),
    line(equalHarmonic(level), "dash", `harmonic mean ${level}`),
  ]);
}

/** What the lines are: those of Acc. at the left or upper edge of the ranges that are shown, the others beside it. */
function levelNames(queries, drawn, [left, right], [bottom, top]) {
  const name = (x, y, text, xanchor, yanchor = "middle") => ({
    x,
    y,
    text,
    xanchor,
    yanchor,
    showarrow: false,
    bgcolor: colour("--paper"),
    borderpad: 1,
    font: { size: 9, color: colour("--soft") },
  });
  const inside = (one) => one && one.x >= left && one.x <= right && one.y >= bottom && one.y <= top;
  const [base, novel] = queries;
  const ofAcc = (level) => {
    const y = equalAcc(level, queries)(left);
    if (y <= top - 0.05 * (top - bottom)) return name(left, y, `Acc. ${level}`, "left");
    const x = (level * (base + novel) - novel * top) / base; // where the line leaves at the top
    return x < right - 0.12 * (right - left) ? name(x, top, `Acc. ${level}`, "center", "top") : null;
  };
  return levelsOf(drawn)
    .flatMap((level) => [
      ofAcc(level),
      name(right, equalHarmonic(level)(right), `${narrow() ? "harm." : "harmonic"} ${level}`, "left"),
    ])
    .filter(inside);
}

// --- seeds, validation, cost -----------------------------------------------------------------------------------------

function drawSeeds(numbers) {
  const pick = find("#seeds select");
  const known = numbers.filter((number) => DATA.rows[number].by_seed[pick.value]);
  const traces = known.flatMap((number, i) => {
    const row = DATA.rows[number];
    const [mean, interval] = row.values[pick.value];
    const line = {
      x: [mean],
      y: [i],
      mode: "markers",
      marker: { color: colour("--ink"), symbol: "line-ns-open", size: 14 },
      error_x: { type: "data", array: [interval || 0], color: colour("--ink"), thickness: 1.2, width: 3 },
    };
    const dots = row.by_seed[pick.value];
    return [
      trace(number, plusMinus([mean, interval]), line),
      trace(number, "", {
        x: dots,
        y: dots.map(() => i),
        marker: marker(row, { size: 8, opacity: 0.85 }),
        hovertext: dots.map((value, s) => `${label(row.name)}<br>seed ${row.seeds[s]}: ${value.toFixed(2)}`),
      }),
    ];
  });
  draw(
    "seeds",
    traces,
    {
      height: 112 + 24 * Math.max(known.length, 3),
      margin: { l: 20, r: 12, t: 30, b: 42 }, // at the top is the tool bar
      xaxis: { title: { text: METRICS[pick.value] + ", %" } },
      yaxis: {
        range: [known.length - 0.4, -0.6],
        tickvals: known.map((_, i) => i),
        showgrid: false,
        ticktext: known.map((number) => label(short(DATA.rows[number].name))),
      },
    },
    "No row here has this metric.",
    numbers.length,
  );
}

/** A name that has room on an axis: what tells rows of one method apart is at the end. */
function short(name) {
  const most = narrow() ? 18 : 34;
  return name.length > most ? name.slice(0, most / 3) + "…" + name.slice(1 - (2 * most) / 3) : name;
}

function drawValidation(numbers) {
  const traces = numbers.flatMap((number) => {
    const row = DATA.rows[number];
    const known = (row.validation || [])
      .map(([steps, values], s) => [steps, values, row.seeds[s]])
      .filter(([steps]) => steps.length);
    const line = (steps, values, said, more) =>
      trace(number, "", {
        x: steps,
        y: values,
        mode: "lines",
        hovertext: steps.map((step, i) => `${label(row.name)}<br>${said}, step ${step}: ${values[i].toFixed(2)}`),
        ...more,
      });
    const faint = known.length > 1 ? { width: 1, opacity: 0.3 } : { width: 1.6, opacity: 1 };
    const lines = known.map(([steps, values, seed]) =>
      line(steps, values, `seed ${seed}`, {
        line: { color: row.look[0], dash: row.look[2], width: faint.width },
        opacity: faint.opacity,
      }),
    );
    const common = known.length > 1 ? known[0][0].filter((step) => known.every(([steps]) => steps.includes(step))) : [];
    if (common.length) {
      const means = common.map(
        (step) => known.reduce((sum, [steps, values]) => sum + values[steps.indexOf(step)], 0) / known.length,
      );
      lines.push(
        line(common, means, `mean of ${known.length} seeds`, {
          mode: "lines+markers",
          line: { color: row.look[0], dash: row.look[2], width: 1.6 },
          marker: marker(row, { size: 6 }),
        }),
      );
    }
    return lines;
  });
  draw(
    "validation",
    traces,
    { xaxis: { title: { text: "step" }, rangemode: "tozero" }, yaxis: { title: { text: "validation Acc., %" } } },
    "No row here was meta-trained.",
    numbers.length,
  );
}

const COSTS = {
  seconds: "seconds of meta-training and evaluation",
  milliseconds: "milliseconds an episode",
  parameters: "parameters that are learned",
};

/** An axis of powers of ten, with ticks between them as far as there is room. */
function logAxis(values) {
  const steps = Math.max(...values) / Math.min(...values) < 30 ? [1, 2, 5] : [1, 3];
  const ticks = Array.from({ length: 14 }, (_, i) =>
    steps.map((step) => Number((step * 10 ** (i - 5)).toPrecision(1))),
  ).flat();
  return {
    type: "log",
    tickvals: ticks,
    ticktext: ticks.map((value) => value.toLocaleString("en", { maximumFractionDigits: 5 })),
  };
}

function drawCost(numbers) {
  const what = find("#cost select").value;
  const known = numbers.filter((number) => DATA.rows[number].cost?.[what] !== undefined);
  const traces = known.map((number) => {
    const row = DATA.rows[number];
    const [mean, interval] = row.values.acc;
    return trace(number, `${row.cost[what].toLocaleString("en")} ${COSTS[what]}<br>Acc. ${plusMinus(row.values.acc)}`, {
      x: [row.cost[what]],
      y: [mean],
      marker: marker(row),
      error_y: { type: "data", array: [interval || 0], color: row.look[0], thickness: 1, width: 2 },
    });
  });
  const costs = known.map((number) => DATA.rows[number].cost[what]);
  const largest = Math.max(...costs, 1);
  const kind = what === "parameters" ? { range: [-0.03 * largest, 1.05 * largest] } : logAxis(costs);
  draw(
    "cost",
    traces,
    { xaxis: { title: { text: COSTS[what] }, ...kind }, yaxis: { title: { text: "Acc., %" } } },
    "No row here reports its cost.",
    numbers.length,
  );
}

find("#chips").addEventListener("input", (event) => {
  if (event.target.checked) muted.delete(event.target.value);
  else muted.add(event.target.value);
  drawPlots(board(), filter(board()));
});
for (const pick of all("#seeds select, #cost select")) pick.addEventListener("input", update);
start();
