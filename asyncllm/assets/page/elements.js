"use strict";
// Elements and requests. What comes from the server becomes text nodes, never markup.

const byId = (id) => document.getElementById(id);
const base = new URL(".", location.href);
let whole = null; // what /openapi.json says

function make(tag, properties, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties || {})) {
    if (name in node && typeof value !== "string") node[name] = value;
    else node.setAttribute(name === "className" ? "class" : name, value);
  }
  for (const child of children.flat()) if (child !== null && child !== undefined) node.append(child);
  return node;
}

function button(text, act, properties) {
  const node = make("button", {type: "button", ...properties}, text);
  node.addEventListener("click", act);
  return node;
}

function copyable(read) {
  const node = button("Copy", async () => {
    try {
      await navigator.clipboard.writeText(read());
      node.textContent = "Copied";
    } catch {
      node.textContent = "Select and copy";
    }
    setTimeout(() => { node.textContent = "Copy"; }, 2000);
  }, {className: "quiet"});
  return node;
}

function prose(text) {
  return text.split("`").map((part, index) => (index % 2 ? make("code", {}, part) : part));
}

function headers(extra) {
  const key = byId("key").value.trim();
  return key ? {...extra, Authorization: "Bearer " + key} : {...extra};
}

function address(path) {
  return new URL(path.replace(/^\//, ""), base);
}

const quoted = (text) => "'" + text.replaceAll("'", "'\\''") + "'";

function curl(method, path, operation, body) {
  const lines = ["curl " + quoted(address(path).href)];
  if (method !== "POST" && method !== "GET") lines[0] = "curl -X " + method + lines[0].slice(4);
  if ((operation.security || []).length) lines.push('-H "Authorization: Bearer $ASYNCLLM_API_KEY"');
  if (body !== null) lines.push("-H 'Content-Type: application/json'", "-d " + quoted(body));
  return lines.join(" \\\n  ");
}

const isA = (response, type) => (response.headers.get("Content-Type") || "").startsWith(type);

async function eachPiece(response, take) {
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  for (;;) {
    const {done, value} = await reader.read();
    if (done) break;
    take(decoder.decode(value, {stream: true}));
  }
  take(decoder.decode());
}

// The data of each server-sent event.
async function eachEvent(response, take) {
  let rest = "";
  await eachPiece(response, (text) => {
    const events = (rest + text).split("\n\n");
    rest = events.pop();
    for (const event of events) if (event.startsWith("data: ")) take(event.slice(6));
  });
}

// What a response that is no success says, in its own words.
async function complaint(response) {
  const text = await response.text();
  const wait = response.headers.get("Retry-After");
  const later = wait ? ` Retry-After: ${wait} s.` : "";
  try {
    return inFull(JSON.parse(text).error, response.status) + later;
  } catch {
    return [response.status, response.statusText, text.slice(0, 1000)].filter(Boolean).join(" ") + later;
  }
}

function inFull(error, status) {
  const names = [status, error.type, error.code].filter(Boolean).join(" ");
  return (names ? names + ": " : "") + error.message;
}
