"use strict";
// Text reaches the page through textContent alone; there is no innerHTML and no request in this file.

const PAGE_TOKENS = 4000; // tokens on the page at once
const LEVELS = 8;
const GAINS = [0.1, 0.5, 1, 2, 4]; // nats from which on a gain has the next color
const SHOWN = new Map([["\n", "↵"], ["\t", "⇥"], [" ", "␣"], ["\r", "␍"], ["\u00a0", "⍽"]]);
// what would reorder or hide its neighbors, and what nobody sees but what joins letters and emoji or chooses between their forms
const ODD = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u2028\u2029\ufff9-\ufffb]|(?![\u200c\u200d\ufe0e\ufe0f])\p{Default_Ignorable_Code_Point}/gu;

const $ = (id) => document.getElementById(id);

function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in element) element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

// ---- data

const TYPES = { int16: Int16Array, uint8: Uint8Array, uint16: Uint16Array, uint32: Uint32Array, float32: Float32Array };

async function unpack(name, type) {
  const block = $(`data-${name}`);
  const binary = atob(block.textContent);
  block.remove();
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i++) bytes[i] = binary.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new TYPES[type](await new Response(stream).arrayBuffer());
}

const decode = (bytes) => new TextDecoder("utf-8", { ignoreBOM: true }).decode(bytes);

let about, data, text, labels, offsets, units, pageStarts;

async function load() {
  about = JSON.parse($("data-manifest").textContent);
  data = {};
  for (const [name, { type }] of Object.entries(about.arrays)) data[name] = await unpack(name, type);
  text = decode(data.text);
  labels = JSON.parse(decode(data.labels));
  data.text = data.labels = null;
  const n = data.lengths.length;
  offsets = new Uint32Array(n + 1);
  for (let i = 0; i < n; i++) offsets[i + 1] = offsets[i] + data.lengths[i];
  // a unit is what is shown as one: the tokens of a character together; units[i] is the first token of that of token i
  units = new Uint32Array(n);
  for (let i = 0, first = 0; i < n; i++) {
    units[i] = first;
    if (data.lengths[i] > 0) first = i + 1;
  }
  pageStarts = [0];
  for (let start = 0; start + PAGE_TOKENS < n;) {
    start = pageEnd(start);
    if (start >= n) break;
    pageStarts.push(start);
  }
}

/** Return where a page that begins at a token ends: after a line, if one ends in its last quarter, and never inside a unit. */
function pageEnd(start) {
  const last = start + PAGE_TOKENS;
  for (let i = last - 1; i > start + PAGE_TOKENS * 0.75; i--) if (pieceOf(i).includes("\n")) return i + 1;
  const first = units[last];
  return first > start ? first : unitEnd(last);
}

const nTokens = () => data.lengths.length;
const pieceOf = (i) => text.slice(offsets[i], offsets[i + 1]);
const unitText = (first, end) => text.slice(offsets[first], offsets[end]);
function unitEnd(i) {
  let end = i + 1;
  while (end < nTokens() && units[end] === units[i]) end++;
  return end;
}
const labelOf = (i) => labels[data.tokens[i]];
const nats = (i) => (i > 0 ? data.nats[i - 1] * about.nats_step : 0);
const without = (i) => (i > 0 ? data.without[i - 1] * about.nats_step : 0);
const gain = (i) => without(i) - nats(i);
const square = (byte) => (byte / 255) ** 2;
const sum = (first, end, f) => {
  let total = 0;
  for (let i = first; i < end; i++) total += f(i);
  return total;
};
const border = (i) => Math.floor((i - 1) / about.tgt_len) * about.tgt_len; // first token of the segment that predicts token i
const inMemory = (key, i) => about.mem_len > 0 && key < border(i) - about.ext_len;

function find(array, value) {
  let low = 0, high = array.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (array[middle] <= value) low = middle + 1;
    else high = middle;
  }
  return low - 1; // last place whose value is at most this one
}

// ---- words and numbers

let language = "en";

/** Return a template in the chosen language; `about.chinese` maps templates whose values are written {0}, {1} … */
function t(parts, ...values) {
  const english = parts.reduce((words, part, i) => `${words}{${i - 1}}${part}`);
  return inLanguage(english).replace(/\{(\d)\}/g, (_, i) => values[i]);
}
const plural = (n, noun) => inLanguage(`{0} ${noun}${n === 1 ? "" : "s"}`).replace("{0}", count(n));
const inLanguage = (english) => (language === "zh" ? about?.chinese[english] : null) ?? english;

let pageWords = []; // nodes of the template that have words, each with its English ones

function findPageWords() {
  for (const element of document.body.querySelectorAll("*")) {
    const nodes = [...element.childNodes, element.getAttributeNode("aria-label"), element.getAttributeNode("placeholder")];
    for (const node of nodes) if (node?.nodeValue?.trim() in about.chinese) pageWords.push([node, node.nodeValue]);
  }
}

function speak(chosen) {
  document.documentElement.lang = $("language").value = language = chosen;
  for (const [node, english] of pageWords) node.nodeValue = english.replace(/\S(.*\S)?/s, (words) => inLanguage(words));
  showHeader();
  showLegend();
  showPassages();
  showAttention();
  showNotes();
  showPage(state.page);
  inspect(state.at);
  markHeld();
  search();
  drawAll();
}

const visible = (string) => string.replace(/[\n\t \r\u00a0]/g, (c) => SHOWN.get(c)).replace(ODD, codePoint);
const codePoint = (c) => `‹U+${c.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}›`;
const count = (n) => n.toLocaleString("en");
function percent(p) {
  if (p >= 0.9995) return "> 99.9 %";
  if (p < 0.0001) return "< 0.01 %";
  return `${(p * 100).toFixed(p < 0.01 ? 2 : 1)} %`;
}
const signed = (x, digits = 2) => `${x < 0 ? "−" : "+"}${Math.abs(x).toFixed(digits)}`;

