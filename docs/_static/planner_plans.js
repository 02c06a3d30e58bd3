// The plans of the start page's planner: what offload/planning/plan.py and simulate.py, and offload/command_line compute,
// for a browser. A port, function by function; see planner_core.js.
"use strict";

globalThis.offloadPlanner = (() => {
  const { Search, formatBytes, fsum, last, layerPasses, range, regionCosts, sum } = globalThis.offloadPlanner;
  const GIB = 2 ** 30;
  const FREE = 1e-3; // plan.py
  const SLOWER = 1.005, USABLE = 0.92, DUPLEX = 1.83, LAYERS = "model.model.layers"; // command_line/plan.py
  const LOSS_BYTES = 12, MIN_BYTES = 2 ** 21; // command_line/llama.py, activations/context.py

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
    ...globalThis.offloadPlanner, answer, checkpointing, freePlan, leastBytes, linkOf, outline, plan, profileOf, wholeLayers,
  };
})();
