"use strict";
// Shows the numbers that Python computed, and computes no share, reward or advantage itself. Text of a response becomes a
// text node. A token's number is a 16-bit code, see `decimal_codes` in page.py.

const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const LIST_PAGE = 100, TEXT_PAGE = 3000, BARS = 48;
const NUMBERS = Float64Array.from({length: 65536}, (_, code) =>
  (code & 2047) === 0 ? NaN : Number(`${(code & 2047) - 1024}e${(code >> 11) - 20}`));

const VALUES = {  // values to color tokens by: name, unit, scale, and source
  entropy: {name: "entropy H", unit: "nats", of: (s) => codes(s.columns.entropy)},
  share: {name: "share", unit: "times its peers' mean", credit: true, of: (s, c) => credited(s, c, "share")},
  reward: {name: "shaped reward r", unit: "reward", credit: true, of: (s, c) => credited(s, c, "reward")},
  advantage: {name: "advantage A", unit: "std of the reward", signed: true, credit: true,
    of: (s, c) => credited(s, c, "advantage")},
  difference: {name: "difference of advantages", unit: "credit − compared", signed: true, credit: true, other: true,
    of: (s, c, o) => { const a = credited(s, c, "advantage"), b = credited(s, o, "advantage");
      return a && b && ((r, i) => a(r, i) - b(r, i)); }},
  trained: {name: "advantage of the step", unit: "as it was trained on", signed: true,
    of: (s) => codes(s.columns.trained)},
  ratio: {name: "ratio π / π_old", unit: "in the optimizer step", signed: true, middle: 1,
    of: (s) => codes(s.columns.ratio)},
  clipped: {name: "clipped", unit: "where the clip decided", text: (x) => x ? "yes" : "no",
    of: (s) => codes(s.columns.clipped)},
  log_prob: {name: "log-prob", unit: "nats", falling: true, of: (s) => codes(s.columns.log_prob)},
  sampler: {name: "sampler's log-prob", unit: "nats", falling: true, of: (s) => codes(s.columns.sampler)},
};

const state = {step: 0, row: 0, token: 0, value: "advantage", credit: 0, other: 0, shown: LIST_PAGE, tokens: TEXT_PAGE,
  kept: null, brush: null};
let step, range = [0, 1];

// ── Arrays ──

async function unpack(id, bytes) {
  const text = $(`array${id}`).textContent;
  const packed = Uint8Array.fromBase64 ? Uint8Array.fromBase64(text)
    : Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const planes = new Uint8Array(await new Response(stream).arrayBuffer());
  const size = planes.length / bytes;
  const result = new ({1: Uint8Array, 2: Uint16Array, 4: Uint32Array}[bytes])(size);
  for (let plane = 0; plane < bytes; plane++)
    for (let i = 0, from = plane * size; i < size; i++) result[i] |= planes[from + i] << (8 * plane);
  return result;
}

async function load(index) {
  const s = data.steps[index];
  s.ready ??= (async () => {
    s.columns = {};
    const of = async (target, name, id, bytes) => { if (id !== null) target[name] = await unpack(id, bytes); };
    const jobs = [of(s.columns, "pieces", s.pieces, 4), of(s.columns, "mask", s.mask, 1)];
    for (const name of ["entropy", "log_prob", "sampler", "trained", "ratio", "clipped"])
      jobs.push(of(s.columns, name, s[name], 2));
    s.credits.forEach((credit, c) => {
      if (!credit) return;
      credit.columns = {};
      const names = data.methods[c].level === "token" ? ["share", "reward", "advantage"] : ["advantage"];
      for (const name of names) jobs.push(of(credit.columns, name, credit[name], 2));
    });
    await Promise.all(jobs);
    return s;
  })();
  return s.ready;
}

const codes = (column) => column && ((row, i) => NUMBERS[column[i]]);  // of a row's token, by its index in the step

function credited(s, c, name) {
  const credit = s.credits[c];
  if (!credit || credit[name] === null) return undefined;
  return credit.columns[name] ? codes(credit.columns[name]) : (row, i) => s.columns.mask[i] ? credit[name][row] : NaN;
}

function value(name = state.value, s = step) { return VALUES[name].of(s, state.credit, state.other); }

const length = (s, row) => s.offsets[row + 1] - s.offsets[row];

