// What search finds first: a page that helps, before a page that only mentions the word.
const pageWeights = [
  [/^docs\/howto\//, 2],
  [/^docs\/explanation\/hardware/, 1.5],
  [/^notebooks\//, 0.9],
  [/^docs\/reference\//, 0.7],
  [/^docs\/(caveats|benchmarks)/, 0.6],
  [/^CHANGELOG/, 0.2],
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
    const named = words && title.toLowerCase().includes(words) ? 4 : 1; // all of them, in the title
    return score * named * (pageWeights.find(([pages]) => pages.test(page))?.[1] ?? 1);
  },
};
