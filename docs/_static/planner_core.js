// The planner of the start page: what offload/planning and offload/command_line compute, for a browser. The page itself
// is planner.js.
//
// A port, function by function and in the order of additions, so that every number is the same to the last bit;
// tests/pages/test_planner.py holds it to that. Names of data are Python's, so that a profile's JSON is read as it is.
// Schedules are the default one, k of N, which is what plans use.
"use strict";

globalThis.offloadPlanner = (() => {
  const GIB = 2 ** 30;
  const FREE = 1e-3; // plan.py
  const MUCH = 1.005, USABLE = 0.92, DUPLEX = 1.83; // command_line/plan.py
  const LOSS_BYTES = 12, MIN_BYTES = 2 ** 21, UNLISTED_PIECES = 8;
  const FEW = 2000, GRID = 12, STARTS = 2, MOVES = 24, SWEEPS = 3, SWEPT = 64, ROUNDING = 1e-8; // search.py
  const LAYERS = "model.model.layers";

  // --- Numbers as Python has them ---------------------------------------------------------------------------------

  const range = (end) => Array.from({ length: end }, (_, index) => index);
  const sum = (values) => values.reduce((total, value) => total + value, 0); // of bytes, which are whole
  const last = (values) => values[values.length - 1];

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

  const mean = (values) => fsum(values) / values.length;
  /** A product of whole numbers that may have more than 53 bits, rounded once. */
  const product = (...factors) => Number(factors.reduce((found, factor) => found * BigInt(factor), 1n));

  /** A text of rounded digits, but with a half rounded to even. */
  function toEven(text, exact, digits) {
    const [head, tail = ""] = text.split("e"), [cut] = exact.split("e");
    const end = cut.indexOf(".") + digits + (digits ? 1 : 0);
    const half = /^\.?50*$/.test(cut.slice(end));
    return half && Number(last(head)) % 2 ? cut.slice(0, end) + (tail && `e${tail}`) : text;
  }

  /** f"{value:.2f}" */
  const fixed = (value, digits) => toEven(value.toFixed(digits), value.toFixed(60), digits);
  /** float(f"{value:.9g}") */
  function nineDigits(value) {
    const text = value.toExponential(8);
    const maybeHalf = /50000e/.test(value.toExponential(13)); // the exact digits are slow to find
    return Number(maybeHalf ? toEven(text, value.toExponential(60), 8) : text);
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

  // --- recompute/costs.py: regions, and which to compute again ----------------------------------------------------

  const operationOf = (regions, number) => regions[number].another_of ?? number;
  const secondsOf = (regions, numbers) =>
    fsum([...new Set([...numbers].map((number) => operationOf(regions, number)))].map((first) => regions[first].seconds));
  const savedOf = (regions) => new Set(range(regions.length).filter((number) => regions[number].saved));

  /** One way to treat a layer's regions: those that are kept, held until backward, and computed again. */
  function treat(regions, kept) {
    const recomputed = new Set();
    const waiting = [...savedOf(regions)];
    while (waiting.length) {
      const number = waiting.pop();
      if (recomputed.has(number) || kept.has(number) || !regions[number].recomputable) continue;
      recomputed.add(number);
      waiting.push(...regions[number].reads);
    }
    const asked = savedOf(regions);
    for (const number of recomputed) for (const read of regions[number].reads) asked.add(read);
    const held = new Set([...asked].filter((number) => !recomputed.has(number)));
    const saved_bytes = sum([...held].map((number) => regions[number].nbytes));
    return { regions, kept, recomputed, held, saved_bytes, recompute_s: secondsOf(regions, recomputed) };
  }

  /** Ways to treat them, from all computed again to all kept: greedily, what saves the most seconds per byte. */
  function ways(regions) {
    const found = [treat(regions, new Set())];
    while (last(found).recompute_s > 0) {
      const before = last(found), results = new Map();
      for (const number of [...before.recomputed].sort((a, b) => a - b)) {
        const first = operationOf(regions, number);
        results.set(first, [...(results.get(first) ?? []), number]);
      }
      let best = null, most = -Infinity;
      for (const made of results.values()) {
        const after = treat(regions, new Set([...before.kept, ...made]));
        const gain = (before.recompute_s - after.recompute_s) / Math.max(1, after.saved_bytes - before.saved_bytes);
        if (gain > most) [best, most] = [after, gain];
      }
      found.push(best);
    }
    found.push(treat(regions, savedOf(regions)));
    found.sort((a, b) => a.saved_bytes - b.saved_bytes || a.recompute_s - b.recompute_s);
    const best = [];
    for (const way of found) if (!best.length || way.recompute_s < last(best).recompute_s) best.push(way);
    return best;
  }

  // --- planning/passes.py: a layer's forward and backward in pieces -----------------------------------------------

  function passesOf(layer, policy, travels) {
    if (!layer.regions.length) return finished(ofTensors(layer, travels), layer.workspace_bytes);
    let forward_s = layer.recorded_s;
    if (!policy) {
      const saved = savedOf(layer.regions);
      [policy, forward_s] = [{ kept: saved, travelling: saved }, layer.forward_s];
    }
    const travelling = travels ? policy.travelling : new Set();
    const made = ofRegions(layer, treat(layer.regions, policy.kept), travelling, forward_s);
    return finished(made, layer.workspace_bytes);
  }

  function finished({ forward, backward, travelling }, workspace_bytes) {
    const recompute_s = fsum(backward.map((piece) => piece.recompute_s));
    const sends = [], stretches = []; // [seconds after forward's start, bytes], and [what is awaited, seconds from there]
    let ready_s = null, held_bytes = 0, forward_peak = -Infinity;
    for (const piece of forward) {
      ready_s = ready_s === null ? piece.seconds : ready_s + piece.seconds;
      if (piece.travels) sends.push([ready_s, piece.taken_bytes]);
      held_bytes += piece.taken_bytes;
      forward_peak = Math.max(forward_peak, held_bytes);
      held_bytes -= piece.freed_bytes;
      forward_peak = Math.max(forward_peak, held_bytes);
    }
    let here = held_bytes, backward_peak = held_bytes;
    for (const piece of backward) {
      backward_peak = Math.max(backward_peak, here + piece.taken_bytes);
      here += piece.taken_bytes - piece.passing_bytes - piece.freed_bytes;
      const seconds = piece.recompute_s + piece.seconds, before = last(stretches);
      if (before && (piece.awaits === null || before[0] === piece.awaits)) before[1] += seconds;
      else stretches.push([piece.awaits, seconds]);
    }
    return {
      forward, backward, travelling, sends, stretches, workspace_bytes, recompute_s, held_bytes,
      forward_s: fsum(forward.map((piece) => piece.seconds)),
      backward_s: fsum(backward.map((piece) => piece.seconds)) + recompute_s,
      travelling_bytes: sum(travelling),
      forward_peak_bytes: workspace_bytes + forward_peak,
      backward_peak_bytes: workspace_bytes + backward_peak,
    };
  }

  function piecesOf(layer) {
    if (layer.tensors.length || !layer.saved_bytes) return layer.tensors;
    const edges = range(UNLISTED_PIECES + 1).map((index) => Math.floor((layer.saved_bytes * index) / UNLISTED_PIECES));
    return range(UNLISTED_PIECES).map((index) => edges[index + 1] - edges[index]);
  }

  function ofTensors(layer, mayTravel) {
    const tensors = piecesOf(layer), travels = mayTravel && tensors.length > 0;
    const parts = tensors.length ? tensors : [0];
    const forward_s = layer.forward_s / parts.length, backward_s = layer.backward_s / parts.length;
    const forward = parts.map((taken_bytes) => ({ seconds: forward_s, taken_bytes, freed_bytes: 0, travels }));
    const backward = parts.map((freed_bytes, number) => ({
      seconds: backward_s, freed_bytes, awaits: travels ? number : null, recompute_s: 0, taken_bytes: 0, passing_bytes: 0,
    }));
    return { forward, backward: backward.reverse(), travelling: travels ? tensors : [] };
  }

  function ofRegions(layer, treated, travelling, forward_s) {
    const regions = treated.regions;
    const total_s = fsum(regions.map((region) => region.seconds));
    const shares = regions.map((region) => (total_s ? region.seconds / total_s : 1 / regions.length));
    const moving = range(regions.length).filter(
      (number) => travelling.has(number) && treated.held.has(number) && regions[number].nbytes,
    );
    const places = new Map(moving.map((number, place) => [number, place]));
    const passing = (number) => treated.recomputed.has(number) && regions[number].saved;
    const there = (number) => treated.held.has(number) || passing(number);
    const reader = range(regions.length); // the last one that reads each region
    regions.forEach((region, number) => region.reads.forEach((read) => { reader[read] = number; }));
    const freed = regions.map(() => 0);
    reader.forEach((by, number) => { if (passing(number)) freed[by] += regions[number].nbytes; });
    const forward = regions.map((region, number) => ({
      seconds: shares[number] * forward_s,
      taken_bytes: there(number) ? region.nbytes : 0,
      freed_bytes: freed[number],
      travels: places.has(number),
    }));
    const seconds = shares.map((share) => share * layer.backward_s);
    const backward = backwardPieces(treated, places, seconds, there);
    return { forward, backward, travelling: moving.map((number) => regions[number].nbytes) };
  }

  function backwardPieces(treated, places, seconds, there) {
    const regions = treated.regions, left = new Set(treated.recomputed), pieces = [];
    const readers = regions.map(() => 0); // how many that are computed again have yet to read a region
    for (const again of left) for (const read of regions[again].reads) readers[read] += 1;
    const letGo = (number) => {
      for (const read of regions[number].reads) readers[read] -= 1;
      const done = [...new Set([number, ...regions[number].reads])].filter(
        (read) => treated.recomputed.has(read) && !readers[read] && !regions[read].saved,
      );
      return sum(done.map((read) => regions[read].nbytes));
    };
    for (const number of range(regions.length).reverse()) {
      const again = regions[number].saved ? leadingTo(regions, number, left) : [];
      for (const other of again) left.delete(other);
      let here = 0, most = 0;
      for (const other of again) {
        here += regions[other].nbytes;
        most = Math.max(most, here);
        here -= letGo(other);
      }
      const asked = [number, ...again, ...again.flatMap((other) => regions[other].reads)];
      const awaited = asked.filter((other) => places.has(other)).map((other) => places.get(other));
      pieces.push({
        seconds: seconds[number],
        freed_bytes: there(number) ? regions[number].nbytes : 0,
        awaits: awaited.length ? Math.min(...awaited) : null,
        recompute_s: secondsOf(regions, again),
        taken_bytes: most,
        passing_bytes: most - here,
      });
    }
    return pieces;
  }

  function leadingTo(regions, number, left) {
    const found = new Set(), waiting = [number];
    while (waiting.length) {
      const other = waiting.pop();
      if (!left.has(other) || found.has(other)) continue;
      found.add(other);
      waiting.push(...regions[other].reads);
      const made = operationOf(regions, other);
      for (const result of left) if (operationOf(regions, result) === made) waiting.push(result);
    }
    return [...found].sort((a, b) => a - b);
  }

  // --- planning/estimate.py: peak and step of the default schedule ------------------------------------------------

  function peakBytes(layers, numLayers, betweenBytes) {
    const resident = layers.length - numLayers;
    let held = 0, most = -Infinity;
    for (let number = 0; number < layers.length; number++) {
      if (number >= resident) held -= layers[number - resident].travelling_bytes;
      most = Math.max(most, held + layers[number].forward_peak_bytes);
      held += layers[number].held_bytes;
    }
    most = Math.max(most, held + betweenBytes);
    for (let number = layers.length - 1; number >= 0; number--) {
      const reloaded = number - resident + 1;
      if (reloaded >= 0 && reloaded < numLayers) held += layers[reloaded].travelling_bytes;
      held -= layers[number].held_bytes;
      most = Math.max(most, held + layers[number].backward_peak_bytes);
    }
    return most;
  }

  /** What a layer's passes and copies come to on one link; see Trips. */
  function tripsOf(layer, link) {
    const { sends, stretches, travelling } = layer, back_after_s = new Float64Array(travelling.length);
    let send_s = 0, reload_s = 0, rest_s = 0, sent_after_s = -Infinity, done_after_s = -Infinity;
    for (const [ready_s, nbytes] of [...sends].reverse()) {
      send_s += nbytes / link.d2h_bytes_per_s;
      sent_after_s = Math.max(sent_after_s, ready_s + send_s);
    }
    for (let at = travelling.length - 1; at >= 0; at--) back_after_s[at] = reload_s += travelling[at] / link.h2d_bytes_per_s;
    for (const [awaits, seconds] of [...stretches].reverse()) {
      rest_s += seconds;
      if (awaits !== null) done_after_s = Math.max(done_after_s, back_after_s[awaits] + rest_s);
    }
    return { forward_s: layer.forward_s, backward_s: layer.backward_s, send_s, sent_after_s, reload_s, done_after_s };
  }

  function stepS(layers, numLayers, between_s) {
    const resident = layers.length - numLayers, sent_s = new Float64Array(layers.length), reloads_s = new Float64Array(layers.length);
    let now = 0, copied = 0;
    for (let number = 0; number < layers.length; number++) {
      const { forward_s, send_s, sent_after_s } = layers[number];
      if (number >= resident) now = Math.max(now, sent_s[number - resident]);
      sent_s[number] = copied = Math.max(copied + send_s, now + sent_after_s);
      now += forward_s;
    }
    now += between_s;
    for (let number = layers.length - 1; number >= 0; number--) {
      const { backward_s, done_after_s } = layers[number], reloaded = number - resident + 1;
      if (reloaded >= 0 && reloaded < numLayers) {
        reloads_s[reloaded] = copied = Math.max(copied, now);
        copied += layers[reloaded].reload_s;
      }
      now += backward_s;
      if (number < numLayers) now = Math.max(now, reloads_s[number] + done_after_s);
    }
    return now;
  }

  // --- planning/ladder.py: rungs of each kind of layer, and levels of all -----------------------------------------

  function ladderOf(profile) {
    const members = new Map(), names = new Map();
    profile.layers.forEach((layer, number) => {
      const regions = layer.regions;
      if (!names.has(regions)) names.set(regions, JSON.stringify(regions.map((one) => ({ ...one, seconds: 0 }))));
      const name = names.get(regions);
      members.set(name, [...(members.get(name) ?? []), number]);
    });
    const kinds = [], rungs = [], steps = [];
    [...members.values()].forEach((numbers, kind) => {
      for (const number of numbers) kinds[number] = kind;
      const layers = numbers.map((number) => profile.layers[number]);
      const regions = layers[0].regions.map((one, at) => ({
        ...one, seconds: mean(layers.map((layer) => layer.regions[at].seconds)),
      }));
      const treated = regions.length ? rungsOf(regions) : [];
      rungs.push([...treated.slice(0, -1).map((way) => ({ kept: way.held, travelling: way.held })), null]);
      const recording_s = mean(layers.map((layer) => layer.recorded_s - layer.forward_s));
      for (const [rung, gain] of gains(treated, recording_s)) steps.push({ gain, kind, rung });
    });
    const standing = rungs.map(() => 0), levels = [[...standing]];
    for (const { kind, rung } of steps.sort((a, b) => b.gain - a.gain)) {
      standing[kind] = rung;
      levels.push([...standing]);
    }
    return { kinds, rungs, levels };
  }

  function rungsOf(regions) {
    const found = ways(regions), saved = savedOf(regions), held = last(found).held;
    const all = held.size === saved.size && [...held].every((number) => saved.has(number));
    return all ? found : [...found, treat(regions, saved)];
  }

  function gains(treated, recording_s) {
    const top = treated.length - 1, found = [];
    const costs = treated.map((way, at) => [way.saved_bytes, way.recompute_s + (at < top ? recording_s : 0)]);
    for (let rung = 0; rung < top; ) {
      const [nbytes, seconds] = costs[rung];
      let most = -Infinity;
      for (let number = rung + 1; number <= top; number++) {
        const gain = (seconds - costs[number][1]) / Math.max(1, costs[number][0] - nbytes);
        if (gain >= most) [most, rung] = [gain, number];
      }
      found.push([rung, most]);
    }
    return found;
  }

  // --- planning/choices.py ----------------------------------------------------------------------------------------

  class Choices {
    constructor(profile, link) {
      this.profile = profile;
      this.link = link;
      this.ladder = ladderOf(profile);
      this.count = profile.layers.length;
      this.highest = (this.ladder.levels.length - 1) * this.count;
      this.compute_s =
        fsum(profile.layers.map((layer) => layer.forward_s + layer.backward_s)) + profile.loss_s + profile.other_s;
      this.rungs = this.ladder.levels.map((level) => this.ladder.kinds.map((kind) => level[kind]));
      const first = new Map(), texts = new Map();
      this.alike = profile.layers.map((layer, number) => {
        if (!texts.has(layer)) texts.set(layer, JSON.stringify(layer));
        if (!first.has(texts.get(layer))) first.set(texts.get(layer), number);
        return first.get(texts.get(layer));
      });
      this.known = [];
    }

    of(numLayers, travelling, staying) {
      const { count, rungs } = this, top = rungs.length - 1;
      let level = Math.floor(travelling / count);
      let edge = Math.min(travelling % count, numLayers);
      const found = rungs[Math.min(level + 1, top)].slice(0, edge).concat(rungs[level].slice(edge, numLayers));
      level = Math.floor(staying / count);
      edge = Math.min(Math.max(count - (staying % count), numLayers), count - 1);
      const rest = rungs[level].slice(numLayers, edge).concat(rungs[Math.min(level + 1, top)].slice(edge, -1));
      return { numLayers, rungs: found.concat(rest, rungs[top].slice(-1)) };
    }

    rungsOf(number) {
      return this.ladder.rungs[this.ladder.kinds[number]].length;
    }

    passes(choice) {
      return (choice.passes ??= choice.rungs.map((rung, number) => this.passesAt(number, rung, number < choice.numLayers)));
    }

    passesAt(number, rung, travels) {
      const alike = this.alike[number], key = (rung * this.count + alike) * 2 + (travels ? 1 : 0);
      return (this.known[key] ??= this.made(this.profile.layers[alike], this.policy(alike, rung, travels), travels));
    }

    made(layer, policy, travels) {
      const passes = passesOf(layer, policy, travels);
      return { ...passes, trips: tripsOf(passes, this.link) };
    }

    /** The choice with one layer on another rung. */
    onRung(choice, number, rung) {
      const rungs = choice.rungs.slice(), passes = this.passes(choice).slice();
      rungs[number] = rung;
      passes[number] = this.passesAt(number, rung, number < choice.numLayers);
      return { numLayers: choice.numLayers, rungs, passes };
    }

    hostBytes(choice) {
      return this.passes(choice).reduce((total, layer) => total + layer.travelling_bytes, 0);
    }

    peakBytes(choice) {
      return (choice.peak ??= peakBytes(this.passes(choice), choice.numLayers, this.profile.loss_bytes));
    }

    /** Seconds without waiting for copies if one layer is on another rung. */
    computeS(choice, number, rung) {
      const passes = this.passes(choice), seconds = (one) => one.forward_s + one.backward_s;
      choice.layers_s ??= passes.reduce((total, one) => total + seconds(one), 0);
      const other_s = seconds(this.passesAt(number, rung, number < choice.numLayers)) - seconds(passes[number]);
      return choice.layers_s + other_s + this.profile.loss_s + this.profile.other_s;
    }

    stepS(choice) {
      const trips = this.passes(choice).map((layer) => layer.trips);
      return stepS(trips, choice.numLayers, this.profile.loss_s) + this.profile.other_s;
    }

    policy(number, rung, travels) {
      const policy = this.ladder.rungs[this.ladder.kinds[number]][rung];
      return travels || !policy ? policy : { kept: policy.kept, travelling: new Set() };
    }

    policies(choice) {
      return choice.rungs.map((rung, number) => this.policy(number, rung, number < choice.numLayers));
    }
  }

  // --- planning/search.py -----------------------------------------------------------------------------------------

  function compare(one, other) {
    const [a, b] = [one.score, other.score];
    return a[0] - b[0] || a[1] - b[1] || a[2] - b[2];
  }
  const best = (found) => found.reduce((least, one) => (compare(one, least) < 0 ? one : least));

  class Search {
    constructor(choices, mostBytes, mostHostBytes = Infinity) {
      Object.assign(this, { choices, mostBytes, mostHostBytes });
      this.known = new Map();
    }

    best() {
      const { choices } = this, nothing = choices.of(0, 0, choices.highest);
      if (this.fits(nothing)) return nothing;
      const found = this.fitting(this.corners());
      if (!found.length) {
        const [least, choice] = this.leastPeak();
        if (least > this.mostBytes) return null;
        found.push(this.scored(choice));
      }
      const every = range(choices.count).reduce((product, number) => product * choices.rungsOf(number), choices.count);
      if (every <= FEW) return best([...found, ...this.fitting(this.every())]).choice;
      found.push(...this.onGrid());
      const first = best(found);
      if (first.score[0] <= choices.compute_s * (1 + ROUNDING)) return first.choice;
      // The best for each number of layers that travel. Python sorts them the other way round, and equal ones stay in order.
      const fastest = new Map();
      for (const one of [...found].sort((a, b) => compare(b, a))) fastest.set(one.choice.numLayers, one);
      const starts = [...fastest.values()].sort(compare).slice(0, Math.max(1, Math.floor(SWEPT / choices.count)));
      return best(starts.map((one) => this.swept(one))).choice;
    }

    fewest() {
      const { highest, count } = this.choices;
      return range(count).map((k) => this.choices.of(k, highest, highest)).find((choice) => this.fits(choice)) ?? null;
    }

    leastPeak() {
      const { choices } = this;
      let least = Infinity, found = null;
      const better = (choice) => {
        if (this.fitsHost(choice) && choices.peakBytes(choice) < least) [least, found] = [choices.peakBytes(choice), choice];
      };
      this.corners().forEach(better);
      for (const number of range(choices.count)) {
        for (const rung of range(choices.rungsOf(number))) better(choices.onRung(found, number, rung));
      }
      return [least, found];
    }

    every() {
      let rungs = [[]];
      for (const number of range(this.choices.count)) {
        rungs = rungs.flatMap((made) => range(this.choices.rungsOf(number)).map((rung) => [...made, rung]));
      }
      return range(this.choices.count).flatMap((numLayers) => rungs.map((made) => ({ numLayers, rungs: made })));
    }

    corners() {
      const { count, highest } = this.choices, ends = highest ? [0, highest] : [0];
      return range(count).flatMap((numLayers) =>
        (numLayers ? ends : ends.slice(0, 1)).flatMap((travelling) =>
          ends.map((staying) => this.choices.of(numLayers, travelling, staying)),
        ),
      );
    }

    fitsHost(choice) {
      return this.mostHostBytes === Infinity || this.choices.hostBytes(choice) <= this.mostHostBytes;
    }

    fitsDevice(choice) {
      return this.choices.peakBytes(choice) <= this.mostBytes;
    }

    fits(choice) {
      return this.fitsHost(choice) && this.fitsDevice(choice);
    }

    scored(choice) {
      const { choices } = this;
      return { score: [nineDigits(choices.stepS(choice)), choices.hostBytes(choice), choices.peakBytes(choice)], choice };
    }

    fitting(tried) {
      return tried.filter((choice) => this.fits(choice)).map((choice) => this.scored(choice));
    }

    onGrid() {
      const { count, highest } = this.choices, grid = [];
      const steps = [1 + Math.floor((count - 1) / GRID), 1 + Math.floor(highest / GRID)];
      for (let k = 0; k < count; k += steps[0]) {
        for (let travelling = 0; travelling <= highest; travelling += steps[1]) {
          const found = this.at([k, travelling]);
          if (found) grid.push([found, [k, travelling]]);
        }
      }
      grid.sort((a, b) => compare(a[0], b[0]));
      for (const [found, place] of grid.slice(0, STARTS)) this.walk(found, place, steps);
      return [...this.known.values()].filter(Boolean);
    }

    at(place) {
      const key = `${place}`;
      if (!this.known.has(key)) this.known.set(key, this.mostKept(place));
      return this.known.get(key);
    }

    mostKept(place) {
      const of = (staying) => this.choices.of(...place, staying);
      let fit = 0, misfit = this.choices.highest;
      if (!this.fitsHost(of(fit))) return null;
      if (this.fitsDevice(of(misfit))) return this.scored(of(misfit));
      if (!this.fitsDevice(of(fit))) return null;
      while (misfit - fit > 1) {
        const middle = Math.floor((fit + misfit) / 2);
        if (this.fitsDevice(of(middle))) fit = middle;
        else misfit = middle;
      }
      return this.scored(of(fit));
    }

    walk(found, place, steps) {
      const { count, highest } = this.choices, by = [-1, 0, 1];
      for (let move = 0; move < MOVES; move++) {
        const around = by.flatMap((a) => by.map((b) => [place[0] + steps[0] * a, place[1] + steps[1] * b]));
        const inside = around.filter(([k, at]) => k >= 0 && k < count && at >= 0 && at <= highest);
        const there = inside.map((one) => ({ found: this.at(one), one })).filter((entry) => entry.found);
        const least = there.reduce((a, b) => (compare(b.found, a.found) < 0 ? b : a));
        if (compare(least.found, found) < 0) [found, place] = [least.found, least.one];
        else if (steps[0] === 1 && steps[1] === 1) break;
        else steps = [Math.ceil(steps[0] / 2), Math.ceil(steps[1] / 2)];
      }
    }

    swept(found) {
      for (let sweep = 0; sweep < SWEEPS; sweep++) {
        const before = found;
        for (const number of range(this.choices.count).reverse()) {
          for (const rung of range(this.choices.rungsOf(number))) {
            const { choice } = found;
            if (rung === choice.rungs[number] || (rung < choice.rungs[number] && number >= choice.numLayers)) continue;
            if (this.choices.computeS(choice, number, rung) > found.score[0] * (1 + ROUNDING)) continue; // waits or not
            const tried = this.choices.onRung(choice, number, rung);
            if (this.fits(tried)) found = best([found, this.scored(tried)]);
          }
        }
        if (found === before) break;
      }
      return found;
    }
  }

  // --- planning/plan.py -------------------------------------------------------------------------------------------

  const asWhole = (profile) => ({ ...profile, layers: alikeMapped(profile.layers, (one) => ({ ...one, regions: [] })) });
  /** What is made of each layer; equal layers stay the same object. */
  function alikeMapped(layers, make) {
    const made = new Map(layers.map((layer) => [layer, null]));
    for (const layer of made.keys()) made.set(layer, make(layer));
    return layers.map((layer) => made.get(layer));
  }

  function planned(choices, choice) {
    const policies = choices.policies(choice);
    return {
      num_layers: choice.numLayers, policies, choice, profile: choices.profile, link: choices.link,
      host_bytes: choices.hostBytes(choice),
      recompute_s: fsum(choices.passes(choice).map((layer) => layer.recompute_s)),
    };
  }

  /** The plan for a budget, with its predicted step; or, if nothing meets the budget, the least one: least_bytes. */
  function plan(profile, budget, link, host = Infinity, choices = new Choices(profile, link)) {
    const search = new Search(choices, budget, host);
    const choice = profile.layers.some((layer) => layer.regions.length) ? search.best() : search.fewest();
    if (!choice) return { least_bytes: search.leastPeak()[0] };
    const found = planned(choices, choice);
    return { ...found, ...simulate(profile, choice.numLayers, link, found.policies) };
  }

  /** Peak and step of the plan for a budget; null if nothing meets it. */
  function outline(choices, budget) {
    const choice = new Search(choices, budget).best();
    return choice && { budget, peak_bytes: choices.peakBytes(choice), step_s: choices.stepS(choice) };
  }
  const leastBytes = (choices) => new Search(choices, Infinity).leastPeak()[0];

  /** Peak and step for each number of whole layers that travel. */
  function wholeLayers(profile, link) {
    const choices = new Choices(asWhole(profile), link), { highest } = choices;
    return range(choices.count).map((k) => {
      const choice = choices.of(k, highest, highest);
      return { k, peak_bytes: choices.peakBytes(choice), step_s: choices.stepS(choice) };
    });
  }

  /** As many whole layers as leave the step as long as it is. */
  function freePlan(profile, link) {
    const layers = alikeMapped(profile.layers, (one) => ({ ...one, regions: [], recorded_s: one.forward_s }));
    const choices = new Choices({ ...profile, layers }, link);
    const every = range(choices.count).map((k) => choices.of(k, choices.highest, choices.highest));
    const most_s = choices.stepS(every[0]) * (1 + FREE);
    return planned(choices, last(every.filter((choice) => choices.stepS(choice) <= most_s)));
  }

  /** Every layer computed again from its input, which stays, or travels from all layers but two. */
  function checkpointing(profile, link, travels) {
    const held = alikeMapped(profile.layers, (layer) => {
      const kept = layer.regions.length ? ways(layer.regions)[0].held : null;
      return kept && { kept, travelling: kept };
    });
    const numLayers = travels ? Math.max(0, profile.layers.length - 2) : 0;
    return simulate(profile, numLayers, link, held);
  }

  // --- planning/simulate.py, for the default schedule -------------------------------------------------------------

  function simulate(profile, numLayers, link, policies) {
    const resident = profile.layers.length - numLayers, made = new Map();
    const passes = profile.layers.map((layer, number) => {
      const travels = number < numLayers, policy = policies[number];
      const known = made.get(layer) ?? made.set(layer, []).get(layer);
      let found = known.find((one) => one.policy === policy && one.travels === travels);
      if (!found) known.push((found = { policy, travels, passes: passesOf(layer, policy, travels) }));
      return found.passes;
    });
    const tasks = { compute: [], d2h: [], h2d: [] }, copies = profile.layers.map(() => []);
    const add = (lane, kind, amount, label, layer, after = null, taken = 0, freed = 0) => {
      const task = { lane, kind, amount, label, layer, after, taken, freed, start: Infinity, end: Infinity };
      tasks[lane].push(task);
      return task;
    };
    const hold = (nbytes, after = null) => add("compute", "other", 0, "", null, after, nbytes);
    passes.forEach((layer, number) => {
      const released = number - resident;
      if (released >= 0) hold(-passes[released].travelling_bytes, last(copies[released]) ?? null);
      hold(layer.workspace_bytes);
      for (const piece of layer.forward) {
        const { seconds, taken_bytes, freed_bytes } = piece;
        const task = add("compute", "forward", seconds, `F${number}`, number, null, taken_bytes, freed_bytes);
        if (piece.travels) copies[number].push(add("d2h", "offload", taken_bytes, `offload ${number}`, number, task));
      }
      hold(-layer.workspace_bytes);
    });
    add("compute", "other", profile.loss_s, "loss", null, null, profile.loss_bytes, profile.loss_bytes);
    for (let number = passes.length - 1; number >= 0; number--) {
      const layer = passes[number], back = number - resident + 1;
      if (back >= 0 && back < numLayers) {
        const here = hold(passes[back].travelling_bytes);
        const reload = (nbytes) => add("h2d", "reload", nbytes, `reload ${back}`, back, here);
        copies[back] = [...passes[back].travelling].reverse().map(reload).reverse();
      }
      hold(layer.workspace_bytes);
      for (const piece of layer.backward) {
        let after = piece.awaits === null ? null : copies[number][piece.awaits];
        if (piece.taken_bytes || piece.recompute_s) {
          const { recompute_s, taken_bytes, passing_bytes } = piece;
          add("compute", "recompute", recompute_s, `R${number}`, number, after, taken_bytes, passing_bytes);
          after = null;
        }
        add("compute", "backward", piece.seconds, `B${number}`, number, after, 0, piece.freed_bytes);
      }
      hold(-layer.workspace_bytes);
    }
    add("compute", "other", profile.other_s, "rest of the step", null);
    play(tasks, link);
    return timeline(tasks);
  }

  /**
   * When each task starts and ends: a stream runs one at a time, in order. Copies have the link for themselves, as all that
   * travels under the default schedule is on the host before the last layer's forward.
   */
  function play(tasks, link) {
    const rates = { compute: 1, d2h: link.d2h_bytes_per_s, h2d: link.h2d_bytes_per_s };
    const queues = Object.entries(tasks).map(([lane, list]) => ({ list, at: 0, left: list[0]?.amount, rate: rates[lane] }));
    for (let now = 0; ; ) {
      const busy = queues.filter(({ list, at }) => at < list.length && (!list[at].after || list[at].after.end <= now));
      if (!busy.length) return;
      let then = Infinity;
      for (const queue of busy) {
        queue.ends = now + queue.left / queue.rate;
        then = Math.min(then, queue.ends);
      }
      for (const queue of busy) {
        const task = queue.list[queue.at];
        task.start = Math.min(task.start, now);
        if (queue.ends === then) {
          task.end = then;
          queue.at += 1;
          if (queue.at < queue.list.length) queue.left = queue.list[queue.at].amount;
        } else {
          queue.left = Math.max(0, queue.left - (then - now) * queue.rate);
        }
      }
      now = then;
    }
  }

  function timeline(tasks) {
    const spans = [], memory = [[0, 0]];
    let last_end = 0, held = 0;
    const put = (lane, kind, start_s, end_s, label, layer, nbytes = 0) => {
      const before = last(spans);
      const same = before && layer !== null && before.kind === kind && before.layer === layer;
      if (lane === "compute" && same && start_s <= before.end_s) {
        before.end_s = Math.max(before.end_s, end_s);
      } else {
        spans.push({ lane, kind, start_s, end_s, label, layer, nbytes });
      }
    };
    for (const task of tasks.compute) {
      if (task.after && task.after.lane !== "compute" && task.start > last_end) {
        put("compute", "stall", last_end, task.start, `wait for ${task.after.label}`, task.after.layer);
      }
      if (task.amount) put("compute", task.kind, task.start, task.end, task.label, task.layer);
      last_end = task.end;
      for (const [time, change] of [[task.start, task.taken], [task.end, -task.freed]]) {
        held += change;
        if (change) memory.push([time, held]);
      }
    }
    for (const task of [...tasks.d2h, ...tasks.h2d]) {
      const { lane, kind, label, layer, amount } = task;
      spans.push({ lane, kind, start_s: task.start, end_s: task.end, label, layer, nbytes: amount });
    }
    spans.sort((a, b) => a.start_s - b.start_s || a.end_s - b.end_s);
    memory.sort((a, b) => a[0] - b[0]);
    const end_s = spans.reduce((most, span) => Math.max(most, span.end_s), 0);
    const peak_bytes = memory.reduce((most, [, nbytes]) => Math.max(most, nbytes), 0);
    const stalls = spans.filter((span) => span.kind === "stall").map((span) => span.end_s - span.start_s);
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
      add(`${module}: mm`, rows * outputs * one, [x], { saved, flop: product(2, rows, inputs, outputs) });
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
    x = add(attention, rows * wide * one, reads, { flop: product(2, rows, tokens, wide) });
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
    const down_s = seconds(product(2, rows, shape.intermediate, shape.hidden), nbytes);
    const sum_s = seconds(0, 3 * rows * shape.hidden * one);
    const forward_s = fsum(regions.map((region) => region.seconds)) + down_s + sum_s;
    const backward_s = 2 * forward_s + attention_s / 2;
    const tensors = regions.filter((region) => region.saved).map((region) => region.nbytes);
    const workspace_bytes = (shape.gated ? 3 : 2) * nbytes;
    const layer = { forward_s, backward_s, saved_bytes: sum(tensors), tensors, workspace_bytes, regions, recorded_s: forward_s };
    const head_s = seconds(product(2, batch, tokens, shape.hidden, shape.vocab), 0);
    const loss_s = 3 * head_s + (2 * lossBytes(shape, batch, tokens)) / rates.bytes_per_s;
    return { layers: range(shape.layers).map(() => layer), loss_s, other_s: 0, loss_bytes: 0 };
  }

  // --- command_line/plan.py: the ways to train, and which to take --------------------------------------

  const linkOf = (rate) => ({ d2h_bytes_per_s: rate, h2d_bytes_per_s: rate, duplex_bytes_per_s: DUPLEX * rate });
  const float = (value) => (Number.isInteger(value) ? `${value}.0` : `${value}`);
  const budgeted = (left) =>
    `offload_layers(${LAYERS}, memory_budget="${float(Math.floor((Math.max(0, left) * 10) / GIB) / 10)}GiB")`;

  /** The choices for a model and a link; those of the last question again, if it differs in memory alone. */
  function choicesOf(...asked) {
    const text = JSON.stringify(asked), [shape, batch, tokens, rates, link] = asked;
    if (choicesOf.last?.text !== text) {
      const profile = profileOf(shape, batch, tokens, rates);
      choicesOf.last = { text, profile, choices: new Choices(profile, link) };
    }
    return choicesOf.last;
  }

  /** What `python -m offload plan` answers. `asked`: shape, batch, tokens, rates, link, memory, host, state, fused_loss. */
  function answer(asked) {
    const { batch, tokens, rates, link, host = null } = asked, shape = shapeOf(asked.shape);
    const { profile, choices } = choicesOf(shape, batch, tokens, rates, link);
    const loss = asked.fused_loss ? 0 : lossBytes(shape, batch, tokens);
    const parameter_bytes = 2 * shape.item_bytes + (asked.state ?? 2 * shape.item_bytes);
    const on_layers = shape.layers * shape.layer_parameters, parameters = on_layers + shape.outside_parameters;
    const fixed_bytes = parameters * parameter_bytes + loss;
    const usable_bytes = Math.floor(USABLE * asked.memory);

    const ways = [];
    const way = (name, write, profile, left, host, choices) => {
      const none = (misfit) => ({ name, write: "", misfit, step_s: null, peak_bytes: null, host_bytes: null, plan: null });
      if (left < 0) return none(`${formatBytes(-left)} are missing for what is fixed`);
      if (host !== null && host < 0) return none(`${formatBytes(-host)} of host memory are missing`);
      const made = plan(profile, left, link, host ?? Infinity, choices);
      if (made.least_bytes !== undefined) {
        const within = host === null ? "" : ` and ${formatBytes(host)} on the host`;
        return none(`${formatBytes(left)}${within} are too little for activations`);
      }
      const { step_s, peak_bytes, host_bytes } = made;
      return { name, write, misfit: "", step_s, peak_bytes, host_bytes, plan: made };
    };
    const left = usable_bytes - fixed_bytes;
    const kept = way("keep all", "offload nothing", profile, Infinity, null, choices);
    if (kept.peak_bytes > left) kept.misfit = `activations take ${formatBytes(kept.peak_bytes)}`;
    ways.push(kept);
    const whole = way("whole layers", "", asWhole(profile), left, host);
    if (whole.plan) whole.write = `offload_layers(${LAYERS}, num_layers=${whole.plan.num_layers})`;
    ways.push(whole, way("regions", budgeted(left + loss), profile, left, host, choices));

    // Weights of two layers, as many gradients, and all that is outside of the layers.
    const layer_bytes = shape.layer_parameters * shape.item_bytes, on_host = on_layers * parameter_bytes;
    const beside = usable_bytes - shape.outside_parameters * parameter_bytes - 4 * layer_bytes - loss;
    const rest = host === null ? null : host - on_host;
    const streamed = way("streamed weights", `stream_weights(${LAYERS}, "cuda")`, profile, beside, rest, choices);
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
      if (named("whole layers").step_s > MUCH * named("regions").step_s) chosen = named("regions");
    }
    return {
      ways, chosen, shape, profile, parameters, loss_bytes: loss, fixed_bytes, usable_bytes, left_bytes: left, choices, link,
      saved_bytes: sum(profile.layers.map((one) => one.saved_bytes)),
    };
  }

  return {
    Choices, answer, checkpointing, fixed, formatBytes, formatS, freePlan, fsum, leastBytes, linkOf, nineDigits, outline, plan,
    profileOf, wholeLayers,
  };
})();
