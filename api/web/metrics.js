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

// Values count up from the beginning of a session, and start again at 0 with the next one. `perStep` is taken between
// reports, so what a session costs once before its first report (sending the start) is in `sum` only.
export function total(points, name) {
  let sum = 0, moved = 0, steps = 0, last = null;
  for (const { step, values } of points) {
    const value = values[name];
    if (!is(value)) continue;
    if (last && value >= last.value) {
      sum += value - last.value;
      moved += value - last.value;
      steps += step - last.step;
    } else {
      sum += value;
    }
    last = { value, step };
  }
  return { sum: last && sum, perStep: steps ? moved / steps : null };
}

// Traffic and time of one site. Compression: 2 bytes per parameter and step, one way, against what the site sent.
export function summary(points) {
  const up = total(points, "bytes_up");
  const down = total(points, "bytes_down");
  const wait = latest(points, "wait_s");
  const compute = latest(points, "compute_s");
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
