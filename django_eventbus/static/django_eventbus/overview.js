// Fetches the changing part of the overview every few seconds, while somebody looks at it.
"use strict";

document.addEventListener("DOMContentLoaded", () => {
    const live = document.getElementById("eventbus-live");
    if (!live) {
        return;
    }
    const news = document.getElementById("eventbus-news");
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
    news.after(button);

    // Said once: whoever listens to the page need not hear the same every few seconds.
    function tell(text) {
        if (news.textContent !== text) {
            news.textContent = text;
        }
    }

    // A selection would be lost with what is selected.
    function isSelecting() {
        const selection = document.getSelection();
        return selection && !selection.isCollapsed && live.contains(selection.anchorNode);
    }

    // What the keyboard can stop at and that leads to the same place.
    function stopsLike(target) {
        return [...live.querySelectorAll("a, summary")].filter((each) => targetOf(each) === target);
    }

    function targetOf(stop) {
        return stop.getAttribute("href") || stop.tagName;
    }

    // Where the focus is, so that it is there again when all is new; what is gone leaves it here.
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
        tell(live.querySelector("[data-news]").dataset.news);
    }

    function showLost() {
        asOf.classList.add("eventbus-stale");
        tell(live.dataset.lost);
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
