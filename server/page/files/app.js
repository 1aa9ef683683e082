// Tabs, theme, the list of models, and the line that says how far loading is.

import { ApiError, address, byId, element, get } from "./api.js";
import { beginLive, endLive } from "./live.js";
import { allowPictures } from "./pictures.js";
import { beginPlay } from "./play.js";
import { beginVectors } from "./vectors.js";

const tabs = [...document.querySelectorAll("[role=tab]")];

function show(tab) {
  for (const one of tabs) {
    const chosen = one === tab;
    one.setAttribute("aria-selected", chosen);
    one.tabIndex = chosen ? 0 : -1;
    byId(one.getAttribute("aria-controls")).hidden = !chosen;
  }
  history.replaceState(null, "", `#${tab.getAttribute("aria-controls")}`);
  look();
}

// The stream of live data is open only while somebody can see it.
function look() {
  if (!byId("live").hidden && !document.hidden) beginLive(); else endLive();
}

function beginTabs() {
  for (const tab of tabs) {
    tab.addEventListener("click", () => show(tab));
    tab.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      const next = tabs[(tabs.indexOf(tab) + step + tabs.length) % tabs.length];
      show(next);
      next.focus();
    });
  }
  document.addEventListener("visibilitychange", look);
  show(tabs.find((tab) => `#${tab.getAttribute("aria-controls")}` === location.hash) ?? tabs[0]);
}

function beginTheme() {
  const root = document.documentElement, saved = localStorage.getItem("facet-theme");
  if (saved) root.dataset.theme = saved;
  byId("theme").addEventListener("click", () => {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    localStorage.setItem("facet-theme", root.dataset.theme);
  });
}

async function waitReady() {
  const line = byId("state");
  for (;;) {
    try {
      const response = await fetch("health", { cache: "no-store" });
      if (response.ok) break;
      const state = await response.json();
      line.textContent = state.state === "loading" ? `The model is loading: ${state.stage}, ${Math.round(100 * state.progress)} %` : `The server is ${state.state ?? "not ready"}.`;
    } catch {
      line.textContent = "The server does not answer.";
    }
    line.hidden = false;
    await new Promise((resolve) => setTimeout(resolve, 1000));
  }
  line.hidden = true;
}

// Asks at once, since most servers are ready when their page is opened, and waits if this one is not.
async function listModels() {
  for (;;) {
    try {
      const { data } = await get("v1/models");
      byId("model").replaceChildren(...data.map((card) => element("option", { value: card.id, text: card.id })));
      allowPictures(data[0].media);
      document.body.dataset.ready = "yes";
      return;
    } catch (error) {
      if (error instanceof ApiError && error.status !== 503) {
        byId("state").textContent = error.message;
        byId("state").hidden = false;
        return;
      }
      await waitReady();
    }
  }
}

listModels();  // before the page is built, which takes as long as the answer does
beginTheme();
beginPlay(address);
beginVectors();
beginTabs();
