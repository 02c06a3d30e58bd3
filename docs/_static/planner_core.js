// The planner of the start page: what offload/planning and offload/command_line compute, for a browser. The page itself
// is planner.js.
//
// A port, function by function: tests/pages/test_planner.py compares plans and numbers with Python's. Names of data are
// Python's, so that a profile's JSON is read as it is. Schedules are the default one, k of N, which is what plans use.
"use strict";

globalThis.offloadPlanner = (() => {
  const GIB = 2 ** 30;
  const FREE = 1e-3; // plan.py
  const FEW = 2000, STEPS = 4, COUNTS = 16, SWEPT = 96, SWEEPS = 3, ROUNDING = 1e-8; // search.py
  const SLOWER = 1.005, USABLE = 0.92, DUPLEX = 1.83, LAYERS = "model.model.layers"; // command_line/plan.py
  const LOSS_BYTES = 12, MIN_BYTES = 2 ** 21, UNLISTED_PIECES = 8;

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
      const { count, ways } = this, nothing = this.scored(this.whole(0));
      if (nothing) return nothing;
      if (ways.reduce((product, of) => product * of.length, count) <= FEW) {
        const every = ways.reduce((made, of) => made.flatMap((some) => of.map((_, way) => [...some, way])), [[]]);
        return least(range(count).flatMap((numLayers) => every.map((some) => this.scored({ numLayers, ways: some }))).filter(Boolean));
      }
      let fastest = this.onGrid();
      if (!fastest.length) fastest = [this.scored(this.leastPeak()[1])].filter(Boolean);
      if (!fastest.length || fastest[0].score[0] <= this.kept_s * (1 + ROUNDING)) return fastest[0] ?? null;
      return least(fastest.slice(0, Math.max(1, Math.floor(SWEPT / count))).map((one) => this.swept(one)));
    }

    fewest() {
      return range(this.count).map((k) => this.scored(this.whole(k))).find(Boolean) ?? null;
    }

    leastPeak() {
      let found = null;
      const better = (choice) => {
        if (this.hostBytes(choice) > this.mostHostBytes) return;
        const one = { ...choice, score: [this.peakBytes(choice)] };
        if (!found || compare(one, found) < 0) found = one;
      };
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
      let fit = 0, misfit = this.highest;
      if (fits(misfit)) return this.scored(at(misfit));
      if (!fits(fit)) return null;
      while (misfit - fit > 1) {
        const middle = Math.floor((fit + misfit) / 2);
        if (fits(middle)) fit = middle;
        else misfit = middle;
      }
      return this.scored(at(fit));
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

  // --- plan.py and simulate.py --------------------------------------------------------------------------------------

  /** What is made of each layer; equal layers stay the same object. */
  function mapped(layers, make) {
    const made = new Map(layers.map((layer) => [layer, null]));
    for (const layer of made.keys()) made.set(layer, make(layer));
    return layers.map((layer) => made.get(layer));
  }
  const asWhole = (profile) => ({ ...profile, layers: mapped(profile.layers, (one) => ({ ...one, regions: [] })) });

  function planned(search, choice) {
    const { numLayers } = choice, recompute_s = fsum(search.costs(choice).map((layer) => layer.recompute_s));
    return { num_layers: numLayers, policies: search.policies(choice), host_bytes: search.hostBytes(choice), recompute_s };
  }

  /** The plan for a budget, with its predicted step; or, if nothing meets the budget, the least one: least_bytes. */
  function plan(profile, budget, link, host = Infinity, search = new Search(profile, link)) {
    search.within(budget, host);
    const choice = profile.layers.some((layer) => layer.regions.length) ? search.best() : search.fewest();
    if (!choice) return { least_bytes: search.leastPeak()[0] };
    const found = planned(search, choice);
    return { ...found, ...simulate(profile, choice.numLayers, link, found.policies) };
  }

  /** Peak and step of the plan for a budget; null if nothing meets it. */
  function outline(search, budget) {
    const choice = search.within(budget).best();
    return choice && { budget, peak_bytes: search.peakBytes(choice), step_s: search.stepS(choice) };
  }
  const leastBytes = (search) => search.within(0).leastPeak()[0];

  /** Peak and step for each number of whole layers that are offloaded. */
  function wholeLayers(profile, link) {
    const search = new Search(asWhole(profile), link), every = range(search.count).map((k) => search.whole(k));
    return every.map((one) => ({ k: one.numLayers, peak_bytes: search.peakBytes(one), step_s: search.stepS(one) }));
  }

  /** As many whole layers as leave the step as long as it is. */
  function freePlan(profile, link) {
    const search = new Search(asWhole(profile), link), every = range(search.count).map((k) => search.whole(k));
    const most_s = search.stepS(every[0]) * (1 + FREE);
    return planned(search, last(every.filter((choice) => search.stepS(choice) <= most_s)));
  }

  /** Every layer recomputed from its input, which is kept, or offloaded from all layers but two. */
  function checkpointing(profile, link, offloads) {
    const kept = (regions) => regionCosts(regions, new Set()).kept;
    const policies = mapped(profile.layers, ({ regions }) => (regions.length ? { kept: kept(regions), offloaded: kept(regions) } : null));
    return simulate(profile, offloads ? Math.max(0, profile.layers.length - 2) : 0, link, policies);
  }

  /** The step of a default schedule. A stream runs one task at a time, in order; both directions never copy at once. */
  function simulate(profile, numLayers, link, policies) {
    const spans = [], memory = [[0, 0]], ends = { compute: 0, d2h: 0, h2d: 0 }, resident = profile.layers.length - numLayers;
    const passes = profile.layers.map((layer, number) => layerPasses(layer, policies[number], number < numLayers));
    const copies = passes.map(() => []);
    let held = 0, before = null;
    const put = (span) => {
      const alike = before && before.kind === span.kind && before.layer === span.layer && span.layer !== null;
      if (alike && span.start_s <= before.end_s) before.end_s = Math.max(before.end_s, span.end_s);
      else spans.push((before = span));
    };
    const hold = (time, change) => {
      held += change;
      if (change) memory.push([time, held]);
    };
    const compute = (kind, seconds, label, layer, taken = 0, freed = 0, after = null) => {
      const idle = ends.compute, start_s = Math.max(idle, after?.end_s ?? 0), end_s = (ends.compute = start_s + seconds);
      const stalled = { lane: "compute", kind: "stall", start_s: idle, end_s: start_s, nbytes: 0 };
      if (start_s > idle) put({ ...stalled, label: `wait for ${after.label}`, layer: after.layer });
      if (seconds) put({ lane: "compute", kind, start_s, end_s, label, layer, nbytes: 0 });
      hold(start_s, taken);
      hold(end_s, -freed);
    };
    const copy = (lane, kind, nbytes, layer) => {
      const start_s = Math.max(ends[lane], ends.compute), rate = link[`${lane}_bytes_per_s`];
      const span = { lane, kind, start_s, end_s: start_s + nbytes / rate, label: `${kind} ${layer}`, layer, nbytes };
      ends[lane] = span.end_s;
      spans.push(span);
      return span;
    };
    const run = (kind, one, label, layer) => {
      compute(kind, one.seconds, label, layer, one.taken, one.freed, one.awaits === null ? null : copies[layer][one.awaits]);
      if (one.offloads) copies[layer].push(copy("d2h", "offload", one.taken, layer));
    };
    passes.forEach(({ forward, workspace_bytes }, number) => {
      const released = number - resident;
      if (released >= 0) compute("other", 0, "", null, -sum(passes[released].offloaded), 0, last(copies[released]) ?? null);
      hold(ends.compute, workspace_bytes);
      for (const one of forward) run("forward", one, `F${number}`, number);
      hold(ends.compute, -workspace_bytes);
    });
    compute("other", profile.loss_s, "loss", null, profile.loss_bytes, profile.loss_bytes);
    for (let number = passes.length - 1; number >= 0; number--) {
      const { recompute, backward, workspace_bytes } = passes[number], back = number - resident + 1;
      if (back >= 0 && back < numLayers) {
        hold(ends.compute, sum(passes[back].offloaded));
        copies[back] = [...passes[back].offloaded].reverse().map((nbytes) => copy("h2d", "reload", nbytes, back)).reverse();
      }
      hold(ends.compute, workspace_bytes);
      if (recompute) run("recompute", recompute, `R${number}`, number);
      for (const one of backward) run("backward", one, `B${number}`, number);
      hold(ends.compute, -workspace_bytes);
    }
    compute("other", profile.other_s, "rest of the step", null);
    spans.sort((a, b) => a.start_s - b.start_s || a.end_s - b.end_s);
    const end_s = spans.reduce((most, span) => Math.max(most, span.end_s), 0);
    const stalls = spans.filter((span) => span.kind === "stall").map((span) => span.end_s - span.start_s);
    const peak_bytes = memory.reduce((most, [, nbytes]) => Math.max(most, nbytes), 0);
    return { spans, memory, step_s: spans.length ? end_s - spans[0].start_s : 0, peak_bytes, stall_s: fsum(stalls) };
  }

  // --- command_line/llama.py: a layer counted from its sizes ------------------------------------------

  function shapeOf(sizes) {
    const shape = { vocab: 0, gated: true, fused_norms: false, tied: false, item_bytes: 2, ...sizes };
    shape.kv_heads ||= shape.heads;
    shape.head_dim ||= Math.floor(shape.hidden / shape.heads);
    const attention = 2 * shape.hidden * shape.head_dim * (shape.heads + shape.kv_heads);
    const mlp = (shape.gated ? 3 : 2) * shape.hidden * shape.intermediate;
    shape.layer_parameters = attention + mlp + 2 * shape.hidden;
    shape.outside_parameters = (shape.tied ? 1 : 2) * shape.vocab * shape.hidden + shape.hidden;
    return shape;
  }

  const lossBytes = (shape, batch, tokens) => batch * tokens * shape.vocab * (shape.item_bytes + LOSS_BYTES);

  function profileOf(shape, batch, tokens, rates, minBytes = MIN_BYTES) {
    const rows = batch * tokens, one = shape.item_bytes, casts = one < 4 && !shape.fused_norms;
    const regions = [], named = new Map();
    const seconds = (flop, nbytes) => Math.max(flop / rates.flop_per_s, nbytes / rates.bytes_per_s);
    const given = (nbytes, saved) => {
      if (nbytes < minBytes) return null;
      regions.push({ name: "input", nbytes, seconds: 0, reads: [], saved, recomputable: false, another_of: null });
      return regions.length - 1;
    };
    const add = (name, nbytes, read, { saved = true, flop = 0, another_of = null } = {}) => {
      named.set(name, (named.get(name) ?? 0) + 1);
      const times = named.get(name) > 1 ? ` #${named.get(name)}` : "";
      const reads = [...new Set(read.filter((number) => number !== null))].sort((a, b) => a - b);
      const takes = another_of === null ? seconds(flop, nbytes + sum(reads.map((number) => regions[number].nbytes))) : 0;
      const large = saved && nbytes >= minBytes;
      regions.push({ name: name + times, nbytes, seconds: takes, reads, saved: large, recomputable: true, another_of });
      return regions.length - 1;
    };
    const linear = (module, x, inputs, outputs, saved = false) =>
      add(`${module}: mm`, rows * outputs * one, [x], { saved, flop: 2 * rows * inputs * outputs });
    const norm = (module, input) => {
      const full = 4 * rows * shape.hidden, row = 4 * rows, low = (full * one) / 4;
      if (shape.fused_norms) {
        const found = add(`${module}: _fused_rms_norm`, low, [input]);
        add(`${module}: _fused_rms_norm`, row, [input], { another_of: found });
        return found;
      }
      const x = casts ? add(`${module}: _to_copy`, full, [input]) : input;
      let scale = add(`${module}: pow`, full, [x], { saved: false });
      for (const operation of ["mean", "add", "rsqrt"]) {
        scale = add(`${module}: ${operation}`, row, [scale], { saved: operation === "rsqrt" });
      }
      let found = add(`${module}: mul`, full, [x, scale], { saved: !casts });
      if (casts) found = add(`${module}: _to_copy`, low, [found]);
      return add(`${module}: mul`, low, [found]);
    };
    const rotated = (x, width, cos, sin) => {
      const nbytes = rows * width * one, saved = { saved: false };
      const turned = add("self_attn: mul", nbytes, [x, cos], saved);
      const half = add("self_attn: neg", Math.floor(nbytes / 2), [x], saved);
      const other = add("self_attn: mul", nbytes, [add("self_attn: cat", nbytes, [x, half], saved), sin], saved);
      return add("self_attn: add", nbytes, [turned, other]);
    };

    const wide = shape.heads * shape.head_dim, narrow = shape.kv_heads * shape.head_dim;
    let entry = given(rows * shape.hidden * one, !casts);
    const cos = given(tokens * shape.head_dim * one, true), sin = given(tokens * shape.head_dim * one, true);
    let x = norm("input_layernorm", entry);
    let query = linear("self_attn.q_proj", x, shape.hidden, wide);
    let key = linear("self_attn.k_proj", x, shape.hidden, narrow);
    const value = linear("self_attn.v_proj", x, shape.hidden, narrow, true);
    query = rotated(query, wide, cos, sin);
    key = rotated(key, narrow, cos, sin);
    const attention = "self_attn: scaled_dot_product_attention", reads = [value, query, key];
    x = add(attention, rows * wide * one, reads, { flop: 2 * rows * tokens * wide });
    const attention_s = regions[x].seconds;
    add(attention, rows * shape.heads * 4, reads, { another_of: x });
    x = linear("self_attn.o_proj", x, wide, shape.hidden);
    entry = add("add", rows * shape.hidden * one, [entry, x], { saved: !casts });
    x = norm("post_attention_layernorm", entry);
    const nbytes = rows * shape.intermediate * one;
    let inside = linear(shape.gated ? "mlp.gate_proj" : "mlp.up_proj", x, shape.hidden, shape.intermediate, true);
    inside = add(`mlp.act_fn: ${shape.gated ? "silu" : "gelu"}`, nbytes, [inside]);
    if (shape.gated) {
      const up = linear("mlp.up_proj", x, shape.hidden, shape.intermediate, true);
      add("mlp: mul", nbytes, [inside, up]);
    }
    const down_s = seconds(2 * rows * shape.intermediate * shape.hidden, nbytes);
    const sum_s = seconds(0, 3 * rows * shape.hidden * one);
    const forward_s = fsum(regions.map((region) => region.seconds)) + down_s + sum_s;
    const backward_s = 2 * forward_s + attention_s / 2;
    const tensors = regions.filter((region) => region.saved).map((region) => region.nbytes);
    const workspace_bytes = (shape.gated ? 3 : 2) * nbytes;
    const layer = { forward_s, backward_s, saved_bytes: sum(tensors), tensors, workspace_bytes, regions };
    const head_s = seconds(2 * batch * tokens * shape.hidden * shape.vocab, 0);
    const loss_s = 3 * head_s + (2 * lossBytes(shape, batch, tokens)) / rates.bytes_per_s;
    return { layers: range(shape.layers).map(() => layer), loss_s, other_s: 0, loss_bytes: 0 };
  }

  // --- command_line/plan.py: the ways to train, and which to take --------------------------------------

  const linkOf = (rate) => ({ d2h_bytes_per_s: rate, h2d_bytes_per_s: rate, duplex_bytes_per_s: DUPLEX * rate });
  const float = (value) => (Number.isInteger(value) ? `${value}.0` : `${value}`);
  const budgeted = (left) =>
    `offload_layers(${LAYERS}, memory_budget="${float(Math.floor((Math.max(0, left) * 10) / GIB) / 10)}GiB")`;

  /** The search for a model and a link; that of the last question again, if it differs in memory alone. */
  function searchOf(...asked) {
    const text = JSON.stringify(asked), [shape, batch, tokens, rates, link] = asked;
    if (searchOf.last?.text !== text) {
      const profile = profileOf(shape, batch, tokens, rates);
      searchOf.last = { text, profile, search: new Search(profile, link) };
    }
    return searchOf.last;
  }

  /** What `python -m offload plan` answers. `asked`: shape, batch, tokens, rates, link, memory, host, state, fused_loss. */
  function answer(asked) {
    const { batch, tokens, rates, link, host = null } = asked, shape = shapeOf(asked.shape);
    const { profile, search } = searchOf(shape, batch, tokens, rates, link);
    const loss = asked.fused_loss ? 0 : lossBytes(shape, batch, tokens);
    const parameter_bytes = 2 * shape.item_bytes + (asked.state ?? 2 * shape.item_bytes);
    const on_layers = shape.layers * shape.layer_parameters, parameters = on_layers + shape.outside_parameters;
    const fixed_bytes = parameters * parameter_bytes + loss;
    const usable_bytes = Math.floor(USABLE * asked.memory);

    const ways = [];
    const way = (name, write, profile, left, host, search) => {
      const none = (misfit) => ({ name, write: "", misfit, step_s: null, peak_bytes: null, host_bytes: null, plan: null });
      if (left < 0) return none(`${formatBytes(-left)} are missing for what is fixed`);
      if (host !== null && host < 0) return none(`${formatBytes(-host)} of host memory are missing`);
      const made = plan(profile, left, link, host ?? Infinity, search);
      if (made.least_bytes !== undefined) {
        const within = host === null ? "" : ` and ${formatBytes(host)} on the host`;
        return none(`${formatBytes(left)}${within} are too little for activations`);
      }
      const { step_s, peak_bytes, host_bytes } = made;
      return { name, write, misfit: "", step_s, peak_bytes, host_bytes, plan: made };
    };
    const left = usable_bytes - fixed_bytes;
    const kept = way("keep all", "offload nothing", profile, Infinity, null, search);
    if (kept.peak_bytes > left) kept.misfit = `activations take ${formatBytes(kept.peak_bytes)}`;
    ways.push(kept);
    const whole = way("whole layers", "", asWhole(profile), left, host);
    if (whole.plan) whole.write = `offload_layers(${LAYERS}, num_layers=${whole.plan.num_layers})`;
    ways.push(whole, way("regions", budgeted(left + loss), profile, left, host, search));

    // Weights of two layers, as many gradients, and all that is outside of the layers.
    const layer_bytes = shape.layer_parameters * shape.item_bytes, on_host = on_layers * parameter_bytes;
    const beside = usable_bytes - shape.outside_parameters * parameter_bytes - 4 * layer_bytes - loss;
    const rest = host === null ? null : host - on_host;
    const streamed = way("streamed weights", `stream_weights(${LAYERS}, "cuda")`, profile, beside, rest, search);
    if (streamed.plan) {
      if (streamed.host_bytes || streamed.plan.recompute_s) streamed.write += `, then ${budgeted(beside + loss)}`;
      const d2h_s = (shape.layers * layer_bytes + streamed.host_bytes) / link.d2h_bytes_per_s;
      const h2d_s = (2 * (shape.layers - 1) * layer_bytes + streamed.host_bytes) / link.h2d_bytes_per_s;
      streamed.step_s = Math.max(streamed.step_s, d2h_s, h2d_s);
      streamed.peak_bytes += 4 * layer_bytes;
      streamed.host_bytes += on_host;
    }
    ways.push(streamed);

    const fitting = ways.filter((one) => !one.misfit), named = (name) => fitting.find((one) => one.name === name);
    let chosen = fitting[0] ?? null;
    if (named("whole layers") && named("regions") && !named("keep all")) {
      if (named("whole layers").step_s > SLOWER * named("regions").step_s) chosen = named("regions");
    }
    return {
      ways, chosen, shape, profile, parameters, loss_bytes: loss, fixed_bytes, usable_bytes, left_bytes: left, search, link,
      saved_bytes: sum(profile.layers.map((one) => one.saved_bytes)),
    };
  }

  return {
    Search, answer, checkpointing, fixed, formatBytes, formatS, freePlan, fsum, leastBytes, linkOf, outline, plan,
    profileOf, wholeLayers,
  };
})();
