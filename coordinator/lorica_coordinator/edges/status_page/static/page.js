// Brings the page up to date in place: what has changed is replaced section by section, and what a person opened or stands on stays so.
"use strict";

const EVERY_MS = 2000;
const PATIENCE_MS = 10000;
const CURVES = "curves"; // the section that charts.js fills: it is never replaced
const main = document.getElementById("main");
const connection = document.getElementById("connection");
let reached = Date.now();

function keep(before, after) {
  for (const open of before.querySelectorAll("details[open][id]")) {
    const same = after.querySelector("#" + CSS.escape(open.id));
    if (same) same.open = true;
  }
}

function scrolled() {
  // How far a person has scrolled within the page's boxes, to be put back after they were replaced.
  const boxes = [...document.querySelectorAll(".scroll[id]")].map((box) => [box.id, box.scrollTop, box.scrollLeft]);
  return () => boxes.forEach(([id, top, left]) => {
    const box = document.getElementById(id);
    if (box) box.scrollTo(left, top);
  });
}

function placeOf(element) {
  // Where the keyboard stands: the nearest thing with an id, and which of its focusable parts.
  const within = element.closest("[id]");
  const parts = within ? [...within.querySelectorAll("summary, a, button, [tabindex]")] : [];
  return within ? { id: within.id, index: parts.indexOf(element) } : null;
}

function putBack(place) {
  const within = place && document.getElementById(place.id);
  if (!within) return;
  const parts = [...within.querySelectorAll("summary, a, button, [tabindex]")];
  (parts[place.index] || within).focus({ preventScroll: true });
}

function show(text) {
  const fresh = new DOMParser().parseFromString(text, "text/html").body;
  const focused = main.contains(document.activeElement) ? document.activeElement : null;
  const place = focused && focused !== main ? placeOf(focused) : null;
  const scrollBack = scrolled();
  const now = [...main.children], next = [...fresh.children];
  keep(main, fresh);
  document.title = fresh.querySelector("[data-title]").dataset.title;
  if (now.length === next.length && now.every((part, index) => part.id === next[index].id)) {
    now.forEach((part, index) => {
      if (part.id === CURVES) part.dataset.version = next[index].dataset.version;
      else if (!part.isEqualNode(next[index])) part.replaceWith(document.adoptNode(next[index]));
    });
  } else {
    const curves = document.getElementById(CURVES);
    const version = fresh.querySelector("#" + CURVES).dataset.version;
    main.replaceChildren(...next.map((part) => (curves && part.id === CURVES ? curves : document.adoptNode(part))));
    document.getElementById(CURVES).dataset.version = version;
  }
  document.querySelectorAll("table.sortable").forEach(sortable);
  scrollBack();
  if (place && !main.contains(document.activeElement)) putBack(place);
}

// --- tables in the order that a person asked for

let order = null; // { column, down }

function sortable(table) {
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    if (head.querySelector("button")) return;
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = head.textContent;
    button.addEventListener("click", () => {
      order = { column, down: order !== null && order.column === column && !order.down };
      sort(table);
    });
    head.replaceChildren(button);
  });
  if (order) sort(table);
}

function sort(table) {
  const key = (row) => {
    const cell = row.cells[order.column], time = cell.querySelector("time");
    return time ? time.dateTime : cell.textContent.trim();
  };
  const rows = [...table.tBodies[0].rows].map((row) => [key(row), row]);
  rows.sort(([one], [other]) => (order.down ? -1 : 1) * one.localeCompare(other, "en", { numeric: true }));
  table.tBodies[0].append(...rows.map(([, row]) => row));
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    if (column === order.column) head.setAttribute("aria-sort", order.down ? "descending" : "ascending");
    else head.removeAttribute("aria-sort");
  });
}

async function drawCurves() {
  try {
    await Charts.refresh(document.getElementById(CURVES).dataset.version);
  } catch (error) {
    console.warn("the curves could not be brought up to date", error);
  }
}

function say(text, failed) {
  if (connection.textContent !== text) connection.textContent = text;
  connection.classList.toggle("lost", failed);
}

async function look() {
  try {
    const reply = await fetch("/live", { cache: "no-store", signal: AbortSignal.timeout(PATIENCE_MS) });
    if (!reply.ok) throw new Error(reply.status);
    show(await reply.text());
    reached = Date.now();
    say("live", false);
    await drawCurves();
  } catch {
    say("no answer since " + new Date(reached).toLocaleTimeString() + ", trying again", true);
  }
}

async function watch() {
  for (;;) {
    if (document.visibilityState === "visible") await look();
    await new Promise((resolve) => {
      const timer = setTimeout(resolve, EVERY_MS);
      document.addEventListener("visibilitychange", () => { clearTimeout(timer); resolve(); }, { once: true });
    });
  }
}

document.querySelectorAll("table.sortable").forEach(sortable);
watch();