// ---- state

const state = { mode: "surprisal", page: 0, at: null, held: false, head: -1, cause: 0, matches: [], match: -1 };
let spans = new Map(); // first token of a unit -> its elements on the page
let marked = [];

// ---- header

function showHeader() {
  const { totals, kind } = about;
  $("name").textContent = visible(about.name).replaceAll("␣", " ");
  document.title = t`${$("name").textContent} explained`;
  const heads = about.heads ? t`, ${plural(about.heads, "head")} each` : "";
  const attention = about.attention && about.attention !== kind ? ` (${about.attention})` : "";
  const extended = about.ext_len ? t`, ${count(about.ext_len)} read again before each` : "";
  const memory = about.state ? t`a state carried on` : about.mem_len ? t`a memory of ${count(about.mem_len)}` : t`no memory`;
  $("model").textContent =
    t`${about.run}: ${kind}${attention}, ${plural(about.layers, "layer")}${heads}; segments of ${count(about.tgt_len)} tokens${extended}, ${memory}; ${about.precision}`;
  const card = (name, value, note) => make("div", {}, make("dt", { textContent: name }), make("dd", { textContent: value }, " ", make("small", { textContent: note })));
  const instead = (name) => (about.remembers ? t`${totals[name].toFixed(3)} without memory` : "");
  const cards = [
    card(t`Tokens`, count(nTokens()), t`of ${count(about.vocabulary)} kinds`),
    card(t`Nats per token`, totals.loss.toFixed(3), instead("loss_without_memory")),
    card({ character: t`Bits per character`, word: t`Bits per word`, id: t`Bits per id` }[about.unit], totals.bpc.toFixed(3), instead("bpc_without_memory")),
  ];
  if (about.remembers) cards.push(card(t`Memory is worth`, totals.memory_is_worth_bpc.toFixed(3), { character: t`bits per character`, word: t`bits per word`, id: t`bits per id` }[about.unit]));
  $("totals").replaceChildren(...cards);
}

// ---- text

function level(first, end) {
  if (end <= 1) return "";
  if (state.mode === "surprisal") {
    const share = sum(first, end, nats) / Math.log(about.vocabulary);
    const step = Math.min(LEVELS, Math.floor(share * LEVELS));
    return step > 0 ? `s${step}` : "";
  }
  const value = sum(first, end, gain);
  const step = GAINS.filter((limit) => Math.abs(value) >= limit).length;
  return step ? `${value > 0 ? "g" : "m"}${step}` : "";
}

function showPage(page) {
  state.page = Math.max(0, Math.min(page, pageStarts.length - 1));
  const first = pageStarts[state.page], last = pageStarts[state.page + 1] ?? nTokens();
  spans = new Map();
  marked = [];
  const lines = document.createDocumentFragment();
  let line = make("div", { dir: "auto" });
  for (let i = first; i < last;) {
    const end = Math.min(unitEnd(i), last);
    const color = level(i, end), elements = [];
    const add = (content, extra) => {
      const element = make("span", { textContent: content, className: `${color} ${extra}` });
      element.token = i;
      elements.push(element);
      line.append(element);
    };
    const parts = unitText(i, end).split("\n");
    parts.forEach((part, k) => {
      if (k > 0) {
        add("↵", "end");
        lines.append(line);
        line = make("div", { dir: "auto" });
      }
      if (part) showPart(part, i, end, add);
    });
    if (unitText(i, end) === "") add(visible(labelOf(end - 1)), "odd"); // an id that stands for no text
    spans.set(i, elements);
    i = end;
  }
  lines.append(line);
  $("text").replaceChildren(lines);
  const on = state.page + 1 < pageStarts.length;
  for (const suffix of ["", "-below"]) {
    $(`back${suffix}`).disabled = state.page === 0;
    $(`on${suffix}`).disabled = !on;
  }
  $("where").textContent = t`tokens ${count(first + 1)}–${count(last)} of ${count(nTokens())} · page ${state.page + 1} of ${count(pageStarts.length)}`;
  showMatches();
  drawMap();
}

/** Add a part of a line; what is invisible or would reorder its neighbors is named instead, bytes of no character by value. */
function showPart(part, first, end, add) {
  if (part.includes("\ufffd") && end - first === 1 && labelOf(first).startsWith("\\x")) return add(labelOf(first), "odd");
  let from = 0;
  for (const odd of part.matchAll(ODD)) {
    if (odd.index > from) add(part.slice(from, odd.index), "");
    add(codePoint(odd[0]), "odd");
    from = odd.index + odd[0].length;
  }
  if (from < part.length) add(part.slice(from), "");
}

function recolor() {
  for (const [first, elements] of spans) {
    const color = level(first, unitEnd(first));
    for (const element of elements) {
      element.className = element.className.replace(/\b[sgm]\d\b/, "").trim();
      if (color) element.classList.add(color);
    }
  }
}

function goTo(token, { flash = false, hold = true } = {}) {
  token = units[Math.max(0, Math.min(token, nTokens() - 1))];
  const page = find(pageStarts, token);
  if (page !== state.page) showPage(page);
  inspect(token);
  state.held = hold;
  markHeld();
  const element = spans.get(token)?.[0];
  element?.scrollIntoView({ block: "center" });
  if (flash) for (let i = token; i < token + 12; i++) for (const e of spans.get(i) ?? []) {
    e.classList.add("flash");
    e.addEventListener("animationend", () => e.classList.remove("flash"), { once: true });
  }
}

