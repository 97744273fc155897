"use strict";

// Keeps the live parts of a page fresh while somebody looks at it. Without it they are as fresh as
// the page.
const EVERY = 1000;

for (const part of document.querySelectorAll("[data-live]")) {
  let shown;
  setInterval(async () => {
    if (document.hidden) return;
    try {
      const response = await fetch(part.dataset.live);
      const fresh = await response.text();
      if (!response.ok || fresh === shown) return;
      const focused = part.contains(document.activeElement) ? document.activeElement.id : "";
      part.innerHTML = shown = fresh;
      if (focused) document.getElementById(focused)?.focus();
    } catch {
      // The shop is closed or restarting; the next second will tell.
    }
  }, EVERY);
}
