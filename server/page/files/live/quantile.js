// Quantiles of what a histogram has counted between two looks at it: also run by tests.

// The value below which a share of what was counted between two looks lies; null if there was nothing.
export function quantile(before, now, share) {
  if (!now) return null;
  const counts = now.counts.map((count, i) => count - (before ? before.counts[i] : 0));
  const total = counts.reduce((a, b) => a + b, 0);
  if (total <= 0) return null;
  let below = 0;
  for (let i = 0; i < counts.length; i++) {
    if (below + counts[i] >= share * total) {
      const low = i ? now.bounds[i - 1] : 0, high = i < now.bounds.length ? now.bounds[i] : low;
      return low + (high - low) * Math.max(0, (share * total - below) / counts[i]);
    }
    below += counts[i];
  }
  return now.bounds.at(-1);
}
