// Which page the search finds first: the page that answers what readers type, then pages that help, then pages that only
// mention the word. A page is found only if it contains all words of the query.
const answers = {
  "docs/out_of_memory": ["cuda out of memory", "out of memory", "oom", "outofmemoryerror", "gpu memory full", "memory error"],
  "docs/reference/troubleshooting": ["nothing was offloaded", "error", "warning", "slow", "stall", "no memory saved", "wasted", "late_reloads", "skipped", "nsys", "profiler", "timeline", "perfetto", "stats"],
  "docs/howto/budget": ["min_bytes", "memory_budget", "memory budget", "policies", "policy", "region", "regions", "profile", "compile", "max_host_bytes", "num_layers"],
  "docs/howto/worked": ["8b", "llama", "llama-3-8b", "llama-3.1-8b", "llama 8b", "8b fine-tune", "24 gb", "80 gb", "lora 24 gb", "fsdp2 out of memory"],
  "docs/explanation/limits": ["pinned memory", "pinning", "torch.compile", "fp8", "wsl", "container", "docker", "when not to use", "host memory"],
  "docs/quickstart": ["cpu offload", "activation offload", "activation offloading", "getting started", "example"],
  "docs/howto/trainers": [
    "multi gpu", "multi-gpu", "several gpus", "ddp", "fsdp", "fsdp2", "lora", "qlora", "peft", "trl", "hugging face", "huggingface", "trainer", "lightning",
    "moe", "accelerate",
  ],
  "docs/will_it_fit": ["rtx 4090", "4090", "planner", "how much memory"],
  "docs/explanation/hardware": ["a100", "h100", "gh200", "numa", "pcie", "nvlink", "bandwidth"],
  "docs/installation": ["windows", "rocm", "amd", "mac", "macos", "licence", "license", "citation", "cite", "pytorch version", "python version", "install"],
  "docs/howto/pipeline": ["pipeline parallel", "pipeline parallelism", "pipeline", "1f1b"],
  "docs/howto/long_context": ["128k", "long context", "long sequence", "logits"],
  "docs/howto/weight_streaming": ["stream weights", "weights", "weight offload"],
  "docs/howto/recipe": ["full fine-tune", "fine-tune", "prepare", "recipe", "optimizer state", "optimizer", "adamw", "stream_optimizer", "accumulation", "gradient accumulation", "clipping", "state_dict"],
  "docs/howto/migrate": ["save_on_cpu", "transformer engine", "activation checkpointing", "gradient checkpointing", "checkpointing", "torchtune"],
  "docs/howto/cuda_graphs": ["cuda graph", "cuda graphs"],
  "docs/explanation/comparison": ["deepspeed", "megatron", "unsloth", "axolotl", "comparison"],
  "notebooks/01_basic": ["tutorial", "notebook"],
};
const pageWeights = [
  [/^docs\/(howto|out_of_memory|quickstart)/, 2],
  [/^docs\/explanation\/hardware/, 1.5],
  [/^notebooks\//, 0.9],
  [/^docs\/reference\/(?!troubleshooting|glossary|command)/, 0.7],
  [/^docs\/(explanation\/limits|benchmarks)/, 0.6],
  [/^(CHANGELOG|docs\/contributing)/, 0.2],
];

// Sphinx asks for a variable of this name.
var Scorer = {
  // Sphinx's own scores, for where a word is found.
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,

  score: ([page, title, , , score]) => {
    const words = (new URLSearchParams(location.search).get("q") ?? "").trim().toLowerCase();
    const answered = answers[page]?.includes(words) ? 1000 : 1;
    const named = words && title.toLowerCase().includes(words) ? 4 : 1; // all of them, in the title
    return score * answered * named * (pageWeights.find(([pages]) => pages.test(page))?.[1] ?? 1);
  },
};
