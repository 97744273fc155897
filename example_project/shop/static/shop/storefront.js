"use strict";

// Keep the list of recent orders fresh while somebody looks at it.
const orders = document.getElementById("orders");

setInterval(async () => {
  if (document.hidden) return;
  try {
    const response = await fetch(orders.dataset.url);
    if (response.ok) orders.innerHTML = await response.text();
  } catch {
    // The shop is closed or restarting; the next second will tell.
  }
}, 1000);
