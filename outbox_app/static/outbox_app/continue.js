// Posts the next batches of a long action. Without it the button does the same.
"use strict";
document.getElementById("outbox-continue").requestSubmit();
