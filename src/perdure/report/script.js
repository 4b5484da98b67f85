"use strict";
// Modes of inference as tabs. Without this script all of them are shown one below the other.
for (const group of document.querySelectorAll("[data-tabs]")) {
  const panels = [...group.querySelectorAll(":scope > section")];
  if (panels.length < 2) continue;
  const list = document.createElement("div");
  list.setAttribute("role", "tablist");
  list.setAttribute("aria-label", group.dataset.tabs);
  const tabs = panels.map((panel, place) => {
    const tab = document.createElement("button");
    tab.type = "button";
    tab.textContent = panel.dataset.tab;
    tab.id = panel.id + "-tab";
    tab.setAttribute("role", "tab");
    tab.setAttribute("aria-controls", panel.id);
    tab.addEventListener("click", () => choose(place));
    panel.setAttribute("role", "tabpanel");
    panel.setAttribute("aria-labelledby", tab.id);
    list.append(tab);
    return tab;
  });
  const choose = (chosen) => {
    tabs.forEach((tab, place) => {
      tab.setAttribute("aria-selected", String(place === chosen));
      tab.tabIndex = place === chosen ? 0 : -1;
      panels[place].classList.toggle("away", place !== chosen);
    });
  };
  list.addEventListener("keydown", (event) => {
    const now = tabs.indexOf(document.activeElement);
    const last = tabs.length - 1;
    const next = { ArrowRight: now < last ? now + 1 : 0, ArrowLeft: now > 0 ? now - 1 : last, Home: 0, End: last }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    choose(next);
    tabs[next].focus();
  });
  group.prepend(list);
  choose(0);
  // A link to something inside a tab that is away brings the tab to the front.
  const follow = () => {
    const target = location.hash && document.getElementById(location.hash.slice(1));
    const place = panels.findIndex((panel) => target && panel.contains(target));
    if (place < 0) return;
    choose(place);
    target.scrollIntoView();
  };
  window.addEventListener("hashchange", follow);
  follow();
}
