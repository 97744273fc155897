// Refreshes the statistics of the overview every few seconds while the page is visible.
"use strict";

document.addEventListener("DOMContentLoaded", () => {
    const live = document.getElementById("eventbus-live");
    if (!live) {
        return;
    }
    const summary = document.getElementById("eventbus-summary");
    const asOf = document.getElementById("eventbus-as-of");
    const button = document.createElement("button");
    let paused = false;
    let fetching = false;

    button.type = "button";
    button.className = "button";
    button.textContent = live.dataset.pause;
    button.addEventListener("click", () => {
        paused = !paused;
        button.textContent = paused ? live.dataset.resume : live.dataset.pause;
        if (!paused) {
            refresh();
        }
    });
    summary.after(button);

    // Set only a changed text: screen readers announce every assignment.
    function announce(text) {
        if (summary.textContent !== text) {
            summary.textContent = text;
        }
    }

    // A refresh would remove the selected text.
    function isSelecting() {
        const selection = document.getSelection();
        return selection && !selection.isCollapsed && live.contains(selection.anchorNode);
    }

    // The focusable elements with the same target.
    function stopsLike(target) {
        return [...live.querySelectorAll("a, summary")].filter((each) => targetOf(each) === target);
    }

    function targetOf(stop) {
        return stop.getAttribute("href") || stop.tagName;
    }

    // Returns a function that restores the focus after a refresh, or focuses the section.
    function rememberFocus() {
        const stop = document.activeElement;
        if (!live.contains(stop)) {
            return () => {};
        }
        const target = targetOf(stop);
        const place = stopsLike(target).indexOf(stop);
        return () => (stopsLike(target)[place] || live).focus({preventScroll: true});
    }

    function show(html) {
        const fresh = new DOMParser().parseFromString(html, "text/html").body;
        const refocus = rememberFocus();
        for (const details of live.querySelectorAll("details[open]")) {
            const same = fresh.querySelector("#" + details.id);
            if (same) {
                same.open = true;
            }
        }
        live.replaceChildren(...fresh.childNodes);
        refocus();
        asOf.textContent = live.querySelector("[data-as-of]").dataset.asOf;
        asOf.classList.remove("eventbus-stale");
        announce(live.querySelector("[data-summary]").dataset.summary);
    }

    function showLost() {
        asOf.classList.add("eventbus-stale");
        announce(live.dataset.lost);
    }

    async function refresh() {
        if (paused || fetching || document.hidden || isSelecting()) {
            return;
        }
        fetching = true;
        try {
            const answer = await fetch(live.dataset.url, {credentials: "same-origin"});
            if (answer.ok && !answer.redirected) {
                show(await answer.text());
            } else {
                showLost();
            }
        } catch {
            showLost();
        } finally {
            fetching = false;
        }
    }

    document.addEventListener("visibilitychange", refresh);
    setInterval(refresh, 1000 * Number(live.dataset.seconds));
});
