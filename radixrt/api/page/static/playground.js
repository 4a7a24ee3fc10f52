/** The playground: a chat or a completion, its branches, and the share of each prompt that came from the cache. */

import { streamAnswer } from "./answer.js";
import { showChats, startChats } from "./chats.js";
import { Conversation } from "./conversation.js";
import { byId, element } from "./dom.js";
import { examplesFor } from "./examples.js";
import { onReading } from "./live.js";
import { MessageEntry } from "./message.js";
import { hasPictures, startPictures, takenPictures } from "./pictures.js";
import { chosenModel, isCompletion, loadModels, requestFor, startSettings, switchToCompletion } from "./settings.js";
import { storeConversation, storedConversations } from "./storage.js";

/** The conversation that a reload of this tab shows again. */
const OPEN = "radixrt-conversation";
/** Pause between two times at which a growing answer is kept. */
const KEEP_PAUSE_MS = 3_000;
const NEAR_END_PX = 60;

let conversation = new Conversation();
/** @type {AbortController|null} of the answer that is being streamed */
let answering = null;
/** The end of the conversation is in view, so it follows the answer. */
let follows = true;
/** Where the conversation was scrolled to when this page last looked. */
let top = 0;

export function startPlayground() {
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    submit();
  });
  byId("message").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      submit();
    }
  });
  startPictures();
  byId("stop").addEventListener("click", () => answering?.abort());
  const messages = byId("messages");
  messages.addEventListener("scroll", look);
  new ResizeObserver(follow).observe(messages);
  addEventListener("pagehide", () => keep());
  const openAndWrite = (record) => {
    open(new Conversation(record));
    if (matchMedia("(hover: hover)").matches) byId("message").focus(); // on a phone it would open the keyboard
  };
  startChats({ current: () => conversation.id, open: openAndWrite, create: () => openAndWrite() });
  startSettings(() => {
    welcome();
    update();
  });
  let hasModels = false;
  const load = () => {
    if (!hasModels) loadModels().catch(() => (hasModels = false));
    hasModels = true;
  };
  load();
  onReading(load); // the server answers by now, and knows the key
  reopen();
}

/** Show the conversation that this tab showed before it was loaded again. */
async function reopen() {
  const id = sessionStorage.getItem(OPEN);
  const record = id && (await storedConversations().catch(() => [])).find((one) => one.id === id);
  if (conversation.head === null) open(new Conversation(record || undefined));
}

// ------------------------------------------------------------ the conversation

/** @param {Conversation} opened */
function open(opened) {
  answering?.abort();
  conversation = opened;
  sessionStorage.setItem(OPEN, opened.id);
  draw();
  showChats();
}

/** Keep a conversation in this browser. */
async function keep(kept = conversation) {
  if (kept.head === null) return;
  await storeConversation(kept.record()).catch(() => {});
  showChats();
}

/** Draw the branch that is shown. */
function draw() {
  byId("messages").replaceChildren(...conversation.branch.map((message) => entryOf(message).end().root));
  welcome();
  follows = true;
  top = 0;
  follow();
  update();
}

/** @param {import("./conversation.js").Message} message */
function entryOf(message) {
  const actions = {
    edit: (edited, text) => say({ role: "user", content: text, images: edited.images }, edited.parent),
    again: (other) => answer(other.parent),
    show: (other) => {
      if (answering) return;
      conversation.show(other);
      draw();
      keep();
    },
  };
  return new MessageEntry(message, conversation.alternatives(message), actions, follow);
}

/** See whether the user has scrolled. An answer that grows moves the end away, and never scrolls up. */
function look() {
  const messages = byId("messages");
  if (messages.scrollHeight - messages.scrollTop - messages.clientHeight < NEAR_END_PX) follows = true;
  else if (messages.scrollTop < top) follows = false;
  top = messages.scrollTop;
}

/** Keep the end in view, unless the user reads an earlier part. */
function follow() {
  look(); // the event of the scrolling may still be to come
  const messages = byId("messages");
  if (follows) messages.scrollTop = messages.scrollHeight;
  top = messages.scrollTop;
}

function submit() {
  const field = byId("message");
  const call = conversation.openCall;
  const continues = isCompletion() && conversation.head !== null;
  if (answering || (!field.value.trim() && !hasPictures() && !call && !continues)) return;
  const content = field.value;
  const images = call ? [] : takenPictures();
  field.value = "";
  if (call) say({ role: "tool", tool_call_id: call.id, name: call.function.name, content });
  else if (content || images.length) say({ role: "user", content, ...(images.length && { images }) });
  else answer();
}

/** Add a message, and answer once all calls of tools have their results. @param {any} message @param {number|null} [parent] */
function say(message, parent = conversation.head) {
  if (answering) return;
  conversation.add(message, parent);
  draw();
  keep();
  if (!conversation.openCall) answer();
}

/** Show what can be done now. */
function update() {
  const call = conversation.openCall;
  const name = call ? `Result of ${call.function.name}` : isCompletion() ? "Text to continue" : "Message";
  byId("message-label").textContent = byId("message").placeholder = name;
  byId("send").hidden = Boolean(answering);
  byId("stop").hidden = !answering;
  byId("chat-title").textContent = conversation.title;
}

/** Show examples on an empty page, of the chosen model and mode. */
function welcome() {
  if (conversation.head !== null) return;
  const examples = examplesFor(chosenModel(), isCompletion());
  byId("messages").replaceChildren(element("li", { class: "welcome" },
    element("p", { text: isCompletion() ? "The model continues your text." : "Chat with the served model." }),
    element("ul", { class: "examples", "aria-label": "Examples" }, ...examples.map((text) =>
      element("li", {}, element("button", { type: "button", onclick: () => say({ role: "user", content: text }) }, text)))),
    element("p", { class: "hint", text: "Under each answer are its tokens, its speed, and the part of the prompt that came from the cache." })));
}

// ------------------------------------------------------------ an answer

/** @param {number|null} [parent] the message that is answered */
async function answer(parent = conversation.head) {
  if (answering) return;
  const own = conversation;
  own.head = parent;
  const controller = (answering = new AbortController());
  /** @type {any} */
  let request;
  const refused = { error: "" };
  try {
    request = requestFor(own);
  } catch (error) {
    refused.error = error.message;
  }
  const message = own.add({ role: "assistant", content: "", isJson: Boolean(request?.body.response_format) });
  draw();
  byId("messages").lastElementChild.remove(); // its entry, as if it were complete
  const entry = entryOf(message).begin();
  byId("messages").append(entry.root);
  follow();
  const timer = setInterval(() => keep(own), KEEP_PAUSE_MS);
  if (request) await streamAnswer(request.path, request.body, message, controller.signal, entry);
  else Object.assign(message, refused);
  clearInterval(timer);
  answering = null;
  if (message.errorCode === "no_chat_template") {
    switchToCompletion();
    message.error += " The mode is Completion from now on: “Answer again” continues your text.";
  }
  entry.end();
  follow();
  update();
  await keep(own);
}
