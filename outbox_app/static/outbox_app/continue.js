// Submits the form that runs the next batches of an action. Without JavaScript its button does.
"use strict";
document.getElementById("outbox-continue").requestSubmit();
