/** The radix tree as a picture: each prefix as wide as the tokens in and below it, its continuations under it. */

import { byId, count, duration, element } from "./dom.js";
import { onReading, showTree } from "./live.js";
import { json } from "./server.js";

/**
 * @typedef {{node: number, text: string|null, num_tokens: number, total_tokens: number, total_nodes: number, num_children: number,
 *            uses: number, running: number, waiting: number, leases: number, states: number, idle_s: number, retention: string, children: TreeNode[]}} TreeNode
 * @typedef {{id: string, name: string, tokens: number, own: number, numChildren: number, children: Cell[], node: TreeNode|null}} Cell
 *   a rectangle of the picture: a node, a namespace, or the whole cache
 */

/** Rows fill the height that there is, within these. */
const MIN_ROW_PX = 30;
const MAX_ROW_PX = 92;
/** A row of this height also has the number of tokens. */
const TALL_ROW_PX = 46;
const LINE_PX = 15;
const MIN_PX = 3;
const IDLE_S = [2, 15, 120, 1200];
const USES = [1, 2, 5, 20];

/** @type {Map<string, HTMLElement>} the rectangles, which are kept from reading to reading */
const shown = new Map();
/** @type {Map<string, Cell>} what each of them shows */
let cells = new Map();
/** @type {Map<string, string[]>} parent, then children in the order of the picture, for the keyboard */
let relations = new Map();
/** @type {Map<string, number>} the order in which nodes were first seen: the picture does not jump when sizes change */
const seen = new Map();
/** @type {any} */
let tree = null;
let isAdmin = false;
/** @type {number|null} */
let below = null;
/** @type {string|null} */
let selected = null;
let focused = "all";
let rowPx = TALL_ROW_PX;
let paused = false;

export function startCache() {
  onReading((reading) => {
    isAdmin = reading.is_admin;
    byId("search").disabled = !isAdmin;
    if (paused || byId("cache").hidden) return;
    tree = reading.tree;
    draw();
  });
  const picture = byId("picture");
  picture.addEventListener("click", (event) => {
    const id = event.target.closest("[data-id]")?.dataset.id;
    if (id) activate(id);
  });
  picture.addEventListener("keydown", onKey);
  new ResizeObserver(draw).observe(picture);
  byId("colour").addEventListener("change", draw);
  byId("search").addEventListener("input", draw);
  byId("pause").addEventListener("click", () => {
    paused = !paused;
    byId("pause").setAttribute("aria-pressed", String(paused));
  });
  byId("close-details").addEventListener("click", () => select(null));
}

/** The view is on screen now, or no more. @param {boolean} isShown */
export function showCache(isShown) {
  showTree(isShown ? { below } : null);
}

// ------------------------------------------------------------ from a reading to rectangles

/** @param {TreeNode} node @returns {Cell} */
function cellOf(node) {
  return {
    id: String(node.node),
    name: node.text === null ? "(text not shown)" : labelOf(node.text),
    tokens: node.total_tokens,
    own: node.num_tokens,
    numChildren: node.num_children,
    children: node.children.map(cellOf),
    node,
  };
}

/** The marks of chat templates around a role, and all others. */
const ROLE = /(?:<\|(?:im_start|start_header_id|start|turn)\|?>|<start_of_turn>)\s*(\w+)(?:<\|end_header_id\|>|<\|message\|>)?/g;
const MARKS = /<\|[^<>|]{1,40}\|>|<\/?(?:s|bos|eos|end_of_turn)>|\[\/?(?:INST|SYS)\]/g;

/** The messages' text in a node, without the marks of the template; the roles, if it has nothing else. @param {string} text */
function labelOf(text) {
  const roles = [...text.matchAll(ROLE)].map(([, role]) => role);
  return visible(text.replace(ROLE, "").replace(MARKS, "").trim().replace(/\s*\n\s*/g, " \n")) || roles.join(", ") || visible(text).trim() || "(space)";
}

/** A text on one line. @param {string} text */
const visible = (text) => text.replaceAll("\n", "⏎ ").replace(/[\p{Cc}\p{Cf}]/gu, "·");

/** The picture of a tree: the whole, its namespaces, and their nodes. @returns {Cell} */
function whole() {
  const hasReplicas = tree.namespaces.some((namespace) => namespace.replica > 0);
  const namespaces = tree.namespaces.map((namespace, index) => ({
    id: `namespace ${index}`,
    name: (namespace.namespace || "No key") + (namespace.salted ? ", with a salt" : "") + (hasReplicas ? `, replica ${namespace.replica}` : ""),
    tokens: namespace.total_tokens,
    own: 0,
    numChildren: namespace.num_children,
    children: namespace.children.map(cellOf),
    node: null,
  }));
  if (tree.above.length || below !== null) return namespaces[0]?.children[0] ?? emptyCell();
  const cell = { ...emptyCell(), tokens: tree.total_tokens, children: namespaces, numChildren: namespaces.length };
  return namespaces.length === 1 && namespaces[0].name === "No key" ? { ...cell, children: namespaces[0].children, numChildren: namespaces[0].numChildren } : cell;
}

