// Routes by hash, asks for the token, and refreshes the page that is open.

import { Missing, NoAnswer, Refused, get, token } from "./api.js";
import { LossChart } from "./chart.js";
import { h, patch } from "./dom.js";
import { lossSeries } from "./metrics.js";
import { detail, isTerminal, missing, overview } from "./views.js";

const REFRESH_MS = 2000;
const main = document.querySelector("main");
const answer = document.querySelector("#answer");
const forget = document.querySelector("#forget");
let open = new AbortController(); // aborted when the page that is open gives way to another
let answered = new Date();

function show(page) {
  if (main.childElementCount === 1) patch(main.firstElementChild, page);
  else main.replaceChildren(page);
}

async function overviewPage(signal) {
  const [runs, sites] = await Promise.all([get("v1/runs", signal), get("v1/sites", signal)]);
  show(overview(runs, sites));
  document.title = "Isthmus";
}

function runPage(id) {
  const path = `v1/runs/${id}`;
  let items = [], rounds = [], snapshots = {}, chart = null, box = null;
  let final = 0; // times that a terminal run's metrics were read: the second catches what arrived late
  return async (signal) => {
    const run = await get(path, signal);
    if (final < 2) {
      const answers = [get(`${path}/metrics?max_points=1000`, signal), get(`${path}/outer-rounds`, signal)];
      answers.push(get(`${path}/snapshots`, signal));
      [{ items }, { items: rounds }, snapshots] = await Promise.all(answers);
      if (isTerminal(run)) final += 1;
    }
    show(detail(run, items, rounds, snapshots));
    document.title = `${run.spec.name}: ${run.status} · Isthmus`;
    const place = document.querySelector("#loss");
    if (place && place !== box) [box, chart] = [place, new LossChart(place, signal)];
    if (place) chart.draw(lossSeries(items));
  };
}

async function refreshing(refresh, signal) {
  while (!signal.aborted) {
    if (document.hidden) await next(document, "visibilitychange", signal);
    else {
      try {
        await refresh(signal);
        answered = new Date();
        say("● live", "live");
      } catch (error) {
        if (signal.aborted) return;
        if (error instanceof Refused) return ask(error.message);
        if (error instanceof NoAnswer) say(`✗ no answer from the coordinator since ${answered.toLocaleTimeString()}`, "bad");
        else say(`✗ ${error.message}`, "bad");
        if (error instanceof Missing) show(missing(error.message));
      }
      await pause(REFRESH_MS, signal);
    }
  }
}

function say(text, kind) {
  if (answer.textContent !== text) answer.textContent = text;
  answer.className = kind;
}

function next(target, event, signal) {
  return new Promise((resolve) => {
    target.addEventListener(event, resolve, { once: true, signal });
    signal.addEventListener("abort", resolve, { once: true });
  });
}

function pause(milliseconds, signal) {
  return new Promise((resolve) => {
    const stop = () => {
      clearTimeout(timer);
      signal.removeEventListener("abort", stop);
      resolve();
    };
    const timer = setTimeout(stop, milliseconds);
    signal.addEventListener("abort", stop);
  });
}

function ask(reason) {
  open.abort();
  token.forget();
  forget.hidden = true;
  say("", "");
  const field = h("input", { id: "token", type: "password", autocomplete: "off", required: "", spellcheck: "false" });
  const form = h(
    "form",
    { class: "token" },
    h("h1", {}, "Token"),
    reason && h("p", { class: "alarm", role: "alert" }, reason),
    h("label", { for: "token" }, "Admin or observer token"),
    field,
    h("button", {}, "Open"),
    h("p", { class: "muted" }, "Whoever runs the coordinator has it. It stays in this tab and is forgotten when the tab closes."),
  );
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    token.keep(field.value.trim());
    route();
  });
  main.replaceChildren(form);
  document.title = "Isthmus";
  field.focus();
}

// A link may carry the token: `#token=...` or `#/runs/<id>?token=...`. It never reaches a server or the history.
function takeToken() {
  const match = /^#(.*?)\??(token=.+)$/.exec(location.hash);
  if (!match) return;
  token.keep(new URLSearchParams(match[2]).get("token"));
  history.replaceState(null, "", `#${match[1] || "/"}`);
}

function route() {
  takeToken();
  open.abort();
  if (!token.get()) return ask("");
  open = new AbortController();
  forget.hidden = false;
  say("asking…", "");
  main.replaceChildren(h("p", { class: "muted" }, "Asking the coordinator…"));
  main.focus({ preventScroll: true });
  const run = /^#\/runs\/([\w-]+)$/.exec(location.hash);
  refreshing(run ? runPage(run[1]) : overviewPage, open.signal);
}

forget.addEventListener("click", () => ask(""));
addEventListener("hashchange", route);
route();
