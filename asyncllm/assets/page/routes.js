"use strict";
// The routes, their fields in words, and forms to try them; all of it read from /openapi.json.

// Schemas in words.

const named = (schema) => schema.$ref.split("/").pop();
const spelled = (values) => values.map((value) => JSON.stringify(value)).join(", ");

function alternatives(schema) {
  return (schema.anyOf || schema.oneOf || [schema]).filter((each) => each.type !== "null");
}

const telling = (limit) => limit !== undefined && Math.abs(limit) < 2 ** 31 - 1;

function range(schema) {
  const words = [];
  if (telling(schema.minimum)) words.push(`from ${schema.minimum}`);
  if (telling(schema.exclusiveMinimum)) words.push(`above ${schema.exclusiveMinimum}`);
  if (telling(schema.maximum)) words.push(`to ${schema.maximum}`);
  return words.length ? " " + words.join(" ") : "";
}

function inWords(schema) {
  const parts = [];
  alternatives(schema).forEach((each, index) => {
    if (index) parts.push(" or ");
    if (each.$ref) parts.push(make("a", {href: "#shape-" + named(each)}, named(each)));
    else if (each.enum) parts.push(spelled(each.enum));
    else if ("const" in each) parts.push(spelled([each.const]));
    else if (each.type === "array") {
      parts.push("list", ...(each.items ? [" of ", ...inWords(each.items)] : []));
      if (each.maxItems) parts.push(`, ${each.maxItems} at most`);
    } else if (each.type === "object" && typeof each.additionalProperties === "object") {
      parts.push("map to ", ...inWords(each.additionalProperties));
    } else if (each.type === "string") {
      parts.push("text" + (each.maxLength ? ` up to ${each.maxLength} characters` : ""));
    } else if (each.type === "integer" || each.type === "number") parts.push(each.type + range(each));
    else parts.push(Array.isArray(each.type) ? each.type.join(" or ") : each.type || "anything");
  });
  return parts;
}

function about(field) {
  return field.description || alternatives(field).map((each) => each.description).filter(Boolean).join(" ");
}

function fieldTable(schema) {
  const rows = [], others = {ignored: [], refused: []};
  const fields = Object.entries(schema.properties || {});
  const required = new Set(schema.required || []);
  fields.sort(([a], [b]) => required.has(b) - required.has(a));
  for (const [name, field] of fields) {
    if (field["x-support"]) {
      others[field["x-support"]].push([name, field]);
      continue;
    }
    rows.push(make("tr", {},
      make("td", {}, make("code", {className: required.has(name) ? "required" : ""}, name)),
      make("td", {}, ...inWords(field)),
      make("td", {}, "default" in field ? make("code", {}, spelled([field.default])) : null),
      make("td", {}, ...prose(about(field)))));
  }
  const head = make("tr", {}, ...["Field", "Type", "Default", "Meaning"].map((text) => make("th", {scope: "col"}, text)));
  const result = [make("div", {className: "scroll"}, make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows)))];
  if (others.ignored.length) {
    result.push(make("p", {className: "small muted"}, "Accepted, and without effect: ",
      others.ignored.map(([name]) => name).join(", ") + "."));
  }
  if (others.refused.length) {
    result.push(make("details", {className: "small"}, make("summary", {}, "Not supported"),
      make("ul", {}, ...others.refused.map(([name, field]) => make("li", {}, make("code", {}, name), ": ",
        ...prose(about(field).replace(/^Not supported\. /, "")), " Taken: ", spelled(field.enum) + ".")))));
  }
  return result;
}

// An example of a request.

function resolve(schema) {
  return schema.$ref ? whole.components.schemas[named(schema)] : schema;
}

function example(schema) {
  const one = resolve(alternatives(schema)[0]);
  if (one.anyOf || one.oneOf) return example(one);
  if (one.enum) return one.enum.find((value) => value === "user") || one.enum[0];
  if ("const" in one) return one.const;
  if (one.type === "array") return one.minItems === 0 ? [] : [example(one.items || {})];
  if (one.type === "object") {
    return Object.fromEntries((one.required || []).map((name) => [name, example(one.properties[name])]));
  }
  if (one.type === "integer" || one.type === "number") return one.minimum || 0;
  return one.type === "boolean" ? false : "Hello!";
}

// Routes.