function position(s, row, token) {  // among the row's action tokens, from 1
  let t = 0;
  for (let i = s.offsets[row]; i <= s.offsets[row] + token; i++) t += s.columns.mask[i];
  return t;
}

function tokenAt(s, row, t) {  // index of the action token at position t, or -1
  for (let i = s.offsets[row]; i < s.offsets[row + 1]; i++)
    if (s.columns.mask[i] && --t === 0) return i - s.offsets[row];
  return -1;
}

const group = (s, row) => s.group.flatMap((one, other) => (one === s.group[row] ? [other] : []));
const success = (row, s = step) => (s.credits[state.credit] ?? s.credits.find(Boolean))?.success[row];

// ── Text ──

function format(x) {
  if (typeof x === "string") return x;
  return x == null || Number.isNaN(x) ? "–" : String(Number(x.toPrecision(3))).replaceAll("-", "−");
}

function visible(piece) {  // the text with invisible characters made visible
  const text = piece.replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]/g,
    (hidden) => `⟨U+${hidden.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`)
    .replaceAll("\n", "↵\n").replaceAll("\t", "⇥\t");
  if (text === "") return "…";  // a part of the next token's character
  return $("blanks").checked ? text.replaceAll(" ", "·") : /^ +$/.test(text) ? text.replaceAll(" ", "␣") : text;
}

const spoken = (piece) => piece === "" ? "part of a character" : JSON.stringify(piece);

function element(name, text, properties = {}) {
  const made = document.createElement(name);
  made.textContent = text;
  return Object.assign(made, properties);
}

// ── Colors ──

let palette;
function readPalette() {
  const style = getComputedStyle(document.documentElement);
  const read = (name) => style.getPropertyValue(name).trim().match(/\w\w/g).map((pair) => parseInt(pair, 16));
  const names = ["low", "high", "minus", "middle", "plus", "none", "link"];
  palette = Object.fromEntries(names.map((name) => [name, read(`--${name}`)]));
}

function color(x) {
  if (Number.isNaN(x)) return palette.none;
  const {signed, falling} = VALUES[state.value];
  let part = Math.min(1, Math.max(0, (x - range[0]) / (range[1] - range[0] || 1)));
  let from = palette.low, to = palette.high;
  if (signed) {
    [from, to] = [palette.middle, part < 0.5 ? palette.minus : palette.plus];
    part = Math.abs(2 * part - 1);
  } else if (falling) part = 1 - part;
  return from.map((start, channel) => Math.round(start + part * (to[channel] - start)));
}

const css = (rgb) => `rgb(${rgb.join(" ")})`;

function setRange() {  // from the 2nd to the 98th percentile of the step's tokens
  const {unit, signed, middle = 0, falling, text} = VALUES[state.value];
  const get = value(), size = step.offsets.at(-1), stride = Math.max(1, Math.floor(size / 20000)), found = [];
  for (let row = 0, i = 0; i < size; i += stride) {
    while (i >= step.offsets[row + 1]) row++;
    const x = get(row, i);
    if (!Number.isNaN(x)) found.push(signed ? Math.abs(x - middle) : x);
  }
  found.sort((a, b) => a - b);
  const at = (part) => found[Math.min(found.length - 1, Math.floor(part * found.length))] ?? 1;
  const low = ["entropy", "share"].includes(state.value) ? 0 : Number(at(0.02).toPrecision(3));
  const high = Number((at(0.98) || found.at(-1) || (low < 0 ? 0 : 1)).toPrecision(3));
  range = signed ? [middle - high, middle + high] : [low, high];
  $("low").textContent = text?.(range[0]) ?? `≤ ${format(range[0])}`;
  $("high").textContent = text?.(range[1]) ?? `≥ ${format(range[1])}`;
  $("unit").textContent = `${VALUES[state.value].name}, ${unit}`
    + (state.value === "difference" ? "; waved: the sign changes" : "");
  const stops = signed ? ["minus", "middle", "plus"] : falling ? ["high", "low"] : ["low", "high"];
  $("scale").style.background = `linear-gradient(to right, ${stops.map((name) => css(palette[name])).join(", ")})`;
}

// ── The list ──

function brushed(x) { return !state.brush || (x >= state.brush[0] && x <= state.brush[1]); }

