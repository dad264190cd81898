// Parses Prometheus' text format and computes quantiles from two readings.

const SAMPLE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)/;

/// Parses a text exposition to {name: [{labels, value}]}.
export function parse(text) {
  const families = {};
  for (const line of text.split("\n")) {
    if (line.startsWith("#")) continue;
    const match = SAMPLE.exec(line);
    if (!match) continue;
    const labels = {};
    for (const [, name, value] of (match[2] ?? "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)) labels[name] = value;
    (families[match[1]] ??= []).push({ labels, value: Number(match[3]) });
  }
  return families;
}

/// Returns the sum over all label sets, or null if the metric is missing.
export function total(families, name) {
  return families[name] ? families[name].reduce((sum, sample) => sum + sample.value, 0) : null;
}

/// Returns the upper bounds and cumulative counts of a histogram, summed over all label sets.
function buckets(families, name) {
  const counts = new Map();
  for (const { labels, value } of families[`${name}_bucket`] ?? []) {
    const bound = labels.le === "+Inf" ? Infinity : Number(labels.le);
    counts.set(bound, (counts.get(bound) ?? 0) + value);
  }
  return [...counts].sort((a, b) => a[0] - b[0]);
}

/// Returns the quantiles `qs` of the values that a histogram counted from `before` to `now`, or null if it counted none.
/// Interpolates within a bucket as Prometheus does.
export function quantiles(before, now, name, qs) {
  const old = new Map(buckets(before, name));
  const grown = buckets(now, name).map(([bound, count]) => [bound, count - (old.get(bound) ?? 0)]);
  const all = grown.length ? grown.at(-1)[1] : 0;
  if (!(all > 0)) return null;
  return qs.map((q) => {
    const rank = q * all;
    let lower = 0;
    let below = 0;
    for (const [bound, count] of grown) {
      if (count >= rank) return bound === Infinity ? lower : lower + (bound - lower) * (rank - below) / Math.max(1, count - below);
      lower = bound;
      below = count;
    }
    return lower;
  });
}
