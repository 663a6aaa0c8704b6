"use strict";
// What a conversation is asked with. Names, defaults and ranges are the server's own, from /openapi.json; what is left
// empty is not sent, and what is wrong is for the server to refuse.

const CHAT = "/v1/chat/completions";
const SETTINGS = ["model", "temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "repetition_penalty",
  "presence_penalty", "frequency_penalty", "stop"];
const WIDE = matchMedia("(min-width: 64rem)");

const settingId = (name) => "set-" + name;
let modelName = "the model";

function chatFields() {
  return resolve(whole.paths[CHAT].post.requestBody.content["application/json"].schema).properties;
}

function showSettings() {
  const fields = chatFields();
  const models = alternatives(fields.model || {}).flatMap((each) => each.enum || []);
  if (models.length) modelName = models[0];
  byId("user").placeholder = `Message ${modelName}`;
  byId("asked").textContent = modelName;
  const names = SETTINGS.filter((name) => fields[name] && !fields[name]["x-support"] && (name !== "model" || models.length > 1));
  byId("sampling").replaceChildren(...names.map((name) => {
    const before = byId(settingId(name));
    const control = settingControl(name, fields[name], models);
    if (before) control.value = before.value;
    return make("div", {className: name === "stop" ? "wide" : ""}, make("label", {for: control.id}, name), control,
      make("span", {className: "out", id: control.id + "-about"}, about(fields[name])));
  }));
}

function settingControl(name, field, models) {
  const id = settingId(name);
  if (name === "model") return make("select", {id}, models.map((each) => make("option", {}, each)));
  const words = {id, title: about(field), "aria-describedby": id + "-about", autocomplete: "off", spellcheck: false};
  if (name === "stop") return make("textarea", {...words, rows: 2, placeholder: "one text a line"});
  const usual = field.default === undefined || field.default === null ? "" : String(field.default);
  return make("input", {...words, type: "text", inputmode: "decimal", placeholder: usual || "not set"});
}

// A number as JSON has it; what is none, or loses digits, goes as it was typed.
function numberOf(text) {
  const number = Number(text);
  return Number.isFinite(number) && (Number.isSafeInteger(number) || !Number.isInteger(number)) ? number : text;
}

function settingOf(name) {
  const control = byId(settingId(name));
  if (!control || control.value.trim() === "") return undefined;
  if (name === "model") return control.value;
  return name === "stop" ? control.value.split("\n").filter((line) => line !== "") : numberOf(control.value.trim());
}

function requestOf(messages) {
  const system = byId("system").value;
  const body = {messages: system.trim() ? [{role: "system", content: system}, ...messages] : messages};
  for (const name of SETTINGS) {
    const value = settingOf(name);
    if (value !== undefined) body[name] = value;
  }
  if (byId("stream").checked) Object.assign(body, {stream: true, stream_options: {include_usage: true}});
  return body;
}

// The request that the next message makes, to be run by hand.
function showRequest(messages) {
  const operation = whole ? whole.paths[CHAT].post : {};
  byId("request").textContent = curl("POST", CHAT, operation, JSON.stringify(requestOf(messages), null, 2));
}

byId("settings").open = WIDE.matches;