const markHeld = () => { for (const e of spans.get(state.at) ?? []) e.classList.toggle("held", state.held); };

// ---- legend, modes

function showLegend() {
  const swatches = (classes) => make("span", { className: "steps" }, ...classes.map((name) => make("i", { className: name })));
  const legend = $("legend");
  if (state.mode === "surprisal") {
    const most = Math.log(about.vocabulary);
    legend.replaceChildren(t`expected (0 nats)`, swatches(["", ...Array.from({ length: LEVELS }, (_, i) => `s${i + 1}`)]), t`surprising (${most.toFixed(1)} nats and more: no better than any of ${count(about.vocabulary)})`);
  } else {
    const steps = GAINS.map((_, i) => i + 1);
    legend.replaceChildren(t`memory misled (4 nats)`, swatches([...steps.slice().reverse().map((i) => `m${i}`), "", ...steps.map((i) => `g${i}`)]), t`memory helped (4 nats and more)`);
  }
  legend.setAttribute("aria-label", legend.textContent);
}

// ---- inspector

function unmark() {
  for (const element of marked) {
    element.classList.remove("active", "held", "key", "far", "raised", "lowered", "border", "oldest");
    element.style.removeProperty("--thick");
  }
  marked = [];
}

function inspect(first) {
  unmark();
  state.at = first;
  const panel = $("inspector");
  if (first === null) return panel.replaceChildren(...invitation());
  for (const element of spans.get(first) ?? []) {
    element.classList.add("active");
    marked.push(element);
  }
  const end = unitEnd(first), parts = [make("button", { type: "button", className: "quiet close", "aria-label": t`Close`, textContent: "×" })];
  const name = unitText(first, end) || labelOf(end - 1);
  parts[0].addEventListener("click", letGo);
  parts.push(make("h2", { textContent: t`Token` }), make("p", { className: "token" }, make("bdi", { textContent: visible(name) })));
  if (end - first > 1) parts.push(make("p", { className: "hint", textContent: t`One character of ${end - first} tokens: ${range(first, Math.min(end, first + 8)).map((i) => visible(labelOf(i))).join(" ")}` }));
  for (const i of range(first, Math.min(end, first + 4))) parts.push(...tokenFacts(i, end - first > 1));
  panel.replaceChildren(...parts);
  panel.scrollTop = 0;
}

function letGo() {
  state.held = false;
  inspect(null);
}

const invitation = () => [
  make("h2", { textContent: t`Token` }),
  make("p", { className: "hint", textContent: t`Point at the text, or go to it with Tab and the arrow keys. A click or Enter holds a token, Escape lets go.` }),
];
const range = (a, b) => Array.from({ length: Math.max(0, b - a) }, (_, i) => a + i);

function tokenFacts(i, isPart) {
  const place = i > 0 ? t` · segment ${count(border(i) / about.tgt_len + 1)}, place ${(i - 1) % about.tgt_len + 1} of ${about.tgt_len}` : "";
  const facts = [make("p", { className: "hint", textContent: `${isPart ? `${visible(labelOf(i))}: ` : ""}${t`number ${count(i + 1)}`}${place}` })];
  if (i === 0) return [...facts, make("p", { className: "verdict", textContent: t`Nothing comes before the first token, so nothing predicts it.` })];
  const rows = [chanceRow(about.remembers ? t`with memory` : t`probability`, Math.exp(-nats(i)), t`${nats(i).toFixed(2)} nats`, "")];
  if (about.remembers) rows.push(chanceRow(t`without`, Math.exp(-without(i)), t`${without(i).toFixed(2)} nats`, "without"));
  facts.push(make("table", {}, make("tbody", {}, ...rows)));
  if (about.remembers) facts.push(make("p", { className: "verdict", textContent: verdict(gain(i)) }));
  const rank = data.rank[i - 1];
  facts.push(make("h2", { textContent: t`Would have preferred` }));
  facts.push(make("p", { className: "hint", textContent: rank ? t`${rank === 65535 ? t`65,535 or more` : count(rank)} of ${count(about.vocabulary)} tokens seemed likelier` : t`this very token` }));
  const best = range(0, about.top).map((j) => {
    const token = data.top[(i - 1) * about.top + j], own = token === data.tokens[i];
    const p = own ? Math.exp(-nats(i)) : square(data.chance[(i - 1) * about.top + j]);
    return chanceRow(visible(labels[token]), p, own ? "←" : "", "", true, own);
  });
  facts.push(make("table", {}, make("tbody", {}, ...best)));
  if (about.causes) facts.push(...causes(i));
  if (about.keys) facts.push(...looks(i));
  return facts;
}

const times = (x) => (x < 20 ? x.toFixed(1) : x < 1e6 ? count(Math.round(x)) : t`over a million`);

function verdict(value) {
  if (Math.abs(value) < 0.005) return t`Memory made no difference.`;
  const size = signed(value), factor = times(Math.exp(Math.abs(value)));
  if (factor === "1.0") return t`Memory hardly changed it: ${size} nats.`;
  return value > 0 ? t`Memory helped: ${size} nats, ${factor} times likelier with it.` : t`Memory misled: ${size} nats, ${factor} times less likely with it.`;
}

function chanceRow(name, p, note, kind, isWord = false, own = false) {
  const meter = make("i", { className: `meter ${kind}` });
  meter.style.width = `${Math.max(1, p * 100)}%`;
  return make("tr", { className: own ? "own" : "" },
    make("td", { className: isWord ? "word" : "name" }, make("bdi", { textContent: name })),
    make("td", { className: "size" }, meter),
    make("td", { className: "number", textContent: percent(p) }),
    make("td", { className: "number hint", textContent: note }));
}

