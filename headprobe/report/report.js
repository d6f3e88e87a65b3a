"use strict";
(() => {
  const byId = (id) => document.getElementById(id);
  const data = JSON.parse(byId("data").textContent);
  const count = data.labels.length;

  // Strings given as children become text nodes: nothing from the data is ever read as HTML.
  const element = (tag, attributes = {}, ...children) => {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    node.append(...children);
    return node;
  };
  const shown = (value) => {
    if (typeof value !== "number") return value ?? "not measured";
    return Math.abs(value) >= 1000 ? value.toFixed(0) : String(Number(value.toPrecision(4)));
  };
  const unit = (entry) => (entry.unit ? ` ${entry.unit}` : "");
  const column = (name) => data.columns.find((entry) => entry.name === name);
  const options = (select, entries) =>
    select.append(...entries.map((entry) => element("option", { value: entry.name }, entry.title)));

  // ---- Colour: viridis, which keeps its order in grey and for colour-blind readers ----

  const STOPS = ["440154", "482475", "414487", "355f8d", "2a788e", "21918c", "22a884", "44bf70",
    "7ad151", "bddf26", "fde725"].map((hex) => [0, 2, 4].map((at) => parseInt(hex.slice(at, at + 2), 16)));

  const colour = (fraction) => {
    const place = Math.min(Math.max(fraction, 0), 1) * (STOPS.length - 1);
    const lower = Math.min(Math.floor(place), STOPS.length - 2);
    return STOPS[lower].map((from, i) => Math.round(from + (place - lower) * (STOPS[lower + 1][i] - from)));
  };
  const css = (rgb) => `rgb(${rgb.join(" ")})`;
  const RAMP = `linear-gradient(90deg, ${STOPS.map(css).join(", ")})`;

  const range = (numbers) => {
    let low = Infinity, high = -Infinity;
    for (const x of numbers) if (Number.isFinite(x)) { low = Math.min(low, x); high = Math.max(high, x); }
    return { low, high, fraction: (x) => (high > low ? (x - low) / (high - low) : 0.5) };
  };

  const drawScale = (place, entry, { low, high }, someMissing) => {
    const ramp = element("span", { class: "ramp", "aria-hidden": "true" });
    ramp.style.background = RAMP;
    place.replaceChildren(shown(low), ramp, `${shown(high)}${unit(entry)}`);
    if (someMissing) place.append(element("span", { class: "swatch", "aria-hidden": "true" }), "not measured");
  };

  // ---- The picked head: every view registers how it marks it ----

  const views = [];
  let picked = null;
  const pick = (position) => {
    picked = position;
    for (const mark of views) mark(position);
  };
  document.addEventListener("click", (event) => {
    const button = event.target.closest("[data-pick]");
    if (button) pick(Number(button.dataset.pick));
  });

  // ---- The map: a grid of layers and heads per kind of attention ----

  const cells = new Array(count);
  const rowsOf = data.grids.map(() => new Map()); // per grid: layer -> (head -> position)
  data.labels.forEach((_, i) => {
    const rows = rowsOf[data.grid[i]];
    if (!rows.has(data.layer[i])) rows.set(data.layer[i], new Map());
    rows.get(data.layer[i]).set(data.head[i], i);
  });

  const buildGrid = (rows, name) => {
    const heads = [...new Set([...rows.values()].flatMap((row) => [...row.keys()]))].sort((a, b) => a - b);
    const table = element("table", { class: "map", role: "grid", "aria-label": `Map of heads ${name}` });
    if (name) table.append(element("caption", {}, name));
    table.append(element("colgroup", {}, ...["", ...heads].map(() => element("col"))));
    // Wide enough for a finger, and yet the whole grid on one screen.
    table.style.maxWidth = `${68 + 44 * heads.length}px`;
    table.style.minWidth = `${68 + 13 * heads.length}px`;
    table.style.setProperty("--row", `${Math.max(12, Math.min(36, 560 / rows.size))}px`);
    const step = Math.ceil(heads.length / 24);
    table.append(element("thead", {}, element("tr", { role: "row" }, element("th", { scope: "col" }, "head"),
      ...heads.map((head, i) => element("th", { scope: "col" }, i % step ? "" : String(head))))));
    const body = element("tbody");
    for (const [layer, row] of rows) {
      const line = element("tr", { role: "row" }, element("th", { scope: "row" }, `layer ${layer}`));
      for (const head of heads) {
        const position = row.get(head);
        const cell = position === undefined ? element("td", { class: "absent" })
          : element("td", { role: "gridcell", tabindex: "-1", "aria-selected": "false", "data-cell": position });
        if (position !== undefined) cells[position] = cell;
        line.append(cell);
      }
      body.append(line);
    }
    table.append(body);
    const first = table.querySelector("[data-cell]");
    if (first) first.tabIndex = 0; // Tab enters a grid once; the arrows move inside it
    return element("div", { class: "wide" }, table);
  };

  const colourMap = () => {
    const entry = column(byId("statistic").value);
    const numbers = data.values[entry.name];
    const span = range(numbers);
    cells.forEach((cell, i) => {
      const value = numbers[i];
      cell.classList.toggle("missing", value === null);
      cell.style.background = value === null ? "" : css(colour(span.fraction(value)));
      cell.setAttribute("aria-label", `${data.labels[i]}: ${shown(value)}`);
    });
    drawScale(byId("map-scale"), entry, span, numbers.includes(null));
  };

  const focusCell = (cell) => {
    for (const other of cell.closest("table").querySelectorAll("[tabindex='0']")) other.tabIndex = -1;
    cell.tabIndex = 0;
    cell.focus();
  };
  const ARROWS = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };

  const buildMap = () => {
    const grids = byId("grids"), statistic = byId("statistic"), readout = byId("map-readout");
    options(statistic, data.columns.filter((entry) => entry.numeric));
    if (column("entropy_normalized")) statistic.value = "entropy_normalized";
    grids.append(...rowsOf.map((rows, i) => buildGrid(rows, data.grids[i])));
    let pointed = null;
    const read = (event) => {
      pointed = event?.target.closest("[data-cell]")?.dataset.cell ?? pointed;
      if (pointed === null) return;
      const entry = column(statistic.value), value = data.values[entry.name][pointed];
      const what = value === null ? "not measured" : `${shown(value)}${unit(entry)}`;
      readout.textContent = `${data.labels[pointed]}: ${entry.title} ${what}`;
    };
    grids.addEventListener("pointerover", read);
    grids.addEventListener("focusin", read);
    grids.addEventListener("click", (event) => {
      const cell = event.target.closest("[data-cell]");
      if (cell) { focusCell(cell); pick(Number(cell.dataset.cell)); }
    });
    grids.addEventListener("keydown", (event) => {
      const cell = event.target.closest("[data-cell]"), move = ARROWS[event.key];
      if (!cell || !(move || event.key === "Enter" || event.key === " ")) return;
      event.preventDefault();
      if (!move) return pick(Number(cell.dataset.cell));
      const row = cell.parentElement.sectionRowIndex + move[0];
      const next = cell.closest("tbody").rows[row]?.cells[cell.cellIndex + move[1]];
      if (next?.dataset.cell !== undefined) focusCell(next);
    });
    statistic.addEventListener("change", () => { colourMap(); read(); });
    views.push((position) => cells.forEach((cell, i) => cell.setAttribute("aria-selected", i === position)));
    colourMap();
  };

  // ---- The matrix: a pixel per pair, with an overlay for lines and marks ----

  const bytes = (packed) => new DataView(Uint8Array.from(atob(packed), (c) => c.charCodeAt(0)).buffer);

  const unpack = (measure) => {
    const steps = bytes(measure.data);
    const places = data.pairs.positions === null ? null : bytes(data.pairs.positions);
    const numbers = new Float32Array((count * (count - 1)) / 2).fill(NaN);
    for (let k = 0; k < steps.byteLength / 2; k++) {
      const step = steps.getUint16(2 * k, true);
      if (step === 0xffff) continue;
      const value = measure.from + ((measure.to - measure.from) * step) / 0xfffe;
      numbers[places ? places.getUint32(4 * k, true) : k] = value;
    }
    return numbers;
  };
  const pairPlace = (a, b) => {
    const first = Math.min(a, b), second = Math.max(a, b);
    return (first * (2 * count - first - 1)) / 2 + second - first - 1;
  };

  // Runs of heads of one layer: the axes are labelled by them.
  const layerRuns = () => {
    const runs = [];
    for (let i = 0; i < count; i++) {
      const last = runs.at(-1);
      if (last && last.grid === data.grid[i] && last.layer === data.layer[i]) last.end = i + 1;
      else runs.push({ grid: data.grid[i], layer: data.layer[i], start: i, end: i + 1 });
    }
    return runs;
  };

  const svg = (tag, attributes) => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    return node;
  };
  const place = (rect, x, y, width, height) => {
    for (const [name, value] of Object.entries({ x, y, width, height })) rect.setAttribute(name, value);
  };

  const drawPixels = (canvas, numbers, span) => {
    const context = canvas.getContext("2d"), image = context.createImageData(count, count);
    const palette = Array.from({ length: 256 }, (_, i) => colour(i / 255));
    for (let a = 0, k = 0; a < count; a++) for (let b = a + 1; b < count; b++, k++) {
      if (Number.isNaN(numbers[k])) continue; // stays transparent: the grey behind shows
      const rgb = palette[Math.round(255 * span.fraction(numbers[k]))];
      for (const at of [a * count + b, b * count + a]) image.data.set([...rgb, 255], 4 * at);
    }
    context.putImageData(image, 0, 0);
  };

  const buildOverlay = (plot) => {
    const overlay = svg("svg", { viewBox: `0 0 ${count} ${count}`, preserveAspectRatio: "none", "aria-hidden": "true" });
    const runs = layerRuns();
    const line = (runsAt) => runsAt.map(({ start: s }) => `M0 ${s}H${count}M${s} 0V${count}`).join("");
    const starts = runs.slice(1), stream = (run, i) => run.grid !== runs[i].grid;
    overlay.append(svg("path", { class: "layers", d: line(starts) }),
      svg("path", { class: "streams", d: line(starts.filter(stream)) }));
    const step = Math.ceil(runs.length / 32);
    const label = (run, edge) => {
      const node = element("span", {}, String(run.layer));
      node.style[edge] = `${(50 * (run.start + run.end)) / count}%`;
      return node;
    };
    const labelled = runs.filter((_, i) => i % step === 0);
    const axis = (side, edge) => element("div", { class: `axis ${side}`, "aria-hidden": "true" },
      ...labelled.map((run) => label(run, edge)));
    plot.append(overlay);
    plot.before(element("div", { class: "corner", "aria-hidden": "true" }, "layer"), axis("top", "left"), axis("side", "top"));
    return overlay;
  };

  const buildMatrix = () => {
    const measures = data.pairs.measures, select = byId("measure"), readout = byId("matrix-readout");
    if (!measures.length) return byId("matrix").remove();
    const canvas = element("canvas", { width: count, height: count, tabindex: "0", role: "img",
      "aria-label": "Similarity of all pairs of heads; arrow keys move, the text above names the pair" });
    const plot = element("div", { class: "plot" }, canvas);
    byId("matrix-plot").append(plot);
    const overlay = buildOverlay(plot);
    const [across, down, pointer] = ["cross", "cross", "pointer"].map((name) => svg("rect", { class: name }));
    overlay.append(across, down, pointer);
    options(select, measures);
    let numbers, at = null;
    const current = () => measures.find((entry) => entry.name === select.value);
    const read = (row, other) => {
      at = [row, other].map((i) => Math.min(Math.max(i, 0), count - 1));
      const [a, b] = at, value = a === b ? NaN : numbers[pairPlace(a, b)];
      place(pointer, b, a, 1, 1);
      const what = Number.isNaN(value) ? "not measured" : shown(Number(value.toFixed(4)));
      readout.textContent = a === b ? `${data.labels[a]} with itself`
        : `${data.labels[a]} and ${data.labels[b]}: ${current().title} ${what}`;
    };
    const draw = () => {
      numbers = unpack(current());
      const span = range(numbers);
      drawPixels(canvas, numbers, span);
      drawScale(byId("matrix-scale"), current(), span, numbers.some(Number.isNaN));
      if (at) read(...at);
    };
    const under = (event) => {
      const box = canvas.getBoundingClientRect();
      return [(event.clientY - box.top) / box.height, (event.clientX - box.left) / box.width].map((x) => Math.floor(x * count));
    };
    canvas.addEventListener("pointermove", (event) => read(...under(event)));
    canvas.addEventListener("click", (event) => { read(...under(event)); pick(at[0]); });
    canvas.addEventListener("keydown", (event) => {
      const move = ARROWS[event.key];
      if (!move && event.key !== "Enter") return;
      event.preventDefault();
      const [row, other] = at ?? [0, 0];
      if (move) read(row + move[0], other + move[1]); else pick(row);
    });
    select.addEventListener("change", draw);
    views.push((i) => { place(across, 0, i, count, 1); place(down, i, 0, 1, count); });
    draw();
  };

  // ---- The panel of the picked head ----

  const figureRow = (entry, position) => {
    const numbers = data.values[entry.name], value = numbers[position];
    const interval = data.intervals[entry.name];
    const between = interval && interval.low[position] !== null && interval.high[position] !== null
      ? element("small", {}, `${shown(interval.low[position])} … ${shown(interval.high[position])}`) : "";
    const rank = 1 + numbers.filter((other) => other !== null && other > value).length;
    const of = numbers.filter((other) => other !== null).length;
    return element("tr", {}, element("th", { scope: "row" }, entry.title),
      element("td", { class: "number" }, `${shown(value)}${unit(entry)}`, between),
      element("td", { class: "number" }, `${rank} of ${of}`));
  };

  const showHead = (position) => {
    const body = byId("panel-body"), facts = element("dl");
    const fact = (name, value) => facts.append(element("dt", {}, name), element("dd", {}, value));
    const nearest = data.nearest[position];
    if (nearest !== null) fact("Nearest head",
      element("button", { type: "button", class: "pick", "data-pick": nearest }, data.labels[nearest]));
    for (const entry of data.columns) {
      const value = data.values[entry.name][position];
      if (!entry.numeric && value !== null && entry.name !== "flags") fact(entry.title, String(value));
    }
    for (const row of document.querySelectorAll(`#flags tr[data-head="${position}"]`)) {
      fact(`Flag: ${row.cells[1].textContent}`, row.cells[4].textContent);
    }
    const titles = ["Figure", "Value, interval", "Rank"].map((title, i) =>
      element("th", { scope: "col", ...(i && { class: "number" }) }, title));
    const rows = data.columns
      .filter((entry) => entry.numeric && data.values[entry.name][position] !== null)
      .map((entry) => figureRow(entry, position));
    body.replaceChildren(facts, element("table", {}, element("caption", {}, "Rank 1 is the highest of all heads."),
      element("thead", {}, element("tr", {}, ...titles)), element("tbody", {}, ...rows)));
    byId("panel-title").textContent = `Picked head: ${data.labels[position]}`;
  };

  // ---- The table of heads: sort and filter ----

  const buildTable = () => {
    const { tHead: head, tBodies: [body] } = byId("heads-table"), titles = [...head.rows[0].cells], rows = [...body.rows];
    const keyOf = (name) => (row) => {
      const position = Number(row.dataset.head);
      return name === "" ? position : name === "nearest" ? data.nearest[position] : data.values[name][position];
    };
    const compare = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b)));
    const sortBy = (title) => {
      const descending = title.getAttribute("aria-sort") === "ascending";
      for (const other of titles) other.removeAttribute("aria-sort");
      title.setAttribute("aria-sort", descending ? "descending" : "ascending");
      const key = keyOf(title.dataset.column);
      rows.sort((one, two) => {
        const a = key(one), b = key(two);
        if (a === null || b === null) return (a === null) - (b === null); // missing ones stay last
        return descending ? compare(b, a) : compare(a, b);
      });
      body.append(...rows);
    };
    for (const title of titles) title.querySelector("button").addEventListener("click", () => sortBy(title));
    byId("filter").addEventListener("input", (event) => {
      const words = event.target.value.toLowerCase().split(/\s+/).filter(Boolean);
      for (const row of rows) row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word));
      byId("filter-count").textContent = `${rows.filter((row) => !row.hidden).length} of ${count} heads`;
    });
    views.push((position) => {
      for (const row of document.querySelectorAll("tr[data-head]")) {
        row.classList.toggle("picked", Number(row.dataset.head) === position);
      }
    });
  };

  buildMap();
  buildMatrix();
  buildTable();
  views.push(showHead);
})();
