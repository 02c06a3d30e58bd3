// Answers of the start page's planner: reads questions as JSON from standard input, and writes an answer for each.
"use strict";

const { readFileSync } = require("node:fs");
require("../../docs/_static/planner_core.js");
require("../../docs/_static/planner_plans.js");
const planner = globalThis.offloadPlanner;

const numbers = (set) => [...set].sort((a, b) => a - b);
const told = (policies) =>
  policies.map((one) => one && { kept: numbers(one.kept), offloaded: numbers(one.offloaded) });
const ofStep = ({ step_s, peak_bytes, times }) => ({ step_s, peak_bytes, times });
const ofPlan = (made) =>
  made.least_bytes !== undefined
    ? { least_bytes: made.least_bytes }
    : {
        ...ofStep(made),
        stall_s: made.stall_s,
        num_layers: made.num_layers,
        host_bytes: made.host_bytes,
        recompute_s: made.recompute_s,
        policies: told(made.policies),
      };

const answers = {
  plan: ({ profile, link, budgets, host }) => {
    const whole = planner.wholeLayers(profile, link);
    const search = new planner.Search(profile, link);
    return {
      plans: budgets.map((budget) => ofPlan(planner.plan(search, budget, host ?? Infinity))),
      whole: whole.map(ofStep),
      free: planner.freePlan(whole).num_layers,
      checkpointing: [false, true].map((offloads) => ofStep(planner.checkpointing(profile, link, offloads))),
    };
  },
  command: (asked) => {
    const { ways, chosen, profile, shape, fixed_bytes, saved_bytes, loss_bytes } = planner.answer(asked);
    return {
      ways: ways.map(({ plan, ...way }) => way),
      chosen: chosen && chosen.name,
      layer: profile.layer,
      loss_s: profile.loss_s,
      shape, fixed_bytes, saved_bytes, loss_bytes,
    };
  },
  text: (value) => ({
    bytes: planner.formatBytes(value),
    s: planner.formatS(value),
    fixed: planner.fixed(value, 2),
  }),
};

const questions = JSON.parse(readFileSync(0, "utf8"));
process.stdout.write(JSON.stringify(questions.map(([kind, asked]) => answers[kind](asked))));
