// What the stored metric points say. Pure: points in, numbers out.

const is = (value) => typeof value === "number";

export function bySite(items) {
  const sites = new Map();
  for (const point of [...items].sort((a, b) => a.step - b.step || (a.at < b.at ? -1 : 1))) {
    if (!sites.has(point.site)) sites.set(point.site, []);
    sites.get(point.site).push(point);
  }
  return sites;
}

export function latest(points, name) {
  return points.findLast((point) => is(point.values[name]))?.values[name] ?? null;
}

// Of one site, over all of its sessions, from the beginning of which values count. `perStep` is taken between the reports of each, so what a session costs once
// before its first report (sending the start) is in `sum` only.
export function total(points, name) {
  let sum = null, moved = 0, steps = 0;
  const known = points.filter(({ values }) => is(values[name]));
  known.sort((a, b) => new Date(a.at) - new Date(b.at) || a.step - b.step);
  for (const session of Map.groupBy(known, (point) => point.session).values()) {
    const first = session[0], last = session.at(-1);
    sum += last.values[name];
    moved += last.values[name] - first.values[name];
    steps += last.step - first.step;
  }
  return { sum, perStep: steps > 0 ? moved / steps : null };
}

// Traffic and time of one site. Compression: 2 bytes per parameter and step, one way, against what the site sent.
export function summary(points) {
  const up = total(points, "bytes_up");
  const down = total(points, "bytes_down");
  const wait = total(points, "wait_s").sum;
  const compute = total(points, "compute_s").sum;
  const ddp = latest(points, "ddp_bytes_per_step");
  return {
    up,
    down,
    step: points.at(-1)?.step ?? null,
    tokens: total(points, "tokens").sum,
    compression: is(ddp) && up.perStep ? ddp / up.perStep : null,
    waitShare: is(wait) && is(compute) && wait + compute > 0 ? wait / (wait + compute) : null,
  };
}

// Seconds to the last step, by the pace of the newest quarter of the points.
export function timeLeft(items, step, steps) {
  const points = [...items].sort((a, b) => a.step - b.step);
  const newest = points.at(-1);
  const past = points[Math.floor(points.length * 0.75) - 1] ?? points[0];
  if (!newest || newest.step <= past.step) return null;
  const seconds = (new Date(newest.at) - new Date(past.at)) / 1000;
  return seconds > 0 ? ((steps - step) * seconds) / (newest.step - past.step) : null;
}

// Series against step for the loss chart: [{label, kind: site | heldout | reference, values: Map(step -> value)}].
export function lossSeries(items) {
  const series = [];
  const collect = (points, name) => {
    const values = new Map();
    for (const point of points) if (is(point.values[name])) values.set(point.step, point.values[name]);
    return values;
  };
  const add = (label, kind, values) => values.size && series.push({ label, kind, values });
  for (const [site, points] of [...bySite(items)].sort()) add(site, "site", collect(points, "loss"));
  add("held-out", "heldout", collect(items, "heldout_loss"));
  for (const name of ["unigram", "bigram"]) {
    const value = latest(items, `${name}_loss`);
    if (is(value)) series.push({ label: name, kind: "reference", value, values: new Map() });
  }
  return series;
}

// Digests of members: equal everywhere, equal within each region, or different where they must not be.
export function agreement(members) {
  const known = members.filter((member) => member.digest);
  const regions = Map.groupBy(known, (member) => member.region);
  const distinct = (list) => new Set(list.map((member) => member.digest)).size;
  const differing = new Set([...regions].filter(([, list]) => distinct(list) > 1).map(([region]) => region));
  let state = "equal";
  if (known.length < 2) state = "unknown";
  else if (differing.size) state = "differ";
  else if (distinct(known) > 1) state = "regional";
  return { state, known: known.length, differing, sizes: new Map([...regions].map(([name, list]) => [name, list.length])) };
}