// ---- causes of a token

/** Return what raised or lowered a prediction: by leaving tokens out, alone or against the rival, and estimated. */
function causes(i) {
  const title = make("h2", { textContent: t`What raised or lowered it` }), row = rowOf(data.explained, i);
  if (row < 0) return [title, absent(data.explained, i)];
  const listed = (list) => range(0, about.causes).map((k) => (row * 3 + list) * about.causes + k)
    .map((at) => ({ place: i - data.causes[at], nats: data.effects[at] * about.nats_step, far: inMemory(i - data.causes[at], i) }))
    .filter((cause) => Math.abs(cause.nats) >= 0.005);
  const hint = (words) => make("p", { className: "hint", textContent: words });
  const table = (list, from) => !list.length ? hint(t`No single token changes it by 0.005 nats.`) : make("table", {}, make("tbody", {}, ...list.map((cause) =>
    keyRow(i, cause, { textContent: signed(cause.nats), className: `number ${cause.nats > 0 ? "raised" : "lowered"}` }, from ?? (cause.far ? t`↑ memory` : t`segment`)))));
  const chosen = listed(Math.max(state.cause, 0)), far = listed(2), rival = visible(labels[data.rivals[row]]);
  if (state.cause >= 0) mark(i, chosen);
  if (!about.keys) return [title, table(chosen), hint(t`Nats, estimated by gradients: an lstm has no attention from which a token could be left out.`)];
  const button = (list, words) => Object.assign(make("button", { type: "button", className: "badge", textContent: words, "aria-pressed": String(state.cause === list) }), { cause: list });
  const facts = [title, make("p", {}, button(0, t`this token`), " ", button(1, t`this and not ${rival}`)), table(chosen)];
  facts.push(hint(t`Nats that the prediction loses if all heads leave a token out in this segment, exactly, from 0.005 on. What later tokens took from it before stays.`));
  if (!far.length) return facts;
  const trust = about.trust ? t`For nearer tokens, such estimates agree with leaving out by a rank correlation of ${signed(about.trust[0])}; attention, by ${signed(about.trust[1])}.` : "";
  return [...facts, table(far, t`↑ earlier`), hint(t`From before the memory, estimated: by the gradient through ${about.followed} segments. ${trust}`)];
}

/** Return the row of a token in an array of those for which something is kept, or -1. */
function rowOf(places, i) {
  const row = find(places, i);
  return row >= 0 && places[row] === i ? row : -1;
}

function absent(places, i) {
  const near = places[Math.max(0, find(places, i))];
  return make("p", { className: "hint" }, t`Not kept for this token; see the notes below. `, make("a", { href: `#t${near + 1}`, textContent: t`The last one before it that has it` }));
}

// ---- attention of a token

function looks(i) {
  const title = make("h2", { textContent: t`Where the heads looked` });
  const row = rowOf(data.places, i);
  if (row < 0) return [title, absent(data.places, i)];
  const nHead = about.layers * about.heads;
  if (state.head >= nHead) state.head = -1;
  const keys = keysOf(row, i);
  if (state.cause < 0 || !about.causes || rowOf(data.explained, i) < 0) mark(i, keys);
  return [title, headGrid(row, about.mem_len > 0), keyTable(keys, i)];
}

/** Return the keys that the chosen head, or all of them together, looked at: place, weight, whether in memory. */
function keysOf(row, i) {
  const nHead = about.layers * about.heads, K = about.keys;
  const heads = state.head < 0 ? range(0, nHead) : [state.head];
  const found = new Map();
  for (const head of heads) for (let k = 0; k < K; k++) {
    const at = (row * nHead + head) * K + k, weight = square(data.weights[at]) / heads.length;
    if (weight === 0) continue;
    const place = i - 1 - data.distances[at];
    found.set(place, (found.get(place) ?? 0) + weight);
  }
  return [...found].map(([place, weight]) => ({ place, weight, far: inMemory(place, i) })).sort((a, b) => b.weight - a.weight).slice(0, 24);
}

function headGrid(row, remembers) {
  const nHead = about.layers * about.heads;
  const grid = make("div", { className: "heads", role: "group", "aria-label": t`Heads` });
  grid.style.gridTemplateColumns = `auto repeat(${about.heads}, minmax(0, 1fr))`;
  for (let layer = 0; layer < about.layers; layer++) {
    grid.append(make("span", { textContent: t`layer ${layer + 1}` }));
    for (let head = 0; head < about.heads; head++) {
      const index = layer * about.heads + head, share = square(data.memory[row * nHead + index]);
      const what = t`layer ${layer + 1}, head ${head + 1}` + (remembers ? t`: ${percent(share)} of its attention in memory` : "");
      const button = make("button", { type: "button", title: what, "aria-label": what, "aria-pressed": String(state.head === index) });
      button.style.setProperty("--share", share.toFixed(3));
      button.head = index;
      grid.append(button);
    }
  }
  const all = make("button", { type: "button", className: "badge", textContent: t`all heads`, "aria-pressed": String(state.head < 0) });
  all.head = -1;
  const note = remembers ? t`The stronger the color, the more of a head’s attention went to memory. ` : "";
  return make("div", {}, make("p", { className: "hint" }, note, t`Choose one, or `, all), grid);
}