function filtered() {
  const [prompt, outcome, cut] = ["prompt-filter", "outcome-filter", "cut-filter"].map((id) => $(id).value);
  const get = state.brush && value();
  const keys = {row: (r) => step.row[r], outcome: (r) => step.outcome[r], length: (r) => step.actions[r],
    advantage: (r) => step.advantage[r]};
  const key = keys[$("sort").value], order = Number($("order").value);
  return step.row.map((_, row) => row).filter((row) => {
    if (prompt !== "" && step.prompt[row] !== Number(prompt)) return false;
    if (outcome !== "" && success(row) !== Number(outcome)) return false;
    if (cut !== "" && step.truncated[row] !== Number(cut)) return false;
    if (!get) return true;
    for (let i = step.offsets[row]; i < step.offsets[row + 1]; i++) if (brushed(get(row, i))) return true;
    return false;
  }).sort((a, b) => order * (key(a) - key(b)) || step.row[a] - step.row[b]);
}

const sign = (good) => good === undefined ? "•" : good ? "✓" : "✗";
const said = (good) => good === undefined ? "" : good ? "correct, " : "incorrect, ";
const nameOf = (s, row) => `prompt ${s.group[row] + 1}, response ${group(s, row).indexOf(row) + 1}`;

function showList() {
  const rows = filtered();
  $("count").textContent = `${rows.length} of ${step.row.length} responses`;
  const sizes = {}, place = step.group.map((one) => (sizes[one] = (sizes[one] ?? 0) + 1));  // number of a row in its group
  $("list").replaceChildren(...rows.slice(0, state.shown).map((row) => {
    const item = document.createElement("li"), button = element("button", "", {type: "button"});
    const good = success(row);
    button.append(
      element("span", `${sign(good)} `, {className: good ? "mark correct" : "mark"}),
      `${step.group[row] + 1}.${place[row]} `,
      element("small", `outcome ${format(step.outcome[row])}, ${step.actions[row]} tokens`
        + `${step.guided?.[row] ? ", the guide's" : ""}${step.truncated[row] ? ", cut off" : ""}`
        + `, mean A ${format(step.advantage[row])}`));
    button.dataset.row = row;
    button.setAttribute("aria-current", row === state.row);
    button.setAttribute("aria-label", `${nameOf(step, row)}, ${said(good)}${button.lastChild.textContent}`);
    item.append(button);
    return item;
  }));
  $("more").hidden = rows.length <= state.shown;
}

// ── A response ──

function showTokens(box, s, row, limit, options) {
  const get = value(state.value, s), start = s.offsets[row], count = Math.min(length(s, row), limit);
  const differs = state.value === "difference";
  const [one, other] = [state.credit, state.other].map((c) => differs && credited(s, c, "advantage"));
  const spans = [];
  for (let token = 0; token < count; token++) {
    const piece = data.pieces[s.columns.pieces[start + token]], x = get ? get(row, start + token) : NaN;
    const span = element("span", visible(piece));
    const kinds = [];
    if (!s.columns.mask[start + token]) kinds.push("other");
    else span.style.backgroundColor = css(color(x));
    if (/^<[^<>\s]+>$/.test(piece) || /^\[[A-Z_]+\]$/.test(piece)) kinds.push("special");
    if (differs && one && other && one(row, start + token) * other(row, start + token) < 0) kinds.push("flips");
    if (state.brush && !brushed(x)) kinds.push("out");
    if (kinds.length) span.className = kinds.join(" ");
    if (options) {
      span.id = `token${token}`;
      span.setAttribute("role", "option");
      span.setAttribute("aria-selected", "false");
    }
    spans.push(span);
  }
  box.replaceChildren(...(spans.length ? spans : [element("em", "The response has no tokens.",
    options ? {role: "option"} : {})]));
}

