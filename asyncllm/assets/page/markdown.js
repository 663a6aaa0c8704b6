"use strict";
// Markdown becomes elements one by one: no text is ever parsed as HTML, tags in it are shown as they are written, images
// are links, and links lead to http, https and mailto alone. The time is linear in the text, whatever the text is.

const DEEPEST = 8; // of quotes and lists in one another
const WIDEST = 16; // of emphasis and brackets open at once
const LONGEST = 2000; // characters of an address

const SCHEMES = new Set(["http:", "https:", "mailto:"]);
const FENCE = /^ {0,3}(`{3,}(?!`)|~{3,}(?!~))([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]|$)/;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^([-*+]|\d{1,9}[.)])(?:[ \t]+|$)/;
const TOKEN = /\\[!-/:-@[-`{-~]|`+|\*+|_+|~~|!?\[|\]|<?https?:\/\/[^\s<>[\]`"]{1,2000}>?|\n/g;

// Show `text` in `place`. Blocks that have not changed since the last call keep their elements, and a selection in them.
const shown = new WeakMap();

function showMarkdown(place, text) {
  const blocks = blocksOf(text.split("\n"), 0);
  const before = shown.get(place) || [];
  let same = 0;
  while (same < Math.min(blocks.length, before.length) && blocks[same].source === before[same]) same += 1;
  while (place.childNodes.length > same) place.lastChild.remove();
  for (const block of blocks.slice(same)) place.append(block.build());
  shown.set(place, blocks.map((block) => block.source));
}

function showPlain(place, text) {
  shown.delete(place);
  place.textContent = text;
}

// Blocks.

const isBlank = (line) => line.trim() === "";

function indentOf(line) {
  let columns = 0;
  for (const character of line) {
    if (character !== " " && character !== "\t") break;
    columns += character === " " ? 1 : 4;
  }
  return columns;
}

function outdented(line, columns) {
  let at = 0;
  for (let width = 0; width < columns && (line[at] === " " || line[at] === "\t"); at += 1) width += line[at] === " " ? 1 : 4;
  return line.slice(at);
}

function cellsOf(line) {
  const cells = line.trim().split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
  if (cells[0] === "") cells.shift();
  if (cells.at(-1) === "") cells.pop();
  return cells;
}

function beginsTable(lines, at) {
  if (!lines[at].includes("|") || at + 1 >= lines.length || !lines[at + 1].includes("-")) return false;
  const marks = cellsOf(lines[at + 1]);
  return marks.every((mark) => /^:?-+:?$/.test(mark)) && marks.length === cellsOf(lines[at]).length;
}

function beginsBlock(lines, at) {
  const line = lines[at];
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || ITEM.test(line.trimStart())
    || beginsTable(lines, at);
}

function blocksOf(lines, depth) {
  const blocks = [];
  let at = 0;
  const add = (end, build) => {
    blocks.push({source: lines.slice(at, end).join("\n"), build});
    at = end;
  };
  while (at < lines.length) {
    const line = lines[at];
    if (isBlank(line)) at += 1;
    else if (depth > DEEPEST) add(lines.length, ((rest) => () => make("p", {}, inline(rest)))(lines.slice(at).join("\n")));
    else if (FENCE.test(line)) addCode(lines, at, add);
    else if (HEADING.test(line)) addHeading(line, at, add);
    else if (RULE.test(line)) add(at + 1, () => make("hr"));
    else if (QUOTE.test(line)) addQuote(lines, at, depth, add);
    else if (ITEM.test(line.trimStart())) addList(lines, at, depth, add);
    else if (indentOf(line) >= 4) addIndented(lines, at, add);
    else if (beginsTable(lines, at)) addTable(lines, at, add);
    else addParagraph(lines, at, add);
  }
  return blocks;
}

function codeBlock(language, text) {
  const label = language ? `Code, ${language}` : "Code";
  return make("div", {className: "code"},
    make("div", {className: "bar"}, make("span", {className: "small muted"}, language), copyable(() => text)),
    make("pre", {tabIndex: 0, role: "region", "aria-label": label}, make("code", {}, text)));
}

// A fence that is not closed, as while an answer comes in, holds the rest.
function addCode(lines, at, add) {
  const [, fence, language] = FENCE.exec(lines[at]);
  const columns = indentOf(lines[at]);
  let end = at + 1;
  const closes = (line) => {
    const bare = line.trim();
    return bare.length >= fence.length && bare === fence[0].repeat(bare.length);
  };
  while (end < lines.length && !closes(lines[end])) end += 1;
  const text = lines.slice(at + 1, end).map((line) => outdented(line, columns)).join("\n");
  add(Math.min(end + 1, lines.length), () => codeBlock(language.trim().slice(0, 40), text));
}

function addIndented(lines, at, add) {
  let end = at + 1;
  while (end < lines.length && !isBlank(lines[end]) && indentOf(lines[end]) >= 4) end += 1;
  const text = lines.slice(at, end).map((line) => outdented(line, 4)).join("\n");
  add(end, () => codeBlock("", text));
}

// The headings of an answer stand below the heading of the answer, an h3.
function addHeading(line, at, add) {
  const [whole, marks] = HEADING.exec(line);
  const text = line.slice(whole.length).trim();
  let end = text.length;
  while (text[end - 1] === "#") end -= 1;
  const title = end === 0 || text[end - 1] === " " ? text.slice(0, end).trim() : text;
  add(at + 1, () => make("h" + Math.min(6, marks.length + 3), {}, inline(title)));
}

function addQuote(lines, at, depth, add) {
  let end = at;
  while (end < lines.length && QUOTE.test(lines[end])) end += 1;
  const inner = lines.slice(at, end).map((line) => line.replace(QUOTE, ""));
  add(end, () => make("blockquote", {}, blocksOf(inner, depth + 1).map((block) => block.build())));
}

function addList(lines, at, depth, add) {
  const outer = indentOf(lines[at]);
  const kind = (line) => ITEM.exec(line.trimStart())?.[1].slice(-1);
  const first = kind(lines[at]);
  const items = [];
  let end = at, blank = false, columns = 0;
  for (; end < lines.length; end += 1) {
    const line = lines[end], indent = indentOf(line);
    if (isBlank(line)) {
      blank = true;
      items.at(-1).push("");
      continue;
    }
    if (items.length && indent >= outer + 2) items.at(-1).push(outdented(line, columns));
    else if (kind(line) === first && !RULE.test(line)) {
      const bare = line.trimStart(), mark = ITEM.exec(bare)[0];
      columns = indent + mark.length;
      items.push([bare.slice(mark.length)]);
    } else if (blank || beginsBlock(lines, end)) break;
    else items.at(-1).push(line);
    blank = false;
  }
  const number = parseInt(lines[at].trimStart(), 10);
  add(end, () => make(isNaN(number) ? "ul" : "ol", isNaN(number) ? {} : {start: number},
    items.map((inner) => make("li", {}, blocksOf(inner, depth + 1).flatMap((block, index) => {
      const node = block.build();
      return index === 0 && node.tagName === "P" ? [...node.childNodes] : [node];
    })))));
}

function addTable(lines, at, add) {
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|") && !isBlank(lines[end])) end += 1;
  const sides = cellsOf(lines[at + 1]).map((mark) => (mark.endsWith(":") ? (mark.startsWith(":") ? "middle" : "right") : ""));
  const row = (tag, line) => {
    const cells = cellsOf(line);
    return make("tr", {}, sides.map((side, index) => make(tag, {className: side}, inline(cells[index] || ""))));
  };
  const [head, body] = [lines[at], lines.slice(at + 2, end)];
  add(end, () => make("div", {className: "scroll", tabIndex: 0, role: "region", "aria-label": "Table"},
    make("table", {}, make("thead", {}, row("th", head)), make("tbody", {}, body.map((line) => row("td", line))))));
}

function addParagraph(lines, at, add) {
  let end = at + 1;
  while (end < lines.length && !isBlank(lines[end]) && !beginsBlock(lines, end)) end += 1;
  const text = lines.slice(at, end).map((line) => line.trim()).join("\n");
  add(end, () => make("p", {}, inline(text)));
}

// Inside a block.

function safe(place) {
  try {
    const url = new URL(place);
    return SCHEMES.has(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}

// The title shows where a link leads, whatever its text says.
function link(href, children) {
  return make("a", {href, title: href, target: "_blank", rel: "noopener noreferrer nofollow"}, children);
}

// What stands in parentheses from `at`, and where it ends.
function targetOf(text, at) {
  if (text[at] !== "(") return null;
  let open = 0;
  for (let end = at; end < Math.min(text.length, at + LONGEST) && text[end] !== "\n" && open < 4; end += 1) {
    if (text[end] === "(") open += 1;
    if (text[end] === ")") open -= 1;
    if (open === 0) return {place: text.slice(at + 1, end).trim().split(/\s/)[0].replace(/^<|>$/g, ""), end: end + 1};
  }
  return null;
}

function withoutPunctuation(place) {
  const marks = ".,;:!?'*_~" + (place.includes("(") ? "" : ")");
  let end = place.length;
  while (marks.includes(place[end - 1])) end -= 1;
  return place.slice(0, end);
}

// Where the run of backticks that ends each code span begins, by where the one that opens it does.
function spansOf(text) {
  const ends = new Map(), next = new Map();
  for (const run of [...text.matchAll(/`+/g)].reverse()) {
    ends.set(run.index, next.get(run[0].length));
    next.set(run[0].length, run.index);
  }
  return ends;
}

