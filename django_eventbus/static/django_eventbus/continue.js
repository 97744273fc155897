"use strict";
// Submits the form of the Continue button. A page that was reached by "Back" is not submitted,
// because its run may have been stopped.
{
    const [arrival] = performance.getEntriesByType("navigation");
    if (arrival?.type !== "back_forward") {
        document.querySelector("form[data-eventbus-continue]").submit();
    }
}
