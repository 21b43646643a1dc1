/* How the site's search weighs what it finds: Sphinx's own numbers, and the first function. */
var Scorer = {
  // A heading that has the question's words in their order comes before pages that have each of them somewhere.
  score: ([page, title, anchor, description, score, file, kind]) => score + (kind === "title" ? 15 : 0),
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
