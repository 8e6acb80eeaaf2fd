// -- chat: a conversation with one model, kept only in this page ----------------------------------------------------

let turns = [], answering = null, offered = "";

// Is this request part of the conversation? Its id contains the call's.
function isMine(id) { return answering !== null && answering.call !== "" && id.includes(answering.call); }

function chat(status) {
  const mine = status.requests.find((one) => isMine(one.request));
  at("chat-where").textContent = answering === null ? "" : mine ? where(mine) : "Waiting for the daemon.";
  const served = JSON.stringify(status.served.map((one) => [one.names, one.state, one.capabilities]));
  if (served !== offered) { offered = served; offer(); }
}
function where(mine) {
  if (mine.worker === null) return "Your request is queued.";
  const facts = [`Your request is on ${mine.worker}`, `${size(mine.kv_bytes)} of KV`];
  if (mine.moving_to) facts.push(`moving to ${mine.moving_to}`);
  if (mine.moves) facts.push(`moved ${mine.moves}×`);
  return `${facts.join(", ")}.`;
}
async function offer() {
  const chosen = at("chat-model").value;
  try {
    const answer = await fetch("v1/models", { headers: withKey(), cache: "no-store", credentials: "omit" });
    if (!answer.ok) throw new Error(String(answer.status));
    const ids = (await answer.json()).data.filter((one) => one.capabilities.includes("completion")).map((one) => one.id);
    at("chat-model").replaceChildren(...ids.map((id) => new Option(id, id, false, id === chosen)));
    at("chat").hidden = !ids.length && !turns.length;
  } catch {
    offered = "";  // retry with the next status
  }
}
function withKey() {
  const key = sessionStorage.getItem(KEY);
  return key ? { Authorization: `Bearer ${key}` } : {};
}

async function send() {
  const text = at("chat-text").value.trim();
  if (answering !== null || !text || !at("chat-model").value) return;
  at("chat-text").value = "";
  const conversation = turns;
  conversation.push({ role: "user", content: text });
  at("chat-log").append(make("div", "turn user", text));
  answering = { call: "", ended: new AbortController(), shown: new Answer() };
  busy(true);
  try {
    await answer(answering);
  } catch (error) {
    if (!answering.ended.signal.aborted) answering.shown.failed(error.message);
  }
  const { content, spoke } = answering.shown;
  if (content) conversation.push({ role: "assistant", content });
  else conversation.pop();
  if (!spoke && conversation === turns) at("chat-text").value ||= text;  // so it can be sent again
  answering.shown.end(answering.ended.signal.aborted);
  answering = null;
  busy(false);
}
function busy(is) {
  at("chat-log").setAttribute("aria-busy", String(is));
  const lost = at("chat-stop") === document.activeElement;
  at("chat-stop").hidden = !is;
  at("chat-send").hidden = is;
  at("chat-where").textContent = "";
  if (lost) at("chat-text").focus();
  follow();
}
function stop() { answering?.ended.abort(); }

async function answer(call) {
  const asked = {
    model: at("chat-model").value, messages: turns, stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
    max_completion_tokens: parseInt(at("chat-most").value, 10) || undefined,
  };
  const response = await fetch("v1/chat/completions", {
    method: "POST", headers: { "Content-Type": "application/json", ...withKey() }, body: JSON.stringify(asked),
    signal: call.ended.signal, credentials: "omit",
  });
  if (response.status === 401) ask(true);
  if (!response.ok) throw new Error((await response.json().catch(() => null))?.error?.message ?? `HTTP ${response.status}`);
  call.call = response.headers.get("x-request-id") ?? "";
  look();  // a short response would be over before the next status
  for await (const event of events(response.body)) {
    if (event.error) throw new Error(event.error.message);
    call.shown.take(event);
  }
}
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data: {")) yield JSON.parse(line.slice(6));
  }
}

// A response on the page: folded reasoning, text, and speed.
class Answer {
  content = "";
  #asked_ms = performance.now();
  #first_ms = 0;
  #last_ms = 0;
  #tokens = 0;
  #why = "";
  #reasoning = document.createTextNode("");
  #text = document.createTextNode("");
  #folded = make("details", "", make("summary", "", "Reasoning"), this.#reasoning);
  #figures = make("div", "dim");

  constructor() {
    this.#folded.hidden = true;
    at("chat-log").append(make("div", "turn", this.#folded, this.#text, this.#figures));
  }
  get spoke() { return this.#first_ms > 0; }
  take(event) {
    const { delta = {}, finish_reason: why } = event.choices[0] ?? {};
    const reasoning = delta.reasoning ?? delta.reasoning_content ?? "", text = delta.content ?? "";
    this.#why = why ?? this.#why;
    this.#tokens = event.usage?.completion_tokens ?? this.#tokens;
    if (!reasoning && !text) return;
    this.#last_ms = performance.now();
    this.#first_ms ||= this.#last_ms;
    this.#folded.hidden &&= !reasoning;
    this.#reasoning.appendData(reasoning);
    this.#text.appendData(text);
    this.content += text;
    this.#tell();
    follow();
  }
  failed(message) {
    this.#figures.before(make("div", "failed", message));
  }
  end(stopped) {
    this.#tell(stopped ? "stopped" : this.#why === "length" ? "length limit reached" : "");
  }
  #tell(how = "") {
    const facts = [];
    if (this.#first_ms) facts.push(`first token after ${duration((this.#first_ms - this.#asked_ms) / 1e3)}`);
    const spent_s = (this.#last_ms - this.#first_ms) / 1e3;
    if (spent_s && this.#tokens > 1) facts.push(`${((this.#tokens - 1) / spent_s).toFixed(1)} tokens/s`);
    if (this.#tokens) facts.push(`${count(this.#tokens)} tokens`);
    this.#figures.textContent = [...facts, how].filter(Boolean).join("  ·  ");
  }
}

// Keep the end in view unless the reader has scrolled back.
let following = 0;
function follow() {
  const log = at("chat-log");
  if (!following && log.scrollHeight - log.scrollTop - log.clientHeight < 80)
    following = requestAnimationFrame(() => { following = 0; log.scrollTop = log.scrollHeight; });
}

at("chat-form").addEventListener("submit", (event) => { event.preventDefault(); send(); });
at("chat-text").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
document.addEventListener("keydown", (event) => { if (event.key === "Escape") stop(); });
at("chat-stop").addEventListener("click", stop);
at("chat-new").addEventListener("click", () => {
  stop();
  turns = [];
  at("chat-log").replaceChildren();
  at("chat-text").focus();
});
