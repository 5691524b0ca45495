// The console. Whatever comes from a document, a client or a file name reaches the page as text only.

const KEY = "headstart-key";
const PARTS = ["retrieve", "plan", "queue", "prefill", "other", "decode"];
const STATUS = { in_progress: "working", completed: "ready", failed: "failed", cancelled: "cancelled" };

const byId = (id) => document.getElementById(id);
const state = { model: null, store: null, history: [], filesAfter: null, poll: 0, busy: null };

function element(tag, { text, kind, ...properties } = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  if (text !== undefined) made.textContent = text;
  if (kind) made.className = kind;
  made.append(...children);
  return made;
}

function number(value, unit = "") {
  return typeof value === "number" ? `${Math.round(value).toLocaleString("en")}${unit}` : "unknown";
}

function duration(ms) {
  if (typeof ms !== "number") return "unknown";
  return ms >= 1000 ? `${(ms / 1000).toFixed(2)} s` : `${ms.toFixed(ms < 10 ? 1 : 0)} ms`;
}

// The gateway

async function send(path, { json, ...options } = {}) {
  const key = sessionStorage.getItem(KEY);
  const headers = key ? { authorization: `Bearer ${key}` } : {};
  if (json) Object.assign(options, { method: "POST", body: JSON.stringify(json) });
  if (json) headers["content-type"] = "application/json";
  const response = await fetch(path, { ...options, headers });
  if (response.ok) return response;
  if (response.status === 401) askForKey(Boolean(key));
  const body = await response.json().catch(() => null);
  const message = body?.error?.message ?? `The gateway answered with status ${response.status}.`;
  throw Object.assign(new Error(message), { status: response.status });
}

async function call(path, options) {
  return (await send(path, options)).json();
}

function storePath(...parts) {
  return ["/v1/vector_stores", ...parts.map(encodeURIComponent)].join("/");
}

function askForKey(wrong) {
  byId("key-form").hidden = false;
  byId("main").hidden = true;
  byId("key-hint").textContent = wrong ? "That key is not known here." : "Kept in this tab only, until it is closed.";
  byId("key").focus();
}

function complain(error) {
  const shown = error && error.status !== 401;
  byId("alert").hidden = !shown;
  byId("alert").textContent = shown ? error.message : "";
}

function guarded(work) {
  return async (event) => {
    event?.preventDefault();
    try {
      complain(null);
      await work(event);
    } catch (error) {
      complain(error);
    }
  };
}

// The engine

async function showEngine() {
  const ready = await (await fetch("/readyz")).json();
  const engine = ready.engine;
  byId("engine-dot").className = `dot ${ready.ready ? "up" : "down"}`;
  const several = ready.replicas.length > 1;
  const usable = ready.replicas.filter(({ state }) => state === "ok").length;
  const fleet = several ? `, ${usable} of ${ready.replicas.length} engines` : "";
  byId("engine-line").textContent = ready.ready
    ? `${engine.model}${fleet}`
    : "No engine: documents and search work, answers wait";
  const facts = {
    Model: engine.model ?? "unknown",
    Window: number(engine.max_model_len, " tokens"),
    Block: number(engine.block_size, " tokens"),
    Tokenizer: engine.tokenizer.exact ? "the model's own" : "an estimate",
    Prompts: engine.token_exact ? "sent as token ids" : "sent as text",
    Transcripts: `in ${ready.store.kind}${ready.store.degraded ? ", degraded" : ""}`,
  };
  for (const { name, state, error } of several ? ready.replicas : []) {
    facts[name] = error ? `${state.replace("_", " ")}: ${error}` : state;
  }
  const rows = Object.entries(facts).map(([dt, dd]) => [element("dt", { text: dt }), element("dd", { text: dd })]);
  byId("engine-facts").replaceChildren(...rows.flat());
  const missing = engine.missing.map(({ feature, cost, cure }) =>
    element("li", {}, element("b", { text: `No ${feature}: ` }), `${cost}. Cure: ${cure}.`),
  );
  byId("engine-missing").replaceChildren(...missing);
}