function showResponse() {
  const row = state.row, s = step;
  $("reading-title").textContent = `Step ${s.step}: ${nameOf(s, row)}`;
  const good = success(row);
  $("facts").textContent = `${sign(good)} ${said(good)}outcome ${format(s.outcome[row])}`
    + `${s.penalty[row] ? `, length penalty ${format(s.penalty[row])}` : ""}, ${step.actions[row]} tokens`
    + `${length(s, row) > s.actions[row] ? `, and ${length(s, row) - s.actions[row]} between turns` : ""}`
    + `${s.guided?.[row] ? ", sampled by the guide" : ""}${s.truncated[row] ? ", cut off at the limit" : ""}`
    + `, mean advantage ${format(s.advantage[row])}`;
  $("said").replaceChildren(...Object.entries(s.texts?.[row] ?? {})
    .flatMap(([name, text]) => [element("dt", name), element("dd", text)]));
  $("prompt").lastElementChild.textContent = data.prompts[s.prompt[row]];
  const others = data.steps.flatMap((one, index) => one !== s && one.prompt.includes(s.prompt[row]) ? [index] : []);
  $("elsewhere").replaceChildren(...(others.length ? ["The same prompt in step ", ...others.map((index) => {
    const button = element("button", data.steps[index].step, {type: "button"});
    button.onclick = () => {
      state.kept = {step: state.step, row};
      openStep(index, data.steps[index].prompt.indexOf(s.prompt[row]));
    };
    return button;
  }), " (this response stays visible)"] : []));
  showTokens($("text"), s, row, state.tokens, true);
  const left = length(s, row) - state.tokens;
  $("more-tokens").hidden = left <= 0;
  $("more-tokens").textContent = `Show more of the ${left} tokens that follow`;
  $("kept").hidden = !state.kept;
  if (state.kept) {
    const kept = data.steps[state.kept.step], other = state.kept.row;
    $("kept").firstElementChild.textContent = `Step ${kept.step}: ${nameOf(kept, other)}, `
      + `outcome ${format(kept.outcome[other])}`;
    showTokens($("kept").children[1], kept, other, TEXT_PAGE, false);
  }
  for (const button of $("list").querySelectorAll("button"))
    button.setAttribute("aria-current", Number(button.dataset.row) === row);
  showMatrix();
  showToken(false);
}

// ── A token ──

function showToken(scroll = true) {
  const s = step, row = state.row, count = length(s, row);
  $("text").querySelector(".chosen")?.setAttribute("aria-selected", "false");
  $("text").querySelector(".chosen")?.classList.remove("chosen");
  if (!count) {
    for (const box of [$("token"), $("values"), $("formulas"), $("peers").tBodies[0]]) box.replaceChildren();
    return;
  }
  state.token = Math.min(Math.max(0, state.token), count - 1);
  if (state.token >= state.tokens) {
    state.tokens = state.token + TEXT_PAGE;
    showResponse();
    return;
  }
  const i = s.offsets[row] + state.token, piece = data.pieces[s.columns.pieces[i]], t = position(s, row, state.token);
  const span = $(`token${state.token}`);
  span.classList.add("chosen");
  span.setAttribute("aria-selected", "true");
  $("text").setAttribute("aria-activedescendant", span.id);
  if (scroll) span.scrollIntoView({block: "nearest"});
  const acts = s.columns.mask[i];
  $("token").textContent = acts ? `${spoken(piece)}, token t = ${t} of ${s.actions[row]}`
    : `${spoken(piece)}, not sampled by the policy, so it has no credit`;
  const pairs = [];
  for (const [name, {name: label, unit, text = format, of}] of Object.entries(VALUES)) {
    const get = of(s, state.credit, state.other);
    if (get && acts && (name !== "difference" || state.other !== state.credit)) {
      pairs.push(element("dt", label), element("dd", `${text(get(row, i))} ${unit === "nats" ? unit : ""}`));
      pairs.at(-1).dataset.value = name;
    }
  }
  $("values").replaceChildren(...pairs);
  $("formulas").replaceChildren(...(acts ? [state.credit, ...(state.other === state.credit ? [] : [state.other])]
    .flatMap((c) => formulas(c, row, i, t)) : []));
  const at = group(s, row).map((peer) => [peer, t ? tokenAt(s, peer, t) : -1]);
  const [H, share, A] = [codes(s.columns.entropy), credited(s, state.credit, "share"),
    credited(s, state.credit, "advantage") ?? codes(s.columns.trained)];
  $("peers").tBodies[0].replaceChildren(...at.map(([peer, token], n) => {
    const line = document.createElement("tr"), place = s.offsets[peer] + token;
    const button = element("button", `${sign(success(peer))} ${n + 1}`, {type: "button", disabled: token < 0});
    button.setAttribute("aria-label", `${said(success(peer))}go to response ${n + 1}`);
    button.onclick = () => { state.token = token; openRow(peer); };
    const first = document.createElement("td");
    first.append(button);
    const cells = token < 0 ? ["ended", "", "", ""] : [spoken(data.pieces[s.columns.pieces[place]]),
      ...[H, share, A].map((get) => (get ? format(get(peer, place)) : "–"))];
    line.append(first, ...cells.map((text) => element("td", text)));
    line.setAttribute("aria-current", peer === row);
    return line;
  }));
  markMatrix(t);
}

