"use strict";

// Refreshes the live parts of a page while it is visible. Without JavaScript they show the state at
// the time when the page was loaded.
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
      // The shop is closed or restarting. The next refresh tries again.
    }
  }, EVERY);
}
