"use strict";
// A conversation: exchanges of a question and its answer. Each request sends those that came before it.
//
// The state of an answer: "waiting", then "done", "stopped" (by the reader) or "failed" (by the server or on the way).

const exchanges = [];
let running = null; // the AbortController of the answer that comes in

// A question that was never answered is left out: what failed once would fail in every later request.
const answered = (exchange) => exchange.text !== "" || exchange.state === "done";

function messagesBefore(index) {
  return exchanges.slice(0, index).filter(answered).flatMap(({question, text}) =>
    [{role: "user", content: question}, {role: "assistant", content: text}]);
}

function showNext() {
  if (!byId("request-box").open) return;
  showRequest([...messagesBefore(exchanges.length), {role: "user", content: byId("user").value || "…"}]);
}

// Showing.

function addExchange(question) {
  const exchange = {question, text: "", state: "waiting", error: "", note: ""};
  exchange.asked = make("article", {className: "question", "aria-label": "You"});
  exchange.body = make("div", {className: "text"});
  exchange.failure = make("p", {className: "failure", role: "alert", hidden: true});
  exchange.foot = make("p", {className: "small muted foot"});
  exchange.actions = make("div", {className: "actions"});
  exchange.name = make("h3");
  exchange.answer = make("article", {className: "answer", "aria-label": "Answer"},
    exchange.name, exchange.body, exchange.failure, exchange.foot, exchange.actions);
  exchanges.push(exchange);
  byId("log").append(exchange.asked, exchange.answer);
  showQuestion(exchange);
  return exchange;
}

function showQuestion(exchange) {
  exchange.asked.replaceChildren(make("h3", {}, "You"), make("div", {className: "text"}, exchange.question),
    make("div", {className: "actions"}, button("Edit", () => edit(exchange), {className: "quiet", disabled: running !== null}),
      copyable(() => exchange.question)));
}

function showText(exchange) {
  const following = innerHeight + scrollY >= document.documentElement.scrollHeight - 60;
  if (byId("markdown").checked) showMarkdown(exchange.body, exchange.text);
  else showPlain(exchange.body, exchange.text);
  exchange.body.classList.toggle("plain", !byId("markdown").checked);
  if (following) scrollTo(0, document.documentElement.scrollHeight);
}

function showAnswer(exchange) {
  const following = innerHeight + scrollY >= document.documentElement.scrollHeight - 60;
  showText(exchange);
  exchange.answer.classList.toggle("waiting", exchange.state === "waiting");
  exchange.failure.hidden = exchange.error === "";
  if (exchange.failure.textContent !== exchange.error) exchange.failure.textContent = exchange.error;
  const lost = exchange.state !== "waiting" && !answered(exchange);
  exchange.foot.textContent = [exchange.note, lost && "left out of what is sent until it is answered"].filter(Boolean).join(" · ");
  exchange.actions.replaceChildren(...(exchange.state === "waiting" ? [] : actionsOf(exchange)));
  if (following) scrollTo(0, document.documentElement.scrollHeight);
}

function actionsOf(exchange) {
  const quiet = {className: "quiet", disabled: running !== null};
  const last = exchange === exchanges.at(-1), cut = exchange.state !== "done" || exchange.ending === "length";
  return [button("Retry", () => again(exchange), quiet),
    last && cut && exchange.text ? button("Continue", () => ask(exchange, true), quiet) : null,
    exchange.text ? copyable(() => exchange.text) : null].filter(Boolean);
}

function showAll() {
  for (const exchange of exchanges) {
    if (!exchange.asked.querySelector("form")) showQuestion(exchange);
    showAnswer(exchange);
  }
  byId("empty").hidden = exchanges.length > 0;
  byId("clear").hidden = exchanges.length === 0;
  byId("clear").disabled = byId("send").hidden = running !== null;
  byId("stop").hidden = running === null;
  byId("log").setAttribute("aria-busy", String(running !== null));
  showNext();
}

// Asking.

function cutAfter(exchange) {
  for (const each of exchanges.splice(exchanges.indexOf(exchange) + 1)) {
    each.asked.remove();
    each.answer.remove();
  }
}

function again(exchange) {
  if (running) return;
  cutAfter(exchange);
  ask(exchange, false);
}

function send() {
  const question = byId("user").value;
  if (running || question.trim() === "") return;
  byId("user").value = "";
  fit(byId("user"));
  const exchange = addExchange(question);
  scrollTo(0, document.documentElement.scrollHeight);
  ask(exchange, false);
}

function edit(exchange) {
  if (running) return;
  const area = make("textarea", {"aria-label": "Edit the message", rows: 2});
  area.value = exchange.question;
  const leave = () => {
    showQuestion(exchange);
    exchange.asked.querySelector("button").focus();
  };
  const form = make("form", {}, area, make("div", {className: "actions"}, make("button", {className: "main"}, "Send"),
    button("Cancel", leave), make("span", {className: "small muted"}, "Replaces what follows.")));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (running || area.value.trim() === "") return;
    exchange.question = area.value;
    showQuestion(exchange);
    again(exchange);
  });
  area.addEventListener("keydown", (event) => {
    sendOnEnter(event, form);
    if (event.key === "Escape") leave();
  });
  area.addEventListener("input", () => fit(area));
  exchange.asked.replaceChildren(make("h3", {}, "You"), form);
  fit(area);
  area.focus();
}

