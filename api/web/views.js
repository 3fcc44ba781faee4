// The two pages, each as one function from answers to elements. No requests, no timers.

import { badge, bytes, count, duration, h, table, when } from "./dom.js";
import { agreement, bySite, summary, timeLeft } from "./metrics.js";

const TERMINAL = ["succeeded", "stopped", "failed"];
const SHOWN_ROUNDS = 20;
export const isTerminal = (run) => TERMINAL.includes(run.status);

// The reason to be read behind the status, with which it may begin.
const why = (run) => run.reason.replace(new RegExp(`^${run.status}\\b[:,;]? *`), "");

const percent = (share) => (share === null ? null : `${Math.round(share * 100)} %`);
const code = (text, label) => h("code", { title: label }, text);

export function overview(runs, sites) {
  const newest = runs.items.toSorted((a, b) => (a.created_at < b.created_at ? 1 : -1));
  const names = sites.items.toSorted((a, b) => (a.name < b.name ? -1 : 1));
  return h(
    "div",
    { class: "page" },
    h("h1", {}, "Runs"),
    newest.length ? table("Runs", RUN_COLUMNS, newest, (run) => run.id) : noRuns(names.length > 0),
    runs.next_cursor && h("p", { class: "muted" }, "There are more: ", code("isthmus run list"), "."),
    h("h2", {}, "Sites"),
    names.length
      ? table("Sites", SITE_COLUMNS, names, (site) => site.name)
      : empty("No site has registered. On each machine that trains, start ", code("isthmus agent"), "."),
  );
}

const RUN_COLUMNS = [
  ["Run", (run) => [h("a", { href: `#/runs/${encodeURIComponent(run.id)}` }, run.spec.name), " ", code(run.id.slice(-8), run.id)]],
  ["Status", (run) => [badge(run.status), alarmMark(run)]],
  ["Step", (run) => `${count(run.step)} / ${count(run.spec.steps)}`, "number"],
  ["Reason", (run) => why(run).split("\n")[0] || null, "wide"],
  ["Since", (run) => when(run.since), "short"],
];

const alarmMark = ({ alarms }) =>
  alarms.length > 0 && h("span", { class: "bad", title: alarms.join("\n") }, ` ⚠ ${count(alarms.length)} alarm${alarms.length > 1 ? "s" : ""}`);

const SITE_COLUMNS = [
  ["Site", (site) => site.name],
  ["Region", (site) => site.region],
  ["Status", (site) => badge(site.status)],
  ["Ranks", (site) => count(site.ranks), "number"],
  ["Tasks", (site) => site.tasks.join(", "), "wide"],
];

const empty = (...content) => h("p", { class: "empty" }, content);

function noRuns(haveSites) {
  const start = code("isthmus run start");
  if (haveSites) return empty("No runs yet. The sites below are ready for one: ", start, ".");
  return empty("No runs yet. To see one on this machine alone, try ", code("isthmus simulate"),
    ". To train across sites, register some and then ", start, ".");
}

const crumb = () => h("p", { class: "crumb" }, h("a", { href: "#/" }, "Runs"));

export function missing(reason) {
  return h("div", { class: "page" }, crumb(), h("p", { class: "alarm" }, reason));
}

export function detail(run, items, rounds, snapshots) {
  const sites = bySite(items);
  const members = run.members.map((member) => ({ ...member, ...summary(sites.get(member.site) ?? []) }));
  return h(
    "div",
    { class: "page" },
    crumb(),
    h("h1", {}, run.spec.name, " ", badge(run.status)),
    h("p", { class: "reason" }, why(run), why(run) && " · ", "since ", when(run.since)),
    h("div", {}, run.changes.map((change) => h("p", { class: "muted" }, changed(change)))),
    h("div", {}, warned(run.warnings)),
    h("div", {}, run.alarms.map((alarm) => h("p", { class: "alarm", role: "alert" }, h("strong", {}, "⚠ Alarm: "), alarm))),
    progress(run, items),
    facts(run, items, members),
    h("h2", {}, "Loss"),
    lossPart(run, items),
    h("h2", {}, "Sites"),
    digestSentence(run.members),
    members.length
      ? table("Sites of this run", memberColumns(run), members, (member) => member.site)
      : empty("No site takes part yet. See which are online: ", code("isthmus site list"), "."),
    h("h2", {}, "Outer rounds"),
    outerPart(run, rounds),
    h("h2", {}, "Snapshots"),
    snapshotPart(run, snapshots),
  );
}

