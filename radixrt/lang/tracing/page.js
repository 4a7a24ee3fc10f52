"use strict";
(() => {
  // Everything that came from outside is set as text, never as markup.
  const trace = JSON.parse(document.getElementById("trace").textContent);
  const byId = (id) => document.getElementById(id);
  const chart = byId("chart"), plot = byId("plot"), axis = byId("axis"), labels = byId("labels");
  const detail = byId("detail"), tip = byId("tip"), search = byId("search");
  const LABELS = 190, AXIS = 58, SVG = "http://www.w3.org/2000/svg";
  const PHASES = {
    waiting: ["waiting for what comes before", "waiting"],
    held: ["waiting for its turn in the batch", "held"],
    sending: ["sending and encoding", "sending"],
    queued: ["queued", "queued"],
    prefill: ["time to first token: prefill", "prefill"],
    "first token": ["time to first token", "prefill"],
    decoding: ["decoding", "decoding"],
    answering: ["answering", "decoding"],
  };

  // ---------------------------------------------------------------- making elements

  function html(kind, attributes, ...children) {
    const element = document.createElement(kind);
    for (const [name, value] of Object.entries(attributes || {})) element[name] = value;
    element.append(...children.filter((child) => child !== null));
    return element;
  }
  function svg(kind, attributes, parent) {
    const element = document.createElementNS(SVG, kind);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    if (parent) parent.append(element);
    return element;
  }
  function seconds(s) {
    if (s === 0) return "0";
    if (s >= 100) return s.toFixed(0) + " s";
    if (s >= 1) return s.toFixed(2) + " s";
    return s >= 0.001 ? (s * 1000).toFixed(s < 0.01 ? 1 : 0) + " ms" : (s * 1e6).toFixed(0) + " µs";
  }
  const count = (n) => n.toLocaleString("en-US");
  const cut = (text, most) => (text.length > most ? text.slice(0, most) + "…" : text);

  // ---------------------------------------------------------------- rows and calls

  const rows = [], rowOf = new Map(), calls = [];
  trace.runs.forEach((run, number) => {
    for (const branch of run.branches) {
      rowOf.set(number + "/" + branch.id, rows.length);
      rows.push({ run, number, branch, index: rows.length, end: branch.start, failed: false });
    }
    for (const call of run.calls) {
      const row = rows[rowOf.get(number + "/" + call.branch)];
      const last = call.phases.length ? call.phases[call.phases.length - 1][2] : call.written;
      row.end = Math.max(row.end, last);
      row.failed = row.failed || call.error !== null;
      calls.push({ call, row, run, last, first: call.written, group: null });
    }
    for (const tool of run.tools) {
      const row = rows[rowOf.get(number + "/" + tool.branch)];
      row.end = Math.max(row.end, tool.end === null ? trace.duration : tool.end);
    }
    for (const join of run.joins)
      for (const branch of join.branches) {
        const row = rows[rowOf.get(number + "/" + branch)];
        row.end = Math.max(row.end, join.at);
      }
    rows[rowOf.get(number + "/0")].end = run.end === null ? trace.duration : run.end;
  });

  // Many rows are drawn closer together.
  const dense = rows.length > 60, ROW = dense ? 22 : 30, BAR = dense ? 13 : 18, LETTER = dense ? 5.6 : 6.4;
  document.body.classList.toggle("dense", dense);

  // ---------------------------------------------------------------- figures

  function figures() {
    const sums = {}, all = calls.map((one) => one.call);
    const sum = (name) => all.reduce((total, call) => total + call[name], 0);
    for (const call of all)
      for (const [phase, start, end] of call.phases) {
        const kind = PHASES[phase][0];
        sums[kind] = sums[kind] || { css: PHASES[phase][1], seconds: 0 };
        sums[kind].seconds += end - start;
      }
    const failed = all.filter((call) => call.error !== null).length;
    const tokensIn = sum("tokens_in"), cached = sum("tokens_cached");
    const toFirst = all.map((call) => call.first_token).filter((s) => s !== null).sort((a, b) => a - b);
    const box = byId("figures");
    const figure = (value, name) => box.append(html("div", { className: "figure" }, html("b", {}, value), html("span", {}, name)));
    figure(seconds(trace.duration), "wall time");
    figure(count(all.length), failed ? "calls, " + count(failed) + " failed" : all.length === 1 ? "call" : "calls");
    figure(count(rows.length), rows.length === 1 ? "branch" : "branches");
    figure(count(tokensIn), "tokens in" + (tokensIn ? ", " + Math.round((100 * cached) / tokensIn) + " % from the cache" : ""));
    figure(count(sum("tokens_out")), "tokens out");
    if (toFirst.length) figure(seconds(toFirst[Math.floor(toFirst.length / 2)]), "to first token, median");
    const total = Object.values(sums).reduce((t, one) => t + one.seconds, 0) || 1;
    const share = html("div", { className: "share" }), legend = html("div", { className: "legend" });
    for (const [name, one] of Object.entries(sums)) {
      const part = html("i", { className: one.css, title: name + ": " + seconds(one.seconds) });
      part.style.width = (100 * one.seconds) / total + "%";
      share.append(part);
      legend.append(html("span", {}, html("i", { className: one.css }), name + " " + seconds(one.seconds)));
    }
    const tools = trace.runs.flatMap((run) => run.tools);
    if (tools.length) {
      const spent = tools.reduce((t, tool) => t + (tool.end === null ? trace.duration : tool.end) - tool.start, 0);
      legend.append(html("span", {}, html("i", { className: "tool" }), "tools " + seconds(spent)));
    }
    if (all.length) box.append(html("div", { className: "figure wide" }, html("span", {}, "where the calls' time went, added up"), share, legend));
  }

  // ---------------------------------------------------------------- the plot

  let zoom = 1, width = 0;
  const x = (moment) => (moment / (trace.duration || 1e-6)) * (width - 24) + 8;
  const middle = (row) => row.index * ROW + ROW / 2;

  function draw() {
    width = Math.max(200, (chart.clientWidth - LABELS) * zoom);
    const height = Math.max(rows.length * ROW, 1);
    plot.replaceChildren();
    plot.setAttribute("width", width);
    plot.setAttribute("height", height + 8);
    const step = tickStep();
    for (const row of rows)
      if (row.index % 2) svg("rect", { class: "stripe", x: 0, y: row.index * ROW, width, height: ROW }, plot);
    for (let t = 0; t <= trace.duration; t += step) svg("line", { class: "grid", x1: x(t), x2: x(t), y1: 0, y2: height }, plot);
    for (const row of rows)
      svg("line", { class: "life", x1: x(row.branch.start), x2: Math.max(x(row.end), x(row.branch.start) + 1), y1: middle(row), y2: middle(row) }, plot);
    trace.runs.forEach(drawLinks);
    trace.runs.forEach(drawTools);
    for (const one of calls) drawWaiting(one);
    for (const one of calls) drawCall(one);
    drawAxis(step);
    markFound();
    if (chosen) chosen.group.classList.add("chosen");
  }

  function drawLinks(run, number) {
    const rowAt = (branch) => rows[rowOf.get(number + "/" + branch)];
    const groups = new Map(); // the branches of one fork share one trunk
    for (const branch of run.branches) {
      if (branch.parent === null) continue;
      const key = branch.parent + "@" + branch.start;
      groups.set(key, [...(groups.get(key) || []), branch]);
    }
    for (const branches of groups.values()) link("fork", rowAt(branches[0].parent), branches.map((b) => rowAt(b.id)), branches[0].start);
    for (const join of run.joins) link("join", rowAt(join.into), join.branches.map(rowAt), join.at);
  }
  function link(kind, parent, children, at) {
    const px = x(at), y = middle(parent), bottom = Math.max(...children.map(middle));
    svg("path", { class: kind, d: `M${px} ${y}V${bottom}` }, plot);
    svg("circle", { class: "dot", cx: px, cy: y, r: 3.5 }, plot);
    for (const child of children) svg("circle", { class: "dot", cx: px, cy: middle(child), r: 2 }, plot);
  }

  function drawTools(run, number) {
    for (const tool of run.tools) {
      const row = rows[rowOf.get(number + "/" + tool.branch)];
      const end = tool.end === null ? trace.duration : tool.end;
      const group = svg("g", { class: "toolbar" }, plot);
      const wide = Math.max(x(end) - x(tool.start), 2);
      svg("rect", { class: tool.error ? "p-error" : "p-tool", x: x(tool.start), y: middle(row) - 5, width: wide, height: 10, rx: 5 }, group);
      group.addEventListener("mousemove", (event) => showTip(event, tool.name, ["tool, " + seconds(end - tool.start)], tool.error || ""));
      group.addEventListener("mouseleave", hideTip);
    }
  }

  const isWaiting = (phase) => phase[0] === "waiting" || phase[0] === "held";

  function drawWaiting({ call, row }) {
    for (const [phase, start, end] of call.phases.filter(isWaiting))
      svg("rect", { class: "p-" + PHASES[phase][1], x: x(start), y: middle(row) - 2, width: Math.max(x(end) - x(start), 0.5), height: 3 }, plot);
  }

  function drawCall(one) {
    const { call, row } = one, top = middle(row) - BAR / 2 - 1;
    const group = svg("g", { class: "call" + (call.error === null ? "" : " failed"), role: "button", "aria-label": call.what }, plot);
    one.group = group;
    const active = call.phases.filter((phase) => !isWaiting(phase));
    for (const [phase, start, end] of active)
      svg("rect", { class: "p-" + PHASES[phase][1], x: x(start), y: top, width: Math.max(x(end) - x(start), 0.8), height: BAR }, group);
    const from = x(active.length ? active[0][1] : one.first), to = Math.max(x(one.last), from + 3);
    if (!active.length && call.error !== null) svg("circle", { class: "p-error", cx: to, cy: middle(row), r: 4 }, group);
    if (active.length && call.tokens_in) {
      svg("rect", { class: "cachetrack", x: from, y: top + BAR + 1.5, width: to - from, height: 3 }, group);
      svg("rect", { class: "cached", x: from, y: top + BAR + 1.5, width: ((to - from) * call.tokens_cached) / call.tokens_in, height: 3 }, group);
    }
    if (call.error !== null && active.length) svg("rect", { class: "p-error", x: to - 4, y: top, width: 4, height: BAR }, group);
    svg("rect", { class: "frame", x: from - 1, y: top - 1, width: to - from + 2, height: BAR + 2, rx: 4 }, group);
    const name = call.name || call.what, room = to - from - 10;
    if (room > 14) {
      const letters = Math.floor(room / LETTER);
      svg("text", { class: "name", x: from + 6, y: top + BAR * 0.74 }, group).textContent = name.length > letters ? name.slice(0, letters - 1) + "…" : name;
    }
    group.addEventListener("mousemove", (event) => tipOf(event, one));
    group.addEventListener("mouseleave", hideTip);
    group.addEventListener("click", () => choose(one));
  }

  function tickStep() {
    const rough = ((trace.duration || 1e-6) / width) * 110, power = 10 ** Math.floor(Math.log10(rough));
    return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= rough);
  }

  function drawAxis(step) {
    const corner = html("div", { id: "corner" }, "calls under way");
    corner.style.width = LABELS + "px";
    const drawing = svg("svg", { width, height: AXIS });
    drawing.style.left = LABELS + "px";
    for (let t = 0; t <= trace.duration; t += step) {
      svg("line", { class: "grid", x1: x(t), x2: x(t), y1: AXIS - 18, y2: AXIS }, drawing);
      svg("text", { class: "tick", x: x(t) + 4, y: AXIS - 5 }, drawing).textContent = seconds(t);
    }
    const steps = [];
    for (const { call, last } of calls) if (call.sent !== null && last > call.sent) steps.push([call.sent, 1], [last, -1]);
    steps.sort((a, b) => a[0] - b[0] || a[1] - b[1]);
    let level = 0, most = 1;
    const points = [];
    for (const [moment, change] of steps) {
      const before = level;
      level += change;
      most = Math.max(most, level);
      points.push([moment, before], [moment, level]);
    }
    const tall = AXIS - 26, line = points.map(([t, n]) => `${x(t).toFixed(1)} ${(AXIS - 18 - (n / most) * tall).toFixed(1)}`).join("L");
    if (line) {
      svg("path", { class: "busy", d: `M${x(points[0][0])} ${AXIS - 18}L${line}L${x(points[points.length - 1][0])} ${AXIS - 18}Z` }, drawing);
      svg("path", { class: "busyline", d: "M" + line }, drawing);
    }
    corner.append(html("div", {}, "at most " + count(points.length ? most : 0)));
    axis.replaceChildren(corner, drawing);
  }

  function drawLabels() {
    labels.style.width = LABELS + "px";
    for (const row of rows) {
      const depth = row.branch.id.split(".").length - 1;
      const name = depth ? "branch " + row.branch.id.slice(2) : row.run.name + (trace.runs.length > 1 ? " " + (row.number + 1) : "");
      const label = html("div", { className: "label" + (depth ? "" : " run") + (row.index % 2 ? " odd" : "") + (row.failed ? " bad" : ""), title: row.run.name + " " + row.branch.id }, name);
      label.style.height = label.style.lineHeight = ROW + "px";
      label.style.paddingLeft = 12 + depth * 14 + "px";
      labels.append(label);
    }
  }

  // ---------------------------------------------------------------- tooltip and details

  function tipOf(event, { call, first, last }) {
    const lines = [call.source];
    lines.push(seconds(last - first) + " in all" + (call.first_token === null ? "" : ", first token after " + seconds(call.first_token)));
    if (call.tokens_in) lines.push(`${count(call.tokens_in)} tokens in (${count(call.tokens_cached)} cached), ${count(call.tokens_out)} out`);
    showTip(event, call.what, lines, call.error || cut(call.answer.trim() || call.called.join("\n"), 240));
  }
  function showTip(event, title, lines, said) {
    tip.replaceChildren(html("b", {}, title), ...lines.map((line) => html("p", {}, line)), said ? html("p", { className: "said" }, said) : "");
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    tip.style.left = Math.max(4, Math.min(event.clientX + 14, innerWidth - box.width - 8)) + "px";
    tip.style.top = (event.clientY + 18 + box.height > innerHeight ? event.clientY - box.height - 12 : event.clientY + 18) + "px";
  }
  function hideTip() { tip.hidden = true; }

  let chosen = null;
  function choose(one) {
    if (chosen && chosen.group) chosen.group.classList.remove("chosen");
    chosen = one;
    hideTip();
    const wasHidden = detail.hidden;
    detail.hidden = one === null;
    if (one) fillDetail(one);
    if (wasHidden !== detail.hidden) draw();
    else if (one) one.group.classList.add("chosen");
  }
  function fillDetail({ call, row }) {
    const table = html("table"), line = (name, value, css) =>
      table.append(html("tr", {}, html("td", {}, css ? html("i", { className: css }) : null, name), html("td", {}, value)));
    for (const [phase, start, end] of call.phases) line(PHASES[phase][0], seconds(end - start), PHASES[phase][1]);
    if (call.first_token !== null) line("first token after", seconds(call.first_token));
    line("begins at", seconds(call.written));
    if (call.tokens_in) {
      line("tokens in", count(call.tokens_in));
      line("of them cached", `${count(call.tokens_cached)} (${Math.round((100 * call.tokens_cached) / call.tokens_in)} %)`);
      line("tokens out", count(call.tokens_out));
    }
    const block = (name, text, css) => (text ? [html("h3", {}, name), html("pre", { className: css || "" }, text)] : []);
    const close = html("button", { id: "close", type: "button", title: "Close (Escape)" }, "×");
    close.addEventListener("click", () => choose(null));
    detail.replaceChildren(
      close, html("h2", {}, call.what), html("div", { className: "source" }, `${call.file}:${call.line} · ${row.run.name} · branch ${call.branch}`),
      ...block("Error", call.error, "bad"), html("h3", {}, "Time and tokens"), table,
      ...block("Answer", call.answer), ...block("Calls of tools", call.called.join("\n")), ...block("The end of the prompt", call.prompt));
    detail.scrollTop = 0;
  }

  // ---------------------------------------------------------------- finding, zooming, keys

  function markFound() {
    const wanted = search.value.trim().toLowerCase();
    for (const { call, group } of calls) {
      const text = [call.what, call.branch, call.source, call.prompt, call.answer, call.error || ""].join("\n").toLowerCase();
      group.classList.toggle("dim", wanted !== "" && !text.includes(wanted));
    }
  }
  function zoomTo(wanted, clientX) {
    const before = zoom, left = chart.getBoundingClientRect().left + LABELS;
    const offset = clientX === undefined ? (chart.clientWidth - LABELS) / 2 : clientX - left;
    const place = (chart.scrollLeft + offset) / width;
    zoom = Math.min(Math.max(wanted, 1), 400);
    if (zoom === before) return;
    draw();
    chart.scrollLeft = place * width - offset;
  }
  function step(forward) {
    const ordered = [...calls].sort((a, b) => a.first - b.first);
    if (!ordered.length) return;
    const next = chosen === null ? 0 : ordered.indexOf(chosen) + (forward ? 1 : -1);
    const one = ordered[Math.min(Math.max(next, 0), ordered.length - 1)];
    choose(one);
    one.group.scrollIntoView({ block: "nearest", inline: "nearest" });
  }
  search.addEventListener("input", markFound);
  byId("in").addEventListener("click", () => zoomTo(zoom * 1.6));
  byId("out").addEventListener("click", () => zoomTo(zoom / 1.6));
  byId("fit").addEventListener("click", () => zoomTo(1));
  byId("theme").addEventListener("click", () => {
    const root = document.documentElement, dark = getComputedStyle(root).colorScheme === "dark";
    root.dataset.theme = dark ? "light" : "dark";
  });
  chart.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    zoomTo(zoom * Math.exp(-event.deltaY / 300), event.clientX);
  }, { passive: false });
  document.addEventListener("keydown", (event) => {
    if (event.target === search || event.ctrlKey || event.metaKey) return;
    const action = {
      ArrowRight: () => step(true), ArrowLeft: () => step(false), Escape: () => choose(null),
      "+": () => zoomTo(zoom * 1.6), "-": () => zoomTo(zoom / 1.6), 0: () => zoomTo(1),
    }[event.key];
    if (action) { event.preventDefault(); action(); }
  });
  addEventListener("resize", draw);

  byId("summary").remove(); // the figures say it better
  figures();
  drawLabels();
  draw();
})();
