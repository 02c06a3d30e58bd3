// The planner of the start page, for a model of equal layers: a port of offload/planning. planner_plans.js counts a model
// and compares ways to train it; planner.js is the page.
//
// tests/pages/test_planner.py compares plans and numbers with Python's. Names of data are Python's, so that the JSON of a
// layer's profile is read as it is. A profile here is one layer and a count. Schedules are the default one, k of N.
"use strict";

globalThis.offloadPlanner = (() => {
  const FEW = 2000, POSITIONS = 64, COUNTS = 16, SWEPT = 1000, SWEEPS = 3, FARTHEST = 6, CLOSE = 0.02, ROUNDING = 1e-8; // search.py
  const FREE = 1e-3, GIB = 2 ** 30; // plan.py

  const range = (end) => Array.from({ length: end }, (_, index) => index);
  const sum = (values) => values.reduce((total, value) => total + value, 0); // of bytes, which are whole
  const last = (values) => values[values.length - 1];

  /** A sum of seconds, compensated: Python's math.fsum but for rare last bits. */
  function fsum(values) {
    let total = 0, rest = 0;
    for (const value of values) {
      const next = total + value;
      rest += Math.abs(total) >= Math.abs(value) ? total - next + value : value - next + total;
      total = next;
    }
    return total + rest;
  }

  /** f"{value:.2f}": a half is rounded to even. */
  function fixed(value, digits) {
    const text = value.toFixed(digits), exact = value.toFixed(60), end = exact.indexOf(".") + digits + (digits ? 1 : 0);
    return /^\.?50*$/.test(exact.slice(end)) && Number(last(text)) % 2 ? exact.slice(0, end) : text;
  }

  function formatBytes(nbytes) {
    for (const [power, unit] of [[4, "TiB"], [3, "GiB"], [2, "MiB"], [1, "KiB"]]) {
      const scaled = nbytes / 1024 ** power;
      if (scaled >= 1) return `${fixed(scaled, scaled < 100 ? 2 : 1)} ${unit}`;
    }
    return `${fixed(nbytes, 0)} B`;
  }

  function formatS(seconds) {
    for (const [unit, scale] of [["s", 1], ["ms", 1e-3], ["µs", 1e-6]]) {
      const scaled = seconds / scale;
      if (seconds >= scale) return `${fixed(scaled, scaled < 10 ? 2 : 1)} ${unit}`;
    }
    return seconds ? `${fixed(seconds * 1e6, 2)} µs` : "0 s";
  }

  // --- layer_costs.py: regions --------------------------------------------------------------------------------------

  const operationOf = (regions, number) => regions[number].another_of ?? number;
  const savedOf = (regions) => new Set(range(regions.length).filter((number) => regions[number].saved));

  function regionCosts(regions, keep) {
    const available = new Set(), kept = new Set(), inputs = [], dropped = new Set(), rerun = new Set();
    regions.forEach((region, number) => {
      const can = region.recomputable && region.reads.every((read) => available.has(read));
      const input = !region.recomputable && !region.reads.length;
      if (input) inputs.push(number);
      if (can || region.saved || input) available.add(number);
      if (region.saved) (can && !keep.has(number) ? dropped : kept).add(number);
    });
    if (dropped.size) inputs.forEach((number) => kept.add(number));
    for (const waiting = [...dropped]; waiting.length; ) {
      const number = waiting.pop();
      if (rerun.has(number) || kept.has(number)) continue;
      rerun.add(number);
      waiting.push(...regions[number].reads);
    }
    const operations = new Set([...rerun].map((number) => operationOf(regions, number)));
    const recompute_s = fsum([...operations].map((first) => regions[first].seconds));
    return { kept, dropped, rerun, recompute_s, kept_bytes: sum([...kept].map((number) => regions[number].nbytes)) };
  }

  const gain = (before, after) =>
    (before.recompute_s - after.recompute_s) / Math.max(1, after.kept_bytes - before.kept_bytes);

  /** Of the operations that make dropped results, the results of that which saves the most seconds per byte if kept. */
  function nextKept(regions, { dropped, rerun }) {
    // That saves the operations that run again for these results alone; -1 stands for several.
    const operation = (number) => operationOf(regions, number), operations = new Set([...rerun].map(operation));
    const readers = regions.map(() => []), results = new Map(), neededBy = new Map(), saved_s = new Map();
    regions.forEach(({ reads }, number) => reads.forEach((read) => readers[read].push(number)));
    for (const number of [...rerun].sort((a, b) => b - a)) {
      const first = operation(number), needing = readers[number].map(operation).filter((one) => operations.has(one));
      if (dropped.has(number)) results.set(first, [...(results.get(first) ?? []), number]);
      for (const one of dropped.has(number) ? [first] : needing.map((reader) => neededBy.get(reader) ?? -1)) {
        neededBy.set(first, (neededBy.get(first) ?? one) === one ? one : -1);
      }
    }
    for (const [first, one] of neededBy) saved_s.set(one, (saved_s.get(one) ?? 0) + regions[first].seconds);
    const gained = (first) => (saved_s.get(first) ?? 0) / Math.max(1, sum(results.get(first).map((one) => regions[one].nbytes)));
    const ranked = [...results.keys()].sort((a, b) => gained(b) - gained(a) || a - b); // of equally good ones the first
    return results.get(ranked[0]);
  }

  function waysOf(regions) {
    const everything = regionCosts(regions, savedOf(regions)), found = [regionCosts(regions, new Set())], ways = [];
    while (last(found).recompute_s > 0) {
      const { kept } = last(found);
      found.push(regionCosts(regions, new Set([...kept, ...nextKept(regions, last(found))])));
    }
    found.push(everything);
    found.sort((a, b) => a.kept_bytes - b.kept_bytes || a.recompute_s - b.recompute_s);
    for (const way of found) if (!ways.length || way.recompute_s < last(ways).recompute_s) ways.push(way);
    const { kept } = last(ways), all = kept.size === everything.kept.size && [...kept].every((one) => everything.kept.has(one));
    return all ? ways : [...ways, everything];
  }

  // --- layer_costs.py: layers ---------------------------------------------------------------------------------------

  const piece = (kind, seconds, taken = 0, freed = 0, awaits = null, offloads = false) =>
    ({ kind, seconds, taken, freed, awaits, offloads });
  const heldBytes = (pieces) => sum(pieces.map(({ taken, freed }) => taken - freed));
  function mostBytes(pieces, held = 0) {
    return pieces.reduce((most, { taken, freed }) => {
      most = Math.max(most, held + taken);
      held += taken - freed;
      return most;
    }, held);
  }

  function freedAfter(regions, numbers) {
    const reader = range(regions.length), freed = regions.map(() => 0);
    regions.forEach((region, number) => region.reads.forEach((read) => { reader[read] = number; }));
    for (const number of numbers) freed[reader[number]] += regions[number].nbytes;
    return freed;
  }

  /** Forward and backward of a layer in pieces. Without a policy, everything saved is kept, or offloaded. */
  function layerPieces({ regions, forward_s, backward_s }, policy, offloads) {
    const { kept, offloaded } = policy ?? { kept: savedOf(regions), offloaded: savedOf(regions) };
    const costs = regionCosts(regions, kept), total_s = fsum(regions.map((region) => region.seconds));
    const share = (number) => (total_s ? regions[number].seconds / total_s : 1 / regions.length);
    const moves = (number) => offloads && offloaded.has(number) && costs.kept.has(number) && regions[number].nbytes > 0;
    const moving = range(regions.length).filter(moves), places = new Map(moving.map((number, place) => [number, place]));
    const freed = freedAfter(regions, costs.dropped);
    const forward = regions.map(({ nbytes }, number) => {
      const held = costs.kept.has(number) || costs.dropped.has(number);
      return piece("forward", share(number) * forward_s, held ? nbytes : 0, freed[number], null, places.has(number));
    });
    const backward = regions.map(({ nbytes, saved }, number) =>
      piece("backward", share(number) * backward_s, 0, saved ? nbytes : 0, saved ? places.get(number) ?? null : null));
    if (costs.dropped.size) backward.push(secondRun(regions, costs, places));
    return { forward, backward: backward.reverse(), offloaded: moving.map((number) => regions[number].nbytes) };
  }

  function secondRun(regions, { kept, dropped, rerun, recompute_s }, places) {
    const end = Math.max(...rerun), operations = new Set([...rerun].map((number) => operationOf(regions, number)));
    const made = range(end + 1).filter((number) => !kept.has(number) || operations.has(operationOf(regions, number)));
    const freed = freedAfter(regions.slice(0, end + 1), made.filter((number) => !dropped.has(number)));
    const run = freed.map((bytes, number) => piece("", 0, made.includes(number) ? regions[number].nbytes : 0, bytes));
    const inputs = sum([...kept].filter((number) => !regions[number].saved).map((number) => regions[number].nbytes));
    const awaited = [...places].filter(([number]) => number < end).map(([, place]) => place), most = mostBytes(run);
    return piece("recompute", recompute_s, most, most - heldBytes(run) + inputs, awaited.length ? Math.min(...awaited) : null);
  }

  function layerCosts(layer, policy, link, offloads) {
    const { forward, backward, offloaded } = layerPieces(layer, policy, offloads), sent = [], reloaded_s = [];
    const secondsOf = (pieces) => fsum(pieces.map((one) => one.seconds)), held_bytes = heldBytes(forward);
    let ready_s = 0, offload_s = 0, reload_s = 0, rest_s = 0, offloaded_after_s = -Infinity, backward_after_s = -Infinity;
    for (const one of forward) {
      ready_s += one.seconds;
      if (one.offloads) sent.unshift([ready_s, one.taken]);
    }
    for (const [ready, nbytes] of sent) {
      offload_s += nbytes / link.d2h_bytes_per_s;
      offloaded_after_s = Math.max(offloaded_after_s, ready + offload_s);
    }
    for (let at = offloaded.length - 1; at >= 0; at--) reloaded_s[at] = reload_s += offloaded[at] / link.h2d_bytes_per_s;
    for (const { seconds, awaits } of [...backward].reverse()) {
      rest_s += seconds;
      if (awaits !== null) backward_after_s = Math.max(backward_after_s, reloaded_s[awaits] + rest_s);
    }
    return {
      forward_s: secondsOf(forward), backward_s: secondsOf(backward), offload_s, offloaded_after_s, reload_s, backward_after_s,
      recompute_s: secondsOf(backward.filter(({ kind }) => kind === "recompute")), held_bytes, offloaded_bytes: sum(offloaded),
      forward_peak_bytes: layer.workspace_bytes + mostBytes(forward),
      backward_peak_bytes: layer.workspace_bytes + mostBytes(backward, held_bytes),
    };
  }

  // --- layer_costs.py: steps ----------------------------------------------------------------------------------------

  /** The most on the device while each layer runs forward, while the loss runs, and while each layer runs backward. */
  function peaksOf(layers, k, loss_bytes) {
    const resident = layers.length - k, forward = [], backward = [];
    let held = 0;
    layers.forEach(({ forward_peak_bytes, held_bytes }, number) => {
      if (number >= resident) held -= layers[number - resident].offloaded_bytes;
      forward.push(held + forward_peak_bytes);
      held += held_bytes;
    });
    const loss = held + loss_bytes;
    for (let number = layers.length - 1; number >= 0; number--) {
      const reloaded = number - resident + 1;
      if (reloaded >= 0 && reloaded < k) held += layers[reloaded].offloaded_bytes;
      held -= layers[number].held_bytes;
      backward[number] = held + layers[number].backward_peak_bytes;
    }
    return { forward, loss, backward, most: Math.max(...forward, loss, ...backward) };
  }

  /** When each layer's forward begins, the layer is on the host, its reload begins, and its backward begins and ends. */
  function timesOf(layers, k, loss_s) {
    const resident = layers.length - k, forward = [], offloaded = [], reload = [], backward = [], ended = [];
    let now = 0, copied = 0;
    layers.forEach(({ forward_s, offload_s, offloaded_after_s }, number) => {
      if (number >= resident) now = Math.max(now, offloaded[number - resident]);
      forward.push(now);
      offloaded.push((copied = Math.max(copied + offload_s, now + offloaded_after_s)));
      now += forward_s;
    });
    const loss = now;
    now += loss_s;
    for (let number = layers.length - 1; number >= 0; number--) {
      const reloaded = number - resident + 1, { backward_s, backward_after_s } = layers[number];
      if (reloaded >= 0 && reloaded < k) {
        reload[reloaded] = Math.max(copied, now);
        copied = reload[reloaded] + layers[reloaded].reload_s;
      }
      backward[number] = now;
      now = Math.max(now + backward_s, number < k ? reload[number] + backward_after_s : 0);
      ended[number] = now;
    }
    return { forward, offloaded, loss, reload, backward, ended, end: now };
  }

  // --- search.py ----------------------------------------------------------------------------------------------------

  function compare(one, other) {
    const [a, b] = [one, other].map(({ score, k, ways }) => [...score, k, ...ways]);
    const at = a.findIndex((value, index) => value !== b[index]);
    return at < 0 ? 0 : a[at] - b[at];
  }
  const least = (found) => found.reduce((best, one) => (one && (!best || compare(one, best) < 0) ? one : best), null);
  function bisectLeft(low, high, isTrue) { // of the numbers from low up to high, the first for which it is true
    while (low < high) {
      const middle = Math.floor((low + high) / 2);
      if (isTrue(middle)) high = middle;
      else low = middle + 1;
    }
    return low;
  }
  function evenly(count) { // evenly.py
    const bits = count > 1 ? Math.ceil(Math.log2(count)) : 0, text = (number) => number.toString(2).padStart(bits, "0");
    const reverse = range(2 ** bits).map((number) => parseInt([...text(number)].reverse().join(""), 2));
    return reverse.filter((number) => number < count);
  }
  const withWay = ({ k, ways }, number, way) => ({ k, ways: ways.map((one, at) => (at === number ? way : one)) });

  class Search {
    constructor(profile, link) {
      const { layer, count } = profile, mean = ({ seconds }) => (seconds * count) / count; // rounded as Python's mean
      const found = waysOf(layer.regions.map((one) => ({ ...one, seconds: mean(one) })));
      const ways = [...found.slice(0, -1).map(({ kept }) => ({ kept, offloaded: kept })), null];
      const table = [false, true].map((offloads) => ways.map((way) => layerCosts(layer, way, link, offloads)));
      Object.assign(this, { profile, link, count, ways, table, levels: [0], mostBytes: 0, mostHostBytes: Infinity });
      const saved = savedOf(layer.regions), shared = ({ recomputable, reads, nbytes }) => !recomputable && !reads.length && !nbytes;
      this.allButShared = !profile.whole && layer.regions.some(shared) ? { kept: saved, offloaded: saved } : null;
      for (let way = 0; way < found.length - 1; this.levels.push(way)) { // along the convex hull
        const above = range(found.length - way - 1).map((more) => way + more + 1), from = found[way];
        way = above.reduce((best, one) => (gain(from, found[one]) >= gain(from, found[best]) ? one : best));
      }
      this.highest = (this.levels.length - 1) * count;
    }

    within(mostBytes, mostHostBytes = Infinity) {
      return Object.assign(this, { mostBytes, mostHostBytes, leastFits: null });
    }

    costs({ k, ways }) {
      return ways.map((way, number) => this.table[number < k ? 1 : 0][way]);
    }

    policies({ k, ways }) {
      const resident = (policy) => policy && { kept: policy.kept, offloaded: new Set() };
      return ways.map((way, number) => (number < k ? this.ways[way] ?? this.allButShared : resident(this.ways[way])));
    }

    whole(k) {
      return { k, ways: range(this.count).map(() => last(this.levels)) };
    }

    peakBytes(choice) {
      return peaksOf(this.costs(choice), choice.k, this.profile.loss_bytes).most;
    }

    hostBytes(choice) {
      return sum(this.costs(choice).map((layer) => layer.offloaded_bytes));
    }

    scored(choice) {
      const { loss_s, other_s } = this.profile, peak = this.peakBytes(choice), host = this.hostBytes(choice);
      if (peak > this.mostBytes || host > this.mostHostBytes) return null;
      const step_s = timesOf(this.costs(choice), choice.k, loss_s).end + other_s;
      const recompute_s = fsum(this.costs(choice).map((one) => one.recompute_s));
      return { ...choice, score: [step_s, recompute_s].map((one) => Number(one.toExponential(8))).concat(host, peak) };
    }

    best() {
      const { count, profile } = this, { forward_s, backward_s } = profile.layer;
      if (profile.whole) return range(count).map((k) => this.scored(this.whole(k))).find(Boolean) ?? null; // fewest()
      const nothing = this.scored(this.whole(0));
      if (nothing) return nothing;
      if (this.isSmall()) return least(this.every().map((one) => this.scored(one)));
      let fastest = this.onGrid();
      if (!fastest.length) fastest = [this.scored(this.leastPeak())].filter(Boolean);
      const compute_s = fsum(range(count).map(() => forward_s + backward_s)) + profile.loss_s + profile.other_s;
      if (!fastest.length || fastest[0].score[0] <= compute_s * (1 + ROUNDING)) return fastest[0] ?? null;
      const most = Math.max(2, Math.floor(SWEPT / (count * this.ways.length)));
      return least(fastest.slice(0, most).map((one) => this.swept(one)));
    }

    isSmall() {
      return this.count * this.ways.length ** this.count <= FEW;
    }

    every() {
      const every = range(this.count).reduce((made) => made.flatMap((some) => this.ways.map((_, way) => [...some, way])), [[]]);
      return range(this.count).flatMap((k) => every.map((ways) => ({ k, ways })));
    }

    leastPeak() {
      const scored = (one) => (this.hostBytes(one) > this.mostHostBytes ? null : { ...one, score: [this.peakBytes(one)] });
      if (this.isSmall()) return least(this.every().map(scored));
      const ends = [this.levels[0], last(this.levels)], numbers = range(this.count);
      const corner = (k, first, rest) => ({ k, ways: numbers.map((number) => (number < k ? first : rest)) });
      const corners = (k, levels) => levels.flatMap((first) => levels.map((rest) => scored(corner(k, first, rest))));
      const found = least(corners(least(numbers.flatMap((k) => corners(k, ends))).k, this.levels));
      const better = (found, number) => least([found, ...this.ways.map((_, way) => scored(withWay(found, number, way)))]);
      return numbers.reduce(better, found);
    }

    at(k, offloaded, kept) {
      const { count, levels } = this, level = (position, above) => levels[Math.min(Math.floor(position / count) + above, levels.length - 1)];
      const above = (number) => (number < k ? number < offloaded % count : number >= count - (kept % count));
      return { k, ways: range(count).map((number) => level(number < k ? offloaded : kept, above(number) ? 1 : 0)) };
    }

    /** The seconds of compute before each layer and of all if these layers are offloaded, or not: summed up in order. */
    computed(ways, offloads) {
      const found = [0];
      for (const way of ways) {
        const { forward_s, backward_s } = this.table[offloads ? 1 : 0][way];
        found.push(last(found) + (forward_s + backward_s));
      }
      return found;
    }

    onGrid() {
      const { count, highest } = this, stride = 1 + Math.floor((count - 1) / COUNTS), found = new Map();
      const step = Math.max(1, Math.floor((highest + 1) / POSITIONS)), positions = evenly(Math.floor(highest / step) + 1);
      const best = () => least([...found.values()]);
      const look = (k) => {
        const seen = new Set();
        for (const position of positions) {
          const { ways } = this.at(count, position * step, 0), key = ways.slice(0, k).join();
          if (seen.has(key)) continue;
          seen.add(key);
          const known = found.get(k), close_s = (1 + CLOSE) * (best()?.score[0] ?? Infinity);
          const one = this.mostKept(k, ways, Math.min(close_s, known?.score[0] ?? Infinity) * (1 + ROUNDING));
          if (one) found.set(k, least([known, one]));
        }
      };
      for (let k = 0; k < count; k += stride) look(k);
      const middle = best()?.k;
      for (let k = middle - stride + 1; k < middle + stride; k++) if (k > 0 && k < count && k % stride) look(k);
      return [...found.values()].sort(compare);
    }

    mostKept(k, offloaded, most_s) {
      const { highest, profile } = this, left_s = most_s - (profile.loss_s + profile.other_s) - this.computed(offloaded, true)[k];
      const at = (kept) => ({ k, ways: [...offloaded.slice(0, k), ...this.at(0, 0, kept).ways.slice(k)] });
      const fits = (kept) => this.peakBytes(at(kept)) <= this.mostBytes;
      const isFast = (kept) => {
        const compute_s = this.computed(this.at(0, 0, kept).ways, false);
        return last(compute_s) - compute_s[k] <= left_s;
      };
      if (this.hostBytes({ k, ways: at(highest).ways }) > this.mostHostBytes || !isFast(highest)) return null;
      if (fits(highest)) return this.scored(at(highest));
      if (!fits(0) && !(this.leastFits ??= this.leastPeak().score[0] <= this.mostBytes)) return null;
      const first = bisectLeft(0, highest, isFast), position = bisectLeft(first, highest, (kept) => !fits(kept)) - 1;
      return position < first ? null : this.scored(at(position));
    }

    swept(found) {
      const { count, profile } = this, numbers = range(count).reverse();
      for (let tried = 0, unchanged = 0; tried < SWEEPS * count && unchanged < count; tried++) {
        const number = numbers[tried % count], seen = found, costs = this.costs(seen);
        const compute_s = costs.reduce((sum_s, one) => sum_s + (one.forward_s + one.backward_s), 0);
        const rest_s = compute_s - costs[number].backward_s + (profile.loss_s + profile.other_s);
        for (const way of range(this.ways.length)) {
          const apart = Math.abs(way - seen.ways[number]), { backward_s } = this.table[number < seen.k ? 1 : 0][way];
          if (rest_s + backward_s > found.score[0] * (1 + ROUNDING) || apart < 1 || apart > FARTHEST) continue;
          found = least([found, this.scored(withWay(seen, number, way))]);
        }
        unchanged = found === seen ? unchanged + 1 : 0;
      }
      return found;
    }
  }

  // --- plan.py ------------------------------------------------------------------------------------------------------

  const asWhole = ({ layer, ...profile }) => {
    const tensor = (nbytes) => ({ nbytes, seconds: 0, reads: [], saved: true, recomputable: false, another_of: null });
    return { ...profile, whole: true, layer: { ...layer, regions: layer.tensors.map(tensor) } };
  };

  function predicted({ loss_s, other_s, loss_bytes }, layers, num_layers, policies) {
    const times = timesOf(layers, num_layers, loss_s), peaks = peaksOf(layers, num_layers, loss_bytes);
    const compute_s = fsum(layers.flatMap((one) => [one.forward_s, one.backward_s])) + loss_s;
    return {
      num_layers, policies, layers, times, peaks, loss_s, other_s, step_s: times.end + other_s, peak_bytes: peaks.most,
      stall_s: times.end - compute_s > ROUNDING * times.end ? times.end - compute_s : 0,
      recompute_s: fsum(layers.map((one) => one.recompute_s)), host_bytes: sum(layers.map((one) => one.offloaded_bytes)),
    };
  }
  const chosen = (search, one) => predicted(search.profile, search.costs(one), one.k, search.policies(one));

  /** The plan for a budget; or, if nothing meets the budget, the least one: least_bytes. */
  function plan(search, budget, host = Infinity) {
    const choice = search.within(budget, host).best();
    return choice ? chosen(search, choice) : { least_bytes: search.leastPeak().score[0] };
  }

  /** Each number of whole layers that are offloaded. */
  function wholeLayers(profile, link) {
    const search = new Search(asWhole(profile), link);
    return range(search.count).map((k) => chosen(search, search.whole(k)));
  }

  /** Of these, the most layers that leave the step as long as it is. */
  const freePlan = (whole) => last(whole.filter((one) => one.step_s <= whole[0].step_s * (1 + FREE)));

  /** Every layer recomputed from its input, which is kept, or offloaded from all layers but two. */
  function checkpointing(profile, link, offloads) {
    const { layer, count } = profile, { kept } = regionCosts(layer.regions, new Set()), policy = { kept, offloaded: kept };
    const k = offloads ? Math.max(0, count - 2) : 0, costs = (number) => layerCosts(layer, policy, link, number < k);
    return predicted(profile, range(count).map(costs), k, range(count).map(() => policy));
  }

  return {
    GIB, Search, asWhole, checkpointing, fixed, formatBytes, formatS, freePlan, fsum, plan, range, sum, wholeLayers,
  };
})();