const warned = (warnings) =>
  warnings.length > 0 && h("p", { class: "muted", title: warnings.join("\n") }, warnings.map((text) => text.split(":")[0]).join("; "));

function changed({ from_step, ...settings }) {
  const known = Object.entries(settings).filter(([, value]) => value !== null);
  return `from step ${count(from_step)} on: ${known.map(([name, value]) => `${name} ${value}`).join(", ")}`;
}

// Where sites train by themselves, the logs tell of outer rounds only; what the sites report tells of the steps between.
function stepsDone(run, items) {
  const later = run.regions.filter((region) => region.came_later).map((region) => region.name);
  const active = run.members.filter((member) => member.condition === "active" && !later.includes(member.region));
  if (run.spec.exchange !== "none" || !active.length) return run.step;
  const own = active.map(({ site }) => items.reduce((most, item) => (item.site === site ? Math.max(most, item.step) : most), 0));
  return Math.max(run.step, Math.min(...own));
}

function progress(run, items) {
  const { spec } = run, step = stepsDone(run, items);
  const left = run.status === "running" && step < spec.steps ? timeLeft(items, step, spec.steps) : null;
  return h(
    "div",
    { class: "progress" },
    h("progress", { max: spec.steps, value: step, "aria-label": "Steps done" }),
    h("span", {}, `step ${count(step)} / ${count(spec.steps)}`, left !== null && ` · about ${duration(left)} left`),
  );
}

function facts(run, items, members) {
  const { optimizer, outer, task } = run.spec, { lr, k, every } = run.in_force;
  const heldout = items.filter((point) => typeof point.values.heldout_loss === "number");
  const last = heldout.toSorted((a, b) => a.step - b.step).at(-1);
  const rates = members.map((member) => member.up.perStep).filter((rate) => rate !== null);
  const least = members.map((member) => member.compression).filter((ratio) => ratio !== null).sort((a, b) => a - b)[0];
  const tokens = members.reduce((sum, member) => sum + (member.tokens ?? 0), 0);
  const rows = [
    ["Held-out loss", last ? last.values.heldout_loss.toFixed(3) : "–", last ? `at step ${count(last.step)}` : "not measured yet"],
    ["Sent per step", rates.length ? bytes(Math.max(...rates)) : "–", "by the site that sends most"],
    ["vs DDP", least ? against(least) : "–", "2 bytes per parameter, one way"],
    ["Tokens", tokens ? count(tokens) : "–", "over all sites"],
    ["Task", task, `created ${new Date(run.created_at).toLocaleString()}`],
    ["Learning rate", String(lr), "at its peak"],
    ["Optimizer", optimizer.kind === "demo" ? `DeMo k=${k} ${optimizer.codec}` : optimizer.kind, outer ? `outer step every ${every}, ${outer.optimizer}${outer.optimizer === "average" ? "" : ` lr ${outer.lr}`}` : "no outer step"],
  ];
  return h("dl", { class: "facts" }, rows.map(([name, value, note]) =>
    h("div", {}, h("dt", {}, name), h("dd", {}, value), h("dd", { class: "muted" }, note))));
}

// What a site sends as a part or a multiple of what DDP would send, as `isthmus run show` has it.
const against = (ratio) => (ratio >= 1 ? `1/${ratio.toFixed(0)}` : `${(1 / ratio).toFixed(0)}x`);

function lossPart(run, items) {
  const losses = items.filter(({ values }) => typeof (values.loss ?? values.heldout_loss) === "number");
  if (!losses.length) return empty(isTerminal(run) ? "No loss was reported." : "No loss reported yet; the curve starts with the first steps.");
  return h("div", { id: "loss", class: "chart", "data-kept": "", role: "img", "aria-label": "Training loss per site and held-out loss against step" });
}