function formulas(c, row, i, t) {
  const credit = step.credits[c], method = data.methods[c];
  if (!credit) return [];
  const good = credit.success[row], peers = group(step, row).filter((peer) => credit.success[peer] === good);
  const [share, reward, A] = ["share", "reward", "advantage"].map((name) => format(credited(step, c, name)?.(row, i)));
  const kind = good ? "correct" : "incorrect", mean = method.mean === "geometric" ? "geometric mean" : "mean";
  const weight = (x) => good ? format(x) : `1/${format(x)}`;
  let own, compared, words;
  if (credit.row_entropy) {
    const alive = peers.filter((peer) => length(step, peer));
    own = weight(credit.row_entropy[row]);
    compared = `mean(${list(alive.map((peer) => weight(credit.row_entropy[peer])))})`;
    words = `each response's ${mean} entropy, over the group's ${alive.length} ${kind}`;
  } else {
    const H = (place) => Math.max(method.entropy_eps, NUMBERS[step.columns.entropy[place]]);
    const alive = peers.map((peer) => [peer, tokenAt(step, peer, t)]).filter(([, token]) => token >= 0);
    own = weight(H(i));
    compared = `${mean}(${method.compare !== "position" ? weight("H")
      : list(alive.map(([peer, token]) => weight(H(step.offsets[peer] + token))))})`;
    words = {position: `over the ${alive.length} ${kind} alive at t = ${t}`,
      response: "over the tokens of this response",
      group: `over the tokens of the group's ${kind} responses`}[method.compare];
  }
  const penalty = step.penalty[row];
  const filled = method.rewards[good]?.replaceAll("{outcome}", format(step.outcome[row])).replaceAll("{share}", share)
    + (penalty ? ` ${penalty < 0 ? "−" : "+"} ${format(Math.abs(penalty))}` : "");
  const uniform = new Set(group(step, row).map((peer) => credit.success[peer])).size === 1;
  const line = (text, note = "") => {
    const made = element("p", text, {className: "formula"});
    made.append(element("small", note));
    return made;
  };
  const lines = [element("h3", method.label, {title: method.settings})];
  if (credit.reward === null) return [...lines, line(`A = ${A}`)];
  if (method.known) lines.push(line(`share = ${good ? own : `(${own})`} / ${compared} = ${share}`, words));
  lines.push(line(`${good ? "r⁺" : "r⁻"} = ${method.known ? `${filled} = ` : ""}${reward}`));
  lines.push(uniform && A === "0" ? line("A = 0", `the whole group is ${kind}: there is nothing to compare`)
    : line(`A = (${reward} − ${format(credit.mean[row])}) / ${format(credit.std[row])} = ${A}`));
  return lines;
}

const list = (texts) => texts.length > 16 ? `${texts.slice(0, 16).join(", ")}, …` : texts.join(", ");

// ── The group's matrix ──

let matrix = {rows: [], width: 1, stride: 1};
function showMatrix() {
  const s = step, peers = group(s, state.row), get = value();
  const width = Math.max(1, ...peers.map((peer) => length(s, peer))), stride = Math.ceil(width / 8192);
  matrix = {rows: peers, width: Math.ceil(width / stride), stride};
  const canvas = $("matrix").firstElementChild, high = Math.max(6, Math.min(18, Math.floor(280 / peers.length)));
  canvas.width = matrix.width;
  canvas.height = peers.length;
  canvas.style.height = `${high * peers.length}px`;
  const image = new ImageData(matrix.width, peers.length);
  peers.forEach((peer, y) => {
    const actions = [];
    for (let i = s.offsets[peer]; i < s.offsets[peer + 1]; i++) if (s.columns.mask[i]) actions.push(i);
    for (let x = 0; x < matrix.width; x++) {
      const i = actions[x * stride];
      if (i === undefined) continue;
      image.data.set([...color(get ? get(peer, i) : NaN), 255], 4 * (y * matrix.width + x));
    }
  });
  canvas.getContext("2d").putImageData(image, 0, 0);
  canvas.setAttribute("aria-label", `${VALUES[state.value].name} of the group's ${peers.length} responses at up to `
    + `${width} positions; the table of the group at a position has the numbers`);
}

