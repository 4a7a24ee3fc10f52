/**
 * Renders the Markdown of an answer. marked makes tokens of the text, and elements are made of the tokens one by one: no HTML is ever
 * parsed. HTML in an answer is shown as text, images become links, and links lead to web and mail addresses only.
 */

import { copyButton, element } from "./dom.js";
import { Lexer } from "./marked.js";

/** @typedef {any} Token of marked */

/** The time of marked's rules for a paragraph can grow with the square of its length: a longer one is shown without them. */
const MAX_INLINE = 5_000;
const MIN_PAUSE_MS = 30;
const MAX_PAUSE_MS = 2_000;
const SCHEMES = ["http:", "https:", "mailto:"];
const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0", copy: "©", ndash: "–", mdash: "—", hellip: "…", times: "×", rarr: "→" };

class BoundedLexer extends Lexer {
  inlineTokens(source, tokens = []) {
    if (source.length <= MAX_INLINE) return super.inlineTokens(source, tokens);
    tokens.push({ type: "text", raw: source, text: source });
    return tokens;
  }
}

/** A text that grows, as an element. It is rendered now and then, for a tenth of the time. */
export class Markdown {
  /** @param {() => void} onRender called after each change of the element */
  constructor(onRender = () => {}) {
    this.root = element("div", { class: "text markdown" });
    this.onRender = onRender;
    this.text = "";
    /** @type {string[]} sources of the blocks that are shown: those that stay the same keep their elements */
    this.sources = [];
    this.pause_ms = MIN_PAUSE_MS;
    this.timer = 0;
  }

  /** @param {string} text the whole of it, as far as it is known */
  update(text) {
    this.text = text;
    this.timer ||= setTimeout(() => this.render(), this.pause_ms);
  }

  render() {
    clearTimeout(this.timer);
    this.timer = 0;
    const began = performance.now();
    const blocks = lex(this.text);
    let same = 0;
    while (same < blocks.length && this.sources[same] === blocks[same].raw) same++;
    while (this.root.childNodes.length > same) this.root.lastChild.remove();
    this.root.append(...blocks.slice(same).map(block));
    this.sources = blocks.map(({ raw }) => raw);
    this.pause_ms = Math.min(MAX_PAUSE_MS, Math.max(MIN_PAUSE_MS, 10 * (performance.now() - began)));
    this.onRender();
  }
}

/** The blocks of a text. @param {string} text @returns {Token[]} */
function lex(text) {
  try {
    return new BoundedLexer({ gfm: true, breaks: true }).lex(text).filter(({ type }) => type !== "space" && type !== "def");
  } catch { // nested too deeply
    return [{ type: "text", raw: text, text }];
  }
}

/** @param {Token[]} tokens */
const blocks = (tokens) => tokens.filter(({ type }) => type !== "space" && type !== "def").map(block);

/** @param {Token} token @returns {HTMLElement|Text} */
function block(token) {
  switch (token.type) {
    case "paragraph":
      return element("p", {}, ...inline(token.tokens));
    case "heading": // below the name of the message, which is a heading of level 2
      return element(`h${Math.min(6, token.depth + 2)}`, { class: `depth${token.depth}` }, ...inline(token.tokens));
    case "code":
      return code(token);
    case "blockquote":
      return element("blockquote", {}, ...blocks(token.tokens));
    case "list":
      return element(token.ordered ? "ol" : "ul", { start: token.ordered && token.start !== 1 ? token.start : null },
        ...token.items.map((item) => element("li", { class: item.task ? "task" : null }, ...blocks(item.tokens))));
    case "table":
      return table(token);
    case "hr":
      return element("hr");
    case "text":
      return element("span", {}, ...inline(token.tokens ?? [token]));
    case "checkbox":
      return document.createTextNode(token.checked ? "☑ " : "☐ ");
    default: // "html", and whatever marked may have one day
      return element("p", { class: "raw", text: token.raw.trimEnd() });
  }
}

/** A block of code with its language and a button that copies it. @param {Token} token */
export function code({ text, lang }) {
  return element("figure", { class: "code" },
    element("figcaption", {}, element("span", { text: lang?.split(/\s/)[0] ?? "" }), copyButton("Copy code", () => text)),
    element("pre", { tabindex: "0" }, element("code", { text })));
}

/** @param {Token} token */
function table({ header, rows }) {
  const cell = (name) => ({ tokens, align }) => element(name, { class: align && `align-${align}` }, ...inline(tokens));
  return element("div", { class: "table", tabindex: "0" }, element("table", {},
    element("thead", {}, element("tr", {}, ...header.map(cell("th")))),
    element("tbody", {}, ...rows.map((row) => element("tr", {}, ...row.map(cell("td")))))));
}

/** @param {Token[]} tokens @returns {(Node|string)[]} */
const inline = (tokens) => tokens.flatMap((token) => {
  switch (token.type) {
    case "text":
      return token.tokens ? inline(token.tokens) : decoded(token.text);
    case "escape":
      return token.text;
    case "strong":
    case "em":
    case "del":
      return element(token.type, {}, ...inline(token.tokens));
    case "codespan":
      return element("code", { text: token.text });
    case "br":
      return element("br");
    case "link":
      return link(token, inline(token.tokens));
    case "image":
      return link(token, [`[image] ${decoded(token.text) || token.href}`]);
    default:
      return token.raw;
  }
});

/** A link; its source, if it leads anywhere but to a web or mail address. @param {Token} token @param {(Node|string)[]} content */
function link({ href, raw }, content) {
  let url;
  try {
    url = new URL(decoded(href));
  } catch {
    return raw;
  }
  if (!SCHEMES.includes(url.protocol)) return raw;
  return element("a", { href: url.href, title: url.href, target: "_blank", rel: "noopener noreferrer nofollow" }, ...content);
}

/** A text without its character references. @param {string} text */
const decoded = (text) => text.replace(/&(?:#x([\da-f]{1,6})|#(\d{1,7})|([a-z]{2,6}));/gi, (source, hex, decimal, name) => {
  if (name) return ENTITIES[name] ?? source;
  const point = hex ? parseInt(hex, 16) : Number(decimal);
  return point > 0 && point <= 0x10ffff ? String.fromCodePoint(point) : source;
});