function keyRow(i, key, value, from) {
  const link = key.place < 0 ? t`before the text` : make("a", { href: `#t${key.place + 1}` }, contextOf(key.place));
  return make("tr", {},
    make("td", { className: "word" }, link),
    make("td", { className: "number", ...value }),
    make("td", { className: "number", title: t`distance`, textContent: `−${count(i - key.place)}` }),
    make("td", {}, make("span", { className: key.far ? "badge far" : "badge", textContent: from })));
}

function keyTable(keys, i) {
  const listed = keys.slice(0, 10), total = keys.reduce((a, key) => a + key.weight, 0);
  const rows = listed.map((key) => keyRow(i, key, { textContent: percent(key.weight) }, key.far ? t`memory` : t`segment`));
  const hint = state.head < 0 ? t`These keys have ${percent(total)} of the attention of all heads.` : t`These keys have ${percent(total)} of the attention of this head.`;
  return make("div", {}, make("table", {}, make("tbody", {}, ...rows)), make("p", { className: "hint", textContent: hint }));
}

/** Return a token with what stands right before it. */
function contextOf(place) {
  const first = units[place], end = unitEnd(place);
  const before = visible(text.slice(Math.max(offsets[first] - 10, 0), offsets[first]).replace(/\p{Cs}/gu, ""));
  return make("bdi", { className: "context" }, before.replaceAll("␣", " "), make("b", { textContent: visible(unitText(first, end) || labelOf(place)) }));
}

function mark(i, keys) {
  const size = (key) => key.weight ?? Math.abs(key.nats), most = Math.max(...keys.map(size), 1e-9);
  for (const key of keys) {
    if (key.place < 0 || size(key) < 0.004) continue;
    for (const element of spans.get(units[key.place]) ?? []) {
      element.classList.add("key");
      if (key.far) element.classList.add("far");
      if (key.nats) element.classList.add(key.nats > 0 ? "raised" : "lowered");
      element.style.setProperty("--thick", `${(0.08 + 0.42 * Math.sqrt(size(key) / most)).toFixed(3)}em`);
      marked.push(element);
    }
  }
  const edge = (place, name) => {
    const element = place >= 0 && place < nTokens() ? spans.get(units[place])?.[0] : null;
    if (!element) return;
    element.classList.add(name);
    marked.push(element);
  };
  edge(border(i), "border");
  if (about.mem_len) edge(Math.max(border(i) - about.ext_len - about.mem_len, 0), "oldest");
}

// ---- passages

function showPassages() {
  const gaining = about.remembers;
  $("passages-title").textContent = gaining ? t`Where memory helps most` : t`Most surprising`;
  $("passages-hint").textContent = about.passages.length
    ? gaining ? t`Passages by the nats that memory saves on them; the token that gains most is marked.` : t`This model is read without memory. Passages by their nats; the most surprising token is marked.`
    : t`Memory helps no passage of this text.`;
  $("passages").replaceChildren();
  for (const [begin, end, score, best] of about.passages) {
    const cut = (a, b) => text.slice(offsets[a], offsets[b]).replace(/\s+/g, " ").replace(ODD, codePoint);
    const bestFirst = units[best], bestEnd = unitEnd(best);
    const first = Math.max(begin, units[Math.max(begin, best - 60)]), last = Math.min(end, bestEnd + 60);
    const start = Math.min(first, bestFirst), early = units[Math.max(0, start - (about.vocabulary <= 512 ? 24 : 5))];
    const before = make("span", { className: "before", textContent: cut(early, start) });
    const snippet = make("p", { className: "snippet", dir: "auto" }, before, cut(Math.min(first, bestFirst), bestFirst), make("mark", { textContent: cut(bestFirst, bestEnd) || visible(labelOf(best)) }), cut(bestEnd, Math.max(last, bestEnd)));
    const unit = make("small", { textContent: t` nats · token ${count(begin + 1)}` });
    $("passages").append(make("li", {}, make("a", { href: `#t${best + 1}` }, make("p", { className: "score" }, gaining ? signed(score, 1) : score.toFixed(1), unit), snippet)));
  }
}

// ---- search

function search() {
  const wanted = $("query").value;
  state.matches = [];
  state.match = -1;
  if (wanted) {
    const lower = text.toLowerCase(), folded = lower.length === text.length; // some letters fold to two
    const hay = folded ? lower : text, needle = folded ? wanted.toLowerCase() : wanted;
    for (let at = hay.indexOf(needle); at >= 0 && state.matches.length < 9999; at = hay.indexOf(needle, at + needle.length)) {
      state.matches.push([units[find(offsets, at)], find(offsets, at + needle.length - 1)]);
    }
  }
  $("found").textContent = wanted ? (state.matches.length ? count(state.matches.length) : t`not found`) : "";
  showMatches();
}

function nextMatch(step) {
  const n = state.matches.length;
  if (!n) return;
  state.match = state.match < 0 ? (step > 0 ? Math.max(0, state.matches.findIndex(([first]) => first >= pageStarts[state.page])) : n - 1) : (state.match + step + n) % n;
  $("found").textContent = t`${count(state.match + 1)} of ${count(n)}`;
  goTo(state.matches[state.match][0]);
}

function showMatches() {
  for (const element of $("text").querySelectorAll(".match")) element.classList.remove("match");
  const first = pageStarts[state.page], last = pageStarts[state.page + 1] ?? nTokens();
  for (const [begin, end] of state.matches) {
    if (end < first || begin >= last) continue;
    for (let i = begin; i <= end; i++) for (const element of spans.get(i) ?? []) element.classList.add("match");
  }
}

// ---- drawings

