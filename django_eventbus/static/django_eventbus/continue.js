"use strict";
// Goes on with what the page's button would go on with; not for somebody who came back to the page,
// whose run may have been stopped.
{
    const [arrival] = performance.getEntriesByType("navigation");
    if (arrival?.type !== "back_forward") {
        document.querySelector("form[data-eventbus-continue]").submit();
    }
}
