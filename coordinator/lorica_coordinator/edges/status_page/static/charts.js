// Draws the curves: of the present plan, of others beside it, and all plans' scores on one axis where they count the same.
// It only reads: /curves has what every plan's silos came to together, /curves/PLAN what single silos brought, if the plan shows that.
"use strict";

const Charts = (() => {
  const FEW = 10; // names that a legend has room for
  const STYLES = 8;
  const DASHES = [[], [7, 3], [2, 2], [9, 3, 2, 3], [5, 5], [12, 3], [1, 3], [4, 1]];
  const NARROW = 480; // CSS pixels
  const place = () => document.getElementById("curves");
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const sync = uPlot.sync("rounds");
  const shown = new Set(); // digests of plans whose panels are open
  const hidden = new Set(); // names of series that a person switched off
  const ofSilos = new Map(); // digest to what /curves/DIGEST said
  let plans = [], drawn = [], last = 0, marked = "", version = "", chosen = false;

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const percent = (value) => (100 * value).toFixed(1) + "%";
  const figure = (value) => Number(value.toPrecision(4)).toString();

  function make(tag, className, text) {
    const element = document.createElement(tag);
    if (className) element.className = className;
    if (text !== undefined) element.textContent = text;
    return element;
  }

  function button(text, pressed, act) {
    const one = make("button", "switch", text);
    one.type = "button";
    one.setAttribute("aria-pressed", String(pressed));
    one.addEventListener("click", act);
    return one;
  }

  async function ask(path) {
    const reply = await fetch(path, { cache: "no-store", signal: AbortSignal.timeout(20000) });
    if (!reply.ok) throw new Error(path + ": " + reply.status);
    return reply.json();
  }

  // --- from what was told to what is drawn

  function lineCharts(plan) {
    const score = (plan.score || "Score") + " on held-out questions";
    const rounds = plan.points.map((point) => point[0]);
    const means = [
      { name: "MacroAvg", mean: 0, values: plan.points.map((point) => point[1]) },
      { name: "MicroAvg", mean: 1, values: plan.points.map((point) => point[2]) },
    ];
    const charts = [{ name: "score", title: score, better: plan.better, percent: true, rounds, series: means }];
    const sums = plan.points.map((point) => point[3]);
    charts.push({ name: "weight-sum", title: "Sum of the masked weights", better: "", rounds, series: [{ name: "sum of weights", mean: 0, values: sums }] });
    const told = plan.silos ? ofSilos.get(plan.digest) : null;
    if (!told) return toldOf(charts);
    const of = told.rounds.map((round) => round[0]);
    const order = told.silos.map((name, column) => ({ name, column })).sort((a, b) => (a.name < b.name ? -1 : 1));
    told.measures.forEach((measure, at) => {
      const series = order.map(({ name, column }, style) => ({
        name, style: style % STYLES, values: told.rounds.map((round) => round[1 + at][column] ?? null),
      }));
      if (measure.name === "score") Object.assign(charts[0], { rounds: of, series: [...series, ...aligned(means, rounds, of)] });
      else charts.push({ name: measure.name, title: measure.title, better: measure.better, percent: measure.name === "share", rounds: of, series });
    });
    return toldOf(charts);
  }

  const toldOf = (charts) => charts
    .map((chart) => ({ ...chart, series: chart.series.filter((one) => one.values.some((value) => value !== null)) }))
    .filter((chart) => chart.series.length)
    .map((chart) => ({ ...chart, series: chart.series.sort((one, other) => (one.name === marked) - (other.name === marked)) }));

  function aligned(series, from, to) {
    const at = new Map(from.map((round, index) => [round, index]));
    return series.map((one) => ({ ...one, values: to.map((round) => (at.has(round) ? one.values[at.get(round)] : null)) }));
  }

  function comparisons() {
    // One chart for each score: what counts otherwise stands on no common axis.
    const groups = new Map();
    for (const plan of plans) {
      if (!plan.points.some((point) => point[2] !== null)) continue;
      groups.set(plan.score, [...(groups.get(plan.score) || []), plan]);
    }
    return [...groups].filter(([, same]) => same.length > 1).map(([score, same]) => {
      const rounds = [...new Set(same.flatMap((plan) => plan.points.map((point) => point[0])))].sort((a, b) => a - b);
      const series = same.map((plan, style) => {
        const values = new Map(plan.points.map((point) => [point[0], point[2]]));
        return { name: label(plan), style: style % STYLES, strong: plan.present, values: rounds.map((round) => values.get(round) ?? null) };
      });
      return { name: "compare", title: `${score}, MicroAvg of ${same.length} plans`, better: same[0].better, percent: true, rounds, series };
    });
  }

  function onOneScale(charts) {
    // What stands side by side is compared by eye: the same figure has the same height in each.
    const ends = new Map();
    for (const { name, title, series } of charts) {
      let [low, high] = ends.get(name + title) || [Infinity, -Infinity];
      for (const one of series) for (const value of one.values) if (value !== null) (low = Math.min(low, value)), (high = Math.max(high, value));
      ends.set(name + title, [low, high]);
    }
    for (const chart of charts) chart.common = ends.get(chart.name + chart.title);
  }

  const label = (plan) => `${plan.name} ${plan.digest.slice(0, 8)}`;

  // --- one chart

  function figureOf(chart) {
    const box = make("figure", "chart");
    box.dataset.chart = chart.name;
    const better = chart.better ? `, ${chart.better} is better` : "";
    box.append(make("figcaption", "", chart.title), make("p", "note", chart.better ? chart.better + " is better" : "\u00a0"));
    const canvas = make("div", "canvas");
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", `${chart.title}, rounds ${chart.rounds[0]} to ${chart.rounds.at(-1)}${better}: ${newest(chart)}`);
    const tip = make("div", "tip");
    tip.hidden = true;
    box.append(canvas, legend(chart, () => redraw()));
    let plot = null;
    const redraw = () => {
      if (plot) chart.series.forEach((one, index) => plot.setSeries(index + 1, { show: !hidden.has(one.name) }));
    };
    return {
      box,
      chart,
      draw() {
        plot = new uPlot(options(chart, canvas, tip), [chart.rounds, ...chart.series.map((one) => one.values)], canvas);
        plot.over.append(tip);
        range(plot, chart.rounds);
        return { plot, chart, canvas };
      },
    };
  }

  // Means are drawn last, above the silos, and named first.
  const inOrder = (series) => [...series.filter((one) => one.mean !== undefined), ...series.filter((one) => one.mean === undefined)];

  function newest(chart) {
    const words = chart.percent ? percent : figure;
    const told = inOrder(chart.series).slice(0, FEW).map((one) => {
      const value = one.values.findLast((found) => found !== null);
      return value === undefined ? "" : `${one.name} ${words(value)}`;
    });
    return told.filter(Boolean).join(", ");
  }

  function stroke(one, many) {
    if (one.mean !== undefined) return colour(`--s${8 + one.mean}`);
    if (!many) return colour(`--s${one.style}`);
    // Nobody tells a hundred colours apart: a faint band, the means through it, and the one that a person marked.
    return one.name === marked ? colour("--s1") : colour("--s0") + (marked ? "30" : "60");
  }

  function options(chart, canvas, tip) {
    const words = chart.percent ? percent : figure;
    const many = chart.series.length > FEW + 2;
    const axis = { stroke: colour("--soft"), grid: { stroke: colour("--edge"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
    return {
      width: Math.max(240, canvas.clientWidth),
      height: canvas.clientWidth < NARROW ? 200 : 240,
      legend: { show: false },
      focus: { alpha: many ? 0.15 : 0.35 },
      cursor: { sync: { key: sync.key, setSeries: false, scales: ["x", null] }, focus: { prox: 24 }, drag: { x: true, y: false, dist: 8 }, points: { size: 7 } },
      scales: { x: { time: false }, y: { range: (_, low, high) => (chart.common ? bounds(...chart.common) : bounds(low, high)) } },
      axes: [
        { ...axis, size: 28, incrs: [1, 2, 5, 10, 20, 25, 50, 100, 200, 250, 500, 1000, 2000, 5000, 10000], values: (_, ticks) => ticks.map((at) => (Number.isInteger(at) ? String(at) : "")) },
        { ...axis, size: 58, values: (_, ticks) => ticks.map((at) => (chart.percent ? Number((100 * at).toPrecision(6)) + "%" : figure(at))) },
      ],
      series: [
        { label: "round" },
        ...chart.series.map((one) => ({
          label: one.name,
          show: !hidden.has(one.name),
          stroke: () => stroke(one, many),
          width: one.mean === 0 || one.strong || (many && one.name === marked) ? 3 : one.mean === 1 ? 2 : many ? 1 : 2,
          dash: one.mean === 1 ? [4, 4] : one.mean === undefined && !many ? DASHES[one.style] : [],
          points: { show: chart.rounds.length <= 40 && !many, size: 5 },
          spanGaps: true,
        })),
      ],
      hooks: {
        setScale: [(plot, key) => { if (key === "x") canvas.dataset.rounds = `${Math.ceil(plot.scales.x.min)} to ${Math.floor(plot.scales.x.max)}`; }],
        setCursor: [(plot) => hover(plot, chart, tip, words)], setSeries: [(plot) => hover(plot, chart, tip, words)],
      },
    };
  }

  function bounds(low, high) {
    if (low === null || high === null) return [0, 1];
    const room = (high - low || Math.abs(high) || 1) * 0.06;
    return [low >= 0 && low - room < 0 ? 0 : low - room, high + room];
  }

  function hover(plot, chart, tip, words) {
    const { idx, left } = plot.cursor;
    if (idx === null || idx === undefined || left < 0) {
      tip.hidden = true;
      return;
    }
    const focused = plot.series.findIndex((one, index) => index > 0 && one._focus === true && one.show);
    const few = chart.series.length <= FEW + 2;
    const lines = chart.series
      .map((one, index) => ({ one, index, value: one.values[idx] }))
      .sort((a, b) => (a.one.mean === undefined) - (b.one.mean === undefined))
      .filter(({ one, index, value }) => value !== null && plot.series[index + 1].show && (index + 1 === focused || few || one.mean !== undefined || one.name === marked))
      .slice(0, FEW + 2)
      .map(({ one, index, value }) => {
        const row = make("div", index + 1 === focused ? "focused" : "", `${one.name}: ${words(value)}`);
        row.style.borderLeftColor = stroke(one, !few);
        return row;
      });
    tip.replaceChildren(make("strong", "", `round ${chart.rounds[idx]}`), ...lines);
    tip.hidden = false;
    const right = left > plot.over.clientWidth / 2;
    tip.style.left = right ? "" : `${left + 12}px`;
    tip.style.right = right ? `${plot.over.clientWidth - left + 12}px` : "";
  }

  function legend(chart, redraw) {
    if (chart.series.length > FEW + 2) {
      const choose = make("select", "choose");
      choose.setAttribute("aria-label", `${chart.title}: mark a silo`);
      choose.append(new Option(`${chart.series.filter((one) => one.mean === undefined).length} silos: mark one`, ""));
      for (const one of chart.series) if (one.mean === undefined) choose.append(new Option(one.name, one.name, false, one.name === marked));
      choose.addEventListener("change", () => {
        marked = choose.value;
        render();
        document.querySelector(`figure[data-chart="${chart.name}"] .choose`)?.focus({ preventScroll: true });
      });
      return choose;
    }
    const list = make("div", "legend");
    for (const one of inOrder(chart.series)) {
      const toggle = button(one.name, !hidden.has(one.name), () => {
        hidden.has(one.name) ? hidden.delete(one.name) : hidden.add(one.name);
        toggle.setAttribute("aria-pressed", String(!hidden.has(one.name)));
        redraw();
      });
      toggle.className = "key";
      toggle.style.setProperty("--of-key", `var(--s${one.mean === undefined ? one.style : 8 + one.mean})`);
      list.append(toggle);
    }
    return list;
  }

  function range(plot, rounds) {
    const first = rounds[0], end = rounds.at(-1);
    const from = last ? Math.max(first, end - last + 1) : first;
    plot.setScale("x", from === end ? { min: from - 1, max: end + 1 } : { min: from, max: end });
  }

  // --- all of them

  function tools() {
    const bar = make("div", "tools");
    const ranges = make("div", "switches");
    ranges.setAttribute("role", "group");
    ranges.setAttribute("aria-label", "Rounds that are shown");
    for (const [text, count] of [["all rounds", 0], ["last 50", 50], ["last 10", 10]]) {
      ranges.append(button(text, last === count, () => {
        last = count;
        drawn.forEach(({ plot, chart }) => range(plot, chart.rounds));
        [...ranges.children].forEach((one) => one.setAttribute("aria-pressed", String(one.textContent === text)));
      }));
    }
    bar.append(ranges);
    if (plans.length > 1) {
      const which = make("div", "switches");
      which.setAttribute("role", "group");
      which.setAttribute("aria-label", "Plans side by side");
      for (const plan of [...plans].reverse()) {
        which.append(button(label(plan), shown.has(plan.digest), async () => {
          chosen = true;
          shown.has(plan.digest) ? shown.delete(plan.digest) : shown.add(plan.digest);
          await fetchSilos();
          render();
        }));
      }
      bar.append(which);
    }
    return bar;
  }

  function render() {
    const section = place();
    if (!section) return;
    const at = document.activeElement && section.contains(document.activeElement) ? document.activeElement.textContent : null;
    drawn.forEach(({ plot, canvas }) => { sizes.unobserve(canvas); plot.destroy(); });
    const body = make("div", "curves-body");
    const figures = [];
    const add = (into, charts) => charts.forEach((chart) => { const one = figureOf(chart); figures.push(one); into.append(one.box); });
    body.append(make("p", "note", "Point at a chart for its figures; drag over rounds to come closer, double-click for all of them."), tools());
    const compared = comparisons();
    if (compared.length) {
      const over = make("div", "compared");
      add(over, compared);
      body.append(over);
    }
    const open = plans.filter((plan) => shown.has(plan.digest)).reverse();
    const ofPlans = new Map(open.map((plan) => [plan, lineCharts(plan)]));
    if (open.length > 1) onOneScale([...ofPlans.values()].flat());
    const panels = make("div", open.length > 1 ? "panels several" : "panels");
    for (const plan of open) {
      const panel = make("div", "panel");
      panel.dataset.plan = plan.digest;
      const charts = ofPlans.get(plan);
      const what = plan.silos ? "" : "; sums and means alone";
      panel.append(make("h3", "", `${label(plan)}${plan.present ? ", present" : ""}${what}`));
      const grid = make("div", "charts");
      if (charts.length) add(grid, charts);
      else grid.append(make("p", "note", "No round has figures yet."));
      panel.append(grid);
      panels.append(panel);
    }
    body.append(panels);
    section.querySelector(".curves-body")?.remove();
    section.append(body);
    drawn = figures.map((one) => one.draw());
    drawn.forEach(({ canvas }) => sizes.observe(canvas));
    if (at) [...section.querySelectorAll("button")].find((one) => one.textContent === at)?.focus({ preventScroll: true });
    section.dataset.drawn = version;
  }

  const sizes = new ResizeObserver((entries) => {
    for (const { target, contentRect } of entries) {
      const found = drawn.find(({ canvas }) => canvas === target);
      if (found && Math.abs(found.plot.width - contentRect.width) > 1 && contentRect.width > 100) {
        found.plot.setSize({ width: contentRect.width, height: contentRect.width < NARROW ? 200 : 240 });
      }
    }
  });

  async function fetchSilos(again) {
    for (const plan of plans) {
      if (!plan.silos || !shown.has(plan.digest) || (ofSilos.has(plan.digest) && !(again && plan.present))) continue;
      ofSilos.set(plan.digest, await ask("/curves/" + plan.digest));
    }
  }

  // Called with what the page says the curves' version is; does nothing where they are drawn already.
  async function refresh(wanted) {
    if (wanted === version) return;
    plans = (await ask("/curves")).plans;
    const present = plans.find((plan) => plan.present);
    if (!chosen) {
      shown.clear();
      if (present) shown.add(present.digest);
    }
    for (const digest of [...ofSilos.keys()]) if (!plans.some((plan) => plan.digest === digest)) ofSilos.delete(digest);
    await fetchSilos(true);
    version = wanted;
    render();
  }

  dark.addEventListener("change", render);
  return { refresh };
})();