function digestSentence(members) {
  const { state, known } = agreement(members);
  const text = {
    equal: known === members.length ? `✓ Parameter digests: all ${known} are equal.` : `✓ Parameter digests: ${known} of ${members.length} known, equal.`,
    regional: "✓ Parameter digests: equal within each region; regions differ between outer rounds.",
    differ: "≠ Parameter digests differ within a region.",
    unknown: "Parameter digests: fewer than two known, nothing to compare.",
  }[state];
  return h("p", { class: `digests ${state}`, "data-digests": state }, text);
}

function memberColumns(run) {
  const { state: digests, differing, sizes } = agreement(run.members);
  const mark = ({ region }) => {
    if (differing.has(region)) return h("span", { class: "bad" }, "≠ differs");
    if (digests === "equal" || sizes.get(region) > 1) return h("span", { class: "good" }, "✓ equal");
    return h("span", { class: "muted" }, `alone in ${region}`);
  };
  const state = ({ condition, attempt, reason, since }) => [
    condition + (attempt > 1 ? `, attempt ${attempt}` : ""),
    reason && h("span", { class: "muted" }, ` since ${new Date(since).toLocaleTimeString()}: ${reason.split("\n")[0]}`),
  ];
  return [
    ["Site", (member) => member.site],
    ["Region", (member) => member.region],
    ["State", state],
    ["Step", (member) => (member.step === null ? null : count(member.step)), "number"],
    ["Up / step", (member) => bytes(member.up.perStep), "number"],
    ["Up", (member) => bytes(member.up.sum), "number"],
    ["Down / step", (member) => bytes(member.down.perStep), "number"],
    ["Down", (member) => bytes(member.down.sum), "number"],
    ["vs DDP", (member) => (member.compression === null ? null : against(member.compression)), "number"],
    ["Waiting", (member) => percent(member.waitShare), "number"],
    ["Digest", (member) => member.digest && [code(member.digest.slice(0, 12), member.digest), " ", mark(member)]],
  ];
}

function outerPart(run, rounds) {
  if (!run.spec.outer) return empty("This run has no outer step: all its sites exchange at every step.");
  if (!rounds.length) return empty(isTerminal(run) ? "No outer round was reached." : `The first outer round comes after step ${count(run.in_force.every)}.`);
  const weights = ({ weights }) => {
    const all = Object.values(weights).reduce((sum, tokens) => sum + tokens, 0) || 1;
    return Object.entries(weights).sort().map(([name, tokens]) => `${name} ${percent(tokens / all)} (${count(tokens)} tokens)`).join(", ");
  };
  const newest = rounds.toSorted((a, b) => b.number - a.number).slice(0, SHOWN_ROUNDS);
  const columns = [
    ["Round", (round) => count(round.number), "number"],
    ["Step", (round) => count(round.step), "number"],
    ["Distinct copies", (round) => count(round.distinct), "number"],
    ["Fragments", ({ fragments }) => `${fragments.filter(Boolean).length} / ${fragments.length}`, "number"],
    ["Weights", weights, "wide"],
  ];
  return h(
    "div",
    {},
    table("Outer rounds", columns, newest, (round) => round.number),
    rounds.length > SHOWN_ROUNDS && h("p", { class: "muted" }, `The newest ${SHOWN_ROUNDS} of ${count(rounds.length)}.`),
  );
}

function snapshotPart(run, { items, wanted }) {
  const columns = [
    ["Snapshot", (made) => code(`${run.id}/${made.number}`)],
    ["Step", (made) => count(made.step), "number"],
    ["Manifest", (made) => code(made.manifest.slice(0, 12), made.manifest)],
  ];
  const newest = items.toReversed();
  return h(
    "div",
    {},
    newest.length ? table("Snapshots", columns, newest, (made) => made.number) : empty("None is kept."),
    wanted !== null && h("p", { class: "muted" }, `Snapshot ${wanted} is being made.`),
  );
}
