/** The frame of the page: views, theme, key, and the state of the connection. */

import { byId } from "./dom.js";
import { startPlayground } from "./playground.js";
import { json, keepKey, key, keyListeners, ServerError } from "./server.js";

const VIEWS = ["playground"];

/** Show the view that the address names. */
function showView() {
  const name = VIEWS.includes(location.hash.slice(1)) ? location.hash.slice(1) : VIEWS[0];
  for (const view of VIEWS) byId(view).hidden = view !== name;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.getAttribute("href") === `#${name}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
}

const THEMES = { system: ["light dark", "◐"], light: ["light", "☀"], dark: ["dark", "☾"] };

function startTheme() {
  const names = Object.keys(THEMES);
  const button = byId("theme-button");
  const show = () => {
    const name = localStorage.getItem("radixrt-theme") ?? "system";
    const [scheme, sign] = THEMES[name] ?? THEMES.system;
    document.documentElement.style.colorScheme = scheme;
    button.textContent = sign;
    button.setAttribute("aria-label", (button.title = `Theme: ${name}`));
  };
  button.addEventListener("click", () => {
    const now = names.indexOf(localStorage.getItem("radixrt-theme") ?? "system");
    localStorage.setItem("radixrt-theme", names[(now + 1) % names.length]);
    show();
  });
  show();
}

function startKey() {
  const dialog = byId("key-dialog");
  byId("key-button").addEventListener("click", () => askForKey(""));
  dialog.addEventListener("close", () => {
    if (dialog.returnValue === "keep") keepKey(byId("key").value.trim());
    byId("key").value = "";
  });
}

/** @param {string} reason shown above the field */
function askForKey(reason) {
  const dialog = byId("key-dialog");
  byId("key-reason").textContent = reason;
  byId("key-reason").hidden = !reason;
  dialog.returnValue = "";
  if (!dialog.open) dialog.showModal();
}

/** Find out which model is served, and whether the key is right. */
async function greet() {
  byId("key-button").classList.toggle("set", Boolean(key()));
  try {
    const models = await json("/v1/models");
    byId("model").textContent = models.data[0].id;
    document.title = `${models.data[0].id} · radixrt`;
  } catch (error) {
    if (!(error instanceof ServerError)) throw error;
    if (error.status === 401) askForKey(key() ? "The server does not know this key." : "This server wants an API key.");
    else byId("connection").textContent = error.message;
  }
}

startTheme();
startKey();
startPlayground();
showView();
addEventListener("hashchange", showView);
keyListeners.push(greet);
greet();
