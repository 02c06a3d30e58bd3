// The planner of the page "Will it fit?": controls, drawings and the lines to paste. What it shows comes from planner_core.js and planner_plans.js.
//
// It takes the place of the measured curve, which stays where there is no JavaScript. The state is in the address.
"use strict";

(() => {
  const planner = globalThis.offloadPlanner, { formatBytes, formatS, fixed } = planner;
  const GIB = 2 ** 30, ANCHOR = "#planner?";

  // --- What can be asked ------------------------------------------------------------------------------------------

  const TOKENS = [10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20].flatMap((power) => [2 ** power, 1.5 * 2 ** power]).slice(0, -1);
  const VOCABULARIES = [32000, 50304, 128256, 262144];
  // Of others than the H200, what their datasheets promise, in the share that an H200 reaches: of products inside of layers
  // 64%, of memory 83%, of the link 88%.
  const GPUS = {
    h200: { name: "H200 (measured speed)", memory: 140, tflops: 630, bandwidth: 4 },
    h100: { name: "H100 SXM", memory: 80, tflops: 630, bandwidth: 2.8 },
    a100: { name: "A100 SXM", memory: 80, tflops: 200, bandwidth: 1.7 },
    rtx4090: { name: "RTX 4090", memory: 24, tflops: 105, bandwidth: 0.84 },
  };
  const PCIE5 = { d2h_bytes_per_s: 55.4e9, h2d_bytes_per_s: 55.5e9, duplex_bytes_per_s: 101.6e9 }; // an H200's, measured
  const LINKS = { pcie4: ["PCIe 4 ×16", 27.7], pcie5: ["PCIe 5 ×16", 55.4], c2c: ["NVLink-C2C", 396], own: ["own"] };

  /** [name, label, how it is asked, values] */
  const FIELDS = [
    ["gpu", "GPU", "choice", [...Object.entries(GPUS).map(([value, { name }]) => [value, name]), ["own", "own"]]],
    ["memory", "GPU memory", "slider", { min: 8, max: 288, step: 1, unit: "GiB" }],
    ["link", "Link to the host", "choice", Object.entries(LINKS).map(([value, [name]]) => [value, name])],
    ["rate", "Own link", "slider", { min: 2, max: 500, step: 1, unit: "GB/s" }],
    ["layers", "Layers", "slider", { min: 2, max: 128, step: 1 }],
    ["hidden", "Width", "slider", { min: 512, max: 16384, step: 128 }],
    ["mlp", "MLP width", "slider", { min: 1024, max: 57344, step: 256 }],
    ["tokens", "Tokens", "slider", { list: TOKENS }],
    ["batch", "Sequences", "slider", { min: 1, max: 16, step: 1 }],
    ["group", "Query heads per KV head", "choice", [1, 2, 4, 8, 16].map((count) => [count, `${count}`])],
    ["tflops", "Speed inside of layers", "slider", { min: 10, max: 2000, step: 5, unit: "TFLOP/s" }, "more"],
    ["bandwidth", "Speed of its memory", "slider", { min: 0.2, max: 10, step: 0.02, unit: "TB/s" }, "more"],
    ["host", "Host memory", "choice", [[0, "no limit"], ...[32, 64, 128, 256, 512, 1024].map((gib) => [gib, `${gib} GiB`])], "more"],
    ["state", "Optimizer", "choice", [[0, "SGD"], [4, "AdamW in bf16"], [8, "AdamW in fp32"], [12, "AdamW and weights in fp32"]], "more"],
    ["vocab", "Vocabulary", "choice", [[0, "no head"], ...VOCABULARIES.map((size) => [size, size.toLocaleString("en")])], "more"],
    ["fused_norms", "Norms in one operation", "check", null, "more"],
    ["fused_loss", "Loss without whole logits", "check", null, "more"],
  ];

  const BASE = {
    memory: 80, link: "pcie5", rate: 100, layers: 32, hidden: 4096, mlp: 14336, tokens: 8192, batch: 1, group: 4,
    gpu: "h200", tflops: 630, bandwidth: 4, host: 0, state: 4, vocab: 128256, fused_norms: false, fused_loss: false, show: "",
  };
  const PRESETS = {
    // The speeds of these two are those at which the row without offloading, or the checkpointed one, takes as long as measured.
    decoder: ["Measured: 20 decoder layers, H200", {
      memory: 44, layers: 20, mlp: 11008, tokens: 4096, batch: 2, group: 1, gpu: "own", tflops: 670, vocab: 0, fused_norms: true,
    }],
    llama_8b: ["Measured: Llama-8B, 65,536 tokens, H200", {
      memory: 100, tokens: 65536, gpu: "own", tflops: 570, fused_loss: true,
    }],
    h100: ["Llama-8B, 8,192 tokens, H100", { ...GPUS.h100, gpu: "h100", name: undefined, fused_loss: true }],
    full: ["Llama-8B, AdamW in fp32, 24 GiB of an H200", { memory: 24, tokens: 16384, state: 8, fused_loss: true }],
    gh200: ["Llama-8B, 8,192 tokens, NVLink-C2C", { memory: 96, link: "c2c" }],
    rtx4090: ["1.2 billion weights, RTX 4090, PCIe 4", {
      ...GPUS.rtx4090, name: undefined, gpu: "rtx4090", link: "pcie4", layers: 16, hidden: 2048, mlp: 8192, batch: 2, fused_loss: true,
    }],
    streamed: ["Llama-70B, weights on the host", { memory: 140, layers: 80, hidden: 8192, mlp: 28672, group: 8 }],
  };
  const FIRST = "h100";

  const OWN = ["", "own settings"]; // of a preset from which a slider has moved
  const isPreset = (state) => FIELDS.every(([name]) => state[name] === ofPreset(state.preset)[name]);
  const ofPreset = (preset) => JSON.parse(JSON.stringify({ ...BASE, ...PRESETS[preset][1], preset }));

  function readAddress() {
    const asked = new URLSearchParams(location.hash.startsWith(ANCHOR) ? location.hash.slice(ANCHOR.length) : "");
    const state = ofPreset(asked.get("preset") in PRESETS ? asked.get("preset") : FIRST);
    if (SHOWN.some(([key]) => key === asked.get("show"))) state.show = asked.get("show");
    for (const [name, , how, values] of FIELDS) {
      const text = asked.get(name);
      if (text === null) continue;
      if (how === "check") state[name] = text === "true";
      else if (how === "choice") state[name] = (values.find(([value]) => `${value}` === text) ?? [state[name]])[0];
      else if (values.list) state[name] = values.list.includes(Number(text)) ? Number(text) : state[name];
      else if (Number(text) >= values.min && Number(text) <= values.max) {
        state[name] = values.step >= 1 ? Math.round(Number(text)) : Number(text);
      }
    }
    return state;
  }

  function writeAddress(state) {
    const usual = ofPreset(state.preset), asked = new URLSearchParams({ preset: state.preset });
    for (const name of [...FIELDS.map(([name]) => name), "show"]) if (state[name] !== usual[name]) asked.set(name, state[name]);
    history.replaceState(null, "", ANCHOR + asked);
  }

  const askedOf = (state) => {
    const heads = Math.max(1, Math.round(state.hidden / 128)), kv_heads = Math.max(1, Math.floor(heads / state.group));
    return {
      shape: {
        layers: state.layers, hidden: state.hidden, intermediate: state.mlp, heads, kv_heads, head_dim: 128,
        vocab: state.vocab, fused_norms: state.fused_norms,
      },
      batch: state.batch, tokens: state.tokens, memory: state.memory * GIB, host: state.host ? state.host * GIB : null,
      rates: { flop_per_s: state.tflops * 1e12, bytes_per_s: Math.round(state.bandwidth * 100) * 1e10 },
      link: state.link === "pcie5" ? PCIE5 : planner.linkOf(rateOf(state) * 1e9), state: state.state, fused_loss: state.fused_loss,
    };
  };
  const rateOf = (state) => (state.link === "own" ? state.rate : LINKS[state.link][1]);

  /** The command that asks the same, and counts what Hugging Face's Llama does. */
  function commandOf(state) {
    if (state.fused_norms) return "# the command counts Hugging Face's norms, of several operations";
    const { shape, rates } = askedOf(state);
    const fields = {
      num_hidden_layers: shape.layers, hidden_size: shape.hidden, intermediate_size: shape.intermediate,
      num_attention_heads: shape.heads, num_key_value_heads: shape.kv_heads, head_dim: shape.head_dim, vocab_size: shape.vocab || 1,
    };
    const sizes = Object.entries(fields).map(([name, value]) => `--set ${name}=${value}`);
    const words = ["python -m offload plan llama", ...sizes, `--tokens ${state.tokens}`, `--memory ${state.memory}GiB`];
    if (state.batch > 1) words.push(`--batch ${state.batch}`);
    if (state.link !== "pcie5") words.push(`--link ${rateOf(state)}GB`);
    if (state.tflops !== 630) words.push(`--flops ${state.tflops}e12`);
    if (rates.bytes_per_s !== 4e12) words.push(`--bandwidth ${rates.bytes_per_s / 1e12}e12`);
    if (state.host) words.push(`--host-memory ${state.host}GiB`);
    if (state.state !== 4) words.push(`--optimizer-bytes ${state.state}`);
    if (state.fused_loss) words.push("--fused-loss");
    return words.join(" ");
  }

  // --- Elements ---------------------------------------------------------------------------------------------------

  function element(name, attributes = {}, ...children) {
    const [tag, drawn] = name.split(":").reverse();
    const found = drawn ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
    for (const [key, value] of Object.entries(attributes)) {
      if (value !== undefined && value !== false) found.setAttribute(key, value === true ? "" : value);
    }
    found.append(...children.filter((child) => child !== null));
    return found;
  }
  const svg = (name, attributes, ...children) => element(`svg:${name}`, attributes, ...children);
  const text = (x, y, words, attributes = {}) => svg("text", { x, y, ...attributes }, words);

  const SHOWN = [
    ["keep all", "keep all"], ["whole layers", "whole layers"], ["regions", "plan by region"],
    ["checkpointing", "every layer checkpointed"],
  ];
  let state = null, answer = null, curve = null, drawing = 0;
  let beside = null; // what memory does not change, of the answer
  const inputs = {}, outputs = {}, parts = {};

  function shownValue(name, values) {
    const value = state[name];
    return `${name === "bandwidth" ? fixed(value, 2) : value.toLocaleString("en")}${values.unit ? ` ${values.unit}` : ""}`;
  }

  function control([name, label, how, values]) {
    const id = `planner-${name}`;
    if (how === "check") {
      inputs[name] = element("input", { id, type: "checkbox" });
      inputs[name].addEventListener("change", () => changed(name, inputs[name].checked));
      return element("div", { class: "planner-check" }, inputs[name], element("label", { for: id }, label));
    }
    if (how === "choice") {
      inputs[name] = element("select", { id }, ...values.map(([value, words]) => element("option", { value }, words)));
      inputs[name].addEventListener("change", () => changed(name, values[inputs[name].selectedIndex][0]));
      return element("div", { class: "planner-field" }, element("label", { for: id }, label), inputs[name]);
    }
    const { min = 0, max = values.list?.length - 1, step = 1 } = values;
    inputs[name] = element("input", { id, type: "range", min, max, step });
    const asked = () => Number(inputs[name].value);
    inputs[name].addEventListener("input", () => changed(name, values.list ? values.list[asked()] : asked()));
    outputs[name] = element("output", { for: id });
    return element("div", { class: "planner-field" }, element("label", { for: id }, label), outputs[name], inputs[name]);
  }

  function changed(name, value) {
    state[name] = value;
    if (name === "preset") state = ofPreset(value);
    if (name === "gpu" && value in GPUS) Object.assign(state, { ...GPUS[value], name: undefined });
    if (["tflops", "bandwidth"].includes(name)) state.gpu = "own";
    if (name === "rate") state.link = "own";
    if (name !== "show") state.show = ""; // back to what is advised
    showControls();
    clearTimeout(drawing);
    drawing = setTimeout(() => { writeAddress(state); update(); }, 10);
  }

  function showControls() {
    inputs.preset.value = isPreset(state) ? state.preset : OWN[0];
    inputs.rate.closest("div").hidden = state.link !== "own";
    for (const [name, , how, values] of FIELDS) {
      if (how === "check") inputs[name].checked = state[name];
      else if (how === "choice") inputs[name].value = state[name];
      else {
        inputs[name].value = values.list ? values.list.indexOf(state[name]) : state[name];
        outputs[name].textContent = shownValue(name, values);
        inputs[name].setAttribute("aria-valuetext", outputs[name].textContent);
      }
    }
  }

  function build() {
    const presets = Object.entries(PRESETS).map(([value, [name]]) => element("option", { value }, name));
    presets.push(element("option", { value: OWN[0], disabled: true }, OWN[1]));
    inputs.preset = element("select", { id: "planner-preset" }, ...presets);
    inputs.preset.addEventListener("change", () => changed("preset", inputs.preset.value));
    const basic = FIELDS.filter((field) => !field[4]), more = FIELDS.filter((field) => field[4]);
    parts.summary = element("p", { class: "planner-summary", role: "status", "aria-live": "polite" });
    for (const name of ["ways", "legend", "curve", "streams"]) parts[name] = element("div", { class: `planner-${name}` });
    parts.python = element("pre", { tabindex: "0", role: "region", "aria-label": "Python to paste" });
    parts.command = element("pre", { tabindex: "0", role: "region", "aria-label": "Command that asks the same" });
    const code = (pre) => element("div", { class: "highlight" }, pre);
    return element("section", { id: "planner", class: "planner", "aria-label": "Planner" },
      element("div", { class: "planner-head" },
        element("h2", {}, "Planner"), element("label", { for: "planner-preset" }, "Begin with "), inputs.preset),
      element("div", { class: "planner-controls", role: "group", "aria-label": "What is trained, and on what" },
        ...basic.map(control),
        element("details", { class: "planner-wide" },
          element("summary", {}, "Device, optimizer, head"), element("div", { class: "planner-more" }, ...more.map(control)))),
      element("div", { class: "planner-answer" },
        parts.summary, code(parts.python), parts.curve, parts.legend, parts.ways, parts.streams,
        element("p", { class: "planner-note" }, "Operation by operation, in a shell; ",
          element("a", { href: "reference/command_line.html#what-is-counted" }, "what is counted, and what is not"), ":"),
        code(parts.command)));
  }

  // --- What comes out ---------------------------------------------------------------------------------------------

  function update() {
    const begin = performance.now();
    answer = planner.answer(askedOf(state));
    const { ways, chosen, profile, link, left_bytes } = answer;
    const plans = Object.fromEntries(ways.filter((way) => way.plan).map((way) => [way.name, way.plan]));
    if (beside?.profile !== profile) {
      beside = {
        profile, whole: planner.wholeLayers(profile, link),
        checkpoints: [false, true].map((offloads) => planner.checkpointing(profile, link, offloads)),
      };
    }
    const { whole, checkpoints } = beside, [checkpointed] = checkpoints, free = planner.freePlan(whole);
    plans.checkpointing = checkpointed;
    const rows = [...ways, { name: "checkpointing", misfit: answer.toomuch(checkpointed.peak_bytes), ...checkpointed }];
    const kept = plans["keep all"];
    showSummary(chosen, kept, free, left_bytes);
    parts.python.textContent = pythonOf(chosen);
    parts.command.textContent = commandOf(state);
    let shown = state.show || chosen?.name || "regions";
    if (shown === "streamed weights" || !plans[shown]) shown = plans.regions ? "regions" : "keep all";
    showWays(rows, kept, chosen, shown, plans);
    const title = SHOWN.find(([key]) => key === shown)[1];
    curve = {
      streams: () => drawStreams(plans[shown], title, left_bytes),
      kept, left_bytes, checkpoints, plan: [], free, whole,
      chosen: chosen?.plan && chosen.name !== "streamed weights" ? chosen.plan : null,
    };
    curve.streams();
    drawCurve();
    const told = ways.map(({ plan, ...way }) => way);
    const short = { do: chosen && chosen.name, ways: told, saved_bytes: answer.saved_bytes, free: free.num_layers };
    parts.root.dataset.answer = JSON.stringify(short); // for tests
    parts.root.dataset.took = Math.round(performance.now() - begin);
    parts.root.dataset.state = "curve";
    fillCurve(answer, curve);
  }

  /** The curve of plans, budget by budget, so that the sliders never wait for it. */
  function fillCurve({ search }, filling) {
    const least = planner.plan(search, 0).least_bytes, most = filling.kept.peak_bytes, points = 14;
    const next = (number) => {
      if (filling !== curve) return; // asked anew meanwhile
      const begin = performance.now();
      while (number < points && performance.now() - begin < 30) {
        const { step_s, peak_bytes } = planner.plan(search, Math.ceil(least + (most - least) * (number / (points - 1)) ** 1.8));
        if (step_s) filling.plan.push({ step_s, peak_bytes });
        number += 1;
      }
      drawCurve();
      if (number < points) setTimeout(() => next(number), 0);
      else Object.assign(parts.root.dataset, { curve: JSON.stringify(filling.plan), state: "done" });
    };
    setTimeout(() => next(0), 0);
  }

  function more(step_s, kept) {
    const share = fixed(Math.abs(100 * (step_s / kept.step_s - 1)), 1);
    return `${step_s >= kept.step_s || share === "0.0" ? "+" : "−"}${share}%`;
  }

  const ADVICE = {
    "keep all": "All fits", "whole layers": "Offload whole layers", regions: "Plan by region", "streamed weights": "Let prepare() hold weights on the host",
  };

  function showSummary(chosen, kept, free, left) {
    const loss = answer.loss_bytes ? " and the loss" : "";
    const has = left > 0
      ? `${formatBytes(left)} are left for activations${loss}, which take ${formatBytes(kept.peak_bytes)} if all are kept.`
      : `What is fixed takes ${formatBytes(answer.fixed_bytes)}: more than can be used.`;
    const bytes = answer.profile.layer.saved_bytes * free.num_layers;
    const freely = `Free on this link: ${free.num_layers} of ${answer.shape.layers} whole layers${bytes ? `, ${formatBytes(bytes)}` : ""}.`;
    let does = "Nothing fits: fewer tokens, or more memory.";
    if (chosen) {
      const change = chosen.name === "keep all" ? "" : ` (${more(chosen.step_s, kept)})`;
      const host = chosen.host_bytes ? `, ${formatBytes(chosen.host_bytes)} on the host` : "";
      does = `${ADVICE[chosen.name]}: ${formatS(chosen.step_s)} a step${change}${host}.`;
    }
    parts.summary.replaceChildren(element("strong", {}, does), ` ${has} ${freely}`);
  }

  function pythonOf(chosen) {
    if (!chosen) return "# nothing fits: fewer tokens, a larger GPU, or more host memory";
    if (chosen.name === "keep all") return "# all fits: nothing to do";
    return `import offload\n\noffload.${chosen.write}`;
  }

  /** Why a way is not the advised one. */
  function whyNot({ name, misfit, step_s }, chosen) {
    if (misfit) return `does not fit: ${misfit}`;
    if (chosen?.name === "streamed weights" && name === chosen.name) return "without the optimizer's step; prepare() may find less to hold there";
    if (!chosen || name === chosen.name) return "";
    if (chosen.name === "keep all") return "not needed: all fits";
    const slower = step_s / chosen.step_s - 1;
    if (slower > 0.005) return `${fixed(100 * slower, 1)}% slower than the advised way`;
    return name === "streamed weights" ? "the optimizer steps on the host, which is not counted" : "no faster than the advised way";
  }

  function showWays(rows, kept, chosen, shown, plans) {
    const names = { ...Object.fromEntries(SHOWN), "streamed weights": "weights streamed" };
    const body = rows.map((row) => {
      const { name, step_s, peak_bytes, host_bytes } = row, why = whyNot(row, chosen);
      const id = `planner-show-${name.replace(" ", "-")}`;
      const radio = element("input", { type: "radio", name: "planner-show", id, disabled: name === "streamed weights" || !plans[name] });
      const label = element("label", { for: id }, names[name], why ? element("small", {}, why) : null);
      radio.checked = name === shown;
      radio.addEventListener("change", () => { changed("show", name); parts.focus = id; });
      const none = step_s === null, cell = (words) => element("td", {}, none ? "–" : words());
      return element("tr", { class: name === chosen?.name ? "planner-chosen" : undefined, "data-way": name },
        element("th", { scope: "row" }, element("span", {}, radio, label)),
        cell(() => formatS(step_s)), cell(() => more(step_s, kept)),
        cell(() => formatBytes(peak_bytes)), cell(() => formatBytes(host_bytes)));
    });
    const heads = ["drawn below", "step", "change", "peak", "on host"].map((name) => element("th", { scope: "col" }, name));
    parts.ways.replaceChildren(element("table", {}, element("thead", {}, element("tr", {}, ...heads)), element("tbody", {}, ...body)));
    if (parts.focus) document.getElementById(parts.focus)?.focus();
    parts.focus = null;
  }

  // --- Drawings, in the pixels that there are ---------------------------------------------------------------------

  /** Round numbers from 0 to most. */
  function ticks(most, count) {
    const rough = most / count, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= rough);
    return Array.from({ length: Math.floor(most / step + 1e-9) + 1 }, (_, at) => Number((at * step).toPrecision(6)));
  }
  const unitOf = (value, units) => units.find(([, size]) => value >= size) ?? units[units.length - 1];
  const timeUnit = (seconds) => unitOf(seconds / 2, [["s", 1], ["ms", 1e-3], ["µs", 1e-6]]);
  const sizeUnit = (nbytes) => unitOf(nbytes, [["GiB", GIB], ["MiB", 2 ** 20], ["KiB", 1024]]);
  const path = (points) => points.map(([x, y], at) => `${at ? "L" : "M"}${x.toFixed(1)},${y.toFixed(1)}`).join("");
  const marker = (kind, x, y, size, attributes) => {
    const shapes = {
      circle: `M${x - size},${y}a${size},${size} 0 1,0 ${2 * size},0a${size},${size} 0 1,0 ${-2 * size},0`,
      square: `M${x - size},${y - size}h${2 * size}v${2 * size}h${-2 * size}z`,
      diamond: `M${x},${y - 1.4 * size}l${1.4 * size},${1.4 * size}l${-1.4 * size},${1.4 * size}l${-1.4 * size},${-1.4 * size}z`,
      triangle: `M${x},${y - 1.3 * size}l${1.2 * size},${2.2 * size}h${-2.4 * size}z`,
    };
    return svg("path", { d: shapes[kind], ...attributes });
  };

  const MEASURED = [ // how a row's name begins, what it is, and its marker
    ["budget", "plan", "circle"], ["memory_budget", "plan", "circle"], ["whole", "whole", "square"],
    ["checkpoint all, inputs", "checkpoint", "triangle"], ["checkpoint", "checkpoint", "diamond"], ["nothing", "kept", "circle"],
  ];
  const measuredRows = () => (globalThis.offloadMeasured?.[state.preset]?.rows ?? []).map((row) => {
    const [, kind, shape] = MEASURED.find(([word]) => row.what.startsWith(word));
    return { ...row, kind, shape };
  });
  /** Measured points belong to what was measured; memory and what is drawn may be anything. */
  const asMeasured = () => {
    const usual = ofPreset(state.preset);
    return FIELDS.every(([name]) => ["memory", "host", "gpu"].includes(name) || state[name] === usual[name]);
  };

  /** An entry of a legend. */
  const key = (drawn, words) => element("span", {}, svg("svg", { width: 16, height: 14, "aria-hidden": "true" }, drawn), words);

  function axes(width, height, frame, mostX, mostY, unitX, unitY, name, labels) {
    const x = (value) => frame.left + (value / mostX) * (width - frame.left - frame.right);
    const y = (value) => height - frame.bottom - (value / mostY) * (height - frame.top - frame.bottom);
    const picture = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": name });
    for (const tick of ticks(mostX / unitX[1], Math.max(2, width / 90))) {
      picture.append(svg("path", { class: "planner-grid", d: `M${x(tick * unitX[1])},${frame.top}V${height - frame.bottom}` }));
      picture.append(text(x(tick * unitX[1]), height - frame.bottom + 15, `${tick}`, { "text-anchor": "middle" }));
    }
    for (const tick of ticks(mostY / unitY[1], Math.max(2, (height - frame.top - frame.bottom) / 45))) {
      picture.append(svg("path", { class: "planner-grid", d: `M${frame.left},${y(tick * unitY[1])}H${width - frame.right}` }));
      picture.append(text(frame.left - 5, y(tick * unitY[1]) + 4, `${tick}`, { "text-anchor": "end" }));
    }
    picture.append(text(width - frame.right, height - 3, `${labels[0]}, ${unitX[0]}`, { "text-anchor": "end" }));
    picture.append(text(2, frame.top - 7, `${labels[1]}, ${unitY[0]}`));
    return { picture, x, y };
  }

  function drawCurve() {
    const { kept, left_bytes, checkpoints, plan, whole, chosen } = curve;
    const measured = asMeasured() ? measuredRows() : [];
    const width = Math.max(240, parts.curve.clientWidth), height = Math.round(Math.min(330, Math.max(230, width * 0.55)));
    const frame = { left: 46, right: 12, top: 24, bottom: 34 };
    const near = left_bytes > 0 && 6 * left_bytes < kept.peak_bytes; // what fits is worth seeing; all kept is beyond the edge
    const mostX = 1.06 * (near ? 6 * left_bytes : Math.max(kept.peak_bytes, ...measured.map((row) => row.peak_bytes)));
    const steps = [...checkpoints, ...plan, ...measured, kept].map((one) => one.step_s);
    const mostY = 1.12 * Math.max(...steps, Math.min(whole[whole.length - 1].step_s, 1.25 * Math.max(...steps)));
    const said = (one) => `${formatS(one.step_s)} at ${formatBytes(one.peak_bytes)}`;
    const advised = chosen ? `; advised ${said(chosen)}` : "";
    const name = `Step time against activation peak: all kept ${said(kept)}; every layer checkpointed ${said(checkpoints[0])}${advised}.`;
    const { picture, x, y } = axes(width, height, frame, mostX, mostY, sizeUnit(mostX), timeUnit(mostY), name, ["activation peak", "step"]);
    const place = (one) => [x(one.peak_bytes), y(one.step_s)];
    if (left_bytes > 0 && left_bytes < mostX) {
      const at = x(left_bytes), right = at < width / 2;
      const place = { x: at, y: frame.top, width: width - frame.right - at, height: height - frame.top - frame.bottom };
      picture.append(svg("rect", { class: "planner-toomuch", ...place }));
      picture.append(svg("path", { class: "planner-budget", d: `M${at},${frame.top}V${height - frame.bottom}` }));
      const anchor = { "text-anchor": right ? "start" : "end" };
      picture.append(text(at + (right ? 5 : -5), height - frame.bottom - 6, `left: ${formatBytes(left_bytes)}`, anchor));
    }
    const clip = svg("g", { "clip-path": "url(#planner-clip)" });
    const inside = { x: frame.left, y: frame.top - 6, width: width - frame.left, height: height - frame.top - frame.bottom + 6 };
    picture.append(svg("clipPath", { id: "planner-clip" }, svg("rect", inside)), clip);
    clip.append(svg("path", { class: "planner-line planner-whole", d: path(whole.map(place)) }));
    for (const one of whole) clip.append(marker("square", ...place(one), 1.8, { class: "planner-whole" }));
    const line = [...plan].sort((a, b) => a.peak_bytes - b.peak_bytes);
    clip.append(svg("path", { class: "planner-line planner-plan", d: path(line.map(place)) }));
    for (const one of line) clip.append(marker("circle", ...place(one), 1.8, { class: "planner-plan" }));
    clip.append(marker("diamond", ...place(checkpoints[0]), 4, { class: "planner-checkpoint" }));
    clip.append(marker("triangle", ...place(checkpoints[1]), 4, { class: "planner-checkpoint" }));
    clip.append(marker("circle", ...place(kept), 4, { class: "planner-kept" }));
    for (const row of measured) clip.append(marker(row.shape, ...place(row), 4.5, { class: `planner-measured planner-${row.kind}` }));
    if (chosen) clip.append(marker("circle", ...place(chosen), 7.5, { class: "planner-here" }));
    if (near) {
      const beyond = `keep all: ${formatBytes(kept.peak_bytes)} →`;
      picture.append(text(width - frame.right, frame.top + 12, beyond, { "text-anchor": "end" }));
    }
    parts.curve.replaceChildren(picture);
    const keys = [
      ["circle", "planner-kept", "keep all"], ["circle", "planner-plan", "plan by region"], ["square", "planner-whole", "whole layers"],
      ["diamond", "planner-checkpoint", "every layer checkpointed"],
      ["triangle", "planner-checkpoint", "the same, inputs on the host"],
    ];
    if (chosen) keys.push(["circle", "planner-here", "advised"]);
    const gpu = globalThis.offloadMeasured?.[state.preset]?.gpu;
    if (measured.length) keys.push(["circle", "planner-measured planner-plan", `hollow: measured on ${gpu}`]);
    parts.legend.replaceChildren(...keys.map(([shape, kind, words]) => key(marker(shape, 8, 7, 4, { class: kind }), words)));
  }

  const LANES = [["compute", "compute"], ["d2h", "offload"], ["h2d", "reload"]];
  const KINDS = [
    ["forward", "forward"], ["backward", "backward"], ["recompute", "recompute"], ["other", "loss"], ["stall", "stall"],
    ["offload", "offload"], ["reload", "reload"],
  ];

  /** What each stream does, layer by layer, and the most that is on the device meanwhile. A layer's copies are one box. */
  function drawnOf({ times, layers, peaks, loss_s, other_s, num_layers }) {
    const spans = [], memory = [];
    const put = (lane, kind, layer, start_s, seconds) => {
      if (seconds > 0) spans.push({ lane, kind, layer, start_s, end_s: start_s + seconds });
    };
    let idle = 0;
    layers.forEach(({ forward_s, offload_s }, number) => {
      put("compute", "stall", number, idle, times.forward[number] - idle);
      put("compute", "forward", number, times.forward[number], forward_s);
      if (number < num_layers) put("d2h", "offload", number, times.offloaded[number] - offload_s, offload_s);
      idle = times.forward[number] + forward_s;
      memory.push([times.forward[number], peaks.forward[number]]);
    });
    put("compute", "other", null, times.loss, loss_s);
    memory.push([times.loss, peaks.loss]);
    for (let number = layers.length - 1; number >= 0; number--) {
      const { backward_s, recompute_s, reload_s } = layers[number], [begin, end] = [times.backward[number], times.ended[number]];
      const waits = end - begin - backward_s > 1e-9 * end ? end - begin - backward_s : 0;
      put("compute", "stall", number, begin, waits);
      put("compute", "recompute", number, begin + waits, recompute_s);
      put("compute", "backward", number, begin + waits + recompute_s, backward_s - recompute_s);
      if (number < num_layers) put("h2d", "reload", number, times.reload[number], reload_s);
      memory.push([begin, peaks.backward[number]]);
    }
    put("compute", "other", null, times.end, other_s);
    return { spans, memory: [...memory, [times.end, 0]] };
  }

  function drawStreams(shown, title, left) {
    const { step_s, peak_bytes, stall_s } = shown, { spans, memory } = drawnOf(shown);
    const width = Math.max(240, parts.streams.clientWidth), row = 26, lower = 92;
    const frame = { left: 56, right: 12, top: 3 * row + 46, bottom: 34 }, height = frame.top + lower + frame.bottom;
    const most = 1.12 * Math.max(peak_bytes, left > 0 && left < 1.6 * peak_bytes ? left : 0);
    const unit = timeUnit(step_s);
    const peak = formatBytes(peak_bytes);
    const name = `One step, ${title}: ${formatS(step_s)}, of which compute waits ${formatS(stall_s)}; at most ${peak} on the device.`;
    const { picture, x, y } = axes(width, height, frame, step_s, most, unit, sizeUnit(most), name, ["time", "on the device"]);
    const hatch = { id: "planner-hatch", width: 5, height: 5, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" };
    picture.prepend(svg("defs", {}, svg("pattern", hatch, svg("path", { d: "M0,0V5", class: "planner-grid" }))));
    LANES.forEach(([lane, words], number) => {
      const top = 22 + number * row;
      picture.append(text(2, top + 15, words));
      const found = spans.filter((span) => span.lane === lane);
      const widthOf = (box) => Math.max(x(box.end_s) - x(box.start_s) - 0.4, 0.4);
      const letters = { forward: "F", backward: "B" };
      const labelOf = (box) => (box.layer === null || box.kind === "stall" ? "" : `${letters[box.kind] ?? ""}${box.layer}`);
      // Boxes of a kind are labelled alike, if all have room.
      const narrow = new Set(found.filter((box) => widthOf(box) < 7 * labelOf(box).length + 2).map((box) => box.kind));
      for (const box of found) {
        const wide = widthOf(box), label = narrow.has(box.kind) || box.kind === "recompute" ? "" : labelOf(box);
        const place = { x: x(box.start_s).toFixed(2), y: top, width: wide.toFixed(2), height: row - 6 };
        picture.append(svg("rect", { class: `planner-${box.kind}`, ...place }));
        const middle = { "text-anchor": "middle", class: `planner-on-${box.kind}` };
        if (label) picture.append(text(x((box.start_s + box.end_s) / 2), top + 14, label, middle));
      }
    });
    picture.append(text(2, 13, `${title}: ${formatS(step_s)}${stall_s ? `, waits ${formatS(stall_s)}` : ""}, peak ${peak}`));
    const steps = memory.flatMap(([time, nbytes], at) => [...(at ? [[x(time), y(memory[at - 1][1])]] : []), [x(time), y(nbytes)]]);
    const ended = [...steps, [x(step_s), y(memory[memory.length - 1][1])]];
    picture.append(svg("path", { class: "planner-held", d: `${path(ended)}V${y(0)}H${x(0)}Z` }));
    if (left > 0 && left <= most) {
      picture.append(svg("path", { class: "planner-budget", d: `M${frame.left},${y(left)}H${width - frame.right}` }));
    }
    const present = KINDS.filter(([kind]) => spans.some((span) => span.kind === kind));
    const box = { x: 2, y: 2, width: 12, height: 10 };
    const keys = present.map(([kind, words]) => key(svg("rect", { ...box, class: `planner-${kind}` }), words));
    parts.streams.replaceChildren(picture, element("div", { class: "planner-legend" }, ...keys));
  }

  // --- Begin ------------------------------------------------------------------------------------------------------

  const picture = document.querySelector('img[src$="budgets.svg"]')?.closest("p, figure, div");
  if (!picture) return;
  state = readAddress();
  parts.root = build();
  picture.after(parts.root);
  picture.hidden = true;
  try {
    showControls();
    update();
  } catch (error) { // the picture is better than half a planner
    parts.root.remove();
    picture.hidden = false;
    throw error;
  }
  if (location.hash.startsWith(ANCHOR)) parts.root.scrollIntoView();
  addEventListener("hashchange", () => {
    if (!location.hash.startsWith(ANCHOR)) return;
    state = readAddress();
    showControls();
    update();
  });
  let wide = parts.curve.clientWidth;
  new ResizeObserver(() => {
    if (parts.curve.clientWidth === wide) return;
    wide = parts.curve.clientWidth;
    drawCurve();
    curve.streams();
  }).observe(parts.curve);
})();
