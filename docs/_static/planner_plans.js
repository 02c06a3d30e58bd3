// For the start page: a Llama counted from its sizes, and the ways to train it, a port of offload/command_line/plan.py.
// tests/pages/test_planner.py compares a layer with the one that `python -m offload plan` counts; see planner_core.js.
"use strict";

globalThis.offloadPlanner = (() => {
  const { GIB, Search, asWhole, formatBytes, fsum, plan, range, sum } = globalThis.offloadPlanner;
  const SLOWER = 1.005, USABLE = 0.92, DUPLEX = 1.83, LAYERS = "model.model.layers"; // command_line/plan.py
  const LOSS_BYTES = 12, LOSS_READS = 48; // of a logit, at once and in all, as counted
  const CHUNK_TOKENS = 2048; // of offload.use_chunked_loss
  const MIN_BYTES = 2 ** 21, ITEM_BYTES = 2; // activations/context.py

  function shapeOf(sizes) {
    const shape = { ...sizes };
    const attention = 2 * shape.hidden * shape.head_dim * (shape.heads + shape.kv_heads);
    const mlp = 3 * shape.hidden * shape.intermediate;
    shape.layer_parameters = attention + mlp + 2 * shape.hidden;
    shape.outside_parameters = 2 * shape.vocab * shape.hidden + shape.hidden;
    return shape;
  }

  function profileOf(shape, batch, tokens, rates, fused_loss, minBytes = MIN_BYTES) {
    const rows = batch * tokens, one = ITEM_BYTES, casts = !shape.fused_norms;
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
    const inside = add("mlp.act_fn: silu", nbytes, [linear("mlp.gate_proj", x, shape.hidden, shape.intermediate, true)]);
    add("mlp: mul", nbytes, [inside, linear("mlp.up_proj", x, shape.hidden, shape.intermediate, true)]);
    const down_s = seconds(2 * rows * shape.intermediate * shape.hidden, nbytes);
    const sum_s = seconds(0, 3 * rows * shape.hidden * one);
    const forward_s = fsum(regions.map((region) => region.seconds)) + down_s + sum_s;
    const backward_s = 2 * forward_s + attention_s / 2;
    let shared = 0; // by all layers: on the device all the time
    for (const one of [cos, sin].map((number) => regions[number]).filter(Boolean)) {
      shared += one.nbytes;
      one.nbytes = 0;
    }
    const tensors = regions.filter((region) => region.saved).map((region) => region.nbytes);
    const workspace_bytes = 3 * nbytes + shared; // with gradients inside of the MLP
    const layer = { forward_s, backward_s, saved_bytes: sum(tensors), tensors, workspace_bytes, regions };
    const logits = rows * shape.vocab, head_s = seconds(2 * logits * shape.hidden, 0);
    const loss_s = 3 * head_s + (LOSS_READS * logits) / rates.bytes_per_s;
    const at_once = shape.vocab * Math.min(rows, CHUNK_TOKENS), summed = 4 * shape.vocab * shape.hidden; // in float32
    const loss_bytes = shared + (fused_loss ? LOSS_BYTES * at_once + summed : LOSS_BYTES * logits);
    return { layer, count: shape.layers, loss_s, other_s: 0, loss_bytes };
  }

  // --- The ways to train, and which to take -----------------------------------------------------------

  const linkOf = (rate) => ({ d2h_bytes_per_s: rate, h2d_bytes_per_s: rate, duplex_bytes_per_s: DUPLEX * rate });
  const float = (value) => (Number.isInteger(value) ? `${value}.0` : `${value}`);
  const sizeOf = (nbytes) =>
    nbytes >= GIB ? `${float(Math.floor((nbytes * 10) / GIB) / 10)}GiB` : `${Math.floor(Math.max(0, nbytes) / 2 ** 20)}MiB`;
  const budgeted = (nbytes) => `offload_layers(${LAYERS}, memory_budget="${sizeOf(nbytes)}")`;

  /** The call that chooses what to hold on the host, where what is fixed does not fit. */
  function prepared({ memory, host = null, state }) {
    const limit = host === null ? "" : `, max_host_bytes="${sizeOf(host)}"`;
    return `prepare(model, optimizer, memory_budget="${sizeOf(memory)}"${limit}${state === 8 ? ", state_dtype=torch.float32" : ""})`;
  }

  let before = {}; // the searches of the last question, which serve the next one if that differs in memory alone

  /** The ways to train. `asked`: shape, batch, tokens, rates, link, memory, host, state, fused_loss. */
  function answer(asked) {
    const { batch, tokens, rates, link, host = null } = asked, shape = shapeOf(asked.shape);
    const text = JSON.stringify([shape, batch, tokens, rates, link, asked.fused_loss]);
    if (before.text !== text) {
      const profile = profileOf(shape, batch, tokens, rates, asked.fused_loss);
      before = { text, search: new Search(profile, link), wholeSearch: new Search(asWhole(profile), link) };
    }
    const { search, wholeSearch } = before, { profile } = search;
    const fixed_of = ITEM_BYTES + (asked.state ?? 2 * ITEM_BYTES), parameter_bytes = fixed_of + ITEM_BYTES; // with gradient
    const on_layers = shape.layers * shape.layer_parameters, parameters = on_layers + shape.outside_parameters;
    const fixed_bytes = parameters * parameter_bytes, usable_bytes = Math.floor(USABLE * asked.memory);
    const left = usable_bytes - fixed_bytes;

    const missing = (left) => `${formatBytes(-left)} are missing for what is fixed`;
    const toomuch = (peak_bytes) => (left < 0 ? missing(left) : peak_bytes > left ? `activations and loss take ${formatBytes(peak_bytes)}` : "");
    const way = (name, write, search, left, host) => {
      const none = (misfit) => ({ name, write: "", misfit, step_s: null, peak_bytes: null, host_bytes: null, plan: null });
      if (left < 0) return none(missing(left));
      if (host !== null && host < 0) return none(`${formatBytes(-host)} of host memory are missing`);
      const made = plan(search, left, host ?? Infinity), within = host === null ? "" : ` and ${formatBytes(host)} on the host`;
      if (!made.layers) return none(`${formatBytes(left)}${within} are too little for activations and loss`);
      const { step_s, peak_bytes, host_bytes } = made;
      return { name, write, misfit: "", step_s, peak_bytes, host_bytes, plan: made };
    };
    const kept = way("keep all", "offload nothing", search, Infinity, null), whole = way("whole layers", "", wholeSearch, left, host);
    kept.misfit = toomuch(kept.peak_bytes);
    if (whole.plan) whole.write = `offload_layers(${LAYERS}, num_layers=${whole.plan.num_layers})`;
    const regions = way("regions", budgeted(usable_bytes - parameters * fixed_of), search, left, host);

    // Weights of two layers, as many gradients, and all that is outside of the layers.
    const layer_bytes = shape.layer_parameters * ITEM_BYTES, on_host = on_layers * parameter_bytes;
    const budget = usable_bytes - shape.outside_parameters * fixed_of - 4 * layer_bytes;
    const beside = budget - shape.outside_parameters * ITEM_BYTES;
    const rest = host === null ? null : host - on_host;
    const streamed = way("streamed weights", prepared(asked), search, beside, rest);
    if (streamed.plan) {
      const d2h_s = (shape.layers * layer_bytes + streamed.host_bytes) / link.d2h_bytes_per_s;
      const h2d_s = (2 * (shape.layers - 1) * layer_bytes + streamed.host_bytes) / link.h2d_bytes_per_s;
      streamed.step_s = Math.max(streamed.step_s, d2h_s, h2d_s);
      streamed.peak_bytes += 4 * layer_bytes;
      streamed.host_bytes += on_host;
    }

    const ways = [kept, whole, regions, streamed], first = ways.find((one) => !one.misfit) ?? null;
    const faster = first === whole && !regions.misfit && whole.step_s > SLOWER * regions.step_s;
    return {
      ways, toomuch, chosen: faster ? regions : first, shape, profile, parameters, loss_bytes: profile.loss_bytes, fixed_bytes, usable_bytes,
      left_bytes: left, search, link, saved_bytes: profile.count * profile.layer.saved_bytes,
    };
  }

  return { ...globalThis.offloadPlanner, answer, linkOf, profileOf };
})();