function markMatrix(t) {
  const mark = $("here").style, y = matrix.rows.indexOf(state.row);
  $("here").hidden = !t;
  mark.left = `calc(${(100 * (Math.floor((t - 1) / matrix.stride))) / matrix.width}% - 2px)`;
  mark.width = `max(5px, calc(${100 / matrix.width}% + 4px))`;
  mark.top = `calc(${(100 * y) / matrix.rows.length}% - 1px)`;
  mark.height = `calc(${100 / matrix.rows.length}% + 2px)`;
}

// ── The histogram ──

let bars = {low: 0, high: 1};
function showHistogram() {
  const get = value(), canvas = $("histogram"), counts = new Array(BARS).fill(0);
  let low = Infinity, high = -Infinity, total = 0;
  const each = (use) => {
    for (let row = 0; row < step.row.length; row++)
      for (let i = step.offsets[row]; i < step.offsets[row + 1]; i++) { const x = get(row, i); if (x === x) use(x); }
  };
  each((x) => { if (x < low) low = x; if (x > high) high = x; });
  if (low > high) [low, high] = [0, 1];
  if (low === high) high = low + 1;
  each((x) => { counts[Math.min(BARS - 1, Math.floor((BARS * (x - low)) / (high - low)))]++; total++; });
  bars = {low, high};
  const context = canvas.getContext("2d"), top = Math.log1p(Math.max(...counts)), wide = canvas.width / BARS;
  context.clearRect(0, 0, canvas.width, canvas.height);
  counts.forEach((count, bar) => {
    const from = low + (bar * (high - low)) / BARS, inside = brushed(from + (high - low) / BARS / 2);
    context.fillStyle = css(inside ? palette.link : palette.none);
    const tall = top && (canvas.height * Math.log1p(count)) / top;
    context.fillRect(bar * wide, canvas.height - tall, wide - 1, tall);
  });
  $("histogram-title").textContent = `${VALUES[state.value].name} of ${total} tokens`;
  canvas.setAttribute("aria-label", `Histogram from ${format(low)} to ${format(high)}, heights logarithmic`);
  $("from").placeholder = format(low);
  $("to").placeholder = format(high);
}

function brush(from, to) {
  state.brush = from === null && to === null ? null : [from ?? -Infinity, to ?? Infinity];
  showHistogram();
  showList();
  showResponse();
}

// ── Navigation ──

function openRow(row, focus = false) {
  state.row = row;
  state.tokens = TEXT_PAGE;
  showResponse();
  if (focus) $("text").focus();
}

function openAt(row, t, focus) {  // at position t, or at its end
  const token = tokenAt(step, row, t);
  state.token = token < 0 ? length(step, row) - 1 : token;
  openRow(row, focus);
  showToken();
}

function showValue() {
  setRange();
  showHistogram();
  showList();
  showResponse();
}

function offerValues() {
  const names = Object.keys(VALUES).filter((name) => value(name));
  $("value").replaceChildren(...names.map((name) => element("option", VALUES[name].name, {value: name})));
  if (!names.includes(state.value)) state.value = names.includes("trained") ? "trained" : names[0];
  $("value").value = state.value;
}

async function openStep(index, row = Math.max(0, data.steps[index].advantage.findIndex(Boolean))) {
  state.step = index;
  $("step").value = index;
  step = data.steps[index];
  state.brush = null;
  $("brush").reset();
  const prompts = [...new Map(step.prompt.map((prompt, row) => [prompt, step.group[row]]))];
  const ending = (prompt) => data.prompts[prompt].trim().replace(/\s+/g, " ").slice(-60);
  $("prompt-filter").replaceChildren(element("option", "all", {value: ""}), ...prompts.map(([prompt, number]) =>
    element("option", `${number + 1}: ${ending(prompt)}`, {value: prompt})));
  const {model, estimator, seed, batch_rows, policy_version} = step.settings;
  $("about").textContent = `${model}, trained with ${estimator}, seed ${seed}; ${step.row.length} of ${batch_rows} `
    + `responses, sampled by the policy after ${policy_version} steps`;
  $("notes").lastElementChild.replaceChildren(...step.notes.map((note) => element("li", note)));
  state.row = row;
  state.token = 0;
  if (step.credits[state.credit] === null) {
    state.credit = Math.max(0, step.credits.findIndex(Boolean));
    $("credit").value = state.credit;
  }
  showList();  // needs no array, so it appears before they are unpacked
  await new Promise((painted) => setTimeout(painted));
  await load(index);
  if (step !== data.steps[index]) return;  // the user has chosen another meanwhile
  offerValues();
  showValue();
  document.body.dataset.ready = "true";
}