const emptyCell = () => ({ id: "all", name: "Whole cache", tokens: 0, own: 0, numChildren: 0, children: [], node: null });

function draw() {
  const picture = byId("picture");
  if (!tree || !picture.clientWidth) return;
  const isGone = below !== null && tree.namespaces[0]?.children[0]?.node !== below;
  if (isGone) return zoom(null);
  const root = whole();
  const above = picture.offsetTop - byId("cache").offsetTop;
  const room = byId("cache").clientHeight - above - picture.nextElementSibling.offsetHeight - 40;
  rowPx = Math.max(MIN_ROW_PX, Math.min(MAX_ROW_PX, Math.floor(room / (depth(root) + 1))));
  picture.classList.toggle("tall", rowPx >= TALL_ROW_PX);
  picture.style.setProperty("--lines", String(Math.max(1, Math.floor((rowPx - TALL_ROW_PX) / LINE_PX) + 1)));
  cells = new Map();
  relations = new Map();
  const texts = byId("search").value.toLowerCase();
  let found = 0;
  let rows = 0;
  const used = new Set();
  const place = (cell, left, width, level, parent) => {
    cells.set(cell.id, cell);
    relations.set(cell.id, [parent]);
    used.add(cell.id);
    rows = Math.max(rows, level + 1);
    const matches = texts !== "" && cell.node?.text?.toLowerCase().includes(texts);
    found += matches ? 1 : 0;
    put(cell, left, width, level, texts === "" ? "" : matches ? "match" : "miss");
    const inOrder = [...cell.children].sort((a, b) => order(a.id) - order(b.id));
    const sum = cell.children.reduce((total, child) => total + child.tokens, 0);
    const scale = width / Math.max(cell.tokens, sum + cell.own, 1);
    let start = left;
    for (const child of inOrder) {
      if (child.tokens * scale >= MIN_PX) {
        place(child, start, child.tokens * scale, level + 1, cell.id);
        relations.get(cell.id).push(child.id);
      }
      start += child.tokens * scale;
    }
    const folded = cell.numChildren - (relations.get(cell.id).length - 1);
    const rest = left + (cell.tokens - cell.own) * scale - start;
    if (folded > 0 && rest >= MIN_PX) {
      used.add(`rest of ${cell.id}`);
      putRest(cell.id, folded, start, rest, level + 1);
      rows = Math.max(rows, level + 2);
    }
  };
  place(root, 0, picture.clientWidth, 0, null);
  for (const [id, rectangle] of shown) {
    if (used.has(id)) continue;
    rectangle.remove();
    shown.delete(id);
  }
  picture.style.height = `${rows * rowPx + 4}px`;
  if (!cells.has(focused)) focused = root.id;
  for (const [id, rectangle] of shown) rectangle.tabIndex = id === focused ? 0 : -1;
  byId("tree-facts").textContent = `${count(tree.total_tokens)} tokens in ${count(tree.total_nodes)} nodes; ${count(cells.size)} drawn`;
  byId("found").textContent = texts ? `${found} found` : "";
  drawPath();
}

/** @param {Cell} cell @returns {number} */
const depth = (cell) => 1 + Math.max(0, ...cell.children.map(depth));

function order(id) {
  if (!seen.has(id)) seen.set(id, seen.size);
  return seen.get(id);
}

/** Place the rectangle of a cell. */
function put(cell, left, width, level, search) {
  let rectangle = shown.get(cell.id);
  if (!rectangle) {
    rectangle = element("div", { role: "treeitem", "data-id": cell.id }, element("span", { class: "name" }), element("span", { class: "marks" }), element("small", {}));
    shown.set(cell.id, rectangle);
    byId("picture").append(rectangle);
  }
  setPlace(rectangle, left, width, level);
  const { node } = cell;
  const colour = node === null ? "plain" : `heat${step(node)}`;
  const states = node === null ? [] : ["running", "waiting"].filter((state) => node[state]).concat(node.leases ? ["pinned"] : []);
  rectangle.className = ["cell", colour, search, ...states, cell.id === selected ? "selected" : ""].join(" ");
  const [name, marks, size] = rectangle.children;
  name.textContent = width > 26 ? cell.name : "";
  marks.textContent = node && width > 26 ? marksOf(node) : "";
  size.textContent = width > 60 ? `${count(cell.tokens)} tokens` : "";
  rectangle.setAttribute("aria-level", String(level + 1));
  rectangle.setAttribute("aria-selected", String(cell.id === selected));
  const facts = describe(cell);
  rectangle.setAttribute("aria-label", facts);
  rectangle.title = facts;
}

