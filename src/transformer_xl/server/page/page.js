"use strict";
// One page, no library: a text that is read and written in a session of constant memory. Text enters the page by textContent alone.

const WORDS = {
  en: {
    title: "txl serve", language: "Language", key: "Key", keepKey: "keep it until the tab is closed", useKey: "Use this key",
    sessions: "Sessions", newSession: "New session", savedTitle: "Saved", text: "Text", inputLabel: "Your text",
    continue: "Continue", ask: "Ask", stop: "Stop", undo: "Undo", fork: "Fork", compare: "With and without memory",
    bought: "What memory saved", tokens: "Tokens", temperature: "Temperature", name: "Name", save: "Save", delete: "Delete",
    book: "Read a book", bookLabel: "Drop a text file here, or choose one.", pause: "Pause", resume: "Go on", memory: "Memory",
    legend: "Surprise of each token:", nats: "nats", ready: "Ready.", reading: "Reading …", writing: "Writing …",
    done: "Done: {n} tokens.", stopped: "Stopped.", lost: "The server cannot be reached: {e}", error: "{e}",
    line: "{m}: {p} parameters, memory of {l} tokens, {b} in a session", answerTitle: "Answer (the session does not remember it)",
    compareTitle: "The same random numbers: first with memory, then after the last 64 tokens alone",
    boughtTitle: "Nats that memory saved: {n} in {t} tokens (the stronger the color, the more)", undone: "Went back by {n} tokens.", nothingUndone: "There is nothing to take back.",
    savedAs: "Saved as {n}.", needName: "Give a name first.", forked: "A copy of the session is open.", deleted: "Deleted.",
    readingLine: "{d} of {t}, {s} tokens/s, {b} bits per character, {l} left", readingDone: "Read {d}: {b} bits per character.",
    chart: "{c} characters read and written (dashed), {b} of memory (solid): it does not grow.", token: "“{t}”: {n} nats",
    needText: "Give a text, or read one first.", needKey: "This server asks for a key.", paused: "Paused.", empty: "(empty)",
    chars: "{n} tokens", notText: "This is not UTF-8 text.",
    behind: "The session has gone back to before this book.", again: "The connection is lost; trying again. ({e})",
    saveHelp: "Save keeps this session as it is now under a name; it then stands below “Saved”, and opening it begins a copy. Delete ends this session; what is saved stays.",
    sameShort: "Both are the same: the text has no more than {n} tokens, so nothing is left for memory to know.",
    same: "Both are the same: what memory holds of the text before its last {n} tokens has changed no choice.",
    savedNothing: "Memory saved nothing: all of the text is so near that it is seen without memory, too.",
    noText: "Nothing has been read yet: type a text below, or drop a book.", chartX: "actions", chartY: "characters", chartZ: "memory",
  },
  zh: {
    title: "txl serve", language: "语言", key: "密钥", keepKey: "保留到关闭标签页为止", useKey: "使用此密钥",
    sessions: "会话", newSession: "新会话", savedTitle: "已保存", text: "文本", inputLabel: "你的文本",
    continue: "续写", ask: "提问", stop: "停止", undo: "撤销", fork: "分叉", compare: "对比有无记忆",
    bought: "记忆的价值", tokens: "词元数", temperature: "温度", name: "名称", save: "保存", delete: "删除",
    book: "读一本书", bookLabel: "把文本文件拖到这里，或选择一个。", pause: "暂停", resume: "继续", memory: "内存占用",
    legend: "每个词元的惊异值：", nats: "奈特", ready: "就绪。", reading: "正在阅读……", writing: "正在生成……",
    done: "完成：{n} 个词元。", stopped: "已停止。", lost: "无法连接服务器：{e}", error: "{e}",
    line: "{m}：{p} 个参数，记忆 {l} 个词元，每个会话占 {b}", answerTitle: "回答（会话不会记住它）",
    compareTitle: "相同的随机数：前一个有记忆，后一个只读了最后 64 个词元",
    boughtTitle: "记忆的价值：{t} 个词元共省下 {n} 奈特（颜色越浓，省得越多）", undone: "已撤销 {n} 个词元。", nothingUndone: "没有可撤销的操作。",
    savedAs: "已保存为 {n}。", needName: "请先填写名称。", forked: "已打开会话的副本。", deleted: "已删除。",
    readingLine: "{d} / {t}，{s} 词元/秒，每字符 {b} 比特，剩余 {l}", readingDone: "已读 {d}：每字符 {b} 比特。",
    chart: "已读写 {c} 个字符（虚线）；内存占用始终是 {b}（实线），不会增长。", token: "“{t}”：{n} 奈特",
    needText: "请输入文本，或先读一段。", needKey: "此服务器需要密钥。", paused: "已暂停。", empty: "（空）",
    chars: "{n} 个词元", notText: "这不是 UTF-8 文本。",
    behind: "会话已退回到读这本书之前。", again: "连接已断开，正在重试。（{e}）",
    saveHelp: "“保存”把会话现在的状态以所填的名称存下来，此后列在“已保存”下，打开它得到的是一份副本。“删除”结束当前会话，已保存的不受影响。",
    sameShort: "两边相同：文本不超过 {n} 个词元，后一个也读到了全文，记忆里没有更多内容。",
    same: "两边相同：最后 {n} 个词元之前的内容虽在记忆里，却没有改变任何一次选择。",
    savedNothing: "记忆没有省下什么：文本很短，没有记忆也能看到全文。",
    noText: "还没有读过任何内容：在下面输入文本，或拖入一本书。", chartX: "操作次数", chartY: "字符数", chartZ: "内存",
  },
};
const KEPT_TOKENS = 4000, SLICE = 1 << 16, WITHOUT = 64;
const $ = (id) => document.getElementById(id);
const state = { language: "en", key: "", session: null, texts: new Map(), running: null, meta: null, reading: null };

