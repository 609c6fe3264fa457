// Posts the next slice of a long decision. Without it the button does the same.
"use strict";
document.getElementById("outbox-continue").requestSubmit();
