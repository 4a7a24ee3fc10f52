/** Makes elements. Text becomes text nodes only, never HTML. */

/**
 * @param {string} name of the element
 * @param {Object<string, any>} [attributes] by name; `class`, `text` and `onclick`-like handlers are understood; null and false are left out
 * @param {...(Node|string|null|undefined|false)} children
 * @returns {any}
 */
export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (key === "text") made.textContent = value;
    else made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined && child !== false));
  return made;
}

/** The element with this id, which the HTML has. @param {string} id @returns {any} */
export const byId = (id) => document.getElementById(id);

/** Put a text on the clipboard, also on a page without TLS, where browsers have no `navigator.clipboard`. @param {string} text */
async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const field = element("textarea", { class: "hidden", readonly: true });
  field.value = text;
  document.body.append(field);
  field.select();
  document.execCommand("copy");
  field.remove();
}

/** A button that copies a text and says so. @param {string} name @param {() => string} text */
export function copyButton(name, text) {
  return element("button", {
    type: "button",
    class: "small",
    onclick: async ({ currentTarget: button }) => {
      button.textContent = await copy(text()).then(() => "Copied", () => "Not copied");
      setTimeout(() => (button.textContent = name), 1500);
    },
  }, name);
}

/** 1234567 as "1.2M". @param {number} value */
export function count(value) {
  for (const [size, unit] of [[1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (Math.abs(value) >= size) return (value / (unit === "k" ? 1e3 : size)).toFixed(1).replace(/\.0$/, "") + unit;
  }
  return Math.round(value).toLocaleString("en");
}

/** 1234567 as "1,234,567". @param {number} value */
export const exact = (value) => value.toLocaleString("en");

/** 0.0123 as "12 ms". @param {number} seconds */
export function duration(seconds) {
  if (seconds < 1) return `${(seconds * 1e3).toFixed(seconds > 0 && seconds < 0.01 ? 1 : 0)} ms`;
  for (const [size, unit] of [[86400, "d"], [3600, "h"], [60, "min"]]) {
    if (seconds >= size * 2) return `${Math.round(seconds / size)} ${unit}`;
  }
  return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
}

/** 0.4567 as "46 %". @param {number} share */
export const percent = (share) => `${(share * 100).toFixed(share > 0 && share < 0.0995 ? 1 : 0)} %`;