// Stores and files

async function showStores() {
  const asked = (state.storesAsked = (state.storesAsked ?? 0) + 1);
  const page = await call("/v1/vector_stores?limit=100");
  // A list that was asked for earlier may come later, and lack what has been made since.
  if (asked !== state.storesAsked) return;
  if (!page.data.some((store) => store.id === state.store?.id)) state.store = null;
  byId("stores").replaceChildren(...page.data.map(storeRow));
  if (!page.data.length) byId("stores").append(element("li", { kind: "hint", text: "No stores yet." }));
}

function storeRow(store) {
  const files = store.file_counts.total;
  const button = element(
    "button",
    { type: "button", ariaPressed: String(store.id === state.store?.id), onclick: guarded(() => choose(store)) },
    element("bdi", { text: store.name || store.id }),
    element("span", { kind: "hint", text: files === 1 ? "1 file" : `${number(files)} files` }),
  );
  return element("li", {}, button);
}

async function choose(store) {
  state.store = state.store?.id === store.id ? null : store;
  byId("files-panel").hidden = state.store === null;
  const name = state.store && (state.store.name || state.store.id);
  byId("scope").textContent = name ? `Answers draw on ${name}` : "No store: the model answers alone";
  byId("uploads").replaceChildren();
  await showStores();
  if (state.store) await showFiles();
}

async function showFiles() {
  const store = state.store;
  clearTimeout(state.poll);
  const page = await call(`${storePath(store.id, "files")}?limit=100`);
  if (store !== state.store) return;
  byId("files").replaceChildren(...page.data.map(fileRow));
  if (!page.data.length) byId("files").append(element("li", { kind: "hint", text: "This store is empty." }));
  continueFiles(page);
  if (page.data.some((file) => file.status === "in_progress")) {
    state.poll = setTimeout(guarded(async () => Promise.all([showFiles(), showStores()])), 1000);
  }
}

function continueFiles(page) {
  state.filesAfter = page.has_more ? page.last_id : null;
  byId("files-more").hidden = !page.has_more;
}

async function showMoreFiles() {
  const page = await call(`${storePath(state.store.id, "files")}?limit=100&after=${encodeURIComponent(state.filesAfter)}`);
  byId("files").append(...page.data.map(fileRow));
  continueFiles(page);
}

function fileRow(file) {
  const remove = element("button", { kind: "quiet", type: "button", text: "✕", title: "Remove from this store" });
  remove.ariaLabel = `Remove ${file.filename}`;
  remove.onclick = guarded(async () => {
    if (!confirm(`Remove ${file.filename} from this store?`)) return;
    await call(storePath(file.vector_store_id, "files", file.id), { method: "DELETE" });
    await Promise.all([showFiles(), showStores()]);
  });
  const row = element(
    "li",
    {},
    element("bdi", { kind: "name", text: file.filename, title: file.filename }),
    element("span", { kind: `status ${file.status}`, text: STATUS[file.status] ?? file.status }),
    remove,
  );
  if (file.last_error) row.append(element("span", { kind: "why", text: file.last_error.message }));
  return row;
}

async function upload(files) {
  const store = state.store;
  for (const file of files) {
    const status = element("span", { kind: "status in_progress", text: "sending" });
    const row = element("li", {}, element("bdi", { kind: "name", text: file.name, title: file.name }), status);
    byId("uploads").append(row);
    try {
      const form = new FormData();
      form.append("purpose", "assistants");
      form.append("file", file);
      const sent = await call("/v1/files", { method: "POST", body: form });
      await call(storePath(store.id, "files"), { json: { file_id: sent.id } });
      row.remove();
    } catch (error) {
      status.textContent = "failed";
      status.className = "status failed";
      row.append(element("span", { kind: "why", text: error.message }));
    }
  }
  await Promise.all([showStores(), store === state.store ? showFiles() : null]);
}

// Questions and answers

