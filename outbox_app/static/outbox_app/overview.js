/* Refreshes the overview: fetches the part that changes and replaces it. The server draws all of
   it. Open tables, the focus and a selection of text are kept. */

"use strict";

(() => {
  const live = document.getElementById("outbox-live");
  const bar = document.getElementById("outbox-refresh");
  const said = document.getElementById("outbox-said");
  const [wanted, note] = [bar.querySelector("input"), bar.querySelector("span")];
  const seconds = Number(bar.dataset.seconds);

  const headline = () => live.querySelector(".outbox-headline").textContent;
  const details = () => [...live.querySelectorAll("details")];
  const links = () => [...live.querySelectorAll("a, summary")];
  const name = (node) => node.getAttribute("href") || node.closest("figure")?.getAttribute("aria-labelledby");

  function replace(html) {
    const page = new DOMParser().parseFromString(html, "text/html");
    if (!page.querySelector(".outbox-headline")) throw new Error("no overview");
    const before = headline();
    const open = details().map((each) => each.open);
    const active = document.activeElement;
    const focused = live.contains(active) ? name(active) : null;
    // Several links may have the same address.
    const alike = () => links().filter((each) => name(each) === focused);
    const which = alike().indexOf(active);
    live.replaceChildren(...page.body.childNodes);
    details().forEach((each, place) => { each.open = Boolean(open[place]); });
    if (focused) (alike()[which] ?? alike()[0])?.focus({ preventScroll: true });
    if (headline() !== before) said.textContent = headline();
  }

  async function refresh() {
    const selecting = live.contains(document.getSelection().anchorNode) && String(document.getSelection());
    if (!wanted.checked || document.hidden || selecting) return;
    try {
      const address = new URL(location);
      address.searchParams.set("part", "live");
      const response = await fetch(address, { redirect: "error" });
      if (!response.ok) throw new Error(response.status);
      replace(await response.text());
      note.textContent = "";
    } catch {
      note.textContent = bar.dataset.failed;
    }
  }

  // One refresh at a time: the next one starts so many seconds after the last has ended.
  const loop = () => setTimeout(() => refresh().finally(loop), seconds * 1000);
  bar.hidden = false;
  loop();
})();
