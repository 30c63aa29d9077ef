// Brings the page up to date in place: what has changed is replaced section by section, and what a person opened or stands on stays so.
"use strict";

const EVERY_MS = 2000;
const PATIENCE_MS = 10000;
const main = document.getElementById("main");
const connection = document.getElementById("connection");
let reached = Date.now();

function keep(before, after) {
  for (const open of before.querySelectorAll("details[open][id]")) {
    const same = after.querySelector("#" + CSS.escape(open.id));
    if (same) same.open = true;
  }
}

function placeOf(element) {
  // Where the keyboard stands: the nearest thing with an id, and which of its focusable parts.
  const within = element.closest("[id]");
  const parts = within ? [...within.querySelectorAll("summary, a, [tabindex]")] : [];
  return within ? { id: within.id, index: parts.indexOf(element) } : null;
}

function putBack(place) {
  const within = place && document.getElementById(place.id);
  if (!within) return;
  const parts = [...within.querySelectorAll("summary, a, [tabindex]")];
  (parts[place.index] || within).focus({ preventScroll: true });
}

function show(text) {
  const fresh = new DOMParser().parseFromString(text, "text/html").body;
  const focused = main.contains(document.activeElement) ? document.activeElement : null;
  const place = focused && focused !== main ? placeOf(focused) : null;
  const now = [...main.children], next = [...fresh.children];
  keep(main, fresh);
  document.title = fresh.querySelector("[data-title]").dataset.title;
  if (now.length === next.length && now.every((part, index) => part.id === next[index].id)) {
    now.forEach((part, index) => {
      if (!part.isEqualNode(next[index])) part.replaceWith(document.adoptNode(next[index]));
    });
  } else {
    main.replaceChildren(...next.map((part) => document.adoptNode(part)));
  }
  if (place && !main.contains(document.activeElement)) putBack(place);
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

watch();