async function* events(response) {
  const decoder = new TextDecoder();
  let rest = "";
  for await (const piece of response.body) {
    rest += decoder.decode(piece, { stream: true });
    const lines = rest.split("\n");
    rest = lines.pop();
    for (const line of lines) {
      const data = line.startsWith("data:") ? line.slice(5).trim() : "";
      if (data === "[DONE]") return;
      if (data) yield JSON.parse(data);
    }
  }
}

async function ask(question) {
  const answer = element("p", { kind: "answer", ariaLive: "polite", ariaBusy: "true", dir: "auto" });
  const turn = element("article", { kind: "turn" }, element("p", { kind: "asked", text: question, dir: "auto" }), answer);
  byId("turns").append(turn);
  setBusy(new AbortController());
  let text = "";
  let told = null;
  let finished = false;
  try {
    const messages = [...state.history, { role: "user", content: question }];
    const body = { model: state.model ?? (await findModel()), messages, stream: true };
    if (state.store) body.headstart = { vector_store_ids: [state.store.id] };
    const response = await send("/v1/chat/completions", { json: body, signal: state.busy.signal });
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      const choice = event.choices?.[0];
      text += choice?.delta?.content ?? "";
      finished ||= Boolean(choice?.finish_reason);
      told = event.headstart ?? told;
      answer.textContent = text;
    }
    if (!finished) throw new Error("The answer was cut off before its end.");
    state.history = [...messages, { role: "assistant", content: text }];
    finish(turn, answer, text, told);
  } catch (error) {
    const stopped = error.name === "AbortError";
    turn.append(element("p", { kind: stopped ? "hint" : "error", text: stopped ? "Stopped." : error.message }));
  } finally {
    answer.ariaBusy = "false";
    setBusy(null);
    await showCalls();
  }
}

async function findModel() {
  const models = (await call("/v1/models")).data.map((model) => model.id);
  state.model = models.find((id) => !id.includes("@")) ?? null;
  if (!state.model) throw new Error("The gateway serves no model: its engine is not there.");
  return state.model;
}

function setBusy(controller) {
  state.busy = controller;
  byId("send").disabled = controller !== null;
  byId("stop").hidden = controller === null;
  byId("empty").hidden = true;
  byId("reset").hidden = controller !== null;
}

function finish(turn, answer, text, told) {
  const citations = told?.citations ?? [];
  const passages = new Map(citations.map((citation) => [citation.label, passage(citation)]));
  answer.replaceChildren(...withCitations(text, passages));
  if (passages.size) turn.append(element("div", { kind: "passages" }, ...passages.values()));
  if (told?.timings) turn.append(timing(told.timings));
  for (const dropped of told?.plan?.dropped ?? []) {
    turn.append(element("p", { kind: "hint", text: `Left out: ${dropped.reason}` }));
  }
}

function withCitations(text, passages) {
  return text.split(/(\[[^\]\s]{1,32}\])/).map((piece) => {
    const label = piece.slice(1, -1);
    const shown = piece.startsWith("[") ? passages.get(label) : undefined;
    if (!shown) return piece;
    const onclick = () => {
      shown.open = true;
      shown.scrollIntoView({ block: "nearest" });
      shown.querySelector("summary").focus();
    };
    return element("button", { kind: "cite", type: "button", text: label, title: "Show the passage", onclick });
  });
}

function passage(citation) {
  const summary = element(
    "summary",
    {},
    element("span", { kind: "tag", text: citation.label }),
    element("bdi", { text: citation.filename }),
    citation.title ? ` · ${citation.title}` : "",
    ` · ${Math.round(citation.score * 100)} %`,
  );
  if (citation.named) summary.append(element("span", { kind: "named", text: "named in the answer" }));
  return element("details", { open: citation.named }, summary, element("p", { text: citation.text, dir: "auto" }));
}

