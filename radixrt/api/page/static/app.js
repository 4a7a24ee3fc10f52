/** The frame of the page: views, theme, key, and the state of the connection. */

import { showCache, startCache } from "./cache.js";
import { startDashboard } from "./dashboard.js";
import { byId } from "./dom.js";
import { onReading, onState, startLive } from "./live.js";
import { startPlayground } from "./playground.js";
import { keepKey, key, keyListeners } from "./server.js";

const VIEWS = ["playground", "dashboard", "cache"];

/** Show the view that the address names. */
function showView() {
  const name = VIEWS.includes(location.hash.slice(1)) ? location.hash.slice(1) : VIEWS[0];
  for (const view of VIEWS) byId(view).hidden = view !== name;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.getAttribute("href") === `#${name}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  showCache(name === "cache");
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

/** Show the state of the connection, and ask for a key when the server wants one. */
function startConnection() {
  const place = byId("connection");
  const show = (state, text) => {
    if (place.textContent === text) return;
    place.className = `connection ${state}`;
    place.textContent = text;
  };
  onReading((reading) => {
    byId("model").textContent = reading.model;
    document.title = `${reading.model} · radixrt`;
  });
  onState((error) => {
    show(error ? "lost" : "live", error ? (error.status === 401 ? "no key" : "no connection") : "live");
    if (error?.status === 401) askForKey(key() ? "The server does not know this key." : "This server wants an API key.");
  });
  const mark = () => byId("key-button").classList.toggle("set", Boolean(key()));
  keyListeners.push(mark);
  mark();
}

startTheme();
startKey();
startConnection();
startPlayground();
startDashboard();
startCache();
showView();
addEventListener("hashchange", showView);
startLive();
