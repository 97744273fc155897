"use strict";
// Goes on with what the page's button would go on with.
document.querySelector("form[data-eventbus-continue]").submit();