// `other` is what the gateway did besides retrieving and planning, so that the parts add up to the whole.
function timing(timings) {
  const times = Object.fromEntries(PARTS.map((part) => [part, timings[`${part}_ms`] ?? null]));
  if (timings.ttft_ms !== null) {
    times.other = timings.ttft_ms - times.retrieve - times.plan - times.queue - times.prefill;
    times.decode = timings.total_ms - timings.ttft_ms;
  }
  const known = PARTS.filter((part) => times[part] !== null && (part !== "other" || times.other >= 1));
  const bar = element("div", { kind: "bar", ariaHidden: "true" });
  for (const part of known) {
    const segment = element("i", { kind: part });
    segment.style.flexGrow = String(Math.max(times[part], 0));
    bar.append(segment);
  }
  const legend = known.map((part) =>
    element("span", {}, element("i", { kind: part, ariaHidden: "true" }), `${part} ${duration(times[part])}`),
  );
  const rate = timings.decode_tokens_per_s;
  const predicted = timings.predicted_ttft_ms === null ? "" : ` (predicted: ${duration(timings.predicted_ttft_ms)})`;
  const summary =
    `First token after ${duration(timings.ttft_ms)}${predicted}. ${number(timings.prompt_tokens)} prompt tokens: ` +
    `${number(timings.cached_tokens)} cached, ${number(timings.uncached_tokens)} uncached. ` +
    `${number(timings.output_tokens)} answer tokens${rate === null ? "" : ` at ${rate.toFixed(1)} per second`}.`;
  return element("div", { kind: "timing" }, bar, element("div", { kind: "legend" }, ...legend), element("div", { text: summary }));
}

// Recent calls

async function showCalls() {
  const calls = (await call("/v1/calls?limit=20")).data;
  byId("no-calls").hidden = calls.length > 0;
  byId("calls").replaceChildren(...calls.map(callRow));
}

function callRow({ created, status, error, model, timings }) {
  const cell = (text, kind) => element("td", { text, kind, title: text });
  const names = [new Date(created * 1000).toLocaleTimeString(), error ? `${status} ${error}` : String(status), model];
  const figures = timings && [
    duration(timings.ttft_ms),
    duration(timings.total_ms),
    ...["prompt", "cached", "uncached", "output"].map((kind) => number(timings[`${kind}_tokens`])),
    number(timings.decode_tokens_per_s, "/s"),
  ];
  const cells = [...names.map((text) => cell(text)), ...(figures ?? Array(7).fill("")).map((text) => cell(text, "num"))];
  return element("tr", {}, ...cells);
}

// Start

async function start() {
  byId("key-form").hidden = true;
  byId("main").hidden = false;
  await showEngine();
  await call("/v1/models");
  await Promise.all([showStores(), showCalls()]);
}

byId("key-form").onsubmit = guarded(async () => {
  sessionStorage.setItem(KEY, byId("key").value.trim());
  byId("key").value = "";
  await start();
});
byId("store-form").onsubmit = guarded(async () => {
  const store = await call("/v1/vector_stores", { json: { name: byId("store-name").value } });
  byId("store-name").value = "";
  await choose(store);
});
byId("upload").onchange = guarded(async (event) => {
  const files = [...event.target.files];
  event.target.value = "";
  await upload(files);
});
byId("files-more").onclick = guarded(showMoreFiles);
byId("calls-refresh").onclick = guarded(showCalls);
byId("stop").onclick = () => state.busy?.abort();
byId("reset").onclick = () => {
  state.history = [];
  byId("turns").replaceChildren();
  byId("reset").hidden = true;
  byId("empty").hidden = false;
  byId("question").focus();
};
byId("ask-form").onsubmit = guarded(async () => {
  const question = byId("question").value.trim();
  if (!question || state.busy) return;
  byId("question").value = "";
  await ask(question);
});
byId("question").onkeydown = (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  byId("ask-form").requestSubmit();
};
for (const [name, over] of [["dragover", true], ["dragleave", false], ["drop", false]]) {
  byId("drop").addEventListener(name, (event) => {
    event.preventDefault();
    byId("drop").classList.toggle("over", over);
    if (name === "drop") guarded(() => upload([...event.dataTransfer.files]))();
  });
}
await guarded(start)();
setInterval(() => showEngine().catch(complain), 15000);
