"use strict";
// What both views share: which of them is shown, the key, the colours, and how the server is.

let loading = null; // the timer of the next attempt

function tell(text) {
  const notice = byId("notice");
  notice.hidden = text === "";
  if (notice.textContent !== text) notice.textContent = text;
}

function askForKey() {
  byId("key-box").open = true;
  byId("key").focus();
}

async function load() {
  clearTimeout(loading);
  try {
    const response = await fetch(address("openapi.json"), {headers: headers()});
    if (response.ok) {
      whole = await response.json();
      tell("");
      showRoutes();
      byId("chat-link").hidden = !whole.paths[CHAT];
      if (whole.paths[CHAT]) showSettings();
      openTarget();
      if (WIDE.matches && document.activeElement === document.body && !byId("chat").hidden) byId("user").focus();
      return;
    }
    const seconds = Number(response.headers.get("Retry-After")) || 3;
    const words = await complaint(response);
    if (response.status === 401) {
      tell("The server asks for a key. Put it into the field, and press Enter.");
      askForKey();
      return;
    }
    if (response.status !== 503) return tell(words);
    tell(`The model is not ready. ${words} This page tries again by itself.`);
    loading = setTimeout(load, seconds * 1000);
  } catch (error) {
    tell(`The server does not answer (${error.message}). This page tries again by itself.`);
    loading = setTimeout(load, 3000);
  }
}

async function showHealth() {
  const place = byId("health");
  try {
    const response = await fetch(address("health"));
    const {status, running, waiting, error} = await response.json();
    place.className = "small " + (response.ok ? "good" : "bad");
    const words = status ? `${status}, ${running} running, ${waiting} waiting` : `${response.status} ${error.message}`;
    place.replaceChildren(make("span", {className: "dot"}), words);
  } catch {
    place.className = "small bad";
    place.textContent = "no answer";
  }
}

function target() {
  try {
    return byId(decodeURIComponent(location.hash.slice(1)));
  } catch {
    return null;
  }
}

function openTarget() {
  const found = target();
  const chatting = byId("chat-link").hidden ? false : found ? !byId("explorer").contains(found) : byId("explorer").hidden;
  byId("chat").hidden = !chatting;
  byId("explorer").hidden = chatting;
  for (const [link, here] of [["chat-link", chatting], ["routes-link", !chatting]]) {
    if (here) byId(link).setAttribute("aria-current", "page");
    else byId(link).removeAttribute("aria-current");
  }
  if (found && found.tagName === "DETAILS") {
    found.open = true;
    found.scrollIntoView();
  }
}

// The colours are the system's until the switch says otherwise; the choice is all that outlives the page.

const DARK = matchMedia("(prefers-color-scheme: dark)");

function stored(...choice) {
  try {
    if (choice.length) localStorage.setItem("theme", choice[0]);
    return localStorage.getItem("theme");
  } catch {
    return null; // a browser that keeps nothing
  }
}

function paint(choice) {
  const dark = choice ? choice === "dark" : DARK.matches;
  document.documentElement.className = choice === "dark" || choice === "light" ? choice : "";
  byId("theme").textContent = dark ? "Light" : "Dark";
  byId("theme").setAttribute("aria-label", `Use ${dark ? "light" : "dark"} colours`);
}

let colours = stored();
byId("theme").addEventListener("click", () => {
  const dark = colours ? colours === "dark" : DARK.matches;
  colours = dark === DARK.matches ? (dark ? "light" : "dark") : "";
  stored(colours);
  paint(colours);
});
DARK.addEventListener("change", () => paint(colours));

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  byId("key-box").open = false;
  load();
});
addEventListener("hashchange", openTarget);
paint(colours);
openTarget();
load();
showHealth();
setInterval(() => { if (!document.hidden) showHealth(); }, 15000);
