/** The pictures of the next message: dropped, pasted or chosen. They are sent as they are; the server decodes and limits them. */

import { byId, element } from "./dom.js";
import { isCompletion } from "./settings.js";

/** @type {string[]} data URLs */
let pictures = [];

export function startPictures() {
  const field = byId("picture-file");
  byId("add-picture").addEventListener("click", () => field.click());
  field.addEventListener("change", () => {
    take(field.files);
    field.value = ""; // else the same file could not be chosen again
  });
  byId("message").addEventListener("paste", (event) => {
    if (imagesOf(event.clipboardData.files).length === 0) return;
    event.preventDefault();
    take(event.clipboardData.files);
  });
  const playground = byId("playground");
  playground.addEventListener("dragover", (event) => {
    if (event.dataTransfer.types.includes("Files")) event.preventDefault(); // else the browser would open the file
  });
  playground.addEventListener("drop", (event) => {
    if (event.dataTransfer.files.length === 0) return;
    event.preventDefault();
    take(event.dataTransfer.files);
  });
}

/** The pictures for a message that is sent now. @returns {string[]} */
export function takenPictures() {
  const taken = pictures;
  pictures = [];
  draw();
  return taken;
}

export const hasPictures = () => pictures.length > 0;

/** Thumbnails. @param {string[]} urls */
export const thumbnails = (urls) =>
  element("div", { class: "pictures" }, ...urls.map((url, index) => element("img", { src: url, alt: `Image ${index + 1}` })));

const imagesOf = (files) => [...files].filter(({ type }) => type.startsWith("image/"));

/** @param {FileList} files */
async function take(files) {
  if (isCompletion()) return; // whose prompt is a text
  const urls = await Promise.all(imagesOf(files).map(dataUrl));
  pictures = [...pictures, ...urls];
  draw();
}

/** @param {File} file @returns {Promise<string>} */
const dataUrl = (file) => new Promise((resolve, reject) => {
  const reader = new FileReader();
  reader.onload = () => resolve(String(reader.result));
  reader.onerror = () => reject(reader.error);
  reader.readAsDataURL(file);
});

function draw() {
  const shown = pictures.map((url, index) => element("button", {
    type: "button",
    "aria-label": `Remove image ${index + 1}`,
    onclick: () => {
      pictures = pictures.filter((_, other) => other !== index);
      draw();
    },
  }, element("img", { src: url, alt: "" }), "✕"));
  byId("pictures").replaceChildren(...shown);
}