// Ask for the answer, or for more of it.
async function ask(exchange, continued) {
  if (running) return;
  const here = running = new AbortController();
  const messages = [...messagesBefore(exchanges.indexOf(exchange)), {role: "user", content: exchange.question}];
  if (continued) messages.push({role: "assistant", content: exchange.text});
  const body = requestOf(messages);
  Object.assign(exchange, {state: "waiting", error: "", note: "", ending: null}, continued ? {} : {text: ""});
  exchange.name.textContent = settingOf("model") || modelName;
  const leftOf = document.activeElement;
  showAll();
  if (leftOf !== byId("user")) byId("stop").focus();
  byId("spoken").textContent = "Waiting for the answer.";
  const seen = {began: performance.now(), first: null, last: null, usage: null};
  try {
    await receive(exchange, body, seen, here.signal);
    exchange.state = exchange.error ? "failed" : "done";
  } catch (error) {
    exchange.state = here.signal.aborted ? "stopped" : "failed";
    if (!here.signal.aborted) exchange.error = "No answer: " + error.message;
  }
  clearTimeout(exchange.timer);
  exchange.timer = null;
  exchange.note = noteOf(exchange, seen);
  running = null;
  const stopping = document.activeElement === byId("stop");
  showAll();
  if (stopping) byId("user").focus({preventScroll: true});
  byId("spoken").textContent = exchange.error ? "" : `Answer: ${exchange.text} (${exchange.note})`;
  showHealth();
}

async function receive(exchange, body, seen, signal) {
  const response = await fetch(address(CHAT), {method: "POST", body: JSON.stringify(body),
    headers: headers({"Content-Type": "application/json"}), signal});
  if (!response.ok) {
    exchange.error = await complaint(response);
    if (response.status === 401) askForKey();
    return;
  }
  if (!isA(response, "text/event-stream")) {
    take(exchange, await response.json(), seen);
    return;
  }
  await eachEvent(response, (data) => { if (data !== "[DONE]") take(exchange, JSON.parse(data), seen); });
  if (!exchange.error && !exchange.ending) exchange.error = "The stream broke off: it has no finish_reason.";
}

function take(exchange, part, seen) {
  if (part.error) exchange.error = inFull(part.error);
  if (part.usage) seen.usage = part.usage;
  for (const choice of part.choices || []) {
    const text = (choice.delta || choice.message).content;
    if (text) {
      exchange.text += text;
      seen.last = performance.now();
      if (seen.first === null) {
        seen.first = seen.last;
        showHealth();
      }
      exchange.timer ??= setTimeout(() => { exchange.timer = null; showText(exchange); }, 40);
    }
    if (choice.finish_reason) exchange.ending = choice.finish_reason;
  }
}

const ENDINGS = {length: "length: cut off at the limit of tokens", stop: "stop"};

function noteOf({state, ending, text}, {began, first, last, usage}) {
  const parts = [];
  if (state === "stopped") parts.push("stopped by you");
  if (ending) parts.push(ENDINGS[ending] || ending);
  if (state === "done" && text === "") parts.push("the answer is empty");
  if (usage) {
    const cached = (usage.prompt_tokens_details || {}).cached_tokens;
    parts.push(`${usage.completion_tokens} tokens`);
    // Of what came in one go there is no speed to tell.
    if (last - first > 20) parts.push(`${((usage.completion_tokens - 1) * 1000 / (last - first)).toFixed(1)} tokens/s`);
    parts.push(`prompt ${usage.prompt_tokens} tokens` + (cached ? `, ${cached} of them cached` : ""));
  }
  if (last > first) parts.push(`first text after ${Math.round(first - began)} ms`);
  parts.push(`${((performance.now() - began) / 1000).toFixed(2)} s`);
  return parts.join(" · ");
}

// Typing.

function fit(area) {
  area.style.height = "auto";
  area.style.height = area.scrollHeight + 2 + "px";
}

// While an input method composes a word, Enter is its own.
function sendOnEnter(event, form) {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  form.requestSubmit();
}

byId("chat-form").addEventListener("submit", (event) => { event.preventDefault(); send(); });
byId("user").addEventListener("keydown", (event) => {
  sendOnEnter(event, byId("chat-form"));
  if (event.key === "Escape" && running) running.abort();
});
byId("user").addEventListener("input", () => { fit(byId("user")); showNext(); });
byId("stop").addEventListener("click", () => running && running.abort());
byId("clear").addEventListener("click", () => {
  if (running) return;
  for (const {asked, answer} of exchanges.splice(0)) {
    asked.remove();
    answer.remove();
  }
  showAll();
  byId("user").focus();
});
byId("markdown").addEventListener("change", showAll);
byId("settings").addEventListener("input", showNext);
byId("request-box").addEventListener("toggle", showNext);
