// Answers of the start page's planner: reads questions as JSON from standard input, and writes an answer for each.
"use strict";

const { readFileSync } = require("node:fs");
require("../../docs/_static/planner_core.js");
require("../../docs/_static/planner_plans.js");
const planner = globalThis.offloadPlanner;

const numbers = (set) => [...set].sort((a, b) => a - b);
const told = (policies) =>
  policies.map((one) => one && { kept: numbers(one.kept), offloaded: numbers(one.offloaded) });
const ofLanes = (spans) => ["compute", "d2h", "h2d"].map((lane) => spans.filter((span) => span.lane === lane));
const ofStep = ({ step_s, peak_bytes, spans, memory }) => ({ step_s, peak_bytes, memory, lanes: ofLanes(spans) });
const ofPlan = (made) =>
  made.least_bytes !== undefined
    ? { least_bytes: made.least_bytes }
    : {
        ...ofStep(made),
        num_layers: made.num_layers,
        host_bytes: made.host_bytes,
        recompute_s: made.recompute_s,
        policies: told(made.policies),
      };

const answers = {
  plan: ({ profile, link, budget, host }) => {
    const free = planner.freePlan(profile, link);
    return {
      plan: ofPlan(planner.plan(profile, budget, link, host ?? Infinity)),
      free: { num_layers: free.num_layers, host_bytes: free.host_bytes },
      checkpointing: [false, true].map((travels) => ofStep(planner.checkpointing(profile, link, travels))),
    };
  },
  curves: ({ profile, link, budgets }) => {
    const search = new planner.Search(profile, link);
    return {
      plans: budgets.map((budget) => planner.outline(search, budget)),
      whole: planner.wholeLayers(profile, link),
      least_bytes: planner.leastBytes(search),
    };
  },
  command: (asked) => {
    const { ways, chosen, profile, parameters, fixed_bytes, usable_bytes, saved_bytes } = planner.answer(asked);
    return {
      ways: ways.map(({ plan, ...way }) => way),
      chosen: chosen && chosen.name,
      layer: profile.layers[0],
      loss_s: profile.loss_s,
      parameters, fixed_bytes, usable_bytes, saved_bytes,
    };
  },
  text: (value) => ({
    bytes: planner.formatBytes(value),
    s: planner.formatS(value),
    fixed: planner.fixed(value, 2),
  }),
  fsum: (values) => planner.fsum(values),
};

const questions = JSON.parse(readFileSync(0, "utf8"));
process.stdout.write(JSON.stringify(questions.map(([kind, asked]) => answers[kind](asked))));
