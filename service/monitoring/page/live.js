"use strict";
// Asks for live.json every second and draws it. Nothing is kept but the last readings, nothing is sent.

const INTERVAL_MS = 1000;
const PATIENCE_MS = 4000;
const WINDOW_SECONDS = 10;
const MAX_COURSE = 120;
const STALE_SECONDS = 2;
const USES = [
  [2, "held", "--live"], [3, "shared", "--shared"], [4, "pending", "--pending"],
  [5, "cached", "--evictable"], [1, "free", "--free"],
];
// As the terminal's view has them, by the number of a request.
const OWNERS = [
  "#2fb9a5", "#6f9cf5", "#e0a03c", "#c678dd", "#7cc35c", "#e0637a",
  "#4cc2e8", "#d4c34a", "#9a8cf0", "#e08a5c", "#58b98a", "#d478b0",
];

const $ = (id) => document.getElementById(id);
const view = { colour: "use", held: false, readings: [], course: [], last: null, blocks: null, marked: null, awaySince: null };

// Numbers

function count(number) {
  if (Math.abs(number) < 9999.5) return Math.round(number).toLocaleString("en");
  for (const [unit, size] of [["k", 1e3], ["M", 1e6], ["G", 1e9]]) {
    if (Math.abs(number) < 999.5 * size) return `${Number((number / size).toPrecision(3))}${unit}`;
  }
  return `${Number((number / 1e12).toPrecision(3))}T`;
}
function rate(number) {
  if (number === null) return "-";
  return number > 0 && number < 10 ? number.toFixed(1) : count(number);
}
function duration(seconds) {
  if (seconds === null || seconds === undefined) return "-";
  if (seconds < 0.9995) return `${Math.round(Math.max(0, seconds) * 1000)} ms`;
  if (seconds < 99.95) return `${seconds.toFixed(1)} s`;
  const whole = Math.floor(seconds);
  if (whole >= 86400) return `${Math.floor(whole / 86400)} d ${Math.floor((whole % 86400) / 3600)} h`;
  if (whole >= 3600) return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} m`;
  return `${Math.floor(whole / 60)} m ${whole % 60} s`;
}
function share(part, whole) {
  return whole ? `${Math.round((100 * part) / whole)} %` : "-";
}

// What two readings say together

function differences(now) {
  const readings = view.readings;
  const last = readings[readings.length - 1];
  if (last && now.activity.uptime_seconds < last.activity.uptime_seconds) readings.length = 0;
  const before = readings[readings.length - 1];
  readings.push(now);
  while (readings.length > 2 && now.activity.uptime_seconds - readings[1].activity.uptime_seconds >= WINDOW_SECONDS) {
    readings.shift();
  }
  const output = (reading) => reading.activity.num_generation_tokens_total;
  if (before) {
    const newest = between(before, now, output);
    if (newest !== null) view.course.push(newest);
    if (view.course.length > MAX_COURSE) view.course.shift();
  }
  const first = readings[0];
  const of = (value) => between(first, now, value);
  const ended = (reading) => Object.values(reading.activity.finished_total).reduce((sum, one) => sum + one, 0);
  const preempted = ({ load }) =>
    load.num_swap_preemptions_total + load.num_recompute_preemptions_total + load.num_tail_preemptions_total;
  const queried = now.load.num_prefix_query_tokens_total - first.load.num_prefix_query_tokens_total;
  const hit = now.load.num_prefix_hit_tokens_total - first.load.num_prefix_hit_tokens_total;
  return {
    output: of(output),
    prompt: of((reading) => reading.activity.num_prompt_tokens_total),
    ended: of(ended),
    refused: of((reading) => reading.activity.num_refused_total),
    preempted: of(preempted),
    evicted: of((reading) => reading.load.num_evictions_total),
    hits: queried > 0 ? share(hit, queried) : "-",
    ttft: quantiles(first.activity.time_to_first_token, now.activity.time_to_first_token),
    itl: quantiles(first.activity.inter_token_latency, now.activity.inter_token_latency),
  };
}
function between(before, now, value) {
  const seconds = now.activity.uptime_seconds - before.activity.uptime_seconds;
  return seconds > 0 ? (value(now) - value(before)) / seconds : null;
}
function quantiles(before, now) {
  let counts = now.cumulative.map((late, index) => late - (before.cumulative[index] ?? 0));
  if (!counts[counts.length - 1]) counts = now.cumulative;
  return [0.5, 0.95].map((part) => quantile(now.bounds, counts, part));
}
function quantile(bounds, counts, part) {
  const total = counts[counts.length - 1];
  if (!total) return null;
  const rank = part * total;
  let low = 0;
  let below = 0;
  for (let index = 0; index < bounds.length; index += 1) {
    if (counts[index] >= rank) {
      return low + ((bounds[index] - low) * (rank - below)) / Math.max(1, counts[index] - below);
    }
    low = bounds[index];
    below = counts[index];
  }
  return low;
}

// Drawing

function put(id, text) {
  const element = $(id);
  if (element.textContent !== text) element.textContent = text;
}
function colourOf(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}
function ownerColour(number) {
  return OWNERS[number % OWNERS.length];
}

function drawHealth(state, reason) {
  const pill = $("health");
  pill.textContent = state;
  pill.className = `pill ${state}`;
  document.title = state === "serving" ? "Pageturner" : `Pageturner: ${state}`;
  const told = [];
  if (reason) told.push(reason);
  const reading = view.last;
  if (state === "away") {
    told.push(`the server has not answered for ${duration((Date.now() - view.awaySince) / 1000)}; what is shown was before`);
  } else if (reading && reading.server) {
    const age = reading.requests.age_seconds;
    if (age > STALE_SECONDS) told.push(`the step under way does not end: requests and blocks are of ${duration(age)} ago`);
    for (const axis of reading.policies.axes) {
      if (axis.asking_seconds > STALE_SECONDS) {
        told.push(`the ${axis.axis} policy ${axis.name} has not answered for ${duration(axis.asking_seconds)}`);
      }
    }
  }
  $("notice").hidden = !told.length;
  put("notice", told.join("; "));
  document.querySelector("main").classList.toggle("old", state === "away");
}

function drawFigures(reading, figures) {
  const { load, server, activity } = reading;
  put("facts", [server.model_name, server.device, `version ${server.version}`, `up ${duration(activity.uptime_seconds)}`].join("  ·  "));
  put("output", rate(figures.output));
  put("running", count(load.num_running));
  put("sequences", `${count(load.num_running_sequences)} of ${count(server.max_num_seqs)} sequences`);
  put("waiting", count(load.num_waiting - load.num_swapped));
  put("queued", `${count(load.num_queued_prompt_tokens)} prompt tokens`);
  put("swapped", count(load.num_swapped));
  put("host", load.num_host_blocks ? `${share(load.num_host_blocks_used, load.num_host_blocks)} of host KV` : "no host KV");
  put("ttft", duration(figures.ttft[0]));
  put("ttft95", `p95 ${duration(figures.ttft[1])}`);
  put("itl", duration(figures.itl[0]));
  put("itl95", `p95 ${duration(figures.itl[1])}`);
  put("prompt", rate(figures.prompt));
  put("hits", `${figures.hits} from the prefix cache`);
  put("ended", rate(figures.ended));
  put("refused", `${rate(figures.refused)} refused/s`);
  put("preempted", rate(figures.preempted));
  put("evicted", `${rate(figures.evicted)} evictions/s`);
  drawCourse();
}

function drawCourse() {
  const values = view.course;
  const top = Math.max(1, ...values);
  const left = 120 - Math.max(0, values.length - 1);
  const points = values.map((value, index) => `${left + index},${(29 - (27 * value) / top).toFixed(2)}`);
  const line = points.length > 1 ? `M${points.join("L")}` : "";
  document.querySelector("#course .line").setAttribute("d", line);
  document.querySelector("#course .area").setAttribute("d", line ? `${line}L120,30L${left},30Z` : "");
}

function bytes(text) {
  return Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
}

function takeBlocks({ uses, owners, numbers, ids }) {
  const low = bytes(owners);
  view.blocks = { uses: bytes(uses), low, numbers, ids, columns: 1, cell: 1 };
}
function ownerOf(block) {
  const { low, numbers } = view.blocks;
  const place = low[2 * block] | (low[2 * block + 1] << 8);
  return place && place <= numbers.length ? place - 1 : null;
}

function drawBlocks() {
  const blocks = view.blocks;
  if (!blocks) return;
  const canvas = $("map");
  const total = blocks.uses.length;
  const width = canvas.clientWidth || 600;
  // The largest cells with which all of them fit into the height that is set aside.
  const room = Math.max(90, Math.min(380, window.innerHeight * 0.38));
  let cell = 16;
  while (cell > 2 && Math.ceil(total / Math.floor(width / cell)) * cell > room) cell -= 1;
  const columns = Math.max(1, Math.floor(width / cell));
  const rows = Math.max(1, Math.ceil(total / columns));
  const ratio = window.devicePixelRatio || 1;
  canvas.style.height = `${rows * cell}px`;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(rows * cell * ratio);
  Object.assign(blocks, { columns, cell });
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  const gap = cell >= 5 ? 1 : 0;
  const colours = [];
  for (const [use, , name] of USES) colours[use] = colourOf(name);
  const counts = {};
  for (let block = 0; block < total; block += 1) {
    const use = blocks.uses[block];
    counts[use] = (counts[use] || 0) + 1;
    const owner = ownerOf(block);
    let colour = colours[use] || colours[2];
    if (view.colour === "owner" && owner !== null) colour = ownerColour(blocks.numbers[owner]);
    pen.globalAlpha = view.marked === null || (owner !== null && blocks.numbers[owner] === view.marked) ? 1 : 0.25;
    pen.fillStyle = colour;
    pen.fillRect((block % columns) * cell, Math.floor(block / columns) * cell, cell - gap, cell - gap);
  }
  drawLegend(counts, total);
}

function drawLegend(counts, total) {
  const legend = $("legend");
  if (!legend.children.length) {
    for (const [use, name, variable] of USES) {
      const item = document.createElement("li");
      const swatch = document.createElement("i");
      swatch.style.background = `var(${variable})`;
      const number = document.createElement("b");
      number.id = `use-${use}`;
      item.append(swatch, `${name} `, number);
      legend.append(item);
    }
  }
  for (const [use] of USES) put(`use-${use}`, count(counts[use] || 0));
  const { block_size: size, block_bytes: bytesOfBlock, kv_dtype: dtype } = view.last.server;
  const memory = (total * bytesOfBlock) / 2 ** 20;
  const told = memory >= 1024 ? `${(memory / 1024).toFixed(1)} GiB` : `${count(memory)} MiB`;
  put("blocks-count", total ? `${total.toLocaleString("en")} of ${size} tokens, ${told} of ${dtype}` : "none");
  const held = share((counts[2] || 0) + (counts[3] || 0), total);
  $("map").setAttribute("aria-label", `The block pool: ${total} blocks, ${held} of them held`);
}

function cellsOf(row, number) {
  while (row.children.length < number) row.append(document.createElement("td"));
  return row.children;
}

function drawRequests({ total, listed }) {
  const body = $("requests");
  while (body.children.length > listed.length) body.lastChild.remove();
  while (body.children.length < listed.length) body.append(document.createElement("tr"));
  listed.forEach((request, index) => drawRequest(body.children[index], request));
  const first = listed.length < total ? `, the first ${listed.length}` : "";
  put("requests-count", `${total.toLocaleString("en")}${first}`);
  $("none").hidden = total > 0;
  document.querySelector("table").hidden = total === 0;
}

function drawRequest(row, request) {
  row.dataset.number = request.number;
  const cells = cellsOf(row, 12);
  if (!cells[0].firstChild) {
    cells[0].append(document.createElement("i"), document.createElement("span"));
    cells[1].append(document.createElement("span"), document.createElement("span"));
    const progress = document.createElement("span");
    progress.append(document.createElement("span"));
    cells[2].append(progress, document.createElement("span"));
    for (const index of [3, 4, 5, 6, 7, 8, 9, 11]) cells[index].className = "n";
  }
  cells[0].firstChild.style.background = ownerColour(request.number);
  cells[0].lastChild.textContent = request.request_id;
  cells[0].title = request.request_id;
  const [state, note] = cells[1].children;
  state.className = `state ${request.state}`;
  state.textContent = { running: "runs", waiting: "waits", swapped: "swapped" }[request.state] || request.state;
  const notes = [];
  if (request.queue_position) notes.push(` ${request.queue_position}`);
  if (request.is_paused) notes.push(" unread");
  if (request.is_guarded) notes.push(" guarded");
  note.className = `note${request.is_paused ? " warn" : ""}`;
  note.textContent = notes.join("");
  const [bar, told] = cells[2].children;
  const most = request.max_tokens * request.num_choices;
  const isPrefill = !request.num_output_tokens;
  const computed = Math.max(0, request.num_prompt_tokens - request.num_uncomputed_tokens);
  const part = isPrefill ? computed / Math.max(1, request.num_prompt_tokens) : request.num_output_tokens / Math.max(1, most);
  bar.className = `progress${isPrefill ? " prefill" : ""}`;
  bar.firstChild.style.width = `${Math.min(100, 100 * part)}%`;
  if (!isPrefill) told.textContent = `${count(request.num_output_tokens)} / ${count(most)}`;
  else told.textContent = request.state === "running" ? `prompt ${share(computed, request.num_prompt_tokens)}` : "";
  const host = request.num_host_blocks ? ` + ${count(request.num_host_blocks)} host` : "";
  [
    `${count(request.num_blocks)}${host}`, duration(request.age_seconds), duration(request.queue_seconds),
    duration(request.first_token_seconds), count(request.num_prompt_tokens), count(request.num_cached_prompt_tokens),
    request.num_preemptions ? count(request.num_preemptions) : "-", request.tenant || "-", String(request.priority),
  ].forEach((text, index) => {
    if (cells[3 + index].textContent !== text) cells[3 + index].textContent = text;
  });
}

function drawPolicies({ axes, revision }) {
  put("revision", `revision ${revision}`);
  const list = $("policies");
  while (list.children.length < axes.length) {
    const pair = document.createElement("div");
    pair.append(document.createElement("dt"), document.createElement("dd"));
    list.append(pair);
  }
  axes.forEach((axis, index) => {
    const [term, value] = list.children[index].children;
    term.textContent = axis.axis;
    const told = [axis.name];
    if (axis.is_quarantined) told.push(axis.quarantine_reason ? `quarantined: ${axis.quarantine_reason}` : "quarantined");
    else if (axis.num_faults) told.push(`${count(axis.num_faults)} faults`);
    if (axis.shadow) told.push(`shadow ${axis.shadow.name}: ${count(axis.shadow.num_disagreements)} of ${count(axis.shadow.num_compared)} answers differ`);
    value.textContent = told.join(", ");
    value.className = axis.is_quarantined ? "quarantined" : "";
    value.title = `${axis.num_calls} calls, ${duration(axis.step_seconds)} a step`;
  });
}

function draw(reading) {
  view.last = reading;
  view.awaySince = null;
  const { state, reason } = { state: reading.health.health, reason: reading.health.reason };
  if (reading.server) {
    drawFigures(reading, differences(reading));
    takeBlocks(reading.blocks);
    drawBlocks();
    drawRequests(reading.requests);
    drawPolicies(reading.policies);
  }
  drawHealth(state, state === "serving" ? "" : reason);
}

// Asking

async function ask() {
  const patience = new AbortController();
  const timer = setTimeout(() => patience.abort(), PATIENCE_MS);
  let reading;
  try {
    const answer = await fetch("live.json", { cache: "no-store", signal: patience.signal });
    if (!answer.ok) throw new Error(`status ${answer.status}`);
    reading = await answer.json();
  } catch (error) {
    view.awaySince = view.awaySince ?? Date.now();
    drawHealth("away", "");
    return;
  } finally {
    clearTimeout(timer);
  }
  draw(reading);
}

async function follow() {
  for (;;) {
    const next = new Promise((resolve) => setTimeout(resolve, INTERVAL_MS));
    try {
      if (!view.held && !document.hidden) await ask();
    } catch (error) {
      console.error(error);
    }
    await next;
  }
}

// Hands

function press(button, isPressed) {
  button.setAttribute("aria-pressed", String(isPressed));
}
function listen() {
  $("hold").addEventListener("click", () => {
    view.held = !view.held;
    press($("hold"), view.held);
  });
  const choices = [...document.querySelectorAll("[data-colour]")];
  for (const button of choices) {
    button.addEventListener("click", () => {
      view.colour = button.dataset.colour;
      for (const one of choices) press(one, one === button);
      drawBlocks();
    });
  }
  $("map").addEventListener("mousemove", (event) => {
    const blocks = view.blocks;
    if (!blocks) return;
    const column = Math.floor(event.offsetX / blocks.cell);
    const block = Math.floor(event.offsetY / blocks.cell) * blocks.columns + column;
    if (column >= blocks.columns || block < 0 || block >= blocks.uses.length) return;
    const use = (USES.find(([code]) => code === blocks.uses[block]) || [0, "in use"])[1];
    const owner = ownerOf(block);
    put("pointed", `block ${block}: ${use}${owner === null ? "" : ` by ${blocks.ids[owner]}`}`);
  });
  $("map").addEventListener("mouseleave", () => put("pointed", "\u00a0"));
  $("requests").addEventListener("mouseover", (event) => mark(event.target.closest("tr")));
  $("requests").addEventListener("mouseleave", () => mark(null));
  window.addEventListener("resize", drawBlocks);
  window.matchMedia("(prefers-color-scheme: light)").addEventListener("change", drawBlocks);
}
function mark(row) {
  const number = row ? Number(row.dataset.number) : null;
  if (number === view.marked) return;
  view.marked = number;
  drawBlocks();
}

listen();
follow();