// --- words ---------------------------------------------------------------------------------------------------------------

function t(name, values = {}) {
  return WORDS[state.language][name].replace(/\{(\w)\}/g, (_, key) => values[key]);
}
function speak(language) {
  state.language = language in WORDS ? language : "en";
  document.documentElement.lang = state.language;
  $("language").value = state.language;
  for (const element of document.querySelectorAll("[data-t]")) element.textContent = t(element.dataset.t, JSON.parse(element.dataset.values ?? "{}"));
  $("text").dataset.empty = t("noText");
  showModel(); showChart(); refresh();
}
function say(id, name, values = {}) {  // words that follow the language
  Object.assign($(id).dataset, { t: name, values: JSON.stringify(values) });
  $(id).textContent = t(name, values);
}
const number = (value) => new Intl.NumberFormat(state.language).format(value);
function size(bytes) {
  const units = ["B", "kB", "MB", "GB"];
  const i = Math.min(Math.floor(Math.log10(Math.max(bytes, 1)) / 3), 3);
  return `${Number((bytes / 1000 ** i).toFixed(1))} ${units[i]}`;
}
const status = (name, values) => say("status", name, values);
function fail(error) {
  if (error.name === "AbortError") return status("stopped");
  if (error.code === "invalid_api_key") { $("key-form").hidden = false; return status("needKey"); }
  status(error instanceof TypeError ? "lost" : "error", { e: error.message });
}

// --- the server ----------------------------------------------------------------------------------------------------------

