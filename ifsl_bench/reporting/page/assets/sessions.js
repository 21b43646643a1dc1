"use strict";
// Tasks in sessions: curves of accuracy, what is forgotten of each session's classes, and what rows depend on.

function drawSessions(numbers) {
  const traces = numbers.flatMap((number) => {
    const row = DATA.rows[number];
    const [means, low, high] = row.after;
    const sessions = means.map((_, t) => t);
    const line = row.origin
      ? { color: row.look[0], dash: row.look[2], width: 1.8 }
      : { color: colour("--soft"), dash: row.source === "computed" ? "dot" : "dash", width: 1 };
    const band = low && {
      type: "scatter",
      mode: "lines",
      x: [...sessions, ...sessions.toReversed()],
      y: [...high, ...low.toReversed()],
      fill: "toself",
      line: { width: 0 },
      fillcolor: row.look[0] + "33",
      hoverinfo: "skip",
    };
    const said = (mean, t) =>
      `${label(row.name)}<br>after session ${t}: ${mean.toFixed(2)}` +
      (low ? `<br>95% of the orders: ${low[t].toFixed(2)} to ${high[t].toFixed(2)}` : "");
    const curve = trace(number, "", {
      x: sessions,
      y: means,
      mode: row.origin ? "lines+markers" : "lines",
      hovertext: means.map(said),
      line,
      marker: marker(row, { size: 6 }),
    });
    return band ? [band, curve] : [curve];
  });
  draw(
    "sessions",
    traces,
    { xaxis: { title: { text: "session" }, dtick: 1 }, yaxis: { title: { text: "Acc. over all classes so far, %" } } },
    "No row here is in sessions.",
    numbers.length,
  );
}

/** The triangle of one row: a line for each session, with the accuracy on the classes of each session so far. */
function drawForgetting(numbers) {
  const pick = find("#forgetting select");
  const known = numbers.filter((number) => DATA.rows[number].triangle);
  const chosen = known.includes(Number(pick.value)) ? Number(pick.value) : known[0];
  pick.replaceChildren(
    ...known.map((number) => el("option", { value: number, selected: number === chosen }, DATA.rows[number].name)),
  );
  pick.parentNode.hidden = !known.length;
  const table = find("#forgetting table");
  if (!known.length) {
    table.replaceChildren(el("caption", {}, "No rows are switched on."));
    return;
  }
  const { name, triangle } = DATA.rows[chosen];
  const most = Math.max(...known.flatMap((number) => DATA.rows[number].triangle.flat()), 1); // one scale for all rows
  const cell = (value, t, session) => {
    const said = `${name}: ${value.toFixed(1)}% after session ${t} on the classes of session ${session}`;
    const made = el("td", { title: said }, value.toFixed(narrow() ? 0 : 1));
    made.style.background = `rgba(var(--rise), ${((0.6 * value) / most).toFixed(2)})`;
    return made;
  };
  const sessions = triangle.map((_, t) => el("th", { scope: "col" }, String(t)));
  table.replaceChildren(
    el(
      "thead",
      {},
      el("tr", {}, el("td"), el("td", { colspan: triangle.length }, "classes of session")),
      el("tr", {}, el("th", { scope: "col" }, "after"), ...sessions),
    ),
    el(
      "tbody",
      {},
      ...triangle.map((line, t) =>
        el("tr", {}, el("th", { scope: "row" }, String(t)), ...line.map((value, session) => cell(value, t, session))),
      ),
    ),
  );
}

const PARTS = {
  order: "#0072B2",
  support: "#E69F00",
  seed: "#009E73",
  "seed by order": "#D55E00",
  rest: "#CC79A7",
};

/** Bars of what a single average owes to each part, as shares of its variance. */
function drawVariance(numbers) {
  const known = numbers.filter((number) => DATA.rows[number].variance);
  const there = Object.keys(PARTS).filter((part) => known.some((number) => part in DATA.rows[number].variance));
  const first = (part) => known.findIndex((number) => part in DATA.rows[number].variance); // it has the legend
  const traces = known.flatMap((number, i) => {
    const { variance } = DATA.rows[number];
    const own = there.filter((part) => part in variance);
    const total = own.reduce((sum, part) => sum + variance[part], 0) || 1;
    return own.map((part) => {
      const share = (100 * variance[part]) / total;
      const said = `${part}: ${share.toFixed(0)}% of the variance<br>sd ${Math.sqrt(variance[part]).toFixed(2)} points`;
      return trace(number, said, {
        type: "bar",
        orientation: "h",
        x: [share],
        y: [i],
        name: part,
        legendgroup: part,
        showlegend: first(part) === i,
        marker: { color: PARTS[part], line: { width: 0 } },
      });
    });
  });
  draw(
    "variance",
    traces,
    {
      barmode: "stack",
      bargap: 0.35,
      height: 150 + 26 * Math.max(known.length, 3),
      margin: { l: 20, r: 66, t: 56, b: 42 },
      showlegend: true,
      legend: { orientation: "h", x: 0, y: 1, yanchor: "bottom", itemclick: false, itemdoubleclick: false },
      xaxis: { title: { text: "share of the variance of one Avg., %" }, range: [0, 100] },
      yaxis: {
        range: [known.length - 0.4, -0.6],
        tickvals: known.map((_, i) => i),
        showgrid: false,
        ticktext: known.map((number) => label(short(DATA.rows[number].name))),
      },
      annotations: known.map((number, i) => ({
        x: 100,
        y: i,
        xanchor: "left",
        xshift: 4,
        showarrow: false,
        text: "sd " + Math.sqrt(DATA.rows[number].variance.one).toFixed(2),
        font: { size: 11, color: colour("--soft") },
      })),
    },
    "No row here is of several orders of the classes.",
    numbers.length,
  );
}

find("#forgetting select").addEventListener("input", update);