function putRest(parent, folded, left, width, level) {
  const id = `rest of ${parent}`;
  let rectangle = shown.get(id);
  if (!rectangle) {
    rectangle = element("div", { class: "cell rest-of", "aria-hidden": "true" });
    rectangle.addEventListener("click", () => select(parent));
    shown.set(id, rectangle);
    byId("picture").append(rectangle);
  }
  setPlace(rectangle, left, width, level);
  rectangle.textContent = width > 50 ? `+ ${count(folded)}` : "";
  rectangle.title = `${count(folded)} more prefixes, each too small to be drawn`;
}

function setPlace(rectangle, left, width, level) {
  const [x, y] = [`${left}px`, `${level * rowPx}px`];
  Object.assign(rectangle.style, { left: x, top: y, width: `${Math.max(MIN_PX, width) - 1}px`, height: `${rowPx - 1}px` });
}

const marksOf = (node) => [node.running && `▶${node.running}`, node.waiting && `▷${node.waiting}`, node.leases && `◆${node.leases}`].filter(Boolean).join(" ");

/** The step of the colour scale, 0 to 4. @param {TreeNode} node */
function step(node) {
  const bounds = byId("colour").value === "uses" ? USES : IDLE_S;
  if (byId("colour").value === "uses") return bounds.length - bounds.filter((bound) => node.uses > bound).length;
  return bounds.filter((bound) => node.idle_s > bound).length;
}

/** @param {Cell} cell */
function describe({ name, tokens, node }) {
  if (!node) return `${name}: ${count(tokens)} tokens`;
  const facts = [`${count(node.num_tokens)} tokens`];
  if (node.total_nodes > 1) facts.push(`${count(tokens)} with ${count(node.total_nodes - 1)} nodes below`);
  facts.push(`used ${count(node.uses)} times`, node.running ? "in use" : `idle for ${duration(node.idle_s)}`);
  for (const [number, state] of [[node.running, "running"], [node.waiting, "waiting"], [node.leases, "pinned"]]) if (number) facts.push(`${number} ${state}`);
  return `${name.slice(0, 120)} — ${facts.join(", ")}`;
}

/** The way from the whole cache to the part that is shown. */
function drawPath() {
  const steps = [{ node: null, text: "Whole cache" }, ...(below === null ? [] : [...tree.above, tree.namespaces[0].children[0]])];
  const texts = steps.map(({ node, text }) => `${node} ${text}`).join();
  const path = byId("path");
  if (path.dataset.texts === texts) return;
  path.dataset.texts = texts;
  path.replaceChildren(...steps.map(({ node, text }, index) =>
    element("li", {}, element("button", {
      type: "button", "aria-current": index === steps.length - 1 ? "true" : null, onclick: () => zoom(node),
    }, labelOf(text ?? "(text not shown)").slice(0, 28)))));
}

// ------------------------------------------------------------ what the user does

/** Show only a node and what is below it. @param {number|null} node */
function zoom(node) {
  if (node === below) return;
  below = node;
  focused = node === null ? "all" : String(node);
  tree = null;
  showTree({ below });
}

/** Select a rectangle; once more, zoom to it. @param {string} id */
function activate(id) {
  const cell = cells.get(id);
  if (!cell) return;
  focus(id);
  if (id === selected && cell.node && cell.node.node !== below) zoom(cell.node.node);
  else select(id);
}

function focus(id) {
  shown.get(focused)?.setAttribute("tabindex", "-1");
  focused = id;
  shown.get(id)?.setAttribute("tabindex", "0");
  shown.get(id)?.focus();
}

/** @param {KeyboardEvent} event */
function onKey(event) {
  const [parent, ...children] = relations.get(focused) ?? [];
  const siblings = relations.get(parent)?.slice(1) ?? [focused];
  const place = siblings.indexOf(focused);
  const target = { ArrowDown: children[0], ArrowUp: parent, ArrowRight: siblings[place + 1], ArrowLeft: siblings[place - 1] }[event.key];
  if (event.key === "Enter" || event.key === " ") activate(focused);
  else if (event.key === "Escape") zoom(tree?.above.at(-1)?.node ?? null);
  else if (target) focus(target);
  else if (!event.key.startsWith("Arrow")) return;
  event.preventDefault();
}

// ------------------------------------------------------------ details of a node

