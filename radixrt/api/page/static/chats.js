/** The list of the conversations that this browser keeps. */

import { byId, element } from "./dom.js";
import { deleteAllConversations, deleteConversation, storedConversations } from "./storage.js";

/** @type {{current: () => string, open: (record: any) => void, create: () => void}} */
let chats;

/** @param {typeof chats} playground which conversation is open, and how another one is opened or begun */
export function startChats(playground) {
  chats = playground;
  byId("new-chat").addEventListener("click", () => {
    chats.create();
    byId("chats").hidePopover();
  });
  byId("export").addEventListener("click", exportAll);
  byId("delete-all").addEventListener("click", async () => {
    if (!confirm("Delete all conversations from this browser?")) return;
    await deleteAllConversations();
    chats.create();
  });
}

/** Draw the list anew. */
export async function showChats() {
  try {
    const records = await storedConversations();
    byId("chat-list").replaceChildren(...records.map(entryOf));
    for (const name of ["export", "delete-all"]) byId(name).disabled = records.length === 0;
  } catch (error) {
    byId("kept").textContent = `This browser keeps no conversations: ${error.message}`;
  }
}

function entryOf(record) {
  const day = new Date(record.updated).toLocaleDateString(undefined, { day: "numeric", month: "short" });
  const remove = async () => {
    await deleteConversation(record.id);
    if (record.id === chats.current()) chats.create();
    else showChats();
  };
  const open = () => {
    chats.open(record);
    byId("chats").hidePopover();
  };
  return element("li", {},
    element("button", { type: "button", class: "title", "aria-current": record.id === chats.current() ? "true" : null, onclick: open },
      element("span", { text: record.title }), element("small", { text: day })),
    element("button", { type: "button", class: "small", "aria-label": `Delete ${record.title}`, title: "Delete", onclick: remove }, "✕"));
}

/** Save all conversations as a file of JSON. */
async function exportAll() {
  const text = JSON.stringify({ exported: new Date().toISOString(), conversations: await storedConversations() }, null, 1);
  const url = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  element("a", { href: url, download: "radixrt-conversations.json" }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}
