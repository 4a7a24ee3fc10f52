/** A message of a conversation on the page, with its buttons. */

import { copyButton, element, exact } from "./dom.js";
import { code, Markdown } from "./markdown.js";
import { thumbnails } from "./pictures.js";
import { reportFooter } from "./report.js";

/** @typedef {import("./conversation.js").Message} Message */
/** @typedef {{edit: (message: Message, text: string) => void, again: (message: Message) => void, show: (message: Message) => void}} Actions */

const NAMES = { user: "You", assistant: "Model" };

export class MessageEntry {
  /** @param {Message} message @param {Message[]} alternatives of other branches, itself included @param {Actions} actions @param {() => void} onRender */
  constructor(message, alternatives, actions, onRender) {
    Object.assign(this, { message, alternatives, actions });
    this.isAnswer = message.role === "assistant";
    this.markdown = new Markdown(onRender);
    this.text = this.isAnswer ? this.markdown.root : element("div", { class: "text", text: message.content });
    this.root = element("li", { class: `message ${message.role}` },
      element("h2", { text: NAMES[message.role] ?? `Result of ${message.name}` }), message.images && thumbnails(message.images), this.text);
  }

  /** An answer whose next token is awaited. */
  begin() {
    this.root.setAttribute("aria-busy", "true");
    return this;
  }

  /** @param {{total: number, processed: number}} progress of the prompt */
  showProgress({ total, processed }) {
    this.progress ??= this.text.appendChild(element("p", { class: "progress" }, element("span"), element("progress", { "aria-label": "Prompt" })));
    const [words, bar] = this.progress.children;
    words.textContent = `Reading the prompt: ${exact(processed)} of ${exact(total)} tokens`;
    Object.assign(bar, { max: total, value: processed });
  }

  /** Show more of an answer. */
  grow() {
    const { content, reasoning, tool_calls, isJson } = this.message;
    this.progress?.remove();
    if (isJson && content) this.text.textContent = content;
    else if (content) this.markdown.update(content);
    if (reasoning) {
      this.reasoning ??= element("details", { class: "reasoning", open: true }, element("summary", { text: "Reasoning" }), element("div"));
      if (!this.reasoning.isConnected) this.text.before(this.reasoning);
      this.reasoning.lastElementChild.textContent = reasoning;
    }
    (tool_calls ?? []).forEach((call, index) => {
      let shown = this.root.querySelectorAll(".call")[index];
      if (!shown) this.root.append((shown = element("pre", { class: "call", tabindex: "0" })));
      shown.textContent = `${call.function.name}(${call.function.arguments})`;
    });
  }

  /** Complete the entry: the message will not change any more. */
  end() {
    const { content, isJson, report, error } = this.message;
    this.root.removeAttribute("aria-busy");
    if (this.isAnswer) {
      this.grow();
      if (isJson && content) this.text.replaceChildren(code({ text: content, lang: "json" }));
      else this.markdown.render();
    }
    if (this.reasoning && content) this.reasoning.open = false;
    this.root.append(...[error && element("p", { class: "error", role: "alert", text: error }), report && reportFooter(report), this.buttons()].filter(Boolean));
    return this;
  }

  buttons() {
    const { message, alternatives, actions } = this;
    const button = (text, onclick, attributes = {}) => element("button", { type: "button", class: "small", onclick, ...attributes }, text);
    const place = alternatives.indexOf(message);
    const turn = (step, sign, name) =>
      button(sign, () => actions.show(alternatives[place + step]), { disabled: !alternatives[place + step], "aria-label": name });
    return element("div", { class: "actions" },
      alternatives.length > 1 && element("span", { class: "turner" },
        turn(-1, "‹", "Previous version"), `${place + 1}/${alternatives.length}`, turn(1, "›", "Next version")),
      message.content && copyButton("Copy", () => message.content),
      message.role === "user" && button("Edit", () => this.edit()),
      this.isAnswer && button("Answer again", () => actions.again(message)));
  }

  /** Turn the text into a field. What is sent from it begins another branch. */
  edit() {
    const field = element("textarea", { rows: Math.min(12, this.message.content.split("\n").length + 1), "aria-label": "Edited message" });
    field.value = this.message.content;
    const old = [...this.root.children];
    const form = element("form", { class: "edit" }, field, element("div", { class: "buttons" },
      element("button", { class: "primary" }, "Send"),
      element("button", { type: "button", onclick: () => this.root.replaceChildren(...old) }, "Cancel")));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (field.value.trim() || this.message.images) this.actions.edit(this.message, field.value);
    });
    this.root.replaceChildren(old[0], ...old.filter(({ className }) => className === "pictures"), form);
    field.focus();
  }
}