/** @param {string|null} id */
function select(id) {
  selected = id;
  byId("details").hidden = id === null;
  draw();
  if (id !== null) showDetails(id);
}

/** @param {string} id */
async function showDetails(id) {
  const { node, name, children } = cells.get(id);
  byId("details-name").textContent = name.slice(0, 80);
  fillDetails(id, node, null, children);
  if (!isAdmin || !node) return;
  try {
    const found = await json(`/v1/cache/tree/${id}`);
    if (id === selected) fillDetails(id, node, found, children);
  } catch (error) {
    if (id === selected) byId("details-body").append(element("p", { class: "error", role: "alert", text: error.message }));
  }
}

/**
 * @param {string} id @param {TreeNode|null} node null: of the whole cache, or a namespace
 * @param {any} found by the server, for an admin @param {Cell[]} children
 */
function fillDetails(id, node, found, children) {
  byId("details-body").replaceChildren(
    ...(node ? [facts(node, found)] : []),
    ...(!node ? [] : isAdmin ? controls(id, node, found) : [element("p", { class: "hint", text: "Texts, pins and releases need the key of an admin." })]),
    ...(found ? texts(found) : []),
    ...continuations(node, children),
  );
}

/** @param {TreeNode} node @param {any} found */
function facts(node, found) {
  const now = found ?? node;
  const rows = [
    ["Tokens of this node", count(node.num_tokens)],
    found && ["Tokens of the whole prefix", count(found.prefix_tokens)],
    ["Tokens with all below", `${count(node.total_tokens)} in ${count(node.total_nodes)} nodes`],
    ["Uses", count(now.uses)],
    ["Last use", now.running ? "now" : `${duration(now.idle_s)} ago`],
    found && ["Computed", `${duration(found.age_s)} ago`],
    ["Running, waiting", `${now.running}, ${node.waiting}`],
    node.states > 0 && ["States of recurrent layers", count(node.states)],
    node.retention !== "default" && ["Retention", node.retention],
    ["Leases", found ? found.leases.map((lease) => `${lease.tenant || "no key"}, ${duration(lease.expires_in_s)} left`).join("; ") || "none" : String(node.leases)],
  ].filter(Boolean);
  return element("dl", {}, ...rows.flatMap(([name, value]) => [element("dt", { text: name }), element("dd", { text: value })]));
}

/** The largest prefixes that continue this one, also those too small to be drawn. @param {TreeNode|null} node @param {Cell[]} children */
function continuations(node, children) {
  const nodes = children.flatMap((child) => (child.node ? [child] : child.children)).sort((a, b) => b.tokens - a.tokens).slice(0, 20);
  if (nodes.length === 0) return [];
  return [
    element("h3", { text: node ? "Largest continuations" : "Largest prefixes" }),
    element("ol", { class: "continuations" }, ...nodes.map((child) =>
      element("li", {}, element("button", { type: "button", onclick: () => zoom(child.node.node) },
        element("span", { text: child.name.slice(0, 80) }), element("small", { text: `${count(child.tokens)} tokens` }))))),
  ];
}

function controls(id, node, found) {
  const seconds = element("select", { id: "pin-seconds", "aria-label": "Duration of the pin" },
    ...[[300, "5 min"], [1800, "30 min"], [3600, "1 h"]].map(([value, text]) => element("option", { value, text })));
  const deed = async (path, body) => {
    byId("deed").textContent = "";
    try {
      const done = await json(path, { body });
      await showDetails(id);
      byId("deed").textContent = done.lease ? `Pinned ${count(done.pinned_tokens)} tokens.` : `Released ${count(done.released_tokens)} tokens.`;
    } catch (error) {
      byId("deed").textContent = error.message;
    }
  };
  return [
    element("div", { class: "buttons" },
      element("button", { type: "button", disabled: node.node === below, onclick: () => zoom(node.node) }, "Zoom"),
      element("button", { type: "button", onclick: () => deed("/v1/cache/pin", { node: node.node, ttl_s: Number(seconds.value) }) }, "Pin for"), seconds,
      element("button", { type: "button", disabled: !found?.leases.length, onclick: () => deed("/v1/cache/release", { node: node.node }) }, "Release")),
    byId("deed") ?? element("p", { id: "deed", class: "hint", role: "status" }),
  ];
}

/** @param {{text: string|null, text_before: string|null, num_tokens: number}} found */
function texts(found) {
  if (found.text === null) return [element("p", { class: "hint", text: "The text is not shown: its requests have a salt, or the server hides texts." })];
  const before = found.text_before ? [element("span", { class: "before", text: found.text_before })] : [];
  return [element("h3", { text: "Text" }), element("pre", { class: "prefix", tabindex: "0" }, ...before, element("span", { text: found.text }))];
}