const MOVES = {
  ArrowRight: 1, ArrowLeft: -1, PageDown: 20, PageUp: -20, Home: -Infinity, End: Infinity,
};
$("text").addEventListener("keydown", (event) => {
  let move = MOVES[event.key];
  if (event.key.startsWith("Arrow") && move && getComputedStyle($("text")).direction === "rtl") move = -move;
  if (move) { state.token = Math.min(length(step, state.row) - 1, Math.max(0, state.token + move)); showToken(); }
  else if (event.key === "ArrowUp" || event.key === "ArrowDown") {
    const peers = group(step, state.row), t = Math.max(1, position(step, state.row, state.token));
    const row = peers[peers.indexOf(state.row) + (event.key === "ArrowUp" ? -1 : 1)];
    if (row !== undefined) openAt(row, t, true);
  } else return;
  event.preventDefault();
});
for (const kind of ["click", "mouseover"])
  $("text").addEventListener(kind, (event) => {
    const place = event.target.id?.match(/^token(\d+)$/);
    if (place) { state.token = Number(place[1]); showToken(false); }
  });
$("list").addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (button) { state.token = 0; openRow(Number(button.dataset.row)); }
});
$("matrix").firstElementChild.addEventListener("click", (event) => {
  const box = event.target.getBoundingClientRect();
  const row = matrix.rows[Math.floor(((event.clientY - box.top) / box.height) * matrix.rows.length)];
  openAt(row, 1 + matrix.stride * Math.floor(((event.clientX - box.left) / box.width) * matrix.width));
});
let dragged = null;
const atPointer = (event) => {
  const box = $("histogram").getBoundingClientRect();
  return bars.low + Math.min(1, Math.max(0, (event.clientX - box.left) / box.width)) * (bars.high - bars.low);
};
$("histogram").addEventListener("pointerdown", (event) => {
  dragged = atPointer(event);
  $("histogram").setPointerCapture(event.pointerId);
});
$("histogram").addEventListener("pointerup", (event) => {
  if (dragged === null) return;  // the drag began elsewhere
  const [from, to] = [dragged, atPointer(event)].sort((a, b) => a - b);
  dragged = null;
  if (from === to) return;
  $("from").value = Number(from.toPrecision(3));
  $("to").value = Number(to.toPrecision(3));
  brush(Number($("from").value), Number($("to").value));
});
const given = (id) => ($(id).value === "" ? null : Number($(id).value));
$("brush").addEventListener("change", () => brush(given("from"), given("to")));
$("brush").addEventListener("reset", () => { if (state.brush) setTimeout(() => brush(null, null)); });
for (const id of ["filters", "colors", "brush"]) $(id).addEventListener("submit", (event) => event.preventDefault());
$("filters").addEventListener("change", () => { state.shown = LIST_PAGE; showList(); });
$("more").onclick = () => { state.shown += LIST_PAGE; showList(); };
$("more-tokens").onclick = () => { state.tokens += TEXT_PAGE; showResponse(); };
$("step").onchange = () => openStep(Number($("step").value));
$("value").onchange = () => {
  state.value = $("value").value;
  state.brush = null;
  $("from").value = $("to").value = "";
  showValue();
};
for (const name of ["credit", "other"])
  $(name).onchange = () => { state[name] = Number($(name).value); offerValues(); showValue(); };
$("blanks").onchange = () => showResponse();
$("keep").onclick = () => { state.kept = {step: state.step, row: state.row}; showResponse(); };
$("let-go").onclick = () => { state.kept = null; showResponse(); };
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { readPalette(); showValue(); });

readPalette();
$("step").replaceChildren(...data.steps.map((one, index) => element("option", one.step, {value: index})));
for (const name of ["credit", "other"])
  $(name).replaceChildren(...data.methods.map((method, c) => element("option", method.label, {value: c})));
state.other = Math.min(1, data.methods.length - 1);
$("other").value = state.other;
openStep(0);