const color = (name, alpha = 1) => `rgba(${getComputedStyle(document.documentElement).getPropertyValue(`--${name}`)}, ${alpha})`;
const plain = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`);

function canvas(id) {
  const element = $(id), ratio = window.devicePixelRatio || 1;
  const height = Number(element.dataset.height ?? (element.dataset.height = element.getAttribute("height")));
  const width = element.clientWidth || 600;
  element.width = Math.round(width * ratio);
  element.height = Math.round(height * ratio);
  element.style.height = `${height}px`;
  const context = element.getContext("2d");
  context.scale(ratio, ratio);
  context.font = "12px system-ui, sans-serif";
  return { context, width, height, element };
}

/** Draw losses along the text and, below, what memory gains; the page that is shown is framed. */
function drawMap() {
  const { context, width, height } = canvas("map");
  const n = nTokens(), columns = Math.max(1, Math.min(Math.floor(width / 2), n)), step = width / columns;
  const means = mapMeans(columns);
  const top = about.remembers ? height * 0.5 : height - 2;
  const most = Math.max(...means.nats, 1e-9), best = Math.max(...means.gain.map(Math.abs), 1e-9);
  for (let c = 0; c < columns; c++) {
    context.fillStyle = color("hot", 0.55);
    const tall = means.nats[c] / most * (top - 3);
    context.fillRect(c * step, top - tall, step * 0.9, tall);
    if (!about.remembers) continue;
    const long = means.gain[c] / best * (height - top) * 0.5, middle = top + (height - top) * 0.55;
    context.fillStyle = color(long >= 0 ? "helped" : "misled", 0.85);
    context.fillRect(c * step, Math.min(middle, middle - long), step * 0.9, Math.abs(long));
  }
  const first = pageStarts[state.page], last = pageStarts[state.page + 1] ?? n;
  context.strokeStyle = plain("ink");
  context.lineWidth = 2;
  context.strokeRect(Math.min(first / n * width + 1, width - 4), 1, Math.max((last - first) / n * width - 2, 3), height - 2);
  $("map-hint").textContent = t`The whole text: mean nats per token, up to ${most.toFixed(1)}${about.remembers ? t`; below, what memory gains, up to ${best.toFixed(1)}` : ""}.`;
  const map = $("map");
  map.setAttribute("aria-valuemin", "1");
  map.setAttribute("aria-valuemax", String(pageStarts.length));
  map.setAttribute("aria-valuenow", String(state.page + 1));
  map.setAttribute("aria-valuetext", $("where").textContent);
}

let known = null;
function mapMeans(columns) {
  if (known?.columns === columns) return known;
  const n = nTokens(), means = { columns, nats: [], gain: [] };
  for (let c = 0; c < columns; c++) {
    const a = Math.max(1, Math.floor(c * n / columns)), b = Math.max(a + 1, Math.floor((c + 1) * n / columns)), m = Math.min(b, n) - a || 1;
    means.nats.push(sum(a, Math.min(b, n), nats) / m);
    means.gain.push(about.remembers ? sum(a, Math.min(b, n), gain) / m : 0);
  }
  return (known = means);
}

const CIVIDIS = [[0, 34, 78], [39, 62, 108], [87, 93, 109], [124, 123, 120], [165, 156, 116], [212, 193, 94], [254, 232, 56]];
function shade(share) {
  const at = Math.min(Math.max(share, 0), 1) * (CIVIDIS.length - 1), i = Math.min(Math.floor(at), CIVIDIS.length - 2);
  return `rgb(${CIVIDIS[i].map((a, c) => Math.round(a + (CIVIDIS[i + 1][c] - a) * (at - i))).join(",")})`;
}

const LEFT = 62, BOTTOM = 34;
function scale(width) {
  const bins = data.edges.length - 1, most = Math.log(data.edges[bins] + 1);
  return { bins, x: (distance) => LEFT + Math.log(distance + 1) / most * (width - LEFT - 8) };
}

const binWidth = (b) => data.edges[b + 1] - data.edges[b]; // wide bins hold more, and are not looked at more

function drawAxis(context, x, height, width) {
  context.fillStyle = plain("soft");
  context.textAlign = "center";
  const last = data.edges[data.edges.length - 1];
  for (let tick = 1; tick <= last; tick *= tick.toString()[0] === "1" ? 2 : tick.toString()[0] === "2" ? 2.5 : 2) context.fillText(count(tick), x(tick - 1), height - BOTTOM + 15);
  context.textAlign = "right";
  context.fillText(t`distance in tokens (1: the token right before)`, width - 8, height - 4);
  if (!about.mem_len) return;
  const at = x(about.tgt_len + about.ext_len);
  context.beginPath();
  context.moveTo(at, 14);
  context.lineTo(at, height - BOTTOM);
  for (const [name, lineWidth, dash] of [["card", 3.5, []], ["ink", 1.5, [5, 3]]]) { // seen on every color of the heat map
    context.strokeStyle = plain(name);
    context.lineWidth = lineWidth;
    context.setLineDash(dash);
    context.stroke();
  }
  context.setLineDash([]);
  context.fillStyle = plain("ink");
  context.textAlign = at > width * 0.6 ? "right" : "left";
  context.fillText(at > width * 0.6 ? t`all memory beyond →` : t`→ all memory beyond`, at, 10);
}

function drawHeat() {
  const rows = about.layers * about.heads;
  $("heat").dataset.height = String(Math.max(260, Math.min(700, 60 + rows * 18)));
  const { context, width, height } = canvas("heat");
  const { bins, x } = scale(width), tall = (height - 14 - BOTTOM) / rows;
  const per = (i) => data.mass[i] / binWidth(i % bins), most = range(0, rows * bins).reduce((a, i) => Math.max(a, per(i)), 1e-9);
  for (let r = 0; r < rows; r++) {
    for (let b = 0; b < bins; b++) {
      context.fillStyle = shade(Math.sqrt(per(r * bins + b) / most));
      const from = x(data.edges[b]);
      context.fillRect(from, 14 + r * tall, x(data.edges[b + 1]) - from + 0.5, tall - (r % about.heads === about.heads - 1 ? 2 : 0.5));
    }
    if (rows <= 40 || r % about.heads === 0) {
      context.fillStyle = plain("soft");
      context.textAlign = "right";
      context.fillText(`${Math.floor(r / about.heads) + 1}.${r % about.heads + 1}`, LEFT - 24, 14 + (r + 0.5) * tall + 4);
    }
    context.fillStyle = color("memory", 0.15 + 0.85 * data.share[r]);
    context.fillRect(LEFT - 18, 14 + r * tall, 12, tall - 1);
    if (Number($("head").value) === r) {
      context.strokeStyle = plain("ink");
      context.lineWidth = 2;
      context.strokeRect(LEFT - 20, 13 + r * tall, width - LEFT + 14, tall);
    }
  }
  drawAxis(context, x, height, width);
  $("heat-caption").textContent = t`A row per head, the first layer on top; a column per distance. The brighter, the more: from 0 to ${percent(most)} of a head’s attention for each distance, by its root. Click a row for its curve.`;
}

/** Return round numbers from 0 to at most a largest value, three to five of them. */
function ticks(most) {
  const unit = 10 ** Math.floor(Math.log10(most)), step = most >= 5 * unit ? 2 * unit : most >= 2 * unit ? unit : unit / 2;
  return range(0, Math.floor(most / step + 1e-9) + 1).map((i) => i * step);
}

function drawCurve() {
  const { context, width, height } = canvas("curve");
  const { bins, x } = scale(width), chosen = Number($("head").value), rows = about.layers * about.heads;
  const mean = (array, b) => (chosen >= 0 ? array[chosen * bins + b] : sum(0, rows, (r) => array[r * bins + b]) / rows) / binWidth(b);
  const all = range(0, bins).map((b) => mean(data.mass, b)), far = range(0, bins).map((b) => mean(data.far, b));
  const most = Math.max(...all, 1e-9), y = (v) => height - BOTTOM - v / most * (height - BOTTOM - 22);
  context.textAlign = "right";
  for (const tick of ticks(most)) {
    context.fillStyle = plain("line");
    context.fillRect(LEFT, y(tick), width - LEFT - 8, 1);
    context.fillStyle = plain("soft");
    context.fillText(tick ? percent(tick) : "0", LEFT - 6, y(tick) + 4);
  }
  for (let b = 0; b < bins; b++) {
    const from = x(data.edges[b]), wide = Math.max(x(data.edges[b + 1]) - from - 1, 1);
    context.fillStyle = color("near", 0.9);
    context.fillRect(from, y(all[b]), wide, y(far[b]) - y(all[b]));
    context.fillStyle = color("memory", 0.9);
    context.fillRect(from, y(far[b]), wide, y(0) - y(far[b]));
  }
  drawAxis(context, x, height, width);
  const share = chosen >= 0 ? data.share[chosen] : data.share.reduce((a, b) => a + b, 0) / rows;
  $("curve-caption").textContent = about.mem_len ? t`Share of the attention that a distance gets. Amber: inside the segment; teal: in memory, ${percent(share)} of the attention in all.` : t`Share of the attention that a distance gets; there is no memory.`;
}

function drawAll() {
  drawMap();
  if (!about.keys) return;
  drawHeat();
  drawCurve();
}

function showAttention() {
  if (!about.keys) return $("attention")?.remove();
  $("attention-hint").textContent = t`Mean over ${count(about.queries)} tokens in evenly spaced segments.` + (about.mem_len ? t` Beyond the dashed line, ${count(about.tgt_len + about.ext_len)} tokens back, all is memory; nearer than that it depends on how far into its segment a token is. Beside each row: the share that falls on memory.` : "");
  const chosen = $("head").value || "-1";
  $("head").replaceChildren(make("option", { value: "-1", textContent: t`all` }), ...range(0, about.layers * about.heads).map((r) => make("option", { value: String(r), textContent: t`layer ${Math.floor(r / about.heads) + 1}, head ${r % about.heads + 1}` })));
  $("head").value = chosen;
}

function listenToAttention() {
  $("head").addEventListener("change", () => { drawHeat(); drawCurve(); });
  $("heat").addEventListener("click", (event) => {
    const box = $("heat").getBoundingClientRect(), rows = about.layers * about.heads;
    const row = Math.floor((event.clientY - box.top - 14) / ((box.height - 14 - BOTTOM) / rows));
    $("head").value = String(row >= 0 && row < rows && row !== Number($("head").value) ? row : -1);
    drawHeat();
    drawCurve();
  });
}

// ---- notes

function showNotes() {
  const notes = [];
  if (about.left_out) notes.push(t`The text goes on: ${count(about.left_out)} tokens after these were not read (--most).`);
  if (about.loses) notes.push(t`What the model does not see of a text: ${about.loses}`);
  notes.push(t`Of each prediction the ${about.top} likeliest tokens, not the other ${count(Math.max(0, about.vocabulary - about.top))}. Their probabilities are stored to within half a percentage point, losses to within a thousandth of a nat, up to 64.`);
  if (about.keys) notes.push(about.detailed >= nTokens() - 1
    ? t`Of each head the ${about.keys} keys that it looked at most, for every token.`
    : t`Where the heads looked is kept for ${count(about.detailed)} of ${count(nTokens())} tokens: the beginning of the text and the segments that ${about.remembers ? t`gain most from memory` : t`are most surprising`}; of each head the ${about.keys} keys that it looked at most.`);
  if (about.causes) notes.push(t`The page keeps what raised or lowered a prediction for ${count(data.explained.length)} of ${count(nTokens())} tokens, in the segments where memory gains most: for each, the ${about.causes} tokens with the most nats. The token right before is never listed, because the model predicts from it, and what shifts and n-grams take from the tokens before does not count.`);
  if (about.keys) notes.push(t`Attention says which states a head read, not why the model said what it said: a state in memory has itself read what came before it.`);
  if (about.remembers) notes.push(about.state ? t`Without memory means that the state is reset at each segment, so the first tokens of a segment gain most.` : t`Without memory means that each segment is read as if nothing had come before it, so the first tokens of a segment gain most; txl plot RUN --against position shows how much.`);
  else notes.push(t`There is no memory to take away, so there is no gain to show.`);
  if (!about.keys) notes.push(t`An lstm has no attention: what it remembers is one state, not positions.`);
  notes.push(t`A character of several tokens has the color of their sum. Invisible characters, and those that change the direction of text, are shown by their numbers.`);
  $("notes").replaceChildren(...notes.map((note) => make("li", { textContent: note })));
}

// ---- events

function listen() {
  $("language").addEventListener("change", (event) => speak(event.target.value));
  if (about.keys) listenToAttention();
  const box = $("text");
  const tokenAt = (event) => event.target.token;
  box.addEventListener("pointerover", (event) => {
    const token = tokenAt(event);
    if (event.pointerType !== "touch" && token !== undefined && !state.held && token !== state.at) inspect(token); // a finger taps
  });
  box.addEventListener("click", (event) => {
    const token = tokenAt(event);
    if (token === undefined) return;
    const same = state.held && token === state.at;
    inspect(token);
    state.held = !same;
    markHeld();
    event.target.scrollIntoView({ block: "nearest" }); // where the facts lie over the text
  });
  box.addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: -1, ArrowRight: 1 };
    if (event.key in moves && !event.altKey && !event.ctrlKey && !event.metaKey) {
      event.preventDefault();
      const from = state.at ?? pageStarts[state.page];
      if (state.at === null) return goTo(from);
      goTo(moves[event.key] > 0 ? Math.min(unitEnd(from), nTokens() - 1) : units[Math.max(0, from - 1)]);
    } else if (event.key === "Enter") {
      state.held = !state.held;
      markHeld();
    }
  });
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") letGo(); });
  $("inspector").addEventListener("click", (event) => {
    const { head, cause } = event.target;
    if (head === undefined && cause === undefined) return;
    state.head = head ?? state.head;
    state.cause = cause ?? -1;
    const scrolled = $("inspector").scrollTop;
    inspect(state.at);
    state.held = true;
    markHeld();
    $("inspector").scrollTop = scrolled;
    for (const button of $("inspector").querySelectorAll("button")) if (button.head === head && button.cause === cause) button.focus({ preventScroll: true });
  });
  for (const suffix of ["", "-below"]) {
    const turn = (step) => () => {
      letGo();
      showPage(state.page + step);
      if (suffix) $("map").scrollIntoView();
    };
    $(`back${suffix}`).addEventListener("click", turn(-1));
    $(`on${suffix}`).addEventListener("click", turn(1));
  }
  const map = $("map");
  map.addEventListener("click", (event) => {
    const at = (event.clientX - map.getBoundingClientRect().left) / map.clientWidth;
    letGo();
    showPage(find(pageStarts, Math.floor(at * nTokens())));
  });
  map.addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -Infinity, End: Infinity };
    if (!(event.key in moves)) return;
    event.preventDefault();
    letGo();
    showPage(state.page + moves[event.key]);
  });
  $("modes").addEventListener("change", (event) => {
    state.mode = event.target.value;
    recolor();
    showLegend();
  });
  let wait = 0;
  $("query").addEventListener("input", () => { clearTimeout(wait); wait = setTimeout(search, 200); });
  $("query").addEventListener("keydown", (event) => {
    if (event.key !== "Enter") return;
    event.preventDefault();
    clearTimeout(wait);
    if (state.match < 0) search();
    nextMatch(event.shiftKey ? -1 : 1);
  });
  $("search").addEventListener("submit", (event) => event.preventDefault());
  $("theme").addEventListener("click", () => {
    const root = document.documentElement, dark = matchMedia("(prefers-color-scheme: dark)").matches;
    const now = root.dataset.theme ?? (dark ? "dark" : "light");
    root.dataset.theme = now === "dark" ? "light" : "dark";
    drawAll();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  window.addEventListener("resize", () => { clearTimeout(wait); wait = setTimeout(drawAll, 150); });
  window.addEventListener("hashchange", followHash);
}

function followHash() {
  const found = /^#t(\d+)$/.exec(location.hash);
  if (found) goTo(Number(found[1]) - 1, { flash: true });
}

async function start() {
  const [preferred] = navigator.languages;
  if (!preferred.startsWith("en") && navigator.languages.some((each) => each.startsWith("zh"))) language = "zh";
  try {
    await load();
  } catch (error) {
    $("status").textContent = typeof DecompressionStream === "undefined" ? t`This browser is too old for this page: it cannot unpack it (DecompressionStream).` : t`This page is damaged: ${error.message}`;
    return;
  }
  $("status").hidden = true;
  $("main").hidden = false;
  if (!about.remembers) $("gain-mode").remove();
  $("text").classList.toggle("fixed", about.vocabulary <= 512);
  findPageWords();
  speak(language);
  listen();
  followHash();
  document.documentElement.dataset.ready = "yes";
}

start();