async function call(path, { method = "GET", body, signal, accept, keepalive } = {}) {
  const headers = {};
  if (state.key) headers.Authorization = `Bearer ${state.key}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  if (accept) headers.Accept = accept;
  const sent = body === undefined ? undefined : JSON.stringify(body);
  const answer = await fetch(path, { method: body === undefined ? method : "POST", headers, body: sent, signal, keepalive });
  if (answer.ok) return answer;
  const told = await answer.json().catch(() => ({ error: { message: `${answer.status}` } }));
  throw Object.assign(new Error(told.error.message), told.error);
}
const json = async (path, options) => (await call(path, options)).json();

async function* events(path, options) {
  const answer = await call(path, options), decoder = new TextDecoder();
  const reader = answer.body.getReader();
  let held = "";
  for (;;) {
    const { done, value } = await reader.read();
    held += done ? "" : decoder.decode(value, { stream: true });
    const parts = held.split("\n\n");
    held = parts.pop();
    for (const part of parts) {
      const data = part.split("\n").find((line) => line.startsWith("data: "))?.slice(6);
      if (!data || data === "[DONE]") continue;
      const event = JSON.parse(data);
      if (event.error) throw Object.assign(new Error(event.error.message), event.error);
      yield event;
    }
    if (done) return;
  }
}

// --- the text ------------------------------------------------------------------------------------------------------------

function log() {
  if (!state.texts.has(state.session)) state.texts.set(state.session, { tokens: [], characters: 0, points: [] });
  return state.texts.get(state.session);
}
function level(nats) { return [1, 2, 4, 6, 8].filter((border) => nats >= border).length; }
function span(token, written) {
  const element = document.createElement("span");
  element.textContent = token.text;
  element.className = (token.nats == null ? "" : `s${level(token.shade ?? token.nats)}`) + (written ? " w" : "");
  element.nats = token.nats;
  return element;
}
function showToken(element) {
  say("token", "token", { t: element.textContent, n: element.nats?.toFixed(2) ?? "?" });
  element.title = $("token").textContent;
}
function add(token, written) {
  const own = log();
  own.tokens.push([token, written]);
  own.characters += token.text.length;
  if (own.tokens.length > KEPT_TOKENS) { own.tokens.shift(); $("text").firstChild?.remove(); }
  $("text").append(span(token, written));
  $("text").scrollTop = $("text").scrollHeight;
}
function showText() { $("text").replaceChildren(...log().tokens.map(([token, written]) => span(token, written))); showChart(); }

function mark() {
  const own = log();
  own.points.push(own.characters);
  if (own.points.length > 300) own.points = own.points.filter((_, i) => i % 2 === 0);
  showChart();
}
function roundHalf(most) {  // what half of a scale is that has room for a value: 1, 2 or 5, 10, 20 …
  const unit = 10 ** Math.floor(Math.log10(Math.max(most / 2, 1)));
  return unit * [1, 2, 5, 10].find((each) => each * unit >= most / 2);
}
function showChart() {
  const own = log(), points = own.points.length > 1 ? own.points : [0, own.characters], bytes = state.meta?.session_bytes ?? 0;
  const halfText = roundHalf(Math.max(...points)), halfMemory = roundHalf(bytes);
  const x = (i) => 48 + (206 * i) / (points.length - 1), y = (value, half) => 122 - (48 * value) / half;
  $("characters").setAttribute("points", points.map((value, i) => `${x(i)},${y(value, halfText)}`).join(" "));
  $("bytes").setAttribute("points", [0, points.length - 1].map((i) => `${x(i)},${y(bytes, halfMemory)}`).join(" "));
  const short = (value) => new Intl.NumberFormat(state.language, { notation: "compact" }).format(value);
  const words = [  // a place, how it is aligned, what stands there, and whose scale it belongs to
    ...[0, 1, 2].map((i) => [44, y(i, 1), "end", short(i * halfText), "of-text"]), [4, 8, "start", t("chartY"), "of-text"],
    ...[0, 1, 2].map((i) => [258, y(i, 1), "start", i ? size(i * halfMemory) : "0", "of-memory"]), [316, 8, "end", t("chartZ"), "of-memory"],
    [48, 136, "middle", "0"], [254, 136, "middle", number(points.length - 1)], [151, 136, "middle", t("chartX")],
  ];
  $("scales").replaceChildren(...words.map(([left, top, anchor, text, kind = ""]) => {
    const element = document.createElementNS($("chart").namespaceURI, "text");
    for (const [name, value] of Object.entries({ x: left, y: top + 4, "text-anchor": anchor, class: kind })) element.setAttribute(name, value);
    element.textContent = text;
    return element;
  }));
  if (state.meta) say("chart-words", "chart", { c: number(own.characters), b: size(bytes) });
}
function showModel() {
  if (!state.meta) return;
  const values = { m: state.meta.id, p: number(state.meta.parameters), l: number(state.meta.mem_len), b: size(state.meta.session_bytes) };
  $("model").textContent = t("line", values);
}

// --- sessions ------------------------------------------------------------------------------------------------------------

async function refresh() {
  if (!state.meta) return;
  try {
    const [sessions, saved] = await Promise.all([json("/v1/sessions"), json("/v1/saved")]);
    const copies = new Set([...state.texts.values()].map((each) => each.before?.id));
    $("sessions").replaceChildren(...sessions.data.filter((each) => !copies.has(each.id)).map(sessionEntry));
    $("saved").replaceChildren(...saved.data.map((each) => entry(`${each.name} · ${t("chars", { n: number(each.n_tokens) })}`, () => open({ from: { saved: each.name } }))));
    if (!saved.data.length) $("saved").replaceChildren(entry(t("empty")));
  } catch (error) { fail(error); }
}
function entry(label, act) {
  const item = document.createElement("li"), element = document.createElement(act ? "button" : "span");
  element.textContent = label;
  if (act) { element.type = "button"; element.addEventListener("click", act); }
  item.append(element);
  return item;
}
function sessionEntry(session) {
  const item = entry(`${session.id.slice(0, 9)}… · ${t("chars", { n: number(session.n_tokens) })}`, () => choose(session.id));
  item.firstChild.setAttribute("aria-current", String(session.id === state.session));
  return item;
}
async function choose(id) {
  if (!state.running) await show(id);
}
async function show(id) {
  const known = state.texts.has(id);
  state.session = id;
  showText(); refresh();
  if (known) return;
  try {
    const end = await json(`/v1/sessions/${id}/tail`);
    if (end.tokens.length && state.session === id) { add({ text: (end.n_tokens > end.tokens.length ? "… " : "") + end.text, nats: null }, false); mark(); }
  } catch (error) { fail(error); }
}
async function open(body = {}) {
  try { choose((await json("/v1/sessions", { body })).id); status("ready"); } catch (error) { fail(error); }
}

// --- reading and writing -------------------------------------------------------------------------------------------------

async function run(name, work) {
  if (state.running) return;
  state.running = new AbortController();
  const focused = document.activeElement;
  for (const id of ["continue", "ask", "undo", "fork", "compare", "bought", "save", "delete", "new"]) $(id).disabled = true;
  $("stop").disabled = false;
  status(name);
  try { await work(state.running.signal); } catch (error) { fail(error); } finally {
    state.running = null;
    for (const id of ["continue", "ask", "undo", "fork", "compare", "bought", "save", "delete", "new"]) $(id).disabled = false;
    $("stop").disabled = true;
    if (document.activeElement === document.body) focused?.focus();  // a button that is disabled loses it
    mark(); refresh();
  }
}
const settings = (more) => ({ max_tokens: +$("tokens").value, temperature: +$("temperature").value, stream: true, logprobs: 0, ...more });
const path = (what) => `/v1/sessions/${state.session}/${what}`;

// Before anything is read, the session is copied: the copy is what "Undo" goes back to, however much is read and written.
async function copyForUndo() {
  const own = log(), { tokens, characters, points } = own;
  forgetCopy(own);
  const made = await json("/v1/sessions", { body: { from: { session: state.session } } }).catch(() => null);  // there may be no room
  if (made) own.before = { id: made.id, n: made.n_tokens, tokens: [...tokens], characters, points: [...points] };
}
function forgetCopy(own) {
  if (own.before) call(`/v1/sessions/${own.before.id}`, { method: "DELETE", keepalive: true }).catch(() => {});
  own.before = null;
}
addEventListener("pagehide", () => state.texts.forEach(forgetCopy));
async function readTyped(signal) {
  const text = $("input").value;
  if (!text) return;
  const read = await json(path("append"), { body: { text, score: "tokens" }, signal });
  for (const token of read.tokens) add({ text: token.text, nats: token.logprob == null ? null : -token.logprob }, false);
  $("input").value = "";
}
async function write(where, body, show, signal) {
  let n = 0;
  for await (const event of events(where, { body: settings(body), signal })) {
    const choice = event.choices[0];
    if (!choice?.text && !choice?.logprobs) continue;
    const nats = choice.logprobs ? -choice.logprobs.token_logprobs[0] : null;
    if (choice.logprobs) n += 1;
    show({ text: choice.text, nats });
  }
  return n;
}
const into = (id) => (token) => { $(id).append(span(token, true)); $(id).scrollTop = $(id).scrollHeight; };
function showAnswer(both, title, values) {
  $("answer").hidden = false;
  say("answer-title", title, values);
  $("answer-right").hidden = !both;
  $("answer-left").replaceChildren(); $("answer-right").replaceChildren();
}

$("write").addEventListener("submit", (event) => {
  event.preventDefault();
  run("writing", async (signal) => {
    await copyForUndo();
    await readTyped(signal);
    status("done", { n: number(await write(path("generate"), {}, (token) => add(token, true), signal)) });
  });
});
$("ask").addEventListener("click", () => run("writing", async (signal) => {
  showAnswer(false, "answerTitle");
  const n = await write(path("ask"), { text: $("input").value }, into("answer-left"), signal);
  status("done", { n: number(n) });
}));
$("stop").addEventListener("click", () => state.running?.abort());
$("undo").addEventListener("click", () => run("ready", async () => {
  const { before } = log(), old = state.session;
  if (!before) return status("nothingUndone");
  const n = (await json(`/v1/sessions/${old}`)).n_tokens - before.n;
  const { tokens, characters, points } = before;
  await json(`/v1/sessions/${before.id}`);  // it may have expired
  state.texts.set(before.id, { tokens, characters, points });
  state.texts.delete(old);
  await show(before.id);
  await call(`/v1/sessions/${old}`, { method: "DELETE" });
  status("undone", { n: number(n) });
}));
$("fork").addEventListener("click", () => run("ready", async () => {
  const before = log(), made = await json(path("fork"), { method: "POST" });
  state.texts.set(made.id, structuredClone({ ...before, before: null }));
  await show(made.id);
  status("forked");
}));
$("compare").addEventListener("click", () => run("writing", async (signal) => {
  showAnswer(true, "compareTitle");
  const seed = Math.floor(Math.random() * 2 ** 32), last = log().tokens.slice(-WITHOUT).map(([token]) => token.text).join("");
  if (!last) return status("needText");
  await write(path("ask"), { seed }, into("answer-left"), signal);
  await write("/v1/completions", { prompt: last, seed }, into("answer-right"), signal);
  const isSame = $("answer-left").textContent === $("answer-right").textContent;
  const { n_tokens } = await json(`/v1/sessions/${state.session}`);
  status(!isSame ? "ready" : n_tokens <= WITHOUT ? "sameShort" : "same", { n: WITHOUT });
}));
$("bought").addEventListener("click", () => run("reading", async (signal) => {
  const text = $("input").value || log().tokens.map(([token]) => token.text).join("");
  if (!text) return status("needText");
  const body = { text, memory: "both", per_token: true };
  if ($("input").value) body.session_id = state.session;
  const score = await json("/v1/score", { body, signal });
  const saved = score.on.per_token.map((token, i) => {  // the first token has a score only after what the session holds
    const without = score.off.per_token[i].logprob, nats = without == null ? null : token.logprob - without;
    return { text: token.text, nats, shade: Math.max(0, 4 * nats) };
  });
  const scored = saved.filter(({ nats }) => nats != null), total = scored.reduce((sum, { nats }) => sum + nats, 0);
  showAnswer(false, "boughtTitle", { n: total.toFixed(2), t: number(scored.length) });
  $("answer-left").append(...saved.map((token) => span(token, false)));
  if (scored.every(({ nats }) => Math.abs(nats) < 0.005)) return status("savedNothing");
  status("ready");
}));
$("save").addEventListener("click", () => run("ready", async () => {
  const name = $("name").value;
  if (!name) return status("needName");
  await json(path("save"), { body: { name } });
  status("savedAs", { n: name });
}));
$("delete").addEventListener("click", () => run("ready", async () => {
  forgetCopy(log());
  await call(`/v1/sessions/${state.session}`, { method: "DELETE" });
  state.texts.delete(state.session);
  await show((await json("/v1/sessions", { body: {} })).id);
  status("deleted");
}));
$("new").addEventListener("click", () => open());
document.addEventListener("mouseover", (event) => { if (event.target.nats != null) showToken(event.target); });
$("text").addEventListener("keydown", (event) => {  // the arrows go from token to token, as the mouse does
  const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key], tokens = $("text").children;
  if (!step || !tokens.length) return;
  event.preventDefault();
  const before = $("text").querySelector(".at");
  const place = before ? [...tokens].indexOf(before) + step : tokens.length - 1;
  const token = tokens[Math.min(Math.max(place, 0), tokens.length - 1)];
  before?.classList.remove("at");
  token.classList.add("at");
  token.scrollIntoView({ block: "nearest" });
  showToken(token);
});

// --- a book --------------------------------------------------------------------------------------------------------------

// A book is read in slices, each as token ids, so that `at` says exactly which of them the session still lacks when the connection
// was lost, or the server begins anew with what it had saved.

async function slice(file, begin) {
  const bytes = new Uint8Array(await file.slice(begin, begin + SLICE + 1).arrayBuffer());
  let n = Math.min(SLICE, bytes.length);
  while (n > 0 && n < bytes.length && (bytes[n] & 0xc0) === 0x80) n -= 1;  // not in the middle of a character
  return { text: new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(bytes.subarray(0, n)), end: begin + n };
}
const wait = (ms) => new Promise((go) => setTimeout(go, ms));
const isLost = (error) => error instanceof TypeError || ["busy", "moved", "overloaded", "shutting_down", "leased", "no_room"].includes(error.code);

async function readBook(file) {
  if (state.running) return;
  const book = { file, place: 0, nats: 0, scored: 0, before: log().characters, began: performance.now(), paused: false, lost: 0, marks: [] };
  state.reading = book;
  $("pause").disabled = $("progress").hidden = false;
  await run("reading", async (signal) => {
    await copyForUndo();
    const url = `/v1/sessions/${state.session}`;
    while (book.place < file.size) {
      while (book.paused && !signal.aborted) await wait(100);
      if (signal.aborted) return status("stopped");
      try { await readSlice(book, url, signal); } catch (error) {
        if (signal.aborted || !isLost(error) || book.lost >= 60) throw error;
        book.lost += 1;  // in a row
        status("again", { e: error.message });
        await wait(1000);
      }
    }
    status("readingDone", { d: size(file.size), b: perCharacter(book, { nats: 0, characters: 0 }).toFixed(3) });
  });
  $("pause").disabled = true;
  say("pause", "pause");
  state.reading = null;
}
async function readSlice(book, url, signal) {
  const at = (await json(url, { signal })).n_tokens, { marks } = book;
  if (book.lost) { book.lost = 0; status("reading"); }
  if (marks.length && at < marks[0].at) throw new Error(t("behind"));
  while (marks.length && marks.at(-1).at > at) marks.pop();  // a server that begins anew may have saved less
  const last = marks.at(-1), isOpen = last && at < last.at + last.n;
  const place = isOpen ? last.place : last?.end ?? 0;
  let part;
  try { part = await slice(book.file, place); } catch { throw new Error(t("notText")); }
  const ids = (await json("/v1/tokenize", { body: { content: part.text }, signal })).tokens;
  const now = isOpen ? last : { at, n: ids.length, place, end: part.end, characters: last ? last.characters + last.length : 0, length: part.text.length };
  if (!isOpen) marks.push(now);
  let seen = null;
  const body = { tokens: ids.slice(at - now.at), at, score: "sum" };
  try {
    for await (const event of events(`${url}/append`, { body, accept: "text/event-stream", signal })) {
      if (event.session) continue;
      seen = event;
      const n = at - now.at + event.processed;
      showReading(book, (place + ((part.end - place) * n) / ids.length) / book.file.size, now.at + n, { nats: event.nats, characters: (now.length * event.processed) / ids.length });
    }
  } finally {
    book.nats += seen?.nats ?? 0;
    book.scored += seen ? (now.length * seen.processed) / ids.length : 0;
  }
  book.place = part.end;
  const shown = part.text.slice(-200), own = log(), before = own.characters;
  add({ text: shown, nats: null }, false);
  own.characters = Math.max(before, book.before + now.characters + now.length);  // what is read again counts once
  mark();
  showReading(book, part.end / book.file.size, now.at + ids.length);
}
const perCharacter = (book, more) => (book.nats + more.nats) / Math.LN2 / Math.max(1, book.scored + more.characters);
function showReading(book, share, nTokens, more = { nats: 0, characters: 0 }) {
  const seconds = (performance.now() - book.began) / 1000;
  $("bar").value = share;
  say("reading", "readingLine", {
    d: size(share * book.file.size), t: size(book.file.size), s: number(Math.round((nTokens - book.marks[0].at) / seconds)),
    b: perCharacter(book, more).toFixed(2), l: `${Math.round((seconds * (1 - share)) / Math.max(share, 0.001))} s`,
  });
}
$("file").addEventListener("change", (event) => { if (event.target.files[0]) readBook(event.target.files[0]); });
$("pause").addEventListener("click", () => {
  if (!state.reading) return;
  state.reading.paused = !state.reading.paused;
  say("pause", state.reading.paused ? "resume" : "pause");
  status(state.reading.paused ? "paused" : "reading");
});
document.addEventListener("dragover", (event) => event.preventDefault());
document.addEventListener("drop", (event) => { event.preventDefault(); if (event.dataTransfer.files[0]) readBook(event.dataTransfer.files[0]); });

// --- the beginning -------------------------------------------------------------------------------------------------------

$("language").addEventListener("change", (event) => speak(event.target.value));
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  state.key = $("key").value;
  if ($("key-kept").checked) sessionStorage.setItem("key", state.key);
  $("key-form").hidden = true;
  begin();
});
async function begin() {
  try {
    const model = (await json("/v1/models")).data[0];
    state.meta = { id: model.id, ...model.meta };
    showModel();
    const sessions = (await json("/v1/sessions")).data;
    const newer = (one, other) => (other.expires_at > one.expires_at ? other : one);  // which was used last
    if (sessions.length) choose(sessions.reduce(newer).id); else await open();
    status("ready");
  } catch (error) { fail(error); }
}
state.key = sessionStorage.getItem("key") ?? "";
speak(navigator.languages.some((each) => each.startsWith("zh")) && !navigator.languages[0].startsWith("en") ? "zh" : "en");
begin();
