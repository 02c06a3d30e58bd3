// The planner of the start page: the cost of layers, the closed form and the search of offload/planning, for a browser.
// planner_plans.js makes plans of them, and planner.js is the page.
//
// A port, function by function: tests/pages/test_planner.py compares plans and numbers with Python's. Names of data are
// Python's, so that a profile's JSON is read as it is. Schedules are the default one, k of N, which is what plans use.
"use strict";

globalThis.offloadPlanner = (() => {
  const FEW = 2000, STEPS = 4, COUNTS = 16, SWEPT = 96, SWEEPS = 3, ROUNDING = 1e-8; // search.py
  const UNLISTED_PIECES = 8; // profile.py

  const range = (end) => Array.from({ length: end }, (_, index) => index);
  const sum = (values) => values.reduce((total, value) => total + value, 0); // of bytes, which are whole
  const last = (values) => values[values.length - 1];
  const ascending = (a, b) => a - b;

  /** math.fsum: the sum, rounded once. */
  function fsum(values) {
    const parts = []; // they do not overlap, the smallest first
    for (let x of values) {
      let kept = 0;
      for (let y of parts) {
        if (Math.abs(x) < Math.abs(y)) [x, y] = [y, x];
        const high = x + y, low = y - (high - x);
        if (low) parts[kept++] = low;
        x = high;
      }
      parts.length = kept;
      parts.push(x);
    }
    let high = parts.pop() ?? 0, low = 0;
    while (parts.length && !low) {
      const x = high, y = parts.pop();
      high = x + y;
      low = y - (high - x);
    }
    if (parts.length && low < 0 === last(parts) < 0) { // what is left decides how a half is rounded
      const twice = low * 2, other = high + twice;
      if (twice === other - high) high = other;
    }
    return high;
  }

  /** f"{value:.2f}": a half is rounded to even. */
  function fixed(value, digits) {
    const text = value.toFixed(digits), exact = value.toFixed(60), end = exact.indexOf(".") + digits + (digits ? 1 : 0);
    return /^\.?50*$/.test(exact.slice(end)) && Number(last(text)) % 2 ? exact.slice(0, end) : text;
  }
  const nineDigits = (value) => Number(value.toExponential(8));

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

  // --- region_costs.py and kinds.py ---------------------------------------------------------------------------------

  const operationOf = (regions, number) => regions[number].another_of ?? number;
  const savedOf = (regions) => new Set(range(regions.length).filter((number) => regions[number].saved));

  function regionCosts(regions, keep) {
    const there = new Set(), kept = new Set(), inputs = [], dropped = new Set(), rerun = new Set();
    regions.forEach((region, number) => {
      const can = region.recomputable && region.reads.every((read) => there.has(read));
      const input = !region.recomputable && !region.reads.length;
      if (input) inputs.push(number);
      if (can || region.saved || input) there.add(number);
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
    return {
      kept, dropped, rerun: [...rerun].sort(ascending), kept_bytes: sum([...kept].map((number) => regions[number].nbytes)),
      recompute_s: fsum([...operations].map((first) => regions[first].seconds)),
    };
  }

  function waysOf(regions) {
    const found = [regionCosts(regions, new Set())];
    while (last(found).recompute_s > 0) {
      const before = last(found), results = new Map();
      for (const number of [...before.dropped].sort(ascending)) {
        const first = operationOf(regions, number);
        results.set(first, [...(results.get(first) ?? []), number]);
      }
      let best = null, most = -Infinity;
      for (const made of results.values()) {
        const after = regionCosts(regions, new Set([...before.kept, ...made]));
        const gain = (before.recompute_s - after.recompute_s) / Math.max(1, after.kept_bytes - before.kept_bytes);
        if (gain > most) [best, most] = [after, gain];
      }
      found.push(best);
    }
    const saved = savedOf(regions), ways = [];
    found.push(regionCosts(regions, saved));
    found.sort((a, b) => a.kept_bytes - b.kept_bytes || a.recompute_s - b.recompute_s);
    for (const way of found) if (!ways.length || way.recompute_s < last(ways).recompute_s) ways.push(way);
    const { kept } = last(ways), all = kept.size === saved.size && [...kept].every((number) => saved.has(number));
    return all ? ways : [...ways, regionCosts(regions, saved)];
  }

  function kindsOf(profile) {
    const members = new Map(), names = new Map();
    profile.layers.forEach(({ regions }, number) => {
      if (!names.has(regions)) names.set(regions, JSON.stringify(regions.map((one) => ({ ...one, seconds: 0 }))));
      const name = names.get(regions);
      members.set(name, [...(members.get(name) ?? []), number]);
    });
    const ofLayers = [], ways = [], steps = [];
    [...members.values()].forEach((numbers, kind) => {
      for (const number of numbers) ofLayers[number] = kind;
      const layers = numbers.map((number) => profile.layers[number]);
      const mean = (at) => fsum(layers.map((layer) => layer.regions[at].seconds)) / layers.length;
      const regions = layers[0].regions.map((one, at) => ({ ...one, seconds: mean(at) }));
      const found = regions.length ? waysOf(regions) : [];
      ways.push([...found.slice(0, -1).map(({ kept }) => ({ kept, offloaded: kept })), null]);
      for (let way = 0; way < found.length - 1; ) {
        const from = found[way];
        let most = -Infinity;
        for (let number = way + 1; number < found.length; number++) {
          const { recompute_s, kept_bytes } = found[number];
          const gain = (from.recompute_s - recompute_s) / Math.max(1, kept_bytes - from.kept_bytes);
          if (gain >= most) [most, way] = [gain, number];
        }
        steps.push({ gain: most, kind, way });
      }
    });
    const level = ways.map(() => 0), levels = [[...level]];
    for (const { kind, way } of steps.sort((a, b) => b.gain - a.gain)) {
      level[kind] = way;
      levels.push([...level]);
    }
    return { ways: ofLayers.map((kind) => ways[kind]), levels: levels.map((of) => ofLayers.map((kind) => of[kind])) };
  }

  // --- layer_passes.py and closed_form.py ---------------------------------------------------------------------------

  const piece = (seconds, taken = 0, freed = 0, awaits = null, offloads = false) => ({ seconds, taken, freed, awaits, offloads });

  function layerPasses(layer, policy, offloads) {
    const { regions, forward_s, backward_s, workspace_bytes } = layer;
    if (!regions.length) {
      const edge = (index) => Math.floor((layer.saved_bytes * index) / UNLISTED_PIECES), { tensors } = layer;
      const unlisted = !tensors.length && layer.saved_bytes ? range(UNLISTED_PIECES) : [];
      const found = unlisted.length ? unlisted.map((index) => edge(index + 1) - edge(index)) : tensors;
      const parts = found.length ? found : [0], n = parts.length, moves = offloads && found.length > 0;
      const forward = parts.map((nbytes) => piece(forward_s / n, nbytes, 0, null, moves));
      const backward = parts.map((nbytes, at) => piece(backward_s / n, 0, nbytes, moves ? at : null)).reverse();
      return { forward, recompute: null, backward, offloaded: moves ? found : [], workspace_bytes };
    }
    const saved = savedOf(regions), { kept, offloaded } = policy ?? { kept: saved, offloaded: saved };
    const costs = regionCosts(regions, kept), total_s = fsum(regions.map((region) => region.seconds));
    const share = (number) => (total_s ? regions[number].seconds / total_s : 1 / regions.length);
    const moves = (number) => offloads && offloaded.has(number) && costs.kept.has(number) && regions[number].nbytes > 0;
    const moving = range(regions.length).filter(moves), places = new Map(moving.map((number, place) => [number, place]));
    const here = (number) => costs.kept.has(number) || costs.dropped.has(number);
    const reader = range(regions.length), freed = regions.map(() => 0);
    regions.forEach((region, number) => region.reads.forEach((read) => { reader[read] = number; }));
    for (const number of costs.dropped) freed[reader[number]] += regions[number].nbytes;
    const forward = regions.map(({ nbytes }, number) =>
      piece(share(number) * forward_s, here(number) ? nbytes : 0, freed[number], null, places.has(number)));
    const backward = regions.map((region, number) => {
      const awaits = region.saved ? places.get(number) ?? null : null;
      return piece(share(number) * backward_s, 0, here(number) && region.saved ? region.nbytes : 0, awaits);
    });
    const recompute = costs.dropped.size ? recomputePiece(regions, costs, places) : null;
    const sizes = moving.map((number) => regions[number].nbytes);
    return { forward, recompute, backward: backward.reverse(), offloaded: sizes, workspace_bytes };
  }

  function recomputePiece(regions, { kept, dropped, rerun, recompute_s }, places) {
    const end = last(rerun), reader = range(regions.length), freed = regions.map(() => 0);
    const operations = new Set(rerun.map((number) => operationOf(regions, number)));
    const made = (number) => !kept.has(number) || operations.has(operationOf(regions, number));
    regions.slice(0, end + 1).forEach((region, number) => region.reads.forEach((read) => { reader[read] = number; }));
    range(end + 1).forEach((number) => { if (made(number) && !dropped.has(number)) freed[reader[number]] += regions[number].nbytes; });
    let held = 0, most = 0;
    for (const number of range(end + 1)) {
      if (made(number)) held += regions[number].nbytes;
      most = Math.max(most, held);
      held -= freed[number];
    }
    const inputs = sum([...kept].filter((number) => !regions[number].saved).map((number) => regions[number].nbytes));
    const awaited = [...places].filter(([number]) => number < end).map(([, place]) => place);
    return piece(recompute_s, most, most - held + inputs, awaited.length ? Math.min(...awaited) : null);
  }

  function layerCosts({ forward, recompute, backward, offloaded, workspace_bytes }, link) {
    const pieces = recompute ? [recompute, ...backward] : backward, sent = [], reloaded_s = [];
    const peak = (of, held) => workspace_bytes + of.reduce((most, { taken, freed }) => {
      most = Math.max(most, held + taken);
      held += taken - freed;
      return most;
    }, held);
    let ready_s = null, offload_s = 0, reload_s = 0, rest_s = 0, offloaded_after_s = -Infinity, backward_after_s = -Infinity;
    for (const { seconds, offloads, taken } of forward) {
      ready_s = ready_s === null ? seconds : ready_s + seconds;
      if (offloads) sent.unshift([ready_s, taken]);
    }
    for (const [ready, nbytes] of sent) {
      offload_s += nbytes / link.d2h_bytes_per_s;
      offloaded_after_s = Math.max(offloaded_after_s, ready + offload_s);
    }
    for (let at = offloaded.length - 1; at >= 0; at--) reloaded_s[at] = reload_s += offloaded[at] / link.h2d_bytes_per_s;
    for (const { seconds, awaits } of [...pieces].reverse()) {
      rest_s += seconds;
      if (awaits !== null) backward_after_s = Math.max(backward_after_s, reloaded_s[awaits] + rest_s);
    }
    const held_bytes = sum(forward.map(({ taken, freed }) => taken - freed)), secondsOf = (of) => fsum(of.map((one) => one.seconds));
    return {
      forward_s: secondsOf(forward), backward_s: secondsOf(pieces), recompute_s: recompute ? recompute.seconds : 0,
      offload_s, offloaded_after_s, reload_s, backward_after_s, held_bytes, offloaded_bytes: sum(offloaded),
      forward_peak_bytes: peak(forward, 0), backward_peak_bytes: peak(pieces, held_bytes),
    };
  }

  function peakBytes(layers, numLayers, loss_bytes) {
    const count = layers.length, resident = count - numLayers;
    let held = 0, most = -Infinity;
    for (let number = 0; number < count; number++) {
      if (number >= resident) held -= layers[number - resident].offloaded_bytes;
      most = Math.max(most, held + layers[number].forward_peak_bytes);
      held += layers[number].held_bytes;
    }
    most = Math.max(most, held + loss_bytes);
    for (let number = count - 1; number >= 0; number--) {
      const reloaded = number - resident + 1;
      if (reloaded >= 0 && reloaded < numLayers) held += layers[reloaded].offloaded_bytes;
      held -= layers[number].held_bytes;
      most = Math.max(most, held + layers[number].backward_peak_bytes);
    }
    return most;
  }

  function stepS(layers, numLayers, loss_s) {
    const count = layers.length, resident = count - numLayers, offloaded_s = [], reloads_s = [];
    let now = 0, copied = 0;
    layers.forEach(({ forward_s, offload_s, offloaded_after_s }, number) => {
      if (number >= resident) now = Math.max(now, offloaded_s[number - resident]);
      offloaded_s.push((copied = Math.max(copied + offload_s, now + offloaded_after_s)));
      now += forward_s;
    });
    now += loss_s;
    for (let number = count - 1; number >= 0; number--) {
      const reloaded = number - resident + 1;
      if (reloaded >= 0 && reloaded < numLayers) {
        reloads_s[reloaded] = Math.max(copied, now);
        copied = reloads_s[reloaded] + layers[reloaded].reload_s;
      }
      now += layers[number].backward_s;
      if (number < numLayers) now = Math.max(now, reloads_s[number] + layers[number].backward_after_s);
    }
    return now;
  }

  // --- search.py ----------------------------------------------------------------------------------------------------

  const compare = (one, other) => {
    const [a, b] = [one, other].map(({ score, numLayers, ways }) => [...score, numLayers, ...ways]);
    const at = a.findIndex((value, index) => value !== b[index]);
    return at < 0 ? 0 : a[at] - b[at];
  };
  const least = (found) => found.reduce((best, one) => (!best || compare(one, best) < 0 ? one : best), null);
  const withWay = ({ numLayers, ways }, number, way) => ({ numLayers, ways: ways.map((one, at) => (at === number ? way : one)) });

  class Search {
    constructor(profile, link, kinds = kindsOf(profile)) {
      Object.assign(this, { profile, link, ...kinds, count: profile.layers.length, mostBytes: 0, mostHostBytes: Infinity });
      this.highest = (this.levels.length - 1) * this.count;
      const known = new Map();
      this.table = profile.layers.map((layer, number) => {
        const costs = (offloads) => this.ways[number].map((way) => layerCosts(layerPasses(layer, way, offloads), link));
        if (!known.has(layer)) known.set(layer, [costs(false), costs(true)]);
        return known.get(layer);
      });
      const { compute_s } = this.seconds(this.costs(this.whole(0)));
      this.kept_s = compute_s + profile.loss_s + profile.other_s;
    }

    within(mostBytes, mostHostBytes = Infinity) {
      return Object.assign(this, { mostBytes, mostHostBytes });
    }

    costs({ numLayers, ways }) {
      return ways.map((way, number) => this.table[number][number < numLayers ? 1 : 0][way]);
    }

    seconds(costs) {
      return {
        compute_s: fsum(costs.map((one) => one.forward_s + one.backward_s)),
        copies_s: fsum(costs.map((one) => one.offload_s + one.reload_s)),
      };
    }

    policies({ numLayers, ways }) {
      const policies = ways.map((way, number) => this.ways[number][way]);
      return policies.map((one, number) => (one && number >= numLayers ? { kept: one.kept, offloaded: new Set() } : one));
    }

    whole(numLayers) {
      return { numLayers, ways: last(this.levels) };
    }

    peakBytes(choice) {
      return peakBytes(this.costs(choice), choice.numLayers, this.profile.loss_bytes);
    }

    hostBytes(choice) {
      return sum(this.costs(choice).map((layer) => layer.offloaded_bytes));
    }

    stepS(choice) {
      return nineDigits(stepS(this.costs(choice), choice.numLayers, this.profile.loss_s) + this.profile.other_s);
    }

    scored(choice) {
      const peak = this.peakBytes(choice), host = this.hostBytes(choice);
      if (peak > this.mostBytes || host > this.mostHostBytes) return null;
      return { ...choice, score: [this.stepS(choice), host, peak] };
    }

    best() {
      const { count } = this, nothing = this.scored(this.whole(0));
      if (nothing) return nothing;
      if (this.isSmall()) return least(this.every().map((one) => this.scored(one)).filter(Boolean));
      let fastest = this.onGrid();
      if (!fastest.length) fastest = [this.scored(this.leastPeak()[1])].filter(Boolean);
      if (!fastest.length || fastest[0].score[0] <= this.kept_s * (1 + ROUNDING)) return fastest[0] ?? null;
      return least(fastest.slice(0, Math.max(1, Math.floor(SWEPT / count))).map((one) => this.swept(one)));
    }

    fewest() {
      return range(this.count).map((k) => this.scored(this.whole(k))).find(Boolean) ?? null;
    }

    isSmall() {
      return this.ways.reduce((product, of) => product * of.length, this.count) <= FEW;
    }

    every() {
      const every = this.ways.reduce((made, of) => made.flatMap((some) => of.map((_, way) => [...some, way])), [[]]);
      return range(this.count).flatMap((numLayers) => every.map((ways) => ({ numLayers, ways })));
    }

    leastPeak() {
      let found = null;
      const better = (choice) => {
        if (this.hostBytes(choice) > this.mostHostBytes) return;
        const one = { ...choice, score: [this.peakBytes(choice)] };
        if (!found || compare(one, found) < 0) found = one;
      };
      if (this.isSmall()) {
        this.every().forEach(better);
        return [found.score[0], found];
      }
      const ends = [this.levels[0], last(this.levels)];
      for (const k of range(this.count)) {
        for (const first of ends) for (const rest of ends) better({ numLayers: k, ways: [...first.slice(0, k), ...rest.slice(k)] });
      }
      this.ways.forEach((ways, number) => ways.forEach((_, way) => better(withWay(found, number, way))));
      return [found.score[0], found];
    }

    at(numLayers, offloaded, kept) {
      const { count, levels } = this, level = (at) => levels[Math.min(at, levels.length - 1)];
      const [low, high] = [Math.floor(offloaded / count), Math.floor(kept / count)];
      const edges = [Math.min(offloaded % count, numLayers), Math.max(count - (kept % count), numLayers)];
      const first = [...level(low + 1).slice(0, edges[0]), ...level(low).slice(edges[0], numLayers)];
      return { numLayers, ways: [...first, ...level(high).slice(numLayers, edges[1]), ...level(high + 1).slice(edges[1])] };
    }

    onGrid() {
      const { count, highest } = this, stride = 1 + Math.floor((count - 1) / COUNTS), found = new Map();
      const step = Math.max(1, Math.floor(count / STEPS)), positions = range(Math.floor(highest / step) + 1);
      const best = () => least([...found.values()]);
      const look = (k) => {
        for (const position of k ? positions : [0]) {
          const one = this.mostKept(k, position * step, best()?.score[0] ?? Infinity);
          if (one) found.set(k, least([found.get(k) ?? one, one]));
        }
      };
      for (let k = 0; k < count; k += stride) look(k);
      const middle = best()?.numLayers;
      for (let k = middle - stride + 1; k < middle + stride; k++) if (k > 0 && k < count && k % stride) look(k);
      return [...found.values()].sort(compare);
    }

    mostKept(numLayers, offloaded, fastest_s) {
      const at = (kept) => this.at(numLayers, offloaded, kept), fits = (kept) => this.peakBytes(at(kept)) <= this.mostBytes;
      const { compute_s, copies_s } = this.seconds(this.costs(at(this.highest)));
      const least_s = Math.max(compute_s + this.profile.loss_s, copies_s) + this.profile.other_s;
      if (least_s > fastest_s * (1 + ROUNDING) || this.hostBytes(at(this.highest)) > this.mostHostBytes) return null;
      if (fits(this.highest)) return this.scored(at(this.highest));
      let low = 0, high = this.highest; // bisect_left
      while (low < high) {
        const middle = Math.floor((low + high) / 2);
        if (fits(middle)) low = middle + 1;
        else high = middle;
      }
      return low ? this.scored(at(low - 1)) : null;
    }

    swept(found) {
      const { loss_s, other_s } = this.profile;
      for (let sweep = 0; sweep < SWEEPS; sweep++) {
        const before = found;
        for (const number of range(this.count).reverse()) {
          for (const way of range(this.ways[number].length)) {
            if (way === found.ways[number]) continue;
            const tried = withWay(found, number, way), { compute_s } = this.seconds(this.costs(tried));
            if (compute_s + loss_s + other_s > found.score[0] * (1 + ROUNDING)) continue;
            found = least([found, this.scored(tried)].filter(Boolean));
          }
        }
        if (found === before) break;
      }
      return found;
    }
  }

  return { Search, fixed, formatBytes, formatS, fsum, last, layerPasses, range, regionCosts, sum };
})();
