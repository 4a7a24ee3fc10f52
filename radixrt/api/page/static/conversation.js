/** A conversation: messages in a tree, because an edited message or another answer begins a branch. */

/**
 * @typedef {{id: number, parent: number|null, role: string, content: string, reasoning?: string, tool_calls?: any[], tool_call_id?: string,
 *            name?: string, images?: string[], isJson?: boolean, report?: any, error?: string}} Message
 *   `parent`: the message before it; `images`: data URLs, before the text; `isJson`: its request had a schema
 */

export class Conversation {
  /** @param {any} [record] as {@link Conversation#record} has made it */
  constructor(record) {
    const now = Date.now();
    this.id = record?.id ?? `${now}-${Math.random().toString(36).slice(2)}`;
    this.created = record?.created ?? now;
    /** @type {Message[]} by id */
    this.messages = record?.messages ?? [];
    /** @type {number|null} the last message of the branch that is shown */
    this.head = record?.head ?? null;
  }

  /** What is kept of it. */
  record() {
    return { id: this.id, created: this.created, updated: Date.now(), title: this.title, head: this.head, messages: this.messages };
  }

  get title() {
    return (this.messages.find((message) => message.content)?.content ?? "").replace(/\s+/g, " ").trim().slice(0, 80) || "New chat";
  }

  /** The messages of the branch that is shown, in order. */
  get branch() {
    const found = [];
    for (let id = this.head; id !== null; id = this.messages[id].parent) found.unshift(this.messages[id]);
    return found;
  }

  /** Add a message behind another one, by default the last one, and show it. @param {any} message @param {number|null} parent @returns {Message} */
  add(message, parent = this.head) {
    const added = { ...message, id: this.messages.length, parent };
    this.messages.push(added);
    this.head = added.id;
    return added;
  }

  /** The messages that have the same place in other branches, itself included. @param {Message} message */
  alternatives(message) {
    return this.messages.filter(({ parent, role }) => parent === message.parent && role === message.role);
  }

  /** Show the branch of a message, up to its newest end. @param {Message} message */
  show(message) {
    this.head = message.id;
    for (let next; (next = this.messages.findLast(({ parent }) => parent === this.head)); ) this.head = next.id;
  }

  /** The first call of a tool by the last answer that has no result yet. */
  get openCall() {
    const { branch } = this;
    const last = branch.findLastIndex(({ role }) => role === "assistant");
    const answered = new Set(branch.slice(last + 1).map((message) => message.tool_call_id));
    return branch[last]?.tool_calls?.find((call) => !answered.has(call.id));
  }

  /** The branch in the form of a chat request. An answer that was stopped before its first token is left out. */
  get requestMessages() {
    return this.branch.filter(({ content, role, tool_calls }) => content || tool_calls?.length || role !== "assistant")
      .map(({ role, content, images, tool_calls, tool_call_id, name }) => ({
        role, content: images ? partsOf(images, content) : content, ...(tool_calls?.length && { tool_calls }), ...(tool_call_id && { tool_call_id, name }) }));
  }

  /** The branch as one text, for a completion. */
  get text() {
    return this.branch.map(({ content }) => content).join("");
  }
}

/** @param {string[]} images @param {string} text */
const partsOf = (images, text) => [
  ...images.map((url) => ({ type: "image_url", image_url: { url } })),
  ...(text ? [{ type: "text", text }] : []),
];