// A space at both ends makes room for backticks.
function codeOf(text) {
  const line = text.replaceAll("\n", " ");
  return line.startsWith(" ") && line.endsWith(" ") && !isBlank(line) ? line.slice(1, -1) : line;
}

const WRAPPED = {
  1: (nodes) => make("em", {}, nodes),
  2: (nodes) => make("strong", {}, nodes),
  3: (nodes) => make("strong", {}, make("em", {}, nodes)),
};

function inline(text) {
  const spans = spansOf(text);
  const open = [{mark: "", nodes: []}]; // the innermost last; a mark that is never closed stays text
  const put = (node) => open.at(-1).nodes.push(node);
  const leave = (count) => {
    while (open.length > count) {
      const {mark, nodes} = open.pop();
      put(mark);
      for (const node of nodes) put(node);
    }
  };
  const close = (at, wrap) => {
    leave(at + 1);
    const {nodes} = open.pop();
    put(wrap(nodes));
  };
  const opens = (mark) => {
    if (open.length < WIDEST) open.push({mark, nodes: []});
    else put(mark);
  };
  const emphasis = (mark, start, end) => {
    const word = mark[0] === "_" ? /[\p{L}\p{N}]/u : /[]/;
    const [before, after] = [text[start - 1] || " ", text[end] || " "];
    const canOpen = /\S/.test(after) && !word.test(before), canClose = /\S/.test(before) && !word.test(after);
    const wrap = mark === "~~" ? (nodes) => make("del", {}, nodes) : WRAPPED[mark.length];
    const at = canClose && wrap ? open.findLastIndex((each) => each.mark === mark) : -1;
    if (at > 0) close(at, wrap);
    else if (canClose && mark.length === 3 && open.at(-1).mark.length < 3 && open.at(-1).mark[0] === mark[0]) {
      const inner = open.at(-1).mark.length;
      close(open.length - 1, WRAPPED[inner]);
      emphasis(mark.slice(inner), start + inner, end);
    } else if (canOpen && wrap) opens(mark);
    else put(mark);
  };
  const bracket = (start) => {
    const at = open.findLastIndex((each) => each.mark.endsWith("["));
    const target = at > 0 ? targetOf(text, start + 1) : null;
    const href = target && safe(target.place);
    if (at > 0 && href) {
      close(at, (nodes) => {
        const node = link(href, nodes.length ? nodes : href);
        for (const inner of node.querySelectorAll("a")) inner.replaceWith(inner.textContent);
        return node;
      });
      return target.end;
    }
    if (at > 0) leave(at);
    put("]");
    return start + 1;
  };
  let from = 0;
  TOKEN.lastIndex = 0;
  for (let found = TOKEN.exec(text); found; found = TOKEN.exec(text)) {
    const token = found[0], start = found.index;
    let end = start + token.length;
    if (start > from) put(text.slice(from, start));
    if (token[0] === "\\") put(token[1]);
    else if (token[0] === "`") {
      const closing = spans.get(start);
      if (closing === undefined) put(token);
      else {
        put(make("code", {}, codeOf(text.slice(end, closing))));
        end = closing + token.length;
      }
    } else if (token === "\n") put(make("br"));
    else if (token === "]") end = bracket(start);
    else if (token.endsWith("[")) opens(token);
    else if (token.includes("://")) {
      const whole = token[0] === "<" && token.endsWith(">");
      const place = whole ? token.slice(1, -1) : withoutPunctuation(token.replace(/^<|>$/g, ""));
      if (!whole && token[0] === "<") put("<");
      const href = safe(place);
      put(href ? link(href, place) : place);
      end = whole ? end : start + (token[0] === "<" ? 1 : 0) + place.length;
    } else emphasis(token, start, end);
    from = TOKEN.lastIndex = end;
  }
  if (from < text.length) put(text.slice(from));
  leave(1);
  return open[0].nodes;
}
