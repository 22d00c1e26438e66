// Draws the figures of a page, described in figures.py, from the JSON block `data`.
//
// The page's texts come from traces and servers, so they enter the document only as text. Colours
// are variables of the style sheet and are read again when the page changes between light, dark
// and print.
"use strict";

const goodputPage = (() => {
  const HEIGHT = 210;
  const CLOCK_STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800,
    86400, 172800, 604800];
  const MAJOR_SHARES = [0, 0.5, 0.9, 0.99, 0.999, 0.9999, 0.99999, 0.999999];
  const MINOR_SHARES = [0.25, 0.75, 0.95, 0.98, 0.995, 0.998, 0.9995, 0.9998];
  const CHARACTER_PX = 7;

  const root = document.documentElement;
  const charts = new Map(); // name of a figure → its chart
  const hiddenGroups = new Set();
  const zooms = new Map(); // axis → [from, to]
  let groups = [];

  // --- numbers as text --------------------------------------------------------------------

  function clock(seconds) {
    const whole = Math.round(seconds);
    const parts = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
    const shown = parts[0] ? parts : parts.slice(1);
    return shown.map((part, index) => (index ? String(part).padStart(2, "0") : part)).join(":");
  }

  function timeOfDay(seconds) {
    return new Date(seconds * 1000).toLocaleTimeString("en-GB");
  }

  // Truncated, so that a missed objective never looks met.
  function percent(share) {
    return `${(Math.floor(Math.round(share * 1e6) / 100) / 100).toFixed(2)}%`;
  }

  function plain(value) {
    return Number(value.toPrecision(4)).toLocaleString("en");
  }

  const FORMATS = {
    share: percent,
    percent,
    rate: (value) => `${plain(value)}/s`,
    count: plain,
    number: plain,
    ms: (value) => (value < 10000 ? `${plain(value)} ms` : `${plain(value / 1000)} s`),
  };
  const TICKS = {
    share: (value) => `${Number((value * 100).toPrecision(6))}%`,
    percent: (value) => `${Number((value * 100).toPrecision(6))}%`,
    rate: plain,
    count: plain,
    number: (value) => value.toLocaleString("en", { notation: "compact" }),
    ms: (value) => (value < 1000 ? `${plain(value)} ms` : `${plain(value / 1000)} s`),
  };

  // p97.5, p99.75: one more digit for each nine.
  function percentile(place) {
    return `p${Number(((1 - 10 ** -place) * 100).toFixed(Math.floor(place + 1e-6)))}`;
  }

  // --- scales -----------------------------------------------------------------------------

  function percentileTicks(plot, axis, from, to) {
    const kept = [];
    for (const share of [...MAJOR_SHARES, ...MINOR_SHARES]) {
      const place = -Math.log10(1 - share);
      const px = plot.valToPos(place, "x");
      const width = (other) => (CHARACTER_PX / 2) * (percentile(place) + percentile(other)).length;
      const free = kept.every(
        (other) => Math.abs(plot.valToPos(other, "x") - px) >= width(other) + CHARACTER_PX,
      );
      if (place >= from - 1e-9 && place <= to + 1e-9 && free) kept.push(place);
    }
    return kept.sort((a, b) => a - b);
  }

  function logTicks(plot, axis, from, to) {
    const decades = Math.log10(to / from);
    const steps = decades > 3.5 ? [1] : decades > 1.2 ? [1, 2, 5] : [1, 1.5, 2, 3, 4, 5, 6, 8];
    const ticks = [];
    for (let power = Math.floor(Math.log10(from)); power <= Math.ceil(Math.log10(to)); power += 1) {
      for (const step of steps) {
        const tick = step * 10 ** power;
        if (tick >= from && tick <= to) ticks.push(tick);
      }
    }
    return ticks;
  }

  // The vertical range holds the visible values, and the marks unless the user has zoomed in.
  function verticalRange(chart) {
    return (plot, low, high) => {
      const marks = chart.marks().map((mark) => mark.value);
      const values = [low, high, ...marks].filter((value) => value !== null && Number.isFinite(value));
      const { lowest: cut } = chart.figure;
      const lowest = Math.max(Math.min(...values), cut === null ? -Infinity : Math.min(cut, ...marks));
      const highest = Math.max(...values);
      switch (chart.figure.unit) {
        case "share": {
          const missing = Math.max(1 - (values.length ? lowest : 0), 0.002);
          return [Math.max(1 - missing * 1.06, -0.03), 1 + missing * 0.04];
        }
        case "ms":
          return values.length ? [lowest / 1.4, highest * 1.6] : [1, 10];
        default:
          return [0, values.length && highest > 0 ? highest * 1.08 : 1];
      }
    };
  }

  // --- one chart --------------------------------------------------------------------------

  class Chart {
    constructor(figure, element) {
      this.figure = figure;
      this.element = element;
      this.hidden = new Set(); // labels of series that are switched off here
      this.plot = null;
      this.keys = child(element.querySelector("figcaption"), "div", "keys");
      this.box = child(element, "div", "chart");
      this.box.setAttribute("role", "img");
      this.box.setAttribute("aria-label", `Chart: ${figure.title}`);
      this.width = 0;
      new ResizeObserver(() => this.resize()).observe(this.box);
    }

    shows(one) {
      return !(one.group !== null && hiddenGroups.has(one.group)) && !this.hidden.has(one.label);
    }

    marks() {
      return this.figure.marks.filter((mark) => !(mark.group !== null && hiddenGroups.has(mark.group)));
    }

    resize() {
      const width = Math.floor(this.box.clientWidth);
      if (width && width !== this.width) this.draw();
    }

    draw() {
      const { figure } = this;
      const filled = figure.series.some((one) => one.values.some((value) => value !== null));
      const note = this.element.querySelector(".none");
      if (note) {
        note.hidden = filled;
        note.textContent = figure.when_empty;
      }
      this.box.hidden = !filled;
      this.keys.hidden = !filled;
      if (this.plot) this.plot.destroy();
      this.plot = null;
      this.drawKeys();
      this.width = Math.floor(this.box.clientWidth);
      if (!filled || !this.width) return;
      const { data, series, bands } = this.layers();
      this.plot = new uPlot(this.options(series, bands), data, this.box);
      const zoom = zooms.get(figure.axis);
      if (zoom) this.plot.setScale("x", { min: zoom[0], max: zoom[1] });
    }

    // Replace the values of the same lines, so that the cursor and its values stay.
    update(figure) {
      const shape = (one) => JSON.stringify(one.series.map((line) => [line.label, line.lower.length > 0]));
      const same = this.plot && shape(figure) === shape(this.figure);
      this.figure = figure;
      if (!same) {
        this.draw();
        return;
      }
      this.plot.setData(this.layers().data);
      this.moveTip(this.plot);
    }

    // Return what uPlot draws: a series for each line, for each top of a stack, and two for a band.
    layers() {
      const { figure } = this;
      const data = [figure.x];
      const series = [{}];
      const bands = [];
      const shown = [];
      let below = null; // values and index of the stacked series under the next one
      for (const one of figure.series) {
        if (!this.shows(one)) continue;
        const colour = read(one.colour);
        if (one.lower.length) {
          for (const bound of [one.upper, one.lower]) {
            series.push({ stroke: fade(colour, 0.35), width: 1, points: { show: false } });
            data.push(bound);
          }
          bands.push({ series: [data.length - 2, data.length - 1], fill: fade(colour, 0.14) });
        }
        let values = one.values;
        const stacked = one.draw === "stack";
        if (one.draw === "step") values = hold(values);
        if (stacked && below) values = values.map((value, at) => sum(value, below.values[at]));
        series.push({
          stroke: colour,
          width: one.dotted || stacked ? 1 : 1.75,
          dash: one.dotted ? [2, 3] : undefined,
          fill: stacked ? fade(colour, 0.5) : undefined,
          paths: one.draw === "line" ? undefined : uPlot.paths.stepped({ align: 1 }),
          points: { show: false },
        });
        data.push(values);
        if (stacked) {
          const index = data.length - 1;
          if (below) bands.push({ series: [index, below.index], fill: fade(colour, 0.5) });
          below = { values, index };
        }
        shown.push(one);
      }
      this.shown = shown;
      return { data, series, bands };
    }

    options(series, bands) {
      const { figure } = this;
      const percentiles = figure.axis === "percentile";
      const atTime = figure.axis === "clock" ? timeOfDay : clock;
      const axis = {
        stroke: read("quiet"),
        font: "12px system-ui, sans-serif",
        grid: { stroke: read("line"), width: 1 },
        ticks: { stroke: read("line"), width: 1, size: 4 },
        gap: 4,
      };
      const bottom = { ...axis, size: 30 };
      const log = figure.unit === "ms";
      return {
        width: this.width,
        height: HEIGHT,
        padding: [10, 18, 0, 0],
        legend: { show: false },
        series,
        bands,
        scales: {
          x: { time: false, range: () => zooms.get(this.figure.axis) || this.ends() },
          y: { distr: log ? 3 : 1, range: verticalRange(this) },
        },
        axes: [
          !percentiles
            ? { ...bottom, incrs: CLOCK_STEPS, space: 70, values: (plot, ticks) => ticks.map(atTime) }
            : { ...bottom, splits: percentileTicks, values: (plot, ticks) => ticks.map(percentile) },
          {
            ...axis,
            size: 58,
            splits: log ? logTicks : undefined,
            filter: (plot, ticks) => ticks,
            incrs: figure.unit === "count" ? [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5] : undefined,
            values: (plot, ticks) => ticks.map(TICKS[figure.unit]),
          },
        ],
        cursor: {
          y: false,
          points: { size: 6 },
          dataIdx: (plot, at, closest, value) => this.findPlace(closest, value),
          drag: { x: true, y: false, setScale: false },
          sync: {
            key: figure.axis,
            scales: ["x", null],
            filters: { pub: (type) => type === "mousemove" || type === "mouseleave" },
          },
          bind: { dblclick: () => () => zoomTo(figure.axis, null) },
        },
        hooks: {
          init: [(plot) => this.addTip(plot)],
          draw: [(plot) => this.drawMarks(plot)],
          setCursor: [(plot) => this.moveTip(plot)],
          setSelect: [(plot) => this.select(plot)],
        },
      };
    }

    select(plot) {
      const { left, width } = plot.select;
      if (width < 4) return;
      plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
      zoomTo(this.figure.axis, [plot.posToVal(left, "x"), plot.posToVal(left + width, "x")]);
    }

    drawMarks(plot) {
      const { ctx, bbox } = plot;
      const ratio = uPlot.pxRatio;
      ctx.save();
      ctx.font = `${11 * ratio}px system-ui, sans-serif`;
      ctx.textBaseline = "bottom";
      const labels = []; // heights of the labels at the right end
      for (const mark of this.marks()) {
        const y = Math.round(plot.valToPos(mark.value, "y", true));
        if (y < bbox.top - 1 || y > bbox.top + bbox.height + 1) continue;
        const colour = read(mark.colour);
        ctx.strokeStyle = colour;
        ctx.fillStyle = colour;
        ctx.lineWidth = 1.25 * ratio;
        ctx.setLineDash([5 * ratio, 4 * ratio]);
        ctx.beginPath();
        ctx.moveTo(bbox.left, y);
        ctx.lineTo(bbox.left + bbox.width, y);
        ctx.stroke();
        const free = labels.every((other) => Math.abs(other - y) > 13 * ratio);
        if (free) labels.push(y);
        ctx.textAlign = free ? "right" : "left";
        const x = free ? bbox.left + bbox.width - 4 * ratio : bbox.left + 4 * ratio;
        ctx.fillText(mark.label, x, y - 2 * ratio);
      }
      ctx.restore();
    }

    // --- values under the cursor ----------------------------------------------------------

    addTip(plot) {
      this.tip = child(plot.over, "div", "tip");
      this.tip.hidden = true;
    }

    moveTip(plot) {
      const { idx: closest, left } = plot.cursor;
      if (typeof closest !== "number" || left < 0 || !plot.over.matches(":hover")) {
        this.tip.hidden = true;
        return;
      }
      const idx = this.findPlace(closest, plot.posToVal(left, "x"));
      this.tip.replaceChildren();
      child(this.tip, "b", "", this.describePlace(idx));
      for (const one of this.shown) {
        const value = one.values[idx];
        if (value === null || value === undefined) continue;
        const row = child(this.tip, "div");
        child(row, "i", `key ${one.colour}`);
        child(row, "span", "", one.label);
        child(row, "span", "value", this.describe(one, idx, value));
      }
      this.tip.hidden = false;
      const right = left > plot.over.clientWidth / 2;
      this.tip.classList.toggle("left", right);
      this.tip.style.left = right ? "" : `${left + 12}px`;
      this.tip.style.right = right ? `${plot.over.clientWidth - left + 12}px` : "";
    }

    ends() {
      const { x, end } = this.figure;
      return [x[0], end === null ? x[x.length - 1] : end];
    }

    // A step holds from its place to the next one.
    get holds() {
      return this.figure.series.some((one) => one.draw !== "line");
    }

    findPlace(closest, value) {
      const { x } = this.figure;
      const before = this.holds && closest > 0 && (x[closest] > value || closest === x.length - 1);
      return before ? closest - 1 : closest;
    }

    describePlace(index) {
      const { axis, x } = this.figure;
      if (axis === "percentile") return percentile(x[index]);
      const atTime = axis === "clock" ? timeOfDay : clock;
      const end = this.holds ? x[index + 1] : undefined;
      return end === undefined ? atTime(x[index]) : `${atTime(x[index])} – ${atTime(end)}`;
    }

    describe(one, index, value) {
      const format = FORMATS[this.figure.unit];
      if (!one.lower.length || one.lower[index] === null) return format(value);
      return `${format(value)} (${format(one.lower[index])} – ${format(one.upper[index])})`;
    }

    // --- legend ---------------------------------------------------------------------------

    drawKeys() {
      this.keys.replaceChildren();
      for (const one of this.figure.series) {
        if (one.dotted) continue;
        const key = child(this.keys, "button", "");
        key.type = "button";
        key.setAttribute("aria-pressed", String(this.shows(one)));
        child(key, "i", `key ${one.colour} ${one.draw === "stack" ? "area" : ""}`);
        child(key, "span", "", one.label);
        key.addEventListener("click", () => {
          for (const same of this.figure.series) {
            const together = same.label === one.label || (one.group !== null && same.group === one.group);
            if (together) toggle(this.hidden, same.label);
          }
          this.draw();
        });
      }
    }
  }

  // --- the page ---------------------------------------------------------------------------

  function child(parent, tag, classes = "", text = null) {
    const element = document.createElement(tag);
    if (classes) element.className = classes;
    if (text !== null) element.textContent = text;
    parent.append(element);
    return element;
  }

  function toggle(set, member) {
    if (!set.delete(member)) set.add(member);
  }

  function sum(a, b) {
    return a === null && b === null ? null : (a || 0) + (b || 0);
  }

  // A step ends where a gap begins, so that a value between two gaps is visible.
  function hold(values) {
    return values.map((value, at) => (value === null && at > 0 ? values[at - 1] : value));
  }

  function read(name) {
    return getComputedStyle(root).getPropertyValue(`--${name}`).trim();
  }

  function fade(colour, alpha) {
    return colour + Math.round(alpha * 255).toString(16).padStart(2, "0");
  }

  function redraw() {
    for (const chart of charts.values()) chart.draw();
  }

  function zoomTo(axis, range) {
    if (range) zooms.set(axis, range);
    else zooms.delete(axis);
    for (const chart of charts.values()) {
      if (chart.figure.axis === axis && chart.plot) {
        const [from, to] = range || chart.ends();
        chart.plot.setScale("x", { min: from, max: to });
      }
    }
    drawSwitches();
  }

  function drawSwitches() {
    const bar = document.getElementById("switches");
    if (!bar) return;
    const focused = [...bar.children].indexOf(document.activeElement);
    bar.replaceChildren();
    if (groups.length > 1) {
      groups.forEach((name, index) => {
        const button = child(bar, "button", "switch");
        button.type = "button";
        button.setAttribute("aria-pressed", String(!hiddenGroups.has(index)));
        child(button, "i", `key c${index % 8}`);
        child(button, "span", "", name);
        button.addEventListener("click", () => {
          toggle(hiddenGroups, index);
          redraw();
          drawSwitches();
        });
      });
    }
    if (zooms.size) {
      const button = child(bar, "button", "switch reset", "Reset zoom");
      button.type = "button";
      button.addEventListener("click", () => {
        for (const axis of [...zooms.keys()]) zoomTo(axis, null);
      });
    } else {
      child(bar, "span", "quiet hint", "Drag across a chart to zoom in; double-click to zoom out.");
    }
    if (focused >= 0 && bar.children[focused]) bar.children[focused].focus();
  }

  // Draw the figures of `data`; those that are on the page already keep their zoom and switches.
  function show(data) {
    const renamed = JSON.stringify(groups) !== JSON.stringify(data.groups);
    groups = data.groups;
    for (const figure of data.figures) {
      const element = document.getElementById(figure.name);
      if (!element) continue;
      if (!charts.has(figure.name)) charts.set(figure.name, new Chart(figure, element));
      charts.get(figure.name).update(figure);
    }
    if (renamed || !data.groups.length) drawSwitches();
  }

  root.classList.add("scripted");
  show(JSON.parse(document.getElementById("data").textContent));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  addEventListener("beforeprint", () => {
    root.classList.add("printed");
    redraw();
  });
  addEventListener("afterprint", () => {
    root.classList.remove("printed");
    redraw();
  });
  return { show };
})();