function showRoute(path, method, operation) {
  const id = "route-" + operation.operationId;
  const parameters = operation.parameters || [];
  let concrete = path;
  for (const each of parameters) concrete = concrete.replace("{" + each.name + "}", String(example(each.schema)));
  const content = operation.requestBody && operation.requestBody.content["application/json"];
  const inside = make("div", {className: "inside"}, make("p", {}, ...prose(operation.description)));
  let area = null;
  if (content) {
    inside.append(make("h4", {}, "Body"), ...fieldTable(resolve(content.schema)));
    area = make("textarea", {className: "code", id: id + "-body", rows: 8, spellcheck: false});
    area.value = JSON.stringify(example(content.schema), null, 2);
    area.rows = Math.min(14, area.value.split("\n").length + 1);
  }
  const command = make("pre", {tabIndex: 0});
  const write = () => { command.textContent = curl(method, concrete, operation, area && area.value); };
  write();
  const status = make("span", {className: "small muted", role: "status"});
  const output = make("pre", {hidden: true, tabIndex: 0, "aria-label": "Answer of " + path});
  const send = button("Send", () => tryRoute(concrete, method, area, send, status, output), {className: "main"});
  if (area) {
    area.addEventListener("input", write);
    inside.append(make("h4", {}, make("label", {for: area.id}, "Try it")), area);
  } else inside.append(make("h4", {}, "Try it"));
  inside.append(make("div", {className: "row"}, send, status), output,
    make("div", {className: "bar"}, make("h4", {}, "curl"), copyable(() => command.textContent)), command);
  inside.append(make("h4", {}, "Answers"), make("ul", {className: "small"},
    ...Object.entries(operation.responses).map(([code, response]) => {
      const types = Object.entries(response.content || {});
      const shapes = types.flatMap(([type, {schema}]) => [" ", make("code", {}, type),
        ...(schema.$ref ? [" ", ...inWords(schema)] : [])]);
      return make("li", {}, make("strong", {}, code === "default" ? "else" : code), " ", ...prose(response.description), ...shapes);
    })));
  const name = make("code", {}, path);
  return make("details", {className: "route", id},
    make("summary", {}, make("span", {className: "method " + method}, method), name,
      make("span", {className: "small muted"}, ...prose(operation.summary))), inside);
}

async function tryRoute(path, method, area, send, status, output) {
  send.disabled = true;
  status.textContent = "…";
  const began = performance.now();
  try {
    const options = area ? {method, body: area.value, headers: headers({"Content-Type": "application/json"})}
      : {method, headers: headers()};
    const response = await fetch(address(path), options);
    output.hidden = false;
    output.textContent = "";
    await eachPiece(response, (text) => { output.append(text); });
    status.textContent = `${response.status} in ${Math.round(performance.now() - began)} ms`;
    if (isA(response, "application/json")) {
      output.textContent = JSON.stringify(JSON.parse(output.textContent), null, 2);
    }
  } catch (error) {
    status.textContent = "No answer: " + error.message;
  }
  send.disabled = false;
}

function showRoutes() {
  const groups = new Map();
  for (const [path, methods] of Object.entries(whole.paths)) {
    for (const [method, operation] of Object.entries(methods)) {
      const group = (operation.tags || ["More"])[0];
      if (!groups.has(group)) groups.set(group, []);
      groups.get(group).push([path, method.toUpperCase(), operation]);
    }
  }
  const routes = [], links = [];
  for (const [group, entries] of groups) {
    routes.push(make("h3", {}, group), ...entries.map((entry) => showRoute(...entry)));
    links.push(make("h3", {}, group), make("ul", {}, ...entries.map(([path, method, operation]) => make("li", {},
      make("a", {href: "#route-" + operation.operationId}, make("span", {className: "method " + method}, method), path)))));
  }
  routes.push(make("h3", {}, "Shapes"), ...Object.entries(whole.components.schemas).map(([name, schema]) =>
    make("details", {className: "route", id: "shape-" + name},
      make("summary", {}, make("code", {}, name), make("span", {className: "small muted"}, ...prose(firstSentence(schema)))),
      make("div", {className: "inside"}, ...fieldTable(schema)))));
  byId("routes").replaceChildren(...routes);
  byId("nav").replaceChildren(...links);
}

const firstSentence = (schema) => (schema.description || "").split(/[.:;]\s|\.$/)[0];
