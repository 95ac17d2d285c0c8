// Replaces each section of the page by its newer self, and leaves alone what has not changed.
"use strict";

const INTERVAL = 2000; // ms

async function refresh() {
  const answer = await fetch("/now");
  if (!answer.ok) throw new Error(`status ${answer.status}`);
  const newer = new DOMParser().parseFromString(await answer.text(), "text/html");
  for (const section of newer.querySelectorAll("section")) {
    const shown = document.getElementById(section.id);
    if (shown.outerHTML !== section.outerHTML) shown.replaceWith(document.adoptNode(section));
  }
}

async function follow() {
  for (;;) {
    await new Promise((resolve) => setTimeout(resolve, INTERVAL));
    if (document.hidden) continue;
    try {
      await refresh();
    } catch {
      const state = document.querySelector(".state b");
      state.textContent = "the page's server has ended";
      state.className = "ended";
    }
  }
}

follow();
